"""What is to be computed: sizes, dtype, scale and mask, with every check and its message."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np

DTYPES = ("float32",)
MAX_HEAD_DIM = 256

_AXES = ("batch", "heads", "seqlen", "head_dim")
_SIZES = ("batch", "heads_q", "heads_k", "seqlen_q", "seqlen_k", "head_dim")


def as_size(name: str, value: Any, axis: bool = True) -> int:
    """`value` as an int >= 1; else a TypeError or ValueError that calls it `name`."""
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError
        size = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is {value!r}: allowed is an integer >= 1") from None
    if size < 1:
        empty = ", an empty axis" if axis and size == 0 else ""
        raise ValueError(f"{name} is {size}{empty}: allowed is an integer >= 1")
    return size


def _as_scale(value: Any, head_dim: int) -> float:
    if value is None:
        return 1.0 / math.sqrt(head_dim)
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Real):
        raise TypeError(f"scale is {value!r}: allowed is a finite real number, or None")
    # The kernels multiply by scale log2(e), in float32.
    largest = float(np.finfo(np.float32).max) / math.log2(math.e)
    try:
        scale = float(value)
    except OverflowError:  # an integer beyond float64
        scale = math.inf
    if not abs(scale) <= largest:  # negated, so that NaN is refused
        raise ValueError(
            f"scale is {value!r}: allowed is a finite number, at most {largest:.3g} in magnitude "
            "(float32), or None"
        )
    if scale and not np.float32(scale):
        raise ValueError(f"scale is {value!r}: it rounds to 0 in float32, allowed is 0.0 itself")
    return scale


def _as_shape(name: str, shape: Sequence[int]) -> tuple[int, ...]:
    try:
        shape = tuple(shape)
    except TypeError:
        raise TypeError(
            f"{name} has shape {shape!r}: allowed is a sequence of four sizes"
        ) from None
    if len(shape) != len(_AXES):
        raise ValueError(
            f"{name} has shape {shape} of rank {len(shape)}: allowed is rank 4, "
            f"({', '.join(_AXES)})"
        )
    return tuple(
        as_size(f"{axis} of {name}, shape {shape},", n)
        for axis, n in zip(_AXES, shape, strict=True)
    )


def _same(axis: str, name: str, shape: tuple[int, ...], of: str, of_shape: tuple[int, ...]) -> None:
    got, allowed = shape[_AXES.index(axis)], of_shape[_AXES.index(axis)]
    if got != allowed:
        raise ValueError(
            f"{name} has {axis} {got} (shape {shape}): "
            f"allowed is {allowed}, as {of} has it (shape {of_shape})"
        )


@dataclass(frozen=True)
class Problem:
    """One attention call: O = softmax(scale Q K^T, masked) V for every batch entry and head.

    Q and O are (batch, heads_q, seqlen_q, head_dim), K and V (batch, heads_k, seqlen_k, head_dim).
    Query head h reads K/V head h // group. `scale` multiplies the scores; None stands for
    1/sqrt(head_dim) and is stored as that number. `causal` aligns the mask to the bottom right:
    row i sees columns j <= i + seqlen_k - seqlen_q.

    Raises TypeError or ValueError with the argument's name, its value and what is allowed.
    """

    batch: int
    heads_q: int
    heads_k: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    dtype: str = "float32"
    scale: float = None  # type: ignore[assignment]  # None goes in, a float is read
    causal: bool = False

    def __post_init__(self) -> None:
        for name in _SIZES:
            object.__setattr__(self, name, as_size(name, getattr(self, name)))
        if self.head_dim > MAX_HEAD_DIM:
            raise ValueError(f"head_dim is {self.head_dim}: allowed is 1 to {MAX_HEAD_DIM}")
        if self.heads_q % self.heads_k:
            raise ValueError(
                f"heads_k is {self.heads_k} with heads_q {self.heads_q}: "
                f"allowed is a divisor of {self.heads_q}"
            )
        if not isinstance(self.dtype, str):
            raise TypeError(f"dtype is {self.dtype!r}: allowed is a name, {' or '.join(DTYPES)}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}: allowed is {' or '.join(DTYPES)}")
        if not isinstance(self.causal, bool):
            raise TypeError(f"causal is {self.causal!r}: allowed is True or False")
        object.__setattr__(self, "scale", _as_scale(self.scale, self.head_dim))

    @classmethod
    def from_shapes(
        cls,
        q_shape: Sequence[int],
        k_shape: Sequence[int],
        v_shape: Sequence[int] | None = None,
        *,
        dtype: str = "float32",
        scale: float | None = None,
        causal: bool = False,
    ) -> Problem:
        """The problem of q, k and v with these shapes; v's is k's unless given."""
        q = _as_shape("q", q_shape)
        k = _as_shape("k", k_shape)
        _same("batch", "k", k, "q", q)
        _same("head_dim", "k", k, "q", q)
        if q[3] > MAX_HEAD_DIM:
            raise ValueError(f"q has head_dim {q[3]} (shape {q}): allowed is 1 to {MAX_HEAD_DIM}")
        if q[1] % k[1]:
            raise ValueError(
                f"k has heads {k[1]} (shape {k}): allowed is a divisor of {q[1]}, "
                f"the heads of q (shape {q})"
            )
        if v_shape is not None:
            v = _as_shape("v", v_shape)
            for axis in _AXES:
                _same(axis, "v", v, "k", k)
        return cls(
            batch=q[0],
            heads_q=q[1],
            heads_k=k[1],
            seqlen_q=q[2],
            seqlen_k=k[2],
            head_dim=q[3],
            dtype=dtype,
            scale=scale,  # type: ignore[arg-type]
            causal=causal,
        )

    @property
    def group(self) -> int:
        """Query heads that share one K/V head."""
        return self.heads_q // self.heads_k

    @property
    def diagonal(self) -> int:
        """seqlen_k - seqlen_q: the last column that row 0 sees when causal."""
        return self.seqlen_k - self.seqlen_q

    @property
    def q_shape(self) -> tuple[int, int, int, int]:
        """Shape of Q and O."""
        return self.batch, self.heads_q, self.seqlen_q, self.head_dim

    @property
    def k_shape(self) -> tuple[int, int, int, int]:
        """Shape of K and V."""
        return self.batch, self.heads_k, self.seqlen_k, self.head_dim

    @property
    def lse_shape(self) -> tuple[int, int, int]:
        """Shape of L (and of FA-1's l and m)."""
        return self.batch, self.heads_q, self.seqlen_q

    @overload
    def columns_end(self, row: int) -> int: ...
    @overload
    def columns_end(self, row: np.ndarray) -> np.ndarray: ...
    def columns_end(self, row: int | np.ndarray) -> int | np.ndarray:
        """How many columns `row` sees, 0 to seqlen_k: they are 0 .. columns_end(row) - 1."""
        end = np.full_like(row, self.seqlen_k)
        if self.causal:
            end = np.clip(row + self.diagonal + 1, 0, self.seqlen_k)
        return end if isinstance(row, np.ndarray) else int(end)
