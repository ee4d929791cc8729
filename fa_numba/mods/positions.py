"""Positions at which a function reads captured arrays, and statements that add to gradients."""

from __future__ import annotations

import re
from typing import NamedTuple

from .sharing import Statements


class Position(NamedTuple):
    """The position of an element in the gradient of a captured array.

    field    meaning
    matrix   expression of the gradient, indexed by all axes but the last two
    row      expression of the index of the last axis but one; 0 if the array has only one axis
    column   expression of the index of the last axis
    shared   whether the position does not depend on i and j
    apart    whether neighbouring scores have different positions
    """

    matrix: str
    row: str
    column: str
    shared: bool
    apart: bool

    @property
    def starts(self) -> list[str]:
        """Statements that set the names of the position's indices to 0.

        The names need a value, because a condition of the function may skip the statements that
        assign the indices.
        """
        names = re.findall(r"\bp\d+", f"{self.matrix} {self.row} {self.column}")
        return [f"{name} = uint32(0)" for name in names]

    def adding(self, text: str) -> list[str]:
        """Return statements that add the number ``text`` to the element of the gradient, unless it
        is 0.

        The number is 0 for a score for which the function does not read the element.
        """
        where = f"{self.matrix}, {self.row}, {self.column}"
        return [f"if {text} != float32(0.0):", f"    add_global({where}, {text})"]

    @property
    def merges(self) -> bool:
        """Whether contributions of several scores are summed before they are added to the gradient.

        The sum is added to the gradient when the position changes. The result is True if three
        conditions hold: the position depends on i or j, neighbouring scores may have equal
        positions, and the array has one or two axes.
        """
        return not (self.shared or self.apart) and "[" not in self.matrix

    def merging(self, text: str, sums: str, n: int) -> list[str]:
        """Return statements that add the number ``text`` to the sum of this position.

        ``sums`` is the text of the sum in registers. The position to which the sum belongs is in
        the registers ``at[2 * n]`` (row) and ``at[2 * n + 1]`` (column). If the position has
        changed, the statements first add the previous sum to the gradient at the previous position,
        and set the sum to 0.
        """
        here = f"at[{2 * n}]", f"at[{2 * n + 1}]"
        moved = f"{self.row} != {here[0]} or {self.column} != {here[1]}"
        ended = self._replace(row=here[0], column=here[1]).adding(sums)
        starts = f"{here[0]} = {self.row}", f"{here[1]} = {self.column}"
        new = (*ended, *starts, f"{sums} = float32(0.0)")
        inner = [f"if {moved}:", *(f"    {line}" for line in new), f"{sums} += {text}"]
        return [f"if {text} != float32(0.0):", *(f"    {line}" for line in inner)]

    def ending(self, sums: str, n: int) -> list[str]:
        """Return statements that add the last sum to the gradient.

        ``sums`` is the text of the sum in registers. The position to which the sum belongs is in
        the registers ``at[2 * n]`` (row) and ``at[2 * n + 1]`` (column).
        """
        return self._replace(row=f"at[{2 * n}]", column=f"at[{2 * n + 1}]").adding(sums)


def position_of(
    statements: Statements, array: str, indices: list[str], near: bool, apart: bool
) -> Position:
    """Return the position of an element, and write statements that assign its indices to names.

    ``array`` is the text of the captured array, such as ``options.score_mod_0``. ``indices``
    contains the text of one index for each axis. ``near`` says whether all indices are independent
    of i and j. ``apart`` says whether neighbouring scores have different positions.
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
