"""The emulator's versions of `cuda`, `math` and the numba types, which a rewritten kernel uses."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numba
import numpy as np

from .conversions import rounding, wrapped
from .errors import UninitialisedRead
from .groups import FULL, WARP
from .lanes import each, to_bool, to_float, to_int, typed

CASTS: dict[str, Callable[[Any], Any]] = {
    f"{sign}int{bits}": wrapped(bits, not sign) for sign in ("", "u") for bits in (8, 16, 32, 64)
}

CASTS |= {f"float{8 * to().itemsize}": rounding(to) for to in (np.float16, np.float32, np.float64)}
CASTS["bool"] = partial(to_bool)
_DTYPES: dict[Any, np.dtype] = {cast: np.dtype(name) for name, cast in CASTS.items()}
_DTYPES[float] = np.dtype("float32")


def element_type(dtype: Any) -> np.dtype:
    """Return the NumPy dtype of an array's element type: a cast, a numba type or a NumPy dtype."""
    known = _DTYPES.get(dtype)
    if known is not None:
        return known
    return np.dtype(str(dtype)) if isinstance(dtype, numba.types.Type) else np.dtype(dtype)


def _space(make: Callable[[Any, Any], Any]) -> SimpleNamespace:
    """Return `cuda.shared` or `cuda.local`."""
    return SimpleNamespace(array=lambda shape, dtype, alignment=None: make(shape, dtype))


# `cuda.atomic`, of global memory: the old value comes back. Atomics never race with each other.
ATOMIC = SimpleNamespace(add=lambda target, index, value: target.atomic_add(index, value))


def _settled(name: str) -> Callable[..., float]:
    """Return math's function, with NumPy's inf or NaN where math raises, as on a GPU."""
    exact: Any = getattr(math, name)
    of_numpy: Any = getattr(np, "power" if name == "pow" else name)

    def of_numbers(*numbers: float) -> float:
        try:
            return exact(*numbers)
        except (OverflowError, ValueError):
            return float(of_numpy(*map(float, numbers)))

    of_numbers.__name__ = name
    return of_numbers


def _whole(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a step function of NumPy, which returns a float as on a GPU."""
    return lambda x: typed(function(to_float(x)), x)


def absolute(x: Any) -> Any:
    """Return the absolute value as a float."""
    return typed(to_float(abs(x)), x)


_RAISING = ["exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt", "sin", "cos", "tan"]
_RAISING += ["sinh", "cosh", "pow"]
SETTLED = {name: _settled(name) for name in _RAISING}
_EVERY = {n: each(f) if callable(f) else f for n, f in vars(math).items() if n[0] != "_"}
_EVERY |= {name: each(function) for name, function in SETTLED.items()}
_EVERY |= {name: _whole(getattr(np, name)) for name in ("floor", "ceil", "trunc")}
_EVERY["fabs"] = absolute

# `math`, with inf and nan where Python raises and the GPU does not.
MATH = SimpleNamespace(**_EVERY)


class Namespace:
    """The emulator's `cuda` for one launch. `run.py` sets the indices at every switch of groups."""

    def __init__(self, context: Any) -> None:
        self._context = context
        indices = ((0, 0, 0), (0, 0, 0), context.block_shape, context.grid)  # `threadIdx` of lanes
        self.threadIdx, self.blockIdx, self.blockDim, self.gridDim = (
            SimpleNamespace(x=x, y=y, z=z) for x, y, z in indices
        )
        self.laneid: Any = 0
        self.shared, self.local = _space(context.static_array), _space(context.local_array)
        self.atomic = ATOMIC

    def grid(self, ndim: int) -> Any:
        """Return the index of the thread in the grid, for one to three axes."""
        b, d, t = self.blockIdx, self.blockDim, self.threadIdx
        place = (b.x * d.x + t.x, b.y * d.y + t.y, b.z * d.z + t.z)
        return place[0] if ndim == 1 else place[:ndim]

    def syncthreads(self) -> None:
        """Wait for all threads of the thread block."""
        self._context.barrier()

    def syncwarp(self, mask: int = FULL) -> None:
        """Wait for lanes of the warp.

        If all its lanes take part, this also orders their accesses.
        """
        self._context.sync_warp(mask)

    def shfl_sync(self, mask: int, value: Any, src_lane: Any) -> Any:
        """Return the value of another lane of the warp."""
        return self._shuffle("shfl_sync", mask, value, to_int(src_lane) % WARP)

    def shfl_xor_sync(self, mask: int, value: Any, lane_mask: Any) -> Any:
        """Return the value of the lane whose number differs in the bits of `lane_mask`."""
        context = self._context
        plain = value.__class__ is np.ndarray and lane_mask.__class__ is int and mask == FULL
        if plain and 0 <= lane_mask < WARP and context.whole_warps():
            context.instruction("shuffle")  # nobody waits, and every lane is there
            return value[context.group.crossed(lane_mask)]
        return self._shuffle("shfl_xor_sync", mask, value, self.laneid ^ to_int(lane_mask))

    def _shuffle(self, operation: str, mask: int, value: Any, source: Any) -> Any:
        context = self._context
        context.instruction("shuffle")

        def resolve(
            values: list[np.ndarray], present: np.ndarray, _: int
        ) -> tuple[np.ndarray, ...]:
            value, source = values
            inside = source & WARP - 1
            there = np.take_along_axis(present, inside, 1) & (inside == source)
            return np.take_along_axis(value, inside, 1), there

        source = np.broadcast_to(source, context.group.count)
        taken, there = context.collective(operation, mask, (value, source), resolve)
        lane = context.first_lane_where(~there)
        if lane >= 0:
            text = (
                f"{operation} reads lane {int(source[lane])}, which does not take part in the "
                "call. Let the lane make the call too, or read another lane"
            )
            raise context.fault(UninitialisedRead, text, None, lane)
        return taken
