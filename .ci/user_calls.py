"""Right and wrong calls of fa_numba, which mypy must recognise: python -m mypy .ci/user_calls.py

`make lint` runs the command. A wrong call has a comment ``type: ignore`` with the code of its
error. If mypy finds no error in a wrong call, it reports that the comment is not needed. The calls
in this file are never executed.
"""

from typing import Any, Literal, assert_type

import numpy as np
from numpy.typing import NDArray

import fa_numba
from fa_numba import reference
from fa_numba.problem import Problem
from fa_numba.typing import Algorithm, Array

Halves = NDArray[np.float16]


def right(q: Halves, lse: NDArray[np.float32], tensor: Any, flag: bool) -> None:
    """Make calls without an error. A result has the type of q."""
    assert_type(fa_numba.attention(q, q, q), Halves)
    assert_type(fa_numba.attention(q, q, q, return_lse=False), Halves)
    assert_type(fa_numba.attention(q, q, q, return_lse=True), tuple[Halves, Any])
    assert_type(fa_numba.attention(q, q, q, return_lse=flag), Any)
    assert_type(fa_numba.attention(tensor, tensor, tensor), Any)
    assert_type(fa_numba.flash_attention_1(q, q, q, query_splits=2), Halves)
    assert_type(fa_numba.flash_attention_2(q, q, q, kv_splits="auto", scale=None), Halves)
    assert_type(fa_numba.standard_attention(q, q, q, return_lse=True), tuple[Halves, Any])
    assert_type(fa_numba.softmax(lse), NDArray[np.float32])
    assert_type(Problem.from_shapes(q.shape, q.shape, causal=True, scale=None), Problem)
    assert_type(fa_numba.merge([q, q], [lse, lse]), tuple[Halves, Any])
    assert_type(reference.attention(q, q, q), NDArray[Any])
    assert_type(reference.attention(q, q, q, return_lse=True), tuple[NDArray[Any], NDArray[Any]])
    masks: dict[str, Any] = {"causal": True, "window": (8, None)}
    fa_numba.attention(q, q, q, algorithm="fa1", tiles=fa_numba.Tiles(64, 64), **masks)
    fa_numba.attention(q, q, q, score_mod=lambda score, b, h, i, j: score - j, bias=lse)
    options = fa_numba.AttentionOptions(causal=True, kv_lens=[3], layout="bnhd", seed=1)
    dq, dk, dv = fa_numba.attention_backward(q, q, q, q, q, lse, unit="mma", **options)
    dq, dk, dv, dbias = fa_numba.attention_backward(q, q, q, q, q, lse, return_dbias=True)
    plan = fa_numba.plan(q.shape, q.shape, bias=(1, 1, 4, 4), passes="bwd", group_splits=2)
    assert_type(plan, fa_numba.Plan)
    name: Algorithm
    for name in ("fa1", "fa2"):
        fa_numba.attention(q, q, q, algorithm=name)


def generic(array: Array) -> Array:
    """Return attention of an array of any library."""
    return fa_numba.attention(array, array, array)


def wrong(q: Halves, lse: NDArray[np.float32]) -> None:
    """Make calls that each have one error."""
    fa_numba.attention(q, q, q, is_causal=True)  # type: ignore[call-overload]
    fa_numba.attention(q, q, q, causal="yes")  # type: ignore[call-overload]
    fa_numba.attention(q, q, q, True)  # type: ignore[call-overload]
    fa_numba.attention(q, q)  # type: ignore[call-overload]
    fa_numba.attention(q, q, [1.0])  # type: ignore[call-overload]
    fa_numba.attention([1.0], q, q)  # type: ignore[call-overload]
    fa_numba.attention(q, q, q, algorithm="fa3")  # type: ignore[call-overload]
    fa_numba.attention(q, q, q, unit="wmma")  # type: ignore[call-overload]
    fa_numba.attention(q, q, q, tiles=(64, 64))  # type: ignore[call-overload]
    fa_numba.attention(q, q, q, window=8)  # type: ignore[call-overload]
    fa_numba.attention(q, q, q, layout="nhd")  # type: ignore[call-overload]
    fa_numba.attention(q, q, q, precision="tf32")  # type: ignore[call-overload]
    fa_numba.attention(q, q, q, bias=(1, 1, 4, 4))  # type: ignore[call-overload]
    fa_numba.attention(q, q, q, score_mod=2.0)  # type: ignore[call-overload]
    fa_numba.attention(q, q, q, kv_splits="all")  # type: ignore[call-overload]
    fa_numba.attention(q, q, q, return_lse=True).sum()  # type: ignore[attr-defined]
    fa_numba.flash_attention_1(q, q, q, kv_splits=2)  # type: ignore[call-overload]
    fa_numba.flash_attention_2(q, q, q, query_splits=2)  # type: ignore[call-overload]
    fa_numba.standard_attention(q, q, q, ablate=("swizzle",))  # type: ignore[call-overload]
    fa_numba.attention_backward(q, q, q, q, q)  # type: ignore[call-arg]
    fa_numba.attention_backward(q, q, q, q, q, lse, return_lse=True)  # type: ignore[call-arg]
    fa_numba.attention_backward(q, q, q, q, q, lse, causal=0.5)  # type: ignore[arg-type]
    fa_numba.attention_backward(q, q, q, q, q, lse, algorithm="fa3")  # type: ignore[arg-type]
    fa_numba.flash_attention_1_backward(q, q, q, q, q, lse, deterministic=True)  # type: ignore[call-arg]
    fa_numba.plan(q.shape, q.shape, is_causal=True)  # type: ignore[call-arg]
    fa_numba.plan(q.shape, q.shape, passes="both")  # type: ignore[arg-type]
    fa_numba.plan(q, q)  # type: ignore[arg-type]
    fa_numba.merge(q, lse)  # type: ignore[arg-type]
    reference.attention(q, q, q, is_causal=True)  # type: ignore[call-overload]
    fa_numba.AttentionOptions(is_causal=True)  # type: ignore[typeddict-unknown-key]
    Problem.from_shapes(q.shape, q.shape, is_causal=True)  # type: ignore[call-arg]
    Problem.from_shapes(q.shape, q.shape, causal="yes")  # type: ignore[arg-type]


def of_literals(flag: Literal[True], q: Halves) -> tuple[Halves, Any]:
    """Return a tuple, because the type of the flag is always True."""
    return fa_numba.attention(q, q, q, return_lse=flag)
