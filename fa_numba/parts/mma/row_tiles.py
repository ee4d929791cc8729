"""The row tiles that the backward kernels on tensor cores load, alternately, to two stages of
shared memory.

A row tile consists of Q, dO, L and D in FlashAttention-2. It consists of Q, dO, O and L in
FlashAttention-1.
"""

from fa_numba.device import uint32
from fa_numba.intrinsics.shared import half_tile, shared_tile
from fa_numba.parts.layout import make_row
from fa_numba.parts.mma.load import make_rows, make_values
from fa_numba.parts.namespace import part


def offsets(spec):
    """Return the positions in shared memory at which the row tiles begin, and at which their L
    begins.

    The first position counts 16-bit elements. The second position counts floats.
    """
    (NQ, NK, NS), (NO, NV, _) = spec.tile_halves, spec.of_values.tile_halves
    at_q = NK + NV + spec.row_warps * NS
    return at_q, at_q // 2 + NQ + (spec.row_tiles - 1) * NO


@part
def make_backward_shared_memory(spec):
    """Make ``backward_shared_memory()``, which returns sK, sV, sdS, sP and sD in shared memory.

    The shapes are ``sK: (Bc, d)``, ``sV: (Bc, d_v)``, ``sdS: (Bc, Br)``, ``sP: (Bc, Br)`` and
    ``sD: (Br,)``. A row of sdS and of sP is a column of S. If ``row_warps`` is 1, no P is stored,
    and sP is the same memory as sdS. sD holds D of a row tile, and only FlashAttention-1 uses it.
    """
    (_, NK, NS), NV = spec.tile_halves, spec.of_values.tile_halves[1]
    AT_V, AT_DS, AT_P = NK, NK + NV, NK + NV + (spec.row_warps - 1) * NS
    Br, AT_D = spec.Br, offsets(spec)[1] + 2 * spec.Br

    def backward_shared_memory():
        sK = half_tile(0, NK)
        sV = half_tile(AT_V, NV)
        sdS = half_tile(AT_DS, NS)
        sP = half_tile(AT_P, NS)
        return sK, sV, sdS, sP, shared_tile(AT_D, Br)

    return backward_shared_memory


@part
def make_at(spec):
    """Make ``at(stage)``, which returns sQ, sdO, sL and sD of a stage.

    The shapes are ``sQ: (Br, d)``, ``sdO: (Br, d_v)``, ``sL: (Br,)`` and ``sD: (Br,)``.
    """
    (AT_Q, AT_L), NQ, Br = offsets(spec), spec.tile_halves[0], spec.Br
    NO = spec.of_values.tile_halves[0]

    def row_tile(stage):
        at, at_L = uint32(AT_Q + stage * (NQ + NO)), uint32(AT_L + stage * (2 * Br))
        sQ, sdO = half_tile(at, NQ), half_tile(uint32(at + NQ), NO)
        return sQ, sdO, shared_tile(at_L, Br), shared_tile(uint32(at_L + Br), Br)

    return row_tile


@part
def make_load(spec):
    """Make ``load(stage, Q, dO, L, D, row0, rows_end)``, which starts to copy a row tile to a stage
    of shared memory.

    The arguments Q, dO, L and D are the arrays of one head. The row tile begins at row ``row0``.
    Rows at or past ``rows_end`` become 0.
    """
    row_tile, load_values = make_at(spec), make_values(spec)
    load_rows, load_dout = make_rows(spec), make_rows(spec.of_values)

    def load(stage, Q, dO, L, D, row0, rows_end):
        sQ, sdO, sL, sD = row_tile(stage)
        load_rows(sQ, Q, row0, rows_end)
        load_dout(sdO, dO, row0, rows_end)
        load_values(sL, L, row0, rows_end)
        load_values(sD, D, row0, rows_end)

    return load


@part
def make_at_with_o(spec):
    """Make ``at_with_o(stage)``, which returns sQ, sdO, sO and sL of a stage.

    The shapes are ``sQ: (Br, d)``, ``sdO: (Br, d_v)``, ``sO: (Br, d_v)`` and ``sL: (Br,)``.
    FlashAttention-1 uses it, because it computes D from dO and O in every pass.
    """
    (AT_Q, AT_L), NQ, Br = offsets(spec), spec.tile_halves[0], spec.Br
    NO = spec.of_values.tile_halves[0]

    def at_with_o(stage):
        at, at_L = uint32(AT_Q + stage * (NQ + 2 * NO)), uint32(AT_L + stage * Br)
        sQ, sdO = half_tile(at, NQ), half_tile(uint32(at + NQ), NO)
        return sQ, sdO, half_tile(uint32(at + (NQ + NO)), NO), shared_tile(at_L, Br)

    return at_with_o


@part
def make_load_with_o(spec):
    """Make ``load_with_o(stage, Q, dO, O, L, row0, rows_end)``, which starts to copy a row tile of
    FA-1 to a stage of shared memory.

    The arguments Q, dO, O and L are the arrays of one head. The row tile begins at row ``row0``.
    Rows at or past ``rows_end`` become 0.
    """
    row_tile, load_values = make_at_with_o(spec), make_values(spec)
    load_rows, load_dout = make_rows(spec), make_rows(spec.of_values)

    def load_with_o(stage, Q, dO, O, L, row0, rows_end):
        sQ, sdO, sO, sL = row_tile(stage)
        load_rows(sQ, Q, row0, rows_end)
        load_dout(sdO, dO, row0, rows_end)
        load_dout(sO, O, row0, rows_end)
        load_values(sL, L, row0, rows_end)

    return load_with_o


@part
def make_take(spec):
    """Make ``take(rv, sT, thread)``, which reads one float for each of a thread's rows.

    ``rv: (TM,)`` are registers, and ``sT: (Br,)`` is L or D of a row tile in shared memory.
    """
    TM, row_of = spec.TM, make_row(spec)

    def take(rv, sT, thread):
        for i in range(TM):
            rv[i] = sT[row_of(thread.ty, i)]

    return take
