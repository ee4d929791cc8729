"""The options of attention: what a caller names, what a kernel is compiled for, what it is passed.

An option is on only where a caller gives it, and a kernel has an argument only for those that are
on: a plain call compiles to the plain kernel.
"""

from __future__ import annotations

import functools
from collections import namedtuple
from dataclasses import dataclass, fields, replace
from typing import Any, TypedDict

import numpy as np
from numba import types

from fa_numba.device import array_type
from fa_numba.problem import Problem


class AttentionOptions(TypedDict, total=False):
    """What changes the result; the same for every function, forward and backward.

    ``scale``: float, multiplies the scores; 1/sqrt(d) unless given.
    ``causal``: bool, row i sees the columns j <= i + Nk - Nq.
    ``window``: (left, right), row i sees i + Nk - Nq - left <= j <= i + Nk - Nq + right;
        -1 leaves a side open. Tiles wholly outside are not visited.
    ``softcap``: float c, scores become c tanh(s / c), before biases and masks.
    ``bias``: float32 array that broadcasts to (B, Hq, Nq, Nk), added to the scores.
    ``alibi_slopes``: float32 (Hq,) or (B, Hq), adds -slope |i + Nk - Nq - j| to the scores.
    ``q_lens``, ``kv_lens``: int32 (B,), the valid rows of each batch entry. What comes after is
        neither read nor seen; its output and gradients are 0. Nq and Nk above are then the valid
        ones.
    ``cu_seqlens_q``, ``cu_seqlens_k``: int32 (B + 1,), cumulative lengths of sequences that lie one
        after the other: q is (total, Hq, d), k and v (total, Hk, d), lse (Hq, total).
    ``block_mask``: bool (ceil(Nq / Br), ceil(Nk / Bc)), or that with leading axes that broadcast to
        (B, Hq), for the block sizes of ``tiles``, which must be given: False blocks are neither
        loaded nor computed (block-sparse FlashAttention; standard attention computes and hides).
    ``dropout_p``: float from 0 to below 1, the probability that an element of P becomes 0; the rest
        are multiplied by 1 / (1 - dropout_p).
    ``seed``, ``offset``: ints from 0 to below 2**64 and 2**32: with them the element's (batch,
        head, row, column) decides alone, see ``dropout_mask``. 0 unless given.

    Lengths on a GPU are read back to be checked: the call waits for them.
    """

    scale: float | None
    causal: bool
    window: tuple[int, int]
    softcap: float | None
    bias: Any
    alibi_slopes: Any
    q_lens: Any
    kv_lens: Any
    cu_seqlens_q: Any
    cu_seqlens_k: Any
    block_mask: Any
    dropout_p: float
    seed: int
    offset: int


_int32, _float32 = types.int32, types.float32
# What each feature passes to a kernel. An integer array is read by all threads of a block at one
# place.
_ARGUMENTS = {
    "window": {"window_left": _int32, "window_right": _int32},
    "softcap": {"softcap": _float32},
    "bias": {"bias": array_type(4)},
    "dbias": {"dbias": array_type(4)},
    "alibi": {"slopes": array_type(2)},
    "q_lens": {"q_lens": array_type(1, _int32)},
    "kv_lens": {"kv_lens": array_type(1, _int32)},
    "packed": {"q_starts": array_type(1, _int32), "k_starts": array_type(1, _int32)},
    "sparse": {"block_mask": array_type(4, types.uint8)},
    "dropout": {
        "threshold": _int32,
        "inverse_keep": _float32,
        "seed_low": _int32,
        "seed_high": _int32,
        "offset": _int32,
    },
}
# Arrays whose elements all threads of a block read together, over and over: not part of the counts
# of accesses.
UNIFORM = ("slopes", "q_lens", "kv_lens", "q_starts", "k_starts", "block_mask")


@dataclass(frozen=True)
class Features:
    """Which options a kernel is compiled for. ``causal`` where no ``window`` has the bound."""

    causal: bool = False
    window: bool = False
    softcap: bool = False
    bias: bool = False
    dbias: bool = False
    alibi: bool = False
    q_lens: bool = False
    kv_lens: bool = False
    packed: bool = False
    sparse: bool = False
    dropout: bool = False

    @classmethod
    def of(cls, problem: Problem, *, dbias: bool = False) -> Features:
        """The features that ``problem`` needs."""
        window = problem.window != (-1, -1)
        return cls(
            causal=problem.causal and not window,
            window=window,
            softcap=problem.softcap is not None,
            bias=problem.bias is not None,
            dbias=dbias,
            alibi=problem.alibi,
            q_lens=problem.q_lens is not None and not problem.packed,
            kv_lens=problem.kv_lens is not None and not problem.packed,
            packed=problem.packed,
            sparse=problem.sparse,
            dropout=problem.dropout_p > 0.0,
        )

    @property
    def right(self) -> bool:
        """Whether a row's columns have an end of their own."""
        return self.causal or self.window

    @property
    def lengths(self) -> bool:
        """Whether the batch entries have lengths of their own."""
        return self.q_lens or self.kv_lens or self.packed

    @property
    def crowds(self) -> bool:
        """Whether some option holds registers of its own throughout the loops."""
        return replace(self, causal=False, dropout=False) != PLAIN

    @property
    def initialises(self) -> bool:
        """Whether some row tile may have no first pass over K/V that could start it."""
        return self.window or self.q_lens or self.sparse

    @property
    def arguments(self) -> dict[str, Any]:
        """Names and Numba types of what these features pass to a kernel."""
        on = (f.name for f in fields(self) if getattr(self, f.name))
        return {name: ty for feature in on for name, ty in _ARGUMENTS.get(feature, {}).items()}

    @property
    def argument_type(self):
        """Numba's type of the kernels' last argument, ``options``."""
        return types.NamedTuple(list(self.arguments.values()), _tuple_class(tuple(self.arguments)))


PLAIN = Features()


@functools.cache
def _tuple_class(names: tuple[str, ...]):
    return namedtuple("Options", names)


def as_word(name: str, value: Any, bits: int) -> int:
    """``value`` as an unsigned integer of ``bits`` bits, or an error that calls it ``name``."""
    allowed = f"allowed is an integer from 0 to below 2**{bits}"
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} is {value!r}: {allowed}")
    if not 0 <= value < 2**bits:
        raise ValueError(f"{name} is {value!r}: {allowed}")
    return int(value)


def drop_threshold(dropout_p: float) -> int:
    """Random words below it drop their element: ``dropout_p`` of 2**32."""
    return min(round(dropout_p * 2**32), 2**32 - 1)
