"""Checks two claims about FlashAttention-4's softmax: skipped rescalings, and exp2 by a polynomial.

FlashAttention-4 (arXiv 2603.05451) rescales O only if the maximum of a row grows by more than a
threshold. The emulator counts how often a warp rescales O, with the threshold and without it.
FlashAttention-4 also computes some exponentials by a polynomial. The errors of polynomials are
computed in float64, and the rounded results are compared with exact results.
"""

import math
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np

import fa_numba
from fa_numba import device
from fa_numba.device import Kernel, array_type, cuda, float32
from fa_numba.problem import Problem

from .lab.measure.series import columns
from .lab.measure.workloads import SEED
from .lab.record import EMULATOR, MODEL, Bench, Options, Row, select
from .lab.show import style, tables

NAME = "fa4_softmax"
TAKES: tuple[str, ...] = ()

# Degrees of the polynomials p(x), about 2^x for x from 0 to 1.
DEGREES = tuple(range(1, 7))
FA4_DEGREE = 3
# The inputs of exp2. A softmax never takes a positive power of 2.
LOWEST, INPUTS = -16.0, 1 << 16
BFLOAT16 = 8  # bits of the significand, with the leading bit
# A warp rescales O if a row's maximum grows by more than the threshold, in powers of 2.
ALWAYS, FA4_THRESHOLD = 0.0, 8.0
SERIES = {"rescale-always": ALWAYS, "rescale-threshold": FA4_THRESHOLD}
LN_2 = math.log(2)
ROWS, TILE, HEAD_DIM, WARP = 256, 128, 128, 32
SEQLENS = tuple(1 << n for n in range(10, 15))
SERIES_OF_ALL = "rescale-always"
COLOURS = ("#56B4E9", "#009E73", "#E69F00", "#D55E00")
# Standard deviations of the scores before the softmax.
DEVIATIONS = (1, 2, 4, 8)


def measure(options: Options, bench: Bench) -> Iterator[Row | Sequence[Row]]:
    """Yield the errors of polynomials, and the rescalings that the emulator counts."""
    for degree in DEGREES:
        yield from _errors(degree)
    seqlens = SEQLENS[: 1 if options.quick else None]
    work = [
        (N, deviation, series) for N in seqlens for deviation in DEVIATIONS for series in SERIES
    ]
    yield from bench.counted(work, "counting on the emulator", _rescalings)


# --- exp2 as a polynomial -------------------------------------------------------------------------


def minimax(degree: int) -> np.ndarray:
    """Return the polynomial whose relative error from 2^x is smallest, for x from 0 to 1.

    The result has the coefficients of x^0, x^1 and so on, in float64. The method is Remez'
    exchange: at the best polynomial, the relative error is largest at degree + 2 points, with
    alternating signs.
    """
    grid = np.linspace(0.0, 1.0, 20001)
    points = (1 - np.cos(np.pi * np.arange(degree + 2) / (degree + 1))) / 2
    for _ in range(20):
        # p(x) / 2^x - E (-1)^i = 1 at the points; the unknowns are the coefficients and E.
        powers = np.vander(points, degree + 1, increasing=True) / np.exp2(points)[:, None]
        signs = (-1.0) ** np.arange(degree + 2)
        *coefficients, _ = np.linalg.solve(np.column_stack([powers, -signs]), np.ones(degree + 2))
        error = np.polynomial.polynomial.polyval(grid, coefficients) / np.exp2(grid) - 1
        # Between two sign changes of the error, its largest absolute value is the next point.
        parts = np.split(np.arange(grid.size), np.flatnonzero(np.diff(np.sign(error))) + 1)
        if len(parts) != degree + 2:
            break
        points = np.array([grid[part[np.abs(error[part]).argmax()]] for part in parts])
    return np.array(coefficients)


def exp2(x: np.ndarray, coefficients: np.ndarray) -> np.ndarray:
    """Return 2^x, where a polynomial approximates 2^(fractional part of x), in the dtype of x.

    `coefficients` are those of the polynomial, as `minimax` returns them.
    """
    whole = np.floor(x)
    return np.ldexp(horner(x - whole, coefficients), whole.astype(int))


def horner(x: np.ndarray, coefficients: np.ndarray) -> np.ndarray:
    """Return the value of a polynomial at x by Horner's method.

    `coefficients` are those of x^0, x^1 and so on. After each step, the number is rounded to the
    dtype of x.
    """
    y = np.zeros_like(x)
    for c in coefficients[::-1]:
        y = y * x + x.dtype.type(c)
    return y


def to_bfloat16(x: np.ndarray) -> np.ndarray:
    """Return x, rounded to the nearest number of bfloat16, in the dtype of x."""
    _, exponent = np.frexp(x)
    return np.rint(np.ldexp(x, BFLOAT16 - exponent)) * np.exp2(exponent - BFLOAT16)


def _errors(degree: int) -> Iterator[Row]:
    common = columns(NAME, f"exp2-degree-{degree}", _vector(), MODEL, source="model")
    coefficients = minimax(degree)
    x = np.linspace(LOWEST, 0.0, INPUTS, endpoint=False)
    largest = float(np.abs(exp2(x, coefficients) / np.exp2(x) - 1).max())
    yield Row(metric="max_error", unit="1", value=largest, **common)
    single = x.astype(np.float32)
    exact = np.exp2(single.astype(np.float64))
    mine = to_bfloat16(exp2(single, coefficients).astype(np.float64))
    step = np.exp2(np.frexp(exact)[1] - float(BFLOAT16))
    off = np.abs(mine - to_bfloat16(exact)) / step
    for metric, share in (("identical", off == 0), ("within_one", off <= 1)):
        yield Row(metric=metric, unit="1", value=float(share.mean()), **common)


def _vector() -> Problem:
    return Problem(1, 1, 1, INPUTS, INPUTS, 1)


# --- rescalings -----------------------------------------------------------------------------------


@cache
def make_rescaling() -> Kernel:
    """Return a kernel whose accesses to O count the rescalings of FlashAttention-4.

    The kernel has one thread for each row of Q, and computes only the part of the softmax that
    rescales O. All threads of a warp rescale O if the maximum of a row of the warp grows by more
    than a threshold.

    | argument | meaning |
    |---|---|
    | tops | shape (tiles, rows): the largest score of each tile and row, in units of log2 |
    | O | shape (rows,): one element in place of each row of O |
    | threshold | the threshold, in units of log2 |
    """

    def rescale(tops, O, threshold):
        row = cuda.grid(1)
        m = tops[0, row]
        for j in range(1, tops.shape[0]):
            top = tops[j, row]
            grows = top - m > threshold
            if cuda.any_sync(0xFFFFFFFF, grows):
                factor = float32(1.0)
                if grows:
                    factor = math.exp((m - top) * float32(LN_2))
                    m = top
                O[row] = O[row] * factor

    return Kernel(rescale, (array_type(2), array_type(1), float32), ROWS, 0)


def tops(N: int, deviation: float) -> np.ndarray:
    """Return the largest score of each column tile and row, shape (tiles, rows).

    Q and K are normal random numbers. The scores have the given standard deviation. The returned
    numbers are divided by log(2), so that the softmax can compute powers of 2.
    """
    rng = np.random.default_rng([SEED, N])
    q, k = (rng.standard_normal((size, HEAD_DIM), np.float32) for size in (ROWS, N))
    scores = (k @ q.T) * np.float32(deviation / math.sqrt(HEAD_DIM) / LN_2)
    return scores.reshape(N // TILE, TILE, ROWS).max(axis=1)


def _rescalings(N: int, deviation: int, series: str) -> Iterator[Row]:
    arguments = tops(N, deviation), np.ones(ROWS, np.float32), SERIES[series]
    with device.using("emulator"), fa_numba.count_accesses() as counts:
        device.launch(make_rescaling(), (1,), arguments)
    problem = Problem(1, 1, 1, ROWS, N, HEAD_DIM)
    common = columns(NAME, series, problem, EMULATOR, note=f"deviation {deviation}")
    value = counts.loads.get("O", 0) // WARP
    yield Row(metric="rescalings", unit="1", value=value, **common)


def possible(row: Row) -> int:
    """Return the largest possible number of rescalings in the call of a row of data.

    A warp can rescale O at each column tile except its first column tile.
    """
    return row.seqlen_q // WARP * (row.seqlen_k // TILE - 1)


def shares(rows: Sequence[Row]) -> dict[str, dict[tuple[int, int], float]]:
    """Return the share of possible rescalings that happen, as {series: {(deviation, N): share}}.

    The deviation is the standard deviation of the scores. The number of possible rescalings is the
    result of `possible`.
    """
    found: dict[str, dict[tuple[int, int], float]] = {}
    for row in select(rows, metric="rescalings"):
        at = deviation(row), row.seqlen_k
        found.setdefault(row.series, {})[at] = row.number / possible(row)
    return found


def deviation(row: Row) -> int:
    """Return the standard deviation of the scores of a counted call."""
    return int(row.place.removeprefix("deviation "))


# --- figure and tables ----------------------------------------------------------------------------


def _by_degree(rows: Sequence[Row], metric: str) -> dict[int, float]:
    found = [r for r in rows if r.metric == metric]
    return dict(sorted((int(r.series.rpartition("-")[2]), r.number) for r in found))


def draw(rows: Sequence[Row]) -> Any:
    """Draw the errors over the degree, and the rescalings over N. Return None without rows."""
    errors, found = _by_degree(rows, "max_error"), shares(rows)
    if not errors or not found:
        return None
    figure, ((left, right),) = style.new(1, 2, 4.2)
    style.line(left, errors, marker="o", color="#0072B2", label="polynomial, float64")
    left.axhline(2.0**-BFLOAT16, color="#777777", ls="--", label="rounding to bf16, at most")
    style.log(left.yaxis)
    left.set(xlabel="degree of the polynomial", ylabel="largest relative error of exp2")
    # Larger scores have their maxima in the same tiles: without a threshold, all lines are equal.
    lines = [(SERIES_OF_ALL, DEVIATIONS[0], "#222222", "no threshold, all deviations")]
    lines += [
        ("rescale-threshold", size, color, f"threshold 8, scores of deviation {size}")
        for size, color in zip(DEVIATIONS, COLOURS, strict=True)
    ]
    for series, size, color, label in lines:
        points = {N: 100 * x for (at, N), x in sorted(found[series].items()) if at == size}
        ls = "--" if series == SERIES_OF_ALL else "-"
        style.line(right, points, marker="o", ms=4, color=color, ls=ls, label=label)
    style.sizes(right, sorted({N for each in found.values() for _, N in each}), "keys N")
    right.set(ylabel="visits that rescale O (%)", ylim=(0, None))
    left.legend(fontsize=9)
    message = "Degree 3 is exact enough for bf16; small scores need no rescaling"
    style.legend(figure, right.get_legend_handles_labels()[0], message, 3)
    return figure


def table(rows: Sequence[Row]) -> tables.Table | None:
    """Return the table of rescalings, or None without rows."""
    found = shares(rows)
    lines = []
    for at in sorted({at for each in found.values() for at in each}):
        always, threshold = (found.get(series, {}).get(at) for series in SERIES)
        if always is not None and threshold is not None:
            skipped = f"{1 - threshold / always:.1%}" if always else tables.MISSING
            lines.append([str(at[0]), str(at[1]), f"{always:.1%}", f"{threshold:.1%}", skipped])
    header = ["deviation of the scores", "N", "no threshold", "threshold 8", "skipped"]
    caption = (
        f"The table of rescalings is for {ROWS} rows of Q, d={HEAD_DIM} and column tiles of {TILE} "
        "keys. Q and K are normal random numbers, multiplied so that the scores have the given "
        "standard deviation. A warp visits a tile with 32 rows. The columns *no threshold* and "
        "*threshold 8* contain the share of visits at which the warp rescales O. With the "
        "threshold, a warp rescales O only if the maximum of a row grows by more than a factor "
        "2^8 = 256 in the softmax. The column *skipped* contains the share of rescalings that the "
        "threshold skips. The emulator counted the rescalings."
    )
    return tables.of(caption, header, lines)


def polynomials(rows: Sequence[Row]) -> tables.Table | None:
    """Return the table of polynomials, or None without rows."""
    errors, identical, near = (
        _by_degree(rows, metric) for metric in ("max_error", "identical", "within_one")
    )
    lines = [
        [str(degree), f"{error:.1e}", f"{identical[degree]:.2%}", f"{near[degree]:.2%}"]
        for degree, error in errors.items()
    ]
    header = ["degree", "largest relative error", "equal bf16 result", "at most 1 unit off"]
    caption = (
        "The table of polynomials is for the polynomials with the smallest relative error from "
        "2^x, for x from 0 to 1. The column *largest relative error* is computed in float64. For "
        "the last two columns, the polynomial is computed in float32 and the result is rounded to "
        f"bf16, for {INPUTS} numbers x from {LOWEST:g} to 0. The column *equal bf16 result* "
        "contains the share of results that equal the exact result, rounded to bf16. The column "
        "*at most 1 unit off* contains the share of results that differ by at most one unit in the "
        "last place."
    )
    return tables.of(caption, header, lines)


TABLES = {"fa4_polynomials": polynomials}
