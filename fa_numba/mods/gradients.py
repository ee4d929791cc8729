"""Writes the texts that compute the gradients of the captured float32 arrays of a ``score_mod``.

A function may read several elements of captured arrays, such as ``a[h] + t[i, j]``. For each such
element, the function is written once with the slope with respect to that element. Statements that
the gradients do not need are then removed.
"""

from __future__ import annotations

from typing import NamedTuple

from .allowed import PARAMETERS
from .needed import needed
from .reading import Reader
from .source import Source

_UNPACKED = "sums, at = kept"


class Gradient(NamedTuple):
    """The texts of three functions that compute gradients of captured float32 arrays.

    field      meaning
    each       text of ``each(score_and_ds, b, h, i, j, origin, options, kept)``, which kernels call
               for every score
    rest       text of ``rest(b, h, options, kept)``, which kernels call once after the last score
    flush      text of ``flush(options, kept)``, which kernels call once after the last score
    shared     how many elements that the function reads belong to case 1 of the table below
    merged     how many elements that the function reads belong to case 2 of the table below
    of_score   whether the gradients depend on the score

    ``score_and_ds`` is a pair: a score, and the gradient of the loss with respect to the result of
    the caller's function. The gradients of the arrays are the arrays ``options.d<field>`` in global
    memory. ``kept`` is a pair of arrays in registers: sums, ``(shared + merged,)`` float32, and
    positions of elements, ``(2 * merged,)`` uint32.

    The caller's function reads elements of captured arrays. The position of an element in its array
    decides how the contributions of the scores reach the gradient:

    ============================================  ====================  ============================
    position of the element                       ``each`` adds to      who adds to the gradient
    ============================================  ====================  ============================
    1. independent of i and j                     a sum in registers    ``rest`` adds the sum
    2. may be equal for neighbouring scores, in   a sum in registers    ``each`` adds the sum when
       an array with one or two axes                                    the position changes,
                                                                        ``flush`` adds the last sum
    3. all other positions                        the gradient          ``each``
    ============================================  ====================  ============================
    """

    each: str
    rest: str
    flush: str
    shared: int
    merged: int
    of_score: bool

    @property
    def scattered(self) -> bool:
        """Whether the function ``each`` contains atomic adds to gradients in global memory.

        If the function reads only elements whose positions do not depend on the row or column of
        the score, ``each`` adds only to sums in registers, and the result is False.
        """
        return "add_global" in self.each


def gradient_of(
    option: str, source: Source, kinds: dict[str, str], captured: dict[str, str]
) -> Gradient | None:
    """Return the source texts that add to the gradients of captured float32 arrays.

    A captured array counts if the value that the user's function returns depends on its elements.
    Return None if there is no such array. ``kinds`` and ``captured`` are the arguments of
    ``writing.written``.
    """
    reader = Reader(option, source, kinds, captured)
    reader.result("")
    found = []
    for number in range(reader.reads):
        reader.lines = []
        slope, position = reader.result(number).slope, reader.position
        if slope is not None and position is not None:
            found.append((slope, position, [*position.starts, *reader.lines]))
    if not found:
        return None
    each, rest, flush = ([_UNPACKED] for _ in range(3))
    adds: list[str] = []
    shared, merged, sums = sum(position.shared for _, position, _ in found), 0, 0
    for number, (slope, position, lines) in enumerate(found):
        each += lines
        by = f"g{number}"
        if position.shared:
            adds.append(f"sums[{sums}] += ds * {slope}")
            rest += [*lines, *position.adding(f"sums[{sums}]")]
            sums += 1
            continue
        adds.append(f"{by} = ds * {slope}")
        if position.merges:
            adds += position.merging(by, f"sums[{shared + merged}]", merged)
            flush += position.ending(f"sums[{shared + merged}]", merged)
            merged += 1
        else:
            adds += position.adding(by)
    taken = ", ".join(("score_and_ds", *PARAMETERS[option][1:], "origin", "options", "kept"))
    of_each, read = needed(f"def mod({taken}):", ["score, ds = score_and_ds", *each, *adds])
    of_rest, _ = needed("def mod(b, h, options, kept):", rest, flat=True)
    of_flush, _ = needed("def mod(options, kept):", flush)
    return Gradient(of_each, of_rest, of_flush, shared, merged, "score" in read)
