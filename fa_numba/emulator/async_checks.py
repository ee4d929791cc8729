"""Compiled loops of bulk copies and warpgroup products: hazards, values and marks in shared memory.

These functions are like those of checks.py, for operations that touch many elements for one thread
or for one warpgroup. Three arguments recur:

    known     what happened before the present of the caller. It holds one stamp per thread:
              accesses of that thread below the stamp happened before. Behind the threads it
              holds a stamp for each warp's parts of products, and for each mbarrier's copies.
    fences    one stamp per thread: the copy engine and the tensor cores may read what the thread
              wrote below the stamp.
    places    the elements that are touched.

A function that checks returns -1, or the index into `places` of the first element at which
something is wrong.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"

from __future__ import annotations

from .checks import (
    IN_FLIGHT,
    NOBODY,
    PRODUCT,
    READING,
    SEVERAL,
    UNWRITTEN,
    WARP,
    compiled,
    owned,
    part_of_a_loop,
)


@part_of_a_loop
def before(stamp, known, warps):
    """Return whether an access happened before, according to `known`."""
    code = stamp & NOBODY
    if code == NOBODY:
        return False
    if code < SEVERAL:
        return stamp < known[code]
    if code >= PRODUCT:
        first = WARP * warps + code - PRODUCT - warps
        last = known[first]
        for column in range(first + 1, first + 4):
            last = min(last, known[column])
        return stamp < last
    other = code - SEVERAL
    if other >= warps:
        return stamp < known[WARP * warps + other - warps]
    last = known[WARP * other]
    for thread in range(WARP * other, WARP * other + WARP):
        last = min(last, known[thread])
    return stamp < last


@part_of_a_loop
def _may_have(stamp, known, fences, warps, base):
    """Return whether a write happened before and has passed a fence. Copies need no fence."""
    if stamp >= base and not before(stamp, known, warps):
        return False
    code = stamp & NOBODY
    if code < SEVERAL:
        return stamp < fences[code]
    return code - SEVERAL >= warps


@compiled
def depart_box(
    written, reads, touched, copiers, sites, first, places, known, fences, warps, base, tid, site
):
    """Hand the elements at `places`, counted from `first`, to the copy engine for writing."""
    free, used, allowed = places.size, False, UNWRITTEN  # neighbours mostly have the same stamp
    for n in range(places.size):
        p = first + places[n]
        last = written[0, p]
        if last != allowed and last != UNWRITTEN:
            if not _may_have(last, known, fences, warps, base):
                free = n
                break
            allowed = last
        used = used or touched[0, p] >= base
    for row in range(reads.shape[1] if used else 0):  # along a row, whose elements are neighbours
        allowed = UNWRITTEN
        for n in range(free):
            p = first + places[n]
            r = reads[0, row, p]
            if r >= base and r != allowed and touched[0, p] >= base:
                if not before(r, known, warps):
                    free = n
                    break
                allowed = r
    if free < places.size:
        return free
    for row in range(reads.shape[1] if used else 0):
        for n in range(places.size):
            p = first + places[n]
            if touched[0, p] >= base:
                reads[0, row, p] = 0
    for n in range(places.size):
        p = first + places[n]
        written[0, p] = IN_FLIGHT
        copiers[0, p], sites[0, p] = tid, site
        if touched[0, p] >= base:
            touched[0, p] = 0
    return -1


@compiled
def land_box(data, written, first, places, values, stamp):
    """Write the values of a copy that has arrived."""
    for n in range(places.size):
        p = first + places[n]
        data[0, p] = values[n]
        written[0, p] = stamp


@part_of_a_loop
def _give_back(reads, touched, row, parts, first, places, stamp):
    each = places.size // parts
    for part in range(parts):
        mark = stamp if stamp == READING else stamp + part
        for n in range(part * each, (part + 1) * each):
            p = first + places[n]
            reads[0, row, p] = touched[0, p] = mark


@compiled
def give_back(reads, touched, row, parts, first, places, stamp):
    """Mark the end of an asynchronous read.

    With the stamp `READING`, mark that it still goes on.
    """
    _give_back(reads, touched, row, parts, first, places, stamp)


@compiled
def lend(
    data, written, reads, touched, row, parts, first, places, known, fences, warps, base, values
):
    """Read the elements at `places` asynchronously.

    No thread may write them before the read has ended.
    """
    allowed = -1  # neighbours mostly have the same stamp
    for n in range(places.size):
        p = first + places[n]
        last = written[0, p]
        if last != allowed:
            if last == UNWRITTEN or not _may_have(last, known, fences, warps, base):
                return n
            allowed = last
        values[n] = data[0, p]
    _give_back(reads, touched, row, parts, first, places, READING)
    return -1


@compiled
def box_access(kind, rows, width, itemsize, address, block, writers, readers, atomics, stats):
    """Count the sectors of a box as one request, and record which thread block accesses it.

    The box has `width` elements from each of `rows` on. Returns the first row with an element that
    another thread block has accessed in conflict, -1 if there is none.
    """
    stats[0] += 1
    ended = -1
    for k in range(rows.size):
        byte = address + rows[k] * itemsize
        first, last = byte >> 5, (byte + width * itemsize - 1) >> 5
        stats[1] += last - first + (0 if first == ended else 1)
        ended = last
    if writers.size:
        for k in range(rows.size):
            stop = rows[k] + width
            if not owned(kind, rows[k], stop, block, False, writers, readers, atomics):
                return k
    return -1
