"""The errors that the emulator raises. They name thread block, thread, array and source line."""

from __future__ import annotations

Index3 = tuple[int, int, int]


class EmulatorError(RuntimeError):
    """A fault of an emulated kernel. All other errors of the emulator are subclasses.

    Parameters
    ----------
    text : str
        What went wrong.
    block, thread : tuple of int, optional
        (x, y, z) indices of the thread block and of the thread. None if no single one is meant.
    array : str, optional
        Name of the array. None if no array is involved.
    line : str, optional
        Source line of the kernel or device function, as "file.py:123: source text".

    Attributes
    ----------
    block, thread, array, line
        The arguments.
    """

    def __init__(
        self, text: str, *, block: Index3 | None = None, thread: Index3 | None = None,
        array: str | None = None, line: str | None = None,
    ) -> None:  # fmt: skip
        self.block, self.thread, self.array, self.line = block, thread, array, line
        where = [f"block {block}", f"thread {thread}"]
        if array is not None:
            where.append(f"array {array}")
        super().__init__(f"{text}\n  in {', '.join(where)}\n  at {line}")


class SharedHazard(EmulatorError):
    """A race in shared memory: two threads access an element without a barrier, and one writes."""


class GlobalHazard(EmulatorError):
    """A race in global memory without atomic operations.

    There are three cases:
    - two thread blocks access an element, and one of them writes;
    - two threads of a thread block do so, with no barrier between them;
    - a thread or a box accesses an element to which a box is still being stored.
    """


class RegisterHazard(EmulatorError):
    """An access to a register that a warpgroup's product still reads or writes.

    The thread has to wait for the product first.
    """


class MissingFence(EmulatorError):
    """An access by copies or products to what a thread wrote before, without a fence between them.

    Threads on one side and the copy engine and tensor cores on the other side are different
    proxies.
    """


class UninitialisedRead(EmulatorError):
    """A read of shared or local memory, or from a lane of a warp, that has no value yet."""


class BarrierDivergence(EmulatorError):
    """A barrier or a warp collective that only some of the threads reach that it waits for."""


class BarrierMisuse(EmulatorError):
    """A wrong use of a named barrier or an mbarrier.

    Examples are a wrong number or count, and a thread that arrives while an earlier use of the
    barrier may not have ended.
    """


class Deadlock(EmulatorError):
    """Threads that wait for each other: no thread of the thread block can go on.

    They wait at named barriers, mbarriers or warp collectives that no running thread can complete.
    """


class OutOfBounds(EmulatorError):
    """An index below zero or past the end of an array."""


class Misaligned(EmulatorError):
    """A vector access at an address that is not a multiple of its size, or across a gap."""


class ReadOnlyStore(EmulatorError):
    """A store to an array that was passed as read-only."""
