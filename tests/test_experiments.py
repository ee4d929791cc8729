"""The experiments' command line, figures and the reading of hardware counters."""

import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import fa_numba
from experiments import __main__ as command
from experiments import block_size, io_vs_seqlen, speed
from experiments.lab import counters, peers, provenance, published, runner, style, timing
from experiments.lab.algorithms import row_fields
from experiments.lab.options import FIGURES, REPOSITORY, Options
from experiments.lab.settings import fa2_setting, one_head
from experiments.lab.store import EMULATOR, MODEL, Row, Store
from fa_numba import io_model, reference
from fa_numba.problem import Problem

NAMES = ["block_size", "io_vs_seqlen", "speed"]


def gpu_row(experiment, problem, **fields):
    defaults = {"machine": "some-gpu", "source": "measured", "Br": 64, "Bc": 64}
    return Row(experiment=experiment, **row_fields(problem), **{**defaults, **fields})


def synthetic(name):
    """A few rows of each kind that the figure draws."""
    rows = []
    if name == "io_vs_seqlen":
        tiles = SimpleNamespace(Br=64, Bc=64)
        for machine, source in ((MODEL, "model"), (EMULATOR, "counted")):
            for series, form in (("fa1-simt", io_model.fa1), ("fa2-simt", io_model.fa2)):
                for problem in (one_head(64, 64), one_head(256, 64)):
                    accesses = form(problem, tiles)
                    rows += io_vs_seqlen._loads_and_stores(
                        series, problem, accesses, machine=machine, source=source, tiles=tiles
                    )
        for N in (512, 1024):
            for source in ("model", "l2", "dram"):
                rows.append(
                    gpu_row(
                        name,
                        fa2_setting(N, 64),
                        series="fa2-simt",
                        source=source,
                        metric="traffic",
                        unit="bytes",
                        value=1000.0 * N,
                    )
                )
    elif name == "block_size":
        problem = Problem(64, 16, 16, 1024, 1024, 64)
        for series, Br, Bc in block_size.sweep((32, 64, 128), 64):
            rows += block_size._model(problem, series, Br, Bc)
            rows.append(
                Row(
                    machine="some-gpu",
                    source="measured",
                    metric="time",
                    unit="ms",
                    value=1.0 * Br if Bc < 128 else None,
                    note="" if Bc < 128 else "failed: too large",
                    **block_size._fields(problem, series, Br, Bc),
                )
            )
    else:
        for N in (512, 1024):
            for i, series in enumerate(speed.ALL):
                common = {"series": series, "metric": "speed", "unit": "TFLOP/s"}
                rows.append(gpu_row(name, fa2_setting(N, 64), value=5.0 + i, **common))
    return rows


def store_synthetic(name, folder):
    from experiments.lab.store import Recorder

    about = {"commit": "a" * 40, "date": "2026-01-01", "device": {"name": "Some GPU"}}
    recorder = Recorder(Store(folder), name, lambda machine: about)
    for row in synthetic(name):
        recorder.add(row)
    recorder.finish(complete=True)


def run(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "experiments", *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "200", **environment},
    )


# --- command line ----------------------------------------------------------------------------


def test_list_names_every_experiment():
    done = run("list")
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in NAMES)
    assert runner.names() == NAMES


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["all", "--help"]])
def test_help_explains(arguments, capsys):
    with pytest.raises(SystemExit) as exit_:
        command.main(arguments)
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    if arguments[0] != "--help":
        for option in ("--quick", "--seqlens", "--head-dims", "--causal", "--out"):
            assert option in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "nonsense"], "no experiment named nonsense; known are: " + ", ".join(NAMES)),
        (["draw", "speed", "lab"], "no experiment named lab"),
        (["run", "speed", "--seqlens", "512,x"], "'x' is no integer"),
        (["run", "speed", "--seqlens", "0"], "0 is outside 1 to"),
        (["run", "speed", "--seqlens", ""], "'' is no integer"),
        (["run", "speed", "--head-dims", "64,257"], "257 is outside 1 to 256"),
        (["run", "speed", "--head-dims", "-1"], "-1 is outside 1 to 256"),
        (["run", "speed", "--causal", "maybe"], "invalid choice: 'maybe'"),
        (["run", "speed", "--out", str(Path(__file__) / "x")], "is a file, not a folder"),
        (["run"], "the following arguments are required: NAME"),
        ([], "the following arguments are required: COMMAND"),
        (["walk"], "invalid choice: 'walk'"),
    ],
)
def test_bad_arguments_are_refused_before_anything_runs(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr(command, "Runner", lambda *_: pytest.fail("something was run"))
    with pytest.raises(SystemExit) as exit_:
        command.main(arguments)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


def test_an_unknown_name_writes_nothing_and_shows_no_traceback(tmp_path):
    done = run("run", "nonsense", "--out", str(tmp_path / "new"))
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "new").exists()


def test_quick_runs_stay_away_from_the_recordings(monkeypatch):
    seen = []
    stand_in = SimpleNamespace(
        measure=lambda name: None, draw=lambda name: True, reports={}, summary=lambda names: ""
    )
    monkeypatch.setattr(command, "Runner", lambda options, *_: seen.append(options) or stand_in)
    command.main(["run", "speed", "--quick"])
    command.main(["run", "speed"])
    assert [options.out for options in seen] == [FIGURES / "quick", FIGURES]
    assert [options.complete for options in seen] == [False, True]


def test_an_experiment_runs_and_repeats_without_a_change(tmp_path):
    arguments = ("run", "io_vs_seqlen", "--quick", "--out", str(tmp_path))
    done = run(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    store = Store(tmp_path)
    counted = store.read("io_vs_seqlen", EMULATOR)
    assert {row.series for row in counted} == {"standard-simt", "fa1-simt", "fa2-simt"}
    model = {
        (r.series, r.seqlen_q, r.Br, r.Bc, r.head_dim, r.metric): r.value
        for r in store.read("io_vs_seqlen", MODEL)
    }
    for r in counted:
        assert model[r.series, r.seqlen_q, r.Br, r.Bc, r.head_dim, r.metric] == r.value

    def files():
        return {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.*")}

    before = files()
    assert {path.name for path in before} >= {"io_vs_seqlen.svg", "io_vs_seqlen.png"}
    done = run(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    changed = [path for path, when in files().items() if before.get(path) != when]
    # A GPU's readings differ from run to run, and the figure with them.
    gpu = [path for path in before if path.parent.parent.name == "data"]
    if {path.stem for path in gpu} <= {MODEL, EMULATOR}:
        assert changed == []


def run_in_process(monkeypatch, tmp_path, measure):
    """A runner over a stand-in experiment that measures as told."""
    module = SimpleNamespace(
        TITLE="a stand-in", NEEDS_GPU=False, measure=measure, draw=lambda rows: None
    )
    monkeypatch.setattr(runner, "load", lambda name: module)
    from rich.console import Console

    return runner.Runner(Options(out=tmp_path), [], Console(quiet=True))


def test_an_interrupted_run_keeps_its_rows(monkeypatch, tmp_path):
    first, second, *_ = synthetic("io_vs_seqlen")

    def measure(options, bench):
        yield first
        yield second
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_in_process(monkeypatch, tmp_path, measure).measure("standing_in")
    assert len(Store(tmp_path).read("standing_in", MODEL)) == 2


def test_a_broken_experiment_keeps_its_rows_and_is_reported(monkeypatch, tmp_path):
    first, *_ = synthetic("io_vs_seqlen")

    def measure(options, bench):
        yield first
        raise RuntimeError("broken")

    running = run_in_process(monkeypatch, tmp_path, measure)
    running.measure("standing_in")
    assert len(Store(tmp_path).read("standing_in", MODEL)) == 1
    assert running.reports["standing_in"].error == "RuntimeError: broken"


def test_no_gpu_is_said_and_nothing_is_measured(monkeypatch, tmp_path):
    running = run_in_process(monkeypatch, tmp_path, lambda *_: pytest.fail("measured"))
    running.machine = None
    runner.load("any").NEEDS_GPU = True
    running.measure("standing_in")
    assert running.reports["standing_in"].not_measured == "needs a CUDA GPU"


# --- figures ---------------------------------------------------------------------------------


def digests(folder):
    figures = [*folder.glob("*.svg"), *folder.glob("*.png")]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in figures}


@pytest.mark.parametrize("name", NAMES)
def test_figures_come_out_byte_for_byte_the_same(name, tmp_path):
    drawn = []
    for folder in (tmp_path / "one", tmp_path / "two"):
        store_synthetic(name, folder)
        done = run("draw", name, "--out", str(folder))
        assert done.returncode == 0, done.stdout + done.stderr
        drawn.append(digests(folder))
    assert set(drawn[0]) == {f"{name}.svg", f"{name}.png"}
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize("name", NAMES)
def test_figures_say_where_their_numbers_come_from(name, tmp_path, monkeypatch):
    store_synthetic(name, tmp_path)
    notes = []
    monkeypatch.setattr(style, "save", lambda figure, stem, footnote: notes.append(footnote))
    command.main(["draw", name, "--out", str(tmp_path)])
    assert "recorded on Some GPU, 2026-01-01, commit aaaaaaa" in notes[0]


@pytest.mark.parametrize("name", NAMES)
def test_figures_of_a_part_of_the_data_can_be_drawn(name):
    module = runner.load(name)
    rows = synthetic(name)
    for part in (
        [row for row in rows if row.machine == MODEL],
        [row for row in rows if row.machine == EMULATOR],
        [row for row in rows if row.machine == "some-gpu"],
        rows[:1],
        rows[-1:],
        [],
    ):
        figure = module.draw(part)
        assert figure is None or figure.axes


def test_a_figure_without_data_is_no_crash(tmp_path):
    done = run("draw", "speed", "--head-dims", "7", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "no data" in done.stdout
    assert not list(tmp_path.glob("*.svg"))


def test_options_choose_rows():
    rows = synthetic("speed")
    options = Options(seqlens=(512,), causal=(False,))
    assert {row.seqlen_q for row in rows if options.admits(row)} == {512}
    assert not any(Options(causal=(True,)).admits(row) for row in rows)
    assert all(Options(seqlens=(7,)).admits(row) for row in block_size.published_rows())


def test_published_points_follow_the_papers_formula():
    points = {r.Bc: r.value for r in block_size.published_rows() if r.metric == "traffic"}
    assert set(points) == {64, 128, 256, 512}
    problem = Problem(64, 16, 16, 1024, 1024, 64)
    for Bc, value in points.items():
        assert value / 1e9 == pytest.approx(io_model.fa1_paper_gb(problem, Bc), rel=0.01)
    assert len(published.lookup(paper="fa2", item="Fig. 4")) == 116


# --- counters, timing, provenance ------------------------------------------------------------

NCU = """==PROF== Connected to process 1234
a line that the program printed
"ID","Process ID","Process Name","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","1234","python","scores","dram__bytes_read.sum","Mbyte","1,268.5"
"0","1234","python","scores","dram__bytes_write.sum","byte","512"
"0","1234","python","scores","lts__t_bytes.sum","Gbyte","2.5"
"0","1234","python","scores","other.sum","%","3"
"1","1234","python","output","dram__bytes_read.sum","Kbyte","1"
"1","1234","python","output","dram__bytes_write.sum","Kbyte","2"
"1","1234","python","output","lts__t_bytes.sum","Mbyte","3"
"2","1234","python","forward","dram__bytes_read.sum","byte","7"
"2","1234","python","forward","dram__bytes_write.sum","byte","8"
"2","1234","python","forward","lts__t_bytes.sum","byte","9"
==PROF== Disconnected from process 1234
"""


def test_counter_table_is_read_with_its_units():
    first, second, third = counters.parse(NCU)
    assert first == {
        "dram__bytes_read.sum": 1268.5e6,
        "dram__bytes_write.sum": 512.0,
        "lts__t_bytes.sum": 2.5e9,
    }
    assert second["lts__t_bytes.sum"] == 3e6
    assert sum(third.values()) == 24


def test_launches_are_added_up_by_call():
    one, failed, two = counters.assign(counters.parse(NCU), [2, "failed: out of memory", 1])
    assert one == counters.Traffic(l2=2.5e9 + 3e6, dram=1268.5e6 + 512 + 3000)
    assert failed == "failed: out of memory"
    assert two == counters.Traffic(l2=9, dram=15)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM", "no table: .*ERR_NVGPUCTRPERM"),
        (NCU.replace('"Gbyte"', '"parsec"'), "'parsec' is not a number of bytes"),
        (NCU.replace('"2.5"', '"n/a"'), "'n/a' 'Gbyte' is not a number"),
        (re.sub('.*"512"\n', "", NCU), "launch 0 has no dram__bytes_write"),
    ],
)
def test_broken_counter_tables_are_refused(text, message):
    with pytest.raises(counters.CountersError, match=message):
        counters.parse(text)


def test_a_missing_kernel_is_noticed():
    with pytest.raises(counters.CountersError, match="saw 3 kernels where 4 were launched"):
        counters.assign(counters.parse(NCU), [3, 1])


def test_counters_without_the_tool_say_so(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(counters.CountersError, match="not on the PATH"):
        counters.count([counters.Case("fa2", 1, 1, 64, 64, False)])


def exact(problem, q, k, v):
    out = reference.attention(q, k, v, scale=problem.scale, causal=problem.causal)
    return out.astype(np.float32)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(5, 5), (100, 100), (40, 130), (130, 40)])
def test_the_gate_passes_the_right_result_and_no_wrong_one(causal, lengths):
    problem = Problem(2, 4, 2, *lengths, 16, causal=causal)
    rng = np.random.default_rng(0)
    q, k, v = (
        rng.standard_normal(shape, dtype=np.float32)
        for shape in (problem.q_shape, problem.k_shape, problem.k_shape)
    )
    gate = timing.Gate(problem, q, k, v)
    out = exact(problem, q, k, v)
    assert gate(out) <= gate.bound
    for wrong in (
        out * np.float32(1 + 1e-4),
        exact(problem, q * np.float32(1.01), k, v),
        np.full_like(out, np.nan),
    ):
        with pytest.raises(timing.WrongResult):
            gate(wrong)


def test_failures_become_notes():
    def memory():
        raise RuntimeError("CUDA out of memory. Tried to allocate 2 TiB")

    def wrong():
        raise timing.WrongResult("error 1 against float64, allowed 2")

    assert timing.attempt(lambda: 3) == (3, "")
    assert timing.attempt(memory) == (None, "failed: out of memory")
    assert timing.attempt(wrong) == (None, "failed: error 1 against float64, allowed 2")
    assert timing.attempt(lambda: [][1])[1].startswith("failed: IndexError: ")


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("NVIDIA H200", "nvidia-h200"),
        ("NVIDIA A100-SXM4-40GB", "nvidia-a100-sxm4-40gb"),
        ("NVIDIA GeForce RTX 4090", "nvidia-geforce-rtx-4090"),
    ],
)
def test_machine_names(name, file):
    assert provenance.slug(name) == file


def test_provenance_has_what_a_reader_needs():
    about = provenance.Provenance(["run", "speed"], {"name": "Some GPU"}).for_machine("some-gpu")
    assert about["command"] == "python -m experiments run speed"
    assert {"commit", "dirty", "date", "seed", "protocol", "device", "torch"} <= set(about)
    assert {"numba", "numba-cuda", "numpy"} <= set(about)
    assert about["numpy"] == np.__version__


def test_splits_share_the_row_tiles_out_evenly():
    from experiments.lab.algorithms import query_splits

    # 64 heads, 32 row tiles each: 2 splits fill 128 of 132 multiprocessors with 16 tiles, and no
    # number of splits needs fewer than 2048 / 132 = 15.5.
    assert query_splits(fa2_setting(4096, 128), 132) == 2
    # 16 heads of 128 row tiles on 132: 8 splits of 16 tiles.
    assert query_splits(fa2_setting(16384, 128), 132) == 8
    # More heads than multiprocessors in whole waves: splitting gains nothing.
    assert query_splits(fa2_setting(512, 64), 128) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not fa_numba.device.gpu_available(), reason="no CUDA GPU")
@pytest.mark.parametrize("name", NAMES)
def test_every_experiment_measures_on_a_gpu(name, tmp_path):
    done = run("run", name, "--quick", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    store = Store(tmp_path)
    rows = [
        row
        for machine in store.machines(name)
        if machine not in (MODEL, EMULATOR)
        for row in store.read(name, machine)
    ]
    if name != "io_vs_seqlen" or counters.available():
        assert any(not row.failed for row in rows)
    if name == "speed":
        series = {row.series for row in rows if not row.failed}
        assert series >= set(speed.OURS)
        if peers.available():
            assert series >= set(peers.FLOAT32)
