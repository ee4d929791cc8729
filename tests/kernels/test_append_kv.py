"""Keys and values appended to the pages of a cache; tables and lengths that stay on a GPU."""

import itertools

import numpy as np
import pytest
from stand_in_device import Array, aligned, on_gpu
from test_pages import cache_of, inputs

import fa_numba
from fa_numba import Tiles
from fa_numba.host import append, merging, placement
from fa_numba.host.plans import Launch, LaunchPlan, parameters
from fa_numba.problem import MAX_SEQLEN


def begun(dtype, sizes, lens, new, page_size):
    """Pages that lack the last ``new`` rows of each sequence, beside those that have them all."""
    _, k, v = inputs(dtype, *sizes)
    whole = cache_of(k, v, lens, page_size)
    before = [n - m for n, m in zip(lens, new, strict=True)]
    pages = [x.copy() for x in whole[:2]]
    rows = max(new)
    added = [np.full((*k.shape[:2], rows, k.shape[3]), np.nan, k.dtype) for _ in range(2)]
    for b, (begin, end) in enumerate(zip(before, lens, strict=True)):
        for side, x, each in zip(added, (k, v), pages, strict=True):
            side[b, :, : end - begin] = x[b, :, begin:end]
            for at in range(begin, end):
                each[whole[2][b, at // page_size], :, at % page_size] = np.nan
    return whole, pages, added, before


CASES = [
    # dtype, d, page size, lengths after, new rows
    ("float16", 64, 16, (50, 33), (1, 1)),
    ("float16", 20, 48, (50, 33), (50, 7)),
    ("bfloat16", 32, 32, (40, 33), (17, 17)),
    ("float32", 8, 16, (50, 16), (20, 0)),
    ("float32", 3, 16, (50, 33), (2, 2)),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]}-d{c[1]}-page{c[2]}")
def test_rows_appended_are_those_of_the_whole_cache(case):
    dtype, d, page_size, lens, new = case
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    whole, pages, added, before = begun(dtype, (2, 2, 2, 1, 50, d), lens, new, page_size)
    pad = 3 * [(0, 0)] + [(0, -d % 4)]  # all rows start at 16-byte addresses
    pages, added = ([np.pad(x, pad)[..., :d] for x in side] for side in (pages, added))
    ragged = {} if len(set(new)) == 1 else {"new_lens": new}
    with fa_numba.count_accesses() as counts:
        assert fa_numba.append_kv(*pages, *added, whole[2], before, **ragged) is None
    for found, want in zip(pages, whole, strict=False):
        assert found.tobytes() == want.tobytes()
    elements = 2 * sum(new) * d
    moved = dict.fromkeys(("newK", "newV"), elements), dict.fromkeys("KV", elements)
    assert (dict(counts.loads), dict(counts.stores)) == moved


def test_appending_and_attending_step_by_step_is_one_causal_call():
    """A prompt of 19 rows, then a row at a time: the same bits as all rows of Q at once."""
    q, k, v = inputs("float16", 2, 4, 2, 24, 24, 32)
    tiles = {"tiles": Tiles(16, 16)}
    want = fa_numba.flash_attention_2(q, k, v, causal=True, **tiles)
    pages = np.full((2, 5, 2, 16, 32), np.nan, np.float16)
    table = np.array([[3, 1], [0, 4]])
    for begin, end in ((0, 19), *((n, n + 1) for n in range(19, 24))):
        new = slice(begin, end)
        fa_numba.append_kv(*pages, k[:, :, new], v[:, :, new], table, [begin] * 2)
        options = {"block_table": table, "kv_lens": [end] * 2, "causal": True}
        O = fa_numba.flash_attention_2(q[:, :, new], *pages, **options, **tiles)
        np.testing.assert_array_equal(O, want[:, :, new])
    assert np.isnan(pages[:, 2].astype(np.float32)).all()


def test_more_rows_than_16_bits_count():
    """New ones, and those of the sequence behind them."""
    new, begin = 2**16 + 24, 40
    k = np.arange(1, new + 1, dtype=np.float32).reshape(1, 1, new, 1)
    k_pages, v_pages = np.zeros((2, 258, 1, 256, 1), np.float32)
    table = np.arange(258)[None, ::-1]
    fa_numba.append_kv(k_pages, v_pages, k, -k, table, [begin])
    rows = k_pages[table[0]].reshape(-1)
    assert (rows[begin : begin + new] == k.reshape(-1)).all()
    assert np.count_nonzero(rows) == new and (v_pages == -k_pages).all()


def test_rows_are_appended_in_the_other_layout():
    whole, pages, added, before = begun("float16", (2, 2, 2, 1, 50, 32), (50, 33), (3, 3), 16)
    turned = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in (*pages, *added)]
    fa_numba.append_kv(*turned, whole[2], before, layout="bnhd")
    np.testing.assert_array_equal(turned[0].swapaxes(1, 2), whole[0])


REFUSED = {
    "more rows than pages": ({"kv_lens": [62, 3]},
        r"kv_lens plus the number of new rows must be .*got 62 \+ 3 for batch entry 0"),
    "a page there is not": ({"table": {(1, 0): 9}},
        r"block_table\[1, 0\] must be the number of a page of k_pages, from 0 to 6, .*got 9"),
    "a page of two sequences": ({"table": {(1, 0): 1}},
        r"a page into which .*page 1 is at block_table\[0, \d\] and at block_table\[1, 0\]"),
    "a page twice": (
        {"table": {(1, 1): 0}, "kv_lens": [0, 14]},
        r"a page into which new rows are .*page 0 is at block_table\[1, 0\] and at .*\[1, 1\]",
    ),
    "a page with older rows": (
        {"table": {(1, 2): 0}, "kv_lens": [0, 32]},
        r"a page into which new rows are .*page 0 is at block_table\[1, 0\] and at .*\[1, 2\]",
    ),
    "too many new rows": (
        {"new_lens": [4, 1]},
            r"new_lens must contain integers from 0 to 3 \(the rows of k_new\), got 4",
    ),
    "negative lengths": ({"kv_lens": [-1, 0]},
        r"kv_lens must contain integers from 0 to 64 \(4 pages of 16 rows in .*got -1"),
    "no lengths": ({"kv_lens": None},
        r"block_table needs kv_lens, integers of shape \(batch,\): the number of keys"),
    "no table": ({"block_table": None},
        r"block_table must be an array of integers of shape \(batch, pages .*got None"),
    "another layout's": ({"layout": "bhdn"},
        r"layout must be 'bhnd' for \(batch, heads, seqlen, head_dim\) or .*got 'bhdn'"),
    "v_new of another shape": ({"v_new": (2, 2, 4, 32)},
        r"v_new must have shape \(2, 2, 3, 32\), got \(2, 2, 4, 32\)"),
    "other v_pages": ({"v_pages": np.zeros((6, 2, 16, 32), "f2")},
        r"v_pages must have shape \(7, 2, 16, 32\), got \(6, 2, 16, 32\)"),
    "another dtype": ({"v_pages": np.zeros((7, 2, 16, 32), "f4")},
        r"v_pages must have the dtype of k_pages \(float16\), got float32"),
    "k_new of other heads": ({"k_new": (2, 1, 3, 32)},
        r"k_new must have heads=2 like k_pages .*got heads=1 \(shape \(2, 1, 3, 32\)\)"),
    "check_table of 1": ({"check_table": 1}, "check_table must be True or False, got 1"),
    "too many heads": (
        {n: np.zeros((2, 2**16, 16, 1), "f2") for n in ("k_pages", "v_pages", "k_new", "v_new")},
        r"heads of k_new must be at most 65535 \(the limit of a CUDA grid\), got 65536",
    ),
    "a stream": ({"stream": 5},
        r"stream must be None on the emulator \(it has no streams\), got 5"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_before_anything_is_written(name):
    change, message = REFUSED[name]
    given = {"k_pages": np.zeros((7, 2, 16, 32), np.float16)}
    given["v_pages"] = given["k_pages"].copy()
    given |= {n: np.ones((2, 2, 3, 32), np.float16) for n in ("k_new", "v_new")}
    table = np.array([[1, 2, 3, 4], [0, 5, 6, 6]])
    given |= {"block_table": table, "kv_lens": [0, 0]}
    for n, value in change.items():
        if n == "table":
            for place, page in value.items():
                table[place] = page
        else:
            given[n] = np.ones(value, np.float16) if isinstance(value, tuple) else value
    with pytest.raises((ValueError, TypeError), match=message):
        fa_numba.append_kv(**given)
    assert not given["k_pages"].any() and not given["v_pages"].any()


def test_pages_that_cannot_be_written_are_refused():
    pages = np.zeros((2, 1, 16, 8), np.float32)
    new, rest = np.ones((1, 1, 1, 8), np.float32), ([[0]], [3])
    pages.flags.writeable = False
    with pytest.raises(ValueError, match="k_pages must be writable, got a read-only NumPy array"):
        fa_numba.append_kv(pages, pages, new, new, *rest)
    pages = np.zeros((2, 1, 16, 8), np.float32)
    with pytest.raises(ValueError, match="v_pages must not share memory with k_new"):
        fa_numba.append_kv(pages.copy(), pages, pages[:1, :, :1], new, *rest)
    with pytest.raises(
        ValueError, match="v_pages must not share memory with k_pages; pass an array"
    ):
        fa_numba.append_kv(pages, pages, new, new, *rest)
    with pytest.raises(ValueError, match="v_pages must not share memory with k_pages"):
        fa_numba.append_kv(pages[:1], pages[:1, :, ::-1], new, new, *rest)
    assert not pages.any()


# --- integers on a GPU -------------------------------------------------------------------------


def test_a_kept_call_takes_the_table_and_lengths_that_are_there_then(gpu, kept):
    """As a captured graph does: the second call is a replay, over other pages and lengths."""
    how = {"unit": "mma", "kv_splits": 1}
    q, k, v = inputs("float16", 2, 4, 2, 1, 60, 32)
    caches = [
        cache_of(k, v, lens, 16, seed=n, more=0) for n, lens in enumerate(((60, 7), (33, 60)))
    ]
    with fa_numba.device.using("emulator"):
        want = [
            fa_numba.flash_attention_2(q, *c[:2], block_table=c[2], kv_lens=lens, **how)
            for c, lens in zip(caches, ((60, 7), (33, 60)), strict=True)
        ]
    rows = max(len(c[0]) for c in caches)
    pages = [on_gpu(np.zeros((rows, 2, 16, 32), np.float16)) for _ in range(2)]
    table, lens = on_gpu(np.zeros((2, 4), np.int32)), on_gpu(np.zeros(2, np.int32))
    given = on_gpu(q)
    for n, now in enumerate(((60, 7), (33, 60))):
        for side, x in zip(pages, caches[n], strict=False):
            side.values[: len(x)] = x
        table.values[...], lens.values[...] = caches[n][2], now
        O = fa_numba.flash_attention_2(given, *pages, block_table=table, kv_lens=lens, **how)
        np.testing.assert_array_equal(O.values, want[n])
    assert len(kept) == 1


def test_host_arrays_go_to_the_gpu_and_what_is_written_comes_back(gpu, kept):
    whole, pages, added, before = begun("float16", (2, 2, 2, 1, 50, 32), (50, 33), (3, 3), 16)
    stays = [x.copy() for x in added]
    assert fa_numba.append_kv(*pages, *added, whole[2], before) is None
    for found, want in zip((*pages, *added), (*whole[:2], *stays), strict=True):
        assert found.tobytes() == want.tobytes()
    x, y = (np.full((1, 2, 5, 8), n, np.float32) for n in (1.0, 2.0))
    x_lse, y_lse, lse = (np.zeros((1, 2, 5), np.float32) for _ in range(3))
    merging.merge(x, x_lse, y, y_lse, lse)
    np.testing.assert_allclose(x, 1.5, rtol=1e-6)
    np.testing.assert_allclose(lse, np.log(2.0), rtol=1e-6)
    merging.add(x, y)
    np.testing.assert_allclose(x, 3.5, rtol=1e-6)
    assert (y == 2.0).all() and not x_lse.any() and not kept


def test_what_is_no_attention_is_a_plan_too():
    plans = (
        append.plan_of_append("float16", (2, 3, 40, 64, 64), 16, True, False),
        merging.plan_of_merge_in_place((2, 3, 40, 64), ("float32", "float16"), True, True),
        merging.plan_of_merge_in_place((2, 3, 40, 64), ("float16", "float16"), False, False),
    )
    said = [(k.name, k.grid) for plan in plans for k in plan.kernels]
    assert said == [
        ("append_kv", (3, 3, 2)),  # 40 rows of 8 pieces, 128 threads
        ("merge_parts", (3, 3, 2)),
        ("add_parts", (20, 3, 2)),
    ]
    for plan in plans:
        (launch,) = plan.launches
        assert tuple(launch.arguments) == parameters(launch.kernel)
        assert set(plan.updated) & set(launch.arguments.values())
        assert plan.workspace_bytes == 0 and plan.outputs == ()
    # Nobody reads how many rows are new where all sequences have all of them.
    assert plans[0].launches[0].arguments["new_lens"] == "kv_lens"


def apart(x):
    """The same rows, each 8 bytes longer."""
    wide = aligned((*x.shape[:-1], x.shape[-1] + 8 // x.itemsize), x.dtype)[..., : x.shape[-1]]
    wide[...] = x
    return Array(wide)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_one_array_askew_is_enough_for_the_other_kernel(gpu, kept, dtype):
    """Whichever it is, in calls that are kept behind one whose rows start at 16-byte addresses."""
    whole, pages, added, before = begun(dtype, (2, 2, 2, 1, 20, 16), (20, 18), (3, 1), 16)
    integers = {"block_table": whole[2], "kv_lens": before, "new_lens": (3, 1)}
    integers = {name: on_gpu(np.array(x, np.int32)) for name, x in integers.items()}
    moved = [lambda x: Array(aligned(x.shape, x.dtype, x, offset=8)), apart]
    cases = [(on_gpu, 0), *itertools.product(moved, range(4))]
    for make, place in 2 * cases:
        given = [(make if n == place else on_gpu)(x) for n, x in enumerate((*pages, *added))]
        fa_numba.append_kv(*given, **integers)
        for found, want in zip(given, whole[:2], strict=False):
            assert found.values.tobytes() == want.tobytes()
    assert len(kept) == len(cases)


def test_a_kept_append_writes_where_the_table_says_then(gpu, kept):
    pages = [on_gpu(np.zeros((4, 1, 16, 8), np.float32)) for _ in range(2)]
    new = [on_gpu(np.full((1, 1, 1, 8), x, np.float32)) for x in (1.0, 2.0)]
    table, lens = on_gpu(np.array([[3, 1]], np.int32)), on_gpu(np.array([15], np.int32))
    for at in (15, 16):
        lens.values[...] = at
        assert fa_numba.append_kv(*pages, *new, table, lens) is None
    fa_numba.append_kv(*pages, *new, [[3, 1]], [16], new_lens=on_gpu(np.array([1], np.int32)))
    for side, x in zip(pages, (1.0, 2.0), strict=True):
        assert (side.values[3, 0, 15] == x).all() and (side.values[1, 0, 0] == x).all()
        assert side.values.sum() == 16 * x
    assert len(kept) == 1


def test_a_kept_append_is_checked_where_its_arrays_may_share_memory(gpu, kept):
    new = [on_gpu(np.full((1, 1, 1, 8), x, np.float32)) for x in (1.0, 2.0)]
    rest = on_gpu(np.array([[3, 1]], np.int32)), on_gpu(np.array([15], np.int32))
    calls = []
    for _ in range(2):  # K's and V's pages in turn: the second call is a replay
        pages = on_gpu(np.zeros((4, 2, 1, 16, 8), np.float32)).values
        sides = [Array(pages[:, n]) for n in (0, 1)]
        fa_numba.append_kv(*sides, *new, *rest)
        assert [pages[3, n, 0, 15].mean() for n in (0, 1)] == [1.0, 2.0]
        calls += kept.values()
    assert len(calls) == 2 and calls[0] is calls[1]
    with pytest.raises(ValueError, match="v_pages must not share memory with k_pages"):
        fa_numba.append_kv(sides[0], sides[0], *new, *rest)


def test_integers_on_a_gpu_are_read_when_they_are_to_be_checked(gpu, kept):
    """By each call: one that was right is no promise of the next."""
    q, k, v = inputs("float16", 1, 2, 2, 1, 40, 32)
    k_pages, v_pages, table = cache_of(k, v, (40,), 16, unused=0)
    pages, q = [on_gpu(x) for x in (k_pages, v_pages)], on_gpu(q)
    new = [on_gpu(np.ones((1, 2, 1, 32), np.float16))] * 2
    integers = {"block_table": on_gpu(table), "kv_lens": on_gpu(np.array([40], np.int32))}
    integers["check_table"] = True
    fa_numba.flash_attention_2(q, *pages, **integers)
    fa_numba.append_kv(*pages, *new, **integers)
    integers["block_table"].values[0, 1] = 5
    with pytest.raises(
        ValueError,
        match=r"block_table\[0, 1\] must be the number of a page of k.*got 5",
    ):
        fa_numba.flash_attention_2(q, *pages, **integers)
    more = integers | {"new_lens": on_gpu(np.array([3], np.int32))}
    with pytest.raises(ValueError, match=r"new_lens .*from 0 to 1 \(the rows of k_new\), got 3"):
        fa_numba.append_kv(*pages, *new, **more)
    integers["kv_lens"].values[0] = 64
    with pytest.raises(ValueError, match=r"kv_lens plus .*got 64 \+ 1 for batch entry"):
        fa_numba.append_kv(*pages, *new, **integers)
    assert not kept


def test_integers_on_a_gpu_have_a_dtype_and_a_shape(gpu):
    q, k, v = inputs("float16", 1, 2, 2, 1, 40, 32)
    pages = [on_gpu(np.zeros((3, 2, 16, 32), np.float16)) for _ in range(2)]
    new = [on_gpu(x[:, :, :1]) for x in (k, v)]
    for name, wrong, message in (
        ("block_table", np.zeros((1, 3), np.int64), "block_table must be int32, got int64"),
        ("kv_lens", np.zeros(1, np.int64), "kv_lens must be int32, got int64"),
        (
            "kv_lens",
            np.zeros(2, np.int32),
            r"kv_lens must have shape \(1,\) \(one value per batch .*got \(2,\)",
        ),
    ):
        given = {"block_table": np.zeros((1, 3), np.int32), "kv_lens": np.zeros(1, np.int32)}
        given = {n: on_gpu(x) for n, x in (given | {name: wrong}).items()}
        with pytest.raises((TypeError, ValueError), match=message):
            fa_numba.flash_attention_2(on_gpu(q), *pages, **given)
        with pytest.raises((TypeError, ValueError), match=message):
            fa_numba.append_kv(*pages, *new, **given)


def test_threads_that_32_bits_do_not_count_are_refused(monkeypatch):
    monkeypatch.setattr(placement.device, "on_gpu", lambda: True)

    def plan(blocks):
        kernel = append.plan_of_append("float16", (1, 1, 1, 8, 8), 16, True, False).launched[0]
        return LaunchPlan(launches=(Launch(kernel, (blocks, 1, 1), {}),))

    placement.check_grid(plan(2**25), "k_new")
    with pytest.raises(
        ValueError, match=r"over k_new can have at most 2\*\*32 threads .*would need 4294967424"
    ):
        placement.check_grid(plan(2**25 + 1), "k_new")


@pytest.mark.parametrize(
    "new, most, name", [(MAX_SEQLEN + 1, 16, "k_new"), (1, 2**31, "block_table")]
)
def test_more_rows_than_32_bits_count(new, most, name):
    append.check_rows(MAX_SEQLEN, MAX_SEQLEN)
    with pytest.raises(ValueError, match=f"{name}.* must have at most {MAX_SEQLEN} rows, got"):
        append.check_rows(new, most)


def test_the_rows_of_all_pages_of_a_sequence_are_counted(monkeypatch):
    """Of four pages of 16 rows, 64, whichever of them are used."""
    _, pages, added, before = begun("float32", (1, 1, 1, 1, 20, 4), (20,), (3,), 16)
    table = np.arange(4, dtype=np.int32)[None] % len(pages[0])
    monkeypatch.setattr(append, "MAX_SEQLEN", 64)
    fa_numba.append_kv(*pages, *added, table, before)
    monkeypatch.setattr(append, "MAX_SEQLEN", 63)
    with pytest.raises(ValueError, match="block_table lists .* must have at most 63 rows, got 64"):
        fa_numba.append_kv(*pages, *added, table, before)
