"""``numba.cuda`` without its simulator, which ``NUMBA_ENABLE_CUDASIM=1`` puts in its place.

Numba's simulator lacks most of the names that kernels use here. If the variable is set, calls run
on the emulator of this package, also on a machine with a GPU.
"""

from __future__ import annotations

import sys
import warnings

from numba import config

ASKED = bool(config.ENABLE_CUDASIM)  # for a simulator, by the user
_ADVICE = (
    "fa_numba runs on its own emulator if there is no GPU, and needs no variable for that; unset "
    "NUMBA_ENABLE_CUDASIM"
)

if ASKED:
    if "numba.cuda" in sys.modules:
        raise ImportError(
            "NUMBA_ENABLE_CUDASIM must not be set if numba.cuda is imported before fa_numba, "
            f"because fa_numba cannot use Numba's simulator. {_ADVICE}"
        )
    config.ENABLE_CUDASIM = 0
    warnings.warn(
        "NUMBA_ENABLE_CUDASIM is set: fa_numba runs on its own emulator, and has turned Numba's "
        f"simulator off in this process. {_ADVICE}",
        stacklevel=2,
    )

from numba import cuda as cuda  # noqa: E402
from numba.cuda import cg as cg  # noqa: E402  (makes `cuda.cg` an attribute)
