"""python -m experiments compare: both orders at one size, counted, modelled and measured."""

import json
from dataclasses import replace

import numpy as np
import pytest

import fa_numba
from experiments import __main__ as command
from experiments.beside import compare
from experiments.lab.measure.timing import Timing
from experiments.lab.record.store import EMULATOR
from fa_numba import Tiles, bounds, io_model
from fa_numba.bounds import DEVICES
from fa_numba.problem import Problem

H200 = DEVICES["H200"]
WIDTH = 100


def setting(pass_="fwd", tiles=None, batch=1, heads=2, N=64, Nk=None, d=16, **options):
    sizes = {"seqlen_q": N, "seqlen_k": Nk or N, "head_dim": d}
    return compare.Setting(Problem(batch, heads, heads, **sizes, **options), pass_, tiles)


def rows_of(asked, machine=None, gpu=H200):
    found, refused = compare.sides(asked, gpu)
    return found, refused, list(compare.measure(asked, found, gpu, machine))


def text_of(asked, machine=None, gpu=H200):
    found, refused, rows = rows_of(asked, machine, gpu)
    return "\n".join(compare.text(asked, found, refused, rows, gpu, machine))


@pytest.fixture
def with_a_gpu(monkeypatch):
    """Calls on a GPU that is not there: what was run, and times that are made up."""
    ran = []
    times = {"fa1-mma": 4.0, "fa1-mma-splits": 3.0, "fa2-mma": 2.0, "standard-mma": None}

    class Checks:
        def __init__(self, inputs):
            pass

        def __call__(self, series, pass_, problem):
            return lambda result: 1e-3

    def make(series, pass_, problem, arrays, **options):
        def run(out=None):
            ran.append((series, options))
            return times[series]

        return run

    def time_call(run, check, seconds):
        ms = run()
        if ms is None:
            raise MemoryError
        return Timing(ms, 0.9 * ms, 1.1 * ms, 7, check(None))

    monkeypatch.setattr(compare.calls, "Checks", Checks)
    monkeypatch.setattr(compare.calls, "make", make)
    monkeypatch.setattr(compare, "time_call", time_call)
    monkeypatch.setattr(compare.device, "release_memory", lambda: None)
    monkeypatch.setattr(compare.peers, "on_device", lambda host, dtype: host)
    return ran


# --- what is compared ------------------------------------------------------------------------


def test_the_sides_are_both_orders_and_standard():
    found, refused = compare.sides(setting(dtype="float16", N=1024, heads=4), H200)
    names = ["fa1-mma", "fa1-mma-splits", "fa2-mma", "standard-mma"]
    assert [side.series for side in found] == names
    assert refused == {} and found[1].options == {"query_splits": 8}
    assert [side.planned.kernels[0].grid[0] for side in found[:2]] == [1, 8]
    found, _ = compare.sides(setting(N=1024, heads=600), H200)
    assert [side.series for side in found] == ["fa1-simt", "fa2-simt", "standard-simt"]


def test_tiles_are_those_of_both_orders():
    found, _ = compare.sides(setting(tiles=Tiles(32, 64), dtype="float16"), H200)
    sizes = {s.series: (s.planned.tiles.Br, s.planned.tiles.Bc) for s in found}
    assert sizes["fa1-mma"] == sizes["fa2-mma"] == (32, 64)
    assert sizes["standard-mma"] != (32, 64)


def test_what_cannot_be_planned_is_said():
    asked = setting(tiles=Tiles(4, 8), dtype="float16")
    found, refused = compare.sides(asked, H200)
    assert [side.series for side in found] == ["standard-mma"]
    assert "allowed are multiples of 16" in refused["fa1-mma"]


def test_fp32_has_splits_in_the_backward_pass_too():
    found, refused = compare.sides(setting("bwd", N=1024), H200)
    names = ["fa1-simt", "fa1-simt-splits", "fa2-simt", "standard-simt"]
    assert [side.series for side in found] == names and refused == {}


# --- counted and modelled --------------------------------------------------------------------


@pytest.mark.in_turn("dtype")
@pytest.mark.parametrize("pass_", ["fwd", "bwd"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("causal", [False, True])
def test_the_model_is_what_is_counted(pass_, dtype, causal):
    asked = setting(pass_, batch=2, heads=3, N=70, Nk=90, dtype=dtype, causal=causal)
    found, _, rows = rows_of(asked)
    equal, all_ = compare.equal_counts(rows)
    assert equal == all_ > 15
    for side in found:
        counted = [r for r in rows if (r.series, r.machine) == (side.series, EMULATOR)]
        accesses = side.planned.accesses
        assert sum(r.value for r in counted if r.metric == "loads") == accesses.total_loads
        traffic = [r.value for r in rows if (r.series, r.metric) == (side.series, "traffic")]
        assert sum(traffic) == accesses.bytes
        assert len(traffic) == len(compare.GROUPS)


def test_bfloat16_is_counted_in_float16_and_said_so():
    text = text_of(setting(dtype="bfloat16"))
    assert "counted: one head on the emulator, times 2, in float16: NumPy has no" in text
    assert "NumPy" not in text_of(setting(dtype="float16"))


def test_every_array_has_its_group():
    known = [name for names in compare.GROUPS.values() for name in names]
    assert len(known) == len(set(known))
    shape = (1, 1, 64, 16)
    for passes in ("fwd", "bwd"):
        for algorithm in io_model.ALGORITHMS:
            for dtype in ("float32", "float16"):
                plan = fa_numba.plan(shape, shape, algorithm=algorithm, passes=passes, dtype=dtype)
                assert {*plan.accesses.loads, *plan.accesses.stores} <= set(known)


def test_what_is_too_large_is_not_counted(monkeypatch):
    asked = setting(N=2048, dtype="float16")
    monkeypatch.setattr(compare, "_run_once", lambda *_: pytest.fail("counted"))
    _, _, rows = rows_of(asked)
    assert {row.source for row in rows} == {"model"}
    text = text_of(asked)
    assert "Not counted: one head would take the emulator minutes." in text
    assert " counted\n" not in text
    assert compare.why_not_counted(setting(N=1024, d=256))
    assert not compare.why_not_counted(setting(N=1024, d=64))
    assert compare.why_not_counted(setting("bwd", N=1024, d=64))


def test_numbers_are_the_models():
    asked = setting(N=100, dtype="float16")
    found, _, rows = rows_of(asked)

    def get(series, *of):
        return compare._of(rows, *of)(series)

    for side in found:
        plan, expected = side.planned, bounds.expected(side.planned, H200)
        assert get(side.series, "model", "work", "useful") == plan.flops
        assert get(side.series, "model", "work", "computed") == expected.flops
        assert get(side.series, "model", "memory") == plan.workspace_bytes / 2**20
        assert get(side.series, "model", "time") == 1e3 * expected.floor
        assert get(side.series, "model", "dram") == expected.dram.bytes
    assert get("fa2-mma", "measured", "time") is None


def test_without_a_gpu_the_text_says_so(monkeypatch):
    monkeypatch.setattr(compare.device, "why_no_gpu", lambda: "no GPU was found")
    text = text_of(setting(N=64, dtype="float16"))
    assert "time: not measured, no GPU was found." in text
    assert "counted: one head on the emulator, times 2." in text
    (line,) = [line for line in text.splitlines() if line.startswith("time, at least")]
    assert line.endswith("data sheet")
    assert not [line for line in text.splitlines() if line.endswith("measured")]


# --- measured --------------------------------------------------------------------------------


def test_times_are_measured_where_a_gpu_is(with_a_gpu):
    asked = setting(N=2048, d=64, heads=4, dtype="float16")
    found, refused, rows = rows_of(asked, "some-gpu")
    assert [series for series, _ in with_a_gpu] == [side.series for side in found]
    assert dict(with_a_gpu)["fa1-mma-splits"] == {"query_splits": 16}
    measured = [row for row in rows if row.source == "measured"]
    assert {row.machine for row in measured} == {"some-gpu"}
    (time,) = [r for r in measured if (r.series, r.metric) == ("fa2-mma", "time")]
    assert (time.value, time.p20, time.p80, time.n) == (2.0, 1.8, 2.2, 7)
    lines = compare.text(asked, found, refused, rows, H200, "some-gpu")
    cells = {line.split("  ")[0]: line.split() for line in lines}
    assert cells["time"] == ["time", "4", "ms", "3", "ms", "2", "ms", "-", "measured"]
    assert cells["time over FA-2's"][-5:] == ["2.00", "1.50", "1.00", "-", "measured"]
    assert cells["error"][-5:] == ["1.0e-03", "1.0e-03", "1.0e-03", "-", "measured"]
    assert any(line.startswith("standard: failed: out of memory") for line in lines)
    assert not any("not measured" in line for line in lines)


def test_inputs_too_large_for_the_host_are_not_made(with_a_gpu, monkeypatch):
    monkeypatch.setattr(compare, "LARGEST", 100)
    _, _, rows = rows_of(setting(N=2048, dtype="float16"), "some-gpu")
    failed = [row for row in rows if row.source == "measured"]
    assert all(row.value is None and "more than 100 elements" in row.note for row in failed)
    assert with_a_gpu == [] and len(failed) == 4


# --- the command -----------------------------------------------------------------------------


def test_the_command_prints(capsys):
    arguments = ["compare", "--seqlen", "48", "--head-dim", "16"]
    assert command.main(arguments) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= WIDTH
    assert "FA-1 (K/V outer)" in printed
    assert command.main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["problem"]["seqlen_q"] == 48 and found["pass"] == "fwd"
    assert {row["source"] for row in found["rows"]} == {"model", "counted"}
    assert found["about"]["command"].startswith("python -m experiments compare --seqlen 48")


@pytest.mark.parametrize(
    "arguments",
    [
        ("--seqlen=1048576", "--seqlen-k=1000000", "--head-dim=256", "--batch=64", "--heads=64"),
        ("--seqlen=1", "--head-dim=1", "--dtype=float32", "--causal"),
        ("--seqlen=65536", "--head-dim=128", "--backward", "--dtype=bfloat16", "--heads=16"),
    ],
)
def test_the_table_fits_a_terminal(arguments, capsys, monkeypatch):
    monkeypatch.setattr(compare, "gpu_here", lambda: (H200, None))
    assert command.main(["compare", *arguments]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= WIDTH


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "the following arguments are required: --seqlen, --head-dim"),
        (["--seqlen=0"], "argument --seqlen: 0 is outside: allowed is 1 to 1048576"),
        (["--head-dim=x"], "argument --head-dim: 'x' is no integer: allowed is 1 to 256"),
        (["--heads=5000"], "argument --heads: 5000 is outside: allowed is 1 to 4096"),
        (["--tiles=64"], "argument --tiles: '64' is no BRxBC: allowed is such as 64x128"),
        (["--tiles=6x64"], "argument --tiles: tiles: Br is 6: allowed is a positive multiple"),
        (["--tiles=512x512"], "leaves no split over warps"),
        (["--dtype=float64"], "invalid choice: 'float64'"),
    ],
)
def test_bad_arguments_are_refused(arguments, message, capsys):
    size = ["--seqlen=64", "--head-dim=64"] if arguments else []
    with pytest.raises(SystemExit) as stopped:
        command.main(["compare", *size, *arguments])
    printed = capsys.readouterr()
    assert stopped.value.code == 2 and printed.out == ""
    assert message in " ".join(printed.err.split())


def test_a_failed_call_is_an_error(with_a_gpu, monkeypatch, capsys):
    monkeypatch.setattr(compare, "gpu_here", lambda: (H200, "some-gpu"))
    arguments = ["compare", "--seqlen", "2048", "--head-dim", "64"]
    assert command.main(arguments) == 1
    assert "standard: failed: out of memory" in capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.parametrize(
    "arguments", [("--causal", "--seqlen-k=700"), ("--backward",), ("--dtype=float32",)]
)
def test_a_gpu_measures(arguments, capsys):
    size = ("--seqlen=500", "--head-dim=64", "--heads=4", "--json")
    assert command.main(["compare", *size, *arguments]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    times = {r["series"]: r for r in rows if (r["source"], r["metric"]) == ("measured", "time")}
    least = {r["series"]: r for r in rows if (r["source"], r["metric"]) == ("model", "time")}
    assert len(times) >= 3 and all(row["n"] >= 5 for row in times.values())
    assert all(times[series]["value"] >= row["value"] for series, row in least.items())


def test_one_head_has_the_accesses_of_every_head():
    for asked in (setting(batch=3, heads=4), setting("bwd", batch=3, heads=4, causal=True)):
        head = replace(asked, problem=compare.one_head(asked.problem))
        (found, _), (heads, _) = (compare.sides(each, H200) for each in (asked, head))
        for whole, one in zip(found, heads, strict=True):
            assert whole.planned.accesses.total == 12 * one.planned.accesses.total
            sizes = [np.prod(side.planned.problem.q_shape) for side in (whole, one)]
            assert sizes[0] == 12 * sizes[1]
