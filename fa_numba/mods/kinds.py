"""Values in the source text of a device function, with their type (kind): "int", "float" or "bool".

Integers become int32 and floats become float32, because 64-bit arithmetic is slow on a GPU.
"""

from __future__ import annotations

from typing import NamedTuple

from .sharing import Statements


class Growth(NamedTuple):
    """How a float value grows like an exponential function (module ``growth``).

    field   meaning
    scale   a factor of the slope (derivative) of the value, which may overflow as the value does
    slope   the other factor of the slope: the slope of the value is ``scale * slope``; None for 0
    log     logarithm of the absolute value, for use where the value is infinite; "" if not known

    All fields are names or expressions in the text of a function. Where the value is infinite, the
    rules treat the value as equal to ``scale``.
    """

    scale: str
    slope: str | None
    log: str = ""


class Term(NamedTuple):
    """A value in the text of a function, with its type and its slope (derivative).

    field    meaning
    kind     "int", "float" or "bool"
    text     name or literal of the value
    slope    name of the value's derivative; None if the derivative is 0
    of       for an integer: "i" or "j" if it depends on this index and not on the other, "" if it
             depends on neither index, "?" if it may depend on both
    real     for an integer: text that computes the same number as a float faster than a conversion
             does; "" if there is no such text
    apart    for an integer: whether any two neighbouring rows have different values, and also any
             two neighbouring columns
    growth   for a float that grows like an exponential function: its ``Growth``
    """

    kind: str
    text: str
    slope: str | None = None
    of: str = "?"
    real: str = ""
    apart: bool = False
    growth: Growth | None = None


class Conversions(Statements):
    """Writes the statements that convert a value to another kind."""

    def real(self, term: Term) -> str:
        """Write the statement that converts a value to float32, if needed.

        Return the name of the result.
        """
        if term.kind == "float":
            return term.text
        return self.put(term.real or f"float32({self.integer(term)})")

    def as_float(self, term: Term) -> Term:
        """Write the statement that converts a value to float32, if needed.

        Return the result as a ``Term`` with its slope (derivative).
        """
        return term if term.kind == "float" else Term("float", self.real(term))

    def integer(self, term: Term) -> str:
        """Write the statement that converts an integer or a bool to int32, if needed.

        Return the name of the result.
        """
        return self.put(f"int32({term.text})") if term.kind == "bool" else term.text

    def truth(self, term: Term) -> str:
        """Write the statement that converts a value to bool, if needed.

        Return the name of the result.
        """
        if term.kind == "bool":
            return term.text
        return self.put(f"{term.text} != {'int32(0)' if term.kind == 'int' else 'float32(0.0)'}")

    def same(self, *terms: Term) -> str:
        """Return the kind to which all of ``terms`` are converted: "int", "float" or "bool".

        It is the kind of the terms if they have the same kind. Otherwise it is "float" if one of
        them is a float, and "int" if none is.
        """
        kinds = {term.kind for term in terms}
        if len(kinds) == 1:
            return kinds.pop()
        return "float" if "float" in kinds else "int"

    def number_kind(self, *terms: Term) -> str:
        """Return "float" if one of ``terms`` is a float, and otherwise "int"."""
        return "float" if self.same(*terms) == "float" else "int"

    def of_kind(self, kind: str, term: Term) -> str:
        """Write the statement that converts a value to ``kind``, if needed.

        Return the name of the result. ``kind`` is "int", "float" or "bool", as ``same`` returned
        it.
        """
        if kind == "float":
            return self.real(term)
        return self.integer(term) if kind == "int" else term.text
