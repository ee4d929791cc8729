"""Runs a kernel's Python function on the CPU: a greenlet a thread, one block after the other.

A thread runs until it waits, at a barrier of the block, at a named one or in a collective of its
warp, or returns. When nothing can run, either all threads of the block stand at one barrier and it
opens, or the kernel is at fault and the error says who waits where.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import product
from math import prod
from types import TracebackType
from typing import Any

import numpy as np
from greenlet import getcurrent, greenlet

from .context import Context, running
from .counts import Counts
from .errors import BarrierDivergence, Deadlock, EmulatorError, Index3, SharedHazard
from .global_memory import GlobalArray
from .rebind import Rebinder
from .source_lines import source_line
from .threads import AT_BARRIER, AT_NAMED, AT_WARP, DONE, READY, WARP, Site, Thread, Warp

MAX_THREADS = 1024


class Launch(Context):
    """A launch that runs: its blocks one after the other, the threads of each in turn."""

    __slots__ = ()

    def run_block(self, function: Callable[..., None], args: Sequence[Any], block: Index3) -> None:
        self.block = block
        shape = self.block_shape
        count = prod(shape)
        warps = [Warp(w) for w in range(-(-count // WARP))]
        threads = self._threads = [Thread(t, shape, warps[t // WARP]) for t in range(count)]
        for t in threads:
            t.warp.lanes.append(t)
            t.warp.mask |= 1 << t.lane
            t.run = greenlet(partial(self._thread, t, function, args))
        self._statics, self._dynamics, self._buffers, self._tiles = {}, {}, {}, []
        self._opened = {}
        self.clock = self._stale = 0
        self._open_barrier(warps)
        ready = self._ready = deque(threads)
        self.thread = threads[0]
        self._hub = getcurrent()
        cuda = self._cuda
        place, cuda.blockIdx.x, cuda.blockIdx.y, cuda.blockIdx.z = cuda.threadIdx, *block
        while True:
            while ready:
                t = ready.popleft()
                if t.warp is not self.thread.warp:
                    for array in (*self._statics.values(), *self._dynamics.values()):
                        array.turn_to(t.warp.index)
                self.thread, self.tid = t, t.tid
                place.x, place.y, place.z, cuda.laneid = t.x, t.y, t.z, t.lane
                self.me, self.several = t.warp.start + t.tid, t.warp.several
                t.run.switch()
            first = threads[0].site
            if all(t.state == AT_BARRIER and t.site == first for t in threads):
                self._release(threads)
                self._open_barrier(warps)
                self._stale = 0
                ready.extend(threads)
            elif all(t.state == DONE for t in threads) and not self._named_barriers:
                return
            else:
                raise self._stalled()

    def end(self) -> None:
        """Unwind the threads that an error left waiting."""
        for t in self._threads:
            if not t.run.dead:
                t.run.throw()

    def _thread(self, t: Thread, function: Callable[..., None], args: Sequence[Any]) -> None:
        try:
            function(*args)
        except EmulatorError:
            raise
        except Exception as error:
            place = f"in block {self.block}, thread ({t.x}, {t.y}, {t.z})"
            error.add_note(f"{place}, at {self._failed_line(error.__traceback__)}")
            raise
        t.state = DONE
        self._stale = 0
        for dst, first, _, _ in [copy for group in (*t.groups, t.open) for copy in group]:
            line = self.line_of(dst.buffer.flights[first][1])
            raise SharedHazard(
                f"the thread exits with a copy into {dst._element(first)} in flight",
                block=self.block,
                thread=(t.x, t.y, t.z),
                array=dst.name,
                line=line,
            )

    def _failed_line(self, trace: TracebackType | None) -> str:
        line = "outside the kernel"
        while trace is not None:
            if id(trace.tb_frame.f_code) in self._codes:
                line = source_line(trace.tb_frame.f_code, trace.tb_lasti)
            trace = trace.tb_next
        return line

    def _release(self, threads: list[Thread]) -> None:
        """Let the threads of the block go on, each with what the barrier gives it."""
        operation = threads[0].operation
        values = [t.value for t in threads]
        result: Any = None
        if operation == "syncthreads_count":
            result = sum(1 for v in values if v)
        elif operation == "syncthreads_and":
            result = int(all(values))
        elif operation == "syncthreads_or":
            result = int(any(values))
        for t in threads:
            t.state, t.value = READY, result

    def _stalled(self) -> EmulatorError:
        """The error for a block in which nothing runs: who waits for whom, and where.

        Also for one that ends with a named barrier that some came to and that never opened.
        """
        kind: type[EmulatorError] = BarrierDivergence
        site: Site | None = None
        in_warp = [t for t in self._threads if t.state == AT_WARP]
        at_barrier = [t for t in self._threads if t.state == AT_BARRIER]
        at_named = [t for t in self._threads if t.state == AT_NAMED]
        deserted = [t for t in in_warp if self._deserted(t)]
        if deserted:
            t = deserted[0]
            text = f"{t.operation} with mask {t.value:#010x} is not reached by all its lanes"
        elif at_named:
            t, kind = at_named[0], Deadlock
            text = "; ".join(map(self._missing, self._named_barriers))
        elif at_barrier:
            t = at_barrier[0]
            text = f"{t.operation} is not reached by all threads of the block"
        elif in_warp:
            t, kind = in_warp[0], Deadlock
            text = f"lanes wait for one another in {t.operation} with different masks"
        else:
            barrier, named = next(iter(self._named_barriers.items()))
            t, site, text = named.arrived[0].lanes[0], named.site, self._missing(barrier)
        return kind(
            f"{text}: {self._waiters()}",
            block=self.block,
            thread=(t.x, t.y, t.z),
            line=self.line_of(site or t.site),
        )

    def _deserted(self, t: Thread) -> bool:
        """Whether a lane that `t` waits for in a warp collective is somewhere else."""
        named = [u for u in t.warp.lanes if t.value >> u.lane & 1]
        return any(u.state != AT_WARP or u.site != t.site for u in named)


def _extent(name: str, value: Any) -> Index3:
    axes = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    if not 1 <= len(axes) <= 3 or any(not isinstance(n, (int, np.integer)) or n < 1 for n in axes):
        raise ValueError(f"{name} = {value!r}, allowed: one to three positive integers")
    x, y, z = (*(int(n) for n in axes), 1, 1)[:3]
    return x, y, z


def launch(
    py_func: Callable[..., None],
    grid: int | tuple[int, ...],
    block: int | tuple[int, ...],
    args: Sequence[Any],
    *,
    shared_bytes: int = 0,
    uncounted: Collection[str] = (),
) -> Counts:
    """Run a kernel on the CPU and count its global accesses.

    Parameters
    ----------
    py_func : a kernel, jitted or plain; its source runs unchanged.
    grid, block : extents, one to three integers.
    args : NumPy arrays, any strides and any real dtype, become `GlobalArray`s named after the
        kernel's parameters and are written in place; NumPy scalars become Python numbers; so do
        the fields of a named tuple, under their own names; anything else passes through.
    shared_bytes : dynamic shared memory.
    uncounted : names of arrays that the counts leave out.

    Raises
    ------
    EmulatorError : a subclass for each fault of the kernel, see errors.py.
    ValueError, TypeError : bad extents or arguments.
    Errors of Python in the kernel's code pass, with a note that names block, thread and line.

    Arithmetic between stores is that of Python floats, in double precision; stores round.
    """
    function = getattr(py_func, "py_func", py_func)
    extent, shape = _extent("grid", grid), _extent("block", block)
    if prod(shape) > MAX_THREADS:
        raise ValueError(f"block = {block!r}, allowed: at most {MAX_THREADS} threads")
    context = Launch(extent, shape, shared_bytes)
    rebinder = Rebinder(context._cuda)
    names = list(inspect.signature(function).parameters)
    if len(names) != len(args):
        raise TypeError(f"{function.__name__} takes {len(names)} arguments, got {len(args)}")
    arrays: list[GlobalArray] = []

    def passed(name: str, value: Any) -> Any:
        if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.ndim == 0):
            return value.item()
        if isinstance(value, np.ndarray):
            arrays.append(GlobalArray(context, name, value))
            return arrays[-1]
        if hasattr(value, "_fields"):
            return type(value)(*map(passed, value._fields, value))
        return value

    values = [passed(name, value) for name, value in zip(names, args, strict=True)]
    rebound = rebinder.function(function)
    context._codes = rebinder.codes
    running.contexts.append(context)
    try:
        for z, y, x in product(range(extent[2]), range(extent[1]), range(extent[0])):
            context.run_block(rebound, values, (x, y, z))
    finally:
        context.end()
        running.contexts.pop()
    counts = Counts()
    for a in arrays:
        if a.name in uncounted:
            continue
        for number, elements, size in (
            (a.tally.loads, counts.loads, counts.load_bytes),
            (a.tally.stores, counts.stores, counts.store_bytes),
        ):
            if number:
                elements[a.name] += number
                size[a.name] += number * a.itemsize
    return counts
