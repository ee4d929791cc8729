"""The Numba types of a kernel's arguments."""

from __future__ import annotations

from collections.abc import Iterable

from numba import types

from fa_numba.device.tensor_map import tiled_type as tiled_type


def array_type(ndim: int, element=types.float32):
    """Return the Numba type of an array of ``element`` with ``ndim`` axes and any strides."""
    return types.Array(element, ndim, "A")


def half_type(ndim: int):
    """Return the Numba type of an array of 16-bit elements, ``ndim`` axes and any strides."""
    return array_type(ndim, types.uint16)


def byte_type(ndim: int):
    """Return the Numba type of an array of 8-bit elements, ``ndim`` axes and any strides."""
    return array_type(ndim, types.uint8)


def result_type(planes: int, ndim: int):
    """Return the Numba type of O: 16-bit with one plane, float32 with several planes.

    With one plane the inputs have 16 bits. With several planes they are float32, split in planes.
    """
    return half_type(ndim) if planes == 1 else array_type(ndim)


def boxed_type(floats: bool, ndim: int, ends: bool = False):
    """Return the Numba type of O in kernels with a copy engine (TMA).

    Normally the copy engine stores O, and O has 16 bits. If ``floats`` is true, O is stored
    directly from registers, in float32. ``ndim`` is the number of axes. ``ends`` is the field of
    ``TiledArray``.
    """
    return array_type(ndim) if floats else tiled_type(ndim, ends)


def arguments(arrays: Iterable, floats: int, integers: int, options: types.Type) -> tuple:
    """Return the Numba types of a kernel's arguments, in order.

    The types are: the types ``arrays``, then float32 for each of ``floats`` numbers, then int32 for
    each of ``integers`` numbers, and at last the type ``options``.
    """
    return *arrays, *[types.float32] * floats, *[types.int32] * integers, options
