"""Imports go down only; what is compared with the kernels imports none of them."""

import ast
import functools
import itertools
import re
from pathlib import Path

import pytest
import remembered

ROOT = Path(__file__).resolve().parents[2]

# A room may import the rooms of the lines above its own, and itself.
FLOORS = (
    ("emulator", "masks", "dtypes", "integers", "checks", "typing"),
    ("mods",),
    ("device", "problem"),
    ("intrinsics", "options"),
    ("tiling", "dropout"),
    ("algorithms", "scores", "io_model"),
    ("reference",),
    ("parts",),
    ("kernels",),
    ("choices",),
    ("host",),
    ("ops", "kv_cache", "quantization", "bounds"),
    ("environment",),
    ("fa_numba",),
    ("ring",),
    ("torch", "commands"),
    ("__main__",),
    ("experiments",),
)
# What tests set against the kernels reaches none of these rooms, not through others either.
APART = ("algorithms", "scores", "reference", "io_model")
# The model judges the kernels, so that it takes nothing of what they are built from.
MODEL_ROOMS = {"checks", "io_model", "dtypes", "integers", "problem"}
KERNEL_ROOMS = ("kernels", "parts", "intrinsics")
# Folders of experiments. A folder may import the folders before its own, and itself.
EXPERIMENTS = ("lab.record", "lab.measure", "lab.show", "lab.run", "beside", "", "verdicts")
EXPERIMENTS += ("tutorials", "__main__")
# What experiments take of the library.
PUBLIC = {"fa_numba", "algorithms", "bounds", "choices", "commands", "device", "emulator"}
PUBLIC |= {"io_model", "ops", "problem", "reference", "ring", "tiling", "torch", "typing"}
# A bandwidth is measured by kernels of its own, of the widest accesses; a precision is a series.
PUBLIC |= {"intrinsics", "dtypes"}
# The rooms that name numba.cuda; the others take it from device.
CUDA = {"device", "emulator", "intrinsics"}


def dotted(path):
    """The module's name of a file of the project."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {dotted(p): p for top in ("fa_numba", "experiments") for p in (ROOT / top).rglob("*.py")}


def room(module):
    """fa_numba/<room>, the file at the top or the folder; fa_numba itself; experiments."""
    top, *rest = module.split(".")
    return rest[0] if top == "fa_numba" and rest else top


def statements(tree, with_types):
    """All statements of a module, those under ``if TYPE_CHECKING`` only ``with_types``."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.expr):  # nothing is imported there
            continue
        test = getattr(node, "test", None)
        guarded = "TYPE_CHECKING" in (getattr(test, "id", ""), getattr(test, "attr", ""))
        if with_types or not guarded:
            yield node
            yield from statements(node, with_types)


def imported(module, text, is_package=False, with_types=True):
    """The full names that a module imports: of a module, or of a name in one."""
    return imported_in(ast.parse(text), module, is_package, with_types)


def imported_in(tree, module, is_package, with_types):
    """As `imported`, of a module's syntax tree."""
    package = module if is_package else module.rpartition(".")[0]
    for node in statements(tree, with_types):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            for alias in node.names:
                name = f"{base}.{alias.name}"
                # A name that is no module is taken from ``base``, which may hand on what is below.
                yield name if name in MODULES or base not in MODULES else base


def imports(module, with_types=True):
    """Those of a file of the project."""
    return imports_of(module)[with_types]


@functools.cache
def imports_of(module):
    """Those without the statements under ``if TYPE_CHECKING``, and all, of a file parsed once."""
    path = MODULES[module]
    tree, is_package = ast.parse(path.read_text()), path.name == "__init__.py"
    return [tuple(imported_in(tree, module, is_package, types)) for types in (False, True)]


def edges(with_types=True):
    """(module, what it imports) within the project."""
    for module in MODULES:
        yield from ((module, name) for name in imports(module, with_types) if name in MODULES)


def upward(pairs):
    """The pairs whose import does not go down."""
    floor = {name: level for level, names in enumerate(FLOORS) for name in names}
    return [
        (module, name)
        for module, name in pairs
        if room(module) != room(name) and floor[room(name)] >= floor[room(module)]
    ]


def test_every_room_has_its_floor():
    known = set(itertools.chain.from_iterable(FLOORS))
    assert {room(module) for module in MODULES} <= known
    assert len(known) == sum(map(len, FLOORS))


def test_imports_go_down():
    assert upward(edges()) == []


def test_stored_results_are_of_one_state_of_all_that_computes_them():
    found, left = set(), [*remembered.COMPUTING]
    while left:
        name = left.pop()
        if name not in found and name != "fa_numba":
            found.add(name)
            left += [x for x in imports(name) if x in MODULES]
    folders = {room(name) for name in found if (ROOT / "fa_numba" / room(name)).is_dir()}
    assert {"fa_numba.masks", "fa_numba.dropout", "fa_numba.mods.evaluating"} <= found
    assert folders == {*remembered.FOLDERS}


def page_of_architecture():
    """The part of the page that says who imports whom."""
    page = (ROOT / "fa_numba" / "architecture.md").read_text()
    return page.partition("## Who imports whom\n")[2].partition("\n## ")[0]


def test_the_page_has_the_floors():
    files = {m.removeprefix("fa_numba."): p.name != "__init__.py" for m, p in MODULES.items()}
    named = {"fa_numba": "`__init__.py`", "__main__": "`__main__.py`"}
    lines = [
        ", ".join(named.get(x, f"{x}.py" if files.get(x) else x) for x in names)
        for names in reversed(FLOORS)
    ]
    shown = re.findall(r"^\| (\d+) \| (.+) \|$", page_of_architecture(), re.M)
    want = [(str(n), set(line.split(", "))) for n, line in enumerate(lines, 1)]
    assert [(n, set(line.split(", "))) for n, line in shown] == want


def test_the_page_has_what_experiments_import():
    (line,) = re.findall(
        r"^- Experiments import only(.*?)\.\n", page_of_architecture(), re.M | re.S
    )
    assert set(re.findall(r"`(\w+)`", line)) == PUBLIC - {"fa_numba"}


@pytest.mark.parametrize(
    "module, text",
    [
        ("fa_numba.reference", "from fa_numba.kernels.simt import fa1_forward"),
        ("fa_numba.parts.grid", "def f():\n    from ..kernels import simt"),
        ("fa_numba.io_model", "from .parts.grid import make_query_rows"),
        ("fa_numba.device.memory", "import fa_numba.host.arrays"),
        ("fa_numba.host.plans", "if TYPE_CHECKING:\n    from fa_numba import ops"),
        ("fa_numba.ops", "import experiments.speed"),
    ],
)
def test_an_import_that_goes_up_is_found(module, text):
    assert upward((module, name) for name in imported(module, text) if name in MODULES)


def between_units(pairs):
    """The pairs in which a part imports from the folder of a unit, and lies outside this folder."""
    folders = {path.name for path in (ROOT / "fa_numba" / "kernels").iterdir() if path.is_dir()}
    of_units = [f"fa_numba.parts.{name}" for name in folders]
    return [
        (module, name)
        for module, name in pairs
        for own in of_units
        if room(module) == "parts" and name.startswith(own) and not module.startswith(own)
    ]


def test_no_part_imports_from_the_folder_of_another_unit():
    assert between_units(edges()) == []
    found = imported("fa_numba.parts.wgmma.load", "from fa_numba.parts.mma.load import make_rows")
    assert between_units(("fa_numba.parts.wgmma.load", name) for name in found)


@pytest.mark.parametrize("start", APART)
def test_what_is_compared_with_the_kernels_reaches_none(start):
    todo = [module for module in MODULES if room(module) == start]
    reached = set(todo)
    while todo:
        new = (MODULES.keys() & imports(todo.pop())) - reached
        reached |= new
        todo += new
    assert {room(module) for module in reached} & set(KERNEL_ROOMS) == set()


def test_the_model_shares_no_rule_with_the_kernels():
    assert {room(name) for module, name in edges() if room(module) == "io_model"} == MODEL_ROOMS


def test_experiments_take_public_rooms():
    taken = {(m, n) for m, n in edges() if room(m) == "experiments" != room(n)}
    assert taken
    assert {(m, n) for m, n in taken if room(n) not in PUBLIC} == set()


def users(folder):
    """Module of a folder of experiments -> those outside the folder that reach it, tests apart."""
    inside = {m for m in MODULES if m.startswith(f"experiments.{folder}.")}
    found = {}
    for start in MODULES:
        if start in inside or not start.startswith("experiments.") or ".lab." in start:
            continue
        todo = [*MODULES.keys() & imports(start)]
        while todo:
            name = todo.pop()
            if name in inside and start not in found.setdefault(name, set()):
                found[name].add(start)
                todo += MODULES.keys() & imports(name)
    return inside, found


def test_what_stands_beside_serves_one_experiment():
    inside, found = users("beside")
    inside.discard("experiments.beside")
    assert inside == set(found)
    # Commands show what experiments have, verdicts read what they count.
    others = ("experiments.__main__", "experiments.verdicts")
    serves = {m: [x for x in u if not x.startswith(others)] for m, u in found.items()}
    assert {m: u for m, u in serves.items() if len(u) > 1} == {}


def test_what_experiments_share_imports_none_of_them():
    shared = {(m, n) for m, n in edges() if m.startswith("experiments.lab")}
    beyond = {n for _, n in shared if n.startswith("experiments.") and ".lab" not in n}
    assert beyond == set() and len(shared) > 100


def folder_of_experiments(module):
    """Return the entry of EXPERIMENTS that a module belongs to; None for packages of packages."""
    inner = f"{module.removeprefix('experiments').removeprefix('.')}."
    if inner == "lab.":
        return None
    return next((x for x in EXPERIMENTS if x and inner.startswith(f"{x}.")), "")


def upward_in_experiments(pairs):
    """Return the pairs of modules of experiments whose import does not go down."""
    inside = [(m, n) for m, n in pairs if room(m) == room(n) == "experiments"]
    floors = [tuple(map(folder_of_experiments, pair)) for pair in inside]
    level = {name: n for n, name in enumerate(EXPERIMENTS)}
    return [
        pair
        for pair, (own, other) in zip(inside, floors, strict=True)
        if own != other and level[own] <= level[other]
    ]


def in_circles(pairs):
    """Return the modules on a circle of imports, and those on the way between two circles."""
    left = {name for pair in pairs for name in pair}
    while True:
        inside = [(m, n) for m, n in pairs if m != n and {m, n} <= left]
        between = {m for m, _ in inside} & {n for _, n in inside}
        if between == left:
            return left
        left = between


def test_folders_of_experiments_import_in_one_direction():
    found = {folder_of_experiments(m) for m in MODULES if room(m) == "experiments"}
    assert found - {None} == set(EXPERIMENTS)
    assert upward_in_experiments(edges()) == []
    inside = [(m, n) for m, n in edges(with_types=False) if room(m) == room(n) == "experiments"]
    assert in_circles(inside) == set()


@pytest.mark.parametrize(
    "module, text",
    [
        ("experiments.lab.record.store", "def f():\n    from ..measure import peers"),
        ("experiments.lab.record.registry", "import experiments"),
        ("experiments.lab.measure.scaling", "from ..show import style"),
        ("experiments.lab.show.report", "from ..run.runner import Runner"),
        ("experiments.beside.explore_panels", "def f():\n    from experiments import explore"),
        ("experiments.explore", "if TYPE_CHECKING:\n    from .verdicts import rule"),
    ],
)
def test_an_import_that_closes_a_circle_of_experiments_is_found(module, text):
    found = [(module, name) for name in imported(module, text) if name in MODULES]
    assert upward_in_experiments(found) == found != []


def test_modules_in_a_circle_are_found():
    pairs = [("a", "b"), ("b", "c"), ("c", "a"), ("c", "d"), ("e", "a"), ("a", "a")]
    assert in_circles(pairs) == {"a", "b", "c"} and in_circles([("a", "a"), ("a", "b")]) == set()


def test_numba_cuda_has_one_door():
    naming = {
        room(module)
        for module in MODULES
        for name in imports(module)
        if f"{name}.".startswith("numba.cuda.")
        and not module.startswith("experiments.tutorials")  # kernels of the reader
    }
    assert naming == CUDA


@pytest.mark.parametrize("folder", ["emulator", "device", "intrinsics", "choices", "host"])
def test_files_of_a_room_import_in_one_direction(folder):
    package = f"fa_numba.{folder}"
    inside = [(m, n) for m, n in edges(with_types=False) if room(m) == room(n) == folder]
    assert in_circles([pair for pair in inside if package not in pair]) == set()


def test_every_folder_is_a_package_that_the_wheel_takes():
    folders = {path.parent for path in MODULES.values()}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").exists()] == []
