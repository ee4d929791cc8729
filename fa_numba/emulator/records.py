"""Structured arrays (NumPy record dtypes) as a kernel sees them: one array for each field."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .errors import Unconverted, two_arrays
from .global_memory import GlobalArray
from .lanes import merge


class Records(Unconverted):
    """A structured array in global memory.

    ``a[i]["x"]``, ``a[i].x``, ``a["x"][i]`` and ``a.x[i]`` access one field. The counts list the
    field as the array ``a.x``.

    Parameters
    ----------
    name : str
        Name of the kernel's parameter.
    values : ndarray
        The caller's array, with a structured dtype.
    field : callable
        Takes a name and the array of one field, and returns the array that the kernel sees.
    """

    __slots__ = ("name", "shape", "ndim", "size", "dtype", "fields")

    def __init__(
        self, name: str, values: np.ndarray, field: Callable[[str, np.ndarray], GlobalArray]
    ) -> None:
        self.name, self.shape, self.ndim, self.size = name, values.shape, values.ndim, values.size
        self.dtype = values.dtype
        names = values.dtype.names or ()
        self.fields = {each: field(f"{name}.{each}", values[each]) for each in names}

    def __len__(self) -> int:
        return int(self.shape[0])

    def __getitem__(self, index: Any) -> Any:
        if index.__class__ is str:
            return self.fields[index]
        return Record(self, index)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self.fields:
            raise AttributeError(f"array {self.name} has no field {name!r}")
        return self.fields[name]

    def __setitem__(self, index: Any, value: Any) -> None:
        if value.__class__ is not Record or value._records.fields.keys() != self.fields.keys():
            raise TypeError(
                f"a value stored to an element of {self.name} must be a record with the fields "
                f"{', '.join(self.fields)}; or store its fields one by one"
            )
        for name, array in self.fields.items():
            array[index] = value[name]

    def merged(self, mask: Any, other: Any) -> Records:
        """Return this array after a branch. The variable must be this array in all lanes.

        Parameters
        ----------
        mask : ndarray of bool
            Lanes in which a variable is this array.
        other : object
            Value of the variable in the other lanes.

        Returns
        -------
        Records
            This array.

        Raises
        ------
        TypeError
            If `other` is another array.
        """
        if other is not self:
            raise TypeError(two_arrays(self, other))
        return self


class Record:
    """One element of a structured array. Its fields are loaded and stored one by one."""

    __slots__ = ("_records", "_index")

    def __init__(self, records: Records, index: Any) -> None:
        object.__setattr__(self, "_records", records)
        object.__setattr__(self, "_index", index)

    def __getitem__(self, name: str) -> Any:
        return self._records.fields[name][self._index]

    def __setitem__(self, name: str, value: Any) -> None:
        self._records.fields[name][self._index] = value

    def __getattr__(self, name: str) -> Any:
        return getattr(self._records, name)[self._index]

    def __setattr__(self, name: str, value: Any) -> None:
        self._records.fields[name][self._index] = value

    def merged(self, mask: Any, other: Any) -> Record:
        """Return the element to which a variable refers in each lane after a branch.

        Parameters
        ----------
        mask : ndarray of bool
            Lanes in which the variable is this element.
        other : object
            Value of the variable in the other lanes.

        Returns
        -------
        Record
            The element of each lane.

        Raises
        ------
        TypeError
            If `other` is not an element of the same array.
        """
        if other.__class__ is not Record or other._records is not self._records:
            raise TypeError(two_arrays(self._records, getattr(other, "_records", other)))
        return Record(self._records, merge(mask, other._index, self._index))
