"""python -m experiments compare: both orders at one size, counted, modelled and measured."""

import csv
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

import fa_numba
from experiments import __main__ as command
from experiments.beside import compare
from experiments.lab.measure.timing import Timing
from fa_numba import Tiles, bounds, io_model
from fa_numba.bounds import DEVICES
from fa_numba.problem import Problem

H200 = DEVICES["H200"]
WIDTH = 100


def problem_of(batch=1, heads=2, N=64, Nk=None, d=16, **options):
    sizes = {"seqlen_q": N, "seqlen_k": Nk or N, "head_dim": d}
    return Problem(batch, heads, heads, **sizes, **options)


def sides(problem, pass_="fwd", tiles=None):
    return compare.sides(problem, pass_, tiles, H200)


def values(lines):
    return {(line.what, line.source): line.values for line in lines}


def printed(capsys, *arguments, status=0):
    assert command.main(["compare", *arguments]) == status
    return capsys.readouterr().out


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
    found, refused = sides(problem_of(dtype="float16", N=1024, heads=4))
    names = ["fa1-mma", "fa1-mma-splits", "fa2-mma", "standard-mma"]
    assert [side.series for side in found] == names
    assert refused == {} and found[1].options == {"query_splits": 8}
    assert [side.planned.kernels[0].grid[0] for side in found[:2]] == [1, 8]
    found, _ = sides(problem_of(N=1024, heads=600))
    assert [side.series for side in found] == ["fa1-simt", "fa2-simt", "standard-simt"]


def test_tiles_are_those_of_both_orders():
    found, _ = sides(problem_of(dtype="float16"), tiles=Tiles(32, 64))
    sizes = {s.series: (s.planned.tiles.Br, s.planned.tiles.Bc) for s in found}
    assert sizes["fa1-mma"] == sizes["fa2-mma"] == (32, 64)
    assert sizes["standard-mma"] != (32, 64)


def test_what_cannot_be_planned_is_said():
    found, refused = sides(problem_of(dtype="float16"), tiles=Tiles(4, 8))
    assert [side.series for side in found] == ["standard-mma"]
    assert "tiles.Br and tiles.Bc must be multiples of 16" in refused["fa1-mma"]


def test_fp32_has_splits_in_the_backward_pass_too():
    found, refused = sides(problem_of(N=1024), "bwd")
    names = ["fa1-simt", "fa1-simt-splits", "fa2-simt", "standard-simt"]
    assert [side.series for side in found] == names and refused == {}


# --- counted and modelled --------------------------------------------------------------------


@pytest.mark.in_turn("dtype")
@pytest.mark.parametrize("pass_", ["fwd", "bwd"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("causal", [False, True])
def test_the_model_is_what_is_counted(pass_, dtype, causal):
    problem = problem_of(batch=2, heads=3, N=70, Nk=90, dtype=dtype, causal=causal)
    found, _ = sides(problem, pass_)
    model = list(compare.modelled(found, H200))
    lines, said = compare.with_counts(problem, pass_, found, model)
    equal, all_ = map(int, re.search(r"in (\d+) of (\d+) numbers", said).groups())
    assert equal == all_ > 15
    assert ("float16, because NumPy has no bfloat16" in said) == (dtype == "bfloat16")
    by, form = values(lines), values(model)
    for metric in ("loads", "stores"):
        what = f"elements, {metric}"
        assert by[what, "counted"] == form[what, "model"] and (what, "model") not in by
    for side in found:
        parts = [by[f"bytes, {name}", "model"][side.series] for name in compare.GROUPS]
        assert sum(parts) == by["bytes, all", "model"][side.series] == side.planned.accesses.bytes


@pytest.mark.parametrize("pass_, Nk", [("fwd", 512), ("bwd", 40)])
def test_heads_that_share_k_and_v_are_counted_together(pass_, Nk):
    """On a GPU for which a forward call of one head would have key splits by itself."""
    problem = replace(problem_of(batch=2, heads=4, N=16, Nk=Nk), heads_k=2)
    head = compare.one_head(problem)
    with DEVICES["T4"].planning():
        found = [side for side in sides(problem, pass_)[0] if side.series == "fa2-simt"]
        _, said = compare.with_counts(problem, pass_, found, [])
        assert fa_numba.plan(head.q_shape, head.k_shape).kv_splits > 1 or pass_ == "bwd"
    equal, all_ = map(int, re.search(r"in (\d+) of (\d+) numbers", said).groups())
    assert equal == all_ > 4
    assert "one head of k and v on the emulator, times 4 heads" in said


def test_a_count_that_is_not_the_models_is_said(monkeypatch):
    problem = problem_of()
    found, _ = sides(problem)
    one = SimpleNamespace(loads={"Q": 1}, stores={})
    monkeypatch.setattr(compare, "counted", lambda *_: one)
    assert "in 0 of 3 numbers" in compare.with_counts(problem, "fwd", found, [])[1]


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
    problem = problem_of(N=2048, dtype="float16")
    monkeypatch.setattr(compare, "counted", lambda *_: pytest.fail("counted"))
    model = list(compare.modelled(sides(problem)[0], H200))
    lines, said = compare.with_counts(problem, "fwd", [], model)
    assert (
        lines == model
        and "Nothing was counted, because one head would take minutes on the emulator." in said
    )
    assert compare.why_not_counted(problem_of(N=1024, d=256), "fwd")
    assert not compare.why_not_counted(problem_of(N=1024, d=64), "fwd")
    assert compare.why_not_counted(problem_of(N=1024, d=64), "bwd")


def test_numbers_are_the_models():
    found, _ = sides(problem_of(N=100, dtype="float16"))
    by = values(compare.modelled(found, H200))
    for side in found:
        plan, expected = side.planned, bounds.expected(side.planned, H200)
        assert by["FLOPs", "model"][side.series] == plan.flops
        assert by["workspace", "model"][side.series] == plan.workspace_bytes
        assert by["time, at least", "data sheet"][side.series] == expected.floor
        assert by["DRAM bytes, about", "data sheet"][side.series] == expected.dram.bytes


# --- measured --------------------------------------------------------------------------------


def test_times_are_measured_where_a_gpu_is(with_a_gpu, capsys, monkeypatch):
    monkeypatch.setattr(compare.bounds, "here", lambda: H200)
    size = ("--seqlen=2048", "--head-dim=64", "--heads=4")
    lines = printed(capsys, *size, status=1).splitlines()
    names = ["fa1-mma", "fa1-mma-splits", "fa2-mma", "standard-mma"]
    assert [series for series, _ in with_a_gpu] == names
    assert dict(with_a_gpu)["fa1-mma-splits"] == {"query_splits": 16}
    cells = {line.split("  ")[0]: line.split() for line in lines}
    assert cells["time"] == ["time", "4", "ms", "3", "ms", "2", "ms", "-", "measured"]
    assert cells["time over FA-2's"][-5:] == ["2.00", "1.50", "1.00", "-", "measured"]
    assert cells["TFLOP/s"][1] == f"{4 * 4 * 2048**2 * 64 / 4e9:.3g}"
    assert "standard attention: failed: out of memory" in lines
    assert not any("not measured" in line for line in lines)


def test_inputs_too_large_for_the_host_are_not_made(with_a_gpu, monkeypatch):
    monkeypatch.setattr(compare, "LARGEST", 100)
    problem = problem_of(N=2048, dtype="float16")
    _, failed = compare.measured(problem, "fwd", sides(problem)[0])
    assert len(failed) == 4 and with_a_gpu == []
    assert all("must have at most 100 elements" in why for why in failed.values())


# --- the command -----------------------------------------------------------------------------


def test_the_command_prints(capsys, monkeypatch):
    monkeypatch.setattr(compare.bounds, "here", lambda: None)
    monkeypatch.setattr(compare.device, "why_no_gpu", lambda: "no GPU was found")
    size = ("--seqlen=48", "--head-dim=16")
    lines = printed(capsys, *size).splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert (
        "FA-1 (K/V outer)" in lines[2]
        and "time: not measured, because there is no GPU here (no GPU was found)." in lines
    )
    (line,) = [line for line in lines if line.startswith("time, at least")]
    assert line.endswith("data sheet")


def test_another_gpu_is_compared_without_times(with_a_gpu, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(compare.bounds, "here", lambda: H200)
    path = tmp_path / "numbers.csv"
    size = ("--seqlen=32", "--head-dim=16", "--heads=4", "--heads-k=2", f"--csv={path}")
    lines = printed(capsys, *size, "--device=T4").splitlines()
    assert lines[0].startswith("q (1, 4, 32, 16), k and v (1, 2, 32, 16), float32,")
    assert "time: not measured, because --device is not the GPU of this machine." in lines
    assert "estimates for the T4" in lines[-1] and with_a_gpu == []
    with open(path, newline="") as file:
        rows = [*csv.DictReader(file)]
    found, _ = sides(replace(problem_of(heads=4, N=32, d=16), heads_k=2))
    moved = {r["series"]: int(r["value"]) for r in rows if r["quantity"] == "bytes, all"}
    assert moved["fa1-simt"] == found[0].planned.accesses.bytes
    assert {r["unit"] for r in rows} == {"elements", "bytes", "1", "FLOP", "seconds"}
    assert {r["source"] for r in rows} == {"counted", "model", "data sheet"}


@pytest.mark.parametrize(
    "arguments",
    [
        ("--seqlen=1048576", "--seqlen-k=1000000", "--head-dim=256", "--batch=64", "--heads=64"),
        ("--seqlen=1", "--head-dim=1", "--dtype=float32", "--causal"),
        ("--seqlen=65536", "--head-dim=128", "--backward", "--dtype=bfloat16", "--heads=16"),
    ],
)
def test_the_table_fits_a_terminal(arguments, capsys, monkeypatch):
    monkeypatch.setattr(compare.bounds, "here", lambda: None)
    assert command.main(["compare", *arguments]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= WIDTH


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "the following arguments are required: --seqlen, --head-dim"),
        (["--seqlen=0"], "argument --seqlen: must be an integer from 1 to 1048576, got 0"),
        (["--head-dim=x"], "argument --head-dim: must be an integer from 1 to 256, got 'x'"),
        (["--heads=5000"], "argument --heads: must be an integer from 1 to 4096, got 5000"),
        (["--tiles=64"], "argument --tiles: must be two integers such as 64x128, got '64'"),
        (["--tiles=6x64"], "argument --tiles: tiles.Br must be a positive multiple of 4, got 6"),
        (["--tiles=512x512"], "tiles must fit in the registers of at most 512 threads"),
        (["--dtype=float64"], "argument --dtype: must be float32, float16 or bfloat16"),
        (["--heads=4", "--heads-k=3"], "heads_k must be a divisor of heads_q, which is 4, got 3"),
        (["--device=H20O"], "got 'H20O'; did you mean 'H200'?"),
        (["--csv=/no/such/x.csv"], "--csv: must be in a folder that exists, but /no/such does not"),
        (["--csv=/tmp"], "argument --csv: must be a file, but /tmp is a folder"),
        ([f"--csv={'x' * 300}"], "argument --csv: must be the name of a file, got 'xxxx"),
    ],
)
def test_bad_arguments_are_refused(arguments, message, capsys):
    size = ["--seqlen=64", "--head-dim=64"] if arguments else []
    with pytest.raises(SystemExit) as stopped:
        command.main(["compare", *size, *arguments])
    printed = capsys.readouterr()
    assert stopped.value.code == 2 and printed.out == ""
    assert message in " ".join(printed.err.split())


@pytest.mark.gpu
@pytest.mark.parametrize(
    "arguments", [("--causal", "--seqlen-k=700"), ("--backward",), ("--dtype=float32",)]
)
def test_a_gpu_measures(arguments, capsys):
    lines = printed(capsys, "--seqlen=500", "--head-dim=64", "--heads=4", *arguments).splitlines()
    (times,) = [line for line in lines if re.match("time  ", line)]
    assert times.endswith("measured") and len(re.findall(r"[\d.]+ [mu]s", times)) >= 3
