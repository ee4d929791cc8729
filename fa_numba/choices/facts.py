"""What was measured, as data: block sizes, times and limits, and what the assembler spills.

``tiles.csv`` has the block sizes of a kernel up to a head dimension, alone and beside options;
``measured.csv`` what rules compare; ``spills.csv`` the bytes that kernels spill, as ``python -m
experiments spills`` compiles them. A row says where it is from: on which GPU which command, or the
commit whose message has the times.
"""

from __future__ import annotations

import contextlib
import csv
import functools
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import NamedTuple

_HERE = Path(__file__).parent


def _rows(name: str) -> list[dict[str, str]]:
    with open(_HERE / name, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _of_kernel(name: str, unit: str, algorithm: str, of: str) -> list[dict[str, str]]:
    return [
        x for x in _rows(name) if (x["unit"], x["algorithm"], x["pass"]) == (unit, algorithm, of)
    ]


class Size(NamedTuple):
    """Block sizes up to ``head_dim``, beside what ``beside`` says, and where they are from. ``Bc``
    is 0 where it is as in other calls; ``most`` is the longest that a short call is, 0 for all.
    """

    beside: str
    head_dim: int
    most: int
    Br: int
    Bc: int
    stages: int
    source: str

    def __str__(self) -> str:
        case = f", case {self.beside!r}" if self.beside else ""
        size = f"{self.Br} x {self.Bc}" if self.Bc else f"{self.Br} rows"
        return f"tiles.csv has {size} for head_dim <= {self.head_dim}{case} ({self.source})"


_NUMBERS = Size._fields[1:-1]


@functools.cache
def sizes(unit: str, algorithm: str, of: str) -> tuple[Size, ...]:
    """The rows of a unit's kernel; ``of`` is "fwd", "bwd" or "dQ"."""
    return tuple(
        Size(x["beside"], *(int(x[n] or 0) for n in _NUMBERS), x["source"])  # type: ignore[call-arg, arg-type]
        for x in _of_kernel("tiles.csv", unit, algorithm, of)
    )


def size(unit: str, algorithm: str, of: str, head_dim: int, *beside: str) -> Size:
    """The row of a call of any length beside the first of these that has one, or nothing."""
    found = [x for x in sizes(unit, algorithm, of) if head_dim <= x.head_dim and not x.most]
    return next(x for what in (*beside, "") for x in found if x.beside == what)


@functools.cache
def _measured() -> dict[tuple[str, str], float]:
    return {(x["what"], x["setting"]): float(x["value"]) for x in _rows("measured.csv")}


def measured(what: str, setting: object = "") -> float:
    """The value in ``measured.csv``."""
    return _measured()[what, str(setting)]


class Spill(NamedTuple):
    """Bytes that a kernel with ``option`` spills ``beside`` another, d ``first`` to ``last``."""

    option: str
    beside: str
    first: int
    last: int
    bytes: int


SPILLS = _HERE / "spills.csv"
_allowed: ContextVar[bool] = ContextVar("fa_numba_spills", default=False)


@contextlib.contextmanager
def spills_allowed() -> Iterator[None]:
    """Plan inside what spills too, as who looks for its bytes does.

    Requests that are made inside say so (``Request.spilling``).
    """
    token = _allowed.set(True)
    try:
        yield
    finally:
        _allowed.reset(token)


@functools.cache
def _spills(unit: str, algorithm: str, of: str) -> tuple[Spill, ...]:
    rows = _of_kernel("spills.csv", unit, algorithm, of)
    return tuple(
        Spill(x["option"], x["beside"], *(int(x[n]) for n in ("first", "last", "bytes")))
        for x in rows
    )


def are_spills_allowed() -> bool:
    """Return whether this is inside ``spills_allowed``."""
    return _allowed.get()


def spills(unit: str, algorithm: str, of: str) -> tuple[Spill, ...]:
    """What spills of a unit's kernels; ``of`` is "fwd" or "bwd"."""
    return tuple(x for x in _spills(unit, algorithm, of) if x.bytes)
