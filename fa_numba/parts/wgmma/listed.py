"""Words about a block mask, which the thread that loads a tile stores for the consumers (Hopper).

The lists of a block mask say which tile is visited next. Reading the lists takes registers and
instructions, which consumers lack. The thread that loads a tile therefore reads the lists. It
stores one 32-bit word for each tile, in the tile's slot. The word says what comes after the tile,
such as the next column tile.
"""

from fa_numba.device import cuda, float32, uint32
from fa_numba.parts.bias import make_block_state
from fa_numba.parts.namespace import part

STATE_AT = 30  # the first bit of the state in a word; the bits below say what comes after


@part
def make_word(spec):
    """Make ``word(following, tile)``, which returns the 32-bit word that a loader stores in the
    slot of ``tile`` for the consumers.

    The lower bits of the word are ``following``, an integer that says what comes after the tile,
    such as the first column of the next column tile. With ``spec.reads_state``, the bits from
    STATE_AT on are the state of the tile's block in the block mask, which a ``mask_mod`` needs.
    Otherwise the word is ``following``.

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
    """Make ``read(rBS, words, at)``, which reads the word that ``make_word`` describes from a slot.

    The word is ``words[at]``. The function returns the integer that says what comes after the tile.
    With ``spec.reads_state``, ``rBS[0]`` gets the state of the tile's block in the block mask. All
    lanes of the warp must call the function together.
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
