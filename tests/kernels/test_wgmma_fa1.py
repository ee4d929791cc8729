"""FlashAttention-1 on Hopper's tensor cores as the emulator runs it: results and counts."""

from unittest import mock

import numpy as np
import pytest
from helpers import check
from mma_helpers import DTYPES_AND_LAYOUTS, half_inputs

import fa_numba
from fa_numba import Tiles, emulator
from fa_numba.choices.tiles import hopper_fa1_tiles
from fa_numba.host import planning
from fa_numba.problem import Problem
from fa_numba.tiling import select_wgmma_fa1_spec

UNIT = {"unit": "wgmma"}
CASES = [
    # B, Hq, Hk, Nq, Nk, d, tiles, options
    (1, 1, 1, 1, 1, 64, Tiles(64, 64), {}),
    (1, 2, 1, 77, 131, 64, Tiles(128, 64), {"causal": True}),
    (1, 1, 1, 193, 129, 64, Tiles(192, 128), {}),
    (1, 1, 1, 127, 63, 128, Tiles(64, 64), {"causal": True}),
    (1, 1, 1, 200, 90, 64, Tiles(128, 32), {"window": (40, 8)}),
    (1, 1, 1, 65, 47, 40, Tiles(64, 16), {"softcap": 2.0}),
    (1, 1, 1, 65, 100, 256, Tiles(64, 80), {}),
    (2, 1, 1, 129, 97, 80, Tiles(64, 64), {"query_splits": 2}),
    (2, 1, 1, 130, 40, 64, Tiles(64, 16), {"q_lens": (70, 0)}),
    (2, 1, 1, 128, 192, 64, Tiles(64, 64), {"q_lens": (128, 64), "query_splits": 2}),
    (1, 2, 1, 140, 77, 64, Tiles(128, 32), {"causal": True, "sinks": np.float32([3.0, -np.inf])}),
    (2, 1, 1, 130, 40, 64, Tiles(64, 16), {"q_lens": (70, 0), "sinks": np.float32([1.0])}),
]


@pytest.mark.parametrize("B, Hq, Hk, Nq, Nk, d, tiles, options", CASES)
def test_results_and_counts(B, Hq, Hk, Nq, Nk, d, tiles, options):
    q, k, v = half_inputs("float16", B, Hq, Hk, Nq, Nk, d)
    check("emulator", "fa1", q, k, v, tiles=tiles, **UNIT, **options)


@pytest.mark.parametrize("dtype, layout", DTYPES_AND_LAYOUTS)
def test_dtypes_and_strides(dtype, layout):
    q, k, v = half_inputs(dtype, 1, 2, 2, 70, 90, 64)
    tiles = Tiles(64, 32)
    check("emulator", "fa1", q, k, v, tiles=tiles, causal=True, layout=layout, **UNIT)


def _attend(rows=64, Nk=40, **options):
    """O and L, and the counts, of three row tiles and three column tiles."""
    q, k, v = half_inputs("float16", 1, 1, 1, 2 * rows + 22, Nk, 64)
    uncached = getattr(planning.planned, "__wrapped__", planning.planned)
    with (
        mock.patch.object(planning, "planned", uncached),
        fa_numba.count_accesses() as counts,
    ):
        how = {"tiles": Tiles(rows, 16), **UNIT, **options}
        found = fa_numba.flash_attention_1(q, k, v, return_lse=True, **how)
    return found, counts


def test_results_and_counts_do_not_depend_on_the_order():
    (O, L), counts = _attend(query_splits=2, causal=True)
    for seed in range(2):
        with emulator.schedule(seed):
            (P, M), others = _attend(query_splits=2, causal=True)
        assert (O == P).all() and (L == M).all()
        assert (others.loads, others.stores) == (counts.loads, counts.stores)
        assert others.instructions == counts.instructions


def test_o_passes_through_memory_in_every_pass():
    """O goes and comes by boxes of 32 columns, 64 rows a consumer; Q once a visit, K and V once."""
    with emulator.trace() as accesses:
        _, counts = _attend(128)
    passes, row_tiles, parts = 3, 3, 2
    visits = passes * row_tiles * parts
    boxes = visits + 2 * passes + 2 * (visits - row_tiles * parts) * 2 + row_tiles * parts
    assert counts.instructions["tma"] == boxes
    assert counts.instructions["wgmma"] == visits * (64 // 16 + 16 // 16)
    moved = {name: sum(a.elements for a in accesses if a.array == name) for name in "QKVOA"}
    assert moved == {n: counts.loads[n] + counts.stores[n] for n in "QKVOA"}
    assert moved["A"] == 2 * (passes - 1) * 278 * 64 and moved["O"] == 278 * 64
    lines = {a.line for a in accesses if a.array in "KV"}
    assert lines == {"FA-1 line 6, FA-2 line 7: load Kj, Vj"}


def test_tiles():
    for d, d_v in ((40, 40), (64, 64), (96, 64), (128, 128), (192, 128), (192, 192), (256, 128)):
        for features in (fa_numba.options.PLAIN, fa_numba.options.Features(window=True)):
            problem = Problem(1, 1, 1, 8, 8, d, head_dim_v=d_v)
            tiles, own = hopper_fa1_tiles(problem, features).value, {"head_dim_v": d_v % d}
            spec = select_wgmma_fa1_spec(tiles, d, 227 << 10, features=features, **own)
            assert spec.Br % 64 == 0 and spec.threads == 128 * (1 + spec.consumers)
            launched = 65536 // spec.threads // 8 * 8
            few, many = spec.registers
            assert few + spec.consumers * many <= (1 + spec.consumers) * launched
    places = [select_wgmma_fa1_spec(Tiles(128, Bc), 128, 227 << 10) for Bc in (128, 256)]
    assert [(s.stages, s.q_stages) for s in places] == [(2, 1), (1, 1)]
    for tiles, d, message in (
        (Tiles(96, 64), 64, "allowed are 64, 128, 192 rows and a multiple of 16 columns up to 256"),
        (Tiles(64, 24), 64, "a multiple of 16"),
        (Tiles(64, 64, threads=384), 64, "threads=384 does not fit Br=64"),
        (Tiles(192, 144), 64, "no registers; take smaller blocks"),
        (Tiles(128, 64), 256, "needs 262256 bytes of shared memory, the device has 232448"),
    ):
        with pytest.raises(ValueError, match=message):
            select_wgmma_fa1_spec(tiles, d, 227 << 10)
