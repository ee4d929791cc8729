"""Numba's examples and STUMPY's kernels on the emulator, and the mistakes planted in them."""

import io
import math
import re
from pathlib import Path

import numba_examples
import numpy as np
import pytest
from numba import cuda, float32, int32
from numba.cuda import libdevice
from numba.cuda.random import xoroshiro128p_next
from numba_examples import EXAMPLES, PRICES, TILE, add_up, draws, multiply_by_tiles, product

from fa_numba import emulator
from fa_numba.emulator import (
    BarrierDivergence,
    Deadlock,
    GlobalHazard,
    NotEmulated,
    OutOfBounds,
    SharedHazard,
    TimeLimit,
    UninitialisedRead,
    launch,
    progress,
)

README = Path(emulator.__file__).with_name("README.md")
FULL = 0xFFFFFFFF


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_gives_what_numpy_gives(name):
    found, expected = EXAMPLES[name]()
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_the_readme_lists_every_example():
    text = README.read_text()
    assert [name for name in EXAMPLES if f"| {name} |" not in text] == []


# ---- planted mistakes


@pytest.mark.parametrize(
    "barriers, line, said",
    [
        (
            (False, True),
            "total += tile_of_A[i, k]",
            "reads tile_of_A[0, 0], which thread (0, 0, 0)",
        ),
        ((True, False), "tile_of_A[i, j] = 0", r"overwrites tile_of_A[0, 0], which"),
    ],
    ids=["first", "last"],
)
def test_a_matrix_product_without_a_barrier(barriers, line, said):
    with pytest.raises(SharedHazard, match=re.escape(said)) as info:
        product(multiply_by_tiles, *barriers)
    error = info.value
    assert error.block == (0, 0, 0) and error.array == "tile_of_A"
    assert line in error.line and error.line.startswith("numba_examples.py:")


def test_a_reduction_without_a_barrier():
    x, total = np.arange(128), np.zeros(1, np.int64)
    with pytest.raises(SharedHazard, match="reads values.*, which thread .* wrote") as info:
        launch(add_up, 1, 128, x, total, False, shared_bytes=1024)
    assert info.value.array == "values" and "values[t] += values[t + distance]" in info.value.line
    counts = launch(add_up, 1, 128, x, total, False, shared_bytes=1024, races="report")
    assert {type(each) for each in counts.reports} == {SharedHazard}
    assert len({each.line for each in counts.reports}) == len(counts.reports) == 1
    assert launch(add_up, 1, 128, x, total, False, shared_bytes=1024, races="ignore").reports == []


def test_an_index_outside_of_an_array():
    A, B, C = draws(8, 12), draws(8, 8), np.zeros((8, 8), np.float32)

    @cuda.jit
    def unguarded(A, B, C):
        row, column = cuda.grid(2)
        total = float32(0.0)
        for k in range(A.shape[1]):
            total += A[row, k] * B[k, column]
        C[row, column] = total

    with pytest.raises(OutOfBounds, match=r"^B\[8, 0\] is outside the array of 8 x 8") as info:
        launch(unguarded, 1, (8, 8), A, B, C)
    assert info.value.thread == (0, 0, 0) and info.value.array == "B"

    @cuda.jit
    def left_neighbour(x, out):
        i = cuda.grid(1)
        out[i] = x[i - 1]

    x, out = np.arange(4.0), np.zeros(4)
    launch(left_neighbour, 1, 4, x, out)
    assert out.tolist() == [3, 0, 1, 2]  # as by Numba
    with pytest.raises(OutOfBounds, match=r"x\[-1\] is outside .*Numba would count an index"):
        launch(left_neighbour, 1, 4, x, out, wraparound=False)

    @cuda.jit
    def column_outside(out):
        tile = cuda.shared.array((TILE, TILE), float32)
        tile[cuda.threadIdx.x, TILE] = 1

    with pytest.raises(OutOfBounds, match=r"tile\[0, 8\] is outside the array of 8 x 8 elements"):
        launch(column_outside, 1, 4, np.zeros(4))


def test_races_of_thread_blocks_are_reported_and_the_launch_goes_on():
    @cuda.jit
    def count(x):
        x[cuda.threadIdx.x] += 1

    x = np.zeros(8)
    with pytest.raises(GlobalHazard, match="block .0, 0, 0. wrote"):
        launch(count, 4, 8, x)
    x[:] = 0
    counts = launch(count, 4, 8, x, races="report")
    assert [(each.array, each.block) for each in counts.reports] == [("x", (1, 0, 0))]
    assert x.tolist() == [4] * 8 and counts.loads == {"x": 32}
    assert len((counts + counts).reports) == 2


# ---- lanes that leave at different times


def leave(out, limits):
    t = cuda.grid(1)
    total = 0
    for i in range(20):
        if i % 3 == t % 3:
            continue
        j = 0
        while True:
            j += 1
            if j > t % 7:
                break
            if j == 5:
                total += 1000
                continue
            total += j
        if total > limits[t]:
            total += 100_000
            break
        total += 1
    if t % 5 == 0:
        out[t] = -total
        return
    for i in range(t):
        if i == 10:
            return
        out[t] += total + i


def test_break_continue_and_return_of_some_lanes(monkeypatch):
    limits = np.random.default_rng(0).integers(0, 9000, 96)
    out, expected = np.zeros((2, 96), np.int64)
    launch(leave, 3, 32, out, limits)
    for t in range(96):
        monkeypatch.setattr(cuda, "grid", lambda axes, t=t: t)
        leave(expected, limits)
    assert out.tolist() == expected.tolist()


def test_a_return_before_a_barrier():
    @cuda.jit
    def early(x):
        i = cuda.grid(1)
        if i >= x.size:
            return
        cuda.syncthreads()

    with pytest.raises(BarrierDivergence, match="threads .20, 0, 0.*: returned"):
        launch(early, 1, 32, np.zeros(20))


# ---- the functions of numba.cuda


def test_bits_votes_and_shuffles():
    @cuda.jit
    def kernel(out):
        t = cuda.grid(1)
        out[t, 0] = cuda.popc(t)
        out[t, 1] = cuda.clz(t)
        out[t, 2] = cuda.ffs(t)
        out[t, 3] = cuda.brev(t)
        out[t, 4] = cuda.selp(t % 2 == 0, 5, 6)
        out[t, 5] = cuda.ballot_sync(FULL, t % 2)
        out[t, 6] = cuda.shfl_down_sync(FULL, t, 3)
        out[t, 7] = cuda.shfl_up_sync(FULL, t, 3)
        out[t, 8] = cuda.syncthreads_count(t % 3 == 0)
        out[t, 9] = cuda.match_any_sync(FULL, t % 8)
        out[t, 10] = cuda.all_sync(FULL, t >= 0) + 2 * cuda.any_sync(FULL, t % 32 == 31)
        out[t, 11] = cuda.lanemask_lt()
        out[t, 12] = cuda.syncthreads_and(t < 64) + 2 * cuda.syncthreads_or(t == 70)
        mask, same = cuda.match_all_sync(FULL, t // 32)
        out[t, 13] = mask * same
        out[t, 14] = cuda.eq_sync(FULL, t < 33)
        if t % 2:
            out[t, 15] = cuda.activemask()

    out = np.zeros((128, 16), np.int64)
    launch(kernel, 2, 64, out)
    for t in range(128):
        lane, first = t % 32, t // 64 * 64
        assert out[t].tolist() == [
            t.bit_count(), 32 - t.bit_length(), (t & -t).bit_length(),
            int(f"{t:032b}"[::-1], 2), 6 - (t % 2 == 0), 0xAAAAAAAA, t + 3 * (lane < 29),
            t - 3 * (lane > 2), sum(k % 3 == 0 for k in range(first, first + 64)),
            sum(1 << k for k in range(lane % 8, 32, 8)), 3, (1 << lane) - 1,
            (1 if t < 64 else 2), FULL, t // 32 != 1, 0xAAAAAAAA * (t % 2),
        ]  # fmt: skip


UPDATES = {
    "add": (lambda old, x: old + x), "sub": (lambda old, x: old - x), "max": max, "min": min,
    "and_": (lambda old, x: old & x), "or_": (lambda old, x: old | x),
    "xor": (lambda old, x: old ^ x), "exch": (lambda old, x: x), "nanmax": max, "nanmin": min,
    "inc": (lambda old, x: 0 if old >= x else old + 1),
    "dec": (lambda old, x: x if old == 0 or old > x else old - 1),
}  # fmt: skip


@pytest.mark.parametrize("name", UPDATES)
def test_atomic_operations(name):
    update = getattr(cuda.atomic, name)

    @cuda.jit
    def kernel(x, shared, found, unused, old):
        tile = cuda.shared.array((2, 2), int32)
        t = cuda.threadIdx.x
        if t < 4:
            tile[t // 2, t % 2] = 9
        cuda.syncthreads()
        old[t] = update(found, t % 4, x[t])
        update(tile, (t % 4 // 2, t % 2), x[t])
        cuda.syncthreads()
        if t < 4:
            shared[t] = tile[t // 2, t % 2]

    @cuda.jit
    def without_result(x, unused):
        cuda.atomic.add(unused, 1, 0)
        update(unused, 0, x[cuda.grid(1)])

    x = np.random.default_rng(0).integers(0, 20, 32, dtype=np.int32)
    shared, found, unused = np.full((3, 4), 9, np.int32)
    old = np.zeros(32, np.int32)
    launch(kernel, 1, 32, x, shared, found, unused, old)
    launch(without_result, 2, 16, x, unused)
    expected, before, first = [9] * 4, [], 9
    for t, value in enumerate(x.tolist()):
        before.append(expected[t % 4])
        expected[t % 4] = UPDATES[name](expected[t % 4], value)
        first = UPDATES[name](first, value)
    assert found.tolist() == shared.tolist() == expected and old.tolist() == before
    assert unused[0] == first


def test_compare_and_swap():
    @cuda.jit
    def kernel(lock, winners, first):
        t = cuda.threadIdx.x
        if cuda.atomic.cas(lock, 0, 0, t + 1) == 0:
            winners[t] = 1
        if cuda.atomic.compare_and_swap(first, -1, t) == -1:
            winners[t] += 2

    lock, winners, first = np.zeros(1, np.int32), np.zeros(32, np.int32), np.full(1, -1)
    launch(kernel, 1, 32, lock, winners, first)
    assert winners.sum() == 3 and lock[0] == 1 and first[0] == 0


def atomics_beside(x, out, when):
    s, t = cuda.shared.array(1, int32), cuda.threadIdx.x
    if t == 0 and when != "never set":
        s[0] = 0
    if when != "set":
        cuda.syncthreads()
    cuda.atomic.add(s, 0, x[t])
    if when == "stored":
        s[0] = 0
    if when != "read":
        cuda.syncthreads()
    out[t] = s[0]


@pytest.mark.parametrize(
    "when, error, said",
    [
        ("set", SharedHazard, r"atomically updates s\[0\], which thread .0, 0, 0. wrote"),
        ("stored", SharedHazard, r"overwrites s\[0\], which several threads atomically updated"),
        ("read", SharedHazard, r"reads s\[0\], which several threads atomically updated"),
        ("never set", UninitialisedRead, r"s\[0\] is read, but was never written"),
    ],
)
def test_atomics_race_with_other_accesses(when, error, said):
    x, out = np.arange(64), np.zeros(64, np.int64)
    launch(atomics_beside, 2, 64, x, np.zeros(64, np.int64), "", races="ignore")
    launch(atomics_beside, 1, 64, x, out, "")
    assert (out == x.sum()).all()
    with pytest.raises(error, match=said):
        launch(atomics_beside, 1, 64, x, out, when)


def test_a_device_function_of_another_module():
    @cuda.jit
    def kernel(values, x, out):
        i = cuda.grid(1)
        out[i] = numba_examples.place_of(values, x[i]) + numba_examples.PRICES[0]

    values, x, out = np.array([1.0, 3, 5]), np.arange(6.0), np.zeros(6)
    counts = launch(kernel, 1, 6, values, x, out)
    assert out.tolist() == (np.searchsorted(values, x, "right") + 2).tolist()
    (access,) = (each for each in counts.traffic if each.array == "values")
    assert access.line.startswith("numba_examples.py:")  # not the line of the call


def test_complex_numbers_and_records():
    pairs = np.zeros(64, [("x", "f4"), ("n", "i4")])
    pairs["n"] = np.arange(64)

    @cuda.jit
    def kernel(z, pairs, copied, out):
        i, t = cuda.grid(1), cuda.threadIdx.x
        s = cuda.shared.array(32, np.complex128)
        s[t] = z[i]
        cuda.syncthreads()
        out[i] = s[31 - t] * z[i].conjugate() + 1j
        pairs[i].x = abs(z[i]) + pairs.n[i]
        pairs[i]["n"] = -i
        copied[i] = pairs[i]

    z = draws(64, dtype=np.float64) + 1j * draws(64, seed=1)
    out, copied = np.zeros(64, complex), np.zeros_like(pairs)
    counts = launch(kernel, 2, 32, z, pairs, copied, out)
    np.testing.assert_allclose(out, z.reshape(2, 32)[:, ::-1].ravel() * z.conj() + 1j)
    np.testing.assert_allclose(pairs["x"], abs(z) + np.arange(64), rtol=1e-6)
    assert (copied == pairs).all() and (pairs["n"] == -np.arange(64)).all()
    assert counts.stores["pairs.x"] == counts.loads["pairs.x"] == 64


def test_random_numbers_are_numbas():
    @cuda.jit
    def kernel(states, out):
        i = cuda.grid(1)
        for n in range(3):
            out[i, n] = xoroshiro128p_next(states, i)

    out, states = np.zeros((3, 3), np.uint64), emulator.create_xoroshiro128p_states(3, 5, 1)
    assert (states == emulator.create_xoroshiro128p_states(4, 5)[1:]).all()
    launch(kernel, 3, 1, states, out)
    assert out.tolist() == [  # by numba.cuda.random on the CPU
        [5613337715404341026, 10512574679060748377, 13868999054939427057],
        [9911306941504885663, 10837155254273547311, 13174212717642510377],
        [6875730080119137711, 12552941912125701102, 2383470079491622301],
    ]
    with pytest.raises(ValueError, match="n must be an integer of at least 1, got 0"):
        emulator.create_xoroshiro128p_states(0, 5)


def test_literal_negative_indices_count_from_the_end():
    @cuda.jit
    def kernel(x, out):
        s, l = cuda.shared.array((2, 3), float32), cuda.local.array(3, float32)
        s[-1, -2] = x[-1]
        l[-3] = s[1, 1] + 1
        out[-1] = l[0] + x.shape[-1]

    for wraparound in (False, True):
        out = np.zeros(2)
        launch(kernel, 1, 1, np.arange(4.0), out, wraparound=wraparound)
        assert out.tolist() == [0, 8]


def test_negative_indices_count_from_the_end():
    @cuda.jit
    def kernel(x, out):
        s, l, t = cuda.shared.array((1, 4), float32), cuda.local.array(4, float32), cuda.threadIdx.x
        flat = cuda.shared.array(4, int32)
        s[t // 4 - 1, t - 4] = x[t]
        flat[t] = 0
        cuda.syncthreads()
        cuda.atomic.add(flat, t - 4, t)
        for k in range(4):
            l[k - 4] = s[0, k]
        out[t - 4] = s[0, t - 1] + 10 * l[t - 2] + 100 * flat[t - 4]

    x, out = np.arange(5.0, 9.0), np.zeros(4)
    launch(kernel, 1, 4, x, out)
    assert (out == np.roll(x, 1) + 10 * np.roll(x, 2) + 100 * np.arange(4)).all()


# ---- waiting for the grid


def test_a_barrier_of_the_grid_that_is_missing_or_not_reached():
    @cuda.jit
    def rows(M, every):
        column, grid = cuda.grid(1), cuda.cg.this_grid()
        for row in range(1, M.shape[0]):
            M[row, column] = M[row - 1, M.shape[1] - 1 - column] + 1
            if row % every == 0:
                grid.sync()

    with pytest.raises(GlobalHazard, match=r"overwrites M\[1, 8\], which block .0, 0, 0. read"):
        launch(rows, 2, 8, np.zeros((5, 16)), 2)

    @cuda.jit
    def some(M):
        if cuda.blockIdx.x == 1:
            cuda.cg.this_grid().sync()

    with pytest.raises(Deadlock, match=r"block \(0, 0, 0\) has ended without reaching it"):
        launch(some, 2, 8, np.zeros(1))


# ---- what a launch refuses


def _made(statement):
    """Return a kernel that runs one of the statements that are not emulated."""

    @cuda.jit
    def of_libdevice(x):
        x[0] = libdevice.fast_expf(x[0])

    @cuda.jit
    def of_cuda(x):
        x[0] = cuda.ldcg(x, 0)

    @cuda.jit
    def of_numpy(x):
        x[0] = np.zeros(1)[0]

    @cuda.jit
    def of_atomic(x):
        cuda.atomic.multiply(x, 0, 2)

    return locals()[statement]


@pytest.mark.parametrize(
    "statement, name",
    [
        ("of_libdevice", "numba.cuda.libdevice.fast_expf"),
        ("of_cuda", "cuda.ldcg"),
        ("of_numpy", "numpy.zeros"),
        ("of_atomic", "cuda.atomic.multiply"),
    ],
)
def test_a_function_that_is_not_emulated_is_named(statement, name):
    with pytest.raises(NotEmulated, match=f"^{re.escape(name)} is not emulated. The ") as info:
        launch(_made(statement), 1, 4, np.zeros(1))
    assert "test_numba_examples.py:" in info.value.line


class OnGpu:
    __cuda_array_interface__ = {}


class Tensor:
    def __dlpack__(self):
        raise AssertionError("not converted without being asked")


@pytest.mark.parametrize(
    "args, options, error, message",
    [
        (
            ([1.0],),
            {},
            TypeError,
            r"x must be a NumPy array.*got builtins.list. Pass np.asarray\(x",
        ),
        ((Tensor(),), {}, TypeError, r"Tensor. Pass np.asarray\(x\), which shares the memory"),
        ((OnGpu(),), {}, TypeError, "OnGpu. Pass a copy of x in CPU memory"),
        ((PRICES, 1), {}, TypeError, r"takes 1 arguments \(x\), got 2"),
        ((PRICES,), {"races": "off"}, ValueError, "'raise', 'report', 'ignore', got 'off'"),
        ((PRICES,), {"time_limit": 0}, ValueError, "time_limit must be .* above 0, or None, got 0"),
    ],
)
def test_what_a_launch_refuses(args, options, error, message):
    def kernel(x):
        x[0] = 1

    with pytest.raises(error, match=message):
        launch(kernel, 1, 1, *args, **options)


def test_arguments_in_a_tuple_are_a_mistake_that_is_explained():
    def kernel(x, y):
        y[0] = x[0]

    with pytest.raises(TypeError, match="pass the arguments one by one: launch.kernel, grid"):
        launch(kernel, 1, 1, (np.zeros(1), np.zeros(1)))


def test_shapes_that_are_no_constants():
    def kernel(x):
        x[0] = cuda.shared.array((2, cuda.threadIdx.x), float32)[0, 0]

    with pytest.raises(TypeError, match="shape of cuda.shared.array must be an integer or a tuple"):
        launch(kernel, 1, 4, np.zeros(1))


# ---- time


class Terminal(io.StringIO):
    def isatty(self):
        return True


def spin(x):
    while x[0] == 0:
        pass


def test_the_time_limit_and_the_progress_bar(monkeypatch):
    shown, clock = Terminal(), iter(np.arange(0.0, 1e6, 0.75))
    monkeypatch.setattr(progress, "monotonic", lambda: next(clock))
    monkeypatch.setattr("sys.stderr", shown)
    with pytest.raises(TimeLimit, match="kernel spin has run for 5 s .* no thread block has ended"):
        launch(spin, 2, 4, np.zeros(1), time_limit=5)
    text = shown.getvalue()
    assert "\rspin [" in text and "0 of 2 thread blocks, 2 s" in text and text.endswith("\x1b[K")
    assert "10 of 40 thread blocks have ended, all need 12 s" in _late(limit=2, done=10, blocks=40)
    assert not math.isinf(progress.Progress("k", 1, None).shown)


def _late(limit, done, blocks):
    found = progress.Progress("kernel", blocks, limit)
    found.done, found.begun = done, found.begun - 2.25
    return found.late()
