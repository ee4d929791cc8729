"""Boxes of arrays between global and shared memory by the bulk copy engine (TMA)."""

from llvmlite import ir
from numba.core import cgutils, types
from numba.cuda.extending import intrinsic

from fa_numba import emulator
from fa_numba.intrinsics._build import I32, emulated_by, shared_address, statement, to_i32

_I64 = ir.IntType(64)


def _map_address(context, builder, ty, value):
    tiled = cgutils.create_struct_proxy(ty)(context, builder, value)
    return builder.ptrtoint(tiled.map, _I64)


def _load_box(dst, index, src, batch, head, row, col, barriers, barrier):
    place = (batch, head, row, col)
    emulator.current().load_box(dst, index, src, place, barriers, barrier)


@emulated_by(_load_box)
@intrinsic
def load_box(typingctx, dst, index, src, batch, head, row, col, barriers, barrier):
    """Start copying the box of ``src`` at (batch, head, row, col) to dst[index]."""
    places = (col, row, head, batch)

    def codegen(context, builder, signature, args):
        target = shared_address(context, builder, dst, args[0], args[1], index)
        address = _map_address(context, builder, src, args[2])
        batch_, head_, row_, col_ = args[3:7]
        coordinates = [
            to_i32(context, builder, x, ty)
            for x, ty in zip((col_, row_, head_, batch_), places, strict=True)
        ]
        bar = shared_address(context, builder, barriers, args[7], args[8], barrier)
        asm = ir.InlineAsm(
            ir.FunctionType(ir.VoidType(), [I32, _I64, *[I32] * 4, I32]),
            "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
            "[$0], [$1, {$2, $3, $4, $5}], [$6];",
            "r,l,r,r,r,r,r,~{memory}",
            side_effect=True,
        )
        builder.call(asm, [target, address, *coordinates, bar])

    return types.void(dst, index, src, batch, head, row, col, barriers, barrier), codegen


def _store_box(dst, batch, head, row, col, src, index):
    emulator.current().store_box(dst, (batch, head, row, col), src, index)


@emulated_by(_store_box)
@intrinsic
def store_box(typingctx, dst, batch, head, row, col, src, index):
    """Start copying a box from src[index] to ``dst`` at (batch, head, row, col)."""
    places = (col, row, head, batch)

    def codegen(context, builder, signature, args):
        address = _map_address(context, builder, dst, args[0])
        batch_, head_, row_, col_ = args[1:5]
        coordinates = [
            to_i32(context, builder, x, ty)
            for x, ty in zip((col_, row_, head_, batch_), places, strict=True)
        ]
        source = shared_address(context, builder, src, args[5], args[6], index)
        asm = ir.InlineAsm(
            ir.FunctionType(ir.VoidType(), [_I64, *[I32] * 4, I32]),
            "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group "
            "[$0, {$1, $2, $3, $4}], [$5];",
            "l,r,r,r,r,r,~{memory}",
            side_effect=True,
        )
        builder.call(asm, [address, *coordinates, source])

    return types.void(dst, batch, head, row, col, src, index), codegen


def _commit_boxes():
    emulator.current().commit_boxes()


@emulated_by(_commit_boxes)
@intrinsic
def commit_boxes(typingctx):
    """Close this thread's current group of ``store_box``: ``cp.async.bulk.commit_group``."""
    return types.void(), statement("cp.async.bulk.commit_group;")


def _wait_boxes_read():
    emulator.current().wait_boxes(written=False)


@emulated_by(_wait_boxes_read)
@intrinsic
def wait_boxes_read(typingctx):
    """Wait until the sources of this thread's groups have been read, and may be overwritten."""
    return types.void(), statement("cp.async.bulk.wait_group.read 0;")


def _wait_boxes():
    emulator.current().wait_boxes(written=True)


@emulated_by(_wait_boxes)
@intrinsic
def wait_boxes(typingctx):
    """Wait until this thread's groups are in global memory: ``cp.async.bulk.wait_group 0``."""
    return types.void(), statement("cp.async.bulk.wait_group 0;")


def _fence_async_proxy():
    context = emulator.current()
    context.fenced()
    context.fence_mbarriers()


@emulated_by(_fence_async_proxy)
@intrinsic
def fence_async_proxy(typingctx):
    """What this thread has written to shared memory is seen by later bulk copies and ``wgmma``, of
    other threads after a barrier: ``fence.proxy.async``.
    """
    return types.void(), statement("fence.proxy.async.shared::cta;")
