"""The rules of derivatives: of each operation, the value and its slope.

A slope is the derivative of a value by the score or by one element of a captured array. Each value
has its slope next to it, in forward mode: the slope of a result is made of the slopes of what the
operation takes. A slope of None is 0 and costs nothing.

A library of symbolic mathematics would have to call the function with symbols. Conditional
expressions, indices and ``and`` refuse symbols, and the result would have to be written as Python
again. Here a rule takes a line or two.
"""

from __future__ import annotations

import math

from .kinds import Conversions, Term

ONE = "float32(1.0)"
# Functions of math: the slope by the argument {x}, as a text of {x} and of the value {y}.
OF_MATH = {
    "exp": "{y}",
    "expm1": "{y} + float32(1.0)",
    "log": "float32(1.0) / {x}",
    "log2": f"float32({1 / math.log(2)!r}) / {{x}}",
    "log10": f"float32({1 / math.log(10)!r}) / {{x}}",
    "log1p": "float32(1.0) / (float32(1.0) + {x})",
    "sqrt": "float32(0.5) / {y}",
    "sin": "float32(math.cos({x}))",
    "cos": "-float32(math.sin({x}))",
    "tan": "float32(1.0) + {y} * {y}",
    "atan": "float32(1.0) / (float32(1.0) + {x} * {x})",
    "sinh": "float32(math.cosh({x}))",
    "cosh": "float32(math.sinh({x}))",
    "tanh": "float32(1.0) - {y} * {y}",
    "erf": f"float32({2 / math.sqrt(math.pi)!r}) * float32(math.exp(-({{x}} * {{x}})))",
    "fabs": "float32(math.copysign(float32(1.0), {x}))",
}
# Functions whose values and slopes are finite for any number, and for infinity.
_BOUNDED = ("tanh", "atan", "erf")


class Slopes(Conversions):
    """Statements that compute the value of an operation, and the slope.

    ``inside`` becomes True where an operation gives inf or NaN, or reads outside of an array, for a
    row or a column beyond the matrix: the function is then called inside of the matrix alone.
    """

    inside = False

    # --- slopes alone ------------------------------------------------------------------------

    def times(self, slope: str | None, factor: str, finite: bool = False) -> str | None:
        """Return the slope times a factor. ``finite``: the factor is finite, though not shared."""
        if slope is None:
            return None
        finite = self.steady_slope(slope) and (finite or self.is_shared(factor))
        made = factor if slope == ONE else self.multiplied(slope, factor, slope)
        self.names[made].steady |= finite
        return made

    def plus(self, a: str | None, b: str | None, sign: str = "+") -> str | None:
        """Return the sum of two slopes, or with the sign "-" their difference."""
        if a is None:
            return b if b is None or sign == "+" else self.put(f"-{b}")
        return a if b is None else self.put(f"{a} {sign} {b}")

    # --- operations --------------------------------------------------------------------------

    def negative(self, term: Term) -> Term:
        kind = self.number_kind(term)
        value = self.put(f"{kind}32(-{self.of_kind(kind, term)})")
        return Term(kind, value, self.plus(None, term.slope, "-"))

    def absolute(self, term: Term) -> Term:
        kind = self.number_kind(term)
        text = self.of_kind(kind, term)
        value, slope = self.put(f"{kind}32(abs({text}))"), None
        if term.real:
            return Term(kind, value, None, "?", f"float32(abs({term.real}))")
        if term.slope is not None:
            slope = self.put(f"-{term.slope} if {text} < float32(0.0) else {term.slope}")
        return Term(kind, value, slope)

    def sum_of(self, a: Term, b: Term, sign: str) -> Term:
        """Return the sum of two floats, or with the sign "-" their difference."""
        rank = 1 if self.rank(a.text) + self.rank(b.text) < 2 else 2
        value = self.put(f"{a.text} {sign} {b.text}", rank=rank)
        slope = self.plus(a.slope, b.slope, sign)
        if slope is not None and self.steady_slope(a.slope) and self.steady_slope(b.slope):
            self.names[slope].steady = True
        return Term("float", value, slope)

    def product(self, a: Term, b: Term) -> Term:
        if a.kind != "float":
            return Term("int", self.put(f"int32({a.text} * {self.integer(b)})"))
        slope = self.plus(self.times(a.slope, b.text), self.times(b.slope, a.text))
        return Term("float", self.multiplied(a.text, b.text), slope)

    def quotient(self, a: Term, b: Term) -> Term:
        left, right = self.real(a), self.real(b)
        if self.is_shared(right) and self.depends(left):  # a number's inverse is made once
            inverse = Term("float", self.put(f"{ONE} / {right}", inverse_of=right))
            return self.product(Term("float", left, a.slope), inverse)
        self.inside = True
        value = self.put(f"{left} / {right}")
        slope = self.plus(a.slope, self.times(b.slope, value), "-")
        return Term("float", value, None if slope is None else self.put(f"{slope} / {right}"))

    def remainder(self, a: Term, b: Term, symbol: str) -> Term:
        """Return a // b or a % b of floats, as ``symbol`` says. The slope of a // b is 0."""
        self.inside = True
        whole = self.put(f"float32(math.floor({a.text} / {b.text}))")
        if symbol == "//":
            return Term("float", whole)
        rest = self.put(f"{a.text} - {whole} * {b.text}")
        return Term("float", rest, self.plus(a.slope, self.times(b.slope, whole), "-"))

    def repeated(self, a: Term, times: int) -> Term:
        """Return the power of ``a`` whose exponent is ``times``, as products."""
        found = a if a.kind == "float" else Term("int", self.integer(a))
        for _ in range(times - 1):
            found = self.product(found, a)
        return found

    def power(self, a: Term, b: Term) -> Term:
        """Return the power of two numbers, of which at least one is a float."""
        self.inside = True
        left, right = self.real(a), self.real(b)
        value = self.put(f"float32(math.pow({left}, {right}))")
        slope = None
        if a.slope is not None:
            less = f"float32(math.pow({left}, {right} - float32(1.0)))"
            slope = self.times(a.slope, self.put(f"{right} * {less}"))
        if b.slope is not None:
            more = self.times(b.slope, self.put(f"{value} * float32(math.log({left}))"))
            slope = self.plus(slope, more)
        return Term("float", value, slope)

    def of_math(self, name: str, term: Term) -> Term:
        """Return the value of a function that ``OF_MATH`` names."""
        x = self.real(term)
        self.inside = self.inside or name.startswith(("log", "sqrt"))
        bounded = name in _BOUNDED and self.rank(x) < 2
        y = self.put(f"float32(math.{name}({x}))", rank=0 if bounded else 2)
        if term.slope is None:
            return Term("float", y)
        own = self.put(OF_MATH[name].format(x=x, y=y))
        return Term("float", y, self.times(term.slope, own, finite=bounded))

    def extreme(self, name: str, terms: list[Term]) -> Term:
        """Return the least or the largest of several numbers; ``name`` is "min" or "max"."""
        kind = self.number_kind(*terms)
        first, *rest = (Term(kind, self.of_kind(kind, x), x.slope) for x in terms)
        for other in rest:
            slope = None
            if first.slope is not None or other.slope is not None:
                ours, theirs = (x.slope or "float32(0.0)" for x in (first, other))
                beyond = "<" if name == "min" else ">"
                slope = self.put(f"{theirs} if {other.text} {beyond} {first.text} else {ours}")
            value = self.put(f"{kind}32({name}({first.text}, {other.text}))")
            first = Term(kind, value, slope)
        return first

    def choice(self, test: str, sides: list[tuple[list[str], Term]]) -> Term:
        """Return the first of two ``sides`` where ``test`` is True, and else the second side.

        A side is a value, and the statements that compute the value.
        """
        kind = self.same(*(term for _, term in sides))
        self.count += 1
        value, slope = f"t{self.count}", f"d{self.count}"
        own = {term.slope for _, term in sides}
        slopes = own not in ({None}, {ONE})
        for head, (lines, term) in zip((f"if {test}:", "else:"), sides, strict=True):
            with self.under(head):
                self.lines += lines
                self.lines.append(f"{value} = {self.of_kind(kind, term)}")
                if slopes:
                    self.lines.append(f"{slope} = {term.slope or 'float32(0.0)'}")
        return Term(kind, value, slope if slopes else own.pop())
