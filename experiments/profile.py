"""Compares the emulator's counts of kernels with the counts of a GPU's profiler.

The kernels run on CUDA cores and on mma, and include the steps of the experiment `ladder` on mma.
The kernels compute one head, forward and backward, at the same tiles on the emulator and on the
GPU. The counts are requests and sectors of global memory, wavefronts and bank conflicts of shared
memory, and instructions by class. The hardware's counts need Nsight Compute.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any

import fa_numba
from fa_numba import device
from fa_numba.problem import Problem

from . import ladder
from .beside import profiler
from .lab.measure import counters, series
from .lab.measure.workloads import Inputs, one_head
from .lab.record import EMULATOR, Bench, Options, Row
from .lab.show import style, tables

NAME = "profile"
TAKES: tuple[str, ...] = ()
PROTOCOL = (
    "one batch entry and head at the tiles of the emulated device; instructions are the executed "
    "SASS by opcode, without regard to predicates"
)

# The emulator takes 10 s for these sizes. The seven kernels of standard attention's backward pass
# are not run on the emulator.
SEQLEN, HEAD_DIM = 256, 64
SIMT = ("standard-simt", "fa1-simt", "fa2-simt")
MMA = ("standard-mma", "fa1-mma", "fa2-mma")
FORWARD = (*SIMT, "standard-mma", *(s for s in ladder.LABELS if s != ladder.PEER))
BACKWARD = (*SIMT, *MMA)
LABELS = series.LABELS | {
    name: label if name.startswith("fa1") else f"FA-2, {label}"
    for name, label in ladder.LABELS.items()
}


@dataclass(frozen=True)
class Run:
    """One call that is profiled: a series, a problem and a pass ("fwd" or "bwd").

    `options` are the further options of the call, and contain the tiles.
    """

    series: str
    problem: Problem
    pass_: str
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def case(self) -> counters.Case:
        """Return the call as a `Case`, which the module `counters` profiles with Nsight Compute."""
        return counters.Case(self.series, self.problem, self.options, self.pass_)

    def columns(self, machine: str | None) -> dict[str, Any]:
        """Return the columns of the rows of this call, except metric, unit and value."""
        own = {"tiles": self.options["tiles"], "pass_": self.pass_}
        return series.columns(NAME, self.series, self.problem, machine, **own)


def runs() -> list[Run]:
    """Return the calls to profile, one per series and pass, with tiles for the emulated device."""
    problems = {
        unit: one_head(SEQLEN, HEAD_DIM, dtype=dtype)
        for unit, dtype in (("simt", "float32"), ("mma", "float16"))
    }
    found = [Run(name, problems["simt"], "fwd") for name in SIMT]
    found.append(Run("standard-mma", problems["mma"], "fwd"))
    with device.using("emulator"):
        found += [
            Run(variant.series, problems["mma"], "fwd", variant.options)
            for variant in ladder.configurations(problems["mma"])
            if variant.same_as is None
        ]
        found += [Run(name, problems[series.unit(name)], "bwd") for name in BACKWARD]
        plans = [series.plan(r.series, r.problem, passes=r.pass_, **r.options) for r in found]
    return [
        replace(run, options={**run.options, "tiles": planned.tiles})
        for run, planned in zip(found, plans, strict=True)
    ]


def measure(options: Options, bench: Bench) -> Iterator[Row | Sequence[Row]]:
    """Yield the counts of each call by the emulator and, on a GPU, by Nsight Compute.

    The emulator does not run the backward pass of standard attention.
    """
    every = runs()
    if bench.machine is not None:
        yield from _hardware(every, bench)
    work = [r for r in every if (r.pass_, series.algorithm(r.series)) != ("bwd", "standard")]
    inputs = Inputs(gradient=True)
    yield from bench.counted(
        [(run,) for run in work], "counting on the emulator", lambda run: _count(run, inputs)
    )


def _count(run: Run, inputs: Inputs) -> Iterator[Row]:
    for name, value in profiler.counted(_emulated(run, inputs)).items():
        yield Row(metric=name, unit="1", value=value, **run.columns(EMULATOR))


def _emulated(run: Run, inputs: Inputs) -> Any:
    """Run a call on the emulator and return the emulator's counts of the call's kernels.

    The counts of a backward pass do not include the forward pass before it.
    """
    arrays = [x.astype(run.problem.dtype) for x in inputs(run.problem)]
    of = run.series, run.problem
    with device.using("emulator"):
        if run.pass_ == "fwd":
            once = series.call(*of, *arrays[:3], **run.options)
        else:
            once = series.gradients(*of, "bwd", *arrays, before={}, **run.options)
    with fa_numba.count_accesses() as counts:
        once()
    return counts


def _hardware(every: Sequence[Run], bench: Bench) -> Iterator[Row]:
    """Yield the rows with Nsight Compute's numbers of all calls.

    Yield nothing if Nsight Compute is missing or cannot be used.
    """
    if not counters.available():
        bench.say("  no Nsight Compute (ncu) here: hardware counters are not read")
        return
    cases = [run.case for run in every]
    try:
        names = profiler.usable(cases[0], bench.say)
    except counters.CountersError as error:
        bench.say(f"  {error}")
        return
    for run, *results in zip(every, *profiler.profiled(cases, names, bench.say), strict=True):
        yield from _profiled(run, bench.machine, names, *results)


def _profiled(
    run: Run, machine: str | None, names: dict[str, str], result: dict[str, float] | str,
    executed: dict[str, float] | str,
) -> Iterator[Row]:  # fmt: skip
    common = run.columns(machine)
    yield from counters.traffic(result, **common)
    common["unit"] = "1"
    for name, metric in names.items():
        value, why = counters.read(result, itemgetter(metric))
        yield Row(metric=name, value=value, note=why, **common)
    for name, counter in profiler.COUNTERS.items():
        if counter.opcodes:
            value, why = counters.read(executed, itemgetter(name))
            yield Row(metric=name, value=value, note=why, **common)


Place = tuple[str, str]  # series, pass
Pair = tuple[float | None, float | None]  # measured, counted


def pairs(rows: Sequence[Row]) -> dict[tuple[Place, str], Pair]:
    """Return what the GPU and the emulator counted, for each kernel and counter.

    The result is {((series, pass), counter): (measured number, counted number)}. The GPU's profiler
    gives the measured number, and the emulator gives the counted number. Both are for calls with
    the same tiles. A missing number is None.
    """
    numbers: dict[tuple[Any, ...], float | None] = {
        (r.series, r.pass_, r.metric, r.Br, r.Bc, r.source): r.value
        for r in rows
        if r.metric in profiler.COUNTERS
    }
    return {
        ((name, pass_), metric): (numbers.get((name, pass_, metric, *tiles, "measured")), count)
        for (name, pass_, metric, *tiles, source), count in numbers.items()
        if source == "counted"
    }


def places(of: dict[tuple[Place, str], Pair]) -> list[Place]:
    """Return the kernels that occur in a result of `pairs`, each as (series, pass).

    They are in the order of the constants FORWARD and BACKWARD.
    """
    order = [*((name, "fwd") for name in FORWARD), *((name, "bwd") for name in BACKWARD)]
    return [place for place in order if any(place == at for at, _ in of)]


def label(place: Place) -> str:
    """Return the label of a kernel, given as (series, pass)."""
    name, pass_ = place
    unit = {"simt": "fp32", "mma": "fp16"}[series.unit(name)]
    known = series.BACKWARD_LABELS if pass_ == "bwd" else LABELS
    return f"{known[name]}, {unit}{', backward' if pass_ == 'bwd' else ''}"


# Counter -> title of its panel in the figure.
SHOWN = {
    "shared wavefronts": "shared memory:\nwavefronts",
    "sectors from L2": "L2 to L1:\nsectors of 32 bytes",
    "sectors to L2": "L1 to L2:\nsectors of 32 bytes",
    "mma instructions": "tensor cores:\nmma instructions",
}


def draw(rows: Sequence[Row]) -> Any:
    """Draw measured / counted numbers for each kernel. Return None without measured numbers."""
    of = pairs(rows)
    if not any(m is not None for m, _ in of.values()):
        return None
    kernels = places(of)
    figure, (axes,) = style.new(1, len(SHOWN), 1.5 + 0.27 * len(kernels), sharey=True, sharex=True)
    ratios = []
    for ax, (metric, title) in zip(axes, SHOWN.items(), strict=True):
        numbers = [of.get((place, metric), (None, None)) for place in kernels]
        dots = [(m / n, at) for at, (m, n) in enumerate(numbers) if n and m is not None]
        ratios += [x for x, _ in dots]
        style.line(ax, dots, ls="", marker="o", ms=6, color="#0072B2")
        ax.axvline(1, color="#555555", lw=0.9, zorder=1)
        ax.set_title(title, fontsize=10)
        ax.tick_params(axis="x", labelsize=8)
        ax.set_xlabel("measured / counted", fontsize=9)
    axes[0].set_yticks(range(len(kernels)), [label(place) for place in kernels], fontsize=9)
    axes[0].set_ylim(len(kernels) - 0.4, -0.6)
    near = sum(abs(x - 1) <= 0.05 for x in ratios)
    message = f"{near} of {len(ratios)} hardware counters equal the emulator's counts within 5 %"
    about = f"Nsight Compute's count over the emulator's. One head, N={SEQLEN}, d={HEAD_DIM}."
    style.legend(figure, [], message, about=about)
    return figure


def cell(pair: Pair, shown: Callable[[float], str] = "{:,.0f}".format) -> str:
    """Return the text of a table cell for a pair (measured number, counted number).

    `shown` formats the counted number.

    | case | text of the cell | example |
    |---|---|---|
    | there is no counted number | a dash | – |
    | there is no measured number | counted number and "(?)" | 200 (?) |
    | both numbers are equal | counted number | 200 |
    | only the counted number is 0 | 0 and the measured number | 0 (12) |
    | both numbers differ | counted number, and measured / counted | 200 (x 1.500) |
    """
    measured, count = pair
    if count is None:
        return tables.MISSING
    ratio = profiler.ratio(measured, count)
    if ratio is None or ratio == 1:
        return shown(count) if ratio else f"{shown(count)} (?)"
    return f"{shown(count)} ({measured:,.0f})" if not count else f"{shown(count)} (x {ratio:.3f})"


def _table(metrics: Sequence[str], what: str) -> Callable[[Sequence[Row]], tables.Table | None]:
    def table(rows: Sequence[Row]) -> tables.Table | None:
        of = pairs(rows)
        numbers = [pair for (_, metric), pair in of.items() if metric in metrics]
        ratios = [x for pair in numbers if (x := profiler.ratio(*pair)) is not None]
        lines = []
        for place in places(of):
            cells = [cell(of.get((place, metric), (None, None))) for metric in metrics]
            lines.append([str(HEAD_DIM), tables.yes_no(False), str(SEQLEN), label(place), *cells])
        caption = (
            f"The table of counters shows the {what} of one call with one head, in fp32 and fp16. "
            "Each cell of the table of counters starts with the emulator's count. If the number "
            "that Nsight Compute measured differs from the emulator's count, the ratio *measured "
            "/ count* follows in brackets. In a cell of counters, *(x 0.984)* means that the "
            "measured number is 0.984 times the emulator's count. If the emulator's count is 0, "
            "the brackets contain the measured number instead of a ratio. In a cell of counters, "
            f"*(?)* means that the counter was not measured. Of {len(ratios)} numbers that Nsight "
            f"Compute measured ({what}), {ratios.count(1)} equal the emulator's counts."
        )
        return tables.of(caption, [*tables.PROBLEM, "kernel", *metrics], lines)

    return table


_NAMES = tuple(profiler.COUNTERS)
_INSTRUCTIONS = tuple(name for name in _NAMES if profiler.COUNTERS[name].opcodes)
_SHARED = tuple(n for n in _NAMES if n.endswith(("wavefronts", "conflicts")))
_GLOBAL = tuple(n for n in _NAMES if n not in (*_SHARED, *_INSTRUCTIONS))
table = _table(_SHARED, "shared-memory wavefronts and bank conflicts")
TABLES = {
    "profile-global": _table(_GLOBAL, "global-memory requests and sectors (32 bytes)"),
    "profile-instructions": _table(_INSTRUCTIONS, "executed warp instructions"),
}
