"""Kernels compiled for a GPU that need not be here: PTX, and what the assembler says of it."""

from __future__ import annotations

import re

from fa_numba.device import kernel_cache, linking, select
from fa_numba.device.kernel import Kernel


def assembled(kernel: Kernel, capability: tuple[int, int]) -> tuple[str, str]:
    """(PTX, the assembler's log) of a kernel, linked as it is where it runs; it takes seconds."""
    ptx, _, log = linking.ptx_and_cubin(kernel, capability)
    return ptx, log


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
        raise RuntimeError(
            f"the assembler did not report the registers of kernel {kernel.name}. Its output ends "
            f"with {log[-200:]!r}"
        )
    return int(found[1])
