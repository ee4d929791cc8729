"""Lists of a block mask on Hopper's tensor cores: who loads a tile reads them, and leaves a word in
the tile's slot for who multiplies, where registers and instructions are scarce.
"""

from fa_numba.device import cuda, float32, uint32
from fa_numba.parts.bias import make_block_state
from fa_numba.parts.namespace import part
from fa_numba.parts.visits import make_row_sees_more

STATE_AT = 30  # the bits of a word from there on are a state, those below a row or column
MORE_AT = 29  # and of a row's this one, whether it sees another column tile


@part
def make_word(spec):
    """``word(following, tile)``: what comes after a tile and, if a mask_mod asks for it, the state
    of the tile's block; read before the slot is empty, so that nobody waits for it.
    """
    reads_state, block_state = spec.reads_state, make_block_state(spec)

    def word(following, tile):
        if reads_state:
            return uint32(following | block_state(tile) << uint32(STATE_AT))
        return following

    return word


@part
def make_read_word(spec):
    """``read(rB, words, at)``: what comes after; in rB the state, as ``read_bias`` has it."""
    reads_state, below = spec.reads_state, (1 << STATE_AT) - 1

    def read(rB, words, at):
        word = words[at]
        cuda.syncwarp()  # one thread says for its warp that the slot is read
        if reads_state:
            rB[0] = float32(uint32(word >> uint32(STATE_AT)))
            word = uint32(word & uint32(below))
        return word

    return read


@part
def make_row_word(spec):
    """``word(ahead, tile)``: the same of what ``row_ahead`` has read of FA-1's row tile."""
    word, sees_more = make_word(spec), make_row_sees_more(spec)

    def row_word(ahead, tile):
        following = ahead[0]
        if sees_more(ahead, tile.i0, tile.j0, tile.head):
            following = uint32(following | uint32(1 << MORE_AT))
        return word(following, tile)

    return row_word


@part
def make_read_row_word(spec):
    """``read(rB, words, at)``: the row tile after one, and whether this one sees a column tile
    after the pass's; in rB the state.
    """
    read = make_read_word(spec)

    def read_row(rB, words, at):
        word = read(rB, words, at)
        i_next = uint32(word & uint32((1 << MORE_AT) - 1))
        return i_next, word >= uint32(1 << MORE_AT)

    return read_row
