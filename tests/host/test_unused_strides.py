"""An axis of length 1 has no stride: the stride that an array has there changes nothing."""

import numpy as np
import pytest
from helpers import random_inputs
from numba import cuda
from stand_in_device import Array, aligned

import fa_numba
from fa_numba import device as devices
from fa_numba.device.tensor_map import STEP_BYTES, TiledArray
from fa_numba.emulator import Boxed, launch
from fa_numba.emulator.global_memory import used_strides
from fa_numba.host.arrays import operand

ODD = (775, 774, -3, 0, 2**40 + 1, -(2**41) - 7)  # bytes


def odd(array, seed=0):
    """The same elements with a stride of ``ODD`` along each axis of length 1."""
    draw = np.random.default_rng(seed)
    axes = zip(array.shape, array.strides, strict=True)
    steps = [s if n > 1 else int(draw.choice(ODD)) for n, s in axes]
    return np.lib.stride_tricks.as_strided(array, array.shape, steps)


def rows(*shape, dtype="float32"):
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(dtype)


def attention(unit, algorithm, *sizes, dtype, **options):
    """A forward call, its arrays by name."""
    q, k, v = random_inputs(*sizes, dtype=dtype)
    if options.get("layout") == "bnhd":
        q, k, v = (np.ascontiguousarray(x.swapaxes(1, 2)) for x in (q, k, v))
    given = {"q": q, "k": k, "v": v, "out": np.zeros_like(q)}
    return fa_numba.attention, given, options | {"unit": unit, "algorithm": algorithm}


def backward(unit, algorithm, *sizes, dtype):
    q, k, v = random_inputs(*sizes, dtype=dtype)
    out, lse = rows(*q.shape, dtype=dtype), rows(*q.shape[:3])
    given = {"dout": out, "q": q, "k": k, "v": v, "out": out.copy(), "lse": lse}
    return fa_numba.attention_backward, given, {"unit": unit, "algorithm": algorithm}


def packed(unit):
    """One sequence of one head: its map counts rows from the end."""
    q, k = rows(9, 1, 64, dtype="float16"), rows(5, 1, 64, dtype="float16")
    given = {"q": q, "k": k, "v": k, "cu_seqlens_q": np.array([0, 9])}
    return fa_numba.attention, given | {"cu_seqlens_k": np.array([0, 5])}, {"unit": unit}


def prefix(unit):
    q, k = rows(2, 1, 1, 64, dtype="float16"), rows(2, 1, 3, 64, dtype="float16")
    of_prefix = rows(1, 5, 64, dtype="float16")
    given = {"q": q, "k": k, "v": k, "prefix_k": of_prefix, "prefix_v": of_prefix}
    return fa_numba.attention, given, {"unit": unit}


def append():
    pages, new = rows(1, 1, 16, 8), rows(1, 1, 1, 8)
    given = {"k_pages": pages, "v_pages": pages.copy(), "k_new": new, "v_new": new}

    def run(k_pages, v_pages, **options):
        fa_numba.append_kv(k_pages, v_pages, **options)
        return k_pages, v_pages

    return run, given, {"block_table": [[0]], "kv_lens": [3]}


def merge():
    def run(x, x_lse, y, y_lse, **options):
        return fa_numba.merge((x, y), (x_lse, y_lse))

    o, lse = rows(1, 1, 1, 8, dtype="float16"), rows(1, 1, 1)
    return run, {"x": o, "x_lse": lse, "y": o, "y_lse": lse}, {}


CALLS = {
    "the only row of its layout": attention(
        "wgmma", "fa2", 1, 2, 1, 1, 9, 64, dtype="float16", layout="bnhd"
    ),
    "a sequence with boxes": packed("wgmma"),
    "a prefix": prefix("mma"),
    "a bias": attention(
        "mma", "fa1", 1, 1, 1, 1, 9, 16, dtype="float16", bias=rows(1, 1, 1, 9), sinks=rows(1)
    ),
    "one column": attention("simt", "standard", 1, 2, 1, 3, 1, 1, dtype="float32"),
    "gradients of one column": backward("simt", "fa1", 1, 1, 1, 3, 1, 1, dtype="float32"),
    "a softmax": (fa_numba.softmax, {"x": rows(1, 5)}, {}),
    "new keys": append(),
    "parts": merge(),
}


def results(call, make):
    function, given, options = call
    arrays = {name: make(x.copy()) for name, x in given.items()}
    options = {n: make(x) if isinstance(x, np.ndarray) else x for n, x in options.items()}
    with devices.using("emulator"):
        found = function(**arrays, **options)
    return found if isinstance(found, tuple) else (found,)


@pytest.mark.parametrize("name", CALLS)
def test_results_are_those_of_dense_arrays(name):
    want, found = (results(CALLS[name], make) for make in (lambda x: x, odd))
    for x, y in zip(want, found, strict=True):
        assert np.array_equal(x, y, equal_nan=True)


@pytest.mark.parametrize("seed", range(30))
def test_a_tensor_map_has_no_stride_that_no_box_uses(seed):
    draw = np.random.default_rng(seed)
    sizes = [(1, 3), (1, 2, 4), (1, 5)]
    shape = (*(int(draw.choice(n)) for n in sizes), 64)
    dense = np.zeros(shape, np.uint16)
    heads = int(draw.choice([n for n in (1, 2) if shape[1] % n == 0]))
    how = {"rows": 8, "dtype": "float16", "heads": heads, "ends": bool(draw.integers(2))}
    want, found = (TiledArray(x, **how).layout for x in (dense, odd(dense, seed)))
    assert found == want
    assert all(step % STEP_BYTES == 0 for step in found.strides[:-1])
    assert Boxed(odd(dense, seed), 8, found).array.strides == used_strides(shape, dense.strides, 2)


def test_a_kernel_of_ones_own_may_have_any_stride_there():
    def doubled(x, y):
        t = cuda.threadIdx.x
        y[t, 0] = 2 * x[0, t]

    x, y = rows(1, 5), np.zeros((5, 1), np.float32)
    counts = launch(doubled, 1, 5, odd(x), odd(y))
    assert (
        np.array_equal(y[:, 0], 2 * x[0]) and counts.total() == launch(doubled, 1, 5, x, y).total()
    )


def test_a_launch_gets_no_stride_that_no_index_uses(gpu):
    values = aligned((1, 2, 1, 8), "float32")
    given = operand("q", Array(odd(values)))
    assert given.aligned and given.argument().strides == (0, 32, 0, 4)
    assert given.strides == odd(values).strides  # messages quote the caller's strides
    one = operand("q", Array(odd(aligned((2, 1), "float32"))))
    assert one.argument().strides == (4, 4)


def test_a_stride_that_an_index_uses_is_refused_before_the_launch():
    q, k, v = random_inputs(1, 1, 1, 2, 3, 64, dtype="float16")
    memory = np.zeros(2000, np.uint8)
    unaligned = np.ndarray(q.shape, q.dtype, memory, 0, (0, 0, 774, 2))
    with devices.using("emulator"), pytest.raises(ValueError, match="rows that do not start at m"):
        fa_numba.attention(unaligned, k, v, unit="wgmma")
    message = "q must have an address and strides that are multiples of 2 bytes"
    with devices.using("emulator"), pytest.raises(ValueError, match=message):
        fa_numba.attention(np.ndarray(q.shape, q.dtype, memory, 0, (0, 0, 775, 2)), k, v)


@pytest.mark.parametrize("heads", [1, 2, 3])
def test_a_tensor_map_has_the_elements_of_its_array_and_no_others(heads):
    """Rows of neighbouring heads lie together; boxes have as many rows in all."""
    x = np.arange(2 * 6 * 10 * 64, dtype=np.float16).reshape(2, 10, 6, 64).swapaxes(1, 2)
    layout = TiledArray(x, 12, "float16", heads).layout
    together = x.reshape(2, 6 // heads, heads, 10, 64).swapaxes(2, 3)
    together = together if heads > 1 else x
    assert layout.shape == together.shape
    found = np.lib.stride_tricks.as_strided(x, layout.shape, layout.strides)
    np.testing.assert_array_equal(found, together)
    assert np.prod(layout.box) == 12 * 64 and layout.box[:3] == (1, 1, 12 // heads)

    ends = TiledArray(x, 12, "float16", heads, ends=True).layout
    batch, head, row = ends.steps
    assert ends.shape[1] == 1 + batch + (6 // heads - 1) * head + 10 * row
    step = ends.strides[1]
    assert [n * step for n in ends.steps] == [x.strides[0], heads * x.strides[1], x.strides[2]]
    assert ends.shape[3:] == together.shape[3:] and ends.box == layout.box
