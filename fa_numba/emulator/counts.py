"""What a launch did to memory: loads and stores by array, and what a GPU's profiler would count."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import astuple, dataclass, field


@dataclass(frozen=True)
class Access:
    """A line of a kernel that touches an array.

    ``space`` is "global" or "shared"; ``kind`` "load", "store", "atomic" or "copy", an asynchronous
    copy, which has a global and a shared side, or "box load" or "box store", of the copy engine,
    which have a global side alone; ``line`` "file.py:123: source text".
    """

    kernel: str
    array: str
    space: str
    kind: str
    line: str


@dataclass(frozen=True)
class Traffic:
    """What accesses cost, as Nsight Compute counts it.

    ``requests`` are instructions of a warp. ``sectors`` are the 32-byte pieces of global memory
    that they touch, each counted once a request. ``wavefronts`` are the passes that shared memory
    takes, 128 bytes at best, and ``conflicts`` those beyond what the width of the access needs:
    bank conflicts. Lanes that touch the same word share it; loads of 8 and 16 bytes whose lanes
    share words in pairs (lanes 1 or 2 apart) take half the wavefronts. Copies of 16 bytes fetch a
    sector again for every other 32 bytes of shared memory that it goes to. Measured on an H200. Not
    measured: a box is one request, with the sectors of its rows that lie in the array. What boxes
    and products of warpgroups do in shared memory takes none of the threads' wavefronts.
    """

    requests: int = 0
    sectors: int = 0
    wavefronts: int = 0
    conflicts: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*map(operator.add, astuple(self), astuple(other)))


@dataclass
class Counts:
    """Global-memory accesses of one or more launches, by kernel parameter, and their cost.

    `loads` and `stores` count elements, `load_bytes` and `store_bytes` bytes; an array that was not
    touched counts 0. An atomic is one load and one store. `traffic` is what each line of a kernel
    costs, `instructions` are those of warps, by class: "load", "store", "atomic", "copy", "mma",
    "fma" (multiply-adds to an element of an array), "exp", "shuffle" and "barrier", mbarriers' too;
    "tma" (copies of boxes); and of warpgroups "wgmma", a product once for 16 summed columns.
    """

    loads: Counter[str] = field(default_factory=Counter)
    stores: Counter[str] = field(default_factory=Counter)
    load_bytes: Counter[str] = field(default_factory=Counter)
    store_bytes: Counter[str] = field(default_factory=Counter)
    traffic: dict[Access, Traffic] = field(default_factory=dict)
    instructions: Counter[str] = field(default_factory=Counter)

    def merge(self, other: Counts) -> Counts:
        """Add `other` to this one, in place; returns self."""
        for name in ("loads", "stores", "load_bytes", "store_bytes", "instructions"):
            getattr(self, name).update(getattr(other, name))
        for access, traffic in other.traffic.items():
            self.traffic[access] = self.traffic.get(access, Traffic()) + traffic
        return self

    def total(self, **fields: str) -> Traffic:
        """The sum over accesses with these fields, as ``total(space="shared", kind="load")``.

        Raises TypeError for a name that is no field of `Access`.
        """
        unknown = fields.keys() - Access.__dataclass_fields__.keys()
        if unknown:
            allowed = ", ".join(Access.__dataclass_fields__)
            raise TypeError(f"{unknown.pop()} is no field of an access, allowed: {allowed}")
        found = Traffic()
        for access, traffic in self.traffic.items():
            if all(getattr(access, name) == value for name, value in fields.items()):
                found += traffic
        return found

    def __str__(self) -> str:
        """A table: loads and stores in elements and bytes, a row for each array, and their sums."""
        found = (self.loads, self.stores, self.load_bytes, self.store_bytes)
        rows: list[tuple[str, ...]] = [("array", "loads", "stores", "bytes loaded", "bytes stored")]
        rows += [(n, *(f"{each[n]:,}" for each in found)) for n in sorted(set().union(*found))]
        rows.append(("all", *(f"{each.total():,}" for each in found)))
        return "\n".join(columns(rows))

    def __add__(self, other: Counts) -> Counts:
        return Counts().merge(self).merge(other)


@dataclass(slots=True)
class Tally:
    """The accesses of one kernel parameter, in elements."""

    loads: int = 0
    stores: int = 0


def columns(rows: Sequence[tuple[str, ...]], left: Collection[int] = (0,)) -> list[str]:
    """Lines of a table: the columns numbered in ``left`` to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if n in left else cell.rjust(width)
            for n, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
