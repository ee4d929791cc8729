"""Every kernel of CUDA cores and of mma.sync against float64, between guard bands, its accesses
against the closed form. What mma.sync alone has is in `test_mma`.
"""

import math
import sys
from contextlib import nullcontext

import numpy as np
import pytest
from helpers import (
    ALGORITHMS,
    GUARDS,
    LAYOUTS,
    Memory,
    OnGpu,
    assert_close_to_float64,
    assert_counts,
    attend,
    check,
    numpy_dtype,
    random_inputs,
    to_numpy,
)
from mma_helpers import BFLOAT16, SLOW_BFLOAT16

import fa_numba
from fa_numba import Tiles, reference
from fa_numba import device as devices
from fa_numba.host import planning, standard
from fa_numba.tiling import splits

every_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS)
flash = pytest.mark.parametrize("algorithm", ALGORITHMS[1:])
either_mask = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
dtypes = pytest.mark.parametrize("dtype", ["float32", "float16", SLOW_BFLOAT16])
every_dtype = pytest.mark.parametrize("dtype", ["float32", "float16", BFLOAT16])
SMALL = {"float32": Tiles(8, 16), "float16": Tiles(16, 16), "bfloat16": Tiles(16, 16)}
every_layout = pytest.mark.parametrize("layout", [x for x in LAYOUTS if x != "broadcast"])


# --- the guard bands and the check can fail --------------------------------------------------


@every_dtype
@every_layout
def test_a_guard_band_surrounds_every_array(dtype, layout):
    memory = Memory("emulator", (2, 2, 3, 5), layout, dtype=dtype)
    assert (memory.buffer == GUARDS[memory.buffer.itemsize]).all()
    assert np.isnan(memory.view.astype(np.float32)).all()
    assert memory.inside.sum() == memory.view.size and not memory.inside.all()
    memory.view[...] = 1.0
    memory.assert_intact("out", whole=False)
    with pytest.raises(AssertionError, match="memory of out was written"):
        memory.assert_intact("out", whole=True)
    memory.buffer[~memory.inside] += 1  # another NaN than the guard's
    with pytest.raises(AssertionError, match="guard band of out"):
        memory.assert_intact("out", whole=False)


@every_dtype
@pytest.mark.parametrize("change", ["scale", "one element", "missing", "L"])
def test_the_check_fails_on_a_wrong_result(dtype, change):
    q, k, v = random_inputs(1, 2, 1, 24, 40, 8, dtype=dtype)
    how = {"return_lse": True} | ({} if dtype == "float32" else {"matrix_dtype": dtype})
    single = [x.astype(np.float32) for x in (q, k, v)]
    O, L = reference.unfused(*single, **how)
    assert_close_to_float64(O, q, k, v, L)
    if change == "scale":
        off = {"float32": 1.001, "float16": 1.01, "bfloat16": 1.01}[dtype]
        O, L = reference.unfused(*single, scale=off / math.sqrt(8), **how)
    elif change == "one element":
        O[0, 1, 3, 5] += {"float32": 3e-5, "float16": 0.02, "bfloat16": 0.15}[dtype]
    elif change == "missing":
        O[0, 1, 3, 5] = np.nan
    else:
        L[0, 0, 2] += 1e-4
    with pytest.raises(AssertionError, match="worst at .* got .*, expected"):
        assert_close_to_float64(O, q, k, v, L)


# --- shapes ----------------------------------------------------------------------------------

LENGTHS = [(1, 1), (1, 40), (40, 1), (8, 16), (9, 17), (15, 31), (16, 32), (17, 33), (37, 13)]
LENGTHS += [(33, 70)]
HEAD_DIMS = (1, 2, 3, 7, 8, 16, 20, 31, 32, 33, 40, 64, 80, 96, 128, 160, 192, 256)


@pytest.mark.in_turn("algorithm")
@every_algorithm
@dtypes
@either_mask
@pytest.mark.parametrize("Nq, Nk", LENGTHS)
def test_lengths(device, algorithm, dtype, causal, Nq, Nk):
    q, k, v = random_inputs(1, 1, 1, Nq, Nk, 8, dtype=dtype)
    check(device, algorithm, q, k, v, causal=causal, tiles=SMALL[dtype])


@pytest.mark.in_turn("algorithm")
@every_algorithm
@dtypes
@pytest.mark.parametrize("d", HEAD_DIMS)
def test_head_dims_with_the_default_tiles(device, algorithm, dtype, d):
    # Both masks, over the list: the default tiles do not depend on it.
    causal = HEAD_DIMS.index(d) % 2 == 1
    q, k, v = random_inputs(1, 1, 1, 21, 37, d, dtype=dtype)
    check(device, algorithm, q, k, v, causal=causal)


@pytest.mark.in_turn("algorithm")
@every_algorithm
@dtypes
@pytest.mark.parametrize("d", [1, 3, 7, 20, 48, 64, 96, 132, 192, 256])
def test_head_dims_with_several_tiles(device, algorithm, dtype, d):
    q, k, v = random_inputs(1, 1, 1, 18, 35, d, dtype=dtype)
    how = {"tiles": Tiles(16, 16), "causal": d % 64 > 0}
    result = check(device, algorithm, q, k, v, **how)
    # Rows too wide, or not at 16-byte addresses, are copied one element after the other.
    same = attend(device, algorithm, q, k, v, layout="odd", out_layout="odd", **how)
    assert np.array_equal(same.O, result.O) and np.array_equal(same.L, result.L)


@pytest.mark.in_turn("algorithm")
@every_algorithm
@dtypes
@pytest.mark.parametrize("B, Hq, Hk", [(2, 1, 1), (1, 3, 3), (2, 6, 2), (1, 5, 1)])
def test_batches_and_shared_heads(device, algorithm, dtype, B, Hq, Hk):
    q, k, v = random_inputs(B, Hq, Hk, 9, 17, 8, dtype=dtype)
    check(device, algorithm, q, k, v, causal=Hk == 1, tiles=SMALL[dtype])


@pytest.mark.in_turn("algorithm")
@every_algorithm
@dtypes
@pytest.mark.parametrize("Nq, Nk", [(40, 5), (40, 24), (33, 17)])
def test_rows_that_see_no_column_give_zero_and_minus_infinity(device, algorithm, dtype, Nq, Nk):
    q, k, v = random_inputs(1, 2, 1, Nq, Nk, 8, dtype=dtype)
    result = check(device, algorithm, q, k, v, causal=True, tiles=SMALL[dtype])
    blind = Nq - Nk
    assert (result.O[:, :, :blind] == 0).all()
    assert (result.L[:, :, :blind] == -np.inf).all()
    assert np.isfinite(result.L[:, :, blind:]).all()


@flash
@dtypes
def test_a_row_without_a_key_is_zero_even_where_v_is_not_a_number(device, algorithm, dtype):
    q, k, v = random_inputs(1, 1, 1, 21, 5, 8, dtype=dtype)
    v[...] = np.nan
    result = attend(device, algorithm, q, k, v, causal=True, tiles=Tiles(16, 16))
    assert (result.O[0, 0, :16] == 0).all() and np.isneginf(result.L[0, 0, :16]).all()
    assert np.isnan(result.O[0, 0, 16:].astype(np.float32)).all()


@dtypes
@either_mask
@pytest.mark.parametrize("Nq, Nk", [(57, 40), (40, 70)])
def test_query_splits(device, dtype, causal, Nq, Nk):
    q, k, v = random_inputs(1, 1, 1, Nq, Nk, 8, dtype=dtype)
    options = {"causal": causal, "tiles": Tiles(16, 16)}
    whole = check(device, "fa1", q, k, v, **options)
    for query_splits in range(2, -(-Nq // 16) + 2):
        split = attend(device, "fa1", q, k, v, query_splits=query_splits, **options)
        # The rows of a tile are computed alike wherever it is computed.
        assert np.array_equal(split.O, whole.O) and np.array_equal(split.L, whole.L)


TILES = {
    "float32": [Tiles(4, 8), Tiles(12, 24), Tiles(32, 8), Tiles(8, 64), Tiles(64, 32)],
    "float16": [Tiles(16, 64), Tiles(48, 32), Tiles(64, 16), Tiles(64, 48), Tiles(128, 64)],
}


@pytest.mark.in_turn("algorithm")
@every_algorithm
@pytest.mark.parametrize(
    "dtype, tiles", [(dtype, x) for dtype, all_tiles in TILES.items() for x in all_tiles], ids=str
)
def test_tiles(device, algorithm, dtype, tiles):
    sizes = (27, 35, 12) if dtype == "float32" else (70, 75, 16)
    q, k, v = random_inputs(1, 1, 1, *sizes, dtype=dtype)
    check(device, algorithm, q, k, v, causal=True, tiles=tiles)


@every_algorithm
@pytest.mark.parametrize("threads", sorted({s.threads for s in splits(16, 32, 24)}))
def test_threads(device, algorithm, threads):
    tiles = Tiles(16, 32, threads)
    q, k, v = random_inputs(1, 1, 1, 18, 40, 24)
    check(device, algorithm, q, k, v, causal=True, tiles=tiles)


# --- memory ----------------------------------------------------------------------------------


@pytest.mark.in_turn("algorithm")
@every_algorithm
@dtypes
@pytest.mark.parametrize("d", [8, 6])
@pytest.mark.parametrize(
    "layout, out_layout",
    [
        ("padded", "odd"),
        ("odd", "padded"),
        ("odd", "odd"),
        ("transposed", "transposed"),
        ("columns", "reversed"),
        ("reversed", "columns"),
        ("strided", "strided"),
    ],
)
def test_layouts(device, algorithm, dtype, d, layout, out_layout):
    q, k, v = random_inputs(2, 2, 1, 17, 20, d, dtype=dtype)
    options = {"tiles": SMALL[dtype], "layout": layout, "out_layout": out_layout}
    check(device, algorithm, q, k, v, causal=True, **options)


@every_algorithm
@dtypes
def test_a_broadcast_batch_of_inputs(device, algorithm, dtype):
    inputs = random_inputs(1, 2, 2, 17, 20, 8, dtype=dtype)
    q, k, v = (np.repeat(a, 3, axis=0) for a in inputs)
    result = check(device, algorithm, q, k, v, tiles=SMALL[dtype], layout="broadcast")
    assert np.array_equal(result.O[0], result.O[2])


@every_algorithm
@dtypes
def test_without_lse_and_out(device, algorithm, dtype):
    q, k, v = random_inputs(1, 2, 1, 9, 17, 8, dtype=dtype)
    tiles = SMALL[dtype]
    both = check(device, algorithm, q, k, v, tiles=tiles)
    alone = check(device, algorithm, q, k, v, tiles=tiles, return_lse=False)
    assert alone.L is None and np.array_equal(alone.O, both.O)
    inputs = [Memory(device, a.shape, "padded", a).argument for a in (q, k, v)]
    with devices.using(device):
        made = to_numpy(fa_numba.attention(*inputs, algorithm=algorithm, tiles=tiles))
    assert made.dtype == numpy_dtype(dtype) and np.array_equal(made, both.O)


def test_standard_attention_with_rows_beyond_shared_memory(device, monkeypatch):
    monkeypatch.setattr(standard, "row_elements", lambda *_, **__: 0)
    monkeypatch.setattr(planning, "planned", planning.planned.__wrapped__)
    q, k, v = random_inputs(1, 2, 1, 9, 300, 4)
    result = check(device, "standard", q, k, v, causal=True, tiles=Tiles(16, 64))
    p = fa_numba.plan(q.shape, k.shape, algorithm="standard", causal=True, tiles=Tiles(16, 64))
    assert p.accesses.loads["S"] == 2 * p.accesses.loads["P"] == 2 * 2 * 9 * 300
    assert np.isfinite(result.L).all()


# --- values ----------------------------------------------------------------------------------


@pytest.mark.in_turn("algorithm")
@every_algorithm
@every_dtype
@either_mask
@pytest.mark.parametrize("logit", [30.0, 1e4])
def test_peaked_and_huge_logits(device, algorithm, dtype, causal, logit):
    q, k, v = random_inputs(1, 2, 2, 35, 37, 8, q_size=logit / 3, dtype=dtype)
    scores = np.abs(np.float32(q) @ np.float32(k).swapaxes(2, 3)) / math.sqrt(8)
    assert logit < scores.max() < 4 * logit
    check(device, algorithm, q, k, v, causal=causal, tiles=SMALL[dtype])


@every_algorithm
@dtypes
def test_a_growing_maximum_rescales_in_every_tile(device, algorithm, dtype):
    q, k, v = random_inputs(1, 1, 1, 20, 80, 8, dtype=dtype)
    q[...] = 1.0
    k[...] = np.linspace(-20, 20, 80)[:, None]
    check(device, algorithm, q, k, v, causal=True, tiles=SMALL[dtype])
    check(device, algorithm, q, k[:, :, ::-1].copy(), v, tiles=SMALL[dtype])


@pytest.mark.in_turn("algorithm")
@every_algorithm
@dtypes
@pytest.mark.parametrize("scale", [None, 0, 0.0, -0.5, 40.0, np.float32(0.25), 7])
def test_scales(device, algorithm, dtype, scale):
    q, k, v = random_inputs(1, 1, 1, 18, 35, 8, dtype=dtype)
    check(device, algorithm, q, k, v, scale=scale, causal=True, tiles=SMALL[dtype])


@every_algorithm
@dtypes
@either_mask
def test_scores_of_minus_infinity(device, algorithm, dtype, causal):
    q, k, v = random_inputs(1, 2, 1, 35, 37, 8, dtype=dtype)
    q[..., 0] = np.abs(q[..., 0])
    k[:, :, 3:33, 0] = -np.inf  # a whole column tile and parts of two
    result = check(device, algorithm, q, k, v, causal=causal, tiles=SMALL[dtype])
    assert np.isfinite(result.O.astype(np.float32)).all() and np.isfinite(result.L).all()


@every_algorithm
@dtypes
def test_rows_of_minus_infinity(device, algorithm, dtype):
    q, k, v = random_inputs(1, 1, 1, 19, 37, 8, dtype=dtype)
    q[:, :, :, 0], k[...] = 1.0, np.abs(k)
    q[0, 0, 5] = q[0, 0, 11] = -np.inf
    result = check(device, algorithm, q, k, v, tiles=SMALL[dtype])
    for row in (5, 11):
        assert (result.O[0, 0, row] == 0).all() and result.L[0, 0, row] == -np.inf


@every_algorithm
@dtypes
def test_rows_of_one_key_are_that_key_exactly(device, algorithm, dtype):
    q, k, v = random_inputs(1, 2, 1, 7, 1, 5, dtype=dtype)
    result = check(device, algorithm, q, k, v, tiles=SMALL[dtype])
    assert np.array_equal(result.O, np.broadcast_to(v, (1, 2, 7, 5)))


def _nan_rows(O):
    return np.flatnonzero(np.isnan(O.astype(np.float32)).any(axis=-1)).tolist()


@pytest.mark.in_turn("algorithm")
@every_algorithm
@dtypes
@either_mask
@pytest.mark.parametrize("bad", [np.nan, np.inf], ids=["nan", "inf"])
def test_nan_and_infinity_in_k_reach_the_rows_that_see_them(device, algorithm, dtype, causal, bad):
    q, k, v = random_inputs(1, 2, 2, 37, 35, 8, dtype=dtype)
    how = {"causal": causal, "tiles": SMALL[dtype]}
    q[..., 2] = np.abs(q[..., 2]) + 0.1  # +inf in k makes scores of +inf
    clean = attend(device, algorithm, q, k, v, **how)
    k[0, 1, 19, 2] = bad
    dirty = attend(device, algorithm, q, k, v, **how)
    sees = np.arange(37) - 2 >= 19 if causal else np.full(37, True)
    assert _nan_rows(dirty.O[0, 1]) == np.flatnonzero(sees).tolist()
    assert not np.isfinite(dirty.L[0, 1, sees]).any()
    assert np.array_equal(dirty.O[0, 1, ~sees], clean.O[0, 1, ~sees])
    assert np.array_equal(dirty.L[0, 1, ~sees], clean.L[0, 1, ~sees])
    assert np.array_equal(dirty.O[0, 0], clean.O[0, 0])


@every_algorithm
@dtypes
@either_mask
def test_nan_in_q_reaches_its_row_alone_and_in_v_its_column(device, algorithm, dtype, causal):
    q, k, v = random_inputs(1, 1, 1, 37, 35, 8, dtype=dtype)
    how = {"causal": causal, "tiles": SMALL[dtype]}
    clean = attend(device, algorithm, q, k, v, **how)
    before = q[0, 0, [1, 13]].copy()
    q[0, 0, 13, 7] = q[0, 0, 1, 0] = np.nan  # row 1 sees no column when causal
    dirty = attend(device, algorithm, q, k, v, **how)
    rows = [13] if causal else [1, 13]
    assert _nan_rows(dirty.O[0, 0]) == rows and np.isnan(dirty.L[0, 0, rows]).all()
    others = np.setdiff1d(np.arange(37), rows)
    assert np.array_equal(dirty.O[0, 0, others], clean.O[0, 0, others])
    assert np.array_equal(dirty.L[0, 0, others], clean.L[0, 0, others])
    if not causal:
        q[0, 0, [1, 13]], v[0, 0, 11, 5] = before, np.nan
        dirty = attend(device, algorithm, q, k, v, **how)
        assert np.isnan(dirty.O[0, 0, :, 5].astype(np.float32)).all()
        others = np.arange(8) != 5
        assert np.array_equal(dirty.O[..., others], clean.O[..., others])
        assert np.array_equal(dirty.L, clean.L)


# --- accesses --------------------------------------------------------------------------------


def test_counts_can_fail():
    q, k, v = random_inputs(1, 1, 1, 9, 17, 8)
    tiles = SMALL["float32"]
    with fa_numba.count_accesses() as counts:
        fa_numba.flash_attention_2(q, k, v, tiles=tiles)
    assert_counts(counts, fa_numba.plan(q.shape, k.shape, tiles=tiles))
    for wrong in ({"tiles": Tiles(16, 16)}, {"algorithm": "fa1", "tiles": tiles}):
        with pytest.raises(AssertionError):
            assert_counts(counts, fa_numba.plan(q.shape, k.shape, **wrong))


# --- on a GPU: sizes, repetition, libraries --------------------------------------------------

LARGE = [
    (1, 2, 1, 2048, 2048, 64),
    (2, 4, 2, 1000, 1531, 128),
    (1, 1, 1, 777, 513, 256),
    (1, 3, 3, 129, 2047, 40),
    (3, 2, 1, 1025, 64, 33),
]


@pytest.mark.gpu
@every_algorithm
@dtypes
@either_mask
@pytest.mark.parametrize("shape", LARGE, ids=str)
def test_large_problems_and_twenty_equal_runs(algorithm, dtype, causal, shape):
    q, k, v = random_inputs(*shape, dtype=dtype)
    first = check("gpu", algorithm, q, k, v, causal=causal)
    for _ in range(20):
        O, L = fa_numba.attention(q, k, v, algorithm=algorithm, causal=causal, return_lse=True)
        assert np.array_equal(O, first.O) and np.array_equal(L, first.L)


@pytest.mark.gpu
@dtypes
@pytest.mark.parametrize("query_splits", [2, 3, 7, 64])
def test_large_query_splits(dtype, query_splits):
    q, k, v = random_inputs(1, 2, 1, 1500, 1300, 64, dtype=dtype)
    check("gpu", "fa1", q, k, v, causal=True, query_splits=query_splits)


@pytest.mark.gpu
def test_a_row_beyond_shared_memory():
    q, k, v = random_inputs(1, 1, 1, 3, 70_000, 8)
    p = fa_numba.plan(q.shape, k.shape, algorithm="standard")
    assert p.accesses.loads["S"] == 2 * p.accesses.loads["P"]
    check("gpu", "standard", q, k, v)


@pytest.mark.gpu
@every_algorithm
@every_layout
def test_large_layouts(algorithm, layout):
    q, k, v = random_inputs(2, 2, 1, 300, 333, 64)
    check("gpu", algorithm, q, k, v, causal=True, layout=layout, out_layout=layout)


@pytest.mark.gpu
@every_algorithm
def test_numpy_arrays_on_a_gpu(algorithm):
    q, k, v = random_inputs(1, 2, 1, 200, 300, 64)
    kept = [a.copy() for a in (q, k, v)]
    out = Memory("emulator", q.shape, "odd")
    for given_out in (None, out.argument):
        O, L = fa_numba.attention(q, k, v, algorithm=algorithm, return_lse=True, out=given_out)
        assert type(O) is np.ndarray and type(L) is np.ndarray
        assert given_out is None or O is given_out
        assert_close_to_float64(O, q, k, v, L)
    assert all(np.array_equal(a, b) for a, b in zip((q, k, v), kept, strict=True))
    out.assert_intact("out", whole=False)


@pytest.mark.gpu
@every_algorithm
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_an_array_interface_and_a_stream(algorithm, dtype):
    from numba import cuda

    q, k, v = random_inputs(1, 2, 1, 200, 300, 64, dtype=dtype)
    stream = cuda.stream()
    for given_stream in (None, stream, int(stream)):
        memory = [Memory("gpu", a.shape, "padded", a) for a in (q, k, v)]
        out = Memory("gpu", q.shape, "padded", dtype=dtype)
        cuda.synchronize()
        options = {"return_lse": True, "out": out.argument, "stream": given_stream}
        arguments = (m.argument for m in memory)
        O, L = fa_numba.attention(*arguments, algorithm=algorithm, **options)
        cuda.synchronize()
        assert isinstance(O, OnGpu) and O is out.argument
        assert hasattr(L, "__cuda_array_interface__")
        out.assert_intact("out", whole=False)
        assert_close_to_float64(out.fetch(), q, k, v, to_numpy(L), algorithm=algorithm)


@every_algorithm
@every_dtype
@pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_torch_tensors_in_and_out(algorithm, dtype, place):
    torch = pytest.importorskip("torch")
    q, k, v = random_inputs(1, 2, 1, 9, 17, 8, dtype=dtype)
    of = getattr(torch, dtype)
    tensors = [torch.tensor(a.astype("f4"), device=place).to(of) for a in (q, k, v)]
    with devices.using("emulator") if place == "cpu" else nullcontext():
        O, L = fa_numba.attention(*tensors, algorithm=algorithm, return_lse=True)
    assert O.dtype == of and L.dtype == torch.float32
    assert O.device == L.device == tensors[0].device
    out, lse = O.float().cpu().numpy(), L.cpu().numpy()
    assert_close_to_float64(out, q, k, v, lse, algorithm=algorithm)


@pytest.mark.gpu
@every_algorithm
def test_torch_tensors_are_neither_copied_nor_changed(algorithm):
    torch = pytest.importorskip("torch")
    q, k, v = random_inputs(1, 2, 1, 200, 300, 64)
    tensors = [torch.tensor(a, device="cuda") for a in (q, k, v)]
    pointers = [t.data_ptr() for t in tensors]
    O = fa_numba.attention(*tensors, algorithm=algorithm)
    out = torch.full_like(tensors[0], float("nan"))
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    returned = fa_numba.attention(*tensors, algorithm=algorithm, out=out, stream=side)
    side.synchronize()
    assert returned is out and torch.equal(out, O)
    assert [t.data_ptr() for t in tensors] == pointers
    assert all(np.array_equal(t.cpu().numpy(), a) for t, a in zip(tensors, (q, k, v), strict=True))


@pytest.mark.gpu
def test_torch_runs_on_its_current_stream_and_copies_nothing():
    torch = pytest.importorskip("torch")
    q, k, v = (torch.randn(1, 4, 512, 64, device="cuda") for _ in range(3))
    want = fa_numba.flash_attention_2(q, k, v)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        late = torch.zeros_like(q)
        torch.cuda._sleep(50_000_000)
        late += q  # the kernel must wait for this, on the same stream
        got = fa_numba.flash_attention_2(late, k, v)
    torch.cuda.synchronize()
    assert torch.equal(got, want)
    transposed = q.transpose(1, 2).contiguous().transpose(1, 2)
    out = torch.empty_like(q)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    fa_numba.flash_attention_2(transposed, k, v, out=out)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before and torch.equal(out, want)


@pytest.mark.gpu
@every_algorithm
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_peak_of_memory_is_the_plans_workspace(algorithm, dtype):
    inputs = [devices.to_gpu(a) for a in random_inputs(2, 4, 2, 256, 384, 64, dtype=dtype)]
    p = fa_numba.plan(inputs[0].shape, inputs[1].shape, algorithm=algorithm, dtype=dtype)
    with devices.track_memory() as memory:
        fa_numba.attention(*inputs, algorithm=algorithm)
    assert memory.peak_bytes == p.workspace_bytes


def test_torch_is_not_imported_for_numpy_arrays():
    if "torch" in sys.modules:
        pytest.skip("torch is imported already")
    q, k, v = random_inputs(1, 1, 1, 2, 2, 4)
    with devices.using("emulator"):
        fa_numba.flash_attention_2(q, k, v)
    assert "torch" not in sys.modules
