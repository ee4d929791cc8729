"""Shapes beyond the papers': what is measured, how it is checked, drawn and tabulated."""

from dataclasses import replace

import numpy as np
import pytest
from experiment_helpers import made_up, run_once

from experiments import shapes
from experiments.lab.measure import check, peers, timing
from experiments.lab.measure.series import LABELS, plan
from experiments.lab.measure.workloads import Inputs
from experiments.lab.record.options import Bench, Options
from fa_numba import bounds, reference
from fa_numba.problem import Problem

# Torch's times over ours.
RATIOS = {peers.FLASH: 1.5, peers.CUDNN: 0.95, peers.FLEX: 1.2, shapes.MMA: 2.0}
RATIOS[peers.UNFUSED] = 1.2


def synthetic(missing=(), slow=()):
    """Ours take a millisecond; at the points in `slow` twice as much."""
    rows = []
    for point in shapes.points(Options()):
        peer = shapes.KINDS[point.kind].peer
        theirs = (peers.FLASH, peers.CUDNN) if peer == peers.FLASH else (peer,)
        for pass_ in point.passes:
            for series in (shapes.AUTO, shapes.MMA, *theirs):
                if series in missing:
                    continue
                ms = RATIOS.get(series, 2.0 if point.place in slow else 1.0)
                own = {"pass_": pass_, "note": f"{point.place}; wgmma", "n": 10}
                rows.append(made_up("shapes", point.problem, series, ms, **own))
    return rows


def cells(table):
    header, _, *lines = table.body.splitlines()
    names = [cell.strip() for cell in header.strip("|").split("|")]
    for line in lines:
        yield dict(zip(names, (c.strip() for c in line.strip("|").split("|")), strict=True))


def test_every_class_has_its_points_and_can_be_planned():
    every = shapes.points(Options())
    assert len({(p.place, p.problem) for p in every}) == len(every)
    assert {p.kind for p in every} == set(shapes.KINDS)
    assert {p.kind for p in shapes.points(Options(quick=True))} == set(shapes.KINDS)
    problems = {kind: [p.problem for p in every if p.kind == kind] for kind in shapes.KINDS}
    assert {p.group for p in problems["shared"]} == {2, 4, 8}
    assert {p.head_dim for p in problems["dims"]} == {32, 40, 80, 96, 112, 160, 192, 256}
    signs = {np.sign(p.diagonal) for p in problems["lengths"]}
    assert signs == {-1, 0, 1} and min(p.seqlen_k for p in problems["lengths"]) < 128
    assert {p.left for p in problems["options"]} == {None, 128, 512, 1024, 4096}
    assert sum(shapes.SKEWED) == 16384
    assert all(p.batch * p.heads_q < 132 for p in problems["few"])
    assert {p.seqlen_q for p in problems["short"]} == {64, 128, 256, 512}
    assert {(p.head_dim, p.causal) for p in problems["short"]} == {
        (d, causal) for d in (64, 128) for causal in (False, True)
    }
    with bounds.DEVICES["H200"].planning():
        for point in every:
            for pass_ in point.passes:
                for series in shapes.at(point, pass_):
                    if not shapes.calls.theirs(series):
                        plan(series, point.problem, **shapes.plan_options(pass_, point))
        splits = [
            plan(shapes.AUTO, p.problem, **shapes.plan_options("fwd", p)).kv_splits
            for p in every
            if p.kind == "few"
        ]
    assert max(splits) > 3


def test_the_table_has_the_median_and_the_worst():
    lines = list(cells(shapes.table(synthetic())))
    assert len(lines) == 16
    others = {"options": "torch's flex_attention", "dropout and padding": LABELS[peers.UNFUSED]}
    for line in lines:
        other = line["class"] in others
        assert line["compared with"] == others.get(line["class"], "torch's FlashAttention-2")
        compared = line["time of the compared kernel / our time: median; worst"]
        assert compared == ("1.20; 1.20" if other else "1.50; 1.50")
        assert line["our time on mma / our time: median; worst"] == "2.00; 2.00"
        assert line["cuDNN's time / our time: median; worst"] == ("-" if other else "0.95; 0.95")
    assert {line["class"] for line in lines} == {kind.title for kind in shapes.KINDS.values()}


def test_the_figure_has_a_line_a_class_and_pass():
    figure = shapes.draw(synthetic())
    message = figure.legends[0].get_title().get_text().splitlines()[0]
    (ax,) = figure.axes
    assert message == shapes._message(shapes.ratios(synthetic()))
    medians = {("dims", "fwd"): 1.5, ("lengths", "bwd"): 2.0, ("dropout", "fwd"): 0.5}
    found = {at: {peers.FLASH: {1: x}} for at, x in medians.items()}
    assert shapes._message(found) == (
        "torch's FlashAttention-2 takes at least 0.5 times our time (medians)"
    )
    labels = [text.get_text() for text in ax.get_yticklabels()]
    assert len(labels) == 16 and labels[0] == "shared K/V heads, forward"
    dots = [line for line in ax.lines if line.get_linestyle() == "None"]
    assert len(dots) == 28  # two peers, but for options and for padding one
    low, high = ax.get_xlim()
    for line in dots:
        assert all(low < x < high for x in line.get_xdata())


# --- the checks -------------------------------------------------------------------------------

SMALL = [
    Problem(1, 4, 2, 70, 70, 16, dtype="float16", causal=True),
    Problem(2, 2, 2, 40, 90, 16, dtype="float16"),
    Problem(1, 2, 2, 90, 70, 16, dtype="float16", window=(9, 0)),
    Problem(1, 2, 1, 64, 64, 16, dtype="float16", causal=True, softcap=5.0),
    Problem(1, 2, 2, 50, 80, 16, dtype="float16", causal=True, alibi=True),
    Problem(1, 2, 2, 65, 80, 16, dtype="float16", bias=(1, 2, 65, 80)),
    Problem(
        3, 2, 1, 60, 60, 16, dtype="float16", causal=True, packed=True,
        q_lens=(60, 3, 40), kv_lens=(60, 3, 40),
    ),
]  # fmt: skip


def ids(problem):
    return ", ".join(problem.options) or "plain"


@pytest.mark.parametrize("problem", SMALL, ids=ids)
def test_rows_of_a_result_with_options_are_checked(problem):
    arrays = Inputs()(problem)
    options = {"causal": problem.causal, **shapes.call_options(problem)}
    right = reference.attention(*arrays, **options)
    gate = check.gate(problem, "fwd", *arrays, **shapes.call_options(problem))
    assert gate(right.astype(np.float16)) < 1e-3
    wrong = right.copy()
    wrong[..., -1] *= 1.1
    for held in (gate, gate.peer):
        with pytest.raises(check.WrongResult, match="O: the error"):
            held(wrong)


@pytest.mark.parametrize("problem", SMALL, ids=ids)
def test_gradients_are_checked_on_a_shorter_problem(problem):
    arrays = Inputs(gradient=True)(problem)
    options = {"causal": problem.causal, **shapes.call_options(problem)}
    right = reference.attention_backward(arrays[3], *arrays[:3], **options)[:3]
    gate = check.gate(problem, "bwd", *arrays, **shapes.call_options(problem))
    assert gate([x.astype(np.float16) for x in right]) < 2e-3
    for n, name in enumerate(("dq", "dk", "dv")):
        wrong = [x * (1.1 if at == n else 1) for at, x in enumerate(right)]
        with pytest.raises(check.WrongResult, match=f"{name}: the error"):
            gate(wrong)


def test_a_shorter_problem_leaves_the_same_remainders():
    for point in shapes.points(Options()):
        if "bwd" not in point.passes:
            continue
        small = shapes.shorter(point.problem)
        assert max(small.seqlen_q, small.seqlen_k) <= shapes.LONGEST
        assert (small.group, small.head_dim) == (point.problem.group, point.problem.head_dim)
        if small.packed:
            assert small.q_lens == small.kv_lens == (250, 129, 128, 64, 33, 5)
            continue
        for name in ("seqlen_q", "seqlen_k"):
            long, short = getattr(point.problem, name), getattr(small, name)
            assert long == short or (long - short) % (shapes.LONGEST // 2) == 0
        assert (small.heads_k, small.batch) == (1, 1)


def test_a_run_of_small_points_on_the_emulator(monkeypatch):
    """Ours alone: what is planned is what is checked and called, wrong results are not timed."""
    found = [shapes.Point("shared", "two", SMALL[0]), shapes.Point("options", "cap", SMALL[3])]
    found += [shapes.Point("options", "bias", SMALL[5], ("fwd",))]
    found += [shapes.Point("options", "packed", SMALL[6], ("bwd",))]
    long = Problem(1, 1, 1, 144, 144, 16, dtype="float16")
    found += [shapes.Point("dropout", "p", long), shapes.Point("padded", "p", long)]
    monkeypatch.setattr(shapes, "points", lambda options: found)
    monkeypatch.setattr(shapes.device, "release_memory", lambda: None)
    to_gpu = {"on_device": lambda arrays, dtype="float32": tuple(x.astype(dtype) for x in arrays)}
    for name, value in to_gpu.items():
        monkeypatch.setattr(peers, name, value)

    def timed(run, check, repeats, seconds):
        error = check(run())
        return timing.Timing(1.0, 1.0, 1.0, repeats, error)

    monkeypatch.setattr(shapes, "time_call", timed)
    monkeypatch.setattr(shapes, "shuffled", lambda items, key: items)
    run_once(monkeypatch)
    rows = list(shapes.measure(Options(), Bench(machine="some-gpu")))
    assert [(row.series, row.pass_) for row in rows] == [
        *((shapes.AUTO, pass_) for _ in range(2) for pass_ in ("fwd", "bwd")),
        (shapes.AUTO, "fwd"),
        (shapes.AUTO, "bwd"),
        *((shapes.AUTO, pass_) for _ in range(2) for pass_ in ("fwd", "bwd")),
    ]
    assert [row.note for row in rows if row.failed] == []
    assert {row.note for row in rows} == {f"{p.place}; mma" for p in found}
    monkeypatch.setattr(check, "ROUNDING", {"float16": -1.0})
    monkeypatch.setattr(check, "DEVIATION_BOUND", -1.0)
    wrong = list(shapes.measure(Options(), Bench(machine="some-gpu")))
    assert all(row.failed and "float64" in row.note for row in wrong)
    assert len(wrong) == len(rows)


def test_flash_attn_4_has_a_column_and_marks_where_it_was_measured():
    rows = synthetic()
    fa4 = [replace(r, series=peers.FA4, value=0.8) for r in rows if r.series == peers.CUDNN]
    (first, *_), (without, *_) = cells(shapes.table([*rows, *fa4])), cells(shapes.table(rows))
    name = "FlashAttention-4's time / our time: median; worst"
    assert first.pop(name) == "0.80; 0.80" and first == without
    label = shapes.draw([*rows, *fa4]).axes[0].get_xlabel()
    assert label.startswith("another kernel's time / our time")
