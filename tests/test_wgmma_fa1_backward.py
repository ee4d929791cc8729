"""FlashAttention-1's backward kernel on Hopper's tensor cores as the emulator runs it: gradients,
counts, and that faults planted in its source are found.
"""

import inspect
from functools import cache
from unittest import mock

import numpy as np
import pytest
from helpers import one_of_twelve, planted
from mma_helpers import BFLOAT16
from test_mma_backward import check_gradients, half_gradients, saved_halves
from test_wgmma_emulated import _built

import fa_numba
from fa_numba import emulator
from fa_numba.host import planning
from fa_numba.kernels import wgmma
from fa_numba.parts import wgmma as parts
from fa_numba.parts.wgmma import backward, passes

UNIT = {"unit": "wgmma"}
CASES = [
    # B, Hq, Hk, Nq, Nk, d, options
    (1, 1, 1, 1, 1, 64, {}),
    (1, 1, 1, 77, 200, 64, {}),
    (1, 1, 1, 200, 77, 128, {"causal": True}),
    (1, 3, 1, 70, 130, 64, {"causal": True}),
    (2, 2, 1, 70, 150, 128, {"causal": True}),
    (1, 1, 1, 300, 300, 64, {"window": (40, 8)}),
    (1, 2, 1, 150, 150, 80, {"window": (40, -1)}),
    (1, 1, 1, 70, 260, 40, {}),
]


@pytest.mark.parametrize("B, Hq, Hk, Nq, Nk, d, options", CASES)
def test_gradients_and_counts(B, Hq, Hk, Nq, Nk, d, options):
    inputs = half_gradients("float16", B, Hq, Hk, Nq, Nk, d)
    check_gradients("emulator", "fa1", *inputs, **UNIT, **options)


@pytest.mark.parametrize("options", [{"causal": True}, {"window": (30, 5)}])
def test_blocks_that_share_a_head(options):
    inputs = half_gradients("float16", 1, 2, 1, 300, 140, 64)
    check_gradients("emulator", "fa1-split", *inputs, **UNIT, **options)


@pytest.mark.parametrize("dtype, layout", [(BFLOAT16, "padded"), ("float16", "transposed")])
def test_dtypes_and_strides(dtype, layout):
    inputs = half_gradients(dtype, 1, 2, 2, 70, 150, 64)
    check_gradients("emulator", "fa1", *inputs, causal=True, layout=layout, scale=-0.3, **UNIT)


def test_rows_that_see_no_column_have_no_gradient():
    inputs = half_gradients("float16", 1, 1, 1, 200, 20, 64)
    dq, _, _ = check_gradients("emulator", "fa1", *inputs, causal=True, **UNIT)
    assert (dq[:, :, :180] == 0).all() and (dq[:, :, 181:] != 0).any(axis=-1).all()


def test_auto_does_not_take_it():
    shape = (1, 4, 4096, 64)
    with fa_numba.device.planning_for((9, 0), fa_numba.device.EMULATED_SHARED_BYTES):
        plan = fa_numba.plan(shape, shape, algorithm="fa1", passes="bwd", dtype="float16")
    assert plan.unit == "mma"


# --- planted faults --------------------------------------------------------------------------


@cache
def _inputs():
    """Three row tiles and two column tiles, and what the forward pass has left."""
    dout, q, k, v = half_gradients("float16", 1, 1, 1, 300, 200, 64)
    return dout, q, k, v, *saved_halves("fa1", q, k, v, causal=True)


def _gradients(**options):
    uncached = getattr(planning.planned, "__wrapped__", planning.planned)
    options = {"causal": True, **UNIT, **options}
    with mock.patch.object(planning, "planned", uncached):
        return fa_numba.flash_attention_1_backward(*_inputs(), **options)


def test_gradients_do_not_depend_on_the_order():
    first = _gradients()
    with emulator.schedule(1):
        second = _gradients()
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


@cache
def _right():
    return _gradients()


SOURCES = {
    name: inspect.getsource(module)
    for name, module in (("kernel", wgmma.fa1_backward), ("passes", passes), ("backward", backward))
}


def _outcome(changed, needle, replacement, which=0):
    """What finds the fault: the name of an error, or "values"; None if nothing does."""
    texts = dict(SOURCES)
    texts[changed] = planted(texts[changed], needle, replacement, which)
    kernel = _built("kernel", texts["kernel"])
    own = {"passes": passes, "backward": backward}
    if changed != "kernel":
        own[changed] = _built(changed, texts[changed])
    kernel.parts = lambda spec: parts.Parts(spec, (*own.values(), *parts._MODULES))
    try:
        with mock.patch.object(wgmma, "fa1_backward", kernel):
            found = _gradients()
    except emulator.EmulatorError as error:
        return type(error).__name__
    same = all(np.array_equal(a, b) for a, b in zip(found, _right(), strict=True))
    return None if same else "values"


def test_the_machinery_leaves_a_kernel_as_it_is():
    """Which is built anew with each part."""
    for changed in SOURCES.keys() - {"kernel"}:
        assert _outcome(changed, "\n", "\n") is None


STALLS = {"Deadlock", "BarrierDivergence"}
EARLY = {"SharedHazard", "BarrierMisuse", "UninitialisedRead"}

MUTANTS = {
    "K and V are filled before they are empty": (
        "kernel", "wait_mbarrier(bars, uint32(EMPTY_KV), uint32(j0 // Bc % 2 ^ 1))", "pass", EARLY
    ),
    "K and V of the first pass": (
        "kernel", "wait_mbarrier(bars, uint32(FULL_KV), uint32(j0 // Bc % 2))",
        "wait_mbarrier(bars, uint32(FULL_KV), uint32(0))", EARLY,
    ),
    "K and V are not emptied": (
        "kernel", "p.q_is_empty(bars, uint32(EMPTY_KV), tx, ty)", "pass", STALLS
    ),
    "K and V are emptied before they are": (
        "kernel", "            p.meet_all()  # nobody reads Kj and Vj any more\n",
        "            p.q_is_empty(bars, uint32(EMPTY_KV), tx, ty)\n            p.meet_all()\n",
        EARLY,
    ),
    "the last place of a pass is not emptied": (
        "kernel", "            if i_first < i_end:\n", "            if Nq == uint32(0):\n",
        {*EARLY, *STALLS, "values"},
    ),
    "D of a dO on its way": (
        "kernel", "wait_mbarrier(bars, uint32(FULL_DO + stage), parity)", "pass", EARLY
    ),
    "dP of a dO on its way": (
        "kernel", "wait_mbarrier(bars, uint32(FULL_DO + stage), parity)", "pass", EARLY, 1
    ),
    "D of an O on its way": (
        "kernel", "wait_mbarrier(bars, uint32(FULL_O + stage), parity)", "pass", EARLY
    ),
    "D is not waited for": (
        "kernel", "wait_mbarrier(bars, uint32(FULL_D + stage), parity)", "pass", EARLY
    ),
    "dQ is read at once": ("kernel", "p.wait_dq(rdQ)", "pass", {"RegisterHazard"}),
    "dQ is not read": (
        "passes", "if initialises or j0 > uint32(0):", "if initialises:", {"values"}
    ),
    "dQ begins anew in each pass": (
        "backward", "Bc, 1, STEPS, ADDS)", "Bc, 1, STEPS, 0)", {"values"}
    ),
    "dQ is read where nothing is": (
        "passes", "if initialises or j0 > uint32(0):", "if True:", {"UninitialisedRead", "values"}
    ),
    "dQ is rounded in every pass": (
        "passes", "if more:\n            write_sums", "if False:\n            write_sums",
        {"values", "UninitialisedRead"},
    ),
    "dQ without the scale": ("passes", "factor * rdQ[2 * e],", "rdQ[2 * e],", {"values"}),
    "the other's part of dQ": (
        "backward", "rows, columns = columns, rows", "pass", {"values", "OutOfBounds"}
    ),
    "the other's rows of dQ": ("passes", "row + GROUP_ROWS * w", "row", {"values", "GlobalHazard"}),
    "D of the other place": (
        "kernel", "stage * (2 * Br) + Br", "(1 - stage) * (2 * Br) + Br", {*EARLY, "values"}
    ),
    "D's places": (
        "passes", "sD[uint32(at + place_of(r))]", "sD[uint32(at + r)]", {"values"}
    ),
    "the last chunk of D is left out": (
        "passes", "while col < columns:", "while col + CHUNK < columns:", {"values"}
    ),
    "dK without the scale": ("kernel", "p.scale_columns(rdK, scale)", "pass", {"values"}),
    "sums begin once": ("kernel", "p.start_columns(rdK, rdV)", "if j0 == uint32(0):\n"
                        "                p.start_columns(rdK, rdV)", {"values"}),
}  # fmt: skip


def test_every_planted_fault_has_its_place():
    for changed, needle, replacement, _, *which in MUTANTS.values():
        assert planted(SOURCES[changed], needle, replacement, *which) != SOURCES[changed]


@pytest.mark.parametrize("name", one_of_twelve(MUTANTS))
def test_a_planted_fault_is_found(name):
    changed, needle, replacement, wanted, *which = MUTANTS[name]
    assert _outcome(changed, needle, replacement, *which) in wanted
