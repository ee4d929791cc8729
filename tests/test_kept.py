"""Counts that are taken from the store while their sources are the same."""

import io
import json
from types import SimpleNamespace

import pytest
from rich.console import Console

from experiments import block_sparse, io_vs_seqlen, ladder, profile, timeline
from experiments.lab import kept, registry, runner
from experiments.lab.options import FIGURES, Bench, Options
from experiments.lab.series import row_fields
from experiments.lab.store import EMULATOR, MODEL, Row, Store
from experiments.lab.workloads import one_head
from fa_numba import emulator

NAME = "standing_in"


@pytest.fixture
def counting(tmp_path, monkeypatch):
    """Runs a stand-in experiment with one source file and gives the lengths that were counted."""
    source, counted = tmp_path / "source.py", []
    source.write_text("n = 1\n")
    monkeypatch.setattr(kept, "sources", lambda module, counts: {"source.py": source})

    def rows(N, source, machine, value):
        common = row_fields(one_head(N, 16, False)) | {"unit": "elements", "metric": "loads"}
        yield Row(machine=machine, source=source, experiment=NAME, series="s", value=value,
                  **common)  # fmt: skip

    def count(N):
        if N == run.broken:
            raise RuntimeError("broken")
        counted.append(N)
        yield from rows(N, "counted", EMULATOR, run.value and run.value * N)

    def measure(options, bench):
        work = [(N,) for N in options.seqlens or (32, 64)]
        for (N,) in work:
            yield from rows(N, "model", MODEL, N)
        yield from bench.counted(work, "counting", count)

    module = SimpleNamespace(TITLE="", NEEDS_GPU=False, measure=measure, draw=lambda rows: None)
    monkeypatch.setattr(runner, "load", lambda name: module)

    def run(**options):
        counted.clear()
        console = Console(record=True, width=120, file=io.StringIO())
        running = runner.Runner(Options(out=tmp_path, **options), [], console)
        running._provenance._common["commit"] = run.commit
        running.measure(NAME)
        if running.reports[NAME].error:
            raise RuntimeError(running.reports[NAME].error)
        run.text = console.export_text()
        run.did = runner._what_happened(EMULATOR, running.reports[NAME])
        run.about = Store(tmp_path).provenance(NAME, EMULATOR)
        run.first, *_ = Store(tmp_path).runs(NAME, EMULATOR)
        return list(counted)

    run.value, run.commit, run.broken = 1, "1" * 40, None
    run.source, run.csv = source, Store(tmp_path).path(NAME, EMULATOR)
    run.json = run.csv.with_suffix(".json")
    return run


def test_what_was_counted_from_the_same_sources_is_taken(counting):
    assert counting() == [32, 64]
    assert counting.did.startswith("counted here: 2 rows")
    files = {path: path.read_bytes() for path in (counting.csv, counting.json)}
    assert counting() == []
    assert "counted before from the same sources: 2 rows" in counting.text
    assert counting.did == "counted before from the same sources: 2 rows"
    assert files == {path: path.read_bytes() for path in files}


def test_changed_sources_are_counted_anew(counting):
    counting()
    counting.source.write_text("n = 2\n")
    counting.commit = "2" * 40
    assert counting() == [32, 64]
    # The same numbers: they were first counted before, and now from these sources.
    assert counting.first["commit"] == "1" * 40
    assert counting.about[kept.ENTRY]["commit"] == "2" * 40
    assert counting() == []
    counting.source.write_text("n = 3\n")
    counting.commit, counting.value = "3" * 40, 2
    assert counting() == [32, 64]
    assert counting.first["commit"] == counting.about[kept.ENTRY]["commit"] == "3" * 40
    assert counting() == []


@pytest.mark.parametrize(
    "damage",
    [
        lambda run: run.json.write_text(json.dumps({k: v for k, v in run.about.items()
                                                    if k != kept.ENTRY})),
        lambda run: run.json.write_text(json.dumps(run.about | {kept.ENTRY: "none"})),
        lambda run: run.json.write_text(json.dumps(run.about | {kept.ENTRY: {"digest": 1}})),
        lambda run: run.json.unlink(),
        lambda run: run.csv.unlink(),
        lambda run: run.csv.write_text(run.csv.read_text().replace(",elements,64", ",elements,65")),
        lambda run: run.csv.write_text("".join(run.csv.read_text().splitlines(True)[:-1])),
    ],
    ids=["no entry", "no record", "another digest", "no JSON", "no rows",
         "another number", "a row less"],
)  # fmt: skip
def test_what_is_missing_or_damaged_is_counted_anew(counting, damage):
    counting()
    store = Store(counting.csv.parents[2])
    rows = store.read(NAME, EMULATOR)
    damage(counting)
    assert counting() == [32, 64]
    assert store.read(NAME, EMULATOR) == rows
    assert {row.run for row in store.read(NAME, EMULATOR)} == {counting.first["id"]}
    assert counting() == []


@pytest.mark.parametrize("options", [{"seqlens": (32,)}, {"quick": True}, {"recount": True}])
def test_other_runs_count(counting, options):
    """Those of parts, and where it is asked for; a part's rows are no complete run's."""
    lengths = list(options.get("seqlens", (32, 64)))
    counting()
    assert counting(**options) == lengths
    assert counting() == []
    counting.csv.unlink()
    counting.json.unlink()
    assert counting(**options) == lengths
    assert counting() == ([] if "recount" in options else [32, 64])


def test_rows_of_a_broken_or_failed_run_are_not_taken(counting):
    counting.broken = 64
    with pytest.raises(RuntimeError, match="broken"):
        counting()
    assert not counting.csv.exists()
    counting.broken, counting.value = None, None
    assert counting() == [64]  # which fails; the other was counted before
    assert len(Store(counting.csv.parents[2]).read(NAME, EMULATOR)) == 2
    assert kept.ENTRY not in counting.about
    counting.value = 1
    assert counting() == [32, 64]
    assert counting() == []


def test_the_digest_is_of_names_texts_and_rows(tmp_path):
    def digest(name="a.py", text=b"x = 1\n", rows=()):
        (tmp_path / "file").write_bytes(text)
        return kept.digest({name: tmp_path / "file"}, rows)

    row = Store(FIGURES).read("io_vs_seqlen", EMULATOR)[0]
    assert digest() == digest(text=b"x = 1\r\n")
    assert len({digest(), digest(name="b.py"), digest(text=b"x = 2\n"), digest(rows=[row])}) == 4


def test_the_sources_are_what_counts_come_from():
    found = kept.sources(io_vs_seqlen, counts=True)
    assert {
        "fa_numba/kernels/simt/fa1_forward.py", "fa_numba/parts/softmax.py",
        "fa_numba/intrinsics/shared.py", "fa_numba/emulator/run.py", "fa_numba/host/planning.py",
        "fa_numba/choices/tuned.csv", "experiments.lab.series", "experiments.lab.workloads",
        "experiments.io_vs_seqlen",
    } <= set(found)  # fmt: skip
    assert not {"fa_numba/torch.py", "experiments.lab.style", "experiments.profile"} & set(found)
    assert "experiments.ladder" in kept.sources(profile, counts=True)
    assert all(path.is_file() for path in kept._NO_PART | kept._NO_PART_OF_COUNTS)


def test_the_sources_of_what_a_gpu_measures():
    """The peers and what Nsight Compute runs, but no emulator and nothing that draws."""
    found = set(kept.sources(ladder, counts=False))
    lab = {f"experiments.lab.{n}" for n in ("variants", "peers", "timing", "counter_target")}
    assert lab | {"fa_numba/torch.py", "fa_numba/choices/tuned.csv", "experiments.ladder"} <= found
    assert not {name for name in found if name.startswith("fa_numba/emulator/")}
    other = {f"experiments.lab.{n}" for n in ("style", "tables", "store", "options", "speeds")}
    assert not found & (other | {"experiments.loop_cost"})


@pytest.mark.parametrize("name", registry.names())
def test_what_draws_has_no_part(name):
    """It is imported where it is used, by functions that no measuring calls."""
    module = registry.load(name)
    drawing = {f"experiments.lab.{n}" for n in ("style", "film", "drawing", "speed_figures")}
    for counts in (True, False):
        found = kept.sources(module, counts=counts)
        assert f"experiments.{name}" in found and not drawing & set(found)


@pytest.mark.parametrize("name", ["io_vs_seqlen", "block_size", "block_sparse", "timeline",
                                  "profile"])  # fmt: skip
def test_with_rows_kept_an_experiment_launches_nothing(name, monkeypatch):
    """Its closed forms are computed again, and are those of a run that counts."""
    monkeypatch.setattr(emulator, "launch", lambda *_, **__: pytest.fail("launched"))
    marker = [SimpleNamespace()]
    found = list(registry.load(name).measure(Options(), Bench(kept=marker, say=lambda text: None)))
    assert found.count(marker) == 1
    rows = [r for part in found if part is not marker
            for r in (part if isinstance(part, list) else [part])]  # fmt: skip
    assert {row.machine for row in rows} <= {MODEL}
    stored = {r.key + (r.note,) for r in Store(FIGURES).read(name, MODEL)}
    if name in ("timeline", "block_sparse"):
        assert {r.key + (r.note,) for r in rows} == stored


def test_each_of_these_counts(monkeypatch):
    """The emulator is what an experiment without kept rows runs on."""
    launched = []

    def launch(*_, **__):
        launched.append(1)
        raise KeyboardInterrupt

    monkeypatch.setattr(emulator, "launch", launch)
    for module in (io_vs_seqlen, block_sparse, timeline, profile):
        with pytest.raises(KeyboardInterrupt):
            list(module.measure(Options(quick=True), Bench(say=lambda text: None)))
    assert len(launched) == 4
