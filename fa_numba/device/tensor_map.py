"""Tensor maps: descriptions of arrays for the copy engine of a Hopper GPU (TMA).

A kernel takes such an array as an argument of the type ``TiledType``. The argument contains the
shape, and 128 bytes that the copy engine reads (``__grid_constant__`` in CUDA C++). The driver
encodes these bytes when a launch is recorded; each run only replaces the address. References: CUDA
Driver API, "Tensor Map Object Management"; PTX ISA, "Tensors".
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from math import gcd
from typing import Any

from cuda.bindings import driver
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.datamodel import PrimitiveModel, StructModel
from numba.cuda.extending import make_attribute_wrapper, register_model

from fa_numba.dtypes import DTYPES
from fa_numba.emulator import WRAPS, BoxLayout
from fa_numba.emulator.global_memory import used_strides

MAP_BYTES = 128
ROW_BYTES = 128  # bytes of a row of a box, whose chunks the copy engine swizzles
STEP_BYTES = 16  # strides are multiples of this number of bytes
_ALIGNMENT = 64  # alignment of a tensor map in bytes
_I32 = ir.IntType(32)
_MAP = ir.LiteralStructType([ir.ArrayType(ir.IntType(64), MAP_BYTES // 8)])


class MapType(types.Type):
    """The Numba type of a tensor map.

    In a kernel, a value of this type is the address of the tensor map, a parameter of 128 bytes.
    """

    def __init__(self) -> None:
        super().__init__(name="TensorMap")


class TiledType(types.Type):
    """The Numba type of an array that a kernel reads and writes in boxes.

    Kernels can read the array's ``shape``. If the tensor map has ``ends``, kernels can also read
    ``steps`` (see ``TiledArray``).
    """

    def __init__(self, ndim: int, ends: bool = False) -> None:
        self.ndim, self.ends = ndim, ends
        super().__init__(name=f"Tiled({ndim}{', ends' if ends else ''})")


@register_model(MapType)
class MapModel(PrimitiveModel):
    def __init__(self, manager: Any, ty: MapType) -> None:
        super().__init__(manager, ty, _MAP.as_pointer())

    def from_argument(self, builder: ir.IRBuilder, value: Any) -> Any:
        """Return `value`, an argument of the kernel that is a tensor map.

        Also mark all such arguments of the kernel as passed by value and read-only.
        """
        function = builder.function
        if not value.attributes.align:
            # Numba removes the first argument later. The positions therefore start at 1.
            places = [n for n, x in enumerate(function.args) if x.type == _MAP.as_pointer()]
            for place in places:
                # The blank keeps llvmlite from writing the pointee type, which NVVM rejects.
                set.add(function.args[place].attributes, "byval ")
                function.args[place].attributes.align = _ALIGNMENT
            found = cgutils.get_or_insert_named_metadata(builder.module, "nvvm.annotations")
            which = builder.module.add_metadata([ir.Constant(_I32, n) for n in places])
            name = ir.MetaDataString(builder.module, "grid_constant")
            found.add(builder.module.add_metadata((function, name, which)))
        return value


@register_model(TiledType)
class TiledModel(StructModel):
    def __init__(self, manager: Any, ty: TiledType) -> None:
        members = [("map", MapType()), ("shape", types.UniTuple(types.int64, ty.ndim))]
        if ty.ends:
            members.append(("steps", types.UniTuple(types.int64, ty.ndim - 1)))
        super().__init__(manager, ty, members)


make_attribute_wrapper(TiledType, "shape", "shape")
make_attribute_wrapper(TiledType, "steps", "steps")
tiled_type = TiledType


@dataclass(frozen=True)
class TiledArray:
    """A 4-D array (batch, heads, rows, columns) that a kernel copies in boxes.

    A box is a block of ``rows`` rows that the copy engine (TMA) moves in one copy. A row has 128
    bytes: 128 columns of 8 bits, 64 of 16 bits, or 32 of float32. The tensor map describes the
    array to the copy engine. The fields ``heads`` and ``ends`` decide its axes:

        heads     ends    axes of the tensor map, the outermost axis first
        1         False   batch, head, row, column
        n > 1     False   batch, group, row, head of the group, column
        1         True    back, end, row, column
        n > 1     True    back, end, row, head of the group, column

    With n heads, neighbouring heads form groups of n heads. A box has rows // n rows of each head
    of the group, ordered by row.

    ``ends`` is for arrays in which sequences follow each other. The last box of a sequence may
    reach into the next sequence. With ``ends``, the rows of the next sequence are outside of the
    tensor map. The copy engine reads them as zeros, and does not write them.

    An index is outside of the map if it is not below the length of its axis. The axis "row" has the
    length ``WRAPS``. Consider a sequence of N rows that ends before row e of batch entry b and head
    h. A box that begins at row r of this sequence has these indices:

        axis   index
        back   ``WRAPS``, which subtracts ``WRAPS`` rows: addresses wrap around at 2^64
        end    b steps[0] + h steps[1] + e steps[2], the end of the sequence in memory
        row    r + ``WRAPS`` - N, so that row N of the sequence is outside

    The axis "back" is needed because a map must not begin before the memory of the array.
    """

    array: Any
    rows: int
    dtype: str
    heads: int = 1
    ends: bool = False

    @property
    def layout(self) -> BoxLayout:
        """Return the axes of the tensor map."""
        batches, heads, rows, columns = self.array.shape
        used = used_strides(self.array.shape, self.array.strides, DTYPES[self.dtype].bytes)
        of_batch, of_head, of_row, of_column = used
        if rows == 1:  # a map with ``ends`` has more rows
            of_row = STEP_BYTES
        shape, strides, box = [rows], [of_row], [self.rows // self.heads]
        if self.heads > 1:
            shape, strides, box = [*shape, self.heads], [*strides, of_head], [*box, self.heads]
        shape, strides = [heads // self.heads, *shape], [of_head * self.heads, *strides]
        shape, strides = [batches, *shape], [of_batch, *strides]
        steps: tuple[int, ...] = ()
        if self.ends:
            most = batches - 1, shape[1] - 1, rows
            moves = of_batch, strides[1], of_row
            step = gcd(*moves)
            steps = tuple(move // step for move in moves)
            ends = 1 + sum(map(operator.mul, most, steps))
            if ends > WRAPS:
                raise ValueError(
                    f"an array of shape {self.array.shape} and strides {self.array.strides} is too "
                    f"large for a tensor map: it must span at most {WRAPS} steps of {step} bytes, "
                    f"got {ends}"
                )
            shape[:3], strides[:2] = [2 * WRAPS, ends, WRAPS], [(1 << 34) - of_row, step]
        box = [1, 1, *box, ROW_BYTES // DTYPES[self.dtype].bytes]
        return BoxLayout((*shape, columns), (*strides, of_column), tuple(box), steps)


_DTYPES = {
    "float32": driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
    "float16": driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
    "float8_e4m3fn": driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT8,
    "bfloat16": driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
}


def encoded(tiled: TiledArray, address: int) -> driver.CUtensorMap:
    """Return the tensor map of ``tiled``, with the array's memory at ``address``.

    Raise RuntimeError if the driver refuses the map.
    """
    layout = tiled.layout
    shape = [driver.cuuint64_t(n) for n in reversed(layout.shape)]
    # The driver checks the strides of axes of length 1 too.
    pairs = zip(layout.shape, layout.strides, strict=True)
    steps = [STEP_BYTES if n == 1 else s for n, s in pairs]
    strides = [driver.cuuint64_t(n) for n in steps[-2::-1]]
    box = [driver.cuuint32_t(n) for n in reversed(layout.box)]
    result = driver.cuTensorMapEncodeTiled(
        _DTYPES[tiled.dtype],
        len(shape),
        address,
        shape,
        strides,
        box,
        [driver.cuuint32_t(1)] * len(shape),
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if result[0] != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(
            f"the driver could not make a tensor map of {tiled.array}: {result[0].name}"
        )
    return result[1]
