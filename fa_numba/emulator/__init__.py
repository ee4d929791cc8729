"""An emulator of CUDA kernels on the CPU that counts accesses and finds races.

`launch` runs the unchanged Python function of a Numba-CUDA kernel. One run of the function computes
all lanes of a thread block, or of several thread blocks. A value is a number if it is equal in all
lanes, else a NumPy array with one element per lane.

The emulator counts
- loads and stores of global memory, exactly, with the 32-byte sectors that they touch,
- wavefronts and bank conflicts of shared memory,
- instructions of warps, by class.

It raises an error on races in shared and global memory, conflicts between thread blocks, reads of
uninitialised memory, divergent barriers, deadlock and accesses out of bounds. The error names the
thread block, thread, array and source line.

    run.py               launches: the order in which thread blocks and groups of lanes run
    arguments.py         converts the arguments of a launch for the kernel
    progress.py          the time limit and the progress bar of a launch
    batches.py           runs several thread blocks at the same time
    grids.py             runs thread blocks that wait for each other
    rewrite.py           rewrites a kernel's statements so that one run computes all lanes
    expressions.py       rewrites a kernel's expressions for the same purpose
    syntax.py            helpers of rewrite.py and expressions.py for syntax trees
    widths.py            finds variables that Numba would make 64 bits wide
    rebind.py            replaces numba.cuda's names by the emulator's names
    simulator.py         imports numba.cuda without Numba's own simulator
    namespace.py         the emulator's names: `cuda`, `math`, types
    conversions.py       casts, and stores to an array of each dtype
    warp_functions.py, bits.py, atomics.py, in_turn.py    functions of numba.cuda
    random_states.py     states of Numba's random numbers
    flow.py              masks: which lanes take part in a statement
    exits.py             lanes that return, break or continue before other lanes
    active.py            questions about the lanes that take part, such as whether they agree
    lanes.py             operations on arrays of lanes that Python's operators cannot compute
    groups.py            groups of lanes, and what they wait for
    context.py           the state of a launch: arrays, asynchronous copies, counts
    waiting.py           barriers and warp collectives
    global_memory.py, shared_memory.py, local_memory.py    arrays that check each access
    axes.py              arrays of several axes in shared and local memory
    records.py           structured arrays
    checks.py            compiled loops that check and count the accesses of many lanes
    compiling.py         compiles loops for the CPU, and caches them on disk
    source_lines.py      source line and variable name of an instruction
    typed.py             source lines of a function, also if it was typed at a prompt
    counts.py            the counts, with Nsight Compute's definitions
    errors.py            the errors
    trace.py             records which tile moves when

Hopper's asynchronous instructions:

    mbarriers.py         barriers in shared memory that count arrivals and bytes
    knowledge.py         what each thread knows to have happened before
    boxed_arrays.py      arrays with a tensor map
    boxes.py             copies of boxes by the copy engine (TMA)
    products.py          matrix products of a warpgroup
    async_checks.py      compiled loops that check copies of boxes and matrix products
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
    WrongType,
)
from .global_memory import GlobalArray
from .local_memory import LocalArray
from .random_states import create_xoroshiro128p_states
from .run import launch, schedule
from .shared_memory import SharedArray
from .trace import TileAccess, trace
