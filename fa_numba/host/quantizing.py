"""Calls of ``fa_numba.quantize``, which stores arrays as e4m3 with scales: checks, plan, launch."""

from __future__ import annotations

import sys
from typing import Any

from fa_numba import checks, device
from fa_numba.checks import LAYOUTS
from fa_numba.choices.arguments import Buffer
from fa_numba.dtypes import E4M3, E4M3_CAPABILITY, UNSCALED
from fa_numba.host import launch_cache, placement
from fa_numba.host.arrays import Operand, all_aligned, operand
from fa_numba.host.binding import SEEDS, seed_words
from fa_numba.host.execution import execute, heads_first
from fa_numba.host.plans import Launch, LaunchPlan
from fa_numba.integers import ceil_div
from fa_numba.kernels.simt.quantize import (
    COLUMNS,
    ROWS,
    make_largest,
    make_quantize_blocks,
    make_quantize_heads,
    make_scales,
)
from fa_numba.options import as_word
from fa_numba.problem import MAX_HEAD_DIM, MAX_SEQLEN

PER = ("tensor", "head", "block")


def quantize(x: Any, per: str, rotate: int | None, layout: Any, stream: Any) -> tuple[Any, Any]:
    """Return (stored, scales). The arguments are those of ``fa_numba.quantize``."""
    options = {} if rotate is None else {"seed": rotate}
    call = launch_cache.describe_call(("quantize", per, rotate is None, layout), (x,), options)
    found = launch_cache.replay(call, None, stream)
    if found is None:
        found = _first_quantize(x, per, rotate, layout, stream, call)
    stored, scales = found
    return stored, scales


def plan_of_quantize(
    shape: tuple[int, ...],
    sizes: tuple[int, int, int, int],
    dtype: str,
    per: str,
    aligned: bool,
    rotated: bool,
) -> LaunchPlan:
    """Return the plan that quantises an array.

    ``shape`` is the shape of the array in the caller's layout, and ``sizes`` is (B, H, N, d).
    ``per`` is "tensor", "head" or "block". ``aligned`` says whether rows start at 16-byte
    addresses. ``rotated`` says whether rows are rotated first.
    """
    batch, heads, rows, d = sizes
    blocks = ceil_div(rows, ROWS)
    grid, facts = (blocks, heads, batch), (d, dtype, aligned, rotated)
    of_blocks = batch, heads, blocks
    stored = Buffer("Y", shape, E4M3.name)
    if per == "block":
        launch = Launch.of(make_quantize_blocks(*facts), grid)
        return LaunchPlan(launches=(launch,), outputs=(stored, Buffer("scales", of_blocks)))
    together = per == "tensor"
    launches = (
        Launch.of(make_largest(*facts), grid),
        Launch.of(make_scales(together), (1, 1, 1) if together else (heads, batch, 1)),
        Launch.of(make_quantize_heads(*facts), grid),
    )
    return LaunchPlan(
        launches=launches,
        outputs=(stored, Buffer("scales", (batch, heads))),
        workspace=(Buffer("most", of_blocks),),
    )


def _first_quantize(x: Any, per: str, rotate: Any, layout: Any, stream: Any, call: Any) -> list:
    checks.check_name("per", per, PER)
    given = operand("x", x, UNSCALED)
    axes = LAYOUTS[checks.as_layout(layout)]
    named = dict(zip(axes, checks.as_sizes("x", given.shape, axes), strict=True))
    batch, heads, rows, d = (named[axis] for axis in LAYOUTS["bhnd"])
    if d % COLUMNS or d > MAX_HEAD_DIM:
        raise ValueError(
            f"head_dim of x must be a multiple of {COLUMNS} and at most {MAX_HEAD_DIM}, so that "
            f"rows of e4m3 start at multiples of 16 bytes, got {d}; append columns of zeros"
        )
    if rows > MAX_SEQLEN:
        raise ValueError(f"x must have at most {MAX_SEQLEN} rows per head, got {rows}")
    seed = None if rotate is None else as_word("rotate", rotate, 64)
    if seed is not None and d & (d - 1):
        raise ValueError(
            f"head_dim of x must be a power of two with rotate, got {d}; append columns of zeros "
            "to q and k, and pass the scale of the original head_dim to the attention call"
        )
    if device.compute_capability() < E4M3_CAPABILITY:
        raise ValueError(
            "quantize must run on a GPU of compute capability 8.9 or newer, which converts to "
            f"e4m3, got {'.'.join(map(str, device.compute_capability()))}"
        )
    with placement.placed(given):
        aligned = all_aligned([given], given)
        sizes = batch, heads, rows, d
        plan = plan_of_quantize(given.shape, sizes, given.dtype, per, aligned, seed is not None)
        placement.check_grid(plan, "x")
        words = dict(zip(SEEDS, seed_words(seed or 0, 0), strict=True))
        turned = axes != LAYOUTS["bhnd"]

        def run(found: dict[str, object], stream: Any) -> None:
            execute(plan, found | {n: heads_first(found[n], turned) for n in "XY"}, stream)

        made = launch_cache.run_and_keep(plan, {"X": given}, stream, call, run, words=words)
    return [_as_float8(given, made[0]), made[1]]


def _as_float8(given: Operand, stored: Any) -> Any:
    """Return the array ``stored`` of e4m3 numbers; if it is a JAX array, with the dtype
    float8_e4m3fn.

    ``given`` is the operand of the array that was quantised. On a GPU, the quantised numbers of a
    JAX array were computed in an array of uint8. The function returns a view of this array with the
    dtype float8_e4m3fn. Any other array is returned unchanged.
    """
    if given.library == "jax" and str(stored.dtype) == E4M3.host:
        return stored.view(sys.modules["jax"].numpy.float8_e4m3fn)
    return stored
