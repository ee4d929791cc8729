"""A dictionary from series to values, such as labels, that derives some values from others.

The name of a series is algorithm-unit or algorithm-unit-variant, such as "fa1-mma-splits". The
values are written only for series of the first registered unit ("simt"). The value for a series of
another unit is derived from two things: the value for the series of the first unit, and the
attributes of the other unit (``fa_numba.choices.units``). A unit that is registered later therefore
needs no values of its own.
"""

from collections.abc import Callable, Mapping

from fa_numba.choices.units import UNITS, Unit

FIRST = next(iter(UNITS))


class OfSeries(dict[str, str]):
    """A dictionary from the name of a series to a value, such as a label.

    Parameters
    ----------
    own : mapping of str to str
        Values that are written explicitly, usually for series of the first unit ("simt").
    derived : callable
        Function ``derived(unit, rest, value)`` that computes the value of any other series, such as
        "fa1-mma-splits". ``unit`` is the `Unit` object of the series' unit. ``rest`` is the name
        without the unit ("fa1-splits"). ``value`` is the value of the same series on the first unit
        ("fa1-simt-splits"), or "" if there is none. The function returns "" if the series has no
        value.
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
        """Compute the value of a series without an explicit value, and store it in the dictionary.

        Afterwards, ``in`` and ``get`` find the series too.
        """
        self[series] = self[series]

    def of(self, series: str) -> str | None:
        """Return the value of a series, such as the label or the colour of its line.

        The value is a stored value, or else a derived value, as the class describes. Return None if
        there is neither.
        """
        try:
            return self[series]
        except KeyError:
            return None
