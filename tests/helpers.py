"""Runs a call between guard bands and holds its result against float64."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

import fa_numba
from fa_numba import device as devices
from fa_numba import reference

ALGORITHMS = ("standard", "fa1", "fa2")
EPS = float(np.finfo(np.float32).eps)

# --- inputs ----------------------------------------------------------------------------------


def random_inputs(B, Hq, Hk, Nq, Nk, d, *, seed=0, q_size=1.0):
    """q, k and v, normally distributed."""
    rng = np.random.default_rng([seed, B, Hq, Hk, Nq, Nk, d])
    q = np.float32(q_size) * rng.standard_normal((B, Hq, Nq, d), dtype=np.float32)
    k, v = rng.standard_normal((2, B, Hk, Nk, d), dtype=np.float32)
    return q, k, v


# --- memory with guard bands -----------------------------------------------------------------


def _padded(d):
    return -(-d // 4) * 4 + 8


def _odd(d):
    return (d + 3) | 1


# name -> (shape of the buffer, the array's view into it) for an array (B, H, N, d). Every view
# leaves a row or more and elements of every row to the guard band.
LAYOUTS: dict[str, tuple] = {
    # rows at 16-byte addresses where the head dimension is a multiple of 4
    "padded": (
        lambda B, H, N, d: (B, H, N + 2, _padded(d)),
        lambda a, B, H, N, d: a[:, :, 1 : N + 1, 4 : d + 4],
    ),
    # an odd pitch and an odd start: nothing is aligned
    "odd": (
        lambda B, H, N, d: (B, H, N + 2, _odd(d)),
        lambda a, B, H, N, d: a[:, :, 1 : N + 1, 1 : d + 1],
    ),
    # (batch, seqlen, heads, head_dim) in memory
    "transposed": (
        lambda B, H, N, d: (B, N + 2, H, _padded(d)),
        lambda a, B, H, N, d: a[:, 1 : N + 1, :, 4 : d + 4].transpose(0, 2, 1, 3),
    ),
    # head_dim is not the innermost axis
    "columns": (
        lambda B, H, N, d: (B, H, d + 2, N + 3),
        lambda a, B, H, N, d: a[:, :, 1 : d + 1, 2 : N + 2].swapaxes(2, 3),
    ),
    # negative strides on every axis
    "reversed": (
        lambda B, H, N, d: (B, H, N + 2, _padded(d)),
        lambda a, B, H, N, d: a[::-1, ::-1, N:0:-1, d + 3 : 3 : -1],
    ),
    # every second row
    "strided": (
        lambda B, H, N, d: (B, H, 2 * N + 1, _padded(d)),
        lambda a, B, H, N, d: a[:, :, 1::2, 4 : d + 4],
    ),
    # one batch entry for all: inputs alone
    "broadcast": (
        lambda B, H, N, d: (1, H, N + 2, _padded(d)),
        lambda a, B, H, N, d: np.broadcast_to(a[:, :, 1 : N + 1, 4 : d + 4], (B, H, N, d)),
    ),
}

# A NaN that no computation makes, so that a band overwritten with NaN shows too.
GUARD = np.array([0x7FC5A5A5], np.uint32).view(np.float32)[0]


def guarded(shape, layout):
    """A buffer of guard values at a 16-byte address and the view of `shape` into it."""
    buffer_shape, view = LAYOUTS[layout]
    size = buffer_shape(*shape)
    flat = np.full(math.prod(size) + 4, GUARD, np.float32)
    start = -flat.ctypes.data % 16 // 4
    buffer = flat[start : start + math.prod(size)].reshape(size)
    return buffer, view(buffer, *shape)


class OnGpu:
    """A view of GPU memory that offers `__cuda_array_interface__` and nothing else."""

    def __init__(self, owner, offset, shape, strides):
        pointer, _ = owner.__cuda_array_interface__["data"]
        self.owner = owner
        self.__cuda_array_interface__ = {
            "data": (pointer + offset, False),
            "shape": shape,
            "strides": strides,
            "typestr": "<f4",
            "version": 3,
        }


class Memory:
    """An array (B, H, N, d) inside a guarded buffer, on the emulator's host or on the GPU.

    Holds `values`, or guard values where none are given. `argument` is what a call takes.
    """

    def __init__(self, device, shape, layout, values=None):
        self.buffer, self.view = guarded(shape, layout)
        if values is not None:
            written = self.view[:1] if layout == "broadcast" else self.view
            if layout == "broadcast":
                assert (values == values[:1]).all(), "a broadcast batch has equal entries"
                written.flags.writeable = True
            written[...] = values[:1] if layout == "broadcast" else values
        self.before = self.buffer.copy()
        self.inside = np.zeros(self.buffer.shape, bool)
        inside = LAYOUTS[layout][1](self.inside, *shape)
        if layout != "broadcast":
            inside[...] = True
        self.remote: Any = None
        self.argument: Any = self.view
        if device == "gpu":
            self.remote = devices.to_gpu(self.buffer)
            offset = self.view.ctypes.data - self.buffer.ctypes.data
            self.argument = OnGpu(self.remote, offset, self.view.shape, self.view.strides)

    def fetch(self):
        """What the view holds now."""
        if self.remote is not None:
            self.buffer[...] = self.remote.copy_to_host()
        return self.view.copy()

    def assert_intact(self, name, *, whole):
        """The guard band, or the `whole` buffer, is as it was, bit for bit."""
        self.fetch()
        changed = self.buffer.view(np.uint32) != self.before.view(np.uint32)
        if not whole:
            changed &= ~self.inside
        where = "memory" if whole else "the guard band"
        assert not changed.any(), f"{where} of {name} was written at {np.argwhere(changed)[:4]}"


# --- a call ----------------------------------------------------------------------------------


@dataclass
class Result:
    O: np.ndarray
    L: np.ndarray | None


def to_numpy(array):
    return array.copy_to_host() if hasattr(array, "copy_to_host") else np.asarray(array)


def attend(device, algorithm, q, k, v, *, layout="padded", out_layout="padded", **options):
    """One call on `device` between guard bands: inputs and bands must stay, `out` must be filled.

    On the emulator its accesses must be those of the plan. Asks for L unless told otherwise.
    """
    options = {"return_lse": True, **options}
    inputs = {
        name: Memory(device, a.shape, layout, a) for name, a in (("q", q), ("k", k), ("v", v))
    }
    out = Memory(device, q.shape, out_layout)
    count = fa_numba.count_accesses if device == "emulator" else nullcontext
    with devices.using(device), count() as counts:
        arguments = [m.argument for m in inputs.values()]
        returned = fa_numba.attention(*arguments, algorithm=algorithm, out=out.argument, **options)
        O, L = returned if options["return_lse"] else (returned, None)
        assert O is out.argument
        if counts is not None:
            assert_counts(counts, fa_numba.plan(q.shape, k.shape, algorithm=algorithm, **options))
        for name, memory in inputs.items():
            memory.assert_intact(name, whole=True)
        out.assert_intact("out", whole=False)
        result = Result(out.fetch(), None if L is None else to_numpy(L))
    if result.L is not None:
        assert result.L.shape == q.shape[:3] and result.L.dtype == np.float32
    return result


def assert_counts(counts, plan):
    """Every array's loads and stores are those of the closed form; an absent key is 0."""
    for kind in ("loads", "stores"):
        got, want = dict(getattr(counts, kind)), getattr(plan.accesses, kind)
        assert got == want, f"counts of {kind}: {got}, the closed form has {want}"


# --- float64 ---------------------------------------------------------------------------------


def _distance(a, b):
    """||a - b||, where equal infinities and NaN at the same place are no distance."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore"):
        difference = np.where(same, 0.0, a - b)
    return float(np.linalg.norm(np.where(np.isnan(difference), np.inf, difference)))


def _size(a):
    return float(np.linalg.norm(np.where(np.isfinite(a), a, 0.0)))


def truth(q, k, v, **options):
    """O and L in float64, and how far a float32 result may be from each, as Frobenius norms.

    Twice the error of the unfused float32 computation plus one rounding of the result; of L, whose
    values cancel to near 0, a rounding is that of a number no smaller than 1.
    """
    with np.errstate(all="ignore"):
        O, L = reference.attention(q, k, v, return_lse=True, **options)
        O32, L32 = reference.unfused(q, k, v, return_lse=True, **options)
    return SimpleNamespace(
        O=O,
        L=L,
        O_bound=2 * _distance(O32, O) + EPS * _size(O),
        L_bound=2 * _distance(L32, L) + EPS * _size(np.maximum(np.abs(L), 1.0)),
    )


def assert_within(name, got, expected, bound):
    got, expected = np.asarray(got), np.asarray(expected)
    assert got.shape == expected.shape, f"{name} has shape {got.shape}, not {expected.shape}"
    distance = _distance(got, expected)
    where, a, b = reference.worst(got, expected)
    assert distance <= bound, (
        f"{name} is off by {distance:.3g}, allowed {bound:.3g}; "
        f"worst at {where}: got {a:.9g}, expected {b:.9g}"
    )


def assert_close_to_float64(out, q, k, v, lse=None, **options):
    """`out`, and `lse` where given, are as close to float64 as `truth` allows.

    `options` are those that change the result: scale and causal.
    """
    want = truth(q, k, v, **options)
    assert_within("O", out, want.O, want.O_bound)
    if lse is not None:
        assert_within("L", lse, want.L, want.L_bound)


def check(device, algorithm, q, k, v, *, scale=None, causal=False, **options):
    """`attend`, and its result against float64."""
    result = attend(device, algorithm, q, k, v, scale=scale, causal=causal, **options)
    assert_close_to_float64(result.O, q, k, v, result.L, scale=scale, causal=causal)
    return result
