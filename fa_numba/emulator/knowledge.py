"""Records which earlier accesses surely happened before the next access of each thread.

A *stamp* is an integer that numbers accesses in the order of time. Suppose that every access of
thread u with a stamp below 500 happened before the next access of thread t. This module then says:
thread t *knows* the stamp 500 of thread u. A barrier, for example, raises the stamps that the
waiting threads know.

Two arrays contain the known stamps:

- ``seen[v, w]`` is a stamp that every thread of warp v knows of every thread of warp w.
- ``_heard[t, u]`` is a stamp that thread t knows of thread u. The array is made when it is first
  needed. Threads arrive at an mbarrier one by one, and a thread may then know more than the other
  threads of its warp.

Both arrays have more columns after the columns for warps or threads: the *further columns*. They
are for accesses that the hardware makes, not a thread. Each warp has one further column for its
part of a matrix product. Each mbarrier has one further column for the copies that it counts.

The variable `known` in this module contains what one or more threads know: one stamp per thread of
the thread block, followed by the further columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .active import MOST_KNOWN
from .async_checks import before, learn_by_thread, learn_by_warp, least_known
from .checks import NOBODY, STAMP
from .groups import WARP, NamedBarrier, OneByOne, warps_of
from .waiting import Waiting

WARPGROUP = 4  # warps
MOST_FENCES = 16  # fences of the same threads that are remembered
ALWAYS = 1 << 58  # above the stamp of any access
_NOTHING = np.zeros((0, 0), np.int64)


class Knowledge(Waiting):
    """Methods of a running launch that record which accesses each thread knows to be finished.

    The class `Launch` inherits these methods.
    """

    __slots__ = ("_heard", "_columns", "_fences", "_taking_part")

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._heard: np.ndarray | None = None
        self._columns = 0  # number of columns for mbarriers
        # The last fences of a set of threads: the threads, and the stamp of each fence.
        self._fences: dict[bytes, list[tuple[np.ndarray, int]]] = {}
        self._taking_part: dict[tuple[int, int], Any] = {}  # see `_whole_and_others`

    def begin_blocks(self, first: int, count: int) -> None:
        """Forget the knowledge of all threads for new thread blocks; see `Context.begin_blocks`."""
        super().begin_blocks(first, count)
        self._columns, self._heard, self._fences = 0, None, {}

    @property
    def heard(self) -> np.ndarray:
        """Return `_heard` for compiled loops: an empty array if no thread knows more."""
        return _NOTHING if self._heard is None else self._heard

    @property
    def warpgroups(self) -> int:
        """Return the number of warpgroups of a thread block, rounded up."""
        return -(-self.warps // WARPGROUP)

    def alone(self) -> None:
        """Raise OneByOne if several thread blocks run at the same time."""
        if self.several:
            raise OneByOne

    def widen(self, more: int) -> None:
        """Append columns to `seen` and `_heard`, so that they suffice for `more` new mbarriers.

        The columns are the further columns that the top of this module describes: one for each warp
        of every warpgroup, and one for each mbarrier. Nothing happens if there are enough columns.
        """
        base, starts, seen = self._clocks
        columns = WARPGROUP * self.warpgroups + self._columns
        missing = self.warps + columns + more - seen.shape[1]
        if missing <= 0:
            return
        missing += -missing % 16
        wider = np.zeros((len(seen), seen.shape[1] + missing), np.int64)
        wider[:, : seen.shape[1]] = seen
        self._clocks = (base, starts, wider)
        self.seen = wider[: len(self.seen)]

        def longer(row: np.ndarray) -> np.ndarray:
            """Return `row` with zeros appended, so that it has as many columns as `wider`."""
            return np.concatenate([row, np.zeros(missing, np.int64)])

        self._opened = {n: longer(row) for n, row in self._opened.items()}
        for named in self._named_barriers.values():
            named.seen = longer(named.seen)
            named.known = None if named.known is None else longer(named.known)
        if self._heard is not None:
            gap = np.zeros((len(self._heard), missing), np.int64)
            self._heard = np.concatenate([self._heard, gap], axis=1)

    def _by_thread(self, row: np.ndarray) -> np.ndarray:
        """Return a row of `seen` with one stamp per thread instead of one per warp.

        The further columns stay the same.
        """
        return np.concatenate([np.repeat(row[: self.warps], WARP), row[self.warps :]])

    def _by_warp(self, known: np.ndarray) -> np.ndarray:
        """Return a row with one stamp per warp instead of one per thread.

        The stamp of a warp is the least stamp of its threads. The further columns stay the same.
        """
        threads = self.warps * WARP
        return np.concatenate([known[:threads].reshape(-1, WARP).min(axis=1), known[threads:]])

    def known_by(self, tids: np.ndarray, exactly: bool = False) -> np.ndarray:
        """Return which accesses happened before the next access of every thread in `tids`.

        A stamp numbers accesses in the order of time. The result is an array with one stamp for
        each thread of the thread block. Every access of thread t with a lower stamp than entry t of
        the array happened before. After the entries for threads, the array contains entries for
        accesses of the hardware, which the top of this module describes.

        By default, the stamps may be lower than necessary, because low stamps are faster to
        compute. A low stamp never hides a race. If `exactly` is set, the stamps are as high as
        possible.
        """
        if exactly and self._heard is not None:
            rows = [self._by_thread(self.seen[tid // WARP]) for tid in tids.tolist()]
            known = np.maximum(rows, self._heard[tids]).min(axis=0)
        else:
            seen = self.seen
            known, least = np.empty((2, self.warps * (WARP - 1) + seen.shape[1]), np.int64)
            least_known(seen, self.heard, tids, self.warps, known, least)
        if tids.size == 1:
            known[tids[0]] = ALWAYS
        return known

    def ordered(self, stamp: int, lane: int) -> bool:
        """Return whether an earlier access happened before a lane's next access.

        `stamp` is the stamp of the earlier access. The result uses what the lane's warp knows, and
        what the lane's thread knows in addition.
        """
        if super().ordered(stamp, lane):
            return True
        if self._heard is None or stamp % STAMP == NOBODY:
            return False
        tid = self.group.tids[lane]
        known = np.maximum(self._by_thread(self.seen[tid // WARP]), self._heard[tid])
        return bool(before(stamp, known, self.warps))

    def _column_known(self, tids: np.ndarray, column: int) -> np.ndarray:
        """Return for each thread in `tids` the stamp that it knows of one hardware unit.

        The unit is a part of a matrix product, or the copies of an mbarrier. `column` is the number
        of the unit's further column, from 0. The top of this module explains further columns.
        """
        known = self.seen[tids // WARP, self.warps + column]
        if self._heard is not None:
            known = np.maximum(known, self._heard[tids, self.warps * WARP + column])
        return known

    def _learn(self, known: np.ndarray) -> None:
        """Record that the lanes that take part know the stamps in `known` from now on.

        The lanes keep the stamps that they know already, if these stamps are higher.
        """
        tids, whole, others = self._whole_and_others()
        if learn_by_warp(self.seen, whole, self.warps, known):
            tids = others
        if tids.size:
            if self._heard is None:
                shape = (self.warps * WARP, known.size)
                self._heard = np.zeros(shape, np.int64)
            learn_by_thread(self._heard, tids, known)

    def _whole_and_others(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the threads that take part, divided into complete warps and other threads.

        Three results are returned:

        - the numbers of all threads that take part;
        - the numbers of the warps of which all threads take part;
        - the numbers of the threads that take part in all other warps.

        The results are cached for each group and mask, because groups and masks are never changed.
        """
        group, mask = self.group, self.mask
        found = self._taking_part.get((id(group), id(mask)))
        if found is None:
            tids = group.tids if mask is None else group.tids[mask]
            counts = np.bincount(tids // WARP, minlength=self.warps)
            sizes = np.minimum(WARP, self.threads - WARP * np.arange(self.warps))
            whole = np.flatnonzero(counts == sizes)
            others = tids[(counts != sizes)[tids // WARP]]
            if len(self._taking_part) > MOST_KNOWN:
                self._taking_part.clear()
            # The entry contains the group and the mask, so that no other object gets their ids.
            found = self._taking_part[id(group), id(mask)] = group, mask, (tids, whole, others)
        return found[2]

    def synced(self, warps: np.ndarray) -> None:
        """Record that the lanes of each warp in `warps` have synchronised with each other.

        From now on, a lane knows every stamp that any lane of the warp knew.
        """
        if self._heard is None:
            return
        for warp in warps.tolist():
            lanes = slice(warp * WARP, warp * WARP + WARP)
            self._heard[lanes] = known = self._heard[lanes].max(axis=0)
            self.seen[warp] = np.maximum(self.seen[warp], self._by_warp(known))

    def _arrive(self, warp: int, barrier: int, threads: int, waits: bool) -> NamedBarrier:
        """Record that a warp arrives at a named barrier, as `Waiting._arrive` describes.

        Also record what single threads of the warp know.
        """
        named = super()._arrive(warp, barrier, threads, waits)
        if self._heard is not None:
            mine = self._heard[warp * WARP : warp * WARP + WARP].max(axis=0)
            named.known = mine if named.known is None else np.maximum(named.known, mine)
        if named.opened and named.known is not None and self._heard is not None:
            for other in named.synced:
                lanes = slice(other * WARP, other * WARP + WARP)
                self._heard[lanes] = np.maximum(self._heard[lanes], named.known)
        return named

    def _release(self) -> None:
        """Let all groups continue after a barrier of the thread block, and count the barrier.

        If the thread block has several groups, count the barrier once per warp. Lanes of a warp may
        be in two groups.
        """
        super()._release()
        if len(self._groups) > 1:  # lanes of one warp may be in two groups
            self._instructions["barrier"] = self._instructions.get("barrier", 0) + self.warps

    def fenced(self) -> None:
        """Record a fence of the lanes that take part.

        Copies and products may then read what these lanes have written.
        """
        self.alone()
        tids = self.group.tids if self.mask is None else self.group.tids[self.mask]
        self._tick(warps_of(tids))
        fences = self._fences.setdefault(tids.tobytes(), [])
        fences.append((tids, self.clock * STAMP))
        del fences[:-MOST_FENCES]
        self._tick(warps_of(tids))

    def checked(
        self, check: Callable[..., int], *args: Any, tids: np.ndarray, last: tuple[Any, ...]
    ) -> tuple[int, np.ndarray]:
        """Check an asynchronous copy or product that the threads `tids` start.

        `check` is a function of async_checks.py. It is called as ``check(*args, known, fences,
        warps, base, *last)``. The caller gives `args` and `last`. This method computes the others:
        what the threads know of other threads' accesses (`known`), their last fences, the number of
        warps, and the stamp of the block's last barrier (`base`).

        Return two values. The first value is the result of `check`: -1 if every access is allowed,
        or the index of the first element that is not allowed. The second value is the array `known`
        of the last call of `check`.

        The first calls get stamps that are fast to compute, but may be lower than necessary. If
        they find an access that is not allowed, `check` is called again with exact stamps.
        """
        known = self.known_by(tids)
        bad = -1
        for fenced, exactly in ((False, False), (True, False), (True, True)):
            if exactly:
                known = self.known_by(tids, exactly=True)
            fences = self.fences_of(known) if fenced else np.zeros(self.warps * WARP, np.int64)
            bad = check(*args, known, fences, self.warps, self.base[0], *last)
            if bad < 0:
                break
        return bad, known

    def fences_of(self, known: np.ndarray) -> np.ndarray:
        """Return the stamp of each thread's last finished fence, or 0 if there is none.

        `known` is a row that `known_by` returned. A fence of thread t is finished if its stamp is
        below known[t].
        """
        found = np.zeros(self.warps * WARP, np.int64)
        for tids, stamp in (fence for fences in self._fences.values() for fence in fences):
            there = tids[stamp + tids < known[tids]]
            found[there] = np.maximum(found[there], stamp)
        return found
