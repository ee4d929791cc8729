"""FlashAttention's two loop orders in Numba CUDA: to run, to count and to compare."""

import configparser
import signal
import sys
from importlib import metadata
from pathlib import Path

if sys.argv[:1] == ["-m"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # python -m fa_numba is on its way: interrupted, it ends without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from fa_numba import algorithms, io_model, reference
from fa_numba.device import count_accesses
from fa_numba.dropout import dropout_mask
from fa_numba.host.plans import Plan
from fa_numba.kv_cache import append_kv
from fa_numba.ops import (
    attention,
    attention_backward,
    flash_attention_1,
    flash_attention_1_backward,
    flash_attention_2,
    flash_attention_2_backward,
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
    "dropout_mask",
    "flash_attention_1",
    "flash_attention_1_backward",
    "flash_attention_2",
    "flash_attention_2_backward",
    "io_model",
    "plan",
    "reference",
    "softmax",
    "standard_attention",
    "standard_attention_backward",
]


def _version() -> str:
    """The version in setup.cfg of the source tree; of an installed package that of its metadata."""
    source = configparser.ConfigParser()
    source.read(Path(__file__).parent.parent / "setup.cfg", encoding="utf-8")
    if source.get("metadata", "name", fallback="") == "fa_numba":
        return source["metadata"]["version"]
    return metadata.version("fa_numba")


__version__ = _version()
