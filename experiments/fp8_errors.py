"""Measures the error of attention in 8 bits (FlashAttention-3 paper, Table 3), and its causes.

Q, K and V are stored in float8_e4m3fn by `fa_numba.quantize`, with one scale for each tensor or for
each block of 128 rows, with Q and K rotated or not. Standard attention and both loop orders are
compared with float64 results of the unquantised inputs, and with float64 results of the stored
numbers. Float64 results with only one of Q, K, P and V rounded say which operand causes the error.
Key splits, and the emulator's rule for sums in tensor cores, say what the sums contribute.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

import fa_numba
from fa_numba import device
from fa_numba.commands.compile import compile_ahead
from fa_numba.dtypes import E4M3
from fa_numba.problem import Problem

from .beside import rounded
from .lab.measure import peers
from .lab.measure.check import to_host
from .lab.measure.series import HOPPER, HOPPER_SPLITS, algorithm, columns, unit
from .lab.measure.timing import attempt
from .lab.measure.workloads import SEED, Inputs, held
from .lab.record import EMULATOR, Bench, Options, Row, nested
from .lab.show import style, tables
from .numerics import CHANCE, DEVIATION, NORMAL, OUTLIERS, errors_of

NAME = "fp8_errors"
TAKES: tuple[str, ...] = ()

HEADS, HEAD_DIMS = 4, (64, 128)
SEQLENS = (1024, 4096, 16384, 65536)
KINDS = (NORMAL, OUTLIERS)
SAMPLED = 64  # rows of a head that are computed in float64
PROTOCOL = (
    f"{HEADS} heads, results held against float64 on {SAMPLED} rows of each head, spread evenly; "
    "of calls with key splits, on the first rows"
)
STANDARD, FA1, FA2, KEY_SPLITS = "standard-mma", HOPPER_SPLITS, HOPPER, f"{HOPPER}-splits"
QUERY_SPLITS, ROW_TILE = 32, 128  # FA-1's grid then fills the GPU; the result is the same
# How q, k and v are quantised: name -> `per`, and the seed of the rotation of q and k.
TENSOR, BLOCK = "scale per tensor", "scale per block"
ROTATED, BOTH = "rotated, scale per tensor", "rotated, scale per block"
VARIANTS: dict[str, tuple[Any, int | None]] = {
    TENSOR: ("tensor", None),
    BLOCK: ("block", None),
    ROTATED: ("tensor", 1),
    BOTH: ("block", 1),
}
# Float64 results with only one of the four operands rounded, or with all four.
ALONE = {name: f"float64-{name}" for name in "qkpv"}
ALL = "float64-all"
# Numbers of key splits, and the lengths at which they are measured.
SPLITS, SPLIT_SEQLENS = (1, 4, 16, 64, 256), (16384, 65536)
# What is summed as tensor cores do: the name in `rounded.Sums` -> series.
SUMS = {name: f"sums-{name}" for name in ("scores", "running", "by-tile")}
SUM_ROWS, SUM_TILE = 16, 128
KERNEL_ERROR = "kernel_error"


def measure(options: Options, bench: Bench) -> Iterator[Row | Sequence[Row]]:
    """Yield errors of sums by the emulator's rule, and on a GPU the errors of kernels."""
    lengths, dims = (SEQLENS[:1], HEAD_DIMS[:1]) if options.quick else (SEQLENS, HEAD_DIMS)
    work = list(itertools.product(KINDS, lengths))
    yield from bench.counted(work, "summing by the emulator's rule", _sums)
    if bench.machine is None:
        bench.say("  no GPU here: only the sums are computed")
        return
    problems = [Problem(1, HEADS, HEADS, N, N, d, dtype=E4M3.name) for d in dims for N in lengths]
    _, failure = attempt(lambda: compile_ahead(_plans(problems)))
    if failure:
        bench.say(f"  kernels were not compiled in parallel: {failure}")
    normal = Inputs()
    normal(replace(problems[-1], dtype="float16"))  # all numbers are drawn once
    cases = [(problem, kind) for problem in problems for kind in KINDS]
    for problem, kind in bench.each(cases, "comparing with float64"):
        yield from _rows_of(problem, kind, inputs(problem, kind, normal), bench.machine)
        device.release_memory()
        peers.release()


def inputs(problem: Problem, kind: str, normal: Inputs) -> tuple[np.ndarray, ...]:
    """Return random q, k and v in float32, with numbers that float16 represents exactly.

    The numbers are those of `normal`. If `kind` is OUTLIERS, a number with the standard deviation
    10 is added to each element with probability 0.001, as in the FlashAttention-3 paper.
    """
    arrays = normal(replace(problem, dtype="float16"))
    if kind == NORMAL:
        return arrays
    rng = np.random.default_rng([SEED, problem.seqlen_q, problem.head_dim])
    return tuple(_with_outliers(rng, x) for x in arrays)


def _with_outliers(rng: np.random.Generator, x: np.ndarray) -> np.ndarray:
    made = x.flatten()
    at = rng.integers(made.size, size=rng.binomial(made.size, CHANCE))
    more = np.float32(DEVIATION) * rng.standard_normal(at.size, np.float32)
    made[at] = held(made[at] + more, "float16")
    return made.reshape(x.shape)


def _sums(kind: str, N: int) -> Iterator[Row]:
    """Yield the errors of sums in tensor cores for one head, which are computed on the CPU."""
    problem = Problem(1, 1, 1, N, N, HEAD_DIMS[0], dtype="float16")
    q, k, v = (x[0, 0] for x in inputs(problem, kind, Inputs()))
    found = rounded.Sums(q[:SUM_ROWS], k, v, SUM_TILE).errors()
    shown = replace(problem, seqlen_q=SUM_ROWS, dtype=E4M3.name)
    for name, series in SUMS.items():
        yield _row(series, shown, EMULATOR, kind, KERNEL_ERROR, found[name])


def _row(series: str, problem: Problem, machine: str | None, note: str, metric: str,
         value: float | None) -> Row:  # fmt: skip
    short = None if value is None else float(f"{value:.3g}")
    common = columns(NAME, series, problem, machine, note=note)
    return Row(metric=metric, unit="1", value=short, **common)


# --- calls on a GPU -------------------------------------------------------------------------------


def options_of(series: str, problem: Problem) -> dict[str, Any]:
    """Return the options of a call of a series: algorithm, unit, and numbers of splits."""
    found: dict[str, Any] = {"algorithm": algorithm(series), "unit": unit(series)}
    if series == STANDARD:
        return found
    if series == FA1:
        return found | {"query_splits": min(QUERY_SPLITS, max(1, problem.seqlen_q // ROW_TILE))}
    return found | {"kv_splits": 1}


def plan_of(series: str, problem: Problem, per: str = "", **more: Any) -> fa_numba.Plan:
    """Return the plan of a call.

    The inputs are in e4m3 with scales per "tensor" or "block", or in float16 if `per` is empty.
    """
    given: dict[str, Any] = options_of(series, problem) | more
    if per:
        for name, shape in zip("qkv", (problem.q_shape, *[problem.k_shape] * 2), strict=True):
            blocks = (-(-shape[2] // rounded.SCALED_ROWS),) if per == "block" else ()
            given[f"{name}_scale"] = (*shape[:2], *blocks)
    dtype = E4M3.name if per else "float16"
    return fa_numba.plan(problem.q_shape, problem.k_shape, dtype=dtype, **given)


def _plans(problems: Iterable[Problem]) -> Iterator[fa_numba.Plan]:
    """Yield the plans of the calls of attention."""
    for problem in problems:
        for series, per in itertools.product((STANDARD, FA1, FA2), ("", "tensor", "block")):
            if (series, per) != (STANDARD, "block"):
                yield plan_of(series, problem, per)
        if problem.seqlen_q in SPLIT_SEQLENS:
            few = replace(problem, seqlen_q=SAMPLED)
            yield plan_of(FA2, few, "tensor", kv_splits=SPLITS[-1])


def quantized(arrays: Sequence[Any], variant: str) -> tuple[list[Any], dict[str, Any]]:
    """Return q, k and v in e4m3, and the options `q_scale`, `k_scale` and `v_scale`."""
    per, seed = VARIANTS[variant]
    seeds = seed, seed, None
    pairs = [fa_numba.quantize(x, per=per, rotate=of) for x, of in zip(arrays, seeds, strict=True)]
    scales = dict(zip(("q_scale", "k_scale", "v_scale"), (s for _, s in pairs), strict=True))
    return [stored for stored, _ in pairs], scales


def _rows_of(
    problem: Problem, kind: str, host: Sequence[np.ndarray], machine: str | None
) -> Iterator[Row]:
    """Yield all rows of a problem with the inputs `host`, which are of a kind."""
    case, failure = attempt(Case, problem, kind, host)
    if failure:
        yield _row(FA2, problem, machine, f"{kind}; {failure}", "rmse", None)
        return
    for series, dtype, note, run in case.results():
        found, failure = attempt(run)
        shown = replace(problem, dtype=dtype)
        if failure:
            yield _row(series, shown, machine, f"{note}; {failure}", "rmse", None)
            continue
        for metric, value in found.items():
            yield _row(series, shown, machine, note, metric, value)


Result = tuple[str, str, str, Callable[[], dict[str, float]]]


class Case:
    """Inputs of a problem, on the GPU in float16 and in float64, and the result in float64.

    Parameters
    ----------
    problem : Problem
        The problem in e4m3.
    kind : str
        Kind of inputs, one of `KINDS`.
    host : sequence of ndarray
        q, k and v in float32.
    """

    def __init__(self, problem: Problem, kind: str, host: Sequence[np.ndarray]) -> None:
        N = problem.seqlen_q
        self.problem, self.kind = problem, kind
        self.rows = np.unique(np.linspace(0, N - 1, min(N, SAMPLED)).astype(int))
        self.arrays = peers.on_device(host, "float16")
        self.q, self.k, self.v = (rounded.wide(x) for x in (host[0][:, :, self.rows], *host[1:]))
        self.S = rounded.scores(self.q, self.k)
        self.right = rounded.narrow(rounded.weighted(self.S, self.v))

    def results(self) -> Iterator[Result]:
        """Yield series, dtype, note and a function that returns errors, for each result."""
        for series in (STANDARD, FA1, FA2):
            yield series, "float16", self.kind, partial(self.errors_in_half, series)
        alone = partial(rounded.weighted_by_tiles, self.S, self.v)
        yield ALONE["p"], E4M3.name, self.kind, lambda: self.errors(alone(self.tile(FA2, TENSOR)))
        for variant in VARIANTS:
            note = f"{self.kind}, {variant}"
            stored, failure = attempt(Stored, self, variant)
            if failure:
                yield FA2, E4M3.name, note, partial(_fail, failure)
                continue
            for series in ALONE.values():
                if series != ALONE["p"]:
                    yield series, E4M3.name, note, partial(stored.alone, series)
            for series in (*((STANDARD,) if variant == TENSOR else ()), FA1, FA2):
                yield series, E4M3.name, note, partial(stored.measured, series)
            yield ALL, E4M3.name, note, stored.all_rounded
            if variant == TENSOR and self.problem.seqlen_k in SPLIT_SEQLENS:
                for splits in SPLITS:
                    at = f"{self.kind}, {splits} splits"
                    yield KEY_SPLITS, E4M3.name, at, partial(stored.with_splits, splits)

    def tile(self, series: str, variant: str) -> int:
        """Return the number of columns of which P is rounded with the same maximum of a row."""
        if series == STANDARD:
            return self.problem.seqlen_k
        return plan_of(series, self.problem, VARIANTS[variant][0]).tiles.Bc

    def errors(self, got: Any) -> dict[str, float]:
        """Return the errors of a result in float64, compared with the unquantised inputs' result.

        `got` contains only the sampled rows.
        """
        found = errors_of(rounded.narrow(got), self.right)
        return {name: found[name] for name in ("error", "rmse")}

    def sampled(self, out: Any) -> np.ndarray:
        """Return the sampled rows of an output as a NumPy array in float64."""
        return to_host(out)[:, :, self.rows].astype(np.float64)

    def errors_in_half(self, series: str) -> dict[str, float]:
        """Return the errors of a call in float16."""
        given = options_of(series, self.problem)
        return self.errors(self.sampled(fa_numba.attention(*self.arrays, **given)))


def _fail(failure: str) -> dict[str, float]:
    raise ValueError(failure)


class Stored:
    """The inputs of a case in e4m3, and the same numbers in float64 without the rotation.

    Parameters
    ----------
    case : Case
        The inputs.
    variant : str
        How q, k and v are quantised, one of `VARIANTS`.
    """

    def __init__(self, case: Case, variant: str) -> None:
        self.case, self.variant = case, variant
        self.arrays, self.scales = quantized(case.arrays, variant)
        q, k, v = (
            rounded.dequantized(x, scale)
            for x, scale in zip(self.arrays, self.scales.values(), strict=True)
        )
        seed = VARIANTS[variant][1]
        self._first = rounded.turned_back(q[:, :, :SAMPLED], seed)
        self.q = rounded.turned_back(q[:, :, case.rows], seed)
        self.k, self.v = rounded.turned_back(k, seed), v
        self._expected: dict[int, Any] = {}

    def alone(self, series: str) -> dict[str, float]:
        """Return the errors of a float64 result in which only Q, only K or only V is rounded."""
        case = self.case
        if series == ALONE["v"]:
            return case.errors(rounded.weighted(case.S, self.v))
        q, k = (self.q, case.k) if series == ALONE["q"] else (case.q, self.k)
        return case.errors(rounded.weighted(rounded.scores(q, k), case.v))

    def expected(self, Bc: int) -> Any:
        """Return the float64 result of the stored numbers, with P rounded by tiles of Bc keys."""
        if Bc not in self._expected:
            S = rounded.scores(self.q, self.k)
            self._expected[Bc] = rounded.weighted_by_tiles(S, self.v, Bc)
        return self._expected[Bc]

    def all_rounded(self) -> dict[str, float]:
        """Return the errors of a float64 result in which Q, K, P and V are rounded."""
        return self.case.errors(self.expected(self.case.tile(FA2, self.variant)))

    def measured(self, series: str) -> dict[str, float]:
        """Return the errors of a call, also compared with the same rounded operands."""
        given = self.scales | options_of(series, self.case.problem)
        out = self.case.sampled(fa_numba.attention(*self.arrays, **given))
        right = rounded.narrow(self.expected(self.case.tile(series, self.variant)))
        return self.case.errors(out) | {KERNEL_ERROR: errors_of(out, right)["error"]}

    def with_splits(self, splits: int) -> dict[str, float]:
        """Return the error of FA-2 with key splits, compared with the same rounded operands.

        Only the first rows of Q take part.
        """
        q, k, v = self.arrays
        given = self.scales | options_of(FA2, self.case.problem) | {"kv_splits": splits}
        out = to_host(fa_numba.attention(q[:, :, :SAMPLED], k, v, **given))
        plan = plan_of(
            FA2, replace(self.case.problem, seqlen_q=SAMPLED), "tensor", kv_splits=splits
        )
        S = rounded.scores(self._first, self.k)
        right = rounded.weighted_by_tiles(S, self.v, plan.tiles.Bc, splits)
        found = errors_of(out.astype(np.float64), rounded.narrow(right))
        return {KERNEL_ERROR: found["error"]}


# --- figure and tables ----------------------------------------------------------------------------

Found = dict[tuple[str, str, str, int], dict[int, float]]
_NAMES = {"float16": "fp16", E4M3.name: "e4m3"}


def curves(rows: Sequence[Row], metric: str = "rmse") -> Found:
    """Return a metric as {(dtype, series, note, head dimension): {N: value}}."""
    ordered = sorted(rows, key=lambda row: row.seqlen_k)
    at = lambda row: (row.dtype, row.series, row.place, row.head_dim)  # noqa: E731
    return nested(ordered, at, "seqlen_k", metric=metric)


def of_e4m3(series: str, kind: str, variant: str, d: int) -> tuple[str, str, str, int]:
    """Return the key in `curves` of a series with e4m3 inputs."""
    return E4M3.name, series, f"{kind}, {variant}", d


def gain(found: Found, kind: str, d: int) -> dict[int, float]:
    """Return {N: the paper's baseline / FA-2 with rotation and scales per block}, of the RMSE.

    The baseline is standard attention with a scale per tensor.
    """
    before = found.get(of_e4m3(STANDARD, kind, TENSOR, d), {})
    after = found.get(of_e4m3(FA2, kind, BOTH, d), {})
    return {N: value / after[N] for N, value in before.items() if after.get(N)}


# Lines of the figure: dtype, series, variant, label, colour, line style.
_LINES = (
    (E4M3.name, STANDARD, TENSOR, "e4m3 standard attention, scale per tensor", "#D55E00", "-"),
    (E4M3.name, FA2, TENSOR, "e4m3 FA-2, scale per tensor", "#E69F00", "--"),
    (E4M3.name, FA2, BLOCK, "e4m3 FA-2, scale per block", "#56B4E9", "-"),
    (E4M3.name, FA2, ROTATED, "e4m3 FA-2, rotated, scale per tensor", "#0072B2", "-"),
    (E4M3.name, FA2, BOTH, "e4m3 FA-2, rotated, scale per block", "#009E73", "--"),
    ("float16", STANDARD, "", "fp16 standard attention", "#BABABA", "-"),
    ("float16", FA2, "", "fp16 FA-2", "#000000", "-"),
)
_SHOWN = {TENSOR: "#E69F00", BOTH: "#009E73"}


def draw(rows: Sequence[Row]) -> Any:
    """Draw the errors over N, and what each operand contributes. Return None without rows."""
    found = curves(rows)
    dims = {d for d in HEAD_DIMS if any(of_e4m3(FA2, OUTLIERS, v, d) in found for v in VARIANTS)}
    if not dims:
        return None
    d = max(dims)
    figure, (axes,) = style.new(1, 2, 5.2, width_ratios=(3, 2))
    over_n, shares = axes
    lengths: set[int] = set()
    for dtype, series, variant, label, colour, dash in _LINES:
        note = f"{OUTLIERS}, {variant}" if variant else OUTLIERS
        points = found.get((dtype, series, note, d), {})
        lengths |= set(points)
        style.line(over_n, points, label=label, color=colour, ls=dash, marker="o", ms=5)
    over_n.set(yscale="log", ylabel="RMSE of O", title=f"inputs with outliers, d={d}")
    style.sizes(over_n, sorted(lengths), "sequence length N (tokens)")
    N = max(lengths)
    for place, (variant, colour) in enumerate(_SHOWN.items()):
        values = alone(found, OUTLIERS, variant, d, N)
        at = np.arange(len(values)) + 0.4 * (place - 0.5)
        heights = [0.0 if value is None else value for value in values.values()]
        shares.bar(at, heights, 0.38, color=colour, label=f"{variant} (bars)")
    shares.set_xticks(range(len(ALONE)), [name.upper() for name in ALONE])
    shares.set(xlabel="the only operand in e4m3", ylabel="RMSE of O, computed in float64")
    shares.set_title(f"inputs with outliers, d={d}, N={style.short(N)}")
    gains = gain(found, OUTLIERS, d)
    title = "Errors of attention in 8 bits, compared with float64"
    if gains and gains[max(gains)] > 1:
        title = (
            f"Rotation and block scales make the 8-bit error {gains[max(gains)]:.1f} times smaller"
        )
    style.legend(figure, list(style.handles(axes).values()), title, 2)
    return figure


def alone(found: Found, kind: str, variant: str, d: int, N: int) -> dict[str, float | None]:
    """Return {operand: RMSE at N if only this operand is rounded}; None if it is not known."""
    values = {}
    for name, series in ALONE.items():
        at = (E4M3.name, series, kind, d) if name == "p" else of_e4m3(series, kind, variant, d)
        values[name] = found.get(at, {}).get(N)
    return values


def table(rows: Sequence[Row]) -> tables.Table | None:
    """Return the table of errors over N, as in Table 3 of the FlashAttention-3 paper."""
    found, lines = curves(rows), []
    header = [
        "inputs",
        "d",
        "N",
        "fp16, standard",
        "fp16, FA-2",
        "e4m3, standard, scale per tensor",
    ]
    header += [f"e4m3, FA-2, {variant}" for variant in VARIANTS]
    header += [f"e4m3, FA-1, {BOTH}", "e4m3, standard / FA-2 with rotation and blocks"]
    for kind, d in itertools.product(KINDS, HEAD_DIMS):
        shown = [("float16", series, kind, d) for series in (STANDARD, FA2)]
        shown.append(of_e4m3(STANDARD, kind, TENSOR, d))
        shown += [of_e4m3(FA2, kind, variant, d) for variant in VARIANTS]
        shown.append(of_e4m3(FA1, kind, BOTH, d))
        for N in sorted({N for key in shown for N in found.get(key, {})}):
            cells = [tables.number(found.get(key, {}), N, ".1e") for key in shown]
            cells.append(tables.number(gain(found, kind, d), N, ".1f"))
            lines.append([kind, str(d), style.short(N), *cells])
    caption = (
        "The table of 8-bit errors contains the root mean square error of O for "
        f"{HEADS} heads. The result is compared with a float64 result of the inputs in fp16, "
        "before they are quantised. In Table 3 of the FlashAttention-3 paper, the error with "
        "outliers is 3.2e-04 for standard attention and 1.9e-04 for FlashAttention-3 in fp16. The "
        "paper names neither N nor d."
    )
    return tables.of(caption, header, lines)


def shares(rows: Sequence[Row]) -> tables.Table | None:
    """Return the table of errors in float64 with only one operand rounded, at the longest N."""
    found, lines = curves(rows), []
    for kind, d, variant in itertools.product(KINDS, HEAD_DIMS, VARIANTS):
        every = found.get(of_e4m3(ALL, kind, variant, d), {})
        if every:
            N = max(every)
            values = alone(found, kind, variant, d, N)
            cells = [tables.number(values, name, ".1e") for name in ALONE]
            measured = found.get(of_e4m3(FA2, kind, variant, d), {})
            cells += [tables.number(x, N, ".1e") for x in (every, measured)]
            lines.append([kind, str(d), style.short(N), variant, *cells])
    header = ["inputs", "d", "N", "Q, K, V", *(f"only {name.upper()}" for name in ALONE)]
    header += ["Q, K, P and V", "FA-2's kernel"]
    caption = (
        "The table of shares contains root mean square errors of O. All columns but the last are "
        "computed in float64, with only the named operands rounded to e4m3. P is rounded tile by "
        "tile, as FA-2's kernel rounds P. The last column is measured."
    )
    return tables.of(caption, header, lines)


def sums(rows: Sequence[Row]) -> tables.Table | None:
    """Return the table of errors that the sums in tensor cores cause."""
    found, lines = curves(rows, KERNEL_ERROR), []
    for kind, d, N in itertools.product(KINDS, HEAD_DIMS, SEQLENS):
        keys = [of_e4m3(series, kind, TENSOR, d) for series in (STANDARD, FA1, FA2)]
        keys += [of_e4m3(KEY_SPLITS, kind, f"{n} splits", d) for n in SPLITS]
        keys += [(E4M3.name, series, kind, d) for series in SUMS.values()]
        cells = [tables.number(found.get(key, {}), N, ".1e") for key in keys]
        if set(cells) != {tables.MISSING}:
            lines.append([kind, str(d), style.short(N), *cells])
    header = [
        "inputs",
        "d",
        "N",
        "standard",
        "FA-1",
        "FA-2",
        *(f"FA-2, {n} key split{'s' * (n > 1)}" for n in SPLITS),
    ]
    header += ["rule, only S", "rule, P V as one sum", "rule, P V tile by tile"]
    caption = (
        "The table of sums contains relative errors. The result is compared with a float64 result "
        "of the stored numbers, in which P is rounded as the kernel rounds P. So the errors are "
        "those of sums and of exponentials. A small error of S also changes to which e4m3 number P "
        "is rounded. Standard attention stores S in fp16. Q, K and V have a scale per tensor. With "
        "key splits, each split sums P V separately, and the results of the splits are added in "
        "float32. The columns *rule* are computed on a CPU, with the emulator's rule for sums of "
        f"e4m3 products: S is summed by the rule, or P V is, for {SUM_ROWS} rows of one head and "
        f"tiles of {SUM_TILE} keys. *Tile by tile* means that the sum of each tile is added in "
        "float32."
    )
    return tables.of(caption, header, lines)


TABLES = {"fp8_errors_shares": shares, "fp8_errors_sums": sums}
