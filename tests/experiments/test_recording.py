"""A recording on a GPU: whole or not at all, gone on with; what is measured anew."""

import errno
import io
import json
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from experiment_helpers import put_on_path
from rich.console import Console

from experiments import __main__ as command
from experiments.lab.measure import clocks, counters, peers
from experiments.lab.measure.series import row_fields
from experiments.lab.measure.workloads import one_head
from experiments.lab.record import (
    code_digest,
    kept,
    outdated,
    provenance,
    ran,
    recorder,
    registry,
)
from experiments.lab.record.options import FIGURES, Bench, Options
from experiments.lab.record.store import MODEL, Row, Store
from experiments.lab.run import origin, runner
from experiments.lab.show import recordings_page, report
from fa_numba import device
from fa_numba.choices.requests import Choices, Request
from fa_numba.host.ahead import Ahead
from fa_numba.host.planning import planned
from fa_numba.kernels.simt import softmax

NAME, GPU = "standing_in", "some-gpu"


def timed(N, value, series="fa2-simt", **fields):
    common = {"machine": GPU, "source": "measured", "metric": "time", "unit": "ms"}
    fields = common | row_fields(one_head(N, 64, False)) | fields
    return Row(experiment=NAME, series=series, value=value, **fields)


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """Runs a stand-in experiment on a GPU that there is not; `measured` are the lengths timed,
    `source` is the digest of its code and `sources` that of all files.
    """
    monkeypatch.setattr(kept, "sources", lambda: run.sources)
    monkeypatch.setattr(ran, "code_of", lambda name: {"experiments.standing_in": run.source})
    monkeypatch.setattr(ran, "_of", lambda patterns: run.calls)
    monkeypatch.setattr(runner, "FIGURES", tmp_path / "none")
    for module in (counters, peers):
        monkeypatch.setattr(module, "available", lambda: True)

    def measure(options, given):
        run.given = given
        yield timed(1, 1.0, machine=MODEL, source="model")
        for N in given.each(run.lengths, "timing"):
            given.say(f"at {N}")
            if N == run.stop:
                raise run.error
            run.measured.append(N)
            run.launch(N)
            yield timed(N, run.value * N)
            yield timed(N, run.peer * N, "torch-fa2")
        run.measured.append("counters")
        yield from run.beside

    module = SimpleNamespace(NEEDS=("GPU",), measure=measure, draw=lambda rows: None)
    monkeypatch.setattr(runner, "load", lambda name: module)

    def run(*command, again=True, **options):
        run.measured = []
        console = Console(record=True, width=200, file=run.output or io.StringIO())
        running = runner.Runner(Options(out=tmp_path / "out", **options), list(command), console)
        running.machine, running.gpu = GPU, {"name": "Some GPU", "multiprocessors": 4}
        running._origin._gpu = running.gpu
        running._origin._common |= {"commit": run.commit, "dirty": False}
        run.running, run.report = running, running.reports.setdefault(NAME, runner.Report())
        try:
            running.measure(NAME, again=again)
        finally:
            run.text = console.export_text()
            run.rows = run.store.read(NAME, GPU)
        return run.measured

    run.store, run.partial = Store(tmp_path / "out"), tmp_path / "out/partial"
    run.source, run.sources, run.calls, run.launch = "1", "1", "1", lambda N: None
    run.lengths, run.value, run.peer, run.beside = (32, 64, 128), 1.0, 2.0, []
    run.stop, run.error, run.commit, run.output = None, KeyboardInterrupt(), "1" * 40, None
    return run


# --- whole or not at all ---------------------------------------------------------------------


def test_a_recording_is_of_one_run_that_is_described(bench):
    assert bench() == [32, 64, 128, "counters"]
    (about,) = bench.store.runs(NAME, GPU)
    assert {row.run for row in bench.rows} == {about["id"]} and len(bench.rows) == 6
    wanted = {"commit", "dirty", "date", "command", "seconds", "clocks", "device", "host", "ncu"}
    assert wanted | {"ran", "l2_counter", "torch", "nvidia_smi", "protocol"} <= set(about)
    assert about["host"]["cores"] == os.cpu_count() and about["commit"] == "1" * 40
    assert not list(bench.partial.iterdir())


def test_an_interrupted_run_leaves_the_recording_and_is_gone_on_with(bench):
    bench()
    before = {path: path.read_bytes() for path in bench.store.root.rglob("data/*/*")}
    assert len(before) == 4
    bench.value, bench.stop = 1.1, 128
    with pytest.raises(KeyboardInterrupt):
        bench()
    assert {path: path.read_bytes() for path in before} == before
    bench.stop, bench.value = None, 1.2
    assert bench() == [128, "counters"]
    assert "timing: 2 of 3 are stored already" in bench.text
    ours = {row.seqlen_q: row.value for row in bench.rows if row.series == "fa2-simt"}
    assert ours == {32: 32 * 1.1, 64: 64 * 1.1, 128: 128 * 1.2}
    # Of two processes at one commit, each with its description; rows say which.
    runs = {run["id"]: run for run in bench.store.runs(NAME, GPU)}
    of = {row.seqlen_q: row.run for row in bench.rows}
    assert len(runs) == 2 and of[32] == of[64] != of[128] and set(of.values()) == set(runs)
    assert provenance.dates_and_commits(list(runs.values())).endswith(", commit 1111111")
    assert not list(bench.partial.iterdir())


def test_a_run_with_a_time_limit_adds_to_the_recording(bench):
    """It stops after the call in which its time ends, and keeps rows of any other place."""
    bench.beside = [timed(256, 7.0, note="2 ranks")]
    bench()
    bench.value, bench.beside = 1.1, [timed(256, 4.0, note="4 ranks")]
    assert bench(seconds=1e-9) == [32, "counters"]
    ours = {
        row.seqlen_q: row.value for row in bench.rows if row.series == "fa2-simt" and row.n is None
    }
    assert {N: ours[N] for N in (32, 64, 128)} == {32: 32 * 1.1, 64: 64.0, 128: 128.0}
    assert [row.value for row in bench.rows if row.seqlen_q == 256] == [7.0, 4.0]
    bench.stop, bench.value = 64, 1.2
    with pytest.raises(KeyboardInterrupt):
        bench(seconds=100)
    assert 32 * 1.2 in [row.value for row in bench.rows]
    assert not list(bench.partial.iterdir()) and len(bench.store.runs(NAME, GPU)) == 3
    # What the same code has measured is given to the experiment.
    bench.stop = None
    bench(seconds=100)
    assert {row.seqlen_q for row in bench.given.stored} == {32, 64, 128, 256}
    bench.source = "2"
    bench(seconds=100)
    assert bench.given.stored == []


class Full(io.StringIO):
    """An output on a disk that is full once it is told to print of the last length."""

    def write(self, text):
        if "at 128" in text:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(text)


def test_a_full_disk_is_a_line_and_the_run_is_gone_on_with(bench):
    bench.stop, bench.error = 128, OSError(errno.ENOSPC, "No space left on device", "a.csv")
    assert bench() == [32, 64]
    assert "'a.csv' cannot be read or written: No space left on device" in bench.text
    assert "Traceback" not in bench.text
    bench.stop = None
    assert bench() == [128, "counters"] and len(bench.rows) == 6


def test_an_output_on_a_full_disk_ends_the_run_and_loses_no_rows(bench):
    bench.output = Full()
    with pytest.raises(OSError, match="No space left on device"):
        bench()
    bench.output = None
    assert bench() == [128, "counters"] and len(bench.rows) == 6


@pytest.mark.parametrize("change", ["sources", "commit"])
def test_an_interrupted_run_of_other_sources_is_begun_anew(bench, change):
    bench.stop = 128
    with pytest.raises(KeyboardInterrupt):
        bench()
    bench.stop = None
    if change == "sources":
        bench.sources = "2"
    else:
        bench.commit = "2" * 40
    assert bench() == [32, 64, 128, "counters"]
    assert len(bench.store.runs(NAME, GPU)) == 1


def test_a_killed_run_is_gone_on_with_too(bench):
    """What it had measured is on the disk as soon as an item is done."""
    found = []

    def killed():
        (path,) = bench.partial.iterdir()
        found.append(path.read_text())
        yield timed(256, 1.0)

    bench.beside = killed()
    bench()
    bench.partial.joinpath(f"{NAME}.json").write_text(found[0])
    bench.beside = []
    assert bench() == ["counters"] and len(bench.rows) == 6


def test_a_broken_run_leaves_the_recording(bench):
    bench()
    before = bench.rows
    bench.stop, bench.error, bench.value = 64, RuntimeError("broken"), 3.0
    bench()
    assert bench.report.error == "RuntimeError: broken" and bench.rows == before


def test_loops_of_one_label_are_told_apart(tmp_path):
    def begun(of):
        return recorder.Recorder(Store(tmp_path), NAME, lambda m: {"id": "a", "seconds": 2.5}, of)

    of = {"commit": 1}
    first = begun(of)
    for _ in range(2):
        for item in first.each(first.left("ab", "timing")):
            first.add(*[timed(32 << _, 1.0)] if item == "a" else [])
    first.add(timed(4096, 1.0))
    again = begun(of)
    assert [again.left("ab", "timing") for _ in range(2)] == [[], []]
    assert [item for _, item in again.left("ab", "timing")] == ["a", "b"]
    # Without regard to what may differ in a run of the same.
    assert begun(of | {"date": "later"}).finish(complete=True)[GPU].measured == 2
    assert not begun({"commit": 2}).finish(complete=True)


def test_a_bench_says_how_many_items_are_stored_if_any_is(tmp_path):
    def left():
        said = []
        made = recorder.Recorder(Store(tmp_path), NAME, lambda m: {"id": "a"})
        found = Bench(say=said.append, recorder=made).left("ab", "timing")
        return made, found, said

    assert Bench(say=None).left("ab", "timing") == [("", "a"), ("", "b")]
    made, found, said = left()
    assert [item for _, item in found] == ["a", "b"] and said == []
    for item in made.each(found):
        if item == "b":
            break
    assert left()[1:] == ([found[1]], ["  timing: 1 of 2 are stored already"])


def test_dates_and_commits_of_runs():
    def said(*runs):
        known = ({"date": date, "commit": n and n * 40, "dirty": False} for date, n in runs)
        return provenance.dates_and_commits([{k: v for k, v in x.items() if v} for x in known])

    assert said() == said((None, None)) == "undated, commit unknown"
    assert said(("2026-01-02", "a"), ("2026-01-01", "a")) == "2026-01-02, commit aaaaaaa"
    two = said(("2026-01-02", "b"), ("2026-01-01", "a"))
    assert two == "2026-01-01 to 2026-01-02, 2 commits: bbbbbbb, aaaaaaa"
    same = said(("2026-01-02", "b"), ("2026-01-02", "a"))
    assert same == "2026-01-02, 2 commits: bbbbbbb, aaaaaaa"
    assert said(("2026-01-02", "b"), (None, "a")).startswith("2026-01-02 to undated, 2 commits")


def test_a_footnote_names_the_commits_of_the_rows_that_are_drawn():
    runs = [
        {"id": "b", "commit": "2" * 40, "date": "2026-01-02", "dirty": True},
        {"id": "a", "commit": "1" * 40, "date": "2026-01-01", "device": {"name": "Some GPU"}},
    ]
    rows = [replace(timed(N, 1.0), run=run) for N, run in ((32, "a"), (64, "b"))]
    both = provenance.footnote({GPU: runs}, rows)
    assert both == "recorded on Some GPU, 2026-01-01 to 2026-01-02, 2 commits: 2222222+, 1111111"
    one = provenance.footnote({GPU: runs}, rows[:1])
    assert one == "recorded on Some GPU, 2026-01-01, commit 1111111"
    traffic = replace(rows[0], source="l2")
    named = [runs[0], runs[1] | {"l2_counter": "a + b"}]
    assert provenance.footnote({GPU: named}, [traffic, rows[1]]).endswith("\nL2 is a + b")


# --- nothing lost ----------------------------------------------------------------------------


@pytest.mark.parametrize("tool", [peers, counters])
def test_nothing_is_measured_without_what_the_recording_has_numbers_of(bench, monkeypatch, tool):
    bench.beside = [timed(64, 1.0, source="l2", metric="traffic", unit="bytes")]
    bench()
    before = bench.rows
    monkeypatch.setattr(tool, "available", lambda: False)
    assert bench() == [] and bench.rows == before
    assert "missing here" in bench.report.error and "--replace" in bench.report.error
    bench.value = 1.3
    given = command._options(command._parser().parse_args(["run", "host_cost", "--replace"]))
    assert bench(replace=given.replace) == [32, 64, 128, "counters"] and not bench.report.error
    assert {row.value / row.seqlen_q for row in bench.rows if row.metric == "time"} == {2.0, 1.3}
    monkeypatch.setattr(tool, "available", lambda: False)
    assert bench(seqlens=(32,)) != []  # a part goes elsewhere


# --- what changed -----------------------------------------------------------------------------


def measures_again(bench):
    """Whether `experiments all` would measure it."""
    bench(again=False)
    assert not bench.report.error
    return bool(bench.measured)


REQUEST = Request(Choices("fa2", unit="mma"), one_head(256, 64, dtype="float16"), True, 232448,
                  (9, 0), 132)  # fmt: skip


def launched(*plans, kernels=()):
    """Say that the kernels of these plans, and other kernels, were launched on a GPU."""
    with mock.patch.object(device.select, "on_gpu", lambda: True):
        every = [kernel for plan in plans for kernel in plan.launched]
        device.launching._note_launched([*every, *kernels], [plan.asked for plan in plans])


def test_what_changed_is_measured(bench):
    assert measures_again(bench) and not measures_again(bench)
    assert "because the code and the kernels have not changed" in bench.text
    bench.source = "2"
    assert measures_again(bench) and not measures_again(bench)
    bench.sources = bench.calls = "2"  # of which no kernel has anything
    assert not measures_again(bench)
    assert bench() and bench(again=False, recount=True) and bench(again=False, seqlens=(32,))


def test_other_kernels_and_launches_are_measured(bench, monkeypatch):
    now = {}

    def plan(request):
        return replace(planned(request), **now)

    bench.launch = lambda N: launched(plan(REQUEST))
    monkeypatch.setattr(ran, "plan_again", plan)
    assert measures_again(bench) and not measures_again(bench)
    (about,) = bench.store.runs(NAME, GPU)
    assert set(about["ran"]) == {"experiment", "plans"}
    (line,) = about["ran"]["plans"].values()
    assert line.startswith("fa2_forward ") and outdated.state(bench.store, NAME, GPU).why == ()
    first = planned(REQUEST).launches[0]
    backward = planned(replace(REQUEST, choices=Choices("fa2", "bwd")))
    others = {
        "fa2_forward of fa2 fwd": replace(first.kernel, threads=first.kernel.threads * 2),
        "row_sums_of_groups of fa2 fwd": backward.launched[0],
    }
    for why, kernel in others.items():
        now["launches"] = (replace(first, kernel=kernel),)
        assert outdated.state(bench.store, NAME, GPU).why == (why,)
        assert measures_again(bench) and not measures_again(bench)
    now["launches"] = (replace(first, grid=(1, 1, 1)),)
    assert measures_again(bench) and not measures_again(bench)


def test_kernels_that_no_request_describes_are_measured_with_their_modules(bench, monkeypatch):
    bench.launch = lambda N: launched(kernels=[softmax.MAKERS["online"]()])
    assert measures_again(bench) and not measures_again(bench)
    bench.calls = "2"  # what turns calls into launches
    assert outdated.state(bench.store, NAME, GPU).state == "outdated"
    assert measures_again(bench) and not measures_again(bench)
    monkeypatch.setattr(code_digest, "of_module", lambda name: "other")
    assert measures_again(bench) and not measures_again(bench)


def test_what_another_process_launches_is_described(bench):
    """Nsight Compute's program and the ranks of a ring tell it, the last ones more and more."""
    bench.launch = lambda N: ran.tell({"plans": {f"request {n}": "line" for n in range(N)}})
    bench.lengths = (1, 2)
    bench()
    (about,) = bench.store.runs(NAME, GPU)
    assert list(about["ran"]["plans"]) == ["request 0", "request 1"]
    ran.tell({"plans": {}})  # outside of a run


def test_both_parts_of_an_interrupted_run_say_what_they_launched(bench):
    plans = [planned(replace(REQUEST, problem=one_head(N, 64, dtype="float16"))) for N in (64, 128)]
    bench.launch = lambda N: launched(plans[N == 128])
    bench.stop = 128
    with pytest.raises(KeyboardInterrupt):
        bench()
    bench.stop = None
    assert bench() == [128, "counters"]
    found = [list(run["ran"]["plans"]) for run in bench.store.runs(NAME, GPU)]
    assert sorted(found) == sorted([ran.encoded(plan.asked)] for plan in plans)
    assert not measures_again(bench)


def test_a_recording_that_does_not_name_its_kernels_is_measured(bench):
    bench()
    path = bench.store.path(NAME, GPU, ".json")
    (about,) = bench.store.runs(NAME, GPU)
    path.write_text(json.dumps({k: about[k] for k in ("commit", "date", "id")} | {"sources": "1"}))
    state = outdated.state(bench.store, NAME, GPU)
    assert (state.state, str(state)) == (
        "unknown", f"{NAME}/{GPU}.csv: unknown: recorded before runs named their kernels"
    )  # fmt: skip
    assert measures_again(bench)
    assert outdated.state(bench.store, NAME, GPU).state == "current"


def test_the_command_lists_every_recording(monkeypatch, capsys):
    found = [outdated.State("a", GPU, "current"), outdated.State("b", GPU, "outdated", ("x", "y"))]
    monkeypatch.setattr(outdated, "states", lambda store: iter(found[:run]))
    for run, status in ((1, 0), (2, 1)):
        assert command.main(["outdated"]) == status
        lines = capsys.readouterr().out.splitlines()
        assert lines == [f"a/{GPU}.csv: current", f"b/{GPU}.csv: outdated: x, y"][:run]
    monkeypatch.undo()
    monkeypatch.setattr(outdated, "state", lambda store, *where: where)
    every = set(outdated.states(Store(FIGURES)))
    assert {("speed", "nvidia-h200"), ("speed", "model")} & every == {("speed", "nvidia-h200")}
    assert ("io_vs_seqlen", "emulator") in every


def test_the_page_of_recordings_has_every_recording_and_its_origin(tmp_path, monkeypatch, capsys):
    """The states are those of the last command; recordings of GPUs are those of the files."""
    store = Store(FIGURES)
    page = recordings_page.PAGE.read_text()
    cells = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| `")]
    monkeypatch.setattr(outdated, "state", lambda store, *where: where)
    every = set(outdated.states(store))
    assert {tuple(of[0].strip("`").removesuffix(".csv").split("/")) for of in cells} == every
    for name, where, when, state, why in cells:
        assert state in ("current", "outdated", "unknown") and (why == "-") == (state == "current")
        experiment, machine = name.strip("`").removesuffix(".csv").split("/")
        if machine != "emulator":
            assert (where, when) == recordings_page.origin(store, experiment, machine)
    monkeypatch.setattr(recordings_page, "PAGE", tmp_path / "page.md")
    found = [outdated.State("speed", "nvidia-h200", "outdated", ("x", "y"))]
    monkeypatch.setattr(outdated, "states", lambda store: iter(found))
    assert command.main(["outdated", "--write"]) == 1
    line = recordings_page.PAGE.read_text().splitlines()[-1]
    assert line.startswith("| `speed/nvidia-h200.csv` | NVIDIA H200 | 20")
    assert line.endswith(" | outdated | x, y |")


def test_an_interruption_ends_the_profiler_and_what_it_profiles(tmp_path, monkeypatch):
    pid = tmp_path / "pid"
    # It interrupts itself: once the program runs and is waited for.
    text = f"#!/bin/sh\nsleep 60 &\necho $! > {pid}\nsleep 1\nkill -ALRM $PPID\nwait\n"
    put_on_path(monkeypatch, tmp_path / "ncu", text)
    case = counters.Case("fa2-simt", one_head(64, 64))
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            counters.count([case], counters.TRAFFIC)
    finally:
        signal.signal(signal.SIGALRM, before)
    child, end = int(pid.read_text()), time.monotonic() + 20
    while time.monotonic() < end:
        try:
            state = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            break
        if state == "Z":  # dead, and nobody has asked how it ended
            break
        time.sleep(0.05)
    else:
        pytest.fail("the profiled program runs on")


def test_all_measures_what_changed_and_draws_everything(monkeypatch):
    """`run` measures in any case."""
    done = []

    class Running:
        machine, reports = GPU, {}

        def __init__(self, options, arguments, console):
            pass

        def measure(self, name, *, again):
            done.append((name, again))

        def draw(self, name):
            done.append(f"drawn {name}")
            self.reports[name] = runner.Report(drawn_from=[GPU])

    monkeypatch.setattr(command, "Runner", Running)
    monkeypatch.setattr(command, "names", lambda: ["speed", "ring"])
    assert command.main(["all"]) == command.main(["run", "ring"]) == 0
    assert done == [
        *(("speed", False), "drawn speed", ("ring", False), "drawn ring"),
        *(("ring", True), "drawn ring"),
    ]


# --- another card ----------------------------------------------------------------------------

# A card's name, compute capability, and the units of an H200's series that it lacks.
CARDS = [
    ("Tesla T4", "7.5", ("mma", "wgmma")),
    pytest.param("NVIDIA GeForce RTX 4090", "8.9", ("wgmma",), marks=pytest.mark.slow),
    pytest.param("NVIDIA B200", "10.0", ("wgmma",), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("card, capability, lacks", CARDS, ids=["T4", "RTX 4090", "B200"])
def test_a_new_card_is_recorded_and_drawn(card, capability, lacks, monkeypatch, tmp_path):
    """Cut off and gone on with, under its name; the figure is of its own rows."""
    name = "loop_order"
    known = [
        x for x in Store(FIGURES).read(name, report.MACHINE) if x.series.split("-")[1] not in lacks
    ]
    machine = origin.slug(card)
    mine = [replace(x, machine=machine, run="", value=3 * x.value) for x in known if x.value]
    stops = [True]

    def measure(options, bench):
        for n in bench.each(range(2), "timing"):
            if n == 1 and stops.pop():
                raise KeyboardInterrupt
            yield from mine[n::2]

    about = {"name": card, "multiprocessors": 4, "compute_capability": capability}
    monkeypatch.setattr(runner.device, "gpu_available", lambda: True)
    monkeypatch.setattr(runner.device, "describe", lambda: about)
    monkeypatch.setattr(kept, "sources", lambda: "")
    monkeypatch.setattr(ran, "_of", lambda patterns: "")
    drawn = registry.load(name)
    module = SimpleNamespace(NEEDS=("GPU",), measure=measure, draw=drawn.draw)
    monkeypatch.setattr(runner, "load", lambda name: module)
    monkeypatch.setattr(runner, "compile_ahead", lambda plans: Ahead(0, 0))

    def run():
        running = runner.Runner(Options(out=tmp_path), ["all"], Console(file=io.StringIO()))
        running.measure(name, again=False)
        return running

    with pytest.raises(KeyboardInterrupt):
        run()
    stops.append(False)
    running = run()
    running.draw(name)
    said = running.console.file.getvalue()
    assert "timing: 1 of 2 are stored already" in said and f"{name}.svg and .png: drawn" in said
    assert len(Store(tmp_path).read(name, machine)) == len(mine)
    assert running.reports[name].drawn_from == [machine]


# --- clocks ----------------------------------------------------------------------------------

SAMPLES = """1980, 3201, 120.5, 35, 0, 0x0000000000000001
1755, 3201, 690.25, 61, 100, 0x0000000000000004
1905, 3201, 640, 60, 97, 0x0000000000000000
1830, 3201, 660, 62, 80, 0x0000000000000024
1980, 3201, 12"""


def test_clocks_are_of_the_samples_in_which_the_gpu_works():
    found = clocks.summarize(SAMPLES)
    assert (found["samples"], found["busy"]) == (4, 3)
    assert found["SM clock, MHz"] == [1755, 1830, 1905]
    assert found["power, W"] == [640, 660, 690.25]
    assert found["temperature, C"] == [60, 61, 62]
    assert found["held by"] == {"power cap": 2, "thermal slowdown, software": 1}
    idle = clocks.summarize(SAMPLES.splitlines()[0])
    assert (idle["samples"], idle["busy"], idle["power, W"]) == (1, 0, [120.5] * 3)
    assert clocks.summarize("No devices were found\n") == {}


def test_clocks_are_sampled_while_something_is_measured(tmp_path, monkeypatch):
    text = (
        f"#!{sys.executable}\nimport sys, time\n"
        "print('1830, 3201, 660, 62, 80, 0x4', flush=True)\n"
        "time.sleep(60 * any('loop-ms' in a for a in sys.argv))\n"
    )
    put_on_path(monkeypatch, tmp_path / "nvidia-smi", text)
    with clocks.Sampling() as sampling:
        end = time.monotonic() + 20
        while not sampling.summary() and time.monotonic() < end:
            time.sleep(0.01)
        found = sampling.summary()
    assert found["samples"] == 1 and found["held by"] == {"power cap": 1}
    monkeypatch.setenv("PATH", "")
    with clocks.Sampling() as sampling:
        assert sampling.summary() == {}
