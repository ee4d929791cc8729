"""Types of the arguments and results of public functions, for annotations and type checkers.

=============== ====================================================================================
name            values
=============== ====================================================================================
Array           an array of NumPy, torch, CuPy, JAX, or any library with DLPack or with
                ``__cuda_array_interface__``
A               type variable for the type of q, which is also the type of the results
Lengths         lengths of sequences: integers on the host, or an array
Stream          a CUDA stream of torch, CuPy or Numba, the address of a stream, or None
Function        a Python function that is compiled into a kernel, such as ``score_mod``
Algorithm       names of algorithms
UnitName        names of units, and "auto"
Passes          names of passes
Splits          a number of thread blocks, or "auto"
WarpPartition   ways to divide the work of a thread block among its warps
Layout          orders of axes
Precision       ways to multiply float32 matrices
OutDtype        dtypes of the output for float8_e4m3fn inputs
=============== ====================================================================================

Type checkers only read these types. Calls are checked at run time by the functions themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, TypeAlias, TypeVar


class SupportsDLPack(Protocol):
    """An array that other libraries can use without a copy, by the DLPack protocol."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...

    def __dlpack_device__(self) -> Any: ...


class SupportsCudaArray(Protocol):
    """An array on a GPU that describes its memory by ``__cuda_array_interface__``."""

    @property
    def __cuda_array_interface__(self) -> Any: ...


Array: TypeAlias = SupportsDLPack | SupportsCudaArray
A = TypeVar("A", bound=Array)
Lengths: TypeAlias = Sequence[int] | Array
Stream: TypeAlias = Any
Function: TypeAlias = Callable[..., Any]

Algorithm = Literal["fa2", "fa1", "standard"]
UnitName = Literal["auto", "simt", "mma", "wgmma"]
Passes = Literal["fwd", "bwd"]
Splits: TypeAlias = int | Literal["auto"]
WarpPartition = Literal["rows", "keys"]
Layout = Literal["bhnd", "bnhd"]
Precision = Literal["ieee", "fp16x3", "bf16x6", "bf16x3"]
OutDtype = Literal["float16", "bfloat16", "float32"]
