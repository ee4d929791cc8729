"""Vector accesses to global memory, for rows of a 2-D array with a contiguous last axis."""

import functools

from llvmlite import ir
from numba.core import types
from numba.cuda.extending import intrinsic

from fa_numba.intrinsics._build import (
    FLOAT2,
    FLOAT2_TUPLE,
    FLOAT4,
    FLOAT4_TUPLE,
    GLOBAL,
    I32,
    emulated_by,
    global_pointer,
    is_float32_array,
    is_half_array,
    pack4,
    unpack4,
)

_row_pointer = functools.partial(global_pointer, contiguous=True)


def _read4(array, row, col):
    return array.load((row, col), 4)


@emulated_by(_read4)
@intrinsic
def read4(typingctx, array, row, col):
    """Elements (row, col .. col + 3), 16-byte aligned, as a tuple: ``ld.global.v4.f32``."""
    if not is_float32_array(array, 2):
        return None

    def codegen(context, builder, signature, args):
        pointer = global_pointer(context, builder, array, args[0], args[1], row, args[2], col)
        vector = builder.load(builder.bitcast(pointer, FLOAT4.as_pointer(GLOBAL)), align=16)
        return unpack4(context, builder, vector)

    return FLOAT4_TUPLE(array, row, col), codegen


def _write4(array, row, col, x0, x1, x2, x3):
    array.store((row, col), (x0, x1, x2, x3))


@emulated_by(_write4)
@intrinsic
def write4(typingctx, array, row, col, x0, x1, x2, x3):
    """Store four floats at (row, col .. col + 3), 16-byte aligned: ``st.global.v4.f32``."""
    if not is_float32_array(array, 2):
        return None

    def codegen(context, builder, signature, args):
        pointer = global_pointer(context, builder, array, args[0], args[1], row, args[2], col)
        target = builder.bitcast(pointer, FLOAT4.as_pointer(GLOBAL))
        builder.store(pack4(builder, args[3:]), target, align=16)

    return types.void(array, row, col, x0, x1, x2, x3), codegen


def _write2(array, row, col, pair):
    array.store((row, col), (pair & 0xFFFF, pair >> 16))


@emulated_by(_write2)
@intrinsic
def write2(typingctx, array, row, col, pair):
    """Store two 16-bit elements, packed in a uint32, at (row, col), (row, col + 1); 4-byte aligned:
    ``st.global.u32``.
    """
    if not is_half_array(array, 2) or pair != types.uint32:
        return None

    def codegen(context, builder, signature, args):
        pointer = _row_pointer(context, builder, array, args[0], args[1], row, args[2], col)
        builder.store(args[3], builder.bitcast(pointer, I32.as_pointer(GLOBAL)), align=4)

    return types.void(array, row, col, pair), codegen


def _read_pair(array, row, col):
    return array.load((row, col), 2)


@emulated_by(_read_pair)
@intrinsic
def read_pair(typingctx, array, row, col):
    """Elements (row, col .. col + 1) of a float32 array, 8-byte aligned: ``ld.global.v2.f32``."""
    if not is_float32_array(array, 2):
        return None

    def codegen(context, builder, signature, args):
        pointer = _row_pointer(context, builder, array, args[0], args[1], row, args[2], col)
        vector = builder.load(builder.bitcast(pointer, FLOAT2.as_pointer(GLOBAL)), align=8)
        lanes = [builder.extract_element(vector, I32(n)) for n in range(2)]
        return context.make_tuple(builder, FLOAT2_TUPLE, lanes)

    return FLOAT2_TUPLE(array, row, col), codegen


def _write_pair(array, row, col, x0, x1):
    array.store((row, col), (x0, x1))


@emulated_by(_write_pair)
@intrinsic
def write_pair(typingctx, array, row, col, x0, x1):
    """Store two floats at (row, col), (row, col + 1), 8-byte aligned: ``st.global.v2.f32``."""
    if not is_float32_array(array, 2):
        return None

    def codegen(context, builder, signature, args):
        pointer = _row_pointer(context, builder, array, args[0], args[1], row, args[2], col)
        vector = ir.Constant(FLOAT2, ir.Undefined)
        for n in range(2):
            vector = builder.insert_element(vector, args[3 + n], I32(n))
        builder.store(vector, builder.bitcast(pointer, FLOAT2.as_pointer(GLOBAL)), align=8)

    return types.void(array, row, col, x0, x1), codegen
