"""The gradients of the float32 arrays that a function reads, as texts.

The function is written once for each element that it reads, with the slope by this element. What
the gradient does not need is left out then.
"""

from __future__ import annotations

from typing import NamedTuple

from .allowed import PARAMETERS
from .needed import needed
from .reading import Reader
from .source import Source

_UNPACKED = "sums, at = kept"


class Gradient(NamedTuple):
    """The gradients of the float32 arrays that a function reads, as texts of three functions.

    ``each`` takes what the function's text takes, but the score and the gradient of the result, a
    pair, first, and sums and positions of elements, ``kept``, last. ``each`` adds what one score
    contributes to the gradient ``d<field>`` of each array, in one of three ways:

    - Elements that do not depend on i and j, of which there are ``shared``: ``each`` adds to sums,
      and ``rest``, of b, h, ``options`` and ``kept``, adds the sums to the gradient.
    - Elements that neighbouring scores may share, of which there are ``merged``: ``each`` adds to
      further sums as long as the position of the element stays the same, and ``flush``, of
      ``options`` and ``kept``, adds what is left.
    - Any other element: ``each`` adds to the gradient.

    ``of_score``: the gradients depend on the score.
    """

    each: str
    rest: str
    flush: str
    shared: int
    merged: int
    of_score: bool

    @property
    def scattered(self) -> bool:
        """Whether there are elements to whose gradients each score adds by itself."""
        return "add_global" in self.each


def gradient_of(
    option: str, source: Source, kinds: dict[str, str], captured: dict[str, str]
) -> Gradient | None:
    """Return the gradients of the float32 arrays on which the result depends; None without any."""
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
    taken = ", ".join(("given", *PARAMETERS[option][1:], "origin", "options", "kept"))
    of_each, read = needed(f"def mod({taken}):", ["score, ds = given", *each, *adds])
    of_rest, _ = needed("def mod(b, h, options, kept):", rest, flat=True)
    of_flush, _ = needed("def mod(options, kept):", flush)
    return Gradient(of_each, of_rest, of_flush, shared, merged, "score" in read)
