"""The emulator's replacements of `cuda`, `math` and the numba types, for rewritten kernels.

`rebind.py` replaces the names of `numba.cuda`, `math` and the numba types in a kernel by the
objects of this module.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numba
import numpy as np

from . import bits
from .atomics import Atomics
from .conversions import rounding, wrapped
from .errors import NotEmulated
from .groups import FULL
from .lanes import each, fma, to_bool, to_float, to_int, typed
from .warp_functions import WarpFunctions

CASTS: dict[str, Callable[[Any], Any]] = {
    f"{sign}int{bits}": wrapped(bits, not sign) for sign in ("", "u") for bits in (8, 16, 32, 64)
}

CASTS |= {f"float{8 * to().itemsize}": rounding(to) for to in (np.float16, np.float32, np.float64)}
CASTS |= {f"complex{8 * to().itemsize}": rounding(to) for to in (np.complex64, np.complex128)}
CASTS["bool"] = partial(to_bool)
# Maps the id of a NumPy type to the cast: kernels write `np.int32(x)`.
NUMPY_CASTS = {id(np.dtype(name).type): cast for name, cast in CASTS.items()}
_DTYPES: dict[Any, np.dtype] = {cast: np.dtype(name) for name, cast in CASTS.items()}
_DTYPES |= {float: np.dtype("float32"), to_float: np.dtype("float64"), to_int: np.dtype("int64")}


def element_type(dtype: Any) -> np.dtype:
    """Return the NumPy dtype for the `dtype` argument of an array that a kernel makes.

    `dtype` is a cast of `CASTS`, a numba type, a NumPy dtype, or Python's `float`, which means
    float32. `dtype` may also be `to_float` or `to_int`. These two functions replace the names
    ``float`` and ``int`` in a kernel, and mean float64 and int64.
    """
    known = _DTYPES.get(dtype)
    if known is not None:
        return known
    if isinstance(dtype, numba.types.Type):
        return numba.np.numpy_support.as_dtype(dtype)
    return np.dtype(dtype)


def _settled(name: str) -> Callable[..., float]:
    """Return a function of `math` that never raises: a GPU returns inf or NaN instead.

    `name` is the name of a function of `math`. Where `math` raises, the result is NumPy's inf or
    NaN.
    """
    exact: Any = getattr(math, name)
    of_numpy: Any = getattr(np, "power" if name == "pow" else name)

    def of_numbers(*numbers: float) -> float:
        """Return the value of the function of `math` for these arguments, or inf or NaN."""
        try:
            return exact(*numbers)
        except (OverflowError, ValueError):
            return float(of_numpy(*map(float, numbers)))

    of_numbers.__name__ = name
    return of_numbers


def _whole(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a rounding function, such as `np.floor`, that returns a float as on a GPU."""
    return lambda x: typed(function(to_float(x)), x)


def absolute(x: Any) -> Any:
    """Return the absolute value as a float, for each lane (`math.fabs`)."""
    return typed(to_float(abs(x)), x)


_RAISING = ["exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt", "sin", "cos", "tan"]
_RAISING += ["sinh", "cosh", "pow"]
SETTLED = {name: _settled(name) for name in _RAISING}
_EVERY = {n: each(f) if callable(f) else f for n, f in vars(math).items() if n[0] != "_"}
_EVERY |= {name: each(function) for name, function in SETTLED.items()}
_EVERY |= {name: _whole(getattr(np, name)) for name in ("floor", "ceil", "trunc")}
_EVERY["fabs"] = absolute

# The emulator's `math`: it returns inf or NaN where Python's `math` raises.
MATH = SimpleNamespace(**_EVERY)


class Arrays:
    """The emulator's `cuda.shared` or `cuda.local`.

    `make` is the method of the launch that makes an array from a shape and a dtype.
    """

    def __init__(self, make: Callable[[Any, Any], Any]) -> None:
        self._make = make

    def array(self, shape: Any, dtype: Any, alignment: int | None = None) -> Any:
        """Return the array that this call makes; `alignment` is ignored.

        See `Context.static_array` (shared memory) and `Context.local_array` (local memory).
        """
        return self._make(shape, dtype)


class Namespace(WarpFunctions):
    """The emulator's `cuda` for one launch.

    `run.py` sets `threadIdx` and `laneid` each time another group of lanes runs. `context.py` sets
    `blockIdx` when thread blocks begin.
    """

    popc, clz, ffs, brev = map(staticmethod, (bits.popc, bits.clz, bits.ffs, bits.brev))
    cbrt, selp, fma = map(staticmethod, (bits.cbrt, bits.selp, fma))

    def __init__(self, context: Any) -> None:
        self._context = context
        indices = ((0, 0, 0), (0, 0, 0), context.block_shape, context.grid)
        self.threadIdx, self.blockIdx, self.blockDim, self.gridDim = (
            SimpleNamespace(x=x, y=y, z=z) for x, y, z in indices
        )
        self.laneid: Any = 0
        self.shared, self.local = Arrays(context.static_array), Arrays(context.local_array)
        self.const = SimpleNamespace(array_like=context.constant)
        self.atomic = Atomics(context)
        self.cg = SimpleNamespace(this_grid=lambda: GridGroup(context))

    def __getattr__(self, name: str) -> Any:
        raise missing(self._context, f"cuda.{name}")

    def grid(self, ndim: int) -> Any:
        """Return the index of each thread in the grid along `ndim` axes: a number or a tuple."""
        b, d, t = self.blockIdx, self.blockDim, self.threadIdx
        return self._axes(ndim, (b.x * d.x + t.x, b.y * d.y + t.y, b.z * d.z + t.z))

    def gridsize(self, ndim: int) -> Any:
        """Return the number of threads of the grid along `ndim` axes: a number or a tuple."""
        g, d = self.gridDim, self.blockDim
        return self._axes(ndim, (g.x * d.x, g.y * d.y, g.z * d.z))

    def _axes(self, ndim: int, values: tuple[Any, ...]) -> Any:
        if ndim not in (1, 2, 3):
            raise ValueError(f"ndim must be 1, 2 or 3, got {ndim!r}")
        return values[0] if ndim == 1 else values[:ndim]

    def syncthreads(self) -> None:
        """Wait for all threads of the thread block."""
        self._context.barrier()

    def syncthreads_count(self, predicate: Any) -> Any:
        """Wait for all threads of the block; return how many of them have a true predicate."""
        return self._context.barrier("syncthreads_count", predicate)

    def syncthreads_and(self, predicate: Any) -> Any:
        """Wait for all threads of the block; return 1 if the predicate is true in all, else 0."""
        count = self._context.barrier("syncthreads_and", predicate)
        return to_int(count == self._context.threads)

    def syncthreads_or(self, predicate: Any) -> Any:
        """Wait for all threads of the block; return 1 if the predicate is true in any, else 0."""
        return to_int(self._context.barrier("syncthreads_or", predicate) != 0)

    def syncwarp(self, mask: int = FULL) -> None:
        """Wait for the lanes of the warp whose bits are set in `mask`.

        If all lanes of the warp take part, the call also orders their accesses to memory.
        """
        self._context.sync_warp(mask)

    def threadfence(self) -> None:
        """Do nothing, because each store of the emulator is visible to all threads at once."""

    threadfence_block = threadfence_system = threadfence

    def nanosleep(self, ns: Any) -> None:
        """Do nothing, because the emulator has no clock."""


class GridGroup:
    """The emulator's ``cuda.cg.this_grid()``: all threads of the grid."""

    def __init__(self, context: Any) -> None:
        self._context = context

    def sync(self) -> None:
        """Wait for all threads of the grid that have not returned."""
        self._context.sync_grid()

    def merged(self, mask: Any, other: Any) -> GridGroup:
        """Return this object: all lanes have the same grid, also after a branch."""
        return self


def missing(context: Any, name: str) -> NotEmulated:
    """Return the error for a name of numba.cuda that the emulator does not support."""
    error: NotEmulated = context.fault(
        NotEmulated,
        f"{name} is not emulated. The table in fa_numba/emulator/README.md lists the functions "
        "that a kernel can call here. Write the kernel with these functions, or run it on a GPU",
    )
    return error


class Missing:
    """A function or module of numba.cuda that the emulator does not support.

    Calling the object, or reading an attribute, raises `NotEmulated`.
    """

    def __init__(self, context: Any, name: str) -> None:
        self._context, self._name = context, name

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Raise `NotEmulated`."""
        raise missing(self._context, self._name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise missing(self._context, f"{self._name}.{name}")
