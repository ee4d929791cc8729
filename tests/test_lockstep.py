"""All lanes at once give what each gives alone: the emulator's masks, groups, orders and counts.

`test_emulator.py` has the detectors of one block. Here a kernel's control flow is held against
Python itself, which runs the same function once for every thread; then what parts a block into
groups, what blocks do to each other, orders of turns, costs by line, and traces.
"""

import ctypes
import linecache
import random
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from numba import cuda, float32, int8, int16, int32, int64, uint8, uint32, uint64

from fa_numba.emulator import OutOfBounds, UninitialisedRead, launch

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
    launch(kernel, 1, threads, args)
    for expected, found in zip(copies, args, strict=True):
        if isinstance(found, np.ndarray):
            np.testing.assert_array_equal(found, expected)
            assert found.tobytes() == expected.tobytes()  # with the sign of zeros
    return args


def data(threads, seed=0):
    return np.random.default_rng(seed).integers(-9, 10, (threads, 4))


# ---- control flow, statement by statement


def branches(x, out):
    t = cuda.threadIdx.x
    a = x[t, 0]
    if a < -4:
        out[t, 0] = 1
        if x[t, 1] > 0:
            out[t, 1] = 2
        else:
            out[t, 1] = 3
            a = a * 2
    elif a < 0:
        out[t, 0] = 4
        a += 10
    elif a == 3:
        a = 7
    else:
        out[t, 0] = 5
        if x[t, 2] > x[t, 3]:
            a -= 1
    out[t, 2] = a


def loops(x, out):
    t = cuda.threadIdx.x
    total = 0
    for i in range(t % 5):
        for j in range(x[t, 0], x[t, 1]):
            total += i * j
        for j in range(x[t, 1], x[t, 0], -2):
            total -= j
    out[t, 0] = total
    for k in range(t % 3, 12, 1 + t % 4):
        total = total * 3 + k
        out[t, 1] = k
    n = x[t, 2]
    while n < 4:
        n += 1 + t % 3
        total += n
    out[t, 2] = total
    out[t, 3] = n


def jumps(x, out):
    t = cuda.threadIdx.x
    rounds = 0
    total = 0
    while rounds < 9:
        rounds += 1
        if rounds == x[t, 0]:
            break
        if (rounds + t) % 3 == 0:
            continue
        for j in range(6):
            if j == x[t, 1]:
                break
            if (j ^ t) & 1:
                continue
            total += j
            if total > 40:
                break
        total += rounds
    out[t, 0] = total
    out[t, 1] = rounds
    for j in range(4):
        if j == t % 6:
            continue
        total = total * 2 + j
    out[t, 2] = total


def returns(x, out):
    t = cuda.threadIdx.x
    if t % 5 == 4:
        return
    out[t, 0] = 1
    for j in range(x[t, 0]):
        if j == 3:
            out[t, 1] = 9
            return
        while True:
            if x[t, 2] > 0:
                return
            break
        out[t, 1] += 1
    if x[t, 1] > 2:
        out[t, 2] = 5
        if x[t, 3] > 2:
            return
        out[t, 2] = 6
    out[t, 3] = 8


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
    if a in (1, 3, -5):
        out[t, 0] += 16
    if b not in (2, -7, 0):
        out[t, 0] += 32
    if (a, b % 2) == (b, 0) or (a % 2, c % 3) != (b % 2, 1):
        out[t, 0] += 64
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


def augmented(x, out):
    t = cuda.threadIdx.x
    a = x[t, 0]
    b = t
    a += b
    a *= 3
    if t % 2:
        a -= 5
        b <<= 2
        a //= 4
    b |= 8
    a %= 7
    b ^= 5
    if b > 12:
        b >>= 1
        b &= 11
    a = c = a + b
    out[t, 0] += a
    out[t, 0] *= 2
    out[t, 1] -= b
    out[t, 2] = -a // 3 - a % -4 + ~b + (+c)
    a, out[t, 3] = b, a
    out[t, 3] += a


def some_assign(x, out):
    t = cuda.threadIdx.x
    if t % 3 == 0:
        late = t * 2
    if t % 3 == 0:
        out[t, 0] = late
    pair = (x[t, 2], 5)
    if x[t, 0] > 0:
        pair = (t, x[t, 1])
    one, (two, three) = pair[0], pair
    out[t, 1] = one + two * three
    for n in range(t % 4):
        last = n
    if t % 4 > 0:
        out[t, 2] = last
    for v, w in ((t, 1), (2, x[t, 3]), (4, 4)):
        if v == w:
            continue
        out[t, 3] = out[t, 3] * 10 + v


def arrays(x, out):
    t = cuda.threadIdx.x
    whole = cuda.local.array(4, int64)
    real = cuda.local.array((2, 3), float32)
    for j in range(4):
        whole[j] = x[t, j]
        real[j // 2, j % 2] = x[t, j] / 3
    real[0, 2] = 0.1
    real[1, 2] = t
    whole[t % 4] += 100
    whole[x[t, 0] % 4] = whole[(t + 1) % 4] * 2
    if t % 3 == 1:
        whole[t % 2] = -1
        real[t % 2, x[t, 1] % 3] += 0.7
    for j in range(t % 4):
        whole[j] -= whole[j + 1]
        real[j % 2, 0] += real[0, j % 3] * x[t, 2]
    out[t, 0] = whole[0] + whole[1] * 1000
    out[t, 1] = whole[2]
    out[t, 2] = whole[t % 3]
    out[t, 3] = int(real[t % 2, t % 3] * 1e6)


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
    branches, loops, jumps, returns, calls, chosen, compared, truths, augmented, some_assign,
    arrays, began_again, other_names, wrapping,
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
    launch(kernel, 1, 8, (out,))
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
    launch(kernel, 1, 40, (out, 36, 36))
    assert out.tolist() == [5, 4] + [5, 3] * 17 + [1, 0, 0, 0]
    for writers, readers in ((36, 37), (0, 1), (33, 36)):
        with pytest.raises(UninitialisedRead) as info:
            launch(kernel, 1, 40, (out, writers, readers))
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
    launch(kernel, 1, 4, (out, 0))
    assert out.tolist() == [0, 1, 2, 3]
    with pytest.raises(UninitialisedRead) as info:
        launch(kernel, 1, 4, (out, 1))
    assert info.value.thread == (1, 0, 0)


def test_an_index_out_of_range_is_that_of_a_lane_that_takes_part():
    def kernel(x, out, faulty):
        t = cuda.threadIdx.x
        if t > 5:
            n = t + 10 * (t == faulty)
            if n < 8 or t == faulty:
                out[t] = x[n]

    x, out = np.arange(8.0), np.zeros(16)
    launch(kernel, 1, 16, (x, out, 99))
    assert out.tolist() == [0] * 6 + [6, 7] + [0] * 8
    with pytest.raises(OutOfBounds) as info:
        launch(kernel, 1, 16, (x, out, 9))
    assert info.value.thread == (9, 0, 0) and "x[19]" in str(info.value)


def test_a_division_by_zero_is_that_of_a_lane_that_takes_part():
    def kernel(x, out, faulty):
        t = cuda.threadIdx.x
        if x[t] or t == faulty:
            out[t] = 12 // x[t]
        out[t] += 6 / x[t] if x[t] else 0

    x, out = np.array([0, 1, 2, 0, 4]), np.zeros(5)
    launch(kernel, 1, 5, (x, out, 99))
    assert out.tolist() == [0, 18, 9, 0, 4.5]
    with pytest.raises(ZeroDivisionError) as info:
        launch(kernel, 1, 5, (x, out, 3))
    assert "thread (3, 0, 0)" in str(info.value.__notes__)


@pytest.mark.parametrize(
    "body, message",
    [
        ("for j in range(2):\n        pass\n    else:\n        out[0] = 1", "else of a loop"),
        ("try:\n        out[0] = 1\n    finally:\n        pass", "a try statement"),
        ("if (n := t) > 1:\n        out[0] = n", "assignment within an expression"),
        ("yield t", "a generator"),
    ],
)
def test_what_kernels_do_not_have_is_refused(body, message):
    source = f"def kernel(out):\n    t = cuda.threadIdx.x\n    {body}\n"
    with pytest.raises(ValueError, match=message):
        launch(made(source)["kernel"], 1, 4, (np.zeros(4),))


def test_a_function_without_source_is_refused():
    names = {"cuda": cuda}
    exec("def kernel(out):\n    out[0] = 1\n", names)
    with pytest.raises(ValueError, match="source of kernel, .* is not at hand"):
        launch(names["kernel"], 1, 1, (np.zeros(1),))


# ---- random programs


def made(source):
    """The names of a source text that the emulator can read."""
    made.count += 1
    file = f"<program {made.count}>"
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    types = (int8, int16, int32, int64, uint8, uint32, uint64, float32)
    names = {t.name: t for t in types} | {"cuda": cuda, "__name__": f"program_{made.count}"}
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
            f"{self.value(0)} {self.pick('in', 'not in')} (0, 3, -2)",
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


PROGRAMS = 60


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
