"""Values with a type: "int", "float" or "bool". Integers become int32, and numbers float32.

Nothing is computed in 64 bits, because 64-bit arithmetic is slow on a GPU.
"""

from __future__ import annotations

from typing import NamedTuple

from .sharing import Statements


class Growth(NamedTuple):
    """How a float grows, see ``growth``: its slope is ``scale`` times ``slope``, and the float is
    about ``scale`` where it is infinite. ``log`` is its logarithm there, empty if not known.
    """

    scale: str
    slope: str | None
    log: str = ""


class Term(NamedTuple):
    """A value in the text of a function.

    ``kind`` is "int", "float" or "bool". ``text`` is the name or the literal of the value.
    ``slope`` is the name of the value's derivative, and None for a value without one. ``of`` says
    for an integer whether it depends on "i", on "j", on neither ("") or maybe on both ("?").
    ``real`` is a text for the integer as a float, if there is a shorter one than a conversion.
    ``apart``: the integer differs between neighbouring rows, and between neighbouring columns.
    ``growth`` is about a float that grows like an exponential function.
    """

    kind: str
    text: str
    slope: str | None = None
    of: str = "?"
    real: str = ""
    apart: bool = False
    growth: Growth | None = None


class Conversions(Statements):
    """Statements that convert a value to another kind."""

    def real(self, term: Term) -> str:
        """Return the value as a float."""
        if term.kind == "float":
            return term.text
        return self.put(term.real or f"float32({self.integer(term)})")

    def as_float(self, term: Term) -> Term:
        """Return the value as a float, with its slope."""
        return term if term.kind == "float" else Term("float", self.real(term))

    def integer(self, term: Term) -> str:
        """Return the value of an integer or of a truth as an integer."""
        return self.put(f"int32({term.text})") if term.kind == "bool" else term.text

    def truth(self, term: Term) -> str:
        """Return whether the value is True or not 0."""
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
        """Return the kind of number, "int" or "float", to which all of ``terms`` can be
        converted.
        """
        return "float" if self.same(*terms) == "float" else "int"

    def of_kind(self, kind: str, term: Term) -> str:
        """Return the value in the kind ``kind``, which ``same`` has returned."""
        if kind == "float":
            return self.real(term)
        return self.integer(term) if kind == "int" else term.text
