"""The experiment on rings: what is timed, the model, rows, figure and tables."""

import contextlib
import gc
import itertools
import json
import sys
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from experiment_helpers import cells

from experiments import ring
from experiments.beside import ring_fit, ring_ranks, ring_rows, ring_spans, ring_tasks
from experiments.beside.ring_ranks import KV, LINK, MERGE, ONE, OURS, SERIES, Found, Q
from experiments.lab.measure import peers, timing
from experiments.lab.record.options import Bench, Options
from experiments.lab.record.store import MODEL
from fa_numba import io_model

LINK_SPEED, MERGE_SPEED = 300e6, 3e9  # bytes a millisecond
FACTOR = {"fwd": 1.0, "fwd+bwd": 4.0}


def alone(pass_, causal, N):
    """A GPU that takes a millisecond for 4096 rows."""
    return FACTOR[pass_] * (N / 4096) ** 2 * (0.5 if causal else 1.0)


def found(task, ranks):
    """Samples of a task: of a ring just what the model says, of others twice a fair share."""
    N, pass_, causal = task.seqlen, task.pass_, task.causal
    sent = 0
    if task.series == LINK:
        time = ring_ranks.LINK_BYTES / LINK_SPEED
    elif task.series == MERGE:
        time = 6 * ring_ranks.HEADS * N // ranks * ring_ranks.HEAD_DIM / MERGE_SPEED
    elif task.series == ONE:
        time = alone(pass_, causal, N)
    else:
        time = 2 * alone(pass_, causal, N) / ranks
    if task.series in OURS:
        sent = ring_rows.sent_bytes(ring_rows.whole(N, causal), ranks, task.series, pass_)
        problem = ring_rows.whole(N, causal)
        modelled = ring_rows.milliseconds(machine(), problem, ranks, task.series, pass_)
        time = modelled if modelled is not None else time
    return [time, 0.9 * time, 1.2 * time], sent


def machine(times=None):
    known = {
        (p, c, 2**n): alone(p, c, 2**n) for p, c, n in product(FACTOR, (False, True), range(12, 19))
    }
    return ring_rows.Measured(times or known, LINK_SPEED, MERGE_SPEED)


def synthetic(ranks=2, options=None, failing=()):
    rows = list(ring._modelled())
    for n, task in enumerate(ring_tasks.tasks(options or Options(), ranks)):
        samples, sent = found(task, task.ranks)
        each = Found(n, samples, sent, 100.0)
        if task.profiled:
            each = Found(n, [], busy=[2.0 + r for r in range(task.ranks)], hidden=[0.9, 0.8])
        if task.series in failing:
            each = Found(n, [], failure="failed: out of memory")
        rows += ring._rows(task, each, "some-gpu")
    return rows


# --- the model of the time -------------------------------------------------------------------


def test_without_a_link_to_wait_for_ranks_share_the_time():
    free = replace(machine(), link=float("inf"), merging=float("inf"))
    for ranks, causal, series in product((1, 2, 4), (False, True), OURS):
        problem = ring_rows.whole(2**16, causal)
        time = ring_rows.milliseconds(free, problem, ranks, series, "fwd+bwd")
        assert time == pytest.approx(alone("fwd+bwd", causal, 2**16) / ranks)


def test_a_slow_link_is_what_takes_the_time():
    """Each message is waited for: as many as the closed form has bytes of."""
    slow = replace(machine(), link=1.0, merging=float("inf"))
    for ranks, travels, passes in product((2, 3, 4), ("kv", "q"), ("fwd", "bwd")):
        problem = ring_rows.whole(4096 * ranks, False)
        part = replace(problem, seqlen_q=4096, seqlen_k=4096)
        time = ring_rows.milliseconds(slow, problem, ranks, f"ring-{travels}", passes)
        nbytes = io_model.ring(part, ranks, travels=travels, passes=passes).sent
        assert nbytes <= time <= nbytes + 5 * ranks


def test_times_beyond_the_longest_measured_are_in_proportion():
    one = machine({("fwd", False, 4096): 1.0, ("fwd", False, 8192): 3.9})
    assert one.call("fwd", False, 8192) == 3.9
    assert one.call("fwd", False, 2**15) == 3.9 * 16
    assert one.call("fwd", False, 2048) is None and one.call("fwd", False, 6000) is None
    assert one.call("bwd", False, 4096) is None and one.call("fwd", True, 4096) is None


# --- what is timed ---------------------------------------------------------------------------


def test_every_series_is_timed_where_it_is_short_enough():
    tasks = ring_tasks.tasks(Options(), 2)
    assert len(set(tasks)) == len(tasks)
    assert [task.series for task in tasks[:2]] == [LINK, MERGE]
    longest = {
        series: max(t.seqlen for t in tasks if t.series == series and t.pass_ == "fwd")
        for series in SERIES
    }
    assert longest.pop(KV) == 2**20 and set(longest.values()) == {2**18}
    assert {t.seqlen for t in tasks if t.series == ONE} == {2**n for n in range(12, 19)}
    assert max(t.seqlen for t in tasks if t.pass_ == "fwd+bwd") == 2**18
    quick = ring_tasks.tasks(Options(quick=True), 2)
    assert {t.seqlen for t in quick if t.series in SERIES} == {ring_tasks.SEQLENS[0]}
    assert [ring_tasks.repeats(2**n) for n in (13, 15, 18, 20)] == [20, 8, 2, 1]
    assert [ring_tasks.repeats(2**17, series) for series in (KV, ring_ranks.ULYSSES)] == [5, 2]


def test_the_most_important_calls_come_first():
    """The goal on all GPUs, then the other passes there, and long before whatever is short."""
    tasks = ring_tasks.tasks(Options(), 4)
    goal = [t for t in tasks if t.series in SERIES][:4]
    assert [(t.series, t.seqlen, t.causal, t.pass_, t.ranks) for t in goal] == [
        (series, 2**17, False, "fwd", 4) for series in (KV, Q, ONE, ring_ranks.CP_CUDNN)
    ]
    assert {t.seqlen for t in tasks[:18] if t.series in SERIES} == {2**17}
    assert {t.ranks for t in tasks} == {4, 2}
    assert {t.ranks for t in tasks if t.series == ONE} == {4}
    levels = [ring_tasks.importance(t, 4)[0] for t in tasks]
    assert levels == sorted(levels) and set(levels) == {0, 1, 2, 3, 4, 5, 6, 7}
    groups = ring_tasks.groups(tasks)
    assert [(g.ranks, g.tasks[0].profiled) for g in groups] == [
        (4, False), (2, False), (4, True), (4, False), (2, False)
    ]  # fmt: skip
    assert [t for g in groups for t in g.tasks] == tasks
    eight = ring_tasks.tasks(Options(), 8)
    assert ring_tasks.sizes(8) == [8, 4, 2] == sorted({t.ranks for t in eight}, reverse=True)


def test_a_later_run_times_what_is_missing():
    """Whatever number of GPUs timed one GPU alone; what failed is tried again, at the end."""
    tasks, rows = ring_tasks.tasks(Options(), 4), synthetic(4)
    assert ring_tasks.missing(tasks, rows) == []
    assert ring_tasks.missing(tasks, []) == tasks
    failing = ring_tasks.missing(tasks, synthetic(4, failing=[KV]))
    assert {t.series for t in failing} == {KV}
    short = [row for row in rows if row.seqlen_q != 2**15 or row.series != Q]
    left = ring_tasks.missing(tasks, short)
    assert {(t.series, t.seqlen) for t in left} == {(Q, 2**15)} and len(left) == 12
    later = ring_tasks.missing(ring_tasks.tasks(Options(), 8), rows)
    assert {t.ranks for t in later} == {8}
    assert not [t for t in later if t.series == ONE]
    gone = [row for row in synthetic(4, failing=[KV]) if row.series != MERGE]
    last = [t.series for t in ring_tasks.missing(tasks, gone)]
    assert last == [MERGE, MERGE] + [KV] * (len(last) - 2)


def test_a_run_ends_when_its_time_is_over(monkeypatch):
    """The processes end too, and groups that have not begun are not started."""
    ended, said = [], []

    def run(tasks, ranks):
        try:
            for n, _ in enumerate(tasks):
                yield Found(n, [1.0], slow="rank 1 is slow" if n == 1 else "")
        finally:
            ended.append(ranks)

    monkeypatch.setattr(ring, "_gpus", lambda: 4)
    monkeypatch.setattr(ring.ring_ranks, "run", run)
    found = []
    bench = Bench(machine="some-gpu", say=said.append, over=lambda: len(found) >= 3)
    for rows in ring.measure(Options(), bench):
        found.append(rows)
    assert len(found) == 3 and ended == [4]
    assert said[1:] == [
        "  rank 1 is slow",
        "  the time limit has passed; the same command measures what is missing",
    ]
    assert found[2][0].note == "4 ranks; rank 1 is slow" and not found[2][0].failed
    bench.stored, bench.over = [row for rows in found for row in rows], lambda: True
    assert len(list(ring.measure(Options(), bench))) == 1 and ended == [4]
    assert f"{len(ring_tasks.tasks(Options(), 4)) - 2} of" in said[-2]


class Event:
    def __init__(self, name, begin, end, device="gpu"):
        self.name, self.device_type = name, device
        self.time_range = SimpleNamespace(start=begin, end=end)


def test_a_profile_says_when_a_gpu_computes_and_copies():
    events = [Event("aten::zero_", 0, 9000, "cpu"), Event("Memset (Device)", 0, 50)]
    events += [Event("fa2_forward", 1000, 3000), Event("ncclDevKernel_SendRecv", 2000, 4000)]
    profile = SimpleNamespace(events=lambda: events)
    profiler = SimpleNamespace(
        profile=lambda activities: contextlib.nullcontext(profile),
        ProfilerActivity=SimpleNamespace(CUDA="gpu"),
    )
    torch = SimpleNamespace(
        profiler=profiler, cuda=SimpleNamespace(synchronize=lambda: None),
        autograd=SimpleNamespace(DeviceType=SimpleNamespace(CUDA="gpu")),
    )  # fmt: skip
    spans = ring_spans.recorded(torch, lambda: None)
    assert spans == [(1.0, 3.0, False), (2.0, 4.0, True)]
    assert ring_spans.busy(spans) == 2.0 and ring_spans.hidden(spans) == 0.5
    assert ring_spans.hidden(spans[:1]) == 1.0
    del events[2:]
    with pytest.raises(RuntimeError, match="profiler must record kernels, got none"):
        ring_spans.recorded(torch, lambda: None)


def test_who_is_slow_or_late_is_named(tmp_path, monkeypatch):
    assert ring_ranks.slow_rank([1.0, 1.1, 1.0, 1.5], "s").startswith("rank 3 is slow: 1.5 s, ")
    assert ring_ranks.slow_rank([5.0, 1.0], "s").startswith("rank 0 is slow: 5 s, ")
    assert ring_ranks.slow_rank([1.0, 1.1], "s") == ring_ranks.slow_rank([], "s") == ""
    watch = ring_ranks.Watch(tmp_path / "found", 3)
    assert watch.late() == "" and not watch.hung()
    for rank, steps in enumerate((3, 1, 3)):
        ring_ranks.own_file(tmp_path / "found", rank).write_bytes(b"." * steps)
    assert watch.late() == "; rank 1 was behind the other ranks"
    assert ring_ranks.TIMEOUT.total_seconds() < ring_ranks.HUNG < 120 - 5
    assert not watch.hung()
    monkeypatch.setattr(ring_ranks, "HUNG", 0.0)
    assert watch.hung()


def test_other_processes_go_on_behind_a_task_at_which_they_ended(monkeypatch):
    starts = []

    def started(tasks, ranks):
        starts.append(list(tasks))
        for n, task in enumerate(tasks):
            if task in ("breaks", "never"):
                yield Found(n, [], failure=f"{ring_ranks.ENDED}failed: {task}")
                return
            yield Found(n, [1.0])

    monkeypatch.setattr(ring_ranks, "_started", started)

    def run(*tasks):
        starts.clear()
        return [(f.index, f.failure) for f in ring_ranks.run(tasks, 2)]

    assert run("a", "breaks", "b") == [(0, ""), (1, "failed: breaks"), (2, "")]
    assert starts == [["a", "breaks", "b"], ["b"]]
    assert run("never", "never", "a", "b") == [(n, "failed: never") for n in range(4)]
    assert len(starts) == 2
    assert run("breaks", "a", "breaks", "b") == [
        (0, "failed: breaks"), (1, ""), (2, "failed: breaks"), (3, "")
    ]  # fmt: skip


def test_without_a_gpu_bytes_are_modelled_alone():
    (rows,) = ring.measure(Options(), Bench(machine=None))
    assert {row.machine for row in rows} == {MODEL}
    by = {(r.series, r.pass_, r.causal, r.place): r.value for r in rows}
    part = replace(ring_rows.whole(ring.MODEL_SEQLEN, False), seqlen_q=2**22, seqlen_k=2**22)
    assert by[KV, "fwd", False, "16 ranks"] == io_model.ring(part, 16).sent


def test_with_one_gpu_it_says_what_is_missing(monkeypatch):
    said = []
    monkeypatch.setattr(ring, "_gpus", lambda: 1)
    (rows,) = ring.measure(Options(quick=True), Bench(machine="some-gpu", say=said.append))
    assert {row.machine for row in rows} == {MODEL}
    assert said == ["  one GPU, or no torch with NCCL: times over several are not measured"]
    monkeypatch.undo()
    monkeypatch.setattr(peers, "torch", None)
    assert ring._gpus() == 0


def test_every_task_gives_its_rows(monkeypatch):
    """Those that a length does not divide among the ranks are left out."""
    ran = []

    def run(tasks, ranks):
        ran.extend(tasks)
        assert {task.ranks for task in tasks} == {ranks}
        for n, task in enumerate(tasks):
            failed = task.series == Q
            samples = [] if failed else [3.0, 1.0, 2.0]
            yield Found(n, samples, 7, 5.0, "failed: too slow" if failed else "")

    monkeypatch.setattr(ring, "_gpus", lambda: 3)
    monkeypatch.setattr(ring.ring_ranks, "run", run)
    monkeypatch.setattr(ring_tasks, "SEQLENS", (6144, 8194))
    bench = Bench(machine="some-gpu", say=lambda text: None)
    _, *found = ring.measure(Options(), bench)
    rows = [row for of_task in found for row in of_task]
    assert len(found) == len(ran)
    assert {(task.seqlen, task.ranks) for task in ran if task.series == KV} == {
        (6144, 3),
        (6144, 2),
    }
    mine = [r for r in rows if (r.series, r.pass_, r.causal) == (KV, "fwd", True)]
    mine = [r for r in mine if r.place == "3 ranks"]
    assert [(r.metric, r.value, r.place) for r in mine] == [
        ("time", 2.0, "3 ranks"),
        ("memory", 5.0, "3 ranks"),
        ("sent", 7, "3 ranks"),
    ]
    assert (mine[0].n, mine[0].seqlen_q, mine[0].causal) == (3, 6144, True)
    failed = [row for row in rows if row.series == Q]
    said = {(None, f"{ranks} ranks; failed: too slow") for ranks in (2, 3)}
    assert {(r.value, r.note) for r in failed} == said


@pytest.mark.parametrize("asked", [1, 3])
def test_rows_come_while_ranks_run_and_who_stops_ends_them(monkeypatch, asked):
    """The ranks give two of three tasks, then one fails; or whoever asks has enough of one."""
    killed, looks = [], iter([False, False, RuntimeError("rank 1 is gone")])

    class Begun:
        processes = [SimpleNamespace(kill=lambda: killed.append(1)) for _ in range(2)]

        def join(self, timeout):
            look = next(looks)
            if isinstance(look, Exception):
                raise look
            with open(self.results, "a") as file:
                n = len(self.results.read_text().splitlines())
                file.write(json.dumps(asdict(Found(n, [1.0]))) + "\n")
            return look

    begun = Begun()

    def spawn(work, arguments, nprocs, join, daemon):
        begun.results = Path(arguments[-1])
        return begun

    spawning = SimpleNamespace(multiprocessing=SimpleNamespace(spawn=spawn))
    monkeypatch.setitem(sys.modules, "torch", spawning)
    found = list(itertools.islice(ring_ranks.run([None] * 3, 2), asked))
    assert [f.index for f in found] == [*range(asked)]
    assert [f.failure for f in found[:2]] == [""] * len(found[:2])
    if asked == 3:
        assert found[2].failure == "failed: RuntimeError: rank 1 is gone"
    gc.collect()
    assert len(killed) == 2


class Values(np.ndarray):
    """What the check asks of a tensor."""

    def double(self):
        return self.astype(np.float64)

    def norm(self):
        return np.linalg.norm(self)

    def contiguous(self):
        return self


def checked(monkeypatch, series, off, one=2e-3, causal=True, pass_="fwd+bwd"):
    """What the check says of a rank's results that are `off` from float64, in the last array, where
    one GPU's are `one` from it; and the order of rows that the rank was given, zigzag or not.
    """
    arrays = 1 if pass_ == "fwd" else 3
    exact = [np.arange(1.0, 9.0).view(Values)] * arrays
    split = []

    def ring_split(x, rank, ranks, *, causal):
        split.append(causal)
        return x

    def attention(of, causal, pass_, inputs):
        far = one if of == ONE else off
        return lambda: [x * (1 + (far if n == arrays - 1 else 0)) for n, x in enumerate(exact)]

    def randn(shape, **_):
        return np.zeros(1).view(Values)

    bench = object.__new__(ring_ranks._Bench)
    bench.rank, bench.ranks, bench.device, bench._attention = 0, 2, None, attention
    generator = SimpleNamespace(manual_seed=lambda seed: None)
    bench.torch = SimpleNamespace(Generator=lambda device: generator, randn=randn, float16=None)
    monkeypatch.setattr(ring_ranks, "_float64", lambda *_: exact)
    monkeypatch.setitem(sys.modules, "fa_numba.torch", SimpleNamespace(ring_split=ring_split))
    return timing.attempt(bench._compare, series, causal, pass_)[1], set(split)


def test_a_kind_of_call_is_checked_once_and_who_fails_anywhere_fails_everywhere(tmp_path):
    """Each rank has the others' failures, in their order; what did not pass is checked again."""
    compared, theirs = [], ["", ""]

    def all_gather_object(every, own):
        every[:] = [own, *((failure, 0.1) for failure in theirs)]

    bench = object.__new__(ring_ranks._Bench)
    bench.ranks, bench.passed, bench.progress = 3, set(), tmp_path / "steps"
    bench.torch = SimpleNamespace(cuda=SimpleNamespace(empty_cache=lambda: None))
    bench.dist = SimpleNamespace(all_gather_object=all_gather_object)
    bench._compare = lambda *key: compared.append(key)
    bench._call = lambda task: task.seqlen
    bench._timed = lambda call, task: ([call], 7, 5.0)
    one, other = ring_ranks.Task(KV, 64, True, "fwd", 2), ring_ranks.Task(Q, 64, True, "fwd", 2)
    assert bench.found(0, one) == bench.found(0, one) == Found(0, [64], 7, 5.0)
    theirs[1] = "failed: out of memory"
    assert bench.found(1, other) == Found(1, [], failure="failed: out of memory (rank 2)")
    theirs[1] = ""
    assert bench.found(1, other).samples == [64]
    assert compared == [(KV, True, "fwd"), (Q, True, "fwd")]
    bench._compare = lambda *key: 1 / 0
    again = bench.found(2, ring_ranks.Task(Q, 64, False, "fwd", 2))
    assert again.failure == "failed: ZeroDivisionError: division by zero (rank 0)"
    assert again.slow == "" and bench.progress.stat().st_size > 9


@pytest.mark.parametrize("series", SERIES[1:])
@pytest.mark.parametrize("pass_", FACTOR)
def test_only_what_is_right_is_timed(monkeypatch, series, pass_):
    """Ours may be twice as far from float64 as one GPU and a rounding, torch's by 2^-8."""
    theirs = series in (ring_ranks.CP_FLASH, ring_ranks.CP_CUDNN)
    for one in (0.0, 2e-3):
        bound = 2.0**-8 if theirs else 2 * one + 2 * 2.0**-11
        for off, right in ((0.0, True), (0.99, True), (1.01, False), (np.nan, False)):
            said, zigzag = checked(monkeypatch, series, off * bound, one, pass_=pass_)
            assert (said == "") == right
            assert zigzag == {series != ring_ranks.ULYSSES}
            assert right or said.endswith(f"at most {bound:.2e}, got {off * bound:.2e}")
    assert checked(monkeypatch, series, 0.0, causal=False, pass_=pass_)[1] == {False}


# --- what rows say ---------------------------------------------------------------------------


def test_the_model_gives_back_what_it_was_measured_with():
    rows = synthetic()
    one = ring_rows.measured(rows)
    assert one.link == pytest.approx(LINK_SPEED)
    assert one.merging == pytest.approx(MERGE_SPEED, rel=1e-3)
    times, said = ring_rows.by_key(rows, "time"), ring_rows.predicted(rows)
    assert len(said) == len([k for k in times if k[0] in OURS])
    for key, time in said.items():
        assert time == pytest.approx(times[key], rel=1e-3)
    gains = ring_rows.gains(rows)
    assert gains["ulysses", "fwd", True, 2**14] == pytest.approx(1.0)
    assert 1.9 < gains[KV, "fwd", False, 2**17] < 2.0
    assert ring_rows.measured([row for row in rows if row.series != LINK]) is None


def slowed(rows, factor, step):
    """The rows with times of ours as a model with these parameters has them."""
    found = []
    for row in rows:
        if row.metric == "time" and row.series in OURS:
            problem, ranks = ring_rows.whole(row.seqlen_q, row.causal), ring_rows.ranks_of(row)
            at = replace(machine(), slower=factor, step=step)
            time = ring_rows.milliseconds(at, problem, ranks, row.series, row.pass_)
            row = row if time is None else replace(row, value=time)
        found.append(row)
    return found


def test_a_model_that_holds_is_not_refitted():
    rows = slowed(synthetic(4), 1.05, 0.0)
    fit = ring_fit.fit(rows)
    assert fit.held and fit.ranks == 4 and ring_fit.sizes(rows) == [2, 4]
    assert fit.machine.slower == 1.0 and fit.before == fit.error < 0.1
    assert str(fit).startswith("The model held: on calls over 4 GPUs from N=32k on, its largest er")
    assert str(fit).endswith(f" On fewer GPUs, the largest error is {100 * fit.elsewhere:.1f} %.")
    assert ring_fit.fit([row for row in rows if row.series != LINK]) is None
    assert ring_fit.fit([row for row in rows if row.series not in OURS]) is None


def test_a_model_that_does_not_hold_is_refitted_on_most_gpus():
    """It finds what slowed the calls, and predictions for more GPUs follow."""
    rows = slowed(synthetic(4), 1.2, 0.25)
    rows = [row for row in rows if row.seqlen_q <= 2**17 and row.pass_ == "fwd"]
    fit = ring_fit.fit(rows)
    assert not fit.held and fit.before > 0.15 and fit.error < 0.02 and fit.elsewhere < 0.05
    assert fit.machine.slower == pytest.approx(1.2, abs=0.02)
    assert fit.machine.step == pytest.approx(0.25, abs=0.05)
    assert "The model did not hold: on calls over 4 GPUs from N=32k on, its largest err" in str(fit)
    plain = ring_rows.measured(ring_rows.over(rows, 4))
    at = (2**22, 16, KV, True, "fwd")
    assert ring_rows.efficiency(fit.machine, *at) < 0.9 < ring_rows.efficiency(plain, *at)


def test_each_number_of_gpus_is_compared_with_one_gpu():
    """A row of one GPU serves all; a call is of its own number of GPUs alone."""
    rows = synthetic(4)
    gains = {P: ring_rows.gains(ring_rows.over(rows, P)) for P in (2, 4)}
    at = ring_ranks.ULYSSES, "fwd", False, 2**17
    assert gains[2][at] == pytest.approx(1.0) and gains[4][at] == pytest.approx(2.0)
    older = [replace(r, value=9.0, note="2 ranks") for r in rows if r.series == ONE]
    assert ring_rows.gains(ring_rows.over([*rows, *older], 2)) == gains[2]
    head, *lines = cells(ring.table(rows).body)
    assert [line[0] for line in lines] == ["2"] * 14 + ["4"] * 14
    head, *lines = cells(ring.check_table(rows).body)
    by = [dict(zip(head, line, strict=True)) for line in lines]
    assert [line["GPUs"] for line in by] == ["2"] * 4 + ["4"] * 4
    assert by[4]["within 10 %"] == "10 of 10" and by[4]["after the fit, %"] == "-"
    assert by[0]["Q travels: hidden copies"] == "-"
    # torch's synthetic rings take twice a fair share of the time of one GPU.
    lead = ring_fit.leads(rows, 4, KV, ring_ranks.CP_CUDNN)
    assert 1.8 < min(lead.values()) < 2.0 and {key[3] for key in lead} == {
        2**n for n in range(15, 19)
    }
    least = min(x for key, x in lead.items() if key[1:3] == ("fwd", False))
    assert by[4]["cuDNN / K, V travel: least"] == f"{least:.2f}"
    # Rank 3 of the synthetic rows is busy for 5 ms, rank 0 for 2 ms.
    assert by[4]["Q travels: busiest / least busy GPU"] == "2.500"
    assert by[4]["Q travels: hidden copies"] == "0.80"
    assert "counts of sent bytes, 104 equal the closed form" in ring.check_table(rows).caption
    wrong = [replace(r, value=r.value + 1) if r.metric == "sent" else r for r in rows]
    assert "counts of sent bytes, 0 equal" in ring.check_table(wrong).caption


def test_the_figure_takes_any_part_of_the_rows():
    whole = synthetic()
    modelled = [row for row in whole if row.machine == MODEL]
    for rows, unmeasured in ((whole, 0), (modelled, 5), (synthetic(failing=SERIES), 5)):
        figure = ring.draw(rows)
        texts = [text.get_text() for ax in figure.axes for text in ax.texts]
        assert texts.count("not measured") == unmeasured
    (top, *_, scaling, below) = ring.draw(whole).axes
    # The model's lines of both orders, and a mark of each series at two GPUs.
    lines = [line for line in scaling.lines if len(line.get_xdata()) > 1]
    assert [list(line.get_xdata()) for line in lines] == [[1, 2, 4, 8, 16]] * 2
    marks = [line for line in scaling.lines if list(line.get_xdata()) == [2]]
    assert len(marks) == len(SERIES) - 1
    assert marks[0].get_ydata()[0] == pytest.approx(lines[0].get_ydata()[1], rel=1e-3)
    assert [line.get_label() for line in top.lines][:-1] == [ring.LOOKS[s][0] for s in SERIES[1:]]
    # Both orders over either link, each line with its order's marks.
    marks = [line.get_marker() for line in below.lines]
    assert sorted(marks) == sorted([ring.LOOKS[KV][2], ring.LOOKS[Q][2]] * 2)
    gained = {(KV, "fwd", False, 2**n): float(n - 13) for n in (14, 15, 16)}
    gained[Q, "fwd", False, 2**15] = 1.5
    assert ring._message(gained, 3) == "From N=32k on, 3 GPUs are 1.5 to 3.0 times as fast"
    assert ring.draw([]) is None


def test_tables_have_a_line_for_each_call():
    rows = synthetic()
    head, *lines = cells(ring.table(rows).body)
    assert len(lines) == 2 * 4 + 2 * 3
    (line,) = (x for x in lines if x[:4] == ["2", "fwd", "no", "32k"])
    by = dict(zip(head, line, strict=True))
    assert float(by["K, V travel: gain"]) > 1.9
    assert by["K, V travel: model / time"] == "1.000"
    assert by["K, V travel: memory per GPU, MiB"] == "100"
    assert by["K, V travel: sent, MB"] == str(round(4 * 16 * 2**14 * 128 / 1e6))
    (line,) = (x for x in lines if x[:4] == ["2", "fwd", "no", "1M"])
    assert dict(zip(head, line, strict=True))["one GPU, ms"] == "-"
    said = "We counted the sent bytes of 52 calls over several GPUs, and 52 of the 52 counts equal "
    assert f"{said}the number that a closed form predicts. " in ring.table(rows).caption
    modelled = [row for row in rows if row.machine == MODEL]
    assert ring.table(modelled) is None and ring.model_table(modelled) is None
    assert ring.check_table(modelled) is None
    assert "| 1024 | 1.507 | 0.836 |" in ring.break_even_table(modelled).body
    assert len(ring.model_table(rows).body.splitlines()) == 2 + 2 * len(ring.SHOWN_RANKS)
    assert ring.break_even_table([]) is None
