"""Compiled kernels on disk: what makes one another kernel, and what becomes of bad places."""

import math
import os
import subprocess
import sys
from collections import namedtuple
from dataclasses import fields, replace
from types import ModuleType, SimpleNamespace

import numba.cuda
import numpy as np
import pytest
from numba import types
from stand_in_device import no_gpu_but_its_driver

import fa_numba
from experiments.lab.measure.workloads import one_head
from fa_numba.choices.requests import Choices
from fa_numba.device import Kernel, device_function, kernel_cache, linking
from fa_numba.device import kernel as device_kernel
from fa_numba.device.kernel import built_together
from fa_numba.emulator import compiling
from fa_numba.host import planning
from fa_numba.kernels.mma import fa2_forward
from fa_numba.options import Features
from fa_numba.tiling import MmaSpec, Tiles, select_mma_spec

LIMIT = 227 * 1024
SPEC = select_mma_spec(Tiles(64, 32, 64), 64, LIMIT, MmaSpec, dtype="float16")


def key(spec=SPEC, capability=(9, 0), make=fa2_forward.make_forward, **changes):
    return kernel_cache.key_of(replace(make(spec), **changes), capability)


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setenv(kernel_cache.VARIABLE, str(tmp_path / "kept"))
    return tmp_path / "kept"


def written(kernel):
    """What is read of a kernel once it was written."""
    kernel_cache.write(kernel, (9, 0), b"cubin", "entry")
    return kernel_cache.read(kernel, (9, 0))


def test_a_cubin_comes_back(place):
    kernel = fa2_forward.make_forward(SPEC)
    assert kernel_cache.read(kernel, (9, 0)) is None
    assert written(kernel) == (b"cubin", "entry")
    assert kernel_cache.read(kernel, (8, 0)) is None
    assert b"cubin" in [path.read_bytes() for path in place.rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    "damage",
    [lambda kept: kept[:-1], lambda kept: kept[:-1] + b"\xff", lambda kept: b"", lambda kept: b"x"],
    ids=["cut", "other", "empty", "short"],
)
def test_what_is_damaged_is_compiled_anew(place, damage):
    kernel = fa2_forward.make_forward(SPEC)
    kernel_cache.write(kernel, (9, 0), b"cubin", "entry")
    for path in [path for path in place.rglob("*") if path.is_file()]:
        whole = path.read_bytes()
        if whole:
            path.write_bytes(damage(whole))
            assert kernel_cache.read(kernel, (9, 0)) is None
            assert written(kernel) == (b"cubin", "entry")


def test_what_lacks_a_file_is_compiled_anew(place):
    kernel = fa2_forward.make_forward(SPEC)
    kernel_cache.write(kernel, (9, 0), b"cubin", "entry")
    paths = [x for x in place.rglob("*") if x.is_file() and x.read_bytes()]
    assert len(paths) == 2
    for path in paths:
        path.unlink()
        assert kernel_cache.read(kernel, (9, 0)) is None
        assert written(kernel) == (b"cubin", "entry")


@pytest.mark.parametrize(
    "change",
    [
        {"head_dim": 48},
        {"dtype": "bfloat16"},
        {"aligned": False},
        {"grouped": not SPEC.grouped},
        {"positive_scale": not SPEC.positive_scale},
        {"features": Features(causal=True)},
        {"ablated": ("swizzle",)},
    ],
    ids=str,
)
def test_what_a_kernel_is_made_for_is_in_its_key(change):
    assert key(replace(SPEC, **change)) != key()


# Each field of a kernel with another value; or why the machine code does not depend on it.
OF_KERNEL = {
    "function": fa2_forward.make_forward(replace(SPEC, aligned=False)).function,
    "argument_types": fa2_forward.make_forward(SPEC).argument_types[::-1],
    "threads": 32,
    "min_blocks": 2,
}
NOT_COMPILED = {"shared_bytes": "a number of the launch", "_compiled": "the kernels themselves"}


def test_each_field_of_a_kernel_is_in_its_key():
    assert {f.name for f in fields(Kernel)} == {*OF_KERNEL, *NOT_COMPILED}
    found = [key(), key(capability=(8, 0)), *(key(**{n: x}) for n, x in OF_KERNEL.items())]
    assert len(set(found)) == len(found)
    assert key(shared_bytes=16) == key()


def test_what_compiles_a_kernel_is_in_its_key(monkeypatch):
    kernel = of_function(function_of_text("def made(A):\n    A[0] = 1"))

    def key():
        return kernel_cache.key_of(kernel, (9, 0))

    found = [key()]
    for name in ("NUMBA_OPT", kernel_cache.mlir.VARIABLE):
        monkeypatch.setenv(name, "0")
        found.append(key())
    monkeypatch.setattr(kernel_cache, "_sources", lambda: "other sources")
    found.append(key())
    versions = dict.fromkeys(kernel_cache._COMPILERS, "1")
    monkeypatch.setattr(kernel_cache.metadata, "version", lambda name: versions[name])
    for name in (*versions, None):
        kernel_cache._compilers.cache_clear()
        found.append(key())
        versions[name] = "2"
    from cuda.bindings import driver, nvjitlink, nvvm

    def missing():
        raise OSError("no library")

    for module, name, version in (
        (nvvm, "version", dict),  # which says {}
        (nvvm, "ir_version", dict),
        (nvjitlink, "version", dict),
        (nvjitlink, "version", missing),
        (driver, "cuDriverGetVersion", list),
    ):
        monkeypatch.setattr(module, name, version)
        kernel_cache._compilers.cache_clear()
        found.append(key())
    kernel_cache._compilers.cache_clear()
    assert len(set(found)) == len(found)


def test_the_driver_is_not_in_the_key_if_nvjitlink_links(monkeypatch):
    """A login node without a driver compiles for nodes with a GPU."""
    from cuda.bindings import driver

    before = kernel_cache._compilers()
    monkeypatch.setattr(driver, "cuDriverGetVersion", list)
    kernel_cache._compilers.cache_clear()
    assert kernel_cache._compilers() == before


def test_each_file_of_the_package_is_in_the_key(monkeypatch, tmp_path):
    monkeypatch.setattr(kernel_cache, "PACKAGE", tmp_path)
    texts = {"parts/one.py": "x", "parts/other.py": "y", "one.py": "x"}
    found = []
    for changed in (None, *texts):
        for name, text in texts.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(text + " = 1" * (name == changed))
        found.append(kernel_cache._sources.__wrapped__())
    (tmp_path / "parts/one.py").rename(tmp_path / "parts/renamed.py")
    found.append(kernel_cache._sources.__wrapped__())
    assert len(set(found)) == len(found)


def test_the_names_of_a_records_fields_are_in_the_key():
    """A kernel takes ``options.second`` by the number of the field."""

    def key_of(*names):
        record = types.NamedTuple([types.int32] * len(names), namedtuple("Options", names))
        made = vars(of_function(function_of_text("def made(A):\n    A[0] = 1")))
        return kernel_cache.key_of(SimpleNamespace(**made | {"argument_types": (record,)}), (9, 0))

    found = {key_of("first", "second"), key_of("second", "first"), key_of("first", "third")}
    assert len(found) == 3 and key_of("first", "second") in found


def of_function(function):
    """A kernel, as far as its key and what is kept of it go."""
    return SimpleNamespace(function=function, threads=32, min_blocks=1, argument_types=())


def key_made_with(p, body="A[0] = p.first(A[0]) + A.second"):
    """That of a kernel of this body, made for `p`."""
    scope = {"__name__": "fa_numba.made_up"}
    exec(f"def outer(p):\n    def made(A):\n        {body}\n    return made", scope)
    return kernel_cache.key_of(of_function(scope["outer"](p)), (9, 0))


def function_of_text(text, **names):
    """The function ``made`` of a text with these globals, as if the package contained it."""
    scope = {"__name__": "fa_numba.made_up", **names}
    exec(text, scope)
    return scope["made"]


# Two functions that differ in one thing: the texts, or the globals of one text.
NEXT_TO = {
    "the name of a called function": ("A[0] = math.sin(A[0])", "A[0] = math.cos(A[0])"),
    "the name of an inner function's call": (
        "A[0] = (lambda x: math.sin(x))(A[0])", "A[0] = (lambda x: math.cos(x))(A[0])",
    ),
    "the name of an attribute": ("A[0] = A.size", "A[0] = A.ndim"),
    "a constant": ("A[0] = 1", "A[0] = 2"),
    "the type of a constant": ("A[0] = 1", "A[0] = 1.0"),
    "the sign of zero": ("A[0] = 0.0", "A[0] = -0.0"),
    "an operator": ("A[0] = A[1] + A[2]", "A[0] = A[1] - A[2]"),
    "a comparison": ("A[0] = A[1] < A[2]", "A[0] = A[1] <= A[2]"),
    "the order of arguments": ("A[0] = max(A[1], A[2])", "A[0] = max(A[2], A[1])"),
}  # fmt: skip
OF_GLOBAL = {
    "a number": (1, 2),
    "a number's type": (1, True),
    "a dtype": (types.float32, types.float64),
    "a device function": tuple(
        device_function(function_of_text(f"def made(x):\n    return math.{name}(x)", math=math))
        for name in ("sin", "cos")
    ),
}


@pytest.mark.parametrize("name", NEXT_TO)
def test_functions_that_differ_in_one_thing_have_different_keys(name):
    texts = (f"def made(A):\n    {body}" for body in NEXT_TO[name])
    one, other = (of_function(function_of_text(text, math=math)) for text in texts)
    assert kernel_cache.key_of(one, (9, 0)) != kernel_cache.key_of(other, (9, 0))


@pytest.mark.parametrize(
    "text",
    [
        "def made(A):\n    A[0] = value",
        "def made(A):\n    A[0] = (lambda x: x + value)(A[0])",
        "def made(A, given=value):\n    A[0] = given",
        "def made(A, *, given=value):\n    A[0] = given",
        "def outer(given):\n    def made(A):\n        A[0] = given\n    return made\n"
        "made = outer(value)",
    ],
    ids=["global", "global of an inner function", "default", "default by name", "closure"],
)
@pytest.mark.parametrize("name", OF_GLOBAL)
def test_functions_with_different_values_from_outside_have_different_keys(name, text):
    one, other = (of_function(function_of_text(text, value=x)) for x in OF_GLOBAL[name])
    assert kernel_cache.key_of(one, (9, 0)) != kernel_cache.key_of(other, (9, 0))


def test_kernels_of_different_score_functions_have_different_keys():
    shape, found = (1, 1, 64, 64), set()
    for mod in (lambda s, b, h, i, j: math.sin(s), lambda s, b, h, i, j: math.cos(s)):
        for kernel in fa_numba.plan(shape, shape, score_mod=mod).launched:
            found.add(kernel_cache.key_of(kernel, (9, 0)))
    assert len(found) == 2


def test_code_and_values_count_one_by_one():
    """Kernels that differ in a constant, an operation, a name or a device function's value."""
    bodies = ("A[0] = p + 1", "A[0] = p + 2", "A[0] = p - 1", "A[0] = A.size + p")
    found = [key_made_with(1, body) for body in bodies]
    for value in (2, True, 1.0, np.float32(1), np.float64(1), "1", (1,), (1, (2,)), None):
        found.append(key_made_with(value, bodies[0]))
    assert len(set(found)) == len(found)
    assert key_made_with(1, bodies[0]) == found[0]


class Parts(ModuleType):
    """A namespace of device functions, each made when it is first asked for."""

    def __init__(self, **bodies):
        super().__init__("fa_numba.made_up")
        self.bodies, self.made = bodies, []

    def __getattr__(self, name):
        if name.startswith("_") or name not in self.bodies:
            raise AttributeError(name)
        scope = {"__name__": "fa_numba.made_up"}
        body = self.bodies[name]
        exec(f"def outer(p):\n    def {name}(x):\n        {body}\n    return {name}", scope)
        self.made.append(name)
        setattr(self, name, device_function(scope["outer"](self)))
        return getattr(self, name)


def test_what_a_kernel_takes_from_a_namespace_is_in_its_key():
    bodies = {"first": "return x + 1", "third": "return x"}
    parts = Parts(**bodies)
    found = key_made_with(parts)
    assert parts.made == ["first"], "a part that the kernel does not use was made"
    assert key_made_with(Parts(**bodies)) == found
    assert key_made_with(Parts(**bodies | {"third": "return x * 2"})) == found
    changed = key_made_with(Parts(**bodies | {"first": "return x + 2"}))
    # What the code takes of something else is no part of the kernel.
    assert key_made_with(Parts(**bodies, second="return x")) == found
    other = key_made_with(Parts(**bodies), "A[0] = p.third(A[0]) + A.second")
    inside = key_made_with(parts, "A[0] = (lambda x: p.third(x))(A[0])")
    assert len({found, changed, other, inside}) == 4


def test_parts_of_parts_are_in_the_key():
    bodies = {"first": "return p.second(x)", "second": "return x + 1"}
    body = "A[0] = p.first(A[0])"
    found = {key_made_with(Parts(**bodies), body) for _ in range(2)}
    assert len(found) == 1
    found.add(key_made_with(Parts(**bodies | {"second": "return x + 2"}), body))
    assert len(found) == 2
    # Inside a function of the kernel's own too.
    nested = "A[0] = (lambda x: p.first(x))(A[0])"
    kept, changed = (
        key_made_with(Parts(first="return x", second=f"return {n}"), nested) for n in (1, 2)
    )
    assert kept == changed
    assert key_made_with(Parts(first="return -x"), nested) != kept


def test_a_function_inside_may_take_the_kernels_own_variables():
    """A variable that both use is no value from outside."""
    body = "n = 2; A[0] = (lambda x: p.first(x) * n)(A[0]) + n"
    found = {key_made_with(Parts(first=f"return x + {n}"), body) for n in (1, 2)}
    assert len(found) == 2
    assert key_made_with(Parts(first="return x + 1"), body.replace("n = 2", "n = 3")) not in found


def test_a_namespace_that_holds_what_is_unknown_is_never_kept():
    namespace = ModuleType("fa_numba.made_up")
    namespace.first = [1]
    with pytest.raises(kernel_cache._Unknown):
        key_made_with(namespace, "A[0] = p.first")
    with pytest.raises(kernel_cache._Unknown):
        key_made_with(os, "A[0] = p.first")  # a module that was imported


def test_a_namespace_that_a_kernel_knows_by_another_name_is_never_kept():
    with pytest.raises(kernel_cache._Unknown):
        key_made_with(Parts(first="return x"), "q = p; A[0] = q.first(A[0])")


@pytest.mark.parametrize(
    "value", [object(), [1], {"a": 1}, np.zeros(2), abs], ids=lambda value: type(value).__name__
)
def test_unknown_values_are_never_kept(place, value):
    def function(A):
        A[0] = value

    function.__module__ = "fa_numba.made_up"
    kernel = of_function(function)
    assert written(kernel) is None
    with pytest.raises(kernel_cache._Unknown):
        kernel_cache.key_of(kernel, (9, 0))


def test_kernels_from_elsewhere_are_never_kept(place):
    def function(A):
        A[0] = 1

    assert written(of_function(function)) is None


def test_every_kernel_has_a_key():
    problem = replace(one_head(64, 64, True, "float16"), softcap=1.0, alibi=True, dropout_p=0.5)
    with fa_numba.device.using("emulator"):
        for dtype in ("float32", "bfloat16"):
            for algorithm in ("standard", "fa1", "fa2"):
                at = replace(problem, dtype=dtype)
                choices = [Choices(algorithm, return_lse=True)]
                for exact in (False, algorithm == "fa2"):
                    choices.append(Choices(algorithm, "bwd", deterministic=exact))
                found = [planning.plan_of_attention(at, each) for each in choices]
                for kernel in (kernel for plan in found for kernel in plan.launched):
                    assert len(kernel_cache.key_of(kernel, (9, 0))) == 64


# --- places -----------------------------------------------------------------------------------


def test_where_cubins_are_kept(monkeypatch, tmp_path):
    monkeypatch.setenv(kernel_cache.VARIABLE, "")
    assert kernel_cache.directory() is None
    monkeypatch.delenv(kernel_cache.VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert kernel_cache.directory() == tmp_path / "fa_numba"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert kernel_cache.directory() == tmp_path / ".cache" / "fa_numba"


def test_a_user_without_a_home_keeps_nothing(monkeypatch):
    def home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv(kernel_cache.VARIABLE, raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(kernel_cache.Path, "home", home)
    assert kernel_cache.directory() is None
    assert kernel_cache.read(fa2_forward.make_forward(SPEC), (9, 0)) is None


def test_a_place_that_cannot_be_written_is_no_error(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("not a directory")
    monkeypatch.setenv(kernel_cache.VARIABLE, str(tmp_path / "file" / "kept"))
    assert written(fa2_forward.make_forward(SPEC)) is None


def test_nothing_is_kept_where_that_is_asked_for(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(kernel_cache.VARIABLE, "")
    assert written(fa2_forward.make_forward(SPEC)) is None and not any(tmp_path.iterdir())


MACHINE_CODE = b"\x7fELF .nv.constant0.entry\0"


@pytest.fixture
def compiled(monkeypatch):
    """The kernels and compute capabilities for which Numba and NVVM were called."""
    found = []

    def compiling(kernel, capability):
        found.append((kernel, capability))
        return SimpleNamespace(assembled=lambda: (MACHINE_CODE, "log"))

    monkeypatch.setattr(linking, "compiled", compiling)
    return found


def test_a_kernel_is_compiled_once(place, compiled):
    kernel = fa2_forward.make_forward(SPEC)
    assert kernel.built((9, 0)) == kernel.built((9, 0)) == (MACHINE_CODE, "entry")
    assert built_together([kernel], (9, 0)) == [(MACHINE_CODE, "entry")]
    assert compiled == [(kernel, (9, 0))]


def test_a_plan_compiles_its_kernels_the_largest_first(monkeypatch, place, compiled):
    loaded = {}
    shape = (1, 1, 64, 64)
    with fa_numba.device.using("emulator"):
        planned = fa_numba.plan(shape, shape, algorithm="fa2", dtype="float16", passes="bwd")
        planned.compile()
    assert not compiled
    with no_gpu_but_its_driver():
        monkeypatch.setattr(device_kernel, "built_together", built_together)
        monkeypatch.setattr(
            device_kernel.Kernel,
            "_load",
            lambda self, cubin, name, device: loaded.update({self: (cubin, name, device)}),
        )
        planned.compile()
    assert set(loaded) == set(planned.launched)
    assert set(loaded.values()) == {(MACHINE_CODE, "entry", 0)}
    sizes = [kernel.shared_bytes for kernel, _ in compiled]
    assert len(sizes) == 3 and sizes == sorted(sizes, reverse=True)


# --- loops for the CPU ------------------------------------------------------------------------


def doubled(x):
    return 2 * x


@pytest.mark.parametrize("chosen", [None, "", "kept", "file/none"])
def test_loops_for_the_cpu_follow_the_same_variable(chosen, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "numba"))
    monkeypatch.delenv(kernel_cache.VARIABLE, raising=False)
    if chosen is not None:
        monkeypatch.setenv(kernel_cache.VARIABLE, chosen and str(tmp_path / chosen))
    assert compiling.compiled()(doubled)(21) == 42
    found = {path.relative_to(tmp_path).parts[0] for path in tmp_path.rglob("*.nbi")}
    assert found == {None: {"numba"}, "kept": {"kept"}}.get(chosen, set())
    assert str(tmp_path / "numba") == numba.config.CACHE_DIR


def test_a_place_that_goes_is_no_error(monkeypatch, tmp_path):
    monkeypatch.setenv(kernel_cache.VARIABLE, str(tmp_path / "kept"))
    function = compiling.compiled()(doubled)
    (tmp_path / "kept").rename(tmp_path / "gone")
    (tmp_path / "kept").touch()
    assert function(21) == 42 and not [*tmp_path.rglob("*.nbi")]


def test_another_process_that_can_write_nowhere(tmp_path):
    """It compiles without keeping, and a kernel has the key that it has here."""
    (tmp_path / "file").touch()
    nowhere = str(tmp_path / "file" / "none")
    environment = {**os.environ, "HOME": nowhere, "XDG_CACHE_HOME": nowhere}
    environment.pop(kernel_cache.VARIABLE, None)
    environment["PYTHONHASHSEED"] = "7"  # another order of hashes than here
    # As if the package's folder could not be written either.
    environment["NUMBA_CACHE_LOCATOR_CLASSES"] = "UserWideCacheLocator"
    text = f"""
import os, numpy as np, fa_numba, experiments.beside.lru
from fa_numba.device import kernel_cache
from fa_numba.emulator import checks
from fa_numba.kernels.mma import fa2_forward
from fa_numba.tiling import MmaSpec, Tiles, select_mma_spec
print(checks.outside(np.arange(3), 2, np.ones(3, bool)))
del os.environ["NUMBA_CACHE_LOCATOR_CLASSES"]  # which the key contains
spec = select_mma_spec(Tiles(64, 32, 64), 64, {LIMIT}, MmaSpec, dtype="float16")
print(kernel_cache.key_of(fa2_forward.make_forward(spec), (9, 0)).decode())
"""
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, env=environment
    )
    assert (done.stdout, done.stderr) == (f"2\n{key().decode()}\n", "")


def test_a_folder_has_at_most_so_many_bytes(tmp_path, monkeypatch):
    given = []
    utils = SimpleNamespace(FileStreamProgramCache=lambda *args, **how: given.append((args, how)))
    monkeypatch.setitem(sys.modules, "cuda.core.utils", utils)
    kernel_cache._store.__wrapped__(tmp_path)
    assert given == [((tmp_path,), {"max_size_bytes": kernel_cache.MAX_BYTES})]
