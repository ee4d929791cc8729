"""Launches use the shared memory of earlier launches again, and find only their own faults."""

import gc

import numpy as np
import pytest

import fa_numba
from fa_numba import emulator
from fa_numba.device import cuda, float32
from fa_numba.emulator import SharedHazard, UninitialisedRead
from fa_numba.emulator.global_memory import GlobalArray
from fa_numba.emulator.run import Launch
from fa_numba.emulator.shared_memory import SharedArray, Spares, spares

THREADS = 64
FLOAT32 = np.dtype(np.float32)


@pytest.fixture(autouse=True)
def no_spares():
    """The first launch of a test makes new buffers."""
    spares.buffers.clear()


def turned(out, rounds, barrier):
    """Write the numbers of the threads in reverse order, after some barriers."""
    t, s = cuda.threadIdx.x, cuda.shared.array(THREADS, float32)
    for _ in range(rounds):
        cuda.syncthreads()
    s[t] = t
    if barrier:
        cuda.syncthreads()
    out[t] = s[THREADS - 1 - t]


def read_alone(out):
    s = cuda.shared.array(THREADS, float32)
    out[cuda.threadIdx.x] = s[cuda.threadIdx.x]


def launch(kernel, *args):
    out = np.zeros(THREADS, np.float32)
    return emulator.launch(kernel, 1, THREADS, out, *args), out


def test_reads_of_an_earlier_launch_are_no_race():
    """The reads of the first launch come after many barriers, the writes of the second before."""
    found = []
    for rounds in (20, 0):
        counts, out = launch(turned, rounds, True)
        assert (out == np.arange(THREADS)[::-1]).all()
        found.append(next(iter(spares.buffers.values())))
        assert counts.stores == {"out": THREADS}
    assert found[0] is found[1]


def test_faults_are_found_in_a_used_buffer():
    launch(turned, 3, True)
    with pytest.raises(SharedHazard, match="which thread"):
        launch(turned, 0, False)
    launch(turned, 3, True)
    with pytest.raises(UninitialisedRead, match="was never written"):
        launch(read_alone)


def test_a_launch_inside_another_launch_leaves_it_no_buffers():
    """The clock of the outer launch is older than the stamps of the inner launch."""
    ours = Spares()
    outer = ours.clock
    ours.keep([ours.take(outer, 1, 8, 2, FLOAT32)], 2, 5)
    kept = next(iter(ours.buffers.values()))
    assert ours.take(outer, 1, 8, 2, FLOAT32) is not kept
    assert ours.take(5, 1, 8, 2, FLOAT32) is kept and not ours.buffers
    ours.keep([kept], 2, 3)
    assert ours.clock == 5


@pytest.mark.parametrize("other", [(2, 8, 2, FLOAT32), (1, 9, 2, FLOAT32), (1, 8, 3, FLOAT32)])
def test_a_buffer_of_another_kind_is_new(other):
    ours = Spares()
    ours.keep([ours.take(0, 1, 8, 2, FLOAT32)], 2, 0)
    made = ours.take(0, *other)
    assert (made.data.shape, made.reads.shape[1]) == ((other[0], other[1]), other[2])
    assert len(ours.buffers) == 1
    assert ours.take(0, 1, 8, 2, np.dtype(np.int32)).data.dtype == np.int64


def test_marks_of_reads_and_of_atomic_operations_are_removed():
    """Two of five rows of `reads` belong to warps."""
    ours = Spares()
    buffer = ours.take(0, 1, 8, 5, FLOAT32)
    buffer.reads[:], buffer.touched[:], buffer.written[:] = 7, 7, 7
    buffer.atomics = buffer.plain = np.ones((1, 8), np.int64)
    ours.keep([buffer], 2, 9)
    again = ours.take(9, 1, 8, 5, FLOAT32)
    assert again is buffer and buffer.atomics is None and buffer.plain is None
    assert (buffer.reads[0, :2] == 7).all() and not buffer.reads[0, 2:].any()
    assert not buffer.touched.any() and (buffer.written == emulator.checks.UNWRITTEN).all()


def test_old_buffers_are_dropped(monkeypatch):
    ours = Spares()
    each = ours.take(0, 1, 8, 2, FLOAT32).nbytes
    monkeypatch.setattr("fa_numba.emulator.shared_memory.MOST_SPARE", 2 * each + 100)
    for warps in (2, 3, 4):
        ours.keep([ours.take(0, 1, 8, warps, FLOAT32)], warps, 0)
    assert [kind[1] for kind in ours.buffers] == [4]


def test_a_launch_with_an_error_leaves_no_buffers():
    with pytest.raises(SharedHazard):
        launch(turned, 0, False)
    assert not spares.buffers


def with_modules():
    """A call whose kernel takes device functions from modules."""
    q = np.ones((1, 2, 5, 8), np.float32)
    fa_numba.attention(q, q, q)


def with_views():
    def kernel(out):
        out[0][cuda.threadIdx.x] = 1.0

    emulator.launch(kernel, 1, 8, np.zeros((2, 8), np.float32))


@pytest.mark.parametrize("call", [lambda: launch(turned, 3, True), with_modules, with_views])
def test_a_launch_is_freed_at_its_end(call):
    """By reference counts, before Python's garbage collector runs."""

    def alive():
        return sum(type(each) in (Launch, SharedArray, GlobalArray) for each in gc.get_objects())

    call()
    gc.collect()
    before = alive()
    gc.disable()
    try:
        call()
        assert alive() == before
    finally:
        gc.enable()
