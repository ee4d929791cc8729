"""Blocks that run at once do what they do one after the other: results, counts and errors."""

import contextlib
from unittest import mock

import numpy as np
import pytest
from numba import cuda, float32

import fa_numba
from fa_numba import device as devices
from fa_numba.emulator import (
    BarrierDivergence,
    EmulatorError,
    GlobalHazard,
    OutOfBounds,
    ReadOnlyStore,
    SharedHazard,
    UninitialisedRead,
    batches,
    launch,
    run,
    schedule,
    trace,
)
from fa_numba.intrinsics.async_copy import commit_async, copy1_async, wait_async
from fa_numba.intrinsics.barriers import sync_named
from fa_numba.intrinsics.reduction import add_global
from fa_numba.intrinsics.shared import shared_tile


@contextlib.contextmanager
def one_by_one():
    with mock.patch.object(batches, "LANES", 0):
        yield


@contextlib.contextmanager
def watched():
    """A list that fills with a launch's blocks at once, and whether they came to the end so."""
    found = []
    original = run.Launch.run

    def noted(self, *args):
        together = None
        try:
            together = original(self, *args)
        finally:
            found.append((self.at_once, together))
        return together

    with mock.patch.object(run.Launch, "run", noted):
        yield found


def outcome(kernel, grid, block, args):
    """The counts or the error, and the bytes of the arrays after it."""
    args = [a.copy() if isinstance(a, np.ndarray) else a for a in args]
    try:
        counts = launch(kernel, grid, block, *args, shared_bytes=256)
        found = (counts, counts.traffic)
    except Exception as error:
        found = (type(error), str(error), getattr(error, "__notes__", None))
    return found, [a.tobytes() for a in args if isinstance(a, np.ndarray)]


def alike(kernel, grid, block, args, together=True):
    """What both give; `together` says whether the blocks are expected to end at once."""
    with one_by_one(), watched() as runs:
        expected = outcome(kernel, grid, block, args)
    assert runs[0][0] == 1
    run._one_by_one.discard(kernel)
    with watched() as runs:
        found = outcome(kernel, grid, block, args)
    assert runs[0][0] > 1 and runs[0][1] is together
    assert found == expected
    return found


# ---- calls


@pytest.mark.parametrize(
    "algorithm, dtype, options",
    [
        ("fa1", "float32", "packed"), ("fa1", "float16", "many"), ("fa2", "float32", "many"),
        ("fa2", "float16", "causal"), ("standard", "float32", "causal"),
        ("standard", "float16", "packed"),
    ],
)  # fmt: skip
def test_a_call_is_the_same(algorithm, dtype, options):
    rng = np.random.default_rng(3)
    shape = (2, 1, 20, 16)
    given = {}
    if options == "causal":
        given = {"causal": True}
    elif options == "packed":
        shape = (35, 1, 16)
        given = {"cu_seqlens_q": np.array([0, 9, 30, 35], np.int32), "causal": True}
        given["cu_seqlens_k"] = np.array([0, 20, 20, 35], np.int32)
    elif options == "many":
        given = {"window": (9, 12), "softcap": 2.0, "dropout_p": 0.2, "seed": 5}
        given["bias"] = rng.standard_normal((1, 1, 20, 20), np.float32)
        given["kv_lens"] = np.array([20, 8], np.int32)
    q, k, v, dout = rng.standard_normal((4, *shape), np.float32).astype(dtype)
    given["tiles"] = fa_numba.Tiles(16, 16)
    back = {"return_dbias": True} if "bias" in given else {}

    def call():
        with devices.using("emulator"), fa_numba.count_accesses() as counts:
            o, lse = fa_numba.attention(q, k, v, algorithm=algorithm, return_lse=True, **given)
            gradients = fa_numba.attention_backward(
                dout, q, k, v, o, lse, algorithm=algorithm, **given, **back
            )
        return [a.tobytes() for a in (o, lse, *gradients)], counts, counts.traffic

    with one_by_one():
        expected = call()
    with watched() as runs:
        assert call() == expected
    assert any(count > 1 for count, _ in runs)
    assert all(together for count, together in runs if count > 1)


# ---- what blocks may do at once


def rounds(x, out):
    # each block has its own number of rounds, with barriers in them and its own shared memory
    s = cuda.shared.array(64, float32)
    b, t = cuda.blockIdx.x + 3 * cuda.blockIdx.y, cuda.threadIdx.x
    total = float32(0.0)
    for n in range(b % 4):
        mine = cuda.local.array(2, float32)
        s[t] = x[b, t] + n
        cuda.syncthreads()
        mine[0] = s[(t + 1) % 64]
        mine[1] = float32(1.5)
        mine[0] += mine[1] * s[5]
        total += mine[0]
        cuda.syncthreads()
        if b == 2:
            total -= cuda.shfl_xor_sync(0xFFFFFFFF, total, 1)
    out[b, t] = total + x[b, 3]


def stages(x, out):
    # blocks are at different stages of two, whose tiles have names of their own
    b, t = cuda.blockIdx.x, cuda.threadIdx.x
    stage, n = b % 2, 0
    while n < b:
        copy1_async(shared_tile(stage * 32, 32), t, x, b, t, 1)
        commit_async()
        wait_async()
        cuda.syncthreads()
        s = shared_tile(stage * 32, 32)
        out[b, t] += s[(t + 1) % 32] + s[0]
        cuda.syncthreads()
        s[t] = n
        stage, n = 1 - stage, n + 1


def additions(values, out):
    # sums of numbers so different that their order shows
    b, t = cuda.blockIdx.x, cuda.threadIdx.x
    for n in range(3):
        add_global(out, 0, t % 5, values[b, n * 32 + t])
        if b % 2:
            add_global(out, 1, b % 3, values[b, t])


def views(x, lengths, out):
    b, t = cuda.blockIdx.x, cuda.threadIdx.x
    rows = x[lengths[b] : lengths[b + 1]]
    if t < rows.shape[0]:
        out[b, t] = rows[t, b % 4]


def matrix(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def one_ends_early(x, out):
    b, t = cuda.blockIdx.x, cuda.threadIdx.x
    if b == 4:
        return
    out[b, t] = x[b, t]


def test_rounds_and_early_ends():
    given = matrix(0, 9, 64), np.zeros((9, 64), np.float32)
    alike(rounds, (3, 3), 64, given)
    alike(one_ends_early, 9, 64, given)


def test_stages_of_shared_memory():
    counts, _ = alike(stages, 5, 32, (matrix(1, 5, 32), np.zeros((5, 32), np.float32)))
    assert {a.array for a in counts[1] if a.space == "shared" and a.kind == "copy"} == {
        "shared",
    }  # fmt: skip


def test_additions_are_in_the_order_of_the_blocks():
    values = matrix(2, 7, 96) * 10.0 ** np.random.default_rng(3).integers(-6, 7, (7, 96))
    values = values.astype(np.float32)
    args = (values, np.zeros((2, 5), np.float32))
    _, (_, found) = alike(additions, 7, 32, args)
    with schedule(1), watched() as runs:  # another order of blocks, one at a time
        other = outcome(additions, 7, 32, args)
    assert runs[0][0] == 1 and other[1][1] != found


def test_views_of_other_lengths():
    lengths = np.array([0, 3, 3, 9, 10], np.int32)
    alike(views, 4, 32, (matrix(4, 10, 4), lengths, np.zeros((4, 32), np.float32)))


def test_lanes_without_the_first_read_one_element():
    def kernel(x, out):
        t = cuda.threadIdx.x
        if t > 2:
            out[cuda.blockIdx.x, t] = x[5]

    out = np.zeros((2, 8))
    launch(kernel, 2, 8, np.arange(8.0), out)
    assert out.tolist() == [[0, 0, 0, 5, 5, 5, 5, 5]] * 2


def test_a_trace_is_of_one_block_after_the_other():
    x, out = matrix(0, 9, 64), np.zeros((9, 64), np.float32)
    with trace() as moves, watched() as runs:
        launch(rounds, (3, 3), 64, x, out)
    assert runs == [(1, False)] and [m.block for m in moves] == sorted(
        (m.block for m in moves), key=lambda b: (b[1], b[0])
    )


# ---- what they may not


def tickets(count, out):
    b = cuda.blockIdx.x
    ticket = cuda.atomic.add(count, 0, 1)
    if cuda.threadIdx.x == 0:
        out[b] = ticket * 10 + b


def parted(x, out):
    t = cuda.threadIdx.x
    if t < 32:
        sync_named(1, 64)
    else:
        sync_named(1, 64)
    out[cuda.blockIdx.x, t] = x[0, t % 32]


def read_back(x, out):
    b = cuda.blockIdx.x
    add_global(out, b, cuda.threadIdx.x, x[0, b])
    out[b, cuda.threadIdx.x] += 1.0


ALONE = {
    "tickets": (tickets, 32, (np.zeros(1, np.int32), np.zeros(5)), None),
    "parted": (parted, 64, (matrix(5, 1, 32), np.zeros((5, 64))), None),
    "read back": (read_back, 32, (matrix(5, 1, 32), np.zeros((5, 32), np.float32)), None),
}


@pytest.mark.parametrize("name", ALONE)
def test_what_only_one_block_may_do(name):
    kernel, block, args, error = ALONE[name]
    found, _ = alike(kernel, 5, block, args, together=None if error else False)
    assert found[0] is error if error else not isinstance(found[0], type)
    if error is None:
        with watched() as runs:  # it is not tried again
            outcome(kernel, 5, block, args)
        assert runs == [(1, False)]


def test_a_block_that_waits_for_a_later_one():
    def kernel(flag, out):
        b = cuda.blockIdx.x
        if b == 1:
            while flag[0] == 0:
                pass
            out[b] = 1.0
        elif b == 0:
            flag[0] = 1

    with mock.patch("fa_numba.emulator.context.MOST_ACCESSES", 1000):
        found, _ = alike(kernel, 3, 1, (np.zeros(1), np.zeros(3)), together=None)
    assert found[0] is GlobalHazard


FAULTS = {}


def fault(kind):
    def note(kernel):
        FAULTS[kernel.__name__] = (kernel, kind)
        return kernel

    return note


@fault(OutOfBounds)
def outside(x, out):
    b, t = cuda.blockIdx.x, cuda.threadIdx.x
    out[b, t] = x[b, t + (30 if b == 3 and t == 7 else 0)]


@fault(SharedHazard)
def race(x, out):
    s = cuda.shared.array(40, float32)
    b, t = cuda.blockIdx.x, cuda.threadIdx.x
    s[t] = x[b, t]
    if b != 2:
        cuda.syncthreads()
    out[b, t] = s[(t + 1) % 32]


@fault(UninitialisedRead)
def unwritten(x, out):
    s = cuda.shared.array(40, float32)
    mine = cuda.local.array(2, float32)
    b, t = cuda.blockIdx.x, cuda.threadIdx.x
    s[t] = x[b, t]
    mine[b % 2] = 1.0
    cuda.syncthreads()
    out[b, t] = s[t + (5 if b == 1 else 0)] + mine[0 if b == 4 else b % 2]


@fault(BarrierDivergence)
def divergence(x, out):
    b, t = cuda.blockIdx.x, cuda.threadIdx.x
    if b != 3 or t < 9:
        cuda.syncthreads()
    out[b, t] = x[b, t]


@fault(GlobalHazard)
def between(x, out):
    b, t = cuda.blockIdx.x, cuda.threadIdx.x
    out[b, t] = x[b, t]
    if b == 4:
        out[2, t] += 1.0


@fault(SharedHazard)
def in_flight(x, out):
    s = shared_tile(0, 32)
    b, t = cuda.blockIdx.x, cuda.threadIdx.x
    copy1_async(s, t, x, b, t, 1)
    commit_async()
    if b != 3:
        wait_async()
    out[b, t] = x[b, t]


@fault(ZeroDivisionError)
def zero(x, out):
    b, t = cuda.blockIdx.x, cuda.threadIdx.x
    out[b, t] = x[b, t] // (b * 32 + t - 100)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_said_as_of_one_block(name):
    kernel, kind = FAULTS[name]
    args = (matrix(6, 5, 32), np.zeros((5, 32), np.float32))
    found, _ = alike(kernel, 5, 32, args, together=None)
    assert found[0] is kind and "block (" in found[1]
    assert issubclass(kind, EmulatorError) or "in block (3, 0, 0), thread (4" in found[1]


def test_an_addition_to_a_read_only_array_is_that_error():
    def kernel(x, out):
        b = cuda.blockIdx.x
        add_global(out, b, cuda.threadIdx.x, x[0, b])

    out = np.zeros((5, 32), np.float32)
    out.flags.writeable = False
    with pytest.raises(ReadOnlyStore, match="stores to out, which is read-only"):
        launch(kernel, 5, 32, matrix(5, 1, 32), out)
