"""Functions that show the versions, devices and settings for a bug report."""

from __future__ import annotations

import configparser
import os
import platform
import sys
from importlib import metadata
from pathlib import Path

from fa_numba import device
from fa_numba.device import kernel_cache
from fa_numba.dtypes import UNSCALED
from fa_numba.ops import plan

_PACKAGES = (
    *("numpy", "scipy", "greenlet", "numba", "llvmlite", "numba-cuda", "numba-cuda-mlir"),
    *("cuda-core", "cuda-bindings", "nvidia-nvvm", "nvidia-nvjitlink", "torch", "cupy"),
)
# Settings that change what is compiled, or where it runs.
_SETTINGS = ("FA_NUMBA_", "NUMBA_", "CUDA_")
_SHAPE = (1, 8, 1024, 64)


def version() -> str:
    """Return the version of fa_numba.

    In a source tree this is the version in setup.cfg. Otherwise it is the version of the installed
    package.

    Returns
    -------
    str
        Version, such as "0.2.0".

    Examples
    --------
    >>> from fa_numba.environment import version
    >>> version().count(".") >= 1
    True
    """
    source = configparser.ConfigParser()
    source.read(Path(__file__).parent.parent / "setup.cfg", encoding="utf-8")
    if source.get("metadata", "name", fallback="") == "fa_numba":
        return source["metadata"]["version"]
    return metadata.version("fa_numba")


def show_config() -> None:
    """Print the versions, the device and the settings that a bug report needs.

    The lines show the versions of fa_numba, Python and the packages, the device, the unit for each
    dtype, and the folder of compiled kernels. Further lines show environment variables whose names
    begin with ``FA_NUMBA_``, ``NUMBA_`` or ``CUDA_``.

    Examples
    --------
    >>> import fa_numba
    >>> fa_numba.show_config()  # doctest: +ELLIPSIS
    fa_numba  ...
    python    ...
    """
    print("\n".join(f"{name:9} {text}" for name, text in _lines()))


def _lines() -> list[tuple[str, str]]:
    found = [
        ("fa_numba", version()),
        ("python", f"{platform.python_version()}, {platform.platform()}, {sys.executable}"),
        ("packages", ", ".join(filter(None, map(_version, _PACKAGES)))),
        ("device", _device()),
        ("units", ", ".join(f"{dtype} {_unit(dtype)}" for dtype in UNSCALED)),
        ("cache", _cache()),
    ]
    named = sorted(item for item in os.environ.items() if item[0].startswith(_SETTINGS))
    return found + [("setting", f"{name}={value}") for name, value in named]


def _version(package: str) -> str:
    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return ""


def _device() -> str:
    if not device.on_gpu():
        return f"emulator, since {device.why_no_gpu() or 'it was chosen'}"
    about = device.describe()
    return ", ".join(f"{name} {value}" for name, value in about.items())


def _unit(dtype: str) -> str:
    try:
        return plan(_SHAPE, _SHAPE, algorithm="fa2", dtype=dtype).unit
    except ValueError as error:
        return f"none ({error})"


def _cache() -> str:
    """Return the folder of compiled kernels as text, with a remark if it cannot be written."""
    where = kernel_cache.directory()
    if where is None:
        return f"none: {kernel_cache.VARIABLE} is empty, or there is no home"
    try:
        there = next(folder for folder in (where, *where.parents) if folder.exists())
        kept = there.is_dir() and os.access(there, os.W_OK)
    except OSError:  # a name that is too long
        kept = False
    return f"{where}" if kept else f"{where}, which cannot be written: nothing is kept"
