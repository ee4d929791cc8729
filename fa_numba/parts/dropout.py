"""Dropout of P, drawn from an element's own place: nothing is stored.

Dropped elements of a tile in registers change their sign, as P itself is never negative: what is
to be kept and what P was can both be told from then on.
"""

from functools import cache

from fa_numba import masks
from fa_numba.device import device_function, float32, uint32, uint64
from fa_numba.parts.layout import make_column, make_row, make_warp_column
from fa_numba.parts.namespace import part

WORD_COLUMNS, COUNTER_COLUMNS = masks.WORD_COLUMNS, masks.COUNTER_COLUMNS


_philox = device_function(masks.make_philox(uint32, uint64))


@device_function
def _words(counter, row, head):
    """The four random words of 64 columns' share ``counter`` of a row."""
    place = uint32((uint32(head.b) << uint32(16)) + uint32(head.h))
    key0, key1 = uint32(head.options.seed_low), uint32(head.options.seed_high)
    return _philox(counter, row, place, uint32(head.options.offset), key0, key1)


@device_function
def keeps(row, col, head):
    """Whether dropout keeps this element."""
    share = uint32(col // uint32(COUNTER_COLUMNS)) * uint32(WORD_COLUMNS)
    w = _words(uint32(share + col % uint32(WORD_COLUMNS)), row, head)
    n = uint32(col // uint32(WORD_COLUMNS)) % uint32(4)
    word = w[0]
    if n == uint32(1):
        word = w[1]
    if n == uint32(2):
        word = w[2]
    if n == uint32(3):
        word = w[3]
    return word >= uint32(head.options.threshold)


@device_function
def _bit(dropped, n):
    return uint64(dropped) << uint64(n)


@part
def make_drop(spec):
    """``drop(rP, tile)``: the dropped elements of P change sign.

    The draws are collected as bits first: a loop over them need not be unrolled, as one over
    registers must.
    """
    TM, TN, (EI, EJ) = spec.TM, spec.TN, spec.element_steps
    row_of, column_of, warp_column = make_row(spec), make_column(spec), make_warp_column(spec)
    dropout = spec.features.dropout
    # One draw serves four elements where a thread's columns share counters.
    across = spec.column_step // spec.column_width  # threads that share a row
    COLUMNS = spec.warp_columns or spec.Bc
    shared = COLUMNS % COUNTER_COLUMNS == 0 and TN * across == COLUMNS
    SHARES = WORD_COLUMNS // across
    ALIKE = 4 * SHARES
    # Rows and columns of one word of bits
    COLS = min(TN, 64 // ALIKE * ALIKE)
    ROWS = max(n for n in (1, 2, 4, 8) if TM % n == 0 and n * COLS <= 64)

    def drop(rP, tile):
        head, options, thread = tile.head, tile.head.options, tile.thread
        if dropout:
            threshold = uint32(options.threshold)
            col0 = uint32(tile.j0 + warp_column())
            for i0 in range(0, TM, ROWS):
                for j0 in range(0, TN, COLS):
                    bits = uint64(0)
                    for i in range(ROWS):
                        row = uint32(tile.i0 + row_of(thread.ty, i0 + i))
                        if shared:
                            for j in range(j0, min(j0 + COLS, TN), ALIKE):
                                share = uint32(col0 // uint32(COUNTER_COLUMNS) + j // ALIKE)
                                for s in range(SHARES):
                                    place = column_of(thread.tx, s)
                                    counter = uint32(share * uint32(WORD_COLUMNS) + place)
                                    w = _words(counter, row, head)
                                    n = i * COLS + j - j0 + s
                                    bits |= _bit(w[0] < threshold, n)
                                    bits |= _bit(w[1] < threshold, n + SHARES)
                                    bits |= _bit(w[2] < threshold, n + 2 * SHARES)
                                    bits |= _bit(w[3] < threshold, n + 3 * SHARES)
                        else:
                            for j in range(j0, min(j0 + COLS, TN)):
                                kept = keeps(row, uint32(col0 + column_of(thread.tx, j)), head)
                                bits |= _bit(not kept, i * COLS + j - j0)
                    for i in range(ROWS):
                        for j in range(j0, min(j0 + COLS, TN)):
                            if (bits >> uint64(i * COLS + j - j0)) & uint64(1) != uint64(0):
                                e = (i0 + i) * EI + j * EJ
                                rP[e] = -rP[e]

    return drop


@cache
def make_kept(spec):
    """``kept(p, options)``: what an element of P marked by ``drop`` weighs."""
    return kept_if(spec.features.dropout)


@part
def kept_if(dropout):
    """The same; without ``dropout`` an element weighs what it is."""

    def kept(p, options):
        if dropout:
            p = float32(0.0) if p < float32(0.0) else p * options.inverse_keep
        return p

    return kept
