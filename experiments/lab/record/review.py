"""Whether new rows of a GPU may replace its last recording."""

from collections.abc import Callable, Iterator, Sequence

from ..measure import counters, peers
from .store import Row

# Recordings of torch's kernels in the history of figures/data agree within 1.10 (times of the host
# within 1.15); one that was made beside another program was 2.5 times off.
FACTOR = 1.25
# Calls of fewer milliseconds wait for the host, which wavers: of 138 such calls 11 were off between
# two recordings whose longer ones agreed. Only if more than this share is off, something else ran.
HOST_BOUND, HOST_SHARE = 1.0, 0.2


def objections(before: Sequence[Row], now: Sequence[Row]) -> list[str]:
    """Why `now` may not replace `before`, both of one machine: empty where it may.

    The times of torch's kernels must be within FACTOR of those before, for every problem that both
    have in the same setting; those below HOST_BOUND all but a share of HOST_SHARE. And what was
    measured with torch or Nsight Compute does not go because they are missing.
    """
    found = list(_far(before, now))
    if not counters.available() and _new(before, now, lambda row: row.source in counters.BYTES):
        found.append("it has hardware counters, and there is no Nsight Compute (ncu) here")
    if not peers.available() and _new(before, now, _theirs):
        found.append("it has torch's kernels, and there is no torch with CUDA here")
    return found


def _theirs(row: Row) -> bool:
    return row.series.startswith("torch")


def _new(before: Sequence[Row], now: Sequence[Row], which: Callable[[Row], bool]) -> bool:
    """Whether only `before` has such rows."""
    return any(map(which, before)) and not any(map(which, now))


def _far(before: Sequence[Row], now: Sequence[Row]) -> Iterator[str]:
    """The peer that is farthest off, and how many others are too far."""
    # An experiment's settings, such as dropout, may stand in the note.
    known = {
        (row.key, row.place): row.value for row in before if _theirs(row) and row.metric == "time"
    }
    pairs = [(row, known.get((row.key, row.place)), row.value) for row in now]
    ratios = [(new / old, row, max(new, old)) for row, old, new in pairs if old and new]
    far = sorted(
        ((max(ratio, 1 / ratio), ratio, row, time) for ratio, row, time in ratios),
        key=lambda each: -each[0],
    )
    far = [each for each in far if each[0] > FACTOR]
    short = sum(time < HOST_BOUND for *_, time in ratios)
    if sum(time < HOST_BOUND for *_, time in far) <= HOST_SHARE * short:
        far = [each for each in far if each[-1] >= HOST_BOUND]
    if far:
        _, ratio, row, _ = far[0]
        mask = ", causal" if row.causal else ""
        where = f"{row.pass_}, {row.dtype}, N={row.seqlen_q}, d={row.head_dim}{mask}"
        others = f", and {len(far) - 1} others are off too" if len(far) > 1 else ""
        yield (
            f"{row.series} ({where}) takes {ratio:.2f} times what it took in the last recording, "
            f"more than a factor of {FACTOR:g}{others}: something else may have run here"
        )
