"""The page explore.html: its numbers are the package's, each is where the page looks for it."""

import functools
import json
import random
import re
from dataclasses import replace

import pytest

from experiments import explore
from experiments.beside import explore_page, explore_panels
from experiments.beside.panels import Axis, Panel
from experiments.lab.measure import moves
from experiments.lab.record import provenance
from experiments.lab.record.options import FIGURES
from experiments.lab.record.store import EMULATOR, MODEL, Store
from fa_numba import Tiles, io_model

PAGE = FIGURES / "explore.html"
LARGEST = 600_000  # bytes


@functools.cache
def recorded():
    store = Store(FIGURES)
    return [row for machine in (MODEL, EMULATOR) for row in store.read(explore.NAME, machine)]


@functools.cache
def page_data():
    text = PAGE.read_text()
    return json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])


@functools.cache
def panels():
    rows = [row for row in recorded() if row.source == "counted"]
    return {panel.name: panel for panel in explore_page.panels(explore_page.stored(traces(rows)))}


def traces(rows):
    return {
        state: {name: explore.unpack(row) for name, row in both.items()}
        for state, both in explore._counted(rows).items()
    }


def looked_up(table, panel, state):
    """As page.js does."""
    found = {}
    for key, (over, values, at) in table.items():
        place = 0
        for n in over:
            name = list(panel.axes)[n]
            place = place * len(panel.axes[name].values) + panel.axes[name].values.index(
                state[name]
            )
        where = at[place]
        if where >= 0 and not (key.endswith("refused") and values[where] == ""):
            found[key] = values[where]
    return {"refused": found["refused"]} if "refused" in found else found


def drawn_states(panel, count, seed=0):
    """So many states, and between them some of those that the page has no answer for."""
    draw, found, refused = random.Random(seed), [], 0
    while len(found) < count + refused:
        state = {name: draw.choice(axis.values) for name, axis in panel.axes.items()}
        here = "refused" not in panel.at(**state)
        if here or refused < count // 5:
            found.append(state)
            refused += not here
    return found


# --- the file --------------------------------------------------------------------------------


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_page_is_what_the_sources_give(whole, monkeypatch):
    """But for the tables of the package alone, of which a test below draws states."""
    if not whole:
        baked, found = Panel.baked, page_data()["panels"]

        def kept(self):
            return baked(self) if self.name == "orders" else found[self.name]["table"]

        monkeypatch.setattr(Panel, "baked", kept)
    store = Store(FIGURES)
    runs = {machine: store.runs(explore.NAME, machine) for machine in (MODEL, EMULATOR)}
    note = provenance.footnote(runs, recorded())
    assert explore.page(recorded(), note) == PAGE.read_text(), "make figures writes it anew"


def test_the_page_is_small_and_needs_nothing_else():
    text = PAGE.read_text()
    assert PAGE.stat().st_size <= LARGEST
    assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", text)
    outside = re.findall(
        r'(?:src|href)="([^"#]*)', re.sub(r"<noscript>.*?</noscript>", "", text, flags=re.DOTALL)
    )
    assert set(outside) <= {"data:,"}
    for figure in re.findall(r'img src="([^"]+)"', text):
        assert (FIGURES / figure).exists()


def test_the_readme_begins_with_its_picture():
    first_screen = "".join((FIGURES.parent / "README.md").read_text().splitlines(True)[:20])
    assert re.search(r"\[!\[[^]]+\]\(figures/explore.png\)\]\(figures/explore.html\)", first_screen)
    assert "python -m experiments explore" in first_screen


def test_the_script_has_no_formula():
    script = (explore_page.FOLDER / "page.js").read_text()
    assert not re.findall(r"Math\.(?:exp|ceil|sqrt|pow)", script)


@pytest.mark.parametrize("name", ["orders", "softmax", "tiles", "plan"])
def test_what_the_page_looks_up_is_the_answer(name):
    panel, table = panels()[name], page_data()["panels"][name]["table"]
    refused = 0
    for state in drawn_states(panel, 40):
        answer = panel.at(**state)
        refused += any(key.endswith("refused") for key in answer)
        found = looked_up(table, panel, state)
        if "refused" in answer:
            assert found == answer
        # A column that refuses has its reason alone; the page shows nothing else of it.
        for key, value in answer.items():
            assert found[key] == value, (key, state)
    assert refused < 25
    assert name != "orders" or refused


def test_online_softmax_stands_where_naive_overflows():
    found = panels()["softmax"].at(example="large", block=0, scores="")
    assert found["naive.nan"] > 0 == found["safe.nan"] == found["online.nan"]
    assert found["fa1.O"] == found["fa2.O"] and abs(sum(found["fa2.O"]) - 1) < 1e-5
    assert [step["m"] for step in found["fa1.steps"]] == [98, 98]
    assert found["fa1.steps"][1]["P"][0] == 1 > found["fa2.steps"][1]["P"][0]  # over its own tile
    moved = [sum(step["moved"] for step in found[f"{name}.steps"]) for name in ("fa1", "fa2")]
    assert moved[0] > moved[1]
    for name, accesses in (("naive", 3), ("safe", 4), ("online", 3)):  # an element
        assert found[f"{name}.accesses"] == accesses * found["keys"]


def test_a_table_keeps_what_differs_and_drops_what_does_not():
    axes = {"a": Axis("a", (1, 2)), "b": Axis("b", (1, 2, 3))}

    def answer(a, b):
        if (a, b) == (2, 3):
            raise ValueError("too much")
        return {"a": a, "both": 10 * a + b, "none": None if b == 2 else 5, "fixed": "x"}

    panel = Panel("p", "", "", "", axes, answer)
    table = panel.baked()
    assert [table[key][0] for key in ("a", "both", "none", "fixed", "refused")] == [
        [0], [1, 0], [1], [], [1, 0],
    ]  # fmt: skip
    for a in (1, 2):
        for b in (1, 2, 3):
            assert looked_up(table, panel, {"a": a, "b": b}) == panel.at(a=a, b=b)


# --- traces ----------------------------------------------------------------------------------


def test_traces_move_what_the_closed_form_says():
    model = explore._counted(recorded(), "model")
    counted = explore._counted(recorded())
    assert len(counted) > 90 and set(model) == set(counted)
    assert {state[-1] for state in counted} == set(explore.UNITS)
    for state, both in counted.items():
        for name, row in both.items():
            assert row.value == model[state][name].value == explore.unpack(row).bytes


def test_a_packed_trace_is_the_trace():
    row = explore._counted(recorded())[64, 16, 16, 32, "no", 24, "simt"]["fa1"]
    problem = explore.problem_of(64, 16, False, 24, "simt")
    found = explore.trace(explore.Inputs(), "fa1-simt", problem, Tiles(16, 32))
    assert explore.pack(found) == row.note.partition("; ")[2]
    assert explore.unpack(row) == found
    with pytest.raises(ValueError, match="must consist of moves such as '<Q0:1024', got 'Q0'"):
        explore.unpack(replace(row, note="window 24; Q0"))
    ragged = explore.problem_of(50, 16, True, 0, "mma")
    found = explore.trace(explore.Inputs(), "fa2-mma", ragged, Tiles(32, 16))
    said = replace(
        row,
        series="fa2-mma",
        causal=True,
        Br=32,
        Bc=16,
        seqlen_q=50,
        note=f"window 0; {explore.pack(found)}",
    )
    assert explore.unpack(said) == found


@pytest.mark.parametrize("window", explore.WINDOWS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("N", "Br", "on"), [(64, 16, "simt"), (64, 16, "mma"), (128, 64, "wgmma")])
def test_steps_visit_the_tiles_that_the_model_has(N, Br, on, causal, window):
    state = (N, 16, Br, 16, "yes" if causal else "no", window, on)
    for name, trace in traces(recorded())[state].items():
        found = moves.steps(trace)
        visits = dict.fromkeys(step.split("|")[2] for step in found["steps"])
        visits.pop("", None)
        problem = explore.problem_of(N, 16, causal, window, on)
        assert len(visits) == io_model.tiles_visited(name, problem, Tiles(Br, 16))
        assert found["bytes"] == sorted(found["bytes"]) and found["bytes"][-1] == trace.bytes
        if name == "fa1":  # a column tile after the other, of its row tiles from the first on
            pairs = [tuple(map(int, visit.split(",")))[::-1] for visit in visits]
            assert pairs == sorted(pairs)


def test_on_hoppers_unit_k_and_v_are_there_before_their_row_tiles():
    both = traces(recorded())[256, 16, 64, 64, "no", 0, "wgmma"]
    for name, slots in (("fa1", 2), ("fa2", 1)):
        held = [step.split("|")[1].split() for step in moves.steps(both[name])["steps"]]
        for array in "KV":
            assert max(sum(tile[0] == array for tile in tiles) for tiles in held) == slots
    assert not {move.array for trace in both.values() for move in trace.moves} - set("QKVOlmL")


def test_o_goes_back_and_forth_in_one_order_and_stays_in_the_other():
    both = traces(recorded())[128, 16, 32, 32, "no", 0, "simt"]
    said = {name: [step.split("|") for step in moves.steps(t)["steps"]] for name, t in both.items()}
    written = {name: [s for s in steps if ">O" in s[0]] for name, steps in said.items()}
    assert len(written["fa1"]) == 16 and len(written["fa2"]) == 4
    assert all(s[3] == "9,10,11,12,13" for s in written["fa1"])
    assert {s[4] for s in said["fa1"]} == {"0"} and {s[4] for s in said["fa2"]} == set("0123")
    # While K and V go by, O of a row tile is in registers, of FA-1 nothing between two passes.
    begun = [s for s in said["fa2"] if "<K" in s[0] and not s[2].endswith(",0") and s[2]]
    assert begun and all(re.search(r"\bO\d", s[1]) for s in begun)


def test_every_lit_line_is_in_the_text():
    for name, trace in traces(recorded())[64, 16, 16, 16, "no", 24, "simt"].items():
        text = explore_panels.text_of(name)
        known = {n for _, lines in text for n in lines}
        said = moves.steps(trace)["steps"]
        lit = {int(n) for step in said for n in step.split("|")[3].split(",")}
        assert lit <= known and not any("watch" in line for line, _ in text)
