"""The library where Python or Numba are started in unusual ways."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from numba import config

from fa_numba.emulator import simulator

ROOT = Path(__file__).resolve().parents[2]
CALL = "import numpy as np, fa_numba; x = np.ones((1, 1, 9, 8), np.float32); "
CALL += "print(fa_numba.attention(x, x, x).sum())"


def python(*arguments, **environment):
    """What Python did: its status, output and errors."""
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
    )
    return done.returncode, done.stdout, done.stderr


def test_no_module_needs_its_docstring():
    """With -OO Python leaves docstrings out: ``__doc__`` is then None."""
    for path in (ROOT / "fa_numba").rglob("*.py"):
        assert not re.search(r"^__doc__ \+=|\b__doc__\.", path.read_text(), re.M), path


@pytest.mark.slow
@pytest.mark.parametrize("option", ["-O", "-OO"])
def test_python_that_leaves_out_docstrings_and_assertions(option):
    assert python(option, "-c", CALL) == (0, "72.0\n", "")


@pytest.mark.slow
def test_numbas_simulator_is_not_used():
    status, said, errors = python("-c", CALL, NUMBA_ENABLE_CUDASIM="1")
    assert (status, said) == (0, "72.0\n")
    assert "NUMBA_ENABLE_CUDASIM is set: fa_numba runs on its own emulator" in errors


def test_numbas_simulator_is_turned_off(monkeypatch):
    assert not simulator.turn_off(True)
    monkeypatch.setattr(config, "ENABLE_CUDASIM", 1)
    with pytest.warns(UserWarning, match="needs no variable for that; unset NUMBA_ENABLE_CUDASIM"):
        assert simulator.turn_off(False)
    assert not config.ENABLE_CUDASIM


def test_numbas_simulator_that_is_imported_before_is_refused(monkeypatch):
    monkeypatch.setattr(config, "ENABLE_CUDASIM", 1)
    said = "NUMBA_ENABLE_CUDASIM must not be set if numba.cuda is imported before fa_numba, because"
    with pytest.raises(ImportError, match=f"{said} .* unset NUMBA_ENABLE_CUDASIM$"):
        simulator.turn_off(True)
