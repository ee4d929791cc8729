"""From FA-1 to FA-2 in steps: what is called for each, and what the figure and the table say."""

import math

import numpy as np
import pytest
from experiment_helpers import cells, made_up
from test_experiments import store_synthetic

import fa_numba
from experiments import loop_cost
from experiments.lab.measure import calls, counters, series, timing, variants, workloads
from experiments.lab.measure.workloads import Inputs, fa2_setting, one_head
from experiments.lab.record.options import Bench, Options
from experiments.lab.record.store import MODEL, Store
from experiments.lab.show import report
from fa_numba import reference

TIMES = {
    "fa1-keys": 44.0,
    "fa1": 40.0,
    "fa1-splits": 20.0,
    "fa2-one-block": 32.0,
    "fa2-fa1-tiles": 16.0,
    "fa2": 12.0,
}

TILES = {"Br": 64, "Bc": 64}


def synthetic():
    """Every step of two problems in both dtypes, forward without a mask and with one."""
    rows = []
    for dtype, unit in (("float32", "simt"), ("float16", "mma")):
        for causal in (False, True):
            problem = fa2_setting(4096, 64, causal, dtype)
            for step, time in TIMES.items():
                if unit == "simt" and step == "fa1-keys":
                    continue
                # 20 / 16 of the time is 1.1 of the instructions, 1.2 of the waiting and a rest.
                k_outer = step.startswith("fa1")
                numbers = [("measured", "time", time / (2 if causal else 1))]
                numbers.append(("measured", "instructions", 1.1e10 if k_outer else 1e10))
                numbers.append(("measured", "issuing", 1e9 if k_outer else 1.2e9))
                numbers.append(("measured", "active", 2e9))
                numbers += [(kind, "traffic", 2e9) for kind in ("l2", "dram")]
                numbers.append(("model", "traffic", 1e9 * time))
                name = loop_cost.series_of(step, unit)
                for source, metric, value in numbers:
                    n = (7 if step == "fa1" else 20) if metric == "time" else None
                    own = {"source": source, "n": n, **TILES}
                    rows.append(made_up("loop_cost", problem, name, value, metric, **own))
    return rows


def synthetic_on_hopper():
    """The times of its steps."""
    times = {"fa1-own": 36.0, "fa1": 40.0, "fa1-splits": 20.0, "fa2-one-block": 32.0}
    times |= {"fa2-fa1-tiles": 16.0, "fa2": 16.0}
    problem = fa2_setting(4096, 64, False, "float16")
    return [
        made_up("loop_cost", problem, loop_cost.series_of(step, "wgmma"), time, n=20, **TILES)
        for step, time in times.items()
    ]


def plain(rows, dtype="float16"):
    """The steps of the forward problem without a mask."""
    return loop_cost.by_step(r for r in rows if r.dtype == dtype and not r.causal)


def test_factors_multiply_to_the_whole():
    found = loop_cost.factors(plain(synthetic()))
    assert (found["splits"], found["order"], found["tiles"]) == (2, 1.25, pytest.approx(4 / 3))
    assert (found["order_one_block"], found["grid"], found["warps"]) == (1.25, 2, 1.1)
    for way in (("splits", "order"), ("order_one_block", "grid")):
        product = math.prod(found[name] for name in (*way, "tiles"))
        assert found["total"] == pytest.approx(product)
    assert (found["instructions"], found["waiting"]) == (pytest.approx(1.1), pytest.approx(1.2))
    parts = found["instructions"] * found["waiting"] * found["rest"]
    assert parts == pytest.approx(found["order"])


class Stub:
    """Stand-ins for the GPU: calls are noted, not made."""

    def __init__(self, monkeypatch, counted):
        self.calls, self.cases = [], []
        monkeypatch.setattr(fa_numba, "attention", self.attention)
        monkeypatch.setattr(fa_numba, "attention_backward", self.backward)
        monkeypatch.setattr(variants, "time_call", self.time_call)
        for module in (variants, series):
            monkeypatch.setattr(module.peers, "on_device", lambda arrays, dtype: tuple(arrays))
        monkeypatch.setattr(fa_numba.device, "release_memory", lambda: None)
        monkeypatch.setattr(calls, "gate", lambda *problem: lambda result: 1e-7)
        monkeypatch.setattr(counters, "count_or_say", self.count_or_say)
        monkeypatch.setattr(workloads, "TOKENS", 1024)
        monkeypatch.setattr(workloads, "HIDDEN", 128)
        self.counted = counted

    def attention(self, q, k, v, return_lse=False, **options):
        if not return_lse:  # else the forward pass before a backward one
            self.calls.append({"passes": "fwd", "rows": q.shape[2], **options})
        return (q, q) if return_lse else q

    def backward(self, dout, q, k, v, out, lse, **options):
        self.calls.append({"passes": "bwd", "rows": q.shape[2], **options})

    def time_call(self, run, check, seconds):
        assert seconds == timing.SECONDS
        error = check(run())
        return timing.Timing(float(len(self.calls)), 1.0, 2.0, 20, error)

    def count_or_say(self, wanted, metrics, say):
        self.cases.extend(wanted)
        return self.counted and [dict.fromkeys(metrics, 1.0) for _ in wanted]


def measured(monkeypatch, *, counted=True, head_dim=64, causal=False, seqlen=512):
    stub = Stub(monkeypatch, counted)
    monkeypatch.setattr(variants, "shuffled", lambda items, key: items)
    options = Options(seqlens=(seqlen,), head_dims=(head_dim,), causal=(causal,))
    bench = Bench(machine="some-gpu", describe={"multiprocessors": 132}, say=lambda line: None)
    rows = list(loop_cost.measure(options, bench))
    assert len({row.key for row in rows}) == len(rows)
    return rows, stub


def on(rows, unit, passes="fwd"):
    return [r for r in rows if (r.pass_, series.unit(r.series)) == (passes, unit)]


def test_each_step_runs_as_it_says(monkeypatch):
    rows, stub = measured(monkeypatch)
    forward = [
        (c["algorithm"], c["unit"], c.get("query_splits", 1), c.get("warp_partition", "rows"))
        for c in stub.calls
        if c["passes"] == "fwd" and c["rows"] == 512
    ]
    assert forward == [
        ("fa1", "simt", 1, "rows"),
        ("fa1", "simt", 4, "rows"),
        ("fa2", "simt", 1, "rows"),
        ("fa2", "simt", 1, "rows"),
        ("fa1", "mma", 1, "keys"),
        ("fa1", "mma", 1, "rows"),
        ("fa1", "mma", 4, "rows"),
        ("fa2", "mma", 1, "rows"),
        ("fa2", "mma", 1, "rows"),
        ("fa1", "wgmma", 1, "rows"),
        ("fa1", "wgmma", 1, "rows"),
        ("fa1", "wgmma", 3, "rows"),
        ("fa2", "wgmma", 1, "rows"),
    ]
    # FA-2 with a block a head: a call a row tile, at FA-1's tiles; its counters are the first's.
    by_tile = [c for c in stub.calls if c["rows"] == 128 and c["unit"] != "wgmma"]
    assert [c["unit"] for c in by_tile] == ["simt"] * 4 + ["mma"] * 4
    assert [c.problem.seqlen_q for c in by_row_tile(stub.cases)] == [128, 128, 192]
    half = on(rows, "mma")
    found = loop_cost.by_step(half)
    assert found["fa2-one-block", "measured", "instructions"] == 4
    assert found["fa2-fa1-tiles", "measured", "instructions"] == 1
    # FA-1's tiles, threads and all, until the last step.
    tiles = {loop_cost.step_of(r.series): (r.Br, r.Bc) for r in half}
    assert tiles["fa1-splits"] == tiles["fa2-one-block"] == tiles["fa2-fa1-tiles"] == tiles["fa1"]
    fa1 = fa_numba.plan(*[(2, 2, 512, 64)] * 2, algorithm="fa1", dtype="float16").tiles
    assert {c["tiles"] for c in by_tile if c["unit"] == "mma"} == {fa1} and fa1.threads


def by_row_tile(cases):
    return [c for c in cases if c.problem.seqlen_q < c.problem.seqlen_k]


@pytest.mark.parametrize("head_dim", [64, 128])
def test_on_hopper_the_order_is_compared_at_fa2s_tiles(monkeypatch, head_dim):
    """FA-1 begins at its own, of more columns than FA-2's registers hold."""
    rows, stub = measured(monkeypatch, head_dim=head_dim)
    tiles = {loop_cost.step_of(r.series): (r.Br, r.Bc) for r in on(rows, "wgmma")}
    assert tiles.pop("fa1-own") == (128, 256)
    assert set(tiles.values()) == {(192 if head_dim == 64 else 128, 128)}
    assert {"fa1", "fa1-splits", "fa2-one-block", "fa2-fa1-tiles", "fa2"} == set(tiles)
    # Q outer with a block a head: a call a row tile, with FA-2's stages.
    first = [c for c in stub.calls if c["unit"] == "wgmma" and c["rows"] in (128, 192)]
    assert {(c["algorithm"], c["tiles"].stages) for c in first} == {("fa2", 2)}
    (counted,) = [c for c in by_row_tile(stub.cases) if series.unit(c.series) == "wgmma"]
    tiles = counted.options["tiles"]
    assert (tiles.Br, tiles.stages) == (counted.problem.seqlen_q, 2)
    # Of FA-2's two runs one is measured.
    mine, other = ([r.value for r in on(rows, "wgmma") if r.series == f"fa2-wgmma{x}"
                    and r.source != MODEL] for x in ("", "-fa1-tiles"))  # fmt: skip
    assert mine == other != []


@pytest.mark.parametrize("causal", [False, True])
def test_row_tiles_make_the_whole(causal):
    """FA-2 a row tile at a time gives what one call gives, and the accesses of one call."""
    problem = one_head(80, 16, causal)
    q, k, v = Inputs()(problem)
    tiles = fa_numba.Tiles(32, 16)
    with fa_numba.count_accesses() as counts, fa_numba.device.using("emulator"):
        run = series.row_tiles("fa2-simt", problem, q, k, v, tiles=tiles)
        got = run(np.full(problem.q_shape, np.nan, np.float32))
    expected = reference.attention(q, k, v, causal=causal)
    assert reference.relative_error(got, expected) < 1e-6
    planned = series.plan("fa2-simt", problem, tiles=tiles)
    assert counts.loads == planned.accesses.loads


def test_operations_beside_the_products():
    """By tile: what Algorithm 1's lines 9 to 12 do, and FA-2's; all of them once by hand."""
    problem, tiles = one_head(64, 16), fa_numba.Tiles(32, 16)
    scores, output = 5 * 32 * 16, 32 * 16
    beside = {
        step: loop_cost.beside_products(step, problem, tiles)
        for step in ("fa1", "fa1-unnormalised", "fa2")
    }
    assert beside["fa1"] == 8 * (scores + 3 * output)
    assert beside["fa2"] == 8 * (scores + output) + 64 * 16 == beside["fa1-unnormalised"]
    causal = loop_cost.beside_products("fa2", one_head(64, 16, True), tiles)
    assert causal < beside["fa2"]


def test_what_no_kernel_shows_has_the_bytes_of_what_it_changes():
    """Of made-up bytes: FA-1's own, and of l and m stored 4 a row more than of L."""
    text = loop_cost.table(synthetic()).body
    lines = {line[0]: line for line in cells(text) if len(line) == 9}
    bytes_ = {step: lines[loop_cost.STEPS[step]][5] for step in ("fa1", "fa1-unnormalised")}
    assert bytes_ == {"fa1": "40.0", "fa1-unnormalised": "40.0"}
    assert lines[loop_cost.STEPS["fa2-statistics"]][2:] == [
        *("-", "-", "-", "32.0", "-", "-"), lines[loop_cost.STEPS["fa2-one-block"]][-1]
    ]  # fmt: skip
    problem, tiles = fa2_setting(4096, 64, False, "float16"), fa_numba.Tiles(64, 64)
    for step in ("fa1", "fa1-unnormalised", "fa2"):
        beside = loop_cost.beside_products(step, problem, tiles) / 1e9
        assert lines[loop_cost.STEPS[step]][-1] == f"{beside:.1f}"


def test_the_table_of_steps(tmp_path):
    store_synthetic("loop_cost", tmp_path, report.MACHINE)
    text = report.text("loop_cost", Store(tmp_path))
    lines = cells(text)
    assert [
        *("fwd", "fp16", "64", "4096", "3.33", "1.10", "1.25", "2.00", "2.00", "1.25"),
        *("1.10", "1.20", "0.95", "1.33", "2.00", "2.00"),
    ] in lines
    # The steps of one problem: in 16 bits, without a mask.
    times = {line[0]: line[2] for line in lines if len(line) == 9}
    assert [times[loop_cost.STEPS[step]] for step in TIMES] == [f"{t:.2f}" for t in TIMES.values()]
    assert "medians of 7 to 20 runs" in text


def test_hoppers_steps_have_a_table_and_a_figure_of_their_own():
    """Of made-up times: FA-1 from its own tiles to FA-2's, then as the others."""
    rows = [*synthetic(), *synthetic_on_hopper()]
    found = loop_cost.factors(loop_cost.by_step(on(rows, "wgmma")))
    assert (found["total"], found["tiles"], found["order"]) == (2.25, 0.9, 1.25)
    for way in (("splits", "order"), ("order_one_block", "grid")):
        assert found["total"] == pytest.approx(math.prod(found[name] for name in (*way, "tiles")))
    text = loop_cost.TABLES["loop_cost_hopper"](rows).body
    assert "| fwd | fp16, wgmma | 64 | 4096 | 2.25 | - | 1.25 | 2.00 | 2.00 | 1.25 |" in text
    assert "wgmma" not in loop_cost.table(rows).body
    assert loop_cost.table(rows) == loop_cost.table(synthetic())
    figure = loop_cost.FIGURES["loop_cost_hopper"](rows)
    title = "forward, fp16, Hopper's tensor cores (wgmma), N=4096, d=64\n"
    assert figure.axes[0].get_title().startswith(title)
    shown = ["36 ms", "×0.90, 40 ms", "×2.00, 20 ms", "×1.25, 16 ms", "16 ms"]
    assert said(figure.axes[0]) == shown
    assert loop_cost.FIGURES["loop_cost_hopper"](synthetic()) is None


def said(ax):
    return [text.get_text().strip() for text in ax.texts]


def test_the_figure_names_each_gain():
    """The waterfall goes from FA-1's time to FA-2's, each bar from where the one before ended."""
    rows = synthetic()
    figure = loop_cost.draw(rows)
    (above,) = figure.axes
    assert above.get_title() == (
        "forward, fp16, tensor cores (mma), N=4096, d=64\n"
        "behind a bar: gain of the step, time, DRAM bytes"
    )
    assert said(above) == [
        *("40 ms, 2.00 GB", "×2.00, 20 ms, 2.00 GB", "×1.25, 16 ms, 2.00 GB"),
        *("×1.33, 12 ms, 2.00 GB", "12 ms"),
    ]
    ends = [(bar.get_x(), bar.get_x() + bar.get_width()) for bar in above.patches]
    assert ends == [(0, 40), (20, 40), (16, 20), (12, 16), (0, 12)]
    assert figure.get_suptitle() == "FA-2 is 3.3 times as fast as FA-1"
    assert loop_cost.draw([r for r in rows if r.causal]) is None
    failed = [made_up("loop_cost", fa2_setting(4096, 64), "fa1-simt", None, note="failed: why")]
    assert said(loop_cost.draw(failed).axes[0]) == ["no time"]
