"""The kernels on Hopper's tensor cores as the emulator runs them: results, counts, and that faults
planted in their source are found.
"""

import inspect
import itertools
import linecache
import sys
import types
from functools import cache
from importlib import import_module
from unittest import mock

import mma_helpers
import numpy as np
import pytest
from helpers import _filled, one_of_twelve, planted
from mma_helpers import BFLOAT16, attend, check, half_inputs
from options_helpers import cumulative
from test_pages import cache_of

import fa_numba
from fa_numba import Tiles, emulator
from fa_numba.host import planning
from fa_numba.kernels import wgmma

UNIT = {"unit": "wgmma"}
SLOPES = np.float32([[0.5, 0.1, 0.02, 1.0], [0.0, 0.3, 0.25, 0.7]])
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
    (2, 3, 3, 70, 60, 64, Tiles(128, 64, stages=4), {}),
]


@pytest.mark.parametrize("B, Hq, Hk, Nq, Nk, d, tiles, options", CASES)
def test_results_and_counts(B, Hq, Hk, Nq, Nk, d, tiles, options):
    q, k, v = half_inputs("float16", B, Hq, Hk, Nq, Nk, d)
    check("emulator", "fa2", q, k, v, tiles=tiles, **UNIT, **options)


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
    laid = mma_helpers.memories
    monkeypatch.setattr(mma_helpers, "memories", lambda place, _, given: laid(place, layout, given))
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


@pytest.mark.parametrize("dtype, layout", [(BFLOAT16, "padded"), ("float16", "transposed")])
def test_dtypes_and_strides(dtype, layout):
    q, k, v = half_inputs(dtype, 1, 2, 2, 70, 90, 64)
    tiles = Tiles(128, 32, stages=2)
    check("emulator", "fa2", q, k, v, tiles=tiles, causal=True, layout=layout, **UNIT)


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
]


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


def _attend(Nq=300, Nk=200, causal=True, blocks=1, rows=128, columns=32):
    """O and L, of some row tiles that so many blocks compute, and the counts."""
    q, k, v = half_inputs("float16", 1, 1, 1, Nq, Nk, 64)
    tiles = Tiles(rows, columns, stages=2)
    uncached = getattr(planning.planned, "__wrapped__", planning.planned)
    with (
        mock.patch.object(planning, "planned", uncached),
        mock.patch.object(fa_numba.device, "multiprocessors", lambda: blocks),
        fa_numba.count_accesses() as counts,
    ):
        found = fa_numba.flash_attention_2(
            q, k, v, causal=causal, tiles=tiles, return_lse=True, **UNIT
        )
    return found, counts


CAUSAL = {"causal": True, **UNIT}
ALL = ("turns", "overlap", "persistent", "counter", "ahead", "late")


@pytest.mark.parametrize(
    "rows, stages, ablate",
    [
        *((64, 1, ALL), (64, 2, ()), (128, 2, ALL[1:]), (128, 1, ALL[2:]), (192, 2, ("counter",))),
        (64, 1, ("ahead",)),
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


@pytest.mark.parametrize("rows, stages, heads, Nq", [(64, 3, 4, 400), (128, 4, 2, 400)])
def test_places_are_taken_again(rows, stages, heads, Nq):
    """Blocks that one multiprocessor has take more row tiles than there are places of Q."""
    q, k, v = half_inputs("float16", 1, heads, 1, Nq, 70, 64)
    uncached = getattr(planning.planned, "__wrapped__", planning.planned)
    with (
        mock.patch.object(planning, "planned", uncached),
        mock.patch.object(fa_numba.device, "multiprocessors", lambda: 1),
    ):
        check("emulator", "fa2", q, k, v, tiles=Tiles(rows, 64, stages=stages), **UNIT)


def test_a_row_tile_of_many_columns_may_be_taken_early():
    """Eleven column tiles, of which eight are left when the next row tile is taken late."""
    q, k, v = half_inputs("float16", 1, 2, 1, 140, 170, 64)
    of = {"tiles": Tiles(64, 16, stages=2), **UNIT}
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
    with pytest.raises(ValueError, match="allowed together with 'counter'"):
        grid(ablate="persistent")
    with pytest.raises(ValueError, match="allowed is a tuple of turns, overlap, persistent, count"):
        grid(ablate="prefetch")


def test_results_and_counts_do_not_depend_on_the_order():
    sizes = {"Nq": 270, "Nk": 100, "blocks": 2}
    (O, L), counts = _attend(**sizes)
    for seed in range(3):
        with emulator.schedule(seed):
            (P, M), others = _attend(**sizes)
        assert (O == P).all() and (L == M).all()
        assert (others.loads, others.stores) == (counts.loads, counts.stores)
        assert others.instructions == counts.instructions


def test_what_moves_is_traced():
    with emulator.trace() as accesses:
        _, counts = _attend()
    moved = {name: sum(a.elements for a in accesses if a.array == name) for name in "QKVO"}
    assert moved == {n: counts.loads[n] + counts.stores[n] for n in "QKVO"}
    assert {a.line for a in accesses if a.array in "KV"} == {"Alg. 1 line 7: load Kj, Vj"}


def test_the_products_are_those_of_the_tiles():
    """Sums of 16 elements: d / 16 for S and Bc / 16 for O, of two warpgroups in each tile."""
    _, counts = _attend(causal=False)
    tiles = 3 * 7
    assert counts.instructions["wgmma"] == tiles * 2 * (64 // 16 + 32 // 16)
    boxes = 3 * 2 + 2 * tiles + 3 * 2  # Q, K and V, O
    assert counts.instructions["tma"] == boxes


# --- planted faults --------------------------------------------------------------------------

# A module after those that it imports; the kernel takes all of them.
PARTS = ("products", "schedule", "tile_load", "stages", "turns", "stores")
_numbers = itertools.count()


def _module(path):
    return import_module(f"fa_numba.{path}")


def _path(name):
    return f"parts.wgmma.{name}" if name in PARTS else "kernels.wgmma.fa2_forward"


def _built(name, text):
    """A module of this text, in this package so that the emulator takes it for its own."""
    fresh = types.ModuleType(f"fa_numba.mutant_{name}_{next(_numbers)}")
    file = f"<{fresh.__name__}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    exec(compile(text, file, "exec"), fresh.__dict__)
    return fresh


def _kernel(changed, text):
    """The kernel's module, with one module, or itself, made of another text."""
    package = _module("parts.wgmma")
    fresh = {}
    with mock.patch.dict(sys.modules):
        for name in PARTS:
            path = f"fa_numba.parts.wgmma.{name}"
            fresh[name] = sys.modules[path]
            if name == changed or (fresh and changed in fresh and name == "stores"):
                source = text if name == changed else inspect.getsource(fresh[name])
                fresh[name] = sys.modules[path] = _built(name, source)
    modules = tuple(fresh.get(m.__name__.rpartition(".")[2], m) for m in package._MODULES)
    kernel = _built("kernel", text if changed == "kernel" else inspect.getsource(wgmma.fa2_forward))
    kernel.parts = lambda spec: package.Parts(spec, modules)
    return kernel


def _attend_packed(rows):
    """O and L of sequences of several lengths."""
    q, k, v, starts = _packed([40, 0, 150, 20], [70, 30, 33, 0], 2, 1, 64)
    options = {"causal": True, "tiles": Tiles(rows, 32, stages=2), "return_lse": True}
    uncached = getattr(planning.planned, "__wrapped__", planning.planned)
    with (
        mock.patch.object(planning, "planned", uncached),
        mock.patch.object(fa_numba.device, "multiprocessors", lambda: 1),
        fa_numba.device.using("emulator"),
        mock.patch.object(np, "empty", _filled),
    ):
        return fa_numba.flash_attention_2(q, k, v, **starts, **options, **UNIT)


def _attend_shared(rows, packed):
    """O and L of heads that share tiles, of a batch entry or of packed sequences."""
    q, k, v = half_inputs("float16", 1, 8, 2, 40, 60, 64)
    options = {"causal": True, "tiles": Tiles(rows, 32, stages=2), "return_lse": True}
    if packed:
        q, k, v = (np.ascontiguousarray(a[0].swapaxes(0, 1)) for a in (q, k, v))
        options |= cumulative([3, 37], [45, 15])
    uncached = getattr(planning.planned, "__wrapped__", planning.planned)
    with (
        mock.patch.object(planning, "planned", uncached),
        fa_numba.device.using("emulator"),
        mock.patch.object(np, "empty", _filled),
    ):
        return fa_numba.flash_attention_2(q, k, v, **options, **UNIT)


def _attend_pages(rows):
    """O and L over pages, of which the last one of a sequence has NaN after its rows."""
    sizes, lens = (2, 2, 2, 70, 90, 128), (83, 40)
    q, k, v = half_inputs("float16", *sizes)
    k_pages, v_pages, table = cache_of(k, v, lens, 48)
    table[table < 0] = np.setdiff1d(np.arange(len(k_pages)), table)[0]  # a page of NaN alone
    options = {"block_table": table, "kv_lens": lens, "return_lse": True}
    uncached = getattr(planning.planned, "__wrapped__", planning.planned)
    with (
        mock.patch.object(planning, "planned", uncached),
        fa_numba.device.using("emulator"),
        mock.patch.object(np, "empty", _filled),
    ):
        tiles = Tiles(rows, 32, stages=2)
        return fa_numba.flash_attention_2(q, k_pages, v_pages, tiles=tiles, **options, **UNIT)


RUNS = {
    "pages": _attend_pages,
    "": lambda rows: _attend(rows=rows)[0],
    "short": lambda rows: _attend(Nq=140, Nk=70, rows=rows)[0],
    "long": lambda rows: _attend(Nk=320, rows=128, columns=16)[0],
    "packed": _attend_packed,
    "shared heads": lambda rows: _attend_shared(rows, False),
    "shared heads, packed": lambda rows: _attend_shared(rows, True),
}


@cache
def _right(rows, run=""):
    return RUNS[run](rows)


def _outcome(changed, needle, replacement, which, rows=128, run=""):
    """What finds the fault: the name of an error, or "values"; None if nothing does."""
    text = planted(inspect.getsource(_module(_path(changed))), needle, replacement, which)
    right = _right(rows, run)
    mutant = _kernel(changed, text)
    try:
        with mock.patch.object(wgmma, "fa2_forward", mutant):
            found = RUNS[run](rows)
    except emulator.EmulatorError as error:
        return type(error).__name__
    same = all(np.array_equal(a, b, equal_nan=True) for a, b in zip(found, right, strict=True))
    return None if same else "values"


def test_the_machinery_leaves_a_kernel_as_it_is():
    """Which is built anew with each part."""
    for changed in PARTS:
        assert _outcome(changed, "\n", "\n", 0, run="short") is None


STALLS = {"Deadlock", "BarrierDivergence"}
EARLY = {"SharedHazard", "BarrierMisuse", "UninitialisedRead"}
WAIT_K = "wait_mbarrier(bars, uint32(FULL_K + stage), parity)"
WAIT_NEXT_K = "wait_mbarrier(bars, uint32(FULL_K + after), after_parity)"
WAIT_V = "wait_mbarrier(bars, uint32(FULL_V + stage), parity)"
WAIT_Q = "wait_mbarrier(bars, uint32(FULL_Q + q_stage), q_parity)"
WAIT_NEXT_Q = "wait_mbarrier(bars, uint32(FULL_Q + q_after), q_after_parity)"
WAIT_O, WAIT_OLD_O = "p.wait_output(rO, False)", "p.wait_output(rO, True)"

MUTANTS = {
    # waits
    "the first K is not waited for": ("kernel", WAIT_K, "pass", 0, EARLY),
    "the next K is not waited for": ("kernel", WAIT_NEXT_K, "pass", 0, EARLY),
    "V is not waited for": ("kernel", WAIT_V, "pass", 1, EARLY),
    "the last V is not waited for": ("kernel", WAIT_V, "pass", 2, EARLY),
    "Q is not waited for": ("kernel", WAIT_Q, "pass", 0, EARLY),
    "the next Q is not waited for": ("kernel", WAIT_NEXT_Q, "pass", 0, EARLY),
    "the next row tile's K is not waited for": ("kernel", WAIT_NEXT_K, "pass", 2, EARLY),
    "K is filled before it is empty": (
        "kernel", "wait_mbarrier(bars, uint32(EMPTY_K + stage), parity)", "pass", 0, EARLY
    ),
    "V is filled before it is empty": (
        "kernel", "wait_mbarrier(bars, uint32(EMPTY_V + stage), parity)", "pass", 0, EARLY
    ),
    "Q is filled before it is empty": (
        "kernel", "wait_mbarrier(bars, uint32(EMPTY_Q + stage), parity)", "pass", 0, EARLY
    ),
    "S is read at once": ("kernel", "p.wait_scores(rS, False)", "pass", 0, {"RegisterHazard"}),
    "the next S is read at once": (
        "kernel", "p.wait_scores(rS, OVERLAPS)", "pass", 0, {"RegisterHazard", "SharedHazard"}
    ),
    "S may still be on its way": (
        "kernel", "p.wait_scores(rS, False)", "p.wait_scores(rS, True)", 0, {"RegisterHazard"}
    ),
    "O is scaled at once": ("kernel", WAIT_O, "pass", 1, {"RegisterHazard"}),
    "the last O is written at once": ("kernel", WAIT_O, "pass", 2, {"RegisterHazard"}),
    "O is written at once": ("kernel", WAIT_OLD_O, "pass", 0, {"RegisterHazard"}),
    # parities and places
    "the producer's parity": (
        "kernel", "next_parity = uint32(0), uint32(1)", "next_parity = uint32(0), uint32(0)", 0,
        STALLS,
    ),
    "the consumer's parity": (
        "kernel", "    stage, parity = uint32(0), uint32(0)",
        "    stage, parity = uint32(0), uint32(1)", 0, EARLY,
    ),
    "the parity of columns": (
        "kernel", "stage, parity = uint32(0), uint32(1)", "stage, parity = uint32(0), uint32(0)", 0,
        STALLS,
    ),
    "the parity of row tiles": (
        "kernel", "q_stage, q_parity = uint32(0), uint32(0)",
        "q_stage, q_parity = uint32(0), uint32(1)", 0, EARLY,
    ),
    "parity does not change": (
        "stages", "uint32(parity ^ 1)", "parity", 0, EARLY | STALLS
    ),
    "the next parity is that of this place": (
        "kernel", WAIT_NEXT_K, WAIT_NEXT_K.replace("after_parity", "parity"), 0, EARLY | STALLS
    ),
    "another place of K": (
        "kernel", "sK, uint32(after * NK))", "sK, uint32(stage * NK))", 0, EARLY | {"values"}
    ),
    "another place of V": (
        "kernel", "sV, uint32(stage * NK))", "sV, uint32(after * NK))", 1, EARLY | {"values"}
    ),
    "K's barrier counts V": (
        "kernel", "bars, FULL_V + stage)", "bars, FULL_K + stage)", 0,
        EARLY | STALLS,
    ),
    # arrivals
    "K is never emptied": ("kernel", "p.empty(bars, uint32(EMPTY_K + stage))", "pass", 0, STALLS),
    "the next K is never emptied": (
        "kernel", "p.empty(bars, uint32(EMPTY_K + after))", "pass", 0, STALLS
    ),
    "V is never emptied": ("kernel", "p.empty(bars, uint32(EMPTY_V + stage))", "pass", 0, STALLS),
    "Q is never emptied": ("stages", "arrive_mbarrier(bars, barrier)", "pass", 1, STALLS),
    "K is emptied by its readers too early": (
        "kernel",
        f"p.wait_scores(rS, False)\n{20 * ' '}p.empty(bars, uint32(EMPTY_K + stage))",
        f"p.empty(bars, uint32(EMPTY_K + stage))\n{20 * ' '}p.wait_scores(rS, False)",
        0, {"SharedHazard"},
    ),
    "V is emptied by its readers too early": (
        "kernel",
        f"{WAIT_O}\n{24 * ' '}p.empty(bars, uint32(EMPTY_V + stage))",
        f"p.empty(bars, uint32(EMPTY_V + stage))\n{24 * ' '}{WAIT_O}", 0, {"SharedHazard"},
    ),
    "every lane empties": (
        "stages", "if uint32(cuda.threadIdx.x) % uint32(32) == uint32(0):", "if True:", 0,
        {"BarrierMisuse"},
    ),
    "a warp more is asked for": ("stages", "4 * groups", "4 * groups + 1", 0, STALLS),
    "a warp fewer is asked for": (
        "stages", "4 * groups", "4 * groups - 1", 0, {"BarrierMisuse", "SharedHazard"}
    ),
    "the producer says nothing at its end": (
        "kernel", "arrive_mbarrier(bars, uint32(FULL_Q + stage))", "pass", 0, STALLS
    ),
    "nobody hears of the row tile": (
        "kernel", "arrive_mbarrier(bars, uint32(FULL_N + stage))", "pass", 0, STALLS
    ),
    "nobody hears of the end": (
        "kernel", "arrive_mbarrier(bars, uint32(FULL_N + stage))", "pass", 1, STALLS
    ),
    "the row tile is read before it is told": (
        "kernel", "wait_mbarrier(bars, uint32(FULL_N + q_stage), q_parity)", "pass", 0, EARLY
    ),
    "the next row tile is read before it is told": (
        "kernel", "wait_mbarrier(bars, uint32(FULL_N + q_stage), q_parity)", "pass", 1, EARLY
    ),
    "what is told is not given back": (
        "kernel", "arrive_mbarrier(bars, uint32(EMPTY_Q + q_stage))", "pass", 0, STALLS
    ),
    # fences and the block's barriers
    "no fence after the barriers": ("stages", "            fence_mbarrier_init()", "", 0,
                                    {"MissingFence"}),
    "no barrier of the block": ("kernel", "cuda.syncthreads()", "pass", 0, {"BarrierMisuse"}),
    "no fence before O": ("stores", "        fence_async_proxy()\n", "", 0, {"MissingFence"}),
    "no meeting before O": (
        "stores", "        meet(w)\n", "", 0, {"SharedHazard", "MissingFence"}
    ),
    "O is not waited for": ("stores", "            wait_boxes_read()\n", "", 0, {"SharedHazard"}),
    "O is not committed": ("stores", "            commit_boxes()\n", "", 0, {"SharedHazard"}),
    # bytes and places of boxes
    "a panel's bytes too many": ("tile_load", "PANEL * panels * rows", "PANEL * panels * rows + 8",
                                 0, STALLS),
    "half of the bytes": ("tile_load", "2 * PANEL * panels * rows", "PANEL * panels * rows", 0,
                          EARLY | STALLS),
    "all boxes at one place": ("tile_load", "n * rows + r * box", "n * rows", 0, EARLY),
    "all boxes of one row": ("tile_load", "uint32(row0 + r * box)", "row0", 0, {"values"}),
    "O is not swizzled": ("stores", "uint32(8 * (ty % 8))", "uint32(0)", 0, {"values"}),
    # products
    "V's rows do not run across": (
        "products", "sV, at, Bc, 1, STEPS, 1", "sV, at, Bc, 0, STEPS, 1", 0,
        {"values", "OutOfBounds"} | EARLY,
    ),
    "O begins anew with every tile": (
        "products", "sV, at, Bc, 1, STEPS, 1", "sV, at, Bc, 1, STEPS, 0", 0, {"values"}
    ),
    "P before the product with the last has ended": (
        "kernel", WAIT_O, f"p.round_p(rP, rS)\n{24 * ' '}{WAIT_O}", 1, {"RegisterHazard"},
    ),
    # the next row tile
    "it is never asked for": ("kernel", "arrive_mbarrier(bars, NEXT)", "pass", 0, STALLS),
    "it is asked for again": ("kernel", "                    is_long = False\n", "", 0,
                              {"BarrierMisuse"}),
    "the parity of asking": ("kernel", "uint32(next_parity ^ 1)", "next_parity", 0, STALLS | EARLY),
    # turns
    "a turn is not handed on": ("kernel", "p.end_turn(w)", "pass", 0, STALLS),
    "nobody begins": ("kernel", "p.begin_turns(w)", "pass", 0, STALLS),
    # registers
    "more registers than there are": (
        "kernel", "give_registers(FEW)", "give_registers(MANY)", 0, {"Deadlock"}
    ),
    # Together all of the multiprocessor: a launch gets multiples of 8 for each of 384 threads.
    "more registers than the launch has": (
        "kernel", "give_registers(FEW)", "give_registers(FEW + 8)", 0, {"Deadlock"}
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", one_of_twelve(MUTANTS))
def test_a_planted_fault_is_found(name):
    *change, wanted = MUTANTS[name]
    assert _outcome(*change, run="long" if "ask" in name else "") in wanted


OF_SEQUENCES = [
    ("tile_load", "uint32(row + uint32(WRAPS) - N)", "row", 0),
    ("tile_load", "h, sequence_end(b, N, options))", "h, N)", 0),
    ("tile_load", "spec.key_ends, make_key_end(spec)", "spec.key_ends, make_query_end(spec)", 0),
    ("tile_load", "h * uint32(of_head) + ", "", 0),
    ("tile_load", "uint32(first + r * step)", "first", 0),
    ("stores", "make_place_of(ends, sequence_end)", "make_place_of(False, sequence_end)", 0),
    ("stores", "            rows_end = Nq\n", "            pass\n", 0),
    ("schedule", "+ sequences)", ")", 0),
    ("schedule", "+ middle)", ")", 0),
    ("schedule", "begin <= i", "begin < i", 0),
    ("schedule", "uint32(rows_of_tile) + b)", "uint32(rows_of_tile))", 0),
]  # fmt: skip


@pytest.mark.parametrize("change", one_of_twelve(OF_SEQUENCES, lambda change: change[1]))
def test_a_fault_in_the_places_of_sequences_is_found(change):
    found = _outcome(*change, run="packed")
    assert found in {"values", "OutOfBounds", "GlobalHazard"} | STALLS


OF_SHARED_HEADS = [
    ("tile_load", "which, row, 0, PANEL * n", "which, row, 1, PANEL * n", "packed"),
    ("tile_load", "which, row, 0, PANEL * n", "which, row, 1, PANEL * n", ""),
    ("tile_load", "box // heads", "box", ""),
    ("stores", "which, row, 0, PANEL * n", "which, row, 1, PANEL * n", "packed"),
    ("stores", "which, row, 0, PANEL * n", "which, row, 1, PANEL * n", ""),
    ("stores", "row0 + place // uint32(heads)", "row0 + place % uint32(heads)", ""),
    ("stores", "+ place % uint32(heads)", "+ place // uint32(heads)", ""),
    ("stores", "uint32(h * heads)", "h", ""),
    ("schedule", "uint32(i * rows_of_tile)", "uint32(i * spec.Br)", ""),
    ("kernel", "64 // spec.tile_heads", "64", ""),
    ("kernel", "uint32(i0 + ROWS)", "uint32(i0 + 1)", ""),
]  # fmt: skip


@pytest.mark.parametrize("change", one_of_twelve(OF_SHARED_HEADS, lambda change: change[2]))
def test_a_fault_in_the_rows_of_heads_that_share_a_tile_is_found(change):
    *change, packed = change
    found = _outcome(*change, 0, run="shared heads, packed" if packed else "shared heads")
    assert found in {"values", "OutOfBounds", "GlobalHazard"} | STALLS | EARLY


OF_PAGES = [
    ("block_table[b, uint32", "block_table[0, uint32"),
    ("block_table[b, uint32(row", "block_table[b, uint32(row0"),
    ("end_of(T, pages[n], h, rows)", "end_of(T, pages[0], h, rows)"),
    ("end_of(T, pages[n], h, rows)", "end_of(T, pages[n], 0, rows)"),
    ("end_of(T, pages[n], h, rows)", "end_of(T, pages[n], h, uint32(page_size))"),
    ("uint32(min(uint32(page_size), uint32(first + Nk - row)))", "uint32(page_size)"),
    ("first = uint32(first + uint32(WRAPS) - rows)", "first = uint32(first)"),
    ("if row < Nk:", "if True:"),
    ("PANEL * (panel * Bc + n * box)", "PANEL * panel * Bc"),
    ("uint32(WRAPS), which, first, PANEL * panel", "uint32(WRAPS), which, first, 0"),
    ("thread == uint32(keys) or thread == uint32(values)", "thread == uint32(keys)"),
    ("return cuda.threadIdx.x == own", "return True"),
]


@pytest.mark.parametrize("change", one_of_twelve(OF_PAGES, lambda change: change[0]))
def test_a_fault_in_the_boxes_of_pages_is_found(change):
    found = _outcome("tile_load", *change, 0, run="pages")
    assert found in {"values", "OutOfBounds", "GlobalHazard"} | STALLS | EARLY


OF_THREE_CONSUMERS = [
    ("arrive_named(TURN_1, threads)", STALLS),
    ("arrive_named(TURN_2, threads)", STALLS),
    ("sync_named(TURN_2, threads)", STALLS | EARLY),
    ("sync_named(MEET_2, GROUP)", EARLY | {"MissingFence"}),
]


@pytest.mark.parametrize("fault", one_of_twelve(OF_THREE_CONSUMERS, lambda fault: fault[0]))
def test_a_fault_among_three_consumers_is_found(fault):
    needle, wanted = fault
    assert _outcome("turns", needle, "pass", 0, rows=192) in wanted


def test_every_planted_fault_has_its_place():
    places = [(name, needle, new, which) for name, needle, new, which, _ in MUTANTS.values()]
    places += OF_SEQUENCES
    places += [(name, needle, new, 0) for name, needle, new, _ in OF_SHARED_HEADS]
    places += [("turns", needle, "pass", 0) for needle, _ in OF_THREE_CONSUMERS]
    for name, *change in places:
        source = inspect.getsource(_module(_path(name)))
        assert planted(source, *change) != source
