"""Whether the kernels that the tests compile have the PTX that they had at another revision.

    python tests/compare_ptx.py BASE [PYTEST OPTIONS]     (make ptx BASE=revision)

Runs the tests of both trees that call a module's ``compiled(kernel, arch)``, the slow ones too,
with a stand-in for it that compiles to PTX and writes this down. Names are left out of the
comparison: of the kernel, its module, its parameters and its registers. Exits with 1 where a
kernel's PTX is not that of BASE. What was compiled for a commit is kept in ``build/ptx``.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KEPT = ROOT / "build" / "ptx"
FOLDER = "FA_NUMBA_PTX"  # names the folder that a run of pytest writes to
# What the tests that call ``compiled`` ask of the assembler's log, so that they go on.
LOG = (
    "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads "
    "Used 1 registers used 6 barriers"
)


def pytest_collection_modifyitems(items):
    """The hook that pytest calls: this file is its plugin in both trees."""
    if FOLDER not in os.environ:
        return
    needed = {"compiled", "CAPABILITY"}
    items[:] = [item for item in items if needed <= set(dir(getattr(item, "module", None)))]
    for module in {item.module for item in items}:
        module.compiled = _recorder(module)


def ptx_of(kernel, capability):
    from numba import cuda

    options = {"device": False, "abi": "numba", "output": "ptx"}
    options["launch_bounds"] = kernel.threads, kernel.min_blocks
    ptx, _ = cuda.compile(kernel.function, kernel.signature, cc=capability, **options)
    return ptx


def _recorder(module):
    try:
        from fa_numba.device.front_end import without_repeats as front_end
    except ImportError:  # a revision without it
        front_end = contextlib.nullcontext
    file = Path(os.environ[FOLDER]) / f"{os.getpid()}.jsonl"

    def compiled(kernel, arch):
        with front_end():
            ptx = ptx_of(kernel, module.CAPABILITY[arch])
        test = os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0].rpartition("::")[2]
        row = {"test": test, "kernel": kernel.name, "arch": arch, "ptx": without_names(ptx)}
        with open(file, "a") as out:
            print(json.dumps(row), file=out)
        return ptx, LOG

    return compiled


def without_names(ptx: str) -> str:
    """The PTX with mangled names and registers numbered in the order of their first use."""
    numbers: dict[str, str] = {}
    used: Counter[str] = Counter()

    def number(name: re.Match) -> str:
        kind = name[1] or "name"
        if name[0] not in numbers:
            numbers[name[0]] = f"{kind}{used[kind]}"
            used[kind] += 1
        return numbers[name[0]]

    lines = (line for line in ptx.splitlines() if not line.startswith("//"))
    return re.sub(r"(%[a-z]+)\d+\b|\b_Z\w+?(?=(?:_param_\d+)?\b)", number, "\n".join(lines))


def recorded(tree: Path, options: list[str]) -> list[dict]:
    """What the tests in ``tree`` compile."""
    with tempfile.TemporaryDirectory() as folder:
        before = [part for part in (os.environ.get("PYTHONPATH"),) if part]
        path = os.pathsep.join((str(tree), str(ROOT / "tests"), *before))
        environment = os.environ | {FOLDER: folder, "PYTHONPATH": path}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "compare_ptx", "-n", "auto"]
        command += ["-m", "slow or not slow", "--tb", "no", "--no-header", "-p", "no:cacheprovider"]
        command += ["--continue-on-collection-errors", *options, "tests"]
        # Some of these tests fail, for what they ask of machine code that is not made here.
        with open(Path(folder) / "output", "w") as output:
            subprocess.run(command, cwd=tree, env=environment, stdout=output, check=False)
        texts = [file.read_text() for file in Path(folder).glob("*.jsonl")]
        rows = [json.loads(line) for text in texts for line in text.splitlines()]
        if not rows:
            sys.exit(f"{tree}: no kernel was compiled\n{(Path(folder) / 'output').read_text()}")
    return sorted(rows, key=lambda row: (row["test"], row["kernel"], row["arch"], row["ptx"]))


def at(revision: str, options: list[str]) -> list[dict]:
    """The same at a revision, kept for its commit; or in a folder that holds another tree."""

    def git(*words: str) -> str:
        command = ["git", *words]
        return subprocess.run(
            command, cwd=ROOT, check=True, text=True, capture_output=True
        ).stdout.strip()

    if (Path(revision) / "fa_numba").is_dir():
        return recorded(Path(revision).resolve(), options)
    commit = git("rev-parse", "--verify", f"{revision}^{{commit}}")
    kept = KEPT / f"{commit}.json"
    if kept.exists() and not options:
        return json.loads(kept.read_text())
    with tempfile.TemporaryDirectory() as folder:
        git("worktree", "add", "--detach", folder, commit)
        try:
            rows = recorded(Path(folder), options)
        finally:
            git("worktree", "remove", "--force", folder)
    if not options:
        KEPT.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(rows))
    return rows


def by_kernel(rows: list[dict]) -> dict[tuple[str, str], dict[str, str]]:
    """(kernel, arch) -> PTX -> a test that compiles it."""
    found: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)
    for row in rows:
        found[row["kernel"], row["arch"]].setdefault(row["ptx"], row["test"])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("base", help="a revision, or a folder with another tree")
    parser.add_argument("--lines", type=int, default=20, help="of a difference that are shown")
    known, options = parser.parse_known_args()
    before, after = by_kernel(at(known.base, options)), by_kernel(recorded(ROOT, options))
    equal = unlike = 0
    for key in sorted(before.keys() | after.keys()):
        gone = {test: ptx for ptx, test in before[key].items() if ptx not in after[key]}
        new = {test: ptx for ptx, test in after[key].items() if ptx not in before[key]}
        equal += len(before[key].keys() & after[key].keys())
        unlike += max(len(gone), len(new))
        for test in sorted(gone.keys() | new.keys()):
            print(f"{key[0]} for {key[1]} differs in {test}")
            old, now = (texts.get(test, "").splitlines() for texts in (gone, new))
            change = list(difflib.unified_diff(old, now, known.base, "now", n=1, lineterm=""))
            print(*change[: known.lines], sep="\n")
            if len(change) > known.lines:
                print(f"... {len(change) - known.lines} lines more")
    print(f"{equal} kernels with equal PTX, {unlike} without")
    return 1 if unlike else 0


if __name__ == "__main__":
    sys.exit(main())
