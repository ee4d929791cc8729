"""The dtypes of arrays and the precisions of products, each as a record with its properties."""

from __future__ import annotations

from dataclasses import dataclass

CHUNK_BYTES = 16  # bytes of the widest memory access of a thread


@dataclass(frozen=True)
class DType:
    """A type of array elements. Kernels compute sums in float32 for all types.

    field    meaning
    name     name of the dtype, such as "float16"
    bytes    size of an element in bytes
    host     NumPy dtype of the array in kernels: "uint16" for 16-bit floats and "uint8" for 8-bit
             floats, because Numba cannot compute with such floats
    nan      value of the dtype ``host`` that represents NaN; 0 if no value does
    matrix   PTX name of the dtype in tensor-core instructions, or None
    scaled   whether an array of the dtype has scales: a number is stored * scale
    """

    name: str
    bytes: int
    host: str
    nan: float | int
    matrix: str | None = None
    scaled: bool = False

    @property
    def chunk(self) -> int:
        """Number of elements in 16 bytes."""
        return CHUNK_BYTES // self.bytes

    @property
    def sums_in_place(self) -> bool:
        """Whether an output of this dtype can store float32 sums while a kernel still adds to them.

        If not, the sums are stored in another array of float32, and rounded to the output at the
        end.
        """
        return self.host == "float32"


DTYPES = {
    dtype.name: dtype
    for dtype in (
        DType("float32", 4, "float32", float("nan")),
        DType("float16", 2, "uint16", 0x7FFF, "f16"),
        DType("bfloat16", 2, "uint16", 0x7FFF, "bf16"),
        DType("float8_e4m3fn", 1, "uint8", 0x7F, "e4m3", scaled=True),
    )
}
E4M3 = DTYPES["float8_e4m3fn"]
SCALED_ROWS = 128  # rows of a block of an e4m3 array that has a scale of its own
E4M3_CAPABILITY = (8, 9)  # compute capability of the first GPUs that convert to and from e4m3
# Names of the dtypes whose arrays have no scales. Every function with arrays q, k and v takes them.
UNSCALED = tuple(name for name, dtype in DTYPES.items() if not dtype.scaled)


@dataclass(frozen=True)
class Precision:
    """A way to compute products of float32 matrices.

    Each element is split into a sum of ``planes`` numbers of ``dtype``. The first number is the
    element rounded to ``dtype``. Each further number is the remaining difference, rounded to
    ``dtype``. The product of plane i and plane j is computed if i + j < ``planes``. If ``planes``
    is 1, elements are not split. If ``scaled`` is True, the elements are first multiplied by a
    power of two, so that they fit into the range of ``dtype``.
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
# Types of other arrays.
INDEX = DType("int32", 4, "int32", 0)  # block tables, lengths on a GPU, and captured arrays
FLAG = DType("bool", 1, "uint8", 0)  # captured arrays
STATE = DType("uint8", 1, "uint8", 0)  # states of the blocks of a block mask
STORED = DTYPES | {x.name: x for x in (INDEX, FLAG, STATE)}
