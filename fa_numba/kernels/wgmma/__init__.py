"""FlashAttention on Hopper's tensor cores (``wgmma``) with bulk copies (TMA), in 16 bits or in
planes.

A thread block has two kinds of warpgroups. One warpgroup (four warps) is the producer: a few of its
threads let the copy engine load tiles into slots of shared memory. The other warpgroups are
consumers. Each consumer computes 64 rows of S, or 64 columns of S in a kernel that computes dK and
dV. Producers and consumers wait for each other at barriers in shared memory. Each slot has two
barriers: one says that the slot is full, and the other that it is empty.
"""

from fa_numba.kernels.mma import rows
from fa_numba.kernels.wgmma import fa1_backward, fa1_forward, fa2_backward, fa2_forward

__all__ = ["fa1_backward", "fa1_forward", "fa2_backward", "fa2_forward", "rows"]
