"""Calls kept ready: what a second call launches is what it would have launched as a first one."""

import contextvars
import functools
import gc
import inspect
import math
import threading
import time
import weakref
from dataclasses import fields, replace
from unittest import mock

import numpy as np
import pytest
import stand_in_device
import stand_in_torch
from helpers import random_inputs
from stand_in_device import Address, aligned, on_gpu, owner_of
from stand_in_torch import Tensor

import fa_numba
from fa_numba import Tiles
from fa_numba import device as devices
from fa_numba.choices.requests import Choices
from fa_numba.device import launch_record, planning_for
from fa_numba.host import binding, launch_cache, planning
from fa_numba.host.arrays import address_and_kind
from fa_numba.mods.blocks import BlockSize
from fa_numba.options import AttentionOptions

SIZES = (2, 2, 1, 5, 9, 4)  # B, Hq, Hk, Nq, Nk, d


def inputs(seed=0, sizes=SIZES):
    return random_inputs(*sizes, seed=seed)


def emulated(function, *arrays, **options):
    """The call on the emulator, with NumPy arrays."""
    with devices.using("emulator"):
        found = function(*arrays, **options)
    return found if isinstance(found, tuple) else (found,)


def values(found):
    return [x.values for x in (found if isinstance(found, tuple) else (found,))]


def assert_same(found, want):
    for a, b in zip(values(found), want, strict=True):
        np.testing.assert_array_equal(a, b)


ARRAYS = ("bias", "attn_mask", "alibi_slopes")  # options that are arrays on the device


def on_device(options, make=on_gpu):
    return {n: make(x) if n in ARRAYS else x for n, x in options.items()}


OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "scale": {"scale": np.float64(0.3), "tiles": Tiles(16, 16)},
    "window": {"window": (3, 1), "softcap": 2.0},
    "bias": {"bias": (2, 1, 5, 9), "alibi_slopes": (2,)},
    "bias of fewer axes": {"alibi_slopes": (2, 2), "bias": (9,), "causal": True},
    "mask": {"attn_mask": (2, 1, 5, 9), "alibi_slopes": (2,)},
    "lengths": {"q_lens": (5, 2), "kv_lens": (0, 9)},
    "dropout": {"dropout_p": 0.3, "seed": 2**63 + 5, "offset": 2**31 + 1},
}
FORWARD = {
    "standard": {"algorithm": "standard"},
    "fa1": {"algorithm": "fa1", "query_splits": 2},
    "fa2": {"algorithm": "fa2"},
}
BACKWARD = {
    "standard": {"algorithm": "standard"},
    "fa1": {"algorithm": "fa1"},
    "fa2": {"algorithm": "fa2"},
    "deterministic": {"algorithm": "fa2", "deterministic": True},
}


def options_of(name, seed):
    """Options with arrays of random values for shapes."""
    random = np.random.default_rng(seed)
    return {
        n: random.standard_normal(x, np.float32) if n in ARRAYS else x
        for n, x in OPTIONS[name].items()
    }


def places(launches, arrays):
    """Launches with each address as the number of the array in ``arrays`` that is there, or as the
    order in which it appears."""
    known = {x.values.ctypes.data: n for n, x in enumerate(arrays)}

    def place(word):
        is_address = isinstance(word, Address)
        return ("address", known.setdefault(word, len(known))) if is_address else word

    return [(*rest, [place(word) for word in words]) for *rest, words in launches]


def as_first(function, *arguments, **options):
    """The call as if there had been none before."""
    with mock.patch.dict(launch_cache._kept, clear=True):
        return function(*arguments, **options)


def assert_replayed(gpu, function, cases, own):
    """Calls with each of ``cases``, (arrays, options), of which only the first one is a first."""
    for n, (arrays, options) in enumerate(cases):
        want = emulated(function, *arrays, **options, **own)
        given = [on_gpu(x) for x in arrays]
        other = on_device(options)
        named = [*given, *(other[n] for n in ARRAYS if n in other)]
        with mock.patch.object(
            launch_cache, "run_and_keep", wraps=launch_cache.run_and_keep
        ) as first:
            gpu.launches, gpu.workspaces = [], []
            assert_same(function(*given, **other, **own), want)
            assert first.called == (n == 0)
        found, workspaces = places(gpu.launches, named), gpu.workspaces
        gpu.launches, gpu.workspaces, gpu.runs = [], [], False
        as_first(function, *given, **other, **own)
        gpu.runs = True
        assert found == places(gpu.launches, named) and workspaces == gpu.workspaces
        for x, before in zip(given, arrays, strict=True):
            np.testing.assert_array_equal(x.values, before)


@pytest.mark.in_turn("way")
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("way", FORWARD)
def test_the_forward_pass(gpu, way, name):
    cases = [(inputs(seed), options_of(name, seed)) for seed in range(2)]
    own = FORWARD[way] | {"return_lse": name != "plain"}
    assert_replayed(gpu, fa_numba.attention, cases, own)


@pytest.mark.in_turn("way")
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("way", BACKWARD)
def test_the_backward_pass(gpu, way, name):
    own = dict(BACKWARD[way])
    if {"bias", "attn_mask"} & set(OPTIONS[name]) and not own.get("deterministic"):
        own["return_dbias"] = True
    cases = []
    for seed in range(2):
        q, k, v = inputs(seed)
        options = options_of(name, seed)
        out, lse = emulated(fa_numba.attention, q, k, v, return_lse=True, **options)
        cases.append(((np.cos(out), q, k, v, out, lse), options))
    assert_replayed(gpu, fa_numba.attention_backward, cases, own)


# What Hopper's copy engine takes by maps: (algorithm, shapes of q and of k, options)
BNHD = {"layout": "bnhd", "causal": True}  # rows further apart than heads
PACKED = {"cu_seqlens_q": (0, 3, 20), "cu_seqlens_k": (0, 9, 30)}
BOXED = {
    "rows of one head": ("fa2", (1, 9, 2, 8), (1, 20, 2, 8), BNHD),
    "rows of several heads": ("fa2", (1, 4, 5, 8), (1, 2, 20, 8), {}),
    "rows from the end on": ("fa2", (2, 1, 9, 8), (2, 1, 20, 8), {"kv_lens": (20, 13)}),
    "sequences": ("fa2", (20, 1, 8), (30, 1, 8), PACKED),
    "pages": ("fa2", (1, 2, 5, 8), (3, 1, 16, 8), {"block_table": ((2, 0),), "kv_lens": (20,)}),
    "sums": ("fa1", (1, 9, 2, 8), (1, 140, 2, 8), BNHD),
}


def half_case(q_shape, k_shape, options, backward=False):
    """A call of random values in 16 bits, as ``assert_replayed`` takes it."""
    random = np.random.default_rng(0)
    shapes = (q_shape, k_shape, k_shape, q_shape)
    q, k, v, dout = (random.standard_normal(shape).astype(np.float16) for shape in shapes)
    if not backward:
        return (q, k, v), options
    saved = emulated(fa_numba.attention, q, k, v, return_lse=True, **options)
    return (dout, q, k, v, *saved), options


@pytest.mark.parametrize("name", BOXED)
def test_forward_by_tensor_maps(gpu, name):
    """The emulator copies what the maps say: one that is wrong gives another result, or none."""
    algorithm, *call = BOXED[name]
    own = {"algorithm": algorithm, "unit": "wgmma", "return_lse": True}
    own |= {"tiles": Tiles(64, 128)} if algorithm == "fa1" else {}
    assert_replayed(gpu, fa_numba.attention, [half_case(*call)], own)


@pytest.mark.parametrize(
    "name, own",
    [
        ("rows of one head", {"deterministic": True}), ("rows from the end on", {}),
        ("sequences", {"deterministic": True}), ("sequences", {}), ("sums", {}),
    ],
)  # fmt: skip
def test_backward_by_tensor_maps(gpu, name, own):
    algorithm, *call = BOXED[name]
    own = {"algorithm": algorithm, "unit": "wgmma", **own}
    assert_replayed(gpu, fa_numba.attention_backward, [half_case(*call, backward=True)], own)


def test_softmaxes(gpu, kept):
    """Each algorithm is a call of its own, and so is a call with ``out``."""
    for n, algorithm in enumerate(("naive", "safe", "online")):
        cases = [((np.random.default_rng(seed).random((3, 7), np.float32),), {}) for seed in (0, 1)]
        assert_replayed(gpu, fa_numba.softmax, cases, {"algorithm": algorithm})
        x, y = on_gpu(cases[0][0][0]), on_gpu(np.zeros((3, 7), np.float32))
        for _ in range(2):
            assert fa_numba.softmax(x, algorithm=algorithm, out=y) is y
            want = emulated(fa_numba.softmax, cases[0][0][0], algorithm=algorithm)
            assert_same(y, want)
            y.values[:] = 0
        assert len(kept) == 2 * (n + 1)


# --- what makes another call -----------------------------------------------------------------


# Arguments that equal those of a kept call and are refused: (those of the call, the refused ones)
ALMOST = {
    "causal": ({"causal": True}, {"causal": 1}),
    "scale": ({"scale": 1}, {"scale": True}),
    "window": ({"window": (1, 0)}, {"window": (True, 0)}),
    "window of a list": ({"window": [1, 0]}, {"window": [True, 0]}),
    "softcap": ({"softcap": 1.0}, {"softcap": True}),
    "dropout": ({"dropout_p": 0}, {"dropout_p": False}),
    "seed": ({"seed": 1}, {"seed": True}),
    "seed too large": ({"seed": 2**64 - 1}, {"seed": 2**64}),
    "offset": ({"offset": 0}, {"offset": -1}),
    "offset too large": ({"offset": 2**32 - 1}, {"offset": 2**32}),
    "offset of a truth value": ({"offset": 1}, {"offset": True}),
    "lengths": ({"kv_lens": (1, 0)}, {"kv_lens": (True, False)}),
    "lengths of another shape": ({"kv_lens": np.array([1, 0])}, {"kv_lens": np.array([[1, 0]])}),
    "return_lse": ({"return_lse": True}, {"return_lse": 1}),
    "splits": ({"query_splits": 1}, {"query_splits": True}),
    "tiles": ({}, {"tiles": [16, 16]}),
    "unit": ({}, {"unit": ["auto"]}),
    "an option that there is not": ({}, {"causality": None}),
    "stream": ({}, {"stream": True}),
    "another stream": ({}, {"stream": "first"}),
}


@pytest.mark.parametrize("case", ALMOST)
def test_what_equals_a_kept_call_and_is_refused(gpu, kept, case):
    good, bad = ALMOST[case]
    there = [on_gpu(x) for x in inputs()]
    fresh = []
    for options in (bad, good, bad):
        if options is good:
            fa_numba.flash_attention_1(*there, **good)
            assert kept
            continue
        with pytest.raises((TypeError, ValueError)) as refused:
            fa_numba.flash_attention_1(*there, **options)
        fresh.append((type(refused.value), str(refused.value)))
    assert fresh[0] == fresh[1] and next(iter(bad)) in fresh[0][1]
    assert len(gpu.launches) == 1 and len(kept) == 1


def test_a_window_is_kept_as_a_tuple(gpu, kept):
    window, there = [3, None], [on_gpu(x) for x in inputs()]
    for given in (window, (3, None), window):
        fa_numba.flash_attention_2(*there, window=given)
    assert len(kept) == 1
    window[1] = 0
    fa_numba.flash_attention_2(*there, window=window)
    assert len(kept) == 2


def test_calls_are_kept_by_lengths_of_any_library(gpu, torch, kept):
    there, lens = tensors(inputs()), np.array([7, 9])
    for given, calls in ((Tensor.of(lens), 1), (lens, 1), ([7, 9], 2), ((7, 9), 2)):
        fa_numba.flash_attention_2(*there, kv_lens=given)
        assert len(kept) == calls
    own = type("Own", (Tensor,), {})  # may see what is done to it
    for make in (Tensor.of, lambda x: own.of(aligned(x.shape, values=x))):
        fa_numba.flash_attention_2(*map(make, inputs()))
    assert len(kept) == 2
    torch.grad = False
    fa_numba.flash_attention_2(*tensors(inputs(), requires_grad=True), causal=True)
    assert len(kept) == 3


def test_what_fails_is_not_kept(gpu, kept):
    q, k, v = (on_gpu(x) for x in inputs())
    for bad in ((q, k, q), (q, on_gpu(np.float64(k.values)), v), (q, k, [1.0]), (q, k, v.values)):
        for _ in range(2):
            with pytest.raises((TypeError, ValueError)):
                fa_numba.flash_attention_2(*bad)
    assert not kept and not gpu.launches
    with (
        mock.patch.object(devices, "ordinal_of", side_effect=ValueError("no such memory")),
        pytest.raises(
            ValueError, match="q must be in host memory or on a GPU of .*got an array with"
        ),
    ):
        fa_numba.flash_attention_2(q, k, v)


def test_no_more_are_kept_than_a_number(gpu, kept, monkeypatch):
    monkeypatch.setattr(launch_cache, "KEPT", 3)
    q, k, v = inputs()
    there = [on_gpu(x) for x in (q, k, v)]
    for scale in (0.1, 0.2, 0.3, 0.4, 0.1, 0.4):
        found = fa_numba.flash_attention_2(*there, scale=scale)
        assert_same(found, emulated(fa_numba.flash_attention_2, q, k, v, scale=scale))
    scales = [key[key.index("scale") + 2] for key in kept]
    assert scales == [0.3, 0.4, 0.1]


def near(rows, reach):
    """Rows of a document, and so many behind them."""
    return lambda b, h, i, j: rows[i] == rows[j] or i - j == reach


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("algorithm", ["standard", "fa1", "fa2"])
def test_a_call_with_other_blocks_is_not_planned(gpu, kept, algorithm, backward):
    """What kernels read of blocks are arguments: where they lie and what they say may change."""
    sizes, tiles, own = (1, 2, 1, 40, 40, 4), Tiles(16, 16), {"algorithm": algorithm}
    function = fa_numba.attention_backward if backward else fa_numba.attention
    for n, found in enumerate((0, 7, 23)):
        rows = (np.arange(40) // (found + 3)).astype(np.int32)
        arrays = inputs(found, sizes)
        made = functools.partial(fa_numba.create_block_mask, tiles=tiles)
        with devices.using("emulator"):
            mask = made(near(rows, 1), 1, 1, 40, 40)
        if backward:
            saved = emulated(fa_numba.attention, *arrays, return_lse=True, block_mask=mask)
            arrays = (np.cos(saved[0]), *arrays, *saved)
        want = emulated(function, *arrays, block_mask=mask, **own)
        blocks = made(near(on_gpu(rows), 1), 1, 1, 40, 40)
        given = [on_gpu(x) for x in arrays]
        with mock.patch.object(
            launch_cache, "run_and_keep", wraps=launch_cache.run_and_keep
        ) as first:
            assert_same(function(*given, block_mask=blocks, **own), want)
            assert first.called == (n == 0) and len(kept) == 1
        assert owner_of(blocks.lists.at(0)["next_row"].pointer) == 0
        np.testing.assert_array_equal(blocks.blocks, mask.blocks)


def test_what_blocks_are_kept_by(gpu, torch, kept):
    """Their shape, and what their function is and captures, here nothing that lies on a GPU."""
    there, tiles = tensors(inputs(0, (1, 2, 2, 40, 40, 4))), Tiles(16, 16)

    def blocks(reach, heads=1):
        return fa_numba.create_block_mask(
            lambda b, h, i, j: i - j < reach, 1, heads, 40, 40, tiles=tiles
        )

    attend = fa_numba.flash_attention_2
    for calls, mask in ((1, blocks(3)), (1, blocks(3)), (2, blocks(9)), (3, blocks(9, 2))):
        with devices.using("emulator"):
            same = fa_numba.create_block_mask(mask.mask_mod, *mask.shape[:2], 40, 40, tiles=tiles)
        want = emulated(attend, *(x.values for x in there), block_mask=same)
        assert_same(attend(*there, block_mask=mask), want)
        assert len(kept) == calls
    with pytest.raises(ValueError, match="mask_mod cannot be given with a block_mask from"):
        attend(*there, block_mask=mask, mask_mod=mask.mask_mod)
    for calls, lens in enumerate(([40], [7]), 4):
        want = emulated(attend, *(x.values for x in there), block_mask=same, kv_lens=lens)
        assert_same(attend(*there, block_mask=mask, kv_lens=np.array(lens)), want)
        assert len(kept) == calls
    for calls, size in enumerate((Tiles(8, 16), Tiles(16, 32)), 6):
        want = emulated(attend, *(x.values for x in there), block_mask=same, tiles=size)
        for found in (mask, blocks(9, 2)):  # of equal blocks, elsewhere
            assert_same(attend(*there, block_mask=found, tiles=size), want)
            assert len(kept) == calls


# --- the key -----------------------------------------------------------------------------------


SLOPE, ARRAY = 0.5, np.arange(9, dtype=np.float32)


def scored(score, b, h, i, j):
    return score + SLOPE * j


def seen(b, h, i, j):
    return i >= j


# Two values of each option. Each makes another call, but the words of a seed are no part of it.
OF_OPTIONS = {
    "scale": (0.5, 0.25), "causal": (True, False), "window": ((1, 0), (0, 1)),
    "softcap": (1.0, 2.0), "score_mod": (scored, lambda score, b, h, i, j: score + 0.5 * i),
    "score_mod_grad": (scored, lambda score, b, h, i, j: score * 2.0),
    "mask_mod": (seen, lambda b, h, i, j: i > j),
    **{n: (np.zeros((5, 9)), np.zeros((1, 9))) for n in ("bias", "attn_mask")},
    **{n: (np.zeros(2), np.zeros((2, 2))) for n in ("alibi_slopes", "sinks")},
    "block_table": (np.zeros((2, 3), np.int32), np.zeros((2, 4), np.int32)),
    **{n: ((5, 2), (2, 5)) for n in ("q_lens", "kv_lens", "cu_seqlens_q", "cu_seqlens_k")},
    "check_table": (True, False), "dropout_p": (0.1, 0.2), "seed": (1, 2), "offset": (1, 2),
    "block_mask": (np.ones((2, 2), bool), np.eye(2, dtype=bool)),
    "layout": ("bhnd", "bnhd"), "precision": ("fp16x3", "bf16x3"),
    "q_scale": (0.5, np.zeros((2, 2), np.float32)), "k_scale": (0.5, 0.25),
    "v_scale": (np.zeros((1, 2), np.float32), np.zeros((2, 2), np.float32)),
    "out_dtype": ("float16", "float32"),
}  # fmt: skip
PLAIN = Choices("fa2")
ON_GPU = ("bias", "attn_mask", "alibi_slopes", "sinks", "block_table")
ON_GPU += ("q_scale", "k_scale", "v_scale")
WORDS = {"seed", "offset"}


@pytest.fixture
def key_of(gpu, torch):
    """The key of a call with a plain q, k and v, but for what is given."""
    q, k, v = map(on_gpu, inputs())

    def key(choices=PLAIN, out=None, q=q, **options):
        arrays = {n: x for n, x in options.items() if n in ON_GPU and hasattr(x, "shape")}
        options |= {n: on_gpu(x) for n, x in arrays.items()}
        call = launch_cache.describe_call(choices, (q, k, v), options, out)
        return None if call is None else call.key

    return key


def test_everything_that_launches_depend_on_is_in_the_key(key_of):
    names = AttentionOptions.__annotations__.keys()
    assert names == OF_OPTIONS.keys(), "of a new option: two values that make two calls"
    taken = inspect.signature(launch_cache.describe_call).parameters
    assert [*taken] == ["choices", "arrays", "options", "out"]
    found = [key_of()]
    for name in names:
        one, other = (key_of(**{name: x}) for x in OF_OPTIONS[name])
        if name in WORDS:
            assert one == other == found[0], name
        elif name == "block_table":
            assert one != other  # where it is given, lengths are its rows' neighbours
            assert key_of(block_table=OF_OPTIONS[name][0], check_table=True) is None
        else:
            found += [one, other]
    found += [key_of(choices=replace(PLAIN, **{n: x})) for n, x in CHOICES.items()]
    q = inputs()[0]
    found += [key_of(out=on_gpu(q)), key_of(out=on_gpu(np.float16(q)))]
    for where in (planning_for((8, 0), 99 * 1024), planning_for((8, 0), 99 * 1024, 60)):
        with where:
            found.append(key_of())
    assert len(set(found)) == len(found)


CHOICES = {"algorithm": "fa1", "tiles": Tiles(16, 16), "unit": "simt", "return_lse": True}


def test_contents_are_in_the_key_with_their_dtype(key_of, torch):
    """Of blocks as a digest; of arrays that torch or NumPy made, since others may be invalid."""
    lens, blocks = np.array([5, 2], np.int32), np.ones((1, 1, 50, 50), bool)
    keys = [launch_cache._content("q_lens", x) for x in (lens, lens.view(">i4"))]
    assert keys[0] != keys[1] and key_of(q_lens=Tensor.of(lens)) is not None
    assert key_of(q_lens=on_gpu(lens)) is None
    found = key_of(block_mask=blocks)
    assert max(len(x) for x in found if isinstance(x, bytes)) == 64
    assert max(len(x) for x in key_of(q_lens=np.zeros(99, int)) if isinstance(x, bytes)) == 99 * 8


def test_tensors_that_are_looked_up(torch, gpu):
    """Those on a GPU, of torch's own classes."""
    values = on_gpu(inputs()[0]).values
    plain, parameter = address_and_kind(Tensor.of(values)), stand_in_torch.Parameter()
    vars(parameter).update(vars(Tensor.of(values)))
    assert plain is not None and address_and_kind(parameter) == plain
    other = type("Other", (Tensor,), {}).of(values)
    on_host = Tensor.of(np.zeros((1, 2), np.float32))
    assert address_and_kind(other) is address_and_kind(on_host) is None


def test_everything_that_an_array_is_is_in_the_key(key_of, torch):
    """Its library, GPU, dtype, shape, strides, alignment and whether it can be written."""
    q = inputs()[0]
    wide = aligned((*q.shape[:-1], 8))
    arrays = {
        "": on_gpu(q),
        "GPU": on_gpu(q, gpu=1),
        "dtype": on_gpu(np.float16(q)),
        "shape": on_gpu(q[:, :, :4]),
        "strides": stand_in_device.Array(wide[..., :4]),
        "alignment": stand_in_device.Array(aligned(q.shape, offset=4)),
        "another alignment": stand_in_device.Array(aligned(q.shape, offset=8)),
        "library": Tensor.of(aligned(q.shape, values=q)),
        "a tensor's dtype": Tensor.of(aligned(q.shape, np.float16)),
        "a tensor's shape": Tensor.of(aligned((2, 2, 4, 4))),
        "a tensor's strides": Tensor.of(wide[..., :4]),
        "a tensor's alignment": Tensor.of(aligned(q.shape, offset=4)),
    }
    arrays["writable"] = stand_in_device.Array(aligned(q.shape, values=q), read_only=True)
    found = [key_of(q=x) for x in arrays.values()]
    assert None not in found
    assert len(set(found)) == len(found)
    assert key_of(q=on_gpu(q + 1)) == found[0]


def test_everything_that_a_block_mask_is_is_in_the_key(key_of):
    """A kept call is not checked again: a mask that was made for other lengths is another call."""
    mask, other = (
        fa_numba.create_block_mask(function, 1, 1, 5, 9, tiles=Tiles(16, 16))
        for function in (seen, lambda b, h, i, j: i > j)
    )
    changes = {
        "seqlen_q": 6,
        "seqlen_k": 10,
        "shape": (2, 1, 1, 1),
        "block_size": BlockSize(16, 32),
        "tiles": None,
        "captured": other.captured,
    }
    # Kernels read the lists where they are, and the others follow from the function.
    assert {x.name for x in fields(mask)} == {*changes, "lists", "mask_mod", "reads"}
    masks = [replace(mask, **{name: x}) for name, x in changes.items()]
    found = [key_of(block_mask=x) for x in (None, mask, *masks)]
    assert None not in found and len(set(found)) == len(found)
    assert key_of(block_mask=replace(mask, lists=other.lists)) == found[1]


def test_functions_that_differ_in_one_thing_are_other_calls(key_of):
    """In the name of a called function, a constant, a captured number, its type, an array."""

    def of(captured, array):
        return lambda score, b, h, i, j: score * captured + array[j]

    array = on_gpu(ARRAY)
    mods = [
        lambda score, b, h, i, j: math.sin(score),
        lambda score, b, h, i, j: math.cos(score),
        lambda score, b, h, i, j: score + 1.0,
        lambda score, b, h, i, j: score + 2.0,
        lambda score, b, h, i, j: score + 1,
        of(2.0, array),
        of(3.0, array),
        of(2, array),
        of(True, array),
        of(2.0, on_gpu(ARRAY[:5])),
        of(2.0, on_gpu(np.int32(ARRAY))),
    ]
    found = [key_of(score_mod=mod) for mod in mods]
    assert None not in found and len(set(found)) == len(found)
    assert key_of(score_mod=of(2.0, on_gpu(ARRAY + 1))) == found[5]
    before = key_of(score_mod=scored)
    with mock.patch.dict(globals(), {"SLOPE": 0.75}):
        assert key_of(score_mod=scored) != before


def test_arrays_of_one_slot_have_addresses_of_their_own():
    """Arrays of the workspace lie behind each other."""
    record = launch_record.LaunchRecord()
    one, other, again = (record.allocate((64,)) for _ in range(3))
    words = [record._word(x) for x in (one, other, again, one)]
    record.run([4096], 0)
    assert [x.value - 4096 for x in words] == [0, 256, 512, 0]
    assert words[0] is words[3]


# --- streams, contexts, memory, threads ------------------------------------------------------


def tensors(arrays, **facts):
    return [Tensor.of(aligned(x.shape, values=x), **facts) for x in arrays]


def test_the_workspace_is_the_plans(gpu):
    there = [on_gpu(x) for x in inputs()]
    for algorithm in ("standard", "fa1", "fa2"):
        plan = fa_numba.plan(there[0].shape, there[1].shape, algorithm=algorithm)
        for _ in range(2):
            with devices.track_memory() as memory:
                fa_numba.attention(*there, algorithm=algorithm)
            assert memory.peak_bytes == plan.workspace_bytes and memory.live_bytes == 0
            peak = memory.peak_bytes
            fa_numba.attention(*there, algorithm="standard")  # the trace has ended
            assert memory.peak_bytes == peak


def test_a_failed_launch_frees_the_workspace(gpu):
    there = [on_gpu(x) for x in inputs()]
    fa_numba.flash_attention_2(*there)
    failed = (launch_record.driver.CUresult.CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES,)
    with (
        mock.patch.object(launch_record.driver, "cuLaunchKernel", lambda *_: failed),
        devices.track_memory() as memory,
        pytest.raises(RuntimeError, match="fa2_forward .* failed: .* CUDA_ERROR_LAUNCH_OUT"),
    ):
        fa_numba.flash_attention_2(*there)
    assert memory.live_bytes == 0 and not gpu.live


def test_what_is_kept_holds_no_array(gpu, torch, kept):
    for make in (lambda x: Tensor.of(aligned(x.shape, values=x)), on_gpu):
        bias = aligned((5, 9), values=0.5)
        there = [make(x) for x in (*inputs(), bias)]
        out = make(aligned(there[0].shape))
        result = fa_numba.flash_attention_2(*there[:3], bias=there[3], out=out, return_lse=True)
        seen = [weakref.ref(x) for x in (*there, *result)]
        del there, out, result
        gc.collect()
        assert [x() for x in seen] == [None] * 6
    assert len(kept) == 2


def test_what_is_kept_holds_the_lengths_that_it_was_recorded_with(gpu, kept):
    """Also when other calls have taken their place among those that are on the GPU; not longer."""
    q, k, v = inputs()
    there = [on_gpu(x) for x in (q, k, v)]
    (want,) = emulated(fa_numba.flash_attention_2, q, k, v, q_lens=(5, 2), kv_lens=(9, 4))
    for _ in range(2):
        found = fa_numba.flash_attention_2(*there, q_lens=(5, 2), kv_lens=(9, 4))
        np.testing.assert_array_equal(found.values, want)
        lengths = [gpu.given[-1][name].ctypes.data for name in ("q_lens", "kv_lens")]
        binding._on_gpu.cache_clear()
        gpu.held.clear()
        gc.collect()
        assert list(map(owner_of, lengths)) == [0, 0]
    kept.clear()
    gc.collect()
    assert list(map(owner_of, lengths)) == [None, None]


def test_threads_take_turns(gpu, kept):
    """Two threads make one kept call, the second while the first is about to launch."""
    arrays = [inputs(seed) for seed in range(3)]
    want = [emulated(fa_numba.flash_attention_2, *x) for x in arrays]
    there = [[on_gpu(x) for x in given] for given in arrays]
    fa_numba.flash_attention_2(*there[2])
    launch, found = gpu.cuLaunchKernel, {}

    def late(*arguments):
        time.sleep(0.1)
        return launch(*arguments)

    def call(n):
        found[n] = fa_numba.flash_attention_2(*there[n])

    threads = [threading.Thread(target=call, args=(n,)) for n in range(2)]
    with mock.patch.object(launch_record.driver, "cuLaunchKernel", late):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for n in range(2):
        assert_same(found[n], want[n])
    assert len(kept) == 1


# --- torch -----------------------------------------------------------------------------------

# What a tensor says of itself -> what the call says of it
REFUSED = {
    "a gradient": ({"requires_grad": True}, ValueError, "q requires a gradient"),
    "negated": (
        {"negated": True},
        TypeError,
        r"q must not be a view that negates .*; pass q\.resolve_neg\(\)",
    ),
    "sparse": (
        {"layout": "sparse"},
        TypeError,
        r"q must be a dense tensor \(layout torch\.strided\), got layout sparse",
    ),
    "nested": (
        {"is_nested": True},
        TypeError,
        r"q must be a dense tensor, got a nested tensor; pack the sequences .*pass cu_seqlens_q",
    ),
    "dtype": (
        {"dtype": "torch.float64"},
        TypeError,
        "q must be float32, float16, bfloat16 or float8_e4m3fn, got float64",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_tensor_that_is_like_one_but_refused(gpu, torch, kept, case):
    facts, error, message = REFUSED[case]
    arrays = inputs()
    fa_numba.flash_attention_2(*tensors(arrays))
    q, *rest = tensors(arrays)
    vars(q).update(facts)
    with pytest.raises(error, match=message):
        fa_numba.flash_attention_2(q, *rest)
    assert len(kept) == len(gpu.launches) == 1


# --- on a GPU --------------------------------------------------------------------------------


@pytest.fixture
def real():
    return pytest.importorskip("torch")


def assert_equal(torch, found, want):
    for a, b in zip(found, want, strict=True):
        assert torch.equal(a, b)


def rows_of(torch, n, dtype, N=96):
    generator = torch.Generator("cuda").manual_seed(n)
    shape = (2, 4, N, 64)
    return [
        torch.randn(shape, device="cuda", generator=generator, dtype=torch.float32).to(dtype)
        for _ in range(4)
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(
    "algorithm, dtype",
    [("standard", "float32"), ("fa1", "float32"), ("fa2", "float32"),
     ("fa1", "float16"), ("fa2", "float16"), ("fa2", "bfloat16")],
)  # fmt: skip
def test_gpu_replays_bit_for_bit(real, kept, algorithm, dtype, name):
    options = {
        n: real.tensor(x, device="cuda") if n in ARRAYS else x
        for n, x in options_of(name, 0).items()
    }
    for added in {"bias", "attn_mask"} & options.keys():
        options[added] = real.randn((2, 1, 96, 96)[-options[added].ndim :], device="cuda")
    if "alibi_slopes" in options:
        options["alibi_slopes"] = real.rand((2, 4)[-options["alibi_slopes"].ndim :], device="cuda")
    if "kv_lens" in options:
        options |= {"q_lens": (96, 70), "kv_lens": (0, 96)}
    own = {"algorithm": algorithm}
    for seed in range(3):
        q, k, v, dout = rows_of(real, seed, getattr(real, dtype))
        found = fa_numba.attention(q, k, v, return_lse=True, **options, **own)
        want = as_first(fa_numba.attention, q, k, v, return_lse=True, **options, **own)
        assert_equal(real, found, want)
        plain = fa_numba.attention(q, k, v, **options, **own)
        assert_equal(real, [plain], found[:1])
        if dtype != "float32":
            continue
        strict = {"deterministic": True} if algorithm == "fa2" else {}
        given = (dout, q, k, v, *found)
        found = fa_numba.attention_backward(*given, **options, **own, **strict)
        want = as_first(fa_numba.attention_backward, *given, **options, **own, **strict)
        assert_equal(real, found, want)
    assert len(kept) == (3 if dtype == "float32" else 2)


@pytest.mark.gpu
def test_gpu_streams_at_once_have_workspaces_of_their_own(real, kept):
    """Standard attention's scores, of two calls that overlap in time."""
    attend = fa_numba.standard_attention
    cases = [rows_of(real, n, real.float32, N=1024)[:3] for n in range(2)]
    want = [attend(*x) for x in cases]
    streams = [real.cuda.Stream() for _ in cases]
    real.cuda.synchronize()
    found: list = [[], []]
    for _ in range(8):
        for n, stream in enumerate(streams):
            with real.cuda.stream(stream):
                found[n].append(attend(*cases[n]))
    real.cuda.synchronize()
    for n, results in enumerate(found):
        assert all(real.equal(x, want[n]) for x in results)
    assert len(kept) == 1


@pytest.mark.gpu
def test_gpu_graphs_replay_a_kept_call(real, kept):
    """A captured call writes nothing outside its graph's memory, and reads what is there then."""
    q, k, v, _ = rows_of(real, 0, real.float32)
    out = real.empty_like(q)
    fa_numba.flash_attention_2(q, k, v, out=out)
    graph = real.cuda.CUDAGraph()
    with real.cuda.graph(graph):
        fa_numba.flash_attention_2(q, k, v, out=out)
    q.mul_(-1.5)
    want = fa_numba.flash_attention_2(q, k, v)
    out.zero_()
    graph.replay()
    real.cuda.synchronize()
    assert real.equal(out, want) and len(kept) == 2


def test_launches_that_are_made_again_are_collected_again(gpu, kept):
    """With what they were planned from; in other threads too, as of torch's backward pass."""
    gpu.runs = False

    def launch(arrays, found):
        fa_numba.flash_attention_2(*arrays, unit="simt")
        found.append(len(kept))

    collected = []
    for n in range(3):
        arrays, done = [on_gpu(x) for x in inputs(n)], []
        with devices.launched_kernels() as launched:
            if n < 2:
                launch(arrays, done)
            else:
                run = functools.partial(contextvars.copy_context().run, launch, arrays, done)
                thread = threading.Thread(target=run)
                thread.start()
                thread.join()
        assert done == [1]
        assert not launched.kernels["emulator"] and not launched.origins["emulator"]
        collected.append((list(launched.kernels["gpu"]), list(launched.origins["gpu"])))
    (kernel,), (request,) = collected[0]
    assert collected == [([kernel], [request])] * 3
    assert kernel.name == "fa2_forward" and planning.planned(request).launched == (kernel,)
