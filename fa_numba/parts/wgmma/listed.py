"""Notes about a block mask, which the thread that loads a tile stores in shared memory for the
consumers (Hopper).

The lists of a block mask say which tile is visited next. Reading these lists takes registers and
instructions, which consumers lack. The thread that loads a tile therefore reads the lists. For each
slot of the pipeline, it stores one 32-bit integer in shared memory, the slot's word. The word says
what comes after the tile in the slot, such as the first column of the next column tile.
"""

from fa_numba.device import cuda, float32, uint32
from fa_numba.parts.bias import make_block_state
from fa_numba.parts.namespace import part

STATE_AT = 30  # the first bit of the state in a word; the bits below say what comes after


@part
def make_word(spec):
    """Make ``word(following, tile)``, which returns the 32-bit integer that a loader stores in
    shared memory for the consumers of ``tile``.

    Normally the result is ``following``, an integer that says what comes after the tile, such as
    the first column of the next column tile. With ``spec.reads_state``, the highest two bits (from
    bit STATE_AT on) contain the state of the tile in the block mask: EMPTY, MIXED or FULL of
    ``mods.blocks``. The lower bits are ``following``.

    The function reads the state from global memory. The loader calls it before it waits for an
    empty slot. The consumers therefore do not wait for this read.
    """
    reads_state, block_state = spec.reads_state, make_block_state(spec)

    def word(following, tile):
        if reads_state:
            return uint32(following | block_state(tile) << uint32(STATE_AT))
        return following

    return word


@part
def make_read_word(spec):
    """Make ``read(rBS, words, at)``, by which a consumer reads the 32-bit integer that a loader has
    stored (``make_word``).

    The integer is ``words[at]``. The function returns its lower part, which says what comes after
    the tile. With ``spec.reads_state``, the function sets ``rBS[0]`` to the upper part: the state
    of the tile in the block mask. All lanes of the warp must call the function together.
    """
    reads_state, below = spec.reads_state, (1 << STATE_AT) - 1

    def read(rBS, words, at):
        word = words[at]
        cuda.syncwarp()  # all lanes have read, before one releases the slot
        if reads_state:
            rBS[0] = float32(uint32(word >> uint32(STATE_AT)))
            word = uint32(word & uint32(below))
        return word

    return read
