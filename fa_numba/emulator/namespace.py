"""What `cuda`, `libdevice`, `math` and the numba types are to an emulated kernel."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numba
import numpy as np

from .conversions import wrapped
from .errors import UninitialisedRead
from .threads import FULL, WARP

if TYPE_CHECKING:
    from .context import Context

# float32(x) is a plain float: arithmetic is double between stores.
CASTS: dict[str, Callable[[Any], Any]] = {
    f"{sign}int{bits}": wrapped(bits, not sign) for sign in ("", "u") for bits in (8, 16, 32, 64)
}


def float64(value: Any) -> float:
    return float(value)


def float16(value: Any) -> float:
    return float(value)


def boolean(value: Any) -> bool:
    return bool(value)


_DTYPES: dict[Any, np.dtype] = {cast: np.dtype(name) for name, cast in CASTS.items()}
CASTS |= {"float32": float, "float64": float64, "float16": float16, "bool": boolean}
_DTYPES |= {
    float: np.dtype("float32"),
    float64: np.dtype("float64"),
    float16: np.dtype("float16"),
    boolean: np.dtype("bool"),
}


def element_type(dtype: Any) -> np.dtype:
    """The NumPy dtype of an array's element type: a rebound or a numba type, or a NumPy dtype."""
    known = _DTYPES.get(dtype)
    if known is not None:
        return known
    return np.dtype(str(dtype)) if isinstance(dtype, numba.types.Type) else np.dtype(dtype)


class Dim3:
    __slots__ = ("x", "y", "z")

    def __init__(self, x: int, y: int, z: int) -> None:
        self.x, self.y, self.z = x, y, z


class SharedSpace:
    """`cuda.shared`"""

    def __init__(self, context: Context) -> None:
        self._context = context

    def array(self, shape: Any, dtype: Any, alignment: int | None = None) -> Any:
        return self._context.static_array(shape, dtype)


class LocalSpace:
    """`cuda.local`"""

    def __init__(self, context: Context) -> None:
        self._context = context

    def array(self, shape: Any, dtype: Any, alignment: int | None = None) -> Any:
        return self._context.local_array(shape, dtype)


class Atomics:
    """`cuda.atomic`: each returns the old value. Atomics never race with each other."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def add(self, target: Any, index: Any, value: Any) -> Any:
        return target.atomic(index, lambda old: old + value)

    def sub(self, target: Any, index: Any, value: Any) -> Any:
        return target.atomic(index, lambda old: old - value)

    def max(self, target: Any, index: Any, value: Any) -> Any:
        return target.atomic(index, lambda old: fmax(old, value))

    def min(self, target: Any, index: Any, value: Any) -> Any:
        return target.atomic(index, lambda old: fmin(old, value))

    def exch(self, target: Any, index: Any, value: Any) -> Any:
        old = target.atomic(index, lambda old: value)
        if old == value:
            self._context.give_way()  # as below
        return old

    def cas(self, target: Any, index: Any, expected: Any, value: Any) -> Any:
        old = target.atomic(index, lambda old: value if old == expected else old)
        if old != expected:
            self._context.give_way()  # most likely a lock that another thread holds
        return old


def fmax(a: Any, b: Any) -> Any:
    """The larger; of a number and a NaN the number, as on the GPU."""
    return b if a != a or b > a else a


def fmin(a: Any, b: Any) -> Any:
    """The smaller; of a number and a NaN the number, as on the GPU."""
    return b if a != a or b < a else a


def fma(a: float, b: float, c: float) -> float:
    return a * b + c


def divide(a: float, b: float) -> float:
    if b == 0.0:
        return math.nan if a == 0.0 or a != a else math.copysign(math.inf, a) * math.copysign(1, b)
    return a / b


def exp(x: float) -> float:
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf


def exp2(x: float) -> float:
    try:
        return 2.0**x
    except OverflowError:
        return math.inf


def expm1(x: float) -> float:
    try:
        return math.expm1(x)
    except OverflowError:
        return math.inf


def _logarithm(function: Callable[[float], float]) -> Callable[[float], float]:
    def log(x: float) -> float:
        if x > 0.0:
            return function(x)
        return -math.inf if x == 0.0 else math.nan

    return log


log, log2, log10 = _logarithm(math.log), _logarithm(math.log2), _logarithm(math.log10)


def sqrt(x: float) -> float:
    return math.sqrt(x) if x >= 0.0 else math.nan


def power(x: float, y: float) -> float:
    try:
        return math.pow(x, y)
    except OverflowError:
        return math.inf
    except ValueError:
        return math.inf if x == 0.0 else math.nan


def rsqrt(x: float) -> float:
    return divide(1.0, sqrt(x))


def reciprocal(x: float) -> float:
    return divide(1.0, x)


# `math`, with inf and nan where Python raises and the GPU does not.
MATH = SimpleNamespace(
    **{name: value for name, value in vars(math).items() if not name.startswith("_")}
    | {"exp": exp, "exp2": exp2, "expm1": expm1, "log": log, "log2": log2, "log10": log10}
    | {"sqrt": sqrt, "pow": power, "fma": fma}
)

# `cuda.libdevice`: the single-precision functions that attention kernels use.
LIBDEVICE = SimpleNamespace(
    fmaxf=fmax, fminf=fmin, fmaf=fma, fabsf=math.fabs, floorf=math.floor, ceilf=math.ceil,
    expf=exp, exp2f=exp2, expm1f=expm1, fast_expf=exp, powf=power, fast_powf=power,
    logf=log, log2f=log2, log10f=log10, fast_logf=log, fast_log2f=log2,
    tanhf=math.tanh, erff=math.erf, sqrtf=sqrt, rsqrtf=rsqrt, frcp_rn=reciprocal,
    fdividef=divide, fast_fdividef=divide, fdiv_rn=divide,
)  # fmt: skip


class Namespace:
    """`cuda` for one launch. `run.py` sets the indices at every switch of threads."""

    warpsize = WARP
    fma = staticmethod(fma)

    def __init__(self, context: Context) -> None:
        self._context = context
        self.threadIdx, self.blockIdx = Dim3(0, 0, 0), Dim3(0, 0, 0)
        self.blockDim, self.gridDim = Dim3(*context.block_shape), Dim3(*context.grid)
        self.laneid = 0
        self.shared, self.local = SharedSpace(context), LocalSpace(context)
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
        self._context.collective("syncwarp", mask, None, lambda group, _: group)

    def threadfence(self) -> None:
        pass

    threadfence_block = threadfence_system = threadfence

    def nanosleep(self, ns: int) -> None:
        self._context.give_way()

    # ---- warp collectives; they do not order memory

    def shfl_sync(self, mask: int, value: Any, src_lane: int) -> Any:
        return self._shuffle("shfl_sync", mask, value, int(src_lane) % WARP)

    def shfl_xor_sync(self, mask: int, value: Any, lane_mask: int) -> Any:
        return self._shuffle("shfl_xor_sync", mask, value, self.laneid ^ int(lane_mask))

    def shfl_up_sync(self, mask: int, value: Any, delta: int) -> Any:
        source = self.laneid - int(delta)
        source = source if source >= 0 else self.laneid
        return self._shuffle("shfl_up_sync", mask, value, source)

    def shfl_down_sync(self, mask: int, value: Any, delta: int) -> Any:
        source = self.laneid + int(delta)
        source = source if source < WARP else self.laneid
        return self._shuffle("shfl_down_sync", mask, value, source)

    def _shuffle(self, operation: str, mask: int, value: Any, source: int) -> Any:
        def resolve(group: dict[int, Any], mask: int) -> dict[int, Any]:
            return {lane: group.get(s, (None, None))[0] for lane, (_, s) in group.items()}

        taken = self._context.collective(operation, mask, (value, source), resolve)
        if taken is None:
            text = f"{operation} reads lane {source}, which does not take part"
            raise self._context.fault(UninitialisedRead, text)
        return taken

    def ballot_sync(self, mask: int, predicate: Any) -> int:
        return self._vote("ballot_sync", mask, predicate, lambda ballot, mask: ballot)

    def all_sync(self, mask: int, predicate: Any) -> bool:
        return self._vote("all_sync", mask, predicate, lambda ballot, mask: ballot == mask)

    def any_sync(self, mask: int, predicate: Any) -> bool:
        return self._vote("any_sync", mask, predicate, lambda ballot, mask: ballot != 0)

    def eq_sync(self, mask: int, predicate: Any) -> bool:
        return self._vote("eq_sync", mask, predicate, lambda ballot, mask: ballot in (0, mask))

    def _vote(
        self, operation: str, mask: int, predicate: Any, count: Callable[[int, int], Any]
    ) -> Any:
        def resolve(group: dict[int, Any], mask: int) -> dict[int, Any]:
            result = count(sum(1 << lane for lane, vote in group.items() if vote), mask)
            return dict.fromkeys(group, result)

        return self._context.collective(operation, mask, predicate, resolve)

    def activemask(self) -> int:
        """The lanes of the warp that have not returned."""
        return self._context.alive()

    # ---- integers

    @staticmethod
    def popc(value: int) -> int:
        return (value & (1 << 64) - 1).bit_count()

    @staticmethod
    def selp(condition: Any, a: Any, b: Any) -> Any:
        return a if condition else b
