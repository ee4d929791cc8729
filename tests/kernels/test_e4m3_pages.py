"""Attention over e4m3 pages against float64 of the stored numbers; counts, plans, refusals."""

import re

import numpy as np
import pytest
from helpers import assert_counts, numpy_dtype

import fa_numba
from fa_numba import Tiles, reference
from fa_numba.bounds import DEVICES
from fa_numba.device import linking

E4M3 = "float8_e4m3fn"
# Relative error of O: the rounding of P, O and the products to 16 bits.
BOUND = {"float16": 1e-3, "bfloat16": 6e-3}


def cached(dtype, B, Hk, lens, d, d_v, page_size, v_sizes, seed=0):
    """e4m3 pages with their scales and block table, and the numbers that they contain in float64.

    The rows of V have sizes from ``v_sizes``: scales of pages differ by the ratio of these sizes.
    """
    rng = np.random.default_rng(seed)
    N, each = max(lens), -(-max(lens) // page_size)
    table = rng.permutation(B * each + 1)[: B * each].reshape(B, each).astype(np.int32)
    stored = [
        np.full((B * each + 1, Hk, page_size, x), 0x7F, np.uint8).view(numpy_dtype(E4M3))
        for x in (d, d_v)
    ]
    scales = [np.full((B * each + 1, Hk), np.nan, np.float32) for _ in range(2)]
    k, v = (rng.standard_normal((B, Hk, N, x)) for x in (d, d_v))
    v *= np.repeat(rng.choice(v_sizes, each), page_size)[:N, None]
    new = [x.astype(numpy_dtype(dtype)) for x in (k, v)]
    how = {"k_scale": scales[0], "v_scale": scales[1]}
    fa_numba.append_kv(*stored, *new, table, [0] * B, new_lens=lens, **how)
    found = []
    for pages, scale in zip(stored, scales, strict=True):
        rows = pages[table].astype(float) * np.nan_to_num(scale[table])[..., None, None]
        rows = rows.transpose(0, 2, 1, 3, 4).reshape(B, Hk, -1, pages.shape[-1])
        hidden = np.arange(rows.shape[2])[None, :] >= np.array(lens)[:, None]
        found.append(np.where(hidden[:, None, :, None], 0, rows)[:, :, :N])
    return stored, how, table, found


ONE_SIZE, SIZES = (1.0,), (1.0, 1e-4, 3e3)
CASES = [
    # dtype, Hq, Hk, Nq, lengths, (d, d_v), page size, sizes of V, options
    ("float16", 4, 2, 1, (50, 33), (64, 64), 16, SIZES, {}),
    ("bfloat16", 2, 2, 3, (50, 33), (32, 32), 48, ONE_SIZE, {"causal": True}),
    ("float16", 2, 1, 20, (130, 64), (128, 64), 64, SIZES, {"kv_splits": 2, "softcap": 2.0}),
    ("float16", 1, 1, 40, (90,), (64, 96), 32, SIZES,
     {"window": (20, 0), "tiles": Tiles(32, 32, stages=2)}),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]}-{c[5]}-page{c[6]}")
def test_attention_is_that_of_the_stored_numbers(case):
    dtype, Hq, Hk, Nq, lens, (d, d_v), page_size, sizes, options = case
    B = len(lens)
    stored, how, table, numbers = cached(dtype, B, Hk, lens, d, d_v, page_size, sizes)
    q = np.random.default_rng(9).standard_normal((B, Hq, Nq, d)).astype(numpy_dtype(dtype))
    options = {"kv_lens": lens, "return_lse": True, **options}
    with fa_numba.count_accesses() as counts:
        O, L = fa_numba.flash_attention_2(q, *stored, block_table=table, **how, **options)
    known = {n: x for n, x in options.items() if n not in ("tiles", "kv_splits")}
    wanted, lse = reference.attention(q.astype(float), *numbers, **known)
    assert reference.relative_error(O.astype(float), wanted) < BOUND[dtype]
    np.testing.assert_allclose(L, lse, rtol=1e-5, atol=1e-5)
    shapes = {"block_table": table.shape, "dtype": dtype, "kv_dtype": E4M3}
    plan = fa_numba.plan(q.shape, *(x.shape for x in stored), **shapes, **options)
    assert plan.unit == "mma" and plan.kv_splits == options.get("kv_splits", 1)
    assert_counts(counts, plan)


def test_half_the_bytes_of_16_bits_are_loaded():
    shapes, how = ((2, 8, 1, 64), (40, 2, 64, 64)), {"block_table": (2, 16), "unit": "mma"}
    wide = fa_numba.plan(*shapes, dtype="float16", **how).accesses.bytes
    narrow = fa_numba.plan(*shapes, dtype="float16", kv_dtype=E4M3, **how).accesses
    assert (
        narrow.loads["K"] * 2 == fa_numba.plan(*shapes, dtype="float16", **how).accesses.loads["K"]
    )
    assert narrow.bytes < 0.55 * wide


def test_the_pass_and_appending_step_by_step():
    """A row at a time, so that the scale of a page grows: each step is exact for what is stored."""
    rng = np.random.default_rng(0)
    stored, how, table, _ = cached("float16", 1, 1, (20,), 64, 64, 16, ONE_SIZE)
    for n in range(20, 24):
        new = [(rng.standard_normal((1, 1, 1, 64)) * 2.0**n / 2**20).astype(np.float16)] * 2
        fa_numba.append_kv(*stored, *new, table, [n], **how)
        q = rng.standard_normal((1, 2, 1, 64)).astype(np.float16)
        O = fa_numba.flash_attention_2(q, *stored, block_table=table, kv_lens=[n + 1], **how)
        rows = [
            (x[table[0]].astype(float) * s[table[0]][..., None, None]).transpose(1, 0, 2, 3)
            for x, s in zip(stored, how.values(), strict=True)
        ]
        k, v = (x.reshape(1, 1, -1, 64)[:, :, : n + 1] for x in rows)
        assert reference.relative_error(O.astype(float), reference.attention(q, k, v)) < 1e-3


REFUSED = [
    (
        {"q": "float32"},
        ValueError,
        "kv_dtype, the dtype of k and v, must be the dtype of q (float32)",
    ),
    (
        {"k_scale": (3, 1)},
        ValueError,
        "k_scale must have shape (4, 1), one scale for each page and h",
    ),
    ({"q_scale": 2.0}, ValueError, "q_scale must be None for inputs of float16, got a scale"),
    ({"v": "float16"}, TypeError, "v must have the dtype of k (float8_e4m3fn), got float16"),
    (
        {"d": 160},
        ValueError,
        "head_dim of q must be a multiple of 32 and at most 128 with pages of",
    ),
    ({"d": 48}, ValueError, "head_dim of q must be a multiple of 32 and at most 128 with pages of"),
    ({"unit": "wgmma"}, ValueError, "k_scale"),
    ({"algorithm": "fa1"}, ValueError, "block_table"),
    *(
        ({"askew": n}, ValueError, f"{'kv'[n]} must have rows that start at multiples of 16 bytes")
        for n in (0, 1)
    ),
]


@pytest.mark.parametrize(
    "change, error, says", REFUSED, ids=lambda x: next(iter(x)) if isinstance(x, dict) else ""
)
def test_what_is_refused(change, error, says):
    d = change.get("d", 64)
    q = np.zeros((1, 2, 1, d), change.get("q", "float16"))
    pages = [np.zeros((4, 1, 16, d), numpy_dtype(E4M3)) for _ in range(2)]
    if "askew" in change:
        wide = np.zeros((4, 1, 16, d + 8), pages[0].dtype)
        pages[change["askew"]] = wide[..., :d]
    if "v" in change:
        pages[1] = np.zeros(pages[1].shape, np.float16)
    given = {"block_table": [[0, 1]], "kv_lens": [20], "k_scale": 1.0}
    if "k_scale" in change:
        given["k_scale"] = np.ones(change["k_scale"], np.float32)
    given |= {n: change[n] for n in ("q_scale", "unit", "algorithm") if n in change}
    with pytest.raises(error, match=re.escape(says)):
        fa_numba.attention(q, *pages, **given)


def test_older_gpus_are_refused():
    how = {"dtype": "float16", "kv_dtype": E4M3, "block_table": (1, 2)}
    with DEVICES["A100"].planning():
        for unit in ("auto", "mma"):
            says = (
                "unit 'mma' does not support pages of float8_e4m3fn on a GPU of compute capabilit"
            )
            with pytest.raises(ValueError, match=says):
                fa_numba.plan((1, 2, 1, 64), (4, 1, 16, 64), unit=unit, **how)


def test_e4m3_keys_without_pages_need_e4m3_queries():
    q, k = np.zeros((1, 1, 4, 64), np.float16), np.zeros((1, 1, 4, 64), numpy_dtype(E4M3))
    with pytest.raises(
        TypeError, match=r"k must have the dtype of q \(float16\), got float8_e4m3fn"
    ):
        fa_numba.flash_attention_2(q, k, k)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_kernel_compiles_without_spills(dtype):
    how = {"dtype": dtype, "kv_dtype": E4M3, "block_table": (2, 16), "unit": "mma"}
    plan = fa_numba.plan((2, 8, 1, 128), (40, 2, 64, 128), **how)
    ptx, _, log = linking.ptx_and_cubin(plan.launched[0], (9, 0))
    assert ".local" not in ptx and ".f64" not in ptx and "0 bytes spill stores" in log
