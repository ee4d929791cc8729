"""The program that Nsight Compute profiles: it runs each call of a list once.

    python -m experiments.lab.measure.counter_target --algorithm fa2 --seqlen 1024
    python -m experiments.lab.measure.counter_target --cases cases.json --kernels kernels.json

A call is warmed up before the profiled range, which holds its kernels and nothing else. `--kernels`
gets a JSON list: for each call how many kernels it launched, or why it failed.
"""

import argparse
import json
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
    """Run the case in the profiled range; gives how many kernels it launched."""
    sizes = case.batch, case.heads, case.heads, case.seqlen, case.seqlen, case.head_dim
    problem = Problem(*sizes, dtype=case.dtype, causal=case.causal)
    options: dict[str, Any] = {
        "algorithm": case.algorithm,
        "unit": case.unit or ("simt" if case.dtype == "float32" else "mma"),
        "causal": case.causal,
    }
    if case.Br is not None and case.Bc is not None:
        options["tiles"] = fa_numba.Tiles(case.Br, case.Bc, case.threads, case.stages)
    if case.query_splits != 1:
        options["query_splits"] = case.query_splits
    if case.warp_partition != "rows":
        options["warp_partition"] = case.warp_partition
    if case.dropout_p:
        options["dropout_p"] = case.dropout_p
    if case.ablate:
        options["ablate"] = tuple(case.ablate)
    if (case.algorithm, case.passes) == ("fa2", "fwd"):
        options["kv_splits"] = 1  # the papers' grid, as in the calls that are timed
    rows = case.rows or case.seqlen
    q_shape = (*problem.q_shape[:2], rows, case.head_dim)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", type=Path, help="JSON list of calls, instead of the options")
    parser.add_argument("--kernels", type=Path, help="where to write the kernel counts")
    parser.add_argument("--algorithm", default="fa2", choices=["standard", "fa1", "fa2"])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=1)
    parser.add_argument("--seqlen", type=int, default=1024)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--Br", type=int, help="rows of a tile, with --Bc; the plan's own without")
    parser.add_argument("--Bc", type=int, help="columns of a tile, with --Br")
    parser.add_argument("--threads", type=int, help="of a block, with --Br and --Bc")
    parser.add_argument("--stages", type=int, default=1, help="of K and V, with --Br and --Bc")
    parser.add_argument("--query-splits", type=int, default=1, help="fa1: thread blocks a head")
    parser.add_argument("--warp-partition", default="rows", choices=["rows", "keys"])
    parser.add_argument("--ablate", nargs="*", default=[], metavar="MEASURE", help="left out")
    parser.add_argument("--rows", type=int, help="of q; all without")
    parser.add_argument("--dropout-p", type=float, default=0.0, metavar="P")
    parser.add_argument("--passes", default="fwd", choices=["fwd", "bwd"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "float16"])
    parser.add_argument("--unit", help="simt or mma by dtype without")
    args = vars(parser.parse_args())
    cases_file, kernels_file = args.pop("cases"), args.pop("kernels")
    if cases_file:
        cases = [Case(**case) for case in json.loads(cases_file.read_text("utf-8"))]
    else:
        try:
            cases = [Case(**args)]
        except ValueError as error:
            parser.error(str(error))
    arrays = Arrays()
    kernels: list[int | str] = []
    for case in cases:
        launched, failure = attempt(run, case, arrays)
        kernels.append(failure or launched)
    if kernels_file:
        kernels_file.write_text(json.dumps(kernels), "utf-8")


if __name__ == "__main__":
    main()
