"""figures/data/README.md names what the recorded files have, and nothing else; its examples run."""

import collections
import csv
import doctest
import functools
import json
import re
from pathlib import Path

import pytest

import experiments
from experiments.lab.record import FIGURES, Store, registry
from experiments.lab.record.store import COLUMNS

DATA = FIGURES / "data"
PAGE = (DATA / "README.md").read_text("utf-8")
NAME = re.compile(r"`([^`]+)`")
# What a word in angle brackets stands for in the names of the page.
WORDS = {"<n>": r"\d+", "<series>": r"[\w-]+", "<array>": r"\w+"}


def section(title):
    """The text below a heading, up to the next heading of the same or a higher level."""
    (heading,) = re.findall(rf"^(#+) {re.escape(title)}$", PAGE, re.M)
    below = PAGE.partition(f"\n{heading} {title}\n")[2]
    return re.split(rf"^#{{2,{len(heading)}}} ", below, maxsplit=1, flags=re.M)[0]


def lines(text, *header):
    """The cells of all tables in a text whose header begins with the given words."""
    found = []
    for table in re.findall(r"(?:^\|.*\n)+", text, re.M):
        rows = [[cell.strip() for cell in line.strip("|\n ").split(" | ")]
                for line in table.splitlines()]  # fmt: skip
        if rows[0][: len(header)] == [*header]:
            found += rows[2:]
    assert found
    return found


def named(text, *header, column=0):
    """The names in one column of the tables, in backquotes; none of them twice."""
    found = [name for row in lines(text, *header) for name in NAME.findall(row[column])]
    assert [x for x, n in collections.Counter(found).items() if n > 1] == []
    return set(found)


def pattern(name):
    for word, regular in WORDS.items():
        name = name.replace(re.escape(word), regular)
    return re.compile(name)


@functools.cache
def recordings():
    """The rows of each experiment."""
    store = Store(FIGURES)
    names = sorted(path.name for path in DATA.iterdir() if path.is_dir())
    return {n: [row for m in store.machines(n) for row in store.read(n, m)] for n in names}


def values(name):
    return {getattr(row, name) for rows in recordings().values() for row in rows}


def test_the_columns_are_those_of_load():
    assert named(section("Columns"), "column") == {"machine", "sweep", *COLUMNS}


def test_every_sweep_is_named():
    rows = lines(section("Sweeps"), "experiment", "sweep")
    said = [tuple(NAME.findall(row[0]) + NAME.findall(row[1])) for row in rows]
    folder = Path(experiments.__path__[0])
    several = [n for n in registry.names() if "def sweep_of" in (folder / f"{n}.py").read_text()]
    found = {
        (name, registry.sweeps(registry.load(name))(row))
        for name in several
        for row in recordings()[name]
    }
    assert len(said) == len({*said}) and {*said} == found


@pytest.mark.parametrize(
    "title, column, field",
    [
        ("Sources", "source", "source"),
        ("Passes", "pass", "pass_"),
        ("Dtypes", "dtype", "dtype"),
        ("Units", "unit", "unit"),
        ("Series", "series", "series"),
    ],
)
def test_every_value_is_named(title, column, field):
    assert named(section(title), column) == values(field)


def test_every_metric_is_named_with_its_units():
    rows = lines(section("Metrics"), "metric", "unit")
    said = [(m, u) for row in rows for m in NAME.findall(row[0]) for u in NAME.findall(row[1])]
    found = {(row.metric, row.unit) for rows in recordings().values() for row in rows}
    assert len(said) == len({*said}) and {*said} == found


def test_the_experiments_of_a_hardware_counter_are_named():
    for row in lines(section("Hardware counters"), "metric", "unit"):
        (metric,) = NAME.findall(row[0])
        having = {n for n, rows in recordings().items() if any(r.metric == metric for r in rows)}
        assert {*NAME.findall(row[3])} == having, metric


def test_the_machines_and_metrics_of_every_experiment_are_named():
    """A row of the page links to the page of the experiment. `tune` has none."""
    said = {}
    counters = named(section("Counters of the experiment profile"), "metric", "unit")
    for name, machines, metrics in lines(section("Experiments"), "experiment", "machines"):
        (own,) = NAME.findall(name)
        assert f"](../tables/{own}.md)" in name or own == "tune"
        more = counters if "profile" == own else set()
        said[own] = {*NAME.findall(machines)}, {*NAME.findall(metrics)} | more
    assert said == {
        name: ({row.machine for row in rows}, {row.metric for row in rows})
        for name, rows in recordings().items()
    }


def test_every_note_is_explained():
    """Up to the first semicolon, and but for reasons of failures."""
    known = collections.defaultdict(dict)
    for having, notes, _ in lines(section("Notes"), "experiments", "note"):
        for name in NAME.findall(having):
            for note in NAME.findall(notes):
                known[name][note] = pattern(re.escape(note))
    used = set()
    for name, rows in recordings().items():
        for place in {row.place for row in rows} - {""}:
            mine = [note for note, regular in known[name].items() if regular.fullmatch(place)]
            assert mine or place.startswith("failed: "), (name, place)
            used |= {(name, note) for note in mine}
    assert {(name, note) for name, notes in known.items() for note in notes} == used


def test_every_key_of_the_json_files_is_named():
    files, runs = set(), set()
    for path in DATA.glob("*/*.json"):
        about = json.loads(path.read_text("utf-8"))
        old = {k: x for k, x in about.items() if k not in ("machine", "counted")}
        files |= {"machine", *about} - (set() if "runs" in about else {*old})
        files |= {f"counted.{key}" for key in about.get("counted", ())}
        for run in about.get("runs", [old]):
            runs |= {*run}
            runs |= {f"{k}.{n}" for k in ("device", "clocks") for n in run.get(k, ())}
    assert named(section("Runs"), "key of the file") == files
    new = {"ran", "peers"}  # runs have them by now, older recordings do not
    assert named(section("Runs"), "key of a run") == runs | new


def test_the_published_numbers_are_described():
    with open(DATA / "published.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    text = section("Published numbers")
    assert named(text, "column") == {*rows[0]}
    assert named(text, "paper") == {row["paper"] for row in rows}
    (reading,) = (row[1] for row in lines(text, "column") if row[0] == "`reading`")
    assert {*NAME.findall(reading)} == {row["reading"] for row in rows}
    found = {(re.sub(r"\d+%", "<n>%", row["metric"]), row["unit"]) for row in rows}
    said = [(m, u) for row in lines(text, "metric", "unit")
            for m in NAME.findall(row[0]) for u in NAME.findall(row[1])]  # fmt: skip
    assert len(said) == len({*said}) and {*said} == found


@pytest.mark.parametrize("frame", [True, False], ids=["a DataFrame", "a dictionary"])
def test_the_examples_run(frame, tmp_path, monkeypatch):
    if frame:
        pytest.importorskip("pandas")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", section("Load the numbers"), re.S)
    text = "".join(blocks[:1] if frame else blocks[1:])
    test = doctest.DocTestParser().get_doctest(text, {}, "README.md", None, 0)
    said = []
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    assert runner.run(test, out=said.append).failed == 0, "".join(said)
    assert frame or (tmp_path / "curve.png").exists()
