"""Run, in about a minute, the tests for the changed files: make quick, or python .ci/quick.py

Changed files are the files that differ from the merge base of HEAD and `main`, by commits or by
uncommitted changes, and untracked files. On `main` itself, only uncommitted changes and untracked
files count. ``--base REVISION`` (``make quick BASE=REVISION``) names another commit to compare
with. Six rules choose the tests:

1. Four cheap test files always run: the twins, the language of kernels, the layers of imports, and
   the plans (GUARDS).
2. A changed test file runs.
3. For a changed module, the test files that import the module run. If there is none, the modules
   that import the changed module are considered, and the test files that import one of them run;
   and so on upwards. A test file with the module's name, ``test_<module>.py``, always runs. The
   examples in the module's docstrings run, too.
4. Imports do not show which tests are about kernels, parts and intrinsics, because a test calls
   `attention`. The table SAMPLES names a few kernel tests for each folder.
5. For a changed page, ``tests/test_readme.py`` and the page's own examples run.
6. For any other file, the test files that contain the file's name run.

COSTLY lists test files that take too long for this command. Rules 3 and 6 leave these files out,
and the command prints their names. It therefore does not replace ``make test``. It also runs ruff
on the changed Python files.

On two idle cores, the tests for a page take about 12 seconds, for a module of `host` 25 seconds,
and for a module of `parts` 35 seconds.
"""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

GUARDS = (
    "tests/kernels/test_twins.py",
    "tests/kernels/test_language.py",
    "tests/package/test_architecture.py",
    "tests/test_choices.py",
)
# These files try many kernels, or take more than ten CPU seconds each.
COSTLY = ("tests/kernels/*", "tests/experiments/*", "tests/test_mutants.py")
CALLS, COMPILE = "tests/kernels/test_calls.py", "tests/kernels/test_compile.py"
EMULATED = "tests/kernels/test_wgmma_emulated.py"
BACKWARD = "tests/kernels/test_wgmma_backward.py"
SIMT = (
    (CALLS, "(test_a_call or test_all_options) and float32"),
    (COMPILE, "test_a_kernel_compiles_within_its_budgets and (fa1 or fa2) and not dQ"),
)
MMA = (
    (CALLS, "(test_a_call or test_all_options) and float16 and not bfloat16"),
    (COMPILE, "test_an_mma_kernel_compiles"),
)
WGMMA = (
    (EMULATED, "test_results_and_counts or test_slots_are_taken_again"),
    (BACKWARD, "test_a_gradient_of_lse"),
    (COMPILE, "test_a_kernel_of_hoppers_unit or test_fa1_on_hoppers_unit"),
)
# Some calls for each unit.
EACH = (
    (CALLS, "test_a_call and (16 or 37)"),
    (EMULATED, "test_slots_are_taken_again"),
    (COMPILE, "test_a_kernel_compiles_within_its_budgets and (fa1 or fa2) and not bwd"),
)
HOST = ((CALLS, "test_all_options and float32"),)
# Maps a pattern of changed files to test files, each with an expression that selects tests (-k).
SAMPLES = {
    **{f"fa_numba/{folder}/simt/*.py": SIMT for folder in ("kernels", "parts")},
    **{f"fa_numba/{folder}/mma/*.py": MMA for folder in ("kernels", "parts")},
    **{f"fa_numba/{folder}/wgmma/*.py": WGMMA for folder in ("kernels", "parts")},
    **{
        f"fa_numba/{folder}/*.py": EACH
        for folder in ("kernels", "parts", "parts/fragments", "intrinsics", "tiling", "mods")
    },
    "tests/helpers.py": EACH,
    **{f"fa_numba/{name}.py": HOST for name in ("ops", "options", "problem", "dropout", "masks")},
    **{f"fa_numba/{folder}/*.py": HOST for folder in ("host", "choices", "device", "emulator")},
}
PAGES_WITH_EXAMPLES = {
    "README.md", "fa_numba/README.md", "fa_numba/emulator/README.md", "fa_numba/kernels/README.md",
    "fa_numba/guide.md", "fa_numba/options.md", "fa_numba/architecture.md",
}  # fmt: skip
# "from", dots, a module, and names in parentheses or on one line; or "import" and modules.
IMPORT = re.compile(
    r"^[ \t]*(?:from[ \t]+(\.*)([\w.]*)[ \t]+import[ \t]+(\([^)]*\)|[^\n]*)|import[ \t]+([^\n]*))",
    re.M,
)


@dataclass
class Choice:
    """The chosen test files, the reasons for each, and the test files that are left out."""

    reasons: dict[str, list[str]] = field(default_factory=dict)  # by test file
    # By test file of which only some tests run: expressions that select tests (-k).
    only: dict[str, list[str]] = field(default_factory=dict)
    left_out: set[str] = field(default_factory=set)

    def add(self, file: str, reason: str) -> None:
        """Choose all tests of a file."""
        self.only.pop(file, None)
        self._because(file, reason)

    def add_some(self, file: str, which: str, reason: str) -> None:
        """Choose the tests of a file that `which` matches, unless all are chosen."""
        if file not in self.reasons or file in self.only:
            which = f"({which})"
            if which not in self.only.setdefault(file, []):
                self.only[file].append(which)
        self._because(file, reason)

    def _because(self, file: str, reason: str) -> None:
        """Add a reason for a test file, once."""
        if reason not in self.reasons.setdefault(file, []):
            self.reasons[file].append(reason)

    def pytest(self) -> list[str]:
        """Return the arguments of pytest for the chosen tests."""
        each = [
            f"(not {Path(file).name} or {' or '.join(which)})" for file, which in self.only.items()
        ]
        return [*self.reasons, *(["-k", " and ".join(each)] if each else [])]


def chosen(changed: Iterable[str]) -> Choice:
    """Return the choice of tests for changed files.

    The files are given by their paths from the project's root.
    """
    choice = Choice()
    for file in GUARDS:
        choice.add(file, "always")
    for path in changed:
        if not (ROOT / path).exists():
            for file in _naming(Path(path).name):
                _add_unless_costly(choice, file, f"names {path}, which was removed")
            continue
        if _is_test(path):
            choice.add(path, "changed")
        elif path.endswith(".py"):
            _choose_for_module(choice, path)
        elif path.endswith(".md"):
            choice.add("tests/test_readme.py", f"tests the pages, {path} changed")
            if path in PAGES_WITH_EXAMPLES:
                choice.add(path, "its examples")
            if Path(path).name != "README.md":  # a name that many files have
                for file in _naming(Path(path).name):
                    _add_unless_costly(choice, file, f"names {path}")
        else:
            for file in _naming(Path(path).name):
                _add_unless_costly(choice, file, f"names {path}")
        for pattern, samples in SAMPLES.items():
            for file, which in samples if Path(path).match(pattern) else ():
                choice.add_some(file, which, f"a sample, for {pattern}")
    return choice


def _choose_for_module(choice: Choice, path: str) -> None:
    """Choose the tests that import a module, directly or through the nearest modules above it."""
    module = _module_of(path)
    level, seen = {module}, {module}
    while level:
        found = [f for f in _tests() if level & _imports(f)]
        for file in found:
            via = ", ".join(sorted(level & _imports(file)))
            if Path(path).match("experiments/*.py") and level == {module}:
                choice.add(file, f"imports {via}")
            else:
                _add_unless_costly(choice, file, f"imports {via}")
        if found:
            break
        level = {_module_of(f) for f in _modules() if level & _imports(f)} - seen - {"fa_numba"}
        seen |= level
    in_experiments = path.startswith("experiments/")
    for file in _tests():
        alike = Path(file).stem == f"test_{Path(path).stem}"
        if alike and in_experiments == file.startswith("tests/experiments/"):
            choice.add(file, f"has the name of {path}")
    if path.startswith("fa_numba/") and ">>> " in (ROOT / path).read_text("utf-8"):
        choice.add(path, "its examples")


def _add_unless_costly(choice: Choice, file: str, reason: str) -> None:
    """Choose a test file, or note that it is left out because it takes too long."""
    if any(Path(file).match(pattern) for pattern in COSTLY):
        if file not in choice.reasons:
            choice.left_out.add(file)
    else:
        choice.add(file, reason)


def _is_test(path: str) -> bool:
    return path.startswith("tests/") and Path(path).name.startswith("test_") and _is_python(path)


def _is_python(path: str) -> bool:
    return path.endswith(".py")


@cache
def _tests() -> tuple[str, ...]:
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return tuple(file.relative_to(ROOT).as_posix() for file in files)


@cache
def _modules() -> tuple[str, ...]:
    """Return the files that tests can import: of the package, the experiments and the helpers."""
    files = [file for top in ("fa_numba", "experiments") for file in (ROOT / top).rglob("*.py")]
    files += [file for file in (ROOT / "tests").glob("*.py") if not file.stem.startswith("test_")]
    return tuple(file.relative_to(ROOT).as_posix() for file in sorted(files))


def _naming(name: str) -> Iterator[str]:
    """Yield the test files whose text contains a file's name, but not the test of this command."""
    for file in _tests():
        if file != "tests/package/test_quick.py" and name in (ROOT / file).read_text("utf-8"):
            yield file


def _module_of(path: str) -> str:
    """Return the name by which a file is imported. Helpers of tests are imported by their stem."""
    parts = Path(path).with_suffix("").parts
    if parts[0] == "tests":
        return parts[-1]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def _imports(path: str) -> frozenset[str]:
    """Return the modules that a file imports, anywhere in it."""
    known = _names()
    package = Path(path).parent.parts
    found = set()
    for level, base, names, modules in IMPORT.findall((ROOT / path).read_text("utf-8")):
        words = re.findall(r"[\w.*]+", re.sub(r"#.*|\bas\s+\w+", "", names or modules))
        above = package[: len(package) - len(level) + 1] if level else ()
        start = ".".join([*above, *([base] if base else [])])
        for word in words:
            name = f"{start}.{word}" if start else word
            found.add(name if name in known else start)
    return frozenset(found & known)


@cache
def _names() -> frozenset[str]:
    return frozenset(map(_module_of, _modules()))


def changed_files(base: str | None = None) -> list[str]:
    """Return the files that differ from the merge base of HEAD and `base`, or of `main`."""
    for name in [base] if base else ["main", "origin/main", "HEAD"]:
        found = _git("merge-base", "HEAD", name)
        if found is not None:
            break
    else:
        raise SystemExit(
            f"quick: {base or 'HEAD'} must be a revision of a git repository; "
            "run make test instead, or name a revision: make quick BASE=HEAD~1"
        )
    tracked = _git("diff", "--name-only", "-z", found.strip()) or ""
    untracked = _git("ls-files", "-z", "--others", "--exclude-standard") or ""
    return sorted({*tracked.split("\0"), *untracked.split("\0")} - {""})


def _git(*arguments: str) -> str | None:
    """Return the output of a git command; None if it fails or git is not installed."""
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, encoding="utf-8"
        )
    except FileNotFoundError:
        return None
    return done.stdout if done.returncode == 0 else None


def _show(choice: Choice, changed: Collection[str]) -> None:
    """Print the chosen tests with their reasons, and the files that are left out."""
    print(f"{len(changed)} changed files; these tests run:")
    for file, reasons in choice.reasons.items():
        which = f" -k {shlex.quote(' or '.join(choice.only[file]))}" if file in choice.only else ""
        more = f", and {len(reasons) - 1} more reasons" if len(reasons) > 1 else ""
        print(f"  {file}{which}: {reasons[0]}{more}")
    left_out = sorted(choice.left_out - choice.reasons.keys())
    if left_out:
        print(f"left out, because they take long: {', '.join(left_out)}")
    sys.stdout.flush()


def main() -> int:
    """Choose, print and run the checks; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--base", help="compare with the merge base of HEAD and this revision")
    parser.add_argument("--jobs", default="auto", help="processes that run tests")
    parser.add_argument("--list", action="store_true", help="only print what would run")
    given = parser.parse_args()
    changed = changed_files(given.base)
    choice = chosen(changed)
    _show(choice, changed)
    if given.list:
        return 0
    python = [file for file in changed if _is_python(file) and (ROOT / file).exists()]
    commands = [[*command, *python] for command in RUFF if python]
    commands.append(["pytest", "-q", "-n", given.jobs, *choice.pytest()])
    failed = [
        command[0]
        for command in commands
        if subprocess.run([sys.executable, "-m", *command], cwd=ROOT).returncode
    ]
    print("run make test before a release or a merge")
    return 1 if failed else 0


RUFF = (["ruff", "check", "-q"], ["ruff", "format", "-q", "--check"])

if __name__ == "__main__":
    sys.exit(main())
