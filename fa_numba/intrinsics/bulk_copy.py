"""Copies of boxes between global and shared memory by the bulk copy engine (TMA, sm_90).

A box is a rectangle of an array with a tensor map (``device.TiledArray``). The copies are
asynchronous:

- ``load_box`` fills shared memory. An mbarrier counts the bytes that have arrived.
- ``store_box``, ``add_box`` and ``add_bulk`` read shared memory. A thread closes a group of them
  by ``commit_boxes``, and then waits for its groups.
"""

import functools

from llvmlite import ir
from numba.core import cgutils, types
from numba.cuda.extending import intrinsic

from fa_numba import emulator
from fa_numba.intrinsics._build import (
    emulated_by,
    global_pointer,
    is_float32_array,
    ptx,
    shared_address,
    statement,
    to_i32,
)

_I64 = ir.IntType(64)


def _map_address(context, builder, ty, value):
    """Return the address of the tensor map of an array, as an int64."""
    tiled = cgutils.create_struct_proxy(ty)(context, builder, value)
    return builder.ptrtoint(tiled.map, _I64)


def _load(axes):
    """Return the code of ``load_box`` for a tensor map with `axes` axes."""
    names = ", ".join(f"${n}" for n in range(2, 2 + axes))

    def codegen(context, builder, signature, args):
        dst, index, src, *places, barriers, barrier = signature.args
        target = shared_address(context, builder, dst, args[0], args[1], index)
        address = _map_address(context, builder, src, args[2])
        coordinates = _inwards(context, builder, args[3 : 3 + axes], places)
        bar = shared_address(context, builder, barriers, args[-2], args[-1], barrier)
        text = (
            f"cp.async.bulk.tensor.{axes}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
            f" [$0], [$1, {{{names}}}], [${2 + axes}];"
        )
        ptx(builder, text, [target, address, *coordinates, bar])

    return codegen


def _store(axes, verb="cp.async.bulk.tensor", does="tile"):
    """Return the code of ``store_box`` or ``add_box`` for a tensor map with `axes` axes.

    `verb` and `does` are parts of the instruction's name.
    """
    names = ", ".join(f"${n}" for n in range(1, 1 + axes))

    def codegen(context, builder, signature, args):
        dst, *places, src, index = signature.args
        address = _map_address(context, builder, dst, args[0])
        coordinates = _inwards(context, builder, args[1 : 1 + axes], places)
        source = shared_address(context, builder, src, args[-2], args[-1], index)
        text = f"{verb}.{axes}d.global.shared::cta.{does}.bulk_group"
        ptx(builder, f"{text} [$0, {{{names}}}], [${1 + axes}];", [address, *coordinates, source])

    return codegen


def _inwards(context, builder, values, places):
    """Return a box's coordinates in the order of the instruction: the innermost axis first.

    `places` are the Numba types of `values`.
    """
    pairs = zip(reversed(values), reversed(places), strict=True)
    return [to_i32(context, builder, value, ty) for value, ty in pairs]


def _load_box(dst, index, src, *places):
    *place, barriers, barrier = places
    emulator.current().load_box(dst, index, src, tuple(place), barriers, barrier)


def _store_box(dst, *places, adds=False):
    *place, src, index = places
    emulator.current().store_box(dst, tuple(place), src, index, adds)


@emulated_by(_load_box)
@intrinsic
def load_box(typingctx, dst, index, src, batch, head, row, col, barriers, barrier):
    """Start copying the box of ``src`` at (batch, head, row, col) to dst[index].

    ``src`` is an array with a tensor map of four axes, and ``dst`` a 1-D shared array. dst[index]
    must be at a multiple of 1024 bytes. The mbarrier barriers[barrier] counts the bytes that
    arrive.
    """
    return types.void(dst, index, src, batch, head, row, col, barriers, barrier), _load(4)


@emulated_by(_load_box)
@intrinsic
def load_box_5d(typingctx, dst, index, src, a, b, c, d, e, barriers, barrier):
    """Start copying the box of ``src`` at (a, b, c, d, e) to dst[index].

    The tensor map of ``src`` has five axes. The other arguments are those of ``load_box``.
    """
    return types.void(dst, index, src, a, b, c, d, e, barriers, barrier), _load(5)


@emulated_by(_store_box)
@intrinsic
def store_box(typingctx, dst, batch, head, row, col, src, index):
    """Start copying a box from src[index] to the box of ``dst`` at (batch, head, row, col).

    ``src`` is a 1-D shared array, and ``dst`` an array with a tensor map of four axes. src[index]
    must be at a multiple of 1024 bytes.
    """
    return types.void(dst, batch, head, row, col, src, index), _store(4)


@emulated_by(functools.partial(_store_box, adds=True))
@intrinsic
def add_box(typingctx, dst, batch, head, row, col, src, index):
    """Start adding a box from src[index] to the box of ``dst`` at (batch, head, row, col).

    Each addition is atomic, and counts as one load and one store. The arguments are those of
    ``store_box``.
    """
    code = _store(4, "cp.reduce.async.bulk.tensor", "add.tile")
    return types.void(dst, batch, head, row, col, src, index), code


def _add_bulk(array, row, col, src, index, count):
    emulator.current().add_bulk(array, row, col, src, index, count)


@emulated_by(_add_bulk)
@intrinsic
def add_bulk(typingctx, array, row, col, src, index, count):
    """Start adding src[index .. index + count - 1] to array[row, col .. col + count - 1].

    Each addition is atomic, and counts as one load and one store. ``array`` is a 2-D global float32
    array with a contiguous last axis, and ``src`` a 1-D shared float32 array. Both addresses and
    the size must be multiples of 16 bytes. The instruction is ``cp.reduce.async.bulk``, which needs
    no tensor map.
    """
    if not is_float32_array(array, 2) or not is_float32_array(src, 1):
        return None

    def codegen(context, builder, signature, args):
        place = (args[1], row, args[2], col)
        target = global_pointer(context, builder, array, args[0], *place, contiguous=True)
        source = shared_address(context, builder, src, args[3], args[4], index)
        size = builder.mul(to_i32(context, builder, args[5], count), ir.IntType(32)(4))
        text = "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [$0], [$1], $2;"
        ptx(builder, text, [target, source, size])

    return types.void(array, row, col, src, index, count), codegen


@emulated_by(_store_box)
@intrinsic
def store_box_5d(typingctx, dst, a, b, c, d, e, src, index):
    """Start copying a box from src[index] to the box of ``dst`` at (a, b, c, d, e).

    The tensor map of ``dst`` has five axes. The other arguments are those of ``store_box``.
    """
    return types.void(dst, a, b, c, d, e, src, index), _store(5)


@emulated_by(lambda: emulator.current().commit_boxes())
@intrinsic
def commit_boxes(typingctx):
    """Close this thread's current group of box stores by ``cp.async.bulk.commit_group``."""
    return types.void(), statement("cp.async.bulk.commit_group;")


@emulated_by(lambda: emulator.current().wait_boxes(written=False))
@intrinsic
def wait_boxes_read(typingctx):
    """Wait until this thread's closed groups of box stores have read shared memory.

    The elements of shared memory may then be overwritten.
    """
    return types.void(), statement("cp.async.bulk.wait_group.read 0;")


def _wait_boxes():
    emulator.current().wait_boxes(written=True)


@emulated_by(_wait_boxes)
@intrinsic
def wait_boxes(typingctx):
    """Wait until this thread's closed groups of box stores are in global memory.

    The instruction is ``cp.async.bulk.wait_group 0``.
    """
    return types.void(), statement("cp.async.bulk.wait_group 0;")


def _fence_async_proxy():
    context = emulator.current()
    context.fenced()
    context.fence_mbarriers()


@emulated_by(_fence_async_proxy)
@intrinsic
def fence_async_proxy(typingctx):
    """Make this thread's writes to shared memory visible to bulk copies and ``wgmma``.

    This holds for later bulk copies and products of this thread, and of other threads after a
    barrier. The instruction is ``fence.proxy.async``.
    """
    return types.void(), statement("fence.proxy.async.shared::cta;")
