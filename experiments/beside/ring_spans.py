"""When a GPU computes and when it copies, from the timestamps of a profiler.

A span is (begin, end, copies): two times in milliseconds, and whether the span is a copy between
GPUs or a kernel that computes. A copy span ends when the message has arrived, so it contains the
time in which this rank waits for the other rank.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

Span = tuple[float, float, bool]

# Names of kernels and operations that copy between GPUs, and of those that are not counted at all:
# the fills with which a rank waits for a copy to start.
COPIES, IGNORED = ("nccl", "memcpy ptop"), ("fillfunctor", "memset")


def recorded(torch: Any, call: Callable[[], Any]) -> list[Span]:
    """Run a call under torch's profiler, and return the spans of this rank's GPU.

    RuntimeError is raised if the profiler records no kernel.
    """
    profiler = torch.profiler
    with profiler.profile(activities=[profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    found = spans_of(
        (event.name, event.time_range.start / 1e3, event.time_range.end / 1e3)
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    if not found:
        raise RuntimeError("torch's profiler must record kernels, got none; is CUPTI missing?")
    return found


def spans_of(events: Iterable[tuple[str, float, float]]) -> list[Span]:
    """Return the spans of events (name, begin, end).

    >>> spans_of([("ncclDevKernel_SendRecv", 0.0, 2.0), ("fa2_forward", 0.5, 3.0)])
    [(0.0, 2.0, True), (0.5, 3.0, False)]
    """
    found = []
    for name, begin, end in events:
        words = name.lower()
        if not any(each in words for each in IGNORED):
            found.append((begin, end, any(each in words for each in COPIES)))
    return found


def busy(spans: Sequence[Span]) -> float:
    """Return the milliseconds in which the GPU computes.

    >>> busy([(0.0, 2.0, False), (1.0, 3.0, False), (2.0, 9.0, True), (5.0, 6.0, False)])
    4.0
    """
    return sum(end - begin for begin, end in _joined(spans, False))


def hidden(spans: Sequence[Span]) -> float:
    """Return the share of the copying time in which the GPU computes too; 1 without copies.

    >>> hidden([(0.0, 3.0, False), (2.0, 6.0, True), (5.0, 9.0, False)])
    0.5
    """
    copies, computing = _joined(spans, True), _joined(spans, False)
    total = sum(end - begin for begin, end in copies)
    both = sum(max(0.0, min(b, d) - max(a, c)) for a, b in copies for c, d in computing)
    return both / total if total else 1.0


def _joined(spans: Iterable[Span], copies: bool) -> list[tuple[float, float]]:
    """Return the times of the copies, or of the kernels, as intervals that do not overlap."""
    found: list[tuple[float, float]] = []
    for begin, end, copy in sorted(spans):
        if copy != copies:
            continue
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found
