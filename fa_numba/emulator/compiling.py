"""Compiles loops for the CPU, and caches the result on disk if possible.

Numba's cache is next to the module, or in the user's cache directory. The environment variable
``FA_NUMBA_CACHE`` names another directory. If the variable is empty, nothing is cached.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import config, njit
from numba.core.caching import FunctionCache

VARIABLE = "FA_NUMBA_CACHE"


class _Cache(FunctionCache):
    """Numba's cache, for which a full disk or a missing folder is not an error."""

    def load_overload(self, signature: Any, target: Any) -> Any:
        with contextlib.suppress(OSError):
            return super().load_overload(signature, target)
        return None

    def save_overload(self, signature: Any, made: Any) -> None:
        with contextlib.suppress(OSError):
            super().save_overload(signature, made)


def compiled(**options: Any) -> Callable[[Callable], Any]:
    """Return ``numba.njit(cache=True, **options)``, which also works if nothing can be cached."""

    def decorate(function: Callable) -> Any:
        dispatcher = njit(**options)(function)
        chosen = os.environ.get(VARIABLE)
        before = config.CACHE_DIR, config.CACHE_LOCATOR_CLASSES
        if chosen:
            config.CACHE_DIR = str(Path(chosen).absolute() / "cpu")
            config.CACHE_LOCATOR_CLASSES = "UserProvidedCacheLocator"
        try:
            if chosen != "":
                dispatcher._cache = _Cache(function)
        except RuntimeError:  # no place that can be written
            pass
        finally:
            config.CACHE_DIR, config.CACHE_LOCATOR_CLASSES = before
        return dispatcher

    return decorate
