"""The kernels compiled without a GPU: no spills, no local memory, no float64, within budgets."""

import functools
import itertools
import re
from dataclasses import fields, replace

import pytest
from numba import cuda, types
from numba.core.errors import TypingError
from offline import CAPABILITY, compiled

import fa_numba
from fa_numba.choices.tiles import hopper_fa1_tiles, mma_tiles, simt_tiles
from fa_numba.choices.tuned import tuned_tiles
from fa_numba.device import Kernel, array_type, float32, planning_for
from fa_numba.integers import ceil_div
from fa_numba.intrinsics.barriers import arrive_named, sync_named
from fa_numba.kernels import merge_parts, mma, wgmma
from fa_numba.kernels.simt import (
    fa1_backward,
    fa1_forward,
    fa2_backward,
    fa2_forward,
    standard,
    standard_backward,
)
from fa_numba.kernels.simt.append import make_append
from fa_numba.options import PLAIN, Features
from fa_numba.tiling import (
    WGMMA_MEASURES,
    MmaSweepSpec,
    SimtBackwardSpec,
    SimtSpec,
    StandardSpec,
    Tiles,
    default_wgmma_backward_tiles,
    select_mma_backward_spec,
    select_mma_spec,
    select_spec,
    select_wgmma_backward_spec,
    select_wgmma_fa1_spec,
    select_wgmma_spec,
    select_wgmma_sweep_spec,
    splits,
)

REGISTERS = 64 * 1024  # of a multiprocessor, sm_80 and sm_90 alike
# bytes a block may have
SHARED = {"sm_80": 163 * 1024, "sm_89": 99 * 1024, "sm_90a": 227 * 1024}


def kernel_of(name, arch, d, causal, aligned, return_lse=True):
    """The kernel that the default tiles give for long sequences."""
    algorithm = "standard" if name not in ("fa1", "fa2") else name
    tiles = simt_tiles(algorithm, "fwd", 4096, 4096, d, SHARED[arch]).value
    facts = {"features": Features(causal=causal), "aligned": aligned, "grouped": False}
    if name == "fa1":
        facts["return_lse"] = return_lse
    spec = select_spec(tiles, d, SHARED[arch], **facts)
    make = {
        "fa1": fa1_forward.make_forward,
        "fa2": fa2_forward.make_forward,
        "scores": standard.make_standard_scores,
        "output": standard.make_standard_output,
    }
    if name == "softmax":
        return standard.make_standard_softmax(4096, standard.MAX_WARPS, return_lse, PLAIN)
    if name == "softmax twice":
        return standard.make_standard_softmax(0, standard.MAX_WARPS, return_lse, PLAIN)
    return make[name](spec)


def backward_kernel_of(name, arch, d, causal, aligned):
    """The same for the backward pass."""
    if name == "row sums":
        return fa2_backward.make_row_sums(d, True, PLAIN)
    if name == "dS":
        return standard_backward.make_standard_score_gradients(4096, standard.MAX_WARPS, PLAIN)
    tiles = simt_tiles("fa2", "bwd", 4096, 4096, d, SHARED[arch]).value
    facts = {"features": Features(causal=causal), "aligned": aligned, "grouped": False}
    facts["splits_queries"] = name == "fa1 splits"
    spec = select_spec(tiles, d, SHARED[arch], SimtBackwardSpec, **facts)
    make = {
        "fa1": fa1_backward.make_backward,
        "fa1 splits": fa1_backward.make_backward,
        "fa2": fa2_backward.make_backward,
        "fa2 without dQ": functools.partial(fa2_backward.make_backward, atomic=False),
        "fa2 dQ": fa2_backward.make_query_gradients,
        "transposed": standard_backward.make_standard_transposed_output,
    }
    return make[name](spec)


def spills_of(log):
    """Bytes of the stack, of spill stores and of spill loads."""
    return re.findall(r"(\d+) bytes (?:stack frame|spill stores|spill loads)", log)


def registers(log):
    return int(re.search(r"Used (\d+) registers", log)[1])


def fits(kernel, arch):
    """Whether a multiprocessor has the threads and a block the shared memory, uncompiled."""
    return kernel.min_blocks * kernel.threads <= 2048 and kernel.shared_bytes <= SHARED[arch]


def ptx_within_budgets(kernel, arch):
    """The PTX of a kernel that fits, spills nothing and has no float64."""
    ptx, log = compiled(kernel, arch)
    assert f".target {arch}" in ptx
    assert ".f64" not in ptx, "float64 arithmetic"
    assert ".local" not in ptx, "local memory"
    assert spills_of(log) == ["0"] * 3, log
    assert registers(log) * kernel.threads * kernel.min_blocks <= REGISTERS
    assert fits(kernel, arch)
    return ptx


def hoppers_ptx_within_budgets(kernel, spec):
    """The same of a kernel whose warpgroups give and take registers."""
    ptx = ptx_within_budgets(kernel, "sm_90a")
    _, log = compiled(kernel, "sm_90a")
    # Otherwise ptxas waits for each product, and says so.
    assert "warning" not in log.lower() and "serializ" not in log.lower(), log
    few, many = spec.registers
    assert 128 * (few + many * spec.consumers) <= registers(log) * kernel.threads
    assert f"setmaxnreg.inc.sync.aligned.u32 {many}" in ptx
    return ptx


def named(case):
    return "-".join(map(str, case))


def slow_but(quick, cases):
    """All are `slow` but those that are `quick`: each family's kernel once, at one architecture."""
    assert set(quick) <= set(cases)
    return [
        pytest.param(case, id=named(case), marks=() if case in quick else pytest.mark.slow)
        for case in cases
    ]


CASES = [
    # name, arch, head_dim, causal, aligned
    ("fa2", "sm_90a", 64, False, True),
    ("fa2", "sm_90a", 128, True, True),
    ("fa2", "sm_90a", 256, True, False),
    ("fa2", "sm_90a", 32, True, True),
    ("fa2", "sm_80", 64, True, True),
    ("fa2", "sm_80", 128, False, False),
    ("fa1", "sm_90a", 64, False, True),
    ("fa1", "sm_90a", 128, True, True),
    ("fa1", "sm_90a", 256, False, False),
    ("fa1", "sm_90a", 160, True, True),
    ("fa1", "sm_90a", 192, True, True),
    ("fa1", "sm_80", 128, True, True),
    ("scores", "sm_90a", 128, True, True),
    ("scores", "sm_80", 64, True, False),
    ("output", "sm_90a", 128, False, True),
    ("output", "sm_80", 64, False, False),
    ("softmax", "sm_90a", 64, False, True),
    ("softmax twice", "sm_80", 64, False, True),
]


QUICK = {
    ("fa2", "sm_90a", 128, True, True),
    ("fa1", "sm_90a", 64, False, True),
    ("scores", "sm_80", 64, True, False),
    ("output", "sm_90a", 128, False, True),
    ("softmax", "sm_90a", 64, False, True),
    ("softmax twice", "sm_80", 64, False, True),
}


@pytest.mark.parametrize("case", slow_but(QUICK, CASES))
def test_a_kernel_compiles_within_its_budgets(case):
    name, arch, d, causal, aligned = case
    ptx = ptx_within_budgets(kernel_of(*case), arch)

    if not name.startswith("softmax"):
        assert "ld.shared.v4.f32" in ptx, "16-byte reads of shared memory"
        width = "cg.shared.global" if aligned else "ca.shared.global"
        assert f"cp.async.{width}" in ptx, "asynchronous copies"
    if name in ("fa1", "fa2", "output") and aligned:
        assert "st.global.v4.f32" in ptx, "16-byte writes of O"
    if name in ("fa1", "fa2") or name.startswith("softmax"):
        assert "ex2.approx.ftz.f32" in ptx
        assert "shfl.sync.bfly" in ptx


PAGED = [
    # unit, dtype, head_dim, rows of Q, page size, options
    ("mma", "float16", 128, 1, 16, ()),
    ("mma", "float16", 128, 1024, 48, ("causal",)),
    ("mma", "bfloat16", 64, 1024, 256, ("causal",)),
    ("mma", "float16", 80, 64, 16, ("window", "softcap")),
    ("simt", "float32", 64, 1024, 16, ("causal",)),
    ("wgmma", "float16", 128, 1024, 16, ("causal",)),
    ("wgmma", "float16", 64, 4096, 48, ("window", "softcap")),
    ("wgmma", "bfloat16", 256, 1024, 48, ()),
    ("wgmma", "float16", 128, 1, 64, ()),
    ("mma", "float16", 128, 512, 16, ("causal", "packed")),
    ("simt", "float32", 64, 512, 48, ("causal", "packed")),
    ("wgmma", "float16", 128, 512, 16, ("causal", "packed")),
]


@pytest.mark.parametrize("case", slow_but(PAGED[:1], PAGED))
def test_a_kernel_over_pages_compiles_within_its_budgets(case):
    unit, dtype, d, Nq, page_size, names = case
    values = {"causal": True, "window": (64, 0), "softcap": 9.0}
    options = {name: values[name] for name in names if name != "packed"}
    pages = {"block_table": (2, 4096 // page_size), "dtype": dtype, "unit": unit}
    q = (2, 8, Nq, d)
    if "packed" in names:
        q, options["cu_seqlens_q"] = (2 * Nq, 8, d), [0, Nq, 2 * Nq]
    with fa_numba.device.planning_for((9, 0), SHARED["sm_90a"]):
        plan = fa_numba.plan(q, (999, 2, page_size, d), **pages, **options)
    assert Nq != 1 or plan.launched[-1].name == "merge_splits"
    for kernel in plan.launched:
        ptx = ptx_within_budgets(kernel, "sm_90a")
        assert kernel.name != "fa2_forward" or unit == "wgmma" or "shfl.sync.idx" in ptx


@pytest.mark.parametrize("case", slow_but([(True, True)], [(True, True), (False, False)]))
def test_the_kernel_that_appends_compiles_within_its_budgets(case):
    halves, aligned = case
    dtype = "float16" if halves else "float32"
    ptx = ptx_within_budgets(make_append(64, dtype, 48, aligned, True), "sm_90a")
    assert ("st.global.v4" in ptx) == aligned


@pytest.mark.parametrize(
    "case",
    slow_but(
        [("float16", "float16", True)],
        [
            ("float16", "float16", True),
            ("float32", "bfloat16", True),
            ("float16", "float32", False),
        ],
    ),
)
def test_the_kernels_that_make_one_of_two_parts_compile_within_their_budgets(case):
    """Sixteen bytes of 16-bit elements at a time where rows are aligned."""
    for make in (merge_parts.make_merge, merge_parts.make_add):
        ptx = ptx_within_budgets(make(128, *case), "sm_90a")
        assert ("ld.global.v4" in ptx) == ("st.global.v4" in ptx) == case[-1]


SPLIT_CASES = [
    # unit, arch, head_dim, heads that share a tile, options
    ("mma", "sm_80", 128, 8, ()),
    ("mma", "sm_90a", 128, 1, ("causal", "kv_lens")),
    ("mma", "sm_90a", 64, 4, ("window", "softcap", "packed")),
    ("mma", "sm_89", 256, 8, ("causal",)),
    ("mma", "sm_90a", 64, 1, ("bias", "dropout")),
    ("simt", "sm_80", 64, 1, ("causal",)),
    ("simt", "sm_90a", 128, 1, ("packed",)),
    ("wgmma", "sm_90a", 128, 8, ()),
    ("wgmma", "sm_90a", 64, 1, ("causal", "kv_lens")),
    ("wgmma", "sm_90a", 256, 1, ("window", "softcap", "q_lens")),
    ("wgmma", "sm_90a", 64, 4, ("window", "softcap", "packed")),
]


# Over pages, above, a kernel of splits is quick: here what makes one of them, of few and many.
@pytest.mark.parametrize(
    "merge_alone", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["merge", "all"]
)
@pytest.mark.parametrize("case", slow_but(SPLIT_CASES[:1], SPLIT_CASES))
def test_splits_of_the_columns_and_their_merge_spill_nothing(case, merge_alone):
    unit, arch, d, heads, options = case
    dtype = "float32" if unit == "simt" else "float16"
    arguments = {"window": {"window": (300, 7)}, "causal": {"causal": True}}
    arguments |= {"softcap": {"softcap": 3.0}, "kv_lens": {"kv_lens": [9000, 77]}}
    arguments |= {"q_lens": {"q_lens": [3, 5]}, "bias": {"bias": (5, 9000)}}
    arguments |= {"dropout": {"dropout_p": 0.1}, "packed": PACKED_KEYS}
    shapes = ((2, heads, 5, d), (2, 1, 9000, d))
    if "packed" in options:
        shapes = ((10, heads, d), (9000, 1, d))
    given = {name: x for option in options for name, x in arguments[option].items()}
    for kv_splits in (3, 20):
        with planning_for(CAPABILITY[arch][:2], SHARED[arch]):
            how = {"dtype": dtype, "unit": unit, "kv_splits": kv_splits}
            plan = fa_numba.plan(*shapes, **how, **given)
        forward, merge = plan.launched
        for kernel in (merge,) if merge_alone or kv_splits == 20 else (forward, merge):
            ptx, log = compiled(kernel, arch)
            assert ".f64" not in ptx and ".local" not in ptx
            assert spills_of(log) == ["0"] * 3, log
            assert registers(log) * kernel.threads <= REGISTERS
        assert ("bar.sync" in ptx or "barrier.sync" in ptx) == (kv_splits == 20)


PACKED_KEYS = {"cu_seqlens_q": [0, 5, 10], "cu_seqlens_k": [0, 8000, 9000]}

WGMMA_CASES = [
    # head_dim, Br, Bc, options
    (128, 128, 128, ("causal",)),
    (64, 192, 128, ()),
    (64, 128, 128, ("causal",)),
    (64, 128, 128, ("window", "softcap", "q_lens")),
    (96, 128, 128, ("window",)),
    (128, 128, 128, ("window", "softcap", "q_lens")),
    (192, 128, 96, ("causal",)),
    (256, 128, 80, ("causal",)),
    (256, 128, 80, ("window", "softcap", "q_lens")),
    (64, 128, 128, ("causal", "softcap", "packed")),
    (128, 128, 128, ("causal", "packed")),
    (128, 128, 128, ("window", "softcap", "q_lens", "kv_lens")),
    (256, 128, 80, ("causal", "q_lens", "kv_lens")),
    (128, 128, 128, ("causal", "shared heads")),
    (64, 128, 128, ("window", "softcap", "shared heads", "packed")),
    (128, 128, 128, ("alibi", "window", "softcap", "q_lens", "kv_lens")),
    (128, 64, 128, ("turns", "overlap", "persistent", "counter", "ahead", "late")),  # left out
    (64, 128, 128, ("causal", "ahead", "late")),
    (64, 128, 128, ("bias",)),
    (64, 128, 112, ("causal", "bias")),
    (128, 128, 96, ("causal", "bias")),
    (64, 128, 96, ("bias", "window", "softcap", "q_lens", "packed")),
    (128, 128, 64, ("bias", "alibi", "window", "softcap", "q_lens", "kv_lens")),
    (192, 128, 64, ("causal", "bias")),
    (256, 128, 48, ("bias",)),
    # Of shapes beyond the papers': three consumers of wider heads, few keys
    (96, 192, 96, ()),
    (112, 192, 96, ("splits",)),
    (80, 192, 112, ()),
    (128, 192, 80, ()),
    (64, 192, 80, ("q_lens", "kv_lens")),
    (192, 128, 112, ("causal",)),
]


@pytest.mark.parametrize("case", slow_but(WGMMA_CASES[:1], WGMMA_CASES))
@pytest.mark.parametrize("dtype", ["float16", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_a_kernel_of_hoppers_unit_compiles_within_its_budgets(case, dtype):
    d, Br, Bc, options = case
    features = Features(**{f.name: f.name in options for f in fields(Features)})
    shared = 8 if "shared heads" in options else 1
    facts = {"features": features, "dtype": dtype, "tile_heads": shared}
    facts["ablated"] = tuple(name for name in options if name in WGMMA_MEASURES)
    spec = select_wgmma_spec(Tiles(Br, Bc, stages=2), d, SHARED["sm_90a"], **facts)
    kernel = wgmma.fa2_forward.make_forward(spec)
    ptx = hoppers_ptx_within_budgets(kernel, spec)
    stored = 5 if shared > 1 else 4  # heads in the rows of a tile are an axis of theirs
    bulk_stores = f"cp.async.bulk.tensor.{stored}d.global.shared::cta.tile.bulk_group"
    assert (bulk_stores in ptx) != spec.features.splits  # of splits threads write the sums
    for instruction in (
        f"wgmma.mma_async.sync.aligned.m64n{Bc}k16.f32.{'f16' if dtype == 'float16' else 'bf16'}",
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes",
        "mbarrier.try_wait.parity",
    ):
        assert instruction in ptx, instruction
    # Four tensor maps lie among the parameters themselves.
    assert ptx.count(".param .align 64 .b8") == 4


SHARING = [
    # head_dim, Br, Bc, stages, option; blocks a multiprocessor
    ((64, 64, 96, 2, "causal"), 3),
    ((64, 64, 64, 3, "window"), 3),
    ((64, 64, 112, 2, "causal"), 2),
    ((128, 64, 64, 1, "causal"), 2),
    ((64, 64, 192, 1, "causal"), 2),
    ((64, 64, 208, 1, "causal"), 1),
    ((256, 64, 32, 1, "causal"), 1),
    ((64, 128, 128, 4, "causal"), 1),
]


def sharing(case):
    d, Br, Bc, stages, option = case
    facts = {"features": Features(**{option: True}), "positive_scale": True, "grouped": False}
    tiles = Tiles(Br, Bc, stages=stages)
    return select_wgmma_spec(tiles, d, SHARED["sm_90a"], shares=True, **facts)


@pytest.mark.parametrize("case, blocks", SHARING)
def test_blocks_share_a_multiprocessor_where_instructions_have_their_registers(case, blocks):
    assert sharing(case).blocks == blocks


@pytest.mark.parametrize("case", slow_but([SHARING[2][0]], [case for case, _ in SHARING]))
def test_kernels_that_share_a_multiprocessor_compile_within_their_budgets(case):
    spec = sharing(case)
    hoppers_ptx_within_budgets(wgmma.fa2_forward.make_forward(spec), spec)


WGMMA_FA1_CASES = [
    # head_dim, tiles or the default, options
    (128, None, ("causal",)),
    (64, None, ("causal",)),
    (64, None, ("window", "softcap", "q_lens")),
    (64, (192, 128), ("window", "softcap", "q_lens")),
    (96, None, ()),
    (128, None, ("window", "softcap", "q_lens")),
    (128, (128, 128), ("causal",)),
    (128, (192, 128), ("causal",)),
    (192, None, ("causal",)),
    (192, (128, 96), ("window", "softcap", "q_lens")),
    (256, None, ("causal",)),
    (256, None, ("window", "softcap", "q_lens")),
    (256, (128, 32), ()),
]


@pytest.mark.parametrize("case", slow_but(WGMMA_FA1_CASES[:1], WGMMA_FA1_CASES))
@pytest.mark.parametrize("dtype", ["float16", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_fa1_on_hoppers_unit_compiles_within_its_budgets(case, dtype):
    d, tiles, options = case
    facts = {"features": Features(**dict.fromkeys(options, True)), "dtype": dtype}
    tiles = hopper_fa1_tiles(d, facts["features"]).value if tiles is None else Tiles(*tiles)
    spec = select_wgmma_fa1_spec(tiles, d, SHARED["sm_90a"], return_lse=True, **facts)
    kernel = wgmma.fa1_forward.make_forward(spec)
    ptx = hoppers_ptx_within_budgets(kernel, spec)
    for instruction in (
        f"wgmma.mma_async.sync.aligned.m64n{tiles.Bc}k16.f32.",
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes",
        "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group",
        "cp.async.bulk.wait_group.read 0",
        "cp.async.bulk.wait_group 0",
        "ld.shared.v2.f32",
        "st.shared.v2.f32",
    ):
        assert instruction in ptx, instruction
    # Five tensor maps lie among the parameters themselves.
    assert ptx.count(".param .align 64 .b8") == 5


def test_the_docstrings_shared_memory_is_that_of_fa1_on_hoppers_unit():
    documented = re.findall(r"(\d+) \(d=(\d+),\s+(\d+) x (\d+)\)", wgmma.fa1_forward.__doc__)
    assert [int(d) for _, d, *_ in documented] == [64, 128, 192, 256]
    for size, d, Br, Bc in (map(int, found) for found in documented):
        tiles = hopper_fa1_tiles(d, PLAIN).value
        assert (tiles.Br, tiles.Bc) == (Br, Bc)
        assert select_wgmma_fa1_spec(tiles, d, SHARED["sm_90a"]).shared_bytes == size
    most = max(Bc for Bc in range(16, 256, 16) if _fits_two_consumers(Bc))
    assert f"At d=256 two consumers leave room for {most} columns" in wgmma.fa1_forward.__doc__


def _fits_two_consumers(Bc):
    try:
        return select_wgmma_fa1_spec(Tiles(128, Bc), 256, SHARED["sm_90a"]).consumers == 2
    except ValueError:
        return False


WGMMA_BACKWARD_CASES = [
    (128, ("causal",)),
    (64, ("causal",)),
    (128, ("window",)),
    (64, ("window",)),
    (80, ()),
    (40, ("causal",)),
    (64, ("window", "softcap")),
    (128, ("window", "softcap")),
    (64, ("causal", "alibi")),
    (64, ("window", "alibi"), True),
    (48, ("alibi",)),
    (128, ("alibi",)),
    (48, ("bias",)),
    (128, ("bias",)),
    (128, ("causal", "bias")),
    (96, ("window", "bias"), True),
    (128, ("causal",), True),
    (64, (), True),
    (64, ("window", "softcap"), True),
    (64, ("bias",)),
    (64, ("packed",)),
    (64, ("causal", "packed"), True),
    (64, ("causal", "q_lens", "kv_lens")),
    (128, ("packed",)),
    (128, ("window", "q_lens")),
    (128, ("alibi", "q_lens")),
    (48, ("bias", "packed")),
    (64, ("causal", "packed"), True, True),
    (128, ("causal",), True, True),
    (64, ("window",), True, True),
]


@pytest.mark.parametrize("case", slow_but(WGMMA_BACKWARD_CASES[:1], WGMMA_BACKWARD_CASES))
@pytest.mark.parametrize("dtype", ["float16", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_a_backward_kernel_of_hoppers_unit_compiles_within_its_budgets(case, dtype):
    d, options, *shares = case
    facts = {"features": Features(**dict.fromkeys(options, True)), "dtype": dtype}
    facts |= {"splits_group": bool(shares), "splits_rows": len(shares) > 1}
    facts |= {"chunk_tiles": 4} if options == ("causal", "alibi") else {}  # as ``chunk_tiles`` says
    tiles = default_wgmma_backward_tiles(d)
    spec = select_wgmma_backward_spec(tiles, d, SHARED["sm_90a"], **facts)
    kernel = wgmma.fa2_backward.make_backward(spec)
    ptx = hoppers_ptx_within_budgets(kernel, spec)
    kind = "f16" if dtype == "float16" else "bf16"
    steps = ceil_div(d, 16)
    # ST and dPT, and again the next ST; dV and dK; dQ.
    assert ptx.count(f".f32.{kind}.{kind}") == 3 * steps + 2 * spec.Br // 16 + spec.Bc // 16
    assert "cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.tile.bulk_group" in ptx
    # Seven tensor maps lie among the parameters themselves, without parts of dK and dV five.
    assert ptx.count(".param .align 64 .b8") == (5 if shares else 7)


WGMMA_DETERMINISTIC_CASES = [
    *(
        (d, options)
        for d in (64, 128, 160, 192, 256)
        for options in ((), ("causal",), ("window", "softcap"), ("causal", "alibi"))
    ),
    (128, ("causal", "packed")),
    (256, ("window", "q_lens", "kv_lens")),
]


@pytest.mark.parametrize(
    "case", slow_but(WGMMA_DETERMINISTIC_CASES[1:2], WGMMA_DETERMINISTIC_CASES)
)
@pytest.mark.parametrize("dtype", ["float16", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_hoppers_backward_kernel_without_dq_compiles_within_its_budgets(case, dtype):
    d, options = case
    facts = {"features": Features(**dict.fromkeys(options, True)), "dtype": dtype}
    facts |= {"positive_scale": True, "grouped": False}
    tiles = default_wgmma_backward_tiles(d, atomic=False)
    spec = select_wgmma_backward_spec(tiles, d, SHARED["sm_90a"], atomic=False, **facts)
    ptx = within_hoppers_budgets(wgmma.fa2_backward.make_backward(spec, atomic=False), spec)
    assert "cp.reduce.async.bulk" not in ptx
    # Six tensor maps lie among the parameters themselves.
    assert ptx.count(".param .align 64 .b8") == 6


WGMMA_SWEEP_CASES = [
    *(
        (d, options)
        for d in (64, 128, 192, 256)
        for options in (("causal",), ("window", "softcap"))
    ),
    (96, ()),
    (160, ("causal",)),
    (128, ("packed",)),
    (256, ("causal", "q_lens", "kv_lens")),
]


@pytest.mark.parametrize("case", slow_but([(256, ("causal",))], WGMMA_SWEEP_CASES))
@pytest.mark.parametrize("dtype", ["float16", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_a_second_sweep_of_hoppers_unit_compiles_within_its_budgets(case, dtype):
    d, options = case
    facts = {"features": Features(**dict.fromkeys(options, True)), "dtype": dtype}
    spec = select_wgmma_sweep_spec(d, stages=2, positive_scale=True, grouped=False, **facts)
    ptx = within_hoppers_budgets(wgmma.fa2_backward.make_query_gradients(spec), spec)
    kind = "f16" if dtype == "float16" else "bf16"
    # S, and again the next S, and dP; dQ.
    assert ptx.count(f".f32.{kind}.{kind}") == 3 * ceil_div(d, 16) + spec.Bc // 16
    # Five tensor maps lie among the parameters themselves.
    assert ptx.count(".param .align 64 .b8") == 5


def within_hoppers_budgets(kernel, spec):
    """The PTX of a kernel that spills nothing, and waits for its products where it says so."""
    ptx, log = compiled(kernel, "sm_90a")
    assert ".f64" not in ptx and ".local" not in ptx
    assert spills_of(log) == ["0"] * 3, log
    assert "warning" not in log.lower() and "serializ" not in log.lower(), log
    assert registers(log) * kernel.threads <= REGISTERS
    few, many = spec.registers
    assert 128 * (few + many * spec.consumers) <= registers(log) * kernel.threads
    assert fits(kernel, "sm_90a")
    return ptx


# head_dim, options, whether heads share K and V, whether blocks share a head
WGMMA_FA1_BACKWARD_CASES = [
    (128, ("causal",), False, False),
    (64, ("causal",), False, False),
    (64, (), False, False),
    (64, ("causal",), True, True),
    (128, (), True, False),
    (80, (), False, True),
    (40, ("causal",), False, False),
]


@pytest.mark.parametrize("case", slow_but(WGMMA_FA1_BACKWARD_CASES[1:2], WGMMA_FA1_BACKWARD_CASES))
@pytest.mark.parametrize("dtype", ["float16", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_fa1s_backward_kernel_of_hoppers_unit_compiles_within_its_budgets(case, dtype):
    d, options, grouped, splits_queries = case
    facts = {"features": Features(**dict.fromkeys(options, True)), "dtype": dtype}
    facts |= {"row_tiles": 3, "positive_scale": True}
    facts |= {"grouped": grouped, "splits_queries": splits_queries}
    spec = select_wgmma_backward_spec(default_wgmma_backward_tiles(d), d, SHARED["sm_90a"], **facts)
    kernel = wgmma.fa1_backward.make_backward(spec)
    ptx = hoppers_ptx_within_budgets(kernel, spec)
    # Seven tensor maps lie among the parameters themselves, or five.
    assert ptx.count(".param .align 64 .b8") == (5 if splits_queries else 7)


def test_the_docstrings_shared_memory_is_that_of_hoppers_backward_kernel():
    for module, row_tiles, dims in (
        (wgmma.fa2_backward, 2, [64, 128]),
        (wgmma.fa2_backward_wide, 2, [192, 256]),
        (wgmma.fa1_backward, 3, [64, 128]),
    ):
        documented = re.findall(r"(\d+) \(d=(\d+), (\d+) x (\d+)\)", module.__doc__)
        assert [int(d) for _, d, *_ in documented] == dims
        for size, d, Br, Bc in (map(int, found) for found in documented):
            tiles, facts = default_wgmma_backward_tiles(d), {"row_tiles": row_tiles}
            assert (tiles.Br, tiles.Bc) == (Br, Bc)
            spec = select_wgmma_backward_spec(tiles, d, SHARED["sm_90a"], **facts)
            assert spec.shared_bytes == size


BACKWARD_CASES = [
    *(
        (name, arch, d, True, True)
        for name in ("fa1", "fa2", "fa2 dQ")
        for arch in ("sm_90a", "sm_80")
        for d in (64, 128)
    ),
    ("fa1", "sm_90a", 256, True, True),
    ("fa1 splits", "sm_90a", 64, True, True),
    ("fa1 splits", "sm_80", 128, False, False),
    ("fa2", "sm_90a", 128, False, False),
    ("fa2 without dQ", "sm_90a", 128, True, True),
    ("transposed", "sm_90a", 128, True, True),
    ("transposed", "sm_80", 64, True, False),
    ("dS", "sm_90a", 64, True, True),
    ("row sums", "sm_80", 128, True, True),
]


QUICK_BACKWARD = {
    ("fa1", "sm_90a", 128, True, True),
    ("fa2", "sm_90a", 64, True, True),
    ("fa2 dQ", "sm_90a", 128, True, True),
    ("transposed", "sm_80", 64, True, False),
    ("dS", "sm_90a", 64, True, True),
    ("row sums", "sm_80", 128, True, True),
}


@pytest.mark.parametrize("case", slow_but(QUICK_BACKWARD, BACKWARD_CASES))
def test_a_backward_kernel_compiles_within_its_budgets(case):
    name, arch, d, causal, aligned = case
    ptx = ptx_within_budgets(backward_kernel_of(*case), arch)

    if name not in ("dS", "row sums"):
        assert "ld.shared.v4.f32" in ptx, "16-byte reads of shared memory"
        width = "cg.shared.global" if aligned else "ca.shared.global"
        assert f"cp.async.{width}" in ptx, "asynchronous copies"
        if aligned:  # of dQ, where dK and dV are added
            assert "st.global.v4.f32" in ptx, "16-byte writes of a gradient"
    assert ("ex2.approx.ftz.f32" in ptx) == name.startswith("fa")
    assert ("red.global.add.f32" in ptx) == (name in ("fa2", "fa1 splits"))


OPTIONS = ("window", "softcap", "bias", "alibi", "q_lens", "packed", "sparse", "dropout")
FLASH = {
    "fa1": (fa1_forward.make_forward, fa1_backward.make_backward),
    "fa2": (fa2_forward.make_forward, fa2_backward.make_backward),
}


@pytest.mark.slow
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("algorithm, d", [("fa1", 128), ("fa2", 64)])
def test_a_kernel_with_an_option_compiles_within_its_budgets(algorithm, d, option):
    features = Features(**{option: True})
    sizes = 4096, 4096, d, SHARED["sm_90a"]
    for make, tiles, kind in zip(
        FLASH[algorithm],
        [simt_tiles(algorithm, of, *sizes).value for of in ("fwd", "bwd")],
        (SimtSpec, SimtBackwardSpec),
        strict=True,
    ):
        kernel = make(select_spec(tiles, d, SHARED["sm_90a"], kind, features=features))
        ptx_within_budgets(kernel, "sm_90a")


@pytest.mark.parametrize(
    "kernel_of, case",
    [
        (of, case)
        for of, quick in ((kernel_of, QUICK), (backward_kernel_of, QUICK_BACKWARD))
        for case in sorted(quick)
        if case[0] in FLASH
    ],
)
def test_a_plain_kernel_has_no_argument_for_an_option(kernel_of, case):
    """Its last argument is an empty tuple, which the compiled kernel does not have."""
    arrays = {4: 13, 3: 11}  # words of an array by its axes
    kernel = kernel_of(*case)
    assert kernel.argument_types[-1].fields == ()
    ptx, _ = compiled(kernel, case[1])
    words = sum(arrays[t.ndim] if hasattr(t, "ndim") else 1 for t in kernel.argument_types[:-1])
    assert ptx.count("_param_") and len(set(re.findall(r"_param_(\d+)", ptx))) == words


@pytest.mark.parametrize("module", [fa1_forward, fa2_forward], ids=["fa1", "fa2"])
def test_the_docstrings_shared_memory_is_the_kernels(module):
    formula = re.search(r"Shared memory, floats: +(.*), swizzled", module.__doc__)[1]
    python = re.sub(r"(?<=[\w)]) (?=[\w(])", " * ", formula)
    checked = 0
    for d, (Br, Bc) in itertools.product((32, 64, 128, 256), ((64, 64), (128, 64), (64, 32))):
        for spec in splits(Br, Bc, d):
            if spec.columns == d:  # V's rows have no columns beyond the head
                floats = eval(python, {"Br": Br, "Bc": Bc, "d": d})
                assert 4 * floats == spec.shared_bytes == module.make_forward(spec).shared_bytes
                checked += 1
    assert checked >= 10
    algorithm = module.__name__.rpartition(".")[2].removesuffix("_forward")
    documented = re.findall(r"(\d+)\s+\(d=(\d+), (\d+) x (\d+)\)", module.__doc__)
    assert len(documented) == 3
    for size, d, Br, Bc in (map(int, found) for found in documented):
        with fa_numba.device.using("emulator"):
            plan = fa_numba.plan((1, 1, 4096, d), (1, 1, 4096, d), algorithm=algorithm)
        assert (plan.tiles.Br, plan.tiles.Bc) == (Br, Bc)
        assert plan.kernels[0].shared_bytes == size


@pytest.mark.parametrize("module", [fa1_backward, fa2_backward], ids=["fa1", "fa2"])
def test_the_docstrings_shared_memory_is_the_backward_kernels(module):
    formula = re.search(r"Shared memory, floats: +(.*), swizzled", module.__doc__)[1]
    python = re.sub(r"(?<=[\w)]) (?=[\w(])", " * ", formula)
    checked = 0
    for d, (Br, Bc) in itertools.product((32, 64, 128, 256), ((64, 64), (32, 64), (64, 32))):
        for spec in splits(Br, Bc, d, SimtBackwardSpec):
            if spec.columns == d:  # rows have no columns beyond the head
                floats = eval(python, {"Br": Br, "Bc": Bc, "d": d})
                assert 4 * floats == spec.shared_bytes == module.make_backward(spec).shared_bytes
                checked += 1
    assert checked >= 10


def test_the_default_backward_plan_is_what_is_compiled_here():
    for d in (64, 128):
        for algorithm, n, name in (("fa1", 0, "fa1"), ("fa2", 1, "fa2"), ("standard", 4, None)):
            with fa_numba.device.using("emulator"):
                shape = (1, 1, 4096, d)
                plan = fa_numba.plan(shape, shape, algorithm=algorithm, passes="bwd")
            kernel = backward_kernel_of(name or "transposed", "sm_90a", d, False, True)
            planned = plan.kernels[n]
            assert planned.name == kernel.name
            assert (planned.threads, planned.shared_bytes) == (kernel.threads, kernel.shared_bytes)


def test_the_default_plan_is_what_is_compiled_here():
    for d in (64, 128):
        for algorithm, name in (("fa1", "fa1"), ("fa2", "fa2"), ("standard", "scores")):
            with fa_numba.device.using("emulator"):
                plan = fa_numba.plan((1, 1, 4096, d), (1, 1, 4096, d), algorithm=algorithm)
            kernel = kernel_of(name, "sm_90a", d, False, True)
            first = plan.kernels[0]
            assert (first.threads, first.shared_bytes) == (kernel.threads, kernel.shared_bytes)


# --- tensor cores ----------------------------------------------------------------------------

MMA = {"fa1": mma.fa1_forward, "fa2": mma.fa2_forward}


def planned_mma_tiles(algorithm, passes, arch, d, option, specialised, default):
    """As a plan takes them: those that were measured on ``arch``, plain aligned calls alone."""
    if arch == "sm_90a" and option in (None, "causal", "splits"):
        sizes = (4096, 4096, d)
        return tuned_tiles((9, 0), "mma", algorithm, passes, *sizes, specialised) or default
    return default


def mma_spec_of(name, arch, d, dtype="float16", option=None):
    """The default tiles' for long sequences; ``option`` is a feature or "unaligned".

    "fa1 keys" is FA-1 with the keys split over the warps, "fa2 stages" FA-2 with two stages.
    """
    splits_keys, two_stages = name == "fa1 keys", name == "fa2 stages"
    name = name.partition(" ")[0]
    features = Features(**{option: True}) if option not in (None, "unaligned") else PLAIN
    tiles = mma_tiles(name, "fwd", 4096, 4096, d, SHARED[arch], features, splits_keys).value
    if not splits_keys:
        fits = functools.partial(select_mma_spec, head_dim=d, shared_limit=SHARED[arch])
        tiles = planned_mma_tiles(name, "fwd", arch, d, option, fits, tiles)
    if two_stages:
        tiles = Tiles(128, 64, 128, stages=2)
    facts = {"features": features, "aligned": option != "unaligned", "dtype": dtype}
    facts |= {"positive_scale": True, "return_lse": name == "fa1", "splits_keys": splits_keys}
    facts["grouped"] = False
    return select_mma_spec(tiles, d, SHARED[arch], **facts)


def mma_kernel_of(name, *case):
    return MMA[name.partition(" ")[0]].make_forward(mma_spec_of(name, *case))


MMA_CASES = [
    # name, arch, head_dim, dtype, option
    *(
        (name, arch, d, "float16", None)
        for name in MMA
        for arch in ("sm_80", "sm_89", "sm_90a")
        for d in (64, 128)
    ),
    *((name, "sm_90a", d, "bfloat16", "causal") for name in MMA for d in (64, 128)),
    *((name, "sm_90a", d, "float16", None) for name in MMA for d in (32, 96, 160, 192, 256)),
    *(
        ("fa2", arch, d, "float16", option)
        for arch in ("sm_80", "sm_89")
        for d in (32, 80, 112, 160, 192, 256)
        for option in (None, "causal")
    ),
    *(("fa2", arch, d, "float16", "bias") for arch in ("sm_80", "sm_89") for d in (64, 128)),
    ("fa1", "sm_80", 128, "float16", "bias"),
    *((name, "sm_90a", 64, "float16", "unaligned") for name in MMA),
    *(
        (name, "sm_90a", 64, "float16", option)
        for name in MMA
        for option in ("window", "softcap", "bias", "alibi", "packed", "dropout")
    ),
    *(
        (name, "sm_90a", 128, "float16", option)
        for name in MMA
        for option in ("window", "bias", "packed")
    ),
    *((name, "sm_90a", 256, "float16", "packed") for name in MMA),
    *(("fa1", "sm_90a", d, "float16", "packed") for d in (160, 192)),
    ("fa2", "sm_80", 128, "float16", "causal"),
    *(("fa1 keys", "sm_90a", d, "float16", None) for d in (64, 128, 256)),
    *(("fa1 keys", "sm_90a", d, "float16", "packed") for d in (64, 128)),
    *(("fa2 stages", "sm_90a", d, "float16", "causal") for d in (32, 64, 96)),
    *(("fa2 stages", "sm_90a", 128, dtype, None) for dtype in ("float16", "bfloat16")),
    ("fa2 stages", "sm_80", 64, "float16", None),
]


# FlashAttention-2's where registers are fullest: its tiles are others before sm_90.
QUICK_MMA = {
    ("fa1", "sm_90a", 64, "float16", None),
    ("fa2", "sm_80", 128, "float16", "causal"),
}


@pytest.mark.parametrize("case", slow_but(QUICK_MMA, MMA_CASES))
def test_an_mma_kernel_compiles_within_its_budgets(case):
    name, arch, _, dtype, option = case
    kernel = mma_kernel_of(*case)
    ptx = ptx_within_budgets(kernel, arch)
    assert kernel.shared_bytes == mma_spec_of(*case).shared_bytes

    kind = {"float16": "f16", "bfloat16": "bf16"}[dtype]
    instruction = f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32"
    assert 0 < ptx.count(instruction) == ptx.count("mma.sync")
    assert "ldmatrix.sync.aligned.m8n8.x4.shared.b16" in ptx
    assert "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16" in ptx
    assert f"cvt.rn.{kind}x2.f32" in ptx
    assert ("cp.async.cg.shared.global" in ptx) == (option != "unaligned")
    assert "cp.async.ca" not in ptx
    assert "ex2.approx.ftz.f32" in ptx and "shfl.sync.bfly" in ptx


@pytest.mark.parametrize("name", MMA)
def test_the_docstrings_shared_memory_is_the_mma_kernels(name):
    module = MMA[name]
    formula = re.search(r"Shared memory, 16-bit elements: +(.*)", module.__doc__)[1]
    python = re.sub(r"(?<=[\w)]) (?=[\w(])", " * ", formula)
    for d, (Br, Bc) in itertools.product((32, 64, 128, 256), ((64, 64), (128, 32), (16, 16))):
        spec = select_mma_spec(Tiles(Br, Bc), d, SHARED["sm_90a"])
        halves = eval(python, {"Br": Br, "Bc": Bc, "d": d, "stages": 1})
        assert 2 * halves == spec.shared_bytes == module.make_forward(spec).shared_bytes
        if name == "fa2":
            two = replace(spec, stages=2)
            halves = eval(python, {"Br": Br, "Bc": Bc, "d": d, "stages": 2})
            assert 2 * halves == two.shared_bytes == module.make_forward(two).shared_bytes
    documented = re.findall(r"(\d+)\s+\(d=(\d+), (\d+) x (\d+)\)", module.__doc__)
    assert len(documented) == 3
    for size, d, Br, Bc in (map(int, found) for found in documented):
        with fa_numba.device.using("emulator"):
            shape = (1, 1, 4096, d)
            plan = fa_numba.plan(shape, shape, algorithm=name, dtype="float16")
        assert (plan.tiles.Br, plan.tiles.Bc) == (Br, Bc)
        assert plan.kernels[0].shared_bytes == size


@pytest.mark.parametrize("name", MMA)
@pytest.mark.parametrize("d", [64, 128])
def test_the_default_mma_plan_is_what_is_compiled_here(name, d):
    with fa_numba.device.using("emulator"):
        shape = (1, 1, 4096, d)
        plan = fa_numba.plan(shape, shape, algorithm=name, dtype="float16")
    kernel = MMA[name].make_forward(mma_spec_of(name, "sm_90a", d))
    planned = plan.kernels[0]
    assert planned.name == kernel.name
    assert (planned.threads, planned.shared_bytes) == (kernel.threads, kernel.shared_bytes)


# What the PTX shows of a measure of the forward kernel that is left out: more of what, or none of
# it. The padding is a size alone.
LEFT_OUT = {
    "prefetch": ("waits", 4),  # for Q, twice K and V
    "wide_stores": ("wide stores", None),
    "folded_scale": ("products", -2),  # by each row's maximum, of which a thread has two
    "q_registers": ("ldmatrix before the loop", -7),  # of 8: the loop begins with one
}


def shown(*left_out):
    """Of a kernel that is compiled whole above, with these measures left out."""
    spec = replace(mma_spec_of("fa2", "sm_80", 128, "float16", "causal"), ablated=left_out)
    ptx, _ = compiled(mma.fa2_forward.make_forward(spec), "sm_80")
    return {
        "waits": ptx.count("cp.async.wait_group"),
        "products": ptx.count("mul.f32"),
        "wide stores": ptx.count("st.global.v4"),
        "ldmatrix before the loop": ptx.partition("mma.sync")[0].count("ldmatrix"),
    }


@pytest.mark.parametrize(
    "measures",
    [tuple(LEFT_OUT), *(pytest.param((name,), marks=pytest.mark.slow) for name in LEFT_OUT)],
    ids="-".join,
)
def test_a_measure_left_out_is_not_compiled(measures):
    """Each has its own sign, so that all are seen where they are left out together."""
    expected = shown()
    assert expected["wide stores"] > 0
    for name in measures:
        what, more = LEFT_OUT[name]
        expected[what] = 0 if more is None else expected[what] + more
    assert shown(*measures) == expected


def standard_mma_kernel_of(name, arch, d, dtype, option):
    """A kernel of standard attention by the default tiles for long sequences; as ``mma_spec_of``.

    "bwd" names are of the backward pass and its tiles; "twice" is for rows beyond shared memory.
    """
    features = Features(**{option: True}) if option not in (None, "unaligned") else PLAIN
    passes = "bwd" if name.startswith("bwd") else "fwd"
    tiles = mma_tiles("standard", passes, 4096, 4096, d, SHARED[arch]).value
    facts = {"features": features, "aligned": option != "unaligned", "dtype": dtype}
    spec = select_mma_spec(tiles, d, SHARED[arch], StandardSpec, **facts)
    row = 0 if name.endswith("twice") else 4096
    rows = (row, mma.standard.MAX_WARPS)
    standard, backward = mma.standard, mma.standard_backward
    make = {
        "scores": lambda: standard.make_standard_scores(spec),
        "softmax": lambda: standard.make_standard_softmax(*rows, True, features, dtype),
        "output": lambda: standard.make_standard_output(spec),
        "slopes": lambda: standard.make_standard_scores(spec, slopes=True),
        "transposed": lambda: backward.make_standard_transposed_output(spec),
        "dS": lambda: backward.make_standard_score_gradients(*rows, features, dtype),
    }
    return make[name.removeprefix("bwd ").removesuffix(" twice")]()


STANDARD_CASES = [
    # name, arch, head_dim, dtype, option
    *(
        (name, arch, d, "float16", None)
        for name in ("scores", "output", "bwd scores", "bwd output", "bwd transposed")
        for arch in ("sm_80", "sm_89", "sm_90a")
        for d in (64, 128)
    ),
    *(
        (name, "sm_90a", 64, "bfloat16", "causal")
        for name in ("scores", "softmax", "output", "bwd scores", "bwd transposed", "bwd dS")
    ),
    *((name, "sm_90a", d, "float16", None) for name in ("scores", "output") for d in (32, 96, 256)),
    *((name, "sm_90a", 64, "float16", "unaligned") for name in ("scores", "bwd transposed")),
    *(
        (name, "sm_90a", 128, "float16", option)
        for name in ("scores", "bwd scores")
        for option in ("window", "softcap", "bias", "alibi", "packed", "sparse")
    ),
    *(
        (name, "sm_90a", 64, "float16", option)
        for name in ("softmax", "softmax twice", "bwd dS", "bwd dS twice")
        for option in (None, "packed", "dropout")
    ),
    ("bwd slopes", "sm_90a", 64, "float16", "softcap"),
]


QUICK_STANDARD = {
    ("scores", "sm_90a", 64, "float16", None),
    ("output", "sm_90a", 64, "float16", None),
    ("bwd transposed", "sm_90a", 128, "float16", None),
    *(
        (name, "sm_90a", 64, "float16", None)
        for name in ("softmax", "softmax twice", "bwd dS", "bwd dS twice")
    ),
}


@pytest.mark.parametrize("case", slow_but(QUICK_STANDARD, STANDARD_CASES))
def test_a_standard_mma_kernel_compiles_within_its_budgets(case):
    name, arch, _, dtype, option = case
    ptx = ptx_within_budgets(standard_mma_kernel_of(*case), arch)

    by_rows = "softmax" in name or "dS" in name
    assert ("mma.sync" in ptx) == ("ldmatrix" in ptx) == (not by_rows)
    if by_rows or "scores" in name or "slopes" in name:
        assert re.search(r"st\.global\.v4\.[ub]32", ptx), "16-byte writes of S, P and dS"
    if "twice" not in name:
        full = name == "scores" and option == "unaligned"
        assert ("cp.async.cg.shared.global" in ptx) == (not full), "16-byte copies"
    assert "cp.async.ca" not in ptx
    assert ("ex2.approx.ftz.f32" in ptx) == ("softmax" in name or option == "softcap")


def test_the_docstrings_shared_memory_is_the_standard_mma_kernels():
    found = re.search(r"default tiles, 128 x 64: +(.*)", mma.standard.__doc__)[1]
    documented = re.findall(r"(\d+) and (\d+) \(d=(\d+)\)", found)
    assert len(documented) == 2
    for scores, output, d in (map(int, sizes) for sizes in documented):
        with fa_numba.device.using("emulator"):
            shape = (1, 1, 4096, d)
            plan = fa_numba.plan(shape, shape, algorithm="standard", dtype="float16")
        assert (plan.tiles.Br, plan.tiles.Bc) == (128, 64)
        assert [plan.kernels[n].shared_bytes for n in (0, 2)] == [scores, output]
        for n, name in ((0, "scores"), (1, "softmax"), (2, "output")):
            kernel = standard_mma_kernel_of(name, "sm_90a", d, "float16", None)
            planned = plan.kernels[n]
            assert planned.name == kernel.name
            assert (planned.threads, planned.shared_bytes) == (kernel.threads, kernel.shared_bytes)


MMA_BACKWARD = {"fa1": mma.fa1_backward, "fa2": mma.fa2_backward}


def mma_backward_kernel_of(name, arch, d, dtype, option):
    """The kernel of the default tiles for long sequences; as ``mma_spec_of``.

    ``option`` may also be "splits", queries dealt out to several blocks, and "dbias".
    """
    options = {"dbias": {"bias": True, "dbias": True}}.get(option, {option: True})
    plain = option in (None, "unaligned", "splits")
    features = PLAIN if plain else Features(**options)
    facts = {"features": features, "aligned": option != "unaligned", "dtype": dtype}
    facts |= {"positive_scale": True, "grouped": False}
    if name == "fa2 dQ":
        tiles = mma_tiles("fa2", "sweep", 4096, 4096, d, SHARED[arch]).value
        spec = select_mma_spec(tiles, d, SHARED[arch], MmaSweepSpec, **facts)
        return mma.fa2_backward.make_query_gradients(spec)
    row_tiles = 3 if name == "fa1" else 2
    algorithm = "fa1" if name == "fa1" else "fa2"
    tiles = mma_tiles(algorithm, "bwd", 4096, 4096, d, SHARED[arch]).value
    fits = functools.partial(
        select_mma_backward_spec, head_dim=d, shared_limit=SHARED[arch], row_tiles=row_tiles
    )
    tiles = planned_mma_tiles(name.partition(" ")[0], "bwd", arch, d, option, fits, tiles)
    facts |= {"row_tiles": row_tiles, "splits_queries": option == "splits"}
    facts["vector_adds"] = CAPABILITY[arch] >= (9, 0)
    spec = select_mma_backward_spec(tiles, d, SHARED[arch], **facts)
    if name == "fa2 without dQ":
        return mma.fa2_backward.make_backward(spec, atomic=False)
    return MMA_BACKWARD[name].make_backward(spec)


MMA_BACKWARD_CASES = [
    # name, arch, head_dim, dtype, option
    *((name, "sm_90a", d, "float16", None) for name in MMA_BACKWARD for d in (96, 128, 192, 256)),
    *((name, "sm_90a", d, "float16", "causal") for name in MMA_BACKWARD for d in (32, 64)),
    *((name, arch, 64, "float16", None) for name in MMA_BACKWARD for arch in ("sm_80", "sm_89")),
    *((name, "sm_80", 128, "float16", "causal") for name in MMA_BACKWARD),
    # At d = 256 99 KiB leave sm_89 tiles of 32 x 16, whose kernel spills 8 bytes.
    *(
        ("fa2", arch, d, "float16", None)
        for arch in ("sm_80", "sm_89")
        for d in (32, 80, 112, 160, 192, 256)
        if (arch, d) != ("sm_89", 256)
    ),
    *(
        (name, "sm_90a", 64, "float16", option)
        for name in MMA_BACKWARD
        for option in ("window", "softcap", "dbias", "alibi", "packed", "sparse", "dropout")
    ),
    *((name, "sm_90a", 128, "float16", "softcap") for name in MMA_BACKWARD),
    *(("fa1", "sm_90a", d, "float16", "splits") for d in (64, 128)),
    ("fa2", "sm_90a", 64, "float16", "unaligned"),
    ("fa2 without dQ", "sm_90a", 64, "bfloat16", "causal"),
    *(("fa2 dQ", "sm_90a", d, "float16", "causal") for d in (64, 128)),
]


# The adds are other instructions from sm_90 on: FlashAttention-1's are tried there.
QUICK_MMA_BACKWARD = {
    ("fa1", "sm_90a", 128, "float16", "splits"),
    ("fa2", "sm_80", 128, "float16", "causal"),
    ("fa2 dQ", "sm_90a", 64, "float16", "causal"),
}


@pytest.mark.parametrize("case", slow_but(QUICK_MMA_BACKWARD, MMA_BACKWARD_CASES))
def test_an_mma_backward_kernel_compiles_within_its_budgets(case):
    name, arch, _, dtype, option = case
    ptx = ptx_within_budgets(mma_backward_kernel_of(*case), arch)

    kind = {"float16": "f16", "bfloat16": "bf16"}[dtype]
    instruction = f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32"
    assert 0 < ptx.count(instruction) == ptx.count("mma.sync")
    assert "ldmatrix.sync.aligned.m8n8.x4.shared.b16" in ptx
    assert "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16" in ptx
    assert ("cp.async.cg.shared.global" in ptx) == (option != "unaligned")
    assert "ex2.approx.ftz.f32" in ptx
    # Atomic adds to dQ, or to dK and dV: of two neighbours where there is such an instruction.
    adds = name == "fa2" or option == "splits"
    assert ("red.global.add.v2.f32" in ptx) == (adds and arch == "sm_90a")
    assert ("red.global.add.f32" in ptx) == ((adds and arch != "sm_90a") or option == "dbias")


@pytest.mark.parametrize(
    "kernel_of, cases",
    [
        (kernel_of, CASES),
        (backward_kernel_of, BACKWARD_CASES),
        (mma_kernel_of, MMA_CASES),
        (standard_mma_kernel_of, STANDARD_CASES),
        (mma_backward_kernel_of, MMA_BACKWARD_CASES),
    ],
    ids=["simt", "simt backward", "mma", "standard mma", "mma backward"],
)
def test_every_kernel_has_room(kernel_of, cases):
    """Those that are not compiled by default, too."""
    assert not [case for case in cases if not fits(kernel_of(*case), case[1])]


@pytest.mark.parametrize("name", MMA_BACKWARD)
def test_the_docstrings_shared_memory_is_the_mma_backward_kernels(name):
    module = MMA_BACKWARD[name]
    formula = re.search(r"Shared memory, 16-bit elements: +(.*)", module.__doc__)[1]
    python = re.sub(r"(?<=[\w)]) (?=[\w(])", " * ", formula)
    row_tiles = 3 if name == "fa1" else 2
    for d, (Br, Bc) in itertools.product((19, 64, 72, 128, 256), ((32, 64), (64, 32), (32, 16))):
        tiles = Tiles(Br, Bc)
        spec = select_mma_backward_spec(tiles, d, SHARED["sm_90a"] * 2, row_tiles=row_tiles)
        U = 1 if d <= 64 else 2
        rounded = -(-d // (16 * U)) * 16 * U
        halves = eval(python, {"Br": Br, "Bc": Bc, "d": rounded, "U": U})
        assert 2 * halves == spec.shared_bytes == module.make_backward(spec).shared_bytes
    documented = re.findall(r"(\d+)\s+\(d=(\d+), (\d+) x (\d+)\)", module.__doc__)
    assert [int(d) for _, d, *_ in documented] == [64, 128, 256]
    for size, d, Br, Bc in (map(int, found) for found in documented):
        with fa_numba.device.using("emulator"):
            shape = (1, 1, 4096, d)
            plan = fa_numba.plan(shape, shape, algorithm=name, dtype="float16", passes="bwd")
        assert (plan.tiles.Br, plan.tiles.Bc) == (Br, Bc)
        (planned,) = [k for k in plan.kernels if k.name == f"{name}_backward"]
        kernel = mma_backward_kernel_of(name, "sm_90a", d, "float16", None)
        assert planned.shared_bytes == size == kernel.shared_bytes
        assert planned.threads == kernel.threads


def test_the_check_sees_spills_and_float64():
    """A kernel with a double and an array indexed at run time fails what the others pass."""

    def faulty(X):
        t = cuda.threadIdx.x
        kept = cuda.local.array(64, float32)
        for n in range(64):
            kept[n] = X[n] + 0.1
        X[t] = kept[int(X[t]) % 64]

    ptx, log = compiled(Kernel(faulty, (array_type(1),), 32, 0), "sm_90a")
    assert ".f64" in ptx and ".local" in ptx
    assert re.search(r"[1-9]\d* bytes stack frame", log)


def barriers_and_stores(kernel, *arguments):
    """Of the kernel's PTX, and how many barriers the assembler says that it uses."""
    ptx, log = compiled(Kernel(kernel, (array_type(1), *arguments), 128, 0), "sm_80")
    found = re.findall(r"\b(bar\.\w+ .*|st\.)", ptx)
    return found, int(re.search(r"used (\d+) barriers", log)[1])


def test_a_named_barrier_of_constants_is_one_instruction_that_memory_does_not_cross():
    def kernel(X):
        X[0] = float32(1.0)
        arrive_named(1, 96)
        X[0] = float32(2.0)
        sync_named(5, 1024)
        X[0] = float32(3.0)

    found, used = barriers_and_stores(kernel)
    assert found == ["st.", "bar.arrive 1, 96;", "st.", "bar.sync 5, 1024;", "st."]
    assert used == 6  # 0 to 5


def test_a_named_barrier_takes_registers():
    def kernel(X, barrier, threads):
        sync_named(barrier, threads)
        arrive_named(barrier, 64)
        sync_named(2, threads)

    for integers in itertools.product((types.int32, types.uint32), repeat=2):
        (first, second, third), _ = barriers_and_stores(kernel, *integers)
        a, b = re.fullmatch(r"bar\.sync (%r\d+), (%r\d+);", first).groups()
        assert a != b
        assert second == f"bar.arrive {a}, 64;"
        assert third == f"bar.sync 2, {b};"


@pytest.mark.parametrize("meet", [sync_named, arrive_named])
@pytest.mark.parametrize(
    "barrier, threads, message",
    [
        (0, 64, "barrier = 0, allowed: 1 to 15"),
        (16, 64, "barrier = 16, allowed: 1 to 15"),
        (1, 0, "threads = 0, allowed: 32 to 1024 in steps of 32"),
        (1, 40, "threads = 40, allowed: 32 to 1024 in steps of 32"),
        (1, 1056, "threads = 1056, allowed: 32 to 1024 in steps of 32"),
        (1, 64.0, "float64"),
    ],
)
def test_a_named_barrier_that_cannot_be_does_not_compile(meet, barrier, threads, message):
    def kernel(X):
        meet(barrier, threads)

    with pytest.raises(TypingError, match=message):
        compiled(Kernel(kernel, (array_type(1),), 128, 0), "sm_80")
