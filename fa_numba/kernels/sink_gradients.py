"""The kernel that computes the gradient of the sinks.

A sink is a logit s per head. The softmax sum of each row includes e^s, but no row of V belongs to
it. The sink's share of a row's sum is e^(s - L), which takes the place of P. Its dP is 0, because
it has no row of V. With dS = P o (dP - D), the gradient of s is therefore:

    ds = - sum e^(s - L) D

The sum is over the rows of a head in all batch entries. D is rowsum(dO o O) minus the gradient of
L, from line 4 of Algorithm 2. A thread block computes one head, and the sum has a fixed order.

Accesses, elements per head:  loads 2 Nq for each batch entry; stores 1 for all batch entries.
"""

from functools import cache

from fa_numba.device import cuda, float32, uint32
from fa_numba.device.signature import array_type
from fa_numba.intrinsics.arithmetic import LOG2E, NEG_INF, exp2
from fa_numba.intrinsics.shared import shared_tile
from fa_numba.parts import bind
from fa_numba.parts import grid as grid_parts
from fa_numba.parts.lanes import sum_of_lanes
from fa_numba.parts.namespace import RowFacts

WARPS = 16


@cache
def make_sink_gradients(features):
    """Return the kernel for calls with these ``features``. The grid is (query heads, 1, 1)."""
    (grid,) = bind(RowFacts(features), grid_parts)
    THREADS = 32 * WARPS
    rows = array_type(3)

    @cuda.jit((rows, rows, array_type(1), features.argument_type), THREADS, 4 * WARPS)
    def sink_gradients(L, D, dsinks, options):
        sSum = shared_tile(0, WARPS)
        h, thread = uint32(cuda.blockIdx.x), uint32(cuda.threadIdx.x)
        s, total = options.sinks[h], float32(0.0)
        b = uint32(0)
        while b < uint32(L.shape[0]):
            Nq, _ = grid.lengths(L.shape[2], L.shape[2], b, options)
            row = thread
            while row < Nq:
                l, d = L[b, h, row], D[b, h, row]
                if l != NEG_INF:  # otherwise the row sees no column, and has no share
                    total -= exp2(LOG2E * (s - l)) * d
                row = uint32(row + THREADS)
            b = uint32(b + 1)
        total = sum_of_lanes(total, 32, 1)
        if thread % uint32(32) == uint32(0):
            sSum[thread // uint32(32)] = total
        cuda.syncthreads()  # the warps' sums are there
        if thread == uint32(0):
            total = float32(0.0)
            for w in range(WARPS):
                total += sSum[w]
            dsinks[h] = total

    return sink_gradients
