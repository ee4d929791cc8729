"""Arrays of any library as ``Operand`` objects, which kernels can read without a copy.

The module also checks the arrays that a caller passes.
"""

from __future__ import annotations

import itertools
import math
import operator
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fa_numba import checks, device
from fa_numba.checks import kind_of
from fa_numba.device import DeviceArray
from fa_numba.dtypes import DTYPES, E4M3, FLAG, INDEX, STORED, UNSCALED
from fa_numba.emulator.global_memory import used_strides, without_unused_strides
from fa_numba.host.overlap import overlap, overlaps_itself
from fa_numba.masks import numeric_mask

HOST = -1
# Allowed dtypes of arguments that need not have the dtype of q.
SUMS = ("float32",)  # lse, bias and alibi_slopes
MASKS = ("float32", "float16", "bfloat16", "bool")  # attn_mask, which is converted to float32
CAPTURED = (*SUMS, INDEX.name, FLAG.name)  # arrays that the caller's functions capture
# Libraries without float8. Their arrays of uint8 contain the bits of e4m3.
_WITHOUT_E4M3 = ("cupy", "interface", "dlpack")
INTEGERS = (INDEX.name,)  # a block table and lengths that are on a GPU


@dataclass(frozen=True)
class Operand:
    """A caller's array of any library, as memory with an address, a dtype, a shape and strides.

    field      meaning
    name       name of the argument, for messages
    library    "numpy", "torch", "cupy", "jax", "interface" or "dlpack"
    ordinal    number of the GPU, or HOST
    strides    distances between neighbouring elements of each axis, in bytes
    pointer    address of the first element
    host       NumPy view of host memory; None for an array on a GPU
    owner      the caller's array
    empty      function (shape, dtype) that returns a new array on the same device
    writable   whether kernels can write to the array
    finish     for libraries without writable arrays (JAX): function that converts an array from
               ``empty`` to the type of the library. None for all other libraries
    """

    name: str
    library: str
    ordinal: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    pointer: int
    host: np.ndarray | None
    owner: Any
    empty: Callable[[tuple[int, ...], str], Any]
    writable: bool = True
    finish: Callable[[Any], Any] | None = None

    @property
    def aligned(self) -> bool:
        """Whether every row is contiguous and starts at a 16-byte address.

        No stride may be negative, because tensor maps do not support negative strides.
        """
        *rows, last = self._used_strides
        return (
            last == DTYPES[self.dtype].bytes
            and self.pointer % 16 == 0
            and all(stride >= 0 == stride % 16 for stride in rows)
        )

    @property
    def _used_strides(self) -> tuple[int, ...]:
        """The strides in bytes, with a fixed stride for each axis of length 0 or 1.

        Such an axis has at most one index, 0. No address therefore depends on the stride of the
        axis.
        """
        return used_strides(self.shape, self.strides, STORED[self.dtype].bytes)

    @property
    def where(self) -> str:
        return "host memory" if self.ordinal == HOST else f"GPU {self.ordinal}"

    def argument(self) -> Any:
        """Return the array in the form that ``device.launch`` takes.

        This is a NumPy array for host memory, and a ``DeviceArray`` for GPU memory.
        """
        if self.host is not None:
            host, array = STORED[self.dtype].host, without_unused_strides(self.host)
            return array if self.dtype == host else array.view(host)
        size = STORED[self.dtype].bytes
        return DeviceArray(self.pointer, self.shape, self._used_strides, self.owner, size)


def _from_numpy(name: str, array: np.ndarray, library: str, owner: Any, empty: Callable) -> Operand:
    dtype, pointer, writable = _name(array.dtype), array.ctypes.data, array.flags.writeable
    shape, strides = array.shape, array.strides
    return Operand(
        name, library, HOST, dtype, shape, strides, pointer, array, owner, empty, writable
    )


def numpy_dtype(name: str) -> np.dtype:
    """Return the NumPy dtype with a name of ``DTYPES``.

    The dtypes bfloat16 and float8_e4m3fn are in the package ml_dtypes. Raise ImportError if it is
    needed and not installed.
    """
    try:
        return np.dtype(name)
    except TypeError:
        pass
    try:
        import ml_dtypes
    except ImportError as error:
        raise ImportError(
            f"NumPy arrays of {name} need the package ml_dtypes; install it with "
            "pip install 'fa_numba[fp8]'"
        ) from error
    return np.dtype(getattr(ml_dtypes, name))


def _stored_as(dtype: str) -> str:
    """Return the dtype of an array that stores ``dtype`` in a library without float8.

    The bits of e4m3 are stored as uint8. Raise TypeError for bfloat16, which such a library does
    not support.
    """
    if dtype == "bfloat16":
        raise TypeError(
            "the results cannot be bfloat16, because the library of q has no bfloat16; pass torch "
            "or JAX arrays, or choose float16 or float32"
        )
    return E4M3.host if dtype == E4M3.name else dtype


def _empty_of_bits(shape: tuple[int, ...], dtype: str) -> Any:
    """Return an uninitialised array on the current GPU; the bits of e4m3 are stored as uint8."""
    return device.empty(shape, _stored_as(dtype))


def _empty_of_bits_on_host(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Return an uninitialised array in host memory; the bits of e4m3 are stored as uint8."""
    return np.empty(shape, _stored_as(dtype))


def _name(dtype: np.dtype) -> str:
    """Return the name of a dtype, such as "float32".

    A dtype with foreign byte order gets a name like ">f4", which no function allows.
    """
    return dtype.name if dtype.isnative else dtype.str


def variable_of(name: str) -> str:
    """Return the name of the variable that contains an array, for an error message.

    ``name`` is the text by which error messages name the array. It begins with the variable. For
    the text ``x in score_mod, a lambda (...),`` the result is ``x``.
    """
    return name.split()[0]


def check_dtype(name: str, dtype: str, library: str, allowed: Sequence[str]) -> None:
    """Raise TypeError unless ``dtype`` is ``allowed``.

    If there is a safe conversion, the message shows it for an array of this ``library``.
    """
    if dtype not in allowed:
        if name == "out" and len(allowed) == 1:
            raise TypeError(f"out must have the dtype of the inputs ({allowed[0]}), got {dtype}")
        advice = _conversion(name, dtype, library, allowed)
        raise TypeError(f"{name} must be {checks.one_of(allowed)}, got {dtype}{advice}")


_KINDS = {
    "numpy": "NumPy array",
    "torch": "torch tensor",
    "cupy": "CuPy array",
    "jax": "JAX array",
    "interface": "array with __cuda_array_interface__",
    "dlpack": "array with DLPack",
}
_CONVERSIONS = {
    "numpy": ".astype(np.{})",
    "torch": ".to(torch.{})",
    "cupy": ".astype(cupy.{})",
    "jax": ".astype(jnp.{})",
}


def _conversion(name: str, dtype: str, library: str, allowed: Sequence[str]) -> str:
    """Return the end of a message that says how to convert an array to an allowed dtype.

    Return "" if there is no such advice.
    """
    integer = dtype.startswith(("int", "uint"))
    numeric = integer or dtype.startswith(("float", "bfloat", "bool", "<f", ">f"))
    if dtype == E4M3.name:
        return (
            f"; {dtype} is for the forward pass of flash_attention_1 and flash_attention_2, with k "
            "and v of that dtype too"
        )
    if library not in _CONVERSIONS or not numeric or name == "out":
        return ""
    variable = variable_of(name)
    if allowed == MASKS and integer:
        return f"; if its values are 0 and 1, pass {variable} != 0"
    to = INDEX.name if integer and INDEX.name in allowed else allowed[0]
    return f"; convert it with {variable}{_CONVERSIONS[library].format(to)}"


def _of_library(library: str, kind: str, array: Any) -> bool:
    """Return whether ``array`` is a ``library.kind``, such as a torch.Tensor.

    Return False if the library is not imported.
    """
    module = sys.modules.get(library)
    return module is not None and isinstance(array, getattr(module, kind))


def _read(name: str, tensor: Any, how: Callable[[Any], Any]) -> Any:
    """Return ``how(tensor)``, where ``how`` accesses the memory of a torch tensor.

    Raise TypeError if ``tensor`` has no memory, such as a tensor inside of ``torch.vmap``. ``name``
    is the name of the argument, for the message.
    """
    try:
        return how(tensor)
    except RuntimeError as error:
        raise TypeError(
            f"{name} must be a tensor with values, got a tensor without memory. torch.vmap and the "
            "transforms of torch.func (grad, jvp) pass such tensors; call fa_numba outside them"
        ) from error


def has_tangent(tensor: Any) -> bool:
    """Return whether a torch tensor has a tangent, from forward-mode differentiation."""
    unpacked = sys.modules["torch"].autograd.forward_ad.unpack_dual(tensor)
    return unpacked.tangent is not None


def check_dense(name: str, tensor: Any) -> None:
    """Raise TypeError for a nested, masked or sparse torch tensor."""
    if hasattr(tensor, "get_mask"):  # of torch.masked, without a name that all versions have
        raise TypeError(
            f"{name} must be a tensor without a mask, got {kind_of(tensor)}; pass "
            f"{variable_of(name)}.get_data(), or .to_tensor(value) to replace what is masked"
        )
    if tensor.is_nested:
        packed = (
            "; pack the sequences one after the other into a tensor (total, heads, head_dim), and "
            "pass cu_seqlens_q and cu_seqlens_k"
        )
        raise TypeError(
            f"{name} must be a dense tensor, got a nested tensor{packed if name in 'qkv' else ''}"
        )
    if tensor.layout != sys.modules["torch"].strided:
        raise TypeError(
            f"{name} must be a dense tensor (layout torch.strided), got layout {tensor.layout}; "
            f"convert it with {variable_of(name)}.to_dense()"
        )


def check_tensor(name: str, tensor: Any) -> None:
    """Raise TypeError unless ``tensor`` is a dense torch tensor.

    Raise ValueError for a tensor with a tangent, because the results would have no tangent.
    """
    if not isinstance(tensor, sys.modules["torch"].Tensor):
        raise TypeError(f"{name} must be a torch tensor, got {kind_of(tensor)}")
    check_dense(name, tensor)
    if has_tangent(tensor):
        raise ValueError(
            f"{name} has a tangent (forward-mode differentiation), which fa_numba.torch does not "
            "support; use the backward pass for gradients"
        )


def _from_torch(name: str, tensor: Any, allowed: Sequence[str]) -> Operand:
    torch = sys.modules["torch"]
    check_dense(name, tensor)
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{name} requires a gradient, which this function does not compute; {_instead(name)}"
        )

    where = tensor.device

    def empty(shape, dtype):
        return torch.empty(shape, dtype=getattr(torch, dtype), device=where)

    dtype = str(tensor.dtype).removeprefix("torch.")
    check_dtype(name, dtype, "torch", allowed)
    if tensor.is_neg():
        raise TypeError(
            f"{name} must not be a view that negates its values when they are read "
            f"({name}.is_neg() is True); pass {name}.resolve_neg()"
        )
    if where.type == "cpu":
        seen_as = {"bfloat16": torch.int16, E4M3.name: torch.uint8}.get(dtype, tensor.dtype)
        host = _read(name, tensor, lambda x: x.detach().view(seen_as).numpy())
        return replace(_from_numpy(name, host, "torch", tensor, empty), dtype=dtype)
    if where.type != "cuda":
        raise TypeError(f"{name} must be a CPU or CUDA tensor, got one on {where}")
    strides = tuple(tensor.element_size() * n for n in tensor.stride())
    pointer = _read(name, tensor, lambda x: x.data_ptr())
    ordinal, shape = where.index, tuple(tensor.shape)
    return Operand(name, "torch", ordinal, dtype, shape, strides, pointer, None, tensor, empty)


def _instead(name: str) -> str:
    """Return what to call or pass instead of a torch tensor that requires a gradient.

    The text is the end of an error message. ``name`` is the argument that contains the tensor.
    """
    detached = f"pass {variable_of(name)}.detach(), or call it under torch.no_grad()"
    if name.startswith(("outputs[", "lses[")):
        return f"call fa_numba.torch.merge instead, or {detached}"
    if name in ("q", "k", "v", "bias", "attn_mask", "sinks") or " in score_mod," in name:
        return f"call fa_numba.torch.attention instead, or {detached}"
    return detached


def _contiguous(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Return the strides, in bytes, of a contiguous array with the shape ``shape``.

    ``itemsize`` is the size of an element in bytes.
    """
    return tuple(itertools.accumulate((itemsize, *shape[:0:-1]), operator.mul))[::-1]


def _from_interface(name: str, array: Any) -> Operand:
    interface = array.__cuda_array_interface__
    shape = tuple(interface["shape"])
    dtype = np.dtype(interface["typestr"])
    strides = interface.get("strides")
    if strides is None:
        strides = _contiguous(shape, dtype.itemsize)
    pointer, read_only = interface["data"]
    try:
        ordinal = device.ordinal_of(pointer)
    except Exception as error:  # no driver, no GPU, or no such memory
        raise ValueError(
            f"{name} must be in host memory or on a GPU of this machine, got an array with "
            f"__cuda_array_interface__ at address {pointer:#x}, which is on neither"
        ) from error
    library: str = "interface"
    empty: Callable[..., Any] = _empty_of_bits

    cupy = sys.modules.get("cupy")
    if cupy is not None and isinstance(array, cupy.ndarray):
        library = "cupy"

        def empty_of_cupy(shape, dtype):
            return cupy.empty(shape, dtype=_stored_as(dtype))

        empty = empty_of_cupy
    elif interface.get("stream"):
        # Wait for work on the stream that writes the array. Calls with CuPy arrays need not wait,
        # because their kernels run on CuPy's current stream.
        device.synchronize(interface["stream"])
    dtype, steps, writable = _name(dtype), tuple(strides), not read_only
    return Operand(
        name, library, ordinal, dtype, shape, steps, pointer, None, array, empty, writable
    )


def _from_dlpack(name: str, array: Any) -> Operand:
    kind, _ = array.__dlpack_device__()
    if kind == 1:
        host = np.from_dlpack(array)
        return _from_numpy(name, host, "dlpack", array, _empty_of_bits_on_host)
    if kind != 2:
        raise TypeError(
            f"{name} must be on DLPack device type 1 (CPU) or 2 (CUDA), got device type {kind}"
        )
    from cuda.core.utils import StridedMemoryView

    # 1 is the legacy default stream. The producer makes that stream wait for the array's values.
    view = StridedMemoryView.from_dlpack(array, stream_ptr=1)
    itemsize, shape = view.dtype.itemsize, tuple(view.shape)
    steps = _contiguous(shape, itemsize)
    if view.strides is not None:
        steps = tuple(itemsize * n for n in view.strides)
    dtype = np.dtype(view.dtype).name
    ordinal, writable, empty = view.device_id, not view.readonly, _empty_of_bits
    return Operand(
        name, "dlpack", ordinal, dtype, shape, steps, view.ptr, None, array, empty, writable
    )


def _from_jax(name: str, array: Any) -> Operand:
    """Return the operand of a JAX array.

    JAX arrays are not writable. Results are computed in NumPy or Numba arrays, and ``finish``
    converts them to JAX arrays.
    """
    jax = sys.modules["jax"]
    if isinstance(array, jax.core.Tracer):
        raise TypeError(
            f"{name} must be an array with values, got the JAX tracer {array}; call fa_numba "
            "outside jax.jit, jax.grad and other JAX transforms"
        )
    if len(array.devices()) != 1:
        raise ValueError(
            f"{name} must be on one JAX device, got an array on {len(array.devices())} devices"
        )
    (where,) = array.devices()
    dtype = np.dtype(array.dtype)
    if where.platform == "cpu":

        def empty(shape, kind):
            return np.empty(shape, numpy_dtype(kind))

        found = _from_numpy(name, np.asarray(array), "jax", array, empty)
        return replace(found, writable=False, finish=lambda made: jax.device_put(made, where))
    if where.platform not in ("gpu", "cuda"):
        raise TypeError(
            f"{name} must be a JAX array on a CPU or a CUDA GPU, got one on {where.platform}"
        )
    if dtype.name == E4M3.name:  # the interface cannot describe such an array
        array = array.view(np.uint8)
    elif dtype.name not in ("float32", "float16"):
        raise TypeError(
            f"{name} must be float32, float16 or {E4M3.name} if it is a JAX array on a GPU, got "
            f"{dtype.name}"
        )
    array.block_until_ready()  # JAX computes on streams of its own

    def finish(made):
        device.synchronize()
        return jax.numpy.asarray(made)

    found = _from_interface(name, array)
    return replace(found, library="jax", dtype=dtype.name, writable=False, finish=finish)


def operand(name: str, array: Any, allowed: Sequence[str] = UNSCALED) -> Operand:
    """Return the operand of an array of NumPy, torch, CuPy or JAX, or of another library.

    An array of another library needs ``__cuda_array_interface__`` or DLPack. ``name`` is the name
    of the argument, for messages. Raises TypeError for any other object, such as a list, and for an
    array whose dtype is not in ``allowed``. Raises ValueError for an address or strides that are
    not multiples of the size of an element.
    """
    checks.check_unmasked(name, array, ", and attn_mask to hide keys" if name in "qkv" else "")
    if isinstance(array, np.ndarray):

        def empty(shape, dtype):
            return np.empty(shape, numpy_dtype(dtype))

        found = _from_numpy(name, array, "numpy", array, empty)
    elif _of_library("torch", "Tensor", array):
        found = _from_torch(name, array, allowed)
    elif _of_library("jax", "Array", array):
        found = _from_jax(name, array)
    elif hasattr(array, "__cuda_array_interface__"):
        found = _from_interface(name, array)
    elif hasattr(array, "__dlpack__"):
        found = _from_dlpack(name, array)
    else:
        converts = isinstance(array, list) and name != "out"
        listed = f"; convert it with np.asarray({name})" if converts else ""
        raise TypeError(
            f"{name} must be a NumPy array, torch tensor, JAX array, or an array with "
            f"__cuda_array_interface__ or DLPack, got {kind_of(array)}{listed}"
        )
    if found.dtype == E4M3.host and E4M3.name in allowed and found.library in _WITHOUT_E4M3:
        found = replace(found, dtype=E4M3.name)
    check_dtype(name, found.dtype, found.library, allowed)
    steps = [stride for n, stride in zip(found.shape, found.strides, strict=True) if n > 1]
    size = STORED[found.dtype].bytes
    if any(n % size for n in (found.pointer, *steps)):
        raise ValueError(
            f"{name} must have an address and strides that are multiples of {size} bytes (the size "
            f"of a {found.dtype}), got address {found.pointer:#x} and strides {found.strides}; "
            "pass a copy of the array"
        )
    return found


def address_and_kind(array: Any) -> tuple[int, tuple] | None:
    """Return the address of a GPU array, and the kind of the array, for the launch cache.

    The kind is a tuple (library, GPU, dtype, shape, strides, address modulo 16, ...). Two arrays of
    equal kind both pass or both fail the checks of a call, except for checks of the addresses. The
    launch cache can therefore replay the launches of one array with the address of the other array.

    This function is faster than ``operand``. It returns None for arrays in host memory, and for
    arrays that need the checks of ``operand``.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        # A subclass may override the attributes that are read below.
        plain = type(array) is torch.Tensor or type(array) is torch.nn.Parameter
        if not plain or not array.is_cuda or array.layout is not torch.strided or array.is_neg():
            return None
        if array.is_nested:
            return None
        if array.requires_grad and torch.is_grad_enabled():
            return None
        try:
            pointer = array.data_ptr()
        except RuntimeError:  # ``operand`` raises the error with the array's name
            return None
        kinds = ("torch", array.get_device(), array.dtype)
        return pointer, (*kinds, array.shape, array.stride(), pointer % 16)
    if _of_library("jax", "Array", array) or not hasattr(array, "__cuda_array_interface__"):
        return None
    try:
        found = _from_interface("", array)
    except ValueError:  # ``operand`` raises the error with the array's name
        return None
    kinds = (found.library, found.ordinal, found.dtype)
    layout = (found.shape, found.strides, found.pointer % 16)
    return found.pointer, (*kinds, *layout, found.writable)


def lies_on_gpu(array: Any) -> bool:
    """Return whether ``array`` is on a GPU, so that kernels can read it there.

    Return False for JAX arrays. JAX computes on its own streams, so its arrays are copied to the
    host. Return False too for arrays that have DLPack and no ``__cuda_array_interface__``.
    """
    if _of_library("torch", "Tensor", array):
        return bool(array.is_cuda)
    if _of_library("jax", "Array", array):
        return False
    return hasattr(array, "__cuda_array_interface__")


def pointer_of(library: str, array: Any) -> int:
    """Return the address of a GPU array that the function ``Operand.empty`` made.

    ``library`` is the attribute ``library`` of the ``Operand`` object.
    """
    if library == "torch":
        return array.data_ptr()
    return array.__cuda_array_interface__["data"][0]


def on_host(name: str, array: Any) -> np.ndarray:
    """Return a small array of any library, or a sequence of numbers, as a NumPy array.

    Arrays on a GPU are copied to the host. ``name`` is for messages. Raises ValueError for rows of
    different lengths, and TypeError for anything that is neither an array nor a sequence of values.
    """
    if _of_library("torch", "Tensor", array):
        check_dense(name, array)
        return _read(name, array, lambda x: x.detach().cpu().numpy())
    if _of_library("jax", "Array", array):
        return np.asarray(array)
    if hasattr(array, "__cuda_array_interface__"):
        return device.copied_to_host(array)
    checks.check_unmasked(name, array)
    if isinstance(array, (np.ndarray, Sequence)) and not isinstance(array, (str, bytes)):
        try:
            return np.asarray(array)
        except ValueError:  # rows of different lengths
            raise ValueError(
                f"{name} must contain numbers in rows of equal length, got {kind_of(array)} with "
                "rows of several lengths"
            ) from None
    if hasattr(array, "__dlpack__"):
        return np.from_dlpack(array)
    raise TypeError(f"{name} must be an array or a sequence of values, got {kind_of(array)}")


def added_mask(mask: Any) -> Any:
    """Return the float32 array that ``attn_mask`` adds to the scores, on the device of the mask.

    A bool mask becomes 0 for True and -inf for False. Numbers of float16 and bfloat16 are converted
    to float32. Any other argument is returned unchanged. If it is not a float32 array, ``operand``
    raises the error later.
    """
    if _of_library("torch", "Tensor", mask):
        torch = sys.modules["torch"]
        if mask.dtype == torch.bool:
            zero = torch.zeros(mask.shape, dtype=torch.float32, device=mask.device)
            return zero.masked_fill(~mask, -math.inf)
        return mask.float() if mask.dtype in (torch.float16, torch.bfloat16) else mask
    try:
        dtype = np.dtype(getattr(mask, "dtype", object)).name
    except TypeError:  # a dtype of another library
        return mask
    if dtype not in MASKS or dtype == "float32":
        return mask
    array = numeric_mask(on_host("attn_mask", mask))
    if not hasattr(mask, "__cuda_array_interface__"):
        return array
    with device.on_device(device.ordinal_of(mask.__cuda_array_interface__["data"][0])):
        return device.to_gpu(array)


def all_aligned(operands: Sequence[Operand], first: Operand) -> bool:
    """Return whether kernels may use 16-byte accesses to the rows of all operands.

    If a GPU runs the call and ``first`` is in host memory, the operands are copied to the GPU. Such
    copies always allow 16-byte accesses.
    """
    copies = device.on_gpu() and first.ordinal == HOST
    return copies or all(x.aligned for x in operands)


def check_together(operands: list[Operand], single: Iterable[Operand] = ()) -> None:
    """Raise ValueError unless all arrays are on one device.

    Raise TypeError unless all ``operands`` have one dtype. The arrays in ``single`` may have other
    dtypes.
    """
    first = operands[0]
    for other in single:
        check_device(first, other)
    for other in operands[1:]:
        check_device(first, other)
        if other.dtype != first.dtype:
            raise TypeError(
                f"{other.name} must have the dtype of {first.name} ({first.dtype}), got "
                f"{other.dtype}"
                f"{_conversion(other.name, other.dtype, other.library, (first.dtype,))}"
            )


def check_device(first: Operand, other: Operand) -> None:
    """Raise ValueError unless both arrays are on the same device."""
    if other.ordinal != first.ordinal:
        raise ValueError(
            f"{other.name} must be on the device of {variable_of(first.name)} ({first.where}), got "
            f"{other.where}"
        )


def check_shape(array: Operand, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless ``array`` has the shape ``shape``."""
    checks.check_shape(array.name, array.shape, shape)


def operand_of_out(
    out: Any, shape: tuple[int, ...], first: Operand, inputs: Sequence[Operand], dtype: str = ""
) -> Operand | None:
    """Return the operand of the argument ``out``, or None if the caller did not pass ``out``.

    Raises ValueError or TypeError unless ``out`` has ``shape``, has ``dtype`` and the device of
    ``first``, is of the same library as the ``inputs``, is writable, shares no memory with the
    inputs, and has a separate address for each element. The default of ``dtype`` is the dtype of
    ``first``.
    """
    if out is None:
        return None
    own = dtype in ("", first.dtype)
    target = operand("out", out, (first.dtype,) if own else UNSCALED)
    if not own and target.dtype != dtype:
        raise TypeError(f"out must have the dtype out_dtype ({dtype}), got {target.dtype}")
    check_device(first, target)
    check_shape(target, shape)
    check_written(target, list(inputs))
    return target


def check_written(out: Operand, inputs: list[Operand]) -> None:
    """Raise ValueError unless kernels can write to ``out`` while they read the ``inputs``.

    ``out`` must be writable, be of the library of ``inputs[0]``, and have a separate address for
    each element. It must not share memory with an input.
    """
    if not out.writable:
        raise ValueError(f"{out.name} must be writable, got a read-only {_KINDS[out.library]}")
    if out.library != inputs[0].library:
        raise ValueError(
            f"{out.name} must have the same array type as {inputs[0].name} "
            f"({_KINDS[inputs[0].library]}), got {_KINDS[out.library]}"
        )
    if overlaps_itself(out):
        raise ValueError(
            f"{out.name} must have a separate address for each element (axes that do not overlap), "
            f"got strides {out.strides} bytes for shape {out.shape}"
        )
    for other in inputs:
        if overlap(out, other):
            raise ValueError(
                f"{out.name} must not share memory with {other.name}; pass an array with memory of "
                "its own"
            )
