"""Atomic additions to global memory that return nothing: ``red`` (PTX ISA, "red")."""

from llvmlite import ir
from numba.core import types
from numba.cuda.extending import intrinsic

from fa_numba.intrinsics._build import (
    F32,
    GLOBAL,
    emulated_by,
    global_pointer,
    is_float32_array,
)


def _add_global(array, row, col, value):
    (old,) = array.load((row, col), 1)
    array.store((row, col), (old + value,))


@emulated_by(_add_global)
@intrinsic
def add_global(typingctx, array, row, col, value):
    """array[row, col] += value, atomically: ``red.global.add.f32``.

    Counts as one load and one store.
    """
    if not is_float32_array(array, 2):
        return None

    def codegen(context, builder, signature, args):
        pointer = global_pointer(context, builder, array, args[0], args[1], row, args[2], col)
        asm = ir.InlineAsm(
            ir.FunctionType(ir.VoidType(), [F32.as_pointer(GLOBAL), F32]),
            "red.global.add.f32 [$0], $1;",
            "l,f,~{memory}",
            side_effect=True,
        )
        builder.call(asm, [pointer, args[3]])

    return types.void(array, row, col, value), codegen
