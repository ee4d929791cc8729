"""Bandwidths and the roofline: what the kernels read, rows, tables and the figure."""

import re

import numpy as np
import pytest
from experiment_helpers import recorded
from offline import CAPABILITY, compiled

from experiments import memory_hierarchy as experiment
from experiments.lab.measure import bandwidth, check, latency, peers, timing, variants
from experiments.lab.record.options import Bench, Options
from experiments.lab.record.store import Row
from experiments.lab.show import report
from fa_numba import device, io_model

NAME = experiment.NAME
ABOUT = {"multiprocessors": 132, "shared_bytes": 232448, "l2_bytes": 60 * experiment.MIB}
# TB/s
READ = {"shared": 30.0, "L2": 6.0, "DRAM": 4.0}
NS = {"shared": 15.0, "L1": 20.0, "L2": 150.0, "DRAM": 600.0}
PEAKS = {"float32": 50.0, "float16": 750.0}


def fake_speed(value):
    return timing.Timing(value, 0.9 * value, 1.1 * value, 10)


def measured(monkeypatch, machine="some-gpu", **options):
    """A run on a GPU that has the bandwidths above, and attention calls of 1 ms."""

    def read_global(X, size, repeats):
        return fake_speed(READ["L2"] if size <= 60 * experiment.MIB else READ["DRAM"])

    def chase(size, repeats, l2):
        level = "L1" if size <= 256 * experiment.KIB else "L2" if size <= l2 else "DRAM"
        return fake_speed(NS[level])

    def work(name, work, bench, profiled, seconds):
        for problem, calls in work:
            for variant in calls:
                common, planned, _ = variants._common(name, variant, problem, bench.machine)
                traffic = common | {"metric": "traffic", "unit": "bytes", "note": variant.note}
                for source, factor in (("model", 1), ("l2", 1.25), ("dram", 0.5)):
                    value = factor * planned.accesses.bytes
                    yield Row(value=value, **traffic | {"source": source})
                speed = io_model.flops(problem, variant.passes) / 1e9
                common |= {"source": "measured", "note": variant.note}
                yield Row(metric="speed", unit="TFLOP/s", value=speed, **common)

    monkeypatch.setattr(bandwidth, "ones", lambda nbytes: "X")
    monkeypatch.setattr(bandwidth, "measure_global", read_global)
    monkeypatch.setattr(bandwidth, "measure_shared", lambda n, repeats: fake_speed(READ["shared"]))
    monkeypatch.setattr(latency, "measure_global", chase)
    monkeypatch.setattr(latency, "measure_shared", lambda repeats: fake_speed(NS["shared"]))
    monkeypatch.setattr(
        bandwidth, "measure_matmul", lambda dtype, repeats: fake_speed(PEAKS[dtype])
    )
    monkeypatch.setattr(peers, "available", lambda: True)
    monkeypatch.setattr(peers, "release", lambda: None)
    monkeypatch.setattr(variants, "measure", work)
    monkeypatch.setattr(experiment, "memory_bytes", lambda: 141e9)
    bench = Bench(machine=machine, describe=ABOUT, say=lambda text: None)
    return list(experiment.measure(Options(**options), bench))


def synthetic(machine="some-gpu"):
    with pytest.MonkeyPatch.context() as patch:
        return measured(patch, machine)


# --- the kernels -----------------------------------------------------------------------------


def test_every_thread_reads_its_chunks_and_goes_round():
    """Two blocks of it, against the sums of the places in NumPy."""
    chunks = bandwidth.STRIDE + 300
    X = np.random.default_rng(0).integers(0, 9, (chunks, 4)).astype(np.float32)
    Y, steps = np.zeros(bandwidth.AT_ONCE, np.float32), 8
    with device.using("emulator"):
        device.launch(bandwidth.make_read_global(), (2, 1, 1), (X, Y, steps))
    threads = np.arange(2 * bandwidth.THREADS)
    places = [(threads + k * bandwidth.STRIDE) % chunks for k in range(steps)]
    np.testing.assert_array_equal(Y[threads], sum(X[at].sum(axis=1) for at in places))


def test_shared_memory_is_read_without_conflicts():
    Y = np.zeros(bandwidth.SHARED_THREADS, np.float32)
    arguments = (Y, 8, bandwidth.SHARED_STRIDE)
    with device.count_accesses() as counts:
        device.launch(bandwidth.make_read_shared(), (1, 1, 1), arguments)
    assert set(Y) == {4 * 8}
    assert counts.total(space="shared").conflicts == 0
    loads = counts.total(space="shared", kind="load")
    assert loads.wavefronts * 128 == bandwidth.SHARED_THREADS * 8 * bandwidth.CHUNK


@pytest.mark.parametrize(
    "make, access",
    [(bandwidth.make_read_global, "ld.global.v4"), (bandwidth.make_read_shared, "ld.shared.v4")],
)
def test_no_access_is_left_out_by_the_compiler(make, access):
    assert "sm_90a" in CAPABILITY
    kernel = make()
    ptx, log = compiled(kernel, "sm_90a")
    assert ptx.count(access) == bandwidth.UNROLL
    assert ".local" not in ptx and ".f64" not in ptx
    used = int(re.search(r"Used (\d+) registers", log)[1])
    assert used * kernel.threads * kernel.min_blocks <= 64 * 1024


def test_what_a_run_reads():
    for size in experiment.FOOTPRINTS:
        steps = bandwidth.global_steps(size)
        read = steps * bandwidth.AT_ONCE * bandwidth.CHUNK
        assert steps % bandwidth.UNROLL == 0
        assert read >= max(bandwidth.BYTES, 2 * size)
        # Sums of ones stay whole numbers of float32.
        assert 4 * steps <= 2**24
    with pytest.raises(ValueError, match="footprint must be at least .*, got 1024"):
        bandwidth.global_steps(1024)


def test_a_wrong_sum_is_refused():
    bandwidth._check(np.full(5, 8.0), 8)
    with pytest.raises(
        check.WrongResult, match="the sum of what thread 2 reads must be 8.*, got 7.0"
    ):
        bandwidth._check(np.array([8, 8, 7, 8.0]), 8)


@pytest.mark.parametrize("make", [latency.make_chase_global, latency.make_chase_shared])
def test_a_chase_visits_the_lines_in_the_random_order(make):
    """Two runs of a cycle of 128 lines, of which the second goes on behind the first."""
    order = latency.cycle(latency.SHARED_BYTES // latency.LINE)
    assert sorted(order) == list(range(128)) and list(order) != sorted(order)
    X, Y = latency.chain(order), np.zeros(1, np.uint32)
    for steps, reached in ((48, 48), (96, 16)):
        with device.using("emulator"):
            device.launch(make(), (1, 1, 1), (X, Y, steps))
        assert Y[0] == latency.WORDS * order[reached]
    assert "sm_90a" in CAPABILITY
    ptx, _ = compiled(make(), "sm_90a")
    loads = ptx.count("ld.global.u32 ") + ptx.count("ld.shared.u32 ")
    assert loads >= latency.UNROLL and "mul.lo.s64" not in ptx and ".local" not in ptx


@pytest.mark.parametrize("lost", [0, 16])
def test_a_latency_is_the_difference_of_two_runs(monkeypatch, lost):
    """By stand-ins whose step takes 20 ns; a chase that stops early is refused."""

    def launch(kernel, grid, arguments):
        X, Y, steps = arguments
        for _ in range(steps - lost):
            Y[0] = X[Y[0]]
        ran.append(steps)

    def time_ms(call, *, repeats, warmup, flush_l2):
        flushed.append(flush_l2)
        took = []
        for _ in range(warmup + repeats):
            call()
            took.append(0.003 + 20e-6 * ran[-1])
        return took[warmup:]

    ran, flushed = [], []
    for name in ("to_gpu", "argument", "copied_to_host"):
        monkeypatch.setattr(device, name, lambda array: array)
    monkeypatch.setattr(device, "release_memory", lambda: None)
    monkeypatch.setattr(device, "launch", launch)
    monkeypatch.setattr(device, "time_ms", time_ms)
    monkeypatch.setattr(latency, "STEPS", 64)
    if lost:
        with pytest.raises(check.WrongResult, match="steps must reach element"):
            latency.measure_global(16 * experiment.KIB, 2, 2**20)
        return
    assert latency.measure_global(16 * experiment.KIB, 2, 2**20).median == pytest.approx(20)
    # A cycle before all, then each length once more than it is timed.
    assert ran == [128, 128, 128, 128, 192, 192, 192] and flushed == [False, False]
    assert latency.measure_global(16 * experiment.KIB, 2, 2**13).n == 2 and flushed[-1]
    assert latency.measure_shared(2).median == pytest.approx(20)


def test_speeds_are_of_the_times():
    found = bandwidth.speed_of(4e9, [1.0, 2.0, 4.0])
    assert (found.median, found.n) == (2.0, 3) and found.p20 < 2.0 < found.p80


# --- rows ------------------------------------------------------------------------------------


def test_a_run_has_every_ceiling_and_kernel(monkeypatch):
    rows = measured(monkeypatch)
    assert experiment.bandwidths(rows) == READ
    assert experiment.products(rows) == PEAKS
    assert experiment.capacities(rows)["shared"] == 132 * 232448
    assert list(experiment.curve(rows)) == list(experiment.FOOTPRINTS)
    found = experiment.points(rows)
    assert found.keys() >= {
        (f"{name}-{unit}", pass_, dtype)
        for name in ("standard", "fa1", "fa2")
        for pass_ in ("fwd", "bwd")
        for unit, dtype in experiment.UNITS.items()
    }
    for of in found.values():
        assert of["L2"] == pytest.approx(of["model"] / 1.25)
        assert of["DRAM"] == pytest.approx(2 * of["model"])


def test_failures_are_rows(monkeypatch):
    def broken(*arguments):
        raise MemoryError

    def measured_with(of, name, call):
        with monkeypatch.context() as patch:
            patch.setattr(peers, "available", lambda: False)
            patch.setattr(variants, "measure", lambda *_, **__: iter(()))
            patch.setattr(experiment, "memory_bytes", lambda: 1e9)
            patch.setattr(bandwidth, "ones", lambda nbytes: "X")
            patch.setattr(bandwidth, "measure_global", lambda *_: fake_speed(1))
            patch.setattr(bandwidth, "measure_shared", lambda *_: fake_speed(1))
            patch.setattr(latency, "measure_global", lambda *_: fake_speed(1))
            patch.setattr(latency, "measure_shared", lambda *_: fake_speed(1))
            patch.setattr(of, name, call)
            bench = Bench(machine="some-gpu", describe=ABOUT, say=lambda text: None)
            return list(experiment.measure(Options(quick=True), bench))

    for of, name, series in (
        (bandwidth, "measure_global", experiment.GLOBAL),
        (bandwidth, "measure_shared", experiment.SHARED),
        (latency, "measure_global", experiment.CHASE_GLOBAL),
    ):
        rows = measured_with(of, name, broken)
        failed = [row for row in rows if row.failed]
        assert {row.series for row in failed} == {series}
        assert all("out of memory" in row.note for row in failed)
        assert all(r.place.endswith(("MiB", "KiB", "out of memory")) for r in failed)


# --- tables and the figure -------------------------------------------------------------------


def test_the_tables(tmp_path, monkeypatch):
    store = recorded(tmp_path, NAME, measured(monkeypatch, report.MACHINE))
    text = report.text(NAME, store)
    said = "Shared memory is 7.5 times as fast as DRAM. DRAM is 4595 times as large as the shared "
    said += "memory of all multiprocessors together."
    assert said in text
    assert "| DRAM (HBM) | 4 | 141 GB | 12 | 188 | 1.5 | 40 GB | 208 |" in text
    assert "| L2 | 6 | 63 MB | 8 | 125 | - | - | - |" in text
    text = report.text(f"{NAME}-latency", store)
    assert "| shared memory | 15 | 16 KiB | 1 | 1.0 | 450 |" in text
    assert "| L1 | 20 | 16 KiB | - | 1.3 | - |" in text
    assert "| L2 | 150 | 8 MiB | - | 10.0 | 900 |" in text
    assert "| DRAM (HBM) | 600 | 128 MiB | 100 | 40.0 | 2400 |" in text
    assert experiment.latency_table([]) is None
    text = report.text(f"{NAME}-roofline", store)
    lines = [line for line in text.splitlines() if line.startswith("| ")][2:]
    assert 6 <= len(lines) <= 10 and all(" of " in line for line in lines)


def test_the_figure(monkeypatch):
    figure = experiment.draw(measured(monkeypatch))
    over, waiting, fp32, fp16 = figure.axes
    assert len(waiting.lines[0].get_xdata()) == len(experiment.CHASED)
    assert len(over.lines[0].get_xdata()) == len(experiment.FOOTPRINTS)
    labels = {line.get_label() for ax in (fp32, fp16) for line in ax.lines}
    assert {"roof of DRAM", "FA-1, backward", "standard attention, forward"} <= labels
    alone = experiment.draw([r for r in measured(monkeypatch) if r.metric == "bandwidth"])
    assert [t.get_text() for ax in alone.axes[1:] for t in ax.texts] == ["not recorded yet"] * 2
    assert experiment.draw([]) is None
