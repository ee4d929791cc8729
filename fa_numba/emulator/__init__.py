"""An emulator of CUDA kernels on the CPU that counts accesses and finds races.

`launch` runs the unchanged Python function of a Numba-CUDA kernel. It counts the loads and stores
of global memory exactly, and raises, with block, thread, array and source line, on shared-memory
races, reads of uninitialised memory, divergent barriers, deadlock and accesses out of bounds.
"""

from .errors import (
    BarrierDivergence,
    BarrierMisuse,
    Deadlock,
    EmulatorError,
    Misaligned,
    OutOfBounds,
    ReadOnlyStore,
    SharedHazard,
    UninitialisedRead,
)
from .memory import Counts, GlobalArray, LocalArray, SharedArray
from .rebind import rebind
from .scheduler import Context, current, launch

__all__ = [
    "BarrierDivergence",
    "BarrierMisuse",
    "Context",
    "Counts",
    "Deadlock",
    "EmulatorError",
    "GlobalArray",
    "LocalArray",
    "Misaligned",
    "OutOfBounds",
    "ReadOnlyStore",
    "SharedArray",
    "SharedHazard",
    "UninitialisedRead",
    "current",
    "launch",
    "rebind",
]
