"""A unit describes itself: a fourth one needs no other file, and nothing else asks for its name."""

import ast
import re
from pathlib import Path

import numpy as np
import pytest

import fa_numba
from experiments.lab.measure import series
from experiments.lab.show import style
from fa_numba import Tiles, __main__, reference
from fa_numba import device as devices
from fa_numba.bounds import DEVICES
from fa_numba.choices import units
from fa_numba.host import placement
from fa_numba.problem import Problem

ROOT = Path(__file__).resolve().parents[2] / "fa_numba"
ROOMS = ("host", "commands", "io_model", "emulator")
# The emulator counts instructions by class, and a product of Hopper's instruction is one.
CLASSES_OF_INSTRUCTIONS = {("emulator/products.py", "wgmma")}
# Kernels that calls of every unit launch, and that compute on CUDA cores.
SHARED_KERNELS = {
    ("host/append.py", "fa_numba.kernels.simt.append"),
    ("host/append.py", "fa_numba.kernels.simt.append_e4m3"),
    ("host/blocks.py", "fa_numba.kernels.simt.blocks"),
    ("host/prefix.py", "fa_numba.kernels.simt.append"),
    ("host/quantizing.py", "fa_numba.kernels.simt.quantize"),
    ("host/softmax.py", "fa_numba.kernels.simt.softmax"),
}


class Fake(units.Simt):
    """CUDA cores under another name, with tiles of their own."""

    name, title, label, mark = "fake", "imagined cores", "imagined cores (fake)", " (fake)"
    looks = {"fa2": ("#123456", "*")}
    emulated_steps = 1.0

    def unsuited(self, request):
        return "a call has to name it"

    def forward(self, request):
        return super().forward(request.chosen(tiles=Tiles(32, 16)))


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setitem(units.UNITS, "fake", Fake())
    return units.UNITS["fake"]


def test_a_new_unit_is_planned_run_counted_and_drawn(fake, monkeypatch, capsys):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 1, 33, 8), np.float32) for _ in range(3))
    problem = Problem(1, 1, 1, 33, 33, 8)
    with devices.using("emulator"):
        plan = series.plan("fa2-fake", problem)
        assert (plan.unit, plan.tiles.Br, plan.tiles.Bc) == ("fake", 32, 16)
        assert plan.kernels[0].grid == (2, 1, 1) and plan.why["unit"] == "chosen by the caller"
        with pytest.raises(ValueError, match="q of shape .* would take the emulator up to about"):
            placement.check_size(plan)
        monkeypatch.setattr(fake, "emulated_steps", 1e8)
        with fa_numba.count_accesses() as counts:
            O = series.call("fa2-fake", problem, q, k, v)()
    np.testing.assert_allclose(O, reference.attention(q, k, v), rtol=1e-5, atol=1e-6)
    assert {n: counts.loads[n] for n in "QKV"} == {n: plan.accesses.loads[n] for n in "QKV"}
    _, ((ax,),) = style.new(1, 1, 2.0)
    style.line(ax, {1: 1.0, 2: 2.0}, "fa2-fake", label=series.LABELS["fa2-fake"])
    (line,) = ax.lines
    assert (line.get_color(), line.get_marker()) == ("#123456", "*")
    assert line.get_label() == "FA-2 (fake)"
    assert series.LABELS["fa1-fake-splits"] == "FA-1 (fake), query splits"
    assert style.COLOURS["fa1-fake"] == style.COLOURS["fa1-simt"]
    call = ["plan", "--seqlen", "64", "--dtype", "float32", "--unit", "fake", "--algorithm", "fa2"]
    assert __main__.main([*call, "--head-dim", "8", "--device", "H200"]) == 0
    assert "imagined cores" in capsys.readouterr().out
    with DEVICES["H200"].planning():
        auto = fa_numba.plan(q.shape, k.shape)
        assert auto.unit == "simt" and "not fake: a call has to name it" in auto.why["unit"]
    for wrong in ("new", None):
        with pytest.raises(ValueError, match=r"unit must be 'auto', .*'wgmma' or 'fake', got"):
            fa_numba.plan(q.shape, k.shape, unit=wrong)


# --- nobody else asks for a unit's name -------------------------------------------------------


def named(path, text):
    """What of a file names a unit: strings that are no docstrings, and imports of its modules."""
    names = "|".join(units.UNITS)
    if not re.search(rf"\b({names})\b", text):
        return
    tree, exact = ast.parse(text), path.startswith("emulator/")
    docs = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            found = re.fullmatch if exact else re.search  # its messages name instructions
            if found(rf".*\b({names})\b.*" if not exact else names, node.value):
                yield path, node.value
        modules = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for module in modules:
            if re.search(rf"\.({names})(_|\.|$)", module or ""):
                yield path, module
                break


def test_host_commands_model_and_emulator_name_no_unit():
    files = [path for room in ROOMS for path in (ROOT / room).rglob("*.py")]
    assert len(files) > 60
    found = {x for f in files for x in named(f.relative_to(ROOT).as_posix(), f.read_text())}
    assert found == CLASSES_OF_INSTRUCTIONS | SHARED_KERNELS


@pytest.mark.parametrize(
    "path, text",
    [
        ("host/flash.py", 'RATES = {"simt": 1.0}'),
        ("host/flash.py", 'if unit.name == "wgmma":\n    pass'),
        ("host/flash.py", "from fa_numba.tiling.wgmma import GROUP_ROWS"),
        ("commands/plan.py", 'help = "simt: CUDA cores"'),
        ("emulator/run.py", 'if plan.unit == "mma":\n    pass'),
    ],
)
def test_the_scan_finds_a_unit(path, text):
    assert list(named(path, text))
