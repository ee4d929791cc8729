"""The rule by which numbers become a verdict. `TEXT` is the rule in words for the page."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Any

REPRODUCED, TREND, REFUTED = "reproduced", "trend only", "refuted"
NOT_MEASURED = "not measured"
# Kind of a number -> the largest ratio of our number to the published number, in either direction.
FACTORS = {"count": 1.02, "ratio": 1.15, "curve": 1.15, "speed": 1.15}
MOST = 0.9  # the share of points that must agree for "trend only"
LEVEL = FACTORS["count"]  # if neighbouring points differ by less than this factor, a curve is level
TRENDS = ("order", "shape", "words")

TEXT = """\
The rule for verdicts compares our numbers with the published numbers, point by point. In the \
rule for verdicts, a *point* is one published number and our number for the published quantity.

| verdict | when it is given |
| --- | --- |
| **reproduced** | the setting is the paper's, and at every point our number is within the factor \
(next table) of the published number |
| **trend only** | the verdict is not "reproduced", but the trend (last table) agrees for at \
least nine of ten points |
| **refuted** | in all other cases |

In the rule for the verdict "reproduced", "the setting" means the quantity, the precision, the \
pass and the sizes.

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

- If a paper publishes a range or a bound instead of a number, our number must be in the range or \
within the bound. The allowed factor between our number and the published number does not apply \
to published ranges and bounds.
- We check each claim about FlashAttention for the loop orders K/V outer and Q outer. If the \
two loop orders get different verdicts on a claim, the table of claims has a row for each loop \
order.
- If a published figure or claim has fewer than ten points, our trend must agree with \
the published trend at all points."""


@dataclass(frozen=True)
class Bounds:
    """A range of numbers that a publication allows, from `low` to `high`, both included."""

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
    """Our number (`ours`) and the published number of one quantity at one place.

    `label` names the quantity. `place` is a tuple of values, such as (head dimension, length).
    """

    label: str
    place: Place
    ours: float
    published: Published

    @property
    def times(self) -> float | None:
        """Return our number / the published number.

        Return None if the published number is 0, or if bounds are published.
        """
        if isinstance(self.published, Bounds) or self.published == 0:
            return None
        return self.ours / self.published

    def within(self, factor: float) -> bool:
        """Return whether our number is close enough to the published number.

        It is close enough if the ratio of the two numbers is at most `factor`, in either direction.
        If bounds are published, our number must be within the bounds.
        """
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
        For each point, whether our number is close enough to the published number.
    agreeing : sequence of bool
        For each part of the trend, whether our numbers agree with the published numbers.
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
        A key of FACTORS. It decides how far a number may be from the published number.
    trend : str
        One of TRENDS. The trend decides the verdict if not all points are within the factor.
        "order": which of the numbers at a place is larger. "shape": whether a series rises, falls
        or stays level from one place to the next. "words": whether a statement in words is true.
    points : sequence of Point
        The points.
    beside : sequence of Point, default ()
        Further points, which are used for the trend "order" only.

    Returns
    -------
    Judgement
        "reproduced" if all points are within the factor; "trend only" if at least nine of ten parts
        of the trend agree; else "refuted".

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
    """Return for each place whether our numbers have the same order as the published numbers.

    The order of two numbers says which of them is larger. Only pairs whose published numbers have
    an order are compared. If `one` is true, the numbers are ratios, and each of them is also
    compared with 1. Our ratio must then be above 1 if the published ratio is above 1, and below 1
    if the published ratio is below 1. A place is left out if a label has no number there, or if no
    published numbers there have an order.
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
    """Return 1 if a is larger than b, 0 if both are equal, and -1 if a is smaller."""
    return (a > b) - (a < b)


def _order(a: Published, b: Published) -> int:
    """Return 1 if a is larger than b, -1 if b is larger, and 0 if they are equal or overlap.

    Bounds are a range. The range a is larger than the number or range b if the lower end of a is at
    least the upper end of b. For example, the bounds "1 or more" are larger than the number 1.
    """
    a, b = (x if isinstance(x, Bounds) else Bounds(x, x) for x in (a, b))
    return (a.low >= b.high) - (a.high <= b.low)


def _in_shape(points: Iterable[Point]) -> list[bool]:
    """Return, for each step of a series, whether our number changes as the published number does.

    Both must rise, both must fall, or both must stay level (within 2 %). Raise TypeError if bounds
    are published instead of numbers.
    """
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


def tally(verdicts: Iterable[str], what: str) -> str:
    """Return a sentence with the number of questions for each verdict. `what` names the table."""
    found = list(verdicts)
    known = (REPRODUCED, TREND, REFUTED, NOT_MEASURED)
    shown = [f'{found.count(name)} are "{name}"' for name in known if name in found]
    said = ", ".join([*shown[:-2], " and ".join(shown[-2:])])
    return f"Of the {len(found)} verdicts in the table of {what}, {said}."
