"""Measures the error of kernels against float64 (claims C1, C2; FlashAttention-3 paper).

The kernels are standard attention and both loop orders on CUDA cores and on mma, torch's kernels,
and the safe and the online softmax. N goes from 128 to 16384, in fp32 (also by planes of 16 bits),
fp16 and bf16. The inputs are normal, or have outliers as in the FlashAttention-3 paper. Further
calls by planes have longer N, larger head dimensions or very large scores. The tables have the root
mean square error (RMSE) and the largest error. A further table compares results bit for bit: flash
attention with standard attention, and online softmax with safe softmax.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

import fa_numba
from fa_numba import device, reference
from fa_numba.problem import Problem

from .lab.measure import calls, peers
from .lab.measure.check import ROUNDING, to_host
from .lab.measure.series import LABELS, PLANES, columns, precision
from .lab.measure.speeds import DTYPES
from .lab.measure.timing import attempt
from .lab.measure.workloads import SEED, held
from .lab.record import Bench, Options, Row, nested, published_numbers
from .lab.show import style, tables

NAME = "numerics"
NEEDS = ("GPU",)
TAKES: tuple[str, ...] = ()
HEADS, HEAD_DIM, VECTORS = 4, 64, 64
SEQLENS = tuple(128 << n for n in range(8))
QUICK_SEQLENS = (128, 1024)
NORMAL, OUTLIERS, LARGE = "normal", "outliers", "scores of 10^4"
# Outliers as in FA-3: a number from N(0, 1), to which with probability 0.001 a number with standard
# deviation 10 is added. SCORES is the factor of q for large scores.
CHANCE, DEVIATION, SCORES = 0.001, 10.0, 1e4
# Further problems (kind of inputs, d, N) for float32 by planes of 16 bits and plain float32.
PLANES_AT = ((NORMAL, 64, 65536), (NORMAL, 256, 4096), (OUTLIERS, 256, 4096), (LARGE, 64, 4096))
SAMPLED = 128  # rows of a head that are computed in float64
PROTOCOL = (
    f"{HEADS} heads, results held against float64 of the same rounded inputs on {SAMPLED} rows "
    "of each head, spread evenly; softmaxes of vectors in fp32; shares of equal elements are of "
    "whole results"
)
OURS = {
    "float32": ("standard-simt", "fa1-simt", "fa2-simt"),
    **dict.fromkeys(("float16", "bfloat16"), ("standard-mma", "fa1-mma", "fa2-mma")),
}
_THEIRS = (peers.UNFUSED, peers.FLASH, peers.CUDNN, peers.EFFICIENT)
THEIRS = {"float32": (peers.UNFUSED, peers.EFFICIENT), "float16": _THEIRS, "bfloat16": _THEIRS}
SAFE, ONLINE = "softmax-safe", "softmax-online"


def inputs(kind: str, problem: Problem) -> tuple[np.ndarray, ...]:
    """Return random q, k and v in float32 that the problem's dtype represents exactly.

    The numbers are normal. If `kind` is OUTLIERS, a few numbers are much larger. If `kind` is
    LARGE, q is multiplied by SCORES.
    """
    rng = np.random.default_rng([SEED, problem.seqlen_q, problem.head_dim])
    q, k, v = (_drawn(rng, kind, s) for s in (problem.q_shape, problem.k_shape, problem.k_shape))
    if kind == LARGE:  # the standard deviation of q k^T / sqrt(d) equals the one of q
        q *= np.float32(SCORES)
    return tuple(held(x, problem.dtype) for x in (q, k, v))


def _drawn(rng: np.random.Generator, kind: str, shape: tuple[int, ...]) -> np.ndarray:
    values = rng.standard_normal(shape, np.float32)
    if kind == OUTLIERS:
        chosen = rng.random(shape) < CHANCE
        values += chosen * np.float32(DEVIATION) * rng.standard_normal(shape, np.float32)
    return values


def series_of(problem: Problem, kind: str) -> tuple[str, ...]:
    """Return our series that are measured for a problem with inputs of a kind.

    For the problems in PLANES_AT, these are FA-2's series only, which differ in their precision.
    """
    if (kind, problem.head_dim, problem.seqlen_q) in PLANES_AT:
        return ("fa2-simt", *PLANES)
    return OURS[problem.dtype] + (PLANES if problem.dtype == "float32" else ())


def errors_of(got: np.ndarray, right: np.ndarray) -> dict[str, float]:
    """Return three errors of a result: relative, root mean square, and largest.

    The relative error is the norm of the difference divided by the norm of `right`.
    """
    off = np.abs(got - right)
    return {
        "error": reference.relative_error(got, right),
        "rmse": float(np.sqrt(np.mean(off**2))),
        "max_error": float(off.max()),
    }


def measure(options: Options, bench: Bench) -> Iterator[Row]:
    """Yield the errors of attention kernels and of two softmaxes, compared with float64."""
    long = QUICK_SEQLENS if options.quick else SEQLENS
    dtypes = tuple(OURS)
    if not peers.available():
        bench.say("  no torch with CUDA here: neither its kernels nor bf16 are measured")
        dtypes = dtypes[:2]
    kinds = (NORMAL, OUTLIERS)
    cases = [
        (Problem(1, HEADS, HEADS, N, N, HEAD_DIM, dtype=dtype), kind)
        for dtype, kind, N in itertools.product(dtypes, kinds, long)
    ]
    if not options.quick:
        cases += [(Problem(1, HEADS, HEADS, N, N, d), kind) for kind, d, N in PLANES_AT]
    cases += [(Problem(VECTORS, 1, 1, V, V, 1), kind) for kind in kinds for V in long]
    for problem, kind in bench.each(cases, "comparing with float64"):
        yield from _rows_of(problem, kind, bench.machine)
        device.release_memory()
        peers.release()


def _rows_of(problem: Problem, kind: str, machine: str) -> Iterator[Row]:
    make = _softmaxes if problem.head_dim == 1 and problem.batch > 1 else _attention
    found: dict[str, np.ndarray] = {}
    for series, run, errors, ordinary in make(problem, kind):
        out, failure = attempt(run)
        if failure:
            common = columns(NAME, series, problem, machine, note=f"{kind}; {failure}")
            yield Row(metric="error", unit="1", value=None, **common)
            continue
        found[series] = out
        values = errors(out)
        if ordinary in found and ordinary != series:
            values["identical"] = float(np.mean(out == found[ordinary]))
        for metric, value in values.items():
            common = columns(NAME, series, problem, machine, note=kind)
            yield Row(metric=metric, unit="1", value=float(f"{value:.3g}"), **common)


Made = tuple[str, Callable[[], np.ndarray], Callable[[np.ndarray], dict[str, float]], str]


def _attention(problem: Problem, kind: str) -> Iterator[Made]:
    q, k, v = host = inputs(kind, problem)
    arrays, N = peers.on_device(host, problem.dtype), problem.seqlen_q
    some = np.unique(np.linspace(0, N - 1, min(N, SAMPLED)).astype(int))
    right: Any = reference.attention(q[:, :, some], k, v)

    def errors(out: np.ndarray) -> dict[str, float]:
        return errors_of(out[:, :, some].astype(np.float64), right)

    ours = series_of(problem, kind)
    others = THEIRS[problem.dtype] if OURS[problem.dtype][0] in ours else (peers.EFFICIENT,)
    for series in (*ours, *(others if peers.available() else ())):
        ordinary = peers.UNFUSED if calls.theirs(series) else ours[0]
        run = partial(_output, series, problem, arrays)
        yield series, run, errors, ordinary


def _output(series: str, problem: Problem, arrays: Sequence[Any]) -> np.ndarray:
    return to_host(calls.make(series, "fwd", problem, arrays)())


def _softmaxes(problem: Problem, kind: str) -> Iterator[Made]:
    rng = np.random.default_rng([SEED, problem.seqlen_q])
    x = _drawn(rng, kind, (problem.batch, problem.seqlen_q))
    wide = x.astype(np.float64)
    right = np.exp(wide - wide.max(axis=1, keepdims=True))
    right /= right.sum(axis=1, keepdims=True)

    def run(algorithm: str) -> np.ndarray:
        return to_host(fa_numba.softmax(peers.on_device((x,))[0], algorithm=algorithm))

    for series in (SAFE, ONLINE):
        algorithm = series.removeprefix("softmax-")
        yield series, partial(run, algorithm), partial(errors_of, right=right), SAFE


Found = dict[tuple[str, str, str, str], dict[int, float]]


def curves(rows: Sequence[Row]) -> Found:
    """Return the errors as {(dtype, kind of inputs, series, metric): {N: value}}, at d=64.

    The softmaxes of vectors are included. Their N is the length of a vector.
    """
    mine = [r for r in rows if r.head_dim in (1, HEAD_DIM)]
    mine.sort(key=lambda row: row.seqlen_q)
    return nested(mine, lambda row: (row.dtype, row.place, row.series, row.metric), "seqlen_q")


_KINDS = {NORMAL: "normal inputs", OUTLIERS: "inputs with outliers"}
# The torch kernel that is drawn. The lines of the other torch kernels would lie on this kernel's
# line or on the line of our standard attention.
_DRAWN = {"float32": peers.EFFICIENT, "float16": peers.FLASH, "bfloat16": peers.FLASH}


def draw(rows: Sequence[Row]) -> Any:
    """Draw the errors over the sequence length. Return None without rows."""
    found = curves(rows)
    dtypes = [d for d, ours in OURS.items() if (d, NORMAL, ours[2], "error") in found]
    if not dtypes:
        return None
    figure, axes = style.new(2, len(dtypes), 7.0, sharex="col", sharey="col")
    for kind, across in zip((NORMAL, OUTLIERS), axes, strict=True):
        for dtype, ax in zip(dtypes, across, strict=True):
            for series in (_DRAWN[dtype], *OURS[dtype]):
                look: dict[str, Any] = {"ls": "--" if calls.theirs(series) else "-", "lw": 1.5}
                points = found.get((dtype, kind, series, "error"), {})
                style.line(ax, points, series, label=LABELS[series], ms=5, **look)
            ax.axhline(
                ROUNDING[dtype], color="#555555", lw=0.9, ls=":", label="one rounding of the dtype"
            )
            if dtype == "float32":
                ax.axhline(1e-5, color="#CC79A7", lw=1.2, ls="--", label="claimed for fp32: 10⁻⁵")
            ax.set(yscale="log", title=f"{DTYPES[dtype]}, {_KINDS[kind]}")
            lengths = {
                N
                for (of, *_, metric), line in found.items()
                if (of, metric) == (dtype, "error")
                for N in line
            }
            style.sizes(ax, sorted(lengths), "sequence length N (tokens)", 2)
        across[0].set_ylabel("relative error of O (norms)")
    halves = [
        value / found[dtype, kind, "fa2-mma", "error"][N]
        for (dtype, kind, series, metric), line in found.items()
        for N, value in line.items()
        if (series, metric) == ("standard-mma", "error")
    ]
    title = "Errors against float64"
    if halves:
        title = f"Standard attention's 16-bit error is up to {max(halves):.1f} times FA-2's"
        title += "\nagainst float64"
        if _alike(found):
            title += "; in 16 bits the lines of the fused kernels lie on each other"
    style.legend(figure, list(style.handles(axes).values()), title)
    return figure


def _alike(found: Found) -> bool:
    """Return whether the errors of the fused kernels in 16 bits differ by at most 5 %.

    Such lines look like one line in the figure.
    """
    fused = (*OURS["float16"][1:], peers.FLASH)
    errors: dict[tuple[str, str, int], list[float]] = {}
    for (dtype, kind, series, metric), line in found.items():
        if metric == "error" and dtype != "float32" and series in fused:
            for N, value in line.items():
                errors.setdefault((dtype, kind, N), []).append(value)
    return bool(errors) and all(max(found) <= 1.05 * min(found) for found in errors.values())


def paper_ratio() -> float:
    """Return the RMSE of standard attention / the RMSE of FlashAttention-2, from FA-3's Table 3."""
    where = {"paper": "fa3", "item": "Table 3", "metric": "rmse"}
    standard, ours = (
        published_numbers.value(method=m, **where) for m in ("Standard", "FlashAttention-2")
    )
    return standard / ours


def table(rows: Sequence[Row]) -> tables.Table | None:
    """Return the table of errors by dtype and kind of inputs."""
    found = curves(rows)
    every = [_line(found, dtype, kind) for dtype in OURS for kind in (NORMAL, OUTLIERS)]
    lines = [line for line in every if line]
    header = ["dtype", "inputs", "N", "run on", "RMSE, standard attention", "RMSE, FA-1"]
    header += ["RMSE, FA-2", "RMSE, torch's unfused attention", "RMSE, torch's fused kernel"]
    header += ["RMSE, standard / FA-2", "RMSE, torch's unfused / fused"]
    header += ["published RMSE, standard / FA-2", "largest error, FA-2"]
    header.append("relative error, FA-2, largest over N")
    caption = (
        "The table of rounding errors contains the measured errors of the forward result, "
        f"compared with a float64 result from equal inputs, for {HEADS} heads and d={HEAD_DIM}. In "
        "the table of rounding errors, *RMSE* is the absolute root mean square error at the "
        "longest measured N. In fp16 and bf16, *torch's fused kernel* is torch's "
        "FlashAttention-2. In fp32, *torch's fused kernel* is torch's memory-efficient attention. "
        "The ratio in the column *published RMSE, standard / FA-2* is from Table 3 of the "
        "FlashAttention-3 paper."
    )
    return tables.of(caption, header, lines)


def _line(found: Found, dtype: str, kind: str) -> list[str]:
    """Return the cells of one line of the table, for a dtype and a kind of inputs.

    The list is empty if FA-2's errors were not measured.
    """
    ours, fused = OURS[dtype], THEIRS[dtype][1]
    if not (of := found.get((dtype, kind, ours[2], "rmse"))):
        return []
    N = max(of)
    shown = (*ours, peers.UNFUSED, fused)
    rmse = {s: found.get((dtype, kind, s, "rmse"), {}).get(N) for s in shown}

    def over(a: str, b: str) -> str:
        top, bottom = rmse[a], rmse[b]
        return f"{top / bottom:.2f}" if top and bottom else tables.MISSING

    largest = found[dtype, kind, ours[2], "max_error"][N]
    worst = max(found[dtype, kind, ours[2], "error"].values())
    paper = f"{paper_ratio():.2f}" if (dtype, kind) == ("float16", OUTLIERS) else tables.MISSING
    return [
        *(DTYPES[dtype], kind, str(N), "GPU"),
        *(tables.number(rmse, s, ".1e") for s in shown),
        *(over(ours[0], ours[2]), over(peers.UNFUSED, fused), paper),
        *(f"{largest:.1e}", f"{worst:.1e}"),
    ]


# Results that are compared bit for bit: dtype, series, its name, the other series, its name.
PAIRS = (
    ("float32", ONLINE, "online softmax", SAFE, "safe softmax"),
    ("float32", "fa1-simt", "FA-1", "standard-simt", "standard attention"),
    ("float32", "fa2-simt", "FA-2", "standard-simt", "standard attention"),
    ("float16", "fa1-mma", "FA-1", "standard-mma", "standard attention"),
    ("float16", "fa2-mma", "FA-2", "standard-mma", "standard attention"),
)


def identical(rows: Sequence[Row]) -> tables.Table | None:
    """Return the table of the share of elements that are equal bit for bit in two results."""
    lines, found = [], curves(rows)
    for dtype, series, name, ordinary, other in PAIRS:
        for kind in (NORMAL, OUTLIERS):
            if shares := found.get((dtype, kind, series, "identical")):
                both = (found.get((dtype, kind, s, "error")) for s in (series, ordinary))
                cells = [f"{of[max(of)]:.1e}" if of else tables.MISSING for of in both]
                ends = [f"{100 * shares[N]:.1f} % (N={N})" for N in (min(shares), max(shares))]
                lines.append([f"{name} and {other}", DTYPES[dtype], kind, "GPU", *ends, *cells])
    header = ["results of", "dtype", "inputs", "run on", "equal elements, shortest N"]
    header += ["equal elements, longest N", "relative error of the first result"]
    header.append("relative error of the second result")
    caption = (
        "Each row of the table of equal elements compares the results of the two methods that the "
        "first column names. The columns *equal elements* contain the share of elements whose "
        "bits are equal in the results of two methods. The last two columns of the table of equal "
        "elements contain the relative errors of the two results at the longest measured N, "
        "compared with a float64 result."
    )
    return tables.of(caption, header, lines)


def precisions(rows: Sequence[Row]) -> tables.Table | None:
    """Return the table of FA-2's relative error in float32 for each value of `precision`."""
    found = nested(
        [r for r in rows if r.head_dim > 1],
        lambda r: (r.place, r.head_dim, r.seqlen_q),
        "series", metric="error", dtype="float32",
    )  # fmt: skip
    found = {at: line for at, line in found.items() if not line.keys().isdisjoint(PLANES)}
    longest: dict[tuple[str, int], int] = {}
    for kind, d, N in found:
        if (kind, d, N) not in PLANES_AT:
            longest[kind, d] = max(N, longest.get((kind, d), 0))
    shown = ("fa2-simt", *PLANES, peers.EFFICIENT)
    lines = []
    for (kind, d, N), line in sorted(found.items()):
        if (kind, d, N) in PLANES_AT or N == longest[kind, d]:
            cells = [tables.number(line, s, ".1e") for s in shown]
            over = {s: line[s] / line["fa2-simt"] for s in shown if {s, "fa2-simt"} <= set(line)}
            lines.append([kind, str(d), str(N), *cells])
            lines[-1] += [tables.number(over, s, ".2f") for s in PLANES[:2]]
    names = [precision(s) for s in PLANES]
    header = ["inputs", "d", "N", "FA-2, ieee", *(f"FA-2, {name}" for name in names)]
    header.append("torch's memory-efficient attention")
    header += [f"{name} / ieee" for name in names[:2]]
    caption = (
        "The table of `precision` contains relative errors of float32 results that a GPU computed "
        f"for {HEADS} heads. The errors in the table of `precision` are differences from a float64 "
        "result. In the table of `precision`, the name of each FA-2 column contains the value of "
        "the option."
    )
    return tables.of(caption, header, lines)


TABLES = {"numerics_identical": identical, "numerics_precision": precisions}
