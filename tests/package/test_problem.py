"""Problem: what it stores, what it refuses and how it says so; the mask and its row ends."""

import itertools
from fractions import Fraction

import numpy as np
import pytest
from helpers import refused

from fa_numba.problem import MAX_SEQLEN, UNBOUNDED, Problem

SIZES = dict(batch=2, heads_q=6, heads_k=3, seqlen_q=5, seqlen_k=7, head_dim=4)


def test_a_problem_knows_its_shapes():
    p = Problem(**SIZES)
    assert p.q_shape == (2, 6, 5, 4)
    assert p.k_shape == (2, 3, 7, 4)
    assert p.lse_shape == (2, 6, 5)
    assert p.group == 2
    assert p.diagonal == 2
    assert (p.dtype, p.causal) == ("float32", False)


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize(
    "value, error, says",
    [
        (0, ValueError, ["must be an integer of at least 1, got 0 (an empty axis)"]),
        (-3, ValueError, ["must be an integer of at least 1, got -3"]),
        (2.0, TypeError, ["must be an integer of at least 1, got 2.0"]),
        ("2", TypeError, ["must be an integer of at least 1, got '2'"]),
        (True, TypeError, ["must be an integer of at least 1, got True"]),
        (None, TypeError, ["must be an integer of at least 1, got None"]),
    ],
)
def test_a_bad_size_is_refused(name, value, error, says):
    with refused(error, says, name):
        Problem(**{**SIZES, name: value})


@pytest.mark.parametrize(
    "bad, error, says",
    [
        ({"head_dim": 257}, ValueError, ["head_dim", "257", "1 to 256"]),
        ({"heads_k": 4}, ValueError, ["heads_k must be a divisor of heads_q, which is 6, got 4"]),
        ({"heads_k": 12}, ValueError, ["heads_k must be a divisor of heads_q, which is 6, got 12"]),
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
        ({"alibi": 1}, TypeError, ["alibi", "1", "True or False"]),
        ({"packed": 1}, TypeError, ["packed", "1", "True or False"]),
        ({"sparse": 1}, TypeError, ["sparse", "1", "True or False"]),
        (
            {"window": 3},
            TypeError,
            ["window", "3", "(left, right)", "-1 or None instead of an integer"],
        ),
        ({"window": "12"}, TypeError, ["window", "'12'", "(left, right)"]),
        ({"window": (1.0, 2)}, TypeError, ["window", "(1.0, 2)", "(left, right)"]),
        ({"window": (True, 2)}, TypeError, ["window", "(True, 2)", "(left, right)"]),
        ({"window": {1, 2}}, TypeError, ["window", "{1, 2}", "(left, right)"]),
        ({"window": (1,)}, ValueError, ["window", "(1,)", "(left, right)"]),
        ({"window": ()}, ValueError, ["window", "()", "(left, right)"]),
        ({"window": (1, 2, 3)}, ValueError, ["window", "(1, 2, 3)", "(left, right)"]),
        ({"window": (-2, 0)}, ValueError, ["window", "(-2, 0)", "(left, right)"]),
        (
            {"softcap": 1e-31},
            ValueError,
            ["softcap must be a number from 1e-30 to 1e30, or None or 0 for no cap", "got 1e-31"],
        ),
        ({"softcap": -2.0}, ValueError, ["softcap", "-2.0", "1e-30 to 1e30"]),
        ({"softcap": 1e31}, ValueError, ["softcap", "1e+31", "1e-30 to 1e30"]),
        ({"softcap": float("nan")}, ValueError, ["softcap", "nan", "1e-30 to 1e30"]),
        ({"softcap": float("inf")}, ValueError, ["softcap", "inf", "1e-30 to 1e30"]),
        (
            {"softcap": 10**400},
            ValueError,
            ["softcap must be a number from 1e-30 to 1e30, or None or 0 for no cap", "got 1000"],
        ),
        ({"softcap": True}, TypeError, ["softcap", "True", "a positive number, or None"]),
        ({"softcap": "2"}, TypeError, ["softcap", "'2'", "a positive number, or None"]),
        (
            {"dropout_p": 1.0},
            ValueError,
            ["dropout_p must be a number of at least 0 and less than 1, got 1.0"],
        ),
        (
            {"dropout_p": -1e-9},
            ValueError,
            ["dropout_p must be a number of at least 0 and less than 1, got -1e-09"],
        ),
        (
            {"dropout_p": float("nan")},
            ValueError,
            ["dropout_p must be a number of at least 0 and less than 1, got nan"],
        ),
        (
            {"dropout_p": 10**400},
            ValueError,
            ["dropout_p must be a number of at least 0 and less than 1", "got 1000"],
        ),
        (
            {"dropout_p": False},
            TypeError,
            ["dropout_p must be a number of at least 0 and less than 1, got False"],
        ),
        (
            {"layout": "bhdn"},
            ValueError,
            [
                "layout must be 'bhnd' for (batch, heads, seqlen, head_dim) or 'bnhd' for",
                "got 'bhdn'",
            ],
        ),
        (
            {"layout": 1},
            ValueError,
            ["layout must be 'bhnd' for (batch, heads, seqlen, head_dim) or 'bnhd' for", "got 1"],
        ),
        (
            {"bias": 7},
            TypeError,
            ["bias must be an array, or a shape (a sequence of integers), got 7"],
        ),
        (
            {"bias": (5.0, 7.0)},
            TypeError,
            ["bias must be an array, or a shape (a sequence of integers), got (5.0, 7.0)"],
        ),
        (
            {"bias": "57"},
            TypeError,
            ["bias must be an array, or a shape (a sequence of integers), got '57'"],
        ),
        (
            {"q_lens": [5, 6]},
            ValueError,
            ["q_lens must contain integers from 0 to 5 (the sequence length), got 6"],
        ),
        (
            {"q_lens": [-1, 5]},
            ValueError,
            ["q_lens must contain integers from 0 to 5 (the sequence length), got -1"],
        ),
        (
            {"q_lens": [5, 5, 5]},
            ValueError,
            ["q_lens must have shape (2,) (one value per batch entry), got (3,)"],
        ),
        (
            {"q_lens": 5},
            ValueError,
            ["q_lens must have shape (2,) (one value per batch entry), got ()"],
        ),
        ({"q_lens": [5.0, 5.0]}, TypeError, ["q_lens must contain integers, got dtype float64"]),
        (
            {"kv_lens": [0, 8]},
            ValueError,
            ["kv_lens must contain integers from 0 to 7 (the sequence length), got 8"],
        ),
        (
            {"kv_lens": [[7, 7]]},
            ValueError,
            ["kv_lens must have shape (2,) (one value per batch entry), got (1, 2)"],
        ),
        ({"kv_lens": [True, True]}, TypeError, ["kv_lens must contain integers, got dtype bool"]),
        (
            {"bias": (5, 6)},
            ValueError,
            [
                "bias must broadcast to (batch, heads_q, seqlen_q, seqlen_k) = (2, 6, 5, 7)",
                "got shape (5, 6)",
            ],
        ),
        (
            {"bias": (3, 5, 7)},
            ValueError,
            [
                "bias must broadcast to (batch, heads_q, seqlen_q, seqlen_k) = (2, 6, 5, 7)",
                "got shape (3, 5, 7)",
            ],
        ),
        (
            {"bias": (0, 1, 1, 1)},
            ValueError,
            [
                "bias must broadcast to (batch, heads_q, seqlen_q, seqlen_k) = (2, 6, 5, 7)",
                "got shape (0, 1, 1, 1)",
            ],
        ),
        (
            {"bias": (1, 2, 6, 5, 7)},
            ValueError,
            [
                "bias must broadcast to (batch, heads_q, seqlen_q, seqlen_k) = (2, 6, 5, 7)",
                "got shape (1, 2, 6, 5, 7)",
            ],
        ),
    ],
)
def test_a_bad_option_is_refused(bad, error, says):
    with refused(error, says, says[0]):
        Problem(**{**SIZES, **bad})


def test_options_are_stored_as_what_they_mean():
    p = Problem(**SIZES)
    assert (p.window, p.softcap, p.bias, p.dropout_p) == ((-1, -1), None, None, 0.0)
    assert (p.alibi, p.packed, p.sparse, p.q_lens, p.kv_lens) == (False,) * 3 + (None,) * 2
    # a side that hides nothing is an open one
    for given, stored in [
        ([2, np.int32(0)], (2, 0)),
        ((UNBOUNDED, UNBOUNDED - 1), (-1, UNBOUNDED - 1)),
    ]:
        window = Problem(**SIZES, window=given).window
        assert window == stored and all(type(n) is int for n in window)
    for given in (2, np.float32(2), Fraction(4, 2)):
        assert type(Problem(**SIZES, softcap=given).softcap) is float
    assert type(Problem(**SIZES, dropout_p=0).dropout_p) is float
    assert Problem(**SIZES, softcap=1e-30).softcap == 1e-30
    assert Problem(**SIZES, softcap=10**30).softcap == 1e30
    lengths = Problem(**SIZES, q_lens=np.array([0, 5], np.uint8), kv_lens=[7, 0])
    assert (lengths.q_lens, lengths.kv_lens) == ((0, 5), (7, 0))
    assert [lengths.lengths(b) for b in range(2)] == [(0, 7), (5, 0)]
    assert Problem(**SIZES, q_lens=[1, 2]).lengths(1) == (2, 7)
    assert {lengths: 1}[Problem(**SIZES, q_lens=(0, 5), kv_lens=np.array([7, 0]))] == 1


def test_the_longest_sequences():
    long = {**SIZES, "seqlen_q": MAX_SEQLEN, "seqlen_k": MAX_SEQLEN}
    assert Problem(**long).seqlen_k == MAX_SEQLEN
    for name in "qk":
        wrong = f"seqlen of {name} must be at most {MAX_SEQLEN}, got {MAX_SEQLEN + 1}"
        with pytest.raises(ValueError, match=wrong):
            Problem(**{**long, f"seqlen_{name}": MAX_SEQLEN + 1})
    windowed = {**SIZES, "seqlen_q": UNBOUNDED, "seqlen_k": UNBOUNDED, "window": (1, 1)}
    assert Problem(**windowed).seqlen_k == UNBOUNDED
    for name in "qk":
        with pytest.raises(ValueError, match=f"seqlen of {name} must .* {UNBOUNDED} with a window"):
            Problem(**{**windowed, f"seqlen_{name}": UNBOUNDED + 1})


@pytest.mark.parametrize("name", ["q", "k"])
def test_the_most_rows_of_packed_sequences(name):
    """Kernels find the rows of a sequence by a start of 32 bits; of pages only those of q count."""
    few, many = [0, 1, 2, 3], [0, 2**30, 2**31 - 1024, 2**31 - 1024]
    starts = {"cu_seqlens_q": few, "cu_seqlens_k": few, f"cu_seqlens_{name}": many}
    shapes = [(of[-1], 1, 8) for of in (starts["cu_seqlens_q"], starts["cu_seqlens_k"])]
    assert MAX_SEQLEN in (Problem.from_shapes(*shapes, **starts).q_shape[0], shapes[1][0])
    starts[f"cu_seqlens_{name}"] = many = [0, 2**30, 2**31, 3 * 2**30]
    shapes["qk".index(name)] = (many[-1], 1, 8)
    wrong = (
        f"^{name} must have at most {MAX_SEQLEN} rows in all packed sequences together, got "
        f"{3 * 2**30}; pass fewer sequences in a call$"
    )
    with pytest.raises(ValueError, match=wrong):
        Problem.from_shapes(*shapes, **starts)
    paged = {"block_table": (3, 2**26), "kv_lens": [2**30] * 3}
    of_pages = {"cu_seqlens_q": starts["cu_seqlens_q"], **paged}
    shapes[1] = (9, 1, 16, 8)
    if name == "k":
        assert Problem.from_shapes(*shapes, **of_pages).seqlen_k == 2**30
        return
    with pytest.raises(ValueError, match=wrong):
        Problem.from_shapes(*shapes, **of_pages)


PACKED = dict(cu_seqlens_q=[0, 3, 3, 8], cu_seqlens_k=[0, 0, 4, 9])


def test_packed_sequences():
    p = Problem.from_shapes((8, 6, 4), (9, 3, 4), (9, 3, 4), **PACKED, causal=True)
    assert (p.batch, p.heads_q, p.heads_k, p.head_dim) == (3, 6, 3, 4)
    assert p.packed and p.causal and p.scale == 0.5
    assert (p.q_lens, p.kv_lens) == ((3, 0, 5), (0, 4, 5))
    assert (p.seqlen_q, p.seqlen_k) == (5, 5)
    assert (p.q_shape, p.k_shape, p.lse_shape) == ((8, 6, 4), (9, 3, 4), (6, 8))
    assert p.score_shape == (3, 6, 5, 5)
    assert [p.lengths(b) for b in range(3)] == [(3, 0), (0, 4), (5, 5)]
    arrays = {name: np.array(n, np.int32) for name, n in PACKED.items()}
    assert Problem.from_shapes((8, 6, 4), (9, 3, 4), **arrays, causal=True) == p
    assert Problem.from_shapes((8, 6, 4), (9, 3, 4), **PACKED, bias=(6, 5, 5)).bias == (1, 6, 5, 5)


@pytest.mark.parametrize(
    "bad, error, says",
    [
        (
            {"q": (1, 6, 8, 4)},
            ValueError,
            [
                "q must have 3 axes for packed sequences, (seqlen, heads, head_dim)",
                "got 4 axes: shape (1, 6, 8, 4)",
            ],
        ),
        (
            {"k": (9, 4)},
            ValueError,
            [
                "k must have 3 axes for packed sequences, (seqlen, heads, head_dim)",
                "got 2 axes: shape (9, 4)",
            ],
        ),
        (
            {"v": (8, 3, 4)},
            ValueError,
            ["v must have seqlen=9 like k (shape (9, 3, 4)), got seqlen=8 (shape (8, 3, 4))"],
        ),
        (
            {"v": (9, 6, 4)},
            ValueError,
            ["v must have heads=3 like k (shape (9, 3, 4)), got heads=6 (shape (9, 6, 4))"],
        ),
        (
            {"k": (9, 4, 4), "v": None},
            ValueError,
            [
                "k must have a number of heads that divides the 6 heads of q (shape (8, 6, 4))",
                "got 4 (shape (9, 4, 4))",
            ],
        ),
        (
            {"k": (9, 3, 8)},
            ValueError,
            ["k must have head_dim=4 like q (shape (8, 6, 4))", "got head_dim=8 (shape (9, 3, 8))"],
        ),
        (
            {"cu_seqlens_k": None},
            ValueError,
            ["cu_seqlens_q must be given together with cu_seqlens_k, got cu_seqlens_q alone"],
        ),
        (
            {"cu_seqlens_q": None},
            ValueError,
            ["cu_seqlens_k must be given together with cu_seqlens_q, got cu_seqlens_k alone"],
        ),
        (
            {"q_lens": [1, 1, 1]},
            ValueError,
            ["q_lens cannot be given with cu_seqlens_q and cu_seqlens_k, which already"],
        ),
        (
            {"kv_lens": [1, 1, 1]},
            ValueError,
            ["kv_lens cannot be given with cu_seqlens_q and cu_seqlens_k, which already say"],
        ),
        (
            {"cu_seqlens_q": [0, 8]},
            ValueError,
            [
                "cu_seqlens_k must describe the same number of sequences as cu_seqlens_q",
                "(1), got 3",
            ],
        ),
        (
            {"cu_seqlens_q": [1, 3, 3, 8]},
            ValueError,
            [
                "cu_seqlens_q must be cumulative lengths that begin with 0, never decrease and",
                "got 1 as the first value",
            ],
        ),
        (
            {"cu_seqlens_q": [0, 3, 3, 7]},
            ValueError,
            [
                "cu_seqlens_q must be cumulative lengths that begin with 0, never decrease and",
                "got 7 as the last value",
            ],
        ),
        (
            {"cu_seqlens_k": [0, 5, 4, 9]},
            ValueError,
            [
                "cu_seqlens_k must be cumulative lengths that begin with 0, never decrease",
                "got 5 followed by 4",
            ],
        ),
        (
            {"cu_seqlens_k": [9]},
            ValueError,
            ["cu_seqlens_k must have shape (batch + 1,) with at least one sequence, got (1,)"],
        ),
        (
            {"cu_seqlens_k": [[0, 9]]},
            ValueError,
            ["cu_seqlens_k must have shape (batch + 1,) with at least one sequence", "got (1, 2)"],
        ),
        (
            {"cu_seqlens_q": 8},
            ValueError,
            ["cu_seqlens_q must have shape (batch + 1,) with at least one sequence, got ()"],
        ),
        (
            {"cu_seqlens_q": [0.0, 8.0]},
            TypeError,
            ["cu_seqlens_q must contain integers, got dtype float64"],
        ),
        (
            {"bias": (9, 9)},
            ValueError,
            [
                "bias must broadcast to (batch, heads_q, seqlen_q, seqlen_k) = (3, 6, 5, 5)",
                "got shape (9, 9)",
            ],
        ),
    ],
    ids=str,
)
def test_packed_sequences_that_do_not_fit_are_refused(bad, error, says):
    given = {"q": (8, 6, 4), "k": (9, 3, 4), "v": (9, 3, 4), **PACKED, **bad}
    shapes = [given.pop(name) for name in "qkv"]
    with refused(error, says, says[0]):
        Problem.from_shapes(*shapes, **given)


@pytest.mark.parametrize(
    "q, k, v, error, says",
    [
        (
            (2, 6, 5),
            (2, 3, 7, 4),
            None,
            ValueError,
            ["q must have 4 axes, (batch, heads, seqlen, head_dim)", "got 3 axes: shape (2, 6, 5)"],
        ),
        (
            (2, 6, 5, 4),
            (7, 4),
            None,
            ValueError,
            ["k must have 4 axes, (batch, heads, seqlen, head_dim), got 2 axes: shape (7, 4)"],
        ),
        (
            (2, 6, 5, 4),
            (2, 3, 7, 4),
            (),
            ValueError,
            ["v must have 4 axes, (batch, heads, seqlen, head_dim), got 0 axes: shape ()"],
        ),
        ((0, 6, 5, 4), (2, 3, 7, 4), None, ValueError, ["batch of q", "(0, 6, 5, 4)", "empty"]),
        ((2, 6, 5, 4), (2, 0, 7, 4), None, ValueError, ["heads of k", "(2, 0, 7, 4)", "empty"]),
        ((2, 6, 5, 4), (2, 3, 0, 4), None, ValueError, ["seqlen of k", "(2, 3, 0, 4)", "empty"]),
        ((2, 6, 5, 4), (2, 3, 7, 4), (2, 3, 7, 0), ValueError, ["head_dim of v", "0", "empty"]),
        ((2, 6, 5, 4), (2, 3, 7.0, 4), None, TypeError, ["seqlen of k", "7.0", "integer"]),
        (
            (2, 6, 5, 4),
            (1, 3, 7, 4),
            None,
            ValueError,
            ["k must have batch=2 like q (shape (2, 6, 5, 4))", "got batch=1 (shape (1, 3, 7, 4))"],
        ),
        (
            (2, 6, 5, 4),
            (2, 4, 7, 4),
            None,
            ValueError,
            [
                "k must have a number of heads that divides the 6 heads of q (shape (2, 6, 5,",
                "got 4 (shape (2, 4, 7, 4))",
            ],
        ),
        (
            (2, 6, 5, 4),
            (2, 3, 7, 8),
            None,
            ValueError,
            [
                "k must have head_dim=4 like q (shape (2, 6, 5, 4))",
                "got head_dim=8 (shape (2, 3, 7, 8))",
            ],
        ),
        (
            (2, 6, 5, 300),
            (2, 3, 7, 300),
            None,
            ValueError,
            ["head_dim of q must be from 1 to 256, got 300; q has shape (2, 6, 5, 300)"],
        ),
        (
            (2, 6, 5, 4),
            (2, 3, 7, 4),
            (1, 3, 7, 4),
            ValueError,
            ["v must have batch=2 like k (shape (2, 3, 7, 4))", "got batch=1 (shape (1, 3, 7, 4))"],
        ),
        (
            (2, 6, 5, 4),
            (2, 3, 7, 4),
            (2, 6, 7, 4),
            ValueError,
            ["v must have heads=3 like k (shape (2, 3, 7, 4))", "got heads=6 (shape (2, 6, 7, 4))"],
        ),
        (
            (2, 6, 5, 4),
            (2, 3, 7, 4),
            (2, 3, 5, 4),
            ValueError,
            [
                "v must have seqlen=7 like k (shape (2, 3, 7, 4))",
                "got seqlen=5 (shape (2, 3, 5, 4))",
            ],
        ),
        (
            (2, 6, 5, 4),
            (2, 3, 7, 4),
            (2, 3, 7, 257),
            ValueError,
            ["head_dim of v must be from 1 to 256, got 257; v has shape (2, 3, 7, 257)"],
        ),
    ],
)
def test_shapes_that_do_not_fit_are_refused(q, k, v, error, says):
    with refused(error, says, says[0]):
        Problem.from_shapes(q, k, v)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", list(itertools.product((-1, 0, 1, 3), repeat=2)), ids=str)
def test_the_columns_of_a_row(window, causal):
    """Brute force: the columns that every mask lets through, of each row of each entry."""
    left, right = window
    longest_q, longest_k = 6, 5
    lengths = list(itertools.product(range(longest_q + 1), range(longest_k + 1)))
    q_lens, kv_lens = zip(*lengths, strict=True)
    of = dict(window=window, causal=causal)
    sizes = (len(lengths), 1, 1, longest_q, longest_k, 1)
    padded = Problem(*sizes, q_lens=q_lens, kv_lens=kv_lens, **of)
    starts = {"cu_seqlens_q": np.cumsum([0, *q_lens]), "cu_seqlens_k": np.cumsum([0, *kv_lens])}
    packed = Problem.from_shapes((sum(q_lens), 1, 1), (sum(kv_lens), 1, 1), **starts, **of)
    for b, (Nq, Nk) in enumerate(lengths):
        problems = [(padded, b), (packed, b)]
        if Nq and Nk:
            problems.append((Problem(1, 1, 1, Nq, Nk, 1, **of), 0))
        for p, entry in problems:
            rows = np.arange(p.seqlen_q)
            begins, ends = p.columns_begin(rows, entry), p.columns_end(rows, entry)
            for i in range(p.seqlen_q):
                # Counted from the last row and column: how far j is before the diagonal one.
                before = {j: (Nk - 1 - j) - (Nq - 1 - i) for j in range(Nk) if i < Nq}
                seen = [
                    j
                    for j, n in before.items()
                    if (left < 0 or n <= left)
                    and (right < 0 or -n <= right)
                    and (not causal or n >= 0)
                ]
                begin, end = p.columns_begin(i, entry), p.columns_end(i, entry)
                assert type(begin) is int and type(end) is int
                assert list(range(begin, end)) == seen, (p, entry, i)
                assert (begins[i], ends[i]) == (begin, end) and 0 <= begin <= end <= Nk
