"""The page as one file: template, style, script and data."""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

from ..lab.measure.moves import Trace
from ..lab.measure.series import BACKWARD_LABELS, LABELS
from ..lab.record import FIGURES, MODEL, Row, Store, nested, provenance, select
from ..lab.show import report
from ..lab.show.style import COLOURS
from . import explore_panels
from .panels import DIGITS, Answer, Axis, Panel

FOLDER = Path(__file__).resolve().parents[1] / "explore_page"
STATE = ("N", "d", "Br", "Bc", "causal", "window", "unit")
# Title, experiment, what is drawn, unit and the question that the verdict is of.
CURVES: dict[str, tuple[str, str, dict[str, Any], str, str]] = {
    "forward": ("speed in fp16, forward", "speed_fp16",
                {"metric": "speed", "pass_": "fwd"}, "TFLOP/s", "fa2-fig5"),
    "backward": ("speed in fp16, backward", "speed_fp16",
                 {"metric": "speed", "pass_": "bwd"}, "TFLOP/s", "fa2-fig6"),
    "dram": ("bytes of DRAM, fp32, forward", "io_vs_seqlen",
             {"metric": "traffic", "source": "dram"}, "GB", "C5, FA-1"),
    "l2": ("bytes of L2, fp32, forward", "io_vs_seqlen",
           {"metric": "traffic", "source": "l2"}, "GB", ""),
    "order": ("time at equal tiles, forward", "loop_order",
              {"metric": "time", "source": "measured"}, "ms", ""),
}  # fmt: skip


class Recorded:
    """The recordings of the pages, each read once."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.rows = cache(lambda name: store.read(name, report.gpu(store, name)))

    def curves(self, figure: str, d: int, causal: str) -> Answer:
        """A recording's lines over N, their source, the verdict. Raises ValueError for none."""
        title, name, wanted, unit, key = CURVES[figure]
        labels = BACKWARD_LABELS if figure == "backward" else LABELS
        every = select(self.rows(name), head_dim=d, causal=causal == "yes", **wanted)
        every = [row for row in every if row.batch * row.seqlen_q == 16384]
        if not every:
            raise ValueError(f"{title} is not recorded with d={d}, causal={causal}")
        factor = 1e-9 if unit == "GB" else 1
        found = [
            {
                "series": series,
                "label": labels.get(series, series),
                "colour": COLOURS.get(series, "#666666"),
                "points": [[N, value * factor] for N, value in sorted(points.items())],
            }
            for series, points in sorted(nested(every, "series", "seqlen_q").items())
        ]
        gpu = report.gpu(self._store, name)
        runs = provenance.of_rows(self._store.runs(name, gpu), every)
        machine = provenance.device_name(runs, gpu)
        where = f"{machine}, {name}, {provenance.when(runs)}"
        said = {"title": title, "unit": unit, "lines": found, "source": where}
        return {**said, "verdict": self._verdict(key) if key else ""}

    @cache  # noqa: B019  one of these lives as long as the command
    def _verdict(self, key: str) -> str:
        from experiments import verdicts
        from experiments.verdicts.evidence import Evidence

        question = next(q for q in verdicts.QUESTIONS if q.key == key)
        rows = [row for name in question.experiments for row in self._every(name)]
        found = question.finding(Evidence(rows))
        name = question.name.replace("[", "").split("](")[0]
        return f"{name}, {question.words}: {found.verdict}" + (
            f", {found.reason}" if found.reason else ""
        )

    def _every(self, name: str) -> Sequence[Row]:
        machines = (MODEL, "emulator", report.gpu(self._store, name))
        return [row for machine in machines for row in self._store.read(name, machine)]


def measured() -> Panel:
    return Panel(
        name="measured",
        title="Measured",
        question="What did a GPU do of all this?",
        sentence="With as many tokens in all, Q outer's bytes of DRAM stay level whatever N, those "
        "of K/V outer are many times as many; where heads are few its grid leaves a GPU idle too.",
        axes={
            "figure": Axis("curve", tuple(CURVES), words={k: v[0] for k, v in CURVES.items()}),
            "d": Axis("d", (64, 128)),
            "causal": Axis("causal", explore_panels.YES_NO),
        },
        answer=Recorded(Store(FIGURES)).curves,
        note="16k tokens in all, hidden dimension 2048. Every point is a median of recorded runs "
        "or a counter's reading; the page measures nothing.",
        live=False,
    )


FIXED = {
    panel.name: panel
    for panel in (explore_panels.SOFTMAX, explore_panels.TILES, explore_panels.TRAFFIC)
}


@cache
def _baked(name: str) -> dict[str, Any]:
    """Of panels that depend on the package alone."""
    return FIXED[name].baked()


def panels(orders: Panel) -> list[Panel]:
    return [orders, *FIXED.values(), explore_panels.PLAN, measured()]


def stored(found: Mapping[tuple[Any, ...], Mapping[str, Trace]]) -> Panel:
    """The first panel, of traces by state."""

    columns = dict(zip(STATE, zip(*found, strict=True), strict=True))
    return explore_panels.orders_panel(
        lambda *state: found[state],
        {name: sorted(set(values)) for name, values in columns.items()},
        lambda **state: len(found.get(tuple(state.values()), ())) < 2,
    )


def static(found: Mapping[tuple[Any, ...], Mapping[str, Trace]], note: str) -> str:
    return html(panels(stored(found)), note)


def html(shown: Sequence[Panel], note: str, *, live: bool = False) -> str:
    """The page; `live`, it asks the server for answers, but of panels that have their own."""
    described = {panel.name: panel.described() for panel in shown}
    for panel in shown:
        if panel is explore_panels.PLAN:
            described[panel.name]["shares"] = explore_panels.TRAFFIC.name
        elif not live or not panel.live:
            table = _baked(panel.name) if panel.name in FIXED else panel.baked()
            described[panel.name]["table"] = table
    data = {
        "live": live,
        "digits": DIGITS,
        "panels": described,
        "algorithms": {name: explore_panels.text_of(name) for name in ("fa1", "fa2")},
        "colours": {name: COLOURS[f"{name}-simt"] for name in ("standard", "fa1", "fa2")},
    }
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("</", "<\\/")
    page = (FOLDER / "page.html").read_text()
    parts = {"style": (FOLDER / "page.css").read_text(), "script": (FOLDER / "page.js").read_text()}
    for name, part in {**parts, "note": escape(note), "data": text}.items():
        page = page.replace(f"{{{{{name}}}}}", part)
    return page
