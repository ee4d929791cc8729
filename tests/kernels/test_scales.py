"""A scale of 0 or below: every unit, order and pass, beneath masks.

A kernel for scales above 0 takes the largest score before it is scaled, and scales in the exponent.
Given another scale it makes +inf or NaN of the -inf of a masked score.
"""

import itertools

import pytest
from backward_helpers import check_gradients, random_gradients
from helpers import check, random_inputs

import fa_numba
from fa_numba.device import kernel_cache

# Rows of Q and of K: ragged tiles, and with a causal mask rows that see no column.
UNITS = {"simt": (11, 9), "mma": (37, 35), "wgmma": (77, 70)}
every_unit = pytest.mark.parametrize("unit", UNITS)
every_mask = pytest.mark.parametrize("mask", [{"causal": True}, {"window": (4, 3)}], ids=str)
SCALES = (0.3, -0.3, 0)  # the first makes kernels that the next two must not take


@pytest.mark.in_turn("mask")
@every_unit
@every_mask
@pytest.mark.parametrize("algorithm", ["fa1", "fa2"])
def test_forward(unit, mask, algorithm):
    dtype = "float32" if unit == "simt" else "float16"
    inputs = random_inputs(1, 1, 1, *UNITS[unit], 64, dtype=dtype)
    for scale in SCALES:
        check("emulator", algorithm, *inputs, scale=scale, unit=unit, **mask)


@pytest.mark.in_turn("mask")
@every_unit
@every_mask
@pytest.mark.parametrize("way", ["fa1", "fa2", "fa2-deterministic"])
def test_backward(unit, mask, way):
    dtype = "float32" if unit == "simt" else "float16"
    inputs = random_gradients(1, 1, 1, *UNITS[unit], 64, dtype=dtype)
    for scale in SCALES:
        dq, dk, _ = check_gradients("emulator", way, *inputs, scale=scale, unit=unit, **mask)
        assert scale or not (dq.any() or dk.any())


@pytest.mark.parametrize(
    "unit, passes", [*itertools.product(["mma", "wgmma"], ["fwd", "bwd"]), ("simt", "fwd")]
)
@pytest.mark.parametrize("algorithm", ["fa1", "fa2"])
def test_kernels_of_either_sign_are_kept_apart(unit, passes, algorithm):
    """In the process and on disk, whichever was made first."""

    def kernels(scale):
        dtype = "float32" if unit == "simt" else "float16"
        facts = {"dtype": dtype, "unit": unit, "passes": passes, "causal": True}
        shape = (1, 1, 128, 64)
        plan = fa_numba.plan(shape, shape, algorithm=algorithm, scale=scale, **facts)
        (main,) = (kernel for kernel in plan.launched if kernel.name.startswith(algorithm))
        return main, kernel_cache.key_of(main, (9, 0))

    above, zero, below = map(kernels, (0.3, 0, -0.3))
    assert zero == below and above[0] is not zero[0] and above[1] != zero[1]
