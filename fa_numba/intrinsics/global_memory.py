"""16-byte accesses to global memory, for rows of a 2-D array with a contiguous last axis."""

from numba.core import types
from numba.cuda.extending import intrinsic

from fa_numba.intrinsics._build import (
    FLOAT4,
    FLOAT4_TUPLE,
    GLOBAL,
    emulated_by,
    global_pointer,
    is_float32_array,
    pack4,
    unpack4,
)


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
