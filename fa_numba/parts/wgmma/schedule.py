"""Which row tiles a block takes, where it stays on its multiprocessor for several."""

from functools import cache

from fa_numba.device import device_function, uint32

# Bytes of K and V that heads computed side by side may have, so that the L2 cache serves them.
TOGETHER = 16 << 20


@cache
def make_row_tiles(spec):
    """``row_tiles(rows, heads, batch)``: how many row tiles all heads have."""
    Br = spec.Br

    @device_function
    def row_tiles(rows, heads, batch):
        return uint32((rows + (Br - 1)) // uint32(Br) * heads * batch)

    return row_tiles


@cache
def make_row_tile(spec):
    """``row_tile(n, rows, columns, heads, batch)``: where row tile number n begins, its head and
    batch entry.

    Heads whose K and V lie in the L2 cache together go side by side, the row tiles with most
    columns first: a shorter tail.
    """
    Br, pair_bytes = spec.Br, 4 * spec.head_dim

    @device_function
    def row_tile(n, rows, columns, heads, batch):
        Tr = uint32((rows + (Br - 1)) // uint32(Br))
        together = uint32(max(uint32(1), uint32(TOGETHER // pair_bytes) // columns))
        first = uint32(n // uint32(together * Tr) * together)
        place = uint32(n % uint32(together * Tr))
        here = uint32(min(together, uint32(heads * batch - first)))
        i = uint32(Tr - 1 - place // here)
        head = uint32(first + place % here)
        return uint32(i * Br), uint32(head % heads), uint32(head // heads)

    return row_tile
