"""Barriers in shared memory that count arrivals and bytes: ``mbarrier`` (PTX ISA, sm_90).

A barrier is an element of a shared uint64 array. A phase ends when as many threads have arrived as
``init_mbarrier`` said and as many bytes have been copied as ``expect_bytes`` announced. Threads
wait for the end of a phase by its parity: 0 of the first, then 1, 0, ...
"""

from llvmlite import ir
from numba.core import types
from numba.cuda.extending import intrinsic

from fa_numba import emulator
from fa_numba.intrinsics._build import emulated_by, ptx, shared_address, statement, to_i32
from fa_numba.intrinsics.shared import _tile


@emulated_by(lambda offset, length: emulator.current().mbarrier_tile(offset, length))
@intrinsic
def mbarrier_tile(typingctx, offset, length):
    """``length`` barriers from the 8 bytes ``offset`` of dynamic shared memory on."""
    return _tile(types.uint64, ir.IntType(64), offset, length)


def _statement(instruction):
    """``instruction`` with the address of a barrier as $0 and integers as $1, ..."""

    def build(typingctx, barriers, index, *values):
        def codegen(context, builder, signature, args):
            address = shared_address(context, builder, barriers, args[0], args[1], index)
            given = [
                to_i32(context, builder, x, ty) for x, ty in zip(args[2:], values, strict=True)
            ]
            ptx(builder, instruction, [address, *given])

        return types.void(barriers, index, *values), codegen

    return build


@emulated_by(lambda *args: emulator.current().init_mbarrier(*args))
@intrinsic
def init_mbarrier(typingctx, barriers, index, count):
    """A barrier for ``count`` arrivals a phase: ``mbarrier.init``."""
    return _statement("mbarrier.init.shared::cta.b64 [$0], $1;")(typingctx, barriers, index, count)


@emulated_by(lambda barriers, index: emulator.current().arrive_mbarrier(barriers, index))
@intrinsic
def arrive_mbarrier(typingctx, barriers, index):
    return _statement("mbarrier.arrive.shared::cta.b64 _, [$0];")(typingctx, barriers, index)


@emulated_by(lambda *args: emulator.current().arrive_mbarrier(*args))
@intrinsic
def expect_bytes(typingctx, barriers, index, size):
    """Arrive, and announce ``size`` bytes: ``mbarrier.arrive.expect_tx``."""
    text = "mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;"
    return _statement(text)(typingctx, barriers, index, size)


@emulated_by(lambda *args: emulator.current().wait_mbarrier(*args))
@intrinsic
def wait_mbarrier(typingctx, barriers, index, parity):
    """Wait for the end of the phase of this parity: ``mbarrier.try_wait.parity``."""
    text = (
        "{.reg .pred p; WAIT: mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1; @!p bra WAIT;}"
    )
    return _statement(text)(typingctx, barriers, index, parity)


@emulated_by(lambda: emulator.current().fence_mbarriers())
@intrinsic
def fence_mbarrier_init(typingctx):
    return types.void(), statement("fence.mbarrier_init.release.cluster;")
