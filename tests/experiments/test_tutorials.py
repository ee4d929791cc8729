"""The tutorials: each runs from first to last line, shows a picture, and leads to the next."""

import re
import runpy
from pathlib import Path

import matplotlib
import pytest
from matplotlib import pyplot

from fa_numba import device

FOLDER = Path(__file__).resolve().parents[2] / "experiments" / "tutorials"
LESSONS = sorted(FOLDER.glob("lesson_*.py"))
NEEDS_GPU = "needs a CUDA GPU"


@pytest.fixture
def shown(monkeypatch):
    """Pictures that the script shows, as lists of the titles of their panels."""
    titles = []

    def show():
        for number in pyplot.get_fignums():
            titles.append([ax.get_title() or ax.get_xlabel() for ax in pyplot.figure(number).axes])
        pyplot.close("all")

    monkeypatch.setattr(pyplot, "show", show)
    with matplotlib.rc_context():
        matplotlib.use("Agg")
        pyplot.close("all")  # a figure that an earlier test left is no picture of the lesson
        yield titles
    pyplot.close("all")


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_a_lesson_runs_and_shows_a_picture(path, shown, capsys):
    if NEEDS_GPU in path.read_text("utf-8"):
        if not device.on_gpu():
            with pytest.raises(SystemExit) as stopped:
                runpy.run_path(str(path))
            assert stopped.value.code is None  # a message, and no error
            assert NEEDS_GPU in capsys.readouterr().out and shown == []
            return
        pytest.importorskip("torch")
    runpy.run_path(str(path))
    assert len(shown) == 1 and all(shown[0])


def test_the_lessons_are_linked_in_order():
    assert [int(path.stem.split("_")[1]) for path in LESSONS] == list(range(1, len(LESSONS) + 1))
    for path, following in zip(LESSONS, LESSONS[1:], strict=False):
        assert f"]({following.name})" in path.read_text("utf-8")
    for path in LESSONS:
        text = path.read_text("utf-8")
        assert text.startswith(f"# %% [markdown]\n# # {path.stem.split('_')[1]}. ")
        assert "## Change something" in text
        for link in re.findall(r"\]\(([\w./]+\.\w+)\)", text):
            assert (path.parent / link).exists(), link
