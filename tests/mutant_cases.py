"""What notices faults planted in kernels, parts and emulations: small calls on the emulator, held
against float64 and the closed form of the accesses.

Each has tiles enough that every loop repeats and every edge is ragged. Beside them stand tests of
other files that are about a kernel of their own.
"""

import inspect
import itertools
import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import conftest
import fresh_memory
import numpy as np
import pytest
import rooms  # noqa: F401
import test_append_e4m3
import test_append_kv
import test_choices
import test_e4m3
import test_e4m3_pages
import test_group_splits
import test_held
import test_inputs
import test_intrinsics
import test_kv_splits
import test_launch_cache
import test_limits
import test_merge
import test_mma_swizzle
import test_mods
import test_options
import test_pages
import test_passes
import test_plans
import test_precision
import test_prefix
import test_ptx
import test_ptx_statements
import test_ptx_warpgroup
import test_quantize
import test_recorded_launches
import test_ring
import test_ring_steps
import test_softmax
import test_torch_stand_in
import test_value_dim
import test_wgmma_backward as backward_on_hopper
import test_wgmma_emulated as on_hopper
from backward_helpers import (
    ALL_WAYS,
    NAMES,
    asked,
    differentiate,
    each,
    floats_of,
    names_of,
    random_gradients,
    saved_for,
    wanted_gradients,
)
from helpers import (
    ALGORITHMS,
    ROUNDING,
    assert_no_growth,
    assert_within,
    attend,
    changing,
    truth,
)

from fa_numba import Tiles
from fa_numba.host import planning
from fa_numba.host import standard as planned_standard
from fa_numba.integers import ceil_div


@dataclass(frozen=True, eq=False)
class Case:
    """A problem (B, Hq, Hk, Nq, Nk, d) and how to run it; packed, Nq and Nk are totals of B = 1."""

    shape: tuple[int, ...]
    tiles: Tiles
    options: Mapping = field(default_factory=dict)
    query_splits: int = 1
    layout: str = "padded"
    low: bool = False  # scores far below 0
    peaked: bool = True  # the last columns weigh most
    resident: bool = True  # rows of S in shared memory
    few: "Case | None" = None  # the same in fewer passes, which must err as much
    page_size: int = 0  # K and V in pages of so many rows, of `kv_lens` rows each


CAUSAL = {"causal": True}
CASES = {}
BACKWARD_CASES = {}

# Three tiles each way, two warps or more a block, the last tile of each axis ragged.
CASES["plain"] = (Case((1, 2, 1, 21, 23, 8), Tiles(8, 8, 64)),)
CASES["causal"] = (
    Case((1, 1, 1, 37, 11, 4), Tiles(8, 8, 32), CAUSAL),  # whole row tiles that see no column
    Case((1, 1, 1, 24, 24, 4), Tiles(8, 8, 64), CAUSAL),  # the diagonal meets corners of tiles
    Case((1, 1, 1, 23, 24, 4), Tiles(8, 8, 64), CAUSAL, 3),  # and passes one column beyond them
    Case((1, 2, 1, 21, 19, 8), Tiles(8, 8, 64), CAUSAL),  # rows 0 and 1 see no column
    Case((1, 2, 1, 17, 39, 6), Tiles(8, 16, 64), CAUSAL, 2),
)
CASES["odd"] = (Case((2, 4, 2, 6, 35, 5), Tiles(4, 16, 32), layout="odd"),)
CASES["long"] = (Case((1, 1, 1, 5, 200, 4), Tiles(8, 64, 64), low=True),)  # two warps for a row
# Every tile is swizzled, two rows of Q are read at once.
CASES["swizzled"] = (Case((1, 1, 1, 37, 40, 32), Tiles(32, 32, 32)),)
BACKWARD_CASES["swizzled"] = CASES["swizzled"]
# Tiles without a ragged edge, behind which nothing may be visited.
CASES["whole"] = (
    Case((1, 2, 1, 16, 32, 8), Tiles(8, 16), CAUSAL, 2),
    Case((2, 1, 1, 16, 16, 8), Tiles(8, 8), {"q_lens": [16, 8], "kv_lens": [16, 8]}),
)
BACKWARD_CASES["whole"] = (
    Case((1, 2, 1, 16, 32, 8), Tiles(8, 16), CAUSAL, 2),
    Case((2, 1, 1, 16, 32, 8), Tiles(8, 16), {"q_lens": [16, 8], "kv_lens": [16, 32]}),
)
# Threads with several fours of the head dimension.
CASES["wide"] = (
    Case((1, 2, 1, 21, 23, 40), Tiles(16, 16, 32), CAUSAL, 2),
    Case((1, 1, 1, 13, 19, 136), Tiles(8, 16, 64)),
)
BACKWARD_CASES["wide"] = (
    Case((1, 2, 1, 21, 37, 40), Tiles(16, 16, 32), CAUSAL, 2),
    Case((1, 1, 1, 29, 37, 40), Tiles(12, 16, 32)),  # six rows a thread
    Case((1, 1, 1, 9, 17, 136), Tiles(8, 16)),  # sums in two halves of swizzled rows
)
BACKWARD_CASES["splits"] = (
    Case((1, 1, 1, 29, 39, 8), Tiles(8, 16, 64), CAUSAL, 2),
    Case((1, 2, 1, 21, 37, 4), Tiles(8, 32, 64), {"window": (9, 3)}, 3),
)
# Tiles of columns are 16 or more, so that a group of four belongs to each thread.
BACKWARD_CASES["plain"] = (Case((1, 1, 1, 21, 39, 8), Tiles(8, 16, 64)),)
BACKWARD_CASES["causal"] = (
    Case((1, 1, 1, 29, 19, 4), Tiles(8, 16, 64), CAUSAL),  # whole row tiles that see no column
    Case((1, 1, 1, 40, 40, 4), Tiles(8, 16, 32), CAUSAL),  # the diagonal meets corners of tiles
    Case((1, 1, 1, 23, 40, 4), Tiles(8, 16, 32), CAUSAL),  # and passes one column beyond them
    Case((1, 2, 1, 27, 25, 8), Tiles(8, 16, 64), CAUSAL),  # rows 0 and 1 see no column
)
BACKWARD_CASES["odd"] = (Case((1, 4, 2, 6, 20, 5), Tiles(4, 16, 32), layout="odd"),)
BACKWARD_CASES["long"] = (Case((1, 1, 1, 5, 200, 4), Tiles(8, 64, 64)),)

# --- the options -----------------------------------------------------------------------------

_random = np.random.default_rng(5)


def normal(*shape):
    return _random.standard_normal(shape, dtype=np.float32)


def blocks(*shape):
    """A block mask that hides neighbours, a whole row and a whole column of blocks."""
    mask = _random.random(shape) < 0.6
    mask[..., 0, 1:3] = False
    mask[..., 1, :] = False
    mask[..., 3] = False
    mask[..., -1, -1] = True
    return mask


def dlse(*shape, hidden=0, last=None):
    """A gradient of L: NaN in the first ``hidden`` rows, and the last entry's from row ``last``."""
    found = normal(*shape)
    found[..., :hidden] = np.nan
    if last is not None:
        found[-1, :, last:] = np.nan
    return {"dlse": found}


def scores(*shape):
    """Options that change the scores, of all batch entries and heads."""
    return {"softcap": 1.5, "bias": normal(*shape), "alibi_slopes": normal(*shape[:2])}


def window(*sides, **options):
    return {"window": sides, **options}


# The sides meet corners of tiles, pass one column beyond them, and one before them; rows that see
# no column, columns that no row sees.
CASES["window"] = (
    Case((1, 1, 1, 21, 37, 4), Tiles(8, 8), window(8, 8), 2),
    Case((1, 1, 1, 21, 37, 4), Tiles(8, 8), window(9, 9), 3),
    Case((1, 2, 1, 21, 37, 4), Tiles(8, 8), window(14, 6), 3),
    Case((1, 1, 1, 29, 13, 4), Tiles(8, 8), window(4, 3)),
    Case((1, 1, 1, 21, 21, 4), Tiles(8, 8), window(5, -1, causal=True)),
    Case((1, 1, 1, 13, 21, 4), Tiles(8, 8), window(-1, 2)),
    Case((1, 1, 1, 13, 21, 4), Tiles(8, 8), window(2, -1)),
)
BACKWARD_CASES["window"] = (
    Case((1, 2, 1, 21, 37, 4), Tiles(8, 16), window(0, 8)),
    Case((1, 1, 1, 21, 37, 4), Tiles(8, 16), window(1, 9)),
    Case((1, 1, 1, 29, 13, 4), Tiles(8, 16), window(4, 3)),
    Case((1, 1, 1, 21, 21, 4), Tiles(8, 16), window(5, -1, causal=True)),
)
# Rows or columns that end within a tile, with one, one before it, or are none.
ENDS = [15, 8, 5, 0]
CASES["q_lens"] = (Case((4, 1, 1, 20, 12, 4), Tiles(8, 8), {"q_lens": ENDS}),)
CASES["kv_lens"] = (Case((4, 1, 1, 5, 20, 4), Tiles(8, 8), {"kv_lens": ENDS}),)
LENGTHS = {"q_lens": [20, 9, 0], "kv_lens": [11, 21, 5], **CAUSAL}
CASES["lengths"] = (Case((3, 1, 1, 20, 21, 4), Tiles(8, 8), LENGTHS, 2),)
BACKWARD_CASES["q_lens"] = (Case((4, 1, 1, 20, 12, 4), Tiles(8, 16), {"q_lens": ENDS}),)
BACKWARD_CASES["kv_lens"] = (Case((4, 1, 1, 5, 36, 4), Tiles(8, 16), {"kv_lens": [21, 16, 5, 0]}),)
BACKWARD_CASES["lengths"] = (Case((3, 1, 1, 20, 21, 4), Tiles(8, 16), LENGTHS),)
# One sequence without keys and one without queries.
STARTS = {"cu_seqlens_q": [0, 5, 14, 14, 18], "cu_seqlens_k": [0, 0, 20, 23, 30]}
CASES["packed"] = (
    Case((1, 2, 1, 18, 30, 4), Tiles(8, 8), STARTS),
    Case((1, 1, 1, 18, 30, 4), Tiles(8, 8), STARTS | CAUSAL),
)
BACKWARD_CASES["packed"] = (
    Case((1, 2, 1, 18, 30, 4), Tiles(8, 16), STARTS),
    Case((1, 1, 1, 18, 30, 4), Tiles(8, 16), STARTS | CAUSAL),
)
# The last tile of rows would see columns past the last block, and so would columns see rows.
CASES["sparse"] = (
    Case((1, 2, 1, 13, 40, 4), Tiles(4, 8), {"block_mask": blocks(2, 4, 5)}),
    Case((1, 1, 1, 13, 40, 4), Tiles(4, 8), {"block_mask": blocks(4, 5), **CAUSAL}, 2),
    Case((1, 1, 1, 13, 40, 4), Tiles(4, 8), {"block_mask": blocks(4, 5), "window": (30, 20)}),
)
BACKWARD_CASES["sparse"] = (
    Case((1, 2, 1, 13, 64, 4), Tiles(4, 16), {"block_mask": blocks(2, 4, 4)}),
    Case((1, 1, 1, 13, 64, 4), Tiles(4, 16), {"block_mask": blocks(4, 4), **CAUSAL}),
    Case((1, 1, 1, 13, 64, 4), Tiles(4, 16), {"block_mask": blocks(4, 4), "window": (50, 40)}),
)
CASES["scores"] = (
    Case((2, 2, 1, 13, 19, 4), Tiles(8, 8), scores(2, 2, 13, 19)),
    Case((1, 1, 1, 9, 12, 4), Tiles(8, 8), {"bias": normal(12), **CAUSAL}),
)
BACKWARD_CASES["scores"] = (
    Case((2, 2, 1, 13, 19, 4), Tiles(8, 16), scores(2, 2, 13, 19)),
    Case((1, 2, 1, 9, 19, 4), Tiles(8, 16), {"bias": normal(1, 2, 1, 19), "q_lens": [6]}),
    # Of the rows past the last one P would be infinite.
    Case((1, 1, 1, 9, 19, 4), Tiles(8, 16), {"alibi_slopes": np.float32([-30])}),
)
# Of two heads, each in a block of its own
BACKWARD_CASES["shared bias"] = (
    Case((1, 2, 2, 13, 19, 4), Tiles(8, 16), {"bias": normal(13, 19)}),
)
# Functions that differ from place to place, whose mask leaves a row and a tile nothing.
_far = normal(2, 40)
_one = 1
MODS = {
    "score_mod": lambda s, b, h, i, j: s * _far[b, i] + _far[h, j] * s * s,
    "mask_mod": lambda b, h, i, j: (i - 2 * j + h) % 3 != b and i != 2 and (i > 7 or j < 8),
}
CASES["mods"] = (
    Case((2, 2, 1, 13, 19, 4), Tiles(8, 8), {**MODS, "softcap": 1.5}),
    Case((1, 1, 1, 9, 12, 4), Tiles(8, 8), {"score_mod": MODS["score_mod"], "q_lens": [7]}),
)
BACKWARD_CASES["mods"] = (
    Case((2, 2, 1, 13, 19, 4), Tiles(8, 16), {**MODS, "softcap": 1.5}),
    Case((1, 1, 1, 9, 12, 4), Tiles(8, 16), {"score_mod": MODS["score_mod"], "q_lens": [7]}),
)
# Elements that all of a head's scores read, with a slope that is not 1 and with one that is.
OF_HEADS = {"score_mod": lambda s, b, h, i, j: s * _far[h, 3] + (j * _far[b, 1] if i > 4 else 0)}
BACKWARD_CASES["mods"] += (
    Case((2, 2, 1, 13, 19, 4), Tiles(8, 16), OF_HEADS),
    # That all lanes of a warp read at once, or some of them
    Case(
        (1, 2, 1, 13, 40, 4),
        Tiles(8, 16),
        {"score_mod": lambda s, b, h, i, j: s + _far[h, (i // 8 + j // 16) // (_one + 1)]},
    ),
    Case(
        (1, 2, 1, 9, 12, 4),
        Tiles(8, 16),
        {"score_mod": lambda s, b, h, i, j: s + (_far[h, i] * j if s > 0 else 0), **CAUSAL},
    ),
)
# Without a number and a slope where it is hidden
NOWHERE = {
    "score_mod": lambda s, b, h, i, j: s * math.sqrt((i - j) / 20) + 1 / (i - j + 1),
    "mask_mod": lambda b, h, i, j: j <= i,
}
BACKWARD_CASES["mods"] += (Case((1, 1, 1, 13, 19, 4), Tiles(8, 16), NOWHERE),)
# That no two lanes read, beside elements of rows and of columns
_wide = np.linspace(-1, 1, 640, dtype=np.float32).reshape(320, 2)
APART = {
    "score_mod": lambda s, b, h, i, j: s + _wide[min(i + 16 * j, 319), h] + _far[h, i] * _far[h, j]
}
BACKWARD_CASES["mods"] += (Case((1, 2, 1, 13, 19, 4), Tiles(8, 16), APART),)
CASES["slopes"] = (Case((1, 1, 1, 13, 19, 4), Tiles(8, 8), {"alibi_slopes": np.float32([0.5])}),)
BACKWARD_CASES["slopes"] = (
    Case((1, 1, 1, 13, 19, 4), Tiles(8, 16), {"alibi_slopes": np.float32([0.5])}),
)
# The random word of the first element is the threshold itself.
DROPOUT = {"dropout_p": 2491829706 / 2**32, "seed": 0x123456789ABCDEF0, "offset": 0xFEDCBABC}
CASES["dropout"] = (Case((2, 2, 1, 3, 70, 4), Tiles(4, 16), DROPOUT),)
BACKWARD_CASES["dropout"] = (
    Case((2, 2, 1, 3, 70, 4), Tiles(4, 16), DROPOUT),
    Case((1, 1, 1, 5, 35, 4), Tiles(8, 16), DROPOUT, resident=False),
)
# One draw for four elements, in one part of the columns or two; two parts of a thread's rows.
CASES["draws"] = (
    Case((1, 1, 1, 3, 70, 4), Tiles(4, 64), DROPOUT),
    Case((1, 1, 1, 3, 130, 4), Tiles(4, 128), DROPOUT),
    Case((1, 1, 1, 8, 100, 4), Tiles(8, 264), DROPOUT),
)
BACKWARD_CASES["draws"] = (Case((1, 1, 1, 3, 70, 4), Tiles(4, 64), DROPOUT),)


def passes(shape, tiles, masked=False):
    """Many passes over this shape, and as few as these tiles take; ``masked``, by a block mask."""

    def case(tiles, few=None):
        blocks = ceil_div(shape[3], tiles.Br), ceil_div(shape[4], tiles.Bc)
        options = {"block_mask": np.ones(blocks, bool)} if masked else {}
        return Case(shape, tiles, options, peaked=False, few=few)

    return case(Tiles(16, 16), case(tiles))


# Two warps of 32 or of 16 rows, head dimensions of several fragments; FA-1's keys split.
MMA_CASES = {
    "plain": (Case((1, 1, 1, 70, 75, 24), Tiles(64, 32, 64)),),
    "16 rows": (Case((1, 2, 1, 35, 37, 8), Tiles(32, 16, 64), CAUSAL, 2),),
    "Q shared": (Case((1, 1, 1, 33, 20, 136), Tiles(64, 16, 64)),),
    # Rows so long that a turn of copies has two of them
    "256 columns": (Case((1, 1, 1, 17, 20, 256), Tiles(32, 16, 64)),),
    "odd": (Case((2, 4, 2, 18, 19, 5), Tiles(16, 16), layout="odd"),),
    # Where heads have slopes each has tiles of its own.
    "heads": (
        Case((1, 4, 2, 18, 19, 5), Tiles(16, 16), {"alibi_slopes": np.full(4, 0.1, np.float32)}),
    ),
    "low": (Case((1, 1, 1, 18, 35, 8), Tiles(16, 16), low=True),),
    "blind": (Case((1, 1, 1, 50, 21, 8), Tiles(16, 16), CAUSAL),),
    "window": (Case((1, 1, 1, 50, 55, 8), Tiles(16, 16), window(9, 3), 2),),
    "kv_lens": (Case((2, 1, 1, 5, 20, 8), Tiles(16, 16), {"kv_lens": [17, 0]}),),
    "dropout": (Case((1, 2, 1, 20, 70, 8), Tiles(16, 64), DROPOUT),),
    "softcap": (Case((1, 1, 1, 20, 35, 8), Tiles(16, 16), {"softcap": 1.5}),),
    "mods": (Case((2, 2, 1, 20, 35, 8), Tiles(16, 16), MODS),),
    # Rows enough to tell half a rounding of 16 bits in scale; passes enough to tell sums in 16 bits
    "slopes": (Case((1, 1, 1, 13, 19, 8), Tiles(16, 16), {"alibi_slopes": np.float32([0.5])}),),
    "rows": (Case((1, 2, 2, 64, 64, 16), Tiles(32, 32), peaked=False),),
    "passes": (passes((1, 1, 1, 16, 256, 16), Tiles(16, 256)),),
}
MMA_STAGES = {
    "stages": (
        Case((1, 1, 1, 70, 140, 24), Tiles(64, 32, 64, stages=2)),
        Case((1, 1, 1, 50, 55, 8), Tiles(16, 16, stages=2), window(9, 3)),
        Case((2, 1, 1, 5, 40, 8), Tiles(16, 16, stages=2), {"kv_lens": [33, 0]}),
    ),
    # Turns of which some share a page and some rows are past the tile; rows of odd lengths.
    "pages": (
        Case((2, 2, 1, 5, 70, 64), Tiles(16, 64), {"kv_lens": [70, 17]}, page_size=48),
        Case((2, 2, 2, 5, 130, 80), Tiles(32, 80, 64), {"kv_lens": [130, 0]}, page_size=80),
        Case((1, 2, 1, 5, 40, 33), Tiles(16, 16), {"kv_lens": [39]}, page_size=16),
        Case((1, 2, 1, 5, 80, 33), Tiles(16, 64), {"kv_lens": [79]}, page_size=64),
        Case((1, 1, 1, 5, 40, 256), Tiles(32, 16, 64), {"kv_lens": [39]}, page_size=16),
    ),
}
SIMT_FA2 = {
    "pages": (
        Case((2, 2, 1, 5, 70, 20), Tiles(8, 32, 64), {"kv_lens": [70, 17]}, page_size=16),
        Case((2, 2, 2, 5, 60, 32), Tiles(8, 32, 64), {"kv_lens": [60, 0]}, page_size=48),
        Case((1, 2, 1, 5, 40, 3), Tiles(8, 16, 32), {"kv_lens": [39]}, page_size=16),
    ),
    # Six rows at once, where a swizzle is not that of its parts; fewer 16 bytes than threads
    "rows": (
        Case((1, 1, 1, 25, 26, 64), Tiles(24, 24, 96)),
        Case((1, 1, 1, 5, 33, 124), Tiles(4, 32, 32)),
    ),
    # One row a thread, beside which lies none of its draw
    "one row": (Case((1, 1, 1, 11, 35, 4), Tiles(8, 16, 128), DROPOUT),),
}
KEYS = {"warp_partition": "keys"}
MMA_KEYS = {
    "keys": (
        Case((1, 1, 1, 40, 75, 24), Tiles(32, 32), KEYS, 2),
        Case((1, 1, 1, 20, 70, 8), Tiles(16, 64), {**KEYS, **CAUSAL}),
    ),
    "low keys": (Case((1, 1, 1, 18, 70, 8), Tiles(16, 32), KEYS, low=True),),
    "blind keys": (Case((1, 1, 1, 50, 35, 8), Tiles(16, 32), {**KEYS, **CAUSAL}),),
    "dropped keys": (
        Case((1, 1, 1, 20, 70, 8), Tiles(16, 32), {**KEYS, **DROPOUT}),
        Case((1, 1, 1, 20, 150, 8), Tiles(16, 128, 64), {**KEYS, **DROPOUT}),
    ),
}
# Backward, with query splits and without. A warp has all rows of S, or beyond d = 64 half of them.
MMA_BACKWARD_CASES = {
    "plain": (Case((1, 1, 1, 21, 43, 40), Tiles(16, 32, 64)),),  # two warps share a row of dQ
    "one warp": (Case((1, 1, 1, 53, 20, 24), Tiles(48, 32)),),
    "two fragments": (Case((1, 1, 1, 18, 67, 24), Tiles(32, 64)),),  # a warp has 16 rows of dQ
    "wide": (Case((1, 1, 1, 33, 50, 72), Tiles(32, 48)),),  # dQ's chunks in steps of three
    "two turns": (  # of a warp's part of dQ
        Case((1, 1, 1, 70, 37, 80), Tiles(64, 32, 64)),
        Case((1, 1, 1, 150, 21, 80), Tiles(64, 32, 64), window(9, 3)),
    ),
    "causal": (
        Case((1, 1, 1, 35, 37, 8), Tiles(16, 16), CAUSAL),
        Case((1, 1, 1, 50, 21, 8), Tiles(16, 16), CAUSAL),  # whole row tiles that see no column
    ),
    "odd": (Case((1, 4, 2, 18, 11, 5), Tiles(16, 16), layout="odd"),),
    "window": (Case((1, 2, 1, 36, 40, 8), Tiles(16, 16), window(9, 3)),),
    "q_lens": (Case((2, 1, 1, 36, 20, 8), Tiles(16, 16), {"q_lens": [21, 0]}),),
    "kv_lens": (Case((2, 1, 1, 20, 36, 8), Tiles(16, 16), {"kv_lens": [21, 0]}),),
    "packed": (Case((1, 1, 1, 18, 30, 8), Tiles(16, 16), STARTS),),
    "sparse": (Case((1, 1, 1, 50, 64, 8), Tiles(16, 16), {"block_mask": blocks(4, 4)}),),
    "dropout": (Case((1, 1, 1, 20, 70, 8), Tiles(16, 64), DROPOUT),),
    "wide dropout": (Case((1, 1, 1, 17, 20, 72), Tiles(32, 32, 128), DROPOUT),),
    "scores": (
        Case((1, 1, 1, 20, 35, 8), Tiles(16, 16), {"softcap": 1.5, "bias": normal(1, 1, 20, 35)}),
    ),
    "slopes": (Case((1, 1, 1, 13, 19, 8), Tiles(16, 16), {"alibi_slopes": np.float32([0.5])}),),
    "mods": (
        Case((2, 2, 1, 20, 35, 8), Tiles(16, 16), MODS),
        Case((2, 2, 1, 20, 35, 8), Tiles(16, 16), OF_HEADS),
    ),
    "shared bias": (Case((1, 2, 2, 20, 35, 5), Tiles(16, 16), {"bias": normal(20, 35)}),),
    "rows": (
        Case((1, 2, 2, 64, 64, 16), Tiles(32, 32), {"bias": normal(1, 2, 64, 64)}, peaked=False),
    ),
    "column passes": (passes((1, 1, 1, 16, 256, 16), Tiles(16, 256)),),
    "row passes": (passes((1, 1, 1, 256, 16, 16), Tiles(128, 16)),),
    # dQ's kernel takes tiles of its own unless they are those of a block mask.
    "dQ": (passes((1, 1, 1, 16, 256, 16), Tiles(16, 128), masked=True),),
}
# Sides that hide one element of a tile's corner, or show one; masks of two batch entries; rows of
# several tiles that are dropped. Drawn last, so that the cases above stay what they are.
CASES["sparse"] += (
    Case((2, 1, 1, 13, 40, 4), Tiles(4, 8), {"block_mask": blocks(2, 1, 4, 5)}),
    Case((2, 1, 1, 13, 8, 4), Tiles(4, 8), {"block_mask": np.ones((4, 1), bool), "q_lens": [6, 8]}),
)
BACKWARD_CASES["sparse"] += (
    Case((2, 1, 1, 13, 64, 4), Tiles(4, 16), {"block_mask": blocks(2, 1, 4, 4)}),
)
_sparse = (Case((2, 1, 1, 50, 64, 8), Tiles(16, 16), {"block_mask": blocks(2, 1, 4, 4)}),)
MMA_CASES["sparse"] = _sparse
MMA_BACKWARD_CASES["sparse"] += _sparse
CASES["dropout"] += (Case((1, 1, 1, 11, 35, 4), Tiles(4, 16), DROPOUT),)
BACKWARD_CASES["dropout"] += (Case((1, 1, 1, 11, 35, 4), Tiles(4, 16), DROPOUT),)
BACKWARD_CASES["window"] += (Case((1, 1, 1, 21, 37, 4), Tiles(8, 16), window(22, 8)),)
_corners = tuple(
    Case((1, 1, 1, 50, 52, 8), Tiles(16, 16), window(*sides)) for sides in ((16, 20), (19, 3))
)
MMA_CASES["window"] += _corners
MMA_BACKWARD_CASES["window"] += _corners
MMA_CASES["q_lens"] = (Case((3, 1, 1, 36, 20, 8), Tiles(16, 16), {"q_lens": [21, 0, 9]}, 2),)
MMA_CASES["packed"] = (Case((1, 2, 1, 18, 30, 8), Tiles(16, 16), STARTS),)
MMA_CASES["scores"] = (Case((2, 2, 1, 20, 35, 8), Tiles(16, 16), scores(2, 2, 20, 35)),)
MMA_CASES["dropout"] += (Case((2, 1, 1, 20, 35, 8), Tiles(16, 16), DROPOUT),)
MMA_CASES["whole"] = MMA_BACKWARD_CASES["whole"] = (
    Case((1, 2, 1, 32, 48, 16), Tiles(16, 16), CAUSAL, 2),
    Case((2, 1, 1, 32, 32, 16), Tiles(16, 16), {"q_lens": [32, 16], "kv_lens": [32, 16]}),
)
MMA_STAGES["not ahead"] = (
    Case((1, 1, 1, 40, 75, 24), Tiles(32, 32), {"ablate": ("prefetch",)}),
    Case((1, 4, 1, 3, 75, 24), Tiles(16, 32), {"ablate": ("prefetch",)}),
)
MMA_STAGES["stages"] += (
    Case((2, 1, 1, 50, 64, 8), Tiles(16, 16, stages=2), _sparse[0].options),
    Case((1, 1, 1, 33, 40, 136), Tiles(64, 16, 64, stages=2)),  # Q stays in shared memory
)

# Rows that see no column have no L, nor have those past a length; a row of P too long to keep.
BACKWARD_CASES["dlse"] = (
    Case((1, 2, 1, 21, 13, 4), Tiles(8, 16), CAUSAL | dlse(1, 2, 21, hidden=8)),
    Case((2, 1, 1, 21, 13, 4), Tiles(8, 16), {"q_lens": [21, 9]} | dlse(2, 1, 21, last=9)),
    Case((1, 2, 1, 18, 30, 4), Tiles(8, 16), STARTS | dlse(2, 18, hidden=5)),
    Case((1, 1, 1, 5, 13, 4), Tiles(8, 16), dlse(1, 1, 5), resident=False),
)
_dlse = (
    Case((2, 2, 1, 36, 20, 8), Tiles(16, 16), CAUSAL | dlse(2, 2, 36, hidden=16)),
    Case((2, 1, 1, 36, 20, 8), Tiles(16, 16), {"q_lens": [36, 9]} | dlse(2, 1, 36, last=9)),
    Case((1, 1, 1, 18, 30, 8), Tiles(16, 16), STARTS | dlse(1, 18, hidden=5)),
)
MMA_BACKWARD_CASES["dlse"] = _dlse


def sinks(*of_heads, **options):
    return {"sinks": np.float32(of_heads), **options}


# Rows with a sink alone, heads without one; passes that do not begin with column 0.
CASES["sinks"] = (
    Case((1, 2, 1, 13, 9, 4), Tiles(8, 8), CAUSAL | sinks(1.5, -np.inf)),
    Case((2, 2, 1, 13, 19, 4), Tiles(8, 8), sinks(0.5, 3.0, q_lens=[13, 5], kv_lens=[0, 19])),
)
BACKWARD_CASES["sinks"] = (
    Case((1, 2, 1, 13, 9, 4), Tiles(8, 16), CAUSAL | sinks(1.5, -np.inf)),
    Case((2, 2, 1, 21, 19, 4), Tiles(8, 16), sinks(0.5, 3.0, q_lens=[21, 5], kv_lens=[0, 19])),
    Case((1, 2, 1, 18, 30, 4), Tiles(8, 16), STARTS | sinks(0.5, -1.0)),
    Case((1, 1, 1, 530, 5, 4), Tiles(8, 16), sinks(1.0)),  # more rows than threads sum them
)
MMA_CASES["sinks"] = (
    Case((1, 4, 1, 18, 9, 8), Tiles(16, 16), CAUSAL | sinks(1.5, -np.inf, 0.0, 3.0)),
    Case((2, 2, 1, 36, 20, 8), Tiles(16, 16), sinks(0.5, 3.0, q_lens=[21, 0], kv_lens=[0, 20])),
)
MMA_BACKWARD_CASES["sinks"] = (
    Case((1, 2, 1, 36, 20, 8), Tiles(16, 16), CAUSAL | sinks(1.5, -np.inf)),
    Case((2, 2, 1, 36, 20, 8), Tiles(16, 16), sinks(0.5, 3.0, q_lens=[21, 0])),
)

# Of a thread's two rows the first is the last there is; an odd row of a bias for all.
MMA_STAGES["bias"] = (
    Case((1, 1, 1, 29, 32, 8), Tiles(16, 16), {"bias": normal(1, 1, 29, 32)}),
    Case((1, 1, 1, 29, 31, 8), Tiles(16, 16), {"bias": normal(1, 1, 1, 31)}),
)

# Standard attention: several tiles and steps, a head for each block, two warps for a row of S.
SIMT_STANDARD = {"four warps": (Case((1, 1, 1, 2, 512, 4), Tiles(8, 64)),)}
_long = {
    "long": (Case((1, 1, 1, 5, 300, 8), Tiles(16, 64)),),
    "longest": (Case((1, 1, 1, 2, 2100, 8), Tiles(16, 128)),),  # two chunks of a thread
    "from memory": (
        Case((1, 1, 1, 5, 300, 8), Tiles(16, 64), resident=False),
        Case((1, 1, 1, 5, 39, 8), Tiles(16, 16), DROPOUT, resident=False),
    ),
}
MMA_STANDARD_CASES = {
    "plain": (
        Case((1, 1, 1, 70, 75, 24), Tiles(64, 32, 64)),
        Case((1, 2, 2, 20, 150, 8), Tiles(32, 64)),
    ),
    **{
        name: MMA_CASES[name]
        for name in ("odd", "blind", "window", "q_lens", "kv_lens", "packed", "sparse", "dropout")
        + ("softcap", "scores", "slopes", "rows", "passes", "sinks")
    },
    **_long,
}
MMA_STANDARD_BACKWARD_CASES = {
    "plain": (
        Case((1, 1, 1, 21, 43, 40), Tiles(16, 32)),
        Case((1, 1, 1, 150, 20, 8), Tiles(32, 64)),
        Case((1, 2, 1, 15, 40, 8), Tiles(16, 64)),  # a warp may end a head before the other
    ),
    "mods": (Case((1, 1, 1, 20, 35, 8), Tiles(16, 16), NOWHERE),),
    **{
        name: MMA_BACKWARD_CASES[name]
        for name in ("odd", "q_lens", "kv_lens", "packed", "sparse", "dropout")
        + ("scores", "slopes", "shared bias", "rows", "row passes", "dlse", "sinks")
    },
    **_long,
}


@cache
def inputs(case, dtype):
    """dout, q, k and v."""
    dout, q, k, v = random_gradients(*case.shape)
    if case.peaked:
        k[:, :, -3:] *= 3  # the maximum still grows in the last tile
    if case.low:
        q, k = np.abs(q) + 1, k - 60
    if "cu_seqlens_q" in case.options:
        dout, q, k, v = (x[0].swapaxes(0, 1).copy() for x in (dout, q, k, v))
    return tuple(x.astype(dtype) for x in (dout, q, k, v))


def options_of(case):
    return {"tiles": case.tiles, "layout": case.layout, **case.options}


def standard_or_fa2(algorithm, dtype):
    """Of whose results those of ``algorithm`` are held to the bounds."""
    return "standard" if dtype == "float16" and algorithm == "standard" else "fa2"


@cache
def wanted(case, dtype, algorithm):
    options = changing(options_of(case))
    return truth(*inputs(case, dtype)[1:], algorithm=algorithm, **options)


def run(dtype, algorithm, case):
    """Raise what the checks of a forward call raise, an AssertionError if it is wrong."""
    if case.page_size:
        return run_paged(dtype, case)
    splits = {"query_splits": case.query_splits} if algorithm == "fa1" else {}
    given = {**options_of(case), **splits, "out_layout": case.layout}
    arrays = inputs(case, dtype)[1:]
    result = attend("emulator", algorithm, *arrays, **given)
    want = wanted(case, dtype, standard_or_fa2(algorithm, dtype))
    assert_within("O", result.O.astype(np.float64), want.O, want.O_bound, *want.scale)
    assert_within("L", result.L, want.L, want.L_bound)
    if case.few:
        few = attend("emulator", algorithm, *arrays, **given | options_of(case.few))
        assert_no_growth("O", few.O, result.O, want.O)


def run_paged(dtype, case):
    """The bits over pages are those over K and V in one piece."""
    options = dict(case.options)
    lens = options.pop("kv_lens")
    found = test_pages.pages_and_piece(
        dtype, case.shape, lens, case.page_size, case.tiles, **options
    )
    for paged, whole in zip(*found, strict=True):
        np.testing.assert_array_equal(paged, whole)


@cache
def saved_values(case, dtype, algorithm):
    """out and lse of a forward pass."""
    return saved_for(algorithm, *inputs(case, dtype)[1:], **options_of(case))


@cache
def wanted_of(case, dtype, algorithm):
    """Gradients and their bounds, of all that has some."""
    options = {"tiles": case.tiles, **case.options}
    asks = {f"return_d{name}": name in options for name in ("bias", "sinks")}
    captures = bool(floats_of(options.get("score_mod"))) and algorithm != "standard"
    asks["return_dcaptured"] = captures
    given = {"way": algorithm, "saved_values": saved_values(case, dtype, algorithm), **options}
    return wanted_gradients(asks, *inputs(case, dtype), **given)


def run_backward(dtype, way, case):
    """One way to the gradients of an algorithm."""
    algorithm = standard_or_fa2(ALL_WAYS[way][0], dtype)
    facts = {"saved_values": saved_values(case, dtype, algorithm), **options_of(case)}
    split = {}
    if dtype == "float32":
        split["fa1-split"] = "fa1", {"query_splits": case.query_splits}
    with mock.patch.dict(ALL_WAYS, split):
        found = differentiate("emulator", way, *inputs(case, dtype), **facts)
    want = wanted_of(case, dtype, algorithm)  # of a case that ends before, nobody asks for it
    asks = asked([*found], case.options)
    for name, gradient in each(names_of(*asks.values()), found):
        rounding = ROUNDING.get(dtype)
        assert_within(name, gradient.astype(np.float64), *want[name], rounding)
    if case.few:
        facts |= options_of(case.few)
        few = differentiate("emulator", way, *inputs(case, dtype), **facts)
        for name in NAMES:
            assert_no_growth(name, getattr(few, name), getattr(found, name), want[name][0])


# --- runs ------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Run:
    """A call that raises an AssertionError or another error where something is wrong."""

    unit: str
    title: str
    call: Callable
    quick: bool = True

    def __call__(self):
        fresh_memory.begin(self.title)
        self.call()


def _run(unit, runs, algorithm, title, case):
    dtype = "float32" if unit == "simt" else "float16"

    def call():
        found = planned_standard.row_elements if case.resident else lambda *_, **__: 0
        uncached = getattr(planning.planned, "__wrapped__", planning.planned)
        with (
            mock.patch.object(planned_standard, "row_elements", found),
            mock.patch.object(planning, "planned", uncached),
        ):
            runs(dtype, algorithm, case)

    return Run(unit, f"{runs.__name__.removeprefix('run_')}-{algorithm}-{title}", call)


def runs_of(unit, *tests, quick=True):
    """Every case of these tests, or of all tests of a file, that is one of this unit by default."""
    for test in itertools.chain.from_iterable(map(_tests, tests)):
        marks = getattr(test, "pytestmark", ())
        tables = []
        for mark in marks:
            if mark.name == "parametrize":
                columns = mark.args[0]
                if isinstance(columns, str):
                    columns = [x.strip() for x in columns.split(",")]
                tables.append([_row(columns, each) for each in mark.args[1]])
        for n, rows in enumerate(itertools.product(*tables)):
            given = {name: value for row in rows if row for name, value in row.items()}
            # The planes of either unit are made on CUDA cores, by a kernel of mma's.
            ours = unit == "mma" or given.get("on", unit) == unit
            ours &= "'unit': '" not in f"{given}" or f"'{unit}'" in f"{given}"
            if None not in rows and ours:
                yield Run(unit, f"{test.__name__}-{n}", partial(_tested, test, given), quick)


def _tests(test):
    if not inspect.ismodule(test):
        return [test]
    found = [x for name, x in vars(test).items() if name.startswith("test_")]
    found = [x for x in found if inspect.isfunction(x) and not hasattr(x, "hypothesis")]
    left_out = {"gpu", "slow", "skipif", "skip"}
    return [x for x in found if left_out.isdisjoint(m.name for m in getattr(x, "pytestmark", ()))]


def _row(columns, values):
    """A row of a table of parameters by name; None if it is to be skipped."""
    if hasattr(values, "marks"):
        if any(mark.name == "slow" or mark.args and mark.args[0] for mark in values.marks):
            return None
        values = values.values
        values = values[0] if len(columns) == 1 else values
    return dict(zip(columns, [values] if len(columns) == 1 else values, strict=True))


def _tested(test, given):
    module, found = inspect.getmodule(test), {"device": "emulator", **given}
    with ExitStack() as stack:

        def made(name):
            if name == "monkeypatch":
                found.setdefault(name, stack.enter_context(pytest.MonkeyPatch.context()))
            if name == "tmp_path":
                found.setdefault(name, Path(stack.enter_context(TemporaryDirectory())))
            if name not in found:
                fixture = vars(module).get(name, vars(conftest).get(name)).__wrapped__
                value = fixture(*map(made, inspect.signature(fixture).parameters))
                if inspect.isgenerator(value):
                    value = stack.enter_context(contextmanager(lambda: value)())
                found[name] = value
            return found[name]

        for name, fixture in vars(module).items():
            if getattr(getattr(fixture, "_fixture_function_marker", None), "autouse", False):
                made(name)
        test(**{name: made(name) for name in inspect.signature(test).parameters})


@cache
def own_runs():
    """Those of the cases above."""
    found = []
    for unit, run_of, algorithms, groups in (
        ("simt", run, ALGORITHMS, CASES),
        ("simt", run, ["fa2"], SIMT_FA2),
        ("simt", run, ["standard"], SIMT_STANDARD),
        ("simt", run_backward, ALL_WAYS, BACKWARD_CASES),
        ("mma", run, ["fa1", "fa2"], MMA_CASES),
        ("mma", run, ["fa1"], MMA_KEYS),
        ("mma", run, ["fa2"], MMA_STAGES),
        ("mma", run, ["standard"], MMA_STANDARD_CASES),
        ("mma", run_backward, [way for way in ALL_WAYS if way != "standard"], MMA_BACKWARD_CASES),
        ("mma", run_backward, ["standard"], MMA_STANDARD_BACKWARD_CASES),
    ):
        for algorithm, group in itertools.product(algorithms, groups):
            for n, case in enumerate(groups[group]):
                if algorithm != "fa1-split" or unit != "simt" or case.query_splits > 1:
                    found.append(_run(unit, run_of, algorithm, f"{group}-{n}", case))
    return tuple(found)


@cache
def host_runs():
    """Tests of the host's code, of the ring's and of intrinsics, those that run no kernel first."""
    passes = test_ring.test_both_passes_are_those_of_one_device
    merged = (
        test_ring.test_merged_parts_are_those_of_float64,
        test_ring.test_added_parts_are_those_of_float64,
        test_ring.test_parts_that_do_not_fit_are_refused,
    )
    others = (test_launch_cache, test_append_kv, test_merge, test_softmax, test_plans, test_inputs)
    others += (test_prefix, test_options, test_group_splits, test_kv_splits, test_pages)
    others += (test_choices.test_plans_are_as_they_were,)
    others += (test_limits.test_a_limit_itself_is_allowed,)
    others += (backward_on_hopper.test_gradients_and_counts,)
    others += (test_mods.test_a_derivative_may_be_given,)
    others += (test_mods.test_gradients_of_captured_arrays_by_name,)
    others += (test_mma_swizzle.test_what_padding_and_nothing_cost,)
    others += (test_mods.test_blocks_are_empty_full_or_mixed, test_mods.test_what_goes_with_blocks)
    others += (test_mods.test_where_there_are_no_gradients_of_captured_arrays,)
    others += (test_precision.test_what_is_not_built_is_refused,)
    ends = ("plain-0", "mods-0", "q_lens-0", "dropout-0", "sinks-0", "dlse-0", "from memory-1")
    ends += ("standard-sinks-2", "fa1-split-splits-0")
    few = [x for x in own_runs() if x.title.endswith(ends)]
    few += runs_of("mma", test_precision.test_results_and_counts)
    few += itertools.islice(runs_of("simt", test_value_dim.test_gradients), 4)  # of standard
    few = (replace(x, unit="host", quick=False) for x in few)
    appended = (
        test_append_e4m3.test_rows_of_pages_start_at_multiples_of_16_bytes,
        test_append_e4m3.test_scales_on_another_gpu_are_refused,
        test_append_e4m3.test_what_is_refused,
        test_held.test_the_size_of_an_array_is_that_of_its_elements_in_memory,
    )
    return (
        *runs_of("host", test_recorded_launches, *appended),
        *runs_of("torch", test_torch_stand_in),
        *runs_of("ring", test_ring_steps, test_ring.test_a_window_is_that_of_the_whole_sequence),
        *runs_of("intrinsics", test_intrinsics, test_ptx, test_ptx_statements, test_ptx_warpgroup),
        *few,
        *runs_of("host", *others, *merged, quick=False),
        *runs_of("torch", passes, test_ring.test_one_argument_that_learns_is_enough, quick=False),
        *runs_of("ring", test_ring, test_passes.test_ring, quick=False),
    )


@cache
def runs():
    """These, and of tests of other files those that are about a kernel of their own."""
    found = [*own_runs()]
    found += runs_of(
        "simt",
        test_softmax.test_values_are_those_of_float64,
        test_softmax.test_large_values_do_not_overflow,
        test_softmax.test_what_is_not_finite,
        test_softmax.test_any_strides_and_an_output_of_ones_own,
        test_append_kv.test_rows_appended_are_those_of_the_whole_cache,
        test_append_kv.test_rows_are_appended_in_the_other_layout,
        test_append_e4m3.test_rows_and_scales,
        test_append_e4m3.test_unaligned_rows_and_the_other_layout,
        test_append_e4m3.test_zeros_infinity_and_nan,
        test_quantize.test_numbers_and_scales,
        test_quantize.test_more_numbers_than_threads,
        test_quantize.test_rotated_rows,
        test_quantize.test_other_strides_layouts_and_dtypes,
        test_quantize.test_zeros_nan_and_infinity,
        test_mods.test_blocks_are_empty_full_or_mixed,
        test_mods.test_a_full_block_is_not_asked,
        test_mods.test_a_sequence_without_columns_is_not_looked_up_behind_an_array,
        test_value_dim.test_rows_appended,
        test_kv_splits.test_splits_against_float64,
        test_kv_splits.test_packed_splits,
        test_merge.test_parts_become_the_whole,
        test_prefix.test_values_and_counts,
        test_prefix.test_the_prefix_is_read_for_a_tile_of_all_queries,
        test_merge.test_gradients_are_the_central_differences,
        test_ring.test_merged_parts_are_those_of_float64,
        test_ring.test_added_parts_are_those_of_float64,
        test_ring.test_a_part_without_columns_changes_nothing,
    )
    found += runs_of(
        "mma",
        test_e4m3_pages.test_attention_is_that_of_the_stored_numbers,
        test_kv_splits.test_heads_that_share_a_tile,
        test_kv_splits.test_small_calls,
        test_pages.test_packed_queries_over_pages_give_the_bits_of_packed_keys,
        test_precision.test_results_and_counts,
        test_precision.test_gradients_and_counts,
        test_precision.test_a_row_whose_gradients_are_inf_leaves_the_others,
        test_precision.test_a_heads_largest_element_is_found_in_all_its_rows,
        test_precision.test_heads_have_powers_of_their_own_and_padding_none,
        test_precision.test_nan_reaches_its_own_head_and_what_is_finite_is_scaled_by_what_is_finite,
        test_value_dim.test_gradients_in_one_order,
        test_value_dim.test_rows_of_v_that_end_amid_16_bytes,
    )
    # Hopper's sums in fragments or of several blocks are rounded by kernels of mma's. The kernel of
    # row sums takes two passes at head_dim 72, and blocks of several groups of rows at head_dim 8.
    calls = [partial(test_group_splits.test_gradients_and_counts, *test_group_splits.CASES[0])]
    for Nq, d in ((77, 40), (70, 40), (35, 72), (150, 8)):
        given = ("fa2", 1, 1, 1, Nq, 60, d, {})
        calls.append(partial(backward_on_hopper.test_gradients_and_counts, *given))
    found += [Run("mma", f"rounded-{n}", call) for n, call in enumerate(calls)]
    found += runs_of(
        "wgmma",
        test_e4m3.test_results_and_counts,
        test_e4m3.test_scales_are_factors_of_the_numbers,
        on_hopper,
        backward_on_hopper,
        test_kv_splits.test_splits_on_hoppers_unit,
        test_kv_splits.test_small_calls,
        test_precision.test_results_and_counts,
        test_precision.test_gradients_and_counts_on_hopper,
        test_precision.test_a_row_whose_gradients_are_inf_leaves_the_others,
        test_mods.test_options_beside_a_function_on_hoppers_unit,
        test_mods.test_blocks_on_hoppers_unit_are_what_the_function_says,
        test_mods.test_each_block_on_hoppers_unit_has_its_own_state,
        test_pages.test_pages_give_the_bits_of_one_piece,
        test_pages.test_packed_queries_over_pages_give_the_bits_of_packed_keys,
        test_group_splits.test_gradients_and_counts,
        test_value_dim.test_hopper_against_float64,
        test_value_dim.test_gradients_on_hopper,
    )
    return tuple(found)
