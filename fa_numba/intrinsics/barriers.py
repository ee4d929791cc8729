"""Named barriers, for warps of a block that do different things: ``bar`` (PTX ISA, "bar, barrier").

Beside the barrier of ``syncthreads``, which all threads of the block wait at, a block has fifteen
with the names 1 to 15, for as many of its threads as a call says. A named barrier counts the
threads that come to it, from any warps, and opens when their number is ``threads``; it then starts
again at 0. There are two ways to come. ``sync_named`` waits until the barrier opens, and then sees
what every thread that came wrote to memory before it came. ``arrive_named`` is counted but does not
wait, and so sees nothing of the others. A producer of data uses two barriers: at one it arrives,
and the consumers wait there for the data; at the other it waits, and the consumers arrive there
once they have read the data.
"""

from llvmlite import ir
from numba.core import types
from numba.core.errors import TypingError
from numba.cuda.extending import intrinsic

from fa_numba import emulator
from fa_numba.intrinsics._build import emulated_by, ptx

_ALLOWED = {"barrier": range(1, 16), "threads": range(32, 1025, 32)}


def _refused(name, value):
    """What is wrong with the value of the operand ``name``; an empty string if nothing."""
    allowed = _ALLOWED[name]
    what = f"a multiple of {allowed.step}" if allowed.step > 1 else "an integer"
    text = f"{name} must be {what} from {allowed[0]} to {allowed[-1]}, got {value}"
    return "" if value in allowed else text


def _barrier(instruction, barrier, threads):
    operands = {"barrier": barrier, "threads": threads}
    for name, ty in operands.items():
        if isinstance(ty, types.IntegerLiteral):
            refused = _refused(name, ty.literal_value)
            if refused:
                raise TypingError(refused)
        elif ty not in (types.int32, types.uint32):
            return None

    def codegen(context, builder, signature, args):
        # Constants go into the instruction: a barrier in a register takes all sixteen.
        places: list[str] = []
        values: list[ir.Value] = []
        for ty, value in zip(operands.values(), args, strict=True):
            if isinstance(ty, types.IntegerLiteral):
                places.append(str(ty.literal_value))
            else:
                places.append(f"${len(values)}")
                values.append(value)
        ptx(builder, f"{instruction} {', '.join(places)};", values, meets=True)

    return types.void(barrier, threads), codegen


def _emulation(operation, waits):
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
    """Wait at ``barrier`` until ``threads`` threads, these included, have come: ``bar.sync``.

    ``barrier`` is 1 to 15, ``threads`` a multiple of 32 and the same for all that come: int32,
    uint32 or constants. All lanes of a warp call it together.
    """
    return _barrier("bar.sync", barrier, threads)


@emulated_by(_emulation("arrive_named", waits=False))
@intrinsic
def arrive_named(typingctx, barrier, threads):
    """Be counted at ``barrier`` and go on without waiting: ``bar.arrive``.

    Arguments as of ``sync_named``. A warp must not come to the barrier again before it has opened.
    """
    return _barrier("bar.arrive", barrier, threads)
