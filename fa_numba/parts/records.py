"""What belongs together in a kernel, under one name: records of numbers, which cost no register."""

from typing import Any, NamedTuple


class Thread(NamedTuple):
    """Where a thread's part of a tile begins: its first row and column, as ``layout`` counts."""

    ty: Any
    tx: Any


class GroupThread(NamedTuple):
    """``Thread`` of warpgroup w."""

    ty: Any
    tx: Any
    w: Any


class Warp(NamedTuple):
    """Which rows and columns of S a warp takes backward, and which columns of dK and dV."""

    row: Any
    column: Any
    chunk: Any


class Head(NamedTuple):
    """A query head h of batch entry b, with its K/V head hk, Nq valid rows and Nk valid columns;
    and the call's options.
    """

    b: Any
    h: Any
    hk: Any
    Nq: Any
    Nk: Any
    options: Any


class Tile(NamedTuple):
    """The tile of a head's S from row i0 and column j0 on, and the thread that has a part of it."""

    i0: Any
    j0: Any
    head: Head
    thread: Thread


class Slot(NamedTuple):
    """A slot of a pipeline, and the phase, 0 or 1, of its barriers that is waited for. Round a loop
    these are two integers: a record that a loop carries takes registers.
    """

    stage: Any
    phase: Any


class WorkTile(NamedTuple):
    """What a block that stays on its multiprocessor takes next: the row tile from row i0 on of head
    h and batch entry b, and of its columns a share, ``split``.
    """

    i0: Any
    h: Any
    b: Any
    split: Any


class Schedule(NamedTuple):
    """A block's work tiles: words in shared memory, a few for each slot of Q; how many
    there are in all; the counter of those taken, in global memory; and what the call is of.
    """

    words: Any
    tiles: Any
    taken: Any
    Q: Any
    K: Any
    group: Any
    options: Any


class Shared(NamedTuple):
    """A forward kernel's tiles in shared memory, and the barriers of its pipelines."""

    sQ: Any
    sK: Any
    sV: Any
    bars: Any


class SharedWithO(NamedTuple):
    """``Shared``, the tiles of O in float32, which FlashAttention-1 carries, and a word for each
    consumer's part of a slot of Q, where a block mask says what comes after it.
    """

    sQ: Any
    sK: Any
    sV: Any
    sO: Any
    bars: Any
    words: Any


class Out(NamedTuple):
    """Where a forward kernel's results go, and how many rows of queries the arrays have."""

    O: Any
    L: Any
    rows: Any


class State(NamedTuple):
    """What FlashAttention-1 passes through global memory: O, in float32 (A) until the last pass
    rounds it, and a head's l and m.
    """

    O: Any
    A: Any
    l: Any
    m: Any


class BlockOut(NamedTuple):
    """``Out`` of a block of FlashAttention-1, and its ``State``; ``rows`` is one past its last row,
    padding among them.
    """

    O: Any
    A: Any
    L: Any
    l: Any
    m: Any
    rows: Any


class BlockRows(NamedTuple):
    """What a block of FlashAttention-1 takes of a head: its rows, from the first to one past the
    last, padding among them.
    """

    head: Head
    i_first: Any
    i_last: Any


class Box(NamedTuple):
    """Where a TMA tile begins on an array's map: its two outer axes, and the row."""

    outer: Any
    inner: Any
    row: Any


class KeyTileHead(NamedTuple):
    """``Head`` of a block of FlashAttention-2's backward kernel on Hopper, and the words of
    its key tile in shared memory.
    """

    b: Any
    h: Any
    hk: Any
    Nq: Any
    Nk: Any
    options: Any
    words: Any


class KeyTile(NamedTuple):
    """A block's column tile backward, from column j0 on, with its first query head, one past its
    last, and its rows of each: the first, and one past the last.
    """

    j0: Any
    head: Any
    h_end: Any
    i_first: Any
    i_end: Any


class RowSlots(NamedTuple):
    """A backward kernel's slots of row tiles in shared memory: of Q, of dO, of L with D behind."""

    sQ: Any
    sdO: Any
    sL: Any


class BackwardShared(NamedTuple):
    """A backward kernel's tiles in shared memory, bits of what dropout drops, the words of its key
    tile, and the barriers of its pipelines.
    """

    sK: Any
    sV: Any
    slots: RowSlots
    sdS: Any
    sdQ: Any
    sB: Any
    words: Any
    bars: Any


class RowTiles(NamedTuple):
    """What a backward kernel loads of row tiles."""

    Q: Any
    dO: Any
    L: Any
    D: Any


class Gradients(NamedTuple):
    """Where a backward kernel's results go."""

    dQ: Any
    dK: Any
    dV: Any


class SlotOffsets(NamedTuple):
    """Where a slot's Q, its dO (or O), its L and D, and its dS (or S) begin in shared memory."""

    rows: Any
    out: Any
    values: Any
    scores: Any


class DqShared(NamedTuple):
    """The tiles in shared memory of the kernel that makes dQ alone, and its barriers."""

    sQ: Any
    sdO: Any
    sK: Any
    sV: Any
    bars: Any


class QueryRows(NamedTuple):
    """What that kernel has of a row of queries in global memory beside Q and dO."""

    L: Any
    D: Any
    dQ: Any


class WideShared(NamedTuple):
    """``BackwardShared`` of the kernel beyond d = 128, with S in float32 and no dS and dQ."""

    sK: Any
    sV: Any
    slots: RowSlots
    sS: Any
    sB: Any
    words: Any
    bars: Any


class Fa1BackwardShared(NamedTuple):
    """``BackwardShared`` of FlashAttention-1, which loads O too and keeps no dQ there, with words
    for what a block mask says comes after a row tile.
    """

    sK: Any
    sV: Any
    slots: RowSlots
    sdS: Any
    sO: Any
    words: Any
    bars: Any
