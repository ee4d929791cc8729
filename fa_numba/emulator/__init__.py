"""An emulator of CUDA kernels on the CPU that counts accesses and finds races.

`launch` runs the unchanged Python function of a Numba-CUDA kernel once for all lanes of a block, or
of several: a value is a number where they agree and a NumPy array over them where they may not. It
counts the loads and stores of global memory exactly, with their sectors, the wavefronts and bank
conflicts of shared memory and instructions by class, and raises, with block, thread, array and
source line, on races in shared and global memory, conflicts between blocks, reads of uninitialised
memory, divergent barriers, deadlock and accesses out of bounds.

`rewrite.py` makes the code that runs for many lanes, of the trees of `syntax.py`; `flow.py` says
which of them take part, `active.py` what these agree on, and `lanes.py` computes what Python's
operators cannot; `rebind.py` gives it the emulator's names, which are in `namespace.py`. `run.py`
takes blocks and groups of lanes in turn, or several blocks at once by `batches.py`, and
`waiting.py` says where they wait; `context.py` is what a kernel calls: its arrays and copies.
`shared_memory.py`, `local_memory.py` and `global_memory.py` check each access, by the loops of
`checks.py`, which `compiling.py` compiles. What Hopper's GPUs do beside their threads:
`mbarriers.py`, and by `knowledge.py` what who has waited knows; `boxes.py`, the copy engine's
copies, and `products.py`, those of warpgroups, by the loops of `async_checks.py`. `trace.py` notes
which tile moves when.
"""

from .boxed_arrays import WRAPS, Boxed, BoxLayout
from .context import Context, current
from .counts import Access, Counts, Traffic
from .errors import (
    BarrierDivergence,
    BarrierMisuse,
    Deadlock,
    EmulatorError,
    GlobalHazard,
    Misaligned,
    MissingFence,
    OutOfBounds,
    ReadOnlyStore,
    RegisterHazard,
    SharedHazard,
    UninitialisedRead,
)
from .global_memory import GlobalArray
from .local_memory import LocalArray
from .run import launch, schedule
from .shared_memory import SharedArray
from .trace import TileAccess, trace
