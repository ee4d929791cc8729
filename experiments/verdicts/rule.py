"""The rule by which numbers become a verdict. `TEXT` is the rule in words for the page."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from typing import Any

REPRODUCED, TREND, REFUTED = "reproduced", "trend only", "refuted"
NOT_COMPARABLE, NOT_MEASURED = "not comparable", "not measured"
# Kind of a number -> the largest ratio of our number to the published number, in either direction.
FACTORS = {"count": 1.02, "ratio": 1.15, "curve": 1.15, "speed": 1.15}
MOST = 0.9  # the share of points that must agree for "trend only"
LEVEL = 1.02  # two numbers tie if their ratio is at most this factor, in either direction
TRENDS = ("order", "shape", "size", "level", "words")
NEAR = 1.25  # the trend "level": the largest ratio of a number to 1, in either direction

TEXT = """\
The rule for verdicts compares our numbers with the published numbers, point by point. In the \
rule for verdicts, a *point* is one published number and our number for the published quantity.

| verdict | when it is given |
| --- | --- |
| **reproduced** | the setting is the paper's, and at every point our number is within the factor \
(next table) of the published number |
| **trend only** | the verdict is not "reproduced", but the trend (last table) agrees for at \
least nine of ten points |
| **refuted** | our number and the published number measure the same thing, but the trend does not \
agree |
| **not comparable** | our number and the published number do not measure the same thing; the \
table says what differs |
| **not measured** | the numbers that the row needs are not recorded, or the recorded numbers do \
not decide it; the table says which numbers |

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
| *order* | each two of our numbers for one setting compare as the two published numbers do |
| *shape* | our numbers at this point and at the next point compare as the two published numbers \
do |
| *size* | our ratio is within the factor of the published ratio, or our ratio is at least halfway \
from 1 to the published ratio on a logarithmic scale |
| *level* | the publication says that a number hardly changes: our number and the published number \
differ by at most a factor of 1.25 from the first number of their series |
| *words* | the words of the claim are true at this point; if they are true at all points, the \
verdict is "reproduced" |

- Two numbers *tie* if they differ by at most 2 %, or if the ranges from p20 to p80 of repeated \
measurements overlap. Published numbers have no ranges.
- Two of our numbers compare as two published numbers do in three cases. In the first case, both \
pairs tie. In the second case, no pair ties, and both pairs have the same order. In the third \
case, only one pair ties, and our ratio of the two numbers is within the factor of the published \
ratio.
- A claim that names a ratio, such as "2.5 times", has the trend *size*. For "2.5 times", our \
ratio must be at least 1.58 (the square root of 2.5), because 1.58 is halfway from 1 to 2.5 on a \
logarithmic scale. A larger ratio than the published ratio agrees too. If a range is published, \
its end that is nearer to 1 counts.
- A published ratio of two speeds is comparable only at points where our divisor is the paper's \
divisor. The rule for verdicts tests the divisor if a paper gives the divisor's speed on an H100. \
An H200 counts as an H100 here, because both have 132 equal multiprocessors; only their memories \
differ. At a comparable point, our divisor's speed is within the factor 1.15 of the published \
speed. The verdict is about the comparable points. If they are fewer than half of the tested \
points, the verdict is "not comparable".
- A measurement can be too inexact to tell a published ratio from 1. This is so if three \
conditions are true: the ranges of our two numbers overlap; the published ratio is within the \
factor 1.15 of 1, but does not tie with 1; and the range of our ratio reaches at least halfway to \
the published ratio. If they are true at every point, the verdict is "not measured". If the range \
of our ratio contains 1, but does not reach halfway, our ratio does not agree with the published \
ratio.
- A paper's size, bandwidth or speed of a GPU is comparable only with a number of the same GPU.
- Numbers that were measured on different GPUs are never divided by each other. A question that \
needs such a ratio gets the verdict "not comparable".
- If a claim is true for some sizes, algorithms or masks only, the table has one row for each part \
of the claim. The parts together contain every size that the column *setting here* names.
- If a paper publishes a range or a bound instead of a number, our number must be in the range or \
within the bound. The allowed factor between our number and the published number does not apply \
to published ranges and bounds.
- We check each claim about FlashAttention for the loop orders K/V outer and Q outer. If the \
two loop orders get different verdicts on a claim, the table of claims has a row for each loop \
order. In claims on times and speeds, FA-1 has the faster of its two grids if both were measured: \
one thread block per batch entry and head, or query splits.
- If two rows state the same fact, only one of them counts in the numbers of verdicts. The other \
row refers to it.
- If a published figure or claim has fewer than ten points, our trend must agree with \
the published trend at all points. A claim in words with fewer than ten points is either \
"reproduced" or "refuted"."""


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


class Measured(float):
    """A number that was measured on a GPU, with the range of the repeated measurements.

    Sums, differences and quotients have a range too. Numbers of different GPUs cannot be combined:
    an operation with both raises `DifferentGpus`.

    Parameters
    ----------
    value : float
        The number, such as a median.
    low, high : float
        The range, such as p20 and p80. Equal to `value` without repeated measurements.
    gpu : str
        Name of the GPU.
    """

    low: float
    high: float
    gpu: str

    def __new__(cls, value: float, low: float, high: float, gpu: str) -> "Measured":
        """Make the number."""
        made = super().__new__(cls, value)
        made.low, made.high, made.gpu = low, high, gpu
        return made

    def _made(self, value: float, low: float, high: float, other: float) -> "Measured":
        gpu = other.gpu if isinstance(other, Measured) else self.gpu
        if gpu != self.gpu:
            raise DifferentGpus(f"the numbers are of {' and '.join(sorted((gpu, self.gpu)))}")
        return Measured(value, min(low, high), max(low, high), gpu)

    def __add__(self, other: float) -> "Measured":
        low, high = ends(other)
        return self._made(float(self) + float(other), self.low + low, self.high + high, other)

    __radd__ = __add__

    def __sub__(self, other: float) -> "Measured":
        low, high = ends(other)
        return self._made(float(self) - float(other), self.low - high, self.high - low, other)

    def __truediv__(self, other: float) -> "Measured":
        low, high = ends(other)
        return self._made(float(self) / float(other), self.low / high, self.high / low, other)

    def __rtruediv__(self, other: float) -> "Measured":
        return self._made(float(other) / float(self), other / self.high, other / self.low, other)


class DifferentGpus(ValueError):
    """Raised if a quantity would be made from numbers of different GPUs."""


def ends(number: Published) -> tuple[float, float]:
    """Return the ends of the range of a number, as (low, high).

    `Measured` and `Bounds` have a range. For any other number, both ends are the number itself.
    """
    if isinstance(number, Bounds | Measured):
        return number.low, number.high
    return number, number


def tied(a: Published, b: Published) -> bool:
    """Return whether two numbers tie: they differ by at most 2 %, or their ranges overlap."""
    (a_low, a_high), (b_low, b_high) = ends(a), ends(b)
    if a_low <= b_high and b_low <= a_high:
        return True
    if isinstance(a, Bounds) or isinstance(b, Bounds) or a * b <= 0:
        return False
    return 1 / LEVEL <= a / b <= LEVEL


def compared(a: Published, b: Published) -> int:
    """Return 0 if two numbers tie, 1 if `a` is larger than `b`, and -1 if `a` is smaller."""
    return 0 if tied(a, b) else 1 if ends(a) > ends(b) else -1


@dataclass(frozen=True)
class Point:
    """Our number (`ours`) and the published number (`published`) that is compared with it.

    `label` names the quantity, such as "FA-2". `place` is a tuple that says for which sizes both
    numbers are, such as (64, 512) for the head dimension and the sequence length.
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
        "reproduced", "trend only" or "refuted"; "not measured" if no point decides anything (see
        `undecided`).
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
    """Return the verdict on points that are comparable.

    Parameters
    ----------
    kind : str
        A key of FACTORS. It decides how far a number may be from the published number.
    trend : str
        One of TRENDS: what must agree if not all points are within the factor.
        "order": which of several numbers for the same sizes is larger. "shape": whether the numbers
        of a series rise, fall or stay level from one size to the next. "size": whether a ratio is
        at least halfway from 1 to the published ratio. "level": whether the numbers of a series
        hardly change. "words": whether a statement is true.
    points : sequence of Point
        The points.
    beside : sequence of Point, default ()
        Further points, which are used for the trend "order" only.

    Returns
    -------
    Judgement
        "not measured" if the trend is "size" and no point decides anything (see `undecided`);
        "reproduced" if all points are within the factor; "trend only" if at least nine of ten parts
        of the trend agree; else "refuted".

    Examples
    --------
    >>> points = [Point("FA-2", (512,), 1.0, 2.0), Point("FA-2", (1024,), 2.0, 4.0)]
    >>> judge("speed", "shape", points).verdict
    'trend only'
    """
    factor = FACTORS[kind]
    within = [point.within(factor) for point in points]
    if trend == "order":
        agreeing = _in_order([*points, *beside], factor)
    elif trend == "shape":
        agreeing = _in_shape(points, factor)
    elif trend == "size":
        unsure = [undecided(p, factor) for p in points]
        # A range that contains 1, but does not reach halfway, is a ratio of 1.
        within = [
            near and (may_be_either or not _near_one(p, factor))
            for near, may_be_either, p in zip(within, unsure, points, strict=True)
        ]
        agreeing = [near or halfway(p) for near, p in zip(within, points, strict=True)]
        if points and all(unsure):
            return Judgement(NOT_MEASURED, within, agreeing)
    elif trend == "level":
        agreeing = [
            all(1 / NEAR <= x <= NEAR for x in (p.ours, *ends(p.published))) for p in points
        ]
    else:
        agreeing = within
    verdict = REPRODUCED if all(within) else TREND if enough(agreeing) else REFUTED
    return Judgement(verdict, within, agreeing)


def enough(agreeing: Sequence[bool]) -> bool:
    """Return whether at least nine of ten points agree. The result is False without points."""
    return bool(agreeing) and sum(agreeing) >= MOST * len(agreeing)


def _near_one(point: Point, factor: float) -> bool:
    """Return whether our ratio ties with 1 by its range, and the published ratio is close to 1.

    The published ratio is then within `factor` of 1, but does not tie with it.
    """
    if isinstance(point.published, Bounds) or tied(point.published, 1.0):
        return False
    low, high = ends(point.ours)
    return low < 1 < high and replace(point, ours=1.0).within(factor)


def undecided(point: Point, factor: float) -> bool:
    """Return whether our measurement is too inexact to tell the published ratio from 1.

    Three conditions must be true. The range of our ratio contains 1, so that our two numbers tie.
    The published ratio is within `factor` of 1, but does not tie with 1 (see `tied`). One end of
    the range of our ratio is at least halfway to the published ratio (see `halfway`). If a range is
    published instead of a ratio, the result is False.
    """
    reaches = any(halfway(replace(point, ours=end)) for end in ends(point.ours))
    return reaches and _near_one(point, factor)


def halfway(point: Point) -> bool:
    """Return whether our ratio is at least halfway from 1 to the published ratio.

    The scale is logarithmic: halfway from 1 to 4 is 2. A ratio beyond the published ratio is more
    than halfway, so the result is True. If a range is published, the end that is nearer to 1 is
    used. If the published ratio is 1, or its range contains 1, our ratio must tie with 1 (see
    `tied`).
    """
    low, high = ends(point.published)
    if low > 1:
        return point.ours >= math.sqrt(low)
    if high < 1:
        return 0 < point.ours <= math.sqrt(max(high, 0.0))
    return tied(point.ours, 1.0)


def _alike(ours: tuple[float, float], said: tuple[Published, Published], factor: float) -> bool:
    """Return whether two numbers of ours have the same order as two published numbers.

    Two numbers tie if `tied` returns True. The arguments `ours` and `said` are pairs of numbers.

    | case | result |
    |---|---|
    | both pairs tie | True |
    | no pair ties | whether the same number of both pairs is larger |
    | only one pair ties | whether the ratios of both pairs differ by at most `factor` |
    | only one pair ties, and a published number is a range | False |
    """
    mine, theirs = compared(*ours), compared(*said)
    if mine == theirs:
        return True
    a, b = said
    if mine and theirs or isinstance(a, Bounds) or isinstance(b, Bounds):
        return False
    if not (a and b and ours[1]):
        return False
    return Point("", (), ours[0] / ours[1], a / b).within(factor)


def _in_order(points: Iterable[Point], factor: float) -> list[bool]:
    """Return for each place whether our numbers have the same order as the published numbers.

    A place is a tuple of sizes, such as (64, 512) for the head dimension and the sequence length.
    At each place there is one point for each label, such as "FA-1" and "FA-2". Every two points of
    a place are compared by `_alike`. A place is left out if a point is missing, or if all published
    numbers of the place tie.
    """
    places: dict[Place, list[Point]] = {}
    for point in points:
        places.setdefault(point.place, []).append(point)
    most = max(map(len, places.values()), default=0)
    found = []
    for numbers in places.values():
        pairs = [
            ((a.ours, b.ours), (a.published, b.published)) for a, b in combinations(numbers, 2)
        ]
        if len(numbers) == most and any(compared(*said) for _, said in pairs):
            found.append(all(_alike(ours, said, factor) for ours, said in pairs))
    return found


def _in_shape(points: Iterable[Point], factor: float) -> list[bool]:
    """Return, for each step of a series, whether our numbers change like the published numbers.

    A step goes from one number of the series to the next, such as from N=512 to N=1024. Our numbers
    and the published numbers must both rise, both fall, or both stay level (see `_alike`, which
    also takes `factor`). Raise TypeError if bounds are published instead of numbers.
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
            found.append(_alike((b.ours, a.ours), (b.published, a.published), factor))
    return found


def tally(verdicts: Iterable[str], what: str, repeated: Sequence[str] = ()) -> str:
    """Return a sentence with the number of questions for each verdict.

    `what` names the table. `repeated` are names of rows that repeat the fact of another row. The
    verdicts do not include these rows, and a second sentence names them.
    """
    found = list(verdicts)
    known = (REPRODUCED, TREND, REFUTED, NOT_COMPARABLE, NOT_MEASURED)
    shown = [
        f'{(n := found.count(name))} {"is" if n == 1 else "are"} "{name}"'
        for name in known
        if name in found
    ]
    said = ", ".join([*shown[:-2], " and ".join(shown[-2:])])
    if not repeated:
        return f"Of the {len(found)} verdicts in the table of {what}, {said}."
    one = len(repeated) == 1
    repeats = "which repeats a fact" if one else "which repeat facts"
    row, are = ("row", "is") if one else ("rows", "are")
    return (
        f"Of the {len(found)} verdicts that are counted in the table of {what}, {said}. The table "
        f"also contains {' and '.join(repeated)}, {repeats} of "
        f"{'another' if one else 'other'} {row} and {are} not counted."
    )
