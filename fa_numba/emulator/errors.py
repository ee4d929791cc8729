"""What the emulator raises. Each error says where: block, thread, array and source line."""

from __future__ import annotations

Index3 = tuple[int, int, int]


class EmulatorError(RuntimeError):
    """A fault of the emulated kernel.

    Attributes
    ----------
    block, thread : (x, y, z) indices, None where no single one is meant.
    array : name of the array, None where none is involved.
    line : "file.py:123: source text" of the innermost kernel or device-function frame.
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
    """Two threads touch a shared element, one of them writing, with no barrier between."""


class GlobalHazard(EmulatorError):
    """Two blocks touch an element of global memory, or two threads of a block with no barrier
    between, one of them writing, without atomics; or a box is still being stored where a thread,
    or another box, goes.
    """


class RegisterHazard(EmulatorError):
    """A register that a product on its way reads or writes is touched before it was waited for."""


class MissingFence(EmulatorError):
    """What a thread wrote is touched by another proxy, of copies and products, without a fence."""


class UninitialisedRead(EmulatorError):
    """A read of shared or local memory, or of a warp lane, that holds no value."""


class BarrierDivergence(EmulatorError):
    """A barrier or warp collective that only some of the threads it waits for reach."""


class BarrierMisuse(EmulatorError):
    """A named barrier of a wrong number or count, or come to where its last use may go on still."""


class Deadlock(EmulatorError):
    """No thread can go on, although each waits where the others could join it."""


class OutOfBounds(EmulatorError):
    """An index below zero or past the end of an array."""


class Misaligned(EmulatorError):
    """A vector access whose address is not a multiple of its size, or not contiguous."""


class ReadOnlyStore(EmulatorError):
    """A store to an array passed as read-only."""
