"""Softmax over the vector's length: what is counted and timed, the figure and the table."""

import numpy as np
import pytest
from experiment_helpers import flat, recorded
from offline import CAPABILITY, compiled

from experiments import online_softmax
from experiments.beside import softmax_top_k
from experiments.lab.measure import check, peers, timing, top_k
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


def exact_top_k(x, k):
    """Probabilities in float64 and indices; of equal elements the first."""
    p = np.exp(x.astype(np.float64) - x.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    at = np.argsort(-x, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(p, at, 1), at


@pytest.mark.parametrize("k, V", [(5, 1031), (1, 300), (15, 40), (5, 3)])
@pytest.mark.parametrize("series", softmax_top_k.OURS)
def test_the_largest_probabilities_are_those_of_numpy(series, k, V):
    """Of many equal elements the first ones; of fewer than k elements all, then 0 and -1."""
    x = online_softmax.vectors(2 * V).reshape(2, V)
    x[1] = np.round(x[1])
    x[1, ::256] = 3  # elements of one warp that are equal
    x[0, V - 1] = -np.inf
    with device.using("emulator"):
        y, at = softmax_top_k.call(series, x, k, np.empty)()
    p, expected = exact_top_k(x, k)
    n = min(k, V)
    np.testing.assert_allclose(y[:, :n], p, rtol=2e-6)
    assert (y[:, n:] == 0).all() and (at[:, n:] == -1).all()
    there = p > 0  # an element of -inf is none of the largest for the fused kernel
    assert (at[:, :n][there] == expected[there]).all()
    if series == softmax_top_k.FUSED and n == V:
        assert at[0, V - 1] == -1


def test_top_k_of_no_element_and_of_too_many():
    x = np.full((1, 9), -np.inf, np.float32)
    with device.using("emulator"):
        y, at = softmax_top_k.call(softmax_top_k.FUSED, x, 2, np.empty)()
    assert y.tolist() == [[0, 0]] and at.tolist() == [[-1, -1]]
    for k in (0, 33):
        with pytest.raises(ValueError, match=f"k must be from 1 to 32, got {k}"):
            top_k.make_top_k(k)


def test_the_kernel_keeps_its_list_in_registers():
    assert "sm_90a" in CAPABILITY
    ptx, log = compiled(top_k.make_softmax_top_k(softmax_top_k.K), "sm_90a")
    assert ".local" not in ptx and ".f64" not in ptx and "0 bytes spill stores" in log


def test_wrong_probabilities_and_indices_are_refused():
    x = online_softmax.vectors(3 * 50).reshape(3, 50)
    y, at = exact_top_k(x, 5)
    assert top_k.check(x, 5, (y, at)) < 1e-6
    for wrong in ((y * 1.001, at), (y, at[:, ::-1]), (y, at * 0), (y, at - 50), (y * np.nan, at)):
        with pytest.raises(check.WrongResult):
            top_k.check(x, 5, wrong)


def with_top_k(machine="some-gpu"):
    """Times of top-k in proportion to the accesses; torch's are those of the safe one."""
    rows = []
    each = {softmax_top_k.FUSED: 1.0, "online-top-k": 4.0}
    for batch, V, k in [*((b, V, 5) for b in (4000, 10) for V in (256, 25000)), (4000, 25000, 30)]:
        for series in softmax_top_k.SERIES:
            value = each.get(series, 5.0) * batch * V / 1e8
            fields = softmax_top_k.about(NAME, series, batch, V, machine, k)
            rows.append(online_softmax.time_row(timing.Timing(value, value, value, 20), **fields))
    return rows


def test_times_of_top_k_are_of_checked_results(monkeypatch):
    """On the emulator in a GPU's place; torch's stand-in is wrong."""
    monkeypatch.setattr(device, "empty", np.empty)
    monkeypatch.setattr(device, "synchronize", lambda: None)
    monkeypatch.setattr(device, "time_ms", lambda call, repeats, **_: [1.0] * repeats)
    monkeypatch.setattr(peers, "available", lambda: True)
    monkeypatch.setattr(peers, "release", lambda: None)
    wrong = lambda x, k: lambda out=None: (x[:, :k], np.tile(np.arange(k), (len(x), 1)))  # noqa: E731
    monkeypatch.setattr(peers, "top_k", wrong)
    monkeypatch.setattr(softmax_top_k, "KS", (5, 2))
    monkeypatch.setattr(softmax_top_k, "V_OF_PAPER", 20)
    monkeypatch.setattr(softmax_top_k, "BATCH_OF_PAPER", 3)
    x, bench = online_softmax.vectors(3 * 40), Bench(machine="some-gpu")
    rows = list(softmax_top_k.times(NAME, x, (4, 40), (3, 2), bench))
    at = {(r.batch, r.seqlen_q, r.place, online_softmax.sweep_of(r)) for r in rows}
    assert at == {
        (3, 40, "K=5", "length of 3 vectors, top-k"),
        (2, 40, "K=5", "length of 2 vectors, top-k"),
        (3, 20, "K=5", "length of 3 vectors, top-k"),
        (3, 20, "K=2", "K, 3 vectors"),
    }
    assert {r.series for r in rows if r.failed} == {softmax_top_k.PEER}


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
    store = recorded(tmp_path / "more", NAME, [*quick, *with_top_k(report.MACHINE)])
    text = report.text("online_softmax_top_k", store)
    assert "| 4000 | 30 | 25000 | 5 | 4 | 1 | 5 | 5.00 | 5.00 |" in text
    assert "6 of 6 counted numbers" in text and online_softmax.softmax_top_k.table([]) is None


def test_the_figure(quick):
    figure = online_softmax.draw([*quick, *timed()])
    left, many, few = figure.axes
    assert [bar.get_width() for bar in left.patches][:3] == [3, 4, 3]
    assert "4 (published: 4)" in [text.get_text().strip() for text in left.texts]
    assert [len(ax.lines) for ax in (many, few)] == [4, 4]
    assert online_softmax.draw(quick) is None
    *_, last = online_softmax.draw([*quick, *timed(), *with_top_k()]).figure.axes
    assert len(last.lines) == 4 and "top 5 of 4000 vectors" in last.get_title()
