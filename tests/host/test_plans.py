"""Plans: what their launches name, the workspace, units, and what is printed."""

import inspect
import itertools
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from stand_in_device import no_gpu_but_its_driver

import fa_numba
from fa_numba import Tiles, bounds, io_model
from fa_numba import device as devices
from fa_numba.choices import units
from fa_numba.choices.arguments import Untouched
from fa_numba.choices.requests import Choices, Request
from fa_numba.device import Kernel, array_type
from fa_numba.dtypes import DTYPES, UNSCALED
from fa_numba.emulator import EmulatorError
from fa_numba.host import calls, execution, merging, planning, standard
from fa_numba.host.arrays import operand
from fa_numba.host.plans import Launch
from fa_numba.kernels import merge_splits, planes
from fa_numba.options import FEATURES, PLAIN, AttentionOptions, Features, argument_of
from fa_numba.problem import Problem

DTYPE_NAMES = UNSCALED
PACKED = {"cu_seqlens_q": np.array([0, 33, 50]), "cu_seqlens_k": np.array([0, 40, 61])}
OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "softcap": {"softcap": 5.0},
    "dropout": {"dropout_p": 0.2, "window": (7, 0)},
    "bias": {"bias": (1, 4, 1, 61)},
    "lengths": {"q_lens": np.array([50, 3]), "kv_lens": np.array([0, 61])},
    "packed": PACKED,
}
# Of each pass: an algorithm and what it alone takes.
WAYS = {
    "fwd": [
        *(("standard", {"return_lse": lse}) for lse in (False, True)),
        *(("fa1", {"return_lse": lse, "query_splits": n}) for lse in (False, True) for n in (1, 3)),
        *(("fa2", {"return_lse": lse, "kv_splits": n}) for lse in (False, True) for n in (1, 3)),
    ],
    "bwd": [
        ("standard", {}),
        ("fa1", {}),
        ("fa1", {"query_splits": 3}),
        ("fa2", {}),
        ("fa2", {"deterministic": True}),
    ],
}


def every_plan():
    """(plan, what its pass takes) for all passes, algorithms, dtypes and groups of options."""
    settings = itertools.product(DTYPE_NAMES, OPTIONS.values(), ("fwd", "bwd"))
    for dtype, options, passes in settings:
        shapes = ((50, 4, 9), (61, 2, 9)) if options is PACKED else ((2, 4, 50, 9), (2, 2, 61, 9))
        for algorithm, own in WAYS[passes]:
            own = dict(own)
            if "bias" in options and passes == "bwd" and not own.get("deterministic"):
                own["return_dbias"] = True
            facts = {"algorithm": algorithm, "dtype": dtype, "passes": passes, **own, **options}
            with devices.using("emulator"):
                yield fa_numba.plan(*shapes, **facts), own


PLANS = list(every_plan())


def test_the_workspace_is_the_models():
    """The closed form and the sum of the plan's buffers, each written on its own."""
    for plan, own in PLANS:
        own = {n: x for n, x in own.items() if n != "return_dbias"}
        want = io_model.workspace(plan.algorithm, plan.problem, passes=plan.passes, **own)
        assert plan.workspace_bytes == sum(x.nbytes for x in plan.workspace) == want


def test_a_launch_binds_parameters_that_there_are():
    plan = fa_numba.plan((1, 1, 8, 4), (1, 1, 8, 4))
    (kernel,) = plan.launched
    assert dict(Launch.of(kernel, (1, 1, 1), K="V").arguments)["K"] == "V"
    with pytest.raises(TypeError, match="^kernel fa2_forward has no parameter S; .* Q, K"):
        Launch.of(kernel, (1, 1, 1), S="P")
    with pytest.raises(ValueError, match=r"^grid must consist of three numbers, got \(1, 1\)"):
        Launch.of(kernel, (1, 1))


def test_outputs_that_blocks_add_to_are_zeros_before():
    """Other outputs are not filled, which would take time."""
    for dtype, query_splits, added in (
        *(("float32", 1, []), ("float32", 3, ["dK", "dV"])),
        *(("float16", 1, []), ("float16", 3, [])),  # which are rounded from sums of float32
    ):
        how = {"algorithm": "fa1", "passes": "bwd", "dtype": dtype, "query_splits": query_splits}
        plan = fa_numba.plan((1, 2, 50, 8), (1, 2, 61, 8), **how)
        assert [x.name for x in plan.outputs if x.zeroed] == added
    how = {"passes": "bwd", "bias": (1, 1, 50, 61), "return_dbias": True}
    plan = fa_numba.plan((1, 2, 50, 8), (1, 2, 61, 8), **how)
    assert [(x.name, x.shape) for x in plan.outputs if x.zeroed] == [("dbias", (1, 1, 50, 61))]


def test_merges_have_workspace_from_the_third_part_on():
    facts = (2, 3, 5, 8), ((2, 3, 5, 8), (2, 3, 5)), "float16"
    for parts, names in ((2, []), (3, ["A", "M1"]), (4, ["A", "M1", "M0"]), (5, ["A", "M1", "M0"])):
        plan = merging.plan_of_merge(*facts, parts, True)
        assert [x.name for x in plan.workspace] == names
        used = {x for launch in plan.launches for x in launch.arguments.values()}
        assert used >= {*names}


# --- arrays ------------------------------------------------------------------------------------


def run(function, *arguments):
    """One thread of a kernel with these arguments, on the emulator."""
    types = (*(array_type(x.ndim) for x in arguments), fa_numba.options.PLAIN.argument_type)
    kernel = Kernel(function, types, 32, 0)
    with devices.using("emulator"):
        devices.launch(kernel, (1, 1, 1), (*arguments, types[-1].instance_class()))


def copied(A, B, options):
    if devices.cuda.threadIdx.x == 0:
        B[0, 0] = A[0, 0]


def test_what_is_untouched_is_nan_and_cannot_be_written():
    untouched = execution._untouched(Untouched((2, 3)), np.zeros((2, 3), np.float32))
    assert untouched.shape == (2, 3) and untouched.dtype == np.float32
    copy = np.zeros((2, 3), np.float32)
    run(copied, untouched, copy)
    assert np.isnan(copy[0, 0]) and not copy.ravel()[1:].any()
    with pytest.raises((EmulatorError, ValueError)):
        run(copied, copy, untouched)


# --- units -------------------------------------------------------------------------------------


def asked(dtype="float16", capability=(9, 0), algorithm="fa2", passes="fwd", **facts):
    """A request to a GPU of 132 multiprocessors, or of other ``places``, of 1 x 2 heads, 200 rows
    of 64, or of other sizes: (B, Hq, Hk, Nq, Nk, d).
    """
    options, places = facts.pop("options", {}), facts.pop("places", 132)
    B, Hq, Hk, Nq, Nk, d = facts.pop("sizes", (1, 2, 2, 200, 200, 64))
    problem = Problem.from_shapes((B, Hq, Nq, d), (B, Hk, Nk, d), dtype=dtype, **options)
    limit = devices.EMULATED_SHARED_BYTES
    aligned, unit = facts.pop("aligned", True), facts.pop("unit", "auto")
    choices = Choices(algorithm, passes, unit=unit, **facts)
    return Request(choices, problem, aligned, limit, capability, places)


def test_auto_takes_the_last_unit_that_can(monkeypatch):
    class Newer(units.Simt):
        name, dtypes, capability = "newer", ("float16",), (9, 0)

    newer = Newer()
    monkeypatch.setattr(units, "UNITS", {**units.UNITS, "newer": newer})

    def of(*dtype, **facts):
        return units.unit_of(asked(*dtype, places=0, **facts))[0]

    assert of() is newer and of(unit="newer") is newer
    assert of(capability=(8, 9)).name == of("bfloat16").name == "mma"
    assert of("float32").name == "simt"
    with pytest.raises(
        ValueError, match=r"unit 'newer' needs .* capability 9\.0 or newer, got 8\.9"
    ):
        of(unit="newer", capability=(8, 9))
    with pytest.raises(
        ValueError, match="'simt' for float32, got 'newer', which multiplies float16"
    ):
        of("float32", unit="newer")
    with pytest.raises(ValueError, match="unit must be 'auto', 'simt', 'mma', .*got 'new'"):
        of("float32", unit="new")


def test_auto_takes_hoppers_unit_for_a_gpu_of_compute_capability_9_0_alone():
    def chosen(capability, **facts):
        return units.unit_of(asked(capability=capability, **facts))[0].name

    for facts in (
        {},
        {"passes": "bwd"},
        {"passes": "bwd", "deterministic": True},
        {"passes": "bwd", "options": {"softcap": 2.0}, "sizes": (1, 2, 2, 200, 200, 256)},
        *({"options": options} for options in ({"causal": True}, {"kv_lens": (100,)})),
        {"options": {"dropout_p": 0.1}, "sizes": (1, 2, 2, 256, 256, 64)},
        {"options": {"dropout_p": 0.1}, "passes": "bwd", "sizes": (1, 2, 2, 512, 512, 64)},
        {"passes": "bwd", "options": {"kv_lens": (100,)}},
        *({"options": {"bias": (1, 2, 200, 200)}, "passes": passes} for passes in ("fwd", "bwd")),
        {"sizes": (1, 8, 2, 1, 200, 64)},  # the heads of a group fill one
    ):
        assert chosen((9, 0), **facts) == "wgmma", facts
    assert {chosen(other) for other in ((8, 0), (8, 9), (10, 0), (12, 0))} == {"mma"}
    assert chosen((9, 0), places=0) == "mma"  # on the emulator
    for facts in (
        {"options": {"dropout_p": 0.1}},  # of few rows
        {"options": {"dropout_p": 0.1}, "passes": "bwd", "sizes": (1, 2, 2, 511, 511, 64)},
        {"options": {"bias": (1, 2, 200, 201)}, "sizes": (1, 2, 2, 200, 201, 64)},  # not in pairs
        {"options": {"bias": (1, 2, 200, 1)}},
        {"options": {"bias": (1, 2, 200, 200)}, "sizes": (1, 2, 2, 200, 200, 136)},
        # Rows that fill no tile: no group of heads, one of three, or of other lengths.
        *({"sizes": sizes} for sizes in ((1, 8, 8, 16, 500, 64), (1, 6, 2, 16, 500, 64))),
        {"sizes": (1, 8, 2, 16, 500, 64), "options": {"q_lens": (5,)}},
        {"sizes": (1, 8, 2, 16, 500, 64), "options": {"bias": (1, 8, 1, 1)}},
        {"tiles": Tiles(128, 64)},
        {"aligned": False},
        {"algorithm": "fa1"},
        {"ablate": ("prefetch",)},
        {"warp_partition": "keys"},
    ):
        assert chosen((9, 0), **facts) == "mma", facts


@pytest.mark.parametrize(
    ("facts", "lacking"),
    [
        (
            {"algorithm": "fa1", "options": {"dropout_p": 0.1}},
            "unit 'wgmma' does not support the option dropout_p; pass unit='auto'",
        ),
        (
            {"algorithm": "fa1", "options": {"bias": (1, 2, 200, 200)}},
            "unit 'wgmma' does not support the option bias; pass unit='auto' or 'mma'",
        ),
        (
            {"algorithm": "fa1", "options": {"kv_lens": (100,)}},
            "unit 'wgmma' does not support the option kv_lens; pass unit='auto' or 'mma'",
        ),
        (
            {"algorithm": "standard", "passes": "bwd"},
            "unit 'wgmma' does not support the backward pass of algorithm 'standard'",
        ),
        (
            {"algorithm": "standard"},
            "unit 'wgmma' does not support the forward pass of algorithm 'standard'",
        ),
        (
            {"algorithm": "fa1", "passes": "bwd", "options": {"softcap": 2.0}},
            "unit 'wgmma' does not support the option softcap; pass",
        ),
        (
            {"passes": "bwd", "options": {"dropout_p": 0.1, "softcap": 2.0}},
            "unit 'wgmma' does not support the option dropout_p together with softcap;",
        ),
        (
            {"aligned": False},
            "'wgmma' does not support arrays with negative strides, or with rows that do not start",
        ),
        (
            {"capability": (10, 0)},
            r"unit 'wgmma' needs a GPU of compute capability 9\.0, got 10\.0$",
        ),
        (
            {"dtype": "float32"},
            "unit must be 'auto' or 'simt' for float32, got 'wgmma', which multiplies",
        ),
    ],
)
def test_what_hoppers_unit_lacks_is_said(facts, lacking):
    with pytest.raises(ValueError, match=lacking):
        units.unit_of(asked(unit="wgmma", **facts))


def test_what_hoppers_unit_was_not_compiled_with_is_refused_by_its_arguments_name():
    taken = itertools.chain.from_iterable(
        inspect.signature(f).parameters
        for f in (fa_numba.flash_attention_2, fa_numba.flash_attention_2_backward)
    )
    names = {flag: argument_of(flag) for flag in FEATURES}
    assert names.keys() == Features.__dataclass_fields__.keys()
    assert set(names.values()) <= {*taken, *AttentionOptions.__annotations__}
    hopper, refused = units.UNITS["wgmma"], set()
    for pair, has in hopper.features.items():
        assert set(has) <= names.keys()
        for flag in names.keys() - has:
            call = SimpleNamespace(kernel=pair, features=replace(PLAIN, **{flag: True}))
            assert hopper.lacks(call) == f"the option {names[flag]}"
            refused.add(flag)
    assert {"dropout", "dbias"} <= refused


# --- kept and shown ----------------------------------------------------------------------------


def test_a_refusal_names_the_units_that_can(monkeypatch):
    mma, wgmma, simt = (units.UNITS[name] for name in ("mma", "wgmma", "simt"))
    with pytest.raises(ValueError, match=r"from 1 to 2 on unit 'mma', got 3; unit 'wgmma' takes"):
        planning.planned(asked(unit="mma", tiles=Tiles(64, 64, stages=3)))
    monkeypatch.setattr(wgmma, "staged", mma.staged)
    with pytest.raises(ValueError, match=r"from 1 to 2 on unit 'mma', got 3$"):
        planning.planned(asked(unit="mma", tiles=Tiles(64, 64, stages=3)))
    monkeypatch.setattr(simt, "splits_queries", frozenset({("fa1", "fwd")}))
    with pytest.raises(ValueError, match=r"needs algorithm 'fa1' \(unit 'mma' or 'wgmma'\)$"):
        planning.planned(asked(passes="bwd", query_splits=2))


def test_a_plan_of_other_tiles_is_another():
    plan = fa_numba.plan((1, 1, 64, 8), (1, 1, 64, 8), tiles=Tiles(16, 16))
    assert plan != fa_numba.plan((1, 1, 64, 8), (1, 1, 64, 8), tiles=Tiles(32, 16))
    assert plan == fa_numba.plan((1, 1, 64, 8), (1, 1, 64, 8), tiles=Tiles(16, 16))


def test_a_plan_compiles_its_kernels_for_a_gpu_alone():
    plan = fa_numba.plan((1, 1, 64, 8), (1, 1, 64, 8), passes="bwd")
    with mock.patch.object(Kernel, "_load", autospec=True) as load:
        with devices.using("emulator"):
            plan.compile()
        assert not load.called
        with no_gpu_but_its_driver():
            plan.compile()
    loaded = {call.args[0].name for call in load.call_args_list}
    assert load.call_count == len(plan.kernels) > 1
    assert loaded == {kernel.name for kernel in plan.kernels}


def test_a_plan_prints_as_a_table():
    shape = (2, 4, 300, 63)
    plan = fa_numba.plan(shape, shape, dtype="float16", passes="bwd", causal=True)
    lines = str(plan).splitlines()
    assert lines[0] == "fa2 backward, unit mma, float16"
    assert "q (2, 4, 300, 63), k (2, 4, 300, 63), causal=True" in lines[1]
    tiles = plan.tiles
    assert f"Br={tiles.Br}, Bc={tiles.Bc}, threads={tiles.threads}, stages=1" in lines[2]
    table = lines[3:]
    assert [line.split()[0] for line in table[:4]] == ["kernels", *(k.name for k in plan.kernels)]
    for line, kernel in zip(table[1:4], plan.kernels, strict=True):
        assert str(kernel.grid) in line
        assert line.split()[-2:] == [str(kernel.threads), f"{kernel.shared_bytes:,}"]
    assert len({len(line) for line in table[:4]}) == 1
    assert f"{plan.workspace_bytes:,} bytes: D float32 (2, 4, 300), A float32" in table[4]
    counts = dict((n, (a, b)) for n, a, b in (line.split() for line in table[5:-1]))
    loads, stores = plan.accesses.loads, plan.accesses.stores
    assert counts["Q"] == (f"{loads['Q']:,}", "0") and counts["dK"] == ("0", f"{stores['dK']:,}")
    assert table[-1].split() == ["FLOPs", f"{plan.flops:,}"]
    assert "nothing" in str(fa_numba.plan(shape, shape, return_lse=True))
    how = {"dtype": "float16", "passes": "bwd", "unit": "wgmma", "group_splits": 2}
    shared = str(fa_numba.plan((1, 4, 300, 64), (1, 2, 300, 64), **how))
    assert "group_splits  2 blocks share a column tile of a K/V head" in shared


def test_a_plan_without_its_mask_prints_no_counts():
    mask = np.ones((2, 2), bool)
    plan = fa_numba.plan((1, 1, 32, 8), (1, 1, 32, 8), block_mask=mask, tiles=Tiles(16, 16))
    assert "depend on the block mask" in str(replace(plan, block_mask=None))
    assert "sparse=True" in str(plan) and "FLOPs" in str(plan)


# --- the tiles of shapes beyond the papers' --------------------------------------------------


def on_h200(Nq, d, Nk=None, *, heads=128, batch=1, passes="fwd", **options):
    """Unit, Br and Bc of the plan on an H200."""
    with bounds.DEVICES["H200"].planning():
        shapes = (batch, heads, Nq, d), (batch, heads, Nk or Nq, d)
        planned = fa_numba.plan(*shapes, dtype="float16", passes=passes, **options)
    return planned.unit, planned.tiles.Br, planned.tiles.Bc


def test_three_consumers_where_their_tiles_end_first():
    long = {d: on_h200(4096, d) for d in (32, 64, 80, 96, 112, 128, 160, 192, 256)}
    assert {d for d, (_, Br, _) in long.items() if Br == 192} == {32, 64, 80, 96, 112}
    assert [long[d][2] for d in (80, 96, 112)] == [112, 96, 96]
    assert {unit for unit, _, _ in long.values()} == {"wgmma"}
    # 256 rows are two tiles of either, 300 two of 192 or three of 128.
    assert on_h200(256, 64)[1:] == (128, 128) and on_h200(300, 64)[1:] == (192, 128)
    # All at once by 128 of 132 multiprocessors, or by 88.
    assert on_h200(4096, 64, heads=4)[1] == 128
    # Masks, and options that take their registers or are slower with three.
    assert on_h200(4096, 64, causal=True)[1] == 192 and on_h200(1025, 64, causal=True)[1] == 192
    assert on_h200(4096, 128, causal=True)[1] == on_h200(1024, 128, causal=True)[1] == 128
    assert on_h200(4096, 80, causal=True)[1:] == (192, 112)
    assert on_h200(2048, 80, causal=True)[1:] == on_h200(4096, 96, causal=True)[1:] == (128, 128)
    # 128 of 132 at once: the last row tile is what the call takes.
    assert [on_h200(2048, 64, heads=n, causal=True)[1] for n in (8, 9)] == [128, 192]
    for option in ({"window": (4096, 0)}, {"softcap": 9.0}, {"alibi_slopes": (128,)}):
        assert on_h200(4096, 64, **option) == ("wgmma", 128, 128)
    assert on_h200(4096, 80, softcap=9.0) == ("wgmma", 128, 128)


def test_packed_sequences_take_tiles_for_most_of_their_rows():
    def rows(*lens, **options):
        ends = np.cumsum([0, *lens])
        shape, packed = (sum(lens), 32, 64), {"cu_seqlens_q": ends, "cu_seqlens_k": ends}
        with bounds.DEVICES["H200"].planning():
            return fa_numba.plan(shape, shape, dtype="float16", **packed, **options).tiles.Br

    assert rows(*[128] * 128) == rows(*[256] * 64) == rows(300, *[128] * 99) == 128
    assert rows(*[4096] * 4) == rows(8192, *[128] * 64) == rows(*[128] * 64, 8192) == 192
    assert rows(2048, *[128] * 64, causal=True) == 128
    assert rows(8192, *[128] * 64, causal=True) == 192
    assert rows(64, 64) == rows(1, 0, 64) == 64 and rows(1, 1, 70) == 128


def forward_spec(Nq, Nk, d=64, group=1, **options):
    """Of the kernel that a forward call runs on an H200; its grid."""
    with bounds.DEVICES["H200"].planning():
        shapes = (4, 32, Nq, d), (4, 32 // group, Nk, d)
        planned = fa_numba.plan(*shapes, dtype="float16", **options)
    assert planned.unit == "wgmma"
    return planned.tiles, planned.kernels[0]


@pytest.mark.parametrize(
    "sizes, options, tiles, blocks",
    [
        # One tile of columns: Q, K and V of the next row tiles are on their way.
        ((128, 128), {}, (128, 128, 4), 1),
        ((4096, 77), {}, (128, 80, 4), 1),
        ((4096, 77, 40), {}, (128, 80, 4), 1),
        ((256, 256), {}, (128, 128, 2), 1),
        # Few columns a row: three blocks a multiprocessor.
        ((128, 128), {"causal": True}, (64, 64, 3), 3),
        ((512, 512, 64, 4), {"causal": True}, (64, 64, 3), 3),
        ((513, 513), {"causal": True}, (64, 96, 2), 3),
        ((1024, 1024, 32), {"causal": True}, (64, 96, 2), 3),
        ((512, 1025), {"causal": True}, (128, 128, 2), 1),
        ((9000, 9000), {"window": (128, 0)}, (64, 64, 3), 3),
        ((9000, 9000), {"window": (128, 127)}, (64, 64, 3), 3),
        ((9000, 9000), {"window": (128, 128)}, (128, 128, 2), 1),
        # Not measured.
        ((512, 512), {"causal": True, "softcap": 9.0}, (128, 128, 2), 1),
        ((512, 512, 128), {"causal": True}, (128, 128, 2), 1),
    ],
)
def test_short_row_tiles_have_more_places(sizes, options, tiles, blocks):
    found, kernel = forward_spec(*sizes, **options)
    assert (found.Br, found.Bc, found.stages) == tiles
    assert kernel.grid == (min(132 * blocks, 128 * -(-sizes[0] // found.Br)), 1, 1)


def test_a_bias_takes_tiles_without_spills():
    def tiles(d, **options):
        return on_h200(1000, d, bias=(1, 1, 1000, 1000), **options)

    for d, columns, masked, fewer in (
        *((64, 128, 112, 96), (128, 96, 96, 64)),
        *((192, 64, 64, 48), (256, 48, 32, 32)),
    ):
        named = {"unit": "wgmma" if d > 128 else "auto"}
        assert tiles(d, **named) == ("wgmma", 128, columns)
        assert tiles(d, causal=True, **named) == ("wgmma", 128, masked)
        for more in ({"softcap": 9.0}, {"window": (99, 0)}, {"kv_lens": (500,)}):
            assert tiles(d, **more, **named) == ("wgmma", 128, fewer)
    assert tiles(64, unit="mma") == ("mma", 64, 64)
    assert tiles(128, unit="mma") == ("mma", 128, 64)


def test_rows_of_standard_attention_in_shared_memory():
    for dtype, rows in itertools.product((DTYPES["float32"], DTYPES["float16"]), (1, 2)):
        limit = 8 * 4 + 1003 * dtype.bytes * rows
        found = [standard.row_elements(n, limit, dtype, 4, rows) for n in (5, 257, 1000, 1001)]
        assert found == [256, 512, 1000, 0]
        assert [standard.row_warps(n, dtype, 4) for n in (8, 32 * dtype.chunk + 1)] == [1, 2]
    how = {"algorithm": "standard", "passes": "bwd"}
    long = fa_numba.plan((1, 1, 9, 8), (1, 1, 40000, 8), **how)
    assert max(k.shared_bytes for k in long.kernels) <= devices.shared_bytes_limit()
    shapes = (((1, 1, 9, d), (1, 1, 9, d), (1, 1, 9, 256)) for d in (8, 256))
    assert len({fa_numba.plan(*each, **how).tiles for each in shapes}) == 1


def test_kernels_beside_the_main_one_are_made_for_their_matrix(monkeypatch):
    """Planes of K and V for keys, what rounds dV for its head dimension, merges by their rows."""
    planned, made = planning.planned.__wrapped__, []
    monkeypatch.setattr(planning, "planned", planned)

    def seen(kernels, name, facts):
        make = getattr(kernels, name)
        monkeypatch.setattr(
            kernels,
            name,
            lambda *given, **how: made.append(facts(*given, **how)) or make(*given, **how),
        )

    seen(planes, "make_split_rows", lambda facts: facts.keys)
    seen(merge_splits, "make_merge", lambda facts: facts.features)
    seen(
        units.UNITS["mma"].kernels.rows,
        "make_round_rows",
        lambda d, *_, splits=1, **__: (d, splits),
    )
    q, k, v = (1, 4, 40, 64), (1, 2, 40, 64), (1, 2, 40, 32)
    for lens, keys in (({}, [False] * 3), ({"q_lens": [9]}, [False, True, True])):
        made.clear()
        fa_numba.plan(q, k, precision="fp16x3", unit="mma", **lens)
        assert made == keys
    made.clear()
    how = {"passes": "bwd", "dtype": "float16", "unit": "wgmma", "group_splits": 2}
    with bounds.DEVICES["H200"].planning():
        plan = fa_numba.plan(q, k, v, **how)
    assert [x for x in made if x[1] == 2] == [(64, 2), (32, 2)]
    shapes = {x.name: x.shape[-1] for x in plan.workspace}
    assert (shapes["parts of dK"], shapes["parts of dV"]) == (64, 32)
    packed = {"cu_seqlens_q": [0, 40], "kv_splits": 2}
    made.clear()
    fa_numba.plan(q, k, kv_splits=2)
    fa_numba.plan((40, 4, 64), (40, 2, 64), cu_seqlens_k=[0, 40], **packed)
    fa_numba.plan((40, 4, 64), (9, 2, 16, 64), block_table=(1, 3), kv_lens=[40], **packed)
    assert [(x.packed, x.page_size) for x in made] == [(False, 0), (True, 0), (True, 16)]
    assert made[0] == PLAIN


def test_rows_of_incomplete_chunks_are_not_read_by_chunks():
    """Even if each row starts at a multiple of 16 bytes."""
    for d, aligned in ((6, False), (8, True)):
        problem = Problem(1, 1, 1, 5, 5, d)
        x = operand("q", np.zeros((1, 1, 5, 8), np.float32)[..., :d])
        assert x.aligned and calls.aligned_rows(problem, [x], x) is aligned


def test_standard_attentions_kernels_are_compiled_without_what_they_do_not_read():
    """A call with another option has the kernels of a call without it, but for those named."""
    names = {"fwd": ["scores", "softmax", "output"]}
    names["bwd"] = ["scores", "softmax", "product", "gradients", "dV", "dQ", "dK"]
    for passes, of_launches in names.items():
        options = {
            "dropout_p": (0.1, ["softmax"] if passes == "fwd" else ["gradients"]),
            "sinks": ((2,), ["softmax"]),
            "dlse": (True, ["gradients"]),
            "return_dbias": (True, ["gradients"]),
            "causal": (True, ["scores"]),
            "alibi_slopes": ((2,), ["scores"]),
            "softcap": (2.0, ["scores"]),
        }
        how = {"algorithm": "standard", "passes": passes, "bias": (1, 1, 9, 9)}
        plain = fa_numba.plan((1, 2, 9, 8), (1, 2, 9, 8), **how).launched
        for option, (value, reads) in options.items():
            if option in {"fwd": ("dlse", "return_dbias"), "bwd": ("softcap",)}[passes]:
                continue
            found = fa_numba.plan((1, 2, 9, 8), (1, 2, 9, 8), **how, **{option: value}).launched
            kernels = zip(of_launches, plain, found, strict=True)
            named = [name for name, before, now in kernels if before is not now]
            assert named == reads, (passes, option)


@pytest.mark.parametrize("passes", ["fwd", "bwd"])
def test_standard_attention_says_why_it_has_its_unit_and_tiles(passes):
    plan = fa_numba.plan((1, 1, 8, 8), (1, 1, 8, 8), algorithm="standard", passes=passes)
    assert {"unit", "tiles"} <= plan.why.keys()


@pytest.mark.parametrize(
    "heads, seqlen, chunk",
    [
        (1, 512, 1),  # few heads
        (32, 512, 0),  # all columns fit in a chunk
        (32, 2048, 4),
        (32, 2049, 16),  # a long sequence
        (1, 65535 * 128, 1),  # as many chunks as a grid can have
        (1, 65535 * 128 + 1, 2),
    ],
)
def test_chunks_of_column_tiles_backward_on_hopper(heads, seqlen, chunk):
    shape, how = (1, heads, seqlen, 64), {"dtype": "float16", "passes": "bwd", "unit": "wgmma"}
    with bounds.DEVICES["H200"].planning():
        assert fa_numba.plan(shape, shape, causal=True, **how).decided.spec.chunk_tiles == chunk
        assert fa_numba.plan(shape, shape, **how).decided.spec.chunk_tiles == 0
        of_fa1 = fa_numba.plan(shape, shape, causal=True, algorithm="fa1", **how)
        assert of_fa1.decided.spec.chunk_tiles == 0


@pytest.mark.parametrize("passes", ["fwd", "bwd"])
@pytest.mark.parametrize("algorithm", ["fa1", "fa2"])
@pytest.mark.parametrize("unit", ["simt", "mma", "wgmma"])
def test_kernels_know_the_head_dimension_of_v(unit, algorithm, passes):
    how = {"dtype": "float32" if unit == "simt" else "float16", "unit": unit, "passes": passes}
    for d, d_v in ((64, 128), (128, 64), (64, 64)):
        shapes = ((2, 4, 512, d), (2, 4, 512, d), (2, 4, 512, d_v))
        with bounds.DEVICES["H200"].planning():
            spec = fa_numba.plan(*shapes, algorithm=algorithm, **how).decided.spec
        assert (spec.head_dim, spec.head_dim_v or d) == (d, d_v)


@pytest.mark.parametrize(
    "algorithm, change, field",
    [
        ("fa1", {"dtype": "bfloat16"}, "dtype"),
        ("fa2", {"dtype": "bfloat16"}, "dtype"),
        ("fa1", {"query_splits": 2}, "splits_queries"),
        ("fa1", {"scale": -1.0}, "positive_scale"),
        ("fa2", {"scale": -1.0}, "positive_scale"),
        ("fa2", {"group_splits": 2}, "splits_rows"),  # "auto" is 4
    ],
)
def test_what_a_backward_kernel_on_hopper_knows_of_a_call(algorithm, change, field):
    def spec(**changed):
        how = {"dtype": "float16", "passes": "bwd", "unit": "wgmma", "algorithm": algorithm}
        with bounds.DEVICES["H200"].planning():
            return fa_numba.plan((2, 4, 512, 64), (2, 2, 512, 64), **how | changed).decided.spec

    one, other = spec(), spec(**change)
    assert one != other == replace(one, **{field: getattr(other, field)})


def test_tuned_tiles_are_of_aligned_rows_and_one_head_dimension():
    """FA-1 has tuned tiles for head_dim 128.

    Calls with unaligned rows, or with a different head_dim of V, have the tiles of the rule, which
    differ.
    """
    shape, how = (2, 32, 2048, 128), {"algorithm": "fa1", "unit": "mma", "dtype": "float16"}
    with bounds.DEVICES["H200"].planning():
        tuned = fa_numba.plan(shape, shape, **how).tiles
        smaller = fa_numba.plan(shape, shape, (*shape[:3], 64), **how).tiles
        problem = Problem.from_shapes(shape, shape, dtype="float16")
        choices = Choices("fa1", "fwd", unit="mma")
        unaligned = planning.plan_of_attention(problem, choices, aligned=False).tiles
    assert smaller == unaligned == Tiles(128, 128, 256, 1) != tuned
