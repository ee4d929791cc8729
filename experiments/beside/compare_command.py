"""The command python -m experiments compare: its arguments, its table and its JSON."""

import argparse
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import numpy as np
from rich.console import Console

from fa_numba import bounds, device
from fa_numba.commands import text as text_of
from fa_numba.commands.arguments import MAX_SEQLEN, as_json, tiles, whole
from fa_numba.problem import MAX_HEAD_DIM, Problem

from ..lab.measure.speeds import DTYPES, PASSES
from ..lab.record import MODEL, Row, provenance
from . import compare
from .compare import GROUPS, Setting, Side, equal_counts, labels, why_not_counted

HELP = "set both loop orders side by side on a size of your own"
MAX_HEADS = 4096


def add(commands: Any) -> None:
    sub = commands.add_parser(
        compare.NAME,
        help=HELP,
        description=f"{HELP[0].upper()}{HELP[1:]}: both loop orders and standard attention. Times "
        "are measured, and checked first, where there is a CUDA GPU; accesses are counted on the "
        "emulator where one head is small enough, and in any case computed in closed form; the "
        "table says which is which.",
    )
    seqlen, head_dim, heads = (whole(1, most) for most in (MAX_SEQLEN, MAX_HEAD_DIM, MAX_HEADS))
    sizes: dict[str, tuple[str, dict[str, Any]]] = {
        "--seqlen": ("rows of q", {"type": seqlen, "metavar": "N", "required": True}),
        "--head-dim": ("head dimension", {"type": head_dim, "metavar": "D", "required": True}),
        "--seqlen-k": ("rows of k and v (default: as q)", {"type": seqlen, "metavar": "N"}),
        "--batch": ("batch size (default 1)", {"type": heads, "metavar": "B", "default": 1}),
        "--heads": ("heads (default 1)", {"type": heads, "metavar": "H", "default": 1}),
        "--causal": ("row i sees columns <= i + Nk - Nq", {"action": "store_true"}),
        "--dtype": ("default float16", {"choices": tuple(DTYPES), "default": "float16"}),
        "--backward": ("the backward pass alone", {"action": "store_true"}),
        "--tiles": (
            "the same block sizes for both orders (default: what each takes)",
            {"type": tiles, "metavar": "BRxBC"},
        ),
        "--json": ("print the JSON in place of the table", {"action": "store_true"}),
    }
    for option, (text, how) in sizes.items():
        sub.add_argument(option, help=text, **how)


def setting_of(args: argparse.Namespace) -> compare.Setting:
    """What the arguments ask for. Raises ValueError for a problem that cannot be."""
    heads = {"heads_q": args.heads, "heads_k": args.heads}
    sizes = {"seqlen_q": args.seqlen, "seqlen_k": args.seqlen_k or args.seqlen}
    facts = {"dtype": args.dtype, "causal": args.causal, "head_dim": args.head_dim}
    problem = Problem(batch=args.batch, **heads, **sizes, **facts)
    return compare.Setting(problem, "bwd" if args.backward else "fwd", args.tiles)


def run(args: argparse.Namespace, parser: argparse.ArgumentParser, arguments: Sequence[str]) -> int:
    gpu, machine = compare.gpu_here()
    try:
        setting = setting_of(args)
        found, refused = compare.sides(setting, gpu)
    except ValueError as error:
        parser.error(str(error))
    if not any(side.planned.algorithm != "standard" for side in found):
        parser.error(next(iter(refused.values())))

    aside = Console(stderr=True)  # what is printed is the table or the JSON alone

    def busy(what: str) -> contextlib.AbstractContextManager[Any]:
        return aside.status(f"{what} ...")

    rows = list(compare.measure(setting, found, gpu, machine, busy))
    described = dict(compare.device.describe()) if machine else None
    about = provenance.Provenance(list(arguments), described).for_machine(machine or MODEL)
    values = dictionary(setting, refused, rows, about)
    if args.json:
        print(as_json(values))
    else:
        print("\n".join(text(setting, found, refused, rows, gpu, machine)))
    return 1 if any(row.value is None for row in rows) else 0


Value = Callable[[str], float | None]
_GRIDS = "both orders have K/V outside: FA-1 with a thread block a head, FA-2 with a grid over K/V"


def _of(rows: Sequence[Row], source: str, metric: str, note: str = "") -> Value:
    """Series -> the sum of its numbers, of several arrays; None where there is none."""

    def value(series: str) -> float | None:
        mine = [
            row for row in rows if (row.series, row.source, row.metric) == (series, source, metric)
        ]
        found = [row.value for row in mine if note in ("", row.note)]
        values = [value for value in found if value is not None]
        return sum(values) if values and len(values) == len(found) else None

    return value


def text(
    setting: Setting, found: Sequence[Side], refused: dict[str, str], rows: Sequence[Row],
    gpu: bounds.Device, machine: str | None,
) -> list[str]:  # fmt: skip
    p, name = setting.problem, labels(setting.pass_)
    mask = "causal" if p.causal else "not causal"
    return [
        f"q {p.q_shape}, k and v {p.k_shape}, {p.dtype}, {mask}, {PASSES[setting.pass_]}",
        *([_GRIDS] if setting.pass_ == "bwd" else []),
        "",
        *text_of.columns(_table(setting, found, rows, gpu), left=(0, len(found) + 1)),
        "",
        *_of_counts(setting, rows),
        *([] if machine else [f"time: not measured, {device.why_no_gpu()}."]),
        *(f"{name[r.series]}: {r.note}" for r in rows if r.value is None),
        *(f"{name[series]}: not there: {why}" for series, why in refused.items()),
        f"data sheet: the {gpu.name}'s, nothing measured; python -m fa_numba plan says how.",
    ]


def _of_counts(setting: Setting, rows: Sequence[Row]) -> list[str]:
    why = why_not_counted(setting)
    if why:
        return [f"model: closed forms. Not counted: {why}."]
    heads, (equal, all_) = setting.problem.batch * setting.problem.heads_q, equal_counts(rows)
    what = f"one head on the emulator, times {heads:,}" if heads > 1 else "on the emulator"
    if setting.problem.dtype == "bfloat16":
        what += ", in float16: NumPy has no bfloat16"
    return [
        f"counted: {what}.",
        f"model: closed forms, which give the same as the counts in {equal} of {all_} numbers.",
    ]


def _table(
    setting: Setting, found: Sequence[Side], rows: Sequence[Row], gpu: bounds.Device
) -> list[tuple[str, ...]]:
    get, series = partial(_of, rows), [side.series for side in found]
    heads = labels(setting.pass_)
    if setting.pass_ == "bwd":  # the grids have a line of their own
        heads = {s: heads[s].partition(" (")[0] for s in series}
    fa2 = next((s for s in series if s.startswith("fa2")), "")
    table = [
        ("", *(heads[s] for s in series), "from"),
        ("tiles Br x Bc", *(f"{x.planned.tiles.Br} x {x.planned.tiles.Bc}" for x in found), "plan"),
        ("thread blocks", *(f"{_blocks(side):,}" for side in found), "plan"),
    ]

    def line(what: str, value: Value, shown: Callable[[float], str], source: str) -> None:
        values = [value(s) for s in series]
        if any(x is not None for x in values):
            table.append((what, *("-" if x is None else shown(x) for x in values), source))

    def over(value: Value) -> Value:
        def ratio(s: str) -> float | None:
            mine, other = value(s), value(fa2)
            return mine / other if mine is not None and other else None

        return ratio

    counted = "model" if why_not_counted(setting) else "counted"
    for metric in ("loads", "stores"):
        line(f"elements, {metric}", get(counted, metric), text_of.count, counted)
    for group in GROUPS:
        line(f"bytes, {group}", get("model", "traffic", group), text_of.in_bytes, "model")
    line("bytes, all", get("model", "traffic"), text_of.in_bytes, "model")
    line("bytes over FA-2's", over(get("model", "traffic")), "{:.2f}".format, "model")
    line("bytes of DRAM, about", get("model", "dram"), text_of.in_bytes, "data sheet")
    for note in ("useful", "computed"):
        line(f"FLOPs, {note}", get("model", "work", note), text_of.count, "model")
    line("workspace", get("model", "memory"), mebibytes, "model")
    line("time, at least", get("model", "time"), milliseconds, "data sheet")
    line("time", get("measured", "time"), milliseconds, "measured")
    line("time over FA-2's", over(get("measured", "time")), "{:.2f}".format, "measured")
    line("TFLOP/s", get("measured", "speed"), "{:.3g}".format, "measured")
    line("error", get("measured", "error"), "{:.1e}".format, "measured")
    return table


def _blocks(side: Side) -> int:
    """Thread blocks of the kernel with the largest tiles, which has the products."""
    return int(np.prod(max(side.planned.kernels, key=lambda k: k.shared_bytes).grid))


def mebibytes(x: float) -> str:
    return text_of.mebibytes(x * 2**20)


def milliseconds(x: float) -> str:
    return text_of.seconds(x / 1e3)


def dictionary(
    setting: Setting, refused: dict[str, str], rows: Sequence[Row], about: dict[str, Any]
) -> dict[str, Any]:
    return {
        "problem": asdict(setting.problem),
        "pass": setting.pass_,
        "not_counted": why_not_counted(setting) or None,
        "refused": refused,
        "about": about,
        "rows": [asdict(replace(row, run=about["id"])) for row in rows],
    }
