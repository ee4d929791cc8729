"""Training steps of GPT-style models: sizes, FLOPs, rows, figure; with torch steps on a CPU."""

import math
from dataclasses import replace

import pytest

from experiments import training
from experiments.beside import gpt
from experiments.lab.record.options import Bench, Options

SMALL = gpt.Sizes("small", 2, 16, 2, 11)
needs_torch = pytest.mark.skipif(gpt.torch is None, reason="no torch")


def test_the_models_have_the_papers_numbers_of_parameters():
    sizes = {sizes.name: sizes for sizes, *_ in training.CASES}
    found = {name: of.parameters(1024) / 1e6 for name, of in sizes.items()}
    assert found == pytest.approx(
        {"GPT3-1.3B": 1314, "GPT3-2.7B": 2652, "GPT-2 small": 124.5, "GPT-2 medium": 355}, rel=5e-3
    )
    assert {(of.hidden // of.heads) for of in sizes.values()} == {64, 128}
    for of, context, batch in training.CASES:
        assert training.problem(of, context, batch).seqlen_q * batch in (8192, 16384, 32768)


def test_the_flops_are_the_papers_formula():
    """6 N params + 12 layers hidden N^2 for each sequence."""
    params = SMALL.parameters(8)
    assert SMALL.flops(3, 8) == 3 * (6 * 8 * params + 12 * 2 * 16 * 8 * 8)


@pytest.fixture
def steps(monkeypatch):
    """Steps of 20 ms that do not fit for unfused attention, and fail for cuDNN."""
    asked = []

    def train(sizes, batch, context, series, recompute, device):
        asked.append((series, recompute))
        if series == "torch-unfused" and not recompute:
            raise MemoryError("out of memory")
        if series == "torch-cudnn":
            raise ValueError("the loss must fall")
        return [10.0, 20.0, 40.0], 1.0

    monkeypatch.setattr(gpt, "train", train)
    return asked


def rows():
    return [row for series in training.SERIES
            for row in training.rows_of(SMALL, 8, 3, series, "some-gpu", "cpu")]  # fmt: skip


def test_a_step_that_does_not_fit_is_measured_with_recomputation(steps):
    found = {(row.series, row.metric): row for row in rows()}
    assert steps[:2] == [("torch-unfused", False), ("torch-unfused", True)] and len(steps) == 6
    assert found["torch-unfused", "time"].note == "small; recomputation"
    assert found["fa2-auto", "time"].note == "small" and found["fa2-auto", "time"].value == 20
    speed = found["fa2-auto", "speed"]
    assert speed.value == pytest.approx(SMALL.flops(3, 8) / 20e9) and speed.p20 < speed.p80
    assert (
        found["torch-cudnn", "time"].failed
        and "loss must fall" in found["torch-cudnn", "time"].note
    )


def synthetic():
    """Rows of all series of a model, as the figure draws them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpt, "train", lambda *case: ([10.0, 20.0, 40.0], 1.0))
        return rows()


def test_the_table_and_the_figure(steps):
    known = [
        replace(row, note=row.note.replace("small", "GPT3-1.3B"), seqlen_q=2048) for row in rows()
    ]
    (line,) = training.table(known).body.splitlines()[2:]
    assert line.startswith("| GPT3-1.3B | 2k | 0* | 0 | 0 | 0 | - | 1.00 | 1.04 | 1.00 | 1.38 |")
    assert training.draw(known).axes[0].get_xlabel() == "speed of a training step (TFLOP/s)"
    assert training.draw([]) is training.table([]) is None


def test_quick_runs_measure_a_small_model(steps, monkeypatch):
    monkeypatch.setattr(training, "_reset", lambda on: None)
    monkeypatch.setattr(training.gpt, "torch", None)
    of = training.rows_of
    monkeypatch.setattr(training, "rows_of", lambda *case: of(*case, "cpu"))
    found = [
        r for each in training.measure(Options(quick=True), Bench(machine="some-gpu")) for r in each
    ]
    assert {row.place for row in found} == {"quick"} and {r.series for r in found} == {
        *training.SERIES
    }


@needs_torch
def test_torch_parameters_and_recomputation_on_a_cpu():
    torch = gpt.torch
    w = gpt.model(SMALL, 8, "cpu")
    assert sum(x.numel() for x in w.values()) == SMALL.parameters(8)
    tokens = torch.arange(18).reshape(2, 9) % 11
    grads = []
    for recompute in (False, True):
        loss = gpt.loss(w, SMALL, tokens, gpt.unfused, recompute)
        grads.append(torch.autograd.grad(loss, w.values()))
        assert loss.item() == pytest.approx(math.log(11), rel=0.05)
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@needs_torch
def test_torch_attention_of_every_series_on_a_cpu():
    """Causal, with the scale 1 / sqrt(d). The fused ones of a CPU are torch's own."""
    q, k, v = gpt.torch.randn(3, 1, 2, 16, 16, generator=gpt.torch.Generator().manual_seed(0))
    expected = gpt.F.scaled_dot_product_attention(q, k, v, is_causal=True)
    for series in ("torch-unfused", "fa1-auto", "fa2-auto", "torch-fa2"):
        found = gpt.causal_attention(series)(q, k, v)
        assert (found - expected).abs().max() < 1e-5, series


@needs_torch
@pytest.mark.parametrize("recompute", [False, True])
def test_torch_steps_lower_the_loss_on_a_cpu(recompute, monkeypatch):
    monkeypatch.setattr(gpt, "STEPS", 4)
    monkeypatch.setattr(gpt, "LEARNING_RATE", 1e-2)
    samples, loss = gpt.train(SMALL, 2, 8, "torch-unfused", recompute, "cpu")
    assert len(samples) == 4 and min(samples) > 0 and loss < math.log(11)
    monkeypatch.setattr(gpt, "LEARNING_RATE", 0.0)
    with pytest.raises(ValueError, match="the loss must fall"):
        gpt.train(SMALL, 2, 8, "torch-unfused", recompute, "cpu")
