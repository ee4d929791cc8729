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
    """The texts of three functions that add to the gradients of a function's float32 arrays.

    The functions are ``each(score_and_ds, b, h, i, j, origin, options, kept)``,
    ``rest(b, h, options, kept)`` and ``flush(options, kept)``. Kernels call ``each`` for every
    score. It adds what one score contributes to the gradients ``options.d<field>`` of the arrays.
    Kernels call ``rest`` and ``flush`` once, after the last score.

    ``score_and_ds`` is a pair: a score, and the gradient of the function's result. ``kept`` is a
    pair of arrays in registers: sums, ``(shared + merged,)`` float32, and positions of elements,
    ``(2 * merged,)`` uint32. An element that the function reads belongs to one of three cases:

    ============================================  ====================  ============================
    position of the element                       ``each`` adds to      who adds to the gradient
    ============================================  ====================  ============================
    independent of i and j                        a sum                 ``rest`` adds the sum
    may be equal for neighbouring scores, in an   a sum                 ``each`` adds the sum at a
    array with one or two axes                                          new position, ``flush`` adds
                                                                        the last sum
    all other positions                           the gradient          ``each``
    ============================================  ====================  ============================
    """

    each: str  # called for each score
    rest: str  # called after the last score
    flush: str  # called after the last score
    shared: int  # number of elements of the first case
    merged: int  # number of elements of the second case
    of_score: bool  # whether the gradients depend on the score

    @property
    def scattered(self) -> bool:
        """Whether the function ``each`` contains atomic adds to gradients in global memory.

        If not, ``each`` adds only to sums in registers. This is so if the function reads only
        elements whose positions do not depend on the row or column of the score.
        """
        return "add_global" in self.each


def gradient_of(
    option: str, source: Source, kinds: dict[str, str], captured: dict[str, str]
) -> Gradient | None:
    """Write the texts for the gradients of the float32 arrays on which the result depends.

    Return None if the result depends on no float32 array. ``kinds`` and ``captured`` are the
    arguments of ``writing.written``.
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
