"""A picture of the page: both orders at the same moment, tile by tile."""

from collections.abc import Sequence
from typing import Any

from ..lab.measure.moves import IN_REGISTERS, Trace, size
from ..lab.measure.series import LABELS
from ..lab.show import style
from .explore_panels import steps

MOMENT = 0.9  # of the bytes of the order that moves less
INPUT, AGAIN, WRITTEN = "#4A5A6A", "#E69F00", "#D55E00"
SHARED, REGISTERS, LANE, SEEN, NOW = "#AAB8C5", "#F3D39C", "#EDEDED", "#CFE3D9", "#009E73"
LEGEND = {
    INPUT: "loads Q, K, V",
    AGAIN: "loads O, l, m again",
    WRITTEN: "stores",
    SHARED: "in shared memory",
    REGISTERS: "in registers",
    SEEN: "tile of S done",
    NOW: "tile of S now",
}
# Left edge and width of what lies beside S, which goes from 0 to 1.
BESIDE = {
    "Q": (-0.27, 0.2),
    "O": (1.07, 0.2),
    "l": (1.32, 0.06),
    "m": (1.42, 0.06),
    "L": (1.32, 0.06),
}
ABOVE = {"K": 1.24, "V": 1.07}


def draw(traces: Sequence[Trace]) -> Any:
    figure, (axes,) = style.new(1, len(traces), 5.2)
    clock = MOMENT * min(trace.bytes for trace in traces)
    for trace, ax in zip(traces, axes, strict=True):
        _side(ax, trace, clock)
    handles = [style.patch(label, color=shade) for shade, label in LEGEND.items()]
    figure.legend(
        handles=handles, loc="outside upper center", ncols=7, columnspacing=1.2, handlelength=1.2
    )
    return figure


def _side(ax: Any, trace: Trace, clock: float) -> None:
    from matplotlib.patches import Rectangle

    found = steps(trace)
    at = next((n for n, end in enumerate(found["bytes"]) if end > clock), len(found["bytes"]))
    shades: dict[str, str] = {}
    said = [step.split("|") for step in found["steps"]]
    shades |= {f"S{visit}": SEEN for _, _, visit, *_ in said[:at] if visit}
    if at < len(said):
        moves, held, visit, *_ = said[at]
        shades |= {key: REGISTERS if key[0] in IN_REGISTERS else SHARED for key in held.split()}
        for move in moves.split():
            again = AGAIN if move[1] in IN_REGISTERS else INPUT
            shades[move[1:]] = WRITTEN if move[0] == ">" else again
        shades |= {f"S{visit}": NOW} if visit else {}
    Tr, Tc = trace.row_tiles, trace.column_tiles

    def box(key: str, x: float, y: float, width: float, height: float) -> None:
        shade = shades.get(key, LANE)
        ax.add_patch(Rectangle((x, y), width, height, facecolor=shade, edgecolor="white"))

    for i in range(Tr):
        y = 1 - (i + 1) / Tr
        for name, (x, width) in BESIDE.items():
            if name in (("Q", "O", "l", "m") if trace.algorithm == "fa1" else ("Q", "O", "L")):
                box(f"{name}{i}", x, y, width, 1 / Tr)
                if i == 0:
                    ax.text(x + width / 2, 1.02, name, ha="center", weight="bold")
        for j in range(Tc):
            box(f"S{i},{j}", j / Tc, y, 1 / Tc, 1 / Tr)
    for name, y in ABOVE.items():
        ax.text(-0.05, y + 0.03, name, ha="center", weight="bold")
        for j in range(Tc):
            box(f"{name}{j}", j / Tc, y, 1 / Tc, 0.12)
    moved = found["bytes"][at - 1] if at else 0
    ax.set_title(
        f"{LABELS[trace.series]}: {size(moved)} of {size(trace.bytes)}",
        color=style.COLOURS[trace.series],
        weight="bold",
    )
    ax.set(xlim=(-0.3, 1.52), ylim=(-0.02, 1.4))
    ax.set_axis_off()
