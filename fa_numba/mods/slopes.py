"""The rules of differentiation: the value and the slope (derivative) of each operation.

The rules differentiate in forward mode: the slope of a result is computed from the operands and
their slopes. Values that grow like an exponential function have special rules, which stay right
where these values overflow (module ``growth``).

A library for symbolic mathematics is not used. Such a library would call the function with symbols,
which conditional expressions, indices and ``and`` do not accept. The result would also have to be
translated back to Python.
"""

from __future__ import annotations

import math

from .chain import ONE
from .growth import LOGARITHMS, Growing
from .kinds import Growth, Term

# The derivative of each function of math, as a text with the argument {x} and the value {y}.
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
# Functions whose values and slopes are finite for every number and for infinity.
_BOUNDED = ("tanh", "atan", "erf")
# Functions whose slope goes to 0 for large arguments of at least one sign.
_SATURATED = (*_BOUNDED, "exp", "expm1")


class Slopes(Growing):
    """Writes the statements that compute the value and the slope of an operation.

    ``inside`` is an attribute. It becomes True if the function contains an operation that could be
    invalid for rows or columns beyond the end of S: the operation could return inf or NaN, or read
    outside of a captured array. Kernels then call the function only with rows and columns of S.
    """

    inside = False

    def negative(self, term: Term) -> Term:
        kind = self.number_kind(term)
        value = self.put(f"{kind}32(-{self.of_kind(kind, term)})")
        growth = term.growth and Growth(self.put(f"-{term.growth.scale}"), term.growth.slope)
        return Term(kind, value, self.plus(None, term.slope, "-"), growth=growth)

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
        """Write the statements of a + b for two floats, or of a - b if ``sign`` is "-".

        Return the result as a ``Term`` with its slope: the derivative with respect to the score or
        an element of an array.
        """
        rank = 1 if self.rank(a.text) + self.rank(b.text) < 2 else 2
        value = self.put(f"{a.text} {sign} {b.text}", rank=rank)
        slope = self.plus(a.slope, b.slope, sign)
        if slope is not None and self.steady_slope(a.slope) and self.steady_slope(b.slope):
            self.names[slope].steady = True
        return Term("float", value, slope, growth=self.growth_of_sum(a, b, sign))

    def product(self, a: Term, b: Term) -> Term:
        if a.kind != "float":
            return Term("int", self.put(f"int32({a.text} * {self.integer(b)})"))
        slope = self.plus(self.times(a.slope, b.text), self.times(b.slope, a.text))
        value = self.multiplied(a.text, b.text)
        return Term("float", value, slope, growth=self.growth_of_product(a, b, value))

    def quotient(self, a: Term, b: Term) -> Term:
        a, b = self.as_float(a), self.as_float(b)
        if self.is_shared(b.text) and self.depends(a.text):  # the inverse is computed once
            inverse = Term("float", self.put(f"{ONE} / {b.text}", inverse_of=b.text))
            return self.product(a, inverse)
        self.inside = True
        value = self.put(f"{a.text} / {b.text}")
        if b.growth is None:
            slope = self.plus(a.slope, self.chained(b.slope, value), "-")
            return Term("float", value, None if slope is None else self.put(f"{slope} / {b.text}"))
        if a.growth is None:
            above = None if a.slope is None else self.put(f"{a.slope} / {b.text}")
        else:
            value = self.of_infinities(value, a, b)
            above = self.chained(a.growth.slope, self.ratio(a.growth.scale, b.text, value))
        return Term("float", value, self.plus(above, self.chained(self.relative(b), value), "-"))

    def remainder(self, a: Term, b: Term, symbol: str) -> Term:
        """Write the statements of a // b or a % b for two floats.

        Return the result as a ``Term`` with its slope (derivative). ``symbol`` is the operator. The
        slope of a // b is 0.
        """
        self.inside = True
        whole = self.put(f"float32(math.floor({a.text} / {b.text}))")
        if symbol == "//":
            return Term("float", whole)
        rest = self.put(f"{a.text} - {whole} * {b.text}")
        return Term("float", rest, self.plus(a.slope, self.times(b.slope, whole), "-"))

    def repeated(self, a: Term, times: int) -> Term:
        """Write the statements of ``a`` to the power of the integer ``times``, as products.

        Return the result as a ``Term`` with its slope (derivative).
        """
        found = a if a.kind == "float" else Term("int", self.integer(a))
        for _ in range(times - 1):
            found = self.product(found, a)
        return found

    def power(self, a: Term, b: Term) -> Term:
        """Write the statements of a to the power of b. At least one of them is a float.

        Return the result as a ``Term`` with its slope (derivative).
        """
        self.inside = True
        left, right = self.real(a), self.real(b)
        value = self.put(f"float32(math.pow({left}, {right}))")
        slope = growth = None
        if a.slope is not None:
            less = f"float32(math.pow({left}, {right} - float32(1.0)))"
            own, inner = self.put(f"{right} * {less}"), a.slope
            if a.growth is not None and a.growth.slope is not None:
                scaled = self.chained(a.growth.scale, own)
                own, inner = scaled or own, a.growth.slope
            slope = self.chained(inner, own)
        if b.slope is not None:
            more = self.chained(b.slope, self.put(f"{value} * float32(math.log({left}))"))
            slope = self.plus(slope, more)
        if self.fixed(a) and not self.fixed(b):
            log = self.put(f"float32(math.log({left}))")
            growth = Growth(value, self.times(b.slope, log), self.put(f"{right} * {log}"))
        return Term("float", value, slope, growth=growth)

    def of_math(self, name: str, term: Term) -> Term:
        """Write the statements of ``math.name(term)``, for a name in ``OF_MATH``.

        Return the result as a ``Term`` with its slope (derivative).
        """
        x = self.real(term)
        self.inside = self.inside or name.startswith(("log", "sqrt"))
        bounded = name in _BOUNDED and self.rank(x) < 2
        y = self.put(f"float32(math.{name}({x}))", rank=0 if bounded else 2)
        if term.growth is not None and name in LOGARITHMS:
            grown = self.sum_of(term, Term("float", ONE), "+") if name == "log1p" else term
            y = self.logarithm(name, y, grown)
            return Term("float", y, self.logarithm_slope(name, grown))
        growth = self.growth_of_math(name, x, y, term.slope)
        if term.slope is None:
            return Term("float", y, growth=growth)
        own = self.put(OF_MATH[name].format(x=x, y=y))
        by = self.chained if name in _SATURATED else self.times
        return Term("float", y, by(term.slope, own, finite=bounded), growth=growth)

    def extreme(self, name: str, terms: list[Term]) -> Term:
        """Write the statements of the minimum or maximum of several numbers.

        ``name`` is "min" or "max". Return the result as a ``Term`` with its slope (derivative).
        """
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
        """Write the statements of the conditional expression ``sides[0] if test else sides[1]``.

        Each side is a pair: the statements that compute a value, and the value. Return the selected
        value as a ``Term`` with its slope (derivative).
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
