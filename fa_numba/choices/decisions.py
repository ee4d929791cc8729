"""The decision for a pass: unit, tiles, spec and number of splits, each with a reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fa_numba.choices.requests import Request
from fa_numba.choices.splits import chosen_group_splits, chosen_splits
from fa_numba.choices.tiles import Chosen
from fa_numba.choices.units import Unit
from fa_numba.integers import ceil_div
from fa_numba.tiling import Tiles


@dataclass(frozen=True)
class Decision:
    """The unit, the tiles and the number of splits that were chosen for a pass.

    Attributes
    ----------
    unit : Unit
        Which instructions multiply matrices, and the kernels for them.
    tiles : Tiles
        Tile sizes, threads and stages of the main kernel.
    spec : Spec
        The facts for which the main kernel is compiled.
    splits : int
        Number of thread blocks that share a row tile in the forward pass, or a column tile in the
        backward pass.
    why : mapping of str to str
        Reason for each choice. The keys are "unit", "tiles", and for FlashAttention-2 also
        "kv_splits" or "group_splits". A backward pass on unit "wgmma" has the further key
        "variant", with a text about the variant of the backward kernel that is used.
    """

    unit: Unit
    tiles: Tiles
    spec: Any
    splits: int = 1
    why: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)


def forward(request: Request, chosen: Chosen[Unit]) -> Decision:
    """Return the decision for a forward pass of FlashAttention-1 or -2 on the chosen unit."""
    (unit, why_unit), p = chosen, request.problem
    tiles, spec, why = unit.forward(request)
    if request.kernel not in unit.splits_columns:
        return Decision(unit, tiles, spec, why={"unit": why_unit, "tiles": why})
    blocks = ceil_div(p.seqlen_q, spec.head_rows) * (p.heads_q // spec.tile_heads) * p.batch
    splits, why_splits = chosen_splits(request, tiles, spec, blocks)
    if request.choices.kv_splits == "auto" and splits > 1:
        tiles, spec, why = unit.forward(request.chosen(kv_splits=splits))
    reasons = {"unit": why_unit, "tiles": why, "kv_splits": why_splits}
    return Decision(unit, tiles, spec, splits, reasons)


def backward(request: Request, chosen: Chosen[Unit]) -> Decision:
    """Return the decision for a backward pass of FlashAttention-1 or -2 on the chosen unit."""
    unit, why_unit = chosen
    if request.choices.algorithm == "fa1":
        tiles, spec, why = unit.backward(request)
        return Decision(unit, tiles, spec, why={"unit": why_unit, "tiles": why, **spec.reasons})
    splits, why_splits = chosen_group_splits(request)
    tiles, spec, why = unit.backward(request.chosen(group_splits=splits))
    reasons = {"unit": why_unit, "tiles": why, "group_splits": why_splits, **spec.reasons}
    return Decision(unit, tiles, spec, splits, reasons)
