"""Evidence for questions: stored rows, and quantities that are made from rows.

A quantity is a dictionary {place: number} that is computed from stored rows. A place is a tuple
with the values of some columns of the rows. For example, the place (64, 512) is the head dimension
64 and the sequence length 512.

The numbers of a quantity form several series. The last element of the place varies within a series,
and the other elements are equal. For example, the numbers at (64, 512) and (64, 1024) are in one
series, and the number at (128, 512) is in another series.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import attrgetter
from typing import Any

from experiments.lab.measure import scaling
from experiments.lab.record import EMULATOR, MODEL, Row, published_numbers, select

from .rule import Measured, Place


class MissingRows(LookupError):
    """Raised if the rows that decide a question are missing. The message names the rows."""


class Evidence:
    """The stored rows of several experiments, from which quantities are computed.

    Parameters
    ----------
    rows : iterable of Row
        The rows.
    """

    def __init__(self, rows: Iterable[Row]) -> None:
        self._rows: dict[str, list[Row]] = {}
        for row in rows:
            self._rows.setdefault(row.experiment, []).append(row)

    def rows(self, experiment: str, **fields: Any) -> list[Row]:
        """Return the rows of an experiment with the given fields. A tuple allows several values.

        Raise MissingRows if there are no such rows.
        """
        if not (found := select(self._rows.get(experiment, ()), **fields)):
            only = f" with {fields}" if fields else ""
            raise MissingRows(f"experiment {experiment} has no rows{only}")
        return found


Numbers = Mapping[Place, float]
Curve = list[tuple[Place, float]]  # a series, sorted by the last part of the places


@dataclass(frozen=True)
class Quantity:
    """A rule that computes numbers from stored rows, as a dictionary {place: number}.

    A place is a tuple with the values of some columns, such as (64, 512) for the head dimension and
    the sequence length. Quantities can be divided and subtracted, place by place. A number that was
    measured on a GPU is a `rule.Measured`, which contains the range of repeated measurements.

    Parameters
    ----------
    find : callable
        Takes the evidence and returns {place: number}. Raises MissingRows.
    experiments : tuple of str, default ()
        Experiments whose rows are used.
    """

    find: Callable[[Evidence], Numbers]
    experiments: tuple[str, ...] = ()

    def __truediv__(self, other: Quantity) -> Quantity:
        return self._with(other, lambda a, b: a / b)

    def __sub__(self, other: Quantity) -> Quantity:
        return self._with(other, lambda a, b: a - b)

    def equal(self, wanted: float) -> Quantity:
        """Return the numbers of this quantity that equal `wanted`."""
        return self._along(lambda curve: {p: v for p, v in curve if v == wanted})

    def only(self, other: Quantity) -> Quantity:
        """Return the numbers of this quantity for which `other` has a number with the same place.

        A place is the key of a number: a tuple with the values of some columns.
        """
        return self._with(other, lambda a, _: a)

    def _with(self, other: Quantity, made: Callable[[float, float], float]) -> Quantity:
        """Combine this quantity with another quantity, place by place.

        A place is the key of a number. At each place of both quantities, the result is
        ``made(our number, other's number)``. If `other` has a single number without columns, at the
        place (), this number is used at every place.
        """

        def find(data: Evidence) -> Numbers:
            mine, theirs = self.find(data), other.find(data)
            theirs = dict.fromkeys(mine, theirs[()]) if set(theirs) == {()} else theirs
            return {p: made(value, theirs[p]) for p, value in mine.items() if p in theirs}

        return Quantity(find, tuple(dict.fromkeys((*self.experiments, *other.experiments))))

    def where(self, holds: Callable[..., bool]) -> Quantity:
        """Return the numbers of this quantity whose place satisfies a condition.

        A place is the key of a number, such as (64, 512). `holds` takes the elements of the place
        as arguments, such as ``holds(64, 512)``, and returns whether the number is kept.
        """
        return self._along(lambda curve: {p: v for p, v in curve if holds(*p)})

    def over(self, at: int) -> Quantity:
        """Return the numbers of each series, divided by one number of the same series.

        The divisor is the first number of the series if `at` is 0, and the last number if `at` is
        -1. The divisor itself is not in the result. Numbers that were measured on a GPU have a
        range. The range of the divisor is ignored: it would widen the ranges of all numbers of the
        series by the same factor.
        """
        return self._along(lambda c: {p: v / float(c[at][1]) for p, v in c if p != c[at][0]})

    def steps(self) -> Quantity:
        """Return each number divided by the number before it in the same series.

        The first number of each series has no number before it, and is not in the result.
        """
        return self._along(lambda curve: {b[0]: b[1] / a[1] for a, b in pairwise(curve)})

    def power(self) -> Quantity:
        """Return the exponent with which each series grows: its numbers are about c x^exponent.

        Each number has a key, a tuple such as (head dimension, sequence length). x is the last
        element of the key. `scaling.fit` fits the exponent by least squares of the logarithms. In
        the result, the key of an exponent is the tuple without x. A series with fewer than three
        numbers has no exponent.
        """

        def made(curve: Curve) -> Numbers:
            fitted = scaling.fit({place[-1]: value for place, value in curve})
            return {} if fitted is None else {curve[0][0][:-1]: fitted.exponent}

        return self._along(made)

    def most(self) -> Quantity:
        """Return the largest number of each series.

        For example, the numbers at (64, 512) and (64, 1024) are one series. The largest of them has
        the key (64,) in the result: the last element is left out.
        """
        return self._along(lambda curve: {curve[0][0][:-1]: max(value for _, value in curve)})

    def _along(self, made: Callable[[Curve], Numbers]) -> Quantity:
        """Return the quantity that a function computes from one series after the other.

        The function `made` takes a series as a list of (place, number), sorted by place. It returns
        a dictionary {place: number}. The result of this method contains the numbers of all series.
        """

        def find(data: Evidence) -> Numbers:
            curves: dict[Place, Curve] = {}
            for place, value in sorted(self.find(data).items()):
                curves.setdefault(place[:-1], []).append((place, value))
            return {place: value for c in curves.values() for place, value in made(c).items()}

        return Quantity(find, self.experiments)


By = str | Callable[[Any], Any]


def rows(experiment: str, *by: By, value: Callable[[Row], float] = attrgetter("number"),
         fold: Callable[[Sequence[float]], float] = sum, none: float | None = None,
         **fields: Any) -> Quantity:  # fmt: skip
    """Return the numbers of an experiment's stored rows, as a quantity {place: number}.

    Parameters
    ----------
    experiment : str
        Name of the experiment.
    *by : str or callable
        The columns by which the numbers are told apart, such as "head_dim", "seqlen_q". Their
        values are the key of a number (its place), such as (64, 512). A column is the name of a
        column, or a function that takes a row and returns a value.
    value : callable, optional
        Takes a row and returns the number. Default: the row's value.
    fold : callable, default sum
        Combines the numbers of rows with equal keys.
    none : float, optional
        Number that is used if no row has these fields, but other rows of the series exist.
        Default: raise MissingRows.
    **fields
        Fields of the rows. A tuple allows several values.

    Returns
    -------
    Quantity
        The quantity.
    """

    def find(data: Evidence) -> Numbers:
        groups: dict[Place, list[float]] = {}
        try:
            found = data.rows(experiment, **fields)
        except MissingRows:
            if none is None:
                raise
            data.rows(experiment, series=fields["series"])
            return {(): none}
        for row in found:
            place = tuple(part(row) if callable(part) else getattr(row, part) for part in by)
            groups.setdefault(place, []).append(measured(row, value))
        return {place: fold(values) for place, values in groups.items()}

    return Quantity(find, (experiment,))


def measured(row: Row, value: Callable[[Row], float]) -> float:
    """Return the number that the function `value` computes from a row.

    If the row was measured on a GPU, the result is a `Measured` number with a range. The ends of
    the range are computed from p20 and p80 of the row.
    """
    if row.machine in (MODEL, EMULATOR):
        return value(row)
    ranged = row.p20 is not None and row.p80 is not None
    ends = [value(replace(row, value=x)) for x in (row.p20, row.p80)] if ranged else [value(row)]
    return Measured(value(row), min(ends), max(ends), row.machine)


_PUBLISHED = {"seqlen_q": "seqlen", "seqlen_k": "seqlen", "Bc": "block_c", "pass_": "pass"}


def paper(*by: By, **wanted: Any) -> Quantity:
    """Return numbers that a paper publishes, as a quantity {place: number}.

    Parameters
    ----------
    *by : str or callable
        The columns by which the published numbers are told apart, such as "head_dim", "seqlen_q".
        Their values are the key of a number, such as (64, 512). A column is the name of a column of
        our rows, or a function that takes a line of published.csv and returns a value.
    **wanted
        Columns of figures/data/published.csv and their texts. A tuple allows several texts.

    Returns
    -------
    Quantity
        The published numbers by key. Numbers with equal keys are added.
    """

    def cell(line: Mapping[str, str], part: By) -> Any:
        if callable(part):
            return part(line)
        text = line[_PUBLISHED.get(part, part)]
        return {"true": True, "false": False}.get(text, int(text) if text.isdigit() else text)

    def find(_: Evidence) -> Numbers:
        lines, found = published_numbers.lookup(), dict[Place, float]()
        for name, want in wanted.items():
            allowed = want if isinstance(want, tuple) else (want,)
            lines = [line for line in lines if line[name] in allowed]
        for line in lines:
            place = tuple(cell(line, part) for part in by)
            found[place] = found.get(place, 0.0) + float(line["value"])
        return found

    return Quantity(find)
