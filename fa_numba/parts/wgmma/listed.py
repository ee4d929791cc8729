"""Lists of a block mask on Hopper's tensor cores: who loads a tile reads them, and leaves a word in
the tile's slot for who multiplies, where registers and instructions are scarce.
"""

from fa_numba.device import cuda, float32, uint32
from fa_numba.parts.bias import make_block_state
from fa_numba.parts.namespace import part

STATE_AT = 30  # the bits of a word from there on are a state, those below what comes after


@part
def make_word(spec):
    """``word(following, tile)``: ``following``, what comes after a tile, and with ``reads_state``
    the state of its block, for a mask_mod. Made before the slot is empty: nobody waits for it.
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

    The result is what comes after the tile. With ``spec.reads_state``, ``rBS[0]`` gets the state of
    the tile's block, as ``read_bias_or_state`` would store it. All lanes of the warp must call the
    function together.
    """
    reads_state, below = spec.reads_state, (1 << STATE_AT) - 1

    def read(rBS, words, at):
        word = words[at]
        cuda.syncwarp()  # one thread says for its warp that the slot is read
        if reads_state:
            rBS[0] = float32(uint32(word >> uint32(STATE_AT)))
            word = uint32(word & uint32(below))
        return word

    return read
