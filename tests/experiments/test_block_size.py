"""Accesses and times over the block size: what is run, in which units it is drawn, the table."""

import pytest
from experiment_helpers import cells, made_up, noted_calls, on_some_gpu
from test_experiments import store_synthetic

from experiments import block_size
from experiments.lab.measure import scaling
from experiments.lab.record.store import Store
from experiments.lab.show import report
from fa_numba import io_model


def measured(problem, series, Br, Bc):
    """What a GPU gives of one block size; too large a one fails."""
    of = ("block_size", problem, series)
    if max(Br, Bc) == 512:
        return [made_up(*of, None, Br=Br, Bc=Bc, note="failed: too large")]
    found = [("measured", "time", 3.0 + 100 / Bc), ("measured", "speed", 1.0 * Br)]
    found += [("l2", "traffic", 1e11 / Bc), ("dram", "traffic", 5e10 / Bc)]
    return [
        made_up(*of, x, metric, source=source, n=9 if metric == "time" else None, Br=Br, Bc=Bc)
        for source, metric, x in found
    ]


def synthetic():
    rows = []
    for dtype in block_size.UNITS:
        for at in block_size.wanted(block_size.setting(64, dtype)):
            rows += scaling.model("block_size", at)
            rows += measured(at.problem, at.series, at.Br, at.Bc)
    return rows


def tiles(problem):
    return [(at.series, at.Br, at.Bc) for at in block_size.wanted(problem)]


def test_both_orders_over_both_block_sizes_at_the_papers_head_dimension():
    found = tiles(block_size.setting(64, "float16"))
    for series in ("fa1-mma", "fa2-mma"):
        assert {(64, n) for n in block_size.SIZES} <= {t[1:] for t in found if t[0] == series}
        assert {(n, 64) for n in block_size.SIZES} <= {t[1:] for t in found if t[0] == series}
    assert len(found) == len(set(found)) == 22
    other = tiles(block_size.setting(128))
    assert {t[1] for t in other if t[0] == "fa1-simt"} == {64}
    assert {t[2] for t in other if t[0] == "fa2-simt"} == {64}


def test_every_problem_has_as_many_elements():
    sizes = {d: block_size.setting(d).q_shape for d in block_size.HEAD_DIMS}
    assert sizes[64] == (64, 16, 1024, 64)
    assert {B * H * N * d for B, H, N, d in sizes.values()} == {block_size.ELEMENTS}


def test_the_counts_are_those_of_the_fp32_kernels_alone():
    """What the emulator counts is as much as before fp16 and other head dimensions came."""
    counted = block_size.counted(quick=False)
    assert {at.series for at in counted} == {"fa1-simt", "fa2-simt"}
    at_n = [at for at in counted if at.problem.seqlen_q == 1024]
    assert {at for at in at_n if 512 not in (at.Br, at.Bc)} == set(at_n) and len(at_n) == 14


def test_accesses_in_nd_are_the_papers_formula():
    """FA-1 over B_c is the paper's 3 N / B_c + 1 and l and m."""
    found = block_size.accesses(synthetic(), "fa1", "Bc")
    for size, value in found.items():
        paper = io_model.fa1_paper(block_size.setting(64), size)
        assert value == pytest.approx(paper / (64 * 16 * 1024 * 64), rel=0.04)
    published = block_size.paper("hbm_accesses")
    assert set(published) == {64, 128, 256, 512}
    for size, value in published.items():
        assert value == pytest.approx(3 * 1024 / size + 1, rel=0.01)


def test_each_block_size_is_run_as_it_says(monkeypatch):
    calls, cases = noted_calls(monkeypatch)
    for name, value in (("HEADS", 1), ("WIDTH", 128), ("SEQLEN", 128), ("HEAD_DIMS", (64, 128))):
        monkeypatch.setattr(block_size, name, value)
    monkeypatch.setattr(scaling, "count", lambda *arguments, inputs: [])
    rows = [row for row in on_some_gpu(block_size) if row.machine == "some-gpu"]
    assert len({row.key for row in rows}) == len(rows)
    ran = {
        (f"{c['algorithm']}-{c['unit']}", c["tiles"].Br, c["tiles"].Bc, c["shape"][3])
        for c in calls
    }
    times = {(r.series, r.Br, r.Bc, r.head_dim): r for r in rows if r.metric == "time"}
    timed = {place for place, row in times.items() if not row.failed}
    assert ran == timed
    wanted = {
        (*tile, d)
        for dtype in block_size.UNITS
        for d in (64, 128)
        for tile in tiles(block_size.setting(d, dtype))
    }
    assert set(times) == wanted and timed < wanted
    # Counters belong to their tiles.
    tiles_of = [c.options["tiles"] for c in cases]
    number = {
        (c.series, t.Br, t.Bc, c.problem.head_dim): n
        for n, (c, t) in enumerate(zip(cases, tiles_of, strict=True), 1)
    }
    for row in rows:
        place = (row.series, row.Br, row.Bc, row.head_dim)
        if row.source == "l2" and place in timed:
            assert row.value == 2 * 32 * number[place]


def test_the_figure_has_accesses_and_runtime():
    figure = block_size.draw(synthetic())
    assert [ax.get_title() for ax in figure.axes] == [
        "accesses, model, N=1024, d=64",
        "time, N=1024, d=64",
    ]
    assert [len(ax.lines) for ax in figure.axes] == [5, 9]
    message = figure.legends[0].get_title().get_text()
    assert message == "FA-1 needs 28 times fewer accesses with $B_c$=512 than 16"


def test_the_table_is_in_nd(tmp_path):
    store_synthetic("block_size", tmp_path, report.MACHINE)
    text = report.text("block_size", Store(tmp_path))
    by_size = {line[0]: line for line in cells(text)}
    line = by_size["128"]
    # 3 N / B_c + 1 = 25; with l and m a little more.
    assert line[1:4] == ["25.0", "25.0", "25.5"]
    assert line[6:] == ["3.8", "4.6", "3.8", "4.6"]
    assert by_size["512"][6:] == ["failed"] * 4
    assert "medians of 9 runs" in text
