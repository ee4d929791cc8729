"""`device`: the same test on the emulator and, marked `gpu`, on the GPU where there is one."""

import gc

import pytest
from hypothesis import HealthCheck, settings

from fa_numba.device import gpu_available

pytest.register_assert_rewrite("helpers")

# An emulated launch takes a tenth of a second, so no deadline an example.
settings.register_profile(
    "fa_numba",
    deadline=None,
    derandomize=True,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("fa_numba")


def pytest_collection_modifyitems(items):
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not gpu_available():
        skip = pytest.mark.skip(reason="no CUDA GPU of compute capability 8.0 or later")
        for item in marked:
            item.add_marker(skip)


def pytest_collection_finish():
    # Modules and tests live to the end: no collection needs to look at them again.
    gc.collect()
    gc.freeze()
    # What a compiler or the emulator makes is seldom in circles: look at it seldom.
    gc.set_threshold(50_000, 20, 20)


@pytest.fixture(params=["emulator", pytest.param("gpu", marks=pytest.mark.gpu)], scope="session")
def device(request):
    return request.param
