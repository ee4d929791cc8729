"""The experiment on shared prefixes: its rows, counted and measured, figure and table."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from experiment_helpers import above, made_up, time_on_the_emulator

from experiments import prefix
from experiments.lab.measure import counts
from experiments.lab.measure.workloads import Inputs
from experiments.lab.record.options import Bench, Options
from experiments.lab.record.store import EMULATOR, MODEL, Row


@cache
def counted():
    """Counted, and the model's of the same steps, one of whose prefixes ends within a page."""
    found = []
    for at in ((1, 40), (3, 32)):
        found += prefix._modelled("fa2-mma", prefix.step(*at, prefix.SMALL), prefix.SMALL)
        found += prefix._counted("fa2-mma", *at)
    return found


@cache
def modelled():
    steps = [prefix.step(n, N, prefix.LARGE) for N in (1024, 4096) for n in (1, 256)]
    return [row for p in steps for row in prefix._modelled("fa2-mma", p, prefix.LARGE)]


def timed(machine="some-gpu", series=prefix.TIMED[0]):
    """Read by each, n sequences take n microseconds a thousand keys; once, one."""
    rows = []
    for N in prefix.PREFIXES:
        for n in prefix.SEQUENCES:
            problem = prefix.step(n, N, prefix.LARGE)
            for way, value in ((prefix.ONCE, N / 1e6), (prefix.BY_EACH, n * N / 1e6)):
                rows.append(made_up("prefix", problem, series, value, machine=machine, note=way))
    return rows


@pytest.mark.parametrize("first", [32, 40])
def test_both_ways_have_the_keys_of_the_whole(first):
    sizes = 4, 2, 24, 8, 16
    problem = prefix.step(3, first, sizes)
    q, k0, v0, k, v = host = prefix.arrays(problem, sizes, Inputs())
    for way in prefix.WAYS:
        (_, *pages), options = prefix.given(way, problem, host, sizes)
        table, lens = options["block_table"], options["kv_lens"]
        for x0, x, held, name in ((k0, k, pages[0], "prefix_k"), (v0, v, pages[1], "prefix_v")):
            behind = prefix.Behind(x0, x)
            for b in range(3):
                found = np.concatenate(held[table[b]], axis=1)[:, : lens[b]]
                if way == prefix.ONCE:
                    found = np.concatenate((options[name], found), axis=1)
                for h in range(2):
                    np.testing.assert_array_equal(found[h], behind[b, h, slice(None)])
        paged, told = prefix._told(way, problem, sizes)
        assert told["block_table"] == table.shape and (told["kv_lens"] == lens).all()
        assert paged.k_shape[1:] == pages[0].shape[1:]
    shared = prefix.given(prefix.BY_EACH, problem, host, sizes)[1]["block_table"]
    assert (shared[:, : first // 16] == np.arange(first // 16)).all()


def test_counts_are_the_models_and_results_those_of_float64():
    rows = counted()
    assert {row.machine for row in rows} == {EMULATOR, MODEL}
    assert counts.equal([row for row in rows if row.metric == "traffic"]) == (4, 4)
    errors = [row.number for row in rows if row.metric == "error"]
    assert len(errors) == 4 and 0 < max(errors) < 2e-3


def test_of_many_sequences_a_prefix_is_read_once_a_tile_of_all():
    """And of one it costs what merges its part."""
    found = prefix.gains(prefix.by_way(modelled(), "fa2-mma", "traffic"))
    assert list(found) == [1024, 4096] and all(0.97 < by[1] < 1.0 for by in found.values())
    assert found[4096][256] > found[1024][256] > 4


def test_the_figure_and_the_table_take_any_part_of_the_rows():
    whole = modelled() + timed() + timed(series=prefix.TIMED[1])
    for rows, lacks in ((whole, []), (counted() + modelled(), ["not recorded"] * 2)):
        figure, table = prefix.draw(rows), prefix.table(rows)
        assert [t.get_text() for ax in figure.axes for t in ax.texts] == lacks
        assert ("Times are not recorded." in table.caption) == bool(lacks)
        assert ("a factor that is not recorded" in above(figure)) == bool(lacks)
        assert "| 4096 | 256 |" in table.body
    figure = prefix.draw(modelled() + timed())
    assert [t.get_text() for ax in figure.axes for t in ax.texts] == ["not recorded"]
    assert "The time is shorter by 256 times with mma.\n" in above(figure)
    assert (
        "4 of 4 numbers counted by the emulator equal the access model"
        in prefix.table(counted() + modelled()).caption
    )
    line = next(x for x in prefix.table(whole).body.splitlines() if x.startswith("| 4096 | 16 "))
    assert line.split("|")[3:] == [" - "] * 3 + [" 4.1 ", " 65.5 ", " 16.00 "] * 2 + [""]
    failed = [replace(r, value=None) if r.note == prefix.ONCE else r for r in timed()]
    assert prefix.by_way(failed, "fa2-mma", "time") == {}
    assert prefix.draw([]) is None and prefix.table([]) is None


def test_a_step_is_timed_both_ways(monkeypatch):
    """With the emulator for a GPU: every call is checked against float64 before it is timed."""
    time_on_the_emulator(monkeypatch, prefix)
    monkeypatch.setattr(prefix, "LARGE", (2, 1, 20, 32, 16))
    monkeypatch.setattr(prefix, "TIMED", ("fa2-mma",))
    monkeypatch.setattr(prefix, "SEQUENCES", (3,))
    monkeypatch.setattr(prefix, "PREFIXES", (40,))
    options, bench = Options(quick=True), Bench(machine="gpu", kept=counted()[:1])
    rows = [row for row in prefix.measure(options, bench) if isinstance(row, Row)]
    rows = [row for row in rows if row.machine == "gpu"]
    assert [(row.note, row.value) for row in rows] == [(prefix.ONCE, 1), (prefix.BY_EACH, 2)]
    monkeypatch.setattr(prefix, "given", lambda *_: 1 / 0)
    rows = [row for row in prefix.measure(options, bench) if isinstance(row, Row)]
    rows = [row for row in rows if row.machine == "gpu"]
    assert [row.note.partition(";")[0] for row in rows] == [*prefix.WAYS]
    assert all(row.value is None and "division" in row.note for row in rows)
