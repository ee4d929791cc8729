"""The command ``python -m fa_numba plan``.

It prints what FA-1, FA-2 and standard attention would launch, and what limits their time.
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import fa_numba
from fa_numba import bounds, device
from fa_numba.bounds import Device, Expected
from fa_numba.choices.units import UNITS, Unit
from fa_numba.commands.arguments import (
    MAX_SEQLEN,
    SHORT_DTYPES,
    WIDTH,
    dtype,
    saying,
    tiles,
    whole,
)
from fa_numba.commands.text import columns, count, in_bytes, mebibytes, seconds
from fa_numba.dtypes import UNSCALED
from fa_numba.host.plans import Plan
from fa_numba.io_model import ALGORITHMS
from fa_numba.problem import MAX_HEAD_DIM

NAME = "plan"
HELP = (
    "show which kernels an attention call would launch on a GPU, and what is expected to limit "
    "the speed of the call"
)
DESCRIPTION = """\
Show what an attention call would launch, without running the call: kernels, grids, tiles, memory,
accesses of global memory and FLOPs. The printed table compares FlashAttention-1 (K/V outer),
FlashAttention-2 (Q outer) and standard attention, which writes its score matrix to memory. The
printed table also estimates what limits the speed of each algorithm on this machine's GPU, or on
the GPU that you name with --device. The command plan needs no GPU and measures nothing.

Example: python -m fa_numba plan --seqlen 16384 --head-dim 64 --heads 32 --device H200"""

TITLES = {"fa1": "K/V outer (FA-1)", "fa2": "Q outer (FA-2)", "standard": "standard"}
# In the backward pass, both algorithms have K/V outside, and they differ in the grid.
_BACKWARD = TITLES | {"fa1": "FA-1, one block per head", "fa2": "FA-2, grid over K/V"}
# The GPU to plan for if there is no GPU. The emulator has the limits of this GPU.
_STAND_IN = "H200"
_MOST_BATCH = 65535
# The dtype of a call without --dtype is the first of these that the GPU has kernels for.
_USUAL_DTYPES = ("float16", "bfloat16", "float32")

_HOW = """\
How to read the tables:
FLOPs, useful: the papers' convention, 4 x seqlen x seqlen_k x head_dim for each head and batch
  entry, half of that if causal, 2.5 times as many backward.
FLOPs, computed: matrix products of all tiles that are visited, masked parts included.
working set: data that the running thread blocks read again and again. FA-1: their rows of Q, O, l,
  m (backward Q, O, dO, dQ, L). FA-2: K and V of their heads (backward Q, dO, dQ, L, D). Standard
  attention: its seqlen x seqlen_k matrices.
half of L2 holds it: if yes, the working set comes from DRAM once; if no, in every pass.
compute time: computed FLOPs at the peak speed of the busy multiprocessors.
L2 time, DRAM time: bytes accessed at the bandwidth of L2, DRAM bytes at the bandwidth of DRAM.
time, at least: the longest of compute time, L2 time and DRAM time. A measured time is longer,
  because a call also computes exponentials, waits and launches kernels.
expected bound: which of compute, L2 and DRAM takes longest. The bound is called latency if compute
  takes longest and less than half of the multiprocessors are busy.
blocks/SM, limit: thread blocks that one multiprocessor runs at a time, and what limits them.
Speeds and sizes of the GPUs are from data sheets, see fa_numba/bounds/devices.csv."""
_WITHOUT_L2 = """\
The L2 bandwidth of the {name} is not published, so the times leave L2 out. "L2 rate needed" is the
rate at which L2 must deliver the accessed bytes."""
_BELOW_PEAK = """\
Only {peak} instructions reach the peak speed of the {name}'s tensor cores. The kernels
computed on "{unit.title}" use {unit.instruction} instructions and stay below this speed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    size = whole(1, MAX_SEQLEN)
    heads = whole(1, _MOST_BATCH)
    call = parser.add_argument_group("the call")
    call.add_argument(
        "--seqlen",
        type=size,
        required=True,
        metavar="N",
        help="sequence length of q (number of rows)",
    )
    call.add_argument(
        "--seqlen-k", type=size, metavar="N", help="sequence length of k and v (default: --seqlen)"
    )
    call.add_argument(
        "--head-dim",
        type=whole(1, MAX_HEAD_DIM),
        required=True,
        metavar="D",
        help=f"head dimension of q and k, 1 to {MAX_HEAD_DIM}",
    )
    call.add_argument(
        "--head-dim-v",
        type=whole(1, MAX_HEAD_DIM),
        metavar="D",
        help="head dimension of v and of the output (default: --head-dim)",
    )
    call.add_argument("--batch", type=heads, default=1, metavar="B", help="batch size (default: 1)")
    call.add_argument(
        "--heads", type=heads, default=1, metavar="H", help="number of query heads (default: 1)"
    )
    call.add_argument(
        "--heads-k",
        type=heads,
        metavar="H",
        help="number of heads of k and v, a divisor of --heads (default: --heads)",
    )
    call.add_argument(
        "--causal",
        action="store_true",
        help="use a causal mask: row i of q sees the rows j <= i + seqlen_k - seqlen of k",
    )
    call.add_argument(
        "--dtype",
        type=dtype,
        metavar="DTYPE",
        help=f"dtype of q, k and v: {', '.join(UNSCALED)}, or {', '.join(SHORT_DTYPES)} (default: "
        "float16 if the GPU has kernels for float16, else float32)",
    )
    call.add_argument(
        "--backward", action="store_true", help="plan the backward pass instead of the forward pass"
    )
    how = parser.add_argument_group("how the call is computed")
    how.add_argument(
        "--algorithm",
        choices=("all", *ALGORITHMS),
        default="all",
        help="algorithm to plan. fa1: FlashAttention-1 (K/V outer); fa2: FlashAttention-2 (Q "
        "outer); standard: standard attention, which writes the scores to memory (default: all "
        "three)",
    )
    how.add_argument(
        "--unit",
        choices=("auto", *UNITS),
        default="auto",
        help="which instructions multiply matrices. "
        f"{'; '.join(map(_described, UNITS.values()))}; auto (default): the "
        "newest unit that supports the call, unless an older unit is faster",
    )
    how.add_argument(
        "--tiles",
        type=tiles,
        metavar="BRxBC",
        help="tile size, such as 64x128 for 64 rows of q and 128 rows of k (default: a tile size "
        "that fa_numba chooses for the call)",
    )
    where = parser.add_argument_group("the GPU")
    where.add_argument(
        "--device",
        type=saying(bounds.named),
        metavar="GPU",
        help=f"GPU to plan for: {', '.join(bounds.DEVICES)} (default: the GPU of this machine, "
        f"or {_STAND_IN} if this machine has no GPU)",
    )
    where.add_argument(
        "--registers",
        action="store_true",
        help="compile the kernels to find how many registers each thread uses; compiling takes "
        "seconds for each kernel and needs no GPU",
    )
    parser.add_argument(
        "--why",
        action="store_true",
        help="also print why the plan uses its unit, its tile size and its number of splits",
    )


def _described(unit: Unit) -> str:
    """Return the description of a unit in the help of ``--unit``."""
    only = f", {unit.dtypes[0]} only" if len(unit.dtypes) == 1 else ""
    return f"{unit.name}: {unit.title}{only}"


def run(args: argparse.Namespace) -> str:
    """Return the output of the command. Raise ValueError for a call that cannot be planned."""
    gpu, said = _where(args.device)
    if args.dtype is None:
        args.dtype = default_dtype(gpu)
        if args.dtype != _USUAL_DTYPES[0]:
            no = f"The {gpu.name} has no kernels for {_USUAL_DTYPES[0]}, so the plan is for "
            said = f"{said} {no}{args.dtype}.".lstrip()
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
    """The content of the output of the command.

    ``gpu`` is the GPU for which the calls are planned. ``said`` is a remark about the choice of GPU
    or dtype, or "". The keys of the three dictionaries are names of algorithms. ``found`` contains
    the plans, and ``expected`` the estimated times and their limits. ``refused`` contains an error
    message for each algorithm for which the call cannot be planned.
    """

    gpu: Device
    said: str
    found: dict[str, Plan]
    expected: dict[str, Expected]
    refused: dict[str, str]


def default_dtype(gpu: Device) -> str:
    """Return the first of float16, bfloat16 and float32 that a unit of the GPU computes with."""
    units = [unit for unit in UNITS.values() if unit.runs_on(gpu.capability)]
    known = {name for unit in units for name in unit.dtypes}
    return next(name for name in _USUAL_DTYPES if name in known)


def _where(chosen: Device | None) -> tuple[Device, str]:
    """Return the GPU to plan for, and a remark for the output.

    The remark is "" if the user chose the GPU, or if this machine has a GPU. Otherwise it says
    which GPU was taken instead.
    """
    if chosen is not None:
        return chosen, ""
    found = bounds.here()
    if found is not None:
        return found, ""
    return bounds.DEVICES[_STAND_IN], (
        f"No GPU can be used here: {device.why_no_gpu()}. The plan is for an {_STAND_IN}, whose "
        "limits the emulator uses. Choose another GPU with --device."
    )


def _planned(name: str, args: argparse.Namespace, gpu: Device) -> Plan:
    q_shape = (args.batch, args.heads, args.seqlen, args.head_dim)
    heads_k, seqlen_k = args.heads_k or args.heads, args.seqlen_k or args.seqlen
    options: dict[str, Any] = {"dtype": args.dtype, "causal": args.causal, "tiles": args.tiles}
    options |= {"algorithm": name, "unit": args.unit, "passes": "bwd" if args.backward else "fwd"}
    with gpu.planning():
        k_shape = (args.batch, heads_k, seqlen_k, args.head_dim)
        v_shape = (*k_shape[:-1], args.head_dim_v or args.head_dim)
        return fa_numba.plan(q_shape, k_shape, v_shape, **options)


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
        *textwrap.wrap(said, WIDTH),
        *_sheet(gpu),
        "",
    ]
    plans = list(found.values())
    rows: list[tuple[str, ...]] = [("", *(titles[name] for name in found))]
    rows += [(what, *map(cell, plans)) for what, cell in _OF_PLANS]
    for splits, tile in (("kv_splits", "row"), ("group_splits", "column")):
        if any(getattr(plan, splits) > 1 for plan in plans):
            cells = (str(getattr(plan, splits)) for plan in plans)
            rows.insert(3, (f"blocks per {tile} tile", *cells))
    known = list(expected.values())
    rows += [(what, *map(cell, known)) for what, cell in _OF_EXPECTED]
    lines += columns(rows)
    lines += ["", *columns(_kernels(found, expected))]
    if any(n is None for e in known for n in e.registers):
        lines.append("registers: - is unknown; --registers compiles the kernels to find them")
    for name, why in refused.items():
        lines += textwrap.wrap(f"{titles[name]}: {why}", WIDTH)
    return [*lines, "", *_notes(gpu, plans)]


def _reasons(found: dict[str, Plan]) -> list[str]:
    """Return the lines that ``--why`` adds: the reasons for the choices in each plan."""
    lines = [""]
    for name, plan in found.items():
        lines.append(f"reasons, {TITLES[name]}")
        for text in str(plan.why).splitlines():
            lines += textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent=16 * " ")
    return lines


def _notes(gpu: Device, plans: Sequence[Plan]) -> list[str]:
    notes = [_HOW]
    if gpu.l2 is None:
        notes.append(_WITHOUT_L2.format(name=gpu.name))
    peak, units = gpu.peak_instruction, dict.fromkeys(UNITS[plan.unit] for plan in plans)
    for unit in units:
        if peak and unit.on_tensor_cores and unit.instruction != peak:
            notes.append(_BELOW_PEAK.format(name=gpu.name, peak=peak, unit=unit))
    return "\n".join(notes).splitlines()


def _sheet(gpu: Device) -> list[str]:
    bandwidths = {"L2": gpu.l2, "DRAM": gpu.dram}
    peaks = {"tensor cores": gpu.fp16, "CUDA cores": gpu.fp32}
    return [
        f"{gpu.name}: {gpu.multiprocessors} multiprocessors, "
        f"{gpu.block_shared_bytes // 1024} KiB of shared memory per block, "
        f"{gpu.l2_bytes >> 20} MiB of L2",
        *(
            filter(None, (_listed("bandwidth", bandwidths), _listed("peak speed", peaks)))
            if any((*bandwidths.values(), *peaks.values()))
            else ("no times: fa_numba/bounds/devices.csv has no data sheet of this GPU",)
        ),
    ]


def _listed(what: str, speeds: dict[str, float | None]) -> str:
    """Return a line of the output with speeds of the GPU, or "" if no speed is known.

    ``what`` is "bandwidth", written in TB/s, or "peak speed", written in TFLOP/s. ``speeds`` maps a
    name, such as "DRAM" or "tensor cores", to a number of bytes or FLOPs per second. The number is
    None if it is not known.
    """
    per_second = "TB/s" if what == "bandwidth" else "TFLOP/s"
    known = ", ".join(f"{name} {x / 1e12:g} {per_second}" for name, x in speeds.items() if x)
    return f"{what}: {known}" if known else ""


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
    ("useful FLOPs per byte", lambda p: f"{p.flops / p.accesses.bytes:.3g}"),
)
_OF_EXPECTED: tuple[tuple[str, Callable[[Expected], str]], ...] = (
    ("working set", lambda e: mebibytes(e.dram.again)),
    ("half of L2 holds it", lambda e: "yes" if e.dram.served else "no"),
    ("DRAM bytes, about", lambda e: in_bytes(e.dram.bytes)),
    ("multiprocessors busy", lambda e: f"{100 * e.busy:.3g} %"),
    ("compute time", lambda e: seconds(e.compute)),
    ("L2 time", lambda e: seconds(e.l2)),
    ("DRAM time", lambda e: seconds(e.memory)),
    ("time, at least", lambda e: seconds(e.floor)),
    ("L2 rate needed", lambda e: _rate(e.plan.accesses.bytes, e.floor)),
    ("expected bound", lambda e: e.bound),
)
