"""The choice of tiles if the caller gives none, for each unit and pass.

The measured tiles are rows of tiles.csv. The functions of this module select a row, and shrink its
tiles until they fit memory, registers and the sequence.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Generic, NamedTuple, TypeVar

from fa_numba.choices.facts import Size, measured, size, sizes, spills
from fa_numba.choices.requests import Request
from fa_numba.integers import ceil_div, power_of_two, round_up
from fa_numba.options import PLAIN, Features, argument_of
from fa_numba.problem import Problem
from fa_numba.tiling.mma import MmaSpec, StandardSpec, select_mma_spec
from fa_numba.tiling.mma_backward import MmaDqSpec, row_warps_of, select_mma_backward_spec
from fa_numba.tiling.simt import SimtBackwardSpec, SimtSpec, splits
from fa_numba.tiling.tiles import Tiles, is_valid
from fa_numba.tiling.wgmma import GROUP_ROWS, PANEL, SPARE, WgmmaSpec, spare_taken
from fa_numba.tiling.wgmma_variants import LARGEST_ATOMIC, default_wgmma_backward_tiles


def paper_rule(M: int, head_dim: int) -> tuple[int, int]:
    """Return (Br, Bc) of FlashAttention's Algorithm 1, line 1.

    ``M`` is the on-chip memory in floats. Bc is ceil(M / 4d), and Br is min(Bc, d).
    """
    Bc = ceil_div(M, 4 * head_dim)
    return min(Bc, head_dim), Bc


def _needed(size: int, seqlen: int, least: int = 16) -> int:
    """Return the number of rows or columns of a tile: ``size``, or less for a short sequence.

    For a short sequence, the number is ``seqlen`` rounded up to a power of two, but not less than
    ``least``.
    """
    return min(size, max(least, power_of_two(seqlen)))


_T = TypeVar("_T")


class Chosen(NamedTuple, Generic[_T]):
    """A choice for a call, made by the caller or by a rule, and the reason in words."""

    value: _T
    why: str


def simt_tiles(
    algorithm: str, of: str, seqlen_q: int, seqlen_k: int, head_dim: int, shared_limit: int
) -> Chosen:
    """Return the tiles of the kernels on CUDA cores, and the reason.

    ``of`` is "fwd" or "bwd". ``shared_limit`` is the shared memory of a thread block in bytes.

    Br and Bc are numbers in tiles.csv. There is one exception: for FA-1's forward kernel, Bc is
    ceil(M / 4d) as in line 1 of Algorithm 1, rounded down to a power of two, and at most 128. M is
    the on-chip memory in floats.

    Both sizes are reduced for short sequences. Then the larger of both sizes is halved repeatedly,
    until shared memory and registers hold the tiles.
    """
    backward = of == "bwd"
    row = size("simt", "fa2", of, head_dim)
    Bc, why = row.Bc, str(row)
    if algorithm == "fa1" and not backward:
        wanted = paper_rule(shared_limit // 4, head_dim)[1]
        Bc = min(128, power_of_two(wanted + 1) // 2)  # rounded down to a power of two
        why = f"{row.Br} x {Bc} with Bc as in Algorithm 1, line 1, of arXiv 2205.14135, rounded"
    Br, Bc = _needed(row.Br, seqlen_q), _needed(Bc, seqlen_k)
    while (Br, Bc) != (4, 8):
        found = splits(Br, Bc, head_dim, SimtBackwardSpec if backward else SimtSpec)
        if found and found[0].shared_bytes <= shared_limit:
            break
        if Br >= Bc:
            Br //= 2
        else:
            Bc //= 2
    return _fitted(Tiles(Br, Bc), why)


def mma_tiles(
    algorithm: str, of: str, seqlen_q: int, seqlen_k: int, head_dim: int, shared_limit: int,
    features: Features = PLAIN, keys: bool = False,
) -> Chosen:  # fmt: skip
    """Return the tiles of the kernels on tensor cores (unit "mma"), and the reason.

    ``of`` is "fwd", "bwd" or "dQ" (the kernel that computes dQ alone). ``keys`` says whether the
    warps divide the columns of a tile. The tiles are a row of tiles.csv. This table lists the cases
    of tiles.csv that are tried in order, before the case "" for calls without options:

    call                                                   cases in tiles.csv
    with a bias                                            "bias", "options"
    with another option that takes registers               "options"
    ``keys``                                               "keys"
    ``keys``, and an option that takes registers           "keys options", "keys"
    float32 in n planes                                    "n planes", "planes"
    float32 in planes, and ``keys``                        "keys planes"

    The tiles are reduced for short sequences. They are then reduced until shared memory and
    registers hold them.

    The number of threads follows from the part of a tile that one warp computes. The first case
    that applies decides:

    kernel                                                 part of a tile per warp
    standard attention, tiles of 128 x 128                 16 rows
    forward, float32 in planes without ``keys``            16 rows
    forward, float32 in planes with ``keys``               a part of the columns, with 2 Br threads
    forward, a bias and d up to 64                         16 rows
    forward, high tiles and scarce registers               16 rows
    backward, FA-1 or float32 in planes                    16 columns
    backward, FA-2                                         32 columns if possible, otherwise 16
    all other kernels, with ``keys``                       a fourth of the columns if possible
    all other kernels, without ``keys``                    32 rows if possible, otherwise 16

    Tiles are high if Br is a multiple of 128, or if the call has key splits. Registers are scarce
    in FA-1, and in calls of FA-2 that would spill registers with 32 rows per warp.
    """
    d, crowded = round_up(head_dim, 16), features.crowds
    planes = features.planes > 1
    kinds = ("bias", "options") if features.bias else ("options",) if crowded else ()
    if keys:
        kinds = ("keys options", "keys") if crowded else ("keys",)
    if planes:
        kinds = ("keys planes",) if keys else (f"{features.planes} planes", "planes")
    row = size("mma", algorithm, of, head_dim, *kinds)
    Br, Bc, least_rows, least_columns = row.Br, row.Bc, 16, 32 if keys else 16
    sizes: dict[str, Any] = {"head_dim": head_dim, "shared_limit": shared_limit}
    if planes:
        sizes["features"] = features
    gradients = of == "bwd" and algorithm != "standard"
    if gradients:
        sizes["algorithm"] = algorithm
        select: Callable = functools.partial(select_mma_backward_spec, **sizes)
        few = max(seqlen_q, seqlen_k) <= 128  # no more than two such tiles
        if (Br, Bc) == (64, 128) and (few or not is_valid(Tiles(Br, Bc), select)):
            Br, Bc = 32, 64
        least_rows = 16 * row_warps_of(head_dim)
    elif algorithm == "standard":
        select = functools.partial(select_mma_spec, kind=StandardSpec, **sizes)
    else:
        kind = MmaDqSpec if of == "dQ" else MmaSpec
        select = functools.partial(select_mma_spec, kind=kind, splits_keys=keys, **sizes)
    Br, Bc = _needed(Br, seqlen_q, least_rows), _needed(Bc, seqlen_k, least_columns)
    found = _shrunk(Br, Bc, select, least_rows, least_columns)
    threads = None
    if gradients and (algorithm == "fa1" or planes):  # FA-1 reads O and dQ too: 16 columns a warp
        threads = 2 * least_rows // 16 * found.Bc
    elif algorithm == "standard":
        threads = 2 * found.Br if found.Br == found.Bc == 128 else None
    elif of == "fwd":
        older = shared_limit < 200 * 1024  # below compute capability 9.0
        narrow = algorithm == "fa1" or 64 < d < 128 or (d == 64 and features.packed)
        narrow |= d == 128 and (crowded or (older and (features.causal or features.splits)))
        narrow &= found.Br % 128 == 0 or features.splits
        narrow |= planes
        least_threads = 64 if keys else 32  # with "keys", at least two warps divide the columns
        threads = max(2 * found.Br, least_threads) if narrow or row.case == "bias" else None
    found = replace(found, threads=threads)
    staged = replace(found, stages=row.stages)
    return _fitted(staged if is_valid(staged, select) else found, str(row))


def unspilled(request: Request, rule: Callable[[], Chosen]) -> Chosen:
    """Return the tiles that ``rule`` chooses for FA-2's backward pass on "mma", and the reason.

    Normally the result is what ``rule()`` returns. The number of threads is set to 256 if all of
    these conditions hold, because the assembler would spill registers with fewer threads:

    - The tiles are 32 x 64.
    - The larger head dimension, of Q or V, is from 145 to 160.
    - The GPU has compute capability 10.0 or higher (Blackwell).
    """
    tiles, why = rule()
    crowded = 144 < request.problem.largest_dim <= 160 and request.capability >= (10, 0)
    if not crowded or (tiles.Br, tiles.Bc) != (32, 64):
        return Chosen(tiles, why)
    warps = "eight warps share a tile, because four warps would spill registers (ptxas)"
    return Chosen(replace(tiles, threads=256), f"{why}; {warps}")


def _fitted(tiles: Tiles, why: str) -> Chosen:
    """Return the tiles of a call, and the reason for them.

    ``why`` is a text that contains the size of the tiles before they were reduced, such as
    "128 x 64". ``tiles`` are the tiles after the reduction. If they have the size in ``why``, the
    reason is ``why``. Otherwise the reason is ``why``, followed by a sentence: larger tiles do not
    fit, or the sequence is shorter.
    """
    size = f"{tiles.Br} x {tiles.Bc}"
    fitted = f"{size} is used, because larger tiles do not fit or the sequence is shorter"
    return Chosen(tiles, why if f" {size} " in f" {why}" else f"{why}; {fitted}")


def _shrunk(
    Br: int, Bc: int, select: Callable[[Tiles], Any], least_rows: int, least_columns: int
) -> Tiles:
    """Return tiles of Br x Bc, reduced until ``select`` returns a spec for them.

    The sizes are reduced in this order:

    1. Columns are halved, and rounded up to a multiple of 16, while there are more than 32.
    2. Rows are halved until there are ``least_rows``.
    3. Columns are halved until there are ``least_columns``.

    ``select`` raises ValueError if tiles do not fit. If no tiles fit, the result is the smallest
    tiles, for which the kernel's spec raises ValueError.
    """
    while (Br, Bc) != (least_rows, least_columns) and not is_valid(Tiles(Br, Bc), select):
        if Bc > 32 or Br == least_rows:
            Bc = round_up(ceil_div(Bc, 2), 16)
        else:
            Br //= 2
    return Tiles(Br, Bc)


# --- Hopper's tensor cores ---------------------------------------------------------------------

_FORWARD = ("wgmma", "fa2", "fwd")
_LEAST_COLUMNS = 64  # least number of columns of a tile, even for fewer keys


def hopper_tiles(request: Request, heads: int, select: Callable[[Tiles], Any]) -> Chosen:
    """Return the tiles of FA-2's forward kernel on Hopper's tensor cores, and the reason.

    ``heads`` is the number of query heads whose rows share a row tile. ``select`` makes a spec from
    tiles, and raises ValueError if they do not fit.

    Normally the tiles depend on the head dimension of V, because O is in registers. If the head
    dimension of Q and K is larger, the tiles depend on the larger number in two cases:

    - The call has a bias. With the tiles for V's head dimension, the kernel would spill registers.
    - Shared memory does not hold the tiles for V's head dimension, because rows of K are longer.
    """
    p = request.problem
    found = _hopper_tiles(request, heads, p.d_v)
    if p.head_dim > p.d_v and (request.features.bias or not is_valid(found.value, select)):
        return _hopper_tiles(request, heads, p.head_dim)
    return found


def _hopper_tiles(request: Request, heads: int, d: int) -> Chosen:
    """Return the tiles of FA-2's forward kernel on Hopper for head dimension ``d``.

    ``heads`` is the number of query heads whose rows share a row tile. A consumer is a warpgroup
    that computes 64 rows of a row tile. The first case that applies decides:

    case                                              tiles
    float32 in planes                                 the row for planes in tiles.csv
    e4m3                                              ``_e4m3_tiles``
    at most 64 rows                                   one consumer (64 rows)
    a short call (``_short``)                         the row for short calls in tiles.csv
    three consumers lack registers or are slower      two consumers (128 rows)
    no causal mask                                    two or three consumers, whichever number takes
                                                      less time as estimated from ``_rounds``
    causal mask, all row tiles run at the same time   two consumers
    causal mask, long sequences                       three consumers
    causal mask, other sequences                      two consumers
    """
    p, features = request.problem, request.features
    rows = p.seqlen_q * heads
    window = 0 if p.left is None or p.right is None else p.left + p.right + 1
    kind = "options" if features.crowds else ""
    if features.bias:  # a tile of the bias takes registers too
        others = replace(features, bias=False, causal=False) != PLAIN
        kind = "bias options" if others else "bias causal" if p.causal else "bias"
    if features.planes > 1:
        row = size(*_FORWARD, d, f"{features.planes} planes", "planes")
        Bc = min(row.Bc, max(_LEAST_COLUMNS, round_up(p.seqlen_k, 16)))
        return Chosen(Tiles(row.Br, Bc, stages=row.stages), str(row))
    if features.scales:
        return _e4m3_tiles(request, d)
    wide = size(*_FORWARD, d, kind)
    if rows <= GROUP_ROWS:  # one consumer: the time is the loading time of K and V
        few = size(*_FORWARD, d, "few rows") if PANEL < d <= 2 * PANEL else wide
        why = f"one consumer warpgroup takes all rows ({rows}): {few}"
        return Chosen(Tiles(GROUP_ROWS, few.Bc, stages=2), why)
    Bc = wide.Bc
    if not features.page_size:
        Bc = min(Bc, max(_LEAST_COLUMNS, round_up(p.seqlen_k, 16)))
    short = _short(request, rows, window)
    if short is not None:
        why = f"the call is short: {short}"
        return Chosen(Tiles(short.Br, short.Bc or Bc, stages=short.stages), why)
    two = Tiles(2 * GROUP_ROWS, Bc, stages=2)
    kinds = ["three consumers splits"] if features.splits and d > PANEL else []
    most = size(*_FORWARD, d, *kinds, "three consumers")
    three = Tiles(most.Br, most.Bc if Bc == 128 else Bc, stages=2)
    crowded = features.crowds and d > PANEL
    if crowded or not _hold_three(three, d, features):
        why = "two consumer warpgroups, because three lack registers or are slower"
        return Chosen(two, f"{why}: {wide}")
    tiles, why = two, "two consumer warpgroups"
    if not p.causal:
        ends = _rounds(request, rows, heads, three.Br), _rounds(request, rows, heads, two.Br)
        each = measured(_TIME_OF_THREE, "narrow" if d <= PANEL or Bc < 128 else "wide")
        if each * ends[0] <= ends[1]:
            tiles, why = three, "three consumer warpgroups"
        why += f" finish first: three need {ends[0]} rounds of {each:g} time units, two need "
        why += f"{ends[1]} rounds of 1"
    # If all row tiles of two consumers run at once, the call takes as long as the longest one.
    elif _row_tiles(request, rows, heads, two.Br) <= request.multiprocessors:
        why += ", because all row tiles run at once and the longest one sets the time of the call"
    else:
        lens = [p.lengths(b)[0] for b in range(p.batch)] if p.packed else [rows]
        longest = sum(n * n for n in lens) // max(1, sum(lens))  # average length over all rows
        what = "causal rows from which three consumers end first"
        least = next((measured(what, n) for n in (PANEL, 80) if d <= n), math.inf)
        if longest > least:
            tiles, why = three, "three consumer warpgroups"
        why += f" for {longest} causal rows, because three finish first "
        why += f"above {least:g} rows" if least < math.inf else "at smaller head dimensions only"
    return Chosen(tiles, f"{why}; {most if tiles == three else wide}")


_TIME_OF_THREE = "time of a tile of three consumers over one of two"


def _e4m3_tiles(request: Request, d: int) -> Chosen:
    """Return the tiles of FA-2's forward kernel for e4m3 inputs and head dimension ``d``.

    The tiles are those of a row in tiles.csv. A call with at most 64 rows has one consumer. The
    first case that applies decides the row:

    case                                    row
    scales of blocks                        "e4m3 blocks", with lengths "e4m3 blocks lengths"
    lengths of sequences                    "e4m3 lengths"
    a window                                "e4m3 two consumers"
    a causal mask, long sequences           "e4m3 causal"
    a causal mask, other sequences          "e4m3 two consumers"
    no mask                                 "e4m3" or "e4m3 two consumers", whichever takes less
                                            time as estimated from ``_rounds``
    """
    p, features = request.problem, request.features
    rows, why = p.seqlen_q, ""
    two, most = size(*_FORWARD, d, "e4m3 two consumers"), size(*_FORWARD, d, "e4m3")
    if features.block_scales or features.lengths:
        of_scales = "e4m3 blocks" if features.block_scales else "e4m3"
        kinds = [f"{of_scales} lengths"] if features.lengths else []
        row = size(*_FORWARD, d, *kinds, of_scales)
    elif features.window:
        row = two
    elif p.causal:
        least = measured("causal columns from which e4m3 has wide tiles")
        row = size(*_FORWARD, d, "e4m3 causal") if p.seqlen_k >= least else two
        why = f"; columns: {p.seqlen_k}, and tiles are wide from {least:g} on"
    elif most.Br == two.Br:
        row = most
    else:
        each = measured(_TIME_OF_THREE, "e4m3")
        ends = _rounds(request, rows, 1, most.Br), _rounds(request, rows, 1, two.Br)
        row = most if each * ends[0] <= ends[1] else two
        why = f"; {most.Br} rows need {ends[0]} rounds of {each:g} time units, {two.Br} rows need "
        why += f"{ends[1]} rounds of 1"
    Br = GROUP_ROWS if rows <= GROUP_ROWS else row.Br
    return Chosen(Tiles(Br, row.Bc, stages=row.stages), f"{row}{why}")


def _short(request: Request, rows: int, window: int) -> Size | None:
    """Return the row of tiles.csv for a short call, or None.

    In a short call, loads of tiles are not ready by the time at which they are needed. ``rows`` is
    the number of rows of a head, or of all heads that share a row tile. ``window`` is the number of
    columns that a row sees in a window, or 0 without a window. The result is None if the call is
    not short, or if it has options for which short calls were not measured.
    """
    p, features = request.problem, request.features
    if not takes_slots(features):
        return None
    longest = max(rows, p.seqlen_k) if p.causal else 0
    measures = {
        "short window": window,
        "short causal": longest,
        "short causal alone": 0 if features.window else longest,
        "short": 0 if features.window or p.causal else p.seqlen_k,
    }
    found = (x for x in sizes(*_FORWARD) if x.most and p.largest_dim <= x.head_dim)
    return next((x for x in found if 0 < measures[x.case] <= x.most), None)


def _row_tiles(request: Request, rows: int, heads: int, Br: int) -> int:
    return ceil_div(rows, Br) * (request.problem.heads_q // heads * request.problem.batch)


def _rounds(request: Request, rows: int, heads: int, Br: int) -> int:
    """Return the number of rounds in which the GPU runs all row tiles with ``Br`` rows.

    In a round, each multiprocessor computes one row tile. ``rows`` is the number of rows of a head,
    or of all ``heads`` heads that share a row tile.

    For packed sequences, the result is a number that is proportional to time instead: the sum of
    (number of row tiles) x (number of rows of Q) over all sequences.
    """
    p = request.problem
    if p.packed:
        lens = (p.lengths(b)[0] for b in range(p.batch))
        return sum(ceil_div(n, Br) * n for n in lens)
    tiles = _row_tiles(request, rows, heads, Br)
    return ceil_div(tiles, request.multiprocessors or 1)


def takes_slots(features: Features) -> bool:
    """Return whether a call may use additional pipeline slots for Q, K and V.

    Such a call may also run more thread blocks per multiprocessor. The call must have no options
    except a causal mask and a window. Calls with other options were not measured.
    """
    return replace(features, causal=False, window=False) == PLAIN


def _hold_three(tiles: Tiles, head_dim: int, features: Features) -> bool:
    """Return whether three consumers may compute with these tiles at this head dimension.

    Two conditions must hold:

    - The registers of three consumers hold the tiles, and the additional values of the options.
    - The call has no window, softcap or bias. With these options three consumers are slower.
    """
    spec = WgmmaSpec(head_dim, tiles.Br, tiles.Bc, 4, tiles.Br // 2)
    slower = features.window or features.softcap or features.bias
    return spec.fits_registers and not slower and spare_taken(features) <= SPARE


def hopper_fa1_tiles(problem: Problem, features: Features) -> Chosen:
    """Return the tiles of FA-1's forward kernel on Hopper's tensor cores, and the reason."""
    kinds = [] if replace(features, causal=False) == PLAIN else ["options"]
    if features.planes > 1:
        kinds = [f"{features.planes} planes", "planes"]
    if features.scales:
        others = replace(features, causal=False, scales="") != PLAIN
        kinds = ["e4m3 options"] if others or features.block_scales else ["e4m3"]
        row = size("wgmma", "fa1", "fwd", problem.largest_dim, *kinds)
        return Chosen(Tiles(row.Br, row.Bc), str(row))
    if problem.d_v <= 2 * PANEL < problem.head_dim:
        kinds = [" ".join(("narrow v", *kinds)), *kinds]
    row = size("wgmma", "fa1", "fwd", problem.largest_dim, *kinds)
    return Chosen(Tiles(row.Br, row.Bc), str(row))


def hopper_adds_dq(request: Request) -> bool:
    """Return whether the backward kernel on Hopper's tensor cores adds its parts of dQ to dQ.

    If the result is False, a second kernel computes dQ. The result is always True for FA-1. For
    FA-2 it is False with ``deterministic=True``, or with a head dimension above ``LARGEST_ATOMIC``.
    """
    choices = request.choices
    apart = choices.deterministic or request.problem.largest_dim > LARGEST_ATOMIC
    return choices.algorithm == "fa1" or not apart


def hopper_backward_tiles(request: Request) -> Tiles:
    """Return the tiles of a backward pass on Hopper's tensor cores. No other tiles are possible."""
    sizes = request.problem.largest_dim, hopper_adds_dq(request), request.features.planes
    return default_wgmma_backward_tiles(*sizes, algorithm=request.choices.algorithm)


MOST_CHUNKS = 65535  # most thread blocks along the last axis of a grid


def chunk_tiles(request: Request, Bc: int) -> int:
    """Return the number of column tiles of each head in a chunk of a backward pass on Hopper.

    With chunks, the grid visits a chunk of all heads before the next chunk. Long and short column
    tiles are then distributed better. The number 0 means that the grid has no chunks.

    The length of a column tile is the number of row tiles that visit it. Column tiles have unequal
    lengths with a causal mask, or with a block mask and head dimensions up to 64. All other calls
    count as calls with equal lengths. ``Bc`` is the number of columns of a tile. The first case
    that applies decides:

    case                                                        number of column tiles
    FA-1                                                        0
    column tiles have equal lengths                             0
    few K/V heads in the batch                                  1
    all columns fit in one chunk, and a kernel without chunks   0
    does not spill registers
    all other cases                                             columns of a chunk / Bc

    The number of columns of a chunk is in measured.csv. It is larger for long sequences, and for
    head dimensions above 128. The result, if it is not 0, is doubled until the grid has at most
    ``MOST_CHUNKS`` chunks.
    """
    p = request.problem
    unequal = p.causal or (p.sparse and p.largest_dim <= PANEL)
    if request.choices.algorithm == "fa1" or not unequal:
        return 0
    columns, entries = (p.k_shape[0], 1) if p.packed else (p.seqlen_k, p.batch)
    few = entries * p.heads_k <= measured("heads of K and V that are few")
    long = p.largest_dim > LARGEST_ATOMIC or columns > measured("columns of long sequences")
    together = int(
        measured("columns of a head whose causal tiles go side by side", "long" if long else "")
    )
    found = [] if request.spilling else _spilling(p.largest_dim, request.features)
    if not few and columns <= together and ("alibi", "one chunk") not in found:
        return 0
    tiles = 1 if few else together // Bc
    while tiles * Bc * MOST_CHUNKS < columns:
        tiles *= 2
    return tiles


ADDED = ("alibi", "bias")
BEHIND = ("slope_of", "dcaptured")


def _spilling(head_dim: int, features: Features) -> list[tuple[str, str]]:
    """Return the pairs of options that could make FA-2's backward kernel on Hopper spill registers.

    The pairs are from spills.csv. A pair contains the fields ``option`` and ``beside`` of a row
    (``facts.Spill``). The result contains each pair whose row is valid for ``head_dim``, and whose
    first option is in ``features``, the features of the call. This function does not check whether
    the call has the second option of a pair. The caller of this function checks it.
    """
    return [
        (x.option, x.beside)
        for x in spills("wgmma", "fa2", "bwd")
        if x.first <= head_dim <= x.last
        and getattr(features, x.option)
        # With kept scores another kernel adds ALiBi slopes and a bias.
        and (x.beside in BEHIND or not (features.scores_stay and x.option in ADDED))
    ]


def lacks_together(head_dim: int, features: Features, dq_alone: bool, spilling: bool) -> str:
    """Return text that names two options which Hopper's backward kernels do not support together.

    The text is empty if the call has no such options. ``dq_alone`` says whether a second kernel
    computes dQ. ``spilling`` says whether kernels may spill registers. If it is True, the last line
    of the table does not apply.

    A call keeps scores if ``Features.scores_stay`` is True: the scores are then in registers until
    dS is computed.

    two options                                   calls that do not support both options together
    softcap with ALiBi slopes, bias or dropout    calls that do not keep scores
    score_mod with dropout                        calls that keep scores, if a second kernel
                                                  computes dQ
    score_mod with bias                           calls that keep scores, for head dimensions above
                                                  ``LARGEST_ATOMIC``
    ALiBi slopes with bias                        all calls
    pairs of options in spills.csv                calls with the head dimensions of the row

    The reason for the first line: if a call with a softcap does not keep scores, dS is computed
    from the capped scores, before ALiBi slopes or a bias are added and before dropout marks P.
    """
    added = [name for name in ADDED if getattr(features, name)]
    if features.softcap and not features.scores_stay:
        for name in (*added, *(["dropout"] if features.dropout else [])):
            return f"the option {argument_of(name)} together with softcap"
    if features.scores_stay and dq_alone and features.dropout:
        both = f"the option {argument_of('dropout')} together with score_mod"
        alone = f"(deterministic=True, or head_dim above {LARGEST_ATOMIC})"
        return f"{both} where dQ is computed by a kernel of its own {alone}"
    if features.scores_stay and features.bias and head_dim > LARGEST_ATOMIC:
        return f"the option bias together with score_mod at a head_dim of {head_dim}"
    if len(added) == 2:
        return f"the option {argument_of(added[0])} together with bias"
    at = f"at a head_dim of {head_dim}"
    for option, beside in () if spilling else _spilling(head_dim, features):
        lengths = ("q_lens", "kv_lens", "packed") if beside == "lengths" else (beside,)
        on = [name for name in lengths if getattr(features, name, False)]
        if on:
            first = "score_mod" if on[0] == "slope_of" else argument_of(on[0])
            return f"the option {first} together with {argument_of(option)} {at}"
        if beside == "no mask" and not features.right:
            return f"the option {argument_of(option)} without a causal mask or a window {at}"
    return ""
