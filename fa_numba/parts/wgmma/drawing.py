"""Dropout backward on Hopper's tensor cores: producers draw ahead of the products, and consumers
read a bit for each element.

A draw's eight elements lie with two neighbouring warps, of 16 columns of S each: a thread that
draws makes the bits of two others, and nothing is drawn twice.
"""

from fa_numba.device import cuda, device_function, uint32
from fa_numba.intrinsics.mbarrier import arrive_mbarrier
from fa_numba.parts.dropout import draw, keeps_of
from fa_numba.parts.namespace import part
from fa_numba.tiling.wgmma import GROUP


@device_function
def _dropped(even, odd, half, threshold):
    """Bits of two draws, 1 where an element is dropped: four each, of two rows, and of the first
    two columns or the last; row by row.
    """
    bits = uint32(0)
    for n in range(4):
        row, col = uint32(8 * (n // 2)), uint32(16 * half + 8 * (n % 2))
        if not keeps_of(even, row, col, threshold):
            bits = uint32(bits | uint32(1 << n))
        if not keeps_of(odd, row, col, threshold):
            bits = uint32(bits | uint32(16 << n))
    return bits


@part
def make_draw_tile(spec):
    """``draw_tile(shared, i0, j0, head, slot)``: bits of a tile of S to a slot. A warp draws for 32
    columns, a thread for those in its place of two consumer warps.
    """
    WORDS, THREADS, Bc = spec.drawn_words, spec.drawing_threads, spec.Bc
    full = spec.pipelines.q.full

    def draw_tile(shared, i0, j0, head, slot):
        own = uint32(cuda.threadIdx.x)
        if own < Bc:
            lane, threshold = uint32(own % uint32(32)), uint32(head.options.threshold)
            col = uint32(j0 + (own - lane) + lane // uint32(4))
            place = uint32(slot.stage * (WORDS * THREADS) + 2 * (own - lane) + lane)
            for word in range(WORDS):
                first, second = uint32(0), uint32(0)
                for n in range(4):
                    row = uint32(i0 + 2 * (lane % uint32(4)) + (64 * word + 16 * n))
                    even, odd = draw(row, col, head), draw(uint32(row + 1), col, head)
                    first |= uint32(_dropped(even, odd, 0, threshold) << uint32(8 * n))
                    second |= uint32(_dropped(even, odd, 1, threshold) << uint32(8 * n))
                shared.sB[uint32(place + THREADS * word)] = first
                shared.sB[uint32(place + (THREADS * word + 32))] = second
            arrive_mbarrier(shared.bars, uint32(full + slot.stage))

    return draw_tile


@part
def make_drop_drawn(spec):
    """``drop_drawn(rP, sB, stage)``: the dropped elements of PT change sign, as ``drop`` has it."""
    WORDS, THREADS, TM, shares = spec.drawn_words, spec.drawing_threads, spec.TM, spec.wide

    def drop_drawn(rP, sB, stage):
        own = uint32(uint32(cuda.threadIdx.x) - GROUP)
        if shares:  # both consumers have the same columns
            own = uint32(own % uint32(THREADS))
        place = uint32(stage * (WORDS * THREADS) + own)
        for word in range(WORDS):
            bits = sB[uint32(place + THREADS * word)]
            for n in range(32):
                i = 16 * word + n // 8 * 4 + n % 4 // 2 * 2 + n % 8 // 4
                e = n % 2 * TM + i
                if (bits >> uint32(n)) & uint32(1) != uint32(0):
                    rP[e] = -rP[e]

    return drop_drawn
