"""What tests of experiments share: an experiment timed where there is no GPU, and its recording."""

import fa_numba
from experiments.lab.measure import peers, timing
from experiments.lab.record.store import Recorder, Store


def time_on_the_emulator(monkeypatch, experiment):
    """The emulator is the experiment's GPU: every call is checked, and the nth takes n ms."""
    ran = []

    def time_call(run, check):
        check(run())
        ran.append(run)
        return timing.Timing(float(len(ran)), 1.0, 2.0, 20, 0.0)

    def on_device(arrays, dtype="float32"):
        return tuple(x.astype(dtype) for x in arrays)

    monkeypatch.setattr(experiment, "time_call", time_call)
    monkeypatch.setattr(peers, "on_device", on_device)
    monkeypatch.setattr(fa_numba.device, "release_memory", lambda: None)
    monkeypatch.setattr(experiment.precompile, "compile_ahead", lambda calls, bench: list(calls))


def recorded(folder, experiment, rows):
    """A store in `folder` with a complete recording of the experiment: `rows`."""
    store = Store(folder)
    about = {"commit": "a" * 40, "date": "2026-01-01", "device": {"name": "Some GPU"}}
    recorder = Recorder(store, experiment.NAME, lambda machine: about)
    recorder.add(*rows)
    recorder.finish(complete=True)
    return store
