"""Problem sizes of the papers, and inputs for them."""

from __future__ import annotations

import numpy as np

from fa_numba.problem import Problem

# FA-2, section 4.1: 16k tokens in all, hidden dimension 2048.
TOKENS = 16384
HIDDEN = 2048
SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)
HEAD_DIMS = (64, 128)
SEED = 20220527


def fa2_setting(
    seqlen: int, head_dim: int, causal: bool = False, dtype: str = "float32"
) -> Problem:
    """A problem of the FA-2 paper's benchmark: 16k tokens in all, hidden dimension 2048.

    Batch and heads follow from the length and head dimension; both are at least 1.
    """
    heads = max(1, HIDDEN // head_dim)
    return Problem(
        batch=max(1, TOKENS // seqlen),
        heads_q=heads,
        heads_k=heads,
        seqlen_q=seqlen,
        seqlen_k=seqlen,
        head_dim=head_dim,
        dtype=dtype,
        causal=causal,
    )


def one_head(seqlen: int, head_dim: int, causal: bool = False, dtype: str = "float32") -> Problem:
    """A problem of one batch entry and one head."""
    return Problem(1, 1, 1, seqlen, seqlen, head_dim, dtype=dtype, causal=causal)


def held(x: np.ndarray, dtype: str) -> np.ndarray:
    """`x`, a float32 array, rounded or cut to numbers that `dtype` holds exactly; float32 still."""
    if dtype == "float16":
        return x.astype(np.float16).astype(np.float32)
    if dtype == "bfloat16":  # the upper half of a float32
        return (x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    return x


class Inputs:
    """Standard normal q, k and v: the first numbers of three streams, drawn once.

    `inputs(problem)` gives float32 arrays of numbers that the problem's dtype holds exactly. With
    `gradient` it gives dout too, of a fourth stream.
    """

    def __init__(self, *, gradient: bool = False) -> None:
        self._drawn: dict[str, tuple[np.ndarray, ...]] = {}
        self._streams = 4 if gradient else 3

    def __call__(self, problem: Problem) -> tuple[np.ndarray, ...]:
        every = (problem.q_shape, problem.k_shape, problem.k_shape, problem.q_shape)
        shapes = every[: self._streams]
        sizes = [int(np.prod(shape)) for shape in shapes]
        drawn = self._drawn.get(problem.dtype, ())
        if not drawn or drawn[0].size < max(sizes):
            streams = np.random.SeedSequence(SEED).spawn(self._streams)
            drawn = tuple(
                held(
                    np.random.default_rng(stream).standard_normal(max(sizes), dtype=np.float32),
                    problem.dtype,
                )
                for stream in streams
            )
            self._drawn[problem.dtype] = drawn
        return tuple(
            stream[:size].reshape(shape)
            for stream, size, shape in zip(drawn, sizes, shapes, strict=True)
        )
