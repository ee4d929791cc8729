"""What compiled kernels take of a multiprocessor."""

from typing import Any

import fa_numba

# Metric -> unit: registers of a thread; its local memory, which is what did not fit into them; and
# how many warps a multiprocessor holds, of blocks with these threads, registers and shared memory.
UNITS = {"registers": "1", "local_memory": "bytes", "resident_warps": "1"}


def of(planned: fa_numba.Plan) -> dict[str, float]:
    kernel = planned.launched[-1]
    compiled: Any = kernel.compiled()
    blocks = compiled.occupancy.max_active_blocks_per_multiprocessor(
        kernel.threads, kernel.shared_bytes
    )
    return {
        "registers": compiled.attributes.num_regs,
        "local_memory": compiled.attributes.local_size_bytes,
        "resident_warps": blocks * kernel.threads // 32,
    }
