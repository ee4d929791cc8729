"""Faults planted in the kernels' own source: each must be caught, and the kernels as they are pass.

A mutant is one module of the package with one piece of its text replaced, run on the emulator in
place of the original, over tiles enough that every loop repeats and every edge is ragged. The
float64 reference and the access model keep the original.
"""

import inspect
import itertools
import linecache
import pkgutil
import re
import sys
import types
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache, lru_cache
from importlib import import_module
from unittest import mock

import mma_helpers
import numpy as np
import pytest
import test_mma_backward as on_mma
from backward_helpers import (
    WAYS,
    differentiate,
    random_gradients,
    saved,
    true_gradients,
)
from helpers import ALGORITHMS, assert_within, attend, changing, one_of_twelve, truth
from test_pages import pages_and_piece

from fa_numba import Tiles, emulator, masks, ops, options, parts
from fa_numba.host import binding, calls, execution, planning
from fa_numba.host import standard as planned_standard
from fa_numba.integers import ceil_div
from fa_numba.kernels import mma, simt
from fa_numba.kernels.simt import (
    fa1_backward,
    fa1_forward,
    fa2_backward,
    fa2_forward,
    standard,
    standard_backward,
)
from fa_numba.parts import gradients, softmax
from fa_numba.parts.simt import state

BACKWARD = {
    "standard_backward": standard_backward,
    "fa1_backward": fa1_backward,
    "fa2_backward": fa2_backward,
}
# On tensor cores, in float16
MMA = {"mma_fa1": mma.fa1_forward, "mma_fa2": mma.fa2_forward}
MMA_BACKWARD = {"mma_fa1_backward": mma.fa1_backward, "mma_fa2_backward": mma.fa2_backward}
KERNELS = {"standard": standard, "fa1": fa1_forward, "fa2": fa2_forward, **BACKWARD}
MMA_STANDARD = {
    "mma_standard": mma.standard,
    "mma_standard_backward": mma.standard_backward,
}
KERNELS |= MMA | MMA_BACKWARD | MMA_STANDARD
# What kernels import, a module after those that it imports itself; each unit's parts end with the
# package of all of them.
PARTS = {"masks": masks}
for _package, _names in (
    ("", "layout heads dropout bias softmax pages visits prefetch rows splits gradients namespace"),
    ("simt", "swizzle threads tile_load products stores state"),
    (
        "mma",
        "chunks swizzle tile_load fragments products pairs stores combine state dq backward "
        "heads_in_tiles",
    ),
):
    _path = f"fa_numba.parts.{_package}".rstrip(".")
    _prefix = _package and f"{_package}_"
    PARTS |= {f"{_prefix}{name}": import_module(f"{_path}.{name}") for name in _names.split()}
    if _package:
        PARTS[f"{_prefix}parts"] = import_module(_path)
FLOAT16 = mma_helpers.ROUNDING["float16"]
HOST = {"arguments": binding, "options": options}
MODULES = {**PARTS, **KERNELS, **HOST}

# --- the machinery ---------------------------------------------------------------------------

_numbers = itertools.count()


@cache
def source(name):
    return inspect.getsource(MODULES[name])


@cache
def source_of(module, function):
    """Of one of its functions, or all of it."""
    if not function:
        return source(module)
    found = inspect.getsource(getattr(MODULES[module], function))
    assert source(module).count(found) == 1
    return found


def replaced(text, needle, replacement, total, which):
    """`text` with occurrence `which` of `needle` replaced, of which there must be `total`."""
    found = text.count(needle)
    assert found == total, f"{needle!r} stands {found} times in the source, not {total}"
    pieces = text.split(needle)
    return needle.join(pieces[: which + 1]) + replacement + needle.join(pieces[which + 1 :])


def mutated(mutant):
    """The text of the mutant's module, changed in the mutant's function or anywhere."""
    module, _, function = mutant.place.partition(".")
    text, scope = source(module), source_of(module, function)
    change = (mutant.needle, mutant.replacement, mutant.total, mutant.which)
    return text.replace(scope, replaced(scope, *change))


@lru_cache(maxsize=64)
def compiled(name, text):
    file = f"<{name} {next(_numbers)}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    return compile(text, file, "exec")


def built(name, text):
    """A fresh module from `text`, in this package so that the emulator takes it for its own."""
    fresh = types.ModuleType(f"fa_numba.mutant_{name}_{next(_numbers)}")
    with mock.patch.dict(sys.modules, {fresh.__name__: fresh}):  # a dataclass looks itself up
        exec(compiled(name, text), fresh.__dict__)
    return fresh


def modules_with(**texts):
    """Parts and kernels by name, built anew and of one another, those in `texts` from these."""
    fresh = {}
    with ExitStack() as stack:
        for name in (*PARTS, *KERNELS):
            fresh[name] = built(name, texts.get(name) or source(name))
            if name in PARTS:  # for the imports of those that come next
                package, _, public = PARTS[name].__name__.rpartition(".")
                for patch in (
                    mock.patch.object(sys.modules[package], public, fresh[name]),
                    mock.patch.dict(sys.modules, {PARTS[name].__name__: fresh[name]}),
                ):
                    stack.enter_context(patch)
    return fresh | {name: built(name, texts[name]) for name in HOST.keys() & texts.keys()}


@cache
def as_they_are():
    """All of them built anew, none changed."""
    return modules_with()


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
BACKWARD_CASES["splits"] = (
    Case((1, 1, 1, 29, 39, 8), Tiles(8, 16, 64), CAUSAL, 2),
    Case((1, 2, 1, 21, 37, 4), Tiles(8, 16), {"window": (9, 3)}, 3),
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
CASES["lengths"] = (
    Case(
        (3, 1, 1, 20, 21, 4),
        Tiles(8, 8),
        {"q_lens": [20, 9, 0], "kv_lens": [11, 21, 5], **CAUSAL},
        2,
    ),
)
BACKWARD_CASES["q_lens"] = (Case((4, 1, 1, 20, 12, 4), Tiles(8, 16), {"q_lens": ENDS}),)
BACKWARD_CASES["kv_lens"] = (Case((4, 1, 1, 5, 36, 4), Tiles(8, 16), {"kv_lens": [21, 16, 5, 0]}),)
BACKWARD_CASES["lengths"] = (
    Case(
        (3, 1, 1, 20, 21, 4), Tiles(8, 16), {"q_lens": [20, 9, 0], "kv_lens": [11, 21, 5], **CAUSAL}
    ),
)
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
    Case(
        (2, 2, 1, 13, 19, 4),
        Tiles(8, 8),
        {"softcap": 1.5, "bias": normal(2, 2, 13, 19), "alibi_slopes": normal(2, 2)},
    ),
    Case((1, 1, 1, 9, 12, 4), Tiles(8, 8), {"bias": normal(12), **CAUSAL}),
)
BACKWARD_CASES["scores"] = (
    Case(
        (2, 2, 1, 13, 19, 4),
        Tiles(8, 16),
        {"softcap": 1.5, "bias": normal(2, 2, 13, 19), "alibi_slopes": normal(2, 2)},
    ),
    Case((1, 2, 1, 9, 19, 4), Tiles(8, 16), {"bias": normal(1, 2, 1, 19), "q_lens": [6]}),
    # Of the rows past the last one P would be infinite.
    Case((1, 1, 1, 9, 19, 4), Tiles(8, 16), {"alibi_slopes": np.float32([-30])}),
)
# Of two heads, each in a block of its own
BACKWARD_CASES["shared bias"] = (
    Case((1, 2, 2, 13, 19, 4), Tiles(8, 16), {"bias": normal(13, 19)}),
)
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
    ),
}
SIMT_PAGES = {
    "pages": (
        Case((2, 2, 1, 5, 70, 20), Tiles(8, 32, 64), {"kv_lens": [70, 17]}, page_size=16),
        Case((2, 2, 2, 5, 60, 32), Tiles(8, 32, 64), {"kv_lens": [60, 0]}, page_size=48),
        Case((1, 2, 1, 5, 40, 3), Tiles(8, 16, 32), {"kv_lens": [39]}, page_size=16),
    )
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
    "wide": (Case((1, 1, 1, 33, 20, 72), Tiles(32, 32)),),
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
    "shared bias": (Case((1, 2, 2, 20, 35, 5), Tiles(16, 16), {"bias": normal(20, 35)}),),
    "rows": (
        Case((1, 2, 2, 64, 64, 16), Tiles(32, 32), {"bias": normal(1, 2, 64, 64)}, peaked=False),
    ),
    "column passes": (passes((1, 1, 1, 16, 256, 16), Tiles(16, 256)),),
    "row passes": (passes((1, 1, 1, 256, 16, 16), Tiles(128, 16)),),
    # A sweep takes tiles of its own unless they are those of a block mask.
    "sweep": (passes((1, 1, 1, 16, 256, 16), Tiles(16, 128), masked=True),),
}
# Sides that hide one element of a tile's corner, or show one; masks of two batch entries; rows of
# several tiles that are dropped. Drawn last, so that the cases above stay what they are.
CASES["sparse"] += (Case((2, 1, 1, 13, 40, 4), Tiles(4, 8), {"block_mask": blocks(2, 1, 4, 5)}),)
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
MMA_CASES["scores"] = (
    Case(
        (2, 2, 1, 20, 35, 8),
        Tiles(16, 16),
        {"softcap": 1.5, "bias": normal(2, 2, 20, 35), "alibi_slopes": normal(2, 2)},
    ),
)
MMA_CASES["dropout"] += (Case((2, 1, 1, 20, 35, 8), Tiles(16, 16), DROPOUT),)
MMA_STAGES["stages"] += (Case((2, 1, 1, 50, 64, 8), Tiles(16, 16, stages=2), _sparse[0].options),)


# Standard attention: several tiles and steps, a head for each block, two warps for a row of S.
_long = {
    "long": (Case((1, 1, 1, 5, 300, 8), Tiles(16, 64)),),
    "longest": (Case((1, 1, 1, 2, 2100, 8), Tiles(16, 128)),),  # two chunks of a thread
    "from memory": (
        Case((1, 1, 1, 5, 300, 8), Tiles(16, 64), resident=False),
        Case((1, 1, 1, 5, 35, 8), Tiles(16, 16), DROPOUT, resident=False),
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
        + ("softcap", "scores", "slopes", "rows")
    },
    **_long,
}
MMA_STANDARD_BACKWARD_CASES = {
    "plain": (
        Case((1, 1, 1, 21, 43, 40), Tiles(16, 32)),
        Case((1, 1, 1, 150, 20, 8), Tiles(32, 64)),
        Case((1, 2, 1, 15, 40, 8), Tiles(16, 64)),  # a warp may end a head before the other
    ),
    **{
        name: MMA_BACKWARD_CASES[name]
        for name in ("odd", "q_lens", "kv_lens", "packed", "sparse", "dropout")
        + ("scores", "slopes", "shared bias", "rows")
    },
    **_long,
}


@cache
def inputs(case):
    """dout, q, k and v."""
    dout, q, k, v = random_gradients(*case.shape)
    if case.peaked:
        k[:, :, -3:] *= 3  # the maximum still grows in the last tile
    if case.low:
        q, k = np.abs(q) + 1, k - 60
    if "cu_seqlens_q" in case.options:
        dout, q, k, v = (x[0].swapaxes(0, 1).copy() for x in (dout, q, k, v))
    return dout, q, k, v


def options_of(case):
    return {"tiles": case.tiles, "layout": case.layout, **case.options}


@cache
def wanted(case):
    return truth(*inputs(case)[1:], tiles=case.tiles, **case.options)


@cache
def half_inputs(case):
    return tuple(x.astype(np.float16) for x in inputs(case)[1:])


@cache
def wanted_halves(case, algorithm):
    options = changing(options_of(case))
    return mma_helpers.truth(*half_inputs(case), algorithm=algorithm, **options)


def run_mma(name, case):
    """`run` on tensor cores, in float16."""
    if case.page_size:
        return run_paged("float16", case)
    algorithm = name.removeprefix("mma_")
    splits = {"query_splits": case.query_splits} if algorithm == "fa1" else {}
    given = {**options_of(case), **splits, "out_layout": case.layout}
    result = mma_helpers.attend("emulator", algorithm, *half_inputs(case), **given)
    want = wanted_halves(case, algorithm)
    assert_within("O", result.O.astype(np.float64), want.O, want.O_bound, *want.scale)
    assert_within("L", result.L, want.L, want.L_bound)
    if case.few:
        given |= options_of(case.few)
        few = mma_helpers.attend("emulator", algorithm, *half_inputs(case), **given)
        mma_helpers.assert_no_growth("O", few.O, result.O, want.O)


def run(algorithm, case):
    """Raise what the checks of a forward call raise, an AssertionError if it is wrong."""
    if case.page_size:
        return run_paged("float32", case)
    splits = {"query_splits": case.query_splits} if algorithm == "fa1" else {}
    given = {**options_of(case), **splits, "out_layout": case.layout}
    result, want = attend("emulator", algorithm, *inputs(case)[1:], **given), wanted(case)
    assert_within("O", result.O, want.O, want.O_bound)
    assert_within("L", result.L, want.L, want.L_bound)


def run_paged(dtype, case):
    """The bits over pages are those over K and V in one piece."""
    options = dict(case.options)
    lens = options.pop("kv_lens")
    found = pages_and_piece(dtype, case.shape, lens, case.page_size, case.tiles, **options)
    for paged, whole in zip(*found, strict=True):
        np.testing.assert_array_equal(paged, whole)


@cache
def wanted_gradients(case):
    """out and lse of a forward pass, and the gradients."""
    given, options = inputs(case), {"tiles": case.tiles, **case.options}
    values = saved(*given[1:], **options)
    asks = "bias" in options
    return values, true_gradients(*given, saved_values=values, return_dbias=asks, **options)


def run_backward(algorithm, case):
    """The same for every way to a gradient that `algorithm` has."""
    values, want = wanted_gradients(case)
    split = {"fa1-split": ("fa1", {"query_splits": case.query_splits})}
    with mock.patch.dict(WAYS, split if case.query_splits > 1 else {}):
        for way in WAYS:
            if WAYS[way][0] == algorithm:
                how = {"saved_values": values, **options_of(case)}
                found = differentiate("emulator", way, *inputs(case), **how)
                for name, gradient in zip(want.bounds, found, strict=False):
                    assert_within(name, gradient, getattr(want, name), want.bounds[name])


@cache
def wanted_half_gradients(case, algorithm):
    """dout, q, k and v, out and lse of a forward pass, the gradients and their bounds."""
    given, options = [x.astype(np.float16) for x in inputs(case)], options_of(case)
    values = on_mma.saved_halves(algorithm, *given[1:], **options)
    facts = {"dbias": "bias" in options, "saved_values": values, **options}
    return given, values, on_mma.expected(algorithm, *given, **facts)


def run_mma_backward(algorithm, case):
    """`run_backward` on tensor cores, in float16."""
    given, values, (exact, bounds) = wanted_half_gradients(case, algorithm)
    for way in on_mma.WAYS:
        if on_mma.WAYS[way][0] == algorithm:
            facts = {"saved_values": values, **options_of(case)}
            found = on_mma.differentiate("emulator", way, *given, **facts)
            of = zip((*on_mma.NAMES, "dbias"), found, exact, bounds, strict=False)
            for name, gradient, want, bound in of:
                assert_within(name, gradient.astype(np.float64), want, bound, FLOAT16)
            if case.few:
                facts |= options_of(case.few)
                few = on_mma.differentiate("emulator", way, *given, **facts)
                for name, a, b, want in zip(on_mma.NAMES, few, found, exact, strict=True):
                    mma_helpers.assert_no_growth(name, a, b, want)


def caught_by(algorithm, cases, modules, monkeypatch):
    """What fails first: an emulator error's name, "counts", "values" or None.

    Of the cases of these groups, with `modules` in place of the package's.
    """
    package, name, backward = simt, algorithm, ""
    if algorithm in MMA:
        package, module = mma, f"{algorithm.removeprefix('mma_')}_forward"
        groups = MMA_CASES | MMA_KEYS | MMA_STAGES
        runs = run_mma
    elif algorithm in MMA_BACKWARD:
        package, module = mma, algorithm.removeprefix("mma_")
        name = module.removesuffix("_backward")
        runs, groups = run_mma_backward, MMA_BACKWARD_CASES
    elif algorithm in MMA_STANDARD:
        package, module, name = mma, algorithm.removeprefix("mma_"), "standard"
        runs, groups = run_mma, MMA_STANDARD_CASES
        if module == "standard_backward":  # whose scores, softmax and output are the forward ones
            monkeypatch.setattr(mma, "standard", modules["mma_standard"])
            runs, groups = run_mma_backward, MMA_STANDARD_BACKWARD_CASES
    else:
        name, _, backward = algorithm.partition("_")
        module = algorithm if backward or name == "standard" else f"{algorithm}_forward"
        runs, groups = (run_backward, BACKWARD_CASES) if backward else (run, CASES | SIMT_PAGES)
    monkeypatch.setattr(package, module, modules[algorithm])
    if algorithm == "mma_fa1_backward":  # whose query splits FlashAttention-2's kernel rounds
        monkeypatch.setattr(package, "fa2_backward", modules["mma_fa2_backward"])
    if backward:  # whose scores, softmax and output are standard attention's
        monkeypatch.setattr(simt, "standard", modules["standard"])
    uncached = getattr(planning.planned, "__wrapped__", planning.planned)
    monkeypatch.setattr(planning, "planned", uncached)
    if "arguments" in modules:
        changed = modules["arguments"]
        for module in (ops, calls):
            monkeypatch.setattr(module, "Binding", changed.Binding)
        for public in ("pack", "score_scale"):
            monkeypatch.setattr(execution, public, getattr(changed, public))
    if "options" in modules:
        changed = modules["options"]
        monkeypatch.setattr(options.Features, "initialises", changed.Features.initialises)
        monkeypatch.setattr(options, "FEATURES", changed.FEATURES)
    row_elements = planned_standard.row_elements
    for case in itertools.chain.from_iterable(groups[group] for group in cases):
        found = row_elements if case.resident else lambda *_, **__: 0
        monkeypatch.setattr(planned_standard, "row_elements", found)
        try:
            runs(name, case)
        except AssertionError as error:
            return "counts" if str(error).startswith("counts") else "values"
        except (emulator.EmulatorError, ZeroDivisionError, ValueError) as error:
            return type(error).__name__
    return None


# --- the table -------------------------------------------------------------------------------

HAZARDS = frozenset({"SharedHazard", "UninitialisedRead", "BarrierDivergence", "Deadlock"})
WRONG = {"values", "counts"}
EDGE = {"OutOfBounds", "counts"}
ANY = WRONG | EDGE | HAZARDS | {"GlobalHazard"}

FLASH, FLASH_BACKWARD = ("fa1", "fa2"), ("fa1_backward", "fa2_backward")
EVERY = (*ALGORITHMS, *BACKWARD)
# Those that ask which columns a row tile sees, or which rows a column tile. FA-1's forward pass
# asks for columns too, but passes over those that no row sees and loads nothing.
BY_ROWS, BY_COLUMNS = ("fa2", "fa2_backward"), ("fa1", *FLASH_BACKWARD)


@dataclass(frozen=True)
class Mutant:
    """`needle` becomes `replacement` in `place`: occurrence `which` of `total`.

    `place` is a module or "module.function", `algorithms` are those that it must break in some of
    `cases`, `by` is what may catch it.
    """

    title: str
    place: str
    needle: str
    replacement: str
    by: frozenset
    algorithms: tuple[str, ...]
    cases: tuple[str, ...]
    total: int
    which: int


def mutants():
    found = []

    def add(place, *rows, by="values", to=None, cases="plain", total=1, only=None):
        """Mutants of `place` from rows (title, needle, replacement), one for each occurrence."""
        module, _, _ = place.partition(".")
        by = frozenset({by} if isinstance(by, str) else by)
        to = to or ((module,) if module in KERNELS else FLASH)
        cases = (cases,) if isinstance(cases, str) else cases
        for title, *change in rows:
            for n in range(total) if only is None else only:
                label = f"{title} {n + 1} of {total}" if total > 1 else title
                found.append(Mutant(label, place, *change, by, to, cases, total, n))

    synchronisation_mutants(add)
    forward_mutants(add)
    edge_mutants(add)
    backward_mutants(add)
    visit_mutants(add)
    length_mutants(add)
    first_pass_mutants(add)
    score_mutants(add)
    mask_mutants(add)
    score_gradient_mutants(add)
    draw_mutants(add)
    dropout_mutants(add)
    argument_mutants(add)
    mma_kernel_mutants(add)
    fragment_mutants(add)
    page_mutants(add)
    key_mutants(add)
    mma_backward_mutants(add)
    gradient_fragment_mutants(add)
    precision_mutants(add)
    between_blocks_mutants(add)
    mma_standard_mutants(add)
    corner_mutants(add)
    return found


def synchronisation_mutants(add):
    """Every barrier, wait and commit of every kernel, one at a time."""
    for name, barriers, waits, commits in (
        ("fa1", 3, 1, 2),
        ("fa2", 2, 3, 3),
        ("mma_fa1", 3, 1, 2),
        ("mma_fa2", 3, 3, 3),
        ("standard", 5, 3, 3),
        ("fa1_backward", 4, 2, 2),
        ("fa2_backward", 6, 4, 4),
        ("standard_backward", 3, 1, 1),
        ("mma_fa1_backward", 5, 2, 4),
        ("mma_fa2_backward", 6, 4, 5),
        ("mma_standard", 5, 6, 5),
        ("mma_standard_backward", 3, 3, 3),
    ):
        # Some are for tiles of columns that no row sees.
        how = {"by": HAZARDS, "cases": ("plain", "window", "causal")}
        if name in MMA:
            how["cases"] = ("plain", "window", "16 rows")
        if name in MMA_BACKWARD:
            how["cases"] = ("causal", "two fragments", "wide")
        if name in MMA_STANDARD:
            how["cases"] = ("plain", "odd", "long")
        add(name, ("no barrier", "cuda.syncthreads()", "pass"), total=barriers, **how)
        add(name, ("no wait", " wait_async()", " pass"), total=waits, **how)
        add(name, ("no commit", " commit_async()", " pass"), total=commits, **how)


def page_mutants(add):
    """Faults of K and V in pages."""
    loads = {"mma_fa2": "mma_tile_load._make_load_paged_tile"}
    loads["fa2"] = "simt_tile_load.make_load_paged_tile"
    how = {"by": ANY | {"EmulatorError"}, "cases": "pages"}
    for algorithm, load in loads.items():
        add(
            load,
            ("another head's rows", "pages[page, h]", "pages[page, 0]"),
            ("one look-up for all turns", "if n % shared == 0:", "if n == 0:"),
            ("a look-up in every turn", "if n % shared == 0:", "if True:"),
            **how | {"to": (algorithm,)},
        )
    bound = ("rows past the sequence", "row < uint32(rows_end) and ", "")
    add(loads["fa2"], bound, **how, to=("fa2",))
    add(
        loads["fa2"],
        ("the warp's first lane for all", "max(int32(0), int32(begin - ", "min(int32(0), int32("),
        ("rows of the sequence in a page", "row % uint32(page_size)", "row"),
        **how,
        to=("fa2",),
    )
    add(
        loads["mma_fa2"],
        ("rows past the sequence", "row < uint32(rows_end) and (", "("),
        ("the first turn's rows", "further = down - turn(n - n % shared)[0]", "further = 0"),
        (
            "rows from the tile's first",
            "further = down - turn(n - n % shared)[0]",
            "further = down",
        ),
        ("rows of the sequence in a page", "row % uint32(page_size)", "row"),
        ("elements past the end", "if e < length:", "if True:"),
        **how,
        to=("mma_fa2",),
    )
    both = how | {"to": ("fa2", "mma_fa2")}
    add("heads.make_key_rows", ("the first table", "block_table[b]", "block_table[0]"), **both)
    add(
        "pages.make_page_of",
        ("a page for each row", "// uint32(page_size)", "// uint32(1)"),
        ("looked up by every lane", " and uint32(cuda.threadIdx.x) % uint32(32) == ", " or 0 * "),
        ("looked up past the sequence", "reads and ", ""),
        **both,
    )
    add(
        "pages.turns_in_a_page",
        ("turns beyond a page", "return common // down if", "return 2 * common // down if"),
        ("turns that share no rows", "common % down == 0", "True"),
        **how,
        to=("mma_fa2",),
    )
    add("pages.common_rows", ("rows of the tile", "gcd(page_size, Bc)", "Bc"), **both)


def forward_mutants(add):
    """Faults of the forward kernels and their parts."""
    mask = "softmax._make_scale_and_mask"
    add(
        mask,
        ("scale", "rS[e] *= scale", "rS[e] *= scale * float32(1.001)"),
        ("scale not applied", "rS[e] *= scale", "pass"),
        to=ALGORITHMS,
    )
    add(
        mask,
        ("unmasked pad", "visible = col < int32(int32(Nk) - first)", "visible = True"),
        ("no test for a ragged tile", "inside = last < Nk", "inside = True"),
        ("a pad of one column", "inside = last < Nk", "inside = last <= Nk"),
    )
    seen = "_visible_causal(row, col, 0"
    tested = "inside = inside and _visible_causal(int32(0), along, diagonal)"
    add(
        mask,
        ("diagonal + 1", f"{seen})", f"{seen} + 1)"),
        ("diagonal - 1", f"{seen})", f"{seen} - 1)"),
        ("no test for the diagonal", tested, "pass"),
        (
            "diagonal + 1 in its test",
            "diagonal)\n        if window",
            "diagonal + 1)\n        if window",
        ),
        to=ALGORITHMS,
        cases="causal",
    )
    summed = "rl[i] = rf[i] * rl[i] + rowsum"
    add(
        "softmax._make_online_softmax",
        ("l not rescaled", summed, "rl[i] = rl[i] + rowsum"),
        ("l without the old sum", summed, "rl[i] = rowsum"),
        ("m not updated", "rm[i] = m_new", "pass"),
        ("m of one thread", "m_new = maximum(m_new, cuda.shfl", "maximum(m_new, cuda.shfl"),
        ("l of one thread", "rowsum += cuda.shfl_xor_sync(FULL_WARP, rowsum, lane)", "pass"),
    )
    blind = ("no shift of a blind row", "if m_new == NEG_INF:", "if False:")
    add("softmax._make_online_softmax", blind, cases="causal")
    add(
        "softmax.make_logsumexp",
        ("L without m", "LN2 * (rm[i] + log2(rl[i]))", "LN2 * log2(rl[i])"),
        ("L in units of log2", "LN2 * (rm[i] + log2(rl[i]))", "rm[i] + log2(rl[i])"),
    )
    written = ("L not written", "write_values(rl, Lh, i0, rows_end, ty, tx)", "pass")
    add("rows.make_write_logsumexp", written, by=WRONG, to=("fa1",))
    call = "p.write_logsumexp(rl, rm, L, lh, mh, b, h, options, i_first, i_last, ty, tx)"
    add("fa1", ("L of no row", call, "pass"), by=WRONG)

    # Rescaling of O
    rescaled = "rf[i] * rO[e] + rT[e]"
    added = "simt_stores.make_scale_and_add"
    add(added, ("no rescale", rescaled, "rO[e] + rT[e]"))
    add(added, ("O of the last tile", rescaled, "rT[e]"), to=ALGORITHMS)
    for name in FLASH:
        add(
            name,
            ("no sum over tiles", "p.scale_and_add(rO, rf, rT)", "pass"),
            ("no normalisation", "p.normalise_rows(rO, rl)", "pass"),
        )
    add("fa1", ("no denormalisation", "p.scale_rows(rO, rl)", "pass"))
    begun = ("O, l and m not begun", "start(rO, rl, rm)", "pass")
    add("fa2", ("O, l and m not begun", "p.start(rO, rl, rm)", "pass"), by="UninitialisedRead")
    first = {"by": "UninitialisedRead", "to": ("fa1",), "cases": ("plain", "window")}
    add("simt_state", begun, **first, total=2)
    add(
        "rows.make_normalise_rows",
        ("division of a blind row", "if rl[i] != float32(0.0):", "if True:"),
        by={"values", "ZeroDivisionError"},
        cases="causal",
    )

    # Loops over tiles
    columns = (
        "a tile of columns dropped",
        "while j0 < j_end:",
        "while j0 + uint32(spec.Bc) < j_end:",
    )
    for name, total in (("fa1", 1), ("fa2", 1), ("standard", 2)):
        add(name, columns, by=WRONG | HAZARDS, total=total)
    rows = ("a tile of rows dropped", "while i0 < i_end:", "while i0 + uint32(spec.Br) < i_end:")
    add("fa1", rows, by=WRONG | HAZARDS)
    for name, i, to in (("row", "i", "fa1"), ("column", "j", "fa2")):
        place, there = f"prefetch.next_{name}_tile", f"if {i}_next < {i}_end:"
        how = {"by": WRONG | HAZARDS, "to": (to,)}
        add(place, ("the next tile not loaded", there, "if False:"), **how)
        tile = ("this tile again", f"{i}_next, rows_end)", f"{i}0, rows_end)")
        add(place, tile, **how)
    read = "if initialises or j0 > uint32(0):"
    add(
        "simt_state.make_read_state",
        ("O of pass 1 not read", read, read.replace("(0)", "(spec.Bc)")),
        ("O read before the first pass", read, "if True:"),
        by=WRONG | HAZARDS,
        to=("fa1",),
    )
    splits = "cuda.gridDim.x - 1 - cuda.blockIdx.x"
    add(
        "visits.make_split",
        ("rows of another split", splits, splits.replace("- 1 ", "")),
        ("rows of the first split", splits, "0"),
        ("rows of the next splits", "min(rows, uint32(i_first + split_rows))", "rows"),
        by=ANY,
        to=("fa1",),
        cases="causal",
    )

    # Heads
    for name in FLASH:
        for head in ("key_rows(K, b, hk,", "key_rows(V, b, hk,"):
            other = head.replace("hk", "h % uint32(group)")
            how = {"by": {"values", "OutOfBounds"}, "cases": ("plain", "odd")}
            add(name, (f"another head's {head[9]}", head, other), **how)
    add(
        "standard",
        ("another K/V head", "h // uint32(group)", "h % uint32(group)"),
        by={"values", "OutOfBounds"},
        total=2,
    )

    y, z = "uint32(cuda.blockIdx.y)", "uint32(cuda.blockIdx.z)"
    for place, to in (
        ("heads.make_heads", (*FLASH, "fa2_backward")),
        ("heads.make_key_head", FLASH_BACKWARD),
    ):
        how = {"by": ANY, "to": to}
        add(place, ("the first entry", z, "uint32(0)"), **how, cases="scores")
        add(place, ("the first head", y, "uint32(0)"), **how, cases="odd")
    add(
        "simt_threads.make_thread",
        ("one thread a row", "% uint32(TX)", "% uint32(1)"),
        ("all threads a row", "// uint32(TX)", "// uint32(1024)"),
        by=ANY,
        to=EVERY,
    )

    # Products
    add(
        "simt_products.make_product",
        ("columns of P dropped", "int64(0), uint32(STEPS)", "int64(0), uint32(STEPS - 1)"),
        to=ALGORITHMS,
    )
    add(
        "simt_products._make_partial_scores",
        ("columns of Q dropped", "int64(FIRST), ", "int64(FIRST + 16), "),
        by={"values", *HAZARDS, "OutOfBounds", "UninitialisedRead"},
        to=ALGORITHMS,
    )
    how = {"by": {"values", *HAZARDS, "UninitialisedRead"}, "cases": "swizzled"}
    add(
        "simt_products._make_partial_scores",
        ("Q's swizzle forgotten", "column ^ q_flip", "column"),
        ("K's swizzle forgotten", "column ^ k_flip", "column"),
        to=(*FLASH, *FLASH_BACKWARD),
        **how,
    )
    forgotten = ("P's swizzle forgotten", "4 * k ^ p_flip", "4 * k")
    add("simt_products.make_product", forgotten, to=ALGORITHMS, **how)
    add(
        "simt_products.make_product",
        ("V's swizzle forgotten in four rows", " ^ flip_v(n)", ""),
        ("V's swizzle forgotten beyond them", " ^ flip_v(k)", ""),
        to=FLASH_BACKWARD,
        **how,
    )
    add(
        "simt_products.make_add_transposed_product",
        ("P's swizzle forgotten", " ^ flip_p(n)", ""),
        ("dO's swizzle forgotten", " ^ flip_b(n)", ""),
        to=FLASH_BACKWARD,
        **how,
    )
    add(
        "simt_tile_load.make_load_tile",
        ("copies not swizzled", "(c ^ flip(r) // 4)", "c"),
        to=EVERY,
        **how,
    )
    add("simt_stores.make_store_p", ("P not swizzled", " ^ flipped", ""), to=FLASH, **how)
    add(
        "simt_stores.make_store_ds", ("dS not swizzled", " ^ flipped", ""), to=FLASH_BACKWARD, **how
    )
    forgotten = ("dO's swizzle forgotten", " ^ flip(ty)", "")
    add("simt_stores.make_row_dots", forgotten, to=("fa1_backward",), **how)
    for place, register in (
        ("simt_products.make_product", "rT[e]"),
        ("simt_products._make_partial_scores", "rS[e]"),
        ("rows.make_start", "rO[e]"),
        ("rows.make_start", "rl[i]"),
    ):
        begun = (f"{register} not begun at 0", f"{register} = float32(0.0)", "pass")
        add(place, begun, by="UninitialisedRead")
    add(
        "rows.make_start",
        ("m not begun at -inf", "rm[i] = NEG_INF", "rm[i] = float32(0.0)"),
        cases="long",
    )
    add(
        "simt_stores.make_store_p",
        ("rows of another thread", "i * TY * pitch", "i * pitch"),
        by={"values", *HAZARDS},
        cases="odd",
    )

    # Standard attention
    add(
        "standard",
        ("P without the inverse", "* inverse", ""),
        ("L without l", "m + LN2 * log2(l)", "m"),
    )
    matrix = ("S past the matrix", "if row < Nq and col < Nk:", "if row < Nq:")
    add("standard", matrix, by="OutOfBounds")
    add("standard", ("P of one warp's sum", "range(WARPS)", "range(1)"), cases="long")
    guard = ("no guard of -inf", "if s != NEG_INF:", "if True:")
    add("softmax.exp_of_difference", guard, to=("standard",), cases="causal")


def edge_mutants(add):
    """Faults at the edges of tiles in memory."""
    write_columns = "simt_stores.make_write_columns"
    for place, to in (
        ("simt_stores.make_read_rows", ("fa1",)),
        ("simt_stores.make_write_rows", ALGORITHMS),
        (write_columns, tuple(BACKWARD)),
    ):
        how = {"by": EDGE, "to": to, "cases": ("plain", "odd")}
        add(place, ("no row bound", "if row < rows_end and", "if"), total=2, **how)
        add(
            place,
            ("no column bound", " and uint32(col + n) < uint32(d)", ""),
            ("no column bound, 16 bytes", " and col < uint32(d)", ""),
            **how,
        )
    add(
        write_columns,
        ("rows of one group", "(ty + (r // 4) * TY)", "ty"),
        by=ANY,
        to=tuple(BACKWARD),
        cases="long",
    )
    add(
        "simt_stores.make_add_rows",
        ("no row bound", "if row < rows_end and", "if"),
        ("no column bound", " and col < uint32(d)", ""),
        by=EDGE,
        to=("fa2_backward",),
    )
    guard, leader = "tx == uint32(0) and row < rows_end and", "tx == uint32(0) and"
    read, write = "rows._make_read_values", "rows.make_write_values"
    for place, to in ((read, ("fa1", *FLASH_BACKWARD)), (write, FLASH)):
        add(place, ("no row bound", guard, leader), by=EDGE, to=to)
        add(place, ("every lane", guard, "row < rows_end and"), by="counts", to=to)
    shared = (
        "values not shared",
        "rv[i] = cuda.shfl_sync(FULL_WARP, value, first)",
        "rv[i] = value",
    )
    add(read, shared, to=FLASH_BACKWARD)
    load = "simt_tile_load.make_load_tile"
    rows = ("no row bound of a copy", "row < uint32(rows_end) and ", "")
    columns = ("no column bound of a copy", " and col < uint32(cols_end)", "")
    count = ("no count bound", "min(int32(width), int32(cols_end - col))", "int32(width)")
    add(load, rows, by=EDGE, to=ALGORITHMS)
    add(load, columns, by=EDGE | {"ValueError"}, to=ALGORITHMS)
    add(load, count, by=EDGE, to=("standard",))
    past = ("a copy past the tile", "if even or copy < uint32(copies):", "if True:")
    add(load, past, by=ANY | {"EmulatorError"}, to=ALGORITHMS)


def backward_mutants(add):
    """Faults of the backward kernels and of the parts that only they have."""
    every = tuple(BACKWARD)

    # D
    add(
        "gradients.make_score_gradients",
        ("D added", "- rD[i]", "+ rD[i]"),
        ("no D", "- rD[i]", ""),
        ("dS without P", "p * (", "("),
        to=FLASH_BACKWARD,
    )
    add("standard_backward", ("D added", "(g - D)", "(g + D)"))
    add("standard_backward", ("D of one warp", "range(WARPS)", "range(1)"), cases="long")
    shuffled = "dot += cuda.shfl_xor_sync(FULL_WARP, dot, lane)"
    add("standard_backward", ("D of one thread", shuffled, "pass"))
    add("fa2_backward", ("D of one thread", shuffled.replace("lane", "step"), "pass"))
    add(
        "simt_stores.make_row_dots",
        ("D of one thread", shuffled, "pass"),
        ("D of the first column group", "for c in range(DN):", "for c in range(DN - 1):"),
        ("D of another row", "i * TY * row_bytes", "i * row_bytes"),
        by=WRONG | HAZARDS,
        to=("fa1_backward",),
    )
    leader = "if lane == uint32(0) and row < Nq:"
    add(
        "fa2_backward",
        ("every lane writes D", leader, "if row < Nq:"),
        ("rows past the end", leader, "if lane == uint32(0):"),
        ("rows past the end of O", "        if row < Nq:", "        if True:"),
        by=EDGE,
    )

    # Scale
    add("fa1_backward", ("dQ without scale", "(rdQ, dQh, scale,", "(rdQ, dQh, float32(1.0),"))
    add(
        "fa2_backward",
        ("dQ without scale", "(rdQ, dQh, scale,", "(rdQ, dQh, float32(1.0),"),
        ("dQ of the sweep without scale", "+= scale * rT[e]", "+= rT[e]"),
    )
    add("standard_backward", ("dS without scale", "scale * ds", "ds"))
    for name, total in (("fa1_backward", 1), ("fa2_backward", 2)):
        natural = (
            "S in natural units",
            "scale_and_mask(rS, scale_log2,",
            "scale_and_mask(rS, scale,",
        )
        add(name, natural, total=total)
        add(
            name,
            ("dK without scale", "p.scale_columns(rdK, scale)", "pass"),
            ("dV scaled for dK", "scale_columns(rdK", "scale_columns(rdV"),
            ("dV from dS", "product(rdV, sP,", "product(rdV, sdS,"),
            ("dK from P", "product(rdK, sdS,", "product(rdK, sP,"),
        )
    add(
        "gradients.make_scale_columns",
        ("another factor", "rT[e] *= factor", "rT[e] *= factor * float32(1.0001)"),
        to=FLASH_BACKWARD,
    )
    add(
        "simt_stores.make_add_rows",
        ("another factor", "factor * rT", "factor * float32(1.0001) * rT"),
        to=("fa2_backward",),
    )

    # P from L
    from_L = "softmax.make_softmax_from_lse"
    add(
        from_L,
        ("L in units of log2", "LOG2E * rL[i]", "rL[i]"),
        ("the score itself", "exp2(s - shift)", "s - shift"),
        to=FLASH_BACKWARD,
    )
    blind = ("no shift of a blind row", "if rL[i] == NEG_INF:", "if False:")
    add(from_L, blind, to=FLASH_BACKWARD, cases="causal")

    # Heads of a group
    wrong = {"by": WRONG | {"OutOfBounds", "GlobalHazard"}, "cases": "odd"}
    add(
        "standard_backward",
        ("one head of the group", "uint32(h + group)", "uint32(h + 1)"),
        ("heads of another group", "h = uint32(hk * group)", "h = hk"),
        **wrong,
    )
    add(
        "heads.make_query_heads",
        ("one head of the group", "uint32(group)", "uint32(1)"),
        ("heads of another group", "uint32(hk * group)", "hk"),
        ("no groups", "if grouped:", "if False:"),
        to=FLASH_BACKWARD,
        **wrong,
    )
    head = ("no groups", "if grouped else h", "if False else h")
    add("heads.make_heads", head, to=tuple(FLASH), **wrong)
    for head in ("key_rows(K, b, hk,", "key_rows(V, b, hk,"):
        other = (f"another head's {head[9]}", head, head.replace("hk", "h % uint32(group)"))
        how = {"by": {"values", "OutOfBounds"}, "cases": "odd"}
        add("fa2_backward.make_query_gradients", other, **how)

    # Loops over tiles
    for name in every:
        rows = (
            "a tile of rows dropped",
            "while i0 < i_end:",
            "while i0 + uint32(spec.Br) < i_end:",
        )
        add(name, rows, by=ANY)
    add(
        "simt_tile_load.make_load_next_rows",
        ("the next tile not loaded", "if i_next < i_end:", "if False:"),
        ("this tile of Q again", "Q, i_next, rows_end)", "Q, i0, rows_end)"),
        ("this tile of dO again", "dO, i_next, rows_end)", "dO, i0, rows_end)"),
        by=ANY,
        to=FLASH_BACKWARD,
    )
    columns = (
        "a tile of columns dropped",
        "while j0 < j_end:",
        "while j0 + uint32(spec.Bc) < j_end:",
    )
    for place in ("fa1_backward", "fa2_backward.make_query_gradients"):
        add(place, columns, by=ANY)
    part = ("a part of the row", "while col < Nk:", "while col + uint32(threads) < Nk:")
    add("standard_backward", part, by=ANY, total=2)

    # dQ through memory
    seen = "scale, j0 > uint32(0), i0"
    add(
        "fa1_backward",
        ("dQ read in the first pass", seen, "scale, True, i0"),
        ("dQ not read in the second pass", seen, "scale, j0 > uint32(Bc), i0"),
        by=WRONG,
    )
    last = ("dQ of the last pass", "+ old[e]", "")
    add("simt_stores.make_update_rows", last, to=("fa1_backward",))
    add(
        "fa2_backward",
        ("dQ not begun at 0", "dQh[row, col] = float32(0.0)", "pass"),
        by=WRONG,
    )
    twice = ("dQ twice", "                if atomic:", "                if True:")
    begun = ("dQ begun at 0 for nothing", "if clear and row < rows:", "if row < rows:")
    add("fa2_backward", twice, begun, by=WRONG | {"ReadOnlyStore"})

    # The products
    transposed, by = "simt_products.make_add_transposed_product", {"values", "UninitialisedRead"}
    four = ("four rows dropped", "int64(0), uint32(STEPS)", "int64(0), uint32(STEPS - 1)")
    add(transposed, four, by=by, to=every)
    add(transposed, ("one row of four", "in range(4):", "in range(1):"), by=by, to=every, total=2)
    add(transposed, ("the sum of one tile", "rT[e] += p * b[0]", "rT[e] = p * b[0]"), to=every)
    for place, registers in (
        ("gradients.make_start_columns", ("rdK[e]", "rdV[e]")),
        ("standard_backward", ("rdV[e]",)),
        ("simt_state.make_initialise_dq", ("rdQ[e]",)),
        ("fa2_backward", ("rdQ[e]",)),
    ):
        for register in registers:
            begun = (f"{register} not begun at 0", f"{register} = float32(0.0)", "pass")
            to = None if place in KERNELS else FLASH_BACKWARD
            if register == "rdQ[e]" and to:
                to = ("fa1_backward",)
            add(place, begun, by="UninitialisedRead", to=to, cases=("plain", "window"))
    add(
        "simt_stores.make_store_ds",
        ("rows of another thread", "i * TY * pitch", "i * pitch"),
        by={"values", *HAZARDS},
        to=FLASH_BACKWARD,
    )


def visit_mutants(add):
    """Faults of which tiles are visited: the diagonal, windows, block masks."""
    columns, rows = "visits.make_column_range", "visits._make_row_range"
    both = ("fa1", *BY_ROWS)

    # The diagonal
    end, hidden = "int32(rows_end + diagonal)", "int32(col0) - diagonal - int32(rows_begin))"
    add(
        columns,
        ("no column tile skipped", "        if causal:", "        if False:"),
        ("columns end + 1", end, "int32(rows_end + diagonal + 1)"),
        ("a blind tile visited", f"max(int32(0), {end})", f"max(int32(1), {end})"),
        by="counts",
        to=BY_ROWS,
        cases="causal",
    )
    less = ("columns end - 1", end, "int32(rows_end + diagonal - 1)")
    add(columns, less, by=WRONG | HAZARDS, to=both, cases="causal")
    first = "rows_begin + hidden // int32(Br) * Br"
    add(
        rows,
        ("no row tile skipped", "        if causal:", "        if False:"),
        ("a row tile too many skipped", first, f"{first} + Br"),
        ("first row + 1", hidden, f"{hidden[:-1]} + 1)"),
        ("first row - 1", hidden, f"{hidden[:-1]} - 1)"),
        ("first row below 0", f"max(int32(0), {hidden}", hidden[:-1]),
        by=ANY,
        to=BY_COLUMNS,
        cases="causal",
    )
    split = ("first row not from the split's", hidden, "int32(col0) - diagonal)")
    add(rows, split, by=ANY, to=("fa1",), cases="causal")
    for place, guard, to in (
        ("fa1", "i0 < i_end", "fa1"),
        ("fa2", "j0 < j_end", "fa2"),
        ("prefetch.next_column_tile", "j_next < j_end", "fa2"),
        ("prefetch.next_row_tile", "i_next < i_end", "fa1"),
    ):
        unseen = ("unseen tiles loaded", f"if {guard}:", "if True:")
        add(place, unseen, by=ANY, to=(to,), cases=("causal", "sparse"))

    # Windows
    end, first = "diagonal + options.window_right)", "row0 + diagonal - options.window_left"
    clamped = "max(int32(0), first) // int32(Bc) * int32(Bc)"
    add(
        columns,
        ("window: columns to the end", "min(int32(Nk), max(int32(0), last))", "int32(Nk)"),
        ("window: columns end + 1", end, f"{end[:-1]} + 1)"),
        ("window: columns from 0", clamped, "0"),
        ("window: first column - 1", first, f"{first} - 1"),
        ("window: first column within a tile", clamped, "max(int32(0), first)"),
        ("window: a blind tile visited", "max(int32(0), last)", "max(int32(1), last)"),
        by="counts",
        to=BY_ROWS,
        cases="window",
    )
    add(
        columns,
        ("window: columns end - 1", end, f"{end[:-1]} - 1)"),
        ("window: first column + 1", first, f"{first} + 1"),
        ("window: first column below 0", "max(int32(0), first)", "first"),
        by=WRONG,
        to=both,
        cases="window",
    )
    hidden, last = "options.window_right - int32(rows_begin))", "diagonal + options.window_left)"
    add(
        rows,
        ("window: first row + 1", hidden, f"{hidden[:-1]} + 1)"),
        ("window: first row - 1", hidden, f"{hidden[:-1]} - 1)"),
        ("window: first row below 0", "max(int32(0), hidden) //", "hidden //"),
        ("window: rows to the end", "min(int32(i_end), max(int32(0), last))", "i_end"),
        ("window: rows end + 1", last, f"{last[:-1]} + 1)"),
        ("window: rows end - 1", last, f"{last[:-1]} - 1)"),
        ("window: rows of a first column", "+ Bc - diagonal", "- diagonal"),
        by=WRONG | {"GlobalHazard"},
        to=BY_COLUMNS,
        cases="window",
    )
    # The first tile of FA-1's forward pass is one that the first row sees.
    blind = ("window: a blind tile visited", "max(int32(0), last)", "max(int32(1), last)")
    add(rows, blind, by="counts", to=FLASH_BACKWARD, cases="window")
    split = ("window: first row not from the split's", hidden, "options.window_right)")
    add(rows, split, by=WRONG, to=("fa1",), cases="window")
    for name in FLASH_BACKWARD:
        add(name, ("unseen tiles loaded", "if i0 < i_end:", "if True:"), by=ANY, cases="window")
    unseen = ("unseen tiles loaded", "if i_next < i_end:", "if True:")
    how = {"to": FLASH_BACKWARD, "cases": "window"}
    add("simt_tile_load.make_load_next_rows", unseen, by=ANY, **how)

    # No tile past the last: a block mask has none
    add(
        columns,
        ("past the last", "min(int32(Nk), max(int32(0), int32(", "(max(int32(0), int32("),
        ("window: past the last", "min(int32(Nk), max(int32(0), last))", "max(int32(0), last)"),
        by="OutOfBounds",
        to=BY_ROWS,
        cases="sparse",
    )
    past = (
        "window: past the last",
        "min(int32(i_end), max(int32(0), last))",
        "max(int32(0), last)",
    )
    add(rows, past, by="OutOfBounds", to=BY_COLUMNS, cases="sparse")

    # Block masks
    for name, i, to in (("column", "j", BY_ROWS), ("row", "i", BY_COLUMNS)):
        add(
            f"visits.make_next_{name}",
            ("no block skipped", "if sparse:", "if False:"),
            ("the others skipped", "== 0:", "!= 0:"),
            ("one block alone skipped", f"while {i}0", f"if {i}0"),
            ("past the last block", f"{i}0 < {i}_end and ", ""),
            ("blocks of another head", "[b, h,", "[b, 0,"),
            ("rows of other blocks", "// uint32(Br)", "// uint32(Bc)"),
            ("columns of other blocks", "// uint32(Bc)", "// uint32(Br)"),
            by=ANY,
            to=to,
            cases="sparse",
        )
    for place, name, axes, to in (
        ("visits.make_visited_columns", "column", "j0, j_end, i0", BY_ROWS),
        ("visits.make_visited_rows", "row", "i0, i_end, j0", ("fa1",)),
    ):
        call = f"next_{name}({axes}, b, h, options)"
        first = ("the first block not skipped", call, axes[:2])
        add(place, first, by=ANY, to=to, cases="sparse")
    for place, name, axes, to in (
        ("prefetch.next_column_tile", "column", "j_end, i0", ("fa2",)),
        ("prefetch.next_row_tile", "row", "i_end, j0", ("fa1",)),
        ("simt_tile_load.make_load_next_rows", "row", "i_end, j0", FLASH_BACKWARD),
    ):
        tile = "uint32(j0 + Bc)" if name == "column" else "uint32(i0 + Br)"
        call = f"next_{name}({tile}, {axes}, b, h, options)"
        add(place, ("the next block not skipped", call, tile), by=ANY, to=to, cases="sparse")


def length_mutants(add):
    """Faults of how many rows and columns there are, and of what becomes of the others."""
    columns, rows = "visits.make_column_range", "visits._make_row_range"
    lengths = "heads.make_lengths"

    # Packed sequences
    for name, start, other in (
        ("query_rows", "options.q_starts", "options.k_starts"),
        ("key_rows", "options.k_starts", "options.q_starts"),
    ):
        add(
            f"heads.make_{name}",
            ("not packed", "if packed:", "if False:"),
            ("from the next row", f"{start}[b] :", f"{start}[b] + 1 :"),
            ("from the row before", f"{start}[b] :", f"max({start}[b] - 1, 0) :"),
            ("from the first sequence", f"{start}[b] :", "0 :"),
            ("from the other's start", f"{start}[b] :", f"{other}[b] :"),
            ("to the next row", f"{start}[b + 1]]", f"{start}[b + 1] + 1]"),
            ("to the row before", f"{start}[b + 1]]", f"{start}[b + 1] - 1]"),
            ("to the other's end", f"{start}[b + 1]]", f"{other}[b + 1]]"),
            by=ANY,
            to=EVERY,
            cases="packed",
        )
    # The flash kernels have no rows but a sequence's.
    add(
        lengths,
        ("rows not packed", "if packed:", "if False:"),
        ("columns not packed", "if packed_keys:", "if False:"),
        ("all rows", "options.q_starts[b + 1] - options.q_starts[b]", "rows"),
        ("all columns", "options.k_starts[b + 1] - options.k_starts[b]", "columns"),
        by=ANY,
        to=("standard", "standard_backward"),
        cases="packed",
    )

    # Lengths
    for n, other in (("q", "kv"), ("kv", "q")):
        add(
            lengths,
            (f"{n}_lens not asked", f"if {n}_lens:", "if False:"),
            (f"{n}_lens of the first entry", f"{n}_lens[b]", f"{n}_lens[0]"),
            by=ANY,
            to=EVERY,
            cases=f"{n}_lens",
        )
        swapped = (f"{other}_lens for {n}_lens", f"options.{n}_lens[b]", f"options.{other}_lens[b]")
        add(lengths, swapped, by=ANY, to=EVERY, cases="lengths")
    add(lengths, ("swapped", "return Nq, Nk", "return Nk, Nq"), by=ANY, to=EVERY, cases="lengths")
    add(
        columns,
        ("rows past the end visited", "features.q_lens or", "False or"),
        ("a tile at the end visited", "row0 >= Nq", "row0 > Nq"),
        by="counts",
        to=BY_ROWS,
        cases="q_lens",
    )
    packed = ("packed rows past the end visited", "or features.packed", "or False")
    add(columns, packed, by="counts", to=BY_ROWS, cases="packed")
    add(
        rows,
        ("columns past the end visited", "if lengths and col0 >= Nk:", "if False:"),
        ("a tile at the end visited", "col0 >= Nk", "col0 > Nk"),
        by=WRONG,
        to=FLASH_BACKWARD,
        cases="kv_lens",
    )
    add(
        rows,
        ("packed columns past the end visited", "if lengths and col0 >= Nk:", "if False:"),
        by="counts",
        to=("fa2_backward",),
        cases="packed",
    )
    tile = ("tiles past the end", "if shortened and i0 >= Nq:", "if False:")
    add("standard", tile, by="counts", cases="q_lens", total=2)
    for name in ("standard", "standard_backward"):
        row = ("rows past the end", "if shortened and row >= Nq:", "if False:")
        add(name, row, by=ANY, cases="q_lens")
    tile = ("tiles past the end", "if shortened and j0 >= Nk:", "if False:")
    add("standard_backward", tile, by="counts", cases="kv_lens")
    past = ("L past the sequence", " and row < uint32(Lh.shape[0])", "")
    add("standard", past, by=ANY, cases="packed")

    # What is written where nothing is valid
    sweep, output = "fa2_backward.make_query_gradients", "standard.make_standard_output"
    for place, *writes in (
        ("fa1", "split(split_rows, rows"),
        ("fa2", "(rO, Oh, i0, rows", "(rl, Lh, i0, rows"),
        (output, "(rO, Oh, i0, rows"),
        ("fa1_backward", "min(rows, uint32(i_begin"),
        ("fa2_backward", "clear and row < rows"),
        (sweep, "(rdQ, dQh, i0, rows"),
    ):
        for write in writes:
            valid = (f"valid rows alone: {write}", write, re.sub(r"\brows\b", "Nq", write))
            add(place, valid, by=WRONG, cases="q_lens")
    valid = ("L of valid rows alone", "row < uint32(Lh.shape[0])", "row < Nq")
    add("standard", valid, by=WRONG, cases="q_lens")
    for write in ("while i0 < rows_end", "(rdQ, dQh, i0, rows_end"):
        to, lens = ("fa1_backward",), write.replace("rows_end", "uint32(options.q_lens[b])")
        valid = (f"valid rows alone: {write}", write, lens)
        add("simt_state.make_initialise_dq", valid, by=WRONG, to=to, cases="q_lens")
    for part in ("initialise", "write_logsumexp"):
        call = re.search(rf"p\.{part}\(.*\)", source("fa1"))[0]
        valid = (f"valid rows alone: {part}", call, call.replace("i_last", "min(i_last, Nq)"))
        add("fa1", valid, by=WRONG, cases="q_lens")
    for name, *writes in (
        ("fa1_backward", "p.passes(columns", "dKh, j0, columns", "dVh, j0, columns"),
        ("fa2_backward", "dKh, j0, columns", "dVh, j0, columns"),
        ("standard_backward", "dVh, j0, columns"),
    ):
        for write in writes:
            valid = (f"valid columns alone: {write}", write, write.replace("columns", "Nk"))
            add(name, valid, by=WRONG, cases="kv_lens")

    # What is read where nothing is valid
    backward = "fa2_backward.make_backward"
    both = ("(sQ, Qh, i0, Nq", "(sdO, dOh, i0, Nq")
    next_too = (*both, "dOh, i0, i_end, Nq")
    for place, *reads in (
        ("fa2", "(sQ, Qh, i0, Nq"),
        (output, "(sP, Ph, i0, Nq"),
        ("standard_backward", "(sP, Ph, i0, Nq", "(sdO, dOh, i0, Nq"),
        (
            "fa1_backward",
            *next_too,
            "(rL, Lh, i0, Nq",
            "(rD, sdO, Oh, i0, Nq",
            "> uint32(0), i0, Nq",
        ),
        (backward, *next_too, "(rL, Lh, i0, Nq", "(rD, Dh, i0, Nq", "scale, i0, Nq"),
        (sweep, *both, "(rL, Lh, i0, Nq", "(rD, Dh, i0, Nq"),
        ("fa2_backward", "        if row < Nq"),
    ):
        for read in reads:
            more = (f"all rows: {read.strip()}", read, read.replace("Nq", "rows"))
            add(place, more, by=ANY, cases="q_lens")
    more = ("all rows", "load_q(sQ, Qh, i0, Nq", "load_q(sQ, Qh, i0, Qh.shape[0]")
    add("standard", more, by=ANY, cases="q_lens")
    for name in ("Q", "dO"):
        more = (
            f"all rows: the next {name}",
            f"{name}, i_next, rows_end",
            f"{name}, i_next, {name}.shape[0]",
        )
        add("simt_tile_load.make_load_next_rows", more, by=ANY, to=FLASH_BACKWARD, cases="q_lens")
    add(
        "fa1",
        ("all rows", "i_stop = uint32(min(i_last, Nq))", "i_stop = i_last"),
        ("all rows: Q", "(sQ, Qh, i0, i_stop", "(sQ, Qh, i0, i_last"),
        ("all rows: the next Q", "(sQ, Qh, i0, i_end, i_stop", "(sQ, Qh, i0, i_end, i_last"),
        by=ANY,
        cases="q_lens",
    )
    for place, *reads in (
        ("fa1", "(sK, Kh, j0, Nk", "(sV, Vh, j0, Nk"),
        ("fa2", "(sK, Kh, j0, Nk", "(sV, Vh, j0, Nk", "(sK, Kh, j0, j_end, Nk"),
        ("standard", "(sK, Kh, uint32(j0 + Bc), Nk", "(sV, Vh, j0, Nk"),
        *((p, "(sK, Kh, j0, Nk", "(sV, Vh, j0, Nk") for p in ("fa1_backward", backward, sweep)),
    ):
        for read in reads:
            more = (f"all columns: {read}", read, read.replace("Nk", f"{read[5:7]}.shape[0]"))
            add(place, more, by=ANY, cases="kv_lens")


def first_pass_mutants(add):
    """Faults of what starts O, l, m and dQ of FA-1: its first pass, or the kernel."""
    both = ("fa1", "fa1_backward")
    takes = "takes_all=not spec.features.initialises"
    place = "visits.make_rows_of_pass"
    mutant = ("the first pass takes all", takes, "takes_all=True")
    add(place, mutant, by=WRONG, to=both, cases="window")
    mutant = ("the first pass leaves rows out", takes, "takes_all=False")
    add(place, mutant, by=WRONG, to=both, cases="causal")
    for part, name in (("initialise", "fa1"), ("initialise_dq", "fa1_backward")):
        place, how = f"simt_state.make_{part}", {"by": ANY | {"ZeroDivisionError"}}
        mutant = ("nothing initialised", "        if initialises:", "        if False:")
        add(place, mutant, **how, to=(name,), cases="window")
        mutant = (
            "the kernel initialises in any case",
            "        if initialises:",
            "        if True:",
        )
        add(place, mutant, by="counts", to=(name,))
        call = re.search(rf"p\.{part}\(.*\)", source(name))[0]
        add(name, (f"no {part}", call, "pass"), **how, cases="window")
    add(
        "visits._make_row_range",
        ("rows without a first pass", "if not takes_all or col0 > uint32(0):", "if True:"),
        ("every pass takes all", "if not takes_all or col0 > uint32(0):", "if not takes_all:"),
        by=WRONG,
        to=both,
        cases="causal",
    )
    # One of the three that `write_state` writes left out.
    text = inspect.getsource(state.make_initialise)
    call = re.search(r"write_state\(rO.*\)", text)[0]
    steps = text[text.index("    initialises = ") : text.index(call) + len(call)]
    bound = "    write_rows, write_values = make_write_rows(spec), make_write_values(spec)\n"
    writes = [
        f"{write}, i0, rows_end, ty, tx)"
        for write in ("write_rows(rO, O", "write_values(rl, l", "write_values(rm, m")
    ]
    for write in writes:
        rest = "; ".join(w for w in writes if w != write)
        none = (f"no {write}", steps, bound + steps.replace(call, rest))
        add("simt_state.make_initialise", none, by=ANY, to=("fa1",), cases="window")
    for write in ("write_rows(rO, O", "write_values(rl, l", "write_values(rm, m"):
        none = (f"no {write}", f"{write}, row0, rows_end, ty, tx)", "pass")
        add("simt_state.make_write_state", none, by=ANY, to=("fa1",))
    read = ("O of the first pass not read", "if initialises or j0 >", "if j0 >")
    add("simt_state.make_read_state", read, by=WRONG, to=("fa1",), cases="window")
    read = ("dQ of the first pass not read", "if initialises or seen:", "if seen:")
    update = "simt_stores.make_update_rows"
    add(update, read, by=WRONG, to=("fa1_backward",), cases="window")
    none = ("no first pass without columns", "j_end = uint32(max(j_end, uint32(1)))", "pass")
    to = ("fa1", "mma_fa1")
    add("visits.make_column_passes", none, by=WRONG, to=to, cases="kv_lens")
    none = ("no first pass without columns", "if packed:", "if False:")
    to = ("fa1_backward", "mma_fa1_backward")
    add("visits.make_passes", none, by=WRONG, to=to, cases="packed")
    one = ("one head initialised", "while g < heads:", "while g < uint32(1):")
    initialise = "simt_state.make_initialise_dq"
    add(initialise, one, by=WRONG, to=("fa1_backward",), cases="window")
    # Backward, a first pass that takes all does as well where there is a window alone.
    needs = "self.window or self.q_lens or self.sparse"
    for feature in ("window", "q_lens", "sparse"):
        add(
            "options.Features",
            (
                f"{feature} leaves it to the first pass",
                needs,
                needs.replace(f"self.{feature}", "False"),
            ),
            by=ANY,
            to=("fa1",) if feature == "window" else ("fa1", "fa1_backward"),
            cases=feature,
        )


def score_mutants(add):
    """Faults of what is done to scores: cap, slopes, bias."""
    mask = "softmax._make_scale_and_mask"
    added = "bias.make_add_bias"
    text = inspect.getsource(softmax._make_scale_and_mask)
    steps = text[text.index("        if softcap:") : text.index("        last = uint32(")]
    alibi, bias = steps.index("        if alibi:"), steps.index("        if bias:")
    cap, alibi, bias = steps[:alibi], steps[alibi:bias], steps[bias:]
    distance, first = "slope * _distance(key, col, float32(0.0))", "column_of(tx, 0)) - diagonal)"
    add(
        mask,
        ("the cap last", steps, alibi + bias + cap),
        ("the cap after the slopes", steps, alibi + cap + bias),
        ("no cap", "if softcap:", "if False:"),
        ("a cap of 1", "options.softcap * math", "math"),
        ("no slopes", "if alibi:", "if False:"),
        ("slopes of another head", "slopes[b, h]", "slopes[b, 0]"),
        ("slopes of another entry", "slopes[b, h]", "slopes[0, h]"),
        ("slopes added", "-= slope", "+= slope"),
        ("slopes without distance", distance, "slope"),
        ("distance from another diagonal", first, first.replace("diagonal", "int32(0)")),
        ("no bias", "if bias:", "if False:"),
        by=WRONG,
        to=EVERY,
        cases="scores",
    )
    add(
        added,
        ("bias subtracted", "+= unit * Bh", "-= unit * Bh"),
        ("bias of another head", "options.bias[b, h]", "options.bias[b, 0]"),
        ("bias of another entry", "options.bias[b, h]", "options.bias[0, h]"),
        ("bias transposed", "Bh[row, col]", "Bh[col % Nq, row]"),
        by=WRONG,
        to=EVERY,
        cases="scores",
    )
    slopes = ("slopes in natural units", "unit * options.slopes", "options.slopes")
    natural = ("bias in natural units", "unit * Bh", "Bh")
    for place, row in ((mask, slopes), (added, natural)):
        add(place, row, to=(*FLASH, *FLASH_BACKWARD), cases="scores")
    units = ("units of log2", "ONE, hides_blocks=True", "LOG2E, hides_blocks=True")
    all_tiles = "softmax.make_scale_and_mask_all"
    add(all_tiles, units, to=("standard", "standard_backward"), cases="scores")
    add(
        "bias.make_read_bias",
        ("not read", "if reads and ", "if False and "),
        ("bias of another head", "options.bias[b, h]", "options.bias[b, 0]"),
        ("bias of another entry", "options.bias[b, h]", "options.bias[0, h]"),
        ("a pair the other way round", "= pair[1]", "= pair[0]"),
        ("bias of another row", "row_of(ty, i)", "row_of(ty, 0)"),
        by=ANY,
        to=MMA,
        cases="scores",
    )
    add(
        "bias._whole",
        ("rows past the end", "row < Nq and ", ""),
        ("columns past the end", "col < Nk and ", ""),
        by=EDGE,
        to=MMA,
        cases="scores",
    )
    guard = "                    if row < Nq and col < Nk:\n                        "
    add(
        added,
        ("no row bound of a bias", f"{guard}rS", f"{guard}rS".replace("row < Nq and ", "")),
        ("no column bound of a bias", f"{guard}rS", f"{guard}rS".replace(" and col < Nk", "")),
        by="OutOfBounds",
        to=EVERY,
        cases="scores",
    )
    # dV is a sum over rows, also those past the end; forward they go nowhere.
    bound = "if row < Nq:\n                    key"
    unbound = ("no row bound of slopes", bound, bound.replace("row < Nq", "True"))
    add(mask, unbound, to=FLASH_BACKWARD, cases="scores")
    one = ("distance of the first column", distance, distance.replace("col", "float32(0.0)"))
    add(mask, one, to=(*MMA, *MMA_BACKWARD), cases="slopes")
    add(
        "masks.distance",
        ("with a sign", "abs(", "("),
        to=ALGORITHMS,
        cases="scores",
    )


def mask_mutants(add):
    """Faults of what is hidden within a tile, and of the tests that nothing is."""
    mask = "softmax._make_scale_and_mask"
    seen = "_visible_window(row, col, 0, left, right)"
    top = "int32(row0), int32(last), diagonal, UNBOUNDED, right\n"
    bottom = "lowest, int32(col0), diagonal, left, UN"
    add(
        mask,
        ("no window", "visible = visible and seen", "pass"),
        ("left + 1", seen, seen.replace("left", "left + 1")),
        ("left - 1", seen, seen.replace("left", "left - 1")),
        ("right + 1", seen, seen.replace("right", "right + 1")),
        ("right - 1", seen, seen.replace("right", "right - 1")),
        ("sides swapped", seen, seen.replace("left, right", "right, left")),
        ("no test for the right", top, top.replace("right", "UNBOUNDED")),
        ("right + 1 in its test", top, top.replace("right", "right + 1")),
        ("right of a first column", top, top.replace("last", "col0")),
        ("right of a last row", top, top.replace("int32(row0)", "lowest")),
        ("no test for the left", bottom, bottom.replace("left", "UNBOUNDED")),
        ("left + 1 in its test", bottom, bottom.replace("left", "left + 1")),
        ("left of a first row", bottom, bottom.replace("lowest", "int32(row0)")),
        ("left of a last column", bottom, bottom.replace("col0", "last")),
        to=FLASH,
        cases="window",
    )
    # FA-1 writes no row past the end.
    inside = "inside = inside and uint32(row0 + Br) <= Nq"
    row = "uint32(row0 + row_of(ty, i)) < Nq"
    add(
        mask,
        ("rows past the end", f"visible = visible and {row}", "pass"),
        ("a row past the end", row, row.replace("<", "<=")),
        ("no test for rows past the end", inside, "pass"),
        ("a row past the end in its test", inside, f"{inside} + 1"),
        to=("fa2",),
        cases="q_lens",
    )
    block = "inside = inside and block != 0"
    add(
        mask,
        ("blocks not hidden", "visible = visible and block != 0", "pass"),
        ("no test for a hidden block", block, "pass"),
        ("rows of other blocks", "row0 // uint32(Br)", "row0 // uint32(Bc)"),
        ("columns of other blocks", "col0 // uint32(Bc)", "col0 // uint32(Br)"),
        ("blocks of another head", "block_mask[b, h,", "block_mask[b, 0,"),
        by={"values", "OutOfBounds"},
        to=("standard", "standard_backward"),
        cases="sparse",
    )
    shown = ("no block hidden", "hides_blocks=True", "hides_blocks=False")
    all_tiles = "softmax.make_scale_and_mask_all"
    add(all_tiles, shown, to=("standard", "standard_backward"), cases="sparse")
    add("masks.visible_causal", ("a column less", "<=", "<"), to=ALGORITHMS, cases="causal")
    add(
        "masks.visible_window",
        ("a column less on the left", ">=", ">"),
        ("a column less on the right", "<=", "<"),
        ("one side is enough", "&", "|"),
        ("left not aligned", "row + diagonal - left", "row - left"),
        ("right not aligned", "row + diagonal + right", "row + right"),
        to=ALGORITHMS,
        cases="window",
    )


def score_gradient_mutants(add):
    """Faults of dS under a cap, and of dbias."""
    add(
        "gradients.make_cap_slopes",
        ("no slopes", "if softcap:", "if False:"),
        ("slopes of 1", "float32(1.0) - t * t", "float32(1.0)"),
        ("tanh not squared", "- t * t", "- t"),
        ("another scale", "scale * rS[e]", "rS[e]"),
        by={"values", "UninitialisedRead"},
        to=tuple(BACKWARD),
        cases="scores",
    )
    for name, total in (("fa1_backward", 1), ("fa2_backward", 2)):
        late = "cap_slopes(rG, rS, scale_log2, options)"
        add(
            name,
            ("slopes by the scale of dQ", late, late.replace("_log2", "")),
            cases="scores",
            total=total,
        )
    place = "gradients.make_score_gradients"
    text = inspect.getsource(gradients.make_score_gradients)
    steps = text[text.index("        if dbias:") : text.index("    return score")].rstrip()
    capped = steps.index("        if softcap:")
    swapped = steps[capped:] + "\n" + steps[:capped].rstrip()
    add(
        place,
        ("no slopes of the cap", "rdP[e] *= rG[e]", "pass"),
        ("dbias after the slopes", steps, swapped),
        ("no dbias", "if dbias:", "if False:"),
        ("dbias of another head", "options.dbias[b, h]", "options.dbias[b, 0]"),
        ("dbias of another entry", "options.dbias[b, h]", "options.dbias[0, h]"),
        ("dbias of another column", "(dBh, row, col,", "(dBh, row, uint32(0),"),
        ("no row bound of dbias", "row < Nq and col", "col"),
        ("no column bound of dbias", "col < Nk:", "True:"),
        by=WRONG | {"OutOfBounds"},
        to=FLASH_BACKWARD,
        cases="scores",
    )
    add(
        "standard_backward",
        ("dbias with scale", "row, col, ds)", "row, col, scale * ds)"),
        ("no dbias", "if dbias:", "if False:"),
        ("dbias of another head", "options.dbias[b, h]", "options.dbias[b, 0]"),
        ("dbias of another entry", "options.dbias[b, h]", "options.dbias[0, h]"),
        ("dbias of another column", "row, col, ds)", "row, uint32(0), ds)"),
        by=WRONG,
        cases="scores",
    )
    alone = ("slopes for dS", "s *= Sh[row, col]", "pass")
    add("standard", alone, by=WRONG, to=("standard_backward",), cases="scores")


def draw_mutants(add):
    """Faults of which element is dropped."""
    place = "(uint32(b) << uint32(16)) + uint32(h)"
    add(
        "dropout._words",
        ("entries mixed with heads", "uint32(16)", "uint32(0)"),
        ("entries at another bit", "uint32(16)", "uint32(15)"),
        ("one entry", place, "uint32(h)"),
        ("one head", " + uint32(h)", ""),
        ("entries and heads swapped", place, "(uint32(h) << uint32(16)) + uint32(b)"),
        ("one row", "_philox(counter, row,", "_philox(counter, uint32(0),"),
        ("rows and counters swapped", "counter, row, head", "row, counter, head"),
        ("rows and heads swapped", "counter, row, head", "counter, head, row"),
        ("no offset", "uint32(options.offset)", "uint32(0)"),
        ("halves of the seed swapped", "offset), key0, key1", "offset), key1, key0"),
        cases="dropout",
    )
    add(
        "dropout.keeps",
        ("counters of 16 columns", "col // uint32(COUNTER_COLUMNS)", "col // uint32(WORD_COLUMNS)"),
        ("shares overlap", " * uint32(WORD_COLUMNS)", ""),
        ("one counter a share", "share + col % uint32(WORD_COLUMNS)", "share"),
        ("another word", "uint32(col // uint32(WORD_COLUMNS)) % uint32(4)", "col % uint32(4)"),
        *(
            (f"another word than {n}", f"word = w[{n}]", f"word = w[{(n + 1) % 4}]")
            for n in range(4)
        ),
        ("kept for dropped", "word >= ", "word < "),
        ("a word at the threshold", "word >= ", "word > "),
        ("a threshold with a sign", "uint32(options.threshold)", "options.threshold"),
        to=("standard", "fa2"),
        cases="dropout",
    )
    drop = "dropout.make_drop"
    add(
        drop,
        ("nothing dropped", "if dropout:", "if False:"),
        ("rows of the first thread", "row_of(ty, i0 + i)", "row_of(0, i0 + i)"),
        ("kept for dropped", "_bit(not kept,", "_bit(kept,"),
        ("columns of a tile's first thread", "column_of(tx, j)", "column_of(0, j)"),
        ("the first column of a thread", "column_of(tx, j)", "column_of(tx, 0)"),
        ("another tile's columns", "col0 + column_of(tx, j)", "column_of(tx, j)"),
        ("another bit", "bits >> uint64(i", "bits >> uint64(1 + i"),
        ("no sign", "= -rP[e]", "= rP[e]"),
        to=("fa2_backward",),
        cases="dropout",
    )
    add(
        drop,
        ("a word at the threshold", "uint32(options.threshold)", "uint32(options.threshold) + 1"),
        ("a threshold with a sign", "uint32(options.threshold)", "options.threshold"),
        ("rows of the first part", "row_of(ty, i0 + i)", "row_of(ty, i)"),
        ("registers of the first part", "e = (i0 + i) * EI + j * EJ", "e = i * EI + j * EJ"),
        (
            "bits of the first part",
            "                bits = uint64(0)",
            "                bits = bits if i0 or j0 else uint64(0)",
        ),
        ("draws of another tile", "col0 // uint32(COUNTER_COLUMNS) + j", "j"),
        ("one group of columns", "COUNTER_COLUMNS) + j // ALIKE", "COUNTER_COLUMNS)"),
        ("bits of the first row", "n = i * COLS + j", "n = j"),
        ("bits of the first group", "+ j - j0 + s", "+ s"),
        *((f"another word than {n}", f"w[{n}] <", f"w[{(n + 1) % 4}] <") for n in range(4)),
        *((f"another bit than {n}", f"n + {n} * SHARES)", "n)") for n in (2, 3)),
        ("another bit than 1", "n + SHARES)", "n)"),
        to=("fa2",),
        cases="draws",
    )
    shares = "column_of(tx, s)"
    add(
        drop,
        ("one share of columns", shares, "column_of(tx, 0)"),
        ("shares of neighbours", shares, "uint32(tx * SHARES + s)"),
        ("bits of the first share", "- j0 + s\n", "- j0\n"),
        to=("fa2_backward",),
        cases="draws",
    )
    add(
        "dropout._bit", ("32 bits", "<< uint64(n)", "<< uint64(n % 32)"), to=("fa2",), cases="draws"
    )
    add(
        "masks.make_philox",
        ("9 rounds", "range(10)", "range(9)"),
        ("another multiplier", "0xD2511F53", "0xD2511F55"),
        ("another second multiplier", "0xCD9E8D57", "0xCD9E8D59"),
        ("another key's step", "0x9E3779B9", "0x9E3779BB"),
        ("another second key's step", "0xBB67AE85", "0xBB67AE87"),
        ("no key", "^ c1 ^ k0", "^ c1"),
        ("no second key", "^ c3 ^ k1", "^ c3"),
        ("no word", "^ c1 ^ k0", "^ k0"),
        ("no second word", "^ c3 ^ k1", "^ k1"),
        ("low for high", "p1 >> high", "p1"),
        ("second low for high", "p0 >> high", "p0"),
        to=("fa2",),
        cases="dropout",
    )
    add(
        "masks",
        ("words of 8 columns", "WORD_COLUMNS = 16", "WORD_COLUMNS = 8"),
        to=("standard",),  # the tiled kernels take 16 lanes of a row, and cannot be built
        cases="dropout",
    )
    add(
        "masks",
        ("counters of 128 columns", "COUNTER_COLUMNS = 64", "COUNTER_COLUMNS = 128"),
        to=("standard", "fa2"),
        cases="dropout",
    )


def dropout_mutants(add):
    """Faults of what becomes of what is dropped, and of the rest."""
    add(
        "dropout.kept_if",
        ("not scaled", "p * options.inverse_keep", "p"),
        ("dropped kept", "float32(0.0) if p < float32(0.0) else ", ""),
        ("nothing dropped", "if dropout:", "if False:"),
        to=(*FLASH, *BACKWARD),
        cases="dropout",
    )
    dropped = "p.drop(rS, i0, j0, b, h, options, ty, tx)"
    for name, total in (("fa1", 1), ("fa2", 1), ("fa1_backward", 1), ("fa2_backward", 2)):
        add(name, ("nothing dropped", f" {dropped}", " pass"), cases="dropout", total=total)
    for name, indent in (("fa1", 16), ("fa2", 12)):
        summed, newline = "p.online_softmax(rS, scale, rm, rl, rf)", "\n" + " " * indent
        first = ("dropped before l", summed + newline + dropped, dropped + newline + summed)
        add(name, first, cases="dropout")
    add(
        "gradients.make_score_gradients",
        ("dP not scaled", "rdP[e] * options.inverse_keep", "rdP[e]"),
        ("dropped dP", "float32(0.0) if p < float32(0.0) else dp", "dp"),
        ("dropped P below 0", "p = abs(p)", "pass"),
        ("dropped P of 0", "p = abs(p)", "p = max(p, float32(0.0))"),
        ("no dropout", "if dropout:", "if False:"),
        to=FLASH_BACKWARD,
        cases="dropout",
    )

    # Standard attention
    add(
        "standard",
        ("not scaled", "pij * options.inverse_keep if", "pij if"),
        ("kept for dropped", "if keeps(", "if not keeps("),
        ("nothing dropped", "if dropout:", "if False:"),
        ("columns for rows", "keeps(row, col,", "keeps(col, row,"),
        ("entries for heads", "col, b, h, options", "col, h, b, options"),
        cases="dropout",
    )
    add(
        "standard_backward",
        ("dP not scaled", "g = g * options.inverse_keep", "pass"),
        ("dropped dP", "g = float32(0.0)", "pass"),
        ("dropped P kept", "pij = -pij", "pass"),
        ("kept for dropped", "if not keeps(", "if keeps("),
        ("columns for rows", "keeps(row, col,", "keeps(col, row,"),
        cases="dropout",
        total=2,
    )
    add(
        "standard_backward",
        ("dropped P below 0", "ds = abs(pij) *", "ds = pij *"),
        ("P with what is dropped", "Pi[col] = p.kept(pij, options)", "pass"),
        ("P from memory", "sP[col] if resident else Pi[col]", "Pi[col]"),
        ("dP from memory", "sdP[col] if resident else dPi[col]", "dPi[col]"),
        ("dropped twice", "if dropout and not resident:", "if dropout:"),
        ("dropped once", "if dropout and not resident:", "if False:"),
        by=WRONG,
        cases="dropout",
    )


def argument_mutants(add):
    """Faults of what a call gives its kernels."""
    half, inverse = "seed & 0xFFFFFFFF", "1.0 / (1.0 - call.problem.dropout_p)"
    starts = '_starts("q_lens")', '_starts("kv_lens")'
    mask = "np.ascontiguousarray(call.block_mask,"
    sides = '_side("left")', '_side("right")'
    for module, cases, *changes in (
        (
            "options",
            "window",
            ("one side for both", *sides),
            ("the other side for both", *sides[::-1]),
            ("no column on an open side", "UNBOUNDED if side is None", "0 if side is None"),
        ),
        (
            "arguments",
            "scores",
            ("scale of no cap", "problem.scale / problem.softcap", "problem.scale * unit"),
        ),
        (
            "options",
            "dropout",
            ("no inverse", inverse, inverse[6:]),
            ("the inverse of p", inverse, "1.0 / call.problem.dropout_p"),
            (
                "p kept",
                "(drop_threshold(call.problem.dropout_p)",
                "(drop_threshold(1 - call.problem.dropout_p)",
            ),
        ),
        (
            "arguments",
            "dropout",
            ("the high half twice", half, "seed >> 32"),
            ("the low half twice", "seed >> 32", half),
            ("no offset", "signed(offset)", "0"),
        ),
        (
            "options",
            "packed",
            ("rows of keys", *starts),
            ("columns of queries", *starts[::-1]),
            ("lengths for starts", "np.cumsum((0,", "np.array((0,"),
        ),
        (
            "options",
            "lengths",
            ("rows for columns", "getattr(call.problem, name), np", "call.problem.q_lens, np"),
        ),
        (
            "options",
            "sparse",
            ("blocks of one head", mask, "np.ascontiguousarray(call.block_mask[:1],"),
        ),
    ):
        add(module, *changes, by=ANY, to=("standard", "fa2"), cases=cases)
    cap = (
        "cap in natural units",
        "(call.problem.softcap or 0.0) * call.unit",
        "call.problem.softcap",
    )
    add("options", cap, to=FLASH, cases="scores")
    scale = ("scale in natural units", "return problem.scale * unit", "return problem.scale")
    add("arguments", scale, to=FLASH)


def mma_kernel_mutants(add):
    """Faults of the forward kernels on tensor cores."""
    for name in MMA:
        softmax = "online_softmax" if name == "mma_fa1" else "online_softmax_of_lanes"
        rescale = "scale_rows" if name == "mma_fa1" else "rescale_rows"
        scaled = f"{softmax}(rS, scale,"
        add(
            name,
            ("another scale of the softmax", scaled, scaled.replace("scale,", "float32(0.3),")),
            ("no rescale", f"p.{rescale}(rO, rf)", "pass"),
            ("no product", "p.add_product(rO, rS, sV, options)", "pass"),
            ("no normalisation", "p.normalise_rows(rO, rl)", "pass"),
            ("rows of another group", "% uint32(32) // uint32(4)", "% uint32(32) // uint32(8)"),
            ("columns of another place", "% uint32(4)\n", "% uint32(2)\n"),
            ("rows of the first warp", " * ROWS)", " * 0)"),
            by=ANY,
        )
        columns = "while j0 < j_end:"
        fewer = ("a tile of columns dropped", columns, "while j0 + uint32(spec.Bc) < j_end:")
        add(name, fewer, by=ANY)
        for head in ("key_rows(K, b, hk,", "key_rows(V, b, hk,"):
            other = head.replace("hk", "h % uint32(group)")
            how = {"by": ANY, "cases": "heads"}
            add(name, (f"another head's {head[9]}", head, other), **how)
        none = ("nothing dropped", " p.drop(rS, i0, j0, b, h, options, ty, tx)", " pass")
        add(name, none, cases="dropout")
        scaled = "scale_bias_and_mask(rS, rB, scale,"
        other = ("another scale", scaled, scaled.replace("scale,", "float32(0.3),"))
        add(name, other, cases="softcap")
        kept = "p.load_fragments(rQ, sQ, warp_row)"
        add(name, ("Q's fragments of the first tile alone", kept, "pass"), by=ANY)
    past = "write_tile(rO, sQ, Oh, warp_row, i0, rows,"
    add(
        "mma_fa2",
        ("no O", f"p.{past} ty, tx)", "pass"),
        ("O past the end", past, past.replace(" rows", " uint32(i0 + spec.Br)")),
        by=ANY,
    )
    one, past = {"by": ANY, "to": ("mma_fa1",)}, "uint32(row0 + spec.Br)"
    add(
        "mma_fa1",
        ("no denormalisation", "p.scale_rows(rO, rl)", "pass"),
        ("a tile of rows dropped", "while i0 < i_end:", "while i0 + uint32(spec.Br) < i_end:"),
        by=ANY,
    )
    add(
        "mma_state.make_read_state",
        ("O, l and m of no pass", "seen = rows_end ", "seen = uint32(0) "),
        ("O, l and m before the first pass", "seen = uint32(0)\n", "pass\n"),
        ("O of the first pass", "(rO, A, row0, seen,", "(rO, A, row0, uint32(0),"),
        ("O not read", "read_fragments(rO, A, row0, seen, ty, tx)", "pass"),
        ("l of the first pass", "(rl, l, row0, seen,", "(rl, l, row0, uint32(0),"),
        ("m of the first pass", "(rm, m, row0, seen,", "(rm, m, row0, uint32(0),"),
        **one,
    )
    add(
        "mma_state.make_write_state",
        ("O always rounded", "if more:", "if False:"),
        ("O never rounded", "if more:", "if True:"),
        ("no O between the passes", "write_fragments(rO, A, row0, rows_end, ty, tx)", "pass"),
        ("no O", "write_rows(rO, O, row0, rows_end, ty, tx)", "pass"),
        ("no l", "write_values(rl, l, row0, rows_end, ty, tx)", "pass"),
        ("no m", "write_values(rm, m, row0, rows_end, ty, tx)", "pass"),
        ("O past the end", "(rO, O, row0, rows_end,", f"(rO, O, row0, {past},"),
        ("O of A past the end", "(rO, A, row0, rows_end,", f"(rO, A, row0, {past},"),
        **one,
    )
    written = ("no L of a row", "write_values(rl, Lh, i0, rows_end, ty, tx)", "pass")
    add("rows.make_write_logsumexp", written, **one)
    call = "p.write_logsumexp(rl, rm, L, lh, mh, b, h, options, i_first, i_last, ty, tx)"
    add("mma_fa1", ("no L", call, "pass"), by=ANY)
    add(
        "prefetch.next_row_tile",
        ("the next tile not loaded (mma)", "if i_next < i_end:", "if False:"),
        ("this tile again (mma)", "i_next, rows_end)", "i0, rows_end)"),
        **one,
    )
    for name, cases in (("mma_fa1", "plain"), ("mma_fa1_backward", "causal")):
        add(
            "visits.make_sees_more",
            (f"never ({name})", "options) < j_last", "options) < uint32(0)"),
            (f"always ({name})", "options) < j_last", "options) <= Nk + uint32(Bc)"),
            (f"one pass late ({name})", "uint32(j0 + Bc), j_last, i0", "j0, j_last, i0"),
            by=ANY,
            to=(name,),
            cases=cases,
        )
    splits = "cuda.gridDim.x - 1 - cuda.blockIdx.x"
    other = ("rows of another split", splits, splits.replace("- 1 ", ""))
    add("visits.make_split", other, **one, cases="16 rows")
    low = ("m of 0 before the first pass", "make_read_maxima(spec)", "make_read_values(spec)")
    add("mma_state.make_read_state", low, **one, cases="low")
    initialise = "mma_state.make_initialise"
    for write in ("write_rows(rO, O", "write_values(rl, l", "write_values(rm, m"):
        none = (f"no {write}", f"{write}, i0, rows_end, ty, tx)", "pass")
        add(initialise, none, **one, cases="window")
    add(
        initialise,
        ("nothing initialised", "        if initialises:", "        if False:"),
        ("O of A not initialised", "write_fragments(rO, A, i0, rows_end, ty, tx)", "pass"),
        ("O, l and m not begun", "start(rO, rl, rm)", "pass"),
        ("the first tile of rows alone", "while i0 < rows_end:", "if i0 < rows_end:"),
        **one,
        cases="window",
    )
    call = re.search(r"p\.initialise\(.*\)", source("mma_fa1"))[0]
    add("mma_fa1", ("no initialise", call, "pass"), by=ANY, cases="window")
    add(
        "mma_fa2",
        ("O, l and m not begun", "p.start(rO, rl, rm)", "pass"),
        ("l of one lane", "p.sum_lanes(rl)", "pass"),
        ("l of whole rows twice", "online_softmax_of_lanes", "online_softmax"),
        ("no L", "p.write_values(rl, Lh, i0, rows, ty, tx)", "pass"),
        ("L past the end", "(rl, Lh, i0, rows,", "(rl, Lh, i0, uint32(i0 + spec.Br),"),
        by=ANY,
    )
    first, ready = "            wait_async()\n            ", "cuda.syncthreads()  # Kj is there, or"
    staged = {"by": ANY, "to": ("mma_fa2",), "cases": "stages"}
    add(
        "mma_fa2",
        ("no wait for K and V", f"{first}{ready}", f"            {ready}"),
        ("no barrier before the next K and V", ready, "pass  #"),
        by=ANY,
        cases="stages",
    )
    at_first = "mma_tile_load.make_load_first_columns"
    add(at_first, ("the first V not loaded", "if both:", "if False:"), **staged)
    early = "mma_tile_load.make_load_columns_early"
    stages = "sK, sV = column_tiles(stage)"
    add(
        early,
        ("K and V of one stage", stages, "sK, sV = column_tiles(uint32(0))"),
        ("no turn of the stages", "stage = uint32(stage ^ uint32(1))", "pass"),
        ("the next K and V not loaded", "if j_next < j_end:", "if False:"),
        ("unseen tiles loaded", "if j_next < j_end:", "if True:"),
        ("K of the next stage", stages, f"{stages}; sK, _ = column_tiles(uint32(stage ^ 1))"),
        ("V of the next stage", stages, f"{stages}; _, sV = column_tiles(uint32(stage ^ 1))"),
        ("this K again", "(sK_next, K, j_next,", "(sK_next, K, j0,"),
        ("this V again", "(sV_next, V, j_next,", "(sV_next, V, j0,"),
        (
            "the next K and V over these",
            "sK_next, sV_next = column_tiles(stage)",
            "sK_next, sV_next = sK, sV",
        ),
        ("a tile left out", "uint32(j0 + Bc), j_end", "uint32(j0 + 2 * Bc), j_end"),
        ("the stage of this tile", "return sK, sV, stage,", "return sK, sV, uint32(stage ^ 1),"),
        **staged,
    )
    add(
        early,
        ("V of one stage not loaded", "load_v(sV, V, j0, rows_end)", "pass"),
        by=ANY,
        to=("mma_fa2",),
    )
    add(
        "mma_tile_load.make_column_tiles",
        ("K of both stages in one place", "AT_K + stage * NK", "AT_K"),
        ("V of both stages in one place", "AT_V + stage * NV", "AT_V"),
        ("V where K's second stage is", "NQ + spec.stages * NK", "NQ + NK"),
        **staged,
    )
    one_stage = {"by": ANY, "to": ("mma_fa2",)}
    add(
        "prefetch.next_column_tile",
        ("the next tile not loaded (mma)", "if j_next < j_end:", "if False:"),
        ("this tile again (mma)", "j_next, rows_end)", "j0, rows_end)"),
        ("unseen tiles loaded (mma)", "if j_next < j_end:", "if True:"),
        **one_stage,
    )
    add(at_first, ("the first K not loaded", "load_k(sK, K, j0, rows_end)", "pass"), **one_stage)
    unseen = ("unseen tiles loaded", "if j0 < j_end:", "if True:")
    add(at_first, unseen, **one_stage, cases="blind")
    new = "for i in range(TM):\n                if rf[i] !="
    add(
        "rows.make_rescale_rows",
        ("never", "if changes:", "if False:"),
        ("where the first row's maximum is new", new, new.replace("TM", "1")),
        by=ANY,
        to=("mma_fa2",),
        cases="Q shared",
    )
    folded = "_make_online_softmax"
    add(
        f"softmax.{folded}",
        ("m without scale", "maximum(rm[i], m_new * scale)", "maximum(rm[i], m_new)"),
        ("scores without scale", "s = s * scale", "pass"),
        by=ANY,
        to=tuple(MMA),
    )


def fragment_mutants(add):
    """Faults of the parts of the kernels on tensor cores."""
    both = {"by": ANY, "to": tuple(MMA)}
    load = "mma_tile_load.make_load_half_tile"
    add(
        load,
        ("no row bound of a copy", "left > int32(down) and ", ""),
        ("rows of the first thread", "row0 + r)", "row0)"),
        ("rows of the first copy", "int64(row) + down", "int64(row)"),
        ("the place of the first copy", " + down * pitch + right)", " + right)"),
        ("chunks in order", "c = uint32(c ^ exchange(r + down))", "pass"),
        **both,
    )
    add(
        load,
        ("the place of the first columns", " + down * pitch + right)", " + down * pitch)"),
        ("the first columns", "uint32(col0 + c + right)", "uint32(col0 + c)"),
        **both,
        cases="Q shared",
    )
    add(
        "mma_chunks.make_first_chunk",
        ("columns of the first chunk", "% uint32(width)) * 8", "% uint32(width)) * 0"),
        ("rows of the first chunk", "uint32(thread // uint32(width))", "uint32(0)"),
        **both,
    )
    add(
        "mma_chunks.ChunkMap",
        ("turns as of a row each", "return self.chunks // self.width", "return 1"),
        ("fewer turns", "ceil_div(self.rows, self.down)", "(self.rows // self.down)"),
        ("chunks side by side", "return 8 * self.width", "return 8"),
        **both,
        cases=("Q shared", "16 rows"),
    )
    past = ("a copy past the tile", "if whole or r < uint32(count - down):", "if True:")
    add(load, past, by=ANY | {"EmulatorError"}, to=tuple(MMA), cases="16 rows")
    add(
        load,
        ("no count bound", "int32(min(int32(8), int32(cols_end - col)))", "int32(8)"),
        ("elements past the end", "if e < length:", "if True:"),
        ("the first element eight times", "uint32(col + e)", "col"),
        **both,
        cases="odd",
    )
    add(
        "mma_fragments.make_place",
        ("rows for columns", "if rows_first:", "if not rows_first:"),
        ("second tile of Q", "second * 8) * pitch + third", "third * 8) * pitch + third"),
        ("third tile of Q", "pitch + third * 8", "pitch"),
        ("third tile of K", "third * 8) * pitch + second", "second * 8) * pitch + second"),
        ("second tile of K", "pitch + second * 8", "pitch"),
        ("chunks in order", "uint32(at ^ exchange(row))", "at"),
        **both,
    )
    add(
        "mma_fragments.make_load_fragment",
        ("rows of the first fragment", "16 * r, 16 * k)", "0, 16 * k)"),
        ("columns of the first fragment", "16 * r, 16 * k)", "16 * r, 0)"),
        ("registers of the first row", "e = 4 * (r * K + k)", "e = 4 * k"),
        ("registers swapped", "rQ[e + 1] = a[1]", "rQ[e + 1] = a[2]"),
        **both,
        cases=("plain", "Q shared"),
    )
    add(
        "mma_swizzle.make_further",
        ("columns that carry", "uint32(place ^ uint32(within))", "uint32(place + within)"),
        ("rows of the first", "(down * pitch + right - within)", "(right - within)"),
        **both,
    )
    warp = ("rows of the first warp", "at = uint32(row0 * pitch + ", "at = uint32(")
    add("mma_fragments.make_load_fragments", warp, **both)
    scores = "mma_products.make_scores"
    add(
        scores,
        ("S not begun at 0", "rS[e] = float32(0.0)", "pass"),
        ("Q's registers of the first row", "e = 4 * (r * K + k)", "e = 4 * k"),
        ("Q's registers of the first columns", "e = 4 * (r * K + k)", "e = 4 * r * K"),
        ("K's first columns", "16 * c, 16 * k)", "16 * c, 0)"),
        ("K's first rows", "16 * c, 16 * k)", "0, 16 * k)"),
        ("S of the first rows", "low = 2 * r * TN + 4 * c", "low = 4 * c"),
        ("S of the first columns", "low = 2 * r * TN + 4 * c", "low = 2 * r * TN"),
        ("the upper rows twice", "high = low + TN", "high = low"),
        ("the left half twice", "mma(rS, low + 2, high + 2,", "mma(rS, low, high,"),
        ("K's left half twice", "b[2], b[3])", "b[0], b[1])"),
        ("columns of Q dropped", "in range(K):", "in range(K - 1):"),
        **both,
    )
    add(
        scores,
        ("Q not loaded", "if not keeps:", "if keeps:"),
        ("rows of the first warp", "at_q = uint32(row0 * pitch + ", "at_q = uint32("),
        **both,
        cases="Q shared",
    )
    product = "mma_products.add_fragment_product"
    add(
        product,
        ("P of the first rows", "(2 * r + n % 2)", "(n % 2)"),
        ("P of the upper rows", "(2 * r + n % 2)", "(2 * r)"),
        ("P of the first columns", "* TN + 4 * k + n", "* TN + n"),
        ("P of the left half", " + n // 2 * 2", ""),
        ("one column of P", "kept(rP[e + 1], options)", "kept(rP[e], options)"),
        ("V's first rows", "16 * k, 16 * c)", "0, 16 * c)"),
        ("V's first columns", "16 * k, 16 * c)", "16 * k, 0)"),
        ("V not transposed", "= ldmatrix_transposed(", "= ldmatrix("),
        ("O of the first rows", "low = 8 * r * DN + 4 * c", "low = 4 * c"),
        ("O of the first columns", "low = 8 * r * DN + 4 * c", "low = 8 * r * DN"),
        ("the upper rows twice", "high = low + 4 * DN", "high = low"),
        ("the left half twice", "mma(rO, low + 2, high + 2,", "mma(rO, low, high,"),
        ("V's left half twice", "b[2], b[3])", "b[0], b[1])"),
        ("A of the first rows", "e = 4 * r\n", "e = 0\n"),
        ("columns of P dropped", "in range(K):", "in range(K - 1):"),
        **both,
    )
    kept = "pack(kept(rP[e], options), kept(rP[e + 1], options))"
    add(product, ("dropped kept", kept, "pack(rP[e], rP[e + 1])"), **both, cases="dropout")
    add(
        "mma_products.instructions",
        ("the other dtype", "MMA[DTYPES[dtype].matrix]", 'MMA["bf16"]'),
        **both,
    )
    one = {"by": ANY, "to": ("mma_fa1",)}
    write = "mma_stores.write_halves"
    add(
        write,
        ("no row bound", "row < rows_end and ", ""),
        ("rows of the first group", "row0 + ty + i * STEP", "row0 + ty"),
        ("columns of the first group", "8 * n + 2 * tx", "2 * tx"),
        ("O of the first row", "e = i * DN4 + 2 * n", "e = 2 * n"),
        ("one column of O", "rO[e + 1]", "rO[e]"),
        **one,
    )
    two, bound = "mma_pairs.make_write_two", "if col < uint32(d):\n                "
    add(
        two,
        ("no column bound", f"{bound}write2", "if True:\n                write2"),
        **one,
    )
    add(
        two,
        ("no column bound of an element", f"{bound}T[", "if True:\n                T["),
        ("no column bound of the second", "if uint32(col + 1) < uint32(d)", "if True"),
        ("the second from the first half", "pair >> uint32(16)", "pair & uint32(0xFFFF)"),
        ("no second element", "T[row, uint32(col + 1)] = pair >> uint32(16)", "pass"),
        **both,
        cases="odd",
    )
    for place in ("mma_stores.make_read_fragments", "mma_stores.make_write_fragments"):
        add(
            place,
            ("no row bound", "left > i * STEP and ", ""),
            ("rows of the first group", "int64(first) + i * STEP", "int64(first)"),
            ("columns of the first group", "int64(2 * tx) + 4 * n", "int64(2 * tx)"),
            **one,
        )
    for place in ("mma_pairs.make_read_floats", "mma_pairs.make_write_floats"):
        add(
            place,
            ("pairs past the end", "inside and col + 1 < head_dim", "inside"),
            ("an element past the end", " and col + 1 == head_dim", ""),
            ("no element by itself", "if odd and", "if False and"),
            **one,
            cases="odd",
        )
    read = ("one column of O", "= pair[1]", "= pair[0]")
    add("mma_stores.make_read_fragments", read, **one)
    add("mma_stores.make_write_fragments", ("one column of O", "rO[e + 1])", "rO[e])"), **one)
    tile = {"by": ANY, "to": ("mma_fa2",)}
    add(
        "mma_stores._make_store_rows",
        ("rows of the first group", "i * STEP, 8 * n)", "0, 8 * n)"),
        ("columns of the first group", "i * STEP, 8 * n)", "i * STEP, 0)"),
        ("O of the first row", "e = i * (columns // 4) + 2 * n", "e = 2 * n"),
        ("one column of O", "rT[e + 1]", "rT[e]"),
        ("chunks in order", " ^ exchange(ty % 8)", ""),
        **tile,
    )
    add(
        "mma_stores._make_write_whole",
        ("no row bound", "mine = left > int32(down)", "mine = True"),
        ("rows of the first lane", "row0 + warp_row + r)", "row0 + warp_row)"),
        ("rows of the first 16 bytes", "int64(first) + down", "int64(first)"),
        ("the place of the first 16 bytes", "at + (down * pitch + ", "at + ("),
        ("words of the first 16 bytes", "e = 4 * n\n", "e = 0\n"),
        ("chunks in order", "c = uint32(c ^ exchange(r + down))", "pass"),
        **tile,
    )
    warps = {**tile, "by": ANY | {"EmulatorError"}}
    there = "cuda.syncwarp()  # this warp's rows are there"
    waits = ("not after the warp's stores", there, "pass")
    add("mma_stores.make_write_tile", waits, **warps)
    add(
        "layout._make_place",
        ("places of one column", "return uint32(thread * width + ", "return uint32(thread + "),
        (
            "one group of columns",
            "return uint32(thread * width + n // width * step",
            "return uint32(thread * width",
        ),
        ("one column of a place", " + n % width)\n", ")\n"),
        **both,
    )


def key_mutants(add):
    """Faults of keys split over the warps."""
    how = {"by": ANY | {"EmulatorError"}, "to": ("mma_fa1",)}
    keys = {**how, "cases": "keys"}
    add("mma_fa1", ("not combined", "p.combine(rO, rm, rl, sO, ty, tx)", "pass"), **keys)
    add(
        "layout.make_warp_column",
        ("columns of the first warp", "// uint32(32) * step", "// uint32(32) * 0"),
        **keys,
    )
    add(
        "layout.make_owns",
        ("every warp owns all", "return not shared or", "return True or"),
        ("the first warp owns all", "uint32(i % warps)", "uint32(0)"),
        **keys,
    )
    mask, drop = "softmax._make_scale_and_mask", "dropout.make_drop"
    shifted = "col0 = uint32(col0 + warp_column())"
    add(mask, ("columns of the first warp", shifted, "pass"), **keys)
    add(mask, ("a tile's columns", "(COLUMNS - 1)", "0"), **keys)
    add(drop, ("columns of the first warp", shifted, "pass"), **how, cases="dropped keys")
    add("mma_fa1", ("K of the first warp", "warp_row, p.warp_column())", "warp_row, 0)"), **keys)
    add(
        "mma_products.add_fragment_product",
        ("V of the first warp", "warp_column() * pitch + ", ""),
        **keys,
    )
    for place in ("write_halves", "make_read_fragments", "make_write_fragments"):
        add(f"mma_stores.{place}", ("every warp's rows", " and owns(i)", ""), **keys)
    for place in ("_make_read_values", "make_write_values"):
        add(f"rows.{place}", ("every warp's rows", " and owns(i)", ""), **keys)
    add(
        "mma_combine.make_combine",
        ("no barrier", "cuda.syncthreads()", "pass"),
        ("parts of the first warp", "uint32(n * TM + i)", "uint32(i)"),
        ("parts of the first row", "uint32(n * TM + i)", "uint32(n * TM)"),
        ("parts of the first lane", " + lane * 4)", ")"),
        ("values of the first warp", "(n * Br + ty", "(ty"),
        ("values of the first group", "+ ty + i * STEP)", "+ ty)"),
        ("values over the parts", "uint32(VALUES + ", "uint32("),
        ("another place", "(W - 1 - i % W)", "(W - 2 - i % W)"),
        ("own parts too", "if not owns(i):", "if True:"),
        ("every lane's values", "if tx == uint32(0):", "if True:"),
        ("no m", "sO[values] = rm[i]", "pass"),
        ("no l", "sO[uint32(values + 1)] = rl[i]", "pass"),
        ("m not updated", "rm[i] = m_new", "pass"),
        ("l not rescaled", "rl[i] *= rf[i]", "pass"),
        ("O not rescaled", "scale_rows(rO, rf)", "pass"),
        ("l of one warp", "rl[i] += f * sO[uint32(values + 1)]", "pass"),
        (
            "a warp left out",
            "for n in range(W - 1):\n                for i",
            "for n in range(W - 2):\n                for i",
        ),
        ("parts not rescaled", "f = exp2(sO[values] - rs[i])", "f = float32(1.0)"),
        *((f"no column {n}", f"+= f * o[{n}]", "+= float32(0.0)") for n in range(4)),
        **keys,
    )
    add(
        "mma_combine.make_combine",
        ("m of one warp", "m_new = maximum(m_new, sO[values_at(n, i, ty)])", "pass"),
        **how,
        cases=("keys", "low keys", "blind keys"),
    )
    blind = ("no shift of a blind row", "if m_new == NEG_INF:", "if False:")
    add("mma_combine.make_combine", blind, **how, cases="blind keys")


def mma_backward_mutants(add):
    """Faults of the backward kernels on tensor cores."""
    every, sweep = {"by": ANY}, "mma_fa2_backward.make_query_gradients"
    for place, load in (
        ("mma_fa1_backward", "load_next_with_o"),
        ("mma_fa2_backward.make_backward", "load_next_rows"),
    ):
        to = place.partition(".")[0]
        how, write = {**every, "to": (to,)}, "write_columns(rdV, dVh, j0, columns, tx, t)"
        add(
            place,
            ("L for D", "take_values(rD, sD, ty)", "take_values(rD, sL, ty)"),
            ("dK without scale", "p.scale_columns(rdK, scale)", "pass"),
            ("dV from Q", "(rdV, rS, sP, sdO,", "(rdV, rS, sP, sQ,"),
            ("dK from dO", "(rdK, rdP, sdS, sQ,", "(rdK, rdP, sdS, sdO,"),
            ("dP from Q", "scores(rdP, rV, sV, sdO,", "scores(rdP, rV, sV, sQ,"),
            ("dQ from V", "add_dq_product(rdQ, sdS, sK)", "add_dq_product(rdQ, sdS, sV)"),
            ("a tile of rows dropped", "while i0 < i_end:", "while i0 + uint32(spec.Br) < i_end:"),
            ("one stage of rows", "stage = uint32(stage ^ uint32(1))", "pass"),
            ("columns of the first warp", " * COLUMNS)", " * 0)"),
            ("K past the end", "(sK, Kh, j0, Nk)", "(sK, Kh, j0, uint32(j0 + Bc))"),
            ("no dV", f"p.{write}", "pass"),
            ("dV past the end", write, write.replace(" columns", " uint32(j0 + Bc)")),
            **how,
        )
        add(
            f"mma_backward.make_{load}",
            ("the next tile of rows not loaded", "if i_next < i_end:", "if False:"),
            ("this tile again", "i_next, rows_end)", "i0, rows_end)"),
            ("rows past the end", "i_next, rows_end)", "i_next, uint32(i_next + Br))"),
            **how,
        )
        unseen = ("unseen tiles loaded", "if i_next < i_end:", "if True:")
        add(f"mma_backward.make_{load}", unseen, **how, cases="window")
        add(place, ("unseen tiles loaded", "if i0 < i_end:", "if True:"), **how, cases="kv_lens")
        add(
            place,
            ("another head's K", "key_rows(K, b, hk,", "key_rows(K, b, 0,"),
            ("another head's dO", "query_rows(dO, b, h,", "query_rows(dO, b, h_first,"),
            **how,
            cases="odd",
        )
        add(
            place,
            ("rows of the first warp", " * ROWS)", " * 0)"),
            ("dK's columns of the first warp", " * WIDTH)", " * 0)"),
            (
                "dK to the first warp's columns",
                "t = uint32(warp_chunk // uint32(2) +",
                "t = uint32(",
            ),
            ("no P for the other warp", "p.store_p(sP, rS, options, ty, tx)", "pass"),
            **how,
            cases="wide",
        )
        drops = "p.drop(rS, i0, j0, b, h, options, ty, tx)"
        add(place, ("nothing dropped", drops, "pass"), **how, cases="dropout")
        natural = ("scale_and_mask(rS, scale_log2,", "scale_and_mask(rS, scale,")
        add(place, ("S in natural units", *natural), **how, cases="scores")
        valid = ("valid columns alone", "(rdV, dVh, j0, columns,", "(rdV, dVh, j0, Nk,")
        add(place, valid, **how, cases="kv_lens")

    # Stages of row tiles
    for name, to, tiles in (
        ("row_tile_with_o", "mma_fa1_backward", 3),
        ("row_tile", "mma_fa2_backward", 2),
    ):
        place, how = f"mma_backward.make_{name}", {**every, "to": (to,), "cases": "causal"}
        floats = "stage * Br" if tiles == 3 else "stage * (2 * Br)"
        add(
            place,
            ("one stage of tiles", f"AT_Q + stage * ({tiles} * NQ)", "AT_Q"),
            ("stages that overlap", f"stage * ({tiles} * NQ)", "stage * NQ"),
            ("dO in Q's place", "half_tile(uint32(at + NQ), NQ)", "half_tile(at, NQ)"),
            **how,
        )
        # FlashAttention-1's next L is on its way early where two warps share a row of S.
        stages = ("one stage of L", f"AT_L + {floats}", "AT_L")
        add(place, stages, **every, to=(to,), cases="wide")
        loaded = f"mma_backward.make_load_{name}"
        for load in ("rows(sQ, Q", "rows(sdO, dO", "values(sL, L"):
            none = (f"no {load[-1]}", f"load_{load}, row0, rows_end)", "pass")
            add(loaded, (f"no load_{load}", *none[1:]), **how)
        last = "rows(sO, O" if tiles == 3 else "values(sD, D"
        add(loaded, (f"no load_{last}", f"load_{last}, row0, rows_end)", "pass"), **how)

    first = {**every, "to": ("mma_fa1_backward",)}
    read, more = "mma_dq.make_read_dq", "mma_dq.make_write_dq"
    add(
        "mma_fa1_backward",
        ("D from O alone", "row_dots(sD, sdO, sO)", "row_dots(sD, sO, sO)"),
        ("dQ not read", "p.read_dq(rdQ, Ah, j0, i0, i_stop)", "pass"),
        ("dQ without scale", "(rdQ, Ah, dQh, scale, more,", "(rdQ, Ah, dQh, float32(1.0), more,"),
        ("a tile of columns dropped", "while j0 < j_end:", "while j0 + uint32(spec.Bc) < j_end:"),
        **every,
    )
    add(
        read,
        ("dQ before the first pass", "if initialises or j0 > uint32(0):", "if True:"),
        ("dQ of the last pass", "            seen = rows_end", "            pass"),
        **first,
    )
    add(
        more,
        ("dQ always rounded", "if more:", "if False:"),
        ("dQ never rounded", "if more:", "if True:"),
        ("no dQ between the passes", "write_sums(rdQ, A, row0, rows_end)", "pass"),
        ("no dQ", "write_rounded(rdQ, dQ, scale, row0, rows_end)", "pass"),
        ("dQ past the end", "scale, row0, rows_end)", "scale, row0, uint32(row0 + spec.Br))"),
        **first,
    )
    takes = ("the first pass leaves rows out", "not spec.features.initialises", "False")
    add("visits.make_rows_of_pass", takes, **first, cases="causal")
    dk = "p.write_columns(rdK, dKh, j0, columns, tx, t)"
    add(
        "mma_fa1_backward",
        ("every split has all rows", "cuda.blockIdx.x * split_rows", "0 * split_rows"),
        ("rows of the next splits", "min(rows, uint32(i_begin + split_rows))", "rows"),
        ("no dK of a split", dk, f"None if spec.splits_queries else {dk}"),
        **every,
        cases="causal",
    )
    initialise = "mma_dq.make_initialise_dq"
    heads = ("one head initialised", "while g < heads:", "while g < uint32(1):")
    add(initialise, heads, **first, cases="window")
    blind = "write_rounded(rdQ, dQh, scale, i0, rows_end)"
    add(
        initialise,
        ("nothing initialised", "        if initialises:", "        if False:"),
        ("dQ of blind rows", blind, "pass"),
        ("A of the first pass", "write_sums(rdQ, Ah, i0, rows_end)", "pass"),
        ("dQ not begun", "start_dq(rdQ)\n", "pass\n"),
        ("the first tile of rows alone", "while i0 < rows_end:", "if i0 < rows_end:"),
        **first,
        cases="sparse",
    )
    call = re.search(r"p\.initialise_dq\(.*\)", source("mma_fa1_backward"))[0]
    add("mma_fa1_backward", ("no initialise_dq", call, "pass"), **every, cases="sparse")
    rows = ("all rows", "i_stop = uint32(min(i_last, Nq))", "i_stop = i_last")
    add("mma_fa1_backward", rows, **every, cases="q_lens")

    add(
        "mma_fa2_backward.make_backward",
        ("dQ of all tiles", "p.start_dq(rdQ)", "pass"),
        ("dQ not added", "p.add_dq(rdQ, Ah, i0, Nq)", "pass"),
        ("dQ past the end", "(rdQ, Ah, i0, Nq)", "(rdQ, Ah, i0, uint32(i0 + spec.Br))"),
        **every,
        to=("mma_fa2_backward",),
    )
    twice = ("dQ twice", "                if atomic:", "                if True:")
    add(
        "mma_fa2_backward.make_backward",
        twice,
        **every | {"by": ANY | {"Misaligned"}},
        to=("mma_fa2_backward",),
    )
    how = {**every, "to": ("mma_fa2_backward",)}
    add("mma_dq.make_start_dq", ("dQ of all tiles", "rdQ[e] = float32(0.0)", "pass"), **how)
    add(
        sweep,
        ("L for D", "read_values(rD, Dh,", "read_values(rD, Lh,"),
        ("dQ without scale", "rdQ[e] *= scale", "pass"),
        ("dO's fragments of Q", "load_fragments(rdO, sdO,", "load_fragments(rdO, sQ,"),
        ("dP from K", "scores(rdP, rdO, sdO, sV,", "scores(rdP, rdO, sdO, sK,"),
        ("dQ from V", "add_ds_product(rdQ, rdP, sK,", "add_ds_product(rdQ, rdP, sV,"),
        ("rows of the first warp", " * ROWS)", " * 0)"),
        **how,
        cases="causal",
    )
    add(sweep, ("another head's V", "key_rows(V, b, hk,", "key_rows(V, b, 0,"), **how, cases="odd")
    columns = (
        "a tile of columns dropped",
        "while j0 < j_end:",
        "while j0 + uint32(spec.Bc) < j_end:",
    )
    add(sweep, columns, **how, cases="two fragments")
    blocks = ("the first block alone visited", "next_column(j0, j_end, i0, b, h, options)", "j0")
    add("visits.make_visited_columns", blocks, **how, cases="sparse")
    valid = ("valid rows alone", "(rdQ, dQh, i0, rows,", "(rdQ, dQh, i0, Nq,")
    add(sweep, valid, **how, cases="q_lens")

    sums, rounds = (f"mma_fa2_backward.make_{name}" for name in ("row_sums", "round_rows"))
    add(
        sums,
        ("D of one lane", "dot += cuda.shfl_xor_sync(FULL_WARP, dot, step)", "pass"),
        ("half of D", " + o[1] * g[1]", ""),
        ("rows past the end", "        if row < Nq:", "        if True:"),
        ("A not begun at 0", "Ah[row, col] = float32(0.0)", "pass"),
        **how,
    )
    add(sums, ("D of 64 columns", "uint32(col + 64)", "uint32(head_dim)"), **how, cases="wide")
    add(
        sums,
        ("valid rows alone", "clear and row < rows", "clear and row < Nq"),
        **how,
        cases="q_lens",
    )
    add(
        rounds,
        ("one column of two", "high = Ah[row, uint32(col + 1)]", "high = low"),
        ("without scale", "scale * low, scale * high", "low, high"),
        **how,
    )
    add(rounds, ("64 columns", "uint32(col + 64)", "uint32(head_dim)"), **how, cases="wide")
    bound = ("no column bound", "if uint32(col + 1) < uint32(head_dim):", "if True:")
    add(rounds, bound, **how, cases="odd")


def gradient_fragment_mutants(add):
    """Faults of the parts that only the backward kernels on tensor cores have."""
    both, first, second = (
        {"by": ANY | {"EmulatorError"}, "to": to}
        for to in (tuple(MMA_BACKWARD), ("mma_fa1_backward",), ("mma_fa2_backward",))
    )

    # L and D
    add(
        "mma_tile_load.make_load_values",
        ("no row bound", "int32(row < uint32(rows_end))", "int32(1)"),
        **both,
    )
    add(
        "mma_tile_load.make_load_values",
        ("rows of the first turn", "cuda.threadIdx.x + first", "cuda.threadIdx.x"),
        **both,
        cases="one warp",
    )
    taken = ("rows of another thread", "sT[row_of(ty, i)]", "sT[uint32(ty + i)]")
    add("mma_tile_load.make_take_values", taken, **both)
    dots = "mma_backward.make_row_dots"
    add(
        dots,
        ("one lane", "dot += cuda.shfl_xor_sync(FULL_WARP, dot, step)", "pass"),
        ("rows of the first turn", "uint32(row + warps)", "uint32(row + Br)"),
        ("columns past the tile", "if col < uint32(columns):", "if True:"),
        **first,
    )
    add(dots, ("64 columns", "range(0, columns, 64)", "range(0, 64, 64)"), **first, cases="wide")
    add(
        "mma_pairs.make_read_two",
        ("past the end", "if uint32(col + 1) < uint32(d):", "if True:"),
        ("the first of two", "word = uint32(word | ", "word = uint32(word + 0 * "),
        **second,
        cases="odd",
    )

    # P and dS
    folded = ("scores without scale", "s = s * scale", "pass")
    add("softmax.make_softmax_from_lse", folded, **both)
    gradients = "gradients.make_score_gradients"
    other = ("dbias of another element", "rdP[i * EI + j * EJ])", "rdP[i * TN + j])")
    add(gradients, other, **both, cases="scores")
    store = "mma_stores._make_store"
    add(
        store,
        ("the first column", "column_of(uint32(0), j) * pitch", "column_of(uint32(0), 0) * pitch"),
        ("the first rows", " + row_of(uint32(0), i))", ")"),
        ("registers of the first column", "e = j * TM + i", "e = i"),
        ("one row of two", "kept(rT[e + 1], options)", "kept(rT[e], options)"),
        **first,
    )
    kept = ("dropped kept", "kept_if(drops)", "kept_if(False)")
    add(store, kept, **first, cases="wide dropout")
    kept = ("dS taken for P", "kept_if(drops)", "kept_if(spec.features.dropout)")
    add(store, kept, **first, cases="dropout")
    kept = ("dropped kept", "spec, spec.features.dropout", "spec, False")
    add("mma_stores.make_store_p", kept, **first, cases="wide dropout")
    kept = ("dS taken for P", "(spec, False,", "(spec, spec.features.dropout,")
    add("mma_stores.make_store_ds", kept, **first, cases="dropout")

    # dK and dV
    transposed = "mma_products._make_add_transposed_product"
    own = ("P of shared memory", "if own:", "if False:")
    add(transposed, own, **second)
    marks = "spec.features.dropout)"
    drops = ("dS taken for P", "gradients, drops)", f"gradients, {marks}")
    add(transposed, drops, **second, cases="dropout")
    drops = ("P without marks", f"(spec, {marks}", "(spec, False)")
    add("mma_products.make_add_dv_product", drops, **both, cases="dropout")
    drops = ("dS taken for P", "(spec, False)", f"(spec, {marks}")
    add("mma_products.make_add_dk_product", drops, **both, cases="dropout")
    drops = ("dS taken for P", "(spec, False)", f"(spec, {marks}")
    add("mma_products.make_add_ds_product", drops, **second, cases="dropout")
    shared = "mma_products._make_add_shared_product"
    wide = {**second, "cases": "wide"}
    add(
        transposed,
        ("columns of the first warp", "sT, 0, row0, col0)", "sT, 0, row0, 0)"),
        ("rows dropped", "spec.Br // 16", "spec.Br // 16 - 1"),
        **wide,
    )
    warp = ("rows of the first warp", "sT, 0, row0, col0)", "sT, 0, 0, col0)")
    add(transposed, warp, **second, cases="wide dropout")
    add(
        shared,
        ("P's first rows", "first, 16 * r, 16 * k)", "first, 0, 16 * k)"),
        ("P transposed", "place_p(True, 0)", "place_p(False, 0)"),
        ("dO's first columns", "at, 16 * k, 16 * c)", "at, 16 * k, 0)"),
        ("the left half twice", "b[2], b[3])", "b[0], b[1])"),
        **wide,
    )
    add(
        "mma_backward._make_add_columns",
        ("no row bound", "left > i * STEP", "True"),
        ("the first columns", "int64(2 * tx) + 8 * n", "int64(2 * tx)"),
        ("one column of two", "rdK[e + 1]", "rdK[e]"),
        **first,
        cases="causal",
    )

    # dQ
    product = "mma_products.make_add_dq_product"
    add(
        product,
        ("dS's tiles swapped", "place_ds(False,", "place_ds(True,"),
        ("K's first columns", "16 * k, 16 * c * ALONG)", "16 * k, 0)"),
        ("K of the first warp", "place(True, chunk * 16)", "place(True, 0)"),
        ("the left half twice", "b[2], b[3])", "b[0], b[1])"),
        ("the upper rows twice", "high = low + 2", "high = low"),
        ("columns of dS dropped", "in range(K):", "in range(K - 1):"),
        **second,
    )
    add(
        product,
        ("dS's first rows", "16 * k, 16 * r)", "16 * k, 0)"),
        ("dQ of the first rows", "8 * (r * C + c)", "8 * c"),
        **second,
        cases="one warp",
    )
    warp = "warp // uint32(ALONG) * (16 * R)"
    add(product, ("dS of the first warp", warp, "0"), **second, cases="two fragments")
    place = "mma_dq.make_query_place"
    add(place, ("rows of the first warp", warp, "0"), **first, cases="two fragments")
    add(
        place,
        ("columns of the first warp", "warp % uint32(ALONG) * 16", "0"),
        ("columns of another lane", "lane % uint32(4) * 2", "lane % uint32(2) * 2"),
        **first,
    )
    add(
        "mma_dq._query_pairs",
        ("chunks of the next warp", "16 * c * ALONG", "16 * c"),
        **both,
    )
    add("mma_dq._query_pairs", ("the first rows", "16 * r + ", ""), **both, cases="one warp")
    add(
        "mma_pairs.make_add_two",
        ("pairs past the end", "inside and col + 1 < head_dim", "inside"),
        ("an element past the end", " and col + 1 == head_dim", ""),
        ("no element by itself", "add_global(T, row, col, low)", "pass"),
        **both,
        cases="odd",
    )
    for name, to in (
        ("make_add_dq", second),
        ("make_read_dq", first),
        ("_make_write_sums", first),
    ):
        add(f"mma_dq.{name}", ("no row bound", "left > down", "True"), **to)
    one = "rdQ[2 * e + 1]"
    add("mma_dq.make_add_dq", ("one column of two", one, "rdQ[2 * e]"), **second)
    read = ("one column of two", "= pair[1]", "= pair[0]")
    add("mma_dq.make_read_dq", read, **first)
    add(
        "mma_dq._make_write_rounded",
        ("no row bound", "if left > down:", "if True:"),
        ("one column of two", f"factor * {one}", "factor * rdQ[2 * e]"),
        **first,
    )


def rounded_after(place, step, registers, count):
    """(needle, replacement) that round these registers to 16 bits after a step of ``place``."""
    module, _, function = place.partition(".")
    text = inspect.getsource(getattr(MODULES[module], function))
    assert text.count(step) == 1, f"{step!r} stands {text.count(step)} times in {place}"
    at = text.index(step)
    end = text.index("\n", at)
    margin = "\n" + " " * (at - text.rindex("\n", 0, at) - 1)
    loop = f"{margin}for e in range({count}):{margin}    {registers}[e] = unpack(pack("
    loop += f"{registers}[e], {registers}[e]))[0]"
    bound = "\n    from fa_numba.parts.mma.chunks import conversions"
    bound += "\n    pack, unpack = conversions(spec.dtype)\n"
    inner = re.search(r"\n\n    def ", text).start()
    return text, text[:inner] + bound + text[inner:end] + loop + text[end:]


def precision_mutants(add):
    """Faults of half a rounding of 16 bits: sums that are rounded to that in every pass, results of
    another scale.
    """
    first, second = "mma_fa1_backward", "mma_fa2_backward"
    kernel, sweep = f"{second}.make_backward", f"{second}.make_query_gradients"

    # O of FlashAttention-1 and its dQ through memory
    bound = "    pack, unpack = conversions(spec.dtype)\n\n    @device_function\n"
    write = "    def write_floats(A, row, col, inside, low, high):\n"
    read = "    def read_floats(A, row, col, inside):\n        pair = "
    pair = "read_pair(A, row, col, inside and col + 1 < head_dim)"
    for name, *change in (
        ("write", write, f"{write}        low, high = unpack(pack(low, high))\n"),
        ("read", f"{read}{pair}", f"{read}unpack(pack(*{pair}))"),
    ):
        needle, replacement = (f"\n    @device_function\n{change[0]}", bound + change[1])
        halves = (f"sums of 16 bits: {name}", needle, replacement)
        for to, cases in (("mma_fa1", "passes"), (first, "column passes")):
            add(f"mma_pairs.make_{name}_floats", halves, to=(to,), cases=cases)

    # O, dQ, dK and dV in registers
    for place, cases, registers, count, *steps in (
        ("mma_fa1.make_forward", "passes", "rO", "RO", "p.read_state(", "p.normalise_rows("),
        ("mma_fa2.make_forward", "passes", "rO", "RO", "p.rescale_rows(", "p.add_product("),
        (f"{first}.make_backward", "column passes", "rdQ", "RQ", "p.read_dq("),
        (f"{first}.make_backward", "row passes", "rdK", "RK", "p.add_dk_product("),
        (f"{first}.make_backward", "row passes", "rdV", "RK", "p.add_dv_product("),
        (kernel, "row passes", "rdK", "RK", "p.add_dk_product("),
        (kernel, "row passes", "rdV", "RK", "p.add_dv_product("),
        (sweep, "sweep", "rdQ", "RQ", "p.add_ds_product("),
    ):
        for step in steps:
            change = rounded_after(place, step, registers, count)
            add(place, (f"{registers} of 16 bits after {step[2:-1]}", *change), cases=cases)

    # Results of another scale, by a rounding of 16 bits; of one column of two, by half of that
    large, rows = "float32(1.0005)", {"cases": "rows"}
    inverse = ("O too large", "float32(1.0) / rl[i]", f"{large} / rl[i]")
    add("rows.make_normalise_rows", inverse, to=tuple(MMA), **rows)
    for name, *places in (("dK", first, kernel), ("dV", first, kernel)):
        register = f"r{name}"
        written = f"p.write_columns({register}, {name}h, j0, columns, tx, t)"
        scaled = f"p.scale_columns({register}, {large}), {written}"
        for place in places:
            add(place, (f"{name} too large", written, scaled), **rows)
    factor = ("dQ too large", "factor * rdQ", f"factor * {large} * rdQ")
    add("mma_dq._make_write_rounded", factor, to=(first,), total=2, **rows)
    factor = ("dQ too large", "scale * low", f"scale * {large} * low")
    add(f"{second}.make_round_rows", factor, **rows)
    add(sweep, ("dQ too large", "rdQ[e] *= scale", f"rdQ[e] *= scale * {large}"), **rows)
    element = "rdP[i * EI + j * EJ])"
    add(
        "gradients.make_score_gradients",
        ("dS too large", "= p * (", f"= {large} * p * ("),
        ("dbias too large", element, f"{large} * {element}"),
        ("D too large", "- rD[i]", f"- {large} * rD[i]"),
        to=tuple(MMA_BACKWARD),
        **rows,
    )


def between_blocks_mutants(add):
    """A read, an add and a write where several blocks of a launch add to one element."""
    how = {"by": "GlobalHazard", "cases": "shared bias"}
    element = "rdP[i * EI + j * EJ]"
    plain = (
        "dbias not atomic",
        f"add_global(dBh, row, col, {element})",
        f"dBh[row, col] += {element}",
    )
    add("gradients.make_score_gradients", plain, to=(*FLASH_BACKWARD, *MMA_BACKWARD), **how)
    one = "options.dbias[b, h]"
    plain = ("dbias not atomic", f"add_global({one}, row, col, ds)", f"{one}[row, col] += ds")
    add("standard_backward", plain, **how)
    # dQ
    product = "factor * rT[4 * (i * DN + c) + n]"
    plain = ("dQ not atomic", f"add_global(T, row, col, {product})", f"T[row, col] += {product}")
    add("simt_stores.make_add_rows", plain, by="GlobalHazard", to=("fa2_backward",))
    # dK and dV of query splits
    product = "rT[4 * (r * DN + c) + n]"
    plain = ("sums not atomic", f"add_global(T, row, col, {product})", f"T[row, col] += {product}")
    split = {"to": ("fa1_backward",), "cases": "splits"}
    add("simt_stores._make_add_columns", plain, by="GlobalHazard", **split)
    add(
        "simt_stores._make_add_columns",
        ("no row bound", "if row < rows_end and", "if"),
        ("no column bound", " and col < uint32(d)", ""),
        by=EDGE,
        **split,
    )
    add(
        "simt_stores.make_write_columns",
        ("not added", "if spec.splits_queries:", "if False:"),
        by="GlobalHazard",
        **split,
    )
    add(
        "fa1_backward",
        ("every split has all rows", "cuda.blockIdx.x * split_rows", "0 * split_rows"),
        ("rows of the next splits", "min(rows, uint32(i_begin + split_rows))", "rows"),
        by=ANY,
        cases="splits",
    )
    begun = "heads, i_begin, i_last,"
    all_begun = ("dQ of all splits begun", begun, "heads, uint32(0), i_last,")
    add("fa1_backward", all_begun, by="GlobalHazard", cases="splits")
    # dQ of FlashAttention-2, dK and dV of query splits
    pair = "        add(T, row, col, low, high, inside and col + 1 < head_dim)\n"
    inside = "        if inside and col + 1 < head_dim:\n            "
    high = "\n            T[row, col + 1] += high\n"
    single = "add_global(T, row, col, low)"
    add(
        "mma_pairs.make_add_two",
        ("sums of two not atomic", pair, f"{inside}T[row, col] += low{high}"),
        ("the second of two not atomic", pair, f"{inside}{single}{high}"),
        ("an element not atomic", single, "T[row, col] += low"),
        to=tuple(MMA_BACKWARD),
        **how,
    )


def mma_standard_mutants(add):
    """Faults of standard attention on tensor cores."""
    forward, backward = "mma_standard", "mma_standard_backward"
    how, large = {"by": ANY}, "float32(1.0005)"

    # Scores
    scores, softmax, output = (
        f"{forward}.make_standard_{name}" for name in ("scores", "softmax", "output")
    )
    add(
        scores,
        ("a tile of columns dropped", "j0 = uint32(j0 + Bc)", "j0 = uint32(j0 + 2 * Bc)"),
        ("this K again", "p.load_k(sK, Kh, uint32(j0 + Bc),", "p.load_k(sK, Kh, j0,"),
        ("rows of another group", "% uint32(32) // uint32(4)", "% uint32(32) // uint32(8)"),
        ("rows of the first warp", " * ROWS)", " * 0)"),
        ("Q past the end", "(sQ, Qh, i0, Nq)", "(sQ, Qh, i0, uint32(i0 + Br))"),
        ("K past the end", "uint32(j0 + Bc), Nk)", "uint32(j0 + Bc), uint32(j0 + 2 * Bc))"),
        (
            "S past the matrix",
            "warp_row, i0, Nq, j0, Nk)",
            "warp_row, i0, uint32(i0 + Br), j0, Nk)",
        ),
        (
            "not masked",
            "p.scale_and_mask_all(rS, scale, i0, j0, Nq, Nk, b, h, options, ty, tx)",
            "pass",
        ),
        ("S of no tile", "p.store_scores(sS, rS, ty, tx)", "pass"),
        **how,
    )
    tile = ("tiles past the end", "if shortened and i0 >= Nq:", "if False:")
    add(scores, tile, by="counts", cases="q_lens")
    add(output, tile, by="counts", cases="q_lens")
    add(scores, ("another K/V head", "h // uint32(group)", "h % uint32(group)"), **how, cases="odd")
    add(output, ("another K/V head", "h // uint32(group)", "h % uint32(group)"), **how, cases="odd")
    how_back = {"by": ANY, "to": (backward,), "cases": "scores"}
    add(
        scores,
        ("no slopes of the cap", "p.times_scores(rS, Sh, i0, Nq, j0, Nk, ty, tx)", "pass"),
        ("slopes for dS", "p.cap_slopes(rS, rS, scale, options)", "pass"),
        **how_back,
    )

    # Softmax
    add(
        softmax,
        ("columns past the end", "if uint32(col + e) >= Nk:", "if False:"),
        ("m not updated", "m = m_new\n            col", "pass\n            col"),
        (
            "l of one chunk",
            "l += exp_of_difference(r[e], m_new)",
            "l = exp_of_difference(r[e], m_new)",
        ),
        ("m of one lane", "m_other = cuda.shfl_xor_sync(FULL_WARP, m, lane)", "m_other = m"),
        ("l of one lane", "l_other = cuda.shfl_xor_sync(FULL_WARP, l, lane)", "l_other = l"),
        ("a lane's l not rescaled", "l_other * exp_of_difference(m_other, m_new)", "l_other"),
        ("P without the inverse", "* inverse", ""),
        ("L without l", "m + LN2 * log2(l)", "m"),
        ("L in units of log2", "LN2 * log2(l)", "log2(l)"),
        ("no L", "Lh[row] = m + LN2 * log2(l)", "pass"),
        **how,
    )
    add(
        softmax,
        ("one warp", "range(WARPS)", "range(1)"),
        ("a warp's l not rescaled", "sl[w] * exp_of_difference(sm[w], m_new)", "sl[w]"),
        **how,
        cases=("long", "from memory"),
    )
    following = "uint32(col + 8 * threads)\n\n        lane"
    add(
        softmax,
        ("one chunk of a thread", following, "Nk\n\n        lane"),
        ("l not rescaled", "l *= exp_of_difference(m, m_new)", "pass"),
        **how,
        cases="longest",
    )
    add(
        softmax,
        ("no guard of a blind row", "if l != float32(0.0):", "if True:"),
        by=ANY | {"ZeroDivisionError"},
        cases="blind",
    )
    row = ("rows past the end", "if shortened and row >= Nq:", "if False:")
    add(softmax, row, by=ANY, cases="q_lens")
    add(
        softmax,
        ("not scaled", "pij * options.inverse_keep if", "pij if"),
        ("nothing dropped", "if dropout:", "if False:"),
        ("columns for rows", "keeps(row, uint32(col + e),", "keeps(uint32(col + e), row,"),
        ("the first column of a chunk", "keeps(row, uint32(col + e),", "keeps(row, col,"),
        **how,
        cases="dropout",
    )

    # Output
    add(
        output,
        ("O not begun at 0", "rO[e] = float32(0.0)", "pass"),
        (
            "the first step again",
            "sV, uint32(other * NV), Vh, j_next,",
            "sV, uint32(other * NV), Vh, j0,",
        ),
        (
            "P of the first step",
            "uint32(other * NP), Ph, i0, Nq, j_next,",
            "uint32(other * NP), Ph, i0, Nq, j0,",
        ),
        ("one stage", "stage = other", "pass"),
        ("V of the other stage", "sV, uint32(stage * NV)", "sV, uint32(other * NV)"),
        ("O past the end", "(rO, Oh, i0, rows,", "(rO, Oh, i0, uint32(i0 + spec.Br),"),
        **how,
    )
    valid = ("valid rows alone", "(rO, Oh, i0, rows,", "(rO, Oh, i0, Nq,")
    add(output, valid, **how, cases="q_lens")
    written = "p.write_rows(rO, Oh, i0, rows, ty, tx)"
    scaled = f"p.scale_rows(rO, [{large}] * spec.TM), {written}"
    add(output, ("O too large", written, scaled), cases="rows")

    # dV and dK
    transposed = f"{backward}.make_standard_transposed_output"
    add(
        transposed,
        ("not begun at 0", "rdV[e] = float32(0.0)", "pass"),
        ("a step of rows dropped", "i_next = uint32(i0 + STEP)", "i_next = uint32(i0 + 2 * STEP)"),
        ("one stage", "stage = other", "pass"),
        ("P of the first step", "Ph, i_next, i_end, j0, Nk)", "Ph, i0, i_end, j0, Nk)"),
        ("dO of the first step", "dOh, i_next, i_end)", "dOh, i0, i_end)"),
        ("past the end", "(rdV, dVh, j0, columns,", "(rdV, dVh, j0, uint32(j0 + Bc),"),
        **how,
    )
    add(
        transposed,
        ("one head of the group", "h = uint32(h + 1)", "h = h_end"),
        ("heads of another group", "h = uint32(hk * group)", "h = hk"),
        **how,
        cases="odd",
    )
    tile = ("tiles past the end", "if shortened and j0 >= Nk:", "if False:")
    add(transposed, tile, by="counts", cases="kv_lens")
    valid = ("valid columns alone", "(rdV, dVh, j0, columns,", "(rdV, dVh, j0, Nk,")
    add(transposed, valid, **how, cases="kv_lens")
    written = "p.write_rows(rdV, dVh, j0, columns, ty, tx)"
    scaled = f"p.scale_rows(rdV, [{large}] * spec.TM), {written}"
    add(transposed, ("dK and dV too large", written, scaled), cases="rows")

    # dS
    ds = f"{backward}.make_standard_score_gradients"
    add(
        ds,
        ("D added", "(g - D)", "(g + D)"),
        ("no D", "(g - D)", "g"),
        ("D of one lane", "dot += cuda.shfl_xor_sync(FULL_WARP, dot, lane)", "pass"),
        ("dS without scale", "rG[e] = scale * ds", "rG[e] = ds"),
        ("dS without P", "ds = abs(pij) * (g - D)", "ds = g - D"),
        **how,
    )
    add(
        ds,
        ("D of one warp", "range(WARPS)", "range(1)"),
        **how,
        cases=("long", "from memory"),
    )
    too_large = ("dS too large", "rG[e] = scale * ds", f"rG[e] = {large} * scale * ds")
    add(ds, too_large, cases="rows")
    add(
        ds, ("rows past the end", "if shortened and row >= Nq:", "if False:"), **how, cases="q_lens"
    )
    one = "add_global(options.dbias[b, h], row, uint32(col + e), ds)"
    add(
        ds,
        ("no dbias", "if dbias and uint32(col + e) < Nk:", "if False:"),
        ("dbias past the end", "if dbias and uint32(col + e) < Nk:", "if dbias:"),
        ("dbias with scale", one, one.replace(", ds)", ", scale * ds)")),
        ("dbias of the first column", one, one.replace("uint32(col + e)", "col")),
        **how,
        cases="scores",
    )
    add(ds, ("dbias too large", one, one.replace(", ds)", f", {large} * ds)")), cases="rows")
    plain = "options.dbias[b, h][row, uint32(col + e)] += ds"
    add(ds, ("dbias not atomic", one, plain), by="GlobalHazard", cases="shared bias")
    add(
        ds,
        ("dropped dP", "g = float32(0.0)", "pass"),
        ("dP not scaled", "g = g * options.inverse_keep", "pass"),
        ("kept for dropped", "if not keeps(", "if keeps("),
        **how,
        cases="dropout",
        total=2,
    )
    add(
        ds,
        ("dropped P kept", "pij = -pij", "pass"),
        ("dropped P below 0", "ds = abs(pij) *", "ds = pij *"),
        ("P with what is dropped", "write_chunk(rP, Ph, row, col, Nk)", "pass"),
        ("P not scaled", "rP[e] = p.kept(pij, options)", "rP[e] = max(pij, float32(0.0))"),
        **how,
        cases="dropout",
    )


def corner_mutants(add):
    """Faults of a tile's corner, of a second batch entry, of a second tile of rows or split."""
    mask, drop = "softmax._make_scale_and_mask", "dropout.make_drop"
    flash = {"to": (*FLASH, *FLASH_BACKWARD, *MMA, *MMA_BACKWARD), "by": ANY}
    lowest = ("left of the row before the last", "row0 + (Br - 1)", "row0 + (Br - 2)")
    corner = ("left of the second column", "lowest, int32(col0),", "lowest, int32(col0 + 1),")
    add(mask, lowest, corner, **flash, cases="window")
    last = "int32(col0) + Bc - diagonal"
    fewer = ("window: rows end a column early", last, f"{last} - int32(1)")
    tensor = {"by": ANY, "to": ("mma_fa1", *MMA_BACKWARD)}
    add("visits._make_row_range", fewer, **tensor, cases="window")
    # Block masks
    entry = ("blocks of another entry", "block_mask[b, h,", "block_mask[0, h,")
    rows = {"by": ANY, "to": (*BY_COLUMNS, "mma_fa1", *MMA_BACKWARD), "cases": "sparse"}
    columns = {"by": ANY, "to": (*BY_ROWS, "mma_fa2"), "cases": "sparse"}
    add("visits.make_next_row", entry, **rows)
    add("visits.make_next_column", entry, **columns)
    standard = {"by": ANY, "to": ("standard", "standard_backward", *MMA_STANDARD)}
    add(mask, entry, **standard, cases="sparse")
    seen = "next_column(uint32(j0 + Bc), j_last, i0, b, h, options)"
    hidden = ("hidden blocks too", seen, "uint32(j0 + Bc)")
    passes = {"by": ANY, "to": ("mma_fa1", "mma_fa1_backward")}
    add("visits.make_sees_more", hidden, **passes, cases="sparse")
    # Dropout
    row = ("rows of a tile", "uint32(row0 + row_of(ty, i0 + i))", "row_of(ty, i0 + i)")
    add(drop, row, **flash, cases="dropout")
    # What the forward kernels on tensor cores share with the others, and what is theirs alone
    tensor = {"by": ANY, "to": (*MMA, "mma_standard")}
    for option, adds in (("slopes", mask), ("bias", "bias.make_add_bias")):
        head = (f"{option} of another head", f"{option}[b, h]", f"{option}[b, 0]")
        entry = (f"{option} of another entry", f"{option}[b, h]", f"{option}[0, h]")
        add(adds, head, entry, **tensor, cases="scores")
    place = "(uint32(b) << uint32(16)) + uint32(h)"
    add("dropout._words", ("one entry", place, "uint32(h)"), **tensor, cases="dropout")
    start = ("from the other's start", "options.k_starts[b] :", "options.q_starts[b] :")
    add("heads.make_key_rows", start, **tensor, cases="packed")
    add(
        "mma_fa1",
        ("all rows", "i_stop = uint32(min(i_last, Nq))", "i_stop = i_last"),
        ("all rows: Q", "(sQ, Qh, i0, i_stop)", "(sQ, Qh, i0, i_last)"),
        by=ANY,
        cases="q_lens",
    )
    add(
        "mma_fa2",
        ("valid rows alone", "i0, rows,", "i0, Nq,"),
        by=ANY,
        cases="q_lens",
        total=3,
        only=(1, 2),
    )
    add("mma_fa2", ("all rows: Q", "(sQ, Qh, i0, Nq", "(sQ, Qh, i0, rows"), by=ANY, cases="q_lens")
    following = "uint32(j0 + Bc), j_end, i0,"
    other = ("blocks of another row", following, following.replace("i0", "uint32(0)"))
    early = {"by": ANY, "to": ("mma_fa2",), "cases": "stages"}
    add("mma_tile_load.make_load_columns_early", other, **early)
    # Query splits
    splits = {"by": {"GlobalHazard"}}
    for name, cases in (("fa1", "causal"), ("mma_fa1", "16 rows")):
        written = ("L of all splits", "options, i_first, i_last,", "options, uint32(0), i_last,")
        add(name, written, **splits, cases=cases)
        begun = ("O of all splits begun", "mh, i_first, i_last,", "mh, uint32(0), i_last,")
        add(name, begun, **splits, cases="window")
    begun = ("dQ of all splits begun", "i_begin, i_last, options)", "uint32(0), i_last, options)")
    add("mma_fa1_backward", begun, **splits, cases="window")
    more = "i_first + split_rows"
    overlap = ("a row of the next split", more, f"{more} + 1")
    add("visits.make_split", overlap, **splits, to=("fa1",), cases="causal")
    add("visits.make_split", overlap, **splits, to=("mma_fa1",), cases="16 rows")


MUTANTS = mutants()


# --- the tests -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "algorithm, cases",
    [
        *((a, c) for a in ALGORITHMS for c in CASES),
        *((a, c) for a in BACKWARD for c in BACKWARD_CASES),
        *((a, c) for a in MMA for c in MMA_CASES),
        *(("mma_fa1", c) for c in MMA_KEYS),
        *(("mma_fa2", c) for c in MMA_STAGES),
        *(("fa2", c) for c in SIMT_PAGES),
        *(("mma_standard", c) for c in MMA_STANDARD_CASES),
        *(("mma_standard_backward", c) for c in MMA_STANDARD_BACKWARD_CASES),
        *((a, c) for a in MMA_BACKWARD for c in MMA_BACKWARD_CASES),
    ],
)
def test_the_source_as_it_is_passes(algorithm, cases, monkeypatch):
    """Built anew as a mutant is, once; the other cases run the package's own modules."""
    modules = as_they_are() if cases == "plain" else PARTS | KERNELS
    assert caught_by(algorithm, (cases,), modules, monkeypatch) is None


def test_every_mutant_is_another_text():
    for mutant in MUTANTS:
        assert mutated(mutant) != source(mutant.place.partition(".")[0])


@pytest.mark.parametrize("mutant", one_of_twelve(MUTANTS, lambda m: f"{m.place}: {m.title}"))
def test_a_mutant_is_caught(mutant, monkeypatch, record_property):
    modules = modules_with(**{mutant.place.partition(".")[0]: mutated(mutant)})
    for algorithm in mutant.algorithms:
        with monkeypatch.context() as patch:
            caught = caught_by(algorithm, mutant.cases, modules, patch)
        record_property(algorithm, caught)
        assert caught in mutant.by, f"{algorithm}: caught by {caught}, not by {set(mutant.by)}"


def test_every_part_is_built_anew():
    """Else a kernel with a fault in one part would have another part as it is.

    The faults of Hopper's unit are in test_wgmma_emulated.
    """
    modules = pkgutil.walk_packages(parts.__path__, "fa_numba.parts.")
    found = {m.name for m in modules if not m.name.startswith("fa_numba.parts.wgmma")}
    assert found == {m.__name__ for m in PARTS.values()} - {"fa_numba.masks"}


def test_every_barrier_wait_and_commit_has_its_mutant():
    for name in KERNELS:
        for call in ("cuda.syncthreads()", "wait_async()", "commit_async()"):
            calls = len(re.findall(rf"(?m)^ +{re.escape(call)}", source(name)))
            mutated = [m for m in MUTANTS if m.place == name and m.needle.strip() == call]
            assert len(mutated) == calls > 0


def test_every_barrier_of_a_part_has_its_mutant():
    """A part waits for copies only where it is not to prefetch, and the kernel waits anyway."""
    for name in PARTS:
        calls = len(re.findall(r"(?m)^ +cuda\.syncthreads\(\)", source(name)))
        mutated = [m for m in MUTANTS if m.place.partition(".")[0] == name]
        assert calls == len([m for m in mutated if m.needle == "cuda.syncthreads()"])
