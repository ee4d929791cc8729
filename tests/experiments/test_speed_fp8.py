"""The speed in 8 bits: what is timed, its rows, the table and the figure."""

import math

import numpy as np
import pytest

from experiments import speed_fp8
from experiments.lab.measure.timing import Timing
from experiments.lab.record.options import Bench, Options

MS = {"float8_e4m3fn": 1.0, "float16": 1.6, "bfloat16": 2.0}


def timed(problem, series):
    """Times by dtype; quantising takes 0.25 ms, and FA-1 in float16 fails."""
    if (series, problem.dtype) == ("fa1-wgmma-splits", "float16"):
        raise ValueError("no kernel")
    ms = 0.25 if series == "quantize" else MS[problem.dtype]
    return Timing(ms, ms, ms, 5, math.nan if series == "quantize" else 0.01)


def synthetic():
    """Rows of a quick run, as the figure draws them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speed_fp8, "timed", timed)
        patch.setattr(speed_fp8, "matmul", lambda: Timing(1300.0, 1290.0, 1310.0, 5))
        made = list(speed_fp8.measure(Options(quick=True), Bench(machine="some-gpu")))
    return [row for each in made for row in (each if isinstance(each, list) else [each])]


def test_rows_have_times_and_speeds():
    rows = synthetic()
    of = {(r.series, r.dtype, r.causal, r.metric): r for r in rows if r.series != "torch-matmul"}
    assert of["fa2-wgmma", "float8_e4m3fn", False, "time"].value == 1.0
    assert of["quantize", "float8_e4m3fn", True, "time"].value == 0.25
    assert "no kernel" in of["fa1-wgmma-splits", "float16", False, "time"].note
    assert {r.head_dim for r in rows if r.series != "torch-matmul"} == {64}


def test_the_table_and_the_figure():
    rows = synthetic()
    speed = 4 * 16384 * 512 * 2048 / 1e9  # TFLOP/s of a call of 1 ms
    lines = speed_fp8.table(rows).body.splitlines()[2:]
    cells = [f"{speed / ms:.0f}" for ms in (1.0, 1.6, 2.0, 1.0)]
    assert lines[0] == f"| 64 | no | 512 | {' | '.join(cells)} | - | - | {speed / 1.25:.0f} |"
    assert len(lines) == 2
    figure = speed_fp8.draw(rows)
    title = figure.legends[0].get_title().get_text()
    assert title == "FA-2 in e4m3 is up to 1.60 times as fast as fp16"
    assert speed_fp8.draw([]) is speed_fp8.table([]) is None


def test_a_wrong_result_is_refused(monkeypatch):
    class Array(np.ndarray):
        def float(self):
            return self

        def norm(self):
            return np.linalg.norm(self)

    half = np.ones((1, 1, 2, 2), np.float32).view(Array)
    monkeypatch.setattr(speed_fp8, "inputs", lambda shape: [half] * 3)
    monkeypatch.setattr(speed_fp8.fa_numba, "flash_attention_2", lambda *_, **__: half)
    problem = speed_fp8.Problem(1, 1, 1, 2, 2, 2, dtype="float8_e4m3fn")
    assert speed_fp8.check(1.05 * half, problem, "fa2-wgmma") < speed_fp8.NEAR
    with pytest.raises(ValueError, match="differs from fp16 by 0.5"):
        speed_fp8.check(1.5 * half, problem, "fa2-wgmma")


def counted(monkeypatch, found):
    """Return the rows that are recorded if the kernels of each call have the counters `found`."""
    cases = []

    def count_kernels(asked, metrics):
        cases.extend((case.problem.dtype, case.problem.seqlen_q, case.series) for case in asked)
        assert metrics == tuple(speed_fp8.BUSY.values())
        return [found] * len(asked)

    monkeypatch.setattr(speed_fp8.counters, "count_kernels", count_kernels)
    rows = list(speed_fp8.busy(Bench(machine="some-gpu")))
    assert len(cases) == len(speed_fp8.COUNTED) and {case[2] for case in cases} == {"fa2-wgmma"}
    return rows


def test_the_shares_of_busy_units_are_those_of_the_last_kernel(monkeypatch):
    turn, forward = ({name: n / 8 + i / 4 for i, name in enumerate(speed_fp8.BUSY.values())}
                     for n in (0, 2))  # fmt: skip
    rows = counted(monkeypatch, [turn, forward])
    assert [row.value for row in rows[:3]] == [0.25, 0.5, 0.75]
    lines = speed_fp8.units(rows).body.splitlines()[2:]
    assert lines[0] == "| fp16 | no | 4k | 25% | 50% | 75% |" and len(lines) == 8
    assert speed_fp8.units(synthetic()) is None


def test_a_call_without_counters_has_the_reason(monkeypatch):
    rows = counted(monkeypatch, "failed: no memory")
    assert {(row.value, row.note) for row in rows} == {(None, "failed: no memory")}


def test_without_nsight_compute_the_run_says_so(monkeypatch):
    def fails(*_):
        raise speed_fp8.counters.CountersError("ncu is missing")

    said = []
    monkeypatch.setattr(speed_fp8.counters, "count_kernels", fails)
    bench = Bench(machine="some-gpu")
    monkeypatch.setattr(bench, "say", said.append, raising=False)
    assert list(speed_fp8.busy(bench)) == []
    assert said == ["  no hardware counters: ncu is missing"]
