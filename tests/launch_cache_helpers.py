"""A GPU that is not there: the driver's calls of a launch, done on host memory by the emulator.

Everything from the public call to ``cuLaunchKernel`` is the GPU's; the parameters that the driver
is handed are read back by Numba's ABI, so a wrong word is a wrong result or a wrong access.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import math
import sys
from types import SimpleNamespace
from unittest import mock

import numpy as np
from numba import types

from fa_numba import device as devices
from fa_numba import emulator
from fa_numba.device import launch_record, launching, memory, select
from fa_numba.host import arrays

# Where the package's names are looked up, by its callers and by itself.
ROOMS = (devices, select, launching, memory)
SUCCESS = launch_record.driver.CUresult.CUDA_SUCCESS
CONTEXT = 77
POINTER = ctypes.POINTER


class Array:
    """Host memory that says it is the GPU's; ``empty`` and ``to_gpu`` give these."""

    def __init__(self, values):
        self.values = values
        self.shape, self.strides, self.dtype = values.shape, values.strides, values.dtype

    @property
    def __cuda_array_interface__(self):
        return {**self.values.__array_interface__, "version": 3}

    def copy_to_host(self, **_):
        return self.values.copy()


def on_gpu(values):
    """A copy of ``values`` at an address that is a multiple of 256."""
    return Array(aligned(values.shape, values.dtype, values))


def aligned(shape, dtype=np.float32, values=np.nan, offset=0):
    """An array whose address is ``offset`` bytes past a multiple of 256."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.zeros(size + 512, np.uint8)
    start = -memory.ctypes.data % 256 + offset
    array = memory[start : start + size].view(dtype).reshape(shape)
    array[...] = values if np.dtype(dtype).kind == "f" or np.ndim(values) else 0
    return array


class Tensor:
    """What fa_numba asks of a torch tensor, over host memory; ``Tensor.of`` makes one."""

    is_cuda, layout, requires_grad, negated = True, "strided", False, False

    @classmethod
    def of(cls, values, dtype=None, **facts):
        tensor = cls()
        tensor.values, tensor.shape = values, values.shape
        tensor.dtype = dtype or f"torch.{values.dtype}"
        tensor.device = SimpleNamespace(type="cuda", index=0)
        vars(tensor).update(facts)
        return tensor

    def get_device(self):
        return self.device.index

    def is_neg(self):
        return self.negated

    def data_ptr(self):
        return self.values.ctypes.data

    def element_size(self):
        return self.values.itemsize

    def stride(self):
        return tuple(n // self.values.itemsize for n in self.values.strides)


class Parameter(Tensor):
    pass


class Subclass(Tensor):
    pass


class Torch:
    """The part of torch that is asked for, as ``sys.modules`` would have it."""

    Tensor, strided, float32 = Tensor, "strided", "torch.float32"
    nn = SimpleNamespace(Parameter=Parameter)

    def __init__(self):
        self.stream, self.grad, self.made = 5, True, 0
        self.cuda = SimpleNamespace(
            current_stream=lambda place: SimpleNamespace(cuda_stream=self.stream)
        )

    def is_grad_enabled(self):
        return self.grad

    def empty(self, shape, dtype, device):
        self.made += 1
        assert dtype == "torch.float32" and device.index == 0
        return Tensor.of(aligned(shape))


class Gpu:
    """What the driver was asked for. ``launches`` are (kernel's name, grid, stream, words)."""

    def __init__(self):
        self.kernels = []
        self.launches, self.workspaces = [], []
        self.context, self.entered = CONTEXT, []
        self.live = {}
        self.runs = True  # or only takes down what it is asked

    # --- the driver ---

    def cuLaunchKernel(self, function, *rest):
        *sizes, stream, parameters, extra = rest
        grid, block, shared_bytes = tuple(sizes[:3]), sizes[3:6], sizes[6]
        kernel = self.kernels[int(function) - 1]
        assert block == [kernel.threads, 1, 1] and shared_bytes == kernel.shared_bytes
        assert extra == 0
        self.words = []
        addresses = ctypes.cast(parameters, POINTER(ctypes.c_void_p))
        places = (addresses[n] for n in itertools.count())
        args = tuple(self.argument(ty, places) for ty in kernel.argument_types)
        self.launches.append((kernel.name, grid, int(stream), tuple(self.words)))
        if self.runs:
            emulator.launch(kernel.function, grid, kernel.threads, args, shared_bytes=shared_bytes)
        return (SUCCESS,)

    def word(self, places, kind):
        value = ctypes.cast(next(places), POINTER(kind))[0]
        self.words.append(value)
        return value

    def argument(self, ty, places):
        """The next kernel argument from the addresses of its words."""
        if isinstance(ty, types.NamedTuple):
            return ty.instance_class(*(self.argument(t, places) for t in ty.types))
        if not isinstance(ty, types.Array):
            return self.word(
                places, {types.float32: ctypes.c_float, types.int32: ctypes.c_int32}[ty]
            )
        words = [self.word(places, ctypes.c_int64) for _ in range(5 + 2 * ty.ndim)]
        meminfo, parent, size, itemsize, pointer = words[:5]
        shape, strides = tuple(words[5 : 5 + ty.ndim]), tuple(words[5 + ty.ndim :])
        assert meminfo == parent == 0 and size == math.prod(shape)
        interface = {
            "data": (pointer, False), "shape": shape, "strides": strides,
            "typestr": np.dtype(ty.dtype.name).str, "version": 3,
        }  # fmt: skip
        array = np.asarray(SimpleNamespace(__array_interface__=interface))
        assert array.itemsize == itemsize
        return array

    def cuMemsetD8Async(self, pointer, value, size, stream):
        ctypes.memset(pointer, value, size)
        return (SUCCESS,)

    def cuMemAllocFromPoolAsync(self, size, pool, stream):
        memory = aligned((size // 4,))
        self.live[memory.ctypes.data] = memory, int(stream)
        self.workspaces.append((size, int(stream)))
        return SUCCESS, memory.ctypes.data

    def cuMemFreeAsync(self, pointer, stream):
        _, taken_on = self.live.pop(pointer)
        assert taken_on == int(stream)
        return (SUCCESS,)

    def cuCtxGetCurrent(self):
        return SUCCESS, self.context

    # --- numba.cuda ---

    def compiled(self, kernel):
        if kernel not in self.kernels:
            self.kernels.append(kernel)
        return SimpleNamespace(handle=self.kernels.index(kernel) + 1)

    @contextlib.contextmanager
    def on_device(self, ordinal):
        before, self.context = self.context, CONTEXT + ordinal
        self.entered.append(ordinal)
        yield
        self.context = before


@contextlib.contextmanager
def everywhere(name, function):
    """Replaces what the device package and its modules know by this name."""
    with contextlib.ExitStack() as stack:
        for room in (room for room in ROOMS if hasattr(room, name)):
            stack.enter_context(mock.patch.object(room, name, function))
        yield


@contextlib.contextmanager
def no_gpu_but_its_driver():
    """Everything inside runs as on a GPU, which is the ``Gpu`` that this yields."""
    gpu = Gpu()
    functions = [name for name in vars(Gpu) if name.startswith("cu")]
    replaced = {
        "on_gpu": lambda: True,
        "shared_bytes_limit": lambda: devices.EMULATED_SHARED_BYTES,
        "compute_capability": lambda: (9, 0),
        "current_ordinal": lambda: 0,
        "ordinal_of": lambda pointer: 0,
        "on_device": gpu.on_device,
        "to_gpu": lambda array, stream=0: on_gpu(array),
        "empty": lambda shape, dtype="float32": Array(aligned(shape, dtype)),
        "synchronize": lambda stream=None: None,
        "pool": lambda ordinal: SimpleNamespace(handle=1),
    }
    with contextlib.ExitStack() as stack:
        for name in functions:
            stack.enter_context(mock.patch.object(launch_record.driver, name, getattr(gpu, name)))
        for name, function in replaced.items():
            stack.enter_context(everywhere(name, function))
        stack.enter_context(
            mock.patch.object(devices.Kernel, "compiled", lambda k: gpu.compiled(k))
        )
        yield gpu
    assert not gpu.live, "workspace that was not freed"


@contextlib.contextmanager
def no_torch_but_its_names():
    """Everything inside takes ``Tensor`` for torch's; yields the ``Torch``."""
    torch = Torch()
    with mock.patch.dict(sys.modules, torch=torch):
        assert arrays.sys.modules["torch"] is torch
        yield torch
