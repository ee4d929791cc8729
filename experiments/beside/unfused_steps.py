"""The steps of standard attention, timed one by one, compared with the kernels that fuse them."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fa_numba import device
from fa_numba.problem import Problem

from ..lab.measure import calls, check, counters, peers
from ..lab.measure.series import LABELS, columns, plan
from ..lab.measure.timing import REPEATS, Timing, attempt, time_call
from ..lab.measure.workloads import Inputs
from ..lab.record import Bench, Row, published_numbers
from ..lab.show import style, tables

DROPOUT, SEED = 0.1, 7
# The steps in FA-1's Fig. 1 right, in order, and the steps that each of our three kernels computes.
STEPS = ("matmul QK^T", "scale, mask", "softmax", "dropout", "matmul PV")
FUSED = "fused"
KERNELS = {
    "standard_scores": STEPS[:2],
    "standard_softmax": STEPS[2:4],
    "standard_output": STEPS[4:],
}
# Kernel -> note of its rows.
PLACES = {name: " + ".join(steps) for name, steps in KERNELS.items()}
OURS, THEIRS = "standard-mma", peers.UNFUSED
FUSED_SERIES = ("fa1-mma", "fa2-mma", peers.FLASH, peers.CUDNN)
DURATION = "gpu__time_duration.sum"


def measure(name: str, problem: Problem, inputs: Inputs, bench: Bench) -> Iterator[Row]:
    """Yield the forward times of each step of standard attention, and of the fused kernels.

    `name` is the experiment's name. The note of a row names the step.
    """
    common = columns(name, "", problem, str(bench.machine))
    host = inputs(problem)[:3]
    arrays = peers.on_device(host, problem.dtype)
    if peers.available():
        yield from _torch(problem, host, arrays, common)
    gate = check.gate(problem, "fwd", *host, dropout_p=DROPOUT)
    for series in FUSED_SERIES:
        if calls.theirs(series) and not peers.available():
            continue
        held = gate.peer if calls.theirs(series) else gate

        def work(series: str = series, held: Any = held) -> Timing:
            run = calls.make(series, "fwd", problem, arrays, dropout_p=DROPOUT, seed=SEED)
            return time_call(run, held)

        timing, failure = attempt(work)
        yield calls.time_row(timing, failure, FUSED, **common | {"series": series})
        device.release_memory()
    yield from _kernels(problem, bench, common | {"series": OURS})
    peers.release()


def _torch(problem: Problem, host: Any, arrays: Any, common: dict[str, Any]) -> Iterator[Row]:
    def timed() -> dict[str, Timing]:
        steps = torch_steps(problem, *arrays)
        # Check the result of all steps together. The dropped P is not used by the last step.
        for step in steps.values():
            out = step()
        check.gate(problem, "fwd", *host).peer(out)
        del out
        return {
            name: Timing.of(device.time_ms(step, repeats=REPEATS)) for name, step in steps.items()
        }

    timings, failure = attempt(timed)
    for step in STEPS:
        timing = None if failure else timings[step]
        yield calls.time_row(timing, failure, step, **common | {"series": THEIRS})


def torch_steps(problem: Problem, q: Any, k: Any, v: Any) -> dict[str, Callable[[], Any]]:
    """Return the steps of torch's unfused attention as {step: function}.

    Each function computes one step from the results of the steps before. The functions must
    therefore be called in order.
    """
    torch = peers.torch
    tq, tk, tv = (torch.as_tensor(x, device="cuda") for x in (q, k, v))
    shape = (problem.seqlen_q, problem.seqlen_k)
    hidden = torch.ones(shape, dtype=torch.bool, device="cuda").triu_(1) if problem.causal else None
    left: dict[str, Any] = {}

    def scores() -> Any:
        left["S"] = torch.matmul(tq, tk.transpose(-2, -1))
        return left["S"]

    def mask() -> Any:
        S = left["S"].mul_(problem.scale)
        return S if hidden is None else S.masked_fill_(hidden, float("-inf"))

    def softmax() -> Any:
        left["P"] = torch.softmax(left["S"], dim=-1)
        return left["P"]

    def dropout() -> Any:
        return torch.nn.functional.dropout(left["P"], DROPOUT)

    def output() -> Any:
        return torch.matmul(left["P"], tv)

    return dict(zip(STEPS, (scores, mask, softmax, dropout, output), strict=True))


def _kernels(problem: Problem, bench: Bench, common: dict[str, Any]) -> Iterator[Row]:
    if not counters.available():
        bench.say("  no Nsight Compute (ncu) here: our kernels' steps are not timed one by one")
        return

    def launched() -> dict[str, float]:
        """Return the milliseconds of each of our kernels, by the kernel's name."""
        case = counters.Case(OURS, problem, {"dropout_p": DROPOUT})
        kernels = plan(OURS, problem, dropout_p=DROPOUT).kernels
        (found,) = counters.count_kernels([case], (DURATION,))
        if isinstance(found, str):
            raise counters.CountersError(found)
        return {k.name: x[DURATION] / 1e6 for k, x in zip(kernels, found, strict=True)}

    times, failure = attempt(launched)
    for kernel, place in PLACES.items():
        timing = None if failure else Timing.of([times[kernel]])
        yield calls.time_row(timing, failure, place, **common)


# Step -> name of the step in published.csv.
_PUBLISHED = {
    **dict(zip(STEPS, ("Matmul QK^T", "Mask", "Softmax", "Dropout", "Matmul PV"), strict=True)),
    FUSED: "FlashAttention fused",
}
_SHADES = dict(zip(STEPS, ("#3B0A45", "#D9B8E3", "#8E5AA0", "#B48CC4", "#5E2A6E"), strict=True))
# Kernels that compute several steps have the colour of the first step, and a hatch.
_HATCHED = {
    PLACES[name]: (KERNELS[name][0], "///") for name in ("standard_scores", "standard_softmax")
}


def published_steps() -> dict[str, float]:
    """Return the milliseconds of each step, and of the fused kernel, from FA-1's Fig. 1 right."""
    where = {"paper": "fa1", "item": "Fig. 1 right", "metric": "runtime"}
    return {
        step: published_numbers.value(method=name, **where) for step, name in _PUBLISHED.items()
    }


def times(rows: Sequence[Row]) -> dict[tuple[str, str], float]:
    """Return milliseconds by (series, step), for the longest sequence."""
    steps = [row for row in rows if row.metric == "time" and row.place and row.value is not None]
    longest = max(((r.seqlen_q, r.batch) for r in steps), default=None)
    return {(r.series, r.place): r.number for r in steps if (r.seqlen_q, r.batch) == longest}


def _stack(ax: Any, at: int, steps: dict[str, float], hollow: bool) -> None:
    """Draw the steps of one implementation as a stacked bar.

    `steps` maps a step to milliseconds, and `at` is the position of the bar. Published bars are
    hollow.
    """
    left = 0.0
    for step, value in steps.items():
        first, hatch = _HATCHED.get(step, (step, ""))
        looks: dict[str, Any] = {"color": _SHADES[first], "edgecolor": "white", "hatch": hatch}
        if hollow:
            looks = {"facecolor": "none", "edgecolor": _SHADES[first], "linewidth": 1.6}
        ax.barh(at, value, 0.66, left, **looks)
        middle = {"ha": "center", "va": "center", "fontsize": 8.5}
        box = {"facecolor": "white", "edgecolor": "none", "pad": 0.8, "alpha": 0.75}
        ax.text(left + value / 2, at, f"{value:.2g}", bbox=box, **middle)
        left += value
    ax.text(left, at, f" {left:.3g} ms", va="center", fontsize=9.5)


def draw(ax: Any, rows: Sequence[Row]) -> None:
    """Draw the steps of each implementation as stacked bars, and the fused kernels as bars."""
    found, paper = times(rows), published_steps()
    ways: dict[str, dict[str, float]] = {
        "PyTorch, published (A100)": {step: paper[step] for step in STEPS},
        "torch, step by step": {s: found[THEIRS, s] for s in STEPS if (THEIRS, s) in found},
        "standard attention, 3 kernels": {
            s: found[OURS, s] for s in PLACES.values() if (OURS, s) in found
        },
    }
    names: list[str] = []
    for label, steps in ways.items():
        if steps:
            _stack(ax, len(names), steps, hollow=not names)
            names.append(label)
    fused = {LABELS[s]: (s, found[s, FUSED]) for s in FUSED_SERIES if (s, FUSED) in found}
    fused = {"FlashAttention, published (A100)": ("", paper[FUSED])} | fused
    for label, (series, value) in fused.items():
        looks: dict[str, Any] = {"color": style.COLOURS.of(series)}
        if not series:
            looks = {"facecolor": "none", "edgecolor": style.COLOURS["published"], "linewidth": 1.6}
        ax.barh(len(names), value, 0.66, **looks)
        ax.text(value, len(names), f" {value:.3g} ms", va="center", fontsize=9.5)
        names.append(label)
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.4, -0.6)
    ax.grid(False, axis="y")
    ax.margins(x=0.09)
    ax.set(
        xlabel="time (ms), forward, causal, dropout 0.1",
        title="forward pass: unfused attention step by step, and fused kernels",
    )
    handles = [style.patch(step, color=colour) for step, colour in _SHADES.items()]
    both = {"facecolor": "#8E5AA0", "edgecolor": "white", "hatch": "///"}
    ax.legend(
        handles=[*handles, style.patch("hatched: this step and the next", **both)],
        loc="lower right",
        fontsize=9,
    )


def table(rows: Sequence[Row]) -> tables.Table | None:
    """Return the table of the times of the steps: published, torch's and ours."""
    found, paper = times(rows), published_steps()
    if not found:
        return None
    lines = []
    for step in STEPS:
        # The time of a kernel with several steps is in the line of its first step.
        first = {KERNELS[name][0]: place for name, place in PLACES.items()}
        ours = tables.number(found, (OURS, first.get(step)), ".2f")
        if step not in first:
            ours = "in the step above"
        lines.append(
            [step, f"{paper[step]:.1f}", tables.number(found, (THEIRS, step), ".2f"), ours]
        )
    sums = [sum(v for (s, place), v in found.items() if s == series) for series in (THEIRS, OURS)]
    whole = [f"{total:.2f}" if total else tables.MISSING for total in sums]
    lines.append(["all steps", f"{sum(paper[step] for step in STEPS):.1f}", *whole])
    fused = [tables.number(found, (s, FUSED), ".2f") for s in (peers.FLASH, "fa1-mma", "fa2-mma")]
    lines.append(["fused, FA-1's order", f"{paper[FUSED]:.1f}", tables.MISSING, fused[1]])
    lines.append(["fused, FA-2's order", tables.MISSING, fused[0], fused[2]])
    header = ["step", "published, ms (PyTorch, A100)", "torch, ms", "ours, ms"]
    caption = (
        "The table of attention steps contains the time of each step of a forward call in fp16, "
        "with N=1024, d=64, 16 heads, batch 64, a causal mask and dropout 0.1. Our standard "
        "attention has three kernels, which compute Q K^T with the scale and the mask, the "
        "softmax with the dropout, and P V."
    )
    return tables.of(caption, header, lines)
