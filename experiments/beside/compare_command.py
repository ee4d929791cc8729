"""The command python -m experiments compare: its arguments, and what it prints and writes."""

import argparse
import contextlib
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from fa_numba.commands.arguments import MAX_SEQLEN, as_json, tiles, whole
from fa_numba.problem import MAX_HEAD_DIM, Problem

from ..lab.measure.speeds import DTYPES
from ..lab.record import MODEL, provenance
from . import compare, compare_view

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
    values = compare_view.dictionary(setting, refused, rows, about)
    if args.json:
        print(as_json(values))
    else:
        print("\n".join(compare_view.text(setting, found, refused, rows, gpu, machine)))
    return 1 if any(row.value is None for row in rows) else 0
