"""The float64 reference against a plain loop, the tiled algorithms and worked examples."""

import math
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa_numba import reference
from fa_numba.reference import attention, fa1_tiled, fa2_tiled, relative_error, unfused, worst

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
