"""The program that Nsight Compute profiles: one run of each call of a list is profiled.

    python -m experiments.lab.measure.counter_target CASES KERNELS

CASES is a file with a pickled list of `counters.Case`. Each call is warmed up before the profiled
range. Therefore the range contains only the kernels of the call. The program writes a JSON file to
KERNELS, with two entries. "counts" has one item per call: the number of kernels that the call
launched, or the reason why the call failed. "ran" contains digests of these kernels, as
`record.ran` makes them.
"""

import json
import pickle
import sys
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from fa_numba import device
from fa_numba.dtypes import E4M3
from fa_numba.problem import Problem

from ..record import ran
from . import series
from .counters import Case
from .timing import attempt
from .workloads import Inputs

_INPUTS = Inputs(gradient=True)


@lru_cache(1)
def arrays_of(problem: Problem) -> tuple[Any, ...]:
    """Return q, k, v and dout of a problem on the GPU. The last problem's arrays are cached."""
    return tuple(_on_gpu(x.astype(problem.dtype)) for x in _INPUTS(problem))


def _on_gpu(array: Any) -> Any:
    if array.dtype.name != E4M3.name:
        return device.to_gpu(array)
    # Numba has no arrays of 8-bit floats. torch is imported here, because it is seldom needed.
    import torch

    bits = torch.from_numpy(array.view(np.uint8)).cuda()
    return bits.view(torch.float8_e4m3fn)


def run(case: Case) -> int:
    """Warm up the call of a case, profile one run of it, and return the number of its kernels."""
    q, k, v, dout = arrays_of(replace(case.problem, causal=False))  # the inputs need no mask
    of = case.series, case.problem
    planned = series.plan(*of, passes=case.pass_, **case.options)
    if case.pass_ == "fwd":
        call = series.call(*of, q, k, v, **case.options)
        call = partial(call, out=call())
    else:  # after a forward pass with the plan's choices, which must drop the same elements
        before = {name: x for name, x in case.options.items() if name == "dropout_p"}
        call = series.gradients(*of, "bwd", q, k, v, dout, before=before, **case.options)
        call()
    device.synchronize()
    device.profile_start()
    made = call()
    device.synchronize()
    device.profile_stop()
    del made  # kept until here, so that no memory is freed within the profiled range
    return len(planned.kernels)


def main(cases: str, kernels: str) -> None:
    """Run the cases in the file `cases`, and write the JSON file `kernels`; see the module."""
    found: list[int | str] = []
    with ran.collecting() as collected:
        for case in pickle.loads(Path(cases).read_bytes()):
            launched, failure = attempt(run, case)
            found.append(failure or launched)
    told = {"counts": found, "ran": collected.of("gpu")}
    Path(kernels).write_text(json.dumps(told), "utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
