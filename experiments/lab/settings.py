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
    """Standard normal q, k and v: the first numbers of three streams, drawn once."""

    def __init__(self) -> None:
        self._drawn: tuple[np.ndarray, ...] = ()

    def __call__(self, problem: Problem) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        sizes = [int(np.prod(s)) for s in (problem.q_shape, problem.k_shape, problem.k_shape)]
        if not self._drawn or self._drawn[0].size < max(sizes):
            streams = np.random.SeedSequence(SEED).spawn(3)
            self._drawn = tuple(
                np.random.default_rng(stream).standard_normal(max(sizes), dtype=np.float32)
                for stream in streams
            )
        q, k, v = (drawn[:size] for drawn, size in zip(self._drawn, sizes, strict=True))
        return (
            q.reshape(problem.q_shape),
            k.reshape(problem.k_shape),
            v.reshape(problem.k_shape),
        )
