"""Block sizes that nobody chose: the papers' rule, and what this project takes by unit and pass."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fa_numba.integers import ceil_div, power_of_two, round_up
from fa_numba.options import PLAIN, Features
from fa_numba.tiling.mma import (
    StandardSpec,
    select_mma_spec,
)
from fa_numba.tiling.mma_backward import MmaSweepSpec, row_warps_of, select_mma_backward_spec
from fa_numba.tiling.simt import SimtBackwardSpec, SimtSpec, splits
from fa_numba.tiling.tiles import Tiles, is_valid


def paper_rule(M: int, head_dim: int) -> tuple[int, int]:
    """(Br, Bc) of FlashAttention's Algorithm 1, line 1, for M floats of on-chip memory."""
    Bc = ceil_div(M, 4 * head_dim)
    return min(Bc, head_dim), Bc


def _needed(size: int, seqlen: int, least: int = 16) -> int:
    """``size``, or for a short sequence the power of two that holds it, from ``least`` on."""
    return min(size, max(least, power_of_two(seqlen)))


# --- CUDA cores --------------------------------------------------------------------------------


def default_tiles(
    algorithm: str, seqlen_q: int, seqlen_k: int, head_dim: int, shared_limit: int
) -> Tiles:
    """Block sizes of ``algorithm``'s forward kernels on CUDA cores, with ``shared_limit`` bytes of
    shared memory a block.

    FlashAttention-1 takes Bc from its line 1 (ceil(M / 4d), as a power of two up to 128); the
    Q-outer kernels and the inner block take FlashAttention-2's choice from {64, 128} (section 3.3).
    Both are halved, the larger first, until shared memory and registers hold them, and no block is
    larger than the sequence needs.
    """
    Bc = 64
    if algorithm == "fa1":
        wanted = paper_rule(shared_limit // 4, head_dim)[1]
        Bc = min(128, power_of_two(wanted + 1) // 2)  # rounded down
    Br, Bc = _needed(128, seqlen_q), _needed(Bc, seqlen_k)
    return _shrunk(Br, Bc, head_dim, shared_limit, SimtSpec)


def default_backward_tiles(seqlen_q: int, seqlen_k: int, head_dim: int, shared_limit: int) -> Tiles:
    """Block sizes of the backward kernels on CUDA cores: 64 x 64, halved until memory and registers
    hold them.
    """
    Br, Bc = _needed(64, seqlen_q), _needed(64, seqlen_k)
    return _shrunk(Br, Bc, head_dim, shared_limit, SimtBackwardSpec)


def _shrunk(Br: int, Bc: int, head_dim: int, shared_limit: int, kind: type[SimtSpec]) -> Tiles:
    """The first tiles that fit, the larger block halved first."""
    while (Br, Bc) != (4, 8):
        found = splits(Br, Bc, head_dim, kind)
        if found and found[0].shared_bytes <= shared_limit:
            return Tiles(Br, Bc)
        if Br >= Bc and Br > 4:
            Br //= 2
        else:
            Bc //= 2
    return Tiles(Br, Bc)


# --- tensor cores ------------------------------------------------------------------------------


def default_mma_tiles(
    algorithm: str,
    seqlen_q: int,
    seqlen_k: int,
    head_dim: int,
    shared_limit: int,
    features: Features = PLAIN,
    splits_keys: bool = False,
) -> Tiles:
    """Block sizes of the tensor-core kernels: 128 x 64, halved until memory and registers fit.

    FlashAttention-1 takes as many columns as registers hold: every pass over them moves O. Where 32
    rows a warp would spill registers, or an option's own values make them, it takes 16 or Bc less.
    Where the warps split the keys each has all of Br, and its part of O: 32 x 256, then less.
    """
    d, crowded = round_up(head_dim, 16), features.crowds
    Bc = 64
    if algorithm == "fa1" and d <= 128:
        Bc = 256 if d <= 64 and not crowded else 128
    elif algorithm == "fa1" and d > 192 and not splits_keys:
        Bc = 32 if crowded else 48
    least = 32 if splits_keys else 16
    most = 128 if not splits_keys else 32 if d <= 64 else 16
    low = algorithm == "fa2" and d <= 64 and features.bias  # what is read of a bias fills registers
    most = min(most, 64) if low else most
    Br, Bc = _needed(most, seqlen_q), _needed(Bc, seqlen_k, least)
    older = shared_limit < 200 * 1024  # than compute capability 9.0
    narrow = algorithm == "fa1" or 64 < d < 128
    narrow |= (d == 64 and features.packed) or (
        d == 128 and (crowded or (older and (features.causal or features.splits)))
    )
    select = functools.partial(
        select_mma_spec, head_dim=head_dim, shared_limit=shared_limit, splits_keys=splits_keys
    )
    found = _shrunk_mma(Br, Bc, select, 16, least)
    narrow &= found.Br % 128 == 0 or features.splits
    return replace(found, threads=2 * found.Br) if narrow or low else found


def default_mma_standard_tiles(
    seqlen_q: int, seqlen_k: int, head_dim: int, shared_limit: int, passes: str = "fwd"
) -> Tiles:
    """Block sizes of standard attention on tensor cores: 128 x 64; in the backward pass ("bwd"),
    where each column tile reads all of Q and dO, 128 x 128 with 16 rows a warp.
    """
    Br, Bc = _needed(128, seqlen_q), _needed(64 if passes == "fwd" else 128, seqlen_k)
    select = functools.partial(
        select_mma_spec, head_dim=head_dim, shared_limit=shared_limit, kind=StandardSpec
    )
    found = _shrunk_mma(Br, Bc, select)
    return Tiles(found.Br, found.Bc, 2 * found.Br) if found.Br == found.Bc == 128 else found


def default_mma_backward_tiles(
    seqlen_q: int, seqlen_k: int, head_dim: int, shared_limit: int, **facts: Any
) -> Tiles:
    """Block sizes of the backward kernels on tensor cores: 32 x 128, 64 x 128 where two warps share
    their columns, and 32 x 64 beyond d = 128, where that takes too much memory or sequences are no
    longer than two such tiles; halved until memory and registers hold them.

    FlashAttention-1, which also reads O and dQ, spills registers with these: it takes 64 x 64 in
    place of 64 x 128, and 16 columns a warp.
    """
    first = facts.get("row_tiles") == 3
    Br, Bc = (32, 128) if head_dim <= 64 else (64, 128) if head_dim <= 128 else (32, 64)
    if first and 64 < head_dim <= 128:
        Bc = 64
    select = functools.partial(
        select_mma_backward_spec, head_dim=head_dim, shared_limit=shared_limit, **facts
    )
    few = max(seqlen_q, seqlen_k) <= 128
    if (Br, Bc) == (64, 128) and (few or not is_valid(Tiles(Br, Bc), select)):
        Br, Bc = 32, 64
    row_warps = row_warps_of(head_dim)
    smallest = 16 * row_warps
    Br, Bc = _needed(Br, seqlen_q, smallest), _needed(Bc, seqlen_k)
    found = _shrunk_mma(Br, Bc, select, smallest)
    return Tiles(found.Br, found.Bc, 2 * row_warps * found.Bc) if first else found


def sweep_tiles(head_dim: int, shared_limit: int) -> Tiles:
    """Block sizes of the deterministic backward pass's second sweep on tensor cores: 64 x 64,
    halved until they fit.
    """
    select = functools.partial(
        select_mma_spec, head_dim=head_dim, shared_limit=shared_limit, kind=MmaSweepSpec
    )
    return _shrunk_mma(64, 64, select)


def _shrunk_mma(
    Br: int, Bc: int, select: Callable[[Tiles], Any], least_rows: int = 16, least_columns: int = 16
) -> Tiles:
    """The first tiles from Br x Bc down that ``select`` has a specialisation for.

    Columns are halved first, to a multiple of 16, down to 32; then rows, down to ``least_rows``;
    then columns to ``least_columns``. Raises ``select``'s ValueError where the last do not fit.
    """
    while (Br, Bc) != (least_rows, least_columns) and not is_valid(Tiles(Br, Bc), select):
        if Bc > 32 or Br == least_rows:
            Bc = round_up(ceil_div(Bc, 2), 16)
        else:
            Br //= 2
    select(Tiles(Br, Bc))
    return Tiles(Br, Bc)
