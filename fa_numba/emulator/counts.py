"""How often a launch loads from and stores to global memory, array by array."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Counts:
    """Global-memory accesses of one or more launches, by kernel parameter.

    `loads` and `stores` count elements, `load_bytes` and `store_bytes` bytes; an array that was not
    touched counts 0. An atomic is one load and one store.
    """

    loads: Counter[str] = field(default_factory=Counter)
    stores: Counter[str] = field(default_factory=Counter)
    load_bytes: Counter[str] = field(default_factory=Counter)
    store_bytes: Counter[str] = field(default_factory=Counter)

    def merge(self, other: Counts) -> Counts:
        """Add `other` to this one, in place; returns self."""
        self.loads.update(other.loads)
        self.stores.update(other.stores)
        self.load_bytes.update(other.load_bytes)
        self.store_bytes.update(other.store_bytes)
        return self

    def __str__(self) -> str:
        """A table: loads and stores in elements and bytes, a row for each array, and their sums."""
        columns = (self.loads, self.stores, self.load_bytes, self.store_bytes)
        names = sorted(set().union(*columns))
        rows = [["array", "loads", "stores", "bytes loaded", "bytes stored"]]
        rows += [[name, *(f"{column[name]:,}" for column in columns)] for name in names]
        rows.append(["all", *(f"{column.total():,}" for column in columns)])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = (
            "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])])
            for row in rows
        )
        return "\n".join(lines)

    def __add__(self, other: Counts) -> Counts:
        return Counts().merge(self).merge(other)


class Tally:
    """The accesses of one kernel parameter, in elements."""

    __slots__ = ("loads", "stores")

    def __init__(self) -> None:
        self.loads = self.stores = 0
