"""Decoding with a complete model: sizes, rows, table, figure; with torch also steps on a CPU."""

import pytest

from experiments import decode_model
from experiments.beside import llama
from experiments.lab.record.options import Bench, Options

SMALL = llama.Sizes(2, 32, 4, 2, 48, 19)
needs_torch = pytest.mark.skipif(llama.torch is None, reason="no torch")


class Model:
    """Steps of 8 ms without key splits, 2 ms with key splits; cuDNN fails."""

    def __init__(self, sizes, longest):
        self.longest = longest

    def time(self, keys, series):
        assert keys <= self.longest
        if series == "torch-cudnn":
            raise ValueError("no kernel")
        return [2.0 if series == decode_model.SPLITS else 8.0] * 3


def rows(keys=512, failure=""):
    model = None if failure else Model(SMALL, keys)
    given = model, failure, SMALL, keys
    return [r for s in decode_model.SERIES for r in decode_model.rows_of(*given, s, "some-gpu")]


def synthetic():
    """Rows of two lengths, as the figure draws them."""
    return [*rows(512), *rows(1024)]


def test_the_model_has_the_shape_of_codellama_34b():
    sizes = decode_model.CODELLAMA
    assert sizes.head_dim == 128 and sizes.parameters() == pytest.approx(33.74e9, rel=1e-3)
    problem = decode_model.problem(sizes, 4096)
    assert (problem.seqlen_q, problem.group, problem.dtype) == (1, 8, "bfloat16")


def test_rows_have_times_and_tokens_per_second():
    found = {(row.series, row.metric): row for row in rows()}
    assert found["fa2-auto", "time"].value == 8 and found["fa2-auto", "tokens"].value == 125
    assert found["torch-cudnn", "time"].failed and "no kernel" in found["torch-cudnn", "time"].note
    assert {row.note for row in rows(failure="failed: out of memory")} == {"failed: out of memory"}


def test_the_table_and_the_figure():
    known = synthetic()
    lines = decode_model.table(known).body.splitlines()[2:]
    assert lines == [f"| {N} | 125.0 | 500.0 | 125.0 | - | 4.00 | 4.00 |" for N in ("512", "1k")]
    figure = decode_model.draw(known)
    title = figure.legends[0].get_title().get_text()
    assert title == "With key splits, decoding is up to 4.0 times as fast"
    assert decode_model.draw([]) is decode_model.table([]) is None


def test_quick_runs_measure_a_small_model(monkeypatch):
    monkeypatch.setattr(llama, "Decoder", Model)
    found = list(decode_model.measure(Options(quick=True), Bench(machine="some-gpu")))
    assert len(found) == 2 * len(decode_model.SERIES)
    assert {row.heads_q for each in found for row in each} == {decode_model.QUICK.heads}


@needs_torch
def test_torch_decoding_gives_equal_tokens_for_every_series_on_a_cpu():
    torch = llama.torch
    model = llama.Decoder(SMALL, 40, "cpu", "float32")
    before, token = model.cache.clone(), torch.tensor([3])
    with torch.no_grad():
        found = {series: model.step(token, 33, llama.attention_of(series)).item()
                 for series in ("fa2-auto", "fa2-auto-splits", "torch-fa2")}  # fmt: skip
    assert len({*found.values()}) == 1
    positions = (model.cache != before).flatten(0, 3).any(-1).any(0)
    assert positions.nonzero().flatten().tolist() == [32]  # only the token's own position
    assert sum(w.numel() for layer in model.layers for w in layer.values()) + 5 * 32 + (
        2 * 19 * 32) == SMALL.parameters()  # fmt: skip


@needs_torch
def test_torch_steps_of_decoding_are_timed_on_a_cpu(monkeypatch):
    monkeypatch.setattr(llama, "STEPS", 2)
    model = llama.Decoder(SMALL, 16, "cpu", "float32")
    samples = model.time(16, "torch-fa2")
    assert len(samples) == 2 and min(samples) > 0
