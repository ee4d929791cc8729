"""A head dimension of V, and O, other than that of Q and K: results, counts, limits."""

import numpy as np
import pytest
from backward_helpers import ALL_WAYS, check_gradients, half_gradients, random_gradients
from helpers import ALGORITHMS, check, random_inputs
from mma_helpers import half_inputs

import fa_numba
from fa_numba import Tiles, io_model
from fa_numba.problem import Problem

TILES, HALF_TILES = Tiles(8, 16), Tiles(16, 16)
PAIRS = [(24, 8), (5, 9), (12, 40), (33, 1)]  # d of Q and K, and of V


# More columns of V than of K in a thread, fewer, rows of other swizzles; not whole pieces; MLA's
HALVES = [(64, 32), (16, 80), (20, 7), (192, 128)]


either_mask = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


def layout_of(dtype, d, d_v):
    return "odd" if any(n % (4 if dtype == "float32" else 8) for n in (d, d_v)) else "padded"


@pytest.mark.in_turn("causal")
@either_mask
@pytest.mark.parametrize(
    "dtype, d, d_v", [*(("float32", *x) for x in PAIRS), *(("float16", *x) for x in HALVES)]
)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_against_float64(algorithm, dtype, d, d_v, causal):
    q, k, v = random_inputs(1, 4, 2, 19, 37, d, d_v, dtype=dtype)
    how = {"tiles": TILES if dtype == "float32" else HALF_TILES, "causal": causal}
    result = check("emulator", algorithm, q, k, v, layout=layout_of(dtype, d, d_v), **how)
    assert result.O.shape == (1, 4, 19, d_v)


@pytest.mark.in_turn("way")
@either_mask
@pytest.mark.parametrize(
    "dtype, d, d_v",
    [
        *(("float32", *x) for x in [*PAIRS, (16, 136)]),
        *(("float16", *x) for x in [*HALVES, (64, 128)]),
    ],
)
@pytest.mark.parametrize("way", ALL_WAYS)
def test_gradients(way, dtype, d, d_v, causal):
    rows = 19 if dtype == "float32" else 35
    arrays = random_gradients(1, 4, 2, rows, 37, d, d_v, dtype=dtype)
    how = {"tiles": Tiles(8 if dtype == "float32" else 32, 32), "causal": causal}
    check_gradients("emulator", way, *arrays, layout=layout_of(dtype, d, d_v), **how)


def test_choices_of_16_bits():
    """Stages, splits, keys shared by warps, measures left out; bfloat16."""
    q, k, v = half_inputs("bfloat16", 2, 4, 2, 35, 90, 48, 24)
    ways = [
        ("fa2", {"tiles": Tiles(32, 32, stages=2)}),
        ("fa2", {"tiles": HALF_TILES, "kv_splits": 3}),
        ("fa2", {"tiles": HALF_TILES, "ablate": ("swizzle", "q_registers")}),
        ("fa1", {"tiles": Tiles(16, 64), "warp_partition": "keys"}),
        ("fa1", {"tiles": HALF_TILES, "query_splits": 2, "window": (20, 3)}),
    ]
    for algorithm, options in ways:
        check("emulator", algorithm, q, k, v, **options)


@pytest.mark.parametrize(("d", "d_v"), [(64, 32), (20, 7), (192, 128)])
def test_gradients_in_one_order(d, d_v):
    arrays = half_gradients("float16", 1, 4, 2, 35, 37, d, d_v)
    layout = "padded" if d % 8 == d_v % 8 == 0 else "odd"
    check_gradients("emulator", "fa2-deterministic", *arrays, causal=True, layout=layout)


# O leaves by way of Q's slot, which may be the narrower one; both of a panel; MLA's
HOPPER = {"unit": "wgmma"}
HOPPERS = [(64, 128), (24, 136), (136, 72)]


@pytest.mark.parametrize(("d", "d_v"), HOPPERS)
@pytest.mark.parametrize("algorithm", ["fa1", "fa2"])
def test_hopper_against_float64(algorithm, d, d_v):
    q, k, v = half_inputs("bfloat16" if d == 64 else "float16", 1, 2, 1, 70, 90, d, d_v)
    check("emulator", algorithm, q, k, v, causal=d != 64, **HOPPER)


# Half a panel of dQ a consumer; consumers of unlike columns, dV by way of K's place, dK of V's
GRADIENTS = [
    ("fa1", 64, 128, {"query_splits": 2}),
    ("fa1", 72, 48, {"window": (30, 5)}),
    ("fa2", 64, 128, {}),
    ("fa2", 72, 24, {"group_splits": 2, "dropout_p": 0.3, "seed": 1}),
    ("fa2", 24, 72, {"group_splits": 4, "kv_lens": [77], "q_lens": [61]}),
    ("fa2", 24, 136, {"dropout_p": 0.3, "seed": 1}),
    ("fa2", 136, 72, {}),
    ("fa2-deterministic", 24, 72, {"softcap": 2.0}),
]


@pytest.mark.parametrize(("way", "d", "d_v", "options"), GRADIENTS)
def test_gradients_on_hopper(way, d, d_v, options):
    arrays = half_gradients("bfloat16" if d == 136 else "float16", 1, 2, 1, 70, 90, d, d_v)
    check_gradients("emulator", way, *arrays, causal=True, **HOPPER, **options)


def test_choices_on_hopper():
    """Consumers, stages, splits, rows of heads that share tiles or are packed, measures left out,
    passes over keys.
    """
    q, k, v = half_inputs("float16", 2, 2, 1, 70, 90, 24, 72)
    few = half_inputs("float16", 2, 2, 1, 5, 11, 24)[0]
    ways = [
        ("fa2", q, {"tiles": Tiles(192, 32, stages=2), "kv_splits": 2}),
        ("fa2", q, {"tiles": Tiles(64, 48, stages=3), "q_lens": [3, 70], "kv_lens": [90, 51]}),
        ("fa2", q, {"tiles": Tiles(128, 64), "ablate": ("overlap", "ahead"), "window": (20, 3)}),
        ("fa2", few, {}),
        ("fa1", q, {"tiles": Tiles(64, 32), "query_splits": 2, "window": (20, 3)}),
    ]
    for algorithm, rows, options in ways:
        check("emulator", algorithm, rows, k, v, **HOPPER, **options)


TABLE = np.int32([[5, 0, 3, 1, 9, 7], [2, 4, 6, 8, 10, 11]])


def _in_pages(k, v):
    pages = [np.empty((12, 2, 16, x.shape[-1]), x.dtype) for x in (k, v)]
    for paged, x in zip(pages, (k, v), strict=True):
        paged[TABLE] = x.reshape(2, 2, 6, 16, -1).transpose(0, 2, 1, 3, 4)
    return pages


@pytest.mark.parametrize("unit", ["simt", "mma", "wgmma"])
def test_splits_pages_and_layout(unit):
    dtype = "float32" if unit == "simt" else "float16"
    dims = (136, 24) if unit == "mma" else (24, 136)
    q, k, v = (x.astype(dtype) for x in random_inputs(2, 4, 2, 5, 96, *dims))
    tiles = {"simt": TILES, "mma": HALF_TILES, "wgmma": Tiles(64, 32, stages=2)}[unit]
    how = {"unit": unit, "tiles": tiles, "kv_splits": 3}
    whole = check("emulator", "fa2", q, k, v, **how).O
    swapped = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
    o = fa_numba.flash_attention_2(*swapped, **how, layout="bnhd")
    assert (o.transpose(0, 2, 1, 3) == whole).all()
    pages = _in_pages(k, v)
    of_pages = {"block_table": TABLE, "kv_lens": [96, 96]}
    with fa_numba.count_accesses() as counts:
        o = fa_numba.flash_attention_2(q, *pages, **how, **of_pages)
    assert (o == whole).all()
    shapes = q.shape, pages[0].shape, pages[1].shape
    planned = fa_numba.plan(*shapes, dtype=dtype, **how, **of_pages)
    assert planned.accesses.loads == counts.loads
    assert planned.accesses.stores == counts.stores


@pytest.mark.parametrize(
    ("dtype", "d", "d_v"), [("float32", 24, 136), ("float16", 136, 24), ("float16", 24, 136)]
)
def test_rows_appended(dtype, d, d_v):
    _, k, v = (x.astype(dtype) for x in random_inputs(2, 2, 2, 1, 96, d, d_v))
    pages = _in_pages(k, v)
    written = [np.zeros_like(x) for x in pages]
    fa_numba.append_kv(*written, k[:, :, :70], v[:, :, :70], TABLE, kv_lens=[0, 0])
    fa_numba.append_kv(*written, k[:, :, 70:], v[:, :, 70:], TABLE, kv_lens=[70, 70])
    assert all((x == y).all() for x, y in zip(written, pages, strict=True))


def test_one_dimension_given_twice_is_one():
    one, twice = Problem(1, 1, 1, 8, 8, 16), Problem(1, 1, 1, 8, 8, 16, head_dim_v=16)
    assert one == twice and twice.head_dim_v is None and twice.d_v == 16
    assert fa_numba.plan((1, 1, 8, 16), (1, 1, 8, 16), (1, 1, 8, 16)).problem.head_dim_v is None


def test_closed_forms():
    """DeepSeek's: 192 and 128."""
    p = Problem(1, 2, 2, 64, 64, 192, head_dim_v=128, dtype="float16")
    assert io_model.flops(p) == 2 * 2 * 64 * 64 * (192 + 128)
    assert io_model.flops(p, "bwd") == 2 * 2 * 64 * 64 * (3 * 192 + 2 * 128)
    assert io_model.workspace("fa1", p) == 4 * 2 * 64 * (2 + 128)
    fa2 = io_model.fa2(p, Tiles(64, 64))
    assert fa2.loads == {"Q": 2 * 64 * 192, "K": 2 * 64 * 192, "V": 2 * 64 * 128}
    assert fa2.stores == {"O": 2 * 64 * 128, "L": 2 * 64}
    with pytest.raises(
        ValueError, match="head_dim_v must be None .equal to head_dim, 192., got 128, because"
    ):
        io_model.theta_standard(p)
    assert io_model.ring(p, 2).sent == 2 * 2 * 64 * (192 + 128)


@pytest.mark.parametrize("d_v", [0, 257, 8.0])
def test_wrong_dimensions(d_v):
    with pytest.raises((TypeError, ValueError), match="head_dim_v must be "):
        Problem(1, 1, 1, 8, 8, 16, head_dim_v=d_v)
    q = np.zeros((1, 1, 8, 16), np.float32)
    if d_v == 257:
        with pytest.raises(ValueError, match="head_dim of v must be from 1 to 256, got 257"):
            fa_numba.attention(q, q, np.zeros((1, 1, 8, 257), np.float32))


def test_out_has_the_shape_of_o():
    q, k, v = random_inputs(1, 1, 1, 8, 16, 12, 20)
    with pytest.raises(
        ValueError, match=r"out must have shape \(1, 1, 8, 20\), got \(1, 1, 8, 12\)"
    ):
        fa_numba.attention(q, k, v, out=np.empty_like(q))


@pytest.mark.parametrize("d_v", [6, 12])
def test_rows_of_v_that_end_amid_16_bytes(d_v):
    """Q's are whole, and V's and O's begin at 16-byte addresses."""
    q, k, v = random_inputs(1, 2, 1, 19, 37, 16, d_v)
    halves = (x.astype(np.float16) for x in (q, k, v))
    check("emulator", "fa2", *halves, tiles=HALF_TILES)
    check("emulator", "fa1", q, k, v, tiles=TILES)
