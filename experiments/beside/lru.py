"""A model of L2 as an LRU cache: the DRAM bytes of a call, from the accesses to its tiles.

The model assumes:

- The cache is fully associative, and replaces the tile that was not used for the longest time.
- The cache holds complete tiles of one head. A tile is Br rows of Q, of O, of O's float32 sum A,
  of l and m together, or of L; or it is Bc rows of K and V together.
- Thread blocks start in launch order on free multiprocessors. All running thread blocks advance by
  one tile of S at a time, in turn.
- A load of a tile that is not in the cache reads DRAM. A store changes the tile in the cache. The
  tile is written to DRAM when it leaves the cache.
- Tiles that are in the cache at the end of the kernel are not written to DRAM. A profiler that
  counts the DRAM bytes of one kernel does not count them either.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"

from dataclasses import dataclass
from typing import Any

import numpy as np
from numba.extending import register_jitable

from fa_numba import io_model
from fa_numba.emulator import compiling
from fa_numba.problem import Problem

# Threads of these kernels that a multiprocessor runs at the same time, by the recorded occupancy.
THREADS_AT_ONCE = 256
ABSENT, CLEAN, DIRTY = range(3)
# Indices into the array `box` of `_simulate`: the tile used last, the tile not used for the longest
# time, bytes in the cache, bytes read from DRAM, bytes written to DRAM.
NEWEST, OLDEST, USED, READ, WRITTEN = range(5)
NONE = -1
Q, O, A, STATISTICS, LSE, KV = range(6)
LOAD, STORE, UPDATE = range(3)  # an update is a load and a store

# Decorator: compiles a function and caches it on disk, including the functions that it calls.
compiled = compiling.compiled()


@dataclass(frozen=True)
class Device:
    """A GPU in the model: name, size of L2 in bytes (`l2_bytes`), number of multiprocessors."""

    name: str
    l2_bytes: int
    multiprocessors: int


@register_jitable
def _unlink(tile, before, after, box):
    """Remove a tile from the doubly linked list of the tiles in the cache.

    The tiles in the list are in the order of their last use. `before[tile]` and `after[tile]` are
    the neighbours of a tile, or NONE. `box[NEWEST]` and `box[OLDEST]` are the ends of the list.
    """
    if before[tile] == NONE:
        box[NEWEST] = after[tile]
    else:
        after[before[tile]] = after[tile]
    if after[tile] == NONE:
        box[OLDEST] = before[tile]
    else:
        before[after[tile]] = before[tile]


@register_jitable
def _touch(lru, tile, kind):
    """Simulate one access to a tile: count the bytes that DRAM moves, and update the cache.

    `tile` is the number of the tile. `kind` is LOAD, STORE or UPDATE (a load and a store). If the
    tile is not in the cache, it is put into the cache, and the least recently used tiles are
    evicted. A tile that is larger than the cache is not put into it. `lru` is a tuple of arrays
    with the state of the cache, which `_simulate` makes.
    """
    sizes, state, before, after, box, capacity = lru
    size = sizes[tile]
    if state[tile] != ABSENT:
        _unlink(tile, before, after, box)
    else:
        if kind != STORE:
            box[READ] += size
        if size > capacity:  # the tile does not fit into the cache
            if kind != LOAD:
                box[WRITTEN] += size
            return
        while box[USED] + size > capacity:
            old = box[OLDEST]
            _unlink(old, before, after, box)
            if state[old] == DIRTY:
                box[WRITTEN] += sizes[old]
            state[old] = ABSENT
            box[USED] -= sizes[old]
        box[USED] += size
        state[tile] = CLEAN
    if kind != LOAD:
        state[tile] = DIRTY
    before[tile] = NONE
    after[tile] = box[NEWEST]
    if box[NEWEST] == NONE:
        box[OLDEST] = tile
    else:
        before[box[NEWEST]] = tile
    box[NEWEST] = tile


@compiled
def _simulate(k_outer, heads, group, splits, ends, Tc, bases, sizes, places, capacity, halves):
    """Return the bytes that a forward call reads from DRAM and writes to DRAM.

    | argument | meaning |
    |---|---|
    | k_outer | whether the loop order is K/V outer (FA-1) |
    | heads, group | query heads of all batch entries; query heads that share a K/V head |
    | splits | thread blocks per head, for K/V outer |
    | ends | for each row tile of a head, the number of column tiles that it visits |
    | Tc | number of column tiles of a head |
    | bases | for each kind of tile (Q, O, A, STATISTICS, LSE, KV), the number of its first tile |
    | sizes | size of each tile in bytes; the index is the number of the tile |
    | places | number of thread blocks that run at the same time |
    | capacity | bytes of the cache |
    | halves | whether the inputs have 16 bits, so that O has a float32 sum A |
    """
    Tr = len(ends)
    run = -(-Tr // splits)
    state = np.zeros(len(sizes), np.int8)
    before, after = np.full(len(sizes), NONE, np.int64), np.full(len(sizes), NONE, np.int64)
    box = np.zeros(5, np.int64)
    box[NEWEST] = box[OLDEST] = NONE
    lru = sizes, state, before, after, box, capacity
    blocks = heads * (splits if k_outer else Tr)
    block, row = np.full(places, NONE, np.int64), np.full(places, NONE, np.int64)
    column = np.zeros(places, np.int64)
    launched, running = 0, 0
    for place in range(min(places, blocks)):
        block[place], row[place], column[place] = place, NONE, 0
        launched, running = launched + 1, running + 1
    while running:
        for place in range(places):
            if block[place] == NONE:
                continue
            if k_outer:
                head, part = block[place] // splits, splits - 1 - block[place] % splits
            else:
                head, part = block[place] // Tr, Tr - 1 - block[place] % Tr
            of_row, of_column = head * Tr, head // group * Tc
            done = False
            if k_outer:
                first, last = part * run, min(part * run + run, Tr)
                if row[place] == NONE:
                    row[place] = first
                j = column[place]
                # Find the next row tile that sees column tile j. The first pass visits all.
                found, fresh = False, row[place] == first
                while not found and j < Tc and first < last:
                    i = row[place]
                    while i < last and not (j < ends[i] or j == 0):
                        i += 1
                    if i < last:
                        found = True
                        row[place] = i
                    else:
                        j, row[place], fresh = j + 1, first, True
                column[place] = j
                if found:
                    i = row[place]
                    if fresh:
                        _touch(lru, bases[KV] + of_column + j, LOAD)
                    _touch(lru, bases[Q] + of_row + i, LOAD)
                    kind = UPDATE if j > 0 else STORE
                    _touch(lru, bases[STATISTICS] + of_row + i, kind)
                    if halves and j >= ends[i] - 1:  # the last visit rounds the sum to O
                        if j > 0:
                            _touch(lru, bases[A] + of_row + i, LOAD)
                        kind, tile = STORE, bases[O] + of_row + i
                    else:
                        tile = bases[A if halves else O] + of_row + i
                    _touch(lru, tile, kind)
                    row[place] = i + 1
                    if i + 1 == last:
                        column[place], row[place] = j + 1, first
                done = not found or column[place] >= Tc
            else:
                i, j = part, column[place]
                if j == 0:
                    _touch(lru, bases[Q] + of_row + i, LOAD)
                if j < ends[i]:
                    _touch(lru, bases[KV] + of_column + j, LOAD)
                column[place] = j + 1
                done = j + 1 >= ends[i]
                if done:
                    for array in (O, LSE):
                        _touch(lru, bases[array] + of_row + i, STORE)
            if done:
                block[place] = NONE
                running -= 1
                if launched < blocks:
                    block[place], row[place], column[place] = launched, NONE, 0
                    launched, running = launched + 1, running + 1
    return box[READ], box[WRITTEN]


def dram_bytes(
    algorithm: str, problem: Problem, tiles: Any, threads: int, device: Device, *,
    query_splits: int = 1, capacity: int | None = None,
) -> int:  # fmt: skip
    """Return the bytes that a forward call of FA-1 or FA-2 reads from and writes to DRAM.

    Parameters
    ----------
    algorithm : str
        "fa1" or "fa2".
    problem : Problem
        The problem.
    tiles : object with Br and Bc
        Block sizes.
    threads : int
        Threads of a thread block.
    device : Device
        The GPU.
    query_splits : int, default 1
        Thread blocks of FA-1 that share a head.
    capacity : int, optional
        Bytes of the cache. Default: the L2 of the GPU. If it is 0, all accessed bytes reach DRAM.

    Returns
    -------
    int
        Bytes.

    Raises
    ------
    ValueError
        If the algorithm is neither "fa1" nor "fa2".
    """
    if algorithm not in ("fa1", "fa2"):
        raise ValueError(f"algorithm must be 'fa1' or 'fa2', got {algorithm!r}")
    Nq, Nk, d = problem.seqlen_q, problem.seqlen_k, problem.head_dim
    heads, kv_heads = problem.batch * problem.heads_q, problem.batch * problem.heads_k
    rows = np.minimum(Nq - np.arange(0, Nq, tiles.Br), tiles.Br)
    columns = np.minimum(Nk - np.arange(0, Nk, tiles.Bc), tiles.Bc)
    last_rows = np.cumsum(rows) - 1
    ends = np.array([-(-problem.columns_end(int(n)) // tiles.Bc) for n in last_rows])
    float32, halves = io_model.ELEMENT_BYTES, problem.dtype != "float32"
    element = (float32 // 2 if halves else float32) * d
    of_rows = {Q: element, O: element, A: float32 * d, STATISTICS: 2 * float32, LSE: float32}
    sizes = [np.tile(rows * of_rows[array], heads) for array in range(KV)]
    sizes.append(np.tile(2 * columns * element, kv_heads))
    bases = np.cumsum([0, *map(len, sizes)])[:-1]
    read, written = _simulate(
        algorithm == "fa1",
        heads,
        problem.group,
        query_splits,
        ends,
        len(columns),
        bases,
        np.concatenate(sizes),
        device.multiprocessors * max(1, THREADS_AT_ONCE // threads),
        device.l2_bytes if capacity is None else capacity,
        halves,
    )
    return int(read + written)
