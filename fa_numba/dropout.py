"""The dropout mask: which elements of P are kept, computed from seed, offset and indices."""

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
    """Return which elements of P dropout keeps, for some rows of one head.

    ``entry`` and ``head`` are the numbers of the batch entry and of the query head. ``rows`` are
    the rows, and ``columns`` is the number of columns from column 0 on. The result is a bool array
    of shape (len(rows), columns), True for a kept element.
    """
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
    """Return the dropout mask: which elements of P are kept.

    Attention with the same ``dropout_p``, ``seed`` and ``offset`` keeps these elements, in every
    algorithm, on every unit and in both passes.

    Parameters
    ----------
    batch : int
        Number of batch entries, or of packed sequences, 1 to 65536.
    heads : int
        Number of query heads, 1 to 65536.
    seqlen_q : int
        Number of rows of q.
    seqlen_k : int
        Number of rows of k.
    dropout_p : float
        Probability that an element is dropped, from 0 to below 1. It is rounded to a multiple of
        2**-16.
    seed : int, default 0
        Seed, from 0 to 2**64 - 1.
    offset : int, default 0
        Second part of the seed, from 0 to 2**32 - 1.

    Returns
    -------
    numpy.ndarray of bool
        Array of shape (batch, heads, seqlen_q, seqlen_k). True means that the element is kept.

    Raises
    ------
    TypeError
        If a size, ``seed`` or ``offset`` is no integer, or if ``dropout_p`` is no real number.
    ValueError
        If a value is out of range.

    See Also
    --------
    attention : Takes ``dropout_p``, ``seed`` and ``offset``.

    Notes
    -----
    An element is kept if its 16 random bits are at least ``dropout_p * 2**16``. The bits come from
    Philox4x32-7. They depend on the seed, the offset, the batch entry, the query head, the row and
    the column, but not on the sizes. A mask of smaller sizes is therefore a part of a larger mask.
    For packed sequences, the batch entry is the number of the sequence, and rows and columns are
    counted from the start of the sequence.

    Examples
    --------
    >>> import fa_numba
    >>> fa_numba.dropout_mask(1, 1, 2, 8, dropout_p=0.5, seed=7).astype(int)
    array([[[[0, 0, 0, 0, 1, 1, 1, 0],
             [1, 0, 1, 1, 1, 1, 1, 1]]]])
    """
    sizes = {"batch": batch, "heads": heads, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
    B, H, Nq, Nk = (as_size(name, size) for name, size in sizes.items())
    for name, size in (("batch", B), ("heads", H)):
        if size > MAX_HEADS:
            raise ValueError(f"{name} must be at most {MAX_HEADS} with dropout, got {size}")
    dropout_p = Problem(B, H, H, Nq, Nk, 1, dropout_p=dropout_p).dropout_p
    words = {"seed": as_word("seed", seed, 64), "offset": as_word("offset", offset, 32)}
    mask = np.empty((B, H, Nq, Nk), bool)
    for b, h in np.ndindex(B, H):
        for first in range(0, Nq, _ROWS):
            rows = range(first, min(first + _ROWS, Nq))
            mask[b, h, first : rows.stop] = kept(b, h, rows, Nk, dropout_p=dropout_p, **words)
    return mask
