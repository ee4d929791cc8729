"""`Accesses`: the loads and stores of a call, by array. Functions that add up accesses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from fa_numba.dtypes import DTYPES
from fa_numba.problem import Problem

ELEMENT_BYTES = DTYPES["float32"].bytes
# Arrays that have the problem's dtype. Other arrays are float32.
_OF_ONE_DTYPE = frozenset(("Q", "K", "V", "VT", "O", "S", "P", "dO", "dQ", "dK", "dV", "dP", "dS"))


@dataclass(frozen=True)
class Accesses:
    """Global-memory loads and stores of one call, in elements by array.

    An array has the name of the kernel's parameter (Q, K, V, O, L, l, m, S, P ...). An array that
    is never loaded (or stored) is not in `loads` (or `stores`). An atomic add is a load and a
    store. ``print(accesses)`` shows a table.

    Parameters
    ----------
    loads, stores : dict of str to int
        Elements loaded and stored, by array.
    dtype : str, default "float32"
        Dtype of Q, K, V, O, S, P and their gradients. All other arrays are float32.
    sums : tuple of str, default ()
        Names of arrays among Q, K, V, O, S, P and their gradients that are float32 although `dtype`
        is another dtype.
    halves : tuple of str, default ()
        Names of arrays whose elements have 2 bytes for every `dtype`.

    Examples
    --------
    >>> found = Accesses({"Q": 100, "l": 10}, {"O": 100}, dtype="float16")
    >>> found.total_loads, found.total, found.bytes
    (110, 210, 440)
    """

    loads: dict[str, int]
    stores: dict[str, int]
    dtype: str = "float32"
    sums: tuple[str, ...] = ()
    halves: tuple[str, ...] = ()

    @property
    def total_loads(self) -> int:
        """Return the number of elements loaded."""
        return sum(self.loads.values())

    @property
    def total_stores(self) -> int:
        """Return the number of elements stored."""
        return sum(self.stores.values())

    @property
    def total(self) -> int:
        """Return the number of elements loaded and stored."""
        return self.total_loads + self.total_stores

    @property
    def bytes(self) -> int:
        """Return the number of bytes loaded and stored."""
        return self._bytes(self.loads) + self._bytes(self.stores)

    def _bytes(self, counts: dict[str, int]) -> int:
        """Return the number of bytes of all elements. `counts` maps arrays to elements."""
        bytes_of = dict.fromkeys(_OF_ONE_DTYPE - set(self.sums), DTYPES[self.dtype].bytes)
        bytes_of |= dict.fromkeys(self.halves, 2)
        return sum(n * bytes_of.get(name, ELEMENT_BYTES) for name, n in counts.items())

    def __str__(self) -> str:
        """Return a table of loads and stores as text, by array, with sums in elements and bytes."""
        arrays = self.loads | self.stores
        rows = [(name, self.loads.get(name, 0), self.stores.get(name, 0)) for name in arrays]
        rows.append(("elements", self.total_loads, self.total_stores))
        rows.append(("bytes", self._bytes(self.loads), self._bytes(self.stores)))
        names = max(8, *(len(name) for name, *_ in rows))
        width = max(10, *(len(f"{n:,}") for _, *counts in rows for n in counts))
        lines = [f"{name:{names}} {r:>{width},} {w:>{width},}" for name, r, w in rows]
        return "\n".join([f"{'array':{names}} {'loads':>{width}} {'stores':>{width}}", *lines])


def count(problem: Problem, loads: dict[str, int], stores: dict[str, int]) -> Accesses:
    """Return the accesses of one kernel, without arrays whose count is 0.

    Parameters
    ----------
    problem : Problem
        The problem; its dtype is used.
    loads, stores : dict of str to int
        Elements by array.

    Returns
    -------
    Accesses
        The accesses.
    """

    def touched(counts: dict[str, int]) -> dict[str, int]:
        """Return `counts` without the arrays whose count is 0."""
        return {name: n for name, n in counts.items() if n}

    return Accesses(touched(loads), touched(stores), problem.dtype)


def add_up(problem: Problem, parts: Iterable[Accesses]) -> Accesses:
    """Return the accesses of several kernels together. Arrays with the same name are added up.

    Parameters
    ----------
    problem : Problem
        The problem; its dtype is used.
    parts : iterable of Accesses
        The accesses of each kernel.

    Returns
    -------
    Accesses
        The sums.
    """
    loads: Counter[str] = Counter()
    stores: Counter[str] = Counter()
    for part in parts:
        loads.update(part.loads)
        stores.update(part.stores)
    return Accesses(dict(loads), dict(stores), problem.dtype)


def sink_gradients(
    problem: Problem, rows: int, dlse: bool = False, has_d: bool = True
) -> list[Accesses]:
    """Return the accesses of the kernels that compute the gradient of `sinks`.

    The kernel of the gradient loads L and D of every row, and stores one number per query head. If
    no earlier kernel has computed D, another kernel runs first. It loads O and dO, and stores D.

    Parameters
    ----------
    problem : Problem
        The problem.
    rows : int
        Valid rows of Q over all batch entries and query heads.
    dlse : bool, default False
        Whether there is a gradient of L: the kernel that computes D then loads dL and L too.
    has_d : bool, default True
        Whether an earlier kernel has computed D.

    Returns
    -------
    list of Accesses
        One entry per kernel.
    """
    own = count(problem, {"L": rows, "D": rows}, {"dsinks": problem.heads_q})
    if has_d:
        return [own]
    d_v, of_lse = problem.d_v, dict.fromkeys(("dL", "L"), rows if dlse else 0)
    return [count(problem, {"O": rows * d_v, "dO": rows * d_v} | of_lse, {"D": rows}), own]


def one_head_dim(problem: Problem) -> int:
    """Return the head dimension that Q, K, V and O share.

    Parameters
    ----------
    problem : Problem
        The problem.

    Returns
    -------
    int
        The head dimension.

    Raises
    ------
    ValueError
        If V has another head dimension (`head_dim_v`).
    """
    if problem.head_dim_v is not None:
        raise ValueError(
            f"head_dim_v must be None (equal to head_dim, {problem.head_dim}), got "
            f"{problem.head_dim_v}, because this formula is for one head dimension. With precision "
            "'ieee', formulas for two head dimensions exist for algorithms 'fa1' and 'fa2' and for "
            "the forward pass of 'standard'"
        )
    return problem.head_dim


def check_dbias(problem: Problem, dbias: bool) -> None:
    """Raise ValueError if the gradient of a bias is to be computed and the problem has no bias.

    Parameters
    ----------
    problem : Problem
        The problem.
    dbias : bool
        Whether the gradient of the bias is to be computed.
    """
    if dbias and problem.bias is None:
        raise ValueError(f"dbias must be False, because the problem has no bias, got {dbias!r}")
