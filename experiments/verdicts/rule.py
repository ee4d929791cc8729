"""The one rule by which numbers become a verdict. `TEXT` is the rule in words for the page."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Any

REPRODUCED, TREND, REFUTED = "reproduced", "trend only", "refuted"
NOT_MEASURED = "not measured"
# How many times as much or as little as published the same quantity may be, by its kind.
FACTORS = {"count": 1.02, "ratio": 1.15, "curve": 1.15, "speed": 1.15}
MOST = 0.9  # of all points, how many have to agree for a trend
LEVEL = FACTORS["count"]  # neighbours of a curve that differ by less are level
TRENDS = ("order", "shape", "words")

TEXT = """\
The rule for verdicts compares our numbers with the published numbers, point by point. In the \
rule for verdicts, a point is one published number and our number for the same quantity.

| verdict | when it is given |
| --- | --- |
| **reproduced** | the setting is the paper's, and at every point our number is within the factor \
(next table) of the published number |
| **trend only** | the verdict is not "reproduced", but the trend (last table) agrees for at \
least nine of ten points |
| **refuted** | in all other cases |

In the table of the three verdicts, "the setting" means the quantity, the precision, the pass and \
the sizes.

| kind | numbers that are compared | factor |
| --- | --- | --- |
| *count* | accesses, bytes or operations | 1.02 |
| *ratio* | one quantity divided by another | 1.15 |
| *curve* | a quantity divided by its first or last point | 1.15 |
| *speed* | TFLOP/s, only with published numbers that were measured on an H100 | 1.15 |

| trend | a point agrees if |
| --- | --- |
| *order* | our numbers for one setting (one number per kernel), sorted by size, are in the \
order of the published numbers; a ratio must also be on the same side of 1 |
| *shape* | from this point to the next, our curve rises, falls or stays level (within 2 %) as \
the published curve does |
| *words* | the words of the claim are true at this point; if they are true at all points, the \
verdict is "reproduced" |

- If the paper gives a range or a bound instead of a number, our number must be in the range or \
within the bound. The allowed factor does not apply to published ranges and bounds.
- A claim about FlashAttention is checked for both loop orders. If the two \
loop orders get different verdicts, the table of claims has a row for each loop order.
- If a figure or claim has fewer than ten points, our trend must agree with the published trend at \
all points."""


@dataclass(frozen=True)
class Bounds:
    """What words allow: the numbers from `low` to `high`, both included."""

    low: float
    high: float

    def __str__(self) -> str:
        if self.high == math.inf:
            return f"{self.low:.3g} or more" if self.low else "any"
        return f"{self.high:.3g} or less" if self.low == 0 else f"{self.low:.4g} to {self.high:.4g}"


Published = float | Bounds
Place = tuple[Any, ...]


@dataclass(frozen=True)
class Point:
    """Our number and the published one, of one series at one place."""

    label: str
    place: Place
    ours: float
    published: Published

    @property
    def times(self) -> float | None:
        """Return our number over the published number.

        Return None if the published number is 0, or if bounds are published.
        """
        if isinstance(self.published, Bounds) or self.published == 0:
            return None
        return self.ours / self.published

    def within(self, factor: float) -> bool:
        """Return whether our number is within a factor, or the bounds, of the published number."""
        if isinstance(self.published, Bounds):
            return self.published.low <= self.ours <= self.published.high
        if self.times is None:
            return self.ours == self.published
        return 1 / factor <= self.times * (1 + 1e-9) and self.times <= factor * (1 + 1e-9)


@dataclass(frozen=True)
class Judgement:
    """The verdict on several points.

    Parameters
    ----------
    verdict : str
        "reproduced", "trend only" or "refuted".
    within : sequence of bool
        For each point whether it is within the factor.
    agreeing : sequence of bool
        For each part of the trend whether it agrees.
    """

    verdict: str
    within: Sequence[bool]
    agreeing: Sequence[bool]


def judge(
    kind: str, trend: str, points: Sequence[Point], beside: Sequence[Point] = ()
) -> Judgement:
    """Return the verdict on points.

    Parameters
    ----------
    kind : str
        A key of FACTORS: how far a number may be from the published one.
    trend : str
        One of TRENDS, used if not all points are within the factor. "order": which of a place's
        numbers is larger. "shape": whether a series goes up, down or stays level from one place to
        the next. "words": whether the statement in words is true for a point.
    points : sequence of Point
        The points.
    beside : sequence of Point, default ()
        Further points that count for the order only.

    Returns
    -------
    Judgement
        "reproduced" if all points are within the factor; "trend only" if nine of ten parts of the
        trend agree; else "refuted".

    Examples
    --------
    >>> points = [Point("FA-2", (512,), 1.0, 2.0), Point("FA-2", (1024,), 2.0, 4.0)]
    >>> judge("speed", "shape", points).verdict
    'trend only'
    """
    within = [point.within(FACTORS[kind]) for point in points]
    if trend == "order":
        agreeing = _in_order([*points, *beside], one=kind == "ratio")
    else:
        agreeing = _in_shape(points) if trend == "shape" else within
    enough = bool(agreeing) and sum(agreeing) >= MOST * len(agreeing)
    verdict = REPRODUCED if all(within) else TREND if enough else REFUTED
    return Judgement(verdict, within, agreeing)


def _in_order(points: Iterable[Point], one: bool) -> list[bool]:
    """Return for each place with all series whether its numbers are ordered as published.

    With `one`, the number 1 belongs to every place.
    """
    places: dict[Place, list[tuple[float, Published]]] = {}
    for point in points:
        places.setdefault(point.place, []).append((point.ours, point.published))
    most = max(map(len, places.values()), default=0)
    found = []
    for numbers in places.values():
        pairs = list(combinations([*numbers, *([(1.0, 1.0)] if one else [])], 2))
        orders = [(_sign(a[0], b[0]), _order(a[1], b[1])) for a, b in pairs]
        if len(numbers) == most and any(theirs for _, theirs in orders):
            found.append(all(ours == theirs for ours, theirs in orders if theirs))
    return found


def _sign(a: float, b: float) -> int:
    """Return 1, 0 or -1 for a above, equal to or below b."""
    return (a > b) - (a < b)


def _order(a: Published, b: Published) -> int:
    """Return 1 if a is the larger, -1 if b is, 0 if the published numbers do not say it."""
    a, b = (x if isinstance(x, Bounds) else Bounds(x, x) for x in (a, b))
    return (a.low >= b.high) - (a.high <= b.low)


def _in_shape(points: Iterable[Point]) -> list[bool]:
    """Return, for each step of a series, whether both numbers go up, go down or stay level."""
    curves: dict[Place, list[Point]] = {}
    for point in points:
        curves.setdefault((point.label, *point.place[:-1]), []).append(point)
    found = []
    for curve in curves.values():
        for a, b in pairwise(sorted(curve, key=lambda point: point.place[-1])):
            if isinstance(a.published, Bounds) or isinstance(b.published, Bounds):
                raise TypeError(
                    f"{a.label} must be a series of published numbers, not a bound, to compare "
                    "how it changes"
                )
            ours, theirs = b.ours / a.ours, b.published / a.published
            level = all(1 / LEVEL < step < LEVEL for step in (ours, theirs))
            found.append(level or _sign(ours, 1) == _sign(theirs, 1))
    return found


def tally(verdicts: Iterable[str]) -> str:
    """Return the number of questions with each verdict, as a sentence."""
    found = list(verdicts)
    known = (REPRODUCED, TREND, REFUTED, NOT_MEASURED)
    shown = [f'{found.count(name)} are "{name}"' for name in known if name in found]
    said = ", ".join([*shown[:-2], " and ".join(shown[-2:])])
    return f"Of the {len(found)} verdicts in the table, {said}."
