"""The table of backward variants on Hopper's tensor cores: rows, their order and their reasons."""

import csv
import itertools
import re
from pathlib import Path

import numpy as np
import pytest

import fa_numba
from fa_numba import Tiles, bounds
from fa_numba.options import PLAIN
from fa_numba.tiling import FA1_VARIANTS, FA2_VARIANTS, default_wgmma_backward_tiles
from fa_numba.tiling.wgmma_variants import _ANY, BackwardCall, variant_of, variants_of

DATA = Path(__file__).parent.parent / "data"
ROWS = {v.name: v for v in (*FA2_VARIANTS, *FA1_VARIANTS)}
APART, PLANES = {"deterministic": True}, {"dtype": "float32", "precision": "fp16x3"}
CAP = {"softcap": 5.0}
SLOPES = {"score_mod": lambda s, b, h, i, j: s * abs(s)}
BLOCKS = {"block_mask": np.ones((4, 4), bool), "tiles": Tiles(128, 128)}
# (row, head dimension, head dimension of V, query heads, options) with four heads of K and V
CALLS = [
    ("planes", 64, None, 4, PLANES),
    ("planes-by-product", 72, None, 4, PLANES),
    ("masks-64", 64, None, 4, {"causal": True}),
    ("masks-64", 8, None, 4, {**BLOCKS}),
    ("columns-64-cap", 64, None, 4, CAP),
    ("columns-64-cap", 56, None, 4, {"alibi_slopes": (4,), "causal": True}),
    ("columns-64", 48, None, 4, {"alibi_slopes": (4,), "causal": True}),
    ("columns-64", 64, None, 8, {}),
    ("columns-64", 64, 32, 4, {}),
    ("columns-64", 64, None, 4, {"group_splits": 2}),
    ("masks-128", 72, None, 4, {}),
    ("columns-128-slopes", 128, None, 4, {**SLOPES, "causal": True}),
    ("columns-128", 128, None, 4, {"group_splits": 2}),
    ("columns-128", 64, 128, 4, {}),
    ("columns-128", 128, None, 4, CAP),
    ("dq-apart-64-cap", 64, None, 4, {**APART, **CAP}),
    ("dq-apart-64", 64, None, 4, APART),
    ("dq-apart-128-slopes", 80, None, 4, {**APART, **SLOPES, "causal": True}),
    ("dq-apart-128", 128, None, 4, APART),
    ("by-product", 136, None, 4, {}),
    ("by-product", 64, 256, 4, {}),
    ("fa1-64-masks", 64, None, 4, {"algorithm": "fa1", "causal": True}),
    ("fa1-64", 64, None, 4, {"algorithm": "fa1"}),
    ("fa1-128-slopes", 128, None, 4, {"algorithm": "fa1", **SLOPES}),
    ("fa1-128", 128, None, 4, {"algorithm": "fa1", "causal": True}),
]


def planned(d, d_v, heads, options):
    how = {"dtype": "float16", "passes": "bwd", "unit": "wgmma", **options}
    q, k = (1, heads, 512, d), (1, 4, 512, d)
    with bounds.DEVICES["H200"].planning():
        return fa_numba.plan(q, k, (*k[:3], d_v or d), **how)


@pytest.mark.parametrize("name, d, d_v, heads, options", CALLS)
def test_a_call_takes_the_first_row_that_fits(name, d, d_v, heads, options):
    plan = planned(d, d_v, heads, {"group_splits": 1, **options} if "algorithm" not in options
                   and "precision" not in options else options)  # fmt: skip
    spec = plan.decided.spec
    assert spec.variant is ROWS[name] and plan.why["variant"] == str(ROWS[name])
    assert (plan.tiles.Br, plan.tiles.Bc) == (spec.variant.tiles.Br, spec.variant.tiles.Bc)
    # A row without a condition takes what all rows before it leave.
    table = variants_of(plan.algorithm)
    adds_dq = plan.algorithm == "fa1" or spec.variant.adds_dq
    call = BackwardCall(
        *(spec.head_dim, spec.head_dim_v, spec.features, plan.algorithm, spec.grouped),
        *(spec.splits_group, adds_dq),
    )
    fits = [v for v in table if v.fits(call)]
    assert fits[0] is variant_of(call) is spec.variant
    assert spec.variant.takes is _ANY or any(v.takes is _ANY for v in fits[1:])


def test_every_row_is_reached():
    assert [*dict.fromkeys(name for name, *_ in CALLS)] == list(ROWS)
    assert len(ROWS) == len(FA2_VARIANTS) + len(FA1_VARIANTS)


def test_every_row_has_its_reason():
    trials = set()
    for path in DATA.glob("*_trials.csv"):
        with path.open(newline="") as file:
            trials |= {row["trial"] for row in csv.DictReader(file)}
    for variant in ROWS.values():
        named = re.findall(r"\(trial '(.*?)'\)", variant.why)
        assert set(named) <= trials, variant
        measured = named and re.search(r"\d\.\d\d times as fast as", variant.why)
        assert measured or "(compiled, not timed)" in variant.why or "dQ of" in variant.why, variant


def test_tiles_are_known_before_options_and_splits():
    """Rows that a head dimension can reach have equal tiles."""
    sizes = itertools.product(range(8, 257, 8), (False, True), (False, True), ("fa1", "fa2"))
    for d, planes, adds_dq, algorithm in sizes:
        covering = [v for v in variants_of(algorithm) if v.covers(d, planes, adds_dq)]
        if covering:
            last = next(n for n, v in enumerate(covering) if v.takes is _ANY)
            tiles = default_wgmma_backward_tiles(d, adds_dq, 1 + planes, algorithm)
            assert {v.tiles for v in covering[: last + 1]} == {tiles}


def test_a_head_dimension_without_a_row_is_refused():
    with pytest.raises(ValueError, match="^head_dim must be at most 128 in .* 'fa1' .* got 136$"):
        variant_of(BackwardCall(136, algorithm="fa1", features=PLAIN))
    with pytest.raises(ValueError, match="^head_dim must be at most 128 .* adds_dq=True .* 192$"):
        default_wgmma_backward_tiles(192)
