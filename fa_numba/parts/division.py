"""Integers divided by one that all threads share, as Python rounds: by a product, not a division.

With M = (2^32 - 1) // D, the upper half of n M is n // D or one less, for 0 <= n < 2^31. Numba's
own `//` divides in 64 bits, some 100 instructions for each element of a tile. A divisor d, and what
a negative one divides, are above -2^31, whose negative is no int32.
"""

from fa_numba import mods
from fa_numba.device import device_function, int32, uint32, uint64


@device_function
def _size(d):
    """|d|, and 1 for 0, by which every quotient and rest is 0."""
    return uint32(max(int32(1), int32(abs(d))))


@device_function
def _parts(x, d, inverse):
    """x // d and x - d (x // d) / sign(d), which is not below 0."""
    size = _size(d)
    turned = int32(x if d > int32(0) else -x)
    turned = turned if d != int32(0) else int32(0)
    sign = int32(turned >> int32(31))
    n = uint32(turned ^ sign)
    q = uint32((uint64(n) * uint64(inverse)) >> uint64(32))
    rest = uint32(n - uint32(q * size))
    q = uint32(q + uint32(1)) if rest >= size else q
    whole = int32(int32(q) ^ sign)
    return whole, int32(turned - int32(whole * int32(size)))


divisor = device_function(mods.divisor)


@device_function
def floor_divide(x, d, inverse):
    """x // d; 0 for d = 0."""
    whole, _ = _parts(x, d, inverse)
    return whole


@device_function
def modulo(x, d, inverse):
    """x % d; 0 for d = 0."""
    _, rest = _parts(x, d, inverse)
    return rest if d > int32(0) else int32(-rest)


# What texts of a caller's functions call.
DIVISION = {"divisor": divisor, "floor_divide": floor_divide, "modulo": modulo}
