"""Runs fifteen variants of attention, each written as a short function, in both loop orders.

The table has the accesses of both loop orders, counted and from the model. It also has the share of
tiles that a mask does not hide completely, and errors against float64. The figure has a picture of
each variant. On a GPU, the times and the compile times are compared with torch's flex_attention.

Each of the first fifteen functions below is a variant. It takes the sequence length N and the
number of heads H. It returns a dict with one option of a call: `score_mod` or `mask_mod`. The
functions after the variants measure the cost of each variant.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

import fa_numba
from fa_numba import reference
from fa_numba.problem import Problem

from .beside import variant_times
from .beside.variant_times import over_flex
from .lab.measure import counts
from .lab.measure.series import algorithm, columns, unit
from .lab.measure.workloads import SEED, Inputs
from .lab.record import EMULATOR, MODEL, Bench, Options, Row, select
from .lab.show import style, tables

Variant = Callable[[int, int], dict[str, Any]]


def causal(N: int, H: int) -> dict[str, Any]:
    """Return a `mask_mod`: a row sees itself and the columns before it."""
    return {"mask_mod": lambda b, h, i, j: j <= i}


def sliding_window(N: int, H: int) -> dict[str, Any]:
    """Return a `mask_mod`: a causal mask with a window of N / 8 keys."""
    width = N // 8
    return {"mask_mod": lambda b, h, i, j: 0 <= i - j < width}


def dilated(N: int, H: int) -> dict[str, Any]:
    """Return a `mask_mod`: a causal mask that shows every fourth key in a window of N / 2 keys."""
    step, width = 4, N // 2
    return {"mask_mod": lambda b, h, i, j: 0 <= i - j < width and (i - j) % step == 0}


def prefix_lm(N: int, H: int) -> dict[str, Any]:
    """Return a `mask_mod`: a causal mask, but all rows see the first quarter of the keys."""
    prefix = N // 4
    return {"mask_mod": lambda b, h, i, j: j <= i or j < prefix}


def documents(N: int, H: int) -> dict[str, Any]:
    """Return a `mask_mod` for four documents, one after the other. The mask is causal in each."""
    of = np.searchsorted([N // 8, N // 2, 3 * N // 4], np.arange(N), "right").astype(np.int32)
    return {"mask_mod": lambda b, h, i, j: of[i] == of[j] and j <= i}


def alibi(N: int, H: int) -> dict[str, Any]:
    """Return a `score_mod` for ALiBi: subtract the distance times the slope of the head."""
    slopes = (2.0 ** (-8.0 * np.arange(1, H + 1) / H)).astype(np.float32)
    return {"score_mod": lambda s, b, h, i, j: s - slopes[h] * abs(i - j)}


def relative_positions(N: int, H: int) -> dict[str, Any]:
    """Return a `score_mod` that adds a bias for each head and each difference i - j."""
    table = np.random.default_rng(SEED).standard_normal((H, 2 * N), np.float32)
    return {"score_mod": lambda s, b, h, i, j: s + table[h, i - j + N]}


def softcap(N: int, H: int) -> dict[str, Any]:
    """Return a `score_mod` that limits scores to the range from -2 to 2 by tanh."""
    cap = 2.0
    return {"score_mod": lambda s, b, h, i, j: cap * math.tanh(s / cap)}


def sink_tokens(N: int, H: int) -> dict[str, Any]:
    """Return a `mask_mod`: a causal window of N / 4 keys, and the first four keys.

    The first keys stay visible for all later rows (arXiv 2309.17453).
    """
    first, width = 4, N // 4
    return {"mask_mod": lambda b, h, i, j: j <= i and (j < first or i - j < width)}


def speculated_tree(N: int, H: int) -> dict[str, Any]:
    """Return a `mask_mod` for a tree of tokens (arXiv 2305.09781).

    Token n follows token (n - 1) // 2. A token sees itself and all tokens on the path to it.
    """
    sees = np.eye(N, dtype=bool)
    for n in range(1, N):
        sees[n] |= sees[(n - 1) // 2]
    return {"mask_mod": lambda b, h, i, j: sees[i, j]}


def block_diagonal(N: int, H: int) -> dict[str, Any]:
    """Return a `mask_mod` in which only four square blocks on the diagonal are visible."""
    size = N // 4
    return {"mask_mod": lambda b, h, i, j: i // size == j // size}


def t5_buckets(N: int, H: int) -> dict[str, Any]:
    """Return a `score_mod` that adds a bias for each head and range of distances.

    The ranges are larger for larger distances (arXiv 1910.10683).
    """
    table = np.random.default_rng(SEED).standard_normal((H, 16), np.float32)
    bucket = np.minimum(15, 2 * np.log2(np.arange(N) + 1)).astype(np.int32)
    return {"score_mod": lambda s, b, h, i, j: s + table[h, bucket[abs(i - j)]]}


def two_cosines(N: int, H: int) -> dict[str, Any]:
    """Return a `score_mod` that adds two cosines of the distance."""
    short, far = 0.8, 12.6 / N
    return {
        "score_mod": lambda s, b, h, i, j: s + math.cos(short * (i - j)) + math.cos(far * (j - i))
    }


def neighbourhood(N: int, H: int) -> dict[str, Any]:
    """Return a `mask_mod` for a square image, stored row by row: pixels see near pixels.

    Pixels are near if their rows and their columns differ by at most 2 (arXiv 2204.07143).
    """
    side, reach = math.isqrt(N), 2
    return {
        "mask_mod": lambda b, h, i, j: (
            abs(i // side - j // side) <= reach and abs(i % side - j % side) <= reach
        )
    }


def random_blocks(N: int, H: int) -> dict[str, Any]:
    """Return a `mask_mod` in which random blocks and the diagonal are visible."""
    kept, size = np.random.default_rng(SEED).random((8, 8)) < 0.3, N // 8
    return {"mask_mod": lambda b, h, i, j: kept[i // size, j // size] or i == j}


VARIANTS: dict[str, Variant] = {
    variant.__name__.replace("_", " "): variant
    for variant in (
        *(causal, sliding_window, dilated, prefix_lm, documents),
        *(alibi, relative_positions, softcap, sink_tokens, speculated_tree),
        *(block_diagonal, t5_buckets, two_cosines, neighbourhood, random_blocks),
    )
}

NAME = "variants"
TAKES: tuple[str, ...] = ()
PROTOCOL = variant_times.PROTOCOL

SERIES = ("fa1-simt", "fa2-simt")
SEQLEN, HEADS, HEAD_DIM, TILES = 64, 2, 16, fa_numba.Tiles(8, 8)


def measure(options: Options, bench: Bench) -> Iterator[Row | Sequence[Row]]:
    """Yield the accesses and errors of both loop orders for each variant; on a GPU also times."""
    names = list(VARIANTS)[: 3 if options.quick else None]
    work = [(name, series) for name in names for series in SERIES]
    yield from bench.counted(work, "counting", _counted)
    if bench.machine is not None:
        yield from variant_times.measure({name: VARIANTS[name] for name in names}, bench)


def given(name: str) -> dict[str, Any]:
    """Return the options of the call of a variant. A `mask_mod` becomes a block mask."""
    found = VARIANTS[name](SEQLEN, HEADS)
    if "mask_mod" in found:
        sizes = (1, HEADS, SEQLEN, SEQLEN)
        return {"block_mask": fa_numba.create_block_mask(found["mask_mod"], *sizes, tiles=TILES)}
    return found | {"tiles": TILES}


def _counted(name: str, series: str) -> Iterator[Row]:
    problem = Problem(1, HEADS, HEADS, SEQLEN, SEQLEN, HEAD_DIM)
    q, k, v = Inputs()(problem)
    options = given(name)
    how: dict[str, Any] = {"algorithm": algorithm(series), "unit": unit(series)}
    with fa_numba.count_accesses() as counted:
        O = fa_numba.attention(q, k, v, **how, **options)
    planned = fa_numba.plan(q.shape, k.shape, **how, **options)
    common = columns(NAME, series, problem, MODEL, TILES, note=name)
    yield from counts.totals(planned.accesses, **common)
    common |= {"machine": EMULATOR, "source": "counted"}
    yield from counts.totals(counted, **common)
    visited = options["block_mask"].visited.mean() if "block_mask" in options else 1.0
    yield Row(metric="visited", unit="1", value=float(visited), **common)
    error = reference.relative_error(O, reference.attention(q, k, v, **options))
    yield Row(metric="error", unit="1", value=error, **common)


def elements(rows: Sequence[Row], metric: str = "") -> dict[str, dict[str, float]]:
    """Return numbers that the emulator counted, as {variant: {series: number}}.

    `metric` says which numbers. By default, they are loads plus stores. A variant is left out if
    the number of one of the series is missing.
    """
    wanted = (metric,) if metric else ("loads", "stores")
    found: dict[str, dict[str, float]] = {}
    for row in select(rows, source="counted", metric=wanted, place=tuple(VARIANTS)):
        of = found.setdefault(row.place, {})
        of[row.series] = of.get(row.series, 0.0) + row.number
    return {name: found[name] for name in VARIANTS if len(found.get(name, ())) == len(SERIES)}


def weights(name: str) -> np.ndarray:
    """Return the weights of a variant for the picture, shape (SEQLEN, SEQLEN); NaN where hidden.

    The weights are P of head 0 for random scores, divided by the largest weight of each row.
    """
    S = np.random.default_rng(SEED).standard_normal((SEQLEN, SEQLEN))
    found = VARIANTS[name](SEQLEN, HEADS)
    for i, j in np.ndindex(*S.shape):
        if "mask_mod" in found and not found["mask_mod"](0, 0, i, j):
            S[i, j] = np.nan
        elif "score_mod" in found:
            S[i, j] = found["score_mod"](S[i, j], 0, 0, i, j)
    return np.exp(S - np.nanmax(S, axis=1, keepdims=True))


def draw(rows: Sequence[Row]) -> Any:
    """Draw a picture of each variant. Return None without counts."""
    moved, visited = elements(rows), elements(rows, "visited")
    if not moved:
        return None
    over_fa2 = {
        name: [over_flex(rows, name, pass_) for pass_ in variant_times.PASSES] for name in moved
    }
    timed = any(None not in over for over in over_fa2.values())
    figure, axes = style.new(3, 5, 9.8 if timed else 8.6)
    shown = dict(zip(VARIANTS, (ax for line in axes for ax in line), strict=True))
    for name, ax in shown.items():
        ax.set(xticks=[], yticks=[])
        ax.grid(False)
        ax.set_title(name, fontsize=11)
        if name not in moved:
            style.empty(ax, "not counted")
            continue
        look: dict[str, Any] = {"cmap": "viridis_r", "vmin": 0, "vmax": 1}
        ax.imshow(weights(name), interpolation="nearest", **look)
        one, two = (moved[name][series] for series in SERIES)
        label = f"{visited[name][SERIES[0]]:.0%} of tiles visited"
        label += f"\naccesses: {one / two:.1f}"
        if None not in over_fa2[name]:
            label += f"\ntime: {', '.join(f'{x:.2f}' for x in over_fa2[name])}"
        ax.set_xlabel(label)
    ratios = [by[SERIES[0]] / by[SERIES[1]] for by in moved.values()]
    title = f"K/V outer accesses up to {max(ratios):.1f} times what Q outer accesses"
    title += "\naccesses: elements, FA-1 / FA-2"
    if timed:
        title += "; time: torch's flex_attention / FA-2, forward, backward"
    title += "\nrows: queries; columns: keys; white: hidden; "
    title += "colour: weight over the row's largest, yellow 0, dark blue 1"
    figure.suptitle(title, fontsize=12)
    return figure


def table(rows: Sequence[Row]) -> tables.Table | None:
    """Return the table of accesses, visited tiles and errors by variant."""
    moved, visited, errors = elements(rows), elements(rows, "visited"), elements(rows, "error")
    lines = []
    for name, by in moved.items():
        one, two = (by[series] for series in SERIES)
        worst = max(errors[name].values())
        share = f"{visited[name][SERIES[0]]:.0%}"
        lines.append(
            [name, share, f"{one:,.0f}", f"{two:,.0f}", f"{one / two:.2f}", f"{worst:.1e}"]
        )
    accesses = [row for row in rows if row.metric in ("loads", "stores")]
    header = ["variant", "tiles visited", "FA-1, elements", "FA-2, elements", "FA-1 / FA-2"]
    header.append("relative error")
    said = (
        counts.said(accesses)
        .replace(": ", ". ")
        .replace(
            "numbers equal the model", "emulated counts of loads or stores equal the access model"
        )
    )
    caption = (
        "The table of variants contains the accesses (loads plus stores) of a forward call in "
        f"elements, in fp32 with {HEADS} heads and tiles of {TILES.Br} x {TILES.Bc}. The accesses "
        f"of the variants are {said}. The column *relative error* contains the larger error of the "
        "two loop orders, compared with a float64 result."
    )
    if not variant_times.times(rows):
        caption += " Times are not recorded."
    return tables.of(caption, header, lines)


TABLES = {"variants_times": variant_times.table}
