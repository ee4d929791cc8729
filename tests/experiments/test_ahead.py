"""Kernels that are compiled in parallel before an experiment runs on a GPU."""

import io
from dataclasses import replace

from experiment_helpers import made_up
from rich.console import Console

from experiments.lab.measure import ahead
from experiments.lab.record.options import Options
from experiments.lab.record.store import EMULATOR, Store
from experiments.lab.run import runner
from fa_numba import bounds
from fa_numba.host.ahead import Ahead
from fa_numba.problem import Problem

PROBLEM = Problem(1, 2, 2, 128, 128, 64, dtype="float16")


def row(series="fa2-mma", **fields):
    return made_up("speed_fp16", PROBLEM, series, 1.0, **fields)


def planned(*rows):
    with bounds.named("A100").planning():
        return list(ahead.plans(rows))


def test_each_call_of_ours_is_planned_once():
    again = replace(row(), metric="speed")
    (plan,) = planned(row(), again, row("torch-flash"), row(machine=EMULATOR))
    assert (plan.algorithm, plan.passes, plan.unit) == ("fa2", "fwd", "mma")
    assert plan.problem == PROBLEM and plan.kv_splits == 1


def test_both_passes_and_the_tiles_of_a_row():
    plans = planned(row("fa1-mma", pass_="fwd+bwd"), row(Br=64, Bc=32))
    assert [(plan.algorithm, plan.passes) for plan in plans] == [
        ("fa1", "fwd"), ("fa1", "bwd"), ("fa2", "fwd"),
    ]  # fmt: skip
    assert (plans[-1].tiles.Br, plans[-1].tiles.Bc) == (64, 32)


def test_calls_that_this_gpu_cannot_plan_are_left_out():
    assert planned(row("fa2-wgmma"), row(head_dim=None), row(Br=7, Bc=9)) == []


def test_a_complete_run_on_a_gpu_compiles_first(monkeypatch, tmp_path):
    found = []

    def compile_ahead(plans):
        with bounds.named("H100").planning():
            found.extend(plans)
        return Ahead(3, 1)

    monkeypatch.setattr(runner, "compile_ahead", compile_ahead)
    monkeypatch.setenv("FA_NUMBA_CACHE", str(tmp_path / "kernels"))
    console = Console(file=io.StringIO())
    running = runner.Runner(Options(out=tmp_path), ["run", "crossover"], console)
    running._compile_ahead("block_sparse")
    machines = {x for x in Store(runner.FIGURES).machines("block_sparse") if x != EMULATOR}
    assert machines and found
    assert "compiled 3 kernels in parallel in" in console.file.getvalue()


def test_an_error_while_compiling_ahead_ends_no_run(monkeypatch, tmp_path):
    def broken(plans):
        raise RuntimeError("a process ended")

    monkeypatch.setattr(runner, "compile_ahead", broken)
    monkeypatch.setenv("FA_NUMBA_CACHE", str(tmp_path / "kernels"))
    console = Console(file=io.StringIO())
    running = runner.Runner(Options(out=tmp_path), ["run", "crossover"], console)
    running._compile_ahead("block_sparse")
    assert "not compiled in parallel: RuntimeError('a process ended')" in console.file.getvalue()
    monkeypatch.setenv("FA_NUMBA_CACHE", "")
    monkeypatch.setattr(runner, "compile_ahead", None)
    running._compile_ahead("block_sparse")  # compiled kernels would not be stored
