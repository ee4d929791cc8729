"""The kernel that merges the key splits of a row tile (Flash-Decoding; Dao, Haziza, Massa and Sizov
2023, https://pytorch.org/blog/flash-decoding).

In FlashAttention-2's forward pass with ``kv_splits``, several thread blocks share a row tile: each
computes a part of the columns. Split s stores m_s, l_s and O_s of its own columns. O_s is not yet
divided by l_s. This kernel combines the splits of a row as Algorithm 1 combines column tiles (lines
9 and 10):

    m = max_s m_s
    l = sum_s e^(m_s - m) l_s
    O = sum_s e^(m_s - m) O_s / l
    L = m + log l

One warp merges a row. If there are many splits, eight warps share a row. The sums have a fixed
order. A split without a visible column of the row has m_s = -inf and l_s = 0. O_s of such a split
is ignored: it can be NaN if V contains NaN. The splits store m_s multiplied by log2(e).

Accesses, elements per head, for n splits:  loads n (Nq d + 2 Nq), stores Nq d + Nq.
"""

from functools import cache
from typing import NamedTuple

from numba import types

from fa_numba.device import cuda, float32, int64, uint32
from fa_numba.device.signature import array_type
from fa_numba.dtypes import DTYPES
from fa_numba.integers import ceil_div
from fa_numba.intrinsics.arithmetic import LN2, NEG_INF, exp2, log2, maximum
from fa_numba.intrinsics.shared import shared_tile
from fa_numba.options import Features
from fa_numba.parts import bind, fragments, simt
from fa_numba.parts import grid as grid_parts
from fa_numba.parts.fragments.pairs import make_read_floats
from fa_numba.parts.lanes import FULL_WARP, max_of_lanes, sum_of_lanes
from fa_numba.parts.records import Head

WARPS = 8
# Up to this number of splits one warp merges a row, otherwise eight warps.
FEW_SPLITS = 8


class MergeFacts(NamedTuple):
    """The properties of a call for which the kernel of ``make_merge`` is compiled.

    A thread block has eight warps, and ``row_warps`` of them share a row. ``head_dim`` is the
    number of columns of O. ``dtype`` is the dtype of O. ``aligned`` says whether all rows start at
    16-byte addresses. ``tile_heads`` is the number of query heads that share a row tile.
    """

    features: Features
    head_dim: int
    dtype: str
    aligned: bool
    tile_heads: int
    row_warps: int

    @property
    def d_v(self) -> int:
        """Number of columns of O. Device functions read it as ``d_v``, like the field of a
        ``Spec``.
        """
        return self.head_dim


@cache
def make_merge(facts):
    """Return the kernel that merges the key splits of each row.

    The grid is (rows / (8 / row_warps), query heads, batch entries).
    """
    grid, pairs = bind(
        facts, grid_parts, fragments.pairs if DTYPES[facts.dtype].matrix else simt.epilogue
    )
    d, W, heads = facts.head_dim, facts.row_warps, facts.tile_heads
    PAIRS = ceil_div(d, 64)  # pairs of elements of a row per lane
    RO, TOGETHER, ROWS = 2 * PAIRS, max(1, 8 // PAIRS), WARPS // W
    RA, VALUES, NS = RO * TOGETHER, W * 64 * PAIRS, W * (64 * PAIRS + 2)
    read_floats = make_read_floats(facts)

    out = array_type(4, types.uint16 if DTYPES[facts.dtype].matrix else types.float32)
    sums = (array_type(5), array_type(4), array_type(4))
    arguments = (*sums, out, array_type(3), facts.features.argument_type)

    @cuda.jit(arguments, 32 * WARPS, 4 * NS)
    def merge_splits(A, l, m, O, L, options):
        sO = shared_tile(0, NS)
        rO, rA = cuda.local.array(RO, float32), cuda.local.array(RA, float32)
        lane = uint32(uint32(cuda.threadIdx.x) % uint32(32))
        warp = uint32(uint32(cuda.threadIdx.x) // uint32(32))
        first = uint32(warp % uint32(W))  # this warp's splits: every W-th from here
        row = uint32(cuda.blockIdx.x * ROWS + warp // uint32(W))
        h, b = uint32(cuda.blockIdx.y), uint32(cuda.blockIdx.z)
        head = Head(b, h, h, uint32(0), uint32(0), options)
        Oh, Lh = grid.query_rows(O, head), grid.query_rows(L, head)
        there = row < uint32(Oh.shape[0])
        group, place = uint32(h // uint32(heads)), uint32(row * heads + h % uint32(heads))
        splits = uint32(A.shape[0])
        shared = Head(b, group, group, uint32(0), uint32(0), options)

        # m_s and l_s: each lane reads one split
        split, m_s, l_s = uint32(first + W * lane), NEG_INF, float32(0.0)
        if there and split < splits:
            m_s = grid.rows_of_split(m, split, shared)[place]
            l_s = grid.rows_of_split(l, split, shared)[place]
        # m = max_s m_s
        m_new = max_of_lanes(m_s, 32, 1)
        shift = m_new
        if m_new == NEG_INF:  # -inf - -inf would be NaN
            shift = float32(0.0)
        # l = sum_s e^(m_s - m) l_s
        f_s = exp2(m_s - shift)
        l_new = sum_of_lanes(f_s * l_s, 32, 1)
        # O = sum_s e^(m_s - m) O_s; several splits are loaded at the same time
        for e in range(RO):
            rO[e] = float32(0.0)
        n = uint32(0)
        while uint32(first + W * n) < splits:
            for u in range(TOGETHER):
                split = uint32(first + W * (n + u))
                inside = there and split < splits
                As = grid.rows_of_split(A, min(split, uint32(splits - 1)), shared)
                for c in range(PAIRS):
                    e = 2 * (u * PAIRS + c)
                    pair = read_floats(As, int64(place), int64(2 * lane) + 64 * c, inside)
                    rA[e] = pair[0]
                    rA[e + 1] = pair[1]
            for u in range(TOGETHER):
                f = cuda.shfl_sync(FULL_WARP, f_s, uint32(n + u))
                seen = cuda.shfl_sync(FULL_WARP, l_s, uint32(n + u)) != float32(0.0)
                for e in range(RO):
                    rO[e] = rO[e] + f * rA[u * RO + e] if seen else rO[e]
            n = uint32(n + TOGETHER)

        if W > 1:  # combine the warps that share the row in the same way
            for c in range(PAIRS):
                at = uint32(warp * (64 * PAIRS) + 2 * lane + 64 * c)
                sO[at] = rO[2 * c]
                sO[uint32(at + 1)] = rO[2 * c + 1]
            if lane == uint32(0):
                sO[uint32(VALUES + 2 * warp)] = m_new
                sO[uint32(VALUES + 2 * warp + 1)] = l_new
            cuda.syncthreads()  # the results of the other warps are there
            for w in range(W):
                m_new = maximum(m_new, sO[VALUES + 2 * w])
            shift = m_new
            if m_new == NEG_INF:
                shift = float32(0.0)
            l_new = float32(0.0)
            for e in range(RO):
                rO[e] = float32(0.0)
            for w in range(W):
                f = exp2(sO[VALUES + 2 * w] - shift)
                l_new += f * sO[VALUES + 2 * w + 1]
                for c in range(PAIRS):
                    at = uint32(w * (64 * PAIRS) + 2 * lane + 64 * c)
                    rO[2 * c] += f * sO[at]
                    rO[2 * c + 1] += f * sO[uint32(at + 1)]

        # O = diag(l)^-1 O, and 0 in a row without a visible column; L = m + log l
        if there and first == uint32(0):
            factor = float32(0.0)
            if l_new != float32(0.0):
                factor = float32(1.0) / l_new
            for c in range(PAIRS):
                pairs.write_two(
                    Oh, row, uint32(2 * lane + 64 * c), factor * rO[2 * c], factor * rO[2 * c + 1]
                )
            if lane == uint32(0):
                Lh[row] = LN2 * (m_new + log2(l_new))

    return merge_splits
