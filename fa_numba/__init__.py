"""FlashAttention's two loop orders in Numba CUDA: run them, count their accesses, compare them.

=========================== ========================================================================
name                        what it does
=========================== ========================================================================
attention                   attention by one of three algorithms, for arrays of any library
attention_backward          its gradients
standard_attention          the algorithm that stores S and P; ``standard_attention_backward``
flash_attention_1           K/V outer (FlashAttention-1); ``flash_attention_1_backward``
flash_attention_2           Q outer (FlashAttention-2); ``flash_attention_2_backward``
append_kv                   write to a cache of keys and values in pages
quantize                    convert an array to 8-bit floats with scales
merge, merge_backward       combine attention over parts of the keys
create_block_mask           find the blocks of S that a function masks
dropout_mask                which elements dropout keeps
softmax                     the softmax of rows, by three algorithms
plan                        what a call would launch, and what it costs; returns a ``Plan``
count_accesses              run calls on the emulator and count their accesses
show_config                 print versions and devices for a bug report
AttentionOptions, Tiles     the options of attention, and block sizes
algorithms                  the papers' algorithms in NumPy, line by line
io_model                    accesses, FLOPs and workspace in closed form
reference                   attention in float64, to test against
fa_numba.torch              attention for torch with gradients; needs ``import fa_numba.torch``
=========================== ========================================================================

Without a GPU, small calls run on an emulator.

Examples
--------
>>> import numpy as np, fa_numba
>>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 2, 16, 8), np.float32)
>>> fa_numba.attention(q, k, v, causal=True).shape
(1, 2, 16, 8)
"""

from fa_numba import algorithms, io_model, reference
from fa_numba.device import count_accesses
from fa_numba.dropout import dropout_mask
from fa_numba.environment import show_config, version
from fa_numba.host.plans import Plan
from fa_numba.kv_cache import append_kv
from fa_numba.ops import (
    attention,
    attention_backward,
    create_block_mask,
    flash_attention_1,
    flash_attention_1_backward,
    flash_attention_2,
    flash_attention_2_backward,
    merge,
    merge_backward,
    plan,
    softmax,
    standard_attention,
    standard_attention_backward,
)
from fa_numba.options import AttentionOptions
from fa_numba.quantization import quantize
from fa_numba.tiling import Tiles

__all__ = [
    "AttentionOptions",
    "Plan",
    "Tiles",
    "algorithms",
    "append_kv",
    "attention",
    "attention_backward",
    "count_accesses",
    "create_block_mask",
    "dropout_mask",
    "flash_attention_1",
    "flash_attention_1_backward",
    "flash_attention_2",
    "flash_attention_2_backward",
    "io_model",
    "merge",
    "merge_backward",
    "plan",
    "quantize",
    "reference",
    "show_config",
    "softmax",
    "standard_attention",
    "standard_attention_backward",
]


__version__ = version()
