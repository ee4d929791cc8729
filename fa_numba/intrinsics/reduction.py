"""Atomic additions to global memory that return no value: ``red`` (PTX ISA, "red").

Each addition counts as one load and one store.
"""

from numba.core import types
from numba.cuda.extending import intrinsic

from fa_numba import emulator
from fa_numba.intrinsics._build import at_global, emulated_by


@emulated_by(lambda array, row, col, value: array.add((row, col), value))
@intrinsic
def add_global(typingctx, array, row, col, value):
    """Add ``value`` atomically to array[row, col]: ``red.global.add.f32``.

    ``array`` is a 2-D global float32 array with any strides.
    """
    text = "red.global.add.f32 [$0], $1;"
    return at_global(text, types.float32, array, row, col, value, contiguous=False)


def _add_pair(array, row, col, x0, x1, adds):
    under = emulator.current().under
    under(adds, array.add, (row, col), x0)
    under(adds, array.add, (row, col + 1), x1)


@emulated_by(_add_pair)
@intrinsic
def add_pair(typingctx, array, row, col, x0, x1, adds):
    """Add x0 and x1 atomically to array[row, col] and array[row, col + 1] if ``adds`` is true.

    The instructions are two ``red.global.add.f32`` with a predicate. The last axis must be
    contiguous.
    """
    two = "@p red.global.add.f32 [$0], $1; @p red.global.add.f32 [$0+4], $2;"
    return at_global(two, types.float32, array, row, col, x0, x1, adds)


def _add_pair_vector(array, row, col, x0, x1, adds):
    emulator.current().under(adds, array.add, (row, col), x0, x1)


@emulated_by(_add_pair_vector)
@intrinsic
def add_pair_vector(typingctx, array, row, col, x0, x1, adds):
    """Add x0 and x1 to array[row, col] and array[row, col + 1] by one instruction.

    Nothing is added if ``adds`` is false. Each of the two additions is atomic. The address must be
    a multiple of 8 bytes. The instruction is ``red.global.add.v2.f32`` (PTX ISA 8.1, sm_90 and
    later).
    """
    one = "@p red.global.add.v2.f32 [$0], {$1, $2};"
    return at_global(one, types.float32, array, row, col, x0, x1, adds)


@emulated_by(lambda array, row, col, x0, x1, x2, x3: array.add((row, col), x0, x1, x2, x3))
@intrinsic
def add_four_vector(typingctx, array, row, col, x0, x1, x2, x3):
    """Add x0, x1, x2 and x3 to array[row, col .. col + 3] by one instruction.

    Each of the four additions is atomic. The address must be a multiple of 16 bytes. The
    instruction is ``red.global.add.v4.f32`` (PTX ISA 8.1, sm_90 and later).
    """
    text = "red.global.add.v4.f32 [$0], {$1, $2, $3, $4};"
    return at_global(text, types.float32, array, row, col, x0, x1, x2, x3)
