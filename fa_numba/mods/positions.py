"""Where a function reads an element of a captured array, as text that adds to its gradient."""

from __future__ import annotations

import re
from typing import NamedTuple

from .sharing import Statements


class Position(NamedTuple):
    """The position of an element in the gradient of its array.

    ``matrix`` is the matrix of the gradient, ``row`` and ``column`` are names. ``shared``: the
    position does not depend on i and j. ``apart``: neighbouring scores have different positions.
    """

    matrix: str
    row: str
    column: str
    shared: bool
    apart: bool

    @property
    def starts(self) -> list[str]:
        """Statements that give the names a value where the element is not read."""
        names = re.findall(r"\bp\d+", f"{self.matrix} {self.row} {self.column}")
        return [f"{name} = uint32(0)" for name in names]

    def adding(self, text: str) -> list[str]:
        """Return statements that add ``text`` to the gradient, unless ``text`` is 0. It is 0 where
        the element is not read.
        """
        where = f"{self.matrix}, {self.row}, {self.column}"
        return [f"if {text} != float32(0.0):", f"    add_global({where}, {text})"]

    @property
    def merges(self) -> bool:
        """Whether neighbouring scores may share the element; of an array of one axis or two."""
        return not (self.shared or self.apart) and "[" not in self.matrix

    def merging(self, text: str, sums: str, n: int) -> list[str]:
        """Return statements that add ``text`` to ``sums``, which are the sums of number ``n``.

        At a new position the sums so far are added to the gradient first.
        """
        here = f"at[{2 * n}]", f"at[{2 * n + 1}]"
        moved = f"{self.row} != {here[0]} or {self.column} != {here[1]}"
        ended = self._replace(row=here[0], column=here[1]).adding(sums)
        starts = f"{here[0]} = {self.row}", f"{here[1]} = {self.column}"
        new = (*ended, *starts, f"{sums} = float32(0.0)")
        inner = [f"if {moved}:", *(f"    {line}" for line in new), f"{sums} += {text}"]
        return [f"if {text} != float32(0.0):", *(f"    {line}" for line in inner)]

    def ending(self, sums: str, n: int) -> list[str]:
        """Return statements that add the sums of number ``n`` to the gradient."""
        return self._replace(row=f"at[{2 * n}]", column=f"at[{2 * n + 1}]").adding(sums)


def position_of(
    statements: Statements, array: str, indices: list[str], near: bool, apart: bool
) -> Position:
    """Return the position of an element of the field ``array``, and write its names.

    ``near``: no index depends on i and j. ``apart`` is as in ``Position``.
    """
    names = []
    for text in indices:
        statements.count += 1
        names.append(f"p{statements.count}")
        statements.lines.append(f"{names[-1]} = {text}")
    gradient = array.replace(".", ".d")
    *outer, row, column = ["uint32(0)", *names][-max(2, len(names)) :]
    matrix = gradient + (f"[{', '.join(outer)}]" if outer else "")
    return Position(matrix, row, column, near, apart)
