"""GPUs that are not there: the driver's calls, taken down and done on host memory.

Everything from the public call to the driver and to ``numba.cuda`` is the GPU's. The driver that
stands in writes each step to a log: memory taken, filled, copied and freed, and launches with their
kernel, grid, stream and words. What a driver would refuse or a GPU fall over is an error here too:
a stream, a kernel or memory of another GPU. The parameters of a launch are read back by Numba's
ABI, and the emulator runs the kernel on them: a wrong word is a wrong result or a wrong access.
So are tensor maps, which a launch brings: the emulator copies the boxes that they say.
With ``runs`` False no kernel runs, and a call takes a millisecond.
"""

from __future__ import annotations

import bisect
import collections
import contextlib
import ctypes
import itertools
import math
import sys
import weakref
from types import ModuleType, SimpleNamespace
from unittest import mock

import cuda.core
import fresh_memory
import numpy as np
from numba import cuda as numba_cuda
from numba import types

from fa_numba import device as devices
from fa_numba import emulator
from fa_numba.device import kernel, launch_record, memory, select, tensor_map
from fa_numba.host import binding, launch_cache

RESULT = launch_record.driver.CUresult
SUCCESS = RESULT.CUDA_SUCCESS
# Contexts of the GPUs, by ordinal: CONTEXT + 1 is GPU 1's.
CONTEXT = 77
# Of a block, where it is not an H100's.
SHARED_BYTES = {(7, 5): 64 * 1024, (8, 6): 99 * 1024, (8, 9): 99 * 1024, (12, 0): 99 * 1024}
POINTER = ctypes.POINTER

# --- memory ----------------------------------------------------------------------------------

_starts: list[int] = []  # of all memory that GPUs have, sorted
_blocks: dict[int, tuple[int, int]] = {}  # start -> bytes, ordinal


def _forget(start):
    _starts.remove(start)
    del _blocks[start]


def aligned(shape, dtype=np.float32, values=np.nan, offset=0, gpu=0):
    """An array of GPU ``gpu`` whose address is ``offset`` bytes past a multiple of 256."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    buffer = np.zeros(size + 512, np.uint8)
    start = buffer.ctypes.data
    bisect.insort(_starts, start)
    _blocks[start] = buffer.nbytes, gpu
    weakref.finalize(buffer, _forget, start)
    if _current:  # what a launch was given can be looked at when the call is over
        _driver().held.append(buffer)
    first = -start % 256 + offset
    array = buffer[first : first + size].view(dtype).reshape(shape)
    array[...] = values if np.dtype(dtype).kind == "f" or np.ndim(values) else 0
    return array


def owner_of(first, last=None):
    """The GPU that has the bytes from ``first`` to ``last``; None for host memory."""
    n = bisect.bisect_right(_starts, first) - 1
    if n < 0:
        return None
    size, ordinal = _blocks[_starts[n]]
    return ordinal if (last or first) < _starts[n] + size else None


class Address(int):
    """A word that is the address of memory."""


def address(array):
    """Where an array or tensor of these tests lies."""
    return Address(array.values.ctypes.data)


class Array:
    """Memory of a GPU with ``__cuda_array_interface__``; ``empty`` and ``to_gpu`` give these."""

    def __init__(self, values, read_only=False, stream=None):
        self.values, self.read_only, self.stream = values, read_only, stream
        self.shape, self.strides, self.dtype = values.shape, values.strides, values.dtype
        self.said = values.strides

    @property
    def __cuda_array_interface__(self):
        pointer = self.values.ctypes.data
        return {
            "shape": self.shape, "typestr": self.dtype.str, "data": (pointer, self.read_only),
            "strides": self.said,
            "stream": self.stream, "version": 3,
        }  # fmt: skip

    def leave_out_strides(self):
        """The interface allows that where rows are dense."""
        self.said = None

    def copy_to_host(self, stream=0):
        gpu = _driver()
        gpu.note("to host", address(self), gpu.order(int(stream)))
        return self.values.copy()


def on_gpu(values, gpu=0):
    """A copy of ``values`` at an address that is a multiple of 256."""
    return Array(aligned(values.shape, values.dtype, values, gpu=gpu))


class _Tensor(ctypes.Structure):
    """DLPack's ``DLManagedTensorVersioned``."""

    _fields_ = (
        ("version", 2 * ctypes.c_uint32), ("context", ctypes.c_void_p), ("free", ctypes.c_void_p),
        ("flags", ctypes.c_uint64), ("data", ctypes.c_void_p), ("device", 2 * ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16), ("shape", POINTER(ctypes.c_int64)),
        ("strides", POINTER(ctypes.c_int64)), ("byte_offset", ctypes.c_uint64),
    )  # fmt: skip


class Dlpack:
    """Memory of a GPU that offers the DLPack protocol and nothing else; ``asked`` are the streams
    that it was asked to be ready on.
    """

    def __init__(self, values, read_only=False):
        self.values, self.asked = values, []
        size, axes = values.itemsize, values.ndim * ctypes.c_int64
        self.tensor = _Tensor(
            version=(1, 0), flags=read_only, data=values.ctypes.data, ndim=values.ndim,
            device=(2, owner_of(values.ctypes.data)), code=2, bits=8 * size, lanes=1,
            shape=axes(*values.shape), strides=axes(*(n // size for n in values.strides)),
        )  # fmt: skip

    def leave_out_strides(self):
        """DLPack allows that where rows are dense."""
        self.tensor.strides = None

    def __dlpack_device__(self):
        return tuple(self.tensor.device)

    def __dlpack__(self, stream=None, **_):
        self.asked.append(stream)
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, (
            ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p,
        )  # fmt: skip
        return new(ctypes.addressof(self.tensor), b"dltensor_versioned", None)


# --- tensor maps -----------------------------------------------------------------------------

driver = launch_record.driver
_ENUMS = ("DataType", "Interleave", "Swizzle", "FloatOOBfill")
_TYPE, _INTERLEAVE, _SWIZZLE, _FILL = (getattr(driver, f"CUtensorMap{name}") for name in _ENUMS)
# What the kernels see of an element, and the bits of the NaN that may be around.
ELEMENTS = {
    _TYPE.CU_TENSOR_MAP_DATA_TYPE_FLOAT32: (np.float32, np.nan),
    _TYPE.CU_TENSOR_MAP_DATA_TYPE_FLOAT16: (np.uint16, 0x7FFF),
    _TYPE.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16: (np.uint16, 0x7FFF),
}
# Bytes of a row within which chunks change places.
SPANS = {
    _SWIZZLE.CU_TENSOR_MAP_SWIZZLE_NONE: 16,
    _SWIZZLE.CU_TENSOR_MAP_SWIZZLE_32B: 32,
    _SWIZZLE.CU_TENSOR_MAP_SWIZZLE_64B: 64,
    _SWIZZLE.CU_TENSOR_MAP_SWIZZLE_128B: 128,
}


class _MapMemory(driver.CUtensorMap):
    """Of which can be told whether it still lives."""


class TensorMap(ctypes.Structure):
    """What a map says, in its 128 bytes; axes from the innermost on, as the driver takes them."""

    _fields_ = (
        ("address", ctypes.c_uint64), ("shape", 5 * ctypes.c_uint64),
        ("strides", 4 * ctypes.c_uint64), ("box", 5 * ctypes.c_uint16), ("dtype", ctypes.c_uint16),
        ("rank", ctypes.c_uint8), ("swizzle", ctypes.c_uint8), ("fill", ctypes.c_uint8),
    )  # fmt: skip

    def facts(self):
        """All but the address."""
        axes = zip(self.shape, self.box, (0, *self.strides), strict=True)
        own = (_TYPE(self.dtype).name, _SWIZZLE(self.swizzle).name, _FILL(self.fill).name)
        return own, tuple(itertools.islice(axes, self.rank))

    def argument(self, shape, steps):
        """The array of this ``shape`` that a kernel takes by the map, whose ends are ``steps`` from
        one another if there are any.
        """
        element, nan = ELEMENTS[_TYPE(self.dtype)]
        itemsize = np.dtype(element).itemsize
        places, box = (tuple(x[: self.rank])[::-1] for x in (self.shape, self.box))
        strides = (*self.strides[: self.rank - 1][::-1], itemsize)
        layout = emulator.BoxLayout(
            places, strides, box, steps, SPANS[_SWIZZLE(self.swizzle)], nan if self.fill else 0
        )
        outer = [n * strides[1] for n in steps[:2]] or list(strides[:2])
        if self.rank == 5:  # heads side by side in a box
            outer[1] = strides[3]
        values = _seen(self.address, shape, (*outer, strides[2], itemsize), np.dtype(element))
        return emulator.Boxed(values, math.prod(box[:-1]), layout)


def _seen(pointer, shape, strides, dtype):
    """The memory at an address as an array, which must be the current GPU's."""
    interface = {
        "data": (pointer, False), "shape": shape, "strides": strides, "typestr": dtype.str,
        "version": 3,
    }  # fmt: skip
    array = np.asarray(SimpleNamespace(__array_interface__=interface))
    if array.size:
        first, end = np.lib.array_utils.byte_bounds(array)
        assert owner_of(first, end - 1) == _driver().ordinal, "memory of no or another GPU"
    return array


# --- the driver ------------------------------------------------------------------------------

_current: list[Gpu] = []


def _driver():
    return _current[-1]


class _Compiled:
    """``Kernel._compiled`` of the driver that stands in; a kernel's own is left alone."""

    def __get__(self, kernel, _=None):
        return _driver().kept[kernel]

    def __set__(self, kernel, value):
        vars(kernel)["_compiled"] = value


class Gpu:
    """The driver of some GPUs, of the given compute capabilities, and what it was asked for.

    ``log`` has each step in its order: its name, what it was about, the stream, the GPU.
    ``launches`` are (kernel's name, grid, stream, words), ``workspaces`` (bytes, stream),
    ``launched`` the kernels, and ``given`` their arguments by the kernels' names. ``streams`` tells
    the GPU of a stream; those that it does not know are of any GPU, as 0 is.
    """

    def __init__(self, capabilities):
        self.capabilities = capabilities
        self.loaded = []  # kernel, capability, ordinal; a handle is a number of these, from 1
        self.allowed = {}  # (handle, ordinal) -> bytes of shared memory
        self.kept = collections.defaultdict(dict)  # compiled kernels by kernel
        self.log, self.launches, self.workspaces = [], [], []
        self.launched, self.given = [], []
        self.context, self.entered = CONTEXT, []
        self.streams = {}
        self.live, self.held, self.maps = {}, [], {}
        self.runs = True  # or only takes down what it is asked

    @property
    def ordinal(self):
        """The current GPU."""
        found = self.context - CONTEXT
        return found if 0 <= found < len(self.capabilities) else 0

    def note(self, what, *facts):
        self.log.append((what, *facts, self.ordinal))

    def steps(self, arrays):
        """The log without what is sent, each address as the name of the one of ``arrays`` that is
        there, or its number among the others; and a function that names an address.

        Small arrays are sent once and then kept; what is in them is in the launches' steps.
        """
        names = {}
        for name, x in arrays.items():
            names.setdefault(address(x), name)

        def named(word):
            if not isinstance(word, Address):
                return word
            return names.setdefault(word, f"array {len(names)}")

        return [tuple(map(named, step)) for step in self.log if step[0] != "to gpu"], named

    def order(self, stream):
        """``stream``, which must be one of the current GPU."""
        assert self.knows(stream), f"stream {stream} is none of GPU {self.ordinal}"
        return stream

    def knows(self, stream):
        return self.streams.get(stream, self.ordinal) == self.ordinal

    # --- cuda.bindings.driver ---

    def cuLaunchKernel(self, function, *rest):
        *sizes, stream, parameters, extra = rest
        if not self.knows(int(stream)):
            return (RESULT.CUDA_ERROR_INVALID_HANDLE,)
        grid, block, shared_bytes = tuple(sizes[:3]), sizes[3:6], sizes[6]
        kernel, capability, ordinal = self.loaded[int(function) - 1]
        assert ordinal == self.ordinal, f"{kernel.name} was loaded for GPU {ordinal}"
        assert capability == self.capabilities[self.ordinal], f"{kernel.name} for {capability}"
        assert self.allowed[int(function), ordinal] >= shared_bytes
        assert block == [kernel.threads, 1, 1] and shared_bytes == kernel.shared_bytes
        assert extra == 0
        self.words = []
        addresses = ctypes.cast(parameters, POINTER(ctypes.c_void_p))
        places = (addresses[n] for n in itertools.count())
        args = tuple(self.argument(ty, places) for ty in kernel.argument_types)
        small = [x.tobytes() for x in _flat(args) if getattr(x, "dtype", 0) in ("int32", "uint8")]
        how = (kernel.name, grid, int(stream), tuple(self.words))
        self.launched.append(kernel)
        names = kernel.function.__code__.co_varnames
        given, last = dict(zip(names, args, strict=False)), args[-1]
        self.given.append(given | (last._asdict() if hasattr(last, "_asdict") else {}))
        self.launches.append(how)
        self.note("launch", kernel, grid, int(stream), *self.words, *small)
        if self.runs:
            emulator.launch(kernel.function, grid, kernel.threads, *args, shared_bytes=shared_bytes)
        return (SUCCESS,)

    def word(self, places, kind, of=None):
        value = ctypes.cast(next(places), POINTER(kind))[0]
        value = of(value) if of else value
        self.words.append(value)
        return value

    def argument(self, ty, places):
        """The next kernel argument from the addresses of its words."""
        if isinstance(ty, types.NamedTuple):
            return ty.instance_class(*(self.argument(t, places) for t in ty.types))
        if isinstance(ty, tensor_map.TiledType):
            place = next(places)
            assert self.maps[place]() is not None, "a tensor map that was freed"
            found = TensorMap.from_buffer_copy(ctypes.string_at(place, tensor_map.MAP_BYTES))
            self.words += (Address(found.address), found.facts())
            counts = (ty.ndim, ty.ndim - 1 if ty.ends else 0)
            of = [tuple(self.word(places, ctypes.c_int64) for _ in range(n)) for n in counts]
            return found.argument(*of)
        if not isinstance(ty, types.Array):
            as_word = {types.float32: (ctypes.c_float, np.float32), types.int32: (ctypes.c_int32,)}
            return self.word(places, *as_word[ty])
        kinds = (*4 * [None], Address, *2 * ty.ndim * [None])
        words = [self.word(places, ctypes.c_int64, of) for of in kinds]
        meminfo, parent, size, itemsize, pointer = words[:5]
        shape, strides = tuple(words[5 : 5 + ty.ndim]), tuple(words[5 + ty.ndim :])
        assert meminfo == parent == 0 and size == math.prod(shape)
        dtype = np.dtype(ty.dtype.name)
        assert dtype.itemsize == itemsize
        return _seen(pointer, shape, strides, dtype)

    def cuTensorMapEncodeTiled(
        self, dtype, rank, address, shape, strides, box, steps, interleave, swizzle, promotion, fill
    ):
        """Refuses what the manual does ("Tensor Map Object Management"), and other steps than 1."""
        shape, strides, box, steps = ([int(n) for n in x] for x in (shape, strides, box, steps))
        itemsize = np.dtype(ELEMENTS[dtype][0]).itemsize
        lengths = [len(shape), len(strides) + 1, len(box), len(steps)]
        if not (
            3 <= rank <= 5 and lengths == [rank] * 4 and address % 16 == 0
            and interleave == _INTERLEAVE.CU_TENSOR_MAP_INTERLEAVE_NONE and set(steps) == {1}
            and all(0 < n <= 2**32 for n in shape) and all(0 < n <= 256 for n in box)
            and all(n % 16 == 0 and 0 <= n < 2**40 for n in strides)
            and box[0] * itemsize % 16 == 0
            and (SPANS[swizzle] == 16 or box[0] * itemsize <= SPANS[swizzle])
        ):  # fmt: skip
            return RESULT.CUDA_ERROR_INVALID_VALUE, None
        made = _MapMemory()
        self.maps[int(made.getPtr())] = weakref.ref(made)
        written = TensorMap.from_address(int(made.getPtr()))
        facts = {"address": address, "dtype": dtype, "rank": rank, "swizzle": swizzle, "fill": fill}
        for name, value in facts.items():
            setattr(written, name, int(value))
        for name, values in (("shape", shape), ("strides", strides), ("box", box)):
            getattr(written, name)[: len(values)] = values
        return SUCCESS, made

    def cuTensorMapReplaceAddress(self, tensor_map, address):
        if address % 16:
            return (RESULT.CUDA_ERROR_INVALID_VALUE,)
        TensorMap.from_address(int(tensor_map.getPtr())).address = address
        return (SUCCESS,)

    def cuMemsetD8Async(self, pointer, value, size, stream):
        if not self.knows(int(stream)):
            return (RESULT.CUDA_ERROR_INVALID_HANDLE,)
        assert owner_of(pointer, pointer + size - 1) == self.ordinal
        self.note("fill", Address(pointer), value, size, int(stream))
        ctypes.memset(pointer, value, size)
        return (SUCCESS,)

    def cuMemAllocFromPoolAsync(self, size, pool, stream):
        if not self.knows(int(stream)):
            return RESULT.CUDA_ERROR_INVALID_HANDLE, 0
        assert pool == self.ordinal + 1
        memory = aligned((size // 4,), values=fresh_memory.value(), gpu=self.ordinal)
        self.live[memory.ctypes.data] = memory, int(stream)
        self.workspaces.append((size, int(stream)))
        self.note("take", size, int(stream))
        return SUCCESS, memory.ctypes.data

    def cuMemFreeAsync(self, pointer, stream):
        _, taken_on = self.live.pop(pointer)
        assert taken_on == int(stream)
        self.note("free", Address(pointer), int(stream))
        return (SUCCESS,)

    def cuCtxGetCurrent(self):
        return SUCCESS, self.context

    def cuPointerGetAttribute(self, attribute, pointer):
        found = owner_of(pointer)
        return (RESULT.CUDA_ERROR_INVALID_VALUE, 0) if found is None else (SUCCESS, found)

    def cuKernelSetAttribute(self, attribute, size, handle, device):
        self.allowed[int(handle), int(device)] = size
        return (SUCCESS,)

    # --- compiled kernels: cuda.core, and Kernel.built ---

    def built(self, kernel, capability):
        return (kernel, capability), kernel.name

    def from_cubin(self, cubin):
        self.loaded.append((*cubin, self.ordinal))
        handle = len(self.loaded)
        return SimpleNamespace(get_kernel=lambda name: SimpleNamespace(handle=handle))


def _flat(values):
    return (y for x in values for y in (_flat(x) if isinstance(x, tuple) else (x,)))


class Cuda:
    """What the device package asks of ``numba.cuda``; all that it compiles with is Numba's."""

    def __init__(self, gpu):
        self.gpu = gpu
        self.gpus = [Device(gpu, n) for n in range(len(gpu.capabilities))]

    def __getattr__(self, name):
        return getattr(numba_cuda, name)

    def get_current_device(self):
        return self.gpus[self.gpu.ordinal]

    def current_context(self):
        return None

    def device_array(self, shape, dtype):
        return Array(aligned(shape, dtype, gpu=self.gpu.ordinal))

    def to_device(self, values, stream):
        array = on_gpu(values, self.gpu.ordinal)
        self.gpu.note("to gpu", address(array), self.gpu.order(int(stream)))
        return array

    def as_cuda_array(self, array):
        if isinstance(array, Array):
            return array
        of = array.__cuda_array_interface__
        return Array(_seen(of["data"][0], of["shape"], of["strides"], np.dtype(of["typestr"])))

    def external_stream(self, stream):
        return Stream(self.gpu, stream)

    def synchronize(self):
        self.gpu.note("wait", None)


class Device:
    """A GPU of ``numba.cuda.gpus``, in a ``with`` the current one."""

    MULTIPROCESSOR_COUNT = 132

    def __init__(self, gpu, ordinal):
        self.gpu, self.id, self.compute_capability = gpu, ordinal, gpu.capabilities[ordinal]
        limit = SHARED_BYTES.get(self.compute_capability, devices.EMULATED_SHARED_BYTES)
        self.MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = limit
        self.before = []

    def __enter__(self):
        self.before.append(self.gpu.context)
        self.gpu.context = CONTEXT + self.id
        self.gpu.entered.append(self.id)

    def __exit__(self, *_):
        self.gpu.context = self.before.pop()


class Stream:
    def __init__(self, gpu, handle):
        self.gpu, self.handle = gpu, handle

    def __int__(self):
        return self.handle

    def synchronize(self):
        self.gpu.note("wait", self.handle)


class CupyArray(Array):
    pass


class Cupy(ModuleType):
    """The part of CuPy that fa_numba asks for; ``current`` has the current streams by GPU."""

    ndarray = CupyArray

    def __init__(self, gpu):
        super().__init__("cupy")
        self.gpu, self.current = gpu, {}
        self.cuda = SimpleNamespace(
            get_current_stream=lambda: SimpleNamespace(ptr=self.current.get(gpu.ordinal, 0)),
            Device=lambda ordinal: Device(gpu, ordinal),
        )

    def empty(self, shape, dtype):
        return CupyArray(aligned(shape, dtype, gpu=self.gpu.ordinal))


@contextlib.contextmanager
def imported_as(found):
    """``import`` finds these modules by their names inside.

    Not ``mock.patch.dict``, which forgets at the end what else has been imported meanwhile: parts
    of Numba that it loads at the first call register their types twice then, and fail.
    """
    before = {name: sys.modules[name] for name in found if name in sys.modules}
    sys.modules.update(found)
    try:
        yield
    finally:
        for name in found:
            sys.modules.pop(name, None)
        sys.modules.update(before)


@contextlib.contextmanager
def no_cupy_but_its_names(gpu):
    """Everything inside takes ``CupyArray`` for CuPy's; yields the ``Cupy``."""
    with imported_as({"cupy": Cupy(gpu)}):
        yield sys.modules["cupy"]


class JaxArray(Array):
    """A JAX array on ``count`` devices of a platform."""

    def __init__(self, values, platform="gpu", count=1):
        super().__init__(values)
        self.platform, self.count = platform, count

    def devices(self):
        return self.count * [SimpleNamespace(platform=self.platform)]

    def block_until_ready(self):
        _driver().note("ready", address(self))

    def view(self, dtype):
        return JaxArray(self.values.view(dtype), self.platform, self.count)


@contextlib.contextmanager
def no_jax_but_its_names():
    """Everything inside takes ``JaxArray`` for JAX's."""
    jax = ModuleType("jax")
    jax.Array, jax.core = JaxArray, SimpleNamespace(Tracer=type(None))
    jax.numpy = SimpleNamespace(asarray=lambda array: JaxArray(array.values))
    with imported_as({"jax": jax}):
        yield jax


def _forget_what_is_known_of_gpus():
    for known in (select.limits_of, binding._on_gpu):
        known.cache_clear()


@contextlib.contextmanager
def no_gpu_but_its_driver(*capabilities):
    """Everything inside runs as on GPUs of these compute capabilities, one of 9.0 unless given;
    yields the ``Gpu``.
    """
    gpu = Gpu(capabilities or ((9, 0),))
    _current.append(gpu)
    _forget_what_is_known_of_gpus()
    patch = mock.patch.object
    with contextlib.ExitStack() as stack:
        for name in (name for name in vars(Gpu) if name.startswith("cu")):
            stack.enter_context(patch(launch_record.driver, name, getattr(gpu, name)))
        for room in (select, memory, kernel):
            stack.enter_context(patch(room, "cuda", Cuda(gpu)))
        for change in (
            patch(select, "why_no_gpu", lambda: ""),
            patch(memory, "pool", lambda ordinal: SimpleNamespace(handle=ordinal + 1)),
            patch(cuda.core, "ObjectCode", gpu),
            patch(devices.Kernel, "built", lambda k, capability: gpu.built(k, capability)),
            patch(
                kernel, "built_together", lambda ks, capability: [k.built(capability) for k in ks]
            ),
            patch(devices.Kernel, "_compiled", _Compiled(), create=True),
        ):
            stack.enter_context(change)
        yield gpu
    _current.pop()
    _forget_what_is_known_of_gpus()
    assert not gpu.live, "workspace that was not freed"


@contextlib.contextmanager
def no_calls_kept():
    """Inside and afterwards no calls are kept but new ones; yields these by their keys."""
    with mock.patch.dict(launch_cache._kept, clear=True):
        yield launch_cache._kept
