"""Tests of the command `compare_speed` that need no GPU."""

import importlib.util
import io
import json
import math
import sys
from types import SimpleNamespace

import compare_speed
import numpy as np
import pytest

import fa_numba
from fa_numba.device import planning_for


class Tree:
    """A stand-in for a tree. `time(number)` returns the next value of the list of this call."""

    def __init__(self, log, name, times):
        self.log, self.name, self.times = log, name, {n: iter(t) for n, t in times.items()}

    def time(self, number):
        self.log.append(self.name)
        return next(self.times[number])


def test_the_ratio_of_two_trees_is_the_median_over_rounds():
    log = []
    other = Tree(log, "other", {3: [9.0, 4.0, 8.0, 6.0], 5: [1.0]})
    this = Tree(log, "this", {3: [1.0, 2.0, 2.0, 2.0], 5: ["ValueError: no such unit"]})
    first, second = compare_speed.compare(other, this, [3, 5], 3)
    assert (first.median, first.ms, first.failure) == (3.0, 2.0, "")
    assert first.p20 == pytest.approx(2.4) and first.p80 == pytest.approx(3.6)
    assert first.call == compare_speed.calls()[3]
    # The first time of each tree does not count. Then the trees take turns at being first.
    assert log[:8] == ["other", "this", "other", "this", "this", "other", "other", "this"]
    assert second.failure == "ValueError: no such unit" and math.isnan(second.median)


def test_a_tree_times_the_calls_that_it_is_asked_for(monkeypatch, capsys):
    every = [
        compare_speed.Call("one", 4, 8, batch=2, heads=4, heads_k=2, options={"causal": True}),
        compare_speed.Call("two", 4, 8, "bwd", 6, options={"deterministic": True, "tiles": 1}),
        compare_speed.Call("bad", 4, 8, options={"unit": "none"}),
    ]
    ran, timed = [], []

    def attention(q, k, v, return_lse=False, **options):
        if options.get("unit"):
            raise ValueError("no such unit")
        ran.append(("fwd", q.shape, k.shape, v.dtype, options))
        return ("O", "L") if return_lse else "O"

    def attention_backward(dout, q, k, v, out, lse, **options):
        ran.append(("bwd", dout.shape, k.shape, (out, lse), options))

    def time_ms(run, repeats, warmup):
        run()
        timed.append((repeats, warmup))
        return [8.0] * (repeats - 1) + [9.0]

    device = SimpleNamespace(to_gpu=lambda array: array, time_ms=time_ms)
    package = SimpleNamespace(
        attention=attention, attention_backward=attention_backward, device=device
    )
    monkeypatch.setitem(sys.modules, "fa_numba", package)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "stdin", io.StringIO("0\n0\n1\n2\n"))
    monkeypatch.setattr(compare_speed, "calls", lambda: every)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)  # without torch
    compare_speed.serve("/some/tree")
    assert sys.path[0] == "/some/tree"
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert found == [8.0, 8.0, 8.0, "ValueError: no such unit"]
    # The time of the first line of a call says how often the call is repeated from then on.
    assert timed == [(2, 1), (5, 5), (2, 1)]
    half = np.dtype("float16")
    assert ran == [
        *[("fwd", (2, 4, 4, 8), (2, 2, 4, 8), half, {"causal": True})] * 2,
        ("fwd", (1, 16, 4, 8), (1, 16, 6, 8), half, {"tiles": 1}),
        ("bwd", (1, 16, 4, 8), (1, 16, 6, 8), ("O", "L"), {"deterministic": True, "tiles": 1}),
    ]


def test_the_pages_say_how_many_calls_are_compared():
    for page in ("CONTRIBUTING.md", "tests/README.md"):
        text = (compare_speed.ROOT / page).read_text()
        assert f"the times of {len(compare_speed.calls())} calls" in text


def test_every_call_can_be_planned_for_hopper():
    """The library accepts every call of the list, on the unit that the call names."""
    units = set()
    with planning_for((9, 0), 227 * 1024):
        for call in compare_speed.calls():
            q = (call.batch, call.heads, call.N, call.d)
            k = (call.batch, call.heads_k, call.Nk or call.N, call.d)
            given = {name: x for name, x in call.options.items() if name != "seed"}
            plan = fa_numba.plan(q, k, passes=call.passes, dtype=call.dtype, **given)
            assert call.options.get("unit", plan.unit) == plan.unit
            units.add((plan.unit, call.passes))
    assert units == {(unit, p) for unit in ("simt", "mma", "wgmma") for p in ("fwd", "bwd")}


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (["nowhere"], "OTHER must be a folder that contains fa_numba, got nowhere"),
        ([".", "--only", "no such call"], "no call's description contains 'no such call'"),
        ([".", "--rounds=0"], "the number of rounds must be at least 1, got 0"),
    ],
)
def test_the_command_refuses_bad_arguments(monkeypatch, capsys, bad, message):
    monkeypatch.chdir(compare_speed.ROOT)
    monkeypatch.setattr(compare_speed, "Tree", None)
    with pytest.raises(SystemExit):
        compare_speed.main(bad)
    assert message in capsys.readouterr().err
