"""The time that a plan takes at least on a GPU, and what bounds it: a roofline of three roofs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fa_numba import io_model
from fa_numba.bounds.cache import Dram, dram
from fa_numba.bounds.devices import Device
from fa_numba.bounds.multiprocessor import Occupancy, occupancy, share
from fa_numba.device import registers_of
from fa_numba.host.plans import Plan

# Products of matrices in a tile of S: S and P V; S, dV, dP, dQ and dK.
PRODUCTS = {"fwd": 2, "bwd": 5}
# With less of the multiprocessors at work, too few blocks are what bounds it.
FEW = 0.5


@dataclass(frozen=True)
class Expected:
    """A plan on a GPU. Times are in seconds; no call takes less than `compute` and `l2`, nor than
    `memory` if the rule for `dram` holds.

    `registers` and `occupancies` are of the plan's kernels in their order, registers None where no
    compile was asked for. `busy` is the share of the multiprocessors' time that the blocks of the
    kernel with the products can fill. `flops` are the products of all tiles that are computed,
    their masked and padded parts too; `compute` is their time at the unit's peak and `busy`, `l2`
    that of the accessed bytes at L2's bandwidth, `memory` that of `dram`'s bytes at device
    memory's; None where the device's number is not known.
    """

    plan: Plan
    device: Device
    registers: tuple[int | None, ...]
    occupancies: tuple[Occupancy, ...]
    busy: float
    flops: int
    dram: Dram
    compute: float | None
    l2: float | None
    memory: float | None

    @property
    def floor(self) -> float | None:
        """The longest of the times; None where none is known."""
        return max((x for x in (self.compute, self.l2, self.memory) if x is not None), default=None)

    @property
    def bound(self) -> str:
        """What takes longest: "compute", "L2" or "DRAM"; "latency" where that is compute on few
        multiprocessors, "unknown" without the GPU's peak and bandwidth.
        """
        times = {"compute": self.compute, "L2": self.l2, "DRAM": self.memory}
        known = {name: x for name, x in times.items() if x is not None}
        if self.compute is None or self.memory is None:
            return "unknown"
        longest = max(known, key=known.__getitem__)
        return "latency" if longest == "compute" and self.busy < FEW else longest


def expected(plan: Plan, device: Device, *, compiling: bool = False) -> Expected:
    """What is expected of `plan`, which was made for `device`.

    With `compiling` its kernels are compiled for their registers, which takes seconds each. Without
    they are known of kernels alone that the GPU which is present has compiled before; of others the
    blocks on a multiprocessor may have a range, and its lower end is taken.
    """
    kernels = plan.launched
    known = device.present or compiling
    registers = tuple(
        registers_of(k, device.capability, compiling=compiling) if known else None for k in kernels
    )
    found = tuple(occupancy(device, k, n) for k, n in zip(kernels, registers, strict=True))
    # The kernel with the products has the largest tiles.
    main = max(range(len(kernels)), key=lambda n: kernels[n].shared_bytes)
    blocks = math.prod(plan.kernels[main].grid)
    resident = min(blocks, device.multiprocessors * found[main].least)
    # Standard attention's blocks take all tiles, whatever the mask hides.
    even = plan.algorithm == "standard" or not plan.problem.causal
    busy = share(device, blocks, even)
    flops, peak = computed_flops(plan), device.peak(plan.unit)
    to_memory = dram(plan, device, resident)
    return Expected(
        plan,
        device,
        registers,
        found,
        busy,
        flops,
        to_memory,
        compute=flops / (peak * busy) if peak else None,
        l2=plan.accesses.bytes / device.l2 if device.l2 else None,
        memory=to_memory.bytes / device.dram if device.dram else None,
    )


def computed_flops(plan: Plan) -> int:
    """FLOPs of the products of all tiles of S that the plan computes, whole tiles."""
    tiles = io_model.tiles_visited(
        plan.algorithm, plan.problem, plan.tiles, passes=plan.passes, block_mask=plan.block_mask
    )
    of_pair = io_model.multiply_adds(plan.problem, plan.passes)
    return 2 * of_pair * tiles * plan.tiles.Br * plan.tiles.Bc
