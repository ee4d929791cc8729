"""The files that tell editors and mypy which parts a kernel finds, by .ci/part_names.py."""

import ast
import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def part_names():
    spec = importlib.util.spec_from_file_location("part_names", ROOT / ".ci" / "part_names.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_files_are_up_to_date(part_names, capsys):
    assert part_names.main(["--check"]) == 0, capsys.readouterr().out


def test_each_name_is_the_factory_that_the_kernel_gets(part_names):
    for package in part_names.PACKAGES:
        for node in ast.parse(part_names.stub(package)).body:
            if not isinstance(node, ast.ClassDef):
                continue
            bound = getattr(importlib.import_module(package), node.name)
            for line in node.body:
                (alias,) = line.names
                made = getattr(importlib.import_module(line.module), alias.name)
                assert made is getattr(bound, f"make_{alias.asname}", None) or made is getattr(
                    bound, alias.asname
                )


def test_what_a_module_defines_or_hands_on_is_listed(part_names, tmp_path, monkeypatch):
    (tmp_path / "more_parts.py").write_text(
        "from fa_numba.parts.grid import make_head as make_head\n"
        "from fa_numba.parts.grid import make_row_tile, member\n"
        "def make_new(spec): ...\n"
        "def make_with_more(spec, others): ...\n"
        "make_other = make_new\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    found = part_names.names(importlib.import_module("more_parts"))
    assert found == {
        "head": ("fa_numba.parts.grid", "make_head"),
        "new": ("more_parts", "make_new"),
        "other": ("more_parts", "make_new"),
    }
