"""Dropout of P, with random numbers that depend only on the seed and the position of an element.

The backward pass draws the same numbers again, so that no mask is stored. One call of the random
number generator is called a draw. It gives the random bits of eight elements of P, which are in two
rows and four columns. The two rows are APART = 8 rows apart. The four columns are 8 columns apart,
such as the columns 0, 8, 16 and 24.

P is never negative. A dropped element of P therefore gets a negative sign in its register. From
then on the register contains both facts: the value of P, and whether the element is dropped.
``kept`` converts such a marked element to the weight that the product with V needs.
"""

from functools import cache

from fa_numba import masks
from fa_numba.device import device_function, float32, uint32, uint64
from fa_numba.parts.layout import make_column, make_row, make_warp_column
from fa_numba.parts.namespace import part

APART, DRAW_ROWS, DRAW_COLUMNS = masks.APART, masks.DRAW_ROWS, masks.DRAW_COLUMNS
# Up to this number of elements per thread, each draw has code of its own. FA-2's forward pass then
# takes 0.57 to 0.82 of the time on an H200. With more elements, registers would spill.
UNROLLED = 64

_philox = device_function(masks.make_philox(uint32, uint64))


@device_function
def draw(row, col, head):
    """Return the four random 32-bit words of the draw that includes element (row, col) of P.

    A draw is for eight elements, with 16 random bits for each element. The words depend on the
    positions of the elements, the batch entry, the query head, the seed and the offset.
    """
    across = uint32(uint32(col // uint32(APART * DRAW_COLUMNS)) * uint32(APART))
    down = uint32(uint32(row // uint32(APART * DRAW_ROWS)) * uint32(APART))
    across = uint32(across + col % uint32(APART))
    down = uint32(down + row % uint32(APART))
    place = uint32((uint32(head.b) << uint32(16)) + uint32(head.h))
    key0, key1 = uint32(head.options.seed_low), uint32(head.options.seed_high)
    return _philox(across, down, place, uint32(head.options.offset), key0, key1)


@device_function
def _lower(word):
    """Return ``word`` shifted to the left by 16 bits, so that its lower half becomes the upper half
    of the result.
    """
    return uint32(word << uint32(16))


@device_function
def _keeps(words, row, col, threshold):
    """Return whether dropout keeps element (row, col).

    ``words`` are the four random words that ``draw`` returns for the element. They contain 16
    random bits of the element, which are compared with ``threshold``.
    """
    second = uint32(row // uint32(APART)) % uint32(DRAW_ROWS) != uint32(0)
    n = uint32(col // uint32(APART)) % uint32(DRAW_COLUMNS)
    first, last = words[0], words[1]
    if second:
        first, last = words[2], words[3]
    word = last if n >= uint32(2) else first
    return (word if n % uint32(2) != uint32(0) else _lower(word)) >= threshold


@device_function
def keeps(row, col, head):
    """Return whether dropout keeps element (row, col) of a head. Standard attention calls it."""
    return _keeps(draw(row, col, head), row, col, uint32(head.options.threshold))


@part
def _make_dropped(rows, columns, column_step):
    """Make ``dropped(words, row, col, threshold)``, which returns a bit for each element of a draw
    that this thread holds: 1 if dropout drops the element.

    A draw is for eight elements, of which a thread holds ``rows`` x ``columns`` elements. The first
    one is at (row, col). Its rows are APART rows apart, and its columns are ``column_step`` columns
    apart. ``words`` are the four random words of the draw, which are compared with ``threshold``.
    Bit n of the result belongs to element number n, counted row by row.
    """
    # The thread's position decides these bits of a row and a column, and the loop the other bits.
    ROW = APART * DRAW_ROWS - 1 - APART * (rows - 1)
    COL = APART * DRAW_COLUMNS - 1 - column_step * (columns - 1)

    def dropped(words, row, col, threshold):
        bits, row, col = uint32(0), uint32(row & uint32(ROW)), uint32(col & uint32(COL))
        for n in range(rows * columns):
            r, c = uint32(row + n // columns * APART), uint32(col + n % columns * column_step)
            lost = uint32(not _keeps(words, r, c, threshold))
            bits = uint32(bits | uint32(lost << uint32(n)))
        return bits

    return dropped


def _shared(spec):
    """Return how many rows and how many columns of one draw a thread holds in its registers.

    A draw gives the random bits of eight elements of P, in 2 rows and 4 columns. If a thread holds
    all eight elements, the result is (2, 4). If several threads share the elements of a draw, each
    of them draws the same numbers, and the result is smaller.
    """
    RW, CW, step = spec.row_width, spec.column_width, spec.column_step
    rows = DRAW_ROWS if spec.row_step == APART and spec.TM % (2 * RW) == 0 else 1
    columns = APART * DRAW_COLUMNS
    while columns > step and spec.TN % (columns // step * CW):
        columns //= 2
    return rows, max(1, columns // step)


@part
def make_drop(spec):
    """Make ``drop(rP, tile)``, which makes the dropped elements of P negative.

    Without dropout, the function does nothing.
    """
    dropout, begin = spec.features.dropout, _make_drop_from(spec, 0)

    def drop(rP, tile):
        if dropout:
            begin(rP, tile)

    return drop


@part
def _make_drop_from(spec, first):
    """Make ``drop_from(rP, tile)``, which makes the dropped elements of P negative.

    A draw gives the random bits of eight elements of P. A thread needs several draws for its
    elements of a tile. The draws of the thread have the numbers 0, 1, 2 and so on. ``drop_from``
    handles draw number ``first`` and all later draws of the thread.

    ``drop_from`` makes only a few of these draws itself. If the thread has at most UNROLLED
    elements, it makes one draw. If the thread has more elements, it makes up to eight draws. If
    draws are left, it calls another ``drop_from``, whose ``first`` is the number of the next draw.

    ``drop_from`` first collects the bits of its own draws in one integer, and then changes the
    registers of P. The loop over draws thus contains no registers of P, and the compiler need not
    unroll it.
    """
    (EI, EJ), RW, CW = spec.element_steps, spec.row_width, spec.column_width
    row_of, column_of, warp_column = make_row(spec), make_column(spec), make_warp_column(spec)
    DR, DC = _shared(spec)
    ACROSS, COUNT = spec.TN // DC, spec.TM // DR * (spec.TN // DC)
    dropped = _make_dropped(DR, DC, spec.column_step)
    LAST = min(first + (1 if spec.TM * spec.TN <= UNROLLED else 8), COUNT)
    rest = _make_drop_from(spec, LAST) if LAST < COUNT else _nothing

    def drop_from(rP, tile):
        threshold, thread = uint32(tile.head.options.threshold), tile.thread
        col0, bits = uint32(tile.j0 + warp_column()), uint64(0)
        for s in range(first, LAST):
            r, c = s // ACROSS, s % ACROSS
            i, j = r // RW * (RW * DR) + r % RW, c // CW * (CW * DC) + c % CW
            row = uint32(tile.i0 + row_of(thread.ty, i))
            col = uint32(col0 + column_of(thread.tx, j))
            found = dropped(draw(row, col, tile.head), row, col, threshold)
            bits |= uint64(found) << uint64(8 * (s - first))
        for s in range(first, LAST):
            r, c = s // ACROSS, s % ACROSS
            i, j = r // RW * (RW * DR) + r % RW, c // CW * (CW * DC) + c % CW
            for n in range(DR * DC):
                if (bits >> uint64(8 * (s - first) + n)) & uint64(1) != uint64(0):
                    e = (i + n // DC * RW) * EI + (j + n % DC * CW) * EJ
                    rP[e] = -rP[e]
        rest(rP, tile)

    return drop_from


@device_function
def _nothing(rP, tile):
    pass


@cache
def make_kept(spec):
    """Make ``kept(p, options)``, which returns the weight of an element of P in the product with V.

    ``drop`` has made p negative if the element is dropped.

    | case | weight |
    |---|---|
    | without dropout | p |
    | p is negative: the element is dropped | 0 |
    | otherwise | p / (1 - dropout_p) |
    """
    return kept_if(spec.features.dropout)


@part
def make_scale_kept(spec):
    """Make ``scale_kept(rO, options)``, which multiplies O by 1 / (1 - dropout_p).

    A kernel calls the function if it has summed the kept elements of P times V without this factor.
    Without dropout, the function does nothing.
    """
    RO, dropout = spec.TM * spec.DN * 4, spec.features.dropout

    def scale_kept(rO, options):
        if dropout:
            for e in range(RO):
                rO[e] *= options.inverse_keep

    return scale_kept


@part
def kept_if(dropout):
    """Make the function ``kept(p, options)`` that ``make_kept`` describes.

    ``dropout`` says whether the call has dropout.
    """

    def kept(p, options):
        if dropout:
            p = float32(0.0) if p < float32(0.0) else p * options.inverse_keep
        return p

    return kept
