"""K and V in pages with a block table: the bits of contiguous K and V, what is refused."""

import numpy as np
import pytest
from helpers import assert_close_to_float64, assert_counts, random_inputs

import fa_numba
from fa_numba import Tiles


def cache_of(k, v, lens, page_size, *, seed=0, unused=3, more=1):
    """k and v (B, Hk, N, d) in pages in no order; NaN wherever no key is.

    Gives the pages of both and the table, whose entries past a sequence's pages are no pages.
    """
    rng = np.random.default_rng(seed)
    B, Hk, N, _ = k.shape
    needed = [-(-n // page_size) for n in lens]
    each = -(-N // page_size) + more
    count = sum(needed) + unused
    order = iter(rng.permutation(count))
    table = np.full((B, each), -7, np.int32)
    pages = [np.full((count, Hk, page_size, x.shape[-1]), np.nan, x.dtype) for x in (k, v)]
    for b, n in enumerate(lens):
        for j in range(needed[b]):
            table[b, j] = page = next(order)
            rows = min(page_size, n - j * page_size)
            for side, x in zip(pages, (k, v), strict=True):
                begin = j * page_size
                side[page, :, :rows] = x[b, :, begin : begin + rows]
    return *pages, table


def inputs(dtype, *sizes):
    return random_inputs(*sizes, dtype=dtype)


def pages_and_piece(dtype, sizes, lens, page_size, tiles, **options):
    """(O, L) over pages, and over K and V in one piece; the counts are the plan's."""
    q, k, v = inputs(dtype, *sizes)
    k_pages, v_pages, table = cache_of(k, v, lens, page_size, more=0)  # a read behind it shows
    options = {"kv_lens": lens, "tiles": tiles, "return_lse": True, **options}
    whole = fa_numba.flash_attention_2(q, k, v, **options)
    options["block_table"] = table
    with fa_numba.count_accesses() as counts:
        paged = fa_numba.flash_attention_2(q, k_pages, v_pages, **options)
    options["block_table"] = table.shape
    plan = fa_numba.plan(q.shape, k_pages.shape, dtype=dtype, **options)
    assert_counts(counts, plan)
    assert plan.kv_splits == (options.get("kv_splits") or 1)
    assert counts.loads["block_table"] == plan.accesses.loads["block_table"] > 0
    return paged, whole


CAUSAL_SPLITS = {"causal": True, "kv_splits": 2}
WGMMA, WINDOW = {"unit": "wgmma"}, {"window": (20, 3)}
WGMMA_WINDOW = {**WGMMA, **WINDOW}
HOPPERS = Tiles(64, 64, stages=2)
CASES = [
    # dtype, (B, Hq, Hk, Nq, Nk, d), lengths, page size, tiles, options
    ("float16", (3, 4, 2, 5, 101, 64), (0, 37, 101), 16, Tiles(16, 32), {}),
    ("float16", (3, 2, 2, 40, 70, 128), (70, 1, 64), 64, Tiles(32, 64), {"causal": True}),
    ("float16", (2, 4, 1, 1, 90, 128), (90, 33), 48, Tiles(16, 64), {}),
    ("float16", (2, 2, 1, 33, 90, 80), (81, 90), 32, Tiles(16, 48), {"window": (20, 3)}),
    ("float16", (2, 2, 1, 5, 300, 32), (300, 256), 256, Tiles(16, 64, stages=2), {"softcap": 2.0}),
    ("float16", (2, 2, 1, 20, 60, 20), (60, 17), 16, Tiles(16, 16), {}),
    # Boxes of Hopper's copy engine, and heads that share the rows of a tile there.
    ("float16", (2, 2, 1, 70, 140, 64), (140, 77), 16, Tiles(64, 64, stages=2), {"unit": "wgmma"}),
    ("float16", (2, 4, 1, 3, 90, 80), (0, 90), 48, Tiles(64, 80, stages=2), WGMMA_WINDOW),
    ("float16", (1, 2, 2, 70, 130, 128), (129,), 256, Tiles(128, 64), {"unit": "wgmma"}),
    ("float16", (1, 1, 1, 3, 96, 64), (96,), 32, Tiles(64, 64), {"unit": "wgmma"}),
    # Blocks that share columns, and heads that share the rows of a tile.
    ("float16", (3, 4, 1, 2, 101, 64), (0, 37, 101), 16, Tiles(16, 32), {"kv_splits": 3}),
    ("float16", (2, 4, 2, 40, 90, 64), (90, 64), 64, Tiles(16, 16), CAUSAL_SPLITS),
    ("float32", (2, 4, 1, 1, 101, 64), (101, 37), 16, Tiles(16, 32), {"kv_splits": 2}),
    ("bfloat16", (2, 2, 1, 20, 60, 64), (60, 17), 32, Tiles(16, 32), {"causal": True}),
    ("float32", (3, 4, 2, 5, 101, 64), (0, 37, 101), 16, Tiles(16, 32), {"causal": True}),
    ("float32", (2, 2, 1, 9, 70, 20), (70, 33), 48, Tiles(8, 16), {"window": (20, 3)}),
    ("float32", (2, 2, 1, 9, 70, 33), (70, 33), 64, Tiles(8, 32), {}),
    ("float32", (1, 1, 1, 3, 40, 4), (40,), 16, Tiles(8, 32), {"q_lens": [2]}),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]}-d{c[1][5]}-page{c[3]}")
def test_pages_give_the_bits_of_one_piece(case):
    if case[0] == "bfloat16":
        pytest.importorskip("ml_dtypes")
    *sizes, options = case
    (O, L), (O_whole, L_whole) = pages_and_piece(*sizes, **options)
    np.testing.assert_array_equal(O, O_whole)
    np.testing.assert_array_equal(L, L_whole)
    assert np.isfinite(np.asarray(O, np.float32)).all()
    for b, n in enumerate(case[2]):
        if n == 0:
            assert (O[b] == 0).all() and (L[b] == -np.inf).all()


PACKED = [
    # dtype, (B, Hq, Hk, most rows, most keys, d), rows and keys of each, page size, tiles, options
    ("float16", (4, 4, 2, 9, 101, 64), (3, 0, 9, 1), (0, 37, 101, 64), 16, Tiles(16, 32), {}),
    ("float16", (3, 2, 2, 40, 70, 80), (40, 1, 17), (70, 33, 64), 48, Tiles(32, 64), CAUSAL_SPLITS),
    ("float32", (3, 4, 1, 9, 70, 64), (9, 1, 5), (9, 70, 0), 32, Tiles(8, 16), WINDOW),
    ("float32", (2, 4, 2, 5, 90, 20), (1, 5), (90, 64), 64, Tiles(8, 32), {"kv_splits": 3}),
    ("float16", (3, 4, 1, 70, 90, 64), (70, 1, 0), (90, 77, 5), 16, HOPPERS, WGMMA_WINDOW),
    ("float16", (2, 2, 2, 3, 90, 128), (3, 1), (90, 50), 16, HOPPERS, {**CAUSAL_SPLITS, **WGMMA}),
]


@pytest.mark.parametrize("case", PACKED, ids=lambda c: f"{c[0]}-d{c[1][5]}-page{c[4]}")
def test_packed_queries_over_pages_give_the_bits_of_packed_keys(case):
    """A batch of prompts and decoding steps together, with what an element's place decides."""
    dtype, sizes, rows, lens, page_size, tiles, options = case
    q, k, v = inputs(dtype, *sizes)
    k_pages, v_pages, table = cache_of(k, v, lens, page_size)
    options = {"tiles": tiles, "return_lse": True, "softcap": 3.0, **options}
    options["cu_seqlens_q"] = np.cumsum([0, *rows])
    if "unit" not in options:
        options |= {"dropout_p": 0.2, "seed": 3}
    sinks = {"sinks": np.linspace(-1, 3, sizes[1], dtype=np.float32)}
    alibi = {"alibi_slopes": np.linspace(0.1, 0.5, sizes[0] * sizes[1], dtype=np.float32)}
    alibi["alibi_slopes"] = alibi["alibi_slopes"].reshape(sizes[:2])

    def packed(x, lengths):
        return np.concatenate([x[b, :, :n].swapaxes(0, 1) for b, n in enumerate(lengths)])

    q, whole = packed(q, rows), (packed(k, lens), packed(v, lens))
    want = fa_numba.flash_attention_2(
        q, *whole, cu_seqlens_k=np.cumsum([0, *lens]), **options, **alibi, **sinks
    )
    options |= {"kv_lens": lens, "block_table": table}
    with fa_numba.count_accesses() as counts:
        found = fa_numba.flash_attention_2(q, k_pages, v_pages, **options, **alibi, **sinks)
    for a, b in zip(found, want, strict=True):
        np.testing.assert_array_equal(a, b)
        assert not np.isnan(np.asarray(a, np.float32)).any()
    options |= {"block_table": table.shape, "alibi_slopes": sizes[:2], "sinks": sizes[1:2]}
    plan = fa_numba.plan(q.shape, k_pages.shape, dtype=dtype, **options)
    assert_counts(counts, plan)
    assert plan.problem.k_shape == k_pages.shape and plan.problem.q_shape == q.shape


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_pages_are_as_close_to_float64_as_one_piece(dtype):
    lens = [50, 33]
    q, k, v = inputs(dtype, 2, 4, 2, 7, 50, 64)
    k_pages, v_pages, table = cache_of(k, v, lens, 16)
    options = {"kv_lens": lens, "causal": True, "softcap": 3.0}
    options["alibi_slopes"] = np.array([0.5, 0.1, 0.0, 0.2], np.float32)
    options["sinks"] = np.array([0.5, -1.0, 3.0, 0.0], np.float32)
    paged = {"block_table": table, "return_lse": True}
    O, L = fa_numba.flash_attention_2(q, k_pages, v_pages, **paged, **options)
    assert_close_to_float64(O, q, k, v, L, **options)


def test_pages_of_any_strides_and_in_the_other_layout():
    """(pages, page_size, Hk, d) as others have it, and K and V side by side in one array."""
    lens = [50, 33]
    q, k, v = inputs("float16", 2, 4, 2, 7, 50, 64)
    k_pages, v_pages, table = cache_of(k, v, lens, 16)
    options = {"block_table": table, "kv_lens": lens}
    want = fa_numba.flash_attention_2(q, k_pages, v_pages, **options)
    both = np.stack((k_pages, v_pages)).transpose(1, 0, 3, 2, 4).copy()  # (pages, 2, rows, Hk, d)
    turned = q.transpose(0, 2, 1, 3).copy()
    options |= {"layout": "bnhd", "block_table": np.asfortranarray(table)}
    O = fa_numba.flash_attention_2(turned, both[:, 0], both[:, 1], **options)
    np.testing.assert_array_equal(O.transpose(0, 2, 1, 3), want)


def test_sequences_share_the_pages_of_a_prefix():
    q, k, v = inputs("float16", 2, 2, 2, 4, 45, 32)
    k[1, :, :32], v[1, :, :32] = k[0, :, :32], v[0, :, :32]
    k_pages, v_pages, table = cache_of(k, v, [45, 40], 16)
    table[1, :2] = table[0, :2]
    tiles = {"tiles": Tiles(16, 32)}
    O = fa_numba.flash_attention_2(
        q, k_pages, v_pages, block_table=table, kv_lens=[45, 40], **tiles
    )
    want = fa_numba.flash_attention_2(q, k, v, kv_lens=[45, 40], **tiles)
    np.testing.assert_array_equal(O, want)


BAD = {
    "a page there is not": (
        {"table": {(1, 1): 7}},
            r"block_table\[1, 1\] must be the number of a page of k, from 0 to 6, .*got 7",
    ),
    "a negative page": (
        {"table": {(0, 0): -1}},
            r"block_table\[0, 0\] must be the number of a page of k, from 0 to 6, .*got -1",
    ),
    "more keys than pages": (
        {"kv_lens": [50, 65]},
            r"kv_lens must contain integers from 0 to 64 \(4 pages of 16 rows in .*got 65",
    ),
    "fewer than no keys": ({"kv_lens": [-1, 3]},
        r"kv_lens must contain integers from 0 to 64 \(4 pages of 16 rows in .*got -1"),
    "no lengths": ({"kv_lens": None},
        r"block_table needs kv_lens, integers of shape \(batch,\): the number of keys"),
    "lengths of another batch": (
        {"kv_lens": [1, 2, 3]},
            r"kv_lens must have shape \(2,\) \(one value per batch entry\), got \(3,\)",
    ),
    "a table of another batch": (
        {"rows": 1}, r"block_table must have shape \(2, pages per sequence\), one .*got \(1, 4\)",
    ),
    "a table of numbers": (
        {"dtype": np.float32}, "block_table must contain integers, got dtype float32",
    ),
    "pages of 24 rows": (
        {"page_size": 24},
            r"k must have .* of 16 from 16 to 256, got 24 rows \(shape \(7, 2, 24, 32\)\)",
    ),
    "pages of 272 rows": ({"page_size": 272},
        r"k must have .* of 16 from 16 to 256, got 272 rows \(shape \(7, 2, 272, 32\)\)"),
    "fa1": ({"algorithm": "fa1"},
        "block_table needs the forward pass of algorithm 'fa2', got 'fa1'"),
    "standard": ({"algorithm": "standard"},
        "block_table needs the forward pass of algorithm 'fa2', got 'standard'"),
    "packed of four axes": ({"cu_seqlens_q": [0, 1, 2]},
        r"q must have 3 axes for packed sequences, \(.*got 4 axes: shape \(2, 2, 4, 32\)"),
    "packed keys": (
        {"cu_seqlens_q": [0, 1, 2], "cu_seqlens_k": [0, 50, 83]},
        "cu_seqlens_k cannot be given with block_table; pass kv_lens instead,",
    ),
    "packed with the other layout": (
        {"cu_seqlens_q": [0, 1, 2], "layout": "bnhd"},
        "layout cannot be given with cu_seqlens_q .*got layout='bnhd'; leave .* The pages of k",
    ),
    "packed with q_lens": (
        {"cu_seqlens_q": [0, 1, 2], "q_lens": [1, 1]},
        "q_lens cannot be given with cu_seqlens_q, which already says how long",
    ),
    "fa1 on wgmma": ({"algorithm": "fa1", "unit": "wgmma"},
        "block_table needs the forward pass of algorithm 'fa2', got 'fa1'"),
    "tiles": (
        {"tiles": Tiles(16, 40)},
            r"tiles\.Bc must be a multiple of 16 with a block_table \(pages .*got 40",
    ),
    "check_table alone": (
        {"block_table": None, "check_table": True},
            "check_table must be False without a block_table, got True",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_is_refused_before_anything_runs(name, monkeypatch):
    change, message = BAD[name]
    change = dict(change)
    q, k, v = inputs("float16", 2, 2, 2, 4, 50, 32)
    k_pages, v_pages, table = cache_of(k, v, [50, 33], 16, unused=0, more=0)
    for place, page in change.pop("table", {}).items():
        table[place] = page
    table = table[: change.pop("rows", 2)].astype(change.pop("dtype", np.int64))
    if "page_size" in change:
        shape = (7, 2, change.pop("page_size"), 32)
        k_pages = v_pages = np.zeros(shape, np.float16)
    monkeypatch.setattr(fa_numba.device, "launch", None)
    options = {"block_table": table, "kv_lens": [50, 33]} | change
    with pytest.raises((ValueError, TypeError), match=message):
        fa_numba.attention(q, k_pages, v_pages, **options)


def test_what_the_table_holds_past_a_sequence_is_not_looked_at():
    q, k, v = inputs("float16", 2, 2, 2, 1, 50, 32)
    k_pages, v_pages, table = cache_of(k, v, [50, 33], 16)
    options = {"kv_lens": [50, 33]}
    want = fa_numba.flash_attention_2(q, k_pages, v_pages, block_table=table, **options)
    table[0, 4:], table[1, 3:] = 10**6, -(10**6)
    O = fa_numba.flash_attention_2(q, k_pages, v_pages, block_table=table.tolist(), **options)
    np.testing.assert_array_equal(O, want)


def test_there_is_no_backward_pass():
    q, k, v = inputs("float16", 1, 2, 2, 4, 50, 32)
    k_pages, v_pages, table = cache_of(k, v, [50], 16)
    options = {"block_table": table, "kv_lens": [50]}
    O, L = fa_numba.flash_attention_2(q, k_pages, v_pages, return_lse=True, **options)
    with pytest.raises(
        ValueError, match="block_table cannot be given to a backward pass; only the"
    ):
        fa_numba.attention_backward(O, q, k_pages, v_pages, O, L, **options)


def test_a_plan_without_lengths_counts_whole_pages():
    shapes = (2, 4, 1, 64), (20, 2, 16, 64)
    plan = fa_numba.plan(*shapes, dtype="float16", block_table=(2, 8))
    full = fa_numba.plan(*shapes, dtype="float16", block_table=(2, 8), kv_lens=[128, 128])
    assert plan.accesses == full.accesses and plan.kernels == full.kernels
    assert "page_size=16" in str(plan) and plan.problem.k_shape == shapes[1]
