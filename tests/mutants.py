"""Faults planted by rule: syntax trees of the package's functions, each with one thing changed.

A site is a place in a function where one of `RULES` applies; its mutant is the module's text with
that place changed. `planted` gives the module's functions the mutant's code, wherever they were
imported, and empties the caches that hold what they made. Nothing here names a module, a part or a
kernel: functions are found by walking packages, and which case runs which of them by `reached`.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import faulthandler
import functools
import importlib.util
import itertools
import json
import linecache
import math
import os
import pkgutil
import signal
import sys
import threading
import traceback
import types
import zlib
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from unittest import mock

import pytest
from numba.core.registry import CPUDispatcher

from fa_numba import emulator

# --- the rules -------------------------------------------------------------------------------

NEIGHBOUR = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OTHER = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.LShift: ast.RShift,
    ast.RShift: ast.LShift, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.BitXor: ast.BitOr,
}  # fmt: skip
# Those of ``not`` or the neighbour of an equality alone are the same.
OPPOSITE = (ast.Eq, ast.NotEq, ast.Is, ast.IsNot, ast.In, ast.NotIn)


def drop(node):
    """Drop a call that stands alone, but not its names: a closure has its cells for life."""
    if called(node) and not ast.unparse(node).startswith("super("):
        yield node, ast.Expr(ast.BoolOp(ast.And(), [ast.Constant(False), node.value]))


def compare(node):
    """Exchange a comparison with its neighbour."""
    if isinstance(node, ast.Compare):
        for n, op in enumerate(node.ops):
            ops = [*node.ops[:n], NEIGHBOUR[type(op)](), *node.ops[n + 1 :]]
            yield node, ast.Compare(node.left, ops, node.comparators)


def operate(node):
    """Exchange an arithmetic operator."""
    if isinstance(node, ast.BinOp) and type(node.op) in OTHER:
        yield node, ast.BinOp(node.left, OTHER[type(node.op)](), node.right)
    elif isinstance(node, ast.AugAssign) and type(node.op) in OTHER:
        yield node, ast.AugAssign(node.target, OTHER[type(node.op)](), node.value)


def negate(node):
    """Negate an ``if``."""
    if isinstance(node, (ast.If, ast.IfExp)):
        test = node.test
        if not (isinstance(test, ast.Compare) and isinstance(test.ops[0], OPPOSITE)):
            yield test, ast.UnaryOp(ast.Not(), test)


def forget(node):
    """Leave out an element of a tuple, a condition of several, an argument by its name; not of a
    ``zip`` that it is of one length, which holds as long as nothing is wrong.
    """
    if isinstance(node, ast.Tuple) and isinstance(node.ctx, ast.Load) and len(node.elts) > 2:
        if any(isinstance(each, ast.Slice) for each in node.elts):  # an index cannot be in brackets
            return
        for n in range(len(node.elts)):
            yield node, ast.Tuple([*node.elts[:n], *node.elts[n + 1 :]], node.ctx)
    elif isinstance(node, ast.BoolOp):
        for n in range(len(node.values)):
            left = [*node.values[:n], *node.values[n + 1 :]]
            yield node, left[0] if len(left) == 1 else ast.BoolOp(node.op, left)
    elif isinstance(node, ast.Call):
        named = [n for n, each in enumerate(node.keywords) if each.arg != "strict"]
        for n in named:
            left = [*node.keywords[:n], *node.keywords[n + 1 :]]
            yield node, ast.Call(node.func, node.args, left)


RULES = (drop, compare, operate, negate)


def called(node, *names):
    """Whether a statement is a call, of one of these where any are given, that stands alone."""
    if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        return False
    return not names or ast.unparse(node.value.func).rpartition(".")[2] in names


# --- sites -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Site:
    """A place in a function and what would stand there.

    ``tests`` are the conditions that it stands under within its function, each with the outcome
    that leads there; ``key`` is the function's, as `key_of` gives it; ``node`` is put there.
    """

    module: str
    function: str
    rule: str
    text: str
    node: ast.AST = field(repr=False, compare=False)
    occurrence: int
    span: tuple[int, int] = field(repr=False, compare=False)
    key: tuple = field(repr=False, compare=False)
    tests: tuple = field(default=(), repr=False, compare=False)

    @cached_property
    def new(self):
        """The text that would stand there."""
        several = self.node.body if isinstance(self.node, ast.Module) else [self.node]
        written = "; ".join(map(ast.unparse, several))
        return f"({written})" if isinstance(self.node, ast.expr) else written

    @property
    def name(self):
        """Where it is and what is changed, without line numbers."""
        place = f"{self.module.partition('.')[2]}:{self.function}"
        again = f" #{self.occurrence}" if self.occurrence else ""
        return f"{place} {self.rule} {self.text}{again}"

    @property
    def number(self):
        """Of no order, and the same in every process."""
        return zlib.crc32(self.name.encode())


def key_of(code):
    return code.co_filename, code.co_qualname, code.co_firstlineno


@functools.cache
def file_of(name):
    """A module's, which need not be one that can be imported."""
    return importlib.util.find_spec(name).origin


@functools.cache
def source(name):
    return Path(file_of(name)).read_text()


@functools.cache
def _nodes(name):
    """(node, function, key, tests) of all that is in a module's functions, as in `Site`."""
    file, found = file_of(name), []

    def visit(node, function, key, tests):
        if isinstance(node, (ast.Raise, ast.Assert, ast.JoinedStr)):
            return
        if key:
            found.append((node, function, key, tests))
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            inside = isinstance(node, ast.FunctionDef)
            function = f"{function}.{node.name}" if function else node.name
            if inside:
                outer = f"{key[1]}.<locals>." if key else function.removesuffix(node.name)
                key = (file, f"{outer}{node.name}", _first_line(node))
            for each in node.body:
                visit(each, function, key, () if inside else tests)
        elif isinstance(node, (ast.If, ast.IfExp)):
            visit(node.test, function, key, tests)
            for branch, outcome in ((node.body, True), (node.orelse, False)):
                for each in branch if isinstance(branch, list) else [branch]:
                    visit(each, function, key, (*tests, (node.test, outcome)))
        else:
            for each in ast.iter_child_nodes(node):
                if each is not getattr(node, "annotation", None):
                    visit(each, function, key, tests)

    visit(ast.parse(source(name)), "", (), ())
    return found


@functools.cache
def sites_of(name, rules=RULES):
    """All sites of a module's functions."""
    text = source(name).encode()
    starts = [0, *itertools.accumulate(map(len, text.splitlines(True)))]
    plain = text.isascii()
    seen: dict[tuple, int] = defaultdict(int)
    found = []

    def place(line, column):
        at = starts[line - 1] + column
        return at if plain else len(text[:at].decode())

    for node, function, key, tests in _nodes(name):
        for rule in rules:
            for old, new in rule(node):
                what = (name, function, rule.__name__, ast.unparse(old))
                span = (
                    place(old.lineno, old.col_offset),
                    place(old.end_lineno, old.end_col_offset),
                )
                found.append(Site(*what, new, seen[what], span, key, tests))
                seen[what] += 1
    return tuple(found)


@functools.cache
def _names(name):
    """What a module's functions take under the same tests, by key: (tests, names, attributes of a
    name, by it, and of what else, by None).
    """
    found = defaultdict(dict)
    for node, _, key, tests in _nodes(name):
        if isinstance(node, (ast.Name, ast.Attribute)):
            under = tuple((id(test), outcome) for test, outcome in tests)
            given = (tests, set(), defaultdict(set))
            _, names, attributes = found[key].setdefault(under, given)
            if isinstance(node, ast.Name):
                names.add(node.id)
            else:
                attributes[getattr(node.value, "id", None)].add(node.attr)
    return {key: list(of.values()) for key, of in found.items()}


def modules_of(*packages):
    """Names of these modules and of all in them."""
    for package in packages:
        yield package
        places = importlib.util.find_spec(package).submodule_search_locations
        yield from (each.name for each in pkgutil.walk_packages(places or (), f"{package}."))


# --- functions -------------------------------------------------------------------------------


def _behind(value):
    """What a value of the package holds or wraps."""
    for name in ("__wrapped__", "py_func", "emulation", "_defn", "__func__", "fget", "func"):
        inner = vars(value).get(name) if hasattr(value, "__dict__") else None
        yield inner if inner is not None else getattr(value, name, None)
    if isinstance(value, types.FunctionType):
        for cell in value.__closure__ or ():
            with contextlib.suppress(ValueError):
                yield cell.cell_contents
    elif isinstance(value, type):
        yield from vars(value).values()
    elif isinstance(value, (tuple, list)):
        yield from value
    elif isinstance(value, dict):
        yield from value.values()


def _all_behind(module):
    """All that a module's names lead to, as far as it is of the package."""
    seen, left = set(), list(vars(module).values())
    while left:
        value = left.pop()
        owner = getattr(value, "__module__", None)
        ours = isinstance(owner, str) and owner.startswith(f"{module.__name__.split('.')[0]}.")
        if id(value) in seen or isinstance(value, types.ModuleType):
            continue
        if not (ours or isinstance(value, (tuple, list, dict, property, cached_property))):
            continue
        seen.add(id(value))
        yield value
        left += [x for x in _behind(value) if x is not None]


@functools.cache
def functions_of(name):
    """The functions of a module that live as long as it, by `key_of` their code."""
    found = defaultdict(list)
    module = importlib.import_module(name)
    for value in _all_behind(module):
        if isinstance(value, types.FunctionType) and value.__module__ == name:
            found[key_of(value.__code__)].append(value)
    return dict(found)


@functools.cache
def caches():
    """Whatever keeps results of the package's functions; the emulator's and the device's may, and
    what is read of the source of a caller's function: no mutant is in these.
    """
    found = {}
    for name, module in list(sys.modules.items()):
        if name.startswith("fa_numba.") and not name.startswith(
            ("fa_numba.emulator", "fa_numba.device", "fa_numba.mods.source")
        ):
            for value in _all_behind(module):
                if hasattr(value, "cache_clear"):
                    found[id(value)] = value
    return list(found.values())


def clear_caches():
    for each in caches():
        each.cache_clear()


def _codes(code):
    """All code within, by qualified name and first line."""
    found = {}
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            found[inner.co_qualname, inner.co_firstlineno] = inner
            found |= _codes(inner)
    return found


_numbers = itertools.count()


def changed(site, new=None):
    """Return the text of a module with this site changed, to the text `new` if one is given."""
    text, (begin, end), new = source(site.module), site.span, new or site.new
    # The lines below keep their numbers, by which code is found.
    lines = text[begin:end].count("\n") - new.count("\n")
    return "".join((text[:begin], new, " " * (lines > 0), "\\\n" * lines, text[end:]))


def planted(site):
    """A context where this site is changed, and what it is in made anew."""
    return _of_text(site.module, changed(site))


def compiled_again(site):
    """A context where the functions that ``planted`` changes are compiled from the right text.

    All else is as in ``planted``. A test that fails here does not fail because of the fault.
    """
    return _of_text(site.module, changed(site), source(site.module))


@contextlib.contextmanager
def _of_text(name, text, instead=None):
    """A context where functions of a module have other code.

    These are the functions whose code differs in this text, or tree. They have the code of the
    text, or of the text ``instead`` if one is given.
    """
    file = f"<mutant {next(_numbers)} of {name}>"
    if isinstance(text, str):  # no tree, which the emulator has no use for
        lines = (instead or text).splitlines(keepends=True)
        linecache.cache[file] = (len(text), None, lines, file)
    codes = _codes(compile(text, file, "exec"))
    given = codes if instead is None else _codes(compile(instead, file, "exec"))
    before = []
    for (_, *place), functions in functions_of(name).items():
        code = codes.get(tuple(place))
        for function in functions if code else ():
            old = function.__code__
            if _differ(old, code):
                before.append((function, old))
                function.__code__ = given[tuple(place)]
    clear_caches()
    try:
        assert before or not isinstance(text, str), f"no function of {name} has changed"
        with interpreted([function for function, _ in before]):
            yield
    finally:
        for function, old in before:
            function.__code__ = old
        clear_caches()
        linecache.cache.pop(file, None)
        rewritten = emulator.rewrite._rewritten
        for key in [k for k, (code, *_) in rewritten.items() if code.co_filename == file]:
            del rewritten[key]


@functools.cache
def loops():
    """What is compiled for the CPU: (a module's names, the name there, the function)."""
    modules = [vars(x) for name, x in sys.modules.items() if name.startswith("fa_numba.")]
    return [
        (names, name, value.py_func)
        for names in modules
        for name, value in names.items()
        if isinstance(value, CPUDispatcher)
    ]


@contextlib.contextmanager
def interpreted(functions):
    """Loops among these functions are as Python runs them, wherever they were imported."""
    with contextlib.ExitStack() as stack:
        for names, name, function in loops():
            if function in functions:
                stack.enter_context(mock.patch.dict(names, {name: function}))
        yield


def _differ(a, b):
    """Whether two functions do something else, wherever their lines stand."""
    if (a.co_code, a.co_names, a.co_varnames, a.co_freevars, len(a.co_consts)) != (
        b.co_code, b.co_names, b.co_varnames, b.co_freevars, len(b.co_consts)
    ):  # fmt: skip
        return True
    pairs = zip(a.co_consts, b.co_consts, strict=True)
    return any(
        _differ(x, y) if isinstance(x, types.CodeType) else repr(x) != repr(y) for x, y in pairs
    )


# --- which case runs what ----------------------------------------------------------------------


class Calls(set):
    """The code of the package's functions that are called while this is entered."""

    def __init__(self):
        super().__init__()
        self._seen = {}  # code by its id, as a code's hash takes long

    def _trace(self, frame, *_):
        code = frame.f_code
        if id(code) not in self._seen:
            self._seen[id(code)] = code
            if frame.f_globals.get("__name__", "").startswith("fa_numba."):
                self.add(code)

    def __enter__(self):
        self.before = sys.gettrace()
        sys.settrace(self._trace)
        threading.settrace(self._trace)  # of those that begin now

    def __exit__(self, *_):
        sys.settrace(self.before)
        threading.settrace(self.before)


class Reached(defaultdict):
    """What a run executes, and how many threads its launches have in all."""

    threads = 0


def reached(run):
    """The functions that a run executes, by `key_of` their code: the names that each takes.

    Kernels do not run: of each, all functions are found that it and they call. What ends a run
    before its first launch is left out, and what fails since nothing was computed.
    """
    kernels, calls, found = [], Calls(), Reached(list)

    def launch(function, grid, block, *args, **options):
        kernels.append(function)
        found.threads += math.prod(grid) * math.prod(
            block if isinstance(block, tuple) else (block,)
        )
        return emulator.Counts()

    clear_caches()
    with calls, mock.patch.object(emulator, "launch", launch), contextlib.suppress(Exception):
        run()
    for function, names in functions_from(kernels, calls):
        found[key_of(function.__code__)].append(names)
    for code in calls:
        found[key_of(code)].append({})
    return found


def executed(runs, names):
    """As `reached`, for each of these runs of the host's code, which are made; of these modules."""
    keys: set[tuple] = set()
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(builtins, "executed", keys.add, create=True))
        for name in names:
            importlib.import_module(name)
            stack.enter_context(_of_text(name, telling(name)))
        for run in runs:
            keys.clear()
            assert noticed(run) is None, f"{run.title} fails as it is"
            yield run, {key: [{}] for key in keys}


def telling(name):
    """A module's tree whose functions say when they are called."""
    tree, file = ast.parse(source(name)), file_of(name)

    def visit(node, outer):
        for each in ast.iter_child_nodes(node):
            if not isinstance(each, (ast.FunctionDef, ast.ClassDef)):
                visit(each, outer)
                continue
            visit(
                each, f"{outer}{each.name}" + (".", ".<locals>.")[isinstance(each, ast.FunctionDef)]
            )
            if isinstance(each, ast.FunctionDef):
                key = ast.Constant((file, f"{outer}{each.name}", _first_line(each)))
                tell = ast.Expr(ast.Call(ast.Name("executed", ast.Load()), [key], []))
                each.body.insert(0, ast.copy_location(tell, each.body[0]))

    visit(tree, "")
    return ast.fix_missing_locations(tree)


def _first_line(function):
    return min([function.lineno, *(each.lineno for each in function.decorator_list)])


def functions_from(left, calls):
    """Functions of the package and those that they call, with their globals and closure."""
    seen = set()
    while left:
        value = left.pop()
        if isinstance(value, types.FunctionType) and value.__module__.startswith("fa_numba."):
            if id(value) in seen:
                continue
            seen.add(id(value))
            names = value.__globals__
            if value.__closure__:
                names = dict(names)
                for name, cell in zip(value.__code__.co_freevars, value.__closure__, strict=True):
                    with contextlib.suppress(ValueError):
                        names[name] = cell.cell_contents
            yield value, names
            if value.__module__.startswith("fa_numba.emulator"):
                continue
            of_module = _names(value.__module__).get(key_of(value.__code__), ())
            may = [(of, attributes) for tests, of, attributes in of_module if _may(tests, names)]
            asked = {name for of, _ in may for name in of}
            if value.__code__.co_filename.startswith("<"):  # a text of a caller's function
                asked |= {*value.__code__.co_names}
            for name in asked & names.keys():
                left.append(names[name])
                if isinstance(names[name], types.ModuleType):
                    of = (attributes[of] for _, attributes in may for of in (name, None))
                    left.append((names[name], set().union(*of)))
        elif isinstance(value, tuple):
            module, names = (*value, None, None)[:2]
            if isinstance(module, types.ModuleType) and isinstance(names, set):
                if module.__name__.startswith("fa_numba"):
                    with calls:
                        inside = [getattr(module, name, None) for name in names]
                    left += inside
                    left += [(x, names) for x in inside if isinstance(x, types.ModuleType)]
            else:
                left += value
        if not isinstance(value, (types.ModuleType, int, str, float)):
            inner = (getattr(value, name, None) for name in ("emulation", "py_func"))
            left += [x for x in inner if x is not None]


_compiled: dict[int, tuple] = {}


def _may(tests, names):
    """Whether these conditions can hold, as far as names from outside the function tell."""
    for test, outcome in tests:
        if id(test) not in _compiled:
            asked = [x.id for x in ast.walk(test) if isinstance(x, ast.Name)]
            calls = any(isinstance(x, (ast.Call, ast.NamedExpr)) for x in ast.walk(test))
            code = None if calls else compile(ast.Expression(test), "<test>", "eval")
            _compiled[id(test)] = test, code, asked
        _, code, asked = _compiled[id(test)]
        if code is None or any(isinstance(names.get(x), types.ModuleType) for x in asked):
            continue  # of the thread, say
        try:
            if bool(eval(code, {}, names)) != outcome:
                return False
        except Exception:
            continue
    return True


def reaches(site, record):
    """Whether a run with this record executes the site, as far as can be told without it."""
    return any(_may(site.tests, names) for names in record.get(site.key, ()))


# --- what notices a mutant ---------------------------------------------------------------------


class TookTooLong(BaseException):
    """Not an Exception, which the emulator would take for one block's."""


@contextlib.contextmanager
def at_most(seconds):
    """Raise `TookTooLong` inside after so many seconds of this process's own time."""

    def stop(*_):
        raise TookTooLong

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds, 1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def noticed(run, seconds=8):
    """How a run fails: "counts", "values" or the name of an error; None if it passes."""
    try:
        with at_most(seconds):
            run()
    except (AssertionError, pytest.fail.Exception) as error:
        return "counts" if str(error).startswith("counts") else "values"
    except TookTooLong:
        return "TookTooLong"
    except pytest.skip.Exception:
        return None
    except Exception as error:
        return type(error).__name__
    return None


def apart(function, *args, seconds=600):
    """What a function gives in a process of its own, as JSON takes it, or that it crashed or took
    longer than so many seconds.
    """
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            faulthandler.disable()
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(seconds)
            os.write(write, json.dumps(function(*args)).encode())
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    os.close(write)
    with open(read) as file:
        said = file.read()
    _, status = os.waitpid(child, 0)
    assert said or not os.WIFEXITED(status), "the process ended in an error"
    return json.loads(said) if said else ["Crash", "", 0]
