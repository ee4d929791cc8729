"""Measures the forward speed in 8 bits (float8_e4m3fn) on Hopper, next to fp16 and bf16.

The setting is FA-2's: 16k tokens and hidden dimension 2048. Both loop orders run, FA-1 with query
splits. q, k and v have one scale for each head. The time of `fa_numba.quantize` for q, k and v is
measured separately, and also the speed at which torch multiplies matrices in 8 bits. cuDNN's
attention in 8 bits is also timed, if cuDNN's Python interface is installed.

Hardware counters say how busy three units of a multiprocessor are during FA-2's kernel: the tensor
cores, the unit for exponentials, and the schedulers that issue instructions.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import Any

import fa_numba
from fa_numba.dtypes import E4M3
from fa_numba.io_model import flops
from fa_numba.problem import Problem

from .lab.measure import counters, cudnn_fp8, peers
from .lab.measure.bandwidth import MATMUL_SIZE, REPEATS
from .lab.measure.series import HOPPER, HOPPER_SPLITS, columns
from .lab.measure.series import LABELS as SERIES_LABELS
from .lab.measure.speeds import DTYPES
from .lab.measure.timing import SECONDS, Timing, attempt, number, time_call, timing_rows
from .lab.measure.workloads import SEQLENS, fa2_setting
from .lab.record import Bench, Options, Row, values
from .lab.show import style, tables

NAME = "speed_fp8"
NEEDS = ("GPU", "torch")
TAKES: tuple[str, ...] = ()

HEAD_DIMS = (64, 128, 256)
NAMES = {**DTYPES, E4M3.name: "e4m3"}
# What is timed for each problem: series and dtype. QUANTIZE converts q, k and v.
QUANTIZE = "quantize"
TIMED = (
    (HOPPER, E4M3.name),
    (HOPPER, "float16"),
    (HOPPER, "bfloat16"),
    (HOPPER_SPLITS, E4M3.name),
    (HOPPER_SPLITS, "float16"),
    (QUANTIZE, E4M3.name),
)
LABELS = SERIES_LABELS | {cudnn_fp8.SERIES: "cuDNN"}
PEER = (cudnn_fp8.SERIES, E4M3.name)
SHOWN = (*TIMED[:-1], PEER)
# Maps a metric to its hardware counter, which is a share of all cycles.
BUSY = {
    "tensor": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "exponentials": "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_elapsed",
    "issue": "sm__issue_active.avg.pct_of_peak_sustained_elapsed",
}
COUNTED = tuple(
    fa2_setting(N, 128, causal, dtype=dtype)
    for dtype in (E4M3.name, "float16")
    for N in (4096, 16384)
    for causal in (False, True)
)
# Largest relative difference of the outputs in e4m3 and in fp16, for normally distributed inputs.
NEAR = 0.1


def measure(options: Options, bench: Bench) -> Iterator[Row | Sequence[Row]]:
    """Yield times and speeds of calls, the speed of torch's matrix product, and counters."""
    lengths, dims = (SEQLENS[:1], HEAD_DIMS[:1]) if options.quick else (SEQLENS, HEAD_DIMS)
    size = MATMUL_SIZE
    timing, failure = attempt(matmul)
    one = Problem(1, 1, 1, 1, 1, 1, dtype=E4M3.name)
    sizes = {"seqlen_q": size, "seqlen_k": size, "head_dim": size, "note": failure}
    common = columns(NAME, peers.MATMUL, one, bench.machine, **sizes)
    yield Row(metric="speed", unit="TFLOP/s", **number(timing), **common)
    peer = (PEER,) if cudnn_fp8.library() is not None else ()
    if not peer:
        bench.say(f"  cuDNN's attention in 8 bits is not measured: {cudnn_fp8.PACKAGE} is missing")
    cases = [
        (fa2_setting(N, d, causal, dtype=dtype), series)
        for d in dims
        for causal in (False, True)
        for N in lengths
        for series, dtype in (*TIMED, *peer)
    ]
    for problem, series in bench.each(cases, "timing"):
        timing, failure = attempt(timed, problem, series)
        yield rows_of(timing, failure, problem, series, bench.machine)
    if not options.quick:
        yield from busy(bench)


def busy(bench: Bench) -> Iterator[Row]:
    """Yield the share of all cycles in which each unit works during FA-2's forward kernel.

    BUSY lists the units.
    """
    cases = [counters.Case(HOPPER, problem) for problem in COUNTED]
    try:
        found = counters.count_kernels(cases, tuple(BUSY.values()))
    except counters.CountersError as error:
        bench.say(f"  no hardware counters: {error}")
        return
    for problem, kernels in zip(COUNTED, found, strict=True):
        # In e4m3, the first kernel stores V by columns. The last kernel is the forward kernel.
        last = kernels if isinstance(kernels, str) else kernels[-1]
        for metric, name in BUSY.items():
            value, why = counters.read(last, itemgetter(name))
            common = columns(NAME, HOPPER, problem, bench.machine, note=why)
            yield Row(metric=metric, unit="1", value=value, **common)


def rows_of(
    timing: Timing | None, failure: str, problem: Problem, series: str, machine: str | None
) -> list[Row]:
    """Return the rows of one call: its time, and for attention also its speed."""
    common = columns(NAME, series, problem, machine, note=failure)
    if timing is None or series == QUANTIZE:
        return [Row(metric="time", unit="ms", **number(timing), **common)]
    return list(timing_rows(timing, problem, **common))


def timed(problem: Problem, series: str) -> Timing:
    """Return the timing of one call on the GPU, after a check of its result."""
    if series == QUANTIZE:
        return time_call(lambda out=None: quantized(problem), lambda out: float("nan"))
    call = call_of(problem, series)
    return time_call(call, lambda out: check(out, problem, series), seconds=SECONDS)


def call_of(problem: Problem, series: str) -> Callable[..., Any]:
    """Return a function that runs a call of attention; its argument `out` gets the output."""
    if series == cudnn_fp8.SERIES:
        largest = float(half_output(problem).abs().max())
        q, k, v = inputs(problem.q_shape)
        return cudnn_fp8.call(problem, q, k, v, largest)
    given: dict[str, Any] = {"causal": problem.causal, "unit": "wgmma"}
    attention: Callable[..., Any] = fa_numba.flash_attention_2
    if series == HOPPER_SPLITS:
        attention = fa_numba.flash_attention_1
        here = sys.modules["torch"].cuda.get_device_properties(None).multi_processor_count
        given["query_splits"] = -(-here // (problem.batch * problem.heads_q))
    if problem.dtype == E4M3.name:
        found = quantized(problem)
        arrays = [stored for stored, _ in found]
        given |= {f"{x}_scale": scale for x, (_, scale) in zip("qkv", found, strict=True)}
    else:
        dtype = getattr(sys.modules["torch"], problem.dtype)
        arrays = [x.to(dtype) for x in inputs(problem.q_shape)]
    return lambda out=None: attention(*arrays, out=out, **given)


@lru_cache(maxsize=1)
def inputs(shape: tuple[int, ...]) -> list[Any]:
    """Return q, k and v of a shape as torch tensors in float16 on the GPU."""
    torch = sys.modules["torch"]
    made = torch.Generator("cuda").manual_seed(0)
    options = {"generator": made, "device": "cuda", "dtype": torch.float32}
    return [torch.randn(shape, **options).half() for _ in "qkv"]


def quantized(problem: Problem) -> list[tuple[Any, Any]]:
    """Return q, k and v in e4m3 with their scales, as pairs (stored numbers, scales)."""
    return [fa_numba.quantize(x, per="head") for x in inputs(problem.q_shape)]


def half_output(problem: Problem) -> Any:
    """Return the output of FA-2 in fp16 for the same inputs."""
    return fa_numba.flash_attention_2(*inputs(problem.q_shape), causal=problem.causal)


def check(out: Any, problem: Problem, series: str) -> float:
    """Return the relative difference of an output from fp16's. Raise ValueError if it is large."""
    half = half_output(problem).float()
    error = float((out.float() - half).norm() / half.norm())
    if not error <= NEAR:
        raise ValueError(f"{series} in {problem.dtype} differs from fp16 by {error:.2g}")
    return error


def matmul() -> Timing:
    """Return the speed in TFLOP/s at which torch (cuBLAS) multiplies square e4m3 matrices."""
    torch, n = sys.modules["torch"], MATMUL_SIZE
    one = torch.ones((), device="cuda")
    A, B = (torch.randn(n, n, device="cuda").to(torch.float8_e4m3fn) for _ in "AB")

    def multiply(out: Any = None) -> Any:
        return torch._scaled_mm(A, B.t(), one, one, out_dtype=torch.bfloat16)

    found, work = time_call(multiply, lambda out: float("nan"), REPEATS), 2e-9 * n**3
    return Timing(work / found.median, work / found.p80, work / found.p20, found.n)


Key = tuple[str, str, int, bool]


def speeds(rows: Sequence[Row]) -> dict[Key, dict[int, float]]:
    """Return {(series, dtype, head dimension, causal): {N: TFLOP/s}}."""
    found: dict[Key, dict[int, float]] = {}
    at = ("series", "dtype", "head_dim", "causal", "seqlen_q")
    for (*key, N), value in values(rows, *at, metric="speed").items():
        if key[0] != peers.MATMUL:
            found.setdefault(tuple(key), {})[N] = value
    return found


def draw(rows: Sequence[Row]) -> Any:
    """Draw the speed over N for each head dimension, without a mask. Return None without rows."""
    found = {key: of for key, of in speeds(rows).items() if not key[3]}
    dims = sorted({key[2] for key in found})
    if not dims:
        return None
    figure, (axes,) = style.new(1, len(dims), 4.2, sharey=True)
    for d, ax in zip(dims, axes, strict=True):
        for series, dtype in SHOWN:
            of = found.get((series, dtype, d, False))
            if of:
                look = {"ls": "-" if dtype == E4M3.name else "--" if dtype == "float16" else ":"}
                label = f"{LABELS[series]}, {NAMES[dtype]}"
                style.line(ax, dict(sorted(of.items())), series, label=label, **look)
        style.sizes(ax, sorted({N for of in found.values() for N in of}), "sequence length N")
        ax.set_title(f"d={d}")
    axes[0].set(ylabel="TFLOP/s", ylim=(0, None))
    gains = gain(speeds(rows))
    message = "FA-2 in 8 bits"
    if gains:
        message = f"FA-2 in e4m3 is up to {max(gains.values()):.2f} times as fast as fp16"
    style.legend(figure, list(style.handles(axes).values()), message, 3)
    return figure


def gain(found: dict[Key, dict[int, float]]) -> dict[tuple[int, bool, int], float]:
    """Return {(head dimension, causal, N): FA-2's speed in e4m3 / FA-2's speed in fp16}."""
    return {
        (d, causal, N): speed / found[HOPPER, "float16", d, causal][N]
        for (series, dtype, d, causal), of in found.items()
        if (series, dtype) == (HOPPER, E4M3.name)
        for N, speed in of.items()
        if N in found.get((HOPPER, "float16", d, causal), {})
    }


def table(rows: Sequence[Row]) -> tables.Table | None:
    """Return the table of speeds in TFLOP/s, or None without rows."""
    found = speeds(rows)
    if not found:
        return None
    at = ("head_dim", "causal", "seqlen_q")
    conversions = values(rows, *at, metric="time", series=QUANTIZE)
    times = values(rows, *at, metric="time", series=HOPPER, dtype=E4M3.name)
    lines = []
    for d, causal, N in sorted({(*key[2:], N) for key, of in found.items() for N in of}):
        cells = [
            tables.number(found.get((series, dtype, d, causal), {}), N, ".0f")
            for series, dtype in SHOWN
        ]
        with_it = {}
        if (d, causal, N) in times and (d, causal, N) in conversions:
            problem = fa2_setting(N, d, causal, dtype=E4M3.name)
            with_it[N] = flops(problem) / 1e9 / (times[d, causal, N] + conversions[d, causal, N])
        lines.append([str(d), tables.yes_no(causal), style.short(N), *cells,
                      tables.number(with_it, N, ".0f")])  # fmt: skip
    names = [f"{LABELS[series]}, {NAMES[dtype]}" for series, dtype in SHOWN]
    header = ["d", "causal", "N", *names, "FA-2, e4m3, with quantize"]
    peak = values(rows, "series", metric="speed", series=peers.MATMUL)
    said = f" torch multiplies e4m3 matrices at {max(peak.values()):.0f} TFLOP/s." if peak else ""
    caption = (
        "The table of 8-bit speeds contains the speed of forward calls in TFLOP/s. The time for "
        "storing v by columns is included. The time for converting q, k and v is included only in "
        f"the last column.{said}"
    )
    return tables.of(caption, header, lines)


def units(rows: Sequence[Row]) -> tables.Table | None:
    """Return the table of busy units. Return None if there are no hardware counters."""
    at = ("dtype", "causal", "seqlen_q")
    found = {metric: values(rows, *at, metric=metric, series=HOPPER) for metric in BUSY}
    lines = [
        [NAMES[dtype], tables.yes_no(causal), style.short(N)]
        + [tables.number(of, (dtype, causal, N), ".0%") for of in found.values()]
        for dtype, causal, N in sorted(found["tensor"])
    ]
    if not lines:
        return None
    header = ["dtype", "causal", "N", "tensor cores", "exponentials", "instructions issued"]
    caption = (
        "The table of busy units is about FA-2's forward kernel at d=128. For each unit, it "
        "shows the share of a multiprocessor's cycles in which the unit works, measured with "
        "hardware counters. The unit for exponentials also converts numbers. The last column is "
        "the share of the cycles in which a scheduler of the multiprocessor issues an instruction."
    )
    return tables.of(caption, header, lines)


TABLES = {"speed_fp8_units": units}
