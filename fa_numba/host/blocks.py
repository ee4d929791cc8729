"""The blocks of a ``mask_mod``: checks, plan, and lists of them where they are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fa_numba import device, mods
from fa_numba.checks import check_grid_size
from fa_numba.dtypes import INDEX, STATE
from fa_numba.host import launch_cache, placement
from fa_numba.host.arrays import HOST, Operand, check_together, on_host, operand
from fa_numba.host.binding import Binding
from fa_numba.host.execution import execute
from fa_numba.host.plans import Buffer, Launch, LaunchPlan
from fa_numba.integers import ceil_div
from fa_numba.kernels.simt.blocks import LISTING, make_blocks, make_lists
from fa_numba.mods.blocks import BlockMask
from fa_numba.options import UNIFORM, Features
from fa_numba.problem import Problem, check_blocks

STEPS_PER_ELEMENT = 40  # of a multiply-add of a tile, in time on the emulator


class Lists:
    """What kernels read of blocks, by name: where they were made, and copies, made once."""

    def __init__(self, made: Mapping[str, Any]) -> None:
        found = {name: _operand(name, x) for name, x in made.items()}
        self._first = next(iter(found.values())).ordinal
        self._at = {self._first: found}
        self._states: np.ndarray | None = None

    def at(self, ordinal: int) -> Mapping[str, Operand]:
        """The arrays on a GPU, or on the host."""
        if ordinal not in self._at:
            host = {name: on_host(name, x.owner) for name, x in self._at[self._first].items()}
            if ordinal != HOST:
                with device.on_device(ordinal):
                    host = {name: device.to_gpu(x) for name, x in host.items()}
                    device.synchronize()
            self._at[ordinal] = {name: _operand(name, x) for name, x in host.items()}
        return self._at[ordinal]

    def states(self) -> np.ndarray:
        """Return the states of all blocks on the host, which are copied from a GPU once."""
        if self._states is None:
            self._states = np.array(
                on_host("block_mask", self._at[self._first]["block_mask"].owner)
            )
        return self._states


def _operand(name: str, array: Any) -> Operand:
    return operand(name, array, (STATE.name, INDEX.name))


def create(mask_mod: Any, sizes: tuple[int, int, int, int], tiles: Any) -> BlockMask:
    """The blocks of ``mask_mod`` for sizes (B, H, Nq, Nk), with the public function's arguments."""
    check_blocks(tiles)
    binding = Binding.of({"mask_mod": mask_mod})
    B, H, Nq, Nk = sizes
    problem = Problem(B, H, H, Nq, Nk, 1, mask_mod=binding.facts.get("mask_mod"))
    if problem.mask_mod is None:
        raise TypeError("mask_mod must be a function of (b, h, i, j), got None")
    check_grid_size("batch", B)
    check_grid_size("heads", H)
    Nq, Nk = problem.seqlen_q, problem.seqlen_k
    Tr, Tc = ceil_div(Nq, tiles.Br), ceil_div(Nk, tiles.Bc)
    if Tr * Tc >= 2**31:
        raise ValueError(
            f"tiles must cut the {Nq} rows and {Nk} columns into fewer than 2**31 blocks, got "
            f"{Tr * Tc} blocks of {tiles}; choose larger tiles"
        )
    kernel = make_blocks(Features(mask_mod=problem.mask_mod), tiles.Br, tiles.Bc)
    shape = B, H, Tr, Tc
    plan = LaunchPlan(
        launches=(
            Launch.of(kernel, (Tr * Tc, H, B), Nq=Nq, Nk=Nk),
            Launch.of(make_lists(), (ceil_div(max(Tr, Tc), LISTING), H, B)),
        ),
        outputs=(
            Buffer("block_mask", shape, STATE.name),
            Buffer("next_column", (B, H, Tr, Tc + 1), INDEX.name),
            Buffer("next_row", (B, H, Tc, Tr + 1), INDEX.name),
        ),
        uncounted=(*UNIFORM, *problem.mask_mod.fields),
    )
    inputs = binding.arrays or {"nothing": operand("nothing", np.zeros(1, np.float32))}
    first, *others = inputs.values()
    check_together([first], others)
    with placement.placed(first):
        steps = STEPS_PER_ELEMENT * B * H * Nq * Nk
        placement.check_steps(plan, f"mask_mod over {B * H} x {Nq} x {Nk} elements", steps)

        def run(found: dict[str, Any], stream: Any) -> None:
            execute(plan, found, stream, lambda _: binding.values(problem, found, 1.0))

        made = launch_cache.run_and_keep(plan, inputs, None, None, run)
    held = mods.holding(mask_mod, dict(mods.captured("mask_mod", mask_mod).values))
    names = (output.name for output in plan.outputs)
    lists = Lists(dict(zip(names, made, strict=True)))
    reads = mods.parameters_read("mask_mod", held)
    return BlockMask(held, tiles, Nq, Nk, shape, mods.captured("mask_mod", held), lists, reads)
