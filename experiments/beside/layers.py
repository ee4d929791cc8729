"""FLOPs and bytes of the layers of transformer models, by closed forms (for `claims`).

A layer consists of four projections (Q, K, V and the output), attention, and a feed-forward network
(FFN) whose hidden vectors have 4 times the hidden dimension. Each matrix product reads its inputs
and weights once, and writes its result once. Biases, norms and activations are left out.
"""

from typing import NamedTuple

from fa_numba import io_model
from fa_numba.problem import Problem

BYTES = 2  # of an element in fp16
PARTS = ("projections", "attention", "FFN")


class Model(NamedTuple):
    """A transformer model: its name, hidden dimension, heads, mask, and whether it decodes."""

    name: str
    hidden: int
    heads: int
    causal: bool
    decodes: bool = False

    def problem(self, N: int) -> Problem:
        """Return the attention problem of a layer with N keys.

        If the model decodes, there is one query row, for the last of N tokens. Otherwise there are
        N query rows.
        """
        rows, d = 1 if self.decodes else N, self.hidden // self.heads
        return Problem(1, self.heads, self.heads, rows, N, d, causal=self.causal, dtype="float16")


MODELS = (
    Model("BERT-base", 768, 12, False),
    Model("BERT-large", 1024, 16, False),
    Model("GPT-2", 768, 12, True),
    Model("GPT-2, decoding", 768, 12, False, True),  # the only row sees all keys
)


def work(model: Model, N: int, fused: bool) -> dict[str, tuple[int, int]]:
    """Return {part of a layer: (FLOPs, bytes)}.

    If `fused` is true, attention loads Q, K and V once and stores O once. This is the least that
    FlashAttention can move. If `fused` is false, attention also writes and reads S and P.
    """
    problem = model.problem(N)
    h, rows = model.hidden, problem.seqlen_q
    scores = 0 if fused else 4 * model.heads * rows * N
    return {
        "projections": (8 * rows * h * h, BYTES * 4 * (2 * rows * h + h * h)),
        "attention": (io_model.flops(problem), BYTES * (2 * rows * h + 2 * N * h + scores)),
        "FFN": (16 * rows * h * h, BYTES * (10 * rows * h + 8 * h * h)),
    }
