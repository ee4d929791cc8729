"""What stands in for parts of Numba's front end gives what they give, and goes away again."""

import gc
import itertools
import threading
from types import SimpleNamespace

import pytest
from compare_ptx import without_names
from numba import cuda
from numba.cuda.compiler import run_frontend
from numba.cuda.core import analysis, ir_utils
from offline import CAPABILITY
from test_compile import backward_kernel_of, kernel_of, standard_mma_kernel_of

from fa_numba.device import array_type
from fa_numba.device.front_end import WAYS, without_repeats
from fa_numba.device.front_end.variables import (
    live_variables,
    unread_left_out,
    values_where_assigned_once,
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


def test_each_part_is_numbas_again_afterwards():
    before = [vars(where).get(name) for where, name, _ in WAYS]
    with pytest.raises(KeyError, match="inside"), without_repeats():
        meanwhile = [vars(where)[name] for where, name, _ in WAYS]
        assert all(new is not old for new, old in zip(meanwhile, before, strict=True))
        assert not gc.isenabled()
        raise KeyError("inside")
    assert [vars(where).get(name) for where, name, _ in WAYS] == before
    assert gc.isenabled()


@pytest.fixture(scope="module")
def asked():
    """The ways that are asked for while one kernel is compiled."""
    found = set()

    def noting(way, shorter):
        def call(*args, **kws):
            found.add(way)
            return shorter(*args, **kws)

        return call

    with without_repeats():
        for way in WAYS:
            where, name, _ = way
            setattr(where, name, noting(way, vars(where)[name]))
        ptx(backward_kernel_of("row sums", "sm_90a", 64, True, True))
    return found


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way[1])
def test_each_part_is_used(way, asked):
    """A name that Numba no longer asks for would be a way to nowhere."""
    assert way in asked


def test_labels_grow_alike_with_each_kernel():
    """Names have them, and the assembler ends names: they may not double."""
    labels = []
    with without_repeats():
        for _ in range(4):
            ptx(backward_kernel_of("row sums", "sm_90a", 64, True, True))
            labels.append(ir_utils.next_label())
    _, *steps = (after - before for before, after in itertools.pairwise(labels))
    assert steps[0] == steps[1] < 10000


def test_what_nobody_reads_goes_before_types_are_looked_for():
    """What has an effect stays, and so does what this needs."""

    def kernel(X, n):
        unread = n
        _ = unread, cuda.grid
        i = cuda.grid(1)
        if i < n:
            X[i] = 2

    code = run_frontend(kernel)

    def statements():
        return [str(each) for block in code.blocks.values() for each in block.body]

    before = statements()
    unread_left_out(lambda self, state: True)(None, SimpleNamespace(func_ir=code))
    gone = [each for each in before if each not in statements()]
    assert sorted(line.split(" = ")[0].split(".")[0] for line in gone if line[0] != "$") == [
        *("_", "unread")
    ]
    assert any("build_tuple" in line for line in gone)
    assert not any("call" in line or "setitem" in line for line in gone)
    read = {v.name for b in code.blocks.values() for s in b.body for v in s.list_vars()}
    assert {"X", "i", "n"} <= read


def test_a_variable_is_a_value_where_its_one_assignment_came_before():
    """In all ways through the function, and when code is made of its blocks."""

    def kernel(X, n):
        i = cuda.grid(1)
        k = 0
        while k < n:
            if k == i:
                late = X[k]
            k += 1
        X[i] = late + i

    code = run_frontend(kernel)

    def values(blocks):
        lower = SimpleNamespace(func_ir=code, blocks=blocks)
        values_where_assigned_once(None)(lower)
        return {"i", "k", "late", "n"} & lower._singly_assigned_vars

    assert values(code.blocks) == {"i", "n"}  # late perhaps never comes before
    assert values(dict(reversed(code.blocks.items()))) == set()
    begin = code.blocks[min(code.blocks)].body
    begin[-1:-1] = [each for each in begin if str(each).startswith("i = ")]
    assert values(code.blocks) == {"n"}  # i is assigned twice


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
