"""The 16-bit kernels against float64, between guard bands, accesses against the closed form."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from conftest import examples
from helpers import (
    ALGORITHMS,
    LAYOUTS,
    ROUNDING,
    Memory,
    assert_close_to_float64,
    assert_no_growth,
    assert_scale,
    assert_within,
    attend,
    check,
    numpy_dtype,
    to_numpy,
    truth,
)
from hypothesis import given
from hypothesis import strategies as st
from mma_helpers import every_dtype, every_flash, half_inputs, mostly_float16, no_bfloat16

import fa_numba
from fa_numba import Tiles, reference
from fa_numba import device as devices
from fa_numba.choices.tiles import mma_tiles
from fa_numba.host import planning, standard
from fa_numba.options import Features
from fa_numba.tiling import MEASURES, MmaSpec, StandardSpec, select_mma_spec

every_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS)
either_mask = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
SMALL = Tiles(16, 16)
HEAD_DIMS = (1, 7, 16, 20, 32, 64, 96, 128, 192, 256)
KINDS = {"standard": StandardSpec, "fa1": MmaSpec, "fa2": MmaSpec}


# --- the yardstick and the check can fail ----------------------------------------------------


@every_dtype
def test_the_yardstick_rounds_the_matrices_and_sums_in_float32(dtype):
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 1, 1, 33, 16), dtype=np.float32)
    O, L = reference.unfused(q, k, v, matrix_dtype=dtype, scale=0.3, return_lse=True)
    Q, K, V = (a[0, 0].astype(numpy_dtype(dtype)).astype(np.float32) for a in (q, k, v))
    S = np.float32(0.3) * (Q @ K.T)
    m = S.max(axis=1, keepdims=True)
    P = np.exp(S - m)
    l = P.sum(axis=1, keepdims=True)
    P = (P / l).astype(numpy_dtype(dtype)).astype(np.float32)
    assert O.dtype == L.dtype == np.float32
    assert np.array_equal(O[0, 0], (P @ V).astype(numpy_dtype(dtype)).astype(np.float32))
    assert np.array_equal(L[0, 0], (m + np.log(l))[:, 0])
    stored = reference.unfused(q, k, v, matrix_dtype=dtype, stored_scores=True, scale=0.3)
    S = S.astype(numpy_dtype(dtype)).astype(np.float32)
    P = np.exp(S - S.max(axis=1, keepdims=True))
    P = (P / P.sum(axis=1, keepdims=True)).astype(numpy_dtype(dtype)).astype(np.float32)
    assert np.array_equal(stored[0, 0], (P @ V).astype(numpy_dtype(dtype)).astype(np.float32))
    assert not np.array_equal(stored, O)
    rounded = (a.astype(numpy_dtype(dtype)) for a in (q, k, v))
    again = reference.unfused(*rounded, matrix_dtype=dtype, scale=0.3)
    assert np.array_equal(again, O)


@no_bfloat16
def test_the_yardstick_rounds_to_bfloat16_as_ml_dtypes_does():
    rng = np.random.default_rng(1)
    bits = rng.integers(0, 2**32, 100_000, dtype=np.uint64).astype(np.uint32)
    bits[:50_000] &= 0xFFFF8000  # many ties
    x = bits.view(np.float32)
    with np.errstate(invalid="ignore"):
        want = x.astype(numpy_dtype("bfloat16"))
    got = reference._to_half(x, "bfloat16")
    assert np.array_equal(got, want.astype(np.float32), equal_nan=True)


@pytest.mark.parametrize(
    "options, says",
    [
        ({"matrix_dtype": "float32"}, "matrix_dtype is 'float32': allowed is float16, bfloat16"),
        ({"matrix_dtype": "float16", "dtype": "f8"}, "dtype is 'f8' .* allowed is float32"),
    ],
)
def test_the_yardstick_takes_no_other_dtypes(options, says):
    with pytest.raises(ValueError, match=says):
        reference.unfused(*np.ones((3, 1, 1, 2, 2), np.float32), **options)


@every_dtype
@pytest.mark.parametrize("roundings", [0.0, 1.0, -0.5])
def test_the_check_fails_on_a_scale_within_the_norm(dtype, roundings):
    """The norm of the error is that of a result that is rounded twice."""
    q, k, v = half_inputs(dtype, 1, 2, 2, 96, 80, 16)
    O = reference.unfused(q, k, v, matrix_dtype=dtype)
    scaled = O * (1 + roundings * ROUNDING[dtype])
    want = truth(q, k, v)
    assert_within("O", scaled, want.O, want.O_bound)
    if roundings == 0:
        assert_close_to_float64(scaled, q, k, v)
        return
    with pytest.raises(AssertionError, match="O is [01].[09]+.* times what it should be, of 192 r"):
        assert_close_to_float64(scaled, q, k, v)


@pytest.mark.parametrize("d, rows, rounding", [(1, 24, 2**-11), (64, 400, 2**-8)])
def test_a_scale_is_told_from_rounding_by_rows_enough(d, rows, rounding):
    """A tenth of a rounding, where 25,600 elements are rounded; nothing of 24."""
    rng = np.random.default_rng([d, rows])
    exact = rng.standard_normal((rows, d))
    rounded = exact * (1 + rounding * rng.uniform(-1, 1, exact.shape))
    assert_scale("O", rounded, exact, rounding)
    if rows == 24:
        assert_scale("O", 2 * exact, exact, rounding)
        return
    with pytest.raises(AssertionError, match="allowed is 0.00039 off"):
        assert_scale("O", rounded * (1 + 0.15 * rounding), exact, rounding)


def test_rows_that_are_rounded_alike_count_as_one():
    exact = np.full((100, 4), 1 + 2.0**-12)
    assert_scale("O", exact.astype(np.float16), exact, 2.0**-11)
    exact[:, 0] += np.linspace(0, 1, 100)
    with pytest.raises(AssertionError, match="of 100 rows"):
        assert_scale("O", exact * (1 + 2.0**-12), exact, 2.0**-11)


def test_the_layouts_are_what_they_are_for():
    aligned = {
        layout
        for layout in set(LAYOUTS) - {"broadcast"}
        if (memory := Memory("emulator", (2, 2, 3, 8), layout, dtype="float16"))
        and fa_numba.host.arrays.operand("q", memory.view).aligned
    }
    assert aligned == {"padded", "transposed", "strided"}
    rows = Memory("emulator", (2, 2, 3, 16), "padded", dtype="float16").view
    assert fa_numba.host.arrays.operand("q", rows).aligned
    for other in (rows[..., ::2], rows[..., 1:9], rows[..., 4:12]):
        assert not fa_numba.host.arrays.operand("q", other).aligned


LENGTHS = [(1, 1), (1, 40), (40, 1), (15, 31), (16, 32), (17, 33), (37, 13), (33, 70)]


# --- how a tile is shared --------------------------------------------------------------------


@every_algorithm
@mostly_float16
@pytest.mark.parametrize("d", [24, 64])
def test_warps_of_16_and_32_rows_give_the_same(device, algorithm, dtype, d):
    q, k, v = half_inputs(dtype, 1, 1, 1, 50, 70, d)
    results = [
        check(device, algorithm, q, k, v, causal=True, tiles=Tiles(64, 32, threads))
        for threads in (64, 128)
    ]
    assert np.array_equal(results[0].O, results[1].O)
    assert np.array_equal(results[0].L, results[1].L)


def test_the_partitions_of_the_default_tiles():
    with devices.using("emulator"):
        for algorithm, d in itertools.product(ALGORITHMS, HEAD_DIMS):
            shape = (1, 1, 4096, d)
            plan = fa_numba.plan(shape, shape, algorithm=algorithm, dtype="float16")
            assert plan.tiles.threads == plan.kernels[0].threads
            rows = 32 * plan.tiles.Br // plan.tiles.threads
            assert rows in (16, 32)
    # Q's fragments stay in registers, or do not: both are in the tests of these head dimensions.
    assert {select_mma_spec(SMALL, d, 2**17).keeps_q for d in HEAD_DIMS} == {False, True}


@every_algorithm
@mostly_float16
def test_q_in_registers_and_q_in_shared_memory(device, algorithm, dtype):
    q, k, v = half_inputs(dtype, 1, 1, 1, 33, 66, 128)
    wide = 128 if algorithm == "standard" else 64
    for tiles, kept in ((Tiles(32, wide, 32), False), (Tiles(32, 16, 64), True)):
        assert select_mma_spec(tiles, 128, 2**17, KINDS[algorithm]).keeps_q == kept
        check(device, algorithm, q, k, v, causal=True, tiles=tiles)


@mostly_float16
@either_mask
@pytest.mark.parametrize("threads", [64, 128])
def test_two_stages_of_several_warps(device, dtype, causal, threads):
    q, k, v = half_inputs(dtype, 1, 1, 1, 150, 200, 24)
    tiles = Tiles(64, 32, threads, stages=2)
    two = check(device, "fa2", q, k, v, causal=causal, tiles=tiles)
    one = attend(device, "fa2", q, k, v, causal=causal, tiles=replace(tiles, stages=1))
    assert np.array_equal(one.O, two.O) and np.array_equal(one.L, two.L)


# --- memory ----------------------------------------------------------------------------------


@pytest.mark.in_turn("options")
@pytest.mark.parametrize("options", [{"causal": True}, {"dropout_p": 0.3}], ids=str)
@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize("warps", [1, 4])
def test_standard_attention_of_long_rows(device, monkeypatch, warps, resident, options):
    """603 columns are 76 chunks: of one warp's threads several each, of four warps' one or none."""
    monkeypatch.setattr(planning, "planned", planning.planned.__wrapped__)
    monkeypatch.setattr(standard, "row_warps", lambda *_: warps)
    if not resident:
        monkeypatch.setattr(standard, "row_elements", lambda *_, **__: 0)
    q, k, v = half_inputs("float16", 1, 2, 1, 9, 603, 8)
    options = {**options, "tiles": Tiles(16, 64)}
    check(device, "standard", q, k, v, **options)
    facts = {"algorithm": "standard", "dtype": "float16"}
    p = fa_numba.plan(q.shape, k.shape, **facts, **options)
    assert p.kernels[1].threads == 32 * warps
    assert p.accesses.loads["S"] == (1 if resident else 2) * 2 * 9 * 603


# --- options ---------------------------------------------------------------------------------


def random_array(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def random_mask(*shape, share=0.5):
    return np.random.default_rng(5).random(shape) < share


# For q (2, 2, 40, 8) and k (2, 1, 55, 8): tiles of 16 x 16 make 3 x 4 blocks.
OPTIONS = {
    "window": {"window": (9, 3)},
    "window to the left": {"window": (20, -1)},
    "window to the right": {"window": (-1, 2)},
    "window of one": {"window": (0, 0)},
    "causal window": {"causal": True, "window": (12, 5)},
    "softcap": {"softcap": 2.0},
    "bias": {"bias": random_array(2, 2, 40, 55)},
    "bias of a row": {"bias": random_array(55)},
    "bias of a column": {"bias": random_array(2, 40, 1)},
    "alibi": {"alibi_slopes": np.array([0.25, -0.125], np.float32)},
    "alibi of a batch": {"alibi_slopes": np.abs(random_array(2, 2))},
    "sinks": {"sinks": np.array([0.5, 3.0], np.float32), "causal": True},
    "sinks, one of -inf": {"sinks": np.array([-np.inf, 6.0], np.float32), "window": (9, 3)},
    "sinks, lengths": {"sinks": np.ones(2, np.float32), "q_lens": [40, 17], "kv_lens": [0, 50]},
    "q_lens": {"q_lens": [40, 17]},
    "no rows": {"q_lens": [0, 33]},
    "kv_lens": {"kv_lens": [16, 50]},
    "no columns": {"kv_lens": [0, 55]},
    "both lengths": {"q_lens": [33, 16], "kv_lens": [20, 55], "causal": True},
    "block mask": {"block_mask": random_mask(3, 4)},
    "block mask of a head": {"block_mask": random_mask(2, 2, 3, 4), "causal": True},
    "empty block mask": {"block_mask": random_mask(3, 4, share=0.0)},
    "dropout": {"dropout_p": 0.3, "seed": 7, "offset": 2},
    "causal dropout": {"dropout_p": 0.5, "causal": True},
    "softcap, bias and slopes": {
        "softcap": 3.0,
        "bias": random_array(1, 2, 40, 55),
        "alibi_slopes": np.full(2, 0.1, np.float32),
        "causal": True,
    },
    "most": {
        "window": (30, 4),
        "softcap": 3.0,
        "bias": random_array(2, 1, 1, 55),
        "alibi_slopes": np.full((2, 2), 0.1, np.float32),
        "sinks": np.array([-1.0, 1.0], np.float32),
        "q_lens": [31, 40],
        "kv_lens": [55, 38],
        "block_mask": random_mask(2, 3, 4, share=0.7),
        "dropout_p": 0.25,
    },
}


@pytest.mark.in_turn("algorithm")
@every_algorithm
@mostly_float16
@pytest.mark.parametrize("name", OPTIONS)
def test_options(device, algorithm, dtype, name):
    q, k, v = half_inputs(dtype, 2, 2, 1, 40, 55, 8)
    check(device, algorithm, q, k, v, tiles=SMALL, **OPTIONS[name])


@pytest.mark.in_turn("algorithm")
@every_algorithm
@no_bfloat16
@pytest.mark.parametrize("name", ["most", "softcap, bias and slopes", "causal dropout"])
def test_options_in_bfloat16(algorithm, name):
    q, k, v = half_inputs("bfloat16", 2, 2, 1, 40, 55, 8)
    check("emulator", algorithm, q, k, v, tiles=SMALL, **OPTIONS[name])


@every_algorithm
@mostly_float16
@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences(device, algorithm, dtype, causal):
    rng = np.random.default_rng(2)
    q = rng.standard_normal((61, 4, 8), dtype=np.float32).astype(numpy_dtype(dtype))
    k, v = (
        rng.standard_normal((70, 2, 8), dtype=np.float32).astype(numpy_dtype(dtype))
        for _ in range(2)
    )
    starts = {"cu_seqlens_q": [0, 20, 20, 61], "cu_seqlens_k": [0, 33, 40, 70]}
    check(device, algorithm, q, k, v, causal=causal, tiles=SMALL, **starts)
    for variant in ["stages"] * (algorithm == "fa2") + ["2 warps"] * (algorithm == "fa1"):
        check_variant(device, variant, q, k, v, causal=causal, **starts)


@pytest.mark.in_turn("algorithm")
# Bc a multiple of 64, of 16, and of neither: how the draws of dropout are shared differs.
@every_algorithm
@pytest.mark.parametrize("Bc", [16, 48, 64, 128])
def test_dropout_does_not_depend_on_the_tiles(device, algorithm, Bc):
    q, k, v = half_inputs("float16", 1, 1, 1, 35, 150, 8)
    options = {"dropout_p": 0.4, "seed": 2**40 + 5, "tiles": Tiles(32, Bc)}
    check(device, algorithm, q, k, v, **options)


# --- two stages of K and V, and keys split over the warps ---------------------------------------

KEYS = {"warp_partition": "keys"}
# Warps of 16 columns each.
VARIANTS = {
    "stages": ("fa2", Tiles(16, 16, stages=2), {}),
    "2 warps": ("fa1", Tiles(16, 32), KEYS),
    "4 warps": ("fa1", Tiles(48, 64), KEYS),
    "8 warps": ("fa1", Tiles(32, 128, 256), KEYS),
}
stages_or_keys = pytest.mark.parametrize("variant", ["stages", "2 warps"])


def check_variant(device, variant, q, k, v, **options):
    """Held to float64 and counted; with two stages every bit is that of one stage."""
    algorithm, tiles, own = VARIANTS[variant]
    found = check(device, algorithm, q, k, v, tiles=tiles, **own, **options)
    if variant == "stages":
        one = attend(device, "fa2", q, k, v, tiles=replace(tiles, stages=1), **options)
        assert np.array_equal(one.O, found.O) and np.array_equal(one.L, found.L)


@pytest.mark.in_turn("variant", share=2)
@pytest.mark.parametrize("variant", VARIANTS)
@mostly_float16
@either_mask
@pytest.mark.parametrize("Nq, Nk", [*LENGTHS, (50, 150)])
def test_stages_and_split_keys_of_many_lengths(device, variant, dtype, causal, Nq, Nk):
    check_variant(device, variant, *half_inputs(dtype, 1, 1, 1, Nq, Nk, 8), causal=causal)


@stages_or_keys
@mostly_float16
@pytest.mark.parametrize("d", HEAD_DIMS)
def test_stages_and_split_keys_of_every_head_dim(device, variant, dtype, d):
    check_variant(device, variant, *half_inputs(dtype, 1, 1, 1, 18, 51, d))


@stages_or_keys
@mostly_float16
@pytest.mark.parametrize("layout", ["odd", "strided", "reversed"])
def test_stages_and_split_keys_in_other_layouts(device, variant, dtype, layout):
    inputs = half_inputs(dtype, 2, 4, 2, 17, 50, 8)
    check_variant(device, variant, *inputs, causal=True, layout=layout)


@stages_or_keys
@mostly_float16
@pytest.mark.parametrize("name", OPTIONS)
def test_stages_and_split_keys_with_options(device, variant, dtype, name):
    options = dict(OPTIONS[name])
    if variant != "stages" and "block_mask" in options:
        options["block_mask"] = options["block_mask"][..., 1:3]
    check_variant(device, variant, *half_inputs(dtype, 2, 2, 1, 40, 55, 8), **options)


@pytest.mark.parametrize("d", HEAD_DIMS)
def test_split_keys_with_the_default_tiles(device, d):
    q, k, v = half_inputs("float16", 1, 1, 1, 21, 70, d)
    check(device, "fa1", q, k, v, causal=True, **KEYS)
    with devices.using("emulator"):
        for N in (1, 70, 4096):
            plan = fa_numba.plan(
                (1, 1, N, d), (1, 1, N, d), algorithm="fa1", dtype="float16", **KEYS
            )
            columns = 32 * plan.tiles.Bc // plan.tiles.threads
            assert plan.warp_partition == "keys" and columns % 16 == 0 < plan.tiles.threads // 64


@mostly_float16
@pytest.mark.parametrize("B, Hq, Hk", [(2, 1, 1), (2, 6, 2)])
def test_split_keys_of_shared_heads_and_split_queries(device, dtype, B, Hq, Hk):
    q, k, v = half_inputs(dtype, B, Hq, Hk, 35, 45, 8)
    options = {"causal": True, "tiles": Tiles(16, 32), **KEYS}
    whole = check(device, "fa1", q, k, v, **options)
    split = check(device, "fa1", q, k, v, query_splits=2, **options)
    assert np.array_equal(split.O, whole.O) and np.array_equal(split.L, whole.L)


# 16, 64 and 48 columns a warp.
@pytest.mark.parametrize("tiles", [Tiles(16, 32), Tiles(16, 128, 64), Tiles(16, 96, 64)], ids=str)
def test_dropout_does_not_depend_on_the_warps(device, tiles):
    q, k, v = half_inputs("float16", 1, 1, 1, 20, 150, 8)
    options = {"dropout_p": 0.4, "seed": 2**40 + 5, "tiles": tiles}
    check(device, "fa1", q, k, v, **options, **KEYS)


@mostly_float16
@either_mask
def test_split_keys_where_warps_see_nothing(device, dtype, causal):
    q, k, v = half_inputs(dtype, 1, 2, 1, 35, 70, 8)
    q[..., 0] = np.abs(q[..., 0])
    k[:, :, 3:50, 0] = -np.inf  # a whole tile, and all columns of some warps
    result = check(device, "fa1", q, k, v, causal=causal, tiles=Tiles(16, 32), **KEYS)
    assert np.isfinite(result.L).all()
    q[0, 0, 5], k[...] = -np.inf, np.abs(half_inputs(dtype, 1, 2, 1, 35, 70, 8)[1])
    result = check(device, "fa1", q, k, v, causal=causal, tiles=Tiles(16, 32), **KEYS)
    assert (result.O[0, 0, 5] == 0).all() and result.L[0, 0, 5] == -np.inf


@mostly_float16
@pytest.mark.parametrize("step", [1, -1], ids=["growing", "falling"])
def test_split_keys_where_one_warp_has_the_maximum(device, dtype, step):
    q, k, v = half_inputs(dtype, 1, 1, 1, 20, 80, 8)
    q[...] = 1.0
    k[...] = np.linspace(-20, 20, 80)[::step, None]
    check(device, "fa1", q, k, v, tiles=Tiles(16, 64), **KEYS)


@either_mask
def test_both_partitions_access_global_memory_alike(causal):
    with devices.using("emulator"):
        how = {"algorithm": "fa1", "dtype": "float16", "tiles": Tiles(32, 64), "causal": causal}
        rows, keys = (
            fa_numba.plan((2, 4, 300, 64), (2, 2, 200, 64), warp_partition=name, **how)
            for name in ("rows", "keys")
        )
    assert (rows.warp_partition, keys.warp_partition) == ("rows", "keys") and rows != keys
    assert rows.accesses == keys.accesses and rows.flops == keys.flops
    extra = keys.kernels[0].shared_bytes - rows.kernels[0].shared_bytes
    assert extra == 4 * (keys.tiles.threads // 32 - 1) * 32 * (64 + 2)


# --- measures left out -------------------------------------------------------------------------


@pytest.mark.in_turn("causal")
@every_flash
@pytest.mark.parametrize("causal", [False, True])
def test_no_measure_changes_what_is_computed_or_accessed(device, algorithm, causal):
    q, k, v = half_inputs("float16", 1, 2, 1, 37, 50, 24)
    how = {"tiles": Tiles(32, 16), "causal": causal}
    whole = check(device, algorithm, q, k, v, **how)
    names = [name for name, owners in MEASURES.items() if algorithm in owners]
    ways = [(name,) if name != "padding" else ("swizzle", name) for name in names]
    for ablate in (*ways, tuple(names)):
        same = "folded_scale" not in ablate
        run = attend if same else check
        result = run(device, algorithm, q, k, v, ablate=ablate, **how)
        if same:
            assert np.array_equal(result.O, whole.O) and np.array_equal(result.L, whole.L)


def test_a_plan_says_what_it_does_without():
    with devices.using("emulator"):
        how = {"dtype": "float16", "tiles": Tiles(64, 32)}
        whole, less = (
            fa_numba.plan((1, 2, 300, 64), (1, 2, 300, 64), ablate=names, **how)
            for names in ((), ["wide_stores", "swizzle", "swizzle"])
        )
        bare = fa_numba.plan(*[(1, 2, 300, 64)] * 2, ablate=("padding", "swizzle"), **how)
    assert (whole.ablated, less.ablated) == ((), ("swizzle", "wide_stores"))
    assert whole.accesses == less.accesses == bare.accesses
    swizzled, padded, plain = (p.kernels[0].shared_bytes for p in (whole, less, bare))
    assert swizzled == plain and padded - plain == 2 * (64 + 2 * 32) * 8


# --- values ----------------------------------------------------------------------------------


@every_algorithm
@every_dtype
def test_more_passes_err_no_more(device, algorithm, dtype):
    """One tile of columns, or 16, between which O stays in float32."""
    inputs = half_inputs(dtype, 1, 1, 1, 16, 256, 16)
    few, many = (attend(device, algorithm, *inputs, tiles=Tiles(16, Bc)).O for Bc in (256, 16))
    assert_no_growth("O", few, many, truth(*inputs).O)


@pytest.mark.in_turn("algorithm")
@every_algorithm
@mostly_float16
@pytest.mark.parametrize("options", [{"softcap": 2.0}, {"bias": random_array(18, 35)}], ids=str)
@pytest.mark.parametrize("scale", [-0.5, 0])
def test_scales_with_what_is_added(device, algorithm, dtype, options, scale):
    q, k, v = half_inputs(dtype, 1, 1, 1, 18, 35, 8)
    check(device, algorithm, q, k, v, scale=scale, tiles=SMALL, **options)


@every_algorithm
@mostly_float16
def test_small_probabilities_and_large_values(device, algorithm, dtype):
    """P below float16's normal numbers, V near its largest."""
    q, k, v = half_inputs(dtype, 1, 1, 1, 17, 64, 8)
    q[...], k[...] = 1.0, 0.0
    k[:, :, :32, 0] = 27.0  # e^(27 / sqrt(8)) = 14000 to 1
    v[:, :, 32:] = 30000.0 + 1000.0 * v[:, :, 32:].astype(np.float32)
    result = check(device, algorithm, q, k, v, tiles=Tiles(16, 32))
    assert np.abs(result.O.astype(np.float32)).max() < 10


# --- both units ------------------------------------------------------------------------------


def both_units(device, algorithm, dtype, q, k, v, **options):
    """(O, L) by tensor cores in 16 bits and by CUDA cores in float32, of the same numbers."""
    halves = [a.astype(numpy_dtype(dtype)) for a in (q, k, v)]
    single = [a.astype(np.float32) for a in halves]
    assert all(np.array_equal(a, b) for a, b in zip(single, (q, k, v), strict=True))
    with devices.using(device):
        mma, simt = (
            [
                to_numpy(x)
                for x in fa_numba.attention(
                    *x, algorithm=algorithm, unit=unit, tiles=SMALL, return_lse=True, **options
                )
            ]
            for x, unit in ((halves, "mma"), (single, "simt"))
        )
    assert mma[0].dtype == numpy_dtype(dtype) and simt[0].dtype == np.float32
    return mma, simt


@every_algorithm
@mostly_float16
def test_units_agree_on_averages_of_integers(device, algorithm, dtype):
    """Scale 0 and 64 columns: every P is 1 and every O a multiple of 1/64."""
    rng = np.random.default_rng(3)
    q, k = (rng.integers(-3, 4, (1, 2, n, 16)).astype(np.float32) for n in (40, 64))
    v = rng.integers(-2, 3, (1, 2, 64, 16)).astype(np.float32)
    (O16, L16), (O32, L32) = both_units(device, algorithm, dtype, q, k, v, scale=0.0)
    assert np.array_equal(O32, np.broadcast_to(v.mean(axis=2, keepdims=True), O32.shape))
    assert np.array_equal(O16.astype(np.float32), O32) and np.array_equal(L16, L32)


@every_algorithm
@mostly_float16
@either_mask
def test_units_agree_on_a_selection_of_rows(device, algorithm, dtype, causal):
    """Of each row's scores one is ahead by hundreds: P is 0 or 1, and O a row of V."""
    columns = np.arange(48)
    k = np.float32(columns[:, None] >> np.arange(8) & 1) * 2 - 1  # the bits of the column
    wanted = np.random.default_rng(4).permutation(48)[:40]
    if causal:
        wanted = np.minimum(wanted, np.arange(40) + 8)
    q = 64 * k[wanted]
    v = np.random.default_rng(5).integers(-128, 128, (48, 8)).astype(np.float32)
    q, k, v = (a[None, None] for a in (q, k, v))
    (O16, L16), (O32, L32) = both_units(device, algorithm, dtype, q, k, v, scale=1.0, causal=causal)
    assert np.array_equal(O32[0, 0], v[0, 0][wanted])
    assert np.array_equal(O16.astype(np.float32), O32) and np.array_equal(L16, L32)


# --- plans -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_plan_says_what_runs(dtype):
    shape = (2, 4, 300, 64)
    with devices.using("emulator"):
        for algorithm in ALGORITHMS:
            plan = fa_numba.plan(shape, shape, algorithm=algorithm, dtype=dtype)
            same = fa_numba.plan(shape, shape, algorithm=algorithm, dtype=dtype, unit="mma")
            single = fa_numba.plan(shape, shape, algorithm=algorithm)
            assert plan == same and plan.unit == "mma" and single.unit == "simt"
            names = [f"{algorithm}_forward"]
            if algorithm == "standard":
                names = ["standard_scores", "standard_softmax", "standard_output"]
            assert [kernel.name for kernel in plan.kernels] == names
            assert plan.problem.dtype == plan.accesses.dtype == dtype
            assert plan.flops == single.flops
            if algorithm == "standard":
                assert plan.workspace_bytes == 2 * 8 * 300 * 304  # rows of whole 16 bytes
        assert "A" in fa_numba.plan(shape, shape, algorithm="fa1", dtype=dtype).accesses.loads


@every_algorithm
@pytest.mark.parametrize("d", HEAD_DIMS)
@pytest.mark.parametrize("limit", [99 * 1024, 163 * 1024, 227 * 1024])
@pytest.mark.parametrize("passes", ["fwd", "bwd"])
def test_the_default_tiles_fit(algorithm, d, limit, passes):
    plain, others = Features(causal=True), [Features(bias=True), Features(packed=True)]
    calls = [(f, False) for f in (plain, *others)]
    calls += [(f, True) for f in (plain, *others) if algorithm == "fa1"]
    for N, (features, keys) in itertools.product((1, 17, 64, 4096), calls):
        if algorithm == "standard":
            tiles = mma_tiles("standard", passes, N, N, d, limit).value
            spec = select_mma_spec(tiles, d, limit, StandardSpec)
        else:
            tiles = mma_tiles(algorithm, "fwd", N, N, d, limit, features, keys).value
            spec = select_mma_spec(tiles, d, limit, features=features, splits_keys=keys)
        assert spec.shared_bytes <= limit and spec.fits_registers
        assert tiles.Br <= max(16, 2 * N) and tiles.Bc <= max(32 if keys else 16, 2 * N)
        assert N < 4096 or (tiles.Br >= (16 if keys else 32) and tiles.Bc >= (32 if keys else 16))


# --- what is refused -------------------------------------------------------------------------

Q, K = np.ones((1, 2, 5, 8), np.float16), np.ones((1, 1, 7, 8), np.float16)
HALVES, SHAPES = (Q, K, K), (Q.shape, K.shape)
SINGLE = [a.astype(np.float32) for a in HALVES]


def zeros(d):
    return np.zeros((1, 1, 5, d), np.float16), *np.zeros((2, 1, 1, 7, d), np.float16)


REFUSED = [
    # function, its arrays and what else it is given, error and what its message says
    ("attention", HALVES, {"unit": "simt"}, ValueError, "unit is 'simt'", "float16",
     "simt takes float32"),
    ("attention", SINGLE, {"unit": "mma"}, ValueError, "unit is 'mma'", "float32",
     "mma takes float16 or bfloat16"),
    ("attention", HALVES, {"unit": "tensor"}, ValueError, "unit is 'tensor'", "auto, simt, mma"),
    ("attention", HALVES, {"unit": None}, ValueError, "unit is None"),
    ("attention", HALVES, {"unit": np.array(["mma", "simt"])}, ValueError, "unit is array",
     "allowed is 'auto' or the name"),
    ("attention", HALVES, {"ablate": np.array(["swizzle"])}, ValueError, "ablate is array",
     "allowed is a tuple"),
    ("plan", SHAPES, {"dtype": "float16", "unit": "MMA"}, ValueError, "unit is 'MMA'",
     "auto, simt, mma"),
    ("plan", SHAPES, {"dtype": "bfloat16", "unit": "simt"}, ValueError, "unit is 'simt'",
     "bfloat16"),
    ("attention", HALVES, {"tiles": Tiles(24, 16)}, ValueError, "tiles: Br=24, Bc=16",
     "multiples of 16"),
    ("attention", HALVES, {"tiles": Tiles(16, 24)}, ValueError, "tiles: Br=16, Bc=24",
     "multiples of 16"),
    ("attention", HALVES, {"tiles": Tiles(64, 16, 96)}, ValueError, "tiles: threads=96",
     "[64, 128]"),
    ("attention", zeros(256),
     {"tiles": Tiles(32, 256)}, ValueError, "Br=32, Bc=256", "head_dim=256", "registers"),
    ("attention", zeros(256),
     {"tiles": Tiles(256, 128)}, ValueError, "Br=256, Bc=128", "head_dim=256",
     "262144 bytes of shared memory"),
    ("attention", zeros(256),
     {"tiles": Tiles(128, 96, stages=2)}, ValueError, "Br=128, Bc=96, stages=2", "head_dim=256",
     "262144 bytes of shared memory"),
    ("flash_attention_1", HALVES, {"tiles": Tiles(16, 16, stages=2)}, ValueError, "tiles: stages=2",
     "'fa1'", "'fwd'", "'mma'", "only the forward pass of fa2", "is 1"),
    ("standard_attention", HALVES, {"tiles": Tiles(16, 16, stages=2)}, ValueError,
     "tiles: stages=2", "'standard'", "only the forward pass of fa2", "is 1"),
    ("attention", SINGLE, {"tiles": Tiles(16, 16, stages=2)}, ValueError, "tiles: stages=2",
     "'fa2'", "'simt'", "on tensor cores", "is 1"),
    ("plan", SHAPES, {"dtype": "float16", "passes": "bwd", "tiles": Tiles(32, 32, stages=2)},
     ValueError, "tiles: stages=2", "'fa2'", "'bwd'", "only the forward pass", "is 1"),
    ("flash_attention_2", HALVES, {"tiles": Tiles(16, 16, stages=3)}, ValueError,
     "tiles: stages=3 on unit 'mma'", "1 to 2, up to 4 on unit 'wgmma'"),
    ("flash_attention_2", HALVES,
     {"tiles": Tiles(16, 16, stages=2), "ablate": ("swizzle", "prefetch")}, ValueError,
     "tiles: stages=2", "ablate=('swizzle', 'prefetch')", "allowed is 1"),
    ("attention", (Q, SINGLE[1], K), {}, TypeError, "k has dtype float32", "q float16",
     "one dtype for all"),
    ("attention", (*SINGLE[:2], K), {}, TypeError, "v has dtype float16", "q float32"),
    ("attention", HALVES, {"out": np.empty_like(SINGLE[0])}, TypeError,
     "out has dtype float32: allowed is float16"),
    ("attention", HALVES, {"bias": np.ones((5, 7), np.float16)}, TypeError,
     "bias has dtype float16", "allowed is float32"),
    ("attention", HALVES, {"alibi_slopes": np.ones(2, np.float16)}, TypeError,
     "alibi_slopes has dtype float16", "allowed is float32"),
    ("attention", tuple(a.astype("f8") for a in HALVES), {}, TypeError, "q has dtype float64",
     "float32 or float16 or bfloat16"),
    ("attention", tuple(a.astype(">f2") for a in HALVES), {}, TypeError, "q has dtype >f2"),
    ("attention", HALVES, {"algorithm": "fa2", "query_splits": 2}, TypeError, "query_splits"),
    ("flash_attention_1", HALVES, {"warp_partition": "columns"}, ValueError,
     "warp_partition is 'columns'", "rows, keys"),
    ("flash_attention_1", HALVES, {"warp_partition": None}, ValueError, "warp_partition is None",
     "rows, keys"),
    ("flash_attention_1", SINGLE, {"warp_partition": "keys"}, ValueError,
     "warp_partition is 'keys'", "'simt'", "only fa1 on tensor cores", "'rows'"),
    ("attention", HALVES, {"warp_partition": "keys"}, TypeError, "warp_partition"),
    ("plan", SHAPES, {"dtype": "float16", "warp_partition": "keys"}, ValueError,
     "warp_partition is 'keys'", "'fa2'", "only fa1", "'rows'"),
    ("plan", SHAPES, {"passes": "bwd", "warp_partition": "keys"}, ValueError,
     "warp_partition is 'keys'", "only passes='fwd'"),
    ("flash_attention_1", HALVES, {"tiles": Tiles(16, 48), "warp_partition": "keys"}, ValueError,
     "tiles: Bc=48", "warp_partition='keys'", "multiples of 32"),
    ("flash_attention_1", HALVES, {"tiles": Tiles(16, 64, 256), **KEYS}, ValueError,
     "tiles: threads=256", "[64, 128]"),
    ("flash_attention_1",
     zeros(128),
     {"tiles": Tiles(64, 64), "warp_partition": "keys"}, ValueError, "Br=64, Bc=64",
     "warps of all its rows", "registers"),
    ("flash_attention_2", HALVES, {"ablate": ("prefetch", "tma")}, ValueError,
     "ablate is ('prefetch', 'tma')", "fa2 on unit 'mma'", "padding, swizzle, prefetch, q_reg"),
    ("flash_attention_2", HALVES, {"ablate": "padding"}, ValueError, "ablate is 'padding'",
     "swizzled", "allowed together with 'swizzle'"),
    ("flash_attention_1", HALVES, {"ablate": ["wide_stores"]}, ValueError,
     "ablate is ['wide_stores'] with fa1", "padding, swizzle, prefetch, q_registers, folded_"),
    ("flash_attention_2", HALVES, {"ablate": None}, ValueError, "ablate is None"),
    ("flash_attention_2", SINGLE, {"ablate": "padding"}, ValueError, "ablate is 'padding' with fa2",
     "unit 'simt': allowed is (), as"),
    ("attention", HALVES, {"algorithm": "standard", "ablate": "padding"}, TypeError, "ablate"),
    ("plan", SHAPES, {"passes": "bwd", "ablate": ("padding",)}, ValueError,
     "ablate is ('padding',)", "only passes='fwd'"),
    ("plan", SHAPES, {"dtype": "float8"}, ValueError, "dtype is 'float8'", "float16"),
]  # fmt: skip


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: f"{row[0]}-{row[4]}")
def test_what_cannot_be_is_refused_by_name(row):
    function, arrays, given_, error, *says = row
    with devices.using("emulator"), pytest.raises(error) as caught:
        getattr(fa_numba, function)(*arrays, **given_)
    assert all(part in str(caught.value) for part in says), str(caught.value)


@no_bfloat16
def test_one_16_bit_dtype_for_all():
    with devices.using("emulator"), pytest.raises(TypeError) as caught:
        fa_numba.attention(Q, K.astype(numpy_dtype("bfloat16")), K)
    assert all(p in str(caught.value) for p in ("k has dtype bfloat16", "q float16", "one dtype"))


# --- any problem -----------------------------------------------------------------------------


@st.composite
def any_call(draw):
    """(q, k, v) as shapes, options of a call, and a seed."""
    heads_k, group, batch = draw(st.tuples(*[st.integers(1, 2)] * 3))
    Nq, Nk = draw(st.tuples(*[st.integers(1, 60)] * 2))
    sizes = batch, heads_k * group, heads_k, Nq, Nk, draw(st.sampled_from([1, 3, 8, 16, 20]))
    tiles = Tiles(draw(st.sampled_from([16, 32, 48])), draw(st.sampled_from([16, 32])))
    options = {"tiles": tiles, "causal": draw(st.booleans()), "return_lse": draw(st.booleans())}
    sides = st.tuples(*[st.integers(-1, 50)] * 2)
    options["window"] = draw(st.just((-1, -1)) | sides)
    lengths = {"q_lens": Nq, "kv_lens": Nk}
    for name in draw(st.sets(st.sampled_from(["q_lens", "kv_lens"]))):
        some = st.integers(0, lengths[name])
        options[name] = draw(st.lists(some, min_size=batch, max_size=batch))
    if draw(st.booleans()):
        grid = (-(-Nq // tiles.Br), -(-Nk // tiles.Bc))
        shape = draw(st.sampled_from([grid, (batch, heads_k * group, *grid)]))
        options["block_mask"] = random_mask(*shape, share=draw(st.sampled_from([0.3, 0.8])))
    if draw(st.booleans()):
        options["bias"] = random_array(draw(st.sampled_from([1, Nq])), Nk)
    if draw(st.booleans()):
        options["dropout_p"] = 0.25
    layout = draw(st.sampled_from(["padded", "odd"]))
    return sizes, {**options, "layout": layout, "out_layout": layout}


@mostly_float16
@every_algorithm
@examples(25)
@given(any_call(), st.integers(1, 4), st.booleans())
def test_any_problem(algorithm, dtype, call, query_splits, splits_keys):
    sizes, options = call
    splits = {"query_splits": query_splits} if algorithm == "fa1" else {}
    if algorithm == "fa1" and splits_keys and options["tiles"].Bc == 32:
        splits |= KEYS
    # attend holds the counts against the plan, absent arrays included.
    check("emulator", algorithm, *half_inputs(dtype, *sizes), **options, **splits)
