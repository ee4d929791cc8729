"""Asynchronous copies from global to shared memory: ``cp.async`` (PTX ISA, sm_80 and later).

A thread starts copies, closes a group of copies by ``commit_async``, and waits for its groups by
``wait_async``. Other threads see the copied data after this wait and a barrier. On GPUs with a
compute capability below 8.0, copies of float32 go through registers and are complete at once.
``commit_async`` and ``wait_async`` then do nothing.
"""

from numba.core import types
from numba.cuda.extending import intrinsic

from fa_numba import emulator
from fa_numba.intrinsics._build import (
    I32,
    compiles_for,
    emulated_by,
    global_pointer,
    is_float32_array,
    is_half_array,
    ptx,
    shared_address,
    statement,
)

_SINCE = (8, 0)


def _through_registers(width):
    """Return PTX that copies up to `width` words through registers.

    The operands are the address in shared memory $0, the address in global memory $1, and the
    number of words $2. The remaining words in shared memory become zero.
    """
    names = [f"x{n}" for n in range(width)]
    zeros = "".join(f"mov.b32 {name}, 0; " for name in names)
    whole, vector = "", "b32"
    if width > 1:
        vector = f"v{width}.b32"
        whole = f"setp.eq.s32 p, $2, {width}; @p ld.global.{vector} {{{', '.join(names)}}}, [$1]; "
        whole += "selp.b32 rest, 0, $2, p; "
    else:
        whole = "mov.b32 rest, $2; "
    parts = "".join(
        f"setp.gt.s32 p, rest, {n}; @p ld.global.b32 {name}, [$1+{4 * n}]; "
        for n, name in enumerate(names[: max(1, width - 1)])
    )
    stored = f"{{{', '.join(names)}}}" if width > 1 else names[0]
    registers = f".reg .pred p; .reg .b32 rest, {', '.join(names)}; "
    return f"{{{registers}{zeros}{whole}{parts}st.shared.{vector} [$0], {stored};}}"


def _copy(width, element_bytes=4):
    """Return a function that Numba calls to compile a copy of up to `width` elements.

    The function takes the Numba types of the arguments, and returns signature and code of the copy.
    `element_bytes` is the size of an element: 4 for float32, 2 for 16-bit floats.
    """
    size = width * element_bytes
    operation = "cp.async.cg" if size == 16 else "cp.async.ca"
    instruction = f"{operation}.shared.global [$0], [$1], {size}, $2;"
    fits = is_float32_array if element_bytes == 4 else is_half_array

    def build(typingctx, dst, index, src, *places, count):
        if not (fits(dst, 1) and fits(src, len(places)) and count == types.int32):
            return None

        def codegen(context, builder, signature, args):
            target = shared_address(context, builder, dst, args[0], args[1], index)
            pairs = [x for pair in zip(args[3:-1], places, strict=True) for x in pair]
            vector = width > 1
            source = global_pointer(context, builder, src, args[2], *pairs, contiguous=vector)
            if element_bytes == 4 and not compiles_for(_SINCE):
                ptx(builder, _through_registers(width), [target, source, args[-1]])
                return
            # Bytes to read; the rest of the destination is filled with zeros.
            read = builder.mul(args[-1], I32(element_bytes))
            ptx(builder, instruction, [target, source, read])

        return types.void(dst, index, src, *places, count), codegen

    return build


def _copied(n):
    """Return the emulation of a copy of up to `n` elements."""

    def emulation(dst, index, src, *place_and_count):
        *place, count = place_and_count
        emulator.current().async_copy(dst, index, src, tuple(place), n, count)

    return emulation


@emulated_by(_copied(4))
@intrinsic
def copy4_async(typingctx, dst, index, src, row, col, count):
    """Start copying src[row, col .. col + count - 1] to dst[index .. index + count - 1].

    The elements of dst up to index + 3 that are not copied become zero. ``dst`` is a 1-D shared
    float32 array, and ``src`` a 2-D global float32 array. Both addresses must be multiples of 16
    bytes. ``count`` (int32) is 0 to 4.
    """
    return _copy(4)(typingctx, dst, index, src, row, col, count=count)


@emulated_by(_copied(1))
@intrinsic
def copy1_async(typingctx, dst, index, src, row, col, count):
    """Start copying one float, src[row, col], to dst[index].

    ``count`` (int32) is 1 or 0. If ``count`` is 0, dst[index] becomes zero, and ``src`` is not
    read. ``dst`` is a 1-D shared float32 array. ``src`` is a 2-D global float32 array with any
    alignment and strides.
    """
    return _copy(1)(typingctx, dst, index, src, row, col, count=count)


@emulated_by(_copied(8))
@intrinsic
def copy8_async(typingctx, dst, index, src, row, col, count):
    """Start copying src[row, col .. col + count - 1] to dst[index .. index + count - 1].

    The elements of dst up to index + 7 that are not copied become zero. ``dst`` is a 1-D shared
    uint16 array, and ``src`` a 2-D global uint16 array. Both arrays contain the bits of 16-bit
    floats. Both addresses must be multiples of 16 bytes. ``count`` (int32) is 0 to 8.
    """
    return _copy(8, 2)(typingctx, dst, index, src, row, col, count=count)


@emulated_by(_copied(8))
@intrinsic
def copy8_of_head_async(typingctx, dst, index, src, row, head, col, count):
    """Start copying src[row, head, col .. col + count - 1] to dst[index .. index + count - 1].

    ``src`` is a 3-D global uint16 array. The other arguments are those of ``copy8_async``.
    """
    return _copy(8, 2)(typingctx, dst, index, src, row, head, col, count=count)


@emulated_by(_copied(1))
@intrinsic
def copy_value_async(typingctx, dst, index, src, row, count):
    """Start copying one float, src[row], to dst[index].

    ``count`` (int32) is 1 or 0. If ``count`` is 0, dst[index] becomes zero, and ``src`` is not
    read. ``dst`` is a 1-D shared float32 array, and ``src`` a 1-D global float32 array.
    """
    return _copy(1)(typingctx, dst, index, src, row, count=count)


@emulated_by(lambda: emulator.current().async_commit())
@intrinsic
def commit_async(typingctx):
    """Close this thread's current group of copies by ``cp.async.commit_group``."""
    return types.void(), statement("cp.async.commit_group;", _SINCE)


@emulated_by(lambda: emulator.current().async_wait(0))
@intrinsic
def wait_async(typingctx):
    """Wait for all closed groups of copies of this thread by ``cp.async.wait_group 0``."""
    return types.void(), statement("cp.async.wait_group 0;", _SINCE)
