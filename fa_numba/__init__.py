"""FlashAttention's two loop orders in Numba CUDA: to run, to count and to compare."""

import signal
import sys

if sys.argv[:1] == ["-m"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # python -m fa_numba is on its way: interrupted, it ends without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

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
    "reference",
    "show_config",
    "softmax",
    "standard_attention",
    "standard_attention_backward",
]


__version__ = version()
