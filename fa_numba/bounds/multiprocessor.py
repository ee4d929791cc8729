"""How many thread blocks a multiprocessor holds at a time (CUDA C++ Programming Guide)."""

from __future__ import annotations

from dataclasses import dataclass

from fa_numba.bounds.devices import Device
from fa_numba.device import Kernel
from fa_numba.integers import ceil_div, round_up

# Bytes of shared memory that the system takes of every block, from compute capability 8.0 on.
RESERVED = 1024
MOST_REGISTERS = 255  # of a thread
# Registers are given to warps in pieces, and warps to four schedulers.
_PIECE, _SCHEDULERS = 256, 4


@dataclass(frozen=True)
class Occupancy:
    """Blocks of a kernel that a multiprocessor holds: at least `least`, at most `most`.

    The two differ where registers limit the blocks and are not known. `limit` names what allows no
    more than `most`.
    """

    least: int
    most: int
    limit: str

    def __str__(self) -> str:
        return f"{self.least}" if self.least == self.most else f"{self.least} to {self.most}"


def occupancy(device: Device, kernel: Kernel, registers: int | None = None) -> Occupancy:
    """The blocks of `kernel` on a multiprocessor of `device`, `registers` a thread if known.

    A kernel that fits without knowing them fits at least once, and as often as it is compiled for.
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
    warps = threads // 32
    of_warp = round_up(32 * registers, _PIECE)
    per_scheduler = device.registers // _SCHEDULERS // of_warp
    return per_scheduler * _SCHEDULERS // warps if warps else 0


def share(device: Device, blocks: int, even: bool = True) -> float:
    """The share of the multiprocessors' time that `blocks` can fill.

    Blocks that are all as long (`even`) come in waves of one for each multiprocessor, the last of
    which may be small; of others nothing is known but how many there are.
    """
    if not even:
        return min(1.0, blocks / device.multiprocessors)
    return blocks / (device.multiprocessors * ceil_div(blocks, device.multiprocessors))
