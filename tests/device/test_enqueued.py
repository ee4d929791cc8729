"""The order of what functions for the GPU enqueue and wait for, with stand-ins for the driver; and
how the emulator runs a kernel of ours.
"""

import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from numba import cuda

from fa_numba import device as devices
from fa_numba.device import kernel as device_kernel
from fa_numba.device import launch_record, memory, select, timing
from fa_numba.emulator import OutOfBounds


class Cuda:
    """Notes what is enqueued. An event's time is the number of what was enqueued before it."""

    def __init__(self):
        self.done = []
        self.cudadrv = SimpleNamespace(driver=SimpleNamespace(device_memset=self.memset))

    def device_array(self, size, dtype):
        self.done.append(f"array of {size} {dtype.__name__}")
        return SimpleNamespace(size=size)

    def memset(self, array, value, size):
        self.done.append(f"{size} bytes of {array.size} are {value}")

    def event(self):
        event = SimpleNamespace(at=None, waited=False)

        def record():
            event.at = len(self.done)
            self.done.append("event")

        def synchronize():
            event.waited = True

        event.record, event.synchronize = record, synchronize
        return event

    def event_elapsed_time(self, start, stop):
        assert stop.waited
        return stop.at - start.at


@pytest.mark.parametrize("l2_bytes, size", [(50 << 20, 1 << 30), (1 << 30, 1 << 32), (None, 0)])
def test_the_l2_cache_is_overwritten_before_each_timed_call(monkeypatch, l2_bytes, size):
    """Twice, outside of the timed interval; with `flush_l2` only."""
    cuda = Cuda()
    monkeypatch.setattr(timing, "cuda", cuda)
    monkeypatch.setattr(timing.select, "describe", lambda: {"l2_bytes": l2_bytes})
    flush = l2_bytes is not None
    times = timing.time_ms(lambda: cuda.done.append("call"), repeats=3, warmup=2, flush_l2=flush)
    assert times == [2.0] * 3
    array, fill = [f"array of {size} uint8"] * flush, [f"{size} bytes of {size} are 0"] * 2 * flush
    assert cuda.done == [*array, "call", "call", *[*fill, "event", "call", "event"] * 3]


@pytest.fixture
def done(monkeypatch):
    """What the functions of `memory` do, in this order."""
    done = []

    def note(what, result=None):
        return lambda *_, **__: done.append(what) or result

    array = SimpleNamespace(copy_to_host=lambda stream=0: done.append(f"copy on {stream}") or 7)
    context = SimpleNamespace(deallocations=SimpleNamespace(clear=note("free arrays")))
    cuda = SimpleNamespace(
        synchronize=note("wait for all"),
        external_stream=lambda n: SimpleNamespace(synchronize=note(f"wait for {n}")),
        current_context=lambda: context,
        get_current_device=lambda: SimpleNamespace(id=3),
        as_cuda_array=lambda x: array,
    )
    monkeypatch.setattr(memory, "cuda", cuda)
    monkeypatch.setattr(memory, "pool", lambda ordinal: SimpleNamespace(handle=f"pool {ordinal}"))

    def trim(handle, least):
        done.append(f"trim {handle} to {least}")

    monkeypatch.setattr(memory, "driver", SimpleNamespace(cuMemPoolTrimTo=trim))
    return done


def test_a_pool_keeps_its_memory_and_is_of_its_gpu(monkeypatch):
    done, driver = [], memory.driver
    core = SimpleNamespace(
        Device=lambda n: SimpleNamespace(set_current=lambda: done.append(f"GPU {n}")),
        DeviceMemoryResource=lambda n, options: SimpleNamespace(handle=f"pool {n} {options}"),
        DeviceMemoryResourceOptions=lambda: "as usual",
    )
    monkeypatch.setitem(sys.modules, "cuda.core", core)
    monkeypatch.setattr(driver, "cuMemPoolSetAttribute", lambda *given: done.append(given))
    made = memory.pool.__wrapped__(2)
    (gpu, (handle, attribute, size)) = done
    assert gpu == "GPU 2" and handle == made.handle == "pool 2 as usual" and int(size) == 2**63
    assert attribute == driver.CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD


def test_memory_is_released_after_the_work_that_uses_it(done):
    memory.release_memory()
    assert done == ["wait for all", "free arrays", "trim pool 3 to 0"]


def test_results_are_copied_after_the_work_that_makes_them(done):
    assert memory.copied_to_host(None) == 7
    assert done == ["wait for all", "copy on 0"]


@pytest.mark.parametrize("stream, wait", [(0, "wait for all"), (5, "wait for 5")])
def test_a_copy_on_a_stream_is_waited_for(done, stream, wait):
    array = SimpleNamespace(copy_to_host=lambda stream: done.append("copy") or 7)
    out = np.zeros(2)
    memory.to_host(array, out, stream)
    assert done == ["copy", wait] and (out == 7).all()


X = np.arange(2 * 4 * 6 * 8, dtype=np.uint8).reshape(2, 4, 6, 8)
VIEWS = {
    "broadcast": (lambda x: devices.broadcast(x, (3, 2, 4, 6, 8)), lambda x: np.stack([x] * 3)),
    "broadcast axis": (
        lambda x: devices.broadcast(devices.with_last_axis(x), (2, 4, 6, 8, 5)),
        lambda x: np.stack([x] * 5, -1),
    ),
    "permuted": (lambda x: devices.permuted(x, (0, 2, 1, 3)), lambda x: x.transpose(0, 2, 1, 3)),
    "transposed": (
        lambda x: devices.transposed(x, (1, 0, 2, 3)),
        lambda x: x.transpose(1, 0, 2, 3)[None],
    ),
    "halves": (devices.as_halves, lambda x: x.view(np.uint16)),
    "last axis": (devices.with_last_axis, lambda x: x[..., None]),
    "grouped": (
        lambda x: devices.grouped(x, 2),
        lambda x: x.reshape(2, 2, 2, 6, 8).transpose(0, 1, 3, 2, 4),
    ),
    "one": (
        lambda x: devices.as_one(devices.permuted(x, (0, 2, 1, 3))),
        lambda x: x.reshape(1, 8, 6, 8).transpose(0, 2, 1, 3),
    ),
    "batch": (
        lambda x: (
            devices.as_batch(devices.permuted(x, (0, 2, 1, 3))[:1], 2)
            if isinstance(x, np.ndarray)
            else devices.as_batch(replace(devices.permuted(x, (0, 2, 1, 3)), shape=(1, 6, 4, 8)), 2)
        ),
        lambda x: x[0].reshape(2, 2, 6, 8).transpose(0, 2, 1, 3),
    ),
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_of_an_array_on_a_gpu_is_as_on_the_host(name):
    """The host's view has the values that NumPy gives, and the other one the same layout."""
    view, wanted = VIEWS[name]
    on_host, wanted = view(X), wanted(X)
    assert np.array_equal(on_host, wanted) and np.shares_memory(on_host, X)
    given = memory.DeviceArray(64, X.shape, X.strides, "owner", itemsize=1)
    found = view(given)
    layout = [(x.shape, x.strides, x.itemsize) for x in (found, on_host)]
    assert layout[0] == layout[1] and (found.pointer, found.owner) == (64, "owner")


@pytest.mark.parametrize("fails", ["moving a tensor map", "clearing 8 bytes", None])
def test_an_error_of_the_driver_ends_a_run(monkeypatch, fails):
    driver, done = launch_record.driver, []
    error = driver.CUresult.CUDA_ERROR_INVALID_VALUE

    def step(what):
        def run(*given):
            done.append(what)
            return (error if what == fails else driver.CUresult.CUDA_SUCCESS,)

        return run

    monkeypatch.setattr(driver, "cuTensorMapReplaceAddress", step("moving a tensor map"))
    monkeypatch.setattr(driver, "cuMemsetD8Async", step("clearing 8 bytes"))
    recording = devices.LaunchRecord()
    recording.clear(memory.DeviceArray(64, (2,), (4,)))
    recording._maps.append((0, 16, "map"))
    if fails is None:
        recording.run([256], 0)
    else:
        with pytest.raises(RuntimeError, match=f"{fails} failed: .* CUDA_ERROR_INVALID_VALUE"):
            recording.run([256], 0)
    steps = ["moving a tensor map", "clearing 8 bytes"]
    assert done == (steps if fails != steps[0] else steps[:1])


def test_code_is_loaded_into_the_context_of_the_current_gpu(monkeypatch):
    done = []

    class ObjectCode:
        def from_cubin(cubin):
            done.append(f"load {cubin}")
            return SimpleNamespace(get_kernel=lambda name: f"kernel {name}")

    monkeypatch.setitem(sys.modules, "cuda.core", SimpleNamespace(ObjectCode=ObjectCode))
    context = SimpleNamespace(current_context=lambda: done.append("context"))
    monkeypatch.setattr(device_kernel, "cuda", context)
    allow = lambda *given: done.append(given)  # noqa: E731
    monkeypatch.setattr(device_kernel, "_allow_shared_memory", allow)
    kernel = devices.Kernel(lambda X: None, (devices.array_type(1),), 32, 640)
    kernel._load("cubin", "entry", 3)
    assert done == ["context", "load cubin", ("kernel entry", 640, 3)]
    assert kernel._compiled == {3: "kernel entry"}


@pytest.mark.parametrize("name", ["A GPU", b"A GPU"])
def test_a_gpu_is_described_by_its_limits_and_its_driver(monkeypatch, name):
    gpu = SimpleNamespace(
        name=name, compute_capability=(9, 0), MULTIPROCESSOR_COUNT=132, L2_CACHE_SIZE=50 << 20
    )
    driver = SimpleNamespace(driver=SimpleNamespace(get_version=lambda: (13, 1)))
    monkeypatch.setattr(
        select, "cuda", SimpleNamespace(get_current_device=lambda: gpu, cudadrv=driver)
    )
    monkeypatch.setattr(select, "shared_bytes_limit", lambda: 1234)
    monkeypatch.setattr(select, "on_gpu", lambda: True)
    assert select.describe() == {
        "name": "A GPU", "compute_capability": "9.0", "multiprocessors": 132,
        "shared_bytes": 1234, "l2_bytes": 50 << 20, "cuda_driver": "13.1",
    }  # fmt: skip
    monkeypatch.setattr(select, "on_gpu", lambda: False)
    limit = select.EMULATED_SHARED_BYTES
    assert select.describe() == {"name": "emulator", "shared_bytes": limit}


@pytest.mark.parametrize(
    ("capability", "available", "why"),
    [
        ((7, 5), True, ""),
        ((9, 0), True, ""),
        ((7, 2), True, "the compute capability of the GPU must be at least 7.5, got 7.2"),
        ((9, 0), False, "no CUDA GPU or driver was found"),
        (None, True, "CUDA could not start: no device"),
    ],
)
def test_why_there_is_no_gpu(monkeypatch, capability, available, why):
    def current():
        if capability is None:
            raise RuntimeError("no device")
        return SimpleNamespace(compute_capability=capability)

    cuda = SimpleNamespace(is_available=lambda: available, get_current_device=current)
    monkeypatch.setattr(select, "cuda", cuda)
    assert select.why_no_gpu.__wrapped__() == why


def test_an_index_below_0_does_not_count_from_the_end_in_a_kernel_of_ours():
    def function(X):
        X[cuda.threadIdx.x - 1] = 1

    kernel = devices.Kernel(function, (devices.array_type(1),), 32, 0)
    with devices.using("emulator"), pytest.raises(OutOfBounds, match=r"X\[-1\] is outside"):
        devices.launch(kernel, (1,), (np.zeros(64, np.float32),))
