"""Vector accesses to global memory, for rows of a 2-D array with a contiguous last axis."""

import numpy as np
from numba.core import cgutils, types
from numba.cuda.extending import intrinsic

from fa_numba import emulator
from fa_numba.intrinsics._build import (
    F32,
    FLOAT2_TUPLE,
    FLOAT4,
    FLOAT4_TUPLE,
    GLOBAL,
    I32,
    INT4,
    WORDS,
    at_global,
    emulated_by,
    global_pointer,
    guarded,
    halves_of,
    is_float32_array,
    ptx,
    vector_load,
    vector_store,
    words_of,
)

_FLOATS = {"space": GLOBAL, "element": types.float32}
_HALVES = {"space": GLOBAL, "element": types.uint16}  # bits of 16-bit floats


@emulated_by(lambda array, row, col: array.load((row, col), 4))
@intrinsic
def read4(typingctx, array, row, col):
    """Elements (row, col .. col + 3), 16-byte aligned, as a tuple: ``ld.global.v4.f32``."""
    return vector_load(array, row, col, **_FLOATS, vector=FLOAT4, gives=FLOAT4_TUPLE)


@emulated_by(lambda array, row, col, x0, x1, x2, x3: array.store((row, col), (x0, x1, x2, x3)))
@intrinsic
def write4(typingctx, array, row, col, x0, x1, x2, x3):
    """Store four floats at (row, col .. col + 3), 16-byte aligned: ``st.global.v4.f32``."""
    return vector_store(array, row, col, **_FLOATS, vector=FLOAT4, values=(x0, x1, x2, x3))


@emulated_by(lambda array, row, col: words_of(array.load((row, col), 2))[0])
@intrinsic
def read2(typingctx, array, row, col):
    """Two 16-bit elements from (row, col) on, 4-byte aligned, as a uint32: ``ld.global.u32``."""
    return vector_load(array, row, col, **_HALVES, vector=I32, gives=types.uint32)


@emulated_by(lambda array, row, col, pair: array.store((row, col), (pair & 0xFFFF, pair >> 16)))
@intrinsic
def write2(typingctx, array, row, col, pair):
    """Store two 16-bit elements, a word, from (row, col) on, 4-byte aligned: ``st.global.u32``."""
    if pair != types.uint32:
        return None
    return vector_store(array, row, col, **_HALVES, vector=I32, values=(pair,))


def _read_pair(array, row, col, reads):
    found = emulator.current().under(reads, array.load, (row, col), 2)
    if found is None:
        return 0.0, 0.0
    if isinstance(reads, np.ndarray):
        return tuple(np.where(reads, x, 0.0) for x in found)
    return found


@emulated_by(_read_pair)
@intrinsic
def read_pair(typingctx, array, row, col, reads):
    """Elements (row, col .. col + 1) of a float32 array, 8-byte aligned, if ``reads``, else zeros:
    ``ld.global.v2.f32``, conditional as ``write8``.
    """
    if not is_float32_array(array, 2) or not isinstance(reads, types.Boolean):
        return None

    def codegen(context, builder, signature, args):
        place = (args[1], row, args[2], col)
        pointer = global_pointer(context, builder, array, args[0], *place, contiguous=True)
        zeros = "mov.f32 $0, 0f00000000; mov.f32 $1, 0f00000000;"
        text = guarded(f"{zeros} @p ld.global.v2.f32 {{$0, $1}}, [$2];", "$3")
        given = pointer, builder.zext(args[3], I32)
        lanes = ptx(builder, text, given, [F32] * 2, out="=&")
        return context.make_tuple(builder, FLOAT2_TUPLE, lanes)

    return FLOAT2_TUPLE(array, row, col, reads), codegen


def _lies_in_pairs(array):
    step = array.itemsize
    even = (stride % (2 * step) == 0 for stride in array.strides[:-1])
    return array.strides[-1] == step and all(even) and array.first_byte % (2 * step) == 0


@emulated_by(_lies_in_pairs)
@intrinsic
def lies_in_pairs(typingctx, array):
    """Whether columns 2 n and 2 n + 1 of a 4-D float32 array are neighbours at 8-byte addresses."""
    if not is_float32_array(array, 4):
        return None

    def codegen(context, builder, signature, args):
        view = context.make_array(signature.args[0])(context, builder, args[0])
        *others, last = cgutils.unpack_tuple(builder, view.strides)
        together = builder.ptrtoint(view.data, last.type)
        for stride in others:
            together = builder.or_(together, stride)
        odd = builder.and_(together, last.type(7))
        even = builder.icmp_unsigned("==", odd, last.type(0))
        return builder.and_(even, builder.icmp_unsigned("==", last, last.type(4)))

    return types.boolean(array), codegen


def _write_pair(array, row, col, x0, x1, writes):
    emulator.current().under(writes, array.store, (row, col), (x0, x1))


@emulated_by(_write_pair)
@intrinsic
def write_pair(typingctx, array, row, col, x0, x1, writes):
    """Store two floats at (row, col), (row, col + 1), 8-byte aligned, if ``writes``:
    ``st.global.v2.f32``, conditional as ``write8``.
    """
    text = "@p st.global.v2.f32 [$0], {$1, $2};"
    return at_global(text, types.float32, array, row, col, x0, x1, writes)


@emulated_by(lambda array, row, col: words_of(array.load((row, col), 8)))
@intrinsic
def read8(typingctx, array, row, col):
    """Eight 16-bit elements from (row, col) on, 16-byte aligned, as four uint32, pairs with the
    lower index in the lower half: ``ld.global.v4.u32``.
    """
    return vector_load(array, row, col, **_HALVES, vector=INT4, gives=WORDS)


def _write8(array, row, col, w0, w1, w2, w3, writes):
    emulator.current().under(writes, array.store, (row, col), halves_of((w0, w1, w2, w3)))


@emulated_by(_write8)
@intrinsic
def write8(typingctx, array, row, col, w0, w1, w2, w3, writes):
    """Store eight 16-bit elements, as ``read8`` gives them, if ``writes``: ``st.global.v4.b32``.

    The condition is the instruction's own, so that a loop of stores has no branches.
    """
    words = (w0, w1, w2, w3)
    if any(word != types.uint32 for word in words):
        return None
    text = "@p st.global.v4.b32 [$0], {$1, $2, $3, $4};"
    return at_global(text, types.uint16, array, row, col, *words, writes)
