"""python -m fa_numba trace: the online softmax of one row, block by block, in both loop orders.

Every number is taken from `algorithms.fa1_forward` and `fa2_forward` while they run.
"""

from __future__ import annotations

import argparse
import math
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fa_numba import algorithms, reference
from fa_numba.algorithms import Step
from fa_numba.commands.arguments import MAX_SEQLEN, as_json, finite, whole
from fa_numba.problem import MAX_HEAD_DIM, Problem

NAME = "trace"
HELP = "the online softmax of one row, block by block, in both loop orders"
DESCRIPTION = """\
The online softmax of one row of Q, one block of keys after the other: the largest score so far (m),
the sum of the exponentials (l), the factor e^(m before - m) that the older sums are multiplied by,
and the output (o). FlashAttention-1 (K/V outer) normalises o in every pass and keeps o, l and m in
memory between two passes; FlashAttention-2 (Q outer) keeps them in registers and divides by l once.

Without arguments: a worked example with 8 keys in blocks of 4 that can be followed by hand."""

_SHOWN = 4  # values of a vector that a line has room for
_EXACT = 1e-12  # smaller differences are float64's rounding
_SCORES = 19  # characters of a block's scores
_FILE_KEYS = ("q", "K", "V")
_DEFAULT_HEAD_DIM, _DEFAULT_BLOCK = 8, 16


class Rows(NamedTuple):
    """What is traced: one row of Q over keys in blocks of so many, and where it is from."""

    title: str
    Q: NDArray[np.float64]
    K: NDArray[np.float64]
    V: NDArray[np.float64]
    block: int
    scale: float | None


def examples() -> dict[str, Rows]:
    """The worked examples by their number."""
    K = [[1, 1, 0, 0], [0, 1, 1, 0], [1, 0, 1, 1], [0, 0, 1, 0]]
    K += [[2, 1, 1, 1], [0, 1, 0, 1], [1, 1, 1, 0], [0, 0, 0, 1]]
    V = [[2, 1, 0, 3], [1, 0, 1, 2], [0, 2, 1, 1], [3, 1, 0, 0]]
    V += [[1, 3, 2, 0], [0, 1, 0, 2], [2, 0, 1, 1], [1, 0, 0, 3]]
    scores = [[3], [1], [2], [4], [5], [1], [3], [1]]
    diagonal, identity, ones = np.diag([1, 2, 3, 4]), np.eye(4), np.ones((1, 4))
    found: Any = (
        ("q = (1, 0, 2, 1)", 4, [[1, 0, 2, 1]], K, V),
        ("the scores themselves, K = V = scores", 4, [[1]], scores, scores),
        ("V = I, so that o is the softmax", 2, ones, diagonal, identity),
    )
    rows = {}
    for n, (title, block, *arrays) in enumerate(found, 1):
        Q, keys, values = (np.array(x, np.float64) for x in arrays)
        rows[f"{n}"] = Rows(f"worked example {n}: {title}", Q, keys, values, block, 1.0)
    return rows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("what is traced").add_mutually_exclusive_group()
    what.add_argument(
        "--example",
        choices=sorted(examples()),
        default="1",
        help="a worked example: 1 in four dimensions (default), 2 with scores 3 1 2 4 | 5 1 3 1, "
        "3 the merged softmax of 1 2 | 3 4",
    )
    what.add_argument(
        "--seqlen",
        type=whole(1, MAX_SEQLEN),
        metavar="N",
        help="N standard normal rows of q, K and V",
    )
    what.add_argument(
        "--file",
        type=Path,
        metavar="FILE.npz",
        help="arrays q (d) or (Nq, d), K and V (Nk, d) of a NumPy archive, as numpy.savez makes it",
    )
    group = parser.add_argument_group("how")
    group.add_argument(
        "--head-dim",
        type=whole(1, MAX_HEAD_DIM),
        metavar="D",
        help=f"dimension d of random rows (default {_DEFAULT_HEAD_DIM})",
    )
    group.add_argument(
        "--seed", type=whole(0, 2**32 - 1), metavar="S", help="of random rows (default 0)"
    )
    group.add_argument(
        "--block",
        type=whole(1, MAX_SEQLEN),
        metavar="BC",
        help=f"keys in a block (default {_DEFAULT_BLOCK}, of the examples their own)",
    )
    group.add_argument(
        "--row", type=whole(0, MAX_SEQLEN - 1), metavar="I", help="which row of q (default 0)"
    )
    group.add_argument(
        "--scale",
        type=finite,
        metavar="X",
        help="multiplies the scores (default 1/sqrt(d), of the examples 1)",
    )
    group.add_argument(
        "--causal",
        action="store_true",
        help="row i sees the keys j <= i + Nk - Nq",
    )
    parser.add_argument("--json", action="store_true", help="print JSON with all digits instead")


def run(args: argparse.Namespace) -> str:
    """The command's output. Raises ValueError for arguments that do not go together."""
    rows = _rows(args)
    Nq, Nk = len(rows.Q), len(rows.K)
    row = args.row or 0
    if row >= Nq:
        raise ValueError(f"argument --row: {row} is outside: allowed is 0 to {Nq - 1}, q's rows")
    scale = rows.scale if args.scale is None else args.scale
    sizes: dict[str, Any] = dict(seqlen_q=Nq, seqlen_k=Nk, head_dim=rows.Q.shape[1])
    problem = Problem(1, 1, 1, **sizes | {"scale": scale, "causal": args.causal})
    seen = problem.columns_end(row)
    if not seen:
        raise ValueError(
            f"argument --row: {row} sees no key with --causal: allowed is {Nq - Nk} to {Nq - 1}"
        )
    # A causal row sees the first keys, and all of those.
    one = rows.Q[row : row + 1], rows.K[:seen], rows.V[:seen]
    scale = problem.scale
    k_outer, q_outer = (
        _watched(forward, *one, block=rows.block, scale=scale)
        for forward in (algorithms.fa1_forward, algorithms.fa2_forward)
    )
    whole: Any = reference.attention(*(x[None, None] for x in one), scale=scale)
    exact = whole[0, 0, 0]
    found = {
        "title": rows.title,
        "row": row,
        "rows": Nq,
        "keys": Nk,
        "keys_seen": seen,
        "head_dim": rows.Q.shape[1],
        "block": rows.block,
        "scale": scale,
        "causal": args.causal,
        "k_outer": k_outer,
        "q_outer": q_outer,
        "reference": exact.tolist(),
    }
    return as_json(found) if args.json else "\n".join(_text(found, exact))


def _rows(args: argparse.Namespace) -> Rows:
    if args.seqlen is None:
        for option in ("head_dim", "seed"):
            if getattr(args, option) is not None:
                name = f"--{option.replace('_', '-')}"
                raise ValueError(
                    f"argument {name}: {getattr(args, option)} without --seqlen: only random rows "
                    "take it"
                )
    if args.file is not None:
        rows = _from_file(args.file)
    elif args.seqlen is not None:
        d, seed = args.head_dim or _DEFAULT_HEAD_DIM, args.seed or 0
        Q, K, V = np.random.default_rng(seed).standard_normal((3, args.seqlen, d))
        rows = Rows(f"standard normal rows, seed {seed}", Q, K, V, _DEFAULT_BLOCK, None)
    else:
        rows = examples()[args.example]
    return rows if args.block is None else rows._replace(block=args.block)


def _from_file(path: Path) -> Rows:
    """The rows of an archive. Raises ValueError, which names the file and what is wrong in it."""
    try:
        with open(path, "rb") as file:
            if not zipfile.is_zipfile(file):
                raise ValueError("it is no archive of numpy.savez")
        with np.load(path) as archive:
            missing = [name for name in _FILE_KEYS if name not in archive]
            if missing:
                raise ValueError(
                    f"it has no {' and '.join(missing)}, only {', '.join(archive) or 'nothing'}"
                )
            q, K, V = (archive[name] for name in _FILE_KEYS)
        Q, K, V, *_ = algorithms.as_head(q[None] if q.ndim == 1 else q, K, V)
    except (OSError, TypeError, ValueError, zipfile.BadZipFile) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"argument --file: {path}: {reason}") from None
    return Rows(f"rows of {path.name}", Q, K, V, _DEFAULT_BLOCK, None)


def _watched(forward: Any, *arrays: Any, block: int, scale: float) -> dict[str, Any]:
    """What the algorithm does with one row: its blocks, what it gives, what passes through memory.

    `between` counts the numbers that the inner loop reads and writes of the row's o, l and m.
    """
    steps: list[Step] = []
    found = forward(*arrays, Br=1, Bc=block, scale=scale, watch=steps.append)
    names = ("O", "l", "m") if forward is algorithms.fa1_forward else ("O", "L")
    blocks = [_block(step) for step in steps]
    state = ("o", "l", "m")
    return {
        "algorithm": forward.__name__,
        "blocks": blocks,
        "output": {name.lower() if name == "O" else name: _values(x[0])
                   for name, x in zip(names, found, strict=True)},
        "between": {
            what: sum(np.size(b[what][name]) for b in blocks for name in state if name in b[what])
            for what in ("read", "written")
        },
    }  # fmt: skip


def _block(step: Step) -> dict[str, Any]:
    """What the step makes of the row, its row tile: the state after it, which scores it saw.

    `keys` are the first one and the one past the last. `read` and `written` are what the inner
    loop loads of the row and stores for it, by the algorithm's names.
    """
    at = {name: _values(x[0]) for name, x in step.on_chip.items()}
    names = {"Qi": "q", "Oi": "o", "li": "l", "mi": "m"}

    def of_row(moved: Any) -> dict[str, Any]:
        return {names[name]: _values(x[0]) for name, x in moved.items() if name in names}

    return {
        "block": step.j,
        "keys": (step.columns.start, step.columns.stop),
        "scores": at["Sij"],
        "factor": at["factor"],
        "m": at["mi"],
        "l": at["li"],
        "o": at["Oi"],
        "read": of_row(step.read),
        "written": of_row(step.written),
    }


def _values(x: Any) -> Any:
    return np.asarray(x).tolist()


# --- text --------------------------------------------------------------------------------------

_HEADS = ("keys", "scores", "factor", "m", "l")
_BLANK = ("",) * 5


def _text(found: dict[str, Any], exact: NDArray[np.float64]) -> list[str]:
    k_outer, q_outer = found["k_outer"], found["q_outer"]
    seen = f"{found['keys_seen']} of {found['keys']}" if found["causal"] else f"{found['keys']}"
    scale = "" if found["scale"] == 1.0 else f"{found['scale']:.4g} "
    differences = (np.subtract(order["output"]["o"], exact) for order in (k_outer, q_outer))
    difference = max(float(np.abs(x).max()) for x in differences)
    less = f"less than {_EXACT}" if difference < _EXACT else f"up to {difference:.1e}"
    between, blocks = k_outer["between"], len(k_outer["blocks"])
    once = sum(np.size(x) for x in q_outer["output"].values())
    whole: list[tuple[str, ...]] = [("", "", "whole row", "", "", "", _numbers(exact.tolist()))]
    first, second, last = _aligned(_q_outer(q_outer), _k_outer(k_outer), whole)
    return [
        found["title"],
        f"row {found['row']} of {found['rows']}, {seen} keys in blocks of {found['block']}, "
        f"d = {found['head_dim']}, scores = {scale}q.k",
        "m: largest score so far; l: sum of e^(score - m); factor: e^(m before - m), of older l, o",
        "",
        "Q outer (FlashAttention-2): m, l and o stay in registers, o is divided by l at the end",
        *first,
        f"through memory: {once} numbers, o and L, written once",
        "",
        "K/V outer (FlashAttention-1): a pass for each block reads m, l and o from memory and",
        "writes them back, o divided by l each time",
        *second,
        f"through memory: {between['read']} numbers read and {between['written']} written, "
        f"o, l and m in each of {blocks} passes",
        "",
        "softmax of the whole row at once, in float64",
        *last,
        f"both outputs differ from it by {less}",
    ]


def _q_outer(order: dict[str, Any]) -> list[tuple[str, ...]]:
    lines: list[tuple[str, ...]] = [("block", *_HEADS, "o, not yet divided by l")]
    lines += [(f"{b['block']}", *_state(b)) for b in order["blocks"]]
    output = order["output"]
    lines.append(("end", *_BLANK, _numbers(output["o"])))
    lines.append(("", *_BLANK, f"L = m + log l = {_number(output['L'])}"))
    return lines


def _k_outer(order: dict[str, Any]) -> list[tuple[str, ...]]:
    lines: list[tuple[str, ...]] = [("pass", *_HEADS, "o, divided by l")]
    for b in order["blocks"]:
        lines.append((f"{b['block']}", "", "reads", "", *_m_l_o(b["read"])))
        lines.append(("", *_state(b)))
        lines.append(("", "", "writes", "", *_m_l_o(b["written"])))
    return lines


def _state(b: dict[str, Any]) -> tuple[str, ...]:
    first, end = b["keys"]
    scores = " ".join(f"{x:.3g}" for x in b["scores"])
    if len(scores) > _SCORES:
        scores = " ".join(f"{x:.3g}" for x in b["scores"][:2]) + " ..."
    return (f"{first}-{end - 1}", scores, _number(b["factor"]), *_m_l_o(b))


def _m_l_o(state: dict[str, Any]) -> tuple[str, ...]:
    return _number(state["m"]), _number(state["l"]), _numbers(state["o"])


def _numbers(values: Sequence[float]) -> str:
    shown = values if len(values) <= _SHOWN else values[: _SHOWN - 1]
    return " ".join(f"{_number(x):>7}" for x in shown) + (
        " ..." if len(shown) < len(values) else ""
    )


def _number(x: float) -> str:
    """The number in 7 characters."""
    if not math.isfinite(x) or abs(x) < 99.9995:
        return f"{x:.3f}"
    return f"{x:.1f}" if abs(x) < 9999.95 else f"{x:.0e}"


def _aligned(*tables: list[tuple[str, ...]]) -> list[list[str]]:
    """The lines of tables whose columns stand below each other."""
    every = [line for table in tables for line in table]
    widths = [max(map(len, column)) for column in zip(*every, strict=True)]
    number, keys, scores, *numbers = widths[:-1]
    forms = (f">{number}", f"<{keys}", f" <{scores}", *(f">{width}" for width in numbers), "")

    def line(cells: tuple[str, ...]) -> str:
        return " ".join(format(x, form) for x, form in zip(cells, forms, strict=True)).rstrip()

    return [[line(cells) for cells in table] for table in tables]
