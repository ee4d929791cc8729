"""Parts of the backward pass for head dimensions above 128 on Hopper.

One consumer computes S, P and dV, and the other computes dP, dS and dK. S passes from the first to
the second through shared memory.
"""

from functools import cache

from fa_numba.device import cuda, float32, uint32
from fa_numba.intrinsics.mbarrier import arrive_mbarrier, mbarrier_tile
from fa_numba.intrinsics.shared import half_tile, index_tile, load4, shared_tile, store4
from fa_numba.parts.namespace import part
from fa_numba.parts.records import RowSlots, WideShared
from fa_numba.parts.wgmma.products import wait_for
from fa_numba.tiling.wgmma import GROUP


@part
def make_wide_shared_memory(spec):
    """Make ``wide_shared_memory()``, which returns the kernel's shared memory as a ``WideShared``
    record.
    """
    (NQ, _, NS), NK = spec.tile_halves, spec.column_halves
    AT_Q, AT_DO, AT_S, AT_L, AT_BARRIERS = spec.offsets
    NQS, NOS, NSS, NL = 2 * NQ, 2 * spec.of_values.tile_halves[0], 2 * NS, 4 * spec.Br
    (AT_WORDS, WORDS), (AT_B, NB), BARRIERS = spec.key_tile_words, spec.drawn_span, spec.barriers

    def wide_shared_memory():
        sK, sV = half_tile(0, NK), half_tile(NK, NK)
        sQ, sdO = half_tile(AT_Q, NQS), half_tile(AT_DO, NOS)
        sS, sL = shared_tile(AT_S, NSS), shared_tile(AT_L, NL)
        bars, words = mbarrier_tile(AT_BARRIERS, BARRIERS), index_tile(AT_WORDS, WORDS)
        slots = RowSlots(sQ, sdO, sL)
        return WideShared(sK, sV, slots, sS, index_tile(AT_B, NB), words, bars)

    return wide_shared_memory


@part
def make_start_column(spec):
    """Make ``start_column(rT)``, which sets the registers rT of dK (or dV) to 0."""
    RK = spec.column_registers

    def start_column(rT):
        for e in range(RK):
            rT[e] = float32(0.0)

    return start_column


@cache
def make_wait_column(spec):
    """Make ``wait_column(rT)``, which waits until the product for dK (or dV) is complete in the
    registers rT.

    One product that was begun later may still be running.
    """
    return wait_for(spec.column_registers, 1)


@part
def make_store_scores(spec):
    """Make ``store_scores(sS, at, rS)``, which stores this thread's part of ST in shared memory,
    for the other consumer warpgroup.

    ``rS: (TN, TM)`` are registers. The slot begins at element ``at`` of sS. The thread with the
    same position in the other consumer warpgroup reads the part.
    """
    RS = spec.TM * spec.TN

    def store_scores(sS, at, rS):
        thread = uint32(uint32(cuda.threadIdx.x) % uint32(GROUP))
        for e in range(0, RS, 4):
            place = uint32(at + 4 * thread + GROUP * e)
            store4(sS, place, rS[e], rS[e + 1], rS[e + 2], rS[e + 3])

    return store_scores


@part
def make_give_scores(spec):
    """Make ``give_scores(shared, at, stage, rS)``, which stores ST in slot number ``stage`` and
    marks the slot as full.

    The slot begins at element ``at`` of ``shared.sS``. ``make_store_scores`` explains ``rS``.
    """
    store_scores, full = make_store_scores(spec), spec.pipelines.s.full

    def give_scores(shared, at, stage, rS):
        store_scores(shared.sS, at, rS)
        arrive_mbarrier(shared.bars, uint32(full + stage))

    return give_scores


@part
def make_take_scores(spec):
    """Make ``take_scores(rS, sS, at)``, which reads the part of ST that the other consumer
    warpgroup has stored by ``store_scores``.

    The slot begins at element ``at`` of sS. ``rS: (TN, TM)`` are registers.
    """
    RS = spec.TM * spec.TN

    def take_scores(rS, sS, at):
        thread = uint32(uint32(cuda.threadIdx.x) % uint32(GROUP))
        for e in range(0, RS, 4):
            four = load4(sS, uint32(at + 4 * thread + GROUP * e))
            for n in range(4):
                rS[e + n] = four[n]

    return take_scores
