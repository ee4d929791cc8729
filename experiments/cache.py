"""Explains by an LRU model of L2 why DRAM bytes are fewer than accessed bytes.

The model simulates a cache that replaces the least recently used data. The model gets the tiles
that thread blocks load and store, in launch order. It computes DRAM bytes over N for the L2 of an
H200, and over the size of L2. It also computes them for an A100, an H100 and a GPU without L2. The
figure compares the model's DRAM bytes with measured DRAM bytes.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from operator import itemgetter
from typing import Any

from fa_numba import device
from fa_numba.problem import Problem

from .beside import lru
from .lab.measure.series import LABELS, algorithm, columns, plan, query_splits, unit
from .lab.measure.workloads import HEAD_DIMS, SEQLENS, fa2_setting
from .lab.record import FIGURES as RECORDED
from .lab.record import MODEL, Bench, Options, Row, Store, nested, select
from .lab.show import report, style, tables
from .lab.show.tables import Across

NAME = "cache"
TAKES: tuple[str, ...] = ()

MIB = 2**20
H200 = lru.Device("H200", 60 * MIB, 132)
NO_L2 = lru.Device("no L2", 0, 132)
OTHERS = (lru.Device("A100", 40 * MIB, 108), lru.Device("H100", 50 * MIB, 132), NO_L2)
SIZES = (0, 2, 4, 8, 12, 16, 24, 32, 40, 44, 48, 52, 56, 60, 64, 80, 96, 128)
SERIES = {"float32": ("fa1-simt", "fa2-simt"), "float16": ("fa1-mma-splits", "fa2-mma-fa1-tiles")}
DTYPE_NAMES = {"float32": "fp32, CUDA cores", "float16": "fp16, tensor cores (mma)"}
# Sequence lengths at which the size of L2 varies: the working set is about as large as L2, or far
# larger.
OVER_SIZE = {"float32": (512, 4096), "float16": (1024, 4096)}
# (dtype, d, N) of the rows of the table.
SHOWN = (
    ("float32", 64, 512),
    ("float32", 64, 16384),
    ("float32", 128, 16384),
    ("float16", 64, 1024),
    ("float16", 64, 16384),
)
# Experiments that measured DRAM bytes of both loop orders.
RECORDINGS = ALSO_DRAWN = ("io_vs_seqlen", "loop_order")
NEAR = 0.05


@cache
def planned(series: str, problem: Problem) -> tuple[Any, int]:
    """Return the plan of a series' forward call on an H200, and the number of query splits.

    The tiles are planned for the emulated device, an H100. On an H200 the plan has the same tiles.
    """
    base, splits = f"{algorithm(series)}-{unit(series)}", 1
    own: dict[str, Any] = {}
    with device.using("emulator"):
        if series.endswith("-splits"):
            splits = query_splits(problem, H200.multiprocessors, base)
            own |= {"query_splits": splits} if splits > 1 else {}
        if series.endswith("-fa1-tiles"):
            own["tiles"] = plan(base.replace("fa2", "fa1"), problem).tiles
        return plan(base, problem, **own), splits


def dram(series: str, problem: Problem, gpu: lru.Device, capacity: int) -> int:
    """Return the DRAM bytes of a call on `gpu`, by the model with a cache of `capacity` bytes.

    If `capacity` is 0, the result is the bytes of all accesses, because every access then reaches
    DRAM.
    """
    made, splits = planned(series, problem)
    if not capacity:
        return made.accesses.bytes
    of = (algorithm(series), problem, made.tiles, made.launched[0].threads, gpu)
    return lru.dram_bytes(*of, query_splits=splits, capacity=capacity)


def measure(options: Options, bench: Bench) -> Iterator[Row]:
    """Yield the model's DRAM bytes over N, on several GPUs, and over the size of L2."""
    calls = [
        (series, fa2_setting(N, d, dtype=dtype))
        for dtype, shown in SERIES.items()
        for d in HEAD_DIMS
        for N in SEQLENS[: 2 if options.quick else None]
        for series in shown
    ]
    for series, p in bench.track(calls, "model of L2"):
        common = columns(NAME, series, p, MODEL, planned(series, p)[0].tiles)
        shown = (p.dtype, p.head_dim, p.seqlen_q) in SHOWN
        places = [(gpu.name, gpu, gpu.l2_bytes) for gpu in (H200, *(OTHERS if shown else (NO_L2,)))]
        if p.head_dim == HEAD_DIMS[0] and p.seqlen_q in OVER_SIZE[p.dtype]:
            sizes = SIZES[:: 3 if options.quick else 1]
            places += [(f"{size} MiB", H200, size * MIB) for size in sizes]
        for note, gpu, capacity in places:
            value = dram(series, p, gpu, capacity)
            yield Row(metric="dram", unit="bytes", value=value, note=note, **common)


Key = tuple[Any, ...]


def key(row: Row) -> Key:
    """Return the values of a row that identify the call, such as series, N and head dimension."""
    names = ("series", "dtype", "batch", "seqlen_q", "head_dim", "causal", "Br", "Bc")
    return tuple(getattr(row, name) for name in names)


def predicted(rows: Sequence[Row]) -> dict[Key, dict[str, float]]:
    """Return the model's DRAM bytes as {call: {GPU or size of L2: bytes}}.

    The key of a call is the result of `key`. The inner key is the name of a GPU, such as "H200", or
    the size of L2, such as "40 MiB".
    """
    return nested(rows, key, "place", experiment=NAME, metric="dram")


def measured(rows: Sequence[Row]) -> dict[Key, float]:
    """Return the measured DRAM bytes as {call: bytes}, from rows of the experiments in RECORDINGS.

    The key of a call is the result of `key`.
    """
    return {key(row): row.number for row in select(rows, experiment=RECORDINGS, source="dram")}


def recorded() -> list[Row]:
    """Return the stored rows of the experiments in RECORDINGS, measured on an H200."""
    store = Store(RECORDED)
    return [row for name in RECORDINGS for row in store.read(name, report.MACHINE)]


def draw(rows: Sequence[Row]) -> Any:
    """Draw the model's DRAM bytes next to the measured bytes. Return None without rows."""
    found, known = predicted(rows), measured(recorded())
    dtypes = [dtype for dtype in SERIES if any(k[1] == dtype for k in found)]
    if not dtypes:
        return None
    head_dim = min(k[4] for k in found)
    figure, axes = style.new(len(dtypes), 2, 1.2 + 3.3 * len(dtypes))
    for dtype, (left, right) in zip(dtypes, axes, strict=True):
        mine = {k: v for k, v in found.items() if (k[1], k[4]) == (dtype, head_dim)}
        title = f"{DTYPE_NAMES[dtype]}, d={head_dim}"
        left.set_title(f"{title}, L2 of 60 MiB")
        right.set_title(f"{title}, L2 of any size")
        _over_seqlen(left, mine, known)
        _over_size(right, mine, known)
    handles = [
        *(style.key(name, color=_look(fa)["color"]) for fa, name in _NAMES.items()),
        style.key("accessed by the kernels", **_ACCESSED),
        style.key("LRU model (right: long N)"),
        style.key("LRU model, short N", ls="--"),
        style.key("measured, H200", **_MARK),
        style.key("measured, short N", **_MARK_SHORT),
    ]
    style.legend(figure, handles, _message(found, known), 4, ABOUT)
    return figure


ABOUT = (
    "LRU model: a cache of L2's size that replaces the least recently used line. "
    "Left: over N. Right: over the size of L2."
)
_NAMES = {"fa1": "FA-1 (K/V outer)", "fa2": "FA-2 (Q outer)"}
_ACCESSED: dict[str, Any] = {"ls": ":", "lw": 1.2}
_MARK: dict[str, Any] = {"ls": "", "marker": "o", "ms": 7}
_MARK_SHORT = _MARK | {"marker": "D", "mfc": "white", "mew": 1.6}


def _message(found: dict[Key, dict[str, float]], known: dict[Key, float]) -> str:
    near = [abs(error) <= NEAR for error in _errors(found, known).values()]
    return f"An LRU model predicts {sum(near)} of {len(near)} DRAM counts within {NEAR:.0%}"


def _errors(found: dict[Key, dict[str, float]], known: dict[Key, float]) -> dict[Key, float]:
    """Return the relative error of the model's DRAM bytes for an H200, as {call: error}.

    `found` is a result of `predicted`, and `known` is a result of `measured`. An error of -0.1
    means that the model's bytes are 10 % below the measured bytes.
    """
    return {
        at: places["H200"] / known[at] - 1
        for at, places in found.items()
        if at in known and "H200" in places
    }


def _look(series: str) -> dict[str, Any]:
    return {"color": style.COLOURS[f"{algorithm(series)}-simt"]}


def _over_seqlen(ax: Any, found: dict[Key, dict[str, float]], known: dict[Key, float]) -> None:
    lengths = sorted({k[3] for k in found})
    for series in dict.fromkeys(k[0] for k in found):
        look, calls = _look(series), sorted((k for k in found if k[0] == series), key=itemgetter(3))
        model = [(k[3], found[k]["H200"]) for k in calls if "H200" in found[k]]
        style.line(ax, model, **look)
        marks = [(k[3], known[k]) for k in calls if k in known]
        style.line(ax, marks, **_MARK, **look)
        accessed = [(k[3], found[k]["no L2"]) for k in calls if "no L2" in found[k]]
        style.line(ax, accessed, **_ACCESSED, **look)
    style.sizes(ax, lengths, "sequence length N (tokens)")
    ax.set_yscale("log")
    style.byte_axis(ax.yaxis)
    ax.set_ylabel("DRAM bytes of a call")


def _over_size(ax: Any, found: dict[Key, dict[str, float]], known: dict[Key, float]) -> None:
    swept = {k: sizes_of(v) for k, v in found.items() if len(sizes_of(v)) > 1}
    if not swept:
        style.empty(ax, "no sizes")
        return
    longest = max(k[3] for k in swept)
    for at, sizes in swept.items():
        look, is_long = _look(at[0]), at[3] == longest
        x, y = list(sizes), [sizes[size] / found[at]["0 MiB"] for size in sizes]
        ax.plot(x, y, ls="-" if is_long else "--", **look)
        ax.annotate(f"N={style.short(at[3])}", (x[-1], y[-1]), (3, -3), fontsize=9, **look,
                    textcoords="offset points")  # fmt: skip
        if at in known:
            share = known[at] / found[at]["0 MiB"]
            ax.plot([H200.l2_bytes / MIB], [share], **(_MARK if is_long else _MARK_SHORT), **look)
    ax.set(
        xlim=(-3, 146),
        ylim=(0, 1.08),
        xlabel="size of L2 (MiB)",
        ylabel="DRAM bytes / accessed bytes",
    )


def sizes_of(places: dict[str, float]) -> dict[int, float]:
    """Return the DRAM bytes of one call by size of L2, as {MiB: bytes}.

    The argument `places` maps the name of a GPU, or the size of L2, to bytes. Entries for GPUs are
    left out.
    """
    found = {int(p.removesuffix(" MiB")): v for p, v in places.items() if p.endswith(" MiB")}
    return dict(sorted(found.items()))


def fitting_size(sizes: dict[int, float], bytes_: float) -> tuple[int, int] | None:
    """Return the size of L2 for which the model gives `bytes_` DRAM bytes, as a range in MiB.

    `sizes` maps some sizes of L2 in MiB to the model's DRAM bytes. The result is a pair of
    neighbouring sizes, (smaller, larger). `bytes_` is between the DRAM bytes of these sizes. Return
    None if there is no such pair.
    """
    for (small, more), (large, less) in pairwise(sizes.items()):
        if less <= bytes_ < more:
            return small, large
    return None


def _table(rows: Sequence[Row]) -> tables.Table | None:
    found, known = predicted(rows), measured(rows)
    errors = {at: f"{100 * error:+.1f} %" for at, error in _errors(found, known).items()}
    calls = {(at[1], at[4], at[3], at[0]): at for at in found}
    lines = []
    for dtype, d, N in SHOWN:
        for series in SERIES[dtype]:
            if at := calls.get((dtype, d, N, series)):
                moved = [found[at].get("no L2"), found[at].get("H200"), known.get(at)]
                cells = [DTYPE_NAMES[dtype].split(",")[0], str(d), str(N), LABELS[series]]
                cells += [*map(_gb, moved), errors.get(at, tables.MISSING)]
                lines.append([*cells, *(_gb(found[at].get(name)) for name in ("A100", "H100"))])
    header = ["dtype", "d", "N", "algorithm", "accessed, GB", "model, H200 (60 MiB), GB"]
    header += ["measured, H200, GB", "error of the model, H200", "model, A100 (40 MiB), GB"]
    header += ["model, H100 (50 MiB), GB"]
    caption = (
        "The table of the L2 model contains the DRAM bytes of forward calls with 16k tokens and "
        "hidden dimension 2048. In the fp16 rows of the L2 model's table, FA-2 uses FA-1's tiles. "
        "The column *accessed* contains the bytes that the kernels load and store. "
        f"{_verdict(found, known)}"
    )
    return tables.of(caption, header, lines)


def _gb(value: float | None) -> str:
    return tables.MISSING if value is None else f"{value / 1e9:.3g}"


def _verdict(found: dict[Key, dict[str, float]], known: dict[Key, float]) -> str:
    errors = _errors(found, known)
    if not errors:
        return "No call with the tiles of the L2 model was measured."
    near = [at for at, error in errors.items() if abs(error) <= NEAR]
    text = (
        f"For {len(near)} of {len(errors)} measured calls, the DRAM bytes of the L2 model differ "
        f"from the measured DRAM bytes by at most {NEAR:.0%}."
    )
    for at, error in sorted(errors.items(), key=lambda item: item[1])[:3]:
        if abs(error) <= NEAR:
            continue
        dtype = DTYPE_NAMES[at[1]].split(",")[0]
        side = "below" if error < 0 else "above"
        text += (
            f" For {_NAMES[algorithm(at[0])]}, {dtype}, d={at[4]} and N={at[3]}, the L2 model's "
            f"DRAM bytes are {abs(error):.0%} {side} the measured DRAM bytes."
        )
        between = fitting_size(sizes_of(found[at]), known[at])
        low, high = between or (0, 0)
        if between:
            text += (
                f" If the L2 model had {low} to {high} MiB, the modelled DRAM bytes at N={at[3]} "
                f"in {dtype} would equal the measured DRAM bytes."
            )
    return text


table = Across(_table, (NAME, *RECORDINGS), machine=report.MACHINE)
