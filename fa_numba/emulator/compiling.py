"""Compiles loops for the CPU, and caches the machine code on disk if possible.

Numba's cache is next to the module, or in the user's cache directory. The environment variable
``FA_NUMBA_CACHE`` names another directory. If the variable is set to an empty string, nothing is
cached. A damaged file of the cache counts as missing: the loop is compiled again, and the file is
replaced.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import config, njit
from numba.core.caching import FunctionCache, IndexDataCacheFile

VARIABLE = "FA_NUMBA_CACHE"


class _Files(IndexDataCacheFile):
    """Numba's index files and data files, with a digest before the machine code.

    The digest is compared with the machine code before LLVM loads the code. Damaged machine code
    could end the process while LLVM loads it.
    """

    def _load_index(self) -> dict:
        try:
            return dict(super()._load_index())
        except Exception:  # unpickling damaged bytes can raise any exception
            return {}

    def _load_data(self, name: str) -> Any:
        content = Path(self._data_path(name)).read_bytes()
        digest, data = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
        if digest != _digest(data):
            raise OSError(f"{name} must begin with the digest of its content")
        return pickle.loads(data)

    def _save_data(self, name: str, data: Any) -> None:
        content = self._dump(data)
        with self._open_for_write(self._data_path(name)) as file:
            file.write(_digest(content) + content)


_DIGEST_BYTES = hashlib.sha256().digest_size


def _digest(data: bytes) -> bytes:
    """Return the SHA-256 digest of some bytes."""
    return hashlib.sha256(data).digest()


class _Cache(FunctionCache):
    """Numba's cache, but without errors for damaged files, a full disk or a missing folder."""

    def __init__(self, function: Callable) -> None:
        super().__init__(function)
        where, stamp = self._impl.locator.get_cache_path(), self._impl.locator.get_source_stamp()
        self._cache_file = _Files(where, self._impl.filename_base, stamp)

    def load_overload(self, signature: Any, target: Any) -> Any:
        with contextlib.suppress(Exception):  # for example a class of another version of Numba
            return super().load_overload(signature, target)
        return None

    def save_overload(self, signature: Any, made: Any) -> None:
        with contextlib.suppress(OSError):
            super().save_overload(signature, made)


def compiled(**options: Any) -> Callable[[Callable], Any]:
    """Return the decorator ``numba.njit(cache=True, **options)``.

    Unlike `njit`, the decorator also works if nothing can be cached.
    """

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
        except RuntimeError:  # no folder that can be written
            pass
        finally:
            config.CACHE_DIR, config.CACHE_LOCATOR_CLASSES = before
        return dispatcher

    return decorate
