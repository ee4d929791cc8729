"""The bias of a tile of scores: a thread adds it from global memory, or reads it into registers
first.

``rBS`` is an array of registers for values that a thread reads while the matrix product of the tile
is still running. The read then takes little extra time. A kernel uses rBS for one of two kinds of
values:

- With ``spec.reads_bias``, it contains this thread's part of the bias, one register per element of
  S.
- With ``spec.reads_state``, ``rBS[0]`` contains the state of the tile in the block mask: EMPTY,
  MIXED or FULL of ``mods.blocks``.
"""

from fa_numba.device import float32, uint32
from fa_numba.intrinsics.global_memory import lies_in_pairs, read_pair
from fa_numba.parts.layout import make_column, make_row, make_warp_tile
from fa_numba.parts.namespace import part


@part
def make_read_bias_or_state(spec):
    """Make ``read_bias_or_state(rBS, tile)``, which reads values for ``scale_bias_and_mask`` into
    the registers rBS, while the matrix product of the tile is still running.

    - With ``spec.reads_bias``, the function reads this thread's part of the bias, one register for
      each element of S. If the part cannot be read in pairs of elements (``_make_whole``), the
      function reads nothing, and ``add_bias`` reads the bias later.
    - With ``spec.reads_state``, the function reads the state of the tile in the block mask into
      ``rBS[0]``. In kernels whose producer passes the state to the consumers in shared memory
      (``spec.slots_name_next``), it does not read the state.
    """
    TM, TN, (EI, EJ) = spec.TM, spec.TN, spec.element_steps
    row_of, column_of, warp_tile = make_row(spec), make_column(spec), make_warp_tile(spec)
    reads, whole = spec.reads_bias, _make_whole(spec)
    reads_state = spec.reads_state and not spec.slots_name_next
    block_state = make_block_state(spec)

    def read_bias_or_state(rBS, tile):
        own = warp_tile(tile)
        if reads_state:
            rBS[0] = float32(block_state(own))
        if reads and whole(own):
            thread, Bh = tile.thread, tile.head.options.bias[tile.head.b, tile.head.h]
            for i in range(TM):
                row = uint32(tile.i0 + row_of(thread.ty, i))
                for j in range(0, TN, 2):
                    col = uint32(own.j0 + column_of(thread.tx, j))
                    pair = read_pair(Bh, row, col, True)
                    rBS[i * EI + j * EJ] = pair[0]
                    rBS[i * EI + (j + 1) * EJ] = pair[1]

    return read_bias_or_state


@part
def make_block_state(spec):
    """Make ``block_state(tile)``, which returns the state of a tile in the block mask.

    The state is EMPTY, MIXED or FULL of ``mods.blocks``. It says whether the ``mask_mod`` hides
    all, some or no elements.
    """
    Br, Bc = spec.head_rows, spec.block_columns

    def block_state(tile):
        head, i, j = tile.head, tile.i0 // uint32(Br), tile.j0 // uint32(Bc)
        return uint32(head.options.block_mask[head.b, head.h, i, j])

    return block_state


@part
def make_add_bias(spec, unit, ahead):
    """Make ``add_bias(rS, rBS, tile)``, which adds ``unit`` times the bias to the scores in rS.

    ``unit`` is log2(e) for scores in units of log2, or 1 for scores in natural units. Normally the
    function reads the bias from global memory. If ``ahead`` is true and ``read_bias_or_state`` has
    read the bias into rBS, the function uses rBS.
    """
    TM, TN, (EI, EJ) = spec.TM, spec.TN, spec.element_steps
    row_of, column_of = make_row(spec), make_column(spec)
    ahead, whole = ahead and spec.reads_bias, _make_whole(spec)
    add_inside = _make_add_inside(spec, unit)
    by_tiles, Br, Bc = spec.adds_whole_bias, spec.Br, spec.Bc

    def add_bias(rS, rBS, tile):
        head, options, thread = tile.head, tile.head.options, tile.thread
        if ahead and whole(tile):
            for e in range(TM * TN):
                rS[e] += unit * rBS[e]
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
    """Make ``add_inside(rS, tile)``, which adds ``unit`` times the bias of a tile to the scores in
    rS.

    It is for tiles that are completely inside of the matrix S, so that no element needs a check.
    """
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
def _make_whole(spec):
    """Make ``whole(tile)``, which says whether this thread's part of the bias can be read in pairs.

    All elements of the thread's part must be inside of the matrix, and the bias must be stored so
    that two neighbouring elements can be read at once.
    """
    TM, TN, row_of, column_of = spec.TM, spec.TN, make_row(spec), make_column(spec)

    def whole(tile):
        head, options, thread = tile.head, tile.head.options, tile.thread
        row, col = (
            uint32(tile.i0 + row_of(thread.ty, TM - 1)),
            uint32(tile.j0 + column_of(thread.tx, TN - 1)),
        )
        return row < head.Nq and col < head.Nk and lies_in_pairs(options.bias)

    return whole
