"""Kernels that find the states of the blocks of S under a ``mask_mod``, and list the visited
blocks.

A block is empty if all its elements are hidden, full if all are visible, and mixed otherwise. In
the kernel of ``make_blocks``, a thread block evaluates one block of S. Each thread evaluates every
256th element, and the thread block counts how many elements are visible.

Full and mixed blocks are visited. In the kernel of ``make_lists``, thread n makes two lists: the
visited blocks in row n of blocks, and the visited blocks in column n of blocks.
"""

from functools import cache

from numba import types

from fa_numba.device import cuda, float32, int32, uint32
from fa_numba.device.signature import array_type
from fa_numba.intrinsics.shared import shared_tile
from fa_numba.kernels.simt.softmax import THREADS, WARPS, sum_of_block
from fa_numba.mods.blocks import EMPTY, FULL, MIXED
from fa_numba.parts.mods import called

LISTING = 32  # threads of a block in the second kernel


@cache
def make_blocks(features, Br, Bc):
    """Return the kernel that finds the state (empty, full or mixed) of each block of S.

    A block has Br x Bc elements. The grid is (Tr Tc, H, B).
    """
    mask_mod = called(features.mask_mod.value)
    elements = Br * Bc
    states = array_type(4, types.uint8)

    @cuda.jit((states, *[types.int32] * 2, features.argument_type), THREADS, 4 * WARPS)
    def blocks(block_mask, Nq, Nk, options):
        s = shared_tile(0, WARPS)
        b, h = uint32(cuda.blockIdx.z), uint32(cuda.blockIdx.y)
        tile, Tc = uint32(cuda.blockIdx.x), uint32(block_mask.shape[3])
        ti, tj = uint32(tile // Tc), uint32(tile % Tc)
        thread = uint32(cuda.threadIdx.x)
        i0, j0 = uint32(ti * uint32(Br)), uint32(tj * uint32(Bc))
        seen, e = float32(0.0), thread
        while e < uint32(elements):
            i, j = uint32(i0 + e // uint32(Bc)), uint32(j0 + e % uint32(Bc))
            if i < uint32(Nq) and j < uint32(Nk):  # noqa: SIM102  reads only inside of the matrix
                if mask_mod(int32(b), int32(h), int32(i), int32(j), int32(0), options):
                    seen += float32(1.0)
            e = uint32(e + uint32(THREADS))
        seen = sum_of_block(seen, s, thread)
        if thread == uint32(0):
            rows = min(int32(Br), int32(Nq - int32(i0)))
            columns = min(int32(Bc), int32(Nk - int32(j0)))
            state = uint32(MIXED)
            if seen == float32(0.0):
                state = uint32(EMPTY)
            elif seen == float32(rows) * float32(columns):
                state = uint32(FULL)
            block_mask[b, h, ti, tj] = state

    return blocks


@cache
def make_lists():
    """Return the kernel that lists the visited blocks.

    ``next_column[b, h, i, j]`` becomes the number of the first visited block from j on in row i of
    blocks, or Tc if there is none. ``next_row[b, h, j, i]`` becomes the number of the first visited
    block from i on in column j of blocks, or Tr if there is none.

    The grid is (max(Tr, Tc) / LISTING, H, B). A thread block has LISTING threads.
    """
    states, numbers = array_type(4, types.uint8), array_type(4, types.int32)

    @cuda.jit((states, numbers, numbers), LISTING, 0)
    def lists(block_mask, next_column, next_row):
        b, h = uint32(cuda.blockIdx.z), uint32(cuda.blockIdx.y)
        Tr, Tc = uint32(block_mask.shape[2]), uint32(block_mask.shape[3])
        n = uint32(cuda.blockIdx.x * uint32(LISTING) + cuda.threadIdx.x)
        if n < Tr:
            following, j = Tc, Tc
            next_column[b, h, n, Tc] = following
            while j > uint32(0):
                j = uint32(j - 1)
                if block_mask[b, h, n, j] != EMPTY:
                    following = j
                next_column[b, h, n, j] = following
        if n < Tc:
            following, i = Tr, Tr
            next_row[b, h, n, Tr] = following
            while i > uint32(0):
                i = uint32(i - 1)
                if block_mask[b, h, i, n] != EMPTY:
                    following = i
                next_row[b, h, n, i] = following

    return lists
