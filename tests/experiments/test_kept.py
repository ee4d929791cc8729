"""Counts that are taken from the store while their sources are the same."""

import io
import json
from types import SimpleNamespace

import pytest
from rich.console import Console

from experiments import block_sparse, io_vs_seqlen, profile, timeline
from experiments.lab.measure.series import row_fields
from experiments.lab.measure.workloads import one_head
from experiments.lab.record import kept, registry, runner
from experiments.lab.record.options import FIGURES, Bench, Options
from experiments.lab.record.store import EMULATOR, MODEL, Row, Store
from fa_numba import emulator

NAME = "standing_in"


@pytest.fixture
def counting(tmp_path, monkeypatch):
    """Runs a stand-in experiment with one source file and gives the lengths that were counted."""
    source, counted = tmp_path / "source.py", []
    source.write_text("n = 1\n")
    monkeypatch.setattr(kept, "sources", source.read_text)

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

    module = SimpleNamespace(measure=measure, draw=lambda rows: None)
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
        run.about = Store(tmp_path).provenance(NAME, EMULATOR)
        run.first, *_ = Store(tmp_path).runs(NAME, EMULATOR)
        return list(counted)

    run.value, run.commit, run.broken = 1, "1" * 40, None
    run.source, run.csv = source, Store(tmp_path).path(NAME, EMULATOR)
    run.json = run.csv.with_suffix(".json")
    return run


def test_what_was_counted_from_the_same_sources_is_taken(counting):
    assert counting() == [32, 64]
    assert "emulator: 2 rows, new" in counting.text
    files = {path: path.read_bytes() for path in (counting.csv, counting.json)}
    assert counting() == []
    assert "counted before from the same sources: 2 rows" in counting.text
    assert "model: 2 rows, same as recorded" in counting.text
    assert files == {path: path.read_bytes() for path in files}


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


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Gives the digest of a package of these files."""
    monkeypatch.setattr(kept, "PACKAGE", tmp_path)

    def digest(**files):
        for name, text in files.items():
            path = tmp_path / name.replace("_csv", ".csv").replace("__", "/")
            path = path if path.suffix else path.with_suffix(".py")
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        kept.sources.cache_clear()
        return kept.sources()

    yield digest
    kept.sources.cache_clear()


MODULE = """
\"\"\"Words.\"\"\"
from functools import cache

SIZES = (1, 2)  # words

@cache
def helper(x):
    # words
    \"\"\"Words.

    More.\"\"\"
    text = \"\"\"one
two # no comment\"\"\"
    return inner(
        x,  # words
        "three"  # words
    )
"""


@pytest.mark.parametrize(
    ("old", "new", "changes"),
    [
        ("Words.", "Other words.", False),
        ("  # words", "", False),
        ("    # words\n", "", False),
        ("SIZES = (1, 2)", "\n\nSIZES = (1, 2)", False),
        ("SIZES = (1, 2)", "SIZES = (1, 3)", True),
        ("@cache\n", "", True),
        ("one\ntwo", "one\nother", True),
        ("# no comment", "", True),
        ('"three"', '"four"', True),
    ],
)
def test_the_sources_are_programs_without_words(package, old, new, changes):
    assert old in MODULE
    assert (package(a=MODULE) != package(a=MODULE.replace(old, new))) == changes


def test_the_sources_are_what_counts_come_from(package):
    first = package(kernels__a="x = 1", choices__t_csv="1,2")
    assert package(kernels__a="x = 2") != first == package(kernels__a="x = 1")
    assert package(choices__t_csv="1,3") != first != package(kernels__b="x = 1")
    kept.PACKAGE.joinpath("kernels/b.py").unlink()
    kept.PACKAGE.joinpath("choices/t.csv").write_text("1,2")
    assert package(torch="x = 1", commands__a="x = 1") == first


def test_what_has_no_part_is_there():
    assert all((kept.PACKAGE / name).exists() for name in kept._NO_PART)


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
