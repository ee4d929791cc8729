"""A rule of thumb for how many accessed bytes the L2 cache serves.

A kernel accesses some arrays several times. The first read of a byte comes from device memory. The
L2 cache may serve the later accesses to this byte. The working set consists of the bytes that the
running thread blocks access several times:

- If the working set takes at most half of the L2 cache, L2 serves all repeated reads. Each byte
  then comes from device memory at most once.
- Otherwise, L2 does not hold the working set. The last column of the table says which accesses then
  reach device memory.

    algorithm   arrays accessed several times          accesses that reach device memory
    fa1         forward: Q, O, l and m                 all accesses
                backward: Q, O, dO, dQ and L
    fa2         forward: K and V                       one access to a tile for all thread blocks
                backward: Q, dO, dQ, L and D           that use the tile at about the same time
    standard    forward: S and P                       all accesses
                backward: S, P, dP and dS

In FA-1, each thread block accesses its own rows of these arrays several times. In FA-2, all thread
blocks of a head access the same arrays. A causal backward pass of FA-2 on Hopper runs a few column
tiles of every head at a time. In standard attention, each kernel reads the matrices that the
previous kernel wrote.

Every element of any other array crosses between L2 and device memory once. The limit is half of L2,
because from the A100 on L2 has two partitions, and may keep a copy of a byte in both. If the
working set is near the limit, the true traffic is between the two cases.

tests/package/test_bounds.py compares the rule with recorded hardware counters. The experiment
`cache` uses an LRU model of L2 instead of this rule, and follows every tile through the model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from fa_numba.bounds.devices import Device
from fa_numba.host.plans import Plan
from fa_numba.integers import ceil_div

KEPT = 0.5  # share of L2 that holds repeatedly read bytes
_SCORES = frozenset(("S", "P", "dP", "dS"))
_COLUMNS = frozenset(("K", "V", "dK", "dV"))
_VALUES = frozenset(("V", "O", "dO", "dV"))
_OF_ROWS = frozenset(("L", "l", "m", "D"))
# Arrays that the pass itself writes. If L2 holds them, only their last values reach device memory.
_MADE = frozenset(("A", "dQ", "l", "m", *_SCORES))
# Arrays that are read repeatedly, by algorithm and pass.
_AGAIN = {
    ("fa1", "fwd"): ("Q", "O", "A", "l", "m"),
    ("fa1", "bwd"): ("Q", "O", "dO", "dQ", "A", "L"),
    ("fa2", "fwd"): ("K", "V"),
    ("fa2", "bwd"): ("Q", "dO", "dQ", "A", "L", "D"),
    ("standard", "fwd"): tuple(_SCORES),
    ("standard", "bwd"): tuple(_SCORES),
}
# Number of arrays that standard attention's backward kernels load or store under one name.
_LOADED, _STORED = {"Q": 2, "K": 2, "dO": 2}, {"dV": 2, "S": 2}


@dataclass(frozen=True)
class Dram:
    """Bytes between a GPU and its device memory, as `dram` computes them.

    Parameters
    ----------
    bytes : int
        Bytes read from and written to device memory.
    again : int
        The working set in bytes: the data that the thread blocks which run at the same time read
        repeatedly. Each byte counts once.
    served : bool
        Whether L2 serves the repeated reads, that is, whether `again` is at most half the size of
        L2.
    """

    bytes: int
    again: int
    served: bool


def dram(plan: Plan, device: Device, resident: int) -> Dram:
    """Return how many of a plan's accessed bytes reach device memory.

    The rule is in the docstring of `fa_numba.bounds.cache`.

    Parameters
    ----------
    plan : Plan
        A call's plan, from `fa_numba.plan`.
    device : Device
        The GPU, whose L2 size is used.
    resident : int
        Thread blocks that run at the same time on the whole GPU.

    Returns
    -------
    Dram
        The bytes, and whether L2 serves repeated reads.

    Examples
    --------
    All of K and V of one head fits into the L2 of an H200:

    >>> import fa_numba
    >>> from fa_numba.bounds import named
    >>> shape = (1, 1, 1024, 64)
    >>> plan = fa_numba.plan(shape, shape, algorithm="fa2", dtype="float16")
    >>> dram(plan, named("H200"), resident=8)
    Dram(bytes=528384, again=262144, served=True)
    """
    again = _AGAIN[plan.algorithm, plan.passes]
    working_set = _working_set(plan, again, resident)
    served = working_set <= KEPT * device.l2_bytes
    accesses, made = plan.accesses, _MADE | ({"O"} if plan.passes == "fwd" else set())
    several = (plan.algorithm, plan.passes) == ("standard", "bwd")
    loaded, stored = (_LOADED, _STORED) if several else ({}, {})

    def reaches(name: str, count: int, first: int) -> int:
        """Return how many of an array's accessed elements reach device memory.

        ``count`` is the number of accessed elements. ``first`` is the number of times that each
        element of the array reaches device memory if L2 serves all repeated accesses. It is 1 for
        most arrays. It is 0 for loads of an array that the pass itself has written before. The
        result is never more than ``count``.
        """
        whole = _elements(plan, name)
        if name in again and not served:
            if plan.algorithm != "fa2":
                return count
            tiles, in_step, _ = _outer_loop(plan, resident)
            times = ceil_div(tiles, in_step)  # under a mask, each time only a part of the array
            return min(count, times * whole, max(whole, count * times // tiles))
        return min(count, first * whole)

    loads = {
        name: reaches(name, count, 0 if name in again and name in made else loaded.get(name, 1))
        for name, count in accesses.loads.items()
    }
    stores = {
        name: reaches(name, count, stored.get(name, 1)) for name, count in accesses.stores.items()
    }
    return Dram(replace(accesses, loads=loads, stores=stores).bytes, working_set, served)


def _elements(plan: Plan, name: str) -> int:
    """Return the number of elements of a plan's array, given by its name.

    An array with an unknown name has as many elements as Q.
    """
    p = plan.problem
    if name in _SCORES:
        return math.prod(p.score_shape)
    if name in _OF_ROWS:
        return math.prod(p.lse_shape)
    rows = math.prod((p.k_shape if name in _COLUMNS else p.q_shape)[:-1])
    of_values = name in _VALUES or (name == "A" and plan.passes == "fwd")
    return rows * (p.d_v if of_values else p.head_dim)


def _working_set(plan: Plan, again: tuple[str, ...], resident: int) -> int:
    """Return the working set: the bytes that concurrent thread blocks read repeatedly.

    `again` are the names of the arrays that are read repeatedly. `resident` is the number of thread
    blocks that run at the same time.
    """
    accesses, p = plan.accesses, plan.problem
    if plan.algorithm == "standard":
        return plan.workspace_bytes
    touched = {name for name in again if name in accesses.loads}
    whole = replace(accesses, loads={x: _elements(plan, x) for x in touched}, stores={}).bytes
    heads = p.batch * p.heads_q
    if plan.algorithm == "fa1":
        rows = min(plan.split_rows, p.seqlen_q)
        blocks = min(resident, heads * ceil_div(p.seqlen_q, plan.split_rows))
        return whole * blocks * rows // (heads * p.seqlen_q)
    _, in_step, columns = _outer_loop(plan, resident)
    return whole * min(heads, max(1, ceil_div(resident, in_step) * heads // columns)) // heads


def _outer_loop(plan: Plan, resident: int) -> tuple[int, int, int]:
    """Return three numbers about the grid of FlashAttention-2's kernel.

    A thread block computes one tile of a head: a row tile in the forward pass, a column tile in the
    backward pass. The numbers are:

        1. number of tiles of a head
        2. number of tiles of a head that run at the same time
        3. number of heads in the batch: query heads in the forward pass, and K/V heads times
           group splits in the backward pass

    The grid runs all tiles of one head before the tiles of the next head. If the spec has chunks of
    tiles, the grid runs one chunk of every head before the next chunk.
    """
    p, chunk = plan.problem, 0
    if plan.passes == "fwd":
        tiles, heads = ceil_div(p.seqlen_q, plan.tiles.Br), p.batch * p.heads_q
    else:
        tiles, heads = ceil_div(p.seqlen_k, plan.tiles.Bc), p.batch * p.heads_k * plan.group_splits
        chunk = getattr(plan.decided.spec, "chunk_tiles", 0)
    in_step = max(chunk, resident // heads) if chunk else tiles
    return tiles, min(tiles, in_step, resident), heads
