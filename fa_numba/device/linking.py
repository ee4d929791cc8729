"""Compiles kernels to machine code with NVVM and nvJitLink, also for a GPU of another machine.

For GPUs newer than Hopper, NVVM uses another optimiser, which does not unroll all loops over
register tiles. The tiles would then be in local memory. For such a GPU, kernels are therefore
compiled to PTX of compute capability 9.0 first.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

from numba import cuda

from fa_numba.device import mlir
from fa_numba.device.front_end import without_repeats

_HOPPER = (9, 0)
# Suffix of the architecture's name that allows instructions of this architecture only: sm_90a.
_SUFFIXES = {_HOPPER: "a"}


def is_newer(capability: tuple[int, int]) -> bool:
    """Return whether a GPU of this compute capability is newer than Hopper.

    Such a GPU gets PTX for Hopper.
    """
    return capability > _HOPPER


def ptx_and_cubin(kernel: Any, capability: tuple[int, int]) -> tuple[str, bytes, str]:
    """Compile a kernel, and return its PTX, its machine code (cubin) and the assembler's log.

    Raise ImportError if NVIDIA's compiler is not installed.
    """
    from cuda.core import ObjectCode

    newer = is_newer(capability)
    made_for = _HOPPER if newer else capability
    suffix = "" if newer else _SUFFIXES.get(capability, "")
    optimised = {}
    if mlir.chosen():
        ptx = mlir.ptx_of(kernel, made_for)
    else:
        with _naming_the_extra(), without_repeats():
            ltoir, _ = cuda.compile(
                kernel.function,
                kernel.signature,
                cc=(*made_for, suffix) if suffix else made_for,
                device=False,
                abi="numba",
                output="ltoir",
                launch_bounds=(kernel.threads, kernel.min_blocks),
            )
        code, optimised = ObjectCode.from_ltoir(ltoir), {"link_time_optimization": True}
        ptx, _ = _linked(code, "ptx", _arch(made_for) + suffix, ptx=True, **optimised)
    if newer or mlir.chosen():
        code, optimised = ObjectCode.from_ptx(ptx), {}
    told = {"verbose": True, "ptxas_options": ["-v"], **optimised}
    cubin, log = _linked(code, "cubin", _arch(capability) + suffix, **told)
    return ptx.decode(errors="replace"), cubin, log


@contextlib.contextmanager
def _naming_the_extra() -> Iterator[None]:
    from cuda.pathfinder import DynamicLibNotFoundError

    try:
        yield
    except (DynamicLibNotFoundError, ImportError) as error:
        raise ImportError(
            "NVIDIA's compiler, which a kernel needs, is not installed. Install the extra cu13, "
            "or cu12 for a driver of CUDA 12: pip install '.[cu13]' "
            f"({str(error).split(',')[0]})"
        ) from error


def entry_of(ptx: str) -> str:
    """Return the name of the kernel's entry point in its PTX."""
    found = re.search(r"\.entry\s+([\w$]+)", ptx)
    if found is None:
        raise RuntimeError(f"the PTX text contains no kernel. It begins with {ptx[:200]!r}")
    return found[1]


def _arch(capability: tuple[int, int]) -> str:
    return f"sm_{capability[0]}{capability[1]}"


def _linked(code: Any, kind: str, arch: str, **options: Any) -> tuple[bytes, str]:
    from cuda.core import Linker, LinkerOptions

    linker = Linker(code, options=LinkerOptions(arch=arch, **options))
    made = bytes(linker.link(kind).code)
    return made, (linker.get_info_log() or "") + (linker.get_error_log() or "")
