"""Problem sizes of the papers, and random inputs for problems of any size."""

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
# Flash-Decoding's micro-benchmark, d=128: (query heads, K/V heads), and (batch, keys). The product
# of batch and keys is fixed, except for the last pair.
DECODING_HEADS = (16, 2)
DECODING = tuple((max(1, 65536 // N), N) for N in (2**n for n in range(8, 18)))


def fa2_setting(
    seqlen: int, head_dim: int, causal: bool = False, dtype: str = "float32"
) -> Problem:
    """Return a problem of FA-2's benchmark (section 4.1): 16k tokens, hidden dimension 2048.

    Parameters
    ----------
    seqlen : int
        Rows of Q and of K.
    head_dim : int
        Head dimension. There are 2048 / head_dim heads, at least one.
    causal : bool, default False
        Whether the mask is causal.
    dtype : str, default "float32"
        Dtype.

    Returns
    -------
    Problem
        The problem. It has 16384 / seqlen batch entries, at least one.

    Examples
    --------
    >>> problem = fa2_setting(1024, 64)
    >>> problem.batch, problem.heads_q
    (16, 32)
    """
    heads = max(1, HIDDEN // head_dim)
    sizes = max(1, TOKENS // seqlen), heads, heads, seqlen, seqlen, head_dim
    return Problem(*sizes, dtype=dtype, causal=causal)


def fa2_problems(
    options: Options, dtypes: Iterable[str], seqlens: Sequence[int], quick: Sequence[int]
) -> list[Problem]:
    """Return the problems of FA-2's benchmark that match the user's choices.

    Parameters
    ----------
    options : Options
        The user's choices. If the user chose no head dimension, both head dimensions of the paper
        are taken. If the user chose no mask, there are problems with and without the causal mask. A
        quick run has head dimension 64 and no mask, unless the user chose others.
    dtypes : iterable of str
        Dtypes.
    seqlens : sequence of int
        Lengths of a complete run.
    quick : sequence of int
        Lengths of a quick run.

    Returns
    -------
    list of Problem
        Problems in the order of dtype, head dimension, mask and length.
    """
    few = options.quick
    of = (quick if few else seqlens, HEAD_DIMS[: 1 if few else None], (False, True)[: 2 - few])
    return [
        problem
        for dtype in dtypes
        for problem in options.grid(partial(fa2_setting, dtype=dtype), *of)
    ]


def padded_lengths(problem: Problem, most: int) -> list[int]:
    """Return valid lengths for the batch entries of a problem, drawn from a fixed seed.

    Parameters
    ----------
    problem : Problem
        The problem.
    most : int
        Greatest number of rows by which a batch entry is shorter than `problem.seqlen_q`.

    Returns
    -------
    list of int
        One length per batch entry. Problems with different sequence lengths get different random
        numbers, because the seed depends on the sequence length.
    """
    N, rng = problem.seqlen_q, np.random.default_rng([SEED, problem.seqlen_q])
    return rng.integers(max(1, N - most), N + 1, problem.batch).tolist()


def one_head(seqlen: int, head_dim: int, causal: bool = False, dtype: str = "float32") -> Problem:
    """Return a problem with one batch entry and one head.

    Parameters
    ----------
    seqlen : int
        Rows of Q and of K.
    head_dim : int
        Head dimension.
    causal : bool, default False
        Whether the mask is causal.
    dtype : str, default "float32"
        Dtype.

    Returns
    -------
    Problem
        The problem.
    """
    return Problem(1, 1, 1, seqlen, seqlen, head_dim, dtype=dtype, causal=causal)


def held(x: np.ndarray, dtype: str) -> np.ndarray:
    """Convert float32 numbers to numbers that a dtype represents exactly.

    Parameters
    ----------
    x : ndarray of float32
        Numbers.
    dtype : str
        "float32", "float16" (rounds) or "bfloat16" (cuts off the lower 16 bits).

    Returns
    -------
    ndarray of float32
        The numbers, still in float32.
    """
    if dtype == "float16":
        return x.astype(np.float16).astype(np.float32)
    if dtype == "bfloat16":  # the upper half of a float32
        return (x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    return x


class Inputs:
    """Random inputs of any problem: ``inputs(problem)`` returns q, k and v.

    The numbers are standard normal, from a fixed seed. The arrays are float32, with numbers that
    the problem's dtype represents exactly. The numbers of a dtype are drawn once and kept. They are
    drawn again only if a problem is larger than all earlier problems. A smaller problem gets the
    first of the kept numbers.

    Parameters
    ----------
    gradient : bool, default False
        Whether a fourth array is returned: dout, the gradient of the output.

    Examples
    --------
    >>> q, k, v = Inputs()(one_head(8, 4))
    >>> q.shape, q.dtype.name
    ((1, 1, 8, 4), 'float32')
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
