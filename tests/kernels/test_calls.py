"""Every kernel of CUDA cores and of mma.sync, forward and backward, against float64, between guard
bands, its accesses against the closed form: sizes, head dimensions, tiles, layouts, values, and
options alone and together. What a planted fault needs are `mutant_cases`.
"""

import itertools
import math
from dataclasses import replace
from functools import partial

import conftest
import numpy as np
import pytest
from backward_helpers import (
    ALL_WAYS,
    UNORDERED,
    assert_same,
    check_gradients,
    differentiate,
    random_gradients,
    saved,
    with_dlse,
)
from conftest import examples
from helpers import (
    EPS,
    GUARD,
    LAYOUTS,
    ROUNDING,
    assert_close_to_float64,
    attend,
    check,
    numpy_dtype,
    to_numpy,
)
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from mma_helpers import SLOW_BFLOAT16
from options_helpers import DRAWS, cumulative, drawn, inputs, names_of_options, visible

import fa_numba
from fa_numba import Tiles
from fa_numba import device as devices

# Every way to O and L: (algorithm, what its function takes beside); then every way to gradients.
FORWARD = {
    "standard": ("standard", {}),
    "fa1": ("fa1", {}),
    "fa1-split": ("fa1", {"query_splits": 2}),
    "fa2": ("fa2", {}),
}
WAYS = [*(("fwd", name) for name in FORWARD), *(("bwd", name) for name in ALL_WAYS)]
# Of 16 bits alone: two stages of K and V, and keys split over the warps.
OF_MMA = {"stages": ("fa2", {}), "keys": ("fa1", {"warp_partition": "keys"})}
ALL_FORWARD = FORWARD | OF_MMA
every_way = pytest.mark.parametrize("way", WAYS, ids="-".join)
every_forward = pytest.mark.parametrize("forward", FORWARD)
of_mma = pytest.mark.parametrize("way", [("fwd", name) for name in OF_MMA], ids="-".join)
dtypes = pytest.mark.parametrize("dtype", ["float32", "float16", SLOW_BFLOAT16])
either_mask = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
each_layout = pytest.mark.parametrize("layout", [x for x in LAYOUTS if x != "broadcast"])
INF = float("inf")


def tiles_of(way, dtype):
    """The smallest, so that a small problem has several."""
    if dtype == "float32":
        return Tiles(8, 16)
    return Tiles(16, 32 if "keys" in way else 16, stages=1 + ("stages" in way))


def held(device, way, arrays, **options):
    """A call of this way with dout, q, k and v, held against float64; what it gives."""
    passes, name = way
    if passes == "bwd":
        return check_gradients(device, name, *arrays, **options)
    algorithm, own = ALL_FORWARD[name]
    return check(device, algorithm, *arrays[1:], **own, **options)


def again(device, way, arrays, **options):
    """The same call, not held against anything."""
    passes, name = way
    if passes == "bwd":
        return differentiate(device, name, *arrays, **options)
    algorithm, own = ALL_FORWARD[name]
    return attend(device, algorithm, *arrays[1:], **own, **options)


def assert_equal(way, found, others):
    """All bits equal, but on a GPU those of sums without an order."""
    if way[0] == "bwd":
        assert_same(way[1], found, others)
    else:
        assert np.array_equal(found.O, others.O) and np.array_equal(found.L, others.L)


def halves(arrays, dtype):
    return [x.astype(numpy_dtype(dtype)) for x in arrays]


# --- sizes, tiles, layouts, values -------------------------------------------------------------

LENGTHS = [(1, 1), (1, 40), (40, 1), (8, 16), (9, 17), (15, 31), (16, 32), (17, 33), (37, 13)]
LENGTHS += [(33, 70)]
CAUSAL = {"causal": True}
# name -> (B, Hq, Hk, Nq, Nk, d), options
CALLS = {
    **{
        f"{Nq} x {Nk}{' causal' * causal}": ((1, 1, 1, Nq, Nk, 8), {"causal": causal})
        for (Nq, Nk), causal in itertools.product(LENGTHS, (False, True))
    },
    **{
        f"{Hq} heads of {Hk}, {B} entries": ((B, Hq, Hk, 18, 37, 8), {"causal": Hk == 1})
        for B, Hq, Hk in ((2, 1, 1), (1, 3, 3), (2, 6, 2), (1, 5, 1))
    },
    **{
        f"{Nq - Nk} rows see nothing": ((1, 2, 1, Nq, Nk, 8), CAUSAL)
        for Nq, Nk in ((40, 5), (40, 24), (33, 17))
    },
    **{
        f"scale {scale}": ((1, 1, 1, 18, 35, 8), {"scale": scale, "softcap": softcap})
        for scale, softcap in ((0, None), (-0.5, None), (40.0, None), (7, 2.0), (-0.5, 2.0))
    },
    "a scale of NumPy's": ((1, 1, 1, 18, 35, 8), {"scale": np.float32(0.25), **CAUSAL}),
    **{
        f"dropout in {Bc} columns": (
            (1, 1, 1, 35, 150, 8),
            {"dropout_p": 0.4, "seed": 2**40 + 5, "tiles": Tiles(32, Bc)},
        )
        for Bc in (16, 48, 64)
    },
}
TILES = {
    "float32": [Tiles(4, 32), Tiles(12, 48), Tiles(32, 16), Tiles(8, 64), Tiles(64, 32)],
    "float16": [
        *(Tiles(16, 64), Tiles(48, 32), Tiles(64, 16), Tiles(64, 48), Tiles(128, 64)),
        *(Tiles(64, 32, 64), Tiles(64, 32, 128), Tiles(32, 64, 128)),
    ],
}


@pytest.mark.in_turn("way")
@every_way
@dtypes
@pytest.mark.parametrize("name", CALLS)
def test_a_call(device, way, dtype, name):
    shape, options = CALLS[name]
    options = {"tiles": tiles_of(way, dtype), **options}
    held(device, way, random_gradients(*shape, dtype=dtype), **options)


@pytest.mark.in_turn("way")
@of_mma
@pytest.mark.parametrize("name", CALLS)
def test_a_call_of_mma_alone(device, way, name):
    """With two stages every bit is that of one stage."""
    shape, options = CALLS[name]
    options = {"tiles": tiles_of(way, "float16"), **options}
    if way[1] == "keys" and "dropout_p" in options:  # 16, 48 and 64 columns a warp
        options["tiles"] = Tiles(16, 2 * options["tiles"].Bc, 64)
    arrays = random_gradients(*shape, dtype="float16")
    found = held(device, way, arrays, **options)
    if way[1] == "stages":
        one = options | {"tiles": replace(options["tiles"], stages=1)}
        assert_equal(way, found, again(device, ("fwd", "fa2"), arrays, **one))


@pytest.mark.in_turn("way")
@every_way
@pytest.mark.parametrize(
    "dtype, tiles", [(dtype, x) for dtype, all_tiles in TILES.items() for x in all_tiles], ids=str
)
def test_tiles(device, way, dtype, tiles):
    arrays = random_gradients(1, 1, 1, 70, 75, 12, dtype=dtype)
    algorithm, _ = (ALL_WAYS if way[0] == "bwd" else FORWARD)[way[1]]
    facts = {"algorithm": algorithm, "passes": way[0], "dtype": dtype, "tiles": tiles}
    try:
        fa_numba.plan(arrays[1].shape, arrays[2].shape, **facts)
    except ValueError as refused:
        assert "tiles" in str(refused)
        pytest.skip(str(refused))
    held(device, way, arrays, causal=True, tiles=tiles)


HEAD_DIMS = (1, 2, 3, 7, 8, 16, 20, 31, 32, 33, 40, 64, 80, 96, 128, 144, 160, 192, 256)


@pytest.mark.in_turn("way")
@every_way
@dtypes
@pytest.mark.parametrize("d", HEAD_DIMS)
def test_head_dims_with_the_default_tiles(device, way, dtype, d):
    # Both masks, over the list: the default tiles do not depend on it.
    causal = HEAD_DIMS.index(d) % 2 == 1
    held(device, way, random_gradients(1, 1, 1, 21, 37, d, dtype=dtype), causal=causal)


@pytest.mark.in_turn("way")
@every_way
@dtypes
@pytest.mark.parametrize("d", [1, 3, 7, 19, 20, 48, 64, 72, 96, 132, 192, 256])
def test_head_dims_with_several_tiles(device, way, dtype, d):
    """And copied and written one element after the other, with the same result."""
    rows = 32 if way[0] == "bwd" and dtype != "float32" and way[1] != "standard" and d > 64 else 16
    arrays = random_gradients(1, 1, 1, rows + 2, 20, d, dtype=dtype)
    options = {"causal": d % 64 > 0, "tiles": Tiles(rows, 16)}
    found = held(device, way, arrays, **options)
    assert_equal(way, found, again(device, way, arrays, layout="odd", **options))


@pytest.mark.in_turn("way")
@of_mma
@pytest.mark.parametrize("d", HEAD_DIMS)
def test_head_dims_of_mma_alone(device, way, d):
    arrays = random_gradients(1, 1, 1, 21, 70, d, dtype="float16")
    tiles = {"tiles": tiles_of(way, "float16")} if way[1] == "stages" else {}
    held(device, way, arrays, causal=True, **tiles)


@pytest.mark.in_turn("way")
@every_way
@dtypes
@pytest.mark.parametrize("d", [8, 6])
@each_layout
def test_layouts(device, way, dtype, d, layout):
    """Of the arrays, a bias and slopes; O of a forward pass has another one."""
    shape = 2, 2, 1, 17, 20, d
    options = {"tiles": tiles_of(way, dtype), **drawn(["alibi", "lengths"], shape, seed=2)}
    options |= {"bias": normal(2, 2, 17, 20), "tiles": tiles_of(way, dtype)}
    arrays, options = inputs(shape, options)
    own = {"out_layout": "odd" if layout == "padded" else "padded"} if way[0] == "fwd" else {}
    held(device, way, halves(arrays, dtype), layout=layout, **own, **options)


@pytest.mark.in_turn("way")
@every_way
@each_layout
def test_layouts_of_packed_sequences(way, layout):
    shape = 2, 2, 1, 17, 20, 4
    options = drawn(["packed", "dropout"], shape, seed=2) | {"bias": normal(2, 2, 17, 20)}
    arrays, options = inputs(shape, options)
    held("emulator", way, arrays, layout=layout, **options)


@every_way
@dtypes
def test_a_broadcast_batch_of_inputs(device, way, dtype):
    arrays = [np.repeat(a, 3, axis=0) for a in random_gradients(1, 2, 2, 17, 20, 8, dtype=dtype)]
    held(device, way, arrays, tiles=tiles_of(way, dtype), layout="broadcast")


@pytest.mark.in_turn("way")
@every_way
@dtypes
@either_mask
@pytest.mark.parametrize("logit", [30.0, 1e4])
def test_peaked_and_huge_logits(device, way, dtype, causal, logit):
    arrays = random_gradients(1, 2, 2, 35, 37, 8, q_size=logit / 3, dtype=dtype)
    scores = np.abs(np.float32(arrays[1]) @ np.float32(arrays[2]).swapaxes(2, 3)) / math.sqrt(8)
    assert logit < scores.max() < 4 * logit
    held(device, way, arrays, causal=causal, tiles=tiles_of(way, dtype))


def growing(q, k, v):
    """In every tile, or in none but the first."""
    q[...] = 1.0
    k[...] = np.linspace(-20, 20, k.shape[2])[:, None]
    k[:, 1] = k[:, 1, ::-1]


def columns_of_minus_infinity(q, k, v):
    q[..., 0] = np.abs(q[..., 0])
    k[:, :, 3:50, 0] = -INF  # whole tiles, and all columns of some warps


def rows_of_minus_infinity(q, k, v):
    q[..., 0], k[...] = 1.0, np.abs(k)
    q[0, 0, 5] = q[0, 0, 11] = -INF


def small_and_large(q, k, v):
    """P below float16's normal numbers, V near its largest."""
    q[...], k[...] = 1.0, 0.0
    k[:, :, :32, 0] = 27.0  # e^(27 / sqrt(8)) = 14000 to 1
    v[:, :, 32:] = 30000.0 + 1000.0 * v[:, :, 32:].astype(np.float32)


VALUES = [
    *itertools.product((growing, columns_of_minus_infinity, rows_of_minus_infinity), (False, True)),
    (small_and_large, False),
]


@pytest.mark.in_turn("forward", share=2)
@pytest.mark.parametrize("forward", ALL_FORWARD)
@dtypes
@pytest.mark.parametrize("change, causal", VALUES)
def test_values(device, forward, dtype, change, causal):
    if forward in OF_MMA and dtype == "float32":
        pytest.skip("on tensor cores alone")
    arrays = random_gradients(1, 2, 2, 35, 80, 8, dtype=dtype)
    change(*arrays[1:])
    way = "fwd", forward
    held(device, way, arrays, causal=causal, tiles=tiles_of(way, dtype))


def _nan_rows(O):
    return np.flatnonzero(np.isnan(O.astype(np.float32)).any(axis=-1)).tolist()


@pytest.mark.in_turn("forward")
@every_forward
@dtypes
@either_mask
@pytest.mark.parametrize("bad", [np.nan, np.inf], ids=["nan", "inf"])
def test_nan_and_infinity_in_k_reach_the_rows_that_see_them(device, forward, dtype, causal, bad):
    arrays = random_gradients(1, 2, 2, 37, 35, 8, dtype=dtype)
    _, q, k, _ = arrays
    way = "fwd", forward
    how = {"causal": causal, "tiles": tiles_of(way, dtype)}
    q[..., 2] = np.abs(q[..., 2]) + 0.1  # +inf in k makes scores of +inf
    clean = again(device, way, arrays, **how)
    k[0, 1, 19, 2] = bad
    dirty = again(device, way, arrays, **how)
    sees = np.arange(37) - 2 >= 19 if causal else np.full(37, True)
    assert _nan_rows(dirty.O[0, 1]) == np.flatnonzero(sees).tolist()
    assert not np.isfinite(dirty.L[0, 1, sees]).any()
    for found, was in ((dirty.O, clean.O), (dirty.L, clean.L)):
        assert np.array_equal(found[0, 1, ~sees], was[0, 1, ~sees])
        assert np.array_equal(found[0, 0], was[0, 0])


@every_forward
@dtypes
def test_nan_in_q_reaches_its_row_alone_and_in_v_what_sees_its_column(device, forward, dtype):
    arrays = random_gradients(1, 1, 1, 37, 35, 8, dtype=dtype)
    _, q, _, v = arrays
    way = "fwd", forward
    how = {"causal": True, "tiles": tiles_of(way, dtype)}
    clean = again(device, way, arrays, **how)
    before = q[0, 0, [1, 13]].copy()
    q[0, 0, 13, 7] = q[0, 0, 1, 0] = np.nan  # row 1 sees no column
    dirty = again(device, way, arrays, **how)
    assert _nan_rows(dirty.O[0, 0]) == [13] and np.isnan(dirty.L[0, 0, 13])
    others = np.arange(37) != 13
    assert np.array_equal(dirty.O[0, 0, others], clean.O[0, 0, others])
    assert np.array_equal(dirty.L[0, 0, others], clean.L[0, 0, others])
    q[0, 0, [1, 13]], v[0, 0, 11:, 5] = before, np.nan
    dirty = again(device, way, arrays, **how)
    assert np.isnan(dirty.O[0, 0, 13:, 5].astype(np.float32)).all()
    if forward != "standard":  # whose P of 0 times NaN is NaN
        assert (dirty.O[0, 0, :2] == 0).all()  # these see no column
    others = np.arange(8) != 5
    assert np.array_equal(dirty.O[..., others], clean.O[..., others])
    assert np.array_equal(dirty.L, clean.L)


@pytest.mark.parametrize("way", ALL_WAYS)
@dtypes
def test_a_nan_in_an_output_gradient_reaches_its_head_alone(device, way, dtype):
    dout, q, k, v = random_gradients(2, 4, 2, 18, 19, 8, dtype=dtype)
    tiles = tiles_of(("bwd", way), dtype)
    clean = differentiate(device, way, dout, q, k, v, tiles=tiles)
    dout[1, 2, 5, 3] = np.nan
    dirty = differentiate(device, way, dout, q, k, v, tiles=tiles)
    rows = np.zeros((2, 4, 18), bool)
    rows[1, 2, 5] = True
    assert np.isnan(dirty.dq[rows]).all() and not np.isnan(dirty.dq[~rows]).any()
    assert np.isnan(dirty.dk[1, 1]).all() and np.isnan(dirty.dv[1, 1, :, 3]).all()
    same = np.array_equal
    if device == "gpu" and "dk" in UNORDERED.get(way, ()):  # sums in another order
        error = 2 * ROUNDING.get(dtype, EPS)
        same = partial(np.allclose, rtol=error, atol=error)
    for got, was in ((dirty.dk, clean.dk), (dirty.dv, clean.dv)):
        assert same(got[0], was[0]) and same(got[1, 0], was[1, 0])
    others = np.arange(8) != 3
    assert same(dirty.dv[..., others], clean.dv[..., others])


# --- options -----------------------------------------------------------------------------------

TINY = (2, 2, 1, 11, 21, 4)  # B, Hq, Hk, Nq, Nk, d: two tiles each way, both ragged
SIZES = {"float32": TINY, "float16": (2, 2, 1, 40, 55, 8), "bfloat16": (2, 2, 1, 40, 55, 8)}


def normal(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape, dtype=np.float32)


def _infinite_bias(B, Hq, Nq, Nk):
    """-inf here and there, and in all of two rows."""
    bias = normal(B, Hq, Nq, Nk)
    bias[bias > 0.7] = -INF
    bias[0, 0, 3] = bias[B - 1, Hq - 1, Nq - 1] = -INF
    return bias


def _random_mask(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).random(shape) < 0.6


def alone(B, Hq, Nq, Nk, tiles):
    """Every option by itself, for this problem."""
    Tr, Tc = -(-Nq // tiles.Br), -(-Nk // tiles.Bc)
    some_q, some_k = [Nq, Nq // 2][:B], [Nk // 3, Nk][:B]
    far = normal(B, Hq, Nq + Nk)
    return {
        "causal": {"causal": True},
        "window of both sides": {"window": (3, 2)},
        "window to the left": {"window": (4, -1)},
        "window to the right": {"window": (-1, 1)},
        "window of one key": {"window": (0, 0)},
        "window wider than the sequence": {"window": (99, 2**40)},
        "causal window": {"window": (5, -1), "causal": True},
        "causal window with a right side": {"window": (2, 7), "causal": True},
        "softcap": {"softcap": 1.5},
        "softcap below the scores": {"softcap": 0.125},
        "score_mod of an array": {"score_mod": lambda s, b, h, i, j: s - far[b, h, i - j + Nk]},
        "score_mod of a power": {"score_mod": lambda s, b, h, i, j: s * s - abs(s) ** 1.5 / 2},
        "score_mod of 0 here and there": {"score_mod": lambda s, b, h, i, j: s if i < j else 0},
        "score_mod of a kink, and softcap": {
            "score_mod": lambda s, b, h, i, j: max(s, h / 8) + math.sin(s * i),
            "softcap": 1.5,
        },
        "mask_mod": {"mask_mod": lambda b, h, i, j: (i + 2 * j + h) % 3 != b},
        "mask_mod of an array": {"mask_mod": lambda b, h, i, j: far[b, h, i] < 0.5 or i == j},
        "mask_mod of nothing": {"mask_mod": lambda b, h, i, j: i < 0},
        "bias": {"bias": normal(B, Hq, Nq, Nk)},
        "bias for all batch entries": {"bias": normal(1, Hq, Nq, Nk)},
        "bias for all heads": {"bias": normal(B, 1, Nq, Nk)},
        "bias for all rows": {"bias": normal(B, Hq, 1, Nk)},
        "bias for all columns": {"bias": normal(B, Hq, Nq, 1)},
        "bias of two axes": {"bias": normal(Nq, Nk)},
        "bias of a head": {"bias": normal(Hq, 1, 1)},
        "bias of one number": {"bias": normal(1)},
        "bias of -inf": {"bias": _infinite_bias(B, Hq, Nq, Nk)},
        "slopes": {"alibi_slopes": np.abs(normal(Hq))},
        "slopes of each batch entry": {"alibi_slopes": normal(B, Hq)},
        "sinks": {"sinks": normal(Hq)},
        "sinks that are large, and none": {"sinks": np.float32([9, -INF])[-Hq:], "causal": True},
        "sinks, lengths": {"sinks": normal(Hq), "q_lens": some_q, "kv_lens": (0, Nk)[:B]},
        "sinks, packed": {"sinks": normal(Hq), **cumulative(some_q, (0, Nk)[:B])},
        "q_lens": {"q_lens": some_q},
        "q_lens of 0 and all": {"q_lens": np.array([0, Nq], np.int32)[-B:]},
        "kv_lens": {"kv_lens": np.array(some_k)},
        "kv_lens of 0 and all": {"kv_lens": (0, Nk)[:B]},
        "both lengths, causal": {"q_lens": some_q, "kv_lens": some_k, "causal": True},
        "packed": cumulative(some_q, some_k[::-1]),
        "packed, causal": {**cumulative(some_q[::-1], some_k[::-1]), "causal": True},
        "block mask": {"block_mask": _random_mask(Tr, Tc, seed=2)},
        "block mask of each head": {"block_mask": _random_mask(Hq, Tr, Tc)},
        "block mask of each batch entry": {"block_mask": _random_mask(B, 1, Tr, Tc)},
        "block mask of nothing": {"block_mask": np.zeros((Tr, Tc), bool)},
        "dropout": {"dropout_p": 0.3, "seed": 2**63 + 5, "offset": 2**32 - 1},
        "much dropout": {"dropout_p": 0.9, "seed": 7},
    }


ALONE = list(alone(2, 2, 11, 21, Tiles(8, 16)))
# By default, successive options have float32 and float16 in turn.
ALONE_IN_TURN = [
    pytest.param(dtype, name, marks=() if n % 2 == k else pytest.mark.slow)
    for n, name in enumerate(ALONE)
    for k, dtype in enumerate(("float32", "float16"))
]
ALONE_IN_TURN += [
    pytest.param(*SLOW_BFLOAT16.values, name, marks=SLOW_BFLOAT16.marks) for name in ALONE
]


@pytest.mark.in_turn("way")
@every_way
@pytest.mark.parametrize("dtype, name", ALONE_IN_TURN)
def test_an_option_alone(device, way, dtype, name):
    """Where lengths hide rows or columns these are NaN."""
    B, Hq, _, Nq, Nk, _ = shape = SIZES[dtype]
    tiles = tiles_of(way, dtype)
    arrays, options = inputs(shape, {**alone(B, Hq, Nq, Nk, tiles)[name], "tiles": tiles})
    held(device, way, halves(arrays, dtype), **options)


@pytest.mark.in_turn("way")
@of_mma
@pytest.mark.parametrize("name", ALONE)
def test_an_option_of_mma_alone(device, way, name):
    B, Hq, _, Nq, Nk, _ = shape = SIZES["float16"]
    tiles = tiles_of(way, "float16")
    arrays, options = inputs(shape, {**alone(B, Hq, Nq, Nk, tiles)[name], "tiles": tiles})
    held(device, way, halves(arrays, "float16"), **options)


HUGE = {
    "window": {"window": (5, 3)},
    "softcap": {"softcap": 40.0},
    "softcap of huge scores": {"softcap": 1e4},
    "bias": {"bias": 1e4 * normal(1, 2, 11, 21)},
    "alibi": {"alibi_slopes": np.float32([300.0, -300.0])},
    "dropout": {"dropout_p": 0.25, "seed": 1},
    "lengths": {"q_lens": [9], "kv_lens": [20]},
}


@pytest.mark.in_turn("way")
@every_way
@pytest.mark.parametrize("name", HUGE)
def test_huge_logits_with_an_option(device, way, name):
    arrays = random_gradients(1, *TINY[1:], q_size=3e3)
    assert 1e4 < np.abs(arrays[1] @ arrays[2].swapaxes(2, 3)).max() / 2 < 4e4
    held(device, way, arrays, tiles=Tiles(8, 16), **HUGE[name])


BLIND = {
    "window": {"window": (2, 1)},
    "causal": {"causal": True},
    "lengths": {"q_lens": [23, 4], "kv_lens": [3, 0], "causal": True},
    "bias": {"bias": np.where(np.arange(23)[:, None] % 3 == 0, -INF, 0.5).astype(np.float32)},
    "block mask": {"block_mask": np.array([[True], [False], [True]])},
    "bias and dropout": {
        "bias": np.where(np.arange(23)[:, None] < 9, -INF, 0.5).astype(np.float32),
        "dropout_p": 0.5,
    },
}


@pytest.mark.in_turn("way")
@every_way
@pytest.mark.parametrize("name", BLIND)
def test_rows_that_see_no_column(device, way, name):
    """Are 0, with an L of -inf, and their output gradient reaches nothing."""
    shape = (2, 1, 1, 23, 7, 4)
    arrays, options = inputs(shape, {**BLIND[name], "tiles": Tiles(8, 16)})
    seen = visible(shape, options)
    if "bias" in options:
        seen &= options["bias"] > -INF
    blind = ~seen.any(axis=3)
    assert blind.any() and not blind.all()
    arrays[0][blind] = 1e6
    found = held(device, way, arrays, **options)
    if way[0] == "bwd":
        assert (found.dq[blind] == 0).all()
    else:
        assert (found.O[blind] == 0).all() and (found.L[blind] == -INF).all()


@pytest.mark.in_turn("way")
@pytest.mark.parametrize("way", ALL_WAYS)
@pytest.mark.parametrize("more", [{}, {"causal": True}, {"bias": normal(2, 2, 11, 37)}], ids=str)
def test_nan_behind_the_lengths_reaches_no_gradient(device, way, more):
    """Also in what the forward pass left."""
    options = {"q_lens": [11, 7], "kv_lens": [5, 30], "tiles": Tiles(8, 16), **more}
    arrays, options = inputs((2, 2, 1, 11, 37, 4), options)
    out, lse = saved(*arrays[1:], **options)
    out[1, :, 7:], lse[1, :, 7:] = GUARD, np.nan
    check_gradients(device, way, *arrays, saved_values=(out, lse), **options)


PAIRS = [
    pair for pair in itertools.combinations(sorted(DRAWS), 2) if set(pair) != {"lengths", "packed"}
]
PAIRED = (2, 1, 1, 9, 18, 4)


@pytest.mark.in_turn("way")
@every_way
@pytest.mark.parametrize("pair", PAIRS, ids=" and ".join)
def test_two_options(way, pair):
    arrays, options = inputs(PAIRED, drawn(pair, PAIRED))
    held("emulator", way, arrays, **options)


EVERYTHING = {
    "lengths": sorted(DRAWS.keys() - {"packed"}),
    "packed": sorted(DRAWS.keys() - {"lengths"}),
    "window not causal": sorted(DRAWS.keys() - {"packed", "causal"}),
}


@pytest.mark.in_turn("way")
@every_way
@dtypes
@pytest.mark.parametrize("names", EVERYTHING.values(), ids=EVERYTHING)
def test_all_options(device, way, dtype, names):
    """And a gradient of L."""
    shape, tiles = (2, 2, 1, 13, 37, 6), tiles_of(way, dtype)
    arrays, options = inputs(shape, drawn(names, shape, tiles, seed=3) | {"window": (9, 5)})
    arrays = halves(arrays, dtype)
    if way[0] == "bwd":
        options = with_dlse(arrays, options)
    held(device, way, arrays, **options)


shapes = st.builds(
    lambda B, Hk, group, Nq, Nk, d: (B, Hk * group, Hk, Nq, Nk, d),
    *[st.integers(1, 2)] * 3,
    *[st.integers(1, 22)] * 2,
    st.sampled_from([1, 3, 4, 6, 8, 16, 20]),
)
TILE_SIZES = {
    "float32": [Tiles(4, 16), Tiles(8, 16), Tiles(8, 32)],
    "float16": [Tiles(16, 16), Tiles(32, 16), Tiles(32, 32)],
}
TILE_SIZES["bfloat16"] = TILE_SIZES["float16"]
seeds = st.integers(0, 2**32 - 1)
layouts = st.sampled_from([name for name in LAYOUTS if name != "broadcast"])


@every_way
@dtypes
@settings(examples(12 if conftest.every_example else 6), phases=[Phase.explicit, Phase.generate])
@given(shapes, names_of_options, st.integers(0, 2), seeds, layouts, st.sampled_from([None, 5, 24]))
def test_any_problem(way, dtype, shape, names, tiles, seed, layout, d_v):
    if dtype != "float32":
        shape = (*shape[:3], 3 * shape[3], 3 * shape[4], shape[5])
    arrays, options = inputs(shape, drawn(names, shape, TILE_SIZES[dtype][tiles], seed), d_v=d_v)
    arrays = halves(arrays, dtype)
    if way[0] == "bwd" and seed % 2:
        options = with_dlse(arrays, options)
    held("emulator", way, arrays, layout=layout, **options)


# Options that say the same, to the last bit on the emulator: a GPU's compiler may fuse other
# products and sums.
ARRAYS = ("bias", "alibi_slopes", "q_lens", "kv_lens", "cu_seqlens_q", "cu_seqlens_k", "block_mask")
SAME = {
    "a wide window": ({"window": (21, 21)}, {}),
    "a window open on both sides": ({"window": (-1, -1)}, {}),
    "a window of what came before": ({"window": (-1, 0)}, {"causal": True}),
    "a causal window of all": ({"window": (21, -1), "causal": True}, {"causal": True}),
    "full lengths": ({"q_lens": [11], "kv_lens": [21]}, {}),
    "a mask of all blocks": ({"block_mask": np.ones((2, 2), bool)}, {}),
    "no dropout": ({"dropout_p": 0.0, "seed": 3}, {}),
    "a bias of 0": ({"bias": np.zeros((1, 21), np.float32), "return_dbias": False}, {}),
    "slopes of 0": ({"alibi_slopes": np.zeros(2, np.float32)}, {}),
    "None": (dict.fromkeys(("scale", "softcap", *ARRAYS)), {}),
}


@pytest.mark.in_turn("way")
@every_way
@pytest.mark.parametrize("pair", SAME.values(), ids=SAME)
def test_two_ways_to_say_it_give_the_same_bits(way, pair):
    arrays, dbias = random_gradients(1, *TINY[1:]), way[0] == "fwd"
    pair = [{n: x for n, x in each.items() if n != "return_dbias" or not dbias} for each in pair]
    a, b = (again("emulator", way, arrays, tiles=Tiles(8, 16), **options) for options in pair)
    assert_equal(way, a, b)


def test_a_broadcast_bias_is_read_where_it_is():
    """Strides of 0 from the caller, and a number without an axis."""
    _, q, k, v = random_gradients(*TINY)
    options = {"algorithm": "fa2", "tiles": Tiles(8, 16)}
    for bias in (normal(21), normal()):
        with devices.using("emulator"):
            whole = np.broadcast_to(bias, (2, 2, 11, 21))
            a, b = (fa_numba.attention(q, k, v, bias=x, **options) for x in (whole, bias))
        assert np.array_equal(a, b)
        assert_close_to_float64(a, q, k, v, bias=bias)


# --- what must hold between two calls ---------------------------------------------------------


@pytest.mark.in_turn("causal")
@dtypes
@either_mask
@pytest.mark.parametrize("passes, Nq, Nk", [("fwd", 57, 40), ("bwd", 29, 37), ("bwd", 70, 40)])
def test_query_splits_change_sums_over_rows_alone(
    device, monkeypatch, dtype, passes, causal, Nq, Nk
):
    """Those of dK and dV: what a row tile has is computed alike wherever it is computed."""
    arrays = random_gradients(1, 4, 2, Nq, Nk, 8, dtype=dtype)
    options = {"causal": causal, "tiles": tiles_of((), dtype)}
    whole = held(device, (passes, "fa1"), arrays, **options)
    table = ALL_WAYS if passes == "bwd" else ALL_FORWARD
    q, k = (x.shape for x in arrays[1:3])
    how = {"algorithm": "fa1", "passes": passes, "dtype": dtype, **options}
    with devices.using(device):
        of = {n: fa_numba.plan(q, k, query_splits=n, **how).kernels for n in (2, 3, 4, 99)}
    apart = [n for n, kernels in of.items() if kernels not in [of[m] for m in of if m < n]]
    for query_splits in apart:
        monkeypatch.setitem(table, "fa1-split", ("fa1", {"query_splits": query_splits}))
        split = held(device, (passes, "fa1-split"), arrays, **options)
        if passes == "bwd":
            assert np.array_equal(split.dq, whole.dq)
        else:
            assert_equal((passes, "fa1"), split, whole)


@pytest.mark.parametrize("way", ALL_WAYS)
@dtypes
def test_after_the_forward_pass_of_this_package(device, way, dtype):
    dout, q, k, v = random_gradients(1, 2, 1, 19, 25, 8, dtype=dtype)
    options = {"causal": True, "tiles": tiles_of((), dtype)}
    with devices.using(device):
        algorithm, _ = ALL_WAYS[way]
        forward = fa_numba.attention(q, k, v, algorithm=algorithm, return_lse=True, **options)
    forward = tuple(map(to_numpy, forward))
    check_gradients(device, way, dout, q, k, v, saved_values=forward, **options)


@either_mask
@dtypes
def test_a_kernel_of_dq_alone_changes_dq_alone(device, dtype, causal):
    arrays = random_gradients(1, 4, 2, 29, 37, 8, dtype=dtype)
    options = {"causal": causal, "tiles": tiles_of((), dtype)}
    atomic, apart = (
        differentiate(device, way, *arrays, **options) for way in ("fa2", "fa2-deterministic")
    )
    assert np.array_equal(atomic.dk, apart.dk) and np.array_equal(atomic.dv, apart.dv)


# --- on a GPU: sizes and repetition ------------------------------------------------------------

# (B, Hq, Hk, Nq, Nk, d), options
LARGE = {
    **{
        str(shape): (shape, {})
        for shape in (
            (1, 2, 1, 2048, 2048, 64),
            (2, 4, 2, 1000, 1531, 128),
            (1, 1, 1, 777, 513, 256),
            (1, 3, 3, 129, 2047, 40),
            (3, 2, 1, 1025, 64, 33),
        )
    },
    "causal": ((1, 2, 1, 1500, 1300, 64), CAUSAL),
    "window": ((1, 4, 2, 1000, 1100, 64), {"window": (100, 20)}),
    "softcap and dropout": (
        (1, 4, 2, 777, 513, 128),
        {"softcap": 3.0, "dropout_p": 0.2, "seed": 5},
    ),
    "bias and slopes": (
        (1, 4, 4, 500, 700, 64),
        {"bias": normal(1, 4, 500, 700), "alibi_slopes": np.abs(normal(4)), "causal": True},
    ),
    "lengths": (
        (3, 2, 1, 600, 700, 64),
        {"q_lens": [600, 3, 0], "kv_lens": [1, 700, 333], "causal": True},
    ),
    "packed": (
        (4, 2, 1, 600, 700, 64),
        {**cumulative([600, 3, 0, 129], [300, 700, 1, 128]), "dropout_p": 0.1},
    ),
    "block mask": (
        (1, 2, 2, 640, 600, 64),
        {"block_mask": _random_mask(2, 10, 10), "tiles": Tiles(64, 64)},
    ),
    **{layout: ((2, 2, 1, 300, 333, 64), {"layout": layout}) for layout in ("odd", "reversed")},
}


@pytest.mark.gpu
@every_way
@dtypes
@pytest.mark.parametrize("name", LARGE)
def test_large_problems_and_twenty_equal_runs(way, dtype, name):
    """All bits equal but those of atomic adds, which stay within the bound."""
    shape, options = LARGE[name]
    arrays, options = inputs(shape, options)
    arrays = halves(arrays, dtype)
    first = held("gpu", way, arrays, **options)
    for _ in range(20):
        assert_equal(way, first, again("gpu", way, arrays, **options))


@pytest.mark.gpu
@dtypes
@pytest.mark.parametrize("query_splits", [7, 64])
def test_large_query_splits(monkeypatch, dtype, query_splits):
    """Of more row tiles than blocks share, and of fewer."""
    arrays = random_gradients(1, 2, 1, 1500, 1300, 64, dtype=dtype)
    for table, passes in ((ALL_FORWARD, "fwd"), (ALL_WAYS, "bwd")):
        monkeypatch.setitem(table, "fa1-split", ("fa1", {"query_splits": query_splits}))
        held("gpu", (passes, "fa1-split"), arrays, causal=True)


@pytest.mark.gpu
@pytest.mark.parametrize("passes", ["fwd", "bwd"])
def test_rows_beyond_shared_memory(passes):
    held("gpu", (passes, "standard"), random_gradients(1, 1, 1, 3, 70_000, 8))
