"""Counts of a launch: accesses by array, and the memory traffic that a GPU's profiler counts."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from .errors import EmulatorError


@dataclass(frozen=True)
class Access:
    """A line of a kernel that accesses an array: the key of `Counts.traffic`.

    Parameters
    ----------
    kernel : str
        Name of the kernel function.
    array : str
        Name of the array.
    space : str
        "global" or "shared".
    kind : str
        "load", "store" or "atomic". "copy" for an asynchronous copy, which has one entry for global
        memory and one entry for shared memory. "box load", "box store" or "box add" for a bulk copy
        by the copy engine, which has an entry for global memory only.
    line : str
        Source line as "file.py:123: source text".
    """

    kernel: str
    array: str
    space: str
    kind: str
    line: str


@dataclass(frozen=True)
class Traffic:
    """Requests, sectors, wavefronts and bank conflicts of accesses, as Nsight Compute counts them.

    Two `Traffic` objects can be added.

    Parameters
    ----------
    requests : int, default 0
        Instructions of a warp.
    sectors : int, default 0
        32-byte pieces of global memory that the requests touch, each counted once per request.
    wavefronts : int, default 0
        Passes that shared memory needs, at most 128 bytes per pass.
    conflicts : int, default 0
        Bank conflicts: wavefronts beyond the number that the width of the access needs.

    Notes
    -----
    The rules were measured on an H200. Lanes that access one word count as one access to the word.
    A load of 8 or 16 bytes needs half the wavefronts if every lane l loads the same address as lane
    l ^ 1, or if every lane l loads the same address as lane l ^ 2. Asynchronous copies of 16 bytes
    count a sector once for each different 32-byte piece of shared memory to which the sector is
    copied.

    Two rules were not measured. A box is one request, with the sectors of its rows that are in the
    array. Accesses to shared memory by boxes and by products of warpgroups have no wavefronts.

    Examples
    --------
    >>> Traffic(requests=1, sectors=4) + Traffic(requests=1, sectors=8)
    Traffic(requests=2, sectors=12, wavefronts=0, conflicts=0)
    """

    requests: int = 0
    sectors: int = 0
    wavefronts: int = 0
    conflicts: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.requests + other.requests,
            self.sectors + other.sectors,
            self.wavefronts + other.wavefronts,
            self.conflicts + other.conflicts,
        )


@dataclass
class Counts:
    """Counts of one or more launches: accesses, memory traffic and instructions.

    Counts can be added. ``print(counts)`` shows a table of `loads`, `stores` and their bytes. An
    atomic operation is one load and one store.

    Parameters
    ----------
    loads, stores : Counter of str to int
        Elements of global memory loaded and stored, by the name of the kernel's parameter. An array
        that was not touched counts 0.
    load_bytes, store_bytes : Counter of str to int
        Bytes of global memory loaded and stored, by the name of the kernel's parameter.
    traffic : dict of Access to Traffic
        Traffic of each line of the kernels in global memory and in shared memory.
    instructions : Counter of str to int
        Instructions of warps, by class: "load", "store", "atomic", "copy", "mma", "fma"
        (multiply-adds to an element of an array), "exp", "shuffle", "vote" (votes and matches of a
        warp), "barrier" (mbarriers too), "tma" (copies of boxes) and "wgmma" (matrix products of a
        warpgroup: one instruction for every 16 elements of the axis that is summed over).
    reports : list of EmulatorError
        Races that were found with ``races="report"``. Each has the attributes `block`, `thread`,
        `array` and `line`. Empty otherwise.

    Examples
    --------
    >>> one, two = Counts(), Counts()
    >>> one.loads["Q"], two.loads["Q"] = 8, 4
    >>> (one + two).loads["Q"], one.loads["K"]
    (12, 0)
    """

    loads: Counter[str] = field(default_factory=Counter)
    stores: Counter[str] = field(default_factory=Counter)
    load_bytes: Counter[str] = field(default_factory=Counter)
    store_bytes: Counter[str] = field(default_factory=Counter)
    traffic: dict[Access, Traffic] = field(default_factory=dict)
    instructions: Counter[str] = field(default_factory=Counter)
    reports: list[EmulatorError] = field(default_factory=list)

    def merge(self, other: Counts) -> Counts:
        """Add the counts of `other` to this object, in place.

        Parameters
        ----------
        other : Counts
            Counts of another launch.

        Returns
        -------
        Counts
            This object.
        """
        for name in ("loads", "stores", "load_bytes", "store_bytes", "instructions"):
            getattr(self, name).update(getattr(other, name))
        for access, traffic in other.traffic.items():
            known = self.traffic.get(access)
            self.traffic[access] = traffic if known is None else known + traffic
        self.reports += other.reports
        return self

    def total(self, **fields: str) -> Traffic:
        """Return the sum of the traffic of all accesses with the given fields.

        Parameters
        ----------
        **fields : str
            Fields of `Access` and their values, such as ``space="shared", kind="load"``. Without
            fields, the sum is over all accesses.

        Returns
        -------
        Traffic
            The sum.

        Raises
        ------
        TypeError
            If a name is not a field of `Access`.

        Examples
        --------
        >>> counts = Counts()
        >>> access = Access("kernel", "s", "shared", "load", "a.py:1: y = s[0]")
        >>> counts.traffic[access] = Traffic(2, 0, 4, 2)
        >>> counts.total(space="shared").conflicts, counts.total(space="global").requests
        (2, 0)
        """
        unknown = fields.keys() - Access.__dataclass_fields__.keys()
        if unknown:
            allowed = ", ".join(Access.__dataclass_fields__)
            raise TypeError(f"the arguments of total must be among {allowed}, got {unknown.pop()}")
        found = Traffic()
        for access, traffic in self.traffic.items():
            if all(getattr(access, name) == value for name, value in fields.items()):
                found += traffic
        return found

    def _rows(self) -> list[tuple[str, ...]]:
        """Return the table of loads and stores as rows of cells: a header, the arrays, the sums."""
        found = (self.loads, self.stores, self.load_bytes, self.store_bytes)
        rows: list[tuple[str, ...]] = [("array", "loads", "stores", "bytes loaded", "bytes stored")]
        rows += [(n, *(f"{each[n]:,}" for each in found)) for n in sorted(set().union(*found))]
        return [*rows, ("all", *(f"{each.total():,}" for each in found))]

    def __str__(self) -> str:
        """Return the table of loads and stores as text, in elements and bytes."""
        return "\n".join(columns(self._rows()))

    def __repr__(self) -> str:
        arrays = ", ".join(sorted({*self.loads, *self.stores})) or "none"
        bytes_ = self.load_bytes.total() + self.store_bytes.total()
        return (
            f"<Counts: {self.loads.total():,} elements loaded, {self.stores.total():,} stored, "
            f"{bytes_:,} bytes; arrays: {arrays}>"
        )

    def _repr_html_(self) -> str:
        """Return the table of loads and stores as HTML, for a notebook."""
        return html_table(self._rows())

    def __add__(self, other: Counts) -> Counts:
        return Counts().merge(self).merge(other)


@dataclass(slots=True)
class Tally:
    """The number of elements of one kernel parameter that were loaded and stored."""

    loads: int = 0
    stores: int = 0


def columns(rows: Sequence[tuple[str, ...]], left: Collection[int] = (0,)) -> list[str]:
    """Return the lines of a text table.

    Parameters
    ----------
    rows : sequence of tuple of str
        Cells of each row.
    left : collection of int, default (0,)
        Numbers of the columns that are aligned to the left. The other columns are aligned to the
        right.

    Returns
    -------
    list of str
        One line per row.

    Examples
    --------
    >>> columns([("array", "loads"), ("Q", "16")])
    ['array  loads', 'Q         16']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if n in left else cell.rjust(width)
            for n, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def html_table(rows: Sequence[tuple[str, ...]]) -> str:
    """Return an HTML table, for a notebook.

    Parameters
    ----------
    rows : sequence of tuple of str
        Cells of each row. The first row is the header, the first column has names.

    Returns
    -------
    str
        The ``table`` element.

    Examples
    --------
    >>> html_table([("array", "loads"), ("Q", "16")]).splitlines()[-2]
    '<tr><th>Q</th><td>16</td></tr>'
    """

    def line(cells: Sequence[str], kind: str) -> str:
        """Return a row of the table. `kind` is the tag of all cells but the first: "th" or "td"."""
        name, *others = (html.escape(cell) for cell in cells)
        row = "".join(f"<{kind}>{cell}</{kind}>" for cell in others)
        return f"<tr><th>{name}</th>{row}</tr>"

    head, *body = rows
    return "\n".join(["<table>", line(head, "th"), *(line(row, "td") for row in body), "</table>"])
