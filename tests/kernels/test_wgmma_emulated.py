"""The kernels on Hopper's tensor cores as the emulator runs them: results and counts."""

from contextlib import contextmanager
from functools import cache
from unittest import mock

import helpers
import numpy as np
import pytest
from helpers import attend, check
from mma_helpers import DTYPES_AND_LAYOUTS, half_inputs
from options_helpers import cumulative

import fa_numba
from fa_numba import Tiles, emulator
from fa_numba.choices.tiles import hopper_fa1_tiles
from fa_numba.host import planning
from fa_numba.host.arrays import operand
from fa_numba.parts.wgmma import scheduler
from fa_numba.problem import Problem
from fa_numba.tiling import select_wgmma_fa1_spec

UNIT, TWO_STAGES = {"unit": "wgmma"}, Tiles(128, 32, stages=2)
SLOPES = np.float32([[0.5, 0.1, 0.02, 1.0], [0.0, 0.3, 0.25, 0.7]])
SINKS = np.float32([0.5, 4.0, -np.inf, -1.0])
CASES = [
    # B, Hq, Hk, Nq, Nk, d, tiles, options
    (1, 1, 1, 1, 1, 64, Tiles(128, 64, stages=2), {}),
    (1, 1, 1, 77, 200, 64, Tiles(128, 64, stages=2), {"causal": True}),
    (1, 1, 1, 200, 77, 128, Tiles(128, 64, stages=2), {"causal": True}),
    (1, 2, 1, 200, 130, 64, Tiles(192, 128, stages=2), {}),
    (2, 1, 1, 130, 300, 128, Tiles(128, 128, stages=2), {"causal": True}),
    (1, 1, 1, 300, 300, 64, Tiles(128, 16, stages=2), {"window": (40, 8)}),
    (1, 1, 1, 129, 97, 40, Tiles(128, 32, stages=1), {"softcap": 2.0}),
    (1, 1, 1, 65, 100, 256, Tiles(128, 80, stages=2), {}),
    (2, 4, 2, 40, 90, 64, Tiles(128, 64, stages=2), {"alibi_slopes": SLOPES, "causal": True}),
    (1, 4, 2, 140, 140, 64, Tiles(64, 64, stages=3), {"causal": True}),
    (2, 2, 2, 140, 77, 64, Tiles(128, 64, stages=2), {"sinks": SINKS[:2], "causal": True}),
    (
        *(2, 2, 1, 80, 77, 72, Tiles(128, 32)),
        {"sinks": SINKS[:2], "q_lens": [70, 9], "kv_lens": [0, 77]},
    ),
    (1, 2, 1, 130, 200, 64, Tiles(128, 64), {"sinks": SINKS[1:3], "kv_splits": 3}),
    (2, 3, 3, 70, 60, 64, Tiles(128, 64, stages=4), {}),
    (1, 2, 1, 128, 192, 64, Tiles(64, 64, stages=2), {"causal": True}),  # no ragged edge
]


FA1_CASES = [
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


@pytest.mark.parametrize(
    "algorithm, B, Hq, Hk, Nq, Nk, d, tiles, options",
    [*(("fa2", *case) for case in CASES), *(("fa1", *case) for case in FA1_CASES)],
)
def test_results_and_counts(algorithm, B, Hq, Hk, Nq, Nk, d, tiles, options):
    q, k, v = half_inputs("float16", B, Hq, Hk, Nq, Nk, d)
    check("emulator", algorithm, q, k, v, tiles=tiles, **UNIT, **options)


BIASES = [
    # B, Hq, Hk, Nq, Nk, d, of the bias: its shape and its layout, options
    (1, 1, 1, 70, 100, 64, (70, 100), "padded", {"causal": True}),
    (2, 2, 1, 40, 77, 64, (1, 2, 40, 77), "odd", {}),
    (1, 2, 1, 70, 100, 128, (1, 2, 1, 100), "padded", {"softcap": 2.0}),
    (2, 1, 1, 66, 100, 64, (2, 1, 66, 100), "columns", {"kv_lens": [51, 100]}),
    (1, 2, 1, 1, 130, 64, (1, 2, 1, 1), "padded", {}),  # heads that share no tile
    (1, 2, 1, 70, 200, 64, (1, 2, 70, 200), "transposed", {"window": (60, 9), "kv_splits": 2}),
]


@pytest.mark.parametrize("B, Hq, Hk, Nq, Nk, d, shape, layout, options", BIASES)
def test_biases(B, Hq, Hk, Nq, Nk, d, shape, layout, options, monkeypatch):
    """Read in pairs where they lie so, of whole tiles; else each by itself."""
    q, k, v = half_inputs("float16", B, Hq, Hk, Nq, Nk, d)
    options = {"tiles": Tiles(128, 32, stages=2), **UNIT, **options}
    bias = np.random.default_rng(Nk).standard_normal(shape).astype(np.float32)
    laid = helpers.memories
    monkeypatch.setattr(helpers, "memories", lambda place, _, given: laid(place, layout, given))
    check("emulator", "fa2", q, k, v, bias=bias, **options)


def test_a_bias_is_read_ahead_where_it_lies_in_pairs():
    """By a line of its own, before the scores are there; else where it is added to them."""
    q, k, v = half_inputs("float16", 1, 1, 1, 64, 96, 64)
    places = []
    for more in (2, 1):
        bias = np.zeros((64, 96 + more), np.float32)[:, :96]
        with fa_numba.device.using("emulator"), emulator.trace() as accesses:
            fa_numba.flash_attention_2(q, k, v, bias=bias, tiles=Tiles(64, 32, stages=2), **UNIT)
        read = [a for a in accesses if a.array == "bias"]
        assert sum(a.elements for a in read) == 64 * 96
        places.append({a.place for a in read})
    assert places[0].isdisjoint(places[1])


@pytest.mark.parametrize("algorithm", ["fa1", "fa2"])
@pytest.mark.parametrize("dtype, layout", DTYPES_AND_LAYOUTS)
def test_dtypes_and_strides(algorithm, dtype, layout):
    q, k, v = half_inputs(dtype, 1, 2, 2, 70, 90, 64)
    tiles = Tiles(64, 32) if algorithm == "fa1" else Tiles(128, 32, stages=2)
    check("emulator", algorithm, q, k, v, tiles=tiles, causal=True, layout=layout, **UNIT)


LENGTHS = [
    # q_lens, kv_lens, d, options
    (None, [0, 0], 64, {"causal": True}),  # no block has a column
    (None, [130, 0], 64, {}),
    ([0, 70, 1], None, 64, {"causal": True}),
    ([70, 150], [200, 5], 128, {"window": (30, 5), "softcap": 3.0}),
]


@pytest.mark.parametrize("q_lens, kv_lens, d, options", LENGTHS)
def test_lengths(q_lens, kv_lens, d, options):
    """Padding is NaN: neither read nor seen."""
    B, given = len(q_lens or kv_lens), {"q_lens": q_lens, "kv_lens": kv_lens, **options}
    q, k, v = half_inputs("float16", B, 2, 1, 150, 200, d)
    for arrays, lens in (((q,), q_lens), ((k, v), kv_lens)):
        for b, n in enumerate(lens or ()):
            for array in arrays:
                array[b, :, n:] = np.nan
    given = {name: value for name, value in given.items() if value is not None}
    check("emulator", "fa2", q, k, v, tiles=Tiles(128, 64, stages=2), **UNIT, **given)


def _packed(q_lens, kv_lens, Hq, Hk, d, dtype="float16", seed=0):
    """q, k and v of sequences one after the other, and where they begin."""
    q, _, _ = half_inputs(dtype, 1, Hq, 1, sum(q_lens), 1, d, seed=seed)
    _, k, v = half_inputs(dtype, 1, 1, Hk, 1, sum(kv_lens), d, seed=seed)
    arrays = (np.ascontiguousarray(a[0].swapaxes(0, 1)) for a in (q, k, v))
    return *arrays, cumulative(q_lens, kv_lens)


SEQUENCES = [
    # q_lens, kv_lens, Hq, Hk, d, options
    ([130, 0, 5, 128], [70, 64, 0, 200], 2, 1, 64, {"causal": True}),
    ([1, 1, 1, 125], [3, 0, 150, 1], 1, 1, 128, {"window": (40, 8)}),
    ([150], [33], 2, 2, 40, {"softcap": 2.0}),
    ([70, 0, 5], [90, 64, 40], 4, 2, 64, {"causal": True, "dropout_p": 0.3, "seed": 9}),
]


BLOCKS = [
    # algorithm, Hq, Hk, Nq, Nk, d, tiles, blocks left in, options
    ("fa2", 1, 1, 130, 700, 64, Tiles(64, 32), lambda h, i, j: (i + j) % 7 == 0 and j < 9, {}),
    # The loader of K ends the wait of the loader of Q before the last column tile.
    ("fa2", 1, 1, 200, 640, 8, Tiles(64, 64), lambda h, i, j: (i, j) != (1, 3), {}),
    ("fa2", 2, 1, 200, 260, 128, Tiles(128, 64), lambda h, i, j: (h + i) % 2 == 0, {}),
    ("fa2", 4, 1, 20, 300, 64, Tiles(64, 64), lambda h, i, j: (j + h) % 3 == 1, {"kv_splits": 2}),
    ("fa2", 1, 1, 200, 260, 64, Tiles(128, 64), lambda h, i, j: False, {"causal": True}),
    (
        *("fa1", 2, 1, 200, 260, 64, Tiles(64, 64)),
        *(lambda h, i, j: (i + 2 * j) % 3 == h, {"causal": True}),
    ),
    ("fa1", 1, 1, 300, 200, 64, Tiles(128, 64), lambda h, i, j: i == 1 and j > 1, {}),
    # Whole tiles, the first of which is left out: a visit behind the last one reads no block
    ("fa1", 1, 1, 64, 128, 64, Tiles(64, 64), lambda h, i, j: j == 1, {}),
]


@pytest.mark.parametrize("algorithm, Hq, Hk, Nq, Nk, d, tiles, left, options", BLOCKS)
def test_blocks_left_out(algorithm, Hq, Hk, Nq, Nk, d, tiles, left, options):
    q, k, v = half_inputs("float16", 1, Hq, Hk, Nq, Nk, d)
    shape = Hq, -(-Nq // tiles.Br), -(-Nk // tiles.Bc)
    mask = np.array([left(*place) for place in np.ndindex(shape)]).reshape(shape)
    how = {"tiles": tiles, "block_mask": mask, **options}
    check("emulator", algorithm, q, k, v, **UNIT, **how)


@pytest.mark.parametrize("q_lens, kv_lens, Hq, Hk, d, options", SEQUENCES)
def test_packed_sequences(q_lens, kv_lens, Hq, Hk, d, options):
    q, k, v, starts = _packed(q_lens, kv_lens, Hq, Hk, d)
    options = {"tiles": Tiles(128, 32, stages=2), **UNIT, **options}
    check("emulator", "fa2", q, k, v, **starts, **options)


def test_packed_sequences_are_those_alone_whatever_lies_beside_them():
    """NaN and infinities in the other sequences reach none of this one's O."""
    q_lens, kv_lens = [40, 90, 130], [90, 75, 50]
    q, k, v, starts = _packed(q_lens, kv_lens, 1, 1, 64)
    options = {"tiles": Tiles(128, 64, stages=2), "return_lse": True, **UNIT}
    row, column = (starts[f"cu_seqlens_{x}"] for x in "qk")
    for n in range(len(q_lens)):
        rows, columns = slice(row[n], row[n + 1]), slice(column[n], column[n + 1])
        others = [np.full_like(a, x) for a, x in ((q, np.nan), (k, np.nan), (v, np.inf))]
        parts = [q[rows], k[columns], v[columns]]
        for array, part, place in zip(others, parts, (rows, columns, columns), strict=True):
            array[place] = part
        with fa_numba.device.using("emulator"):
            O, L = fa_numba.flash_attention_2(*others, **starts, **options)
            alone = [a.swapaxes(0, 1)[None] for a in parts]
            P, M = fa_numba.flash_attention_2(*alone, **options)
        assert np.array_equal(O[rows].swapaxes(0, 1), P[0]) and np.array_equal(L[:, rows], M[0])


SHARED_HEADS = [
    # B, Hq, Hk, Nq, Nk, d, layout, options
    (1, 4, 1, 1, 100, 64, "padded", {}),
    (2, 8, 2, 20, 100, 64, "transposed", {"causal": True}),
    (1, 16, 2, 33, 70, 128, "strided", {"window": (20, 3), "softcap": 3.0}),
    (2, 4, 2, 5, 90, 64, "padded", {"kv_lens": [30, 0], "causal": True}),
    (2, 4, 1, 17, 90, 64, "padded", {"kv_lens": [30, 0], "sinks": SINKS}),
]


@pytest.mark.parametrize("B, Hq, Hk, Nq, Nk, d, layout, options", SHARED_HEADS)
def test_heads_that_share_a_tile(B, Hq, Hk, Nq, Nk, d, layout, options):
    """Each K/V head is loaded for all of its query heads at once."""
    q, k, v = half_inputs("float16", B, Hq, Hk, Nq, Nk, d)
    options = {"tiles": Tiles(128, 64, stages=2), "layout": layout, **UNIT, **options}
    check("emulator", "fa2", q, k, v, out_layout=layout, **options)


def test_heads_of_packed_sequences_that_share_a_tile():
    q, k, v, starts = _packed([13, 0, 5, 64], [70, 64, 5, 100], 8, 2, 64)
    options = {"tiles": Tiles(128, 64, stages=2), "causal": True, **UNIT}
    check("emulator", "fa2", q, k, v, **starts, **options)


def test_heads_share_a_tile_where_their_rows_are_few():
    """The accesses say which: of K and V a load for each row tile."""

    def loads(Hq, Hk, Nq, **options):
        shapes = (2, Hq, Nq, 64), (2, Hk, 256, 64)
        plan = fa_numba.plan(*shapes, dtype="float16", **UNIT, **options)
        return plan.accesses.loads["K"] // (2 * Hk * 256 * 64)

    assert loads(8, 2, 1) == loads(8, 2, 32) == 1 and loads(8, 2, 64) == 2
    assert loads(8, 2, 65) == 4 and loads(6, 2, 1) == 3 and loads(2, 2, 1) == 1
    assert loads(8, 2, 1, q_lens=[1, 1]) == 4 and loads(8, 2, 1, kv_lens=[256, 256]) == 1


DROPPED = [
    # B, Hq, Hk, Nq, Nk, d, tiles, options
    (1, 1, 1, 1, 1, 64, Tiles(128, 64, stages=2), {}),
    (1, 2, 1, 77, 130, 136, Tiles(128, 64, stages=2), {"causal": True}),
    (1, 1, 1, 130, 100, 128, Tiles(64, 48, stages=2), {"window": (60, 8), "softcap": 2.0}),
    (1, 4, 1, 20, 64, 64, Tiles(64, 32, stages=2), {}),  # heads that share no tile
    (1, 1, 1, 200, 60, 64, Tiles(192, 16, stages=2), {"kv_splits": 2}),
    (2, 1, 1, 150, 128, 128, Tiles(128, 80, stages=2), {"q_lens": [150, 3], "kv_lens": [99, 128]}),
]


@pytest.mark.parametrize("B, Hq, Hk, Nq, Nk, d, tiles, options", DROPPED)
def test_dropout_keeps_what_its_mask_keeps(B, Hq, Hk, Nq, Nk, d, tiles, options):
    """V is the unit matrix: O is P without what is dropped."""
    q, k, _ = half_inputs("float16", B, Hq, Hk, Nq, Nk, d, q_size=0.3)
    v = np.broadcast_to(np.eye(Nk, d, dtype=np.float16), k.shape).copy()
    words = {"dropout_p": 0.4, "seed": 2**63 + 2**40 + 5, "offset": 2**31 + 11}
    result = check("emulator", "fa2", q, k, v, tiles=tiles, **words, **UNIT, **options)
    whole = attend("emulator", "fa2", q, k, v, tiles=tiles, **UNIT, **options)
    assert np.array_equal(whole.L, result.L)
    mask = fa_numba.dropout_mask(B, Hq, Nq, Nk, **words)
    assert np.array_equal(result.O[..., :Nk] != 0, mask & (whole.O[..., :Nk] != 0))


@contextmanager
def multiprocessors(count):
    """A GPU of so many: a block takes several row tiles."""
    uncached = getattr(planning.planned, "__wrapped__", planning.planned)
    with (
        mock.patch.object(planning, "planned", uncached),
        mock.patch.object(fa_numba.device, "EMULATED_MULTIPROCESSORS", count),
    ):
        shape = 1, 4 * count, 64, 64
        plan = fa_numba.plan(shape, shape, dtype="float16", tiles=Tiles(64, 64), **UNIT)
        assert plan.kernels[0].grid[0] <= 2 * count, "each row tile has a block of its own"
        yield


def _attend(algorithm="fa2", Nq=300, Nk=200, blocks=1, tiles=TWO_STAGES, **options):
    """O and L, of some row tiles that so many blocks compute, and the counts."""
    q, k, v = half_inputs("float16", 1, 1, 1, Nq, Nk, 64)
    how = {"algorithm": algorithm, "tiles": tiles, "return_lse": True, **UNIT, **options}
    with multiprocessors(blocks), fa_numba.count_accesses() as counts:
        found = fa_numba.attention(q, k, v, **how)
    return found, counts


CAUSAL = {"causal": True, **UNIT}
ALL = ("turns", "overlap", "persistent", "counter", "ahead", "late")
ALONE = ("persistent", "counter", "specialisation")


@pytest.mark.parametrize(
    "rows, stages, ablate",
    [
        *((64, 1, ALL), (64, 2, ()), (128, 2, ALL[1:]), (128, 1, ALL[2:]), (128, 2, ("counter",))),
        (64, 1, ("ahead",)),
        *((64, 1, ALL[1:4] + ALONE), (128, 2, ALONE), (192, 2, ALL[:1] + ALONE)),
    ],
)
def test_measures_left_out_change_no_result_and_no_access(rows, stages, ablate):
    q, k, v = half_inputs("float16", 1, 2, 1, 200, 100, 64)
    tiles = Tiles(rows, 32, stages=stages)
    result = check("emulator", "fa2", q, k, v, tiles=tiles, ablate=ablate, **CAUSAL)
    whole = _whole(rows, stages)
    assert np.array_equal(result.O, whole.O) and np.array_equal(result.L, whole.L)


@cache
def _whole(rows, stages):
    q, k, v = half_inputs("float16", 1, 2, 1, 200, 100, 64)
    return attend("emulator", "fa2", q, k, v, tiles=Tiles(rows, 32, stages=stages), **CAUSAL)


@pytest.mark.parametrize(
    "rows, stages, heads, Nq, options",
    [
        (64, 3, 4, 400, {}),
        (128, 4, 2, 400, {"sinks": SINKS[:2], "q_lens": [390]}),
        (64, 2, 1, 200, {"ablate": ("ahead",)}),
        (64, 2, 1, 200, {"kv_splits": 2}),
        (64, 2, 1, 200, {"ablate": ("counter",)}),
        (64, 2, 1, 200, {"causal": True}),  # two of four see no column
    ],
)
def test_slots_are_taken_again(rows, stages, heads, Nq, options):
    """One multiprocessor's blocks take more row tiles than slots of Q, of three heads first."""
    q, k, v = half_inputs("float16", 1, heads, 1, Nq, 70, 64)
    with multiprocessors(1), mock.patch.object(scheduler, "TOGETHER", 3 * 4 * 64 * 70):
        tiles = Tiles(rows, 64, stages=stages)
        check("emulator", "fa2", q, k, v, tiles=tiles, **UNIT, **options)


def test_row_tiles_of_many_columns_are_asked_for_one_by_one():
    """One block has three of them; the next one is asked for as the last columns are loaded."""
    q, k, v = half_inputs("float16", 1, 1, 1, 300, 320, 64)
    with multiprocessors(1):
        check("emulator", "fa2", q, k, v, tiles=Tiles(128, 16, stages=2), **CAUSAL)


def test_a_row_tile_of_many_columns_may_be_taken_early():
    """Eleven column tiles, of which eight are left when the next row tile is taken late."""
    q, k, v = half_inputs("float16", 1, 2, 1, 140, 170, 64)
    of = {"tiles": Tiles(64, 16, stages=2), **UNIT}
    with multiprocessors(1):  # whose blocks take several each
        early = attend("emulator", "fa2", q, k, v, ablate="late", **of)
        late = attend("emulator", "fa2", q, k, v, **of)
    assert np.array_equal(early.O, late.O) and np.array_equal(early.L, late.L)


def test_measures_are_planned():
    def grid(**options):
        shape = (2, 8, 4000, 64)
        return fa_numba.plan(shape, shape, dtype="float16", **UNIT, **options).kernels[0].grid

    tiles = Tiles(128, 128)
    assert grid(tiles=tiles, ablate=("persistent", "counter")) == (32 * 16, 1, 1)
    assert grid(tiles=tiles, ablate="counter") == (fa_numba.device.multiprocessors(), 1, 1)
    with pytest.raises(ValueError, match="ablate must contain 'counter' if it .*got 'persistent'"):
        grid(ablate="persistent")
    with pytest.raises(
        ValueError, match="ablate must be a tuple of 'turns', 'overlap', 'persistent', 'count"
    ):
        grid(ablate="prefetch")
    assert grid(tiles=tiles, ablate=ALONE) == (32 * 16, 1, 1)
    with pytest.raises(ValueError, match="must contain 'persistent' if it .*'specialisation'"):
        grid(ablate=ALONE[1:])
    with pytest.raises(ValueError, match="must not contain 'specialisation' with block_mask"):
        grid(tiles=tiles, ablate=ALONE, block_mask=(32, 32))


FA1 = {"algorithm": "fa1", "Nk": 40, "tiles": Tiles(64, 16)}  # of three column tiles


@pytest.mark.parametrize(
    "how, seeds",
    [
        ({"Nq": 270, "Nk": 100, "blocks": 2, "causal": True}, 3),
        ({**FA1, "Nq": 150, "query_splits": 2, "causal": True}, 2),
    ],
)
def test_results_and_counts_do_not_depend_on_the_order(how, seeds):
    (O, L), counts = _attend(**how)
    for seed in range(seeds):
        with emulator.schedule(seed):
            (P, M), others = _attend(**how)
        assert (O == P).all() and (L == M).all()
        assert (others.loads, others.stores) == (counts.loads, counts.stores)
        assert others.instructions == counts.instructions


def _traced(arrays, **how):
    """The counts; what is traced is what is counted, and says which lines load K and V."""
    with emulator.trace() as accesses:
        _, counts = _attend(**how)
    moved = {name: sum(a.elements for a in accesses if a.array == name) for name in arrays}
    assert moved == {n: counts.loads[n] + counts.stores[n] for n in arrays}
    lines = {a.line for a in accesses if a.array in "KV"}
    assert lines == {"FA-1 line 6, FA-2 line 7: load Kj, Vj"}
    return counts, moved


def test_the_products_are_those_of_the_tiles_and_what_moves_is_traced():
    """Sums of 16 elements: d / 16 for S and Bc / 16 for O, of two warpgroups in each tile."""
    counts, _ = _traced("QKVO")
    tiles = 3 * 7
    assert counts.instructions["wgmma"] == tiles * 2 * (64 // 16 + 32 // 16)
    boxes = 3 * 2 + 2 * tiles + 3 * 2  # Q, K and V, O
    assert counts.instructions["tma"] == boxes


def test_o_of_fa1_passes_through_memory_in_every_pass():
    """O goes and comes by boxes of 32 columns, 64 rows a consumer; Q once a visit, K and V once."""
    counts, moved = _traced("QKVOA", **FA1 | {"Nq": 278, "tiles": Tiles(128, 16)})
    passes, row_tiles, parts = 3, 3, 2
    visits = passes * row_tiles * parts
    boxes = visits + 2 * passes + 2 * (visits - row_tiles * parts) * 2 + row_tiles * parts
    assert counts.instructions["tma"] == boxes
    assert counts.instructions["wgmma"] == visits * (64 // 16 + 16 // 16)
    assert moved["A"] == 2 * (passes - 1) * 278 * 64 and moved["O"] == 278 * 64


def test_tiles_of_fa1():
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
        (
            Tiles(96, 64),
            64,
            "tiles.Br must be 64, 128 or 192, and tiles.Bc a multiple of 16 .*got Br=96, Bc=64",
        ),
        (Tiles(64, 24), 64, "a multiple of 16"),
        (
            Tiles(64, 64, threads=384),
            64,
            r"tiles\.threads must be 256, or None, for Br=64, .*got 384",
        ),
        (
            Tiles(192, 144),
            64,
            "tiles must leave each thread enough registers .*got Br=192, Bc=144 .*choose smaller",
        ),
        (Tiles(128, 64), 256, "tiles must fit in 232448 bytes of shared memory .*got 262256 bytes"),
    ):
        with pytest.raises(ValueError, match=message):
            select_wgmma_fa1_spec(tiles, d, 227 << 10)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_arrays_that_go_backwards_are_another_units(axis):
    """Of which there are no tensor maps, so that "auto" would end at the driver."""
    q, k, v = half_inputs("float16", 2, 2, 2, 20, 30, 64)
    whole, back = fa_numba.attention(q, k, v), np.flip(np.flip(k, axis).copy(), axis)
    assert back.strides[axis] < 0 and operand("k", k).aligned and not operand("k", back).aligned
    with pytest.raises(
        ValueError, match="'wgmma' does not support arrays with negative strides, or with rows"
    ):
        fa_numba.attention(q, back, v, **UNIT)
    assert np.array_equal(fa_numba.attention(q, back, v), whole)
