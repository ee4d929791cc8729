"""What a plan is asked for: all that it depends on, in one value."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from fa_numba.dtypes import DTYPES, DType
from fa_numba.options import PLAIN, Features
from fa_numba.problem import Problem
from fa_numba.tiling import Tiles


@dataclass(frozen=True)
class Request:
    """A pass of an algorithm on a unit, checked.

    ``tiles`` are the caller's, or None. ``aligned``: every row of the inputs and outputs starts at
    a 16-byte address and is contiguous. ``shared_limit`` (bytes of shared memory a block) and
    ``capability`` are the device's. The rest is as the public functions take it, and
    ``multiprocessors`` is how many there are to keep busy, 0 on the emulator.
    """

    algorithm: str
    passes: str
    unit: str
    problem: Problem
    tiles: Tiles | None
    aligned: bool
    shared_limit: int
    capability: tuple[int, int]
    query_splits: int = 1
    return_lse: bool = False
    warp_partition: str = "rows"
    ablated: tuple[str, ...] = ()
    deterministic: bool = False
    return_dbias: bool = False
    kv_splits: int | str = 1
    multiprocessors: int = 0
    group_splits: int | str = 1

    @functools.cached_property
    def features(self) -> Features:
        """The options that its kernels are compiled for."""
        splits = self.kv_splits not in ("auto", 1)
        return Features.of(self.problem, dbias=self.return_dbias, splits=splits)

    @property
    def lengths(self) -> Features:
        """The options of a kernel that only copies and multiplies: which rows and columns there
        are.
        """
        own = self.features
        return replace(PLAIN, q_lens=own.q_lens, kv_lens=own.kv_lens, packed=own.packed)

    @property
    def lengths_of_rows(self) -> Features:
        """The same of a kernel that takes each row by itself: those of packed sequences are one
        long one's.
        """
        return replace(self.lengths, packed=False)

    @property
    def dtype(self) -> DType:
        return DTYPES[self.problem.dtype]

    @property
    def row_shape(self) -> tuple[int, int, int]:
        """Shape of one value for each row of Q, as kernels take it: (batch, heads, rows)."""
        shape = self.problem.lse_shape
        return (1, *shape) if self.problem.packed else shape  # type: ignore[return-value]

    @property
    def q_shape(self) -> tuple[int, int, int, int]:
        """Shape of Q as kernels take it: (batch, heads, rows, d)."""
        return (*self.row_shape, self.problem.head_dim)

    @property
    def k_shape(self) -> tuple[int, int, int, int]:
        """Shape of K as kernels take it: (batch, heads, rows, d)."""
        p = self.problem
        rows = (1, p.heads_k, p.k_shape[0]) if p.packed else (p.batch, p.heads_k, p.seqlen_k)
        return (*rows, p.head_dim)
