"""Products of a warpgroup on the emulator: who shares them, and what touches them too early. Their
values are `test_ptx_warpgroup`'s.
"""

import csv
from pathlib import Path

import numpy as np
import pytest
from test_mbarriers import BARRIERS, begin, caught, launch

from fa_numba import emulator
from fa_numba.device import cuda, float32, uint32
from fa_numba.emulator import (
    BarrierDivergence,
    Boxed,
    Deadlock,
    EmulatorError,
    Misaligned,
    MissingFence,
    OutOfBounds,
    RegisterHazard,
    SharedHazard,
    UninitialisedRead,
)
from fa_numba.emulator.products import summed_in_few_bits
from fa_numba.intrinsics.barriers import sync_named
from fa_numba.intrinsics.bulk_copy import fence_async_proxy, load_box
from fa_numba.intrinsics.float8 import NUMBERS_E4M3
from fa_numba.intrinsics.matrix import CONVERSIONS
from fa_numba.intrinsics.mbarrier import arrive_mbarrier, expect_bytes, mbarrier_tile, wait_mbarrier
from fa_numba.intrinsics.shared import half_tile
from fa_numba.intrinsics.warpgroup import (
    MULTIPLY,
    MULTIPLY_REGISTERS,
    give_registers,
    take_registers,
    wait_products,
)

ROWS = 64


# --- numbers ---------------------------------------------------------------------------------


def to_bits(x, kind):
    if kind == "f16":
        return x.astype(np.float16).view(np.uint16)
    return (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def small_e4m3(*shape, seed=0):
    """Pairs of e4m3 in 16 bits, and their numbers in twice the columns: 0, 0.5 to 2 and -0.5 to -2.

    Sums of so few bits are exact.
    """
    rng = np.random.default_rng(seed)
    numbers = rng.integers(-4, 5, (*shape, 2)) / 2.0
    sizes = np.array([0x00, 0x30, 0x38, 0x3C, 0x40], np.uint8)  # 0, 0.5, 1, 1.5, 2
    made = sizes[np.abs(2 * numbers).astype(int)] | np.where(numbers < 0, 0x80, 0).astype(np.uint8)
    return made.view(np.uint16)[..., 0], numbers.reshape(*shape[:-1], -1)


def to_numbers(bits, kind):
    if kind == "f16":
        return bits.view(np.float16).astype(np.float64)
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def random(*shape, kind="f16", seed=0):
    """16 bits, and the numbers that they are."""
    if kind == "e4m3":
        return small_e4m3(*shape, seed=seed)
    bits = to_bits(np.random.default_rng(seed).standard_normal(shape), kind)
    return bits, to_numbers(bits, kind)


def panels(matrix, rows):
    """A matrix as it lies in shared memory: panels of 64 columns and so many rows, swizzled."""
    height, width = matrix.shape
    count = -(-width // 64)
    memory = np.zeros(count * rows * 64, np.uint16)
    for r in range(height):
        for c in range(width):
            chunk = c % 64 // 8 ^ r % 8
            memory[c // 64 * rows * 64 + r * 64 + chunk * 8 + c % 8] = matrix[r, c]
    return memory


def matrix_of(registers, n):
    """C, (64, n), of the registers of a warpgroup's threads, (n / 2, 128)."""
    C = np.empty((ROWS, n))
    for t in range(128):
        row, col = 16 * (t // 32) + t % 32 // 4, 2 * (t % 4)
        for e in range(n // 4):
            C[row, 8 * (e // 2) + col + e % 2] = registers[e, t]
            C[row + 8, 8 * (e // 2) + col + e % 2] = registers[n // 4 + e, t]
    return C


def assert_product(found, A, B, before=0.0):
    """Within what the sums of single precision may lose."""
    wanted = A @ B.T + before
    bound = 2e-7 * (A.shape[1] + 2) * (abs(A) @ abs(B).T + abs(before))
    assert (abs(found - wanted) <= bound).all()


# --- products --------------------------------------------------------------------------------


def make_product(n, steps, kind="f16", across=(0, 0), rows=(64, 0), adds=0, registers=False):
    """C = A B of each warpgroup, which has its own A; a register file a thread comes back."""
    multiply, of_registers = MULTIPLY[kind], MULTIPLY_REGISTERS[kind]
    rows_a, rows_b = rows
    across_a, across_b = across
    M = n // 2

    def kernel(A, B, W, C):
        sA, sB = half_tile(0, A.shape[0]), half_tile(A.shape[0], B.shape[0])
        rC = cuda.local.array(M, float32)
        rA = cuda.local.array(4 * steps, uint32)
        t = cuda.threadIdx.x
        for e in range(t, A.shape[0], cuda.blockDim.x):
            sA[e] = A[e]
        for e in range(t, B.shape[0], cuda.blockDim.x):
            sB[e] = B[e]
        if adds:
            for e in range(M):
                rC[e] = C[e, t]
        if registers:
            for e in range(4 * steps):
                rA[e] = W[e, t]
        fence_async_proxy()
        cuda.syncthreads()
        first = uint32(t // 128 * (A.shape[0] // (cuda.blockDim.x // 128)))
        if registers:
            of_registers(rC, n, rA, 0, sB, 0, rows_b, across_b, steps, adds)
        else:
            multiply(rC, n, sA, first, rows_a, across_a, sB, 0, rows_b, across_b, steps, adds)
        wait_products(rC, M, 0)
        for e in range(M):
            C[e, t] = rC[e]

    return kernel


def test_warpgroups_multiply_side_by_side():
    a, A = random(128, 64)
    b, B = random(32, 64, seed=1)
    memory = np.concatenate([panels(a[:64], 64), panels(a[64:], 64)])
    C = np.zeros((16, 256), np.float32)
    kernel = make_product(32, 4, rows=(64, 32))
    for seed in (None, 0, 1):
        C[:] = 0
        if seed is None:
            counts = launch(kernel, 256, memory, panels(b, 32), np.zeros((1, 1), np.uint32), C)
        else:
            with emulator.schedule(seed):
                launch(kernel, 256, memory, panels(b, 32), np.zeros((1, 1), np.uint32), C)
        assert_product(matrix_of(C[:, :128], 32), A[:64], B)
        assert_product(matrix_of(C[:, 128:], 32), A[64:], B)
    assert counts.instructions["wgmma"] == 8


def test_part_of_a_row_and_of_a_panel():
    """An operand that begins at column 32, and rows of a panel that nobody multiplies."""
    a, A = random(72, 64)
    b, B = random(40, 64, seed=1)

    def kernel(A, B, C):
        sA, sB = half_tile(0, 72 * 64), half_tile(72 * 64, 40 * 64)
        rC = cuda.local.array(16, float32)
        t = cuda.threadIdx.x
        for e in range(t, 72 * 64, 128):
            sA[e] = A[e]
        for e in range(t, 40 * 64, 128):
            sB[e] = B[e]
        fence_async_proxy()
        cuda.syncthreads()
        MULTIPLY_F16(rC, 16, sA, 8 * 64 + 32, 72, 0, sB, 16 * 64 + 32, 40, 0, 2, 0)
        wait_products(rC, 8, 0)
        for e in range(8):
            C[e, t] = rC[e]

    C = np.zeros((8, 128), np.float32)
    launch(kernel, 128, panels(a, 72), panels(b, 40), C)
    assert_product(matrix_of(C, 16), A[8:, 32:], B[16:32, 32:])


def test_e4m3_operands_are_not_transposed():
    kernel = make_product(8, 1, "e4m3", across=(0, 1), rows=(64, 16))
    arrays = np.zeros(4096, np.uint16), np.zeros(1024, np.uint16), np.zeros((4, 128), np.uint32)
    with pytest.raises(ValueError, match="across_a and across_b must be 0 for e4m3, got 1"):
        launch(kernel, 128, *arrays, np.zeros((4, 128), np.float32))


def test_sums_of_e4m3_are_those_of_an_h200():
    """Addends of one instruction and what the GPU made of them, bit for bit."""
    path = Path(__file__).resolve().parents[1] / "data/e4m3_sums.csv"
    with path.open(newline="") as file:
        rows = [[bytes.fromhex(row[name]) for name in "abcd"] for row in csv.DictReader(file)]
    a, b, c, d = (np.frombuffer(b"".join(x), np.uint8) for x in zip(*rows, strict=True))
    A, B = (NUMBERS_E4M3[x.reshape(-1, 32)] for x in (a, b))
    C, D = (x.view("<f4") for x in (c, d))
    each = zip(C[:, None, None], A[:, None], B[:, None], strict=True)
    made = [summed_in_few_bits(*x, 1, 13) for x in each]
    assert np.array_equal(np.ravel(made), D, equal_nan=True)


def test_sums_of_e4m3_keep_13_bits():
    """Each row has another size of what is added to 1 or -1: below 2^-13 it is dropped."""
    bits = np.zeros((64, 16), np.uint16)
    bits[:, 0] = 0x38  # 1, and 0 next to it
    one = np.zeros((8, 16), np.uint16)
    one[:, 0] = 0x38
    for sign in (1, -1):
        C = np.zeros((4, 128), np.float32)
        sizes = np.repeat(2.0 ** -np.arange(8, 16), 8) * 1.5
        for t in range(128):
            for e in range(4):
                C[e, t] = sign * sizes[16 * (t // 32) + t % 32 // 4 + 8 * (e // 2)]
        arrays = panels(bits, 64), panels(one, 8), np.zeros((1, 1), np.uint32), C
        launch(make_product(8, 1, "e4m3", rows=(64, 8), adds=1), 128, *arrays)
        wanted = 1 + sign * np.floor(sizes * 2.0**13) / 2.0**13
        assert np.array_equal(matrix_of(C, 8), np.repeat(wanted[:, None], 8, axis=1))


def test_infinities_and_nan():
    a, A = random(ROWS, 16)
    b, B = random(8, 16, seed=1)
    a[3, 5], A[3, 5], a[7, 0], A[7, 0] = 0x7C00, np.inf, 0x7E00, np.nan
    C = np.zeros((4, 128), np.float32)
    arrays = panels(a, 64), panels(b, 8), np.zeros((1, 1), np.uint32), C
    launch(make_product(8, 1, rows=(64, 8)), 128, *arrays)
    found = matrix_of(C, 8)
    assert np.isinf(found[3]).all() and np.isnan(found[7]).all()
    rest = [r for r in range(ROWS) if r not in (3, 7)]
    assert_product(found[rest], A[rest], B)


# --- what is touched too early ---------------------------------------------------------------

MULTIPLY_F16 = MULTIPLY["f16"]
MULTIPLY_REGISTERS_F16 = MULTIPLY_REGISTERS["f16"]
pack = CONVERSIONS["f16"][0]


def _hasty(out, wrong):
    """S = A B, O += S V, of 128 threads, and a thread more in a warp of its own that writes."""
    sA, sB, sV = half_tile(0, 4096), half_tile(4096, 1024), half_tile(5120, 1024)
    rS = cuda.local.array(8, float32)
    rP = cuda.local.array(4, uint32)
    rO = cuda.local.array(32, float32)
    t = cuda.threadIdx.x
    if t < 128:
        for e in range(t, 4096, 128):
            if wrong != "hole" or e != 77:
                sA[e] = 0x3C00
        for e in range(t, 1024, 128):
            sB[e] = 0x3C00
            sV[e] = 0x3C00
        for e in range(32):
            if wrong != "no C" or e != 9:
                rO[e] = float32(0.0)
    if wrong != "fence" and (wrong != "one fence" or t != 100):
        fence_async_proxy()
    if wrong != "barrier":
        cuda.syncthreads()
    if t < 128:
        MULTIPLY_F16(rS, 16, sA, 0, 64, 0, sB, 0, 16, 0, 4, 0)
        if wrong == "read C":
            out[t] = rS[3]
        if wrong == "write C":
            rS[3] = float32(1.0)
        if wrong == "add to C":
            rS[3] += float32(1.0)
        if wrong == "another shape":
            MULTIPLY_F16(rS, 8, sA, 0, 64, 0, sB, 0, 16, 0, 4, 0)
        if wrong == "write A":
            sA[t] = 0
        if wrong != "wait":
            wait_products(rS, 8, 0)
        if wrong == "own rows":
            sA[1024 * (t // 32) + t % 32] = 0
        if wrong == "other rows":
            sA[1024 * (t // 32 ^ 1) + t % 32] = 0
        if wrong == "write B":
            sB[t] = 0
        for e in range(4):
            rP[e] = pack(rS[2 * e], rS[2 * e + 1])
        MULTIPLY_REGISTERS_F16(rO, 64, rP, 0, sV, 0, 16, 1, 1, 1)
        if wrong == "read S":
            MULTIPLY_F16(rS, 16, sA, 0, 64, 0, sB, 0, 16, 0, 4, 0)
            wait_products(rS, 8, 1)
        if wrong == "pending" or wrong == "in order":
            MULTIPLY_F16(rS, 16, sA, 0, 64, 0, sB, 0, 16, 0, 4, 0)
            wait_products(rO, 32, 1)
            if wrong == "pending":
                out[t] = rS[0]
            rP[0] = uint32(1)
            wait_products(rS, 8, 0)
            out[t] = rS[0]
        if wrong == "another array":
            wait_products(rS, 8, 0)
            out[t] = rO[0]
        if wrong == "read A":
            out[t] = float32(rP[0])
        if wrong == "write words":
            rP[2] = uint32(0)
        if wrong == "twice":
            MULTIPLY_REGISTERS_F16(rO, 64, rP, 0, sV, 0, 16, 1, 1, 1)
        if wrong == "exit":
            return
        if wrong == "few":
            wait_products(rO, 16, 0)
        wait_products(rO, 32, 0)
        out[t] = rO[5]
    elif wrong == "other writes":
        sA[0] = 0
    if wrong == "after":
        cuda.syncthreads()
        sA[t] = 0


@pytest.mark.parametrize(
    "right", ["", "in order", "twice", "read A", "read S", "own rows", "after"]
)
def test_what_may_be_touched(right):
    out = np.zeros(160, np.float32)
    launch(_hasty, 160, out, right)
    assert (out[:128] == (2048.0 if right == "twice" else 1024.0)).all()


@pytest.mark.parametrize(
    "wrong, error, message",
    [
        ("hole", UninitialisedRead, "sA[77] is read, but was never written"),
        ("no C", UninitialisedRead, "rO[9] is read, but was never written"),
        ("fence", MissingFence, "wrote without calling fence_async_proxy() afterwards"),
        (
            "one fence",
            MissingFence,
            "thread (100, 0, 0) wrote without calling fence_async_proxy() afterwards",
        ),
        ("barrier", SharedHazard, "no barrier between"),
        (
            "read C",
            RegisterHazard,
            "no wait_products call has named rS since the wgmma product that writes rS",
        ),
        ("write C", RegisterHazard, "rS is accessed"),
        ("add to C", RegisterHazard, "rS is accessed"),
        ("another shape", RegisterHazard, "rS is accessed"),
        ("write A", SharedHazard, "while a wgmma product or a TMA copy may still read it"),
        ("other writes", SharedHazard, "sA[0]"),
        ("wait", RegisterHazard, "rS is accessed"),
        ("pending", RegisterHazard, "rS is accessed"),
        ("another array", RegisterHazard, "with another array. Pass rO to that wait_products"),
        (
            "other rows",
            SharedHazard,
            "sA[1024], which warp 1, in a wgmma product, read, with no",
        ),
        (
            "write B",
            SharedHazard,
            "sB[0], which a wgmma product of warpgroup 0 read, with no barrier between",
        ),
        (
            "write words",
            RegisterHazard,
            "no wait_products call has named rP since the wgmma product that reads",
        ),
        ("exit", RegisterHazard, "Call wait_products(rO, ...) before the thread ends"),
        (
            "few",
            RegisterHazard,
            "count must be at least 32, the number of registers that the product writes, got 16",
        ),
    ],
)
def test_what_is_touched_too_early(wrong, error, message):
    assert message in str(caught(error, _hasty, 160, np.zeros(160, np.float32), wrong))


def test_operands_that_are_filled_again():
    """A producer fills a place again; each warp of the consumers has to have read it before."""

    def kernel(X, out, wrong):
        sX = half_tile(0, 4096)
        bars = mbarrier_tile(BARRIERS, 2)
        rC = cuda.local.array(4, float32)
        t = cuda.threadIdx.x
        begin(bars, 1, {"": 8, "early": 8, "one": 4, "leaders": 2}[wrong])
        for i in range(3):
            if t == 256:
                wait_mbarrier(bars, 1, i % 2 ^ 1)
                expect_bytes(bars, 0, 8192)
                load_box(sX, 0, X, 0, 0, 64 * i, 0, bars, 0)
            if t < 256:
                wait_mbarrier(bars, 0, i % 2)
                MULTIPLY_F16(rC, 8, sX, 0, 64, 0, sX, 0, 64, 0, 4, 0)
                if wrong == "early" and t % 32 == 0:
                    arrive_mbarrier(bars, 1)
                wait_products(rC, 4, 0)
                warp = wrong != "leaders" or t % 128 == 96
                if wrong != "early" and t % 32 == 0 and warp and (wrong != "one" or t < 128):
                    arrive_mbarrier(bars, 1)
                for e in range(4):
                    out[i, e, t] = rC[e]

    x, X = random(192, 64)
    out = np.zeros((3, 4, 256), np.float32)
    launch(kernel, 288, Boxed(x[None, None], 64), out, "")
    for i in range(3):
        for first in (0, 128):
            found = matrix_of(out[i, :, first : first + 128], 8)
            assert_product(found, X[64 * i : 64 * i + 64], X[64 * i : 64 * i + 8])
    for wrong in ("early", "one", "leaders"):
        error = caught(SharedHazard, kernel, 288, Boxed(x[None, None], 64), out, wrong)
        assert "sX[" in str(error) and "load_box(" in error.line


# --- who calls -------------------------------------------------------------------------------


def test_part_of_a_warpgroup():
    def kernel(out, which):
        sA = half_tile(0, 4096)
        rC = cuda.local.array(4, float32)
        t = cuda.threadIdx.x
        for e in range(t, 4096, 128):
            sA[e] = 0
        fence_async_proxy()
        cuda.syncthreads()
        if which == "half" and t < 64:
            MULTIPLY_F16(rC, 8, sA, 0, 64, 0, sA, 0, 64, 0, 1, 0)
        if which == "wait":
            MULTIPLY_F16(rC, 8, sA, 0, 64, 0, sA, 0, 64, 0, 1, 0)
            if t != 3:
                wait_products(rC, 4, 0)
        if which == "places":
            MULTIPLY_F16(rC, 8, sA, 8 * (t % 2), 64, 0, sA, 0, 64, 0, 1, 0)

    out = np.zeros(1, np.float32)
    text = "only 64 of the 128 threads of warpgroup 0 call a wgmma product."
    assert text in str(caught(BarrierDivergence, kernel, 128, out, "half"))
    assert "call wait_products" in str(caught(BarrierDivergence, kernel, 128, out, "wait"))
    text = "different elements: sA[0] in thread (0, 0, 0), sA[8] in thread (1, 0, 0)"
    assert text in str(caught(EmulatorError, kernel, 128, out, "places"))


@pytest.mark.parametrize(
    "at, rows, error, message",
    [
        (4, 64, Misaligned, "byte 8 of shared memory, but must start at a multiple of 16 bytes"),
        (64, 64, Misaligned, "starts at sA[64], byte 128 of shared memory"),
        (0, 60, Misaligned, "has panels of 60 rows, but the number of rows of a panel"),
        (512, 64, OutOfBounds, "is outside the array of 4096"),
    ],
)
def test_operands_that_lie_wrongly(at, rows, error, message):
    def kernel(out):
        sA = half_tile(0, 4096)
        rC = cuda.local.array(4, float32)
        for e in range(cuda.threadIdx.x, 4096, 128):
            sA[e] = 0
        fence_async_proxy()
        cuda.syncthreads()
        MULTIPLY_F16(rC, 8, sA, at, rows, 0, sA, 0, 64, 0, 1, 0)
        wait_products(rC, 4, 0)

    assert message in str(caught(error, kernel, 128, np.zeros(1, np.float32)))


@pytest.mark.parametrize("n, size", [(12, 6), (264, 132), (16, 7)])
def test_shapes_that_are_refused(n, size):
    def kernel(out):
        sA = half_tile(0, 4096)
        rC = cuda.local.array(size, float32)
        MULTIPLY_F16(rC, n, sA, 0, 64, 0, sA, 0, 64, 0, 1, 0)

    with pytest.raises(
        ValueError, match=f"n, .*, must be .* 256, got {n}\n|for the {n} columns .*, got {size}\n"
    ):
        launch(kernel, 128, np.zeros(1, np.float32))


def test_registers_of_a_block():
    def kernel(out, few, many, lanes):
        if cuda.threadIdx.x < 128:
            if cuda.threadIdx.x < lanes:
                give_registers(few)
        else:
            take_registers(many)

    out = np.zeros(1, np.float32)
    launch(kernel, 384, out, 24, 240, 128)
    text = "but the launch has only 168. take_registers would wait for ever"
    assert text in str(caught(Deadlock, kernel, 384, out, 40, 240, 128))
    text = str(caught(BarrierDivergence, kernel, 384, out, 24, 240, 64))
    assert "warps 0 and 2 of warpgroup 0 end with different numbers" in text
    assert "\n  warp 0: set at test_warpgroup.py:" in text and "\n  warp 2: as launched" in text
    assert "give_registers is reached by only some of the lanes in warp 2." in str(
        caught(BarrierDivergence, kernel, 384, out, 24, 240, 72)
    )
    for few in (16, 28, 264):
        with pytest.raises(ValueError, match=f"count must be a multiple of 8 .*, got {few}"):
            launch(kernel, 384, out, few, 240, 128)


def test_one_thread_waits_for_its_warpgroup():
    """And passes on at a named barrier that the operands are there."""

    def kernel(X, out, wrong):
        sX = half_tile(0, 4096)
        bars = mbarrier_tile(BARRIERS, 1)
        rC = cuda.local.array(4, float32)
        t = cuda.threadIdx.x
        begin(bars, 1)
        if t == 256:
            expect_bytes(bars, 0, 8192)
            load_box(sX, 0, X, 0, 0, 0, 0, bars, 0)
        if t < 256:
            if t % 128 == 5:
                wait_mbarrier(bars, 0, 0)
            if not wrong:
                if t < 128:
                    sync_named(1, 128)
                else:
                    sync_named(2, 128)
            MULTIPLY_F16(rC, 8, sX, 0, 64, 0, sX, 0, 64, 0, 4, 0)
            wait_products(rC, 4, 0)
            for e in range(4):
                out[e, t] = rC[e]

    x, X = random(64, 64)
    for seed in range(4):
        out = np.zeros((4, 256), np.float32)
        with emulator.schedule(seed):
            launch(kernel, 288, Boxed(x[None, None], 64), out, False)
            caught(SharedHazard, kernel, 288, Boxed(x[None, None], 64), out, True)
        for first in (0, 128):
            assert_product(matrix_of(out[:, first : first + 128], 8), X, X[:8])


def test_threads_that_need_groups_of_their_own_do_not_multiply_together():
    """Warp 1 waits for what warp 3 does after it in the program's text."""

    def kernel(out):
        sX = half_tile(0, 4096)
        bars = mbarrier_tile(BARRIERS, 1)
        rC = cuda.local.array(4, float32)
        t = cuda.threadIdx.x
        for e in range(t, 4096, 128):
            sX[e] = 0
        fence_async_proxy()
        begin(bars, 1)
        if t == 32:
            wait_mbarrier(bars, 0, 0)
        if t == 96:
            arrive_mbarrier(bars, 0)
        MULTIPLY_F16(rC, 8, sX, 0, 64, 0, sX, 0, 64, 0, 1, 0)
        wait_products(rC, 4, 0)

    error = caught(EmulatorError, kernel, 128, np.zeros(1, np.float32))
    text = (
        "of warpgroup 0 must reach a wgmma product together, but only some of them took an earlier"
    )
    assert text in str(error)
