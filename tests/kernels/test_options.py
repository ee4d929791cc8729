"""What options cost, which of them a kernel takes, and what is refused, forward and backward."""

import inspect
import math

import numpy as np
import pytest
from backward_helpers import (
    NAMES,
    WAYS,
    asks_for_dbias,
    check_gradients,
    differentiate,
    random_gradients,
    saved,
)
from helpers import (
    GUARD,
    FakeGpuArray,
    assert_documented,
    ml_dtypes,
    numpy_dtype,
    random_inputs,
    refused,
)
from options_helpers import SMALL, inputs, lengths, visited
from test_calls import FORWARD, INF, TINY, _random_mask, normal

import fa_numba
from fa_numba import Tiles
from fa_numba import device as devices
from fa_numba.host import placement

FUNCTIONS = {
    "standard": fa_numba.standard_attention_backward,
    "fa1": fa_numba.flash_attention_1_backward,
    "fa2": fa_numba.flash_attention_2_backward,
}
every_way = pytest.mark.parametrize("way", WAYS)
flash_way = pytest.mark.parametrize("way", list(WAYS)[1:])


@pytest.fixture
def kernels(monkeypatch):
    """The last argument's fields of every kernel launched; none is."""
    made = []
    monkeypatch.setattr(
        devices, "launch", lambda kernel, *_: made.append(set(kernel.argument_types[-1].fields))
    )
    with devices.using("emulator"):
        yield made


# --- what options cost -----------------------------------------------------------------------

COSTS = {
    "window": {"window": (6, 3)},
    "narrow window": {"window": (0, 0)},
    "causal window": {"window": (9, -1), "causal": True},
    "block mask": {"block_mask": _random_mask(3, 4)},
    "block mask of each head": {"block_mask": _random_mask(2, 2, 3, 4)},
    "block mask, causal": {"block_mask": _random_mask(3, 4), "causal": True},
    "block mask of nothing": {"block_mask": np.zeros((3, 4), bool)},
    "lengths and window": {"q_lens": [20, 9], "kv_lens": [33, 61], "window": (5, 5)},
}
COSTLY = (2, 2, 1, 21, 61, 4)
every_cost = pytest.mark.parametrize("name", COSTS)


def _visited_elements(options):
    """(sum r_i, sum c_j over the tiles that some row sees, the same over tiles j that any does, and
    of r_i those of which FA-1 reads O, l and m, or dQ: with a block mask not a row tile's first).
    """
    rows, columns = visited(COSTLY, options)
    again = rows.sum() - ("block_mask" in options) * rows.max(axis=3).sum()
    return rows.sum(), columns.sum(), columns.max(axis=2).sum(), again


@pytest.mark.in_turn("forward")
@every_cost
@pytest.mark.parametrize("forward", ["fa1", "fa2"])
def test_tiles_that_no_row_sees_are_not_loaded(forward, name):
    arrays, options = inputs(COSTLY, {**COSTS[name], "tiles": SMALL})
    rows, columns, once, again = _visited_elements(options)
    with fa_numba.count_accesses() as counts:
        fa_numba.attention(*arrays[1:], algorithm=forward, **options)
    d, loads = 4, counts.loads
    if forward == "fa2":
        assert loads.get("K", 0) == loads.get("V", 0) == d * columns
    else:
        assert loads.get("K", 0) == loads.get("V", 0) == d * once
        assert loads.get("Q", 0) == d * rows and loads.get("l", 0) == again
    whole = fa_numba.plan((2, 2, 21, 4), (2, 1, 61, 4), algorithm=forward, tiles=SMALL)
    assert loads.total() < whole.accesses.total_loads


@pytest.mark.in_turn("way")
@every_cost
@flash_way
def test_tiles_that_no_row_sees_are_not_loaded_backward(way, name):
    arrays, options = inputs(COSTLY, {**COSTS[name], "tiles": SMALL})
    rows, columns, _, again = _visited_elements(options)
    values = saved(*arrays[1:], **options)
    algorithm, own = WAYS[way]
    with fa_numba.count_accesses() as counts:
        fa_numba.attention_backward(*arrays, *values, algorithm=algorithm, **own, **options)
    d, loads = 4, counts.loads
    all_rows = d * 2 * sum(Nq for Nq, _ in lengths(COSTLY, options))
    all_columns = d * sum(Nk for _, Nk in lengths(COSTLY, options))
    if way == "fa2-deterministic":
        assert loads.get("Q", 0) == d * rows + all_rows
        assert loads.get("K", 0) == all_columns + d * columns
    else:
        kept = again if algorithm == "fa1" else rows
        assert loads.get("Q", 0) == d * rows and loads.get("dQ", 0) == d * kept
        assert loads.get("K", 0) == all_columns


def test_a_plan_takes_shapes_for_biases_and_slopes():
    q, k, v = random_inputs(*TINY)
    options = {"alibi_slopes": normal(2), "bias": normal(11, 21), "window": (3, 3), "tiles": SMALL}
    shapes = {"alibi_slopes": (2,), "bias": (11, 21)}
    for passes in ("fwd", "bwd"):
        by_array = fa_numba.plan(q.shape, k.shape, passes=passes, **options)
        by_shape = fa_numba.plan(q.shape, k.shape, passes=passes, **{**options, **shapes})
        assert by_array.accesses == by_shape.accesses and by_array == by_shape
        assert by_shape.accesses.loads["bias"] > 0


ARGUMENTS = {
    "plain": ({}, set()),
    "causal": ({"causal": True}, set()),
    "scale": ({"scale": 0.3}, set()),
    "no dropout": ({"dropout_p": 0.0}, set()),
    "window": ({"window": (3, 3)}, {"window_left", "window_right"}),
    "softcap": ({"softcap": 1.0}, {"softcap"}),
    "bias": ({"bias": normal(11, 21)}, {"bias"}),
    "slopes": ({"alibi_slopes": normal(2)}, {"slopes"}),
    "q_lens": ({"q_lens": [3, 4]}, {"q_lens"}),
    "kv_lens": ({"kv_lens": [3, 4]}, {"kv_lens"}),
    "block mask": ({"block_mask": _random_mask(2, 2)}, {"block_mask", "next_column", "next_row"}),
    "dropout": (
        {"dropout_p": 0.5},
        {"threshold", "inverse_keep", "seed_low", "seed_high", "offset"},
    ),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_kernel_takes_the_options_that_are_on(name, kernels):
    options, want = ARGUMENTS[name]
    options = {**options, "tiles": SMALL}
    dout, q, k, v = random_gradients(*TINY)
    values = saved(q, k, v)
    for algorithm, own in FORWARD.values():
        fa_numba.attention(q, k, v, algorithm=algorithm, **own, **options)
        assert set().union(*kernels) == want, algorithm
        kernels.clear()
    for algorithm, own in WAYS.values():
        fa_numba.attention_backward(dout, q, k, v, *values, algorithm=algorithm, **own, **options)
        assert set().union(*kernels) == want, algorithm
        kernels.clear()


@every_way
def test_a_backward_plan_is_what_runs(way, monkeypatch):
    made = []
    monkeypatch.setattr(devices, "launch", lambda *args: made.append(args))
    dout, q, k, v = random_gradients(2, 4, 2, 37, 53, 8)
    algorithm, own = WAYS[way]
    options = {"tiles": SMALL, "causal": True, **own}
    with devices.using("emulator"):
        p = fa_numba.plan(q.shape, k.shape, algorithm=algorithm, passes="bwd", **options)
        FUNCTIONS[algorithm](dout, q, k, v, *saved(q, k, v), **options)
    found = [(x.name, tuple(grid), x.threads, x.shared_bytes) for x, grid, *_ in made]
    assert found == [(x.name, x.grid, x.threads, x.shared_bytes) for x in p.kernels]
    names = [name for name, *_ in found]
    assert ("fa2_backward_dq" in names) == (way == "fa2-deterministic")
    assert (p.algorithm, p.unit, p.flops) == (algorithm, "simt", 5 * 2 * 4 * 37 * 53 * 8)


# --- the gradient of a bias ------------------------------------------------------------------


@every_way
def test_dbias_is_not_made_unless_asked_for(way):
    arrays = random_gradients(*TINY)
    options = {"bias": normal(2, 2, 11, 21), "tiles": SMALL}
    three = check_gradients("emulator", way, *arrays, return_dbias=False, **options)
    four = differentiate("emulator", way, *arrays, return_dbias=True, **options)
    assert three.dbias is None
    for name in NAMES:
        assert np.array_equal(getattr(three, name), getattr(four, name))


def test_two_kernels_give_dbias_of_a_bias_of_their_own(device):
    """One tile adds to each element: the order is fixed although the adds are atomic."""
    arrays = random_gradients(1, 1, 1, 11, 21, 4)
    for shape in ((1, 1, 11, 21), (11, 21)):
        found = [
            check_gradients(device, "fa2-deterministic", *arrays, bias=normal(*shape), tiles=SMALL,
                            return_dbias=True)
            for _ in range(2)
        ]  # fmt: skip
        for a, b in zip(*found, strict=True):
            assert np.array_equal(a, b)
    assert not asks_for_dbias("fa2-deterministic", *arrays[1:3], normal(1, 21))
    only = differentiate(device, "fa2-deterministic", *arrays, bias=normal(1, 21), tiles=SMALL)
    assert only.dbias is None


# --- what is refused -------------------------------------------------------------------------

MASK = np.ones((1, 1), bool)
STARTS = np.array([0, 5])
# Options, their error, and what its message says, for q (1, 2, 5, 4) and k (1, 1, 7, 4).
REFUSED = [
    ({"dropout": 0.1}, TypeError, "dropout is not an option (did you mean dropout_p?); options: "),
    ({"softcaps": 1.0}, TypeError, "softcaps is not an option (did you mean softcap?); options: "),
    ({"bias": 7}, TypeError,
     "bias must be a NumPy array, torch tensor, JAX array, or an array with", "got an int"),
    ({"q_lens": [[1], [2, 3]]}, ValueError,
     "q_lens must contain numbers in rows of equal length",
     "got a list with rows of several lengths"),
    ({"layout": "bnh"}, ValueError,
     "layout must be 'bhnd' for (batch, heads, seqlen, head_dim) or 'bnhd' for (batch,",
     "got 'bnh'"),
    ({"layout": ["bhnd"]}, ValueError,
     "layout must be 'bhnd' for (batch, heads, seqlen, head_dim) or 'bnhd' for (batch,",
     "got ['bhnd']"),
    ({"attn_mask": np.ones((5, 7), np.int32)}, TypeError,
     "attn_mask must be float32, float16, bfloat16 or bool", "got int32"),
    ({"attn_mask": [[True]]}, TypeError,
     "attn_mask must be a NumPy array, torch tensor, JAX array, or an array with", "got a list"),
    ({"attn_mask": np.ones((5, 8), bool)}, ValueError,
     "attn_mask must broadcast to (batch, heads_q, seqlen_q, seqlen_k) = (1, 2, 5, 7)",
     "got shape (5, 8)"),
    ({"attn_mask": np.ones((5, 7), bool), "bias": normal(5, 7)}, ValueError,
     "attn_mask and bias cannot both be given; pass their sum as bias (for a bool",
     "got attn_mask of shape (5, 7)"),
    ({"window": 3}, TypeError,
     "window must be (left, right), two integers of at least 0; -1 or None instead of", "got 3"),
    ({"window": (3,)}, ValueError,
     "window must be (left, right), two integers of at least 0; -1 or None instead of", "got (3,)"),
    ({"window": (3, 1, 1)}, ValueError,
     "window must be (left, right), two integers of at least 0; -1 or None instead of",
     "got (3, 1, 1)"),
    ({"window": (-2, 0)}, ValueError,
     "window must be (left, right), two integers of at least 0; -1 or None instead of",
     "got (-2, 0)"),
    ({"window": (1.5, 0)}, TypeError,
     "window must be (left, right), two integers of at least 0; -1 or None instead of",
     "got (1.5, 0)"),
    ({"window": (True, 0)}, TypeError,
     "window must be (left, right), two integers of at least 0; -1 or None instead of",
     "got (True, 0)"),
    ({"window": "ab"}, TypeError,
     "window must be (left, right), two integers of at least 0; -1 or None instead of", "got 'ab'"),
    ({"softcap": 1e-31}, ValueError,
     "softcap must be a number from 1e-30 to 1e30, or None or 0 for no cap, got 1e-31"),
    ({"softcap": -1.0}, ValueError,
     "softcap must be a number from 1e-30 to 1e30, or None or 0 for no cap, got -1.0"),
    ({"softcap": float("nan")}, ValueError,
     "softcap must be a number from 1e-30 to 1e30, or None or 0 for no cap, got nan"),
    ({"softcap": INF}, ValueError,
     "softcap must be a number from 1e-30 to 1e30, or None or 0 for no cap, got inf"),
    ({"softcap": True}, TypeError,
     "softcap must be a positive number, or None or 0 for no cap, got True"),
    ({"softcap": "1"}, TypeError,
     "softcap must be a positive number, or None or 0 for no cap, got '1'"),
    ({"softcap": 1e-9, "scale": 1e30}, ValueError,
     "softcap must be such that scale / softcap is within the range of float32",
     "got softcap 1e-09 with scale 1e+30"),
    ({"dropout_p": 1.0}, ValueError,
     "dropout_p must be a number of at least 0 and less than 1, got 1.0"),
    ({"dropout_p": -0.1}, ValueError,
     "dropout_p must be a number of at least 0 and less than 1, got -0.1"),
    ({"dropout_p": float("nan")}, ValueError,
     "dropout_p must be a number of at least 0 and less than 1, got nan"),
    ({"dropout_p": "x"}, TypeError,
     "dropout_p must be a number of at least 0 and less than 1, got 'x'"),
    ({"dropout_p": True}, TypeError,
     "dropout_p must be a number of at least 0 and less than 1, got True"),
    ({"seed": -1}, ValueError, "seed must be an integer from 0 to 2**64 - 1, got -1"),
    ({"seed": 2**64}, ValueError, f"seed must be an integer from 0 to 2**64 - 1, got {2**64}"),
    ({"seed": 1.0}, TypeError, "seed must be an integer from 0 to 2**64 - 1, got 1.0"),
    ({"seed": True}, TypeError, "seed must be an integer from 0 to 2**64 - 1, got True"),
    ({"offset": 2**32}, ValueError, f"offset must be an integer from 0 to 2**32 - 1, got {2**32}"),
    ({"offset": "1"}, TypeError, "offset must be an integer from 0 to 2**32 - 1, got '1'"),
    ({"bias": [[0.0]]}, TypeError,
     "bias must be a NumPy array, torch tensor, JAX array, or an array with", "got a list"),
    ({"bias": np.zeros((5, 7))}, TypeError,
     "bias must be float32, got float64; convert it with bias.astype(np.float32)"),
    ({"bias": normal(5, 8)}, ValueError,
     "bias must broadcast to (batch, heads_q, seqlen_q, seqlen_k) = (1, 2, 5, 7)",
     "got shape (5, 8)"),
    ({"bias": normal(1, 1, 1, 5, 7)}, ValueError,
     "bias must broadcast to (batch, heads_q, seqlen_q, seqlen_k) = (1, 2, 5, 7)",
     "got shape (1, 1, 1, 5, 7)"),
    ({"bias": normal(3, 1, 1)}, ValueError,
     "bias must broadcast to (batch, heads_q, seqlen_q, seqlen_k) = (1, 2, 5, 7)",
     "got shape (3, 1, 1)"),
    ({"alibi_slopes": [1.0, 2.0]}, TypeError,
     "alibi_slopes must be a NumPy array, torch tensor, JAX array, or an array with", "got a list"),
    ({"alibi_slopes": np.zeros(2)}, TypeError,
     "alibi_slopes must be float32", "got float64"),
    ({"alibi_slopes": normal(3)}, ValueError,
     "alibi_slopes must have shape (2,) or (1, 2), got (3,)"),
    ({"alibi_slopes": normal(1, 2, 1)}, ValueError,
     "alibi_slopes must have shape (2,) or (1, 2), got (1, 2, 1)"),
    ({"q_lens": [5, 5]}, ValueError,
     "q_lens must have shape (1,) (one value per batch entry), got (2,)"),
    ({"q_lens": np.array(5)}, ValueError,
     "q_lens must have shape (1,) (one value per batch entry), got ()"),
    ({"q_lens": [6]}, ValueError,
     "q_lens must contain integers from 0 to 5 (the sequence length), got 6"),
    ({"q_lens": [-1]}, ValueError,
     "q_lens must contain integers from 0 to 5 (the sequence length), got -1"),
    ({"q_lens": []}, ValueError,
     "q_lens must have shape (1,) (one value per batch entry), got (0,)"),
    ({"q_lens": np.array([2**64 - 1], np.uint64)}, ValueError,
     f"q_lens must contain integers below 2**63, got {2**64 - 1}"),
    ({"q_lens": [5.0]}, TypeError, "q_lens must contain integers, got dtype float64"),
    ({"q_lens": 5}, TypeError, "q_lens must be an array or a sequence of values, got an int"),
    ({"kv_lens": [8]}, ValueError,
     "kv_lens must contain integers from 0 to 7 (the sequence length), got 8"),
    ({"kv_lens": [True]}, TypeError, "kv_lens must contain integers, got dtype bool"),
    ({"block_mask": MASK, "tiles": None}, ValueError,
     "block_mask needs tiles, because tiles.Br and tiles.Bc are the size of the blocks;"),
    ({"block_mask": np.ones((2, 1), bool)}, ValueError,
     "block_mask must have shape (1, 1) (one value per tile of Br=8, Bc=16), got",
     "got (2, 1)"),
    ({"block_mask": np.ones((3, 1, 1), bool)}, ValueError, "got (3, 1, 1)",
     "batch entries, of length 1 or 1, and heads, of length 1 or 2"),
    ({"block_mask": np.ones(1, bool)}, ValueError,
     "block_mask must have shape (1, 1) (one value per tile of Br=8, Bc=16), got",
     "got (1,)"),
    ({"block_mask": np.ones((1, 1, 1, 1, 1), bool)}, ValueError, "(1, 1, 1, 1, 1)"),
    ({"block_mask": np.ones((1, 1), np.uint8)}, TypeError,
     "block_mask must be bool, got dtype uint8; pass block_mask != 0"),
    ({"block_mask": "x"}, TypeError,
     "block_mask must be an array or a sequence of values, got a str"),
    ({"causal": 1}, TypeError, "causal must be True or False, got 1"),
    ({"cu_seqlens_q": STARTS, "cu_seqlens_k": STARTS}, ValueError,
     "q must have 3 axes for packed sequences, (seqlen, heads, head_dim)",
     "got 4 axes: shape (1, 2, 5, 4)"),
]  # fmt: skip
# The same for q (5, 2, 4) and k (7, 1, 4).
PACKED = {"cu_seqlens_q": np.array([0, 2, 5]), "cu_seqlens_k": [0, 7, 7]}
REFUSED_PACKED = [
    ({"cu_seqlens_k": None}, ValueError,
     "cu_seqlens_q must be given together with cu_seqlens_k, got cu_seqlens_q alone"),
    ({"cu_seqlens_q": None}, ValueError,
     "cu_seqlens_k must be given together with cu_seqlens_q, got cu_seqlens_k alone"),
    ({"q_lens": [2, 3]}, ValueError,
     "q_lens cannot be given with cu_seqlens_q and cu_seqlens_k, which already say how"),
    ({"layout": "bnhd"}, ValueError,
     "layout cannot be given with cu_seqlens_q or cu_seqlens_k, because packed arrays have",
     "got layout='bnhd'; leave layout out"),
    ({"kv_lens": [7, 0]}, ValueError,
     "kv_lens cannot be given with cu_seqlens_q and cu_seqlens_k, which already say how"),
    ({"cu_seqlens_q": [1, 2, 5]}, ValueError,
     "cu_seqlens_q must be cumulative lengths that begin with 0, never decrease and end",
     "got 1 as the first value"),
    ({"cu_seqlens_k": [0, 3, 6]}, ValueError,
     "cu_seqlens_k must be cumulative lengths that begin with 0, never decrease and end",
     "got 6 as the last value"),
    ({"cu_seqlens_q": [0, 6, 5]}, ValueError,
     "cu_seqlens_q must be cumulative lengths that begin with 0, never decrease and end",
     "got 6 followed by 5"),
    ({"cu_seqlens_q": [0]}, ValueError,
     "cu_seqlens_q must have shape (batch + 1,) with at least one sequence, got (1,)"),
    ({"cu_seqlens_q": [[0, 5]]}, ValueError,
     "cu_seqlens_q must have shape (batch + 1,) with at least one sequence, got (1, 2)"),
    ({"cu_seqlens_q": [0.0, 2.0, 5.0]}, TypeError,
     "cu_seqlens_q must contain integers, got dtype float64"),
    ({"cu_seqlens_k": [0, 7]}, ValueError,
     "cu_seqlens_k must describe the same number of sequences as cu_seqlens_q (2), got 1"),
    ({"bias": normal(2, 2, 5, 7)}, ValueError,
     "bias must broadcast to (batch, heads_q, seqlen_q, seqlen_k) = (2, 2, 3, 7)",
     "got shape (2, 2, 5, 7)"),
    ({"alibi_slopes": normal(3, 2)}, ValueError,
     "alibi_slopes must have shape (2,) or (2, 2), got (3, 2)"),
    ({"block_mask": np.ones((2, 1), bool), "tiles": Tiles(4, 16)}, ValueError,
     "block_mask must have shape (1, 1) (one value per tile of Br=4, Bc=16),", "got (2, 1)"),
]  # fmt: skip


def _refusals():
    plain = random_gradients(1, 2, 1, 5, 7, 4)
    dense = [np.ascontiguousarray(a[0].swapaxes(0, 1)) for a in plain]
    for arrays, others, table in ((plain, {}, REFUSED), (dense, PACKED, REFUSED_PACKED)):
        for bad, error, *says in table:
            yield pytest.param(arrays, others, bad, error, says, id=says[0])


@pytest.mark.parametrize("arrays, others, bad, error, says", list(_refusals()))
def test_bad_options_are_refused_and_nothing_is_written(arrays, others, bad, error, says, kernels):
    dout, q, k, v = arrays
    options = {"tiles": SMALL, **others, **bad}
    lse = np.zeros(q.shape[:-1] if q.ndim == 4 else (2, 5), np.float32)
    out = np.full_like(q, GUARD)
    bits = out.copy().view(np.uint32)
    calls = [lambda: fa_numba.plan(q.shape, k.shape, **options)]
    shapes_alone = any("float32" in part or "got a list" in part for part in says)
    arrays_of = {"bias", "alibi_slopes", "attn_mask"}
    if (shapes_alone or "got an int" in says) and arrays_of & set(bad):
        calls = []  # a plan takes their shapes, as anything with a shape
    for algorithm, own in FORWARD.values():
        given_ = {"algorithm": algorithm, **own, **options}
        calls.append(lambda o=given_: fa_numba.attention(q, k, v, out=out, **o))
    for algorithm, own in WAYS.values():
        given_ = {"algorithm": algorithm, **own, **options}
        calls.append(lambda o=given_: fa_numba.attention_backward(dout, q, k, v, q, lse, **o))
    for call in calls:
        with refused(error, says):
            call()
    assert not kernels and np.array_equal(out.view(np.uint32), bits)


def test_good_options_are_taken(kernels):
    plain = random_gradients(1, 2, 1, 5, 7, 4)
    fa_numba.attention(*plain[1:], tiles=SMALL, block_mask=MASK, window=[np.int64(3), 2])
    dense = [np.ascontiguousarray(a[0].swapaxes(0, 1)) for a in plain]
    fa_numba.attention(*dense[1:], tiles=SMALL, **PACKED)
    assert len(kernels) == 2


def test_out_must_not_share_memory_with_a_bias(kernels):
    q, k, v = random_inputs(1, 1, 1, 7, 7, 7)
    bias = normal(1, 1, 7, 7)
    with pytest.raises(ValueError, match="out must not share memory with bias; pass an array with"):
        fa_numba.flash_attention_2(q, k, v, bias=bias, out=bias)
    assert not kernels


# --- a backward call ---------------------------------------------------------------------------


def ones(*shape, dtype="float32"):
    return np.ones(shape, dtype)


GOOD = {
    "dout": ones(1, 2, 5, 4),
    "q": ones(1, 2, 5, 4),
    "k": ones(1, 1, 7, 4),
    "v": ones(1, 1, 7, 4),
    "out": ones(1, 2, 5, 4),
    "lse": ones(1, 2, 5),
}


BACKWARD = {
    **{
        f"{name} a list": (
            {name: [[1.0]]}, TypeError, [f"{name} must be a NumPy array", "got a list"],
        )
        for name in GOOD
    },
    **{
        f"{name} None": ({name: None}, TypeError, [f"{name} must be a NumPy array", "got None"])
        for name in GOOD
    },
    **{
        f"{name} of {dtype}": (
            {name: GOOD[name].astype(dtype)}, TypeError,
            [f"{name} must ", "float32", f"got {dtype}"],
        )
        for name in GOOD
        for dtype in ("float64", "float16", "int32")
        if (name, dtype) != ("q", "float16")
    },
    "q of float16": (
        {"q": GOOD["q"].astype("float16")}, TypeError, [
            "k must have the dtype of q (float16)", "got float32"],
    ),
    **{
        f"{name} on the GPU": (
            {name: FakeGpuArray(GOOD[name].shape)}, (TypeError, ValueError), [f"{name} must be "],
        )
        for name in GOOD
        if name != "q"
    },
    **{
        f"{name} {what}": (
            {name: ones(*shape)}, ValueError, [f"{name} must have shape (1, 2, 5, 4), got {shape}"],
        )
        for name in ("dout", "out")
        for what, shape in (
            ("batch", (2, 2, 5, 4)),
            ("heads", (1, 1, 5, 4)),
            ("length", (1, 2, 7, 4)),
            ("head_dim", (1, 2, 5, 8)),
            ("rank", (10, 4)),
            ("order", (1, 5, 2, 4)),
        )
    },
    **{
        f"lse {what}": ({"lse": ones(*shape)}, ValueError, [
            f"lse must have shape (1, 2, 5), got {shape}"])
        for what, shape in (
            ("batch", (2, 2, 5)),
            ("heads", (1, 1, 5)),
            ("length", (1, 2, 7)),
            ("rank", (1, 2, 5, 1)),
            ("order", (1, 5, 2)),
        )
    },
    "batch of k": (
        {"k": ones(3, 1, 7, 4), "v": ones(3, 1, 7, 4)}, ValueError, [
            "k must have batch=1 like q (shape (1, 2, 5, 4))", "got batch=3 (shape (3, 1, 7, 4))"],
    ),
    "length of v": ({"v": ones(1, 1, 8, 4)}, ValueError, [
        "v must have seqlen=7 like k (shape (1, 1, 7, 4))", "got seqlen=8 (shape (1, 1, 8, 4))"]),
    "rank of q": ({"q": ones(2, 5, 4)}, ValueError, [
        "q must have 4 axes, (batch, heads, seqlen, head_dim), got 3 axes: shape (2, 5, 4)"]),
    "scale nan": ({"scale": float("nan")}, ValueError, [
        "scale must be a finite number of magnitude at most 2.36e+38 (the kernels compute",
        "got nan"]),
    "scale text": ({"scale": "1"}, TypeError, [
        "scale must be a finite real number or None, got '1'"]),
    "causal 1": ({"causal": 1}, TypeError, ["causal must be True or False, got 1"]),
    "tiles a tuple": ({"tiles": (8, 16)}, TypeError, [
        "tiles must be a Tiles(Br=..., Bc=...) or None, got (8, 16)"]),
    "tiles too large": ({"tiles": Tiles(512, 512)}, ValueError, ["tiles", "Br=512, Bc=512"]),
    "threads": ({"tiles": Tiles(8, 16, 7)}, ValueError, [
        "tiles.threads must be 32 or 64, or None, for Br=8, Bc=16, head_dim=4 on unit", "got 7"]),
    "stream": ({"stream": 1}, ValueError, [
        "stream must be None on the emulator (it has no streams), got 1"]),
}  # fmt: skip


@pytest.mark.parametrize("algorithm", FUNCTIONS)
@pytest.mark.parametrize("name", BACKWARD)
def test_a_bad_backward_call_is_refused_before_any_launch(algorithm, name, kernels):
    replaced, error, says = BACKWARD[name]
    with refused(error, says):
        FUNCTIONS[algorithm](**{**GOOD, **replaced})
    assert not kernels


def test_a_good_backward_call_is_taken(kernels):
    for function in FUNCTIONS.values():
        function(**GOOD)
    assert kernels


def test_documentation():
    for function in (*FUNCTIONS.values(), fa_numba.attention_backward):
        assert function.__name__ in fa_numba.__all__
        assert_documented(function)


def test_the_three_functions_share_one_signature():
    want = dict(inspect.signature(fa_numba.standard_attention_backward).parameters)
    first = dict(inspect.signature(fa_numba.flash_attention_1_backward).parameters)
    assert first.pop("query_splits").default == 1
    second = dict(inspect.signature(fa_numba.flash_attention_2_backward).parameters)
    assert second.pop("deterministic").default is False
    assert second.pop("group_splits").default == "auto"
    assert first == second == want


# --- units, tiles and measures -----------------------------------------------------------------

Q, K = np.ones((1, 2, 5, 8), np.float16), np.ones((1, 1, 7, 8), np.float16)
HALVES, SHAPES = (Q, K, K), (Q.shape, K.shape)
SINGLE = [a.astype(np.float32) for a in HALVES]


def zeros(d):
    return np.zeros((1, 1, 5, d), np.float16), *np.zeros((2, 1, 1, 7, d), np.float16)


L = np.zeros((1, 2, 5), np.float32)
HALF_GIVEN = {"dout": Q, "q": Q, "k": K, "v": K, "out": Q, "lse": L}
GIVEN = (GOOD["q"], GOOD["k"], GOOD["v"])
PLAIN, PLAN = ((1, 2, 5, 4), (1, 1, 7, 4)), {"dtype": "float16", "passes": "bwd"}
BIG = dict.fromkeys(("dout", "q", "k", "v", "out"), np.zeros((1, 1, 4096, 64), np.float32))
BIG["lse"] = BIG["q"][..., 0]
LONG = ((1, 1, 2**29 + 1, 4),) * 2
KEYS = {"warp_partition": "keys"}
REFUSED_CALLS = [
    # function, its arrays and what else it is given, error and what its message says
    ("attention", HALVES, {"unit": "simt"}, ValueError,
     "unit must be 'auto', 'mma' or 'wgmma' for float16",
     "got 'simt', which multiplies float32 matrices"),
    ("attention", SINGLE, {"unit": "mma"}, ValueError,
     "unit must be 'auto' or 'simt' for float32",
     "got 'mma', which multiplies float16, bfloat16 or float8_e4m3fn matrices"),
    ("attention", HALVES, {"unit": "tensor"}, ValueError,
     "unit must be 'auto', 'simt', 'mma' or 'wgmma', got 'tensor'"),
    ("attention", HALVES, {"unit": None}, ValueError,
     "unit must be 'auto', 'simt', 'mma' or 'wgmma', got None"),
    ("attention", HALVES, {"unit": np.array(["mma", "simt"])}, ValueError,
     "unit must be 'auto', 'simt', 'mma' or 'wgmma'",
     "got array(['mma', 'simt'], dtype='<U4')"),
    ("attention", HALVES, {"ablate": np.array(["swizzle"])}, ValueError,
     "ablate must be a tuple of names of optimisations", "got array(['swizzle'], dtype='<U7')"),
    ("plan", SHAPES, {"dtype": "float16", "unit": "MMA"}, ValueError,
     "unit must be 'auto', 'simt', 'mma' or 'wgmma', got 'MMA'"),
    ("plan", SHAPES, {"dtype": "bfloat16", "unit": "simt"}, ValueError,
     "unit must be 'auto', 'mma' or 'wgmma' for bfloat16",
     "got 'simt', which multiplies float32 matrices"),
    ("attention", HALVES, {"tiles": Tiles(24, 16)}, ValueError,
     "tiles.Br and tiles.Bc must be multiples of 16 on unit 'mma', got Br=24, Bc=16"),
    ("attention", HALVES, {"tiles": Tiles(16, 24)}, ValueError,
     "tiles.Br and tiles.Bc must be multiples of 16 on unit 'mma', got Br=16, Bc=24"),
    ("attention", HALVES, {"tiles": Tiles(64, 16, 96)}, ValueError,
     "tiles.threads must be 64 or 128, or None, for Br=64, Bc=16 on unit 'mma', got 96"),
    ("attention", zeros(256),
     {"tiles": Tiles(32, 256)}, ValueError, "Br=32, Bc=256", "head_dim=256", "registers"),
    ("attention", zeros(256),
     {"tiles": Tiles(256, 128)}, ValueError,
         "tiles must fit in 232448 bytes of shared memory (the device's limit for a thread",
         "got 262144 bytes for Br=256, Bc=128 at head_dim=256"),
    ("attention", zeros(256),
     {"tiles": Tiles(128, 96, stages=2)}, ValueError,
         "tiles must fit in 232448 bytes of shared memory (the device's limit for a thread",
         "got 262144 bytes for Br=128, Bc=96, stages=2 at head_dim=256"),
    ("flash_attention_1", HALVES, {"tiles": Tiles(16, 16, stages=2)}, ValueError,
     "tiles.stages must be 1 in the forward pass of algorithm 'fa1' on unit 'mma'", "got 2"),
    ("standard_attention", HALVES, {"tiles": Tiles(16, 16, stages=2)}, ValueError,
     "tiles.stages must be 1 in the forward pass of algorithm 'standard' on unit 'mma'", "got 2"),
    ("attention", SINGLE, {"tiles": Tiles(16, 16, stages=2)}, ValueError,
     "tiles.stages must be 1 in the forward pass of algorithm 'fa2' on unit 'simt'", "got 2"),
    ("plan", SHAPES, {"dtype": "float16", "passes": "bwd", "tiles": Tiles(32, 32, stages=2)},
     ValueError,
         "tiles.stages must be 1 in the backward pass of algorithm 'fa2' on unit 'mma'", "got 2"),
    ("flash_attention_2", HALVES, {"tiles": Tiles(16, 16, stages=3)}, ValueError,
     "tiles.stages must be from 1 to 2 on unit 'mma', got 3; unit 'wgmma' takes up to 4"),
    ("flash_attention_2", HALVES,
     {"tiles": Tiles(16, 16, stages=2), "ablate": ("swizzle", "prefetch")}, ValueError,
     "tiles.stages must be 1 with ablate=('swizzle', 'prefetch'), because stages after", "got 2"),
    ("attention", (Q, SINGLE[1], K), {}, TypeError,
     "k must have the dtype of q (float16)", "got float32"),
    ("attention", (*SINGLE[:2], K), {}, TypeError,
     "v must have the dtype of q (float32)", "got float16"),
    ("attention", HALVES, {"out": np.empty_like(SINGLE[0])}, TypeError,
     "out must have the dtype of the inputs (float16), got float32"),
    ("attention", HALVES, {"bias": np.ones((5, 7), np.float16)}, TypeError,
     "bias must be float32, got float16; convert it with bias.astype(np.float32)"),
    ("attention", HALVES, {"alibi_slopes": np.ones(2, np.float16)}, TypeError,
     "alibi_slopes must be float32", "got float16"),
    ("attention", tuple(a.astype("f8") for a in HALVES), {}, TypeError,
     "q must be float32, float16, bfloat16 or float8_e4m3fn", "got float64"),
    ("attention", tuple(a.astype(">f2") for a in HALVES), {}, TypeError,
     "q must be float32, float16, bfloat16 or float8_e4m3fn", "got >f2"),
    ("attention", HALVES, {"algorithm": "fa2", "query_splits": 2}, TypeError, "query_splits"),
    ("flash_attention_1", HALVES, {"warp_partition": "columns"}, ValueError,
     "warp_partition must be 'rows' or 'keys', got 'columns'"),
    ("flash_attention_1", HALVES, {"warp_partition": None}, ValueError,
     "warp_partition must be 'rows' or 'keys', got None"),
    ("flash_attention_1", SINGLE, {"warp_partition": "keys"}, ValueError,
     "warp_partition must be 'rows' with algorithm 'fa1' on unit 'simt'", "got 'keys'"),
    ("attention", HALVES, {"warp_partition": "keys"}, TypeError, "warp_partition"),
    ("plan", SHAPES, {"dtype": "float16", "warp_partition": "keys"}, ValueError,
     "warp_partition must be 'rows' with algorithm 'fa2' on unit 'mma'", "got 'keys'"),
    ("plan", SHAPES, {"passes": "bwd", "warp_partition": "keys"}, ValueError,
     "warp_partition must be 'rows' with passes='bwd'", "got 'keys'"),
    ("flash_attention_1", HALVES, {"tiles": Tiles(16, 48), "warp_partition": "keys"}, ValueError,
     "tiles.Bc must be a multiple of 32 with warp_partition='keys', got 48;", "of 16 columns"),
    ("flash_attention_1", HALVES, {"tiles": Tiles(16, 64, 256), **KEYS}, ValueError,
     "tiles.threads must be 64 or 128, or None, for Br=16, Bc=64 on unit 'mma', got 256"),
    ("flash_attention_1",
     zeros(128),
     {"tiles": Tiles(64, 64), "warp_partition": "keys"}, ValueError,
         "tiles must fit in the registers of at most 512 threads",
         "got Br=64, Bc=64 at head_dim=128 on unit 'mma'"),
    ("flash_attention_2", HALVES, {"ablate": ("prefetch", "tma")}, ValueError,
     "ablate must be a tuple of 'padding', 'swizzle', 'prefetch', 'q_registers',",
     "got ('prefetch', 'tma')"),
    ("flash_attention_2", HALVES, {"ablate": "padding"}, ValueError,
     "ablate must contain 'swizzle' if it contains 'padding', because only rows that are not",
     "got 'padding'"),
    ("plan", SHAPES, {"algorithm": "standard", "ablate": ("turns",)}, ValueError,
     "ablate must be () with algorithm 'standard' on unit 'simt', got ('turns',)"),
    ("flash_attention_1", HALVES, {"ablate": ["wide_stores"]}, ValueError,
     "ablate must be a tuple of 'padding', 'swizzle', 'prefetch', 'q_registers' or",
     "got ['wide_stores']"),
    ("flash_attention_2", HALVES, {"ablate": None}, ValueError,
     "ablate must be a tuple of names of optimisations", "or () to leave none out, got None"),
    ("flash_attention_2", SINGLE, {"ablate": "padding"}, ValueError,
     "ablate must be () with algorithm 'fa2' on unit 'simt'", "got 'padding'"),
    ("attention", HALVES, {"algorithm": "standard", "ablate": "padding"}, TypeError, "ablate"),
    ("plan", SHAPES, {"passes": "bwd", "ablate": ("padding",)}, ValueError,
     "ablate must be () with passes='bwd', got ('padding',); ablate is only for passes='fwd'"),
    ("plan", SHAPES, {"dtype": "float8"}, ValueError,
     "dtype must be 'float32', 'float16', 'bfloat16' or 'float8_e4m3fn', got 'float8'"),
    *(
        row
        for a in FUNCTIONS
        for row in (
            ("attention_backward", BIG, {"algorithm": a}, ValueError,
             "q of shape (1, 1, 4096, 64)", "limit of 30 s", "fa_numba.reference"),
            ("attention_backward", GOOD, {"algorithm": a, "dropout": 0.1}, TypeError, "dropout"),
            ("attention_backward", GOOD, {"algorithm": a, "return_lse": True}, TypeError,
             "return_lse"),
            ("attention", GIVEN, {"algorithm": a, "dlse": GOOD["lse"]}, TypeError,
             "dlse is not an option of this function (standard_attention_backward,"),
            *(
                ("attention_backward", GOOD, {"algorithm": a, "dlse": wrong}, error, "dlse", *says)
                for wrong, error, *says in (
                    (normal(1, 2, 7), ValueError, "(1, 2, 7)", "(1, 2, 5)"),
                    (L.astype("f8"), TypeError, "float64", "float32"),
                    (True, TypeError, "bool"),
                )
            ),
            ("attention_backward", GOOD, {"algorithm": a, "return_dbias": True}, ValueError,
             "return_dbias must be False without a bias, got True"),
            ("plan", PLAIN, {"algorithm": a, "passes": "bwd", "return_dbias": True}, ValueError,
             "return_dbias must be False without a bias, got True"),
            ("attention_backward", GOOD,
             {"algorithm": a, "bias": normal(5, 7), "return_dbias": 1}, TypeError,
             "return_dbias must be True or False, got 1"),
            ("attention", GIVEN, {"algorithm": a, "bias": normal(5, 7), "return_dbias": True},
             TypeError, "return_dbias"),
        )
    ),
    *(
        row
        for a in ("standard", "fa1")
        for row in (
            ("attention_backward", GOOD, {"algorithm": a, "deterministic": True}, TypeError,
             "deterministic"),
            ("plan", PLAIN, {"algorithm": a, "passes": "bwd", "deterministic": True}, ValueError,
             "deterministic"),
        )
    ),
    *(
        row
        for a in ("standard", "fa2")
        for row in (
            ("attention_backward", HALF_GIVEN, {"algorithm": a, "query_splits": 2}, TypeError,
             "query_splits"),
            ("plan", SHAPES, PLAN | {"algorithm": a, "query_splits": 2}, ValueError,
             f"query_splits must be 1 in the backward pass of algorithm '{a}'",
             "on unit 'mma', got 2"),
        )
    ),
    *(
        row
        for bad in (1, None, "yes")
        for row in (
            ("flash_attention_2_backward", GOOD, {"deterministic": bad}, TypeError,
             "deterministic", repr(bad)),
            ("plan", PLAIN, {"passes": "bwd", "deterministic": bad}, TypeError, "deterministic",
             repr(bad)),
        )
    ),
    *(
        ("flash_attention_2_backward", GOOD,
         {"bias": normal(*shape), "return_dbias": True, "deterministic": True}, ValueError,
         "deterministic must be False with return_dbias=True", "the full shape (1, 2, 5, 7)")
        for shape in ((5, 7), (1, 1, 5, 7), (1, 2, 5, 1), ())
    ),
    ("plan", PLAIN, {"deterministic": True}, ValueError, "deterministic"),
    ("plan", PLAIN, {"passes": "bwd", "return_lse": True}, ValueError, "return_lse"),
    ("plan", PLAIN, {"algorithm": "fa2", "passes": "bwd", "query_splits": 2}, ValueError,
     "query_splits"),
    ("plan", ((65536, 1, 1, 4),) * 2, {}, ValueError,
     "batch must be at most 65535 (the limit of a CUDA grid), got 65536"),
    ("plan", ((1, 65536, 1, 4),) * 2, {}, ValueError,
     "heads of q must be at most 65535 (the limit of a CUDA grid), got 65536"),
    ("plan", PLAIN, {"passes": "back"}, ValueError, "passes must be 'fwd' or 'bwd', got 'back'"),
    ("plan", PLAIN, {"dlse": True}, ValueError,
     "dlse must be False with passes='fwd', got True; dlse is only for passes='bwd'"),
    ("plan", PLAIN, {"bias": (5, 7), "return_dbias": True}, ValueError,
     "return_dbias must be False with passes='fwd'", "got True"),
    ("plan", LONG, {"window": (3, 3)}, ValueError,
     f"must be at most {2**29} with a window, got {2**29 + 1}"),
    ("attention_backward", GOOD, {"algorithm": "fa3"}, ValueError,
     "algorithm must be 'standard', 'fa1' or 'fa2', got 'fa3'"),
    ("attention_backward", HALF_GIVEN, {"algorithm": "fa1", "query_splits": 0}, ValueError,
     "query_splits must be an integer of at least 1, got 0"),
    ("attention_backward", HALF_GIVEN, {"algorithm": "fa1", "deterministic": True}, TypeError,
     "deterministic"),
    ("attention_backward", HALF_GIVEN, {"tiles": Tiles(24, 16)}, ValueError,
     "tiles.Br must be a multiple of 16 and tiles.Bc a multiple of 16 in the backward pass",
     "got Br=24, Bc=16"),
    ("attention_backward", HALF_GIVEN, {"tiles": Tiles(16, 32, 96)}, ValueError,
     "tiles.threads must be 32 or 64, or None, for Br=16, Bc=32 on unit 'mma', got 96"),
    ("plan", ((1, 1, 5, 72),) * 2, PLAN | {"tiles": Tiles(16, 16)}, ValueError,
     "tiles.Br must be a multiple of 32 and tiles.Bc a multiple of 16 in the backward pass",
     "got Br=16, Bc=16"),
    ("plan", ((1, 1, 5, 256),) * 2, PLAN | {"tiles": Tiles(128, 64)}, ValueError,
     "Br=128, Bc=64", "head_dim=256", "bytes of shared memory"),
    *(
        ("attention_backward", HALF_GIVEN | {name: HALF_GIVEN[name].astype("f4")}, {}, TypeError,
         f"{name} must ", "float16", "got float32")
        for name in ("dout", "k", "v", "out")
    ),
    ("attention_backward", HALF_GIVEN | {"lse": L.astype(np.float16)}, {}, TypeError,
     "lse must be float32, got float16; convert it with lse.astype(np.float32)"),
    *(
        [("attention", (Q, K.astype(numpy_dtype("bfloat16")), K), {}, TypeError,
          "k must have the dtype of q (float16)", "got bfloat16")] * bool(ml_dtypes)
    ),
]  # fmt: skip


@pytest.mark.parametrize("row", REFUSED_CALLS, ids=lambda row: f"{row[0]}-{row[4]}")
def test_what_cannot_be_is_refused_by_name(row, kernels):
    function, arrays, given_, error, *says = row
    places, names = ((), arrays) if isinstance(arrays, dict) else (arrays, {})
    with refused(error, says):
        getattr(fa_numba, function)(*places, **names | given_)
    assert not kernels


def test_sequences_may_be_long_without_a_window():
    fa_numba.plan(*LONG, causal=True)


@pytest.mark.parametrize(
    "options, a_second, products",
    [
        ({}, 4e7, 1),
        ({"dtype": "float16", "passes": "bwd"}, 1e8, 2.5),
        ({"precision": "bf16x6"}, 1e8, 6),
    ],
)
def test_what_is_refused_would_take_so_many_seconds(options, a_second, products):
    """Multiply-adds of whole tiles, of columns by the 32, and a hundred steps a thread."""
    with devices.using("emulator"):
        plan = fa_numba.plan((2, 4, 3000, 40), (2, 2, 4000, 40), **options)
    Br, Bc = plan.tiles.Br, plan.tiles.Bc
    steps = 2 * 4 * -(-3000 // Br) * -(-4000 // Bc) * Br * Bc * (64 + 64) * products
    steps += 100 * sum(math.prod(k.grid) * k.threads for k in plan.kernels)
    said = f"the emulator up to about {steps / a_second:,.0f} s, "
    with devices.using("emulator"), pytest.raises(ValueError, match=said):
        placement.check_size(plan)
