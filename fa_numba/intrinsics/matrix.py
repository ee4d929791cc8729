"""Tensor cores: matrix products of a warp, and the loads, stores and conversions for them.

    ldmatrix, stmatrix    loads and stores of 8 x 8 tiles in shared memory (stmatrix: sm_90)
    mma.sync              products of 16 x 16 by 16 x 8 matrices
    cvt                   conversions between float32 and pairs of 16-bit floats

The instructions exist from sm_80 on, except for stmatrix. They are described in the PTX ISA.

Each lane of a warp holds a part of each matrix in its registers, a fragment. Let g = l // 4 and t =
l % 4 for lane l. A register (uint32) contains two 16-bit floats, the element with the lower index
in the lower half. The fragments of lane l are (PTX ISA, "Matrix fragments for mma.m16n8k16"):

    A, 16 x 16   a0 = A[g, 2t .. 2t+1]        a1 = A[g+8, 2t .. 2t+1]
                 a2 = A[g, 2t+8 .. 2t+9]      a3 = A[g+8, 2t+8 .. 2t+9]
    B, 16 x 8    b0 = B[2t .. 2t+1, g]        b1 = B[2t+8 .. 2t+9, g]
    C, 16 x 8    c0, c1 = C[g, 2t .. 2t+1]    c2, c3 = C[g+8, 2t .. 2t+1], float32
"""

from typing import Any

import numpy as np
from numba.core import types
from numba.cuda.extending import intrinsic

from fa_numba import emulator
from fa_numba.intrinsics._build import (
    F32,
    FLOAT2_TUPLE,
    I32,
    WORDS,
    emulated_by,
    halves_of,
    is_half_array,
    of_registers,
    ptx,
    shared_address,
)
from fa_numba.intrinsics._fragments import dealt, operands, sums

_WARP = 32
_FULL = 0xFFFFFFFF


def _load_tiles(transposed):
    """Return the emulation of ``ldmatrix``, or of ``ldmatrix.trans`` if `transposed` is True.

    In the emulation, each lane reads one row of an 8 x 8 tile. The elements of all rows are then
    distributed to the lanes.
    """

    def words_of_lanes(row):
        words = np.empty((4, row[0].size), np.int64)
        dealt(np.array(row), transposed, words)
        return words

    def deal(values, present, mask):
        words = words_of_lanes([value.reshape(-1) for value in values])
        return tuple(words.reshape(4, -1, _WARP))

    def emulation(array, index):
        row = array.load(index, 8, pairs=False)
        context = emulator.current()
        if context.whole_warps():
            return tuple(words_of_lanes(row))
        return context.collective("ldmatrix", _FULL, row, deal)

    return emulation


def _ldmatrix(suffix):
    """Return a function that Numba calls to compile ``ldmatrix`` with a suffix, such as ".trans".

    The function takes the Numba types of the arguments, and returns signature and code.
    """
    instruction = f"ldmatrix.sync.aligned.m8n8.x4{suffix}.shared.b16 {{$0,$1,$2,$3}}, [$4];"

    def build(typingctx, array, index):
        if not is_half_array(array, 1) or not isinstance(index, types.Integer):
            return None

        def codegen(context, builder, signature, args):
            address = shared_address(context, builder, array, args[0], args[1], index)
            words = ptx(builder, instruction, [address], [I32] * 4)
            return context.make_tuple(builder, WORDS, words)

        return WORDS(array, index), codegen

    return build


@emulated_by(_load_tiles(False))
@intrinsic
def ldmatrix(typingctx, array, index):
    """Load four 8 x 8 tiles of 16-bit elements by ``ldmatrix.x4``; return a tuple of four uint32.

    Lane l passes the index of row l % 8 of tile l // 8 in ``array``, a 1-D shared uint16 array.
    ``index`` must be a multiple of 8. Word m of the result contains two neighbouring elements of
    tile m: row l // 4, and the columns from 2 (l % 4) on.
    """
    return _ldmatrix("")(typingctx, array, index)


@emulated_by(_load_tiles(True))
@intrinsic
def ldmatrix_transposed(typingctx, array, index):
    """Load four 8 x 8 tiles and transpose each tile; return a tuple of four uint32.

    Word m of the result of lane l contains two elements of tile m in memory: the rows from 2 (l %
    4) on, and column l // 4. The arguments are those of ``ldmatrix``.
    """
    return _ldmatrix(".trans")(typingctx, array, index)


def _rows_of_tiles(values, present, mask):
    """Return the four words that each lane stores to memory in the emulation of ``stmatrix``.

    `values` are the arguments w0 to w3 of ``stmatrix``, for all lanes. Lane l passes two elements
    of row l // 4 of each of the four tiles. The result contains other words for lane l: the eight
    elements of row l % 8 of tile l // 8. `present` and `mask` are not used.
    """
    tiles = np.stack(values).reshape(4, -1, 8, 4)  # tile, warp, row, word of the row
    return tuple(tiles.transpose(3, 1, 0, 2).reshape(4, -1, _WARP))


def _stmatrix(array, index, w0, w1, w2, w3):
    """Store four 8 x 8 tiles of 16-bit elements in an emulated shared array, as ``stmatrix`` does.

    ``index`` and the words w0 to w3 have one value for each lane of the warps.
    """
    words = emulator.current().collective("stmatrix", _FULL, (w0, w1, w2, w3), _rows_of_tiles)
    array.store(index, halves_of(words))


@emulated_by(_stmatrix)
@intrinsic
def stmatrix(typingctx, array, index, w0, w1, w2, w3):
    """Store four 8 x 8 tiles of 16-bit elements by ``stmatrix.x4`` (sm_90).

    Lane l passes the index of row l % 8 of tile l // 8 in ``array``, a 1-D shared uint16 array.
    ``index`` must be a multiple of 8. The words w0 to w3 contain elements of the tiles 0 to 3. In
    each tile, lane l passes the elements of row l // 4, at the columns 2 (l % 4) and 2 (l % 4) + 1.
    """
    words = (w0, w1, w2, w3)
    if not is_half_array(array, 1) or any(word != types.uint32 for word in words):
        return None
    instruction = "stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {$1,$2,$3,$4};"

    def codegen(context, builder, signature, args):
        address = shared_address(context, builder, array, args[0], args[1], index)
        ptx(builder, instruction, [address, *args[2:]])

    return types.void(array, index, *words), codegen


def _float16(words):
    """Return the two float16 numbers of each 32-bit word as float32.

    The last axis of the result is twice as long as the last axis of `words`.
    """
    return words.view(np.float16).astype(np.float32)


def _bfloat16(words):
    """Return the two bfloat16 numbers of each 32-bit word as float32.

    The last axis of the result is twice as long as the last axis of `words`.
    """
    return (words.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


# The value of each combination of 16 bits, as float32, by format.
NUMBERS = {
    kind: to_float(np.arange(1 << 16, dtype=np.uint32)[:, None])[:, 0].copy()
    for kind, to_float in (("f16", _float16), ("bf16", _bfloat16))
}


def _multiply(numbers):
    """Return the emulation of a matrix product, ``mma_f16`` or ``mma_bf16``.

    `numbers` is an array: element n is the value of the 16-bit float with the bits n.
    """

    def product(words, c):
        lanes = words[0].size
        warps = lanes // _WARP
        A, B = np.empty((warps, 16, 16), np.float32), np.empty((warps, 16, 8), np.float32)
        operands(numbers, *words, A, B)
        C, made = np.empty((2, 4, lanes), np.float32)
        for row, value in zip(C, c, strict=True):
            row[:] = value
        sums(C, A @ B, made)
        return made

    def product_of_warps(values, present, mask):
        flat = [value.reshape(-1) for value in values]
        return tuple(product(flat[:6], flat[6:]).reshape(4, -1, _WARP))

    def emulation(rC, low, high, a0, a1, a2, a3, b0, b1):
        context = emulator.current()
        context.instruction("mma")
        places = (low, low + 1, high, high + 1)
        c = tuple(rC[place] for place in places)
        words = (a0, a1, a2, a3, b0, b1)
        if context.whole_warps() and all(isinstance(word, np.ndarray) for word in words):
            made = product(words, c)
        else:
            made = context.collective("mma", _FULL, (*words, *c), product_of_warps)
        for place, value in zip(places, made, strict=True):
            rC.put(place, value)

    return emulation


def _mma(kind):
    """Return a function that Numba calls to compile a product by ``mma.sync``.

    The function takes the Numba types of the arguments, and returns signature and code. `kind` is
    "f16" or "bf16", the format of A and B.
    """
    instruction = (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 "
        "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$0,$1,$2,$3};"
    )

    def build(typingctx, rC, low, high, a0, a1, a2, a3, b0, b1):
        words = (a0, a1, a2, a3, b0, b1)
        if not isinstance(rC, types.Array) or rC.dtype != types.float32:
            return None
        if any(word != types.uint32 for word in words):
            return None

        def codegen(context, builder, signature, args):
            data = context.make_array(rC)(context, builder, args[0]).data
            starts = [
                context.cast(builder, args[1], low, types.int32),
                context.cast(builder, args[2], high, types.int32),
            ]
            places = [
                builder.gep(data, [builder.add(start, I32(n))]) for start in starts for n in (0, 1)
            ]
            given = [*args[3:], *map(builder.load, places)]
            pure = {"memory": False, "side_effect": False}
            made = ptx(builder, instruction, given, [F32] * 4, tied=4, **pure)
            for value, place in zip(made, places, strict=True):
                builder.store(value, place)

        return types.void(rC, low, high, *words), codegen

    return build


@emulated_by(_multiply(NUMBERS["f16"]))
@intrinsic
def mma_f16(typingctx, rC, low, high, a0, a1, a2, a3, b0, b1):
    """Compute C += A B for the matrices of a warp by ``mma.sync.m16n8k16``.

    A and B are float16, and C is float32. a0 to a3 and b0 to b1 are the lane's fragments of A and B
    as uint32, in the layout that this module describes. The lane's part of C is in the local
    float32 array ``rC``: c0 and c1 are the elements low and low + 1, and c2 and c3 are the elements
    high and high + 1.
    """
    return _mma("f16")(typingctx, rC, low, high, a0, a1, a2, a3, b0, b1)


@emulated_by(_multiply(NUMBERS["bf16"]))
@intrinsic
def mma_bf16(typingctx, rC, low, high, a0, a1, a2, a3, b0, b1):
    """Compute C += A B as ``mma_f16`` does, with A and B in bfloat16."""
    return _mma("bf16")(typingctx, rC, low, high, a0, a1, a2, a3, b0, b1)


def _pack(kind, low, high):
    """Return signature and code of a conversion of two floats to a pair of 16-bit floats.

    `kind` is a part of the instruction's name, such as ".f16".
    """
    text = f"cvt.rn{kind}x2.f32 $0, $2, $1;"
    return of_registers(text, types.float32, low, high, returns=types.uint32)


def _packed(to_bits):
    """Return the emulation of a conversion to a pair of 16-bit floats.

    `to_bits` converts float32 to the bits of 16-bit floats.
    """

    def emulation(low, high):
        many = isinstance(low, np.ndarray) or isinstance(high, np.ndarray)
        with np.errstate(over="ignore"):
            pair = [to_bits(np.asarray(x, np.float32)) for x in (low, high)]
        word = pair[0] | pair[1] << 16
        return word if many else int(word)

    return emulation


def _bits_f16(x):
    """Return the bits of the float16 numbers that are nearest to the numbers in `x`."""
    return x.astype(np.float16).view(np.uint16).astype(np.int64)


def _bits_bf16(x):
    """Return the bits of the bfloat16 numbers that are nearest to the numbers in `x`.

    Ties are rounded to even. NaN becomes the NaN that the instruction ``cvt`` returns.
    """
    bits = x.view(np.uint32).astype(np.int64)
    return np.where(x != x, 0x7FFF, bits + 0x7FFF + (bits >> 16 & 1) >> 16)


@emulated_by(_packed(_bits_f16))
@intrinsic
def pack_f16(typingctx, low, high):
    """Return two float32 as a pair of float16 in a uint32, rounded to nearest.

    ``low`` is in the lower half. The instruction is ``cvt.rn.f16x2.f32``.
    """
    return _pack(".f16", low, high)


@emulated_by(_packed(_bits_bf16))
@intrinsic
def pack_bf16(typingctx, low, high):
    """Return two float32 as a pair of bfloat16 in a uint32, rounded to nearest.

    ``low`` is in the lower half. The instruction is ``cvt.rn.bf16x2.f32``.
    """
    return _pack(".bf16", low, high)


def _positive(to_bits):
    """Return the emulation of a conversion in which negative numbers become 0.

    `to_bits` is the emulation of the same conversion with negative numbers.
    """

    def emulation(low, high):
        with np.errstate(invalid="ignore"):
            low, high = (np.where(x < 0, np.float32(0.0), x) for x in (low, high))
        word = to_bits(low, high)
        return word if low.ndim or high.ndim else int(word)

    return emulation


@emulated_by(_positive(_packed(_bits_f16)))
@intrinsic
def pack_positive_f16(typingctx, low, high):
    """Return max(low, 0) and max(high, 0) as ``pack_f16`` does: ``cvt.rn.relu.f16x2.f32``."""
    return _pack(".relu.f16", low, high)


@emulated_by(_positive(_packed(_bits_bf16)))
@intrinsic
def pack_positive_bf16(typingctx, low, high):
    """Return max(low, 0) and max(high, 0) as ``pack_bf16`` does: ``cvt.rn.relu.bf16x2.f32``."""
    return _pack(".relu.bf16", low, high)


# PTX that unpacks a word. A bfloat16 is the upper half of a float32, and ``cvt`` supports bfloat16
# from sm_90 on only.
_UNPACK = {
    "f16": "{.reg .b16 l, h; mov.b32 {l, h}, $2; cvt.f32.f16 $0, l; cvt.f32.f16 $1, h;}",
    "bf16": "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;",
}


def _unpacked(to_float):
    """Return the emulation of the conversion of a pair of 16-bit floats to two float32.

    `to_float` converts an array of 32-bit words to the float32 numbers in their halves.
    """

    def emulation(word):
        words = np.atleast_1d(np.asarray(word)).astype(np.uint32)
        low, high = to_float(words[:, None]).T
        if isinstance(word, np.ndarray):
            return low, high
        return low[0], high[0]

    return emulation


@emulated_by(_unpacked(_float16))
@intrinsic
def unpack_f16(typingctx, word):
    """Return the two float16 of a uint32 as float32, the lower half first: ``cvt.f32.f16``."""
    return of_registers(_UNPACK["f16"], types.uint32, word, returns=FLOAT2_TUPLE)


@emulated_by(_unpacked(_bfloat16))
@intrinsic
def unpack_bf16(typingctx, word):
    """Return the two bfloat16 of a uint32 as float32, the lower half first.

    The conversion is exact: a shift and a mask.
    """
    return of_registers(_UNPACK["bf16"], types.uint32, word, returns=FLOAT2_TUPLE)


# By the name of a dtype in matrix instructions (``dtypes.DType.matrix``).
MMA: dict[str | None, Any] = {"f16": mma_f16, "bf16": mma_bf16}
CONVERSIONS: dict[str | None, tuple[Any, Any]] = {
    "f16": (pack_f16, unpack_f16),
    "bf16": (pack_bf16, unpack_bf16),
}
PACK_POSITIVE: dict[str | None, Any] = {"f16": pack_positive_f16, "bf16": pack_positive_bf16}
