"""FlashAttention's two loop orders in Numba CUDA: to run, to count and to compare."""

from fa_numba import io_model, reference
from fa_numba.device import count_accesses
from fa_numba.ops import (
    Plan,
    attention,
    flash_attention_1,
    flash_attention_2,
    plan,
    standard_attention,
)
from fa_numba.tiles import Tiles

__all__ = [
    "Plan",
    "Tiles",
    "attention",
    "count_accesses",
    "flash_attention_1",
    "flash_attention_2",
    "io_model",
    "plan",
    "reference",
    "standard_attention",
]
