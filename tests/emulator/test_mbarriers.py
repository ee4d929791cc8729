"""Barriers that count arrivals and bytes, and boxes that the copy engine moves, on the emulator:
values, counts, and a planted fault for each thing that is checked.
"""

import contextlib
import re

import numpy as np
import pytest

from fa_numba import emulator
from fa_numba.device import WRAPS, TiledArray, cuda, device_function, float32, uint32
from fa_numba.emulator import (
    BarrierMisuse,
    Boxed,
    Deadlock,
    EmulatorError,
    GlobalHazard,
    Misaligned,
    MissingFence,
    OutOfBounds,
    ReadOnlyStore,
    SharedHazard,
    UninitialisedRead,
)
from fa_numba.emulator.groups import READY
from fa_numba.intrinsics.bulk_copy import (
    add_bulk,
    commit_boxes,
    fence_async_proxy,
    load_box,
    load_box_5d,
    store_box,
    store_box_5d,
    wait_boxes,
    wait_boxes_read,
)
from fa_numba.intrinsics.mbarrier import (
    arrive_mbarrier,
    expect_bytes,
    fence_mbarrier_init,
    init_mbarrier,
    mbarrier_tile,
    wait_mbarrier,
)
from fa_numba.intrinsics.shared import half_tile, shared_tile

SHARED = 160 << 10
BARRIERS = 20000  # in 8 bytes, behind the tiles
COLUMNS = 64


def bits(*shape, seed=0):
    """Any 16 bits."""
    return np.random.default_rng(seed).integers(1, 1 << 16, shape, np.uint16)


def launch(kernel, threads, *args, grid=1):
    return emulator.launch(kernel, grid, threads, *args, shared_bytes=SHARED)


def caught(error, kernel, threads, *args):
    with pytest.raises(EmulatorError) as found:
        launch(kernel, threads, *args)
    assert type(found.value) in (error if isinstance(error, tuple) else (error,)), found.value
    return found.value


@device_function
def begin(bars, first, second=0):
    """Thread 0 initialises a barrier of so many arrivals, or two, for the whole block."""
    if cuda.threadIdx.x == 0:
        init_mbarrier(bars, 0, first)
        if second:
            init_mbarrier(bars, 1, second)
        fence_mbarrier_init()
    cuda.syncthreads()


def test_warpgroups_run_apart_from_the_first_mbarrier_on(monkeypatch):
    """The first thread block of the first launch is restarted before it has stored anything.

    Its warpgroups are then divided into groups. A later launch of the same code divides them from
    the beginning. Thread blocks run one at a time, and each thread block uses the groups of the
    previous thread block again.
    """

    def made():
        def kernel(out):
            bars = mbarrier_tile(BARRIERS, 8)
            begin(bars, 128)
            t = cuda.threadIdx.x
            out[cuda.blockIdx.x, t] = 1.0
            if t < 128:
                wait_mbarrier(bars, 0, uint32(0))
            else:
                arrive_mbarrier(bars, 0)

        return kernel

    part, together = emulator.run.Launch._part, emulator.run.Launch._run_together
    divided = emulator.run.Launch._divided
    stored, tried, groups = [], [], []

    def noted_part(self, *args):
        stored.append(len(self.journal))
        part(self, *args)

    def noted_together(self, *args):
        tried.append(args)
        return together(self, *args)

    def noted_groups(self, *args):
        found = divided(self, *args)
        assert all(group.state == READY and group.run is None for group in found)
        groups.extend(found)
        return found

    monkeypatch.setattr(emulator.run.Launch, "_part", noted_part)
    monkeypatch.setattr(emulator.run.Launch, "_divided", noted_groups)
    monkeypatch.setattr(emulator.run.Launch, "_run_together", noted_together)
    for _ in range(2):
        out = np.zeros((2, 256), np.float32)
        counts = launch(made(), 256, out, grid=2)
        assert out.all() and counts.stores["out"] == out.size
        assert stored == [0] and tried == [(1, 2)]
        assert groups[0] is groups[2] and groups[1] is groups[3] and len(groups) == 4
        groups.clear()


# --- phases ----------------------------------------------------------------------------------


def _ring(X, Y, stages, wrong):
    """Warp 0 puts rows of X into `stages` places in turn; each of warps 1 and 2 takes them all."""
    tile = shared_tile(0, 128)
    bars = mbarrier_tile(BARRIERS, 8)
    t = cuda.threadIdx.x
    lane, warp = t % 32, t // 32
    if t == 0:
        for s in range(stages):
            if wrong != "no init":
                init_mbarrier(bars, s, 32)
            init_mbarrier(bars, stages + s, 32 if wrong == "too few" else 64)
            if wrong == "twice":
                init_mbarrier(bars, s, 32)
        if wrong != "no fence":
            fence_mbarrier_init()
    if wrong != "no barrier":
        cuda.syncthreads()
    stage, parity = uint32(0), uint32(0)
    for i in range(X.shape[0]):
        place = uint32(32 * stage + lane)
        if warp == 0:
            if wrong != "no wait" and wrong != "nobody empties":
                wait_mbarrier(bars, uint32(stages + stage), uint32(parity ^ 1))
            if wrong != "early":
                tile[place] = X[i, lane]
            arrive_mbarrier(bars, stage)
            if wrong == "early":
                tile[place] = X[i, lane]
            if wrong == "again":
                arrive_mbarrier(bars, stage)
        else:
            if wrong != "no look":
                wait_mbarrier(bars, stage, uint32(parity ^ 1) if wrong == "parity" else parity)
            if wrong == "read late":
                arrive_mbarrier(bars, uint32(stages + stage))
            Y[warp - 1, i, lane] = tile[uint32(place ^ 1)]
            comes = wrong != "one forgets" or warp == 1 or lane > 0
            comes = comes and wrong != "no release"
            if comes and wrong != "read late" and wrong != "nobody empties":
                arrive_mbarrier(bars, uint32(stages + stage))
        stage = uint32(stage + 1)
        if stage == stages:
            stage, parity = uint32(0), uint32(parity ^ 1)


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_a_ring_of_places(stages):
    x = np.arange(7 * 32, dtype=np.float32).reshape(7, 32)
    wanted = x[:, np.arange(32) ^ 1]
    found = set()
    for seed in range(4):
        y = np.zeros((2, 7, 32), np.float32)
        with emulator.schedule(seed - 1) if seed else contextlib.nullcontext():
            counts = launch(_ring, 96, x, y, stages, "")
        assert (y == wanted).all()
        found.add(str(sorted(counts.instructions.items())))
    assert len(found) == 1


@pytest.mark.parametrize(
    "wrong, error, message",
    [
        ("no init", BarrierMisuse, "bars[0] was not initialised"),
        ("twice", BarrierMisuse, "bars[0] was initialised before"),
        ("no fence", MissingFence, "thread (0, 0, 0), which did not call fence_mbarrier_init()"),
        ("no barrier", BarrierMisuse, "initialised by thread (0, 0, 0), with no barrier between"),
        (
            "too few",
            BarrierMisuse,
            "threads arrive at bars[2], but its phase 0 waits for only 32",
        ),
        ("early", SharedHazard, "no barrier between"),
        ("no look", (SharedHazard, UninitialisedRead), "tile["),
        ("read late", SharedHazard, "no barrier between"),
        ("no wait", (SharedHazard, BarrierMisuse), ""),
        ("again", BarrierMisuse, "but the thread has not waited for the end of phase"),
        (
            "parity",
            BarrierMisuse,
            "waits for the start of phase 0 of bars[0], but",
        ),
        ("one forgets", Deadlock, "bars[2] is in phase 0, which still waits for 1 of 64 arrivals"),
        ("nobody empties", (SharedHazard, BarrierMisuse), ""),
    ],
)
def test_a_ring_that_is_wrong(wrong, error, message):
    x, y = np.zeros((7, 32), np.float32), np.zeros((2, 7, 32), np.float32)
    assert message in str(caught(error, _ring, 96, x, y, 2, wrong))


@pytest.mark.parametrize(
    "wrong, rows, missing, arrived",
    [("no release", 2, "64 of 64", False), ("one forgets", 1, "1 of 64", True)],
)
def test_a_slot_that_is_not_released_before_the_block_ends(wrong, rows, missing, arrived):
    """With as many rows as slots, no thread waits for the release."""
    x, y = np.zeros((rows, 32), np.float32), np.zeros((2, rows, 32), np.float32)
    said = str(caught(BarrierMisuse, _ring, 96, x, y, 2, wrong))
    assert f"the thread block ends, but phase 0 of bars[2] still waits for {missing} arr" in said
    assert "last wait for bars[2]: none" not in said
    if arrived:
        assert "last wait for bars[2]: thread (0, 0, 0), test_mbarriers.py:" in said
        assert "last arrival at bars[2]: thread (" in said and "arrive_mbarrier(bars, " in said
    else:
        assert "last arrival at bars[2]: none" in said


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_the_slot_by_which_a_producer_says_that_it_ends_needs_no_release(rows):
    """The slot is acquired, and its consumers end."""

    def kernel(y, rows):
        words = shared_tile(0, 2)
        bars = mbarrier_tile(BARRIERS, 4)
        t = cuda.threadIdx.x
        begin(bars, 1, 1)
        stage, parity = uint32(0), uint32(0)
        if t == 0:
            init_mbarrier(bars, 2, 1)
            init_mbarrier(bars, 3, 1)
            fence_mbarrier_init()
        cuda.syncthreads()
        if t == 0:
            for i in range(rows + 1):
                wait_mbarrier(bars, uint32(2 + stage), uint32(parity ^ 1))
                words[stage] = float32(i)
                arrive_mbarrier(bars, stage)
                stage = uint32(stage ^ 1)
                parity = uint32(parity ^ (stage == 0))
        elif t == 32:
            more = True
            while more:
                wait_mbarrier(bars, stage, parity)
                i = words[stage]
                more = i < rows
                if more:
                    y[int(i)] = i
                    arrive_mbarrier(bars, uint32(2 + stage))
                stage = uint32(stage ^ 1)
                parity = uint32(parity ^ (stage == 0))

    y = np.full(rows, -1, np.float32)
    launch(kernel, 64, y, rows)
    assert (y == np.arange(rows)).all()


def test_a_phase_that_may_be_over_when_somebody_looks():
    """Thread 0 ends two phases; whether thread 32 sees the first of them is a matter of luck."""

    def kernel(x, ordered):
        bars = mbarrier_tile(BARRIERS, 2)
        t = cuda.threadIdx.x
        begin(bars, 1, 1)
        if t == 0:
            arrive_mbarrier(bars, 0)
            if ordered:
                wait_mbarrier(bars, 1, 0)
            wait_mbarrier(bars, 0, 0)
            arrive_mbarrier(bars, 0)
        if t == 32:
            wait_mbarrier(bars, 0, 0)
            arrive_mbarrier(bars, 1)

    launch(kernel, 64, bits(1), True)
    error = caught(BarrierMisuse, kernel, 64, bits(1), False)
    assert "waits for the end of phase 0 of bars[0], but bars[0] is already in phase 2" in str(
        error
    )


@pytest.mark.parametrize(
    "count, size, parity, message",
    [
        (0, 0, 0, "count must be from 1 to 1048575, got 0"),
        (1 << 20, 0, 0, "count must be from 1 to 1048575, got 1048576"),
        (1, -1, 0, "size must be from 0 to 1048575, got -1"),
        (1, 0, 2, "parity must be 0 or 1, got 2"),
    ],
)
def test_operands_of_mbarriers(count, size, parity, message):
    def kernel(x):
        bars = mbarrier_tile(BARRIERS, 1)
        init_mbarrier(bars, 0, count)
        expect_bytes(bars, 0, size)
        wait_mbarrier(bars, 0, parity)

    assert message in str(caught(BarrierMisuse, kernel, 1, bits(1)))


def test_a_barrier_past_the_end():
    def kernel(x, faulty):
        bars = mbarrier_tile(BARRIERS, 2)
        init_mbarrier(bars, 2 if faulty else 1, 1)

    launch(kernel, 1, bits(1), False)
    assert "bars[2] is outside the array of 2" in str(caught(OutOfBounds, kernel, 1, bits(1), True))


def test_one_thread_passes_on_what_it_knows():
    """Thread 0 alone waits; what it has written before it arrives, others may read, and no more."""

    def kernel(y, faulty):
        tile = shared_tile(0, 64)
        bars = mbarrier_tile(BARRIERS, 2)
        t = cuda.threadIdx.x
        begin(bars, 32, 1)
        if t >= 64:
            tile[t - 64] = float32(t)
            arrive_mbarrier(bars, 0)
        elif t == 0:
            wait_mbarrier(bars, 0, 0)
            tile[33] = tile[5] + float32(1.0)
            arrive_mbarrier(bars, 1)
        elif t == 1 and faulty == "beside":
            tile[34] = float32(1.0)
        elif t == 2 and faulty == "not waited":
            y[0] = tile[5]
        elif t >= 32:
            wait_mbarrier(bars, 1, 0)
            y[t - 32] = tile[33] + tile[t - 32]
            if faulty == "beside":
                y[0] = tile[34]

    y = np.zeros(32, np.float32)
    launch(kernel, 96, y, "")
    assert (y == 70 + np.arange(64, 96)).all()
    assert "tile[34]" in str(caught((SharedHazard, UninitialisedRead), kernel, 96, y, "beside"))
    assert "tile[5]" in str(caught((SharedHazard, UninitialisedRead), kernel, 96, y, "not waited"))


def test_a_syncwarp_spreads_what_one_lane_knows():
    def kernel(y, faulty):
        tile = shared_tile(0, 32)
        bars = mbarrier_tile(BARRIERS, 1)
        t = cuda.threadIdx.x
        begin(bars, 32)
        if t >= 32:
            tile[t - 32] = float32(t)
            arrive_mbarrier(bars, 0)
        else:
            if t == 7:
                wait_mbarrier(bars, 0, 0)
            if not faulty:
                cuda.syncwarp()
            y[t] = tile[t]

    y = np.zeros(32, np.float32)
    launch(kernel, 64, y, False)
    assert (y == np.arange(32, 64)).all()
    caught((SharedHazard, UninitialisedRead), kernel, 64, y, True)


# --- boxes to shared memory ------------------------------------------------------------------


def unswizzled(tile, rows, chunks=8):
    """What lies at the places of a box: chunk c of row r at c ^ r % 8, of eight chunks."""
    columns = np.arange(COLUMNS)
    return np.stack(
        [tile[64 * r + ((columns // 8 ^ r % chunks) * 8 + columns % 8)] for r in range(rows)]
    )


def _make_load(rows, place, wrong=""):
    load = load_box if len(place) == 4 else load_box_5d
    size = 2 * rows * COLUMNS

    def kernel(X, Y):
        sX = half_tile(512 if wrong != "alignment" else 256, 256 * COLUMNS)
        bars = mbarrier_tile(BARRIERS, 1)
        t = cuda.threadIdx.x
        if t == 0:
            init_mbarrier(bars, 0, 1)
            if wrong != "fence":
                fence_mbarrier_init()
        cuda.syncthreads()
        if t == 0:
            expect_bytes(bars, 0, size + 16 if wrong == "bytes" else size)
            load(sX, 0, X, *place, bars, 0)
            if wrong == "bytes":
                wait_mbarrier(bars, 0, 0)
        if wrong == "write":
            sX[8 * t] = 1
        if wrong == "second" and t == 0:
            load(sX, 0, X, *place, bars, 0)
        if wrong == "barrier":
            cuda.syncthreads()
        elif wrong != "wait" and (wrong != "one waits" or t == 0):
            wait_mbarrier(bars, 0, 0)
        if wrong != "nobody looks":
            for n in range(t, rows * COLUMNS, cuda.blockDim.x):
                Y[n] = sX[n]

    return kernel


@pytest.mark.parametrize(
    "rows, place",
    [
        (8, (0, 0, 0, 0)),
        (64, (1, 2, 16, 64)),
        (100, (0, 1, -3, 0)),  # before the first row
        (64, (1, 0, 40, 64)),  # past the last row and column
        (8, (1, 1, 99, 192)),
        (8, (2, 0, 0, 0)),  # no such batch entry
        (8, (0, 0, 0, -32)),
    ],
)
def test_a_box_comes_swizzled_with_zeros_around(rows, place):
    x = bits(2, 3, 100, 72)
    wide = bits(2, 100, 3, 80)
    wide[..., :72] = x.transpose(0, 2, 1, 3)
    batch, head, row, col = place
    wanted = np.zeros((rows, COLUMNS), np.uint16)
    for r in range(rows):
        for c in range(COLUMNS):
            if batch < 2 and 0 <= row + r < 100 and 0 <= col + c < 72:
                wanted[r, c] = x[batch, head, row + r, col + c]
    for array in (x, wide[..., :72].transpose(0, 2, 1, 3)):
        y = np.zeros(rows * COLUMNS, np.uint16)
        counts = launch(_make_load(rows, place), 64, Boxed(array, rows), y)
        assert (unswizzled(y, rows) == wanted).all()
        inside = np.count_nonzero(wanted)  # no element of x is 0
        assert counts.loads["X"] == inside and counts.load_bytes["X"] == 2 * inside
        assert counts.instructions["tma"] == 1


@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_a_map_with_another_swizzle_and_something_else_around(chunks):
    x, y = bits(1, 1, 20, 64), np.zeros(32 * COLUMNS, np.uint16)
    boxed = Boxed(x, 32)
    boxed.layout = boxed.layout._replace(swizzle=16 * chunks, fill=0x7FFF)
    launch(_make_load(32, (0, 0, 0, 0)), 64, boxed, y)
    found = unswizzled(y, 32, chunks)
    assert (found[:20] == x[0, 0]).all() and (found[20:] == 0x7FFF).all()


def test_what_a_box_costs():
    """A request with the sectors of the rows inside, each counted once."""
    x = np.zeros((1, 1, 40, 64), np.uint16)
    y = np.zeros(64 * COLUMNS, np.uint16)
    counts = launch(_make_load(64, (0, 0, 8, 0)), 32, Boxed(x, 64), y)
    cost = counts.total(array="X", kind="box load")
    assert (cost.requests, cost.sectors, cost.wavefronts) == (1, 32 * 128 // 32, 0)
    assert counts.total(array="X") == cost
    narrow = np.zeros((1, 1, 40, 8), np.uint16)  # 16 bytes a row: two rows to a sector
    cost = launch(_make_load(64, (0, 0, 8, 0)), 32, Boxed(narrow, 64), y).total(array="X")
    assert (cost.requests, cost.sectors) == (1, 16)


@pytest.mark.parametrize(
    "wrong, error, message",
    [
        ("wait", SharedHazard, "while a copy into it is in flight, issued by thread (0, 0, 0)"),
        ("barrier", SharedHazard, "while a copy into it is in flight"),
        (
            "one waits",
            SharedHazard,
            "which a TMA load with mbarrier bars[0] wrote, with no barrier",
        ),
        ("write", SharedHazard, "while a copy into it is in flight"),
        (
            "second",
            BarrierMisuse,
            "starts a TMA load with bars[0] in phase 1, but the thread has not waited",
        ),
        ("nobody looks", None, ""),
        ("bytes", Deadlock, "phase 0, which still waits for 0 of 1 arrivals and for 16 bytes"),
        ("fence", MissingFence, "which did not call fence_mbarrier_init() afterwards"),
        ("alignment", Misaligned, "sX[0] is at byte 512 of shared memory, but a TMA box must"),
    ],
)
def test_a_box_that_is_not_waited_for(wrong, error, message):
    arrays = Boxed(bits(1, 1, 64, 64), 64), np.zeros(64 * COLUMNS, np.uint16)
    kernel = _make_load(64, (0, 0, 0, 0), wrong)
    if error is None:
        launch(kernel, 64, *arrays)
    else:
        assert message in str(caught(error, kernel, 64, *arrays))


def test_a_block_that_ends_before_its_box_has_come():
    def kernel(X):
        sX = half_tile(0, 512)
        bars = mbarrier_tile(BARRIERS, 1)
        init_mbarrier(bars, 0, 1)
        fence_mbarrier_init()
        expect_bytes(bars, 0, 1024)
        load_box(sX, 0, X, 0, 0, 0, 0, bars, 0)

    error = caught(SharedHazard, kernel, 1, Boxed(bits(1, 1, 8, 64), 8))
    assert "Let a thread call wait_mbarrier for bars[0], the mbarrier of this load" in str(error)
    assert "load_box(" in error.line


def _reuse(X, Y, wrong):
    """Every thread takes rows of a place that one of them fills, with 8 rows at a time."""
    sX = half_tile(0, 512)
    bars = mbarrier_tile(BARRIERS, 2)
    t = cuda.threadIdx.x
    if wrong == "written":
        sX[t] = 1
    if wrong == "fenced":
        sX[t] = 1
        fence_async_proxy()
    begin(bars, 1, 2 if wrong == "lanes" else 64)
    parity = 0
    for i in range(X.shape[2] // 8):
        if t == 0:
            if wrong != "wait":
                wait_mbarrier(bars, 1, parity ^ 1)
            expect_bytes(bars, 0, 1024)
            load_box(sX, 0, X, 0, 0, 8 * i, 0, bars, 0)
        wait_mbarrier(bars, 0, parity)
        if wrong == "early":
            arrive_mbarrier(bars, 1)
        for n in range(8):
            Y[i, 8 * t + n] = sX[8 * t + n]
        if wrong == "lanes":
            if t % 32 == 0:
                arrive_mbarrier(bars, 1)
        elif wrong != "early":
            arrive_mbarrier(bars, 1)
        parity ^= 1


@pytest.mark.parametrize("wrong", ["", "fenced"])
def test_a_place_is_filled_again(wrong):
    x, y = bits(1, 1, 40, 64), np.zeros((5, 512), np.uint16)
    launch(_reuse, 64, Boxed(x, 8), y, wrong)
    for i in range(5):
        assert (unswizzled(y[i], 8) == x[0, 0, 8 * i : 8 * i + 8]).all()


@pytest.mark.parametrize(
    "wrong, error, message",
    [
        ("wait", (SharedHazard, BarrierMisuse), ""),
        ("early", SharedHazard, "this TMA copy or wgmma product overwrites sX["),
        ("lanes", SharedHazard, "thread (1, 0, 0) read,"),  # one of each warp speaks for no other
        ("written", MissingFence, "wrote without calling fence_async_proxy() afterwards"),
    ],
)
def test_a_place_that_is_filled_too_early(wrong, error, message):
    arrays = Boxed(bits(1, 1, 40, 64), 8), np.zeros((5, 512), np.uint16)
    assert message in str(caught(error, _reuse, 64, *arrays, wrong))


# --- boxes to global memory ------------------------------------------------------------------


def _of_sequences(x, heads, first, end, row, group, col, rows):
    """The rows of a box from row ``row`` of a sequence on, None where it has none."""
    each = [(r // heads, r % heads) for r in range(rows)]
    places = [(first + row + r, group * heads + m) for r, m in each]
    width = slice(col, col + COLUMNS)
    return [x[h, r, width] if r < end and h < len(x) else None for r, h in places]


@pytest.mark.parametrize(
    "heads, first, end, row, group, col",
    [
        (1, 20, 50, 0, 1, 0),  # a sequence of 30 rows, of 100
        (1, 20, 50, 16, 0, 64),
        (1, 0, 3, 0, 1, 0),
        (1, 90, 100, 0, 3, 0),
        (1, 40, 40, 0, 0, 0),  # of none
        (1, 40, 50, 32, 0, 0),  # past its rows
        (2, 20, 23, 0, 1, 0),
        (4, 90, 100, 8, 0, 64),
    ],
)
def test_boxes_end_with_a_sequence_and_have_rows_of_several_heads(
    heads, first, end, row, group, col
):
    """Zeros come for what the sequence has not, and nothing is written there."""
    rows, x = 32, bits(4, 100, 72)
    X = TiledArray(x[None], rows, "float16", heads, ends=True)
    _, of_head, of_row = X.layout.steps
    place = (WRAPS, of_head * group + of_row * end, row + WRAPS - (end - first))
    place = (*place, col) if heads == 1 else (*place, 0, col)
    wanted = np.zeros((rows, COLUMNS), np.uint16)
    box = _of_sequences(x, heads, first, end, row, group, col, rows)
    for r, values in enumerate(box):
        if values is not None:
            wanted[r, : len(values)] = values
    boxed = Boxed(x[None], rows, X.layout)
    y = np.zeros(rows * COLUMNS, np.uint16)
    counts = launch(_make_load(rows, place), 64, boxed, y)
    assert (unswizzled(y, rows) == wanted).all()
    assert counts.loads["X"] == np.count_nonzero(wanted)
    z, given = np.zeros_like(x), bits(rows, COLUMNS, seed=1)
    layout = TiledArray(z[None], rows, "float16", heads, ends=True).layout
    counts = launch(_make_store(rows, place), 64, given, Boxed(z[None], rows, layout), False)
    back = _of_sequences(z, heads, first, end, row, group, col, rows)
    for values, stored in zip(given, back, strict=True):
        assert stored is None or (stored == values[: len(stored)]).all()
    assert counts.stores["Y"] == np.count_nonzero(z) == np.count_nonzero(wanted)


def test_boxes_that_a_map_has_not():
    x, y = bits(1, 2, 40, 64), np.zeros(8 * COLUMNS, np.uint16)
    found = caught(EmulatorError, _make_load(8, (0, 0, 0, 0, 0)), 32, Boxed(x, 8), y)
    assert (
        "a TMA copy of X needs 4 coordinates, one for each axis of the tensor map, got 5: (0"
        in str(found)
    )
    # A row of the sequence that would lie before the array.
    layout = TiledArray(x, 8, "float16", ends=True).layout
    kernel = _make_load(8, (WRAPS, 5, WRAPS - 10, 0))
    found = caught(OutOfBounds, kernel, 32, Boxed(x, 8, layout), y)
    assert "is inside the tensor map of X, but outside the memory of X" in str(found)


def _make_store(rows, place, wrong=""):
    store = store_box if len(place) == 4 else store_box_5d

    def kernel(X, Y, again):
        sX = half_tile(0, 128 * COLUMNS)
        t = cuda.threadIdx.x
        for n in range(t, rows * COLUMNS, cuda.blockDim.x):
            if wrong != "hole" or n != 77:
                r, c = n // COLUMNS, n % COLUMNS
                sX[COLUMNS * r + ((c // 8 ^ r % 8) * 8 + c % 8)] = X[r, c]
        if wrong == "one fence":
            if t != 33:
                fence_async_proxy()
        elif wrong != "fence":
            fence_async_proxy()
        if wrong != "barrier":
            cuda.syncthreads()
        if t == 0:
            store(Y, *place, sX, 0)
            if wrong != "commit":
                commit_boxes()
            if wrong != "wait":
                wait_boxes_read()
            if wrong == "late fence":
                fence_async_proxy()
        if again:
            if wrong != "no barrier after":
                cuda.syncthreads()
            sX[t] = 0

    return kernel


@pytest.mark.parametrize(
    "rows, place",
    [(8, (0, 0, 0, 0)), (64, (1, 2, 16, 0)), (100, (0, 1, 40, 64)), (8, (1, 1, -4, 0))],
)
def test_a_box_is_stored_where_the_array_is(rows, place):
    x = bits(rows, COLUMNS)
    batch, head, row, col = place
    y = np.zeros((2, 3, 100, 72), np.uint16)
    counts = launch(_make_store(rows, place), 64, x, Boxed(y, rows), True)
    wanted = np.zeros_like(y)
    for r in range(rows):
        for c in range(COLUMNS):
            if 0 <= row + r < 100 and col + c < 72:
                wanted[batch, head, row + r, col + c] = x[r, c]
    assert (y == wanted).all()
    assert counts.stores["Y"] == np.count_nonzero(wanted)
    cost = counts.total(array="Y")
    assert cost == counts.total(kind="box store") and cost.requests == 1 and cost.sectors > 0


@pytest.mark.parametrize(
    "wrong, error, message",
    [
        ("fence", MissingFence, "wrote without calling fence_async_proxy() afterwards"),
        (
            "one fence",
            MissingFence,
            "thread (33, 0, 0) wrote without calling fence_async_proxy() afterwards",
        ),
        ("barrier", SharedHazard, "no barrier between"),
        ("hole", UninitialisedRead, "sX[69] is read, but was never written"),
        ("commit", SharedHazard, "may still read it. Call"),
        ("wait", SharedHazard, "may still read it. Call"),
        ("no barrier after", SharedHazard, "no barrier between"),
    ],
)
def test_a_box_that_is_stored_too_early(wrong, error, message):
    arrays = bits(64, COLUMNS), Boxed(np.zeros((1, 1, 64, 64), np.uint16), 64)
    found = caught(error, _make_store(64, (0, 0, 0, 0), wrong), 64, *arrays, True)
    assert message in str(found)


def test_a_thread_that_leaves_its_box_behind():
    arrays = bits(64, COLUMNS), Boxed(np.zeros((1, 1, 64, 64), np.uint16), 64)
    found = caught(SharedHazard, _make_store(64, (0, 0, 0, 0), "wait"), 64, *arrays, False)
    assert "exits while its TMA store may still read sX[0]" in str(found)
    assert found.thread == (0, 0, 0) and "store(" in found.line


def _add_bulk(wrong):
    """A contiguous part of shared memory is added to rows 1 and 2 of Y, twice."""
    at, col, size = {"address": (2, 0, 64), "place": (0, 2, 64), "size": (0, 0, 62),
                     "source": (68, 0, 64), "end": (0, 32, 64)}.get(wrong, (0, 0, 64))  # fmt: skip

    def kernel(Y):
        tile = shared_tile(0, 128)
        t = uint32(cuda.threadIdx.x)
        for n in range(4):
            tile[uint32(32 * n + t)] = float32(32 * n + t)
        if wrong != "fence":
            fence_async_proxy()
        cuda.syncwarp()
        if t == uint32(0):
            for row in range(1, 3):
                add_bulk(Y, row, col, tile, at, size)
            commit_boxes()
            if wrong != "read":
                wait_boxes_read()

    return kernel


def test_contiguous_parts_are_added():
    y = np.full((3, 64), 0.5, np.float32)
    counts = emulator.launch(_add_bulk(""), 2, 32, y, shared_bytes=512)
    assert np.array_equal(y[1:], np.full((2, 64), 0.5) + 2 * np.arange(64))
    assert (y[0] == 0.5).all()
    assert counts.loads["Y"] == counts.stores["Y"] == 2 * 2 * 64


@pytest.mark.parametrize(
    "wrong, error, says",
    [
        ("address", Misaligned, "the address in shared memory of a bulk copy must be a multiple"),
        ("place", Misaligned, "the address in global memory of a bulk copy must be a multiple"),
        ("size", Misaligned, "the size of a bulk copy must be a multiple of 16 bytes, got 248"),
        ("source", OutOfBounds, "tile"),
        ("end", OutOfBounds, "Y"),
        ("fence", MissingFence, "fence_async_proxy"),
        ("read", SharedHazard, "wait_boxes_read"),
    ],
)
def test_a_wrong_addition_of_a_part_is_refused(wrong, error, says):
    y = np.zeros((3, 80), np.float32)
    with pytest.raises(error, match=re.escape(says)):
        emulator.launch(_add_bulk(wrong), 1, 32, y, shared_bytes=512)
    assert not y.any()


def _there_and_back(wrong):
    """A box is stored, and loaded again, and another one stored in its place."""

    def kernel(X, Y, out):
        sX = half_tile(0, 512)
        bars = mbarrier_tile(BARRIERS, 2)
        begin(bars, 1, 1)
        if cuda.threadIdx.x == 0:
            expect_bytes(bars, 0, 1024)
            load_box(sX, 0, X, 0, 0, 0, 0, bars, 0)
            wait_mbarrier(bars, 0, 0)
            store_box(Y, 0, 0, 0, 0, sX, 0)
            commit_boxes()
            if wrong == "read" or wrong == "again":
                wait_boxes_read()
            else:
                wait_boxes()
            if wrong == "again":
                store_box(Y, 0, 0, 0, 0, sX, 0)
            if wrong != "alone":
                arrive_mbarrier(bars, 1)
        if cuda.threadIdx.x == 32:
            if wrong != "alone":
                wait_mbarrier(bars, 1, 0)
            else:
                wait_mbarrier(bars, 0, 0)
            expect_bytes(bars, 0, 1024)
            load_box(sX, 0, Y, 0, 0, -2, 0, bars, 0)
            wait_mbarrier(bars, 0, 1)
            out[0] = sX[2 * COLUMNS + 16]

    return kernel


def test_a_stored_box_is_there_when_it_was_waited_for():
    x, y, out = bits(1, 1, 8, 64), np.zeros((1, 1, 8, 64), np.uint16), np.zeros(1, np.int32)
    launch(_there_and_back(""), 64, Boxed(x, 8), Boxed(y, 8), out)
    assert (y == x).all() and out[0] == x[0, 0, 0, 0]  # in row 2 chunks 0 and 2 change places


@pytest.mark.parametrize(
    "wrong, message",
    [
        ("read", "reads Y[0, 0, 0, 0], to which a TMA copy is still storing"),
        ("again", "overwrites Y[0, 0, 0, 0], to which a TMA copy is still storing"),
        ("alone", "thread (0, 0, 0) stored by a TMA copy and waited for, with no barrier between"),
    ],
)
def test_a_box_that_comes_before_it_is_there(wrong, message):
    arrays = Boxed(bits(1, 1, 8, 64), 8), Boxed(np.zeros((1, 1, 8, 64), np.uint16), 8)
    found = caught(GlobalHazard, _there_and_back(wrong), 64, *arrays, np.zeros(1, np.int32))
    assert message in str(found)


@pytest.mark.parametrize("moves", ["load", "store"])
@pytest.mark.parametrize("stores", ["inside", "outside", "before"])
def test_a_box_of_what_a_thread_has_stored(moves, stores):
    """fence_async_proxy is of shared memory, and a barrier no fence; a launch's end is one."""

    def stored(P, row):
        P[row, 5] = 1

    def kernel(P, X, row):
        sX = half_tile(0, 512)
        bars = mbarrier_tile(BARRIERS, 1)
        if cuda.threadIdx.x == 0:
            init_mbarrier(bars, 0, 1)
            fence_mbarrier_init()
        if row >= 0:
            stored(P, row)
        for n in range(512):
            sX[n] = 0
        fence_async_proxy()
        cuda.syncthreads()
        if cuda.threadIdx.x == 0 and moves == "load":
            expect_bytes(bars, 0, 1024)
            load_box(sX, 0, X, 0, 0, 4, 0, bars, 0)
            wait_mbarrier(bars, 0, 0)
        elif cuda.threadIdx.x == 0:
            store_box(X, 0, 0, 4, 0, sX, 0)
            commit_boxes()
            wait_boxes()

    x = bits(1, 1, 20, 64)
    if stores == "before":
        launch(stored, 1, x[0, 0], 7)
    if stores != "inside":
        launch(kernel, 1, x[0, 0], Boxed(x, 8), 3 if stores == "outside" else -1)
        return
    found = caught(MissingFence, kernel, 1, x[0, 0], Boxed(x, 8), 7)
    assert "[0, 0, 7, 5], which thread (0, 0, 0) stored earlier in the same launch. Within" in str(
        found
    )
    assert f"{moves}_box(" in found.line


@pytest.mark.parametrize("stores", [False, True])
@pytest.mark.parametrize(
    "wrong, says",
    [
        ("", ""),
        ("wait", "P[5, 5], to which a TMA copy is still storing"),
        (
            "barrier",
            "P[5, 5], which thread (0, 0, 0) stored by a TMA copy, with no barrier between",
        ),
    ],
)
def test_a_thread_where_a_box_is_stored(wrong, says, stores):
    def kernel(P, X):
        sX = half_tile(0, 512)
        t = cuda.threadIdx.x
        for n in range(t, 512, 64):
            sX[n] = 7
        fence_async_proxy()
        cuda.syncthreads()
        if t == 0:
            store_box(X, 0, 0, 4, 0, sX, 0)
            commit_boxes()
            if wrong == "wait":
                wait_boxes_read()
            else:
                wait_boxes()
        if wrong != "barrier":
            cuda.syncthreads()
        if t == 33 and stores:
            P[5, 5] = 8
        elif t == 33:
            P[0, 0] = P[5, 5]

    x = bits(1, 1, 20, 64)
    arrays = x[0, 0], Boxed(x, 8)
    if wrong:
        assert says in str(caught(GlobalHazard, kernel, 64, *arrays))
    else:
        launch(kernel, 64, *arrays)
        assert (x[0, 0, 5, 5], x[0, 0, 0, 0] == 7) == ((8, False) if stores else (7, True))


def test_blocks_that_store_to_the_same_place():
    arrays = bits(64, COLUMNS), Boxed(np.zeros((1, 1, 64, 64), np.uint16), 64)
    with pytest.raises(GlobalHazard, match=r"overwrites Y\[0, 0, 0, 0\], which block \(0, 0, 0\)"):
        launch(_make_store(64, (0, 0, 0, 0)), 64, *arrays, True, grid=2)


def test_arrays_that_are_refused():
    y = np.zeros((1, 1, 64, 64), np.uint16)
    y.flags.writeable = False
    caught(ReadOnlyStore, _make_store(64, (0, 0, 0, 0)), 64, bits(64, 64), Boxed(y, 64), True)
    x = np.zeros((2, 2, 8, 72), np.uint16)
    for array, rows, message in (
        (x[0], 8, "must have 4 axes, got shape"),
        (x[..., ::2], 8, "must have a contiguous last axis, .* 2 bytes .*, got 4 bytes"),
        (x[..., 1:], 8, "must begin at a multiple of 16 bytes, got address"),
        (
            np.zeros((1, 1, 8, 20), np.uint16),
            8,
            "multiples of 16 .* got a stride of 40 bytes on axis 2",
        ),
        (x, 0, "rows, the number of rows of a TMA box, must be from 1 to 256, got 0"),
        (x, 257, "rows, the number of rows of a TMA box, must be from 1 to 256, got 257"),
    ):
        with pytest.raises(ValueError, match=message):
            Boxed(array, rows)
