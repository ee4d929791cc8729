"""All lanes at once give what each gives alone: the emulator's masks, groups, orders and counts.

`test_emulator.py` has the detectors of one block. Here a kernel's control flow is held against
Python itself, which runs the same function once for every thread; then what parts a block into
groups, what blocks do to each other, orders of turns, costs by line, and traces.
"""

import contextlib
import ctypes
import inspect
import linecache
import random
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from numba import cuda, float32, int8, int16, int32, int64, uint8, uint32, uint64

import fa_numba
from fa_numba import device as devices
from fa_numba.emulator import (
    Access,
    Counts,
    GlobalHazard,
    OutOfBounds,
    TileAccess,
    Traffic,
    UninitialisedRead,
    launch,
    schedule,
    trace,
)
from fa_numba.emulator.lanes import floor_divide, modulo
from fa_numba.intrinsics.async_copy import commit_async, copy1_async, wait_async
from fa_numba.intrinsics.barriers import arrive_named, sync_named
from fa_numba.intrinsics.shared import shared_tile

# ---- Python runs a kernel thread by thread


def cast(name):
    kind = getattr(ctypes, f"c_{name}")
    return lambda x: kind(int(x)).value


INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint32", "uint64")
CASTS = {name: cast(name) for name in INTEGERS} | {"float32": float}


class Cells:
    """An array that gives numbers of Python and has no negative indices, or a thread's own one."""

    def __init__(self, values):
        self.values = values

    def at(self, index):
        index = index if isinstance(index, tuple) else (index,)
        if not all(0 <= i < n for i, n in zip(index, self.values.shape, strict=False)):
            raise IndexError(index)
        return index

    def __getitem__(self, index):
        found = self.values[self.at(index)]
        return Cells(found) if isinstance(found, np.ndarray) else found.item()

    def __setitem__(self, index, value):
        self.values[self.at(index)] = value


def of_thread(t, threads):
    """What stands for `cuda` in thread t."""

    def local(shape, dtype):
        return Cells(np.zeros(shape, np.float32 if dtype is CASTS["float32"] else np.int64))

    return SimpleNamespace(
        threadIdx=SimpleNamespace(x=t, y=0, z=0),
        blockDim=SimpleNamespace(x=threads, y=1, z=1),
        local=SimpleNamespace(array=local),
    )


def alone(kernel, threads, *args):
    """Run a kernel for one thread after the other, each on its own."""
    cells = [Cells(a) if isinstance(a, np.ndarray) else a for a in args]
    for t in range(threads):
        with mock.patch.dict(kernel.__globals__, cuda=of_thread(t, threads), **CASTS):
            kernel(*cells)


def agree(kernel, threads, *args):
    """The arrays after a kernel ran for all lanes at once, held against Python's bit for bit."""
    copies = [a.copy() if isinstance(a, np.ndarray) else a for a in args]
    alone(kernel, threads, *copies)
    launch(kernel, 1, threads, *args)
    for expected, found in zip(copies, args, strict=True):
        if isinstance(found, np.ndarray):
            np.testing.assert_array_equal(found, expected)
            assert found.tobytes() == expected.tobytes()  # with the sign of zeros
    return args


def data(threads, seed=0):
    return np.random.default_rng(seed).integers(-9, 10, (threads, 4))


# ---- values, statement by statement; control flow is that of the random programs below


def first_place(x, t, wanted):
    for j in range(4):
        if x[t, j] == wanted:
            return j
        if x[t, j] > 8:
            return -j
    if wanted < 0:
        return 10
    return 20


def sorted_pair(a, b):
    if a > b:
        return b, a
    return a, b


def factorial(n):
    made = 1
    while n > 1:
        made *= n
        n -= 1
    return made


def calls(x, out):
    t = cuda.threadIdx.x
    out[t, 0] = first_place(x, t, x[t % 3, 1])
    low, high = sorted_pair(x[t, 0], x[t, 1])
    if low < high:
        out[t, 1] = first_place(x, t, low) + factorial(high % 5)
    out[t, 2] = low * 100 + high
    out[t, 3] = factorial(min(t, 6)) + sorted_pair(x[t, 2], 2)[1]


def chosen(x, out):
    t = cuda.threadIdx.x
    n = x[t, 0]
    # a side that runs for other lanes would leave the array
    out[t, 0] = x[t, n] if 0 <= n < 4 else -1
    out[t, 1] = (1 if n > 5 else 2) if n > 0 else (3 if n > -5 else 4)
    out[t, 2] = x[n % 4, 3] if t % 2 else first_place(x, t, n) if n > 2 else 7
    if 0 <= n < 4 and x[n, n] > 0:
        out[t, 3] += 1
    if n < 0 or n > 3 or x[t, n] > 0:
        out[t, 3] += 2
    if not (n >= 0 and n < 4 and (x[t, n] < 0 or x[t, n] > 5)):
        out[t, 3] += 4


def compared(x, out):
    t = cuda.threadIdx.x
    a, b, c = x[t, 0], x[t, 1], x[t, 2]
    if a < b < c:
        out[t, 0] += 1
    if a <= b != c > -5:
        out[t, 0] += 2
    if not a:
        out[t, 0] += 4
    if not a < b:
        out[t, 0] += 8
    out[t, 1] = min(a, b, c) * 100 + max(a, b) - abs(c)
    out[t, 2] = max(a, 2) - min(3, b) + int(float(c) / 2)
    out[t, 3] = int(-7.5 + a) + int(a > b) + round(c / 4)


def truths(x, out):
    # truth values are the numbers 0 and 1; `and` and `or` give one of their sides
    t = cuda.threadIdx.x
    a, b = x[t, 0], x[t, 1]
    positive = a > 0
    both = positive and b > 0
    count = (a < b) + (b < x[t, 2]) + positive + positive - both
    for j in range(4):
        count += x[t, j] > 3
        count += -(x[t, j] < t) * 2
    out[t, 0] = count
    out[t, 1] = (a and 5) * 100 + (b or 7) + (a and x[t, 2])
    out[t, 2] = ~(a > 0) + (positive & (b > 0)) + (positive | both) + (True if t % 2 else positive)
    positive += a > 3
    out[t, 3] = positive * 2 + (not a) * 10 + (not a > 2) * 20


def some_assign(x, out):
    t = cuda.threadIdx.x
    if t % 3 == 0:
        late = t * 2
    if t % 3 == 0:
        out[t, 0] = late
    pair = (x[t, 2], 5)
    if x[t, 0] > 0:
        pair = (t, x[t, 1])
    one = two = three = 1
    if t % 5 != 3:
        (two, three), one = pair, pair[0]
    out[t, 1] = one + two * three
    for n in range(t % 4):
        last = n
    if t % 4 > 0:
        out[t, 2] = last
    for v, w in ((t, 1), (2, x[t, 3]), (4, 4)):
        if v == w:
            continue
        out[t, 3] = out[t, 3] * 10 + v


def began_again(x, out):
    # an array that a loop comes to again is a new one, for the lanes that do
    t = cuda.threadIdx.x
    for n in range(t % 3 + 1):
        a = cuda.local.array(2, int64)
        a[0] = n * 10
        a[1] = t
        out[t, 0] += a[0] + a[1]
    out[t, 1] = a[0]


def other_names(x, out):
    # the second line reads what the first has written
    t = cuda.threadIdx.x
    row = out[t]
    out[t, 0] += x[t, 0] * 2
    out[t, 1] += row[0] * 3


def wrapping(x, out):
    t = cuda.threadIdx.x
    a = x[t, 0] * 37
    out[t, 0] = int8(a) + uint8(a) * 1000 + int8(200)
    out[t, 1] = int16(a * 9001) - int32(a * 123456789)
    out[t, 2] = uint32(a * 987654321) + int64(a)
    wide = uint64(5)
    if x[t, 1] > 0:
        wide = uint64(-3)
    out[t, 3] = (wide >> uint64(40)) + (uint64(a) >> uint64(50))


KERNELS = [
    calls, chosen, compared, truths, some_assign,
    began_again, other_names, wrapping,
]  # fmt: skip


@pytest.mark.parametrize("threads", [1, 7, 40])
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.__name__)
def test_each_lane_gets_what_python_gives_it(kernel, threads):
    x, out = agree(kernel, threads, data(threads), np.zeros((threads, 4), np.int64))
    assert out.any() or threads == 1


def test_zeros_keep_their_sign():
    def kernel(out):
        t = cuda.threadIdx.x
        sign = 0.0
        if t % 3:
            sign = -0.0
        out[t] = sign

    out = np.ones(8)
    launch(kernel, 1, 8, out)
    assert np.signbit(out).tolist() == [t % 3 != 0 for t in range(8)]


def test_a_local_array_is_written_for_the_lanes_that_write():
    def kernel(out, writers, readers):
        t = cuda.threadIdx.x
        a = cuda.local.array(3, float32)
        if t < writers:
            a[1] = 5.0
            a[t % 2] = 3.0
        if t < 2:
            a[2] = t
        if t < readers:
            out[t] = a[1]
        if t == readers:
            a[1] = 1.0
            out[t] = a[1]
        if t < 2:
            out[t] += a[2]

    out = np.zeros(40)
    launch(kernel, 1, 40, out, 36, 36)
    assert out.tolist() == [5, 4] + [5, 3] * 17 + [1, 0, 0, 0]
    for writers, readers in ((36, 37), (0, 1), (33, 36)):
        with pytest.raises(UninitialisedRead) as info:
            launch(kernel, 1, 40, out, writers, readers)
        assert info.value.thread == (writers, 0, 0) and info.value.array == "a"
        assert "a[1] is read" in str(info.value)
        assert info.value.line.endswith("out[t] = a[1]")


def test_a_local_array_that_a_loop_comes_to_again_holds_nothing():
    def kernel(out, rounds):
        t = cuda.threadIdx.x
        for n in range(rounds * (t % 2) + 1):
            a = cuda.local.array(1, float32)
            if n == 0:
                a[0] = t
        out[t] = a[0]

    out = np.zeros(4)
    launch(kernel, 1, 4, out, 0)
    assert out.tolist() == [0, 1, 2, 3]
    with pytest.raises(UninitialisedRead) as info:
        launch(kernel, 1, 4, out, 1)
    assert info.value.thread == (1, 0, 0)


@pytest.mark.parametrize("far", [10, -12])
def test_an_index_out_of_range_is_that_of_a_lane_that_takes_part(far):
    def kernel(x, out, faulty):
        t = cuda.threadIdx.x
        if t > 5:
            n = t + far * (t == faulty)
            if n < 8 or t == faulty:
                out[t] = x[n]

    x, out = np.arange(8.0), np.zeros(16)
    launch(kernel, 1, 16, x, out, 99)
    assert out.tolist() == [0] * 6 + [6, 7] + [0] * 8
    with pytest.raises(OutOfBounds) as info:
        launch(kernel, 1, 16, x, out, 9, wraparound=False)
    assert info.value.thread == (9, 0, 0) and f"x[{9 + far}]" in str(info.value)


def test_divisors_that_are_powers_of_two():
    """The emulator shifts for them, and keeps Python's signs."""
    values = np.array([0, 1, 5, -1, -5, 2**62 + 3, 2**63 - 1, -(2**63)])
    for divisor in (1 << n for n in range(63)):
        for of_lanes, of_python in (
            (floor_divide, int.__floordiv__),
            (modulo, int.__mod__),
        ):
            wanted = [of_python(value, divisor) for value in values.tolist()]
            assert of_lanes(None, values, divisor).tolist() == wanted, divisor


def test_a_division_by_zero_is_that_of_a_lane_that_takes_part():
    def kernel(x, out, faulty):
        t = cuda.threadIdx.x
        if x[t] or t == faulty:
            out[t] = 12 // x[t]
        out[t] += 6 / x[t] if x[t] else 0

    x, out = np.array([0, 1, 2, 0, 4]), np.zeros(5)
    launch(kernel, 1, 5, x, out, 99)
    assert out.tolist() == [0, 18, 9, 0, 4.5]
    with pytest.raises(ZeroDivisionError) as info:
        launch(kernel, 1, 5, x, out, 3)
    assert "\n  in block (0, 0, 0), thread (3, 0, 0)\n" in str(info.value)


def test_lanes_hold_one_array():
    """Rows of one array by lane; of other arrays a clear refusal."""

    def kernel(x, y, out, kind):
        t = cuda.threadIdx.x
        if kind == 0:
            one, other = x[t], x[0]
        elif kind == 1:
            one, other = x[t], y[t]
        elif kind == 2:
            one, other = shared_tile(4, 4), shared_tile(4, 4)
        elif kind == 3:
            one, other = shared_tile(0, 4), shared_tile(4, 4)
        else:
            one, other = cuda.local.array(4, float32), cuda.local.array(4, float32)
        if kind > 1 and (t == 0 or kind > 3):
            one[1] = other[1] = 5
        cuda.syncthreads()
        if t % 2:
            one = other
        out[t] = one[1]

    x, y, out = np.arange(16.0).reshape(4, 4), np.zeros((4, 4)), np.zeros(4)
    launch(kernel, 1, 4, x, y, out, 0)
    assert out.tolist() == [1, 1, 9, 1]
    launch(kernel, 1, 4, x, y, out, 2, shared_bytes=32)
    assert out.tolist() == [5] * 4
    for kind in (1, 3, 4):
        with pytest.raises(
            TypeError,
            match="holds .*array .* in some lanes and .* in other lanes. .* not support",
        ) as info:
            launch(kernel, 1, 4, x, y, out, kind, shared_bytes=32)
        assert "\n  at test_lockstep.py:" in str(info.value) and "_fa_" not in str(info.value)


def test_an_array_of_a_tuple_is_called_what_the_source_calls_it():
    def kernel(out, which):
        t = cuda.threadIdx.x
        if t < 9:
            one, other = cuda.local.array(2, float32), cuda.local.array(2, float32)
            last = same = cuda.local.array(3, float32)
        if which == "same":
            last[3] = 1
        elif which == "other":
            other[2] = 1
        elif t > 3:
            one = other
        out[t] = one[0] + same[0]

    for which, error, message in (
        ("same", OutOfBounds, "^last.3. is outside the array of 3 elements"),
        ("other", OutOfBounds, "^other.2. is outside the array of 2 elements"),
        ("both", TypeError, "array 'other' .made at test_lockstep.py:.*and array 'one' .made"),
    ):
        with pytest.raises(error, match=message) as info:
            launch(kernel, 1, 8, np.zeros(8), which)
        assert "_fa_" not in str(info.value)


def test_an_array_that_is_stored_as_a_number_is_refused():
    numbers = np.zeros((2, 16))

    def stored(out):
        out[cuda.threadIdx.x] = numbers

    def shared(out):
        s = cuda.shared.array(16, float32)
        s[cuda.threadIdx.x] = numbers
        out[0] = s[0]

    for kernel, name in ((stored, "out"), (shared, "s")):
        said = f"^a value stored to an element of {name} must be one number, got an array of shape"
        with pytest.raises(ValueError, match=said) as info:
            launch(kernel, 1, 16, np.zeros(16))
        place = f"\n  in block (0, 0, 0), thread (0, 0, 0), array {name}\n  at test_lockstep.py:"
        assert place in str(info.value)


@pytest.mark.parametrize(
    "body, message",
    [
        ("for j in range(2):\n        pass\n    else:\n        out[0] = 1", "else of a loop"),
        ("try:\n        out[0] = 1\n    finally:\n        pass", "a try statement"),
        ("if (n := t) > 1:\n        out[0] = n", "assignment within an expression"),
        ("yield t", "a yield statement"),
    ],
)
def test_what_kernels_do_not_have_is_refused(body, message):
    source = f"def kernel(out):\n    t = cuda.threadIdx.x\n    {body}\n"
    with pytest.raises(ValueError, match=message):
        launch(made(source)["kernel"], 1, 4, np.zeros(4))


def test_a_function_without_source_is_refused():
    names = {"cuda": cuda}
    exec("def kernel(out):\n    out[0] = 1\n", names)
    with pytest.raises(
        ValueError, match="got function kernel (.*), whose source is not available$"
    ):
        launch(names["kernel"], 1, 1, np.zeros(1))


# ---- random programs


def made(source):
    """The names of a source text that the emulator can read."""
    made.count += 1
    file = f"<program {made.count}>"
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    types = (int8, int16, int32, int64, uint8, uint32, uint64, float32)
    names = {t.name: t for t in types} | {"cuda": cuda, "__name__": f"program_{made.count}"}
    names |= {"sync_named": sync_named, "arrive_named": arrive_named}
    exec(compile(source, file, "exec"), names)
    return names


made.count = 0


class Program:
    """The source of a random kernel, of integers a to d and a local array L, and its function."""

    NAMES = "abcd"

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.lines = []
        self.serial = 0
        self.inside = False  # of a device function: no arrays

    def pick(self, *choices):
        return self.random.choice(choices)

    def value(self, depth=2):
        """An expression that is an integer; small, since every assignment takes a remainder."""
        r, v = self.random, self.value
        if depth == 0 or r.random() < 0.2:
            arrays = () if self.inside else (f"x[t, {r.randrange(4)}]", f"L[{r.randrange(3)}]")
            return self.pick(*self.NAMES, *self.NAMES, str(r.randint(-5, 9)), "t", *arrays)
        less = depth - 1
        kinds = [
            lambda: f"({v(less)} {self.pick(*'+-*&|^')} {v(less)})",
            lambda: f"({v(less)} {self.pick('//', '%')} {self.pick('3', '-4', 'nonzero')})".replace(
                "nonzero", f"(1 + abs({v(0)}))"
            ),
            lambda: f"({v(less)} {self.pick('<<', '>>')} ({v(0)} & 3))",
            lambda: f"{self.pick('min', 'max')}({v(less)}, {v(less)})",
            lambda: f"{self.pick('abs', '-', '~', 'int', 'int8', 'uint8', 'int32')}({v(less)})",
            lambda: f"({v(less)} if {self.test(less)} else {v(less)})",
            lambda: f"(({self.test(0)}) + {v(less)})",
            lambda: f"int({v(less)} / 4)",
        ]
        if not self.inside:
            kinds += [
                lambda: f"L[{v(less)} % 3]",
                lambda: f"x[t, {v(0)} & 3]",
                lambda: f"helper({v(less)}, {v(0)})",
            ]
        return r.choice(kinds)()

    def test(self, depth=2):
        r = self.random
        if depth > 0 and r.random() < 0.4:
            joined = f" {self.pick('and', 'or')} ".join(
                self.test(depth - 1) for _ in range(r.randint(2, 3))
            )
            return self.pick("({})", "not ({})").format(joined)
        order = self.pick("<", ">", "<=", ">=", "==", "!=")
        made = [
            f"{self.value(1)} {order} {self.value(1)}",
            f"{self.value(0)} {order} {self.value(0)} {self.pick('<', '>=')} {self.value(0)}",
            f"{self.value(0)} % 3 {self.pick('==', '!=')} 0",
            f"not {self.value(0)}",
        ]
        if not self.inside:
            # the second side is out of range for those that the first keeps from it
            made.append(f"(0 <= a < 3 and L[a] > {r.randint(-2, 4)})")
        return r.choice(made)

    def add(self, depth, text):
        self.lines.append("    " * depth + text)

    def block(self, depth, loop, most):
        for _ in range(self.random.randint(1, most)):
            self.statement(depth, loop)

    def statement(self, depth, loop):
        r, name = self.random, self.pick(*self.NAMES)
        kinds = ["assign"] * 4 + ["augment"] * 2 + ["pair"]
        kinds += ["if"] * 3 + ["for", "while"] if depth < 4 else []
        kinds += ["break", "continue"] if loop else []
        kinds += ["return"] if depth > 1 else []
        kinds += [] if self.inside else ["element", "element +=", "out", "multiply-add"]
        kind = r.choice(kinds)
        if kind == "assign":
            self.add(depth, f"{name} = {self.value(3)} % 61")
        elif kind == "augment":
            self.add(depth, f"{name} {self.pick('+', '-', '^', '|')}= {self.value()} % 17")
            self.add(depth, f"{name} %= 61")
        elif kind == "pair":
            other = self.pick(*self.NAMES.replace(name, ""))
            self.add(depth, f"{name}, {other} = {other}, {self.value()} % 61")
        elif kind == "element":
            self.add(depth, f"L[{self.value(1)} % 3] = {self.value()} % 61")
        elif kind == "element +=":
            self.add(depth, f"L[{r.randrange(3)}] {self.pick('+', '-')}= {self.value()} % 61")
        elif kind == "multiply-add":
            for _ in range(r.randint(1, 3)):
                self.add(depth, f"L[{r.randrange(3)}] += {self.value(0)} * ({self.value(1)} % 7)")
            self.add(depth, "L[0] %= 61; L[1] %= 61; L[2] %= 61")
        elif kind == "out":
            self.add(depth, f"out[t, {r.randrange(7)}] {self.pick('', '+', '-')}= {self.value()}")
        elif kind in ("break", "continue"):
            self.add(depth, f"if {self.test(1)}:")
            self.add(depth + 1, kind)
        elif kind == "return":
            self.add(depth, f"if {self.test(1)}:")
            self.add(depth + 1, f"return {self.value()} % 61" if self.inside else "return")
        elif kind == "if":
            self.add(depth, f"if {self.test()}:")
            self.block(depth + 1, loop, 3)
            if r.random() < 0.3:
                self.add(depth, f"elif {self.test(1)}:")
                self.block(depth + 1, loop, 2)
            if r.random() < 0.5:
                self.add(depth, "else:")
                self.block(depth + 1, loop, 3)
        elif kind == "for":
            self.serial += 1
            ends = self.pick(
                "3", f"{self.value(1)} % 4", f"{self.value(0)} % 3, {self.value(0)} % 5",
                f"{self.value(0)} % 5, {self.value(0)} % 3, {self.pick('-1', '2', '-2')}",
            )  # fmt: skip
            self.add(depth, f"for i{self.serial} in range({ends}):")
            self.add(depth + 1, f"{name} = ({name} + i{self.serial} * {self.value(0)}) % 61")
            self.block(depth + 1, True, 3)
        elif kind == "while":
            self.serial += 1
            turn = f"w{self.serial}"
            self.add(depth, f"{turn} = 0")
            self.add(depth, f"while {turn} < {self.value(0)} % 4 or ({self.test(1)}):")
            self.add(depth + 1, f"{turn} += 1")
            self.add(depth + 1, f"if {turn} > 4:")
            self.add(depth + 2, "break")
            self.block(depth + 1, True, 3)

    def source(self):
        self.inside = True
        self.add(0, "def helper(a, t):")
        self.add(1, "a, b, c, d = a % 61, t % 61, 2, a & t")
        self.block(1, False, 3)
        self.add(1, "return (a + b + c * d) % 61")
        self.inside = False
        self.add(0, "def kernel(x, out):")
        self.add(1, "t = cuda.threadIdx.x")
        self.add(1, "a, b, c, d = x[t, 0], x[t, 1], t % 3, 5")
        self.add(1, "L = cuda.local.array(3, int64)")
        self.add(1, "for i in range(3):")
        self.add(2, "L[i] = x[t, i] + i")
        self.block(1, False, 7)
        for n, name in enumerate(["a", "b", "c", "d", "L[0]", "L[1]", "L[2]"]):
            self.add(1, f"out[t, {n}] += {name}")
        return "\n".join(self.lines) + "\n"


PROGRAMS = 32


@pytest.mark.parametrize("part", range(4))
def test_random_programs(part):
    for seed in range(part, PROGRAMS, 4):
        source = Program(seed).source()
        threads = 8 + seed % 33
        x, out = data(threads, seed), np.zeros((threads, 7), np.int64)
        try:
            agree(made(source)["kernel"], threads, x, out)
        except Exception as error:
            error.add_note(f"seed {seed}, {threads} threads:\n{source}")
            raise


# ---- lanes that part from the others


def pipeline(x, out):
    # warp 0 fills two halves of s in turn, warp 1 empties them
    s = cuda.shared.array(64, float32)
    t = cuda.threadIdx.x
    lane = t % 32
    out[cuda.blockIdx.x, 64 + t] += 1
    if t < 32:
        for n in range(x.shape[0]):
            if n > 1:
                sync_named(3 + n % 2, 64)
            s[n % 2 * 32 + lane] = x[n, lane]
            arrive_named(1 + n % 2, 64)
    else:
        total = 0.0
        for n in range(x.shape[0]):
            sync_named(1 + n % 2, 64)
            total = total * 2 + s[n % 2 * 32 + 31 - lane]
            if n + 2 < x.shape[0]:
                arrive_named(3 + n % 2, 64)
        out[cuda.blockIdx.x, lane] = total


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_a_producer_and_a_consumer(rounds, seed):
    """They part, so that the block begins again; nothing of its first beginning is left."""
    x = np.random.default_rng(rounds).integers(0, 99, (rounds, 32)).astype(np.float32)
    out = np.zeros((3, 128), np.float32)
    out[:, 64:] = 10
    with taking_turns(seed), trace() as moves:
        counts = launch(pipeline, 3, 64, x, out)
    weights = 2.0 ** np.arange(rounds)[::-1, None]
    assert (out[:, :32] == (x * weights).sum(0)[::-1]).all()
    assert (out[:, 32:64] == 0).all() and (out[:, 64:] == 11).all()
    assert counts.loads == {"x": 3 * 32 * rounds, "out": 3 * 64}
    assert counts.stores == {"out": 3 * 96}
    assert counts.instructions == {
        "load": 3 * (2 * rounds + 2),
        "store": 3 * (rounds + 3),
        "barrier": 3 * (2 * rounds + 2 * max(0, rounds - 2)),
    }
    assert counts.total(array="x") == Traffic(3 * rounds, 3 * rounds * 4)
    assert counts.total(array="s", kind="store") == Traffic(3 * rounds, 0, 3 * rounds, 0)
    for array in ("x", "out"):
        for kind, elements in (("load", counts.loads), ("store", counts.stores)):
            moved = sum(m.elements for m in moves if (m.array, m.kind) == (array, kind))
            assert moved == elements[array]
    assert [m.step for m in moves] == list(range(len(moves)))


def taking_turns(seed):
    return contextlib.nullcontext() if seed is None else schedule(seed)


@pytest.mark.parametrize("seed", [None, 3, 4])
def test_each_warp_waits_where_the_others_do_not(seed):
    """Four warps part one after the other: each barrier has a partner of its own."""

    def kernel(out, total):
        t = cuda.threadIdx.x
        w = t // 32
        s = cuda.shared.array(4, float32)
        out[t] += 1
        out[t] *= 2
        cuda.atomic.add(total, 0, 1)
        if t % 32 == 0:
            s[w] = w + 1
        if w == 0:
            sync_named(1, 64)
            sync_named(2, 64)
            sync_named(3, 64)
        elif w == 1:
            sync_named(1, 64)
        elif w == 2:
            sync_named(2, 64)
        else:
            sync_named(3, 64)
        if w == 0:
            out[t] += s[1] + s[2] + s[3]
        else:
            out[t] += s[0]

    out, total = np.full(128, 3.0), np.zeros(1, np.int64)
    with taking_turns(seed):
        counts = launch(kernel, 1, 128, out, total)
    assert out.tolist() == [17] * 32 + [9] * 96
    assert total[0] == 128
    assert counts.loads == {"out": 3 * 128, "total": 128}
    assert counts.instructions["barrier"] == 6 and counts.instructions["atomic"] == 4


def test_barriers_under_branches_that_a_warp_takes():
    def kernel(x, out):
        t = cuda.threadIdx.x
        s = cuda.shared.array(96, float32)
        s[t] = x[t]
        if x[t] >= 0:  # all of the block
            cuda.syncthreads()
        if t < 32:
            out[t] = cuda.shfl_sync(0xFFFFFFFF, s[95 - t], 3)
            s[t] = t
            cuda.syncwarp()
            out[t] += s[31 - t]
        elif t >= 64:
            for n in range(t // 32):
                sync_named(1 + n, 32)
                out[t] += cuda.shfl_xor_sync(0xFFFFFFFF, x[t], 1)
        if t < 64:
            sync_named(5, 64)

    x, out = np.arange(96.0), np.zeros(96)
    counts = launch(kernel, 1, 96, x, out)
    expected = [92 + 31 - t for t in range(32)] + [0] * 32 + [2 * (t ^ 1) for t in range(64, 96)]
    assert out.tolist() == expected
    assert counts.instructions["barrier"] == 3 + 1 + 2 + 2
    assert counts.instructions["shuffle"] == 1 + 2


def test_warps_take_tiles_of_their_own():
    def kernel(out):
        t = cuda.threadIdx.x
        s = shared_tile(t // 32 * 32, 32)
        s[t % 32] = float32(t)
        cuda.syncwarp()
        out[t] = s[31 - t % 32]
        cuda.syncthreads()
        whole = shared_tile(0, 128)
        out[t] += whole[127 - t]

    out = np.zeros(128)
    launch(kernel, 1, 128, out, shared_bytes=512)
    assert out.tolist() == [t // 32 * 32 + 31 - t % 32 + 127 - t for t in range(128)]


# ---- between blocks


def touched(x, y, first, second):
    # one thread of each of two blocks touches an element, in ways that are numbered
    b, t = cuda.blockIdx.x, cuda.threadIdx.x
    if t == 3 + b:
        kind = second if b else first
        if kind == 0:
            y[b] = x[1, 2]
        elif kind == 1:
            x[1, 2] = 5.0
        elif kind == 2:
            cuda.atomic.add(x, (1, 2), 1.0)
        elif kind == 3:
            s = cuda.shared.array(1, float32)
            copy1_async(s, 0, x, 1, 2, 1)
            commit_async()
            wait_async()


READ, WRITE, UPDATE, COPY = range(4)
LINES = ["y[b] = x[1, 2]", "x[1, 2] = 5.0", "cuda.atomic.add(x, (1, 2), 1.0)", "copy1_async("]


@pytest.mark.parametrize("second", [READ, WRITE, UPDATE, COPY])
@pytest.mark.parametrize("first", [READ, WRITE, UPDATE, COPY])
def test_two_blocks_touch_one_element(first, second):
    x, y = np.zeros((2, 4), np.float32), np.zeros(2, np.float32)
    kinds = {first, second}
    if kinds <= {READ, COPY} or kinds == {UPDATE}:
        launch(touched, 2, 32, x, y, first, second)
        return
    with pytest.raises(GlobalHazard) as info:
        launch(touched, 2, 32, x, y, first, second)
    error = info.value
    assert (error.block, error.thread, error.array) == ((1, 0, 0), (4, 0, 0), "x")
    assert "test_lockstep.py:" in error.line and LINES[second] in error.line
    does = ("reads", "overwrites", "atomically updates", "reads")[second]
    did = ("read", "wrote", "atomically updated", "read")[first]
    assert f"this thread {does} x[1, 2], which block (0, 0, 0) {did}." in str(error)
    found = set()
    for seed in range(8):
        with pytest.raises(GlobalHazard) as info, schedule(seed):
            launch(touched, 2, 32, x, y, first, second)
        found.add(info.value.thread[0])
    assert found == {3, 4}  # the later one says it, whichever that is
    launch(touched, 1, 32, x, y, first, second)


def overlapping(a, b, where):
    if cuda.blockIdx.x == 0:
        a[where] = 1.0
    elif cuda.blockIdx.x == 2:
        b[2] += 1.0


@pytest.mark.parametrize(
    "views, meets",
    [
        (lambda m: (m[:8], m[4:12]), 6),
        (lambda m: (m[::2], m[1::1]), None),
        (lambda m: (m[1::2], m), None),
        (lambda m: (m, m[::-1]), 13),
        (lambda m: (m[::2], m[::3]), 3),
        (lambda m: (m[::-2], m[5:]), 4),
        (lambda m: (m, m), 2),
        (lambda m: (m[:8], m[8:]), None),
    ],
)
def test_views_of_one_buffer_share_their_elements(views, meets):
    sizes = [len(v) for v in views(np.zeros(16))]
    for where in range(sizes[0]):
        memory = np.zeros(16)
        a, b = views(memory)
        index = np.arange(16)
        same = views(index)[0][where] == views(index)[1][2]
        assert not same or meets in (None, where)
        if not same:
            launch(overlapping, 3, 1, a, b, where)
            continue
        with pytest.raises(GlobalHazard) as info:
            launch(overlapping, 3, 1, a, b, where)
        assert info.value.array == "b" and info.value.block == (2, 0, 0)
        assert "reads b[2], which block (0, 0, 0) wrote" in str(info.value)


def test_several_blocks_are_named_so():
    def kernel(x, out):
        b = cuda.blockIdx.x + 2 * cuda.blockIdx.y
        if b < 3:
            out[b] = x[5]
        else:
            x[5] = 1.0

    with pytest.raises(GlobalHazard) as info:
        launch(kernel, (2, 2), 1, np.zeros(8), np.zeros(4))
    assert info.value.block == (1, 1, 0)
    assert "overwrites x[5], which several blocks read." in str(info.value)


def test_a_block_that_begins_again_is_no_hazard_to_itself():
    x = np.ones((2, 32), np.float32)
    launch(pipeline, 4, 64, x, np.zeros((4, 128), np.float32))


# ---- another order of turns


def turns(order, count, warps):
    b, t = cuda.blockIdx.x + 3 * cuda.blockIdx.y, cuda.threadIdx.x
    if t == 0:
        order[cuda.atomic.add(count, 6, 1)] = b
    cuda.syncthreads()
    if t % 32 == 0:
        warps[b, cuda.atomic.add(count, b, 1)] = t // 32


def order_of(seed):
    order, count = np.full(6, -1), np.zeros(7, np.int64)
    warps = np.full((6, 4), -1)
    with taking_turns(seed):
        launch(turns, (3, 2), 128, order, count, warps)
    return order.tolist(), warps.tolist()


def test_a_seed_decides_the_order():
    blocks, warps = order_of(None)
    assert blocks == list(range(6)) and warps == [[0, 1, 2, 3]] * 6
    found = {seed: order_of(seed) for seed in range(12)}
    for blocks, warps in found.values():
        assert sorted(blocks) == list(range(6))
        assert all(sorted(w) == [0, 1, 2, 3] for w in warps)
    assert len({str(blocks) for blocks, _ in found.values()}) > 6
    assert len({str(warps) for _, warps in found.values()}) > 6
    assert all(order_of(seed) == found[seed] for seed in (0, 7))
    assert order_of(np.int64(3)) == found[3]
    assert order_of(None)[0] == list(range(6))  # as before


def test_warps_are_grouped_anew_in_every_block():
    """Warps of one group take each step together, those of several one after the other."""

    def kernel(count, first, second):
        b, t = cuda.blockIdx.x, cuda.threadIdx.x
        if t % 32 == 0:
            first[b, t // 32] = cuda.atomic.add(count, b, 1)
            second[b, t // 32] = cuda.atomic.add(count, b, 1)

    blocks = 60
    count, first, second = np.zeros(blocks, np.int64), *np.zeros((2, blocks, 4), np.int64)
    with schedule(0):
        launch(kernel, blocks, 128, count, first, second)
    together = np.sort(second - first, axis=1).tolist()
    # three groups of four warps: two or more are in one
    assert all(found[-1] > 1 for found in together)
    assert [1, 1, 2, 2] in together and [1, 3, 3, 3] in together


@pytest.mark.parametrize("seed", [-1, 1.5, True, "3", None, np.float32(2)])
def test_a_seed_is_an_integer_from_0_on(seed):
    allowed = "seed must be an integer of at least 0, got"
    with pytest.raises(ValueError, match=allowed), schedule(seed):
        pass


def attention(algorithm, dtype, seed):
    """Output, logsumexp and gradients of a small problem, all as bytes."""
    rng = np.random.default_rng(0)
    q, k, v, dout = rng.standard_normal((4, 1, 1, 37, 8)).astype(dtype)
    forward = getattr(fa_numba, f"flash_attention_{algorithm}")
    backward = getattr(fa_numba, f"flash_attention_{algorithm}_backward")
    tiles = fa_numba.Tiles(16, 32) if dtype == np.float32 else None
    with devices.using("emulator"), taking_turns(seed):
        out, lse = forward(q, k, v, causal=True, return_lse=True, tiles=tiles)
        gradients = backward(dout, q, k, v, out, lse, causal=True, tiles=tiles)
    return [np.asarray(a).tobytes() for a in (out, lse, *gradients)]


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("algorithm", [1, 2])
def test_kernels_give_the_same_bits_in_any_order(algorithm, dtype):
    expected = attention(algorithm, dtype, None)
    assert attention(algorithm, dtype, 1) == expected
    assert attention(algorithm, dtype, 2) == expected


# ---- counts


def moved(x, y, z):
    t = cuda.threadIdx.x
    s = cuda.shared.array(1024, float32)
    s[t] = x[t]
    cuda.syncthreads()
    s[t * 32 % 1024 + t // 32] = x[2 * t + 1]
    cuda.syncthreads()
    if t % 32 < 16:
        y[t] = s[2 * t % 64] + s[0]
    if t == 5:
        cuda.atomic.add(z, t, cuda.shfl_sync(1 << 5, s[t], 5))
    if t >= 32:
        z[t] = x[7]


def line_of(kernel, text):
    """ "file.py:123: source" of the line of a kernel that is this text."""
    lines, first = inspect.getsourcelines(kernel)
    (number,) = [n for n, line in enumerate(lines, first) if line.strip() == text]
    return f"test_lockstep.py:{number}: {text}"


def test_each_line_costs_what_it_costs():
    x, y, z = np.ones(256, np.float32), np.zeros(64), np.zeros(64, np.float32)
    counts = launch(moved, 1, 64, x, y, z)

    def access(array, kind, text):
        space = "shared" if array == "s" else "global"
        return Access("moved", array, space, kind, line_of(moved, text))

    assert counts.traffic == {
        # two warps of 128 bytes: 4 sectors each, and a wavefront
        access("x", "load", "s[t] = x[t]"): Traffic(2, 8),
        access("s", "store", "s[t] = x[t]"): Traffic(2, 0, 2, 0),
        # every other word of 256 bytes; a bank for all 32 lanes
        access("x", "load", "s[t * 32 % 1024 + t // 32] = x[2 * t + 1]"): Traffic(2, 16),
        access("s", "store", "s[t * 32 % 1024 + t // 32] = x[2 * t + 1]"): Traffic(2, 0, 64, 62),
        # half warps: the words of 16 lanes two apart are in 16 banks, then one word for all
        access("s", "load", "y[t] = s[2 * t % 64] + s[0]"): Traffic(4, 0, 4, 0),
        access("y", "store", "y[t] = s[2 * t % 64] + s[0]"): Traffic(2, 8),
        access("s", "load", "cuda.atomic.add(z, t, cuda.shfl_sync(1 << 5, s[t], 5))"): Traffic(
            1, 0, 1, 0
        ),
        access("z", "atomic", "cuda.atomic.add(z, t, cuda.shfl_sync(1 << 5, s[t], 5))"): Traffic(
            1, 1
        ),
        access("x", "load", "z[t] = x[7]"): Traffic(1, 1),
        access("z", "store", "z[t] = x[7]"): Traffic(1, 4),
    }
    assert counts.instructions == {
        "load": 10, "store": 7, "barrier": 4, "shuffle": 1, "atomic": 1,
    }  # fmt: skip
    assert counts.loads == {"x": 64 + 64 + 32, "z": 1}
    assert counts.stores == {"y": 32, "z": 1 + 32}
    assert counts.load_bytes == {"x": 640, "z": 4} and counts.store_bytes == {"y": 256, "z": 132}


def test_multiply_adds_are_counted_by_warp():
    def kernel(out):
        t = cuda.threadIdx.x
        a = cuda.local.array(2, float32)
        a[0] = a[1] = 1.0
        for _ in range(3):
            a[0] += a[1] * 2.0
            a[1] += t * 2.0
        if t < 32:
            a[0] += a[1] * 0.5
        out[t] = a[0]

    out = np.zeros(96)
    counts = launch(kernel, 1, 96, out)
    assert counts.instructions["fma"] == 3 * 6 + 1
    t = np.arange(96)
    expected = 1 + 2 * 1 + 2 * (1 + 2 * t) + 2 * (1 + 4 * t)
    expected = expected + np.where(t < 32, 0.5 * (1 + 6 * t), 0)
    assert out.tolist() == expected.tolist()


def test_sectors_are_those_that_lanes_touch():
    def kernel(x, out, first, step, lanes):
        t = cuda.threadIdx.x
        if t < lanes:
            out[t] = x[first + step * t]

    for dtype in (np.float64, np.float32, np.int16, np.int8):
        size = np.dtype(dtype).itemsize
        for first, step, lanes in ((0, 1, 32), (1, 1, 32), (3, 5, 20), (9, 0, 32), (40, -1, 8)):
            x, out = np.zeros(256, dtype), np.zeros(32)
            counts = launch(kernel, 1, 32, x, out, first, step, lanes)
            sectors = {(first + step * t) * size // 32 for t in range(lanes)}
            assert counts.total(array="x") == Traffic(1, len(sectors))
            # where a view begins in its memory counts
            counts = launch(kernel, 1, 32, x[3:], out, first, step, lanes)
            sectors = {(3 + first + step * t) * size // 32 for t in range(lanes)}
            assert counts.total(array="x") == Traffic(1, len(sectors))


def test_totals_are_over_the_fields_asked_for():
    arrays = np.ones(256, np.float32), np.zeros(64), np.zeros(64, np.float32)
    counts = launch(moved, 1, 64, *arrays)
    assert counts.total() == sum(counts.traffic.values(), Traffic())
    assert counts.total(space="shared") == Traffic(9, 0, 71, 62)
    assert counts.total(space="shared", kind="load") == Traffic(5, 0, 5, 0)
    assert counts.total(array="x", kind="load") == counts.total(array="x") == Traffic(5, 25)
    assert counts.total(kernel="another") == Traffic()
    with pytest.raises(
        TypeError, match="the arguments of total must be among kernel, array, .*, got colour"
    ):
        counts.total(colour="red")
    twice = counts + launch(moved, 1, 64, *arrays)
    assert twice.total(space="shared") == Traffic(18, 0, 142, 124)
    assert twice.instructions["load"] == 20 and counts.instructions["load"] == 10
    assert Counts().total() == Traffic()
    fewer = launch(moved, 1, 64, *arrays, uncounted=["x"])
    assert fewer.total(array="x") == Traffic() and "x" not in fewer.loads
    assert fewer.total(space="shared") == counts.total(space="shared")


# ---- traces


def doubled(x, n, t):
    return 2 * x[n, t]


def tiles(x, w, y, total):
    t = cuda.threadIdx.x
    s = cuda.shared.array(48, float32)
    # Alg. 7, line 1: load
    for n in range(3):
        s[16 * n + t] = x[n + 1, t]
    cuda.syncthreads()
    # FA-9: scale
    for n in range(2):
        if t < 9:
            s[16 * n + t] += doubled(x, n, t) * w[t]
        cuda.syncthreads()
    for n in range(2):
        y[n, 2 + t] = s[16 * n + t]
        cuda.syncthreads()
    # any other comment
    cuda.atomic.add(total, cuda.blockIdx.x, 1)


def test_a_trace_is_of_tiles():
    x, w = np.ones((5, 16), np.float32), np.ones(16)
    y, total = np.zeros((2, 20), np.float32), np.zeros(2, np.int32)

    def place(text):
        return line_of(tiles, text).rsplit(": ", 1)[0]

    def tile(step, array, rows, columns, kind, elements, size, line, text, block=0):
        return TileAccess(
            "tiles", (block, 0, 0), step, array, rows, columns, kind, elements, elements * size,
            line, place(text),
        )  # fmt: skip

    with trace() as moves:
        launch(tiles, 1, 16, x, w, y, total)
        launch(tiles, 1, 16, x, w, y, total)
    load, scale = "Alg. 7, line 1: load", "FA-9: scale"
    first, second = "s[16 * n + t] = x[n + 1, t]", "s[16 * n + t] += doubled(x, n, t) * w[t]"
    once = [
        tile(0, "x", (1, 4), (0, 16), "load", 48, 4, load, first),
        # a barrier between
        tile(1, "x", (0, 1), (0, 9), "load", 9, 4, scale, second),
        tile(2, "w", (0, 9), (0, 1), "load", 9, 8, scale, second),
        tile(3, "x", (1, 2), (0, 9), "load", 9, 4, scale, second),
        tile(4, "w", (0, 9), (0, 1), "load", 9, 8, scale, second),
        tile(5, "y", (0, 1), (2, 18), "store", 16, 4, scale, "y[n, 2 + t] = s[16 * n + t]"),
        tile(6, "y", (1, 2), (2, 18), "store", 16, 4, scale, "y[n, 2 + t] = s[16 * n + t]"),
        tile(
            7, "total", (0, 1), (0, 1), "atomic", 16, 4, scale,
            "cuda.atomic.add(total, cuda.blockIdx.x, 1)",
        ),
    ]  # fmt: skip
    assert moves == once + once  # steps are of a launch
    launch(tiles, 1, 16, x, w, y, total)
    assert len(moves) == 16  # outside


# ---- sources


SOURCE = """
def make(cuda):
    def kernel(
        x,
    ):
        # the first row alone
        if cuda.threadIdx.x > 2:
            x[CHANGED] = 1.0
# beside
        x[0] += 1.0

    return kernel
"""


@pytest.mark.parametrize("index", [7, 9])
def test_copies_of_a_source_have_their_own_lines(index):
    """Functions whose text is the same are rewritten once, wherever they stand."""
    for name, above in (("one.py", ""), ("other.py", "\n\n"), ("another.py", "\n")):
        text = above + SOURCE.replace("CHANGED", str(index))
        linecache.cache[name] = (len(text), None, text.splitlines(True), name)
        made: dict = {}
        exec(compile(text, name, "exec"), made)
        with pytest.raises(OutOfBounds) as info:
            launch(made["make"](cuda), 1, 4, np.zeros(5))
        assert info.value.line == f"{name}:{8 + len(above)}: x[{index}] = 1.0"
        assert f"x[{index}] is outside the array" in str(info.value)
