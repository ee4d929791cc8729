"""The command ``python -m fa_numba trace``.

It prints the online softmax of one row of Q, block by block, in both loop orders. All numbers come
from runs of ``algorithms.fa1_forward`` and ``algorithms.fa2_forward``.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fa_numba import algorithms, reference
from fa_numba.algorithms import Step
from fa_numba.commands.arguments import MAX_SEQLEN, whole
from fa_numba.commands.text import columns

NAME = "trace"
HELP = "show the online softmax of one row step by step, in both loop orders"
DESCRIPTION = """\
Show how both loop orders compute the online softmax of one row of Q, one block of keys at a time.
Each printed line shows the largest score so far (m), the sum of the exponentials (l) and the
output (o). Each printed line also shows the factor e^(old m - new m), which multiplies l and o of
the earlier blocks.

FlashAttention-2 (Q outer) keeps m, l and o in registers and divides o by l once, at the end.
FlashAttention-1 (K/V outer) makes one pass for each block of keys. FlashAttention-1 divides o by
l in every pass, and stores m, l and o in memory between two passes.

Without options, the command trace shows an example with 8 keys in blocks of 4, which is small
enough to follow by hand."""

_EXACT = 1e-12  # smaller differences come from rounding in float64
_SCORES = 19  # longest text of the scores of a block, in characters


class Rows(NamedTuple):
    """An example to trace: a title, and the matrices Q, K and V of one head.

    ``Q`` has the shape (rows, head_dim), and its row 0 is traced. ``K`` and ``V`` have the shape
    (keys, head_dim). ``block`` is the number of keys in a block. ``scale`` is the factor of the
    scores, or None for the default.
    """

    title: str
    Q: NDArray[np.float64]
    K: NDArray[np.float64]
    V: NDArray[np.float64]
    block: int
    scale: float | None


def examples() -> dict[str, Rows]:
    """Return the worked examples by their number, such as "1"."""
    K = [[1, 1, 0, 0], [0, 1, 1, 0], [1, 0, 1, 1], [0, 0, 1, 0]]
    K += [[2, 1, 1, 1], [0, 1, 0, 1], [1, 1, 1, 0], [0, 0, 0, 1]]
    V = [[2, 1, 0, 3], [1, 0, 1, 2], [0, 2, 1, 1], [3, 1, 0, 0]]
    V += [[1, 3, 2, 0], [0, 1, 0, 2], [2, 0, 1, 1], [1, 0, 0, 3]]
    scores = [[3], [1], [2], [4], [5], [1], [3], [1]]
    diagonal, identity, ones = np.diag([1, 2, 3, 4]), np.eye(4), np.ones((1, 4))
    found: Any = (
        ("q = (1, 0, 2, 1)", 4, [[1, 0, 2, 1]], K, V),
        ("q = 1, and the scores are the keys and the values", 4, [[1]], scores, scores),
        ("V is the identity matrix, so o is the softmax", 2, ones, diagonal, identity),
    )
    rows = {}
    for n, (title, block, *arrays) in enumerate(found, 1):
        Q, keys, values = (np.array(x, np.float64) for x in arrays)
        rows[f"{n}"] = Rows(f"example {n}: {title}", Q, keys, values, block, 1.0)
    return rows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--example",
        choices=sorted(examples()),
        default="1",
        help="number of the example to show (default: 1). Example 1 has 8 keys and head_dim 4. "
        "Example 2 has 8 keys with the scores 3 1 2 4 5 1 3 1, and the value of each key equals "
        "the key's score. Example 3 has 4 keys with the scores 1 2 3 4, and the values are the "
        "identity matrix, so the output is the softmax",
    )
    parser.add_argument(
        "--block",
        type=whole(1, MAX_SEQLEN),
        metavar="BC",
        help="number of keys in a block (default: 4 in examples 1 and 2, and 2 in example 3)",
    )


def run(args: argparse.Namespace) -> str:
    """Return the output of the command."""
    rows = examples()[args.example]
    return "\n".join(_text(rows if args.block is None else rows._replace(block=args.block)))


def _watched(forward: Any, rows: Rows) -> tuple[tuple[Any, ...], list[Step]]:
    """Run an algorithm, and return its results for row 0 and the list of its steps.

    ``forward`` is the function of the algorithm, such as ``algorithms.fa2_forward``.
    """
    steps: list[Step] = []
    arrays = rows.Q, rows.K, rows.V
    found = forward(*arrays, Br=1, Bc=rows.block, scale=rows.scale, watch=steps.append)
    return tuple(x[0] for x in found), steps


# --- text --------------------------------------------------------------------------------------

_HEADS = ("keys", "scores", "factor", "m", "l")
_BLANK = ("",) * 5
_STATE = ("mi", "li", "Oi")


def _text(rows: Rows) -> list[str]:
    (o1, *_), passes = _watched(algorithms.fa1_forward, rows)
    (o2, L), blocks = _watched(algorithms.fa2_forward, rows)
    arrays = (x[None, None] for x in (rows.Q, rows.K, rows.V))
    every_row: Any = reference.attention(*arrays, scale=rows.scale)
    exact = every_row[0, 0, 0]
    difference = float(np.abs(np.subtract((o1, o2), exact)).max())
    less = f"less than {_EXACT}" if difference < _EXACT else f"up to {difference:.1e}"
    read, written = (
        sum(np.size(moved[name]) for moved in every for name in _STATE)
        for every in ([step.read for step in passes], [step.written for step in passes])
    )
    whole: list[tuple[str, ...]] = [("", "", "complete row", "", "", "", _numbers(exact))]
    first, second, last = _aligned(_q_outer(blocks, o2, L), _k_outer(passes), whole)
    return [
        rows.title,
        f"row 0 of {len(rows.Q)}, {len(rows.K)} keys in blocks of {rows.block}, "
        f"head_dim {rows.Q.shape[1]}, scores q.k",
        "m: largest score so far. l: sum of e^(score - m). factor: e^(old m - new m), which",
        "multiplies l and o of the earlier blocks",
        "",
        "Q outer (FlashAttention-2): m, l and o stay in registers, o is divided by l at the end",
        *first,
        f"memory traffic: {np.size(o2) + np.size(L)} numbers written, o and L, once",
        "",
        "K/V outer (FlashAttention-1): one pass for each block. A pass reads m, l and o from",
        "memory, divides o by l, and writes m, l and o back",
        *second,
        f"memory traffic: {read} numbers read and {written} written, "
        f"o, l and m in each of {len(passes)} passes",
        "",
        "softmax of the complete row at once, in float64",
        *last,
        f"both outputs differ from this result by {less}",
    ]


def _q_outer(steps: Sequence[Step], o: Any, L: Any) -> list[tuple[str, ...]]:
    lines: list[tuple[str, ...]] = [("block", *_HEADS, "o, not yet divided by l")]
    lines += [(f"{step.j}", *_computed(step)) for step in steps]
    lines.append(("end", *_BLANK, _numbers(o)))
    lines.append(("", *_BLANK, f"L = m + log l = {_number(L)}"))
    return lines


def _k_outer(steps: Sequence[Step]) -> list[tuple[str, ...]]:
    lines: list[tuple[str, ...]] = [("pass", *_HEADS, "o, divided by l")]
    for step in steps:
        lines.append((f"{step.j}", "", "reads", "", *_state(step.read)))
        lines.append(("", *_computed(step)))
        lines.append(("", "", "writes", "", *_state(step.written)))
    return lines


def _computed(step: Step) -> tuple[str, ...]:
    """Return the table cells of a step of the online softmax.

    The cells are the first and last key of the step, the scores of the keys, and the factor e^(old
    m - new m). The last cells are m, l and o of the row after the step.
    """
    scores = [f"{x:.3g}" for x in step.on_chip["Sij"][0]]
    shown = " ".join(scores)
    if len(shown) > _SCORES:
        shown = " ".join((*scores[:2], "..."))
    keys = f"{step.columns.start}-{step.columns.stop - 1}"
    return keys, shown, _number(step.on_chip["factor"][0]), *_state(step.on_chip)


def _state(arrays: Any) -> tuple[str, ...]:
    """Return m, l and o of row 0 as text. ``arrays`` contains "mi", "li" and "Oi" of a row tile."""
    m, l, o = (arrays[name][0] for name in _STATE)
    return _number(m), _number(l), _numbers(o)


def _numbers(values: Any) -> str:
    return " ".join(f"{_number(x):>7}" for x in values)


def _number(x: float) -> str:
    return f"{x:.3f}"


def _aligned(*tables: list[tuple[str, ...]]) -> list[list[str]]:
    """Return the lines of several tables, with equal widths of columns in all tables."""
    lines = iter(columns([line for table in tables for line in table], left=(1, 2, 6)))
    return [list(itertools.islice(lines, len(table))) for table in tables]
