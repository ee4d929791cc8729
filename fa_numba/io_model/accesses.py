"""The record of a call's accesses: loads and stores of global memory by array."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from fa_numba.dtypes import DTYPES
from fa_numba.problem import Problem

ELEMENT_BYTES = DTYPES["float32"].bytes
# Arrays of the problem's own dtype
_OF_ONE_DTYPE = frozenset(("Q", "K", "V", "O", "S", "P", "dO", "dQ", "dK", "dV", "dP", "dS"))


@dataclass(frozen=True)
class Accesses:
    """Global-memory loads and stores of one call: elements by array (Q K V O L l m S P ...).

    An array goes by the name of the kernel's parameter; one that is never loaded (or stored) is
    not in `loads` (or `stores`). An atomic add is a load and a store. `dtype` is that of Q, K, V,
    O, S, P and their gradients, without those named in `sums`, which like every other array are
    float32, but for those named in `halves`, of 16 bits. `print` shows a table.
    """

    loads: dict[str, int]
    stores: dict[str, int]
    dtype: str = "float32"
    sums: tuple[str, ...] = ()
    halves: tuple[str, ...] = ()

    @property
    def total_loads(self) -> int:
        """Elements loaded."""
        return sum(self.loads.values())

    @property
    def total_stores(self) -> int:
        """Elements stored."""
        return sum(self.stores.values())

    @property
    def total(self) -> int:
        """Elements loaded and stored."""
        return self.total_loads + self.total_stores

    @property
    def bytes(self) -> int:
        """Bytes moved."""
        return self._bytes(self.loads) + self._bytes(self.stores)

    def _bytes(self, counts: dict[str, int]) -> int:
        bytes_of = dict.fromkeys(_OF_ONE_DTYPE - set(self.sums), DTYPES[self.dtype].bytes)
        bytes_of |= dict.fromkeys(self.halves, 2)
        return sum(n * bytes_of.get(name, ELEMENT_BYTES) for name, n in counts.items())

    def __str__(self) -> str:
        arrays = self.loads | self.stores
        rows = [(name, self.loads.get(name, 0), self.stores.get(name, 0)) for name in arrays]
        rows.append(("elements", self.total_loads, self.total_stores))
        rows.append(("bytes", self._bytes(self.loads), self._bytes(self.stores)))
        names = max(8, *(len(name) for name, *_ in rows))
        width = max(10, *(len(f"{n:,}") for _, *counts in rows for n in counts))
        lines = [f"{name:{names}} {r:>{width},} {w:>{width},}" for name, r, w in rows]
        return "\n".join([f"{'array':{names}} {'loads':>{width}} {'stores':>{width}}", *lines])


def count(problem: Problem, loads: dict[str, int], stores: dict[str, int]) -> Accesses:
    """The accesses of one kernel, without the arrays that it does not touch."""

    def touched(counts: dict[str, int]) -> dict[str, int]:
        return {name: n for name, n in counts.items() if n}

    return Accesses(touched(loads), touched(stores), problem.dtype)


def add_up(problem: Problem, parts: Iterable[Accesses]) -> Accesses:
    """The accesses of kernels that run one after the other; arrays of one name add up."""
    loads: Counter[str] = Counter()
    stores: Counter[str] = Counter()
    for part in parts:
        loads.update(part.loads)
        stores.update(part.stores)
    return Accesses(dict(loads), dict(stores), problem.dtype)


def sink_gradients(
    problem: Problem, rows: int, dlse: bool = False, has_d: bool = True
) -> list[Accesses]:
    """Of the kernel that makes the sinks' gradient over so many rows of all heads, which loads L
    and D of each; unless the pass `has_d` of the one before it, which makes D.
    """
    own = count(problem, {"L": rows, "D": rows}, {"dsinks": problem.heads_q})
    if has_d:
        return [own]
    d_v, of_lse = problem.d_v, dict.fromkeys(("dL", "L"), rows if dlse else 0)
    return [count(problem, {"O": rows * d_v, "dO": rows * d_v} | of_lse, {"D": rows}), own]


def one_head_dim(problem: Problem) -> int:
    """The head dimension of Q, K, V and O; a ValueError where V has another."""
    if problem.head_dim_v is not None:
        raise ValueError(
            f"head_dim_v is {problem.head_dim_v} with head_dim {problem.head_dim}: allowed here is "
            "one head dimension; two are counted of fa1, fa2 and standard's forward pass, none in "
            "planes"
        )
    return problem.head_dim


def check_dbias(problem: Problem, dbias: bool) -> None:
    """Raise ValueError where a bias's gradient is asked for without a bias."""
    if dbias and problem.bias is None:
        raise ValueError(f"dbias is {dbias!r}: allowed is False, as the problem has no bias")
