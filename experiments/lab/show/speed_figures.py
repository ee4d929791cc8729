"""The figure and the table of a speed experiment, and the curves that the FA-2 paper publishes."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..measure import peers
from ..measure.calls import theirs
from ..measure.series import BACKWARD_LABELS, LABELS, UNIT_NAMES, unit
from ..measure.speeds import DTYPES, PASSES, UNSPLIT, Study
from ..measure.workloads import HEAD_DIMS
from ..record import Row, published_numbers
from . import style, tables


def draw(study: Study, rows: Sequence[Row]) -> Any:
    """Draw the figure of a speed experiment: speed over sequence length.

    There is one row of panels for each pass and head dimension, and one column for each mask.

    Parameters
    ----------
    study : Study
        The experiment.
    rows : sequence of Row
        Rows of the experiment.

    Returns
    -------
    Figure or None
        The figure. None if no row contains a speed of a series to draw.
    """
    peak = next((r.value for r in rows if r.series == peers.MATMUL and not r.failed), None)
    every = rows
    rows = [row for row in rows if row.metric == "speed" and row.series in study.drawn]
    if not rows:
        return None
    measured = {r.series for r in rows}
    shown = [series for series in study.drawn if series in measured]
    several, names = len(study.passes) > 1, _names(study)
    across = [
        (p, d) for p in study.passes for d in sorted({r.head_dim for r in rows if r.pass_ == p})
    ]
    masks = sorted({row.causal for row in rows})
    height = 1.6 + 2.6 * len(across) if several else 0.9 + 3.1 * len(across)
    figure, axes = style.new(len(across), len(masks), height, sharey="row")
    for (pass_, d), panels in zip(across, axes, strict=True):
        for mask, ax in zip(masks, panels, strict=True):
            mine = [r for r in rows if (r.pass_, r.head_dim, r.causal) == (pass_, d, mask)]
            _curves(ax, mine, shown, names)
            if peak is not None:
                name = f"torch's matrix product: {peak:.0f} TFLOP/s"
                ax.axhline(peak, color="#555555", ls=(0, (6, 3)), lw=1.2, zorder=1, label=name)
            ax.set_ylim(bottom=0)
            lengths = {row.seqlen_q for row in (rows if several else mine)}
            style.sizes(ax, sorted(lengths), LENGTH)
            title = f"d={d}, {'causal' if mask else 'not causal'}"
            ax.set_title(f"{PASSES[pass_]}, {title}" if several else title)
        panels[0].set_ylabel("speed (TFLOP/s)")
    _legend(figure, axes, every, study)
    return figure


# Label of the x axis of these figures.
LENGTH = "sequence length N (tokens)"


def _names(study: Study) -> dict[str, str]:
    """Return the labels of the series in the figure, as {series: label}.

    In the backward pass, both loop orders have the loop over K and V outside, and differ in the
    grid. If the study has a pass other than "fwd", the labels therefore name the grid instead of
    the loop order.
    """
    return LABELS if study.passes == ("fwd",) else BACKWARD_LABELS


def _band() -> Any:
    """Return the legend entry for the bands that `_curves` draws."""
    return style.patch("band: p20 to p80 of the runs", color="#444444", alpha=0.2, lw=0)


def _curves(
    ax: Any, rows: Sequence[Row], shown: Sequence[str], names: Mapping[str, str] = LABELS
) -> None:
    """Draw the speed of each series over the sequence length, with a band from p20 to p80.

    `shown` contains the series, and `names` maps a series to its label.
    """
    for series in shown:
        points = sorted(
            (r for r in rows if r.series == series and not r.failed), key=lambda r: r.seqlen_q
        )
        x = [r.seqlen_q for r in points]
        look: dict[str, Any] = {"ls": "--" if theirs(series) else "-"}
        look |= {"zorder": 2.5 if series in UNSPLIT else 3, "marker": style.MARKERS[series]}
        look |= {"color": style.COLOURS[series], "label": names[series]}
        ax.plot(x, [r.value for r in points], **look)
        low, high = (
            [r.value if (end := getattr(r, name)) is None else end for r in points]
            for name in ("p20", "p80")
        )
        ax.fill_between(x, low, high, color=style.COLOURS[series], alpha=0.2, lw=0)


def forward(rows: Sequence[Row], shown: Sequence[str], message: str) -> Any:
    """Draw the speed of the forward pass over sequence length, with a panel per head dimension.

    Rows without a mask are drawn. Only if there are none, causal rows are drawn.

    Parameters
    ----------
    rows : sequence of Row
        Rows of data.
    shown : sequence of str
        Names of the series to draw.
    message : str
        First line of the title.

    Returns
    -------
    Figure or None
        The figure. None if there are no rows of these series.
    """
    mine = [r for r in rows if r.metric == "speed" and r.series in shown and r.pass_ == "fwd"]
    mine = [r for r in mine if not r.causal] or mine
    if not mine:
        return None
    head_dims = [d for d in sorted({r.head_dim for r in mine}) if d in HEAD_DIMS] or [
        mine[0].head_dim
    ]
    figure, (axes,) = style.new(1, len(head_dims), 4.4, sharey=True)
    for d, ax in zip(head_dims, axes, strict=True):
        here = [r for r in mine if r.head_dim == d]
        _curves(ax, here, [series for series in shown if series in {r.series for r in here}])
        style.sizes(ax, sorted({r.seqlen_q for r in here}), LENGTH)
        ax.set_title(f"d={d}{', causal' if here[0].causal else ''}")
    axes[0].set(ylabel="speed (TFLOP/s)", ylim=(0, None))
    found = [*style.handles(axes).values(), _band()]
    units = {unit(r.series) for r in mine if not theirs(r.series)}
    what = f"forward, {DTYPES[mine[0].dtype]}, "
    what += ", ".join(name for each, name in UNIT_NAMES.items() if each in units)
    style.legend(figure, found, f"{message}\n{what}; 16k tokens, hidden dimension 2048")
    return figure


def published_speeds(
    figures: Sequence[str], pass_: str, head_dim: int, causal: bool
) -> dict[tuple[str, str], dict[int, float]]:
    """Return speeds that figures of the FA-2 paper publish, as curves.

    Parameters
    ----------
    figures : sequence of str
        Names of figures in the paper, such as "Fig. 5".
    pass_ : str
        The pass.
    head_dim : int
        Head dimension.
    causal : bool
        Whether the mask is causal.

    Returns
    -------
    dict
        Maps (method, GPU) to {sequence length: TFLOP/s}.
    """
    found: dict[tuple[str, str], dict[int, float]] = {}
    wanted = {"pass": pass_, "head_dim": str(head_dim), "causal": str(causal).lower()}
    for item in figures:
        for line in published_numbers.lookup(paper="fa2", item=item, metric="speed", **wanted):
            gpu = line["hardware"].split("-")[0]
            curve = found.setdefault((line["method"], gpu), {})
            curve[int(line["seqlen"])] = float(line["value"])
    return found


def _over_fa1(rows: Sequence[Row]) -> list[float]:
    """Return the ratios of FA-2's speed to FA-1's speed, one for each problem and pass.

    Only the series on CUDA cores are compared. FA-1 runs on two grids, the paper's grid and a grid
    with query splits. The faster of both is compared.
    """
    best: dict[tuple, dict[str, float]] = {}
    for row in rows:
        algorithm = row.series.split("-")[0]
        if not row.failed and row.series.removesuffix("-splits").endswith(("fa1-simt", "fa2-simt")):
            mine = best.setdefault((row.pass_, *tables.sizes(row)), {})
            mine[algorithm] = max(mine.get(algorithm, 0.0), row.number)
    return [found["fa2"] / found["fa1"] for found in best.values() if len(found) == 2]


def _legend(figure: Any, axes: Any, rows: Sequence[Row], study: Study) -> None:
    handles, names = style.handles(axes), _names(study)
    drawn = [r for r in rows if r.metric == "speed" and r.series in study.drawn]
    used = {r.series for r in drawn}
    left_out = {names[series] for series in study.drawn if series not in used}
    order = [names[series] for series in study.drawn]
    kept = [label for label in dict.fromkeys((*order, *handles)) if label not in left_out]
    units = {unit(series) for series in study.ours if series in study.drawn}
    named = " and ".join(name for each, name in UNIT_NAMES.items() if each in units)
    title = f"{DTYPES[study.dtype]}, {named}, 16k tokens, hidden dimension 2048"
    faster = _over_fa1(drawn)
    if len(study.passes) == 1:
        title = f"{PASSES[study.passes[0]]}, {title}"
    if study.passes != ("fwd",):
        title += "\nK/V is outer in both backward passes: they differ in the grid"
    longest, ends = study.fa1_longest, []
    if longest is not None and any(r.seqlen_q > longest for r in drawn):
        ends.append(f"FA-1 was run up to N={style.short(longest)}")
    if any(r.failed and "memory" in r.note.lower() and r.series in used for r in rows):
        ends.append("a line ends early where memory was full")
    if ends:
        title += f"\n{'; '.join(ends)}"
    if faster:
        grid = "; FA-1 at its faster grid" if any(s.endswith("-splits") for s in used) else ""
        title = f"FA-2 is up to {max(faster):.1f} times as fast as FA-1\n{title}{grid}"
    style.legend(figure, [*(handles[label] for label in kept), _band()], title)


def table(
    study: Study, rows: Sequence[Row], caption: str, shown: Sequence[str] | None = None
) -> tables.Table | None:
    """Return the table of a speed experiment: TFLOP/s of several series, and a ratio.

    The last column is the speed of our FA-2 divided by the speed of torch's kernel. The number of
    passes of the study decides which calls the table shows:

    | passes | sequence lengths | masks |
    |---|---|---|
    | one | the shortest and the longest | all |
    | several | the longest | causal; if it was not measured, no mask |

    Parameters
    ----------
    study : Study
        The experiment.
    rows : sequence of Row
        Rows of the experiment.
    caption : str
        First sentence above the table.
    shown : sequence of str, optional
        Names of the series. Default: the series of the figure.

    Returns
    -------
    Table or None
        The table. None if no row contains a speed.
    """
    shown = shown or study.drawn
    mine = [r for r in rows if r.metric == "speed" and r.series in study.series]
    measured = {r.series for r in mine}
    found = {(r.pass_, *tables.sizes(r), r.series): r for r in mine}
    if not found:
        return None
    ours, peer = next(s for s in shown if s in ("fa2-simt", "fa2-mma")), study.theirs[0]
    shown = [series for series in shown if series in measured]
    several = len(study.passes) > 1
    lengths, masks = {r.seqlen_q for r in mine}, {r.causal for r in mine}
    at = {max(lengths)} if several else {min(lengths), max(lengths)}
    if several:
        masks = {max(masks)}
    lines = []
    for pass_, d, causal, N in sorted({(p, d, causal, N) for p, N, d, causal, _ in found}):
        if N not in at or causal not in masks:
            continue
        cells = {series: found.get((pass_, N, d, causal, series)) for series in shown}
        numbers = [tables.cell(row, lambda v: f"{v:.1f}") for row in cells.values()]
        pair = [row.value if row else None for row in (cells.get(ours), cells.get(peer))]
        ratio = f"{pair[0] / pair[1]:.2f}" if pair[0] and pair[1] else tables.MISSING
        place = [str(d), tables.yes_no(causal), str(N)]
        lines.append([*([pass_] if several else []), *place, *numbers, ratio])
    header = ["d", "causal", "N", *(LABELS[s] for s in shown), f"FA-2 / {LABELS[peer]}"]
    if several:
        header.insert(0, "pass")
    peak = next((r for r in rows if r.series == peers.MATMUL and not r.failed), None)
    dtype, reach = DTYPES[study.dtype], ""
    if peak:
        reach = (
            f" For comparison, torch's {dtype} matrix product reaches {peak.number:.0f} TFLOP/s."
        )
    timed = tables.runs(r for r in rows if r.metric == "time")
    of_runs = f" The speeds in the table of {dtype} speeds are {timed}." if timed else ""
    return tables.of(
        f"{caption}{of_runs}{reach} The CSV file of the experiment `{study.name}` also contains "
        f"speeds for lengths and masks that the table of {dtype} speeds does not show.",
        header,
        lines,
    )
