"""Curves over the block size, in units in which head dimensions and dtypes lie on each other."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ..lab.measure import counts
from ..lab.record import PUBLISHED, Row
from ..lab.show import style, tables

# The block size that stays while the other one varies.
FIXED = 64

# A sweep: algorithm, the block size that varies, line, what it is called.
SWEEPS = (
    ("fa1", "Bc", "-", "FA-1 (K/V outer) over $B_c$"),
    ("fa1", "Br", ":", "FA-1 over $B_r$"),
    ("fa2", "Br", "-", "FA-2 (Q outer) over $B_r$"),
    ("fa2", "Bc", ":", "FA-2 over $B_c$"),
)
# Those over the block size that governs the accesses.
GOVERNING = (SWEEPS[0], SWEEPS[2])
Points = dict[int, float]


def points(rows: Iterable[Row], algorithm: str, varied: str, *metrics: str) -> Points:
    """Block size -> the sum of the rows of these metrics, the other block size at FIXED."""
    found: Points = {}
    other = "Br" if varied == "Bc" else "Bc"
    for row in rows:
        if (
            row.series.startswith(algorithm)
            and getattr(row, other) == FIXED
            and row.metric in metrics
            and row.value is not None
        ):
            at = getattr(row, varied)
            found[at] = found.get(at, 0) + row.value
    return dict(sorted(found.items()))


def in_units(found: Mapping[int, float], row: Row) -> Points:
    """Elements, or bytes, of a call in N d a head; `row` says of which problem and unit."""
    whole = row.batch * row.heads_q * row.seqlen_q * row.head_dim
    if row.unit == "bytes":
        whole *= BYTES[row.dtype]
    return {size: value / whole for size, value in found.items()}


# Of an element of Q, K, V and O.
BYTES = {"float32": 4, "float16": 2}
_FILLED = {"float32": None, "float16": "white"}


# Title, what draws it, its rows, the published ones.
Panel = tuple[str, Callable[..., None], Sequence[Row], Sequence[Row]]


def draw(rows: Sequence[Row], paper: Sequence[Row], head_dim: int, counted: Sequence[Row]) -> Any:
    """Panels of `rows` for each length and mask, all but the accesses of `head_dim`; None without
    rows. `paper` are published rows, `counted` the emulator's and the model's.
    """
    problems = sorted({(row.seqlen_q, row.causal) for row in rows})
    if not problems:
        return None
    panels: list[Panel | None] = []
    for N, mask in problems:
        mine = [r for r in rows if (r.seqlen_q, r.causal) == (N, mask)]
        head_dims = {r.head_dim for r in mine}
        d = head_dim if head_dim in head_dims else min(head_dims)
        theirs = [r for r in paper if tables.sizes(r) == (N, d, mask)]
        panels += _panels(mine, theirs, d, f"N={N}{', causal' if mask else ''}")
        panels += [None] * (len(panels) % 2)
    figure, axes = style.new(len(panels) // 2, 2, 1.2 + 3.5 * (len(panels) // 2))
    for panel, ax in zip(panels, axes.flat, strict=True):
        if panel is None:
            ax.set_axis_off()
            continue
        title, make, of, beside = panel
        ax.set_title(title)
        make(ax, of, beside)
    shown = style.handles(axes)
    if shown:
        title = (
            "Larger blocks make fewer accesses; time follows until something else bounds it\n"
            f"the other block size {FIXED}; full marks fp32, hollow ones fp16"
        )
        checked = counts.said(counted)
        title += f"; accesses\n{checked}" if checked else ""
        style.legend(figure, list(shown.values()), title)
    return figure


def _panels(rows: Sequence[Row], paper: Sequence[Row], d: int, what: str) -> list[Panel]:
    of_d = [r for r in rows if r.head_dim == d]
    found: list[Panel] = [
        (f"accesses (model), {what}", _accesses, rows, paper),
        (f"runtime, {what}, d={d}", _runtime, of_d, paper),
    ]
    return found


def _line(ax: Any, found: Points, like: tuple, dtype: str, **more: Any) -> None:
    algorithm, _, ls, name = like
    series = f"{algorithm}-simt"
    look = {"color": style.COLOURS[series], "marker": style.MARKERS[series], "ls": ls}
    look |= {"mfc": _FILLED[dtype], "label": name} | more
    ax.plot(list(found), list(found.values()), **look)


def _finish(ax: Any, sizes: Iterable[int], name: str, *, log: bool = False) -> None:
    style.sizes(ax, sorted(sizes), "block size")
    ax.set_ylabel(name)
    if log:
        style.log(ax.yaxis, 2)
    else:
        ax.set_ylim(bottom=0)


def _accesses(ax: Any, rows: Sequence[Row], paper: Sequence[Row]) -> None:
    """Loads and stores of every head dimension and dtype, which lie on each other."""
    drawn: set[int] = set()
    model = [r for r in rows if r.source == "model" and r.unit == "elements"]
    for like in SWEEPS:
        for dtype, d in sorted({(r.dtype, r.head_dim) for r in model}, reverse=True):
            mine = [r for r in model if (r.dtype, r.head_dim) == (dtype, d)]
            found = points(mine, like[0], like[1], "loads", "stores")
            if not found:
                continue
            found = in_units(found, mine[0])
            drawn |= set(found)
            if dtype == "float32" or not any(r.dtype == "float32" for r in model):
                _line(ax, found, like, dtype)
            else:
                _line(ax, found, like, dtype, label=None, ls="", markersize=10)
    if not drawn:
        style.empty(ax, "no model")
        return
    theirs = [r for r in paper if r.metric == "traffic"]
    if theirs:
        found = in_units({r.Bc or 0: r.number for r in theirs}, theirs[0])
        drawn |= set(found)
        _published(ax, found)
    head_dims = sorted({r.head_dim for r in model})
    if len(head_dims) > 1:
        ax.set_title(f"{ax.get_title()}, d={', '.join(map(str, head_dims))}")
    _finish(ax, drawn, "loads + stores, in N d a head", log=True)


def _published(ax: Any, found: Points) -> None:
    look = {"color": style.COLOURS[PUBLISHED], "ls": "--", "marker": "s", "mfc": "white"}
    name = "FA-1 paper over $B_c$, A100, fp16"
    ax.plot(list(found), list(found.values()), zorder=2, markersize=8, label=name, **look)


def _runtime(ax: Any, rows: Sequence[Row], paper: Sequence[Row]) -> None:
    drawn: set[int] = set()
    for like in SWEEPS:
        for dtype in BYTES:
            mine = [r for r in rows if r.dtype == dtype]
            if found := points(mine, like[0], like[1], "time"):
                drawn |= set(found)
                _line(ax, found, like, dtype)
    theirs = {r.Bc or 0: r.number for r in paper if r.metric == "time"}
    if not drawn:
        ax.set_title(f"{ax.get_title()}: ours not recorded yet")
    if not drawn and not theirs:
        style.empty(ax, "not recorded yet")
        return
    if theirs:
        _published(ax, theirs)
    _finish(ax, drawn | set(theirs), "ms")
