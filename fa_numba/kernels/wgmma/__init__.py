"""FlashAttention on Hopper's tensor cores (``wgmma``) and bulk copies (TMA), in 16 bits or planes.

A warpgroup of four warps produces: a few of its threads have the copy engine bring tiles to shared
memory. The others consume: each multiplies 64 rows. They wait at barriers in shared memory, a pair
for each slot of a tile: one says that it is full, the other that it is empty again.
"""

from fa_numba.kernels.mma import rows
from fa_numba.kernels.wgmma import fa1_backward, fa1_forward, fa2_backward, fa2_forward

__all__ = ["fa1_backward", "fa1_forward", "fa2_backward", "fa2_forward", "rows"]
