"""Columns in parallel (Flash-Decoding): which of a row tile's columns a block takes, and what it
leaves of them.

Blocks that share a row tile cannot share its softmax: each leaves O unnormalised, l and m of its
own columns. m is a score, so e^(m_split - m) is exact where it matters, near 1: a logsumexp in its
place would be rounded, which shows where scores are large.
"""

from functools import cache

from fa_numba.device import cuda, device_function, uint32
from fa_numba.parts.rows import make_write_values
from fa_numba.parts.visits import make_next_column


@cache
def make_tile_and_split(spec):
    """``tile_and_split(options)``: the first row of this block's row tile, and which share of the
    columns it takes. The tiles with most columns go first: a shorter tail.
    """
    ROWS, splits = spec.head_rows, spec.features.splits

    @device_function
    def tile_and_split(options):
        if splits:
            shares = uint32(options.kv_splits)
            n = uint32(cuda.gridDim.x - 1 - cuda.blockIdx.x)
            return uint32(n // shares * ROWS), uint32(n % shares)
        return uint32((cuda.gridDim.x - 1 - cuda.blockIdx.x) * ROWS), uint32(0)

    return tile_and_split


@cache
def make_share(spec):
    """``share(j0, j_end, split, options)``: of the columns from j0 to j_end those of a split, whole
    tiles: as many as another split has, or one more. None where there are not enough.
    """
    Bc = spec.Bc

    @device_function
    def share(j0, j_end, split, options):
        shares = uint32(options.kv_splits)
        tiles = uint32(0)
        if j0 < j_end:
            tiles = uint32(uint32(j_end - j0 + (Bc - 1)) // uint32(Bc))
        each, more = uint32(tiles // shares), uint32(tiles % shares)
        first = uint32(split * each + min(split, more))
        last = uint32(first + each)
        if split < more:
            last = uint32(last + 1)
        return uint32(j0 + first * Bc), uint32(min(j_end, uint32(j0 + last * Bc)))

    return share


@cache
def make_share_of_columns(spec):
    """``share_of_columns(j0, j_end, split, i0, b, h, options)``: of the columns that a row tile
    visits, the first tile of a split and one past its last column; all where nobody shares them.
    """
    share, next_column, splits = make_share(spec), make_next_column(spec), spec.features.splits

    @device_function
    def share_of_columns(j0, j_end, split, i0, b, h, options):
        if splits:
            first, end = share(j0, j_end, split, options)
            return next_column(first, end, i0, b, h, options), end
        return j0, j_end

    return share_of_columns


@cache
def make_rows_of_split(spec):
    """``rows_of_split(X, split, b, h, options)``: of A, l or m the rows that a split of one
    sequence and head has written. Where heads share a tile h counts groups of them, whose rows
    alternate.
    """
    packed, heads = spec.features.packed, spec.tile_heads

    @device_function
    def rows_of_split(X, split, b, h, options):
        if packed:
            first, end = options.q_starts[b], options.q_starts[b + 1]
            return X[split, 0, h][first * heads : end * heads]
        return X[split, b, h]

    return rows_of_split


def writes_split(spec, write_rows):
    """``write_split(rO, rl, rm, split, i0, rows, b, h, options, ty, tx)``: O, l and m of the rows
    from i0 on of ``rows`` and of a split's columns, O by ``write_rows``.
    """
    heads, write_values = spec.tile_heads, make_write_values(spec)
    rows_of_split = make_rows_of_split(spec)

    @device_function
    def write_split(rO, rl, rm, split, i0, rows, b, h, options, ty, tx):
        first, end = uint32(i0 * heads), uint32(rows * heads)
        write_rows(rO, rows_of_split(options.A, split, b, h, options), first, end, ty, tx)
        write_values(rl, rows_of_split(options.l, split, b, h, options), first, end, ty, tx)
        write_values(rm, rows_of_split(options.m, split, b, h, options), first, end, ty, tx)

    return write_split
