"""The statements that are written, and what is known of each value: who shares it, how large it is.

A value is shared if all scores of a tile have the same one, such as a captured number. Factors that
are shared are multiplied with each other first, once per tile instead of once per score.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from .captures import OF_NUMBERS, divisor, inverse_of
from .needed import READ


@dataclass
class Name:
    """What is known of a name in the text.

    ``shared``: all scores of a tile have this value. ``of_score``: the value depends on the score.
    ``product``: the value is this shared factor times this other value. ``inverse_of``: the value
    is 1 divided by this name. The next two are about finite scores. A value of ``rank`` 0 is
    finite, a value of rank 1 may be infinite, and any other value may be NaN. A slope is finite if
    it is ``steady``.
    """

    shared: bool = False
    of_score: bool = False
    product: tuple[str, str] = ("", "")
    inverse_of: str = ""
    rank: int = 2
    steady: bool = False


class Statements:
    """The statements of a function's text so far, and what is known of their names."""

    def __init__(self, option: str, captured: dict[str, str]) -> None:
        self.option, self.captured = option, captured
        self.lines: list[str] = []
        self.count = 0
        self.names = defaultdict(Name, score=Name(of_score=True, rank=0))
        self.names["scale"].shared = self.names["unit"].shared = True

    def field(self, name: str) -> str:
        """Return the field of a captured value, or of a number that is made of captured numbers."""
        return self.captured.setdefault(name, f"options.{self.option}_{len(self.captured)}")

    def put(self, text: str, **known: Any) -> str:
        """Assign ``text`` to a new name and return the name. ``known`` are fields of ``Name``."""
        if OF_NUMBERS.fullmatch(text):
            name = self.field(text)
        else:
            self.count += 1
            name = f"t{self.count}"
            self.lines.append(f"{name} = {text}")
        known |= {"shared": self.is_shared(text), "of_score": self.depends(text)}
        self.names[name] = replace(self.names[name], **known)  # a field's is maybe known already
        return name

    @contextmanager
    def under(self, head: str) -> Iterator[None]:
        """Indent the statements that are written in this context, under ``head``."""
        outer, self.lines = self.lines, []
        yield
        # In place: a line that waits for what is written within goes to the same list.
        outer += [head, *(f"    {line}" for line in self.lines or ["pass"])]
        self.lines = outer

    # --- what is known -----------------------------------------------------------------------

    def is_shared(self, text: str) -> bool:
        """Return whether all scores of a tile have this value, as numbers and what they make."""
        return "[" not in text and all(self.names[name].shared for name in READ.findall(text))

    def depends(self, text: str) -> bool:
        """Return whether this value depends on the score."""
        return any(self.names[name].of_score for name in READ.findall(text))

    def rank(self, text: str) -> int:
        """Return the ``rank`` of a value, see ``Name``."""
        return 0 if self.is_shared(text) else self.names[text].rank

    def steady_slope(self, slope: str | None) -> bool:
        """Return whether the slope is finite for every finite score."""
        return slope is None or self.is_shared(slope) or self.names[slope].steady

    # --- with what is shared -----------------------------------------------------------------

    def divisor(self, text: str) -> str:
        """Return the factor that divides by a shared integer.

        The factor of a captured number or of a constant is computed before the call, because
        compilers would compute it for each score.
        """
        if text.startswith("int32("):
            return f"uint32({divisor(int(text[6:-1]))})"
        if text in self.captured.values():
            return f"uint32({self.field(inverse_of(text))})"
        return self.put(f"divisor({text})")

    def multiplied(self, a: str, b: str, opened: str = "") -> str:
        """Return a name for the product of two values.

        If one value is a shared factor, and the other value is ``opened``, a product with a shared
        factor itself, the two shared factors are multiplied first.
        """
        for factor, rest in ((a, b), (b, a)):
            if self.is_shared(factor) and not self.is_shared(rest):
                rank, (beside, inner) = 2 if self.rank(rest) else 1, self.names[rest].product
                if beside and rest == opened:
                    if factor == self.names[beside].inverse_of:
                        return inner
                    factor, rest = self.put(f"{beside} * {factor}"), inner
                return self.put(f"{factor} * {rest}", product=(factor, rest), rank=rank)
        return self.put(f"{a} * {b}")
