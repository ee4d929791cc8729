"""Which row tiles a block takes, where it stays on its multiprocessor for several."""

from functools import cache

from fa_numba.device import cuda, device_function, uint32

# Bytes of K and V that heads computed side by side may have, so that the L2 cache serves them.
TOGETHER = 16 << 20


@cache
def make_row_tiles(spec):
    """``row_tiles(shape)``: how many row tiles a Q of this shape has in all."""
    Br = spec.Br

    @device_function
    def row_tiles(shape):
        batch, heads, rows = uint32(shape[0]), uint32(shape[1]), uint32(shape[2])
        return uint32((rows + (Br - 1)) // uint32(Br) * heads * batch)

    return row_tiles


@cache
def make_row_tile(spec):
    """``row_tile(n, q_shape, k_shape)``: the first row, head and batch entry of row tile number n.

    Heads whose K and V lie in the L2 cache together go side by side, the row tiles with most
    columns first: a shorter tail.
    """
    Br, pair_bytes = spec.Br, 4 * spec.head_dim

    @device_function
    def row_tile(n, q_shape, k_shape):
        heads, rows, columns = uint32(q_shape[1]), uint32(q_shape[2]), uint32(k_shape[2])
        Tr = uint32((rows + (Br - 1)) // uint32(Br))
        all_heads = uint32(heads * uint32(q_shape[0]))
        fit = uint32(max(uint32(1), uint32(TOGETHER // pair_bytes) // columns))
        together = uint32(min(fit, all_heads))  # so that together Tr stays within 32 bits
        first = uint32(n // uint32(together * Tr) * together)
        place = uint32(n % uint32(together * Tr))
        here = uint32(min(together, uint32(all_heads - first)))
        i = uint32(Tr - 1 - place // here)
        head = uint32(first + place % here)
        return uint32(i * Br), uint32(head % heads), uint32(head // heads)

    return row_tile


@cache
def make_next_tile(spec):
    """``next_tile(taken)``: the number of this block's next row tile; ``taken`` counts those that
    blocks have taken beside their first.
    """

    @device_function
    def next_tile(taken):
        return uint32(uint32(cuda.gridDim.x) + uint32(cuda.atomic.add(taken, 0, 1)))

    return next_tile
