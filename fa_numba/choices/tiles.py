"""Block sizes that nobody chose: the papers' rule, and what this project takes by unit and pass.

The sizes are rows of ``tiles.csv``; what is here makes them fit memory, registers and sequences,
and picks between those that were measured.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from fa_numba.choices.facts import Size, measured, size, sizes, spills
from fa_numba.choices.requests import Request
from fa_numba.integers import ceil_div, power_of_two, round_up
from fa_numba.options import PLAIN, Features
from fa_numba.tiling.mma import StandardSpec, select_mma_spec
from fa_numba.tiling.mma_backward import MmaSweepSpec, row_warps_of, select_mma_backward_spec
from fa_numba.tiling.simt import SimtBackwardSpec, SimtSpec, splits
from fa_numba.tiling.tiles import Tiles, is_valid
from fa_numba.tiling.wgmma import GROUP_ROWS, PANEL, SPARE, WgmmaSpec, spare_taken
from fa_numba.tiling.wgmma_backward import LARGEST_ATOMIC


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
    """Block sizes of the forward kernels on tensor cores, halved until memory and registers hold
    them. Where 32 rows a warp would spill, or an option's own values make them, a warp takes 16.
    """
    d, crowded = round_up(head_dim, 16), features.crowds
    kinds = (*(["keys options"] if crowded else []), "keys") if splits_keys else ()
    kinds = kinds or (*(["bias"] if features.bias else []), *(["options"] if crowded else []))
    row = size("mma", algorithm, "fwd", head_dim, *kinds)
    least = 32 if splits_keys else 16
    Br, Bc = _needed(row.Br, seqlen_q), _needed(row.Bc, seqlen_k, least)
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
    return replace(found, threads=2 * found.Br) if narrow or row.beside == "bias" else found


def default_mma_standard_tiles(
    seqlen_q: int, seqlen_k: int, head_dim: int, shared_limit: int, passes: str = "fwd"
) -> Tiles:
    """Block sizes of standard attention on tensor cores, halved until memory and registers hold
    them; of 128 x 128 a warp takes 16 rows.
    """
    row = size("mma", "standard", passes, head_dim)
    Br, Bc = _needed(row.Br, seqlen_q), _needed(row.Bc, seqlen_k)
    select = functools.partial(
        select_mma_spec, head_dim=head_dim, shared_limit=shared_limit, kind=StandardSpec
    )
    found = _shrunk_mma(Br, Bc, select)
    return Tiles(found.Br, found.Bc, 2 * found.Br) if found.Br == found.Bc == 128 else found


def default_mma_backward_tiles(
    seqlen_q: int, seqlen_k: int, head_dim: int, shared_limit: int, **facts: Any
) -> Tiles:
    """Block sizes of the backward kernels on tensor cores, halved until memory and registers hold
    them: 32 x 64 in place of 64 x 128 where that takes too much memory, or sequences are no longer
    than two such tiles. FlashAttention-1, which also reads O and dQ, takes 16 columns a warp.
    """
    first = facts.get("row_tiles") == 3
    row = size("mma", "fa1" if first else "fa2", "bwd", head_dim)
    Br, Bc = row.Br, row.Bc
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
    """Block sizes of the deterministic backward pass's second sweep on tensor cores, halved until
    they fit.
    """
    row = size("mma", "fa2", "sweep", head_dim)
    select = functools.partial(
        select_mma_spec, head_dim=head_dim, shared_limit=shared_limit, kind=MmaSweepSpec
    )
    return _shrunk_mma(row.Br, row.Bc, select)


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

_FORWARD = ("wgmma", "fa2", "fwd")
_LEAST_COLUMNS = 64  # of a tile, however few keys there are


class Chosen(NamedTuple):
    """Something that nobody chose, and why it is what it is."""

    value: Any
    why: str


def hopper_tiles(request: Request, heads: int) -> Chosen:
    """The ``Tiles`` of FlashAttention-2's forward kernel on Hopper's tensor cores, the fastest of
    those measured, where the rows of so many query ``heads`` share a tile: three consumers where
    registers allow it and their tiles end first; as many columns as memory holds, or all there are.
    """
    p, features, d = request.problem, request.features, request.problem.head_dim
    rows = p.seqlen_q * heads
    window = 0 if p.left is None or p.right is None else p.left + p.right + 1
    kind = "options" if features.crowds else ""
    if features.bias:  # whose tile is in registers too
        others = replace(features, bias=False, causal=False) != PLAIN
        kind = "bias options" if others else "bias causal" if p.causal else "bias"
    wide = size(*_FORWARD, d, kind)
    if rows <= GROUP_ROWS:  # a consumer's: the columns' way from memory counts
        few = size(*_FORWARD, d, "few rows") if PANEL < d <= 2 * PANEL else wide
        return Chosen(Tiles(GROUP_ROWS, few.Bc, stages=2), f"{rows} rows fill one consumer: {few}")
    Bc = wide.Bc
    if not features.page_size:
        Bc = min(Bc, max(_LEAST_COLUMNS, round_up(p.seqlen_k, 16)))
    short = _short(request, rows, window)
    if short is not None:
        return Chosen(Tiles(short.Br, short.Bc or Bc, stages=short.stages), f"short: {short}")
    two = Tiles(2 * GROUP_ROWS, Bc, stages=2)
    kinds = ["three consumers splits"] if features.splits and d > PANEL else []
    most = size(*_FORWARD, d, *kinds, "three consumers")
    three = Tiles(most.Br, most.Bc if Bc == 128 else Bc, stages=2)
    crowded = features.crowds and d > PANEL
    if crowded or not _hold_three(three, d, features):
        return Chosen(two, f"two consumers, three lack registers or are slower: {wide}")
    tiles, why = two, "two consumers"
    if not p.causal:
        ends = _rounds(request, rows, heads, three.Br), _rounds(request, rows, heads, two.Br)
        each = measured(_TIME_OF_THREE, "narrow" if d <= PANEL or Bc < 128 else "wide")
        if each * ends[0] <= ends[1]:
            tiles, why = three, "three consumers"
        why += f": {ends[0]} rounds of {each:g} by three, {ends[1]} by two"
    # Where all of two consumers have a place, the longest is what the call takes.
    elif _row_tiles(request, rows, heads, two.Br) <= request.multiprocessors:
        why += ": the row tiles all have a place, and the longest is what the call takes"
    else:
        lens = p.q_lens if p.packed and p.q_lens else (rows,)
        longest = sum(n * n for n in lens) // max(1, sum(lens))  # where most rows are
        least = _causal_rows_of_three(d)
        if longest > least:
            tiles, why = three, "three consumers"
        why += f": {longest} causal rows, three end first from {least} on"
    return Chosen(tiles, f"{why}: {most if tiles == three else wide}")


_TIME_OF_THREE = "time of a tile of three consumers over one of two"


def _causal_rows_of_three(head_dim: int) -> float:
    what = "causal rows from which three consumers end first"
    return next((measured(what, d) for d in (PANEL, 80) if head_dim <= d), math.inf)


def _short(request: Request, rows: int, window: int) -> Size | None:
    """The row of a call whose row tiles are too short for one block to have the next one's Q, K and
    V in time: several blocks share a multiprocessor, or more tiles are on their way.
    """
    p, features = request.problem, request.features
    if not takes_places(features):
        return None
    longest = max(rows, p.seqlen_k) if p.causal else 0
    measures = {
        "short window": window,
        "short causal": longest,
        "short causal alone": 0 if features.window else longest,
        "short": 0 if features.window or p.causal else p.seqlen_k,
    }
    found = (x for x in sizes(*_FORWARD) if x.most and p.head_dim <= x.head_dim)
    return next((x for x in found if 0 < measures[x.beside] <= x.most), None)


def _row_tiles(request: Request, rows: int, heads: int, Br: int) -> int:
    return ceil_div(rows, Br) * (request.problem.heads_q // heads * request.problem.batch)


def _rounds(request: Request, rows: int, heads: int, Br: int) -> int:
    """Rounds in which row tiles find a place; of packed sequences the rows that go over their
    columns, since a tile takes as long as its sequence is.
    """
    p = request.problem
    if p.packed and p.q_lens:
        return sum(ceil_div(n, Br) * n for n in p.q_lens)
    tiles = _row_tiles(request, rows, heads, Br)
    return ceil_div(tiles, request.multiprocessors or 1)


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
    plain = replace(features, causal=False) == PLAIN
    row = size("wgmma", "fa1", "fwd", head_dim, *([] if plain else ["options"]))
    return Tiles(row.Br, row.Bc)


MOST_CHUNKS = 65535  # blocks along the last axis of a grid
_SMALL_HEAD = 64  # whose Q and dO of many columns each chunk would read from memory


def chunk_tiles(request: Request, Bc: int) -> int:
    """How many column tiles of each head go before the next ones in a causal backward pass on
    Hopper's tensor cores: 0 for those of one head after the other; all of a few K/V heads, whose
    long tiles begin at once; of many heads as many as read Q and dO together. Twice as many, until
    the grid's last axis has no more chunks than it takes.
    """
    p = request.problem
    columns, entries = (p.k_shape[0], 1) if p.packed else (p.seqlen_k, p.batch)
    few = entries * p.heads_k <= measured("heads of K and V that are few")
    small = p.head_dim <= _SMALL_HEAD and columns > measured("columns that are many in small heads")
    many = "many" if small or p.head_dim > LARGEST_ATOMIC else ""
    together = int(measured("columns of a head whose causal tiles go side by side", many))
    spilling = ("alibi", "one chunk") in _spilling(p.head_dim, request.features)
    if not few and columns <= together and not spilling:
        return 0
    found = 1 if few else together // Bc
    while found * Bc * MOST_CHUNKS < columns:
        found *= 2
    return found


def _spilling(head_dim: int, features: Features) -> list[tuple[str, str]]:
    """Options that are on, and beside what the backward kernels on Hopper's tensor cores spill
    with them.
    """
    return [
        (x.option, x.beside)
        for x in spills("wgmma", "fa2", "bwd")
        if x.first <= head_dim <= x.last and getattr(features, x.option)
    ]


def lacks_together(head_dim: int, features: Features) -> str:
    """Options that the backward kernels on Hopper's tensor cores do not have together, in words;
    empty for none. With a cap dS is made of the scores as they come from the cap, before slopes or
    a bias; the others spill.
    """
    added = [name for name in ("alibi", "bias") if getattr(features, name)]
    if added and features.softcap:
        return f"the option {added[0]} beside softcap"
    if len(added) == 2:
        return "the option alibi beside bias"
    at = f"at a head dimension of {head_dim}"
    for option, beside in _spilling(head_dim, features):
        lengths = ("q_lens", "kv_lens", "packed") if beside == "lengths" else (beside,)
        on = [name for name in lengths if getattr(features, name, False)]
        if on:
            return f"the option {on[0]} beside {option} {at}"
        if beside == "no mask" and not features.right:
            return f"the option {option} without a mask {at}"
    return ""
