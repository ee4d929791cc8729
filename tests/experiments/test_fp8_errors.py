"""Errors in 8 bits: float64 with rounded operands, sums of 13 bits, rows, tables and figure."""

from types import SimpleNamespace

import numpy as np
import pytest
from experiment_helpers import cells, made_up, no_gpu, on_some_gpu

import fa_numba
from experiments import fp8_errors
from experiments.beside import rounded
from experiments.fp8_errors import ALL, ALONE, BOTH, FA1, FA2, KERNEL_ERROR, STANDARD, TENSOR
from experiments.lab.measure.workloads import Inputs
from experiments.numerics import NORMAL, OUTLIERS
from fa_numba import reference
from fa_numba.intrinsics.float8 import NUMBERS_E4M3, bits_e4m3
from fa_numba.problem import Problem

E4M3 = "float8_e4m3fn"
BC = 32


# --- float64 with rounded operands ---------------------------------------------------------------


def test_numbers_are_rounded_to_e4m3():
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.random(2000) * 2.0**n for n in (-8, -5, 0, 8)])
    np.testing.assert_array_equal(
        rounded.to_e4m3(x), NUMBERS_E4M3[bits_e4m3(x.astype(np.float32))].astype(np.float64)
    )


def test_p_is_rounded_as_the_reference_rounds_it():
    bits = np.random.default_rng(1).integers(0x20, 0x50, (3, 1, 2, 70, 16)).astype(np.uint8)
    q, k, v = (reference.dequantize(x) for x in bits)
    made = rounded.weighted_by_tiles(rounded.scores(q, k), v, BC)
    np.testing.assert_allclose(made, reference.attention_e4m3(*bits, columns=BC), rtol=1e-12)
    exact = rounded.weighted(rounded.scores(q, k), v)
    np.testing.assert_allclose(exact, reference.attention(q, k, v), rtol=1e-12)
    # Two splits of 64 and of 6 keys, merged by the logsumexp.
    halves = [
        reference.attention_e4m3(
            bits[0], bits[1][:, :, part], bits[2][:, :, part], columns=BC, return_lse=True
        )
        for part in (slice(64), slice(64, 70))
    ]
    shares = np.exp(np.stack([L for _, L in halves]) - np.logaddexp(*(L for _, L in halves)))
    merged = sum(O * share[..., None] for (O, _), share in zip(halves, shares, strict=True))
    split = rounded.weighted_by_tiles(rounded.scores(q, k), v, BC, 2)
    np.testing.assert_allclose(split, merged, rtol=1e-12)
    assert not np.allclose(split, made, rtol=1e-12)


def test_more_splits_than_tiles():
    found = list(rounded.tiles_of(70, BC, 5))
    assert found == [(slice(0, 32), True), (slice(32, 64), True), (slice(64, 70), True)]


def test_sums_by_tile_lose_less_than_a_running_sum():
    rng = np.random.default_rng(2)
    q, k, v = (rng.standard_normal((n, 32)).astype(np.float32) for n in (2, 1024, 1024))
    found = rounded.Sums(q, k, v, 64).errors()
    assert 2 * found["by-tile"] < found["running"] < 2e-3
    assert 0 < found["scores"] < 1e-2
    one = rounded.Sums(q, k[:64], v[:64], 64).errors()
    assert one["by-tile"] == one["running"] > 0


def test_outliers_are_the_papers():
    problem = Problem(1, 1, 1, 4096, 4096, 64, dtype=E4M3)
    normal, outliers = (fp8_errors.inputs(problem, x, Inputs()) for x in (NORMAL, OUTLIERS))
    for x, y in zip(normal, outliers, strict=True):
        # N(0, 1) + N(0, 100) with a chance of 0.001: the variance is 1.1.
        assert y.var() == pytest.approx(1.1, rel=0.04) and abs(x.var() - 1) < 0.02
        assert 0.7e-3 < np.mean(x != y) < 1.3e-3 and abs(y).max() > 25
        np.testing.assert_array_equal(y, y.astype(np.float16))


# --- rows ----------------------------------------------------------------------------------------


def quantize(x, per, rotate=None):
    """The numbers of e4m3 in float32, with one scale for each head."""
    given = x if rotate is None else reference.rotate(x, rotate)
    scale = np.abs(given).max((2, 3), keepdims=True).astype(np.float32) / np.float32(448)
    return NUMBERS_E4M3[bits_e4m3((given / scale).astype(np.float32))], scale[..., 0, 0]


def attention(q, k, v, kv_splits=1, algorithm="fa2", **options):
    """Attention in float64, with P rounded by tiles if there are scales."""
    if "q_scale" not in options:
        return reference.attention(q, k, v)
    if algorithm == "standard":
        raise MemoryError
    q, k, v = (
        reference.dequantize(x, options[f"{name}_scale"])
        for name, x in zip("qkv", (q, k, v), strict=True)
    )
    return rounded.weighted_by_tiles(rounded.scores(q, k), v, BC, kv_splits)


@pytest.fixture
def rows(monkeypatch):
    """Rows of a GPU's run, with stand-ins for its kernels."""
    no_gpu(monkeypatch)
    monkeypatch.setattr(fa_numba, "attention", attention)
    monkeypatch.setattr(fa_numba, "quantize", quantize)
    monkeypatch.setattr(fp8_errors, "compile_ahead", list)
    plan = SimpleNamespace(tiles=SimpleNamespace(Bc=BC))
    monkeypatch.setattr(fp8_errors, "plan_of", lambda *_, **__: plan)
    small = {"HEADS": 1, "HEAD_DIMS": (32,), "SEQLENS": (128,), "SPLITS": (1, 3)}
    for name, value in (small | {"SPLIT_SEQLENS": (128,)}).items():
        monkeypatch.setattr(fp8_errors, name, value)
    return on_some_gpu(fp8_errors)


def test_errors_are_measured(rows):
    """The stand-ins round as kernels do, so that nothing differs from the expected result."""
    kernels = [r for r in rows if r.metric == KERNEL_ERROR and r.machine == "some-gpu"]
    notes = {f"{kind}, {variant}" for kind in (NORMAL, OUTLIERS) for variant in fp8_errors.VARIANTS}
    assert {r.note for r in kernels if r.series == FA1} == notes
    assert {r.note for r in kernels if r.series == fp8_errors.KEY_SPLITS} == {
        f"{kind}, {n} splits" for kind in (NORMAL, OUTLIERS) for n in (1, 3)
    }
    assert max(r.value for r in kernels) < 1e-6
    found = fp8_errors.curves(rows)
    for variant in fp8_errors.VARIANTS:
        kernel = found[fp8_errors.of_e4m3(FA2, OUTLIERS, variant, 32)][128]
        assert kernel == found[fp8_errors.of_e4m3(ALL, OUTLIERS, variant, 32)][128]
        alone = fp8_errors.alone(found, OUTLIERS, variant, 32, 128)
        assert kernel == pytest.approx(np.sqrt(sum(x**2 for x in alone.values())), rel=0.3)
        assert max(alone.values()) < kernel
    assert found["float16", FA2, OUTLIERS, 32][128] < 1e-6


def test_a_failure_is_a_row(rows):
    failed = [r for r in rows if r.failed]
    assert {(r.series, r.dtype, r.note) for r in failed} == {
        (STANDARD, E4M3, f"{kind}, {TENSOR}; failed: out of memory") for kind in (NORMAL, OUTLIERS)
    }


def test_a_failed_conversion_is_a_row(monkeypatch):
    no_gpu(monkeypatch)
    monkeypatch.setattr(fa_numba, "attention", attention)
    monkeypatch.setattr(fa_numba, "quantize", lambda x, **_: int("x"))
    plan = SimpleNamespace(tiles=SimpleNamespace(Bc=BC))
    monkeypatch.setattr(fp8_errors, "plan_of", lambda *_, **__: plan)
    problem = Problem(1, 1, 1, 64, 64, 32, dtype=E4M3)
    host = fp8_errors.inputs(problem, NORMAL, Inputs())
    made = list(fp8_errors._rows_of(problem, NORMAL, host, "some-gpu"))
    failed = [r for r in made if r.failed]
    assert {r.place for r in failed} == {f"{NORMAL}, {v}" for v in fp8_errors.VARIANTS}
    assert all("invalid literal" in r.note for r in failed) and len(made) > len(failed)


def test_plans_are_of_hopper_and_of_blocks():
    problem = Problem(1, 4, 4, 300, 300, 64, dtype=E4M3)
    for series in (FA1, FA2):
        plan = fp8_errors.plan_of(series, problem, "block")
        assert plan.unit == "wgmma" and plan.tiles.Bc % 32 == 0


# --- figure and tables ---------------------------------------------------------------------------


def synthetic():
    """RMSE of 0.024 for the baseline and 0.008 for FA-2 with rotation and scales per block."""
    made = []

    def add(series, note, value, metric="rmse", dtype=E4M3, N=1024):
        problem = Problem(1, 4, 4, N, N, 128, dtype=dtype)
        made.append(made_up("fp8_errors", problem, series, value, metric, note=note))

    for N in (1024, 16384):
        for n, variant in enumerate(fp8_errors.VARIANTS):
            for series in (FA1, FA2, ALL, *ALONE.values()):
                note = OUTLIERS if series == ALONE["p"] else f"{OUTLIERS}, {variant}"
                add(series, note, 0.008 * (4 - n), N=N)
            add(FA2, f"{OUTLIERS}, {variant}", 0.005, KERNEL_ERROR, N=N)
        add(STANDARD, f"{OUTLIERS}, {TENSOR}", 0.024, N=N)
        add(FA2, OUTLIERS, 1.9e-4, dtype="float16", N=N)
        add(fp8_errors.KEY_SPLITS, f"{OUTLIERS}, 4 splits", 0.004, KERNEL_ERROR, N=N)
    return made


def test_the_tables():
    header, *lines = cells(fp8_errors.table(synthetic()).body)
    assert lines[0][:3] == [OUTLIERS, "128", "1k"] and len(lines) == 2
    assert lines[0][3:] == [
        *("-", "1.9e-04", "2.4e-02", "3.2e-02", "2.4e-02", "1.6e-02", "8.0e-03", "8.0e-03", "3.0")
    ]
    header, *lines = cells(fp8_errors.shares(synthetic()).body)
    assert len(lines) == 4 and len(lines[0]) == len(header)
    assert lines[-1][2:5] == ["16k", BOTH, "8.0e-03"]
    header, *lines = cells(fp8_errors.sums(synthetic()).body)
    assert dict(zip(header, lines[1], strict=True)) | {
        "N": "16k", "FA-2": "5.0e-03", "FA-2, 4 key splits": "4.0e-03", "FA-1": "-"
    } == dict(zip(header, lines[1], strict=True))  # fmt: skip
    assert fp8_errors.table([]) is fp8_errors.shares([]) is fp8_errors.sums([]) is None


def test_the_figure():
    figure = fp8_errors.draw(synthetic())
    title = figure.legends[0].get_title().get_text()
    assert title == "Rotation and block scales make the 8-bit error 3.0 times smaller"
    over_n, shares = figure.axes
    assert len(over_n.lines) == 6 and len(shares.patches) == 8
    assert [x.get_text() for x in shares.get_xticklabels()] == ["Q", "K", "P", "V"]
    assert fp8_errors.draw([]) is None
