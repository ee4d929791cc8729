"""A prefix that all sequences share: values, counts, what is read once, refusals, kept calls."""

import fresh_memory
import helpers
import numpy as np
import pytest
from helpers import OnGpu, numpy_dtype, random_inputs, to_numpy
from options_helpers import packed
from stand_in_device import Array, aligned, on_gpu
from test_pages import cache_of

import fa_numba
from fa_numba import Tiles
from fa_numba import device as devices
from fa_numba.device import compute_capability
from fa_numba.host import launch_cache

HOPPER = {"unit": "wgmma", "tiles": Tiles(64, 64, stages=2)}
CASES = [
    # dtype, (B, Hq, Hk, Nq, Nk, d), keys of the prefix, how q, k and v lie, options
    ("float32", (3, 4, 2, 5, 21, 16), 37, "bhnd", {"causal": True}),
    ("float32", (5, 2, 1, 1, 20, 24), 33, "bhnd", {"kv_lens": [20, 0, 7, 16, 1]}),
    ("float32", (2, 2, 2, 9, 5, 7), 20, "bnhd", {"softcap": 2.0, "causal": True}),
    ("float32", (2, 1, 1, 4, 5, 8), 12, "bhnd", {}),  # whose rows of one head lie as one's
    ("float32", (3, 2, 1, 6, 20, 8), 9, "packed", {"q_lens": [6, 0, 2], "kv_lens": [0, 20, 13]}),
    ("float32", (2, 4, 2, 5, 40, 16), 17, "pages", {"kv_lens": [33, 40], "causal": True}),
    ("float32", (3, 2, 1, 6, 20, 7), 9, "bhnd", {"q_lens": [6, 0, 2], "kv_lens": [0, 20, 13]}),
    ("float16", (3, 2, 1, 6, 20, 16), 9, "bnhd", {"q_lens": [6, 0, 2], "causal": True}),
    ("float16", (2, 1, 1, 1, 30, 16), 40, "pages", {"q_lens": [0, 1], "kv_lens": [20, 30]}),
    ("float16", (3, 4, 1, 7, 40, 24), 50, "bhnd", {"causal": True, "tiles": Tiles(16, 32)}),
    ("float16", (6, 4, 2, 1, 30, 64), 70, "bnhd", {"kv_splits": 2, "tiles": Tiles(16, 16)}),
    ("float16", (2, 2, 1, 20, 33, 20), 40, "bhnd", {"scale": 0.4, "kv_lens": [33, 5]}),
    ("float16", (4, 4, 2, 1, 50, 32), 90, "pages", {"kv_lens": [50, 0, 16, 33]}),
    (
        *("float16", (3, 2, 1, 9, 60, 16), 40, "packed pages"),
        {"q_lens": [9, 1, 4], "kv_lens": [60, 1, 17], "causal": True},
    ),
    ("float16", (3, 4, 2, 5, 70, 64), 140, "bhnd", {**HOPPER, "causal": True}),
    ("float16", (3, 4, 1, 1, 70, 32), 130, "pages", {**HOPPER, "kv_lens": [70, 0, 33]}),
    # And a head dimension of V's own
    ("float32", (2, 4, 2, 3, 30, 5, 9), 40, "bhnd", {}),
    ("float16", (2, 4, 2, 3, 30, 40, 8), 40, "bhnd", {}),
    ("float16", (2, 4, 2, 3, 30, 24, 72), 40, "bhnd", HOPPER),
    (
        *("float16", (2, 2, 2, 70, 90, 64), 70, "packed"),
        {**HOPPER, "q_lens": [70, 3], "kv_lens": [9, 90]},
    ),
]  # fmt: skip
PAGE = 16
LIES = ("bhnd", "bnhd", "packed", "pages", "packed pages")


def visible(shape, Np, options):
    """Whether row i of a sequence sees column j, of the prefix and its own: bool (B, 1, Nq, n)."""
    B, _, _, Nq, Nk, *_ = shape
    q_lens, kv_lens = options.get("q_lens", [Nq] * B), options.get("kv_lens", [Nk] * B)
    i, j = np.arange(Nq)[:, None], np.arange(Np + Nk) - Np
    seen = [
        (j < 0) | (j < n) & (not options.get("causal") or j <= i + n - rows)
        for rows, n in zip(q_lens, kv_lens, strict=True)
    ]
    return np.array([np.broadcast_to(x, (Nq, Np + Nk)) for x in seen])[:, None]


def call_of(dtype, shape, Np, lies, options, *, seed=0):
    """The arrays and options of a call, and what float64 is given for it; padding is NaN. v may
    have a head dimension of its own, the last of a shape of seven sizes.
    """
    B, Hq, Hk, Nq, Nk, *dims = shape
    of = numpy_dtype(dtype)
    q, k, v = (x.astype(of) for x in random_inputs(*shape, seed=seed))
    first = [x[0].astype(of) for x in random_inputs(1, Hq, Hk, 1, Np, *dims, seed=seed + 1)[1:]]
    whole = [
        np.concatenate([np.broadcast_to(x, (B, *x.shape)), y], 2)
        for x, y in zip(first, (k, v), strict=True)
    ]
    sinks = np.linspace(-1, 2, Hq, dtype=np.float32)
    options = {"sinks": sinks, **options}
    kept = "scale", "softcap", "sinks", "q_lens", "precision"
    changing = {n: options[n] for n in kept if n in options}
    exact = (q, *whole, changing | {"bias": np.where(visible(shape, Np, options), 0, -np.inf)})
    given = dict(options)
    q_lens, kv_lens = given.pop("q_lens", [Nq] * B), given.get("kv_lens", [Nk] * B)
    if lies.startswith("packed"):
        q = packed(q, q_lens)
        given["cu_seqlens_q"] = np.cumsum([0, *q_lens])
    elif "q_lens" in options:
        given["q_lens"], q = q_lens, q.copy()
        for b, n in enumerate(q_lens):
            q[b, :, n:] = np.nan
    if lies.endswith("pages"):
        k, v, given["block_table"] = cache_of(k, v, kv_lens, PAGE)
    elif lies == "packed":
        k, v = packed(k, kv_lens), packed(v, kv_lens)
        given["cu_seqlens_k"] = np.cumsum([0, *given.pop("kv_lens", kv_lens)])
    else:
        k, v = (x.copy() for x in (k, v))
        for b, n in enumerate(kv_lens):
            k[b, :, n:] = v[b, :, n:] = np.nan
    if lies == "bnhd":
        q, k, v, *first = (x.swapaxes(-2, -3).copy() for x in (q, k, v, *first))
        given["layout"] = "bnhd"
    return (q, k, v), dict(zip(("prefix_k", "prefix_v"), first, strict=True)), given, exact


def padded(x, lies, options, shape):
    """O (B, Hq, Nq, d) or L (B, Hq, Nq) of a result; 0 or -inf in what no sequence has."""
    if lies == "bnhd" and x.ndim == 4:
        return x.swapaxes(1, 2)
    if not lies.startswith("packed"):
        return x
    q_lens, of_rows = options.get("q_lens"), x.ndim == 2
    empty = -np.inf if of_rows else 0
    found = np.full((*shape[:2], shape[3], *x.shape[2:]), empty, x.dtype)
    for b, (begin, n) in enumerate(zip(np.cumsum([0, *q_lens]), q_lens, strict=False)):
        rows = x[:, begin : begin + n] if of_rows else x[begin : begin + n].swapaxes(0, 1)
        found[b, :, :n] = rows
    return found


def plan_of(arrays, prefix, options):
    shapes = {n: x.shape for n, x in options.items() if n in ("sinks", "block_table")}
    told = {"dtype": arrays[0].dtype.name, "return_lse": True, **options, **shapes}
    return fa_numba.plan(*(x.shape for x in arrays), prefix_k=prefix["prefix_k"].shape, **told)


def sent(device, x):
    if device == "emulator":
        return x
    x = np.ascontiguousarray(x)  # as to_gpu lays it
    found = OnGpu(devices.to_gpu(x), 0, x.shape, x.strides)
    found.__cuda_array_interface__["typestr"] = x.dtype.str
    return found


def check(device, dtype, shape, Np, lies, options, *, seed=0):
    """A call against float64, its counts against its plan; the plan."""
    arrays, prefix, given, exact = call_of(dtype, shape, Np, lies, options, seed=seed)
    plan = plan_of(arrays, prefix, given)
    with helpers.running(device) as counts:
        place, beside = helpers.place_of(device, arrays[0]), prefix | {"sinks": given["sinks"]}
        placed = {n: sent(place, x) for n, x in beside.items()}
        found = fa_numba.flash_attention_2(
            *(sent(place, x) for x in arrays), return_lse=True, **given | placed
        )
        if counts is not None:
            helpers.assert_counts(counts, plan)
            moved = sum(n.total() for n in (counts.load_bytes, counts.store_bytes))
            assert plan.accesses.bytes == moved
        O, L = (padded(to_numpy(x), lies, options, shape) for x in found)
    helpers.assert_close_to_float64(O, *exact[:3], L, **exact[3])
    return plan


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]}-{c[3]}-{c[4].get('unit', '')}")
def test_values_and_counts(device, case):
    if device == "gpu" and case[4].get("unit") == "wgmma" and compute_capability() != (9, 0):
        pytest.skip("no GPU of compute capability 9.0")
    plan = check(device, *case)
    assert plan.prefix.problem.seqlen_k == case[2] and plan.own.problem.sinks
    gathers = case[3] in ("bhnd", "pages") and 1 not in (case[1][1], case[1][3])
    padded_rows = "q_lens" in case[4] and not case[3].startswith("packed")
    assert (plan.gather is not None) == (gathers or padded_rows)


def test_gathered_rows_behind_a_sequence_are_zeros():
    """The powers of two of "fp16x3" follow from a head's largest element, padding included."""
    options = {"precision": "fp16x3", "q_lens": [3, 1]}
    with fresh_memory.filled("large"):
        check("emulator", "float32", (2, 2, 2, 3, 9, 16), 20, "bhnd", options)


@pytest.mark.parametrize("lies", ["bhnd", "one head", "bnhd", "transposed"])
def test_the_prefix_is_read_for_a_tile_of_all_queries(lies):
    """Eight sequences of two rows, 16 a head: one row tile, where each has one of its own."""
    H, axes = 1 if lies == "one head" else 2, "bhnd" if lies == "one head" else "bnhd"
    case = "float16", (8, H, H, 2, 16, 16), 64, lies if lies == "bhnd" else axes
    arrays, prefix, given, _ = call_of(*case, {"tiles": Tiles(16, 16)})
    if lies == "transposed":  # as torch has it behind a projection
        arrays = [x.swapaxes(1, 2) for x in arrays]
        prefix = {n: x.swapaxes(0, 1) for n, x in prefix.items()}
        given["layout"] = "bhnd"
    with fa_numba.count_accesses() as counts:
        fa_numba.flash_attention_2(*arrays, **prefix, **given)
    assert counts.loads["K"] == counts.loads["V"] == H * (64 + 8 * 16) * 16
    assert ("rows" in counts.stores) == (lies == "bhnd")  # else they lie so


HALVES = "float16", (3, 4, 1, 7, 40, 24), 50, "bhnd", {"causal": True, "tiles": Tiles(16, 32)}
PLANES = "float32", (2, 2, 1, 3, 9, 16), 20, "bhnd", {"precision": "fp16x3"}


@pytest.mark.parametrize("case", [CASES[0], HALVES, PLANES])
def test_bits_are_those_of_two_calls_and_their_merge(case):
    dtype, shape, _, lies, _ = case
    arrays, prefix, given, _ = call_of(*case)
    with fa_numba.count_accesses() as counts:
        O, L = fa_numba.flash_attention_2(*arrays, **prefix, return_lse=True, **given)
    own = fa_numba.flash_attention_2(*arrays, return_lse=True, **given)
    B, Hq, _, Nq, _, d = shape
    rows = arrays[0].swapaxes(0, 1).reshape(1, Hq, B * Nq, d)
    told = {n: x for n, x in given.items() if n not in ("causal", "sinks", "kv_lens")}
    of_prefix = (x[None] for x in prefix.values())
    o, l = fa_numba.flash_attention_2(rows, *of_prefix, return_lse=True, **told)
    o, l = o.reshape(Hq, B, Nq, d).swapaxes(0, 1), l.reshape(Hq, B, Nq).swapaxes(0, 1)
    for got, want in zip((O, L), fa_numba.merge((own[0], o), (own[1], l)), strict=True):
        np.testing.assert_array_equal(got, want)
    plan = plan_of(arrays, prefix, given)
    helpers.assert_counts(counts, plan)
    moved = sum(n.total() for n in (counts.load_bytes, counts.store_bytes))
    assert plan.accesses.bytes == moved


def odd(x):
    """The values of ``x`` in rows of an odd pitch, of which none starts at a 16-byte address."""
    found = np.zeros((*x.shape[:-1], x.shape[-1] + 3), x.dtype)[..., 1:-2]
    found[...] = x
    return found


@pytest.mark.parametrize("name", ["q", "k", "prefix_k", "prefix_v", "out"])
@pytest.mark.parametrize("lies", ["bhnd", "bnhd"])
def test_rows_may_start_anywhere(name, lies):
    """The emulator refuses a read or write of 16 bytes that does not."""
    case = "float16", (2, 2, 1, 3, 20, 16), 20, lies, {}
    arrays, prefix, given, _ = call_of(*case)
    want = fa_numba.flash_attention_2(*arrays, **prefix, **given)
    named = {**dict(zip("qkv", arrays, strict=True)), **prefix, "out": np.zeros_like(want)}
    named[name] = odd(named[name])
    O = fa_numba.flash_attention_2(**named, **given)
    np.testing.assert_allclose(O.astype("f4"), want.astype("f4"), atol=2e-3)


def test_an_output_of_ones_own_and_the_general_function():
    arrays, prefix, given, _ = call_of(*CASES[0])
    O, L = fa_numba.flash_attention_2(*arrays, **prefix, return_lse=True, **given)
    out = np.full_like(O, np.nan)
    assert fa_numba.attention(*arrays, **prefix, **given, out=out) is out
    np.testing.assert_array_equal(out, O)


def test_a_plan_is_of_both_passes():
    case = CASES[0]
    arrays, prefix, given, _ = call_of(*case)
    plan = plan_of(arrays, prefix, given)
    names = [k.name for k in plan.kernels]
    assert names == ["gather_rows", "fa2_forward", "fa2_forward", "merge_parts"]
    assert plan.flops == plan.prefix.flops + plan.own.flops > plan.own.flops > 0
    said = str(plan)
    assert said.splitlines()[:2] == str(plan.own).splitlines()[:2]
    assert "prefix     37 keys, read once for 15 rows a head" in said and "gather_rows" in said
    assert set(plan.why) > {"unit", "tiles", "prefix: unit"}
    assert plan_of(arrays, prefix, given).accesses is plan.accesses  # made once


@pytest.mark.parametrize("lies", ["bhnd", "bnhd", "packed pages", "pages"])
def test_a_call_on_a_gpu_is_kept_and_made_again_with_other_arrays(gpu, kept, lies):
    options = {"q_lens": [3, 1], "kv_lens": [16, 9]} if lies.endswith("pages") else {}
    case = "float16", (2, 2, 1, 3, 16, 16), 20, lies, {"causal": True, **options}
    for seed in range(2):
        arrays, prefix, given, exact = call_of(*case, seed=seed)
        if "block_table" in given:
            given["kv_lens"] = np.int32(given["kv_lens"])
        on = {n: given[n] for n in ("sinks", "block_table", "kv_lens") if n in given}
        placed = {n: on_gpu(x) for n, x in (prefix | on).items()}
        gpu.launches.clear()
        O, L = fa_numba.flash_attention_2(*map(on_gpu, arrays), return_lse=True, **given | placed)
        O, L = (padded(x.values, lies, options, case[1]) for x in (O, L))
        helpers.assert_close_to_float64(O, *exact[:3], L, **exact[3])
        planned = plan_of(arrays, prefix, given).kernels
        assert [x[:2] for x in gpu.launches] == [(k.name, k.grid) for k in planned]
    assert len(kept) == 1


def test_host_arrays_reach_a_gpu_as_rows_one_behind_the_other(gpu):
    """Their copies are contiguous, whatever strides they have themselves."""
    case = "float16", (2, 2, 1, 3, 16, 16), 20, "bnhd", {"causal": True}
    arrays, prefix, given, exact = call_of(*case)
    arrays = [x.swapaxes(1, 2) for x in arrays]
    prefix = {n: x.swapaxes(0, 1) for n, x in prefix.items()}
    given["layout"] = "bhnd"
    O = fa_numba.flash_attention_2(*arrays, **prefix, **given)
    assert gpu.launches[0][0] == "gather_rows"
    helpers.assert_close_to_float64(O, *exact[:3], **exact[3])


def test_queries_of_a_gpu_are_gathered_where_they_lie_apart(gpu, monkeypatch):
    """As many of them as 32 bits count."""
    rows, k, prefix = (aligned(x) for x in ((2, 4, 2, 64), (2, 5, 2, 64), (5, 2, 64)))
    given = {"k": Array(k), "v": Array(k), "prefix_k": Array(prefix), "prefix_v": Array(prefix)}
    many = np.lib.stride_tricks.as_strided(rows, (2, 3 * 2**28, 2, 64), (0, 0, 0, 4))
    gpu.runs = False
    for q, first in ((rows, "fa2_forward"), (rows[:, :3], "gather_rows")):
        gpu.launches.clear()
        fa_numba.flash_attention_2(Array(q), **given, layout="bnhd")
        assert gpu.launches[0][0] == first
    monkeypatch.setattr(launch_cache, "run_and_keep", None)
    with pytest.raises(
        ValueError, match=r"over q can have at most 2\*\*32 threads .*would need 6442450944"
    ):
        fa_numba.flash_attention_2(Array(many), **given, layout="bnhd")


BAD = {
    "prefix_v alone": (
        {"prefix_k": None},
        "prefix_v must be given together with prefix_k, got prefix_v alone",
    ),
    "prefix_k alone": (
        {"prefix_v": None},
        "prefix_k must be given together with prefix_v, got prefix_k alone",
    ),
    "four axes": (
        {"prefix_k": (1, 2, 9, 8)},
        r"prefix_k must have 3 axes, \(heads, .*got 4 axes: shape \(1, 2, 9, 8\)",
    ),
    "heads": (
        {"prefix_k": (3, 9, 8)},
        r"prefix_k must have heads=2 like k, got heads=3 \(shape \(3, 9, 8\)\)",
    ),
    "head_dim": (
        {"prefix_k": (2, 9, 4)},
        r"prefix_k must have head_dim=8 like k, got head_dim=4 \(shape \(2, 9, 4\)\)",
    ),
    "another length": (
        {"prefix_v": (2, 7, 8)},
        r"prefix_v must have shape \(2, 9, 8\) \(the axes of prefix_k, .*got \(2, 7, 8\)",
    ),
    "no keys": (
        {"prefix_k": (2, 0, 8)},
        r"seqlen of prefix_k must be an integer of at least 1, got 0 \(an empty axis\)",
    ),
    "dtype": (
        {"prefix_k": np.zeros((2, 9, 8), np.float16)},
        r"prefix_k must have the dtype of q \(float32\), got float16",
    ),
    "no array": (
        {"prefix_k": [1]},
        "prefix_k must be a NumPy array, torch tensor, JAX array, or an .*got a list",
    ),
    "window": (
        {"window": (3, 0)},
        "window cannot be given with prefix_k; a call with a prefix accepts the options scale,",
    ),
    "bias": (
        {"bias": np.zeros(6, np.float32)},
        "bias cannot be given with prefix_k; a call with a prefix accepts the options scale,",
    ),
    "attn_mask": (
        {"attn_mask": np.ones((4, 6), bool)},
        "attn_mask cannot be given with prefix_k; a call with a prefix accepts the options scale,",
    ),
    "alibi": (
        {"alibi_slopes": np.ones(2, np.float32)},
        "alibi_slopes cannot be given with prefix_k; a call with a prefix accepts the options",
    ),
    "mask_mod": (
        {"mask_mod": lambda b, h, i, j: i >= j},
        "mask_mod cannot be given with prefix_k; a call with a prefix accepts the options scale,",
    ),
    "score_mod": (
        {"score_mod": lambda s, b, h, i, j: s},
        "score_mod cannot be given with prefix_k; a call with a prefix accepts the options scale,",
    ),
    "dropout": (
        {"dropout_p": 0.5},
        "dropout_p cannot be given with prefix_k; a call with a prefix accepts the options scale,",
    ),
    "blocks": (
        {"block_mask": np.ones((1, 1), bool), "tiles": Tiles(8, 8)},
        "block_mask cannot be given with prefix_k; a call with a prefix accepts the options",
    ),
    "packed": (
        {"cu_seqlens_q": [0, 3], "cu_seqlens_k": [0, 5], "window": (3, 0)},
        "window cannot be given with prefix_k; a call with a prefix accepts the options scale,",
    ),
    "out's dtype": (
        {"out": np.zeros((2, 2, 4, 8), np.float16)},
        r"out must have the dtype of the inputs \(float32\), got float16",
    ),
    "out's shape": (
        {"out": np.zeros((2, 2, 5, 8), np.float32)},
        r"out must have shape \(2, 2, 4, 8\), got \(2, 2, 5, 8\)",
    ),
    "fa1": (
        {"algorithm": "fa1"},
        r"prefix_k is not an option of this function \(flash_attention_2 takes it\);",
    ),
    "standard": (
        {"algorithm": "standard"},
        r"prefix_k is not an option of this function \(flash_attention_2 takes it\);",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_refused_before_anything_runs(name, monkeypatch):
    change, message = BAD[name]
    q, k, v = random_inputs(2, 2, 2, 4, 6, 8)
    if name == "packed":
        q, k, v = packed(q[:1], [3]), packed(k[:1], [5]), packed(v[:1], [5])
    options = {"prefix_k": (2, 9, 8), "prefix_v": (2, 9, 8)} | change
    options = {
        n: np.zeros(x, np.float32) if n.startswith("prefix") and isinstance(x, tuple) else x
        for n, x in options.items()
    }
    monkeypatch.setattr(devices, "launch", None)
    with pytest.raises((ValueError, TypeError), match=message):
        fa_numba.attention(q, k, v, **options)


def test_an_output_in_the_memory_of_a_prefix_and_calls_of_minutes_are_refused(monkeypatch):
    monkeypatch.setattr(devices, "launch", None)
    both = np.zeros((2, 2, 2, 9, 8), np.float32)
    q, k, v = random_inputs(2, 2, 2, 9, 6, 8)
    prefix = {"prefix_k": both[0, 0], "prefix_v": np.zeros((2, 9, 8), np.float32)}
    with pytest.raises(ValueError, match="out must not share memory with prefix_k; pass an array"):
        fa_numba.flash_attention_2(q, k, v, **prefix, out=both[0])
    long = np.zeros((2, 10**7, 8), np.float32)
    with pytest.raises(ValueError, match="the emulator up to .*the limit of"):
        fa_numba.flash_attention_2(q, k, v, prefix_k=long, prefix_v=long)


def test_a_plan_refuses_what_a_call_refuses():
    for options in (
        {"window": (3, 0)},
        {"attn_mask": (4, 6)},
        {"prefix_k": (3, 9, 8)},
        {"prefix_k": 9},
        {"algorithm": "fa1"},
        {"algorithm": "standard"},
        {"passes": "bwd"},
    ):
        with pytest.raises(
            (ValueError, TypeError), match="cannot be given with prefix_k|prefix_k (must|needs) "
        ):
            fa_numba.plan((2, 2, 4, 8), (2, 2, 6, 8), **{"prefix_k": (2, 9, 8)} | options)
