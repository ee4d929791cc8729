"""Training with our attention and torch's: the text, the model, rows and the figure."""

import re
from dataclasses import replace

import numpy as np
import pytest
from experiment_helpers import cells, recorded

from experiments import __main__ as command
from experiments import char_model
from experiments.char_model import AFTER, OURS, REFERENCE, SERIES, TRAINING, Text, generate
from experiments.lab.record.options import Bench, Options
from experiments.lab.record.store import Store, dump
from experiments.lab.run import runner
from experiments.lab.show import report, style
from fa_numba import device

needs_torch = pytest.mark.skipif(char_model.torch is None, reason="no torch")


def made_up(problem, seeds=(0, 1, 2), steps=200, machine="some-gpu"):
    """Rows of losses that fall, apart by a thousandth between seeds and a millionth in series."""
    rows = []
    for seed in seeds:
        base = 3 * np.exp(-np.arange(steps) / 80) + 1e-3 * seed
        for n, series in enumerate(SERIES):
            losses = base + n * 1e-6 * np.arange(steps)
            common = char_model.columns(char_model.NAME, series, problem, machine, unit="nat")
            found, expected = (losses, losses[-1] + 0.1), (base, base[-1] + 0.1)
            rows += char_model._rows(found, expected, seed, **common)
    return rows


def synthetic(machine="some-gpu"):
    """The rows that the figure draws."""
    return made_up(char_model.setting(256, 64), machine=machine)


# --- text ------------------------------------------------------------------------------------


def test_the_text_is_lines_of_expressions_and_their_values():
    text = generate(20_000)
    assert len(text) == 20_000 and text == generate(20_000) != generate(20_000, seed=1)
    assert set(text) == set(char_model.ALPHABET)
    *lines, _ = text.split("\n")
    for line in lines:
        left, value = line.split("=")
        opened = []
        for character in left:
            if character in "([<":
                opened.append(character)
            elif character in ")]>":
                assert opened.pop() + character in char_model.BRACKETS
        assert not opened
        plain = re.sub(r"[\[<]", "(", re.sub(r"[\]>]", ")", left))
        assert eval(plain) % 10 == int(value)


def test_what_is_held_out_is_not_learned_from():
    text = Text.of(generate(8_000))
    assert len(text.training) == 7_000 and len(text.held_out) == 1_000
    problem = char_model.setting(64, 64)
    batches = text.batches(problem, 0, 50)
    assert batches.shape == (50, char_model.BATCH, 65)
    assert np.array_equal(batches, text.batches(problem, 0, 50))
    assert not np.array_equal(batches, text.batches(problem, 1, 50))
    # A window is a stretch of the training text.
    joined = "".join(map(chr, text.training))
    assert all("".join(map(chr, window)) in joined for window in batches[0])
    held_out = text.to_evaluate(problem)
    assert held_out.shape == (char_model.HELD_OUT, char_model.BATCH, 65)
    assert np.array_equal(held_out[0, 0], text.held_out[:65])
    assert np.array_equal(held_out[-1, -1], text.held_out[-65:])


# --- training --------------------------------------------------------------------------------


@pytest.fixture
def tiny(monkeypatch):
    """A model that the emulator trains in seconds: (problem, text).

    In long strides, so that a wrong gradient soon shows in the loss.
    """
    monkeypatch.setattr(char_model, "LEARNING_RATE", 0.02)
    monkeypatch.setattr(char_model, "WARMUP", 1)
    monkeypatch.setattr(char_model, "BATCH", 2)
    monkeypatch.setattr(char_model, "D_MODEL", 16)
    monkeypatch.setattr(char_model, "HELD_OUT", 2)
    return char_model.setting(12, 8), Text.of(generate(2_000))


@needs_torch
def test_the_loss_is_that_of_torchs_attention(tiny):
    with device.using("emulator"):
        ours, ours_held_out = char_model.train(OURS, *tiny, seed=0, steps=6, device="cpu")
    other, held_out = char_model.train("torch-unfused", *tiny, seed=0, steps=6, device="cpu")
    assert ours.shape == (6,)
    np.testing.assert_allclose(ours, other, rtol=0, atol=5e-6)
    assert abs(ours_held_out - held_out) < 5e-6
    again, _ = char_model.train("torch-unfused", *tiny, seed=1, steps=6, device="cpu")
    assert abs(again - other).max() > 1e-3


@needs_torch
@pytest.mark.parametrize(
    "wrong",
    [
        lambda attend: lambda q, k, v: attend(1.5 * q, k, v),
        lambda attend: lambda q, k, v: attend(q, k.detach(), v),
        lambda attend: lambda q, k, v: attend(q, k, v).detach(),
    ],
    ids=["scale", "no gradient of k", "no gradients"],
)
def test_a_wrong_attention_shows_in_the_loss(tiny, monkeypatch, wrong):
    right, _ = char_model.train("torch-unfused", *tiny, seed=0, steps=6, device="cpu")
    attend = char_model.attention_of("torch-unfused")
    monkeypatch.setattr(char_model, "attention_of", lambda series: wrong(attend))
    off, _ = char_model.train("torch-unfused", *tiny, seed=0, steps=6, device="cpu")
    assert abs(off - right).max() > 1e-3


@needs_torch
def test_a_loss_that_is_no_number_is_a_failure(tiny, monkeypatch):
    attend = char_model.attention_of("torch-unfused")
    calls = []

    def broken(q, k, v):
        calls.append(1)
        return attend(q, k, v) * (float("nan") if len(calls) > 4 else 1.0)

    monkeypatch.setattr(char_model, "attention_of", lambda series: broken)
    with pytest.raises(char_model.WrongResult, match="no finite number from step 2"):
        char_model.train("torch-unfused", *tiny, seed=0, steps=4, device="cpu")


@needs_torch
def test_the_model_sees_no_character_to_come(tiny):
    problem, text = tiny
    torch = char_model.torch
    w = char_model.weights(problem, 0, "cpu")
    window = torch.as_tensor(text.to_evaluate(problem)[0][:, :-1])
    other = window.clone()
    other[:, 7:] = 0
    attend = char_model.attention_of("torch-unfused")
    a, b = (char_model.logits(w, x, problem, attend) for x in (window, other))
    assert a.shape == (2, 12, len(char_model.ALPHABET))
    assert torch.allclose(a[:, :7], b[:, :7], atol=1e-6) and not torch.allclose(a, b, atol=1e-3)


# --- rows ------------------------------------------------------------------------------------


def measured(monkeypatch, train, **options):
    monkeypatch.setattr(char_model, "CHARACTERS", 2_000)
    monkeypatch.setattr(char_model, "train", train)
    return list(char_model.measure(Options(**options), Bench(machine="some-gpu", describe={})))


def test_rows_of_a_run(monkeypatch):
    runs = []

    def train(series, problem, text, seed, steps):
        runs.append((series, seed, problem.seqlen_q, problem.heads_q, problem.causal))
        losses = 3.0 - np.arange(steps) / steps + 1e-7 * SERIES.index(series) + seed
        return losses, 2.0 + 1e-5 * SERIES.index(series)

    rows = measured(monkeypatch, train)
    assert runs == [(s, seed, 256, 4, True) for seed in char_model.SEEDS for s in SERIES]
    losses = char_model.curves(rows, OURS, "loss", TRAINING)
    assert list(losses) == [1, *range(5, 201, 5)]
    assert losses[1] == pytest.approx([3.0, 4.0, 5.0])
    away = char_model.curves(rows, OURS, "loss_difference", TRAINING)
    assert away[200] == pytest.approx([2e-7] * 3)
    assert not char_model.curves(rows, REFERENCE, "loss_difference", TRAINING)
    assert char_model.curves(rows, OURS, "loss_difference", AFTER)[200] == pytest.approx([2e-5] * 3)
    # A number that is small keeps its digits in the file.
    assert 'e-07,,,,"seed 0, step 200"' in dump(rows)
    assert {(r.metric, r.unit, r.source) for r in rows} == {
        ("loss", "nat", "measured"), ("loss_difference", "nat", "measured"),
    }  # fmt: skip
    quick = measured(monkeypatch, train, quick=True)
    assert runs[9:] == [(s, 0, 256, 4, True) for s in SERIES]
    assert max(char_model.curves(quick, OURS, "loss", TRAINING)) == char_model.QUICK_STEPS


def test_a_failed_run_is_a_row(monkeypatch):
    def train(series, problem, text, seed, steps):
        if series == (REFERENCE if seed == 1 else "torch-unfused"):
            raise RuntimeError("CUDA out of memory")
        return np.ones(steps), 1.0

    rows = measured(monkeypatch, train)
    failed = {(r.series, r.note) for r in rows if r.failed}
    assert (REFERENCE, "seed 1, step 000; failed: out of memory") in failed and len(failed) == 3
    # Without a reference of the same seed there is nothing to compare with.
    away = {r.place[:6] for r in rows if r.metric == "loss_difference"}
    assert away == {"seed 0", "seed 2"}
    assert char_model.draw(rows).axes


def test_the_table_sums_up_what_is_after_the_last_step():
    head, *lines = cells(char_model.table(synthetic()).body)
    assert [line[0] for line in lines] == [char_model.LABELS[series] for series in SERIES]
    reference, _, ours = lines
    loss = 3 * np.exp(-199 / 80) + 0.1 + 1e-3
    assert ours[1:] == ["3", f"{loss + 2 * 199e-6:.4f}", "0.0020", f"{2 * 199e-6:.1e}"]
    assert reference[1:] == ["3", f"{loss:.4f}", "0.0020", "-"]
    assert char_model.table([]) is None


def test_every_seed_and_step_keeps_its_row(tmp_path):
    rows = made_up(char_model.setting(256, 64), seeds=(0, 1), steps=20)
    store = recorded(tmp_path, "char_model", rows)
    back = store.read(char_model.NAME, "some-gpu")
    assert len(back) == len(rows) and dump(back, runs=False) == dump(rows, runs=False)
    # A complete run of fewer seeds drops the others.
    few = [row for row in rows if row.place.startswith("seed 0")]
    store = recorded(tmp_path, "char_model", few)
    assert {r.place[:6] for r in store.read(char_model.NAME, "some-gpu")} == {"seed 0"}


def test_the_table(tmp_path):
    few = [r for r in synthetic(report.MACHINE) if r.pass_ == AFTER]
    table = report.text("char_model", recorded(tmp_path, "char_model", few))
    assert ["FA-2 (Q outer)", "3", "0.3508", "0.0020", "4.0e-04"] in cells(table)
    assert report.NO_RECORDING in report.text("char_model", Store(tmp_path / "none"))


# --- figure ----------------------------------------------------------------------------------


def test_the_figure_shows_losses_and_distances():
    figure = char_model.draw(synthetic())
    assert [ax.get_title() for ax in figure.axes] == [
        "training loss, context 256, d=64",
        "difference to torch's memory-efficient attention",
    ]
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == [
        *("torch's memory-efficient attention", "torch's unfused attention", "FA-2 (Q outer)"),
        "torch's memory-efficient attention: spread over seeds",
    ]
    assert len(figure.axes[0].lines) == 3 and len(figure.axes[1].lines) == 3


def test_parts_of_the_data_are_drawn():
    rows = synthetic()
    for part in (
        [r for r in rows if r.series == REFERENCE],
        [r for r in rows if r.place.startswith("seed 1")],
        [replace(r, value=0.0) for r in rows],
    ):
        assert char_model.draw(part).axes


# --- where it runs ---------------------------------------------------------------------------


@pytest.mark.parametrize(("gpu", "says"), [(False, "a CUDA GPU"), (True, "torch with CUDA")])
def test_without_a_gpu_or_torch_it_says_so(monkeypatch, tmp_path, capsys, gpu, says):
    monkeypatch.setattr(runner.device, "gpu_available", lambda: gpu)
    monkeypatch.setattr(runner.device, "describe", lambda: {"name": "Some GPU"})
    monkeypatch.setattr(runner.peers, "available", lambda: False)
    monkeypatch.setattr(runner, "FIGURES", tmp_path / "none")
    monkeypatch.setattr(char_model, "measure", lambda *_: pytest.fail("measured"))
    monkeypatch.setattr(style, "save", lambda *_: [])
    recorded(tmp_path, "char_model", made_up(char_model.setting(256, 64), steps=20))
    arguments = [char_model.NAME, "--out", str(tmp_path)]
    assert command.main(["run", *arguments]) == 1
    said = capsys.readouterr().out
    assert (
        f"char_model: not measured, because it needs {says}" in said
        and "not measured: char_model" in said
    )
    assert command.main(["draw", *arguments]) == 0


def test_list_says_what_it_needs(capsys):
    command.main(["list"])
    text = " ".join(capsys.readouterr().out.split())
    assert "Trains a small language model" in text and "the loss [GPU, torch]" in text
