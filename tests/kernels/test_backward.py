"""Every backward kernel of CUDA cores and of mma.sync against float64, between guard bands, its
accesses against the closed form. What mma.sync alone has is in `test_mma_backward`.
"""

import inspect
import math
from contextlib import nullcontext

import numpy as np
import pytest
from backward_helpers import (
    ALL_WAYS,
    WAYS,
    Gradients,
    assert_gradients,
    assert_same,
    check_gradients,
    differentiate,
    random_gradients,
    saved,
    saved_for,
    true_gradients,
)
from conftest import examples
from helpers import LAYOUTS, Memory, assert_within, to_numpy
from hypothesis import given
from hypothesis import strategies as st
from mma_helpers import BFLOAT16, SLOW_BFLOAT16

import fa_numba
from fa_numba import Tiles, reference
from fa_numba import device as devices

every_way = pytest.mark.parametrize("way", WAYS)
either_mask = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
# FA-1 with query splits too, whose sums are in float32 and in 16 bits then rounded.
all_ways = pytest.mark.parametrize("way", ALL_WAYS)
dtypes = pytest.mark.parametrize("dtype", ["float32", "float16", SLOW_BFLOAT16])
every_layout = pytest.mark.parametrize("layout", [x for x in LAYOUTS if x != "broadcast"])
SMALL = Tiles(8, 16)
SMALLEST = {"float32": SMALL, "float16": Tiles(16, 16), "bfloat16": Tiles(16, 16)}
HEAD_DIMS = (1, 3, 7, 8, 16, 19, 33, 40, 64, 72, 96, 128, 144, 160, 256)
FUNCTIONS = {
    "standard": fa_numba.standard_attention_backward,
    "fa1": fa_numba.flash_attention_1_backward,
    "fa2": fa_numba.flash_attention_2_backward,
}


# --- the check can fail ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    ["scale", "one element", "missing", "D", "no D", "causal", "a group", "dk of one tile"],
)
def test_the_check_fails_on_a_wrong_gradient(change):
    dout, q, k, v = random_gradients(1, 2, 1, 24, 40, 8)
    found = Gradients(*reference.unfused_backward(dout, q, k, v))
    assert_gradients(found, dout, q, k, v)
    if change == "scale":
        found = Gradients(*reference.unfused_backward(dout, q, k, v, scale=1.0001 / math.sqrt(8)))
    elif change == "one element":
        found.dk[0, 0, 3, 5] += 3e-5
    elif change == "missing":
        found.dq[0, 1, 3, 5] = np.nan
    elif change in ("D", "no D"):
        O, L = reference.attention(q, k, v, return_lse=True)
        D = (dout * O).sum(axis=3, keepdims=True) * (-1 if change == "D" else 0)
        P = np.exp(q @ k.swapaxes(2, 3) / math.sqrt(8) - L[..., None])
        found.dq = (P * (dout @ v.swapaxes(2, 3) - D)) @ k / math.sqrt(8)
    elif change == "causal":
        found.dv = reference.attention_backward(dout, q, k, v, causal=True)[2]
    elif change == "a group":
        found.dv = reference.attention_backward(dout[:, :1], q[:, :1], k, v)[2]
    else:
        found.dk[:, :, 32:] *= np.float32(1.00002)
    with pytest.raises(AssertionError, match="worst at .* got .*, expected"):
        assert_gradients(found, dout, q, k, v)


# --- shapes ----------------------------------------------------------------------------------

LENGTHS = [(1, 1), (1, 40), (40, 1), (8, 16), (9, 17), (15, 31), (16, 32), (17, 33), (37, 13)]
LENGTHS += [(33, 70)]


@pytest.mark.in_turn("way")
@all_ways
@dtypes
@either_mask
@pytest.mark.parametrize("Nq, Nk", LENGTHS)
def test_lengths(device, way, dtype, causal, Nq, Nk):
    inputs = random_gradients(1, 1, 1, Nq, Nk, 8, dtype=dtype)
    check_gradients(device, way, *inputs, causal=causal, tiles=SMALLEST[dtype])


def splitting(monkeypatch, query_splits):
    """A way to gradients whose blocks share a head."""
    monkeypatch.setitem(ALL_WAYS, "fa1-split", ("fa1", {"query_splits": query_splits}))
    return "fa1-split"


@pytest.mark.in_turn("causal")
@either_mask
@dtypes
@pytest.mark.parametrize("Nq, Nk", [(37, 13), (29, 37), (70, 40)])
def test_query_splits_change_sums_of_dk_and_dv_alone(device, monkeypatch, dtype, causal, Nq, Nk):
    inputs = random_gradients(1, 4, 2, Nq, Nk, 8, dtype=dtype)
    options = {"causal": causal, "tiles": SMALLEST[dtype]}
    whole = differentiate(device, "fa1", *inputs, **options)
    for query_splits in (2, 3, 4, 99):
        split = check_gradients(device, splitting(monkeypatch, query_splits), *inputs, **options)
        assert np.array_equal(split.dq, whole.dq)


SPLIT_OPTIONS = {
    "window": {"window": (9, 3)},
    "lengths": {"q_lens": [27, 0], "kv_lens": [30, 12], "causal": True},
    "bias": {"bias": np.linspace(-2, 2, 37, dtype=np.float32), "softcap": 2.0},
    "dropout": {"dropout_p": 0.3, "seed": 5, "alibi_slopes": np.float32([0.1, 0.2])},
    "sparse": {"block_mask": np.arange(12).reshape(4, 3) % 4 > 0},
    "unaligned": {"layout": "odd"},
}


@pytest.mark.parametrize("options", SPLIT_OPTIONS.values(), ids=SPLIT_OPTIONS)
def test_query_splits_go_with_every_option(device, monkeypatch, options):
    inputs = random_gradients(2, 2, 1, 29, 37, 8)
    check_gradients(device, splitting(monkeypatch, 3), *inputs, tiles=SMALL, **options)


def test_query_splits_of_packed_sequences(device, monkeypatch):
    rng = np.random.default_rng(3)
    dout, q = rng.standard_normal((2, 40, 2, 8), dtype=np.float32)
    k, v = rng.standard_normal((2, 50, 1, 8), dtype=np.float32)
    packed = {"cu_seqlens_q": [0, 5, 31, 31, 40], "cu_seqlens_k": [0, 0, 30, 36, 50]}
    way = splitting(monkeypatch, 2)
    check_gradients(device, way, dout, q, k, v, causal=True, tiles=SMALL, **packed)


def test_query_splits_need_no_workspace():
    """dK and dV hold the sums; they begin at 0, which a plan of one block does not ask for."""
    shapes = (2, 4, 50, 9), (2, 2, 61, 9)
    for splits, zeroed in ((1, []), (3, ["dK", "dV"])):
        plan = fa_numba.plan(*shapes, algorithm="fa1", passes="bwd", query_splits=splits)
        assert plan.workspace_bytes == 0 and len(plan.kernels) == 1
        assert [x.name for x in plan.outputs if x.zeroed] == zeroed


@pytest.mark.in_turn("way")
@all_ways
@dtypes
@pytest.mark.parametrize("d", HEAD_DIMS)
def test_head_dims_with_the_default_tiles(device, way, dtype, d):
    # Both masks, over the list: the default tiles do not depend on it.
    causal = HEAD_DIMS.index(d) % 2 == 1
    inputs = random_gradients(1, 1, 1, 21, 37, d, dtype=dtype)
    check_gradients(device, way, *inputs, causal=causal)


@pytest.mark.in_turn("way")
@all_ways
@dtypes
@pytest.mark.parametrize("d", [3, 8, 16, 19, 20, 32, 64, 72, 96, 132, 144, 192, 256])
def test_head_dims_with_several_tiles(device, way, dtype, d):
    """And copied and written one element after the other, with the same result."""
    rows = 32 if dtype != "float32" and way != "standard" and d > 64 else 16
    inputs = random_gradients(1, 1, 1, rows + 2, 18, d, dtype=dtype)
    options = {"causal": True, "tiles": Tiles(rows, 16)}
    found = check_gradients(device, way, *inputs, **options)
    if d in (3, 19, 72, 132):
        assert_same(way, found, differentiate(device, way, *inputs, layout="odd", **options))


@pytest.mark.in_turn("way")
@all_ways
@dtypes
@pytest.mark.parametrize("B, Hq, Hk", [(2, 1, 1), (1, 3, 3), (2, 6, 2), (1, 5, 1)])
def test_batches_and_shared_heads(device, way, dtype, B, Hq, Hk):
    inputs = random_gradients(B, Hq, Hk, 18, 37, 8, dtype=dtype)
    check_gradients(device, way, *inputs, causal=Hk == 1, tiles=SMALLEST[dtype])


@pytest.mark.in_turn("way", share=2)
@all_ways
@dtypes
@pytest.mark.parametrize("Nq, Nk", [(40, 5), (40, 24), (33, 17)])
def test_rows_that_see_no_column_have_no_gradient(device, way, dtype, Nq, Nk):
    dout, q, k, v = random_gradients(1, 2, 1, Nq, Nk, 8, dtype=dtype)
    how = {"causal": True, "tiles": SMALLEST[dtype]}
    found = check_gradients(device, way, dout, q, k, v, **how)
    blind = Nq - Nk
    assert (found.dq[:, :, :blind] == 0).all()
    assert (found.dq[:, :, blind + 1 :] != 0).any(axis=-1).all()
    # Their output gradient reaches nothing.
    dout[:, :, :blind] = 1e4
    assert_same(way, found, differentiate(device, way, dout, q, k, v, **how))


@pytest.mark.in_turn("way")
@every_way
@pytest.mark.parametrize(
    "tiles", [Tiles(4, 32), Tiles(12, 48), Tiles(32, 16), Tiles(64, 32)], ids=str
)
def test_tiles(device, way, tiles):
    inputs = random_gradients(1, 1, 1, 27, 35, 12)
    try:
        fa_numba.plan((1, 1, 27, 12), (1, 1, 35, 12), passes="bwd", tiles=tiles)
    except ValueError as refused:
        assert "tiles" in str(refused)
        pytest.skip(str(refused))
    check_gradients(device, way, *inputs, causal=True, tiles=tiles)


# --- memory ----------------------------------------------------------------------------------


@pytest.mark.in_turn("way")
@all_ways
@dtypes
@pytest.mark.parametrize("d", [8, 6])
@every_layout
def test_layouts(device, way, dtype, d, layout):
    inputs = random_gradients(2, 2, 1, 17, 20, d, dtype=dtype)
    check_gradients(device, way, *inputs, causal=True, tiles=SMALLEST[dtype], layout=layout)


@pytest.mark.in_turn("way")
@every_way
@pytest.mark.parametrize("odd", ["dout", "q", "k", "v", "out", "lse"])
def test_one_input_of_another_layout(way, odd):
    """16-byte access to every array needs every array at 16-byte addresses."""
    dout, q, k, v = random_gradients(1, 2, 1, 10, 19, 8)
    out, lse = saved(q, k, v)
    inputs = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse[..., None]}
    memory = {
        name: Memory("emulator", a.shape, "odd" if name == odd else "padded", a)
        for name, a in inputs.items()
    }
    arguments = [m.argument for m in memory.values()]
    arguments[-1] = arguments[-1][..., 0]
    algorithm, own = WAYS[way]
    with devices.using("emulator"):
        found = fa_numba.attention_backward(*arguments, algorithm=algorithm, tiles=SMALL, **own)
    assert_gradients(found, dout, q, k, v)


@every_way
def test_an_output_gradient_of_one_number(way):
    """What a sum's gradient is: every stride 0."""
    _, q, k, v = random_gradients(1, 2, 1, 10, 19, 8)
    dout = np.broadcast_to(np.float32(0.5), q.shape)
    algorithm, own = WAYS[way]
    with devices.using("emulator"):
        found = fa_numba.attention_backward(
            dout, q, k, v, *saved(q, k, v), algorithm=algorithm, tiles=SMALL, **own
        )
    assert_gradients(found, dout, q, k, v)


@every_way
def test_a_broadcast_batch_of_inputs(device, way):
    inputs = (np.repeat(a, 3, axis=0) for a in random_gradients(1, 2, 2, 9, 11, 8))
    found = check_gradients(device, way, *inputs, tiles=SMALL, layout="broadcast")
    if way != "fa2" or device == "emulator":  # atomic adds take any order on a GPU
        assert np.array_equal(found.dq[0], found.dq[2])
    assert np.array_equal(found.dk[0], found.dk[2]) and np.array_equal(found.dv[0], found.dv[2])


# --- values ----------------------------------------------------------------------------------


@pytest.mark.in_turn("way", share=2)
@all_ways
@pytest.mark.parametrize("dtype", ["float32", "float16", BFLOAT16])
@pytest.mark.parametrize("logit", [30.0, 1e4])
def test_peaked_and_huge_logits(device, way, dtype, logit):
    dout, q, k, v = random_gradients(1, 2, 2, 35, 37, 8, q_size=logit / 3, dtype=dtype)
    scores = np.abs(np.float32(q) @ np.float32(k).swapaxes(2, 3)) / math.sqrt(8)
    assert logit < scores.max() < 4 * logit
    check_gradients(device, way, dout, q, k, v, causal=True, tiles=SMALLEST[dtype])


@pytest.mark.in_turn("way")
@all_ways
@dtypes
@pytest.mark.parametrize("scale", [None, 0, -0.5, 40.0, np.float32(0.25), 7])
def test_scales(device, way, dtype, scale):
    inputs = random_gradients(1, 1, 1, 18, 35, 8, dtype=dtype)
    found = check_gradients(device, way, *inputs, scale=scale, tiles=SMALLEST[dtype])
    if scale == 0:
        assert (found.dq == 0).all() and (found.dk == 0).all()


@all_ways
@dtypes
def test_after_the_forward_pass_of_this_package(device, way, dtype):
    dout, q, k, v = random_gradients(1, 2, 1, 19, 25, 8, dtype=dtype)
    options = {"causal": True, "tiles": SMALLEST[dtype]}
    with devices.using(device):
        algorithm, _ = ALL_WAYS[way]
        forward = fa_numba.attention(q, k, v, algorithm=algorithm, return_lse=True, **options)
    forward = tuple(map(to_numpy, forward))
    check_gradients(device, way, dout, q, k, v, saved_values=forward, **options)


@all_ways
@dtypes
def test_a_nan_reaches_its_head_alone(device, way, dtype):
    dout, q, k, v = random_gradients(2, 4, 2, 18, 19, 8, dtype=dtype)
    tiles = SMALLEST[dtype]
    clean = differentiate(device, way, dout, q, k, v, tiles=tiles)
    dout[1, 2, 5, 3] = np.nan
    dirty = differentiate(device, way, dout, q, k, v, tiles=tiles)
    rows = np.zeros((2, 4, 18), bool)
    rows[1, 2, 5] = True
    assert np.isnan(dirty.dq[rows]).all() and not np.isnan(dirty.dq[~rows]).any()
    assert np.isnan(dirty.dk[1, 1]).all() and np.isnan(dirty.dv[1, 1, :, 3]).all()
    for got, was in ((dirty.dk, clean.dk), (dirty.dv, clean.dv)):
        assert np.array_equal(got[0], was[0]) and np.array_equal(got[1, 0], was[1, 0])
    others = np.arange(8) != 3
    assert np.array_equal(dirty.dv[..., others], clean.dv[..., others])


# --- what must hold between two calls --------------------------------------------------------


@either_mask
@dtypes
def test_a_second_sweep_changes_dq_alone(device, dtype, causal):
    inputs = random_gradients(1, 4, 2, 29, 37, 8, dtype=dtype)
    options = {"causal": causal, "tiles": SMALLEST[dtype]}
    atomic, swept = (differentiate(device, way, *inputs, **options) for way in list(WAYS)[2:])
    assert np.array_equal(atomic.dk, swept.dk) and np.array_equal(atomic.dv, swept.dv)
    if dtype == "float32":
        bound = true_gradients(*inputs, causal=causal).bounds["dq"]
        assert_within("dq", atomic.dq, swept.dq, 2 * bound)


lengths = st.integers(1, 22)
problems = st.builds(
    dict,
    heads=st.sampled_from([(1, 1), (2, 1), (4, 2)]),
    Nq=lengths,
    Nk=lengths,
    d=st.integers(3, 9),
    seed=st.integers(0, 2**32 - 1),
)
tile_sizes = st.sampled_from([Tiles(4, 16), Tiles(8, 16), Tiles(16, 16), Tiles(8, 32)])


def exact_inputs(heads, Nq, Nk, d, seed):
    """Multiples of 1/16 up to 2: sums of two of them are exact."""
    rng = np.random.default_rng(seed)
    shapes = [(1, heads[0], Nq, d)] * 2 + [(1, heads[1], Nk, d)] * 2
    return tuple((rng.integers(-32, 33, s) / 16).astype(np.float32) for s in shapes)


@every_way
@examples(3)
@given(problems, tile_sizes, st.booleans())
def test_a_power_of_two_scales_every_bit(way, problem, tiles, causal):
    dout, q, k, v = exact_inputs(**problem)
    a, b = (
        differentiate("emulator", way, x, q, k, v, tiles=tiles, causal=causal)
        for x in (dout, 4 * dout)
    )
    for got, one in zip(b, a, strict=True):
        assert np.array_equal(got, 4 * one)


# --- plan ------------------------------------------------------------------------------------


@every_way
def test_a_plan_is_what_runs(way, monkeypatch):
    made = []
    monkeypatch.setattr(devices, "launch", lambda *args: made.append(args))
    dout, q, k, v = random_gradients(2, 4, 2, 37, 53, 8)
    algorithm, own = WAYS[way]
    options = {"tiles": SMALL, "causal": True, **own}
    with devices.using("emulator"):
        p = fa_numba.plan(q.shape, k.shape, algorithm=algorithm, passes="bwd", **options)
        FUNCTIONS[algorithm](dout, q, k, v, *saved(q, k, v), **options)
    assert [kernel.name for kernel, *_ in made] == [k.name for k in p.kernels]
    for (kernel, grid, *_), planned in zip(made, p.kernels, strict=True):
        assert tuple(grid) == planned.grid
        assert (kernel.threads, kernel.shared_bytes) == (planned.threads, planned.shared_bytes)
    assert (p.algorithm, p.unit) == (algorithm, "simt")
    grids = {k.name: k.grid for k in p.kernels}
    if way == "fa1":
        assert grids == {"fa1_backward": (1, 2, 2)}
    elif algorithm == "fa2":
        assert grids["fa2_backward"] == (4, 2, 2)
        assert ("fa2_backward_dq" in grids) == (way == "fa2-deterministic")
    else:
        assert len(p.kernels) == 7
    assert p.flops == 5 * 2 * 4 * 37 * 53 * 8
    rows = 4 * 2 * 4 * 37  # bytes of one float a row
    assert p.workspace_bytes == {"fa2": rows, "fa1": 0, "standard": 2 * 56 * rows}[algorithm]
    assert p.accesses == {
        "standard": fa_numba.io_model.standard_backward,
        "fa1": fa_numba.io_model.fa1_backward,
        "fa2": fa_numba.io_model.fa2_backward,
    }[algorithm](p.problem, p.tiles, **own)


# --- bad input -------------------------------------------------------------------------------


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


class FakeGpuArray:
    """Claims to be in GPU memory."""

    def __init__(self, shape):
        self.__cuda_array_interface__ = {
            "data": (4096, False),
            "shape": shape,
            "strides": None,
            "typestr": "<f4",
            "version": 3,
        }


REFUSED = {
    **{
        f"{name} a list": ({name: [[1.0]]}, TypeError, [f"{name} is a list", "NumPy"])
        for name in GOOD
    },
    **{
        f"{name} None": ({name: None}, TypeError, [f"{name} is a NoneType", "NumPy"])
        for name in GOOD
    },
    **{
        f"{name} of {dtype}": (
            {name: GOOD[name].astype(dtype)}, TypeError, [f"{name} has dtype {dtype}", "float32"],
        )
        for name in GOOD
        for dtype in ("float64", "float16", "int32")
        if (name, dtype) != ("q", "float16")
    },
    "q of float16": (
        {"q": GOOD["q"].astype("float16")}, TypeError, ["k has dtype float32", "q float16"],
    ),
    **{
        f"{name} on the GPU": (
            {name: FakeGpuArray(GOOD[name].shape)}, (TypeError, ValueError), [f"{name} is "],
        )
        for name in GOOD
        if name != "q"
    },
    **{
        f"{name} {what}": (
            {name: ones(*shape)}, ValueError, [f"{name} has", str(shape), "(1, 2, 5, 4)"],
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
        f"lse {what}": ({"lse": ones(*shape)}, ValueError, ["lse has", str(shape), "(1, 2, 5)"])
        for what, shape in (
            ("batch", (2, 2, 5)),
            ("heads", (1, 1, 5)),
            ("length", (1, 2, 7)),
            ("rank", (1, 2, 5, 1)),
            ("order", (1, 5, 2)),
        )
    },
    "batch of k": (
        {"k": ones(3, 1, 7, 4), "v": ones(3, 1, 7, 4)}, ValueError, ["k has batch 3", "is 1"],
    ),
    "length of v": ({"v": ones(1, 1, 8, 4)}, ValueError, ["v has seqlen 8", "allowed is 7"]),
    "rank of q": ({"q": ones(2, 5, 4)}, ValueError, ["q has", "(2, 5, 4)", "rank 3"]),
    "scale nan": ({"scale": float("nan")}, ValueError, ["scale is nan", "finite"]),
    "scale text": ({"scale": "1"}, TypeError, ["scale is '1'", "finite"]),
    "causal 1": ({"causal": 1}, TypeError, ["causal is 1", "True or False"]),
    "tiles a tuple": ({"tiles": (8, 16)}, TypeError, ["tiles is (8, 16)", "Tiles("]),
    "tiles too large": ({"tiles": Tiles(512, 512)}, ValueError, ["tiles", "Br=512, Bc=512"]),
    "threads": ({"tiles": Tiles(8, 16, 7)}, ValueError, ["tiles", "threads=7", "allowed"]),
    "stream": ({"stream": 1}, ValueError, ["stream is 1", "emulator"]),
}  # fmt: skip


@pytest.fixture
def launches(monkeypatch):
    """Every launch of the test; none is made."""
    made = []
    monkeypatch.setattr(devices, "launch", lambda *args: made.append(args))
    with devices.using("emulator"):
        yield made


@pytest.mark.parametrize("algorithm", FUNCTIONS)
@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_refused_before_any_launch(algorithm, name, launches):
    replaced, error, says = REFUSED[name]
    with pytest.raises(error) as caught:
        FUNCTIONS[algorithm](**{**GOOD, **replaced})
    message = str(caught.value)
    assert all(part in message for part in says), message
    assert not launches


def test_good_input_is_taken(launches):
    for function in FUNCTIONS.values():
        function(**GOOD)
    assert launches


@pytest.mark.parametrize("bad", [1, None, "yes"])
def test_deterministic_is_checked(bad, launches):
    for call_ in (
        lambda: fa_numba.flash_attention_2_backward(**GOOD, deterministic=bad),
        lambda: fa_numba.plan((1, 2, 5, 4), (1, 1, 7, 4), passes="bwd", deterministic=bad),
    ):
        with pytest.raises(TypeError) as caught:
            call_()
        assert "deterministic" in str(caught.value) and repr(bad) in str(caught.value)
    assert not launches


def test_options_that_a_function_does_not_have_are_refused(launches):
    shapes = (1, 2, 5, 4), (1, 1, 7, 4)
    for algorithm in ("standard", "fa1"):
        with pytest.raises(TypeError, match="deterministic"):
            FUNCTIONS[algorithm](**GOOD, deterministic=True)
        with pytest.raises(TypeError, match="deterministic"):
            fa_numba.attention_backward(**GOOD, algorithm=algorithm, deterministic=True)
        with pytest.raises(ValueError, match="deterministic"):
            fa_numba.plan(*shapes, algorithm=algorithm, passes="bwd", deterministic=True)
    with pytest.raises(ValueError, match="deterministic"):
        fa_numba.plan(*shapes, deterministic=True)
    with pytest.raises(ValueError, match="return_lse"):
        fa_numba.plan(*shapes, passes="bwd", return_lse=True)
    with pytest.raises(ValueError, match="query_splits"):
        fa_numba.plan(*shapes, algorithm="fa2", passes="bwd", query_splits=2)
    with pytest.raises(ValueError, match="passes is 'back': allowed is"):
        fa_numba.plan(*shapes, passes="back")
    for algorithm in FUNCTIONS:
        for option in ({"dropout": 0.1}, {"return_lse": True}, {"query_splits": 2}):
            if (algorithm, *option) == ("fa1", "query_splits"):
                continue
            with pytest.raises(TypeError, match=next(iter(option))):
                fa_numba.attention_backward(**GOOD, algorithm=algorithm, **option)
    with pytest.raises(ValueError, match="algorithm is .fa3.: allowed is"):
        fa_numba.attention_backward(**GOOD, algorithm="fa3")
    assert not launches


@pytest.mark.parametrize("algorithm", FUNCTIONS)
def test_a_problem_too_large_for_the_emulator_is_refused(algorithm, launches):
    big = np.zeros((1, 1, 4096, 64), np.float32)
    with pytest.raises(ValueError) as caught:
        FUNCTIONS[algorithm](big, big, big, big, big, big[..., 0])
    message = str(caught.value)
    for part in ("q has shape (1, 1, 4096, 64)", "emulator takes at most", "fa_numba.reference"):
        assert part in message
    assert not launches


def test_documentation():
    whole = inspect.getdoc(fa_numba.flash_attention_2_backward)
    assert "as ``flash_attention_2``" in whole
    explained = inspect.signature(fa_numba.flash_attention_2).parameters
    for name in inspect.signature(fa_numba.flash_attention_2_backward).parameters:
        assert name in explained or f"``{name}``" in whole, f"{name} is not explained"
    for function in FUNCTIONS.values():
        assert function.__name__ in fa_numba.__all__
        text = inspect.getdoc(function)
        assert "Raises" in text or "errors as" in text
    assert "attention_backward" in fa_numba.__all__


def test_the_three_functions_share_one_signature():
    want = dict(inspect.signature(fa_numba.standard_attention_backward).parameters)
    first = dict(inspect.signature(fa_numba.flash_attention_1_backward).parameters)
    assert first.pop("query_splits").default == 1
    second = dict(inspect.signature(fa_numba.flash_attention_2_backward).parameters)
    assert second.pop("deterministic").default is False
    assert second.pop("group_splits").default == "auto"
    assert first == second == want


# --- arrays of other libraries ---------------------------------------------------------------


@pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@all_ways
def test_torch_tensors_in_and_out(way, dtype, place):
    torch = pytest.importorskip("torch")
    dout, q, k, v = random_gradients(1, 2, 1, 9, 17, 8, dtype=dtype)
    arrays = dout, q, k, v, *saved_for(way, q, k, v)
    tensors = [torch.tensor(a, device=place) for a in arrays]
    algorithm, own = ALL_WAYS[way]
    tiles = SMALLEST[dtype]
    with devices.using("emulator") if place == "cpu" else nullcontext():
        found = fa_numba.attention_backward(*tensors, algorithm=algorithm, tiles=tiles, **own)
    for gradient in found:
        assert isinstance(gradient, torch.Tensor) and gradient.dtype == tensors[0].dtype
        assert gradient.device == tensors[0].device
    assert_gradients([g.cpu().numpy() for g in found], dout, q, k, v, way=way)


# --- on a GPU: sizes, repetition, memory ------------------------------------------------------

LARGE = [
    (1, 2, 1, 2048, 2048, 64),
    (2, 4, 2, 1000, 1531, 128),
    (1, 1, 1, 777, 513, 256),
    (1, 3, 3, 129, 2047, 40),
    (3, 2, 1, 1025, 64, 33),
]


@pytest.mark.gpu
@all_ways
@pytest.mark.parametrize("dtype", ["float32", "float16", BFLOAT16])
@either_mask
@pytest.mark.parametrize("shape", LARGE, ids=str)
def test_large_problems_and_twenty_runs(way, dtype, causal, shape, record_property):
    """All bits equal but those of atomic adds, which stay within the bound; the spread of dq is
    recorded.
    """
    inputs = random_gradients(*shape, dtype=dtype)
    first = check_gradients("gpu", way, *inputs, causal=causal)
    given_ = [*inputs, *saved_for(way, *inputs[1:], causal=causal)]
    algorithm, own = ALL_WAYS[way]
    spread = 0.0
    for n in range(20):
        again = fa_numba.attention_backward(*given_, algorithm=algorithm, causal=causal, **own)
        assert_same(way, first, again)
        if n % 10 == 0:
            assert_gradients(again, *inputs, way=way, causal=causal)
        single = (x.astype(np.float32) for x in (again[0], first.dq))
        spread = max(spread, reference.relative_error(*single))
    record_property("spread of dq", spread)


@pytest.mark.gpu
@dtypes
@pytest.mark.parametrize("query_splits", [2, 7, 64])
def test_large_query_splits(dtype, query_splits, monkeypatch):
    inputs = random_gradients(1, 2, 1, 1500, 1300, 64, dtype=dtype)
    check_gradients("gpu", splitting(monkeypatch, query_splits), *inputs, causal=True)


@pytest.mark.gpu
@every_way
@every_layout
def test_large_layouts(way, layout):
    inputs = random_gradients(2, 2, 1, 300, 333, 64)
    check_gradients("gpu", way, *inputs, causal=True, layout=layout)


@pytest.mark.gpu
def test_rows_beyond_shared_memory():
    inputs = random_gradients(1, 1, 1, 3, 70_000, 8)
    p = fa_numba.plan(inputs[1].shape, inputs[2].shape, algorithm="standard", passes="bwd")
    assert p.accesses.loads["dP"] == 2 * p.accesses.stores["dS"]
    check_gradients("gpu", "standard", *inputs)


@pytest.mark.gpu
@every_way
def test_numpy_arrays_on_a_gpu(way):
    dout, q, k, v = random_gradients(1, 2, 1, 200, 300, 64)
    given_ = [dout, q, k, v, *saved(q, k, v)]
    kept = [a.copy() for a in given_]
    algorithm, own = WAYS[way]
    found = fa_numba.attention_backward(*given_, algorithm=algorithm, **own)
    assert all(type(g) is np.ndarray for g in found)
    assert_gradients(found, dout, q, k, v)
    assert all(np.array_equal(a, b) for a, b in zip(given_, kept, strict=True))


@pytest.mark.gpu
@all_ways
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_peak_of_memory_is_the_plans_workspace(way, dtype):
    dout, q, k, v = random_gradients(2, 4, 2, 256, 384, 64, dtype=dtype)
    inputs = [devices.to_gpu(a) for a in (dout, q, k, v, *saved_for(way, q, k, v))]
    algorithm, own = ALL_WAYS[way]
    facts = {"algorithm": algorithm, "dtype": dtype, "passes": "bwd"}
    p = fa_numba.plan(q.shape, k.shape, **facts, **own)
    with devices.track_memory() as memory:
        fa_numba.attention_backward(*inputs, algorithm=algorithm, **own)
    assert memory.peak_bytes == p.workspace_bytes


@pytest.mark.gpu
def test_torch_runs_on_its_current_stream():
    torch = pytest.importorskip("torch")
    dout, q, k, v = (torch.randn(1, 4, 512, 64, device="cuda") for _ in range(4))
    out, lse = fa_numba.flash_attention_2(q, k, v, return_lse=True)
    want = fa_numba.flash_attention_2_backward(dout, q, k, v, out, lse, deterministic=True)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        late = torch.zeros_like(dout)
        torch.cuda._sleep(50_000_000)
        late += dout  # the kernels must wait for this, on the same stream
        got = fa_numba.flash_attention_2_backward(late, q, k, v, out, lse, deterministic=True)
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
