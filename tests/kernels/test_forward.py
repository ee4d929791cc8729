"""Every kernel against float64, between guard bands, its accesses against the closed form."""

import math
import sys

import numpy as np
import pytest
from conftest import examples
from helpers import (
    ALGORITHMS,
    GUARD,
    LAYOUTS,
    Memory,
    OnGpu,
    assert_close_to_float64,
    assert_counts,
    attend,
    check,
    guarded,
    random_inputs,
    to_numpy,
)
from hypothesis import given
from hypothesis import strategies as st

import fa_numba
from fa_numba import Tiles
from fa_numba import device as devices
from fa_numba.host import planning, standard
from fa_numba.tiling import splits

every_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS)
either_mask = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
SMALL = Tiles(8, 16)

HEAD_DIMS = (1, 2, 3, 7, 8, 16, 31, 32, 33, 40, 64, 80, 96, 128, 160, 192, 256)


# --- the guard bands and the check can fail --------------------------------------------------


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "broadcast"])
def test_a_guard_band_surrounds_every_array(layout):
    buffer, view = guarded((2, 2, 3, 5), layout)
    assert np.isnan(buffer).all() and buffer.view(np.uint32).min() == GUARD.view(np.uint32)
    memory = Memory("emulator", (2, 2, 3, 5), layout)
    assert memory.inside.sum() == view.size and not memory.inside.all()
    memory.view[...] = 1.0
    memory.assert_intact("out", whole=False)
    with pytest.raises(AssertionError, match="memory of out was written"):
        memory.assert_intact("out", whole=True)
    memory.buffer[~memory.inside] = np.nan  # another NaN than the guard's
    with pytest.raises(AssertionError, match="guard band of out"):
        memory.assert_intact("out", whole=False)


@pytest.mark.parametrize("change", ["scale", "one element", "missing", "L"])
def test_the_check_fails_on_a_wrong_result(change):
    q, k, v = random_inputs(1, 2, 1, 24, 40, 8)
    O, L = fa_numba.reference.unfused(q, k, v, return_lse=True)
    assert_close_to_float64(O, q, k, v, L)
    if change == "scale":
        O, L = fa_numba.reference.unfused(q, k, v, return_lse=True, scale=1.001 / math.sqrt(8))
    elif change == "one element":
        O[0, 1, 3, 5] += 3e-5
    elif change == "missing":
        O[0, 1, 3, 5] = np.nan
    else:
        L[0, 0, 2] += 1e-4
    with pytest.raises(AssertionError, match="worst at .* got .*, expected"):
        assert_close_to_float64(O, q, k, v, L)


# --- shapes ----------------------------------------------------------------------------------

LENGTHS = [
    (1, 1),
    (1, 40),
    (40, 1),
    (3, 5),
    (7, 15),
    (8, 16),
    (9, 17),
    (15, 31),
    (16, 32),
    (17, 33),
    (13, 37),
    (37, 13),
    (31, 29),
]


@pytest.mark.in_turn("algorithm")
@every_algorithm
@either_mask
@pytest.mark.parametrize("Nq, Nk", LENGTHS)
def test_lengths(device, algorithm, causal, Nq, Nk):
    q, k, v = random_inputs(1, 1, 1, Nq, Nk, 8)
    check(device, algorithm, q, k, v, causal=causal, tiles=SMALL)


@pytest.mark.in_turn("algorithm")
@every_algorithm
@either_mask
@pytest.mark.parametrize("d", HEAD_DIMS)
def test_head_dims_with_the_default_tiles(device, algorithm, causal, d):
    q, k, v = random_inputs(1, 1, 1, 5, 7, d)
    check(device, algorithm, q, k, v, causal=causal)


@pytest.mark.in_turn("algorithm")
@every_algorithm
@pytest.mark.parametrize("d", [3, 20, 48, 132])
def test_head_dims_with_several_tiles(device, algorithm, d):
    q, k, v = random_inputs(1, 1, 1, 19, 21, d)
    check(device, algorithm, q, k, v, causal=True, tiles=Tiles(16, 16))


@pytest.mark.in_turn("algorithm")
@every_algorithm
@either_mask
@pytest.mark.parametrize("B, Hq, Hk", [(2, 1, 1), (1, 3, 3), (1, 4, 2), (2, 6, 2), (1, 5, 1)])
def test_batches_and_shared_heads(device, algorithm, causal, B, Hq, Hk):
    q, k, v = random_inputs(B, Hq, Hk, 9, 17, 4)
    check(device, algorithm, q, k, v, causal=causal, tiles=Tiles(8, 8))


@every_algorithm
@pytest.mark.parametrize("Nq, Nk", [(20, 3), (20, 12), (33, 17)])
def test_rows_that_see_no_column_give_zero_and_minus_infinity(device, algorithm, Nq, Nk):
    q, k, v = random_inputs(1, 2, 1, Nq, Nk, 8)
    result = check(device, algorithm, q, k, v, causal=True, tiles=Tiles(8, 8))
    blind = Nq - Nk
    assert (result.O[:, :, :blind] == 0).all()
    assert (result.L[:, :, :blind] == -np.inf).all()
    assert np.isfinite(result.L[:, :, blind:]).all()


@either_mask
@pytest.mark.parametrize("Nq, Nk", [(29, 21), (21, 40)])
def test_query_splits(device, causal, Nq, Nk):
    q, k, v = random_inputs(1, 2, 1, Nq, Nk, 4)
    whole = check(device, "fa1", q, k, v, causal=causal, tiles=Tiles(8, 8))
    Tr = -(-Nq // 8)
    for query_splits in range(2, Tr + 2):
        options = {"causal": causal, "tiles": Tiles(8, 8), "query_splits": query_splits}
        split = attend(device, "fa1", q, k, v, **options)
        # The rows of a tile are computed alike wherever it is computed.
        assert np.array_equal(split.O, whole.O) and np.array_equal(split.L, whole.L)


@pytest.mark.in_turn("algorithm")
@every_algorithm
@pytest.mark.parametrize(
    "tiles", [Tiles(4, 8), Tiles(12, 24), Tiles(32, 8), Tiles(8, 64), Tiles(64, 32)], ids=str
)
def test_tiles(device, algorithm, tiles):
    q, k, v = random_inputs(1, 1, 1, 27, 35, 12)
    check(device, algorithm, q, k, v, causal=True, tiles=tiles)


@every_algorithm
@pytest.mark.parametrize("threads", sorted({s.threads for s in splits(16, 32, 24)}))
def test_threads(device, algorithm, threads):
    tiles = Tiles(16, 32, threads)
    q, k, v = random_inputs(1, 1, 1, 18, 40, 24)
    check(device, algorithm, q, k, v, causal=True, tiles=tiles)


@pytest.mark.in_turn("algorithm")
@every_algorithm
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
def test_layouts(device, algorithm, d, layout, out_layout):
    q, k, v = random_inputs(2, 2, 1, 10, 19, d)
    check(
        device, algorithm, q, k, v, causal=True, tiles=SMALL, layout=layout, out_layout=out_layout
    )


@every_algorithm
def test_a_broadcast_batch_of_inputs(device, algorithm):
    q, k, v = (np.repeat(a, 3, axis=0) for a in random_inputs(1, 2, 2, 9, 11, 8))
    result = check(device, algorithm, q, k, v, tiles=Tiles(8, 8), layout="broadcast")
    assert np.array_equal(result.O[0], result.O[2])


@every_algorithm
def test_without_lse_and_out(device, algorithm):
    q, k, v = random_inputs(1, 2, 1, 9, 17, 8)
    both = check(device, algorithm, q, k, v, tiles=SMALL)
    alone = check(device, algorithm, q, k, v, tiles=SMALL, return_lse=False)
    assert alone.L is None and np.array_equal(alone.O, both.O)
    inputs = [Memory(device, a.shape, "padded", a).argument for a in (q, k, v)]
    with devices.using(device):
        made = fa_numba.attention(*inputs, algorithm=algorithm, tiles=SMALL)
    assert np.array_equal(to_numpy(made), both.O)


def test_standard_attention_with_rows_beyond_shared_memory(device, monkeypatch):
    monkeypatch.setattr(standard, "row_elements", lambda *_, **__: 0)
    monkeypatch.setattr(planning, "planned", planning.planned.__wrapped__)
    q, k, v = random_inputs(1, 2, 1, 9, 300, 4)
    result = check(device, "standard", q, k, v, causal=True, tiles=Tiles(16, 64))
    p = fa_numba.plan(q.shape, k.shape, algorithm="standard", causal=True, tiles=Tiles(16, 64))
    assert p.accesses.loads["S"] == 2 * p.accesses.loads["P"] == 2 * 2 * 9 * 300
    assert np.isfinite(result.L).all()


# --- values ----------------------------------------------------------------------------------


@every_algorithm
@either_mask
@pytest.mark.parametrize("logit", [30.0, 1e4])
def test_peaked_and_huge_logits(device, algorithm, causal, logit):
    q, k, v = random_inputs(1, 2, 2, 19, 21, 8, q_size=logit / 3)
    scores = np.abs(q @ k.swapaxes(2, 3)) / math.sqrt(8)
    assert logit < scores.max() < 4 * logit
    check(device, algorithm, q, k, v, causal=causal, tiles=Tiles(8, 8))


@every_algorithm
@either_mask
def test_constant_logits_average_the_values(device, algorithm, causal):
    q, k, v = random_inputs(1, 1, 1, 19, 21, 8)
    q[...], k[...] = 0.5, 0.25
    result = check(device, algorithm, q, k, v, causal=causal, tiles=Tiles(8, 8))
    visible = np.arange(19) + 3 if causal else np.full(19, 21)
    want = 8 * 0.125 / math.sqrt(8) + np.log(visible)
    assert np.allclose(result.L[0, 0], want, rtol=1e-6, atol=0)


@every_algorithm
@either_mask
def test_a_growing_maximum_rescales_in_every_tile(device, algorithm, causal):
    q, k, v = random_inputs(1, 1, 1, 20, 40, 4)
    q[...] = 1.0
    k[...] = np.linspace(-20, 20, 40, dtype=np.float32)[:, None]
    check(device, algorithm, q, k, v, causal=causal, tiles=Tiles(8, 8))
    check(device, algorithm, q, k[:, :, ::-1].copy(), v, causal=causal, tiles=Tiles(8, 8))


@pytest.mark.in_turn("algorithm")
@every_algorithm
@pytest.mark.parametrize("scale", [None, 0, 0.0, -0.5, 40.0, np.float32(0.25), 7])
def test_scales(device, algorithm, scale):
    q, k, v = random_inputs(1, 1, 1, 11, 19, 8)
    check(device, algorithm, q, k, v, scale=scale, causal=True, tiles=Tiles(8, 8))


@every_algorithm
@either_mask
def test_scores_of_minus_infinity(device, algorithm, causal):
    q, k, v = random_inputs(1, 2, 1, 19, 21, 8)
    q[..., 0] = np.abs(q[..., 0])
    k[:, :, 3:15, 0] = -np.inf  # a whole column tile and parts of two
    result = check(device, algorithm, q, k, v, causal=causal, tiles=Tiles(8, 8))
    assert np.isfinite(result.O).all() and np.isfinite(result.L).all()


@every_algorithm
@either_mask
def test_rows_of_minus_infinity(device, algorithm, causal):
    q, k, v = random_inputs(1, 1, 1, 19, 21, 8)
    q[:, :, :, 0], k[...] = 1.0, np.abs(k)
    q[0, 0, 5] = q[0, 0, 11] = -np.inf
    result = check(device, algorithm, q, k, v, causal=causal, tiles=Tiles(8, 8))
    for row in (5, 11):
        assert (result.O[0, 0, row] == 0).all() and result.L[0, 0, row] == -np.inf


def _nan_rows(O):
    return np.flatnonzero(np.isnan(O).any(axis=-1))


@pytest.mark.in_turn("algorithm")
@every_algorithm
@either_mask
@pytest.mark.parametrize("bad", [np.nan, np.inf], ids=["nan", "inf"])
def test_nan_and_infinity_in_k_reach_the_rows_that_see_them(device, algorithm, causal, bad):
    q, k, v = random_inputs(1, 2, 2, 21, 19, 8)
    q[..., 2] = np.abs(q[..., 2]) + 0.1  # +inf in k makes scores of +inf
    clean = attend(device, algorithm, q, k, v, causal=causal, tiles=Tiles(8, 8))
    k[0, 1, 11, 2] = bad
    dirty = attend(device, algorithm, q, k, v, causal=causal, tiles=Tiles(8, 8))
    sees = np.arange(21) - 2 >= 11 if causal else np.full(21, True)
    assert np.isnan(dirty.O[0, 1, sees]).all()
    assert not np.isfinite(dirty.L[0, 1, sees]).any()
    assert np.array_equal(dirty.O[0, 1, ~sees], clean.O[0, 1, ~sees])
    assert np.array_equal(dirty.L[0, 1, ~sees], clean.L[0, 1, ~sees])
    assert np.array_equal(dirty.O[0, 0], clean.O[0, 0])
    if np.isnan(bad):
        assert_close_to_float64(dirty.O, q, k, v, dirty.L, causal=causal)


@every_algorithm
@either_mask
def test_nan_in_q_reaches_its_row_alone(device, algorithm, causal):
    q, k, v = random_inputs(1, 1, 1, 21, 19, 8)
    clean = attend(device, algorithm, q, k, v, causal=causal, tiles=Tiles(8, 8))
    q[0, 0, 13, 7] = q[0, 0, 1, 0] = np.nan  # row 1 sees no column when causal
    dirty = attend(device, algorithm, q, k, v, causal=causal, tiles=Tiles(8, 8))
    rows = [13] if causal else [1, 13]
    assert _nan_rows(dirty.O[0, 0]).tolist() == rows
    assert np.isnan(dirty.O[0, 0, rows]).all() and np.isnan(dirty.L[0, 0, rows]).all()
    others = np.setdiff1d(np.arange(21), rows)
    assert np.array_equal(dirty.O[0, 0, others], clean.O[0, 0, others])
    assert np.array_equal(dirty.L[0, 0, others], clean.L[0, 0, others])


@every_algorithm
def test_nan_in_v_reaches_its_own_column_alone(device, algorithm):
    q, k, v = random_inputs(1, 1, 1, 21, 19, 8)
    clean = attend(device, algorithm, q, k, v, tiles=Tiles(8, 8))
    v[0, 0, 11, 5] = np.nan
    dirty = attend(device, algorithm, q, k, v, tiles=Tiles(8, 8))
    assert np.isnan(dirty.O[0, 0, :, 5]).all()
    others = np.arange(8) != 5
    assert np.array_equal(dirty.O[..., others], clean.O[..., others])
    assert np.array_equal(dirty.L, clean.L)


# --- accesses --------------------------------------------------------------------------------


def test_counts_can_fail():
    q, k, v = random_inputs(1, 1, 1, 9, 17, 8)
    with fa_numba.count_accesses() as counts:
        fa_numba.flash_attention_2(q, k, v, tiles=SMALL)
    assert_counts(counts, fa_numba.plan(q.shape, k.shape, tiles=SMALL))
    for wrong in ({"tiles": Tiles(16, 16)}, {"algorithm": "fa1", "tiles": SMALL}):
        with pytest.raises(AssertionError):
            assert_counts(counts, fa_numba.plan(q.shape, k.shape, **wrong))


shapes = st.tuples(
    st.integers(1, 2), st.integers(1, 2), st.integers(1, 2), *[st.integers(1, 26)] * 2,
    st.integers(1, 12),
)  # fmt: skip
tile_sizes = st.sampled_from([Tiles(4, 8), Tiles(8, 8), Tiles(8, 16), Tiles(12, 8), Tiles(16, 24)])


@every_algorithm
@examples(25)
@given(shapes, tile_sizes, st.booleans(), st.booleans(), st.integers(1, 5), st.booleans())
def test_any_problem(algorithm, shape, tiles, causal, return_lse, query_splits, aligned):
    B, Hk, group, Nq, Nk, d = shape
    q, k, v = random_inputs(B, Hk * group, Hk, Nq, Nk, d)
    if q.size < 64:  # so few that one sum cancelling would leave the yardstick to luck
        v = np.abs(v)
    options = {"query_splits": query_splits} if algorithm == "fa1" else {}
    options["layout"] = options["out_layout"] = "padded" if aligned else "odd"
    # attend holds the counts against the plan, absent arrays included.
    check(
        "emulator", algorithm, q, k, v,
        causal=causal, tiles=tiles, return_lse=return_lse, **options,
    )  # fmt: skip


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
@either_mask
@pytest.mark.parametrize("shape", LARGE, ids=str)
def test_large_problems_and_twenty_equal_runs(algorithm, causal, shape):
    q, k, v = random_inputs(*shape)
    first = check("gpu", algorithm, q, k, v, causal=causal)
    inputs = [devices.to_gpu(a) for a in (q, k, v)]
    for _ in range(20):
        O, L = fa_numba.attention(*inputs, algorithm=algorithm, causal=causal, return_lse=True)
        assert np.array_equal(to_numpy(O), first.O) and np.array_equal(to_numpy(L), first.L)


@pytest.mark.gpu
@pytest.mark.parametrize("query_splits", [2, 3, 7, 64])
def test_large_query_splits(query_splits):
    q, k, v = random_inputs(1, 2, 1, 1500, 1300, 64)
    check("gpu", "fa1", q, k, v, causal=True, query_splits=query_splits)


@pytest.mark.gpu
def test_a_row_beyond_shared_memory():
    q, k, v = random_inputs(1, 1, 1, 3, 70_000, 8)
    p = fa_numba.plan(q.shape, k.shape, algorithm="standard")
    assert p.accesses.loads["S"] == 2 * p.accesses.loads["P"]
    check("gpu", "standard", q, k, v)


@pytest.mark.gpu
@every_algorithm
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "broadcast"])
def test_large_layouts(algorithm, layout):
    q, k, v = random_inputs(2, 2, 1, 300, 333, 64)
    check("gpu", algorithm, q, k, v, causal=True, layout=layout, out_layout=layout)


@pytest.mark.gpu
@every_algorithm
def test_numpy_arrays_on_a_gpu(algorithm):
    q, k, v = random_inputs(1, 2, 1, 200, 300, 64)
    kept = [a.copy() for a in (q, k, v)]
    out, view = guarded(q.shape, "odd")
    for given_out in (None, view):
        O, L = fa_numba.attention(q, k, v, algorithm=algorithm, return_lse=True, out=given_out)
        assert type(O) is np.ndarray and type(L) is np.ndarray
        assert given_out is None or O is given_out
        assert_close_to_float64(O, q, k, v, L)
    assert all(np.array_equal(a, b) for a, b in zip((q, k, v), kept, strict=True))
    assert np.isnan(out).sum() == out.size - view.size


@pytest.mark.gpu
@every_algorithm
def test_an_array_interface_and_a_stream(algorithm):
    from numba import cuda

    q, k, v = random_inputs(1, 2, 1, 200, 300, 64)
    stream = cuda.stream()
    for given_stream in (None, stream, int(stream)):
        memory = [Memory("gpu", a.shape, "padded", a) for a in (q, k, v)]
        out = Memory("gpu", q.shape, "padded")
        cuda.synchronize()
        O, L = fa_numba.attention(
            *(m.argument for m in memory),
            algorithm=algorithm,
            return_lse=True,
            out=out.argument,
            stream=given_stream,
        )
        cuda.synchronize()
        assert isinstance(O, OnGpu) and O is out.argument
        assert hasattr(L, "__cuda_array_interface__")
        out.assert_intact("out", whole=False)
        assert_close_to_float64(out.fetch(), q, k, v, to_numpy(L))


@pytest.mark.gpu
@every_algorithm
def test_torch_tensors_in_and_out(algorithm):
    torch = pytest.importorskip("torch")
    q, k, v = random_inputs(1, 2, 1, 200, 300, 64)
    tensors = [torch.tensor(a, device="cuda") for a in (q, k, v)]
    pointers = [t.data_ptr() for t in tensors]
    O, L = fa_numba.attention(*tensors, algorithm=algorithm, return_lse=True)
    for result in (O, L):
        assert isinstance(result, torch.Tensor) and result.device == tensors[0].device
        assert result.dtype == torch.float32
    assert_close_to_float64(O.cpu().numpy(), q, k, v, L.cpu().numpy())

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
def test_the_peak_of_memory_is_the_plans_workspace(algorithm):
    inputs = [devices.to_gpu(a) for a in random_inputs(2, 4, 2, 256, 384, 64)]
    p = fa_numba.plan(inputs[0].shape, inputs[1].shape, algorithm=algorithm)
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


@pytest.mark.parametrize("algorithm", ["fa1", "fa2"])
def test_a_row_without_a_key_is_zero_even_where_v_is_not_a_number(algorithm):
    q, k, v = random_inputs(1, 1, 1, 9, 3, 4)
    v[:] = np.nan
    with fa_numba.device.using("emulator"):
        out, lse = fa_numba.attention(
            q, k, v, algorithm=algorithm, causal=True, tiles=Tiles(16, 16), return_lse=True
        )
    assert (out[0, 0, :6] == 0).all() and np.isneginf(lse[0, 0, :6]).all()
    assert np.isnan(out[0, 0, 6:]).all()
