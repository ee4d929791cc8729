"""Compiles kernels to machine code with NVVM and nvJitLink, also for a GPU of another machine.

For GPUs newer than Hopper, NVVM uses another optimiser, which does not unroll all loops over
register tiles. The tiles would then be in local memory. For such a GPU, kernels are therefore
compiled to PTX of compute capability 9.0 first.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from numba import cuda

from fa_numba.device import mlir
from fa_numba.device.front_end import without_repeats

_HOPPER = (9, 0)
# Suffix of the architecture's name that allows instructions of this architecture only: sm_90a.
_SUFFIXES = {_HOPPER: "a"}
_OPTIMISED = {"link_time_optimization": True}


def is_newer(capability: tuple[int, int]) -> bool:
    """Return whether a GPU of this compute capability is newer than Hopper.

    Such a GPU gets PTX for Hopper.
    """
    return capability > _HOPPER


def ptx_and_cubin(kernel: Any, capability: tuple[int, int]) -> tuple[str, bytes, str]:
    """Compile a kernel, and return its PTX, its machine code (cubin) and the assembler's log.

    Raise ImportError if NVIDIA's compiler is not installed.
    """
    code = compiled(kernel, capability)
    ptx = code.ptx or _linked(code.ltoir, "ptx", code.arch, ptx=True, **_OPTIMISED)[0]
    cubin, log = code.assembled(verbose=True, ptxas_options=["-v"])
    return ptx.decode(errors="replace"), cubin, log


@dataclass(frozen=True)
class Compiled:
    """The code of a kernel after the compiler and before the assembler.

    The code is LTO-IR (``ltoir``) or PTX (``ptx``). The other field is empty. ``arch`` is the GPU
    architecture for which the compiler made the code. ``target`` is the GPU architecture for which
    the assembler makes machine code.
    """

    arch: str
    target: str
    ltoir: bytes = b""
    ptx: bytes = b""

    def assembled(self, **options: Any) -> tuple[bytes, str]:
        """Return the machine code (cubin) and the assembler's log.

        ``options`` are further options of ``cuda.core.LinkerOptions``. This function runs no
        Python code of Numba. Other threads can run Python code meanwhile.
        """
        if self.ltoir:
            return _linked(self.ltoir, "cubin", self.target, **_OPTIMISED, **options)
        return _linked(self.ptx, "cubin", self.target, **options)


def compiled(kernel: Any, capability: tuple[int, int]) -> Compiled:
    """Return a kernel's code by Numba and NVVM, for a GPU of this compute capability.

    Raise ImportError if NVIDIA's compiler is not installed.
    """
    newer = is_newer(capability)
    made_for = _HOPPER if newer else capability
    suffix = "" if newer else _SUFFIXES.get(capability, "")
    arch, target = _arch(made_for) + suffix, _arch(capability) + suffix
    if mlir.chosen():
        return Compiled(arch, target, ptx=mlir.ptx_of(kernel, made_for))
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
    if newer:
        ptx, _ = _linked(ltoir, "ptx", arch, ptx=True, **_OPTIMISED)
        return Compiled(arch, target, ptx=ptx)
    return Compiled(arch, target, ltoir=ltoir)


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


def entry_of(cubin: bytes) -> str:
    """Return the name of the kernel in machine code.

    Machine code is an ELF file. Only a kernel has a section for arguments, ``.nv.constant0``.
    """
    found = set(re.findall(rb"\.nv\.constant0\.([\w$]+)\0", cubin))
    if len(found) != 1:
        raise RuntimeError(f"machine code must contain one kernel, got {sorted(found)}")
    return found.pop().decode()


def _arch(capability: tuple[int, int]) -> str:
    return f"sm_{capability[0]}{capability[1]}"


def _linked(code: bytes, kind: str, arch: str, **options: Any) -> tuple[bytes, str]:
    """Link LTO-IR or PTX with NVIDIA's linker. Return PTX or machine code, and the linker's log.

    ``code`` is LTO-IR if the options contain "link_time_optimization", and otherwise PTX. ``kind``
    is "ptx" or "cubin", the code to return. ``arch`` is the architecture, such as "sm_90a".
    ``options`` are further options of ``cuda.core.LinkerOptions``.
    """
    from cuda.core import Linker, LinkerOptions, ObjectCode

    optimised = "link_time_optimization" in options
    source = ObjectCode.from_ltoir(code) if optimised else ObjectCode.from_ptx(code)
    linker = Linker(source, options=LinkerOptions(arch=arch, **options))
    made = bytes(linker.link(kind).code)
    return made, (linker.get_info_log() or "") + (linker.get_error_log() or "")
