"""Dictionaries by series, whose values for other units are derived from those of the first unit.

The name of a series is algorithm-unit or algorithm-unit-variant. A value, such as a label, is
written once, for the series of the first unit. The value for another unit's series follows from the
attributes of that unit (``fa_numba.choices.units``), also if the unit is registered later.
"""

from collections.abc import Callable, Mapping

from fa_numba.choices.units import UNITS, Unit

FIRST = next(iter(UNITS))


class OfSeries(dict[str, str]):
    """Maps the name of a series to a value. Values for units other than the first unit are derived.

    ``derived(unit, rest, value)`` returns the value for a series of another unit. ``rest`` is the
    name of the series without the unit, such as "fa1-splits". ``value`` is the value of the series
    that has the first unit instead, or "" if there is none. If ``derived`` returns "", the series
    has no value.
    """

    def __init__(self, own: Mapping[str, str], derived: Callable[[Unit, str, str], str]) -> None:
        super().__init__(own)
        self._derived = derived

    def __missing__(self, series: str) -> str:
        algorithm, *rest = series.split("-")
        if not rest or rest[0] not in UNITS or rest[0] == FIRST:
            raise KeyError(series)
        unit, variant = UNITS[rest[0]], rest[1:]
        of_first = self.get("-".join((algorithm, FIRST, *variant)), "")
        value = self._derived(unit, "-".join((algorithm, *variant)), of_first)
        if not value:
            raise KeyError(series)
        return value

    def add(self, series: str) -> None:
        """Store the derived value of a series, so that ``in`` and ``get`` find the series too."""
        self[series] = self[series]

    def of(self, series: str) -> str | None:
        """Return the value of a series, or None if it has none."""
        try:
            return self[series]
        except KeyError:
            return None
