"""Compiled loops over memory accesses: they find hazards, move values and count the traffic.

These loops over lanes and elements are most of an emulated kernel's work. They are therefore
compiled for the CPU. A function that checks accesses returns -1 if it finds no fault. Otherwise it
returns the first lane whose access it cannot decide. From that lane on, the caller checks the lanes
one by one in Python, and raises the error if there is a fault.

Stamps are explained in shared_memory.py. Lanes are in the order of their threads. If several thread
blocks run at the same time, a thread's number is its number in the thread block, plus PITCH for
each thread block before. Arguments that recur:

    data, written, reads, touched, copiers, sites    the arrays of a `SharedBuffer`
    first, length    the shared array: its first element in the buffer, its number of elements
    e, width         each lane accesses `width` elements from e[lane] on
    mask, tids       which lanes take part, and the number of each lane's thread
    kind             kind of access to global memory: LOAD, STORE or ATOMIC
    starts, seen, base    see `Context.new_clocks`
    stats            a row of statistics to which the access is added
    scratch          working memory: SCRATCH
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable

from . import compiling

WARP = 32
# Thread numbers of thread blocks that run at the same time differ by PITCH = 1 << SHIFT.
PITCH, SHIFT = 1024, 10
LOCAL = PITCH - 1  # bits of a thread number that are the number in the thread block
STAMP = 2048  # a stamp is clock * STAMP + code
SEVERAL = 1024  # code of several threads of warp w: SEVERAL + w
# Code of a product of a warpgroup: PRODUCT + the first of four columns of `seen`. In these columns
# each warp of the warpgroup records that its own part of the product has ended.
PRODUCT = SEVERAL + 512
NOBODY = STAMP - 1  # code of an access that only a barrier of the thread block can order
# Special stamps. They are greater than every other stamp, so that one comparison finds them.
READING = (1 << 59) + NOBODY  # an asynchronous read is in flight
AFTER_ALL = 1 << 60  # `base` of a launch that ignores races: every access happened before
UNWRITTEN = (1 << 60) + NOBODY
IN_FLIGHT = (1 << 61) + NOBODY  # an asynchronous copy to the element is in flight

# Columns of a row of statistics.
REQUESTS, SECTORS, WAVEFRONTS, CONFLICTS = range(4)
# Kinds of access. BOX: a store of a box, which is in flight or has been waited for.
LOAD, STORE, ATOMIC, BOX = range(4)
MANY = -1  # in place of the number of a thread block: several thread blocks

# Decorator of compiled loops, which are cached on disk. The functions that they call are compiled
# into them, so that no process reads a function's file while another process writes it.
compiled = compiling.compiled(error_model="numpy", _nrt=False)
# Working memory of the loops, which cannot allocate. Each call may change all of it.
SCRATCH = np.zeros((WARP + 1, WARP), np.int64)
# Decorator of functions that compiled loops call. Without Numba's runtime (`_nrt`), references to
# arrays are not counted, which would take most of the time. Such code cannot allocate.
part_of_a_loop = register_jitable(_nrt=False)


@part_of_a_loop
def ordered(stamp, tid, warp, seen):
    """Return whether an earlier access certainly happened before a thread's current access.

    `stamp` is the stamp of the earlier access. `tid` is the number of the thread in its thread
    block. `warp` is the index of the row of `seen` that belongs to the thread's warp.
    """
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
    """Return whether the two lanes of each pair access the same elements.

    A pair consists of the lanes of the threads t and t ^ `apart`. Only the lanes from `start` to
    `stop` - 1 are compared. A lane whose partner does not take part counts as equal.
    """
    for k in range(start, stop):
        if mask[k]:
            other = tids[k] ^ apart
            n = k + other - tids[k]  # the other lane, if no lane is missing
            if not (start <= n < stop and tids[n] == other):
                n = start
                while n < stop and tids[n] != other:
                    n += 1
            if n < stop and mask[n] and e[n] != e[k]:
                return False
    return True


@part_of_a_loop
def _wavefronts(first, itemsize, e, width, mask, tids, pairs, stats, scratch):
    """Count the wavefronts and bank conflicts of an access to shared memory.

    The rule is in counts.py. `pairs` says whether a load needs fewer wavefronts if neighbouring
    lanes load the same elements.
    """
    # A lane accesses a word of 1 << shift bytes, and a wavefront serves 1 << group lanes.
    size, shift, group = width * itemsize, 2, 5
    while size > 1 << shift:
        shift, group = shift + 1, group - 1
    last = (1 << group) - 1
    words, used = scratch, scratch[WARP]  # by bank: the accessed words, and their number
    k, count = 0, e.size
    while k < count:
        warp = tids[k] >> 5
        phase, most, waves, ideal = -1, 0, 0, 0
        lanes, half = group, -1
        while k < count and tids[k] >> 5 == warp:
            if pairs and group < 5 and (tids[k] & 31) >> (group + 1) != half:
                # If pairs of lanes load the same elements, a wavefront serves twice as many lanes.
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
                word = ((first + e[k]) * itemsize) >> shift
                bank = word & last
                n = used[bank]
                while n > 0 and words[bank, n - 1] != word:
                    n -= 1
                if n == 0:
                    words[bank, used[bank]] = word
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
    """Check and count loads, and copy the elements of every lane to out[:, lane].

    `pairs` is described in `_wavefronts`.
    """
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
            # If a read by this thread, or by several threads of its warp, is recorded, it was
            # checked against the last write before.
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
    """Return whether a thread may write an element without a race.

    The result is True if all accesses to the element since the last barrier happened before the
    write. `p` is the position of the element in the buffer. `s` is the row of the arrays that
    belongs to the thread's thread block. `t` is the number of the thread, and `w` is the index of
    the row of `seen` that belongs to the thread's warp.
    """
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
    """Check and count stores, and copy values[:, lane] to the elements of every lane."""
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
    """Check the atomic updates of shared memory in one instruction, and record them.

    Each lane updates one element. Atomic updates of an element may happen in any order. An atomic
    update must not race with a read or a plain (not atomic) write. Return -1, or the first lane
    whose update may race or is out of bounds.

    Three arrays contain a stamp for each element of the buffer:

    | array | access that the stamp records |
    |---|---|
    | `written` | the last write, plain or atomic |
    | `atomics` | the last atomic update |
    | `plain` | the last plain write before the last atomic update |

    The other arguments are described at the top of this module. The code of a stamp says who made
    the update: one thread, or several threads of one warp. The code NOBODY is for updates by
    several warps. Only a barrier of the thread block orders later accesses after such updates.
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
    """Count the wavefronts of an access of every lane to one element of shared memory."""
    _wavefronts(first, itemsize, e, 1, mask, tids, False, stats, scratch)


@compiled
def depart(
    data, written, reads, touched, first, length, itemsize, e, width, mask, tids, starts, seen,
    base, stats, scratch, copiers, sites, site,
):  # fmt: skip
    """Check and count asynchronous copies, and mark the elements of every lane as in flight.

    `site` is the number of the instruction, which is recorded for messages.
    """
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
    """Write the values of asynchronous copies that lanes have waited for.

    In each lane of `mask`, values[lane] is written to the elements of this lane.
    """
    for k in range(e.size):
        if mask[k]:
            s = tids[k] >> SHIFT
            me = starts[tids[k] >> 5] + (tids[k] & LOCAL)
            for n in range(width):
                data[s, first + e[k] + n] = values[k, n]
                written[s, first + e[k] + n] = me


@compiled
def outside(index, extent, mask):
    """Return the first lane of `mask` whose index is outside 0 .. extent - 1; else -1."""
    for k in range(index.size):
        if mask[k] and not 0 <= index[k] < extent:
            return k
    return -1


@part_of_a_loop
def may_access(kind, start, stop, block, several, writers, readers, atomics):
    """Record an access of a thread block to elements; return False if there is a conflict.

    `block` is the number of the thread block. The elements are from `start` to `stop` - 1. Two
    accesses to an element conflict if they are of different thread blocks, at least one is a write,
    and at least one is not atomic. `writers`, `readers` and `atomics` are the arrays of `Owners`.

    `several` says whether several thread blocks run at the same time. The emulator then makes their
    atomic additions later, when the thread blocks have ended. A load or store after an atomic
    addition to the same element is then a conflict, even if both are of the same thread block.
    """
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
    """Record a thread's access to elements; return whether the access may be a race.

    Only races with other threads of the same thread block are found. The elements are from `start`
    to `stop` - 1. `me` is the stamp of the access, and `t` the number of the thread. `w` is the
    index of the row of `seen` that belongs to the thread's warp.
    """
    for p in range(start, stop):
        for other in range(4):
            last = stamps[other, p]
            if last >= base and (other != kind or kind == STORE) and not ordered(last, t, w, seen):
                return True
        last, stamps[kind, p] = stamps[kind, p], me
        if kind == LOAD:
            # If other threads of the warp have read the element since the warp last synchronised,
            # the stamp stands for several threads of the warp.
            warp = me - t + SEVERAL + (t >> 5)
            one = me - t <= last < warp and last != me and (last & NOBODY) >> 5 == t >> 5
            if one or last == warp:
                stamps[kind, p] = warp
    return False


@compiled
def global_access(
    kind, e, width, valid, itemsize, address, pieces, mask, tids, first, several, writers, readers,
    atomics, stamps, starts, seen, base, stats, scratch,
):  # fmt: skip
    """Count the sectors of an access to global memory, and check and record the access.

    Every lane accesses `valid` elements from `e` on. `width` is the greatest number of elements
    that a lane can access. `address` is the number of bytes from the beginning of the allocation to
    the array's memory. A sector is counted once for each different value of `pieces`; see
    `GlobalArray.source`. `first` is the number of the first thread block that runs. If several
    thread blocks run at the same time (`several`), their atomic additions are made later.

        result        meaning
        -1            there is no conflict and no race
        n, from 0     the access of lane n conflicts with another thread block, or with an addition
                      that is still to be made
        n, below -1   the access of lane -2 - n may race with another thread of its thread block
    """
    sectors = scratch.reshape(-1)  # at most 4 sectors per lane
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
                    key = (sector << 16) + pieces[k]
                    n = found
                    while n > 0 and sectors[n - 1] != key:
                        n -= 1
                    if n == 0:
                        sectors[found] = key
                        found += 1
                    sector += 1
            k += 1
        if active:
            stats[REQUESTS] += 1
            stats[SECTORS] += found
    if writers.size:
        for k in range(count):
            block, stop = first + (tids[k] >> SHIFT), e[k] + valid[k]
            if mask[k] and not may_access(
                kind, e[k], stop, block, several, writers, readers, atomics
            ):
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
    """Compute memory[at] += values, one addition after the other, each in double precision."""
    for k in range(at.size):
        memory[at[k]] = np.float64(memory[at[k]]) + values[k]


@compiled
def multiply_adds(sums, elements, left, right, factors):
    """Compute the multiply-adds sums[elements[n]] += factors[left[n]] * factors[right[n]].

    They are computed one after the other, for n from 0. A row of `sums` or `factors` contains one
    value per lane. Each multiply-add is computed in double precision, and its sum is rounded to
    single precision.
    """
    for n in range(elements.size):
        total, a, b = sums[elements[n]], factors[left[n]], factors[right[n]]
        for k in range(total.size):
            total[k] = np.float32(total[k] + a[k] * b[k])
