"""Float32 operations that are one instruction and have no exact Python expression."""

import math

import numpy as np
from numba import config
from numba.core import types
from numba.cuda.extending import intrinsic

from fa_numba import emulator
from fa_numba.emulator.compiling import compiled
from fa_numba.intrinsics._build import emulated_by, of_registers

NEG_INF = types.float32(-math.inf)
LOWEST = types.float32(np.finfo(np.float32).min)
ONE = types.float32(1.0)
LN2 = types.float32(math.log(2.0))
LOG2E = types.float32(math.log2(math.e))


@compiled()
def _powers(base, exponents):
    """Return base ** exponents by the C library's `pow`, which equals Python's power.

    The power is 0 below the exponent -126, and inf from the exponent 128 on. `base` is an argument
    because the compiler would replace the power of a constant base by another function.
    """
    made = np.zeros_like(exponents)
    for k in range(len(exponents)):
        if exponents[k] >= 128.0:
            made[k] = math.inf
        elif not exponents[k] < -126.0:  # also if it is NaN
            made[k] = base ** exponents[k]
    return made


def _power_of_two(x):
    if x >= 128.0:
        return math.inf
    return 0.0 if x < -126.0 else 2.0 ** float(x)  # ftz: denormal results are 0


def _exp2(x):
    emulator.current().instruction("exp")
    if isinstance(x, np.ndarray):
        each = x.reshape(-1)
        # Python's power. NumPy's power and Intel's library (SVML) differ from it in the last bit.
        if config.USING_SVML:
            powers = np.array(list(map(_power_of_two, each.tolist())), x.dtype)
        else:
            powers = _powers(2.0, each)
        return powers.reshape(x.shape)
    return np.float32(_power_of_two(x))


@emulated_by(_exp2)
@intrinsic
def exp2(typingctx, x):
    """Return 2**x by ``ex2.approx.ftz.f32``, with a relative error of at most 2**-22.5.

    Results below 2**-126 are 0 (PTX ISA, "ex2").
    """
    return of_registers("ex2.approx.ftz.f32 $0, $1;", types.float32, x)


def _log2(x):
    if isinstance(x, np.ndarray):
        return np.array([math.log2(n) if n > 0.0 else _log2(n) for n in x.tolist()], x.dtype)
    if x > 0.0:
        return np.float32(math.log2(x))
    return -math.inf if x == 0.0 else math.nan


@emulated_by(_log2)
@intrinsic
def log2(typingctx, x):
    """Return the base-2 logarithm by ``lg2.approx.f32``; log2(0) is -inf (PTX ISA, "lg2")."""
    return of_registers("lg2.approx.f32 $0, $1;", types.float32, x)


def _maximum(x, y):
    if isinstance(x, np.ndarray) or isinstance(y, np.ndarray):
        return np.fmax(x, y)
    if x != x:
        return y
    return x if x > y or y != y else y


@emulated_by(_maximum)
@intrinsic
def maximum(typingctx, x, y):
    """Return the larger of two floats by ``max.f32``. If one is NaN, return the other."""
    return of_registers("max.f32 $0, $1, $2;", types.float32, x, y)


def _inverse_power(x):
    bits = np.asarray(x, np.float32).view(np.int32) & 0x7F800000
    made = (0x7F000000 - bits).astype(np.int32).view(np.float32)
    return made if isinstance(x, np.ndarray) else made[()]


@emulated_by(_inverse_power)
@intrinsic
def inverse_power(typingctx, x):
    """Return 1 / p exactly, where p is the largest power of two that is not above x.

    x must be at least 2^-126 and below 2^127.
    """
    bits = "mov.b32 t, $1; and.b32 t, t, 0x7f800000; sub.s32 t, 0x7f000000, t;"
    return of_registers(f"{{.reg .b32 t; {bits} mov.b32 $0, t;}}", types.float32, x)


@emulated_by(lambda word: _viewed(word, np.uint32, np.float32))
@intrinsic
def as_float(typingctx, word):
    """Return the float32 with the bits of the uint32 ``word``."""
    return of_registers("mov.b32 $0, $1;", types.uint32, word, returns=types.float32)


@emulated_by(lambda x: _viewed(x, np.float32, np.uint32))
@intrinsic
def as_word(typingctx, x):
    """Return the bits of the float32 ``x`` as a uint32."""
    return of_registers("mov.b32 $0, $1;", types.float32, x, returns=types.uint32)


def _viewed(x, of, to):
    """Convert a number or an array to the dtype ``of``, and return its bits as the dtype ``to``.

    For example, ``_viewed(1.0, "float32", "uint32")`` is 0x3F800000. Results of an unsigned dtype
    are int64.
    """
    made = np.asarray(x).astype(of).view(to)
    made = made.astype(np.int64) if made.dtype.kind == "u" else made
    return made if isinstance(x, np.ndarray) else made[()]


@emulated_by(lambda x: x)
@intrinsic
def opaque(typingctx, x):
    """Return the uint32 ``x``, but hide its origin from the compiler.

    Values that are computed from the result are therefore computed again at each use. The compiler
    cannot compute them once before a loop, where they would occupy registers during the loop.
    """
    return of_registers("mov.b32 $0, $1;", types.uint32, x, side_effect=True)
