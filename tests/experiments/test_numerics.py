"""Errors against float64: inputs, samples, rows, bitwise agreement, figure and tables."""

import numpy as np
import pytest
from experiment_helpers import cells, made_up, no_gpu, on_some_gpu, recorded
from test_gpt2_table import exact

import fa_numba
from experiments import numerics
from experiments.lab.measure import calls, peers
from experiments.lab.record.store import Store
from experiments.lab.show import report
from experiments.numerics import NORMAL, ONLINE, OUTLIERS, SAFE, inputs
from fa_numba.problem import Problem


def synthetic(machine="some-gpu"):
    """A few rows of each kind: FA-2 is off by a rounding, standard by two, torch's by three."""
    rows = []
    for dtype, ours in numerics.OURS.items():
        shown = (*ours, *numerics.THEIRS[dtype])
        for kind in (NORMAL, OUTLIERS):
            for N in (128, 16384):
                problem = Problem(1, 4, 4, N, N, 64, dtype=dtype)
                for n, series in enumerate(shown):
                    value = (2.0, 1.5, 1.0, 3.0, 1.5, 1.0, 1.0)[n] * numerics.ROUNDING[dtype]
                    metrics = {"error": value, "rmse": value / 10, "max_error": 2 * value}
                    metrics |= {"identical": 0.25} if n in (1, 2) else {}
                    for metric, number in metrics.items():
                        own = {"machine": machine, "note": kind}
                        rows.append(made_up("numerics", problem, series, number, metric, **own))
    for kind in (NORMAL, OUTLIERS):
        for V, share in ((128, 1.0), (16384, 0.5)):
            own = {"machine": machine, "note": kind}
            of = ("numerics", Problem(64, 1, 1, V, V, 1))
            rows += [made_up(*of, series, 2e-7, "error", **own) for series in (SAFE, ONLINE)]
            rows.append(made_up(*of, ONLINE, share, "identical", **own))
    return rows


# --- inputs and what they are held against -----------------------------------------------------


@pytest.mark.parametrize("dtype", numerics.OURS)
def test_outliers_are_the_papers(dtype):
    problem = Problem(1, 4, 4, 2048, 2048, 64, dtype=dtype)
    normal, outliers = inputs(NORMAL, problem), inputs(OUTLIERS, problem)
    for x, y in zip(normal, outliers, strict=True):
        assert abs(x.std() - 1) < 0.02 and abs(x).max() < 7
        # N(0, 1) + N(0, 100) with a chance of 0.001: the variance is 1.1.
        assert y.var() == pytest.approx(1.1, rel=0.03)
        far = np.mean(abs(y) > 7)
        assert 0.3e-3 < far < 0.7e-3 and abs(y).max() > 25
        assert not np.array_equal(x, y)
    if dtype == "float16":
        np.testing.assert_array_equal(outliers[0], outliers[0].astype(np.float16))
    again = inputs(OUTLIERS, problem)
    np.testing.assert_array_equal(again[2], outliers[2])


# --- rows ------------------------------------------------------------------------------------


def test_the_precisions_table_is_of_the_longest_and_of_places_of_their_own():
    """bf16x6 errs half as much as float32, fp16x3 twice; the other series are not its own."""
    error = {"fa2-simt": 1.0, "fa2-mma-fp16x3": 2.0, "fa2-mma-bf16x6": 0.5, "fa2-mma-bf16x3": 90.0}
    places = [(NORMAL, 64, 128), (NORMAL, 64, 16384), *numerics.PLANES_AT]
    rows = [
        made_up("numerics", Problem(1, 4, 4, N, N, d), series, 1e-7 * x, "error", note=kind)
        for kind, d, N in places
        for series, x in error.items()
    ]
    shown = [line[:3] + line[-2:] for line in cells(numerics.precisions(rows).body)[1:]]
    assert shown == [
        [kind, str(d), str(N), "2.00", "0.50"]
        for kind, d, N in sorted([places[1], *numerics.PLANES_AT])
    ]
    assert numerics.precisions([r for r in rows if r.series == "fa2-simt"]) is None


def test_scores_of_ten_thousand():
    problem = Problem(1, 2, 2, 256, 256, 64)
    q, k, _ = inputs(numerics.LARGE, problem)
    scores = q @ k.swapaxes(-1, -2) / 8
    assert scores.std() == pytest.approx(1e4, rel=0.05)


def on_a_gpu(monkeypatch, attention=exact):
    """Rows of a GPU's run with stand-ins for its kernels."""
    no_gpu(monkeypatch)
    monkeypatch.setattr(fa_numba, "attention", attention)
    lengths = {"SEQLENS": (16,), "PLANES_AT": ()}
    for name, value in (lengths | {"HEAD_DIM": 8}).items():
        monkeypatch.setattr(numerics, name, value)
    return on_some_gpu(numerics)


def test_bits_are_compared_on_a_gpu(monkeypatch):
    def attention(q, k, v, **options):
        out = exact(q, k, v, **options)
        if options["algorithm"] == "fa2":
            out[:, ::2] *= np.asarray(1.01, out.dtype)
        return out

    rows = on_a_gpu(monkeypatch, attention)
    assert {r.source for r in rows} == {"measured"} and not [r for r in rows if r.failed]
    shares = {(r.series, r.place): r.value for r in rows if r.metric == "identical"}
    assert shares["fa1-simt", NORMAL] == shares["fa1-mma", OUTLIERS] == 1.0
    assert shares["fa2-simt", NORMAL] == pytest.approx(0.5, abs=0.02)
    errors = {(r.series, r.place): r.value for r in rows if r.metric == "error"}
    assert errors["fa1-simt", NORMAL] < 1e-7
    assert errors["fa2-simt", NORMAL] == pytest.approx(0.01 / np.sqrt(2), rel=0.2)
    assert (ONLINE, OUTLIERS) in errors and (SAFE, NORMAL) in errors


def test_a_failure_is_a_row(monkeypatch):
    def attention(q, k, v, **options):
        if options["algorithm"] == "standard":
            raise MemoryError
        return exact(q, k, v, **options)

    rows = on_a_gpu(monkeypatch, attention)
    failed = {(r.series, r.note) for r in rows if r.failed}
    assert failed == {
        (series, f"{kind}; failed: out of memory")
        for series in ("standard-simt", "standard-mma")
        for kind in (NORMAL, OUTLIERS)
    }
    # There is nothing to hold the others' bits against.
    assert {r.series for r in rows if r.metric == "identical"} == {ONLINE}


# --- figure and tables -----------------------------------------------------------------------


def test_the_tables(tmp_path):
    store = recorded(tmp_path, "numerics", synthetic(report.MACHINE))
    header, *lines = cells(report.text("numerics", store))
    assert len(lines) == 6 and len(lines[0]) == len(header)
    found = {tuple(line[:2]): line[2:] for line in lines}
    unit = 2.0**-11
    ratios = ["2.00", "2.00"]
    assert found["fp16", OUTLIERS] == [
        *("16384", "GPU"),
        *(f"{n * unit / 10:.1e}" for n in (2.0, 1.5, 1.0, 3.0, 1.5)),
        *(*ratios, "1.68", f"{2 * unit:.1e}", f"{unit:.1e}"),
    ]
    assert found["fp16", NORMAL][9] == found["fp32", OUTLIERS][9] == "-"
    header, *lines = cells(report.text("numerics_identical", store))
    assert len(lines) == 10 and len(lines[0]) == len(header)
    assert lines[0] == [
        *("online softmax and safe softmax", "fp32", NORMAL, "GPU"),
        *("100.0 % (N=128)", "50.0 % (N=16384)", "2.0e-07", "2.0e-07"),
    ]
    for name in ("numerics", "numerics_identical"):
        assert report.text(name, Store(tmp_path / "none")) == "no recording yet\n"


def test_the_figure():
    figure = numerics.draw(synthetic())
    assert [ax.get_title() for ax in figure.axes] == [
        f"{dtype}, {kind}"
        for kind in ("normal inputs", "inputs with outliers")
        for dtype in ("fp32", "fp16", "bf16")
    ]
    # Four series, a rounding, and in fp32 what is claimed.
    assert [len(ax.lines) for ax in figure.axes] == [6, 5, 5] * 2
    # No point lies outside the axes.
    for ax in figure.axes:
        low, high = ax.get_xlim()
        assert all(low < x < high for line in ax.lines[:-2] for x in line.get_xdata() if x > 1)
    half = [row for row in synthetic() if row.dtype == "float16"]
    assert [ax.get_title() for ax in numerics.draw(half).axes] == [
        "fp16, normal inputs",
        "fp16, inputs with outliers",
    ]


def test_torch_is_held_against_its_own_unfused(monkeypatch):
    """Whose bits a series is compared with."""
    problem = Problem(1, 1, 1, 8, 8, 8, dtype="float16")
    monkeypatch.setattr(peers, "available", lambda: True)
    monkeypatch.setattr(peers, "on_device", lambda arrays, dtype: arrays)
    monkeypatch.setattr(calls, "make", lambda *_: lambda: np.zeros(problem.q_shape))
    made = {s: ordinary for s, _, _, ordinary in numerics._attention(problem, NORMAL)}
    assert made == dict.fromkeys(numerics.OURS["float16"], "standard-mma") | dict.fromkeys(
        numerics.THEIRS["float16"], peers.UNFUSED
    )
