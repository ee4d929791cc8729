"""Imports ``numba.cuda`` without Numba's simulator.

If the environment variable ``NUMBA_ENABLE_CUDASIM`` is 1, Numba replaces ``numba.cuda`` by its
simulator, which lacks most of the names that kernels use here. If the variable is set, calls run on
the emulator of this package, even on a machine with a GPU.
"""

from __future__ import annotations

import sys
import warnings

from numba import config

_ADVICE = (
    "fa_numba runs on its own emulator if there is no GPU, and needs no variable for that; unset "
    "NUMBA_ENABLE_CUDASIM"
)


def turn_off(imported: bool) -> bool:
    """Turn Numba's simulator off if it is on; return whether it was on.

    ``imported`` says whether ``numba.cuda`` was imported before. Raise ImportError if the simulator
    is on and was imported before, because it can then not be replaced.
    """
    if not config.ENABLE_CUDASIM:
        return False
    if imported:
        raise ImportError(
            "NUMBA_ENABLE_CUDASIM must not be set if numba.cuda is imported before fa_numba, "
            f"because fa_numba cannot use Numba's simulator. {_ADVICE}"
        )
    config.ENABLE_CUDASIM = 0
    warnings.warn(
        "NUMBA_ENABLE_CUDASIM is set: fa_numba runs on its own emulator, and has turned Numba's "
        f"simulator off in this process. {_ADVICE}",
        stacklevel=3,
    )
    return True


ASKED = turn_off("numba.cuda" in sys.modules)

from numba import cuda as cuda  # noqa: E402
from numba.cuda import cg as cg  # noqa: E402  (makes `cuda.cg` an attribute)
