"""The order of what `time_ms` enqueues, with a stand-in for the driver."""

from types import SimpleNamespace

import pytest

from fa_numba.device import timing


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
