"""Dtypes of 16 bits as parameters of tests; `helpers` has the calls and what they are held to."""

import pytest
from helpers import ml_dtypes, numpy_dtype, random_inputs  # noqa: F401

# Where S does not pass through memory.
FLASH = ("fa1", "fa2")

every_flash = pytest.mark.parametrize("algorithm", FLASH)
no_bfloat16 = pytest.mark.skipif(ml_dtypes is None, reason="ml_dtypes is not installed")
BFLOAT16 = pytest.param("bfloat16", marks=no_bfloat16)
# Each dtype in one of the layouts.
DTYPES_AND_LAYOUTS = [
    pytest.param("bfloat16", "padded", marks=no_bfloat16),
    ("float16", "transposed"),
]
every_dtype = pytest.mark.parametrize("dtype", ["float16", BFLOAT16])
# bfloat16 differs in three instructions alone: where the shapes are what is tested it is slow.
SLOW_BFLOAT16 = pytest.param("bfloat16", marks=[no_bfloat16, pytest.mark.slow])


def half_inputs(dtype, *sizes, **options):
    """q, k and v, normally distributed and then rounded."""
    return random_inputs(*sizes, dtype=dtype, **options)
