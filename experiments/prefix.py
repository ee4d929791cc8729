"""Compares reading a shared prefix once for all sequences with reading it once per sequence.

A prefix is the keys and values with which all sequences begin. The model computes the bytes of a
decoding step in which 1 to 256 sequences share a prefix of 1k to 16k keys, in fp16 at d=128. On a
GPU, the times of these steps are measured. The emulator counts the bytes of smaller steps, with at
most 8 sequences and 130 keys.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

import fa_numba
from fa_numba import device, reference
from fa_numba.problem import Problem

from .lab.measure import calls, check, counts, peers
from .lab.measure.series import HOPPER, UNIT_NAMES, columns, unit
from .lab.measure.timing import attempt, time_call
from .lab.measure.workloads import Inputs
from .lab.record import EMULATOR, MODEL, Bench, Options, Row, nested
from .lab.show import style, tables

NAME = "prefix"
TAKES: tuple[str, ...] = ()

ONCE, BY_EACH = "read once", "read by each"
WAYS = (ONCE, BY_EACH)
# Sizes of the counted decoding steps and of the timed steps: query heads, K/V heads, keys of each
# sequence after the prefix, head dimension, rows of a page.
SMALL, LARGE = (4, 2, 24, 64, 16), (32, 8, 128, 128, 64)
COUNTED = {"fa2-simt": "float32", "fa2-mma": "float16", "fa2-wgmma": "float16"}
COUNTED_STEPS = tuple(itertools.product((1, 3, 8), (40, 130)))
TIMED = ("fa2-mma", HOPPER)
SEQUENCES, PREFIXES = (1, 4, 16, 64, 256), (1024, 4096, 16384)
PROTOCOL = (
    f"one row of Q per sequence, {LARGE[0]} query heads, {LARGE[1]} K/V heads, {LARGE[2]} keys of "
    f"each sequence after the prefix, d={LARGE[3]}, pages of {LARGE[4]} rows; if each sequence "
    "reads the prefix, all block tables begin with the same pages"
)


def step(sequences: int, prefix: int, sizes: Sequence[int], dtype: str = "float16") -> Problem:
    """Return the problem of a decoding step: one row of Q for each sequence.

    `sequences` is the number of sequences, and `prefix` is the number of keys of the prefix. Each
    sequence has the keys of the prefix and keys of its own. `sizes` is SMALL or LARGE.
    """
    heads, heads_k, own, d, _ = sizes
    return Problem(sequences, heads, heads_k, 1, prefix + own, d, dtype=dtype)


def prefix_of(row: Row | Problem, sizes: Sequence[int]) -> int:
    """Return the number of keys of the prefix in a problem or a row. `sizes` is SMALL or LARGE."""
    return row.seqlen_k - sizes[2]


class Behind:
    """K or V of sequences that begin with a prefix, of shape (batch, heads_k, N, d).

    The object is indexed by batch entry, head and rows. It joins the prefix and the sequence's own
    rows only for the requested batch entry and head.
    """

    def __init__(self, prefix: np.ndarray, own: np.ndarray) -> None:
        self._prefix, self._own = prefix, own

    def __getitem__(self, place: tuple[int, int, slice]) -> np.ndarray:
        entry, head, rows = place
        return np.concatenate((self._prefix[head], self._own[entry, head]))[rows]


def arrays(problem: Problem, sizes: Sequence[int], inputs: Inputs) -> tuple[np.ndarray, ...]:
    """Return q, the prefix's k and v, and the k and v of the sequences' own keys.

    The prefix's arrays have shape (heads_k, N, d), and the other arrays (batch, heads, N, d).
    `inputs` returns random arrays for a problem. `sizes` is SMALL or LARGE.
    """
    prefix = prefix_of(problem, sizes)
    q, k, v = inputs(replace(problem, seqlen_k=sizes[2]))
    _, *first = inputs(replace(problem, batch=1, seqlen_k=prefix))
    # The prefix's rows are in reverse order, so that they differ from the sequences' own rows.
    return q, *(np.ascontiguousarray(x[0, :, ::-1]) for x in first), k, v


def pages_of(x: np.ndarray, rows: int) -> np.ndarray:
    """Return an array (batch, heads_k, N, d) as pages of `rows` rows, in order.

    The result has shape (pages, heads_k, rows, d). If N is not a multiple of `rows`, zeros fill the
    end of each sequence's last page.
    """
    B, Hk, N, d = x.shape
    each = -(-N // rows)
    whole = np.zeros((B, Hk, each * rows, d), x.dtype)
    whole[:, :, :N] = x
    return whole.reshape(B, Hk, each, rows, d).swapaxes(1, 2).reshape(B * each, Hk, rows, d)


def given(
    way: str, problem: Problem, host: Sequence[np.ndarray], sizes: Sequence[int]
) -> tuple[tuple[np.ndarray, ...], dict[str, Any]]:
    """Return the arguments of a call: (q, k, v), and a dict of options that are arrays.

    `k` and `v` are in pages. `way` says how the prefix is read: ONCE for all sequences, or BY_EACH
    sequence. `host` is the result of `arrays`. `sizes` is SMALL or LARGE.
    """
    q, *of_prefix, k, v = host
    size, own = sizes[-1], sizes[2]
    each, first = -(-own // size), prefix_of(problem, sizes)
    table = np.arange(problem.batch * each, dtype=np.int32).reshape(problem.batch, each)
    pages = [pages_of(x, size) for x in (k, v)]
    lens = np.full(problem.batch, own, np.int32)
    if way == ONCE:
        found: dict[str, Any] = {"block_table": table, "kv_lens": lens}
        return (q, *pages), found | dict(zip(("prefix_k", "prefix_v"), of_prefix, strict=True))
    # The last rows of the prefix may not fill a page. These rows and the sequence's own rows are
    # joined.
    tail = first % size
    shared = [pages_of(x[None, :, : first - tail], size) for x in of_prefix]
    joined = [
        np.concatenate([np.broadcast_to(x[:, first - tail :], (len(y), *x[:, :tail].shape)), y], 2)
        for x, y in zip(of_prefix, (k, v), strict=True)
    ]
    own_pages = [pages_of(x, size) for x in joined]
    begin = len(shared[0])
    mine = np.arange(len(own_pages[0]), dtype=np.int32).reshape(problem.batch, -1) + begin
    front = np.broadcast_to(np.arange(begin, dtype=np.int32), (problem.batch, begin))
    pages = [np.concatenate(x) for x in zip(shared, own_pages, strict=True)]
    return (q, *pages), {"block_table": np.hstack([front, mine]), "kv_lens": lens + first}


def _told(way: str, problem: Problem, sizes: Sequence[int]) -> tuple[Problem, dict[str, Any]]:
    """Return the problem and the options with which `fa_numba.plan` plans a call over pages.

    In the returned problem, K and V are pages. In the options, arrays are replaced by their shapes.
    `problem` is the decoding step, as `step` returns it. `way` says how the prefix is read: ONCE
    for all sequences, or BY_EACH sequence. `sizes` is SMALL or LARGE.
    """
    first, own, size = prefix_of(problem, sizes), sizes[2], sizes[-1]
    keys = own if way == ONCE else first + own
    table = problem.batch, -(-keys // size)
    pages = table[0] * table[1], problem.heads_k, size, problem.head_dim
    paged = Problem.from_shapes(problem.q_shape, pages, dtype=problem.dtype, block_table=table)
    options: dict[str, Any] = {"block_table": table, "kv_lens": (keys,) * problem.batch}
    if way == ONCE:
        options["prefix_k"] = problem.heads_k, first, problem.head_dim
    return paged, options


def measure(options: Options, bench: Bench) -> Iterator[Row | Sequence[Row]]:
    """Yield bytes, both computed by closed forms and counted on the emulator.

    On a GPU, also yield the time of a decoding step.
    """
    steps = COUNTED_STEPS[:: 3 if options.quick else 1]
    yield from bench.counted([(s, *at) for s in COUNTED for at in steps], "counting", _counted)
    for series, at in itertools.product(COUNTED, steps):
        yield from _modelled(series, step(*at, SMALL, COUNTED[series]), SMALL)
    for series, sequences, prefix in itertools.product(TIMED, SEQUENCES, PREFIXES):
        yield from _modelled(series, step(sequences, prefix, LARGE), LARGE)
    if bench.machine is None:
        return
    timed_at = list(itertools.product(PREFIXES, SEQUENCES))[: 2 if options.quick else None]
    problems = [step(n, prefix, LARGE) for prefix, n in timed_at]
    timed = TIMED if device.compute_capability() == (9, 0) else TIMED[:1]
    inputs = Inputs()
    for problem in bench.each(problems, "timing"):
        yield from _times(problem, timed, inputs, bench.machine)


def _modelled(series: str, problem: Problem, sizes: Sequence[int]) -> Iterator[Row]:
    for way in WAYS:
        paged, told = _told(way, problem, sizes)
        how: dict[str, Any] = {"dtype": problem.dtype, "unit": unit(series), "kv_splits": 1}
        with device.using("emulator"):
            plan = fa_numba.plan(paged.q_shape, paged.k_shape, **how, **told)
        common = columns(NAME, series, problem, MODEL, note=way)
        yield Row(metric="traffic", unit="bytes", value=plan.accesses.bytes, **common)


def _counted(series: str, sequences: int, prefix: int) -> Iterator[Row]:
    """Yield the bytes and the error of one small decoding step on the emulator.

    The step runs twice: the prefix is read once for all sequences, or by each sequence.
    """
    problem = step(sequences, prefix, SMALL, COUNTED[series])
    host = tuple(x.astype(problem.dtype) for x in arrays(problem, SMALL, Inputs()))
    q, first_k, first_v, k, v = host
    whole = (
        np.concatenate([np.broadcast_to(x, (sequences, *x.shape)), y], 2)
        for x, y in ((first_k, k), (first_v, v))
    )
    exact = reference.attention(q, *whole)
    common = columns(NAME, series, problem, EMULATOR)
    for way in WAYS:
        given_arrays, options = given(way, problem, host, SMALL)
        with device.using("emulator"), fa_numba.count_accesses() as counted:
            found = fa_numba.flash_attention_2(
                *given_arrays, unit=unit(series), kv_splits=1, **options
            )
        moved = sum(counted.load_bytes.values()) + sum(counted.store_bytes.values())
        yield Row(metric="traffic", unit="bytes", value=moved, note=way, **common)
        error = reference.relative_error(found, exact)
        yield Row(metric="error", unit="1", value=float(error), note=way, **common)


def _times(problem: Problem, timed: Sequence[str], inputs: Inputs, machine: str) -> Iterator[Row]:
    q, first_k, first_v, k, v = host = arrays(problem, LARGE, inputs)
    gate = check.gate(problem, "fwd", q, Behind(first_k, k), Behind(first_v, v))
    for way in WAYS:
        placed, failure = attempt(_placed, way, problem, host)
        for series in timed:

            def work(series: str = series, placed: Any = placed) -> Any:
                on_gpu, options = placed

                def run(out: Any = None) -> Any:
                    own = {"unit": unit(series), **options}
                    return fa_numba.flash_attention_2(*on_gpu, out=out, **own)

                return time_call(run, gate)

            timing, failed = (None, failure) if failure else attempt(work)
            common = columns(NAME, series, problem, machine)
            yield calls.time_row(timing, failed, way, **common)
        device.release_memory()
        peers.release()


def _placed(way: str, problem: Problem, host: Sequence[np.ndarray]) -> tuple[Any, dict[str, Any]]:
    on_host, options = given(way, problem, host, LARGE)
    integers = {"block_table", "kv_lens"}
    found = {
        name: peers.on_device((x,), "int32" if name in integers else problem.dtype)[0]
        for name, x in options.items()
    }
    return peers.on_device(on_host, problem.dtype), found


Place = tuple[int, int]  # keys of the prefix, sequences


def by_way(rows: Sequence[Row], series: str, metric: str) -> dict[Place, dict[str, float]]:
    """Return bytes or times of decoding steps with the sizes LARGE, by how the prefix is read.

    The result is {(keys of the prefix, number of sequences): {way: number}}. There are two ways to
    read the prefix: ONCE for all sequences, or BY_EACH sequence. With the metric "traffic", the
    numbers are bytes by the access model. With another metric, such as "time", they are measured
    numbers. Decoding steps that have a number for only one of the two ways are left out.
    """
    wanted = {"series": series, "metric": metric, "head_dim": LARGE[3]}
    wanted["source"] = "model" if metric == "traffic" else "measured"
    found = nested(rows, lambda row: (prefix_of(row, LARGE), row.batch), "place", **wanted)
    return {at: ways for at, ways in sorted(found.items()) if len(ways) == len(WAYS)}


def gains(found: dict[Place, dict[str, float]]) -> dict[int, dict[int, float]]:
    """Return by what factor reading the prefix once reduces a number, such as bytes or the time.

    The factor is the number for BY_EACH / the number for ONCE. `found` is a result of `by_way`. The
    result is {keys of the prefix: {number of sequences: factor}}.
    """
    by: dict[int, dict[int, float]] = {}
    for (prefix, sequences), ways in found.items():
        by.setdefault(prefix, {})[sequences] = ways[BY_EACH] / ways[ONCE]
    return by


_LOOKS = dict(zip(PREFIXES, (("#0072B2", "o"), ("#009E73", "s"), ("#D55E00", "^")), strict=True))


def draw(rows: Sequence[Row]) -> Any:
    """Draw the gains of reading the prefix once, over the number of sequences.

    Return None without rows.
    """
    moved = gains(by_way(rows, TIMED[0], "traffic"))
    timed = {series: gains(by_way(rows, series, "time")) for series in TIMED}
    if not moved:
        return None
    figure, (axes,) = style.new(1, 1 + len(TIMED), 4.2, sharey=True)
    titles = ["bytes accessed", *(f"time, {UNIT_NAMES[unit(series)]}" for series in TIMED)]
    for ax, title, by in zip(axes, titles, (moved, *timed.values()), strict=True):
        ax.set_title(title)
        if not by:
            style.empty(ax, "not recorded")
            continue
        for prefix, points in by.items():
            colour, marker = _LOOKS.get(prefix, ("#000000", "D"))
            label = f"prefix of {style.short(prefix)} keys"
            ax.plot([*points], [*points.values()], color=colour, marker=marker, label=label)
        style.sizes(ax, sorted({n for points in by.values() for n in points}), "sequences")
        style.log(ax.yaxis, 2)
        ax.axhline(1, color="#888888", lw=0.8)
    axes[0].set_ylabel("read by each sequence / read once")
    most = max(points.get(SEQUENCES[-1], 0) for points in moved.values())
    message = f"Reading a shared prefix once moves up to {most:.0f} times fewer bytes"
    times = [f"{_range(by)} times with {unit(series)}" for series, by in timed.items() if by]
    about = (
        f"For {SEQUENCES[-1]} sequences: {_range(moved)} times fewer bytes. The time is shorter by "
    )
    about += " and ".join(times) or "a factor that is not recorded"
    handles, _ = axes[0].get_legend_handles_labels()
    style.legend(figure, handles, message, about=f"{about}.")
    return figure


def _range(by: dict[int, dict[int, float]]) -> str:
    found = [points[SEQUENCES[-1]] for points in by.values() if SEQUENCES[-1] in points]
    return tables.between(found) if found else ""


def table(rows: Sequence[Row]) -> tables.Table | None:
    """Return the table of bytes and times, or None without rows.

    The table compares reading the prefix once for all sequences with reading it by each sequence.
    """
    moved = by_way(rows, TIMED[0], "traffic")
    timed = {series: by_way(rows, series, "time") for series in TIMED}
    timed = {series: by for series, by in timed.items() if by}
    places = sorted({*moved, *(at for by in timed.values() for at in by)})
    if not places:
        return None
    lines = []
    for at in places:
        cells = _cells(moved.get(at), 1e-6)
        for by in timed.values():
            cells += _cells(by.get(at), 1e3)
        lines.append([*map(str, at), *cells])
    header = ["keys of the prefix", "sequences"]
    for what in ("MB", *(f"us on {unit(series)}" for series in timed)):
        header += [f"{what}, prefix read once", f"{what}, prefix read by each sequence"]
        header.append(f"{what}, by each / once")
    small = [row for row in rows if row.head_dim == SMALL[3] and row.metric == "traffic"]
    errors = [row.number for row in rows if row.metric == "error"]
    caption = (
        "The table of shared prefixes contains bytes and times of a decoding step in fp16 with a "
        "shared prefix. Each sequence in the table of shared prefixes has one row of Q and "
        f"{LARGE[2]} keys after the prefix, with {LARGE[0]} query heads, {LARGE[1]} K/V heads and "
        f"d={LARGE[3]}. Each page of the K/V cache with a shared prefix has {LARGE[4]} rows. If "
        "each sequence reads the prefix, the block table of each sequence begins with the pages "
        "of the prefix. The columns *MB* contain the megabytes that the kernels on mma load and "
        "store in global memory, by the access model"
    )
    if errors:
        equal, counted = counts.equal(small)
        caption += (
            ". The emulator ran smaller decoding steps with a shared prefix, with 1 to 8 "
            "sequences, on CUDA cores, mma and wgmma. For decoding steps with a shared prefix, "
            f"{equal} of {counted} numbers counted by the emulator equal the access model. The "
            "errors of the emulator's decoding results with a shared prefix, compared with "
            f"float64, are at most {max(errors):.1e}"
        )
    caption += "." if timed else ". Times are not recorded."
    return tables.of(caption, header, lines)


def _cells(ways: dict[str, float] | None, times: float) -> list[str]:
    if ways is None:
        return [tables.MISSING] * 3
    once, each = (times * ways[way] for way in WAYS)
    return [f"{once:.1f}", f"{each:.1f}", f"{each / once:.2f}"]
