"""Accesses of calls with given tile sizes, and power laws that describe how the accesses grow.

The accesses come from closed forms, from the emulator's counts and from hardware counters. They are
given per score. A score is an element of S.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

import fa_numba
from fa_numba import device, io_model
from fa_numba.choices.tiles import paper_rule, simt_tiles
from fa_numba.problem import Problem

from ..record import EMULATOR, MODEL, Bench, Row
from . import counts, variants
from .series import BACKWARD_LABELS, algorithm, call, columns, gradients, plan
from .series import LABELS as SERIES_LABELS
from .variants import Variant
from .workloads import Inputs

# The ending of a series whose tiles follow line 1 of FlashAttention's algorithms for M. Series
# without this ending have the planner's tiles for M.
RULE = "-rule"
PLANNED = ("standard-simt", "fa1-simt", "fa2-simt")
RULED = tuple(name + RULE for name in PLANNED[1:])
LABELS = {name: f"{SERIES_LABELS[name]}, planner's tiles" for name in PLANNED}
LABELS |= {name: f"{SERIES_LABELS[name.removesuffix(RULE)]}, line 1's tiles" for name in RULED}
FORMS: dict[tuple[str, str], Callable[..., Any]] = {
    ("standard", "fwd"): io_model.standard,
    ("fa1", "fwd"): io_model.fa1,
    ("fa2", "fwd"): io_model.fa2,
    ("fa1", "bwd"): io_model.fa1_backward,
    ("fa2", "bwd"): io_model.fa2_backward,
}
# A kernel's Br must be a multiple of the first number, and Bc of the second.
STEPS = (4, 8)
FLOAT = io_model.ELEMENT_BYTES
# Least number of points to which a power law is fitted.
FEWEST = 3


@dataclass(frozen=True)
class Setting:
    """A call of a series at given tile sizes.

    Parameters
    ----------
    series : str
        Name of the series.
    problem : Problem
        The problem.
    Br, Bc : int
        Tile sizes.
    note : str, default ""
        Note of the call's rows: facts for which there is no column.
    pass_ : str, default "fwd"
        "fwd" for the forward pass, "bwd" for the backward pass alone.
    """

    series: str
    problem: Problem
    Br: int
    Bc: int
    note: str = ""
    pass_: str = "fwd"

    @property
    def tiles(self) -> fa_numba.Tiles:
        """Return Br and Bc as a `Tiles` object."""
        return fa_numba.Tiles(Br=self.Br, Bc=self.Bc)

    def fields(self, experiment: str, machine: str | None) -> dict[str, Any]:
        """Return the columns of this call's rows, except metric, unit and number.

        Parameters
        ----------
        experiment : str
            Name of the experiment.
        machine : str or None
            The machine of the rows: a GPU, "emulator" or "model".

        Returns
        -------
        dict
            Keyword arguments of `Row`.
        """
        own = {"note": self.note, "pass_": self.pass_}
        return columns(experiment, self.series, self.problem, machine, self, **own)


def ruled(series: str, problem: Problem, M: int, note: str = "", pass_: str = "fwd") -> Setting:
    """Return a call with the tile sizes of line 1 of FlashAttention's Algorithms 1 and 4.

    The rule is Bc = ceil(M / 4d) and Br = min(Bc, d). For FA-2's forward pass, which keeps a row
    tile on chip, Br and Bc are exchanged.

    Parameters
    ----------
    series : str
        Name of the series.
    problem : Problem
        The problem.
    M : int
        On-chip memory in floats.
    note : str, default ""
        Note of the call's rows: facts for which there is no column.
    pass_ : str, default "fwd"
        The pass.

    Returns
    -------
    Setting
        The call.
    """
    rows, columns = paper_rule(M, problem.head_dim)
    if algorithm(series) == "fa2" and pass_ == "fwd":
        rows, columns = columns, rows
    return Setting(series, problem, rows, columns, note, pass_)


def for_memory(series: str, problem: Problem, M: int, note: str = "") -> Setting:
    """Return a forward call with the tile sizes that the planner chooses for a given shared memory.

    Parameters
    ----------
    series : str
        Name of the series, on CUDA cores.
    problem : Problem
        The problem.
    M : int
        Shared memory of a thread block, in floats.
    note : str, default ""
        Note of the call's rows: facts for which there is no column.

    Returns
    -------
    Setting
        The call.
    """
    sizes = (problem.seqlen_q, problem.seqlen_k, problem.head_dim)
    tiles = simt_tiles(algorithm(series), "fwd", *sizes, M * FLOAT).value
    return Setting(series, problem, tiles.Br, tiles.Bc, note)


def made(setting: Setting) -> fa_numba.Plan | None:
    """Return the plan that a call has on the emulator.

    Parameters
    ----------
    setting : Setting
        The call.

    Returns
    -------
    Plan or None
        None if there is no kernel for the tile sizes.
    """
    series, problem, passes = setting.series, setting.problem, setting.pass_
    with device.using("emulator"), suppress(ValueError):
        return plan(series, problem, tiles=setting.tiles, passes=passes)
    return None


def model(experiment: str, setting: Setting) -> Iterator[Row]:
    """Yield the rows of loads and stores by the closed form. Any tile sizes are allowed.

    Parameters
    ----------
    experiment : str
        Name of the experiment.
    setting : Setting
        The call.

    Yields
    ------
    Row
        Two rows.
    """
    tiles = SimpleNamespace(Br=setting.Br, Bc=setting.Bc)
    accesses = FORMS[algorithm(setting.series), setting.pass_](setting.problem, tiles)
    yield from counts.totals(accesses, **setting.fields(experiment, MODEL))


def count(experiment: str, setting: Setting, inputs: Inputs) -> Iterator[Row]:
    """Run a call on the emulator, and yield the rows of the counted loads and stores.

    Parameters
    ----------
    experiment : str
        Name of the experiment.
    setting : Setting
        The call.
    inputs : Inputs
        Returns the input arrays. For the backward pass it must also return a gradient.

    Yields
    ------
    Row
        Two rows.
    """
    of, arrays, own = (setting.series, setting.problem), inputs(setting.problem), setting.tiles
    if setting.pass_ == "fwd":
        once = call(*of, *arrays[:3], tiles=own)
    else:
        once = gradients(*of, "bwd", *arrays, before={}, tiles=own)
    with fa_numba.count_accesses() as counted:
        once()
    yield from counts.totals(counted, **setting.fields(experiment, EMULATOR))


def counted(
    experiment: str, settings: Sequence[Setting], bench: Bench, inputs: Inputs
) -> Iterator[Row | Sequence[Row]]:
    """Yield the rows by the closed form for several calls, then the rows that the emulator counts.

    Parameters
    ----------
    experiment : str
        Name of the experiment.
    settings : sequence of Setting
        The calls.
    bench : Bench
        Where the experiment runs.
    inputs : Inputs
        Returns the input arrays of a call.

    Yields
    ------
    Row or sequence of Row
        Rows of loads and stores.
    """
    for setting in settings:
        yield from model(experiment, setting)
    work = [(setting,) for setting in settings]
    by = partial(count, experiment, inputs=inputs)
    yield from bench.counted(work, "counting on the emulator", by)


def hardware(experiment: str, settings: Sequence[Setting], bench: Bench) -> Iterator[Row]:
    """Yield rows of the bytes that several calls move: by the closed form and by hardware counters.

    Parameters
    ----------
    experiment : str
        Name of the experiment.
    settings : sequence of Setting
        The calls.
    bench : Bench
        Where the experiment runs.

    Yields
    ------
    Row
        Rows of traffic.
    """
    work = [(s.problem, [Variant(s.series, {"tiles": s.tiles}, note=s.note)]) for s in settings]
    yield from variants.hardware(experiment, work, bench)


Points = dict[Any, float]


def per_score(rows: Iterable[Row], x: Callable[[Row], Any]) -> dict[tuple[str, str], Points]:
    """Return curves of loads plus stores per score, in elements of 4 bytes.

    The numbers of rows with equal series, source and x are added. Therefore all of these rows must
    be of one problem. Closed forms must be either in elements or in bytes, not in both.

    Parameters
    ----------
    rows : iterable of Row
        Rows of loads, stores or traffic.
    x : callable
        Takes a row and returns its x on the curve.

    Returns
    -------
    dict
        Maps (series, source) to {x: accesses per score}.
    """
    found: dict[tuple[str, str], Points] = {}
    for row in rows:
        if row.value is None:
            continue
        size = FLOAT if row.unit == "bytes" else 1
        scores = row.batch * row.heads_q * row.seqlen_q * row.seqlen_k
        points = found.setdefault((row.series, row.source), {})
        points[x(row)] = points.get(x(row), 0) + row.value / size / scores
    return {key: dict(sorted(points.items())) for key, points in found.items()}


@dataclass(frozen=True)
class Fit:
    """A power law, y proportional to x**exponent, fitted by least squares of the logarithms.

    Parameters
    ----------
    exponent : float
        The exponent.
    error : float
        Standard error of the exponent.
    low, high : float
        First and last x of the fitted points.

    Examples
    --------
    >>> print(Fit(exponent=2.0, error=0.01, low=32, high=1024))
    2.00 ± 0.01 (32 to 1024)
    """

    exponent: float
    error: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.exponent:.2f} ± {self.error:.2f} ({self.low:g} to {self.high:g})"


def fit(points: Points, low: float = 0, high: float = math.inf) -> Fit | None:
    """Fit a power law to points.

    Parameters
    ----------
    points : dict
        Maps x to y.
    low, high : float
        Range of x. Points outside of it are left out. Default: all x.

    Returns
    -------
    Fit or None
        The fit. None if there are fewer than three points in the range with a positive y.
    """
    inside = [(x, y) for x, y in sorted(points.items()) if low <= x <= high and y > 0]
    if len(inside) < FEWEST:
        return None
    # Least squares without scipy.stats, whose import takes a second.
    x, y = (np.log(each) for each in zip(*inside, strict=True))
    x, y = x - x.mean(), y - y.mean()
    slope = x @ y / (x @ x)
    off = y - slope * x
    error = math.sqrt(off @ off / (len(x) - 2) / (x @ x))
    return Fit(float(slope), error, inside[0][0], inside[-1][0])


def label(series: str, pass_: str, name: str = "") -> str:
    """Return the name of a series in tables.

    Parameters
    ----------
    series : str
        Name of the series.
    pass_ : str
        "fwd" or "bwd". In the forward pass, the label names the loop order, such as "K/V outer". In
        the backward pass, both papers have the loop over K and V outside, and their grids differ.
        The label of a backward pass therefore names the grid.
    name : str, default ""
        Name of a series that has no name in LABELS.

    Returns
    -------
    str
        The name.
    """
    name = LABELS.get(series, name)
    if pass_ == "fwd":
        return name
    base = series.removesuffix(RULE)
    forward = SERIES_LABELS.get(base, name)
    return name.replace(forward, BACKWARD_LABELS.get(base, forward)) + ", backward"


def agreement(rows: Sequence[Row]) -> str:
    """Return a sentence that says how many counted numbers equal the closed form.

    Parameters
    ----------
    rows : sequence of Row
        Rows with source "counted" and "model".

    Returns
    -------
    str
        The sentence, with a blank before it. Empty if `rows` contains no counted number.
    """
    same, counted = counts.equal(rows)
    if not counted:
        return ""
    return (
        f" {same} of {counted} numbers of accesses that the emulator counted equal the closed form."
    )


KINDS = {
    "model": "closed form",
    "counted": "counted on the emulator",
    "l2": "L2, measured",
    "dram": "DRAM, measured",
}

# Sources to which exponents are fitted. Counts are left out, because they equal the closed form.
FITTED = {source: label for source, label in KINDS.items() if source != "counted"}
