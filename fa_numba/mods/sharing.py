"""The list of statements of a function that is translated for kernels.

The package ``mods`` translates a user's function, such as a ``score_mod``, to Python text for
kernels. It writes the text statement by statement. This module stores the statements, and facts
about the value that each statement computes.

A value is called shared if it is equal for all scores of a tile, such as a captured number. Shared
factors are multiplied with each other first: once per tile instead of once per score.
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
    """Facts about the value of one name in the text.

    field        meaning
    shared       whether the value is equal for all scores of a tile
    of_score     whether the value depends on the score
    product      two names (f, x) if the value is f * x, where f is shared; else ("", "")
    inverse_of   a name if the value is 1 divided by this name; else ""
    rank         for finite scores: 0 if the value is finite, 1 if it may be infinite, 2 if it may
                 be NaN
    steady       whether the value is a slope that is finite for every finite score
    """

    shared: bool = False
    of_score: bool = False
    product: tuple[str, str] = ("", "")
    inverse_of: str = ""
    rank: int = 2
    steady: bool = False


class Statements:
    """The statements of a function's text that were written so far, and facts about their names.

    ``option`` is "score_mod", "mask_mod" or "score_mod_grad". ``captured`` maps names of captured
    values, and texts of numbers that are computed from them, to fields of a kernel's ``options``.
    """

    def __init__(self, option: str, captured: dict[str, str]) -> None:
        self.option, self.captured = option, captured
        self.lines: list[str] = []
        self.count = 0
        self.names = defaultdict(Name, score=Name(of_score=True, rank=0))
        self.names["scale"].shared = self.names["result_factor"].shared = True

    def field(self, name: str) -> str:
        """Return the field of ``options`` for a captured value. Add the field if it is new.

        ``name`` is the name of the captured value, or the text of a number that is computed from
        captured numbers.
        """
        return self.captured.setdefault(name, f"options.{self.option}_{len(self.captured)}")

    def put(self, text: str, **known: Any) -> str:
        """Write a statement that assigns ``text`` to a new name, and return the name.

        A text that contains only captured numbers and constants becomes a field of ``options``
        instead of a statement. ``known`` are further facts about the value (fields of ``Name``).
        """
        if OF_NUMBERS.fullmatch(text):
            name = self.field(text)
        else:
            self.count += 1
            name = f"t{self.count}"
            self.lines.append(f"{name} = {text}")
        known |= {"shared": self.is_shared(text), "of_score": self.depends(text)}
        self.names[name] = replace(self.names[name], **known)  # a field may have earlier facts
        return name

    @contextmanager
    def under(self, head: str) -> Iterator[None]:
        """A context manager that indents statements under the line ``head``, such as ``if t1:``.

        The indented statements are those that are written inside of the context.
        """
        outer, self.lines = self.lines, []
        yield
        # In place, because the caller may hold a reference to this list.
        outer += [head, *(f"    {line}" for line in self.lines or ["pass"])]
        self.lines = outer

    # --- facts about values ------------------------------------------------------------------

    def is_shared(self, text: str) -> bool:
        """Return whether a value is known to be equal for all scores of a tile.

        ``text`` is a name or an expression, such as ``options.score_mod_0 * t1``.
        """
        return "[" not in text and all(self.names[name].shared for name in READ.findall(text))

    def depends(self, text: str) -> bool:
        """Return whether the value of a name or an expression depends on the score."""
        return any(self.names[name].of_score for name in READ.findall(text))

    def rank(self, text: str) -> int:
        """Return the rank of a value: 0 finite, 1 maybe infinite, 2 maybe NaN (see ``Name``)."""
        return 0 if self.is_shared(text) else self.names[text].rank

    def steady_slope(self, slope: str | None) -> bool:
        """Return whether a slope (derivative) is finite for every finite score.

        ``slope`` is the name of the slope. None stands for a slope of 0.
        """
        return slope is None or self.is_shared(slope) or self.names[slope].steady

    # --- shared values -----------------------------------------------------------------------

    def divisor(self, text: str) -> str:
        """Return the text of a number by which kernels multiply, to divide by an integer.

        The number is the result of ``captures.divisor``. ``text`` is the name or the literal of the
        integer, which is equal for all scores of a tile. There are three cases:

        integer              when the number is computed
        a constant           when the function is translated
        a captured integer   once per call, before the launch
        any other integer    in the kernel, by a statement that this method writes

        In the first two cases the number is computed outside of the kernel, because a compiler
        would compute it again for each score.
        """
        if text.startswith("int32("):
            return f"uint32({divisor(int(text[6:-1]))})"
        if text in self.captured.values():
            return f"uint32({self.field(inverse_of(text))})"
        return self.put(f"divisor({text})")

    def multiplied(self, a: str, b: str, opened: str = "") -> str:
        """Write the statement that multiplies two values, and return the name of the product.

        Normally the statement computes ``a * b``. A faster form exists if one value is shared
        (equal for all scores of a tile), and the other value is itself a product with a shared
        factor. For example, let a be shared, and let b be f * x with a shared f. The product is
        then written as (f * a) * x, so that f * a is computed once per tile. If a is 1 / f, the
        result is x.

        In the example, b is a variable of the written function that holds the product f * x. The
        faster form is used only if ``opened`` is the name of this variable. By default, ``opened``
        is empty, and the statement computes ``a * b``.
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
