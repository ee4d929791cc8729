"""What every intrinsic needs: addresses from Numba arrays, and the link to its emulation."""

from llvmlite import ir
from numba.core import cgutils, types

I32 = ir.IntType(32)
F32 = ir.FloatType()
FLOAT2 = ir.VectorType(F32, 2)
FLOAT2_TUPLE = types.containers.UniTuple(types.float32, 2)
FLOAT4 = ir.VectorType(F32, 4)
FLOAT4_TUPLE = types.containers.UniTuple(types.float32, 4)
SHARED = 3
GLOBAL = 1


def emulated_by(emulation):
    """Attach the Python function that the emulator calls in place of the intrinsic."""

    def attach(intrinsic):
        intrinsic.emulation = emulation
        return intrinsic

    return attach


def is_float32_array(ty, ndim):
    return _is_array(ty, ndim, types.float32)


def is_half_array(ty, ndim):
    """Whether an array of 16-bit floats: their bits, as uint16, whatever their format."""
    return _is_array(ty, ndim, types.uint16)


def _is_array(ty, ndim, element):
    return isinstance(ty, types.Array) and ty.ndim == ndim and ty.dtype == element


def to_i32(context, builder, value, ty):
    return context.cast(builder, value, ty, types.int32)


def shared_pointer(context, builder, array_ty, array, index, index_ty):
    """Pointer (address space 3) to element ``index`` of a 1-D shared array."""
    data = context.make_array(array_ty)(context, builder, array).data
    base = builder.addrspacecast(data, data.type.pointee.as_pointer(SHARED))
    return builder.gep(base, [to_i32(context, builder, index, index_ty)])


def global_pointer(context, builder, array_ty, array, row, row_ty, col, col_ty, contiguous=False):
    """Pointer (address space 1) to element (row, col) of a 2-D array with any strides.

    That the last axis is ``contiguous`` makes a constant step of a column: the instruction's own
    offset, no register.
    """
    view = context.make_array(array_ty)(context, builder, array)
    strides = cgutils.unpack_tuple(builder, view.strides)
    if contiguous:
        strides[1] = ir.IntType(64)(array_ty.dtype.bitwidth // 8)
    offset = None
    for index, ty, stride in ((row, row_ty, strides[0]), (col, col_ty, strides[1])):
        wide = context.cast(builder, index, ty, types.int64)
        step = builder.mul(wide, stride)
        offset = step if offset is None else builder.add(offset, step)
    data = builder.bitcast(view.data, ir.IntType(8).as_pointer())
    element = view.data.type.pointee
    generic = builder.bitcast(builder.gep(data, [offset]), element.as_pointer())
    return builder.addrspacecast(generic, element.as_pointer(GLOBAL))


def unpack4(context, builder, vector):
    lanes = [builder.extract_element(vector, I32(n)) for n in range(4)]
    return context.make_tuple(builder, FLOAT4_TUPLE, lanes)


def pack4(builder, lanes):
    vector = ir.Constant(FLOAT4, ir.Undefined)
    for n, lane in enumerate(lanes):
        vector = builder.insert_element(vector, lane, I32(n))
    return vector
