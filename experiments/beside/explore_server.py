"""The server of explore.html on this machine.

The page asks the server for answers that a file cannot contain: typed masks, and plans of any call.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable
from dataclasses import replace
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from ..lab.record import FIGURES
from . import explore_page
from .panels import Axis, Panel

ADDRESS, HOSTS = "127.0.0.1", ("127.0.0.1", "localhost")
STATIC = ("timeline.gif", "loop_order.png", "io_vs_seqlen.png")  # for readers without scripts
MASK = Axis("your own mask: true if row i sees column j, such as i - j < 9 or j == 0",
            ("",), text=True)  # fmt: skip
NOTE = "this page is served by python -m experiments explore"

# The emulator runs one call at a time.
_EMULATOR = threading.Lock()


def _panels() -> list[Panel]:
    """Return the panels of the page. The first panel also takes a mask that a reader types."""
    orders, *others = explore_page.PANELS
    return [replace(orders, axes={**orders.axes, "mask": MASK}), *others]


class Handler(BaseHTTPRequestHandler):
    """The handler of requests.

    GET / returns the page. GET /NAME returns the picture NAME, one of STATIC. GET
    /api/PANEL?INPUTS returns the answer of a panel in JSON.
    """

    timeout = 20
    protocol_version = "HTTP/1.1"
    server: Server

    def do_GET(self) -> None:
        """Answer a GET request. Ignore a reader who closes the connection."""
        self.close_connection = True
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._get()

    def _get(self) -> None:
        host = self.headers.get("Host", "")
        if host.rpartition(":")[0] not in HOSTS and host not in HOSTS:
            allowed = " or ".join(HOSTS)
            self._refuse(HTTPStatus.FORBIDDEN, f"the host must be {allowed}, got {host[:80]!r}")
            return
        try:
            split = urlsplit(self.path)
        except ValueError as error:
            self._refuse(HTTPStatus.BAD_REQUEST, f"cannot read path {self.path[:80]!r}: {error}")
            return
        kind, _, name = split.path.lstrip("/").rpartition("/")
        if split.path == "/":
            self._send("text/html; charset=utf-8", self.server.page)
        elif not kind and name in STATIC:
            self._send(f"image/{name[-3:]}", (FIGURES / name).read_bytes())
        elif kind == "api" and name in self.server.panels:
            self._answer(name, split.query)
        else:
            known = ", ".join(f"/api/{name}" for name in self.server.panels)
            self._refuse(
                HTTPStatus.NOT_FOUND, f"the path must be / or {known}, got {split.path[:80]!r}"
            )

    def _answer(self, name: str, query: str) -> None:
        panel = self.server.panels[name]
        try:
            given = parse_qsl(query, keep_blank_values=True, max_num_fields=20)
            state = panel.parse(dict(given))
        except ValueError as error:
            self._refuse(HTTPStatus.BAD_REQUEST, str(error))
            return
        with _EMULATOR if name in ("orders", "softmax") else contextlib.nullcontext():
            self._json(panel.at(**state))

    def _refuse(self, status: HTTPStatus, why: str) -> None:
        self._json({"refused": why}, status)

    def _json(self, value: Any, status: HTTPStatus = HTTPStatus.OK) -> None:
        self._send("application/json", json.dumps(value, allow_nan=False).encode(), status)

    def _send(self, kind: str, body: bytes, status: HTTPStatus = HTTPStatus.OK) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Connection", "close")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Log nothing, because the page itself shows errors."""


class Server(ThreadingHTTPServer):
    """The server of the page. It listens on the loopback address only.

    Raises OSError if the port cannot be used.
    """

    daemon_threads = True

    def __init__(self, port: int = 0) -> None:
        shown = _panels()
        self.panels = {panel.name: panel for panel in shown}
        self.page = explore_page.html(shown, NOTE, live=True).encode()
        super().__init__((ADDRESS, port), Handler)

    @property
    def url(self) -> str:
        """Return the address of the page."""
        return f"http://{ADDRESS}:{self.server_address[1]}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing if a request fails, for example because the connection is broken."""


def serve(port: int, say: Callable[[str], Any]) -> int:
    """Serve the page until the user interrupts. Return the exit status.

    The status is 1 if the port cannot be used, else 0. `say` prints a line.
    """
    try:
        server = Server(port)
    except OSError as error:
        say(f"port {port} cannot be used: {error.strerror}. Choose another port with --port")
        return 1
    with server:
        try:
            say(f"the page is at {server.url}, for this machine only. Stop with Ctrl-C")
            server.serve_forever()
        except KeyboardInterrupt:
            say("stopped")
    return 0
