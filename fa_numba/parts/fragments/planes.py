"""Planes: two or three 16-bit numbers whose sum is a float32 number, for products on tensor cores.

x = x0 + x1 + ..., and each plane is the nearest 16-bit number to what those before it leave of x:

    A B = A0 B0 + (A0 B1 + A1 B0) + (A0 B2 + A1 B1 + A2 B0) + ...

Of n planes those products are made whose numbers add up to less than n: plane i is 2^-8 i of x in
bfloat16, 2^-11 i in float16.
"""

from functools import cache

from fa_numba.device import device_function, float32, uint32
from fa_numba.intrinsics.arithmetic import ONE, inverse_power, maximum
from fa_numba.parts.fragments.pairs import conversions
from fa_numba.parts.namespace import part

# What a scaled plane of P is multiplied by: float16 has 2^-24 at the least, and P is at most 1; or
# not much more backward, where L may be of other scores to a rounding.
P_SCALE, P_SCALE_BACKWARD = float32(2.0**15), float32(2.0**13)
# Of the largest element that float16 planes are scaled by, which they have from 2^13 to 2^14: it is
# taken to lie between these, so that the powers are float32, and inf is not asked.
TARGET, FINITE = float32(2.0**13), float32(3.4028234e38)
_LEAST, _MOST = float32(2.0**-100), float32(2.0**126)


@part
def make_units(spec):
    """``units(scale, head)``: what Q KT is to be multiplied by for ``scale`` times the scores, and
    P V for the output: planes of float16 are times powers of two.
    """
    scaled, packed = spec.features.scaled, spec.features.packed
    drops = spec.features.dropout and spec.planes > 1
    inverse = float32(1.0 / P_SCALE)

    def units(scale, head):
        unit = ONE
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
    """What planes of a matrix with this largest element are multiplied by: a power of two."""
    return TARGET * inverse_power(min(maximum(size, _LEAST), _MOST))


@cache
def make_split(dtype, planes):
    """``split(words, at, step, low, high)``: the planes of two numbers to words[at], [at + step],
    ..., two 16-bit elements each.
    """
    return _make_split(dtype, planes)


@part
def _make_split(dtype, planes):
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
    """The products that are made, of A's and B's planes, from the smallest on."""
    return [(i, n - i) for n in range(planes - 1, -1, -1) for i in range(n + 1)]


@part
def make_score_factor(spec):
    """``score_factor(scale, head)``: what Q KT is to be multiplied by for ``scale`` times it."""
    scaled, packed = spec.features.scaled, spec.features.packed

    def score_factor(scale, head):
        if scaled:
            options, b = head.options, uint32(0) if packed else head.b
            scale *= options.q_power[b, head.h] * options.k_power[b, head.hk]
        return scale

    return score_factor
