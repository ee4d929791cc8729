"""Every cache of the project, what its values depend on, and why its key has all of that.

The file data/caches.csv lists the caches by folder. A cache is a function or property that
`functools` caches, or a dictionary in which code looks before it stores. In `kernels` and `parts`,
every cached function makes a kernel or a part of its arguments, so that these functions need no
row.
"""

import ast
import copy
import csv
import dataclasses
import importlib
import os
import pkgutil
import re
from pathlib import Path

import numpy as np
import pytest
from stand_in_device import no_gpu_but_its_driver, owner_of
from test_choices import plan_of, stored

import experiments
import fa_numba
from experiments.lab.record import code_digest, ran
from fa_numba import bounds
from fa_numba import device as devices
from fa_numba.choices import facts
from fa_numba.choices.requests import Choices
from fa_numba.device import kernel_cache, select
from fa_numba.host import binding, planning

ROOT = Path(fa_numba.__file__).parent.parent
LISTED = ROOT / "tests" / "data" / "caches.csv"
MAKERS = ("fa_numba/kernels/", "fa_numba/parts/", "experiments/tutorials/")
CACHING = ("cache", "lru_cache", "cached_property")


def files(pattern, without=()):
    """Yield names and syntax trees of the files whose text has a pattern."""
    for package in ("fa_numba", "experiments"):
        for path in sorted((ROOT / package).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if not name.startswith(without):
                text = path.read_text()
                if re.search(pattern, text):
                    yield name, ast.parse(text)


# --- every cache is listed --------------------------------------------------------------------


def name_of(node):
    node = node.func if isinstance(node, ast.Call) else node
    return getattr(node, "attr", getattr(node, "id", ""))


def caches_of(tree):
    """Return the caches of a file: functions by name, dictionaries as the code calls them."""
    found, looked, stores = [], set(), set()

    def visit(node, outer, of):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            if any(name_of(each) in CACHING for each in node.decorator_list):
                found.append(f"{outer}{node.name}")
            outer = f"{outer}{node.name}." if isinstance(node, ast.ClassDef) else outer
            of = node.name
        elif isinstance(node, ast.Assign):
            of = ast.unparse(node.targets[0])
        elif isinstance(node, ast.AnnAssign):
            of = ast.unparse(node.target)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Call):
            if name_of(node.func) in CACHING:
                found.append(f"{of}: {ast.unparse(node.args[0])}")
        elif isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.In, ast.NotIn)):
            looked.add(ast.unparse(node.comparators[0]))
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            stores.add(ast.unparse(node.value))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in ("get", "setdefault"):
                looked.add(ast.unparse(node.func.value))
            if node.func.attr == "setdefault":
                stores.add(ast.unparse(node.func.value))
        for each in ast.iter_child_nodes(node):
            visit(each, outer, of)

    visit(tree, "", "")
    return [*found, *(x for x in looked & stores if x.rpartition(".")[2].startswith("_"))]


def rows():
    with open(LISTED, newline="") as file:
        return list(csv.DictReader(file))


def test_every_cache_is_listed():
    # What may be a cache: the word, or something stored in what has a private name.
    pattern = r"\b(cache|lru_cache|cached_property)\b|\b_\w+(\[.*\] \|?= |\.setdefault\()"
    found = {
        (name.rpartition("/")[0], x)
        for name, tree in files(pattern, MAKERS)
        for x in caches_of(tree)
    }
    listed = [(row["folder"], row["cache"]) for row in rows()]
    assert found - set(listed) == set(), f"add a row to {LISTED.name}, with a proof"
    assert set(listed) - found == set(), f"remove the row from {LISTED.name}"
    assert len(set(listed)) == len(listed)


def test_a_new_cache_is_found():
    text = """
@functools.lru_cache(maxsize=2)
def one(x): pass
class A:
    @cached_property
    def two(self): pass
    def __init__(self): self._three = {}
    def get(self, x):
        if x not in self._three:
            self._three[x] = 1
made = lru_cache(maxsize=64)(Course)
def of(x): return _four.get(x)
def keep(x): _four[x] = 2
def once(x): return self._five.setdefault(x, {})
"""
    found = {*caches_of(ast.parse(text))}
    assert found == {"one", "A.two", "self._three", "made: Course", "_four", "self._five"}


def test_every_row_has_a_proof():
    """A test, or a reason."""
    for row in rows():
        assert row["value depends on"]
        first, _, test = row["proof"].partition(": ")
        if first.startswith("tests/"):
            assert f"def {test or 'test_'}" in (ROOT / first).read_text(), row
        elif row["proof"].startswith("test_"):
            assert row["proof"] in globals(), row
        else:
            assert len(row["proof"].split()) >= 4, row


# --- keys -------------------------------------------------------------------------------------

# Fields that two equal keys may have with different values, and why no cached value depends on it.
LEFT_OUT = {
    ("Choices", "_hash"): "computed of the other fields",
    ("Decision", "why"): "words",
    ("Launch", "kernel"): "its factory makes one object for equal arguments; the name is compared",
    ("Mod", "shown"): "words",
    ("Plan", "asked"): "no key",
    ("Plan", "block_mask"): "no key",
    ("Plan", "count"): "no key",
    ("Plan", "decided"): "no key",
    ("Plan", "request"): "no key",
    ("PrefixPlan", "made_by"): "no key",
    ("Row", "run"): "no key",
    ("Source", "node"): "the syntax tree of the code, which is compared",
}
OWN_HASH = {"Choices"}  # and it is that of all fields that are compared


@pytest.fixture(scope="module")
def classes():
    """The dataclasses of both packages that can be keys."""
    found = set()
    for package in (fa_numba, experiments):
        for each in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if "tutorials" in each.name or each.name.endswith(("__main__", "fa_numba.torch")):
                continue
            for value in vars(importlib.import_module(each.name)).values():
                if isinstance(value, type) and dataclasses.is_dataclass(value):
                    found.add(value)
    return {x for x in found if x.__dataclass_params__.eq and x.__dataclass_params__.frozen}


def test_keys_compare_every_field(classes):
    assert {"Request", "Choices", "Problem", "Features", "Tiles"} <= {x.__name__ for x in classes}
    left_out = {
        (owner.__name__, f.name)
        for each in classes
        for owner in filter(dataclasses.is_dataclass, each.__mro__)
        for f in dataclasses.fields(owner)
        if not f.compare and f.name in vars(owner).get("__annotations__", ())
    }
    assert left_out == LEFT_OUT.keys()
    for each in classes:
        for name in ("__eq__", "__hash__"):
            own = getattr(each, name).__code__.co_filename != "<string>"
            assert not own or (name == "__hash__" and each.__name__ in OWN_HASH), each


def inside(value):
    """The dataclasses that a value consists of."""
    if dataclasses.is_dataclass(value):
        yield value
        for f in dataclasses.fields(value):
            yield from inside(getattr(value, f.name))


REQUEST = dataclasses.replace(
    fa_numba.plan(
        (1, 2, 64, 64), (1, 1, 64, 64), tiles=fa_numba.Tiles(32, 32),
        score_mod=lambda score, b, h, i, j: score + 0.5 * j,
    ).asked
)  # fmt: skip


def test_each_field_of_a_request_makes_another_one():
    """Of its choices, problem, tiles and functions too."""

    def key(request):
        return planning.functools._make_key((request,), {}, False)

    parts, count = list(inside(REQUEST)), 0
    assert {type(x).__name__ for x in parts} >= {"Request", "Choices", "Problem", "Tiles", "Mod"}
    for part in parts:
        for f in dataclasses.fields(part):
            if (type(part).__name__, f.name) not in LEFT_OUT:
                before, count = getattr(part, f.name), count + 1
                other, same = copy.deepcopy(REQUEST), copy.deepcopy(REQUEST)
                assert key(other) == key(same)
                (place,) = [x for x, y in zip(inside(other), parts, strict=True) if y is part]
                object.__setattr__(place, f.name, ("another", before))
                assert key(other) != key(same), (type(part).__name__, f.name)
    assert count > 60


def test_the_hash_of_choices_is_that_of_all_fields():
    plain = Choices("fa2", "bwd")
    others = {
        "algorithm": "fa1", "tiles": fa_numba.Tiles(16, 16), "unit": "mma", "query_splits": 2,
        "group_splits": 2, "passes": "fwd",
    }  # fmt: skip
    flags = [f.name for f in dataclasses.fields(Choices) if f.type == "bool"]
    others |= dict.fromkeys(set(flags) - {"return_lse"}, True)
    hashes = [hash(plain), *(hash(dataclasses.replace(plain, **{n: x})) for n, x in others.items())]
    forward = Choices("fa2")
    own = {"return_lse": True, "ablate": ("swizzle",), "kv_splits": 2, "warp_partition": "keys"}
    hashes += [hash(dataclasses.replace(forward, **{n: x})) for n, x in own.items()]
    assert others.keys() | own.keys() == {f.name for f in dataclasses.fields(Choices) if f.compare}
    assert len(set(hashes)) == len(hashes)


def test_equal_code_computes_the_same():
    """Code is a key, of which Python compares what it computes."""
    bodies = ("s + 1", "s + 1.0", "s + True", "s - 1", "t + 1", "f(s)", "g(s)", "s.a",
              "s.b", "s < 1", "s <= 1", "s * 0.0", "s * -0.0")  # fmt: skip
    code = [compile(f"def made(s, t, f, g): return {body}", "x", "exec") for body in bodies]
    found = [each.co_consts[0] for each in code]
    assert len(set(found)) == len(found)


# --- what nobody gives as an argument ---------------------------------------------------------

# What is asked of the current device, of the environment or of a context.
AMBIENT = {
    "are_spills_allowed", "compute_capability", "current_context", "current_ordinal", "environ",
    "getenv", "limits", "multiprocessors", "on_gpu", "planned_for_gpu", "planned_limits",
    "shared_bytes_limit",
}  # fmt: skip
# Code that cached functions run: kernels, parts, choices, plans.
BEHIND = (
    *("kernels/", "parts/", "intrinsics/", "tiling/", "choices/", "io_model/", "mods/"),
    *("host/planning.py", "host/flash.py", "host/standard.py", "host/sinks.py", "host/plans.py"),
    *("options.py", "problem.py", "scores.py", "masks.py", "dtypes.py", "checks.py"),
)
# Who may, as no cached function calls it.
MAY_ASK = {
    ("fa_numba/choices/requests.py", "Request.here"),
}


def asking(tree):
    """Return the functions in which something of `AMBIENT` is called or read."""
    found = set()

    def visit(node, function):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            function = f"{function}.{node.name}" if function else node.name
        if isinstance(node, ast.Call) and name_of(node) in AMBIENT:
            found.add(function)
        if isinstance(node, ast.Attribute) and node.attr == "environ":
            found.add(function)
        for each in ast.iter_child_nodes(node):
            visit(each, function)

    visit(tree, "")
    return found


def test_no_cached_function_asks_for_the_current_device():
    found = {
        (name, function)
        for name, tree in files(rf"\b({'|'.join(AMBIENT)})\b(\(|\.)")
        if name.removeprefix("fa_numba/").startswith(BEHIND)
        for function in asking(tree)
    }
    assert found == MAY_ASK


ELSEWHERE = {
    "another GPU": lambda: devices.planning_for((7, 5), 64 * 1024, 40),
    "the emulator": lambda: devices.using("emulator"),
    "where spills are allowed": facts.spills_allowed,
}


def launched(plan):
    launches = [(x.kernel.name, x.grid, x.arguments) for x in plan.launches]
    return plan.unit, plan.tiles, plan.decided, launches, plan.workspace, str(plan.why)


@pytest.mark.parametrize("where", ELSEWHERE)
def test_a_plan_depends_on_its_request_alone(where):
    """It is the same wherever it is made."""
    rows = [row for row in stored() if not row["refused"]]
    emulated = [row for row in rows if not row["gpu"]]
    asked = [plan_of(row).asked for row in (*rows[::30], *emulated[:3])]
    assert {request.multiprocessors for request in asked} >= {0, 132}
    for request in asked:
        wanted = planning.planned(request)
        with ELSEWHERE[where]():
            assert launched(planning.planned.__wrapped__(request)) == launched(wanted)


def test_a_request_says_where_it_was_made():
    def asked():
        return fa_numba.plan((1, 1, 64, 64), (1, 1, 64, 64)).asked

    found = [asked()]
    for name in ("T4", "A100", "RTX 4090", "H100", "H200"):
        with bounds.DEVICES[name].planning():
            found.append(asked())
    with facts.spills_allowed():
        found.append(asked())
    assert len(set(found)) >= len(found) - 1  # an H100 has an H200's limits


# --- GPUs -------------------------------------------------------------------------------------


def test_a_small_array_is_kept_by_all_that_it_is():
    """By its GPU, bytes, dtype and shape."""
    array = np.arange(6, dtype=np.int32)
    others = [array + 1, array.view(np.float32), array.reshape(2, 3), array[:5]]
    with no_gpu_but_its_driver((9, 0), (9, 0)):
        found = []
        for ordinal in (0, 1):
            with devices.on_device(ordinal):
                found += map(binding.sent, (array, *others))
                assert binding.sent(array.copy()) is found[-1 - len(others)]
                assert {owner_of(x.pointer) for x in found[-1 - len(others) :]} == {ordinal}
    assert len({x.pointer for x in found}) == len(found)
    assert [x.shape for x in found[:5]] == [x.shape for x in (array, *others)]


def test_a_gpu_has_its_own_limits_and_arrays():
    with no_gpu_but_its_driver((9, 0), (8, 0)):
        assert [select.limits_of(n).capability for n in (0, 1, 0)] == [(9, 0), (8, 0), (9, 0)]
        with devices.on_device(1):
            assert devices.compute_capability() == (8, 0)
    pool = devices.memory.pool.__wrapped__.__code__
    assert pool.co_varnames[: pool.co_argcount] == ("ordinal",)


def test_a_folder_has_its_own_store(tmp_path):
    stores = [kernel_cache._store(tmp_path / name) for name in ("one", "other", "one")]
    assert stores[0] is stores[2] is not stores[1]


# --- recordings -------------------------------------------------------------------------------


def test_a_changed_file_has_another_digest(tmp_path):
    path = tmp_path / "one.py"
    found = []
    for text, time in (("x = 1", 0), ("x = 2", 1), ("x = 10", 1)):  # of one time, another size
        path.write_text(text)
        os.utime(path, ns=(time, time))
        found.append(code_digest.of_files([path], tmp_path))
    path.rename(tmp_path / "other.py")
    found.append(code_digest.of_files([tmp_path / "other.py"], tmp_path))
    assert len(set(found)) == len(found)


def test_each_field_of_a_request_is_in_its_text():
    """By which a recording finds what it launched."""
    request = dataclasses.replace(REQUEST, problem=dataclasses.replace(
        REQUEST.problem, score_mod=None))  # fmt: skip
    texts = [ran._text(request)]
    for part in inside(request):
        for f in dataclasses.fields(part):
            if f.init and (type(part).__name__, f.name) not in LEFT_OUT:
                other = copy.deepcopy(request)
                places = zip(inside(other), inside(request), strict=True)
                (place,) = [x for x, y in places if y is part]
                object.__setattr__(place, f.name, ("another", f.name))
                texts.append(ran._text(other))
    assert len(texts) > 50 and len(set(texts)) == len(texts)
