"""Bounds of the emulator: numbers of threads, blocks at once, and what it remembers at most."""

import numpy as np
import pytest
from numba import cuda, float32

import fa_numba
from fa_numba import Tiles
from fa_numba.emulator import (
    GlobalHazard,
    SharedHazard,
    active,
    batches,
    context,
    knowledge,
    launch,
    local_memory,
)
from fa_numba.emulator.checks import LOCAL, PITCH, SEVERAL, SHIFT, STAMP
from fa_numba.emulator.run import MAX_THREADS

THREADS = 1024  # of a block, the most


def reversed_rows(x, y, meets):
    s = cuda.shared.array(1024, float32)
    t, b = cuda.threadIdx.x, cuda.blockIdx.x
    s[t] = x[b, t]
    if meets:
        cuda.syncthreads()
    y[b, t] = s[1023 - t]


def test_blocks_of_1024_threads_run_two_at_once_and_have_numbers_of_their_own():
    x, y = np.arange(3 * THREADS, dtype=np.float32).reshape(3, -1), np.zeros((3, THREADS), "f4")
    assert batches.blocks_at_once((3, 1, 1), (THREADS, 1, 1)) == 2
    launch(reversed_rows, 3, THREADS, x, y, True)
    assert np.array_equal(y, x[:, ::-1])
    with pytest.raises(SharedHazard, match="thread"):
        launch(reversed_rows, 3, THREADS, x, y, False)
    with pytest.raises(ValueError, match="1024"):
        launch(reversed_rows, 1, THREADS + 1, x, y, True)


def test_the_most_blocks_at_once_do_not_share_memory():
    def own(x, y):
        s = cuda.shared.array(32, float32)
        t, b = cuda.threadIdx.x, cuda.blockIdx.x
        s[t] = x[b, t]
        cuda.syncwarp()
        y[b, t] = s[31 - t]

    x, y = np.arange(130 * 32, dtype=np.float32).reshape(130, 32), np.zeros((130, 32), "f4")
    assert batches.blocks_at_once((130, 1, 1), (32, 1, 1)) == batches.MOST_BLOCKS == 64
    launch(own, 130, 32, x, y)
    assert np.array_equal(y, x[:, ::-1])


@pytest.mark.parametrize("first, second", [(0, 1023), (1023, 31), (512, 1023), (992, 1023)])
def test_a_race_of_any_two_threads_is_found(first, second):
    """In shared and in global memory, and none where each thread has an element of its own."""

    def race(y, first, second, in_shared):
        s, t = cuda.shared.array(1024, float32), cuda.threadIdx.x
        s[t] = t
        y[t] = t
        is_first, is_second = t == first, t == second
        if is_first or is_second:
            if in_shared:
                s[second] = t
            else:
                y[second] = t

    y = np.zeros(THREADS, np.float32)
    for in_shared, error in ((True, SharedHazard), (False, GlobalHazard)):
        with pytest.raises(error):
            launch(race, 1, THREADS, y, first, second, in_shared)
        launch(race, 1, THREADS, y, first, first, in_shared)


def test_numbers_of_threads_fit_their_words():
    """A stamp is a time and one of 1,024 threads, of their warps or of the products of warps."""
    assert PITCH == 1 << SHIFT == LOCAL + 1 == MAX_THREADS == SEVERAL == STAMP // 2
    assert SEVERAL + 512 + MAX_THREADS // 32 < STAMP


SHRUNK = {
    (active, "MOST_KNOWN"): 1,
    (local_memory, "MOST_WAITING"): 1,
    (context, "MOST_ACCESSES"): 8,
    (knowledge, "MOST_FENCES"): 4,
    (batches, "LANES"): 96,
    (batches, "MOST_BLOCKS"): 2,
}


def test_what_is_remembered_changes_no_result_and_no_count(monkeypatch):
    """With room for less the emulator looks again, or runs fewer thread blocks at once."""
    draw = np.random.default_rng(0)
    q, k = (draw.standard_normal((1, 2, n, 8)).astype(np.float32) for n in (9, 20))

    def called():
        with fa_numba.count_accesses() as counts:
            found = fa_numba.attention(q, k, k, causal=True, unit="simt", tiles=Tiles(8, 8))
        return found, counts.total()

    found, counted = called()
    for (module, constant), least in SHRUNK.items():
        monkeypatch.setattr(module, constant, least)
    again, now = called()
    assert np.array_equal(found, again) and counted == now


def test_bits_are_those_of_words_of_32_and_64_bits():
    ends = (-(2**63), -(2**31) - 1, -(2**31), -1, 0, 2**31, 2**32 - 1, 2**32, 2**63 - 1)
    for value in ends:
        found = np.zeros(2, np.int64)

        def kernel(found, value):
            found[0] = cuda.popc(value)
            found[1] = cuda.clz(value)

        launch(kernel, 1, 1, found, value)
        width = 32 if -(2**31) <= value < 2**32 else 64
        word = value % 2**width
        assert found.tolist() == [word.bit_count(), width - word.bit_length()], value
