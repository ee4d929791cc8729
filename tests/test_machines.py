"""Readers' machines: other libraries, no home, a cache that cannot be used, other terminals."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


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


@pytest.mark.parametrize(
    "settings",
    [
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "COLUMNS": "20"},
        {"HOME": os.devnull, "XDG_CACHE_HOME": os.devnull, "TERM": "dumb", "COLUMNS": "0"},
    ],
    ids=["no home, C locale, narrow", "a home that cannot be written, no terminal"],
)
def test_a_command_says_the_same_on_every_machine(settings, tmp_path):
    """In a folder with a space too, and where standard input is closed."""
    where = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), **settings}
    (tmp_path / "a b").mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "fa_numba", "trace", "--example", "3"],
        **dict(capture_output=True, text=True, env=where, cwd=tmp_path / "a b"),
        stdin=subprocess.DEVNULL,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "0.032   0.087   0.237   0.644" in done.stdout
