"""Which blocks of S a ``mask_mod`` leaves empty, full or mixed: a thread block takes one of them.

Its threads take every 256th element each, and add up how many are seen.
"""

from functools import cache

from numba import types

from fa_numba.device import cuda, device_function, float32, int32, uint32
from fa_numba.device.signature import array_type
from fa_numba.intrinsics.shared import shared_tile
from fa_numba.kernels.simt.softmax import THREADS, WARPS, sum_of_block
from fa_numba.mods import function_of
from fa_numba.mods.blocks import EMPTY, FULL, MIXED


@cache
def make_blocks(features, Br, Bc):
    """The kernel for blocks of Br x Bc; launched over (Tr Tc, H, B) thread blocks."""
    mask_mod = device_function(function_of(features.mask_mod.value))
    elements = Br * Bc

    @cuda.jit((array_type(4), *[types.int32] * 2, features.argument_type), THREADS, 4 * WARPS)
    def blocks(states, Nq, Nk, options):
        s = shared_tile(0, WARPS)
        b, h = uint32(cuda.blockIdx.z), uint32(cuda.blockIdx.y)
        tile, Tc = uint32(cuda.blockIdx.x), uint32(states.shape[3])
        ti, tj = uint32(tile // Tc), uint32(tile % Tc)
        thread = uint32(cuda.threadIdx.x)
        i0, j0 = uint32(ti * uint32(Br)), uint32(tj * uint32(Bc))
        seen, e = float32(0.0), thread
        while e < uint32(elements):
            i, j = uint32(i0 + e // uint32(Bc)), uint32(j0 + e % uint32(Bc))
            if i < uint32(Nq) and j < uint32(Nk):  # noqa: SIM102  what it reads is within
                if mask_mod(int32(b), int32(h), int32(i), int32(j), int32(0), options):
                    seen += float32(1.0)
            e = uint32(e + uint32(THREADS))
        seen = sum_of_block(seen, s, thread)
        if thread == uint32(0):
            rows = min(int32(Br), int32(Nq - int32(i0)))
            columns = min(int32(Bc), int32(Nk - int32(j0)))
            state = float32(MIXED)
            if seen == float32(0.0):
                state = float32(EMPTY)
            elif seen == float32(rows) * float32(columns):
                state = float32(FULL)
            states[b, h, ti, tj] = state

    return blocks
