"""Conversions between float32 and float8_e4m3fn, a float of 8 bits (sm_89).

A number has a sign, an exponent of 4 bits with the bias 7, and 3 fraction bits. The largest number
is 448, the smallest normal number is 2^-6, and the smallest positive number is 2^-9. The format has
no infinity. The bits 0x7F and 0xFF are NaN.

A word (uint32) contains four numbers, and the number with the lowest index is in the lowest byte.
"""

import numpy as np
from numba.core import types
from numba.cuda.extending import intrinsic

from fa_numba.intrinsics._build import FLOAT4_TUPLE, emulated_by, of_registers

LARGEST = 448.0
_NAN = 0x7F
_SMALLEST_NORMAL = np.float32(2.0**-6)
_WORD2_TUPLE = types.containers.UniTuple(types.uint32, 2)
_PACK = (
    "{.reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f32 l, $2, $1; "
    "cvt.rn.satfinite.e4m3x2.f32 h, $4, $3; mov.b32 $0, {l, h};}"
)
_WIDEN = (
    "{.reg .b16 l, h; mov.b32 {l, h}, $2; cvt.rn.f16x2.e4m3x2 $0, l; cvt.rn.f16x2.e4m3x2 $1, h;}"
)
_UNPACK = (
    "{.reg .b16 a, b, c, d; .reg .b32 l, h; mov.b32 {a, b}, $4; cvt.rn.f16x2.e4m3x2 l, a; "
    "cvt.rn.f16x2.e4m3x2 h, b; mov.b32 {a, b}, l; mov.b32 {c, d}, h; cvt.f32.f16 $0, a; "
    "cvt.f32.f16 $1, b; cvt.f32.f16 $2, c; cvt.f32.f16 $3, d;}"
)


def bits_e4m3(x):
    """Return the bits of the nearest e4m3 numbers of a float32 array, as int64.

    Ties are rounded to even. Numbers above 448 and infinity become 448, and NaN becomes 0x7F.
    """
    size = np.minimum(np.abs(x), np.float32(LARGEST))
    word = size.view(np.uint32).astype(np.int64)
    normal = (word + 0x7FFFF + (word >> 20 & 1) >> 20) - (127 - 7 << 3)
    with np.errstate(invalid="ignore"):
        small = np.rint(size * np.float32(2.0**9)).astype(np.int64)
        made = np.where(size < _SMALLEST_NORMAL, small, normal) | np.signbit(x) << 7
    return np.where(x != x, _NAN, made)


def _numbers():
    """Return the values of the 256 numbers of the format, as float32."""
    bits = np.arange(256)
    exponent, fraction = bits >> 3 & 15, bits & 7
    size = np.where(exponent, 8 + fraction, fraction) * 2.0 ** (np.maximum(exponent, 1) - 10)
    size[bits & 0x7F == _NAN] = np.nan
    return np.where(bits >> 7, -size, size).astype(np.float32)


NUMBERS_E4M3 = _numbers()
# The two values of each combination of 16 bits, shape (65536, 2): the lower byte's value is first.
PAIRS_E4M3 = NUMBERS_E4M3[np.arange(1 << 16, dtype="<u2").view(np.uint8).reshape(-1, 2)]


def _pack(x0, x1, x2, x3):
    """Return four numbers as four e4m3 in a word on the emulator, as ``pack_e4m3`` does on a GPU.

    The arguments are float32 numbers, or arrays with one number for each lane.
    """
    given = (x0, x1, x2, x3)
    word = sum(bits_e4m3(np.asarray(x, np.float32)) << 8 * n for n, x in enumerate(given))
    return word if any(isinstance(x, np.ndarray) for x in given) else int(word)


@emulated_by(_pack)
@intrinsic
def pack_e4m3(typingctx, x0, x1, x2, x3):
    """Return four float32 as four e4m3 in a uint32, rounded to nearest, ``x0`` in the lowest byte.

    Numbers above 448 and infinity become 448. NaN stays NaN. The instructions are two
    ``cvt.rn.satfinite.e4m3x2.f32``.
    """
    return of_registers(_PACK, types.float32, x0, x1, x2, x3, returns=types.uint32)


def _bytes_of(word):
    """Return the four bytes of a word, the lowest first."""
    word = np.asarray(word)
    return [(word >> 8 * n & 0xFF).astype(np.int64) for n in range(4)]


@emulated_by(lambda word: tuple(NUMBERS_E4M3[byte] for byte in _bytes_of(word)))
@intrinsic
def unpack_e4m3(typingctx, word):
    """Return the four e4m3 of a uint32 as float32, the lowest byte first. This is exact."""
    return of_registers(_UNPACK, types.uint32, word, returns=FLOAT4_TUPLE)


def _widen(word):
    """Return the four e4m3 of a word as two words of two float16, as ``widen_e4m3`` does on a GPU.

    ``word`` is an integer, or an array with one integer for each lane.
    """
    halves = [NUMBERS_E4M3[byte].astype(np.float16).view(np.uint16) for byte in _bytes_of(word)]
    # cvt returns the NaN 0x7FFF.
    a, b, c, d = (np.where(x & 0x7FFF > 0x7C00, 0x7FFF, x).astype(np.int64) for x in halves)
    low, high = a | b << 16, c | d << 16
    return (low, high) if isinstance(word, np.ndarray) else (int(low), int(high))


@emulated_by(_widen)
@intrinsic
def widen_e4m3(typingctx, word):
    """Return the four e4m3 of a uint32 as two words of two float16. This is exact.

    The first word contains the two lower bytes. The instructions are two ``cvt.rn.f16x2.e4m3x2``.
    """
    return of_registers(_WIDEN, types.uint32, word, returns=_WORD2_TUPLE)
