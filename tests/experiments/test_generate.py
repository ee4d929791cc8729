"""Text through a cache and without one: the model, its training, rows, figure and table."""

from types import SimpleNamespace

import numpy as np
import pytest

from experiments import generate
from experiments.beside import small_model
from experiments.lab.measure import peers, timing
from experiments.lab.measure.check import WrongResult
from experiments.lab.record.options import Bench, Options
from experiments.lab.record.store import MODEL
from fa_numba import device

SMALL = small_model.Sizes(5, heads=2, head_dim=4, layers=2)


def rows_of(place, machine, source, values, metric="traffic", series="fa2-simt"):
    unit = {"traffic": "bytes", "time": "ms"}[metric]
    where = {"machine": machine, "source": source, "metric": metric, "unit": unit}
    return [
        generate._row(series, "float32", place, 2, n, value=value, **where)
        for n, value in values.items()
    ]


def synthetic(machine="some-gpu"):
    """With a cache a microsecond and a kilobyte a character before, without one the square."""
    found = []
    for place, power in ((generate.CACHE, 1), (generate.WHOLE, 2)):
        values = {n: 1e-3 * n**power for n in generate.TIMED_LENGTHS}
        found += rows_of(place, machine, "measured", values, "time")
        found += rows_of(place, MODEL, "model", {n: 1000 * n**power for n in generate.LENGTHS})
    note = generate._differing(0, 80, "1=1 (2+2)=4")
    common = {"machine": machine, "source": "measured"}
    return [*found, generate._row("fa2-simt", "float32", generate.CACHE, 2, 64, **common, **note)]


@pytest.fixture
def small(monkeypatch):
    """A model that has hardly learned, short texts over two pages."""
    sizes = small_model.Sizes(len(generate.ALPHABET), heads=1, head_dim=8, layers=2)
    text = np.random.default_rng(0).integers(0, sizes.alphabet, 64)
    w = small_model.weights(sizes, np.random.default_rng(1))
    monkeypatch.setattr(generate, "SIZES", sizes)
    monkeypatch.setattr(generate, "LENGTH", 20)
    monkeypatch.setattr(generate, "model", lambda: w)
    monkeypatch.setattr(generate, "learned", lambda: text)


# --- the model ---------------------------------------------------------------------------------


def test_every_gradient_is_the_slope_of_the_loss():
    draw = np.random.default_rng(1)
    w = {name: x.astype(np.float64) for name, x in small_model.weights(SMALL, draw).items()}
    window = draw.integers(0, SMALL.alphabet, (2, 7))
    _, gradients = small_model.loss_and_gradients(w, SMALL, window)
    assert gradients.keys() == w.keys()
    for name, x in w.items():
        at = tuple(draw.integers(0, n) for n in x.shape)
        losses = []
        for step in (1e-6, -1e-6):
            moved = w | {name: x.copy()}
            moved[name][at] += step
            losses.append(small_model.loss_and_gradients(moved, SMALL, window)[0])
        slope = (losses[0] - losses[1]) / 2e-6
        np.testing.assert_allclose(gradients[name][at], slope, rtol=1e-5, atol=1e-8)


def test_what_is_trained_is_what_generates():
    """The loss is that of the logits, with attention by the library."""
    draw = np.random.default_rng(2)
    w = small_model.weights(SMALL, draw)
    window = draw.integers(0, SMALL.alphabet, (2, 9))
    loss, _ = small_model.loss_and_gradients(w, SMALL, window)
    attend = small_model.whole(w["head"], alibi_slopes=SMALL.slopes)
    found = small_model.logits(w, SMALL, window[:, :-1], attend).astype(np.float64)
    chances = np.exp(found) / np.exp(found).sum(-1, keepdims=True)
    at = (*np.indices((2, 8)), window[:, 1:])
    assert loss == pytest.approx(-np.log(chances[at]).mean(), rel=1e-5)


def test_the_loss_falls():
    text = np.tile(np.arange(SMALL.alphabet), 30)  # one follows the other
    losses = [loss for loss, _ in small_model.train(SMALL, text, 200, 4, 8, seed=0)]
    assert losses[0] > 1.4 and losses[-1] < 0.4


@pytest.fixture
def storing(tmp_path, monkeypatch):
    """A folder for weights, which are 1 of the first training, 2 of the second."""
    state = SimpleNamespace(trained=0)

    def train():
        state.trained += 1
        return {"head": np.full((2, 3), float(state.trained), np.float32)}

    def first():
        generate._stored.cache_clear()
        return generate.model()["head"][0, 0]

    monkeypatch.setattr(generate, "train", train)
    monkeypatch.setattr(generate, "WEIGHTS", tmp_path / "data/generate/weights.npz")
    state.first = first
    yield state
    generate._stored.cache_clear()


def test_stored_weights_are_not_trained_again(storing, tmp_path):
    assert storing.first() == 1
    generate.keep(tmp_path)
    content = generate.WEIGHTS.read_bytes()
    assert storing.first() == storing.first() == 1
    generate.keep(tmp_path)
    assert generate.WEIGHTS.read_bytes() == content
    for number, damaged in ((2, content[:50]), (3, b""), (4, b"no archive")):
        generate.WEIGHTS.write_bytes(damaged)
        assert storing.first() == number


def test_the_recorded_weights_are_of_this_model(monkeypatch):
    monkeypatch.setattr(generate, "train", lambda: pytest.fail("trained"))
    generate._stored.cache_clear()
    like = small_model.weights(generate.SIZES, np.random.default_rng(0))
    assert {name: x.shape for name, x in generate.model().items()} == {
        name: x.shape for name, x in like.items()
    }
    assert generate.WEIGHTS.stat().st_size < 500_000


# --- the same text -----------------------------------------------------------------------------


def test_a_cache_changes_no_character_and_the_model_has_its_accesses(small):
    for series, dtype in generate.COUNTED.items():
        rows = list(generate._counted(series))
        assert rows[-1].value == 0 and rows[-1].n == 2 * 12
        assert len(rows[-1].note.partition("; ")[2]) == 20
        steps = range(generate.PROMPT + 1, generate.LENGTH)
        rows += [row for n in steps for row in generate._modelled(series, dtype, n)]
        assert "22 of 22 numbers equal" in generate._equal(rows)


@pytest.mark.parametrize("fault", ["a row is forgotten", "pages change places"])
def test_a_fault_of_the_cache_is_noticed(small, monkeypatch, fault):
    attend = small_model.Cache.attend

    def wrong(self, layer, q, k, v):
        if layer == 0 and fault == "a row is forgotten" and self.then[0] == 12:
            self.then -= 1
        if layer == 0 and fault == "pages change places" and self.then[0] == 18:
            self.block_table[0] = self.block_table[0, ::-1].copy()
        return attend(self, layer, q, k, v)

    monkeypatch.setattr(small_model.Cache, "attend", wrong)
    with pytest.raises(WrongResult, match="characters differ without a cache"):
        list(generate._counted("fa2-simt"))


def test_accesses_grow_with_the_text_and_with_its_square():
    rows = [row for n in (2048, 4096) for row in generate._modelled("fa2-simt", "float32", n)]
    found = generate.by_length(rows, "traffic", "model")
    for place, factor in ((generate.CACHE, 2), (generate.WHOLE, 4)):
        by = found["fa2-simt", place]
        assert by[4096] / by[2048] == pytest.approx(factor, rel=0.1)


def test_a_character_is_timed_and_the_text_held_against_the_whole(small, monkeypatch):
    """With the emulator for a GPU."""
    monkeypatch.setattr(generate, "TIMED", {"fa2-simt": "float32"})
    monkeypatch.setattr(generate, "TIMED_SEQUENCES", 2)
    monkeypatch.setattr(generate, "WINDOW", 3)
    monkeypatch.setattr(generate, "COUNTED", {})
    monkeypatch.setattr(peers, "available", lambda: True)
    monkeypatch.setattr(peers, "on_device", lambda arrays, dtype: [x.astype(dtype) for x in arrays])
    monkeypatch.setattr(device, "synchronize", lambda: None)
    options = Options(seqlens=(12, 19), quick=True)
    rows = list(generate.measure(options, Bench(machine="some-gpu")))
    timed = generate.by_length(rows, "time", "measured")
    assert {key: list(by) for key, by in timed.items()} == {
        ("fa2-simt", generate.CACHE): [12, 19],
        ("fa2-simt", generate.WHOLE): [12, 19],
    }
    assert all(row.n == 3 for row in rows if row.metric == "time")
    assert (rows[-1].value, rows[-1].n) == (0, 2 * 11)

    def failing(*args):
        raise RuntimeError("no memory")

    monkeypatch.setattr(generate, "_generated", failing)
    (row,) = generate._timed("fa2-simt", (12,), "some-gpu")
    assert row.failed and "no memory" in row.note
    assert timing.attempt(failing)[1] in row.note


# --- figure and table --------------------------------------------------------------------------


def test_the_figure_and_the_table_take_any_part_of_the_rows():
    whole = synthetic()
    timed = [row for row in whole if row.source == "measured"]
    modelled = [row for row in whole if row.source == "model"]
    for rows, missing in ((whole, []), (timed, ["not counted"]), (modelled, ["not measured here"])):
        texts = [text.get_text() for ax in generate.draw(rows).axes for text in ax.texts]
        assert texts == missing
        assert ("| 64 |" in generate.table(rows).body) and "| 4096 |" in generate.table(rows).body
    assert generate.draw(whole).get_suptitle() == (
        "Without a cache a character behind 4k others takes 4096 times the bytes and 4096 times "
        "the time"
    )
    (line,) = [x for x in generate.table(whole).body.splitlines() if x.startswith("| 1024 |")]
    assert line.split(" | ")[1:3] == ["1,024,000", "1,048,576,000"]
    assert line.split(" | ")[5:7] == ["1.02", "1.05e+03"]
    assert "0 of 80 characters differ" in generate.table(whole).caption
    assert "`1=1 (2+2)=4`" in generate.table(whole).caption
    assert generate.draw([]) is None and generate.table([]) is None


def test_the_prompts_are_of_the_text():
    text = np.arange(100) % len(generate.ALPHABET)
    found = generate.prompts(text, 3, 12)
    assert found.shape == (3, 12) and not found[:, generate.PROMPT :].any()
    np.testing.assert_array_equal(found[-1, : generate.PROMPT], text[-generate.PROMPT :])
    assert generate.words([0, 1, 2]) == " 01"
