"""Compiled loops that check bulk copies and warpgroup products, and mark the elements they use.

The loops that combine what threads know, for knowledge.py, are here too.

These functions are like the functions of checks.py. They are for operations that touch many
elements of shared memory for one thread or for one warpgroup. Stamps are explained in
shared_memory.py. Several arguments recur:

    known     array of stamps: what the calling threads know about earlier accesses (see
              knowledge.py). Every access by thread t with a stamp below known[t] happened before
              the call. The entries after the last thread are for accesses of the hardware: one
              entry for each warp's part of a product, and one for the copies of each mbarrier.
    fences    one stamp per thread. Each write by thread t with a stamp below fences[t] came before
              a fence of this thread. The copy engine and the tensor cores may therefore read it.
    first, places    the touched elements. `places` are positions in a buffer, counted from the
              buffer's element `first`.
    warps     number of warps of the thread block
    base      stamp of the thread block's last barrier
    data, written, reads, touched, copiers, sites    the arrays of a `SharedBuffer`
    seen, heard    what each warp and each thread knows, see knowledge.py. `heard` is empty if
              no thread knows more than its warp.

A function that checks elements returns -1 if every access is allowed. Otherwise it returns the
index into `places` of the first element at which the access is not allowed.
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
    may_access,
    part_of_a_loop,
)


@part_of_a_loop
def before(stamp, known, warps):
    """Return whether an earlier access is known to be ordered before the current operation.

    `stamp` is the stamp of the earlier access, by a thread, by several threads of a warp, or by the
    hardware. `known` contains one stamp for each thread: every access of the thread with a smaller
    stamp is ordered before the current operation. `warps` is the number of warps of the thread
    block. The top of this module describes `known` in detail.
    """
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


@compiled
def least_known(seen, heard, tids, warps, known, least):
    """Set `known` to stamps that every thread in `tids` knows. `least` is working memory.

    For each entry, `known` is the greater of two numbers: the least stamp in `seen` of a warp of
    these threads, and the least stamp in `heard` of these threads.
    """
    more, first = seen.shape[1] - warps, -1
    for k in range(tids.size):
        v = tids[k] // WARP
        if v == first:
            continue
        for w in range(warps):
            last = seen[v, w] if first < 0 else min(seen[v, w], known[WARP * w])
            for thread in range(WARP * w, WARP * w + WARP):
                known[thread] = last
        for column in range(more):
            last = seen[v, warps + column]
            n = WARP * warps + column
            known[n] = last if first < 0 else min(last, known[n])
        first = v
    if heard.size:
        for n in range(least.size):
            least[n] = heard[tids[0], n]
        for k in range(1, tids.size):
            row = heard[tids[k]]
            for n in range(least.size):
                least[n] = min(least[n], row[n])
        for n in range(least.size):
            known[n] = max(known[n], least[n])


@compiled
def add_known(seen, heard, starts, tids, warps, past):
    """Raise the stamps in `past` to what any thread in `tids` knows.

    The threads know their own accesses up to the last synchronisation of their warps, `starts`.
    """
    before = -1
    for k in range(tids.size):
        v = tids[k] // WARP
        if v == before:
            continue
        before = v
        for w in range(warps):
            last = seen[v, w]
            for thread in range(WARP * w, WARP * w + WARP):
                past[thread] = max(past[thread], last)
        for column in range(seen.shape[1] - warps):
            n = WARP * warps + column
            past[n] = max(past[n], seen[v, warps + column])
    if heard.size:
        hear(past, heard, tids)
    for k in range(tids.size):
        past[tids[k]] = max(past[tids[k]], starts[tids[k] // WARP])


@part_of_a_loop
def hear(past, heard, tids):
    """Raise the stamps in `past` to the stamps in `heard` of any thread in `tids`."""
    for k in range(tids.size):
        row = heard[tids[k]]
        for n in range(past.size):
            past[n] = max(past[n], row[n])


@compiled
def learn_by_warp(seen, whole, warps, known):
    """Raise the stamps in `seen` of the warps `whole` to what all threads of a warp know.

    `known` contains a stamp for each thread, as `known` at the top of this module. Return whether
    `known` contains no more than that: equal stamps for the threads of each warp.
    """
    alike = True
    for w in range(warps):
        last = known[WARP * w]
        for thread in range(WARP * w + 1, WARP * w + WARP):
            alike = alike and known[thread] == last
            last = min(last, known[thread])
        for k in range(whole.size):
            seen[whole[k], w] = max(seen[whole[k], w], last)
    for k in range(whole.size):
        for column in range(seen.shape[1] - warps):
            n = warps + column
            seen[whole[k], n] = max(seen[whole[k], n], known[WARP * warps + column])
    return alike


@compiled
def learn_by_thread(heard, tids, known):
    """Raise the stamps in `heard` of the threads `tids` to `known`."""
    for k in range(tids.size):
        row = heard[tids[k]]
        for n in range(known.size):
            row[n] = max(row[n], known[n])


@part_of_a_loop
def _may_have(stamp, known, fences, warps, base):
    """Return whether the copy engine and the tensor cores may use a value that was written.

    `stamp` is the stamp of the write. The write must have happened before this call. After a write
    by a thread, the thread must have made a fence. A write by a bulk copy needs no fence.
    """
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
    """Mark the elements of a box that is being loaded, unless one of them is still in use.

    No thread may access the marked elements until the box has arrived. `tid` is the number of the
    thread that starts the load. `site` is the number of the instruction that starts it. Return -1,
    or the index into `places` of the first element that is still in use.
    """
    # `allowed` is a stamp that was checked: neighbours mostly have equal stamps.
    free, used, allowed = places.size, False, UNWRITTEN
    for n in range(places.size):
        p = first + places[n]
        last = written[0, p]
        if last != allowed and last != UNWRITTEN:
            if not _may_have(last, known, fences, warps, base):
                free = n
                break
            allowed = last
        used = used or touched[0, p] >= base
    rows = 0  # one bit for each row with reads since the last barrier
    for row in range(reads.shape[1] if used else 0):  # row by row: its elements are contiguous
        allowed = UNWRITTEN
        for n in range(free):
            p = first + places[n]
            r = reads[0, row, p]
            if r >= base and r != allowed and touched[0, p] >= base:
                rows |= 1 << row
                if not before(r, known, warps):
                    free = n
                    break
                allowed = r
    if free < places.size:
        return free
    for row in range(reads.shape[1] if rows else 0):
        for n in range(places.size if rows >> row & 1 else 0):
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
    """Write the values of a box that has arrived to shared memory.

    The elements are marked as written at the time of the stamp `stamp`.
    """
    for n in range(places.size):
        p = first + places[n]
        data[0, p] = values[n]
        written[0, p] = stamp


@part_of_a_loop
def _give_back(reads, touched, row, parts, first, places, stamp):
    """Mark the elements of an asynchronous read. The arguments are described in `give_back`."""
    each = places.size // parts
    for part in range(parts):
        mark = stamp if stamp == READING else stamp + part
        for n in range(part * each, (part + 1) * each):
            p = first + places[n]
            reads[0, row, p] = touched[0, p] = mark


@compiled
def give_back(reads, touched, row, parts, first, places, stamp):
    """Mark elements of shared memory as read at the time of a stamp, or as still being read.

    The mark is `stamp`. The special stamp `READING` marks elements that are still being read.
    `reads` has one row for each kind of reader, and the marks are written to the row with the index
    `row`. If `parts` is above 1, that number of readers read equal parts of the elements, and
    reader n gets the mark ``stamp + n``.
    """
    _give_back(reads, touched, row, parts, first, places, stamp)


@compiled
def lend(
    data, written, reads, touched, row, parts, first, places, known, fences, warps, base, values
):
    """Copy elements of shared memory to `values` for an asynchronous read.

    The elements are also marked as being read. No thread may write them until the read has ended.
    Return -1, or the index into `places` of the first element that may not be read. `row` and
    `parts` are described in `give_back`.
    """
    allowed = -1  # a stamp that was checked: neighbours mostly have equal stamps
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
    """Count the sectors of a box as one request, and record which thread block accesses the box.

        kind       LOAD, STORE or ATOMIC of checks.py
        rows       position in memory of the first element of each row of the box
        width      number of elements in a row of the box
        itemsize   size of an element in bytes
        address    number of bytes from the beginning of the allocation to the array's memory
        block      number of the thread block
        writers, readers, atomics    the arrays of `Owners`, empty if they are not recorded
        stats      the row of statistics to which the request is added

    Return -1 if there is no conflict. Otherwise return the index of the first row with an element
    whose access conflicts with an access of another thread block.
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
            if not may_access(kind, rows[k], stop, block, False, writers, readers, atomics):
                return k
    return -1
