"""Updates of array elements one after the other, as atomic operations make them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Update = Callable[..., Any]  # takes old values and operands; returns new values of the same dtype


def in_turn(
    memory: np.ndarray, at: np.ndarray, update: Update, operands: list[np.ndarray], ordered: bool
) -> np.ndarray:
    """Update elements of an array one after the other; return their old values.

    Parameters
    ----------
    memory : ndarray
        The array, of one axis.
    at : ndarray of int
        Elements, which may repeat.
    update : callable
        Takes old values and operands, and returns new values.
    operands : list of ndarray
        The operands, one per element of `at`.
    ordered : bool
        Whether the old values are needed. If False, and if elements repeat, the returned values may
        be wrong.

    Returns
    -------
    ndarray
        The old values.
    """
    if len(set(at.tolist())) == at.size:
        old = memory[at]
        memory[at] = update(old, *operands)
        return old
    if not ordered and isinstance(update, np.ufunc):
        update.at(memory, at, *operands)
        return memory[at]
    old = np.empty(at.size, memory.dtype)
    for k, p in enumerate(at.tolist()):
        old[k] = memory[p]
        memory[p] = update(old[k], *(each[k] for each in operands))
    return old
