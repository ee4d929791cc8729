"""Random planted faults in host code: python tests/random_faults.py COMMIT [--folder FOLDER]

The commit's hash is the seed of the draw. The command draws 60 faults of `mutants` at random over
the packages in AREAS. Each fault is planted alone, in the memory of a process of its own. Tests run
in this process until a test fails. The command prints which test noticed each fault, and lists the
survivors at the end. A survivor needs a test that notices it, or a row with a proof in
`survivors.csv`.

The command first records a map: which tests run which blocks of statements of AREAS. The tests in
COSTLY are not in the map. A fault is then tried as follows:

- Kernel code: the test calls of `mutant_cases` run, as `test_mutants` tries a fault.
- Other code: the tests that run the changed block run, the cheapest tests first, for at most
  LONGEST seconds. Tests in files that name the changed function come first. Of any other
  parametrized test, the first case runs before the other cases.

FOLDER keeps the map. A second draw records only the test files that have changed.

A test that fails for another reason than the fault would hide a survivor. The tests that ran
until a test failed therefore run once more, with the changed function compiled from its unchanged
text. If the test fails then too, the command names the test, and the other tests try the fault.

With the word `survivors` in the place of COMMIT, the command tries the faults in host code that
`survivors.csv` lists without a proof.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import contextlib
import functools
import hashlib
import importlib
import itertools
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
AREAS = (
    *("fa_numba.mods", "fa_numba.choices", "fa_numba.host", "fa_numba.device"),
    *("fa_numba.parts.visits", "fa_numba.parts.wgmma.scheduler", "experiments.lab.record"),
)
# Tests that take long and that compile or emulate kernels rather than host code.
COSTLY = (
    *("tests/test_mutants.py", "tests/emulator", "tests/intrinsics", "tests/kernels/test_wg"),
    *(
        f"tests/kernels/test_{name}.py"
        for name in (
            *("compile", "cards", "language", "twins", "calls", "checks", "mma", "mma_swizzle"),
            *("every_option", "random_calls", "random_functions", "passes", "scales"),
            *("swizzle", "value_dim", "precision", "dropout"),
        )
    ),
)
# Of the experiments' tests only these are in the map.
RECORDS = (
    *("dictionary", "experiments", "kept", "load", "origins", "recording", "store", "verdicts"),
)
LONGEST = 40  # CPU seconds of the tests that try a fault
# Environment variables: the folder for the map, or the file of the faults to try.
MAP, FAULTS = "RANDOM_FAULTS_MAP", "RANDOM_FAULTS"


# --- plugins of pytest --------------------------------------------------------------------------
# pytest imports this file before it imports the tests' modules. `mutants` is therefore imported in
# the functions that use it.


class Recorder:
    """Records the blocks of statements in AREAS that each test runs."""

    def __init__(self, folder):
        self.file = Path(folder) / f"{os.getpid()}.jsonl"
        self.blocks = set()

    @pytest.hookimpl
    def pytest_collection_finish(self):
        import mutants

        builtins.executed = self.blocks.add
        self.planted = contextlib.ExitStack()
        for name in mutants.modules_of(*AREAS):
            if not name.startswith("fa_numba.parts"):  # whose code is not what Python runs
                importlib.import_module(name)
                self.planted.enter_context(mutants._of_text(name, telling(name)))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        self.blocks.clear()
        begin = time.process_time()
        try:
            return (yield)
        finally:
            row = {"test": item.nodeid, "seconds": time.process_time() - begin, "blocks": {}}
            for name, block in sorted(self.blocks):
                row["blocks"].setdefault(name, []).append(block)
            with self.file.open("a") as file:
                file.write(json.dumps(row) + "\n")


def telling(name):
    """Return a module's tree whose blocks of statements say when they run."""
    import mutants

    file = os.path.relpath(mutants.file_of(name), ROOT)
    tree = ast.parse(mutants.source(name))
    for block, body in [*_blocks(tree)]:
        place = ast.Constant((file, block))
        tell = ast.Expr(ast.Call(ast.Name("executed", ast.Load()), [place], []))
        body.insert(0, ast.copy_location(tell, body[0]))
    return ast.fix_missing_locations(tree)


def _blocks(node, function=""):
    """Yield the lists of statements in functions, each with a name.

    The name is the function's, with the number of the list in the function. A map is therefore
    right as long as the statements of a function stay in the same order.
    """
    names = itertools.count()
    left = [node]
    while left:
        node = left.pop()
        for name in ("body", "orelse", "finalbody") if function else ():
            inner = getattr(node, name, None)
            if isinstance(inner, list) and inner and isinstance(inner[0], ast.stmt):
                yield f"{function}#{next(names)}", inner
        for each in ast.iter_child_nodes(node):
            if isinstance(each, (ast.FunctionDef, ast.ClassDef)):
                yield from _blocks(each, f"{function}.{each.name}")
            elif isinstance(each, (ast.stmt, ast.excepthandler)):
                left.append(each)


def block_of(site):
    """Return the name of the innermost block of statements that a fault is in."""
    import mutants

    line = mutants.source(site.module)[: site.span[0]].count("\n") + 1
    found = [
        (body[0].lineno, block)
        for block, body in _blocks(ast.parse(mutants.source(site.module)))
        if body[0].lineno <= line <= body[-1].end_lineno
    ]
    return max(found, default=(0, ""))[1]


class Planter:
    """Tries faults by collected tests, each fault in a process of its own."""

    def __init__(self, file, number):
        self.faults = json.loads(Path(file).read_text())
        self.mine = int(number)

    @pytest.hookimpl
    def pytest_runtestloop(self, session):
        items = {item.nodeid: item for item in session.items}
        sites = {number: site_of(*name) for number, name in self.faults["names"]}
        for number, names in self.faults["tests"][self.mine]:
            chosen = [items[name] for name in names if name in items]
            how, count, failing = _noticed(sites[number], chosen)
            told = {"number": number, "how": how, "tests": count, "failing": failing}
            with open(self.faults["results"], "a") as file:
                file.write(json.dumps(told) + "\n")
            print(f"{number}\t{how}\t{count}\t{_said(sites[number])}", flush=True)
        return True


def _noticed(site, items):
    """Return how a fault is noticed, or None; how many tests ran; which tests fail without it."""
    import mutants

    failing = []
    while True:
        how, _, count = mutants.apart(_tried, mutants.planted, site, items, seconds=600)
        if how in (None, "cannot be planted"):
            return how, count, failing
        # A crash does not say which of the tests has crashed.
        ran = items[: count or None]
        without, *_ = mutants.apart(_tried, mutants.compiled_again, site, ran, seconds=600)
        if without is None:
            return how, count, failing
        failing.append(without)
        left = [x for x in items if x.nodeid != without.removeprefix("TookTooLong ")]
        if len(left) == len(items):  # the process crashes without a fault
            return None, count, failing
        items = left


def _tried(plant, site, items):
    """Return how a test fails where ``plant`` changes a site, or None; and how many tests ran."""
    import mutants
    from _pytest.runner import runtestprotocol

    end, count = time.process_time() + LONGEST, 0
    with tempfile.TemporaryDirectory() as cache, contextlib.ExitStack() as stack:
        os.environ["FA_NUMBA_CACHE"] = cache
        try:
            stack.enter_context(plant(site))
        except AssertionError:
            return "cannot be planted", "", 0
        for count, (item, following) in enumerate(zip(items, (*items[1:], None), strict=False), 1):
            if time.process_time() > end:
                break
            try:
                with mutants.at_most(20):
                    reports = runtestprotocol(item, log=False, nextitem=following)
            except mutants.TookTooLong:
                return f"TookTooLong {item.nodeid}", "", count
            if any(report.failed for report in reports):
                return item.nodeid, "", count
    return None, "", count


def pytest_configure(config):
    if os.environ.get(MAP):
        config.pluginmanager.register(Recorder(os.environ[MAP]), "random-faults-map")
    if os.environ.get(FAULTS):
        plugin = Planter(*os.environ[FAULTS].rsplit(":", 1))
        config.pluginmanager.register(plugin, "random-faults")


def run(arguments, **variables):
    """Run pytest with this file as a plugin; return the process."""
    paths = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "random_faults",
    ]
    environment = os.environ | {"PYTHONPATH": paths} | variables
    return subprocess.Popen([*command, *arguments], cwd=ROOT, env=environment)


# --- the map -----------------------------------------------------------------------------------


@dataclass
class Test:
    """A test, how long it takes and which blocks of which files it runs."""

    name: str
    seconds: float
    blocks: dict

    @property
    def file(self):
        return self.name.partition("::")[0]


def mapped(folder, jobs):
    """Return the tests of the map; test files that have changed are recorded again."""
    kept = folder / "map"
    kept.mkdir(exist_ok=True)
    known = {}
    for path in sorted(kept.glob("*.json"), key=lambda path: path.stat().st_mtime):
        known |= {name: (path, digest) for name, digest in json.loads(path.read_text()).items()}
    files = [path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")]
    files = [name for name in sorted(files) if not name.startswith(COSTLY)]
    of_records = tuple(f"tests/experiments/test_{name}.py" for name in RECORDS)
    files = [x for x in files if "/experiments/" not in x or x in of_records]
    digests = {name: hashlib.sha256((ROOT / name).read_bytes()).hexdigest() for name in files}
    stale = [name for name in files if known.get(name, ("", ""))[1] != digests[name]]
    if stale:
        print(f"recording which blocks {len(stale)} test files run", flush=True)
        fresh = Path(tempfile.mkdtemp(dir=kept))
        told = [f"-n{jobs}", "--tb=no", *stale]
        run(told, **{MAP: str(fresh)}).wait()
        done = kept / f"{fresh.name}.json"
        done.write_text(json.dumps({x: digests[x] for x in stale}))
        known |= {name: (done, digests[name]) for name in stale}
    tests = []
    for path in {path for path, _ in known.values()}:
        for rows in path.with_suffix("").glob("*.jsonl"):
            for row in map(json.loads, rows.read_text().splitlines()):
                test = Test(row["test"], row["seconds"], row["blocks"])
                if known.get(test.file, ("", ""))[0] == path and test.file in digests:
                    tests.append(test)
    return tests


def chosen(site, tests):
    """Return the names of the tests that run the changed block, the cheapest tests first.

    Each parametrized test has one case in turn. All cases in files that name the changed function
    or its class come first, and then the tests of a file with the module's name.
    """
    import mutants

    named = {x: _names(x, site.function.partition(".")[0]) for x in {test.file for test in tests}}
    path = Path(mutants.file_of(site.module)).resolve().relative_to(ROOT).as_posix()
    block = block_of(site)
    found = sorted((x for x in tests if block in x.blocks.get(path, ())), key=lambda x: x.seconds)
    own, turn = Path(path).stem, defaultdict(itertools.count)
    place = {test.name: next(turn[test.name.partition("[")[0]]) for test in found}

    def order(test):
        turn = place[test.name]
        return (
            (0, turn) if named[test.file] else (1, turn > 0, own not in Path(test.file).stem, turn)
        )

    return [test.name for test in sorted(found, key=order)]


@functools.cache
def _names(file, name):
    """Return whether a test's file contains the name of a function or class as a word."""
    return re.search(rf"\b{name}\b", (ROOT / file).read_text()) is not None


# --- the draw ----------------------------------------------------------------------------------


def drawn(seed, count):
    """Return random faults of AREAS."""
    import mutants

    rules = (*mutants.RULES, mutants.forget)
    every = (mutants.sites_of(name, rules) for name in mutants.modules_of(*AREAS))
    return random.Random(seed).sample([*itertools.chain(*every)], count)


def unproved():
    """Return the faults in host code that `survivors.csv` lists without a proof."""
    import test_mutants

    rows = (name for name, row in test_mutants.rows().items() if not row["proof"])
    return [
        site_of(*name)
        for name in rows
        if name[0].startswith(AREAS) and not name[0].startswith("fa_numba.parts")
    ]


def site_of(module, *name):
    """Return a fault by its name, as `test_mutants.named` gives it."""
    import mutants
    import test_mutants

    rules = (*mutants.RULES, mutants.forget)
    of_module = (mutants.sites_of(module, kinds) for kinds in (rules, mutants.RULES))
    return next(
        site for site in itertools.chain(*of_module) if test_mutants.named(site) == (module, *name)
    )


def row_of(site):
    """Return what `survivors.csv` says of a fault, or None."""
    import test_mutants

    row = test_mutants.rows().get(test_mutants.named(site))
    return row and f"listed ({row['proof'] or 'no proof'}): {row['reason']}"


def _said(site):
    return f"{site.name} -> {site.new}"


def main(given=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("commit", help="a commit's hash, the seed of the draw; or 'survivors'")
    parser.add_argument("--count", type=int, default=60, help="the number of faults")
    folder = Path(tempfile.gettempdir()) / "random_faults"
    parser.add_argument("--folder", type=Path, default=folder, help="keeps the map")
    parser.add_argument("--jobs", type=int, default=2, help="processes that run tests")
    parser.add_argument("--only", type=int, nargs="+", help="numbers of the faults to try")
    given = parser.parse_args(given)
    sys.path.insert(0, str(ROOT))  # this checkout's packages, also if another one is installed
    import test_mutants

    listed = given.commit == "survivors"
    sites = dict(enumerate(unproved() if listed else drawn(int(given.commit[:8], 16), given.count)))
    sites = {n: sites[n] for n in given.only or sites}
    given.folder.mkdir(parents=True, exist_ok=True)
    found = {}
    if not listed:
        found = {number: row_of(site) for number, site in sites.items() if row_of(site)}
    for number, how in found.items():
        print(f"{number}\t{how}\t{_said(sites[number])}", flush=True)
    left = [n for n in sites if n not in found]
    of_kernels = [n for n in left if sites[n].module.startswith("fa_numba.parts")]
    others = [n for n in left if n not in of_kernels]
    with tempfile.TemporaryDirectory() as scratch:
        results = Path(scratch) / "results"
        results.touch()
        tests = mapped(given.folder, given.jobs) if others else []
        names = {n: chosen(sites[n], tests) for n in others}
        shares = [[(n, names[n]) for n in others[k :: given.jobs]] for k in range(given.jobs)]
        told = {"tests": shares, "results": str(results)}
        told["names"] = [(n, test_mutants.named(sites[n])) for n in others]
        (Path(scratch) / "faults").write_text(json.dumps(told))
        processes = []
        for k, share in enumerate(shares):
            files = sorted({name.partition("::")[0] for _, of in share for name in of})
            if share:
                processes.append(run(["-n0", "-s", *files], **{FAULTS: f"{scratch}/faults:{k}"}))
        for number in of_kernels:
            how, test, _ = test_mutants.tried(sites[number], shares=12)
            found[number] = how and f"{how} in {test}"
            print(f"{number}\t{found[number]}\t{_said(sites[number])}", flush=True)
        for process in processes:
            process.wait()
        failing = set()
        for row in map(json.loads, results.read_text().splitlines()):
            found[row["number"]] = row["how"]
            failing |= {*row["failing"]}
    print(f"{len(failing)} tests fail without a fault:")
    for name in sorted(failing):
        print(f"  {name}")
    assert found.keys() == sites.keys(), f"not tried: {sites.keys() - found.keys()}"
    survivors = [n for n in sites if found[n] in (None, "cannot be planted")]
    print(f"{len(survivors)} of {len(sites)} faults survive:")
    for number in survivors:
        print(f"  {number}\t{found[number] or ''}\t{_said(sites[number])}")


if __name__ == "__main__":
    main()
