"""What the series of all units have in common: a value is written once, for the first unit.

A series is algorithm-unit or algorithm-unit-variant. The value of another unit's series follows
from what the unit says of itself (``fa_numba.choices.units``), also if the unit is registered
later.
"""

from collections.abc import Callable, Mapping

from fa_numba.choices.units import UNITS, Unit

FIRST = next(iter(UNITS))


class OfSeries(dict[str, str]):
    """Values by the name of a series.

    ``derived(unit, rest, value)`` returns the value of a unit's series. ``rest`` is the name of the
    series without the unit, such as "fa1-splits". ``value`` is what the same series of the first
    unit has, or "". A missing series has the value "" if ``derived`` returns it.
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
        """Store the value of a series, so that the series is found by ``in`` and ``get`` too."""
        self[series] = self[series]

    def of(self, series: str) -> str | None:
        """Return the value of a series, or None if it has none."""
        try:
            return self[series]
        except KeyError:
            return None
