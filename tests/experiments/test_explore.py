"""The page explore.html: its numbers are the package's, each is where the page looks for it."""

import functools
import json
import random
import re
from dataclasses import replace

import pytest

from experiments import explore
from experiments.beside import explore_page, explore_panels, walk
from experiments.beside.panels import Axis, Panel
from experiments.lab.measure import moves
from experiments.lab.record import provenance
from experiments.lab.record.options import FIGURES
from experiments.lab.record.store import EMULATOR, MODEL, Store
from fa_numba import Tiles, dtypes, integers, io_model
from fa_numba.bounds import roofline
from fa_numba.choices import tiles
from fa_numba.problem import Problem

PAGE = FIGURES / "explore.html"
LARGEST = 700_000  # bytes
slow = pytest.mark.slow


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
    return {panel.name: panel for panel in explore_page.PANELS}


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
    """Draw inputs of a panel among the values that it lists."""
    draw = random.Random(seed)
    return [
        {name: draw.choice(axis.values) for name, axis in panel.axes.items()} for _ in range(count)
    ]


# --- the file --------------------------------------------------------------------------------


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=slow)])
def test_the_page_is_what_the_sources_give(whole, monkeypatch):
    """But for the table of plans, of which a test below draws states."""
    if not whole:
        table = page_data()["panels"]["plan"]["table"]
        monkeypatch.setattr(Panel, "baked", lambda self: table)
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


MODULES = {
    "io_model.js": (
        io_model, io_model.accesses, io_model.visits, io_model.work, integers, tiles, Problem,
        roofline, dtypes,
    ),
    "walk.js": (walk, moves, moves.Trace),
    "answers.js": (explore_panels, explore),
}  # fmt: skip
# Functions of the scripts that are part of a function in Python.
ONLY_IN_SCRIPTS = {
    "io_model.js": {"total", "bytes_of", "ACCESSES"},
    "walk.js": {"walk_fa1", "walk_fa2", "fills", "by_block"},
    "answers.js": {"prefixed", "maximum", "sum_of", "times_rows", "forward_steps", "ANSWERS"},
}  # fmt: skip


@pytest.mark.parametrize("script", explore_page.COMPUTING)
def test_functions_of_the_scripts_have_the_names_of_the_python_functions(script):
    text = (explore_page.FOLDER / script).read_text()
    names = set(re.findall(r"^(?:function|const) (\w+)", text, re.MULTILINE))
    known = {name.lstrip("_") for module in MODULES[script] for name in dir(module)}
    assert ONLY_IN_SCRIPTS[script] == names - known


@pytest.mark.parametrize("name", ["plan"])
def test_what_the_page_looks_up_is_the_answer(name):
    panel, table = panels()[name], page_data()["panels"][name]["table"]
    for state in drawn_states(panel, 40):
        answer, found = panel.at(**state), looked_up(table, panel, state)
        # A column that refuses has its reason alone; the page shows nothing else of it.
        for key, value in answer.items():
            assert found[key] == value, (key, state)


def test_reasons_of_plans_are_in_plain_words():
    table = page_data()["panels"]["plan"]["table"]
    said = [why for key, (_, values, _) in table.items() if ".why_" in key for why in values]
    assert len(said) > 50
    for why in said:
        assert not re.search(r"\.csv|suits|ptxas|arXiv|by hand|'auto'|compute capability", why), why


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


# --- the walk --------------------------------------------------------------------------------


def test_the_walk_is_the_recorded_trace():
    compared = 0
    for state, both in traces(recorded()).items():
        N, d, Br, Bc, causal, window, unit = state
        if unit == "wgmma":  # whose warps run ahead of each other
            continue
        for trace in both.values():
            inputs = trace.series, explore.UNITS[unit], N, d, Br, Bc, causal == "yes", window
            assert walk.walk(*inputs) == walk.by_row_tile(trace), state
            compared += 1
    assert compared > 150


@slow
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("unit", "N", "Br", "Bc", "window"), [("mma", 50, 32, 16, 0), ("simt", 70, 16, 32, 9)]
)
def test_the_walk_is_the_emulators_where_tiles_are_not_full(unit, N, Br, Bc, causal, window):
    problem, inputs = explore.problem_of(N, 16, causal, window, unit), explore.Inputs()
    for name in ("fa1", "fa2"):
        series = f"{name}-{unit}"
        found = walk.by_row_tile(explore.trace(inputs, series, problem, Tiles(Br, Bc)))
        assert walk.walk(series, problem.dtype, N, 16, Br, Bc, causal, window) == found


def test_the_walk_moves_what_the_closed_form_says():
    draw = random.Random(0)
    for _ in range(25):
        N, Br, Bc, window = (
            draw.randint(*ends) for ends in ((1, 300), (16, 90), (16, 90), (0, 99))
        )
        found = panels()["orders"].answer(
            N, draw.randint(1, 40), Br, Bc, draw.choice(("yes", "no")), window,
            draw.choice(("simt", "mma")),
        )  # fmt: skip
        for name in ("fa1", "fa2"):
            assert found[f"{name}.total"] == found[f"{name}.model"] == found[f"{name}.bytes"][-1]
            moved = sum(found[f"{name}.{kind}"] for kind in ("inputs", "again", "written"))
            assert moved == found[f"{name}.total"]


def test_the_largest_part_of_the_accesses():
    state = {name: axis.values[0] for name, axis in panels()["traffic"].axes.items()}
    state |= {"N": 4096, "Br": 128, "Bc": 64, "d": 64, "dtype": "float16", "M": 100}
    found = panels()["traffic"].answer(**state)
    assert [found[f"{name}.largest"] for name in ("standard", "fa1", "fa2")] == [
        "S and P", "O", "K and V",
    ]  # fmt: skip
    assert found["fa2.share"] == pytest.approx(100 * 64 / (2 * 32 + 2 + 1 / 16) * 32 / 32, rel=1e-2)
    ruled = panels()["traffic"].answer(**state | {"tiles": "rule"})
    assert (ruled["Br"], ruled["Bc"]) == (64, 200)  # 51200 elements / (4 * 64)


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
    walked = walk.walk("fa2-mma", "float16", 50, 16, 32, 16, True, 0)
    assert walked == walk.by_row_tile(found)
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
