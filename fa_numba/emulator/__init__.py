"""An emulator of CUDA kernels on the CPU that counts accesses and finds races.

`launch` runs the unchanged Python function of a Numba-CUDA kernel. It counts the loads and stores
of global memory exactly, and raises, with block, thread, array and source line, on shared-memory
races, reads of uninitialised memory, divergent barriers, deadlock and accesses out of bounds.

`run.py` takes the threads in turn; `context.py` is what a kernel calls: its arrays, copies and
barriers; `shared_memory.py`, `local_memory.py` and `global_memory.py` check each element;
`namespace.py` stands for `cuda` and `rebind.py` puts it in the kernel's place for it.
"""

from .context import Context, current
from .counts import Counts
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
from .global_memory import GlobalArray
from .local_memory import LocalArray
from .rebind import rebind
from .run import launch
from .shared_memory import SharedArray

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
