"""Kernels compiled for a GPU that need not be here: PTX, and what the assembler says of it."""

from __future__ import annotations

import re

from numba import cuda

from fa_numba.device import kernel_cache, select
from fa_numba.device.front_end import without_repeats
from fa_numba.device.kernel import Kernel

# Instructions of an architecture alone, such as Hopper's, have a name of their own.
_SUFFIXES = {(9, 0): "a"}


def assembled(kernel: Kernel, capability: tuple[int, int]) -> tuple[str, str]:
    """(PTX, the assembler's log) of a kernel, linked as it is where it runs; it takes seconds."""
    from cuda.core import Linker, LinkerOptions, ObjectCode

    suffix = _SUFFIXES.get(capability, "")
    with without_repeats():
        ltoir, _ = cuda.compile(
            kernel.function,
            kernel.signature,
            cc=(*capability, suffix) if suffix else capability,
            device=False,
            abi="numba",
            output="ltoir",
            launch_bounds=(kernel.threads, kernel.min_blocks),
        )
    arch = f"sm_{capability[0]}{capability[1]}{suffix}"

    def link(kind: str, **options: object) -> tuple[bytes, str]:
        linking = LinkerOptions(arch=arch, link_time_optimization=True, **options)
        linker = Linker(ObjectCode.from_ltoir(ltoir), options=linking)
        code = linker.link(kind)
        return bytes(code.code), (linker.get_info_log() or "") + (linker.get_error_log() or "")

    ptx, _ = link("ptx", ptx=True)
    _, log = link("cubin", verbose=True, ptxas_options=["-v"])
    return ptx.decode(errors="replace"), log


def registers_of(
    kernel: Kernel, capability: tuple[int, int], *, compiling: bool = False
) -> int | None:
    """Registers of a thread of the kernel on a GPU of this compute capability.

    They are asked of the current GPU's own code, where that is the GPU meant and the kernel is kept
    compiled. Elsewhere the kernel is compiled anew, without a GPU too, if ``compiling``; otherwise
    the answer is None.
    """
    here = select.on_gpu() and select.capability_of(select.current_ordinal()) == capability
    if here and (compiling or kernel_cache.read(kernel, capability) is not None):
        return int(kernel.compiled().attributes.num_regs)
    if not compiling:
        return None
    _, log = assembled(kernel, capability)
    found = re.search(r"Used (\d+) registers", log)
    if found is None:
        raise RuntimeError(f"the assembler gives no registers of {kernel.name}: {log[-200:]!r}")
    return int(found[1])
