"""The ladder: its steps, what they run, their gains and its table."""

from dataclasses import replace

import pytest

import fa_numba
from experiments import ladder
from experiments.lab import counters, peers, report, timing, variants, workloads
from experiments.lab.options import Bench, Options
from experiments.lab.series import row_fields
from experiments.lab.store import Recorder, Row, Store
from experiments.lab.workloads import fa2_setting
from fa_numba.tiling import MEASURES


def synthetic(machine="some-gpu"):
    """Rows of every step; each is 1.25 times as fast as the one before."""
    rows = []
    for d in (64, 128):
        problem = fa2_setting(4096, d, False, "float16")
        for n, series in enumerate(ladder.LABELS):
            time = 8 * 0.8**n
            numbers = [("time", "ms", time), ("speed", "TFLOP/s", 100 / time)]
            if series != ladder.PEER:
                numbers += [(name, "1", 1e9 * n) for name in ladder.PROFILED]
            for metric, unit, value in numbers:
                fields = {"metric": metric, "unit": unit, "value": value, "source": "measured"}
                size = {} if series == ladder.PEER else {"Br": 128, "Bc": 64}
                fields |= {"machine": machine, "experiment": "ladder", "series": series}
                rows.append(Row(**fields, **size, **row_fields(problem)))
    return rows


def test_each_step_adds_one_measure():
    for before, after in zip(ladder.LADDER, ladder.LADDER[1:], strict=False):
        if after.kept is None:
            assert set(before.kept) == {name for name, who in MEASURES.items() if "fa2" in who}
        else:
            more = len(after.kept) - len(before.kept)
            assert after.kept[: len(before.kept)] == before.kept
            assert (more, after.threads) in ((1, before.threads), (0, before.threads // 2))
    assert set(ladder.predictions()) < set(ladder.LABELS)
    one, two = ladder.LADDER[-2], ladder.TWO_STAGES
    assert (one.kept, one.tiles) == (two.kept, replace(two.tiles, stages=1)) and two.stages == 2


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
    calls, cases = [], []

    def attention(q, k, v, **options):
        calls.append(options)

    def time_call(run, check, seconds=None):
        run()
        return timing.Timing(1.0 + len(calls), 1.0, 2.0, 20, 1e-7)

    def count_or_say(wanted, metrics, say):
        cases.extend(wanted)
        return [dict.fromkeys(metrics, 1.0) for _ in wanted]

    monkeypatch.setattr(fa_numba, "attention", attention)
    monkeypatch.setattr(variants, "time_call", time_call)
    monkeypatch.setattr(ladder, "time_call", time_call)
    monkeypatch.setattr(fa_numba.device, "to_gpu", lambda array: array)
    monkeypatch.setattr(fa_numba.device, "release_memory", lambda: None)
    monkeypatch.setattr(counters, "count_or_say", count_or_say)
    monkeypatch.setattr(peers, "available", lambda: True)
    monkeypatch.setattr(peers, "on_device", lambda arrays, dtype: arrays)
    monkeypatch.setattr(peers, "call", lambda *call: lambda out=None: None)
    monkeypatch.setattr(peers, "release", lambda: None)
    for name, value in (("TOKENS", 512), ("HIDDEN", 64)):
        monkeypatch.setattr(workloads, name, value)
    bench = Bench(machine="some-gpu", describe={}, say=lambda line: None)
    rows = list(ladder.measure(Options(quick=True), bench))
    assert len({row.key for row in rows}) == len(rows)
    timed = {row.series for row in rows if row.metric == "time" and not row.failed}
    assert timed == set(ladder.LABELS)
    # The counted calls are those timed, each with its measures and its partition.
    assert len(cases) == len(calls)
    for case, call in zip(cases, calls, strict=True):
        assert tuple(case.ablate) == call.get("ablate", ())
        assert case.warp_partition == call.get("warp_partition", "rows")
        tiles = call.get("tiles", fa_numba.Tiles(16, 16))
        assert (case.threads, case.stages) == (tiles.threads, tiles.stages)
    assert len({case.ablate for case in cases}) == 1 + len(MEASURES)


def test_gains_are_over_the_step_before():
    mine = [row for row in synthetic() if row.head_dim == 64]
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
    about = {"commit": "a" * 40, "date": "2026-01-01", "device": {"name": "Some GPU"}}
    recorder = Recorder(store, "ladder", lambda machine: about, ())
    recorder.add_all(synthetic(report.MACHINE))
    recorder.finish(complete=True)
    lines = [line for line in report.text("ladder", store).splitlines() if "| 4096 |" in line]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [c[3] for c in cells] == 2 * list(ladder.LABELS.values())
    assert cells[0][4:] == ["128 x 64", "12.5", "-", "-", "0.00", "0.00", "0.000", "0.00"]
    assert cells[1][4:] == ["128 x 64", "15.6", "1.25", "2.00", "1.00", "1.00", "1.000", "32.00"]
    assert cells[len(ladder.LABELS) - 1][4] == "-"


def test_the_figure_has_a_bar_for_each_speed():
    figure = ladder.draw(synthetic())
    assert [len(ax.patches) for ax in figure.axes] == [len(ladder.LABELS)] * 2
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert sum("×" in text for text in texts) == len(ladder.predictions())
    assert sum("×1.25" in text for text in texts) == len(ladder.predictions()) - 1
    assert ladder.draw([]) is None
