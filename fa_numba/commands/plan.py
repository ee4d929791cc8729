"""python -m fa_numba plan: what both orders and standard attention run, and what bounds them."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import fa_numba
from fa_numba import bounds, device
from fa_numba.bounds import Device, Expected
from fa_numba.choices.units import UNITS
from fa_numba.commands.arguments import MAX_SEQLEN, WIDTH, saying, tiles, whole
from fa_numba.commands.text import columns, count, in_bytes, mebibytes, seconds
from fa_numba.dtypes import DTYPES
from fa_numba.host.plans import Plan
from fa_numba.io_model import ALGORITHMS
from fa_numba.problem import MAX_HEAD_DIM

NAME = "plan"
HELP = "tiles, grid, memory, accesses, FLOPs and expected bound of a call, on any GPU"
DESCRIPTION = """\
What a call runs, without running it: tiles, grid, shared memory, registers, accesses, FLOPs and
workspace of both loop orders and of standard attention, and what should bound them on a GPU: the
one here, or a named one by its data sheet. Nothing is measured; `python -m experiments compare`
measures."""

TITLES = {"fa1": "K/V outer (FA-1)", "fa2": "Q outer (FA-2)", "standard": "standard"}
# In the backward pass both orders have K/V outside: what differs is the grid.
_BACKWARD = TITLES | {"fa1": "FA-1, a block a head", "fa2": "FA-2, a grid over K/V"}
# Whose limits the emulator has, where there is no GPU.
_STAND_IN = "H200"
_MOST_BATCH = 65535

_HOW = """\
useful FLOPs: the papers' convention; computed: the products of all visited tiles, whole ones.
working set: what the blocks running at a time go over again: of FA-1 their rows of Q, O, l, m
(backward Q, O, dO, dQ, L), of FA-2 K and V of their heads (backward Q, dO, dQ, L, D), of standard
its N x N matrices. If half of L2 holds it, it comes from DRAM once, otherwise in every pass.
The time is at least the longest of three: computed FLOPs at the peak of the multiprocessors that
are busy, bytes accessed at L2's bandwidth, bytes of DRAM at its bandwidth. That one is the bound;
it is called latency where it is compute and less than half of the multiprocessors are busy.
Exponentials, waits and launches come on top. Data sheets: fa_numba/bounds/devices.csv."""
_WITHOUT_L2 = """\
No bandwidth of L2 is published for the {name}: it is left out of the time, and the table says how
much L2 would have to deliver in it."""
# Instructions that tensor cores' peak takes, by the first number of a compute capability.
_AT_PEAK = {9: "wgmma", 10: "tcgen05"}
_BELOW_PEAK = """\
The {name}'s peak on tensor cores takes {instruction}; kernels that multiply by mma.sync stay \
below it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    size = whole(1, MAX_SEQLEN)
    heads = whole(1, _MOST_BATCH)
    call = parser.add_argument_group("the call")
    call.add_argument("--seqlen", type=size, required=True, metavar="N", help="rows of q")
    call.add_argument("--seqlen-k", type=size, metavar="N", help="rows of k and v (default: as q)")
    call.add_argument(
        "--head-dim", type=whole(1, MAX_HEAD_DIM), required=True, metavar="D", help="d of a head"
    )
    call.add_argument(
        "--head-dim-v", type=whole(1, MAX_HEAD_DIM), metavar="D", help="of v and o (default: as q)"
    )
    call.add_argument("--batch", type=heads, default=1, metavar="B", help="batch size (default 1)")
    call.add_argument("--heads", type=heads, default=1, metavar="H", help="heads of q (default 1)")
    call.add_argument("--heads-k", type=heads, metavar="H", help="of k and v (default: as q)")
    call.add_argument("--causal", action="store_true", help="row i sees columns <= i + Nk - Nq")
    call.add_argument("--dtype", choices=DTYPES, default="float16", help="default float16")
    call.add_argument("--backward", action="store_true", help="the backward pass alone")
    how = parser.add_argument_group("how it is computed")
    how.add_argument("--algorithm", choices=("all", *ALGORITHMS), default="all", help="default all")
    how.add_argument("--unit", choices=("auto", *UNITS), default="auto", help="default: by dtype")
    how.add_argument("--tiles", type=tiles, metavar="BRxBC", help="block sizes, such as 64x128")
    where = parser.add_argument_group("where")
    where.add_argument(
        "--device",
        type=saying(bounds.named),
        metavar="GPU",
        help=f"one of {', '.join(bounds.DEVICES)} (default: the GPU here, or {_STAND_IN})",
    )
    where.add_argument(
        "--registers",
        action="store_true",
        help="compile the kernels for their registers: seconds each, no GPU needed",
    )
    parser.add_argument(
        "--why", action="store_true", help="say why this unit, these tiles, so many splits"
    )


def run(args: argparse.Namespace) -> str:
    """The command's output. Raises ValueError for a call that cannot be planned."""
    gpu, said = _where(args.device)
    found: dict[str, Plan] = {}
    refused: dict[str, str] = {}
    names = ALGORITHMS if args.algorithm == "all" else (args.algorithm,)
    for name in sorted(names, key=tuple(TITLES).index):
        try:
            found[name] = _planned(name, args, gpu)
        except ValueError as error:
            refused[name] = str(error)
    if not found:
        raise ValueError(next(iter(refused.values())))
    expected = {
        name: bounds.expected(plan, gpu, compiling=args.registers) for name, plan in found.items()
    }
    answer = _Answer(gpu, said, found, expected, refused)
    return "\n".join(_text(answer) + (_reasons(found) if args.why else []))


class _Answer(NamedTuple):
    """Plans and refusals by algorithm, what bounds each plan on ``gpu``, and what is said of it."""

    gpu: Device
    said: str
    found: dict[str, Plan]
    expected: dict[str, Expected]
    refused: dict[str, str]


def _where(chosen: Device | None) -> tuple[Device, str]:
    """The GPU that is planned for, and what is to be said of it."""
    if chosen is not None:
        return chosen, ""
    found = bounds.here()
    if found is not None:
        return found, ""
    return bounds.DEVICES[_STAND_IN], (
        f"Here {device.why_no_gpu()}: planned for an {_STAND_IN}, whose limits the emulator has.\n"
        "--device names another."
    )


def _planned(name: str, args: argparse.Namespace, gpu: Device) -> Plan:
    q_shape = (args.batch, args.heads, args.seqlen, args.head_dim)
    heads_k, seqlen_k = args.heads_k or args.heads, args.seqlen_k or args.seqlen
    options: dict[str, Any] = {"dtype": args.dtype, "causal": args.causal, "tiles": args.tiles}
    options |= {"unit": args.unit, "passes": "bwd" if args.backward else "fwd"}
    with gpu.planning():
        k_shape = (args.batch, heads_k, seqlen_k, args.head_dim)
        v_shape = (*k_shape[:-1], args.head_dim_v or args.head_dim)
        return fa_numba.plan(q_shape, k_shape, v_shape, algorithm=name, **options)


# --- output ------------------------------------------------------------------------------------


def _text(answer: _Answer) -> list[str]:
    gpu, said, found, expected, refused = answer
    plan = next(iter(found.values()))
    p = plan.problem
    pass_ = "backward" if plan.passes == "bwd" else "forward"
    titles = _BACKWARD if plan.passes == "bwd" else TITLES
    one = p.head_dim_v is None
    keys = f"k and v {p.k_shape}" if one else f"k {p.k_shape}, v {p.v_shape}"
    lines = [
        f"q {p.q_shape}, {keys}, {p.dtype}, {'causal, ' if p.causal else ''}{pass_}",
        *(said.splitlines() if said else ()),
        *_sheet(gpu),
        "",
    ]
    plans = list(found.values())
    rows: list[tuple[str, ...]] = [("", *(titles[name] for name in found))]
    rows += [(what, *map(cell, plans)) for what, cell in _OF_PLANS]
    for splits, tile in (("kv_splits", "row"), ("group_splits", "column")):
        if any(getattr(plan, splits) > 1 for plan in plans):
            cells = (str(getattr(plan, splits)) for plan in plans)
            rows.insert(3, (f"blocks a {tile} tile", *cells))
    known = list(expected.values())
    rows += [(what, *map(cell, known)) for what, cell in _OF_EXPECTED]
    lines += columns(rows)
    lines += ["", *columns(_kernels(found, expected))]
    if any(n is None for e in known for n in e.registers):
        lines.append("registers: not compiled; --registers does it, in seconds a kernel")
    for name, why in refused.items():
        lines += textwrap.wrap(f"{titles[name]}: {why}", WIDTH)
    return [*lines, "", *_notes(gpu, plans)]


def _reasons(found: dict[str, Plan]) -> list[str]:
    """Why each plan is as it is, in lines that fit a terminal."""
    lines = [""]
    for name, plan in found.items():
        lines.append(f"why, {TITLES[name]}")
        for text in str(plan.why).splitlines():
            lines += textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent=16 * " ")
    return lines


def _notes(gpu: Device, plans: Sequence[Plan]) -> list[str]:
    notes = [_HOW]
    if gpu.l2 is None:
        notes.append(_WITHOUT_L2.format(name=gpu.name))
    instruction = _AT_PEAK.get(gpu.capability[0])
    if instruction and any(plan.unit == "mma" for plan in plans):
        notes.append(_BELOW_PEAK.format(name=gpu.name, instruction=instruction))
    return "\n".join(notes).splitlines()


def _sheet(gpu: Device) -> list[str]:
    bandwidths = {"L2": gpu.l2, "DRAM": gpu.dram}
    peaks = {"tensor cores": gpu.fp16, "CUDA cores": gpu.fp32}
    return [
        f"{gpu.name}: {gpu.multiprocessors} multiprocessors, "
        f"{gpu.block_shared_bytes // 1024} KiB of shared memory a block, L2 "
        f"{gpu.l2_bytes >> 20} MiB; "
        + ", ".join(f"{x / 1e12:g} TB/s {name}" for name, x in bandwidths.items() if x)
        + (";" if any(bandwidths.values()) else ""),
        ", ".join(f"{x / 1e12:g} TFLOP/s on {name}" for name, x in peaks.items() if x)
        or "no data sheet of it here, so no times",
    ]


def _kernels(found: dict[str, Plan], expected: dict[str, Expected]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        ("kernel", "grid", "threads", "shared", "registers", "blocks/SM", "limit")
    ]
    for name, plan in found.items():
        e = expected[name]
        for n, kernel in enumerate(plan.kernels):
            registers, blocks = e.registers[n], e.occupancies[n]
            known = (str(registers or "-"), str(blocks), blocks.limit.split()[0])
            shared = f"{kernel.shared_bytes / 1024:.1f} KiB"
            rows.append(
                (kernel.name, "x".join(map(str, kernel.grid)), f"{kernel.threads}", shared, *known)
            )
    return rows


def _rate(n: int, time: float | None) -> str:
    return "-" if time is None else f"{in_bytes(n / time)}/s"


_OF_PLANS: tuple[tuple[str, Callable[[Plan], str]], ...] = (
    ("computed on", lambda p: UNITS[p.unit].title),
    ("tiles Br x Bc", lambda p: f"{p.tiles.Br} x {p.tiles.Bc}"),
    ("workspace", lambda p: mebibytes(p.workspace_bytes)),
    ("elements loaded", lambda p: count(p.accesses.total_loads)),
    ("elements stored", lambda p: count(p.accesses.total_stores)),
    ("bytes accessed", lambda p: in_bytes(p.accesses.bytes)),
    ("FLOPs, useful", lambda p: count(p.flops)),
    ("FLOPs, computed", lambda p: count(bounds.computed_flops(p))),
    ("useful FLOPs a byte", lambda p: f"{p.flops / p.accesses.bytes:.3g}"),
)
_OF_EXPECTED: tuple[tuple[str, Callable[[Expected], str]], ...] = (
    ("working set", lambda e: mebibytes(e.dram.again)),
    ("half of L2 holds it", lambda e: "yes" if e.dram.served else "no"),
    ("bytes of DRAM, about", lambda e: in_bytes(e.dram.bytes)),
    ("multiprocessors busy", lambda e: f"{100 * e.busy:.3g} %"),
    ("compute takes", lambda e: seconds(e.compute)),
    ("L2 takes", lambda e: seconds(e.l2)),
    ("DRAM takes", lambda e: seconds(e.memory)),
    ("time at least", lambda e: seconds(e.floor)),
    ("L2 meanwhile delivers", lambda e: _rate(e.plan.accesses.bytes, e.floor)),
    ("expected bound", lambda e: e.bound),
)
