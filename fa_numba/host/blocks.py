"""The blocks of a ``mask_mod``: checks, plan, result."""

from __future__ import annotations

from typing import Any

import numpy as np

from fa_numba import mods
from fa_numba.host import placement
from fa_numba.host.arrays import check_together, on_host, operand
from fa_numba.host.binding import Binding
from fa_numba.host.calls import launched
from fa_numba.host.execution import execute
from fa_numba.host.plans import Buffer, Launch, LaunchPlan
from fa_numba.integers import ceil_div
from fa_numba.kernels.simt.blocks import make_blocks
from fa_numba.mods.blocks import BlockMask
from fa_numba.options import UNIFORM, Features
from fa_numba.problem import Problem, check_blocks

STEPS_PER_ELEMENT = 40  # of a multiply-add of a tile, in time on the emulator


def create(mask_mod: Any, sizes: tuple[int, int, int, int], tiles: Any) -> BlockMask:
    """The blocks of ``mask_mod`` for sizes (B, H, Nq, Nk), with the public function's arguments."""
    check_blocks(tiles)
    binding = Binding.of({"mask_mod": mask_mod})
    B, H, Nq, Nk = sizes
    problem = Problem(B, H, H, Nq, Nk, 1, mask_mod=binding.facts.get("mask_mod"))
    if problem.mask_mod is None:
        raise TypeError("mask_mod is None: allowed is a function of (b, h, i, j)")
    Tr, Tc = ceil_div(Nq, tiles.Br), ceil_div(Nk, tiles.Bc)
    kernel = make_blocks(Features(mask_mod=problem.mask_mod), tiles.Br, tiles.Bc)
    launch = Launch.of(kernel, (Tr * Tc, H, B), states="blocks", Nq=Nq, Nk=Nk)
    plan = LaunchPlan(
        launches=(launch,),
        outputs=(Buffer("blocks", (B, H, Tr, Tc)),),
        uncounted=(*UNIFORM, *problem.mask_mod.fields),
    )
    inputs = binding.arrays or {"nothing": operand("nothing", np.zeros(1, np.float32))}
    first, *others = inputs.values()
    check_together([first], others)
    with placement.placed(first):
        steps = STEPS_PER_ELEMENT * B * H * Nq * Nk
        placement.check_steps(plan, f"the mask has {B * H} x {Nq} x {Nk} elements", steps)

        def run(found: dict[str, Any], stream: Any) -> None:
            execute(plan, found, stream, lambda _: binding.values(problem, found, 1.0))

        (made,) = launched(plan, inputs, None, None, run)
    values = dict(mods.captured("mask_mod", mask_mod).values)
    held = mods.holding(mask_mod, values)
    return BlockMask(held, tiles, on_host("blocks", made).astype(np.uint8))
