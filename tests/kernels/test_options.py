"""Every option of attention, alone and together: results, gradients, cost and errors."""

import itertools
import math
from contextlib import nullcontext

import numpy as np
import pytest
from backward_helpers import (
    NAMES,
    WAYS,
    asks_for_dbias,
    assert_gradients,
    check_gradients,
    differentiate,
    random_gradients,
    saved,
    with_dlse,
)
from conftest import examples
from helpers import (
    GUARD,
    LAYOUTS,
    assert_close_to_float64,
    attend,
    check,
    random_inputs,
    to_numpy,
)
from hypothesis import given
from hypothesis import strategies as st
from options_helpers import (
    DRAWS,
    SMALL,
    cumulative,
    drawn,
    inputs,
    lengths,
    names_of_options,
    visible,
    visited,
)

import fa_numba
from fa_numba import Tiles, dropout_mask
from fa_numba import device as devices

# Every way to O and L: (algorithm, what its function takes beside).
FORWARD = {
    "standard": ("standard", {}),
    "fa1": ("fa1", {}),
    "fa1-split": ("fa1", {"query_splits": 2}),
    "fa2": ("fa2", {}),
}
every_forward = pytest.mark.parametrize("forward", FORWARD)
every_flash = pytest.mark.parametrize("forward", list(FORWARD)[1:])
every_way = pytest.mark.parametrize("way", WAYS)
flash_way = pytest.mark.parametrize("way", list(WAYS)[1:])
TINY = (2, 2, 1, 11, 21, 4)  # B, Hq, Hk, Nq, Nk, d: two tiles each way, both ragged
INF = float("inf")


def run(device, forward, q, k, v, **options):
    algorithm, own = FORWARD[forward]
    return attend(device, algorithm, q, k, v, **own, **options)


def check_forward(device, forward, q, k, v, **options):
    algorithm, own = FORWARD[forward]
    return check(device, algorithm, q, k, v, **own, **options)


def normal(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape, dtype=np.float32)


# --- one option ------------------------------------------------------------------------------


def _infinite_bias(B, Hq, Nq, Nk):
    """-inf here and there, and in all of two rows."""
    bias = normal(B, Hq, Nq, Nk)
    bias[bias > 0.7] = -INF
    bias[0, 0, 3] = bias[B - 1, Hq - 1, Nq - 1] = -INF
    return bias


def _random_mask(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).random(shape) < 0.6


def alone(B, Hq, Nq, Nk, tiles):
    """Every option by itself, for this problem."""
    Tr, Tc = -(-Nq // tiles.Br), -(-Nk // tiles.Bc)
    some_q, some_k = [Nq, Nq // 2][:B], [Nk // 3, Nk][:B]
    far = normal(B, Hq, Nq + Nk)
    return {
        "causal": {"causal": True},
        "window of both sides": {"window": (3, 2)},
        "window to the left": {"window": (4, -1)},
        "window to the right": {"window": (-1, 1)},
        "window of one key": {"window": (0, 0)},
        "window wider than the sequence": {"window": (99, 2**40)},
        "causal window": {"window": (5, -1), "causal": True},
        "causal window with a right side": {"window": (2, 7), "causal": True},
        "softcap": {"softcap": 1.5},
        "softcap below the scores": {"softcap": 0.125},
        "score_mod of an array": {"score_mod": lambda s, b, h, i, j: s - far[b, h, i - j + Nk]},
        "score_mod of a power": {"score_mod": lambda s, b, h, i, j: s * s - abs(s) ** 1.5 / 2},
        "score_mod of 0 here and there": {"score_mod": lambda s, b, h, i, j: s if i < j else 0},
        "score_mod of a kink, and softcap": {
            "score_mod": lambda s, b, h, i, j: max(s, h / 8) + math.sin(s * i),
            "softcap": 1.5,
        },
        "mask_mod": {"mask_mod": lambda b, h, i, j: (i + 2 * j + h) % 3 != b},
        "mask_mod of an array": {"mask_mod": lambda b, h, i, j: far[b, h, i] < 0.5 or i == j},
        "mask_mod of nothing": {"mask_mod": lambda b, h, i, j: i < 0},
        "bias": {"bias": normal(B, Hq, Nq, Nk)},
        "bias for all batch entries": {"bias": normal(1, Hq, Nq, Nk)},
        "bias for all heads": {"bias": normal(B, 1, Nq, Nk)},
        "bias for all rows": {"bias": normal(B, Hq, 1, Nk)},
        "bias for all columns": {"bias": normal(B, Hq, Nq, 1)},
        "bias of two axes": {"bias": normal(Nq, Nk)},
        "bias of a head": {"bias": normal(Hq, 1, 1)},
        "bias of one number": {"bias": normal(1)},
        "bias of -inf": {"bias": _infinite_bias(B, Hq, Nq, Nk)},
        "slopes": {"alibi_slopes": np.abs(normal(Hq))},
        "slopes of each batch entry": {"alibi_slopes": normal(B, Hq)},
        "sinks": {"sinks": normal(Hq)},
        "sinks that are large, and none": {"sinks": np.float32([9, -INF])[-Hq:], "causal": True},
        "sinks, lengths": {"sinks": normal(Hq), "q_lens": some_q, "kv_lens": (0, Nk)[:B]},
        "sinks, packed": {"sinks": normal(Hq), **cumulative(some_q, (0, Nk)[:B])},
        "q_lens": {"q_lens": some_q},
        "q_lens of 0 and all": {"q_lens": np.array([0, Nq], np.int32)[-B:]},
        "kv_lens": {"kv_lens": np.array(some_k)},
        "kv_lens of 0 and all": {"kv_lens": (0, Nk)[:B]},
        "both lengths, causal": {"q_lens": some_q, "kv_lens": some_k, "causal": True},
        "packed": cumulative(some_q, some_k[::-1]),
        "packed, causal": {**cumulative(some_q[::-1], some_k[::-1]), "causal": True},
        "block mask": {"block_mask": _random_mask(Tr, Tc, seed=2)},
        "block mask of each head": {"block_mask": _random_mask(Hq, Tr, Tc)},
        "block mask of each batch entry": {"block_mask": _random_mask(B, 1, Tr, Tc)},
        "block mask of nothing": {"block_mask": np.zeros((Tr, Tc), bool)},
        "dropout": {"dropout_p": 0.3, "seed": 2**63 + 5, "offset": 2**32 - 1},
        "much dropout": {"dropout_p": 0.9, "seed": 7},
    }


ALONE = list(alone(2, 2, 11, 21, SMALL))
each_option = pytest.mark.parametrize("name", ALONE)


def given_alone(name, shape, tiles=SMALL):
    B, Hq, _, Nq, Nk, _ = shape
    return inputs(shape, {**alone(B, Hq, Nq, Nk, tiles)[name], "tiles": tiles})


@pytest.mark.in_turn("forward")
@each_option
@every_forward
def test_an_option_alone(device, forward, name):
    (_, q, k, v), options = given_alone(name, TINY)
    check_forward(device, forward, q, k, v, **options)


@pytest.mark.in_turn("way")
@each_option
@every_way
def test_gradients_of_an_option_alone(device, way, name):
    given_inputs, options = given_alone(name, TINY)
    check_gradients(device, way, *given_inputs, **options)


ODD = (1, 2, 2, 21, 11, 3)  # more rows than columns, nothing aligned
# --- several options -------------------------------------------------------------------------

PAIRS = [
    pair for pair in itertools.combinations(sorted(DRAWS), 2) if set(pair) != {"lengths", "packed"}
]
every_pair = pytest.mark.parametrize("pair", PAIRS, ids=" and ".join)
PAIRED = (2, 1, 1, 9, 18, 4)


@pytest.mark.in_turn("forward")
@every_pair
@every_forward
def test_two_options(forward, pair):
    (_, q, k, v), options = inputs(PAIRED, drawn(pair, PAIRED))
    check_forward("emulator", forward, q, k, v, **options)


@pytest.mark.in_turn("way")
@every_pair
@every_way
def test_gradients_of_two_options(way, pair):
    given_inputs, options = inputs(PAIRED, drawn(pair, PAIRED, seed=1))
    check_gradients("emulator", way, *given_inputs, **options)


EVERYTHING = {
    "lengths": sorted(DRAWS.keys() - {"packed"}),
    "packed": sorted(DRAWS.keys() - {"lengths"}),
    "window not causal": sorted(DRAWS.keys() - {"packed", "causal"}),
}
everything = pytest.mark.parametrize("names", EVERYTHING.values(), ids=EVERYTHING)


@pytest.mark.in_turn("forward", share=2)
@everything
@every_forward
def test_all_options(device, forward, names):
    shape = (2, 2, 1, 13, 37, 6)
    (_, q, k, v), options = inputs(shape, drawn(names, shape, seed=3))
    options["window"] = (9, 5)
    check_forward(device, forward, q, k, v, **options)


@pytest.mark.in_turn("way", share=2)
@everything
@every_way
def test_gradients_of_all_options(device, way, names):
    shape = (2, 2, 1, 13, 37, 6)
    given_inputs, options = inputs(shape, drawn(names, shape, seed=3))
    options["window"] = (9, 5)
    check_gradients(device, way, *given_inputs, **with_dlse(given_inputs, options))


shapes = st.builds(
    lambda B, Hk, group, Nq, Nk, d: (B, Hk * group, Hk, Nq, Nk, d),
    st.integers(1, 2),
    st.integers(1, 2),
    st.integers(1, 2),
    st.integers(1, 22),
    st.integers(1, 22),
    st.integers(1, 8),
)
seeds = st.integers(0, 2**32 - 1)
layouts = st.sampled_from([name for name in LAYOUTS if name != "broadcast"])


@every_forward
@examples(20)
@given(
    shapes, names_of_options, st.sampled_from([Tiles(4, 8), SMALL, Tiles(16, 24)]), seeds, layouts
)
def test_any_problem(forward, shape, names, tiles, seed, layout):
    (_, q, k, v), options = inputs(shape, drawn(names, shape, tiles, seed))
    check_forward("emulator", forward, q, k, v, layout=layout, **options)


@every_way
@examples(12)
@given(
    shapes, names_of_options, st.sampled_from([Tiles(4, 16), SMALL, Tiles(8, 32)]), seeds, layouts
)
def test_gradients_of_any_problem(way, shape, names, tiles, seed, layout):
    given_inputs, options = inputs(shape, drawn(names, shape, tiles, seed))
    if seed % 2:
        options = with_dlse(given_inputs, options)
    check_gradients("emulator", way, *given_inputs, layout=layout, **options)


# --- options that say the same ---------------------------------------------------------------
# To the last bit on the emulator: a GPU's compiler may fuse other products and sums.

ARRAYS = ("bias", "alibi_slopes", "q_lens", "kv_lens", "cu_seqlens_q", "cu_seqlens_k", "block_mask")
SAME = {
    "a wide window": ({"window": (21, 21)}, {}),
    "a window open on both sides": ({"window": (-1, -1)}, {}),
    "a window of what came before": ({"window": (-1, 0)}, {"causal": True}),
    "a causal window of all": ({"window": (21, -1), "causal": True}, {"causal": True}),
    "full lengths": ({"q_lens": [11], "kv_lens": [21]}, {}),
    "a mask of all blocks": ({"block_mask": np.ones((2, 2), bool)}, {}),
    "no dropout": ({"dropout_p": 0.0, "seed": 3}, {}),
    "a bias of 0": ({"bias": np.zeros((1, 21), np.float32)}, {}),
    "slopes of 0": ({"alibi_slopes": np.zeros(2, np.float32)}, {}),
    "None": (dict.fromkeys(("scale", "softcap", *ARRAYS)), {}),
}
ONE = (1, *TINY[1:])
saying_the_same = pytest.mark.parametrize("pair", SAME.values(), ids=SAME)


@pytest.mark.in_turn("forward")
@saying_the_same
@every_forward
def test_two_ways_to_say_it_give_the_same_bits(forward, pair):
    q, k, v = random_inputs(*ONE)
    a, b = (run("emulator", forward, q, k, v, tiles=SMALL, **options) for options in pair)
    assert np.array_equal(a.O, b.O) and np.array_equal(a.L, b.L)


@pytest.mark.in_turn("way")
@saying_the_same
@every_way
def test_two_ways_to_say_it_give_the_same_gradients(way, pair):
    given_inputs = random_gradients(*ONE)
    a, b = (
        differentiate("emulator", way, *given_inputs, tiles=SMALL, **options) for options in pair
    )
    for name in NAMES:
        assert np.array_equal(getattr(a, name), getattr(b, name)), name


# --- rows, columns and values ----------------------------------------------------------------

BLIND = {
    "window": {"window": (2, 1)},
    "causal": {"causal": True},
    "lengths": {"q_lens": [23, 4], "kv_lens": [3, 0], "causal": True},
    "bias": {"bias": np.where(np.arange(23)[:, None] % 3 == 0, -INF, 0.5).astype(np.float32)},
    "block mask": {"block_mask": np.array([[True], [False], [True]])},
    "bias and dropout": {
        "bias": np.where(np.arange(23)[:, None] < 9, -INF, 0.5).astype(np.float32),
        "dropout_p": 0.5,
    },
}


def _blind(name):
    shape = (2, 1, 1, 23, 7, 4)
    arrays, options = inputs(shape, {**BLIND[name], "tiles": SMALL})
    seen = visible(shape, options)
    if "bias" in options:
        seen &= options["bias"] > -INF
    return arrays, options, ~seen.any(axis=3)


@pytest.mark.in_turn("forward")
@pytest.mark.parametrize("name", BLIND)
@every_forward
def test_rows_that_see_no_column(device, forward, name):
    (_, q, k, v), options, blind = _blind(name)
    assert blind.any() and not blind.all()
    result = check_forward(device, forward, q, k, v, **options)
    assert (result.O[blind] == 0).all() and (result.L[blind] == -INF).all()
    assert np.isfinite(result.L[~blind]).all()


@pytest.mark.in_turn("way")
@pytest.mark.parametrize("name", BLIND)
@every_way
def test_rows_that_see_no_column_have_no_gradient(device, way, name):
    (dout, q, k, v), options, blind = _blind(name)
    found = check_gradients(device, way, dout, q, k, v, **options)
    assert (found.dq[blind] == 0).all()
    dout[blind] = 1e6
    other = differentiate(device, way, dout, q, k, v, **options)
    assert np.array_equal(other.dk, found.dk) and np.array_equal(other.dv, found.dv)


HUGE = {
    "window": {"window": (5, 3)},
    "softcap": {"softcap": 40.0},
    "softcap of huge scores": {"softcap": 1e4},
    "bias": {"bias": 1e4 * normal(1, 2, 11, 21)},
    "alibi": {"alibi_slopes": np.float32([300.0, -300.0])},
    "dropout": {"dropout_p": 0.25, "seed": 1},
    "block mask": {"block_mask": np.array([[True, False], [True, True]])},
    "lengths": {"q_lens": [9], "kv_lens": [20]},
}


@pytest.mark.in_turn("forward")
@pytest.mark.parametrize("name", HUGE)
@every_forward
def test_huge_logits(device, forward, name):
    q, k, v = random_inputs(*ONE, q_size=3e3)
    assert 1e4 < np.abs(q @ k.swapaxes(2, 3)).max() / 2 < 4e4
    check_forward(device, forward, q, k, v, tiles=SMALL, **HUGE[name])


@pytest.mark.in_turn("way")
@pytest.mark.parametrize("name", HUGE)
@every_way
def test_gradients_of_huge_logits(device, way, name):
    arrays = random_gradients(*ONE, q_size=3e3)
    check_gradients(device, way, *arrays, tiles=SMALL, **HUGE[name])


def _poisoned(options):
    """A problem with lengths whose every padding holds NaN, also in what the forward pass left."""
    shape = (2, 2, 1, 11, 37, 4)
    options = {"q_lens": [11, 7], "kv_lens": [5, 30], "tiles": SMALL, **options}
    arrays, options = inputs(shape, options)
    out, lse = saved(*arrays[1:], **options)
    out[1, :, 7:], lse[1, :, 7:] = GUARD, np.nan
    return arrays, options, (out, lse)


POISONED = {
    "lengths": {},
    "causal": {"causal": True},
    "window": {"window": (3, 3)},
    "bias": {"bias": normal(2, 2, 11, 37)},
    "softcap and slopes": {"softcap": 2.0, "alibi_slopes": np.abs(normal(2))},
    "dropout": {"dropout_p": 0.2},
    "block mask": {"block_mask": _random_mask(2, 3)},
}
every_poison = pytest.mark.parametrize("name", POISONED)


@pytest.mark.in_turn("forward")
@every_poison
@every_forward
def test_nan_behind_the_lengths_reaches_nothing(device, forward, name):
    (_, q, k, v), options, _ = _poisoned(POISONED[name])
    result = check_forward(device, forward, q, k, v, **options)
    assert np.isfinite(result.O).all() and not np.isnan(result.L).any()
    assert (result.O[1, :, 7:] == 0).all() and (result.L[1, :, 7:] == -INF).all()


@pytest.mark.in_turn("way")
@every_poison
@every_way
def test_nan_behind_the_lengths_reaches_no_gradient(device, way, name):
    arrays, options, values = _poisoned(POISONED[name])
    found = check_gradients(device, way, *arrays, saved_values=values, **options)
    assert all(np.isfinite(g).all() for g in found)
    assert not found.dq[1, :, 7:].any()
    for g in (found.dk, found.dv):
        assert not g[0, :, 5:].any() and not g[1, :, 30:].any()
    if found.dbias is not None:
        assert not found.dbias[1, :, 7:].any() and not found.dbias[0, :, :, 5:].any()


SKIPPED = {
    "window": {"window": (4, 4)},
    "block mask": {"block_mask": np.array([[True, False, True], [True, False, True]])},
}


@pytest.mark.parametrize("name", SKIPPED)
@every_flash
def test_nan_in_a_tile_that_is_not_visited_reaches_nothing(device, forward, name):
    q, k, v = random_inputs(1, 2, 1, 11, 48, 4)
    options = {"tiles": SMALL, **SKIPPED[name]}
    _, columns = visited((1, 2, 1, 11, 48, 4), options)
    dead = np.repeat(~columns.any(axis=(0, 1, 2)), 16)
    assert dead.any() and not dead.all()
    clean = run(device, forward, q, k, v, **options)
    k[:, :, dead], v[:, :, dead] = np.nan, np.nan
    dirty = run(device, forward, q, k, v, **options)
    assert np.array_equal(dirty.O, clean.O) and np.array_equal(dirty.L, clean.L)


@pytest.mark.parametrize("name", SKIPPED)
@flash_way
def test_nan_in_a_tile_that_is_not_visited_reaches_no_gradient(device, way, name):
    dout, q, k, v = random_gradients(1, 2, 1, 11, 48, 4)
    options = {"tiles": SMALL, **SKIPPED[name]}
    values = saved(q, k, v, **options)
    _, columns = visited((1, 2, 1, 11, 48, 4), options)
    dead = np.repeat(~columns.any(axis=(0, 1, 2)), 16)
    k[:, :, dead], v[:, :, dead] = np.nan, np.nan
    found = differentiate(device, way, dout, q, k, v, saved_values=values, **options)
    assert np.isfinite(found.dq).all()
    assert not found.dk[:, :, dead].any() and not found.dv[:, :, dead].any()


@every_forward
def test_a_nan_in_the_bias_reaches_its_row_alone(device, forward):
    q, k, v = random_inputs(*TINY)
    bias = normal(2, 2, 11, 21)
    clean = run(device, forward, q, k, v, bias=bias, tiles=SMALL)
    bias[1, 0, 4, 18] = np.nan
    dirty = run(device, forward, q, k, v, bias=bias, tiles=SMALL)
    row = np.zeros((2, 2, 11), bool)
    row[1, 0, 4] = True
    assert np.isnan(dirty.O[row]).all() and np.isnan(dirty.L[row]).all()
    assert np.array_equal(dirty.O[~row], clean.O[~row])


# --- layouts ---------------------------------------------------------------------------------


@pytest.mark.in_turn("forward")
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "broadcast"])
@every_forward
def test_layouts(device, forward, layout):
    options = drawn(["alibi", "lengths"], TINY, seed=2)
    options["bias"] = normal(2, 2, 11, 21)
    (_, q, k, v), options = inputs(TINY, options)
    check_forward(device, forward, q, k, v, layout=layout, out_layout=layout, **options)


@pytest.mark.in_turn("way")
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "broadcast"])
@every_way
def test_layouts_of_packed_sequences(way, layout):
    options = drawn(["packed", "dropout"], TINY, seed=2)
    options["bias"] = normal(2, 2, 11, 21)
    arrays, options = inputs(TINY, options)
    check_gradients("emulator", way, *arrays, layout=layout, **options)


def test_a_broadcast_bias_is_read_where_it_is():
    """Strides of 0 from the caller, and a number without an axis."""
    q, k, v = random_inputs(*TINY)
    options = {"algorithm": "fa2", "tiles": SMALL}
    for bias in (normal(21), normal()):
        with devices.using("emulator"):
            whole = np.broadcast_to(bias, (2, 2, 11, 21))
            a, b = (fa_numba.attention(q, k, v, bias=x, **options) for x in (whole, bias))
        assert np.array_equal(a, b)
        assert_close_to_float64(a, q, k, v, bias=bias)


# --- dropout ---------------------------------------------------------------------------------

# Widths of 64 columns and their multiples share random words, others draw one an element.
WIDTHS = {
    "standard": (Tiles(8, 16), Tiles(16, 64)),
    "fa1": (Tiles(8, 16), Tiles(16, 24), Tiles(16, 64), Tiles(8, 128), Tiles(16, 64, 64)),
    "fa1-split": (Tiles(8, 16), Tiles(16, 64)),
    "fa2": (Tiles(8, 16), Tiles(16, 24), Tiles(16, 64), Tiles(8, 128), Tiles(16, 64, 64)),
}
DROPPED = [(forward, tiles) for forward, all_tiles in WIDTHS.items() for tiles in all_tiles]


def _columns_of_v(B, H, Nq, Nk):
    """q and k small, v the unit matrix: O is P without what is dropped."""
    q, k, _ = random_inputs(B, H, H, Nq, Nk, Nk, q_size=0.3)
    return q, k, np.broadcast_to(np.eye(Nk, dtype=np.float32), k.shape).copy()


@pytest.mark.parametrize("forward, tiles", DROPPED, ids=lambda x: x if x in FORWARD else None)
def test_the_forward_pass_keeps_what_dropout_mask_keeps(device, forward, tiles):
    q, k, v = _columns_of_v(1, 2, 5, 70)
    options = {"dropout_p": 0.4, "seed": 2**40 + 3, "offset": 11}
    result = check_forward(device, forward, q, k, v, tiles=tiles, **options)
    assert np.array_equal(result.O != 0, dropout_mask(1, 2, 5, 70, **options))


@pytest.mark.in_turn("way", share=2)
@pytest.mark.parametrize("tiles", [SMALL, Tiles(16, 64), Tiles(8, 64, 64)], ids=str)
@every_way
def test_the_backward_pass_keeps_what_dropout_mask_keeps(device, way, tiles):
    """dout the unit matrix: dV is the transpose of P without what is dropped."""
    B, H, Nq, Nk = 1, 1, 9, 70
    q, k, v = random_inputs(B, H, H, Nq, Nk, Nq, q_size=0.3)
    dout = np.broadcast_to(np.eye(Nq, dtype=np.float32), q.shape)
    options = {"dropout_p": 0.4, "seed": 2**40 + 3, "offset": 11}
    found = check_gradients(device, way, dout, q, k, v, tiles=tiles, **options)
    mask = dropout_mask(B, H, Nq, Nk, **options)
    assert np.array_equal(found.dv.swapaxes(2, 3) != 0, mask)


@pytest.mark.in_turn("way", share=2)
@pytest.mark.parametrize("tiles", [Tiles(16, 64), Tiles(8, 64, 64)], ids=str)
@every_way
def test_gradients_with_dropout_and_tiles_of_64_columns(device, way, tiles):
    shape = (1, 2, 1, 19, 70, 5)
    arrays, options = inputs(shape, drawn(["dropout", "bias", "causal", "lengths"], shape, tiles))
    check_gradients(device, way, *arrays, **options)


# --- what options cost -----------------------------------------------------------------------

COSTS = {
    "window": {"window": (6, 3)},
    "narrow window": {"window": (0, 0)},
    "causal window": {"window": (9, -1), "causal": True},
    "block mask": {"block_mask": _random_mask(3, 4)},
    "block mask of each head": {"block_mask": _random_mask(2, 2, 3, 4)},
    "block mask, causal": {"block_mask": _random_mask(3, 4), "causal": True},
    "block mask of nothing": {"block_mask": np.zeros((3, 4), bool)},
    "lengths and window": {"q_lens": [20, 9], "kv_lens": [33, 61], "window": (5, 5)},
}
COSTLY = (2, 2, 1, 21, 61, 4)
every_cost = pytest.mark.parametrize("name", COSTS)


def _visited_elements(options):
    """(sum r_i, sum c_j over the tiles that some row sees, the same over tiles j that any does, and
    of r_i those of which FA-1 reads O, l and m, or dQ: with a block mask not a row tile's first).
    """
    rows, columns = visited(COSTLY, options)
    again = rows.sum() - ("block_mask" in options) * rows.max(axis=3).sum()
    return rows.sum(), columns.sum(), columns.max(axis=2).sum(), again


@pytest.mark.in_turn("forward")
@every_cost
@pytest.mark.parametrize("forward", ["fa1", "fa2"])
def test_tiles_that_no_row_sees_are_not_loaded(forward, name):
    arrays, options = inputs(COSTLY, {**COSTS[name], "tiles": SMALL})
    rows, columns, once, again = _visited_elements(options)
    with fa_numba.count_accesses() as counts:
        fa_numba.attention(*arrays[1:], algorithm=forward, **options)
    d, loads = 4, counts.loads
    if forward == "fa2":
        assert loads.get("K", 0) == loads.get("V", 0) == d * columns
    else:
        assert loads.get("K", 0) == loads.get("V", 0) == d * once
        assert loads.get("Q", 0) == d * rows and loads.get("l", 0) == again
    whole = fa_numba.plan((2, 2, 21, 4), (2, 1, 61, 4), algorithm=forward, tiles=SMALL)
    assert loads.total() < whole.accesses.total_loads


@pytest.mark.in_turn("way")
@every_cost
@flash_way
def test_tiles_that_no_row_sees_are_not_loaded_backward(way, name):
    arrays, options = inputs(COSTLY, {**COSTS[name], "tiles": SMALL})
    rows, columns, _, again = _visited_elements(options)
    values = saved(*arrays[1:], **options)
    algorithm, own = WAYS[way]
    with fa_numba.count_accesses() as counts:
        fa_numba.attention_backward(*arrays, *values, algorithm=algorithm, **own, **options)
    d, loads = 4, counts.loads
    all_rows = d * 2 * sum(Nq for Nq, _ in lengths(COSTLY, options))
    all_columns = d * sum(Nk for _, Nk in lengths(COSTLY, options))
    if way == "fa2-deterministic":
        assert loads.get("Q", 0) == d * rows + all_rows
        assert loads.get("K", 0) == all_columns + d * columns
    else:
        kept = again if algorithm == "fa1" else rows
        assert loads.get("Q", 0) == d * rows and loads.get("dQ", 0) == d * kept
        assert loads.get("K", 0) == all_columns


def test_a_plan_takes_shapes_for_biases_and_slopes():
    q, k, v = random_inputs(*TINY)
    options = {"alibi_slopes": normal(2), "bias": normal(11, 21), "window": (3, 3), "tiles": SMALL}
    shapes = {"alibi_slopes": (2,), "bias": (11, 21)}
    for passes in ("fwd", "bwd"):
        by_array = fa_numba.plan(q.shape, k.shape, passes=passes, **options)
        by_shape = fa_numba.plan(q.shape, k.shape, passes=passes, **{**options, **shapes})
        assert by_array.accesses == by_shape.accesses and by_array == by_shape
        assert by_shape.accesses.loads["bias"] > 0


@pytest.fixture
def kernels(monkeypatch):
    """The last argument's fields of every kernel launched; none is."""
    made = []
    monkeypatch.setattr(
        devices, "launch", lambda kernel, *_: made.append(set(kernel.argument_types[-1].fields))
    )
    with devices.using("emulator"):
        yield made


ARGUMENTS = {
    "plain": ({}, set()),
    "causal": ({"causal": True}, set()),
    "scale": ({"scale": 0.3}, set()),
    "no dropout": ({"dropout_p": 0.0}, set()),
    "window": ({"window": (3, 3)}, {"window_left", "window_right"}),
    "softcap": ({"softcap": 1.0}, {"softcap"}),
    "bias": ({"bias": normal(11, 21)}, {"bias"}),
    "slopes": ({"alibi_slopes": normal(2)}, {"slopes"}),
    "q_lens": ({"q_lens": [3, 4]}, {"q_lens"}),
    "kv_lens": ({"kv_lens": [3, 4]}, {"kv_lens"}),
    "block mask": (
        {"block_mask": _random_mask(2, 2)},
        {"block_mask", "next_column", "next_row"},
    ),
    "dropout": (
        {"dropout_p": 0.5},
        {"threshold", "inverse_keep", "seed_low", "seed_high", "offset"},
    ),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_kernel_takes_the_options_that_are_on(name, kernels):
    options, want = ARGUMENTS[name]
    options = {**options, "tiles": SMALL}
    dout, q, k, v = random_gradients(*TINY)
    values = saved(q, k, v)
    for algorithm, own in FORWARD.values():
        fa_numba.attention(q, k, v, algorithm=algorithm, **own, **options)
        assert set().union(*kernels) == want, algorithm
        kernels.clear()
    for algorithm, own in WAYS.values():
        fa_numba.attention_backward(dout, q, k, v, *values, algorithm=algorithm, **own, **options)
        assert set().union(*kernels) == want, algorithm
        kernels.clear()


# --- the gradient of L -----------------------------------------------------------------------

WITH_DLSE = ("causal", "q_lens of 0 and all", "kv_lens of 0 and all", "packed, causal", "dropout")


@every_way
@pytest.mark.parametrize("name", WITH_DLSE)
def test_a_gradient_of_lse(device, way, name):
    """It takes part where a column is seen, and only there."""
    arrays, options = given_alone(name, ODD if name == "causal" else TINY)
    found = check_gradients(device, way, *arrays, **with_dlse(arrays, options))
    assert all(np.isfinite(g).all() for g in found)


def test_a_gradient_of_lse_that_is_wrong_is_refused(kernels):
    dout, q, k, v = random_gradients(1, 2, 1, 5, 7, 4)
    given_ = (dout, q, k, v, q, q[..., 0])
    for algorithm in ("standard", "fa1", "fa2"):
        for wrong, error, says in (
            (normal(1, 2, 7), ValueError, ["dlse", "(1, 2, 7)", "(1, 2, 5)"]),
            (normal(1, 2, 5).astype(np.float64), TypeError, ["dlse", "float64", "float32"]),
            (True, TypeError, ["dlse", "bool"]),
        ):
            with pytest.raises(error) as caught:
                fa_numba.attention_backward(*given_, algorithm=algorithm, dlse=wrong)
            assert all(part in str(caught.value) for part in says), caught.value
        with pytest.raises(TypeError, match="dlse is no option here .*flash_attention_1_backward"):
            fa_numba.attention(q, k, v, algorithm=algorithm, dlse=normal(1, 2, 5))
    with pytest.raises(ValueError, match="dlse is True: only passes='bwd'"):
        fa_numba.plan(q.shape, k.shape, dlse=True)
    assert not kernels


# --- the gradient of a bias ------------------------------------------------------------------


@every_way
def test_dbias_is_not_made_unless_asked_for(way):
    arrays = random_gradients(*TINY)
    options = {"bias": normal(2, 2, 11, 21), "tiles": SMALL}
    three = check_gradients("emulator", way, *arrays, return_dbias=False, **options)
    four = differentiate("emulator", way, *arrays, return_dbias=True, **options)
    assert three.dbias is None
    for name in NAMES:
        assert np.array_equal(getattr(three, name), getattr(four, name))


@every_way
def test_dbias_is_0_where_nothing_is_seen(device, way):
    arrays = random_gradients(*TINY)
    bias = _infinite_bias(2, 2, 11, 21)
    options = {"bias": bias, "window": (4, 4), "tiles": SMALL}
    found = check_gradients(device, way, *arrays, **options)
    hidden = ~visible(TINY, options) | (bias == -INF)
    assert not found.dbias[hidden].any() and found.dbias[~hidden].all()


def test_two_sweeps_give_dbias_of_a_bias_of_their_own(device):
    """One tile adds to each element: the order is fixed although the adds are atomic."""
    arrays = random_gradients(1, 1, 1, 11, 21, 4)
    for shape in ((1, 1, 11, 21), (11, 21)):
        found = [
            check_gradients(device, "fa2-deterministic", *arrays, bias=normal(*shape), tiles=SMALL,
                            return_dbias=True)
            for _ in range(2)
        ]  # fmt: skip
        for a, b in zip(*found, strict=True):
            assert np.array_equal(a, b)
    assert not asks_for_dbias("fa2-deterministic", *arrays[1:3], normal(1, 21))
    only = differentiate(device, "fa2-deterministic", *arrays, bias=normal(1, 21), tiles=SMALL)
    assert only.dbias is None


# --- what is refused -------------------------------------------------------------------------

MASK = np.ones((1, 1), bool)
STARTS = np.array([0, 5])
# Options, their error, and what its message says, for q (1, 2, 5, 4) and k (1, 1, 7, 4).
REFUSED = [
    ({"dropout": 0.1}, TypeError, "dropout is no option", "allowed are", "dropout_p"),
    ({"softcaps": 1.0}, TypeError, "softcaps is no option (did you mean softcap?)"),
    ({"bias": 7}, TypeError, "bias is a"),
    ({"q_lens": [[1], [2, 3]]}, ValueError, "q_lens is [[1], [2, 3]]", "rows of one length"),
    ({"layout": "bnh"}, ValueError, "layout is 'bnh'", "'bnhd' for"),
    ({"layout": ["bhnd"]}, ValueError, "layout is ['bhnd']", "'bnhd' for"),
    ({"attn_mask": np.ones((5, 7), np.int32)}, TypeError, "attn_mask has dtype int32",
     "float32 or float16 or bfloat16 or bool"),
    ({"attn_mask": [[True]]}, TypeError, "attn_mask is a list", "NumPy"),
    ({"attn_mask": np.ones((5, 8), bool)}, ValueError, "attn_mask has shape (5, 8)",
     "broadcasts to (1, 2, 5, 7)"),
    ({"attn_mask": np.ones((5, 7), bool), "bias": normal(5, 7)}, ValueError,
     "attn_mask is given, of shape (5, 7), with a bias", "one of the two"),
    ({"window": 3}, TypeError, "window is 3", "(left, right)"),
    ({"window": (3,)}, ValueError, "window is (3,)", "(left, right)"),
    ({"window": (3, 1, 1)}, ValueError, "window is (3, 1, 1)", "-1"),
    ({"window": (-2, 0)}, ValueError, "window is (-2, 0)", "-1 or None"),
    ({"window": (1.5, 0)}, TypeError, "window is (1.5, 0)"),
    ({"window": (True, 0)}, TypeError, "window is (True, 0)"),
    ({"window": "ab"}, TypeError, "window is 'ab'"),
    ({"softcap": 1e-31}, ValueError, "softcap is 1e-31", "0 for none"),
    ({"softcap": -1.0}, ValueError, "softcap is -1.0", "1e-30 to 1e30"),
    ({"softcap": float("nan")}, ValueError, "softcap is nan"),
    ({"softcap": INF}, ValueError, "softcap is inf"),
    ({"softcap": True}, TypeError, "softcap is True", "positive number"),
    ({"softcap": "1"}, TypeError, "softcap is '1'"),
    ({"softcap": 1e-9, "scale": 1e30}, ValueError, "softcap is 1e-09", "scale 1e+30"),
    ({"dropout_p": 1.0}, ValueError, "dropout_p is 1.0", "0 to below 1"),
    ({"dropout_p": -0.1}, ValueError, "dropout_p is -0.1"),
    ({"dropout_p": float("nan")}, ValueError, "dropout_p is nan"),
    ({"dropout_p": "x"}, TypeError, "dropout_p is 'x'"),
    ({"dropout_p": True}, TypeError, "dropout_p is True"),
    ({"seed": -1}, ValueError, "seed is -1", "2**64"),
    ({"seed": 2**64}, ValueError, f"seed is {2**64}", "below 2**64"),
    ({"seed": 1.0}, TypeError, "seed is 1.0", "integer"),
    ({"seed": True}, TypeError, "seed is True"),
    ({"offset": 2**32}, ValueError, f"offset is {2**32}", "below 2**32"),
    ({"offset": "1"}, TypeError, "offset is '1'"),
    ({"bias": [[0.0]]}, TypeError, "bias is a list", "NumPy"),
    ({"bias": np.zeros((5, 7))}, TypeError, "bias has dtype float64: allowed is float32"),
    ({"bias": normal(5, 8)}, ValueError, "bias has shape (5, 8)", "(1, 2, 5, 7)"),
    ({"bias": normal(1, 1, 1, 5, 7)}, ValueError, "bias has shape (1, 1, 1, 5, 7)"),
    ({"bias": normal(3, 1, 1)}, ValueError, "bias has shape (3, 1, 1)", "(1, 2, 5, 7)"),
    ({"alibi_slopes": [1.0, 2.0]}, TypeError, "alibi_slopes is a list"),
    ({"alibi_slopes": np.zeros(2)}, TypeError,
     "alibi_slopes has dtype float64: allowed is float32"),
    ({"alibi_slopes": normal(3)}, ValueError, "alibi_slopes has shape (3,)", "(2,)", "(1, 2)"),
    ({"alibi_slopes": normal(1, 2, 1)}, ValueError, "alibi_slopes has shape (1, 2, 1)"),
    ({"q_lens": [5, 5]}, ValueError, "q_lens has shape (2,)", "(1,)"),
    ({"q_lens": np.array(5)}, ValueError, "q_lens has shape ()"),
    ({"q_lens": [6]}, ValueError, "q_lens holds 6", "0 to 5"),
    ({"q_lens": [-1]}, ValueError, "q_lens holds -1", "0 to 5"),
    ({"q_lens": []}, ValueError, "q_lens has shape (0,)", "(1,)"),
    ({"q_lens": np.array([2**64 - 1], np.uint64)}, ValueError, f"q_lens holds {2**64 - 1}",
     "below 2**63"),
    ({"q_lens": [5.0]}, TypeError, "q_lens has dtype float64", "integers"),
    ({"q_lens": 5}, TypeError, "q_lens is an int", "sequences"),
    ({"kv_lens": [8]}, ValueError, "kv_lens holds 8", "0 to 7"),
    ({"kv_lens": [True]}, TypeError, "kv_lens has dtype bool"),
    ({"block_mask": MASK, "tiles": None}, ValueError, "block_mask is given without tiles"),
    ({"block_mask": np.ones((2, 1), bool)}, ValueError, "block_mask has shape (2, 1)", "(1, 1)",
     "Br=8, Bc=16"),
    ({"block_mask": np.ones((3, 1, 1), bool)}, ValueError, "(3, 1, 1)", "(1, 2)"),
    ({"block_mask": np.ones(1, bool)}, ValueError, "block_mask has shape (1,)"),
    ({"block_mask": np.ones((1, 1, 1, 1, 1), bool)}, ValueError, "(1, 1, 1, 1, 1)"),
    ({"block_mask": np.ones((1, 1), np.uint8)}, TypeError, "block_mask has dtype uint8", "bool"),
    ({"block_mask": "x"}, TypeError, "block_mask is a str"),
    ({"causal": 1}, TypeError, "causal is 1", "True or False"),
    ({"cu_seqlens_q": STARTS, "cu_seqlens_k": STARTS}, ValueError, "q has shape (1, 2, 5, 4)",
     "(seqlen, heads, head_dim)"),
]  # fmt: skip
# The same for q (5, 2, 4) and k (7, 1, 4).
PACKED = {"cu_seqlens_q": np.array([0, 2, 5]), "cu_seqlens_k": [0, 7, 7]}
REFUSED_PACKED = [
    ({"cu_seqlens_k": None}, ValueError, "cu_seqlens_q is given without cu_seqlens_k"),
    ({"cu_seqlens_q": None}, ValueError, "cu_seqlens_k is given without cu_seqlens_q"),
    ({"q_lens": [2, 3]}, ValueError, "q_lens is given with cu_seqlens_q"),
    ({"layout": "bnhd"}, ValueError, "layout is 'bnhd' with cu_seqlens_q", "(total, heads"),
    ({"kv_lens": [7, 0]}, ValueError, "kv_lens is given with cu_seqlens_q"),
    ({"cu_seqlens_q": [1, 2, 5]}, ValueError, "cu_seqlens_q is [1, 2, 5]", "from 0 to 5"),
    ({"cu_seqlens_k": [0, 3, 6]}, ValueError, "cu_seqlens_k is [0, 3, 6]", "from 0 to 7"),
    ({"cu_seqlens_q": [0, 6, 5]}, ValueError, "[0, 6, 5]", "never fall"),
    ({"cu_seqlens_q": [0]}, ValueError, "cu_seqlens_q has shape (1,)", "batch + 1"),
    ({"cu_seqlens_q": [[0, 5]]}, ValueError, "cu_seqlens_q has shape (1, 2)"),
    ({"cu_seqlens_q": [0.0, 2.0, 5.0]}, TypeError, "cu_seqlens_q has dtype float64"),
    ({"cu_seqlens_k": [0, 7]}, ValueError, "cu_seqlens_k holds 1 sequences", "allowed is 2"),
    ({"bias": normal(2, 2, 5, 7)}, ValueError, "bias has shape (2, 2, 5, 7)", "(2, 2, 3, 7)"),
    ({"alibi_slopes": normal(3, 2)}, ValueError, "alibi_slopes has shape (3, 2)", "(2, 2)"),
    ({"block_mask": np.ones((2, 1), bool), "tiles": Tiles(4, 16)}, ValueError,
     "block_mask has shape (2, 1)", "(1, 1)"),
]  # fmt: skip


def _refusals():
    plain = random_gradients(1, 2, 1, 5, 7, 4)
    dense = [np.ascontiguousarray(a[0].swapaxes(0, 1)) for a in plain]
    for arrays, others, table in ((plain, {}, REFUSED), (dense, PACKED, REFUSED_PACKED)):
        for bad, error, *says in table:
            yield pytest.param(arrays, others, bad, error, says, id=says[0])


@pytest.mark.parametrize("arrays, others, bad, error, says", list(_refusals()))
def test_bad_options_are_refused_and_nothing_is_written(arrays, others, bad, error, says, kernels):
    dout, q, k, v = arrays
    options = {"tiles": SMALL, **others, **bad}
    lse = np.zeros(q.shape[:-1] if q.ndim == 4 else (2, 5), np.float32)
    out = np.full_like(q, GUARD)
    bits = out.copy().view(np.uint32)
    calls = [lambda: fa_numba.plan(q.shape, k.shape, **options)]
    shapes_alone = any("dtype" in part or "is a list" in part for part in says)
    arrays_of = {"bias", "alibi_slopes", "attn_mask"}
    if (shapes_alone or "bias is a" in says) and arrays_of & set(bad):
        calls = []  # a plan takes their shapes, as anything with a shape
    for algorithm, own in FORWARD.values():
        given_ = {"algorithm": algorithm, **own, **options}
        calls.append(lambda o=given_: fa_numba.attention(q, k, v, out=out, **o))
    for algorithm, own in WAYS.values():
        given_ = {"algorithm": algorithm, **own, **options}
        calls.append(lambda o=given_: fa_numba.attention_backward(dout, q, k, v, q, lse, **o))
    for call in calls:
        with pytest.raises(error) as caught:
            call()
        message = str(caught.value)
        assert all(part in message for part in says), message
    assert not kernels and np.array_equal(out.view(np.uint32), bits)


def test_good_options_are_taken(kernels):
    plain = random_gradients(1, 2, 1, 5, 7, 4)
    fa_numba.attention(*plain[1:], tiles=SMALL, block_mask=MASK, window=[np.int64(3), 2])
    dense = [np.ascontiguousarray(a[0].swapaxes(0, 1)) for a in plain]
    fa_numba.attention(*dense[1:], tiles=SMALL, **PACKED)
    assert len(kernels) == 2


def test_the_gradient_of_a_bias_is_refused_where_it_has_no_meaning_or_order(kernels):
    dout, q, k, v = random_gradients(2, 2, 1, 5, 7, 4)
    given_ = (dout, q, k, v, q, q[..., 0])
    for algorithm in ("standard", "fa1", "fa2"):
        for call in (
            lambda a=algorithm: fa_numba.attention_backward(
                *given_, algorithm=a, return_dbias=True
            ),
            lambda a=algorithm: fa_numba.plan(
                q.shape, k.shape, algorithm=a, passes="bwd", return_dbias=True
            ),
        ):
            with pytest.raises(ValueError, match="return_dbias is True without a bias"):
                call()
        with pytest.raises(TypeError, match="return_dbias is 1: allowed is True or False"):
            fa_numba.attention_backward(
                *given_, algorithm=algorithm, bias=normal(5, 7), return_dbias=1
            )
        with pytest.raises(TypeError, match="return_dbias"):
            fa_numba.attention(q, k, v, algorithm=algorithm, bias=normal(5, 7), return_dbias=True)
    with pytest.raises(ValueError, match="return_dbias is True: only passes='bwd'"):
        fa_numba.plan(q.shape, k.shape, bias=(5, 7), return_dbias=True)
    for shape in ((5, 7), (1, 2, 5, 7), (2, 2, 5, 1), ()):
        with pytest.raises(ValueError) as caught:
            fa_numba.flash_attention_2_backward(
                *given_, bias=normal(*shape), return_dbias=True, deterministic=True
            )
        message = str(caught.value)
        for part in ("deterministic is True", "return_dbias", "(2, 2, 5, 7)"):
            assert part in message
    assert not kernels


def test_out_must_not_share_memory_with_a_bias(kernels):
    q, k, v = random_inputs(1, 1, 1, 7, 7, 7)
    bias = normal(1, 1, 7, 7)
    with pytest.raises(ValueError, match="out shares memory with bias"):
        fa_numba.flash_attention_2(q, k, v, bias=bias, out=bias)
    assert not kernels


def test_sequences_too_long_for_a_window_are_refused():
    shape = (1, 1, 2**29 + 1, 4)
    fa_numba.plan(shape, shape, causal=True)
    with pytest.raises(ValueError, match=f"seqlen {2**29 + 1}: allowed is at most {2**29} with"):
        fa_numba.plan(shape, shape, window=(3, 3))


# --- arrays of other libraries, large problems -----------------------------------------------


@pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_torch_tensors_as_options(place):
    torch = pytest.importorskip("torch")
    dout, q, k, v = random_gradients(*TINY)
    options = {
        "bias": normal(2, 11, 21),
        "alibi_slopes": np.abs(normal(2)),
        "kv_lens": np.array([21, 9], np.int32),
        "block_mask": _random_mask(2, 2),
    }
    tensors = {name: torch.tensor(a, device=place) for name, a in options.items()}
    arrays = [torch.tensor(a, device=place) for a in (dout, q, k, v)]
    with devices.using("emulator") if place == "cpu" else nullcontext():
        out, lse = fa_numba.attention(*arrays[1:], tiles=SMALL, return_lse=True, **tensors)
        found = fa_numba.attention_backward(
            *arrays, out, lse, tiles=SMALL, return_dbias=True, **tensors
        )
    assert all(isinstance(g, torch.Tensor) and g.device == arrays[0].device for g in found)
    O, L, *gradients = (a.cpu().numpy() for a in (out, lse, *found))
    options["tiles"] = SMALL
    assert_close_to_float64(O, q, k, v, L, **options)
    assert_gradients(gradients, dout, q, k, v, saved_values=(O, L), **options)


@pytest.mark.gpu
def test_lengths_and_masks_may_be_on_the_gpu():
    q, k, v = random_inputs(*TINY)
    options = {"kv_lens": np.array([21, 9], np.int32), "block_mask": _random_mask(2, 2)}
    want = run("gpu", "fa2", q, k, v, tiles=SMALL, **options)
    there = {name: devices.to_gpu(a) for name, a in options.items()}
    arrays = [devices.to_gpu(a) for a in (q, k, v)]
    got = fa_numba.attention(*arrays, tiles=SMALL, **there)
    assert np.array_equal(to_numpy(got), want.O)


LARGE = {
    "window": ({"window": (100, 20)}, (1, 4, 2, 1000, 1100, 64)),
    "softcap and dropout": (
        {"softcap": 3.0, "dropout_p": 0.2, "seed": 5},
        (1, 4, 2, 777, 513, 128),
    ),
    "bias and slopes": (
        {"bias": normal(1, 4, 500, 700), "alibi_slopes": np.abs(normal(4)), "causal": True},
        (1, 4, 4, 500, 700, 64),
    ),
    "lengths": (
        {"q_lens": [600, 3, 0], "kv_lens": [1, 700, 333], "causal": True},
        (3, 2, 1, 600, 700, 64),
    ),
    "packed": (
        {**cumulative([600, 3, 0, 129], [300, 700, 1, 128]), "dropout_p": 0.1},
        (4, 2, 1, 600, 700, 64),
    ),
    "block mask": (
        {"block_mask": _random_mask(2, 10, 10), "tiles": Tiles(64, 64)},
        (1, 2, 2, 640, 600, 64),
    ),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", LARGE)
@every_forward
def test_large_problems(forward, name):
    options, shape = LARGE[name]
    (_, q, k, v), options = inputs(shape, options)
    check_forward("gpu", forward, q, k, v, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("name", LARGE)
@every_way
def test_gradients_of_large_problems(way, name):
    options, shape = LARGE[name]
    arrays, options = inputs(shape, options)
    check_gradients("gpu", way, *arrays, **options)
