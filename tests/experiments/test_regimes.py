"""The regimes of attention: which calls are timed and counted, rows, table and figure."""

import pytest

from experiments import regimes
from experiments.lab.measure import bandwidth, peers, variants
from experiments.lab.measure.timing import Timing, timing_rows
from experiments.lab.record.options import Bench, Options
from experiments.lab.record.store import Row
from fa_numba import io_model

ABOUT = {"multiprocessors": 132, "compute_capability": "9.0"}
# Time over that of the fastest FA-2.
SLOWER = {"standard-mma": 4.0, "fa1-mma": 2.0, "fa2-wgmma": 1.0, "torch-cudnn": 0.8}
PEAK, READ = 800.0, 4.0


def measured(monkeypatch, quick=False, dram=True):
    """Rows by stand-ins for the timing and for the counters."""
    seen = {"times": [], "hardware": []}

    def times(name, work, bench, seconds):
        seen["times"] = work
        for problem, calls in work:
            for variant in calls:
                common, _, _ = variants._common(name, variant, problem, bench.machine)
                ms = SLOWER.get(variant.series, 3.0) * milliseconds(problem, variant.passes)
                yield from timing_rows(Timing(ms, ms, ms, 5), problem, **common)

    def hardware(name, work, bench):
        seen["hardware"] = work
        for problem, calls in work:
            for variant in calls:
                common, planned, why = variants._common(name, variant, problem, bench.machine)
                assert not why
                common |= {"metric": "traffic", "unit": "bytes", "source": "dram"}
                moved = 1e5 if problem.seqlen_q == 256 else 1e9
                yield Row(value=moved if dram else None, **common)

    timing = lambda *_: Timing(READ, READ, READ, 5)  # noqa: E731
    monkeypatch.setattr(variants, "times", times)
    monkeypatch.setattr(variants, "hardware", hardware)
    monkeypatch.setattr(bandwidth, "ones", lambda nbytes: None)
    monkeypatch.setattr(bandwidth, "measure_global", timing)
    peak = Timing(PEAK, PEAK, PEAK, 5)
    monkeypatch.setattr(bandwidth, "measure_matmul", lambda dtype, repeats: peak)
    monkeypatch.setattr(peers, "available", lambda: True)
    monkeypatch.setattr(peers, "release", lambda: None)
    monkeypatch.setattr(peers, "fa4", lambda: None)
    bench = Bench(machine="some-gpu", describe=ABOUT, say=lambda text: None)
    return list(regimes.measure(Options(quick=quick), bench)), seen


def milliseconds(problem, pass_):
    """400 TFLOP/s with many rows; with one row a GB in 0.5 ms, or 100 ms with a short cache."""
    if problem.seqlen_q > 1:
        return io_model.flops(problem, pass_) / 400e9
    return 0.5 if problem.seqlen_k > 10000 else 100.0


def test_calls_of_each_regime(monkeypatch):
    _, seen = measured(monkeypatch)
    series = {
        name: [v.series for p, calls in seen["times"] if p == problem for v in calls]
        for name, (problem, _) in regimes.REGIMES.items()
    }
    assert {"fa2-mma-splits", "fa2-wgmma-splits"} <= {*series["decoding, long cache"]}
    assert not any(s.startswith("fa1-wgmma") for s in series["decoding, long cache"])
    assert {"fa1-wgmma", "fa1-mma-splits", "torch-cudnn"} <= {*series["long prefill"]}
    problem, _ = regimes.REGIMES["training"]
    passes = [v.passes for p, calls in seen["hardware"] if p == problem for v in calls]
    assert {*passes} == {"fwd", "bwd"}
    assert {v.passes for p, calls in seen["times"] if p == problem for v in calls} == {"fwd+bwd"}
    assert len(measured(monkeypatch, quick=True)[1]["times"]) == 2


def test_the_table_names_what_limits(monkeypatch):
    rows, _ = measured(monkeypatch)
    found = regimes.found(rows)
    assert [regime.limit for regime in found.values()] == [
        *["computing"] * 3, "DRAM", "latency"
    ]  # fmt: skip
    assert found["training"].bytes == 2e9 and found["long prefill"].ms["FA-2"][0] == "fa2-wgmma"
    lines = regimes.table(rows).body.splitlines()[2:]
    assert lines[0].startswith("| long prefill | batch 1, 16 heads, N=16384, causal | fwd | ")
    assert lines[0].endswith("| 50 % | 0.36 | 9 % | computing | 2.00 | 4.00 | 0.80 |")
    assert "32 heads on 8, 1 row, 65536 keys" in lines[3] and "| 2.00 | 50 % | DRAM |" in lines[3]
    without = regimes.found(measured(monkeypatch, dram=False)[0])
    assert {regime.limit for regime in without.values()} == {"-"}


def test_the_figure(monkeypatch):
    (ax,) = regimes.draw(measured(monkeypatch)[0]).axes
    assert "decoding, long cache (DRAM)" in [t.get_text() for t in ax.get_yticklabels()]
    assert [bar.get_width() for bar in ax.patches[:3]] == pytest.approx([2.0, 4.0, 5.0])
    assert regimes.draw([]) is regimes.table([]) is None
