"""Fragments of 16 x 16 elements, which ``ldmatrix`` loads from shared memory to registers.

The instruction ``mma.sync`` takes its operands as fragments. R is the number of fragments that the
rows of a warp fill, one below the other. Normally, warp w computes the 16 R rows of S from row 16 R
w on, and all columns. If the warps split the keys, each warp computes all rows of S, and the
columns from ``warp_column()`` on.

A thread with the position (ty, tx) holds several rows of S. Its row number i is row ty + 8 i of S,
and is in the registers i TN to i TN + TN - 1. The thread's rows number 2 r and 2 r + 1 belong to
fragment r.
"""

from fa_numba.device import cuda, uint32
from fa_numba.intrinsics.matrix import ldmatrix
from fa_numba.parts.mma.swizzle import make_exchange, make_further
from fa_numba.parts.namespace import part


@part
def make_place(rows, carries=False):
    """Make ``place(rows_first, col0)``, which returns the index in shared memory that this lane
    passes to ``ldmatrix``.

    ``ldmatrix`` reads four tiles of 8 x 8 elements. Lane 8 t + r passes the index at which row r of
    tile t begins. The four tiles form a square of 16 x 16 elements. The square begins at row 0 and
    column ``col0`` of a larger tile in shared memory, which has the layout ``rows``.

    - If ``rows_first`` is true, tile 1 is below tile 0, and the tiles 2 and 3 are to the right of
      them.
    - If ``rows_first`` is false, tile 1 is to the right of tile 0, and the tiles 2 and 3 are below
      them.

    Normally the index includes the swizzle of the layout. If ``carries`` is true, the index does
    not include it, and ``make_further`` with ``carries`` adds the swizzle later.
    """
    pitch, exchange = rows.pitch, make_exchange(rows)

    def place(rows_first, col0):
        lane = uint32(cuda.threadIdx.x) % uint32(32)
        second = uint32((lane // uint32(8)) % uint32(2))
        third = uint32(lane // uint32(16))
        row = uint32(lane % uint32(8))
        if rows_first:
            at = uint32((row + second * 8) * pitch + third * 8 + col0)
        else:
            at = uint32((row + third * 8) * pitch + second * 8 + col0)
        return at if carries else uint32(at ^ exchange(row))

    return place


@part
def make_load_fragment(spec):
    """Make ``load_fragment(rQ, sQ, at, r, k)``, which loads one fragment of 16 x 16 elements of Q
    into the registers rQ.

    The fragment has the rows from 16 r on and the columns from 16 k on, relative to the warp's
    first fragment. ``at`` is the index in sQ that ``place`` returns for the first fragment.
    """
    K, further = spec.planes * spec.DK, make_further(spec.rows)

    def load_fragment(rQ, sQ, at, r, k):
        a = ldmatrix(sQ, further(at, 16 * r, 16 * k))
        e = 4 * (r * K + k)
        rQ[e] = a[0]
        rQ[e + 1] = a[1]
        rQ[e + 2] = a[2]
        rQ[e + 3] = a[3]

    return load_fragment
