"""Integer division by a divisor that all threads share, without a division instruction.

The results are rounded as in Python: ``//`` rounds down, and the sign of ``%`` is the sign of the
divisor.

Let D be the absolute value of the divisor, and M = (2^32 - 1) // D its inverse. A product with M
replaces the division: for 0 <= n < 2^31, the upper 32 bits of n M are n // D, or one less than n //
D. Numba's own ``//`` divides in 64 bits, which takes about 100 instructions for each element of a
tile.

A divisor must be above -2^31. If the divisor is negative, the dividend must be above -2^31 too,
because -(-2^31) is no int32.
"""

from fa_numba import mods
from fa_numba.device import device_function, int32, uint32, uint64


@device_function
def _size(d):
    """Return the absolute value of d, or 1 if d is 0."""
    return uint32(max(int32(1), int32(abs(d))))


@device_function
def _parts(x, d, inverse):
    """Return the quotient x // d, and the absolute value of the remainder x % d.

    ``inverse`` is (2^32 - 1) // |d|, as ``captures.divisor`` computes it. If d is 0, both results
    are 0.
    """
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
    """Return x // d, or 0 if d is 0. ``inverse`` is (2^32 - 1) // |d|."""
    whole, _ = _parts(x, d, inverse)
    return whole


@device_function
def modulo(x, d, inverse):
    """Return x % d, or 0 if d is 0. ``inverse`` is (2^32 - 1) // |d|."""
    _, rest = _parts(x, d, inverse)
    return rest if d > int32(0) else int32(-rest)


# The functions that the text of a user's function calls.
DIVISION = {"divisor": divisor, "floor_divide": floor_divide, "modulo": modulo}
