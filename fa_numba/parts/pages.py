"""Rows of K and V in pages: a block table says which page has the next rows of a sequence.

Tiles and pages begin at multiples of 16 rows, so the rows that a tile and a page have in common
come in runs of ``common_rows`` or more. A warp looks a page up once for all of its lanes in a run,
and, where its next turns stay in the run, for these.
"""

from math import gcd

from fa_numba.device import cuda, int32, uint32
from fa_numba.parts.lanes import FULL_WARP
from fa_numba.parts.namespace import part


def common_rows(page_size, Bc):
    """Rows at multiples of this many, as many of them, lie in one page and one tile."""
    return gcd(page_size, Bc)


def pages_of_tile(spec):
    """How many pages at most a tile of K and V has rows of; one where they are in one piece."""
    page_size = spec.features.page_size
    return spec.Bc // common_rows(page_size, spec.Bc) if page_size else 1


def turns_in_a_page(page_size, rows, threads, width):
    """Turns in which a thread's rows of a tile lie in one page: one look-up serves them.

    In a turn the threads take ``width`` neighbouring pieces of each row.
    """
    down, rest = divmod(threads, width)
    common = common_rows(page_size, rows)
    return common // down if rest == 0 and common % down == 0 else 1


@part
def make_page_of(page_size):
    """``page_of(table, row, reads, first)``: the page of a sequence's ``row``, read from its row of
    the table by lane ``first`` of the warp, if that one ``reads``, for all lanes that name it.
    """

    def page_of(table, row, reads, first):
        page = int32(0)
        if reads and uint32(cuda.threadIdx.x) % uint32(32) == uint32(first):
            page = int32(table[uint32(uint32(row) // uint32(page_size))])
        return uint32(cuda.shfl_sync(FULL_WARP, page, first))

    return page_of
