"""Conversions to and from e4m3 against another library, and on a GPU the instructions."""

import ml_dtypes
import numpy as np
from test_intrinsics import run

from fa_numba.device import cuda, uint32
from fa_numba.intrinsics.float8 import bits_e4m3, pack_e4m3, unpack_e4m3, widen_e4m3


def test_the_nearest_number_is_that_of_ml_dtypes():
    """For numbers with every combination of the upper 16 bits, and of ties and their neighbours."""
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    x = np.concatenate([upper, upper | 0x8000, upper | 1, upper - 1]).view(np.float32)
    with np.errstate(invalid="ignore"):
        near = np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    assert np.array_equal(bits_e4m3(x), np.where(x != x, 0x7F, near))


def _kernel(X, packed, Y, halves):
    t = uint32(cuda.threadIdx.x)
    word = pack_e4m3(X[t, 0], X[t, 1], X[t, 2], X[t, 3])
    packed[t] = word
    Y[t, 0], Y[t, 1], Y[t, 2], Y[t, 3] = unpack_e4m3(word)
    halves[t, 0], halves[t, 1] = widen_e4m3(word)


def test_four_numbers_and_back(device):
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((32, 4)) * 2.0 ** rng.integers(-12, 10, (32, 4))).astype(np.float32)
    x[3] = np.nan, np.inf, -np.inf, -0.0
    words, back = np.zeros(32, np.uint32), np.zeros_like(x)
    halves = np.zeros((32, 2), np.uint32)
    _, words, back, halves = run(device, _kernel, x, words, back, halves)
    wanted = np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    assert np.array_equal(words.view(ml_dtypes.float8_e4m3fn), wanted.reshape(-1), equal_nan=True)
    assert np.array_equal(back, wanted.astype(np.float32), equal_nan=True)
    assert np.array_equal(halves.view(np.float16), wanted.astype(np.float16), equal_nan=True)
