"""What every intrinsic needs: addresses from Numba arrays, and the link to its emulation."""

from llvmlite import ir
from numba.core import cgutils, types

I32 = ir.IntType(32)
F32 = ir.FloatType()
FLOAT2_TUPLE = types.containers.UniTuple(types.float32, 2)
FLOAT2 = ir.VectorType(F32, 2)
FLOAT4 = ir.VectorType(F32, 4)
INT4 = ir.VectorType(I32, 4)
FLOAT4_TUPLE = types.containers.UniTuple(types.float32, 4)
WORDS = types.containers.UniTuple(types.uint32, 4)
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
    """Pointer (address space 3) to element ``index`` of a 1-D shared array.

    The constant part of a 64-bit index becomes the instruction's offset; a 32-bit sum may wrap.
    """
    data = context.make_array(array_ty)(context, builder, array).data
    base = builder.addrspacecast(data, data.type.pointee.as_pointer(SHARED))
    wide = index_ty.bitwidth == 64
    return builder.gep(base, [index if wide else to_i32(context, builder, index, index_ty)])


def shared_address(context, builder, array_ty, array, index, index_ty):
    """The same as the 32-bit address that PTX takes, whose sums may wrap."""
    data = context.make_array(array_ty)(context, builder, array).data
    base = builder.ptrtoint(builder.addrspacecast(data, data.type.pointee.as_pointer(SHARED)), I32)
    place = to_i32(context, builder, index, index_ty)
    return builder.add(base, builder.mul(place, I32(array_ty.dtype.bitwidth // 8)))


def global_pointer(context, builder, array_ty, array, *places, contiguous=False):
    """Pointer (address space 1) to an element of an array with any strides.

    ``places`` are an index and its type for every axis; with ``contiguous`` the last axis has no
    gaps, which saves its multiplication.
    """
    view = context.make_array(array_ty)(context, builder, array)
    strides = cgutils.unpack_tuple(builder, view.strides)
    if contiguous:
        strides[-1] = strides[-1].type(array_ty.dtype.bitwidth // 8)
    offset = None
    for index, ty, stride in zip(places[::2], places[1::2], strides, strict=True):
        wide = context.cast(builder, index, ty, types.int64)
        step = builder.mul(wide, stride)
        offset = step if offset is None else builder.add(offset, step)
    data = builder.bitcast(view.data, ir.IntType(8).as_pointer())
    element = view.data.type.pointee
    generic = builder.bitcast(builder.gep(data, [offset]), element.as_pointer())
    return builder.addrspacecast(generic, element.as_pointer(GLOBAL))


def statement(instruction):
    """The code of an instruction without operands that orders memory."""

    def codegen(context, builder, signature, args):
        asm = ir.InlineAsm(
            ir.FunctionType(ir.VoidType(), []), instruction, "~{memory}", side_effect=True
        )
        builder.call(asm, [])

    return codegen


def guarded(instructions, condition):
    """PTX whose instructions marked ``@p`` take place if the operand ``condition`` is not 0."""
    return f"{{.reg .pred p; setp.ne.u32 p, {condition}, 0; {instructions}}}"


def unpack4(context, builder, vector, tuple_type=FLOAT4_TUPLE):
    lanes = [builder.extract_element(vector, I32(n)) for n in range(4)]
    return context.make_tuple(builder, tuple_type, lanes)


def pack4(builder, lanes, vector_type=FLOAT4):
    vector = ir.Constant(vector_type, ir.Undefined)
    for n, lane in enumerate(lanes):
        vector = builder.insert_element(vector, lane, I32(n))
    return vector


def words_of(halves):
    """Emulation: pairs of 16-bit elements as words, the lower index in the lower half."""
    return tuple(low | high << 16 for low, high in zip(halves[::2], halves[1::2], strict=True))


def halves_of(words):
    """Emulation: the 16-bit elements of words."""
    return tuple(half for word in words for half in (word & 0xFFFF, word >> 16))
