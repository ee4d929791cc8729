"""Barriers in shared memory that count arrivals and bytes: ``mbarrier`` (PTX ISA, sm_90).

A barrier is an element of a shared uint64 array. A phase of the barrier ends when both of these
conditions are met:

- As many threads have arrived as ``init_mbarrier`` was given.
- Copies have delivered all bytes that ``expect_bytes`` announced.

The next phase then begins. A thread waits for the end of a phase by the parity of the phase: 0 for
the first phase, 1 for the second phase, then 0 again, and so on.
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
    """Return a 1-D uint64 array of ``length`` barriers in dynamic shared memory.

    The array begins at byte 8 * ``offset``. ``length`` is a compile-time constant.
    """
    return _tile(types.uint64, ir.IntType(64), offset, length)


def _statement(instruction):
    """Return a function that Numba calls to compile an instruction for a barrier.

    The function takes the Numba types of the arguments, and returns signature and code. In the PTX
    `instruction`, $0 is the address of barriers[index], and $1, $2, ... are integer arguments.
    """

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
    """Initialise barriers[index] for ``count`` arrivals in each phase: ``mbarrier.init``."""
    return _statement("mbarrier.init.shared::cta.b64 [$0], $1;")(typingctx, barriers, index, count)


@emulated_by(lambda barriers, index: emulator.current().arrive_mbarrier(barriers, index))
@intrinsic
def arrive_mbarrier(typingctx, barriers, index):
    """Arrive at barriers[index] without waiting: ``mbarrier.arrive``."""
    return _statement("mbarrier.arrive.shared::cta.b64 _, [$0];")(typingctx, barriers, index)


@emulated_by(lambda *args: emulator.current().arrive_mbarrier(*args))
@intrinsic
def expect_bytes(typingctx, barriers, index, size):
    """Arrive at barriers[index], and announce ``size`` bytes: ``mbarrier.arrive.expect_tx``.

    The current phase then also waits until copies have delivered these bytes.
    """
    text = "mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;"
    return _statement(text)(typingctx, barriers, index, size)


@emulated_by(lambda *args: emulator.current().wait_mbarrier(*args))
@intrinsic
def wait_mbarrier(typingctx, barriers, index, parity):
    """Wait until the phase of barriers[index] with this parity has ended.

    ``parity`` is 0 for the first, third, ... phase, and 1 for the second, fourth, ... phase. The
    instruction is ``mbarrier.try_wait.parity``, in a loop.
    """
    text = (
        "{.reg .pred p; WAIT: mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1; @!p bra WAIT;}"
    )
    return _statement(text)(typingctx, barriers, index, parity)


@emulated_by(lambda: emulator.current().fence_mbarriers())
@intrinsic
def fence_mbarrier_init(typingctx):
    """Make the barriers that this thread has initialised visible to other threads and copies.

    The instruction is ``fence.mbarrier_init``.
    """
    return types.void(), statement("fence.mbarrier_init.release.cluster;")
