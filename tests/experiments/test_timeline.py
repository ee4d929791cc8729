"""The timeline: a trace as rows, what follows from it, the figure and its animation."""

import re
from types import SimpleNamespace

import experiment_helpers
import numpy as np
import pytest
from matplotlib.colors import to_hex

from experiments import __main__ as command
from experiments import timeline
from experiments.lab.measure import moves
from experiments.lab.measure.series import row_fields
from experiments.lab.measure.workloads import one_head
from experiments.lab.record import registry
from experiments.lab.record.options import FIGURES, Bench, Options, Refused
from experiments.lab.record.store import EMULATOR, MODEL, Row, Store
from experiments.lab.show import film
from fa_numba import Tiles, algorithms, io_model

# N, d, Br, Bc, causal: ragged ends, one tile, more rows or more columns in a tile.
SHAPES = [
    (16, 4, 8, 8, False),
    (19, 5, 8, 8, True),
    (23, 3, 4, 16, True),
    (23, 8, 16, 8, False),
    (7, 4, 8, 8, True),
]


def recorded():
    return Store(FIGURES).read("timeline", EMULATOR)


def options(N, d, Br, Bc, causal):
    return Options(seqlens=(N,), head_dims=(d,), tiles=((Br, Bc),), causal=(causal,))


def measured(*shape):
    return [row for part in timeline.measure(options(*shape), Bench()) for row in part]


def synthetic():
    """The rows of both orders with two tiles each way: a film of few frames."""
    return measured(16, 4, 8, 8, False)


@pytest.fixture(scope="module", params=SHAPES, ids=str)
def traced(request):
    """The rows of both orders at a shape, and the traces in them."""
    rows = measured(*request.param)
    assert not [row.note for row in rows if row.failed]
    return request.param, rows, moves.traces(rows)


def test_the_trace_moves_what_the_model_says(traced):
    """Elements of every array, loaded and stored; and rows of the closed form beside them."""
    (N, d, Br, Bc, causal), rows, traces = traced
    assert [trace.series for trace in traces] == list(timeline.SERIES)
    for trace, form in zip(traces, (io_model.fa1, io_model.fa2), strict=True):
        model = form(one_head(N, d, causal), Tiles(Br, Bc))
        assert trace.problem == (d, N, causal, Br, Bc) and trace.bytes == model.bytes
        for kind, metric in (("load", "loads"), ("store", "stores")):
            want = getattr(model, metric)
            moved = {name: trace.select((name,), kind) for name in "QKVOlmL"}
            got = {name: sum(m.bytes for m in ms) // 4 for name, ms in moved.items() if ms}
            assert got == want
            stored = {
                r.note: r.value for r in rows if (r.series, r.metric) == (trace.series, metric)
            }
            assert stored == want


def test_a_move_is_a_tile(traced):
    """Whole rows of one tile, the last one as far as the sequence goes; one after the other."""
    (N, d, Br, Bc, _), _, traces = traced
    for trace in traces:
        clock = 0
        for move in trace.moves:
            block, width = (Bc, d) if move.array in "KV" else (Br, 1 if move.array in "lmL" else d)
            assert move.first % block == 0 and move.end == min(N, move.first + block)
            assert move.bytes == 4 * (move.end - move.first) * width
            assert move.start == clock
            clock = move.stop


def test_every_comment_names_the_line_of_the_paper(traced):
    for trace in traced[2]:
        known = moves.LINES[trace.algorithm]
        for move in trace.moves:
            numbers = {int(n) for n in re.findall(r"\d+", move.line)}
            assert known[move.array, move.kind] in numbers, move
            assert trace.lines([move]) == f"line {known[move.array, move.kind]}"


def test_tiles_of_scores_are_computed_in_the_algorithms_order(traced):
    """FA-1's as its loops go; a block of FA-2 has a row tile, and the last one comes first."""
    (N, d, Br, Bc, causal), _, (fa1, fa2) = traced
    q, k, v = np.random.default_rng(0).standard_normal((3, N, d))
    for trace, run in ((fa1, algorithms.fa1_forward), (fa2, algorithms.fa2_forward)):
        steps = []
        run(q, k, v, Br=Br, Bc=Bc, causal=causal, watch=lambda s, to=steps: to.append((s.i, s.j)))
        if trace is fa2:
            steps.sort(key=lambda ij: (-ij[0], ij[1]))
        assert [(visit.i, visit.j) for visit in trace.visits] == steps


def test_a_visit_has_its_tiles_on_the_chip(traced):
    """From its start; the next Q may already come then, as S takes no time on this clock."""
    for trace in traced[2]:
        ends = {visit.stop for visit in trace.visits}
        assert len(ends) == len(trace.visits)
        for visit in trace.visits:
            there = {(h.array, h.tile) for h in trace.held if h.start <= visit.start < h.stop}
            there |= {("Q", h.tile) for h in trace.held if (h.array, h.stop) == ("Q", visit.start)}
            here = {("Q", visit.i), ("K", visit.j), ("V", visit.j), ("O", visit.i)}
            assert here <= there and visit.start < visit.stop


def test_the_chip_holds_one_tile_of_an_array(traced):
    for trace in traced[2]:
        for array in "QKVO":
            held = sorted((h.start, h.stop) for h in trace.held if h.array == array)
            assert all(stop <= start for (_, stop), (start, _) in zip(held, held[1:], strict=False))
        # What has been loaded or stored has been held meanwhile.
        for move in trace.moves:
            span = [h for h in trace.held if (h.array, h.tile) == (move.array, trace.tile(move))]
            assert any(h.start <= move.start and move.stop <= h.stop for h in span), move


def boxes(ax):
    """The rectangles of the panel by their colour: how high each is, in kB."""
    found = {}
    for drawn in ax.collections:
        for path, shade in zip(drawn.get_paths(), drawn.get_facecolors(), strict=True):
            y = path.vertices[:, 1]
            found.setdefault(to_hex(shade).upper(), []).append(y.max() - y.min())
    return found


def said(ax):
    return " ".join(text.get_text() for text in ax.texts)


def test_the_figure_has_a_box_for_every_move_as_high_as_its_bytes(traced):
    _, rows, traces = traced
    figure = timeline.draw(rows)
    for trace, ax in zip(traces, figure.axes, strict=True):
        drawn = boxes(ax)
        thin = max(t.bytes for t in traces) / 250 / 1e3
        for shade in (timeline.INPUT, timeline.AGAIN, timeline.WRITTEN):
            want = [max(m.bytes / 1e3, thin) for m in trace.moves if timeline.colour(m) == shade]
            np.testing.assert_allclose(drawn.get(shade, []), want)
        assert len(drawn[timeline.SHARED]) == sum(h.array in "QKV" for h in trace.held)
        stored = trace.select(("O",), "store")
        most = max(sum(move.first == other.first for other in stored) for move in stored)
        assert ("is stored once " if most == 1 else f" {most} times.\n") in said(ax)
        assert ("never loaded" in said(ax)) == (not trace.select(("O",), "load"))
        assert moves.size(trace.bytes) in ax.get_title()


def test_fa1_is_shown_to_read_o_again_and_fa2_is_not():
    """Three column tiles: two of three passes read O, all three write it; FA-2 writes it once."""
    left, right = timeline.draw(measured(24, 4, 8, 8, False)).axes
    assert "is stored 3 times.\nAll tiles of O together are loaded 6 times." in said(left)
    assert "Each tile of O is stored once and never loaded." in said(right)
    assert timeline.AGAIN in boxes(left) and timeline.AGAIN not in boxes(right)


# --- the animation -----------------------------------------------------------------------------


def colours(side):
    return {key: to_hex(box.get_facecolor()).upper() for key, box in side.boxes.items()}


def test_a_moment_shows_what_moves_and_what_is_done(traced):
    for side in film._sides(traced[2])[1]:
        trace, begun = side.trace, []
        for n, event in enumerate(moves.events(trace)):
            assert side.at(event[0].start) == n
            shown = colours(side)
            strong = {
                key
                for key, shade in shown.items()
                if shade in (timeline.INPUT, timeline.AGAIN, timeline.WRITTEN)
            }
            assert strong == {f"{move.array}{trace.tile(move)}" for move in event}
            assert {shown[key] for key in strong} == {timeline.colour(m) for m in event}
            computed = {f"S{v.i},{v.j}" for v in trace.visits if v.start <= event[0].start}
            done = {key for key in shown if shown[key] in (film.SEEN, film.NOW)}
            assert done == computed
            begun += [(m.array, m.kind) for m in event]
            read, written = begun.count(("O", "load")), begun.count(("O", "store"))
            line = f"Algorithm 1, {trace.lines(event)}: {event[0].kind} "
            assert side.said(n).startswith(line)
            assert side.said(n).endswith(f"\nTiles of O so far: {read} loads, {written} stores")
        assert side.said(side.at(trace.bytes)).startswith("Done.")
        assert moves.size(trace.bytes) in side.ax.get_title()


def test_the_title_says_how_often_tiles_of_o_move():
    """Three tiles of O: FA-1 loads 6 times and stores 9 times, FA-2 stores 3 times."""
    both = moves.traces(measured(24, 4, 8, 8, False))
    assert film.title(both) == "FA-1 moves tiles of O 5 times as often as FA-2"
    assert film.title(both[:1]) == "Tiles that move between global memory and the chip"


def test_boxes_lie_as_the_matrices_do():
    """Three by three tiles: K and V above S, Q left and O right of it."""
    (side, _) = film._sides(moves.traces(measured(24, 4, 8, 8, False)))[1]
    at = {key: box.get_xy() for key, box in side.boxes.items()}
    for i in range(3):
        assert at[f"Q{i}"][0] < 0 and at[f"O{i}"][0] > 1
        assert at[f"Q{i}"][1] == at[f"O{i}"][1] == at[f"S{i},0"][1] == 1 - (i + 1) / 3
        for j in range(3):
            assert at[f"S{i},{j}"][0] == at[f"K{j}"][0] == at[f"V{j}"][0] == j / 3
    assert min(at["K0"][1], at["V0"][1]) > 1


def test_blocks_are_shown_in_the_order_of_the_grid():
    """In whichever order they ran."""
    common = {"rows": (0, 8), "kind": "load", "bytes": 32, "line": "line 4"}
    ran = [(2, 0, "Q"), (2, 1, "V"), (0, 2, "K"), (1, 3, "O"), (0, 4, "L")]
    accesses = [
        SimpleNamespace(block=(block, 0, 0), step=step, array=array, **common)
        for block, step, array in ran
    ]
    assert [note.split("; line")[0] for note, _ in moves.notes(accesses)] == [
        "00000 load K 0:8; block 0",
        "00001 load L 0:8; block 0",
        "00002 load O 0:8; block 1",
        "00003 load Q 0:8; block 2",
        "00004 load V 0:8; block 2",
    ]


def test_no_move_falls_between_two_frames(traced, monkeypatch):
    """However few frames there may be, every event starts between one and the next."""
    starts = {event[0].start for trace in traced[2] for event in moves.events(trace)}
    for most in (240, 5, 1):
        monkeypatch.setattr(film, "MOST_FRAMES", most)
        *clocks, end = film.clocks(traced[2])
        assert len(clocks) <= most and clocks == sorted(set(clocks)) and set(clocks) <= starts
        assert end == max(trace.bytes for trace in traced[2])


def test_of_the_default_shape_a_frame_has_one_tile_of_each_order():
    traces = moves.traces(recorded())
    clocks = [-1, *film.clocks(traces)]
    for trace in traces:
        begun = [event[0].start for event in moves.events(trace)]
        for before, clock in zip(clocks, clocks[1:], strict=False):
            assert sum(before < start <= clock for start in begun) <= 1


def test_without_a_trace_nothing_is_shown():
    rows = recorded()
    for part in ([], [r for r in rows if r.source == "model"]):
        assert timeline.draw(part) is timeline.animate(part, "") is timeline.table(part) is None


# --- what is stored -------------------------------------------------------------------------------


def test_what_is_recorded_is_both_orders_in_full():
    """The traced bytes of each array are the closed form's, and the file on show is small."""
    store = Store(FIGURES)
    rows = [row for machine in (EMULATOR, MODEL) for row in store.read("timeline", machine)]
    _, *cells = experiment_helpers.cells(timeline.table(rows).body)
    assert {row[0] for row in cells} == {timeline.LABELS[series] for series in timeline.SERIES}
    assert all(row[-2] == row[-1] for row in cells)
    of_o = {row[0]: row[5:7] for row in cells if row[4] == "O"}
    assert list(of_o.values()) == [["12", "16"], ["0", "4"]]


def test_rows_that_are_no_moves_are_refused():
    (row,) = recorded()[:1]
    broken = Row(**{**row_fields(one_head(8, 4)), **vars(row), "note": "00000 load K; block 0; x"})
    with pytest.raises(ValueError, match="must have tiles .* and note '00000 load K; block 0; x'"):
        moves.traces([broken])


def test_a_trace_replaces_the_older_one(tmp_path):
    """A shorter trace of the same call leaves nothing of the longer one; another call's stays."""
    store = Store(tmp_path)
    rows = [row for row in recorded() if row.series == "fa1-simt"]
    other = [row for row in recorded() if row.series == "fa2-simt"]
    for each in (rows, other, rows[:7]):
        experiment_helpers.recorded(tmp_path, "timeline", each, complete=False)
    assert len(store.read("timeline", EMULATOR)) == len(other) + 7


# --- the command line -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["timeline", "--tiles", "64"], "must be two integers such as 64x128, got '64'"),
        (
            ["timeline", "--tiles", "64x64x64"],
            "must be two integers such as 64x128, got '64x64x64'",
        ),
        (["timeline", "--tiles", "64x"], "must be two integers such as 64x128, got '64x'"),
        (["timeline", "--tiles", "64x60"], "tiles.Bc must be a positive multiple of 8, got 60"),
        (["timeline", "--tiles", "0x8"], "tiles.Br must be a positive multiple of 4, got 0"),
        (
            ["timeline", "speed", "--tiles", "64x64"],
            "speed has no option --tiles. Experiments with",
        ),
    ],
)
def test_bad_tiles_are_refused_before_anything_runs(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr(command, "Runner", lambda *_: pytest.fail("something was run"))
    with pytest.raises(SystemExit) as exit_:
        command.main(["run", *arguments])
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (
            (4096, 64, 64, 64, False),
            r"at most 1024 tiles of S, got 64 x 64 \(tiles 64x64 at N=4096\)",
        ),
        (
            (64, 256, 256, 256, False),
            "tiles must fit in .* bytes of shared memory .*got 1048576 bytes",
        ),
    ],
)
def test_a_shape_that_cannot_be_shown_is_said(shape, message, monkeypatch):
    monkeypatch.setattr(timeline, "call", lambda *_, **__: pytest.fail("something was run"))
    with pytest.raises(Refused, match=message):
        list(timeline.measure(options(*shape), Bench()))


def test_tiles_make_a_part_of_an_experiment():
    chosen = Options(tiles=((64, 64), (32, 128)))
    assert not chosen.complete
    rows = recorded()
    assert all(chosen.admits(row) for row in rows)
    assert not any(Options(tiles=((32, 128),)).admits(row) for row in rows)
    of = {name: registry.takes(registry.load(name)) for name in registry.names()}
    assert {name for name in of if "tiles" in of[name]} == {"timeline"}


def test_the_emulator_is_what_is_traced(monkeypatch):
    """Also where there is a GPU: the call runs on the emulator, inside a trace."""
    ran = []

    def call(series, problem, *arrays, **given):
        return lambda: ran.append((series, timeline.device.on_gpu()))

    monkeypatch.setattr(timeline, "call", call)
    rows = measured(16, 4, 8, 8, False)
    assert ran == [(series, False) for series in timeline.SERIES]
    assert {row.source for row in rows} == {"model"}  # nothing was accessed
