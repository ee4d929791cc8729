"""Bounds of the host's words, grids and sums, which small calls never reach: plans, no launches."""

import functools
import itertools
from argparse import ArgumentTypeError
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import fa_numba
from fa_numba import bounds, io_model
from fa_numba import device as devices
from fa_numba.checks import MAX_KV_SPLITS, MOST_BLOCKS, PAGE_SIZES, as_table
from fa_numba.choices import splits, tiles
from fa_numba.choices.units import Unit
from fa_numba.commands.arguments import MAX_SEQLEN as LONGEST_OF_COMMANDS
from fa_numba.commands.arguments import whole
from fa_numba.device.tensor_map import TiledArray
from fa_numba.dropout import MAX_HEADS
from fa_numba.emulator import WRAPS
from fa_numba.host import binding, blocks, placement, softmax
from fa_numba.host.arrays import _contiguous as dense
from fa_numba.host.held import COPIED_BYTES
from fa_numba.host.plans import Launch, LaunchPlan
from fa_numba.integers import ceil_div, power_of_two, round_up
from fa_numba.kernels.merge_parts import make_merge
from fa_numba.options import FEATURES, as_word, drop_threshold, signed
from fa_numba.problem import MAX_HEAD_DIM, MAX_LISTED, MAX_SEQLEN, Problem
from fa_numba.ring import agreement
from fa_numba.tiling import Tiles
from fa_numba.tiling.wgmma import select_wgmma_spec

SIZES = {
    "a long sequence": (1, 1, 1, 40_000_000),
    "a longer sequence": (1, 2, 1, 2**30),
    "a large batch": (65535, 1, 1, 300),
    "many heads": (1, 65535, 65535, 300),
    "both": (300, 300, 300, 3000),
    "shared heads": (1, 65535, 1, 128),
}
UNITS = {"simt": "float32", "mma": "float16", "wgmma": "float16"}


@pytest.mark.parametrize("name", SIZES)
def test_no_plan_has_more_blocks_than_a_grid(name):
    batch, heads, heads_k, N = SIZES[name]
    given = (batch, heads, N, 64), (batch, heads_k, N, 64)
    how = itertools.product(UNITS, ("standard", "fa1", "fa2"), ("fwd", "bwd"), (False, True))
    for unit, algorithm, passes, causal in how:
        if (unit, algorithm) == ("wgmma", "standard"):
            continue
        call = {"unit": unit, "dtype": UNITS[unit], "algorithm": algorithm, "passes": passes}
        with bounds.DEVICES["H200"].planning():
            plan = fa_numba.plan(*given, causal=causal, **call)
        for kernel in plan.kernels:
            within = zip(kernel.grid, MOST_BLOCKS, strict=True)
            assert all(1 <= n <= most for n, most in within), (call, kernel)
            assert kernel.threads <= 1024 and kernel.shared_bytes <= 227 * 1024


def test_chunks_double_until_the_grid_has_them():
    """40 million causal columns are 312,500 tiles: eight go together, as 65,535 is the limit."""
    how = {"dtype": "float16", "passes": "bwd", "causal": True, "unit": "wgmma", "group_splits": 1}
    with bounds.DEVICES["H200"].planning():
        plan = fa_numba.plan(*[(1, 2, 40_000_000, 64)] * 2, **how)
        most = fa_numba.plan(*[(1, 2, 65_535 * 128, 64)] * 2, **how)
    assert plan.kernels[1].grid == (16, 1, ceil_div(312_500, 8))
    assert most.kernels[1].grid == (2, 1, 65_535)
    assert tiles.MOST_CHUNKS == splits.MAX_SHARES == 65535 and MOST_BLOCKS[0] == 2**31 - 1


def test_splits_are_at_most_256():
    """The merge reads l and m of 256 splits at once, so that no choice is larger."""
    with bounds.DEVICES["H200"].planning():
        plan = fa_numba.plan((1, 1, 1, 64), (1, 1, 2**28, 64), dtype="float16")
        assert 8 < plan.kv_splits <= MAX_KV_SPLITS == 256
        with pytest.raises(ValueError, match="at most 65535 with 1 K/V heads .an axis of a CUDA"):
            fa_numba.plan(
                *[(1, 1, 64, 64)] * 2,
                dtype="float16",
                passes="bwd",
                unit="wgmma",
                group_splits=65536,
            )


@pytest.mark.parametrize("name, size", [("batch", (65536, 1)), ("heads of q", (1, 65536))])
def test_batch_and_heads_are_at_most_those_of_a_grid(name, size):
    message = f"{name} must be at most 65535 .the limit of a CUDA grid., got 65536"
    with pytest.raises(ValueError, match=message):
        fa_numba.plan((*size, 1, 4), (*size, 1, 4))
    assert fa_numba.plan(*[tuple(n - (n > 1) for n in size) + (1, 4)] * 2)


def test_vectors_of_a_softmax_are_at_most_those_of_the_first_axis_of_a_grid():
    """A thread block takes a vector, and a vector of one element is small."""
    message = "vectors in x must be at most 2147483647 .the limit of a CUDA grid., got 2147483648"
    with pytest.raises(ValueError, match=message):
        fa_numba.softmax(np.broadcast_to(np.float32(0), (2**31, 1)))
    message = "x must have at most 2147482624 elements per vector, got 2147482625"
    with pytest.raises(ValueError, match=message):
        fa_numba.softmax(np.broadcast_to(np.float32(0), (1, MAX_SEQLEN + 1)))
    with devices.using("emulator"), pytest.raises(ValueError, match="would take the emulator"):
        fa_numba.softmax(np.broadcast_to(np.float32(0), (2**31 - 1, 1)))


def test_commands_take_sequences_of_a_million_rows():
    size = whole(1, LONGEST_OF_COMMANDS)
    assert size("1M") == 2**20
    with pytest.raises(ArgumentTypeError, match="integer from 1 to 1048576, got 1049600"):
        size("1025k")


def test_sequences_with_a_block_mask_are_shorter_than_the_word_of_a_visit():
    """A word has 28 bits for a row, and blocks have up to 1,024 rows."""
    sizes = {"batch": 1, "heads_q": 1, "heads_k": 1, "head_dim": 8}
    assert MAX_LISTED + 1024 == 2**28
    for name in "qk":
        lengths = {"seqlen_q": MAX_LISTED, "seqlen_k": MAX_LISTED}
        assert Problem(**sizes, **lengths, sparse=True).sparse
        lengths[f"seqlen_{name}"] += 1
        message = f"seqlen of {name} must be at most 268434432 with a block mask, got 268434433"
        with pytest.raises(ValueError, match=message):
            Problem(**sizes, **lengths, sparse=True)
        assert not Problem(**sizes, **lengths).sparse
    with pytest.raises(ValueError, match="seqlen of q must be at most 268434432 with a block mask"):
        fa_numba.create_block_mask(lambda b, h, i, j: j <= i, 1, 1, MAX_LISTED + 1, 64)
    create = functools.partial(fa_numba.create_block_mask, lambda b, h, i, j: j <= i, 1, 1)
    with devices.using("emulator"):
        with pytest.raises(ValueError, match=r"fewer than 2\*\*31 blocks, got 2147483648 "):
            create(2**16, 2**15, block_size=1)
        with pytest.raises(ValueError, match="would take the emulator"):
            create(2**16 - 1, 2**15, block_size=1)


def test_blocks_that_nobody_chose_double_until_there_are_few():
    """4,096 heads of 2,048 rows: 16 x 16 is doubled three times."""

    def chosen(batch, heads, Nq, Nk):
        problem = Problem(batch, heads, heads, Nq, Nk, 8)
        return blocks.block_size_of("block_size", "auto", problem)

    assert chosen(64, 64, 2048, 2048) == chosen(1, 1, 2**20, 2**20) == (128, 128)
    assert chosen(1, 64, 2048, 2048) == (16, 16)  # 2^20 blocks
    assert chosen(1, 65, 2048, 2048) == chosen(1, 1, 2049, 1) == chosen(1, 1, 4096, 1) == (32, 32)
    assert chosen(1, 1, 4097, 1) == (64, 64)
    # Elements that are seen are counted in float32, which has all integers up to 2^24.
    assert 2**20 == blocks.MOST_ROWS**2 <= 2**24
    for size in ((1024, 1), (1, 1024)):
        assert blocks.block_size_of("block_size", size, Problem(1, 1, 1, 64, 64, 8)) == size
    with pytest.raises(ValueError, match="an integer from 1 to 1024, or two of them"):
        blocks.block_size_of("block_size", (1025, 1024), Problem(1, 1, 1, 64, 64, 8))


def test_a_multiprocessor_holds_the_blocks_that_its_registers_and_memory_allow():
    """Registers go to warps by 256, and each block takes 1,024 bytes more than it has."""
    cases = [((128, 0, 36), 12), ((128, 57_700, 32), 3), ((128, 0, None), 2), ((256, 0, 255), 1)]
    for (threads, shared, registers), least in cases:
        kernel = SimpleNamespace(threads=threads, shared_bytes=shared, min_blocks=1)
        assert bounds.occupancy(bounds.DEVICES["H200"], kernel, registers).least == least
    for Bc, stages, most, registers in ((96, 2, 3, 80), (48, 4, 2, 128), (240, 2, 1, 256)):
        spec = select_wgmma_spec(Tiles(64, Bc, stages=stages), 64, 227 * 1024, shares=True)
        assert (spec.blocks, spec.registers_at_first) == (most, registers), (Bc, spec.blocks)


def test_the_power_of_two_that_holds_a_number():
    assert list(map(power_of_two, (1, 2, 3, 4, 5, 2**31 - 1, 2**31, 2**40 + 1))) == [
        1, 2, 4, 4, 8, 2**31, 2**31, 2**41
    ]  # fmt: skip


# --- words ---------------------------------------------------------------------------------------


def test_words_of_seeds_have_32_bits_each():
    for seed in (0, 5, 2**31, 2**32 - 1, 2**32, 2**32 + 5, 2**63 + 5, 2**64 - 1):
        for offset in (0, 2**31, 2**32 - 1):
            words = binding.seed_words(seed, offset)
            assert all(-(2**31) <= n < 2**31 for n in words)
            low, high, third = (n % 2**32 for n in words)
            assert (low + (high << 32), third) == (seed, offset)
            assert as_word("seed", seed, 64) == seed and as_word("offset", offset, 32) == offset
    for name, bits in (("seed", 64), ("offset", 32)):
        with pytest.raises(ValueError, match=rf"{name} must be an .* from 0 to 2\*\*{bits} - 1"):
            as_word(name, 2**bits, bits)


def test_probabilities_of_dropout_are_16_bits():
    problem = Problem(1, 1, 1, 1, 1, 1, dropout_p=1 - 2**-20)
    assert problem.dropout_p == 1 - 2**-16 and drop_threshold(problem.dropout_p) == 65535
    assert Problem(1, 1, 1, 1, 1, 1, dropout_p=2**-16).dropout_p == 2**-16
    assert signed(65535 << 16) == -65536 and signed(2**31 - 1) == 2**31 - 1
    assert signed(2**31) == -(2**31) and MAX_HEADS == 65536
    # Kernels compare the upper halves of words with the threshold.
    threshold = FEATURES["dropout"].passes["threshold"].value(SimpleNamespace(problem=problem))
    assert threshold % 2**32 == 65535 << 16


def test_the_longest_sequence_leaves_room_for_a_tile():
    assert MAX_SEQLEN + 1024 == 2**31  # rows are counted to the end of the last tile
    for name in "qk":
        lengths = {"seqlen_q": 1, "seqlen_k": 1} | {f"seqlen_{name}": MAX_SEQLEN + 1}
        with pytest.raises(ValueError, match=f"seqlen of {name} must be at most 2147482624, got 2"):
            Problem(1, 1, 1, head_dim=8, **lengths)
        # The sum of a row, a diagonal and a side of a window is an int32.
        lengths[f"seqlen_{name}"] = 2**29
        assert Problem(1, 1, 1, head_dim=8, window=(2**29 - 1, 2**29 - 1), **lengths).window[0] > 0
        lengths[f"seqlen_{name}"] = 2**29 + 1
        message = f"seqlen of {name} must be at most 536870912 with a window, got 536870913"
        with pytest.raises(ValueError, match=message):
            Problem(1, 1, 1, head_dim=8, window=(1, 1), **lengths)


@pytest.mark.parametrize("dtype", ["int64", "uint64"])
def test_integers_of_callers_are_not_cut_to_32_bits(dtype):
    beyond = np.array([2**32 + 1], dtype)
    with pytest.raises(ValueError, match="kv_lens must contain integers from 0 to 9 .*4294967297"):
        Problem(1, 1, 1, 9, 9, 8, kv_lens=beyond)
    with pytest.raises(ValueError, match=r"page numbers from 0 to 2\*\*31 - 1, got 4294967297"):
        as_table(beyond[None])
    if dtype == "uint64":
        with pytest.raises(
            ValueError, match=r"must contain integers below 2\*\*63, got 9223372036"
        ):
            as_table(np.array([[2**63]], dtype))
        with pytest.raises(ValueError, match=r"page numbers .* got 9223372036854775807"):
            as_table(np.array([[2**63 - 1]], dtype))


def test_a_limit_itself_is_allowed(monkeypatch):
    """And what is just above the limit is refused."""
    with devices.using("emulator"):
        steps, empty = placement.EMULATOR_SECONDS * Unit.emulated_steps, LaunchPlan(launches=())
        placement.check_steps(empty, "x", steps)
        with pytest.raises(ValueError, match="x would take the emulator up to about 30 s"):
            placement.check_steps(empty, "x", 1.001 * steps)
        monkeypatch.setattr(softmax, "MAX_SEQLEN", 4)
        assert fa_numba.softmax(np.zeros((1, 4), np.float32)).tolist() == [[0.25] * 4]
        with pytest.raises(ValueError, match="x must have at most 4 elements per vector, got 5"):
            fa_numba.softmax(np.zeros((1, 5), np.float32))
        for columns, says in ((2**15, "fewer than 2.*31 blocks, got 2147483648"), (2**14, "take")):
            with pytest.raises(ValueError, match=says):
                fa_numba.create_block_mask(
                    lambda b, h, i, j: i > j, 1, 1, 2**16, columns, block_size=1
                )


def test_pages_have_at_most_256_rows():
    assert (PAGE_SIZES[0], PAGE_SIZES[-1]) == (16, 256) and MAX_HEAD_DIM == 256
    for rows in (8, 257, 272):
        with pytest.raises(ValueError, match="is a multiple of 16 from 16 to 256, got"):
            fa_numba.plan((1, 1, 1, 8), (1, 1, rows, 8), block_table=(1, 1))


def test_a_launch_over_rows_counts_its_threads_in_32_bits():
    kernel = make_merge(8, "float32", "float32", "float32", True)
    most = 2**32 // kernel.threads
    plan = LaunchPlan(launches=(Launch.of(kernel, (most + 1, 1, 1)),))
    message = r"a launch over x can have at most 2\*\*32 threads per head, but would need 4294967"
    with pytest.raises(ValueError, match=message):
        placement.check_grid(plan, "x")
    within = LaunchPlan(launches=(Launch.of(kernel, (most, 1, 1)),))
    with devices.using("emulator"), pytest.raises(ValueError, match="would take the emulator"):
        placement.check_grid(within, "x")


def test_ranks_compare_hashes_as_signed_words_of_64_bits():
    """A hash and its negative: each is below 2^62."""
    words = [agreement.Meant({"n": n}).word for n in range(64)]
    assert 2**61 < max(words) < 2**62 and len(set(words)) == 64


# --- sums of 64 bits -----------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
def test_the_model_counts_billions_of_elements(causal):
    """A row tile of r rows sees c columns: sums over all of them, in Python's integers."""
    B, H, N, d = 128, 64, 2**17, 64
    problem, size = Problem(B, H, H, N, N, d, causal=causal), Tiles(64, 128)
    ends = [round_up(i + 64, 128) if causal else N for i in range(0, N, 64)]
    wanted = {"Q": N * d, "K": sum(ends) * d, "V": sum(ends) * d}
    found = io_model.fa2(problem, size)
    for name, per_head in wanted.items():
        assert found.loads[name] == B * H * per_head, name
    visited = [ceil_div(n, 128) for n in ends]
    assert io_model.tiles_visited("fa2", problem, size) == B * H * sum(visited)
    square = io_model.standard(problem, size).stores["S"]
    assert square == B * H * N * N > 2**32


def test_a_tensor_map_with_ends_spans_at_most_its_second_axis():
    """Such a map counts rows from 2^30, and subtracts as many from the address by wrapping."""
    rows = 2**20
    values = np.zeros(64, np.uint16)
    array = np.lib.stride_tricks.as_strided(values, (2, 1, rows, 64), (2**37, 0, 128, 2))
    message = f"it must span at most {2**30} steps of 128 bytes, got {2**30 + rows + 1}"
    with pytest.raises(ValueError, match=message):
        assert TiledArray(array, 8, "float16", ends=True).layout
    most = SimpleNamespace(shape=(1, 1, WRAPS - 1, 64), strides=(0, 0, 128, 2))
    assert TiledArray(most, 8, "float16", ends=True).layout.shape[1] == WRAPS
    layout = TiledArray(array[:1], 8, "float16", ends=True).layout
    assert layout.shape[:3] == (2 * WRAPS, rows + 1, WRAPS) and WRAPS == 2**30
    assert (layout.strides[0] * WRAPS + 128 * WRAPS) % 2**64 == 0


def test_arrays_of_a_function_are_copied_up_to_the_documented_size():
    text = (Path(fa_numba.__file__).parent / "options.md").read_text()
    assert f"copies arrays of up to {COPIED_BYTES >> 20} MiB that the" in text


def test_causal_tiles_have_more_warps_where_shared_memory_is_below_200_kib():
    """163 KiB of an A100, 227 KiB of an H100: eight warps were faster on the first alone."""
    for limit, threads in ((163 * 1024, 256), (200 * 1024 - 16, 256), (200 * 1024, 128)):
        with devices.planning_for((8, 0), limit, 108):
            how = {"dtype": "float16", "unit": "mma", "algorithm": "fa2", "causal": True}
            assert fa_numba.plan(*[(1, 8, 2048, 128)] * 2, **how).tiles.threads == threads


def test_strides_of_dense_arrays_have_64_bits():
    assert dense((300, 300, 2**20, 64), 2) == (300 * 2**27, 2**27, 128, 2)
