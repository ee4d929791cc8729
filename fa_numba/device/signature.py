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
    """Return the Numba type of the argument O of a kernel that uses the copy engine (TMA).

    argument   meaning
    floats     normally False: the copy engine stores O, in 16 bits. True: threads store O from
               their registers, in float32, and the type is that of a plain array
    ndim       number of axes of O
    ends       the field ``ends`` of the ``TiledArray`` that is passed as O
    """
    return array_type(ndim) if floats else tiled_type(ndim, ends)


def arguments(arrays: Iterable, floats: int, integers: int, options: types.Type) -> tuple:
    """Return the Numba types of a kernel's arguments, in order.

    The types are: the types ``arrays``, then float32 for each of ``floats`` numbers, then int32 for
    each of ``integers`` numbers, and at last the type ``options``.
    """
    return *arrays, *[types.float32] * floats, *[types.int32] * integers, options
