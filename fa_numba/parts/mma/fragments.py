"""Operands of ``mma`` from shared memory to registers: fragments of 16 x 16, by ``ldmatrix``.

Warp w takes rows 16 R w and on of a row tile, R fragments of 16 rows each, and every column; or,
where the warps split the keys, all rows and the columns from ``warp_column`` on.
Registers of S and O run along rows, as on CUDA cores: element i TN + j of S is row ty + 8 i and
column j of the thread's, so that rows 2 r and 2 r + 1 share the fragments of r.
"""

from fa_numba.device import cuda, uint32
from fa_numba.intrinsics.matrix import ldmatrix
from fa_numba.parts.mma.swizzle import make_exchange, make_further
from fa_numba.parts.namespace import part


@part
def make_place(rows, carries=False):
    """``place(rows_first, col0)``: the place of this lane's row among the four 8 x 8 tiles that one
    ``ldmatrix`` reads, from column ``col0`` of a tile with these ``rows`` on.

    Lane 8 t + r points at row r of tile t. With ``rows_first`` tiles 0 and 1 are above each other,
    and 2 and 3 to the right of them; without, 0 and 1 beside each other, 2 and 3 below. ``carries``
    as ``make_further`` says.
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
    """``load_fragment(rQ, sQ, at, r, k)``: rows 16 r, columns 16 k on of Q from ``at``."""
    K, further = spec.planes * spec.DK, make_further(spec.rows)

    def load_fragment(rQ, sQ, at, r, k):
        a = ldmatrix(sQ, further(at, 16 * r, 16 * k))
        e = 4 * (r * K + k)
        rQ[e] = a[0]
        rQ[e + 1] = a[1]
        rQ[e + 2] = a[2]
        rQ[e + 3] = a[3]

    return load_fragment
