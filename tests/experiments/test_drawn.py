"""A figure is drawn again when anything that it could come from has changed, and only then."""

import shutil

import pytest
from test_experiments import store_synthetic

from experiments import __main__ as command
from experiments.lab.record import drawn, runner

NAME, OTHER = "online_softmax", "io_vs_head_dim"


@pytest.fixture
def places(tmp_path, monkeypatch):
    """A folder of figures with their data, and copies of what stands for the sources."""
    for folder in ("package", "experiments"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "code.py").write_text("one = 1\n")
    (tmp_path / "recordings" / "data" / NAME).mkdir(parents=True)
    (tmp_path / "recordings" / "data" / NAME / "some-gpu.csv").write_text("row\n")
    (tmp_path / "recordings" / "data" / "published.csv").write_text("row\n")
    out = tmp_path / "out"
    (out / "data" / NAME).mkdir(parents=True)
    for path in (out / f"{NAME}.svg", out / f"{NAME}.png", out / "data" / NAME / "model.csv"):
        path.write_text("x\n")
    monkeypatch.setattr(drawn, "PACKAGE", tmp_path / "package")
    monkeypatch.setattr(drawn, "EXPERIMENTS", tmp_path / "experiments")
    monkeypatch.setattr(drawn, "FIGURES", tmp_path / "recordings")
    return tmp_path


def test_a_figure_stands_until_it_is_kept_no_more(places):
    out = places / "out"
    assert not drawn.Drawn(out).stands(NAME)
    drawn.Drawn(out).keep([NAME])
    assert drawn.Drawn(out).stands(NAME)
    assert not drawn.Drawn(out).stands(OTHER)


@pytest.mark.parametrize(
    "path",
    ["package/code.py", "package/new.csv", "experiments/code.py", "recordings/data/published.csv"]
    + [f"recordings/data/{NAME}/some-gpu.csv", f"recordings/data/{NAME}/new.json"]
    + [f"out/data/{NAME}/model.csv", f"out/{NAME}.svg", f"out/{NAME}.png", f"out/{NAME}.gif"],
)
def test_a_change_draws_it_again(places, path):
    drawn.Drawn(places / "out").keep([NAME])
    (places / path).write_text("changed\n")
    assert not drawn.Drawn(places / "out").stands(NAME)


@pytest.mark.parametrize("path", [f"out/{NAME}.svg", f"out/data/{NAME}/model.csv"])
def test_what_is_gone_is_drawn_again(places, path):
    drawn.Drawn(places / "out").keep([NAME])
    (places / path).unlink()
    assert not drawn.Drawn(places / "out").stands(NAME)


def test_another_version_draws_it_again(places, monkeypatch):
    drawn.Drawn(places / "out").keep([NAME])
    monkeypatch.setattr(drawn.metadata, "version", lambda name: "0.0")
    assert not drawn.Drawn(places / "out").stands(NAME)


@pytest.mark.parametrize("text", ["", "[1]", "{"])
def test_a_damaged_file_draws_everything(places, text):
    kept = drawn.Drawn(places / "out")
    kept.keep([NAME])
    (places / "out" / "partial" / "drawn.json").write_text(text)
    assert not drawn.Drawn(places / "out").stands(NAME)


def test_the_command_draws_once_what_does_not_change(tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    store_synthetic(NAME, out)
    monkeypatch.setattr(command, "names", lambda: [NAME])
    monkeypatch.setattr(runner.Runner, "measure", lambda self, name: None)
    monkeypatch.setattr(runner.device, "gpu_available", lambda: False)
    said = []
    for _ in "12":
        assert command.main(["all", "--out", str(out)]) == 0
        said.append(capsys.readouterr().out)
    assert ": drawn" in said[0] and "as it was drawn before" not in said[0]
    assert ": drawn" not in said[1] and "as it was drawn before" in said[1]
    shutil.rmtree(out / "partial")
    assert command.main(["all", "--out", str(out)]) == 0
    assert "drawn, same as before" in capsys.readouterr().out
