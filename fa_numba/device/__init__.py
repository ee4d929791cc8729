"""The GPU or the emulator behind one ``launch``: what kernels, parts and host know of a device.

Kernels, parts and the host take all that they need of ``numba.cuda`` and of the driver from here:
``cuda``, the scalar types, ``device_function``, ``Kernel``, ``launch``. Two others name it:
intrinsics define their instructions with Numba's extension API, and the emulator looks for
``numba.cuda``'s names in order to replace them.

A ``Kernel`` is compiled when it first runs on a GPU; on the emulator its Python function runs as it
is. The files: ``select`` which device and its limits, ``function`` what kernels call, ``kernel``
and ``kernel_cache`` compiled code, ``front_end`` how it is compiled in less time, ``linking`` and
``assembling`` for a GPU that is not here and what the assembler says, ``mlir`` another compiler,
``launching`` launches and counts, ``program_digest`` what a
kernel is compiled from, as a digest, ``launch_record`` launches that are made again, ``tensor_map``
arrays for the copy engine, ``memory`` arrays and workspace, ``timing`` events, ``beside_numpy`` a
name that numba-cuda misses.
"""

from numba import float32, int32, int64, types, uint32, uint64
from numba.cuda import profile_start, profile_stop

import fa_numba.device.beside_numpy
from fa_numba.device.assembling import assembled, registers_of
from fa_numba.device.door import cuda
from fa_numba.device.function import device_function
from fa_numba.device.kernel import Kernel
from fa_numba.device.launch_record import DeviceArray, LaunchRecord
from fa_numba.device.launching import (
    Launched,
    as_batch,
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
    planning_for,
    shared_bytes_limit,
    using,
    why_no_gpu,
)
from fa_numba.device.signature import arguments, array_type, half_type
from fa_numba.device.tensor_map import WRAPS, TiledArray, tiled_type
from fa_numba.device.timing import time_ms
