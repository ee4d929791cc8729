"""Columns in parallel (`kv_splits`): results, counts, order and choice."""

import numpy as np
import pytest
from conftest import examples
from helpers import check as check_call
from helpers import random_inputs, running
from hypothesis import given
from hypothesis import strategies as st
from options_helpers import drawn, inputs, names_of_options

import fa_numba
from fa_numba import Tiles, bounds, io_model
from fa_numba import device as devices
from fa_numba.checks import MAX_KV_SPLITS

TILES = {"float32": Tiles(8, 16), "float16": Tiles(16, 16)}
dtypes = pytest.mark.parametrize("dtype", ["float32", "float16"])


def made(dtype, *shape, **how):
    return random_inputs(*shape, dtype=dtype, **how)


def check(dtype, shape, **options):
    """O and L against float64 between guard bands, the counts against the closed form."""
    options = {"tiles": TILES[dtype], **options}
    return check_call("emulator", "fa2", *made(dtype, *shape), **options)


# --- results -----------------------------------------------------------------------------------

CASES = {
    # (B, Hq, Hk, Nq, Nk, d), splits, options
    "even": ((1, 2, 2, 8, 96, 16), 3, {}),
    "more than 16 splits a warp": ((1, 1, 1, 3, 2200, 8), 137, {"scale": 99.0}),
    "one tile more": ((2, 2, 1, 21, 100, 8), 3, {}),
    "more splits than tiles": ((1, 1, 1, 5, 35, 12), 7, {}),
    "a warp's splits in several rounds": ((1, 1, 1, 2, 160, 70), 8, {}),
    "eight warps a row": ((1, 2, 1, 3, 200, 70), 13, {}),
    "maxima far apart, splits": ((1, 1, 1, 3, 540, 8), 34, {"scale": 99.0}),
    "odd": ((1, 2, 1, 13, 77, 5), 4, {"layout": "odd"}),
    "causal": ((1, 2, 2, 37, 51, 8), 3, {"causal": True}),
    "rows that see nothing": ((1, 1, 1, 40, 21, 8), 2, {"causal": True}),
    "window": ((1, 1, 1, 37, 150, 8), 3, {"window": (30, 4)}),
    "kv_lens": ((4, 2, 1, 3, 120, 8), 4, {"kv_lens": [120, 17, 1, 0]}),
    "q_lens": ((3, 2, 1, 20, 70, 8), 3, {"q_lens": [20, 3, 0], "causal": True}),
    "slopes": ((1, 2, 2, 5, 70, 8), 3, {"alibi_slopes": np.float32([0.5, 0.1])}),
    "sinks": ((1, 4, 2, 5, 70, 8), 3, {"sinks": np.float32([0.5, 4.0, -np.inf, -2.0])}),
    "sinks alone": ((2, 4, 1, 9, 70, 8), 3, {"sinks": np.float32([1, 2, 3, 0]), "kv_lens": [0, 9]}),
    "softcap": ((1, 2, 2, 5, 70, 8), 3, {"softcap": 1.5}),
    "dropout": ((1, 2, 1, 9, 130, 8), 5, {"dropout_p": 0.4, "seed": 3}),
}


@dtypes
@pytest.mark.parametrize("name", CASES)
def test_splits_against_float64(dtype, name):
    shape, kv_splits, options = CASES[name]
    result = check(dtype, shape, kv_splits=kv_splits, **options)
    if name == "rows that see nothing":
        assert not result.O[:, :, :19].any() and (result.L[:, :, :19] == -np.inf).all()


@dtypes
def test_packed_splits(dtype):
    cu = {"cu_seqlens_q": [0, 5, 14, 14, 18], "cu_seqlens_k": [0, 0, 70, 73, 100]}
    q, k, v = made(dtype, 1, 4, 2, 18, 100, 8)
    q, k, v = (np.ascontiguousarray(a[0].swapaxes(0, 1)) for a in (q, k, v))
    for causal, lse in ((True, True), (False, False)):
        options = {"tiles": TILES[dtype], "causal": causal, "return_lse": lse, **cu}
        check_call("emulator", "fa2", q, k, v, kv_splits=3, **options)


@examples(15)
@given(names=names_of_options, kv_splits=st.integers(2, 9), seed=st.integers(0, 99))
def test_splits_with_any_options(names, kv_splits, seed):
    shape = (2, 2, 1, 11, 53, 4)
    dtype = ("float32", "float16")[seed % 2]
    options = drawn(names, shape, TILES[dtype], seed)
    (_, q, k, v), options = inputs(shape, options)
    q, k, v = (a.astype(dtype) for a in (q, k, v))
    check_call("emulator", "fa2", q, k, v, kv_splits=kv_splits, **options)


def test_large_scores_are_merged_exactly():
    """Scores near 2^14: an L of them in float32 would be off by 2^-10, and weights with it."""
    rng = np.random.default_rng(0)
    q = np.full((1, 1, 4, 1), 2.0**7, np.float32)
    k = (2.0**7 + rng.integers(0, 4, (1, 1, 64, 1)) / 2.0**8).astype(np.float32)
    v = rng.standard_normal((1, 1, 64, 1), dtype=np.float32)
    with devices.using("emulator"):
        one, four = (
            fa_numba.flash_attention_2(q, k, v, scale=1.0, kv_splits=n, tiles=Tiles(4, 16))
            for n in (1, 4)
        )
    s = np.float64(q[0, 0]) * np.float64(k[0, 0, :, 0])
    p = np.exp(s - s.max())
    true = (p / p.sum(1, keepdims=True)) @ np.float64(v[0, 0])
    # Both have scores times log2(e) in float32, of 2^14 numbers off by 2^-10; no more in four.
    assert abs(four - true).max() <= 1.5 * abs(one - true).max() + 2.0**-22


@pytest.mark.parametrize("dtype, kv_splits", [("float16", 2), ("float32", 9)])  # a warp a row, 8
def test_a_split_of_which_a_row_sees_nothing_counts_for_nothing(dtype, kv_splits):
    """Its l is 0, and its O NaN where other rows of the tile see a V that is."""
    column = 16 * (kv_splits - 1)  # the first of the last split, which row column + 8 sees
    q, k, v = made(dtype, 1, 1, 1, column + 24, column + 16, 8)
    how = {"kv_splits": kv_splits, "causal": True, "tiles": Tiles(16, 16), "return_lse": True}
    found = []
    for value in (np.nan, 0):
        v[:, :, column + 7] = value
        with running("emulator"):
            found.append(fa_numba.flash_attention_2(q, k, v, **how))
    (O, L), (want, same) = found
    np.testing.assert_array_equal(O[:, :, : column + 8], want[:, :, : column + 8])
    np.testing.assert_array_equal(L, same)
    assert np.isnan(O[:, :, column + 8 :]).all() and not np.isnan(want).any()
    assert not O[:, :, :8].any() and (L[:, :, :8] == -np.inf).all()  # these see no split at all


HOPPERS = {
    "one row tile": ((1, 2, 2, 20, 260, 64), 3, {}),
    "causal": ((1, 1, 1, 130, 300, 64), 2, {"causal": True}),
    "shared heads": ((2, 8, 2, 5, 400, 64), 3, {"causal": True}),
    "kv_lens": ((2, 1, 1, 9, 300, 64), 4, {"kv_lens": [300, 140]}),
    "q_lens": ((2, 2, 2, 70, 200, 64), 2, {"q_lens": [70, 3]}),
    "window": ((1, 1, 1, 9, 520, 40), 3, {"window": (300, 0), "softcap": 2.0}),
    "a word's entries": ((33, 1, 1, 1, 65, 16), 2, {}),
}


@pytest.mark.parametrize("name", HOPPERS)
def test_splits_on_hoppers_unit(name):
    shape, kv_splits, options = HOPPERS[name]
    tiles = Tiles(64, 64)
    check("float16", shape, kv_splits=kv_splits, unit="wgmma", tiles=tiles, **options)


def test_packed_splits_on_hoppers_unit():
    cu = {"cu_seqlens_q": [0, 5, 14, 14, 18], "cu_seqlens_k": [0, 0, 170, 173, 300]}
    for heads in (2, 4):
        q, k, v = made("float16", 1, heads, 2, 18, 300, 64)
        q, k, v = (np.ascontiguousarray(a[0].swapaxes(0, 1)) for a in (q, k, v))
        options = {"tiles": Tiles(64, 64), "causal": True, "unit": "wgmma", **cu}
        check_call("emulator", "fa2", q, k, v, kv_splits=2, **options)


# --- heads in the rows of a tile ---------------------------------------------------------------

GROUPS = {
    # (B, Hq, Hk, Nq, Nk, d), options
    "one row": ((2, 8, 2, 1, 70, 16), {}),
    "all heads of one": ((1, 32, 1, 3, 40, 8), {"causal": True}),
    "of six two": ((1, 6, 1, 7, 40, 5), {"layout": "odd"}),
    "rows that end in a tile": ((1, 4, 1, 21, 70, 8), {"window": (20, 0)}),
    "q_lens": ((3, 4, 2, 9, 40, 8), {"q_lens": [9, 2, 0], "kv_lens": [40, 7, 33]}),
}


@pytest.mark.parametrize("kv_splits", [1, 3])
@pytest.mark.parametrize("name", GROUPS)
def test_heads_that_share_a_tile(name, kv_splits):
    shape, options = GROUPS[name]
    B, Hq, Hk, Nq, Nk, d = shape
    result = check("float16", shape, kv_splits=kv_splits, **options)
    # Each head computes what it would alone, in the same order.
    q, k, v = made("float16", *shape)
    options = {n: x for n, x in options.items() if n != "layout"}
    with devices.using("emulator"):
        how = {"tiles": TILES["float16"], "kv_splits": kv_splits, **options}
        k, v = (np.repeat(a, Hq // Hk, axis=1) for a in (k, v))
        alone = fa_numba.flash_attention_2(q, k, v, **how)
    if kv_splits == 1 or "window" not in options:  # a lower tile visits fewer columns, to share
        assert alone.tobytes() == np.ascontiguousarray(result.O).tobytes()
    plan = fa_numba.plan((B, Hq, Nq, d), (B, Hk, Nk, d), dtype="float16", **how)
    group = Hq // Hk
    heads = min(group & -group, 16)
    assert plan.kernels[0].grid == (-(-Nq * heads // 16) * kv_splits, Hq // heads, B)


@pytest.mark.parametrize(
    "options",
    [
        {"bias": (3, 40)},
        {"alibi_slopes": (4,)},
        {"dropout_p": 0.1},
        {"block_mask": np.ones((1, 3), bool), "tiles": Tiles(16, 16)},
    ],
    ids=lambda options: next(iter(options)),
)
def test_heads_with_values_of_their_own_share_no_tile(options):
    plan = fa_numba.plan((1, 4, 3, 8), (1, 1, 40, 8), dtype="float16", **options)
    assert plan.kernels[0].grid[1] == 4
    del options
    assert fa_numba.plan((1, 4, 3, 8), (1, 1, 40, 8), dtype="float16").kernels[0].grid[1] == 1
    assert fa_numba.plan((1, 4, 65, 8), (1, 1, 40, 8), dtype="float16").kernels[0].grid[1] == 4


# --- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kv_splits, error, says",
    [
        (0, ValueError, "kv_splits must be an integer from 1 to 256, or 'auto', got 0"),
        (-1, ValueError, "kv_splits must be an integer from 1 to 256, or 'auto', got -1"),
        (
            MAX_KV_SPLITS + 1,
            ValueError,
            "kv_splits must be an integer from 1 to 256, or 'auto', got 257",
        ),
        (2.0, TypeError, r"kv_splits must be an integer from 1 to 256, or 'auto', got 2\.0"),
        (True, TypeError, "kv_splits must be an integer from 1 to 256, or 'auto', got True"),
        ("all", ValueError, "kv_splits must be an integer from 1 to 256, or 'auto', got 'all'"),
        (None, TypeError, "kv_splits must be an integer from 1 to 256, or 'auto', got None"),
    ],
)
def test_splits_that_cannot_be(kv_splits, error, says):
    q, k, v = made("float32", 1, 1, 1, 2, 8, 4)
    with devices.using("emulator"), fa_numba.count_accesses() as counts:
        with pytest.raises(error, match=says):
            fa_numba.flash_attention_2(q, k, v, kv_splits=kv_splits)
        with pytest.raises(error, match=says):
            fa_numba.plan(q.shape, k.shape, kv_splits=kv_splits)
    assert not counts.loads


def test_who_has_no_splits_says_so():
    q, k, v = made("float32", 1, 1, 1, 2, 8, 4)
    for algorithm in ("fa1", "standard"):
        with pytest.raises(
            TypeError, match="kv_splits is not an option .*flash_attention_2 takes it"
        ):
            fa_numba.attention(q, k, v, algorithm=algorithm, kv_splits=2)
        with pytest.raises(ValueError, match="thread blocks needs algorithm 'fa2' .*'simt'"):
            fa_numba.plan(q.shape, k.shape, algorithm=algorithm, kv_splits=2)
    with pytest.raises(
        ValueError,
        match="must be 'auto' with passes='bwd', got 2; kv_splits is only for passes='fwd'",
    ):
        fa_numba.plan(q.shape, k.shape, passes="bwd", kv_splits=2)


# --- the choice --------------------------------------------------------------------------------

H200 = bounds.DEVICES["H200"]


def planned(q, k, gpu=H200, dtype="float16", **options):
    with gpu.planning():
        return fa_numba.plan(q, k, dtype=dtype, **options)


def test_auto_splits_where_multiprocessors_would_be_idle():
    def splits_of(B, Hq, Hk, Nq, Nk, d=128, **options):
        return planned((B, Hq, Nq, d), (B, Hk, Nk, d), unit="mma", **options).kv_splits

    # A GPU that is filled, whatever the length: every training shape.
    for B, H, N in ((2, 16, 8192), (32, 16, 512), (1, 32, 16384), (1, 132, 128)):
        assert splits_of(B, H, H, N, N) == 1
    # One row of eight heads, which share a tile, and a long cache
    few, more = splits_of(1, 8, 1, 1, 32768), splits_of(8, 8, 1, 1, 32768)
    assert few > more > 1
    # Never fewer than two column tiles each, and none that is not needed
    assert splits_of(1, 8, 1, 1, 192) == splits_of(1, 8, 1, 1, 64) == 1
    assert splits_of(1, 8, 1, 1, 64 * 12) == 6
    # Four blocks a multiprocessor keep memory busy, of half as many bytes eight: 528 or 1,056
    assert 480 < 8 * splits_of(1, 64, 8, 1, 131072) <= 528
    assert 960 < 8 * splits_of(1, 64, 8, 1, 131072, d=64) <= 1056
    # A window's columns are what is shared
    assert splits_of(1, 8, 1, 1, 32768, window=(63, 0)) == 1
    # A GPU with fewer multiprocessors is filled by fewer
    assert splits_of(8, 8, 1, 1, 32768, gpu=bounds.DEVICES["RTX 4090"]) < more
    # Long rows of few heads
    assert splits_of(1, 2, 2, 2048, 16384) == 132 // 32
    # 96 of 132: in quarters three rounds, 3/4 of the time; short columns are not worth it
    assert splits_of(1, 6, 6, 2048, 16384) == 4 and splits_of(1, 6, 6, 2048, 512) == 1


def test_auto_evens_out_the_rows_of_a_causal_mask():
    def splits_of(heads, N, d=128, Nk=None, gpu=H200):
        q, k = (1, heads, N, d), (1, heads, Nk or N, d)
        return planned(q, k, gpu, causal=True).kv_splits

    # 128 row tiles, 132 resident at once: the last one takes twice an even share.
    assert splits_of(1, 16384) == 2
    # More row tiles than are resident, and still one that is longer than an even share.
    assert splits_of(2, 16384, d=64) == 3
    # Shares are even enough, with and without more columns than rows.
    assert splits_of(8, 16384) == splits_of(64, 2048) == splits_of(132, 1024) == 1
    assert splits_of(4, 1024, Nk=32768) >= 4
    # The sums of many short rows take longer than their columns; those of few heads do not.
    assert splits_of(8, 1024, d=64) == splits_of(4, 512, d=64) == splits_of(8, 2048) == 1
    assert splits_of(1, 1024) > 2 and splits_of(4, 2048, d=64) > 2
    # Short columns are not worth it.
    assert splits_of(4, 256) == splits_of(1, 512) == 1
    assert splits_of(8, 16384, gpu=bounds.DEVICES["A100"]) == 1


def test_few_rows_go_to_the_copy_engine_where_it_is_kept_busy():
    def chosen(heads, Nk, gpu=H200, Nq=1, group=1, d=128, **options):
        q, k = (1, heads * group, Nq, d), (1, heads, Nk, d)
        return planned(q, k, gpu, **options).unit

    assert chosen(99, 2048) == chosen(396, 2048, group=8) == "wgmma"
    # Much fewer row tiles than multiprocessors, or several each
    assert chosen(98, 2048) == chosen(397, 2048, group=8) == "mma"
    assert chosen(397, 2048, d=64) == "wgmma"
    # Heads that share a tile: of short columns, or more rows than mma's lowest tile
    assert chosen(8, 1024, group=4) == chosen(8, 2048, Nq=5, group=4) == "wgmma"
    assert chosen(8, 2048, Nq=4, group=4) == chosen(8, 2048, Nq=17) == "mma"
    assert chosen(99, 2048, bounds.DEVICES["RTX 4090"]) == "mma"
    # Pages, whatever their number
    paged = planned((2, 4, 1, 64), (9, 4, 16, 64), block_table=(2, 3))
    assert (paged.unit, paged.tiles.Br) == ("wgmma", 64)


def test_auto_does_not_split_on_the_emulator():
    q, k = (1, 1, 1, 64), (1, 1, 9999, 64)
    with devices.using("emulator"):
        plan = fa_numba.plan(q, k, dtype="float16")
    assert plan.kv_splits == 1 and len(plan.kernels) == 1
    assert planned(q, k).kv_splits > 1


def test_a_plan_shows_its_splits():
    plan = planned((1, 8, 1, 64), (1, 2, 4096, 64), unit="mma", kv_splits=5, return_lse=True)
    assert [k.name for k in plan.kernels] == ["fa2_forward", "merge_splits"]
    assert plan.kernels[0].grid == (5, 2, 1)
    assert "kv_splits  5 blocks share the columns of a row tile" in str(plan).splitlines()
    assert "kv_splits" not in str(planned((1, 8, 1, 64), (1, 2, 4096, 64), kv_splits=1))
    assert plan.workspace_bytes == 5 * 8 * (64 + 2) * 4
    own = {"return_lse": True, "kv_splits": 5}
    assert io_model.workspace("fa2", plan.problem, **own) == plan.workspace_bytes
    assert plan.accesses.stores["A"] == plan.accesses.loads["A"] == 5 * 8 * 64
    assert plan.accesses.loads["Q"] == 5 * 8 * 64 and plan.accesses.loads["K"] == 2 * 4096 * 64


SMALL = [
    # shape, kv_splits, options: what heads, shares and their merge have corners of
    ((2, 12, 2, 11, 70, 8), 3, {"causal": True, "kv_lens": [70, 20]}),
    ((1, 4, 1, 2, 130, 70), 8, {}),
    ((1, 1, 1, 3, 200, 8), 13, {}),
    ((1, 1, 1, 40, 21, 8), 2, {"causal": True, "scale": 3.0}),
]
SMALL_ON_HOPPER = [
    ((1, 1, 1, 130, 200, 64), 2, {"unit": "wgmma", "tiles": Tiles(128, 64)}),
    ((1, 2, 2, 70, 300, 64), 2, {"unit": "wgmma", "tiles": Tiles(64, 64), "causal": True}),
    ((2, 2, 1, 70, 200, 64), 3, {"unit": "wgmma", "tiles": Tiles(64, 64), "kv_lens": [200, 90]}),
]


@pytest.mark.parametrize("shape, kv_splits, options", SMALL + SMALL_ON_HOPPER)
def test_small_calls(shape, kv_splits, options):
    check("float16", shape, kv_splits=kv_splits, **options)
