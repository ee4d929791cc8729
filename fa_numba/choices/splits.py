"""The choice of key splits and group splits of FlashAttention-2.

Key splits: several thread blocks share the columns of a row tile (forward pass). Group splits:
several thread blocks share a column tile (backward pass).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from fa_numba.checks import MAX_KV_SPLITS, one_of
from fa_numba.choices.facts import measured
from fa_numba.choices.makespan import makespan
from fa_numba.choices.requests import Request
from fa_numba.choices.tiles import Chosen
from fa_numba.choices.units import UNITS
from fa_numba.integers import ceil_div
from fa_numba.problem import Problem
from fa_numba.tiling import Tiles
from fa_numba.tiling.spec import Spec

# Row tiles with at least this number of rows are limited by computing, not by loading K and V.
HIGH = 64
# Limits of the numbers of splits that are tried: at most this number of rounds of thread blocks, if
# row tiles have unequal lengths (forward), or for the shares of column tiles (backward).
_MOST_ROUNDS, _MOST_SHARES = 4, 8
# Numbers of thread blocks that share the rows of a query head. "auto" tries these numbers.
_ROW_SPLITS = (2, 3, 4, 6, 8, 12, 16)
# Most thread blocks along the second axis of a grid.
MAX_SHARES = 65535


def _fewest(
    name: str, tried: Sequence[int], ends: Callable[[int], float], unit: str, whose: str
) -> Chosen:
    """Return the number of splits with which the pass ends first, and the reason.

    The numbers in ``tried`` are compared. The function ``ends`` takes a number of splits, and
    returns the time at which the pass ends with this number. If the pass ends at the same time with
    several numbers, the result is the first of them.

    The other arguments are for the text of the reason. ``name`` is the name of the option, ``unit``
    the unit of time, and ``whose`` the beginning of the text.
    """
    times = {n: ends(n) for n in tried}
    best = min(times, key=times.__getitem__)
    if len(times) == 1:
        return Chosen(best, f"{whose}, and no other number of splits is possible")
    other = min((n for n in times if n != best), key=times.__getitem__)
    why = f"{whose}: {name}={best} finishes after {times[best]:.4g} {unit}, {name}={other} after "
    return Chosen(best, f"{why}{times[other]:.4g} ({len(times)} values compared)")


def chosen_splits(request: Request, tiles: Tiles, spec: Spec, blocks: int) -> Chosen:
    """Return the number of key splits of a forward pass (``kv_splits``), and the reason.

    The length of a row tile is the number of column tiles that it visits. Row tiles are unequal if
    they have different lengths. This is the case if a head has several row tiles, and the call has
    a causal mask or a window with a right bound only. The last row tiles of a head are then the
    longest. Calls with packed sequences or a block mask are treated as if row tiles were equal. An
    even share is the time of all row tiles, divided by the number of thread blocks that run at the
    same time.

    The first case that applies decides:

    case                                               number of key splits
    the caller chose a number                          the number that the caller chose
    the call runs on the emulator                      1
    row tiles are unequal, and the longest row tile    1
    takes no longer than an even share
    row tiles are equal, and fill the GPU              1
    all other cases                                    the number with which the pass ends first

    The end of the pass is its ``makespan``, measured in visits of a column tile.

    ``blocks`` is the number of row tiles of the call. ``spec`` is the spec of the forward kernel.
    """
    if request.choices.kv_splits != "auto":
        return Chosen(int(request.choices.kv_splits), "chosen by the caller")
    p, rows = request.problem, spec.head_rows
    resident = request.multiprocessors * _side_by_side(request, tiles, spec)
    if not resident:
        return Chosen(1, "nothing is split on the emulator, which has no idle multiprocessors")
    unequal = p.right is not None and p.left is None and not p.packed and not p.sparse
    if unequal and p.seqlen_q > rows:
        Tr = ceil_div(p.seqlen_q, rows)
        heads, total, most = blocks // Tr, 0, _MOST_ROUNDS * resident // blocks
        columns: list[int] = []
        for i in reversed(range(Tr)):  # the longest row tile begins first
            end = min((i + 1) * rows, p.seqlen_q) - 1
            columns.append(max(1, ceil_div(p.columns_end(end), tiles.Bc)))
            total += columns[-1]
            if columns[0] * resident <= heads * total:  # often after only a few row tiles
                why = "no split: the longest row tile takes no longer than an even share of all"
                return Chosen(1, why)
    elif blocks >= resident:
        why = f"no split: the GPU runs {resident} blocks at a time, and {blocks} row tiles fill it"
        return Chosen(1, why)
    else:
        heads, most = blocks, MAX_KV_SPLITS
        columns = [ceil_div(_columns(request, tiles), tiles.Bc)]

    def ends(splits: int) -> float:
        each, merged = _of_sums(request, tiles, spec, splits)
        pieces: Iterable[tuple[int, float]] = (
            (1, n // splits + (share % splits < n % splits) + each)
            for n in columns
            for share in range(heads * splits)
        )
        if len(columns) == 1:
            pieces = [(heads * splits, ceil_div(columns[0], splits) + each)]
        return makespan(pieces, resident) + merged

    least = int(measured("column tiles of a split at least"))
    most = max(1, min(columns[0] // least, MAX_KV_SPLITS, most))
    whose = f"the GPU runs {resident} blocks at a time, the call has {blocks} row tiles"
    return _fewest("kv_splits", range(1, most + 1), ends, "visits of a column tile", whose)


def _of_sums(request: Request, tiles: Tiles, spec: Spec, splits: int) -> tuple[float, float]:
    """Return how much longer a pass takes because key splits store and merge parts of O, l and m.

    The first result is the time that is added to each thread block. The second result is the time
    that is added to the call. The unit of both is the time of a visit of a column tile. ``splits``
    is the number of key splits. Both results are 0 for one split.
    """
    p = request.problem
    if splits == 1:
        return 0, 0.0
    if tiles.Br < HIGH or p.seqlen_q * spec.tile_heads <= HIGH:
        return measured("column tiles whose time the sums of a split take, few rows"), 0.0
    there_and_back = 2 * 4 * splits * p.batch * p.heads_q * p.seqlen_q * p.d_v
    exponential = measured("products that take as long as an exponential")
    rate = UNITS[request.unit].products_per_us
    tile = tiles.Br * tiles.Bc * ((p.head_dim + p.d_v) / 2 + exponential) / rate
    moved = there_and_back / measured("bytes of sums that move in a microsecond")
    return 0, (measured("microseconds until splits are merged") + moved) / tile


def _side_by_side(request: Request, tiles: Tiles, spec: Spec) -> int:
    """Return the number of thread blocks that are expected to run on a multiprocessor together.

    If a tile has at least ``HIGH`` rows, the result is 1, because one thread block keeps a
    multiprocessor busy. Thread blocks with fewer rows wait for memory. The result is then the
    smallest of three numbers, but at least 1:

    - the number of thread blocks whose loads together keep memory busy
    - the number of thread blocks that fit in shared memory
    - the largest number in measured.csv
    """
    if tiles.Br >= HIGH:
        return 1
    wanted = int(measured("bytes of shared memory whose loads keep memory busy"))
    busy, fit = ceil_div(wanted, spec.shared_bytes), request.shared_limit // spec.shared_bytes
    return max(1, min(int(measured("blocks side by side at most")), busy, fit))


def _columns(request: Request, tiles: Tiles) -> int:
    """Return the greatest number of columns that a row tile visits; a block mask is ignored."""
    p = request.problem
    if p.left is None or p.right is None:
        return p.seqlen_k
    return min(p.seqlen_k, p.left + p.right + tiles.Br)


# --- the backward pass -------------------------------------------------------------------------


def check_group_splits(request: Request) -> None:
    """Raise ValueError if ``group_splits`` is a number that the request does not allow."""
    p, splits = request.problem, request.choices.group_splits
    if splits in ("auto", 1):
        return
    if request.features.precision:
        given = f"with precision {p.precision!r}, got {splits}"
        raise ValueError(f"group_splits must be 1 or 'auto' {given}")
    if not _can_split_group(request):
        raise ValueError(
            f"group_splits must be 1 or 'auto' with algorithm {request.choices.algorithm!r} and a "
            f"head_dim of {p.largest_dim} on unit {request.unit!r}, got {splits}; splitting the "
            f"query heads of a K/V head needs {_group_splitting()}"
        )
    if p.group % int(splits) and int(splits) % p.group:
        raise ValueError(
            f"group_splits must be {one_of(_divisors(p.group))}, a multiple of {p.group}, or "
            f"'auto' with {p.group} query heads per K/V head, got {splits}"
        )
    if int(splits) > p.group and not _can_split_rows(request):
        raise ValueError(
            f"group_splits must be at most {p.group} (the query heads per K/V head) or 'auto' with "
            f"softcap, score_mod, bias or alibi_slopes, got {splits}"
        )
    if p.heads_k * int(splits) > MAX_SHARES:
        raise ValueError(
            f"group_splits must be at most {MAX_SHARES // p.heads_k} with {p.heads_k} K/V heads "
            f"(an axis of a CUDA grid has at most {MAX_SHARES} thread blocks), got {splits}"
        )


def chosen_group_splits(request: Request) -> Chosen:
    """Return the number of group splits of a backward pass (``group_splits``), and the reason.

    A number of group splits is possible if a kernel supports it, and if it does not make too many
    thread blocks. The first case that applies decides:

    case                                                  number of group splits
    the caller chose a number                             the number that the caller chose
    the unit has no kernel that splits column tiles       1
    the call runs on the emulator                         1
    no number above 1 is possible                         1
    all other cases                                       the number with which the pass ends first

    The pass ends when the parts of dK and dV have been summed. The time until then is the
    ``makespan`` plus the time of the sums, measured in visits of a row tile. A visit takes about 3
    microseconds of a multiprocessor, for 10 Br Bc d FLOPs. Thread blocks start in the order of the
    grid. Under a causal mask the first column tiles take longest.

    The thread blocks that share a column tile have different query heads, or different rows of a
    query head. Each of them loads Kj and Vj, and stores parts of dK and dV in float32. Two more
    kernels add up these parts. The tiles do not depend on the number of splits. The variant of the
    kernel may depend on this number, and is chosen later.
    """
    if request.choices.group_splits != "auto":
        return Chosen(int(request.choices.group_splits), "chosen by the caller")
    if not _can_split_group(request):
        return Chosen(1, "no split: this unit has no kernel that splits a column tile")
    p, multiprocessors = request.problem, request.multiprocessors
    tiles, chunk = UNITS[request.unit].column_tiles(request)
    heads, sequences = p.heads_k * p.batch, [(p.seqlen_q, p.seqlen_k)]
    if p.packed:  # the thread blocks of a head cover one sequence after the other
        heads, sequences = p.heads_k, [p.lengths(b) for b in range(p.batch)]
    Tc = sum(ceil_div(Nk, tiles.Bc) for _, Nk in sequences)
    if not multiprocessors:
        return Chosen(1, "no split: the emulator has no idle multiprocessors")
    most = max(1, _MOST_SHARES * multiprocessors // (heads * Tc))
    tried = [n for n in _divisors(p.group) if n <= most]
    if _can_split_rows(request):
        tried += [p.group * m for m in _ROW_SPLITS if p.group * m <= most]
    whose = f"the GPU has {multiprocessors} multiprocessors, the call {heads * Tc} column tiles"
    if len(tried) == 1:
        return Chosen(tried[0], f"{whose}, and no other number of splits is possible")
    visits = [
        _row_tiles(p, tiles, Nq, Nk, j)
        for Nq, Nk in sequences
        for j in range(ceil_div(Nk, tiles.Bc))
    ]
    elements = sum(Nk for _, Nk in sequences) * heads * (p.head_dim + p.d_v)
    begun = measured("visits of a row tile until a block's first product and after its last")
    stored = measured("head dimensions whose parts of dK and dV are stored in a visit")
    until = measured("visits until the parts of dK and dV are summed")
    moved = measured("bytes of parts of dK and dV that move in a visit")

    def ends(splits: int) -> float:
        of_head, more, sums = max(1, splits // p.group), 0.0, 0.0
        each = [max(1, p.group // splits) * ceil_div(n, of_head) for n in visits]
        if splits > 1:
            more = (p.head_dim + p.d_v) / 2 / stored
            sums = until + elements * (4 * splits + 2) / moved
        order = _in_launch_order(Tc, heads * splits, chunk)
        return makespan(((1, each[j] + begun + more) for j in order), multiprocessors) + sums

    return _fewest("group_splits", tried, ends, "visits of a row tile", whose)


def _can_split_group(request: Request) -> bool:
    """Return whether the unit has a kernel for the request that splits column tiles."""
    largest = UNITS[request.unit].splits_group.get(request.kernel, 0)
    return not request.features.precision and request.problem.largest_dim <= largest


def _group_splitting() -> str:
    """Return text for a message: the algorithms and units that support group splits above 1."""
    return one_of(
        f"algorithm {algorithm!r} on unit {unit.name!r}, with a head_dim of at most {largest}"
        for unit in UNITS.values()
        for (algorithm, _), largest in unit.splits_group.items()
    )


def _can_split_rows(request: Request) -> bool:
    """Return whether several thread blocks may share the rows of one query head.

    The result is False for options that change scores, because their kernels would spill registers.
    """
    return not request.features.changes_scores


def _divisors(n: int) -> list[int]:
    return [m for m in range(1, n + 1) if n % m == 0]


def _row_tiles(p: Problem, tiles: Tiles, Nq: int, Nk: int, j: int) -> int:
    """Return the number of row tiles of each query head that visit column tile j of a sequence.

    The sequence has ``Nq`` rows and ``Nk`` columns. A block mask is ignored.
    """
    diagonal, first, end = Nk - Nq, 0, Nq
    if p.right is not None:
        first = max(0, j * tiles.Bc - diagonal - p.right) // tiles.Br * tiles.Br
    if p.left is not None:
        end = min(end, max(0, (j + 1) * tiles.Bc - diagonal + p.left))
    return max(0, ceil_div(end - first, tiles.Br))


def _in_launch_order(Tc: int, shares: int, chunk: int) -> Iterator[int]:
    """Yield the number of the column tile of each thread block, in the order of launch.

    There are ``Tc`` column tiles, each with ``shares`` thread blocks. ``chunk`` is the number of
    column tiles in a chunk, or 0 if all column tiles are in one chunk. The function ``column_tile``
    in parts/wgmma/key_tiles.py computes the same order.
    """
    for begin in range(0, Tc, chunk or Tc):
        for _ in range(shares):
            yield from range(begin, min(begin + (chunk or Tc), Tc))
