"""The emulator: every detector on a planted fault and on its clean twin, every count by hand."""

import contextlib
import math

import numpy as np
import pytest
from numba import cuda, float32, int32, uint32

from fa_numba import emulator
from fa_numba.emulator import (
    BarrierDivergence,
    BarrierMisuse,
    Deadlock,
    EmulatorError,
    GlobalHazard,
    Misaligned,
    OutOfBounds,
    ReadOnlyStore,
    SharedHazard,
    UninitialisedRead,
    launch,
    schedule,
)
from fa_numba.intrinsics.arithmetic import exp2
from fa_numba.intrinsics.async_copy import commit_async
from fa_numba.intrinsics.barriers import arrive_named, sync_named
from fa_numba.intrinsics.shared import load4, shared_tile, store4

FULL = 0xFFFFFFFF
TILE = 16


def intrinsic(function):
    """What an intrinsic is to the emulator: an object with an `emulation`."""

    class Intrinsic:
        emulation = staticmethod(function)

    return Intrinsic()


@intrinsic
def copy(dst, e, src, index, n, valid):
    emulator.current().async_copy(dst, e, src, index, n, valid)


@intrinsic
def wait(n):
    emulator.current().async_wait(n)


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


def ramp(*shape):
    return np.arange(math.prod(shape), dtype=np.float32).reshape(shape)


def caught(kind, kernel, block, *args, **options):
    """The error of `kernel`, which must be of `kind` and say where it happened."""
    with pytest.raises(kind) as info:
        launch(kernel, 1, block, *args, wraparound=False, **options)
    error = info.value
    assert type(error) is kind
    assert error.block == (0, 0, 0)
    assert "test_emulator.py:" in error.line
    for part in (error.block, error.thread, error.line):
        assert str(part) in str(error)
    return error


# ---- a whole kernel


def matmul(A, B, C):
    sA = cuda.shared.array(TILE * TILE, float32)
    sB = cuda.shared.array(TILE * TILE, float32)
    x, y = cuda.grid(2)
    tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
    c = float32(0.0)
    for i in range(cuda.gridDim.x):
        sA[ty * TILE + tx] = A[y, tx + i * TILE]
        sB[ty * TILE + tx] = B[ty + i * TILE, x]
        cuda.syncthreads()
        for k in range(TILE):
            c += sA[ty * TILE + k] * sB[k * TILE + tx]
        cuda.syncthreads()
    C[y, x] = c


def test_matmul_is_right_and_counted():
    rng = np.random.default_rng(0)
    A, B = rng.standard_normal((2, 64, 64)).astype(np.float32)
    C = np.full((64, 64), np.nan, np.float32)
    counts = launch(matmul, (4, 4), (TILE, TILE), A, B, C)
    expected = np.zeros_like(C)
    for k in range(64):  # products and sums of a scalar are rounded
        expected += A[:, k, None] * B[k]
    np.testing.assert_array_equal(C, expected)
    assert counts.loads == {"A": 4 * 64 * 64, "B": 4 * 64 * 64}
    assert counts.stores == {"C": 64 * 64}
    assert counts.load_bytes == {"A": 4 * 4 * 64 * 64, "B": 4 * 4 * 64 * 64}
    assert counts.store_bytes == {"C": 4 * 64 * 64}


# ---- shared-memory hazards; True leaves the barrier out


def neighbour(out, faulty):
    s = cuda.shared.array(64, float32)
    t = cuda.threadIdx.x
    s[t] = t
    if not faulty:
        cuda.syncthreads()
    out[t] = s[t - 1 if t > 0 else 63]


def test_read_after_write():
    out = zeros(64)
    launch(neighbour, 1, 64, out, False)
    assert out.tolist() == [63, *range(63)]

    error = caught(SharedHazard, neighbour, 64, out, True)
    assert "reads s[63], which thread (63, 0, 0) wrote" in str(error)
    # where warps take turns, one may read what nobody wrote yet
    found = set()
    for seed in range(8):
        with pytest.raises((SharedHazard, UninitialisedRead)) as info, schedule(seed):
            launch(neighbour, 1, 64, out, True)
        found.add(type(info.value))
    assert found == {SharedHazard, UninitialisedRead}


def test_syncwarp_of_half_a_warp_does_not_order_memory():
    def kernel(out, mask):
        s = cuda.shared.array(1, float32)
        t = cuda.threadIdx.x
        if t == 0:
            s[0] = float32(1.0)
        if mask >> t & 1:
            cuda.syncwarp(mask)
        if t == 1:
            out[0] = s[0]

    launch(kernel, 1, 32, zeros(1), FULL)
    caught(SharedHazard, kernel, 32, zeros(1), 0xFFFF)


def test_shuffles_do_not_order_memory():
    def kernel(out, fence):
        s = cuda.shared.array(1, float32)
        t = cuda.threadIdx.x
        if t == 0:
            s[0] = float32(1.0)
        cuda.shfl_sync(FULL, t, 0)
        if fence:
            cuda.syncwarp()
        out[t] = s[0]

    launch(kernel, 1, 32, zeros(32), True)
    caught(SharedHazard, kernel, 32, zeros(32), False)


def brute_force_hazard(program, threads):
    """Whether `program`, lists of steps in the order run, has two conflicting unordered accesses.

    Vector clocks kept in full, where the emulator keeps two stamps an element.
    """
    clock = np.eye(threads, dtype=int)
    past = []
    for step in program:
        if step[0] == "block" or step[0] == "warp":
            group = range(threads) if step[0] == "block" else range(step[1] * 32, step[1] * 32 + 32)
            group = [t for t in group if t < threads]
            clock[group] = clock[group].max(axis=0)
            clock[group, group] += 1
        elif step[0] == "named":
            waiting, arriving = ([t for t in range(threads) if t // 32 in w] for w in step[2:])
            clock[waiting] = clock[waiting + arriving].max(axis=0)
            clock[waiting + arriving, waiting + arriving] += 1
        else:
            kind, t, place = step
            for e in np.atleast_1d(place):
                for other, u, f, when in past:
                    harmless = kind == other == "read"
                    if f == e and u != t and not harmless and clock[t, u] < when:
                        return True
                past.append((kind, t, e, clock[t, t]))
    return False


def hazard(program, threads, elements):
    """Whether the emulator reports one, which must be what `brute_force_hazard` says."""
    whole = tuple(range(elements))

    def kernel(length):
        s = cuda.shared.array(elements, float32)
        t = cuda.threadIdx.x
        if t == 0:
            for e in range(elements):
                s[e] = float32(0.0)
        cuda.syncthreads()
        for n in range(length):
            kind = program[n][0]
            if kind == "block":
                cuda.syncthreads()
            elif kind == "warp":
                if t // 32 == program[n][1]:
                    cuda.syncwarp()
            elif kind == "named":
                _, barrier, waiting, arriving = program[n]
                for warp in waiting:
                    if t // 32 == warp:
                        sync_named(barrier, 32 * len(waiting + arriving))
                for warp in arriving:
                    if t // 32 == warp:
                        arrive_named(barrier, 32 * len(waiting + arriving))
            elif program[n][1] == t:
                if kind == "write":
                    s[program[n][2]] = float32(n)
                elif program[n][2] == whole:
                    s.load(0, elements)
                else:
                    s[program[n][2]]

    expected = brute_force_hazard(program, threads)
    try:
        launch(kernel, 1, threads, len(program))
        assert not expected, program
    except SharedHazard:
        assert expected, program
    return expected


@pytest.mark.parametrize("programs", [200, pytest.param(400, marks=pytest.mark.slow)])
def test_hazards_equal_those_of_vector_clocks(programs):
    threads, elements = 64, 3
    rng = np.random.default_rng(1)
    found = []
    for _ in range(programs):
        # accesses between two barriers of the block, sorted by thread: the order they run in
        program = []
        lanes = rng.choice([0, 1, 2, 33, 34], 3)
        kinds = rng.choice(["read", "write"], 5)
        for phase in range(2):
            for warp in (0, 1):
                for part in range(3):
                    steps = [
                        (str(rng.choice(kinds)), int(t), int(e))
                        for t, e in zip(rng.choice(lanes, 2), rng.choice(elements, 2), strict=True)
                        if t // 32 == warp
                    ]
                    program += sorted(steps, key=lambda step: step[1])
                    if part < 2:
                        program.append(("warp", warp, 0))
            if phase == 0:
                program.append(("block", 0, 0))
        found.append(hazard(program, threads, elements))
    assert 0.125 < sum(found) / programs < 0.875


@pytest.mark.parametrize("programs", [250, pytest.param(500, marks=pytest.mark.slow)])
def test_hazards_between_named_barriers_equal_those_of_vector_clocks(programs):
    warps, elements = 4, 2
    rng = np.random.default_rng(2)
    found = []
    for _ in range(programs):
        kinds = rng.choice(["read", "vector", "write"], 3)
        program, who = [], 0
        for barrier in range(1, rng.integers(3, 12)):
            for kind in rng.choice(kinds, rng.integers(4)):
                if rng.random() < 0.5:  # else the same thread again
                    who = int(32 * rng.integers(warps) + rng.choice([0, 1, 31]))
                if kind == "vector":
                    program.append(("read", who, tuple(range(elements))))
                else:
                    program.append((str(kind), who, int(rng.integers(elements))))
            present = rng.permutation(warps)[: rng.integers(1, warps + 1)].tolist()
            waiting = rng.integers(1, len(present) + 1)
            program.append(("named", barrier, present[:waiting], present[waiting:]))
            if rng.random() < 0.3:
                program.append(("warp", int(rng.integers(warps)), 0))
            if rng.random() < 0.1:
                program.append(("block", 0, 0))
        found.append(hazard(program, 32 * warps, elements))
    assert 0.2 < sum(found) / programs < 0.8


# ---- global memory, between threads of a block


def lost_updates(g, out, right):
    t = cuda.threadIdx.x
    if not right:
        g[t // 2] += 1
    elif t % 2 == 0:
        g[t // 2] += 2


def exchange(g, out, right):
    t = cuda.threadIdx.x
    g[t] = t
    if right:
        cuda.syncthreads()
    out[t] = g[t ^ 32]


def exchange_in_a_warp(g, out, right):
    t = cuda.threadIdx.x
    g[t] = t
    if right:
        cuda.syncwarp()
    out[t] = g[t ^ 1]


def written_while_read(g, out, right):
    t = cuda.threadIdx.x
    out[t] = g[t ^ 1]
    if right:
        cuda.syncwarp()
    g[t] = t


def written_after_all_read(g, out, right):
    t = cuda.threadIdx.x
    out[t] = g[5]
    if right:
        cuda.syncthreads()
    if t == 5:
        g[5] = 1


def vectors(g, out, right):
    t = cuda.threadIdx.x
    store4(g, (4 * (t // 2 if not right else t),), t, t, t, t)


def several_write_the_same(g, out, right):
    if cuda.threadIdx.x == 0 or not right:
        g[0] = 3


def atomics_and_a_write(g, out, right):
    t = cuda.threadIdx.x
    cuda.atomic.add(g, 0, 1)
    cuda.atomic.add(g, t // 2, 1)
    if t == 5 and not right:
        g[1] = 0
    cuda.atomic.add(g, t // 2, 1)


def atomics_and_a_read(g, out, right):
    t = cuda.threadIdx.x
    cuda.atomic.add(g, 0, 1)
    if right:
        cuda.syncthreads()
    out[t] = g[0]


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize(
    "kernel, says",
    [
        (
            lost_updates,
            "overwrites g[0], which several threads of warp 0 read, with no barrier between",
        ),
        (exchange, "reads g[32], which thread (32, 0, 0) wrote, with no barrier between"),
        (exchange_in_a_warp, "reads g[1], which thread (1, 0, 0) wrote, with no barrier between"),
        (written_while_read, "overwrites g[0], which thread (1, 0, 0) read, with no barrier"),
        (written_after_all_read, "overwrites g[5], which several threads of warp 1 read,"),
        (vectors, "overwrites g[0], which thread (0, 0, 0) wrote"),
        (several_write_the_same, "overwrites g[0], which thread (0, 0, 0) wrote"),
        (atomics_and_a_write, "overwrites g[1], which thread (3, 0, 0) updated, with no barrier"),
        (
            atomics_and_a_read,
            "reads g[0], which thread (63, 0, 0) updated, with no barrier between",
        ),
    ],
)
def test_races_in_global_memory_within_a_block(kernel, says, blocks):
    def of_a_block(g, out, right):
        b = cuda.blockIdx.x
        kernel(g[b], out[b], right)

    of_a_block.__module__ = kernel.__module__
    for right in (True, False):
        expected = contextlib.nullcontext() if right else pytest.raises(GlobalHazard)
        with expected as info:
            launch(of_a_block, blocks, 64, zeros(blocks, 256), zeros(blocks, 64), right)
    assert says in str(info.value) and "test_emulator.py:" in info.value.line


# ---- named barriers


def test_a_named_barrier_is_used_again():
    def kernel(out, faulty):
        w = cuda.threadIdx.x // 32
        for _ in range(3):
            if w < 2:
                sync_named(1, 64)
            if not faulty:
                sync_named(2, 128)
            if w >= 2:
                sync_named(1, 64)
            sync_named(3, 128)

    launch(kernel, 2, 128, zeros(1), False)
    caught(BarrierMisuse, kernel, 128, zeros(1), True)


def unmet(out, faulty):
    t = cuda.threadIdx.x
    w = t // 32
    if faulty == "a warp too few":
        if w < 2:
            sync_named(3, 96)
    elif faulty == "another barrier":
        sync_named(3 + w // 2, 96)
    elif faulty == "crosswise":
        sync_named(3 + w % 2, 128)
        sync_named(4 - w % 2, 128)
    elif faulty == "that of the block":
        if w < 2:
            sync_named(3, 96)
        else:
            cuda.syncthreads()
    elif faulty == "nobody waits":
        if w < 2:
            arrive_named(3, 96)
        cuda.syncthreads()
    elif faulty == "half a warp":
        if t % 32 < 16:
            sync_named(3, 128)
    elif faulty == "a branch in the warp":
        if t % 32 < 16:
            sync_named(3, 128)
        else:
            sync_named(3, 128)
    elif faulty == "twice":
        if w < 2:
            arrive_named(3, 96)
            arrive_named(3, 96)
    elif faulty == "one after the other":
        sync_named(3, 64)
    elif faulty == "two counts":
        sync_named(3, 96 + 32 * (w % 2))
    elif faulty == "lanes differ":
        sync_named(3 + t % 2, 128)


@pytest.mark.parametrize(
    "kind, faulty, message",
    [
        (Deadlock, "a warp too few", "barrier 3 waits for 96 threads, of which 64 have arrived"),
        (Deadlock, "another barrier", "barrier 4 waits for 96 threads, of which 64 have arrived"),
        (Deadlock, "crosswise", "sync_named of barrier 4"),
        (Deadlock, "that of the block", "waiting in syncthreads"),
        (BarrierDivergence, "half a warp", "reached by only some of the lanes in warp "),
        (
            BarrierDivergence,
            "a branch in the warp",
            "reached by only some of the lanes in warp ",
        ),
        (BarrierMisuse, "twice", "warp 0 arrives again at barrier 3 before the barrier has opened"),
        (
            BarrierMisuse,
            "one after the other",
            "warp 2 arrives at barrier 3, but nothing orders this after",
        ),
        (BarrierMisuse, "two counts", "with threads=128, but barrier 3 waits for 96"),
        (
            BarrierMisuse,
            "lanes differ",
            "arguments (barrier, threads): (3, 128), (4, 128)",
        ),
    ],
)
def test_named_barriers_that_do_not_open(kind, faulty, message):
    error = caught(kind, unmet, 128, zeros(1), faulty)
    assert message in str(error) and "_named(" in error.line


def test_a_named_barrier_that_nobody_waits_at_need_not_open():
    launch(unmet, 1, 128, zeros(1), "nobody waits")


def test_shared_memory_does_not_survive_a_block():
    def kernel(out, every):
        s = cuda.shared.array(1, float32)
        b = cuda.blockIdx.x
        if b == 0 or every:
            s[0] = float32(b)
        out[b] = s[0]

    out = zeros(3)
    launch(kernel, 3, 1, out, True)
    assert out.tolist() == [0, 1, 2]
    with pytest.raises(UninitialisedRead) as info:
        launch(kernel, 3, 1, out, False)
    assert info.value.block == (1, 0, 0)


# ---- barriers and collectives


def barrier_for(out, limit):
    t = cuda.threadIdx.x
    if t < limit:
        cuda.syncthreads()
    out[t] = t


def two_barriers(out, limit):
    if cuda.threadIdx.x < limit:
        cuda.syncthreads()
    else:
        cuda.syncthreads()


def barrier_in_a_loop(out, more):
    for _ in range(2 + more if cuda.threadIdx.x == 5 else 2):
        cuda.syncthreads()


def barrier_against_a_collective(out, limit):
    t = cuda.threadIdx.x
    if t < limit:
        cuda.syncthreads()
    out[t] = cuda.shfl_xor_sync(FULL, t, 1)
    if t >= limit:
        cuda.syncthreads()


def shuffle_under_a_branch(out, limit):
    t = cuda.threadIdx.x
    if t < limit:
        out[t] = cuda.shfl_xor_sync(FULL, t, 1)


def one_shuffle_on_two_lines(out, limit):
    t = cuda.threadIdx.x
    if t % 32 < limit:
        out[t] = cuda.shfl_xor_sync(FULL, t, 1)
    else:
        out[t] = cuda.shfl_xor_sync(FULL, t, 1)


def a_mask_without_the_caller(out, mask):
    t = cuda.threadIdx.x
    out[t] = cuda.shfl_sync(mask, t, t // 32 * 32)


@pytest.mark.parametrize(
    "kernel, right, wrong, says",
    [
        (barrier_for, (64,), 40, ["(40, 0, 0)", "returned", "cuda.syncthreads()"]),
        (two_barriers, (64, 0), 32, ["waiting in syncthreads", "(0, 0, 0)", "(32, 0, 0)"]),
        *((barrier_in_a_loop, (0,), more, ["syncthreads"]) for more in (-1, 1, 2)),
        (
            barrier_against_a_collective,
            (64, 0),
            16,
            ["waiting in syncthreads", "waiting in shfl_xor_sync"],
        ),
        (shuffle_under_a_branch, (64, 32), 62, ["(62, 0, 0), (63, 0, 0): returned"]),
        (one_shuffle_on_two_lines, (32, 0), 16, ["shfl_xor_sync"]),
        (a_mask_without_the_caller, (FULL,), 0x7FFFFFFF, ["thread (31, 0, 0)"]),
    ],
)
def test_what_not_all_threads_come_to(kernel, right, wrong, says):
    for argument in right:
        launch(kernel, 1, 64, zeros(64), argument)
    error = str(caught(BarrierDivergence, kernel, 64, zeros(64), wrong))
    assert all(part in error for part in says), error


def test_shuffle_from_a_lane_that_takes_no_part():
    def kernel(out, source):
        t = cuda.threadIdx.x
        if t < 16:
            out[t] = cuda.shfl_sync(0xFFFF, t, source)

    out = zeros(32)
    launch(kernel, 1, 32, out, 9)
    assert (out[:16] == 9).all()
    caught(UninitialisedRead, kernel, 32, out, 20)


def test_lanes_that_wait_for_one_another_deadlock():
    def kernel(out, faulty):
        t = cuda.threadIdx.x
        mask = 0b111
        if faulty:
            mask = (1 << t) | (1 << (t + 1) % 3)
        if t < 3:
            out[t] = cuda.shfl_sync(mask, t, t)

    launch(kernel, 1, 32, zeros(32), False)
    assert "different masks" in str(caught(Deadlock, kernel, 32, zeros(32), True))


@pytest.mark.parametrize("threads", [32, 64, 96])
def test_collectives_equal_numpy(threads):
    def kernel(values, out):
        t = cuda.threadIdx.x
        v = values[t]
        out[0, t] = cuda.shfl_sync(FULL, v, 3)
        out[1, t] = cuda.shfl_xor_sync(FULL, v, 1)
        out[2, t] = cuda.laneid

    values = np.random.default_rng(threads).standard_normal(threads)
    out = np.full((3, threads), np.nan)
    launch(kernel, 1, threads, values, out)
    for w in range(0, threads, 32):
        v, got, lanes = values[w : w + 32], out[:, w : w + 32], np.arange(32)
        assert (got[0] == v[3]).all()
        assert (got[1] == v[lanes ^ 1]).all()
        assert (got[2] == lanes).all()


def test_a_full_mask_means_the_lanes_that_exist():
    def kernel(out, delta):
        t = cuda.threadIdx.x
        out[t] = cuda.shfl_sync(FULL, t, 7)
        if t >= 32:
            cuda.shfl_xor_sync(FULL, t, delta)

    out = zeros(40, dtype=np.int64)
    launch(kernel, 1, 40, out, 7)
    assert (out[:32] == 7).all() and (out[32:] == 39).all()
    error = caught(UninitialisedRead, kernel, 40, out, 8)
    assert error.thread == (32, 0, 0) and "reads lane 8" in str(error)


@pytest.mark.parametrize("limit", [16, 40])
def test_lanes_of_both_sides_of_a_branch_shuffle_in_one_function(limit):
    def meets(v):
        return cuda.shfl_xor_sync(FULL, v, 31)

    def kernel(out):
        t = cuda.threadIdx.x
        if t < limit:
            out[t] = meets(t)
        else:
            out[t] = meets(100 + t)

    out, lanes = zeros(64), np.arange(64) ^ 31
    launch(kernel, 1, 64, out)
    assert (out == np.where(lanes < limit, lanes, 100 + lanes)).all()


# ---- bounds and alignment


@pytest.mark.parametrize("index", [-1, 8])
@pytest.mark.parametrize("stores", [True, False])
@pytest.mark.parametrize("where", range(3))
def test_out_of_bounds(where, stores, index):
    def kernel(A, i):
        arrays = (A[0], cuda.shared.array(8, float32), cuda.local.array(8, float32))
        a = arrays[where]
        for n in range(8):
            a[n] = float32(1.0)
        if stores:
            a[i] = float32(1.0)
        else:
            A[0, 0] = a[i]

    launch(kernel, 1, 1, zeros(1, 8), 7)
    error = caught(OutOfBounds, kernel, 1, zeros(1, 8), index)
    assert f"[{index}]" in str(error) and "[i]" in error.line


@pytest.mark.parametrize("stores", [True, False])
def test_every_axis_of_a_view_is_bounded(stores):
    def kernel(A, i, j):
        if stores:
            A[i][0, j] = 1
        else:
            A[i][0, j]

    launch(kernel, 1, 1, zeros(2, 1, 4), 1, 3)
    for index in ((2, 0), (0, 4), (-1, 0), (0, -1)):
        assert "is outside the array" in str(caught(OutOfBounds, kernel, 1, zeros(2, 1, 4), *index))
        caught(OutOfBounds, kernel, 1, zeros(3, 1, 8)[1:, :, 1:5], *index)


def test_vectors_must_be_aligned_and_inside():
    def shared_store(A, e):
        s = cuda.shared.array(16, float32)
        store4(s, e, 1.0, 2.0, 3.0, 4.0)

    def shared_load(A, e):
        s = cuda.shared.array(16, float32)
        for k in range(16):
            s[k] = float32(1.0)
        load4(s, e)

    def global_store(A, e):
        store4(A, (1, e), 1.0, 2.0, 3.0, 4.0)

    def global_load(A, e):
        load4(A, (1, e))

    for kernel in (shared_store, shared_load, global_store, global_load):
        launch(kernel, 1, 1, zeros(2, 16), 12)
        caught(Misaligned, kernel, 1, zeros(2, 16), 2)
        caught(OutOfBounds, kernel, 1, zeros(2, 16), 16)
        caught(OutOfBounds, kernel, 1, zeros(2, 16), -4)
    for kernel in (global_store, global_load):
        launch(kernel, 1, 1, zeros(2, 16), 4)
        caught(Misaligned, kernel, 1, zeros(2, 32)[:, ::2], 4)  # not contiguous
        caught(Misaligned, kernel, 1, zeros(2, 18)[:, 1:17], 4)  # rows at odd addresses


def test_vector_access_meets_hazards():
    def kernel(out, faulty, width):
        s = cuda.shared.array(8, float32)
        t = cuda.threadIdx.x
        store4(s, 4 * t, t, t, t, t)
        if faulty != 1:
            cuda.syncthreads()
        out[t, 0] = s[width]
        if faulty != 2:
            cuda.syncthreads()
        if t == 1:
            store4(s, 0, 5.0, 6.0, 7.0, 8.0)
        if faulty != 3:
            cuda.syncthreads()
        if t == 0:
            store4(out, (0, 0), *load4(s, 0))
        if faulty != 4:
            cuda.syncthreads()
        if t == 1:
            s[width] = float32(9.0)

    for width in range(4):  # each of the four elements is checked
        out = zeros(2, 4)
        launch(kernel, 1, 2, out, 0, width)
        assert out.tolist() == [[5, 6, 7, 8], [0, 0, 0, 0]]
        for faulty, thread in ((1, 1), (2, 1), (3, 0), (4, 1)):
            error = caught(SharedHazard, kernel, 2, zeros(2, 4), faulty, width)
            assert error.thread == (thread, 0, 0)
            assert f"s[{0 if faulty == 3 else width}]" in str(error)


def test_a_read_only_array_is_not_stored_to():
    def kernel(A):
        A[0] = 1

    A = zeros(1)
    launch(kernel, 1, 1, A)
    A.setflags(write=False)
    assert caught(ReadOnlyStore, kernel, 1, A).array == "A"


# ---- dynamic and static shared memory


def test_dynamic_shared_array():
    def kernel(out, e):
        s = cuda.shared.array(0, float32)
        t = cuda.threadIdx.x
        s[t] = float32(t)
        cuda.syncthreads()
        out[t] = s[e]

    out = zeros(8)
    launch(kernel, 1, 8, out, 5, shared_bytes=32)
    assert (out == 5).all()
    assert caught(OutOfBounds, kernel, 8, out, 8, shared_bytes=32).array == "s"
    caught(OutOfBounds, kernel, 8, out, 0, shared_bytes=28)


def test_dynamic_tiles_are_bounded_each():
    def kernel(out, e):
        sA = shared_tile(0, 8)
        sB = shared_tile(8, 8)
        t = cuda.threadIdx.x
        sA[t] = float32(t)
        sB[t] = float32(10 + t)
        cuda.syncthreads()
        out[0, t] = sA[7 - t]
        out[1, t] = sB[7 - t]
        sA[e]

    out = zeros(2, 8)
    launch(kernel, 1, 8, out, 7, shared_bytes=64)
    assert out.tolist() == [list(range(7, -1, -1)), list(range(17, 9, -1))]
    assert caught(OutOfBounds, kernel, 8, out, 8, shared_bytes=64).array == "sA"
    error = caught(EmulatorError, kernel, 8, out, 7, shared_bytes=63)
    assert error.array == "sB" and "63" in str(error)


def test_a_tile_laid_over_another_needs_a_barrier():
    def kernel(out, faulty):
        sA = shared_tile(0, 8)
        t = cuda.threadIdx.x
        sA[t] = float32(t)
        cuda.syncthreads()
        out[t] = sA[7 - t]
        if not faulty:
            cuda.syncthreads()
        sB = shared_tile(4, 4)
        if t >= 4:
            sB[t - 4] = float32(-1.0)
            out[t] = sA[t]

    out = zeros(8)
    launch(kernel, 1, 8, out, False, shared_bytes=32)
    assert out.tolist() == [7, 6, 5, 4, -1, -1, -1, -1]
    error = caught(SharedHazard, kernel, 8, zeros(8), True, shared_bytes=32)
    assert error.array == "sB" and "overwrites sB[0], which thread (3, 0, 0) read," in str(error)


def test_tiles_of_two_dtypes_must_not_overlap():
    def kernel(at):
        a = shared_tile(0, 4)
        b = words(at, 4)
        a[0], b[0] = 1, 2

    @intrinsic
    def words(offset, length):
        return emulator.current().shared_tile(offset, length, int32)

    launch(kernel, 1, 1, 4, shared_bytes=32)
    assert "only if their dtypes are equal" in str(
        caught(EmulatorError, kernel, 1, 3, shared_bytes=32)
    )


# ---- asynchronous copies


def staged(A, out, faulty):
    sA = shared_tile(0, 8)
    t = cuda.threadIdx.x
    copy(sA, 4 * t, A, (t, 0), 4, 4)
    commit_async()
    if faulty != "no wait":
        wait(0)
    if faulty == "own":
        out[t, 0] = sA[4 * t]
    if faulty != "no barrier":
        cuda.syncthreads()
    if faulty == "write":
        copy(sA, 4 * t, A, (t, 0), 4, 4)
        sA[4 * t] = float32(1.0)
    for k in range(4):
        out[1 - t, k] = sA[4 - 4 * t + k]
    if faulty == "exit":
        cuda.syncthreads()
        copy(sA, 4 * t, A, (t, 0), 4, 4)
        commit_async()
    if faulty == "exit uncommitted":
        cuda.syncthreads()
        copy(sA, 4 * t, A, (t, 0), 4, 4)
    if faulty == "unordered":
        copy(sA, 4 * t, A, (t, 0), 4, 4)
        commit_async()
        wait(0)


@pytest.mark.parametrize("clean", ["", "own"])
def test_async_copy(clean):
    A, out = ramp(2, 4), zeros(2, 4)
    counts = launch(staged, 1, 2, A, out, clean, shared_bytes=32)
    assert (out == A).all()
    assert counts.loads == {"A": 8}
    assert counts.stores == {"out": 8 + 2 * (clean == "own")}


@pytest.mark.parametrize(
    "faulty, message",
    [
        ("no wait", "copy into it is in flight, issued by thread (1, 0, 0)"),
        ("no barrier", "which thread (1, 0, 0) wrote, with no barrier between"),
        ("write", "copy into it is in flight, issued by thread (0, 0, 0)"),
        ("exit", "exits while its copy"),
        ("exit uncommitted", "exits while its copy"),
        ("unordered", "which thread (1, 0, 0) read,"),
    ],
)
def test_async_copy_hazards(faulty, message):
    error = caught(SharedHazard, staged, 2, ramp(2, 4), zeros(2, 4), faulty, shared_bytes=32)
    assert message in str(error)
    assert error.array == "sA"


def test_async_copy_read_by_its_own_thread_before_the_wait():
    def kernel(A, out, n):
        sA = shared_tile(0, 8)
        copy(sA, 0, A, (0, 0), 4, 4)
        commit_async()
        copy(sA, 4, A, (1, 0), 4, 4)
        commit_async()
        wait(n)
        for k in range(4):
            out[k] = sA[k]
        wait(0)

    out = zeros(4)
    launch(kernel, 1, 1, ramp(2, 4), out, 1, shared_bytes=32)
    assert out.tolist() == [0, 1, 2, 3]
    caught(SharedHazard, kernel, 1, ramp(2, 4), out, 2, shared_bytes=32)


def test_async_copy_lands_at_the_wait_and_fills_with_zeros():
    def kernel(A, out, valid):
        s = shared_tile(0, 4)
        Ab = A[0]
        copy(s, 0, Ab, (1, 4), 4, valid)
        commit_async()
        Ab[1, 4] = float32(100.0)
        wait(0)
        for k in range(4):
            out[k] = s[k]

    for valid, expected in ((3, [100, 13, 14, 0]), (1, [100, 0, 0, 0]), (0, [0, 0, 0, 0])):
        out = np.full(4, np.nan, np.float32)
        counts = launch(kernel, 1, 1, ramp(1, 2, 8), out, valid, shared_bytes=16)
        assert out.tolist() == expected
        assert counts.loads["A"] == valid


def test_async_copy_is_bounded_and_aligned():
    def kernel(A, e, column, n, valid):
        s = shared_tile(0, 8)
        copy(s, e, A, (0, column), n, valid)
        commit_async()
        wait(0)

    launch(kernel, 1, 1, ramp(1, 8), 4, 4, 4, 4, shared_bytes=32)
    launch(kernel, 1, 1, ramp(1, 7), 4, 4, 4, 3, shared_bytes=32)
    launch(kernel, 1, 1, ramp(1, 7), 5, 3, 1, 1, shared_bytes=32)
    launch(kernel, 1, 1, ramp(1, 7), 4, 80, 4, 0, shared_bytes=32)  # reads nothing
    caught(OutOfBounds, kernel, 1, ramp(1, 7), 4, 4, 4, 4, shared_bytes=32)
    caught(OutOfBounds, kernel, 1, ramp(1, 8), 8, 4, 4, 4, shared_bytes=32)
    caught(Misaligned, kernel, 1, ramp(1, 8), 2, 4, 4, 4, shared_bytes=32)
    caught(Misaligned, kernel, 1, ramp(1, 8), 4, 2, 4, 4, shared_bytes=32)
    caught(Misaligned, kernel, 1, ramp(1, 16)[:, ::2], 4, 4, 4, 4, shared_bytes=32)


# ---- counts, atomics, layouts, rounding


def test_counts_by_hand():
    def kernel(A, B, rows):
        b = cuda.blockIdx.x
        Ab = A[b]
        t = cuda.threadIdx.x
        if t < rows:
            Ab[t, 0] += Ab[t, 1] + A[b, t, 2]
            B[b, t] = int32(7)

    A, B = zeros(2, 3, 4), zeros(2, 3, dtype=np.int64)
    counts = launch(kernel, 2, 32, A, B, 3)
    assert counts.loads == {"A": 18}
    assert counts.stores == {"A": 6, "B": 6}
    assert counts.load_bytes == {"A": 72}
    assert counts.store_bytes == {"A": 24, "B": 48}
    assert counts.loads["B"] == 0
    twice = counts + counts
    assert twice.loads == {"A": 36} and counts.loads == {"A": 18}
    assert counts.merge(twice) is counts and counts.store_bytes == {"A": 72, "B": 144}


def test_atomics():
    def kernel(total, each, before):
        t = cuda.threadIdx.x
        cuda.atomic.add(total, (0, 0), t)
        before[cuda.blockIdx.x, t] = cuda.atomic.add(each, t, 2.5)

    total, each, before = zeros(1, 1, dtype=np.int32), zeros(64), zeros(3, 64)
    counts = launch(kernel, 3, 64, total, each, before)
    assert total[0, 0] == 3 * 2016 and (each == 7.5).all()
    assert (before == [[0], [2.5], [5]]).all()
    assert counts.loads == {"total": 192, "each": 192} and counts.stores["each"] == 192


def test_stores_round_to_single_precision():
    def kernel(x, out):
        s = cuda.shared.array(2, float32)
        r = cuda.local.array(2, float32)
        for k in range(2):
            s[k] = x[k]
            r[k] = x[k]
            out[0, k] = s[k] == x[k]
            out[1, k] = s[k]
            out[2, k] = r[k]
            out[3, k] = x[k] * 1.0
        store4(s2(), 0, x[0], x[0], x[0], x[0])

    @intrinsic
    def s2():
        return emulator.current().shared_tile(0, 4)

    x, out = np.array([0.1, 1e300]), zeros(4, 2)
    launch(kernel, 1, 1, x, out, shared_bytes=16)
    assert out.tolist() == [[0, 0], *[[float(np.float32(0.1)), math.inf]] * 3]


@pytest.mark.parametrize("lanes_agree", [True, False])
def test_scalars_have_their_type_and_its_rounding(lanes_agree):
    def kernel(x, out):
        t = cuda.threadIdx.x
        at = 0 if lanes_agree else t
        total, wide = float32(1.0), 1.0
        for _ in range(4096):
            total += x[0, at]
            wide += x[0, at]
        out[t, 0] = total
        out[t, 1] = wide
        out[t, 2] = x[1, at] * x[1, at] * float32(1e-30)
        out[t, 3] = x[1, at] * x[1, at] * 1e-30  # of no type: double
        out[t, 4] = x[1, at] * 1e30 * 1e-30
        out[t, 5] = math.exp(x[0, at]) - float32(1.0)

    small, large = 2.0**-26, np.float32(1e30)
    x, out = np.empty((2, 32), np.float32), np.zeros((32, 6))
    x[:] = np.array([[small], [large]])
    launch(kernel, 1, 32, x, out)
    wanted = [1, 1 + 4096 * small, math.inf, math.inf, large, 0]
    np.testing.assert_allclose(out, [wanted] * 32, rtol=1e-15)


def test_a_factor_that_is_added_at_once_is_not_rounded():
    """On a GPU it is one instruction, an fma."""

    def kernel(x, out):
        t = cuda.threadIdx.x
        r, s = cuda.local.array(1, float32), cuda.shared.array(32, float32)
        r[0] = s[t] = out[t] = -float32(1.0)
        r[0] += x[t] * x[t]
        s[t] += x[t] * x[t]
        out[t] += x[t] * x[t]
        out[t] = out[t] if out[t] == r[0] == s[t] else float32(0.0)

    x, out = np.full(32, 1 + 2.0**-12, np.float32), np.zeros(32, np.float32)
    launch(kernel, 1, 32, x, out)
    assert (out == np.float32(np.float64(x[0]) ** 2 - 1)).all()


def test_arrays_of_integers_wrap_around():
    def kernel(out):
        s = cuda.shared.array(1, uint32)
        s[0] = -1
        out[0] = s[0] + 2**31

    out = zeros(1, dtype=np.int32)
    launch(kernel, 1, 1, out)
    assert out[0] == 2**31 - 1


# ---- names, indices, rebinding


@cuda.jit(device=True, inline="always")
def doubled(x):
    return halved_in_vain(x) * 4


def halved_in_vain(x):
    return x * 0.5


def make_kernel(scale):
    step = np.int64(1)

    @cuda.jit(launch_bounds=(4, 1), fastmath=True)
    def kernel(out):
        i = cuda.grid(1)
        if i < out.size:
            out[i] = doubled(scale * (i + step)) + math.exp(-math.inf)

    return kernel


def test_jitted_kernels_device_functions_and_closures():
    for scale in (np.float32(1.0), 2.0):
        out = zeros(10)
        launch(make_kernel(scale), 3, 4, out)
        assert out.tolist() == [2 * float(scale) * (i + 1) for i in range(10)]


def test_indices():
    def kernel(out):
        x, y, z = cuda.grid(3)
        t, b, d, g = cuda.threadIdx, cuda.blockIdx, cuda.blockDim, cuda.gridDim
        place = x == b.x * d.x + t.x and y == b.y * d.y + t.y and z == b.z * d.z + t.z
        lane = cuda.laneid == (t.x + d.x * (t.y + d.y * t.z)) % 32
        if g.x == 2 and g.y == 3 and g.z == 1 and place and lane:
            out[z, y, x] += 1

    out = zeros(4, 9, 10)
    launch(kernel, (2, 3, 1), (5, 3, 4), out)
    assert (out == 1).all()


def test_the_gpu_gives_inf_where_python_raises():
    def kernel(out):
        out[0] = math.exp(1000.0)
        out[1] = math.log(0.0)
        out[2] = math.pow(10.0, 400.0)
        out[3] = math.sqrt(-1.0)

    out = zeros(4)
    launch(kernel, 1, 1, out)
    assert out[:3].tolist() == [math.inf, -math.inf, math.inf] and math.isnan(out[3])


def test_errors_of_the_kernel_say_which_thread():
    def kernel(out):
        t = cuda.threadIdx.x
        out[t] = 1 // (5 - t)

    with pytest.raises(ZeroDivisionError) as info:
        launch(kernel, (1, 2), (8, 2), zeros(8))
    text, place, line = str(info.value).split("\n")
    assert text == "the divisor of a // b is 0. Check the divisor before the division"
    assert place == "  in block (0, 0, 0), thread (5, 0, 0)"
    assert line.startswith("  at test_emulator.py:") and line.endswith("out[t] = 1 // (5 - t)")


def test_the_line_is_that_of_the_device_function():
    @cuda.jit(device=True)
    def helper(s, t):
        return s[t + 1]

    def kernel(out):
        sums = cuda.shared.array(4, float32)
        t = cuda.threadIdx.x
        sums[t] = float32(t)
        cuda.syncthreads()
        out[t] = helper(sums, t)

    error = caught(OutOfBounds, kernel, 4, zeros(4))
    assert error.line.endswith("return s[t + 1]")
    assert error.array == "sums" and error.thread == (3, 0, 0)


def test_nothing_is_left_running():
    with pytest.raises(BarrierDivergence):
        launch(barrier_for, 1, 64, zeros(64), 40)
    with pytest.raises(RuntimeError, match="no kernel is running"):
        emulator.current()
    launch(barrier_for, 1, 64, zeros(64), 64)


@pytest.mark.parametrize(
    "grid, block, args, kind, message",
    [
        (0, 1, (zeros(1), 1), ValueError, "grid must be .*, got 0"),
        (1, (1, 1, 1, 1), (zeros(1), 1), ValueError, "block"),
        (1, 1.5, (zeros(1), 1), ValueError, "block must be .*, got 1.5"),
        (1, 1025, (zeros(1), 1), ValueError, "1024"),
        (1, 1, (zeros(1),), TypeError, "barrier_for takes 2 arguments (.*), got 1"),
        (1, 1, (np.zeros(1, "M8[s]"), 1), TypeError, "datetime64"),
        (1, 1, (np.zeros(1, ">f4"), 1), TypeError, ">f4"),
    ],
)
def test_launches_that_cannot_be(grid, block, args, kind, message):
    with pytest.raises(kind, match=message):
        launch(barrier_for, grid, block, *args)


def exp2_of_a_pair(out):
    x = float32(cuda.threadIdx.x)
    out[cuda.threadIdx.x] = exp2((x, x) - x)


def pair_to_shared_memory(out):
    sums, t = cuda.shared.array(TILE, float32), cuda.threadIdx.x
    sums[t] = (float32(t), float32(t)) - float32(t)
    out[t] = sums[t]


@pytest.mark.parametrize("kernel", [exp2_of_a_pair, pair_to_shared_memory])
def test_a_pair_is_no_number(kernel):
    """Of a tuple and the lanes NumPy makes an array of two axes: nothing may be read or written
    beyond it, nor half of it be taken.
    """
    with pytest.raises(ValueError, match=r"\(2,\s?16\)|size 32"):
        launch(kernel, 1, TILE, zeros(TILE))


def test_launches_from_several_python_threads_do_not_mix():
    import sys
    from concurrent.futures import ThreadPoolExecutor

    import fa_numba

    q = np.random.default_rng(0).standard_normal((1, 1, 40, 8), dtype=np.float32)
    with fa_numba.device.using("emulator"):
        alone = fa_numba.flash_attention_2(q, q, q)

    def call(_):
        with fa_numba.device.using("emulator"):
            return fa_numba.flash_attention_2(q, q, q)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(4) as pool:
            results = list(pool.map(call, range(8)))
    finally:
        sys.setswitchinterval(interval)
    assert all((result == alone).all() for result in results)
