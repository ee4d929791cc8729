"""PTX and register counts of kernels, for a GPU that need not be in this machine."""

from __future__ import annotations

import re

from fa_numba.device import kernel_cache, linking, select
from fa_numba.device.kernel import Kernel


def assembled(kernel: Kernel, capability: tuple[int, int]) -> tuple[str, str]:
    """Return a kernel's PTX and the assembler's log. This takes seconds.

    The kernel is compiled and linked with the same options as for a run.
    """
    ptx, _, log = linking.ptx_and_cubin(kernel, capability)
    return ptx, log


def registers_of(
    kernel: Kernel, capability: tuple[int, int], *, compiling: bool = False
) -> int | None:
    """Return the registers per thread of the kernel on a GPU of this compute capability.

    If the current GPU has this compute capability and the kernel's machine code is on disk, the
    number comes from that machine code. Otherwise, the kernel is compiled if ``compiling`` is True,
    which needs no GPU. If ``compiling`` is False, the result is None.
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
            f"the number of registers of kernel {kernel.name} is unknown: the output of the CUDA "
            "assembler (ptxas) has no line 'Used N registers'. Try another CUDA version, or report "
            f"this as a bug of fa_numba. The output ends with {log[-200:]!r}"
        )
    return int(found[1])
