"""FlashAttention-1 on Hopper's tensor cores as the emulator runs it: results, counts, and that
faults planted in its source are found.
"""

import inspect
from functools import cache
from importlib import import_module
from unittest import mock

import numpy as np
import pytest
from helpers import one_of_twelve, planted
from mma_helpers import BFLOAT16, check, half_inputs
from test_wgmma_emulated import EARLY, STALLS, _built

import fa_numba
from fa_numba import Tiles, emulator
from fa_numba.choices.tiles import default_wgmma_fa1_tiles
from fa_numba.host import planning
from fa_numba.kernels import wgmma
from fa_numba.parts.wgmma import state
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
]


@pytest.mark.parametrize("B, Hq, Hk, Nq, Nk, d, tiles, options", CASES)
def test_results_and_counts(B, Hq, Hk, Nq, Nk, d, tiles, options):
    q, k, v = half_inputs("float16", B, Hq, Hk, Nq, Nk, d)
    check("emulator", "fa1", q, k, v, tiles=tiles, **UNIT, **options)


@pytest.mark.parametrize("dtype, layout", [(BFLOAT16, "padded"), ("float16", "transposed")])
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
    assert {a.line for a in accesses if a.array in "KV"} == {"Alg. 1 line 6: load Kj, Vj"}


def test_tiles():
    for d in (40, 64, 96, 128, 192, 256):
        for features in (fa_numba.options.PLAIN, fa_numba.options.Features(window=True)):
            tiles = default_wgmma_fa1_tiles(d, features)
            spec = select_wgmma_fa1_spec(tiles, d, 227 << 10, features=features)
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


# --- planted faults --------------------------------------------------------------------------


SOURCES = {"kernel": inspect.getsource(wgmma.fa1_forward), "state": inspect.getsource(state)}


def _kernel(changed, text):
    """The kernel's module, with its state's, or itself, made of another text."""
    package = import_module("fa_numba.parts.wgmma")
    fresh = _built("state", text) if changed == "state" else state
    kernel = _built("kernel", text if changed == "kernel" else SOURCES["kernel"])
    kernel.parts = lambda spec: package.Parts(spec, (fresh, *package._MODULES))
    return kernel


@cache
def _right(rows, lens):
    return _attend(rows, **({"q_lens": (lens,)} if lens else {}))


def _outcome(changed, needle, replacement, which=0, rows=64, lens=0):
    """What finds the fault: the name of an error, "values" or "counts"; None if nothing does."""
    text = planted(SOURCES[changed], needle, replacement, which)
    right, wanted = _right(rows, lens)
    mutant = _kernel(changed, text)
    try:
        with mock.patch.object(wgmma, "fa1_forward", mutant):
            found, counts = _attend(rows, **({"q_lens": (lens,)} if lens else {}))
    except emulator.EmulatorError as error:
        return type(error).__name__
    same = all(np.array_equal(a, b, equal_nan=True) for a, b in zip(found, right, strict=True))
    moved = (counts.loads, counts.stores) == (wanted.loads, wanted.stores)
    return "values" if not same else None if moved else "counts"


def test_the_machinery_leaves_a_kernel_as_it_is():
    assert _outcome("kernel", "\n", "\n") is None and _outcome("state", "\n", "\n", lens=70) is None


VALUES, HAZARD = {"values"}, {"GlobalHazard"}
WAIT_K = "wait_mbarrier(bars, uint32(FULL_K + stage), parity)"
WAIT_V = "wait_mbarrier(bars, uint32(FULL_V + stage), parity)"
WAIT_Q = "wait_mbarrier(bars, uint32(FULL_Q + place), q_parity)"
WAIT_O = "wait_mbarrier(bars, uint32(FULL_O + place), q_parity)"
WAIT_WRITTEN = "wait_mbarrier(bars, uint32(WRITTEN + w), written)"
WRITTEN = "p.pass_is_written(bars, uint32(WRITTEN + w), ty, tx)"

MUTANTS = {
    # O through global memory
    "O is loaded before the pass is written": ("kernel", WAIT_WRITTEN, "pass", HAZARD),
    "the pass is read, not written": ("state", "            wait_boxes()\n", "", HAZARD, 0),
    "a pass that is not said": ("kernel", WRITTEN, "pass", STALLS, 1),
    "line 2 is not said": ("kernel", WRITTEN, "pass", STALLS | HAZARD, 0),
    "the parity of passes": ("kernel", "written = uint32(written ^ 1)", "pass", STALLS | HAZARD),
    "O of the first pass is loaded": (
        "kernel", "if p.has_state(j0):", "if True:", {"counts"}
    ),
    "O is not loaded": ("kernel", "if p.has_state(j0):", "if False:", EARLY | VALUES),
    "O is not waited for": ("kernel", WAIT_O, "pass", EARLY),
    "O's place is filled before it is empty": (
        "kernel", "wait_mbarrier(bars, uint32(EMPTY_O + place), parity)", "pass", EARLY
    ),
    "O's place is never emptied": (
        "kernel", "p.o_is_empty(bars, uint32(EMPTY_O + place), ty, tx)", "pass", STALLS
    ),
    "A is not waited for": ("state", "            wait_boxes_read()\n", "", EARLY),
    "A is not committed": ("state", "            commit_boxes()\n", "", EARLY | HAZARD),
    "no fence before A": ("state", "        fence_async_proxy()\n", "", {"MissingFence"}),
    "no meeting before A": ("state", "        meet(w)\n", "", EARLY | {"MissingFence"}),
    "A is not written as it is read": (
        "state", "first = first_place(at, w, ty, tx)", "first = first_place(at, w, ty, tx ^ 1)",
        EARLY | VALUES, 1,
    ),
    "the rows of another consumer": (
        "state", "own = uint32(at + FLOAT_PANEL * GROUP_ROWS * w)", "own = at", EARLY | VALUES
    ),
    "more when there is no more": (
        "kernel", "more = p.sees_more(i0, j0, Nq, Nk, b, h, options)", "more = j0 == uint32(0)",
        VALUES,
    ),
    # the algorithm
    "O is not weighed by l": (
        "state", "rf[i] = rl[i] * exp2(", "rf[i] = exp2(", VALUES
    ),
    "O is not scaled by e^(m_old - m_new)": (
        "state", "rf[i] = rl[i] * exp2(rm[i] - rshift[i])", "rf[i] = rl[i]", VALUES
    ),
    "l of the last tile alone": ("state", "            rl[i] += rf[i]\n", "", VALUES),
    "a row's columns of one lane alone": (
        "state", "rl[i] += cuda.shfl_xor_sync(FULL_WARP, rl[i], lane)", "pass", VALUES
    ),
    "O is not normalised": ("kernel", "p.normalise_rows(rO, rl)", "pass", VALUES),
    "m is not written": (
        "state", "        write_values(rm, m, row0, rows_end, ty, tx)\n", "", VALUES
    ),
    # Q, K and V
    "K is not waited for": ("kernel", WAIT_K, "pass", EARLY),
    "V is not waited for": ("kernel", WAIT_V, "pass", EARLY),
    "Q is not waited for": ("kernel", WAIT_Q, "pass", EARLY),
    "K is filled before it is empty": (
        "kernel", "wait_mbarrier(bars, uint32(EMPTY_K + stage), parity)", "pass", EARLY
    ),
    "V is filled before it is empty": (
        "kernel", "wait_mbarrier(bars, uint32(EMPTY_V + stage), parity)", "pass", EARLY
    ),
    "Q is filled before it is empty": (
        "kernel", "wait_mbarrier(bars, uint32(EMPTY_Q + place), parity)", "pass", EARLY
    ),
    "K is never emptied": ("kernel", "p.empty(bars, uint32(EMPTY_K + stage))", "pass", STALLS),
    "V is never emptied": ("kernel", "p.empty(bars, uint32(EMPTY_V + stage))", "pass", STALLS),
    "K is emptied in every visit": (
        "kernel", "if i_next >= i_end:", "if True:", EARLY | STALLS
    ),
    "Q is never emptied": ("kernel", "p.empty(bars, uint32(EMPTY_Q + place))", "pass", STALLS),
    "Q is never emptied in a last visit": (
        "kernel", "p.empty(bars, uint32(EMPTY_Q + place))", "pass", STALLS, 1
    ),
    "Q's place is given up before O leaves by it": (
        "kernel", "if more:", "if True:", EARLY | STALLS
    ),
    "a warp fewer empties Q": (
        "state", "init_mbarrier(bars, empty_q + s, 4)", "init_mbarrier(bars, empty_q + s, 3)",
        EARLY,
    ),
    "S is read at once": ("kernel", "p.wait_scores(rS, False)", "pass", {"RegisterHazard"}),
    "O is written at once": ("kernel", "p.wait_output(rO, False)", "pass", {"RegisterHazard"}),
    "the places of one consumer for all": (
        "kernel", "uint32(i0 + 64 * w), uint32(stage * GROUPS + w)",
        "uint32(i0 + 64 * w), uint32(stage * GROUPS)", EARLY | STALLS,
    ),
    "no fence after the barriers": (
        "state", "            fence_mbarrier_init()", "", {"MissingFence"}
    ),
    "no barrier of the block": ("kernel", "        cuda.syncthreads()\n", "", {"BarrierMisuse"}),
    "more registers than there are": (
        "kernel", "give_registers(FEW)", "give_registers(MANY)", {"Deadlock"}
    ),
}  # fmt: skip


# Those that take more than one consumer.
TOGETHER = {
    "the rows of another consumer", "the places of one consumer for all",
    "more registers than there are",
}  # fmt: skip


@pytest.mark.parametrize("name", one_of_twelve(MUTANTS))
def test_a_planted_fault_is_found(name):
    changed, needle, replacement, wanted, *which = MUTANTS[name]
    rows = 128 if name in TOGETHER else 64
    assert _outcome(changed, needle, replacement, *which, rows=rows) in wanted


BESIDE_LINE_2 = [
    ("kernel", "p.wait_initialised(bars, uint32(WRITTEN + w))", EARLY),
    ("state", "start(rO, rl, rm)", {"UninitialisedRead"}),
    ("state", "write_output(rO, sO, uint32(0), A, w, i0, b, h, ty, tx)", EARLY | VALUES),
    ("state", "write_tile(rO, sQ, uint32(0), O, w, i0, b, h, ty, tx)", EARLY | VALUES),
    ("kernel", WAIT_WRITTEN, HAZARD),
]


@pytest.mark.parametrize("fault", one_of_twelve(BESIDE_LINE_2, lambda fault: fault[1]))
def test_a_fault_beside_line_2_is_found(fault):
    """O, l and m are initialised in memory where rows have an end of their own."""
    changed, needle, wanted = fault
    assert _outcome(changed, needle, "pass", lens=70) in wanted


def test_every_planted_fault_has_its_place():
    places = [(name, needle, new, *more) for name, needle, new, _, *more in MUTANTS.values()]
    places += [(name, needle, "pass") for name, needle, _ in BESIDE_LINE_2]
    for changed, *change in places:
        assert planted(SOURCES[changed], *change) != SOURCES[changed]
