"""The dtypes of q, k, v and the results: one record each, with all that a dtype decides."""

from __future__ import annotations

from dataclasses import dataclass

CHUNK_BYTES = 16  # of the widest access to memory, and of one asynchronous copy


@dataclass(frozen=True)
class DType:
    """A floating-point type of arrays in memory; sums are in float32 whatever it is.

    ``bytes`` are those of an element. ``host`` is the NumPy dtype in which kernels see the arrays:
    itself, or an unsigned integer of as many bits for a type that Numba does not compute with.
    ``nan`` is a NaN's value as ``host``. ``matrix`` is the type's name in a tensor core's
    instruction, as PTX has it, or None where its products are computed on CUDA cores.
    """

    name: str
    bytes: int
    host: str
    nan: float | int
    matrix: str | None = None

    @property
    def chunk(self) -> int:
        """Elements in 16 bytes."""
        return CHUNK_BYTES // self.bytes

    @property
    def sums_in_place(self) -> bool:
        """Whether an output can hold a float32 sum between two passes over it.

        Where it cannot, the sum is in memory beside the output and rounded into it at the end.
        """
        return self.host == "float32"


DTYPES = {
    dtype.name: dtype
    for dtype in (
        DType("float32", 4, "float32", float("nan")),
        DType("float16", 2, "uint16", 0x7FFF, "f16"),
        DType("bfloat16", 2, "uint16", 0x7FFF, "bf16"),
    )
}


@dataclass(frozen=True)
class Precision:
    """How products of float32 matrices are computed: an element is the sum of so many ``planes`` of
    ``dtype``, the first of them the nearest to it and each other to what is left. Plane i times
    plane j is computed where i + j < ``planes``. ``scaled``: planes have less range than float32,
    so that a power of two goes before them.
    """

    planes: int
    dtype: str
    scaled: bool = False


PRECISIONS = {
    "ieee": Precision(1, "float32"),
    "fp16x3": Precision(2, "float16", scaled=True),
    "bf16x6": Precision(3, "bfloat16"),
    "bf16x3": Precision(2, "bfloat16"),
}
# Of arrays beside them: block tables, lengths that stay on the device, what functions capture.
INDEX = DType("int32", 4, "int32", 0)
FLAG = DType("bool", 1, "uint8", 0)
STATE = DType("uint8", 1, "uint8", 0)  # of a block of a mask
STORED = DTYPES | {x.name: x for x in (INDEX, FLAG, STATE)}
