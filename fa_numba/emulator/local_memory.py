"""A thread's own arrays, which find uninitialised reads and accesses out of bounds."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from .conversions import converter
from .errors import UninitialisedRead

if TYPE_CHECKING:
    from .context import Context


class LocalArray:
    """A thread's own array, 1-D or n-D; None marks an element that was never written."""

    __slots__ = ("shape", "dtype", "data", "cell", "convert", "ctx", "site")

    def __init__(
        self, ctx: Context, site: tuple[int, int], shape: tuple[int, ...], dtype: np.dtype
    ) -> None:
        self.ctx, self.site, self.shape, self.dtype = ctx, site, shape, dtype
        self.data: list[Any] = [None] * prod(shape)
        self.cell = ctx.cell if dtype == np.float32 else None
        self.convert = converter(dtype) if self.cell is None else None

    @property
    def name(self) -> str:
        return self.ctx.target(self.site, "local array")

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def size(self) -> int:
        return len(self.data)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __getitem__(self, i: Any) -> Any:
        try:
            if i >= 0:
                value = self.data[i]
                if value is not None:
                    return value
        except IndexError:
            pass
        raise self._missing(i)

    def __setitem__(self, i: Any, value: Any) -> None:
        cell = self.cell
        if cell is not None:
            cell[0] = value
            value = cell[0]
        else:
            value = self.convert(value)  # type: ignore[misc]
        try:
            if i >= 0:
                self.data[i] = value
                return
        except IndexError:
            pass
        raise self._outside(i)

    def _outside(self, index: Any) -> Exception:
        return self.ctx.outside(self.name, self.shape, index)

    def _missing(self, index: Any) -> Exception:
        inside = isinstance(index, tuple) or 0 <= index < len(self.data)
        if not inside:
            return self._outside(index)
        text = f"{self.name}[{index}] is read, but was never written"
        return self.ctx.fault(UninitialisedRead, text, self.name)


class LocalTensor(LocalArray):
    """A local array of two or more dimensions."""

    __slots__ = ()

    def _flat(self, index: Any) -> int:
        if len(index) != len(self.shape):
            raise TypeError(f"{self.name} has {len(self.shape)} dimensions, indexed with {index!r}")
        e = 0
        for i, n in zip(index, self.shape, strict=True):
            if not 0 <= i < n:
                raise self._outside(index)
            e = e * n + i
        return e

    def __getitem__(self, index: Any) -> Any:
        value = self.data[self._flat(index)]
        if value is None:
            raise self._missing(index)
        return value

    def __setitem__(self, index: Any, value: Any) -> None:
        LocalArray.__setitem__(self, self._flat(index), value)
