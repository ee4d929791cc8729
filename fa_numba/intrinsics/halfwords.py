"""Operations on the two 16-bit halves of 32-bit words, as unsigned numbers, and on their bytes.

The PTX instructions for halves are ``max.u16x2``, ``add.u16x2`` and ``min.u16x2``, which need
sm_90.
"""

import numpy as np
from numba.core import types
from numba.cuda.extending import intrinsic

from fa_numba.intrinsics._build import emulated_by, of_registers

_TEXT = (
    "{.reg .b32 t, one; mov.b32 one, 0x10001; max.u16x2 t, $1, $2; add.u16x2 t, t, $3; "
    "min.u16x2 $0, t, one;}"
)


def _larger_halves(words, than, less):
    """Compare the 16-bit halves of ``words`` and ``than`` on the emulator, as ``larger_halves``
    does on a GPU. The arguments are integers, or arrays with one integer for each lane.
    """

    def of(shift):
        word, other, more = (np.asarray(x) >> shift & 0xFFFF for x in (words, than, less))
        return np.minimum(np.maximum(word, other) + more & 0xFFFF, 1)

    made = of(0) | of(16) << 16
    return made if made.ndim else int(made)


@emulated_by(_larger_halves)
@intrinsic
def larger_halves(typingctx, words, than, less):
    """Compare the 16-bit halves of ``words`` and ``than``, and return the results in a word.

    A half of the result is 1 if this half of ``words`` is larger than this half of ``than``.
    Otherwise it is 0. All halves are unsigned numbers.

    The comparison is computed as min(max(words, than) + less, 1) in each half. The caller must pass
    ``less``, which contains in each half the negative of ``than``, modulo 2^16. It is an argument
    so that the caller computes it once for many ``words``.
    """
    return of_registers(_TEXT, types.uint32, words, than, less)


def _permute_bytes(a, b, selector):
    """Return words of four of the bytes of a and b on the emulator, as ``permute_bytes`` does on a
    GPU. The arguments are integers, or arrays with one integer for each lane.
    """
    both = np.asarray(a, np.int64) | np.asarray(b, np.int64) << 32
    made = np.zeros_like(both)
    for n in range(4):
        byte = both >> 8 * (np.asarray(selector, np.int64) >> 4 * n & 7) & 0xFF
        made = made | byte << 8 * n
    return made if made.ndim else int(made)


@emulated_by(_permute_bytes)
@intrinsic
def permute_bytes(typingctx, a, b, selector):
    """Return a word of four of the bytes of ``a`` and ``b``: ``prmt.b32``.

    Byte n of the result is the byte whose number is in bits 4 n to 4 n + 2 of ``selector``. The
    next bit must be 0. Bytes 0 to 3 are those of ``a``, and bytes 4 to 7 are those of ``b``. All
    arguments are uint32.
    """
    return of_registers("prmt.b32 $0, $1, $2, $3;", types.uint32, a, b, selector)
