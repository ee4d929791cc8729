"""The guard bands, the yardsticks and the checks of results can fail."""

import math

import numpy as np
import pytest
from backward_helpers import (
    ALL_WAYS,
    NAMES,
    Gradients,
    assert_gradients,
    expected,
    half_gradients,
    random_gradients,
)
from helpers import (
    GUARDS,
    LAYOUTS,
    ROUNDING,
    Memory,
    assert_close_to_float64,
    assert_counts,
    assert_scale,
    assert_within,
    numpy_dtype,
    random_inputs,
    truth,
)
from mma_helpers import BFLOAT16, half_inputs, no_bfloat16
from mma_helpers import every_dtype as every_half

import fa_numba
from fa_numba import Tiles, reference

every_dtype = pytest.mark.parametrize("dtype", ["float32", "float16", BFLOAT16])


@every_dtype
@pytest.mark.parametrize("layout", [x for x in LAYOUTS if x != "broadcast"])
def test_a_guard_band_surrounds_every_array(dtype, layout):
    memory = Memory("emulator", (2, 2, 3, 5), layout, dtype=dtype)
    assert (memory.buffer[~memory.inside] == GUARDS[memory.buffer.itemsize]).all()
    assert len(np.unique(memory.view.astype(np.float32))) == 1  # NaN too
    assert memory.inside.sum() == memory.view.size and not memory.inside.all()
    memory.view[...] = 1.0
    memory.assert_intact("out", whole=False)
    with pytest.raises(AssertionError, match="memory of out was written"):
        memory.assert_intact("out", whole=True)
    memory.buffer[~memory.inside] += 1  # another NaN than the guard's
    with pytest.raises(AssertionError, match="guard band of out"):
        memory.assert_intact("out", whole=False)


@every_dtype
@pytest.mark.parametrize("change", ["scale", "one element", "missing", "L"])
def test_the_check_fails_on_a_wrong_result(dtype, change):
    q, k, v = random_inputs(1, 2, 1, 24, 40, 8, dtype=dtype)
    how = {"return_lse": True} | ({} if dtype == "float32" else {"matrix_dtype": dtype})
    single = [x.astype(np.float32) for x in (q, k, v)]
    O, L = reference.unfused(*single, **how)
    assert_close_to_float64(O, q, k, v, L)
    if change == "scale":
        off = {"float32": 1.001, "float16": 1.01, "bfloat16": 1.01}[dtype]
        O, L = reference.unfused(*single, scale=off / math.sqrt(8), **how)
    elif change == "one element":
        O[0, 1, 3, 5] += {"float32": 3e-5, "float16": 0.02, "bfloat16": 0.15}[dtype]
    elif change == "missing":
        O[0, 1, 3, 5] = np.nan
    else:
        L[0, 0, 2] += 1e-4
    with pytest.raises(AssertionError, match="worst at .* got .*, expected"):
        assert_close_to_float64(O, q, k, v, L)


def test_counts_can_fail():
    q, k, v = random_inputs(1, 1, 1, 9, 17, 8)
    tiles = Tiles(8, 16)
    with fa_numba.count_accesses() as counts:
        fa_numba.flash_attention_2(q, k, v, tiles=tiles)
    assert_counts(counts, fa_numba.plan(q.shape, k.shape, tiles=tiles))
    for wrong in ({"tiles": Tiles(16, 16)}, {"algorithm": "fa1", "tiles": tiles}):
        with pytest.raises(AssertionError):
            assert_counts(counts, fa_numba.plan(q.shape, k.shape, **wrong))


@pytest.mark.parametrize(
    "change",
    ["scale", "one element", "missing", "D", "no D", "causal", "a group", "dk of one tile"],
)
def test_the_check_fails_on_a_wrong_gradient(change):
    dout, q, k, v = random_gradients(1, 2, 1, 24, 40, 8)
    found = Gradients(*reference.unfused_backward(dout, q, k, v))
    assert_gradients(found, dout, q, k, v)
    if change == "scale":
        found = Gradients(*reference.unfused_backward(dout, q, k, v, scale=1.0001 / math.sqrt(8)))
    elif change == "one element":
        found.dk[0, 0, 3, 5] += 3e-5
    elif change == "missing":
        found.dq[0, 1, 3, 5] = np.nan
    elif change in ("D", "no D"):
        O, L = reference.attention(q, k, v, return_lse=True)
        D = (dout * O).sum(axis=3, keepdims=True) * (-1 if change == "D" else 0)
        P = np.exp(q @ k.swapaxes(2, 3) / math.sqrt(8) - L[..., None])
        found.dq = (P * (dout @ v.swapaxes(2, 3) - D)) @ k / math.sqrt(8)
    elif change == "causal":
        found.dv = reference.attention_backward(dout, q, k, v, causal=True)[2]
    elif change == "a group":
        found.dv = reference.attention_backward(dout[:, :1], q[:, :1], k, v)[2]
    else:
        found.dk[:, :, 32:] *= np.float32(1.00002)
    with pytest.raises(AssertionError, match="worst at .* got .*, expected"):
        assert_gradients(found, dout, q, k, v)


@every_half
def test_the_yardstick_rounds_the_matrices_and_sums_in_float32(dtype):
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 1, 1, 33, 16), dtype=np.float32)
    O, L = reference.unfused(q, k, v, matrix_dtype=dtype, scale=0.3, return_lse=True)
    Q, K, V = (a[0, 0].astype(numpy_dtype(dtype)).astype(np.float32) for a in (q, k, v))
    S = np.float32(0.3) * (Q @ K.T)
    m = S.max(axis=1, keepdims=True)
    P = np.exp(S - m)
    l = P.sum(axis=1, keepdims=True)
    P = (P / l).astype(numpy_dtype(dtype)).astype(np.float32)
    assert O.dtype == L.dtype == np.float32
    assert np.array_equal(O[0, 0], (P @ V).astype(numpy_dtype(dtype)).astype(np.float32))
    assert np.array_equal(L[0, 0], (m + np.log(l))[:, 0])
    stored = reference.unfused(q, k, v, matrix_dtype=dtype, stored_scores=True, scale=0.3)
    S = S.astype(numpy_dtype(dtype)).astype(np.float32)
    P = np.exp(S - S.max(axis=1, keepdims=True))
    P = (P / P.sum(axis=1, keepdims=True)).astype(numpy_dtype(dtype)).astype(np.float32)
    assert np.array_equal(stored[0, 0], (P @ V).astype(numpy_dtype(dtype)).astype(np.float32))
    assert not np.array_equal(stored, O)
    rounded = (a.astype(numpy_dtype(dtype)) for a in (q, k, v))
    again = reference.unfused(*rounded, matrix_dtype=dtype, scale=0.3)
    assert np.array_equal(again, O)


@no_bfloat16
def test_the_yardstick_rounds_to_bfloat16_as_ml_dtypes_does():
    rng = np.random.default_rng(1)
    bits = rng.integers(0, 2**32, 100_000, dtype=np.uint64).astype(np.uint32)
    bits[:50_000] &= 0xFFFF8000  # many ties
    x = bits.view(np.float32)
    with np.errstate(invalid="ignore"):
        want = x.astype(numpy_dtype("bfloat16"))
    got = reference._to_half(x, "bfloat16")
    assert np.array_equal(got, want.astype(np.float32), equal_nan=True)


@pytest.mark.parametrize(
    "options, says",
    [
        (
            {"matrix_dtype": "float32"},
            "matrix_dtype must be 'float16', 'bfloat16' or None, got 'float32'",
        ),
        (
            {"matrix_dtype": "float16", "dtype": "f8"},
            "dtype must be float32 if matrix_dtype is given, got 'f8'",
        ),
    ],
)
def test_the_yardstick_takes_no_other_dtypes(options, says):
    with pytest.raises(ValueError, match=says):
        reference.unfused(*np.ones((3, 1, 1, 2, 2), np.float32), **options)


@every_half
@pytest.mark.parametrize("roundings", [0.0, 1.0, -0.5])
def test_the_check_fails_on_a_scale_within_the_norm(dtype, roundings):
    """The norm of the error is that of a result that is rounded twice."""
    q, k, v = half_inputs(dtype, 1, 2, 2, 96, 80, 16)
    O = reference.unfused(q, k, v, matrix_dtype=dtype)
    scaled = O * (1 + roundings * ROUNDING[dtype])
    want = truth(q, k, v)
    assert_within("O", scaled, want.O, want.O_bound)
    if roundings == 0:
        assert_close_to_float64(scaled, q, k, v)
        return
    with pytest.raises(AssertionError, match="O is [01].[09]+.* times what it should be, of 192 r"):
        assert_close_to_float64(scaled, q, k, v)


@pytest.mark.parametrize("d, rows, rounding", [(1, 24, 2**-11), (64, 400, 2**-8)])
def test_a_scale_is_told_from_rounding_by_rows_enough(d, rows, rounding):
    """A tenth of a rounding, where 25,600 elements are rounded; nothing of 24."""
    rng = np.random.default_rng([d, rows])
    exact = rng.standard_normal((rows, d))
    rounded = exact * (1 + rounding * rng.uniform(-1, 1, exact.shape))
    assert_scale("O", rounded, exact, rounding)
    if rows == 24:
        assert_scale("O", 2 * exact, exact, rounding)
        return
    with pytest.raises(AssertionError, match="allowed is 0.00039 off"):
        assert_scale("O", rounded * (1 + 0.15 * rounding), exact, rounding)


def test_rows_that_are_rounded_alike_count_as_one():
    exact = np.full((100, 4), 1 + 2.0**-12)
    assert_scale("O", exact.astype(np.float16), exact, 2.0**-11)
    exact[:, 0] += np.linspace(0, 1, 100)
    with pytest.raises(AssertionError, match="of 100 rows"):
        assert_scale("O", exact * (1 + 2.0**-12), exact, 2.0**-11)


def test_the_layouts_are_what_they_are_for():
    aligned = {
        layout
        for layout in set(LAYOUTS) - {"broadcast"}
        if (memory := Memory("emulator", (2, 2, 3, 8), layout, dtype="float16"))
        and fa_numba.host.arrays.operand("q", memory.view).aligned
    }
    assert aligned == {"padded", "transposed", "strided"}
    rows = Memory("emulator", (2, 2, 3, 16), "padded", dtype="float16").view
    assert fa_numba.host.arrays.operand("q", rows).aligned
    for other in (rows[..., ::2], rows[..., 1:9], rows[..., 4:12]):
        assert not fa_numba.host.arrays.operand("q", other).aligned


@pytest.mark.in_turn("way", share=2)
@pytest.mark.parametrize("way", ALL_WAYS)
@every_half
@pytest.mark.parametrize("n", [0, 1, 2])
def test_the_check_fails_on_the_scale_of_a_gradient(way, dtype, n):
    inputs = half_gradients(dtype, 1, 4, 2, 64, 80, 16)
    single = [x.astype(np.float32) for x in inputs]
    found = list(reference.unfused_backward(*single, matrix_dtype=dtype))
    assert_gradients(found, *inputs, way=way)
    found[n] = found[n] * (1 + ROUNDING[dtype])
    exact, bounds = expected(way, *inputs)
    assert_within(NAMES[n], found[n], exact[n], bounds[n])
    with pytest.raises(AssertionError, match=f"{NAMES[n]} is 1.00.* times what it should be"):
        assert_gradients(found, *inputs, way=way)


@pytest.mark.in_turn("way")
@pytest.mark.parametrize("way", ALL_WAYS)
@every_half
@pytest.mark.parametrize("change", ["nothing", "a scale", "an element", "D", "a tile"])
def test_the_check_fails_on_a_wrong_gradient_in_16_bits(way, dtype, change):
    inputs = half_gradients(dtype, 1, 2, 1, 24, 40, 8)
    single = [x.astype(np.float32) for x in inputs]
    found = [x.astype(inputs[0].dtype) for x in reference.unfused_backward(*single)]
    if change == "nothing":
        assert_gradients(found, *inputs, way=way)
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
        assert_gradients(found, *inputs, way=way)
