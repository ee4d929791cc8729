"""Kernels to compile before an experiment runs on a GPU, from rows of earlier recordings."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import fa_numba
from fa_numba import Tiles
from fa_numba.problem import Problem

from ..record.store import EMULATOR, MODEL, Row
from .series import LABELS, backward_options, plan

# The passes of a call, by the column `pass` of a row.
_PASSES = {"fwd": ("fwd",), "bwd": ("bwd",), "fwd+bwd": ("fwd", "bwd")}


def plans(rows: Iterable[Row]) -> Iterator[fa_numba.Plan]:
    """Yield the plan of each measured call of our series in the rows, for the current device.

    Calls that cannot be planned for this device are left out. Calls with options for which rows
    have no column, such as masks, are left out too. Their kernels are compiled when the experiment
    first runs such a call.

    Parameters
    ----------
    rows : iterable of Row
        Rows of a recording, from this GPU or from another GPU.

    Yields
    ------
    Plan
        A plan. No plan is yielded twice.
    """
    seen = set()
    for row in rows:
        call: tuple[Any, ...] = (row.series, row.pass_, row.dtype, row.batch, row.heads_q)
        call += (row.heads_k, row.seqlen_q, row.seqlen_k, row.head_dim, row.causal, row.Br, row.Bc)
        if row.machine in (EMULATOR, MODEL) or row.series not in LABELS or call in seen:
            continue
        seen.add(call)
        for passes in _PASSES.get(row.pass_ or "", ()):
            # A row may lack a size, or name a series of a peer, or tiles that do not fit here.
            with contextlib.suppress(KeyError, TypeError, ValueError):
                yield _plan(row, passes)


def _plan(row: Row, passes: str) -> fa_numba.Plan:
    names = ("batch", "heads_q", "heads_k", "seqlen_q", "seqlen_k", "head_dim", "dtype", "causal")
    problem = Problem(**{name: getattr(row, name) for name in names})
    options: dict[str, Any] = {} if row.Br is None else {"tiles": Tiles(row.Br, row.Bc or 0)}
    if passes == "bwd":
        options |= backward_options(row.series)
    return plan(row.series, problem, passes=passes, **options)
