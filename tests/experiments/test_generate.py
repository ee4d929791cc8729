"""Text through a cache and without one: the model, rows, figure and table."""

import numpy as np
import pytest
from experiment_helpers import above

from experiments import char_model, generate
from experiments.beside import small_model
from experiments.lab.measure import peers, timing
from experiments.lab.measure.check import WrongResult
from experiments.lab.record.options import Bench, Options
from experiments.lab.record.store import MODEL, Row
from fa_numba import device


def rows_of(place, machine, source, values, metric="traffic", series="fa2-simt"):
    unit = {"traffic": "bytes", "time": "ms"}[metric]
    where = {"source": source, "metric": metric, "unit": unit, "note": place}
    return [
        Row(value=value, **generate._columns(series, place, 2, n, machine) | where)
        for n, value in values.items()
    ]


def synthetic(machine="some-gpu"):
    """With a cache a microsecond and a kilobyte a character before, without one the square."""
    found = []
    for place, power in ((generate.CACHE, 1), (generate.WHOLE, 2)):
        values = {n: 1e-3 * n**power for n in generate.TIMED_LENGTHS}
        found += rows_of(place, machine, "measured", values, "time")
        found += rows_of(place, MODEL, "model", {n: 1000 * n**power for n in generate.LENGTHS})
    return [*found, generate._difference("fa2-simt", 2, 48, machine, 0, "1=1 (2+2)=4")]


@pytest.fixture
def small(monkeypatch):
    """A model that has not learned, short texts over two pages."""
    sizes = small_model.Sizes(len(generate.ALPHABET), heads=1, head_dim=8, layers=2)
    text = np.random.default_rng(0).integers(0, sizes.alphabet, 64)
    draw, D = np.random.default_rng(1), sizes.width
    shapes = {"characters": (sizes.alphabet, D), "head": (D, sizes.alphabet)}
    for n in range(sizes.layers):
        shapes |= {f"{n}.qkv": (D, 3 * D), f"{n}.out": (D, D)}
        shapes |= {f"{n}.up": (D, 4 * D), f"{n}.down": (4 * D, D)}
    w = {
        name: (draw.standard_normal(shape) * shape[0] ** -0.5).astype(np.float32)
        for name, shape in shapes.items()
    }
    monkeypatch.setattr(generate, "SIZES", sizes)
    monkeypatch.setattr(generate, "LENGTH", 20)
    monkeypatch.setattr(generate, "model", lambda: w)
    monkeypatch.setattr(generate, "learned", lambda: text)


# --- the model ---------------------------------------------------------------------------------


def test_the_stored_weights_have_learned_the_text():
    """Text that they were not trained on costs 0.55 of what it does by how often each character is
    there; a model whose slopes change places does not reach that.
    """
    text = char_model.generate(2**16 + 512)[-512:]
    window = np.array([generate.ALPHABET.index(x) for x in text]).reshape(8, 64)
    w = generate.model()
    often = np.bincount(window.ravel()) / window.size

    def loss(slopes):
        attend = small_model.whole(w["head"], alibi_slopes=slopes)
        logits = small_model.logits(w, generate.SIZES, window[:, :-1], attend).astype(np.float64)
        chances = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        return -np.log(chances[(*np.indices((8, 63)), window[:, 1:])]).mean()

    bound = -0.55 * (often * np.log(often)).sum()
    slopes = generate.SIZES.slopes
    assert loss(slopes) < bound < loss(slopes[::-1].copy())


# --- the same text -----------------------------------------------------------------------------


def test_a_cache_changes_no_character_and_the_model_has_its_accesses(small):
    for series in generate.DTYPES:
        rows = list(generate._counted(series))
        assert rows[-1].value == 0 and rows[-1].n == 2 * 12
        assert len(rows[-1].note.partition("; ")[2]) == 20
        steps = range(generate.PROMPT + 1, generate.LENGTH)
        rows += [row for n in steps for row in generate._modelled(series, n)]
        assert "Of 22 byte counts of the emulator for text generation, 22 equal" in generate._equal(
            rows
        )


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
    with pytest.raises(WrongResult, match="with and without a cache, but .* characters differ"):
        list(generate._counted("fa2-simt"))


def test_a_character_is_timed_and_the_text_held_against_the_whole(small, monkeypatch):
    """With the emulator for a GPU."""
    monkeypatch.setattr(generate, "DTYPES", {"fa2-simt": "float32"})
    monkeypatch.setattr(generate, "TIMED_SEQUENCES", 2)
    monkeypatch.setattr(generate, "WINDOW", 3)
    monkeypatch.setattr(peers, "available", lambda: True)
    monkeypatch.setattr(peers, "on_device", lambda arrays, dtype: [x.astype(dtype) for x in arrays])
    monkeypatch.setattr(device, "synchronize", lambda: None)
    monkeypatch.setattr(generate, "QUICK_LENGTHS", (12, 19))
    rows = list(generate.measure(Options(quick=True), Bench(machine="some-gpu")))
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
    modelled = [row for row in whole if row.source == "model"]
    for rows, missing in ((whole, []), (modelled, ["not measured here"])):
        texts = [text.get_text() for ax in generate.draw(rows).axes for text in ax.texts]
        assert texts == missing
        assert ("| 64 |" in generate.table(rows).body) and "| 4096 |" in generate.table(rows).body
    assert above(generate.draw(whole)).splitlines() == [
        "Without a K/V cache, a character moves 4096 times the bytes",
        "Context of 4k characters. Without a cache, the time is 4096 times as long.",
    ]
    (line,) = [x for x in generate.table(whole).body.splitlines() if x.startswith("| 1024 |")]
    assert line.split(" | ")[1:3] == ["1,024,000", "1,048,576,000"]
    assert line.split(" | ")[5:7] == ["1.02", "1.05e+03"]
    assert "0 of 80 generated characters differ" in generate.table(whole).caption
    assert "`1=1 (2+2)=4`" in generate.table(whole).caption
    assert generate.draw([]) is None and generate.table([]) is None
