"""The errors that the emulator raises. They name thread block, thread, array and source line."""

from __future__ import annotations

from typing import Any

import numpy as np

Index3 = tuple[int, int, int]

UNNAMED = "local array"  # name in messages if no variable of the kernel names the array

# End of the messages about two accesses within one thread block, with the remedy.
NO_BARRIER = (
    "with no barrier between. Add a barrier between the two accesses, such as syncthreads()"
)


def never_written(element: str) -> str:
    """Return the message for the read of an element that was never written."""
    return (
        f"{element} is read, but was never written. Write the element first; if another thread "
        "writes it, put a barrier between the write and the read"
    )


def two_arrays(one: Any, other: Any) -> str:
    """Return the message for a variable that has different arrays in different lanes.

    Parameters
    ----------
    one, other : object
        Value of the variable in some lanes, and in the other lanes.
    """
    held, too = _named(one), _named(other)
    both = f"{held} in some lanes and {too} in other lanes"
    if held == too:
        both = f"one part of {held} in some lanes and another part in other lanes"
    return (
        f"the variable that this line assigns holds {both}. The emulator does not support this: "
        "use a variable for each array"
    )


def _named(value: Any) -> str:
    """Return the name of an array for `two_arrays`, such as "array 'sK'"."""
    name = getattr(getattr(value, "array", value), "name", None)
    if name is None:
        return "another value"
    made = getattr(value, "made_at", None)
    array = f"a {name}" if name == UNNAMED else f"array {name!r}"
    return array if made is None else f"{array} (made at {made})"


def not_a_number(name: str, value: Any) -> ValueError:
    """Return the error for a store of several values to one element, for the caller to raise.

    Parameters
    ----------
    name : str
        Name of the array.
    value : object
        The value that is stored.

    Returns
    -------
    ValueError
        The error.
    """
    shape = getattr(value, "shape", None) or np.shape(value)
    error: Any = ValueError(
        f"a value stored to an element of {name} must be one number, got an array of shape "
        f"{shape}; store its elements one by one"
    )
    error.array = name
    return error


class Unconverted:
    """Base class of a kernel's arrays, which NumPy must not convert to an `ndarray`.

    Such a conversion would read the array without counting the accesses. Arrays of this class raise
    TypeError instead.
    """

    __slots__ = ()
    name: Any

    def __array__(self, *args: Any, **options: Any) -> np.ndarray:
        raise TypeError(f"array {self.name} is used as a number. Use an element, as in x[i]")


def framed(
    text: str, block: Index3 | None, thread: Index3 | None, array: str | None, line: str | None
) -> str:
    """Return a message with two more lines: thread block, thread and array; source line.

    Facts that are None are left out.
    """
    known = {"block": block, "thread": thread, "array": None if array == UNNAMED else array}
    where = ", ".join(f"{name} {value}" for name, value in known.items() if value is not None)
    text = f"{text}\n  in {where}" if where else text
    return text if line is None else f"{text}\n  at {line}"


class EmulatorError(RuntimeError):
    """A fault of an emulated kernel. The classes of all faults are subclasses of this class.

    Parameters
    ----------
    text : str
        What went wrong.
    block, thread : tuple of int, optional
        (x, y, z) indices of the thread block and of the thread at fault. None if the fault is not
        of a single thread block or thread.
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
        super().__init__(framed(text, block, thread, array, line))


class WrongType(EmulatorError):
    """A variable of a kernel of this package that Numba would make 64 bits wide on a GPU.

    The emulator computes with Python's numbers, and its results would not show the difference. It
    therefore raises the error before the kernel's first run.
    """


class SharedHazard(EmulatorError):
    """A race in shared memory.

    There are two cases:

    - two threads access an element with no barrier between, and one of them writes;
    - a thread accesses an element, or ends, while an asynchronous copy or a `wgmma` product may
      still read or write the element.
    """


class GlobalHazard(EmulatorError):
    """A race in global memory.

    Two atomic operations do not race with each other. There are three cases:

    - two thread blocks access an element, and one of them writes;
    - two threads of a thread block access an element with no barrier between, and one of them
      writes;
    - a thread or a box accesses an element to which a box is still being stored.
    """


class RegisterHazard(EmulatorError):
    """An access to a register that a warpgroup's product still reads or writes.

    The thread must call `wait_products` first. The error is also raised if the thread ends before
    it has waited for the product.
    """


class MissingFence(EmulatorError):
    """A bulk copy or a matrix product accesses elements that a thread wrote, without a fence.

    The copy engine and the tensor cores access memory by another path (proxy) than threads. A fence
    is needed between the write by a thread and the access by the copy engine or the tensor cores.
    The error is also raised if an mbarrier is used without a fence after its initialisation.
    """


class UninitialisedRead(EmulatorError):
    """A read of a value that does not exist.

    There are two cases:
    - an element of shared or local memory is read, but was never written;
    - a shuffle reads the value of a lane that does not take part in the shuffle.
    """


class BarrierDivergence(EmulatorError):
    """A barrier, a warp collective or a `wgmma` product that only some of its threads reach.

    All of these threads must reach it. The error is also raised if the warps of a warpgroup end
    with different numbers of registers.
    """


class BarrierMisuse(EmulatorError):
    """A wrong use of a named barrier or an mbarrier.

    Examples:

    - the number of a barrier, or of its threads, is not allowed;
    - a thread arrives at a barrier although an earlier use of the barrier may not have ended;
    - a slot of a pipeline is not released before the thread block ends.
    """


class Deadlock(EmulatorError):
    """Threads that would wait for ever.

    There are three cases:

    - no thread of a thread block can go on, because all wait at named barriers, mbarriers or warp
      collectives that no thread completes;
    - some thread blocks wait for the grid, and others have ended;
    - the warps take more registers than the launch has.
    """


class OutOfBounds(EmulatorError):
    """An index outside of an array.

    A negative index counts from the end of its axis, unless the launch has ``wraparound=False``.
    """


class Misaligned(EmulatorError):
    """An access that is not aligned, or a vector access to memory with gaps.

    There are four cases:

    - the address of a vector access is not a multiple of its size;
    - the elements of a vector access are not next to each other in memory;
    - an address or the size of a bulk addition (`add_bulk`) is not a multiple of 16 bytes;
    - a box or an operand of a warpgroup's matrix product begins at an address of shared memory that
      the copy engine or the tensor cores do not allow.
    """


class ReadOnlyStore(EmulatorError):
    """A store to an array that was passed as read-only."""


class TimeLimit(EmulatorError):
    """A launch that has run for longer than its `time_limit`. Its results are incomplete."""


class NotEmulated(EmulatorError):
    """A function or value of ``numba.cuda`` that the emulator does not support."""
