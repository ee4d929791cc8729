"""The experiments' command line, figures and the reading of hardware counters."""

import collections
import functools
import hashlib
import importlib.util
import io
import itertools
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from experiment_helpers import made_up as row_of
from experiment_helpers import on_some_gpu, put_on_path, recorded, run_once
from matplotlib.figure import Figure
from mma_helpers import numpy_dtype
from rich.console import Console

import experiments
import fa_numba
from experiments import __main__ as command
from experiments import host_cost, io_vs_seqlen, speed, speed_backward, speed_bf16, speed_fp16
from experiments.beside import paper_bars
from experiments.lab.measure import (
    calls,
    check,
    counters,
    counts,
    peers,
    scaling,
    speeds,
    timing,
    variants,
)
from experiments.lab.measure.series import (
    HOPPER_PLANES,
    LABELS,
    MMA_SPLITS,
    PLANES,
    block_costs,
    columns,
    plan,
)
from experiments.lab.measure.workloads import Inputs, fa2_setting, one_head
from experiments.lab.record import published_numbers, ran, registry
from experiments.lab.record.options import CHOICES, FIGURES, REPOSITORY, Bench, Options, Refused
from experiments.lab.record.store import EMULATOR, MODEL, Store, StoreError
from experiments.lab.run import runner
from experiments.lab.show import report, style, tables, thumbs
from fa_numba import bounds, io_model, reference
from fa_numba.problem import Problem

NAMES = sorted(
    path.stem for path in (REPOSITORY / "experiments").glob("*.py") if path.stem[0] != "_"
)
# The test files of experiments that are not called test_NAME.
FILES = {"char_model": "test_training", "training": "test_training_steps",
         "ring": "test_ring_experiment"}  # fmt: skip
STUDIES = [module.STUDY for module in (speed, speed_backward, speed_bf16, speed_fp16)]


def synthetic(name, machine="some-gpu"):
    """A few rows of each kind that the figure draws, made or counted once: `synthetic` of the
    experiment's own test file, where it has one.
    """
    rows = made_up(name)
    return [replace(row, machine=machine) if row.machine == "some-gpu" else row for row in rows]


@functools.cache
def made_up(name):
    rows = []
    found = importlib.util.find_spec(FILES.get(name, f"test_{name}"))
    own = found and importlib.import_module(found.name)
    if hasattr(own, "synthetic"):
        rows = own.synthetic()
        if name == "loop_cost":
            rows += own.synthetic_on_hopper()
    elif name == "io_vs_seqlen":
        tiles = SimpleNamespace(Br=64, Bc=64)
        for place in (MODEL, EMULATOR):
            for series, form in (("fa1-simt", io_model.fa1), ("fa2-simt", io_model.fa2)):
                for problem in (one_head(64, 64), one_head(256, 64)):
                    common = columns(name, series, problem, place, tiles)
                    rows += counts.totals(form(problem, tiles), **common)
        for N in (512, 1024):
            for source in ("model", "l2", "dram"):
                at = (name, fa2_setting(N, 64), "fa2-simt", 1000.0 * N, "traffic")
                rows.append(row_of(*at, source=source, Br=64, Bc=64))
    elif name == "host_cost":
        for dtype, shown in host_cost.SERIES.items():
            for pass_ in ("fwd", "bwd"):
                for i, series in enumerate(shown):
                    at = (name, one_head(128, 64, dtype=dtype), series, 0.01 * (i + 1))
                    rows.append(row_of(*at, pass_=pass_, p20=0.009, p80=0.05))
    elif not hasattr(registry.load(name), "STUDY"):
        # Of an experiment that nothing is made up for: what is recorded of it.
        store = Store(FIGURES)
        found = {machine: store.read(name, machine) for machine in store.machines(name)}
        (gpu,) = [m for m in found if m not in (MODEL, EMULATOR)][:1] or [None]
        rows = [
            replace(row, machine="some-gpu" if row.machine == gpu else row.machine, run="")
            for machine in found
            if machine in (MODEL, EMULATOR, gpu)
            for row in found[machine]
        ]
    else:
        study = registry.load(name).STUDY
        for N in (512, 16384):
            problem = fa2_setting(N, 64, dtype=study.dtype)
            for i, series in enumerate(study.series):
                for pass_ in study.passes_of(series):
                    at = (name, problem, series, 5.0 + i, "speed")
                    rows.append(row_of(*at, pass_=pass_, Br=64, Bc=64))
    return rows


def store_synthetic(name, folder, machine="some-gpu"):
    recorded(folder, name, synthetic(name, machine))


def run(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "experiments", *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "200", **environment},
    )


# --- command line ----------------------------------------------------------------------------


def test_list_names_every_experiment(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert command.main(["list"]) == 0
    said = capsys.readouterr().out
    lines = said.partition("\n\n")[0].splitlines()
    assert [line.split()[0] for line in lines] == NAMES
    for name, line in zip(NAMES, lines, strict=True):
        title, needs = line.removeprefix(name).rsplit(" [", 1)
        assert len(title.split()) <= 15 and needs in ("CPU]", "GPU]", "GPU, torch]")
    assert command.main(["list", "--verbose"]) == 0
    said = capsys.readouterr().out
    assert all(registry.load(name).__doc__ in said for name in NAMES)
    assert registry.names() == NAMES and {"speed", "io_vs_seqlen"} <= set(NAMES)


def test_a_broken_experiment_hides_no_other_one(capsys, monkeypatch):
    def load(name):
        if name == "decode":
            raise SyntaxError("invalid syntax")
        return registry.load(name)

    monkeypatch.setattr(command, "load", load)
    assert command.main(["list"]) == 0
    lines = capsys.readouterr().out.partition("\n\n")[0].splitlines()
    assert [line.split()[0] for line in lines] == NAMES
    (broken,) = [line for line in lines if line.startswith("decode ")]
    assert broken.endswith("cannot be imported: SyntaxError: invalid syntax")


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["all", "--help"]])
def test_help_explains(arguments, capsys):
    with pytest.raises(SystemExit) as exit_:
        command.main(arguments)
    assert exit_.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    if arguments[0] != "--help":
        assert all(f"--{name.replace('_', '-')} " in text for name in (*CHOICES, "quick", "out"))
        assert "are written to figures/filtered, unless --out names another folder" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "spead", "x"], "training or variants, got 'spead'; did you mean 'speed'?"),
        (["draw", "speed", "lab"], "argument NAME: must be block_size, block_sparse, "),
        (["draw", "speed", "--quik"], "there is no option --quik; did you mean '--quick'?"),
        (["run", "speed", "--seqlens", "512,x"], "from 1 to 1048576, such as 4k (4096), got 'x'"),
        (["run", "speed", "--seqlens", "0"], "must be an integer from 1 to 1048576, got 0"),
        (["run", "speed", "--seqlens", ""], "from 1 to 1048576, such as 4k (4096), got ''"),
        (["run", "speed", "--head-dims", "64,257"], "must be an integer from 1 to 256, got 257"),
        (["run", "speed", "--head-dims", "-1"], "must be an integer from 1 to 256, got -1"),
        (["run", "speed", "--causal", "maybe"], "must be no, yes or both, got 'maybe'"),
        (["run", "speed", "--out", str(Path(__file__) / "x")], "must be a folder, but "),
        (
            ["run", "speed", "--out", "x" * 300],
            f"must be the name of a folder, got '{'x' * 29} ... {'x' * 29}': File name too long",
        ),
        (["run", "speed", "--out", ""], "must be the name of a folder, got ''"),
        (
            ["run", "speed", "generate", "--seqlens", "37"],
            "generate has no option --seqlens. Experiments with",
        ),
        (["run", "paged", "--seqlens", "37"], "paged has no option --seqlens"),
        (
            ["run", "ring", "--seqlens", "37", "--causal=yes"],
            "ring has no option --seqlens. Experiments with",
        ),
        (["run", "paged", "--head-dims", "64"], "paged has no option --head-dims"),
        (
            ["draw", "claims", "--seqlens", "128"],
            "claims has no option --seqlens. Experiments with",
        ),
        (["draw", "claims", "--causal", "yes"], "claims has no option --causal. Experiments with"),
        (["draw", "speed", "--tiles", "64x64"], "speed has no option --tiles. Experiments with"),
        (["run", "speed", "--out", " "], "must be the name of a folder, got ' '"),
        (["run", "speed", "--quick", "--out", f"{FIGURES}/../figures"], "holds complete runs only"),
        (["all", "--head-dims", "64", "--out", str(FIGURES)], "the results go to figures/filtered"),
        (["draw", "speed", "--seqlens", "512", "--out", str(FIGURES)], "holds complete runs only"),
        (["run"], "the following arguments are required: NAME"),
        ([], "the following arguments are required: COMMAND"),
        (["walk"], "argument COMMAND: must be list, run, "),
        (["al"], "got 'al'; did you mean 'all'?"),
    ],
)
def test_bad_arguments_are_refused_before_anything_runs(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr(command, "Runner", lambda *_: pytest.fail("something was run"))
    with pytest.raises(SystemExit) as exit_:
        command.main(arguments)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "folder"),
    [
        ([], FIGURES),
        (["--quick"], FIGURES / "quick"),
        (["--seqlens", "512"], FIGURES / "filtered"),
        (["--head-dims", "64,128"], FIGURES / "filtered"),
        (["--causal", "both"], FIGURES / "filtered"),
        (["--quick", "--seqlens", "512"], FIGURES / "quick"),
        (["--quick", "--out", str(FIGURES / "quick" / "mine")], FIGURES / "quick" / "mine"),
    ],
)
@pytest.mark.parametrize("command_", [["run", "speed"], ["draw", "speed"], ["all"]])
def test_parts_of_experiments_stay_away_from_complete_ones(
    monkeypatch, capsys, command_, arguments, folder
):
    """Unless --out says so; and where they go is said."""
    seen = []
    stand_in = SimpleNamespace(
        machine="some-gpu",
        measure=lambda name, again: None,
        draw=lambda name: None,
        reports=collections.defaultdict(runner.Report),
    )
    monkeypatch.setattr(command, "Runner", lambda options, *_: seen.append(options) or stand_in)
    command.main([*command_, *arguments])
    assert [options.out for options in seen] == [folder]
    assert seen[0].complete == (folder == FIGURES)
    assert ("figures/filtered" in capsys.readouterr().out) == (folder.name == "filtered")


def test_an_experiment_runs_and_repeats_without_a_change(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 1)  # figures are drawn in this process
    part = ("--seqlens", "32", "--head-dims", "16")
    arguments = ("run", "io_vs_seqlen", "--quick", *part, "--out", str(tmp_path))
    assert command.main(arguments) == 0
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
    assert command.main(arguments) == 0
    changed = [path for path, when in files().items() if before.get(path) != when]
    # A GPU's readings differ from run to run, and the figure with them.
    gpu = [path for path in before if path.parent.parent.name == "data"]
    if {path.stem for path in gpu} <= {MODEL, EMULATOR}:
        assert changed == []


def run_in_process(monkeypatch, tmp_path, measure):
    """A runner over a stand-in experiment that measures as told."""
    module = SimpleNamespace(
        __doc__="A stand-in.", NEEDS=(), measure=measure, draw=lambda rows: None
    )
    monkeypatch.setattr(runner, "load", lambda name: module)
    monkeypatch.setattr(ran, "code_of", lambda name: {})  # it has no file
    return runner.Runner(Options(out=tmp_path), [], Console(quiet=True))


def test_an_experiment_that_refuses_is_a_line(monkeypatch, tmp_path):
    def measure(options, bench):
        raise Refused("too large")
        yield

    running = run_in_process(monkeypatch, tmp_path, measure)
    running.console = Console(file=io.StringIO())
    running.measure("standing_in")
    assert running.console.file.getvalue().splitlines()[1:] == ["", "standing_in: too large"]
    assert not [path for path in (tmp_path / "data").rglob("*") if path.is_file()]


def test_what_an_older_gpu_has_no_unit_for_is_left_out(monkeypatch, tmp_path):
    """And is no error of `make figures` there."""

    def measure(options, bench):
        with bounds.as_gpu("T4"):
            plan("fa2-mma", one_head(64, 64, dtype="float16"))
        yield

    running = run_in_process(monkeypatch, tmp_path, measure)
    running.console = Console(file=io.StringIO())
    running.measure("standing_in")
    says = "unit 'mma' needs a GPU of compute capability 8.0 or newer, got 7.5; this GPU has "
    said = running.console.file.getvalue()
    assert (
        f"standing_in: not measured, because this GPU cannot compute it: {says}unit 'simt', "
        "which takes float32\n"
    ) in said
    report = running.reports["standing_in"]
    assert not report.error and report.not_measured.startswith(says)


def test_an_interrupted_command_shows_no_traceback(monkeypatch, capsys):
    def interrupted(console):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "_report", interrupted)
    assert command.main(["report"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_no_gpu_is_said_and_nothing_is_measured(monkeypatch, tmp_path):
    running = run_in_process(monkeypatch, tmp_path, lambda *_: pytest.fail("measured"))
    running.machine = None
    runner.load("any").NEEDS = ("GPU",)
    running.measure("standing_in")
    assert running.reports["standing_in"].not_measured == "needs a CUDA GPU"


# --- an experiment more ----------------------------------------------------------------------

# The whole experiment that CONTRIBUTING has.
(WALK,) = re.findall(
    r"```python\n(.*?)```", (REPOSITORY / "CONTRIBUTING.md").read_text("utf-8"), re.DOTALL
)


@pytest.fixture
def another(tmp_path, monkeypatch):
    """An experiment's file in a folder of its own; the package knows that folder, no more."""
    folder = tmp_path / "another"
    folder.mkdir()
    (folder / "head_dim.py").write_text(WALK)
    monkeypatch.setattr(experiments, "__path__", [*experiments.__path__, str(folder)])
    yield "head_dim"
    sys.modules.pop("experiments.head_dim", None)
    if hasattr(experiments, "head_dim"):
        delattr(experiments, "head_dim")


def test_an_experiment_is_its_module_and_the_page(another, tmp_path, capsys, monkeypatch):
    """Nothing else names it: it is listed, run, drawn, and its tables come between the markers;
    and it passes what is asked of every recorded experiment.
    """
    monkeypatch.setenv("COLUMNS", "200")
    command.main(["list"])
    said = capsys.readouterr().out
    sentence = "Compares the bytes that both loop orders access over the head dimension"
    assert f"{another:17}{sentence} [CPU]" in said
    assert command.main(["list", another]) == 0
    assert "The numbers are closed forms" in capsys.readouterr().out
    out, page = tmp_path / "out", tmp_path / "page.md"
    assert command.main(["run", another, "--out", str(out)]) == 0
    store = Store(out)
    rows, (run_,) = store.recorded(another, MODEL)
    assert len(rows) == 8 and all(row.value > 0 and row.run == run_["id"] for row in rows)
    assert (out / "head_dim.svg").exists() and (out / "head_dim.png").exists()
    assert command.main(["draw", another, "--out", str(out)]) == 0

    def number(rows):
        return tables.of("Rows.", ["number"], [[str(len(rows))]])

    monkeypatch.setattr(registry.load(another), "TABLES", {"sum": number}, raising=False)
    page.write_text(
        "Text.\n<!-- table: head_dim -->\n<!-- end: head_dim -->\n"
        "<!-- table: sum -->\n<!-- end: sum -->\n"
    )
    assert report.update(page, store) == ["head_dim", "sum"]
    assert "| 32 | FA-2 (Q outer) |" in page.read_text() and "| 8 |\n" in page.read_text()
    assert (
        "The numbers in the table of the experiment `head_dim` are from "
        "`figures/data/head_dim/model.csv` (" in page.read_text()
    )
    assert report.update(page, store) == [] and {"head_dim", "sum"} <= set(report.known())
    assert len(registry.load(another).draw(rows).axes[0].lines) == 2
    monkeypatch.setattr(sys.modules[__name__], "FIGURES", out)
    test_figures_of_a_part_of_the_data_can_be_drawn(another)
    test_figures_say_where_their_numbers_come_from(another, tmp_path / "drawn", monkeypatch)


def test_two_tables_of_one_name_are_refused(another, monkeypatch):
    monkeypatch.setattr(
        registry.load(another), "TABLES", {"speed": lambda rows: None}, raising=False
    )
    with pytest.raises(ValueError, match="speed and head_dim both have 'speed'"):
        report.known()


# --- figures ---------------------------------------------------------------------------------


def digests(folder):
    figures = [path for kind in ("svg", "png", "gif") for path in folder.glob(f"*.{kind}")]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in figures}


# All of them take a minute; each of these is drawn in a way of its own.
@pytest.mark.parametrize(
    "names",
    [("loop_order", "timeline"), pytest.param(NAMES, marks=pytest.mark.slow)],
    ids=["few", "all"],
)
def test_figures_come_out_byte_for_byte_the_same(names, tmp_path, monkeypatch):
    """By a command's processes and by this one, in another order."""
    for name in names:
        store_synthetic(name, tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    done = run("draw", *names, "--out", str(tmp_path / "one"))
    assert done.returncode == 0, done.stdout + done.stderr
    figures = {other for name in names for other in (name, *thumbs.figures(registry.load(name)))}
    figures -= {"io_vs_seqlen_small", "speed_fp16_small"}  # of sizes that made-up rows lack
    assert done.stdout.count(": drawn") == len(figures)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    assert command.main(["draw", *names[::-1], "--out", str(tmp_path / "two")]) == 0
    drawn = [digests(tmp_path / folder) for folder in ("one", "two")]
    animated = {f"{name}.gif" for name in names if hasattr(registry.load(name), "animate")}
    still = {f"{name}.{kind}" for name in figures for kind in ("svg", "png")}
    assert set(drawn[0]) == still | animated
    assert drawn[0] == drawn[1]


# All of them take half a minute.
@pytest.mark.parametrize(
    "name",
    [n if n in (*NAMES[::3], "cache") else pytest.param(n, marks=pytest.mark.slow) for n in NAMES],
)
def test_figures_say_where_their_numbers_come_from(name, tmp_path, monkeypatch):
    store_synthetic(name, tmp_path)
    notes = []
    monkeypatch.setattr(style, "save", lambda figure, stem, footnote: notes.append(footnote))
    command.main(["draw", name, "--out", str(tmp_path)])
    on_gpu = "some-gpu" in Store(tmp_path).machines(name)
    where = "recorded on Some GPU" if on_gpu else "closed forms"
    assert f"{where}, 2026-01-01, commit aaaaaaa" in notes[0]
    for other in getattr(registry.load(name), "ALSO_DRAWN", ()):
        assert f"\n{other}: recorded on NVIDIA H200, 2026-" in notes[0]


@pytest.mark.parametrize("name", NAMES)
def test_figures_of_a_part_of_the_data_can_be_drawn(name):
    """All of it is drawn by the test before."""
    module = registry.load(name)
    rows = synthetic(name)
    machines = ([row for row in rows if row.machine == m] for m in (MODEL, EMULATOR, "some-gpu"))
    for part in (
        *(some for some in machines if 0 < len(some) < len(rows)),
        rows[:1],
        rows[-1:],
        [],
    ):
        figure = module.draw(part)
        assert figure is None or figure.axes


@pytest.mark.parametrize(
    ("part", "what"), [([], ""), (["--seqlens", "7,8", "--causal=no"], " for the chosen sizes")]
)
def test_a_figure_without_data_is_an_error_and_no_crash(tmp_path, capsys, monkeypatch, part, what):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(runner, "FIGURES", tmp_path / "none")
    if part:
        store_synthetic("speed", tmp_path)
    assert command.main(["draw", "speed", *part, "--out", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "Traceback" not in said and "not drawn: speed" in said
    assert f"not drawn, because there are no data{what}" in said and not list(
        tmp_path.glob("*.svg")
    )


@pytest.mark.parametrize("name", ["io_vs_seqlen", "loop_order"])
def test_one_length_alone_is_visible(name, tmp_path, monkeypatch):
    """A line of one point has no extent: without a marker of its own it gets one, when saved."""
    store = Store(FIGURES)
    rows = [r for m in store.machines(name) for r in store.read(name, m) if r.seqlen_q == 512]
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    module = registry.load(name)
    draw = thumbs.figures(module).get(f"{name}_detail", module.draw)
    style.save(draw(rows), tmp_path / name, "")
    lines = [line for ax in drawn[0].axes if ax.axison for line in ax.lines]
    single = [line for line in lines if len(line.get_xydata()) == 1]
    assert len(single) > 4
    assert all(line.get_marker() not in ("None", "none", "", " ") for line in single)
    unmarked = name == "io_vs_seqlen"  # every line of the other figure has marks
    assert any(line.get_marker() == "_" for line in single) == unmarked
    for ax in drawn[0].axes:
        low, high = ax.get_ylim()
        values = [y for line in ax.lines if line in single for y in line.get_ydata()]
        assert all(low <= y <= high for y in values) and low < high


# --- files in the way -------------------------------------------------------------------------


# Experiment -> the file that is damaged, by what, and what is said of it.
DAMAGES = {
    "speed": (".csv", lambda text: text.replace(b",false,", b",perhaps,", 1),
              "line 2: causal must be true or false, got 'perhaps'"),
    "speed_bf16": (".csv", lambda text: b"\xff\xfe", "'utf-8' codec can't decode byte"),
    "speed_fp16": (".json", lambda text: b"{", "Expecting property name"),
    "host_cost": (".json", lambda text: None, "must describe run 'r1'"),
}  # fmt: skip


def test_damaged_files_and_mistakes_are_named_and_the_others_are_drawn(
    tmp_path, monkeypatch, capsys
):
    """A line for a figure, which is as it was, and one for its table."""
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setattr(runner, "FIGURES", tmp_path / "none")
    monkeypatch.setattr(speed_backward, "draw", lambda rows: 1 / 0)
    names = [*DAMAGES, "speed_backward", "loop_cost"]
    for name in names:
        store_synthetic(name, tmp_path)
    for name, (suffix, change, _) in DAMAGES.items():
        (tmp_path / f"{name}.svg").write_text("as it was")
        path = Store(tmp_path).path(name, "some-gpu", suffix)
        changed = change(path.read_bytes())
        path.unlink() if changed is None else path.write_bytes(changed)
    assert command.main(["draw", *names, "--out", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert said.count("Traceback") == said.count("ZeroDivisionError: ") == 1
    for name, (suffix, _, why) in DAMAGES.items():
        path = Store(tmp_path).path(name, "some-gpu", suffix)
        assert f"{name}: {path}: {why}" in said
        assert (tmp_path / f"{name}.svg").read_text() == "as it was"
        with pytest.raises(StoreError, match=re.escape(f"{path}: {why}")):
            report.text(name, Store(tmp_path))
    said_last = said[said.rindex("not drawn: ") :]
    assert all(name in said_last for name in (*DAMAGES, "speed_backward"))
    assert "loop_cost" not in said_last and (tmp_path / "loop_cost.svg").exists()


def test_a_folder_that_cannot_be_made_is_named_and_nothing_else_stops(
    tmp_path, monkeypatch, capsys
):
    """A file stands where `all` would put one experiment's data, and another's figure."""
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setattr(runner, "FIGURES", tmp_path / "none")
    monkeypatch.setattr(runner.device, "gpu_available", lambda: False)
    monkeypatch.setattr(command, "names", lambda: ["timeline", "io_vs_seqlen", "loop_cost"])
    out = tmp_path / "out"
    store_synthetic("loop_cost", out)
    (out / "data" / "timeline").write_text("in the way")
    (out / "loop_cost.png").mkdir()
    arguments = ["--quick", "--seqlens", "32", "--head-dims", "16", "--out", str(out)]
    monkeypatch.setattr(Options, "admits", lambda options, row: True)
    assert command.main(["all", *arguments]) == 1
    said = capsys.readouterr().out
    assert "Traceback" not in said
    cause = "(File exists|.* must be a folder)"
    assert re.search(f"timeline: cannot read or write {out}/data/timeline.*: {cause}", said)
    assert re.search(f"loop_cost: (cannot read or write )?{out}/loop_cost.png: Is a dir", said)
    assert (out / "io_vs_seqlen.svg").exists()
    last = said.splitlines()[-2:]
    assert f"{out}/data/timeline" in last[0] and f"{out}/loop_cost.png" in last[1]


def test_a_page_with_a_broken_marker_is_left_alone(tmp_path, monkeypatch, capsys):
    page = tmp_path / "page.md"
    page.write_text("<!-- table: nonsense -->\n<!-- end: nonsense -->\n")
    update = report.update
    monkeypatch.setattr(report, "update", lambda: update(page))
    assert command.main(["report"]) == 1
    assert "no table is named 'nonsense'; the tables are" in " ".join(
        capsys.readouterr().out.split()
    )


# --- counters, timing, provenance ------------------------------------------------------------

NCU = """==PROF== Connected to process 1234
a line that the program printed
"ID","Process ID","Process Name","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","1234","python","scores","dram__bytes_read.sum","byte","1,268,500,000"
"0","1234","python","scores","dram__bytes_write.sum","byte","512"
"0","1234","python","scores","l1tex__m_xbar2l1tex_read_sectors.sum","sector","2,500,000,000"
"0","1234","python","scores","l1tex__m_l1tex2xbar_write_sectors.sum","sector","4"
"0","1234","python","scores","other.sum","furlong","3"
"1","1234","python","output","dram__bytes_read.sum","byte","1,000"
"1","1234","python","output","dram__bytes_write.sum","byte","2,000"
"1","1234","python","output","l1tex__m_xbar2l1tex_read_sectors.sum","sector","3,000,000"
"1","1234","python","output","l1tex__m_l1tex2xbar_write_sectors.sum","sector","5"
"2","1234","python","forward","dram__bytes_read.sum","byte","7"
"2","1234","python","forward","dram__bytes_write.sum","byte","8"
"2","1234","python","forward","l1tex__m_xbar2l1tex_read_sectors.sum","sector","9"
"2","1234","python","forward","l1tex__m_l1tex2xbar_write_sectors.sum","sector","6"
==PROF== Disconnected from process 1234
"""


def test_a_table_of_counters_is_read_and_added_up_by_call():
    launches = counters.parse(NCU, counters.TRAFFIC)
    assert launches[0] == {
        "dram__bytes_read.sum": 1268.5e6,
        "dram__bytes_write.sum": 512.0,
        "l1tex__m_xbar2l1tex_read_sectors.sum": 2.5e9,
        "l1tex__m_l1tex2xbar_write_sectors.sum": 4,
    }
    found = counters.by_case(launches, [2, "failed: out of memory", 1])
    one, failed, two = map(counters.total, found)
    assert counters.l2_bytes(one) == 32 * (2.5e9 + 3e6 + 4 + 5)
    assert counters.dram_bytes(one) == 1268.5e6 + 512 + 3000
    assert failed == "failed: out of memory"
    assert (counters.l2_bytes(two), counters.dram_bytes(two)) == (32 * (9 + 6), 15)
    with pytest.raises(counters.CountersError, match="must report 4 launched kernels, got 3"):
        counters.by_case(launches, [3, 1])


def test_ratios_are_taken_and_never_added_up():
    launches = [{"a.sum": 1.0, "b.ratio": 0.25}] * 3
    one, several = map(counters.total, counters.by_case(launches, [1, 2]))
    assert one == launches[0]
    assert several == "failed: b.ratio of 2 kernels cannot be added up"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM", "printed no table. .*ERR_NVGPUCTRPERM"),
        (
            NCU.replace('"sector","2,5', '"parsec","2,5'),
            "xbar2l1tex_read_sectors.sum must be one of .*, got 'parsec'",
        ),
        (NCU.replace('"2,500,000,000"', '"n/a"'), "must be a number, got 'n/a'"),
        (NCU.replace('"2,500,000,000"', '"nan"'), "must be a number, got 'nan'"),
        (re.sub('.*"512"\n', "", NCU), "reported no dram__bytes_write.* for launch 0"),
    ],
)
def test_broken_counter_tables_are_refused(text, message):
    with pytest.raises(counters.CountersError, match=message):
        counters.parse(text, counters.TRAFFIC)


def test_counters_without_the_tool_say_so(monkeypatch):
    monkeypatch.setenv("PATH", "")
    case = counters.Case("fa2-simt", one_head(64, 64))
    with pytest.raises(
        counters.CountersError, match="was not found. Install it and add it to PATH"
    ):
        counters.count([case], counters.TRAFFIC)
    said = []
    assert counters.count_or_say([case], counters.TRAFFIC, said.append) is None
    assert "no Nsight Compute" in said[0]


def test_a_failure_of_ncu_is_every_calls(monkeypatch):
    def broken(cases, metrics):
        raise counters.CountersError("no permission")

    monkeypatch.setattr(counters, "available", lambda: True)
    monkeypatch.setattr(counters, "count", broken)
    case = counters.Case("fa2-simt", one_head(64, 64))
    results = counters.count_or_say([case] * 2, counters.TRAFFIC, lambda line: None)
    assert results == ["failed: no permission"] * 2


FAKE_NCU = """#!{python}
import json, pickle, sys
sys.path.insert(0, ".")
arguments = sys.argv[1:]
at = arguments.index("--log-file")
(metrics,) = [a.removeprefix("--metrics=") for a in arguments if a.startswith("--metrics=")]
cases, kernels = arguments[-2:]
cases = pickle.load(open(cases, "rb"))
# One launch for each call, but for the first, which "failed".
counts = ["failed: out of memory"] + [1] * (len(cases) - 1)
json.dump({{"counts": counts, "ran": {{}}}}, open(kernels, "w"))
with open(arguments[at + 1], "w") as log:
    print('"ID","Metric Name","Metric Unit","Metric Value"', file=log)
    for i, case in enumerate(cases[1:]):
        for name in metrics.split(","):
            print(f'"{{i}}","{{name}}","byte","{{case.options["tiles"].Br}}"', file=log)
"""


def test_cases_reach_the_tool_and_its_numbers_their_calls(monkeypatch, tmp_path):
    put_on_path(monkeypatch, tmp_path / "ncu", FAKE_NCU.format(python=sys.executable))
    problem = one_head(64, 64)
    cases = [
        counters.Case("fa1-simt", problem),
        counters.Case("fa1-simt", problem, {"tiles": fa_numba.Tiles(32, 64), "query_splits": 2}),
        counters.Case("fa2-simt", problem, {"tiles": fa_numba.Tiles(16, 32)}),
    ]
    assert counters.count(cases, ["x.sum", "y.ratio"]) == [
        "failed: out of memory",
        {"x.sum": 32, "y.ratio": 32},
        {"x.sum": 16, "y.ratio": 16},
    ]


def half(array, dtype):
    """Rounded to the nearest of a dtype, as float32."""
    return np.asarray(array).astype(numpy_dtype(dtype)).astype(np.float32)


def refuses(gate, *results, match="against float64"):
    for result in results:
        with pytest.raises(check.WrongResult, match=match):
            gate(result)


DTYPES = pytest.mark.parametrize("dtype", check.ROUNDING)


@DTYPES
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(5, 5), (100, 100), (40, 130), (130, 40)])
def test_the_gate_passes_the_right_result_and_no_wrong_one(dtype, causal, lengths):
    """Of peers it asks no more than that they compute the same function."""
    problem = Problem(2, 4, 2, *lengths, 16, dtype=dtype, causal=causal)
    q, k, v = Inputs()(problem)
    gate, rounding = check.Gate.of_rows(problem, q, k, v), check.ROUNDING[dtype]
    right = reference.attention(q, k, v, causal=causal)
    assert gate(half(right, dtype)) <= rounding < gate.bounds[0] < 6 * rounding
    # As the kernels may: P rounded before it is multiplied.
    unfused = reference.unfused(q, k, v, causal=causal, **check.rounds(problem))
    assert 0 < gate(unfused) < gate.bounds[0]
    off = right * (1 + 6 * rounding)
    nan, scaled = np.full_like(right, np.nan), reference.attention(1.1 * q, k, v, causal=causal)
    refuses(gate, off, nan, scaled, match="O: the error")
    assert gate.bounds[0] < gate.peer(off) < check.PEER_BOUND[dtype]
    wrong = [nan, scaled, reference.attention(q, k, v, causal=not causal)]
    if dtype == "float32" and lengths == (100, 100):  # 10 bits of the inputs, as TF32 keeps
        short = (half(x, "float16") for x in (q, k, v))
        wrong.append(reference.attention(*short, causal=causal))
    refuses(gate.peer, *wrong, match=f"at most {check.PEER_BOUND[dtype]:.2e}")


@DTYPES
@pytest.mark.parametrize("causal", [False, True])
def test_the_gate_of_gradients(dtype, causal):
    """Of the last head of K and V and the queries that share it."""
    problem = Problem(2, 6, 2, 60, 60, 16, dtype=dtype, causal=causal)
    q, k, v, dout = Inputs(gradient=True)(problem)
    for x in (q, k, v, dout):
        assert np.array_equal(half(x, dtype), x) and x.dtype == np.float32
        assert abs(x.std() - 1) < 0.1
    gate, rounding = check.Gate.of_gradients(problem, q, k, v, dout), check.ROUNDING[dtype]
    right = reference.attention_backward(dout, q, k, v, causal=causal)
    assert 0 < gate([half(x, dtype) for x in right]) <= rounding
    near = reference.unfused_backward(dout, q, k, v, causal=causal, **check.rounds(problem))
    assert rounding / 8 < gate(near) < max(gate.bounds) < 6 * rounding
    heads = slice(3, 6), slice(1, 2), slice(1, 2)
    for n, (name, seen) in enumerate(zip(check.GRADIENTS, heads, strict=True)):

        def but(factor, n=n):
            return [x * (factor if i == n else 1.0) for i, x in enumerate(right)]

        off = but(1 + 6 * rounding)
        refuses(gate, off, match=name)
        assert gate.peer(off) < check.PEER_BOUND[dtype]
        refuses(gate.peer, but(np.nan), but(1.1), match=name)
        unseen = but(1.0)
        unseen[n][:, : seen.start] = unseen[n][0] = np.nan
        assert gate(unseen) < rounding
        unseen[n][1, seen.start] *= 1.5
        refuses(gate, unseen, match=name)
    refuses(gate.peer, reference.attention_backward(dout, q, k, v, causal=not causal))


def test_failures_become_notes():
    def memory():
        raise RuntimeError("CUDA out of memory. Tried to allocate 2 TiB")

    def wrong():
        raise check.WrongResult("error 1 against float64, allowed 2")

    assert timing.attempt(lambda: 3) == (3, "")
    assert timing.attempt(memory) == (None, "failed: out of memory")
    assert timing.attempt(wrong) == (None, "failed: error 1 against float64, allowed 2")
    assert timing.attempt(lambda: [][1])[1].startswith("failed: IndexError: ")


@pytest.mark.parametrize("study", STUDIES, ids=lambda study: study.name)
def test_torch_is_held_to_the_peers_bound(study):
    problem = one_head(64, 16, dtype=study.dtype)
    checks = calls.Checks(Inputs(gradient=True))
    arrays = checks.inputs(problem)
    right = {"fwd": reference.attention(*arrays[:3])}
    gradients = reference.attention_backward(arrays[3], *arrays[:3])
    right |= dict.fromkeys(("bwd", "fwd+bwd"), gradients)
    bounds = check.ROUNDING[study.dtype], check.PEER_BOUND[study.dtype]
    off = float(np.sqrt(bounds[0] * bounds[1]) * 2)
    for series, pass_ in itertools.product(study.series, study.passes):
        held = checks(series, pass_, problem)
        # Two bfloat16 keep 16 bits of an element.
        by = 1 + off * (4 if series.endswith("bf16x3") else 1)
        result = by * right["fwd"] if pass_ == "fwd" else [by * x for x in right[pass_]]
        if series in study.theirs:
            assert bounds[0] < held(result) < bounds[1]
        else:
            refuses(held, result)


# --- query splits ----------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(512, 512), (700, 512), (300, 1024), (1024, 256)])
@pytest.mark.parametrize("splits", [1, 2, 3, 8])
def test_the_work_of_the_blocks_is_the_models(causal, lengths, splits):
    problem, tiles = Problem(1, 1, 1, *lengths, 64, causal=causal), fa_numba.Tiles(64, 128)
    column_tiles = io_model.fa1(problem, tiles, query_splits=splits).loads["K"] // (128 * 64)
    visited = io_model.tiles_visited("fa1", problem, tiles)
    assert sum(block_costs(problem, 64, 128, splits)) == visited + column_tiles / 2


# --- what was asked for is drawn -------------------------------------------------------------


def titles(figure):
    return [ax.get_title() for ax in figure.axes]


def model_rows(head_dims, masks):
    problems = [one_head(N, d, mask) for d in head_dims for mask in masks for N in (64, 128)]
    return [row for problem in problems for row in io_vs_seqlen._model(problem)]


def test_every_head_dimension_and_mask_has_its_panels():
    head_dims, masks = (32, 64, 128), (False, True)
    wanted = [f"d={d}{', causal' if mask else ''}" for mask in masks for d in head_dims]
    figure = io_vs_seqlen.draw(model_rows(head_dims, masks))
    assert [t.split("one head, ")[1] for t in titles(figure)[::2]] == wanted


def test_what_is_asked_for_is_counted_or_said(monkeypatch):
    said, counted = [], []
    monkeypatch.setattr(
        scaling, "count", lambda name, setting, inputs: counted.append(setting.problem) or []
    )

    def counts(**options):
        said.clear(), counted.clear()
        list(io_vs_seqlen.measure(Options(**options), Bench(say=said.append)))
        return {(p.seqlen_q, p.head_dim, p.causal) for p in counted}

    lengths = (32, 64, 128, 256, 512, 1024)
    assert counts() == {(N, d, False) for N in lengths for d in (64, 128)} and not said
    asked = {"seqlens": (48, 1024, 2048), "head_dims": (16, 128), "causal": (True,)}
    assert counts(**asked) == {(N, d, True) for N in (48, 1024) for d in (16, 128)}
    assert "not counted, because it takes minutes on the emulator: N=2048" in said[0]


def test_fa1_is_seen_where_fa2_covers_it():
    rows = model_rows((64,), (False,))
    lines = {
        line.get_color(): line
        for line in io_vs_seqlen.draw(rows).axes[0].lines
        if line.get_linestyle() == "-" and len(line.get_xdata())
    }
    below, above = (lines[style.COLOURS[series]] for series in ("fa1-simt", "fa2-simt"))
    assert below.get_linewidth() >= 2 * above.get_linewidth()
    assert below.get_zorder() < above.get_zorder()


# --- gradients -------------------------------------------------------------------------------


def on_the_emulator(monkeypatch, study=None, lengths=(8, 24)):
    """A study's rows of these lengths, gradients of which are checked to N=16; what is timed.

    Kernels run on the emulator, a call once as it is and once with ``out``. Times are made up.
    """
    timed = []
    study = study or replace(speed_backward.STUDY, fa1_longest=16)

    def time_ms(run, *, repeats, **_):
        run()
        timed.append(repeats)
        return [2.0] * repeats

    run_once(monkeypatch)
    monkeypatch.setattr(fa_numba.device, "synchronize", lambda: None)
    monkeypatch.setattr(fa_numba.device, "release_memory", lambda: None)
    monkeypatch.setattr(fa_numba.device, "to_gpu", lambda array: array)
    monkeypatch.setattr(fa_numba.device, "time_ms", time_ms)
    monkeypatch.setattr(variants, "CHECKED_SEQLEN", 16)
    monkeypatch.setattr(speeds.peers, "available", lambda: False)
    monkeypatch.setattr(speeds, "fa2_setting", one_head)
    said = []
    options = Options(seqlens=lengths, head_dims=(8,), causal=(True,))
    with fa_numba.device.using("emulator"):
        bench = Bench(machine="some-gpu", describe={"multiprocessors": 4}, say=said.append)
        rows = list(speeds.measure(study, options, bench))
    assert len({row.key for row in rows}) == len(rows)
    return rows, timed, " ".join(said)


def test_backward_rows(monkeypatch):
    rows, timed, said = on_the_emulator(monkeypatch)
    assert not [row.note for row in rows if row.failed]
    ours = [("standard-simt", *x) for x in (("bwd",), ("fwd+bwd",))]
    passes = {(r.series, r.pass_) for r in rows if r.seqlen_q == 24}
    assert passes == {
        *ours,
        ("fa2-simt", "bwd"),
        ("fa2-simt", "fwd+bwd"),
        ("fa2-simt-deterministic", "bwd"),
        *((series, "bwd") for series in (*PLANES, *HOPPER_PLANES)),
    }
    assert {(r.series, r.pass_) for r in rows if r.seqlen_q == 8} == passes | {
        ("fa1-simt", "bwd"),
        ("fa1-simt", "fwd+bwd"),
    }
    assert "FA-1 is not measured at N=24" in said
    # Beyond what is checked there is no error to give.
    assert {r.seqlen_q for r in rows if r.metric == "error"} == {8}
    for r in rows:
        if r.metric == "speed":
            problem = one_head(r.seqlen_q, 8, True)
            assert r.value == pytest.approx(io_model.flops(problem, r.pass_) / 2e9)
    assert all(timing.FEWEST <= repeats <= timing.REPEATS for repeats in timed)


def test_wrong_gradients_are_not_timed_at_any_length(monkeypatch):
    right = fa_numba.attention_backward

    def wrong(*arrays, deterministic=False, **options):
        dq, dk, dv = right(*arrays, **options)
        return dq, dk * np.float32(1 + deterministic), dv

    monkeypatch.setattr(fa_numba, "attention_backward", wrong)
    few = ("fa1-simt", "fa2-simt", "fa2-simt-deterministic")
    rows, timed, _ = on_the_emulator(
        monkeypatch, replace(speed_backward.STUDY, ours=few, fa1_longest=16)
    )
    failed = {(r.series, r.seqlen_q) for r in rows if r.failed}
    assert failed == {("fa2-simt-deterministic", 8), ("fa2-simt-deterministic", 24)}
    assert all("dk: the error" in r.note for r in rows if r.failed)
    assert len(timed) == len({(r.series, r.pass_, r.seqlen_q) for r in rows if not r.failed})


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_peak_is_a_product_of_matrices(monkeypatch, dtype):
    """Of the same run: one row that no figure takes for a series of attention."""
    study = replace(speed_fp16.STUDY, dtype=dtype)
    found = timing.Timing(700.0, 690.0, 710.0, 20)
    monkeypatch.setattr(speeds.bandwidth, "measure_matmul", lambda dtype, repeats: found)
    (row,) = speeds.bandwidth.matmul_peak(study.name, study.dtype, "some-gpu")
    assert (row.series, row.dtype, row.value, row.n) == (peers.MATMUL, dtype, 700.0, 20)
    assert row.seqlen_q == row.head_dim == speeds.bandwidth.MATMUL_SIZE
    assert speed_fp16.draw([row]) is None and speed_fp16.table([row]) is None
    monkeypatch.setattr(speeds.bandwidth, "measure_matmul", lambda dtype, repeats: 1 / 0)
    (row,) = speeds.bandwidth.matmul_peak(study.name, study.dtype, "some-gpu")
    assert row.failed and "ZeroDivisionError" in row.note


def test_of_some_head_dimensions_the_forward_pass_alone_is_measured():
    """FA-3's figures have d=256 forward."""
    small, large = (fa2_setting(512, d, dtype="float16") for d in (128, 256))
    study = speed_fp16.STUDY
    assert study.at(large, "fwd") == study.at(small, "fwd") and study.at(small, "bwd")
    assert study.at(large, "bwd") == study.at(large, "fwd+bwd") == []


def test_the_mask_is_in_the_softmax_where_there_is_a_mask(monkeypatch):
    monkeypatch.setattr(peers, "here", tuple)
    plain, causal = (fa2_setting(512, 128, mask, "float16") for mask in (False, True))
    more = set(speed_fp16.STUDY.at(causal, "fwd")) - set(speed_fp16.STUDY.at(plain, "fwd"))
    assert more == {peers.UNFUSED_MASKED}


def test_the_baselines_are_divided_by_the_published_ones():
    """FA-3's standard attention has 72 TFLOP/s forward at N=4k and d=64, and 18 with a mask."""
    speeds_of = (36.0, False), (9.0, True), (18.0, True)
    series = (peers.UNFUSED, peers.UNFUSED, peers.UNFUSED_MASKED)
    rows = [
        row_of("speed_fp16", fa2_setting(4096, 64, causal, "float16"), name, speed, "speed")
        for name, (speed, causal) in zip(series, speeds_of, strict=True)
    ]
    plain, causal = speed_fp16.baselines(rows).body.splitlines()[2:]
    half, all_of_it = "0.50, 0.50, 0.50", "1.00, 1.00, 1.00"
    assert plain.endswith(f"| 52.00 to 73.00 | {half} | - | - |")
    assert causal.endswith(f"| 16.00 to 18.00 | {half} | {all_of_it} | - |")
    assert speed_fp16.baselines(rows[:0]) is None


def test_half_precision_rows(monkeypatch):
    rows, timed, said = on_the_emulator(monkeypatch, speed_fp16.STUDY, (24,))
    assert "FA-1" not in said and {r.dtype for r in rows} == {"float16"}
    measured = {
        (r.series, r.pass_, r.seqlen_q) for r in rows if r.metric == "time" and not r.failed
    }
    for series in ("fa1-mma", MMA_SPLITS, "fa2-mma"):
        assert (series, "fwd", 24) in measured
    # What has no kernel yet is a row that says so.
    failed = {(r.series, r.pass_, r.seqlen_q): r.note for r in rows if r.failed}
    assert measured.isdisjoint(failed)
    assert all("on tensor cores there is" in note for note in failed.values())
    wanted = {
        (series, pass_, 24)
        for series in speed_fp16.STUDY.ours
        for pass_ in speed_fp16.STUDY.passes_of(series)
    }
    assert measured | set(failed) == wanted
    # Their error is that of 16 bits.
    errors = {r.series: r.value for r in rows if r.metric == "error" and r.pass_ == "fwd"}
    assert set(errors) == {series for series, pass_, _ in measured if pass_ == "fwd"}
    assert all(2.0**-14 < error < 2.0**-9 for error in errors.values())


def test_the_half_precision_figure_is_the_forward_pass():
    figure = speed_fp16.draw(synthetic("speed_fp16"))
    assert titles(figure) == ["d=64"]
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == [*(LABELS[s] for s in speed_fp16.DRAWN), "band: p20 to p80 of the runs"]
    order = speed_fp16.STUDY.series.index
    ratio = (order("fa2-mma") + 5) / (order(MMA_SPLITS) + 5)
    message, what = figure.legends[0].get_title().get_text().splitlines()
    assert message == f"Q outer is at least {ratio:.1f} times as fast as K/V outer"
    assert what.startswith("forward, fp16, tensor cores (mma), Hopper's tensor cores (wgmma); ")


def test_the_bf16_figure_is_of_ratios():
    rows = synthetic("speed_bf16")
    half = [replace(r, dtype="float16", value=r.value and 2 * r.value) for r in rows]
    figure = speed_bf16.draw(rows, half)
    assert titles(figure) == list(speeds.PASSES.values())
    names = [text.get_text() for text in figure.axes[0].get_yticklabels()]
    assert names == [LABELS[series] for series in reversed(speed_bf16.STUDY.series)]
    dots = [x for ax in figure.axes for line in ax.lines[:-1] for x in line.get_xdata()]
    assert set(dots) == {0.5} and speed_bf16.draw(rows, []) is None


def of_the_papers(machine):
    rows = [
        replace(row, head_dim=d, seqlen_q=N, seqlen_k=N, machine=machine)
        for row in synthetic("speed_fp16")
        if row.seqlen_q == 512
        for d in (64, 256)
        for N in (512, 1024)
    ]
    sizes = dict.fromkeys(("seqlen_q", "head_dim"), 8192)
    return rows, replace(rows[0], series=peers.MATMUL, value=700.0, pass_="fwd", **sizes)


def test_the_papers_figures_are_drawn_as_the_papers_draw_them():
    """On the paper's GPU: published bars hollow, each with its number; ours filled."""
    rows, peak = of_the_papers("nvidia-h100-80gb-hbm3")
    figure = speed_fp16.FIGURES["fa3_fig5"]([*rows, peak])
    assert titles(figure) == ["d=64, not causal", "d=256, not causal"]
    ax = figure.axes[0]
    bars = {c.get_label(): c for c in ax.containers}
    white = (1.0, 1.0, 1.0, 1.0)
    for label, bar in bars.items():
        hollow = {patch.get_facecolor() == white for patch in bar}
        assert hollow == {"published" in label}, label
    for theirs, ours in (("FlashAttention-2, published", "torch's FlashAttention-2, measured"),
                         ("cuDNN, published", "cuDNN, measured")):  # fmt: skip
        assert bars[theirs][0].get_edgecolor() == bars[ours][0].get_facecolor()
    # The number of each bar is on it, those of FA-3 at d=64 as published.
    (line,) = published_numbers.lookup(
        paper="fa3", item="Fig. 5", method="FA-3", head_dim="64", causal="false", seqlen="512"
    )
    numbers = {text.get_text().strip() for text in ax.texts}
    assert bars["FlashAttention-3, published"][0].get_height() == float(line["value"])
    assert f"{float(line['value']):.0f}" in numbers and len(ax.texts) == 2 * len(bars)
    (ours,) = {
        patch.get_height()
        for each in figure.axes
        for bar in each.containers
        for patch in bar
        if bar.get_label() == "FA-2 (wgmma), measured"
    }
    fa3 = published_numbers.lookup(paper="fa3", item="Fig. 5", method="FA-3", causal="false")
    theirs = [float(x["value"]) for x in fa3 if x["head_dim"] in ("64", "256")
              and x["seqlen"] in ("512", "1024")]  # fmt: skip
    ratio = np.median([ours / value for value in theirs])
    message, what = figure.legends[0].get_title().get_text().splitlines()
    assert message == (
        f"Our FA-2 (wgmma) reaches {ratio:.2f} times FlashAttention-3's published speed (median)"
    )
    assert what == "FlashAttention-3, Fig. 5: forward, fp16, 16k tokens; hollow: published, H100"
    # Of FA-1 the faster grid; nothing of another pass or of no row.
    (other, *_) = speed_fp16.FIGURES["fa2_fig7"](rows).axes
    bars = {c.get_label(): c for c in other.containers}
    splits = speed_fp16.STUDY.series.index(MMA_SPLITS) + 5.0
    assert {patch.get_height() for patch in bars["FA-1 at its faster grid, measured"]} == {splits}
    assert speed_fp16.FIGURES["fa2_fig6"]([r for r in rows if r.pass_ == "fwd"]) is None
    assert speed_fp16.FIGURES["fa2_fig4"]([peak]) is None


def test_of_another_gpu_ratios_are_drawn():
    """The published ones are hollow: FA-2 over FA-1, and below over PyTorch's attention."""
    rows, peak = of_the_papers("some-gpu")
    figure = speed_fp16.FIGURES["fa2_fig5"]([*rows, peak])
    assert titles(figure) == ["d=64, not causal"] * 2
    order = speed_fp16.STUDY.series.index
    speed = {series: order(series) + 5.0 for series in speed_fp16.STUDY.series}
    where = {"paper": "fa2", "item": "Fig. 5", "head_dim": "64", "causal": "false"}
    for ax, method, series in zip(
        figure.axes, ("FlashAttention", "PyTorch"), (MMA_SPLITS, peers.UNFUSED), strict=True
    ):
        theirs, ours = ax.lines[:2]
        assert (theirs.get_label(), ours.get_label()) == ("published, A100", "measured here")
        assert list(ours.get_ydata()) == [speed["fa2-mma"] / speed[series]] * 2
        over, under = (
            published_numbers.value(method=m, seqlen="512", **where)
            for m in ("FlashAttention-2", method)
        )
        assert theirs.get_ydata()[0] == over / under and theirs.get_markerfacecolor() == "white"
    message = figure.legends[0].get_title().get_text().splitlines()[0]
    ratio = speed["fa2-mma"] / speed[MMA_SPLITS]
    assert message == f"Our FA-2 is {ratio:.1f} times as fast as our FA-1 (median)"


def test_a_published_speed_stands_before_ours():
    """Six bars: each published method that there is a kernel of here, and the kernel."""
    for paper, item in speed_fp16.PAPERS.values():
        methods = {line["method"] for line in published_numbers.lookup(paper=paper, item=item)}
        bars = paper_bars.BARS[paper]
        assert len(bars) == 6 and {bar.method for bar in bars[::2]} <= methods
        # FA-3 has a colour of its own: our kernel is FA-2's.
        assert all(a.method and b.series and (a.like == b.like or a.method == "FA-3")
                   for a, b in zip(bars[::2], bars[1::2], strict=True))  # fmt: skip


class Remote:
    """An array that lies elsewhere: what is looked at is copied."""

    def __init__(self, array, copied):
        self.array, self.copied = array, copied

    def __getitem__(self, at):
        return Remote(self.array[at], self.copied)

    def copy_to_host(self):
        self.copied.append(self.array.size)
        return self.array


def test_the_gate_copies_no_more_than_it_checks():
    problem = Problem(2, 4, 2, 200, 200, 16, causal=True)
    host, copied = Inputs()(problem), []
    remote = [Remote(x, copied) for x in host]
    near, far = check.Gate.of_rows(problem, *host), check.Gate.of_rows(problem, *remote)
    assert far.bounds == near.bounds and np.array_equal(far._parts[0][1], near._parts[0][1])
    assert sum(copied) <= 2 * (3 * 32 * 16 + 2 * 3 * 200 * 16) < sum(x.size for x in host)


# --- the host's time -------------------------------------------------------------------------


def host_rows(monkeypatch, clock=None):
    """host_cost's rows of one small head on the emulator, and how often the GPU was waited for."""
    waits = []
    monkeypatch.setattr(fa_numba.device, "synchronize", lambda: waits.append(1))
    monkeypatch.setattr(fa_numba.device, "to_gpu", lambda array: array)
    monkeypatch.setattr(host_cost.peers, "available", lambda: False)
    for name, value in (("CALLS", 3), ("WARMUP", 1), ("SEQLEN", 16), ("HEAD_DIM", 8)):
        monkeypatch.setattr(host_cost, name, value)
    if clock:
        monkeypatch.setattr(host_cost.time, "perf_counter_ns", clock)
    return on_some_gpu(host_cost, quick=True), waits


def test_host_times(monkeypatch):
    rows, waits = host_rows(monkeypatch, iter(range(0, 10**9, 2000)).__next__)
    done = [row for row in rows if not row.failed]
    assert {(r.series, r.pass_) for r in done} >= {
        *(("fa1-simt", "fwd"), ("fa2-simt", "fwd"), ("fa1-mma", "fwd"), ("fa2-mma", "fwd")),
        *(("fa1-simt", "bwd"), ("fa2-simt", "bwd")),
    }
    assert all("on tensor cores there is" in row.note for row in rows if row.failed)
    # 2000 ns a call; two rounds of three calls, the GPU waited for around them and not within.
    assert {(r.value, r.p20, r.p80, r.n) for r in done} == {(0.002, 0.002, 0.002, 6)}
    assert len(waits) == 2 * 2 * len(done)


def test_each_round_of_host_times_has_every_call(monkeypatch):
    """Every call runs once in each round, and the order of the calls changes."""
    seen = []
    monkeypatch.setattr(host_cost, "host_ms", lambda run: seen.append(run) or [1.0])
    rows, _ = host_rows(monkeypatch)
    done = sum(not row.failed for row in rows)
    first, second = seen[:done], seen[done:]
    assert len(set(first)) == done >= 6 and set(first) == set(second) and first != second


def test_a_wrong_call_has_no_host_time(monkeypatch):
    right = fa_numba.attention
    monkeypatch.setattr(fa_numba, "attention", lambda q, *rest, **o: right(1.1 * q, *rest, **o))
    rows, _ = host_rows(monkeypatch)
    forward = [row for row in rows if row.pass_ == "fwd" and row.dtype == "float32"]
    assert len(forward) == 2 and all("against float64" in row.note for row in forward)


# --- Makefile --------------------------------------------------------------------------------


def make(*goals, **environment):
    return subprocess.run(
        ["make", "-n", *(goals or ("figures",))],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
def test_make_takes_no_path_of_cuda_for_the_wheels():
    done = make(CUDA="/usr/local/cuda")
    assert done.returncode == 0, done.stderr
    assert "/usr/local/cuda" not in done.stdout
    for wheels in ("cu12", "cu13"):
        done = make(WHEELS=wheels)
        assert done.returncode == 0, done.stderr
    for wheels in ("12", "cu11", "cu12 cu13"):
        done = make(WHEELS=wheels)
        assert done.returncode != 0
        assert f'WHEELS must be cu12 or cu13, got "{wheels}"' in done.stderr


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
def test_the_build_of_torch_is_installed_by_its_own_goal_alone(tmp_path):
    where = f"VENV={tmp_path}"
    for goal in ("test", "test-all", "lint", "figures"):
        assert "test-torch" not in make(goal, where).stdout
    assert "experiments,test,test-torch" in make("test-torch", where).stdout
    (line,) = re.findall("make (-o .*)", (REPOSITORY / ".ci" / "run").read_text())
    done = make(*line.replace(".venv", str(tmp_path)).split(), where)
    assert "-m pytest" in done.stdout and "install.py" not in done.stdout


@pytest.mark.gpu
@pytest.mark.skipif(not fa_numba.device.gpu_available(), reason="no CUDA GPU")
@pytest.mark.parametrize("name", NAMES)
def test_every_experiment_measures_on_a_gpu(name, tmp_path):
    if "torch" in registry.needs(registry.load(name)) and not peers.available():
        pytest.skip("no torch with CUDA")
    done = run("run", name, "--quick", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    store = Store(tmp_path)
    rows = [
        row
        for machine in store.machines(name)
        if machine not in (MODEL, EMULATOR)
        for row in store.read(name, machine)
    ]
    timed = registry.needs(registry.load(name)) or name in ("block_size", "block_sparse")
    if timed or rows or (name == "io_vs_seqlen" and counters.available()):
        assert any(not row.failed for row in rows)
    if study := getattr(registry.load(name), "STUDY", None):
        done_ = {(r.series, r.pass_) for r in rows if not r.failed and r.series != peers.MATMUL}
        shown = study.series if peers.available() else study.ours
        assert done_ == {(s, p) for s in shown for p in study.passes_of(s)}
    if name == "loop_order":
        rows = [row for row in rows if row.metric == "time"]
    if name in ("block_sparse", "char_model", "loop_order", "loop_cost"):
        assert not [row.note for row in rows if row.failed]


def test_the_figure_of_cudnn_has_every_case_with_its_range():
    problem = fa2_setting(512, 64, dtype="float16")
    rows = []
    for series, value in ((speed_fp16.HOPPER, 6.0), (peers.CUDNN, 4.0)):
        for pass_, N in (("fwd", 512), ("fwd", 1024), ("bwd", 512)):
            at = "speed_fp16", replace(problem, seqlen_q=N, seqlen_k=N), series, value, "speed"
            rows.append(row_of(*at, pass_=pass_, p20=0.5 * value, p80=2 * value))
    found = speed_fp16.over_cudnn(rows)
    assert found["fwd", 64, False] == {512: (1.5, 0.375, 6.0), 1024: (1.5, 0.375, 6.0)}
    figure = speed_fp16.cudnn(rows)
    title = figure.legends[0].get_title().get_text()
    assert title == "In 3 of 3 cases, FA-2 on wgmma is faster than cuDNN" and len(figure.axes) == 2
    assert speed_fp16.cudnn(rows[:3]) is None and not speed_fp16.over_cudnn(rows[:3])
