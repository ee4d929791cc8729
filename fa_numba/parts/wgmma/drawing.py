"""Dropout backward on Hopper's tensor cores: producers draw ahead of the products, and consumers
read a bit for each element.

A draw's eight elements lie with two neighbouring warps, of 16 columns of S each: a thread that
draws makes the bits of two others, and nothing is drawn twice.
"""

from fa_numba.device import cuda, device_function, uint32
from fa_numba.intrinsics.arithmetic import opaque
from fa_numba.intrinsics.halfwords import larger_halves
from fa_numba.intrinsics.mbarrier import arrive_mbarrier
from fa_numba.intrinsics.shared import index_tile
from fa_numba.parts.dropout import draw
from fa_numba.parts.namespace import part
from fa_numba.tiling.wgmma import GROUP


@device_function
def _kept(w0, w1, w2, w3, last, less):
    """Bits 0 to 3 of both halves: which halves of the four words are larger than that of ``last``,
    the largest that is dropped.
    """
    k0, k1 = larger_halves(w0, last, less), larger_halves(w1, last, less)
    k2, k3 = larger_halves(w2, last, less), larger_halves(w3, last, less)
    return uint32(uint32(k0 + uint32(2 * k1)) + uint32(uint32(4 * k2) + uint32(8 * k3)))


@part
def make_draw_tile(spec):
    """``draw_tile(shared, i0, j0, head, slot)``: bits of a tile of S to a slot. A warp draws for 32
    columns, a thread for those at its place in two consumer warps.

    A word has a bit for 16 rows of each of a consumer thread's two columns, a half word each: 1 is
    kept.
    """
    WORDS, THREADS, Bc = spec.drawn_words, spec.drawing_threads, spec.Bc
    full = spec.pipelines.q.full

    def draw_tile(shared, i0, j0, head, slot):
        own = uint32(cuda.threadIdx.x)
        if own < Bc:
            lane = uint32(own % uint32(32))
            last = uint32((uint32(head.options.threshold) >> uint32(16)) - 1)  # of what is dropped
            less = uint32(uint32((0x10000 - last) & 0xFFFF) * 0x10001)
            last = uint32(last * 0x10001)
            col = uint32(j0 + (own - lane) + lane // uint32(4))
            for word in range(WORDS):
                first, second = uint32(0), uint32(0)
                for n in range(4):
                    row = uint32(i0 + 2 * (lane % uint32(4)) + (64 * word + 16 * n))
                    even, odd = draw(row, col, head), draw(uint32(row + 1), col, head)
                    low = _kept(even[0], odd[0], even[2], odd[2], last, less)
                    high = _kept(even[1], odd[1], even[3], odd[3], last, less)
                    first = uint32(first + uint32(low << uint32(4 * n)))
                    second = uint32(second + uint32(high << uint32(4 * n)))
                # Anew: no register is kept for the place while others are needed.
                own = opaque(uint32(cuda.threadIdx.x))
                lane = uint32(own % uint32(32))
                place = uint32(slot.stage * (WORDS * THREADS) + 2 * (own - lane) + lane)
                shared.sB[uint32(place + THREADS * word)] = first
                shared.sB[uint32(place + (THREADS * word + 32))] = second
            arrive_mbarrier(shared.bars, uint32(full + slot.stage))

    return draw_tile


@part
def make_read_drawn(spec):
    """``read_drawn(rBits, stage)``: this consumer thread's bits of a slot."""
    WORDS, THREADS, (AT_B, NB) = spec.drawn_words, spec.drawing_threads, spec.drawn_span

    def read_drawn(rBits, stage):
        sB, own = index_tile(AT_B, NB), uint32(uint32(cuda.threadIdx.x) - GROUP)
        place = uint32(stage * (WORDS * THREADS) + own)
        for word in range(WORDS):
            rBits[word] = sB[uint32(place + THREADS * word)]

    return read_drawn


@part
def make_drop_drawn(spec):
    """``drop_drawn(rP, sB, stage)``: the dropped elements of PT change sign, as ``drop`` has it;
    where scores stay nothing: ``ds_of_columns`` does it then.
    """
    WORDS, THREADS, TM, shares = spec.drawn_words, spec.drawing_threads, spec.TM, spec.wide
    if spec.features.scores_stay:
        WORDS = 0

    def drop_drawn(rP, sB, stage):
        own = uint32(uint32(cuda.threadIdx.x) - GROUP)
        if shares:  # both consumers have the same columns
            own = uint32(own % uint32(THREADS))
        place = uint32(stage * (WORDS * THREADS) + own)
        for word in range(WORDS):
            bits = sB[uint32(place + THREADS * word)]
            for n in range(32):
                e = n // 16 * TM + 16 * word + n % 16
                if (bits >> uint32(n)) & uint32(1) == uint32(0):
                    rP[e] = -rP[e]

    return drop_drawn
