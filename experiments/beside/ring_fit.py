"""Compares the model of the experiment `ring` with measured calls, and refits the model if needed.

The model holds for a number of GPUs if every modelled time of a call from N=32k on is within 10 %
of the measured time. If the model does not hold for the largest measured number of GPUs, two of its
parameters are fitted to these calls: a factor on the time of attention calls in a ring, and a fixed
time for each step. Predictions for more GPUs then come from the refitted model. A check of the
refitted model is its largest error on the calls with fewer GPUs, to which it was not fitted.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ..lab.record import Row, select
from . import ring_rows
from .ring_ranks import OURS
from .ring_rows import Key, Measured
from .ring_tasks import FILLS

CLOSE = 0.10  # largest relative error of a model that holds
# The search for the parameters: the first range of each, the values in a range, the rounds.
FACTORS, STEPS, VALUES, ROUNDS = (0.9, 1.4), (0.0, 1.0), 6, 3


@dataclass(frozen=True)
class Fit:
    """The model for predictions, and how near it is to the measured calls.

    Parameters
    ----------
    machine : Measured
        The measured speeds. If the model was refitted, they contain the fitted parameters.
    ranks : int
        Largest measured number of GPUs. The model was compared with its calls, or fitted to them.
    before : float
        Largest relative error of the model on these calls, without fitted parameters.
    error : float
        Largest relative error of the model on these calls, with fitted parameters. Equal to
        `before` if the model was not refitted.
    elsewhere : float
        Largest relative error of the model for predictions on calls with fewer GPUs; 0 without
        such calls.
    """

    machine: Measured
    ranks: int
    before: float
    error: float
    elsewhere: float

    @property
    def held(self) -> bool:
        """Return whether the model held on the largest number of GPUs, without a refit."""
        return self.before <= CLOSE

    def __str__(self) -> str:
        at = f"calls over {self.ranks} GPUs from N={FILLS >> 10}k on"
        if self.held:
            said = f"The model held: on {at}, its largest error is {self.before:.1%}."
        else:
            at_all = "the time of an attention call in a ring and a fixed time for each step"
            said = (
                f"The model did not hold: on {at}, its largest error is {self.before:.1%}. We "
                f"therefore fitted {at_all} to the {at}. The fitted factor on the time of an "
                f"attention call is {self.machine.slower:.3f}, and the fitted time for a step is "
                f"{self.machine.step:.3f} ms. The largest error of the refitted model on the {at} "
                f"is {self.error:.1%}."
            )
        if self.elsewhere:
            said += f" On fewer GPUs, the largest error is {self.elsewhere:.1%}."
        return said.replace("%", " %")


def sizes(rows: Sequence[Row]) -> list[int]:
    """Return the numbers of GPUs on which our series were timed, in ascending order."""
    return sorted({ring_rows.ranks_of(x) for x in select(rows, metric="time", series=OURS)})


def errors(rows: Sequence[Row], machine: Measured, ranks: int) -> dict[Key, float]:
    """Return the relative error of the modelled time of each call from N=32k on.

    The key of an error is (series, pass, causal, length). An error of 0.1 means that the model
    predicts a time that is 10 % too long. The model computes with the time of one GPU alone at
    the sequence length `length` / `ranks`. Calls for which this time was not measured are left out.
    """
    here = ring_rows.over(rows, ranks)
    times = ring_rows.by_key(here, "time")
    found = ring_rows.predicted(here, machine)
    return {
        key: time / times[key] - 1
        for key, time in found.items()
        if key[3] >= FILLS and (*key[1:3], key[3] // ranks) in machine.times
    }


def worst(found: Iterable[float]) -> float:
    """Return the largest absolute value; 0 without values."""
    return max(map(abs, found), default=0.0)


def fit(rows: Sequence[Row]) -> Fit | None:
    """Compare the model with the measured calls, and refit it if it does not hold.

    Return None if no calls over several GPUs were measured, or if the link was not measured.
    """
    measured_sizes = sizes(rows)
    machine = (
        ring_rows.measured(ring_rows.over(rows, measured_sizes[-1])) if measured_sizes else None
    )
    if machine is None:
        return None
    *fewer, most = measured_sizes
    before = after = worst(errors(rows, machine, most).values())
    if before > CLOSE:
        machine = _refitted(rows, machine, most)
        after = worst(errors(rows, machine, most).values())
    elsewhere = worst(x for ranks in fewer for x in errors(rows, machine, ranks).values())
    return Fit(machine, most, before, after, elsewhere)


def _refitted(rows: Sequence[Row], machine: Measured, ranks: int) -> Measured:
    """Return a copy of `machine` with fitted values of two parameters, `slower` and `step`.

    `slower` is a factor on the times of attention calls, and `step` is a further time for each
    step. The fit minimises the largest relative error of the model on the calls with `ranks` GPUs.
    """
    times = ring_rows.by_key(ring_rows.over(rows, ranks), "time")
    known = errors(rows, machine, ranks)  # only calls whose time the model knows
    points = [
        (ring_rows.whole(N, causal), series, pass_, times[series, pass_, causal, N])
        for series, pass_, causal, N in known
    ]

    def error(at: Measured) -> float:
        found = (
            (ring_rows.milliseconds(at, problem, ranks, series, pass_), time)
            for problem, series, pass_, time in points
        )
        return max(abs(math.log(modelled / time)) for modelled, time in found if modelled)

    ranges: Sequence[tuple[float, float]] = (FACTORS, STEPS)
    best = machine
    for _ in range(ROUNDS):
        values = [
            [low + (high - low) * n / (VALUES - 1) for n in range(VALUES)] for low, high in ranges
        ]
        tried = [
            replace(machine, slower=slower, step=step)
            for slower, step in itertools.product(*values)
        ]
        best = min([best, *tried], key=error)
        widths = [(high - low) / (VALUES - 1) for low, high in ranges]
        centre = best.slower, best.step
        ranges = [
            (max(0.0, at - width), at + width) for at, width in zip(centre, widths, strict=True)
        ]
    return best


def leads(rows: Sequence[Row], ranks: int, series: str, other: str) -> dict[Key, float]:
    """Return how much faster one series is than another series, for each call from N=32k on.

    The number is the time of the series `other` / the time of the series `series`. A number above 1
    means that `series` is faster. The key is (series, pass, causal, length).
    """
    times = ring_rows.by_key(ring_rows.over(rows, ranks), "time")
    return {
        key: times[other, *key[1:]] / time
        for key, time in times.items()
        if key[0] == series and key[3] >= FILLS and (other, *key[1:]) in times
    }


@dataclass(frozen=True)
class Balance:
    """How evenly the GPUs of a call are busy, and how much of the copying is hidden.

    Parameters
    ----------
    busiest : float
        Busy time of the busiest GPU / busy time of the least busy GPU.
    hidden : float
        Share of the copying time in which the GPU computes, for the GPU with the smallest share.
    """

    busiest: float
    hidden: float


def balances(rows: Sequence[Row], ranks: int) -> dict[Key, Balance]:
    """Return the balance of each profiled call over a number of GPUs.

    The key is (series, pass, causal, length).
    """
    here = ring_rows.over(rows, ranks)
    shares = ring_rows.by_key(here, "hidden_copies")
    found = {}
    for key, share in shares.items():
        series, pass_, causal, N = key
        fields = {"series": series, "pass_": pass_, "causal": causal, "seqlen_q": N}
        busy = [row.number for row in select(here, metric="computing", **fields)]
        if busy and min(busy) > 0:
            found[key] = Balance(max(busy) / min(busy), share)
    return found
