"""The command ``python -m fa_numba compile``, which compiles kernels before calls need them."""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator
from typing import Any

import fa_numba
from fa_numba import bounds
from fa_numba.bounds import Device
from fa_numba.choices.units import UNITS
from fa_numba.commands.arguments import MAX_SEQLEN, dtype, saying, whole
from fa_numba.commands.plan import default_dtype
from fa_numba.device import kernel_cache
from fa_numba.host.ahead import compile_ahead
from fa_numba.host.plans import Plan
from fa_numba.io_model import ALGORITHMS
from fa_numba.problem import MAX_HEAD_DIM
from fa_numba.typing import Passes

NAME = "compile"
HELP = "compile kernels for a list of shapes, in parallel, before attention calls need the kernels"
DESCRIPTION = """\
Compile the kernels of attention calls in parallel, and store the kernels on disk. Without the
command compile, the first call with new shapes or options compiles kernels, which takes some
seconds. The command compile compiles kernels for every combination of the values that you give. If
you name a GPU with --device, the command compile needs no GPU, and can run on the login node of a
cluster.

Example: python -m fa_numba compile --seqlen 1k 4k 16k --head-dim 64 128 --device H100"""

_MOST = 65535
_MASKS: dict[str, tuple[bool, ...]] = {"no": (False,), "yes": (True,), "both": (False, True)}
_PASSES: dict[str, tuple[Passes, ...]] = {
    "fwd": ("fwd",),
    "bwd": ("bwd",),
    "both": ("fwd", "bwd"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    calls = parser.add_argument_group("the calls")
    number = whole(1, _MOST)
    calls.add_argument(
        "--seqlen",
        type=whole(1, MAX_SEQLEN),
        nargs="+",
        required=True,
        metavar="N",
        help="sequence lengths of q, k and v, such as 1k 4k (1024 and 4096)",
    )
    calls.add_argument(
        "--head-dim",
        type=whole(1, MAX_HEAD_DIM),
        nargs="+",
        required=True,
        metavar="D",
        help=f"head dimensions of q, k and v, 1 to {MAX_HEAD_DIM}",
    )
    calls.add_argument(
        "--dtype",
        type=dtype,
        nargs="+",
        metavar="DTYPE",
        help="dtypes of q, k and v (default: float16 if the GPU has kernels for float16, else "
        "float32)",
    )
    calls.add_argument(
        "--batch", type=number, default=1, metavar="B", help="batch size (default: 1)"
    )
    calls.add_argument(
        "--heads", type=number, default=16, metavar="H", help="number of query heads (default: 16)"
    )
    calls.add_argument(
        "--heads-k",
        type=number,
        metavar="H",
        help="number of heads of k and v, a divisor of --heads (default: --heads)",
    )
    calls.add_argument(
        "--causal",
        choices=tuple(_MASKS),
        default="both",
        help="compile for calls without a causal mask (no), with a causal mask (yes), or both "
        "(default: both)",
    )
    calls.add_argument(
        "--passes",
        choices=tuple(_PASSES),
        default="both",
        help="compile for the forward pass (fwd), the backward pass (bwd), or both (default: both)",
    )
    calls.add_argument(
        "--algorithm",
        choices=ALGORITHMS,
        nargs="+",
        default=["fa2"],
        help="algorithms to compile: standard attention, fa1 or fa2 (default: fa2)",
    )
    calls.add_argument(
        "--unit",
        choices=("auto", *UNITS),
        default="auto",
        help="which instructions multiply matrices (default: auto, the unit that attention calls "
        "choose)",
    )
    parser.add_argument(
        "--device",
        type=saying(bounds.named),
        metavar="GPU",
        help=f"GPU to compile for: {', '.join(bounds.DEVICES)} (default: the GPU of this machine)",
    )
    parser.add_argument(
        "--jobs",
        type=whole(1, 1024),
        metavar="N",
        help="number of processes that compile (default: one per CPU core)",
    )


def run(args: argparse.Namespace) -> str:
    """Compile the kernels, and return one line of text about them.

    The line contains the number of kernels that were compiled now, the number of kernels that were
    stored on disk before, and the folder of the stored kernels.

    Raise ValueError for a call that cannot be planned, and if there is no GPU to compile for.
    """
    gpu = args.device or bounds.here()
    if gpu is None:
        raise ValueError(
            "--device must name the GPU to compile for, because this machine has no GPU that "
            f"fa_numba can use: {', '.join(bounds.DEVICES)}"
        )
    begin = time.perf_counter()
    plans = list(_plans(args, gpu))
    found = compile_ahead(plans, args.jobs)
    seconds = time.perf_counter() - begin
    return (
        f"{gpu.name}: compiled {found.compiled} kernels for {len(plans)} calls in {seconds:.1f} s; "
        f"{found.stored} kernels were stored before, in {kernel_cache.directory()}"
    )


def _plans(args: argparse.Namespace, gpu: Device) -> Iterator[Plan]:
    """Yield the plan of each call that the arguments name."""
    dtypes = args.dtype or [default_dtype(gpu)]
    combinations = itertools.product(
        args.algorithm, dtypes, args.head_dim, args.seqlen, _MASKS[args.causal],
        _PASSES[args.passes],
    )  # fmt: skip
    for algorithm, name, d, n, causal, passes in combinations:
        q_shape = (args.batch, args.heads, n, d)
        k_shape = (args.batch, args.heads_k or args.heads, n, d)
        how: dict[str, Any] = {"algorithm": algorithm, "dtype": name, "unit": args.unit}
        # Training needs the logsumexp, and other calls do not.
        for return_lse in (False, True) if passes == "fwd" else (False,):
            with gpu.planning():
                yield fa_numba.plan(
                    q_shape, k_shape, causal=causal, passes=passes, return_lse=return_lse, **how
                )
