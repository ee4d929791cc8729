"""The page explore.html as one file, made of a template, style, scripts and data."""

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path

from . import explore_panels
from .panels import Panel

FOLDER = Path(__file__).resolve().parents[1] / "explore_page"
# Scripts that compute answers and do not touch the page. Tests run them alone.
COMPUTING = ("io_model.js", "walk.js", "answers.js")
SCRIPTS = (*COMPUTING, "page.js")
PANELS = (
    explore_panels.ORDERS_PANEL,
    explore_panels.SOFTMAX,
    explore_panels.TRAFFIC,
    explore_panels.PLAN,
)


def html(shown: Sequence[Panel], note: str, *, live: bool = False) -> str:
    """Return the text of the page with the given panels. `note` is a text that the page shows.

    If `live` is true, the page's script asks the server for plans and for typed masks. Otherwise
    the page works without a server. It then contains the plans for all values that the lists of the
    panel offer.
    """
    panels = {panel.name: panel.described() for panel in shown}
    if not live:
        panels["plan"]["table"] = explore_panels.PLAN.baked()
    data = {
        "live": live,
        "panels": panels,
        "algorithms": {name: explore_panels.text_of(name) for name in ("fa1", "fa2")},
        **explore_panels.constants(),
    }
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("</", "<\\/")
    page = (FOLDER / "page.html").read_text()
    script = "\n".join((FOLDER / name).read_text() for name in SCRIPTS)
    parts = {"style": (FOLDER / "page.css").read_text(), "note": escape(note), "data": text}
    for name, part in {**parts, "script": script}.items():
        page = page.replace(f"{{{{{name}}}}}", part)
    return page
