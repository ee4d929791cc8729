"""Every gradient in 16 bits against float64, as test_mma.py the forward pass.

Guard bands around every array, NaN in every new one, accesses those of the closed form.
"""

import itertools
import math

import numpy as np
import pytest
from backward_helpers import (
    NAMES,
    as_plan,
    asked,
    asks_for_dbias,
    asks_for_dcaptured,
    each,
    gradient_roundings,
    names_of,
    on_host,
    saved,
    with_dlse,
)
from backward_helpers import WAYS as SINGLE_WAYS
from conftest import examples
from helpers import (
    EPS,
    _distance,
    _size,
    assert_counts,
    assert_within,
    changing,
    memories,
    running,
    to_numpy,
)
from helpers import Memory as SingleMemory
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from mma_helpers import (
    ROUNDING,
    HalfMemory,
    assert_no_growth,
    every_dtype,
    half_inputs,
    ml_dtypes,
    no_bfloat16,
)
from test_mma import OPTIONS, any_call, either_mask

import fa_numba
from fa_numba import Tiles, reference
from fa_numba import device as devices
from fa_numba.choices.tiles import mma_tiles
from fa_numba.host import planning, standard
from fa_numba.integers import ceil_div
from fa_numba.scores import add_bias_gradient, checked_call
from fa_numba.tiling import select_mma_backward_spec

WAYS = {**SINGLE_WAYS, "fa1-split": ("fa1", {"query_splits": 3})}
# What atomic adds on a GPU sum in no fixed order.
UNORDERED = {"fa2": {"dq"}, "fa1-split": {"dk", "dv"}}
FLASH = [way for way in WAYS if way != "standard"]
SMALL = Tiles(16, 16)
HEAD_DIMS = (8, 16, 19, 32, 64, 72, 96, 128, 144, 192, 256)


def bfloat16(*others):
    """A row of parameters that starts with this dtype."""
    return pytest.param("bfloat16", *others, marks=no_bfloat16)


every_way = pytest.mark.parametrize("way", WAYS)
every_flash = pytest.mark.parametrize("way", FLASH)


def small_tiles(way, d):
    """The smallest that the kernels take."""
    return Tiles(16 if way == "standard" or d <= 64 else 32, 16)


def half_gradients(dtype, *sizes, **options):
    """dout, q, k and v, normally distributed and then rounded."""
    q, k, v = half_inputs(dtype, *sizes, **options)
    dout, _, _ = half_inputs(dtype, *sizes[:5], v.shape[-1], seed=1)
    return dout, q, k, v


def saved_halves(way, q, k, v, **options):
    """O and L of a forward pass, rounded once; standard attention needs neither without a gradient
    of L or of sinks, and gets zeros.
    """
    if way == "standard" and options.get("dlse") is None and "sinks" not in options:
        rows = q.shape[:3] if q.ndim == 4 else q.shape[1::-1]
        return np.zeros((*q.shape[:-1], v.shape[-1]), q.dtype), np.zeros(rows, "f4")
    single = [x.astype(np.float32) for x in (q, k, v)]
    O, L = saved(*single, **changing(options))
    return O.astype(q.dtype), L


def differentiate(device, way, dout, q, k, v, *, layout="padded", saved_values=None, **options):
    """One backward call between guard bands, its accesses those of the plan."""
    algorithm, own = WAYS[way]
    dtype, asks = q.dtype.name, asks_for_dbias(way, q, k, options.get("bias"))
    asks = {"return_dbias": asks, "return_dsinks": "sinks" in options}
    asks["return_dcaptured"] = asks_for_dcaptured(way, q, k, options)
    options = {**asks, **options, **own}
    place = device if dtype == "float16" else "emulator"
    out, lse = saved_values or saved_halves(way, q, k, v, **options)
    inputs = [HalfMemory(device, dtype, a.shape, layout, a) for a in (dout, q, k, v, out)]
    inputs.append(SingleMemory(place, lse.shape, layout, lse, rows=True))
    others, given_ = memories(place, layout, options)
    with running(device) as counts:
        arguments = [m.argument for m in inputs]
        found = fa_numba.attention_backward(*arguments, algorithm=algorithm, **given_)
        names = names_of(*(options[name] for name in asks))
        assert type(found) is tuple and len(found) == len(names)
        if counts is not None:
            facts = {"algorithm": algorithm, "dtype": dtype, "passes": "bwd"}
            plan = fa_numba.plan(q.shape, k.shape, v.shape, **facts, **as_plan(options))
            assert_counts(counts, plan)
            moved = sum(n.total() for n in (counts.load_bytes, counts.store_bytes))
            assert plan.unit == options.get("unit", "mma") and plan.accesses.bytes == moved
        for memory in (*inputs, *others.values()):
            memory.assert_intact("an input", whole=True)
        gradients = [on_host(x) for x in found]
    for x, of in zip(gradients, (q, k, v), strict=False):
        assert x.dtype == of.dtype and x.shape == of.shape
    assert all(x.dtype == np.float32 for _, x in [*each(names, gradients)][3:])
    return gradients


def standard_yardstick(dout, q, k, v, *, tiles=None, dlse=None, **options):
    """Standard attention's gradients with S, P, dP and dS rounded to 16 bits as they are stored.

    dbias is in float32; dsinks comes from O and L, not from here. After dropout P is stored once
    more; the scale goes into dS, and the cap's slope after it.
    """
    dtype = q.dtype.name
    single = [x.astype(np.float32) for x in (q, k, v)]
    call, q, k, v = checked_call(*single, np.float32, tiles=tiles, **options)
    dout, problem = dout.astype(np.float32), call.problem

    def rounded(x):
        return reference._to_half(x, dtype)

    dq, dk, dv = (np.zeros_like(x) for x in (q, k, v))
    dbias = np.zeros(problem.bias or (), np.float32)
    dL = np.zeros(problem.lse_shape) if dlse is None else np.nan_to_num(dlse)
    for head in call.heads():
        Q, K, V, dO = q[head.q], k[head.k], v[head.k], dout[head.q]
        rows = slice(0, head.Nq)
        S, slope = call.scores(head, Q, K, 0)
        dropped = call.dropout(head, rows)
        P = rounded(reference._rounded_softmax(rounded(S), None, call.sink(head)))
        dP = rounded(dO @ V.T) * dropped
        D = (P * dP).sum(axis=1, keepdims=True) - dL[head.lse][:, None]
        dS = P * (dP - D)
        if problem.bias:
            add_bias_gradient(dbias, head, rows, dS)
        dS = rounded(np.float32(problem.scale) * dS)
        if problem.softcap is not None:
            dS = rounded(dS * slope)
        dv[head.k] += rounded(P * dropped).T @ dO
        dq[head.q] = rounded(dS @ K)
        dk[head.k] += dS.T @ Q
    gradients = [dq, rounded(dk), rounded(dv)]
    return gradients if not problem.bias else [*gradients, dbias]


def expected(
    way, dout, q, k, v, *, dbias=False, dsinks=False, dcaptured=False, saved_values=None, **options
):
    """The gradients in float64, and how far 16-bit ones may be from each, as Frobenius norms.

    Twice the error of the unfused computation with 16-bit matrices, or of standard attention that
    of `standard_yardstick`; twice what rounding to float32 does, and what the given O and L are off
    by, which the unfused computation makes itself; and one rounding.
    """
    dtype, options = q.dtype.name, changing(options)
    asks = {"return_dbias": dbias, "return_dsinks": dsinks, "return_dcaptured": dcaptured}
    single = [x.astype(np.float32) for x in (dout, q, k, v)]
    with np.errstate(all="ignore"):
        exact = reference.attention_backward(*single, **asks, **options)
        if way == "standard":
            near = standard_yardstick(dout, q, k, v, **options)
            whole = reference.unfused_backward(*single, matrix_dtype=dtype, **asks, **options)
            near += whole[-1:] if dsinks else []
            out, lse = saved(*single[1:], **options)  # it makes its own P, in float32 at first
        else:
            near = reference.unfused_backward(*single, matrix_dtype=dtype, **asks, **options)
            out, lse = saved_values or saved_halves(way, q, k, v, **options)
        steps = gradient_roundings(*single, out.astype("f4"), lse, **asks, **options)
        if way == "standard" and dsinks:  # of the O that was given
            out, lse = saved_values or saved_halves(way, q, k, v, **options)
            given_ = gradient_roundings(*single, out.astype("f4"), lse, **asks, **options)
            steps[-1] = given_[-1]
    if way != "standard":
        exact, near = ([x for _, x in each(names_of(*asks.values()), y)] for y in (exact, near))
    last = [ROUNDING[dtype]] * 3 + [EPS] * (len(exact) - 3)  # the others are in float32
    bounds = [
        2 * (_distance(u.reshape(e.shape), e) + s) + r * _size(e)
        for u, e, s, r in zip(near, exact, steps, last, strict=False)
    ]
    return exact, bounds


def assert_gradients(found, way, *inputs, **options):
    asks = {name.removeprefix("return_"): x for name, x in asked(found, options).items()}
    exact, bounds = expected(way, *inputs, **asks, **options)
    rounding = ROUNDING[inputs[0].dtype.name]
    names = each(names_of(**asks), found)
    for (name, got), e, bound in zip(names, exact, bounds, strict=True):
        assert_within(name, np.asarray(got, np.float64), e, bound, rounding)


def check_gradients(device, way, *inputs, layout="padded", **options):
    """`differentiate`, and its result against float64."""
    found = differentiate(device, way, *inputs, layout=layout, **options)
    assert_gradients(found, way, *inputs, **options)
    return found


def assert_same(way, found, others):
    """All bits equal, but on a GPU those of sums without an order."""
    for name, a, b in zip(NAMES, found, others, strict=False):
        if name not in UNORDERED.get(way, ()):
            assert np.array_equal(a, b), name


# --- the check can fail ----------------------------------------------------------------------


@pytest.mark.in_turn("way", share=2)
@every_way
@every_dtype
@pytest.mark.parametrize("n", [0, 1, 2])
def test_the_check_fails_on_a_scale_within_the_norm(way, dtype, n):
    inputs = half_gradients(dtype, 1, 4, 2, 64, 80, 16)
    single = [x.astype(np.float32) for x in inputs]
    found = list(reference.unfused_backward(*single, matrix_dtype=dtype))
    assert_gradients(found, way, *inputs)
    found[n] = found[n] * (1 + ROUNDING[dtype])
    exact, bounds = expected(way, *inputs)
    assert_within(NAMES[n], found[n], exact[n], bounds[n])
    with pytest.raises(AssertionError, match=f"{NAMES[n]} is 1.00.* times what it should be"):
        assert_gradients(found, way, *inputs)


@pytest.mark.in_turn("way")
@every_way
@every_dtype
@pytest.mark.parametrize("change", ["nothing", "a scale", "an element", "D", "a tile"])
def test_the_check_fails_on_a_wrong_gradient(way, dtype, change):
    inputs = half_gradients(dtype, 1, 2, 1, 24, 40, 8)
    single = [x.astype(np.float32) for x in inputs]
    found = [x.astype(inputs[0].dtype) for x in reference.unfused_backward(*single)]
    if change == "nothing":
        assert_gradients(found, way, *inputs)
        return
    if change == "a scale":
        found[0] = (found[0].astype(np.float32) * 1.02).astype(found[0].dtype)
    elif change == "an element":
        found[2][0, 0, 3, 5] += {"float16": 0.02, "bfloat16": 0.3}[dtype]
    elif change == "a tile":
        found[1][:, :, 32:] = 0
    else:
        dout, q, k, v = single
        O, L = reference.attention(q, k, v, return_lse=True)
        P = np.exp(q @ k.swapaxes(2, 3) / math.sqrt(8) - L[..., None])
        dS = P * (dout @ v.swapaxes(2, 3) + (dout * O).sum(axis=3, keepdims=True))
        found[0] = (dS @ k / math.sqrt(8)).astype(found[0].dtype)
    with pytest.raises(AssertionError, match="worst at .* got .*, expected"):
        assert_gradients(found, way, *inputs)


# --- shapes ----------------------------------------------------------------------------------

LENGTHS = [(1, 1), (1, 40), (40, 1), (15, 31), (16, 32), (17, 33), (37, 13), (33, 70)]


@pytest.mark.in_turn("way")
@every_way
@pytest.mark.parametrize("dtype, causal", [("float16", False), ("float16", True), bfloat16(True)])
@pytest.mark.parametrize("Nq, Nk", LENGTHS)
def test_lengths(device, way, dtype, causal, Nq, Nk):
    inputs = half_gradients(dtype, 1, 1, 1, Nq, Nk, 8)
    check_gradients(device, way, *inputs, causal=causal, tiles=SMALL)


@pytest.mark.in_turn("way")
@every_way
@pytest.mark.parametrize("d", HEAD_DIMS)
def test_head_dims(way, d):
    tiles = small_tiles(way, d)
    inputs = half_gradients("float16", 1, 1, 1, tiles.Br + 2, 18, d)
    check_gradients("emulator", way, *inputs, tiles=tiles)


@pytest.mark.in_turn("way", share=2)
@every_way
@pytest.mark.parametrize("d", [19, 72])
def test_rows_at_any_address(device, way, d):
    """Copied and written one element after the other, with the same result."""
    options = {"tiles": small_tiles(way, d), "causal": True}
    inputs = half_gradients("float16", 1, 1, 1, 17, 20, d)
    found = check_gradients(device, way, *inputs, layout="odd", **options)
    assert_same(way, found, differentiate(device, way, *inputs, **options))


@pytest.mark.in_turn("way")
@every_way
@pytest.mark.parametrize("d", [32, 64, 96, 128, 256])
def test_the_default_tiles(way, d):
    inputs = half_gradients("float16", 1, 1, 1, 21, 37, d)
    check_gradients("emulator", way, *inputs, causal=True)


TILES = [(8, Tiles(16, 64)), (8, Tiles(48, 32)), (8, Tiles(64, 16)), (8, Tiles(32, 64, 128))]
TILES += [(72, Tiles(64, 32)), (72, Tiles(32, 64, 256)), (72, Tiles(32, 48))]


@pytest.mark.in_turn("way")
@every_flash
@pytest.mark.parametrize("d, tiles", TILES, ids=str)
def test_tiles(way, d, tiles):
    inputs = half_gradients("float16", 1, 1, 1, 70 if d == 8 else 40, 75, d)
    check_gradients("emulator", way, *inputs, causal=True, tiles=tiles)


@pytest.mark.parametrize(
    "tiles",
    [Tiles(16, 64), Tiles(48, 32), Tiles(64, 16), Tiles(64, 48), Tiles(32, 128, 64)],
    ids=lambda t: f"{t.Br}x{t.Bc}",
)
def test_tiles_of_standard_attention(device, tiles):
    inputs = half_gradients("float16", 1, 1, 1, 70, 75, 16)
    check_gradients(device, "standard", *inputs, tiles=tiles)


@pytest.mark.in_turn("way", share=2)
@every_way
@pytest.mark.parametrize("dtype, sizes", [("float16", (2, 6, 2)), bfloat16((1, 3, 1))])
def test_batches_and_shared_heads(device, way, dtype, sizes):
    inputs = half_gradients(dtype, *sizes, 18, 37, 8)
    check_gradients(device, way, *inputs, causal=True, tiles=SMALL)


@pytest.mark.in_turn("way", share=2)
@every_way
@pytest.mark.parametrize("Nq, Nk", [(40, 5), (40, 24)])
def test_rows_that_see_no_column_have_no_gradient(device, way, Nq, Nk):
    dout, q, k, v = half_gradients("float16", 1, 2, 1, Nq, Nk, 8)
    found = check_gradients(device, way, dout, q, k, v, causal=True, tiles=SMALL)
    blind = Nq - Nk
    assert (found[0][:, :, :blind] == 0).all()
    assert (found[0][:, :, blind + 1 :] != 0).any(axis=-1).all()
    # Their output gradient reaches nothing.
    moved = dout.copy()
    moved[:, :, :blind] = 1e4
    other = differentiate(device, way, moved, q, k, v, causal=True, tiles=SMALL)
    assert_same(way, found, other)


# --- memory ----------------------------------------------------------------------------------


@pytest.mark.in_turn("way", share=2)
@every_way
@pytest.mark.parametrize("layout", ["transposed", "columns", "reversed", "strided"])
def test_layouts(device, way, layout):
    inputs = half_gradients("float16", 2, 2, 1, 17, 20, 8)
    check_gradients(device, way, *inputs, causal=True, tiles=SMALL, layout=layout)


# --- options ---------------------------------------------------------------------------------

SLOW = pytest.mark.slow
ON_GPU = ("window", "softcap", "bias", "alibi", "both lengths", "block mask", "dropout", "most")


@pytest.mark.in_turn("way")
@every_way
@pytest.mark.parametrize("name", OPTIONS)
def test_options(way, name):
    inputs = half_gradients("float16", 2, 2, 1, 40, 55, 8)
    check_gradients("emulator", way, *inputs, tiles=SMALL, **OPTIONS[name])


@every_way
@pytest.mark.parametrize("d, Nq", [(8, 40), (72, 70)])
def test_a_gradient_of_lse(device, way, d, Nq):
    """Of rows that see a column, up to where a sequence ends."""
    inputs = half_gradients("float16", 2, 2, 1, Nq, 35, d)
    options = {"causal": True, "q_lens": [Nq, 21], "tiles": small_tiles(way, d)}
    check_gradients(device, way, *inputs, **with_dlse(inputs, options))


@every_way
@no_bfloat16
@pytest.mark.parametrize(
    "name",
    ["most", *(pytest.param(n, marks=SLOW) for n in ("softcap, bias and slopes", "dropout"))],
)
def test_options_in_bfloat16(way, name):
    inputs = half_gradients("bfloat16", 2, 2, 1, 40, 55, 8)
    check_gradients("emulator", way, *inputs, tiles=SMALL, **OPTIONS[name])


@pytest.mark.in_turn("way")
@pytest.mark.parametrize("way", ["fa1", "fa2-deterministic"])
@pytest.mark.parametrize("name", ["most", "causal dropout"])
def test_options_where_two_warps_share_their_columns(way, name):
    """Beyond d = 64; blocks of the mask are 32 x 16 then."""
    inputs = half_gradients("float16", 2, 2, 1, 40, 55, 72)
    options = dict(OPTIONS[name])
    if "block_mask" in options:
        options["block_mask"] = options["block_mask"][:, :2]
    check_gradients("emulator", way, *inputs, tiles=Tiles(32, 16), **options)


@pytest.mark.in_turn("way", share=2)
@every_way
@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences(device, way, causal):
    inputs = half_gradients("float16", 1, 4, 2, 41, 50, 8)
    packed = [np.ascontiguousarray(x[0].swapaxes(0, 1)) for x in inputs]
    starts = {"cu_seqlens_q": [0, 20, 20, 41], "cu_seqlens_k": [0, 23, 30, 50]}
    check_gradients(device, way, *packed, causal=causal, tiles=SMALL, **starts)


@pytest.mark.in_turn("way", share=2)
@every_flash
@pytest.mark.parametrize("Bc", [16, 48, 64])
def test_dropout_does_not_depend_on_the_tiles(way, Bc):
    inputs = half_gradients("float16", 1, 1, 1, 35, 100, 8)
    options = {"dropout_p": 0.4, "seed": 2**40 + 5, "tiles": Tiles(32, Bc)}
    check_gradients("emulator", way, *inputs, **options)


# --- values ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "way, Nq, Nk, larger",
    [
        *((way, 16, 256, Tiles(16, 128)) for way in ("standard", "fa1", "fa2-deterministic")),
        *((way, 256, 16, Tiles(128, 16)) for way in ("fa1", "fa1-split", "fa2")),
    ],
    ids=str,
)
def test_more_passes_err_no_more(way, Nq, Nk, larger):
    """16 tiles of columns or two, over which dQ is summed; of rows, over which dK and dV are."""
    inputs = half_gradients("float16", 1, 1, 1, Nq, Nk, 16)
    found = []
    for tiles in (larger, SMALL):
        blocks = np.ones((ceil_div(Nq, tiles.Br), ceil_div(Nk, tiles.Bc)), bool)
        # With a mask of its own blocks a second sweep takes these tiles too.
        found.append(differentiate("emulator", way, *inputs, tiles=tiles, block_mask=blocks))
    exact, _ = expected(way, *inputs)
    for name, few, many, e in zip(NAMES, *found, exact, strict=True):
        assert_no_growth(name, few, many, e)


@pytest.mark.in_turn("way", share=2)
@every_way
@pytest.mark.parametrize("dtype, logit", [("float16", 30.0), ("float16", 1e4), bfloat16(1e4)])
def test_peaked_and_huge_logits(device, way, dtype, logit):
    dout, q, k, v = half_gradients(dtype, 1, 2, 2, 35, 37, 8, q_size=logit / 3)
    scores = np.abs(np.float32(q) @ np.float32(k).swapaxes(2, 3)) / math.sqrt(8)
    assert logit < scores.max() < 4 * logit
    check_gradients(device, way, dout, q, k, v, causal=True, tiles=SMALL)


@pytest.mark.in_turn("way", share=2)
@every_way
@pytest.mark.parametrize("scale", [0, -0.5, 7])
def test_scales(device, way, scale):
    inputs = half_gradients("float16", 1, 1, 1, 18, 35, 8)
    found = check_gradients(device, way, *inputs, scale=scale, tiles=SMALL)
    if scale == 0:
        assert (found[0] == 0).all() and (found[1] == 0).all()


@every_flash
def test_after_the_forward_pass_of_this_package(device, way):
    dout, q, k, v = half_gradients("float16", 1, 2, 1, 19, 25, 8)
    options = {"causal": True, "tiles": SMALL}
    with devices.using(device):
        algorithm, _ = WAYS[way]
        forward = fa_numba.attention(q, k, v, algorithm=algorithm, return_lse=True, **options)
    forward = tuple(map(to_numpy, forward))
    check_gradients(device, way, dout, q, k, v, saved_values=forward, **options)


@every_way
def test_a_nan_reaches_its_head_alone(way):
    inputs = half_gradients("float16", 1, 4, 2, 18, 19, 8)
    clean = differentiate("emulator", way, *inputs, tiles=SMALL)
    inputs[0][0, 2, 5, 3] = np.nan
    dq, dk, dv = differentiate("emulator", way, *inputs, tiles=SMALL)
    rows = np.zeros((1, 4, 18), bool)
    rows[0, 2, 5] = True
    assert np.isnan(dq[rows]).all() and not np.isnan(dq[~rows]).any()
    assert np.isnan(dk[0, 1]).all() and np.isnan(dv[0, 1, :, 3]).all()
    assert np.array_equal(dk[0, 0], clean[1][0, 0]) and np.array_equal(dv[0, 0], clean[2][0, 0])


# --- what must hold between two calls --------------------------------------------------------


@either_mask
def test_a_second_sweep_changes_dq_alone(device, causal):
    inputs = half_gradients("float16", 1, 4, 2, 29, 37, 8)
    options = {"causal": causal, "tiles": SMALL}
    atomic, swept = (
        differentiate(device, way, *inputs, **options) for way in ("fa2", "fa2-deterministic")
    )
    assert all(np.array_equal(a, b) for a, b in zip(atomic[1:], swept[1:], strict=True))


def test_query_splits_change_sums_of_dk_and_dv_alone(monkeypatch):
    inputs = half_gradients("float16", 1, 2, 1, 70, 40, 8)
    options = {"causal": True, "tiles": SMALL}
    whole = differentiate("emulator", "fa1", *inputs, **options)
    for query_splits in (2, 4, 5, 99):
        monkeypatch.setitem(WAYS, "fa1-split", ("fa1", {"query_splits": query_splits}))
        split = check_gradients("emulator", "fa1-split", *inputs, **options)
        assert np.array_equal(split[0], whole[0])


lengths = st.integers(1, 40)


@every_flash
@examples(4)
@given(lengths, lengths, st.booleans(), st.integers(0, 2**16))
def test_tile_sizes_do_not_change_the_gradients(way, Nq, Nk, causal, seed):
    inputs = half_gradients("float16", 1, 2, 1, Nq, Nk, 8)
    rng = np.random.default_rng(seed)
    one, other = (Tiles(int(16 * a), int(16 * b)) for a, b in rng.integers(1, 4, (2, 2)))
    _, bounds = expected(way, *inputs, causal=causal)
    found = [differentiate("emulator", way, *inputs, tiles=t, causal=causal) for t in (one, other)]
    for name, a, b, bound in zip(NAMES, *found, bounds, strict=True):
        assert_within(name, a.astype(np.float64), b.astype(np.float64), 2 * bound)


@every_way
@settings(examples(6), phases=[Phase.explicit, Phase.generate])
@given(any_call(), st.sampled_from(["float16", *(["bfloat16"] if ml_dtypes else [])]))
def test_any_problem(way, call, dtype):
    sizes, options = call
    for name in ("return_lse", "out_layout"):
        options.pop(name)
    check_gradients("emulator", way, *half_gradients(dtype, *sizes), **options)


@pytest.mark.in_turn("options")
@pytest.mark.parametrize("options", [{}, {"dropout_p": 0.3}], ids=["plain", "dropout"])
@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize("warps", [1, 4])
def test_long_rows_of_standard_attention(device, monkeypatch, warps, resident, options):
    """603 columns are 76 chunks: of one warp's threads several each, of four warps' one or none."""
    monkeypatch.setattr(planning, "planned", planning.planned.__wrapped__)
    monkeypatch.setattr(standard, "row_warps", lambda *_: warps)
    if not resident:
        monkeypatch.setattr(standard, "row_elements", lambda *_, **__: 0)
    inputs = half_gradients("float16", 1, 1, 1, 3, 603, 8)
    check_gradients(device, "standard", *inputs, tiles=Tiles(16, 64), **options)


# --- plans -----------------------------------------------------------------------------------


@every_way
def test_a_plan_says_what_runs(way):
    shape, dtype = (2, 4, 300, 63), "float16"
    algorithm, own = WAYS[way]
    with devices.using("emulator"):
        facts = {"algorithm": algorithm, "passes": "bwd", **own}
        plan = fa_numba.plan(shape, shape, dtype=dtype, **facts)
        assert plan == fa_numba.plan(shape, shape, dtype=dtype, unit="mma", **facts)
        single = fa_numba.plan(shape, shape, algorithm=algorithm, passes="bwd")
    assert plan.unit == "mma" and single.unit == "simt" and plan.flops == single.flops
    assert plan.problem.dtype == plan.accesses.dtype == dtype
    names = [k.name for k in plan.kernels]
    rows, A = 8 * 300, 8 * 300 * 64  # rows of A start at 8-byte addresses
    Tc = -(-300 // plan.tiles.Bc)
    if way == "standard":
        assert names == [k.name for k in single.kernels]
        assert plan.workspace_bytes == 2 * 2 * 8 * 300 * 304
    elif algorithm == "fa1":
        splits = own.get("query_splits", 1)
        assert names == ["fa1_backward", *["round_rows"] * (2 * (splits > 1))]
        assert plan.kernels[0].grid == (splits, 4, 2)
        assert plan.workspace_bytes == 4 * A * (3 if splits > 1 else 1)
    else:
        last = "fa2_backward_dq" if way == "fa2-deterministic" else "round_rows"
        assert names == ["row_sums", "fa2_backward", last]
        assert plan.kernels[1].grid == (Tc, 4, 2)
        assert plan.workspace_bytes == 4 * (rows + (A if way == "fa2" else 0))


@pytest.mark.parametrize("limit", [99 * 1024, 163 * 1024, 227 * 1024])
@pytest.mark.parametrize("algorithm", ["fa1", "fa2"])
def test_the_default_tiles_fit(limit, algorithm):
    for d, N in itertools.product(range(8, 257, 8), (1, 17, 64, 4096)):
        if d > 192 and algorithm == "fa1" and limit < 2**17:
            continue  # not even the smallest do
        tiles = mma_tiles(algorithm, "bwd", N, N, d, limit).value
        spec = select_mma_backward_spec(tiles, d, limit, algorithm=algorithm)
        assert spec.shared_bytes <= limit and spec.fits_registers
        assert tiles.Br <= max(32, 2 * N) and tiles.Bc <= max(16, 2 * N)


Q, K = np.ones((1, 2, 5, 8), np.float16), np.ones((1, 1, 7, 8), np.float16)
L = np.zeros((1, 2, 5), np.float32)
GIVEN = {"dout": Q, "q": Q, "k": K, "v": K, "out": Q, "lse": L}
SINGLE = {name: x.astype(np.float32) for name, x in GIVEN.items()}

REFUSED = {
    **{
        f"query splits of {algorithm} in a plan": (
            lambda algorithm=algorithm: fa_numba.plan(
                Q.shape, K.shape, dtype="float16", algorithm=algorithm, passes="bwd", query_splits=2
            ),
            ValueError, ["query_splits is 2", f"{algorithm} on mma"],
        )
        for algorithm in ("standard", "fa2")
    },
    **{
        f"query splits of {algorithm}": (
            lambda algorithm=algorithm: fa_numba.attention_backward(
                **GIVEN, algorithm=algorithm, query_splits=2
            ),
            TypeError, ["query_splits"],
        )
        for algorithm in ("standard", "fa2")
    },
    "no query splits": (
        lambda: fa_numba.flash_attention_1_backward(**GIVEN, query_splits=0), ValueError,
        ["query_splits is 0"],
    ),
    "deterministic fa1": (
        lambda: fa_numba.attention_backward(**GIVEN, algorithm="fa1", deterministic=True),
        TypeError, ["deterministic"],
    ),
    "rows of a tile": (
        lambda: fa_numba.attention_backward(**GIVEN, tiles=Tiles(24, 16)), ValueError,
        ["tiles: Br=24, Bc=16", "head_dim=8", "multiples of 16"],
    ),
    "rows of a tile that two warps share": (
        lambda: fa_numba.plan(
            (1, 1, 5, 72), (1, 1, 5, 72), dtype="float16", passes="bwd", tiles=Tiles(16, 16)
        ),
        ValueError, ["tiles: Br=16, Bc=16", "head_dim=72", "multiples of 32 and 16"],
    ),
    "threads": (
        lambda: fa_numba.attention_backward(**GIVEN, tiles=Tiles(16, 32, 96)), ValueError,
        ["tiles: threads=96", "[32, 64]"],
    ),
    "shared memory": (
        lambda: fa_numba.plan(
            (1, 1, 5, 256), (1, 1, 5, 256), dtype="float16", passes="bwd", tiles=Tiles(128, 64)
        ),
        ValueError, ["Br=128, Bc=64", "head_dim=256", "bytes of shared memory"],
    ),
    **{
        f"float32 {name}": (
            lambda name=name: fa_numba.attention_backward(**{**GIVEN, name: SINGLE[name]}),
            TypeError, [f"{name} has dtype float32", "float16"],
        )
        for name in ("dout", "k", "v", "out")
    },
    "16-bit lse": (
        lambda: fa_numba.attention_backward(**{**GIVEN, "lse": L.astype(np.float16)}),
        TypeError, ["lse has dtype float16", "float32"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_by_name(case):
    call, error, says = REFUSED[case]
    with devices.using("emulator"), pytest.raises(error) as caught:
        call()
    assert all(part in str(caught.value) for part in says), str(caught.value)


@every_way
def test_torch_tensors_in_and_out(way):
    torch = pytest.importorskip("torch")
    algorithm, own = WAYS[way]
    inputs = half_gradients("float16", 1, 1, 1, 9, 17, 8)
    given_ = [*inputs, *saved_halves(way, *inputs[1:])]
    with devices.using("emulator"):
        found = fa_numba.attention_backward(*map(torch.tensor, given_), algorithm=algorithm, **own)
    assert all(isinstance(g, torch.Tensor) and g.dtype == torch.float16 for g in found)
    assert_gradients([g.numpy() for g in found], way, *inputs)


# --- on a GPU: head dimensions, options, sizes, repetition, memory ----------------------------

# fa1-split has fa1's kernels but for how dK and dV are written.
GPU_WAYS = [way for way in WAYS if way != "fa1-split"]


@pytest.mark.gpu
@pytest.mark.parametrize("way", GPU_WAYS)
@pytest.mark.parametrize("d", HEAD_DIMS)
def test_head_dims_on_a_gpu(way, d):
    check_gradients("gpu", way, *half_gradients("float16", 1, 2, 1, 200, 233, d))


@pytest.mark.gpu
@pytest.mark.parametrize("way", GPU_WAYS)
@pytest.mark.parametrize("name", ON_GPU)
def test_options_on_a_gpu(way, name):
    inputs = half_gradients("float16", 2, 2, 1, 40, 55, 8)
    check_gradients("gpu", way, *inputs, tiles=SMALL, **OPTIONS[name])


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["fa1", "fa2"])
def test_most_options_on_a_gpu_where_two_warps_share_their_columns(way):
    inputs = half_gradients("float16", 2, 2, 1, 40, 55, 72)
    options = {**OPTIONS["most"], "block_mask": OPTIONS["most"]["block_mask"][:, :2]}
    check_gradients("gpu", way, *inputs, tiles=Tiles(32, 16), **options)


LARGE = [(1, 2, 1, 2048, 2048, 64), (2, 4, 2, 1000, 1531, 128), (1, 1, 1, 777, 513, 256)]


@pytest.mark.gpu
@every_way
@pytest.mark.parametrize(
    "dtype, shape", [bfloat16(LARGE[0]), *(("float16", shape) for shape in LARGE[1:])]
)
def test_large_problems_and_twenty_runs(way, dtype, shape):
    """All bits equal but those of atomic adds, which stay within the bound."""
    inputs = half_gradients(dtype, *shape)
    first = check_gradients("gpu", way, *inputs, causal=True)
    algorithm, own = WAYS[way]
    given_ = [*inputs, *saved_halves(way, *inputs[1:], causal=True)]
    for n in range(20):
        again = fa_numba.attention_backward(*given_, algorithm=algorithm, causal=True, **own)
        assert_same(way, first, again)
        if n % 10 == 0 and way in UNORDERED:
            assert_gradients(again, way, *inputs, causal=True)


@pytest.mark.gpu
@pytest.mark.parametrize("query_splits", [2, 7, 64])
def test_large_query_splits(query_splits, monkeypatch):
    monkeypatch.setitem(WAYS, "fa1-split", ("fa1", {"query_splits": query_splits}))
    inputs = half_gradients("float16", 1, 2, 1, 1500, 1300, 64)
    check_gradients("gpu", "fa1-split", *inputs, causal=True)


@pytest.mark.gpu
@every_way
def test_the_peak_of_memory_is_the_plans_workspace(way):
    dout, q, k, v = half_gradients("float16", 2, 4, 2, 256, 384, 64)
    out, lse = saved_halves(way, q, k, v)
    inputs = [devices.to_gpu(a) for a in (dout, q, k, v, out, lse)]
    algorithm, own = WAYS[way]
    facts = {"algorithm": algorithm, "dtype": "float16", "passes": "bwd"}
    p = fa_numba.plan(q.shape, k.shape, **facts, **own)
    with devices.track_memory() as memory:
        fa_numba.attention_backward(*inputs, algorithm=algorithm, **own)
    assert memory.peak_bytes == p.workspace_bytes
