"""The profiler's numbers beside the emulator's: names, what is run, the table and the figure."""

import json
import sys
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from experiment_helpers import SOME_GPU, put_on_path

import fa_numba
from experiments import ladder, profile
from experiments.beside import profiler
from experiments.lab.measure import counter_target, counters, series
from experiments.lab.measure.workloads import Inputs, fa2_setting, one_head
from experiments.lab.record.options import FIGURES, Options
from experiments.lab.record.store import EMULATOR, Row, Store
from experiments.lab.show import report
from fa_numba import device

# An ncu of one kernel a call. It does not know what is named in REFUSED, nor say so beforehand. It
# reads cases without the package, whose import takes a second or two.
FAKE_NCU = """#!{python} -IS
import json, pickle, sys
arguments = sys.argv[1:]
class Read:
    pass
class Reader(pickle.Unpickler):
    def find_class(self, module, name):
        return Read
if arguments == ["--query-metrics"]:
    print("Device NVIDIA H200 (GH100)")
    for name in {known!r}:
        print(f"{{name}}      Counter      inst      # of something")
    sys.exit()
(metrics,) = [a.removeprefix("--metrics=").split(",") for a in arguments if a[:10] == "--metrics="]
refused = [name for name in metrics if name.partition(".")[0] in {refused!r}]
if refused:
    print(f"==ERROR== Failed to find metric {{refused[0]}}")
    sys.exit(1)
cases = Reader(open(arguments[-2], "rb")).load()
counts = [1] * len(cases)
json.dump({{"counts": counts, "ran": {{}}}}, open(arguments[-1], "w"))
log = open(arguments[arguments.index("--log-file") + 1], "w")
if "--page=raw" in arguments:
    (name,) = metrics
    print(f'"ID","Kernel Name","{{name}}"', file=log)
    print('"","","inst"', file=log)
    for i, case in enumerate(cases):
        n = case.problem.seqlen_q
        cell = f"{{3 * n}} (FFMA: {{n}}; LDS: 3; LDSM.16.M88.4: {{2 * n - 3}})"
        print(f'"{{i}}","k","{{cell}}"', file=log)
else:
    print('"ID","Metric Name","Metric Unit","Metric Value"', file=log)
    for i, case in enumerate(cases):
        for name in metrics:
            print(f'"{{i}}","{{name}}","request","{{case.problem.head_dim}}"', file=log)
"""


def every_metric():
    """Nsight Compute's names without suffix, first alternatives only."""
    found = {c.names[0] for c in profiler.COUNTERS.values() if c.names}
    found |= {*counters.TRAFFIC}
    return {name.partition(".")[0] for name in found}


@pytest.fixture
def fake_ncu(monkeypatch, tmp_path):
    def install(known=(), refused=()):
        text = FAKE_NCU.format(python=sys.executable, known=sorted(known), refused=sorted(refused))
        put_on_path(monkeypatch, tmp_path / "ncu", text)

    return install


class FakeCounts:
    """Counts as the emulator has them, of one kernel."""

    def __init__(self, scale):
        self.instructions = Counter(load=7 * scale, mma=5 * scale, shuffle=2 * scale)
        self.scale = scale

    def total(self, **fields):
        n = self.scale * (len(fields["space"]) + len(fields["kind"]))
        return SimpleNamespace(requests=n, sectors=4 * n, wavefronts=8 * n, conflicts=n)


def synthetic(machine="some-gpu"):
    """Rows of two kernels, measured and counted; one number of three differs."""
    rows = []
    for run in profile.runs():
        if (run.series, run.pass_) in (("fa2-mma-plain", "fwd"), ("fa1-simt", "bwd")):
            for i, metric in enumerate(profiler.COUNTERS):
                for place, source, value in (
                    (machine, "measured", 1000 * i + (i % 3 == 2)),
                    (EMULATOR, "counted", 1000 * i),
                ):
                    fields = run.columns(place) | {"source": source}
                    rows.append(Row(metric=metric, unit="1", value=value, **fields))
    return rows


# --- names -----------------------------------------------------------------------------------


def test_names_are_the_first_that_a_gpu_has():
    known = every_metric()
    assert profiler.chosen(known)["copy sectors"].startswith("smsp__sass_l1tex_t_sectors")
    older = {name.replace("smsp__sass", "sm__sass") for name in known}
    assert profiler.chosen(older)["copy sectors"].startswith("sm__sass_l1tex_t_sectors")
    few = {"smsp__sass_anything", "l1tex__data_pipe_lsu_wavefronts_mem_shared"}
    assert set(profiler.chosen(few)) == {"shared wavefronts"}
    # A list without metrics of instrumented code, or none, says nothing.
    assert profiler.chosen(None) == profiler.chosen({"dram__bytes_read"}) == profiler.chosen(known)


def test_a_name_that_ncu_does_not_know_loses_no_other(fake_ncu):
    known = every_metric()
    refused = {f"l1tex__t_{what}_pipe_lsu_mem_global_op_red" for what in ("sectors", "requests")}
    fake_ncu(known - {"l1tex__t_sectors_pipe_lsu_mem_global_op_st"}, refused)
    (case, *_) = [run.case for run in profile.runs()]
    said = []
    names = profiler.usable(case, said.append)
    missing = {"atomic sectors", "atomic requests", "global store sectors"}
    assert set(names) == set(profiler.chosen(known)) - missing
    assert all(name in said[-1] for name in missing)


def test_what_is_certain_is_asked_for_where_ncu_names_no_culprit(fake_ncu, monkeypatch):
    fake_ncu(every_metric())
    count = counters.count

    def fussy(cases, metrics):
        if len(metrics) > len(profiler.CERTAIN):
            raise counters.CountersError("ncu ended with 9: too many")
        return count(cases, metrics)

    monkeypatch.setattr(counters, "count", fussy)
    names = profiler.usable(profile.runs()[0].case, lambda line: None)
    certain = {"shared wavefronts", "shared conflicts", "sectors from L2", "sectors to L2"}
    assert set(names) == certain


def test_opcodes_are_added_up_by_class():
    text = (
        f'a line\n"ID","Kernel Name","{counters.OPCODES}"\n"","","inst"\n"0","k","1,234 (LDS: 4; '
        "LDS.128: 2; LDSM.16.M88.4: 8; LDGSTS.E.BYPASS.128: 1,200; LDC: 9; MUFU.EX2: 5; "
        'MUFU.RCP: 6)"\n'
    )
    (launch,) = counters.parse_opcodes(text)
    found = profiler.executed(launch)
    assert found["load instructions"] == 14
    assert found["copy instructions"] == 1200 and found["exp instructions"] == 5
    assert found["mma instructions"] == 0
    with pytest.raises(counters.CountersError, match="must name opcodes"):
        counters.parse_opcodes(f'"ID","{counters.OPCODES}"\n"0","1234"\n')


# --- what is run -----------------------------------------------------------------------------


def test_every_kernel_is_run_once_at_the_tiles_of_its_plan():
    found = profile.runs()
    forward = [run.series for run in found if run.pass_ == "fwd"]
    steps = {step.series for step in ladder.STEPS} | set(ladder.PARTITIONS)
    assert steps - set(forward) <= {ladder.BASE}, "a step of the ladder is left out"
    assert {run.series for run in found if run.pass_ == "bwd"} == set(profile.BACKWARD)
    with device.using("emulator"):
        for run in found:
            given = series.plan(run.series, run.problem, passes=run.pass_, **run.options)
            own = {name: value for name, value in run.options.items() if name != "tiles"}
            if run.series in steps and "tiles" in ladder_options(run):
                continue  # not the plan's own
            planned = series.plan(run.series, run.problem, passes=run.pass_, **own)
            assert given.kernels == planned.kernels
    assert len({(run.series, run.pass_) for run in found}) == len(found)
    assert all(profile.label((run.series, run.pass_)) for run in found)
    assert (found[0].case.pass_, found[0].case.options) == ("fwd", found[0].options)
    assert found[-1].case.pass_ == "bwd"


def ladder_options(run):
    if series.unit(run.series) != "mma" or run.pass_ == "bwd":
        return {}
    of = {v.series: v.options for v in ladder.configurations(run.problem)}
    return of.get(run.series, {})


def test_rows_of_the_profiler_and_of_the_emulator(fake_ncu, monkeypatch):
    fake_ncu(every_metric())
    monkeypatch.setattr(profile, "_emulated", lambda run, inputs: FakeCounts(run.problem.seqlen_q))
    rows = list(profile.measure(Options(quick=True), SOME_GPU))
    assert len({(row.machine, *row.key) for row in rows}) == len(rows)
    measured = {(r.series, r.pass_, r.metric): r for r in rows if r.machine == "some-gpu"}
    kernels = {(run.series, run.pass_) for run in profile.runs()}
    assert {key[:2] for key in measured} == kernels
    assert not any(row.failed for row in rows)
    for kernel in kernels:
        assert measured[*kernel, "shared wavefronts"].value == 64
        assert measured[*kernel, "fma instructions"].value == 256
        assert measured[*kernel, "load instructions"].value == 512
    counted = {(r.series, r.pass_, r.metric) for r in rows if r.machine == EMULATOR}
    cheap = kernels - {("standard-simt", "bwd"), ("standard-mma", "bwd")}
    assert counted == {(*kernel, metric) for kernel in cheap for metric in profiler.COUNTERS}
    assert {r.source for r in rows} == {"measured", "counted", "l2", "dram"}

    of = profile.pairs(rows)
    assert set(profile.places(of)) == cheap
    loads = FakeCounts(256).total(space="shared", kind="load").wavefronts
    assert of[("fa2-simt", "fwd"), "shared load wavefronts"] == (64, loads)


@pytest.mark.parametrize("passes", ["fwd", "bwd"])
def test_the_profiled_range_holds_the_call_alone(monkeypatch, passes):
    """What ncu runs, on the emulator: the launches between start and stop are the plan's."""
    seen, launches = [], []
    launch = device.launch

    def recorded(kernel, *given, **named):
        launches.append(kernel.name)
        launch(kernel, *given, **named)

    monkeypatch.setattr(device, "launch", recorded)
    for name in ("to_gpu", "synchronize"):
        monkeypatch.setattr(device, name, lambda *array: array[0] if array else None)
    monkeypatch.setattr(device, "profile_start", lambda: seen.append(len(launches)))
    monkeypatch.setattr(device, "profile_stop", lambda: seen.append(len(launches)))
    problem = one_head(16, 16, True, "float16")
    case = counters.Case("fa2-mma", problem, pass_=passes)
    with device.using("emulator"):
        kernels = counter_target.run(case)
        planned = series.plan("fa2-mma", problem, passes=passes)
    first, last = seen
    assert launches[first:last] == [kernel.name for kernel in planned.kernels]
    assert kernels == last - first and first > 0


@pytest.mark.parametrize("algorithm", ["fa1", "fa2"])
def test_what_is_counted_has_the_papers_grid(monkeypatch, algorithm):
    """As the calls that are timed: "auto" might split the columns of few or causal row tiles."""
    asked = []

    def attention(*arrays, **options):
        asked.append(options.get("kv_splits", "auto"))

    monkeypatch.setattr(fa_numba, "attention", attention)
    for name in ("to_gpu", "synchronize", "profile_start", "profile_stop"):
        monkeypatch.setattr(device, name, lambda *array: array[0] if array else None)
    monkeypatch.setattr(device, "planned_for_gpu", lambda: True)
    case = counters.Case(f"{algorithm}-mma", one_head(16, 16, True, "float16"))
    with device.using("emulator"):
        counter_target.run(case)
    assert asked == [1 if algorithm == "fa2" else "auto"] * 2


def test_inputs_in_8_bits_reach_the_gpu_through_torch(monkeypatch):
    """Numba has no arrays of 8-bit floats."""

    class Bits:
        def __init__(self, array):
            self.array = array

        def cuda(self):
            return self

        def view(self, dtype):
            return self.array.view(dtype)

    torch = SimpleNamespace(from_numpy=Bits, float8_e4m3fn="float8_e4m3fn")
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(device, "to_gpu", lambda array: ("GPU", array))
    problem = one_head(24, 16)
    (name, half), *_ = counter_target.arrays_of(replace(problem, dtype="float16"))
    assert name == "GPU" and half.dtype == np.float16
    stored = counter_target.arrays_of(replace(problem, dtype="float8_e4m3fn"))
    assert [x.dtype.name for x in stored] == ["float8_e4m3fn"] * 4
    np.testing.assert_allclose(stored[0].astype(np.float32), half, rtol=2**-4, atol=2**-9)


def test_a_call_that_ncu_cannot_run_is_a_row_that_says_so(fake_ncu, monkeypatch):
    fake_ncu(every_metric())
    monkeypatch.setattr(profile, "_emulated", lambda run, inputs: FakeCounts(1))
    usable = profiler.usable

    def then_broken(*given):
        names = usable(*given)
        fake_ncu(every_metric(), {"dram__bytes_read"})
        return names

    monkeypatch.setattr(profiler, "usable", then_broken)
    rows = [r for r in profile.measure(Options(quick=True), SOME_GPU) if r.machine == "some-gpu"]
    failed = {row.metric for row in rows if row.failed}
    assert "shared wavefronts" in failed and "fma instructions" not in failed
    assert all("Failed to find metric" in row.note for row in rows if row.failed)


# --- the emulator's numbers ------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fa2-mma-plain", "fa2-mma-padding", "fa2-mma-32-rows"])
def test_conflicts_and_wavefronts_of_the_recorded_ladder(name):
    """Counts of a block grow with its column tiles: those at N=4096 follow from two small calls.

    Beside what the emulator counts, the hardware takes a wavefront for each of the instructions
    without an active lane that the assembler puts before copies: 6 a warp and tile at most.
    """
    problem, Tc = fa2_setting(4096, 64, False, "float16"), 64
    variant = {v.series: v for v in ladder.configurations(problem)}[name]
    per_block = []
    for tiles in (1, 2):
        rows = np.ones((1, 1, 128, 64), np.float16)
        keys = np.ones((1, 1, 64 * tiles, 64), np.float16)
        with fa_numba.count_accesses() as counts:
            fa_numba.attention(rows, keys, keys, algorithm="fa2", **variant.options)
        per_block.append(profiler.counted(counts))
    blocks = problem.batch * problem.heads_q * 4096 // 128

    def at_4096(metric):
        one, two = (numbers[metric] for numbers in per_block)
        return blocks * (one + (Tc - 1) * (two - one))

    store = Store(FIGURES)
    recorded = {
        row.metric: row.number
        for row in store.read("ladder", report.gpu(store, "ladder"))
        if (row.series, row.head_dim, row.source) == (name, 64, "measured")
    }
    noise = 1e-3 * recorded["wavefronts"]
    assert abs(recorded["conflicts"] - at_4096("shared conflicts")) < noise
    warps = variant.options["tiles"].threads // 32
    above = recorded["wavefronts"] - at_4096("shared wavefronts")
    assert -noise < above < blocks * warps * (6 * Tc + 40) + noise


# Kernels that read again what L1 still has some of, so that fewer sectors come from L2 than are
# counted. What cp.async copies in 16 bytes does not stay in L1.
READ_AGAIN = {("fa1-simt", "fwd"), ("fa1-simt", "bwd"), ("fa2-simt", "bwd"), ("fa2-mma", "bwd")}


@pytest.mark.gpu
@pytest.mark.skipif(not counters.available(), reason="no Nsight Compute")
def test_what_passes_between_l1_and_l2_is_what_is_counted():
    """To the last sector for every kernel, but for what L1 saves: some read again, and stores of
    neighbouring warps to parts of one sector, which L1 may send on as one.
    """
    cases = profile.runs()
    measured = counters.count([run.case for run in cases], counters.L2)
    inputs, wrong = Inputs(gradient=True), []
    for run, found in zip(cases, measured, strict=True):
        assert not isinstance(found, str), found
        emulated = profile._emulated(run, inputs)
        counts = profiler.counted(emulated)
        read, wanted = found[counters.L2_READ], counts["sectors from L2"]
        least = 0.75 * wanted if (run.series, run.pass_) in READ_AGAIN else wanted
        if not least <= read <= wanted:
            wrong.append((run.series, run.pass_, "from L2", read, wanted))
        written, wanted = found[counters.L2_WRITE], counts["sectors to L2"]
        if not sum(emulated.store_bytes.values()) / counters.SECTOR_BYTES <= written <= wanted:
            wrong.append((run.series, run.pass_, "to L2", written, wanted))
    assert not wrong


# What neither the compiler nor time changes.
EQUAL = (
    *("global load requests", "global store requests", "global store sectors"),
    *("copy conflicts", "copy requests", "atomic requests", "atomic sectors"),
    *("mma instructions", "atomic instructions", "shuffle instructions"),
)


def recorded():
    """The recorded numbers, as `profile.pairs` has them."""
    store = Store(FIGURES)
    measured = store.read("profile", report.gpu(store, "profile"))
    if not measured:
        pytest.skip("no recording of these kernels")
    return profile.pairs(measured + store.read("profile", EMULATOR))


def reads_ahead():
    """Whether the fp32 kernels that were recorded read their operands ahead, as today's do."""
    store = Store(FIGURES)
    with open(store.path("profile", report.gpu(store, "profile"), ".json")) as file:
        return json.load(file)["runs"][-1]["commit"] != "0a1cdc9acb05080d8f8db41492df2dd11cfede63"


def test_recorded_numbers_that_are_equal():
    of = recorded()
    found = {at: pair for at, pair in of.items() if at[1] in EQUAL}
    assert len(found) == len(EQUAL) * len(profile.places(of)) > 0
    assert {at: measured for at, (measured, _) in found.items()} == {
        at: count for at, (_, count) in found.items()
    }


def test_recorded_wavefronts_of_the_fa2_kernels_are_explained():
    """In all: a wavefront for every warp, for every barrier of a block, for every second one of a
    warp, and for each load and copy that runs without an active lane, beside those that are
    counted. Two at most are left over.
    """
    of = recorded()
    kernels = [
        run
        for run in profile.runs()
        if run.pass_ == "fwd" and series.algorithm(run.series) == "fa2"
        if reads_ahead() or series.unit(run.series) != "simt"
    ]
    assert kernels
    for run in kernels:
        place, tiles = (run.series, "fwd"), run.options["tiles"]

        def beyond(name, place=place):
            measured, count = of[place, name]
            return measured - count

        warps = tiles.threads // 32
        barriers = of[place, "barrier instructions"][0] / warps
        idle = beyond("load instructions") + beyond("copy instructions")
        of_warps = -beyond("barrier instructions")  # the profiler has barriers of blocks alone
        waits = 256 // tiles.Br * warps + barriers + of_warps // 2
        rest = beyond("shared wavefronts") - idle - waits
        assert -2 <= rest <= 0, run.series


def test_loads_of_the_flash_kernels_on_cuda_cores_take_what_is_counted():
    if not reads_ahead():
        pytest.skip("recorded before they read ahead: record profile anew")
    of, flash = recorded(), ("fa1-simt", "fa2-simt")
    found = [of[at] for at in of if at[0][0] in flash and at[1] == "shared load wavefronts"]
    assert len(found) == 4 and all(measured == count for measured, count in found)


# --- the table and the figure ----------------------------------------------------------------


def test_a_cell_says_where_the_two_differ():
    assert profile.cell((1024, 1024)) == "1,024"
    assert profile.cell((1536, 1024)) == "1,024 (x 1.500)"
    assert profile.cell((7, 0)) == "0 (7)"
    assert profile.cell((0, 0)) == "0"
    assert profile.cell((None, 1024)) == "1,024 (?)"
    assert profile.cell((3, None)) == "-"


def test_tables_and_figure_from_rows(fake_ncu, monkeypatch):
    fake_ncu(every_metric())
    monkeypatch.setattr(profile, "_emulated", lambda run, inputs: FakeCounts(1))
    rows = list(profile.measure(Options(quick=True), SOME_GPU))
    tables = [make(rows) for make in (profile.table, *profile.TABLES.values())]
    kernels = len(profile.runs()) - 2  # standard attention's backward passes
    header = [line for t in tables for line in t.body.splitlines()[0].strip("| ").split(" | ")]
    assert set(profiler.COUNTERS) <= set(header)
    assert all(len(t.body.splitlines()) == 2 + kernels for t in tables)
    columns = len(tables[0].body.splitlines()[0].strip("| ").split(" | ")) - 4
    assert (
        f"Of {kernels * columns} numbers that Nsight Compute measured (shared-memory wavefronts "
        "and bank conflicts), 0 equal the emulator's counts" in tables[0].caption
    )
    figure = profile.draw(rows)
    assert len(figure.axes) == len(profile.SHOWN)
    only_counted = [row for row in rows if row.machine == EMULATOR]
    assert "(?)" in profile.table(only_counted).body
    assert profile.draw(only_counted) is None
    assert profile.draw([r for r in rows if r.machine != EMULATOR]) is None
    assert profile.table([]) is None
