"""Parts of kernels at the bounds of their words, sums and loops, which small calls never reach.

A thread computes each case: the values are far from what a call on the emulator could have.
"""

from collections import namedtuple
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from numba import cuda

import fa_numba
from fa_numba import Tiles
from fa_numba import device as devices
from fa_numba import parts as all_parts
from fa_numba.checks import MAX_KV_SPLITS, UNBOUNDED
from fa_numba.device import float32, uint32
from fa_numba.dropout import kept
from fa_numba.emulator import launch
from fa_numba.host import blocks as host_blocks
from fa_numba.integers import ceil_div
from fa_numba.kernels import planes, sink_gradients
from fa_numba.kernels.simt import blocks as block_kernels
from fa_numba.options import PLAIN
from fa_numba.parts import bind, visits
from fa_numba.parts import dropout as dropout_parts
from fa_numba.parts.dropout import keeps
from fa_numba.parts.layout import make_column, make_row
from fa_numba.parts.records import Head, Schedule, Slot, Tile, WorkTile
from fa_numba.parts.wgmma import listed, scheduler
from fa_numba.problem import MAX_LISTED, MAX_SEQLEN
from fa_numba.tiling.mma import select_mma_spec
from fa_numba.tiling.simt import splits
from fa_numba.tiling.wgmma import WORK_WORDS


class Facts(SimpleNamespace):
    """What a part looks at of a spec."""

    __hash__ = object.__hash__


def facts(**own):
    known = {"Br": 16, "Bc": 16, "head_rows": 16, "block_columns": 16, "single_head": True}
    return Facts(**{**known, "features": PLAIN, "tile_heads": 1, **own})


def options_of(**fields):
    return namedtuple("Options", fields)(**fields)


# --- words --------------------------------------------------------------------------------------

SPARSE = replace(PLAIN, sparse=True)
# A list of two column tiles for each row tile: the row tile visits both, the first, the second.
NEXT_COLUMN = np.int32([[[[0, 1, 2], [0, 2, 2], [1, 1, 2]]]])
ROWS = [0, 16, 1 << 11, 2304, 1 << 20, (1 << 27) + 16, MAX_LISTED + 1023 & -16]


def test_the_word_of_a_visit_holds_every_row_and_two_flags():
    """A row needs all bits below STARTS: one bit fewer, and FA-1's loop over rows does not end."""
    spec = facts(features=SPARSE)
    visit_ahead, starts = visits.make_visit_ahead(spec), visits.make_row_starts(spec)
    next_by, more_by = visits.next_by, visits.more_by
    given, out = options_of(next_column=NEXT_COLUMN), np.zeros((4, 6, len(ROWS)), np.uint32)

    def kernel(out, rows, options):
        n = cuda.threadIdx.x
        head = Head(uint32(0), uint32(0), uint32(0), uint32(48), uint32(32), options)
        for case in range(6):
            i0, j0 = uint32(case // 2 * 16), uint32(case % 2 * 16)
            word = visit_ahead(uint32(rows[n]), i0, j0, head)
            out[0, case, n] = word
            out[1, case, n] = next_by(word)
            out[2, case, n] = more_by(word)
            out[3, case, n] = starts(word, j0)

    launch(kernel, 1, len(ROWS), out, np.uint32(ROWS), given)
    words, rows, more, first = out
    assert np.array_equal(rows, np.broadcast_to(np.uint32(ROWS), rows.shape))
    assert more[:, 0].tolist() == [1, 0, 0, 0, 1, 0]  # whether a column tile follows
    assert first[:, 0].tolist() == [1, 0, 1, 0, 0, 1]  # whether it is the row tile's first
    assert (more == more[:, :1]).all() and (first == first[:, :1]).all()
    assert words.max() < 1 << listed.STATE_AT  # the state of a block is above


@pytest.mark.parametrize("state", [0, 1, 2])
def test_the_word_of_a_slot_holds_what_follows_and_the_state_of_a_block(state):
    spec = facts(reads_state=True)
    word, read = listed.make_word(spec), listed.make_read_word(spec)
    following = [*ROWS, (1 << 30) - 1]
    out, words = np.zeros((2, len(following)), np.float64), np.zeros(len(following), np.uint32)
    given = options_of(block_mask=np.uint8([[[[state]]]]))

    def kernel(out, words, following, options):
        rBS, n = cuda.local.array(1, float32), cuda.threadIdx.x
        head = Head(uint32(0), uint32(0), uint32(0), uint32(48), uint32(32), options)
        words[n] = word(uint32(following[n]), Tile(uint32(0), uint32(0), head, uint32(0)))
        out[1, n] = read(rBS, words, n)
        out[0, n] = rBS[0]

    launch(kernel, 1, len(following), out, words, np.uint32(following), given)
    assert out[0].tolist() == [state] * len(following) and out[1].tolist() == following


def test_the_word_of_a_work_tile_holds_every_batch_entry_and_split():
    """The grid's limit is 65,535 batch entries, and there are at most 256 splits."""
    spec = facts(features=replace(PLAIN, splits=True))
    cases = [(b, split) for b in (0, 255, 256, 300, 65534) for split in (0, 1, MAX_KV_SPLITS - 1)]
    tiles = np.uint32([(MAX_SEQLEN & -64, 65534, b, split) for b, split in cases])
    words, out = np.zeros(WORK_WORDS * len(cases), np.uint32), np.zeros_like(tiles)
    write, read = scheduler._make_write_work_tile(spec), scheduler.make_read_work_tile(spec)

    def kernel(out, words, tiles):
        n = uint32(cuda.threadIdx.x)
        schedule = Schedule(words, uint32(0), words, words, words, uint32(1), words)
        tile = tiles[n]
        write(schedule, Slot(n, uint32(0)), WorkTile(tile[0], tile[1], tile[2], tile[3]))
        work = read(schedule, n)
        out[n, 0] = work.i0
        out[n, 1] = work.h
        out[n, 2] = work.b
        out[n, 3] = work.split

    launch(kernel, 1, len(cases), out, words, tiles)
    assert np.array_equal(out, tiles)


def test_a_draw_of_dropout_has_a_word_for_every_batch_entry_and_head():
    """The reference draws in NumPy. Rows beyond 2^16 have draws of their own."""
    entries = [(0, 1), (1, 0), (255, 256), (300, 65535), (65535, 300), (65535, 65535)]
    rows, columns = [0, 70_001, MAX_SEQLEN - 1], 32
    seed, offset = (1 << 63) + (1 << 31) + 5, (1 << 32) - 2
    words = {
        "seed_low": 5 - (1 << 31),
        "seed_high": -(1 << 31),
        "offset": -2,
        "threshold": -(1 << 31),
    }
    given, out = options_of(**words), np.zeros((len(entries), len(rows), columns), bool)

    def kernel(out, entries, rows, options):
        col, n, r = uint32(cuda.threadIdx.x), cuda.blockIdx.x, cuda.blockIdx.y
        b, h = uint32(entries[n, 0]), uint32(entries[n, 1])
        head = Head(b, h, h, uint32(0), uint32(0), options)
        out[n, r, col] = keeps(uint32(rows[r]), col, head)

    launch(kernel, out.shape[:2], columns, out, np.int32(entries), np.int64(rows), given)
    how = {"dropout_p": 0.5, "seed": seed, "offset": offset}
    for n, (b, h) in enumerate(entries):
        for r, row in enumerate(rows):
            assert np.array_equal(out[n, r], kept(b, h, range(row, row + 1), columns, **how)[0])
    assert len({x.tobytes() for x in out.reshape(-1, columns)}) == len(entries) * len(rows)


TILES = [("simt", 64, 16), ("simt", 64, 64), ("simt", 32, 32), ("mma", 64, 128)]


@pytest.mark.parametrize("unit, Br, Bc", TILES)
def test_every_element_of_a_large_tile_is_dropped_by_its_own_bit(unit, Br, Bc):
    """A word of 64 bits has those of 8 draws. A narrow tile has half of the columns of a draw."""
    features = replace(PLAIN, dropout=True)
    spec = splits(Br, Bc, 16, features=features)[0]
    if unit == "mma":
        spec = select_mma_spec(Tiles(Br, Bc), 64, 227 * 1024, features=features)
    (grid, parts) = bind(spec, getattr(all_parts, unit).grid, dropout_parts)
    TM, TN, (EI, EJ), RP = spec.TM, spec.TN, spec.element_steps, spec.TM * spec.TN
    row_of, column_of = make_row(spec), make_column(spec)
    i0, j0 = 1 << 20, 41 * Bc
    given = options_of(seed_low=5, seed_high=7, offset=3, threshold=0x4000 << 16)
    out = np.zeros((Br, Bc), np.float32)
    warps = unit == "mma"

    def kernel(out, options):
        rP = cuda.local.array(RP, float32)
        head = Head(uint32(2), uint32(3), uint32(3), uint32(0), uint32(0), options)
        thread = grid.thread()
        if warps:
            thread = thread[1]
        for e in range(RP):
            rP[e] = float32(1.0)
        parts.drop(rP, Tile(uint32(i0), uint32(j0), head, thread))
        for i in range(TM):
            for j in range(TN):
                out[row_of(thread.ty, i), column_of(thread.tx, j)] = rP[i * EI + j * EJ]

    launch(kernel, 1, spec.threads, out, given)
    how = {"dropout_p": 0.25, "seed": 5 + (7 << 32), "offset": 3}
    wanted = kept(2, 3, range(i0, i0 + Br), j0 + Bc, **how)[:, j0:]
    assert np.array_equal(out, np.where(wanted, 1, -1))


# --- sums of 32 bits ------------------------------------------------------------------------------

FAR = UNBOUNDED  # the longest sequences with a window
RANGES = [
    ("plain", MAX_SEQLEN, MAX_SEQLEN, -1, -1),
    ("causal", MAX_SEQLEN, MAX_SEQLEN, -1, -1),
    ("causal", 1, MAX_SEQLEN, -1, -1),
    ("causal", MAX_SEQLEN, 1, -1, -1),
    ("window", FAR, FAR, FAR, FAR),
    ("window", FAR, FAR, 5, 0),
    ("window", 1, FAR, FAR, FAR),
    ("window", FAR, 1, FAR, FAR),
]


@pytest.mark.parametrize("mask, Nq, Nk, left, right", RANGES)
def test_ranges_of_the_longest_sequences_are_those_of_python(mask, Nq, Nk, left, right):
    features = PLAIN if mask == "plain" else replace(PLAIN, **{mask: True})
    spec = facts(features=replace(features, splits=True), takes_late=False)
    column_range, row_range = visits.make_column_range(spec), visits.make_row_range(spec)
    share, is_long = visits.make_share(spec), scheduler.make_is_long(spec)
    rows = [x for x in (0, 16, Nq // 2 & -16, Nq - 1 & -16) if x < Nq]
    columns = [x for x in (0, 16, Nk // 2 & -16, Nk - 1 & -16) if x < Nk]
    given = options_of(window_left=left, window_right=right, kv_splits=MAX_KV_SPLITS)
    out = np.zeros((4, 4, 3), np.uint32)

    def kernel(out, rows, columns, Nq, Nk, options):
        n = cuda.threadIdx.x
        head = Head(uint32(0), uint32(0), uint32(0), uint32(Nq), uint32(Nk), options)
        i0, j0 = uint32(rows[n]), uint32(columns[n])
        out[0, n, 0], out[0, n, 1] = column_range(i0, uint32(i0 + 16), head)
        out[1, n, 0], out[1, n, 1] = row_range(j0, uint32(0), uint32(Nq), head)
        out[2, n, 0], out[2, n, 1] = share(uint32(0), uint32(Nk), uint32(85 * n), options)
        out[3, n, 0] = is_long(j0, uint32(Nk), i0, head)

    threads = min(len(rows), len(columns))
    launch(kernel, 1, threads, out, np.int64(rows), np.int64(columns), Nq, Nk, given)
    diagonal, tiles = Nk - Nq, ceil_div(Nk, 16)
    for n in range(threads):
        i0, j0 = rows[n], columns[n]
        j_first, j_end, i_first, i_end = 0, Nk, 0, Nq
        if mask != "plain":
            shift = right if mask == "window" else 0
            j_end = min(Nk, max(0, i0 + 16 + diagonal + shift))
            i_first = max(0, j0 - diagonal - shift) // 16 * 16
        if mask == "window":
            j_first = max(0, i0 + diagonal - left) // 16 * 16
            i_end = min(Nq, max(0, j0 + 16 - diagonal + left))
        assert out[0, n, :2].tolist() == [j_first, j_end]
        assert out[1, n, :2].tolist() == [i_first, i_end]
        begins = [m * (tiles // 256) + min(m, tiles % 256) for m in (85 * n, 85 * n + 1)]
        wanted = begins[0] * 16, min(Nk, begins[1] * 16)
        assert tuple(out[2, n, :2]) == (wanted if wanted[0] < Nk else (wanted[0], Nk))
        assert not out[3, n, 0]  # without late work tiles it is never too early


@pytest.mark.parametrize("batch, heads, Nk", [(300, 2, 64), (300, 2, 20_000), (2, 70, 70_000)])
def test_every_row_tile_of_a_large_batch_is_taken_once(batch, heads, Nk):
    """As many heads as fit the L2 cache go together, of 20,000 columns 3 and of 70,000 one."""
    spec = facts(head_rows=64, head_dim=64, d_v=64)
    row_tile, rows = scheduler._make_row_tile(spec), 150
    out = np.zeros((3, 3 * heads * batch), np.uint32)

    def kernel(out, q_shape, k_shape, options):
        n = uint32(cuda.blockIdx.x * 32 + cuda.threadIdx.x)
        if n < out.shape[1]:
            out[0, n], out[1, n], out[2, n] = row_tile(n, q_shape, k_shape, options)

    shapes = (batch, heads, rows, 64), (batch, heads, Nk, 64)
    launch(kernel, ceil_div(out.shape[1], 32), 32, out, *shapes, options_of(nothing=0))
    wanted = {(64 * i, h, b) for i in range(3) for h in range(heads) for b in range(batch)}
    assert set(map(tuple, out.T.tolist())) == wanted and len(wanted) == out.shape[1]


def test_the_sequence_of_a_tile_is_found_among_many():
    """By halves: nine steps among 300 sequences, some of them empty."""
    lengths = np.random.default_rng(0).integers(0, 200, 300)
    starts = np.concatenate(([0], np.cumsum(lengths)))
    of_tile, tiles = scheduler.sequence_tile_of(64), int(starts[-1]) // 64 + 300
    out, given = np.zeros((2, tiles), np.uint32), options_of(q_starts=np.int32(starts))

    def kernel(out, options):
        n = uint32(cuda.blockIdx.x * 32 + cuda.threadIdx.x)
        if n < out.shape[1]:
            out[0, n], out[1, n] = of_tile(n, options)

    launch(kernel, ceil_div(tiles, 32), 32, out, given)
    first = starts[:-1] // 64 + np.arange(300)  # the first tile of each sequence
    sequence = np.searchsorted(first, np.arange(tiles), "right") - 1
    assert np.array_equal(out[1], sequence)
    assert np.array_equal(out[0], 64 * (np.arange(tiles) - first[sequence]))


# --- sums and maxima over many threads ------------------------------------------------------------


def run(kernel, grid, *arrays, **options):
    """Launch a kernel; its options have these values."""
    (*_, last) = kernel.argument_types
    with devices.using("emulator"):
        devices.launch(kernel, grid, (*arrays, last.instance_class(**options)))


def test_the_largest_element_is_found_in_every_row():
    """A head has 128 partial maxima, four for each lane; from row 512 on warps take rows again."""
    rows, N, d = [0, 3, 127, 128, 255, 300, 511, 512, 519, 1027], 1028, 2
    X = np.full((len(rows), 1, N, d), 2.0**-9, np.float32)
    for b, row in enumerate(rows):
        X[b, 0, row, row % d] = -(2.0**9)
    of = planes.PlaneFacts(PLAIN, d, 8, "fp16x3", False, False)
    M = np.full((len(rows), 1, planes.WARPS_OF_HEAD), np.nan, np.float32)
    halves, power = np.zeros((len(rows), 1, N, 16), np.uint16), np.zeros((len(rows), 1), np.float32)
    blocks = planes.WARPS_OF_HEAD // planes.WARPS
    run(planes.make_largest(of), (blocks, 1, len(rows)), X, M)
    assert M.max(2).ravel().tolist() == [2.0**9] * len(rows)
    run(planes.make_split_rows(of), (1, 1, len(rows)), X, M, halves, power)
    assert len(set(power.ravel().tolist())) == 1


@pytest.mark.parametrize("count", [1, 8, 9, 32, 33, 64, 255, MAX_KV_SPLITS])
def test_all_splits_of_a_row_are_merged(count):
    """Eight warps of 32 lanes read l and m of 256 splits; one warp reads few splits."""
    plan = fa_numba.plan((1, 1, 1, 4), (1, 1, 4096, 4), kv_splits=max(2, count), unit="simt")
    merge = plan.launches[-1]
    draw = np.random.default_rng(count)
    A = draw.standard_normal((count, 1, 1, 1, 4)).astype(np.float32)
    l, m = draw.uniform(1, 2, (count, 1, 1, 1)), draw.uniform(-3, 3, (count, 1, 1, 1))
    O, L = np.zeros((1, 1, 1, 4), np.float32), np.zeros((1, 1, 1), np.float32)
    run(merge.kernel, merge.grid, A, np.float32(l), np.float32(m), O, L)
    weight = 2.0 ** (m - m.max())
    wanted = (weight[..., None] * A).sum(0) / (weight * l).sum()
    np.testing.assert_allclose(O, wanted, rtol=2e-5, atol=1e-6)


def test_sinks_sum_all_rows_of_all_batch_entries():
    """512 threads take a head: of 1,030 rows some take three."""
    B, H, N = 3, 2, 1030
    draw = np.random.default_rng(0)
    L, D = (draw.standard_normal((B, H, N)).astype(np.float32) for _ in range(2))
    sinks, dsinks = np.float32([0.5, -0.5]), np.full(H, np.nan, np.float32)
    kernel = sink_gradients.make_sink_gradients(replace(PLAIN, sinks=True))
    run(kernel, (H, 1, 1), L, D, dsinks, sinks=sinks)
    wanted = -(np.exp(sinks[:, None] - L) * D).sum((0, 2), dtype=np.float64)
    np.testing.assert_allclose(dsinks, wanted, rtol=1e-4)


def test_lists_of_more_blocks_than_a_thread_block_has_threads():
    """32 threads list: 70 rows of blocks take three thread blocks."""
    states = np.random.default_rng(0).integers(0, 3, (1, 1, 70, 40)).astype(np.uint8)
    states[0, 0, 5:60, 3] = 0
    found = [np.zeros(shape, np.int32) for shape in ((1, 1, 70, 41), (1, 1, 40, 71))]
    kernel = block_kernels.make_lists()
    with devices.using("emulator"):
        devices.launch(kernel, (ceil_div(70, block_kernels.LISTING), 1, 1), (states, *found))
    wanted = host_blocks.listed(states)
    assert np.array_equal(found[0], wanted["next_column"])
    assert np.array_equal(found[1], wanted["next_row"])
