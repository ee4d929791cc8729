"""The time of ring attention over any number of GPUs: a model of measured speeds.

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
    measured: Measured, problem: Problem, ranks: int, travels: str, passes: Sequence[str]
) -> float | None:
    """Milliseconds of all passes of a whole problem; None where a rank's call was not measured."""
    part = replace(problem, seqlen_q=problem.seqlen_q // ranks, seqlen_k=problem.seqlen_k // ranks)
    total = 0.0
    for each in passes:
        time = _pass(measured, part, ranks, travels, each)
        if time is None:
            return None
        total += time
    return total


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
