"""Rules for values that grow like an exponential function and overflow.

In float32, exp(89) is infinite. The sigmoid 1 / (1 + exp(89)) is then 0, which is right. But the
usual rule for the slope of the sigmoid computes 0 * inf / inf, which is NaN.

A value that grows therefore has a ``Growth`` with the fields ``scale``, ``slope`` and ``log``. The
derivative of the value is the product of ``scale``, which may overflow, and ``slope``, which is
moderate. ``log`` is the logarithm of the value. Let a and b be values that grow, and let b' be the
derivative of b. The table shows the operations with special rules. "scale", "slope" and "log" in
the table are the fields of the ``Growth`` of b:

    operation   usual rule             rule where values are infinite
    b' / b      slope * (scale / b)    slope, if b is infinite
    log(b)      log(b)                 the field "log", if b is infinite
    a / b       a / b                  exp(log(a) - log(b)), if a and b are infinite

All other operations follow the usual rules.
"""

from __future__ import annotations

import math

from .chain import ONE, Chained
from .kinds import Growth, Term

INFINITE = "float32(math.inf)"
# Logarithms of math: their slope is this number times the slope of the natural logarithm.
LOGARITHMS = {"log": 1.0, "log1p": 1.0, "log2": 1 / math.log(2), "log10": 1 / math.log(10)}
# For each function of math that grows: the scale, the slope divided by the scale and by the slope
# of {x} (empty for 1), and the logarithm. {x} is the argument and {y} the value of the function.
_OF_MATH = {
    "exp": ("{y}", "", "{x}"),
    "expm1": ("{y} + float32(1.0)", "", "{x}"),
    "cosh": (
        "{y}",
        "float32(math.tanh({x}))",
        f"float32(abs({{x}})) - float32({math.log(2)!r})",
    ),
}


class Growing(Chained):
    """Writes the statements for values that grow like an exponential function."""

    def growth_of_math(self, name: str, x: str, y: str, slope: str | None) -> Growth | None:
        """Return the ``Growth`` of y = math.name(x), or None if y has none.

        x and y are names in the text of the function. ``slope`` is the name of the derivative of x,
        or None if the derivative is 0. The result is None in two cases:

        - The function of math does not grow exponentially.
        - The derivative of x is 0, and x does not depend on the score.
        """
        if name not in _OF_MATH or not (slope or self.depends(x)):
            return None
        scale, factor, log = (text.format(x=x, y=y) for text in _OF_MATH[name])
        if factor:
            slope = self.times(slope, self.put(factor))
        scale, log = (text if text in (x, y) else self.put(text) for text in (scale, log))
        return Growth(scale, slope, log)

    def relative(self, term: Term) -> str | None:
        """Write the statements of b' / b, where b is a value that grows and b' is its derivative.

        ``term`` is the value b. Return the name of the quotient, or None if it is 0.
        """
        assert term.growth is not None
        scale, slope, _ = term.growth
        if slope is None or scale == term.text:
            return slope
        return self.chained(slope, self.ratio(scale, term.text, ONE))

    def ratio(self, scale: str, text: str, limit: str) -> str:
        """Write the statements of ``scale / text``, which is ``limit`` where ``text`` is infinite.

        Return the name of the result. The arguments are names in the text of the function.
        """
        made = self.put(f"{scale} / {text}")
        return self.put(f"{limit} if float32(abs({text})) == {INFINITE} else {made}")

    def logarithm(self, name: str, y: str, term: Term) -> str:
        """Write the statements that correct the logarithm of a value where the value overflows.

        For example, the logarithm of exp(200) is 200, but exp(200) is infinite in float32. The
        statements select the logarithm that ``term.growth`` contains if the value is infinite, and
        y otherwise.

        argument   meaning
        name       function of math, such as "log2"
        y          name of the result of this function of math
        term       the value whose logarithm is computed

        Return the name of the corrected logarithm. Return y if ``term.growth`` contains no
        logarithm.
        """
        if term.growth is None or not term.growth.log:
            return y
        log, factor = term.growth.log, LOGARITHMS[name]
        if factor != 1.0:
            log = self.put(f"float32({factor!r}) * {log}")
        return self.put(f"{log} if {term.text} == {INFINITE} else {y}")

    def logarithm_slope(self, name: str, term: Term) -> str | None:
        """Write the statements of the derivative of a logarithm of a value that grows.

        Return the name of the derivative. ``name`` is a function of math, such as "log2". ``term``
        is the value whose logarithm is computed: the argument of log, log2 or log10, and 1 plus the
        argument of log1p.
        """
        slope, factor = self.relative(term), LOGARITHMS[name]
        return slope if factor == 1.0 else self.times(slope, f"float32({factor!r})")

    def fixed(self, term: Term) -> bool:
        """Return whether the slope of a value is 0 and the value does not depend on the score."""
        return term.slope is None and not self.depends(term.text)

    def growth_of_sum(self, a: Term, b: Term, sign: str) -> Growth | None:
        """Return the ``Growth`` of a + b, or of a - b if ``sign`` is "-".

        One of the values must grow: it depends on exp, and can overflow. The other value must not
        depend on the score or on captured arrays. Return None in all other cases.
        """
        if a.growth is not None and self.fixed(b):
            return a.growth
        if b.growth is not None and self.fixed(a):
            scale, slope, log = b.growth
            return b.growth if sign == "+" else Growth(self.put(f"-{scale}"), slope)
        return None

    def growth_of_product(self, a: Term, b: Term, value: str) -> Growth | None:
        """Return the ``Growth`` of a * b. ``value`` is the name of the product.

        One of the values must grow, and the other value must be fixed (``fixed``). Return None in
        all other cases.
        """
        if b.growth is not None and self.fixed(a):
            a, b = b, a
        if a.growth is None or not self.fixed(b):
            return None
        scale, slope, log = a.growth
        scale = value if scale == a.text else self.put(f"{scale} * {b.text}")
        if log:
            log = self.put(f"{log} + float32(math.log(float32(abs({b.text}))))")
        return Growth(scale, slope, log)

    def of_infinities(self, value: str, a: Term, b: Term) -> str:
        """Write the statements that correct the quotient a / b where a and b are both infinite.

        Let a = exp(200) and b = exp(199). Both are infinite in float32, and the division inf / inf
        gives NaN. The correct quotient is exp(log(a) - log(b)), with the sign of a * b. The
        logarithms, 200 and 199, are known from ``a.growth`` and ``b.growth``. The statements
        compute this quotient, and select it where a and b are infinite. Everywhere else they select
        the result of the division.

        ``value`` is the name of the variable that contains the result of the division. Return the
        name of the variable that contains the corrected quotient. Return ``value`` if one of the
        logarithms is not known.
        """
        assert a.growth is not None and b.growth is not None
        if not (a.growth.log and b.growth.log):
            return value
        size = self.put(f"float32(math.exp({a.growth.log} - {b.growth.log}))")
        made = self.put(f"float32(math.copysign({size}, {a.text} * {b.text}))")
        infinite = self.put(f"float32(min(abs({a.text}), abs({b.text})))")
        return self.put(f"{made} if {infinite} == {INFINITE} else {value}")
