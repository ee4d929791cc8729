"""The kernels on Hopper's tensor cores on a GPU that has them: one call, many times over.

`test_wgmma_emulated` has the same kernels on the emulator, `test_random_calls` any call on a GPU.
"""

import numpy as np
import pytest
from mma_helpers import half_inputs

import fa_numba
from fa_numba import Tiles
from fa_numba import device as devices
from fa_numba.device import compute_capability, gpu_available

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not gpu_available() or compute_capability() != (9, 0),
        reason="no GPU of compute capability 9.0",
    ),
]


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize(
    "algorithm, N, heads, times, options",
    [
        # One row tile and many: the next pass loads what this one has stored.
        ("fa1", 64, (80, 80), 100, {"tiles": Tiles(64, 16)}),
        ("fa1", 1000, (80, 80), 100, {"tiles": Tiles(64, 16), "causal": True}),
        # Blocks take row tiles in another order each time; nothing of the result is of that.
        ("fa2", 1000, (8, 4), 300, {"causal": True}),
    ],
)
def test_a_call_gives_the_same_bits_every_time(algorithm, N, heads, times, options, d):
    arrays = [devices.to_gpu(x) for x in half_inputs("float16", 2, *heads, N, N, d)]
    how = {"algorithm": algorithm, "unit": "wgmma", "return_lse": True, **options}
    first = [devices.copied_to_host(x) for x in fa_numba.attention(*arrays, **how)]
    for _ in range(times):
        again = [devices.copied_to_host(x) for x in fa_numba.attention(*arrays, **how)]
        assert all(
            (x.view(np.uint8) == y.view(np.uint8)).all() for x, y in zip(again, first, strict=True)
        )


def test_auto_takes_this_unit():
    q, k, v = (devices.to_gpu(x) for x in half_inputs("float16", 1, 2, 2, 200, 200, 64))
    own = fa_numba.flash_attention_2(q, k, v, unit="wgmma")
    chosen = fa_numba.flash_attention_2(q, k, v)
    assert fa_numba.plan(q.shape, k.shape, dtype="float16").unit == "wgmma"
    assert (devices.copied_to_host(own) == devices.copied_to_host(chosen)).all()
