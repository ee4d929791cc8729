"""GPT-2's attention: what the paper counts, the steps, rows, figure and tables."""

from dataclasses import replace

import pytest
from experiment_helpers import cells, made_up, no_gpu, on_some_gpu, recorded

import fa_numba
from experiments import gpt2_table
from experiments.beside import unfused_steps
from experiments.gpt2_table import PRODUCTS, SETTING, gflop, paper
from experiments.lab.measure import calls, counters, counts, peers, timing, variants
from experiments.lab.measure.workloads import one_head
from experiments.lab.record.options import Bench, Options
from experiments.lab.record.store import EMULATOR, MODEL, Store
from experiments.lab.show import report
from fa_numba import reference

TIMES = {"fwd": 1.0, "bwd": 2.5, "fwd+bwd": 3.5}


# The paper's GB: so many N x N and N x d arrays of 2 bytes an element.
ARRAYS = {"Standard": (18, 12), "FlashAttention": (0, 33)}


def paper_gb(problem, matrices, arrays):
    """10^9 bytes of so many N x N matrices and N x d arrays a head, 2 bytes an element."""
    rows = problem.batch * problem.heads_q * problem.seqlen_q
    return 2 * rows * (matrices * problem.seqlen_k + arrays * problem.head_dim) / 1e9


def synthetic(machine="some-gpu"):
    """A few rows of each kind that the figure draws: standard attention takes 5 times FA-2."""
    rows = []
    for dtype, ours in gpt2_table.SERIES.items():
        problem = replace(SETTING, dtype=dtype)
        for n, series in enumerate((*ours, *gpt2_table.PEERS[dtype])):
            factor = (5.0, 3.0, 1.0, 4.0, 0.9, 0.8)[n]
            for pass_, value in TIMES.items():
                of, own = ("gpt2_table", problem, series), {"machine": machine, "pass_": pass_}
                rows.append(made_up(*of, factor * value, n=20, **own))
                if series in ours and pass_ != "fwd+bwd":
                    moved = (*of, factor * value * 1e9, "traffic")
                    rows += [made_up(*moved, source=s, **own) for s in ("model", "l2", "dram")]
    steps = [(unfused_steps.THEIRS, s, 0.5 * n) for n, s in enumerate(unfused_steps.STEPS, 1)]
    kernels = enumerate(unfused_steps.PLACES.values(), 1)
    steps += [(unfused_steps.OURS, place, 0.5 * n) for n, place in kernels]
    steps += [(series, unfused_steps.FUSED, 0.7) for series in unfused_steps.FUSED_SERIES]
    causal = replace(SETTING, causal=True)
    return rows + [
        made_up("gpt2_table", causal, series, ms, machine=machine, note=step, n=20)
        for series, step, ms in steps
    ]


# --- what the paper counts -------------------------------------------------------------------


@pytest.mark.parametrize("method", PRODUCTS)
def test_the_papers_numbers_are_these_counts(method):
    """To the digits that it prints."""
    products = PRODUCTS[method]
    assert gpt2_table.printed_gflop(SETTING, products) == pytest.approx(
        paper(method, "work"), abs=0.05
    )
    # The author's correction: 824.6 is 825, and 963 is 962.07 and a little.
    corrected = paper(method, "work", gpt2_table.CORRECTED)
    assert gflop(SETTING, products) == pytest.approx(corrected, abs=1)
    assert paper_gb(SETTING, *ARRAYS[method]) == pytest.approx(
        paper(method, "hbm_accesses"), abs=0.05
    )


# --- rows ------------------------------------------------------------------------------------


def test_without_a_gpu_the_model_and_the_counts(monkeypatch):
    for name, value in (("SEQLEN", 32), ("COUNTED_SEQLEN", 32), ("HEAD_DIM", 8)):
        monkeypatch.setattr(gpt2_table, name, value)
    rows = list(gpt2_table.measure(Options(), Bench(say=pytest.fail)))
    assert {row.machine for row in rows} == {MODEL, EMULATOR}
    counted = [row for row in rows if row.machine == EMULATOR]
    assert {(row.series, row.pass_, row.metric) for row in counted} == {
        (series, pass_, metric)
        for series in gpt2_table.SERIES["float16"]
        for pass_ in ("fwd", "bwd")
        for metric in ("loads", "stores")
    }
    assert counts.equal(rows) == (len(counted), len(counted))
    # Bytes of the whole layer are those of its heads.
    (whole,) = (
        row.value
        for row in rows
        if (row.series, row.pass_, row.metric, row.dtype)
        == ("fa1-mma", "bwd", "traffic", "float16")
    )
    with fa_numba.device.using("emulator"):
        shape = (64, 16, 32, 8)
        planned = fa_numba.plan(shape, shape, algorithm="fa1", dtype="float16", passes="bwd")
    assert whole == planned.accesses.bytes


def exact(q, k, v, algorithm, unit, out=None, return_lse=False, **options):
    O, L = reference.attention(q, k, v, return_lse=True, **options)
    return (O.astype(q.dtype), L) if return_lse else O.astype(q.dtype)


def exact_gradients(dout, q, k, v, out, lse, algorithm, unit, **options):
    return [x.astype(q.dtype) for x in reference.attention_backward(dout, q, k, v, **options)]


def on_a_gpu(monkeypatch, attention=exact):
    """Rows of measure with stand-ins for the GPU and its kernels; the cases that ncu would be
    given, and what was timed.
    """
    cases, launched = [], []

    def time_call(run, check, **_):
        check(run())
        launched.append(run)
        return timing.Timing(2.0, 1.0, 3.0, 20, 1e-4)

    def count_or_say(wanted, metrics, say):
        cases.extend(wanted)
        return [dict.fromkeys(metrics, 1e6)] * len(wanted)

    for module in (variants, unfused_steps):
        monkeypatch.setattr(module, "time_call", time_call)
    no_gpu(monkeypatch)
    monkeypatch.setattr(counters, "available", lambda: True)
    monkeypatch.setattr(counters, "count_or_say", count_or_say)

    def count_kernels(wanted, metrics):
        cases.extend(wanted)
        return [[dict.fromkeys(metrics, 1e6 * n) for n in (1, 2, 3)]]

    monkeypatch.setattr(counters, "count_kernels", count_kernels)
    for name, value in (("QUICK_BATCH", 1), ("QUICK_SEQLEN", 64), ("HEADS", 2), ("HEAD_DIM", 16)):
        monkeypatch.setattr(gpt2_table, name, value)
    monkeypatch.setattr(fa_numba, "attention", attention)
    monkeypatch.setattr(fa_numba, "attention_backward", exact_gradients)
    monkeypatch.setattr(gpt2_table, "_count", lambda *_, **__: [])
    rows = on_some_gpu(gpt2_table, quick=True)
    return [row for row in rows if row.machine == "some-gpu"], cases, launched


def test_every_series_pass_and_step_is_measured(monkeypatch):
    rows, cases, launched = on_a_gpu(monkeypatch)
    assert not [row.note for row in rows if row.failed]
    times = {(r.series, r.pass_, r.place, r.causal) for r in rows if r.metric == "time"}
    whole = {(s, p, "", False) for ours in gpt2_table.SERIES.values() for s in ours for p in TIMES}
    kernels = {("standard-mma", "fwd", k, True) for k in unfused_steps.PLACES.values()}
    fused = {(s, "fwd", "fused", True) for s in ("fa1-mma", "fa2-mma")}
    assert times == whole | kernels | fused
    assert len(launched) == len(whole | fused)
    moved = {(r.series, r.pass_, r.source) for r in rows if r.metric == "traffic"}
    assert len(moved) == 2 * 3 * 2 * 3
    # One call of standard attention with what the steps have; forward and backward of the others.
    assert [(c.options.get("dropout_p", 0.0), c.problem.causal) for c in cases] == [(0.1, True)] + [
        (0.0, False)
    ] * 12
    assert [c.pass_ for c in cases[1:]] == ["fwd", "bwd"] * 6
    by_kernel = [r.value for r in rows if r.series == "standard-mma" and r.place]
    assert by_kernel == [1.0, 2.0, 3.0]


# --- checks of calls with options ------------------------------------------------------------


def test_options_reach_torch_by_its_names(monkeypatch):
    seen = []
    monkeypatch.setattr(peers, "call", lambda *a, **o: seen.append(o))
    monkeypatch.setattr(peers, "gradients", lambda *a, **o: seen.append(o))
    options = {"dropout_p": 0.1, "seed": 7, "q_lens": (3,), "kv_lens": (3,)}
    for pass_ in ("fwd", "bwd"):
        calls.make("torch-fa2", pass_, one_head(4, 8), [None] * 4, **options)
    assert seen == [{"dropout_p": 0.1, "kv_lens": (3,)}] * 2


# --- counters --------------------------------------------------------------------------------


# --- figure and tables -----------------------------------------------------------------------


def test_the_tables(tmp_path):
    store = recorded(tmp_path, "gpt2_table", synthetic(report.MACHINE))
    found = {line[0]: line[1:] for line in cells(report.text("gpt2_table", store))}
    assert len(found) <= 11
    assert found["GFLOP, as printed"] == ["66.6", "66.6", "-", "75.2", "75.2", "75.2", "-"]
    assert found["GFLOP, corrected"] == ["825", "962", "825", "963", "962", "962", "962"]
    assert found["GB accessed"] == ["40.3", "17.5", "-", "4.4", "10.5", "3.5", "-"]
    assert found["GB, DRAM"] == ["-", "17.5", "-", "-", "10.5", "3.5", "-"]
    whole = found["ms, forward + backward"]
    assert whole == ["41.7", "17.50", "2.80", "7.3", "10.50", "3.50", "14.00"]
    found = {line[0]: line[1:] for line in cells(report.text("gpt2_steps", store))}
    assert found["matmul QK^T"] == ["2.2", "0.50", "0.50"]
    assert found["scale, mask"] == ["4.5", "1.00", "in the step above"]
    assert found["dropout"] == ["4.6", "2.00", "in the step above"]
    assert found["matmul PV"] == ["1.8", "2.50", "1.50"]
    assert found["all steps"] == ["16.8", "7.50", "3.00"]
    assert found["fused, FA-1's order"] == ["2.2", "-", "0.70"]
    nothing = Store(tmp_path / "none")
    for name in ("gpt2_table", "gpt2_steps"):
        assert report.text(name, nothing) == "no recording yet\n"


def test_the_figure():
    figure = gpt2_table.draw(synthetic())
    steps, moved, times = figure.axes
    names = [text.get_text() for text in steps.get_yticklabels()]
    assert names[:3] == [
        "PyTorch, published (A100)",
        "torch, step by step",
        "standard attention, 3 kernels",
    ]
    assert len(steps.patches) == 5 + 5 + 3 + 1 + 4
    assert len(moved.patches) == 9 + 2 and len(times.patches) == 6
    ratio = gpt2_table.paper("Standard", "runtime") / gpt2_table.paper("FlashAttention", "runtime")
    assert f"{ratio:.1f} times" in times.texts[-1].get_text().replace("\n", " ")
    # Of another problem the paper has no bars.
    other = [replace(row, seqlen_q=512, seqlen_k=512) for row in synthetic()]
    assert len(gpt2_table.draw(other).axes[1].patches) == 9
    model = [row for row in synthetic(MODEL) if row.source == "model"]
    assert len(gpt2_table.draw(model).axes[1].patches) == 3 + 2
    assert gpt2_table.draw([]) is None
