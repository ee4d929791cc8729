"""The order of what functions for the GPU enqueue and wait for, with stand-ins for the driver; and
how the emulator runs a kernel of ours.
"""

from types import SimpleNamespace

import numpy as np
import pytest
from numba import cuda

from fa_numba import device as devices
from fa_numba.device import memory, timing
from fa_numba.emulator import OutOfBounds


class Cuda:
    """Notes what is enqueued. An event's time is the number of what was enqueued before it."""

    def __init__(self):
        self.done = []
        self.cudadrv = SimpleNamespace(driver=SimpleNamespace(device_memset=self.memset))

    def device_array(self, size, dtype):
        self.done.append(f"array of {size} {dtype.__name__}")
        return SimpleNamespace(size=size)

    def memset(self, array, value, size):
        self.done.append(f"{size} bytes of {array.size} are {value}")

    def event(self):
        event = SimpleNamespace(at=None, waited=False)

        def record():
            event.at = len(self.done)
            self.done.append("event")

        def synchronize():
            event.waited = True

        event.record, event.synchronize = record, synchronize
        return event

    def event_elapsed_time(self, start, stop):
        assert stop.waited
        return stop.at - start.at


@pytest.mark.parametrize("l2_bytes, size", [(50 << 20, 1 << 30), (1 << 30, 1 << 32), (None, 0)])
def test_the_l2_cache_is_overwritten_before_each_timed_call(monkeypatch, l2_bytes, size):
    """Twice, outside of the timed interval; with `flush_l2` only."""
    cuda = Cuda()
    monkeypatch.setattr(timing, "cuda", cuda)
    monkeypatch.setattr(timing.select, "describe", lambda: {"l2_bytes": l2_bytes})
    flush = l2_bytes is not None
    times = timing.time_ms(lambda: cuda.done.append("call"), repeats=3, warmup=2, flush_l2=flush)
    assert times == [2.0] * 3
    array, fill = [f"array of {size} uint8"] * flush, [f"{size} bytes of {size} are 0"] * 2 * flush
    assert cuda.done == [*array, "call", "call", *[*fill, "event", "call", "event"] * 3]


@pytest.fixture
def done(monkeypatch):
    """What the functions of `memory` do, in this order."""
    done = []

    def note(what, result=None):
        return lambda *_, **__: done.append(what) or result

    array = SimpleNamespace(copy_to_host=lambda stream=0: done.append(f"copy on {stream}") or 7)
    context = SimpleNamespace(deallocations=SimpleNamespace(clear=note("free arrays")))
    cuda = SimpleNamespace(
        synchronize=note("wait for all"),
        external_stream=lambda n: SimpleNamespace(synchronize=note(f"wait for {n}")),
        current_context=lambda: context,
        get_current_device=lambda: SimpleNamespace(id=3),
        as_cuda_array=lambda x: array,
    )
    monkeypatch.setattr(memory, "cuda", cuda)
    monkeypatch.setattr(memory, "pool", lambda ordinal: SimpleNamespace(handle=f"pool {ordinal}"))

    def trim(handle, least):
        done.append(f"trim {handle} to {least}")

    monkeypatch.setattr(memory, "driver", SimpleNamespace(cuMemPoolTrimTo=trim))
    return done


def test_memory_is_released_after_the_work_that_uses_it(done):
    memory.release_memory()
    assert done == ["wait for all", "free arrays", "trim pool 3 to 0"]


def test_results_are_copied_after_the_work_that_makes_them(done):
    assert memory.copied_to_host(None) == 7
    assert done == ["wait for all", "copy on 0"]


@pytest.mark.parametrize("stream, wait", [(0, "wait for all"), (5, "wait for 5")])
def test_a_copy_on_a_stream_is_waited_for(done, stream, wait):
    array = SimpleNamespace(copy_to_host=lambda stream: done.append("copy") or 7)
    out = np.zeros(2)
    memory.to_host(array, out, stream)
    assert done == ["copy", wait] and (out == 7).all()


def test_an_index_below_0_does_not_count_from_the_end_in_a_kernel_of_ours():
    def function(X):
        X[cuda.threadIdx.x - 1] = 1

    kernel = devices.Kernel(function, (devices.array_type(1),), 32, 0)
    with devices.using("emulator"), pytest.raises(OutOfBounds, match=r"X\[-1\] is outside"):
        devices.launch(kernel, (1,), (np.zeros(64, np.float32),))
