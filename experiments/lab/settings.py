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


def fa2_setting(seqlen: int, head_dim: int, causal: bool = False) -> Problem:
    """Batch and heads as FA-2 sets them; at least one of each for sizes beyond its grid."""
    heads = max(1, HIDDEN // head_dim)
    return Problem(
        batch=max(1, TOKENS // seqlen),
        heads_q=heads,
        heads_k=heads,
        seqlen_q=seqlen,
        seqlen_k=seqlen,
        head_dim=head_dim,
        causal=causal,
    )


def one_head(seqlen: int, head_dim: int, causal: bool = False) -> Problem:
    """One batch entry, one head."""
    return Problem(1, 1, 1, seqlen, seqlen, head_dim, causal=causal)


class Inputs:
    """Standard normal q, k and v: the first numbers of three streams, drawn once.

    With `gradient` dout too, of a fourth stream.
    """

    def __init__(self, *, gradient: bool = False) -> None:
        self._drawn: tuple[np.ndarray, ...] = ()
        self._streams = 4 if gradient else 3

    def __call__(self, problem: Problem) -> tuple[np.ndarray, ...]:
        shapes = (problem.q_shape, problem.k_shape, problem.k_shape, problem.q_shape)
        shapes = shapes[: self._streams]
        sizes = [int(np.prod(shape)) for shape in shapes]
        if not self._drawn or self._drawn[0].size < max(sizes):
            streams = np.random.SeedSequence(SEED).spawn(self._streams)
            self._drawn = tuple(
                np.random.default_rng(stream).standard_normal(max(sizes), dtype=np.float32)
                for stream in streams
            )
        return tuple(
            drawn[:size].reshape(shape)
            for drawn, size, shape in zip(self._drawn, sizes, shapes, strict=True)
        )
