"""Replacement of functions of other packages for the duration of a context."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

# (owner, name, function that returns the replacement for the replaced function)
Replacement = tuple[Any, str, Callable[[Any], Any]]


@contextlib.contextmanager
def replaced(replacements: Iterable[Replacement]) -> Iterator[None]:
    """Replace attributes inside the context.

    For each replacement ``(owner, name, make)``, the attribute ``owner.name`` becomes
    ``make(owner.name)``, or ``make(None)`` if there is no such attribute. The end of the context
    restores the attribute. An attribute that ``owner`` inherited or lacked before is deleted.
    """
    with contextlib.ExitStack() as stack:
        for owner, name, make in replacements:
            own = name in vars(owner)
            before = getattr(owner, name, None)
            setattr(owner, name, make(before))
            if own:
                stack.callback(setattr, owner, name, before)
            else:
                stack.callback(delattr, owner, name)
        yield
