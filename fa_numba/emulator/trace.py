"""Traces: the tiles that kernels load and store, in the order of their accesses."""

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
_STEP = re.compile(r"#\s*((?:Alg\. \d|FA-\d).*)")  # a comment that names a line of an algorithm


@dataclass(frozen=True)
class TileAccess:
    """A part of an array that a thread block loads or stores at one step of the kernel.

    Parameters
    ----------
    kernel : str
        Name of the kernel function.
    block : tuple of int
        (x, y, z) index of the thread block.
    step : int
        Number of the access in its launch, from 0.
    array : str
        Name of the array.
    rows : tuple of int
        First row along the sequence axis, and one past the last.
    columns : tuple of int
        First index along the last axis, and one past the last; (0, 1) if the array has one value
        per row.
    kind : str
        "load", "store" or "atomic".
    elements, bytes : int
        Elements and bytes that were loaded or stored.
    line : str
        The comment above the access that names the step of the algorithm, such as
        "Alg. 1 line 7: load Kj, Vj". Empty if there is none.
    place : str
        Line of the kernel as "file.py:123".
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
    """Record every access to global memory by kernels inside the ``with`` block.

    The kernels must run on the emulator.

    An entry is a tile: consecutive accesses of one kernel line to one array, without a barrier
    between them. Thread blocks run one after the other.

    Yields
    ------
    list of TileAccess
        Empty at first; each access is appended.

    Examples
    --------
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
    """The recorder of one launch: it appends accesses to the list of `trace`."""

    def __init__(self, context: Context, kernel: FunctionType, found: list[TileAccess]) -> None:
        self._context, self._found = context, found
        self._file = kernel.__code__.co_filename
        self._own = [_lines(f) for f in (kernel, *_made_with(kernel))]
        self._first = len(found)
        self._last: Any = None

    def note(
        self, array: Any, kind: int, index: tuple[Any, ...], lengths: np.ndarray, active: np.ndarray
    ) -> None:
        """Record an access of the active lanes to `lengths` elements from `index` on.

        An access that continues the last entry is added to this entry.

        Parameters
        ----------
        array : GlobalArray
            The array.
        kind : int
            Index into `KINDS`.
        index : tuple
            Index of each lane's first element, an int or an array over the lanes for each axis.
        lengths : ndarray of int
            Elements along the last axis, by lane.
        active : ndarray of bool
            Lanes that take part.
        """
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
        """Return the number of the kernel's source line that is running now; 0 if there is none.

        The line may also be of a device function that the kernel's factory defined.
        """
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and not self._is_own(frame.f_code):
            frame = frame.f_back
        return 0 if frame is None else frame.f_lineno

    def _is_own(self, code: CodeType) -> bool:
        """Return whether code belongs to the kernel or to a function that its factory defined."""
        first = code.co_firstlineno  # rewritten functions have no decorators
        return code.co_filename == self._file and any(first in lines for lines in self._own)

    def mark(self) -> int:
        """Return the number of entries, to which `back_to` can return.

        Returns
        -------
        int
            The number.
        """
        return len(self._found)

    def back_to(self, mark: int) -> None:
        """Remove the entries after `mark`, because the thread block begins again.

        Parameters
        ----------
        mark : int
            A number that the method `mark` returned.
        """
        del self._found[mark:]
        self._last = None


def _joined(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    """Return the smallest range (first, one past the last) that contains two ranges."""
    return min(a[0], b[0]), max(a[1], b[1])


@cache
def _step_above(file: str, number: int) -> str:
    """Return the nearest comment at or above a line that names a step of the algorithm.

    An example is "Alg. 1 line 7: load Kj, Vj". Return "" if there is no such comment.
    """
    for n in range(number, 0, -1):
        found = _STEP.search(linecache.getline(file, n))
        if found:
            return found.group(1).strip()
    return ""


def asked_for() -> bool:
    """Return whether kernels that run here are traced.

    Returns
    -------
    bool
        Whether the code is inside of `trace`.
    """
    return _traces.get() is not None


def started(context: Context, kernel: Any) -> Trace | None:
    """Return the recorder of a new launch; None outside of `trace`.

    Parameters
    ----------
    context : Context
        The launch.
    kernel : function
        The kernel's Python function.

    Returns
    -------
    Trace or None
        The recorder.
    """
    found = _traces.get()
    return None if found is None else Trace(context, kernel, found)


def _lines(function: FunctionType) -> range:
    """Return the numbers of the source lines of a function."""
    code = function.__code__
    last = max(line or 0 for *_, line in code.co_lines())
    return range(code.co_firstlineno, last + 1)


def _made_with(kernel: FunctionType) -> list[FunctionType]:
    """Return the functions that a kernel calls and that the kernel's own factory defined."""
    factory, local, _ = kernel.__qualname__.rpartition("<locals>")
    cells = (cell.cell_contents for cell in kernel.__closure__ or ())
    called = [getattr(value, "py_func", None) for value in cells]
    return [f for f in called if local and f and f.__qualname__.startswith(factory + local)]
