"""The Numba types of a kernel's arguments."""

from __future__ import annotations

from collections.abc import Iterable

from numba import types

from fa_numba.device.tensor_map import tiled_type as tiled_type


def array_type(ndim: int, element=types.float32):
    """Numba's type of an array of ``element`` with ``ndim`` axes and any strides."""
    return types.Array(element, ndim, "A")


def half_type(ndim: int):
    """Numba's type of an array of 16-bit elements with ``ndim`` axes and any strides."""
    return array_type(ndim, types.uint16)


def result_type(planes: int, ndim: int):
    """Numba's type of O of 16-bit matrices, or of float32 ones in ``planes`` of these."""
    return half_type(ndim) if planes == 1 else array_type(ndim)


def boxed_type(planes: int, ndim: int, ends: bool = False):
    """Numba's type of O that leaves by TMA tiles, but of planes straight from registers."""
    return tiled_type(ndim, ends) if planes == 1 else array_type(ndim)


def arguments(arrays: Iterable, floats: int, integers: int, options: types.Type) -> tuple:
    """The types of a kernel's arguments: its arrays, so many float32 and int32, and its options."""
    return *arrays, *[types.float32] * floats, *[types.int32] * integers, options
