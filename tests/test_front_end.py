"""What stands in for parts of Numba's front end gives what they give, and goes away again."""

import gc
import threading

import pytest
from compare_ptx import without_names
from numba import cuda
from numba.cuda import lowering
from numba.cuda.core import analysis, inline_closurecall, ir, postproc, ssa
from numba.types import BaseFunction
from offline import CAPABILITY
from test_compile import backward_kernel_of, kernel_of, standard_mma_kernel_of

from fa_numba.device import array_type
from fa_numba.device.front_end import live_variables, without_repeats

REPLACED = (
    (inline_closurecall.InlineWorker, "run_untyped_passes"),
    (postproc.PostProcessor, "run"),
    (analysis, "compute_live_map"),
    (ssa, "_run_ssa"),
    (BaseFunction, "get_call_type"),
    (lowering.Lower, "_find_singly_assigned_variable"),
    (ir.Inst, "_rec_list_vars"),
)


def ptx(kernel):
    text, _ = cuda.compile(
        kernel.function,
        kernel.signature,
        cc=CAPABILITY["sm_90a"],
        device=False,
        abi="numba",
        output="ptx",
        launch_bounds=(kernel.threads, kernel.min_blocks),
    )
    return without_names(text)


@pytest.mark.parametrize(
    "kernel",
    [
        pytest.param(lambda: backward_kernel_of("row sums", "sm_90a", 64, True, True), id="sums"),
        pytest.param(
            lambda: standard_mma_kernel_of("softmax", "sm_90a", 64, "float16", None), id="softmax"
        ),
        pytest.param(
            lambda: kernel_of("fa2", "sm_90a", 64, True, True), id="fa2", marks=pytest.mark.slow
        ),
    ],
)
def test_the_same_code_comes_out(kernel):
    with without_repeats():
        shorter = ptx(kernel())
    assert shorter == ptx(kernel())


def test_each_part_is_used_and_is_numbas_again_afterwards():
    before = [getattr(where, name) for where, name in REPLACED]
    with pytest.raises(KeyError, match="inside"), without_repeats():
        assert all(getattr(w, n) is not b for (w, n), b in zip(REPLACED, before, strict=True))
        assert "__deepcopy__" in vars(ir.Block) and not gc.isenabled()
        raise KeyError("inside")
    assert [getattr(where, name) for where, name in REPLACED] == before
    assert "__deepcopy__" not in vars(ir.Block) and gc.isenabled()


def test_the_variables_alive_are_those_that_numba_finds(monkeypatch):
    """At every block of a kernel with loops, each time that Numba asks."""
    found = []
    numbas = analysis.compute_live_map

    def both(*graph):
        expected = numbas(*graph)
        assert live_variables(*graph) == expected
        found.append(sum(map(len, expected.values())))
        return expected

    monkeypatch.setattr(analysis, "compute_live_map", both)
    ptx(backward_kernel_of("row sums", "sm_90a", 64, True, True))
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
