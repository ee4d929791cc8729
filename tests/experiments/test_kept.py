"""Counts that are taken from the store while their sources are the same."""

import ast
import io
import json
from types import SimpleNamespace

import pytest
from rich.console import Console

from experiments import block_sparse, host_cost, io_vs_seqlen, ladder, profile, timeline
from experiments.lab.measure.series import row_fields
from experiments.lab.measure.workloads import one_head
from experiments.lab.record import kept, registry, runner, slices
from experiments.lab.record.options import FIGURES, Bench, Options
from experiments.lab.record.store import EMULATOR, MODEL, Row, Store
from fa_numba import emulator

NAME = "standing_in"


@pytest.fixture
def counting(tmp_path, monkeypatch):
    """Runs a stand-in experiment with one source file and gives the lengths that were counted."""
    source, counted = tmp_path / "source.py", []
    source.write_text("n = 1\n")
    monkeypatch.setattr(kept, "sources", lambda module, counts: {"source": source.read_text()})

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


def test_the_digest_is_of_names_texts_and_rows():
    row = Store(FIGURES).read("io_vs_seqlen", EMULATOR)[0]
    digests = [
        kept.digest(texts, rows)
        for texts in ({"a.py": "x = 1"}, {"b.py": "x = 1"}, {"a.py": "x = 2"})
        for rows in ((), (row,))
    ]
    assert len(set(digests)) == 6


def test_the_sources_are_what_counts_come_from():
    found = kept.sources(io_vs_seqlen, counts=True)
    assert {
        "fa_numba/kernels/simt/fa1_forward.py", "fa_numba/parts/softmax.py",
        "fa_numba/intrinsics/shared.py", "fa_numba/emulator/run.py", "fa_numba/host/planning.py",
        "fa_numba/choices/tuned.csv", "experiments.lab.measure.series",
        "experiments.lab.measure.workloads", "experiments.io_vs_seqlen",
    } <= set(found)  # fmt: skip
    assert not {"fa_numba/torch.py", "experiments.profile"} & set(found)
    assert not [name for name in found if name.startswith("experiments.lab.show.")]
    assert "experiments.ladder" in kept.sources(profile, counts=True)
    left_out = kept._NO_PART + kept._NO_PART_OF_COUNTS
    assert all(kept._file(name) for name in left_out)
    assert all((kept.PACKAGE / name).exists() for name in (*kept._NOT_COUNTED, *kept._ON_GPU))


def test_the_sources_of_what_a_gpu_measures():
    """The peers and what Nsight Compute runs, what makes the kernels, but no emulator, nothing that
    draws, and of the host's part of a call only what an experiment measures.
    """
    found = set(kept.sources(ladder, counts=False))
    lab = {
        f"experiments.lab.measure.{n}" for n in ("variants", "peers", "timing", "counter_target")
    }
    package = {
        f"fa_numba/{n}" for n in ("choices/tuned.csv", "parts/softmax.py", "device/kernel.py")
    }
    assert lab | package | {"experiments.ladder"} <= found
    assert not {name for name in found if name.startswith(("fa_numba/emulator/", "fa_numba/host/"))}
    assert not found & {"experiments.lab.measure.speeds", "experiments.loop_cost"}
    assert not [
        n for n in found if n.startswith(("experiments.lab.show.", "experiments.lab.record."))
    ]
    assert "fa_numba/host/binding.py" in kept.sources(host_cost, counts=False)


MODULES = {
    "__init__": "",
    "lab.__init__": "",
    "one": """
\"\"\"Words.\"\"\"
from functools import cache
from .lab import tables
from .lab.two import helper, other
from .lab import three

SIZES = (1, 2)  # words
LOOKS = {}
LOOKS["a"] = 3

def measure(options, bench):
    # words
    return helper(SIZES) * three.factor

def draw(rows):
    return tables.shown(rows) + other
""",
    "lab.two": """
from .three import factor

def helper(x):
    \"\"\"Words.

    More.\"\"\"
    text = \"\"\"one

two # no comment\"\"\"
    return inner(x) * factor

@cache
def inner(x):
    from .late import last
    return last

other = 1
""",
    "lab.three": "factor = 2\nunused = 3\n",
    "lab.late": "last = 1\n",
    "lab.tables": "def shown(rows):\n    return rows\n",
}


@pytest.fixture
def taken(tmp_path, monkeypatch):
    """Gives the digest of `MODULES`, some pieces of their text replaced."""
    monkeypatch.setattr(kept, "EXPERIMENTS", tmp_path / "experiments")
    monkeypatch.setattr(kept, "PACKAGE", tmp_path / "fa_numba")

    def digest(module="one", old="", new=""):
        for name, text in MODULES.items():
            path = kept.EXPERIMENTS.joinpath(*name.split(".")).with_suffix(".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            assert name != module or old in text
            path.write_text(text.replace(old, new) if name == module else text)
        slices.plain.cache_clear()
        return kept.digest(
            kept.sources(SimpleNamespace(__name__="experiments.one"), counts=True), ()
        )

    return digest


@pytest.mark.parametrize(
    ("module", "old", "new", "changes"),
    [
        ("one", "Words.", "Other words.", False),
        ("one", "  # words", "", False),
        ("one", "    # words\n", "", False),
        ("one", "SIZES = (1, 2)", "\n\nSIZES = (1, 2)", False),
        ("one", "+ other", "+ 2 * other", False),
        ("lab.two", "Words.", "Other words.", False),
        ("lab.two", "other = 1", "other = 2", False),
        ("lab.tables", "return rows", "return []", False),
        ("one", "SIZES = (1, 2)", "SIZES = (1, 3)", True),
        ("one", "= 3", "= 4", True),
        ("one", "* three", "+ three", True),
        ("lab.two", "import factor", "import unused as factor", True),
        ("one", "import helper, other", "import inner as helper, other", True),
        ("lab.two", "@cache\n", "", True),
        ("lab.two", "one\n\ntwo", "one\ntwo", True),
        ("lab.two", "# no comment", "", True),
        ("lab.two", "return last", "return last + 1", True),
        ("lab.three", "factor = 2", "factor = 3", True),
        ("lab.three", "unused = 3", "unused = 4", True),
        ("lab.late", "last = 1", "last = 2", True),
    ],
)  # fmt: skip
def test_only_what_measuring_reaches_changes_the_digest(taken, module, old, new, changes):
    """Of a module that is imported itself, all of it."""
    assert (taken() != taken(module, old, new)) == changes


def test_texts_without_words_are_the_same_programs():
    for path in sorted(kept.PACKAGE.rglob("*.py"))[::16]:
        text = path.read_text()
        said = "".join(slices.plain(path, 0)[0].values())
        assert _tree(said) == _tree(text), path


def _tree(text):
    """The program as a tree, without docstrings."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(
            node
        ):
            alone = len(node.body) == 1 and not isinstance(node, ast.Module)
            node.body[:1] = ast.parse("...").body if alone else []
    return ast.dump(tree)


@pytest.mark.parametrize("name", registry.names())
def test_what_draws_has_no_part(name):
    """It is imported where it is used, by functions that no measuring calls."""
    module = registry.load(name)
    for counts in (True, False):
        found = kept.sources(module, counts=counts)
        assert f"experiments.{name}" in found and "experiments.beside.film" not in found
        assert not [each for each in found if each.startswith("experiments.lab.show.")]


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
