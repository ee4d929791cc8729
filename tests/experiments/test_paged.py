"""The experiment on pages: its rows, counted and measured, figure and table."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from experiment_helpers import above, made_up, time_on_the_emulator

import fa_numba
from experiments import paged
from experiments.lab.record.options import Bench, Options
from experiments.lab.record.store import EMULATOR, Row


@cache
def counted():
    return [
        row
        for series, page_size in (("fa2-mma", 16), ("fa2-simt", 64))
        for row in paged._counted(series, page_size)
    ]


def timed(machine="some-gpu", series=paged.TIMED[0]):
    """One piece takes a microsecond for 1024 keys, pages of n rows 1 + 1 / n of that."""
    rows = []
    for N in paged.CONTEXTS:
        problem = paged._step(N, 128)
        for size in (0, *paged.PAGE_SIZES):
            value, note = N / 1024 * (1 + (1 / size if size else 0)), paged.place(size)
            rows.append(made_up("paged", problem, series, value, machine=machine, note=note))
    return rows


def synthetic():
    return counted() + timed() + timed(series="fa2-wgmma")


def test_pages_in_no_order_hold_every_row():
    k, v = np.random.default_rng(0).standard_normal((2, 2, 3, 40, 4))
    k_pages, v_pages, table = paged.in_pages(k, v, 16)
    assert table.shape == (2, 3) and sorted(table.ravel()) == list(range(6))
    for x, pages in ((k, k_pages), (v, v_pages)):
        found = np.concatenate([pages[table[:, n]] for n in range(3)], axis=2)
        np.testing.assert_array_equal(found[:, :, :40], x)
        assert not found[:, :, 40:].any()


def test_no_bit_differs_and_the_table_is_little():
    rows = counted()
    assert {row.machine for row in rows} == {EMULATOR}
    for series, size in (("fa2-mma", 16), ("fa2-simt", 64)):
        assert paged.counted(rows, "difference")[series] == {size: 0}
        assert 0 < paged.counted(rows, "table_share")[series][size] < 0.01


def test_ratios_are_over_one_piece_at_the_same_context():
    rows = timed()
    assert list(paged.ratios(rows + timed(series="fa2-wgmma"))) == ["fa2-mma", "fa2-wgmma"]
    found = paged.ratios(rows)["fa2-mma"]
    assert list(found) == list(paged.PAGE_SIZES)
    assert found[16] == {N: pytest.approx(1 + 1 / 16) for N in paged.CONTEXTS}
    failed = [replace(r, value=None) if paged.page_size_of(r) == 0 else r for r in rows]
    assert paged.ratios(failed) == {}
    assert [paged.page_size_of(row) for row in rows[:3]] == [0, 16, 64]


def test_the_figure_and_the_table_take_any_part_of_the_rows():
    whole = synthetic()
    for rows, unmeasured in ((whole, 0), (counted(), 2)):
        figure, table = paged.draw(rows), paged.table(rows)
        texts = [text.get_text() for ax in figure.axes for text in ax.texts]
        assert texts.count("not measured here") == unmeasured
        assert "| 16 |" in table.body
    said = above(paged.draw(counted() + timed()))
    assert said.startswith("With pages, a decoding step takes 1.0 to 1.1 times as long\n")
    assert "Time over that with a contiguous cache: 1.0 to 1.1 with mma. Grey band" in said
    body = paged.table(whole).body.splitlines()
    assert body[2].split("|")[-5:-1] == [" 1.062 "] * 4
    assert paged.draw([]) is None and paged.table([]) is None


def test_a_step_is_timed_over_one_piece_and_over_pages(monkeypatch):
    """With the emulator for a GPU: every call is checked against float64 before it is timed."""
    time_on_the_emulator(monkeypatch, paged)
    monkeypatch.setattr(paged, "PAGE_SIZES", (16, 64))
    monkeypatch.setattr(fa_numba.device, "compute_capability", lambda: (8, 0))
    monkeypatch.setattr(paged, "QUICK_CONTEXTS", (80,))
    monkeypatch.setattr(paged, "HEAD_DIM", 32)
    rows = list(paged.measure(Options(quick=True), Bench(machine="some-gpu", kept=counted()[:1])))
    rows = [row for row in rows if isinstance(row, Row)]
    assert [(row.note, row.value) for row in rows] == [
        (paged.place(size), n) for n, size in enumerate((0, 16, 64), 1)
    ]
