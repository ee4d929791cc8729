"""The LRU model of L2: its accesses, a hand-made case, rows, table and figure."""

import functools
from collections import OrderedDict
from dataclasses import replace
from types import SimpleNamespace

import pytest
from experiment_helpers import flat, recorded

from experiments import cache
from experiments.beside import lru
from experiments.lab.record.options import Bench, Options
from experiments.lab.record.store import MODEL
from experiments.lab.show import report
from fa_numba import io_model
from fa_numba.problem import Problem

TILES = SimpleNamespace(Br=32, Bc=48)
ONE = lru.Device("one", 0, 1)
ENDLESS = 2**40


@functools.cache
def synthetic():
    return flat(cache.measure(Options(quick=True), Bench(say=lambda text: None)))


def model(algorithm, problem, capacity, places=3, **options):
    device = lru.Device("some", capacity, places)
    return lru.dram_bytes(algorithm, problem, TILES, lru.THREADS_AT_ONCE, device, **options)


@pytest.mark.in_turn("dtype")
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(100, 100), (96, 200), (200, 96), (31, 47)])
@pytest.mark.parametrize("algorithm, splits", [("fa1", 1), ("fa1", 2), ("fa1", 5), ("fa2", 1)])
def test_without_a_cache_it_is_the_closed_form(algorithm, splits, lengths, causal, dtype):
    """Every access is made, whatever runs side by side, also with heads that share K and V."""
    Nq, Nk = lengths
    problem = Problem(2, 4, 2, Nq, Nk, 16, dtype=dtype, causal=causal)
    own = {"query_splits": splits} if algorithm == "fa1" else {}
    form = io_model.fa1 if algorithm == "fa1" else io_model.fa2
    want = form(problem, TILES, **own).bytes
    assert {model(algorithm, problem, 0, places, **own) for places in (1, 3, 50)} == {want}


@pytest.mark.parametrize("algorithm", ["fa1", "fa2"])
def test_an_endless_cache_reads_everything_once_and_writes_nothing(algorithm):
    problem = Problem(1, 2, 2, 100, 100, 16)
    assert model(algorithm, problem, ENDLESS) == 3 * 2 * 100 * 16 * 4


def test_a_larger_cache_never_moves_more():
    problem = Problem(1, 3, 3, 256, 256, 16)
    for algorithm in ("fa1", "fa2"):
        moved = [model(algorithm, problem, size) for size in range(0, 200_000, 10_000)]
        assert moved == sorted(moved, reverse=True) and moved[0] > moved[-1]


@pytest.mark.parametrize("capacity", [0, 5000, 20_000, 40_000, 90_000])
def test_it_is_a_cache_written_another_way(capacity):
    """FA-1 in float32, one block at a time, by a dictionary that remembers the order of use."""
    N, d, Br, Bc = 200, 16, TILES.Br, TILES.Bc
    held, moved = OrderedDict(), [0]

    def touch(name, size, loads, stores):
        if name in held:
            dirty = held.pop(name)[1] or stores
        else:
            moved[0] += size * loads
            dirty = stores
            if size > capacity:
                moved[0] += size * stores
                return
            while sum(n for n, _ in held.values()) + size > capacity:
                _, (old, written) = held.popitem(last=False)
                moved[0] += old * written
        held[name] = size, dirty

    for head in range(2):
        for j, j0 in enumerate(range(0, N, Bc)):
            touch(("KV", head, j), 8 * d * min(Bc, N - j0), True, False)
            for i, i0 in enumerate(range(0, N, Br)):
                rows = min(Br, N - i0)
                touch(("Q", head, i), 4 * d * rows, True, False)
                touch(("lm", head, i), 8 * rows, j > 0, True)
                touch(("O", head, i), 4 * d * rows, j > 0, True)
    assert model("fa1", Problem(1, 2, 2, N, N, d), capacity, places=1) == moved[0]


def test_what_runs_side_by_side_shares_the_cache():
    """K and V of a head are read once where its row tiles run together, else again and again."""
    problem = Problem(1, 1, 1, 320, 320, 16)
    K_and_V = 2 * 320 * 16 * 4
    small = 3 * 48 * 2 * 16 * 4
    together, apart = (model("fa2", problem, small, places) for places in (10, 1))
    assert apart - together > 5 * K_and_V


def test_another_algorithm_is_refused():
    with pytest.raises(ValueError, match="algorithm must be 'fa1' or 'fa2', got 'standard'"):
        lru.dram_bytes("standard", Problem(1, 1, 1, 8, 8, 8), TILES, 256, ONE)


# --- the experiment --------------------------------------------------------------------------


def test_rows_are_of_the_calls_that_were_measured():
    """Block sizes and splits are those of the recorded calls, so that the two can be compared."""
    rows = synthetic()
    assert {row.machine for row in rows} == {MODEL}
    found, known = cache.predicted(rows), cache.measured(cache.recorded())
    swept = {at: places for at, places in found.items() if "0 MiB" in places}
    assert len(found) == 16 and len(swept) == 4
    for at, places in swept.items():
        assert places["no L2"] == places["0 MiB"] > places["8 MiB"]
        assert places["56 MiB"] >= places["H200"] >= places["80 MiB"]
        assert at[0] in sum(cache.SERIES.values(), ())
    assert len(found.keys() & known.keys()) > 4


def test_the_size_that_fits_lies_between_two():
    sizes = {0: 100.0, 16: 90.0, 32: 40.0, 64: 10.0}
    assert cache.fitting_size(sizes, 60.0) == (16, 32)
    assert cache.fitting_size(sizes, 40.0) == (16, 32)
    assert cache.fitting_size(sizes, 5.0) is None and cache.fitting_size(sizes, 200.0) is None


def test_the_table(tmp_path):
    rows = [row for row in synthetic() if (row.seqlen_q, row.head_dim) == (512, 64)]
    store = recorded(tmp_path, cache.NAME, rows)
    assert "No call with the tiles of the L2 model was measured." in report.text(cache.NAME, store)
    fields = {"experiment": "io_vs_seqlen", "source": "dram", "metric": "traffic", "note": ""}
    recorded(tmp_path, "io_vs_seqlen", [
        replace(row, machine=report.MACHINE, value=(2 - n) * row.value, **fields)
        for n, row in enumerate(r for r in rows if r.place == "H200" and r.dtype == "float32")
    ])  # fmt: skip
    text = report.text(cache.NAME, store)
    said = "For 1 of 2 measured calls, the DRAM bytes of the L2 model differ from the measured "
    assert f"{said}DRAM bytes by at most 5%." in text
    said = "For FA-1 (K/V outer), fp32, d=64 and N=512, the L2 model's DRAM bytes are 50% below "
    assert f"{said}the measured DRAM bytes. If the L2 model had " in text
    (line,) = [line for line in text.splitlines() if "| 512 | FA-2" in line]
    assert "| +0.0 % |" in line


def test_the_figure():
    rows = synthetic()
    figure = cache.draw(rows)
    assert len(figure.axes) == 4 and all(ax.lines for ax in figure.axes)
    # A model of no error: all calls that were measured are near.
    found, known = cache.predicted(rows), cache.measured(cache.recorded())
    number = len(found.keys() & known.keys())
    right = {at: places | {"H200": known.get(at, 0)} for at, places in found.items()}
    off = right | {min(known.keys() & found.keys()): {"H200": 1.0}}
    for places, near in ((right, number), (off, number - 1)):
        said = f"An LRU model predicts {near} of {number} DRAM counts within 5%"
        assert cache._message(places, known) == said
    assert cache.draw([]) is None
