"""From which length FlashAttention wins: crossings, rows, figure and table."""

from dataclasses import replace
from functools import cache

import pytest
from experiment_helpers import made_up, no_gpu, on_some_gpu
from test_gpt2_table import exact, exact_gradients

import fa_numba
from experiments import crossover
from experiments.crossover import CASES, OVER, crossing, in_words
from experiments.lab.measure import timing, variants
from experiments.lab.record.options import Bench, Options
from experiments.lab.record.store import MODEL
from fa_numba.problem import Problem


@cache
def model():
    """The model's rows at every length of `synthetic`."""
    with fa_numba.device.using("emulator"):
        return [
            row
            for dtype, d, batch, heads in CASES
            for N in LENGTHS
            for row in crossover._model(Problem(batch, heads, heads, N, N, d, dtype=dtype))
        ]


LENGTHS = (64, 128, 256, 512, 1024, 4096)


def synthetic(machine="some-gpu"):
    """Rows of the model and of a GPU where flash takes 8 us and 1 us for each 32 of N, standard
    2 us for each 32 at every size: flash wins from N=512 on, and is level at 256.
    """
    rows = list(model())
    for dtype, d, batch, heads in CASES:
        for N in LENGTHS:
            problem = Problem(batch, heads, heads, N, N, d, dtype=dtype)
            for series in crossover.series_of(dtype):
                for pass_ in crossover.PASS_NAMES:
                    value = 8.0 + N / 32 if series in OVER[dtype] else N / 16
                    own = {"machine": machine, "pass_": pass_, "n": 10}
                    rows.append(made_up("crossover", problem, series, value, **own))
    return rows


def test_the_crossing_is_where_it_stays_won():
    assert crossing({64: 0.5, 128: 1.2, 256: 0.9, 512: 1.1, 1024: 2.0}) == 512
    assert crossing({64: 1.5, 128: 1.2}) == 64
    assert crossing({64: 1.5, 128: 1.0}) is None and crossing({}) is None
    assert in_words({64: 0.5, 128: 2.0}) == "128"
    assert in_words({128: 2.0, 64: 1.5}) == "all, from 64"
    assert in_words({64: 2.0, 4096: 0.9}) == "none to 4096"
    assert in_words(None) == in_words({}) == "-"


def test_the_lengths_are_fine_steps():
    lengths = crossover.SEQLENS
    assert (lengths[0], lengths[-1], len(lengths)) == (64, 4096, 13)
    ratios = [b / a for a, b in zip(lengths, lengths[1:], strict=False)]
    assert max(ratios) == 1.5 and min(ratios) == pytest.approx(4 / 3)


def test_the_models_bytes_are_those_of_the_plans(monkeypatch):
    monkeypatch.setattr(crossover, "QUICK_SEQLENS", (128,))
    rows = list(crossover.measure(Options(quick=True), Bench()))
    assert {(r.machine, r.source) for r in rows} == {(MODEL, "model")}
    found = {(r.series, r.pass_): r.value for r in rows}
    assert len(found) == len(rows) == 2 * 3 * 2
    shape = (16, 8, 128, 64)
    with fa_numba.device.using("emulator"):
        options = {"algorithm": "fa2", "dtype": "float16"}
        plans = [
            fa_numba.plan(shape, shape, return_lse=True, **options),
            fa_numba.plan(shape, shape, passes="bwd", **options),
        ]
    assert found["fa2-mma", "fwd+bwd"] == sum(p.accesses.bytes for p in plans)


def measured(monkeypatch, backward=exact_gradients):
    """Rows of a small run with stand-ins for the GPU and its kernels; gradients checked to 16."""
    ran = []

    def time_call(run, check, seconds):
        check(run())
        ran.append(run)
        return timing.Timing(1.0 + len(ran), 1.0, 3.0, 20, float("nan"))

    monkeypatch.setattr(variants, "time_call", time_call)
    monkeypatch.setattr(variants, "CHECKED_SEQLEN", 16)
    no_gpu(monkeypatch)
    monkeypatch.setattr(fa_numba, "attention", exact)
    monkeypatch.setattr(fa_numba, "attention_backward", backward)
    small = tuple((dtype, 8, batch, 2) for dtype in OVER for batch in (1, 2))
    monkeypatch.setattr(crossover, "CASES", small)
    monkeypatch.setattr(crossover, "SEQLENS", (12, 24))
    rows = on_some_gpu(crossover)
    assert len({(*row.key, row.machine) for row in rows}) == len(rows)
    return [row for row in rows if row.machine == "some-gpu"], ran


def test_every_case_is_measured(monkeypatch):
    rows, ran = measured(monkeypatch)
    assert not [row.note for row in rows if row.failed] and len(ran) == len(rows)
    assert {(r.dtype, r.batch, r.seqlen_q, r.series, r.pass_) for r in rows} == {
        (dtype, batch, N, series, pass_)
        for dtype in OVER
        for batch in (1, 2)
        for N in (12, 24)
        for series in crossover.series_of(dtype)
        if not series.startswith("torch")
        for pass_ in crossover.PASS_NAMES
    }


def test_wrong_gradients_are_a_row_at_every_length(monkeypatch):
    def wrong(*arrays, algorithm, **options):
        dq, dk, dv = exact_gradients(*arrays, algorithm=algorithm, **options)
        return dq, dk, dv * (1 + (algorithm == "fa1"))

    rows, _ = measured(monkeypatch, wrong)
    failed = {(r.series, r.pass_, r.seqlen_q) for r in rows if r.failed}
    assert failed == {(s, "fwd+bwd", N) for s in ("fa1-mma", "fa1-simt") for N in (12, 24)}
    assert all("dv: the error" in r.note for r in rows if r.failed)


def test_a_failed_time_is_no_gain():
    rows = synthetic()
    broken = [
        replace(r, value=None, note="; failed: out of memory")
        if (r.series, r.metric, r.seqlen_q) == ("standard-mma", "time", 4096)
        else r
        for r in rows
    ]
    found = crossover.gains(broken)["float16", 64, 128, "fwd"]
    assert max(found["fa2-mma"]) == 1024 and max(found["torch-fa2"]) == 4096


def test_the_figure():
    figure = crossover.draw(synthetic())
    assert [ax.get_title() for ax in figure.axes] == [
        f"{name}, {dtype}, d=64"
        for dtype in ("fp16", "fp32")
        for name in ("forward", "forward + backward")
    ]
    # Three of many heads, three of few; the line of reference.
    assert [len(ax.lines) for ax in figure.axes] == [7] * 4
    assert crossover.draw(model()) is None
    message = figure.legends[0].get_title().get_text()
    ahead = [
        gain > 1
        for case, curves in crossover.gains(synthetic()).items()
        for gain in {**curves.get("fa2-simt", {}), **curves.get("fa2-mma", {})}.values()
        if case[1] == 64
    ]
    points = f"{sum(ahead)} of {len(ahead)}"
    assert message == f"FA-2 is faster than standard attention at {points} points drawn"
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert len(set(names)) == len(names) == 7 and names[4:6] == [
        "batch x heads = 128",
        "batch x heads = 8",
    ]
    only = [row for row in synthetic() if row.head_dim == 128]
    assert [ax.get_title() for ax in crossover.draw(only).axes][0] == "forward, fp16, d=128"
    assert crossover.draw([]) is None
