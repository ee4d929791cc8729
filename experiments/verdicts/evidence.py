"""Stored rows by what is asked of them, and quantities: numbers by place, made from such rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
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


Numbers = Mapping[Place, float]
Curve = list[tuple[Place, float]]  # by the last part of its places


@dataclass(frozen=True)
class Quantity:
    """Numbers by place, of rows of these experiments. `find` raises MissingRows."""

    find: Callable[[Evidence], Numbers]
    experiments: tuple[str, ...] = ()

    def __truediv__(self, other: Quantity) -> Quantity:
        return self._with(other, lambda a, b: a / b)

    def __sub__(self, other: Quantity) -> Quantity:
        return self._with(other, lambda a, b: a - b)

    def only(self, other: Quantity) -> Quantity:
        """At the places that another quantity has."""
        return self._with(other, lambda a, _: a)

    def _with(self, other: Quantity, made: Callable[[float, float], float]) -> Quantity:
        """Place by place, where both have one; a number without a place stands beside all."""

        def find(data: Evidence) -> Numbers:
            mine, theirs = self.find(data), other.find(data)
            theirs = dict.fromkeys(mine, theirs[()]) if set(theirs) == {()} else theirs
            return {p: made(value, theirs[p]) for p, value in mine.items() if p in theirs}

        return Quantity(find, tuple(dict.fromkeys((*self.experiments, *other.experiments))))

    def where(self, holds: Callable[..., bool]) -> Quantity:
        """At the places, given part by part, of which it holds."""
        return self._along(lambda curve: {p: v for p, v in curve if holds(*p)})

    def over(self, at: int) -> Quantity:
        """Over the first (0) or the last (-1) number of its series, which is left out."""
        return self._along(lambda c: {p: v / c[at][1] for p, v in c if p != c[at][0]})

    def steps(self) -> Quantity:
        """From each number of a series to the next: how many times as much."""
        return self._along(lambda curve: {b[0]: b[1] / a[1] for a, b in pairwise(curve)})

    def power(self) -> Quantity:
        """Of the last part of its places: the power with which a series grows from end to end."""

        def made(curve: Curve) -> Numbers:
            (start, first), (end, last) = curve[0], curve[-1]
            return {start[:-1]: math.log(last / first) / math.log(end[-1] / start[-1])}

        return self._along(made)

    def most(self) -> Quantity:
        return self._along(lambda curve: {curve[0][0][:-1]: max(value for _, value in curve)})

    def _along(self, made: Callable[[Curve], Numbers]) -> Quantity:
        """Each series over the last part of its places, made anew."""

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

    return Quantity(find, (experiment,))


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
            if all(line[n] in (x if isinstance(x, tuple) else (x,)) for n, x in wanted.items()):
                place = tuple(cell(line, part) for part in by)
                found[place] = found.get(place, 0.0) + float(line["value"])
        return found

    return Quantity(find)
