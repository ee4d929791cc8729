"""Records: values that belong together in a kernel, as named tuples.

A record costs no register of its own: the compiler keeps its fields in separate variables.
"""

from typing import Any, NamedTuple


class Thread(NamedTuple):
    """The position (ty, tx) of a thread in a tile of S. It decides which elements the thread holds.

    ``layout.row`` and ``layout.column`` compute the elements from the position.
    """

    ty: Any  # decides the thread's rows
    tx: Any  # decides the thread's columns


class GroupThread(NamedTuple):
    """The position (ty, tx) of a thread of a consumer warpgroup in a tile of S (Hopper), and the
    number of the warpgroup.
    """

    ty: Any  # decides the thread's rows
    tx: Any  # decides the thread's columns
    w: Any  # the number of the consumer warpgroup


class Warp(NamedTuple):
    """The part of a tile that a warp computes in the backward pass on unit ``mma``.

    The warp's part of S begins at row ``row`` and column ``column`` of the tile. The warp's part of
    dK begins at row ``column`` and at column ``chunk``, because a row of dK belongs to a column of
    S. The warp's part of dV begins at row ``column``, too.
    """

    row: Any  # the warp's first row of S
    column: Any  # the warp's first column of S, which is its first row of dK and dV
    chunk: Any  # the warp's first column of dK


class Head(NamedTuple):
    """A query head of one batch entry: the numbers of the batch entry, the query head and the K/V
    head, the valid lengths, and the call's options.

    If several query heads share a row tile, ``h`` is the number of a group of such heads.
    """

    b: Any  # the batch entry
    h: Any  # the query head
    hk: Any  # the K/V head
    Nq: Any  # the number of valid rows of Q
    Nk: Any  # the number of valid rows of K and V
    options: Any  # the options that the kernel was launched with


class Tile(NamedTuple):
    """The position of one tile of scores, and the part of the tile that this thread holds.

    The tile begins at row ``i0`` and column ``j0`` of S, in the query head ``head``. The position
    ``thread`` of the thread decides which elements it holds.
    """

    i0: Any  # the first row
    j0: Any  # the first column
    head: Head
    thread: Thread


class Slot(NamedTuple):
    """The number of a pipeline slot, and the phase (0 or 1) for which a thread waits at the slot's
    barriers.

    A loop carries the two integers rather than the record, because a record that a loop carries
    takes more registers.
    """

    stage: Any  # the number of the slot
    phase: Any


class WorkTile(NamedTuple):
    """The work tile that a persistent thread block computes next: a row tile, or one key split of a
    row tile.

    ``i0`` is the first row, ``h`` is the query head, and ``b`` is the batch entry. ``split`` is the
    number of the key split, or 0 without key splits. If several query heads share the row tile,
    ``h`` is the number of their group.
    """

    i0: Any  # the first row
    h: Any  # the query head, or the group of query heads that share the row tile
    b: Any  # the batch entry
    split: Any  # the number of the key split, 0 without key splits


class Schedule(NamedTuple):
    """The values that the tile scheduler of a persistent thread block uses.

    ``words`` are the words in shared memory that describe work tiles. ``tiles`` is the number of
    work tiles of the launch. ``taken`` is a counter in global memory of the work tiles that blocks
    have taken. ``group`` is the number of query heads per K/V head. The other fields are the arrays
    Q and K, and the options of the call.
    """

    words: Any  # shared memory: WORK_WORDS words for each slot of Q; then, with a block mask, one
    # word for each slot of K
    tiles: Any  # the number of work tiles of the launch
    taken: Any  # global memory: the counter of the work tiles that blocks have taken
    Q: Any
    K: Any
    group: Any  # the number of query heads per K/V head
    options: Any


class Shared(NamedTuple):
    """The tiles of a forward kernel in shared memory, and the pipelines' barriers (Hopper).

    A slot of Q has Br rows of d elements. A slot of K has Bc rows of d elements, and a slot of V
    has Bc rows of d_v elements. A tile is stored in panels of 64 columns.
    """

    sQ: Any
    sK: Any
    sV: Any
    bars: Any


class SharedWithO(NamedTuple):
    """The shared memory of FlashAttention-1's forward kernel (Hopper).

    It contains the tiles and barriers of ``Shared``, and the slots ``sO``, into which rows of O are
    loaded in float32. With a block mask, ``words`` contains one 32-bit integer for each consumer's
    part of a slot of Q. The integer says which row tile comes next.
    """

    sQ: Any
    sK: Any
    sV: Any
    sO: Any  # slots of O in float32: Br rows of d_v elements, in panels of 32 columns
    bars: Any
    words: Any  # with a block mask: for each consumer's part of a slot of Q, what comes after it


class Out(NamedTuple):
    """The arrays that FA-2's forward kernel writes (Hopper): O and L.

    ``rows`` is the number of rows of the array Q.
    """

    O: Any
    L: Any
    rows: Any  # the number of rows of the array Q


class State(NamedTuple):
    """The state of a head that FlashAttention-1 keeps in global memory between its passes.

    ``A`` is O in float32. The last pass of a row tile rounds it and writes it to ``O``.
    """

    O: Any
    A: Any
    l: Any
    m: Any


class BlockOut(NamedTuple):
    """The arrays in global memory that a thread block of FlashAttention-1 writes (Hopper).

    O and L are results. A, l and m are the state between the passes, as in ``State``. ``rows`` is
    one past the block's last row, including padding.
    """

    O: Any
    A: Any
    L: Any
    l: Any
    m: Any
    rows: Any  # one past the block's last row, including padding


class BlockRows(NamedTuple):
    """The work of a thread block of FlashAttention-1 (Hopper): a head, and a range of rows of Q.

    The rows are ``i_first`` to ``i_last`` - 1. They can include padding: rows past the valid
    length.
    """

    head: Head
    i_first: Any  # the first row
    i_last: Any  # one past the last row


class Box(NamedTuple):
    """The position of a TMA tile in an array, as coordinates of the array's tensor map.

    Normally ``outer`` is the batch entry, ``inner`` is the head, and ``row`` is the row. If
    sequences end within the array, the tensor map has other coordinates (``TiledArray``).
    """

    outer: Any  # the batch entry; WRAPS if sequences end within the array (``TiledArray``)
    inner: Any  # the head; the result of ``load.end_of`` if sequences end within the array
    row: Any


class KeyTileHead(NamedTuple):
    """The fields of ``Head``, and the words in shared memory that describe the block's key tile
    (``wgmma.key_tiles``).

    The backward kernels of FA-2 for Hopper use this record.
    """

    b: Any
    h: Any
    hk: Any
    Nq: Any
    Nk: Any
    options: Any
    words: Any


class KeyTile(NamedTuple):
    """The work of a thread block in FA-2's backward pass (Hopper): a column tile, and the query
    heads and rows that visit the column tile.

    The column tile begins at column ``j0``. ``head`` is the first query head, and ``h_end`` is one
    past the last query head. In each head, the rows of Q are ``i_first`` to ``i_end`` - 1.
    """

    j0: Any  # the first column of the column tile
    head: Any  # the first query head
    h_end: Any  # one past the last query head
    i_first: Any  # the first row of Q in each head
    i_end: Any  # one past the last row of Q in each head


class RowSlots(NamedTuple):
    """The slots in shared memory into which a backward kernel loads row tiles (Hopper).

    A slot has Br rows of d elements of Q, Br rows of d_v elements of dO, and Br floats of L and D.
    """

    sQ: Any
    sdO: Any
    sL: Any  # L of each slot, followed by D


class BackwardShared(NamedTuple):
    """The shared memory of a backward kernel of FA-2 for Hopper.

    The shapes are ``sK: (Bc, d)``, ``sV: (Bc, d_v)`` and, for each slot, ``sdS: (Bc, Br)``, with a
    row for each column of S. ``sdQ`` has ``spec.query_floats`` elements in float32. With dropout,
    ``sB`` has one bit for each element of S, which says whether dropout keeps the element.
    ``words`` describe the block's key tile (``wgmma.key_tiles``). ``bars`` are the barriers of the
    pipelines.
    """

    sK: Any
    sV: Any
    slots: RowSlots
    sdS: Any
    sdQ: Any
    sB: Any  # with dropout: one bit per element of S, 1 if the element is kept
    words: Any  # the words of the block's key tile (``wgmma.key_tiles``)
    bars: Any  # the barriers of the pipelines


class RowTiles(NamedTuple):
    """The arrays in global memory from which a backward kernel loads row tiles."""

    Q: Any
    dO: Any
    L: Any
    D: Any


class Gradients(NamedTuple):
    """The arrays in global memory to which a backward kernel writes its results."""

    dQ: Any
    dK: Any
    dV: Any


class SlotOffsets(NamedTuple):
    """The indices in shared memory at which the parts of one slot begin.

    A slot has parts in several arrays. ``rows`` is an index into sQ, and ``out`` is an index into
    sdO and sO. ``values`` is an index into sL. ``scores`` is an index into sdS, or into sS if the
    kernel has no sdS. All indices count elements.
    """

    rows: Any  # the tile of Q
    out: Any  # the tile of dO, and in FA-1 of O
    values: Any  # L, followed by D
    scores: Any  # the tile of dS (or S)


class DqShared(NamedTuple):
    """The shared memory of the kernel that computes only dQ (Hopper): tiles and barriers."""

    sQ: Any
    sdO: Any
    sK: Any
    sV: Any
    bars: Any


class QueryRows(NamedTuple):
    """The arrays with one row per query that the consumers read or write in the kernel that
    computes only dQ.
    """

    L: Any
    D: Any
    dQ: Any


class WideShared(NamedTuple):
    """The shared memory of the backward kernel for head dimensions above 128 (Hopper).

    ``sS`` has a tile of ST in float32 for each slot. There are no tiles of dS and dQ.
    ``BackwardShared`` explains the other fields.
    """

    sK: Any
    sV: Any
    slots: RowSlots
    sS: Any
    sB: Any  # with dropout: one bit per element of S, 1 if the element is kept
    words: Any  # the words of the block's key tile (``wgmma.key_tiles``)
    bars: Any  # the barriers of the pipelines


class Fa1BackwardShared(NamedTuple):
    """The shared memory of FlashAttention-1's backward kernel (Hopper).

    It contains tiles of O, because the kernel loads O in addition to dO. It contains no tile of dQ.
    With a block mask, ``words`` contains two 32-bit integers for each slot of Q, which say which
    query head and row tile come next. ``bars`` are the barriers of the pipelines.
    """

    sK: Any
    sV: Any
    slots: RowSlots
    sdS: Any
    sO: Any
    words: Any  # with a block mask: two words per slot, about the visit that comes next
    bars: Any  # the barriers of the pipelines
