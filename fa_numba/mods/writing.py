"""Writes the text of a function that kernels call.

The function returns a value, its slope (the derivative with respect to the score), or both.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from .allowed import ALLOWED, PARAMETERS, Refused
from .captures import OF_NUMBERS
from .chain import ONE
from .needed import alone, needed, replaced
from .reading import Reader
from .source import Source

# Functions of math whose slope can be computed from their value. Their values are above -2, so that
# -2 can mark a hidden score (parts/mods.py).
_INNER = ("tanh", "exp", "expm1", "sqrt")
_LOG2E = f"float32({math.log2(math.e)!r})"


class Text(NamedTuple):
    """The texts of a function and of two helper functions. A text is empty if there is no function.

    field          function
    text           the main function (see ``mods.Mod``), which returns the value of the caller's
                   function, its slope (derivative) or both
    score_factor   takes (scale, options), and returns a factor. Kernels multiply the product of Q
                   and K by this factor first
    inner          takes (score), where the score is the product of Q and K times the factor. It
                   returns the number that ``text`` takes in place of the score

    For example, let the caller's function be ``2 * tanh(score / 50)``. ``score_factor`` returns the
    scale divided by 50, ``inner`` returns the tanh of its argument, and ``text`` computes the value
    and the slope from that tanh. ``inner`` is empty unless ``text`` returns both value and slope.
    """

    text: str = ""
    score_factor: str = ""
    inner: str = ""


def written(
    option: str,
    source: Source,
    kinds: dict[str, str],
    captured: dict[str, str],
    value: bool = True,
    slope: bool = False,
) -> tuple[Text, bool, bool]:
    """Write the caller's function, its derivative with respect to the score, or both as a pair.

    ``value`` says whether the written function returns the value of the caller's function.
    ``slope`` says whether it returns the derivative. ``kinds`` maps the names of captured values to
    their kinds (``source.kind_of_capture``). ``captured`` maps the names of captured values to
    fields of a kernel's ``options``. It also maps the texts of numbers that are computed from
    captured numbers to fields (``captures.made_of``). This function adds fields to ``captured``.

    Return three results: the text, whether kernels may call the function only with rows and columns
    of S, and whether the slope is finite for every finite score. Raises ValueError if the function
    contains something that kernels do not support.
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
    """Writes the head of the function and its ``return`` around the statements of a ``Reader``."""

    def function(self, value: bool, slope: bool) -> tuple[Text, bool]:
        """Write the function. Return its text, and whether its slope is finite for finite scores.

        ``value`` and ``slope`` say whether the written function returns the value, the slope (the
        derivative with respect to the score), or both.
        """
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
            results = [self.multiplied_result(self.real(result))] if value else []
            results += [result.slope or "float32(0.0)"] if slope else []
            found, steady = ", ".join(results), self.steady_slope(result.slope)
        *_, b, h, i, j = PARAMETERS[self.option]
        of_score = () if self.option == "mask_mod" else ("score_and_factor",)
        head = f"def mod({', '.join((*of_score, b, h, i, j, 'origin', 'options'))}):"
        factor, lines = self.split_factor([*self.lines, f"return {found}"])
        before = self.lines if factor != "scale" else []
        score_factor = needed("def mod(scale, options):", [*before, f"return {factor}"])[0]
        inner, lines = self.split_inner(lines) if value and slope else ("", lines)
        unpack = "score, result_factor = score_and_factor"
        text = needed(head, [unpack, *lines] if of_score else lines)[0]
        return Text(text, score_factor, inner), steady

    def split_factor(self, lines: list[str]) -> tuple[str, list[str]]:
        """Find a factor by which the function multiplies the score first, and remove the product.

        For example, let the function be ``tanh(score * c)`` with a captured number c. The product
        is removed, and the factor is the scale times c. Kernels multiply the product of Q and K by
        this factor before they call the function.

        ``lines`` are the statements of the function. Return the text of the factor, and the
        statements without the product.

        A product is removed if the function reads the score only once, in a product with a value
        that is equal for all scores of a tile. Otherwise nothing is removed, and the factor is the
        scale.
        """
        name, value = alone("score", lines)
        factor, of_score = self.names[name].product
        if of_score != "score":
            return "scale", lines
        return f"scale * {factor}", replaced("score", name, value, lines)

    def split_inner(self, lines: list[str]) -> tuple[str, list[str]]:
        """Find a function of math that is applied to the score first, such as tanh, and remove it.

        For example, let the function be ``2 * tanh(score)``. The tanh is removed, and kernels
        compute it before they call the function (``Text.inner``).

        ``lines`` are the statements of the function. Return the text of the function of math, and
        the statements without it.

        A function of math is removed if it is in ``_INNER``, and if the caller's function reads the
        score only once, as its argument. Otherwise nothing is removed, and the text is empty.
        """
        score, (name, value) = "score", alone("score", lines)
        if value == "score":  # ``split_factor`` has removed a factor
            score, (name, value) = name, alone(name, lines)
        for function in _INNER:
            if value == f"float32(math.{function}({score}))":
                inner = f"def mod(score):\n    return float32(math.{function}(score))\n"
                return inner, replaced("score", name, value, lines)
        return "", lines

    def multiplied_result(self, value: str) -> str:
        """Return the text of the product of the written function's result and ``result_factor``.

        ``value`` is the name of the result. ``result_factor`` is the second number of the argument
        ``score_and_factor``. Kernels pass log2(e) for it if they compute exponentials as powers of
        2, and otherwise 1.

        Let the result be f * x, where f is equal for all scores of a tile. The text is then
        (result_factor * f) * x, so that the first product is computed once per tile.
        """
        factor, rest = self.names[value].product
        if not factor:
            return f"result_factor * {value}"
        product = f"result_factor * {factor}"
        if OF_NUMBERS.fullmatch(factor):
            product = f"{self.put(f'{_LOG2E} * {factor}')} if result_factor != {ONE} else {factor}"
        return f"{self.put(product)} * {rest}"
