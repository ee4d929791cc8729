"""What is stored can be read: nothing lies on the border, colours of a panel are apart."""

import re
from functools import cache
from itertools import combinations

import numpy as np
import pytest
import texts

matplotlib = pytest.importorskip("matplotlib")
from matplotlib import colors  # noqa: E402
from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: E402
from matplotlib.ticker import NullFormatter, NullLocator  # noqa: E402
from PIL import Image  # noqa: E402

from experiments.lab.record import registry  # noqa: E402
from experiments.lab.record.options import FIGURES  # noqa: E402
from experiments.lab.record.store import EMULATOR, MODEL, Store  # noqa: E402
from experiments.lab.show import film, report, style, thumbs  # noqa: E402

BORDER = 4  # pixels
# Of CIELAB's distance, as people without the cones for green see it: 2 is just noticed.
APART = 12
# Machado, Oliveira and Fernandes 2009, deuteranopia, on linear RGB.
DEUTERANOPIA = np.array(
    [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]]
)
XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def lab(rgb):
    """CIELAB of a colour, seen without the cones for green."""
    c = np.asarray(colors.to_rgb(rgb))
    linear = np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)
    xyz = XYZ @ np.clip(DEUTERANOPIA @ linear, 0, 1) / (XYZ @ np.ones(3))
    f = np.where(xyz > 216 / 24389, np.cbrt(xyz), (24389 / 27 * xyz + 16) / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def apart(a, b):
    return float(np.linalg.norm(lab(a) - lab(b)))


def test_colours_that_look_alike_are_found():
    assert apart("#E69F00", "#C4B000") < 5 < APART < apart("#0072B2", "#E69F00")
    assert apart("#808080", "#808080") == 0


@pytest.mark.parametrize("path", sorted(FIGURES.glob("*.png")), ids=lambda path: path.stem)
def test_no_ink_lies_on_the_border(path):
    with Image.open(path) as picture:
        pixels = np.asarray(picture)[..., :3]
    turned = pixels.swapaxes(0, 1)
    edges = [edge for way in (pixels, turned) for edge in (way[:BORDER], way[-BORDER:])]
    assert pixels.dtype == np.uint8 and not any((edge < 0.98 * 255).any() for edge in edges)


def test_small_figures_show_what_their_titles_say():
    def last(name, series):
        """How many times the first value the last is."""
        points = thumbs.THUMBS[name].points(rows_of(name), series)
        assert len(points) > 4 and len({x for x, _ in points}) == len(points)
        return points[-1][1] / points[0][1]

    dram = {series: last("io_vs_seqlen", series) for series in thumbs.ORDERS}
    assert dram["fa2-simt"] < 1.2 < 20 < min(dram["fa1-simt"], dram["standard-simt"])
    assert last("loop_order", "fa2-mma-fa1-tiles") < last("loop_order", "fa1-mma")
    assert last("numerics", "fa2-mma") < 1.1 < 2 < last("numerics", "standard-mma")
    assert last("decode", "fa2-mma") < 1.5 < 3 < last("decode", "fa2-mma-splits")
    # Lengths doubled six and nine times.
    assert last("runtime_memory", "torch-unfused") > 2 ** (1.8 * 6)
    assert 0.9 < last("runtime_memory", "fa2-mma") / 2**9 < 1.1
    for name in registry.names():
        made = thumbs.figures(registry.load(name))
        small = {other: draw for other, draw in made.items() if other.endswith(thumbs.SUFFIX)}
        assert set(small) == ({f"{name}_small"} if name in thumbs.THUMBS else set())
        assert all(draw([]) is None for draw in small.values())


def drawn():
    for name in registry.names():
        module = registry.load(name)
        yield name, module.draw
        yield from thumbs.figures(module).items()


def rows_of(name):
    owners = (e for e in registry.names() if name in (e, *thumbs.figures(registry.load(e))))
    return [*recorded(next(owners))]


@cache
def recorded(experiment):
    store = Store(FIGURES)
    machines = (MODEL, EMULATOR, report.gpu(store, experiment))
    return [r for machine in machines for r in store.read(experiment, machine)]


def colour(handle):
    """Of a line, a bar or bars; None for anything else."""
    for name in ("get_color", "get_facecolor"):
        if hasattr(handle, name):
            found = np.ravel(getattr(handle, name)()) if name == "get_facecolor" else None
            return colors.to_hex(handle.get_color() if found is None else found[:3])
    patches = getattr(handle, "patches", ())
    return colors.to_hex(patches[0].get_edgecolor()) if patches else None


# Three lines, as the longest footnote has.
FOOTNOTE = "recorded on a GPU\nL2 is a counter\ncounted on the emulator"
MOST_WORDS = 12


@pytest.mark.parametrize(
    ("name", "draw"), list(drawn()), ids=lambda x: x if isinstance(x, str) else ""
)
def test_a_figure_can_be_read(name, draw):
    """The checks share a figure, as drawing all of them takes a minute of a core."""
    figure = draw(rows_of(name))
    if figure is None:
        return
    for axis in (axis for ax in figure.axes for axis in (ax.xaxis, ax.yaxis)):
        if isinstance(axis.get_minor_formatter(), NullFormatter):
            axis.set_minor_locator(NullLocator())  # ticks without a text, which take long to make
    for ax in figure.axes:
        assert not colours_that_look_alike(ax), ax.get_title()
        assert not marks_outside(ax), ax.get_title()
    FigureCanvasAgg(figure)  # knows the size of a text once it has been asked
    with matplotlib.rc_context(style.RC):
        style.lay_out(figure, FOOTNOTE)
        found = texts.overlapping(figure) + long_titles(figure)
    assert not found


def colours_that_look_alike(ax):
    handles = ax.get_legend_handles_labels()[0]
    found = {c for c in map(colour, handles) if c not in (None, "#ffffff")}
    return [(a, b) for a, b in combinations(sorted(found), 2) if apart(a, b) < APART]


def marks_outside(ax):
    """Labels of the lines with a mark that is not within the axes."""
    low, high = np.sort(np.array([ax.get_xlim(), ax.get_ylim()]), axis=1).T
    found = []
    for line in ax.lines:
        marked = line.get_marker() not in ("None", "", " ", None)
        if marked and line.get_transform() == ax.transData:
            at = np.array(line.get_xydata(), dtype=float)
            at = at[np.isfinite(at).all(axis=1)]
            if not ((low <= at) & (at <= high)).all():
                found.append(line.get_label())
    return found


def long_titles(figure):
    """The titles, their first lines, that have more than MOST_WORDS words."""
    titles = [figure.get_suptitle(), *(ax.get_title() for ax in figure.axes)]
    titles += [legend.get_title().get_text() for legend in figure.legends]
    return [title for title in titles if len(title.partition("\n")[0].split()) > MOST_WORDS]


def test_overlapping_and_cut_texts_are_found():
    figure, ((ax,),) = style.new(1, 1, 4.0)
    ax.text(0.5, 0.5, "one text")
    style.lay_out(figure, "")
    assert texts.overlapping(figure) == []
    ax.text(0.52, 0.51, "another text")
    ax.text(0.99, 0.2, "a text that is cut")
    found = texts.overlapping(figure)
    assert found == ["'a text that is cut' is cut", "'one text' overlaps 'another text'"]


def test_frames_of_the_animations_can_be_read(monkeypatch):
    """The first, the middle and the last frame of each film, as they are drawn."""
    films, sides, clocks = [], film._sides, film.clocks

    def kept(traces):
        films.append(sides(traces))
        return films[-1]

    def few(traces):
        found = clocks(traces)
        return [found[0], found[len(found) // 2], found[-1]]

    monkeypatch.setattr(film, "_sides", kept)
    monkeypatch.setattr(film, "clocks", few)
    monkeypatch.setattr(
        film, "gif", lambda problems, note: [film.frames(x, note) for x in problems]
    )
    animated = {name: registry.load(name) for name in registry.names()}
    animated = {name: x for name, x in animated.items() if hasattr(x, "animate")}
    for name, module in animated.items():
        for frames in module.animate(rows_of(name), FOOTNOTE.partition("\n")[0]):
            for n, _ in enumerate(frames):
                assert texts.overlapping(films[-1][0]) == [], (name, n)
            assert n == 2
    assert len(films) >= len(animated) > 0


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("io_vs_head_dim", "| d | FA-1 (K/V outer), line 1's tiles |"),
        ("io_vs_sram", "| FA-1 (K/V outer), line 1's tiles, above d² |"),
    ],
)
def test_titles_have_the_tables_exponents(name, line):
    title = registry.load(name).draw(rows_of(name)).legends[0].get_title().get_text()
    (said,) = re.findall(r"-?\d\.\d\d", title)
    table = (FIGURES / "tables" / f"{name}.md").read_text().splitlines()
    (found,) = [row.removeprefix(line) for row in table if row.startswith(line)]
    assert re.findall(r"(-?\d\.\d\d) ±", found)[0] == said
