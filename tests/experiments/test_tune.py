"""The sweep over block sizes, the table it leaves, and what plans read of it."""

import csv
import inspect
import itertools
from dataclasses import astuple, replace
from functools import cache
from types import SimpleNamespace

import pytest
from experiment_helpers import no_gpu
from rich.console import Console

import fa_numba
from experiments import __main__ as command
from experiments.lab.measure import timing, tune, variants
from experiments.lab.measure.workloads import fa2_setting, one_head
from experiments.lab.record.options import Bench, Options
from experiments.lab.record.store import Store
from experiments.lab.run import runner
from fa_numba import Tiles, reference
from fa_numba.choices import tuned
from fa_numba.choices.requests import Choices
from fa_numba.host import planning
from fa_numba.tiling import select_mma_spec, select_spec, select_wgmma_spec

LIMIT = 227 * 1024


def clear():
    """Forget what was read and planned."""
    tuned._table.cache_clear()
    planning.planned.cache_clear()


@pytest.fixture
def table(tmp_path, monkeypatch):
    """A function that puts lines into the table that plans read; its path is `table.path`."""
    path = tmp_path / "tuned.csv"

    def write(*lines):
        path.write_text("\n".join([",".join(tuned.COLUMNS), *lines]) + "\n")
        clear()

    write.path = path
    monkeypatch.setattr(tuned, "TABLE", path)
    monkeypatch.setattr(fa_numba.device, "compute_capability", lambda: (9, 0))
    write()
    yield write
    clear()


def chosen(d, Nq=4096, Nk=4096, algorithm="fa2"):
    """What is planned; threads are those of the plan."""
    shapes = (1, 1, Nq, d), (1, 1, Nk, d)
    return fa_numba.plan(*shapes, algorithm=algorithm, dtype="float16").tiles


# --- the table is read ------------------------------------------------------------------------


def test_plans_take_the_tuned_tiles(table):
    rule = {(d, a): chosen(d, algorithm=a) for d in (64, 80, 128) for a in ("fa1", "fa2")}
    table(
        "9.0,mma,fa2,fwd,64,64,32,64,1",
        "8.0,mma,fa2,fwd,128,64,32,64,1",
        "9.0,mma,fa2,bwd,128,64,32,64,1",
        "9.0,simt,fa2,fwd,128,64,32,64,1",
    )
    assert chosen(64) == Tiles(64, 32, 64) != rule[64, "fa2"]
    # 49 to 64 columns are the same fragments.
    assert chosen(49) == Tiles(64, 32, 64)
    # Another head dimension, algorithm, GPU, pass, unit.
    assert chosen(80) == rule[80, "fa2"]
    assert chosen(64, algorithm="fa1") == rule[64, "fa1"]
    assert chosen(128) == rule[128, "fa2"]


def test_plans_fall_back_to_the_rule(table, monkeypatch):
    memory = 2 * (64 + 2 * 256) * 64

    def with_limit(bytes_a_block):
        monkeypatch.setattr(fa_numba.device, "shared_bytes_limit", lambda: bytes_a_block)
        return chosen(64)

    lengths = (16, 63, 64, 200)
    rule = [chosen(64, N, N) for N in lengths]
    small, whole = with_limit(memory - 1), with_limit(LIMIT)
    table("9.0,mma,fa2,fwd,64,64,256,128,1")
    # Blocks larger than the sequences.
    assert [chosen(64, N, N) for N in lengths] == rule
    assert chosen(64, 64, 256) == Tiles(64, 256, 128)
    assert chosen(64, 64, 255) != Tiles(64, 256, 128)
    assert chosen(64, 63, 256) != Tiles(64, 256, 128)
    # Rows that do not start at 16 bytes.
    problem = fa2_setting(256, 64, dtype="float16")
    for aligned in (True, False):
        tiles = planning.plan_of_attention(problem, Choices("fa2"), aligned).tiles
        assert (tiles == Tiles(64, 256, 128)) == aligned
    # Memory that does not hold them.
    assert with_limit(memory) == Tiles(64, 256, 128)
    assert with_limit(memory - 1) == small
    # Registers that do not.
    table("9.0,mma,fa2,fwd,64,64,256,64,1")
    assert with_limit(LIMIT) == whole


def test_a_table_of_other_columns_is_refused(table):
    table.path.write_text("a,b\n")
    with pytest.raises(ValueError, match="tuned.csv must have the columns"):
        chosen(64)


def test_the_tables_own_lines_are_tiles_of_a_gpu():
    with open(tune.TABLE, newline="") as file:
        lines = list(csv.DictReader(file))
    assert len({tuple(line.values())[:5] for line in lines}) == len(lines)
    selects = {"simt": select_spec, "mma": select_mma_spec, "wgmma": select_wgmma_spec}
    for line in lines:
        select = selects[line["unit"]]
        assert line["algorithm"] in ("fa1", "fa2") and line["pass"] in ("fwd", "bwd")
        d = int(line["head_dim"])
        Br, Bc, threads, stages = (int(line[n]) for n in ("Br", "Bc", "threads", "stages"))
        assert d % 16 == 0
        assert stages == 1 or (line["algorithm"], line["pass"]) == ("fa2", "fwd")
        if line["pass"] == "fwd":
            assert select(Tiles(Br, Bc, None, stages), d, LIMIT).threads == threads


# --- the sweep --------------------------------------------------------------------------------


RUNS = {"fwd": Tiles(32, 32, 32), "bwd": Tiles(16, 16, 32)}


@cache
def swept(wrong=(), more=()):
    """What is swept and its rows on the emulator, with made-up times, `more` of (tiles, ms) beside
    them; results of `wrong` tiles are off. Kernels of one size run, the others' results are those
    of the reference.
    """
    kernels = fa_numba.attention, fa_numba.attention_backward
    times = {Tiles(16, 16, 32): 4.0, Tiles(32, 16, 32): 2.0, Tiles(32, 32, 32): 1.0, **dict(more)}

    def attention(q, k, v, *, causal, tiles=None, **how):
        if tiles is None:  # before a backward pass
            return kernels[0](q, k, v, causal=causal, **how)
        if tiles == RUNS["fwd"]:
            found = kernels[0](q, k, v, tiles=tiles, causal=causal, **how)
        else:
            found = reference.attention(q, k, v, causal=causal)
        return (found * (1.1 if tiles in wrong else 1)).astype(q.dtype)

    def attention_backward(*arrays, tiles, causal, **how):
        if tiles == RUNS["bwd"]:
            return kernels[1](*arrays, tiles=tiles, causal=causal, **how)
        return reference.attention_backward(*arrays[:4], causal=causal)

    def time_call(run, check, seconds):
        options = inspect.getclosurevars(run).nonlocals["options"]
        ms = times.get(options["tiles"], 3.0)
        return timing.Timing(ms, ms, ms, 20, check(run()))

    with pytest.MonkeyPatch.context() as patch, fa_numba.device.using("emulator"):
        no_gpu(patch)
        patch.setattr(fa_numba, "attention", attention)
        patch.setattr(fa_numba, "attention_backward", attention_backward)
        patch.setattr(variants, "time_call", time_call)
        patch.setattr(tune, "SEQLENS", {"mma": (32,), "wgmma": (32,)})
        patch.setattr(tune, "THREADS", (32, 64))
        blocks = {("mma", "fwd"): ((16, 32), (16, 32)), ("mma", "bwd"): ((16,), (16,))}
        patch.setattr(tune, "BLOCKS", blocks)
        patch.setattr(tune, "fa2_setting", one_head)
        wanted = tune.candidates((10,))
        rows = list(variants.times(tune.NAME, wanted, Bench(machine="some-gpu"), tune.SECONDS))
    return wanted, rows


def called(work):
    """(series, pass, head dimension, mask, tiles) of each call to be timed."""
    return [
        (v.series, v.passes, p.head_dim, p.causal, v.options["tiles"]) for p, vs in work for v in vs
    ]


def test_the_sweep_times_what_can_be_planned():
    work, rows = swept()
    wanted = called(work)
    assert {d for _, _, d, _, _ in wanted} == {16} and len(set(wanted)) == len(wanted)
    forward = {tiles for *kind, _, _, tiles in wanted if kind == ["fa1-mma", "fwd"]}
    assert forward == {
        *(Tiles(16, 16, 32), Tiles(16, 32, 32)),
        *(Tiles(32, Bc, threads) for Bc in (16, 32) for threads in (32, 64)),
    }
    staged = {tiles for *kind, _, _, tiles in wanted if kind == ["fa2-mma", "fwd"]}
    assert staged == {replace(tiles, stages=n) for tiles in forward for n in (1, 2)}
    timed = {(r.series, r.pass_, r.causal, r.Br, r.Bc, r.place) for r in rows if r.metric == "time"}
    assert timed == {
        (series, pass_, causal, tiles.Br, tiles.Bc, tune.note(tiles))
        for series, pass_, _, causal, tiles in wanted
    }
    assert all(0 < r.value < 1e-3 for r in rows if r.metric == "error")
    found = tune.best(rows)
    assert found["fa1-mma", "fwd", 16][0] == found["fa2-mma", "fwd", 16][0] == Tiles(32, 32, 32)
    speed = {r.causal: r.value for r in rows if r.metric == "speed" and (r.Br, r.Bc) == (32, 32)}
    # 3 ms at 64 threads come after 1 ms at 32: what is fastest counts.
    assert found["fa2-mma", "fwd", 16][1] == pytest.approx(3 * (speed[False] * speed[True]) ** 0.5)


def test_tiles_with_wrong_results_are_out():
    fast = Tiles(32, 32, 32)
    _, rows = swept(wrong=(fast,))
    failed = {r.note for r in rows if r.failed and (r.Br, r.Bc) == (32, 32)}
    assert failed and all("against float64" in note for note in failed)
    assert tune.best(rows)["fa2-mma", "fwd", 16][0] == Tiles(32, 16, 32)
    one_mask = [r for r in rows if r.causal or (r.Br, r.Bc) != (32, 16)]
    assert tune.best(one_mask)["fa2-mma", "fwd", 16][0] not in (fast, Tiles(32, 16, 32))


def test_the_table_is_updated_line_by_line(table):
    table("8.0,mma,fa2,fwd,64,64,64,64,1", "9.0,mma,fa2,fwd,64,64,64,64,1")
    found = {
        ("fa2-mma", "fwd", 128): (Tiles(64, 32, 64, 2), 1.0),
        ("fa2-mma", "fwd", 64): (Tiles(32, 32, 32), 1),
        ("fa2-wgmma", "fwd", 80): (Tiles(192, 96, 512, 2), 1),
    }
    assert tune.update(found, "9.0", table.path)
    assert table.path.read_text().splitlines()[1:] == [
        "8.0,mma,fa2,fwd,64,64,64,64,1",
        "9.0,mma,fa2,fwd,64,32,32,32,1",
        "9.0,mma,fa2,fwd,128,64,32,64,2",
        "9.0,wgmma,fa2,fwd,80,192,96,512,2",
    ]
    assert not tune.update(found, "9.0", table.path)


# --- the command ------------------------------------------------------------------------------


def test_the_command_stores_rows_and_the_table(monkeypatch, tmp_path, table):
    wanted, rows = swept()
    rows = [replace(row, machine="some-gpu") for row in rows]
    monkeypatch.setattr(variants, "times", lambda *_: iter(rows))
    monkeypatch.setattr(runner.device, "gpu_available", lambda: False)
    updated = []
    monkeypatch.setattr(tune, "update", lambda *given: updated.append(given) or True)
    console = Console(record=True, width=120)
    running = runner.Runner(Options(out=tmp_path), ["tune"], console)
    assert running.tune(wanted) == 1
    assert "needs a CUDA GPU" in console.export_text()
    running.machine, running.gpu = "some-gpu", {"compute_capability": "9.0"}
    assert running.tune(wanted) == 0
    assert len(Store(tmp_path).read("tune", "some-gpu")) == len(rows)
    ((found, capability),) = updated
    assert capability == "9.0" and found == tune.best(rows)
    assert "fa2-mma fwd d=16: Br=32, Bc=32, threads=32: " in console.export_text()


def test_the_command_line_of_the_sweep(monkeypatch, capsys):
    calls = []
    stand_in = SimpleNamespace(tune=lambda *given: calls.append(given) or 0)
    monkeypatch.setattr(command, "Runner", lambda *_: stand_in)
    # Those of everything are made once, at one length of each unit: it takes seconds.
    lengths = {unit: several[:1] for unit, several in tune.SEQLENS.items()}
    monkeypatch.setattr(tune, "SEQLENS", lengths)
    of = cache(tune.candidates)

    def candidates(head_dims=tune.HEAD_DIMS, series=tune.SERIES, passes=tune.PASSES):
        return of(*map(tuple, (head_dims, series, passes)))

    monkeypatch.setattr(tune, "candidates", candidates)
    part = ["--head-dims", "64", "--series", "fa2-mma", "--passes", "bwd"]
    assert command.main(["tune"]) == command.main(["tune", *part]) == 0
    (everything,), (some,) = calls
    assert everything == tune.candidates()
    kinds = tune.swept(everything)
    swept = set(itertools.product(tune.SERIES, tune.PASSES, tune.HEAD_DIMS))
    # Hopper's backward kernels have one size of tiles.
    assert kinds == {kind for kind in swept if kind[:2] != ("fa2-wgmma", "bwd")}
    hopper = {astuple(tiles) for name, _, d, _, tiles in called(everything)
              if (name, d) == ("fa2-wgmma", 80)}  # fmt: skip
    assert {(192, 96, 512, 2), (128, 128, 384, 2)} < hopper
    wanted = [call for call in called(everything) if call[:3] == ("fa2-mma", "bwd", 64)]
    assert called(some) == wanted
    for bad in (["--head-dims", "300"], ["--series", "x"], ["--passes", "both"]):
        with pytest.raises(SystemExit):
            command.main(["tune", *bad])
    assert len(calls) == 2
    assert "must be an integer from 1 to 256, got 300" in capsys.readouterr().err


@pytest.mark.gpu
def test_the_sweep_on_a_gpu():
    work = [
        (problem, [v for v in calls if v.options["tiles"] == Tiles(64, 64, 128)])
        for problem, calls in tune.candidates((64,))
    ]
    rows = list(variants.times(tune.NAME, work, Bench(machine="some-gpu"), tune.SECONDS))
    assert rows and not [row.note for row in rows if row.failed]
