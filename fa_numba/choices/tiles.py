"""Block sizes that nobody chose: the papers' rule, and what this project takes by unit and pass."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from fa_numba.integers import ceil_div, power_of_two, round_up
from fa_numba.options import PLAIN, Features
from fa_numba.problem import MAX_SEQLEN
from fa_numba.tiling.mma import (
    StandardSpec,
    select_mma_spec,
)
from fa_numba.tiling.mma_backward import MmaSweepSpec, row_warps_of, select_mma_backward_spec
from fa_numba.tiling.simt import SimtBackwardSpec, SimtSpec, splits
from fa_numba.tiling.tiles import MOST_STAGES, Tiles, is_valid
from fa_numba.tiling.wgmma import GROUP_ROWS, PANEL, SPARE, WgmmaSpec, spare_taken
from fa_numba.tiling.wgmma_backward import ADDED_BESIDE, LARGEST_ATOMIC


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


# --- Hopper's tensor cores ---------------------------------------------------------------------

SHORT = 1024  # rows up to which other tiles are the fastest than of long sequences
_LEAST_COLUMNS = 64  # of a tile, however few keys there are
# Head dimensions whose three consumers hold 112 columns, and under a causal mask end first where
# there are so many rows; both as `python -m experiments tune --series fa2-wgmma` found.
_SMALL, _LONG = 80, 2048
# Rows, and columns of a window, up to which small heads' row tiles are too short for one block to
# have the next one's Q, K and V in time.
_SHORTER, _NARROW = 512, 256
# Columns of a tile where a bias is read, up to a head dimension: alone, with a causal mask and with
# other options that hold registers, as the assembler spills none.
_BIAS_COLUMNS = {64: (128, 112, 96), 128: (96, 96, 64), 192: (64, 64, 48), 256: (48, 32, 32)}
# What a tile of three consumers takes over one of two: up to a panel or of few columns, and wider.
_THREE, _THREE_WIDE = 1.29, 1.43


def default_wgmma_tiles(
    seqlen_q: int,
    head_dim: int,
    causal: bool,
    features: Features = PLAIN,
    *,
    seqlen_k: int = MAX_SEQLEN,
    heads: int = 1,
    places: int = 0,
    lens: Sequence[int] | None = None,
    window: int = 0,
) -> Tiles:
    """Block sizes of the kernels on Hopper's tensor cores, the fastest of those measured: three
    consumers where registers allow it and their tiles end first, and as many columns as memory
    holds, or all there are. ``seqlen_q`` are the rows of all heads that share a tile, ``heads`` how
    many such there are with all batch entries, ``places`` the multiprocessors, 0 where they are not
    known, ``lens`` the rows of packed sequences, of which ``seqlen_q`` is the largest, ``window``
    the columns that a row sees. Few rows are left to one consumer, since then the columns' way from
    memory counts.
    """
    Bc = 128 if head_dim <= 128 else 112 if head_dim <= 192 and not features.crowds else 96
    Bc = 80 if head_dim > 192 else Bc
    if features.bias:  # whose tile is in registers too
        others = replace(features, bias=False, causal=False) != PLAIN
        columns = next(found for d, found in _BIAS_COLUMNS.items() if head_dim <= d)
        Bc = columns[2 if others else 1 if causal else 0]
    if seqlen_q <= GROUP_ROWS:
        return Tiles(GROUP_ROWS, 64 if PANEL < head_dim <= 2 * PANEL else min(Bc, 128), stages=2)
    if not features.page_size:
        Bc = min(Bc, max(_LEAST_COLUMNS, round_up(seqlen_k, 16)))
    if head_dim <= PANEL and takes_places(features):
        if features.window or causal:
            longest = max(seqlen_q, seqlen_k)
            if 0 < window <= _NARROW or (causal and longest <= _SHORTER):
                return Tiles(GROUP_ROWS, _LEAST_COLUMNS, stages=3)
            if longest <= SHORT and not features.window:
                return Tiles(GROUP_ROWS, 96, stages=2)
        elif seqlen_k <= 128:
            return Tiles(2 * GROUP_ROWS, Bc, stages=MOST_STAGES)
    two = Tiles(2 * GROUP_ROWS, Bc, stages=2)
    three = Tiles(3 * GROUP_ROWS, Bc, stages=2)
    if Bc == 128 and head_dim > PANEL:
        plain = head_dim <= _SMALL and replace(features, causal=False) == PLAIN
        three = replace(three, Bc=112 if plain else 96)
    if not _hold_three(three, head_dim, features) or (features.crowds and head_dim > PANEL):
        return two
    if causal:
        # Where all of two consumers have a place, the longest is what the call takes.
        if head_dim > _SMALL or ceil_div(seqlen_q, two.Br) * heads <= places:
            return two
        rows = sum(n * n for n in lens) // max(1, sum(lens)) if lens else seqlen_q
        return three if rows > (SHORT if head_dim <= PANEL else _LONG) else two
    # Rounds in which the tiles find a place, times what one takes over one of two consumers.
    takes = _THREE if head_dim <= PANEL or Bc < 128 else _THREE_WIDE

    def rounds(Br: int) -> int:
        if lens:  # a tile takes as long as its sequence is
            return sum(ceil_div(n, Br) * n for n in lens)
        tiles = ceil_div(seqlen_q, Br) * heads
        return ceil_div(tiles, places) if places else tiles

    return three if takes * rounds(three.Br) <= rounds(two.Br) else two


def takes_places(features: Features) -> bool:
    """Whether more places of Q, K and V, or more blocks, were measured beside these options."""
    return replace(features, causal=False, window=False) == PLAIN


def _hold_three(tiles: Tiles, head_dim: int, features: Features) -> bool:
    """Whether three consumers' registers hold the tiles; with a window or a cap they are slower."""
    spec = WgmmaSpec(head_dim, tiles.Br, tiles.Bc, 4, tiles.Br // 2)
    slower = features.window or features.softcap or features.bias
    return spec.fits_registers and not slower and spare_taken(features) <= SPARE


def default_wgmma_fa1_tiles(head_dim: int, features: Features) -> Tiles:
    """Block sizes of FlashAttention-1's forward kernel on Hopper's tensor cores: as many columns as
    memory holds, since O passes through global memory once for each column tile.
    """
    if head_dim <= 128:
        plain = replace(features, causal=False) == PLAIN
        return Tiles(128, 256 if plain else 128)  # other options take more registers
    return Tiles(64, 192 if head_dim <= 192 else 128)


# Where a causal mask leaves columns unequal work: columns of a head whose tiles go side by side;
# more of them in small heads of many columns, whose Q and dO would be read from memory by each
# chunk; and how many heads of K and V are few, whose tiles all do.
SIDE_BY_SIDE, FEW_HEADS = 512, 8
MORE_SIDE_BY_SIDE, SMALL_HEAD, MANY_COLUMNS = 2048, 64, 4096
MOST_CHUNKS = 65535  # blocks along the last axis of a grid


def chunk_tiles(columns: int, heads: int, Bc: int, head_dim: int, slopes: bool = False) -> int:
    """``chunk_tiles`` of a causal call with so many columns and, over the batch, K/V heads: one of
    a few heads, whose long tiles all begin at once; of many as many as read Q and dO together.
    Twice as many, until the grid's last axis has no more chunks than it takes. With ``slopes`` one
    chunk is one too: the assembler spills 8 bytes of the kernel without.
    """
    small = head_dim <= SMALL_HEAD and columns > MANY_COLUMNS
    together = MORE_SIDE_BY_SIDE if small or head_dim > LARGEST_ATOMIC else SIDE_BY_SIDE
    if heads > FEW_HEADS and columns <= together and not slopes:
        return 0
    found = 1 if heads <= FEW_HEADS else together // Bc
    while found * Bc * MOST_CHUNKS < columns:
        found *= 2
    return found


def lacks_together(head_dim: int, features: Features) -> str:
    """What a kernel does not add to the scores, in words; empty for nothing. With a cap it makes
    dS of the scores as they come from the cap; what else it leaves out would spill.
    """
    added = [name for name in ("alibi", "bias") if getattr(features, name)]
    if added and features.softcap:
        return f"the option {added[0]} beside softcap"
    if len(added) == 2:
        return "the option alibi beside bias"
    if features.bias and features.packed and 2 * PANEL < head_dim <= 3 * PANEL:
        return f"the option packed beside bias at a head dimension of {head_dim}"
    if head_dim > PANEL:
        return ""
    crowded = head_dim > ADDED_BESIDE
    crowd = ("window", "softcap", "alibi", *(("bias",) if crowded else ()))
    beside = [name for name in crowd if getattr(features, name)]
    ends = [name for name in ("q_lens", "kv_lens", "packed") if getattr(features, name)]
    if beside and ends:
        return f"the option {ends[0]} beside {beside[0]} at a head dimension of {head_dim}"
    if crowded and features.alibi and not (features.causal or features.window):
        return f"the option alibi without a mask at a head dimension of {head_dim}"
    return ""
