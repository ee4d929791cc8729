"""Tiles, the papers' rule, and how the threads of a block share a tile."""

import itertools

import numpy as np
import pytest
from helpers import refused

from fa_numba import Tiles
from fa_numba.choices.tiles import mma_tiles, paper_rule, simt_tiles
from fa_numba.options import Features
from fa_numba.tiling import (
    MAX_THREADS,
    MmaDqSpec,
    SimtSpec,
    select_mma_spec,
    select_spec,
    splits,
)

KB = 1024


@pytest.mark.parametrize(
    "arguments, error, says",
    [
        ((0, 8), ValueError, ["Br", "multiple of 4", "0"]),
        ((6, 8), ValueError, ["Br", "multiple of 4", "6"]),
        ((4, 12), ValueError, ["Bc", "multiple of 8", "12"]),
        ((4.0, 8), TypeError, ["Br", "int", "4.0"]),
        ((4, "8"), TypeError, ["Bc", "int", "'8'"]),
        ((4, 8, 32.0), TypeError, ["threads must be an integer or None, got 32.0"]),
        ((np.bool_(True), 8), TypeError, ["Br", "an int", "True"]),
        ((4, 8, 32, True), TypeError, ["stages", "int", "True"]),
        ((4, 8, 32, None), TypeError, ["stages", "int", "None"]),
        ((4, 8, 32, 0), ValueError, ["stages", "1 to 4", "0"]),
        ((4, 8, 32, 5), ValueError, ["stages", "1 to 4", "5"]),
    ],
)
def test_bad_tiles_are_refused(arguments, error, says):
    with refused(error, ["tiles", *says]):
        Tiles(*arguments)


def test_the_backward_pass_has_no_stages():
    assert Tiles(64, 32, 64, stages=2).for_backward() == Tiles(64, 32, 64)
    assert Tiles(64, 32).for_backward() == Tiles(64, 32)


# FlashAttention, Algorithm 1, line 1: Bc = ceil(M / 4d), Br = min(ceil(M / 4d), d)
@pytest.mark.parametrize(
    "M, d, Br, Bc",
    [
        (1024, 64, 4, 4),
        (12 * KB, 64, 48, 48),  # 48 KB of float32
        (12 * KB, 128, 24, 24),
        (25 * KB, 64, 64, 100),  # 100 KB: d bounds Br
        (58112, 64, 64, 227),  # an H100's 227 KB
        (58112, 128, 114, 114),
        (58112, 256, 57, 57),
        (1000, 3, 3, 84),  # 83.3 is rounded up
        (10, 64, 1, 1),
    ],
)
def test_the_papers_rule_by_hand(M, d, Br, Bc):
    assert paper_rule(M, d) == (Br, Bc)


TILINGS = list(itertools.product((4, 8, 12, 16, 32, 48, 64, 128), (8, 16, 24, 40, 64, 128)))


@pytest.mark.parametrize("d", [1, 4, 30, 64, 100, 256])
def test_every_split_covers_the_block_exactly_once(d):
    found = 0
    for Br, Bc in TILINGS:
        for s in splits(Br, Bc, d, features=Features(causal=True)):
            found += 1
            places = list(itertools.product(range(s.ty_count), range(s.tx_count)))
            rows = sorted(ty + i * s.ty_count for ty in range(s.ty_count) for i in range(s.TM))
            assert rows == list(range(Br))
            cols = sorted(tx + j * s.tx_count for tx in range(s.tx_count) for j in range(s.TN))
            assert cols == list(range(Bc))
            o = [
                4 * (tx + c * s.tx_count) + n
                for tx in range(s.tx_count)
                for c in range(s.DN)
                for n in range(4)
            ]
            assert sorted(o) == list(range(s.columns)) and s.columns >= d
            assert s.columns - 4 * s.tx_count < d  # no whole group to spare
            assert len(places) == s.threads and s.threads % 32 == 0
            assert s.threads <= MAX_THREADS and s.accumulators <= SimtSpec.max_accumulators
            assert 32 % s.tx_count == 0  # the threads of a row lie in one warp
            assert s.features.causal
    assert found > 50


LIMITS = [48 * KB, 64 * KB, 99 * KB, 100 * KB, 163 * KB, 227 * KB]


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("algorithm", ["standard", "fa1", "fa2"])
def test_the_default_fits_every_device_and_head_dimension(algorithm, limit):
    shapes = (1, 1), (1, 5000), (5000, 1), (17, 100)
    # Kernels take d in steps of 4: one of each four, at another limit the next one.
    for d in range(1 + LIMITS.index(limit) % 4, 257, 4):
        for Nq, Nk in (shapes[d // 4 % 4], (4096, 4096)):
            tiles = simt_tiles(algorithm, "fwd", Nq, Nk, d, limit).value
            spec = select_spec(tiles, d, limit)
            assert spec.shared_bytes <= limit
            assert (spec.Br, spec.Bc) == (tiles.Br, tiles.Bc)


def test_the_default_follows_the_papers_where_memory_allows():
    for d in (32, 64, 128):
        tiles = simt_tiles("fa2", "fwd", 4096, 4096, d, 227 * KB).value
        assert {tiles.Br, tiles.Bc} <= {64, 128}
    assert simt_tiles("fa1", "fwd", 4096, 4096, 64, 227 * KB).value.Bc == 128
    for N in (1, 15, 16, 33, 100):
        tiles = simt_tiles("fa2", "fwd", N, N, 64, 227 * KB).value
        assert max(tiles.Br, tiles.Bc) <= max(16, 2 * N)


def test_tiles_without_a_split_are_refused():
    with pytest.raises(
        ValueError, match=r"tiles\.threads must be 32, 64, 128 or 256, or None, .*got 48"
    ):
        select_spec(Tiles(16, 16, 48), 8, 227 * KB)
    with pytest.raises(ValueError, match="tiles must fit in .* of shared memory .*Br=1024, Bc=256"):
        select_spec(Tiles(1024, 256), 64, 227 * KB)


def test_tiles_beyond_shared_memory_are_refused_with_both_numbers():
    least = min(s.shared_bytes for s in splits(64, 64, 128))
    assert select_spec(Tiles(64, 64), 128, least).shared_bytes == least
    with pytest.raises(ValueError) as caught:
        select_spec(Tiles(64, 64), 128, least - 1)
    for part in (f"got {least} bytes", f"tiles must fit in {least - 1} bytes"):
        assert part in str(caught.value)


@pytest.mark.parametrize("limit", [64 * KB, 99 * KB, 163 * KB])
def test_tiles_of_the_kernel_of_dq_are_the_largest_that_fit(limit):
    """Up to the tiles that were measured, or a short sequence."""
    for d, N in itertools.product(range(40, 257, 24), (17, 4096)):
        tiles = mma_tiles("fa2", "dQ", N, 4096, d, limit).value
        select_mma_spec(tiles, d, limit, MmaDqSpec)
        most = mma_tiles("fa2", "dQ", N, 4096, d, 1 << 20).value
        if tiles != most:
            twice = Tiles(tiles.Br, 2 * tiles.Bc), Tiles(2 * tiles.Br, tiles.Bc)
            larger = [x for x in twice if x.Br <= most.Br and x.Bc <= most.Bc]
            assert larger and any(not fits(x, d, limit) for x in larger), (tiles, most, d, N)


def fits(tiles, head_dim, limit):
    try:
        return bool(select_mma_spec(tiles, head_dim, limit, MmaDqSpec))
    except ValueError:
        return False
