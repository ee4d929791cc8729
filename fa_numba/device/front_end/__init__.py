"""Replacements of functions of Numba's front end, with which kernels compile faster.

A kernel of fa_numba calls some hundred device functions, all of them inlined. It then has some
thousand statements. Numba's front end (bytecode to LLVM IR) is Python code that was written for
smaller functions. Some functions of Numba take time proportional to the square of the number of
statements, repeat work at each call, or compute values that nothing reads. ``without_repeats``
replaces such functions while a kernel is compiled. The machine code does not change:
``tests/device/test_front_end.py`` compares PTX, and ``make ptx`` compares the PTX of every kernel.

The modules of this package contain the replacements:

    passes       running Numba's passes, and skipping those without effect; numba-cuda only
    inlining     translating device functions from bytecode, and inlining their calls
    variables    which variables are alive, renamed, read or stored
    inference    types of calls, values and statements
    lowering     LLVM IR of statements; numba-cuda only
    replacing    replaces functions for the duration of a context

The table ``REPLACED`` of a module names functions of Numba. For each of them it contains a function
that takes Numba's function as its argument and returns the replacement.

Python's garbage collector is off while a kernel is compiled, because nearly all objects live until
the end.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

from numba.cuda.core.compiler_lock import global_compiler_lock

from fa_numba.device.front_end import inference, inlining, lowering, passes, variables
from fa_numba.device.front_end.replacing import replaced

__all__ = ["REPLACED", "without_repeats"]

REPLACED = (
    *passes.REPLACED,
    *inlining.REPLACED,
    *variables.REPLACED,
    *inference.REPLACED,
    *lowering.REPLACED,
)


@contextlib.contextmanager
def without_repeats() -> Iterator[None]:
    """Replace functions of Numba's front end inside the context.

    Other threads that compile wait until the context ends. Python's garbage collector is off inside
    the context.
    """
    with global_compiler_lock, replaced(REPLACED), without_garbage_collection():
        yield


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Switch Python's garbage collector off inside the context."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
