"""Arrays that a caller's function uses keep the values that they had when it was given."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import random_inputs
from stand_in_device import Array, Dlpack, aligned, no_gpu_but_its_driver
from stand_in_torch import Tensor, fa_numba_torch, no_torch_but_its_names

import fa_numba
from fa_numba import Tiles, mods
from fa_numba import device as devices
from fa_numba.host import held
from fa_numba.host.arrays import operand

LARGE = held.COPIED_BYTES // 4 + 1  # elements of 4 bytes
TILES = Tiles(Br=16, Bc=16)
Q, K, V = random_inputs(1, 1, 1, 16, 32, 8)
DOUT = np.ones_like(Q)


@pytest.fixture(autouse=True)
def emulator():
    with devices.using("emulator"):
        yield


class OnlyDlpack:
    """Host memory that offers the DLPack protocol and nothing else."""

    def __init__(self, values):
        self.values, self.shape, self.dtype = values, values.shape, values.dtype

    def __dlpack__(self, **options):
        return self.values.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.values.__dlpack_device__()


def values_of(function):
    return dict(mods.captured("score_mod", function).values)


GRID = np.arange(12, dtype=np.float32).reshape(3, 4)


@pytest.mark.parametrize("number", [2.5, 3, np.float32(2.5), np.int32(3), np.True_])
def test_a_number_stays_what_it_is(number):
    """No array is made of a number of NumPy's: the function is compiled for numbers."""
    function = held.holding("score_mod", lambda s, b, h, i, j: s * number)
    assert values_of(function)["number"] == number
    assert type(function.__closure__[0].cell_contents) is type(number)


@pytest.mark.parametrize(
    "kind",
    [
        lambda x: x,
        lambda x: x.T,
        lambda x: x[::-1, ::2],
        lambda x: np.broadcast_to(x[:1], (LARGE, 4)),
        OnlyDlpack,
    ],
    ids=["contiguous", "transposed", "in steps", "broadcast", "DLPack"],
)
def test_a_small_array_is_copied(kind):
    memory = GRID.copy()
    x, right = kind(memory), np.array(getattr(kind(memory), "values", kind(memory)))
    function = held.holding("score_mod", lambda s, b, h, i, j: s + x[0, 1])
    memory[...] = -1
    assert np.array_equal(values_of(function)["x"], right)
    held.check({"score_mod": function})


@pytest.mark.parametrize("further", [0, 1])
def test_an_array_of_a_mebibyte_is_copied_and_a_larger_one_is_watched(further):
    x = np.zeros(held.COPIED_BYTES + further, bool)
    function = held.holding("score_mod", lambda s, b, h, i, j: s + x[j])
    assert (values_of(function)["x"] is x) == bool(further)
    x[0] = True
    with pytest.raises(ValueError) if further else nullcontext():
        held.check({"score_mod": function})


@pytest.mark.parametrize("dtype", ["float16", "float32", "int32"])
@pytest.mark.parametrize(
    "kind, elements",
    [
        (lambda x: x, 12),
        (lambda x: x.T, 12),
        (lambda x: x[::-1, ::2], 6),
        (lambda x: x[0, 0], 1),
        (lambda x: np.broadcast_to(x[:1], (LARGE, 4)), 4),
        (lambda x: np.broadcast_to(x, (LARGE, 3, 4)), 12),
        (lambda x: np.broadcast_to(x[1, 2], (LARGE, 5)), 1),
    ],
)
def test_the_size_of_an_array_is_that_of_its_elements_in_memory(kind, elements, dtype):
    """Of an array on a GPU, as of an array on the host."""
    x = np.asarray(kind(GRID.astype(dtype)))
    found = operand("x", x, (dtype,))
    for each in (found, replace(found, host=None)):
        assert held._nbytes(each) == elements * x.itemsize


@pytest.mark.parametrize(
    "kind", [lambda x: x, lambda x: x[::-1], OnlyDlpack], ids=["array", "view", "DLPack"]
)
def test_a_large_array_must_not_change(kind):
    memory = np.zeros(LARGE + 1, np.float32)
    x = kind(memory)
    function = held.holding("score_mod", lambda s, b, h, i, j: s + x[j])
    assert values_of(function)["x"] is x
    held.check({"score_mod": function})
    memory[-2] = 1
    wrong = r"^x in score_mod, a lambda \(test_held.py, line \d+\), must still have the values that"
    with pytest.raises(ValueError, match=wrong):
        held.check({"score_mod": function})
    memory[-2] = 0
    held.check({"score_mod": function})


def test_a_block_mask_keeps_the_values_that_it_was_made_with():
    lens = np.array([20], np.int32)
    mask = fa_numba.create_block_mask(lambda b, h, i, j: j < lens[b], 1, 1, 16, 32, tiles=TILES)
    lens[:] = 3
    out, lse = fa_numba.attention(Q, K, V, block_mask=mask, return_lse=True)
    want = fa_numba.attention(Q, K, V, kv_lens=[20])
    np.testing.assert_allclose(out, want, rtol=1e-5)
    got = fa_numba.attention_backward(DOUT, Q, K, V, out, lse, block_mask=mask)
    want = fa_numba.attention_backward(DOUT, Q, K, V, out, lse, kv_lens=[20])
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_a_block_mask_of_a_large_array_that_changes_is_refused():
    lens = np.full(LARGE, 20, np.int32)
    mask = fa_numba.create_block_mask(lambda b, h, i, j: j < lens[b], 1, 1, 16, 32, tiles=TILES)
    lens[-1] = 3
    wrong = "^lens in mask_mod, a lambda .* must still have the values that .*create_block_mask"
    with pytest.raises(ValueError, match=wrong):
        fa_numba.attention(Q, K, V, block_mask=mask)
    with pytest.raises(ValueError, match=wrong):
        fa_numba.attention(Q, K, V, mask_mod=mask.mask_mod)


def test_what_a_block_mask_shows_is_not_what_it_computes_with():
    mask = fa_numba.create_block_mask(lambda b, h, i, j: j <= i, 1, 1, 32, 32, tiles=TILES)
    with pytest.raises(ValueError, match="read-only"):
        mask.blocks[...] = 0
    visited = mask.visited
    visited[...] = False
    assert mask.visited.sum() == 3


def test_a_plan_keeps_its_block_mask():
    """Of which the accesses are counted when somebody asks for them."""
    blocks = np.eye(2, dtype=bool)
    p = fa_numba.plan((1, 1, 32, 8), (1, 1, 32, 8), block_mask=blocks, tiles=TILES)
    want = fa_numba.plan((1, 1, 32, 8), (1, 1, 32, 8), block_mask=blocks.copy(), tiles=TILES)
    blocks[...] = False
    assert p.accesses == want.accesses


@pytest.mark.parametrize("kind", [lambda x: x, lambda x: x.T, lambda x: x[::-1, ::2]])
@pytest.mark.parametrize("dtype", ["float16", "float32", "int32"])
def test_the_interface_of_an_array_describes_its_memory(kind, dtype):
    """NumPy's ``__array_interface__`` has the same fields as ``__cuda_array_interface__``."""
    x = kind(GRID.astype(dtype))
    found = held._interface(operand("x", x, (dtype,)))
    view = np.asarray(SimpleNamespace(__array_interface__=found))
    assert view.dtype == x.dtype and view.strides == x.strides and np.array_equal(view, x)
    assert not view.flags.writeable and np.shares_memory(view, x)


# --- with torch --------------------------------------------------------------------------------


@pytest.fixture
def attention():
    with no_gpu_but_its_driver() as gpu, no_torch_but_its_names(gpu):
        yield fa_numba_torch().attention


def gradients(attention, change, **options):
    """dq, dk and dv, after ``change`` between the passes."""
    tensors = [Tensor.of(x.copy(), requires_grad=True) for x in (Q, K, V)]
    out = attention(*tensors, **options)
    change()
    out.backward(Tensor.of(DOUT))
    return [x.grad.values for x in tensors]


@pytest.mark.parametrize("option", ["score_mod", "block_mask"])
def test_the_backward_pass_uses_the_values_of_the_forward_pass(attention, option):
    slopes = np.array([0.5], np.float32)
    given = {
        "score_mod": lambda s, b, h, i, j: s + slopes[h] * j,
        "block_mask": lambda b, h, i, j: slopes[h] * j < 6,
    }[option]
    if option == "block_mask":
        given = fa_numba.create_block_mask(given, 1, 1, 16, 32, tiles=TILES)
    want = gradients(attention, lambda: None, **{option: given})
    got = gradients(attention, lambda: slopes.fill(2), **{option: given})
    assert all(map(np.array_equal, got, want)) and slopes[0] == 2


def test_a_large_array_that_changes_between_the_passes_is_refused(attention):
    slopes = np.ones(LARGE, np.float32)
    with pytest.raises(ValueError, match=r"^slopes in score_mod, a lambda .*the forward pass"):
        gradients(
            attention, lambda: slopes.fill(2), score_mod=lambda s, b, h, i, j: s + slopes[h] * j
        )


def test_tensors_in_a_block_mask(attention):
    """A small one is copied; a large one is refused if it has changed."""
    lens, all_lens = (Tensor.of(np.full(n, 20, np.int32)) for n in (1, LARGE))
    masks = [
        fa_numba.create_block_mask(f, 1, 1, 16, 32, tiles=TILES)
        for f in (lambda b, h, i, j: j < lens[b], lambda b, h, i, j: j < all_lens[b])
    ]
    own = Tensor.of(np.ones(1, np.float32), requires_grad=True)
    options = {"score_mod": lambda s, b, h, i, j: s * own[h]}
    new = Tensor.of(np.array([3], np.int32))
    want = gradients(attention, lambda: None, block_mask=masks[0], **options)
    got = gradients(attention, lambda: lens.copy_(new), block_mask=masks[0], **options)
    assert all(map(np.array_equal, got, want)) and lens.values[0] == 3
    with pytest.raises(
        ValueError, match="^all_lens in mask_mod, a lambda .* must still have the values"
    ):
        gradients(attention, lambda: all_lens.copy_(new), block_mask=masks[1], **options)


def test_a_small_tensor_on_the_host_is_copied_as_an_array(attention):
    x = Tensor.of(np.full((2, 3), 1.5, np.float32))
    function = held.holding("score_mod", lambda s, b, h, i, j: s + x[0, j])
    x.copy_(Tensor.of(np.zeros((2, 3), np.float32)))
    kept = values_of(function)["x"]
    assert type(kept) is np.ndarray and (kept == 1.5).all()


def test_a_small_tensor_on_a_gpu_is_copied_there(attention):
    x = Tensor.of(aligned((2, 3), "float32", 1.5, gpu=0))
    function = held.holding("score_mod", lambda s, b, h, i, j: s + x[0, j])
    x.copy_(Tensor.of(np.zeros((2, 3), np.float32)))
    kept = values_of(function)["x"]
    assert kept.is_cuda and (kept.values == 1.5).all() and not x.values.any()


class OfGpu(Dlpack):
    """Memory of a GPU that offers the DLPack protocol, a shape and a dtype."""

    def __init__(self, values):
        super().__init__(values)
        self.shape, self.dtype = values.shape, values.dtype


@pytest.mark.parametrize("kind", [Array, OfGpu])
def test_a_small_array_of_no_known_library_on_a_gpu_is_copied_there(kind):
    with no_gpu_but_its_driver() as gpu, devices.using("gpu"):
        values = aligned((2, 3), "float32", 1.5)
        x = kind(values)
        function = held.holding("score_mod", lambda s, b, h, i, j: s + x[0, j])
        kept = values_of(function)["x"]
        values[...] = 0
        # Other streams may read the copy at once.
        assert [step[0] for step in gpu.log] == ["wait", "to host", "to gpu", "wait"]
        assert np.array_equal(kept.copy_to_host(), np.full((2, 3), np.float32(1.5)))
