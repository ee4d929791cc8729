"""Named barriers, for warps that do different things: ``bar`` (PTX ISA, "bar, barrier").

A block has barriers 1 to 15 beside that of ``syncthreads``. One opens when warps of ``threads``
threads have come to it, whichever they are, and is then as new; the other warps go on. Those that
``sync_named`` wait, and then see what all that came did before; those that ``arrive_named`` do not
wait, and see nothing. A producer arrives at one barrier, where its consumers wait for the data, and
waits at another, where they arrive once they have read it.
"""

from llvmlite import ir
from numba.core import types
from numba.core.errors import TypingError
from numba.cuda.extending import intrinsic

from fa_numba import emulator
from fa_numba.intrinsics._build import I32, emulated_by

_ALLOWED = {"barrier": range(1, 16), "threads": range(32, 1025, 32)}


def _refused(name, value):
    """What is wrong with the value of an operand, or an empty string."""
    allowed = _ALLOWED[name]
    steps = f" in steps of {allowed.step}" if allowed.step > 1 else ""
    text = f"{name} = {value}, allowed: {allowed[0]} to {allowed[-1]}{steps}"
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
        asm = ir.InlineAsm(
            ir.FunctionType(ir.VoidType(), [I32] * len(values)),
            f"{instruction} {', '.join(places)};",
            ",".join(["r"] * len(values) + ["~{memory}"]),
            side_effect=True,
        )
        builder.call(asm, values, attrs=("convergent",))

    return types.void(barrier, threads), codegen


def _emulation(operation, waits):
    def emulation(barrier, threads):
        context = emulator.current()
        refused = _refused("barrier", barrier) or _refused("threads", threads)
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
    """Come to ``barrier`` and go on: ``bar.arrive``. Arguments as of ``sync_named``.

    Before the barrier has opened the warp must not come to it again.
    """
    return _barrier("bar.arrive", barrier, threads)
