"""Sums and products of slopes, by the chain rule.

A slope is the derivative of a value with respect to the score, or with respect to one element of a
captured array. The methods write statements of a device function. A slope is a variable of this
function: the methods take the names of variables, and return the name of the variable that holds
the result. None stands for a slope of 0, for which no statement is written.
"""

from __future__ import annotations

from .kinds import Conversions

ONE = "float32(1.0)"
ZERO = "float32(0.0)"


class Chained(Conversions):
    """Writes the statements that add and multiply slopes (derivatives) in a function's text."""

    def times(self, slope: str | None, factor: str, finite: bool = False) -> str | None:
        """Write the statement that multiplies a slope (derivative) by a factor.

        Return the name of the product, or None if the slope is 0. ``slope`` and ``factor`` are
        names in the text.

        ``finite`` says whether the factor is known to be finite for every finite score. A shared
        factor, which is equal for all scores of a tile, always counts as finite. If the slope is
        finite for every finite score too, the product is marked as finite (``Name.steady``).
        """
        if slope is None:
            return None
        finite = self.steady_slope(slope) and (finite or self.is_shared(factor))
        made = factor if slope == ONE else self.multiplied(slope, factor, slope)
        self.names[made].steady |= finite
        return made

    def chained(self, slope: str | None, factor: str, finite: bool = False) -> str | None:
        """Write the statements of the product ``slope * factor``, which is 0 where the factor is 0.

        Return the name of the product, or None if the slope is 0. The arguments are those of
        ``times``.

        A plain product would be NaN where the factor is 0 and the slope is infinite. For example,
        let the factor be the derivative of tanh. It is 0 far from 0, and the slope of tanh's
        argument may be infinite there.
        """
        made = self.times(slope, factor, finite)
        if made is None or made == factor or self.steady_slope(slope):
            return made
        return self.put(f"{made} if {factor} != {ZERO} else {ZERO}")

    def plus(self, a: str | None, b: str | None, sign: str = "+") -> str | None:
        """Write the statement that adds two slopes: a + b, or a - b if ``sign`` is "-".

        Return the name of the result, or None if both slopes are 0.
        """
        if a is None:
            return b if b is None or sign == "+" else self.put(f"-{b}")
        return a if b is None else self.put(f"{a} {sign} {b}")
