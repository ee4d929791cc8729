"""Problem sizes of the papers, and inputs for them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np

from fa_numba.problem import Problem

from ..record import Options

# FA-2, section 4.1: 16k tokens in all, hidden dimension 2048.
TOKENS = 16384
HIDDEN = 2048
SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)
HEAD_DIMS = (64, 128)
SEED = 20220527
# Flash-Decoding's micro-benchmark: query heads on heads of K and V, d=128, and (batch, keys), whose
# product is fixed but for the last.
DECODING_HEADS = (16, 2)
DECODING = tuple((max(1, 65536 // N), N) for N in (2**n for n in range(8, 18)))


def fa2_setting(
    seqlen: int, head_dim: int, causal: bool = False, dtype: str = "float32"
) -> Problem:
    """FA-2's benchmark: 16k tokens, hidden dimension 2048, one batch entry and head at least."""
    heads = max(1, HIDDEN // head_dim)
    sizes = max(1, TOKENS // seqlen), heads, heads, seqlen, seqlen, head_dim
    return Problem(*sizes, dtype=dtype, causal=causal)


def fa2_problems(
    options: Options, dtypes: Iterable[str], seqlens: Sequence[int], quick: Sequence[int]
) -> list[Problem]:
    """By dtype, head dimension, mask and length: what the options ask for; else all lengths, the
    paper's head dimensions and both masks, or, quick, `quick` lengths, d=64 and no mask.
    """
    few = options.quick
    of = (quick if few else seqlens, HEAD_DIMS[: 1 if few else None], (False, True)[: 2 - few])
    return [
        problem
        for dtype in dtypes
        for problem in options.grid(partial(fa2_setting, dtype=dtype), *of)
    ]


def padded_lengths(problem: Problem, most: int) -> list[int]:
    """Of each batch entry, up to ``most`` rows short of the longest; drawn anew for each N."""
    N, rng = problem.seqlen_q, np.random.default_rng([SEED, problem.seqlen_q])
    return rng.integers(max(1, N - most), N + 1, problem.batch).tolist()


def one_head(seqlen: int, head_dim: int, causal: bool = False, dtype: str = "float32") -> Problem:
    return Problem(1, 1, 1, seqlen, seqlen, head_dim, dtype=dtype, causal=causal)


def held(x: np.ndarray, dtype: str) -> np.ndarray:
    """`x`, a float32 array, rounded or cut to numbers that `dtype` holds exactly; float32 still."""
    if dtype == "float16":
        return x.astype(np.float16).astype(np.float32)
    if dtype == "bfloat16":  # the upper half of a float32
        return (x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    return x


class Inputs:
    """`inputs(problem)` gives q, k and v, with `gradient` dout: the first numbers of standard
    normal streams, drawn once, float32 that the problem's dtype holds exactly.
    """

    def __init__(self, *, gradient: bool = False) -> None:
        self._drawn: dict[str, tuple[np.ndarray, ...]] = {}
        self._streams = 4 if gradient else 3

    def __call__(self, problem: Problem) -> tuple[np.ndarray, ...]:
        every = (problem.q_shape, problem.k_shape, problem.k_shape, problem.q_shape)
        shapes = every[: self._streams]
        sizes = [math.prod(shape) for shape in shapes]
        drawn = self._drawn.get(problem.dtype, ())
        if not drawn or drawn[0].size < max(sizes):
            drawn = self._draw(max(sizes), problem.dtype)
        return tuple(
            stream[:size].reshape(shape)
            for stream, size, shape in zip(drawn, sizes, shapes, strict=True)
        )

    def _draw(self, size: int, dtype: str) -> tuple[np.ndarray, ...]:
        def stream(seed: np.random.SeedSequence) -> np.ndarray:
            return held(np.random.default_rng(seed).standard_normal(size, np.float32), dtype)

        with ThreadPoolExecutor() as pool:  # NumPy draws and rounds without Python's lock
            seeds = np.random.SeedSequence(SEED).spawn(self._streams)
            self._drawn[dtype] = tuple(pool.map(stream, seeds))
        return self._drawn[dtype]
