"""Parts of the kernel that computes only dQ, on Hopper.

Q is the outer loop: Qi and dOi are loaded to shared memory once. As in the forward pass, a consumer
warpgroup holds rows of S and dP in registers. From S and dP it computes dS in registers, which is
the left operand of the product dS K.
"""

from functools import cache

from fa_numba.device import cuda, device_function, float32, uint32
from fa_numba.dtypes import DTYPES
from fa_numba.intrinsics.arithmetic import LOG2E, NEG_INF, exp2
from fa_numba.intrinsics.matrix import CONVERSIONS
from fa_numba.intrinsics.mbarrier import mbarrier_tile
from fa_numba.intrinsics.shared import half_tile
from fa_numba.parts import softmax
from fa_numba.parts.grid import make_lengths
from fa_numba.parts.mods import make_p_and_ds
from fa_numba.parts.namespace import part
from fa_numba.parts.records import DqShared, Head
from fa_numba.parts.wgmma.gradients import cap_slope, make_ds_of_kept
from fa_numba.parts.wgmma.load import make_tile_of_queries, make_v
from fa_numba.parts.wgmma.products import make_begin_scores
from fa_numba.parts.wgmma.scheduler import sequence_tile_of
from fa_numba.tiling.wgmma import GROUP_ROWS


@part
def make_dq_shared_memory(spec):
    """Make ``dq_shared_memory()``, which returns the kernel's shared memory as a ``DqShared``
    record.
    """
    (NQ, NK, _), (NO, NV, _) = spec.tile_halves, spec.of_values.tile_halves
    NKS, NVS, AT_K = spec.stages * NK, spec.stages * NV, NQ + NO
    AT_V, AT_BARRIERS, BARRIERS = AT_K + NKS, spec.halves // 4, spec.barriers

    def dq_shared_memory():
        sQ, sdO = half_tile(0, NQ), half_tile(NQ, NO)
        sK, sV = half_tile(AT_K, NKS), half_tile(AT_V, NVS)
        return DqShared(sQ, sdO, sK, sV, mbarrier_tile(AT_BARRIERS, BARRIERS))

    return dq_shared_memory


@part
def make_dq_row_tile(spec):
    """Make ``dq_row_tile(Q, K, group, options)``, which returns the first row of this block's row
    tile, and the ``Head`` of the block.

    The first blocks of the grid have the last row tiles. With a causal mask, the last row tiles
    have the most columns. The blocks that start last therefore have the least work.
    """
    Br, packed, sequence_tile = spec.Br, spec.features.packed, sequence_tile_of(spec.Br)
    grouped, lengths = spec.grouped, make_lengths(spec)

    def dq_row_tile(Q, K, group, options):
        h, b = uint32(cuda.blockIdx.y), uint32(cuda.blockIdx.z)
        hk = h // uint32(group) if grouped else h
        if packed:
            i0, b = sequence_tile(uint32(cuda.gridDim.x - 1 - cuda.blockIdx.x), options)
        else:
            i0 = uint32((cuda.gridDim.x - 1 - cuda.blockIdx.x) * Br)
        Nq, Nk = lengths(Q.shape[2], K.shape[2], b, options)
        return i0, Head(b, h, hk, Nq, Nk, options)

    return dq_row_tile


@part
def make_load_do_once(spec):
    """Make ``load_do_once(sdO, dO, i0, head, bars, slot)``, which starts to load the row tile dOi,
    the only tile of dO in this kernel.

    Rows beyond the sequence become 0.
    """
    NO, full = spec.of_values.tile_halves[0], spec.pipelines.do.full
    load = make_tile_of_queries(spec.of_values, GROUP_ROWS)

    def load_do_once(sdO, dO, i0, head, bars, slot):
        load(sdO, uint32(slot.stage * NO), dO, i0, head, bars, full + slot.stage)

    return load_do_once


@cache
def make_load_v(spec):
    """Make ``load_v(sV, V, j0, head, pages, bars, slot)``, which starts to load the column tile Vj
    into an empty slot.

    ``load.make_v`` explains the arguments.
    """
    return make_v(spec.of_values)


@cache
def make_begin_dp(spec):
    """Make ``begin_dp(rdP, sdO, once, w, sV, stage)``, which begins the product dP = dO VT for
    warpgroup w's rows.

    ``once`` is the number of the only slot of dO. ``stage`` is the number of the slot of V.
    """
    return make_begin_scores(spec.of_values)


@part
def make_p_of_rows(spec):
    """Make ``p_of_rows(rS, scale, rL)``, which replaces the scores in rS by P = exp(S - L).

    ``rL`` holds L of each row. In two cases, the function does nothing, and ``ds_of_rows`` computes
    P: with a cap, and if the kernel keeps the scores until it computes dS
    (``features.scores_stay``).
    """
    if not (spec.features.softcap or spec.features.scores_stay):
        return softmax.make_from_lse(spec)

    def p_of_rows(rS, scale, rL):
        pass

    return p_of_rows


@part
def make_ds_of_rows(spec):
    """Make ``ds_of_rows(rdS, rdP, rS, rL, rD, tile)``, which computes dS = P o (dP - D) and rounds
    it to 16 bits in rdS.

    ``rdP`` holds dP. ``rL`` and ``rD`` hold L and D of each row. Normally rS holds P, and elements
    that ``drop`` has marked as dropped are negative. In two cases, rS holds the scores instead:
    with a cap, and if the kernel keeps the scores until it computes dS (``features.scores_stay``).
    The function then computes P and the derivatives of the scores, and multiplies dS by these
    derivatives. A word of rdS contains two neighbouring elements of dS.
    """
    if spec.features.scores_stay:
        return _make_ds_of_modified_rows(spec)
    TM, TN, softcap = spec.TM, spec.TN, spec.features.softcap
    pack, _ = CONVERSIONS[DTYPES[spec.dtype].matrix]
    ds_of_kept = make_ds_of_kept(spec)

    def ds_of_rows(rdS, rdP, rS, rL, rD, tile):
        options = tile.head.options
        if softcap:
            inverse = float32(1.0) / options.softcap
        for i in range(TM):
            if softcap:
                shift = float32(0.0) if rL[i] == NEG_INF else LOG2E * rL[i]
            for j in range(0, TN, 2):
                e = i * TN + j
                g0, g1 = rS[e], rS[e + 1]
                if softcap:
                    g0 = exp2(g0 - shift) * cap_slope(g0, inverse)
                    g1 = exp2(g1 - shift) * cap_slope(g1, inverse)
                ds0 = ds_of_kept(g0, rdP[e], rD[i], options)
                rdS[e // 2] = pack(ds0, ds_of_kept(g1, rdP[e + 1], rD[i], options))

    return ds_of_rows


@part
def _make_ds_of_modified_rows(spec):
    """Make the function that ``make_ds_of_rows`` describes, for kernels that keep the scores until
    they compute dS (``features.scores_stay``).
    """
    TN, COUNT = spec.TN, spec.TM * spec.TN
    pack, _ = CONVERSIONS[DTYPES[spec.dtype].matrix]

    @device_function
    def values_of(given, e):
        L, D = given[1][e // TN], given[2][e // TN]
        return float32(0.0) if L == NEG_INF else LOG2E * L, D, True

    p_and_ds = make_p_and_ds(spec, values_of, make_ds_of_kept(spec))

    def ds_of_rows(rdS, rdP, rS, rL, rD, tile):
        p_and_ds(rdP, rS, (rL, rL, rD), tile)  # no sums: the first rL is not used
        for e in range(0, COUNT, 2):
            rdS[e // 2] = pack(rdP[e], rdP[e + 1])

    return ds_of_rows
