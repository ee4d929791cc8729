"""Kernels compiled without a GPU, each once for all tests and processes that look at it.

What the compiler gives lies with the compiled kernels of `fa_numba.device.kernel_cache`, under
their keys: a change of the package, of an installed compiler or of this file compiles anew.
"""

import contextlib
import fcntl
import functools
import gc
import hashlib
import json
import os
from pathlib import Path

import pytest

from fa_numba.device import assembled, kernel_cache

pytest.importorskip("cuda.core", reason="cuda-core is not installed")
CAPABILITY = {"sm_80": (8, 0), "sm_86": (8, 6), "sm_89": (8, 9), "sm_90a": (9, 0, "a")}
CAPABILITY |= {"sm_75": (7, 5), "sm_100": (10, 0), "sm_103": (10, 3), "sm_120": (12, 0)}
# Of a kernel's key; two that share a lock wait for each other, and nothing else.
LOCKED = 2
_loaded = []  # not empty if this process has compiled a kernel


@functools.cache
def compiled(kernel, arch):
    """(PTX, the assembler's log), linked as at run time.

    Where nothing can be kept, and of a test's own kernel, it is compiled in every process.
    """
    store, key = kernel_cache._place(kernel, CAPABILITY[arch])
    if store is None:
        return from_source(kernel, arch)
    key += b" offline " + _here()
    with _locked(key.decode()[:LOCKED]):
        kept = _read(store, key)
        if kept is None:
            kept = _apart(kernel, arch) or from_source(kernel, arch)
            with contextlib.suppress(OSError):
                store[key] = json.dumps(kept).encode()
    return kept


def _read(store, key):
    with contextlib.suppress(OSError, ValueError):
        kept = store.get(key)
        if kept:
            return tuple(json.loads(kept))
    return None


@functools.cache
def _here():
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest().encode()


@contextlib.contextmanager
def _locked(name):
    """One process at a time; without a lock where its file cannot be written."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            folder = kernel_cache.directory() / "locks"
            folder.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(open(folder / name, "w"))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _apart(kernel, arch):
    """Return what ``from_source`` returns in a forked process; None if that raises an error.

    A compiler makes about a million objects, which refer to each other. A process that ends needs
    no time to find and to free them. The first kernel is compiled in this process, which loads the
    compilers for all.
    """
    if not _loaded:
        _loaded.append(True)
        return None
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            gc.disable()
            with open(write, "w") as file:
                json.dump(from_source(kernel, arch), file)
        finally:
            os._exit(0)
    os.close(write)
    with open(read) as file:
        said = file.read()
    os.waitpid(child, 0)
    return tuple(json.loads(said)) if said else None


def from_source(kernel, arch):
    """What ``compiled`` gives, compiled here and now."""
    try:
        return assembled(kernel, CAPABILITY[arch][:2])
    except Exception as error:
        if "nvvm" in str(error).lower() and "not" in str(error).lower():
            pytest.skip(f"no NVVM: {error}")
        raise
