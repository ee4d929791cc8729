"""Stored rows by what is asked of them, and quantities: numbers by place, made from such rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from experiments.lab.record import Row, published, select

from .rule import Place


class MissingRows(LookupError):
    """The rows that would decide a question are not there: which ones."""


class Evidence:
    """Stored rows of several experiments."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._rows: dict[str, list[Row]] = {}
        for row in rows:
            self._rows.setdefault(row.experiment, []).append(row)

    def rows(self, experiment: str, **fields: Any) -> list[Row]:
        """The rows with these fields, tuples allowing several. Raises MissingRows for none."""
        if not (found := select(self._rows.get(experiment, ()), **fields)):
            raise MissingRows(f"{experiment}: no rows with {fields}")
        return found


def _fits(value: Any, wanted: Any) -> bool:
    return value in wanted if isinstance(wanted, tuple) else bool(value == wanted)


Numbers = Mapping[Place, float]
Curve = list[tuple[Place, float]]  # by the last part of its places
BOTH: dict[str, Callable[[float, float], float]] = {
    "/": lambda a, b: a / b,
    "-": lambda a, b: a - b,
    "only": lambda a, _: a,
}
ALONG: dict[str, Callable[[Curve, Any], Numbers]] = {
    "where": lambda c, holds: {p: v for p, v in c if holds(*p)},
    "over": lambda c, at: {p: v / c[at][1] for p, v in c if p != c[at][0]},
    "steps": lambda c, _: {b[0]: b[1] / a[1] for a, b in pairwise(c)},
    "power": lambda c, _: {
        c[0][0][:-1]: math.log(c[-1][1] / c[0][1]) / math.log(c[-1][0][-1] / c[0][0][-1])
    },
    "most": lambda c, _: {c[0][0][:-1]: max(value for _, value in c)},
}


@dataclass(frozen=True)
class Quantity:
    """Numbers by place, of rows of these experiments. `how` it is made of its `parts`: "rows",
    "paper", or as BOTH or ALONG have it. `find` raises MissingRows.
    """

    how: str
    parts: tuple[Any, ...]
    find: Callable[[Evidence], Numbers]
    experiments: tuple[str, ...] = ()

    def __truediv__(self, other: Quantity) -> Quantity:
        return self._with("/", other)

    def __sub__(self, other: Quantity) -> Quantity:
        return self._with("-", other)

    def only(self, other: Quantity) -> Quantity:
        """At the places that another quantity has."""
        return self._with("only", other)

    def _with(self, how: str, other: Quantity) -> Quantity:
        """Place by place, where both have one; a number without a place stands beside all."""

        def find(data: Evidence) -> Numbers:
            mine, theirs = self.find(data), other.find(data)
            theirs = dict.fromkeys(mine, theirs[()]) if set(theirs) == {()} else theirs
            return {p: BOTH[how](value, theirs[p]) for p, value in mine.items() if p in theirs}

        experiments = tuple(dict.fromkeys((*self.experiments, *other.experiments)))
        return Quantity(how, (self, other), find, experiments)

    def where(self, holds: Callable[..., bool]) -> Quantity:
        """At the places, given part by part, of which it holds."""
        return self._along("where", holds)

    def over(self, at: int) -> Quantity:
        """Over the first (0) or the last (-1) number of its series, which is left out."""
        return self._along("over", at)

    def steps(self) -> Quantity:
        """From each number of a series to the next: how many times as much."""
        return self._along("steps")

    def power(self) -> Quantity:
        """Of the last part of its places: the power with which a series grows from end to end."""
        return self._along("power")

    def most(self) -> Quantity:
        return self._along("most")

    def _along(self, how: str, by: Any = None) -> Quantity:
        """Each series over the last part of its places, made anew."""

        def find(data: Evidence) -> Numbers:
            curves: dict[Place, Curve] = {}
            for place, value in sorted(self.find(data).items()):
                curves.setdefault(place[:-1], []).append((place, value))
            made = (ALONG[how](curve, by) for curve in curves.values())
            return {place: value for each in made for place, value in each.items()}

        return Quantity(how, (self, by), find, self.experiments)


By = str | Callable[[Any], Any]


def number(row: Row) -> float:
    return row.number


def rows(experiment: str, *by: By, value: Callable[[Row], float] = number,
         fold: Callable[[Sequence[float]], float] = sum, none: float | None = None,
         **fields: Any) -> Quantity:  # fmt: skip
    """Sum, or `fold`, of `value` of rows with these `fields` by columns; `none` if others are."""

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
            groups.setdefault(place, []).append(value(row))
        return {place: fold(values) for place, values in groups.items()}

    return Quantity("rows", (experiment, by, fields, value), find, (experiment,))


_PUBLISHED = {"seqlen_q": "seqlen", "seqlen_k": "seqlen", "Bc": "block_c", "pass_": "pass"}


def paper(*by: By, **wanted: Any) -> Quantity:
    """Published numbers, summed, of the lines with these columns, by columns of the store."""

    def cell(line: Mapping[str, str], part: By) -> Any:
        if callable(part):
            return part(line)
        text = line[_PUBLISHED.get(part, part)]
        return {"true": True, "false": False}.get(text, int(text) if text.isdigit() else text)

    def find(_: Evidence) -> Numbers:
        found: dict[Place, float] = {}
        for line in published.lookup():
            if all(_fits(line[name], want) for name, want in wanted.items()):
                place = tuple(cell(line, part) for part in by)
                found[place] = found.get(place, 0.0) + float(line["value"])
        return found

    return Quantity("paper", (by, wanted), find)
