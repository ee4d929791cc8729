"""Vector accesses to global memory: neighbouring elements of a row in one instruction.

The array has two axes (in ``lies_in_pairs``: four), and the last axis is contiguous. In a uint16
array, the elements are the bits of 16-bit floats. In a uint8 array, they are the bits of e4m3.
"""

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
    bytes_of,
    emulated_by,
    global_pointer,
    guarded,
    halves_of,
    is_float32_array,
    ptx,
    vector_load,
    vector_store,
    words_of,
    words_of_bytes,
)

_FLOATS = {"space": GLOBAL, "element": types.float32}
_HALVES = {"space": GLOBAL, "element": types.uint16}
_BYTES = {"space": GLOBAL, "element": types.uint8}


@emulated_by(lambda array, row, col: array.load((row, col), 4))
@intrinsic
def read4(typingctx, array, row, col):
    """Return the four floats array[row, col .. col + 3] as a tuple: ``ld.global.v4.f32``.

    Their address must be a multiple of 16 bytes.
    """
    return vector_load(array, row, col, **_FLOATS, vector=FLOAT4, returns=FLOAT4_TUPLE)


@emulated_by(lambda array, row, col, x0, x1, x2, x3: array.store((row, col), (x0, x1, x2, x3)))
@intrinsic
def write4(typingctx, array, row, col, x0, x1, x2, x3):
    """Store four floats to array[row, col .. col + 3]: ``st.global.v4.f32``.

    Their address must be a multiple of 16 bytes.
    """
    return vector_store(array, row, col, **_FLOATS, vector=FLOAT4, values=(x0, x1, x2, x3))


@emulated_by(lambda array, row, col: words_of(array.load((row, col), 2))[0])
@intrinsic
def read2(typingctx, array, row, col):
    """Return the 16-bit elements array[row, col .. col + 1] as a uint32: ``ld.global.u32``.

    The first element is in the lower half. The address must be a multiple of 4 bytes.
    """
    return vector_load(array, row, col, **_HALVES, vector=I32, returns=types.uint32)


@emulated_by(lambda array, row, col, pair: array.store((row, col), (pair & 0xFFFF, pair >> 16)))
@intrinsic
def write2(typingctx, array, row, col, pair):
    """Store the two 16-bit elements of the uint32 ``pair`` to array[row, col .. col + 1].

    The lower half is the first element. The address must be a multiple of 4 bytes. The instruction
    is ``st.global.u32``.
    """
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
    """Return the two floats array[row, col .. col + 1] if ``reads`` is true, else two zeros.

    The address must be a multiple of 8 bytes. The instruction is ``ld.global.v2.f32`` with a
    predicate instead of a branch.
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
    """Return whether pairs of neighbouring columns of an emulated array can be accessed at once.

    This is the emulation of ``lies_in_pairs``. The columns must be contiguous, and the address of
    each pair must be a multiple of the size of a pair.
    """
    step = array.itemsize
    even = (stride % (2 * step) == 0 for stride in array.strides[:-1])
    return array.strides[-1] == step and all(even) and array.first_byte % (2 * step) == 0


@emulated_by(_lies_in_pairs)
@intrinsic
def lies_in_pairs(typingctx, array):
    """Return whether ``read_pair`` and ``write_pair`` may access each pair of columns 2 n, 2 n + 1.

    This is true if the columns are neighbours in memory, and the address of each pair is a multiple
    of 8 bytes. ``array`` is a 4-D global float32 array.
    """
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
    """Store two floats to array[row, col .. col + 1] if ``writes`` is true.

    The address must be a multiple of 8 bytes. The instruction is ``st.global.v2.f32`` with a
    predicate instead of a branch.
    """
    text = "@p st.global.v2.f32 [$0], {$1, $2};"
    return at_global(text, types.float32, array, row, col, x0, x1, writes)


@emulated_by(lambda array, row, col: words_of(array.load((row, col), 8)))
@intrinsic
def read8(typingctx, array, row, col):
    """Return the 16-bit elements array[row, col .. col + 7] as four uint32: ``ld.global.v4.u32``.

    Each uint32 contains two elements, the first in the lower half. The address must be a multiple
    of 16 bytes.
    """
    return vector_load(array, row, col, **_HALVES, vector=INT4, returns=WORDS)


def _write8(array, row, col, w0, w1, w2, w3, writes):
    emulator.current().under(writes, array.store, (row, col), halves_of((w0, w1, w2, w3)))


@emulated_by(_write8)
@intrinsic
def write8(typingctx, array, row, col, w0, w1, w2, w3, writes):
    """Store eight 16-bit elements to array[row, col .. col + 7] if ``writes`` is true.

    The four uint32 contain the elements as ``read8`` returns them. The instruction is
    ``st.global.v4.b32`` with a predicate instead of a branch, so that a loop of stores has no
    branches.
    """
    words = (w0, w1, w2, w3)
    if any(word != types.uint32 for word in words):
        return None
    text = "@p st.global.v4.b32 [$0], {$1, $2, $3, $4};"
    return at_global(text, types.uint16, array, row, col, *words, writes)


@emulated_by(lambda array, row, col: words_of_bytes(array.load((row, col), 16)))
@intrinsic
def read16(typingctx, array, row, col):
    """Return the 8-bit elements array[row, col .. col + 15] as four uint32: ``ld.global.v4.u32``.

    Each uint32 contains four elements, the first in the lowest byte. The address must be a multiple
    of 16 bytes.
    """
    return vector_load(array, row, col, **_BYTES, vector=INT4, returns=WORDS)


def _write16(array, row, col, w0, w1, w2, w3, writes):
    emulator.current().under(writes, array.store, (row, col), bytes_of((w0, w1, w2, w3)))


@emulated_by(_write16)
@intrinsic
def write16(typingctx, array, row, col, w0, w1, w2, w3, writes):
    """Store sixteen 8-bit elements to array[row, col .. col + 15] if ``writes`` is true.

    The four uint32 contain the elements as ``read16`` returns them. The instruction is
    ``st.global.v4.b32`` with a predicate instead of a branch.
    """
    words = (w0, w1, w2, w3)
    if any(word != types.uint32 for word in words):
        return None
    text = "@p st.global.v4.b32 [$0], {$1, $2, $3, $4};"
    return at_global(text, types.uint8, array, row, col, *words, writes)
