"""What `cuda`, `libdevice`, `math` and the numba types are to an emulated kernel."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numba
import numpy as np

from .conversions import rounding, wrapped
from .errors import UninitialisedRead
from .groups import FULL, WARP
from .lanes import each, each_pair, fma, to_bool, to_float, to_int, typed

CASTS: dict[str, Callable[[Any], Any]] = {
    f"{sign}int{bits}": wrapped(bits, not sign) for sign in ("", "u") for bits in (8, 16, 32, 64)
}

CASTS |= {f"float{8 * to().itemsize}": rounding(to) for to in (np.float16, np.float32, np.float64)}
CASTS["bool"] = partial(to_bool)
_DTYPES: dict[Any, np.dtype] = {cast: np.dtype(name) for name, cast in CASTS.items()}
_DTYPES[float] = np.dtype("float32")


def element_type(dtype: Any) -> np.dtype:
    """The NumPy dtype of an array's element type: a rebound or a numba type, or a NumPy dtype."""
    known = _DTYPES.get(dtype)
    if known is not None:
        return known
    return np.dtype(str(dtype)) if isinstance(dtype, numba.types.Type) else np.dtype(dtype)


class Dim3:
    """An index or extent in three axes; `threadIdx` is that of the lanes that run."""

    __slots__ = ("x", "y", "z")

    def __init__(self, x: Any, y: Any, z: Any) -> None:
        self.x, self.y, self.z = x, y, z


def _space(make: Callable[[Any, Any], Any]) -> SimpleNamespace:
    """`cuda.shared` or `cuda.local`"""
    return SimpleNamespace(array=lambda shape, dtype, alignment=None: make(shape, dtype))


class Atomics:
    """`cuda.atomic`: each returns the old value. Atomics never race with each other."""

    def __init__(self, context: Any) -> None:
        self._context = context

    def add(self, target: Any, index: Any, value: Any) -> Any:
        return target.atomic(index, lambda old, x: old + x, value)

    def sub(self, target: Any, index: Any, value: Any) -> Any:
        return target.atomic(index, lambda old, x: old - x, value)

    def max(self, target: Any, index: Any, value: Any) -> Any:
        return target.atomic(index, fmax, value)

    def min(self, target: Any, index: Any, value: Any) -> Any:
        return target.atomic(index, fmin, value)

    def exch(self, target: Any, index: Any, value: Any) -> Any:
        self._context.locks = True
        old = target.atomic(index, lambda old, x: x, value)
        self._context.under(old == value, self._context.give_way)  # as below
        return old

    def cas(self, target: Any, index: Any, expected: Any, value: Any) -> Any:
        def exchanged(old: Any, expected: Any, value: Any) -> Any:
            return value if old == expected else old

        self._context.locks = True
        old = target.atomic(index, exchanged, expected, value)
        # most likely a lock that another thread holds
        self._context.under(old != expected, self._context.give_way)
        return old


def _extreme(beyond: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """The larger or the smaller; of a number and a NaN the number, as on the GPU."""

    def of_lanes(a: Any, b: Any) -> Any:
        if a.__class__ is np.ndarray or b.__class__ is np.ndarray:
            return np.where((a != a) | beyond(b, a), b, a)
        return b if a != a or beyond(b, a) else a

    return of_lanes


fmax, fmin = _extreme(operator.gt), _extreme(operator.lt)


def _divide(a: float, b: float) -> float:
    if b == 0.0:
        return math.nan if a == 0.0 or a != a else math.copysign(math.inf, a) * math.copysign(1, b)
    return a / b


def divide(a: Any, b: Any) -> Any:
    """a / b, as the GPU divides: inf or NaN where Python raises."""
    if a.__class__ is np.ndarray or b.__class__ is np.ndarray:
        return np.divide(a, b)
    return _divide(a, b)


def _never(function: Callable[..., float]) -> Callable[[float], float]:
    """inf where Python raises OverflowError."""

    def of_one(x: float) -> float:
        try:
            return function(x)
        except OverflowError:
            return math.inf

    return of_one


def _logarithm(function: Callable[[float], float]) -> Callable[[float], float]:
    def log(x: float) -> float:
        if x > 0.0:
            return function(x)
        return -math.inf if x == 0.0 else math.nan

    return log


def _sqrt(x: float) -> float:
    return math.sqrt(x) if x >= 0.0 else math.nan


def _power(x: float, y: float) -> float:
    try:
        return math.pow(x, y)
    except OverflowError:
        return math.inf
    except ValueError:
        return math.inf if x == 0.0 else math.nan


exp, exp2, expm1 = (each(_never(f)) for f in (math.exp, lambda x: 2.0**x, math.expm1))
log, log2, log10 = (each(_logarithm(f)) for f in (math.log, math.log2, math.log10))
sqrt, power = each(_sqrt), each_pair(_power)


def rsqrt(x: Any) -> Any:
    return divide(1.0, sqrt(x))


def reciprocal(x: Any) -> Any:
    return divide(1.0, x)


def absolute(x: Any) -> Any:
    return typed(to_float(abs(x)), x)


_ONE = ("tanh", "erf", "sin", "cos", "tan", "sinh", "cosh", "atan", "floor", "ceil", "trunc")
_EVERY = {name: each(getattr(math, name)) for name in _ONE}


def _either(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of math's for lanes too, of one number."""

    def of_lanes(*args: Any) -> Any:
        if len(args) == 1 and args[0].__class__ is np.ndarray:
            return typed(np.array([function(x) for x in args[0].tolist()]), args[0])
        return typed(function(*args), *args)

    return of_lanes


# `math`, with inf and nan where Python raises and the GPU does not.
MATH = SimpleNamespace(
    **{
        name: _either(value) if callable(value) else value
        for name, value in vars(math).items()
        if not name.startswith("_")
    }
    | {"exp": exp, "exp2": exp2, "expm1": expm1, "log": log, "log2": log2, "log10": log10}
    | {"sqrt": sqrt, "pow": power, "fma": fma, "fabs": absolute}
    | _EVERY
)

# `cuda.libdevice`: the single-precision functions that attention kernels use.
LIBDEVICE = SimpleNamespace(
    fmaxf=fmax, fminf=fmin, fmaf=fma, fabsf=absolute, floorf=_EVERY["floor"],
    ceilf=_EVERY["ceil"],
    expf=exp, exp2f=exp2, expm1f=expm1, fast_expf=exp, powf=power, fast_powf=power,
    logf=log, log2f=log2, log10f=log10, fast_logf=log, fast_log2f=log2,
    tanhf=_EVERY["tanh"], erff=_EVERY["erf"], sqrtf=sqrt, rsqrtf=rsqrt, frcp_rn=reciprocal,
    fdividef=divide, fast_fdividef=divide, fdiv_rn=divide,
)  # fmt: skip


class Namespace:
    """`cuda` for one launch. `run.py` sets the indices at every switch of groups."""

    warpsize = WARP
    fma = staticmethod(fma)

    def __init__(self, context: Any) -> None:
        self._context = context
        self.threadIdx, self.blockIdx = Dim3(0, 0, 0), Dim3(0, 0, 0)
        self.blockDim, self.gridDim = Dim3(*context.block_shape), Dim3(*context.grid)
        self.laneid: Any = 0
        self.shared, self.local = _space(context.static_array), _space(context.local_array)
        self.atomic, self.libdevice = Atomics(context), LIBDEVICE

    def grid(self, ndim: int) -> Any:
        b, d, t = self.blockIdx, self.blockDim, self.threadIdx
        place = (b.x * d.x + t.x, b.y * d.y + t.y, b.z * d.z + t.z)
        return place[0] if ndim == 1 else place[:ndim]

    def gridsize(self, ndim: int) -> Any:
        d, g = self.blockDim, self.gridDim
        size = (d.x * g.x, d.y * g.y, d.z * g.z)
        return size[0] if ndim == 1 else size[:ndim]

    # ---- barriers

    def syncthreads(self) -> None:
        self._context.barrier("syncthreads")

    def syncthreads_count(self, predicate: Any) -> int:
        return self._context.barrier("syncthreads_count", predicate)

    def syncthreads_and(self, predicate: Any) -> int:
        return self._context.barrier("syncthreads_and", predicate)

    def syncthreads_or(self, predicate: Any) -> int:
        return self._context.barrier("syncthreads_or", predicate)

    def syncwarp(self, mask: int = FULL) -> None:
        """Orders the memory of the warp when all its lanes take part; with fewer it only waits."""
        self._context.sync_warp(mask)

    def threadfence(self) -> None:
        pass

    threadfence_block = threadfence_system = threadfence

    def nanosleep(self, ns: int) -> None:
        self._context.give_way()

    # ---- warp collectives; they do not order memory

    def shfl_sync(self, mask: int, value: Any, src_lane: Any) -> Any:
        return self._shuffle("shfl_sync", mask, value, to_int(src_lane) % WARP)

    def shfl_xor_sync(self, mask: int, value: Any, lane_mask: Any) -> Any:
        context = self._context
        plain = value.__class__ is np.ndarray and lane_mask.__class__ is int and mask == FULL
        if plain and 0 <= lane_mask < WARP and context.whole_warps():
            context.instruction("shuffle")  # nobody waits, and every lane is there
            context._stale = 0
            return value[context.group.crossed(lane_mask)]
        return self._shuffle("shfl_xor_sync", mask, value, self.laneid ^ to_int(lane_mask))

    def shfl_up_sync(self, mask: int, value: Any, delta: Any) -> Any:
        lane = self.laneid
        source = lane - to_int(delta)
        return self._shuffle("shfl_up_sync", mask, value, np.where(source >= 0, source, lane))

    def shfl_down_sync(self, mask: int, value: Any, delta: Any) -> Any:
        lane = self.laneid
        source = lane + to_int(delta)
        return self._shuffle("shfl_down_sync", mask, value, np.where(source < WARP, source, lane))

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
            text = f"{operation} reads lane {int(source[lane])}, which does not take part"
            raise context.fault(UninitialisedRead, text, None, lane)
        return taken

    def ballot_sync(self, mask: int, predicate: Any) -> Any:
        bits = 1 << np.arange(WARP, dtype=np.int64)
        return self._vote("ballot_sync", mask, predicate, lambda votes, _: (votes * bits).sum(1))

    def all_sync(self, mask: int, predicate: Any) -> Any:
        return self._vote("all_sync", mask, predicate, lambda votes, here: (votes | ~here).all(1))

    def any_sync(self, mask: int, predicate: Any) -> Any:
        return self._vote("any_sync", mask, predicate, lambda votes, here: votes.any(1))

    def eq_sync(self, mask: int, predicate: Any) -> Any:
        def alike(votes: np.ndarray, here: np.ndarray) -> Any:
            return (votes | ~here).all(1) | ~votes.any(1)

        return self._vote("eq_sync", mask, predicate, alike)

    def _vote(
        self,
        operation: str,
        mask: int,
        predicate: Any,
        count: Callable[[np.ndarray, np.ndarray], Any],
    ) -> Any:
        def resolve(
            values: list[np.ndarray], present: np.ndarray, _: int
        ) -> tuple[np.ndarray, ...]:
            result = count((values[0] != 0) & present, present)
            return (np.repeat(result[:, None], WARP, 1),)

        self._context.instruction("shuffle")
        (found,) = self._context.collective(operation, mask, (predicate,), resolve)
        first = found[self._context.first_lane()]
        return first.item() if (found == first).all() else found

    def activemask(self) -> Any:
        """The lanes of the warp that have not returned."""
        group = self._context.group
        bits = group.in_warps(group.alive(), False) * (1 << np.arange(WARP, dtype=np.int64))
        return group.of_warps(np.repeat(bits.sum(1)[:, None], WARP, 1))
