"""The measurements and tile sizes behind the choices, read from CSV files.

file           contents
tiles.csv      tile sizes, by kernel, largest head dimension and kind of call
measured.csv   numbers that the rules for choices compare
spills.csv     bytes of registers that kernels spill (``python -m experiments spills`` writes it)

Each row says where its numbers are from: a GPU and a command, or the commit whose message has the
times.
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
    return list(csv.DictReader((_HERE / name).read_text("utf-8").splitlines()))


def _of_kernel(name: str, unit: str, algorithm: str, of: str) -> list[dict[str, str]]:
    return [
        x for x in _rows(name) if (x["unit"], x["algorithm"], x["pass"]) == (unit, algorithm, of)
    ]


class Size(NamedTuple):
    """A row of tiles.csv: the tile sizes of a kernel.

    field      meaning
    case       kind of calls for which the row is valid, such as "options" or "3 planes"; "" for
               calls without options
    head_dim   largest head dimension for which the row is valid
    most       greatest length of a short call for which the row is valid; 0 for calls of any length
    Br, Bc     rows and columns of a tile. Bc is 0 in a row for short calls whose tiles have as many
               columns as the tiles of longer calls
    stages     number of pipeline slots for tiles of K, and of V
    source     where the numbers are from, such as a command or a commit
    """

    case: str
    head_dim: int
    most: int
    Br: int
    Bc: int
    stages: int
    source: str

    def __str__(self) -> str:
        case = f", case {self.case!r}" if self.case else ""
        size = f"{self.Br} x {self.Bc}" if self.Bc else f"{self.Br} rows"
        return f"tiles.csv has {size} for head_dim <= {self.head_dim}{case} ({self.source})"


_NUMBERS = Size._fields[1:-1]


@functools.cache
def sizes(unit: str, algorithm: str, of: str) -> tuple[Size, ...]:
    """Return the rows of tiles.csv for a unit's kernel. ``of`` is "fwd", "bwd" or "dQ"."""
    return tuple(
        Size(x["case"], *(int(x[n] or 0) for n in _NUMBERS), x["source"])  # type: ignore[call-arg, arg-type]
        for x in _of_kernel("tiles.csv", unit, algorithm, of)
    )


def size(unit: str, algorithm: str, of: str, head_dim: int, *cases: str) -> Size:
    """Return the row of tiles.csv for a call of any length with a head dimension.

    The ``cases`` are tried in order, and then the case "", which is for calls without options. The
    first case that has a row for the head dimension is taken.
    """
    found = [x for x in sizes(unit, algorithm, of) if head_dim <= x.head_dim and not x.most]
    return next(x for case in (*cases, "") for x in found if x.case == case)


@functools.cache
def _measured() -> dict[tuple[str, str], float]:
    return {(x["what"], x["setting"]): float(x["value"]) for x in _rows("measured.csv")}


def measured(what: str, setting: object = "") -> float:
    """Return a number of measured.csv.

    ``what`` is the name of the number. ``setting`` selects one of several numbers with this name:
    "mma", for example, selects the number for unit "mma". ``setting`` is "" for a number that the
    table lists without a setting.
    """
    return _measured()[what, str(setting)]


class Spill(NamedTuple):
    """A row of spills.csv: the bytes of registers that a kernel with a pair of options spills.

    field         meaning
    option        first option of the pair, by the name of its field in ``Features``
    beside        second option of the pair. Three values are not names of options: "lengths" (any
                  lengths of sequences), "no mask" (neither a causal mask nor a window) and "one
                  chunk" (a grid without chunks)
    first, last   smallest and largest head dimension for which the row is valid
    bytes         number of bytes that the kernel spills; 0 if it spills none
    """

    option: str
    beside: str
    first: int
    last: int
    bytes: int


SPILLS = _HERE / "spills.csv"
_allowed: ContextVar[bool] = ContextVar("fa_numba_spills", default=False)


@contextlib.contextmanager
def spills_allowed() -> Iterator[None]:
    """A context manager inside of which plans may contain kernels that spill registers.

    The command ``python -m experiments spills`` needs such plans. Requests that are made inside of
    the context manager have ``Request.spilling`` set to True.
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
    """Return whether this code runs inside of ``spills_allowed``."""
    return _allowed.get()


def spills(unit: str, algorithm: str, of: str) -> tuple[Spill, ...]:
    """Return the rows of spills.csv in which a unit's kernel spills at least one byte.

    ``of`` is the pass of the kernel: "fwd" or "bwd".
    """
    return tuple(x for x in _spills(unit, algorithm, of) if x.bytes)
