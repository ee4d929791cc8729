"""Both loop orders at equal tiles and work: what is run, the ratios, the figures, the table."""

from dataclasses import replace

from experiment_helpers import cells, made_up, noted_calls
from test_experiments import store_synthetic

import fa_numba
from experiments import loop_order
from experiments.lab.measure import variants, workloads
from experiments.lab.measure.workloads import fa2_setting
from experiments.lab.record.options import Bench, Options
from experiments.lab.record.store import Store
from experiments.lab.show import report


def synthetic(lengths=(1024, 4096), units=("simt", "mma")):
    """Times of 6, 3 and 2, and bytes in the same proportions or, of DRAM, with N."""
    rows = []
    for unit in units:
        dtype = loop_order.UNITS[unit]
        problems = [fa2_setting(N, 64, False, dtype) for N in lengths]
        for problem in (*problems, loop_order.many_heads(4, 64, dtype)):
            for series, time in zip(loop_order.series_of(unit), (6.0, 3.0, 2.0), strict=True):
                numbers = [("measured", "time", time), ("model", "traffic", time)]
                if problem.batch > 1:
                    more = problem.seqlen_q / 128 if series.startswith("fa1") else 2.0
                    numbers += [("l2", "traffic", 2 * time)]
                    numbers += [("dram", "traffic", more)]
                for source, metric, value in numbers:
                    n = {4096: 5}.get(problem.seqlen_q, 20) if metric == "time" else None
                    own = {"source": source, "n": n, "Br": 64, "Bc": 64}
                    rows.append(made_up("loop_order", problem, series, value, metric, **own))
    return rows


def measured_orders(monkeypatch, **options):
    """loop_order's rows with stand-ins for the GPU, the calls of both, and the counted cases."""
    calls, cases = noted_calls(monkeypatch)
    for name, value in (("TOKENS", 2048), ("HIDDEN", 128)):
        monkeypatch.setattr(workloads, name, value)
    bench = Bench(machine="some-gpu", describe={"multiprocessors": 4}, say=lambda line: None)
    rows = list(loop_order.measure(Options(**options), bench))
    assert len({row.key for row in rows}) == len(rows)
    return rows, calls, cases


def test_the_orders_run_at_equal_tiles_and_work(monkeypatch):
    rows, calls, cases = measured_orders(
        monkeypatch, seqlens=(512, 2048), head_dims=(64,), causal=(False,)
    )
    tiles = {}
    for row in rows:
        unit = row.series.split("-")[1]
        tiles.setdefault((unit, row.seqlen_q), set()).add((row.Br, row.Bc))
    assert {len(found) for found in tiles.values()} == {1}
    assert {key[0] for key in tiles} == set(loop_order.UNITS)
    for call in calls:
        assert call["dtype"] == loop_order.UNITS[call["unit"]]
    by_order = {
        order: [c for c in calls if c["algorithm"] == order and c["unit"] == "mma"]
        for order in ("fa1", "fa2")
    }
    # FA-2 is told FA-1's tiles and threads; of FA-1 a call with the paper's grid and one split.
    planned = fa_numba.plan((4, 2, 512, 64), (4, 2, 512, 64), algorithm="fa1", dtype="float16")
    assert [c["tiles"] for c in by_order["fa2"]] == [planned.tiles] * 2
    assert planned.tiles.threads is not None
    splits = [c.get("query_splits", 1) for c in by_order["fa1"]]
    assert splits[0] == 1 and max(splits) > 1
    # The counted calls are those timed.
    assert len(cases) == len(calls)
    assert {
        (*c.series.split("-")[:2], c.problem.seqlen_q, c.options.get("query_splits", 1))
        for c in cases
    } == {(c["algorithm"], c["unit"], c["shape"][2], c.get("query_splits", 1)) for c in calls}
    assert all(
        case.options["tiles"].threads == planned.tiles.threads
        for case in cases
        if case.series.startswith("fa2-mma")
    )
    # On wgmma FA-1 is told FA-2's: the same rows, columns and threads, without FA-2's stages.
    planned = fa_numba.plan((4, 2, 512, 64), (4, 2, 512, 64), dtype="float16", unit="wgmma")
    hopper = {c["algorithm"]: c["tiles"] for c in calls if c["unit"] == "wgmma"}
    assert hopper["fa2"] == planned.tiles
    assert hopper["fa1"] == replace(planned.tiles, stages=1)


def test_a_gpu_without_hoppers_unit_is_not_asked_for_it(monkeypatch):
    problem = fa2_setting(1024, 64, False, "float16")
    with fa_numba.device.planning_for((8, 0), 163 << 10):
        assert loop_order.configurations(problem, 108, "wgmma") == []
        assert len(loop_order.configurations(problem, 108, "mma")) == 3


def test_the_orders_are_compared_over_heads_too(monkeypatch):
    monkeypatch.setattr(loop_order, "HEADS_SEQLEN", 256)
    monkeypatch.setattr(loop_order, "QUICK_SEQLEN", 256)
    rows, _, cases = measured_orders(monkeypatch, quick=True)
    assert {r.heads_q for r in rows if r.seqlen_q == 256} == set(loop_order.HEADS[:2])
    # Counters are read in FA-2's setting alone; there is a model for all.
    assert {case.problem.seqlen_q for case in cases} == {512, 1024}
    model = {(r.seqlen_q, r.series) for r in rows if r.source == "model"}
    assert {N for N, _ in model} == {256, 512, 1024} and len(model) == 27
    over_N, over_heads = (draw(rows) for draw in loop_order.FIGURES.values())
    for figure in (over_N, over_heads):
        assert [ax.get_title() for ax in figure.axes] == [
            f"{name}, d=64" for name in loop_order.UNIT_NAMES.values()
        ]
    assert "; N=256, not causal" in over_heads.legends[0].get_title().get_text()


def test_ratios_of_the_orders():
    rows = synthetic(units=loop_order.UNITS)
    for problem, mine in variants.problems_of(rows).items():
        wanted = {"grid": 3, "splits": 1.5, "model": 1.5}
        if problem.batch > 1:
            wanted |= {"l2": 1.5, "dram": problem.seqlen_q / 256}
        for unit in loop_order.units_of(problem.dtype):
            assert loop_order.ratios(mine, unit) == wanted
    failed = [replace(r, value=None) if r.metric == "time" else r for r in rows[:8]]
    assert "grid" not in loop_order.ratios(failed, "simt") and loop_order.ratios([], "mma") == {}
    assert loop_order.ratios(synthetic(), "wgmma") == {}


def test_the_result_is_seen_at_a_glance():
    """Two panels, bytes and time; their titles and labels say the ratios of the rows."""
    figure = loop_order.draw(synthetic())
    bytes_, time = figure.axes
    assert bytes_.get_title() == "DRAM bytes: up to 16 times as many"
    assert time.get_title() == "time: up to 1.5 times as long"
    message, what = figure.legends[0].get_title().get_text().splitlines()
    assert message == "K/V outer takes up to 1.5 times as long as Q outer"
    assert what.startswith("equal tiles and work, full grid; ")
    assert {y for line in time.lines[:-1] for y in line.get_ydata()} == {1.5}
    # Masked problems and other heads are the second figure's.
    masked = [replace(row, causal=True) for row in synthetic() if row.metric == "time"]
    both = [*synthetic(), *[replace(row, value=row.value * 9) for row in masked]]
    assert loop_order.draw(both).axes[1].get_title() == time.get_title()
    assert loop_order.draw([*masked, *(r for r in synthetic() if r.batch == 1)]) is None
    times = [row for row in synthetic() if row.metric == "time"]
    assert loop_order.draw(times).axes[0].get_title() == "DRAM bytes"


def test_the_figures_say_where_the_tiles_change_and_heads_are_split():
    def at(row):
        N, split = row.seqlen_q, row.series.endswith("-splits") and row.seqlen_q > 1024
        note = "query_splits=4" if split else ""
        return replace(row, Br=32 if N < 4096 else 64, Bc=16, note=note)

    rows = [at(row) for row in synthetic((512, 1024, 4096))]
    figure = loop_order.FIGURES["loop_order_seqlen"](rows)
    assert "here the tiles change" in [t.get_text() for t in figure.legends[0].get_texts()]
    for ax in figure.axes:
        assert [t.get_text() for t in ax.texts] == ["tiles: 32 x 16; from 4k: 64 x 16"]
        (change,) = [line.get_xdata()[0] for line in ax.lines if line.get_linestyle() == "-."]
        assert change == (1024 * 4096) ** 0.5
        (splits,) = [line for line in ax.lines if "query splits" in line.get_label()]
        assert splits.get_markevery() == [2]
    figure = loop_order.FIGURES["loop_order_seqlen"](synthetic())
    assert {t.get_text() for ax in figure.axes for t in ax.texts} == {"tiles: 64 x 64"}


def test_the_table_has_the_shortest_and_the_longest(tmp_path):
    store_synthetic("loop_order", tmp_path, report.MACHINE)
    text = report.text("loop_order", Store(tmp_path))
    _, *lines = cells(text)
    assert len(lines) == 4
    times, ratios = ["6", "3", "2"], ["3.00", "1.50", "1.50"]
    assert ["fp32", "64", "no", "1024", "512", *times, *ratios, "1.50", "4.00"] in lines
    assert "medians of 5 to 20 runs" in text and "*FA-1 / FA-2* of all 4 measured problems" in text


def test_problems_are_the_options_or_the_experiments():
    def of(**options):
        dtypes = ("float32", "float16")
        return workloads.fa2_problems(Options(**options), dtypes, (1024, 4096), (512,))

    every = of()
    assert len(set(every)) == 16 and every[1] == fa2_setting(4096, 64, False, "float32")
    assert [p.dtype for p in every] == ["float32"] * 8 + ["float16"] * 8
    assert {(p.head_dim, p.causal) for p in every} == {(d, m) for d in (64, 128) for m in (0, 1)}
    assert of(quick=True) == [fa2_setting(512, 64, False, t) for t in ("float32", "float16")]
    asked = {"seqlens": (7,), "head_dims": (32,), "causal": (True,)}
    wanted = [fa2_setting(7, 32, True, dtype) for dtype in ("float32", "float16")]
    assert of(**asked) == of(quick=True, **asked) == wanted


def test_hoppers_unit_is_drawn_where_it_was_measured():
    """A recording without it looks as it did; with it there are marks, panels and lines more."""
    old, new = synthetic(), synthetic(units=loop_order.UNITS)
    names = [{t.get_text() for t in loop_order.draw(rows).legends[0].get_texts()}
             for rows in (old, new)]  # fmt: skip
    assert names[1] - names[0] == {"fp16, Hopper's tensor cores (wgmma)"}
    assert names[0] == {"fp32, CUDA cores", "fp16, tensor cores (mma)", "d=64"}
    for draw in loop_order.FIGURES.values():
        assert [len(draw(rows).axes) for rows in (old, new)] == [2, 3]
    without, table = (loop_order.table(rows) for rows in (old, new))
    assert table.body.count("| fp16, wgmma |") == 2 and "wgmma" not in without.body
    assert "*FA-1 / FA-2* of all 4 measured problems" in table.caption
