"""Occupancy: how many thread blocks of a kernel a multiprocessor holds at the same time.

The rules are those of the CUDA C++ Programming Guide.
"""

from __future__ import annotations

from dataclasses import dataclass

from fa_numba.bounds.devices import Device
from fa_numba.device import Kernel
from fa_numba.integers import ceil_div, round_up

# Bytes of shared memory that the system reserves for each thread block, from capability 8.0 on.
RESERVED = 1024
MOST_REGISTERS = 255  # of a thread
# A warp gets registers in multiples of 256. Four schedulers share warps and registers equally.
_PIECE, _SCHEDULERS = 256, 4


@dataclass(frozen=True)
class Occupancy:
    """The number of thread blocks of a kernel that a multiprocessor holds at the same time.

    `least` and `most` differ only if the number of registers is not known. ``print`` shows one
    number if they are equal, else a range such as "2 to 3".

    Parameters
    ----------
    least, most : int
        Least and greatest possible number of thread blocks.
    limit : str
        What allows no more than `most` thread blocks: "shared memory", "threads", "blocks" or
        "registers".
    """

    least: int
    most: int
    limit: str

    def __str__(self) -> str:
        return f"{self.least}" if self.least == self.most else f"{self.least} to {self.most}"


def occupancy(device: Device, kernel: Kernel, registers: int | None = None) -> Occupancy:
    """Return how many thread blocks of a kernel a multiprocessor holds at the same time.

    Parameters
    ----------
    device : Device
        The GPU.
    kernel : Kernel
        The kernel; its threads and bytes of shared memory per thread block are used.
    registers : int, optional
        Registers of a thread. If None, `least` is computed with 255 registers per thread, the
        greatest number. But `least` is never below ``kernel.min_blocks`` if the other limits allow
        this many thread blocks, because the compiler then uses fewer registers.

    Returns
    -------
    Occupancy
        The number of thread blocks, or its range if the number of registers is not known.

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> from fa_numba.bounds import named
    >>> kernel = SimpleNamespace(threads=128, shared_bytes=49152, min_blocks=1)
    >>> print(occupancy(named("A100"), kernel, registers=128))
    3
    >>> occupancy(named("A100"), kernel)
    Occupancy(least=2, most=3, limit='shared memory')
    """
    threads = round_up(kernel.threads, 32)
    reserved = RESERVED if device.capability >= (8, 0) else 0
    limits = {
        "shared memory": device.shared_bytes // max(1, kernel.shared_bytes + reserved),
        "threads": device.threads // threads,
        "blocks": device.blocks,
    }
    if registers is None:
        spent = _by_registers(device, threads, MOST_REGISTERS)
        least = max(spent, kernel.min_blocks)
    else:
        least = limits["registers"] = _by_registers(device, threads, registers)
    limit = min(limits, key=limits.__getitem__)
    most = limits[limit]
    return Occupancy(min(least, most), most, limit)


def _by_registers(device: Device, threads: int, registers: int) -> int:
    """Return how many thread blocks fit into the registers of a multiprocessor.

    `threads` is the number of threads of a thread block, and `registers` the number per thread.
    """
    warps = threads // 32
    of_warp = round_up(32 * registers, _PIECE)
    per_scheduler = device.registers // _SCHEDULERS // of_warp
    return per_scheduler * _SCHEDULERS // warps if warps else 0


def share(device: Device, blocks: int, even: bool = True) -> float:
    """Return the share of the multiprocessors' time that thread blocks can fill.

    Parameters
    ----------
    device : Device
        The GPU.
    blocks : int
        Thread blocks of the launch.
    even : bool, default True
        Whether all thread blocks take the same time. If True, thread blocks run in waves of one
        thread block per multiprocessor, and the last wave may leave multiprocessors idle. If False,
        all multiprocessors are busy if there are at least as many thread blocks as multiprocessors.

    Returns
    -------
    float
        The share, more than 0 and at most 1.

    Examples
    --------
    >>> from fa_numba.bounds import named
    >>> a100 = named("A100")  # 108 multiprocessors
    >>> share(a100, 54), share(a100, 162), share(a100, 162, even=False)
    (0.5, 0.75, 1.0)
    """
    if not even:
        return min(1.0, blocks / device.multiprocessors)
    return blocks / (device.multiprocessors * ceil_div(blocks, device.multiprocessors))
