"""The command ``python -m experiments compare``: both loop orders at a size that the user gives."""

import argparse
import contextlib
import csv
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

import fa_numba
from fa_numba import Tiles, bounds, device, io_model
from fa_numba.commands import text as text_of
from fa_numba.commands.arguments import (
    MAX_SEQLEN,
    SHORT_DTYPES,
    dtype,
    file_to_write,
    saying,
    tiles,
    whole,
)
from fa_numba.commands.plan import default_dtype
from fa_numba.problem import MAX_HEAD_DIM, Problem

from ..lab.measure import calls, counts, peers
from ..lab.measure.series import LABELS, plan, query_splits
from ..lab.measure.speeds import DTYPES, PASSES
from ..lab.measure.timing import SECONDS, Timing, attempt, time_call
from ..lab.measure.workloads import Inputs

NAME = "compare"
# Name in the table -> arrays whose bytes are added up.
GROUPS = {
    "K, V": ("K", "V", "dK", "dV"),
    "Q, O": ("Q", "O", "dO", "dQ"),
    "sums, l, m, L": ("A", "l", "m", "L", "D"),
    "N x N matrices": ("S", "P", "dP", "dS"),
}
# The GPU for query splits and shortest times if this machine has no GPU. Most recordings are from
# it.
STAND_IN = "H200"
# The largest number of elements of q or k for which times are measured.
LARGEST = 1 << 30
# If there are this many heads (batch x heads) per multiprocessor, query splits gain nothing.
ENOUGH = 4


@dataclass(frozen=True)
class Side:
    """One of the calls that the command compares.

    Parameters
    ----------
    series : str
        Name of the series, such as "fa1-simt".
    planned : Plan
        The plan of the call.
    options : dict, default {}
        The options with which the call was planned, such as `tiles` and `query_splits`.
    """

    series: str
    planned: fa_numba.Plan
    options: dict[str, Any] = field(default_factory=dict)


def sides(
    problem: Problem, pass_: str, tiles: Tiles | None, gpu: bounds.Device
) -> tuple[list[Side], dict[str, str]]:
    """Return the calls to compare, and a dictionary of series that cannot be planned.

    The calls are FA-1, FA-2 and standard attention. If query splits let FA-1 fill more of the GPU,
    FA-1 with query splits is compared too. The dictionary maps the name of a series to the reason
    why planning failed.
    """
    unit = "simt" if problem.dtype == "float32" else "mma"
    common: dict[str, Any] = {"tiles": tiles} if tiles else {}
    wanted: list[tuple[str, dict[str, Any]]] = [(f"fa1-{unit}", common)]
    splits = 1
    if problem.batch * problem.heads_q < ENOUGH * gpu.multiprocessors:
        of_plan = partial(query_splits, problem, gpu.multiprocessors, f"fa1-{unit}", pass_)
        splits = attempt(of_plan)[0] or 1
    if splits > 1:
        wanted.append((f"fa1-{unit}-splits", {**common, "query_splits": splits}))
    wanted += [(f"fa2-{unit}", common), (f"standard-{unit}", {})]
    found, refused = [], {}
    for series, options in wanted:
        try:
            planned = plan(series, problem, passes=pass_, **options)
        except ValueError as error:
            if "query_splits" not in str(error):  # calls without support of splits are left out
                refused[series] = str(error)
            continue
        found.append(Side(series, planned, options))
    return found, refused


@dataclass(frozen=True)
class Line:
    """One line of the table: a quantity, with a number for each series.

    Parameters
    ----------
    what : str
        Name of the quantity, such as "workspace".
    values : mapping
        Number by series.
    shown : callable
        Takes a number and returns its text.
    source : str
        How the numbers were obtained, such as "model".
    unit : str
        Physical unit of the numbers, such as "bytes"; "1" for a ratio.
    """

    what: str
    values: Mapping[str, float]
    shown: Callable[[float], str]
    source: str
    unit: str


def modelled(found: Sequence[Side], gpu: bounds.Device) -> Iterator[Line]:
    """Yield the lines whose numbers follow from the plans and from the GPU's data sheet."""
    plans = {side.series: side.planned for side in found}
    for metric in ("loads", "stores"):
        values = {s: getattr(p.accesses, f"total_{metric}") for s, p in plans.items()}
        yield Line(f"elements, {metric}", values, text_of.count, "model", "elements")
    for name, arrays in GROUPS.items():
        values = {s: _bytes(p.accesses, arrays) for s, p in plans.items()}
        yield Line(f"bytes, {name}", values, text_of.in_bytes, "model", "bytes")
    moved = {s: p.accesses.bytes for s, p in plans.items()}
    yield Line("bytes, all", moved, text_of.in_bytes, "model", "bytes")
    yield from _over("bytes over FA-2's", moved, "model")
    expected = {s: bounds.expected(p, gpu) for s, p in plans.items()}
    dram = {s: x.dram.bytes for s, x in expected.items()}
    yield Line("DRAM bytes, about", dram, text_of.in_bytes, "data sheet", "bytes")
    flops = {s: p.flops for s, p in plans.items()}
    yield Line("FLOPs", flops, text_of.count, "model", "FLOP")
    workspace = {s: p.workspace_bytes for s, p in plans.items()}
    yield Line("workspace", workspace, text_of.mebibytes, "model", "bytes")
    floors = {s: x.floor for s, x in expected.items() if x.floor is not None}
    yield Line("time, at least", floors, text_of.seconds, "data sheet", "seconds")


def _over(what: str, values: Mapping[str, float], source: str) -> Iterator[Line]:
    """Yield one line of the table: the value of each series divided by FA-2's value.

    `values` maps a series to a value. `what` and `source` are the fields of the line. Yield nothing
    if `values` contains no value of FA-2, or if FA-2's value is 0.
    """
    fa2 = next((x for series, x in values.items() if series.startswith("fa2")), None)
    if fa2:
        ratios = {series: x / fa2 for series, x in values.items()}
        yield Line(what, ratios, "{:.2f}".format, source, "1")


def _bytes(accesses: Any, arrays: Sequence[str]) -> int:
    """Return the bytes of the loads and stores of the named arrays."""
    loads, stores = (
        {name: n for name, n in of.items() if name in arrays}
        for of in (accesses.loads, accesses.stores)
    )
    return replace(accesses, loads=loads, stores=stores).bytes


def one_head(problem: Problem) -> Problem:
    """Return the part of a problem that belongs to one head of k and v in one batch entry.

    The part contains the head of k and v, and the heads of q that share this head.
    """
    return replace(problem, batch=1, heads_q=problem.heads_q // problem.heads_k, heads_k=1)


def why_not_counted(problem: Problem, pass_: str) -> str:
    """Return the reason why the emulator does not count one head of the problem.

    The text is empty if the emulator counts the head.
    """
    head = replace(one_head(problem), causal=False)
    longest = max(problem.seqlen_q, problem.seqlen_k)
    if longest > counts.LONGEST or io_model.flops(head, pass_) > counts.FLOPS:
        return "one head would take minutes on the emulator"
    return ""


def counted(problem: Problem, pass_: str, side: Side) -> Any:
    """Run one head of a compared call (`side`) on the emulator, and return the counted accesses.

    The head is one head of k and v, with the heads of q that share it. The inputs are zeros,
    because the accesses do not depend on the values.
    """
    head = one_head(problem)
    # NumPy has no bfloat16. float16 has as many bytes, and the kernels make the same accesses.
    dtype = "float32" if problem.dtype == "float32" else "float16"
    q, k = (np.zeros(shape, dtype) for shape in (head.q_shape, head.k_shape))
    common = {"algorithm": side.planned.algorithm, "causal": problem.causal, **side.options}
    common |= {"tiles": side.planned.tiles, "unit": side.planned.unit}
    if side.planned.algorithm == "fa2" and pass_ == "fwd":
        common["kv_splits"] = side.planned.kv_splits  # "auto" would split a single head more
    with fa_numba.count_accesses() as found:
        if pass_ == "fwd":
            fa_numba.attention(q, k, k, **common)
        else:
            lse = np.zeros(head.lse_shape, np.float32)
            fa_numba.attention_backward(q, q, k, k, q, lse, **common)
    return found


def with_counts(
    problem: Problem, pass_: str, found: Sequence[Side], lines: Sequence[Line]
) -> tuple[list[Line], str]:
    """Return the lines of the table with counted numbers, and a text about the counts.

    `found` contains the compared calls. If one head is small enough for the emulator, the counted
    numbers of elements replace the model's numbers in `lines`. The text then says how many of the
    counted numbers equal the model. Otherwise the lines are unchanged, and the text says why
    nothing was counted.
    """
    why = why_not_counted(problem, pass_)
    if why:
        return list(lines), f"model: closed forms. Nothing was counted, because {why}."
    heads, same = problem.batch * problem.heads_k, []
    totals: dict[str, dict[str, float]] = {"loads": {}, "stores": {}}
    for side in found:
        seen = counted(problem, pass_, side)
        for metric, by in totals.items():
            of = {name: n * heads for name, n in getattr(seen, metric).items()}
            model = getattr(side.planned.accesses, metric)
            same += [n == model.get(name) for name, n in of.items()]
            by[side.series] = sum(of.values())
    now = {f"elements, {metric}": by for metric, by in totals.items()}
    what = "on the emulator"
    if heads > 1:
        which = " of k and v" if problem.heads_q > problem.heads_k else ""
        what = f"one head{which} on the emulator, times {heads:,} heads"
    if problem.dtype == "bfloat16":
        what += ", in float16, because NumPy has no bfloat16"
    return [
        replace(line, values=now[line.what], source="counted") if line.what in now else line
        for line in lines
    ], (
        f"counted: {what}.\nmodel: closed forms. They equal the counts in {sum(same)} of "
        f"{len(same)} numbers."
    )


def measured(
    problem: Problem, pass_: str, found: Sequence[Side]
) -> tuple[list[Line], dict[str, str]]:
    """Time the compared calls (`found`) on this GPU. Return two results.

    The first result contains lines of the table with times and speeds. The second result maps each
    series that failed to the reason of the failure. Each result is checked before the call is
    timed.
    """
    inputs = Inputs(gradient=pass_ == "bwd")
    checks = calls.Checks(inputs)

    def work(side: Side) -> Timing:
        if max(np.prod(problem.q_shape), np.prod(problem.k_shape)) > LARGEST:
            raise ValueError(f"q and k must have at most {LARGEST} elements each to be timed")
        arrays = peers.on_device(inputs(problem), problem.dtype)
        check = checks(side.series, pass_, problem)
        own = side.options if pass_ == "fwd" else {"before": {}, **side.options}
        return time_call(
            calls.make(side.series, pass_, problem, arrays, **own), check, seconds=SECONDS
        )

    seconds: dict[str, float] = {}
    failed = {}
    for side in found:
        timing, failure = attempt(work, side)
        device.release_memory()
        peers.release()
        if failure:
            failed[side.series] = failure
        else:
            seconds[side.series] = timing.median / 1e3
    speeds = {s: io_model.flops(problem, pass_) / x / 1e12 for s, x in seconds.items()}
    return [
        Line("time", seconds, text_of.seconds, "measured", "seconds"),
        *_over("time over FA-2's", seconds, "measured"),
        Line("TFLOP/s", speeds, "{:.3g}".format, "measured", "TFLOP/s"),
    ], failed


def add(commands: Any) -> None:
    """Add the command `compare` and its options to the command line."""
    sub = commands.add_parser(
        NAME,
        help="compare both loop orders and standard attention at a size that you choose",
        description="Compare both loop orders and standard attention at a size that you choose. "
        "If this machine has a CUDA GPU, the command compare checks the results and measures "
        "times. compare computes accesses of global memory by formulas. If one head is small "
        "enough for the emulator, compare also counts accesses. The last column of the printed "
        "table names the source of each number.",
        epilog="Example: python -m experiments compare --seqlen 256 --head-dim 64",
    )
    seqlen, head_dim, heads = (whole(1, most) for most in (MAX_SEQLEN, MAX_HEAD_DIM, 4096))
    sizes: dict[str, tuple[str, dict[str, Any]]] = {
        "--seqlen": (
            "sequence length of q (number of rows)",
            {"type": seqlen, "metavar": "N", "required": True}),
        "--head-dim": (
            f"head dimension of q, k and v, 1 to {MAX_HEAD_DIM}",
            {"type": head_dim, "metavar": "D", "required": True}),
        "--seqlen-k": (
            "sequence length of k and v (default: --seqlen)", {"type": seqlen, "metavar": "N"}),
        "--batch": ("batch size (default: 1)", {"type": heads, "metavar": "B", "default": 1}),
        "--heads": (
            "number of heads of q (default: 1)", {"type": heads, "metavar": "H", "default": 1}),
        "--heads-k": (
            "number of heads of k and v, a divisor of --heads (default: --heads)",
            {"type": heads, "metavar": "H"}),
        "--causal": (
            "use a causal mask: row i of q sees the rows j <= i + seqlen_k - seqlen of k",
            {"action": "store_true"}),
        "--dtype": (
            f"dtype of q, k and v: {', '.join(DTYPES)}, or {', '.join(SHORT_DTYPES)} (default: "
            "float16 if the GPU has kernels for float16, else float32)",
            {"type": dtype, "metavar": "DTYPE"}),
        "--backward": (
            "compare the backward passes instead of the forward passes", {"action": "store_true"}),
        "--tiles": (
            "tile size for both loop orders, such as 64x128 for 64 rows of q and 128 rows of k "
            "(default: each loop order uses its own tile size)",
            {"type": tiles, "metavar": "BRxBC"},
        ),
        "--device": (
            f"GPU to compare the loop orders on: {', '.join(bounds.DEVICES)} (default: the GPU of "
            f"this machine, or {STAND_IN} if this machine has no GPU). Times are measured only on "
            "the GPU of this machine",
            {"type": saying(bounds.named), "metavar": "GPU"}),
        "--csv": (
            "also write the numbers to the CSV file FILE, one line per algorithm and quantity",
            {"type": file_to_write, "metavar": "FILE"}),
    }  # fmt: skip
    for option, (text, how) in sizes.items():
        sub.add_argument(option, help=text, **how)


def run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Run the command `compare`. Return the exit status.

    The status is 1 if a call failed while it was checked and timed, else 0.
    """
    here = bounds.here()
    gpu = args.device or here or bounds.DEVICES[STAND_IN]
    timed = here is not None and gpu.name == here.name
    with contextlib.nullcontext() if timed else gpu.planning():
        return _run(args, parser, gpu, timed)


def _run(
    args: argparse.Namespace, parser: argparse.ArgumentParser, gpu: bounds.Device, timed: bool
) -> int:
    """Compare the calls for a GPU, and print the table. Return the exit status.

    Times are measured if `timed` is true.
    """
    pass_ = "bwd" if args.backward else "fwd"
    try:
        problem = Problem(
            args.batch, args.heads, args.heads_k or args.heads, args.seqlen,
            args.seqlen_k or args.seqlen, args.head_dim, dtype=args.dtype or default_dtype(gpu),
            causal=args.causal,
        )  # fmt: skip
        found, refused = sides(problem, pass_, args.tiles, gpu)
    except ValueError as error:
        parser.error(str(error))
    if not any(side.planned.algorithm != "standard" for side in found):
        parser.error(next(iter(refused.values())))

    with Console(stderr=True).status("counting and measuring ..."):
        lines, said = with_counts(problem, pass_, found, list(modelled(found, gpu)))
        times, failed = measured(problem, pass_, found) if timed else ([], {})
    lines += times
    # In the backward pass, K/V is the outer loop of both algorithms, so that the names omit it.
    names = {s: x.partition(" (")[0] for s, x in LABELS.items()} if args.backward else LABELS
    mask = "causal" if problem.causal else "not causal"
    print(f"q {problem.q_shape}, k and v {problem.k_shape}, {problem.dtype}, {mask}, "
          f"{PASSES[pass_]}")  # fmt: skip
    if args.backward:
        print(_GRIDS)
    print("", *text_of.columns(table(found, lines, names), left=(0, len(found) + 1)), "", sep="\n")
    print(said)
    if not timed:
        why = "--device is not the GPU of this machine"
        if args.device is None:
            why = f"there is no GPU here ({device.why_no_gpu()})"
        print(f"time: not measured, because {why}.")
    for series, why in failed.items():
        print(f"{names[series]}: {why}")
    for series, why in refused.items():
        print(f"{names[series]} is not compared: {why}")
    print(f"data sheet: estimates for the {gpu.name}. `python -m fa_numba plan` explains them.")
    if args.csv:
        try:
            write_csv(args.csv, lines)
        except OSError as error:
            parser.error(f"argument --csv: {args.csv} cannot be written: {error.strerror}")
    return int(bool(failed))


def write_csv(path: Path, lines: Sequence[Line]) -> None:
    """Write each number as one line: series, quantity, value, unit and source."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("series", "quantity", "value", "unit", "source"))
        for line in lines:
            for series, value in line.values.items():
                writer.writerow((series, line.what, value, line.unit, line.source))


_GRIDS = "both orders have K/V outside: FA-1 with a thread block a head, FA-2 with a grid over K/V"


def table(
    found: Sequence[Side], lines: Sequence[Line], names: dict[str, str]
) -> list[tuple[str, ...]]:
    """Return the cells of the table, line by line. `names` maps a series to its header."""
    return [
        ("", *(names[side.series] for side in found), "from"),
        ("tiles Br x Bc", *(f"{x.planned.tiles.Br} x {x.planned.tiles.Bc}" for x in found), "plan"),
        ("thread blocks", *(f"{_blocks(side):,}" for side in found), "plan"),
        *(
            (line.what, *(of.get(side.series, "-") for side in found), line.source)
            for line in lines
            if (of := {series: line.shown(x) for series, x in line.values.items()})
        ),
    ]


def _blocks(side: Side) -> int:
    """Return the number of thread blocks of the main kernel of a compared call.

    The main kernel is the kernel with the most shared memory.
    """
    return int(np.prod(max(side.planned.kernels, key=lambda k: k.shared_bytes).grid))
