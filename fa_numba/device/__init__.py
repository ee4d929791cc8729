"""The device, a GPU or the emulator, behind one function ``launch``.

The packages ``kernels``, ``parts`` and ``host`` use ``numba.cuda`` and the driver only through this
package: ``cuda``, the scalar types, ``device_function``, ``Kernel``, ``launch``. Two other packages
import ``numba.cuda`` directly. ``intrinsics`` defines instructions with Numba's extension API, and
``emulator`` looks for the names of ``numba.cuda`` in order to replace them.

A ``Kernel`` is compiled when it first runs on a GPU. The emulator runs the Python function of the
kernel.

    select           which device runs calls, and the limits of the device
    function         functions that kernels call
    kernel           kernels and their compiled code
    kernel_cache     compiled kernels on disk
    front_end        a package that makes Numba's front end faster
    linking          compiles for a GPU that need not be in this machine
    assembling       PTX of a kernel, and the registers that it needs
    mlir             compiles by another compiler, numba-cuda-mlir
    launching        launches, and counts of accesses
    launch_record    launches that are recorded once and made many times
    program_digest   digests of the source from which a kernel is compiled
    tensor_map       arrays that the copy engine reads and writes
    memory           arrays on the GPU, and workspace
    timing           times of calls, by events
    signature        Numba types of a kernel's arguments
    door             the object ``cuda`` that kernels import, in which ``jit`` makes a ``Kernel``
    beside_numpy     lets numba-cuda be imported with NumPy 2.5
"""

from numba import float32, int32, int64, types, uint32, uint64
from numba.cuda import profile_start, profile_stop

import fa_numba.device.beside_numpy
from fa_numba.device.assembling import assembled, registers_of
from fa_numba.device.door import cuda
from fa_numba.device.function import device_function
from fa_numba.device.kernel import Kernel, compile_together
from fa_numba.device.launch_record import DeviceArray, LaunchRecord
from fa_numba.device.launching import (
    Launched,
    as_batch,
    as_halves,
    as_one,
    broadcast,
    clear,
    count_accesses,
    grouped,
    launch,
    launched_kernels,
    note_origin,
    permuted,
    replay,
    transposed,
    with_last_axis,
)
from fa_numba.device.memory import (
    MemoryTrace,
    argument,
    copied_to_host,
    empty,
    release_memory,
    scratch,
    synchronize,
    to_gpu,
    to_host,
    track_memory,
)
from fa_numba.device.select import (
    EMULATED_MULTIPROCESSORS,
    EMULATED_SHARED_BYTES,
    MIN_COMPUTE_CAPABILITY,
    compute_capability,
    current_context,
    current_ordinal,
    describe,
    gpu_available,
    limits,
    multiprocessors,
    on_device,
    on_gpu,
    ordinal_of,
    planned_for_gpu,
    planned_limits,
    planning_for,
    shared_bytes_limit,
    using,
    why_no_gpu,
)
from fa_numba.device.signature import arguments, array_type, half_type
from fa_numba.device.tensor_map import WRAPS, TiledArray, tiled_type
from fa_numba.device.timing import time_ms
