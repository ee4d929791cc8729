"""Calls of a problem are timed in a random order; rows come in the order of the calls."""

import pytest

from experiments.lab.measure import peers, timing, variants
from experiments.lab.measure.variants import Variant
from experiments.lab.measure.workloads import one_head
from experiments.lab.record.options import Bench
from experiments.lab.record.store import Row
from fa_numba import device

PROBLEM = one_head(64, 16)
SERIES = [f"fa{n}-{unit}" for n in (1, 2) for unit in ("simt", "mma", "wgmma")]


@pytest.fixture
def timed(monkeypatch):
    """The calls that were timed, in their order."""
    seen = []

    def time(experiment, variant, problem, arrays, checks, machine, seconds, memory):
        seen.append((variant.series, variant.passes, variant.note))
        common = variants.columns(experiment, variant.series, problem, machine)
        yield Row(metric="time", unit="ms", value=float(len(seen)), note=variant.note,
                  **common | {"pass_": variant.passes})  # fmt: skip

    monkeypatch.setattr(variants, "_timed", time)
    monkeypatch.setattr(peers, "on_device", lambda arrays, dtype: arrays)
    monkeypatch.setattr(device, "release_memory", lambda: None)
    return seen


def test_the_order_is_random_and_the_same_again(timed):
    work = [(PROBLEM, [Variant(s, passes=p) for p in ("fwd", "bwd") for s in SERIES])]
    found = [list(variants.times("some", work, Bench(machine="gpu"))) for _ in range(2)]
    first, again = timed[:12], timed[12:]
    assert first == again and sorted(first) == sorted(
        (s, p, "") for p in ("fwd", "bwd") for s in SERIES
    )
    asked = [(s, p) for p in ("fwd", "bwd") for s in SERIES]
    assert [at[:2] for at in first] != asked
    assert [(row.series, row.pass_) for row in found[0]] == asked
    values = {(row.series, row.pass_): row.value for row in found[0]}
    assert all(values[series, pass_] == 1 + n for n, (series, pass_, _) in enumerate(first))


def test_a_copy_is_of_the_call_before_it_with_the_same_pass(timed):
    calls = [
        *(Variant("a-mma", passes=p, note=n) for p, n in (("fwd", "small"), ("fwd", "large"))),
        Variant("b-mma", same_as="a-mma", note="copy"),
        Variant("a-mma", passes="bwd"),
        Variant("b-mma", same_as="a-mma", passes="bwd", note="copy"),
    ]
    _, large, copy, back, copied = variants.times("some", [(PROBLEM, calls)], Bench(machine="gpu"))
    assert (copy.series, copy.value, copy.pass_) == ("b-mma", large.value, "fwd")
    assert (copied.value, copied.pass_) == (back.value, "bwd") and len(timed) == 3


def test_another_problem_has_another_order():
    orders = {tuple(timing.shuffled(SERIES, key)) for key in range(5)}
    assert len(orders) > 1 and all(sorted(order) == sorted(SERIES) for order in orders)


@pytest.mark.parametrize("series", [peers.FLASH, peers.PALLAS])
def test_no_memory_of_calls_whose_allocator_is_not_torchs(monkeypatch, series):
    monkeypatch.setattr(variants, "time_call", lambda *a, **k: timing.Timing(1.0, 1.0, 1.0, 1))
    monkeypatch.setattr(variants, "_run", lambda *a: None)
    monkeypatch.setattr(peers, "peak_bytes", lambda run: 2**20)
    checks = lambda *a: None  # noqa: E731
    given = ("some", Variant(series, passes="fwd"), PROBLEM, (), checks, "gpu", None, True)
    found = {row.metric: row.value for row in variants._timed(*given)}
    assert found.pop("memory", None) == (1.0 if series == peers.FLASH else None)
    assert set(found) == {"time", "speed"}
