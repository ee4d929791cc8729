"""Standard attention's gradients in 16 bits against float64, as test_mma.py the forward pass."""

import itertools

import numpy as np
import pytest
from backward_helpers import NAMES
from helpers import Memory as SingleMemory
from helpers import _distance, _size, assert_counts, assert_within, memories, running, to_numpy
from mma_helpers import ROUNDING, HalfMemory, every_dtype, half_inputs
from test_mma import HEAD_DIMS, OPTIONS, SMALL, either_mask

import fa_numba
from fa_numba import Tiles, plans, reference
from fa_numba import device as devices


def half_gradients(dtype, *sizes, **options):
    """dout, q, k and v, normally distributed and then rounded."""
    q, k, v = half_inputs(dtype, *sizes, **options)
    dout, _, _ = half_inputs(dtype, *sizes, seed=1)
    return dout, q, k, v


def differentiate(device, dout, q, k, v, *, layout="padded", **options):
    """One backward call between guard bands, its accesses those of the plan."""
    dtype, asks = q.dtype.name, options.get("bias") is not None
    options = {"return_dbias": asks, **options}
    place = device if dtype == "float16" else "emulator"
    rows = q.shape[:3] if q.ndim == 4 else q.shape[1::-1]
    # Neither O nor L is needed; both are checked.
    out, lse = np.zeros_like(q), np.zeros(rows, np.float32)
    inputs = [HalfMemory(device, dtype, a.shape, layout, a) for a in (dout, q, k, v, out)]
    inputs.append(SingleMemory(place, lse.shape, layout, lse, rows=True))
    others, given = memories(place, layout, options)
    with running(device) as counts:
        arguments = [m.argument for m in inputs]
        found = fa_numba.attention_backward(*arguments, algorithm="standard", **given)
        assert type(found) is tuple and len(found) == 3 + asks
        if counts is not None:
            facts = {"algorithm": "standard", "dtype": dtype, "passes": "bwd"}
            plan = fa_numba.plan(q.shape, k.shape, **facts, **options)
            assert_counts(counts, plan)
            moved = sum(n.total() for n in (counts.load_bytes, counts.store_bytes))
            assert plan.unit == "mma" and plan.accesses.bytes == moved
        for memory in (*inputs, *others.values()):
            memory.assert_intact("an input", whole=True)
        gradients = [to_numpy(x) for x in found]
    assert all(x.dtype == q.dtype for x in gradients[:3])
    assert all(x.dtype == np.float32 for x in gradients[3:])
    return gradients


def yardstick(dout, q, k, v, *, tiles=None, **options):
    """The gradients with S, P, dP and dS rounded to 16 bits as they are stored, dbias in float32.

    After dropout P is stored once more; the scale goes into dS, and the cap's slope after it.
    """
    dtype = q.dtype.name
    single = [x.astype(np.float32) for x in (q, k, v)]
    call, q, k, v = reference._call(*single, np.float32, tiles=tiles, **options)
    dout, problem = dout.astype(np.float32), call.problem

    def rounded(x):
        return reference._to_half(x, dtype)

    dq, dk, dv = (np.zeros_like(x) for x in (q, k, v))
    dbias = np.zeros(problem.bias or (), np.float32)
    for head in call.heads():
        Q, K, V, dO = q[head.q], k[head.k], v[head.k], dout[head.q]
        rows = slice(0, head.Nq)
        S, slope = call.scores(head, Q, K, 0)
        dropped = call.dropout(head, rows)
        P = rounded(reference._rounded_softmax(rounded(S)))
        dP = rounded(dO @ V.T) * dropped
        D = (P * dP).sum(axis=1, keepdims=True)
        dS = P * (dP - D)
        if problem.bias:
            reference._add_to_bias(dbias, head, rows, dS)
        dS = rounded(np.float32(problem.scale) * dS)
        if problem.softcap is not None:
            dS = rounded(dS * slope)
        dv[head.k] += rounded(P * dropped).T @ dO
        dq[head.q] = rounded(dS @ K)
        dk[head.k] += dS.T @ Q
    gradients = [dq, rounded(dk), rounded(dv)]
    return gradients if not problem.bias else [*gradients, dbias]


def check_gradients(device, dout, q, k, v, *, layout="padded", **options):
    """`differentiate`, and every gradient no further from float64 than twice the yardstick is, and
    one rounding."""
    found = differentiate(device, dout, q, k, v, layout=layout, **options)
    with np.errstate(all="ignore"):
        near = yardstick(dout, q, k, v, **options)
        single = [x.astype(np.float32) for x in (dout, q, k, v)]
        exact = reference.attention_backward(*single, return_dbias=len(found) == 4, **options)
    for name, got, u, e in zip((*NAMES, "dbias"), found, near, exact, strict=False):
        bound = 2 * _distance(u.reshape(e.shape), e) + ROUNDING[q.dtype.name] * _size(e)
        assert_within(name, np.asarray(got, np.float64), e, bound)
    return found


@every_dtype
@pytest.mark.parametrize("change", ["nothing", "a scale", "an element"])
def test_the_check_fails_on_a_wrong_gradient(dtype, change, monkeypatch):
    inputs = half_gradients(dtype, 1, 2, 1, 24, 40, 8)
    made = [x.astype(inputs[0].dtype) for x in yardstick(*inputs)]
    if change == "a scale":
        made[0] = (made[0].astype(np.float32) * 1.02).astype(made[0].dtype)
    elif change == "an element":
        made[2][0, 0, 3, 5] += {"float16": 0.02, "bfloat16": 0.3}[dtype]
    monkeypatch.setitem(globals(), "differentiate", lambda *_, **__: made)
    if change == "nothing":
        check_gradients("emulator", *inputs)
        return
    with pytest.raises(AssertionError, match="worst at"):
        check_gradients("emulator", *inputs)


LENGTHS = [(1, 1), (1, 40), (40, 1), (15, 31), (16, 32), (17, 33), (37, 13), (33, 70)]


@every_dtype
@either_mask
@pytest.mark.parametrize("Nq, Nk", LENGTHS)
def test_lengths(device, dtype, causal, Nq, Nk):
    inputs = half_gradients(dtype, 1, 1, 1, Nq, Nk, 8)
    check_gradients(device, *inputs, causal=causal, tiles=SMALL)


@every_dtype
@pytest.mark.parametrize("d", HEAD_DIMS)
def test_head_dims(device, dtype, d):
    inputs = half_gradients(dtype, 1, 1, 1, 18, 35, d)
    found = check_gradients(device, *inputs, tiles=SMALL)
    same = differentiate(device, *inputs, tiles=SMALL, layout="odd")
    assert all(np.array_equal(a, b) for a, b in zip(same, found, strict=True))


@pytest.mark.parametrize("d", [16, 64, 128, 256])
def test_head_dims_with_the_default_tiles(device, d):
    check_gradients(device, *half_gradients("float16", 1, 1, 1, 21, 37, d), causal=True)


@pytest.mark.parametrize(
    "tiles",
    [Tiles(16, 64), Tiles(48, 32), Tiles(64, 16), Tiles(64, 48), Tiles(32, 128, 64)],
    ids=lambda t: f"{t.Br}x{t.Bc}",
)
def test_tiles(device, tiles):
    check_gradients(device, *half_gradients("float16", 1, 1, 1, 70, 75, 16), tiles=tiles)


@every_dtype
@pytest.mark.parametrize("B, Hq, Hk", [(2, 1, 1), (1, 3, 3), (2, 6, 2)])
def test_batches_and_shared_heads(device, dtype, B, Hq, Hk):
    check_gradients(device, *half_gradients(dtype, B, Hq, Hk, 9, 37, 8), causal=True, tiles=SMALL)


@pytest.mark.parametrize("layout", ["odd", "transposed", "columns", "reversed", "strided"])
def test_layouts(device, layout):
    inputs = half_gradients("float16", 2, 2, 1, 17, 20, 8)
    check_gradients(device, *inputs, causal=True, tiles=SMALL, layout=layout)


@every_dtype
@pytest.mark.parametrize("name", OPTIONS)
def test_options(device, dtype, name):
    inputs = half_gradients(dtype, 2, 2, 1, 40, 55, 8)
    check_gradients(device, *inputs, tiles=SMALL, **OPTIONS[name])


@every_dtype
@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences(device, dtype, causal):
    dout, q, k, v = half_gradients(dtype, 1, 4, 2, 61, 70, 8)
    packed = [np.ascontiguousarray(x[0].swapaxes(0, 1)) for x in (dout, q, k, v)]
    starts = {"cu_seqlens_q": [0, 20, 20, 61], "cu_seqlens_k": [0, 33, 40, 70]}
    check_gradients(device, *packed, causal=causal, tiles=SMALL, **starts)


@pytest.mark.parametrize("options", [{}, {"dropout_p": 0.3}], ids=["plain", "dropout"])
@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize("warps", [1, 4])
def test_long_rows(device, monkeypatch, warps, resident, options):
    """603 columns are 76 chunks: of one warp's threads several each, of four warps' one or none."""
    uncached = plans._mma_standard_backward.__wrapped__
    monkeypatch.setattr(plans, "_mma_standard_backward", uncached)
    monkeypatch.setattr(plans, "_row_warps", lambda Nk, width=4: warps)
    if not resident:
        monkeypatch.setattr(plans, "_row_halves", lambda Nk, limit, rows=1: 0)
    inputs = half_gradients("float16", 1, 1, 1, 3, 603, 8)
    check_gradients(device, *inputs, tiles=Tiles(16, 64), **options)


def test_a_plan_says_what_runs():
    shape = (2, 4, 300, 64)
    with devices.using("emulator"):
        for softcap in (None, 2.0):
            facts = {"algorithm": "standard", "passes": "bwd", "softcap": softcap}
            plan, single = (
                fa_numba.plan(shape, shape, dtype=t, **facts) for t in ("float16", "float32")
            )
            assert [k.name for k in plan.kernels] == [k.name for k in single.kernels]
            assert plan.workspace_bytes == 2 * 2 * 8 * 300 * 304
            assert plan.flops == single.flops


@pytest.mark.gpu
@every_dtype
@pytest.mark.parametrize(
    "shape, causal",
    itertools.product([(1, 2, 1, 2048, 2048, 64), (2, 4, 2, 1000, 1531, 128)], (False, True)),
)
def test_large_problems_and_equal_runs(dtype, shape, causal):
    inputs = half_gradients(dtype, *shape)
    first = check_gradients("gpu", *inputs, causal=causal)
    for _ in range(5):
        again = differentiate("gpu", *inputs, causal=causal)
        assert all(np.array_equal(a, b) for a, b in zip(again, first, strict=True))
