"""The page, served on this machine alone: python -m experiments explore, for any size."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Mapping
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import fa_numba
from experiments import explore

from ..lab.measure.moves import Trace
from ..lab.measure.workloads import Inputs
from ..lab.record import FIGURES
from . import explore_page, explore_panels, typed_mask
from .panels import Axis, Panel, Value

ADDRESS, HOSTS = "127.0.0.1", ("127.0.0.1", "localhost")
MOST = 2000  # characters of a request's path
BETWEEN = 0.2  # seconds, of two words on how far a trace is
STATIC = ("timeline.gif", "loop_order.png", "io_vs_seqlen.png")  # of the page without a script
JSON_LINES = "application/x-ndjson"
MASK = Axis("mask of your own, what row i sees of column j, such as i - j < 9 or j == 0",
            ("",), text=True)  # fmt: skip
NOTE = "Served by python -m experiments explore: any size, the emulator runs here."

# The emulator runs one call at a time.
_EMULATOR = threading.Lock()


class Run:
    """The traces of a state on the emulator, and how far they are."""

    def __init__(self) -> None:
        self._found: list[list[Any]] = []
        self._bytes = 0

    def plan(self, *state: Any) -> dict[str, Callable[..., Trace]]:
        """What will run, by algorithm. Raises ValueError for what the emulator would not."""
        N, d, Br, Bc, causal, window, unit, *typed = state
        problem = explore.problem_of(N, d, causal == "yes", window, unit)
        tiles, inputs = fa_numba.Tiles(Br, Bc), Inputs()
        explore.check(N, d, Br, Bc)
        blocks = typed_mask.blocks_of("".join(typed), N, tiles)
        found: dict[str, Callable[..., Trace]] = {}
        for name, _ in explore_panels.ORDERS:
            series = f"{name}-{unit}"
            self._bytes += explore.planned(series, problem, tiles, blocks).accesses.bytes
            found[name] = partial(
                explore.trace, series, problem, tiles, inputs(problem), self._found, blocks
            )
        return found

    def traces(self, *state: Value) -> Mapping[str, Trace]:
        with _EMULATOR:
            return {name: trace() for name, trace in self.plan(*state).items()}

    @property
    def progress(self) -> float:
        moved = sum(access.bytes for accesses in list(self._found) for access in list(accesses))
        return min(1.0, moved / self._bytes) if self._bytes else 0.0


def _orders(run: Run) -> Panel:
    sizes = {"N": explore.SEQLENS, "d": explore.HEAD_DIMS, "window": explore.WINDOWS}
    baked = {**sizes, "Br": explore.BLOCKS, "Bc": explore.BLOCKS}
    return explore_panels.orders_panel(run.traces, baked, typed={"mask": MASK})


class Handler(BaseHTTPRequestHandler):
    """GET / is the page, /api/PANEL?INPUTS an answer in lines of JSON, the last of which counts."""

    timeout = 20
    protocol_version = "HTTP/1.1"
    server: Server

    def do_GET(self) -> None:
        self.close_connection = True
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the reader went on
            self._get()

    def _get(self) -> None:
        host = self.headers.get("Host", "")
        if host.rpartition(":")[0] not in HOSTS and host not in HOSTS:
            allowed = " or ".join(HOSTS)
            self._refuse(HTTPStatus.FORBIDDEN, f"host {host[:80]!r}: allowed is {allowed}")
            return
        if len(self.path) > MOST:
            self._refuse(
                HTTPStatus.REQUEST_URI_TOO_LONG,
                f"a path of {len(self.path)} characters: allowed are {MOST}",
            )
            return
        try:
            split = urlsplit(self.path)
        except ValueError as error:
            self._refuse(HTTPStatus.BAD_REQUEST, f"{self.path[:80]!r} is no path: {error}")
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
            self._refuse(HTTPStatus.NOT_FOUND, f"no {split.path[:80]!r} here: there are /, {known}")

    def _answer(self, name: str, query: str) -> None:
        run = Run()
        panel = _orders(run) if name == "orders" else self.server.panels[name]
        try:
            given = parse_qsl(query, keep_blank_values=True, strict_parsing=True, max_num_fields=20)
            inputs = dict(given)
            if len(inputs) < len(given):
                raise ValueError("an input is given twice")
            checking = inputs.pop("check", "") == "1"
            state = panel.parse(inputs)
            if name == "orders":
                run.plan(*state.values())
        except ValueError as error:
            self._refuse(HTTPStatus.BAD_REQUEST, str(error))
            return
        if checking:
            self._send(JSON_LINES, _line({}))
        elif name == "orders":
            self._emulate(state)
        else:
            with _EMULATOR if name == "softmax" else contextlib.nullcontext():
                answer = panel.at(**state)
            self._send(JSON_LINES, _line(answer))

    def _emulate(self, state: dict[str, Value]) -> None:
        run = Run()
        found: list[dict[str, Any]] = []
        work = threading.Thread(
            target=lambda: found.append(_safely(partial(_orders(run).at, **state))), daemon=True
        )
        self._begin(HTTPStatus.OK, JSON_LINES)
        work.start()
        while work.is_alive():
            work.join(BETWEEN)
            self.wfile.write(_line({"progress": round(run.progress, 3)}))
            self.wfile.flush()
        self.wfile.write(_line(found[0]))

    def _refuse(self, status: HTTPStatus, why: str) -> None:
        self._send(JSON_LINES, _line({"refused": why}), status)

    def _send(self, kind: str, body: bytes, status: HTTPStatus = HTTPStatus.OK) -> None:
        self._begin(status, kind, len(body))
        self.wfile.write(body)

    def _begin(self, status: HTTPStatus, kind: str, length: int | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Connection", "close")
        if length is not None:
            self.send_header("Content-Length", str(length))
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Nothing: what is wrong the page says."""


def _safely(answer: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return answer()
    except Exception as error:  # a fault of the program, which must not leave the page waiting
        return {"refused": f"{type(error).__name__}: {error}"}


def _line(value: Any) -> bytes:
    return json.dumps(value, allow_nan=False).encode() + b"\n"


class Server(ThreadingHTTPServer):
    """On loopback alone. Raises OSError for a port that is taken."""

    daemon_threads = True

    def __init__(self, port: int = 0) -> None:
        shown = explore_page.panels(_orders(Run()))
        self.panels = {panel.name: panel for panel in shown if panel.live}
        self.page = explore_page.html(shown, NOTE, live=True).encode()
        super().__init__((ADDRESS, port), Handler)

    @property
    def url(self) -> str:
        return f"http://{ADDRESS}:{self.server_address[1]}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Of a broken connection nothing is said."""


def serve(port: int, say: Callable[[str], Any]) -> int:
    """Serve until interrupted; gives an exit status."""
    try:
        server = Server(port)
    except OSError as error:
        say(f"port {port}: {error.strerror}; --port takes another")
        return 1
    with server:
        try:
            say(f"{server.url} (this machine alone; Ctrl-C ends it)")
            server.serve_forever()
        except KeyboardInterrupt:
            say("ended")
    return 0
