"""Compiled loops of memory accesses: hazards, values, sectors and wavefronts of many lanes.

These loops over lanes and elements are most of an emulated kernel's work, and so they are compiled
for the CPU. A function returns -1, or the first lane at which something may be wrong. From that
lane on the caller goes through the lanes one by one in Python, which knows every case and makes the
error.

Stamps are explained in shared_memory.py. Lanes are in the order of their threads. If several thread
blocks run at once, a thread's number is its number in the thread block, plus PITCH for each thread
block before. Arrays of shared memory and `base` have one row per thread block. `starts` and `seen`
have one row per warp of all these thread blocks.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable

from . import compiling

WARP = 32
PITCH, SHIFT = 1024, 10  # from block to block of those that run at once; its logarithm
LOCAL = PITCH - 1
STAMP = 2048
SEVERAL = 1024
# From here on, plus a column of `seen`: a product, of which each warp of four knows its own part.
PRODUCT = SEVERAL + 512
NOBODY = STAMP - 1
# Above every stamp, so that one comparison finds them, and by nobody: no access comes before.
READING = (1 << 59) + NOBODY  # asynchronously
AFTER_ALL = 1 << 60  # the last barrier of a launch that ignores races: every access came before
UNWRITTEN = (1 << 60) + NOBODY
IN_FLIGHT = (1 << 61) + NOBODY

# Columns of a row of statistics.
REQUESTS, SECTORS, WAVEFRONTS, CONFLICTS = range(4)
LOAD, STORE, ATOMIC, BOX = range(4)  # the last: a box that is stored, or has been waited for
MANY = -1

# Kept on disk; what they call is compiled into them, so that one process never reads what another
# is about to write.
compiled = compiling.compiled(error_model="numpy", _nrt=False)
# What they work in, as they cannot allocate: each call may change all of it.
SCRATCH = np.zeros((WARP + 1, WARP), np.int64)
# What they call. Without Numba's runtime no array is counted as a reference, which would take most
# of the time; nothing can be allocated then.
part_of_a_loop = register_jitable(_nrt=False)


@part_of_a_loop
def ordered(stamp, tid, warp, seen):
    """Return whether an access happened before the present of thread `tid`."""
    code = stamp & NOBODY
    if code == tid:
        return True
    if code == NOBODY:
        return False
    if code >= PRODUCT:
        last = seen[warp, code - PRODUCT]
        for column in range(code - PRODUCT + 1, code - PRODUCT + 4):
            last = min(last, seen[warp, column])
        return stamp < last
    other = code - SEVERAL if code >= SEVERAL else code >> 5
    return stamp < seen[warp, other]


@part_of_a_loop
def _in_pairs(e, start, stop, apart, mask, tids):
    """Return whether every lane shares its address with the lane `apart` away from it."""
    for k in range(start, stop):
        if mask[k]:
            other = tids[k] ^ apart
            n = k + other - tids[k]  # where it is, if no lane is missing
            if not (start <= n < stop and tids[n] == other):
                n = start
                while n < stop and tids[n] != other:
                    n += 1
            if n < stop and mask[n] and e[n] != e[k]:
                return False
    return True


@part_of_a_loop
def _wavefronts(first, itemsize, e, width, mask, tids, pairs, stats, scratch):
    """Count the wavefronts and conflicts of an access to shared memory; counts.py has the rule."""
    size, shift, group = width * itemsize, 2, 5  # log2 of bytes a lane, of lanes a wavefront
    while size > 1 << shift:
        shift, group = shift + 1, group - 1
    last = (1 << group) - 1
    units, used = scratch, scratch[WARP]  # by bank: units, how many
    k, count = 0, e.size
    while k < count:
        warp = tids[k] >> 5
        phase, most, waves, ideal = -1, 0, 0, 0
        lanes, half = group, -1
        while k < count and tids[k] >> 5 == warp:
            if pairs and group < 5 and (tids[k] & 31) >> (group + 1) != half:
                # Lanes that share places in pairs are served twice as many at a time.
                half = (tids[k] & 31) >> (group + 1)
                stop = k
                while (
                    stop < count
                    and tids[stop] >> 5 == warp
                    and (tids[stop] & 31) >> (group + 1) == half
                ):
                    stop += 1
                paired = _in_pairs(e, k, stop, 1, mask, tids)
                paired = paired or _in_pairs(e, k, stop, 2, mask, tids)
                lanes = group + 1 if paired else group
            if mask[k]:
                now = (lanes << 8) + ((tids[k] & 31) >> lanes)
                if now != phase:
                    phase, ideal = now, ideal + 1
                    waves += most
                    most = 0
                    for n in range(last + 1):
                        used[n] = 0
                unit = ((first + e[k]) * itemsize) >> shift
                bank = unit & last
                n = used[bank]
                while n > 0 and units[bank, n - 1] != unit:
                    n -= 1
                if n == 0:
                    units[bank, used[bank]] = unit
                    used[bank] += 1
                    if used[bank] > most:
                        most = used[bank]
            k += 1
        waves += most
        if ideal:
            stats[REQUESTS] += 1
            stats[WAVEFRONTS] += waves
            stats[CONFLICTS] += waves - ideal


@compiled
def shared_load(
    data, written, reads, touched, first, length, itemsize, e, width, mask, tids, starts, seen,
    base, stats, scratch, out, pairs,
):  # fmt: skip
    """Copy elements e .. e + width - 1 of every lane to out[:, lane]."""
    for k in range(e.size):
        if not mask[k]:
            continue
        i = e[k]
        if i < 0 or i + width > length or (first + i) & (width - 1):
            return k
        s, w, t = tids[k] >> SHIFT, tids[k] >> 5, tids[k] & LOCAL
        v = t >> 5
        me, several, own = starts[w] + t, starts[w] + SEVERAL + v, seen[w, v]
        for n in range(width):
            p = first + i + n
            r = reads[s, v, p]
            # A read by this thread or several of its warp is recorded already, and was checked
            # against the last write then.
            if r != several and r != me:
                if written[s, p] >= base[s] and not ordered(written[s, p], t, w, seen):
                    return k
                reads[s, v, p] = me if r < own or r & NOBODY == t else several
                if reads[s, v, p] > touched[s, p]:
                    touched[s, p] = reads[s, v, p]
            out[n, k] = data[s, p]
    _wavefronts(first, itemsize, e, width, mask, tids, pairs, stats, scratch)
    return -1


@part_of_a_loop
def _may_write(written, reads, touched, s, p, base, t, w, seen):
    last = written[s, p]
    if last >= base[s] and last != UNWRITTEN and not ordered(last, t, w, seen):
        return False
    if touched[s, p] >= base[s]:
        for other in range(reads.shape[1]):
            r = reads[s, other, p]
            if r >= base[s] and not ordered(r, t, w, seen):
                return False
    return True


@compiled
def shared_store(
    data, written, reads, touched, first, length, itemsize, e, width, mask, tids, starts, seen,
    base, stats, scratch, values,
):  # fmt: skip
    """Store values[:, lane] to elements e .. e + width - 1 of every lane."""
    for k in range(e.size):
        if not mask[k]:
            continue
        i = e[k]
        if i < 0 or i + width > length or (first + i) & (width - 1):
            return k
        s, w, t = tids[k] >> SHIFT, tids[k] >> 5, tids[k] & LOCAL
        for n in range(width):
            p = first + i + n
            if not _may_write(written, reads, touched, s, p, base, t, w, seen):
                return k
            written[s, p] = starts[w] + t
            data[s, p] = values[n, k]
    _wavefronts(first, itemsize, e, width, mask, tids, False, stats, scratch)
    return -1


@compiled
def shared_atomic(
    written, reads, touched, atomics, plain, first, length, e, mask, tids, starts, seen, base
):
    """Record an atomic update of element e of every lane.

    `atomics` equals `written` for an element whose last write was atomic. `plain` is then the stamp
    of the last write that was not. The stamp of atomic updates by threads of several warps is by
    nobody, so that only a barrier of the thread block comes after it.
    """
    for k in range(e.size):
        if not mask[k]:
            continue
        i = e[k]
        if i < 0 or i >= length:
            return k
        s, w, t = tids[k] >> SHIFT, tids[k] >> 5, tids[k] & LOCAL
        p, v = first + i, t >> 5
        last = written[s, p]
        again = atomics[s, p] == last and last >= base[s]
        before = plain[s, p] if again else last
        if before >= base[s] and not ordered(before, t, w, seen):
            return k
        if touched[s, p] >= base[s]:
            for other in range(reads.shape[1]):
                r = reads[s, other, p]
                if r >= base[s] and not ordered(r, t, w, seen):
                    return k
        me = starts[w] + t
        if again and not ordered(last, t, w, seen):
            code = last & NOBODY
            one_warp = code == SEVERAL + v or (code < SEVERAL and code >> 5 == v)
            me = starts[w] + (SEVERAL + v if one_warp else NOBODY)
        written[s, p] = atomics[s, p] = me
        plain[s, p] = before
    return -1


@compiled
def count_wavefronts(first, itemsize, e, mask, tids, stats, scratch):
    """Count an access of every lane to one element of shared memory."""
    _wavefronts(first, itemsize, e, 1, mask, tids, False, stats, scratch)


@compiled
def depart(
    data, written, reads, touched, first, length, itemsize, e, width, mask, tids, starts, seen,
    base, stats, scratch, copiers, sites, site,
):  # fmt: skip
    """Hand elements e .. e + width - 1 of every lane to the lane's asynchronous copy."""
    for k in range(e.size):
        if not mask[k]:
            continue
        i = e[k]
        if i < 0 or i + width > length or (first + i) & (width - 1):
            return k
        s, w, t = tids[k] >> SHIFT, tids[k] >> 5, tids[k] & LOCAL
        for p in range(first + i, first + i + width):
            if not _may_write(written, reads, touched, s, p, base, t, w, seen):
                return k
        for p in range(first + i, first + i + width):
            written[s, p], reads[s, t >> 5, p] = IN_FLIGHT, 0
            copiers[s, p], sites[s, p] = t, site
    _wavefronts(first, itemsize, e, width, mask, tids, False, stats, scratch)
    return -1


@compiled
def land(data, written, first, e, width, values, mask, tids, starts):
    """Write the arrived copies of the lanes in `mask`: values[lane] to e .. e + width - 1."""
    for k in range(e.size):
        if mask[k]:
            s = tids[k] >> SHIFT
            me = starts[tids[k] >> 5] + (tids[k] & LOCAL)
            for n in range(width):
                data[s, first + e[k] + n] = values[k, n]
                written[s, first + e[k] + n] = me


@compiled
def outside(index, extent, mask):
    """Return the first lane whose index is not in 0 .. extent - 1; -1 if there is none."""
    for k in range(index.size):
        if mask[k] and not 0 <= index[k] < extent:
            return k
    return -1


@part_of_a_loop
def owned(kind, start, stop, block, several, writers, readers, atomics):
    """Record that a thread block accesses the elements from `start` to `stop`; return if it may."""
    for p in range(start, stop):
        if writers[p] != 0 and writers[p] != block:
            return False
        if kind != ATOMIC and atomics[p] != 0 and (several or atomics[p] != block):
            return False
        if kind != LOAD and readers[p] != 0 and readers[p] != block:
            return False
        if kind == LOAD:
            readers[p] = block if readers[p] == 0 or readers[p] == block else MANY
        elif kind == STORE:
            writers[p] = block
        else:
            atomics[p] = block if atomics[p] == 0 or atomics[p] == block else MANY
    return True


@part_of_a_loop
def _raced(kind, start, stop, me, t, w, stamps, seen, base):
    """Record that a thread accesses elements; return if it may race with a thread of its block."""
    for p in range(start, stop):
        for other in range(4):
            last = stamps[other, p]
            if last >= base and (other != kind or kind == STORE) and not ordered(last, t, w, seen):
                return True
        last, stamps[kind, p] = stamps[kind, p], me
        if kind == LOAD:
            # Of the last readers alone: threads of one warp, since it has met.
            warp = me - t + SEVERAL + (t >> 5)
            one = me - t <= last < warp and last != me and (last & NOBODY) >> 5 == t >> 5
            if one or last == warp:
                stamps[kind, p] = warp
    return False


@compiled
def global_access(
    kind, e, width, valid, itemsize, address, beside, mask, tids, first, several, writers, readers,
    atomics, stamps, starts, seen, base, stats, scratch,
):  # fmt: skip
    """Count the sectors of an access to global memory, and record which thread block makes it.

    Every lane touches `valid` elements from `e` on. The access has `width` elements, which is the
    most. A sector is counted once for each different value of `beside`. Thread blocks are numbered
    from `first` on. If `several` run at once, their atomic additions are made later.

    Returns the first lane that touches an element which another thread block has touched, if one of
    them writes and not both are atomic; or an element to which an addition is still to be made.
    Otherwise it returns -2 minus the first lane that may race with another thread of its thread
    block. Otherwise -1.
    """
    sectors = scratch.reshape(-1)  # at most 4 a lane
    k, count = 0, e.size
    while k < count:
        warp = tids[k] >> 5
        found, active = 0, False
        while k < count and tids[k] >> 5 == warp:
            if mask[k] and valid[k]:
                active = True
                byte = address + e[k] * itemsize
                sector, last = byte >> 5, (byte + valid[k] * itemsize - 1) >> 5
                while sector <= last:
                    piece = (sector << 16) + beside[k]
                    n = found
                    while n > 0 and sectors[n - 1] != piece:
                        n -= 1
                    if n == 0:
                        sectors[found] = piece
                        found += 1
                    sector += 1
            k += 1
        if active:
            stats[REQUESTS] += 1
            stats[SECTORS] += found
    if writers.size:
        for k in range(count):
            block, stop = first + (tids[k] >> SHIFT), e[k] + valid[k]
            if mask[k] and not owned(kind, e[k], stop, block, several, writers, readers, atomics):
                return k
    if stamps.size:
        for k in range(count):
            if mask[k]:
                s, w, t = tids[k] >> SHIFT, tids[k] >> 5, tids[k] & LOCAL
                stop, me = e[k] + valid[k], starts[w] + t
                if _raced(kind, e[k], stop, me, t, w, stamps, seen, base[s]):
                    return -2 - k
    return -1


@compiled
def add_in_turn(memory, at, values):
    """Compute memory[at] += values, one after the other, each sum in double precision."""
    for k in range(at.size):
        memory[at[k]] = np.float64(memory[at[k]]) + values[k]


@compiled
def multiply_adds(sums, elements, left, right, factors):
    """Compute sums[element] += factors[left] * factors[right], one after the other.

    Products and sums are in double precision. Each sum is then rounded to single precision.
    """
    for n in range(elements.size):
        total, a, b = sums[elements[n]], factors[left[n]], factors[right[n]]
        for k in range(total.size):
            total[k] = np.float32(total[k] + a[k] * b[k])
