"""Words about a block mask that the loader of a tile leaves for the consumers (Hopper).

Reading the lists of a block mask takes registers and instructions, which consumers lack. The thread
that loads a tile therefore reads the lists, and stores one word in the tile's slot.
"""

from fa_numba.device import cuda, float32, uint32
from fa_numba.parts.bias import make_block_state
from fa_numba.parts.namespace import part

STATE_AT = 30  # the first bit of the state in a word; the bits below say what comes after


@part
def make_word(spec):
    """Make ``word(following, tile)``, which returns the word for a tile's slot.

    ``following`` says what comes after the tile. With ``spec.reads_state``, the bits from STATE_AT
    on contain the state of the tile's block, for a ``mask_mod``. The loader computes the word
    before it waits for the slot, so that nobody waits for the lists.
    """
    reads_state, block_state = spec.reads_state, make_block_state(spec)

    def word(following, tile):
        if reads_state:
            return uint32(following | block_state(tile) << uint32(STATE_AT))
        return following

    return word


@part
def make_read_word(spec):
    """Make ``read(rBS, words, at)``, which reads the word that the loader of a tile has left in its
    slot.

    The word is ``words[at]``. The result is what comes after the tile. With ``spec.reads_state``,
    ``rBS[0]`` gets the state of the tile's block, as ``read_bias_or_state`` would store it. All
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
