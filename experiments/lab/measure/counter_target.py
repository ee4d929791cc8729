"""The program that Nsight Compute profiles: it runs each call of a list once.

    python -m experiments.lab.measure.counter_target CASES KERNELS

CASES is a JSON list of `counters.Case`. A call is warmed up before the profiled range, which holds
its kernels and nothing else. KERNELS gets a JSON list: for each call how many kernels it launched,
or why it failed.
"""

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import fa_numba
from fa_numba import device
from fa_numba.problem import Problem

from .counters import Case
from .timing import attempt
from .workloads import Inputs


class Arrays:
    """q, k, v and dout of a problem on the GPU, kept for the next case where it is of the same."""

    def __init__(self) -> None:
        self._inputs = Inputs(gradient=True)
        self._of: Problem | None = None
        self._kept: tuple[Any, ...] = ()

    def __call__(self, problem: Problem) -> tuple[Any, ...]:
        problem = replace(problem, causal=False)  # of the arrays that says nothing
        if problem != self._of:
            self._kept = ()  # before there are others
            host = self._inputs(problem)
            self._kept = tuple(device.to_gpu(x.astype(problem.dtype)) for x in host)
            self._of = problem
        return self._kept


def run(case: Case, arrays: Arrays) -> int:
    batch, heads, seqlen, head_dim = case.sizes
    problem = Problem(
        batch, heads, heads, seqlen, seqlen, head_dim, dtype=case.dtype, causal=case.causal
    )
    options: dict[str, Any] = {
        "algorithm": case.algorithm,
        "unit": case.unit or ("simt" if case.dtype == "float32" else "mma"),
        "causal": case.causal,
        **{name: tuple(x) if isinstance(x, list) else x for name, x in case.options.items()},
    }
    if case.tiles is not None:
        options["tiles"] = fa_numba.Tiles(*case.tiles)  # type: ignore[arg-type]
    if (case.algorithm, case.passes) == ("fa2", "fwd"):
        options["kv_splits"] = 1  # the papers' grid, as in the calls that are timed
    rows = case.rows or seqlen
    q_shape = (*problem.q_shape[:2], rows, head_dim)
    planned = fa_numba.plan(
        q_shape, problem.k_shape, dtype=case.dtype, passes=case.passes, **options
    )
    q, k, v, dout = arrays(problem)
    q, dout = q[:, :, :rows], dout[:, :, :rows]
    if case.passes == "fwd":
        out = fa_numba.attention(q, k, v, **options)
        call = partial(fa_numba.attention, q, k, v, out=out, **options)
    else:
        kept = ("algorithm", "unit", "causal", "dropout_p")
        given = {name: options[name] for name in kept if name in options}
        out, lse = fa_numba.attention(q, k, v, return_lse=True, **given)
        call = partial(fa_numba.attention_backward, dout, q, k, v, out, lse, **options)
        call()
    device.synchronize()
    device.profile_start()
    made = call()
    device.synchronize()
    device.profile_stop()
    del made  # alive until then: no allocation is given back within the range
    return len(planned.kernels)


def main(cases: str, kernels: str) -> None:
    arrays = Arrays()
    found: list[int | str] = []
    for case in json.loads(Path(cases).read_text("utf-8")):
        launched, failure = attempt(lambda case=case: run(Case(**case), arrays))
        found.append(failure or launched)
    Path(kernels).write_text(json.dumps(found), "utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
