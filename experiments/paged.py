"""Compares K and V in cache pages with contiguous K and V (claim C22).

FlashAttention-2 reads pages of 16 to 256 rows in random order. On the emulator, two numbers are
counted: the elements whose bits differ from a call with contiguous K and V at the same tiles, and
the bytes of the block table divided by the bytes of K and V. On a GPU, a decoding step in fp16 with
1k to 64k keys is timed.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np

import fa_numba
from fa_numba import device
from fa_numba.problem import Problem

from .lab.measure import calls, check, peers
from .lab.measure.series import HOPPER, columns, unit
from .lab.measure.series import UNIT_NAMES as UNITS
from .lab.measure.timing import attempt, time_call
from .lab.measure.workloads import SEED, Inputs
from .lab.record import EMULATOR, Bench, Options, Row, nested
from .lab.show import style, tables
from .prefix import pages_of

NAME = "paged"
TAKES = ()

PAGE_SIZES = (16, 64, 128, 256)
COUNTED = {"fa2-simt": "float32", "fa2-mma": "float16", "fa2-wgmma": "float16"}
LENGTHS = (300, 77)  # of the two sequences that are counted
ROWS, COUNTED_DIM = 5, 64
TIMED = ("fa2-mma", HOPPER)
CONTEXTS, QUICK_CONTEXTS = (1024, 4096, 16384, 65536), (1024,)
HEAD_DIM, BATCH, HEADS, KEY_HEADS = 128, 4, 16, 4
ONE_PIECE = "one piece"
# The share by which calls with pages may be slower than calls without pages.
ALLOWED = 0.05
PROTOCOL = (
    f"a decoding step of {BATCH} sequences with one row of Q each, {HEADS} query heads, "
    f"{KEY_HEADS} K/V heads; block table and lengths on the GPU, tiles and splits as planned"
)


def place(page_size: int) -> str:
    """Return the beginning of a row's note, which names the page size; 0 means no pages."""
    return f"pages of {page_size} rows" if page_size else ONE_PIECE


def page_size_of(row: Row) -> int:
    """Return the page size that the note of a row names; 0 means no pages."""
    return 0 if row.place == ONE_PIECE else int(row.place.split()[2])


def in_pages(
    k: np.ndarray, v: np.ndarray, page_size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the pages of k, the pages of v, and the block table.

    k and v have shape (batch, heads_k, N, d). The pages have shape (pages, heads_k, page_size, d)
    and are in random order. The block table has shape (batch, pages of a sequence). If N is not a
    multiple of `page_size`, zeros fill the end of each sequence's last page.
    """
    each = -(-k.shape[2] // page_size)
    table = np.random.default_rng(SEED).permutation(len(k) * each)
    k_pages, v_pages = (pages_of(x, page_size)[np.argsort(table)] for x in (k, v))
    return k_pages, v_pages, table.reshape(-1, each).astype(np.int32)


def measure(options: Options, bench: Bench) -> Iterator[Row | Sequence[Row]]:
    """Yield how many elements differ, and the block table's share of bytes; on a GPU also times.

    The share is the bytes of the block table / the bytes of K and V.
    """
    work = [(series, page_size) for series in COUNTED for page_size in PAGE_SIZES]
    yield from bench.counted(work, "counting", _counted)
    if bench.machine is None:
        return
    contexts = QUICK_CONTEXTS if options.quick else CONTEXTS
    problems = [_step(N, HEAD_DIM) for N in contexts]
    timed = TIMED if device.compute_capability() == (9, 0) else TIMED[:1]
    inputs = Inputs()
    for problem in bench.each(problems, "timing"):
        yield from _times(problem, timed, inputs, bench.machine)


def _step(N: int, d: int) -> Problem:
    return Problem(BATCH, HEADS, KEY_HEADS, 1, N, d, dtype="float16")


def _counted(series: str, page_size: int) -> Iterator[Row]:
    """Yield two numbers of a small call with pages on the emulator.

    The first is the number of elements of O and L that differ from a call without pages. The second
    is the bytes of the block table / the bytes of K and V.
    """
    dtype = COUNTED[series]
    B, N = len(LENGTHS), max(LENGTHS)
    problem = Problem(B, 4, 2, ROWS, N, COUNTED_DIM, dtype=dtype, kv_lens=LENGTHS)
    q, k, v = (x.astype(dtype) for x in Inputs()(problem))
    k_pages, v_pages, table = in_pages(k, v, page_size)
    with device.using("emulator"):
        whole = fa_numba.plan(q.shape, k.shape, dtype=dtype, unit=unit(series), kv_lens=LENGTHS)
        tiles = fa_numba.Tiles(whole.tiles.Br, whole.tiles.Bc, stages=whole.tiles.stages)
        given: dict[str, Any] = {"kv_lens": LENGTHS, "unit": unit(series), "tiles": tiles}
        given |= {"return_lse": True, "kv_splits": 1}
        one = fa_numba.flash_attention_2(q, k, v, **given)
    with fa_numba.count_accesses() as counts:
        found = fa_numba.flash_attention_2(q, k_pages, v_pages, block_table=table, **given)
    pairs = zip(found, one, strict=True)
    differing = sum(
        int((a.view(f"u{a.itemsize}") != b.view(a.dtype).view(f"u{a.itemsize}")).sum())
        for a, b in pairs
    )
    of = counts.load_bytes
    share = of["block_table"] / (of["K"] + of["V"])
    common = columns(NAME, series, problem, EMULATOR, tiles, note=place(page_size))
    yield Row(metric="difference", unit="elements", value=differing, **common)
    yield Row(metric="table_share", unit="1", value=share, **common)


def _times(problem: Problem, timed: Sequence[str], inputs: Inputs, machine: str) -> Iterator[Row]:
    q, k, v = host = inputs(problem)
    gate = check.gate(problem, "fwd", *host)
    lengths = np.full(problem.batch, problem.seqlen_k, np.int32)
    for page_size, series in itertools.product((0, *PAGE_SIZES), timed):

        def work(page_size: int = page_size, series: str = series) -> Any:
            options: dict[str, Any] = {"unit": unit(series)}
            arrays = host
            if page_size:
                *pages, table = in_pages(k, v, page_size)
                arrays = (q, *pages)
                (options["block_table"],) = peers.on_device((table,), "int32")
                (options["kv_lens"],) = peers.on_device((lengths,), "int32")
            given = peers.on_device(arrays, problem.dtype)

            def run(out: Any = None) -> Any:
                return fa_numba.flash_attention_2(*given, out=out, **options)

            return time_call(run, gate)

        timing, failure = attempt(work)
        common = columns(NAME, series, problem, machine)
        yield calls.time_row(timing, failure, place(page_size), **common)
        device.release_memory()
        peers.release()


def ratios(rows: Sequence[Row]) -> dict[str, dict[int, dict[int, float]]]:
    """Return the time with pages / the time with contiguous K and V.

    The result is {series: {page size: {number of keys: ratio}}}.
    """
    times = nested(rows, "series", page_size_of, "seqlen_k", metric="time")
    found: dict[str, dict[int, dict[int, float]]] = {}
    for series in (s for s in TIMED if s in times):
        whole = times[series].pop(0, {})
        for size, of in sorted(times[series].items()):
            over = {N: t / whole[N] for N, t in sorted(of.items()) if N in whole}
            if over:
                found.setdefault(series, {})[size] = over
    return found


def counted(rows: Sequence[Row], metric: str) -> dict[str, dict[int, float]]:
    """Return the counted values of a metric, as {series: {page size: value}}."""
    return nested(rows, "series", page_size_of, source="counted", metric=metric)


UNIT_NAMES = {"simt": "fp32, CUDA cores", "mma": "fp16, mma", "wgmma": "fp16, wgmma"}
# Colours of the units. No page size has one of these colours.
_SHARES = {"simt": "#8B5A2B", "mma": "#E69F00", "wgmma": "#6000E6"}
_LOOKS = {16: ("#D55E00", "o"), 64: ("#0072B2", "s"), 128: ("#009E73", "^"), 256: ("#000000", "D")}


def draw(rows: Sequence[Row]) -> Any:
    """Draw the times over the number of keys, and the block table's share of bytes.

    Return None without counts.
    """
    timed, shares = ratios(rows), counted(rows, "table_share")
    if not shares:
        return None
    figure, ((*over, right),) = style.new(1, 1 + len(TIMED), 4.2, sharey=False)
    said = [
        f"{tables.between([x for by in by_size.values() for x in by.values()])} with {unit(series)}"
        for series, by_size in timed.items()
    ]
    every = [x for by_size in timed.values() for by in by_size.values() for x in by.values()]
    message = f"With pages, a decoding step takes {tables.between(every)} times as long"
    about = f"Time over that with a contiguous cache: {', '.join(said)}. Grey band: within 5 %."
    if said:
        style.legend(figure, [], message, about=about)
    else:
        style.legend(figure, [], "A block table is a small share of the bytes")
    for series, left in zip(TIMED, over, strict=True):
        left.set_title(UNITS[unit(series)])
        by_size = timed.get(series)
        if not by_size:
            style.empty(left, "not measured here")
            continue
        for size, by in by_size.items():
            colour, marker = _LOOKS[size]
            left.plot([*by], [*by.values()], color=colour, marker=marker, label=place(size))
        left.axhspan(1 - ALLOWED, 1 + ALLOWED, color="#888888", alpha=0.15, lw=0)
        style.sizes(left, sorted({N for by in by_size.values() for N in by}), "keys per sequence")
        left.set(ylim=(0, 1.6), ylabel="time / time without pages")
        left.legend(loc="lower right")
    right.set_title("bytes of the block table")
    for series, by in shares.items():
        sizes, values = zip(*sorted(by.items()), strict=True)
        looks = {"color": _SHARES[unit(series)], "marker": style.MARKERS[series]}
        looks["ls"] = "--" if series.endswith("simt") else "-"
        right.plot(sizes, [100 * x for x in values], label=UNIT_NAMES[unit(series)], **looks)
    style.sizes(right, sorted({n for by in shares.values() for n in by}), "rows per page")
    right.set(ylabel="share of K's and V's bytes (%)", ylim=(0, None))
    right.legend()
    return figure


def table(rows: Sequence[Row]) -> tables.Table | None:
    """Return the table of differences, bytes and times by page size."""
    differing, shares = counted(rows, "difference"), counted(rows, "table_share")
    timed = ratios(rows)
    sizes = sorted(
        {n for by in differing.values() for n in by} | {n for x in timed.values() for n in x}
    )
    if not sizes:
        return None
    lines = [
        [
            str(size),
            *(tables.number(differing.get(s, {}), size, ".0f") for s in COUNTED),
            *(tables.number(shares.get(s, {}), size, ".2%") for s in COUNTED),
            *(_over(timed.get(s, {}).get(size), of) for s in TIMED for of in (median, max)),
        ]
        for size in sizes
    ]
    header = ["rows per page", *(f"elements that differ, {UNIT_NAMES[unit(s)]}" for s in COUNTED)]
    header += [f"table's share of bytes, {UNIT_NAMES[unit(s)]}" for s in COUNTED]
    for series in TIMED:
        on = UNIT_NAMES[unit(series)]
        header += [f"time / contiguous, {on}, {of}" for of in ("median", "largest")]
    caption = (
        "The table of paged caches compares calls whose K/V cache is in pages with calls whose "
        "K/V cache is contiguous. The columns *elements that differ* count the elements of O and "
        "L that are not equal bit for bit. The elements and bytes in the table of paged caches "
        f"are counted on the emulator, for two sequences of {LENGTHS[0]} and {LENGTHS[1]} keys, "
        f"{ROWS} rows of Q and d={COUNTED_DIM}. The columns *table's share of bytes* contain the "
        "accessed bytes of the block table / the accessed bytes of K and V. The columns *time / "
        "contiguous* contain the time with pages / the time with a contiguous cache: the median "
        "and the largest ratio over several lengths. Each timed call with a paged cache is a "
        f"decoding step of {BATCH} sequences. In the timed calls with a paged cache, each sequence "
        f"has one row of Q, {HEADS} query heads and {KEY_HEADS} K/V heads. In the timed calls with "
        "a paged cache, the block table and the sequence lengths are on the GPU. The timed calls "
        "with a paged cache use default tiles and default numbers of key splits."
    )
    return tables.of(caption, header, lines)


def _over(by: Mapping[int, float] | None, of: Any) -> str:
    return f"{of(by.values()):.3f}" if by else tables.MISSING
