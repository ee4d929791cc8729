"""What mma.sync has of its own: how warps share a tile, measures that are left out, plans."""

import itertools

import numpy as np
import pytest
from backward_helpers import ALL_WAYS
from helpers import ALGORITHMS, attend, case, check
from mma_helpers import every_flash, half_inputs

import fa_numba
from fa_numba import Tiles
from fa_numba import device as devices
from fa_numba.choices.tiles import mma_tiles
from fa_numba.options import Features
from fa_numba.tiling import (
    MEASURES,
    MmaSpec,
    StandardSpec,
    select_mma_backward_spec,
    select_mma_spec,
)

every_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS)


either_mask = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


SMALL = Tiles(16, 16)


HEAD_DIMS = (1, 7, 16, 20, 32, 64, 96, 128, 192, 256)


KINDS = {"standard": StandardSpec, "fa1": MmaSpec, "fa2": MmaSpec}


def test_the_partitions_of_the_default_tiles():
    with devices.using("emulator"):
        for algorithm, d in itertools.product(ALGORITHMS, HEAD_DIMS):
            shape = (1, 1, 4096, d)
            plan = fa_numba.plan(shape, shape, algorithm=algorithm, dtype="float16")
            assert plan.tiles.threads == plan.kernels[0].threads
            rows = 32 * plan.tiles.Br // plan.tiles.threads
            assert rows in (16, 32)
    # Q's fragments stay in registers, or do not: both are in the tests of these head dimensions.
    assert {select_mma_spec(SMALL, d, 2**17).keeps_q for d in HEAD_DIMS} == {False, True}


KEYS = {"warp_partition": "keys"}


@pytest.mark.parametrize("d", HEAD_DIMS)
def test_split_keys_with_the_default_tiles(device, d):
    q, k, v = half_inputs("float16", 1, 1, 1, 21, 70, d)
    check(device, "fa1", q, k, v, causal=True, **KEYS)
    with devices.using("emulator"):
        for N in (1, 70, 4096):
            plan = fa_numba.plan(
                (1, 1, N, d), (1, 1, N, d), algorithm="fa1", dtype="float16", **KEYS
            )
            columns = 32 * plan.tiles.Bc // plan.tiles.threads
            assert plan.warp_partition == "keys" and columns % 16 == 0 < plan.tiles.threads // 64


@either_mask
def test_both_partitions_access_global_memory_alike(causal):
    with devices.using("emulator"):
        how = {"algorithm": "fa1", "dtype": "float16", "tiles": Tiles(32, 64), "causal": causal}
        rows, keys = (
            fa_numba.plan((2, 4, 300, 64), (2, 2, 200, 64), warp_partition=name, **how)
            for name in ("rows", "keys")
        )
    assert (rows.warp_partition, keys.warp_partition) == ("rows", "keys") and rows != keys
    assert rows.accesses == keys.accesses and rows.flops == keys.flops
    extra = keys.kernels[0].shared_bytes - rows.kernels[0].shared_bytes
    assert extra == 4 * (keys.tiles.threads // 32 - 1) * 32 * (64 + 2)


@pytest.mark.in_turn("causal")
@every_flash
@pytest.mark.parametrize("causal", [False, True])
def test_no_measure_changes_what_is_computed_or_accessed(device, algorithm, causal):
    q, k, v = half_inputs("float16", 1, 2, 1, 37, 50, 24)
    how = {"tiles": Tiles(32, 16), "causal": causal}
    whole = check(device, algorithm, q, k, v, **how)
    names = [name for name, owners in MEASURES.items() if algorithm in owners]
    ways = [(name,) if name != "padding" else ("swizzle", name) for name in names]
    for ablate in (*ways, tuple(names)):
        same = "folded_scale" not in ablate
        run = attend if same else check
        result = run(device, algorithm, q, k, v, ablate=ablate, **how)
        if same:
            assert np.array_equal(result.O, whole.O) and np.array_equal(result.L, whole.L)


def test_a_plan_says_what_it_does_without():
    with devices.using("emulator"):
        how = {"dtype": "float16", "tiles": Tiles(64, 32)}
        whole, less = (
            fa_numba.plan((1, 2, 300, 64), (1, 2, 300, 64), ablate=names, **how)
            for names in ((), ["wide_stores", "swizzle", "swizzle"])
        )
        bare = fa_numba.plan(*[(1, 2, 300, 64)] * 2, ablate=("padding", "swizzle"), **how)
    assert (whole.ablated, less.ablated) == ((), ("swizzle", "wide_stores"))
    assert whole.accesses == less.accesses == bare.accesses
    swizzled, padded, plain = (p.kernels[0].shared_bytes for p in (whole, less, bare))
    assert swizzled == plain and padded - plain == 2 * (64 + 2 * 32) * 8


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_plan_says_what_runs(dtype):
    shape = (2, 4, 300, 64)
    with devices.using("emulator"):
        for algorithm in ALGORITHMS:
            plan = fa_numba.plan(shape, shape, algorithm=algorithm, dtype=dtype)
            same = fa_numba.plan(shape, shape, algorithm=algorithm, dtype=dtype, unit="mma")
            single = fa_numba.plan(shape, shape, algorithm=algorithm)
            assert plan == same and plan.unit == "mma" and single.unit == "simt"
            names = [f"{algorithm}_forward"]
            if algorithm == "standard":
                names = ["standard_scores", "standard_softmax", "standard_output"]
            assert [kernel.name for kernel in plan.kernels] == names
            assert plan.problem.dtype == plan.accesses.dtype == dtype
            assert plan.flops == single.flops
            if algorithm == "standard":
                assert plan.workspace_bytes == 2 * 8 * 300 * 304  # rows of whole 16 bytes
        assert "A" in fa_numba.plan(shape, shape, algorithm="fa1", dtype=dtype).accesses.loads


@every_algorithm
@pytest.mark.parametrize("limit", [99 * 1024, 163 * 1024, 227 * 1024])
def test_the_default_tiles_fit(algorithm, limit):
    plain, others = Features(causal=True), [Features(bias=True), Features(packed=True)]
    calls = [(f, False) for f in (plain, *others)]
    calls += [(f, True) for f in (plain, *others) if algorithm == "fa1"]
    every = itertools.product(("fwd", "bwd"), HEAD_DIMS, (1, 17, 64, 4096), calls)
    for passes, d, N, (features, keys) in every:
        if algorithm == "standard":
            tiles = mma_tiles("standard", passes, N, N, d, limit).value
            spec = select_mma_spec(tiles, d, limit, StandardSpec)
        elif passes == "bwd":
            continue  # `test_the_default_tiles_fit_backward`
        else:
            tiles = mma_tiles(algorithm, "fwd", N, N, d, limit, features, keys).value
            spec = select_mma_spec(tiles, d, limit, features=features, splits_keys=keys)
        with case(passes, d, N, features, keys):
            assert spec.shared_bytes <= limit and spec.fits_registers
            assert tiles.Br <= max(16, 2 * N) and tiles.Bc <= max(32 if keys else 16, 2 * N)
            assert N < 4096 or tiles.Br >= (16 if keys else 32)
            assert N < 4096 or tiles.Bc >= (32 if keys else 16)


@pytest.mark.parametrize("way", ALL_WAYS)
def test_a_plan_says_what_runs_backward(way):
    shape, dtype = (2, 4, 300, 63), "float16"
    algorithm, own = ALL_WAYS[way]
    with devices.using("emulator"):
        facts = {"algorithm": algorithm, "passes": "bwd", **own}
        plan = fa_numba.plan(shape, shape, dtype=dtype, **facts)
        assert plan == fa_numba.plan(shape, shape, dtype=dtype, unit="mma", **facts)
        single = fa_numba.plan(shape, shape, algorithm=algorithm, passes="bwd")
    assert plan.unit == "mma" and single.unit == "simt" and plan.flops == single.flops
    assert plan.problem.dtype == plan.accesses.dtype == dtype
    names = [k.name for k in plan.kernels]
    rows, A = 8 * 300, 8 * 300 * 64  # rows of A start at 8-byte addresses
    Tc = -(-300 // plan.tiles.Bc)
    if way == "standard":
        assert names == [k.name for k in single.kernels]
        assert plan.workspace_bytes == 2 * 2 * 8 * 300 * 304
    elif algorithm == "fa1":
        splits = own.get("query_splits", 1)
        assert names == ["fa1_backward", *["round_rows"] * (2 * (splits > 1))]
        assert plan.kernels[0].grid == (splits, 4, 2)
        assert plan.workspace_bytes == 4 * A * (3 if splits > 1 else 1)
    else:
        last = "fa2_backward_dq" if way == "fa2-deterministic" else "round_rows"
        assert names == ["row_sums", "fa2_backward", last]
        assert plan.kernels[1].grid == (Tc, 4, 2)
        assert plan.workspace_bytes == 4 * (rows + (A if way == "fa2" else 0))


@pytest.mark.parametrize("limit", [99 * 1024, 163 * 1024, 227 * 1024])
@pytest.mark.parametrize("algorithm", ["fa1", "fa2"])
def test_the_default_tiles_fit_backward(limit, algorithm):
    for d, N in itertools.product(range(8, 257, 8), (1, 17, 64, 4096)):
        if d > 192 and algorithm == "fa1" and limit < 2**17:
            continue  # not even the smallest do
        tiles = mma_tiles(algorithm, "bwd", N, N, d, limit).value
        spec = select_mma_backward_spec(tiles, d, limit, algorithm=algorithm)
        assert spec.shared_bytes <= limit and spec.fits_registers
        assert tiles.Br <= max(32, 2 * N) and tiles.Bc <= max(16, 2 * N)
