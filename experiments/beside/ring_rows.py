"""What the rows of experiment `ring` say: gains over one GPU, and a model of the time over any
number of them.

A step is over when its call is done and when the parts that are on the link meanwhile have come:

    T = sum over the steps s of max(call_s + merge_s, bytes on the link / bandwidth)

During step s the link has what travels, for step s + 1, and the results of step s - 1. Where
results travel, half of the first step's heads are computed at the end, while the last results come
home. The first step is causal where there is a mask, the others have half of the pairs. Calls take
what one GPU took for the rank's length; a rank sends and receives at once. No latency, no other
traffic, no wait for a slower rank.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fa_numba import io_model
from fa_numba.problem import Problem

from ..lab.record import Row, values
from .ring_ranks import HEAD_DIM, HEADS, LINK, LINK_BYTES, MERGE, ONE, OURS, SERIES


@dataclass(frozen=True)
class Measured:
    """One GPU and a link: milliseconds of a call by (pass, causal, length), passes "fwd" and
    "fwd+bwd"; bytes a millisecond of the link, one direction, and of the kernel that merges.
    """

    times: Mapping[tuple[str, bool, int], float]
    link: float
    merging: float

    def call(self, passes: str, causal: bool, N: int) -> float | None:
        """Of one pass; beyond the longest measured in proportion to the work, else None."""
        known = [n for p, c, n in self.times if (p, c) == (_PASSES[passes], causal)]
        if not known or N < min(known):
            return None
        at = N if N in known else max(known)
        if at > N:
            return None
        time = self.times[_PASSES[passes], causal, at]
        if passes == "bwd":
            forward = self.times.get(("fwd", causal, at))
            if forward is None:
                return None
            time -= forward
        return time * (N / at) ** 2


_PASSES = {"fwd": "fwd", "bwd": "fwd+bwd"}


def milliseconds(
    measured: Measured, problem: Problem, ranks: int, series: str, pass_: str
) -> float | None:
    """Of a call of the whole problem; None where a rank's call was not measured."""
    part, travels = _part(problem, ranks), _travels(series)
    times = [_pass(measured, part, ranks, travels, each) for each in _passes(pass_)]
    known = [time for time in times if time is not None]
    return sum(known) if len(known) == len(times) else None


def _part(problem: Problem, ranks: int) -> Problem:
    """What a rank has of a problem."""
    n = problem.seqlen_q // ranks
    return replace(problem, seqlen_q=n, seqlen_k=n)


def _travels(series: str) -> str:
    return series.removeprefix("ring-")


def _passes(pass_: str) -> tuple[str, ...]:
    return ("fwd", "bwd") if pass_ == "fwd+bwd" else (pass_,)


def _pass(measured: Measured, part: Problem, ranks: int, travels: str, passes: str) -> float | None:
    first = measured.call(passes, part.causal, part.seqlen_q)
    whole = measured.call(passes, False, part.seqlen_q)
    if first is None or whole is None:
        return None
    others = whole / 2 if part.causal else whole
    operands, one, more = io_model.ring_messages(part, travels=travels, passes=passes)
    merge = _merge_bytes(part, ranks, passes) / measured.merging
    if ranks == 1:
        return first
    # Where results travel, half of the first step's call is left for the end.
    last = first / 2 if one else 0.0
    total = max(first - last, operands / measured.link)
    for step in range(1, ranks):
        on_link = operands if step < ranks - 1 else 0
        on_link += (one if step == 2 else more) if step >= 2 else 0
        total += max(others + merge, on_link / measured.link)
    left = one if ranks == 2 else more
    return total + max(last, left / measured.link)


def _merge_bytes(part: Problem, ranks: int, passes: str) -> int:
    """Bytes that making one result of two accesses in a step: both are read, one is written, in 16
    bits between two ranks and else the sum in float32; O, or dQ, dK and dV.
    """
    n_q, n_k = (math.prod(shape) for shape in (part.q_shape, part.k_shape))
    e = io_model.ring_messages(part)[0] // (2 * n_k)  # K and V
    elements = n_q if passes == "fwd" else n_q + 2 * n_k
    width = e if ranks <= 2 else 4
    moved = elements * (2 * width + e)
    return moved // 2 if part.causal else moved


def whole(N: int, causal: bool) -> Problem:
    return Problem(1, HEADS, HEADS, N, N, HEAD_DIM, dtype="float16", causal=causal)


def place(ranks: int) -> str:
    return f"{ranks} ranks"


def ranks_of(row: Row) -> int:
    return int(row.place.split()[0])


def sent_bytes(problem: Problem, ranks: int, series: str, pass_: str) -> int:
    """Bytes that the rank which sends most sends in a call of the whole problem."""
    part, travels = _part(problem, ranks), _travels(series)
    return max(
        sum(io_model.ring(part, ranks, r, travels=travels, passes=p).sent for p in _passes(pass_))
        for r in (0, ranks - 1)
    )


Key = tuple[str, str, bool, int]  # series, pass, causal, length


def by_key(rows: Sequence[Row], metric: str) -> dict[Key, float]:
    at = ("series", "pass_", "causal", "seqlen_q")
    return values(rows, *at, metric=metric, source="measured")


def gains(rows: Sequence[Row]) -> dict[Key, float]:
    times = by_key(rows, "time")
    return {
        key: times[ONE, *key[1:]] / time
        for key, time in times.items()
        if key[0] in SERIES[1:] and (ONE, *key[1:]) in times
    }


def measured(rows: Sequence[Row]) -> Measured | None:
    """One GPU's times and the link's bandwidth, as the model takes them; None without a link."""
    times = by_key(rows, "time")
    link = [t for (series, *_), t in times.items() if series == LINK]
    merge = [(t, N) for (series, *_, N), t in times.items() if series == MERGE]
    if not link or not merge:
        return None
    ranks = {ranks_of(row) for row in rows if row.series == MERGE and row.value is not None}
    time, N = merge[0]
    moved = 6 * HEADS * N // min(ranks) * HEAD_DIM  # two read and one written, of 16 bits
    own = {key[1:]: t for key, t in times.items() if key[0] == ONE}
    return Measured(own, LINK_BYTES / link[0], moved / time)


def predicted(rows: Sequence[Row]) -> dict[Key, float]:
    """The model's milliseconds of every measured call of ours, where it has what it needs."""
    machine, found = measured(rows), {}
    for row in rows:
        if machine is None or row.metric != "time" or row.series not in OURS or row.failed:
            continue
        problem = whole(row.seqlen_q, row.causal)
        time = milliseconds(machine, problem, ranks_of(row), row.series, row.pass_)
        if time is not None:
            found[row.series, row.pass_, row.causal, row.seqlen_q] = time
    return found


def efficiency(
    machine: Measured, N: int, ranks: int, series: str, causal: bool, pass_: str
) -> float | None:
    """The model's share of the time in which calls are computed, of so many ranks."""
    free = replace(machine, link=float("inf"), merging=float("inf"))
    time, alone = (
        milliseconds(at, whole(N, causal), ranks, series, pass_) for at in (machine, free)
    )
    return None if time is None or alone is None else alone / time
