"""FlashAttention-4's softmax: polynomials, rounding, and rescalings counted on the emulator."""

import numpy as np
import pytest
from experiment_helpers import flat

from experiments import fa4_softmax
from experiments.lab.record.options import FIGURES, Bench, Options
from experiments.lab.record.store import EMULATOR, MODEL, Store


@pytest.mark.parametrize("degree", [1, 3])
def test_the_error_of_the_best_polynomial_alternates(degree):
    coefficients = fa4_softmax.minimax(degree)
    x = np.linspace(0, 1, 4001)
    error = np.polynomial.polynomial.polyval(x, coefficients) / np.exp2(x) - 1
    parts = np.split(error, np.flatnonzero(np.diff(np.sign(error))) + 1)
    peaks = [np.abs(part).max() for part in parts]
    assert len(peaks) == degree + 2 and peaks == pytest.approx([peaks[0]] * len(peaks), rel=1e-3)


def test_exp2_has_the_power_of_the_whole_part():
    x = np.array([-16.0, -3.5, -0.25, 0.0])
    coefficients = fa4_softmax.minimax(6)
    np.testing.assert_allclose(fa4_softmax.exp2(x, coefficients), np.exp2(x), rtol=1e-8)
    assert fa4_softmax.exp2(x.astype(np.float32), coefficients).dtype == np.float32


def test_numbers_are_rounded_to_eight_bits():
    x = np.array([1.0, 1 + 2**-7, 1 + 2**-8 + 2**-12, 0.75 + 2**-12, 3.0])
    rounded = [1.0, 1 + 2**-7, 1 + 2**-7, 0.75, 3.0]
    assert fa4_softmax.to_bfloat16(x).tolist() == rounded


@pytest.mark.parametrize(("series", "grow", "count"), [
    ("rescale-always", 0.0, 0), ("rescale-always", 1.0, 2), ("rescale-always", 9.0, 2),
    ("rescale-threshold", 1.0, 0), ("rescale-threshold", 5.0, 1), ("rescale-threshold", 9.0, 2),
])  # fmt: skip
def test_a_warp_rescales_for_one_row_that_grows(series, grow, count, monkeypatch):
    """The maximum of one row of one warp grows twice; with the threshold 5 + 5 are beyond 8."""
    largest = np.zeros((3, fa4_softmax.ROWS), np.float32)
    largest[:, 40] = [0, grow, 2 * grow]
    monkeypatch.setattr(fa4_softmax, "tops", lambda N, deviation: largest)
    (row,) = fa4_softmax._rescalings(3 * fa4_softmax.TILE, 1, series)
    assert (row.value, row.metric, row.machine) == (count, "rescalings", EMULATOR)
    assert fa4_softmax.possible(row) == 16 and fa4_softmax.deviation(row) == 1


def test_scores_have_the_deviation():
    """The largest of 128 normal numbers is 2.6 deviations on average."""
    largest = fa4_softmax.tops(1024, 4)
    assert largest.shape == (8, fa4_softmax.ROWS)
    assert largest.mean() * np.log(2) == pytest.approx(4 * 2.6, rel=0.05)


def test_the_tables_and_the_figure_show_the_recording(monkeypatch):
    rows = [
        row
        for machine in (MODEL, EMULATOR)
        for row in Store(FIGURES).read(fa4_softmax.NAME, machine)
    ]
    lines = fa4_softmax.table(rows).body.splitlines()[2:]
    assert len(lines) == len(fa4_softmax.SEQLENS) * len(fa4_softmax.DEVIATIONS)
    assert lines[0].startswith("| 1 | 1024 | ") and lines[0].endswith(" | 0.0% | 100.0% |")
    assert len(fa4_softmax.polynomials(rows).body.splitlines()) == 2 + len(fa4_softmax.DEGREES)
    figure = fa4_softmax.draw(rows)
    assert len(figure.axes[1].lines) == 1 + len(fa4_softmax.DEVIATIONS)
    assert fa4_softmax.draw([]) is fa4_softmax.table([]) is fa4_softmax.polynomials([]) is None
    monkeypatch.setattr(fa4_softmax, "DEGREES", (2,))
    monkeypatch.setattr(fa4_softmax, "DEVIATIONS", (2,))
    quick = flat(fa4_softmax.measure(Options(quick=True), Bench()))
    assert [r.metric for r in quick].count("rescalings") == 2 and len(quick) == 5
