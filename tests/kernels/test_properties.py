"""What must hold between two calls, whatever the problem (hypothesis, on the emulator)."""

import numpy as np
import pytest
from conftest import examples
from helpers import ALGORITHMS, EPS, assert_within, attend, truth
from hypothesis import given
from hypothesis import strategies as st
from options_helpers import drawn, names_of_options
from options_helpers import inputs as inputs_with

from fa_numba import Tiles

FLASH = ("fa1", "fa2")
TILES = (Tiles(4, 8), Tiles(8, 8), Tiles(8, 16), Tiles(16, 8), Tiles(12, 24))

every_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS)
few = examples(6)
lengths = st.integers(1, 24)
problems = st.builds(
    dict,
    heads=st.sampled_from([(1, 1), (2, 1), (2, 2)]),
    Nq=lengths,
    Nk=lengths,
    d=st.integers(3, 9),
    seed=st.integers(0, 2**32 - 1),
)
tiles_of = st.sampled_from(TILES)


def inputs(heads, Nq, Nk, d, seed):
    """Multiples of 1/16 up to 2: sums and products by small integers of them are exact.

    v is positive, so that no element of O is a small rest of large terms.
    """
    rng = np.random.default_rng(seed)
    q = rng.integers(-32, 33, (1, heads[0], Nq, d))
    k = rng.integers(-32, 33, (1, heads[1], Nk, d))
    v = rng.integers(1, 33, (1, heads[1], Nk, d))
    return tuple((a / 16).astype(np.float32) for a in (q, k, v))


def call(algorithm, q, k, v, **options):
    return attend("emulator", algorithm, q, k, v, **options)


def assert_agree(a, b, *wants):
    """Results `a` and `b` are as close as their distances from float64, `wants`, allow."""
    assert_within("O", a.O, b.O, sum(w.O_bound for w in wants))
    assert_within("L", a.L, b.L, sum(w.L_bound for w in wants))


@every_algorithm
@few
@given(problems, tiles_of, tiles_of, st.booleans())
def test_tile_sizes_do_not_change_the_result(algorithm, problem, one, other, causal):
    q, k, v = inputs(**problem)
    want = truth(q, k, v, causal=causal)
    a, b = (call(algorithm, q, k, v, tiles=t, causal=causal) for t in (one, other))
    assert_agree(a, b, want, want)


@few
@given(problems, tiles_of, st.booleans(), st.integers(1, 4))
def test_both_orders_and_standard_agree(problem, tiles, causal, query_splits):
    q, k, v = inputs(**problem)
    want = truth(q, k, v, causal=causal)
    options = {"tiles": tiles, "causal": causal}
    fa2 = call("fa2", q, k, v, **options)
    assert_agree(call("fa1", q, k, v, query_splits=query_splits, **options), fa2, want, want)
    assert_agree(call("standard", q, k, v, **options), fa2, want, want)


def with_options(names, heads, Nq, Nk, d, seed):
    """q, k, v and options, of which a block mask would belong to one size of tiles."""
    shape = 2, *heads, Nq, Nk, d
    options = drawn(names - {"block_mask"}, shape, seed=seed)
    del options["tiles"]
    (_, *qkv), options = inputs_with(shape, options)
    return qkv, options


@every_algorithm
@few
@given(problems, names_of_options, tiles_of, tiles_of)
def test_nor_do_they_with_options(algorithm, problem, names, one, other):
    qkv, options = with_options(names, **problem)
    wants = [truth(*qkv, tiles=tiles, **options) for tiles in (one, other)]
    a, b = (call(algorithm, *qkv, tiles=tiles, **options) for tiles in (one, other))
    assert_agree(a, b, *wants)


@few
@given(problems, names_of_options, tiles_of, st.integers(1, 4))
def test_both_orders_and_standard_agree_with_options(problem, names, tiles, query_splits):
    qkv, options = with_options(names, **problem)
    options["tiles"] = tiles
    want = truth(*qkv, **options)
    fa2 = call("fa2", *qkv, **options)
    assert_agree(call("fa1", *qkv, query_splits=query_splits, **options), fa2, want, want)
    assert_agree(call("standard", *qkv, **options), fa2, want, want)


@every_algorithm
@few
@given(problems, tiles_of, st.randoms(use_true_random=False))
def test_the_order_of_the_keys_does_not_matter(algorithm, problem, tiles, random):
    q, k, v = inputs(**problem)
    order = list(range(problem["Nk"]))
    random.shuffle(order)
    want = truth(q, k, v)
    a = call(algorithm, q, k, v, tiles=tiles)
    b = call(algorithm, q, k[:, :, order], v[:, :, order], tiles=tiles)
    assert_agree(a, b, want, want)


@every_algorithm
@few
@given(problems, tiles_of, st.data())
def test_a_causal_row_does_not_see_what_comes_after(algorithm, problem, tiles, data):
    """The first rows are those of the problem without the last rows and as many last keys."""
    q, k, v = inputs(**problem)
    n = data.draw(st.integers(1, problem["Nq"]), "rows")
    keys = problem["Nk"] - (problem["Nq"] - n)
    whole = call(algorithm, q, k, v, tiles=tiles, causal=True)
    if keys < 1:
        assert (whole.O[:, :, :n] == 0).all() and (whole.L[:, :, :n] == -np.inf).all()
        return
    short = q[:, :, :n], k[:, :, :keys], v[:, :, :keys]
    want = truth(*short, causal=True)
    part = call(algorithm, *short, tiles=tiles, causal=True)
    whole.O, whole.L = whole.O[:, :, :n], whole.L[:, :, :n]
    assert_agree(whole, part, want, want)


@every_algorithm
@few
@given(problems, tiles_of, st.booleans(), st.integers(-3, 3))
def test_a_vector_added_to_every_key_shifts_L_alone(algorithm, problem, tiles, causal, size):
    q, k, v = inputs(**problem)
    c = np.float32(size) * np.sign(q[0, 0, 0] + np.float32(1 / 32))
    moved = k + c  # exact, as all are multiples of 1/16
    a = call(algorithm, q, k, v, tiles=tiles, causal=causal)
    b = call(algorithm, q, moved, v, tiles=tiles, causal=causal)
    shift = q.astype(np.float64) @ c / np.sqrt(problem["d"])
    wants = truth(q, k, v, causal=causal), truth(q, moved, v, causal=causal)
    assert_within("O", b.O, a.O, sum(w.O_bound for w in wants))
    assert_within("L", b.L - shift, a.L, sum(w.L_bound for w in wants))


@every_algorithm
@few
@given(problems, tiles_of, st.booleans(), st.sampled_from([0.5, 2.0, 3.0]))
def test_linear_in_v(algorithm, problem, tiles, causal, factor):
    q, k, v = inputs(**problem)
    w = np.ascontiguousarray(v[:, :, ::-1])
    both = np.float32(factor) * v + w  # exact
    options = {"tiles": tiles, "causal": causal}
    a, b, c = (call(algorithm, q, k, x, **options) for x in (v, w, both))
    bounds = [truth(q, k, x, causal=causal).O_bound for x in (v, w, both)]
    combined = factor * a.O.astype(np.float64) + b.O
    assert_within("O", c.O, combined, factor * bounds[0] + bounds[1] + bounds[2])
    assert np.array_equal(a.L, b.L) and np.array_equal(a.L, c.L)


@every_algorithm
@few
@given(problems, tiles_of, st.data())
def test_chunks_of_keys_merge_by_L(algorithm, problem, tiles, data):
    problem["Nk"] += 1
    q, k, v = inputs(**problem)
    cut = data.draw(st.integers(1, problem["Nk"] - 1), "cut")
    halves = [(k[:, :, s], v[:, :, s]) for s in (slice(None, cut), slice(cut, None))]
    whole = call(algorithm, q, k, v, tiles=tiles)
    parts = [call(algorithm, q, *half, tiles=tiles) for half in halves]
    L = np.logaddexp(*(p.L.astype(np.float64) for p in parts))
    O = sum(np.exp(p.L - L)[..., None] * p.O for p in parts)
    wants = [truth(q, k, v), *(truth(q, *half) for half in halves)]
    # An error of L_i moves its half by as much, relatively: |v| is at most 2.
    moved = 2 * np.sqrt(problem["d"]) * sum(w.L_bound for w in wants[1:])
    assert_within("O", whole.O, O, sum(w.O_bound for w in wants) + moved)
    assert_within("L", whole.L, L, sum(w.L_bound for w in wants))


@every_algorithm
@few
@given(problems, tiles_of, st.booleans())
def test_a_bias_of_a_row_shifts_L_alone(algorithm, problem, tiles, causal):
    q, k, v = inputs(**problem)
    bias = np.float32(0.25) * np.arange(-3, problem["Nq"] - 3, dtype=np.float32)[:, None]
    a = call(algorithm, q, k, v, tiles=tiles, causal=causal)
    b = call(algorithm, q, k, v, tiles=tiles, causal=causal, bias=bias)
    wants = truth(q, k, v, causal=causal), truth(q, k, v, causal=causal, bias=bias)
    assert_within("O", b.O, a.O, sum(w.O_bound for w in wants))
    assert_within("L", b.L - bias[:, 0], a.L, sum(w.L_bound for w in wants))


@every_algorithm
@few
@given(problems, tiles_of, st.data())
def test_a_key_of_bias_minus_infinity_is_no_key(algorithm, problem, tiles, data):
    problem["Nk"] += 1
    q, k, v = inputs(**problem)
    gone = data.draw(st.integers(0, problem["Nk"] - 1), "key")
    bias = np.where(np.arange(problem["Nk"]) == gone, -np.inf, 0.0).astype(np.float32)
    rest = q, np.delete(k, gone, axis=2), np.delete(v, gone, axis=2)
    want = truth(*rest)
    a = call(algorithm, q, k, v, tiles=tiles, bias=bias)
    assert_agree(a, call(algorithm, *rest, tiles=tiles), want, want)


@every_algorithm
def test_rows_of_one_key_are_that_key_exactly(algorithm):
    q, k, v = inputs((2, 1), 7, 1, 5, 0)
    result = call(algorithm, q, k, v, tiles=Tiles(4, 8))
    assert np.array_equal(result.O, np.broadcast_to(v, (1, 2, 7, 5)))
    scores = (q.astype(np.float64) @ k.astype(np.float64).swapaxes(2, 3))[..., 0] / np.sqrt(5)
    assert np.abs(result.L - scores).max() <= 2 * EPS * np.abs(scores).max()
