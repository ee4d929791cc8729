"""Loops written out before Numba sees them, on their own and in a device function."""

import dis
import inspect
import re
import traceback

import numpy as np
import pytest
from numba import cuda as numba_cuda

from fa_numba import device as devices
from fa_numba.device import Kernel, array_type, cuda, device_function, float32, uint32
from fa_numba.unrolling import unrolled, with_loops_unrolled

STEPS = 3


def iterators(function):
    """How many loops are left in the function's code."""
    return sum(i.opname == "FOR_ITER" for i in dis.get_instructions(function.__code__))


# --- what is written -------------------------------------------------------------------------


def simple(found):
    for k in unrolled(4):
        found.append(k)
        found.append(-k)


def from_a_global(found):
    for k in unrolled(1, 2 * STEPS + 1, STEPS - 1):
        found.append(k)


def nested(found):
    for i in unrolled(3):
        for n in range(2):
            for j in unrolled(i, 3):
                found.append((i, n, j))


def beside_plain_loops(found):
    for i in range(2):
        found.append(i)
    if found:
        for i in unrolled(2):
            found.append(10 + i)
    else:
        for i in unrolled(2):
            found.append(20 + i)


def of_none(found):
    found.append("before")
    for k in unrolled(STEPS - 3):
        found.append(k)
    found.append("after")


# The plain loop of ``nested`` is written out three times.
LEFT = {simple: 0, from_a_global: 0, nested: 3, beside_plain_loops: 1, of_none: 0}


@pytest.mark.parametrize("function", LEFT, ids=lambda f: f.__name__)
def test_loops_are_written_out(function):
    made = with_loops_unrolled(function)
    rolled, written = [], []
    function(rolled)
    made(written)
    assert written == rolled and rolled
    assert iterators(made) == LEFT[function]
    assert "unrolled" not in made.__code__.co_names
    assert made.__name__ == function.__name__ and made.__qualname__ == function.__qualname__


def test_an_index_is_a_literal_wherever_it_is_read():
    def function(x):
        total = 0
        for k in unrolled(3):
            total += x[k] * k + (k if k > 1 else -k)
        return total

    made = with_loops_unrolled(function)
    assert made([5, 7, 11]) == function([5, 7, 11])
    assert "k" not in made.__code__.co_varnames


def test_bounds_of_the_function_around():
    def make(K, values):
        def function(found):
            for k in unrolled(K):
                for j in unrolled(len(values) + k):
                    found.append((k, j, values[0]))

        return function

    for K in (1, 3):
        function = make(K, ("a", "b"))
        made, want, found = with_loops_unrolled(function), [], []
        function(want)
        made(found)
        assert found == want and len(found) == sum(2 + k for k in range(K))
        assert iterators(made) == 0
        assert set(inspect.getclosurevars(made).nonlocals) == {"values"}  # K is in the code


def test_a_function_without_such_a_loop_is_left_alone():
    def function(found):
        for k in range(3):
            found.append(k)

    assert with_loops_unrolled(function) is function


def test_an_unrolled_loop_that_is_not_written_out_is_a_range():
    assert unrolled is range


# --- what is refused -------------------------------------------------------------------------


def breaks(x):
    for k in unrolled(4):
        if x[k]:
            break


def continues(x):
    for k in unrolled(4):
        if x[k]:
            continue
        x[k] = 1


def has_an_else(x):
    for k in unrolled(4):
        x[k] = 1
    else:
        x[0] = 2


@pytest.mark.parametrize("function", [breaks, continues, has_an_else], ids=lambda f: f.__name__)
def test_a_loop_with_another_way_out_is_refused(function):
    with pytest.raises(SyntaxError, match="an unrolled loop has no break, continue or else"):
        with_loops_unrolled(function)


def by_an_argument(x, count):
    for k in unrolled(count):
        x[k] = 1


def by_a_variable(x):
    count = 4
    for k in unrolled(count):
        x[k] = 1


def by_a_plain_index(x):
    for count in range(3):
        for k in unrolled(count):
            x[k] = 1


@pytest.mark.parametrize(
    "function", [by_an_argument, by_a_variable, by_a_plain_index], ids=lambda f: f.__name__
)
def test_a_bound_that_is_not_known_is_refused_by_name(function):
    with pytest.raises(SyntaxError, match="the bounds of an unrolled loop are not known.*count"):
        with_loops_unrolled(function)


# --- where an error stands -------------------------------------------------------------------


def failing(x):
    for k in unrolled(3):
        x.append(k)
        if k == 2:
            raise ValueError("here")


def last_frame(function):
    with pytest.raises(ValueError, match="here") as caught:
        function([])
    return traceback.extract_tb(caught.value.__traceback__)[-1]


def test_lines_are_those_of_the_source():
    rolled, written = last_frame(failing), last_frame(with_loops_unrolled(failing))
    assert (written.filename, written.lineno, written.line) == (
        rolled.filename,
        rolled.lineno,
        'raise ValueError("here")',
    )


# --- in a kernel -----------------------------------------------------------------------------


def make_sums(K, loop):
    """A kernel in which thread t sums k X[t, k] over the first K columns, k by ``loop``."""

    if loop == "unrolled":

        @device_function
        def weighted_sum(X, t):
            total = float32(0.0)
            for k in unrolled(K):
                total += X[t, k] * float32(k)
            return total

    else:

        @device_function
        def weighted_sum(X, t):
            total = float32(0.0)
            for k in range(K):
                total += X[t, k] * float32(k)
            return total

    def sums(X, Y):
        t = uint32(cuda.threadIdx.x)
        Y[t] = weighted_sum(X, t)

    return Kernel(sums, (array_type(2), array_type(1)), 32, 0)


@pytest.mark.parametrize("loop", ["unrolled", "range"])
def test_a_kernel_gives_the_same_either_way(device, loop):
    K = 40
    x = np.arange(32 * K, dtype=np.float32).reshape(32, K) / np.float32(16)
    kernel = make_sums(K, loop)
    with devices.using(device):
        if device == "emulator":
            y = np.zeros(32, np.float32)
            devices.launch(kernel, (1, 1, 1), (x, y))
        else:
            source, target = devices.to_gpu(x), devices.to_gpu(np.zeros(32, np.float32))
            views = [
                devices.DeviceArray(a.__cuda_array_interface__["data"][0], b.shape, b.strides, a, 4)
                for a, b in ((source, x), (target, np.zeros(32, np.float32)))
            ]
            devices.launch(kernel, (1, 1, 1), tuple(views))
            devices.synchronize()
            y = target.copy_to_host()
    # Multiples of 1/16 below 2^24 / 16: every sum is exact.
    assert np.array_equal(y, x @ np.arange(K, dtype=np.float32))


def test_compiled_without_a_loop():
    """LLVM itself leaves a loop without register tiles rolled: a branch back."""
    found = {}
    for loop in ("unrolled", "range"):
        kernel = make_sums(400, loop)
        options = {"cc": (9, 0), "device": False, "abi": "numba", "output": "ptx"}
        ptx, _ = numba_cuda.compile(kernel.function, kernel.signature, **options)
        found[loop] = len(re.findall(r"\bld\.(global\.)?[bf]32", ptx)), "bra" in ptx
    assert found["unrolled"] == (400, False)
    assert found["range"][0] < 400 and found["range"][1]
