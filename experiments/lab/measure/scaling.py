"""Accesses at given tiles from every source, in elements a score, and the powers they grow by."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import fa_numba
from fa_numba import device, io_model
from fa_numba.choices.tiles import paper_rule, simt_tiles
from fa_numba.problem import Problem

from ..record import EMULATOR, MODEL, Bench, Row
from ..show import style
from . import counts, variants
from .series import LABELS as SERIES_LABELS
from .series import algorithm, call, columns, gradients, plan
from .variants import Variant
from .workloads import Inputs

# A series whose tiles are those of FlashAttention's line 1 for M ends in this, others have the
# planner's for M.
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
# What a kernel's tiles are multiples of: Br and Bc.
STEPS = (4, 8)
FLOAT = io_model.ELEMENT_BYTES
# Fewer points have no exponent worth the name.
FEWEST = 3


@dataclass(frozen=True)
class Setting:
    """A call of a series at these block sizes, forward ("fwd") or the backward pass alone ("bwd");
    `note` says what no column of a row does.
    """

    series: str
    problem: Problem
    Br: int
    Bc: int
    note: str = ""
    pass_: str = "fwd"

    @property
    def tiles(self) -> fa_numba.Tiles:
        return fa_numba.Tiles(Br=self.Br, Bc=self.Bc)

    def fields(self, experiment: str, machine: str | None) -> dict[str, Any]:
        own = {"note": self.note, "pass_": self.pass_}
        return columns(experiment, self.series, self.problem, machine, self, **own)


def ruled(series: str, problem: Problem, M: int, note: str = "", pass_: str = "fwd") -> Setting:
    """Block sizes by line 1 of FlashAttention's Algorithms 1 and 4 for M floats: Bc = ceil(M / 4d),
    Br = min(Bc, d), exchanged for Q outer, which keeps rows of Q on chip, forward.
    """
    rows, columns = paper_rule(M, problem.head_dim)
    if algorithm(series) == "fa2" and pass_ == "fwd":
        rows, columns = columns, rows
    return Setting(series, problem, rows, columns, note, pass_)


def for_memory(series: str, problem: Problem, M: int, note: str = "") -> Setting:
    """Block sizes that the planner takes where a block has M floats of shared memory."""
    sizes = (problem.seqlen_q, problem.seqlen_k, problem.head_dim)
    tiles = simt_tiles(algorithm(series), "fwd", *sizes, M * FLOAT).value
    return Setting(series, problem, tiles.Br, tiles.Bc, note)


def made(setting: Setting) -> fa_numba.Plan | None:
    """The setting's plan on the emulated device, None where it has no kernel for the tiles."""
    series, problem, passes = setting.series, setting.problem, setting.pass_
    with device.using("emulator"), suppress(ValueError):
        return plan(series, problem, tiles=setting.tiles, passes=passes)
    return None


def model(experiment: str, setting: Setting) -> Iterator[Row]:
    """Loads and stores in closed form, of any block sizes."""
    tiles = SimpleNamespace(Br=setting.Br, Bc=setting.Bc)
    accesses = FORMS[algorithm(setting.series), setting.pass_](setting.problem, tiles)
    yield from counts.totals(accesses, **setting.fields(experiment, MODEL))


def count(experiment: str, setting: Setting, inputs: Inputs) -> Iterator[Row]:
    """The same counted on the emulator; backward, `inputs` have a gradient."""
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
    """Closed forms of these settings, and what the emulator counts of them."""
    for setting in settings:
        yield from model(experiment, setting)
    work = [(setting,) for setting in settings]
    by = partial(count, experiment, inputs=inputs)
    yield from bench.counted(work, "counting on the emulator", by)


def hardware(experiment: str, settings: Sequence[Setting], bench: Bench) -> Iterator[Row]:
    work = [(s.problem, [Variant(s.series, {"tiles": s.tiles}, note=s.note)]) for s in settings]
    yield from variants.hardware(experiment, work, bench)


Points = dict[Any, float]


def per_score(rows: Iterable[Row], x: Callable[[Row], Any]) -> dict[tuple[str, str], Points]:
    """(series, source) -> x -> loads and stores a score in elements of 4 bytes, of one length and,
    of closed forms, of those in elements or those in bytes.
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
    """y ~ x**exponent from `low` to `high`, least squares of the logarithms, and its standard
    error.
    """

    exponent: float
    error: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.exponent:.2f} ± {self.error:.2f} ({self.low:g} to {self.high:g})"


def fit(points: Points, low: float = 0, high: float = math.inf) -> Fit | None:
    """The exponent of the points from x = low to high; None where there are fewer than three."""
    from scipy import stats  # here: every command would wait a second for it

    inside = [(x, y) for x, y in sorted(points.items()) if low <= x <= high and y > 0]
    if len(inside) < FEWEST:
        return None
    line = stats.linregress(*([math.log(n) for n in each] for each in zip(*inside, strict=True)))
    return Fit(float(line.slope), float(line.stderr), inside[0][0], inside[-1][0])


def equal(rows: Sequence[Row]) -> str:
    """How many counted numbers equal the closed form, as a sentence."""
    same, counted = counts.equal(rows)
    return f" {same} of {counted} counted numbers equal the closed form." if counted else ""


LOOKS: dict[str, dict[str, Any]] = {
    "model": {},
    "counted": {"ls": "", "marker": "o", "ms": 7},
    "l2": {"ls": "", "marker": "o", "ms": 5},
    "dram": {"ls": "--", "lw": 1.2, "marker": "o", "ms": 5, "mfc": "white"},
}
KINDS = {
    "model": "closed form",
    "counted": "counted on the emulator",
    "l2": "L2, measured",
    "dram": "DRAM, measured",
}

# What exponents are fitted to: the counts, at small sizes, are the closed form's.
FITTED = {source: label for source, label in KINDS.items() if source != "counted"}


def draw(ax: Any, found: dict[tuple[str, str], Points], sources: Sequence[str]) -> None:
    for (series, source), points in found.items():
        if source not in sources:
            continue
        base = series.removesuffix(RULE)
        look = {"lw": 1.8, **LOOKS[source]}
        if series != base:
            look |= {"lw": 5 if source == "model" else look["lw"], "alpha": 0.5}
        ax.plot(list(points), list(points.values()), color=style.COLOURS[base], **look)


def handles(found: Iterable[tuple[str, str]]) -> list[Any]:
    there = list(found)
    lines = []
    for series, label in LABELS.items():
        if any(series == name for name, _ in there):
            base = series.removesuffix(RULE)
            look: dict[str, Any] = {"lw": 5, "alpha": 0.5} if series != base else {"lw": 1.8}
            lines.append(style.key(label, color=style.COLOURS[base], **look))
    for source, label in KINDS.items():
        if any(source == name for _, name in there):
            lines.append(style.key(label, **{"lw": 1.8, **LOOKS[source]}))
    return lines
