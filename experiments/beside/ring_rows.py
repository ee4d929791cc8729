"""What the rows of experiment `ring` say: gains over one GPU, and the model's times beside them."""

from collections.abc import Sequence
from dataclasses import replace

from fa_numba import io_model
from fa_numba.problem import Problem

from ..lab.record import Row, values
from . import ring_ranks
from .ring_model import Measured, milliseconds
from .ring_ranks import LINK, MERGE, ONE, OURS, SERIES

HEAD_DIM = 128


def whole(N: int, causal: bool, d: int = HEAD_DIM) -> Problem:
    H = ring_ranks.HEADS
    return Problem(1, H, H, N, N, d, dtype="float16", causal=causal)


def place(ranks: int) -> str:
    return f"{ranks} ranks"


def ranks_of(row: Row) -> int:
    return int(row.place.split()[0])


def sent_bytes(problem: Problem, ranks: int, series: str, pass_: str) -> int:
    """Bytes that the rank which sends most sends in a call of the whole problem."""
    n = problem.seqlen_q // ranks
    part = replace(problem, seqlen_q=n, seqlen_k=n)
    passes = ("fwd", "bwd") if pass_ == "fwd+bwd" else (pass_,)
    travels = series.removeprefix("ring-")
    return max(
        sum(io_model.ring(part, ranks, r, travels=travels, passes=p).sent for p in passes)
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
    d = next(row.head_dim for row in rows if row.series == MERGE)
    moved = 6 * ring_ranks.HEADS * N // min(ranks) * d  # two read and one written, of 16 bits
    own = {key[1:]: t for key, t in times.items() if key[0] == ONE}
    return Measured(own, ring_ranks.LINK_BYTES / link[0], moved / time)


def predicted(rows: Sequence[Row]) -> dict[Key, float]:
    """The model's milliseconds of every measured call of ours, where it has what it needs."""
    machine, found = measured(rows), {}
    for row in rows:
        if machine is None or row.metric != "time" or row.series not in OURS or row.failed:
            continue
        passes = ("fwd", "bwd") if row.pass_ == "fwd+bwd" else ("fwd",)
        travels = row.series.removeprefix("ring-")
        problem = whole(row.seqlen_q, row.causal, row.head_dim)
        time = milliseconds(machine, problem, ranks_of(row), travels, passes)
        if time is not None:
            found[row.series, row.pass_, row.causal, row.seqlen_q] = time
    return found


def efficiency(
    machine: Measured, N: int, ranks: int, series: str, causal: bool, pass_: str
) -> float | None:
    """The model's share of the time in which calls are computed, of so many ranks."""
    passes = ("fwd", "bwd") if pass_ == "fwd+bwd" else ("fwd",)
    travels = series.removeprefix("ring-")
    problem = whole(N, causal)
    time = milliseconds(machine, problem, ranks, travels, passes)
    free = replace(machine, link=float("inf"), merging=float("inf"))
    alone = milliseconds(free, problem, ranks, travels, passes)
    return None if time is None or alone is None else alone / time
