"""Accesses over the on-chip memory and the head dimension: tiles, rows, exponents, tables."""

import numpy as np
import pytest
from experiment_helpers import flat, recorded

from experiments import io_vs_head_dim, io_vs_sram
from experiments.lab.measure import counters, scaling
from experiments.lab.measure.workloads import one_head
from experiments.lab.record.options import Bench, Options
from experiments.lab.record.store import EMULATOR, MODEL
from experiments.lab.show import report
from fa_numba import io_model

QUICK = {
    io_vs_sram: Options(quick=True, seqlens=(40,)),
    io_vs_head_dim: Options(quick=True, seqlens=(40,), head_dims=(16, 32)),
}


def measured(module, monkeypatch, machine="some-gpu", options=None):
    """The rows of a GPU whose L2 moves 1.1 times the closed form and whose DRAM half of it."""

    def count(cases, metrics, say):
        found = []
        for case in cases:
            tiles = case.options["tiles"]
            setting = scaling.Setting(case.series, case.problem, tiles.Br, tiles.Bc)
            bytes_ = scaling.made(setting).accesses.bytes
            found.append(
                {
                    **dict.fromkeys(counters.L2, 1.1 * bytes_ / 32 / len(counters.L2)),
                    **dict.fromkeys(counters.DRAM, 0.5 * bytes_ / len(counters.DRAM)),
                }
            )
        return found

    monkeypatch.setattr(counters, "available", lambda: False)
    monkeypatch.setattr(counters, "count_or_say", count)
    kept = [row for row in run(module) if row.source == "counted"]
    bench = Bench(machine=machine, describe={}, say=lambda text: None, kept=kept)
    return flat(module.measure(options or Options(), bench))


_runs = {}


def run(module):
    """What a quick run without a GPU gives."""
    if module not in _runs:
        _runs[module] = flat(module.measure(QUICK[module], Bench(say=lambda text: None)))
    return _runs[module]


def synthetic():
    with pytest.MonkeyPatch.context() as patch:
        return measured(io_vs_sram, patch, options=Options(quick=True))


# --- tiles -----------------------------------------------------------------------------------


@pytest.mark.parametrize("M", [256, 4096, 5000, 2**17])
def test_tiles_by_line_1(M):
    problem = one_head(4096, 64)
    k_outer, q_outer = (scaling.ruled(name, problem, M) for name in scaling.RULED)
    assert k_outer.Bc == -(-M // 256) and k_outer.Br == min(k_outer.Bc, 64)
    assert (q_outer.Br, q_outer.Bc) == (k_outer.Bc, k_outer.Br)


def test_the_planners_tiles_fit_the_memory():
    problem = one_head(4096, 64)
    for M in (2048, 8192, 65536):
        for setting in io_vs_sram.at(problem, M):
            if setting.series in io_vs_sram.FLASH:
                assert max(k.shared_bytes for k in scaling.made(setting).launched) <= 4 * M
    assert {s.series for s in io_vs_sram.at(problem, 1024)} == set(scaling.RULED)


def test_a_call_is_run_once():
    found = io_vs_sram._runnable(one_head(96, 64), Options())
    calls = [(s.series.removesuffix(scaling.RULE), s.Br, s.Bc, s.note) for s in found]
    assert len(calls) == len(set(calls)) and len(found) > len(io_vs_sram.MEMORIES) * 2 - 1
    assert not scaling.made(scaling.ruled("fa1-simt-rule", one_head(96, 64), 300))


# --- rows ------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", QUICK, ids=lambda module: module.NAME)
def test_what_is_counted_is_the_closed_form(module):
    rows = run(module)
    assert {r.machine for r in rows} == {MODEL, EMULATOR}
    counted = [r for r in rows if r.source == "counted"]
    assert {r.series for r in counted} >= set(scaling.RULED)
    same = f" {len(counted)} of {len(counted)} numbers of accesses that the emulator counted equal "
    same += "the closed form."
    assert scaling.agreement(rows) == same


@pytest.mark.parametrize("module", QUICK, ids=lambda module: module.NAME)
def test_bytes_are_measured_of_the_tiles_that_they_name(module, monkeypatch):
    rows = [r for r in measured(module, monkeypatch, options=QUICK[module]) if r.unit == "bytes"]
    assert rows and all(r.machine == "some-gpu" for r in rows)
    by_place = {}
    for row in rows:
        key = (row.series, row.head_dim, row.Br, row.Bc, row.place)
        by_place.setdefault(key, {})[row.source] = row.value
    for values in by_place.values():
        assert values["l2"] == pytest.approx(1.1 * values["model"])
        assert values["dram"] == pytest.approx(0.5 * values["model"])


def test_a_failure_keeps_its_place(monkeypatch):
    monkeypatch.setattr(counters, "available", lambda: False)
    monkeypatch.setattr(counters, "count_or_say", lambda cases, *_: ["failed: no"] * len(cases))
    settings = io_vs_sram._runnable(one_head(96, 64), Options(quick=True))
    rows = list(scaling.hardware("io_vs_sram", settings, Bench(machine="some-gpu")))
    failed = [row for row in rows if row.failed]
    assert len(failed) == 2 * len(settings)
    assert {row.note for row in failed} == {f"{s.note}; failed: no" for s in settings}
    assert {io_vs_sram.memory(row) for row in failed} <= set(io_vs_sram.MEMORIES)


# --- exponents -------------------------------------------------------------------------------


def test_a_fit_finds_the_exponent_and_its_error():
    points = {x: 3 * x**-1.5 for x in (2, 8, 32, 128)}
    found = scaling.fit(points)
    assert found.exponent == pytest.approx(-1.5) and found.error < 1e-9
    assert str(found) == "-1.50 ± 0.00 (2 to 128)"
    bent = scaling.fit({x: x + x**2 for x in (0.1, 1, 10)})
    assert 1 < bent.exponent < 2 and bent.error > 0.05
    assert scaling.fit(points, low=8) is not None and scaling.fit(points, low=32) is None


def test_the_theorems_exponents_at_line_1s_tiles():
    """M -1, d 2, N 2: within a few hundredths, for rows of the scale of the theorem."""

    def elements(d=64, N=4096, M=8192):
        setting = scaling.ruled("fa1-simt-rule", one_head(N, d), M)
        return sum(row.value for row in scaling.model("x", setting))

    over = {
        -1: {M: elements(M=M) for M in (1024, 2048, 4096, 8192, 16384)},
        2: {d: elements(d=d) for d in (32, 64, 128, 256)},
    }
    for want, points in over.items():
        assert scaling.fit(points).exponent == pytest.approx(want, abs=0.03)
    points = {N: elements(N=N) for N in (1024, 4096, 16384)}
    assert scaling.fit(points).exponent == pytest.approx(2, abs=0.03)


def test_square_blocks():
    """The closed form, against sums over blocks."""
    problem, M = one_head(64, 16), 3 * 8 * 8
    b, N, d = 8, 64, 16
    blocks = (N // b) ** 2
    scores = blocks * (d // b) * 2 * b * b + N * N
    softmax = 2 * N * N
    output = (N // b) * (d // b) * ((N // b) * 2 * b * b) + N * d
    assert io_vs_sram.blocked_standard(problem, M) == scores + softmax + output


def test_square_blocks_backward():
    """The closed form, against sums over blocks."""
    problem, M = one_head(64, 16), 3 * 8 * 8
    b, N, d = 8, 64, 16
    dP = (N // b) ** 2 * (d // b) * 2 * b * b + N * N
    row_sums = 2 * N * d + N
    dS = 3 * N * N + N
    gradients = 3 * ((N // b) * (d // b) * ((N // b) * 2 * b * b) + N * d)
    found = io_vs_sram.blocked_standard(problem, M, "bwd")
    assert found == dP + row_sums + dS + gradients


def test_backward_the_regimes_meet_near_d_squared():
    problem = one_head(4096, 64)
    rows = [r for M in (2048, 4096, 8192) for r in io_vs_sram._closed_forms(problem, M, "bwd")]
    assert {r.pass_ for r in rows} == {"bwd"}
    bound = {io_vs_sram.memory(r): r.value for r in rows if r.series == "li-liang"}
    assert bound == {M: io_model.li_liang(problem, M) for M in bound}
    # Q, O, dO and dQ twice, 20 / x^2 = 8 sqrt(3) / x + 4 at x = sqrt(M) / d, for N >> d
    x = (-8 * np.sqrt(3) + np.sqrt(192 + 320)) / 8
    assert io_vs_sram.crossing(rows) == pytest.approx(x * x * 64 * 64, rel=0.05)


def test_the_regimes_meet_near_d_squared():
    rows = [r for M in (2048, 4096, 8192) for r in io_vs_sram._closed_forms(one_head(4096, 64), M)]
    where = io_vs_sram.crossing(rows)
    # 12 / x^2 = 4 sqrt(3) / x + 3 at x = sqrt(M) / d, for N >> d
    x = (-4 * np.sqrt(3) + np.sqrt(48 + 144)) / 6
    assert where == pytest.approx(x * x * 64 * 64, rel=0.05)
    assert io_vs_sram.crossing(rows[:3]) is None
    ye = {io_vs_sram.memory(r): r.value for r in rows if r.series == "saha-ye"}
    theta = {io_vs_sram.memory(r): r.value for r in rows if r.series == "theta-flash"}
    assert ye[2048] < theta[2048] and ye[8192] == theta[8192]
    assert theta[4096] == io_model.theta_flash(one_head(4096, 64), 4096)


# --- tables and figures ----------------------------------------------------------------------


@pytest.mark.parametrize("module", QUICK, ids=lambda module: module.NAME)
def test_the_table(module, tmp_path, monkeypatch):
    rows = measured(module, monkeypatch, machine=report.MACHINE)
    text = report.text(module.NAME, recorded(tmp_path, module.NAME, rows))
    lines = [line for line in text.splitlines() if line.startswith("| ")][2:]
    assert 5 <= len(lines) <= 13 if module is io_vs_sram else len(lines) == 14
    backward = [x.split(" | ")[-3] for x in lines if "(one block per head), line 1" in x]
    want = [-1] if module is io_vs_sram else [2, 2]
    assert [float(x.split(" ")[0]) for x in backward] == pytest.approx(want, abs=0.05)
    of_rule = [x for x in lines if "FA-1 (K/V outer), line 1's tiles" in x and "below" not in x]
    *over_n, ruled = of_rule
    assert [x.split(" | ")[3][:4] for x in over_n] == ["2.00"] * (module is not io_vs_sram)
    # Closed form, L2 and DRAM are the same power here.
    exponents = [float(cell.split(" ")[0]) for cell in ruled.strip("| ").split(" | ")[-3:]]
    want = -1 if module is io_vs_sram else 2
    assert exponents == pytest.approx([want] * 3, abs=0.05)
    if module is io_vs_sram:
        said = "FA-1 (tiles by line 1 of FA-1's Algorithm 1) accesses fewer elements than standard "
        assert f"{said}attention (square blocks) from M = 1.3" in text


@pytest.mark.parametrize("module", QUICK, ids=lambda module: module.NAME)
def test_the_figure_without_and_with_a_gpu(module, monkeypatch):
    without = module.draw(run(module))
    assert len(without.axes[0].lines) >= 4
    figure = module.draw(measured(module, monkeypatch, options=QUICK[module]))
    shown = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    assert {"L2, measured", "DRAM, measured", "closed form"} <= set(shown)
