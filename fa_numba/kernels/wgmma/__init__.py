"""FlashAttention on Hopper's tensor cores (``wgmma``) with bulk copies (TMA), in 16 bits or in
planes.

One warpgroup (four warps) of a block produces: a few of its threads let the copy engine load tiles
into slots of shared memory. The other warpgroups consume: each multiplies 64 rows of S, or for dK
and dV 64 columns of S. Both wait at barriers in shared memory. Each slot of a tile has two
barriers, one for "full" and one for "empty".
"""

from fa_numba.kernels.mma import rows
from fa_numba.kernels.wgmma import fa1_backward, fa1_forward, fa2_backward, fa2_forward

__all__ = ["fa1_backward", "fa1_forward", "fa2_backward", "fa2_forward", "rows"]
