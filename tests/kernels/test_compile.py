"""The kernels compiled without a GPU: no spills, no local memory, no float64, within budgets."""

import csv
import functools
import itertools
import json
import math
import re
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from numba import cuda
from numba.core.errors import TypingError
from offline import CAPABILITY, compiled

import fa_numba
from fa_numba import Tiles
from fa_numba.device import Kernel, array_type, float32, planning_for
from fa_numba.dtypes import PRECISIONS
from fa_numba.host import planning
from fa_numba.integers import ceil_div
from fa_numba.intrinsics.barriers import arrive_named, sync_named
from fa_numba.kernels import merge_parts, mma, simt, wgmma
from fa_numba.kernels.simt.append import make_append, make_gather
from fa_numba.options import Features
from fa_numba.tiling import SimtBackwardSpec, SimtSpec, splits

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
    "stages": {"tiles": Tiles(128, 64, 128, stages=2)},
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
    Nk = LONG if "twice" in options else Nk
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
    planned, aligned = planning.plan_of_attention, "unaligned" not in options
    with (
        planning_for(CAPABILITY[arch][:2], SHARED[arch]),
        mock.patch.object(
            planning,
            "plan_of_attention",
            lambda p, choices, _, mask: planned(p, choices, aligned, mask),
        ),
    ):
        plan = fa_numba.plan(*shapes, **how)
        if "sparse" in options:
            how["tiles"] = plan.tiles
            mask = np.ones((ceil_div(Nq, plan.tiles.Br), ceil_div(Nk, plan.tiles.Bc)), bool)
            plan = fa_numba.plan(*shapes, block_mask=mask, **how)
    return plan


# name -> a kernel's own, its algorithm and options; "bwd" are of the backward pass, "twice" is for
# rows beyond shared memory
KERNELS = {
    "fa1": ("fa1_forward", "fa1"),
    "fa1 keys": ("fa1_forward", "fa1", "keys"),
    "fa2": ("fa2_forward", "fa2"),
    "fa2 stages": ("fa2_forward", "fa2", "stages"),
    "bwd fa1": ("fa1_backward", "fa1"),
    "bwd fa1 splits": ("fa1_backward", "fa1", "splits"),
    "bwd fa2": ("fa2_backward", "fa2"),
    "bwd fa2 without dQ": ("fa2_backward", "fa2", "deterministic"),
    "bwd fa2 dQ": ("fa2_backward_dq", "fa2", "deterministic"),
    "bwd row sums": ("row_sums", "fa2"),
    "bwd transposed": ("standard_transposed_output", "standard"),
    "bwd dS": ("standard_score_gradients", "standard"),
    "bwd dS twice": ("standard_score_gradients", "standard", "twice"),
    **{
        f"{passes}{name}": (f"standard_{name}", "standard")
        for passes in ("", "bwd ")
        for name in ("scores", "softmax", "output")
    },
    "softmax twice": ("standard_softmax", "standard", "twice"),
}


def plan_with(name, arch, d, *options, unit="simt", **how):
    """The plan of a call that launches the kernel of this name."""
    _, algorithm, *more = KERNELS[name]
    if name.startswith("bwd"):
        how["passes"] = "bwd"
    elif unit == "simt" or algorithm != "fa2":
        how["return_lse"] = True
    return plan_of(arch, d, *more, *options, algorithm=algorithm, unit=unit, **how)


def kernel_of(name, *call, **how):
    launched = {x.name: x for x in plan_with(name, *call, **how).launched}
    return launched[KERNELS[name][0]]


class Case:
    """A row of data/compiled.csv: a kernel, what it is compiled for, and the bytes that it spills:
    of its stack, those stored and those loaded.
    """

    def __init__(self, row):
        self.name, self.arch, self.d = row["kernel"], row["arch"], int(row["head_dim"])
        self.options = tuple(row["options"].split())
        self.how = json.loads(row["given"] or "{}")
        if row["dtype"]:
            self.how["dtype"] = row["dtype"]
        if row["tiles"]:
            Br, Bc, stages = map(int, f"{row['tiles']}x1".split("x")[:3])
            self.how["tiles"] = Tiles(Br, Bc, stages=stages)
        self.spilled = tuple(map(int, row["spilled"].split())) or (0, 0, 0)

    def plan(self, **more):
        return plan_with(self.name, self.arch, self.d, *self.options, **self.how, **more)

    def kernel(self, **more):
        return kernel_of(self.name, self.arch, self.d, *self.options, **self.how, **more)


@functools.cache
def rows():
    with open(Path(__file__).parent.parent / "data" / "compiled.csv", newline="") as file:
        return list(csv.DictReader(file))


def cases(test):
    """All rows are `slow` but those that are quick: each family's kernel, at one architecture."""
    found = []
    for row in (row for row in rows() if row["test"] == test):
        words = (x for name, x in row.items() if x and name not in ("test", "quick", "spilled"))
        marks = () if row["quick"] else pytest.mark.slow
        found.append(pytest.param(Case(row), id="-".join(words), marks=marks))
    return pytest.mark.parametrize("case", found)


def slow_but(quick, cases):
    """All are `slow` but those that are `quick`."""
    return [case if case in quick else pytest.param(case, marks=pytest.mark.slow) for case in cases]


def spills_of(log):
    """Bytes of the stack, of spill stores and of spill loads."""
    return re.findall(r"(\d+) bytes (?:stack frame|spill stores|spill loads)", log)


def registers(log):
    return int(re.search(r"Used (\d+) registers", log)[1])


def fits(kernel, arch):
    """Whether a multiprocessor has the threads and a block the shared memory, uncompiled."""
    return kernel.min_blocks * kernel.threads <= 2048 and kernel.shared_bytes <= SHARED[arch]


def ptx_within_budgets(kernel, arch="sm_90a", spilled=(0, 0, 0)):
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


def hoppers_ptx_within_budgets(kernel, spilled=(0, 0, 0)):
    """The same of a kernel whose warpgroups give and take registers."""
    ptx = ptx_within_budgets(kernel, spilled=spilled)
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


# --- CUDA cores ------------------------------------------------------------------------------


@cases("simt")
def test_a_kernel_compiles_within_its_budgets(case):
    """A kernel of a call without options has no parameter for one: its last argument is empty."""
    kernel = case.kernel()
    ptx = ptx_within_budgets(kernel, case.arch)
    if case.name in ("fa1", "fa2", "bwd fa1", "bwd fa2") and set(case.options) <= {"causal"}:
        arrays = {4: 13, 3: 11}  # words of an array by its axes
        *others, last = kernel.argument_types
        words = sum(arrays[t.ndim] if hasattr(t, "ndim") else 1 for t in others)
        assert last.fields == () and len(set(re.findall(r"_param_(\d+)", ptx))) == words

    name, aligned = case.name, "unaligned" not in case.options
    flash = "fa" in name
    if flash or name in ("scores", "output", "bwd transposed"):
        assert "ld.shared.v4.f32" in ptx, "16-byte reads of shared memory"
        width = "cg.shared.global" if aligned else "ca.shared.global"
        assert f"cp.async.{width}" in ptx, "asynchronous copies"
        if name != "scores" and aligned:  # of dQ, where dK and dV are added
            assert "st.global.v4.f32" in ptx, "16-byte writes"
    assert ("ex2.approx.ftz.f32" in ptx) == (flash or "softmax" in name)
    assert ("red.global.add.f32" in ptx) == (name in ("bwd fa2", "bwd fa1 splits"))
    if name in ("fa1", "fa2") or "softmax" in name:
        assert "shfl.sync.bfly" in ptx


OPTIONS = ("window", "softcap", "bias", "alibi", "sinks", "q_lens", "packed", "sparse", "dropout")


@pytest.mark.slow
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name, d", [("fa1", 128), ("fa2", 64), ("bwd fa1", 128), ("bwd fa2", 64)])
def test_a_kernel_with_an_option_compiles_within_its_budgets(name, d, option):
    ptx_within_budgets(kernel_of(name, "sm_90a", d, option, heads=(2, 1)))


@pytest.mark.parametrize("case", slow_but([(True, True)], [(True, True), (False, False)]))
def test_the_kernels_that_copy_rows_compile_within_their_budgets(case):
    halves, aligned = case
    dtype = "float16" if halves else "float32"
    for kernel in (make_append(64, 64, dtype, 48, aligned, True), make_gather(64, dtype, aligned)):
        assert ("st.global.v4" in ptx_within_budgets(kernel)) == aligned


MERGED = [
    ("float16", "float16", True),
    ("float32", "bfloat16", True),
    ("float16", "float32", False),
]


@pytest.mark.parametrize("case", slow_but(MERGED[:1], MERGED))
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
        ptx = ptx_within_budgets(kernel)
        assert ("ld.global.v4" in ptx) == ("st.global.v4" in ptx) == aligned


# --- pages and splits, of every unit -----------------------------------------------------------


@cases("pages")
def test_a_kernel_over_pages_compiles_within_its_budgets(case):
    """Of two sequences of 4096 columns."""
    how = dict(case.how)
    Nq, page_size = how.pop("Nq"), how.pop("page_size")
    how |= {name: x for option in case.options for name, x in ARGUMENTS.get(option, {}).items()}
    q = (2, 8, Nq, case.d)
    if "packed" in case.options:
        q, how["cu_seqlens_q"] = (2 * Nq, 8, case.d), [0, Nq, 2 * Nq]
    with planning_for((9, 0), SHARED[case.arch]):
        table = (2, 4096 // page_size)
        plan = fa_numba.plan(q, (999, 2, page_size, case.d), block_table=table, **how)
    assert Nq != 1 or plan.launched[-1].name == "merge_splits"
    for kernel in plan.launched:
        ptx = ptx_within_budgets(kernel)
        assert kernel.name != "fa2_forward" or plan.unit == "wgmma" or "shfl.sync.idx" in ptx


# Over pages, above, a kernel of splits is quick: here what makes one of them, of few and many.
@pytest.mark.parametrize(
    "merge_alone", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["merge", "all"]
)
@cases("splits")
def test_splits_of_the_columns_and_their_merge_spill_nothing(case, merge_alone):
    for kv_splits in (3, 20):
        forward, merge = case.plan(Nq=5, Nk=9000, kv_splits=kv_splits).launched
        for kernel in (merge,) if merge_alone or kv_splits == 20 else (forward, merge):
            ptx, log = compiled(kernel, case.arch)
            assert ".f64" not in ptx and ".local" not in ptx
            assert spills_of(log) == ["0"] * 3, log
            assert registers(log) * kernel.threads <= REGISTERS
        assert ("bar.sync" in ptx or "barrier.sync" in ptx) == (kv_splits == 20)


# --- mma.sync --------------------------------------------------------------------------------


@cases("mma")
def test_an_mma_kernel_compiles_within_its_budgets(case):
    ptx = ptx_within_budgets(case.kernel(unit="mma"), case.arch, case.spilled)

    kind = {"float16": "f16", "bfloat16": "bf16"}[case.how["dtype"]]
    instruction = f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32"
    assert 0 < ptx.count(instruction) == ptx.count("mma.sync")
    assert "ldmatrix.sync.aligned.m8n8.x4.shared.b16" in ptx
    assert "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16" in ptx
    assert ("cp.async.cg.shared.global" in ptx) == ("unaligned" not in case.options)
    assert "ex2.approx.ftz.f32" in ptx
    if not case.name.startswith("bwd"):
        assert f"cvt.rn.{kind}x2.f32" in ptx and "shfl.sync.bfly" in ptx
        assert "cp.async.ca" not in ptx
        return
    # Atomic adds to dQ, or to dK and dV: of two neighbours where there is such an instruction.
    adds, newer = case.name in ("bwd fa2", "bwd fa1 splits"), case.arch == "sm_90a"
    assert ("red.global.add.v2.f32" in ptx) == (adds and newer)
    single = (adds and not newer) or "dbias" in case.options
    assert ("red.global.add.f32" in ptx) == single


@cases("standard mma")
def test_a_standard_mma_kernel_compiles_within_its_budgets(case):
    ptx = ptx_within_budgets(case.kernel(unit="mma"), case.arch)

    name, by_rows = case.name, "softmax" in case.name or "dS" in case.name
    assert ("mma.sync" in ptx) == ("ldmatrix" in ptx) == (not by_rows)
    if by_rows or "scores" in name:
        assert re.search(r"st\.global\.v4\.[ub]32", ptx), "16-byte writes of S, P and dS"
    if "twice" not in name:
        full = name == "scores" and "unaligned" in case.options
        assert ("cp.async.cg.shared.global" in ptx) == (not full), "16-byte copies"
    assert "cp.async.ca" not in ptx
    assert ("ex2.approx.ftz.f32" in ptx) == ("softmax" in name or "softcap" in case.options)


@cases("mma planes")
def test_kernels_of_planes_compile_within_their_budgets(case):
    plan = case.plan(unit="mma")
    for kernel in {x.name: x for x in plan.launched}.values():
        spilled = case.spilled if kernel.name == "fa2_forward" else (0, 0, 0)
        ptx = ptx_within_budgets(kernel, case.arch, spilled)
    products = sum(range(1, PRECISIONS[case.how["precision"]].planes + 1))
    # Of S and of P V: 16 x 8 x 16 each, of 16 rows.
    each = plan.tiles.Bc * case.d // (8 * 16)
    assert ptx.count("mma.sync") == 2 * products * each


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
    kernel = kernel_of("fa2", "sm_80", 128, "causal", unit="mma", ablate=left_out)
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


@pytest.mark.parametrize("test, unit", [("simt", "simt"), ("mma", "mma"), ("standard mma", "mma")])
def test_every_kernel_has_room(test, unit):
    """Those that are not compiled by default, too."""
    found = [Case(row) for row in rows() if row["test"] == test]
    assert found and not [x for x in found if not fits(x.kernel(unit=unit), x.arch)]


# --- Hopper's unit ---------------------------------------------------------------------------

HOPPER = {"unit": "wgmma", "scale": -1.0}
# Of the backward pass, of a few heads too many for all of one's column tiles at a time.
SHORT = {"unit": "wgmma", "Nq": 512, "Nk": 512}
either_dtype = pytest.mark.parametrize(
    "dtype", ["float16", pytest.param("bfloat16", marks=pytest.mark.slow)]
)
LOADS = "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"


def kind_of(dtype):
    return {"float16": "f16", "bfloat16": "bf16"}[dtype]


def maps(ptx):
    """How many tensor maps lie among the parameters themselves."""
    return ptx.count(".param .align 64 .b8")


@cases("hopper")
@either_dtype
def test_a_kernel_of_hoppers_unit_compiles_within_its_budgets(case, dtype):
    kernel = case.kernel(dtype=dtype, **HOPPER)
    ptx = hoppers_ptx_within_budgets(kernel)
    # Heads in the rows of a tile are an axis of theirs; of splits threads write the sums.
    stored = 5 if case.how["heads"] == [8, 1] else 4
    bulk_stores = f"cp.async.bulk.tensor.{stored}d.global.shared::cta.tile.bulk_group"
    assert (bulk_stores in ptx) != ("kv_splits" in case.options)
    product = f"wgmma.mma_async.sync.aligned.m64n{case.how['tiles'].Bc}k16.f32.{kind_of(dtype)}"
    assert product in ptx and LOADS in ptx and "mbarrier.try_wait.parity" in ptx
    assert maps(ptx) == 4


SHARING = [
    # head_dim, tiles, option, blocks a multiprocessor
    (64, Tiles(64, 96, stages=2), "causal", 3),
    (64, Tiles(64, 64, stages=3), "window", 3),
    (64, Tiles(64, 112, stages=2), "causal", 2),
    (128, Tiles(64, 64), "causal", 2),
    (64, Tiles(64, 192), "causal", 2),
    (64, Tiles(64, 208), "causal", 1),
    (256, Tiles(64, 32), "causal", 1),
    (64, Tiles(128, 128, stages=4), "causal", 1),
]


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("d, tiles, option, blocks", SHARING)
def test_blocks_share_a_multiprocessor_where_instructions_have_their_registers(
    d, tiles, option, blocks, whole
):
    kernel = kernel_of("fa2", "sm_90a", d, option, tiles=tiles, unit="wgmma", scale=1.0)
    assert kernel.min_blocks == blocks
    if whole:
        hoppers_ptx_within_budgets(kernel)


OF_E4M3 = [
    # algorithm, head_dim, options
    *((algorithm, d, {}) for algorithm in ("fa1", "fa2") for d in (64, 128, 256)),
    *((algorithm, 128, {"causal": True}) for algorithm in ("fa1", "fa2")),
    ("fa1", 64, {"window": (300, 20), "softcap": 3.0}),
    ("fa1", 128, {"q_scale": (4, 16, 32), "out_dtype": "float32"}),
    ("fa2", 128, {"kv_lens": 4 * [4000], "causal": True}),
    ("fa2", 256, {"kv_lens": 4 * [4000], "window": (300, 20)}),
    ("fa2", 256, {"q_scale": (4, 16, 32), "q_lens": 4 * [4000]}),
    ("fa2", 128, {"out_dtype": "float32"}),
    ("fa2", 128, {"kv_splits": 3}),
]


@pytest.mark.slow
@pytest.mark.parametrize("algorithm, d, options", OF_E4M3)
def test_kernels_of_e4m3_compile_within_their_budgets(algorithm, d, options):
    with planning_for((9, 0), SHARED["sm_90a"], 132):
        shape = (4, 16, 4096, d)
        plan = fa_numba.plan(shape, shape, dtype="float8_e4m3fn", algorithm=algorithm, **options)
    turned, kernel, *_ = plan.launched
    assert "prmt.b32" in ptx_within_budgets(turned)
    ptx = hoppers_ptx_within_budgets(kernel)
    products = re.findall(r"wgmma.mma_async.sync.aligned.m64n(\d+)k32.f32.e4m3.e4m3", ptx)
    assert set(products) == {str(plan.tiles.Bc), str(d)}
    assert "cvt.rn.satfinite.e4m3x2.f32" in ptx


@cases("hopper fa1")
@either_dtype
def test_fa1_on_hoppers_unit_compiles_within_its_budgets(case, dtype):
    plan = case.plan(heads=(2, 1), dtype=dtype, **HOPPER)
    (kernel,) = plan.launched
    ptx = hoppers_ptx_within_budgets(kernel)
    for instruction in (
        f"wgmma.mma_async.sync.aligned.m64n{plan.tiles.Bc}k16.f32.",
        LOADS,
        "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group",
        "cp.async.bulk.wait_group.read 0",
        "cp.async.bulk.wait_group 0",
        "ld.shared.v2.f32",
        "st.shared.v2.f32",
    ):
        assert instruction in ptx, instruction
    assert maps(ptx) == 5


@cases("hopper backward")
@either_dtype
def test_a_backward_kernel_of_hoppers_unit_compiles_within_its_budgets(case, dtype):
    kernel = case.kernel(dtype=dtype, **HOPPER | SHORT)
    ptx = hoppers_ptx_within_budgets(kernel, case.spilled)
    tiles = plan_of("sm_90a", case.d, algorithm="fa2", passes="bwd", unit="wgmma").tiles
    products = 3 * ceil_div(case.d, 16) + 2 * tiles.Br // 16 + tiles.Bc // 16
    # ST and dPT, and again the next ST; dV and dK; dQ.
    assert ptx.count(f".f32.{kind_of(dtype)}.{kind_of(dtype)}") == products
    assert "cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.tile.bulk_group" in ptx
    # Without parts of dK and dV five: where heads of a group, or one's rows, are shared.
    assert maps(ptx) == (5 if case.how["group_splits"] > 1 else 7)


HIDING = [
    ("fa2", 64, Tiles(192, 128)),
    ("fa2", 128, Tiles(128, 128)),
    ("bwd fa2", 64, Tiles(128, 128)),
    ("bwd fa2", 128, Tiles(64, 128)),
]


@pytest.mark.parametrize("case", slow_but(HIDING[:1], HIDING))
def test_a_causal_function_with_its_blocks_spills_nothing_on_hoppers_unit(case):
    name, d, tiles = case
    mask = fa_numba.create_block_mask(lambda b, h, i, j: i >= j, 1, 1, 600, 600, tiles=tiles)
    how = {"Nq": 600, "Nk": 600, "heads": (9, 9), "unit": "wgmma", "block_mask": mask}
    hoppers_ptx_within_budgets(kernel_of(name, "sm_90a", d, **how))


@cases("hopper without dQ")
@either_dtype
def test_hoppers_backward_kernel_without_dq_compiles_within_its_budgets(case, dtype):
    ptx = hoppers_ptx_within_budgets(case.kernel(heads=(10, 10), scale=1.0, dtype=dtype, **SHORT))
    assert "cp.reduce.async.bulk" not in ptx
    assert maps(ptx) == 6


@cases("hopper dQ")
@either_dtype
def test_hoppers_kernel_of_dq_alone_compiles_within_its_budgets(case, dtype):
    ptx = hoppers_ptx_within_budgets(case.kernel(heads=(10, 10), scale=1.0, dtype=dtype, **SHORT))
    Bc = int(re.search(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16", ptx)[1])
    # S, and again the next S, and dP; dQ.
    products = 3 * ceil_div(case.d, 16) + Bc // 16
    assert ptx.count(f".f32.{kind_of(dtype)}.{kind_of(dtype)}") == products
    assert maps(ptx) == 5


@cases("hopper fa1 backward")
@either_dtype
def test_fa1s_backward_kernel_of_hoppers_unit_compiles_within_its_budgets(case, dtype):
    kernel = case.kernel(unit="wgmma", scale=1.0, dtype=dtype)
    ptx = hoppers_ptx_within_budgets(kernel, case.spilled)
    assert maps(ptx) == (5 if "splits" in case.name else 7)


@cases("hopper planes")
def test_hoppers_kernels_of_planes_compile_within_their_budgets(case):
    ptx = hoppers_ptx_within_budgets(case.kernel(unit="wgmma"))
    # Of S before the loop and in it twice; a product a pair of planes, in steps of 16.
    pairs = sum(range(1, PRECISIONS[case.how["precision"]].planes + 1))
    assert ptx.count("wgmma.mma_async") % pairs == 0
    assert ptx.count("wgmma.commit_group") % pairs == 0


@cases("hopper fa1 planes")
def test_hoppers_fa1_of_planes_compiles_within_its_budgets(case):
    plan = case.plan(heads=(2, 1), unit="wgmma")
    (main,) = (x for x in plan.launched if x.name == "fa1_forward")
    ptx = hoppers_ptx_within_budgets(main)
    # Of S over d and of P V over the columns, in steps of 16; O is read and written by threads.
    pairs = sum(range(1, PRECISIONS[case.how["precision"]].planes + 1))
    assert ptx.count("wgmma.mma_async") == pairs * (case.d + plan.tiles.Bc) // 16
    assert "bulk_group" not in ptx and maps(ptx) == 3


@cases("hopper backward planes")
def test_hoppers_backward_of_planes_compiles_within_its_budgets(case):
    ptx = hoppers_ptx_within_budgets(case.kernel(unit="wgmma"))
    # Of S and dP over d, and what of these goes before the loop, S or both; of dV, dK and dQ, one
    # or two panels, over 64.
    panels = case.d // 64
    assert ptx.count("wgmma.mma_async") == 3 * (2 + panels) * (case.d + 64) // 16


# --- what docstrings say of shared memory ------------------------------------------------------

PLANES = {"dtype": "float32", "precision": "fp16x3"}
DOCUMENTED = [
    # module, kernel, unit, what its sizes are of, head dimensions
    (simt.fa1_forward, "fa1", {}, [64, 128, 256]),
    (simt.fa2_forward, "fa2", {}, [64, 128, 256]),
    (mma.fa1_forward, "fa1", {"unit": "mma"}, [64, 128, 256]),
    (mma.fa2_forward, "fa2", {"unit": "mma"}, [64, 128, 256]),
    (mma.fa1_backward, "bwd fa1", {"unit": "mma"}, [64, 128, 256]),
    (mma.fa2_backward, "bwd fa2", {"unit": "mma"}, [64, 128, 256]),
    (wgmma.fa1_forward, "fa1", {"unit": "wgmma"}, [64, 128, 192, 256, 64, 128]),
    (wgmma.fa1_backward, "bwd fa1", {"unit": "wgmma"}, [64, 128]),
    (wgmma.fa2_backward, "bwd fa2", {"unit": "wgmma"}, [64, 128]),
    (wgmma.fa2_backward_wide, "bwd fa2 without dQ", {"unit": "wgmma"}, [192, 256]),
]


@pytest.mark.parametrize(
    "module, name, how, dims", DOCUMENTED, ids=lambda x: getattr(x, "__name__", None)
)
def test_the_docstrings_shared_memory_is_that_of_the_default_tiles(module, name, how, dims):
    documented = re.findall(r"(\d+)\s+\(d=(\d+),\s+(\d+) x (\d+)\)", module.__doc__)
    assert [int(d) for _, d, *_ in documented] == dims
    for n, (size, d, *sides) in enumerate(map(int, found) for found in documented):
        of_planes = PLANES if n > 3 else {}  # of Hopper's FA-1 alone
        plan = plan_with(name, "sm_90a", d, **how, **of_planes)
        assert [plan.tiles.Br, plan.tiles.Bc] == sides
        assert size in [x.shared_bytes for x in plan.launched if x.name == KERNELS[name][0]]


def test_the_docstrings_shared_memory_is_the_standard_mma_kernels():
    found = re.search(r"default tiles, 128 x 64: +(.*)", mma.standard.__doc__)[1]
    documented = re.findall(r"(\d+) and (\d+) \(d=(\d+)\)", found)
    assert len(documented) == 2
    for scores, output, d in (map(int, sizes) for sizes in documented):
        plan = plan_with("scores", "sm_90a", d, unit="mma")
        assert (plan.tiles.Br, plan.tiles.Bc) == (128, 64)
        assert [plan.kernels[n].shared_bytes for n in (0, 2)] == [scores, output]


def test_the_docstring_says_how_many_columns_two_consumers_leave_room_for():
    most = max(Bc for Bc in range(16, 256, 16) if _fits_two_consumers(Bc))
    assert f"At d=256 two consumers leave room for {most} columns" in wgmma.fa1_forward.__doc__


def _fits_two_consumers(Bc):
    try:
        kernel = kernel_of("fa1", "sm_90a", 256, tiles=Tiles(128, Bc), **HOPPER)
    except ValueError:
        return False
    return kernel.threads == 3 * 128


def formula(module, unit):
    """What a docstring gives as a product of names, as Python has it."""
    found = re.search(rf"Shared memory, {unit}: +([^\n]*)", module.__doc__)[1]
    found = found.partition(", swizzled")[0]
    return re.sub(r"(?<=[\w)]) (?=[\w(])", " * ", found)


@pytest.mark.parametrize(
    "module, spec_of, sides",
    [
        *((x, SimtSpec, (128, 64)) for x in (simt.fa1_forward, simt.fa2_forward)),
        *((x, SimtBackwardSpec, (32, 64)) for x in (simt.fa1_backward, simt.fa2_backward)),
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_the_formula_of_a_docstring_is_the_kernels(module, spec_of, sides):
    make, checked = getattr(module, "make_forward", getattr(module, "make_backward", None)), 0
    for d, (Br, Bc) in itertools.product((32, 64, 128, 256), ((64, 64), sides, (64, 32))):
        for spec in splits(Br, Bc, d, spec_of):
            if spec.columns == d:  # rows have no columns beyond the head
                floats = eval(formula(module, "floats"), {"Br": Br, "Bc": Bc, "d": d})
                assert 4 * floats == spec.shared_bytes == make(spec).shared_bytes
                checked += 1
    assert checked >= 10


@pytest.mark.parametrize("name", ["fa1", "fa2"])
def test_the_formula_of_a_docstring_is_the_mma_kernels(name):
    text = formula(getattr(mma, f"{name}_forward"), "16-bit elements")
    for d, (Br, Bc) in itertools.product((32, 64, 128, 256), ((64, 64), (128, 32), (16, 16))):
        for stages in (1, 2) if name == "fa2" else (1,):
            halves = eval(text, {"Br": Br, "Bc": Bc, "d": d, "stages": stages})
            how = {"unit": "mma", "tiles": Tiles(Br, Bc, stages=stages)}
            assert 2 * halves == kernel_of(name, "sm_90a", d, **how).shared_bytes
    text = formula(getattr(mma, f"{name}_backward"), "16-bit elements")
    for d, (Br, Bc) in itertools.product((19, 64, 72, 128, 256), ((32, 64), (64, 32), (32, 16))):
        U = 1 if d <= 64 else 2
        rounded = ceil_div(d, 16 * U) * 16 * U
        halves = eval(text, {"Br": Br, "Bc": Bc, "d": rounded, "U": U})
        if 2 * halves <= SHARED["sm_90a"]:
            how = {"unit": "mma", "tiles": Tiles(Br, Bc)}
            assert 2 * halves == kernel_of(f"bwd {name}", "sm_90a", d, **how).shared_bytes


# --- the check, and named barriers -------------------------------------------------------------


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


@pytest.mark.parametrize("meet", [sync_named, arrive_named])
@pytest.mark.parametrize(
    "barrier, threads, message",
    [
        (0, 64, "barrier must be an integer from 1 to 15, got 0"),
        (16, 64, "barrier must be an integer from 1 to 15, got 16"),
        (1, 0, "threads must be a multiple of 32 from 32 to 1024, got 0"),
        (1, 40, "threads must be a multiple of 32 from 32 to 1024, got 40"),
        (1, 1056, "threads must be a multiple of 32 from 32 to 1024, got 1056"),
        (1, 64.0, "float64"),
    ],
)
def test_a_named_barrier_that_cannot_be_does_not_compile(meet, barrier, threads, message):
    def kernel(X):
        meet(barrier, threads)

    with pytest.raises(TypingError, match=message):
        compiled(Kernel(kernel, (array_type(1),), 128, 0), "sm_80")
