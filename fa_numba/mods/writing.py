"""The text of the function that kernels call: the value, its slope by the score, or both."""

from __future__ import annotations

import math
from typing import NamedTuple

from .allowed import ALLOWED, PARAMETERS, Refused
from .captures import OF_NUMBERS
from .chain import ONE
from .needed import alone, needed, replaced
from .reading import Reader
from .source import Source

# Functions of math whose slope is a function of the value, which is above -2.
_FIRST = ("tanh", "exp", "expm1", "sqrt")
_LOG2E = f"float32({math.log2(math.e)!r})"


class Text(NamedTuple):
    """The texts of one function; each is empty where there is no such function.

    ``text`` is the function itself. ``lead`` computes the factor of the score with which the
    function is called. ``first`` is applied to the product of that factor and the score before
    value and slope are computed from it.
    """

    text: str = ""
    lead: str = ""
    first: str = ""


def written(
    option: str,
    source: Source,
    kinds: dict[str, str],
    captured: dict[str, str],
    value: bool = True,
    slope: bool = False,
) -> tuple[Text, bool, bool]:
    """Write the function given as ``option``, its derivative by the score, or both, a pair.

    Return the text; whether the function may be called inside of the matrix alone; and whether its
    slope is finite for every finite score.

    ``kinds`` are the kinds of the values from outside, by name (``source.kind_of_capture``).
    ``captured`` are the fields of these values by name, and the fields of numbers that are computed
    from captured numbers by their text (``made_of``). Fields are added to ``captured``. Raises as
    ``mods.captured``.
    """
    writer = _Writer(option, source, kinds, captured)
    try:
        text, steady = writer.function(value, slope)
    except Refused as refused:
        line = f" in line {refused.line}" if refused.line != source.code.co_firstlineno else ""
        raise ValueError(
            f"{option} contains {refused}{line}, which a kernel does not support, in "
            f"{source.shown}. {ALLOWED}"
        ) from None
    return text, writer.inside, steady


class _Writer(Reader):
    """Writes one function around the statements that are read."""

    def function(self, value: bool, slope: bool) -> tuple[Text, bool]:
        """Return the text, and whether the slope is finite for every finite score."""
        result, steady = self.result("score" if slope else ""), False
        if self.option == "mask_mod":
            if result.kind == "float":
                raise ValueError(
                    f"mask_mod must return True or False, got a float, in {self.source.shown}; "
                    "return a comparison, such as i >= j"
                )
            found = self.truth(result)
        elif result.kind == "bool":
            raise ValueError(
                f"{self.option} must return a number, got True or False, in {self.source.shown}; "
                "return a conditional expression, such as score if i >= j else 0.0"
            )
        else:
            results = [self.in_unit(self.real(result))] if value else []
            results += [result.slope or "float32(0.0)"] if slope else []
            found, steady = ", ".join(results), self.steady_slope(result.slope)
        *_, b, h, i, j = PARAMETERS[self.option]
        of_score = () if self.option == "mask_mod" else ("given",)
        head = f"def mod({', '.join((*of_score, b, h, i, j, 'origin', 'options'))}):"
        factor, lines = self.led([*self.lines, f"return {found}"])
        before = self.lines if factor != "scale" else []
        lead = needed("def mod(scale, options):", [*before, f"return {factor}"])[0]
        first, lines = self.begun(lines) if value and slope else ("", lines)
        text = needed(head, ["score, unit = given", *lines] if of_score else lines)[0]
        return Text(text, lead, first), steady

    def led(self, lines: list[str]) -> tuple[str, list[str]]:
        """Return the factor of the score that the function is given, and what is left of ``lines``.

        The factor is the scale. If the function reads the score once, times a value that all scores
        share, the factor is the scale times that value.
        """
        name, value = alone("score", lines)
        factor, of_score = self.names[name].product
        if of_score != "score":
            return "scale", lines
        return f"scale * {factor}", replaced("score", name, value, lines)

    def begun(self, lines: list[str]) -> tuple[str, list[str]]:
        """Return the text of what is done first with the given score, and what is left of
        ``lines``. It is a function of math, if the function reads the score once, as its argument.
        """
        score, (name, value) = "score", alone("score", lines)
        if value == "score":  # by a factor
            score, (name, value) = name, alone(name, lines)
        for function in _FIRST:
            if value == f"float32(math.{function}({score}))":
                first = f"def mod(score):\n    return float32(math.{function}(score))\n"
                return first, replaced("score", name, value, lines)
        return "", lines

    def in_unit(self, value: str) -> str:
        """Return the value in the unit in which the kernel wants it."""
        factor, rest = self.names[value].product
        if not factor:
            return f"unit * {value}"
        whole = f"unit * {factor}"
        if OF_NUMBERS.fullmatch(factor):
            whole = f"{self.put(f'{_LOG2E} * {factor}')} if unit != {ONE} else {factor}"
        return f"{self.put(whole)} * {rest}"
