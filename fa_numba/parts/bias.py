"""The bias of a tile of scores in registers, read while the tile's product is still computed."""

from functools import cache

from fa_numba.device import device_function, uint32
from fa_numba.intrinsics.global_memory import lies_in_pairs, read_pair
from fa_numba.parts.layout import make_column, make_row, make_warp_column


@cache
def make_read_bias(spec):
    """``read_bias(rB, row0, col0, Nq, Nk, b, h, options, ty, tx)``: this thread's part of the bias
    of a tile, if there is one.

    Only a part within the matrix, of neighbours that lie in pairs: ``make_add_bias`` reads others
    itself.
    """
    TM, TN, (EI, EJ) = spec.TM, spec.TN, spec.element_steps
    row_of, column_of, warp_column = make_row(spec), make_column(spec), make_warp_column(spec)
    reads, whole = spec.reads_bias, _whole(spec)

    @device_function
    def read_bias(rB, row0, col0, Nq, Nk, b, h, options, ty, tx):
        col0 = uint32(col0 + warp_column())
        if reads and whole(row0, col0, Nq, Nk, options, ty, tx):
            Bh = options.bias[b, h]
            for i in range(TM):
                row = uint32(row0 + row_of(ty, i))
                for j in range(0, TN, 2):
                    col = uint32(col0 + column_of(tx, j))
                    pair = read_pair(Bh, row, col, True)
                    rB[i * EI + j * EJ] = pair[0]
                    rB[i * EI + (j + 1) * EJ] = pair[1]

    return read_bias


@cache
def make_add_bias(spec, unit, ahead):
    """``add_bias(rS, rB, row0, col0, Nq, Nk, b, h, options, ty, tx)``: ``unit`` times the bias to
    the scores; that in rB, if it was read ``ahead``.
    """
    TM, TN, (EI, EJ) = spec.TM, spec.TN, spec.element_steps
    row_of, column_of = make_row(spec), make_column(spec)
    ahead, whole = ahead and spec.reads_bias, _whole(spec)
    add_inside = _make_add_inside(spec, unit)
    by_tiles, Br, Bc = spec.adds_whole_bias, spec.Br, spec.Bc

    @device_function
    def add_bias(rS, rB, row0, col0, Nq, Nk, b, h, options, ty, tx):
        if ahead and whole(row0, col0, Nq, Nk, options, ty, tx):
            for e in range(TM * TN):
                rS[e] += unit * rB[e]
        elif by_tiles and uint32(row0 + Br) <= Nq and uint32(col0 + Bc) <= Nk:
            add_inside(rS, row0, col0, b, h, options, ty, tx)
        else:
            Bh = options.bias[b, h]
            for i in range(TM):
                row = uint32(row0 + row_of(ty, i))
                for j in range(TN):
                    col = uint32(col0 + column_of(tx, j))
                    if row < Nq and col < Nk:
                        rS[i * EI + j * EJ] += unit * Bh[row, col]

    return add_bias


def _make_add_inside(spec, unit):
    """The same of a tile that is inside the matrix."""
    TM, TN, (EI, EJ) = spec.TM, spec.TN, spec.element_steps
    row_of, column_of = make_row(spec), make_column(spec)

    @device_function
    def add_inside(rS, row0, col0, b, h, options, ty, tx):
        Bh = options.bias[b, h]
        for i in range(TM):
            row = uint32(row0 + row_of(ty, i))
            for j in range(TN):
                rS[i * EI + j * EJ] += unit * Bh[row, uint32(col0 + column_of(tx, j))]

    return add_inside


@cache
def _whole(spec):
    """Whether all of a thread's part of a tile is in the matrix, in pairs that are read at once."""
    TM, TN, row_of, column_of = spec.TM, spec.TN, make_row(spec), make_column(spec)

    @device_function
    def whole(row0, col0, Nq, Nk, options, ty, tx):
        row, col = uint32(row0 + row_of(ty, TM - 1)), uint32(col0 + column_of(tx, TN - 1))
        return row < Nq and col < Nk and lies_in_pairs(options.bias)

    return whole
