"""The state of a running launch: lanes, arrays, counts, asynchronous copies.

The emulations of intrinsics call the methods of this module. waiting.py adds barriers. flow.py
contains the masks that say which lanes take part.
"""

from __future__ import annotations

import sys
import threading
from math import prod
from types import CodeType, FrameType
from typing import Any

import numpy as np

from .active import Active
from .axes import Axes, shape_of
from .checks import NOBODY, PITCH, SEVERAL, STAMP, ordered
from .counts import Access
from .errors import EmulatorError, Index3, OutOfBounds, TimeLimit
from .global_memory import GlobalArray
from .groups import WARP, Copy, OneByOne, Site, alike, warps_of
from .lanes import Mask
from .local_memory import LocalArray
from .namespace import Namespace, element_type
from .progress import Progress
from .shared_memory import SharedArray, SharedBuffer, spares
from .source_lines import assigned_name, source_line
from .trace import Trace

UNBOUNDED = 1 << 62
# Most accesses of thread blocks that run at the same time. Beyond it they begin again one by one,
# because one of them may be in a loop that waits for another thread block.
MOST_ACCESSES = 1 << 17
ACCESSES_PER_TICK = 64


class Context(Active):
    """The state of a running launch.

    The emulator and the functions that emulate intrinsics call the methods of this class. Kernels
    do not. The functions that emulate intrinsics get the running launch from `current`.

    Parameters
    ----------
    grid, block : tuple of int
        (x, y, z) extents of the grid and of a thread block.
    shared_bytes : int
        Bytes of dynamic shared memory of a thread block.
    kernel : str
        Name of the kernel function.
    at_once : int, default 1
        Greatest number of thread blocks that may run at the same time.

    Attributes
    ----------
    group : Group
        The lanes that run now. A lane is a thread.
    mask : ndarray of bool or None
        Lanes of `group` that take part in the current statement. None: all lanes of `group`.
    several : bool
        Whether `group` has lanes of several consecutive thread blocks, which run at the same time.
        If False, all lanes of `group` are of one thread block.
    block_number : int
        Number of this thread block in the launch, from 1 on. If `several` is set, the number of the
        first thread block.

    Notes
    -----
    The emulator finds races by stamps. A stamp is an integer that records an access to an element:
    clock * 2048 + code. The code says which thread accessed the element: 0 to 1023 is one thread,
    1024 + w is several threads of warp w. Greater codes are for copies of boxes and matrix
    products. The clock says when. It is a counter that grows whenever threads synchronise; a stamp
    has the clock of the accessing warp's last synchronisation.

    For each pair of warps, the emulator keeps a stamp. All accesses of the first warp below this
    stamp certainly happened before the next access of the second warp. Two accesses to an element
    are a race if one of them writes and nothing orders them.
    """

    __slots__ = (
        "grid", "block_shape", "shared_bytes", "kernel", "block", "block_number", "began", "clock",
        "base", "starts", "seen", "warps", "journal", "additions", "trace", "sites",
        "_cuda", "_codes", "_statics", "_dynamics", "_pool", "_tiles", "_clocks", "_accesses_left",
        "_rows", "_row_of", "_numbered", "_instructions", "_warps_active", "races", "reports",
        "progress", "_until_tick", "discards", "constants",
    )  # fmt: skip

    def __init__(
        self, grid: Index3, block: Index3, shared_bytes: int, kernel: str, at_once: int = 1
    ) -> None:
        super().__init__(prod(block), at_once)
        self.grid, self.block_shape, self.shared_bytes = grid, block, shared_bytes
        self.kernel = kernel
        self.warps = -(-self.threads // WARP)
        self.block: Index3 = (0, 0, 0)
        self.block_number = 1
        self.began = self.clock = spares.clock
        # See `new_clocks`. `base`, `starts` and `seen` are the rows of the running thread blocks.
        self._clocks = self.new_clocks()
        self.base, self.starts, self.seen = self._clocks
        self.journal: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self.additions: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = []
        self.trace: Trace | None = None
        self.sites: list[Site] = []
        self._cuda = Namespace(self)
        self._codes: dict[int, CodeType] = {}
        self._statics: dict[Site, SharedArray | Axes] = {}
        self._dynamics: dict[Any, SharedArray] = {}
        self._pool: dict[Any, SharedBuffer] = {}
        self._tiles: list[tuple[int, int, np.dtype, str]] = []
        self._rows = np.zeros((64, 4), np.int64)  # rows of statistics, see checks.py
        self._row_of: dict[tuple[str, str, str, Site], int] = {}
        self._numbered: dict[Site, int] = {}
        self._instructions: dict[str, int] = {}
        self._warps_active: tuple[Any, int] = (self, 0)
        self._accesses_left = UNBOUNDED
        self.races = "raise"
        self.reports: dict[Any, EmulatorError] = {}  # by class, array and line
        self.progress = Progress(kernel, prod(grid), None)
        self._until_tick = ACCESSES_PER_TICK
        self.discards = False  # whether the kernel ignores the result of the current call
        self.constants: dict[int, GlobalArray] = {}

    def new_clocks(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the arrays for the clocks of the thread blocks that run at the same time.

        Each thread block has 32 rows in `starts` and `seen`, even if it has fewer warps.

        Returns
        -------
        base : ndarray of int, shape (thread blocks,)
            Stamp of the last barrier of each thread block.
        starts : ndarray of int, shape (32 * thread blocks,)
            Stamp of the last synchronisation of each warp.
        seen : ndarray of int, shape (32 * thread blocks, warps)
            A stamp for each pair of two warps of a thread block. Accesses of the column's warp with
            a lower stamp happened before the next access of the row's warp.
        """
        warps = self.at_once * PITCH // WARP
        return (
            np.zeros(self.at_once, np.int64),
            np.zeros(warps, np.int64),
            np.zeros((warps, self.warps), np.int64),
        )

    # ---- where the kernel is

    def site(self) -> Site:
        """Return the current instruction of the innermost kernel or device function.

        Returns
        -------
        tuple of int
            Id of the code object and offset of the instruction; (0, 0) outside of a kernel.
        """
        frame: FrameType | None = sys._getframe(1)
        codes = self._codes
        while frame is not None:
            key = id(frame.f_code)
            if key in codes:
                return key, frame.f_lasti
            frame = frame.f_back
        return 0, 0

    def numbered_site(self) -> int:
        """Return the number of the current instruction, its index in the list ``sites``.

        Returns
        -------
        int
            The index.
        """
        site = self.site()
        number = self._numbered.get(site)
        if number is None:
            number = self._numbered[site] = len(self.sites)
            self.sites.append(site)
        return number

    def line_of(self, site: Site) -> str:
        """Return the source line of an instruction as "file.py:123: source text".

        Parameters
        ----------
        site : tuple of int
            An instruction that `site` returned.

        Returns
        -------
        str
            The source line.
        """
        code = self._codes.get(site[0])
        return "outside the kernel" if code is None else source_line(code, site[1])

    def place_of(self, tid: int) -> Index3:
        """Return the (x, y, z) index of a thread in its thread block.

        Parameters
        ----------
        tid : int
            Number of the thread.

        Returns
        -------
        tuple of int
            The index.
        """
        x, y, _ = self.block_shape
        return tid % x, tid // x % y, tid // (x * y)

    def thread_name(self, tid: int) -> str:
        """Return the index of a thread as text, such as "(3, 0, 0)".

        Parameters
        ----------
        tid : int
            Number of the thread.

        Returns
        -------
        str
            The text.
        """
        return f"({', '.join(map(str, self.place_of(tid)))})"

    def block_of(self, number: int) -> Index3:
        """Return the (x, y, z) index of a thread block.

        Parameters
        ----------
        number : int
            Number of the thread block in the launch, from 1 on.

        Returns
        -------
        tuple of int
            The index.
        """
        x, y, _ = self.grid
        n = number - 1
        return n % x, n // x % y, n // (x * y)

    def fault(
        self,
        kind: type[EmulatorError],
        text: str,
        array: str | None = None,
        lane: int | None = None,
    ) -> EmulatorError:
        """Return an error at the current line, for the caller to raise.

        Parameters
        ----------
        kind : type
            Subclass of `EmulatorError`.
        text : str
            What went wrong.
        array : str, optional
            Name of the array.
        lane : int, optional
            Lane at fault. Default: the first lane that takes part.

        Returns
        -------
        EmulatorError
            The error.
        """
        lane = self.first_lane() if lane is None else lane
        return self.fault_at(kind, text, int(self.group.tids[lane]), self.site(), array)

    def fault_at(
        self, kind: type[EmulatorError], text: str, tid: int, site: Site, array: str | None = None
    ) -> EmulatorError:
        """Return an error of a thread at the line of an instruction, for the caller to raise.

        Parameters
        ----------
        kind : type
            Subclass of `EmulatorError`.
        text : str
            What went wrong.
        tid : int
            Number of the thread.
        site : tuple of int
            The instruction.
        array : str, optional
            Name of the array.

        Returns
        -------
        EmulatorError
            The error.
        """
        place = {"block": self.block, "thread": self.place_of(tid)}
        return kind(text, **place, array=array, line=self.line_of(site))

    def outside(self, name: str, shape: tuple[int, ...], index: Any, lane: int) -> EmulatorError:
        """Return the error for an index outside of an array, for the caller to raise.

        Parameters
        ----------
        name : str
            Name of the array.
        shape : tuple of int
            Shape of the array.
        index : int, ndarray or tuple
            The index, by lane if lanes differ.
        lane : int
            Lane at fault.

        Returns
        -------
        EmulatorError
            An `OutOfBounds`.
        """
        place = ", ".join(map(str, self.of_lane(index, lane, as_tuple=True)))
        extent = " x ".join(map(str, shape))
        text = (
            f"{name}[{place}] is outside the array of {extent} elements. Check the index against "
            "the array's shape before the access"
        )
        if any(i < 0 for i in self.of_lane(index, lane, as_tuple=True) if isinstance(i, int)):
            text += (
                ". (Numba would count an index from -n to -1 from the end of the n elements)"
                if not self.wraparound
                else ". An index from -n to -1 counts from the end of the n elements"
            )
        return self.fault(OutOfBounds, text, name, lane)

    def race(self, error: EmulatorError) -> None:
        """Raise the error of a race, or add it to the reports if the launch only reports races.

        Parameters
        ----------
        error : EmulatorError
            The error that `fault` returned.

        Raises
        ------
        EmulatorError
            The error, unless the launch has ``races="report"``.
        """
        if self.races != "report":
            raise error
        self.reports.setdefault((type(error), error.array, error.line), error)

    def tick(self) -> None:
        """At every 65th call, draw the progress bar and check the time limit.

        Raises
        ------
        TimeLimit
            If the launch has run for longer than its `time_limit`.
        """
        self._until_tick -= 1
        if self._until_tick < 0:
            self._until_tick = ACCESSES_PER_TICK
            late = self.progress.late()
            if late:
                raise self.fault(TimeLimit, late)

    def unused(self, function: Any, *args: Any) -> None:
        """Call a function of ``cuda.atomic`` for a kernel that does not use the result.

        The function then need not compute the old values.

        Parameters
        ----------
        function : callable
            The function.
        *args : object
            The arguments of the function.
        """
        self.discards = True
        try:
            function(*args)
        finally:
            self.discards = False

    def constant(self, values: np.ndarray, name: str = "") -> GlobalArray:
        """Return an array in constant memory, as ``cuda.const.array_like`` does.

        Loads of the array are not in the counts of loads.

        Parameters
        ----------
        values : ndarray
            The values, which the kernel cannot change.
        name : str, optional
            Name of the array. Default: the variable to which the result is assigned.

        Returns
        -------
        GlobalArray
            The array.
        """
        if isinstance(values, GlobalArray):
            if values in self.constants.values():  # a global variable of the kernel
                return values
            text = (
                "cuda.const.array_like needs a NumPy array that is a global variable, got the "
                f"argument {values.name}. Make the array a global variable"
            )
            raise self.fault(EmulatorError, text, values.name)
        known = self.constants.get(id(values))
        if known is None:
            frozen = values.view()
            frozen.flags.writeable = False
            name = name or self.target(self.site(), "constant")
            known = self.constants[id(values)] = GlobalArray(self, name, frozen)
        return known

    def refuse_zero(self, zero: np.ndarray | None, text: str) -> None:
        """Raise ZeroDivisionError if a lane that takes part divides by zero.

        Parameters
        ----------
        zero : ndarray of bool or None
            Lanes whose divisor is zero. None: all lanes.
        text : str
            Message of the error.

        Raises
        ------
        ZeroDivisionError
            If such a lane takes part.
        """
        here = self.active() if zero is None else self.active() & zero
        if here.any():
            error: Any = ZeroDivisionError(text)
            error.lane = int(np.flatnonzero(here)[0])
            raise error

    # ---- what happened before what: see shared_memory.py

    def stamp(self, lane: int) -> int:
        """Return the stamp of an access that a lane makes now.

        A stamp is an integer that says which thread accesses an element, and when. Time is counted
        in synchronisations of threads. The emulator finds races by comparing the stamps of the
        accesses to an element. The notes of `Context` define the integer.

        Parameters
        ----------
        lane : int
            The lane that accesses an element.

        Returns
        -------
        int
            The stamp: clock * 2048 + the number of the lane's thread in the thread block. The clock
            is a counter, as it was when the lane's warp last synchronised.
        """
        group = self.group
        return int(self.starts[group.warp_of[lane]] + group.tids[lane])

    def ordered(self, stamp: int, lane: int) -> bool:
        """Return whether an earlier access certainly happened before a lane's present access.

        Parameters
        ----------
        stamp : int
            Stamp of the earlier access.
        lane : int
            The lane that accesses the same element now.

        Returns
        -------
        bool
            False if nothing orders the two accesses. They are then a race if one of them writes.
        """
        tid = int(self.group.tids[lane])
        return bool(ordered(stamp, tid, tid // WARP, self.seen))

    def joined(self, stamp: int, lane: int) -> int:
        """Return the stamp to store for an element that a lane reads now.

        For each element, the emulator stores only one stamp per warp, although several lanes of the
        warp may read the element. The returned stamp stands for all these reads. Stamps are defined
        in the notes of `Context`.

        Parameters
        ----------
        stamp : int
            The stored stamp: earlier reads of the element by the same warp.
        lane : int
            The lane of the warp that reads the element now.

        Returns
        -------
        int
            The stamp of the lane's read, if the earlier reads were made by the same lane or
            happened before the lane's read. Otherwise a stamp whose code means "several threads of
            the warp".
        """
        warp = int(self.group.warp_of[lane])
        before = stamp < self.seen[warp, warp] or stamp % STAMP == self.group.tids[lane]
        return self.stamp(lane) if before else int(self.starts[warp]) + SEVERAL + warp

    def who(self, stamp: int) -> str:
        """Return the accessing thread or threads of a stamp as text.

        Examples of the text are "thread (3, 0, 0)" and "several threads of warp 2".

        Parameters
        ----------
        stamp : int
            Stamp of the access.

        Returns
        -------
        str
            The text.
        """
        code = stamp % STAMP
        if code == NOBODY:
            return "several threads"
        if code >= SEVERAL:
            return f"several threads of warp {code - SEVERAL}"
        return f"thread {self.thread_name(code)}"

    def synced(self, warps: np.ndarray) -> None:
        """Record that all lanes of these warps have synchronised.

        Each lane of a warp then knows the same earlier accesses as the other lanes of the warp.
        This method does nothing. The subclass `Knowledge`, which records what each lane knows,
        overrides it.

        Parameters
        ----------
        warps : ndarray of int
            Numbers of the warps.
        """

    # ---- shared and local arrays

    def static_array(self, shape: Any, dtype: Any) -> SharedArray | Axes:
        """Return the array that a call of ``cuda.shared.array`` makes.

        Each call in the kernel's source makes one array per thread block. All threads of the thread
        block share the array. If the call runs again, it returns the same array.

        Parameters
        ----------
        shape : int or tuple of int
            Number of elements, or shape. 0: all of the dynamic shared memory.
        dtype : type or dtype
            Type of the elements.

        Returns
        -------
        SharedArray or Axes
            The array.

        Raises
        ------
        TypeError
            If `shape` is neither an integer nor a tuple of integers.
        """
        element, axes = element_type(dtype), shape_of("cuda.shared.array", shape)
        shape = prod(axes)
        if shape == 0:
            return self.shared_tile(0, self.shared_bytes // element.itemsize, dtype)
        site = self.site()
        known = self._statics.get(site)
        if known is None:
            name = self.target(site, f"shared{len(self._statics)}")
            buffer = self._buffer(site, shape, element)
            flat = SharedArray(self, name, shape, element, buffer, axes=axes)
            known = flat if len(axes) == 1 else Axes(self, flat, axes)
            self._statics[site] = known
        return known

    def shared_tile(self, offset: Any, length: int, dtype: Any = float) -> Any:
        """Return an array that begins at a given element of the dynamic shared memory.

        Arrays of one dtype may overlap. They then share elements, and races between accesses to the
        two arrays are found. Arrays of different dtypes may not overlap.

        Parameters
        ----------
        offset : int
            First element, in elements of `dtype`.
        length : int
            Number of elements.
        dtype : type or dtype
            Type of the elements. ``float`` means float32.

        Returns
        -------
        SharedArray
            The array.

        Raises
        ------
        EmulatorError
            If the array is outside of the launch's `shared_bytes`, or overlaps an array of another
            dtype.
        """
        offset = self.uniform_in_block(offset)
        if offset.__class__ is np.ndarray:
            taken = np.unique(offset[self.active()]).tolist()
            *_, one = (self.shared_tile(each, length, dtype) for each in taken)
            return SharedArray(self, one.name, length, one.dtype, one.buffer, offset)
        site = self.site()
        key = (site, offset, length, dtype)
        known = self._dynamics.get(key)
        if known is not None:
            return known
        element = element_type(dtype)
        size = element.itemsize
        name = self.target(site, "shared")
        if offset < 0 or length < 0 or (offset + length) * size > self.shared_bytes:
            raise self.fault(
                EmulatorError,
                f"{name} needs bytes {offset * size} to {(offset + length) * size} of the dynamic "
                f"shared memory, but the launch has {self.shared_bytes} bytes. Raise shared_bytes "
                "or shorten the array",
                name,
            )
        first, last = offset * size, (offset + length) * size
        for start, end, other, neighbour in self._tiles:
            if other != element and first < end and start < last:
                text = (
                    f"shared array {name} ({element}) overlaps shared array {neighbour} ({other}). "
                    "The emulator supports overlapping arrays only if their dtypes are equal: use "
                    "separate bytes, or one dtype"
                )
                raise self.fault(EmulatorError, text, name)
        self._tiles.append((first, last, element, name))
        buffer = self._buffer(element, self.shared_bytes // size, element)
        tile = SharedArray(self, name, length, element, buffer, offset)
        self._dynamics[key] = tile
        return tile

    @property
    def readers(self) -> int:
        """Return the number of rows of ``reads`` in a new `SharedBuffer`: one for each warp.

        The subclass `Boxes` adds rows for reads by the hardware.

        Returns
        -------
        int
            The number.
        """
        return self.warps

    def _buffer(self, key: Any, length: int, element: np.dtype) -> SharedBuffer:
        if key not in self._pool:
            blocks, readers = self.at_once, self.readers
            self._pool[key] = spares.take(self.began, blocks, length, readers, element)
        return self._pool[key]

    def begin_blocks(self, first: int, count: int) -> None:
        """Set shared memory, clocks and indices to the beginning of new thread blocks.

        Parameters
        ----------
        first : int
            Number of the first thread block in the launch, from 1 on.
        count : int
            Number of thread blocks that run at once.
        """
        self.block_number, self.several = first, count > 1
        self.block = self.block_of(first)
        warps = count * PITCH // WARP
        base, starts, seen = self._clocks
        self.base, self.starts, self.seen = base[:count], starts[:warps], seen[:warps]
        self._statics, self._dynamics, self._tiles = {}, {}, []
        for buffer in self._pool.values():
            buffer.clear(count)
        self._accesses_left = MOST_ACCESSES if self.several else UNBOUNDED
        self.additions = []
        at, place = self.group.blocks + (first - 1), self._cuda.blockIdx
        x, y, _ = self.grid
        place.x, place.y, place.z = alike(at % x), alike(at // x % y), alike(at // (x * y))

    def local_array(self, shape: Any, dtype: Any) -> LocalArray | Axes:
        """Return the array that a call of ``cuda.local.array`` makes. Each lane has its own copy.

        Parameters
        ----------
        shape : int or tuple of int
            Number of elements, or shape.
        dtype : type or dtype
            Type of the elements.

        Returns
        -------
        LocalArray or Axes
            The array.

        Raises
        ------
        TypeError
            If `shape` is neither an integer nor a tuple of integers.
        """
        axes = shape_of("cuda.local.array", shape)
        flat = LocalArray(self, self.site(), prod(axes), element_type(dtype), axes)
        return flat if len(axes) == 1 else Axes(self, flat, axes)

    def target(self, site: Site, otherwise: str) -> str:
        """Return the name of the variable to which the result of a call is assigned.

        Parameters
        ----------
        site : tuple of int
            Instruction of the call.
        otherwise : str
            Result if there is no such variable.

        Returns
        -------
        str
            The name.
        """
        code = self._codes.get(site[0])
        return (code and assigned_name(code, site[1])) or otherwise

    # ---- counts

    def statistics(self, array: str, space: str, kind: str) -> np.ndarray:
        """Return the counts of one kind of access by the current instruction of the kernel.

        The caller adds new accesses to the returned array in place.

        Parameters
        ----------
        array : str
            Name of the array.
        space : str
            "global" or "shared".
        kind : str
            Kind of access, see `Access`.

        Returns
        -------
        ndarray of int, shape (4,)
            Requests, sectors, wavefronts and conflicts.

        Raises
        ------
        OneByOne
            If thread blocks that run at the same time have made too many accesses.
        TimeLimit
            If the launch has run for longer than its `time_limit`.
        """
        self._accesses_left -= 1
        if self._accesses_left < 0:
            raise OneByOne
        if self._until_tick:
            self._until_tick -= 1
        else:
            self.tick()
        # As `site`. Neither this method nor its caller is a function of the kernel.
        codes = self._codes
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and id(frame.f_code) not in codes:
            frame = frame.f_back
        site = (0, 0) if frame is None else (id(frame.f_code), frame.f_lasti)
        key = (array, space, kind, site)
        row = self._row_of.get(key)
        if row is None:
            row = self._row_of[key] = len(self._row_of)
            if row == len(self._rows):
                self._rows = np.concatenate([self._rows, np.zeros_like(self._rows)])
        return self._rows[row]

    def instruction(self, kind: str, times: int = 1) -> None:
        """Count an instruction of every warp with a lane that takes part.

        Parameters
        ----------
        kind : str
            Class of the instruction, see `Counts`.
        times : int, default 1
            How many instructions.
        """
        self.instruction_of(self.mask, kind, times)

    def instruction_of(self, mask: Mask, kind: str, times: int) -> None:
        """Count an instruction of every warp with a lane of a mask.

        Parameters
        ----------
        mask : ndarray of bool or None
            The lanes. None: all lanes of the group.
        kind : str
            Class of the instruction, see `Counts`.
        times : int
            How many instructions.
        """
        if self._warps_active[0] is not mask or mask is None:
            warps = (self.group.warps if mask is None else warps_of(self.group.tids[mask])).size
            self._warps_active = (mask, warps)
        self._instructions[kind] = self._instructions.get(kind, 0) + times * self._warps_active[1]

    def access_of(self, key: tuple[str, str, str, Site]) -> Access:
        """Return the `Access` that describes a row of statistics.

        Parameters
        ----------
        key : tuple
            Array, space, kind and instruction of the row.

        Returns
        -------
        Access
            The access.
        """
        array, space, kind, site = key
        return Access(self.kernel, array, space, kind, self.line_of(site))

    # ---- asynchronous copies

    def async_copy(
        self, dst: SharedArray, e: Any, src: GlobalArray, index: tuple[Any, ...], n: int, valid: Any
    ) -> None:
        """Start an asynchronous copy from global to shared memory (cp.async) in every lane.

        Only lanes that take part start a copy. The values are in `dst` when the lane has waited
        for the group of its copy. Each lane counts `valid` loads of `src`.

        Parameters
        ----------
        dst : SharedArray
            Destination.
        e : int or ndarray of int
            First element of the destination.
        src : GlobalArray
            Source.
        index : tuple
            Index of the first element of the source.
        n : int
            Elements of the copy.
        valid : int or ndarray of int
            Elements that are copied, 0 to n. The rest of the destination becomes zero.

        Raises
        ------
        ValueError
            If `valid` is not 0 to n.
        """
        bad = self.first_outside(valid, n + 1)
        if bad >= 0:
            valid = self.of_lane(valid, bad)
            raise ValueError(
                f"valid must be from 0 to {n}, the number of elements of the copy, got {valid}"
            )
        group = self.group
        pieces = group.full(0)
        if n * dst.itemsize == 16:
            pieces = (dst.first + group.lanes(e)) * dst.itemsize >> 5
        read = src.source(index, n, valid, pieces)
        places = dst.depart(e, n)
        pending = self.active()
        group.copies.append(Copy(dst, places, n, read, pending, group.committed))
        self.instruction("copy")

    def async_commit(self) -> None:
        """Close the current group of asynchronous copies of each lane that takes part.

        The group may be empty. This is the instruction cp.async.commit_group.
        """
        self.group.committed = self.group.committed + self.active()

    def async_wait(self, n: int) -> None:
        """Wait until at most n groups of each lane's asynchronous copies are in flight.

        This is the instruction cp.async.wait_group.

        Parameters
        ----------
        n : int
            Number of groups.
        """
        group = self.group
        if not group.copies:
            return
        left = []
        done = group.committed - n
        for copy in group.copies:
            landing = copy.pending & (copy.number < done)
            if self.mask is not None:
                landing &= self.mask
            if landing.any():
                copy.dst.land(copy, landing)
                copy.pending = copy.pending & ~landing
                if not copy.pending.any():
                    continue
            left.append(copy)
        group.copies = left


class Running(threading.local):
    """The launches that run in the current Python thread; the innermost launch is the last."""

    def __init__(self) -> None:
        self.contexts: list[Any] = []


running = Running()


def current() -> Any:
    """Return the running launch.

    Returns
    -------
    Context
        The innermost launch of this Python thread.

    Raises
    ------
    RuntimeError
        If no kernel runs on the emulator.
    """
    if not running.contexts:
        raise RuntimeError(
            "no kernel is running on the emulator. Call device functions only from a kernel"
        )
    return running.contexts[-1]
