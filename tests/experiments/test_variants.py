"""The variants: their times on a GPU, from rows that are made and on the emulator; their words in
torch.
"""

import functools
import itertools
import math
from concurrent.futures import Future

import numpy as np
import pytest
from experiment_helpers import made_up, run_once, time_on_the_emulator

import fa_numba
from experiments import variants
from experiments.beside import variant_times
from experiments.lab.measure import flex, peers
from experiments.lab.record.options import Bench
from experiments.lab.record.store import Row
from fa_numba.problem import Problem

SERIES = (*variant_times.SERIES, peers.FLEX)


@functools.cache
def counted():
    work = [(name, series) for name in ("causal", "softcap") for series in variants.SERIES]
    return tuple(row for item in work for row in variants._counted(*item))


def timed(machine="some-gpu", names=("causal", "softcap")):
    """The nth series takes n ms forward, 2n backward; flex_attention fails at a cap."""
    rows = []
    for name, series, pass_ in itertools.product(names, SERIES, variant_times.PASSES):
        n, of = 1 + SERIES.index(series), ("variants", variant_times.TIMED, series)
        own = {"machine": machine, "pass_": pass_, "note": name}
        numbers = {"time": n * (1 + (pass_ == "bwd")), "compile": n / 4, "visited": 0.25}
        if (name, series) == ("softcap", peers.FLEX):
            rows.append(made_up(*of, None, **own | {"note": f"{name}; failed: no"}))
            del numbers["time"]
        rows += [made_up(*of, x, metric, **own) for metric, x in numbers.items()]
    return [row for row in rows if (row.series, row.metric) != (peers.FLEX, "visited")]


def test_the_figure_and_the_table_take_any_part_of_the_rows():
    figure, table = variants.draw(counted()), variants.table(counted())
    assert "flex" not in figure.get_suptitle() and "Times are not recorded." in table.caption
    assert variant_times.table(counted()) is None
    rows = [*counted(), *timed()]
    figure, table = variants.draw(rows), variants.table(rows)
    assert "time: torch's flex_attention / FA-2, forward, backward\n" in figure.get_suptitle()
    labels = {ax.get_title(): ax.get_xlabel() for ax in figure.axes}
    assert labels["causal"].endswith("\ntime: 1.25, 1.25") and "time" not in labels["softcap"]
    assert "not recorded" not in table.caption
    _, _, *lines = variant_times.table(rows).body.splitlines()
    forward, backward = "1.00 | 2.00 | 3.00 | 4.00", "2.00 | 4.00 | 6.00 | 8.00"
    assert lines == [
        f"| causal | 75% | {forward} | 5.00 | 1.25 | {backward} | 10.00 | 1.25 | 2.0 | 2.5 |",
        f"| softcap | 75% | {forward} | failed | - | {backward} | failed | - | 2.0 | 2.5 |",
    ]
    # Of an older GPU, without torch.
    rows = [row for row in timed() if row.series in ("fa1-mma", "fa2-mma")]
    assert "| causal | 75% | 1.00 | 2.00 | - | 2.00 | 4.00 | - | 0.5 | 1.0 |" in (
        variant_times.table(rows).body
    )
    assert variants.draw(timed()) is None


@pytest.fixture
def on_the_emulator(monkeypatch):
    """The emulator is a GPU without Hopper's unit: every call is checked, the nth takes n ms."""
    time_on_the_emulator(monkeypatch, variant_times)
    for name, N in (("CHECKED", 16), ("TIMED", 144)):
        monkeypatch.setattr(variant_times, name, Problem(1, 2, 2, N, N, 16, dtype="float16"))
    monkeypatch.setattr(variant_times, "SERIES", ("fa1-mma", "fa2-mma"))
    compiled = [row for row in timed("gpu") if row.metric == "compile"]
    monkeypatch.setattr(variant_times, "_compiled", lambda *_: compiled)


def measured(names, bench=None):
    found = []
    bench = bench or Bench(machine="gpu")
    for each in variant_times.measure({n: variants.VARIANTS[n] for n in names}, bench):
        found += [each] if isinstance(each, Row) else each
    return found


def test_variants_are_checked_and_timed(on_the_emulator, monkeypatch):
    rows = [row for row in measured(["documents", "t5 buckets"]) if row.metric != "compile"]
    assert [row.note for row in rows] == ["documents"] * 8 + ["t5 buckets"] * 8
    assert [row.value for row in rows if row.metric == "time"] == [*range(1, 9)]
    shares = [row.value for row in rows if row.metric == "visited"]
    assert all(0 < x < 1 for x in shares[:4]) and shares[4:] == [1.0] * 4
    # One that is wrong, at either length, is not timed.
    run_once(monkeypatch)
    right = fa_numba.attention

    def wrong(q, *arrays, **options):
        out = right(q, *arrays, **options)
        if options["algorithm"] == "fa1" and q.shape[2] == wrong.rows:
            return out + np.float16(0.1)
        return out

    monkeypatch.setattr(fa_numba, "attention", wrong)
    for wrong.rows, why in ((16, "against float64"), (144, "from that of the first series")):
        rows = [row for row in measured(["softcap"]) if row.metric == "time"]
        failed = [row for row in rows if row.failed]
        of = "fa1-mma" if wrong.rows == 16 else "fa2-mma"
        assert [(row.series, row.pass_) for row in failed] == [(of, "fwd")]
        assert failed[0].note.startswith("softcap; failed: ") and why in failed[0].note


class AtOnce:
    """Processes that are none: what is submitted runs at once."""

    def __init__(self, *_):
        self.shutdown = lambda **_: None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def submit(self, work, *args):
        done = Future()
        try:
            done.set_result(work(*args))
        except ValueError as error:
            done.set_exception(error)
        return done


def test_what_compiling_took(monkeypatch):
    """Not of what was on disk; what cannot be compiled is a row."""
    monkeypatch.setattr(variant_times, "ProcessPoolExecutor", AtOnce)
    monkeypatch.setattr(peers, "available", lambda: True)

    def compile_flex(make, pass_):
        raise ValueError(pass_)

    def compile_ours(make, series, pass_):
        assert make is variants.causal
        return {"fwd": 2.5, "bwd": math.nan}[pass_]

    monkeypatch.setattr(variant_times, "compile_flex", compile_flex)
    monkeypatch.setattr(variant_times, "compile_ours", compile_ours)
    rows = variant_times._compiled({"causal": variants.causal}, ["fa2-mma"], Bench(), "gpu")
    found = [(row.series, row.pass_, row.value, row.note) for row in rows]
    failed = [(peers.FLEX, p, None, f"causal; failed: ValueError: {p}") for p in ("bwd", "fwd")]
    assert found == [*failed, ("fa2-mma", "fwd", 2.5, "causal")]
    assert {(row.metric, row.unit, row.source) for row in rows} == {("compile", "s", "measured")}


def test_what_flex_attention_cannot_run_is_a_row(on_the_emulator, monkeypatch):
    monkeypatch.setattr(peers, "available", lambda: True)
    monkeypatch.setattr(peers, "release", lambda: None)
    rows = [
        row for row in measured(["causal"]) if row.series == peers.FLEX and row.metric == "time"
    ]
    assert [(row.pass_, row.value) for row in rows] == [("fwd", None), ("bwd", None)]
    assert all(row.note.startswith("causal; failed: ") for row in rows)


def test_torch_has_every_variant():
    """And says the same of every place, in its own words."""
    torch = pytest.importorskip("torch")
    N, H = 64, 2
    at = np.ix_(range(2), range(H), range(N), range(N))
    places = [torch.as_tensor(x) for x in at]
    S = np.random.default_rng(0).standard_normal((2, H, N, N)).astype(np.float32)
    for name, make in variants.VARIANTS.items():
        ((option, function),) = make(N, H).items()
        first = [S] if option == "score_mod" else []
        want = np.vectorize(function)(*first, *at)
        theirs = variant_times.flex_given(make, N, H, "cpu")[option]
        got = theirs(*map(torch.as_tensor, first), *places).expand(2, H, N, N).numpy()
        assert got.dtype == (np.float32 if first else bool), name
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("window", [(3, None), (None, 2), (3, 2), (0, 0), None])
def test_flex_attention_hides_what_a_window_hides(window):
    problem = Problem.from_shapes((1, 1, 9, 16), (1, 1, 12, 16), window=window)
    visible, (i, j) = flex._mask_mod(problem), np.indices((9, 12))
    if window is None:
        assert visible is None
    else:
        left, right = (100 if side is None else side for side in window)
        want = (j >= i + 3 - left) & (j <= i + 3 + right)
        np.testing.assert_array_equal(visible(0, 0, i, j), want)


def test_functions_of_torch_go_to_flex_attention(monkeypatch):
    torch = pytest.importorskip("torch")
    attention = pytest.importorskip("torch.nn.attention.flex_attention")
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    made = attention.create_block_mask
    monkeypatch.setattr(
        attention, "create_block_mask", lambda *args, device: made(*args, device="cpu")
    )
    problem = Problem(1, 2, 2, 144, 144, 16)
    q, k, v = (torch.randn(problem.q_shape) for _ in range(3))
    for name in ("sliding window", "alibi"):
        make = variants.VARIANTS[name]
        ours = make(problem.seqlen_q, problem.heads_q)
        theirs = variant_times.flex_given(make, problem.seqlen_q, problem.heads_q, "cpu")
        found = flex.call(problem, q, k, v, **theirs)()
        want = fa_numba.reference.attention(q.numpy(), k.numpy(), v.numpy(), **ours)
        np.testing.assert_allclose(found.numpy(), want, atol=1e-5)
