"""What is stored can be read: nothing lies on the border, colours of a panel are apart."""

import re
from itertools import combinations

import numpy as np
import pytest

matplotlib = pytest.importorskip("matplotlib")
from matplotlib import colors, image  # noqa: E402

from experiments.lab.record import registry  # noqa: E402
from experiments.lab.record.options import FIGURES  # noqa: E402
from experiments.lab.record.store import EMULATOR, MODEL, Store  # noqa: E402
from experiments.lab.show import report, thumbs  # noqa: E402

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
    pixels = image.imread(path)[..., :3]
    inked = (pixels < 0.98).any(axis=-1)
    inked[BORDER:-BORDER, BORDER:-BORDER] = False
    assert not inked.any()


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
        made = thumbs.figures(name)
        assert set(made) == ({f"{name}_small"} if name in thumbs.THUMBS else set())
        assert all(draw([]) is None for draw in made.values())


def drawn():
    for name in registry.names():
        module = registry.load(name)
        yield name, module.draw
        yield from registry.figures(module).items()


def rows_of(name):
    owner = next(e for e in registry.names() if name in (e, *registry.figures(registry.load(e))))
    store = Store(FIGURES)
    machines = (MODEL, EMULATOR, report.gpu(store, owner))
    return [r for machine in machines for r in store.read(owner, machine)]


def colour(handle):
    """Of a line, a bar or bars; None for anything else."""
    for name in ("get_color", "get_facecolor"):
        if hasattr(handle, name):
            found = np.ravel(getattr(handle, name)()) if name == "get_facecolor" else None
            return colors.to_hex(handle.get_color() if found is None else found[:3])
    patches = getattr(handle, "patches", ())
    return colors.to_hex(patches[0].get_edgecolor()) if patches else None


@pytest.mark.parametrize(
    ("name", "draw"), list(drawn()), ids=lambda x: x if isinstance(x, str) else ""
)
def test_colours_of_a_panel_are_apart_and_marks_lie_within_the_axes(name, draw):
    figure = draw(rows_of(name))
    for ax in figure.axes if figure else ():
        handles = ax.get_legend_handles_labels()[0]
        found = {c for c in map(colour, handles) if c not in (None, "#ffffff")}
        close = [(a, b) for a, b in combinations(sorted(found), 2) if apart(a, b) < APART]
        assert not close, ax.get_title()
        low, high = np.sort(np.array([ax.get_xlim(), ax.get_ylim()]), axis=1).T
        for line in ax.lines:
            if (
                line.get_marker() not in ("None", "", " ", None)
                and line.get_transform() == ax.transData
            ):
                at = np.array(line.get_xydata(), dtype=float)
                at = at[np.isfinite(at).all(axis=1)]
                assert ((low <= at) & (at <= high)).all(), (ax.get_title(), line.get_label())


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("io_vs_head_dim", "| d | FA-1 (K/V outer), line 1's tiles |"),
        ("io_vs_sram", "| FA-1 (K/V outer), line 1's tiles, above d² |"),
    ],
)
def test_titles_have_the_tables_exponents(name, line):
    title = registry.load(name).draw(rows_of(name)).legends[0].get_title().get_text()
    (said,) = re.findall(r"to the (-?\d\.\d\d)", title)
    table = (FIGURES / "tables" / f"{name}.md").read_text().splitlines()
    (found,) = [row.removeprefix(line) for row in table if row.startswith(line)]
    assert re.findall(r"(-?\d\.\d\d) ±", found)[0] == said
