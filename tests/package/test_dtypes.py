"""The records of the dtypes: what each decides is true of the type itself."""

import numpy as np
import pytest

from fa_numba.dtypes import CHUNK_BYTES, DTYPES


@pytest.mark.parametrize("name", DTYPES)
def test_a_dtypes_record(name):
    dtype = DTYPES[name]
    assert dtype.name == name
    assert np.dtype(dtype.host).itemsize == dtype.bytes
    assert dtype.chunk * dtype.bytes == CHUNK_BYTES
    assert (dtype.matrix is None) == dtype.sums_in_place == (dtype.host == name)


def test_nan_is_one_as_kernels_read_it():
    bits = {name: np.array(dtype.nan, dtype.host) for name, dtype in DTYPES.items()}
    assert np.isnan(bits["float32"]) and np.isnan(bits["float16"].view(np.float16))
    widened = bits["bfloat16"].astype(np.uint32) << 16
    assert np.isnan(widened.view(np.float32))
