"""The page's server: the package's answers, one machine alone, a clear line for what is wrong."""

import http.client
import json
import random
import socket
import threading
from urllib.parse import urlencode

import pytest
from test_explore import drawn_states, panels

import fa_numba
from experiments.beside import explore_server
from fa_numba import bounds

STATE = {
    "N": 64,
    "d": 16,
    "Br": 32,
    "Bc": 32,
    "causal": "yes",
    "window": 0,
    "unit": "mma",
    "mask": "",
}
PLAN = {
    "gpu": "A100", "N": 1000, "batch": 1, "heads": 3, "d": 80, "dtype": "float16",
    "passes": "fwd", "causal": "no",
}  # fmt: skip
SOFTMAX = {"example": "own", "block": 2, "scores": "3 1 2"}


@pytest.fixture(scope="module")
def server():
    with explore_server.Server() as found:
        thread = threading.Thread(target=found.serve_forever)
        thread.start()
        yield found
        found.shutdown()
        thread.join()


def get(server, path, host=None, method="GET"):
    """(status, the answer)."""
    connection = http.client.HTTPConnection(*server.server_address, timeout=30)
    connection.request(method, path, headers={"Host": host} if host else {})
    reply = connection.getresponse()
    text = reply.read().decode()
    connection.close()
    return reply.status, text


def asked(server, name, state):
    status, text = get(server, f"/api/{name}?{urlencode(state)}")
    return status, json.loads(text)


@pytest.mark.parametrize(("name", "count"), [("softmax", 2), ("traffic", 5), ("plan", 5)])
def test_answers_are_the_panels(server, name, count):
    for state in drawn_states(panels()[name], count):
        assert asked(server, name, state) == (200, panels()[name].at(**state))


def test_without_a_mask_the_answer_is_the_panels(server):
    plain = {name: value for name, value in STATE.items() if name != "mask"}
    assert asked(server, "orders", STATE) == (200, panels()["orders"].at(**plain))


def test_a_typed_mask_runs_on_the_emulator(server):
    """In FA-2, a typed causal mask has the steps of the causal mask."""
    state = {**STATE, "causal": "no"}
    found = asked(server, "orders", {**state, "mask": "j <= i"})[1]
    plain = panels()["orders"].at(**{**state, "causal": "yes"} | {"mask": ""})
    assert found["fa2.steps"] == plain["fa2.steps"] and found["fa2.bytes"] == plain["fa2.bytes"]
    assert found["fa1.visited"] == plain["fa1.visited"]


def test_a_typed_mask_leaves_out_tiles_that_it_hides(server):
    Br = 16
    state = {**STATE, "N": 192, "Br": Br, "Bc": 32, "unit": "simt", "causal": "no"}
    state["mask"] = "j <= i and i - j < 9 if i > 3 else math.sqrt(j) < 2"
    found = asked(server, "orders", state)[1]
    seen = {
        f"{i // Br},{j // 32}"
        for i in range(192)
        for j in range(192)
        if (j <= i < j + 9 if i > 3 else j < 4)
    }
    for name in ("fa1", "fa2"):
        assert found[f"{name}.total"] == found[f"{name}.model"] == found[f"{name}.bytes"][-1]
        assert {step.split("|")[2] for step in found[f"{name}.steps"]} - {""} >= seen
        assert found[f"{name}.visited"] < 6 * 192 // Br


def test_any_size_is_answered(server):
    found = asked(server, "plan", PLAN)[1]
    shape = (1, 3, 1000, 80)
    with bounds.DEVICES["A100"].planning():
        plan = fa_numba.plan(shape, shape, dtype="float16")
    assert found["fa2.bytes"] == plan.accesses.bytes
    found = asked(server, "softmax", SOFTMAX)[1]
    assert [step["m"] for step in found["fa2.steps"]] == [3, 3]


REFUSED = [
    ("/api/orders", {**STATE, "N": 0}, "N: must be an integer from 1 to 512, got 0"),
    ("/api/orders", {**STATE, "N": 513}, "N: must be an integer from 1 to 512, got 513"),
    ("/api/orders", {**STATE, "N": "1e3"}, "N: must be an integer from 1 to 512, got '1e3'"),
    (
        "/api/orders",
        {**STATE, "N": 512, "Br": 16, "Bc": 16, "mask": "j < i"},
        "shows at most 400 tiles of S, got 1024",
    ),
    (
        "/api/orders",
        {**STATE, "N": 512, "d": 256, "Br": 128, "mask": "j < i"},
        "the emulator computes at most",
    ),
    ("/api/orders", {**STATE, "Br": 17, "mask": "j < i"}, "Br"),
    ("/api/orders", {**STATE, "unit": "tpu"}, "unit must be one of simt, mma, got 'tpu'"),
    ("/api/orders", {**STATE, "colour": 1}, "unknown: colour"),
    (
        "/api/orders",
        {**STATE, "mask": "j <"},
        "the mask 'j <' contains a syntax error (invalid syntax). It may",
    ),
    ("/api/orders", {**STATE, "mask": "x < j"}, "the mask 'x < j' contains x. It may contain"),
    (
        "/api/orders",
        {**STATE, "mask": "__import__('os')"},
        "It may contain comparisons and arithmetic",
    ),
    ("/api/orders", {**STATE, "mask": "math.__doc__"}, "contains math.__doc__. It may"),
    ("/api/orders", {**STATE, "mask": "i.real < j"}, "contains i.real. It may"),
    ("/api/orders", {**STATE, "mask": "(lambda: j)()"}, "lambda: j"),
    ("/api/orders", {**STATE, "mask": "9 ** 9 ** 9 < j"}, "contains a power. It may"),
    ("/api/orders", {**STATE, "mask": "-" * 900 + "i"}, "contains a syntax error ("),
    ("/api/orders", {**STATE, "mask": "[j][0] < i"}, "contains [j][0]. It may"),
    ("/api/orders", {**STATE, "mask": "i * 2.5"}, "mask_mod"),
    ("/api/orders", {"N": 64}, "missing: d, Br"),
    ("/api/plan", {**PLAN, "gpu": "T5"}, "got 'T5'"),
    (
        "/api/softmax",
        {**SOFTMAX, "scores": "3 x"},
        "each score must be a number from -10000 to 10000, got 'x'",
    ),
    (
        "/api/softmax",
        {**SOFTMAX, "scores": "nan"},
        "each score must be a number from -10000 to 10000, got 'nan'",
    ),
    (
        "/api/softmax",
        {**SOFTMAX, "scores": "1 " * 65},
        "scores must have from 1 to 64 numbers, got 65",
    ),
    (
        "/api/softmax",
        {**SOFTMAX, "block": 65},
        "block: must be an integer from 0 to 64, got 65",
    ),
]


@pytest.mark.parametrize(("path", "state", "message"), REFUSED)
def test_bad_input_is_refused_with_what_is_allowed(server, path, state, message):
    _, text = get(server, f"{path}?{urlencode(state)}")
    assert message in json.loads(text)["refused"]


@pytest.mark.parametrize(
    ("path", "host", "status", "message"),
    [
        ("/", "example.org", 403, "the host must be 127.0.0.1 or localhost, got 'example.org'"),
        ("/", "127.0.0.1.example.org:80", 403, "the host must be"),
        ("/../setup.cfg", None, 404, "the path must be / or /api/orders, "),
        ("/timeline.svg", None, 404, "the path must be / or"),
    ],
)
def test_other_hosts_and_odd_paths_are_refused(server, path, host, status, message):
    found, text = get(server, path, host)
    assert found == status and message in json.loads(text)["refused"]


def test_it_listens_on_this_machine_alone(server):
    assert server.server_address[0] == "127.0.0.1"
    assert get(server, "/", "localhost:1")[0] == 200
    assert get(server, "/timeline.gif", method="POST")[0] == 501


def test_200_odd_requests_leave_it_up(server):
    draw = random.Random(0)
    for n in range(200):
        text = bytes(draw.randrange(1, 256) for _ in range(draw.randrange(60)))
        if n % 2:
            path = f"/api/{draw.choice(sorted(server.panels))}?".encode()
            text = b"GET " + path + text.replace(b"\n", b"").replace(b"\r", b"") + b" HTTP/1.1\r\n"
            text += b"Host: localhost\r\n\r\n"
        with socket.create_connection(server.server_address, timeout=5) as connection:
            connection.sendall(text + b"\r\n\r\n")
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(65536):
                pass
    assert asked(server, "plan", PLAN)[0] == 200


def test_a_port_that_is_taken_is_said(server):
    said = []
    port = server.server_address[1]
    assert explore_server.serve(port, said.append) == 1
    assert said == [
        f"port {port} cannot be used: Address already in use. Choose another port with --port"
    ]


def test_it_ends_when_interrupted(monkeypatch):
    def interrupted(self):
        raise KeyboardInterrupt

    said = []
    monkeypatch.setattr(explore_server.Server, "serve_forever", interrupted)
    assert explore_server.serve(0, said.append) == 0
    assert said[0].startswith("the page is at http://127.0.0.1:") and said[1] == "stopped"
