"""Every gradient in 16 bits against float64, as test_mma.py the forward pass.

Guard bands around every array, NaN in every new one, accesses those of the closed form.
"""

import itertools
import math

import numpy as np
import pytest
from backward_helpers import (
    ALL_WAYS,
    NAMES,
    assert_gradients,
    check_gradients,
    differentiate,
    expected,
    half_gradients,
    with_dlse,
)
from conftest import examples
from helpers import ROUNDING, assert_no_growth, assert_within, ml_dtypes
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from mma_helpers import every_dtype, no_bfloat16
from test_mma import OPTIONS, any_call

import fa_numba
from fa_numba import Tiles, reference
from fa_numba import device as devices
from fa_numba.choices.tiles import mma_tiles
from fa_numba.host import planning, standard
from fa_numba.integers import ceil_div
from fa_numba.tiling import select_mma_backward_spec

FLASH = [way for way in ALL_WAYS if way != "standard"]
SMALL = Tiles(16, 16)
HEAD_DIMS = (8, 16, 19, 32, 64, 72, 96, 128, 144, 192, 256)
every_way = pytest.mark.parametrize("way", ALL_WAYS)
every_flash = pytest.mark.parametrize("way", FLASH)


# --- the check can fail ----------------------------------------------------------------------


@pytest.mark.in_turn("way", share=2)
@every_way
@every_dtype
@pytest.mark.parametrize("n", [0, 1, 2])
def test_the_check_fails_on_a_scale_within_the_norm(way, dtype, n):
    inputs = half_gradients(dtype, 1, 4, 2, 64, 80, 16)
    single = [x.astype(np.float32) for x in inputs]
    found = list(reference.unfused_backward(*single, matrix_dtype=dtype))
    assert_gradients(found, *inputs, way=way)
    found[n] = found[n] * (1 + ROUNDING[dtype])
    exact, bounds = expected(way, *inputs)
    assert_within(NAMES[n], found[n], exact[n], bounds[n])
    with pytest.raises(AssertionError, match=f"{NAMES[n]} is 1.00.* times what it should be"):
        assert_gradients(found, *inputs, way=way)


@pytest.mark.in_turn("way")
@every_way
@every_dtype
@pytest.mark.parametrize("change", ["nothing", "a scale", "an element", "D", "a tile"])
def test_the_check_fails_on_a_wrong_gradient(way, dtype, change):
    inputs = half_gradients(dtype, 1, 2, 1, 24, 40, 8)
    single = [x.astype(np.float32) for x in inputs]
    found = [x.astype(inputs[0].dtype) for x in reference.unfused_backward(*single)]
    if change == "nothing":
        assert_gradients(found, *inputs, way=way)
        return
    if change == "a scale":
        found[0] = (found[0].astype(np.float32) * 1.02).astype(found[0].dtype)
    elif change == "an element":
        found[2][0, 0, 3, 5] += {"float16": 0.02, "bfloat16": 0.3}[dtype]
    elif change == "a tile":
        found[1][:, :, 32:] = 0
    else:
        dout, q, k, v = single
        O, L = reference.attention(q, k, v, return_lse=True)
        P = np.exp(q @ k.swapaxes(2, 3) / math.sqrt(8) - L[..., None])
        dS = P * (dout @ v.swapaxes(2, 3) + (dout * O).sum(axis=3, keepdims=True))
        found[0] = (dS @ k / math.sqrt(8)).astype(found[0].dtype)
    with pytest.raises(AssertionError, match="worst at .* got .*, expected"):
        assert_gradients(found, *inputs, way=way)


TILES = [(8, Tiles(16, 64)), (8, Tiles(48, 32)), (8, Tiles(64, 16)), (8, Tiles(32, 64, 128))]
TILES += [(72, Tiles(64, 32)), (72, Tiles(32, 64, 256)), (72, Tiles(32, 48))]


@pytest.mark.in_turn("way")
@every_flash
@pytest.mark.parametrize("d, tiles", TILES, ids=str)
def test_tiles(way, d, tiles):
    inputs = half_gradients("float16", 1, 1, 1, 70 if d == 8 else 40, 75, d)
    check_gradients("emulator", way, *inputs, causal=True, tiles=tiles)


@pytest.mark.parametrize(
    "tiles",
    [Tiles(16, 64), Tiles(48, 32), Tiles(64, 16), Tiles(64, 48), Tiles(32, 128, 64)],
    ids=lambda t: f"{t.Br}x{t.Bc}",
)
def test_tiles_of_standard_attention(device, tiles):
    inputs = half_gradients("float16", 1, 1, 1, 70, 75, 16)
    check_gradients(device, "standard", *inputs, tiles=tiles)


# --- options ---------------------------------------------------------------------------------

SLOW = pytest.mark.slow
ON_GPU = ("window", "softcap", "bias", "alibi", "both lengths", "block mask", "dropout", "most")


@pytest.mark.in_turn("way")
@every_way
@pytest.mark.parametrize("name", OPTIONS)
def test_options(way, name):
    inputs = half_gradients("float16", 2, 2, 1, 40, 55, 8)
    check_gradients("emulator", way, *inputs, tiles=SMALL, **OPTIONS[name])


@every_way
@pytest.mark.parametrize("d, Nq", [(8, 40), (72, 70)])
def test_a_gradient_of_lse(device, way, d, Nq):
    """Of rows that see a column, up to where a sequence ends."""
    inputs = half_gradients("float16", 2, 2, 1, Nq, 35, d)
    options = {"causal": True, "q_lens": [Nq, 21], "tiles": Tiles(16 if d == 8 else 32, 16)}
    check_gradients(device, way, *inputs, **with_dlse(inputs, options))


@every_way
@no_bfloat16
@pytest.mark.parametrize(
    "name",
    ["most", *(pytest.param(n, marks=SLOW) for n in ("softcap, bias and slopes", "dropout"))],
)
def test_options_in_bfloat16(way, name):
    inputs = half_gradients("bfloat16", 2, 2, 1, 40, 55, 8)
    check_gradients("emulator", way, *inputs, tiles=SMALL, **OPTIONS[name])


@pytest.mark.in_turn("way")
@pytest.mark.parametrize("way", ["fa1", "fa2-deterministic"])
@pytest.mark.parametrize("name", ["most", "causal dropout"])
def test_options_where_two_warps_share_their_columns(way, name):
    """Beyond d = 64; blocks of the mask are 32 x 16 then."""
    inputs = half_gradients("float16", 2, 2, 1, 40, 55, 72)
    options = dict(OPTIONS[name])
    if "block_mask" in options:
        options["block_mask"] = options["block_mask"][:, :2]
    check_gradients("emulator", way, *inputs, tiles=Tiles(32, 16), **options)


@pytest.mark.in_turn("way", share=2)
@every_way
@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences(device, way, causal):
    inputs = half_gradients("float16", 1, 4, 2, 41, 50, 8)
    packed = [np.ascontiguousarray(x[0].swapaxes(0, 1)) for x in inputs]
    starts = {"cu_seqlens_q": [0, 20, 20, 41], "cu_seqlens_k": [0, 23, 30, 50]}
    check_gradients(device, way, *packed, causal=causal, tiles=SMALL, **starts)


@pytest.mark.in_turn("way", share=2)
@every_flash
@pytest.mark.parametrize("Bc", [16, 48, 64])
def test_dropout_does_not_depend_on_the_tiles(way, Bc):
    inputs = half_gradients("float16", 1, 1, 1, 35, 100, 8)
    options = {"dropout_p": 0.4, "seed": 2**40 + 5, "tiles": Tiles(32, Bc)}
    check_gradients("emulator", way, *inputs, **options)


# --- values ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "way, Nq, Nk, larger",
    [
        *((way, 16, 256, Tiles(16, 128)) for way in ("standard", "fa1", "fa2-deterministic")),
        *((way, 256, 16, Tiles(128, 16)) for way in ("fa1", "fa1-split", "fa2")),
    ],
    ids=str,
)
def test_more_passes_err_no_more(way, Nq, Nk, larger):
    """16 tiles of columns or two, over which dQ is summed; of rows, over which dK and dV are."""
    inputs = half_gradients("float16", 1, 1, 1, Nq, Nk, 16)
    found = []
    for tiles in (larger, SMALL):
        blocks = np.ones((ceil_div(Nq, tiles.Br), ceil_div(Nk, tiles.Bc)), bool)
        # With a mask of its own blocks a second sweep takes these tiles too.
        found.append(differentiate("emulator", way, *inputs, tiles=tiles, block_mask=blocks))
    exact, _ = expected(way, *inputs)
    for name, few, many, e in zip(NAMES, *found, exact, strict=True):
        assert_no_growth(name, few, many, e)


# --- what must hold between two calls --------------------------------------------------------


@every_way
@settings(examples(6), phases=[Phase.explicit, Phase.generate])
@given(any_call(), st.sampled_from(["float16", *(["bfloat16"] if ml_dtypes else [])]))
def test_any_problem(way, call, dtype):
    sizes, options = call
    for name in ("return_lse", "out_layout"):
        options.pop(name)
    check_gradients("emulator", way, *half_gradients(dtype, *sizes), **options)


@pytest.mark.in_turn("options")
@pytest.mark.parametrize("options", [{}, {"dropout_p": 0.3}], ids=["plain", "dropout"])
@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize("warps", [1, 4])
def test_long_rows_of_standard_attention(device, monkeypatch, warps, resident, options):
    """603 columns are 76 chunks: of one warp's threads several each, of four warps' one or none."""
    monkeypatch.setattr(planning, "planned", planning.planned.__wrapped__)
    monkeypatch.setattr(standard, "row_warps", lambda *_: warps)
    if not resident:
        monkeypatch.setattr(standard, "row_elements", lambda *_, **__: 0)
    inputs = half_gradients("float16", 1, 1, 1, 3, 603, 8)
    check_gradients(device, "standard", *inputs, tiles=Tiles(16, 64), **options)


# --- plans -----------------------------------------------------------------------------------


@every_way
def test_a_plan_says_what_runs(way):
    shape, dtype = (2, 4, 300, 63), "float16"
    algorithm, own = ALL_WAYS[way]
    with devices.using("emulator"):
        facts = {"algorithm": algorithm, "passes": "bwd", **own}
        plan = fa_numba.plan(shape, shape, dtype=dtype, **facts)
        assert plan == fa_numba.plan(shape, shape, dtype=dtype, unit="mma", **facts)
        single = fa_numba.plan(shape, shape, algorithm=algorithm, passes="bwd")
    assert plan.unit == "mma" and single.unit == "simt" and plan.flops == single.flops
    assert plan.problem.dtype == plan.accesses.dtype == dtype
    names = [k.name for k in plan.kernels]
    rows, A = 8 * 300, 8 * 300 * 64  # rows of A start at 8-byte addresses
    Tc = -(-300 // plan.tiles.Bc)
    if way == "standard":
        assert names == [k.name for k in single.kernels]
        assert plan.workspace_bytes == 2 * 2 * 8 * 300 * 304
    elif algorithm == "fa1":
        splits = own.get("query_splits", 1)
        assert names == ["fa1_backward", *["round_rows"] * (2 * (splits > 1))]
        assert plan.kernels[0].grid == (splits, 4, 2)
        assert plan.workspace_bytes == 4 * A * (3 if splits > 1 else 1)
    else:
        last = "fa2_backward_dq" if way == "fa2-deterministic" else "round_rows"
        assert names == ["row_sums", "fa2_backward", last]
        assert plan.kernels[1].grid == (Tc, 4, 2)
        assert plan.workspace_bytes == 4 * (rows + (A if way == "fa2" else 0))


@pytest.mark.parametrize("limit", [99 * 1024, 163 * 1024, 227 * 1024])
@pytest.mark.parametrize("algorithm", ["fa1", "fa2"])
def test_the_default_tiles_fit(limit, algorithm):
    for d, N in itertools.product(range(8, 257, 8), (1, 17, 64, 4096)):
        if d > 192 and algorithm == "fa1" and limit < 2**17:
            continue  # not even the smallest do
        tiles = mma_tiles(algorithm, "bwd", N, N, d, limit).value
        spec = select_mma_backward_spec(tiles, d, limit, algorithm=algorithm)
        assert spec.shared_bytes <= limit and spec.fits_registers
        assert tiles.Br <= max(32, 2 * N) and tiles.Bc <= max(16, 2 * N)


Q, K = np.ones((1, 2, 5, 8), np.float16), np.ones((1, 1, 7, 8), np.float16)
L = np.zeros((1, 2, 5), np.float32)
GIVEN = {"dout": Q, "q": Q, "k": K, "v": K, "out": Q, "lse": L}
SINGLE = {name: x.astype(np.float32) for name, x in GIVEN.items()}

PLAN = {"dtype": "float16", "passes": "bwd"}
REFUSED = [
    # What a plan or, of these arrays, a call is given; error, and what its message says
    *(
        (PLAN | {"algorithm": algorithm, "query_splits": 2}, ValueError, "query_splits is 2",
         f"{algorithm} on mma")
        for algorithm in ("standard", "fa2")
    ),
    *(
        ({"algorithm": algorithm, "query_splits": 2}, TypeError, "query_splits")
        for algorithm in ("standard", "fa2")
    ),
    ({"algorithm": "fa1", "query_splits": 0}, ValueError, "query_splits is 0"),
    ({"algorithm": "fa1", "deterministic": True}, TypeError, "deterministic"),
    ({"tiles": Tiles(24, 16)}, ValueError, "tiles: Br=24, Bc=16", "head_dim=8",
     "multiples of 16"),
    (PLAN | {"d": 72, "tiles": Tiles(16, 16)}, ValueError, "tiles: Br=16, Bc=16", "head_dim=72",
     "multiples of 32 and 16"),
    ({"tiles": Tiles(16, 32, 96)}, ValueError, "tiles: threads=96", "[32, 64]"),
    (PLAN | {"d": 256, "tiles": Tiles(128, 64)}, ValueError, "Br=128, Bc=64", "head_dim=256",
     "bytes of shared memory"),
    *(
        ({name: SINGLE[name]}, TypeError, f"{name} has dtype float32", "float16")
        for name in ("dout", "k", "v", "out")
    ),
    ({"lse": L.astype(np.float16)}, TypeError, "lse has dtype float16", "float32"),
]  # fmt: skip


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: row[2])
def test_what_cannot_be_is_refused_by_name(row):
    given_, error, *says = row
    given_ = dict(given_)
    with devices.using("emulator"), pytest.raises(error) as caught:
        if "passes" in given_:
            shape = (1, 1, 5, given_.pop("d", 8))
            fa_numba.plan(shape, shape, **given_)
        else:
            fa_numba.attention_backward(**GIVEN | given_)
    assert all(part in str(caught.value) for part in says), str(caught.value)


# --- on a GPU: head dimensions, options, sizes, repetition, memory ----------------------------

# fa1-split has fa1's kernels but for how dK and dV are written.
GPU_WAYS = [way for way in ALL_WAYS if way != "fa1-split"]


@pytest.mark.gpu
@pytest.mark.parametrize("way", GPU_WAYS)
@pytest.mark.parametrize("d", HEAD_DIMS)
def test_head_dims_on_a_gpu(way, d):
    check_gradients("gpu", way, *half_gradients("float16", 1, 2, 1, 200, 233, d))


@pytest.mark.gpu
@pytest.mark.parametrize("way", GPU_WAYS)
@pytest.mark.parametrize("name", ON_GPU)
def test_options_on_a_gpu(way, name):
    inputs = half_gradients("float16", 2, 2, 1, 40, 55, 8)
    check_gradients("gpu", way, *inputs, tiles=SMALL, **OPTIONS[name])


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["fa1", "fa2"])
def test_most_options_on_a_gpu_where_two_warps_share_their_columns(way):
    inputs = half_gradients("float16", 2, 2, 1, 40, 55, 72)
    options = {**OPTIONS["most"], "block_mask": OPTIONS["most"]["block_mask"][:, :2]}
    check_gradients("gpu", way, *inputs, tiles=Tiles(32, 16), **options)
