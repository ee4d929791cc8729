"""Lower limits of the time that a plan takes on a GPU, and what limits the plan.

A roofline with three limits: computing, L2 bandwidth and device memory bandwidth.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fa_numba import io_model
from fa_numba.bounds.cache import Dram, dram
from fa_numba.bounds.devices import Device
from fa_numba.bounds.multiprocessor import Occupancy, occupancy, share
from fa_numba.device import registers_of
from fa_numba.host.plans import Plan

# Matrix products of a tile: S and P V in the forward pass; S, dV, dP, dQ and dK in the backward.
PRODUCTS = {"fwd": 2, "bwd": 5}
# If `busy` is below this share, the plan is bound by latency: it has too few thread blocks.
FEW = 0.5


@dataclass(frozen=True)
class Expected:
    """Lower limits of the time that a plan takes on a GPU, in seconds.

    No call takes less time than `compute`, and none takes less time than `l2`. `memory` is a lower
    limit only if the rule of `fa_numba.bounds.cache` holds for the plan. A time is None if the data
    sheet lacks the speed.

    Parameters
    ----------
    plan : Plan
        The call's plan.
    device : Device
        The GPU.
    registers : tuple of int or None
        Registers per thread, one number for each kernel of the plan in launch order. None for a
        kernel that was not compiled.
    occupancies : tuple of Occupancy
        Number of thread blocks that a multiprocessor holds, one for each kernel of the plan.
    busy : float
        Average share of the main kernel's time in which a multiprocessor has thread blocks to run,
        from 0 to 1. It is below 1 if there are fewer thread blocks than multiprocessors, or if the
        last wave of thread blocks does not fill all multiprocessors. The main kernel is the kernel
        that computes the matrix products. It has the most shared memory.
    flops : int
        FLOPs of the matrix products of all visited tiles. The masked and padded parts of these
        tiles count too.
    dram : Dram
        Bytes that reach device memory.
    compute : float or None
        Time of the products: `flops` / (peak speed of the unit * `busy`).
    l2 : float or None
        Time of all accessed bytes at L2's bandwidth.
    memory : float or None
        Time of ``dram.bytes`` at device memory's bandwidth.
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
        """Return the longest of `compute`, `l2` and `memory` in seconds; None if no time is known.

        If `memory` is the longest time, this is a lower limit of the plan's time only if the rule
        of `fa_numba.bounds.cache` holds for the plan.
        """
        return max((x for x in (self.compute, self.l2, self.memory) if x is not None), default=None)

    @property
    def bound(self) -> str:
        """Return which of computing, L2 and device memory takes longest.

        Returns
        -------
        str
            "compute", "L2" or "DRAM". "latency" if computing takes longest and `busy` is below 0.5.
            "unknown" if the data sheet lacks the peak speed or the bandwidth of device memory.
        """
        times = {"compute": self.compute, "L2": self.l2, "DRAM": self.memory}
        known = {name: x for name, x in times.items() if x is not None}
        if self.compute is None or self.memory is None:
            return "unknown"
        longest = max(known, key=known.__getitem__)
        return "latency" if longest == "compute" and self.busy < FEW else longest


def expected(plan: Plan, device: Device, *, compiling: bool = False) -> Expected:
    """Return lower limits of the time that a plan takes on a GPU, and what limits the plan.

    Parameters
    ----------
    plan : Plan
        A plan that was made for `device`; see `Device.planning`.
    device : Device
        The GPU.
    compiling : bool, default False
        Whether to compile the plan's kernels in order to learn how many registers they need.
        Compiling takes seconds per kernel. If False, the number of registers is known only for
        kernels that were compiled before for the GPU of this machine. For any other kernel the
        occupancy is a range, and the times are computed from the smallest number of the range.

    Returns
    -------
    Expected
        Times in seconds, occupancy, FLOPs and bytes.

    Examples
    --------
    >>> import fa_numba
    >>> from fa_numba.bounds import named
    >>> gpu, shape = named("A100"), (1, 16, 4096, 64)
    >>> with gpu.planning():
    ...     plan = fa_numba.plan(shape, shape, algorithm="fa2", unit="simt")
    >>> found = expected(plan, gpu)
    >>> found.bound, found.floor == found.compute
    ('compute', True)
    """
    kernels = plan.launched
    known = device.present or compiling
    registers = tuple(
        registers_of(k, device.capability, compiling=compiling) if known else None for k in kernels
    )
    found = tuple(occupancy(device, k, n) for k, n in zip(kernels, registers, strict=True))
    # The kernel that computes the products has the largest tiles, and the most shared memory.
    main = max(range(len(kernels)), key=lambda n: kernels[n].shared_bytes)
    blocks = math.prod(plan.kernels[main].grid)
    resident = min(blocks, device.multiprocessors * found[main].least)
    # Thread blocks of standard attention compute all tiles, also under a causal mask.
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
    """Return the FLOPs of the products of all tiles of S that a plan computes.

    Every visited tile counts in full, with its masked and padded parts: two FLOPs per multiply-add.

    Parameters
    ----------
    plan : Plan
        A call's plan.

    Returns
    -------
    int
        FLOPs. `fa_numba.io_model.flops` returns the published number instead.
    """
    tiles = io_model.tiles_visited(
        plan.algorithm, plan.problem, plan.tiles, passes=plan.passes, block_mask=plan.block_mask
    )
    of_pair = io_model.multiply_adds(plan.problem, plan.passes)
    return 2 * of_pair * tiles * plan.tiles.Br * plan.tiles.Bc
