"""FlashAttention-1's backward kernel on Hopper's tensor cores, emulated: gradients and counts."""

import numpy as np
import pytest
from backward_helpers import check_gradients, half_gradients, saved_halves, with_dlse
from mma_helpers import DTYPES_AND_LAYOUTS

import fa_numba
from fa_numba import emulator

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
    (1, 2, 1, 128, 256, 64, {"causal": True}),  # no ragged edge
]


@pytest.mark.parametrize("B, Hq, Hk, Nq, Nk, d, options", CASES)
def test_gradients_and_counts(B, Hq, Hk, Nq, Nk, d, options):
    inputs = half_gradients("float16", B, Hq, Hk, Nq, Nk, d)
    check_gradients("emulator", "fa1", *inputs, **UNIT, **options)


@pytest.mark.parametrize(
    "sizes, options",
    [
        ((1, 3, 1, 200, 130, 64), {"causal": True}),
        ((1, 1, 1, 130, 150, 72), {"window": (30, 5)}),
        ((1, 2, 1, 70, 50, 64), {"causal": True, "sinks": np.float32([-1.0, 2.0])}),
    ],
)
def test_a_gradient_of_lse(sizes, options):
    inputs = half_gradients("float16", *sizes)
    check_gradients("emulator", "fa1", *inputs, **UNIT, **with_dlse(inputs, options))


@pytest.mark.parametrize("options", [{"causal": True}, {"window": (30, 5)}])
def test_blocks_that_share_a_head(options):
    inputs = half_gradients("float16", 1, 2, 1, 300, 140, 64)
    check_gradients("emulator", "fa1-split", *inputs, **UNIT, **options)


@pytest.mark.parametrize("dtype, layout", DTYPES_AND_LAYOUTS)
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


def test_gradients_do_not_depend_on_the_order():
    """Of three row tiles and two column tiles."""
    dout, q, k, v = half_gradients("float16", 1, 1, 1, 300, 200, 64)
    given = dout, q, k, v, *saved_halves("fa1", q, k, v, causal=True)
    first = fa_numba.flash_attention_1_backward(*given, causal=True, **UNIT)
    with emulator.schedule(1):
        second = fa_numba.flash_attention_1_backward(*given, causal=True, **UNIT)
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
