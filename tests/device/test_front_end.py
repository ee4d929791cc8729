"""What stands in for functions of Numba's front end gives what they give, and goes away again."""

import gc
import itertools
import threading

import pytest
from compare_ptx import ptx_of, without_names
from numba import cuda
from numba.cuda.core import analysis, ir_utils
from offline import CAPABILITY

import fa_numba
from fa_numba.device import EMULATED_SHARED_BYTES, array_type, planning_for
from fa_numba.device.front_end import REPLACED, _live_variables, without_repeats


def ptx(kernel):
    return without_names(ptx_of(kernel, CAPABILITY["sm_90a"]))


def kernels(algorithm, unit, passes="fwd", d=64):
    """By their names, those that a call without options launches on an H100."""
    shape, dtype = (2, 4, 1024, d), "float32" if unit == "simt" else "float16"
    how = {"algorithm": algorithm, "dtype": dtype, "unit": unit, "passes": passes}
    with planning_for((9, 0), EMULATED_SHARED_BYTES):
        return {each.name: each for each in fa_numba.plan(shape, shape, **how).launched}


def row_sums():
    return kernels("fa2", "simt", "bwd")["row_sums"]


@pytest.mark.parametrize(
    "call, name",
    [
        (("fa2", "simt", "bwd"), "row_sums"),
        (("standard", "mma"), "standard_softmax"),
        pytest.param(("fa2", "simt"), "fa2_forward", marks=pytest.mark.slow),
        pytest.param(("fa1", "mma", "bwd"), "fa1_backward", marks=pytest.mark.slow),
        pytest.param(("fa2", "wgmma"), "fa2_forward", marks=pytest.mark.slow),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_the_same_code_comes_out(call, name):
    kernel = kernels(*call)[name]
    with without_repeats():
        shorter = ptx(kernel)
    assert shorter == ptx(kernel)


def test_each_function_is_numbas_again_afterwards():
    before = [vars(owner)[name] for owner, name, _ in REPLACED]
    with pytest.raises(KeyError, match="inside"), without_repeats():
        meanwhile = [vars(owner)[name] for owner, name, _ in REPLACED]
        assert all(new is not old for new, old in zip(meanwhile, before, strict=True))
        assert not gc.isenabled()
        raise KeyError("inside")
    assert [vars(owner)[name] for owner, name, _ in REPLACED] == before
    assert gc.isenabled()


@pytest.fixture(scope="module")
def called():
    """The names of the replaced functions that Numba calls while it compiles one kernel."""
    found = set()

    def noting(name, shorter):
        def call(*args, **kws):
            found.add(name)
            return shorter(*args, **kws)

        return call

    with without_repeats():
        for owner, name, _ in REPLACED:
            setattr(owner, name, noting(name, vars(owner)[name]))
        ptx(row_sums())
    return found


@pytest.mark.parametrize("name", [name for _, name, _ in REPLACED])
def test_each_function_is_used(name, called):
    """One that Numba no longer calls would be replaced for nothing."""
    assert name in called


def test_labels_grow_alike_with_each_kernel():
    """Names of variables have them, and the assembler cuts names: labels may not double with each
    device function that is inlined in another.
    """
    kernel, labels = kernels("standard", "mma")["standard_output"], []
    with without_repeats():
        for _ in range(3):
            ptx(kernel)
            labels.append(ir_utils.next_label())
    first, second = (after - before for before, after in itertools.pairwise(labels))
    assert first == second < 1000


def test_the_variables_alive_are_those_that_numba_finds(monkeypatch):
    """At every block of a kernel with loops, each time that Numba asks."""
    found = []
    numbas = analysis.compute_live_map

    def both(*graph):
        expected = numbas(*graph)
        assert _live_variables(*graph) == expected
        found.append(sum(map(len, expected.values())))
        return expected

    monkeypatch.setattr(analysis, "compute_live_map", both)
    ptx(row_sums())
    assert max(found) > 100
    assert len(found) > 10


def test_other_threads_wait_with_their_compiling():
    def small():
        cuda.compile(lambda X: None, (array_type(1),), cc=(9, 0), device=False, abi="numba")
        done.append(True)

    done = []
    small()
    thread = threading.Thread(target=small)
    with without_repeats():
        thread.start()
        thread.join(0.3)  # ten times what it takes
        assert len(done) == 1
    thread.join()
    assert len(done) == 2
