"""Planes: two or three 16-bit numbers whose sum approximates a float32 number.

Tensor cores multiply 16-bit numbers. A float32 number x is the sum x0 + x1 + ... of its planes.
Plane i is the 16-bit number that is nearest to x minus the planes before it. A product of two
matrices becomes a sum of products of planes:

    A B = A0 B0 + (A0 B1 + A1 B0) + (A0 B2 + A1 B1 + A2 B0) + ...

With n planes, the kernels compute the products Ai Bj with i + j < n. Plane i is smaller than x by a
factor of about 2^(-8 i) in bfloat16, and 2^(-11 i) in float16.

float16 planes are scaled: an array is multiplied by a power of two before it is split, because the
range of float16 is small.
"""

from functools import cache

from fa_numba.device import device_function, float32, uint32
from fa_numba.dtypes import SCALED_ROWS
from fa_numba.intrinsics.arithmetic import ONE, inverse_power, maximum
from fa_numba.parts.fragments.pairs import conversions
from fa_numba.parts.namespace import part

# Scaled planes of P are multiplied by these powers of two. The smallest float16 is 2^-24, and P is
# at most 1. In the backward pass P can be slightly larger, because L was rounded.
P_SCALE, P_SCALE_BACKWARD = float32(2.0**15), float32(2.0**13)
# Scaling moves the largest element of an array to 2^13 or above, and below 2^14. Elements above
# FINITE (inf and NaN) are ignored. The largest element counts as at least _LEAST and at most _MOST,
# so that the powers of two are float32 numbers.
START = float32(2.0**100)
TARGET, FINITE = float32(2.0**13), float32(3.4028234e38)
_LEAST, _MOST = float32(2.0**-100), float32(2.0**126)


@part
def make_units(spec):
    """Make ``units(scale, head)``, which returns two factors: one for the product Q KT, and the
    first ``unit`` for the product P V.

    Normally the two factors are ``scale`` and 1. Three kinds of kernels need other factors:

    - With scaled planes, both factors also undo the powers of two by which the arrays were
      multiplied.
    - With planes and dropout, the second factor contains 1 / (1 - dropout_p).
    - With pages of e4m3, the second factor is START, which is the first value of ``unit`` in
      ``parts.mma.widened``.
    """
    scaled, packed = spec.features.scaled, spec.features.packed
    drops = spec.features.dropout and spec.planes > 1
    inverse = float32(1.0 / P_SCALE)
    first = START if spec.features.page_scales else ONE

    def units(scale, head):
        unit = first
        if drops:
            unit = head.options.inverse_keep
        if scaled:
            options, b = head.options, uint32(0) if packed else head.b
            scale *= options.q_power[b, head.h] * options.k_power[b, head.hk]
            unit *= inverse * options.v_power[b, head.hk]
        return scale, unit

    return units


@device_function
def power_of_two(size):
    """Return the power of two by which an array is multiplied before it is split into float16
    planes.

    ``size`` is the largest absolute value of the array. If ``size`` is between 2^-100 and 2^126,
    the largest absolute value after the multiplication is at least 2^13 and below 2^14.
    """
    return TARGET * inverse_power(min(maximum(size, _LEAST), _MOST))


@cache
def make_split(dtype, planes):
    """Make ``split(words, at, step, low, high)``, which splits two numbers into planes and stores
    them.

    One 32-bit word contains the same plane of both numbers, ``low`` in the lower half and ``high``
    in the upper half. The word of plane p is stored in ``words[at + p step]``.
    """
    return _make_split(dtype, planes)


@part
def _make_split(dtype, planes):
    """Make the function ``split`` that ``make_split`` describes.

    ``split`` rounds both numbers to the first plane, stores this plane, and computes what is left
    of the numbers. A second function splits the rest into the other planes. This factory makes the
    second function by calling itself with one plane less.
    """
    pack, unpack = conversions(dtype)
    rest = _make_split(dtype, planes - 1) if planes > 1 else _nothing

    def split(words, at, step, low, high):
        word = pack(low, high)
        words[at] = word
        near = unpack(word)
        rest(words, at + step, step, low - near[0], high - near[1])

    return split


@device_function
def _nothing(a, b, c, d, e):
    pass


def pairs_of_planes(planes):
    """Return the pairs (i, j) for which the product of plane i of A and plane j of B is computed.

    The pairs with the smallest products come first, and the pair with the largest product comes
    last.
    """
    return [(i, n - i) for n in range(planes - 1, -1, -1) for i in range(n + 1)]


@part
def make_score_factor(spec):
    """Make ``score_factor(scale, head)``, which returns the factor by which the kernel multiplies
    the product Q KT to get the scores.

    Normally the factor is ``scale``. With scaled planes, it also undoes the powers of two by which
    Q and K were multiplied. With e4m3 and one scale per head, it also contains the scales of Q and
    K. With e4m3 and one scale per block of rows, ``tile_factor`` adds these scales.
    """
    scaled, packed = spec.features.scaled, spec.features.packed
    scales = spec.features.scales == "heads"

    def score_factor(scale, head):
        if scales:
            options = head.options
            scale *= options.q_scale[head.b, head.h] * options.k_scale[head.b, head.hk]
        if scaled:
            options, b = head.options, uint32(0) if packed else head.b
            scale *= options.q_power[b, head.h] * options.k_power[b, head.hk]
        return scale

    return score_factor


@part
def make_tile_factor(spec):
    """Make ``tile_factor(factor, tile)``, which returns the factor of the product Q KT in one tile.

    Normally it is ``factor``, the result of ``score_factor``. For e4m3, Q and K can have a scale
    for each block of rows. The result is then ``factor`` times the scales of the blocks to which
    the tile belongs. All rows of a consumer are in one block of Q, and all columns of the tile are
    in one block of K.
    """
    blocks, ROWS = spec.features.block_scales, SCALED_ROWS

    def tile_factor(factor, tile):
        if blocks:
            head, options = tile.head, tile.head.options
            row, col = uint32(tile.i0 // uint32(ROWS)), uint32(tile.j0 // uint32(ROWS))
            row = uint32(min(row, uint32(options.q_scale.shape[2] - 1)))  # no rows of Q
            factor *= options.q_scale[head.b, head.h, row] * options.k_scale[head.b, head.hk, col]
        return factor

    return tile_factor
