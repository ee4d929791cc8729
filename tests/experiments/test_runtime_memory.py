"""Time and memory over the sequence length: settings, rows, the published curves and the tables."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from experiment_helpers import cells, made_up, no_gpu, on_some_gpu, recorded
from test_gpt2_table import exact, exact_gradients

import fa_numba
from experiments import runtime_memory
from experiments.lab.measure import calls, check, peers, timing
from experiments.lab.record.store import Store
from experiments.lab.show import report
from experiments.runtime_memory import BOTH, DROPPED, MASKED, OURS, PLAIN, SPARSE, given, setting
from fa_numba import reference
from fa_numba.problem import Problem


def synthetic(machine="some-gpu"):
    """A few rows of each kind that the figure draws: FA-2 takes 1 ms at N=1024, FA-1 twice that,
    standard and torch's unfused attention six times.
    """
    rows = []
    for N in (128, 1024, 4096, 16384):
        problem = setting(N)
        for name, (_, lengths) in runtime_memory.SETTINGS.items():
            if N not in lengths:
                continue
            for n, series in enumerate((*OURS, *runtime_memory.THEIRS)):
                factor = (6.0, 2.0, 1.0, 6.0, 0.9, 0.8, 1.1, 7.0)[n]
                for pass_ in runtime_memory.PASSES:
                    failed = factor >= 6 and N > 8192
                    value = None if failed else factor * (N / 1024) ** 2
                    note = f"{name}; failed: out of memory" if failed else name
                    own = {"machine": machine, "pass_": pass_, "note": note, "n": 10}
                    rows.append(made_up("runtime_memory", problem, series, value, **own))
                    if not failed and pass_ != "bwd" and name == PLAIN:
                        taken = N * (N if factor >= 6 else 1024) * 2**10
                        own = {"machine": machine, "pass_": pass_, "note": name}
                        of = ("runtime_memory", problem, series, taken / 2**20, "memory")
                        rows.append(made_up(*of, **own))
    return rows


# --- settings and what is published -----------------------------------------------------------


def test_the_papers_tables():
    paper = runtime_memory.paper
    flash = paper("time", "fwd+bwd", BOTH, "FlashAttention")
    assert flash[4096] == 37.49 and list(flash) == list(runtime_memory.SEQLENS)
    assert paper("time", "fwd", DROPPED, "PyTorch Attention").keys() >= {512, 4096}
    memory = paper("memory", "fwd+bwd", PLAIN, "FlashAttention")
    assert memory[65536] == 13376
    # Every panel and setting has its curves, and the panels name the right table.
    for _, metric, pass_, name, item in runtime_memory.PANELS:
        for method in runtime_memory.METHODS:
            found = paper(metric, pass_, name, method)
            lines = runtime_memory.published_numbers.lookup(paper="fa1", item=item, method=method)
            assert found == {int(x["seqlen"]): float(x["value"]) for x in lines} and found


def test_the_page_says_what_the_papers_gain_comes_with():
    gains = {True: [], False: []}
    for name in runtime_memory.SETTINGS:
        curves = (runtime_memory.paper("time", "fwd+bwd", name, m) for m in runtime_memory.METHODS)
        standard, flash = curves
        masked = name in (MASKED, BOTH)
        gains[masked] += [standard[N] / flash[N] for N in standard if N >= 1024]
    with_mask, without = (f"{min(gains[m]):.2f} to {max(gains[m]):.2f}" for m in (True, False))
    page = (report.TABLES / "runtime_memory.md").read_text().replace("\n", " ")
    said = f"the speedup is {with_mask} with a padding mask, and {without} without a "
    said += "padding mask"
    assert said in page


def test_the_papers_memory_is_so_many_arrays():
    """13 arrays of N d and 2 of N in float32: what is compared has the inputs too."""
    for N, value in runtime_memory.paper("memory", "fwd+bwd", PLAIN, "FlashAttention").items():
        if N >= 512:
            array = 2 * 16 * 8 * N * 64
            assert value == pytest.approx((13 * array + 2 * 4 * 16 * 8 * N) / 2**20, abs=0.6)
            assert runtime_memory.input_bytes(setting(N), "fwd+bwd") == 4 * array


# --- rows ------------------------------------------------------------------------------------


def measured(
    monkeypatch, attention=exact, seqlens=(24, 40), repeated=32, failing=None, sparse=None
):
    """Rows of measure with stand-ins for the GPU and its kernels; which runs were timed."""
    timed = []

    def time_ms(run, *, repeats, **_):
        run()
        timed.append(repeats)
        return [2.0 + len(timed)] * repeats

    no_gpu(monkeypatch)
    monkeypatch.setattr(fa_numba.device, "time_ms", time_ms)
    monkeypatch.setattr(runtime_memory, "REPEATED", repeated)
    monkeypatch.setattr(runtime_memory, "BATCH", 2)
    monkeypatch.setattr(runtime_memory, "HEADS", 2)
    small = Problem(2, 2, 2, 16, 16, 8, dtype="float16")
    monkeypatch.setattr(runtime_memory, "CHECKED", small)
    monkeypatch.setattr(runtime_memory, "HEAD_DIM", 8)
    monkeypatch.setattr(runtime_memory, "SEQLENS", seqlens)
    monkeypatch.setattr(runtime_memory, "SPARSE", sparse or {})
    monkeypatch.setattr(runtime_memory, "BLOCK", 8)
    monkeypatch.setattr(runtime_memory, "COLUMNS", 32)
    small = replace(small, seqlen_q=64, seqlen_k=64)
    monkeypatch.setattr(runtime_memory, "SPARSE_CHECKED", small)
    settings = {
        name: (of, seqlens[: 1 if name == DROPPED else None])
        for name, (of, _) in runtime_memory.SETTINGS.items()
    }
    monkeypatch.setattr(runtime_memory, "SETTINGS", settings)
    for more in ("longest", "alone"):
        monkeypatch.setattr(runtime_memory._Session, more, lambda session: ())
    # A few small rows: what dropout makes of them is spread.
    for name in ("DEVIATION_BOUND", "SIZE_BOUND"):
        monkeypatch.setattr(check, name, 2.0)
    monkeypatch.setattr(fa_numba, "attention", attention)
    monkeypatch.setattr(fa_numba, "attention_backward", failing or exact_gradients)
    return [row for row in on_some_gpu(runtime_memory) if row.machine == "some-gpu"], timed


def test_every_setting_and_pass_is_measured(monkeypatch):
    rows, timed = measured(monkeypatch)
    assert not [row.note for row in rows if row.failed]
    times = {(r.seqlen_q, r.series, r.pass_, r.place): r for r in rows if r.metric == "time"}
    assert set(times) == {
        (N, s, p, name)
        for N in (24, 40)
        for s in OURS
        for p in runtime_memory.PASSES
        for name in runtime_memory.SETTINGS
        if (N, name) != (40, DROPPED) and (N, p) != (40, "bwd")
    }
    # At long lengths a call is timed without repeats.
    for (N, *_), row in times.items():
        assert N == 40 or row.n in range(timing.FEWEST, runtime_memory.REPEATS + 1)
    memory = {(r.seqlen_q, r.series, r.pass_, r.place): r.value for r in rows if r.unit == "MiB"}
    assert {key[2] for key in memory} == {"fwd", "fwd+bwd"} and len(memory) == 3 * 2 * (4 + 3)
    # Without torch's allocator what a call returns is known by its size.
    assert memory[24, "fa2-mma", "fwd", PLAIN] == 2 * 2 * 2 * 24 * 8 / 2**20


# --- block-sparse rows ------------------------------------------------------------------------


def test_block_sparse_calls_are_measured_with_their_mask(monkeypatch):
    """At every length with repeats. A series that ignores the mask is wrong."""
    dense = exact, exact_gradients

    def of(function, order):
        def call(*arrays, algorithm, block_mask=None, **options):
            if order == algorithm:
                options["block_mask"] = block_mask
            return function(*arrays, algorithm=algorithm, **options)

        return call

    forward, backward = (of(function, "fa1") for function in dense)
    monkeypatch.setattr(runtime_memory, "OURS", ())
    rows, _ = measured(monkeypatch, forward, failing=backward, sparse=SPARSE)
    times = {(r.seqlen_q, r.series, r.pass_, r.place): r for r in rows if r.metric == "time"}
    assert set(times) == {
        (N, s, p, f"{name}, 1 of {N // 8} blocks")
        for N in (24, 40)
        for s, names in SPARSE.items()
        for p in runtime_memory.PASSES
        for name in names
    }
    for (_, series, *_), row in times.items():
        assert ("against float64" in row.note) == row.failed == (series == "fa2-mma-sparse")
        assert row.failed or row.n >= timing.FEWEST
    memory = {(r.seqlen_q, r.series, r.pass_, r.place) for r in rows if r.metric == "memory"}
    assert memory == {at for at, r in times.items() if at[2] != "bwd" and not r.failed}
    place = runtime_memory.places_of("fa1-mma-sparse", BOTH)
    assert place == tuple(f"{BOTH}, 1 of {n} blocks" for n in (3, 5))
    assert runtime_memory.places_of("fa1-mma", BOTH) == (BOTH,)
    assert set(runtime_memory.curve(rows, "fa1-mma-sparse", "time", "bwd", PLAIN)) == {24, 40}


def test_a_row_of_blocks_has_an_eighth_of_the_columns(monkeypatch):
    """At most 256 columns, and at least a block of 64."""
    found = {N: runtime_memory.blocks_of(N) for N in runtime_memory.SEQLENS}
    assert [found[N] for N in (128, 512, 1024, 2048)] == [(1, 2), (1, 8), (2, 16), (4, 32)]
    assert all(computed == 4 and 64 * every == N for N, (computed, every) in found.items()
               if N >= 2048)  # fmt: skip
    monkeypatch.setattr(fa_numba, "create_block_mask", lambda visible, *sizes, tiles: visible)
    for computed, apart in ((1, {0}), (2, {0, 1}), (4, {0, 1, 2, 4})):
        visible = runtime_memory.butterfly(1024, computed)
        for i, j in np.ndindex(16, 16):
            elements = visible(0, 0, 64 * i, 64 * j + 63), visible(0, 0, 64 * i + 63, 64 * j)
            assert elements == (((i ^ j) in apart),) * 2


def test_rows_of_a_block_sparse_result_are_checked():
    """Those of a block in the middle of the last head, as far as they are no padding."""
    problem = Problem(2, 1, 1, 200, 200, 8, dtype="float16")
    q, k, v = runtime_memory.Inputs()(problem)[:3]
    visited = np.array([[1, 0, 0, 0], [1, 1, 0, 1], [0, 0, 1, 0], [0, 0, 0, 1]], bool)
    mask = SimpleNamespace(visited=visited[None, None])
    tiles = fa_numba.Tiles(64, 64)
    for lens in ({}, {"q_lens": [200, 120], "kv_lens": [200, 120]}):
        held = runtime_memory.sparse_gate(problem, q, k, v, block_mask=mask, **lens)
        out = reference.attention(q, k, v, block_mask=visited, tiles=tiles, **lens)
        assert held(out) < 1e-6
        with pytest.raises(check.WrongResult, match="N=200"):
            held(reference.attention(q, k, v))
        out[-1, -1, 119] *= 1.1
        with pytest.raises(check.WrongResult):
            held(out)
    assert np.isnan(runtime_memory.sparse_gate(problem, q, k, v, dropout_p=0.1)(out))


def test_the_table_of_block_sparse_attention():
    rows = synthetic()
    assert runtime_memory.sparse_table(rows) is None
    for series, names in SPARSE.items():
        for name in names:
            note = runtime_memory.place_of(series, name, 4096)
            own = {"pass_": "fwd+bwd", "note": note, "n": 10}
            rows.append(made_up("runtime_memory", setting(4096), series, 4.0, **own))
    found = {line[0]: line[1:] for line in cells(runtime_memory.sparse_table(rows).body)}
    # The paper: 3.21 of 30.09 ms, and 4.12 of 37.49 ms. FA-1 takes 32 ms here, and FA-2 16 ms.
    assert found["4096"] == ["6.25", "0.107", "0.125", "0.250", "0.110", "0.125"]
    assert found["128"] == ["50", "2.387", "-", "-", "1.023", "-"]


@pytest.mark.parametrize("wrong_rows", [slice(0, 0), slice(-5, None)])
def test_the_longest_is_a_shorter_one_again_and_again(monkeypatch, wrong_rows):
    """Its last rows are checked too."""

    def attention(q, k, v, **options):
        out = exact(q, k, v, **options)
        if q.shape[2] == 96:
            (out[0] if isinstance(out, tuple) else out)[:, :, wrong_rows] *= 2
        return out

    monkeypatch.setattr(runtime_memory, "LONGEST", 96)
    others, longest = synthetic(), runtime_memory._Session.longest
    measured(monkeypatch, attention, seqlens=(24,))
    session = runtime_memory._Session("some-gpu", runtime_memory.setting(24))
    with fa_numba.device.using("emulator"):
        rows = list(longest(session))
    assert {(r.series, r.batch, r.seqlen_q, r.seqlen_k) for r in rows} == {("fa2-auto", 1, 96, 96)}
    failed = {r.pass_ for r in rows if "against float64" in r.note}
    assert failed == ({"fwd"} if wrong_rows.stop is None else set())
    text = runtime_memory.table([*rows, *others]).caption
    assert ("With batch 1 and N=96, FA-2" in text) is not failed
    assert len(rows) == (3 if failed else 4) and {"fwd", "fwd+bwd"} <= {r.pass_ for r in rows}


def test_standard_attention_is_measured_with_one_batch_entry(monkeypatch):
    """Until it does not fit. Its rows are not those of 16 batch entries."""
    alone = runtime_memory._Session.alone

    def full(dout, q, *others, **options):
        if q.shape[2] > 24:
            raise MemoryError
        return exact_gradients(dout, q, *others, **options)

    measured(monkeypatch, failing=full, seqlens=(24,))
    monkeypatch.setattr(runtime_memory, "ALONE_SEQLENS", (24, 40, 48))
    session = runtime_memory._Session("some-gpu", runtime_memory.setting(24))
    with fa_numba.device.using("emulator"):
        rows = list(alone(session))
    assert {(r.series, r.batch, r.place) for r in rows} == {
        ("standard-mma", 1, runtime_memory.ALONE)
    }
    times = {(r.pass_, r.seqlen_q): r.failed for r in rows if r.metric == "time"}
    assert times["fwd", 48] is times["fwd+bwd", 24] is False and times["fwd+bwd", 40] is True
    assert ("fwd+bwd", 48) not in times
    assert not runtime_memory.curve(rows, "standard-mma", "time", "fwd", runtime_memory.PLAIN)


def test_what_does_not_fit_is_not_tried_at_longer_lengths(monkeypatch):
    tried = []

    def full(dout, q, *others, algorithm, **options):
        if algorithm == "standard" and q.shape[2] > 16:
            tried.append(q.shape[2])
            raise MemoryError
        return exact_gradients(dout, q, *others, algorithm=algorithm, **options)

    rows, _ = measured(monkeypatch, failing=full, seqlens=(24, 40, 48))
    failed = [(r.series, r.pass_, r.seqlen_q, r.place) for r in rows if r.failed]
    assert set(failed) == {
        ("standard-mma", p, 24, name)
        for p in ("bwd", "fwd+bwd")
        for name in runtime_memory.SETTINGS
    }
    assert {r.note.partition("; ")[2] for r in rows if r.failed} == {"failed: out of memory"}
    assert set(tried) == {24}
    forward = {r.seqlen_q for r in rows if (r.series, r.pass_) == ("standard-mma", "fwd")}
    assert forward == {24, 40, 48}


# --- the check of small problems ---------------------------------------------------------------


@pytest.mark.parametrize("name", runtime_memory.SETTINGS)
@pytest.mark.parametrize("series", ["fa2-mma", "torch-efficient"])
def test_the_check_with_options(monkeypatch, name, series):
    problem = Problem(2, 2, 2, 64, 64, 32, dtype="float16")
    options = given(name, problem)
    host = runtime_memory.Inputs(gradient=True)(problem)
    theirs = series.startswith("torch")

    def made(series, pass_, problem, arrays, **options):
        q, k, v, dout = arrays
        if theirs:  # computes every row, and draws with a generator of its own
            options = {n: x for n, x in options.items() if n in ("dropout_p", "kv_lens")}
            options |= {"seed": 11} if "dropout_p" in options else {}
        if pass_ == "fwd":
            return lambda: factor["O"] * reference.attention(q, k, v, **options)
        gradients = reference.attention_backward(dout, q, k, v, **options)
        return lambda: [factor[n] * x for n, x in zip(("dq", "dk", "dv"), gradients, strict=True)]

    monkeypatch.setattr(calls, "make", made)
    monkeypatch.setattr(peers, "on_device", lambda arrays, dtype: arrays)
    factor = dict.fromkeys(("O", "dq", "dk", "dv"), 1.0)
    calls.check_once(series, problem, host, options)
    for wrong_one in factor:
        factor[wrong_one] = np.nan if theirs and "dropout_p" in options else 1.02
        with pytest.raises(check.WrongResult):
            calls.check_once(series, problem, host, options)
        factor[wrong_one] = 1.0


def test_memory_of_a_call_is_workspace_and_results(monkeypatch):
    """Ours from the package's allocator, results from torch's where it is."""
    trace = SimpleNamespace(peak_bytes=300)

    class Tracking:
        def __enter__(self):
            return trace

        def __exit__(self, *_):
            return False

    ran = []
    monkeypatch.setattr(fa_numba.device, "track_memory", Tracking)
    monkeypatch.setattr(fa_numba.device, "synchronize", lambda: None)
    monkeypatch.setattr(peers, "available", lambda: False)
    assert calls.own_peak_bytes(lambda: ran.append(1), 50) == 350 and ran == [1]
    monkeypatch.setattr(peers, "available", lambda: True)
    monkeypatch.setattr(peers, "allocated_bytes", lambda run: 40)
    assert calls.own_peak_bytes(lambda: None, 50) == 340


# --- figure and tables -----------------------------------------------------------------------


def test_the_tables(tmp_path):
    store = recorded(tmp_path, "runtime_memory", synthetic(report.MACHINE))
    found = {line[0]: line[1:] for line in cells(report.text("runtime_memory", store))}
    assert set(found) == {"N", "128", "1024", "4096", "16384"}
    paper = runtime_memory.paper("time", "fwd+bwd", PLAIN, "FlashAttention")
    times = ["32", "16", "1.68", "3.00", "3.00", "6.00"]
    assert found["4096"][:7] == [f"{paper[4096]:.3g}", *times]
    # 4096^2 KiB are 16 GiB; 4096 MiB; the four inputs are 64 MiB each.
    assert found["4096"][7:] == ["17024", "16640", "836", "4352", "4352"]
    assert found["16384"][3:6] == ["-", "-", "-"] and found["16384"][7:9] == ["-", "-"]
    lines = cells(report.text("runtime_settings", store))
    assert len(lines) == 9
    assert ["plain", "fwd+bwd", "1.68", "3.00", "3.00", "6.00"] in lines
    assert ["dropout, padding mask", "fwd+bwd", "3.31", "3.00", "3.00", "6.00"] in lines
    for name in ("runtime_memory", "runtime_settings"):
        assert report.text(name, Store(tmp_path / "none")) == "no recording yet\n"


def test_the_figure_has_the_published_curves():
    figure = runtime_memory.draw(synthetic())
    for ax, panel in zip(figure.axes, runtime_memory.PANELS, strict=True):
        hollow = [line for line in ax.lines if line.get_markerfacecolor() == "white"]
        assert len(hollow) == 2 and len(ax.lines) == 2 + 3
        assert panel[-1] in ax.get_title()
    memory = figure.axes[3]
    assert memory.get_ylabel() == "memory with inputs (MiB)"
    marks = {line.get_label(): line for line in memory.lines}
    # Inputs are drawn with ours, as the paper counts.
    (N, value), *_ = marks["FA-2 (Q outer)"].get_xydata().tolist()
    assert (N, value) == (128, 128 + runtime_memory.input_bytes(setting(128), "fwd+bwd") / 2**20)
