"""The scripts of explore.html that compute: their answers are those of the Python functions.

The tests need Node. `make browser` runs the same comparison in Chromium.
"""

import json
import math
import random
import shutil
import subprocess

import pytest

from experiments.beside import explore_page, explore_panels

PANELS = {panel.name: panel for panel in explore_page.PANELS if panel.name != "plan"}
# Reads [[panel, inputs], ...] and writes the answers.
RUNNER = """
const { cases, constants } = JSON.parse(require("fs").readFileSync(0, "utf8"));
const answers = cases.map(([name, state]) => ANSWERS[name](state, constants));
console.log(JSON.stringify(answers, writable));
"""
# JSON has no infinity and no NaN.
WRITABLE = """const writable = (_, value) =>
  typeof value === "number" && !Number.isFinite(value) ? String(value) : value;
"""


def drawn_inputs(panel, count, seed=0):
    """Draw inputs of a panel: positions of its sliders, and any other value in their ranges."""
    draw, found = random.Random(seed), []
    for _ in range(count):
        state = {}
        for name, axis in panel.axes.items():
            free = axis.least is not None and draw.random() < 0.5
            if free:
                state[name] = draw.randint(axis.least, axis.most)
            elif axis.text:
                state[name] = drawn_scores(draw)
            else:
                state[name] = draw.choice(tuple(dict.fromkeys((*axis.values, *axis.words))))
        if panel.name == "orders":  # Python takes long for many tiles
            state["N"] = min(state["N"], 8 * max(16, min(state["Br"], state["Bc"])))
        if panel.name == "traffic":
            state["Br"], state["Bc"] = (
                max(x, state["N"] >> 10) for x in (state["Br"], state["Bc"])
            )
        found.append(state)
    return found


def drawn_scores(draw):
    if draw.random() < 0.1:
        return draw.choice(("", "1 two", "1 nan", "1 1e5", "1 " * 65))
    sizes = draw.choice((1, 10, 100))
    return " ".join(f"{draw.gauss(0, sizes):.3g}" for _ in range(draw.randint(1, 9)))


def as_json(value):
    """Return a Python answer with what JSON lacks as the text that the script gives."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, dict):
        return {key: as_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"inf": "Infinity", "-inf": "-Infinity", "nan": "NaN"}[str(value)]
    return value


def answer(panel, state):
    try:
        return as_json(panel.answer(**state))
    except ValueError as error:
        return {"refused": str(error)}


def same(found, wanted, rel=1e-9):
    """Whether the script's value is Python's: integers up to 2^53 are equal."""
    if isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(same(found[k], wanted[k], rel) for k in wanted)
    if isinstance(wanted, list):
        return len(found) == len(wanted) and all(map(same, found, wanted, [rel] * len(wanted)))
    if isinstance(wanted, int) and abs(wanted) < 2**53:
        return found == wanted
    if isinstance(wanted, (int, float)) and not isinstance(found, str):
        return math.isclose(found, wanted, rel_tol=rel, abs_tol=1e-9)
    return found == wanted


def differences(panel, states, found):
    """Return the states and keys of which the script's answer is not Python's."""
    wrong = []
    for state, one in zip(states, found, strict=True):
        wanted = answer(panel, state)
        if one.keys() != wanted.keys():
            wrong.append((state, sorted(one.keys() ^ wanted.keys())))
        # Softmaxes in float32 differ in the last bits.
        wrong += [
            (state, key, one[key], value) for key, value in wanted.items()
            if key in one and not same(one[key], value, 1e-5 if key.endswith(".P") else 1e-9)
        ]  # fmt: skip
    return wrong


def scripts():
    return "\n".join((explore_page.FOLDER / name).read_text() for name in explore_page.COMPUTING)


def by_node(cases):
    done = subprocess.run(
        [shutil.which("node"), "-e", scripts() + WRITABLE + RUNNER],
        input=json.dumps({"cases": cases, "constants": explore_panels.constants()}),
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return json.loads(done.stdout)


@pytest.mark.skipif(shutil.which("node") is None, reason="no Node on the path")
@pytest.mark.parametrize(("name", "count"), [("orders", 15), ("softmax", 4), ("traffic", 40)])
def test_the_script_answers_what_python_answers(name, count):
    states = drawn_inputs(PANELS[name], count)
    found = by_node([[name, state] for state in states])
    wrong = differences(PANELS[name], states, found)
    assert not wrong, (len(wrong), wrong[:2])
