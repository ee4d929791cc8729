"""Values of the text with their type (kind): "int", "float" or "bool".

Integers become int32 and floats become float32, because 64-bit arithmetic is slow on a GPU.
"""

from __future__ import annotations

from typing import NamedTuple

from .sharing import Statements


class Growth(NamedTuple):
    """How a float value grows like an exponential function (module ``growth``).

    All fields are names or expressions in the text of a function. The slope (derivative) of the
    value is ``scale`` times ``slope``. Where the value is infinite, the rules treat the value as
    equal to ``scale``.
    """

    scale: str
    slope: str | None  # None for 0
    log: str = ""  # logarithm of the absolute value where it is infinite; empty if not known


class Term(NamedTuple):
    """A value in the text of a function, with its type and its slope (derivative)."""

    kind: str  # "int", "float" or "bool"
    text: str  # the name or the literal of the value
    slope: str | None = None  # the name of the value's derivative; None if it is 0
    of: str = "?"  # an integer depends on "i", on "j", on neither ("") or maybe on both ("?")
    real: str = ""  # a text for an integer as a float, if a conversion would be slower
    apart: bool = False  # an integer differs between neighbouring rows, and neighbouring columns
    growth: Growth | None = None  # for a float that grows like an exponential function


class Conversions(Statements):
    """Writes the statements that convert a value to another kind."""

    def real(self, term: Term) -> str:
        """Write the conversion of a value to float32, if needed, and return the name."""
        if term.kind == "float":
            return term.text
        return self.put(term.real or f"float32({self.integer(term)})")

    def as_float(self, term: Term) -> Term:
        """Return the value converted to float32, as a ``Term`` with its slope (derivative)."""
        return term if term.kind == "float" else Term("float", self.real(term))

    def integer(self, term: Term) -> str:
        """Write the conversion of an integer or a bool to int32, if needed, and return the name."""
        return self.put(f"int32({term.text})") if term.kind == "bool" else term.text

    def truth(self, term: Term) -> str:
        """Write the conversion of a value to bool, if needed, and return the name."""
        if term.kind == "bool":
            return term.text
        return self.put(f"{term.text} != {'int32(0)' if term.kind == 'int' else 'float32(0.0)'}")

    def same(self, *terms: Term) -> str:
        """Return the kind to which all of ``terms`` can be converted."""
        kinds = {term.kind for term in terms}
        if len(kinds) == 1:
            return kinds.pop()
        return "float" if "float" in kinds else "int"

    def number_kind(self, *terms: Term) -> str:
        """Return "int" or "float", the kind of number to which all ``terms`` can be converted."""
        return "float" if self.same(*terms) == "float" else "int"

    def of_kind(self, kind: str, term: Term) -> str:
        """Write the conversion of a value to ``kind``, if needed, and return the name.

        ``kind`` is "int", "float" or "bool", as ``same`` returned it.
        """
        if kind == "float":
            return self.real(term)
        return self.integer(term) if kind == "int" else term.text
