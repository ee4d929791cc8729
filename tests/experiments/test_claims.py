"""The settings that claims name: counts by array, pages, the layer's bytes."""

import re
from dataclasses import replace

import numpy as np
import pytest
from experiment_helpers import made_up

import fa_numba
from experiments import claims as measured
from experiments.beside import layers
from experiments.lab.measure import calls
from experiments.lab.measure.workloads import one_head


def layer_row(series, source, value, seqlen=8192):
    problem = replace(measured.LAYER, seqlen_q=seqlen, seqlen_k=seqlen)
    return made_up(measured.NAME, problem, series, value, "traffic", source=source)


def synthetic():
    return [
        layer_row(series, source, value)
        for series, value in zip(measured.MMA, (17.5e9, 9e9, 9.2e9, 8.9e9), strict=True)
        for source in ("model", "l2", "dram")
    ]


def test_pages_merge_to_the_whole():
    rng = np.random.default_rng(0)
    s, v = rng.normal(size=(2, 3, 5, 8)), rng.normal(size=(2, 3, 8, 4))
    p = np.exp(s)
    whole = p @ v / p.sum(-1, keepdims=True)
    parts = []
    for at in (slice(5, 8), slice(0, 1), slice(1, 5)):
        total = p[..., at].sum(-1)
        parts.append((p[..., at] @ v[..., at, :] / total[..., None], np.log(total)))
    np.testing.assert_allclose(measured.merged(parts), whole, rtol=1e-12)
    first, second = [([[[x]]], [[[L]]]) for x, L in ((1.0, 0.0), (3.0, np.log(3.0)))]
    merged = measured.merged([tuple(map(np.array, pair)) for pair in (first, second)])
    assert merged.item() == pytest.approx(0.25 * 1 + 0.75 * 3)


def test_pages_of_a_call_are_as_exact_as_the_whole():
    whole, pages = measured._paged("fa2-simt", 8)
    assert (whole.note, pages.note) == ("whole", "5 pages")
    assert 0 < pages.value < 1e-6 and 0 < whole.value < 1e-6
    assert pages.seqlen_k == 5 * whole.seqlen_q


def test_counts_by_array_equal_the_model(monkeypatch):
    monkeypatch.setattr(measured, "COUNTED_TILE", 16)
    problem = one_head(32, 8)
    for series in measured.SIMT:
        found = {(r.metric, r.note): r.value for r in measured._count(problem, series, 0.0)}
        assert found == {(r.metric, r.note): r.value for r in measured._model(problem, series, 0.0)}
        assert found["stores", "O"] % (32 * 8) == 0
    assert not list(measured._model(problem, "fa2-simt", 0.1))
    dropped = {r.note for r in measured._count(problem, "fa2-simt", 0.1)}
    assert dropped == {f"{name}, dropout" for name in "QKVOL"}


def test_memory_beside_inputs_and_output_is_that_of_a_later_call(monkeypatch):
    """What a first call allocates, its output and what is kept, does not count."""
    seen = []

    class Tracking:
        peak_bytes = 300

        def __enter__(self):
            seen.append("tracking")
            return self

        def __exit__(self, *_):
            seen.append("end")

    monkeypatch.setattr(fa_numba.device, "track_memory", Tracking)
    monkeypatch.setattr(fa_numba.device, "synchronize", lambda: seen.append("waited"))

    def run(out=None):
        seen.append(out)
        return "output"

    assert calls.workspace_bytes(run) == 300
    assert seen == [None, "waited", "tracking", "output", "waited", "end"]


def test_the_layers_bytes_are_drawn_and_tabled():
    rows = [
        layer_row("fa2-mma", source, value)
        for source, value in (("model", 8.9e9), ("l2", 9.1e9), ("dram", 0.28e9))
    ]
    rows.append(layer_row("standard-mma", "model", 17.5e9))
    ((ax,),) = (measured.draw(rows).axes,)
    assert sorted(patch.get_width() for patch in ax.patches) == [0.28, 8.9, 9.1, 17.5]
    texts = " ".join(text.get_text() for text in ax.texts)
    assert "0.28 (claimed 0.27)" in texts and "17.8" not in texts
    body = measured.layer(rows).body
    assert "| FA-2 (Q outer) | 0.27 | 8.9 | 9.1 | 0.28 |" in body
    assert "| standard attention | 17.4 to 17.8 | 17.5 | - | - |" in body
    other = [layer_row("fa2-mma", "model", 1e9, seqlen=1024)]
    assert not re.search(
        "claimed", " ".join(t.get_text() for t in measured.draw(other).axes[0].texts)
    )
    assert measured.draw([]) is None and measured.layer([]) is None


def test_a_layer_moves_each_operand_of_its_products_once():
    """By hand, for 4 tokens, a hidden dimension of 6 and 2 heads of d=3."""
    model = layers.Model("small", 6, 2, False)
    unfused, fused = (layers.work(model, 4, fused) for fused in (False, True))
    assert {part: flops for part, (flops, _) in unfused.items()} == {
        "projections": 4 * 2 * 4 * 6 * 6, "attention": 2 * 2 * 2 * 4 * 4 * 3,
        "FFN": 2 * 2 * 4 * 6 * 24}  # fmt: skip
    elements = {part: traffic / 2 for part, (_, traffic) in unfused.items()}
    assert elements["projections"] == 4 * (4 * 6 + 6 * 6 + 4 * 6)
    assert elements["FFN"] == 2 * (4 * 6 + 6 * 24 + 4 * 24)
    assert elements["attention"] == 4 * 4 * 6 + 4 * 2 * 4 * 4
    assert fused["attention"][1] == 2 * 4 * 4 * 6 and fused["FFN"] == unfused["FFN"]
    causal = layers.work(model._replace(causal=True), 4, False)["attention"]
    assert causal[0] == unfused["attention"][0] / 2
    (q, kv), step = (2 * 1 * 6, 2 * 4 * 6), layers.work(model._replace(decodes=True), 4, True)
    assert step["attention"] == (2 * 2 * 2 * 1 * 4 * 3, 2 * (q + kv))


def test_the_table_of_layers_has_ratios_of_sums():
    model = layers.MODELS[0]
    rows = list(measured._layer_of(model, 128))
    (line,) = measured.intensities(rows).body.splitlines()[2:]
    parts = layers.work(model, 128, False).values()
    layer = sum(flops for flops, _ in parts) / sum(traffic for _, traffic in parts)
    assert line.split(" | ")[:2] == ["| BERT-base", "128"] and f" | {layer:.3g} | " in line
    assert measured.intensities([]) is None and measured.layer(rows) is None
