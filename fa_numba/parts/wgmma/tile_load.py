"""Tiles from global to shared memory: a box for each 64 columns, zeros beyond the array.

Where sequences end within an array, or heads share a tile, the array's map has other axes
(``TiledArray``). Of K and V in pages a box has rows of one page.
"""

from functools import cache

from fa_numba.device import WRAPS, cuda, device_function, uint32
from fa_numba.intrinsics.bulk_copy import load_box, load_box_5d
from fa_numba.intrinsics.mbarrier import expect_bytes
from fa_numba.parts.heads import make_key_end, make_query_end
from fa_numba.parts.pages import common_rows, pages_of_tile
from fa_numba.tiling.wgmma import GROUP_ROWS, PANEL

# By how many there are: the threads that bring K, and V.
COLUMN_PRODUCERS = {1: (32, 32), 2: (32, 64)}


@cache
def make_load_columns(spec):
    """``load_columns(sT, at, T, b, h, row0, bars, barrier)``: Kj or Vj."""
    return load_of(spec.Bc, spec.Bc, spec.panels)


@cache
def load_of(rows, box, panels):
    """The load of a tile with these ``rows``, by boxes of ``box`` rows."""
    size = 2 * PANEL * panels * rows

    @device_function
    def load(sT, at, T, b, h, row0, bars, barrier):
        expect_bytes(bars, barrier, size)
        for n in range(panels):
            for r in range(rows // box):
                place = uint32(at + PANEL * (n * rows + r * box))
                load_box(sT, place, T, b, h, uint32(row0 + r * box), PANEL * n, bars, barrier)

    return load


@cache
def make_load_queries(spec):
    """``load_queries(sQ, at, Q, b, h, row0, Nq, options, bars, barrier)``: Qi of a sequence of Nq
    rows, zeros beyond them. Where heads share a tile h counts groups of them.
    """
    ends, end = spec.query_ends, make_query_end(spec)
    return load_to_end(spec, spec.Br, GROUP_ROWS, ends, end, spec.tile_heads)


@cache
def make_load_keys(spec):
    """``load_keys(sT, at, T, b, h, row0, Nk, pages, options, bars, barrier)``: Kj or Vj of a
    sequence of Nk columns, zeros beyond them: P is 0 there, and 0 times what follows in memory need
    not be. ``pages`` is what ``look_up`` has found.
    """
    if spec.features.page_size:
        return _load_of_pages(spec)
    load = load_to_end(spec, spec.Bc, spec.Bc, spec.key_ends, make_key_end(spec))

    @device_function
    def load_keys(sT, at, T, b, h, row0, Nk, pages, options, bars, barrier):
        load(sT, at, T, b, h, row0, Nk, options, bars, barrier)

    return load_keys


def load_to_end(spec, rows, box, ends, sequence_end, heads=1):
    """``load(sT, at, T, b, h, row0, N, options, bars, barrier)``: a tile of a sequence of N rows,
    in one of the layouts of ``TiledArray``, zeros beyond them.
    """
    panels, place_of = spec.panels, make_place_of(ends, sequence_end)
    if not ends and heads == 1:
        plain = load_of(rows, box, panels)

        @device_function
        def load_all(sT, at, T, b, h, row0, N, options, bars, barrier):
            plain(sT, at, T, b, h, row0, bars, barrier)

        return load_all
    size, step, members = 2 * PANEL * panels * rows, box // heads, heads > 1

    @device_function
    def load(sT, at, T, b, h, row0, N, options, bars, barrier):
        expect_bytes(bars, barrier, size)
        outer, which, first = place_of(T, b, h, row0, N, options)
        for n in range(panels):
            for r in range(rows // box):
                place, row = uint32(at + PANEL * (n * rows + r * box)), uint32(first + r * step)
                if members:
                    load_box_5d(sT, place, T, outer, which, row, 0, PANEL * n, bars, barrier)
                else:
                    load_box(sT, place, T, outer, which, row, PANEL * n, bars, barrier)

    return load


def _load_of_pages(spec):
    """``load_keys`` where the table has the pages: a page's rows end where the sequence does, or
    with the page, and a box without valid rows is outside of the map.
    """
    page_size, Bc, panels = spec.features.page_size, spec.Bc, spec.panels
    size, box = 2 * PANEL * panels * Bc, common_rows(page_size, Bc)

    @device_function
    def load_keys(sT, at, T, b, h, row0, Nk, pages, options, bars, barrier):
        expect_bytes(bars, barrier, size)
        for n in range(Bc // box):
            row = uint32(row0 + n * box)
            first, rows = uint32(row % uint32(page_size)), uint32(0)
            if row < Nk:
                rows = uint32(min(uint32(page_size), uint32(first + Nk - row)))
            which = end_of(T, pages[n], h, rows)
            first = uint32(first + uint32(WRAPS) - rows)
            for panel in range(panels):
                place = uint32(at + PANEL * (panel * Bc + n * box))
                load_box(sT, place, T, uint32(WRAPS), which, first, PANEL * panel, bars, barrier)

    return load_keys


@cache
def make_look_up(spec):
    """``look_up(pages, b, row0, Nk, options)``: the pages that Kj and Vj have rows of, 0 past the
    sequence. Asked for before a place is empty, so that nobody waits for the table.
    """
    page_size, PAGES = spec.features.page_size, pages_of_tile(spec)
    rows = spec.Bc // PAGES

    @device_function
    def look_up(pages, b, row0, Nk, options):
        if page_size:
            for n in range(PAGES):
                row = uint32(row0 + n * rows)
                pages[n] = uint32(0)
                if row < Nk:
                    pages[n] = uint32(options.block_table[b, uint32(row // uint32(page_size))])

    return look_up


@cache
def make_produces_columns(spec):
    """``produces_columns()``: whether this thread brings K and V, or one of them."""
    keys, values = COLUMN_PRODUCERS[spec.column_producers]

    @device_function
    def produces_columns():
        thread = uint32(cuda.threadIdx.x)
        return thread == uint32(keys) or thread == uint32(values)

    return produces_columns


@cache
def make_brings_keys(spec):
    """``brings_keys()``: whether it brings K."""
    return _brings(*COLUMN_PRODUCERS[spec.column_producers])


@cache
def make_brings_values(spec):
    """``brings_values()``: the same of V."""
    return _brings(*reversed(COLUMN_PRODUCERS[spec.column_producers]))


def _brings(own, other):
    @device_function
    def brings():
        if own == other:
            return True
        return cuda.threadIdx.x == own

    return brings


@cache
def make_place_of(ends, sequence_end):
    """``place_of(T, b, h, row, N, options)``: the outer places of a row on T's map; if sequences
    end within T, of one of N rows that ends at ``sequence_end(b, N, options)``.
    """

    @device_function
    def place_of(T, b, h, row, N, options):
        if ends:
            outer, which = uint32(WRAPS), end_of(T, b, h, sequence_end(b, N, options))
            return outer, which, uint32(row + uint32(WRAPS) - N)
        return b, h, row

    return place_of


@device_function
def end_of(T, b, h, end):
    """The place on the axis of ends of T's map (``TiledArray``)."""
    of_batch, of_head, of_row = T.steps
    return uint32(b * uint32(of_batch) + h * uint32(of_head) + end * uint32(of_row))
