"""`helpers` for 16-bit dtypes: calls between guard bands, held against float64 of these inputs."""

from __future__ import annotations

import math
from types import SimpleNamespace

import helpers
import numpy as np
import pytest
from helpers import (
    LAYOUTS,
    Memory,
    OnGpu,
    Result,
    _distance,
    _size,
    assert_counts,
    assert_within,
    changing,
    memories,
    random_inputs,
    running,
    to_numpy,
)

import fa_numba
from fa_numba import device as devices
from fa_numba import reference

try:
    import ml_dtypes
except ImportError:
    ml_dtypes = None

ALGORITHMS = ("standard", "fa1", "fa2")
# Where S does not pass through memory.
FLASH = ("fa1", "fa2")
# One rounding to nearest, relative.
ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
# How much more a result may err where a loop takes many passes instead of one or few. Sums are in
# float32 from the first pass to the last, so that the last rounding, to 16 bits, is the same error
# for any number of passes. A sum that is rounded to 16 bits in each of n passes errs about
# sqrt(n / 3) times as much (O, whose early passes weigh less in the end) or sqrt(n / 2) times (a
# gradient, which grows as sqrt(n)).
GROWTH = 1.25
# A NaN in both formats that no computation makes.
HALF_GUARD = np.uint16(0x7FC5)

every_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS)
every_flash = pytest.mark.parametrize("algorithm", FLASH)
no_bfloat16 = pytest.mark.skipif(ml_dtypes is None, reason="ml_dtypes is not installed")
BFLOAT16 = pytest.param("bfloat16", marks=no_bfloat16)
# Each dtype in one of the layouts.
DTYPES_AND_LAYOUTS = [
    pytest.param("bfloat16", "padded", marks=no_bfloat16),
    ("float16", "transposed"),
]
every_dtype = pytest.mark.parametrize("dtype", ["float16", BFLOAT16])
# bfloat16 differs in three instructions alone: where the shapes are what is tested it is slow.
SLOW_BFLOAT16 = pytest.param("bfloat16", marks=[no_bfloat16, pytest.mark.slow])
mostly_float16 = pytest.mark.parametrize("dtype", ["float16", SLOW_BFLOAT16])


def numpy_dtype(name):
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def half_inputs(dtype, *sizes, **options):
    """q, k and v, normally distributed and then rounded."""
    return tuple(a.astype(numpy_dtype(dtype)) for a in random_inputs(*sizes, **options))


def _wide(d):
    return -(-d // 8) * 8 + 16


# As LAYOUTS, whose own alignment is that of float32.
HALF_LAYOUTS = LAYOUTS | {
    "padded": (
        lambda B, H, N, d: (B, H, N + 2, _wide(d)),
        lambda a, B, H, N, d: a[:, :, 1 : N + 1, 8 : d + 8],
    ),
    "transposed": (
        lambda B, H, N, d: (B, N + 2, H, _wide(d)),
        lambda a, B, H, N, d: a[:, 1 : N + 1, :, 8 : d + 8].transpose(0, 2, 1, 3),
    ),
    "strided": (
        lambda B, H, N, d: (B, H, 2 * N + 1, _wide(d)),
        lambda a, B, H, N, d: a[:, :, 1::2, 8 : d + 8],
    ),
}


class HalfMemory(Memory):
    """An array (B, H, N, d), or (N, H, d), of 16-bit floats inside a guarded buffer of their bits.

    NumPy's bfloat16 is on the host also when the GPU computes: no array interface describes it.
    """

    def __init__(self, device, dtype, shape, layout, values=None):
        axes = (0,) * (4 - len(shape))
        whole = (1,) * len(axes) + shape
        buffer_shape, view = HALF_LAYOUTS[layout]
        size = buffer_shape(*whole)
        flat = np.full(math.prod(size) + 8, HALF_GUARD)
        start = -flat.ctypes.data % 16 // 2
        self.buffer = flat[start : start + math.prod(size)].reshape(size)
        self.view = view(self.buffer, *whole)[axes].view(numpy_dtype(dtype))
        if values is not None:
            self.view[...] = values
        self.before = self.buffer.copy()
        self.inside = np.zeros(size, bool)
        view(self.inside, *whole)[...] = True
        self.remote, self.argument = None, self.view
        if device == "gpu" and dtype == "float16":
            self.remote = devices.to_gpu(self.buffer)
            offset = self.view.ctypes.data - self.buffer.ctypes.data
            self.argument = OnGpu(self.remote, offset, self.view.shape, self.view.strides)
            self.argument.__cuda_array_interface__["typestr"] = "<f2"

    def assert_intact(self, name, *, whole):
        self.fetch()
        changed = self.buffer != self.before
        if not whole:
            changed &= ~self.inside
        where = "memory" if whole else "the guard band"
        assert not changed.any(), f"{where} of {name} was written at {np.argwhere(changed)[:4]}"


def attend(device, algorithm, q, k, v, *, layout="padded", out_layout="padded", **options):
    """`helpers.attend` for q, k and v of one 16-bit dtype."""
    options = {"return_lse": True, **options}
    dtype = q.dtype.name
    inputs = [HalfMemory(device, dtype, a.shape, layout, a) for a in (q, k, v)]
    place = device if dtype == "float16" else "emulator"
    others, given = memories(place, layout, options)
    out = HalfMemory(device, dtype, (*q.shape[:-1], v.shape[-1]), out_layout)
    with running(device) as counts:
        arguments = [m.argument for m in inputs]
        returned = fa_numba.attention(*arguments, algorithm=algorithm, out=out.argument, **given)
        O, L = returned if options["return_lse"] else (returned, None)
        assert O is out.argument
        if counts is not None:
            shapes = q.shape, k.shape, v.shape
            plan = fa_numba.plan(*shapes, algorithm=algorithm, dtype=dtype, **options)
            assert_counts(counts, plan)
            moved = sum(n.total() for n in (counts.load_bytes, counts.store_bytes))
            assert plan.unit == options.get("unit", "mma") and plan.accesses.bytes == moved
        for name, memory in (dict(zip("qkv", inputs, strict=True)) | others).items():
            memory.assert_intact(name, whole=True)
        out.assert_intact("out", whole=False)
        result = Result(out.fetch(), None if L is None else to_numpy(L))
    if result.L is not None:
        rows = q.shape[:3] if q.ndim == 4 else q.shape[1::-1]
        assert result.L.shape == rows and result.L.dtype == np.float32
    return result


def truth(q, k, v, *, algorithm="fa2", **options):
    """O and L in float64, and how far those of a 16-bit call may be from each, as Frobenius norms.

    O: twice the error of the unfused computation with 16-bit matrices and float32 sums, plus one
    rounding to 16 bits. L: as in float32. Of standard attention S is in 16 bits too, and L may also
    be off by twice what that does to it.
    """
    dtype = q.dtype.name
    q, k, v = (a.astype(np.float32) for a in (q, k, v))
    single = helpers.truth(q, k, v, only_L=True, **options)
    with np.errstate(all="ignore"):
        stored = algorithm == "standard"
        yardstick = {"matrix_dtype": dtype, "stored_scores": stored, "return_lse": True}
        near, near_L = reference.unfused(q, k, v, **yardstick, **options)
    O_bound = 2 * _distance(near, single.O) + ROUNDING[dtype] * _size(single.O)
    L_bound = single.L_bound + (2 * _distance(near_L, single.L) if stored else 0.0)
    # A row's largest P is 1. Dropout makes 1 / (1 - p) of it, off by the same rounding in all rows.
    shared = 0.0
    if options.get("dropout_p") and not stored:
        kept = 1 / (1 - options["dropout_p"])
        shared = abs(float(reference._to_half(np.float32(kept), dtype)) / kept - 1)
    bounds = {"O_bound": O_bound, "L_bound": L_bound}
    return SimpleNamespace(O=single.O, L=single.L, **bounds, scale=(ROUNDING[dtype], shared))


def assert_close_to_float64(out, q, k, v, lse=None, *, algorithm="fa2", **options):
    """`out`, and `lse` where given, are as close to float64 as `truth` allows."""
    want = truth(q, k, v, algorithm=algorithm, **options)
    assert_within("O", np.asarray(out, np.float64), want.O, want.O_bound, *want.scale)
    if lse is not None:
        assert_within("L", lse, want.L, want.L_bound)


def check(device, algorithm, q, k, v, **options):
    """`attend`, and its result against float64."""
    result = attend(device, algorithm, q, k, v, **options)
    assert result.O.dtype == q.dtype
    assert_close_to_float64(result.O, q, k, v, result.L, algorithm=algorithm, **changing(options))
    return result


def assert_no_growth(name, few, many, expected):
    """Of results of `few` passes and of `many` the second errs at most GROWTH times as much."""
    once, often = (_distance(np.asarray(a, np.float64), expected) for a in (few, many))
    assert often <= GROWTH * once, (
        f"{name} is off by {often:.3g} after many passes and by {once:.3g} after few: "
        f"allowed is {GROWTH} times that"
    )
