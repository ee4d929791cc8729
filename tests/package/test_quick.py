"""The choice of tests by .ci/quick.py, for a page, a host module, a kernel part and a test."""

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / ".ci" / "quick.py"


@pytest.fixture(scope="module")
def quick():
    spec = importlib.util.spec_from_file_location("quick", SOURCE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["quick"] = module  # a dataclass looks its module up
    spec.loader.exec_module(module)
    return module


CHANGES = {
    "fa_numba/guide.md": {"tests/test_readme.py", "fa_numba/guide.md"},
    "fa_numba/options.md": {
        "tests/test_readme.py", "tests/test_options_page.py", "fa_numba/options.md",
        "tests/host/test_limits.py",
    },
    "fa_numba/host/binding.py": {
        "tests/host/test_launch_cache.py", "tests/host/test_recorded_launches.py",
        "tests/kernels/test_calls.py", "tests/host/test_limits.py",
        "tests/package/test_caches.py", "tests/host/test_operands.py",
    },
    "fa_numba/parts/wgmma/pipeline.py": {
        "tests/kernels/test_compile.py", "tests/kernels/test_wgmma_emulated.py",
        "tests/kernels/test_wgmma_backward.py",
    },
    "experiments/ring.py": {"tests/experiments/test_ring_experiment.py"},
    "tests/kernels/test_wgmma.py": {"tests/kernels/test_wgmma.py"},
    "tests/data/survivors.csv": set(),
}  # fmt: skip


@pytest.mark.parametrize("path", CHANGES)
def test_a_change_is_tested_by(quick, path):
    choice = quick.chosen([path])
    assert set(choice.reasons) - CHANGES[path] == set(quick.GUARDS)
    assert CHANGES[path] <= set(choice.reasons)
    assert all(which for which in choice.only.values())
    assert not choice.only.keys() & set(quick.GUARDS)


def test_a_test_that_has_changed_runs_with_all_its_cases(quick):
    sample, file = "fa_numba/parts/mma/softmax.py", "tests/kernels/test_calls.py"
    assert file in quick.chosen([sample]).only
    for changed in ([sample, file], [file, sample]):
        choice = quick.chosen(changed)
        assert file in choice.reasons and file not in choice.only


def test_every_module_has_a_test_and_every_named_file_exists(quick):
    assert all((ROOT / file).exists() for file in (*quick.GUARDS, *quick.PAGES_WITH_EXAMPLES))
    for path in quick._modules()[::5]:
        if path.startswith("fa_numba/") and not path.endswith("__init__.py"):
            choice = quick.chosen([path])
            assert set(choice.reasons) - set(quick.GUARDS) or choice.left_out, path


def test_imports_are_those_of_the_syntax_tree(quick):
    """The command finds imports by a regular expression, which is faster than to parse files.

    It also finds the imports of a program that a file contains as a string.
    """
    for path in quick._modules()[::17]:
        found, package, programs = set(), Path(path).parent.parts, ""
        for node in ast.walk(ast.parse((ROOT / path).read_text("utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                programs += node.value
            elif isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                above = package[: len(package) - node.level + 1] if node.level else ()
                base = ".".join([*above, *([node.module] if node.module else [])])
                names = {f"{base}.{alias.name}" for alias in node.names}
                found |= names | {base} if names - quick._names() else names
        imports, found = quick._imports(path), found & quick._names()
        assert found <= imports, path
        assert all(f"import {name}" in programs for name in imports - found), path


def test_the_tests_of_a_sample_exist(quick):
    words = {word for each in quick.SAMPLES.values() for file, which in each
             for word in which.replace("(", " ").replace(")", " ").split()
             if word.startswith("test_")}  # fmt: skip
    files = {file for each in quick.SAMPLES.values() for file, _ in each}
    text = "".join((ROOT / file).read_text() for file in files)
    assert words and all(f"def {word}" in text for word in words)


def test_without_git_the_message_says_what_to_do(quick, monkeypatch):
    monkeypatch.setattr(quick, "_git", lambda *arguments: None)
    with pytest.raises(SystemExit, match="HEAD must be a revision of a git repository; run make t"):
        quick.changed_files()


def test_files_that_git_does_not_know_and_commits_count(quick, monkeypatch, tmp_path):
    monkeypatch.setattr(quick, "ROOT", tmp_path)

    def git(*arguments):
        one = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        subprocess.run(["git", *one, *arguments], cwd=tmp_path, check=True, capture_output=True)

    git("init", "-b", "main")
    for name in ("a.py", "b.py", "c.py"):
        (tmp_path / name).write_text("")
        git("add", name)
    git("commit", "-m", "First")
    git("switch", "-c", "work")
    (tmp_path / "a.py").write_text("1\n")
    git("commit", "-am", "Second")
    (tmp_path / "b.py").write_text("1\n")
    (tmp_path / "d.py").write_text("1\n")
    assert quick.changed_files() == ["a.py", "b.py", "d.py"]
    assert quick.changed_files("HEAD") == ["b.py", "d.py"]
