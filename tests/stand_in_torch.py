"""The part of torch that fa_numba asks for, over host memory that is the CPU's or a GPU's."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import numpy as np
from stand_in_device import aligned, imported_as, owner_of

import fa_numba


class Dtype:
    """One of torch's dtypes; NumPy has no bfloat16 and no float8, and keeps their bits."""

    def __init__(self, name):
        hosts = {"bfloat16": "uint16", "float8_e4m3fn": "uint8"}
        self.name, self.host = name, hosts.get(name, name)

    def __repr__(self):
        return f"torch.{self.name}"


DTYPES = {
    name: Dtype(name)
    for name in (
        *("float32", "float64", "float16", "bfloat16", "float8_e4m3fn"),
        *("bool", "uint8", "int16", "int32", "int64"),
    )
}


class Tensor:
    """A tensor over ``values``, of the GPU that has their memory or of the CPU."""

    layout, requires_grad, negated, grad, node = "strided", False, False, None, None
    tangent, is_nested, _version = None, False, 0

    @classmethod
    def of(cls, values, dtype=None, **facts):
        tensor = cls()
        gpu = owner_of(values.ctypes.data)
        where = SimpleNamespace(type="cpu", index=None)
        tensor.values, tensor.shape = values, values.shape
        tensor.dtype = DTYPES[dtype or values.dtype.name]
        tensor.device = where if gpu is None else SimpleNamespace(type="cuda", index=gpu)
        vars(tensor).update(facts)
        return tensor

    @property
    def is_cuda(self):
        return self.device.type == "cuda"

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

    def detach(self):
        return Tensor.of(self.values, self.dtype.name)

    def view(self, dtype):
        return Tensor.of(self.values.view(dtype.host), dtype.name)

    def cpu(self):
        return self if not self.is_cuda else Tensor.of(self.values.copy(), self.dtype.name)

    def numpy(self):
        assert not self.is_cuda and not self.requires_grad
        return self.values

    def __invert__(self):
        return self._like(~self.values)

    def masked_fill(self, where, value):
        return self._like(np.where(where.values, self.values.dtype.type(value), self.values))

    def float(self):
        return self.to(DTYPES["float32"])

    def to(self, dtype):
        """Itself where it has the dtype, as torch's; not from or to bfloat16's bits."""
        assert "bfloat16" not in (dtype.name, self.dtype.name)
        return self if dtype is self.dtype else self._like(self.values.astype(dtype.host))

    def narrow(self, dim, start, length):
        at = (slice(None),) * dim + (slice(start, start + length),)
        assert 0 <= start and start + length <= self.shape[dim]
        return Tensor.of(self.values[at], self.dtype.name)

    def contiguous(self):
        return self if self.values.flags.c_contiguous else self.clone()

    def clone(self):
        return self._like(self.values.copy())

    def reshape(self, *shape):
        return Tensor.of(self.values.reshape(shape), self.dtype.name)

    def copy_(self, other):
        self.values[...] = other.values
        self._version += 1
        return self

    def is_inference(self):
        return False

    def numel(self):
        return self.values.size

    def tolist(self):
        return self.values.tolist()

    def _like(self, values):
        if self.is_cuda:
            values = aligned(values.shape, values.dtype, values, gpu=self.device.index)
        return Tensor.of(values)

    def backward(self, gradient, beside=()):
        """Gradients of the tensors that this one was made of, where its function left a node; with
        those of (tensor, gradient) that are made of them ``beside``.
        """
        function, context, inputs, _ = self.node
        given = [None] * context.results
        for x, dx in ((self, gradient), *beside):
            given[x.node[3]] = dx
        with _torch().set_grad_enabled(False):
            found = function.backward(context, *given)
        assert len(found) == len(inputs)
        for x, gradient in zip(inputs, found, strict=True):
            wants = isinstance(x, Tensor) and x.requires_grad
            assert gradient is None or wants, "a gradient that nobody asked for"
            if wants:
                assert gradient is None or gradient.shape == x.shape
                x.grad = gradient


class Parameter(Tensor):
    pass


class Context(SimpleNamespace):
    """``ctx`` of a ``Function``."""

    def save_for_backward(self, *tensors):
        assert all(x is None or isinstance(x, Tensor) for x in tensors)
        self.saved_tensors = tensors

    def mark_non_differentiable(self, *tensors):
        self.marked = tensors

    def set_materialize_grads(self, value):
        self.materialize = value


class Function:
    """``torch.autograd.Function``: calls ``forward``, and leaves ``backward`` with its results."""

    @classmethod
    def apply(cls, *inputs):
        wants = tuple(isinstance(x, Tensor) and x.requires_grad for x in inputs)
        context = Context(needs_input_grad=wants, marked=(), materialize=True)
        _torch().applied += 1
        with _torch().set_grad_enabled(False):
            made = cls.forward(context, *inputs)
        assert not context.materialize  # zeros for a gradient that is None are not made here
        context.results = len(made)
        for n, x in enumerate(made):
            if any(wants) and not any(x is y for y in context.marked):
                x.requires_grad, x.node = True, (cls, context, inputs, n)
        return made


class Torch(ModuleType):
    """torch, as ``sys.modules`` would have it.

    ``current`` has the current streams by GPU, ``gpu`` a ``stand_in_device.Gpu`` that tells which
    GPU is the current one. ``drawn`` are the seeds that ``randint`` gives, from the first on;
    ``applied`` counts calls of a ``Function``, which keep what a backward pass needs.
    """

    Tensor, strided = Tensor, "strided"

    def __init__(self, gpu):
        super().__init__("torch")
        self.gpu, self.current, self.made, self.own = gpu, {0: 5}, 0, threading.local()
        self.applied, self.entered, self.deterministic, self.drawn = (
            0,
            [],
            False,
            iter(range(11, 99)),
        )
        vars(self).update(DTYPES)
        self.nn = SimpleNamespace(Parameter=Parameter)
        self.cuda = SimpleNamespace(
            current_stream=self.current_stream,
            ExternalStream=lambda handle, device: (handle, device.index),
            stream=self.on_stream,
        )
        self.autograd = ModuleType("torch.autograd")
        self.autograd.Function = Function
        self.autograd.forward_ad = SimpleNamespace(
            unpack_dual=lambda x: SimpleNamespace(tangent=x.tangent)
        )
        self.compiler = SimpleNamespace(disable=lambda function: function)

    @property
    def grad(self):
        """Whether gradients are wanted, in this thread."""
        return getattr(self.own, "grad", True)

    @grad.setter
    def grad(self, value):
        self.own.grad = value

    @property
    def stream(self):
        return self.current[0]

    @stream.setter
    def stream(self, handle):
        self.current[0] = handle

    def current_stream(self, device=None):
        place = self.gpu.ordinal if device is None else device
        assert 0 <= place < len(self.gpu.capabilities)
        return SimpleNamespace(cuda_stream=self.current.get(place, 0))

    @contextlib.contextmanager
    def on_stream(self, stream):
        handle, place = stream
        self.entered.append(stream)
        with mock.patch.dict(self.current, {place: handle}):
            yield

    def is_grad_enabled(self):
        return self.grad

    @contextlib.contextmanager
    def set_grad_enabled(self, value):
        before, self.grad = self.grad, value
        yield
        self.grad = before

    def are_deterministic_algorithms_enabled(self):
        return self.deterministic

    def randint(self, high, size, dtype, device):
        assert size == () and dtype is self.int64 and device == "cpu" and high == 2**63 - 1
        return next(self.drawn)

    def empty(self, shape, dtype, device):
        self.made += 1
        values = np.full(shape, np.nan if dtype.name[:5] == "float" else 0, dtype.host)
        return self._at(values, dtype, device)

    def tensor(self, values, dtype, device):
        return self._at(np.array(values, dtype.host), dtype, device)

    def cat(self, tensors, axis):
        return tensors[0]._like(np.concatenate([x.values for x in tensors], axis))

    def zeros(self, shape, dtype, device):
        return self._at(np.zeros(shape, dtype.host), dtype, device)

    def zeros_like(self, tensor):
        return tensor._like(np.zeros_like(tensor.values))

    def full(self, shape, value, dtype, device):
        return self._at(np.full(shape, value, dtype.host), dtype, device)

    def _at(self, values, dtype, device):
        if getattr(device, "type", device) == "cuda":
            values = aligned(values.shape, values.dtype, values, gpu=device.index)
        return Tensor.of(values, dtype.name)


def _torch():
    return sys.modules["torch"]


@contextlib.contextmanager
def no_torch_but_its_names(gpu):
    """Everything inside takes ``Tensor`` for torch's; yields the ``Torch``."""
    torch = Torch(gpu)
    with imported_as({"torch": torch, "torch.autograd": torch.autograd}):
        yield torch


SOURCE = Path(fa_numba.__file__).parent / "torch.py"
TEXT = SOURCE.read_text()


@functools.lru_cache(maxsize=4)
def _compiled(text):
    return compile(text, str(SOURCE), "exec")


def fa_numba_torch():
    """``fa_numba.torch`` of the torch that is imported now, apart from any other's."""
    module = ModuleType("fa_numba.torch_of_a_stand_in")
    exec(_compiled(TEXT), vars(module))
    assert module.torch is _torch() and module.fa_numba is fa_numba
    return module
