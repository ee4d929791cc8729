"""The decoding benchmark: what it measures, draws and tabulates, without and with rows."""

import pytest
from experiment_helpers import cells, made_up

from experiments import decode
from experiments.lab.record.options import Options
from fa_numba import bounds


def synthetic(missing=(), read=4.0):
    """Ours read at 2 TB/s, split at 3.5; torch's at 3."""
    rows = []
    speeds = {s: 3.5 if s in decode.SPLITS.values() else 2.0 for s in decode.OURS}
    speeds |= dict.fromkeys(decode.PEERS, 3.0)
    for problem in decode.problems(Options()):
        for series, speed in speeds.items():
            if series in missing:
                continue
            note = "kv_splits=8" if series in decode.SPLITS.values() else ""
            ms = decode.cache_bytes(problem) / speed / 1e9
            rows.append(made_up("decode", problem, series, ms, note=note, n=10))
            rows.append(made_up("decode", problem, series, speed, "bandwidth", note=note))
    if read:
        rows.append(made_up("decode", decode._problem(1, 1, 1, 1), decode.READ, read, "bandwidth"))
    return rows


def test_nothing_measured_is_nothing_drawn():
    assert decode.draw([]) is None and decode.table([]) is None
    only_read = [row for row in synthetic() if row.series == decode.READ]
    assert decode.draw(only_read) is None and decode.table(only_read) is None


def test_the_grid_is_the_benchmarks():
    every = decode.problems(Options())
    assert len(set(every)) == len(every)
    published = [p for p in every if p.heads_q != decode.HEADS]
    assert [(p.batch, p.heads_q, p.heads_k, p.seqlen_k) for p in published] == [
        (max(1, 2**16 // N), 16, 2, N) for N in (2**n for n in range(8, 18))
    ]
    every = [p for p in every if p not in published]
    assert {p.batch for p in every} == {1, 4, 16, 64}
    assert {p.seqlen_k for p in every} == {1024, 4096, 16384, 65536, 131072}
    assert {p.group for p in every} == {1, 4, 8} and {p.head_dim for p in every} == {64, 128}
    assert {p.seqlen_q for p in every} == {1, 2, 4, 8, 16}
    assert max(map(decode.cache_bytes, every)) <= 2**31
    # Columns are split somewhere, on both units, and nowhere unless asked for.
    with bounds.DEVICES["H200"].planning():
        for series, own in decode.SPLITS.items():
            found = [decode.plan(own, p, **decode._own(own)).kv_splits for p in every]
            assert max(found) > 8 and min(found) == 1
            assert {decode.plan(series, p, **decode._own(series)).kv_splits for p in every} == {1}


def test_the_table_has_shares_and_the_best_of_torch():
    table = decode.table(synthetic())
    assert "4.00 TB/s" in table.caption
    header, *lines = cells(table.body)
    assert len(lines) == len(decode.SHOWN) <= 10
    large = [p for p in decode.problems(Options()) if decode.cache_bytes(p) >= decode.LARGE_BYTES]
    assert f"For the {len(large)} measured decoding problems" in table.caption
    assert "our best time is 1.17 to 1.17" in table.caption
    assert all(line[-3:] == ["8", "0.88", "1.17"] for line in lines)
    assert "FA-2 (wgmma), key splits" in header


def test_what_was_not_measured_is_said():
    rows = synthetic(missing=(*decode.PEERS, "fa2-wgmma", "fa2-wgmma-splits"), read=None)
    table = decode.table(rows)
    assert "not measured" in table.caption and "cuDNN" not in table.body
    assert all(line[-2:] == ["-", "-"] for line in cells(table.body)[1:])
    failed = [row for row in rows if row.batch == 1 and row.heads_k == 32]
    rows = [row for row in rows if row not in failed and row.batch != 1]
    figure = decode.draw(rows)
    assert any("not measured" in t.get_text() for ax in figure.axes for t in ax.texts)


@pytest.mark.parametrize("read", [4.0, None])
def test_the_figure_has_a_line_a_series(read):
    figure = decode.draw(synthetic(read=read))
    assert len(figure.axes) == 6
    message = figure.legends[0].get_title().get_text()
    assert message == "With key splits, one query is up to 1.8 times as fast"
    for ax in figure.axes:
        lines = [line for line in ax.lines if line.get_label()[0] != "_"]
        assert len(lines) == 7 + bool(read)


def test_unfused_attention_is_measured_where_it_reads_no_copies():
    alone, shared = (decode._problem(1, group, 1, 512) for group in (1, 4))
    assert decode.compared(alone) == (*decode.PEERS, "torch-unfused")
    assert decode.compared(shared) == decode.PEERS
