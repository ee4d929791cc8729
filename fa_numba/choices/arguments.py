"""The classes of arguments of kernel launches, such as arrays of the workspace."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from fa_numba.dtypes import STORED


@dataclass(frozen=True)
class Buffer:
    """An array that the launches of a plan use: an array of the workspace, or an output.

    Attributes
    ----------
    name : str
        Name of the array in the plan, such as "L" or "dQ".
    shape : tuple of int
        Shape of the array.
    dtype : str
        Name of the dtype: "float32", "float16", "bfloat16", "int32", "bool" or "uint8".
    zeroed : bool
        Whether the array is filled with zeros before the first launch.
    pitch : int or None
        Number of elements from the start of a row to the start of the next row. None means that
        rows follow each other without a gap.
    like : str
        Name of the input whose shape the array takes, or "" if the array has ``shape``.
    allocated : tuple of int
        Shape in memory, which includes the gaps between rows.
    nbytes : int
        Size in memory in bytes.
    host_dtype : str
        NumPy dtype in which kernels see the array.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    zeroed: bool = False
    pitch: int | None = None
    like: str = ""

    @property
    def allocated(self) -> tuple[int, ...]:
        """Shape in memory, which includes the gaps between rows."""
        return (*self.shape[:-1], self.pitch or self.shape[-1])

    @property
    def nbytes(self) -> int:
        """Size in memory in bytes."""
        return np.dtype(self.host_dtype).itemsize * math.prod(self.allocated)

    @property
    def host_dtype(self) -> str:
        """NumPy dtype in which kernels see the array; uint16 stands for float16 and bfloat16."""
        return STORED[self.dtype].host


@dataclass(frozen=True)
class Untouched:
    """Stand-in for an array that a compiled kernel takes but never reads or writes.

    It has a shape and a dtype, and no memory.
    """

    shape: tuple[int, ...]
    dtype: str = "float32"


@dataclass(frozen=True)
class Boxes:
    """An argument for an array that the kernel copies in boxes, described by a tensor map.

    A box is a block of rows and columns that the copy engine (TMA) moves in one copy. The launch
    passes the array as a ``device.TiledArray``.

    Attributes
    ----------
    name : str
        Name of the array.
    rows : int
        Number of rows of a box.
    dtype : str
        Dtype of the array; "" stands for the dtype of the call.
    heads : int
        Number of query heads that share a row tile. If it is above 1, a box contains rows of each
        of these heads.
    ends : bool
        Whether a box stops at the end of a sequence, so that it has no rows of the next sequence.
    """

    name: str
    rows: int
    dtype: str = ""
    heads: int = 1
    ends: bool = False


@dataclass(frozen=True)
class Grouped:
    """An argument that passes an array with the heads of each group next to each other.

    The launch changes the shape from (batch, H, rows, ...) to (batch, H / heads, rows, heads, ...),
    by ``device.grouped``. Kernels take arrays in this form if the rows of one tile belong to
    several heads.

    Attributes
    ----------
    name : str
        Name of the array.
    heads : int
        Number of heads of a group.
    """

    name: str
    heads: int


# An argument of a launch: the name of an array or of a number of the call, a number, a stand-in for
# an unused array, an array that is copied in boxes, or an array with grouped heads.
Argument = str | int | float | Untouched | Boxes | Grouped
