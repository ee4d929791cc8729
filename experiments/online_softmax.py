"""Compares naive, safe and online softmax, and standard attention with both flash orders.

The experiment repeats arXiv 1805.02867: softmaxes of 4000 and of 10 vectors, over the length of a
vector. The accesses per element are computed by closed forms and counted. On a GPU, the three
softmaxes and torch's softmax are timed. The safe softmax, the online softmax and torch's softmax
are also timed inside unfused attention. The accesses of standard attention are compared with the
accesses of both flash orders. A further part finds the K largest probabilities of vectors, after
a softmax and in one kernel with the softmax.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

import fa_numba
from fa_numba import device, io_model
from fa_numba.problem import Problem

from .beside import softmax_top_k
from .lab.measure import counts, peers
from .lab.measure.calls import time_row
from .lab.measure.check import Gate, gate, to_host
from .lab.measure.series import LABELS as ATTENTION_LABELS
from .lab.measure.series import call, columns, plan
from .lab.measure.timing import SECONDS, attempt, time_call
from .lab.measure.workloads import SEED, Inputs, one_head
from .lab.record import EMULATOR, MODEL, Bench, Options, Row, published_numbers, select, values
from .lab.show import style, tables

NAME = "online_softmax"
TAKES: tuple[str, ...] = ()
PROTOCOL = (
    "vectors repeat 2**20 standard normal numbers; the first and the last are checked against "
    "float64; in the rows of a softmax seqlen is V and batch the number of vectors"
)

ALGORITHMS = ("naive", "safe", "online")
SERIES = tuple(f"softmax-{name}" for name in ALGORITHMS)
PEER = "torch-softmax"
LABELS = {
    "softmax-naive": "naive",
    "softmax-safe": "safe",
    "softmax-online": "online",
    PEER: "torch.softmax",
}
BATCHES = (4000, 10)  # numbers of vectors, as in the paper
LENGTHS = tuple(1 << n for n in range(6, 18))
QUICK_LENGTHS = (256, 1024)
COUNTED_LENGTHS, COUNTED_BATCH = (256, 1000, 4096), 10
# A number x for which e^x is beyond the largest float32.
TOO_LARGE = 100.0
ATTENTION = ("standard-simt", "fa1-simt", "fa2-simt")
COUNTED_SEQLENS = (128, 256)
# A length at which one row of S does not fit into the shared memory of a thread block.
LONG_SEQLEN = 65536
MATRICES = ("S", "P")
# Series of unfused attention -> the softmax between torch's two matrix products.
UNFUSED = {f"unfused-{name}": f"softmax-{name}" for name in ALGORITHMS[1:]} | {
    "unfused-torch": PEER
}
UNFUSED_SEQLENS, UNFUSED_HEADS = tuple(1 << n for n in range(9, 14)), 16


def of_vectors(series: str, batch: int, elements: int, machine: str | None) -> dict[str, Any]:
    """Return the columns of a row about the softmax of vectors, except metric, unit and value.

    `batch` is the number of vectors. `elements` is the length of a vector, which becomes the
    sequence length of the row.
    """
    return columns(NAME, series, Problem(batch, 1, 1, elements, elements, 1), machine)


def sweep_of(row: Row) -> str:
    """Return the name of a row's sweep: the part of the experiment in which one quantity varies.

    In the sweeps of softmaxes, the length of the vectors varies. In the sweeps of attention, the
    sequence length varies.
    """
    if row.series in softmax_top_k.SERIES:
        return softmax_top_k.sweep_of(row)
    if row.series in LABELS:
        return f"length of {row.batch} vectors"
    return "seqlen, unfused" if row.series in UNFUSED else "seqlen, one head"


def algorithm(series: str) -> str:
    """Return the softmax algorithm of a series: "naive", "safe" or "online"."""
    return series.removeprefix("softmax-")


def measure(options: Options, bench: Bench) -> Iterator[Row | Sequence[Row]]:
    """Yield the accesses of softmaxes and of attention; on a GPU also the times."""
    counted = QUICK_LENGTHS if options.quick else COUNTED_LENGTHS
    problems = [one_head(N, 64) for N in COUNTED_SEQLENS[: 1 if options.quick else None]]
    softmaxes = [(series, COUNTED_BATCH, V) for V in counted for series in SERIES]
    for item in softmaxes:
        yield from _model(*item)
    top_k = [(series, COUNTED_BATCH, V) for V in counted for series in softmax_top_k.OURS]
    for item in top_k:
        yield from softmax_top_k.model(NAME, *item)
    for problem in (*problems, one_head(LONG_SEQLEN, 64)):
        for series in ATTENTION:
            with device.using("emulator"):
                planned = plan(series, problem)
            yield from _attention(series, problem, planned.tiles, planned.accesses, MODEL)

    work: list[tuple[Callable, Any, Any, Any]] = [(_count, *item) for item in softmaxes]
    work += [(_count_top_k, *item) for item in top_k]
    work += [(_overflow, series, 1, QUICK_LENGTHS[0]) for series in SERIES]
    inputs = Inputs()
    work += [(_count_attention, s, p, inputs) for p in problems for s in ATTENTION]
    yield from bench.counted(
        work, "counting on the emulator", lambda count, *arguments: count(*arguments)
    )

    if bench.machine is not None:
        lengths = QUICK_LENGTHS if options.quick else LENGTHS
        yield from _times(lengths, bench)
        everything = device.to_gpu(vectors(max(BATCHES) * max(lengths)))
        yield from softmax_top_k.times(NAME, everything, lengths, BATCHES, bench)
        del everything
        if peers.available() and not options.quick:
            yield from _unfused_times(bench, UNFUSED_SEQLENS)


def _model(series: str, batch: int, V: int) -> Iterator[Row]:
    accesses = io_model.softmax(batch, V, algorithm(series))
    yield from counts.totals(accesses, **of_vectors(series, batch, V, MODEL))


def _count(series: str, batch: int, V: int) -> Iterator[Row]:
    with fa_numba.count_accesses() as counted:
        fa_numba.softmax(vectors(batch * V).reshape(batch, V), algorithm=algorithm(series))
    yield from counts.totals(counted, **of_vectors(series, batch, V, EMULATOR))


def _count_top_k(series: str, batch: int, V: int) -> Iterator[Row]:
    yield from softmax_top_k.count(NAME, series, batch, V, vectors(batch * V).reshape(batch, V))


def _overflow(series: str, batch: int, V: int) -> Iterator[Row]:
    """Yield a row with the number of NaNs that a softmax of very large numbers contains.

    The softmax is computed on the emulator for `batch` vectors of `V` elements. The elements are
    random numbers, to which TOO_LARGE is added.
    """
    x = np.clip(vectors(batch * V), -4, 4).reshape(batch, V) + np.float32(TOO_LARGE)
    with device.using("emulator"), np.errstate(all="ignore"):
        y = fa_numba.softmax(x, algorithm=algorithm(series))
    nan = int(np.isnan(y).sum())
    common = of_vectors(series, batch, V, EMULATOR)
    yield Row(metric="nan", unit="elements", value=nan, **common)


def _count_attention(series: str, problem: Problem, inputs: Inputs) -> Iterator[Row]:
    with fa_numba.count_accesses() as counted:
        tiles = plan(series, problem).tiles
        call(series, problem, *inputs(problem))()
    yield from _attention(series, problem, tiles, counted, EMULATOR)


def _attention(
    series: str, problem: Problem, tiles: Any, accesses: Any, machine: str
) -> Iterator[Row]:
    """Yield rows with the loads and stores of a call: of all arrays, and of S and P alone.

    `accesses` contains the loads and stores of each array.
    """
    fields = columns(NAME, series, problem, machine, tiles)
    yield from counts.totals(accesses, **fields)
    for metric in ("loads", "stores"):
        found = getattr(accesses, metric)
        value = sum(found.get(name, 0) for name in MATRICES)
        yield Row(metric=f"{metric} of scores", unit="elements", value=value, **fields)


def vectors(size: int) -> np.ndarray:
    """Return `size` normal random numbers in float32. After 2^20 numbers, they repeat."""
    drawn = np.random.default_rng(SEED).standard_normal(min(size, 1 << 20), dtype=np.float32)
    return np.resize(drawn, size)


def vector_gate(x: Any) -> Gate:
    """Return the check of a softmax of the rows of x. It compares the first and the last row."""

    def ends(y: Any) -> list[np.ndarray]:
        return [np.stack([to_host(y[row]) for row in (0, x.shape[0] - 1)])]

    def softmax(rows: np.ndarray) -> np.ndarray:
        y = np.exp(rows - rows.max(axis=1, keepdims=True))
        return y / y.sum(axis=1, keepdims=True)

    (rows,) = ends(x)
    return Gate("float32", ends, [("y", softmax(rows.astype(np.float64)), softmax(rows))])


def _times(lengths: Sequence[int], bench: Bench) -> Iterator[Row]:
    everything = device.to_gpu(vectors(max(BATCHES) * max(lengths)))
    shown = [*SERIES, *([PEER] if peers.available() else [])]
    for batch, V in bench.each([(batch, V) for batch in BATCHES for V in lengths], "timing"):
        x = everything[: batch * V].reshape(batch, V)
        gate = vector_gate(x)
        for series in shown:
            check = gate.peer if series == PEER else gate
            timing, why = attempt(time_call, _call(series, x), check)
            yield time_row(timing, why, **of_vectors(series, batch, V, bench.machine))
    peers.release()


def _unfused_times(bench: Bench, seqlens: Sequence[int]) -> Iterator[Row]:
    inputs = Inputs()
    for N in bench.each(seqlens, "timing unfused attention"):
        problem = Problem(1, UNFUSED_HEADS, UNFUSED_HEADS, N, N, 64)
        host = inputs(problem)
        arrays, check = peers.on_device(host), gate(problem, "fwd", *host).peer
        for series, softmax in UNFUSED.items():
            run = peers.call(peers.UNFUSED, problem, *arrays, softmax=partial(_rows, softmax))
            timing, why = attempt(time_call, run, check, seconds=SECONDS)
            yield time_row(timing, why, **columns(NAME, series, problem, bench.machine))
        peers.release()


def _rows(series: str, S: Any) -> Any:
    return _call(series, S.reshape(-1, S.shape[-1]))().reshape(S.shape)


def _call(series: str, x: Any) -> Callable[..., Any]:
    """Return a function that computes the softmax of the rows of x once, by the given series.

    The function takes the argument `out`.
    """
    if series == PEER:
        return peers.softmax(x)
    return partial(fa_numba.softmax, x, algorithm=algorithm(series))


def an_element(rows: Sequence[Row], source: str) -> dict[str, dict[str, float]]:
    """Return accesses per element as {series: {"loads": number, "stores": number}}.

    For a softmax, the numbers are per element of a vector. For attention, they are the accesses of
    S and P per element of S. The numbers are for the largest problem whose sequence length is below
    LONG_SEQLEN.
    """
    found: dict[str, dict[str, float]] = {}
    for row in sorted(select(rows, source=source), key=lambda r: r.seqlen_q):
        vectors = row.series in SERIES
        metric = row.metric if vectors else row.metric.partition(" of scores")[0]
        scored = vectors or row.metric != metric
        if scored and metric in ("loads", "stores") and row.seqlen_q != LONG_SEQLEN:
            elements = row.batch * row.seqlen_q * (1 if vectors else row.seqlen_k)
            found.setdefault(row.series, {})[metric] = row.number / elements
    return {name: each for name, each in found.items() if {"loads", "stores"} <= each.keys()}


def paper() -> dict[str, float]:
    """Return the published accesses per element as {series: number}."""
    lines = published_numbers.lookup(paper="online-softmax", metric="memory accesses per element")
    named = {f"softmax-{line['method']}": float(line["value"]) for line in lines}
    return {series: named[series] for series in SERIES if series in named}


Times = dict[tuple[str, int, int], float]


def times(rows: Sequence[Row]) -> Times:
    """Return times in ms as {(series, number of vectors, length): time}.

    For attention, the number of vectors is the batch size, and the length is N. The times of
    softmaxes with top-k are not included.
    """
    series = (*LABELS, *UNFUSED)
    return values(rows, "series", "batch", "seqlen_q", metric="time", series=series)


def over_safe(found: Times, series: str, batch: int) -> dict[int, float]:
    """Return the time of the safe softmax / the time of a series, as {length: ratio}.

    `batch` is the number of vectors.
    """
    return {
        V: found[SERIES[1], batch, V] / ms
        for (name, vectors, V), ms in sorted(found.items())
        if (name, vectors) == (series, batch) and (SERIES[1], batch, V) in found
    }


def draw(rows: Sequence[Row]) -> Any:
    """Draw the accesses per element, and the speeds of the softmaxes over the length of a vector.

    If there are times of softmaxes with top-k, a further panel shows their speeds. Return None
    without accesses or without times.
    """
    counted = an_element(rows, "counted") or an_element(rows, "model")
    found = times(rows)
    if not counted or not found:
        return None
    if softmax_top_k.times_of(rows):
        figure, axes = style.new(2, 2, 7.6)
        left, *others, last = axes.flat
        softmax_top_k.panel(last, rows, BATCHES[0])
    else:
        figure, axes = style.new(1, 1 + len(BATCHES), 4.2, width_ratios=(1.1, 1, 1))
        left, *others = axes[0]
    _bars(left, counted)
    for ax, batch in zip(others, BATCHES, strict=True):
        _speeds(ax, found, batch)
        ax.set_title(f"softmax of {batch} vectors, fp32")
    handles = style.handles(axes)
    gain = [x for batch in BATCHES for x in over_safe(found, "softmax-online", batch).values()]
    safe, online = (sum(counted[f"softmax-{name}"].values()) for name in ("safe", "online"))
    title = f"Online softmax makes {online:.3g} accesses per element, safe softmax {safe:.3g}"
    about = "Safe softmax finds the maximum in a pass of its own. Attention: accesses of S and P."
    if gain:
        span = f"{1 / max(gain):.2f} to {1 / min(gain):.2f}"
        about += f"\nThe online softmax takes {span} of the safe softmax's time."
    style.legend(figure, list(handles.values()), title, 5, about)
    return figure


# Colours of the softmaxes. No attention kernel has one of the first three colours.
COLOURS = dict(zip(SERIES, ("#999999", "#E69F00", "#56B4E9"), strict=True))
COLOURS[PEER] = style.COLOURS["torch-efficient"]


def _bars(ax: Any, counted: dict[str, dict[str, float]]) -> None:
    looks = COLOURS | {s: style.COLOURS[s] for s in ATTENTION}
    shown = []
    for series in (s for s in (*SERIES, *ATTENTION) if s in counted):
        number = sum(counted[series].values())
        text = f"{number:.3g}" + (f" (published: {paper()[series]:g})" if series in paper() else "")
        name = LABELS.get(series) or ATTENTION_LABELS[series].split(" (")[0]
        shown.append((name, number, looks[series], text))
    style.bars(ax, shown)
    ax.set(xlabel="accesses per element", title="loads + stores", xlim=(0, 8))


def _speeds(ax: Any, found: Times, batch: int) -> None:
    for series, label in LABELS.items():
        points = [
            (V, batch * V / ms / 1e6)
            for (name, vectors, V), ms in sorted(found.items())
            if (name, vectors) == (series, batch)
        ]
        look = {"color": COLOURS[series], "ls": "--" if series == PEER else "-", "label": label}
        style.line(ax, points, marker="o", ms=4, **look)
    lengths = sorted({V for _, vectors, V in found if vectors == batch})
    style.sizes(ax, lengths, "vector length V (elements)", 2 if len(lengths) > 7 else 1)
    ax.set(ylim=(0, None), ylabel="speed (10⁹ elements/s)")


def table(rows: Sequence[Row]) -> tables.Table | None:
    """Return the table of accesses and times, or None without rows."""
    model, counted = an_element(rows, "model"), an_element(rows, "counted")
    if not model:
        return None
    known, found = paper(), times(rows)
    nan = {r.series: r for r in rows if r.metric == "nan"}
    lines = []
    for series in (*SERIES, *ATTENTION):
        form, run = model[series], counted.get(series)
        speeds = [over_safe(found, series, batch) for batch in BATCHES]
        name = LABELS.get(series)
        cells = [f"{name} softmax" if name else f"{ATTENTION_LABELS[series]}"]
        cells += [f"{form[what]:.3g}" for what in ("loads", "stores")]
        cells += [f"{sum(of.values()):.3g}" if of else tables.MISSING for of in (run, form)]
        cells += [tables.number(known, series, "g"), tables.cell(nan.get(series), str)]
        lines.append([*cells, *map(_best, speeds)])
    header = ["algorithm", "loads", "stores", "total, counted", "total, closed form"]
    header += ["total, published", f"NaN in softmax(x + {TOO_LARGE:g})"]
    header += [f"fastest / safe, {batch} vectors (at V)" for batch in BATCHES]
    caption = (
        "For softmaxes, the table of softmaxes contains accesses to global memory per element of "
        "a vector. For attention, the table of softmaxes contains accesses to S and P together, "
        "per element of S. Standard attention writes S, reads S, writes P and reads P in global "
        f"memory.{_long(rows)} FA-1 and FA-2 keep S and P on the chip. The column *NaN in "
        f"softmax(x + {TOO_LARGE:g})* contains the number of NaN in a result of {QUICK_LENGTHS[0]} "
        "elements. A column *fastest / safe* contains the largest ratio *speed of the softmax / "
        "speed of safe softmax* over all vector lengths. The brackets after a ratio *fastest / "
        "safe* contain the vector length V with the largest ratio."
    )
    return tables.of(caption, header, lines)


def _best(speed: dict[int, float]) -> str:
    if not speed:
        return tables.MISSING
    V = max(speed, key=lambda length: speed[length])
    return f"{speed[V]:.2f} ({V})"


def _long(rows: Sequence[Row]) -> str:
    """Return a sentence about standard attention whose rows of S do not fit into shared memory.

    The sentence is empty if there is no such row of data.
    """
    for row in rows:
        if (row.series, row.seqlen_q, row.metric) == (ATTENTION[0], LONG_SEQLEN, "loads of scores"):
            loads = row.number / (row.seqlen_q * row.seqlen_k)
            return (
                f" A row of S with {LONG_SEQLEN} elements does not fit into shared memory, and "
                f"therefore standard attention needs {loads:g} loads per element instead of 2."
            )
    return ""


def inside(rows: Sequence[Row]) -> tables.Table | None:
    """Return the table of the times of unfused attention with each softmax."""
    found = times(rows)
    lengths = sorted({N for series, _, N in found if series in UNFUSED})
    lines = []
    for N in lengths:
        took = {s: found[s, 1, N] for s in UNFUSED if (s, 1, N) in found}
        over = {
            s: ms / took["unfused-online"] for s, ms in took.items() if "unfused-online" in took
        }
        cells = [tables.number(took, s, ".3g") for s in UNFUSED]
        cells += [tables.number(over, s, ".2f") for s in UNFUSED if s != "unfused-online"]
        lines.append([str(N), *cells])
    header = ["N", *(f"{LABELS[s]}, ms" for s in UNFUSED.values()), "safe / online"]
    header += [f"{LABELS[PEER]} / online"]
    caption = (
        "The table of softmaxes inside attention contains the time of a forward call of unfused "
        f"attention in fp32, with {UNFUSED_HEADS} heads and d=64. Torch computes the two matrix "
        "products of unfused attention, Q K^T and P V. Between the two matrix products of unfused "
        "attention, the softmax is online softmax, safe softmax or torch.softmax. In the table of "
        "softmaxes inside attention, the last two columns contain the time with safe softmax or "
        "torch.softmax / the time with online softmax."
    )
    return tables.of(caption, header, lines)


TABLES = {"online_softmax_inside": inside, "online_softmax_top_k": softmax_top_k.table}
