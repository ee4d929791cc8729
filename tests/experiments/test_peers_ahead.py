"""Kernels of other libraries that are compiled in processes before an experiment runs on a GPU."""

import io
import os
from types import SimpleNamespace

import pytest
from rich.console import Console

from experiments import shapes, speed_fp16
from experiments.lab.measure import peers
from experiments.lab.record.options import Options
from experiments.lab.run import peers_ahead, runner
from fa_numba import bounds
from fa_numba.problem import Problem

PROBLEM = Problem(1, 2, 2, 128, 128, 64, dtype="float16")


@pytest.fixture
def experiment(monkeypatch):
    """An experiment that names three groups of calls. ``ran`` lists the calls that ran."""
    ran = []

    def make(series, pass_, problem, arrays):
        assert arrays == "on the GPU" and problem == PROBLEM
        if series == "bad":
            raise ValueError("no such kernel")
        return lambda: ran.append((series, pass_))

    def peer_calls(options):
        assert options == Options()
        yield [("one", "fwd", PROBLEM), ("one", "bwd", PROBLEM)]
        yield [("bad", "fwd", PROBLEM)]
        yield [("two", "fwd", PROBLEM)]

    module = SimpleNamespace(make=make, peer_calls=peer_calls)
    monkeypatch.setattr(peers_ahead, "load", lambda name: {"named": module}.get(name, make))
    monkeypatch.setattr(peers, "on_device", lambda arrays, dtype: "on the GPU")
    monkeypatch.setattr(peers_ahead.device, "synchronize", lambda: None)
    return SimpleNamespace(ran=ran)


def test_each_process_runs_its_share_of_the_groups(experiment):
    first, second = (peers_ahead.run_part("named", Options(), part, 2) for part in (0, 1))
    assert experiment.ran == [("one", "fwd"), ("one", "bwd"), ("two", "fwd")]
    assert first == (3, []) and second[0] == 0
    (failure,) = second[1]
    assert failure.startswith("bad, fwd, ") and "ValueError('no such kernel')" in failure


def test_the_processes_results_are_put_together_and_printed(experiment, monkeypatch):
    parts = []

    class Pool:
        def __init__(self, processes, mp_context):
            parts.append((processes, mp_context.get_start_method()))

        def __enter__(self):
            return SimpleNamespace(map=map)

        def __exit__(self, *error):
            pass

    monkeypatch.setattr(peers_ahead, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    console = Console(file=io.StringIO(), width=200)
    running = runner.Runner(Options(), ["run", "named"], console)
    running._compile_peers_ahead("named")
    said = console.file.getvalue()
    assert parts == [(2, "spawn")] and "compiled peers by 3 calls in parallel" in said
    assert "not compiled in parallel: bad, fwd, " in said
    running._compile_peers_ahead("another")  # names no calls
    assert console.file.getvalue() == said and len(parts) == 1
    assert os.environ[peers_ahead.STORES] == "1"


def test_processes_that_fail_are_reported(monkeypatch):
    def broken(name, options):
        raise OSError("no process")

    monkeypatch.setattr(peers_ahead, "compile_peers", broken)
    console = Console(file=io.StringIO(), width=200)
    runner.Runner(Options(), ["run", "named"], console)._compile_peers_ahead("named")
    assert "peers were not compiled in parallel: OSError('no process')" in console.file.getvalue()


def test_the_calls_that_compile_for_seconds_are_named(monkeypatch):
    monkeypatch.setattr(peers, "here", lambda series: tuple(series))
    with bounds.named("H200").planning():
        of_shapes = list(shapes.peer_calls(Options()))
        of_speed = list(speed_fp16.peer_calls(Options()))
        for point in shapes.points(Options()):
            for pass_ in point.passes:
                for series in {peers.FLEX, peers.FA4} & set(shapes.at(point, pass_)):
                    assert any((series, pass_, point.problem) in group for group in of_shapes)
    # flash-attn-4: two head dimensions in all passes and one forward, with and without a mask
    fa4 = [group for group in of_speed if group[0][0] == peers.FA4]
    assert [len(group) for group in fa4] == [3, 3, 3, 3, 1, 1]
    assert {problem.seqlen_q for group in fa4 for *_, problem in group} == {512}
    flex = [group for group in of_speed if group[0][0] in peers.FLEX_BACKENDS]
    assert len(flex) == 2 * 2 * 2 * 2  # backends, head dimensions, masks and lengths
