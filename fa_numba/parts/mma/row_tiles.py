"""Row tiles of a backward kernel on tensor cores, in two stages in turn: Q, dO, L and D, or, of
FlashAttention-1, Q, dO, O and L.
"""

from fa_numba.device import uint32
from fa_numba.intrinsics.shared import half_tile, shared_tile
from fa_numba.parts.layout import make_row
from fa_numba.parts.mma.load import make_rows, make_values
from fa_numba.parts.namespace import part


def offsets(spec):
    """Where the row tiles begin in shared memory, in 16-bit elements, and their L, in floats."""
    (NQ, NK, NS), (NO, NV, _) = spec.tile_halves, spec.of_values.tile_halves
    at_q = NK + NV + spec.row_warps * NS
    return at_q, at_q // 2 + NQ + (spec.row_tiles - 1) * NO


@part
def make_backward_shared_memory(spec):
    """``backward_shared_memory()``: where Kj, Vj, dSij, Pij and, of FA-1, Di lie."""
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
    """``at(stage)``: (sQ, sdO, sL, sD) of a stage."""
    (AT_Q, AT_L), NQ, Br = offsets(spec), spec.tile_halves[0], spec.Br
    NO = spec.of_values.tile_halves[0]

    def row_tile(stage):
        at, at_L = uint32(AT_Q + stage * (NQ + NO)), uint32(AT_L + stage * (2 * Br))
        sQ, sdO = half_tile(at, NQ), half_tile(uint32(at + NQ), NO)
        return sQ, sdO, shared_tile(at_L, Br), shared_tile(uint32(at_L + Br), Br)

    return row_tile


@part
def make_load(spec):
    """``load(stage, Q, dO, L, D, row0, rows_end)`` starts copying them to a stage."""
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
    """``at_with_o(stage)``: (sQ, sdO, sO, sL) of a stage, for FA-1, which makes D anew."""
    (AT_Q, AT_L), NQ, Br = offsets(spec), spec.tile_halves[0], spec.Br
    NO = spec.of_values.tile_halves[0]

    def at_with_o(stage):
        at, at_L = uint32(AT_Q + stage * (NQ + 2 * NO)), uint32(AT_L + stage * Br)
        sQ, sdO = half_tile(at, NQ), half_tile(uint32(at + NQ), NO)
        return sQ, sdO, half_tile(uint32(at + (NQ + NO)), NO), shared_tile(at_L, Br)

    return at_with_o


@part
def make_load_with_o(spec):
    """``load_with_o(stage, Q, dO, O, L, row0, rows_end)``: FA-1's row tile, with O, to a stage."""
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
    """``take(rv, sT, thread)``: of these floats the ones of a thread's rows."""
    TM, row_of = spec.TM, make_row(spec)

    def take(rv, sT, thread):
        for i in range(TM):
            rv[i] = sT[row_of(thread.ty, i)]

    return take
