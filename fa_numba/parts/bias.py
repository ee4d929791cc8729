"""The bias of a tile of scores in registers, read while the tile's product is still computed."""

from fa_numba.device import float32, uint32
from fa_numba.intrinsics.global_memory import lies_in_pairs, read_pair
from fa_numba.parts.layout import make_column, make_row, make_warp_tile
from fa_numba.parts.namespace import part


@part
def make_read_bias(spec):
    """``read_bias(rB, tile)``: this thread's part of the bias of a tile, if there is one; with
    ``reads_state`` in its place what a block mask says of the tile to a mask_mod.

    Only a part within the matrix, of neighbours that lie in pairs: ``make_add_bias`` reads others
    itself.
    """
    TM, TN, (EI, EJ) = spec.TM, spec.TN, spec.element_steps
    row_of, column_of, warp_tile = make_row(spec), make_column(spec), make_warp_tile(spec)
    reads, whole = spec.reads_bias, _whole(spec)
    reads_state = spec.reads_state and not spec.slots_name_next
    block_state = make_block_state(spec)

    def read_bias(rB, tile):
        own = warp_tile(tile)
        if reads_state:
            rB[0] = float32(block_state(own))
        if reads and whole(own):
            thread, Bh = tile.thread, tile.head.options.bias[tile.head.b, tile.head.h]
            for i in range(TM):
                row = uint32(tile.i0 + row_of(thread.ty, i))
                for j in range(0, TN, 2):
                    col = uint32(own.j0 + column_of(thread.tx, j))
                    pair = read_pair(Bh, row, col, True)
                    rB[i * EI + j * EJ] = pair[0]
                    rB[i * EI + (j + 1) * EJ] = pair[1]

    return read_bias


@part
def make_block_state(spec):
    """``block_state(tile)``: of the tile's block, a number of ``mods.blocks``."""
    Br, Bc = spec.head_rows, spec.block_columns

    def block_state(tile):
        head, i, j = tile.head, tile.i0 // uint32(Br), tile.j0 // uint32(Bc)
        return uint32(head.options.block_mask[head.b, head.h, i, j])

    return block_state


@part
def make_add_bias(spec, unit, ahead):
    """``add_bias(rS, rB, tile)``: ``unit`` times the bias to the scores; that in rB, if it was read
    ``ahead``.
    """
    TM, TN, (EI, EJ) = spec.TM, spec.TN, spec.element_steps
    row_of, column_of = make_row(spec), make_column(spec)
    ahead, whole = ahead and spec.reads_bias, _whole(spec)
    add_inside = _make_add_inside(spec, unit)
    by_tiles, Br, Bc = spec.adds_whole_bias, spec.Br, spec.Bc

    def add_bias(rS, rB, tile):
        head, options, thread = tile.head, tile.head.options, tile.thread
        if ahead and whole(tile):
            for e in range(TM * TN):
                rS[e] += unit * rB[e]
        elif by_tiles and uint32(tile.i0 + Br) <= head.Nq and uint32(tile.j0 + Bc) <= head.Nk:
            add_inside(rS, tile)
        else:
            Bh = options.bias[head.b, head.h]
            for i in range(TM):
                row = uint32(tile.i0 + row_of(thread.ty, i))
                for j in range(TN):
                    col = uint32(tile.j0 + column_of(thread.tx, j))
                    if row < head.Nq and col < head.Nk:
                        rS[i * EI + j * EJ] += unit * Bh[row, col]

    return add_bias


@part
def _make_add_inside(spec, unit):
    """``add_inside(rS, tile)``: adds ``unit`` times the bias of a tile inside the matrix."""
    TM, TN, (EI, EJ) = spec.TM, spec.TN, spec.element_steps
    row_of, column_of = make_row(spec), make_column(spec)

    def add_inside(rS, tile):
        head, options, thread = tile.head, tile.head.options, tile.thread
        Bh = options.bias[head.b, head.h]
        for i in range(TM):
            row = uint32(tile.i0 + row_of(thread.ty, i))
            for j in range(TN):
                rS[i * EI + j * EJ] += unit * Bh[row, uint32(tile.j0 + column_of(thread.tx, j))]

    return add_inside


@part
def _whole(spec):
    """Whether all of a thread's part of a tile is in the matrix, in pairs that are read at once."""
    TM, TN, row_of, column_of = spec.TM, spec.TN, make_row(spec), make_column(spec)

    def whole(tile):
        head, options, thread = tile.head, tile.head.options, tile.thread
        row, col = (
            uint32(tile.i0 + row_of(thread.ty, TM - 1)),
            uint32(tile.j0 + column_of(thread.tx, TN - 1)),
        )
        return row < head.Nq and col < head.Nk and lies_in_pairs(options.bias)

    return whole
