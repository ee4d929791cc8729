"""Dropout in FA-2's backward pass on Hopper's tensor cores.

The producers draw random numbers before the consumers need them. For each element of S, they store
one bit in shared memory: 1 means that dropout keeps the element. The consumers read these bits.

One draw of random numbers serves eight elements of S. Each consumer warp computes 16 columns of S,
and the eight elements belong to two neighbouring consumer warps. A producer thread therefore
computes the bits of two consumer threads. No draw is computed twice.
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
    """Compare eight random 16-bit numbers with a threshold, and return eight bits: 1 if the number
    is larger than the threshold.

    The random numbers are the lower and upper halves of the words w0 to w3. Bits 0 to 3 of the
    result are for the lower halves of w0 to w3. Bits 16 to 19 are for the upper halves. ``last``
    contains the threshold in both halves: the largest random number that is dropped. ``less``
    contains -threshold modulo 2^16 in both halves, as ``larger_halves`` needs it.
    """
    k0, k1 = larger_halves(w0, last, less), larger_halves(w1, last, less)
    k2, k3 = larger_halves(w2, last, less), larger_halves(w3, last, less)
    return uint32(uint32(k0 + uint32(2 * k1)) + uint32(uint32(4 * k2) + uint32(8 * k3)))


@part
def make_draw_tile(spec):
    """Make ``draw_tile(shared, i0, j0, head, slot)``, which draws the dropout bits of a tile of S
    and stores them in a slot of ``shared.sB``.

    The tile begins at (i0, j0) of S. A bit is 1 if dropout keeps the element. All threads of the
    producer warpgroup must call the function.

    A consumer thread holds two columns of the tile. Its bits are 32-bit words. Each word is for 16
    of its rows: the lower half for the first column, the upper half for the second column. Each
    producer thread computes the words of two consumer threads, because one draw gives bits for
    both. These two consumer threads have the same lane number and are in neighbouring warps.
    """
    WORDS, THREADS, Bc = spec.drawn_words, spec.drawing_threads, spec.Bc
    full = spec.pipelines.q.full

    def draw_tile(shared, i0, j0, head, slot):
        own = uint32(cuda.threadIdx.x)
        if own < Bc:
            lane = uint32(own % uint32(32))
            last = uint32((uint32(head.options.threshold) >> uint32(16)) - 1)  # is dropped
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
                # Compute them again, so that they take no register during the loop.
                own = opaque(uint32(cuda.threadIdx.x))
                lane = uint32(own % uint32(32))
                place = uint32(slot.stage * (WORDS * THREADS) + 2 * (own - lane) + lane)
                shared.sB[uint32(place + THREADS * word)] = first
                shared.sB[uint32(place + (THREADS * word + 32))] = second
            arrive_mbarrier(shared.bars, uint32(full + slot.stage))

    return draw_tile


@part
def make_read_drawn(spec):
    """Make ``read_drawn(rBits, stage)``, which reads the dropout bits of this consumer thread from
    shared memory into the registers rBits.

    The bits belong to the thread's elements of S: 1 means that dropout keeps the element. ``stage``
    is the number of the slot. ``rBits: (spec.drawn_words,)`` gets 32-bit words with the layout that
    ``make_draw_tile`` describes.
    """
    WORDS, THREADS, (AT_B, NB) = spec.drawn_words, spec.drawing_threads, spec.drawn_span

    def read_drawn(rBits, stage):
        sB, own = index_tile(AT_B, NB), uint32(uint32(cuda.threadIdx.x) - GROUP)
        place = uint32(stage * (WORDS * THREADS) + own)
        for word in range(WORDS):
            rBits[word] = sB[uint32(place + THREADS * word)]

    return read_drawn


@part
def make_drop_drawn(spec):
    """Make ``drop_drawn(rP, sB, stage)``, which makes the dropped elements of PT in rP negative.

    The dropout bits come from the slot number ``stage`` of sB. If the kernel keeps the scores until
    it computes dS (``features.scores_stay``), the function does nothing. ``ds_of_columns`` then
    computes P and drops the elements.
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
