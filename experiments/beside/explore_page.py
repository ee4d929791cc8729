"""The page explore.html as one file: template, style, script and data."""

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from ..lab.measure.moves import Trace
from . import explore_panels
from .panels import NOT_HERE, Panel

FOLDER = Path(__file__).resolve().parents[1] / "explore_page"
STATE = ("N", "d", "Br", "Bc", "causal", "window", "unit")


def panels(orders: Panel) -> list[Panel]:
    """Return the panels of the page, the given one first."""
    return [orders, explore_panels.SOFTMAX, explore_panels.TILES, explore_panels.PLAN]


def stored(found: Mapping[tuple[Any, ...], Mapping[str, Trace]]) -> Panel:
    """Return the first panel with stored traces, given by state."""

    def traces(*state: Any) -> Mapping[str, Trace]:
        if len(found.get(state, ())) < 2:
            raise ValueError(NOT_HERE)
        return found[state]

    columns = dict(zip(STATE, zip(*found, strict=True), strict=True))
    baked = {name: sorted(set(values)) for name, values in columns.items()}
    return explore_panels.orders_panel(traces, baked)


def html(shown: Sequence[Panel], note: str, *, live: bool = False) -> str:
    """Return the page. If `live`, its script asks the server for answers."""
    data = {
        "live": live,
        "panels": {
            panel.name: panel.described() | ({} if live else {"table": panel.baked()})
            for panel in shown
        },
        "algorithms": {name: explore_panels.text_of(name) for name in ("fa1", "fa2")},
    }
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("</", "<\\/")
    page = (FOLDER / "page.html").read_text()
    parts = {"style": (FOLDER / "page.css").read_text(), "script": (FOLDER / "page.js").read_text()}
    for name, part in {**parts, "note": escape(note), "data": text}.items():
        page = page.replace(f"{{{{{name}}}}}", part)
    return page
