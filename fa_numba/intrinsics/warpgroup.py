"""Matrix products of a warpgroup, that is, of four neighbouring warps: ``wgmma`` (sm_90a).

A product computes C = A B or C += A B. C has 64 rows and n columns, and is in float32 registers. A
and B are in 16 bits, or in e4m3, a float of 8 bits. B is in shared memory, and A is in shared
memory or in registers.

Arrays of e4m3 are uint16 arrays: an element of 16 bits contains two e4m3, the one with the lower
index in the lower byte. One instruction then sums 32 terms, that is, 16 elements of the array. The
sums of e4m3 products keep fewer bits than float32, see ``KEPT_BITS``.

An operand in shared memory is stored in panels. A panel has 64 columns of 16 bits, so that a row
has 128 bytes. The panels are stored one after the other, and begin at multiples of 1024 bytes. The
chunks (16 bytes) of a row are permuted by the 128-byte swizzle: chunk c of row r is stored at
position c ^ (r % 8). Boxes that ``bulk_copy`` loads have this layout.

A product is still in progress when the call returns. Until ``wait_products``, no thread may access
C or write an operand. Writes of threads to shared memory are visible to a product only after
``fence_async_proxy`` and a barrier.

C is distributed over the threads as by ``mma.sync``. Let w = t // 32 and g = t % 32 // 4 for thread
t of a warpgroup. The thread holds elements of two rows of C: 16 w + g and 16 w + g + 8. In each
group of 8 columns, it holds the columns 2 (t % 4) and 2 (t % 4) + 1. Elements 0 to n/4 - 1 of the
local array of C contain the first row, and elements n/4 to n/2 - 1 the second row (PTX ISA,
"Register Fragments").
"""

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.cuda.extending import intrinsic

from fa_numba import emulator
from fa_numba.intrinsics._build import F32, I32, emulated_by, is_half_array, ptx, shared_address
from fa_numba.intrinsics.float8 import PAIRS_E4M3
from fa_numba.intrinsics.matrix import NUMBERS

I64 = ir.IntType(64)
STEP = 16  # elements of 16 bits of the summed dimension in one instruction
# Fraction bits that the tensor cores keep of a sum, by dtype, where a float32 has more.
KEPT_BITS = {"e4m3": 13}
_NUMBERS = NUMBERS | {"e4m3": PAIRS_E4M3}
PANEL = 64  # columns of a panel
ROW_BYTES = 2 * PANEL
_GROUP_BYTES = 8 * ROW_BYTES  # bytes of eight rows, after which the swizzle pattern repeats
_SWIZZLE_128 = 1 << 62  # the bit of a descriptor for the 128-byte swizzle


def literals(*given):
    """Return the values of compile-time constants. The arguments `given` are their Numba types.

    Return None if one of the arguments is not a compile-time constant.
    """
    if all(isinstance(ty, types.IntegerLiteral) for ty in given):
        return [ty.literal_value for ty in given]
    return None


def _descriptor(builder, address, leading):
    """Return the descriptor of an operand in shared memory, an int64 value.

    `address` is the address of the operand. `leading` is the number of bytes from one panel to the
    next panel, for instructions that read several panels (PTX ISA, "Matrix descriptor").
    """
    low = builder.and_(builder.lshr(address, I32(4)), I32(0x3FFF))
    fixed = (leading >> 4) << 16 | (_GROUP_BYTES >> 4) << 32 | _SWIZZLE_128
    return builder.or_(builder.zext(low, I64), ir.Constant(I64, fixed))


def _step(k: int, rows: int, across: bool) -> int:
    """Return the number to add to an operand's descriptor for step k of a product.

    Each element of C is a sum of products. One step adds 16 terms to this sum. The number is the
    distance of the step's first element from the operand's first element, in units of 16 bytes.

    Normally a step reads 16 columns of a panel. If `across` is set, the operand is stored
    transposed, and a step reads 16 rows of each panel. `rows` is the number of rows of a panel.
    """
    if across:
        return k * STEP * ROW_BYTES >> 4
    return (k * STEP // PANEL * rows * ROW_BYTES + k * STEP % PANEL * 2) >> 4


def _places(n: int) -> list[int]:
    """Return, for each register of the instruction, its index in the local array of C.

    C has `n` columns, so that the instruction has n / 2 registers per thread. Entry e of the result
    is for register e in the order of the PTX ISA. The local array contains all elements of the
    thread's first row of C, and then all elements of its second row.
    """
    return [e // 2 % 2 * (n // 4) + 2 * (e // 4) + e % 2 for e in range(n // 2)]


def _listed(first: int, count: int) -> str:
    """Return a list of `count` operands of PTX, such as "{$0, $1}", from number `first` on."""
    return "{" + ", ".join(f"${first + e}" for e in range(count)) + "}"


def _call(context, builder, rC, C, n, adds, inputs, text):
    """Generate the code of a product.

    rC, C     Numba type and value of the local array of C
    n         number of columns of C
    adds      the product is added to C if `adds` is not 0
    inputs    operands of the PTX that follow the registers of C
    text      function that yields the instructions. Its argument is the number of registers of C,
              which is the number of the first operand of `inputs` in the PTX
    """
    data = context.make_array(rC)(context, builder, C).data
    places = [builder.gep(data, [I32(place)]) for place in _places(n)]
    M = len(places)
    old = [builder.load(place) for place in places] if adds else []
    begin, end = "{ .reg .b64 a, b; wgmma.fence.sync.aligned;", "wgmma.commit_group.sync.aligned; }"
    code = " ".join([begin, *text(M), end])
    _replaced(builder, code, places, [*inputs, *old], len(old))


def _replaced(builder, code, places, given, tied):
    """Generate code that executes PTX, and then stores its float32 results to memory.

    All threads of a warpgroup execute the PTX together.

    builder   llvmlite's builder, to which the code is added
    code      text of the PTX
    places    LLVM pointers: result n of the PTX is stored to pointer n
    given     LLVM values of the operands that the PTX reads
    tied      number of operands, at the end of `given`, that the PTX replaces by results. Operand n
              of them is in the same register as result n
    """
    made = ptx(builder, code, given, [F32] * len(places), tied=tied, convergent=True)
    for value, place in zip(made, places, strict=True):
        builder.store(value, place)


def _instruction(kind: str, n: int, a: str, across: Sequence[int], adds: bool) -> str:
    """Return the PTX of one step of a product with `n` columns.

    `kind` is "f16", "bf16" or "e4m3". `a` is the PTX text of the operand A, a descriptor or a list
    of registers. `across` contains 0 or 1 for each operand in shared memory: 1 if the operand is
    stored transposed. `adds` says whether the step adds to C. If not, it overwrites C.
    """
    narrow = kind == "e4m3"
    terms = 2 * STEP if narrow else STEP
    shape = f"wgmma.mma_async.sync.aligned.m64n{n}k{terms}.f32.{kind}.{kind}"
    modes = ", ".join(map(str, (int(adds), 1, 1, *(() if narrow else across))))
    return f"{shape} {_listed(0, n // 2)}, {a}, b, {modes};"


def _of_shared(kind):
    """Return a function that Numba calls to compile a product with both operands in shared memory.

    The function takes the Numba types of the arguments, and returns signature and code. `kind` is
    "f16", "bf16" or "e4m3", the format of A and B.
    """

    def build(typingctx, rC, n, sA, a, rows_a, across_a, sB, b, rows_b, across_b, steps, adds):
        found = literals(n, rows_a, across_a, rows_b, across_b, steps, adds)
        if found is None or not (is_half_array(sA, 1) and is_half_array(sB, 1)):
            return None
        N, RA, TA, RB, TB, K, more = found
        if kind == "e4m3" and (TA or TB):
            return None

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
    """Return the emulation of a product with both operands in shared memory.

    `kind` is "f16", "bf16" or "e4m3".
    """

    def emulation(rC, n, sA, a, rows_a, across_a, sB, b, rows_b, across_b, steps, adds):
        A, B = (sA, a, rows_a, across_a), (sB, b, rows_b, across_b)
        _multiply(kind, rC, n, A, B, steps, adds)

    return emulation


def _emulation_of_registers(kind):
    """Return the emulation of a product with A in registers.

    `kind` is "f16", "bf16" or "e4m3".
    """

    def emulation(rC, n, rA, a, sB, b, rows_b, across_b, steps, adds):
        _multiply(kind, rC, n, (rA, a), (sB, b, rows_b, across_b), steps, adds)

    return emulation


def _multiply(kind, rC, n, A, B, steps, adds):
    """Emulate a product, see `emulator.products.Products.multiply`."""
    if kind == "e4m3" and any(operand[3] for operand in (A, B) if len(operand) == 4):
        raise ValueError(
            "across_a and across_b must be 0 for e4m3, got 1: wgmma reads no transposed operands "
            "of 8 bits. Store the operand so that a row contains all terms of one sum"
        )
    kept = KEPT_BITS.get(kind)
    emulator.current().multiply(_NUMBERS[kind], rC, n, A, B, steps, adds, kept)


@emulated_by(_emulation("f16"))
@intrinsic
def multiply_f16(typingctx, rC, n, sA, a, rows_a, across_a, sB, b, rows_b, across_b, steps, adds):
    """Start C = A B, or C += A B if ``adds`` is 1, with A and B in float16.

    Each element of C is a sum of 16 * ``steps`` terms. C is in the local float32 array ``rC``. n,
    the number of columns of C, is a multiple of 8 up to 256.

    A: (64, 16 * steps) begins at element ``a`` of the shared array ``sA``, in panels of ``rows_a``
    rows. B begins at element ``b`` of the shared array ``sB``, in panels of ``rows_b`` rows. B is
    stored as (n, 16 * steps), so that a row of memory contains a column of B.

    If ``across_a`` is 1, A is stored transposed, as (16 * steps, 64). If ``across_b`` is 1, B is
    stored as (16 * steps, n). All arguments except rC, sA, a, sB and b are compile-time constants.
    """
    given = (rC, n, sA, a, rows_a, across_a, sB, b, rows_b, across_b, steps, adds)
    return _of_shared("f16")(typingctx, *given)


@emulated_by(_emulation("bf16"))
@intrinsic
def multiply_bf16(typingctx, rC, n, sA, a, rows_a, across_a, sB, b, rows_b, across_b, steps, adds):
    """Start C = A B, or C += A B if ``adds`` is 1, with A and B in bfloat16.

    The arguments are those of ``multiply_f16``.
    """
    given = (rC, n, sA, a, rows_a, across_a, sB, b, rows_b, across_b, steps, adds)
    return _of_shared("bf16")(typingctx, *given)


@emulated_by(_emulation("e4m3"))
@intrinsic
def multiply_e4m3(typingctx, rC, n, sA, a, rows_a, across_a, sB, b, rows_b, across_b, steps, adds):
    """Start C = A B, or C += A B if ``adds`` is 1, with A and B in e4m3.

    ``sA`` and ``sB`` are uint16 arrays with two e4m3 per element. The sum has 32 * ``steps`` terms,
    which are 16 * ``steps`` elements of a row. ``across_a`` and ``across_b`` must be 0. The
    arguments are otherwise those of ``multiply_f16``, and positions and rows count elements of 16
    bits.
    """
    given = (rC, n, sA, a, rows_a, across_a, sB, b, rows_b, across_b, steps, adds)
    return _of_shared("e4m3")(typingctx, *given)


def _of_registers(kind):
    """Return a function that Numba calls to compile a product with A in registers.

    The function takes the Numba types of the arguments, and returns signature and code. `kind` is
    "f16", "bf16" or "e4m3", the format of A and B.
    """

    def build(typingctx, rC, n, rA, a, sB, b, rows_b, across_b, steps, adds):
        found = literals(n, a, rows_b, across_b, steps, adds)
        if found is None or not is_half_array(sB, 1):
            return None
        N, FIRST, RB, TB, K, more = found
        if kind == "e4m3" and TB:
            return None

        def text(first):
            for k in range(K):
                yield f"add.s64 b, ${first + 4 * K}, {_step(k, RB, TB)};"
                words = _listed(first + 4 * k, 4)
                yield _instruction(kind, N, words, (TB,), bool(more or k))

        def codegen(context, builder, signature, args):
            data = context.make_array(rA)(context, builder, args[2]).data
            # rA contains the words of the first row, then those of the second row. A word is a pair
            # of columns, from column 8 j + 2 (t % 4) on.
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
    """Start C = A B, or C += A B if ``adds`` is 1. A is in registers, and A and B are float16.

    Each thread holds 4 * ``steps`` words (uint32) of A, in the local array ``rA`` from element
    ``a`` on. ``a`` is a compile-time constant. Each word contains two neighbouring elements of a
    row, as ``pack_f16`` returns them. The words are in the same order as the elements of C in
    ``rC``: first all words of the thread's first row, and then all words of its second row. The
    other arguments are those of ``multiply_f16``.
    """
    return _of_registers("f16")(typingctx, rC, n, rA, a, sB, b, rows_b, across_b, steps, adds)


@emulated_by(_emulation_of_registers("bf16"))
@intrinsic
def multiply_registers_bf16(typingctx, rC, n, rA, a, sB, b, rows_b, across_b, steps, adds):
    """Start C = A B, or C += A B if ``adds`` is 1. A is in registers, and A and B are bfloat16.

    The words of ``rA`` are as ``pack_bf16`` returns them. The arguments are those of
    ``multiply_registers_f16``.
    """
    return _of_registers("bf16")(typingctx, rC, n, rA, a, sB, b, rows_b, across_b, steps, adds)


@emulated_by(_emulation_of_registers("e4m3"))
@intrinsic
def multiply_registers_e4m3(typingctx, rC, n, rA, a, sB, b, rows_b, across_b, steps, adds):
    """Start C = A B, or C += A B if ``adds`` is 1, with A in registers, in e4m3.

    Each thread holds 4 * ``steps`` words of A. A word contains four e4m3 of a row, as ``pack_e4m3``
    returns them. Four threads share each 16 terms of the sum: thread t % 4 = n holds the terms 4 n
    to 4 n + 3 in one word.

    The registers of a result C contain other columns: thread n holds the columns 2 n, 2 n + 1, 2 n
    + 8 and 2 n + 9 of each 16 columns. A kernel that uses an earlier result as A may pack these
    four numbers into one word. The terms of B must then be stored in the same order.

    ``across_b`` must be 0. The arguments are otherwise those of ``multiply_registers_f16``.
    """
    return _of_registers("e4m3")(typingctx, rC, n, rA, a, sB, b, rows_b, across_b, steps, adds)


@emulated_by(lambda rC, count, pending: emulator.current().wait_products(rC, count, pending))
@intrinsic
def wait_products(typingctx, rC, count, pending):
    """Wait until all products of this warpgroup are complete, except the last ``pending`` products.

    ``rC`` is the local array with the result of a product that is then complete, and ``count`` is
    the number of its registers. The thread may access these registers after the call. ``count`` and
    ``pending`` are compile-time constants. The instruction is ``wgmma.wait_group``.
    """
    found = literals(count, pending)
    if found is None:
        return None

    def codegen(context, builder, signature, args):
        data = context.make_array(rC)(context, builder, args[0]).data
        places = [builder.gep(data, [I32(e)]) for e in range(found[0])]
        # The registers are operands of the PTX, so that the compiler cannot read them earlier.
        code, given = f"wgmma.wait_group.sync.aligned {found[1]};", map(builder.load, places)
        _replaced(builder, code, places, list(given), len(places))

    return types.void(rC, count, pending), codegen


def _registers(verb):
    """Return a function that Numba calls to compile ``setmaxnreg``.

    The function takes the Numba type of the argument, and returns signature and code. `verb` is
    "inc" or "dec".
    """

    def build(typingctx, count):
        found = literals(count)
        if found is None:
            return None

        def codegen(context, builder, signature, args):
            ptx(builder, f"setmaxnreg.{verb}.sync.aligned.u32 {found[0]};", convergent=True)

        return types.void(count), codegen

    return build


@emulated_by(lambda count: emulator.current().set_registers(count, "take_registers"))
@intrinsic
def take_registers(typingctx, count):
    """Raise the registers of each thread of this warpgroup to ``count``: ``setmaxnreg.inc``.

    The call waits until other warpgroups have given up enough registers. ``count`` is a multiple of
    8 from 24 to 256.
    """
    return _registers("inc")(typingctx, count)


@emulated_by(lambda count: emulator.current().set_registers(count, "give_registers"))
@intrinsic
def give_registers(typingctx, count):
    """Reduce the registers of each thread of this warpgroup to ``count``: ``setmaxnreg.dec``.

    ``count`` is a multiple of 8 from 24 to 256.
    """
    return _registers("dec")(typingctx, count)


# By the name of a dtype in matrix instructions (``dtypes.DType.matrix``).
MULTIPLY: dict[str | None, Any] = {
    "f16": multiply_f16,
    "bf16": multiply_bf16,
    "e4m3": multiply_e4m3,
}
MULTIPLY_REGISTERS: dict[str | None, Any] = {
    "f16": multiply_registers_f16,
    "bf16": multiply_registers_bf16,
    "e4m3": multiply_registers_e4m3,
}
