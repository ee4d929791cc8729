"""Numbers that follow from the rows of the experiment `ring`: gains over one GPU, and a model.

The model computes the time of a call of the ring. A call has one step per rank. In each step, every
rank computes one attention call and merges the result, while parts travel on the link:

    T = sum over the steps s of max(call_s + merge_s, bytes on the link / bandwidth)

During step s, the link carries the operands for step s + 1 and the results of step s - 1. If
results are sent too, a rank computes only half of the heads in the first step. It computes the
other half at the end of the call, while it waits for the last results. With a causal mask, the
first step is causal, and the other steps have half of the pairs of rows and columns. A rank has N /
ranks rows of the sequence. The time call_s is therefore based on the measured time of one GPU for a
sequence of N / ranks rows. A rank sends and receives at the same time. The model ignores latency,
other traffic, and waiting for slower ranks.

`ring_fit` compares the model with measured calls. If the model does not hold, `ring_fit` fits two
further parameters: a factor on the time of the calls, and a time for each step.
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
    """Measured speeds of one GPU and of the link between GPUs.

    Parameters
    ----------
    times : mapping
        Milliseconds of a call on one GPU by (pass, causal, length), for the passes "fwd" and
        "fwd+bwd".
    link : float
        Bytes per millisecond of the link, in one direction.
    merging : float
        Bytes per millisecond that the merging kernel loads and stores.
    slower : float, default 1.0
        Time of an attention call in a ring / its time on one GPU alone.
    step : float, default 0.0
        Further milliseconds of each step.
    """

    times: Mapping[tuple[str, bool, int], float]
    link: float
    merging: float
    slower: float = 1.0
    step: float = 0.0

    def call(self, passes: str, causal: bool, N: int) -> float | None:
        """Return the milliseconds of a pass with N rows on one GPU; None if unknown.

        `passes` is "fwd" or "bwd". The time is known for measured lengths. Beyond the longest
        measured length, it grows in proportion to the work (N^2).
        """
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
    """Return the model's milliseconds for a call of the complete problem.

    Return None if the time of one GPU is unknown.
    """
    part, travels = _part(problem, ranks), _travels(series)
    times = [_pass(measured, part, ranks, travels, each) for each in _passes(pass_)]
    known = [time for time in times if time is not None]
    return sum(known) if len(known) == len(times) else None


def _part(problem: Problem, ranks: int) -> Problem:
    """Return the part of a problem that one rank computes in one step."""
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
    operands, one, more = io_model.ring_messages(part, travels=travels, passes=passes)
    merge = _merge_bytes(part, ranks, passes) / measured.merging
    if ranks == 1:
        return first
    first, whole = first * measured.slower, whole * measured.slower
    others = whole / 2 if part.causal else whole
    # If results travel, half of the first step's call is computed at the end.
    last = first / 2 if one else 0.0
    total = max(first - last, operands / measured.link)
    for step in range(1, ranks):
        on_link = operands if step < ranks - 1 else 0
        on_link += (one if step == 2 else more) if step >= 2 else 0
        total += max(others + merge, on_link / measured.link)
    left = one if ranks == 2 else more
    return total + max(last, left / measured.link) + ranks * measured.step


def _merge_bytes(part: Problem, ranks: int, passes: str) -> int:
    """Return the bytes that the merging kernel accesses in a step.

    The kernel combines the result of the step with the merged result of the steps before: it loads
    both, and stores one result. The results are O in the forward pass, and dQ, dK and dV in the
    backward pass. With two ranks, the merged result has 16 bits. With more ranks, it is float32.
    With a causal mask, the kernel combines half of the rows. `part` is the problem of one step.
    """
    n_q, n_k = (math.prod(shape) for shape in (part.q_shape, part.k_shape))
    e = io_model.ring_messages(part)[0] // (2 * n_k)  # K and V
    elements = n_q if passes == "fwd" else n_q + 2 * n_k
    width = e if ranks <= 2 else 4
    moved = elements * (2 * width + e)
    return moved // 2 if part.causal else moved


def whole(N: int, causal: bool) -> Problem:
    """Return the problem of the complete sequence with N rows."""
    return Problem(1, HEADS, HEADS, N, N, HEAD_DIM, dtype="float16", causal=causal)


def ranks_of(row: Row) -> int:
    """Return the number of ranks that the note of a row names."""
    return int(row.place.split()[0])


def sent_bytes(problem: Problem, ranks: int, series: str, pass_: str) -> int:
    """Return the bytes sent by the rank that sends most, in a call of the complete problem.

    The number is a closed form.
    """
    part, travels = _part(problem, ranks), _travels(series)
    return max(
        sum(io_model.ring(part, ranks, r, travels=travels, passes=p).sent for p in _passes(pass_))
        for r in (0, ranks - 1)
    )


def over(rows: Sequence[Row], ranks: int) -> list[Row]:
    """Return the measured rows of calls on `ranks` GPUs, and the rows of calls on one GPU alone.

    A run on several GPUs also measures calls on one GPU alone. There may be several such runs, with
    2 and with 4 GPUs for example. The rows of calls on one GPU come first. They are sorted by the
    number of GPUs of their run, in ascending order.
    """
    mine = [row for row in rows if row.source == "measured"]
    alone = sorted((row for row in mine if row.series == ONE), key=ranks_of)
    return [*alone, *(row for row in mine if row.series != ONE and ranks_of(row) == ranks)]


Key = tuple[str, str, bool, int]  # series, pass, causal, length


def by_key(rows: Sequence[Row], metric: str) -> dict[Key, float]:
    """Return the measured values of a metric by (series, pass, causal, length)."""
    at = ("series", "pass_", "causal", "seqlen_q")
    return values(rows, *at, metric=metric, source="measured")


def gains(rows: Sequence[Row]) -> dict[Key, float]:
    """Return the time on one GPU / the time of a series on several GPUs.

    The key of a ratio is (series, pass, causal, length).
    """
    times = by_key(rows, "time")
    return {
        key: times[ONE, *key[1:]] / time
        for key, time in times.items()
        if key[0] in SERIES[1:] and (ONE, *key[1:]) in times
    }


def measured(rows: Sequence[Row]) -> Measured | None:
    """Return the measured speeds that the model needs.

    Return None if the link or the merging kernel was not measured.
    """
    times = by_key(rows, "time")
    link = [t for (series, *_), t in times.items() if series == LINK]
    merge = [(t, N) for (series, *_, N), t in times.items() if series == MERGE]
    if not link or not merge:
        return None
    ranks = {ranks_of(row) for row in rows if row.series == MERGE and row.value is not None}
    time, N = merge[0]
    moved = 6 * HEADS * N // min(ranks) * HEAD_DIM  # two arrays read and one written, 2 bytes each
    own = {key[1:]: t for key, t in times.items() if key[0] == ONE}
    return Measured(own, LINK_BYTES / link[0], moved / time)


def predicted(rows: Sequence[Row], machine: Measured | None = None) -> dict[Key, float]:
    """Return the model's milliseconds for each measured call of our series.

    The key is (series, pass, causal, length). Calls whose time the model does not know are left
    out. `machine` contains the speeds; by default, the speeds that the rows contain.
    """
    machine, found = machine or measured(rows), {}
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
    """Return the share of a call's time in which GPUs compute attention, by the model.

    The share is a ratio of two modelled times. The numerator is the time if the link and the
    merging kernel were infinitely fast, without fitted parameters. The denominator is the time with
    the speeds of `machine`. Return None if a time is unknown.
    """
    free = replace(machine, link=float("inf"), merging=float("inf"), slower=1.0, step=0.0)
    time, alone = (
        milliseconds(at, whole(N, causal), ranks, series, pass_) for at in (machine, free)
    )
    return None if time is None or alone is None else alone / time
