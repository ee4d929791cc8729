"""Time over the share of non-zero blocks: masks, rows, checks and the figure."""

from dataclasses import replace

import numpy as np
import pytest
from experiment_helpers import cells, no_gpu, recorded

import fa_numba
from experiments import block_sparse
from experiments.block_sparse import SHARES, Case, block_mask, setting
from experiments.lab.measure import calls, counts, timing
from experiments.lab.measure.series import plan
from experiments.lab.measure.workloads import Inputs
from experiments.lab.record.options import Bench, Options
from experiments.lab.record.store import MODEL, Store, dump
from experiments.lab.show import report


def timed(problem, machine="some-gpu"):
    """Rows of a GPU whose time is a constant and a part in proportion to the share."""
    rows = []
    for n, series in enumerate(block_sparse.UNITS[problem.dtype]):
        for pass_ in block_sparse.PASSES:
            for share in (None, *SHARES):
                value = (1 + n) * (5.0 + 0.95 * (100 if share is None else share))
                found = timing.Timing(value, value, value, 20)
                fields = Case(series, problem, share, block_sparse.SIZE).fields(pass_, machine)
                rows.append(calls.time_row(found, "", fields.pop("note"), **fields))
    return rows


def synthetic(machine="some-gpu"):
    """A few rows of each kind that the figure draws."""
    rows = []
    for dtype, of_dtype in block_sparse.UNITS.items():
        problem = setting(4096, dtype)
        rows += timed(problem, machine)
        for share in (None, 10, 50, 100):
            for series in of_dtype:
                rows += block_sparse._model(Case(series, problem, share, block_sparse.SIZE))
    return rows


# --- masks -----------------------------------------------------------------------------------


@pytest.mark.parametrize("seqlen", [4096, 1024, 4000])
def test_a_mask_has_its_share_of_blocks_and_the_diagonal(seqlen):
    T = -(-seqlen // 64)
    before = np.zeros((T, T), bool)
    for share in SHARES:
        mask = block_mask(seqlen, 64, share)
        assert mask.shape == (T, T) and mask.dtype == bool
        assert np.count_nonzero(mask) == round(share / 100 * T * T)
        assert mask.diagonal().all()
        assert not (before & ~mask).any(), "the blocks of a smaller share are kept"
        np.testing.assert_array_equal(mask, block_mask(seqlen, 64, share))
        before = mask
    assert before.all()


def test_blocks_are_spread_over_the_matrix():
    mask = block_mask(4096, 64, 50)
    for axis in (0, 1):
        assert 16 < mask.sum(axis=axis).min() and mask.sum(axis=axis).max() < 48
    assert abs(np.count_nonzero(np.triu(mask, 1)) - np.count_nonzero(np.tril(mask, -1))) < 200


# --- published -------------------------------------------------------------------------------


def test_the_papers_points():
    times = block_sparse.paper()
    assert set(times) == {None, *SHARES[:-1]}
    assert (times[10], times[90], times[None]) == (27.2, 175.6, 188.4)
    # The straight line through them begins near 0: time is about proportional to the share.
    shares = np.array(SHARES[:-1])
    slope, start = np.polyfit(shares, [times[s] for s in SHARES[:-1]], 1)
    assert 0 < start < 0.05 * times[None] and 100 * slope == pytest.approx(times[None], rel=0.03)


# --- rows ------------------------------------------------------------------------------------


def test_accesses_grow_with_the_share_as_the_tiles_visited():
    problem = setting(4096)
    for series in block_sparse.SERIES:
        rows = [
            row
            for share in (None, *SHARES)
            for row in block_sparse._model(Case(series, problem, share, block_sparse.SIZE))
        ]
        for pass_ in block_sparse.PASSES:
            mine = [row for row in rows if row.pass_ == pass_]
            moved = block_sparse.curve(mine, series, "loads", "stores")
            steps = np.diff([moved[share] for share in SHARES])
            # Blocks are whole, so a tenth of them is not the same number everywhere.
            assert steps.min() == pytest.approx(steps.max(), rel=0.01)
            # What does not grow: each array once or twice.
            once = 12 * np.prod(problem.q_shape)
            assert 0 <= moved[10] - steps.mean() <= once
            assert block_sparse.relative(moved)[None] == 1


@pytest.mark.parametrize("series", block_sparse.SERIES)
def test_a_pass_is_the_sum_of_its_calls(series):
    problem = setting(4096)
    given = {"tiles": fa_numba.Tiles(64, 64), "block_mask": block_mask(4096, 64, 30)}
    forward = plan(series, problem, return_lse=True, **given).accesses
    backward = plan(series, problem, passes="bwd", **given).accesses
    rows = block_sparse._model(Case(series, problem, 30, 64))
    found = {(row.pass_, row.metric): row.value for row in rows}
    assert found["fwd+bwd", "loads"] == forward.total_loads + backward.total_loads
    assert found["fwd", "stores"] == forward.total_stores


def test_counts_equal_the_model():
    problem = block_sparse.one_head(48, 16)
    rows, inputs = [], Inputs(gradient=True)
    for series in block_sparse.SERIES:
        for share in (None, 60):
            case = Case(series, problem, share, 16)
            rows += [*block_sparse._model(case), *block_sparse._count(case, inputs)]
    assert counts.equal(rows) == (16, 16)
    broken = [
        r if r.source == "model" or r.place != "60 % of blocks" else replace(r, value=1)
        for r in rows
    ]
    assert counts.equal(broken) == (8, 16)


def test_without_a_gpu_it_models_and_counts(monkeypatch):
    counted = []

    def count(case, inputs):
        counted.append(case.share)
        return []

    monkeypatch.setattr(block_sparse, "_count", count)
    rows = list(block_sparse.measure(Options(), Bench(say=pytest.fail)))
    assert {r.machine for r in rows} == {MODEL}
    assert {(r.seqlen_q, r.head_dim) for r in rows} == {(4096, 64), (96, 16)}
    assert set(counted) == {None, *block_sparse.SMALL_SHARES}


def on_the_emulator(monkeypatch, dtypes=("float32",)):
    """Rows of a run whose kernels run on the emulator; their times are made up."""
    of = {dtype: block_sparse.UNITS[dtype] for dtype in dtypes}
    monkeypatch.setattr(block_sparse, "UNITS", of)
    timed = []

    def time_ms(run, *, repeats, **_):
        timed.append(repeats)
        return [2.0] * repeats

    no_gpu(monkeypatch)
    monkeypatch.setattr(timing.device, "time_ms", time_ms)
    monkeypatch.setattr(block_sparse, "_count", lambda *_, **__: [])
    monkeypatch.setattr(block_sparse, "QUICK_SEQLEN", 48)
    monkeypatch.setattr(block_sparse, "HEAD_DIM", 8)
    monkeypatch.setattr(block_sparse, "HEADS", 2)
    monkeypatch.setattr(block_sparse, "TOKENS", 1)
    monkeypatch.setattr(block_sparse, "SIZE", 16)
    monkeypatch.setattr(block_sparse, "CHECKED_SEQLEN", 32)
    monkeypatch.setattr(block_sparse, "QUICK_SHARES", (50,))
    bench = Bench(machine="some-gpu", say=pytest.fail)
    with fa_numba.device.using("emulator"):
        rows = list(block_sparse.measure(Options(quick=True), bench))
    return [row for row in rows if row.machine == "some-gpu"], timed


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_measured_rows(monkeypatch, dtype):
    rows, timed = on_the_emulator(monkeypatch, (dtype,))
    assert not [row.note for row in rows if row.failed]
    assert {(r.series, r.pass_, block_sparse.share_of(r)) for r in rows} == {
        (series, pass_, share)
        for series in {"float32": block_sparse.SERIES, "float16": block_sparse.HALF}[dtype]
        for pass_ in block_sparse.PASSES
        for share in (None, 50)
    }
    assert {(r.metric, r.unit, r.Br, r.Bc, r.seqlen_q, r.dtype) for r in rows} == {
        ("time", "ms", 16, 16, 48, dtype)
    }
    assert len(timed) == len(rows) == 8


def test_a_mask_that_is_ignored_is_noticed(monkeypatch):
    right = fa_numba.attention

    def dense(*arrays, block_mask=None, **options):
        return right(*arrays, **options)

    monkeypatch.setattr(fa_numba, "attention", dense)
    rows, _ = on_the_emulator(monkeypatch)
    failed = {(r.pass_, block_sparse.share_of(r)) for r in rows if r.failed}
    assert ("fwd", 50) in failed and not failed & {("fwd", None), ("fwd+bwd", None)}


# --- the store -------------------------------------------------------------------------------


def test_every_share_keeps_its_row(tmp_path):
    rows = timed(setting(4096))
    store = recorded(tmp_path, "block_sparse", rows)
    back = store.read(block_sparse.NAME, "some-gpu")
    assert len(back) == len(rows) and dump(back, runs=False) == dump(rows, runs=False)
    # One share fails later: its row is replaced, whatever its note then says.
    old = next(r for r in rows if r.place == "30 % of blocks")
    lost = {"value": None, "p20": None, "p80": None, "n": None}
    failed = replace(old, **lost, note="30 % of blocks; failed: out of memory")
    store = recorded(tmp_path, "block_sparse", [failed], complete=False)
    after = store.read(block_sparse.NAME, "some-gpu")
    assert failed in after and old not in after
    assert block_sparse.share_of(failed) == 30


def test_the_table(tmp_path, monkeypatch):
    store = recorded(tmp_path, "block_sparse", synthetic(report.MACHINE))
    table = report.text("block_sparse", store)
    by_share = {line[0]: line[1:] for line in cells(table)[1:]}
    assert list(by_share) == [
        *map(str, SHARES),
        "no mask",
        "largest difference: *share* - share of non-zero blocks",
    ]
    # The paper's, then forward + backward of FA-1 and FA-2 in both dtypes, and forward of all.
    assert by_share["10"][:6] == ["27.2", "0.14", "14.5", "0.14", "29.0", "0.14"]
    assert by_share["no mask"][:6] == ["188.4", "1.00", "100.0", "1.00", "200.0", "1.00"]
    assert by_share["100"][0] == "-"
    assert by_share["50"][-1] == "0.50"
    # A time of 5 and 95 % in proportion: 4.5 % of the call without a mask too much at a tenth.
    furthest = by_share["largest difference: *share* - share of non-zero blocks"]
    assert furthest[1:4] == ["+0.04", "", "+0.04"]
    assert "medians of 20 runs" in table
    assert report.NO_RECORDING in report.text("block_sparse", Store(tmp_path / "none"))


# --- the figure ------------------------------------------------------------------------------


def test_the_figure_is_of_both_passes():
    figure = block_sparse.draw(synthetic())
    assert [ax.get_title() for ax in figure.axes] == [
        "forward + backward, N=4096, d=64",
        "share of the full time minus share of blocks",
    ]
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert any("FA-1 paper" in label for label in labels)
    assert {"FA-1 (K/V outer), fp32", "FA-2 (Q outer), fp16"} <= set(labels)
    assert [len(ax.lines) for ax in figure.axes] == [5, 6]
    assert block_sparse.deviations({None: 10, 10: 1.3, 50: 5.0}) == {
        10: pytest.approx(0.03), 50: 0,
    }  # fmt: skip
    other = block_sparse.draw(timed(setting(1024)))
    labels = [text.get_text() for text in other.legends[0].get_texts()]
    assert not any("paper" in label for label in labels)
