"""What tests of experiments share: an experiment timed where there is no GPU, and its recording."""

import functools
import gc
import os
from types import SimpleNamespace

import numpy as np

import fa_numba
from experiments.lab.measure import counters, peers, timing, variants
from experiments.lab.measure.series import row_fields
from experiments.lab.record.options import Bench, Options
from experiments.lab.record.recorder import Recorder
from experiments.lab.record.store import Row, Store
from experiments.lab.show import style

SOME_GPU = Bench(machine="some-gpu", describe={}, say=lambda line: None)
# A failed attempt collects garbage. In tests, it looks at the youngest objects alone: all of them
# take 30 ms, a hundred times.
timing.gc = SimpleNamespace(collect=functools.partial(gc.collect, 0))
UNITS = {"time": "ms", "speed": "TFLOP/s", "bandwidth": "TB/s", "traffic": "bytes"}


def made_up(experiment, problem, series, value, metric="time", machine="some-gpu", **fields):
    """A row of a GPU that there is not, with a number that nobody measured."""
    common = {"source": "measured", "metric": metric, "unit": UNITS.get(metric, "1"), "n": None}
    common |= {"experiment": experiment, "machine": machine, **row_fields(problem), **fields}
    common |= {"p20": value, "p80": value} if common["n"] else {}
    return Row(series=series, value=value, **common)


def flat(found):
    """The rows of what `measure` gives, singly or as wholes."""
    return [row for each in found for row in ([each] if isinstance(each, Row) else each)]


def cells(text):
    """A Markdown table's lines as lists of their cells."""
    lines = [line for line in text.splitlines() if line.startswith("| ") and "---" not in line]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def time_on_the_emulator(monkeypatch, experiment):
    """The emulator is the experiment's GPU: every call is checked, and the nth takes n ms."""
    ran = []

    def time_call(run, check, seconds=None):
        check(run())
        ran.append(run)
        return timing.Timing(float(len(ran)), 1.0, 2.0, 20, 0.0)

    def on_device(arrays, dtype="float32"):
        return tuple(x.astype(dtype) for x in arrays)

    monkeypatch.setattr(experiment, "time_call", time_call)
    monkeypatch.setattr(peers, "on_device", on_device)
    monkeypatch.setattr(fa_numba.device, "release_memory", lambda: None)


def on_some_gpu(experiment, **options):
    """All rows of `measure`, with the emulator in the GPU's place; no reading is given twice."""
    with fa_numba.device.using("emulator"):
        rows = list(experiment.measure(Options(**options), SOME_GPU))
    found = [(*row.key, row.machine, row.place) for row in rows]
    assert len(set(found)) == len(found)
    return rows


def above(figure):
    """The title, the lines below it and the names of the legend, each on a line."""
    return "\n".join(text.get_text() for legend in figure.legends for text in style.texts(legend))


def put_on_path(monkeypatch, program, text):
    """A program, a path of that name, that is found before any other."""
    program.write_text(text)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")


def no_gpu(monkeypatch):
    """The host in a GPU's place, without torch."""
    monkeypatch.setattr(peers, "available", lambda: False)
    monkeypatch.setattr(fa_numba.device, "to_gpu", lambda array: array)
    for name in ("synchronize", "release_memory"):
        monkeypatch.setattr(fa_numba.device, name, lambda: None)


def noted_calls(monkeypatch):
    """What `variants` would time and count on a GPU, made by nobody: the options, dtype and shape
    of each call, of which the nth takes n ms, and the cases, of whose counters the nth says n.
    """
    calls, cases = [], []

    def attention(q, k, v, **options):
        calls.append({"dtype": q.dtype.name, "shape": q.shape, **options})

    def time_call(run, check, seconds=None):
        run()
        return timing.Timing(float(len(calls) or 1), 1.0, 2.0, 20, 1e-7)

    def count_or_say(wanted, metrics, say):
        cases.extend(wanted)
        return [dict.fromkeys(metrics, float(n)) for n in range(1, 1 + len(wanted))]

    no_gpu(monkeypatch)
    monkeypatch.setattr(fa_numba, "attention", attention)
    monkeypatch.setattr(variants, "time_call", time_call)
    monkeypatch.setattr(counters, "count_or_say", count_or_say)
    return calls, cases


def run_once(monkeypatch):
    """Calls of attention with equal numbers and options return the result of the first of them."""

    def words(value):
        if isinstance(value, np.ndarray):
            return value.dtype.str, value.shape, value.tobytes()
        return type(value), str(value)

    def once(run):
        found = {}

        def call(*arrays, out=None, **options):
            named = ((name, *words(value)) for name, value in sorted(options.items()))
            key = (*map(words, arrays), out is None, *named)
            if key not in found:
                given = {} if out is None else {"out": out}
                # With the options, whose functions have addresses of their own as long as they live
                found[key] = run(*arrays, **given, **options), options
            return found[key][0]

        return call

    for name in ("attention", "attention_backward"):
        monkeypatch.setattr(fa_numba, name, once(getattr(fa_numba, name)))


def recorded(folder, name, rows, complete=True):
    """A store in `folder` with a recording of the experiment of that name: `rows`."""
    store = Store(folder)
    about = {"id": "r1", "commit": "a" * 40, "date": "2026-01-01", "device": {"name": "Some GPU"}}
    recorder = Recorder(store, name, lambda machine: about)
    recorder.add(*rows)
    recorder.finish(complete=complete)
    return store
