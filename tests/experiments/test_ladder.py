"""The ladder: its steps, what they run, their gains and its table."""

from dataclasses import replace

import numpy as np
import pytest
from experiment_helpers import SOME_GPU, cells, made_up, noted_calls, recorded

import fa_numba
from experiments import ladder
from experiments.beside import ceilings
from experiments.lab.measure import bandwidth, check, counters, peers, timing, variants, workloads
from experiments.lab.measure.series import unit
from experiments.lab.measure.workloads import fa2_setting, one_head
from experiments.lab.record.options import FIGURES, Options
from experiments.lab.record.store import Store
from experiments.lab.show import report
from fa_numba import bounds, emulator
from fa_numba.tiling import MEASURES, WGMMA_MEASURES

HOPPER = ladder.LABELS | ladder.HOPPER_LABELS

# The optimisations on wgmma that the steps of the ladder add.
ON_HOPPER = tuple(WGMMA_MEASURES)[:-1]


def synthetic(machine="some-gpu", labels=ladder.LABELS, causal=False):
    """Rows of every step; each is 1.25 times as fast as the one before."""
    rows = []
    for d in (64, 128):
        problem = fa2_setting(4096, d, causal, "float16")
        for n, series in enumerate(labels):
            time = 8 * 0.8**n
            numbers, own = {"time": time, "speed": 100 / time}, {"machine": machine}
            if series != ladder.PEER:
                numbers |= {name: 1e9 * n for name in ladder.PROFILED}
                numbers |= {"busy": 0.4 + n / 100} if causal else {}
                own |= {"Br": 128, "Bc": 64}
            for metric, value in numbers.items():
                rows.append(made_up("ladder", problem, series, value, metric, **own))
    return rows


def limits():
    """Rows of 1000 TFLOP/s of cuBLAS, 2000 of resident wgmma and 4 10^12 exponentials a second."""
    problem = one_head(64, 64, dtype="float16")
    return [
        made_up("ladder", problem, series, value, metric)
        for series, value, metric in zip(
            ladder.LIMITS, (1000.0, 2000.0, 4.0), ("speed", "speed", "rate"), strict=True
        )
    ]


def test_each_step_adds_one_measure():
    for before, after in zip(ladder.LADDER, ladder.LADDER[1:], strict=False):
        if after.kept is None:
            assert set(before.kept) == {name for name, who in MEASURES.items() if "fa2" in who}
        else:
            more = len(after.kept) - len(before.kept)
            assert after.kept[: len(before.kept)] == before.kept
            assert (more, after.threads) in ((1, before.threads), (0, before.threads // 2))
    assert set(ladder.predictions()) < set(HOPPER)
    one, two = ladder.LADDER[-2], ladder.TWO_STAGES
    assert (one.kept, one.tiles) == (two.kept, replace(two.tiles, stages=1)) and two.stages == 2


def test_each_step_on_hopper_adds_one_measure_or_warpgroup_or_stage():
    for before, after in zip(ladder.HOPPER_LADDER, ladder.HOPPER_LADDER[1:-1], strict=False):
        more = len(after.kept) - len(before.kept)
        assert after.kept[: len(before.kept)] == before.kept
        stages, rows = after.stages - before.stages, after.size[0] // before.size[0]
        assert (more, stages, rows) in ((1, 0, 1), (0, 1, 1), (0, 0, 2))
    assert ladder.HOPPER_LADDER[-2].kept == ON_HOPPER


@pytest.mark.parametrize("d", [64, 128])
def test_the_steps_on_hopper_are_planned_as_they_say(d):
    problem = fa2_setting(4096, d, False, "float16")
    found = {c.series: c for c in ladder.configurations(problem, hopper=True)}
    assert list(found) == list(ladder.HOPPER_LABELS)
    plans = {name: variants.plan(name, problem, **c.options) for name, c in found.items()}
    first, *_, counter, ahead, late, last = ladder.HOPPER_LABELS
    assert plans[first].tiles.stages == 1 and plans[first].ablated == ON_HOPPER
    assert (plans[counter].ablated, plans[ahead].ablated) == (("ahead", "late"), ("late",))
    assert plans[late].ablated == plans[last].ablated == ()
    tiles = problem.batch * problem.heads_q * 4096 // 128
    blocks = {name: plan.kernels[0].grid[0] for name, plan in plans.items()}
    assert blocks["fa2-wgmma-overlap"] == tiles > blocks["fa2-wgmma-persistent"]
    # At d=128 the plan's tiles are those of the step before.
    assert found[last].same_as == (late if d == 128 else None)


@pytest.mark.parametrize("d", [64, 128])
def test_the_steps_are_planned_as_they_say(d):
    problem = fa2_setting(4096, d, False, "float16")
    found = {c.series: c for c in ladder.configurations(problem)}
    assert [*found, ladder.PEER] == list(ladder.LABELS)
    plans = {name: variants.plan(name, problem, **c.options) for name, c in found.items()}
    accesses = {name: plan.accesses for name, plan in plans.items()}
    first, last = ladder.LADDER[0].series, ladder.LADDER[-2].series
    assert plans[first].ablated == tuple(MEASURES) and plans[last].ablated == ()
    assert plans[first].tiles.threads == 2 * plans[last].tiles.threads == 256
    assert all(accesses[step.series] == accesses[last] for step in ladder.LADDER[:-1])
    assert plans["fa1-mma-keys"].warp_partition == "keys"
    sizes = {(plans[f"fa1-mma-{way}"].tiles.Br, plans[f"fa1-mma-{way}"].tiles.Bc)
             for way in ("keys", "rows")}  # fmt: skip
    assert len(sizes) == 1 and accesses["fa1-mma-keys"] == accesses["fa1-mma-rows"]
    assert accesses[ladder.TWO_STAGES.series] == accesses[last]
    kernels = {
        (p.algorithm, p.tiles, p.ablated, p.warp_partition)
        for name, p in plans.items()
        if found[name].same_as is None
    }
    assert len(kernels) == sum(c.same_as is None for c in found.values()), "one is measured twice"
    # Where the plan takes the tiles of the step before there is nothing to run.
    same = plans[last].tiles == plans[ladder.BASE].tiles
    assert found[ladder.BASE].same_as == (last if same else None)


def test_every_step_is_timed_and_counted_as_planned(monkeypatch):
    calls, cases = noted_calls(monkeypatch)
    monkeypatch.setattr(fa_numba.device, "compute_capability", lambda: (9, 0))
    monkeypatch.setattr(variants, "shuffled", lambda items, key: items)
    speed = timing.Timing(1.0, 0.9, 1.1, 10)
    monkeypatch.setattr(bandwidth, "measure_matmul", lambda dtype, repeats: speed)
    monkeypatch.setattr(ceilings, "MEASURES", dict.fromkeys(ceilings.MEASURES, lambda *x: speed))
    known = {ladder.OCCUPIED["busy"].split(".")[0]}
    monkeypatch.setattr(counters, "available_metrics", lambda: known)
    monkeypatch.setattr(peers, "available", lambda: True)
    monkeypatch.setattr(peers, "on_device", lambda arrays, dtype: arrays)
    monkeypatch.setattr(peers, "call", lambda *call: lambda out=None: None)
    monkeypatch.setattr(peers, "release", lambda: None)
    for name, value in (("TOKENS", 512), ("HIDDEN", 64)):
        monkeypatch.setattr(workloads, name, value)
    rows = list(ladder.measure(Options(quick=True), SOME_GPU))
    assert len({row.key for row in rows}) == len(rows)
    timed = {row.series for row in rows if row.metric == "time" and not row.failed}
    assert timed == set(HOPPER)
    assert {row.series for row in rows if row.metric in ("speed", "rate")} >= set(ladder.LIMITS)
    # A counter that Nsight Compute does not have here is not asked for.
    metrics = {row.metric for row in rows}
    assert "busy" in metrics and "tensor" not in metrics
    # With a mask, Hopper's steps alone.
    masked = {row.series for row in rows if row.causal and row.series not in ladder.LIMITS}
    assert masked == {*ladder.HOPPER_LABELS, ladder.PEER}
    # The counted calls are those timed, each with its measures and its partition.
    assert len(cases) == len(calls)
    for case, call in zip(cases, calls, strict=True):
        for name in ("ablate", "warp_partition", "tiles"):
            assert case.options.get(name) == call.get(name)
        assert unit(case.series) == call["unit"]
    ablated = {(unit(case.series), case.options.get("ablate", ())) for case in cases}
    assert sum(on == "mma" for on, _ in ablated) == 1 + len(MEASURES)
    # Blocks stay for several row tiles before a counter hands these out, not after.
    assert sum(on == "wgmma" for on, _ in ablated) == 1 + len(ON_HOPPER)


def test_gains_are_over_the_step_before():
    mine = [row for row in synthetic(labels=HOPPER) if row.head_dim == 64]
    found = ladder.gains(mine)
    assert set(found) == set(ladder.predictions())
    # Two rows below the step that it is held against.
    assert found.pop(ladder.TWO_STAGES.series) == pytest.approx(1.25**2)
    assert all(gain == pytest.approx(1.25) for gain in found.values())
    broken = [replace(r, value=None) if r.series == ladder.LADDER[2].series else r for r in mine]
    missing = {ladder.LADDER[2].series, ladder.LADDER[3].series}
    assert set(found) - set(ladder.gains(broken)) == missing and ladder.gains([]) == {}


def test_the_ladders_table(tmp_path):
    store = Store(tmp_path)
    assert report.text("ladder", store) == "no recording yet\n"
    recorded(tmp_path, "ladder", synthetic(report.MACHINE))
    _, *lines = cells(report.text("ladder", store))
    assert [line[3] for line in lines] == 2 * list(ladder.LABELS.values())
    none = ["-"] * 3  # no limits
    counts = [*none, "0.00", "0.00", "0.000", "0.00", "-", "-"]
    assert lines[0][4:] == ["128 x 64", "12.5", "-", "-", *counts]
    counts = [*none, "1.00", "1.00", "1.000", "32.00", "-", "-"]
    assert lines[1][4:] == ["128 x 64", "15.6", "1.25", "2.00", *counts]
    assert lines[len(ladder.LABELS) - 1][4] == "-"


def test_the_table_has_shares_of_what_was_measured_beside():
    rows = synthetic(labels=HOPPER)
    header, *lines = cells(ladder.table(rows + limits()).body)
    own = next(c for c in lines if c[3] == "+ planned tiles" and "128 x" in c[4])
    shares = [own[header.index(label)] for label in ladder.LIMITS.values()]
    speed = float(own[header.index("TFLOP/s")])
    wanted = speed / 1000, speed / 2000, speed / (4 * 64) / 4
    for share, value in zip(shares, wanted, strict=True):
        assert share.endswith("%") and float(share[:-1]) == pytest.approx(100 * value, abs=0.6)
    assert ladder.draw(rows + limits()) and len(lines) == 2 * len(HOPPER)


def test_what_the_page_says_of_tiles_ahead_on_hopper():
    """With one consumer warpgroup they gain nothing, and cost a quarter at d=128."""
    store = Store(FIGURES)
    rows = [r for r in store.read("ladder", report.gpu(store, "ladder")) if r.series in HOPPER]
    gained = {64: [], 128: []}
    for problem, mine in variants.problems_of(rows).items():
        if problem.seqlen_q == ladder.SEQLEN:
            gained[problem.head_dim].append(ladder.gains(mine)["fa2-wgmma-one"])
    assert all(0.9 < gain < 1.1 for gain in gained[64]) and len(gained[64]) == 2
    assert all(0.7 < gain < 0.8 for gain in gained[128]) and len(gained[128]) == 2


def test_the_figure_has_bars_of_hopper_where_they_were_measured():
    figure = ladder.draw(synthetic(labels=HOPPER))
    assert [len(ax.patches) for ax in figure.axes] == [len(HOPPER)] * 2
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "FA-2 (Q outer), tensor cores (mma)",
        "FA-1 (K/V outer), tensor cores (mma)",
        "torch's FlashAttention-2",
        "FA-2 (Q outer), Hopper's tensor cores (wgmma)",
    ]


def test_the_title_has_the_largest_gain_of_all_that_is_drawn():
    rows = synthetic(labels=HOPPER)
    fast = [r for r in rows if r.series == "fa2-wgmma-turns" and r.head_dim == 128]
    rows = [replace(r, value=r.value / 2) if r in fast and r.metric == "time" else r for r in rows]
    message = ladder.draw(rows).legends[0].get_title().get_text().splitlines()[0]
    assert message == "The largest gain is ×2.50: warpgroups take turns"


def test_steps_with_a_mask_have_a_table_of_their_own():
    rows = synthetic(labels=ladder.HOPPER_LABELS, causal=True)
    assert ladder.table(rows) is None and ladder.TABLES["ladder_causal"](synthetic()) is None
    header, *lines = cells(ladder.TABLES["ladder_causal"](rows + synthetic(labels=HOPPER)).body)
    assert [line[3] for line in lines] == 2 * list(ladder.HOPPER_LABELS.values())
    late = dict(zip(header, lines[len(ladder.HOPPER_LABELS) - 2], strict=True))
    assert late["step"] == "+ row tiles taken late"
    assert (late["gain"], late["predicted gain"]) == ("1.25", "1.05")
    assert (late["multiprocessors with a block"], late["tensor cores busy"]) == ("48%", "-")


def test_the_figure_has_a_bar_for_each_speed():
    figure = ladder.draw(synthetic())
    assert [len(ax.patches) for ax in figure.axes] == [len(ladder.LABELS)] * 2
    texts = [text.get_text() for text in figure.axes[0].texts]
    predicted = len(set(ladder.predictions()) & set(ladder.LABELS))
    assert sum("×" in text for text in texts) == predicted
    assert sum("×1.25" in text for text in texts) == predicted - 1
    assert ladder.draw([]) is None


@pytest.mark.parametrize("make", [ceilings.make_multiply, ceilings.make_exponentials])
def test_the_kernels_of_the_ceilings_compute_what_is_checked(make):
    kernel, steps = make(), 40
    found = np.zeros(kernel.threads, np.float32)
    memory = {"shared_bytes": kernel.shared_bytes}
    counts = emulator.launch(kernel.function, 1, kernel.threads, found, steps, **memory)
    if make is ceilings.make_multiply:
        wanted = float(ceilings.SUMMED * steps)
        assert counts.instructions["wgmma"] == ceilings.GROUPS * ceilings.STEPS * steps
    else:
        wanted = ceilings.CHAINS * ceilings.FIXED_POINT
        assert counts.instructions["exp"] == ceilings.CHAINS * steps * kernel.threads // 32
    ceilings.check(found, wanted)
    found[3] *= 1.001
    with pytest.raises(check.WrongResult, match="thread 3 must compute"):
        ceilings.check(found, wanted)


def test_the_ablation_of_the_third_paper():
    """All measures but one at the paper's size, in a table of its own."""
    rows = [
        made_up("ladder", ladder.ABLATED, name, speed, "speed")
        for name, speed in zip(ladder.ABLATIONS, (500.0, 590.0, 400.0, 600.0), strict=True)
    ]
    no_overlap, one_tile, no_producer, all_on = ladder.ablation(rows).body.splitlines()[2:]
    assert "| 500.0 | 582 | 1.20 | 1.14 | 1.14 |" in no_overlap
    assert "| 590.0 | - | 1.02 | 1.05 | - |" in one_tile
    assert "| 400.0 | 570 | 1.50 | 1.15 | 1.16 |" in no_producer
    assert "| 600.0 | 661 | - | - | - |" in all_on
    assert ladder.ablation(rows[:3]) is ladder.ablation(rows[3:]) is ladder.table(rows) is None
    assert ladder.draw(rows) is None
    with bounds.DEVICES["H200"].planning():
        of = {
            name: ladder.plan(ladder.HOPPER, ladder.ABLATED, ablate=each.ablate)
            for name, each in ladder.ABLATIONS.items()
        }
    assert len({(p.tiles.Br, p.tiles.Bc, p.tiles.stages) for p in of.values()}) == 1
    assert {p.kernels[0].threads for p in of.values()} == {256, 384}
    assert all(p.accesses == of[ladder.HOPPER].accesses for p in of.values())
