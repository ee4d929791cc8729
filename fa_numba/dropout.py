"""Which elements of P dropout keeps: a function of seed, offset and the element's place alone."""

from __future__ import annotations

import numpy as np

from .checks import as_size
from .integers import ceil_div
from .masks import APART, DRAW_COLUMNS, DRAW_ROWS, make_philox
from .options import as_word, drop_threshold
from .problem import Problem

MAX_HEADS = 2**16  # batch entries, and query heads: both are in one word of the counter

_ROWS = 512  # rows whose random words are held at a time
_philox = make_philox(np.uint32, np.uint64)


def kept(
    entry: int, head: int, rows: range, columns: int, *, dropout_p: float, seed: int, offset: int
) -> np.ndarray:
    """What stays of these rows and the first `columns` columns: bool (len(rows), columns)."""
    groups = ceil_div(columns, APART * DRAW_COLUMNS)
    counters = np.arange(groups * APART, dtype=np.uint32)[None, :]
    each = np.arange(rows.start, rows.stop, rows.step, dtype=np.uint32)[:, None]
    draws = each // (APART * DRAW_ROWS) * APART + each % APART
    place, low, high = (np.uint32(n) for n in ((entry << 16) + head, seed % 2**32, seed >> 32))
    with np.errstate(over="ignore"):  # the key's sums wrap
        words = _philox(counters, draws.astype(np.uint32), place, np.uint32(offset), low, high)
    second = each // APART % DRAW_ROWS == 1
    of_row = [np.where(second, words[n + 2], words[n]) for n in range(2)]
    halves = [half for word in of_row for half in (word & 0xFFFF, word >> 16)]
    parts = [half.reshape(len(rows), groups, APART) for half in halves]
    found = np.stack(parts, axis=2).reshape(len(rows), groups * APART * DRAW_COLUMNS)
    return found[:, :columns] >= drop_threshold(dropout_p)


def dropout_mask(
    batch: int, heads: int, seqlen_q: int, seqlen_k: int, *, dropout_p: float, seed: int = 0,
    offset: int = 0,
) -> np.ndarray:  # fmt: skip
    """The elements of P that attention with this dropout keeps: bool (B, Hq, Nq, Nk), True = kept.

    An element is kept when its 16 bits of Philox4x32-7 are at least dropout_p 2^16, with dropout_p
    rounded to a multiple of 2^-16. The bits depend on seed, offset, batch entry, query head, row
    and column (see masks.py), not on the sizes here: a smaller mask is a part of a larger one. Of
    packed sequences the batch entry is the sequence's number, and rows and columns count from its
    start.

    Raises TypeError or ValueError with the argument's name, its value and what is allowed: at most
    65536 batch entries and heads, dropout_p from 0 to below 1, seed below 2^64, offset below 2^32.

    >>> dropout_mask(1, 1, 2, 8, dropout_p=0.5, seed=7).astype(int)
    array([[[[0, 0, 0, 0, 1, 1, 1, 0],
             [1, 0, 1, 1, 1, 1, 1, 1]]]])
    """
    sizes = {"batch": batch, "heads": heads, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
    B, H, Nq, Nk = (as_size(name, size) for name, size in sizes.items())
    for name, size in (("batch", B), ("heads", H)):
        if size > MAX_HEADS:
            raise ValueError(f"{name} is {size}: allowed with dropout is at most {MAX_HEADS}")
    dropout_p = Problem(B, H, H, Nq, Nk, 1, dropout_p=dropout_p).dropout_p
    words = {"seed": as_word("seed", seed, 64), "offset": as_word("offset", offset, 32)}
    mask = np.empty((B, H, Nq, Nk), bool)
    for b, h in np.ndindex(B, H):
        for first in range(0, Nq, _ROWS):
            rows = range(first, min(first + _ROWS, Nq))
            mask[b, h, first : rows.stop] = kept(b, h, rows, Nk, dropout_p=dropout_p, **words)
    return mask
