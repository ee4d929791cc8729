"""The data store and the tables made from it."""

import io
import json
import math
import re
import resource
from dataclasses import replace

import numpy as np
import pytest

from experiments import speed_bf16, speed_fp16
from experiments.lab.record import kept, published_numbers, registry
from experiments.lab.record.options import FIGURES, Options
from experiments.lab.record.recorder import Recorder
from experiments.lab.record.store import (
    COLUMNS,
    MODEL,
    Row,
    Store,
    StoreError,
    dump,
    impossible,
    naming,
)
from experiments.lab.show import report


def row(**changes):
    fields = {
        "machine": report.MACHINE,
        "experiment": "speed",
        "series": "fa2-simt",
        "source": "measured",
        "batch": 4,
        "heads_q": 32,
        "heads_k": 32,
        "seqlen_q": 4096,
        "seqlen_k": 4096,
        "head_dim": 64,
        "causal": False,
        "Br": 64,
        "Bc": 64,
        "metric": "time",
        "unit": "ms",
        "value": 12.5,
        "p20": 12.25,
        "p80": 13.25,
        "n": 20,
    }
    return Row(**{**fields, **changes})


def provenance(machine, commit="1" * 40):
    return {"id": commit[:6], "commit": commit, "date": "2026-01-01", "dirty": False}


def record(store, rows, *, complete=True, commit="1" * 40, experiment="speed"):
    recorder = Recorder(store, experiment, lambda machine: provenance(machine, commit))
    recorder.add(*rows)
    return recorder.finish(complete=complete)


def test_unknown_source_is_refused():
    with pytest.raises(ValueError, match="source must be one of .*, got 'timed'"):
        row(source="timed")


def test_recordings_from_before_rows_had_a_run_are_read(tmp_path):
    """They say what they have: one description, and no row says which run it is of."""
    store = Store(tmp_path)
    store.path("speed", report.MACHINE).parent.mkdir(parents=True)
    old = row(seqlen_q=512, seqlen_k=512)
    store.path("speed", report.MACHINE).write_text(dump([row(), old], runs=False))
    about = {"commit": "0" * 40, "date": "2025-12-31", "dirty": False, "counted": {}}
    store.path("speed", report.MACHINE, ".json").write_text(json.dumps(about))
    assert [r.run for r in store.read("speed", report.MACHINE)] == ["", ""]
    (run,) = store.runs("speed", report.MACHINE)
    assert run == {name: value for name, value in about.items() if name != "counted"}
    before = store.path("speed", report.MACHINE).read_bytes()
    assert not record(store, [row(), old])[report.MACHINE].changed
    assert store.path("speed", report.MACHINE).read_bytes() == before
    # A part of it measured again: its rows are of the new run, the others of the old one.
    record(store, [row(value=11.0)], complete=False)
    assert [r.run for r in store.read("speed", report.MACHINE)] == ["", "111111"]
    assert [r["commit"][0] for r in store.runs("speed", report.MACHINE)] == ["1", "0"]


SHORT = {"seqlen_q": 512, "seqlen_k": 512}


@pytest.mark.parametrize(
    ("stored", "measured", "left"),
    [
        ([row(), row(**SHORT)], [row(value=9.0)], [row(value=9.0), row(**SHORT)]),
        ([row(), row(metric="error")], [row(Br=128)], [row(Br=128)]),
        (
            [row(), row(metric="speed"), row(source="l2", metric="traffic")],
            [row(value=None, note="failed: reason")],
            [row(value=None, note="failed: reason"), row(source="l2", metric="traffic")],
        ),
        ([row(metric="memory"), row(metric="memory", pass_="bwd")], [row()],
         [row(), row(metric="memory", pass_="bwd")]),
        ([row(Br=256, note="a"), row(Br=256, note="b")],
         [row(Br=Br, note=note) for Br in (64, 128) for note in "ab"],
         [row(Br=Br, note=note) for Br in (64, 128) for note in "ab"]),
    ],
    ids=["another length", "other tiles", "a failure", "another pass", "what is swept"],
)  # fmt: skip
def test_a_part_replaces_what_is_stored_of_its_problems(tmp_path, stored, measured, left):
    """Of the same series and source alone; each row names its run, and no run is without rows."""
    store = Store(tmp_path)
    record(store, stored)
    record(store, measured, complete=False, commit="2" * 40)
    found = store.read("speed", report.MACHINE)
    assert dump(found, runs=False) == dump(left, runs=False)
    assert {r.run for r in found if r in measured} == {"222222"}
    assert [run["id"] for run in store.runs("speed", report.MACHINE)] == [
        "222222", *(["111111"] if len(left) > len(measured) else [])]  # fmt: skip


def test_pages_that_cannot_all_be_written_are_as_they_were(tmp_path, monkeypatch):
    """The second of two is larger than a file may be here, as on a full disk."""
    pages = [tmp_path / "small.md", tmp_path / "large.md"]
    texts = [PAGE, "by hand " * (1 << 10) + PAGE.replace("speed", "memory")]
    for path, text in zip(pages, texts, strict=True):
        path.write_text(text)
    monkeypatch.setattr(report, "pages", lambda: pages)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, limits[1]))
    try:
        with pytest.raises(StoreError, match=f"{pages[1]}: File too large"):
            report.update(None, Store(tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.read_text() for path in pages] == texts
    assert sorted(tmp_path.iterdir()) == sorted(pages)
    assert report.update(None, Store(tmp_path)) == ["speed", "memory"]


def test_pages_are_utf8_in_any_locale(tmp_path, monkeypatch):
    monkeypatch.setattr(io, "text_encoding", lambda encoding, *_: encoding or "ascii")
    page = tmp_path / "page.md"
    page.write_text(f"d² = 4096\n{PAGE}", "utf-8")
    with pytest.raises(UnicodeDecodeError):  # as without a name
        page.read_text()
    store = Store(tmp_path)
    record(store, [row(value=1.0, note="10⁹", metric="speed", unit="TFLOP/s")])
    assert store.read("speed", report.MACHINE)[0].note == "10⁹"
    assert report.update(page, store) == ["speed"]
    assert page.read_text("utf-8").startswith("d² = 4096\n")


def test_what_is_in_the_way_is_named(tmp_path):
    (tmp_path / "store").write_text("a file")
    said = "cannot read or write .*store.*: (.*store is a file, but must be a folder|File exists)"
    with pytest.raises(StoreError, match=said):
        record(Store(tmp_path / "store"), [row()])


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (",false,", ",perhaps,", "line 2: causal must be true or false, got 'perhaps'"),
        (",4096,", ",,", "line 2: seqlen_q must be a number, got ''"),
        (",4096,", ",4096.5,", "line 2: seqlen_q must be a number, got '4096.5'"),
        (",12.5,", ",fast,", "line 2: value must be a number, got 'fast'"),
        (",measured,", ",", "line 2: the number of columns must be 22, got 21"),
        (
            ",measured,",
            ",guessed,",
            "line 2: source must be one of measured, counted, model, l2, dram, published, got "
            "'guessed'",
        ),
        (
            "experiment,series,",
            "experiment,kind,",
            f"the columns must be {', '.join(COLUMNS)}, got experiment, kind, ",
        ),
    ],
)
def test_a_damaged_line_is_named(tmp_path, old, new, says):
    store = Store(tmp_path)
    record(store, [row(value=12.5)])
    path = store.path("speed", report.MACHINE)
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(StoreError, match=re.escape(f"{path}: {says}")):
        store.read("speed", report.MACHINE)


def test_what_no_measurement_gives_is_kept_as_a_failure(tmp_path):
    """What is written can be read; a difference may be below 0."""
    store = Store(tmp_path)
    record(store, [row(value=math.nan, note="here"), row(metric="loss_difference", value=-1.0)])
    below, failed = sorted(store.read("speed", report.MACHINE), key=lambda r: r.metric)
    assert below.value == -1 and (failed.value, failed.p20, failed.p80) == (None, None, None)
    why = "time must be a finite number of at least 0, got nan"
    assert failed.note == f"here; failed: {why}"


@pytest.mark.parametrize("field", ["value", "p20", "p80"])
def test_numbers_are_finite_and_at_least_0(field):
    """Each of a row's numbers; only a difference may be below 0."""
    for metric, least in (("time", 0.0), ("loss_difference", -math.inf)):
        for n in (-math.inf, -1.0, -0.0, 0.0, 1.0, math.inf, math.nan):
            wrong = impossible(row(metric=metric, **{field: n}))
            assert (wrong == "") is (math.isfinite(n) and n >= least)
            assert not wrong or (wrong.startswith(metric) and wrong.endswith(f", got {n}"))
    assert impossible(row(**{field: None})) == ""


@pytest.mark.parametrize("adds", [True, False])
def test_a_run_with_a_time_limit_takes_no_rows_of_an_interrupted_run(tmp_path, adds):
    """Such a run adds its rows to the recording, where an interrupted run has put none."""
    store, items = Store(tmp_path), ["one", "two"]

    def recorder(**how):
        return Recorder(store, "speed", provenance, {"N": 1}, **how)

    interrupted = recorder()
    for item in interrupted.each(interrupted.left(items, "N")):
        if item == "two":
            break
        interrupted.add(row())
    left = [item for _, item in recorder(adds=adds).left(items, "N")]
    assert left == (items if adds else ["two"])


@pytest.mark.parametrize("turn", [1, -1])
def test_a_recordings_text_does_not_depend_on_the_order_of_its_facts(tmp_path, turn):
    store = Store(tmp_path)
    facts = [*provenance(report.MACHINE).items(), ("gpu", {"b": 1, "a": 2})][::turn]
    recorder = Recorder(store, "speed", lambda machine: dict(facts))
    recorder.add(row())
    recorder.finish(complete=True)
    text = store.path("speed", report.MACHINE, ".json").read_text()
    assert text == json.dumps(json.loads(text), indent=2, sort_keys=True) + "\n"


def test_a_digest_of_rows_does_not_depend_on_their_run():
    first, second = row(run="a"), row(run="b")
    assert kept.digest([first]) == kept.digest([second]) != kept.digest([first, first])
    assert dump([first]) != dump([second]) and "\r" not in dump([first])


def test_equal_rows_of_two_machines_are_recorded_for_both(tmp_path):
    store = Store(tmp_path)
    recorder = Recorder(store, "speed", provenance)
    machines = (report.MACHINE, "nvidia-h100")
    recorder.add(*(row(machine=machine) for machine in machines))
    recorder.finish(complete=True)
    assert [len(store.read("speed", machine)) for machine in machines] == [1, 1]


def test_what_is_wrong_with_a_file_is_said_with_its_path(tmp_path):
    """A file in the place of a folder is named, if that is what is wrong."""
    file = tmp_path / "file"
    file.touch()
    inside, denied = str(file / "x.csv"), str(tmp_path / "x.csv")
    folder = f"{file} is a file, but must be a folder; move it away"
    for error, says in [
        (NotADirectoryError(20, "not a folder", inside), folder),
        (PermissionError(13, "denied", inside), "denied"),
        (NotADirectoryError(20, "not a folder", denied), "not a folder"),
        (ValueError("no number"), "no number"),
    ]:
        with pytest.raises(StoreError, match=re.escape(says)) as found, naming(file):
            raise error
        assert (folder in str(found.value)) == (says == folder)


def test_numbers_of_numpy_are_kept_and_recorded(tmp_path):
    recorder = Recorder(Store(tmp_path), "speed", provenance)
    for item in recorder.each(recorder.left([1], "N")):
        recorder.add(row(value=np.float32(12.5), n=np.int64(item), p20=None, p80=None))
    again = Recorder(Store(tmp_path), "speed", provenance)
    assert again.left([1], "N") == []
    again.finish(complete=True)
    (found,) = Store(tmp_path).read("speed", report.MACHINE)
    assert (found.value, found.n) == (12.5, 1)


@pytest.mark.parametrize("complete", [True, False])
@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("machine", [report.MACHINE, MODEL])
def test_which_stored_rows_are_replaced(machine, adds, complete, tmp_path):
    """All, if a run is complete. A run that adds replaces the rows of the model alone."""
    store = Store(tmp_path)
    source = "model" if machine == MODEL else "measured"
    record(store, [row(machine=machine, source=source, seqlen_q=512)])
    recorder = Recorder(store, "speed", provenance, adds=adds)
    recorder.add(row(machine=machine, source=source))
    recorder.finish(complete=complete)
    lengths = sorted(each.seqlen_q for each in store.read("speed", machine))
    everything = machine == MODEL if adds else complete
    assert lengths == ([4096] if everything else [512, 4096])


@pytest.mark.parametrize(
    ("choice", "admitted"),
    [
        ({}, True),
        ({"seqlens": (64, 4096)}, True),
        ({"seqlens": (512,)}, True),
        ({"seqlens": (64,)}, False),
        ({"head_dims": (64,)}, True),
        ({"head_dims": (128,)}, False),
        ({"causal": (False,)}, True),
        ({"causal": (True,)}, False),
        ({"tiles": ((64, 64), (64, 128))}, True),
        ({"tiles": ((128, 64),)}, False),
        ({"seqlens": (4096,), "head_dims": (64,), "causal": (True, False)}, True),
    ],
)
def test_which_rows_the_users_choices_admit(choice, admitted):
    each = row(seqlen_q=512, Br=64, Bc=128)
    assert Options(**choice).admits(each) == admitted
    assert Options(**choice).admits(replace(each, source="published"))


def test_published_figures_are_whole():
    lines = published_numbers._lines()
    assert len({tuple(line) for line in lines}) == 1
    assert all(math.isfinite(float(line["value"])) and None not in line.values() for line in lines)


@pytest.mark.parametrize(
    "wanted, values",
    [
        ({"paper": "fa2", "item": "Fig. 99"}, "values of item for this paper: 'Fig. 4'"),
        ({"paper": "fa99", "item": "Fig. 4"}, "values of paper: 'fa1'"),
        ({"paper": "fa99"}, "values of paper: 'fa1'"),
        ({"item": "Fig. 99"}, "values of item: 'Fig. 1 left'"),
    ],
)
def test_an_unknown_published_item_is_refused_with_what_there_is(wanted, values):
    said = ", ".join(f"{name}={text!r}" for name, text in wanted.items())
    with pytest.raises(StoreError) as error:
        published_numbers.lookup(**wanted)
    assert str(error.value).startswith(
        f"{published_numbers.FILE} has no line with {said}; {values}, "
    )
    with pytest.raises(StoreError) as of_a_method:  # other columns do not hide it
        published_numbers.lookup(**wanted, method="Standard")
    assert str(of_a_method.value) == str(error.value)


def test_a_published_number_is_one_line():
    wanted = {"paper": "fa3", "item": "Table 3", "metric": "rmse"}
    (line,) = (x for x in published_numbers.lookup(**wanted) if x["method"] == "Standard")
    assert published_numbers.value(method="Standard", **wanted) == float(line["value"])
    for less, count in (
        (wanted, len(published_numbers.lookup(**wanted))),
        (wanted | {"method": "?"}, 0),
    ):
        said = f"exactly one line with paper='fa3', item='Table 3', .*, but it has {count or 'no'} "
        with pytest.raises(StoreError, match=f"{said}such line"):
            published_numbers.value(**less)


@pytest.mark.parametrize("experiment", registry.names())
def test_the_rows_of_every_recording_have_their_runs_in_the_json(experiment):
    store = Store(FIGURES)
    for machine in store.machines(experiment):
        ids = [run.get("id", "") for run in store.runs(experiment, machine)]
        assert len(ids) == len(set(ids))
        assert {r.run for r in store.read(experiment, machine)} == set(ids), machine


# --- tables ----------------------------------------------------------------------------------

PAGE = """Text before.
<!-- table: speed -->
<!-- end: speed -->
Text after.
"""


def test_tables_are_made_from_rows_and_checked(tmp_path):
    store, page = Store(tmp_path), tmp_path / "page.md"
    page.write_text(PAGE)
    assert report.update(page, store) == ["speed"]
    assert report.NO_RECORDING in page.read_text()
    assert report.update(page, store) == []

    speed = {"metric": "speed", "unit": "TFLOP/s"}
    record(store, [row(value=24.0, **speed), row(series="torch-efficient", value=32.0, **speed)])
    assert report.update(page, store) == ["speed"]
    (line,) = [line for line in page.read_text().splitlines() if line.startswith("| 64 ")]
    assert [cell.strip() for cell in line.strip("|").split("|")] == [
        *("64", "no", "4096"),
        *("24.0", "32.0"),  # series that were not measured have no column
        "0.75",
    ]
    assert page.read_text().startswith("Text before.\n")
    assert page.read_text().endswith("Text after.\n")


def test_the_page_is_of_one_machine(tmp_path):
    store, page = Store(tmp_path), tmp_path / "page.md"
    page.write_text(PAGE)
    speed = {"metric": "speed", "unit": "TFLOP/s"}
    record(store, [row(value=24.0, **speed)])
    report.update(page, store)
    later = Recorder(store, "speed", lambda machine: {"date": "2099-01-01", "commit": "2" * 40})
    later.add(row(machine="zz-somebodys-gpu", value=99.0, **speed))
    later.finish(complete=True)
    assert report.update(page, store) == []
    assert "24.0" in report.text("speed", store)


def test_memory_in_whole_mebibytes_of_both_dtypes(tmp_path):
    store, memory = Store(tmp_path), {"metric": "memory", "unit": "MiB"}
    record(store, [row(value=1.6, **memory), row(value=2.6, causal=True, **memory)])
    half = [row(series="fa1-mma", value=66.2, causal=False, **HALF, **memory)]
    record(store, half, experiment="speed_fp16")
    lines = [
        x.strip("| ").split(" | ") for x in report.text("memory", store).splitlines() if "4096" in x
    ]
    assert [line[:4] for line in lines] == [["fp32", "4096", "-", "2"], ["fp16", "4096", "66", "-"]]


HALF = {"experiment": "speed_fp16", "dtype": "float16", "seqlen_q": 4096, "seqlen_k": 4096}


def test_the_table_of_the_papers_figures(tmp_path):
    store, speed = Store(tmp_path), {"metric": "speed", "unit": "TFLOP/s"}
    values = {"fa2-mma": 300.0, "fa1-mma": 60.0, "fa1-mma-splits": 120.0, "torch-unfused": 30.0}
    record(
        store,
        [row(series=s, value=v, causal=False, **HALF, **speed) for s, v in values.items()],
        experiment="speed_fp16",
    )
    lines = [x.strip("| ").split(" | ") for x in report.text("fa2_figures", store).splitlines()]
    (line,) = [x for x in lines if x[0] == "Fig. 5"]
    assert line[:4] == ["Fig. 5", "A100", "fwd", "64"]
    # One N is measured: of ours there is one ratio, with the faster FA-1.
    assert (line[5], line[7], line[9]) == ("2.50", "10.00", "1 of 1")


def test_bf16_is_measured_where_fp16_is():
    ours, half = speed_bf16.STUDY, speed_fp16.STUDY
    assert (ours.ours, ours.passes) == (half.ours, half.passes)
    assert set(ours.theirs) < set(half.theirs) and ours.seqlens == half.seqlens


@pytest.mark.parametrize("name", ["speed_fp16", "speed_bf16"])
def test_recorded_errors_are_torchs_and_a_rounding(name):
    """Required of ours: at most the error of torch's FA-2 and one rounding of the result."""
    rows = Store(FIGURES).read(name, report.MACHINE)
    for (_, series), (_, excess) in speed_fp16.worst_errors(rows).items():
        if not series.startswith("torch"):
            assert excess is not None and excess <= 1, series


@pytest.mark.parametrize("name", report.known())
def test_every_table_can_do_without_a_recording(tmp_path, name):
    assert report.NO_RECORDING in report.text(name, Store(tmp_path))


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ("<!-- table: speed -->\n", "but not <!-- end: speed -->; add the second marker"),
        (
            "<!-- table: nonsense -->\n<!-- end: nonsense -->\n",
            "no table is named 'nonsense'; the tables are artefact, .*",
        ),
    ],
)
def test_broken_markers_are_refused(tmp_path, page, message):
    path = tmp_path / "page.md"
    path.write_text(page)
    with pytest.raises(ValueError, match=message):
        report.update(path, Store(tmp_path))


def test_the_pages_tables_are_those_of_the_data():
    """And every table stands on one of them, once, an experiment's on its own."""
    placed = [name for page in report.pages() for name in report.tables(page.read_text())]
    assert sorted(report.known()) == sorted(placed)
    for name in registry.names():
        page = report.TABLES / f"{name}.md"
        assert set(report.tables_of(name)) == set(report.tables(page.read_text()))
        assert ("![" in page.read_text()) == bool(Store(FIGURES).machines(name))
    stale = [names for names, _ in report.stale().values()]
    assert not stale, f"python -m experiments report would change: {stale}"
