"""The kernels compiled without a GPU: no spills, no local memory, no float64, within budgets."""

import itertools
import math
import re
from unittest import mock

import numpy as np
import pytest
from numba import cuda, types
from numba.core.errors import TypingError
from offline import CAPABILITY, compiled

import fa_numba
from fa_numba import Tiles
from fa_numba.device import Kernel, array_type, float32, planning_for
from fa_numba.dtypes import PRECISIONS
from fa_numba.host import planning
from fa_numba.integers import ceil_div
from fa_numba.intrinsics.barriers import arrive_named, sync_named
from fa_numba.kernels import merge_parts, mma, wgmma
from fa_numba.kernels.simt import fa1_backward, fa1_forward, fa2_backward, fa2_forward
from fa_numba.kernels.simt.append import make_append, make_gather
from fa_numba.options import Features
from fa_numba.tiling import SimtBackwardSpec, splits

REGISTERS = 64 * 1024  # of a multiprocessor, sm_80 and sm_90 alike
# bytes a block may have
SHARED = {"sm_75": 64 * 1024, "sm_80": 163 * 1024, "sm_89": 99 * 1024, "sm_90a": 227 * 1024}


N = 4096
LONG = 2**17  # a row of S that no shared memory holds
# What a call is given for an option.
ARGUMENTS: dict[str, dict] = {
    "causal": {"causal": True},
    "window": {"window": (64, 9)},
    "softcap": {"softcap": 9.0},
    "dropout": {"dropout_p": 0.1},
    "splits": {"query_splits": 2},
    "kv_splits": {"kv_splits": 2},
    "keys": {"warp_partition": "keys"},
    "deterministic": {"deterministic": True},
    "dlse": {"dlse": True},
    "adds": {"score_mod": lambda s, b, h, i, j: s - abs(i - j) / (h + 1)},
    "turns": {"score_mod": lambda s, b, h, i, j: 9.0 * math.tanh(s / 9.0)},
}


def plan_of(arch, d, *options, heads=(1, 1), Nq=N, Nk=N, unit="simt", **how):
    """The plan of a call with these options on a GPU of ``arch``: of long sequences of one head,
    whose blocks share nothing unless they are asked to; rows of "unaligned" arrays start anywhere.
    """
    Hq, Hk = heads
    how = {"unit": unit, "dtype": "float32" if unit == "simt" else "float16", **how}
    if how.get("algorithm", "fa2") == "fa2":
        name = "group_splits" if how.get("passes") == "bwd" else "kv_splits"
        how.setdefault(name, 1)
    shapes = (1, Hq, Nq, d), (1, Hk, Nk, d)
    sizes = {
        "bias": {"bias": (1, Hq, Nq, Nk)},
        "dbias": {"bias": (1, Hq, Nq, Nk), "return_dbias": True},
        "alibi": {"alibi_slopes": (Hq,)},
        "sinks": {"sinks": (Hq,)},
        "dsinks": {"sinks": (Hq,), "return_dsinks": True},
        "q_lens": {"q_lens": [Nq]},
        "kv_lens": {"kv_lens": [Nk]},
        "packed": {"cu_seqlens_q": [0, Nq], "cu_seqlens_k": [0, Nk]},
    }
    for option in options:
        how |= ARGUMENTS.get(option, {}) | sizes.get(option, {})
    if "packed" in options:
        shapes = (Nq, Hq, d), (Nk, Hk, d)
    planned, aligned = planning.plan_of, "unaligned" not in options
    with (
        planning_for(CAPABILITY[arch][:2], SHARED[arch]),
        mock.patch.object(planning, "plan_of", lambda p, choices, _: planned(p, choices, aligned)),
    ):
        plan = fa_numba.plan(*shapes, **how)
        if "sparse" in options:
            how["tiles"] = plan.tiles
            mask = np.ones((ceil_div(Nq, plan.tiles.Br), ceil_div(Nk, plan.tiles.Bc)), bool)
            plan = fa_numba.plan(*shapes, block_mask=mask, **how)
    return plan


def kernel_of(name, arch, d, *options, **how):
    """What a plan launches under this name."""
    return {x.name: x for x in plan_of(arch, d, *options, **how).launched}[name]


def simt(name, arch, d, causal, aligned):
    """A forward kernel on CUDA cores; "twice" is for rows beyond shared memory."""
    options = ["causal"] * causal + ["unaligned"] * (not aligned)
    name, _, twice = name.partition(" ")
    flash = name in FLASH
    kernel, algorithm = (f"{name}_forward", name) if flash else (f"standard_{name}", "standard")
    how = {"algorithm": algorithm, "return_lse": True, "Nk": LONG if twice else N}
    return kernel_of(kernel, arch, d, *options, **how)


FLASH = ("fa1", "fa2")
# name -> a kernel's, its algorithm and what that is asked for
BACKWARD = {
    "fa1": ("fa1_backward", "fa1"),
    "fa1 splits": ("fa1_backward", "fa1", "splits"),
    "fa2": ("fa2_backward", "fa2"),
    "fa2 without dQ": ("fa2_backward", "fa2", "deterministic"),
    "fa2 dQ": ("fa2_backward_dq", "fa2", "deterministic"),
    "transposed": ("standard_transposed_output", "standard"),
    "dS": ("standard_score_gradients", "standard"),
    "row sums": ("row_sums", "fa2"),
}


def backward(name, arch, d, *options, **how):
    kernel, algorithm, *more = BACKWARD[name]
    return kernel_of(kernel, arch, d, *more, *options, algorithm=algorithm, passes="bwd", **how)


def simt_backward(name, arch, d, causal, aligned):
    return backward(name, arch, d, *["causal"] * causal, *["unaligned"] * (not aligned))


def spills_of(log):
    """Bytes of the stack, of spill stores and of spill loads."""
    return re.findall(r"(\d+) bytes (?:stack frame|spill stores|spill loads)", log)


def registers(log):
    return int(re.search(r"Used (\d+) registers", log)[1])


def fits(kernel, arch):
    """Whether a multiprocessor has the threads and a block the shared memory, uncompiled."""
    return kernel.min_blocks * kernel.threads <= 2048 and kernel.shared_bytes <= SHARED[arch]


def ptx_within_budgets(kernel, arch, spilled=(0, 0, 0)):
    """The PTX of a kernel that fits, has no float64, and spills so many bytes: its stack's, those
    stored and those loaded.
    """
    ptx, log = compiled(kernel, arch)
    assert f".target {arch}" in ptx
    assert ".f64" not in ptx, "float64 arithmetic"
    assert ".local" not in ptx, "local memory"
    assert spills_of(log) == list(map(str, spilled)), log
    assert registers(log) * kernel.threads * kernel.min_blocks <= REGISTERS
    assert fits(kernel, arch)
    return ptx


def hoppers_ptx_within_budgets(kernel):
    """The same of a kernel whose warpgroups give and take registers."""
    ptx = ptx_within_budgets(kernel, "sm_90a")
    _, log = compiled(kernel, "sm_90a")
    # Otherwise ptxas waits for each product, and says so.
    assert "warning" not in log.lower() and "serializ" not in log.lower(), log
    few, many = (
        int(re.search(rf"setmaxnreg.{verb}.sync.aligned.u32 (\d+)", ptx)[1])
        for verb in ("dec", "inc")
    )
    consumers = kernel.threads // 128 - 1
    assert 128 * (few + many * consumers) <= registers(log) * kernel.threads
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
    ptx = ptx_within_budgets(simt(*case), arch)

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
def test_the_kernels_that_copy_rows_compile_within_their_budgets(case):
    halves, aligned = case
    dtype = "float16" if halves else "float32"
    for kernel in (make_append(64, 64, dtype, 48, aligned, True), make_gather(64, dtype, aligned)):
        ptx = ptx_within_budgets(kernel, "sm_90a")
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
    x_dtype, y_dtype, aligned = case
    lengths = Features(q_lens=True)
    for kernel in (
        merge_parts.make_merge(128, x_dtype, y_dtype, x_dtype, aligned),
        merge_parts.make_merge(128, x_dtype, y_dtype, x_dtype, aligned, lengths),
        merge_parts.make_add(128, *case),
        merge_parts.make_merge_backward(128, y_dtype, True, aligned),
    ):
        ptx = ptx_within_budgets(kernel, "sm_90a")
        assert ("ld.global.v4" in ptx) == ("st.global.v4" in ptx) == aligned


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
    (64, 128, 96, ("bias", "window", "softcap", "packed")),
    (128, 128, 64, ("bias", "alibi", "window", "softcap", "q_lens", "kv_lens")),
    (192, 128, 64, ("causal", "bias")),
    (256, 128, 48, ("bias",)),
    # Of shapes beyond the papers': three consumers of wider heads, few keys
    (96, 192, 96, ()),
    (112, 192, 96, ("kv_splits",)),
    (80, 192, 112, ()),
    (128, 192, 80, ()),
    (64, 192, 80, ("q_lens", "kv_lens")),
    (64, 192, 128, ("causal", "sinks")),
    (128, 128, 128, ("causal", "sinks")),
    (256, 128, 80, ("sinks",)),
    (64, 128, 128, ("sinks", "shared heads", "kv_lens")),
    (64, 128, 128, ("dropout",)),
    (128, 128, 128, ("causal", "dropout")),
    (64, 128, 128, ("window", "softcap", "packed", "dropout")),
    (256, 128, 80, ("dropout",)),
    (192, 128, 112, ("causal",)),
]


MEASURES = ("turns", "overlap", "persistent", "counter", "ahead", "late")


def hoppers(name, d, *options, scale=-1.0, **how):
    return kernel_of(name, "sm_90a", d, *options, unit="wgmma", scale=scale, **how)


@pytest.mark.parametrize("case", slow_but(WGMMA_CASES[:1], WGMMA_CASES))
@pytest.mark.parametrize("dtype", ["float16", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_a_kernel_of_hoppers_unit_compiles_within_its_budgets(case, dtype):
    d, Br, Bc, options = case
    how = {"tiles": Tiles(Br, Bc, stages=2), "dtype": dtype}
    how["ablate"] = tuple(name for name in options if name in MEASURES)
    shared = "shared heads" in options
    sizes = {"heads": (8, 1), "Nq": 16} if shared else {"heads": (2, 1)}
    kernel = hoppers("fa2_forward", d, *options, algorithm="fa2", **sizes, **how)
    ptx = hoppers_ptx_within_budgets(kernel)
    stored = 5 if shared else 4  # heads in the rows of a tile are an axis of theirs
    bulk_stores = f"cp.async.bulk.tensor.{stored}d.global.shared::cta.tile.bulk_group"
    assert (bulk_stores in ptx) != ("kv_splits" in options)  # of splits threads write the sums
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
    tiles = Tiles(Br, Bc, stages=stages)
    return hoppers("fa2_forward", d, option, algorithm="fa2", tiles=tiles, scale=1.0)


@pytest.mark.parametrize("case, blocks", SHARING)
def test_blocks_share_a_multiprocessor_where_instructions_have_their_registers(case, blocks):
    assert sharing(case).min_blocks == blocks


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case, _ in SHARING], ids=named)
def test_kernels_that_share_a_multiprocessor_compile_within_their_budgets(case):
    hoppers_ptx_within_budgets(sharing(case))


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
    (64, None, ("causal", "sinks")),
    (128, None, ("sinks", "q_lens")),
]


@pytest.mark.parametrize("case", slow_but(WGMMA_FA1_CASES[:1], WGMMA_FA1_CASES))
@pytest.mark.parametrize("dtype", ["float16", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_fa1_on_hoppers_unit_compiles_within_its_budgets(case, dtype):
    d, tiles, options = case
    how = {"heads": (2, 1), "algorithm": "fa1", "return_lse": True, "unit": "wgmma", "scale": -1.0}
    tiles = Tiles(*tiles) if tiles else None
    plan = plan_of("sm_90a", d, *options, tiles=tiles, dtype=dtype, **how)
    tiles, (kernel,) = plan.tiles, plan.launched
    ptx = hoppers_ptx_within_budgets(kernel)
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
    assert [int(d) for _, d, *_ in documented] == [64, 128, 192, 256, 64, 128]
    for n, (size, d, *sides) in enumerate(map(int, found) for found in documented):
        of_planes = {"dtype": "float32", "precision": "fp16x3"} if n > 3 else {}
        plan = plan_of("sm_90a", d, algorithm="fa1", unit="wgmma", **of_planes)
        assert [plan.tiles.Br, plan.tiles.Bc] == sides
        assert plan.launched[-1].shared_bytes == size
    most = max(Bc for Bc in range(16, 256, 16) if _fits_two_consumers(Bc))
    assert f"At d=256 two consumers leave room for {most} columns" in wgmma.fa1_forward.__doc__


def _fits_two_consumers(Bc):
    try:
        kernel = hoppers("fa1_forward", 256, algorithm="fa1", tiles=Tiles(128, Bc))
    except ValueError:
        return False
    return kernel.threads == 3 * 128


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
    (64, ("causal", "dropout")),
    (128, ("dropout",)),
    (64, ("window", "packed", "dropout"), True),
    (128, ("causal", "q_lens", "kv_lens", "dropout"), True, True),
    (48, ("bias", "dropout")),
    (64, ("sparse",)),
    (128, ("sparse", "causal")),
    (128, ("adds",)),
    (128, ("causal", "turns")),
]


@pytest.mark.parametrize("case", slow_but(WGMMA_BACKWARD_CASES[:1], WGMMA_BACKWARD_CASES))
@pytest.mark.parametrize("dtype", ["float16", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_a_backward_kernel_of_hoppers_unit_compiles_within_its_budgets(case, dtype):
    d, options, *shares = case
    how = {"heads": (20, 10), "group_splits": 1}
    if shares:  # heads of a group, or one's rows
        how = {"heads": (40, 10), "group_splits": 8 if len(shares) > 1 else 2}
    kernel = hoppers_backward("fa2", d, *options, dtype=dtype, **how)
    ptx = hoppers_ptx_within_budgets(kernel)
    kind = "f16" if dtype == "float16" else "bf16"
    tiles = plan_of("sm_90a", d, algorithm="fa2", passes="bwd", unit="wgmma").tiles
    products = 3 * ceil_div(d, 16) + 2 * tiles.Br // 16 + tiles.Bc // 16
    # ST and dPT, and again the next ST; dV and dK; dQ.
    assert ptx.count(f".f32.{kind}.{kind}") == products
    assert "cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.tile.bulk_group" in ptx
    # Seven tensor maps lie among the parameters themselves, without parts of dK and dV five.
    assert ptx.count(".param .align 64 .b8") == (5 if shares else 7)


HIDING_CASES = [
    ("fwd", 64, Tiles(192, 128)),
    ("fwd", 128, Tiles(128, 128)),
    ("bwd", 64, Tiles(128, 128)),
    ("bwd", 128, Tiles(64, 128)),
]


@pytest.mark.parametrize("case", slow_but(HIDING_CASES[:1], HIDING_CASES))
def test_a_causal_function_with_its_blocks_spills_nothing_on_hoppers_unit(case):
    passes, d, tiles = case
    mask = fa_numba.create_block_mask(lambda b, h, i, j: i >= j, 1, 1, 600, 600, tiles=tiles)
    plan = plan_of("sm_90a", d, Nq=600, Nk=600, heads=(9, 9), unit="wgmma", passes=passes,
                   block_mask=mask)  # fmt: skip
    (kernel,) = (x for x in plan.launched if x.name in ("fa2_forward", "fa2_backward"))
    hoppers_ptx_within_budgets(kernel)


def hoppers_backward(name, d, *options, scale=-1.0, Nq=512, **how):
    """Of a few heads too many for all of one's column tiles at a time."""
    how |= {"unit": "wgmma", "scale": scale, "Nq": Nq, "Nk": Nq}
    return backward(name, "sm_90a", d, *options, **how)


WGMMA_DETERMINISTIC_CASES = [
    *(
        (d, options)
        for d in (64, 128, 160, 192, 256)
        for options in ((), ("causal",), ("window", "softcap"), ("causal", "alibi"))
    ),
    (128, ("causal", "packed")),
    (256, ("window", "q_lens", "kv_lens")),
    (64, ("causal", "dropout")),
    (256, ("causal", "packed", "dropout")),
]


@pytest.mark.parametrize(
    "case", slow_but(WGMMA_DETERMINISTIC_CASES[1:2], WGMMA_DETERMINISTIC_CASES)
)
@pytest.mark.parametrize("dtype", ["float16", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_hoppers_backward_kernel_without_dq_compiles_within_its_budgets(case, dtype):
    d, options = case
    how = {"heads": (10, 10), "scale": 1.0, "dtype": dtype}
    ptx = hoppers_ptx_within_budgets(hoppers_backward("fa2 without dQ", d, *options, **how))
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
    (64, ("causal", "dropout")),
    (256, ("window", "dropout")),
]


@pytest.mark.parametrize("case", slow_but([(256, ("causal",))], WGMMA_SWEEP_CASES))
@pytest.mark.parametrize("dtype", ["float16", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_a_second_sweep_of_hoppers_unit_compiles_within_its_budgets(case, dtype):
    d, options = case
    how = {"heads": (10, 10), "scale": 1.0, "dtype": dtype}
    ptx = hoppers_ptx_within_budgets(hoppers_backward("fa2 dQ", d, *options, **how))
    kind = "f16" if dtype == "float16" else "bf16"
    Bc = int(re.search(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16", ptx)[1])
    # S, and again the next S, and dP; dQ.
    assert ptx.count(f".f32.{kind}.{kind}") == 3 * ceil_div(d, 16) + Bc // 16
    # Five tensor maps lie among the parameters themselves.
    assert ptx.count(".param .align 64 .b8") == 5


# head_dim, options, whether heads share K and V, whether blocks share a head
WGMMA_FA1_BACKWARD_CASES = [
    (128, ("causal",), False, False),
    (64, ("causal",), False, False),
    (64, (), False, False),
    (64, ("causal",), True, True),
    (128, (), True, False),
    (80, (), False, True),
    (40, ("causal",), False, False),
    (64, ("dlse",), True, False),
    (128, ("dlse",), False, False),
]


@pytest.mark.parametrize("case", slow_but(WGMMA_FA1_BACKWARD_CASES[1:2], WGMMA_FA1_BACKWARD_CASES))
@pytest.mark.parametrize("dtype", ["float16", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_fa1s_backward_kernel_of_hoppers_unit_compiles_within_its_budgets(case, dtype):
    d, options, grouped, splits_queries = case
    name = "fa1 splits" if splits_queries else "fa1"
    how = {"heads": (2, 1) if grouped else (1, 1), "scale": 1.0, "dtype": dtype, "Nq": N}
    ptx = hoppers_ptx_within_budgets(hoppers_backward(name, d, *options, **how))
    # Seven tensor maps lie among the parameters themselves, or five.
    assert ptx.count(".param .align 64 .b8") == (5 if splits_queries else 7)


def test_the_docstrings_shared_memory_is_that_of_hoppers_backward_kernel():
    for module, name, dims in (
        (wgmma.fa2_backward, "fa2", [64, 128]),
        (wgmma.fa2_backward_wide, "fa2 without dQ", [192, 256]),
        (wgmma.fa1_backward, "fa1", [64, 128]),
    ):
        documented = re.findall(r"(\d+) \(d=(\d+), (\d+) x (\d+)\)", module.__doc__)
        assert [int(d) for _, d, *_ in documented] == dims
        for size, d, *sides in (map(int, found) for found in documented):
            how = {"algorithm": name[:3], "passes": "bwd", "unit": "wgmma"}
            plan = plan_of("sm_90a", d, *BACKWARD[name][2:], **how)
            assert [plan.tiles.Br, plan.tiles.Bc] == sides
            assert size in [x.shared_bytes for x in plan.launched]


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
    ("dS", "sm_90a", 64, False, True),
    ("row sums", "sm_80", 128, False, True),
]


QUICK_BACKWARD = {
    ("fa1", "sm_90a", 128, True, True),
    ("fa2", "sm_90a", 64, True, True),
    ("fa2 dQ", "sm_90a", 128, True, True),
    ("transposed", "sm_80", 64, True, False),
    ("dS", "sm_90a", 64, False, True),
    ("row sums", "sm_80", 128, False, True),
}


@pytest.mark.parametrize("case", slow_but(QUICK_BACKWARD, BACKWARD_CASES))
def test_a_backward_kernel_compiles_within_its_budgets(case):
    name, arch, d, causal, aligned = case
    ptx = ptx_within_budgets(simt_backward(*case), arch)

    if name not in ("dS", "row sums"):
        assert "ld.shared.v4.f32" in ptx, "16-byte reads of shared memory"
        width = "cg.shared.global" if aligned else "ca.shared.global"
        assert f"cp.async.{width}" in ptx, "asynchronous copies"
        if aligned:  # of dQ, where dK and dV are added
            assert "st.global.v4.f32" in ptx, "16-byte writes of a gradient"
    assert ("ex2.approx.ftz.f32" in ptx) == name.startswith("fa")
    assert ("red.global.add.f32" in ptx) == (name in ("fa2", "fa1 splits"))


OPTIONS = ("window", "softcap", "bias", "alibi", "sinks", "q_lens", "packed", "sparse", "dropout")


@pytest.mark.slow
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("algorithm, d", [("fa1", 128), ("fa2", 64)])
def test_a_kernel_with_an_option_compiles_within_its_budgets(algorithm, d, option):
    for kernel in (
        kernel_of(f"{algorithm}_forward", "sm_90a", d, option, algorithm=algorithm, heads=(2, 1)),
        backward(algorithm, "sm_90a", d, option, heads=(2, 1)),
    ):
        ptx_within_budgets(kernel, "sm_90a")


@pytest.mark.parametrize(
    "kernel_of, case",
    [
        (of, case)
        for of, quick in ((simt, QUICK), (simt_backward, QUICK_BACKWARD))
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


# --- tensor cores ----------------------------------------------------------------------------

MMA = {"fa1": mma.fa1_forward, "fa2": mma.fa2_forward}


def mma_kernel(name, arch, d, dtype="float16", option=None, **how):
    """Of the default tiles for long sequences; ``option`` as `plan_of` has them.

    "fa1 keys" is FA-1 with the keys split over the warps, "fa2 stages" FA-2 with two stages.
    """
    algorithm, _, more = name.partition(" ")
    how |= {"tiles": Tiles(128, 64, 128, stages=2)} if more == "stages" else {}
    how |= {"algorithm": algorithm, "return_lse": algorithm == "fa1", "dtype": dtype, "unit": "mma"}
    return kernel_of(f"{algorithm}_forward", arch, d, more, option, **how)


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
        for option in ("window", "softcap", "bias", "alibi", "sinks", "packed", "dropout")
    ),
    *(
        (name, "sm_90a", 128, "float16", option)
        for name in MMA
        for option in ("window", "bias", "packed", "dropout")
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


# FlashAttention-2's, its draws in a loop, spills 12 bytes and is a third slower.
MMA_SPILLED = {
    ("fa1", "sm_90a", 128, "float16", "dropout"): (32, 32, 32),
    ("fa2", "sm_90a", 128, "float16", "dropout"): (24, 56, 40),
}
# FlashAttention-2's where registers are fullest: its tiles are others before sm_90.
QUICK_MMA = {
    ("fa1", "sm_90a", 64, "float16", None),
    ("fa2", "sm_80", 128, "float16", "causal"),
}


@pytest.mark.parametrize("case", slow_but(QUICK_MMA, MMA_CASES))
def test_an_mma_kernel_compiles_within_its_budgets(case):
    name, arch, _, dtype, option = case
    ptx = ptx_within_budgets(mma_kernel(*case), arch, MMA_SPILLED.get(case, (0, 0, 0)))

    kind = {"float16": "f16", "bfloat16": "bf16"}[dtype]
    instruction = f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32"
    assert 0 < ptx.count(instruction) == ptx.count("mma.sync")
    assert "ldmatrix.sync.aligned.m8n8.x4.shared.b16" in ptx
    assert "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16" in ptx
    assert f"cvt.rn.{kind}x2.f32" in ptx
    assert ("cp.async.cg.shared.global" in ptx) == (option != "unaligned")
    assert "cp.async.ca" not in ptx
    assert "ex2.approx.ftz.f32" in ptx and "shfl.sync.bfly" in ptx


PLANE_CASES = [
    *(("fp16x3", arch, d) for arch in ("sm_80", "sm_89", "sm_90a") for d in (64, 128, 256)),
    *((precision, "sm_90a", d) for precision in ("bf16x6", "bf16x3") for d in (64, 128)),
]


PLANES_SPILLED = {
    ("fp16x3", "sm_90a", 128): (24, 24, 24),
    ("fp16x3", "sm_80", 128): (40, 112, 76),
    ("fp16x3", "sm_80", 256): (8, 24, 16),
    ("fp16x3", "sm_89", 256): (8, 24, 16),
    ("bf16x6", "sm_90a", 128): (24, 64, 44),
    ("bf16x3", "sm_90a", 128): (8, 8, 8),
}


@pytest.mark.parametrize("case", slow_but({("fp16x3", "sm_90a", 64)}, PLANE_CASES))
def test_kernels_of_planes_compile_within_their_budgets(case):
    precision, arch, d = case
    planes = PRECISIONS[precision].planes
    plan = plan_of(arch, d, unit="mma", dtype="float32", precision=precision)
    for kernel in {x.name: x for x in plan.launched}.values():
        main = kernel.name == "fa2_forward"
        ptx = ptx_within_budgets(
            kernel, arch, PLANES_SPILLED.get(case, (0, 0, 0)) if main else (0, 0, 0)
        )
    products = sum(range(1, planes + 1))
    # Of S and of P V: 16 x 8 x 16 each, of 16 rows.
    each = plan.tiles.Bc * d // (8 * 16)
    assert ptx.count("mma.sync") == 2 * products * each


HOPPERS_BACKWARD_PLANES = [(p, d) for p in ("fp16x3", "bf16x3") for d in (64, 128)]
HOPPERS_PLANES = [(p, d) for p in ("fp16x3", "bf16x6", "bf16x3") for d in (64, 128)]


@pytest.mark.parametrize("case", slow_but((), HOPPERS_PLANES))
def test_hoppers_kernels_of_planes_compile_within_their_budgets(case):
    precision, d = case
    plan = plan_of("sm_90a", d, unit="wgmma", dtype="float32", precision=precision)
    (main,) = (x for x in plan.launched if x.name == "fa2_forward")
    ptx = hoppers_ptx_within_budgets(main)
    # Of S before the loop and in it twice; a product a pair of planes, in steps of 16.
    pairs = sum(range(1, PRECISIONS[precision].planes + 1))
    assert ptx.count("wgmma.mma_async") % pairs == 0
    assert ptx.count("wgmma.commit_group") % pairs == 0


HOPPERS_FA1_PLANES = [
    ("fp16x3", 64, (64, 16), ("window", "q_lens", "kv_lens")),  # quick to compile
    ("fp16x3", 64, None, ("causal",)),
    ("fp16x3", 64, None, ("window", "q_lens", "kv_lens")),
    ("fp16x3", 128, None, ("causal",)),
    ("fp16x3", 128, None, ("window", "q_lens", "kv_lens")),
    ("fp16x3", 128, None, ("packed", "causal")),
    ("fp16x3", 96, None, ()),
    ("bf16x3", 64, None, ("packed", "window")),
    ("bf16x3", 128, None, ("packed", "window")),
    ("bf16x6", 64, None, ("packed", "causal")),
    ("bf16x6", 128, None, ()),
    ("bf16x6", 128, None, ("window", "q_lens", "kv_lens")),
]


@pytest.mark.parametrize("case", slow_but(HOPPERS_FA1_PLANES[:1], HOPPERS_FA1_PLANES))
def test_hoppers_fa1_of_planes_compiles_within_its_budgets(case):
    precision, d, tiles, options = case
    how = {"algorithm": "fa1", "dtype": "float32", "precision": precision, "return_lse": True}
    how |= {"tiles": Tiles(*tiles) if tiles else None, "heads": (2, 1)}
    plan = plan_of("sm_90a", d, *options, unit="wgmma", **how)
    (main,) = (x for x in plan.launched if x.name == "fa1_forward")
    ptx = hoppers_ptx_within_budgets(main)
    # Of S over d and of P V over the columns, in steps of 16; O is read and written by threads.
    pairs = sum(range(1, PRECISIONS[precision].planes + 1))
    assert ptx.count("wgmma.mma_async") == pairs * (d + plan.tiles.Bc) // 16
    assert "bulk_group" not in ptx and ptx.count(".param .align 64 .b8") == 3


@pytest.mark.parametrize("case", slow_but({("fp16x3", 64)}, HOPPERS_BACKWARD_PLANES))
def test_hoppers_backward_of_planes_compiles_within_its_budgets(case):
    precision, d = case
    how = {"unit": "wgmma", "dtype": "float32", "precision": precision, "passes": "bwd"}
    (main,) = (x for x in plan_of("sm_90a", d, **how).launched if x.name == "fa2_backward")
    ptx = hoppers_ptx_within_budgets(main)
    # Of S and dP over d, and what of these goes before the loop, S or both; of dV, dK and dQ, one
    # or two panels, over 64.
    panels = d // 64
    assert ptx.count("wgmma.mma_async") == 3 * (2 + panels) * (d + 64) // 16


@pytest.mark.parametrize("name", MMA)
def test_the_docstrings_shared_memory_is_the_mma_kernels(name):
    module = MMA[name]
    formula = re.search(r"Shared memory, 16-bit elements: +(.*)", module.__doc__)[1]
    python = re.sub(r"(?<=[\w)]) (?=[\w(])", " * ", formula)
    for d, (Br, Bc) in itertools.product((32, 64, 128, 256), ((64, 64), (128, 32), (16, 16))):
        for stages in (1, 2) if name == "fa2" else (1,):
            halves = eval(python, {"Br": Br, "Bc": Bc, "d": d, "stages": stages})
            kernel = mma_kernel(name, "sm_90a", d, tiles=Tiles(Br, Bc, stages=stages))
            assert 2 * halves == kernel.shared_bytes
    documented = re.findall(r"(\d+)\s+\(d=(\d+), (\d+) x (\d+)\)", module.__doc__)
    assert len(documented) == 3
    for size, d, Br, Bc in (map(int, found) for found in documented):
        with fa_numba.device.using("emulator"):
            shape = (1, 1, 4096, d)
            plan = fa_numba.plan(shape, shape, algorithm=name, dtype="float16")
        assert (plan.tiles.Br, plan.tiles.Bc) == (Br, Bc)
        assert plan.kernels[0].shared_bytes == size


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
    kernel = mma_kernel("fa2", "sm_80", 128, "float16", "causal", ablate=left_out)
    ptx, _ = compiled(kernel, "sm_80")
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


def standard_mma_kernel(name, arch, d, dtype, option):
    """A kernel of standard attention by the default tiles for long sequences; as ``mma_kernel``.

    "bwd" names are of the backward pass and its tiles; "twice" is for rows beyond shared memory.
    """
    passes, Nk = ("bwd" if "bwd" in name else "fwd"), (LONG if "twice" in name else N)
    name = name.removeprefix("bwd ").removesuffix(" twice")
    how = {"algorithm": "standard", "unit": "mma", "dtype": dtype, "passes": passes, "Nk": Nk}
    how |= {"return_lse": True} if passes == "fwd" else {}
    kernel = BACKWARD[name][0] if name in BACKWARD else f"standard_{name}"
    return kernel_of(kernel, arch, d, option, **how)


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
]


# What registers do not hold: four blocks of these share a multiprocessor.
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
    ptx = ptx_within_budgets(standard_mma_kernel(*case), arch)

    by_rows = "softmax" in name or "dS" in name
    assert ("mma.sync" in ptx) == ("ldmatrix" in ptx) == (not by_rows)
    if by_rows or "scores" in name:
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


MMA_BACKWARD = {"fa1": mma.fa1_backward, "fa2": mma.fa2_backward}


def mma_backward(name, arch, d, dtype, option):
    """The kernel of the default tiles for long sequences; as ``mma_kernel``."""
    return backward(name, arch, d, option, dtype=dtype, unit="mma")


MMA_BACKWARD_CASES = [
    # name, arch, head_dim, dtype, option
    *((name, "sm_90a", d, "float16", None) for name in MMA_BACKWARD for d in (96, 128, 192, 256)),
    *((name, "sm_90a", d, "float16", "causal") for name in MMA_BACKWARD for d in (32, 64)),
    *((name, arch, 64, "float16", None) for name in MMA_BACKWARD for arch in ("sm_80", "sm_89")),
    *((name, "sm_80", 128, "float16", "causal") for name in MMA_BACKWARD),
    *(
        ("fa2", arch, d, "float16", None)
        for arch in ("sm_80", "sm_89")
        for d in (32, 80, 112, 160, 192, 256)
    ),
    *(
        (name, "sm_90a", 64, "float16", option)
        for name in MMA_BACKWARD
        for option in ("window", "softcap", "dbias", "alibi", "packed", "sparse", "dropout")
    ),
    *((name, "sm_90a", 128, "float16", "softcap") for name in MMA_BACKWARD),
    *(("fa1", "sm_90a", d, "float16", "dlse") for d in (64, 128)),
    ("fa2", "sm_90a", 128, "float16", "dropout"),
    *(("fa1", "sm_90a", d, "float16", "splits") for d in (64, 128)),
    ("fa2", "sm_90a", 64, "float16", "unaligned"),
    ("fa2 without dQ", "sm_90a", 64, "bfloat16", "causal"),
    *(("fa2 dQ", "sm_90a", d, "float16", "causal") for d in (64, 128)),
]


# With dropout the former kernel spilled 24 bytes and took twice the time.
BACKWARD_SPILLED = {
    ("fa2", "sm_90a", 128, "float16", "softcap"): (16, 16, 12),
    ("fa2", "sm_90a", 128, "float16", "dropout"): (32, 32, 32),
}
# The adds are other instructions from sm_90 on: FlashAttention-1's are tried there.
QUICK_MMA_BACKWARD = {
    ("fa1", "sm_90a", 128, "float16", "splits"),
    ("fa2", "sm_80", 128, "float16", "causal"),
    ("fa2 dQ", "sm_90a", 64, "float16", "causal"),
}


@pytest.mark.parametrize("case", slow_but(QUICK_MMA_BACKWARD, MMA_BACKWARD_CASES))
def test_an_mma_backward_kernel_compiles_within_its_budgets(case):
    name, arch, _, dtype, option = case
    ptx = ptx_within_budgets(mma_backward(*case), arch, BACKWARD_SPILLED.get(case, (0, 0, 0)))

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
        (simt, CASES),
        (simt_backward, BACKWARD_CASES),
        (mma_kernel, MMA_CASES),
        (standard_mma_kernel, STANDARD_CASES),
        (mma_backward, MMA_BACKWARD_CASES),
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
    for d, (Br, Bc) in itertools.product((19, 64, 72, 128, 256), ((32, 64), (64, 32), (32, 16))):
        U = 1 if d <= 64 else 2
        rounded = -(-d // (16 * U)) * 16 * U
        halves = eval(python, {"Br": Br, "Bc": Bc, "d": rounded, "U": U})
        how = {"algorithm": name, "passes": "bwd", "unit": "mma", "tiles": Tiles(Br, Bc)}
        if 2 * halves <= SHARED["sm_90a"]:
            assert 2 * halves == kernel_of(f"{name}_backward", "sm_90a", d, **how).shared_bytes
    documented = re.findall(r"(\d+)\s+\(d=(\d+), (\d+) x (\d+)\)", module.__doc__)
    assert [int(d) for _, d, *_ in documented] == [64, 128, 256]
    for size, d, Br, Bc in (map(int, found) for found in documented):
        with fa_numba.device.using("emulator"):
            shape = (1, 1, 4096, d)
            plan = fa_numba.plan(shape, shape, algorithm=name, dtype="float16", passes="bwd")
        assert (plan.tiles.Br, plan.tiles.Bc) == (Br, Bc)
        (planned,) = [k for k in plan.kernels if k.name == f"{name}_backward"]
        assert planned.shared_bytes == size


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
