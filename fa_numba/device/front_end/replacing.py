"""Something else in the place of a function of Numba's, for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def replaced(where: Any, name: str, way: Callable) -> Iterator[None]:
    """``way`` of what ``where`` has under ``name``, or of None, stands there inside."""
    had = name in vars(where)
    before = getattr(where, name, None)
    setattr(where, name, way(before))
    try:
        yield
    finally:
        if had:
            setattr(where, name, before)
        else:
            delattr(where, name)
