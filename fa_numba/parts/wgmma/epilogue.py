"""The epilogue on Hopper: O or a gradient moves from registers to global memory through shared
memory.
"""

from fa_numba.device import uint32
from fa_numba.dtypes import DTYPES
from fa_numba.intrinsics.bulk_copy import (
    commit_boxes,
    fence_async_proxy,
    store_box,
    store_box_5d,
    wait_boxes_read,
)
from fa_numba.intrinsics.matrix import CONVERSIONS
from fa_numba.intrinsics.shared import store2
from fa_numba.parts.fragments.rows import make_write_fragments
from fa_numba.parts.grid import make_query_rows
from fa_numba.parts.namespace import part
from fa_numba.parts.records import Head
from fa_numba.parts.softmax import make_logsumexp, make_normalise_rows
from fa_numba.parts.split_epilogue import writes_split
from fa_numba.parts.values import make_write
from fa_numba.parts.wgmma.load import make_query_box
from fa_numba.parts.wgmma.pingpong import make_sync_group
from fa_numba.parts.wgmma.pipeline import make_release_by
from fa_numba.parts.wgmma.planes import make_write_floats
from fa_numba.parts.wgmma.products import make_unscale_output
from fa_numba.tiling.wgmma import PANEL


@part
def make_write_out(spec):
    """Make ``write_out(rO, rl, rm, shared, slot, out, split, tile)``, which writes the results of a
    work tile for one warpgroup's rows.

    | case | results |
    |---|---|
    | no key splits | O = diag(l)^-1 O and L = m + log l |
    | key splits | the unnormalised O, l and m of split number ``split``, for ``merge_splits`` |

    Without key splits and without planes, O passes through the slot of Q in shared memory. In all
    cases, the function releases the slot of Q.
    """
    splits, rows_of, sync_group = spec.features.splits, make_rows_of(spec), make_sync_group(spec)
    unscale_output, write_split = make_unscale_output(spec), make_write_split(spec)
    normalise_rows, logsumexp = make_normalise_rows(spec), make_logsumexp(spec)
    write_queries, write_logsumexps = make_write_queries(spec), make_write_logsumexps(spec)
    release = make_release_by(spec.pipelines.q)

    def write_out(rO, rl, rm, shared, slot, out, split, tile):
        row0, head, thread = tile.i0, tile.head, tile.thread
        unscale_output(rO, head)
        if splits:
            sync_group(thread.w)  # this warpgroup has read Qi
            release(shared.bars, slot, thread)
            write_split(rO, rl, rm, split, row0, rows_of(out.rows, head), head, thread)
        else:
            normalise_rows(rO, rl)
            write_queries(rO, shared.sQ, slot, out.O, row0, head, thread)
            release(shared.bars, slot, thread)
            logsumexp(rl, rm, rl)
            write_logsumexps(rl, out, row0, head, thread)

    return write_out


@part
def make_write_queries(spec):
    """Make ``write_queries(rO, sQ, slot, O, row0, head, thread)``, which writes a warpgroup's rows
    of O to global memory.

    Normally O is rounded to 16 bits and stored in shared memory, in the warpgroup's own rows of a
    slot of Q. The copy engine copies it from there to global memory. Rows beyond the array or
    beyond a packed sequence are not written. The warpgroup's first thread waits until the copy
    engine has read the slot. If O is float32, it is written from registers directly.
    """
    if spec.stores_floats:
        return _make_write_queries_directly(spec)
    NQ = spec.tile_halves[0]
    write = make_write_tile(spec, make_query_box(spec, spec.features.packed))

    def write_queries(rO, sQ, slot, O, row0, head, thread):
        write(rO, sQ, uint32(slot.stage * NQ), O, row0, head, thread)

    return write_queries


@part
def _make_write_queries_directly(spec):
    """Make the function ``write_queries(rO, sQ, slot, O, row0, head, thread)`` that
    ``make_write_queries`` describes, for O in float32.
    """
    write_floats, sync_group = make_write_floats(spec), make_sync_group(spec)

    def write_queries(rO, sQ, slot, O, row0, head, thread):
        sync_group(thread.w)  # this warpgroup has read Qi
        write_floats(rO, O, row0, head, thread)

    return write_queries


@part
def make_write_tile(spec, find):
    """Make ``write_tile(rO, sQ, at, O, row0, head, thread)``, which rounds a warpgroup's rows to 16
    bits and writes them to the array O.

    The rows are stored in shared memory, in the warpgroup's own rows of a slot that begins at
    element ``at`` of sQ. The copy engine copies them from there to global memory.
    ``find(O, row0, head)`` returns the ``Box`` of the rows in O's tensor map. The warpgroup's first
    thread waits until the copy engine has read sQ.
    """
    Br, panels, members = spec.Br, spec.panels_v, spec.tile_heads > 1
    round_rows = _make_round_rows(spec)

    def write_tile(rO, sQ, at, O, row0, head, thread):
        own = round_rows(rO, sQ, at, thread)
        if thread.ty == uint32(0) and thread.tx == uint32(0):
            box = find(O, row0, head)
            for n in range(panels):
                place = uint32(own + PANEL * Br * n)
                if members:
                    store_box_5d(O, box.outer, box.inner, box.row, 0, PANEL * n, sQ, place)
                else:
                    store_box(O, box.outer, box.inner, box.row, PANEL * n, sQ, place)
            commit_boxes()
            wait_boxes_read()

    return write_tile


@part
def _make_round_rows(spec):
    """Make ``round_rows(rO, sQ, at, thread)``, which rounds a warpgroup's rows of O to 16 bits and
    stores them in shared memory sQ.

    The slot begins at element ``at`` of sQ, and the rows go to the warpgroup's own rows of the
    slot. The threads of the warpgroup wait for each other. After that, the copy engine can read the
    rows. The function returns the index of the warpgroup's first element in sQ.
    """
    TM, DN4, Br, STEP = spec.TM, 4 * spec.DN, spec.Br, spec.row_step
    sync_group, ROWS = make_sync_group(spec), spec.consumer_rows
    pack, _ = CONVERSIONS[DTYPES[spec.output].matrix]

    def round_rows(rO, sQ, at, thread):
        own = uint32(at + PANEL * ROWS * thread.w)
        exchange = uint32(8 * (thread.ty % 8))  # the copy engine's swizzle
        for i in range(TM):
            row = uint32(own + PANEL * (thread.ty + STEP * i) + 2 * thread.tx)
            for n in range(DN4 // 2):
                chunk = uint32(uint32(8 * (n % 8)) ^ exchange)
                place = uint32(row + chunk + PANEL * Br * (n // 8))
                store2(sQ, place, pack(rO[i * DN4 + 2 * n], rO[i * DN4 + 2 * n + 1]))
        fence_async_proxy()
        sync_group(thread.w)
        return own

    return round_rows


@part
def make_write_split(spec):
    """Make ``write_split``, which writes O, l and m of a key split for one warpgroup's rows.

    ``split_epilogue.writes_split`` explains the arguments.
    """
    return writes_split(spec, make_write_fragments(spec))


@part
def make_rows_of(spec):
    """Make ``rows_of(rows, head)``, which returns the number of rows of a head in an array of
    queries.

    Normally the result is ``rows``, the number of rows of the array. It includes padding. For
    packed sequences the result is ``head.Nq``, the rows of the sequence.
    """
    packed = spec.features.packed

    def rows_of(rows, head):
        if packed:
            return head.Nq
        return uint32(rows)

    return rows_of


@part
def make_write_logsumexps(spec):
    """Make ``write_logsumexps(rl, out, row0, head, thread)``, which writes L of a thread's rows.

    ``rl`` holds L of each row, and ``out`` is an ``Out`` record.
    """
    TM, STEP, heads, rows_of = spec.TM, spec.row_step, spec.tile_heads, make_rows_of(spec)
    write_values, query_rows = make_write(spec), make_query_rows(spec)

    def write_logsumexps(rl, out, row0, head, thread):
        rows_end = rows_of(out.rows, head)
        if heads == 1:
            write_values(rl, query_rows(out.L, head), row0, rows_end, thread)
        else:
            for i in range(TM):
                place = uint32(thread.ty + STEP * i)
                row = uint32(row0 + place // uint32(heads))
                if thread.tx == uint32(0) and row < rows_end:
                    h = uint32(uint32(head.h * heads) + place % uint32(heads))
                    member = Head(head.b, h, head.hk, head.Nq, head.Nk, head.options)
                    query_rows(out.L, member)[row] = rl[i]

    return write_logsumexps
