"""Rows of K and V that are stored in pages of a K/V cache.

A block table lists the pages of each sequence in order. A tile can contain rows of several pages,
and a page can contain rows of several tiles. Tiles and pages begin at multiples of 16 rows.
Therefore each run of ``common_rows`` rows of a tile is in one page.

Reads of the block table are shared in two ways. If several lanes of a warp copy rows of the same
run, one lane reads the page number and passes it to the other lanes. If the next rows of the warp
are in the same page, the warp does not read the page number again.
"""

from math import gcd

from fa_numba.device import cuda, int32, uint32
from fa_numba.parts.lanes import FULL_WARP
from fa_numba.parts.namespace import part


def common_rows(page_size, Bc):
    """Return the length of the longest runs of rows that are always in one page and one tile.

    Runs begin at multiples of this length. It is the greatest common divisor of ``page_size``, the
    rows of a page, and ``Bc``, the rows of a tile.
    """
    return gcd(page_size, Bc)


def pages_of_tile(spec):
    """Return how many times the loader of a column tile looks up a page in the block table.

    The loader does this once for each run of ``common_rows`` rows. Several runs can be in one page.
    Without pages the result is 1, because the page numbers are stored in a register array, whose
    smallest size is 1.
    """
    page_size = spec.features.page_size
    return spec.Bc // common_rows(page_size, spec.Bc) if page_size else 1


def turns_in_a_page(page_size, rows, threads, width):
    """Return how many consecutive turns of a copy use the same page number.

    The ``threads`` threads of a thread block copy a tile of K or V in several turns. ``width``
    neighbouring threads copy from one row, so that a turn copies threads / width rows.

    The tile has ``rows`` rows, and a page has ``page_size`` rows. Let g be the greatest common
    divisor of both numbers (``common_rows``). The tile consists of runs of g rows, and all rows of
    a run are in one page. If a run takes n complete turns, the result is n: the page number is read
    once for n turns. Otherwise the result is 1: the page number is read again in each turn.
    """
    down, rest = divmod(threads, width)
    common = common_rows(page_size, rows)
    return common // down if rest == 0 and common % down == 0 else 1


@part
def make_page_of(page_size):
    """Make ``page_of(table, row, reads, first)``, which returns the number of the page that
    contains row ``row`` of a sequence.

    ``table`` is the row of the block table for the sequence. Lanes whose rows are in one page form
    a group, and ``first`` is the number of one lane of the group. Only this lane reads the table,
    if its argument ``reads`` is true. A shuffle passes the page number to the other lanes of the
    group. If ``reads`` is false, the result is 0. All lanes of the warp must call the function
    together.
    """

    def page_of(table, row, reads, first):
        page = int32(0)
        if reads and uint32(cuda.threadIdx.x) % uint32(32) == uint32(first):
            page = int32(table[uint32(uint32(row) // uint32(page_size))])
        return uint32(cuda.shfl_sync(FULL_WARP, page, first))

    return page_of
