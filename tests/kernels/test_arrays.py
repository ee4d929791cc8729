"""Arrays of NumPy, torch and others, in host memory and on a GPU, and what a call takes there."""

import sys
from contextlib import nullcontext

import numpy as np
import pytest
from backward_helpers import ALL_WAYS, WAYS, assert_gradients, random_gradients, saved, saved_for
from helpers import (
    ALGORITHMS,
    Memory,
    OnGpu,
    assert_close_to_float64,
    attend,
    check,
    numpy_dtype,
    random_inputs,
    to_numpy,
)
from mma_helpers import BFLOAT16, SLOW_BFLOAT16

import fa_numba
from fa_numba import Tiles
from fa_numba import device as devices

every_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS)
every_way = pytest.mark.parametrize("way", WAYS)
all_ways = pytest.mark.parametrize("way", ALL_WAYS)
dtypes = pytest.mark.parametrize("dtype", ["float32", "float16", SLOW_BFLOAT16])
every_dtype = pytest.mark.parametrize("dtype", ["float32", "float16", BFLOAT16])
TINY = (2, 2, 1, 11, 21, 4)
INTEGERS = {
    "kv_lens": np.array([21, 9], np.int32),
    "block_mask": np.array([[True, False], [True, True]]),
}
SMALL = {"float32": Tiles(8, 16), "float16": Tiles(16, 16), "bfloat16": Tiles(16, 16)}


@every_algorithm
@dtypes
def test_without_lse_and_out(device, algorithm, dtype):
    q, k, v = random_inputs(1, 2, 1, 9, 17, 8, dtype=dtype)
    tiles = SMALL[dtype]
    both = check(device, algorithm, q, k, v, tiles=tiles)
    alone = check(device, algorithm, q, k, v, tiles=tiles, return_lse=False)
    assert alone.L is None and np.array_equal(alone.O, both.O)
    inputs = [Memory(device, a.shape, "padded", a).argument for a in (q, k, v)]
    with devices.using(device):
        made = to_numpy(fa_numba.attention(*inputs, algorithm=algorithm, tiles=tiles))
    assert made.dtype == numpy_dtype(dtype) and np.array_equal(made, both.O)


@pytest.mark.in_turn("way")
@every_way
@pytest.mark.parametrize("odd", ["dout", "q", "k", "v", "out", "lse"])
def test_one_input_of_another_layout(way, odd):
    """16-byte access to every array needs every array at 16-byte addresses."""
    dout, q, k, v = random_gradients(1, 2, 1, 10, 19, 8)
    out, lse = saved(q, k, v)
    inputs = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse[..., None]}
    memory = {
        name: Memory("emulator", a.shape, "odd" if name == odd else "padded", a)
        for name, a in inputs.items()
    }
    arguments = [m.argument for m in memory.values()]
    arguments[-1] = arguments[-1][..., 0]
    algorithm, own = WAYS[way]
    with devices.using("emulator"):
        found = fa_numba.attention_backward(
            *arguments, algorithm=algorithm, tiles=Tiles(8, 16), **own
        )
    assert_gradients(found, dout, q, k, v)


@every_way
def test_an_output_gradient_of_one_number(way):
    """What a sum's gradient is: every stride 0."""
    _, q, k, v = random_gradients(1, 2, 1, 10, 19, 8)
    dout = np.broadcast_to(np.float32(0.5), q.shape)
    algorithm, own = WAYS[way]
    with devices.using("emulator"):
        found = fa_numba.attention_backward(
            dout, q, k, v, *saved(q, k, v), algorithm=algorithm, tiles=Tiles(8, 16), **own
        )
    assert_gradients(found, dout, q, k, v)


@pytest.mark.gpu
@every_algorithm
def test_numpy_arrays_on_a_gpu(algorithm):
    q, k, v = random_inputs(1, 2, 1, 200, 300, 64)
    kept = [a.copy() for a in (q, k, v)]
    out = Memory("emulator", q.shape, "odd")
    for given_out in (None, out.argument):
        O, L = fa_numba.attention(q, k, v, algorithm=algorithm, return_lse=True, out=given_out)
        assert type(O) is np.ndarray and type(L) is np.ndarray
        assert given_out is None or O is given_out
        assert_close_to_float64(O, q, k, v, L)
    assert all(np.array_equal(a, b) for a, b in zip((q, k, v), kept, strict=True))
    out.assert_intact("out", whole=False)


@pytest.mark.gpu
@every_algorithm
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_an_array_interface_and_a_stream(algorithm, dtype):
    from numba import cuda

    q, k, v = random_inputs(1, 2, 1, 200, 300, 64, dtype=dtype)
    stream = cuda.stream()
    for given_stream in (None, stream, int(stream)):
        memory = [Memory("gpu", a.shape, "padded", a) for a in (q, k, v)]
        out = Memory("gpu", q.shape, "padded", dtype=dtype)
        cuda.synchronize()
        options = {"return_lse": True, "out": out.argument, "stream": given_stream}
        arguments = (m.argument for m in memory)
        O, L = fa_numba.attention(*arguments, algorithm=algorithm, **options)
        cuda.synchronize()
        assert isinstance(O, OnGpu) and O is out.argument
        assert hasattr(L, "__cuda_array_interface__")
        out.assert_intact("out", whole=False)
        assert_close_to_float64(out.fetch(), q, k, v, to_numpy(L), algorithm=algorithm)


@every_algorithm
@every_dtype
@pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_torch_tensors_in_and_out(algorithm, dtype, place):
    torch = pytest.importorskip("torch")
    q, k, v = random_inputs(1, 2, 1, 9, 17, 8, dtype=dtype)
    of = getattr(torch, dtype)
    tensors = [torch.tensor(a.astype("f4"), device=place).to(of) for a in (q, k, v)]
    with devices.using("emulator") if place == "cpu" else nullcontext():
        O, L = fa_numba.attention(*tensors, algorithm=algorithm, return_lse=True)
    assert O.dtype == of and L.dtype == torch.float32
    assert O.device == L.device == tensors[0].device
    out, lse = O.float().cpu().numpy(), L.cpu().numpy()
    assert_close_to_float64(out, q, k, v, lse, algorithm=algorithm)


@pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@all_ways
def test_gradients_of_torch_tensors(way, dtype, place):
    torch = pytest.importorskip("torch")
    dout, q, k, v = random_gradients(1, 2, 1, 9, 17, 8, dtype=dtype)
    arrays = dout, q, k, v, *saved_for(way, q, k, v)
    tensors = [torch.tensor(a, device=place) for a in arrays]
    algorithm, own = ALL_WAYS[way]
    tiles = SMALL[dtype]
    with devices.using("emulator") if place == "cpu" else nullcontext():
        found = fa_numba.attention_backward(*tensors, algorithm=algorithm, tiles=tiles, **own)
    for gradient in found:
        assert isinstance(gradient, torch.Tensor) and gradient.dtype == tensors[0].dtype
        assert gradient.device == tensors[0].device
    assert_gradients([g.cpu().numpy() for g in found], dout, q, k, v, way=way)


@pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_torch_tensors_as_options(place):
    torch = pytest.importorskip("torch")
    dout, q, k, v = random_gradients(*TINY)
    rng = np.random.default_rng(0)
    bias, slopes = rng.random((2, 11, 21), np.float32), rng.random(2, np.float32)
    options = {"bias": bias, "alibi_slopes": slopes, **INTEGERS}
    tensors = {name: torch.tensor(a, device=place) for name, a in options.items()}
    arrays = [torch.tensor(a, device=place) for a in (dout, q, k, v)]
    with devices.using("emulator") if place == "cpu" else nullcontext():
        out, lse = fa_numba.attention(*arrays[1:], tiles=Tiles(8, 16), return_lse=True, **tensors)
        found = fa_numba.attention_backward(
            *arrays, out, lse, tiles=Tiles(8, 16), return_dbias=True, **tensors
        )
    assert all(isinstance(g, torch.Tensor) and g.device == arrays[0].device for g in found)
    O, L, *gradients = (a.cpu().numpy() for a in (out, lse, *found))
    options["tiles"] = Tiles(8, 16)
    assert_close_to_float64(O, q, k, v, L, **options)
    assert_gradients(gradients, dout, q, k, v, saved_values=(O, L), **options)


@pytest.mark.gpu
def test_lengths_and_masks_may_be_on_the_gpu():
    _, q, k, v = random_gradients(*TINY)
    how = {"tiles": Tiles(8, 16)}
    want = attend("gpu", "fa2", q, k, v, **how, **INTEGERS)
    there = {name: devices.to_gpu(a) for name, a in INTEGERS.items()}
    got = fa_numba.attention(*(devices.to_gpu(a) for a in (q, k, v)), **how, **there)
    assert np.array_equal(to_numpy(got), want.O)


@pytest.mark.gpu
@every_algorithm
def test_torch_tensors_are_neither_copied_nor_changed(algorithm):
    torch = pytest.importorskip("torch")
    q, k, v = random_inputs(1, 2, 1, 200, 300, 64)
    tensors = [torch.tensor(a, device="cuda") for a in (q, k, v)]
    pointers = [t.data_ptr() for t in tensors]
    O = fa_numba.attention(*tensors, algorithm=algorithm)
    out = torch.full_like(tensors[0], float("nan"))
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    returned = fa_numba.attention(*tensors, algorithm=algorithm, out=out, stream=side)
    side.synchronize()
    assert returned is out and torch.equal(out, O)
    assert [t.data_ptr() for t in tensors] == pointers
    assert all(np.array_equal(t.cpu().numpy(), a) for t, a in zip(tensors, (q, k, v), strict=True))


@pytest.mark.gpu
def test_torch_runs_on_its_current_stream_and_copies_nothing():
    torch = pytest.importorskip("torch")
    q, k, v = (torch.randn(1, 4, 512, 64, device="cuda") for _ in range(3))
    want = fa_numba.flash_attention_2(q, k, v)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        late = torch.zeros_like(q)
        torch.cuda._sleep(50_000_000)
        late += q  # the kernel must wait for this, on the same stream
        got = fa_numba.flash_attention_2(late, k, v)
    torch.cuda.synchronize()
    assert torch.equal(got, want)
    transposed = q.transpose(1, 2).contiguous().transpose(1, 2)
    out = torch.empty_like(q)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    fa_numba.flash_attention_2(transposed, k, v, out=out)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before and torch.equal(out, want)


@pytest.mark.gpu
@every_algorithm
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_peak_of_memory_is_the_plans_workspace(algorithm, dtype):
    inputs = [devices.to_gpu(a) for a in random_inputs(2, 4, 2, 256, 384, 64, dtype=dtype)]
    p = fa_numba.plan(inputs[0].shape, inputs[1].shape, algorithm=algorithm, dtype=dtype)
    with devices.track_memory() as memory:
        fa_numba.attention(*inputs, algorithm=algorithm)
    assert memory.peak_bytes == p.workspace_bytes


@pytest.mark.gpu
@all_ways
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_peak_of_a_backward_passes_memory_is_the_plans_workspace(way, dtype):
    dout, q, k, v = random_gradients(2, 4, 2, 256, 384, 64, dtype=dtype)
    inputs = [devices.to_gpu(a) for a in (dout, q, k, v, *saved_for(way, q, k, v))]
    algorithm, own = ALL_WAYS[way]
    facts = {"algorithm": algorithm, "dtype": dtype, "passes": "bwd"}
    p = fa_numba.plan(q.shape, k.shape, **facts, **own)
    with devices.track_memory() as memory:
        fa_numba.attention_backward(*inputs, algorithm=algorithm, **own)
    assert memory.peak_bytes == p.workspace_bytes


def test_torch_is_not_imported_for_numpy_arrays():
    if "torch" in sys.modules:
        pytest.skip("torch is imported already")
    q, k, v = random_inputs(1, 1, 1, 2, 2, 4)
    with devices.using("emulator"):
        fa_numba.flash_attention_2(q, k, v)
    assert "torch" not in sys.modules
