"""The softmax of vectors, arXiv 1805.02867: values, accesses, what is refused, compiled code."""

import re

import numpy as np
import pytest
from offline import CAPABILITY, compiled
from scipy import special
from stand_in_device import Array, aligned, no_gpu_but_its_driver

import fa_numba
from fa_numba import io_model, reference
from fa_numba.device import using
from fa_numba.kernels.simt import softmax as kernels

ALGORITHMS = ("naive", "safe", "online")


def vectors(batch, elements, seed=0):
    return np.random.default_rng(seed).standard_normal((batch, elements)).astype(np.float32)


def run(x, algorithm, device="emulator"):
    with using(device):
        return fa_numba.softmax(x, algorithm=algorithm)


def exact(x):
    return special.softmax(x.astype(np.float64), axis=1)


def bound(x):
    """Twice the error of the same steps one by one in float32, and a rounding."""
    p = np.exp(x - x.max(axis=1, keepdims=True))
    unfused = p / p.sum(axis=1, keepdims=True)
    return 2 * reference.relative_error(unfused, exact(x)) + 2.0**-23


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("elements", [1, 31, 32, 257, 1024, 1031, 2500])
def test_values_are_those_of_float64(elements, algorithm, device):
    x = vectors(3, elements)
    assert reference.relative_error(run(x, algorithm, device), exact(x)) <= bound(x)


@pytest.mark.parametrize("algorithm", ["safe", "online"])
@pytest.mark.parametrize("large", [100.0, -100.0, 1e4, 3e38])
def test_large_values_do_not_overflow(large, algorithm, device):
    x = vectors(2, 1500)
    x[:, 1400] += np.float32(large)  # in the second turn of all threads
    assert reference.relative_error(run(x, algorithm, device), exact(x)) <= bound(x)


def test_the_naive_one_overflows_where_the_others_do_not(device):
    """As its docstring says: inf / inf at the large element, 0 elsewhere; 0 / 0 taken for 0."""
    x = vectors(2, 300)
    x[0, 5] = 89.0
    x[1] -= 1000.0
    naive = run(x, "naive", device)
    assert np.isnan(naive[0, 5]) and (np.delete(naive[0], 5) == 0).all()
    assert (naive[1] == 0).all()
    x[0, 5] = 88.0
    x[1] += 1000.0
    assert reference.relative_error(run(x, "naive", device), exact(x)) <= 89 * 2.0**-23
    assert np.isfinite(run(x + np.float32(1000), "online", device)).all()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_what_is_not_finite(algorithm, device):
    x = vectors(5, 600)
    x[0, ::3] = -np.inf
    x[1, 7] = np.nan
    x[2, 7] = np.inf
    x[3] = -np.inf
    y = run(x, algorithm, device)
    assert (y[0, ::3] == 0).all()
    assert reference.relative_error(y[[0, 4]], exact(x[[0, 4]])) <= bound(x[[0, 4]])
    assert np.isnan(y[1]).all()
    # The naive one divides the others by inf.
    assert np.isnan(y[2, 7]) and (np.isnan(y[2]).all() or algorithm == "naive")
    assert (y[3] == 0).all()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("batch, elements", [(1, 1), (2, 255), (3, 1025), (1, 4099)])
def test_accesses_are_the_papers(batch, elements, algorithm):
    x = vectors(batch, elements)
    with fa_numba.count_accesses() as counts:
        fa_numba.softmax(x, algorithm=algorithm)
    model = io_model.softmax(batch, elements, algorithm)
    assert (model.loads, model.stores) == (counts.loads, counts.stores)
    assert model.total == {"naive": 3, "safe": 4, "online": 3}[algorithm] * batch * elements
    assert model.bytes == 4 * model.total


def test_any_strides_and_an_output_of_ones_own(device):
    x = vectors(40, 70).T
    out = np.full((70, 40), np.nan, np.float32)
    with using(device):
        assert fa_numba.softmax(x, out=out) is out
    assert reference.relative_error(out, exact(x)) <= bound(x)


@pytest.mark.parametrize(
    "arguments, error, says",
    [
        ((vectors(2, 4),), ValueError, "algorithm must be 'naive', 'safe' or 'online', got 'fast'"),
        (
            (vectors(2, 4),),
            ValueError,
            "algorithm must be 'naive', 'safe' or 'online', got array",
        ),
        (
            (vectors(2, 4)[0],),
            ValueError,
            r"x must have two axes, \(batch, elements\), got shape \(4,\)",
        ),
        (
            (np.zeros((2, 0), np.float32),),
            ValueError,
            r"elements must be an integer of at least 1, got 0 \(an empty axis\)",
        ),
        (
            (np.zeros((2, 4)),),
            TypeError,
            r"x must be float32, got float64; convert it with x\.astype\(np\.float32\)",
        ),
        (
            ([[1.0]],),
            TypeError,
            "x must be a NumPy array, torch tensor, JAX array, or an .*got a list",
        ),
        (
            (np.zeros((1 << 12, 1 << 16), np.float32),),
            ValueError,
            r"x of shape \(4096, 65536\) would take the emulator up to about 164 s,",
        ),
    ],
)
def test_what_is_refused(arguments, error, says):
    algorithm = "fast" if "fast" in says else "online"
    if says.endswith("array"):
        algorithm = np.array(["safe", "online"])
    with using("emulator"), pytest.raises(error, match=says):
        fa_numba.softmax(*arguments, algorithm=algorithm)


def test_an_output_that_does_not_fit_is_refused():
    x = vectors(2, 4)
    with using("emulator"):
        with pytest.raises(ValueError, match=r"out must have shape \(2, 4\), got \(2, 5\)"):
            fa_numba.softmax(x, out=vectors(2, 5))
        with pytest.raises(ValueError, match="out must not share memory with x"):
            fa_numba.softmax(x, out=x)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("given", [False, True])
def test_a_gpus_launch(algorithm, given):
    """By a driver that stands in: one launch, a block a vector, of any strides; words and all."""
    with no_gpu_but_its_driver((9, 0)) as gpu:
        x = aligned((3, 140))[:, ::2]
        x[...] = vectors(3, 70)
        target = Array(aligned((3, 70))) if given else None
        y = fa_numba.softmax(Array(x), algorithm=algorithm, out=target)
        assert not given or y is target
        assert reference.relative_error(y.values, exact(np.array(x))) <= bound(np.array(x))
        ((name, grid, *_),) = gpu.launches
        assert (name, grid[0]) == (f"{algorithm}_softmax", 3)


def test_names_and_counts_that_the_model_refuses():
    with pytest.raises(
        ValueError, match="algorithm must be 'naive', 'safe' or 'online', got 'fast'"
    ):
        io_model.softmax(1, 1, "fast")
    with pytest.raises(ValueError, match="elements must be an integer of at least 1, got 0"):
        io_model.softmax(1, 0, "safe")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_kernel_compiles_within_its_budgets(algorithm):
    assert tuple(kernels.MAKERS) == kernels.ALGORITHMS == ALGORITHMS
    kernel = kernels.MAKERS[algorithm]()
    assert "sm_90a" in CAPABILITY
    ptx, log = compiled(kernel, "sm_90a")
    assert ".f64" not in ptx and ".local" not in ptx
    assert re.findall(r"(\d+) bytes (?:stack frame|spill stores|spill loads)", log) == ["0"] * 3
    used = int(re.search(r"Used (\d+) registers", log)[1])
    assert used * kernel.threads * kernel.min_blocks <= 64 * 1024
    # A division by d is none of float64, an exponential one instruction.
    assert "ex2.approx.ftz.f32" in ptx and "shfl.sync.bfly" in ptx
