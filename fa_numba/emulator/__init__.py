"""An emulator of CUDA kernels on the CPU that counts accesses and finds races.

`launch` runs the unchanged Python function of a Numba-CUDA kernel. One run of the function computes
all lanes of a thread block, or of several thread blocks. A value is a number if all lanes have the
same, else a NumPy array with one element per lane.

The emulator counts
- loads and stores of global memory, exactly, with the 32-byte sectors that they touch,
- wavefronts and bank conflicts of shared memory,
- instructions of warps, by class.

It raises an error on races in shared and global memory, conflicts between thread blocks, reads of
uninitialised memory, divergent barriers, deadlock and accesses out of bounds. The error names the
thread block, thread, array and source line.

    run.py               launches: thread blocks and groups of lanes in turn
    arguments.py         a launch's arguments as the kernel sees them
    progress.py          the time limit and the progress bar of a launch
    batches.py           several thread blocks at once
    grids.py             thread blocks that wait for each other
    rewrite.py           rewrites a kernel's syntax tree so that one run computes all lanes
    expressions.py       the same for expressions
    syntax.py            the syntax trees that these two modules read and make
    rebind.py            replaces numba.cuda's names by the emulator's names
    simulator.py         numba.cuda without Numba's own simulator
    namespace.py         the emulator's names: `cuda`, `math`, types
    conversions.py       casts, and stores to an array of each dtype
    warp_functions.py, bits.py, atomics.py, in_turn.py    functions of numba.cuda
    random_states.py     states of Numba's random numbers
    flow.py              which lanes take part in a statement
    exits.py             lanes that return, break or continue before other lanes
    active.py            what the lanes that take part agree on
    lanes.py             operations on arrays of lanes that Python's operators cannot compute
    groups.py            groups of lanes, and what they wait for
    context.py           what a kernel can call: arrays, copies, counts
    waiting.py           barriers and warp collectives
    global_memory.py, shared_memory.py, local_memory.py    arrays that check each access
    axes.py, records.py  arrays of several axes in shared and local memory; structured arrays
    checks.py            the compiled loops of these checks
    compiling.py         compiles the loops, and caches them on disk
    source_lines.py      source line and variable name of an instruction
    typed.py             the source of code, also of code that was typed at a prompt
    counts.py            the counts, with Nsight Compute's definitions
    errors.py            the errors
    trace.py             which tile moves when

Hopper's asynchronous instructions:

    mbarriers.py         barriers in shared memory that count arrivals and bytes
    knowledge.py         what each thread knows to have happened before
    boxed_arrays.py      arrays with a tensor map
    boxes.py             copies of boxes by the copy engine (TMA)
    products.py          matrix products of a warpgroup
    async_checks.py      the compiled loops of these checks
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
    NotEmulated,
    OutOfBounds,
    ReadOnlyStore,
    RegisterHazard,
    SharedHazard,
    TimeLimit,
    UninitialisedRead,
)
from .global_memory import GlobalArray
from .local_memory import LocalArray
from .random_states import create_xoroshiro128p_states
from .run import launch, schedule
from .shared_memory import SharedArray
from .trace import TileAccess, trace
