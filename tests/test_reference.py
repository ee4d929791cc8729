"""The float64 reference against a plain loop, the tiled algorithms and worked examples."""

import math
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa_numba import reference
from fa_numba.reference import (
    attention,
    attention_backward,
    fa1_tiled,
    fa2_tiled,
    relative_error,
    unfused,
    unfused_backward,
    worst,
)

EPS = np.finfo(np.float64).eps
TILED = [fa1_tiled, fa2_tiled]


def plain_loop(q, k, v, *, scale=None, causal=False):
    """(O, L) element by element, exactly summed; written without the package."""
    (B, Hq, Nq, d), (_, Hk, Nk, _) = q.shape, k.shape
    scale = 1 / math.sqrt(d) if scale is None else scale
    O, L = np.zeros(q.shape), np.full(q.shape[:3], -np.inf)
    for b, h, i in np.ndindex(B, Hq, Nq):
        K, V = k[b, h // (Hq // Hk)], v[b, h // (Hq // Hk)]
        s = [
            scale * math.fsum(float(x) * float(y) for x, y in zip(q[b, h, i], K[j], strict=True))
            for j in range(Nk)
            if not causal or j <= i + Nk - Nq
        ]
        if s:
            m = max(s)
            w = [math.exp(x - m) for x in s]
            L[b, h, i] = m + math.log(math.fsum(w))
            for c in range(d):
                products = [x * float(y) for x, y in zip(w, V[:, c], strict=False)]
                O[b, h, i, c] = math.fsum(products) / math.fsum(w)
    return O, L


def random_inputs(B, Hq, Hk, Nq, Nk, d, *, seed=0, size=1.0):
    rng = np.random.default_rng(seed)
    q = size * rng.standard_normal((B, Hq, Nq, d))
    k, v = rng.standard_normal((2, B, Hk, Nk, d))
    for a in (q, k, v):
        a.setflags(write=False)
    return q, k, v


def assert_close(got, want, bound):
    # Absolute too: L and a weighted mean of V may cancel to nearly 0.
    for name, out, ref in zip("OL", got, want, strict=True):
        assert out.dtype == np.float64
        np.testing.assert_allclose(out, ref, rtol=bound, atol=bound, err_msg=name)


SHAPES = [
    (1, 1, 1, 1, 1, 1),
    (2, 1, 1, 5, 5, 3),
    (1, 4, 2, 7, 11, 4),
    (2, 6, 3, 11, 7, 5),
    (1, 3, 1, 13, 1, 2),
    (1, 2, 2, 1, 13, 8),
]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [None, 1.0, -0.7])
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_is_the_plain_loop(shape, scale, causal):
    q, k, v = random_inputs(*shape)
    options = dict(scale=scale, causal=causal)
    want = plain_loop(q, k, v, **options)
    assert_close(attention(q, k, v, **options, return_lse=True), want, 50 * EPS)
    np.testing.assert_array_equal(
        attention(q, k, v, **options), attention(q, k, v, **options, return_lse=True)[0]
    )


def test_long_inputs_are_computed_in_pieces():
    Nq = reference._ROWS + 37
    q, k, v = random_inputs(1, 1, 1, Nq, Nq - 20, 2)
    want = plain_loop(q[:, :, -60:], k, v, causal=True)
    for compute in (attention, partial(unfused, dtype=np.float64)):
        O, L = compute(q, k, v, causal=True, return_lse=True)
        assert_close((O[:, :, -60:], L[:, :, -60:]), want, 50 * EPS)
        assert np.all(O[:, :, :20] == 0) and np.all(L[:, :, :20] == -np.inf)
        assert np.all(np.isfinite(L[:, :, 20:]))


@settings(max_examples=150, deadline=None)
@given(
    B=st.integers(1, 2),
    Hk=st.integers(1, 2),
    group=st.integers(1, 3),
    Nq=st.integers(1, 19),
    Nk=st.integers(1, 19),
    d=st.integers(1, 5),
    Br=st.integers(1, 8),
    Bc=st.integers(1, 8),
    causal=st.booleans(),
    seed=st.integers(0, 99),
)
def test_both_tiled_algorithms_are_attention(B, Hk, group, Nq, Nk, d, Br, Bc, causal, seed):
    q, k, v = random_inputs(B, Hk * group, Hk, Nq, Nk, d, seed=seed)
    want = attention(q, k, v, causal=causal, return_lse=True)
    for tiled in TILED:
        got = tiled(q, k, v, Br=Br, Bc=Bc, causal=causal, return_lse=True)
        assert_close(got, want, 100 * EPS)
        np.testing.assert_array_equal(tiled(q, k, v, Br=Br, Bc=Bc, causal=causal), got[0])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_huge_logits(shape, causal):
    q, k, v = random_inputs(*shape, size=1e4)
    want = plain_loop(q, k, v, causal=causal)
    bound = 1e4 * shape[-1] * 10 * EPS  # a score's rounding is a relative error of its weight
    assert_close(attention(q, k, v, causal=causal, return_lse=True), want, bound)
    for tiled in TILED:
        assert_close(tiled(q, k, v, Br=3, Bc=2, causal=causal, return_lse=True), want, bound)
    assert_close(unfused(q, k, v, causal=causal, return_lse=True, dtype="f8"), want, bound)


ALL = [
    attention,
    unfused,
    partial(fa1_tiled, Br=2, Bc=3),
    partial(fa2_tiled, Br=2, Bc=3),
]


@pytest.mark.parametrize("compute", ALL)
def test_a_row_without_columns_is_zero(compute):
    q, k, v = random_inputs(1, 2, 1, 9, 4, 3)
    O, L = compute(q, k, v, causal=True, return_lse=True)
    assert np.all(O[:, :, :5] == 0) and np.all(L[:, :, :5] == -np.inf)
    assert np.all(O[:, :, 5:] != 0) and np.all(np.isfinite(L[:, :, 5:]))


@pytest.mark.parametrize("compute", ALL)
def test_scores_of_minus_infinity_weigh_nothing(compute):
    q = np.ones((1, 1, 3, 1))
    q[0, 0, 1] = 1e-3
    k = np.full((1, 1, 7, 1), -np.inf)
    v = np.arange(1.0, 8.0).reshape(k.shape)
    O, L = compute(q, k, v, return_lse=True)
    assert np.all(O == 0) and np.all(np.isneginf(L))
    k[0, 0, 4] = 2.0
    O, L = compute(q, k, v, return_lse=True)
    assert np.all(O == 5.0)
    np.testing.assert_allclose(L, 2 * q[..., 0], rtol=1e-7)


@pytest.mark.parametrize("compute", ALL)
def test_nan_stays_in_its_row(compute):
    q, k, v = (a.copy() for a in random_inputs(1, 1, 1, 6, 6, 3))
    q[0, 0, 2, 1] = np.nan
    O, L = compute(q, k, v, causal=True, return_lse=True)
    has_nan = np.arange(6) == 2
    np.testing.assert_array_equal(np.isnan(O[0, 0]), np.repeat(has_nan[:, None], 3, axis=1))
    np.testing.assert_array_equal(np.isnan(L[0, 0]), has_nan)


# q, K, V and the states after each block of 4 keys, scores q.k; printed to three decimals.
Q = np.array([1.0, 0, 2, 1]).reshape(1, 1, 1, 4)
K = np.array(
    [
        *([1, 1, 0, 0], [0, 1, 1, 0], [1, 0, 1, 1], [0, 0, 1, 0]),
        *([2, 1, 1, 1], [0, 1, 0, 1], [1, 1, 1, 0], [0, 0, 0, 1]),
    ],
    dtype=float,
).reshape(1, 1, 8, 4)
V = np.array(
    [
        *([2, 1, 0, 3], [1, 0, 1, 2], [0, 2, 1, 1], [3, 1, 0, 0]),
        *([1, 3, 2, 0], [0, 1, 0, 2], [2, 0, 1, 1], [1, 0, 0, 3]),
    ],
    dtype=float,
).reshape(1, 1, 8, 4)
HALF_DIGIT = 5.0e-4


@pytest.mark.parametrize("tiled", TILED)
@pytest.mark.parametrize(
    "keys, m, l, o",
    [
        (4, 4.0, 1.320, [0.641, 2.185, 1.135, 1.420]),
        (8, 5.0, 1.657, [1.525, 3.822, 2.553, 0.749]),
    ],
)
def test_worked_example_one(tiled, keys, m, l, o):
    O, L = tiled(Q, K[:, :, :keys], V[:, :, :keys], Br=1, Bc=4, scale=1.0, return_lse=True)
    got_l = math.exp(L.item() - m)
    assert 0 <= got_l - l < 1e-3  # l is cut, not rounded: 1.6577 is printed as 1.657
    np.testing.assert_allclose(got_l * O.ravel(), o, rtol=0, atol=HALF_DIGIT)


@pytest.mark.parametrize("compute", [attention, *ALL[2:]])
def test_worked_example_one_output(compute):
    O = compute(Q, K, V, scale=1.0)
    np.testing.assert_allclose(O.ravel(), [0.920, 2.306, 1.540, 0.452], rtol=0, atol=HALF_DIGIT)


@pytest.mark.parametrize("tiled", TILED)
def test_worked_example_two(tiled):
    scores = np.array([3.0, 1, 2, 4, 5, 1, 3, 1]).reshape(1, 1, 8, 1)
    one = np.ones((1, 1, 1, 1))

    def total(s, m):
        return math.exp(tiled(one, s, s, Br=1, Bc=4, scale=1.0, return_lse=True)[1].item() - m)

    first, second = total(scores[:, :, :4], 4.0), total(scores[:, :, 4:], 5.0)
    factor = math.exp(4.0 - 5.0)
    assert first == pytest.approx(1.553, abs=HALF_DIGIT)
    assert factor == pytest.approx(0.368, abs=HALF_DIGIT)
    assert factor * first == pytest.approx(0.571, abs=HALF_DIGIT)
    assert total(scores, 5.0) == pytest.approx(factor * first + second, rel=10 * EPS)


@pytest.mark.parametrize("compute", [attention, *(partial(tiled, Br=1, Bc=2) for tiled in TILED)])
def test_worked_example_three(compute):
    scores = np.zeros((1, 1, 4, 4))
    scores[0, 0, :, 0] = [1, 2, 3, 4]
    q = np.zeros((1, 1, 1, 4))
    q[..., 0] = 1.0
    softmax = compute(q, scores, np.eye(4)[None, None], scale=1.0)
    want = [0.0320586, 0.08714432, 0.23688284, 0.6439143]  # printed from float32
    np.testing.assert_allclose(softmax.ravel(), want, rtol=np.finfo(np.float32).eps, atol=0)


@pytest.mark.parametrize("dtype, low, high", [("f4", 1e-9, 1e-6), ("f2", 1e-5, 1e-2)])
def test_unfused_rounds_every_step_to_its_dtype(dtype, low, high):
    q, k, v = (a.astype(dtype) for a in random_inputs(1, 1, 1, 33, 65, 16))
    O, L = unfused(q, k, v, dtype=dtype, scale=0.3, return_lse=True)
    S = np.asarray(0.3, dtype) * (q[0, 0] @ k[0, 0].T)
    P = np.exp(S - S.max(axis=1, keepdims=True))
    l = P.sum(axis=1, keepdims=True)
    assert O.dtype == L.dtype == S.dtype == P.dtype == l.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(O[0, 0], (P / l) @ v[0, 0])
    np.testing.assert_array_equal(L[0, 0], S.max(axis=1) + np.log(l[:, 0]))
    for out, ref in zip((O, L), attention(q, k, v, scale=0.3, return_lse=True), strict=True):
        assert low < relative_error(out, ref) < high


@pytest.mark.parametrize("causal", [False, True])
def test_unfused_in_float64_is_attention(causal):
    q, k, v = random_inputs(2, 4, 2, 9, 6, 5)
    got = unfused(q, k, v, dtype=np.float64, causal=causal, return_lse=True)
    assert_close(got, plain_loop(q, k, v, causal=causal), 50 * EPS)


# --- gradients -------------------------------------------------------------------------------

IN_FLOAT64 = [attention_backward, partial(unfused_backward, dtype=np.float64)]


def with_output_gradient(shape, *, seed=0):
    q, k, v = random_inputs(*shape, seed=seed)
    return np.random.default_rng(seed + 1000).standard_normal(q.shape), q, k, v


def central_differences(dout, q, k, v, **options):
    """The gradients of sum(dout o attention(q, k, v)), one element moved at a time."""
    step = 1e-5  # error: step^2 of the method, EPS / step of the arithmetic
    gradients = []
    for n, array in enumerate((q, k, v)):
        gradient = np.empty(array.shape)
        for where in np.ndindex(array.shape):
            loss = []
            for sign in (1, -1):
                moved = [a.copy() for a in (q, k, v)]
                moved[n][where] += sign * step
                loss.append(math.fsum((dout * attention(*moved, **options)).ravel()))
            gradient[where] = (loss[0] - loss[1]) / (2 * step)
        gradients.append(gradient)
    return gradients


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [None, -0.7])
@pytest.mark.parametrize(
    "shape",
    [(1, 1, 1, 1, 1, 1), (1, 2, 1, 5, 5, 3), (2, 4, 2, 3, 6, 2), (1, 3, 1, 6, 3, 2)],
)
def test_gradients_are_the_central_differences(shape, scale, causal):
    dout, q, k, v = with_output_gradient(shape)
    options = dict(scale=scale, causal=causal)
    want = central_differences(dout, q, k, v, **options)
    for compute in IN_FLOAT64:
        for name, got, ref in zip("qkv", compute(dout, q, k, v, **options), want, strict=True):
            assert got.dtype == np.float64 and got.shape == ref.shape
            np.testing.assert_allclose(got, ref, rtol=0, atol=1e-8, err_msg=f"d{name}")


@settings(max_examples=100, deadline=None)
@given(
    B=st.integers(1, 2),
    Hk=st.integers(1, 2),
    group=st.integers(1, 3),
    Nq=st.integers(1, 9),
    Nk=st.integers(1, 9),
    d=st.integers(1, 4),
    causal=st.booleans(),
    seed=st.integers(0, 99),
)
def test_gradients_along_a_direction(B, Hk, group, Nq, Nk, d, causal, seed):
    """The slope of the loss along any direction is the gradients' product with it."""
    dout, q, k, v = with_output_gradient((B, Hk * group, Hk, Nq, Nk, d), seed=seed)
    rng = np.random.default_rng(seed)
    direction = [rng.standard_normal(a.shape) for a in (q, k, v)]

    def loss(t):
        moved = (a + t * u for a, u in zip((q, k, v), direction, strict=True))
        return np.sum(dout * attention(*moved, causal=causal))

    slope = (loss(1e-5) - loss(-1e-5)) / 2e-5
    gradients = attention_backward(dout, q, k, v, causal=causal)
    terms = [np.sum(g * u) for g, u in zip(gradients, direction, strict=True)]
    assert sum(terms) == pytest.approx(slope, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("compute", [attention_backward, unfused_backward])
def test_gradients_by_hand(compute):
    # Two keys of equal score: P = (1/2, 1/2). dP = dO V^T = (6, 2), D = 4, dS = (1, -1).
    q, k = np.array([2.0]).reshape(1, 1, 1, 1), np.array([5.0, 5.0]).reshape(1, 1, 2, 1)
    v, dout = np.array([3.0, 1.0]).reshape(1, 1, 2, 1), np.array([2.0]).reshape(1, 1, 1, 1)
    dq, dk, dv = compute(dout, q, k, v, scale=0.5)
    assert dq.ravel().tolist() == [0.0]  # both keys are the same, so nothing turns q
    assert dk.ravel().tolist() == [1.0, -1.0]  # scale dS q
    assert dv.ravel().tolist() == [1.0, 1.0]  # P dO
    k[0, 0, 1] = 5.0 - math.log(3)  # scores 10 and 10 - 2 log 3: P = (9, 1) / 10
    dq, dk, dv = compute(dout, q, k, v, scale=1.0)
    close = partial(np.testing.assert_allclose, rtol=1e-5)
    # dP = (6, 2), D = 5.6, dS = (0.36, -0.36)
    close(dq.ravel(), [0.36 * math.log(3)])
    close(dk.ravel(), [0.72, -0.72])
    close(dv.ravel(), [1.8, 0.2])


@pytest.mark.parametrize("compute", [attention_backward, unfused_backward])
def test_a_group_sums_its_heads(compute):
    dout, q, k, v = with_output_gradient((2, 6, 2, 7, 9, 4))
    dq, dk, dv = compute(dout, q, k, v, causal=True)
    repeated = [np.repeat(a, 3, axis=1) for a in (k, v)]
    dq_own, dk_own, dv_own = compute(dout, q, *repeated, causal=True)
    np.testing.assert_array_equal(dq, dq_own)
    for got, own in ((dk, dk_own), (dv, dv_own)):
        want = own.reshape(2, 2, 3, 9, 4).sum(axis=2)
        np.testing.assert_allclose(got, want, rtol=0, atol=4 * np.finfo(got.dtype).eps * 10)


@pytest.mark.parametrize("compute", [attention_backward, unfused_backward])
def test_a_row_without_columns_has_no_gradient(compute):
    dout, q, k, v = with_output_gradient((1, 2, 1, 9, 4, 3))
    dq, dk, dv = compute(dout, q, k, v, causal=True)
    assert np.all(dq[:, :, :5] == 0) and np.all(dq[:, :, 6:] != 0)
    # The other rows alone give the same.
    alone = compute(dout[:, :, 5:], q[:, :, 5:], k, v, causal=True)
    for got, want in zip((dq[:, :, 5:], dk, dv), alone, strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=40 * np.finfo(got.dtype).eps)


@pytest.mark.parametrize("compute", IN_FLOAT64)
def test_long_gradients_are_computed_in_pieces(compute):
    Nq = reference._ROWS + 37
    dout, q, k, v = with_output_gradient((1, 1, 1, Nq, 30, 2))
    whole = compute(dout, q, k, v)
    parts = [compute(dout[:, :, n], q[:, :, n], k, v) for n in (slice(300), slice(300, None))]
    np.testing.assert_allclose(
        whole[0], np.concatenate([p[0] for p in parts], axis=2), rtol=0, atol=1e-13
    )
    for n in (1, 2):
        np.testing.assert_allclose(whole[n], parts[0][n] + parts[1][n], rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype, low, high", [("f4", 1e-9, 1e-5), ("f2", 1e-5, 1e-1)])
def test_unfused_gradients_round_every_step(dtype, low, high):
    dout, q, k, v = (a.astype(dtype) for a in with_output_gradient((1, 1, 1, 33, 65, 16)))
    got = unfused_backward(dout, q, k, v, dtype=dtype, scale=0.3)
    scale = np.asarray(0.3, dtype)
    S = scale * (q[0, 0] @ k[0, 0].T)
    P = np.exp(S - S.max(axis=1, keepdims=True))
    P = P / P.sum(axis=1, keepdims=True)
    dP = dout[0, 0] @ v[0, 0].T
    dS = P * (dP - (P * dP).sum(axis=1, keepdims=True))
    want = scale * (dS @ k[0, 0]), scale * (dS.T @ q[0, 0]), P.T @ dout[0, 0]
    exact = attention_backward(dout, q, k, v, scale=0.3)
    for g, w, e in zip(got, want, exact, strict=True):
        assert g.dtype == w.dtype == np.dtype(dtype)
        np.testing.assert_array_equal(g[0, 0], w)
        assert low < relative_error(g, e) < high


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_of_huge_logits(shape, causal):
    dout, q, k, v = with_output_gradient(shape)
    q = 1e4 * q
    bound = 1e8 * shape[-1] * 100 * EPS  # a score's rounding, times K, Q, dO and V
    for g, w in zip(*(f(dout, q, k, v, causal=causal) for f in IN_FLOAT64), strict=True):
        assert np.isfinite(g).all()
        np.testing.assert_allclose(g, w, rtol=0, atol=bound)


@pytest.mark.parametrize("compute", [attention_backward, unfused_backward])
def test_shapes_of_gradients_are_checked(compute):
    with pytest.raises(ValueError, match=r"dout has shape \(1, 1, 1, 3\): allowed is q's, \(1, 1,"):
        compute(Q[..., :3], Q, K, V)
    with pytest.raises(ValueError, match="v has seqlen 7"):
        compute(Q, Q, K, V[:, :, :7])


def test_relative_error():
    ref = np.array([[3.0, 0.0], [0.0, 4.0]])
    assert relative_error(ref, ref) == 0.0
    assert relative_error(ref + [[0, 0.3], [0.4, 0]], ref) == pytest.approx(0.1)
    assert relative_error(np.zeros(3), np.zeros(3)) == 0.0
    assert relative_error(np.array([0.0, 1e-9]), np.zeros(2)) == np.inf
    both = np.array([-np.inf, 1.0, np.nan])
    assert relative_error(both, both) == 0.0
    for wrong in ([0.0, 1.0, np.nan], [np.inf, 1.0, np.nan], [-np.inf, np.nan, np.nan]):
        assert relative_error(np.array(wrong), both) == np.inf
    assert relative_error(np.array([-np.inf, 1.0, 0.0]), both) == np.inf
    assert relative_error(np.array([-np.inf, 1.5, np.nan]), both) == pytest.approx(0.5)


def test_worst_says_where():
    ref = np.zeros((2, 3))
    out = ref.copy()
    out[0, 1], out[1, 2] = 0.5, -2.0
    assert worst(out, ref) == ((1, 2), -2.0, 0.0)
    out[0, 0] = np.nan
    coordinate, got, expected = worst(out, ref)
    assert coordinate == (0, 0) and math.isnan(got) and expected == 0.0


@pytest.mark.parametrize("compare", [relative_error, worst])
def test_comparing_different_shapes_is_refused(compare):
    with pytest.raises(ValueError, match=r"out has shape \(1, 3\): .* \(3,\)"):
        compare(np.ones((1, 3)), np.ones(3))
    with pytest.raises(ValueError, match="empty axis"):
        compare(np.ones((0, 3)), np.ones((0, 3)))


@pytest.mark.parametrize("tiled", TILED)
@pytest.mark.parametrize("tiles", [dict(Br=0, Bc=1), dict(Br=1, Bc=-1)])
def test_tiles_of_no_size_are_refused(tiled, tiles):
    name = next(name for name, n in tiles.items() if n < 1)
    with pytest.raises(ValueError, match=f"{name} is {tiles[name]}.*integer >= 1"):
        tiled(Q, K, V, **tiles)


@pytest.mark.parametrize("compute", ALL)
def test_shapes_are_checked(compute):
    with pytest.raises(ValueError, match="v has seqlen 7"):
        compute(Q, K, V[:, :, :7])
