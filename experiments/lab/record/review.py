"""Whether new rows of a GPU may replace its last recording, and how far they are from it."""

from collections.abc import Sequence

from ..measure import counters, peers
from .store import Row

# Recordings of torch's kernels in the history of figures/data agree within 1.10 (times of the host
# within 1.15); one that was made beside another program was 2.5 times off.
FACTOR = 1.25
# Calls of fewer milliseconds wait for the host, which wavers: of 138 such calls 11 were off between
# two recordings whose longer ones agreed.
HOST_BOUND = 1.0


def lacking(before: Sequence[Row]) -> str:
    """What the recording has and this machine has nothing to measure with; empty for nothing."""
    found = []
    if not counters.available() and any(row.source in counters.BYTES for row in before):
        found.append("hardware counters, and there is no Nsight Compute (ncu) here")
    if not peers.available() and any(_theirs(row) for row in before):
        found.append("torch's kernels, and there is no torch with CUDA here")
    return "; ".join(found)


def _theirs(row: Row) -> bool:
    return row.series.startswith("torch")


def far(before: Sequence[Row], now: Sequence[Row]) -> str:
    """The kernel of torch's that is farthest from FACTOR of its time before, and how many others
    are beyond; empty for none. Those below HOST_BOUND may be.
    """
    # An experiment's settings, such as dropout, may stand in the note.
    known = {
        (row.key, row.place): row.value for row in before if _theirs(row) and row.metric == "time"
    }
    pairs = [(row, known.get((row.key, row.place)), row.value) for row in now]
    times = [(row, old, new) for row, old, new in pairs if old and new]
    ratios = [(new / old, row) for row, old, new in times if max(old, new) >= HOST_BOUND]
    off = [each for each in ratios if max(each[0], 1 / each[0]) > FACTOR]
    if not off:
        return ""
    ratio, row = max(off, key=lambda each: max(each[0], 1 / each[0]))
    mask = ", causal" if row.causal else ""
    where = f"{row.pass_}, {row.dtype}, N={row.seqlen_q}, d={row.head_dim}{mask}"
    others = f", and {len(off) - 1} others are off too" if len(off) > 1 else ""
    return (
        f"{row.series} ({where}) takes {ratio:.2f} times what it took in the last recording, "
        f"more than a factor of {FACTOR:g}{others}: something else may have run here"
    )
