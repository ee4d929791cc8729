"""Launches: runs a kernel's Python function on the CPU, for all lanes at once.

If thread blocks have few lanes, several thread blocks run at the same time (batches.py). Otherwise
the thread blocks run one after the other.

A thread block begins as one group of lanes. Sometimes lanes of a group wait for other lanes of the
same group, for example at a barrier under a branch. Then the writes of the thread block are undone,
and the thread block begins again with the waiting lanes in a group of their own.

If a thread block has several groups, each group is a greenlet, which runs until it waits or
returns. When no group can run, there are two cases. If all threads of the thread block wait at one
barrier, the barrier opens. Otherwise the kernel has a fault, and the error says which threads wait
at which line.
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from math import prod
from types import CodeType, TracebackType
from typing import Any
from weakref import WeakSet

import numpy as np
from greenlet import getcurrent, greenlet

from .arguments import passed
from .batches import Kept, add_in_turn, blocks_at_once
from .checks import PITCH
from .context import running
from .counts import Counts, Traffic
from .errors import EmulatorError, Index3, SharedHazard, framed
from .exits import Leaving
from .global_memory import GlobalArray, track_owners
from .grids import Grid
from .groups import AT_BARRIER, AT_GRID, DONE, READY, WARP, Group, OneByOne, Parting
from .mbarriers import MbarrierTile
from .products import WARPGROUP, Products, Together
from .progress import Progress
from .rebind import Rebinder, diverging
from .shared_memory import spares
from .source_lines import source_line
from .trace import asked_for, started

MAX_THREADS = 1024
TURNS = 3  # most groups into which `schedule` divides the warps of a thread block
_seed: ContextVar[int | None] = ContextVar("fa_numba_schedule", default=None)
# Kernels whose thread blocks could not run at the same time in an earlier launch.
_one_by_one: WeakSet[Callable[..., None]] = WeakSet()
# Code of kernels with mbarriers, whose thread blocks never run at the same time.
_with_mbarriers: set[CodeType] = set()


@contextmanager
def schedule(seed: int) -> Iterator[None]:
    """Run the thread blocks, and the warps of each, in a random order that `seed` decides.

    Inside the ``with`` block, the thread blocks of a launch run in a random order. The warps of
    each thread block form random groups, and the groups take turns at random. A correct kernel
    gives the same results in every order, apart from the rounding of atomic additions. Some faults
    show in some orders only.

    Parameters
    ----------
    seed : int
        Seed of the random order, 0 or more.

    Yields
    ------
    None
        The context.

    Raises
    ------
    ValueError
        If `seed` is not an integer of 0 or more.

    Examples
    --------
    >>> import numpy as np
    >>> from numba import cuda
    >>> def fill(x):
    ...     x[cuda.grid(1)] = cuda.blockIdx.x
    >>> x = np.zeros(4, np.int32)
    >>> with schedule(1):
    ...     counts = launch(fill, 4, 1, x)
    >>> print(x)
    [0 1 2 3]
    """
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or seed < 0:
        raise ValueError(f"seed must be an integer of at least 0, got {seed!r}")
    token = _seed.set(int(seed))
    try:
        yield
    finally:
        _seed.reset(token)


class Launch(Products):
    """A running launch: decides which thread block runs next, and which of its groups of lanes."""

    __slots__ = (
        "args", "arrays", "function", "kernel_function", "partition", "originals", "_random",
        "_turns", "_whole", "_apart", "_grid", "_rebinder",
    )  # fmt: skip

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.arrays: list[GlobalArray] = []
        # By thread: the number of the thread's group. Lanes that had to wait for others of their
        # group get a new number.
        self.partition = np.zeros(self.threads, np.int64)
        seed = _seed.get()
        self._random = None if seed is None else np.random.default_rng(seed)
        # By thread: a random number of `schedule`, by which groups are divided in one thread block.
        self._turns = np.zeros(self.threads, np.int64)
        self._whole: dict[int, Group] = {}  # by number of thread blocks: the group of all lanes
        # The groups of the last thread block with several groups, and how its threads are divided.
        self._apart: tuple[bytes, list[Group]] = (b"", [])
        self.originals: dict[int, CodeType] = {}
        self._grid: Grid | None = None

    def rebind(self) -> None:
        """Rewrite the kernel, and all functions that the kernel calls, for this launch."""
        self._rebinder = Rebinder(self)
        self.function = self._rebinder.function(self.kernel_function)

    def release(self) -> None:
        """Free the memory of a launch whose results have been taken.

        Arrays, functions and the launch refer to each other. Without this method, their memory
        would be occupied until Python's garbage collector runs.
        """
        self._rebinder.release()
        for array in self.arrays:
            array.release()
        for cls in Launch.__mro__:
            for name in cls.__dict__.get("__slots__", ()):
                if hasattr(self, name):
                    delattr(self, name)

    def agree(self, value: Any) -> Any:
        """Return the value that all lanes have in common, as a single number.

        `value` is a number, or an array with one element per lane. Rewritten kernels call this
        method if `value` decides whether lanes reach a `return`, `break` or `continue`, such as the
        condition of an `if`. If the elements differ, the method raises an exception, and the thread
        block begins again:

        - In functions of this package, and in kernels with mbarriers, the method raises Parting.
          Lanes with different values then run in different groups.
        - In other functions, the method raises Leaving. The function is then rewritten, so that
          lanes that have left are masked out.
        """
        if value.__class__ is not np.ndarray:
            return value
        try:
            return self.uniform(value)
        except Parting:
            frame = sys._getframe(1)
            module = str(frame.f_globals.get("__name__", ""))
            if self._mbarriers or module.split(".")[0] == "fa_numba":
                raise
            raise Leaving(frame.f_code) from None

    def run(self, kernel: Callable[..., None], args: Sequence[Any]) -> bool:
        """Run all thread blocks of a kernel; return whether several ran at the same time.

        `args` are the arguments as `arguments.passed` returns them.
        """
        self.kernel_function, self.args = kernel, args
        self.rebind()
        if any("this_grid" in code.co_names for code in self._codes.values()):
            self._run_grid()
            return False
        blocks = prod(self.grid)
        numbers = list(range(1, blocks + 1))
        if self._random is not None:
            self._random.shuffle(numbers)
        done, together = 0, self.at_once > 1
        while done < blocks:
            count = min(self.at_once, blocks - done) if together else 1
            if count > 1 and not self._run_together(1 + done, count):
                together = False
                continue
            if count == 1:
                self._run_block(numbers[done])
            done += count
            self.progress.done = done
            self.tick()
        return together

    def _run_together(self, first: int, count: int) -> bool:
        """Run `count` thread blocks at the same time. The first one has the number `first`.

        Return True if this was possible. Otherwise undo all effects of these thread blocks, and
        return False.
        """
        kept = Kept(self)
        try:
            self._run_groups(first, count)
        except Leaving as leaving:
            kept.restore()
            self._mask_out(leaving)
            return self._run_together(first, count)
        except (Exception, OneByOne, Parting):
            kept.restore()
            return False
        add_in_turn(self.additions)
        return True

    def _run_grid(self) -> None:
        """Run all thread blocks of a kernel that synchronises the grid."""
        while True:
            kept = Kept(self)
            self._grid = Grid(self)
            try:
                self._grid.run()
                return
            except Leaving as leaving:
                self._mask_out(leaving)
            except Parting as parting:
                self._part(self.group, parting)
            self._grid.end()
            self.progress.done = 0
            kept.restore()

    def sync_grid(self) -> None:
        """Wait for all threads of the grid (``grid.sync()``) that have not returned."""
        group, site = self.group, self.site()
        if self._grid is None:
            text = (
                "this_grid is called under another name, so that the emulator does not run all "
                "thread blocks at the same time. Call cuda.cg.this_grid()"
            )
            raise self.fault(EmulatorError, text)
        here = self.active()
        returned = None if group.exits is None else group.exits.returned()
        if not (here if returned is None else here | returned).all():
            raise Parting(here)
        self.instruction("barrier")
        if group.run is None:
            group.site = site
            self._grid.wait()
        else:
            self._wait(AT_GRID, site, "grid.sync")

    def _mask_out(self, leaving: Leaving) -> None:
        """Rewrite a function of the kernel again, so that its lanes may leave at different times.

        In the new version, lanes may disagree on a `return`, `break` or `continue`. `leaving`
        contains the code of the old version.
        """
        diverging.add(self.originals[id(leaving.code)])
        self.rebind()

    def _run_block(self, number: int) -> None:
        """Run one thread block. Run it again if its lanes must be divided into other groups.

        `number` is the number of the thread block in the launch, from 1 on.
        """
        if self._random is not None:
            warps = self._random.integers(0, TURNS, self.warps)
            self._turns = warps[np.arange(self.threads) // WARP // self.warps_together]
        while True:
            kept = Kept(self, owners=False)
            try:
                self._run_groups(number, 1)
                return
            except Leaving as leaving:
                self._mask_out(leaving)
            except Parting as parting:
                self._part(self.group, parting)
            except Together:
                self._turns = self._turns[np.arange(self.threads) // WARPGROUP * WARPGROUP]
                self.partition[:] = 0
                self.warps_together = WARPGROUP // WARP
            self.end()
            kept.restore()

    def init_mbarrier(self, tile: MbarrierTile, index: Any, count: Any) -> None:
        """Initialise an mbarrier; see `Mbarriers.init_mbarrier`.

        The warpgroups of a thread block with mbarriers nearly always wait for each other. A thread
        block that still runs as one group therefore begins again at its first mbarrier, and each
        warpgroup is a group of its own.
        """
        super().init_mbarrier(tile, index, count)
        if self.threads > WARPGROUP and self._random is None and not self.partition.any():
            _with_mbarriers.add(self.kernel_function.__code__)
            raise Parting(self.active())

    def _part(self, group: Group, parting: Parting) -> None:
        """Put the lanes of `parting` into a group of their own when the thread block runs again.

        `group` is the group from which the lanes are taken. A thread block with mbarriers and
        several warpgroups is first divided into its warpgroups.
        """
        if self._mbarriers and self.threads > WARPGROUP and not self.partition.any():
            self.into_warpgroups()
            return
        lanes = parting.lanes if parting.lanes.size else group.everyone
        self.partition[group.tids[lanes]] = self.partition.max() + 1

    def into_warpgroups(self) -> None:
        """Put each warpgroup of every later thread block into a separate group."""
        self.partition[:] = np.arange(self.threads) // WARPGROUP

    def _grouped(self, blocks: int) -> list[Group]:
        """Return the groups of one thread block, or the single group of several thread blocks.

        `blocks` is the number of thread blocks that run at the same time.
        """
        numbers = self.partition * TURNS + self._turns
        apart = dict.fromkeys(numbers.tolist()) if blocks == 1 else {}
        if len(apart) > 1:
            return self._divided(numbers, apart)
        whole = self._whole.get(blocks)
        if whole is None:
            tids = np.arange(self.threads) + PITCH * np.arange(blocks)[:, None]
            whole = self._whole[blocks] = Group(tids.reshape(-1), self.block_shape)
        whole.begin()
        return [whole]

    def _divided(self, numbers: np.ndarray, apart: Iterable[int]) -> list[Group]:
        """Divide the threads of a thread block into groups, and return the groups.

        `numbers[t]` is the number of the group of thread t. `apart` contains each number once. If
        the previous thread block was divided in the same way, its groups are used again. The thread
        blocks of a grid that synchronises do not share groups, because they run at the same time.
        """
        division = numbers.tobytes()
        if division != self._apart[0] or self._grid is not None:
            groups = [Group(np.flatnonzero(numbers == n), self.block_shape) for n in apart]
            self._apart = division, groups
        for group in self._apart[1]:
            group.begin()
        return self._apart[1]

    def _run_groups(self, first: int, count: int) -> None:
        """Run `count` thread blocks from their beginning. The first one has the number `first`."""
        groups = self._groups = self._grouped(count)
        self.group, self.mask, self._outer = groups[0], None, []
        self.begin_blocks(first, count)
        self._meetings, self._named_barriers, self._opened = {}, {}, {}
        self._warps_active = (self, 0)
        self._open_barrier()
        if len(groups) == 1:
            self._enter(groups[0])
            self._run_group(groups[0])
        else:
            self._hub = getcurrent()
            for g in groups:
                g.run = greenlet(partial(self._run_group, g))
            self._take_turns()
        self.left_over()

    def _take_turns(self) -> None:
        """Let the groups of the thread block run in turn until all have returned.

        Raise the error of a stalled thread block if no group can run and no barrier can open.
        """
        groups = self._groups
        ready = self._ready = deque(groups)
        while True:
            while ready:
                if self._random is not None:
                    ready.rotate(int(self._random.integers(len(ready))))
                g = ready.popleft()
                self._enter(g)
                assert g.run is not None
                g.run.switch()
            if all(g.state == AT_BARRIER for g in groups) and self._open_if_all_wait():
                ready.extend(groups)
            elif all(g.state == DONE for g in groups):
                return
            elif self._grid is not None and all(g.state in (AT_GRID, DONE) for g in groups):
                self._grid.wait()
                ready = self._ready
                ready.extend(g for g in groups if g.state == AT_GRID)
                for g in ready:
                    g.state = READY
            else:
                raise self._stalled()

    def _enter(self, group: Group) -> None:
        """Make a group the running group: restore its mask, and set `threadIdx` and `laneid`."""
        self.group, self.mask, self._outer = group, group.mask, group.outer
        cuda = self._cuda
        place = cuda.threadIdx
        place.x, place.y, place.z, cuda.laneid = group.x, group.y, group.z, group.laneid

    def end(self) -> None:
        """End the greenlets of the groups that still wait after an error."""
        for g in self._groups:
            if g.run is not None and not g.run.dead:
                g.run.throw()

    def _run_group(self, group: Group) -> None:
        """Run the kernel's function for the lanes of one group.

        Errors of the kernel's own Python code get the thread block, the thread and the source line.
        """
        try:
            with np.errstate(all="ignore"):  # each greenlet has its own error state
                self.function(*self.args)
        except EmulatorError:
            raise
        except Exception as error:
            if not self.several and not hasattr(error, "fa_numba_placed"):
                self._place(error)
            raise
        self.mask = None
        self._exit()
        group.state = DONE

    def _exit(self) -> None:
        """Raise SharedHazard if lanes exit while one of their asynchronous copies is in flight."""
        for copy in self.group.copies:
            lanes = np.flatnonzero(copy.pending & self.active())
            if lanes.size:
                if self.several:
                    raise OneByOne
                lane = int(lanes[0])
                p = copy.dst.first + int(copy.e[lane])
                site, tid = self.sites[copy.dst.buffer.sites[0, p]], int(self.group.tids[lane])
                text = (
                    f"the thread exits while its copy into {copy.dst._element(p)} is in flight. "
                    "Call commit_async() and wait_async() before the thread ends"
                )
                raise self.fault_at(SharedHazard, text, tid, site, copy.dst.name)
        super()._exit()

    def _place(self, error: Exception) -> None:
        """Add the thread block, the thread, the array and the source line to an error's message."""
        lane = getattr(error, "lane", None)
        lane = self.first_lane() if lane is None else lane
        thread = self.place_of(int(self.group.tids[lane]))
        line, array = self._failed_line(error.__traceback__), getattr(error, "array", None)
        if len(error.args) == 1 and str(error) == error.args[0]:
            error.args = (framed(error.args[0], self.block, thread, array, line),)
        else:
            error.add_note(framed("", self.block, thread, array, line).lstrip())

    def _failed_line(self, trace: TracebackType | None) -> str:
        """Return the source line of the kernel at which a traceback ends, as text."""
        line = "outside the kernel"
        while trace is not None:
            if id(trace.tb_frame.f_code) in self._codes:
                line = source_line(trace.tb_frame.f_code, trace.tb_lasti)
            trace = trace.tb_next
        return line


def _extent(name: str, value: Any) -> Index3:
    """Return the size of a grid or thread block as (x, y, z). Raise ValueError if it is not valid.

    `name` is "grid" or "block", for the message.
    """
    axes = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    if not 1 <= len(axes) <= 3 or any(not isinstance(n, (int, np.integer)) or n < 1 for n in axes):
        raise ValueError(
            f"{name} must be a positive integer or a tuple of one to three of them, got {value!r}"
        )
    x, y, z = (*(int(n) for n in axes), 1, 1)[:3]
    return x, y, z


RACES = ("raise", "report", "ignore")


def launch(
    kernel: Callable[..., None], grid: int | tuple[int, ...], block: int | tuple[int, ...],
    *args: Any, shared_bytes: int = 0, races: str = "raise", time_limit: float | None = 30.0,
    wraparound: bool = True, uncounted: Collection[str] = (),
) -> Counts:  # fmt: skip
    """Run a Numba-CUDA kernel on the CPU, count its accesses to memory and find its faults.

    ``launch(kernel, grid, block, x, y)`` does on the CPU what ``kernel[grid, block](x, y)`` does on
    a GPU. No GPU is needed. The kernel is an ordinary kernel of ``numba.cuda``. The table in
    fa_numba/emulator/README.md lists the functions of ``numba.cuda`` that a kernel can call here.

    Parameters
    ----------
    kernel : callable
        A kernel with ``@cuda.jit``, or a plain Python function. Its source must be in a file, in a
        notebook's cell, or typed at Python's prompt.
    grid : int or tuple of int
        Thread blocks along one to three axes.
    block : int or tuple of int
        Threads of a thread block along one to three axes; at most 1024 in all.
    *args : ndarray, number or tuple
        One argument for each parameter of the kernel. The kernel writes to the caller's NumPy
        arrays, which may have any strides. A tuple or a named tuple may contain arrays and numbers.
        `Boxed` is an array with a tensor map.
    shared_bytes : int, default 0
        Bytes of dynamic shared memory of a thread block, for ``cuda.shared.array(0, dtype)``. It
        is the fourth number of ``kernel[grid, block, stream, shared_bytes]``.
    races : {"raise", "report", "ignore"}, default "raise"
        What to do about races, in shared memory and in global memory. "raise": raise an error at
        the first race. "report": go on, and list the races in ``counts.reports``, once for each
        source line, array and class of error. "ignore": do not look for races.
    time_limit : float or None, default 30.0
        Seconds after which the launch ends with an error. None: no limit. After two seconds, a
        progress bar appears if stderr is a terminal.
    wraparound : bool, default True
        Whether a negative index counts from the end of its axis, as in Numba. If False, a negative
        index is reported as outside of the array, unless it is literal, as in ``x[-1]``.
    uncounted : collection of str, default ()
        Names of arrays that the counts leave out.

    Returns
    -------
    Counts
        Loads and stores by array, traffic by source line, instructions by class, and the reports
        of ``races="report"``.

    Raises
    ------
    EmulatorError
        If the kernel has a fault. Each kind of fault has a subclass, such as `SharedHazard` or
        `OutOfBounds`. The error names the thread block, the thread, the array and the source line.
        `NotEmulated` is raised for a function of ``numba.cuda`` that the emulator does not have,
        `TimeLimit` for a launch that takes longer than `time_limit`.
    ValueError
        If an extent is not positive, the thread block has more than 1024 threads, `races` or
        `time_limit` is not valid, the strides of an array are not multiples of its itemsize, or the
        source has statements that are not emulated.
    TypeError
        If the number of arguments is wrong, an argument is a list, a tensor or an array of another
        library, or an array has a dtype that is not emulated.
    Exception
        If the kernel's Python code raises. The message, or a note, names thread block, thread and
        line.

    See Also
    --------
    schedule : Runs thread blocks and warps in another order, in which other faults may show.

    Notes
    -----
    Floats have Numba's types and rounding: float32 is rounded after each operation. Only ``x[i] +=
    a * b`` is rounded once, like a GPU's fma.

    Examples
    --------
    >>> import numpy as np
    >>> from numba import cuda
    >>> @cuda.jit
    ... def double(x, y):
    ...     i = cuda.grid(1)
    ...     y[i] = 2 * x[i]
    >>> x = np.arange(4, dtype=np.float32)
    >>> y = np.zeros_like(x)
    >>> print(launch(double, 2, 2, x, y))
    array  loads  stores  bytes loaded  bytes stored
    x          4       0            16             0
    y          0       4             0            16
    all        4       4            16            16
    >>> print(y)
    [0. 2. 4. 6.]

    A missing barrier is found:

    >>> from numba import float32
    >>> @cuda.jit
    ... def neighbour(y):
    ...     s, i = cuda.shared.array(64, float32), cuda.threadIdx.x
    ...     s[i] = i
    ...     y[i] = s[63 - i]
    >>> y = np.zeros(64, np.float32)
    >>> launch(neighbour, 1, 64, y)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    fa_numba.emulator.errors.SharedHazard: ...
    >>> counts = launch(neighbour, 1, 64, y, races="report")
    >>> print(counts.reports[0].array, counts.reports[0].thread)
    s (0, 0, 0)
    """
    function = getattr(kernel, "py_func", kernel)
    extent, shape = _extent("grid", grid), _extent("block", block)
    if prod(shape) > MAX_THREADS:
        raise ValueError(f"block must have at most {MAX_THREADS} threads, got {block!r}")
    if races not in RACES:
        raise ValueError(f"races must be one of {', '.join(map(repr, RACES))}, got {races!r}")
    if time_limit is not None and not (_is_number(time_limit) and time_limit > 0):
        raise ValueError(
            f"time_limit must be a number of seconds above 0, or None, got {time_limit!r}"
        )
    with_mbarriers = function.__code__ in _with_mbarriers
    alone = function in _one_by_one or with_mbarriers
    alone = alone or asked_for() or _seed.get() is not None
    at_once = 1 if alone else blocks_at_once(extent, shape)
    context = Launch(extent, shape, shared_bytes, function.__name__, at_once)
    context.races, context.wraparound = races, wraparound
    context.lends = with_mbarriers
    if with_mbarriers and _seed.get() is None:  # as the first thread block of an earlier launch
        context.into_warpgroups()
    values = passed(context, function, args)
    track_owners(context.arrays, 1 if races == "ignore" else prod(extent))
    context.trace = started(context, function)
    context.progress = Progress(function.__name__, prod(extent), time_limit)
    running.contexts.append(context)
    try:
        with np.errstate(all="ignore"):
            together = context.run(function, values)
        if at_once > 1 and not together:
            _one_by_one.add(function)
        spares.keep(context._pool.values(), context.warps, context.clock)
    finally:
        if context._grid is not None:
            context._grid.end()
        context.end()
        context.progress.end()
        running.contexts.pop()
    counts = _counted(context, context.arrays, uncounted)
    context.release()
    return counts


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, np.integer, np.floating)) and value is not True


def _counted(context: Launch, arrays: list[GlobalArray], uncounted: Collection[str]) -> Counts:
    """Return the counts of a launch that has ended, without the arrays named in `uncounted`."""
    counts = Counts(reports=list(context.reports.values()))
    counts.instructions = Counter({"load": 0, "store": 0} | context._instructions)
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
    uncounted = {*uncounted, *(array.name for array in context.constants.values())}
    for key, row in context._row_of.items():
        array, space, kind, _ = key
        traffic = Traffic(*context._rows[row].tolist())
        if traffic.requests and (space != "global" or array not in uncounted):
            access = context.access_of(key)
            known = counts.traffic.get(access)
            counts.traffic[access] = traffic if known is None else known + traffic
            if access.kind in ("load", "store"):
                counts.instructions[access.kind] += traffic.requests
    return counts
