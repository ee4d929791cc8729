"""Which tile of which array moves when: the accesses to global memory of kernels as they run."""

from __future__ import annotations

import linecache
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache
from types import CodeType, FrameType, FunctionType
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import Index3

if TYPE_CHECKING:
    from .context import Context

KINDS = ("load", "store", "atomic")
_STEP = re.compile(r"#\s*((?:Alg\. \d|FA-\d).*)")


@dataclass(frozen=True)
class TileAccess:
    """A part of an array that a block moves between global memory and itself at one step.

    ``kernel`` is the kernel function's name and ``block`` the block's index (x, y, z). ``step``
    counts the accesses of a launch from 0. ``rows`` are the first row and the one past the last of
    those touched, along the sequence; ``columns`` the same of the last axis, (0, 1) where an array
    has one value a row. ``kind`` is "load", "store" or "atomic"; ``elements`` and ``bytes`` are
    what moved. ``line`` is the comment above that names the step of the algorithm, ``place`` the
    line of the kernel, "file.py:123".
    """

    kernel: str
    block: Index3
    step: int
    array: str
    rows: tuple[int, int]
    columns: tuple[int, int]
    kind: str
    elements: int
    bytes: int
    line: str
    place: str


_traces: ContextVar[list[TileAccess] | None] = ContextVar("fa_numba_trace", default=None)


@contextmanager
def trace() -> Iterator[list[TileAccess]]:
    """Note every access to global memory of the kernels that run on the emulator inside.

    Yields a list that fills with ``TileAccess``. Accesses of one line of a kernel to one array that
    follow each other without a barrier between are one: a tile.

    >>> import numpy as np, fa_numba
    >>> q = np.ones((1, 1, 8, 4), np.float32)
    >>> with fa_numba.device.using("emulator"), trace() as accesses:
    ...     _ = fa_numba.flash_attention_2(q, q, q)
    >>> [(a.kind, a.array, a.rows) for a in accesses if a.array != "L"]
    [('load', 'Q', (0, 8)), ('load', 'K', (0, 8)), ('load', 'V', (0, 8)), ('store', 'O', (0, 8))]
    """
    found: list[TileAccess] = []
    token = _traces.set(found)
    try:
        yield found
    finally:
        _traces.reset(token)


class Trace:
    """What a launch adds to the list of `trace`."""

    def __init__(self, context: Context, kernel: FunctionType, found: list[TileAccess]) -> None:
        self._context, self._found = context, found
        self._file = kernel.__code__.co_filename
        self._own = [_lines(f) for f in (kernel, *_made_with(kernel))]
        self._first = len(found)
        self._last: Any = None

    def note(
        self, array: Any, kind: int, index: tuple[Any, ...], lengths: np.ndarray, active: np.ndarray
    ) -> None:
        """An access of the active lanes to `lengths` elements from `index` on."""
        context = self._context
        touched = active & (lengths > 0)
        if not touched.any():
            return
        ends = []
        for i in index[-2:]:
            places = np.broadcast_to(i, touched.shape)[touched]
            ends.append((int(places.min()), int(places.max()) + 1))
        if len(ends) == 2:
            last = np.broadcast_to(index[-1], touched.shape) + lengths
            ends[1] = (ends[1][0], int(last[touched].max()))
        else:
            ends.append((0, 1))
        number, elements = self._line(), int(lengths[touched].sum())
        key = (array.name, kind, number, context.clock, context.block)
        if key == self._last:
            before = self._found[-1]
            self._found[-1] = replace(
                before,
                rows=_joined(before.rows, ends[0]),
                columns=_joined(before.columns, ends[1]),
                elements=before.elements + elements,
                bytes=before.bytes + elements * array.itemsize,
            )
            return
        self._last = key
        file = self._file
        self._found.append(
            TileAccess(
                kernel=context.kernel,
                block=context.block,
                step=len(self._found) - self._first,
                array=array.name,
                rows=ends[0],
                columns=ends[1],
                kind=KINDS[kind],
                elements=elements,
                bytes=elements * array.itemsize,
                line=_step_above(file, number),
                place=f"{file.rsplit('/', 1)[-1]}:{number}",
            )
        )

    def _line(self) -> int:
        """The line at work of the kernel or of a function that its factory makes with it."""
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and not self._is_own(frame.f_code):
            frame = frame.f_back
        return 0 if frame is None else frame.f_lineno

    def _is_own(self, code: CodeType) -> bool:
        first = code.co_firstlineno  # without decorators, which the emulator leaves out
        return code.co_filename == self._file and any(first in lines for lines in self._own)

    def mark(self) -> int:
        """How far the list is, to come back to."""
        return len(self._found)

    def back_to(self, mark: int) -> None:
        """Forget what came later: the block begins again."""
        del self._found[mark:]
        self._last = None


def _joined(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    return min(a[0], b[0]), max(a[1], b[1])


@cache
def _step_above(file: str, number: int) -> str:
    """The nearest comment at or above a line that names a line of an algorithm."""
    for n in range(number, 0, -1):
        found = _STEP.search(linecache.getline(file, n))
        if found:
            return found.group(1).strip()
    return ""


def asked_for() -> bool:
    """Whether what runs here is traced."""
    return _traces.get() is not None


def started(context: Context, kernel: Any) -> Trace | None:
    """The trace of a launch, where one is asked for."""
    found = _traces.get()
    return None if found is None else Trace(context, kernel, found)


def _lines(function: FunctionType) -> range:
    code = function.__code__
    last = max(line or 0 for *_, line in code.co_lines())
    return range(code.co_firstlineno, last + 1)


def _made_with(kernel: FunctionType) -> list[FunctionType]:
    """The functions that the kernel calls and that its own factory has made."""
    factory, local, _ = kernel.__qualname__.rpartition("<locals>")
    cells = (cell.cell_contents for cell in kernel.__closure__ or ())
    called = [getattr(value, "py_func", None) for value in cells]
    return [f for f in called if local and f and f.__qualname__.startswith(factory + local)]
