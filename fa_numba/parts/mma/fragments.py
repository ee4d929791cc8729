"""Fragments of 16 x 16 elements, loaded from shared memory to registers by ``ldmatrix``.

The products ``mma`` need their operands as fragments. Warp w computes the rows from 16 R w on of a
row tile, that is R fragments of 16 rows, and all columns. If the warps split the keys, each warp
computes all rows, and the columns from ``warp_column()`` on. Element (i, j) of a thread's part of S
is in register i TN + j. It is in row ty + 8 i, so that the rows 2 r and 2 r + 1 of a thread belong
to fragment r.
"""

from fa_numba.device import cuda, uint32
from fa_numba.intrinsics.matrix import ldmatrix
from fa_numba.parts.mma.swizzle import make_exchange, make_further
from fa_numba.parts.namespace import part


@part
def make_place(rows, carries=False):
    """Make ``place(rows_first, col0)``, which returns the index in shared memory at which this lane
    points.

    ``ldmatrix`` reads four tiles of 8 x 8 elements, and lane 8 t + r points at row r of tile t. The
    four tiles begin at column ``col0`` of a tile in shared memory with the layout ``rows``.

    | ``rows_first`` | tiles 0 and 1 | tiles 2 and 3 |
    |---|---|---|
    | true | one above the other | to the right of tiles 0 and 1 |
    | false | next to each other | below tiles 0 and 1 |

    If ``carries``, the index is without the swizzle, as ``make_further`` needs it.
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
    """Make ``load_fragment(rQ, sQ, at, r, k)``, which loads one 16 x 16 fragment of Q into the
    registers rQ.

    The fragment is number r along the rows and number k along the columns. ``at`` is the index of
    ``place`` for the first fragment.
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
