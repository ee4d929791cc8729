"""Runs a backward call between guard bands and holds its gradients against float64."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from types import SimpleNamespace
from unittest import mock

import numpy as np
from helpers import (
    EPS,
    GUARD,
    Memory,
    OnGpu,
    _distance,
    _size,
    assert_counts,
    assert_within,
    random_inputs,
    to_numpy,
)

import fa_numba
from fa_numba import device as devices
from fa_numba import reference
from fa_numba.problem import Problem

# Every way to a gradient: (algorithm, what its function takes beside).
WAYS = {
    "standard": ("standard", {}),
    "fa1": ("fa1", {}),
    "fa2": ("fa2", {}),
    "fa2-deterministic": ("fa2", {"deterministic": True}),
}
NAMES = ("dq", "dk", "dv")


def random_gradients(*shape, **options):
    """dout, q, k and v, normally distributed."""
    q, k, v = random_inputs(*shape, **options)
    rng = np.random.default_rng([1, *shape])
    return rng.standard_normal(q.shape, dtype=np.float32), q, k, v


def saved(q, k, v, **options):
    """O and L as a forward pass leaves them: float64, rounded once to float32."""
    with np.errstate(all="ignore"):
        O, L = reference.attention(q, k, v, return_lse=True, **options)
        return O.astype(np.float32), L.astype(np.float32)


class RowMemory(Memory):
    """The same for an array (B, H, N)."""

    def __init__(self, device, shape, layout, values):
        super().__init__(device, (*shape, 1), layout, values[..., None])
        if self.remote is None:
            self.argument = self.view[..., 0]
        else:
            interface = self.argument.__cuda_array_interface__
            offset = self.view.ctypes.data - self.buffer.ctypes.data
            self.argument = OnGpu(
                self.remote, offset, interface["shape"][:3], interface["strides"][:3]
            )


def _filled(shape, dtype=float, **options):
    """`np.empty` whose float32 arrays hold NaN: what a kernel leaves out shows."""
    array = np.zeros(shape, dtype, **options)
    if array.dtype == np.float32:
        array[...] = GUARD
    return array


def _filled_on_gpu(shape):
    return devices.to_gpu(_filled(shape, np.float32))


@dataclass
class Gradients:
    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray

    def __iter__(self):
        return iter((self.dq, self.dk, self.dv))


def differentiate(
    device, way, dout, q, k, v, *, layout="padded", saved_values=None, counted=True, **options
):
    """One backward call on `device` between guard bands: every input and band must stay.

    out and lse are `saved`'s unless `saved_values` gives them. On the emulator the accesses must be
    those of the plan.
    """
    algorithm, own = WAYS[way]
    changing = {name: options[name] for name in ("scale", "causal") if name in options}
    out, lse = saved(q, k, v, **changing) if saved_values is None else saved_values
    inputs = {
        name: Memory(device, a.shape, layout, a)
        for name, a in (("dout", dout), ("q", q), ("k", k), ("v", v), ("out", out))
    }
    inputs["lse"] = RowMemory(device, lse.shape, layout, lse)
    count = counted and device == "emulator"
    with ExitStack() as stack:
        stack.enter_context(devices.using(device))
        counts = stack.enter_context(fa_numba.count_accesses()) if count else None
        if device == "emulator":
            stack.enter_context(mock.patch.object(np, "empty", _filled))
        else:
            stack.enter_context(mock.patch.object(devices, "empty", _filled_on_gpu))
        arguments = [m.argument for m in inputs.values()]
        found = fa_numba.attention_backward(*arguments, algorithm=algorithm, **own, **options)
        assert type(found) is tuple and len(found) == 3
        if counts is not None:
            planned = fa_numba.plan(
                q.shape, k.shape, algorithm=algorithm, passes="bwd", **own, **options
            )
            assert_counts(counts, planned)
        for name, memory in inputs.items():
            memory.assert_intact(name, whole=True)
        gradients = Gradients(*(to_numpy(g) for g in found))
    for name, gradient, of in zip(NAMES, gradients, (q, k, v), strict=True):
        assert gradient.shape == of.shape and gradient.dtype == np.float32, name
    return gradients


# --- float64 ---------------------------------------------------------------------------------


def one_rounding(dout, q, k, v, **options):
    """How far one rounding of each of S, L and the terms of dP and D moves dQ, dK, dV, as norms.

    Roundings are taken as independent: squares add up.
    """
    problem = Problem.from_shapes(q.shape, k.shape, v.shape, **options)
    O, L = reference.attention(q, k, v, return_lse=True, **options)
    squares = {name: np.zeros(a.shape) for name, a in zip(NAMES, (q, k, v), strict=True)}
    dout, q, k, v = (np.asarray(a, np.float64) for a in (dout, q, k, v))
    for b, h in np.ndindex(problem.batch, problem.heads_q):
        hk = h // problem.group
        Q, K, V, dO = q[b, h], k[b, hk], v[b, hk], dout[b, h]
        S = problem.scale * (Q @ K.T)
        seen = np.arange(problem.seqlen_k) < problem.columns_end(np.arange(len(Q)))[:, None]
        Lh = np.where(np.isfinite(L[b, h]), L[b, h], 0.0)[:, None]
        S = np.where(seen, S, 0.0)
        P = np.where(seen, np.exp(S - Lh), 0.0)
        dS = P * (dO @ V.T - np.sum(dO * O[b, h], axis=1)[:, None])
        of_P = EPS**2 * (S**2 + Lh**2)
        of_dP = EPS**2 * (dO**2 @ (V**2).T + (dO**2 * O[b, h] ** 2).sum(axis=1)[:, None])
        of_dS = dS**2 * of_P + P**2 * of_dP
        squares["dq"][b, h] = problem.scale**2 * (of_dS @ K**2)
        squares["dk"][b, hk] += problem.scale**2 * (of_dS.T @ Q**2)
        squares["dv"][b, hk] += (P**2 * of_P).T @ dO**2
    return [float(np.sqrt(squares[name].sum())) for name in NAMES]


def true_gradients(dout, q, k, v, **options):
    """The gradients in float64 and how far float32 ones may be from them, as Frobenius norms.

    Twice the error of the unfused float32 computation, or `one_rounding` of what they are made from
    where that is more, plus one rounding of the gradient. The unfused computation subtracts a
    row's own maximum and its own sum of P o dP, so that errors cancel, down to 0 in a row of one
    key; the kernels compare L and O, rounded by the forward pass, with numbers that they round
    themselves.
    """
    with np.errstate(all="ignore"):
        exact = reference.attention_backward(dout, q, k, v, **options)
        unfused = reference.unfused_backward(dout, q, k, v, **options)
        rounding = one_rounding(dout, q, k, v, **options)
    bounds = [
        max(2 * _distance(u, e), r) + EPS * _size(e)
        for u, e, r in zip(unfused, exact, rounding, strict=True)
    ]
    return SimpleNamespace(
        **dict(zip(NAMES, exact, strict=True)), bounds=dict(zip(NAMES, bounds, strict=True))
    )


def assert_gradients(gradients, dout, q, k, v, **options):
    """`gradients` are as close to float64 as `true_gradients` allows."""
    want = true_gradients(dout, q, k, v, **options)
    for name, got in zip(NAMES, gradients, strict=True):
        assert_within(name, got, getattr(want, name), want.bounds[name])


def check_gradients(device, way, dout, q, k, v, *, scale=None, causal=False, **options):
    """`differentiate`, and its result against float64."""
    found = differentiate(device, way, dout, q, k, v, scale=scale, causal=causal, **options)
    assert_gradients(found, dout, q, k, v, scale=scale, causal=causal)
    return found
