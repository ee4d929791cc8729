"""Readers' machines: other libraries, no home, a cache that cannot be used, other terminals."""

import subprocess
import sys


def python(code, **settings):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, **settings)


def test_numba_cuda_is_imported_where_numpy_has_no_row_stack():
    """As NumPy 2.5, where the name is gone again afterwards."""
    done = python(
        "import numpy as np; vars(np).pop('row_stack', None); "
        "np.__all__ = [name for name in np.__all__ if name != 'row_stack']; import fa_numba; "
        "from numba.cuda.np import arrayobj; print(hasattr(np, 'row_stack'))"
    )
    assert (done.stdout, done.returncode) == ("False\n", 0), done.stderr
