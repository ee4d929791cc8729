"""Float32 on tensor cores: products of planes of 16 bits, held against float64 and CUDA cores."""

from contextlib import nullcontext
from functools import cache

import numpy as np
import pytest
from backward_helpers import differentiate, saved, true_gradients, with_dlse
from helpers import EPS, _distance, assert_within, attend, changing, random_inputs, refused, truth

import fa_numba
from fa_numba import Tiles, reference
from fa_numba.bounds import as_gpu
from fa_numba.dtypes import PRECISIONS

SPLIT = tuple(name for name, precision in PRECISIONS.items() if precision.planes > 1)
MASK = np.array([[1, 0, 1], [1, 1, 0]], bool)


def normal(*shape):
    return np.random.default_rng(3).standard_normal(shape, dtype=np.float32)


# (B, Hq, Hk, Nq, Nk, d), tiles, and the options of a call; two warps, ragged edges, several tiles.
CASES = {
    "padded d": ((1, 2, 1, 37, 45, 24), Tiles(32, 16, 64), {}),
    "Q not kept": ((1, 1, 1, 18, 33, 136), Tiles(32, 16, 64), {}),
    "32 rows": ((1, 1, 1, 40, 37, 64), Tiles(32, 32, 32), {"causal": True}),
    "stages": ((1, 1, 1, 33, 70, 16), Tiles(16, 16, 32, stages=2), {"window": (20, 9)}),
    "unaligned": ((1, 2, 2, 21, 35, 5), Tiles(16, 32), {"layout": "odd", "out_layout": "odd"}),
    "lengths": ((2, 2, 1, 20, 70, 40), Tiles(16, 32), {"q_lens": [20, 7], "kv_lens": [9, 70]}),
    "unaligned, even": ((1, 1, 1, 33, 20, 6), Tiles(16, 16), {"out_layout": "odd"}),
    "packed": (
        (1, 2, 1, 40, 50, 8), Tiles(16, 16),
        {"cu_seqlens_q": [0, 33, 40], "cu_seqlens_k": [0, 9, 50]},
    ),
    "scores": (
        (1, 2, 1, 20, 37, 16), Tiles(16, 16),
        {"softcap": 1.5, "bias": normal(2, 20, 37), "alibi_slopes": np.float32([0.5, 0.1])},
    ),
    # What dropout keeps of P is up to 1 / (1 - p).
    "dropout": ((1, 2, 1, 20, 70, 16), Tiles(16, 64), {"dropout_p": 0.9, "seed": 5}),
    "kv_splits": ((1, 2, 1, 20, 70, 24), Tiles(16, 16), {"kv_splits": 3}),
    "block mask": ((1, 1, 1, 32, 48, 16), Tiles(16, 16), {"block_mask": MASK}),
    # And a head dimension of V's own
    "narrow V": ((1, 4, 2, 19, 70, 40, 24), Tiles(16, 32), {"causal": True}),
    "wide V": ((1, 2, 1, 19, 70, 16, 72), Tiles(16, 32), {}),
    "V, unaligned": ((1, 2, 2, 19, 70, 20, 7), Tiles(16, 32), {"layout": "odd"}),
    # Of FA-1
    "query_splits": ((1, 2, 1, 70, 37, 24), Tiles(16, 16), {"query_splits": 2}),
    "keys": ((1, 1, 1, 40, 75, 24), Tiles(32, 32), {"warp_partition": "keys", "causal": True}),
    "ablated": ((1, 1, 1, 33, 35, 32), Tiles(16, 16), {"ablate": ("swizzle", "prefetch")}),
}  # fmt: skip


def inputs(shape, **options):
    """q, k and v of a head's own size each, from 1e-9 to 1e9, so that scores are of one size."""
    packed = "cu_seqlens_q" in options
    q, k, v = random_inputs(*shape)
    sizes = np.float32(10.0) ** np.linspace(-9, 9, shape[2])[:, None, None].astype(np.float32)
    group = shape[1] // shape[2]
    q, k, v = q / np.repeat(sizes, group, axis=0), k * sizes, v * sizes
    return tuple(x[0].swapaxes(0, 1) if packed else x for x in (q, k, v))


# What one of the two orders has.
OF_FA1, OF_FA2 = ("query_splits", "keys"), ("kv_splits", "stages")


# The same on Hopper's unit: one warpgroup or two, one panel a plane or two.
HOPPERS = {
    "padded d": ((1, 2, 1, 70, 45, 24), Tiles(64, 16), {}),
    "two panels": ((1, 1, 1, 66, 70, 72), Tiles(64, 32), {"causal": True}),
    "unaligned": ((1, 2, 2, 21, 35, 5), Tiles(64, 32), {"layout": "odd", "out_layout": "odd"}),
    "two consumers": ((1, 2, 2, 140, 100, 64), Tiles(128, 32, stages=3), {"causal": True}),
    "lengths": ((2, 2, 1, 70, 70, 40), Tiles(64, 32), {"q_lens": [70, 7], "kv_lens": [9, 70]}),
    "packed": (
        (1, 2, 1, 140, 50, 8), Tiles(64, 16),
        {"cu_seqlens_q": [0, 133, 140], "cu_seqlens_k": [0, 9, 50]},
    ),
    "kv_splits": ((1, 2, 1, 70, 70, 24), Tiles(64, 16), {"kv_splits": 3}),
    # Of FA-1: K and V in one slot each, several row tiles a block, that of all rows unfinished.
    "query_splits": (
        (1, 2, 1, 330, 100, 64), Tiles(128, 96), {"query_splits": 2, "causal": True},
    ),
    "window, lengths": (
        (2, 1, 1, 140, 100, 96), Tiles(128, 32), {"q_lens": [140, 65], "window": (20, 9)},
    ),
    # Of tiles that see nothing a slot of Q is left at once.
    "no rows": ((1, 2, 2, 70, 66, 128), None, {"q_lens": [0]}),
    "window": ((1, 1, 1, 65, 90, 16), Tiles(64, 32), {"window": (20, 9), "ablate": ("overlap",)}),
}  # fmt: skip
OF_HOPPERS_FA1 = ("query_splits", "window, lengths")
OF_HOPPERS_FA2 = ("kv_splits", "two consumers", "window", "unaligned")


@pytest.mark.in_turn("precision")
@pytest.mark.parametrize("precision", SPLIT)
@pytest.mark.parametrize(
    "on, algorithm, name",
    [
        *(("mma", "fa1", name) for name in CASES if name not in OF_FA2),
        *(("mma", "fa2", name) for name in CASES if name not in OF_FA1),
        *(("wgmma", "fa1", name) for name in HOPPERS if name not in OF_HOPPERS_FA2),
        *(("wgmma", "fa2", name) for name in HOPPERS if name not in OF_HOPPERS_FA1),
    ],
)
def test_results_and_counts(device, on, algorithm, name, precision):
    """As good as float32; with two planes of bfloat16, 2^-16 of the largest terms worse."""
    shape, tiles, options = (CASES if on == "mma" else HOPPERS)[name]
    q, k, v = inputs(shape, **options)
    given = {"tiles": tiles, "precision": precision, "unit": on, **options}
    result, want = attend(device, algorithm, q, k, v, **given), truth(q, k, v, **changing(given))
    assert_within("O", result.O, want.O, want.O_bound)
    assert_within("L", result.L, want.L, want.L_bound)


# (B, Hq, Hk, Nq, Nk, d), tiles and options of a backward call; beyond d = 64 two warps have the
# same columns.
BACKWARD = {
    "padded d": ((1, 2, 1, 37, 45, 24), Tiles(32, 32), {}),
    "32 columns a warp": ((1, 1, 1, 20, 70, 16), Tiles(16, 64, 64), {"causal": True}),
    "two warps": ((1, 1, 1, 40, 70, 72), Tiles(32, 32), {"causal": True}),
    "two warps, dropout": ((1, 1, 1, 33, 40, 80), Tiles(32, 32), {"dropout_p": 0.6, "seed": 5}),
    "unaligned": ((1, 2, 2, 21, 35, 6), Tiles(16, 16), {"layout": "odd"}),
    # Two warps down the rows of dQ
    "lengths": ((2, 2, 1, 20, 40, 8), Tiles(32, 32, 64), {"q_lens": [20, 7], "kv_lens": [9, 40]}),
    "packed": CASES["packed"],
    "scores": CASES["scores"],
    "dropout": ((1, 1, 1, 20, 70, 16), Tiles(16, 64), {"dropout_p": 0.6, "seed": 5}),
    "dlse": ((1, 1, 1, 20, 35, 16), Tiles(16, 16), {"dlse": True}),
    "narrow V": ((1, 2, 1, 37, 45, 40, 24), Tiles(32, 32), {"dropout_p": 0.3, "seed": 1}),
    "wide V": ((1, 2, 1, 37, 45, 24, 72), Tiles(32, 32), {"dropout_p": 0.3, "seed": 1}),
    "V, unaligned": ((1, 2, 1, 37, 45, 6, 7), Tiles(32, 32), {"layout": "odd"}),
}  # fmt: skip


# On Hopper's unit: two consumers with columns of their own, and beyond d = 64 with the same.
HOPPERS_BACKWARD = {
    "padded d": ((1, 2, 1, 130, 140, 24), None, {"causal": True}),
    "shared columns": ((1, 2, 1, 128, 130, 72), None, {"causal": True}),
    "a tile that no row sees": ((1, 1, 1, 30, 230, 8), None, {"window": (9, 9)}),
    "unaligned": ((1, 2, 2, 21, 35, 6), None, {"layout": "odd"}),
    "lengths": ((2, 2, 1, 70, 70, 40), None, {"q_lens": [70, 7], "kv_lens": [9, 70]}),
    "window": ((2, 1, 1, 40, 130, 72), None, {"q_lens": [40, 7], "window": (9, 9)}),
    "packed": (
        (1, 2, 1, 140, 50, 8), None, {"cu_seqlens_q": [0, 133, 140], "cu_seqlens_k": [0, 9, 50]},
    ),
    "dlse": ((1, 1, 1, 20, 35, 16), None, {"dlse": True}),
}  # fmt: skip


@pytest.mark.in_turn("precision")
@pytest.mark.parametrize("precision", SPLIT)
@pytest.mark.parametrize("name", BACKWARD)
def test_gradients_and_counts(device, precision, name):
    held_gradients(device, "mma", precision, name)


@pytest.mark.parametrize(
    "precision, name",
    [*(("fp16x3", name) for name in HOPPERS_BACKWARD), ("bf16x3", "packed"), ("bf16x3", "window")],
)
def test_gradients_and_counts_on_hopper(device, precision, name):
    held_gradients(device, "wgmma", precision, name)


def held_gradients(device, on, precision, name):
    """As good as float32; with two planes of bfloat16, 2^-15 worse."""
    shape, tiles, options = (BACKWARD if on == "mma" else HOPPERS_BACKWARD)[name]
    q, k, v = inputs(shape, **options)
    sizes = np.float32(10.0) ** np.linspace(4, -6, shape[1])[:, None].astype(np.float32)
    rows = (*q.shape[:-1], v.shape[-1])
    dout = np.random.default_rng(1).standard_normal(rows, dtype=np.float32)
    dout *= sizes if "cu_seqlens_q" in options else sizes[:, None]
    arrays = dout, q, k, v
    given = {"tiles": tiles, **options}
    layout = given.pop("layout", "padded")
    if given.pop("dlse", False):
        given = with_dlse(arrays, given)
    values = saved(q, k, v, **given)
    facts = {"saved_values": values, "unit": on, "precision": precision, "layout": layout}
    found = differentiate(device, "fa2", *arrays, **facts, **given)
    want = true_gradients(*arrays, saved_values=values, return_dbias="bias" in given, **given)
    lost = 2.0**-14 if precision == "bf16x3" else 0.0
    for of, gradient in zip(want.bounds, found, strict=False):
        exact = getattr(want, of)
        assert_within(of, gradient, exact, want.bounds[of] + lost * np.linalg.norm(exact))


def outliers(shape, share=1e-3, size=100.0):
    rng = np.random.default_rng(1)
    made = rng.standard_normal(shape) + size * rng.standard_normal(shape) * (
        rng.random(shape) < share
    )
    return made.astype(np.float32)


HARD = {
    "plain": random_inputs(1, 1, 1, 64, 192, 64),
    "causal": random_inputs(1, 1, 1, 128, 128, 64),
    "wide": random_inputs(1, 1, 1, 32, 96, 256),
    "long": random_inputs(1, 1, 1, 16, 4096, 16),
    "outliers": tuple(outliers((1, 1, n, 64)) for n in (64, 192, 192)),
    "logits of 10^4": random_inputs(1, 1, 1, 64, 192, 64, q_size=1e4),
    # Elements a millionth of the head's largest are of most rows all there is.
    "one huge row": tuple(
        x * np.where(np.arange(len(x[0, 0])) == 3, np.float32(1e6), np.float32(1.0))[:, None]
        for x in random_inputs(1, 1, 1, 64, 64, 64)
    ),
}

LONG = ("wide", "long")


@cache
def _hard_output(name, algorithm, precision, causal):
    how = {"algorithm": algorithm, "precision": precision, "causal": causal}
    return fa_numba.attention(*HARD[name], **how)


@pytest.mark.in_turn("algorithm")
@pytest.mark.parametrize("algorithm", ["fa1", "fa2"])
@pytest.mark.parametrize("precision", ["fp16x3", "bf16x6"])
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) if name in LONG else name for name in HARD],
)
def test_errors_are_at_most_twice_those_of_cuda_cores(name, precision, algorithm):
    q, k, v = HARD[name]
    options = {"causal": name in ("causal", "one huge row")}
    exact = reference.attention(q, k, v, **options)
    errors = {
        p: _distance(_hard_output(name, algorithm, p, **options), exact)
        for p in ("ieee", precision)
    }
    # Where one P is 1 and all others are 0, float32 gives V itself, planes V to a rounding.
    assert errors[precision] <= 2 * errors["ieee"] + EPS / 2 * np.linalg.norm(exact), errors


# Of rows a millionth of a head's largest fp16x3 keeps 18 bits, which gradients show and O does not.
@pytest.mark.in_turn("size")
@pytest.mark.parametrize("size", [1e-6, 1e4])
@pytest.mark.parametrize("name", [name for name in HARD if name not in (*LONG, "one huge row")])
def test_gradients_err_at_most_twice_as_much_as_those_of_cuda_cores(name, size):
    q, k, v = HARD[name]
    options = {"causal": name == "causal"}
    dout = outliers((2, *q.shape))[1] if name == "outliers" else normal(*q.shape)
    exact = reference.attention_backward(dout, q, k, v, **options)
    precisions = {p: {"precision": p, **options} for p in ("ieee", "fp16x3")}
    errors = {}
    for p, of in precisions.items():
        O, L = fa_numba.attention(q, k, v, return_lse=True, **of)
        found = fa_numba.attention_backward(np.float32(size) * dout, q, k, v, O, L, **of)
        errors[p] = [_distance(x / size, y) for x, y in zip(found, exact, strict=True)]
    for split, ieee, gradient in zip(errors["fp16x3"], errors["ieee"], exact, strict=True):
        assert split <= 2 * ieee + EPS / 2 * np.linalg.norm(gradient), errors


@pytest.mark.parametrize("unit, d", [("mma", 16), ("wgmma", 16), ("wgmma", 72)])
def test_a_row_whose_gradients_are_inf_leaves_the_others(unit, d):
    """The power of two of a tile is that of what is finite, be it large in one column alone."""
    q, k, v = random_inputs(1, 1, 1, 32, 20, d, q_size=0.1)
    dout, dlse = normal(*q.shape), np.zeros((1, 1, 32), np.float32)
    v[:, :, 12], dout[:, :, :8] = 1e3 * v[:, :, 12], 0.0
    O, L = fa_numba.attention(q, k, v, return_lse=True, precision="fp16x3")
    want, _, _ = reference.attention_backward(dout, q, k, v)
    dlse[0, 0, 5] = np.inf
    given = {"dlse": dlse, "precision": "fp16x3", "unit": unit}
    given |= {"tiles": Tiles(32, 32)} if unit == "mma" else {}
    dQ, _, _ = fa_numba.attention_backward(dout, q, k, v, O, L, **given)
    others = np.arange(32) != 5
    assert _distance(dQ[:, :, others], want[:, :, others]) < 1e-6 * np.linalg.norm(want)


def test_heads_have_powers_of_their_own_and_padding_none():
    """Sizes that float16 does not have, up to those that float32 has; behind the lengths lies what
    would leave nothing of a head.
    """
    q, k, v = random_inputs(1, 5, 5, 9, 20, 8)
    sizes = np.float32([1e-30, 1e37, 0.0, 1e-40, 1.0])[:, None, None]
    lens = {"q_lens": [7], "kv_lens": [17]}
    cases = q / np.float32(1e20), k * np.float32(1e20), v * sizes
    exact, exact_L = reference.attention(*cases, return_lse=True, **lens)
    for x, n in zip(cases, (7, 17, 17), strict=True):
        x[0, :3, n:] = np.float32(3e38)
        x[0, 3:, n:] = np.nan
    O, L = fa_numba.attention(*cases, precision="fp16x3", return_lse=True, **lens)
    assert np.isfinite(O).all() and np.abs(L[..., :7] - exact_L[..., :7]).max() < 1e-5
    for h in (0, 1, 4):
        assert _distance(O[0, h], exact[0, h]) < 1e-6 * np.linalg.norm(exact[0, h])
    assert not O[0, 2].any() and np.abs(O[0, 3]).max() < 1e-39  # or 0: of V as denormals


def test_nan_reaches_its_own_head_and_what_is_finite_is_scaled_by_what_is_finite():
    q, k, v = random_inputs(1, 2, 2, 9, 20, 8)
    want = fa_numba.attention(q, k, v, precision="fp16x3")
    v[0, 0, 3, 1], k[0, 0, 4, 2] = np.inf, np.nan
    O = fa_numba.attention(q, k, v, precision="fp16x3")
    assert np.isnan(O[0, 0]).all() and np.array_equal(O[0, 1], want[0, 1])
    k[0, 0, 4, 2] = 1.0
    O = fa_numba.attention(q, k, v, precision="fp16x3")
    finite = np.arange(8) != 1
    exact = reference.attention(q, k, np.where(np.isinf(v), 0, v))
    assert _distance(O[..., finite], exact[..., finite]) < 1e-5


Q, K = (1, 2, 5, 4), (1, 1, 7, 4)
REFUSED = {
    "another name": (
        {"precision": "tf32"}, [
            "precision must be 'ieee', 'fp16x3', 'bf16x6' or 'bf16x3', got 'tf32'"],
    ),
    "no text": ({"precision": 3}, [
        "precision must be 'ieee', 'fp16x3', 'bf16x6' or 'bf16x3', got 3"]),
    "16 bits": (
        {"precision": "bf16x6", "dtype": "float16"},
        [
            "precision must be 'ieee' with dtype float16 (the other values are for float32",
            "got 'bf16x6'"],
    ),
    "standard": (
        {"precision": "fp16x3", "algorithm": "standard"},
        [
            "precision must be 'ieee' in the forward pass of algorithm 'standard'",
            "got 'fp16x3'; other precisions are for the forward pass of algorithm 'fa1'"],
    ),
    "fa1 backward": (
        {"precision": "bf16x6", "passes": "bwd", "algorithm": "fa1"},
        [
            "precision must be 'ieee' in the backward pass of algorithm 'fa1'",
            "got 'bf16x6'; other precisions are for "],
    ),
    "one order": (
        {"precision": "bf16x6", "passes": "bwd", "deterministic": True},
        ["precision must be 'ieee' with deterministic=True, got 'bf16x6'"],
    ),
    "CUDA cores": (
        {"precision": "fp16x3", "unit": "simt"},
        [
            "unit must be 'auto', 'mma' or 'wgmma' for float32 with precision 'fp16x3'",
            "got 'simt', which multiplies float32 matrices"],
    ),
    "Hopper's unit, with a cap in the other order": (
        {"precision": "bf16x3", "unit": "wgmma", "gpu": "H200", "algorithm": "fa1", "softcap": 2.0},
        ["unit 'wgmma' does not support the option softcap with precision 'bf16x3'"],
    ),
    "Hopper's unit, lengths of keys without planes": (
        {"unit": "wgmma", "gpu": "H200", "algorithm": "fa1", "dtype": "float16", "kv_lens": [3]},
        ["unit 'wgmma' does not support the option kv_lens; pass unit='auto' or 'mma'"],
    ),
    "Hopper's unit, with options": (
        {"precision": "bf16x3", "unit": "wgmma", "gpu": "H200", "softcap": 2.0},
        ["unit 'wgmma' does not support the option softcap with precision 'bf16x3'"],
    ),
    "Hopper's unit, three planes backward": (
        {"precision": "bf16x6", "unit": "wgmma", "gpu": "H200", "passes": "bwd"},
        ["unit 'wgmma' does not support precision 'bf16x6' in the backward pass; pass"],
    ),
    "shares of a column tile": (
        {"precision": "fp16x3", "gpu": "H200", "passes": "bwd", "group_splits": 2},
        ["group_splits must be 1 or 'auto' with precision 'fp16x3', got 2"],
    ),
    "an old GPU": (
        {"precision": "bf16x3", "gpu": "T4"}, [
            "float32 with precision 'bf16x3' needs unit 'mma', which needs a GPU of compute",
            "8.0 or newer, got 7.5; this GPU has unit 'simt'"],
    ),
    "pages": (
        {"precision": "fp16x3", "block_table": (1, 1), "k": (3, 1, 16, 4)},
        ["precision must be 'ieee' with a block_table, got 'fp16x3'"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_built_is_refused(name):
    options, says = REFUSED[name]
    options = dict(options)
    gpu, k = options.pop("gpu", None), options.pop("k", K)
    with refused(ValueError, says), as_gpu(gpu) if gpu else nullcontext():
        fa_numba.plan(Q, k, **options)


def test_ieee_is_what_a_call_without_the_option_runs():
    plain, given = (fa_numba.plan(Q, K, **more) for more in ({}, {"precision": "ieee"}))
    assert plain.kernels == given.kernels and given.unit == "simt"
    half = fa_numba.plan(Q, K, dtype="float16", precision="ieee")
    assert half.unit == "mma"
    with as_gpu("H200"):
        assert fa_numba.plan(Q, K, precision="fp16x3").unit == "mma"
        for d, unit in ((128, "wgmma"), (136, "mma")):
            for algorithm in ("fa1", "fa2"):
                how = {"precision": "fp16x3", "algorithm": algorithm}
                assert fa_numba.plan(*[(1, 8, 500, d)] * 2, **how).unit == unit
        how |= {"algorithm": "fa1", "warp_partition": "keys"}
        assert fa_numba.plan(*[(1, 8, 500, 64)] * 2, **how).unit == "mma"
        back = {"precision": "fp16x3", "passes": "bwd"}
        for d, unit in ((32, "mma"), (64, "wgmma"), (128, "wgmma"), (136, "mma")):
            assert fa_numba.plan(*[(1, 8, 500, d)] * 2, **back).unit == unit
        with pytest.raises(
            ValueError, match="unit 'wgmma' does not support v with another head_dim"
        ):
            fa_numba.plan(Q, K, (*K[:-1], 8), unit="wgmma", **back)


def test_the_model_counts_planes_and_what_makes_them():
    for precision, planes, reads in (("fp16x3", 2, 2), ("bf16x6", 3, 1), ("bf16x3", 2, 1)):
        p = fa_numba.plan((1, 2, 64, 24), (1, 1, 40, 24), precision=precision)
        rows, row = 128 + 40 + 40, planes * 32
        assert p.accesses.loads["X"] == reads * rows * 24
        assert p.accesses.stores["planes"] == rows * row and p.accesses.loads["Q"] == 128 * row
        own = {name: 2 for name in ("Q", "K", "V", "planes")}
        both = (*p.accesses.loads.items(), *p.accesses.stores.items())
        assert p.accesses.bytes == sum(own.get(name, 4) * n for name, n in both)


def test_a_heads_largest_element_is_found_in_all_its_rows():
    """Behind those that the warps have at first."""
    q, k, v = random_inputs(1, 1, 1, 2, 1100, 4)
    for x in (k, v):
        x[0, 0, 1090] *= np.float32(1e7)
    O = fa_numba.attention(q, k, v, precision="fp16x3", tiles=Tiles(16, 128))
    exact = reference.attention(q, k, v)
    assert _distance(O, exact) < 1e-5 * np.linalg.norm(exact)


@pytest.mark.parametrize("d", [64, 96, 128, 256])
def test_warps_that_divide_the_columns_have_tiles_at_every_head_dimension(d):
    """With ``warp_partition="keys"`` a thread block needs two warps, also for tiles of 16 rows."""
    options = {"algorithm": "fa1", "precision": "fp16x3", "unit": "mma", "warp_partition": "keys"}
    with fa_numba.device.using("emulator"):
        plan = fa_numba.plan((1, 1, 40, d), (1, 1, 70, d), dtype="float32", **options)
        assert plan.tiles.threads >= 64
        rng = np.random.default_rng(d)
        q, k, v = (rng.standard_normal((1, 1, n, d), dtype=np.float32) for n in (40, 70, 70))
        if d == 96:
            found = fa_numba.attention(q, k, v, **options)
            wanted = reference.attention(q, k, v)
            np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-6)
