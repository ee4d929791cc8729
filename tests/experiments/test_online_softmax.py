"""Softmax over the vector's length: what is counted and timed, the figure and the table."""

import numpy as np
import pytest
from experiment_helpers import flat, recorded

from experiments import online_softmax
from experiments.lab.measure import check, peers, timing
from experiments.lab.record.options import Bench, Options
from experiments.lab.record.store import EMULATOR, MODEL
from experiments.lab.show import report
from fa_numba import device, io_model

NAME = online_softmax.NAME


def timed(machine="some-gpu", lengths=(256, 1024, 4096)):
    """Times in proportion to the accesses; torch's are half of the online one's."""
    rows = []
    for batch in online_softmax.BATCHES:
        for V in lengths:
            for series in (*online_softmax.SERIES, online_softmax.PEER):
                each = {"softmax-safe": 4.0, online_softmax.PEER: 1.5}.get(series, 3.0)
                value = each * batch * V / 1e8
                fields = online_softmax.of_vectors(series, batch, V, machine)
                found = timing.Timing(value, 0.9 * value, 1.2 * value, 20)
                rows.append(online_softmax.time_row(found, **fields))
    return rows


def synthetic(machine="some-gpu"):
    rows = timed(machine)
    for series in online_softmax.SERIES:
        rows += online_softmax._model(series, 10, 256)
        rows += online_softmax._count(series, 10, 256)
    return rows


@pytest.fixture(scope="module")
def quick():
    """What a quick run without a GPU gives."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(online_softmax, "QUICK_LENGTHS", (40,))
        patch.setattr(online_softmax, "COUNTED_SEQLENS", (40,))
        return flat(online_softmax.measure(Options(quick=True), Bench()))


def test_what_is_counted_is_the_model(quick):
    def numbers(source):
        return {
            (r.series, r.batch, r.seqlen_q, r.metric): r.value
            for r in quick
            if r.source == source and r.metric != "nan" and r.seqlen_q == 40
        }

    assert numbers("counted") == numbers("model")
    elements = online_softmax.COUNTED_BATCH * 40
    assert numbers("model")["softmax-safe", 10, 40, "loads"] == 3 * elements
    assert {r.machine for r in quick} == {MODEL, EMULATOR}


def test_the_naive_one_overflows(quick):
    nan = {r.series: r.value for r in quick if r.metric == "nan"}
    assert nan == {"softmax-naive": 40, "softmax-safe": 0, "softmax-online": 0}


def test_a_row_of_scores_goes_through_memory_four_times_or_never(quick):
    found = online_softmax.an_element(quick, "counted")
    assert found["standard-simt"] == {"loads": 2, "stores": 2}
    assert found["fa1-simt"] == found["fa2-simt"] == {"loads": 0, "stores": 0}


def test_a_long_row_is_loaded_once_more():
    problem = online_softmax.one_head(online_softmax.LONG_SEQLEN, 64)
    planned = online_softmax.plan("standard-simt", problem)
    rows = list(
        online_softmax._attention("standard-simt", problem, planned.tiles, planned.accesses, MODEL)
    )
    assert "needs 3 loads per element instead of 2." in online_softmax._long(rows)
    assert online_softmax._long([]) == ""


def test_the_published_accesses_are_the_models():
    published = online_softmax.paper()
    assert published == {
        series: io_model.softmax(1, 1, online_softmax.algorithm(series)).total
        for series in online_softmax.SERIES
    }


def test_times_are_of_checked_results(monkeypatch):
    """On the emulator in a GPU's place, with a softmax that is wrong at one length."""
    monkeypatch.setattr(device, "to_gpu", lambda array: array)
    monkeypatch.setattr(device, "synchronize", lambda: None)
    monkeypatch.setattr(peers, "available", lambda: False)
    monkeypatch.setattr(peers, "release", lambda: None)
    monkeypatch.setattr(online_softmax, "BATCHES", (3, 2))
    monkeypatch.setattr(device, "time_ms", lambda call, repeats, **_: [1.0] * repeats)
    softmax = online_softmax.fa_numba.softmax

    def faulty(x, algorithm, out=None):
        y = softmax(x, algorithm=algorithm)
        return y * 2 if (algorithm, x.shape[1]) == ("safe", 8) else y

    monkeypatch.setattr(online_softmax.fa_numba, "softmax", faulty)
    rows = list(online_softmax._times((8, 20), Bench(machine="some-gpu")))
    assert len(rows) == 12
    failed = [(r.series, r.seqlen_q) for r in rows if r.failed]
    assert failed == [("softmax-safe", 8)] * 2
    assert all("against float64" in r.note for r in rows if r.failed)


def test_unfused_attention_with_each_softmax(monkeypatch):
    """One that is wrong fails by itself; ratios are over the online one's time."""

    def call(series, problem, q, k, v, *, softmax):
        S = q @ k.swapaxes(-1, -2) * np.float32(problem.scale)
        return lambda out=None: softmax(S) @ v

    monkeypatch.setattr(peers, "on_device", lambda arrays: arrays)
    monkeypatch.setattr(peers, "call", call)
    monkeypatch.setattr(peers, "release", lambda: None)
    wrong = lambda x: lambda out=None: np.full_like(x, 1 / x.shape[1])  # noqa: E731
    monkeypatch.setattr(peers, "softmax", wrong)
    monkeypatch.setattr(device, "synchronize", lambda: None)
    took = iter((3.0, 2.0))
    monkeypatch.setattr(device, "time_ms", lambda call, repeats, **_: [next(took)] * repeats)
    rows = list(online_softmax._unfused_times(Bench(machine="some-gpu"), (24,)))
    assert [(r.series, r.value) for r in rows if not r.failed] == [
        ("unfused-safe", 3.0),
        ("unfused-online", 2.0),
    ]
    assert [r.series for r in rows if "against float64" in r.note] == ["unfused-torch"]
    assert "| 24 | 3 | 2 | - | 1.50 | - |" in online_softmax.inside(rows).body


def test_the_gate():
    x = online_softmax.vectors(3 * 50).reshape(3, 50)
    gate = online_softmax.vector_gate(x)
    right = np.exp(x) / np.exp(x).sum(axis=1, keepdims=True)
    assert gate(right) <= gate.bounds[0]
    almost = right * np.float32(1.00001)
    assert gate.peer(almost) > gate.bounds[0]
    for wrong, held in ((almost, gate), (right * np.float32(1.001), gate.peer)):
        with pytest.raises(check.WrongResult):
            held(wrong)
    wrong = right.copy()
    wrong[-1, 7] = np.nan
    with pytest.raises(check.WrongResult):
        gate(wrong)


def test_the_table(tmp_path, quick):
    store = recorded(tmp_path, NAME, [*quick, *timed(report.MACHINE)])
    text = report.text(NAME, store)
    assert "| safe softmax | 3 | 1 | 4 | 4 | 4 | 0 | 1.00 (256) | 1.00 (256) |" in text
    assert "| online softmax | 2 | 1 | 3 | 3 | 3 | 0 | 1.33 (" in text
    assert "| standard attention | 2 | 2 | 4 | 4 | - | - | - | - |" in text
    assert len([line for line in text.splitlines() if line.startswith("| ")]) <= 2 + 10


def test_the_figure(quick):
    figure = online_softmax.draw([*quick, *timed()])
    left, many, few = figure.axes
    assert [bar.get_width() for bar in left.patches][:3] == [3, 4, 3]
    assert "4 (published: 4)" in [text.get_text().strip() for text in left.texts]
    assert [len(ax.lines) for ax in (many, few)] == [4, 4]
    assert online_softmax.draw(quick) is None
