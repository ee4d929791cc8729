"""Arrays in 8 bits: ``quantize`` converts an array to e4m3 with scales."""

from typing import Any, Literal

from fa_numba.host import quantizing
from fa_numba.typing import Array, Layout, Stream


def quantize(
    x: Array, per: Literal["tensor", "head", "block"] = "head", rotate: int | None = None, *,
    layout: Layout | None = None, stream: Stream = None,
) -> tuple[Any, Any]:  # fmt: skip
    """Convert an array to float8_e4m3fn with float32 scales, for attention in FP8.

    A number x is stored as the e4m3 number that is nearest to x / scale. The numbers that share a
    scale fill the range of e4m3: the largest of them is stored as 448 or -448.

    Parameters
    ----------
    x : array
        Queries, keys or values, shape (batch, heads, seqlen, head_dim), dtype float32, float16 or
        bfloat16, any strides. head_dim must be a multiple of 16, at most 256.
    per : {"tensor", "head", "block"}, default "head"
        Which numbers share a scale: the complete array, each head of each batch entry, or each 128
        rows of a head. "block" reads ``x`` once, the other two read ``x`` twice.
    rotate : int, optional
        Seed of a rotation of each row, from 0 to 2**64 - 1. None means no rotation. Rotate q and k
        with the same seed: their products stay the same, and outliers are spread over all columns,
        so that the error of e4m3 is smaller. Do not rotate v. head_dim must be a power of two.
    layout : {"bhnd", "bnhd"}, default "bhnd"
        "bnhd" if ``x`` has the shape (batch, seqlen, heads, head_dim).
    stream : CUDA stream or int, optional
        Stream of torch, CuPy or Numba, or its address, on which the kernels run. None takes the
        current stream of the library of ``x``. On the emulator, only None is allowed.

    Returns
    -------
    stored : array
        The e4m3 numbers, a new contiguous array with the shape of ``x``, on the device of ``x``.
        The dtype is float8_e4m3fn in torch, JAX and NumPy (of the package ml_dtypes), and uint8 in
        libraries that have no such dtype.
    scales : array
        The scales in float32, so that ``x`` is about ``stored * scales``. The shape is (batch,
        heads, ceil(seqlen / 128)) for "block", and (batch, heads) for "head" and "tensor". For
        "tensor", all elements are equal.

    Raises
    ------
    TypeError
        If an argument has a wrong type or dtype.
    ValueError
        If a value or a shape is not allowed, if the GPU is older than compute capability 8.9, or if
        the emulator would run for more than about 30 seconds.
    ImportError
        If ``x`` is a NumPy array and the package ml_dtypes is not installed.

    See Also
    --------
    reference.dequantize : Return ``stored * scales`` in float64.
    reference.rotate : Return the rotated rows in float64.

    Notes
    -----
    The scale is the largest absolute number divided by 448, the largest number of e4m3. If the
    largest number is below 2^-100, the scale is 1. Infinity and NaN are ignored for the scale, and
    are stored as NaN. With ``rotate``, they make their complete row NaN.

    With ``rotate``, each row is multiplied by random signs and by a Hadamard matrix, divided by the
    square root of head_dim ("incoherent processing" in the paper of FlashAttention-3).

    Examples
    --------
    >>> import numpy as np, fa_numba
    >>> x = np.random.default_rng(0).standard_normal((1, 2, 16, 32), np.float32)
    >>> stored, scales = fa_numba.quantize(x, per="head")
    >>> stored.dtype.name, scales.shape
    ('float8_e4m3fn', (1, 2))
    >>> error = fa_numba.reference.relative_error(fa_numba.reference.dequantize(stored, scales), x)
    >>> 0.02 < error < 0.03
    True
    """
    return quantizing.quantize(x, per, rotate, layout, stream)
