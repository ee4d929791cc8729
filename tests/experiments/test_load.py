"""experiments.load: recorded numbers as columns or as a DataFrame, with a column for the sweep."""

import collections
import math
import sys
from types import SimpleNamespace

import numpy as np
import pytest

import experiments
from experiments.lab.record import FIGURES, Store, frames, registry
from experiments.lab.record.store import COLUMNS

# What else identifies a row of one sweep, beside the quantity that varies.
SAME = ("machine", "sweep", "series", "source", "pass", "dtype", "metric", "note", "causal")
SAME += ("head_dim", "heads_k", "Br", "Bc")


def rows_of(columns):
    return [dict(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=True)]


def test_the_columns_are_those_of_the_files():
    columns = experiments.load("loop_order", frame=False)
    assert tuple(columns) == ("machine", "sweep", *COLUMNS)
    store = Store(FIGURES)
    rows = [row for each in store.machines("loop_order") for row in store.read("loop_order", each)]
    assert [row.value for row in rows] == [
        None if math.isnan(value) else value for value in columns["value"].tolist()
    ]
    assert columns["seqlen_q"].dtype == np.int64 and columns["causal"].dtype == bool
    assert {*columns["machine"]} == {*store.machines("loop_order")}
    one = experiments.load("loop_order", "nvidia-h200", frame=False)
    assert {*one["machine"]} == {"nvidia-h200"}


@pytest.mark.parametrize(
    "name, varying",
    [
        ("block_size", lambda row: (row["seqlen_q"],)),
        ("crossover", lambda row: (row["seqlen_q"],)),
        ("decode", lambda row: (row["seqlen_q"], row["seqlen_k"])),
        ("online_softmax", lambda row: (row["seqlen_q"],)),
    ],
)
def test_a_point_of_a_sweep_has_one_row(name, varying):
    """A pivot table over the quantity that varies then averages nothing."""
    rows = rows_of(experiments.load(name, frame=False))
    found = collections.Counter((*(str(row[at]) for at in SAME), varying(row)) for row in rows)
    assert found.most_common(1)[0][1] == 1


def test_the_sweeps_of_loop_order():
    rows = rows_of(experiments.load("loop_order", frame=False))
    same = [at for at in SAME if at != "heads_k"]
    for sweep, varies in (("seqlen", "seqlen_q"), ("heads", "heads_q")):
        mine = [row for row in rows if row["sweep"] == sweep]
        found = collections.Counter((*(str(row[at]) for at in same), row[varies]) for row in mine)
        assert found.most_common(1)[0][1] == 1
        assert len({row[varies] for row in mine}) == 6


def test_unknown_names_get_the_nearest_one():
    with pytest.raises(ValueError, match="no recorded experiment is named 'sped'.*mean 'speed'"):
        experiments.load("sped")
    with pytest.raises(ValueError, match="recording of speed: nvidia-h200.* got 'h100'"):
        experiments.load("speed", "h100")


def test_a_dataframe():
    pandas = pytest.importorskip("pandas")
    table = experiments.load("loop_order", "nvidia-h200")
    assert isinstance(table, pandas.DataFrame) and str(table["Br"].dtype) == "Int64"
    times = table[(table.metric == "time") & (table.sweep == "seqlen") & (table["head_dim"] == 64)]
    times = times[(times["dtype"] == "float32") & ~times.causal]
    pivot = times.pivot_table(index="seqlen_q", columns="series", values="value", aggfunc="count")
    assert (pivot.max() == 1).all() and len(pivot) == 6


def test_without_pandas_there_are_columns(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert isinstance(experiments.load("speed"), dict)
    with pytest.raises(ImportError, match=r"pip install '\.\[data\]', or pass frame=False"):
        experiments.load("speed", frame=True)


@pytest.mark.parametrize("name", COLUMNS)
def test_a_column_without_rows_is_empty(name):
    assert frames._array(name, []).shape == (0,)


@pytest.mark.parametrize("installed", [True, False])
@pytest.mark.parametrize("frame", [True, False, None])
def test_a_frame_needs_pandas(frame, installed, monkeypatch):
    """The stand-in for pandas notes which columns may be empty."""

    class Frame:
        def __init__(self, columns):
            self.columns = columns

        def astype(self, kinds):
            self.kinds = kinds
            return self

    pandas = SimpleNamespace(DataFrame=Frame) if installed else None
    monkeypatch.setitem(sys.modules, "pandas", pandas)
    monkeypatch.setattr(frames.importlib.util, "find_spec", lambda name: pandas)
    if frame and not installed:
        with pytest.raises(ImportError, match=r"needs pandas; run pip install '\.\[data\]'"):
            experiments.load("loop_order", frame=frame)
        return
    found = experiments.load("loop_order", frame=frame)
    if installed and frame is not False:
        assert found.kinds == {"Br": "Int64", "Bc": "Int64", "n": "Int64"}
        found = found.columns
    assert len(found["value"]) > 0


def test_rows_without_sweeps_are_of_the_experiments_name():
    own, row = registry.load("speed"), object()
    assert registry.sweeps(own)(row) == "speed"
    with_sweeps = SimpleNamespace(__name__="experiments.some", sweep_of=lambda row: row)
    assert registry.sweeps(with_sweeps)(row) is row
