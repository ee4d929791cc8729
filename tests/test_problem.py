"""Problem: what it stores, what it refuses and how it says so; the mask and its row ends."""

import dataclasses
from fractions import Fraction

import numpy as np
import pytest

from fa_numba.masks import visible_causal
from fa_numba.problem import Problem

SIZES = dict(batch=2, heads_q=6, heads_k=3, seqlen_q=5, seqlen_k=7, head_dim=4)


def test_a_problem_knows_its_shapes():
    p = Problem(**SIZES)
    assert p.q_shape == (2, 6, 5, 4)
    assert p.k_shape == (2, 3, 7, 4)
    assert p.lse_shape == (2, 6, 5)
    assert p.group == 2
    assert p.diagonal == 2
    assert (p.dtype, p.causal) == ("float32", False)


def test_scale_is_stored_as_a_float():
    assert Problem(**SIZES).scale == 0.5
    assert Problem(1, 1, 1, 1, 1, 64).scale == 0.125
    for given, stored in [(2, 2.0), (0, 0.0), (np.float32(-0.25), -0.25), (Fraction(1, 8), 0.125)]:
        scale = Problem(**SIZES, scale=given).scale
        assert type(scale) is float and scale == stored


def test_numpy_sizes_become_ints_and_equal_problems_are_one_key():
    p = Problem(**{name: np.int64(n) for name, n in SIZES.items()})
    assert all(type(getattr(p, name)) is int for name in SIZES)
    assert {p: 1}[Problem(**SIZES, scale=0.5)] == 1
    assert p != Problem(**SIZES, causal=True)
    with pytest.raises(dataclasses.FrozenInstanceError):
        p.batch = 3


def test_from_shapes_is_the_constructor():
    q, k = (2, 6, 5, 4), (2, 3, 7, 4)
    want = Problem(**SIZES, scale=3.0, causal=True)
    assert Problem.from_shapes(q, k, k, scale=3.0, causal=True) == want
    assert Problem.from_shapes(list(q), list(k), scale=3.0, causal=True) == want


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize(
    "value, error, says",
    [
        (0, ValueError, ["is 0", "an empty axis", "an integer >= 1"]),
        (-3, ValueError, ["is -3", "an integer >= 1"]),
        (2.0, TypeError, ["is 2.0", "an integer >= 1"]),
        ("2", TypeError, ["is '2'", "an integer >= 1"]),
        (True, TypeError, ["is True", "an integer >= 1"]),
        (None, TypeError, ["is None", "an integer >= 1"]),
    ],
)
def test_a_bad_size_is_refused(name, value, error, says):
    with pytest.raises(error) as e:
        Problem(**{**SIZES, name: value})
    assert str(e.value).startswith(name)
    assert all(part in str(e.value) for part in says)


@pytest.mark.parametrize(
    "bad, error, says",
    [
        ({"head_dim": 257}, ValueError, ["head_dim", "257", "1 to 256"]),
        ({"heads_k": 4}, ValueError, ["heads_k", "4", "a divisor of 6"]),
        ({"heads_k": 12}, ValueError, ["heads_k", "12", "a divisor of 6"]),
        ({"dtype": "float64"}, ValueError, ["dtype", "'float64'", "float32"]),
        ({"dtype": np.float32}, TypeError, ["dtype", "numpy.float32", "float32"]),
        ({"scale": float("nan")}, ValueError, ["scale", "nan", "finite"]),
        ({"scale": float("inf")}, ValueError, ["scale", "inf", "finite"]),
        ({"scale": -float("inf")}, ValueError, ["scale", "-inf", "finite"]),
        ({"scale": 1e39}, ValueError, ["scale", "1e+39", "finite", "2.36e+38", "float32"]),
        ({"scale": 10**400}, ValueError, ["scale", "1000", "finite"]),
        ({"scale": True}, TypeError, ["scale", "True", "finite real number"]),
        ({"scale": np.bool_(True)}, TypeError, ["scale", "True", "finite real number"]),
        ({"scale": "1"}, TypeError, ["scale", "'1'", "finite real number"]),
        ({"scale": 1j}, TypeError, ["scale", "1j", "finite real number"]),
        ({"scale": np.ones(1)}, TypeError, ["scale", "array([1.])", "finite real number"]),
        ({"causal": 1}, TypeError, ["causal", "1", "True or False"]),
        ({"causal": None}, TypeError, ["causal", "None", "True or False"]),
    ],
)
def test_a_bad_option_is_refused(bad, error, says):
    with pytest.raises(error) as e:
        Problem(**{**SIZES, **bad})
    assert str(e.value).startswith(says[0])
    assert all(part in str(e.value) for part in says)


def test_the_limits_themselves_are_allowed():
    assert Problem(**{**SIZES, "head_dim": 256}).head_dim == 256
    # times log2(e) it must be a float32
    largest = float(np.finfo(np.float32).max) / np.log2(np.e)
    assert Problem(**SIZES, scale=-largest).scale == -largest


@pytest.mark.parametrize(
    "q, k, v, error, says",
    [
        ((2, 6, 5), (2, 3, 7, 4), None, ValueError, ["q has", "(2, 6, 5)", "rank 3", "rank 4"]),
        ((2, 6, 5, 4), (7, 4), None, ValueError, ["k has", "(7, 4)", "rank 2", "rank 4"]),
        ((2, 6, 5, 4), (2, 3, 7, 4), (), ValueError, ["v has", "()", "rank 0", "rank 4"]),
        ((0, 6, 5, 4), (2, 3, 7, 4), None, ValueError, ["batch of q", "(0, 6, 5, 4)", "empty"]),
        ((2, 6, 5, 4), (2, 0, 7, 4), None, ValueError, ["heads of k", "(2, 0, 7, 4)", "empty"]),
        ((2, 6, 5, 4), (2, 3, 0, 4), None, ValueError, ["seqlen of k", "(2, 3, 0, 4)", "empty"]),
        ((2, 6, 5, 4), (2, 3, 7, 4), (2, 3, 7, 0), ValueError, ["head_dim of v", "0", "empty"]),
        ((2, 6, 5, 4), (2, 3, 7.0, 4), None, TypeError, ["seqlen of k", "7.0", "integer"]),
        ((2, 6, 5, 4), (1, 3, 7, 4), None, ValueError, ["k has batch 1", "is 2", "as q"]),
        ((2, 6, 5, 4), (2, 4, 7, 4), None, ValueError, ["k has heads 4", "divisor of 6", "of q"]),
        ((2, 6, 5, 4), (2, 3, 7, 8), None, ValueError, ["k has head_dim 8", "is 4", "as q"]),
        ((2, 6, 5, 300), (2, 3, 7, 300), None, ValueError, ["q has head_dim 300", "1 to 256"]),
        ((2, 6, 5, 4), (2, 3, 7, 4), (1, 3, 7, 4), ValueError, ["v has batch 1", "is 2", "as k"]),
        ((2, 6, 5, 4), (2, 3, 7, 4), (2, 6, 7, 4), ValueError, ["v has heads 6", "is 3", "as k"]),
        ((2, 6, 5, 4), (2, 3, 7, 4), (2, 3, 5, 4), ValueError, ["v has seqlen 5", "is 7", "as k"]),
        ((2, 6, 5, 4), (2, 3, 7, 4), (2, 3, 7, 2), ValueError, ["v has head_dim 2", "4", "as k"]),
    ],
)
def test_shapes_that_do_not_fit_are_refused(q, k, v, error, says):
    with pytest.raises(error) as e:
        Problem.from_shapes(q, k, v)
    assert str(e.value).startswith(says[0])
    assert all(part in str(e.value) for part in says)


@pytest.mark.parametrize("Nq", range(1, 8))
@pytest.mark.parametrize("Nk", range(1, 8))
def test_causal_mask_is_aligned_to_the_bottom_right(Nq, Nk):
    p = Problem(1, 1, 1, Nq, Nk, 1, causal=True)
    # Counted from the last row and column, where the diagonal ends in the corner.
    want = [[Nk - 1 - col >= Nq - 1 - row for col in range(Nk)] for row in range(Nq)]
    by_element = [[visible_causal(i, j, p.diagonal) for j in range(Nk)] for i in range(Nq)]
    rows = np.arange(Nq)
    assert by_element == want
    np.testing.assert_array_equal(
        visible_causal(rows[:, None], np.arange(Nk)[None, :], p.diagonal), want
    )
    for row in range(Nq):
        end = p.columns_end(row)
        assert type(end) is int
        assert want[row] == [True] * end + [False] * (Nk - end)
    np.testing.assert_array_equal(p.columns_end(rows), np.sum(want, axis=1))


def test_without_a_mask_every_row_sees_every_column():
    p = Problem(1, 1, 1, 5, 3, 1)
    assert [p.columns_end(row) for row in range(5)] == [3] * 5
    np.testing.assert_array_equal(p.columns_end(np.arange(5)), [3] * 5)
