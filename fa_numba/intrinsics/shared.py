"""Shared memory: arrays in dynamic shared memory, and vector accesses to them.

Only dynamic shared memory may exceed 48 KB (CUDA C++ Programming Guide, "Shared Memory"). Arrays of
16-bit floats are uint16 arrays that contain the bits of the floats.
"""

from llvmlite import ir
from numba.core import cgutils, types
from numba.cuda.extending import intrinsic

from fa_numba import emulator
from fa_numba.intrinsics._build import (
    F32,
    FLOAT2,
    FLOAT2_TUPLE,
    FLOAT4,
    FLOAT4_TUPLE,
    I32,
    INT4,
    SHARED,
    WORDS,
    emulated_by,
    halves_of,
    is_float32_array,
    shared_pointer,
    to_i32,
    vector_load,
    vector_store,
    words_of,
)

_SYMBOL = "fa_numba_dynamic_shared"
_FLOATS = {"space": SHARED, "element": types.float32}
_HALVES = {"space": SHARED, "element": types.uint16}


def _tile(element, ir_type, offset, length):
    """Return signature and code of an intrinsic that returns a 1-D array in dynamic shared memory.

    `element` is the Numba type and `ir_type` the LLVM type of an element. `offset` and `length` are
    the Numba types of the arguments of the intrinsic.
    """
    if not (isinstance(offset, types.Integer) and isinstance(length, types.IntegerLiteral)):
        return None
    array_ty = types.Array(element, 1, "C")
    size, count = element.bitwidth // 8, length.literal_value

    def codegen(context, builder, signature, args):
        module = builder.module
        symbol = module.globals.get(_SYMBOL)
        if symbol is None:
            symbol = ir.GlobalVariable(module, ir.ArrayType(ir.IntType(8), 0), _SYMBOL, SHARED)
            symbol.linkage = "external"
            symbol.align = 16
        if isinstance(offset, types.IntegerLiteral):
            start = I32(offset.literal_value * size)
        else:
            start = builder.mul(to_i32(context, builder, args[0], offset), I32(size))
        base = builder.gep(symbol, [I32(0), start], inbounds=True)
        typed = builder.bitcast(base, ir_type.as_pointer(SHARED))
        data = builder.addrspacecast(typed, ir_type.as_pointer(), "generic")
        array = context.make_array(array_ty)(context, builder)
        itemsize = context.get_constant(types.intp, size)
        shape = cgutils.pack_array(builder, [context.get_constant(types.intp, count)])
        context.populate_array(
            array,
            data=data,
            shape=shape,
            strides=cgutils.pack_array(builder, [itemsize]),
            itemsize=itemsize,
            meminfo=None,
        )
        return array._getvalue()

    return array_ty(offset, length), codegen


@emulated_by(lambda offset, length: emulator.current().shared_tile(offset, length, "float32"))
@intrinsic
def shared_tile(typingctx, offset, length):
    """Return a 1-D float32 array of ``length`` elements in dynamic shared memory.

    The array begins at byte 4 * ``offset``. ``offset`` must be a multiple of 4, so that accesses of
    16 bytes are aligned. ``length`` is a compile-time constant.
    """
    return _tile(types.float32, F32, offset, length)


@emulated_by(lambda offset, length: emulator.current().shared_tile(offset, length, "uint16"))
@intrinsic
def half_tile(typingctx, offset, length):
    """Return a 1-D uint16 array of ``length`` elements in dynamic shared memory.

    The elements are the bits of 16-bit floats. The array begins at byte 2 * ``offset``. ``offset``
    must be a multiple of 8. ``length`` is a compile-time constant.
    """
    return _tile(types.uint16, ir.IntType(16), offset, length)


@emulated_by(lambda offset, length: emulator.current().shared_tile(offset, length, "uint32"))
@intrinsic
def index_tile(typingctx, offset, length):
    """Return a 1-D uint32 array of ``length`` elements in dynamic shared memory.

    The array begins at byte 4 * ``offset``. ``length`` is a compile-time constant.
    """
    return _tile(types.uint32, I32, offset, length)


def _load4(array, index):
    return array.load(index, 4)


@emulated_by(_load4)
@intrinsic
def load4(typingctx, array, index):
    """Return the four floats array[index .. index + 3] as a tuple: ``ld.shared.v4.f32``.

    ``array`` is a 1-D shared float32 array. ``index`` must be a multiple of 4.
    """
    return vector_load(array, index, **_FLOATS, vector=FLOAT4, returns=FLOAT4_TUPLE)


@emulated_by(lambda array, index: array.load(index, 2))
@intrinsic
def load_pair(typingctx, array, index):
    """Return the two floats array[index .. index + 1] as a tuple: ``ld.shared.v2.f32``.

    ``array`` is a 1-D shared float32 array. ``index`` must be even.
    """
    return vector_load(array, index, **_FLOATS, vector=FLOAT2, returns=FLOAT2_TUPLE)


@emulated_by(lambda array, index, x0, x1: array.store(index, (x0, x1)))
@intrinsic
def store_pair(typingctx, array, index, x0, x1):
    """Store two floats to array[index .. index + 1]: ``st.shared.v2.f32``.

    ``array`` is a 1-D shared float32 array. ``index`` must be even.
    """
    return vector_store(array, index, **_FLOATS, vector=FLOAT2, values=(x0, x1))


@emulated_by(lambda array, offset: array.load(offset >> 2, 4))
@intrinsic
def load4_at_byte(typingctx, array, offset):
    """Return the four floats from byte ``offset`` of a 1-D shared float32 array on, as a tuple.

    ``offset`` is a 64-bit integer, and a multiple of 16. In a loop, this saves an instruction
    compared with ``load4``: the offset is added to the array's address without a shift.
    """
    if not is_float32_array(array, 1) or getattr(offset, "bitwidth", 0) != 64:
        return None

    def codegen(context, builder, signature, args):
        first = shared_pointer(context, builder, array, args[0], I32(0), types.int32)
        pointer = builder.gep(builder.bitcast(first, ir.IntType(8).as_pointer(SHARED)), [args[1]])
        vector = builder.load(builder.bitcast(pointer, FLOAT4.as_pointer(SHARED)), align=16)
        lanes = [builder.extract_element(vector, I32(n)) for n in range(4)]
        return context.make_tuple(builder, FLOAT4_TUPLE, lanes)

    return FLOAT4_TUPLE(array, offset), codegen


@emulated_by(lambda array, index: words_of(array.load(index, 8)))
@intrinsic
def load8(typingctx, array, index):
    """Return the 16-bit elements array[index .. index + 7] as four uint32: ``ld.shared.v4.u32``.

    Each uint32 contains two elements, the first in the lower half. ``index`` must be a multiple of
    8.
    """
    return vector_load(array, index, **_HALVES, vector=INT4, returns=WORDS)


@emulated_by(lambda array, index, x0, x1, x2, x3: array.store(index, (x0, x1, x2, x3)))
@intrinsic
def store4(typingctx, array, index, x0, x1, x2, x3):
    """Store four floats to array[index .. index + 3]: ``st.shared.v4.f32``.

    ``array`` is a 1-D shared float32 array. ``index`` must be a multiple of 4.
    """
    return vector_store(array, index, **_FLOATS, vector=FLOAT4, values=(x0, x1, x2, x3))


@emulated_by(lambda array, index, w0, w1, w2, w3: array.store(index, halves_of((w0, w1, w2, w3))))
@intrinsic
def store8(typingctx, array, index, w0, w1, w2, w3):
    """Store eight 16-bit elements to array[index .. index + 7]: ``st.shared.v4.u32``.

    The four uint32 contain the elements as ``load8`` returns them. ``index`` must be a multiple of
    8.
    """
    words = (w0, w1, w2, w3)
    if any(word != types.uint32 for word in words):
        return None
    return vector_store(array, index, **_HALVES, vector=INT4, values=words)


@emulated_by(lambda array, index: words_of(array.load(index, 2))[0])
@intrinsic
def load2(typingctx, array, index):
    """Return the 16-bit elements array[index .. index + 1] as a uint32: ``ld.shared.u32``.

    The first element is in the lower half. ``index`` must be even.
    """
    return vector_load(array, index, **_HALVES, vector=I32, returns=types.uint32)


@emulated_by(lambda array, index, pair: array.store(index, (pair & 0xFFFF, pair >> 16)))
@intrinsic
def store2(typingctx, array, index, pair):
    """Store the two 16-bit elements of the uint32 ``pair`` to array[index .. index + 1].

    The lower half is the first element. ``index`` must be even. The instruction is
    ``st.shared.u32``.
    """
    if pair != types.uint32:
        return None
    return vector_store(array, index, **_HALVES, vector=I32, values=(pair,))
