"""Named barriers, at which some warps of a thread block wait: ``bar`` (PTX ISA, "bar, barrier").

A thread block has fifteen named barriers, with the numbers 1 to 15, in addition to the barrier of
``syncthreads``. A named barrier counts the threads that arrive, from any warps. It opens when
``threads`` threads have arrived, and then begins again at 0. There are two ways to arrive:

- ``sync_named`` waits until the barrier opens. The waiting thread then sees everything that the
  other threads wrote to memory before they arrived.
- ``arrive_named`` does not wait. The thread therefore sees nothing new.

For example, a producer of data uses two barriers. It arrives at the first barrier, where the
consumers wait for the data. It waits at the second barrier, where the consumers arrive when they
have read the data.
"""

from llvmlite import ir
from numba.core import types
from numba.core.errors import TypingError
from numba.cuda.extending import intrinsic

from fa_numba import emulator
from fa_numba.intrinsics._build import emulated_by, ptx

_ALLOWED = {"barrier": range(1, 16), "threads": range(32, 1025, 32)}


def _refused(name, value):
    """Return an error message if `value` is not allowed for the argument `name`, otherwise ""."""
    allowed = _ALLOWED[name]
    what = f"a multiple of {allowed.step}" if allowed.step > 1 else "an integer"
    text = f"{name} must be {what} from {allowed[0]} to {allowed[-1]}, got {value}"
    return "" if value in allowed else text


def _barrier(instruction, barrier, threads):
    """Return signature and code of the instruction ``bar.sync`` or ``bar.arrive``.

    `barrier` and `threads` are the Numba types of the arguments of the call.
    """
    operands = {"barrier": barrier, "threads": threads}
    for name, ty in operands.items():
        if isinstance(ty, types.IntegerLiteral):
            refused = _refused(name, ty.literal_value)
            if refused:
                raise TypingError(refused)
        elif ty not in (types.int32, types.uint32):
            return None

    def codegen(context, builder, signature, args):
        # Constants go into the instruction: if the number is in a register, the compiler must
        # assume that the kernel uses all sixteen barriers.
        places: list[str] = []
        values: list[ir.Value] = []
        for ty, value in zip(operands.values(), args, strict=True):
            if isinstance(ty, types.IntegerLiteral):
                places.append(str(ty.literal_value))
            else:
                places.append(f"${len(values)}")
                values.append(value)
        ptx(builder, f"{instruction} {', '.join(places)};", values, convergent=True)

    return types.void(barrier, threads), codegen


def _emulation(operation, waits):
    """Return the emulation of ``bar.sync`` (`waits` is True) or ``bar.arrive`` (`waits` is False).

    `operation` is the name of the intrinsic, for error messages.
    """

    def emulation(barrier, threads):
        context = emulator.current()
        lane = context.first_lane()
        operands = {"barrier": barrier, "threads": threads}
        for name, value in operands.items():
            refused = _refused(name, context.of_lane(value, lane))
            if refused:
                raise context.fault(emulator.BarrierMisuse, f"{operation}: {refused}")
        context.named_barrier(operation, barrier, threads, waits)

    return emulation


@emulated_by(_emulation("sync_named", waits=True))
@intrinsic
def sync_named(typingctx, barrier, threads):
    """Wait at ``barrier`` until ``threads`` threads have arrived: ``bar.sync``.

    ``threads`` includes the calling threads. It is a multiple of 32, and equal in all threads that
    arrive at this barrier. ``barrier`` is 1 to 15. Both arguments are int32, uint32 or constants.
    All lanes of a warp must make the call together.
    """
    return _barrier("bar.sync", barrier, threads)


@emulated_by(_emulation("arrive_named", waits=False))
@intrinsic
def arrive_named(typingctx, barrier, threads):
    """Arrive at ``barrier`` without waiting: ``bar.arrive``.

    The arguments are those of ``sync_named``. A warp must not arrive again before the barrier has
    opened.
    """
    return _barrier("bar.arrive", barrier, threads)
