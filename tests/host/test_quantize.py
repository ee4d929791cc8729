"""`fa_numba.quantize` against its definition in float64, on a GPU too; what it refuses."""

import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import numpy_dtype
from stand_in_device import JaxArray, no_gpu_but_its_driver, no_jax_but_its_names, on_gpu

import fa_numba
from fa_numba import device as devices
from fa_numba import reference
from fa_numba.device import linking
from fa_numba.dtypes import E4M3
from fa_numba.host import arrays, quantizing
from fa_numba.host.arrays import operand
from fa_numba.kernels.simt import quantize as kernels
from fa_numba.problem import MAX_SEQLEN

SHAPE = (2, 3, 130, 32)
HALF_STEP = 2.0**-4  # the largest relative error of a normal e4m3 number


def given(device, shape=SHAPE, dtype="float32", seed=0):
    """Heads of different sizes, as NumPy and as what a call takes."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * 2.0 ** rng.integers(-3, 4, (*shape[:2], 1, 1))
    x = x.astype(numpy_dtype(dtype))
    return x, devices.to_gpu(x) if device == "gpu" else x


def assert_stored(stored, scales, exact, per):
    """Each number is nearest to x / scale, and the scales are those of the largest numbers."""
    stored, scales = (
        x.copy_to_host() if hasattr(x, "copy_to_host") else x for x in (stored, scales)
    )
    B, H, N, _ = exact.shape
    size = np.abs(exact)
    largest = np.stack([size[:, :, n : n + 128].max((2, 3)) for n in range(0, N, 128)], -1)
    if per != "block":
        largest = largest.max(-1)
    if per == "tensor":
        largest = np.full_like(largest, largest.max())
    np.testing.assert_allclose(scales, largest / 448, rtol=2e-6)
    of_rows = np.repeat(scales.reshape(B, H, -1), 128 if per == "block" else N, axis=2)[:, :, :N]
    least = 2.0**-6 * of_rows[..., None]  # the smallest normal number
    error = np.abs(reference.dequantize(stored, scales) - exact)
    assert (error <= HALF_STEP * np.maximum(size, least) * (1 + 1e-5)).all()


@pytest.mark.parametrize("per", ["tensor", "head", "block"])
def test_numbers_and_scales(device, per):
    x, argument = given(device)
    assert_stored(*fa_numba.quantize(argument, per), x.astype(float), per)


@pytest.mark.parametrize("together", [True, False])
def test_more_numbers_than_threads(device, together):
    most = np.random.default_rng(0).random((2, 3, 300)).astype(np.float32)
    scales = np.zeros((2, 3), np.float32)
    arrays = (most, scales)
    with devices.using(device):
        on_gpu = [devices.to_gpu(x) for x in arrays] if device == "gpu" else arrays
        given = [devices.argument(x) if device == "gpu" else x for x in on_gpu]
        grid = (1, 1, 1) if together else (3, 2, 1)
        devices.launch(kernels.make_scales(together), grid, tuple(given))
    found = on_gpu[1].copy_to_host() if device == "gpu" else scales
    np.testing.assert_allclose(found, most.max(None if together else 2) / 448, rtol=1e-6)


def test_rotated_rows(device):
    x, argument = given(device, (1, 2, 5, 64), "float16")
    stored, scales = fa_numba.quantize(argument, rotate=2**40 + 3)
    assert_stored(stored, scales, reference.rotate(x, 2**40 + 3), "head")


def test_other_strides_layouts_and_dtypes():
    x, _ = given("emulator", (1, 5, 2, 48), "float16")
    rows_last = np.ascontiguousarray(x.swapaxes(2, 3)).swapaxes(2, 3)  # no row is contiguous
    wanted = fa_numba.quantize(x, "block")
    for found in (
        fa_numba.quantize(rows_last, "block"),
        fa_numba.quantize(x.astype(np.float32), "block"),
    ):
        assert all(map(np.array_equal, found, wanted))
    turned, scales = fa_numba.quantize(x.transpose(0, 2, 1, 3), "block", layout="bnhd")
    assert np.array_equal(turned.transpose(0, 2, 1, 3), wanted[0])
    assert np.array_equal(scales, wanted[1])


def test_zeros_nan_and_infinity():
    x = np.zeros((1, 3, 2, 16), np.float32)
    x[0, 1, 0, :2], x[0, 2, 1, :2] = (np.nan, -7.0), (np.inf, 1.0)
    stored, scales = fa_numba.quantize(x)
    assert scales[0, 0] == 1.0 and not stored[0, 0].any()
    found = stored[0, 1, 0, :3].astype(float)
    assert np.isnan(found[0]) and found[1:].tolist() == [-448.0, 0.0]
    assert scales[0, 1] == pytest.approx(7 / 448)
    found = stored[0, 2, 1, :3].astype(float)
    assert np.isnan(found[0]) and found[1:].tolist() == [448.0, 0.0]


def test_rotations_of_q_and_k_cancel():
    """Products of rows are those of the rows as they were, up to the error of e4m3."""
    (q, _), (k, _) = given("emulator", (1, 1, 4, 64)), given("emulator", (1, 1, 6, 64), seed=1)
    made = [reference.dequantize(*fa_numba.quantize(x, rotate=3))[0, 0] for x in (q, k)]
    assert reference.relative_error(made[0] @ made[1].T, q[0, 0] @ k[0, 0].T) < 0.1


def test_accesses_are_those_of_the_docstring():
    x, _ = given("emulator")
    elements = x.size
    for per, reads in (("block", 1), ("head", 2)):
        with fa_numba.count_accesses() as counts:
            fa_numba.quantize(x, per)
        assert counts.loads["X"] == reads * elements and counts.stores["Y"] == elements
        assert counts.stores["scales"] == 2 * 3 * (2 if per == "block" else 1)


@pytest.mark.parametrize(
    "x, how, error, says",
    [
        (np.zeros((1, 1, 4, 16)), {}, TypeError, "x must be float32, float16 or bfloat16, got flo"),
        (np.zeros((4, 16), np.float32), {}, ValueError, "x must have 4 axes"),
        (
            np.zeros((1, 1, 4, 24), np.float32),
            {},
            ValueError,
            "head_dim of x must be a multiple of 16 and at most 256, so that rows of e4m3 start at "
            "multiples of 16 bytes, got 24; append columns of zeros",
        ),
        (
            np.zeros((1, 1, 4, 48), np.float32),
            {"rotate": 1},
            ValueError,
            "head_dim of x must be a power of two with rotate, got 48",
        ),
        (
            np.zeros((1, 1, 4, 16), np.float32),
            {"rotate": -1},
            ValueError,
            "rotate must be an integer from 0 to 2**64 - 1, got -1",
        ),
        (
            np.zeros((1, 1, 4, 16), np.float32),
            {"per": "row"},
            ValueError,
            "per must be 'tensor', 'head' or 'block', got 'row'",
        ),
    ],
)
def test_what_is_refused(x, how, error, says):
    with pytest.raises(error, match=re.escape(says)):
        fa_numba.quantize(x, **how)


def test_an_array_may_have_so_many_rows_and_heads(monkeypatch):
    """The launch, which would take long, is left out."""
    monkeypatch.setattr(quantizing.launch_cache, "run_and_keep", lambda *_, **__: ["x", "scale"])
    monkeypatch.setattr(quantizing.placement, "check_steps", lambda *_: None)
    monkeypatch.setattr(quantizing, "_as_float8", lambda given, array: array)
    number = np.zeros(1, np.float16)

    def run(heads, rows):
        return fa_numba.quantize(np.broadcast_to(number, (1, heads, rows, 16)))

    assert run(65535, 1)[0] == run(1, MAX_SEQLEN)[0] == "x"
    with pytest.raises(ValueError, match=f"x must have at most {MAX_SEQLEN} rows per head"):
        run(1, MAX_SEQLEN + 1)
    with pytest.raises(ValueError, match="heads of x must be at most 65535 .*got 65536"):
        run(65536, 1)


def test_older_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(devices, "compute_capability", lambda: (8, 0))
    with pytest.raises(ValueError, match="compute capability 8.9 or newer, .* got 8.0"):
        fa_numba.quantize(np.zeros((1, 1, 4, 16), np.float32))
    monkeypatch.setattr(devices, "compute_capability", lambda: (8, 9))
    found, _ = fa_numba.quantize(np.zeros((1, 1, 4, 16), np.float32))
    assert found.dtype.itemsize == 1


def test_arrays_of_libraries_with_and_without_the_dtype():
    """Bits in uint8 stand for e4m3 if the library has no such dtype and the call allows e4m3."""
    e4m3 = E4M3.name
    with no_gpu_but_its_driver(), no_jax_but_its_names():
        bits = np.zeros((1, 1, 4, 16), np.uint8)
        given = on_gpu(bits)
        found = operand("q", given, ("float16", e4m3))
        assert (found.dtype, found.strides[-1], found.aligned) == (e4m3, 1, True)
        assert found.empty((2,), e4m3).dtype == np.uint8
        with pytest.raises(TypeError, match="the results cannot be bfloat16"):
            found.empty((2,), "bfloat16")
        with pytest.raises(TypeError, match="q must be float32, float16 or bfloat16, got uint8"):
            operand("q", given)
        of_jax = operand("q", JaxArray(given.values.view(numpy_dtype(e4m3))), (e4m3,))
        assert (of_jax.dtype, of_jax.library) == (e4m3, "jax")
        assert of_jax.pointer == found.pointer
    with pytest.raises(TypeError, match="q must be float16 or float8_e4m3fn, got uint8"):
        operand("q", bits, ("float16", e4m3))  # NumPy's has ml_dtypes


def test_a_replayed_call_takes_its_own_seed(kept):
    with no_gpu_but_its_driver() as gpu:
        gpu.runs = False
        x = on_gpu(np.ones((1, 1, 4, 16), np.float32))
        for rotate in (3, 2**40 + 1, 2**63):
            stored, scales = fa_numba.quantize(x, "block", rotate)
            given = gpu.given[-1]
            low, high = np.array([rotate], "<u8").view("<i4").tolist()
            assert (given["seed_low"], given["seed_high"]) == (low, high)
            assert (stored.dtype, scales.shape) == (np.uint8, (1, 1, 1))
        assert len(kept) == 1
        fa_numba.quantize(x, "block")
        assert len(kept) == 2


def test_a_call_with_another_argument_is_not_replayed(kept):
    """Also if the array is the same one."""
    with no_gpu_but_its_driver() as gpu:
        gpu.runs = False
        x = on_gpu(np.ones((1, 4, 4, 16), np.float32))
        ways = [("tensor", None, "bhnd"), ("head", None, "bhnd"), ("block", None, "bhnd")]
        ways += [("head", 5, "bhnd"), ("head", None, "bnhd")]
        for _ in range(2):
            for per, rotate, layout in ways:
                fa_numba.quantize(x, per, rotate, layout=layout)
        assert len(kept) == len(ways)


def test_without_ml_dtypes_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with monkeypatch.context() as context:
        context.setattr(np, "dtype", _only_known(np.dtype))
        with pytest.raises(ImportError, match=r"need .* ml_dtypes; install .* 'fa_numba\[fp8\]'"):
            arrays.numpy_dtype(E4M3.name)


def _only_known(dtype):
    """``numpy.dtype`` as it is without ml_dtypes, which registers the names of its dtypes."""

    def known(name):
        if name == E4M3.name:
            raise TypeError(name)
        return dtype(name)

    return known


@pytest.mark.slow
@pytest.mark.parametrize("make", [kernels.make_quantize_blocks, kernels.make_quantize_heads])
def test_the_kernels_compile_without_spills(make):
    ptx, _, log = linking.ptx_and_cubin(make(128, "float16", True, True), (9, 0))
    assert ".local" not in ptx and ".f64" not in ptx and "0 bytes spill stores" in log


def test_bytes_of_jax_become_e4m3(monkeypatch):
    """An array on the host has the dtype already, and no other library has another one."""
    jax = SimpleNamespace(numpy=SimpleNamespace(float8_e4m3fn="float8_e4m3fn"))
    monkeypatch.setitem(sys.modules, "jax", jax)

    def stored(dtype):
        return SimpleNamespace(dtype=dtype, view=lambda other: f"{dtype} as {other}")

    for library, dtype, viewed in (
        ("jax", "uint8", True), ("jax", "float8_e4m3fn", False), ("numpy", "uint8", False)
    ):  # fmt: skip
        array = stored(dtype)
        found = quantizing._as_float8(SimpleNamespace(library=library), array)
        assert found == "uint8 as float8_e4m3fn" if viewed else found is array
