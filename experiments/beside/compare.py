"""The command python -m experiments compare: both loop orders at one size of the reader's own."""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from rich.console import Console

import fa_numba
from fa_numba import Tiles, bounds, device
from fa_numba.commands import text as text_of
from fa_numba.commands.arguments import MAX_SEQLEN, as_json, tiles, whole
from fa_numba.problem import MAX_HEAD_DIM, Problem

from ..lab.measure import calls, counts, peers
from ..lab.measure.series import BACKWARD_LABELS, LABELS, columns, plan, query_splits
from ..lab.measure.speeds import DTYPES, PASSES
from ..lab.measure.timing import SECONDS, attempt, time_call, timing_rows
from ..lab.measure.workloads import Inputs
from ..lab.record import EMULATOR, MODEL, Row, provenance

NAME = "compare"
# Arrays of one kind are drawn and added up as one.
GROUPS = {
    "K, V": ("K", "V", "dK", "dV"),
    "Q, O": ("Q", "O", "dO", "dQ"),
    "sums, l, m, L": ("A", "l", "m", "L", "D"),
    "N x N matrices": ("S", "P", "dP", "dS"),
}
# Without a GPU: splits for, and least times on, the machine of the project's recordings.
STAND_IN = "H200"
# Elements of q or k beyond which inputs are not made on the host.
LARGEST = 1 << 30
# With so many blocks for each multiprocessor splitting a head gains nothing.
ENOUGH = 4


@dataclass(frozen=True)
class Setting:
    """What is compared: a problem, "fwd" or "bwd", the tiles of both orders (None for theirs)."""

    problem: Problem
    pass_: str = "fwd"
    tiles: Tiles | None = None


@dataclass(frozen=True)
class Side:
    """One of the calls that are compared: a series and the options of its plan."""

    series: str
    planned: fa_numba.Plan
    options: dict[str, Any] = field(default_factory=dict)


def labels(pass_: str) -> dict[str, str]:
    return BACKWARD_LABELS if pass_ == "bwd" else LABELS


def sides(setting: Setting, gpu: bounds.Device) -> tuple[list[Side], dict[str, str]]:
    """FA-1, with query splits where these fill more of the GPU, FA-2, standard; why one lacks."""
    problem, tiles = setting.problem, setting.tiles
    unit = "simt" if problem.dtype == "float32" else "mma"
    common: dict[str, Any] = {"tiles": tiles} if tiles else {}
    wanted: list[tuple[str, dict[str, Any]]] = [(f"fa1-{unit}", common)]
    splits = 1
    if problem.batch * problem.heads_q < ENOUGH * gpu.multiprocessors:
        of_plan = partial(query_splits, problem, gpu.multiprocessors, f"fa1-{unit}", setting.pass_)
        splits = attempt(of_plan)[0] or 1
    if splits > 1:
        wanted.append((f"fa1-{unit}-splits", {**common, "query_splits": splits}))
    wanted += [(f"fa2-{unit}", common), (f"standard-{unit}", {})]
    found, refused = [], {}
    for series, options in wanted:
        try:
            planned = plan(series, problem, passes=setting.pass_, **options)
        except ValueError as error:
            if "query_splits" not in str(error):  # what has no splits is no side of its own
                refused[series] = str(error)
            continue
        found.append(Side(series, planned, options))
    return found, refused


def measure(
    setting: Setting, found: Sequence[Side], gpu: bounds.Device, machine: str | None
) -> Iterator[Row]:
    """Closed forms, small counts, times with a GPU."""
    for side in found:
        yield from _modelled(setting, side, gpu)
        yield from _counted(setting, side)
    if machine is not None:
        inputs = Inputs(gradient=setting.pass_ == "bwd")
        checks = calls.Checks(inputs)
        for side in found:
            yield from _timed(setting, side, inputs, checks, machine)


def _columns(setting: Setting, side: Side, machine: str) -> dict[str, Any]:
    own = {"tiles": side.planned.tiles, "pass_": setting.pass_}
    return columns(NAME, side.series, setting.problem, machine, **own)


def _modelled(setting: Setting, side: Side, gpu: bounds.Device) -> Iterator[Row]:
    planned = side.planned
    row = partial(Row, **_columns(setting, side, MODEL))
    yield from _accesses(row, planned.accesses.loads, planned.accesses.stores)
    for name, arrays in GROUPS.items():
        value = _bytes(planned.accesses, arrays)
        yield row(metric="traffic", unit="bytes", value=value, note=name)
    memory = planned.workspace_bytes / 2**20
    yield row(metric="memory", unit="MiB", value=memory, note="workspace")
    for note, flops in (("useful", planned.flops), ("computed", bounds.computed_flops(planned))):
        yield row(metric="work", unit="FLOP", value=flops, note=note)
    expected = bounds.expected(planned, gpu)
    note = f"about, on {gpu.name}: L2 {'holds' if expected.dram.served else 'does not hold'} it"
    yield row(metric="dram", unit="bytes", value=expected.dram.bytes, note=note)
    if expected.floor is not None:
        note = f"at least, on {gpu.name}: {expected.bound}"
        yield row(metric="time", unit="ms", value=1e3 * expected.floor, note=note)


def _bytes(accesses: Any, arrays: Sequence[str]) -> int:
    loads, stores = (
        {name: n for name, n in of.items() if name in arrays}
        for of in (accesses.loads, accesses.stores)
    )
    return replace(accesses, loads=loads, stores=stores).bytes


def _accesses(
    row: Callable[..., Row], loads: dict[str, int], stores: dict[str, int], times: int = 1
) -> Iterator[Row]:
    for metric, of in (("loads", loads), ("stores", stores)):
        for name, n in of.items():
            yield row(metric=metric, unit="elements", value=n * times, note=name)


def gpu_here() -> tuple[bounds.Device, str | None]:
    """The GPU and its name as a file's; without one the stand-in and None."""
    found = bounds.here()
    if found is None:
        return bounds.DEVICES[STAND_IN], None
    return found, provenance.slug(found.driver_name)


def one_head(problem: Problem) -> Problem:
    """One head of the problem: all heads of all batch entries access as much."""
    return replace(problem, batch=1, heads_q=1, heads_k=1)


def why_not_counted(setting: Setting) -> str:
    """Why the emulator does not count one head of this; empty where it does."""
    problem = setting.problem
    work = 4 * problem.seqlen_q * problem.seqlen_k * problem.head_dim
    work = work * 5 // 2 if setting.pass_ == "bwd" else work
    longest = max(problem.seqlen_q, problem.seqlen_k)
    if longest > counts.LONGEST or work > counts.FLOPS:
        return "one head would take the emulator minutes"
    return ""


def _counted(setting: Setting, side: Side) -> Iterator[Row]:
    if why_not_counted(setting):
        return
    head, p = one_head(setting.problem), setting.problem
    options = {**side.options, "tiles": side.planned.tiles}
    with fa_numba.count_accesses() as found:
        _run_once(side, head, options, setting.pass_)
    row = partial(Row, **_columns(setting, side, EMULATOR))
    yield from _accesses(row, found.loads, found.stores, p.batch * p.heads_q)


def _run_once(side: Side, problem: Problem, options: dict[str, Any], pass_: str) -> None:
    """One call on host arrays; which numbers they hold changes no access."""
    # NumPy has no bfloat16: float16 has as many bytes, and its kernels the same accesses.
    dtype = "float32" if problem.dtype == "float32" else "float16"
    q, k = (np.zeros(shape, dtype) for shape in (problem.q_shape, problem.k_shape))
    common = {"algorithm": side.planned.algorithm, "causal": problem.causal, **options}
    if pass_ == "fwd":
        fa_numba.attention(q, k, k, **common)
    else:
        lse = np.zeros(problem.lse_shape, np.float32)
        fa_numba.attention_backward(q, q, k, k, q, lse, **common)


def equal_counts(rows: Sequence[Row]) -> tuple[int, int]:
    return counts.equal([row for row in rows if row.metric in ("loads", "stores")])


def _timed(
    setting: Setting, side: Side, inputs: Inputs, checks: calls.Checks, machine: str
) -> Iterator[Row]:
    problem, pass_ = setting.problem, setting.pass_

    def work() -> Any:
        if max(np.prod(problem.q_shape), np.prod(problem.k_shape)) > LARGEST:
            raise ValueError(f"q or k has more than {LARGEST} elements")
        arrays = peers.on_device(inputs(problem), problem.dtype)
        check = checks(side.series, pass_, problem)
        own = side.options if pass_ == "fwd" else {"before": {}, **side.options}
        run = calls.make(side.series, pass_, problem, arrays, **own)
        return time_call(run, check, seconds=SECONDS)

    timing, failure = attempt(work)
    device.release_memory()
    peers.release()
    common = _columns(setting, side, machine)
    if failure:
        yield Row(metric="time", unit="ms", value=None, note=failure, **common)
        return
    yield from timing_rows(timing, problem, **common)


HELP = "set both loop orders side by side on a size of your own"
MAX_HEADS = 4096


def add(commands: Any) -> None:
    sub = commands.add_parser(
        NAME,
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


def setting_of(args: argparse.Namespace) -> Setting:
    """What the arguments ask for. Raises ValueError for a problem that cannot be."""
    heads = {"heads_q": args.heads, "heads_k": args.heads}
    sizes = {"seqlen_q": args.seqlen, "seqlen_k": args.seqlen_k or args.seqlen}
    facts = {"dtype": args.dtype, "causal": args.causal, "head_dim": args.head_dim}
    problem = Problem(batch=args.batch, **heads, **sizes, **facts)
    return Setting(problem, "bwd" if args.backward else "fwd", args.tiles)


def run(args: argparse.Namespace, parser: argparse.ArgumentParser, arguments: Sequence[str]) -> int:
    gpu, machine = gpu_here()
    try:
        setting = setting_of(args)
        found, refused = sides(setting, gpu)
    except ValueError as error:
        parser.error(str(error))
    if not any(side.planned.algorithm != "standard" for side in found):
        parser.error(next(iter(refused.values())))

    with Console(stderr=True).status("counting and measuring ..."):
        rows = list(measure(setting, found, gpu, machine))
    described = dict(device.describe()) if machine else None
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
