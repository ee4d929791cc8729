"""What "auto" decides: plans as they were, their reasons, a call's choices, what was measured.

`python tests/test_choices.py` writes data/plans.csv again, and asks for the reason of each changed
plan.
"""

import ast
import csv
import heapq
import inspect
import io
import itertools
import json
import re
import sys
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import fa_numba
from experiments.beside import spills
from fa_numba import Tiles, bounds
from fa_numba import device as devices
from fa_numba.choices import facts, requests, splits, tiles, units
from fa_numba.choices.makespan import makespan
from fa_numba.choices.requests import Choices, Request, choices_of
from fa_numba.device.program_digest import digest_of
from fa_numba.dtypes import PRECISIONS
from fa_numba.host import binding, planning
from fa_numba.mods import Mod
from fa_numba.options import PLAIN
from fa_numba.problem import Problem

PLANS = Path(__file__).with_name("data") / "plans.csv"
CALL = ("gpu", "q", "k", "options")
WANTED = ("unit", "tiles", "splits", "workspace", "kernels", "details", "moved", "why", "refused")


# --- plans as they were -----------------------------------------------------------------------


def stored():
    with open(PLANS, newline="") as file:
        return list(csv.DictReader(file))


LOOKED_UP = np.zeros(1 << 16, np.float32)
# The functions that rows name.
FUNCTIONS = {
    "scaled": lambda score, b, h, i, j: 2.0 * score,
    "looked_up": lambda score, b, h, i, j: score + LOOKED_UP[j],
    "by_head": lambda score, b, h, i, j: score * LOOKED_UP[h],
}


def plan_of(row):
    gpu = row["gpu"]
    where = bounds.DEVICES[gpu].planning() if gpu else devices.using("emulator")
    options = _options(json.loads(row["options"]))
    aligned = options.pop("aligned", True)
    with where:
        if aligned:
            return fa_numba.plan(json.loads(row["q"]), json.loads(row["k"]), **options)
        # Plans are of contiguous arrays; a call may have others.
        named = [f.name for f in fields(Choices) if f.name in options]
        choices = Choices(**{"algorithm": "fa2"} | {n: options.pop(n) for n in named})
        dtype, v_shape = options.pop("dtype"), options.pop("v_shape", None)
        shapes = json.loads(row["q"]), json.loads(row["k"]), v_shape
        problem = binding.Binding.of(options, shapes=True).problem(*shapes, dtype=dtype)
        return planning.plan_of_attention(problem, choices, aligned=False)


def _options(given):
    """JSON has lists where a call has tuples, and names of functions."""
    tuples = ("window", "bias", "alibi_slopes", "sinks", "ablate")
    found = {n: tuple(x) if n in tuples else x for n, x in given.items()}
    made = {
        "tiles": lambda x: Tiles(*x),
        "block_mask": lambda x: np.ones(x, bool),
        "score_mod": FUNCTIONS.get,
    }
    return found | {n: make(given[n]) for n, make in made.items() if n in given}


def outcome(plan):
    """What a row says of a plan."""
    t = plan.tiles
    kernels = (f"{k.name} {'x'.join(map(str, k.grid))}x{k.threads}" for k in plan.kernels)
    return {
        "unit": plan.unit,
        "tiles": f"{t.Br}x{t.Bc}x{t.threads}x{t.stages}",
        "splits": str(max(plan.kv_splits, plan.group_splits)),
        "workspace": str(plan.workspace_bytes),
        "kernels": "; ".join(kernels),
        "details": digest_of(repr(details(plan))),
        "moved": digest_of(repr(moved(plan))),
        "why": digest_of(repr(dict(plan.why))),
        "refused": "",
    }


def moved(plan):
    """The accesses of a plan, unless they depend on a block mask, and its FLOPs."""
    if plan.problem.sparse and plan.block_mask is None:
        return ()
    loads, stores = (sorted(x.items()) for x in (plan.accesses.loads, plan.accesses.stores))
    return loads, stores, plan.flops


def details(plan):
    """What else decides the launches: the main kernel's specialisation, and the arguments."""
    launches = [
        (x.kernel.name, x.kernel.shared_bytes, x.kernel.min_blocks, facts_of(dict(x.arguments)))
        for x in plan.launches
    ]
    arrays = list(map(facts_of, (*plan.workspace, *plan.outputs)))
    spec = facts_of(getattr(plan.decided, "spec", None))
    return spec, launches, arrays, plan.split_rows, plan.score_unit


def facts_of(value):
    """Fields that have no default value, or another one, so that a new field changes nothing."""
    if isinstance(value, Mod):
        return value.option, value.value.text, value.slope.text
    if is_dataclass(value):
        own = ((f, getattr(value, f.name)) for f in fields(value) if f.compare)
        return type(value).__name__, [(f.name, facts_of(x)) for f, x in own if x != f.default]
    if isinstance(value, dict):
        return [(name, facts_of(x)) for name, x in sorted(value.items())]
    if isinstance(value, (tuple, list)):
        return list(map(facts_of, value))
    return value if isinstance(value, (bool, int, float, str, type(None))) else type(value).__name__


def found(row):
    """The plan of a row's call, None if it is refused; and what a row says of it."""
    try:
        plan = plan_of(row)
    except ValueError as error:
        # A line of this file has another number after an edit above it.
        refused = re.sub(r"(test_choices\.py, line) \d+", r"\1 ...", str(error))
        return None, dict.fromkeys(WANTED, "") | {"refused": refused}
    return plan, outcome(plan)


@pytest.mark.parametrize("gpu", dict.fromkeys(row["gpu"] for row in stored()))
def test_plans_are_as_they_were(gpu):
    """And why: a changed plan needs a new reason, for which the command asks."""
    changed = []
    for row in [row for row in stored() if row["gpu"] == gpu]:
        plan, now = found(row)
        before = {n: row[n] for n in WANTED}
        if now != before:
            differ = {n: (x, now[n]) for n, x in before.items() if now[n] != x}
            changed.append(f"{row['options']}: {differ}; the reason was: {row['reason']}")
        elif plan is not None:
            try:
                assert_every_decision_has_a_reason(plan, json.loads(row["options"]))
            except AssertionError as error:
                changed.append(f"{row['options']}: {error}")
    assert not changed, "\n".join(changed)


def test_the_stored_plans_are_of_every_kind():
    rows = stored()
    assert {row["gpu"] for row in rows} >= {"", "T4", "A100", "RTX 4090", "H200", "B200"}
    assert {row["unit"] for row in rows} == {*units.UNITS, ""}
    assert sum(row["splits"] != "1" for row in rows) >= 10
    kinds = {row["kernels"].split(" ")[0] for row in rows}
    assert {"fa1_forward", "fa2_forward", "standard_scores"} < kinds


# --- reasons ----------------------------------------------------------------------------------


def assert_every_decision_has_a_reason(plan, options):
    names = ["unit", "tiles"]
    if plan.algorithm == "fa2":
        names.append("kv_splits" if plan.passes == "fwd" else "group_splits")
    if (plan.unit, plan.passes) == ("wgmma", "bwd"):
        names.append("variant")
    assert list(plan.why) == names and all(plan.why.values())
    lines = str(plan.why).splitlines()
    assert [line.split()[0] for line in lines] == names
    newer = [name for name in units.UNITS if list(units.UNITS).index(name) > _number(plan.unit)]
    named = options.get("unit")
    # Whatever takes the dtype and comes before it is said to be left, and why.
    p = plan.problem
    dtype = p.dtype if p.precision == "ieee" else PRECISIONS[p.precision].dtype
    takes = [n for n in newer if dtype in units.UNITS[n].dtypes and not named]
    assert [n for n in newer if f"not {n}: " in plan.why["unit"]] == takes


def _number(unit):
    return list(units.UNITS).index(unit)


def test_what_a_caller_chose_is_said_to_be():
    with bounds.DEVICES["H200"].planning():
        how = {"tiles": Tiles(128, 64), "unit": "mma", "kv_splits": 3}
        why = fa_numba.plan((1, 8, 512, 64), (1, 8, 512, 64), dtype="float16", **how).why
    assert set(why.values()) == {"chosen by the caller"}


def test_reasons_have_the_numbers_that_decided():
    def why(q, k, **options):
        with bounds.DEVICES["H200"].planning():
            return fa_numba.plan(q, k, dtype="float16", **options).why

    long = (4, 32, 4096, 64)
    wide = (1, 64, 4096, 64)
    said = "three need 11 rounds of 1.29 time units, two need 16 rounds of 1; "
    assert said in why(wide, wide)["tiles"]
    said = "no split: the GPU runs 132 blocks at a time, and 2816 row tiles fill it"
    assert why(long, long)["kv_splits"] == said
    assert "(tuned.csv)" in why(long, long, algorithm="fa1")["tiles"]
    short = (4, 32, 200, 64)
    said = "not wgmma: it is slower with dropout below 256 rows"
    assert said in why(short, short, dropout_p=0.1)["unit"]
    by_blocks = {"block_mask": np.ones((64, 32), bool), "tiles": Tiles(64, 128)}
    assert "not wgmma: a block mask with tiles of 64" in why(long, long, **by_blocks)["unit"]
    few = why((1, 8, 1, 128), (1, 1, 32768, 128), unit="mma")["kv_splits"]
    assert "the call has 1 row tiles: kv_splits=" in few and "finishes after" in few


@pytest.mark.parametrize(
    "d, passes, tiles, unit",
    [
        (64, "fwd", Tiles(128, 128), "wgmma"),
        (64, "bwd", Tiles(128, 128), "wgmma"),
        (64, "bwd", Tiles(64, 128), "mma"),
        (128, "bwd", Tiles(64, 128), "wgmma"),
        (128, "fwd", Tiles(192, 128), "mma"),
        (192, "fwd", Tiles(128, 64), "wgmma"),
        (192, "bwd", Tiles(64, 64), "mma"),
    ],
)
def test_the_tiles_of_a_block_mask_decide_its_unit(d, passes, tiles, unit):
    """Those that Hopper's kernels have go there, as without blocks; others to mma.sync."""
    shape, mask = (1, 4, 1000, d), np.ones((-(-1000 // tiles.Br), -(-1000 // tiles.Bc)), bool)
    how = {"dtype": "float16", "passes": passes, "tiles": tiles}
    with bounds.DEVICES["H200"].planning():
        assert fa_numba.plan(shape, shape, block_mask=mask, **how).unit == unit
        assert fa_numba.plan(shape, shape, **how).unit == "mma"


def test_a_plan_keeps_the_reason_for_its_unit():
    shape = (1, 2, 64, 64)
    for algorithm in ("fa1", "fa2", "standard"):
        plan = fa_numba.plan(shape, shape, algorithm=algorithm)
        assert plan.why == plan.decided.why and "float32" in plan.decided.why["unit"]


@pytest.mark.parametrize(
    ("gpu", "unit", "dtype", "passes"),
    [
        ("T4", "simt", "float32", "fwd"),
        *(("A100", "mma", "float16", passes) for passes in ("fwd", "bwd")),
        *(("H200", "wgmma", "float16", passes) for passes in ("fwd", "bwd")),
    ],
)
@pytest.mark.parametrize("algorithm", ["fa1", "fa2"])
def test_a_kernel_is_for_the_sign_of_the_scale(algorithm, gpu, unit, dtype, passes):
    """Only with a scale above 0 the largest score is the largest product."""
    shape, how = (1, 2, 64, 64), {"dtype": dtype, "unit": unit, "passes": passes}
    with bounds.DEVICES[gpu].planning():
        for scale in (-1.0, 0.0, 1e-30, 2.0):
            plan = fa_numba.plan(shape, shape, scale=scale, algorithm=algorithm, **how)
            assert plan.decided.spec.positive_scale == (scale > 0)


@pytest.mark.parametrize("algorithm", ["fa1", "fa2"])
def test_a_kernel_knows_whether_other_tiles_have_heads_of_its_group(algorithm):
    how = {"dtype": "float16", "unit": "mma", "algorithm": algorithm}
    with bounds.DEVICES["A100"].planning():
        specs = [
            (heads, fa_numba.plan((1, heads, rows, 64), (1, 1, 64, 64), **how).decided.spec)
            for heads in (1, 2, 4, 8)
            for rows in (1, 64)
        ]
    assert [spec.grouped for _, spec in specs] == [heads > x.tile_heads for heads, x in specs]
    assert {x.tile_heads for _, x in specs} == ({1, 2, 4, 8} if algorithm == "fa2" else {1})


@pytest.mark.parametrize("passes", ["fwd", "bwd"])
def test_a_block_mask_chooses_tiles_unless_the_caller_does(passes):
    """A backward pass whose kernels do not support the mask's tiles chooses tiles of its own."""
    problem = Problem(1, 1, 1, 128, 128, 32)

    def tiles_of(mask_tiles, tiles=None):
        mask = fa_numba.create_block_mask(
            lambda b, h, i, j: j <= i, 1, 1, 128, 128, tiles=mask_tiles
        )
        choices = Choices("fa2", passes, unit="simt", tiles=tiles)
        return planning.plan_of_attention(problem, choices, block_mask=mask).tiles

    with devices.using("emulator"):
        own = planning.plan_of_attention(problem, Choices("fa2", passes, unit="simt")).tiles
        assert (own.Br, own.Bc) != (16, 32)
        assert (tiles_of(Tiles(16, 32)).Br, tiles_of(Tiles(16, 32)).Bc) == (16, 32)
        assert tiles_of(Tiles(16, 32), Tiles(32, 32)) == tiles_of(None, Tiles(32, 32))
        assert tiles_of(None) == own


@pytest.mark.parametrize("stays", [False, True])
def test_a_row_of_spills_is_for_its_head_dimensions(stays):
    """With kept scores another kernel adds slopes and a bias."""
    rows = facts.spills("wgmma", "fa2", "bwd")
    assert rows and all(row.bytes and row.first <= row.last for row in rows)
    names = {name for row in rows for name in (row.option, row.beside)}
    nothing = SimpleNamespace(**dict.fromkeys(names, False), scores_stay=stays)
    for row in rows:
        features = SimpleNamespace(**vars(nothing) | {row.option: True})
        elsewhere = stays and row.option in tiles.ADDED and row.beside not in tiles.BEHIND
        for d in {row.first - 1, row.first, row.last, row.last + 1}:
            within = any(
                (x.option, x.beside) == (row.option, row.beside) and x.first <= d <= x.last
                for x in rows
            )
            found = (row.option, row.beside) in tiles._spilling(d, features)
            assert found == (within and not elsewhere), (row, d)
        assert not tiles._spilling(row.last, nothing)


def test_kernels_may_spill_within_a_context():
    assert not facts.are_spills_allowed()
    with facts.spills_allowed():
        assert facts.are_spills_allowed()
    assert not facts.are_spills_allowed()


@pytest.mark.parametrize("unit", ["simt", "mma", "wgmma"])
def test_tiles_of_calls_of_any_length_are_none_of_short_calls(unit):
    for algorithm, of in itertools.product(("fa1", "fa2", "standard"), ("fwd", "bwd", "dQ")):
        rows = facts.sizes(unit, algorithm, of)
        cases = {row.case for row in rows if not row.most}
        for row in rows:
            if "" in cases or row.case in cases:
                found = facts.size(unit, algorithm, of, row.head_dim, row.case)
                assert not found.most and found.head_dim >= row.head_dim


@pytest.mark.parametrize("unit", units.UNITS)
@pytest.mark.parametrize("algorithm", ["fa1", "fa2", "standard"])
def test_some_optimisations_are_left_out_together_with_others_alone(algorithm, unit):
    needs = {"padding": "swizzle", "persistent": "counter", "specialisation": "persistent"}
    known = [x for x, owners in units.UNITS[unit].measures.items() if algorithm in owners]
    for name in known:
        choices = Choices(algorithm, unit=unit, ablate=(name,))
        if name in needs:
            says = f"ablate must contain '{needs[name]}' if it contains '{name}', because "
            with pytest.raises(ValueError, match=says):
                planning._measures(choices, units.UNITS[unit])
        else:
            assert planning._measures(choices, units.UNITS[unit]) == (name,)
    whole = Choices(algorithm, unit=unit, ablate=tuple(reversed(known)))
    assert planning._measures(whole, units.UNITS[unit]) == tuple(known)
    with pytest.raises(ValueError, match="^ablate must be .* got \\('nothing',\\)"):
        planning._measures(Choices(algorithm, ablate=("nothing",)), units.UNITS[unit])


def test_a_plan_is_made_again_for_the_device_that_its_request_names():
    shape, how = (1, 2, 1024, 64), {"dtype": "float16"}
    with bounds.DEVICES["A100"].planning():
        on_gpu = fa_numba.plan(shape, shape, **how)
    with devices.using("emulator"):
        here = fa_numba.plan(shape, shape, **how)
        for plan in (on_gpu, here):
            asked = plan.asked
            with planning.planning_for(asked):
                again = Request.here(asked.choices, asked.problem, asked.aligned)
            assert again == asked and planning.again(asked) == plan
    assert on_gpu.asked != here.asked


@pytest.mark.parametrize("multiprocessors", [0, 1, 78, 132, 144])
def test_persistent_thread_blocks_are_as_many_as_run_at_a_time(multiprocessors):
    """On the emulator, which has no multiprocessors, as many as on an H200."""
    problem = Problem(1, 32, 32, 4096, 4096, 64, dtype="float16")
    choices = Choices("fa2", unit="wgmma", tiles=Tiles(128, 128))
    limits = devices.EMULATED_SHARED_BYTES, (9, 0), multiprocessors
    plan = planning.planned(Request(choices, problem, True, *limits))
    spec, (kernel,) = plan.decided.spec, plan.kernels
    assert spec.persistent and 32 * 4096 // spec.head_rows > 144 * spec.blocks
    assert kernel.grid == ((multiprocessors or 132) * spec.blocks, 1, 1)


@pytest.mark.parametrize("unit", ["simt", "mma", "wgmma"])
def test_the_kernel_of_dq_alone_adds_to_no_other_gradient(unit):
    dtype = "float32" if unit == "simt" else "float16"
    problem = Problem(1, 2, 2, 256, 256, 64, dtype=dtype, bias=(1, 2, 256, 256))
    choices = Choices("fa2", "bwd", unit=unit, deterministic=True, return_dbias=True)
    limits = devices.EMULATED_SHARED_BYTES, (9, 0), 132
    request = Request(choices, problem, True, *limits, unit=unit)
    own = units.UNITS[unit]
    tiles_, spec, _ = own.backward(request)
    _, of_dq = own.dq_kernel(request, tiles_, spec)
    assert request.features.dbias and not of_dq.features.dbias
    assert of_dq.features.bias and of_dq.features == request.features.without_sums


# --- a call's choices -------------------------------------------------------------------------


def test_equal_choices_are_one_object():
    one = choices_of("fa2", "fwd", Tiles(64, 64), "mma", True)
    assert choices_of("fa2", "fwd", Tiles(64, 64), "mma", True) is one
    assert hash(one) == hash(Choices("fa2", tiles=Tiles(64, 64), unit="mma", return_lse=True))
    # 1 equals True, and is none.
    with pytest.raises(TypeError, match="return_lse must be True or False, got 1"):
        choices_of("fa2", "fwd", Tiles(64, 64), "mma", 1)
    assert choices_of("fa1", query_splits=np.int64(3)) == Choices("fa1", query_splits=3)
    assert choices_of("fa2", ablate=["swizzle"]).ablate == ["swizzle"]  # has no hash


def test_a_program_of_many_kinds_of_calls_makes_the_choices_of_each_once():
    made = requests._once(Choices)
    first = [made("fa2", query_splits=n) for n in range(1, 1001)]
    assert all(made("fa2", query_splits=n) is each for n, each in enumerate(first, 1))
    with pytest.raises(TypeError, match="query_splits must be an integer"):
        made("fa2", query_splits=1.0)  # which equals 1


@pytest.mark.parametrize(
    "given, message",
    [
        ({"algorithm": "fa3"}, "algorithm must be 'standard', 'fa1' or 'fa2', got 'fa3'"),
        ({"passes": "both"}, "passes must be 'fwd' or 'bwd', got 'both'"),
        (
            {"tiles": (64, 64)},
            r"tiles must be a Tiles\(Br=\.\.\., Bc=\.\.\.\) or None, got \(64, 64\)",
        ),
        ({"query_splits": 0}, "query_splits must be an integer of at least 1, got 0"),
        ({"kv_splits": 257}, "kv_splits must be an integer from 1 to 256, or 'auto', got 257"),
        ({"warp_partition": "columns"}, "warp_partition must be 'rows' or 'keys', got 'columns'"),
        ({"deterministic": 1}, "deterministic must be True or False, got 1"),
        ({"return_lse": 1}, "return_lse must be True or False, got 1"),
        ({"dlse": 1}, "dlse must be True or False, got 1"),
        ({"group_splits": 2}, "group_splits must be 'auto' with passes='fwd', got 2"),
        (
            {"passes": "bwd", "return_lse": True},
            "return_lse must be False with passes='bwd', got True",
        ),
        (
            {"passes": "bwd", "ablate": ["late"]},
            r"ablate must be \(\) with passes='bwd', got \['late'\]",
        ),
    ],
)
def test_choices_that_no_call_has(given, message):
    with pytest.raises((TypeError, ValueError), match=message):
        Choices(**{"algorithm": "fa2"} | given)


def test_tiles_are_halved_until_nothing_is_left():
    """No GPU has so little memory: the loop ends all the same."""
    assert tiles.simt_tiles("fa2", "fwd", 100, 100, 256, 1024).value == Tiles(4, 8)
    assert tiles.simt_tiles("fa2", "bwd", 100, 100, 256, 1024).value == Tiles(4, 8)


@pytest.mark.parametrize("rows, tuned", [(1024, False), (1025, True)])
def test_tuned_tiles_of_wgmma_are_for_long_sequences(monkeypatch, rows, tuned):
    """tuned.csv has no tiles of wgmma yet, but the command tune may write some."""
    assert facts.measured("rows from which the tuned tiles are the fastest") == 1024
    monkeypatch.setattr(units, "tuned_tiles", lambda *_: Tiles(64, 48))
    with bounds.DEVICES["H200"].planning():
        choices = Choices("fa2", unit="wgmma")
        problem = Problem.from_shapes(*[(1, 8, rows, 64)] * 2, dtype="float16")
        shape = units.UNITS["wgmma"].forward(Request.here(choices, problem, True))
    assert (shape.tiles.Bc == 48) == tuned == ("tuned.csv" in shape.why)


def test_a_tie_between_two_and_three_consumers_is_for_three():
    """213 sequences of 128 rows and 58 of 192: three consumers take 1.29 times as long a round."""
    lengths = [128] * 213 + [192] * 58
    starts = np.cumsum([0, *lengths])
    assert 1.29 * (213 * 128 + 58 * 192) == 213 * 128 + 58 * 2 * 192
    shape = (int(starts[-1]), 8, 64)
    with bounds.DEVICES["H200"].planning():
        how = {"dtype": "float16", "unit": "wgmma"}
        plan = fa_numba.plan(shape, shape, cu_seqlens_q=starts, cu_seqlens_k=starts, **how)
    assert plan.tiles.Br == 192 and "three consumer warpgroups finish first" in plan.why["tiles"]


@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
def test_only_the_forward_pass_of_fa1_has_the_papers_column_tiles(head_dim):
    def found(algorithm, of):
        return tiles.simt_tiles(algorithm, of, 4096, 4096, head_dim, 99 << 10)

    assert found("fa1", "bwd") == found("fa2", "bwd") and "arXiv" not in found("fa1", "bwd").why
    assert found("fa2", "fwd").why != found("fa1", "fwd").why and "arXiv" in found("fa1", "fwd").why


# --- schedules --------------------------------------------------------------------------------


def test_the_last_block_ends():
    assert makespan([(132, 3)], 132) == 3 and makespan([(133, 3)], 132) == 6
    assert makespan([(1, 5), (4, 1)], 2) == 5  # the short ones begin after the other
    assert makespan([(4, 1), (1, 5)], 2) == 7  # a long one that begins last
    rng = np.random.default_rng(0)
    for _ in range(50):
        resident = int(rng.integers(1, 9))
        blocks = [(int(n), int(t)) for n, t in rng.integers(1, 30, (rng.integers(1, 6), 2))]
        free = [0] * resident
        for count, each in blocks:
            for _ in range(count):
                heapq.heapreplace(free, free[0] + each)
        assert makespan(blocks, resident) == max(free)


@pytest.mark.parametrize(
    "N, options, wanted, case",
    [
        (1024, {}, (128, 128), "e4m3 two consumers"),
        (60, {}, (64, 128), "e4m3 two consumers"),
        (1024, {"causal": True}, (128, 128), "e4m3 two consumers"),
        (16384, {"causal": True}, (128, 224), "e4m3 causal"),
        (16384, {"window": (64, 0)}, (128, 128), "e4m3 two consumers"),
        (16384, {"causal": True, "kv_lens": [16384]}, (128, 128), "e4m3 lengths"),
        (16384, {"causal": True, "k_scale": (1, 8, 128)}, (128, 128), "e4m3 blocks"),
        (1024, {"k_scale": (1, 8, 8), "kv_lens": [1024]}, (128, 128), "e4m3 blocks lengths"),
    ],
)
def test_tiles_of_8_bits_are_those_of_the_first_case_that_applies(N, options, wanted, case):
    with devices.planning_for((9, 0), 232448):
        plan = fa_numba.plan((1, 8, N, 128), (1, 8, N, 128), dtype="float8_e4m3fn", **options)
    assert (plan.tiles.Br, plan.tiles.Bc) == wanted and f"case '{case}'" in plan.why["tiles"]


def splits_of(q, k, multiprocessors, **options):
    """The number of key splits of one batch entry and the reason, by heads, rows and columns."""
    with devices.planning_for((8, 0), 163 * 1024, multiprocessors):
        plan = fa_numba.plan((1, *q, 64), (1, *k, 64), dtype="float16", **options)
    return plan.kv_splits, plan.why["kv_splits"]


@pytest.mark.parametrize(
    "seqlen_q, seqlen_k, heads, kv_splits",
    [(1024, 4096, 8, 3), (1024, 16384, 4, 7), (256, 16384, 16, 7), (256, 65536, 16, 7)],
)
def test_key_splits_of_unequal_row_tiles_are_at_most_four_rounds(
    seqlen_q, seqlen_k, heads, kv_splits
):
    """More splits would end a little earlier, if thread blocks were this regular."""
    found, why = splits_of((heads, seqlen_q), (heads, seqlen_k), 60, causal=True)
    row_tiles = heads * seqlen_q // 128
    assert f"the GPU runs 60 blocks at a time, the call has {row_tiles} row tiles" in why
    assert found == kv_splits == 4 * 60 // row_tiles


def test_the_reason_for_key_splits_says_when_the_passes_end():
    causal = {"causal": True}
    # Row tiles of 128 rows visit 6 and 8 column tiles of 64. Three splits: 48 thread blocks visit
    # at most 3. Four splits: 64 thread blocks visit at most 2, four of them begin after a visit.
    # Parts of O are then merged for some visits more.
    ends = "kv_splits=3 finishes after 7.732 visits of a column tile, kv_splits=1 after 8 (4 values"
    found, why = splits_of((8, 256), (8, 512), 60, **causal)
    assert found == 3 and ends in why
    # Few rows: 4 visits, or 2 visits and the time of 2 visits for the sums of a split.
    ends = "kv_splits=1 finishes after 4 visits of a column tile, kv_splits=2 after 4 (2 values"
    found, why = splits_of((1, 48), (1, 256), 16, tiles=Tiles(16, 64), **causal)
    assert found == 1 and ends in why
    # Tiles of few rows, of heads with many rows: parts of O cost as much as with few rows.
    ends = "kv_splits=11 finishes after 5 visits of a column tile, kv_splits=12 after 5 (16 values"
    found, why = splits_of((1, 512), (1, 2048), 60, tiles=Tiles(16, 64))
    assert found == 11 and ends in why
    # The longest row tile visits 8 column tiles: an even share of 60 thread blocks exactly.
    longest = "no split: the longest row tile takes no longer than an even share of all"
    assert splits_of((24, 512), (24, 512), 60, tiles=Tiles(128, 64), **causal) == (1, longest)
    # As many row tiles as thread blocks.
    fills = "no split: the GPU runs 60 blocks at a time, and 60 row tiles fill it"
    assert splits_of((60, 128), (60, 512), 60, tiles=Tiles(128, 64)) == (1, fills)


@pytest.mark.parametrize("rows", [1, 100, 128])
def test_one_row_tile_of_a_head_is_split_alike_with_a_causal_mask(rows):
    """Its last row sees all columns."""
    for heads in (1, 20, 50, 59, 60):
        call = (heads, rows), (heads, 16384), 60
        one, other = (splits_of(*call, tiles=Tiles(128, 64), causal=x) for x in (False, True))
        assert one == other


# --- what was measured ------------------------------------------------------------------------


def test_every_fact_is_read_and_says_where_it_is_from():
    text = "".join(inspect.getsource(room) for room in (requests, splits, tiles, units))
    said = {x.value for x in ast.walk(ast.parse(text.replace("from __future__", "from __past__")))
            if isinstance(x, ast.Constant) and isinstance(x.value, str)}  # fmt: skip
    for row in facts._rows("measured.csv"):
        assert row["what"] in said, f"{row['what']} is read by nobody"
        assert row["source"] and facts.measured(row["what"], row["setting"]) > 0
    with pytest.raises(KeyError):
        facts.measured("what nobody measured")


def test_every_size_is_one_of_its_unit_and_says_where_it_is_from():
    rows = facts._rows("tiles.csv")
    assert {row["unit"] for row in rows} == set(units.UNITS)
    for row in rows:
        assert row["source"] and Tiles(
            int(row["Br"]), int(row["Bc"] or 64), None, int(row["stages"])
        )
    for unit, algorithm, of in {(r["unit"], r["algorithm"], r["pass"]) for r in rows}:
        for d in (1, 64, 65, 128, 192, 256):
            plain = facts.size(unit, algorithm, of, d)
            assert plain.case == "" and plain.head_dim >= d
            assert facts.size(unit, algorithm, of, d, "no such option") == plain
            said = f"tiles.csv has {plain.Br} x {plain.Bc} for head_dim <= {plain.head_dim}"
            assert str(plain) == f"{said} ({plain.source})"
    rows_alone = str(facts.Size("planes", 64, 0, 192, 0, 2, "measured"))
    assert rows_alone == "tiles.csv has 192 rows for head_dim <= 64, case 'planes' (measured)"


@pytest.mark.parametrize(
    "capability, d, threads", [((10, 0), 160, 256), ((12, 0), 152, 256), ((8, 6), 160, 128)]
)
def test_eight_warps_share_what_four_spill_on_blackwell(capability, d, threads):
    """There and at these head dimensions alone; test_cards compiles it."""
    shape, how = (2, 8, 4096, d), {"algorithm": "fa2", "passes": "bwd", "dtype": "float16"}
    with devices.planning_for(capability, 99 * 1024):
        plan = fa_numba.plan(shape, shape, **how)
        mine = fa_numba.plan(shape, shape, tiles=Tiles(32, 64), **how)
        (least,) = {fa_numba.plan(*2 * [(*shape[:3], n)], **how).tiles.threads for n in (128, 144)}
    assert plan.tiles == Tiles(32, 64, threads)
    assert ("eight warps" in plan.why["tiles"]) == (threads == 256)
    assert mine.tiles.threads == least == 128


def test_what_spills_is_left_out_and_can_be_looked_for():
    shape = (1, 4, 256, 64)
    how = {"dtype": "float16", "passes": "bwd", "unit": "wgmma", "window": (9, 9), "q_lens": [200]}
    with bounds.DEVICES["H200"].planning():
        with facts.spills_allowed():
            assert fa_numba.plan(shape, shape, **how).unit == "wgmma"
        with pytest.raises(
            ValueError, match="unit 'wgmma' does not support the option q_lens together"
        ):
            fa_numba.plan(shape, shape, **how)
        # One chunk of column tiles of slopes spills: the kernel has chunks.
        call = {"causal": True, "alibi_slopes": (16,), **dict(list(how.items())[:3])}
        grid = fa_numba.plan((1, 16, 512, 64), (1, 16, 512, 64), **call).kernels[1].grid
        assert grid[2] == 1 and grid[0] == 4 * 16


def test_a_pair_of_options_spills_at_the_head_dimensions_of_its_row():
    for row in facts.spills("wgmma", "fa2", "bwd"):
        features = replace(PLAIN, **{row.option: True})
        dims = row.first - 1, row.first, row.last, row.last + 1
        found = [(row.option, row.beside) in tiles._spilling(d, features) for d in dims]
        assert found == [False, True, True, False]


def test_the_command_compiles_what_its_rows_are_about(tmp_path, monkeypatch):
    seen, path = [], tmp_path / "spills.csv"
    path.write_text(spills.SPILLS.read_text())

    def assembled(kernel, capability):
        seen.append(kernel.name)
        return "", "0 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads"

    monkeypatch.setattr(spills.device, "assembled", assembled)
    said = []
    assert spills.write(said.append, path) and not spills.write(said.append, path)
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["bytes"] for row in rows} == {"12"} and len(said) == 2 * len(rows)
    assert "fa2_backward" in seen
    lengths = list(itertools.chain.from_iterable(map(spills.calls, rows[:1])))
    assert (48, ("window", "q_lens")) in lengths and (64, ("window", "packed")) in lengths


# --- the command ------------------------------------------------------------------------------


def rewritten(rows, ask):
    """Return the rows with today's plans; ``ask`` gives the reason of a row whose plan changed.

    A new row has its call and its reason, and nothing of ``WANTED``. A row whose plan only says
    other words (column "why") keeps its reason. An empty answer repeats the answer before. Raise
    ValueError for a reason of fewer than four words, and for a changed row with the old one.
    """
    made, last = [], ""
    for row in rows:
        (_, now), reason = found(row), row["reason"]
        new = not any(row[n] for n in WANTED)
        if not new and any(now[n] != row[n] for n in WANTED if n != "why"):
            call = " ".join(row[n] for n in CALL)
            changes = (f"  {n}: {row[n]} -> {now[n]}" for n in WANTED if row[n] != now[n])
            about = call, *changes, f"  was wanted because: {reason}", "why now? "
            last = reason = ask("\n".join(about)).strip() or last
            if reason == row["reason"]:
                raise ValueError(f"a changed plan needs a new reason, got the old one: {call}")
        if len(reason.split()) < 4:
            raise ValueError(f"a reason must have at least four words, got {reason!r}")
        made.append({n: row[n] for n in CALL} | {"reason": reason.strip()} | now)
    return made


def main():
    """Write the table again: its calls, and what their plans are now."""
    rows = rewritten(stored(), input)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    PLANS.write_text(text.getvalue())


def test_each_row_has_a_reason():
    assert all(len(row["reason"].split()) >= 4 for row in stored())


def test_the_command_asks_for_a_reason_for_each_changed_row():
    rows = stored()[:3]
    assert rewritten(rows, None) == rows
    asked = []

    def ask(question):
        asked.append(question)
        return "the GPU has become faster"

    before = [rows[0], rows[1] | {"tiles": "1x1x1x1"}, rows[2]]
    made = rewritten(before, ask)
    assert made == [rows[0], rows[1] | {"reason": "the GPU has become faster"}, rows[2]]
    (question,) = asked
    assert f"tiles: 1x1x1x1 -> {rows[1]['tiles']}" in question and rows[1]["reason"] in question
    for answer, message in ((rows[1]["reason"], "needs a new reason"), ("so", "at least four")):
        with pytest.raises(ValueError, match=message):
            rewritten(before, lambda question, answer=answer: answer)
    new = rows[2] | dict.fromkeys(WANTED, "")
    assert rewritten([new], None) == [rows[2]]
    with pytest.raises(ValueError, match="at least four words, got ''"):
        rewritten([new | {"reason": ""}], None)


if __name__ == "__main__":
    sys.exit(main())
