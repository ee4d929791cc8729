"""Attention of e4m3 arrays: results and counts on the emulator, plans, and what is refused."""

from unittest import mock

import numpy as np
import pytest
from helpers import assert_counts, refused, running

import fa_numba
from fa_numba import Tiles, bounds, device, reference
from fa_numba.host import planning, standard
from fa_numba.host.arrays import numpy_dtype

ml_dtypes = pytest.importorskip("ml_dtypes")
E4M3 = "float8_e4m3fn"
# Largest relative error against float64 with P rounded by the kernel's tiles.
BOUND = 1e-2
BOUND_OF_STANDARD = 3e-3  # the kernels round S and P as the reference does
BLOCKS = {"q_scale": "blocks", "k_scale": "blocks"}
ALL_BLOCKS = {**BLOCKS, "v_scale": "blocks"}
QUICK = [
    # algorithm, B, Hq, Hk, Nq, Nk, d, options
    ("fa2", 1, 2, 1, 60, 257, 128, {"causal": True}),
    ("fa2", 1, 1, 1, 65, 129, 256, {"out_dtype": "bfloat16", "layout": "bnhd"}),
    ("fa2", 2, 1, 1, 70, 300, 64, {"q_lens": [70, 9], "kv_lens": [0, 290], "softcap": 2.0}),
    ("fa2", 1, 1, 1, 140, 200, 64, {"window": (90, 9), "out_dtype": "float32", **BLOCKS}),
    ("fa1", 1, 1, 1, 70, 300, 128, {"causal": True}),
    ("fa1", 1, 1, 1, 40, 300, 256, {"q_lens": [9], "out_dtype": "bfloat16"}),
    ("fa1", 1, 1, 1, 140, 150, 64, {"window": (90, 9), "out_dtype": "float32", **BLOCKS}),
    ("standard", 2, 2, 1, 20, 49, 32, {"q_lens": [20, 7], "kv_lens": [0, 47]}),
    ("fa2", 1, 2, 1, 9, 300, 64, {"v_scale": "blocks", "out_dtype": "float32"}),
    ("fa1", 1, 1, 1, 9, 300, 64, {"v_scale": "blocks", "out_dtype": "bfloat16"}),
    ("standard", 1, 1, 1, 140, 159, 48, {"causal": True, "out_dtype": "float32", **ALL_BLOCKS}),
]
CASES = [
    ("fa2", 1, 1, 1, 1, 1, 128, {}),
    ("fa2", 1, 1, 1, 200, 300, 128, {}),
    ("fa2", 1, 2, 1, 40, 500, 80, {"kv_splits": 2}),
    ("fa2", 2, 2, 1, 140, 300, 64, {"causal": True, "q_scale": "blocks", "k_scale": "blocks"}),
    ("fa2", 1, 1, 1, 70, 500, 64, {"kv_splits": 2, **ALL_BLOCKS}),
    ("fa2", 1, 4, 2, 150, 400, 128, {"causal": True, "kv_lens": [390], **ALL_BLOCKS}),
    ("fa1", 1, 1, 1, 1, 1, 128, {}),
    ("fa1", 2, 4, 2, 150, 400, 128, {"window": (200, 0), "q_lens": [140, 0], **ALL_BLOCKS}),
    ("fa1", 1, 2, 1, 131, 513, 128, {"causal": True}),
    ("fa1", 1, 1, 1, 200, 270, 64, {"query_splits": 2, "softcap": 2.0}),
    ("standard", 1, 1, 1, 1, 1, 128, {}),
    ("standard", 1, 2, 1, 60, 130, 256, {"window": (90, 9), "q_lens": [50], "layout": "bnhd"}),
]
CASES = [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES)]


def quantized(B, Hq, Hk, Nq, Nk, d, layout="bhnd", blocks=(), ones=()):
    """q, k and v in e4m3, and their scales by the names of the options.

    Scales in `blocks` are of blocks of 128 rows. Scales in `ones` are 1.
    """
    rng = np.random.default_rng(Nq + Nk)
    arrays, scales = [], {}
    for name, heads, rows in (("q", Hq, Nq), ("k", Hk, Nk), ("v", Hk, Nk)):
        x = rng.standard_normal((B, heads, rows, d)).astype(np.float32)
        starts = range(0, rows, 128 if f"{name}_scale" in blocks else rows)
        if name == "v" and "v_scale" in blocks:  # neighbouring blocks have unlike scales
            x *= np.float32([1.0, 0.1, 3.0])[np.arange(rows) // 128 % 3, None]
        scale = np.stack([np.abs(x[:, :, n : n + starts.step]).max((2, 3)) for n in starts], -1)
        scale = np.ones_like(scale) if f"{name}_scale" in ones else scale / np.float32(448)
        by_row = np.repeat(scale, starts.step, axis=2)[:, :, :rows, None]
        bits = (x / by_row).astype(numpy_dtype(E4M3))
        arrays.append(np.ascontiguousarray(bits.swapaxes(1, 2)) if layout == "bnhd" else bits)
        scales[f"{name}_scale"] = scale if f"{name}_scale" in blocks else scale[..., 0]
    return arrays, scales


def by_heads(array, layout):
    return array.swapaxes(1, 2) if layout == "bnhd" else array


OPTIONS = ("q_scale", "k_scale", "v_scale", "out_dtype")


def random_call(seed, number, largest=300, algorithms=("fa1", "fa2")):
    """The arguments of a case of `test_results_and_counts`, drawn at random."""
    rng = np.random.default_rng([seed, number])

    def one(values):
        return values[rng.integers(len(values))]

    algorithm, group = one(algorithms), one((1, 1, 2, 4))
    B, Hk, d = one((1, 2)), one((1, 2)), one((16, 48, 64, 112, 128, 192, 256))
    Nq, Nk = (int(rng.integers(1, largest)) for _ in range(2))
    options = {"causal": {"causal": True}, "softcap": {"softcap": 2.0}}
    options["window"] = {"window": (int(rng.integers(largest)), int(rng.integers(largest)))}
    options["layout"] = {"layout": one(("bhnd", "bnhd"))}
    options["q_lens"] = {"q_lens": rng.integers(0, Nq + 1, B).tolist()}
    if algorithm != "fa1":
        options["kv_lens"] = {"kv_lens": rng.integers(0, Nk + 1, B).tolist()}
    given = {"out_dtype": one(("float16", "bfloat16", "float32"))}
    kinds = {name: one(("heads", "blocks", "")) for name in OPTIONS[:3]}
    given |= {name: kind for name, kind in kinds.items() if kind}
    for drawn in options.values():
        if rng.random() < 0.25:
            given |= drawn
    return algorithm, B, Hk * group, Hk, Nq, Nk, d, given


@pytest.mark.parametrize("algorithm, B, Hq, Hk, Nq, Nk, d, options", CASES)
def test_results_and_counts(algorithm, B, Hq, Hk, Nq, Nk, d, options):
    """Of the three algorithms, with q_scale, k_scale, v_scale and each out_dtype."""
    given = {**dict.fromkeys(OPTIONS[:3], "heads"), **options}
    check("emulator", algorithm, B, Hq, Hk, Nq, Nk, d, given)


@pytest.mark.gpu
@pytest.mark.parametrize("number", range(200))
def test_random_calls(number):
    """Of both loop orders on a GPU with Hopper's tensor cores."""
    if device.compute_capability() != (9, 0):
        pytest.skip("the GPU has no unit 'wgmma'")
    check("gpu", *random_call(1, number, 900))


def check(place, algorithm, B, Hq, Hk, Nq, Nk, d, options):
    layout = options.get("layout", "bhnd")
    blocks = [name for name in OPTIONS[:3] if options.get(name) == "blocks"]
    ones = [name for name in OPTIONS[:3] if name not in options]
    arrays, scales = quantized(B, Hq, Hk, Nq, Nk, d, layout, blocks, ones)
    scales = {name: scales[name] if name in options else None for name in OPTIONS[:3]}
    options = {name: value for name, value in options.items() if name not in scales}
    for name, lens in (("q", options.get("q_lens")), ("kv", options.get("kv_lens"))):
        for b, n in enumerate(lens or ()):  # padding is NaN: neither read nor seen
            for array in arrays[:1] if name == "q" else arrays[1:]:
                by_heads(array, layout)[b, :, n:] = np.nan
    how = {"algorithm": algorithm, "return_lse": True, **options}
    with running(place) as counts:
        O, L = fa_numba.attention(*arrays, **scales, **how)
        shapes = {name: scales[name].shape for name in blocks}
        plan = fa_numba.plan(*(x.shape for x in arrays), dtype=E4M3, **how, **shapes)
    assert plan.unit == (
        "mma" if algorithm == "standard" else "wgmma"
    ) and O.dtype.name == options.get("out_dtype", "float16")
    if counts is not None:
        assert_counts(counts, plan)
        moved = sum(n.total() for n in (counts.load_bytes, counts.store_bytes))
        assert plan.accesses.bytes == moved
    left_out = ("out_dtype", "layout", "kv_splits", "query_splits")
    given = {n: x for n, x in options.items() if n not in left_out}
    O, *arrays = (by_heads(x, layout) for x in (O, *arrays))
    rounded, bound = {"columns": plan.tiles.Bc}, BOUND
    if algorithm == "standard":  # the maximum of the complete row
        rounded, bound = {"columns": Nk, "scores_dtype": "float16"}, BOUND_OF_STANDARD
    if plan.kv_splits > 1:  # each thread block has a maximum of its own
        rounded, bound = {"columns": Nk + 1}, 4 * BOUND
    expected, lse = reference.attention_e4m3(*arrays, **scales, **rounded, return_lse=True, **given)
    finite = np.isfinite(lse)
    assert np.array_equal(np.isfinite(L), finite)
    assert np.abs(L[finite] - lse[finite]).max(initial=0.0) < 4e-3
    error = np.linalg.norm(O.astype(np.float64) - expected)
    assert error <= bound * np.linalg.norm(expected), error / np.linalg.norm(expected)


def test_scales_are_factors_of_the_numbers():
    """A number, an array with one scale, and one scale for each head."""
    arrays, scales = quantized(1, 2, 1, 20, 30, 64)
    arrays[0][0, 1] = arrays[0][0, 0]
    numbers = {"q_scale": 0.5, "k_scale": 0.01, "v_scale": np.float32([[0.25]])}
    with device.using("emulator"):
        O = fa_numba.attention(*arrays, **numbers)
        same = fa_numba.attention(
            *arrays,
            q_scale=np.float32([[0.5, 1.0]]),
            k_scale=0.01,
            v_scale=np.float32([[0.25]]),
        )
        plain = fa_numba.attention(*arrays, scale=0.5 * 0.01 / 8.0)
    assert np.array_equal(O[0, 0], same[0, 0]) and not np.array_equal(O[0, 1], same[0, 1])
    assert np.allclose(O.astype(np.float32), 0.25 * plain.astype(np.float32), rtol=2e-3)


SHAPE = (1, 2, 200, 64)


def test_a_plan_shows_how_values_are_stored_by_columns():
    plan = fa_numba.plan(SHAPE, (1, 1, 300, 64), dtype=E4M3, causal=True)
    assert [k.name for k in plan.kernels] == ["turn_values", "fa2_forward"]
    (VT,) = (x for x in plan.workspace if x.name == "VT")
    assert (VT.shape, VT.dtype, VT.nbytes) == ((1, 1, 64, 768), E4M3, 64 * 768)
    assert plan.accesses.stores["VT"] == 64 * 768
    assert [x.dtype for x in plan.outputs] == ["float16"]
    floats = fa_numba.plan(SHAPE, SHAPE, dtype=E4M3, out_dtype="float32").outputs
    assert [x.dtype for x in floats] == ["float32"]


def test_a_plan_of_standard_attention_shows_p_in_one_byte():
    plan = fa_numba.plan(SHAPE, SHAPE, dtype=E4M3, algorithm="standard", out_dtype="float32")
    found = [(x.name, x.dtype, x.nbytes) for x in plan.workspace]
    assert found == [
        ("S", "float16", 2 * 2 * 200 * 208),
        ("P", E4M3, 2 * 200 * 208),
        ("l", "float32", 4 * 2 * 200),
    ]
    assert [x.dtype for x in plan.outputs] == ["float32"]


def test_a_row_that_does_not_fit_is_read_twice():
    sizes = 1, 1, 1, 3, 37, 16
    case = {**dict.fromkeys(OPTIONS[:3], "heads"), "tiles": Tiles(16, 16)}
    with mock.patch.object(standard, "row_elements", lambda *_, **__: 0):
        check("emulator", "standard", *sizes, case)


def test_the_smallest_attention_weights_do_not_vanish():
    """256 e^-12 is rounded to 2^-9, the smallest number of e4m3. The largest weight sees v = 0."""
    codes = numpy_dtype(E4M3)
    q, k, v = (np.ones((1, 1, n, 16), codes) for n in (1, 40, 40))
    k[0, 0, 1:] = -2
    v[0, 0, 0] = 0
    how = {"scores_dtype": "float16", "columns": 40}
    with device.using("emulator"):
        O = fa_numba.standard_attention(q, k, v, out_dtype="float32")
    expected = reference.attention_e4m3(q, k, v, **how)
    assert reference.relative_error(O, expected) < 1e-4


def test_a_thread_block_of_several_row_tiles_has_a_unit_for_each():
    """The last block of V, whose scale is the unit of O, differs by the row tile."""
    arrays, scales = quantized(1, 1, 1, 256, 256, 16, blocks=("v_scale",))
    how = {"causal": True, "out_dtype": "float32"}
    uncached = getattr(planning.planned, "__wrapped__", planning.planned)
    with (
        mock.patch.object(planning, "planned", uncached),
        mock.patch.object(device, "EMULATED_MULTIPROCESSORS", 1),
        device.using("emulator"),
    ):
        O = fa_numba.flash_attention_2(*arrays, **scales, **how)
        assert fa_numba.plan(
            *(x.shape for x in arrays), dtype=E4M3, v_scale=(1, 1, 2), **how
        ).kernels[-1].grid == (1, 1, 1)
    expected = reference.attention_e4m3(*arrays, **scales, causal=True)
    assert reference.relative_error(O, expected) < BOUND


def test_standard_attention_needs_a_gpu_that_converts_e4m3():
    how = {"dtype": E4M3, "algorithm": "standard"}
    with device.planning_for((8, 9), 101376, 128):
        assert fa_numba.plan(SHAPE, SHAPE, **how).unit == "mma"
    with (
        device.planning_for((8, 0), 166912, 108),
        refused(ValueError, ["float8_e4m3fn arrays on a GPU of compute capability below 8.9"]),
    ):
        fa_numba.plan(SHAPE, SHAPE, **how)


REFUSED = [
    ({"algorithm": "standard", "alibi_slopes": (2,)}, "'standard', which then takes the options"),
    (
        {"algorithm": "standard", "passes": "bwd"},
        "got float8_e4m3fn, which is for the forward pass",
    ),
    ({"algorithm": "standard", "unit": "wgmma"}, "the forward pass of algorithm 'standard'; pass"),
    (
        {"algorithm": "standard", "tiles": Tiles(192, 64), "k_scale": (1, 1, 2)},
        "tiles.Br must divide 128 with scales of blocks of 128 rows, got 192",
    ),
    ({"passes": "bwd"}, "q, k and v must be float32, float16 or bfloat16 in the backward pass"),
    ({"bias": (1, 1, 1, 1)}, "bias cannot be given with float8_e4m3fn arrays"),
    ({"dropout_p": 0.1}, "dropout_p cannot be given with float8_e4m3fn arrays"),
    ({"sinks": (2,)}, "sinks cannot be given with float8_e4m3fn arrays"),
    ({"algorithm": "fa1", "kv_lens": [7]}, "kv_lens cannot be given with float8_e4m3fn arrays"),
    ({"unit": "mma"}, "does not support float8_e4m3fn arrays in algorithm 'fa2'; pass unit='auto'"),
    ({"tiles": Tiles(128, 48)}, "tiles.Bc must be a multiple of 32 for float8_e4m3fn"),
    ({"q_scale": 0.0}, "q_scale must be a positive finite number"),
    ({"k_scale": (2, 2)}, "k_scale must have shape (1, 1) or (1, 1, 2) (batch entries, heads,"),
    ({"v_scale": (1, 1, 3)}, "v_scale must have shape (1, 1) or (1, 1, 2) (batch entries, heads,"),
    (
        {"q_scale": (1, 2, 2), "tiles": Tiles(128, 256)},
        "tiles.Bc must be 128 with scales of blocks of 128 rows, got 256",
    ),
    ({"out_dtype": "float64"}, "out_dtype must be 'float16', 'bfloat16' or 'float32'"),
    ({"dtype": "float16", "q_scale": 2.0}, "q_scale must be None for inputs of float16"),
    ({"dtype": "float16", "out_dtype": "float16"}, "out_dtype must be None for inputs of float16"),
]


def test_tiles_need_not_divide_a_block_without_scales_of_blocks():
    how = {"dtype": E4M3, "algorithm": "standard", "k_scale": 2.0}
    tiles = fa_numba.plan(SHAPE, SHAPE, tiles=Tiles(192, 64), **how).tiles
    assert (tiles.Br, tiles.Bc) == (192, 64)


@pytest.mark.parametrize("options, says", REFUSED)
def test_refused(options, says):
    with refused(ValueError, [says]):
        fa_numba.plan(SHAPE, (1, 1, 200, 64), **{"dtype": E4M3, **options})


def test_the_kernel_of_o_is_the_same_with_a_causal_mask():
    """Masks change S and P only. The kernel reads the lengths of sequences, not the mask."""
    with bounds.DEVICES["H200"].planning():
        how = {"dtype": E4M3, "algorithm": "standard"}
        plain, causal = (
            fa_numba.plan(SHAPE, SHAPE, causal=c, **how).launched for c in (False, True)
        )
    assert plain[0] is not causal[0] and plain[-1] is causal[-1]


def test_a_prefix_is_refused():
    with refused(ValueError, ["prefix_k cannot be given with float8_e4m3fn arrays"]):
        fa_numba.plan(SHAPE, SHAPE, dtype=E4M3, prefix_k=(2, 32, 64))


def test_arrays_that_the_copy_engine_cannot_read_are_refused():
    q, k, v = quantized(1, 1, 1, 20, 20, 80)[0]
    with (
        device.using("emulator"),
        refused(ValueError, ["of float8_e4m3fn must have rows that start at multiples of 16"]),
    ):
        fa_numba.attention(*(x[..., 1:65] for x in (q, k, v)))
    with (
        device.using("emulator"),
        refused(TypeError, ["out must have the dtype out_dtype (float16), got float32"]),
    ):
        fa_numba.attention(q, k, v, out=np.zeros((1, 1, 20, 80), np.float32))


def test_head_dimensions_are_multiples_of_16():
    with refused(ValueError, ["head_dim of q and k must be a multiple of 16 for float8_e4m3fn"]):
        fa_numba.plan((1, 2, 200, 40), (1, 2, 200, 40), dtype=E4M3)
