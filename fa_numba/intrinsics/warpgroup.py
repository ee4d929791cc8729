"""Products of a warpgroup, four warps side by side: ``wgmma`` (PTX ISA, sm_90a).

C = A B, or C += A B, with C of 64 rows and n columns in float32 registers, and A and B in 16 bits.
Operands in shared memory lie in panels: 64 columns of 16 bits, 128 bytes a row, one panel behind
the other, each row's chunks of 16 bytes in the order of the 128-byte swizzle: chunk c of row r at
c ^ r % 8. Panels begin at multiples of 1024 bytes. Boxes of ``bulk_copy`` come so.

A product is on its way when the call returns: nobody may touch C, nor write an operand, before
``wait_products``. What threads write to shared memory is seen by a product after
``fence_async_proxy`` and a barrier.

Thread t of a warpgroup has of C, as of S in the other units, rows 16 w + g and 16 w + g + 8 with
w = t // 32 and g = t % 32 // 4, and of each 8 columns 2 (t % 4) and the next. Registers 0 to
n/4 - 1 are the first row's, n/4 to n/2 - 1 the second's (PTX ISA, "Register Fragments").
"""

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.cuda.extending import intrinsic

from fa_numba import emulator
from fa_numba.intrinsics._build import F32, I32, emulated_by, is_half_array, ptx, shared_address
from fa_numba.intrinsics.matrix import NUMBERS

I64 = ir.IntType(64)
STEP = 16  # of the summed dimension, an instruction
PANEL = 64  # columns
ROW_BYTES = 2 * PANEL
_GROUP_BYTES = 8 * ROW_BYTES  # eight rows: what the swizzle repeats after
_SWIZZLE_128 = 1 << 62


def literals(*given):
    """The values of compile-time constants; None if one is no constant."""
    if all(isinstance(ty, types.IntegerLiteral) for ty in given):
        return [ty.literal_value for ty in given]
    return None


def _descriptor(builder, address, leading):
    """An operand at a shared address (PTX ISA, "Matrix descriptor"): ``leading`` bytes lie between
    its panels where the instruction's step crosses them.
    """
    low = builder.and_(builder.lshr(address, I32(4)), I32(0x3FFF))
    fixed = (leading >> 4) << 16 | (_GROUP_BYTES >> 4) << 32 | _SWIZZLE_128
    return builder.or_(builder.zext(low, I64), ir.Constant(I64, fixed))


def _step(k: int, rows: int, across: bool) -> int:
    """What step k adds to a descriptor: along a row, or down the rows of a panel."""
    if across:
        return k * STEP * ROW_BYTES >> 4
    return (k * STEP // PANEL * rows * ROW_BYTES + k * STEP % PANEL * 2) >> 4


def _places(n: int) -> list[int]:
    """The instruction's registers as places in the array of C."""
    return [e // 2 % 2 * (n // 4) + 2 * (e // 4) + e % 2 for e in range(n // 2)]


def _listed(first: int, count: int) -> str:
    return "{" + ", ".join(f"${first + e}" for e in range(count)) + "}"


def _call(context, builder, rC, C, n, adds, inputs, text):
    """The instructions of a product: ``text(first)`` gives them for inputs from ``$first`` on."""
    data = context.make_array(rC)(context, builder, C).data
    places = [builder.gep(data, [I32(place)]) for place in _places(n)]
    M = len(places)
    old = [builder.load(place) for place in places] if adds else []
    begin, end = "{ .reg .b64 a, b; wgmma.fence.sync.aligned;", "wgmma.commit_group.sync.aligned; }"
    code = " ".join([begin, *text(M), end])
    _replaced(builder, code, places, [*inputs, *old], len(old))


def _replaced(builder, code, places, given, tied):
    """What PTX that the warpgroup comes to together gives, to the elements at ``places``."""
    made = ptx(builder, code, given, [F32] * len(places), tied=tied, meets=True)
    for value, place in zip(made, places, strict=True):
        builder.store(value, place)


def _instruction(kind: str, n: int, a: str, across: Sequence[int], adds: bool) -> str:
    shape = f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{kind}.{kind}"
    modes = ", ".join(map(str, (int(adds), 1, 1, *across)))
    return f"{shape} {_listed(0, n // 2)}, {a}, b, {modes};"


def _of_shared(kind):
    def build(typingctx, rC, n, sA, a, rows_a, across_a, sB, b, rows_b, across_b, steps, adds):
        found = literals(n, rows_a, across_a, rows_b, across_b, steps, adds)
        if found is None or not (is_half_array(sA, 1) and is_half_array(sB, 1)):
            return None
        N, RA, TA, RB, TB, K, more = found

        def text(first):
            for k in range(K):
                yield f"add.s64 a, ${first}, {_step(k, RA, TA)};"
                yield f"add.s64 b, ${first + 1}, {_step(k, RB, TB)};"
                yield _instruction(kind, N, "a", (TA, TB), bool(more or k))

        def codegen(context, builder, signature, args):
            A = shared_address(context, builder, sA, args[2], args[3], a)
            B = shared_address(context, builder, sB, args[6], args[7], b)
            inputs = [
                _descriptor(builder, A, RA * ROW_BYTES),
                _descriptor(builder, B, RB * ROW_BYTES),
            ]
            _call(context, builder, rC, args[0], N, more, inputs, text)

        given = (rC, n, sA, a, rows_a, across_a, sB, b, rows_b, across_b, steps, adds)
        return types.void(*given), codegen

    return build


def _emulation(kind):
    def emulation(rC, n, sA, a, rows_a, across_a, sB, b, rows_b, across_b, steps, adds):
        A, B = (sA, a, rows_a, across_a), (sB, b, rows_b, across_b)
        emulator.current().multiply(NUMBERS[kind], rC, n, A, B, steps, adds)

    return emulation


def _emulation_of_registers(kind):
    def emulation(rC, n, rA, a, sB, b, rows_b, across_b, steps, adds):
        B = (sB, b, rows_b, across_b)
        emulator.current().multiply(NUMBERS[kind], rC, n, (rA, a), B, steps, adds)

    return emulation


@emulated_by(_emulation("f16"))
@intrinsic
def multiply_f16(typingctx, rC, n, sA, a, rows_a, across_a, sB, b, rows_b, across_b, steps, adds):
    """Begin C = A B, or with ``adds`` C += A B, over 16 ``steps`` summed elements, in float16.

    A is 64 x 16 steps from element ``a`` of the shared array ``sA`` on, in panels of ``rows_a``
    rows; B is n x 16 steps, each column of B a row of memory, in panels of ``rows_b``. Where
    ``across`` is 1 the rows of memory run across the sum: A's, or B's, transpose lies there. All
    but ``a`` and ``b`` are compile-time constants; n is a multiple of 8 up to 256.
    """
    given = (rC, n, sA, a, rows_a, across_a, sB, b, rows_b, across_b, steps, adds)
    return _of_shared("f16")(typingctx, *given)


@emulated_by(_emulation("bf16"))
@intrinsic
def multiply_bf16(typingctx, rC, n, sA, a, rows_a, across_a, sB, b, rows_b, across_b, steps, adds):
    """``multiply_f16`` with A and B bfloat16."""
    given = (rC, n, sA, a, rows_a, across_a, sB, b, rows_b, across_b, steps, adds)
    return _of_shared("bf16")(typingctx, *given)


def _of_registers(kind):
    def build(typingctx, rC, n, rA, a, sB, b, rows_b, across_b, steps, adds):
        found = literals(n, a, rows_b, across_b, steps, adds)
        if found is None or not is_half_array(sB, 1):
            return None
        N, FIRST, RB, TB, K, more = found

        def text(first):
            for k in range(K):
                yield f"add.s64 b, ${first + 4 * K}, {_step(k, RB, TB)};"
                words = _listed(first + 4 * k, 4)
                yield _instruction(kind, N, words, (TB,), bool(more or k))

        def codegen(context, builder, signature, args):
            data = context.make_array(rA)(context, builder, args[2]).data
            # Words of the first row, then of the second: pairs of columns 8 j + 2 (t % 4).
            order = [e % 2 * (2 * K) + 2 * k + e // 2 for k in range(K) for e in range(4)]
            words = [builder.load(builder.gep(data, [I32(FIRST + place)])) for place in order]
            B = shared_address(context, builder, sB, args[4], args[5], b)
            inputs = [*words, _descriptor(builder, B, RB * ROW_BYTES)]
            _call(context, builder, rC, args[0], N, more, inputs, text)

        return types.void(rC, n, rA, a, sB, b, rows_b, across_b, steps, adds), codegen

    return build


@emulated_by(_emulation_of_registers("f16"))
@intrinsic
def multiply_registers_f16(typingctx, rC, n, rA, a, sB, b, rows_b, across_b, steps, adds):
    """``multiply_f16`` with A in registers: ``rA`` has from ``a`` on 4 steps words of two
    neighbours each, as ``pack_f16`` makes them, in the order of C's registers.
    """
    return _of_registers("f16")(typingctx, rC, n, rA, a, sB, b, rows_b, across_b, steps, adds)


@emulated_by(_emulation_of_registers("bf16"))
@intrinsic
def multiply_registers_bf16(typingctx, rC, n, rA, a, sB, b, rows_b, across_b, steps, adds):
    """``multiply_registers_f16`` with A and B bfloat16, as ``pack_bf16`` makes them."""
    return _of_registers("bf16")(typingctx, rC, n, rA, a, sB, b, rows_b, across_b, steps, adds)


@emulated_by(lambda rC, count, pending: emulator.current().wait_products(rC, count, pending))
@intrinsic
def wait_products(typingctx, rC, count, pending):
    """Wait until at most the last ``pending`` products are on their way: ``wgmma.wait_group``.

    Afterwards the ``count`` registers of ``rC``, the result of one of those that ended, are there.
    """
    found = literals(count, pending)
    if found is None:
        return None

    def codegen(context, builder, signature, args):
        data = context.make_array(rC)(context, builder, args[0]).data
        places = [builder.gep(data, [I32(e)]) for e in range(found[0])]
        # The registers go through it, so that nobody reads them before.
        code, given = f"wgmma.wait_group.sync.aligned {found[1]};", map(builder.load, places)
        _replaced(builder, code, places, list(given), len(places))

    return types.void(rC, count, pending), codegen


def _registers(verb):
    def build(typingctx, count):
        found = literals(count)
        if found is None:
            return None

        def codegen(context, builder, signature, args):
            ptx(builder, f"setmaxnreg.{verb}.sync.aligned.u32 {found[0]};", meets=True)

        return types.void(count), codegen

    return build


@emulated_by(lambda count: emulator.current().set_registers(count, "take_registers"))
@intrinsic
def take_registers(typingctx, count):
    """Give every thread of this warpgroup ``count`` registers: ``setmaxnreg.inc``. It waits for
    others to give some up; a multiple of 8 from 24 to 256.
    """
    return _registers("inc")(typingctx, count)


@emulated_by(lambda count: emulator.current().set_registers(count, "give_registers"))
@intrinsic
def give_registers(typingctx, count):
    """Keep ``count`` registers a thread of this warpgroup, give up others: ``setmaxnreg.dec``."""
    return _registers("dec")(typingctx, count)


# By the name that a dtype's record has for its matrix instruction (``dtypes.DType.matrix``).
MULTIPLY: dict[str | None, Any] = {"f16": multiply_f16, "bf16": multiply_bf16}
MULTIPLY_REGISTERS: dict[str | None, Any] = {
    "f16": multiply_registers_f16,
    "bf16": multiply_registers_bf16,
}
