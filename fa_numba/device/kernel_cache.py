"""Compiled kernels on disk: each kernel is compiled once on a machine.

The key of a kernel is a hash of everything that its machine code depends on: the sources of the
package, and the values that the kernel and its device functions close over. It also depends on the
argument types, the launch bounds, the GPU and the compiler.

The files are in the folder ``fa_numba`` of the user's cache directory. If the environment variable
``FA_NUMBA_CACHE`` is set, it names another folder. If the variable is set to the empty string, no
compiled kernel is stored.
"""

from __future__ import annotations

import builtins
import contextlib
import dis
import functools
import hashlib
import itertools
import math
import os
import sys
from importlib import metadata
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
from numba.core import types
from numba.cuda.extending import _Intrinsic

from fa_numba.device import mlir
from fa_numba.device.function import DeviceFunction
from fa_numba.emulator.compiling import VARIABLE

# Limit for the size of all files. Files that were not read for the longest time are removed first.
MAX_BYTES = 1 << 30
PACKAGE = Path(__file__).parent.parent
# The packages that take part in a compilation.
_COMPILERS = (
    *("numba", "numba-cuda", "numba-cuda-mlir", "llvmlite", "cuda-core"),
    *("nvidia-nvvm", "nvidia-nvjitlink", "nvidia-cuda-nvcc-cu12", "nvidia-nvjitlink-cu12"),
)
_DIGEST_BYTES = hashlib.sha256().digest_size
_VALUES = (bool, int, float, str, bytes, type(None), np.generic, types.Type)


class _Unknown(Exception):
    """Raised for a value whose effect on the machine code is not known."""


def read(kernel: Any, capability: tuple[int, int]) -> tuple[bytes, str] | None:
    """Return the kernel's stored cubin and the name of its entry.

    Return None if the kernel is not stored, or if the stored files are damaged.
    """
    store, key = _place(kernel, capability)
    if store is None:
        return None
    with contextlib.suppress(OSError):
        cubin, about = store.get(key), store.get(key + b" name")
        if cubin and about:
            name = about[_DIGEST_BYTES:]
            if about == _digest(cubin, name) + name:  # neither file is damaged
                return cubin, name.decode()
    return None


def write(kernel: Any, capability: tuple[int, int], cubin: bytes, name: str) -> None:
    """Store the kernel's cubin and the name of its entry, for ``read``.

    Nothing is raised if the disk is full or read-only.
    """
    store, key = _place(kernel, capability)
    if store is not None:
        with contextlib.suppress(OSError):
            entry = name.encode()
            store[key], store[key + b" name"] = cubin, _digest(cubin, entry) + entry


def _digest(cubin: bytes, name: bytes) -> bytes:
    return hashlib.sha256(cubin + b"\0" + name).digest()


def directory() -> Path | None:
    """Return the folder of the stored cubins; None if cubins are not stored."""
    chosen = os.environ.get(VARIABLE)
    if chosen is not None:
        return Path(chosen) if chosen else None
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "fa_numba"
    except RuntimeError:  # the user has no home directory
        return None


def _place(kernel: Any, capability: tuple[int, int]) -> tuple[Any, bytes]:
    where = directory()
    if where is None:
        return None, b""
    try:
        return _store(where), key_of(kernel, capability)
    except (_Unknown, OSError):
        return None, b""


@functools.cache
def _store(where: Path) -> Any:
    from cuda.core.utils import FileStreamProgramCache

    return FileStreamProgramCache(where, max_size_bytes=MAX_BYTES)


def key_of(kernel: Any, capability: tuple[int, int]) -> bytes:
    """Return the kernel's key in the cache.

    Raise _Unknown for a kernel of another package, and for a kernel that closes over a value of an
    unknown type.
    """
    bounds = kernel.threads, kernel.min_blocks
    settings = sorted(x for x in os.environ.items() if x[0].startswith(("NUMBA_", mlir.VARIABLE)))
    arguments = list(map(_type, kernel.argument_types))
    parts = (_sources(), _compilers(), settings, capability, bounds, arguments)
    text = repr((parts, _function(kernel.function, {})))
    return hashlib.sha256(text.encode()).hexdigest().encode()


@functools.cache
def _sources() -> str:
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(f"{path.relative_to(PACKAGE)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


@functools.cache
def _compilers() -> tuple[tuple[str, str], ...]:
    found = []
    for name in _COMPILERS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found.append((name, metadata.version(name)))
    from cuda.bindings import driver, nvjitlink, nvvm

    # Libraries of a system's CUDA toolkit are not Python packages. The driver links only if
    # nvJitLink is missing. Else machines with different drivers, or without one, share kernels.
    for versions in (
        (nvvm.version,),
        (nvvm.ir_version,),
        (nvjitlink.version, driver.cuDriverGetVersion),
    ):
        for version in versions:
            with contextlib.suppress(Exception):  # a missing library may raise any exception
                found.append((version.__qualname__, repr(version())))
                break
    return tuple(found)


def _type(ty: Any) -> Any:
    """Return a value that identifies the type of an argument.

    For a named tuple, the value contains the names of the fields. Numba's text of such a type omits
    these names.
    """
    if hasattr(ty, "instance_class"):
        return ty.fields, list(map(_type, ty.types))
    return str(ty)


def _function(function: FunctionType, seen: dict[FunctionType, str]) -> str:
    """Return a hash of a function's code and of the values that it closes over.

    ``seen`` maps functions to hashes that were computed before.
    """
    if function.__module__.split(".")[0] != PACKAGE.name:
        raise _Unknown(
            f"the globals of {function} are not known"
        )  # its globals are not in the package's sources
    if function not in seen:
        code, free = function.__code__, function.__code__.co_freevars
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
        values = [
            _attributes(value, _attributes_taken(code)[name], seen)
            if _is_namespace(value)
            else _value(value, seen)
            for name, value in zip(free, cells, strict=True)
        ]
        named = tuple((function.__kwdefaults__ or {}).items())
        outside = (function.__defaults__, named), *_globals(function)
        values += [_value(value, seen) for value in outside]
        text = repr((function.__qualname__, _code(code), values))
        seen[function] = hashlib.sha256(text.encode()).hexdigest()
    return seen[function]


def _globals(function: FunctionType) -> list[Any]:
    """Return the names and values that a function reads from its globals.

    The list is empty for a function of an imported module, because the key of the kernel already
    contains the source of the module. A function that was compiled from text, such as a
    ``score_mod``, has its own globals.
    """
    if function.__globals__ is vars(sys.modules.get(function.__module__, builtins)):
        return []
    own = function.__globals__
    return [(name, own[name]) for name in sorted(_names(function.__code__)) if name in own]


def _names(code: CodeType) -> set[str]:
    """Return the names of globals and attributes in code, and in the functions inside it."""
    inner = (_names(each) for each in code.co_consts if isinstance(each, CodeType))
    return set(code.co_names).union(*inner)


def _code(code: CodeType) -> tuple:
    consts = tuple(_code(c) if isinstance(c, CodeType) else repr(c) for c in code.co_consts)
    return code.co_code, consts, code.co_names


@functools.cache
def _attributes_taken(code: CodeType) -> dict[str, set[str]]:
    """Return the attributes that a function reads from each variable that it closes over.

    ``code`` is the code of the function. The result maps the name of a variable to the names of
    attributes. An empty name means that the function uses the variable without an attribute.
    """
    taken: dict[str, set[str]] = {name: set() for name in code.co_freevars}
    for value, attribute in itertools.pairwise(dis.get_instructions(code)):
        if value.opname == "LOAD_DEREF" and value.argval in taken:
            of_attribute = attribute.opname in ("LOAD_ATTR", "LOAD_METHOD")
            taken[value.argval].add(attribute.argval if of_attribute else "")
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            for name, attributes in _attributes_taken(inner).items():
                taken.setdefault(name, set()).update(attributes)
    return taken


def _is_namespace(value: Any) -> bool:
    """Return whether a value is a module object that code created as a namespace.

    A module that was imported is not a namespace.
    """
    return isinstance(value, ModuleType) and sys.modules.get(value.__name__) is not value


def _attributes(namespace: ModuleType, names: set[str], seen: dict[FunctionType, str]) -> Any:
    """Return the names and values of the attributes of a namespace that a function reads.

    ``names`` are the attributes. ``seen`` maps functions to hashes that were computed before. Raise
    _Unknown if the function uses the namespace itself, for instance assigns it to another name.
    """
    if "" in names:
        raise _Unknown(f"the attributes that {namespace} is used for are not known")
    found = [(name, getattr(namespace, name)) for name in sorted(names)]
    return "namespace", [(name, _value(value, seen)) for name, value in found]


def _value(value: Any, seen: dict[FunctionType, str]) -> Any:
    """Return a value as strings in nested tuples or lists, for a hash.

    Different values give different strings.
    """
    if isinstance(value, _VALUES):
        return type(value).__name__, repr(value)
    if isinstance(value, tuple):
        return type(value).__name__, [_value(item, seen) for item in value]
    if isinstance(value, DeviceFunction):
        return _function(value.py_func, seen)
    if isinstance(value, _Intrinsic):
        return _function(value._defn, seen)
    if isinstance(value, FunctionType):
        return _function(value, seen)
    if value is math:
        return "module", "math"
    raise _Unknown(f"the effect of {value!r} on machine code is not known")
