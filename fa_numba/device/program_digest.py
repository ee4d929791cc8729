"""Digests of kernels' programs: equal digests mean equal machine code by the same compiler.

A digest covers everything from which a kernel is compiled:

- the syntax trees of the kernel and of the device functions, intrinsics and helpers that it calls,
- the values that these functions take from their closures and modules,
- the types of the kernel's arguments, and its launch bounds.

A digest does not cover words (docstrings, comments, annotations, the arguments of ``raise``), line
numbers, the names of local variables, and the names and modules of functions. The digest therefore
stays the same if a text is edited, or if a function is renamed or moved.

Each kernel has two digests. The digest for a GPU covers the code that intrinsics generate. The
digest for the emulator covers the Python functions that emulate the intrinsics, and the names of
the kernel's parameters, by which accesses are counted. No digest covers the compilers or the
emulator: their versions must be stored together with the digest.
"""

from __future__ import annotations

import ast
import builtins
import copy
import dis
import functools
import hashlib
import sys
import weakref
from collections.abc import Mapping
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import numpy as np
from numba.core import types
from numba.cuda.extending import _Intrinsic

from fa_numba.device.function import DeviceFunction
from fa_numba.emulator.typed import lines_of

# Digests contain only the names of functions of these packages. The source of functions of other
# packages is read.
_INSTALLED = frozenset(("numba", "numpy", "llvmlite", "cuda", "torch", "scipy"))
# The emulator's functions are named only. The emulator has another digest, over all its files.
_EMULATOR = "fa_numba.emulator"
_NUMBERS = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis))
_LENGTH = 16  # hexadecimal digits


class Unknown(TypeError):
    """Raised for a value for which no digest can be computed."""


class Program(NamedTuple):
    """The digest of a kernel or function, and the names of the modules that its code is in."""

    digest: str
    modules: frozenset[str]


class Template(NamedTuple):
    """The syntax tree of a function as text, with a gap for each name from outside the function.

    A name from outside is a name that the function takes from its closure or its globals.
    ``references[n]`` is the name that belongs in gap number n.
    """

    text: str
    references: tuple[Reference, ...]


class Reference(NamedTuple):
    """A name that a function takes from its closure or its globals, with the attributes after it.

    For the expression ``math.exp``, ``names`` is ("math", "exp"), and ``keyword`` is empty.

    If ``keyword`` is not empty, the reference is the name of a keyword argument in a call. For the
    call ``scaled(x, factor=2)``, ``names`` is ("scaled",), the called function, and ``keyword`` is
    "factor". A digest contains the position of this argument among the parameters, and not its
    name.
    """

    names: tuple[str, ...]
    keyword: str = ""


def digest_of(text: str) -> str:
    """Return the digest of a text, with 16 hexadecimal digits."""
    return hashlib.sha256(text.encode()).hexdigest()[:_LENGTH]


def program_of(kernel: Any, *, emulated: bool = False) -> Program:
    """Return the digest of a ``Kernel``, and the modules that its code is in.

    ``emulated`` selects the digest for the emulator instead of the digest for a GPU. The values
    that the kernel takes from closures and modules must be numbers, types, functions, modules, or
    containers of these. Raise Unknown for another value, and ValueError if the source of the code
    is missing.
    """
    reader = _readers[emulated]
    inner = reader.function(kernel.function)
    names = _parameters(kernel.function) if emulated else ()
    bounds = kernel.threads, kernel.min_blocks, kernel.shared_bytes
    arguments = [reader.value(each) for each in kernel.argument_types]
    return Program(digest_of(repr((inner.digest, arguments, bounds, names))), inner.modules)


def _parameters(function: Any) -> tuple[str, ...]:
    return tuple(function.__code__.co_varnames[: function.__code__.co_argcount])


class _Reader:
    """Computes the digests of functions, for a GPU or for the emulator.

    The digest of a function is cached as long as the function exists.
    """

    def __init__(self, emulated: bool) -> None:
        self.emulated = emulated
        self._known: weakref.WeakKeyDictionary[Any, Program] = weakref.WeakKeyDictionary()
        self._open: list[Any] = []  # functions that are being read
        self._lowest = 0  # smallest index in ``_open`` of a function that was referred to
        self._modules: set[str] = set()

    def function(self, function: Any) -> Program:
        """Return the digest of a Python function, and the modules that its code is in."""
        if function in self._known:
            found = self._known[function]
            self._modules |= found.modules
            return found
        if function in self._open:  # it calls itself
            depth = self._open.index(function)
            self._lowest = min(self._lowest, depth)
            return Program(f"the function {len(self._open) - depth} calls above", frozenset())
        depth, lowest, modules = len(self._open), self._lowest, self._modules
        self._open.append(function)
        self._lowest, self._modules = depth, {function.__module__}
        try:
            template = _template(function.__code__)
            outside = _outside(function)
            parts: list[Any] = [self._reference(each, outside) for each in template.references]
            parts += [self.value(function.__defaults__), self.value(function.__kwdefaults__)]
            found = Program(digest_of(repr((template.text, parts))), frozenset(self._modules))
            if self._lowest >= depth:  # it refers to no function that is still being read
                self._known[function] = found
        finally:
            self._open.pop()
            self._lowest = min(lowest, self._lowest)
            modules |= self._modules
            self._modules = modules
        return found

    def _reference(self, reference: Reference, outside: Mapping[str, Any]) -> Any:
        first, *rest = reference.names
        if first not in outside:
            return "nothing", first
        value = outside[first]
        while rest and isinstance(value, ModuleType) and not _is_installed(value.__name__):
            if value.__name__.startswith(_EMULATOR):
                break
            value = getattr(value, rest.pop(0))
        if reference.keyword:
            inner = _python_of(value)
            names = _parameters(inner) if inner is not None and not rest else ()
            known = reference.keyword in names
            return names.index(reference.keyword) if known else reference.keyword
        return self.value(value), *rest

    def value(self, value: Any) -> Any:
        """Return a value as strings in nested tuples, for a digest.

        Different values give different strings.
        """
        if isinstance(value, _NUMBERS):
            return type(value).__name__, repr(value)
        if isinstance(value, np.generic):
            return str(value.dtype), repr(value.item())
        if isinstance(value, np.ndarray):
            content = hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()
            return "array", str(value.dtype), value.shape, content
        if isinstance(value, types.Type):
            return self._type(value)
        if isinstance(value, (tuple, list)):
            names = getattr(value, "_fields", ())
            kind = "tuple" if isinstance(value, tuple) else "list"
            return kind, names, *map(self.value, value)
        if isinstance(value, dict):
            return "dict", *((self.value(k), self.value(x)) for k, x in value.items())
        if isinstance(value, (set, frozenset)):
            return "set", *sorted((self.value(each) for each in value), key=repr)
        if isinstance(value, ModuleType):
            return "module", value.__name__
        if isinstance(value, functools.partial):
            inner = value.func, value.args, dict(sorted(value.keywords.items()))
            return "partial", *map(self.value, inner)
        if self.emulated and hasattr(value, "emulation"):
            return self.value(value.emulation)
        found = _python_of(value)
        if found is not None and not _is_opaque(found):
            return self.function(found).digest
        return self._named(value if found is None else found)

    def _type(self, value: Any) -> Any:
        if hasattr(value, "instance_class"):  # a named tuple
            return "record", value.fields, *map(self._type, value.types)
        return "type", str(value)

    def _named(self, value: Any) -> Any:
        """Return the name of an object whose source code is not read.

        Such objects are functions, classes and instances of other packages, such as NumPy.
        """
        if isinstance(value, type) and issubclass(value, tuple) and hasattr(value, "_fields"):
            return "record class", value._fields, self.value(vars(value)["_field_defaults"])
        if hasattr(value, "__qualname__"):
            return "name", f"{getattr(value, '__module__', '')}.{value.__qualname__}"
        kind = type(value)
        if kind.__module__.startswith("llvmlite") or isinstance(value, np.dtype):
            return "text", str(value)
        if _is_installed(kind.__module__):
            return "instance", f"{kind.__module__}.{kind.__qualname__}", str(value)
        raise Unknown(f"no digest of {kind.__qualname__} {value!r}")


_readers = {False: _Reader(False), True: _Reader(True)}


def _python_of(value: Any) -> Any:
    """Return the Python function of a device function, intrinsic or cached function.

    Return a Python function unchanged, and None for any other value.
    """
    if isinstance(value, DeviceFunction):
        return value.py_func
    if isinstance(value, _Intrinsic):
        return value._defn
    for name in ("py_func", "__wrapped__"):
        inner = getattr(value, name, None)
        if isinstance(inner, FunctionType):
            return inner
    return value if isinstance(value, FunctionType) else None


def _is_installed(module: str) -> bool:
    first = module.partition(".")[0]
    return first in _INSTALLED or first in sys.stdlib_module_names


def _is_opaque(function: FunctionType) -> bool:
    module = function.__module__ or ""
    return _is_installed(module) or module.startswith(_EMULATOR)


def _outside(function: FunctionType) -> dict[str, Any]:
    """Return the values that a function takes from its closure and its globals, by name."""
    found = {}
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    for name in _taken(function.__code__):
        if name in cells:
            try:
                found[name] = cells[name].cell_contents
            except ValueError:  # not assigned yet
                continue
        elif name in function.__globals__:
            found[name] = function.__globals__[name]
        elif hasattr(builtins, name):
            found[name] = getattr(builtins, name)
    return found


@functools.cache
def _taken(code: CodeType) -> frozenset[str]:
    """Return the names that code takes from its closure and its globals."""
    found = {
        each.argval
        for each in dis.get_instructions(code)
        if each.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    }
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            found |= _taken(inner) - set(inner.co_freevars)
    return frozenset(found | set(code.co_freevars))


# --- syntax trees ------------------------------------------------------------------------------


@functools.cache
def _template(code: CodeType) -> Template:
    node = definition(code)
    if node is None:
        place = f"{code.co_filename}:{code.co_firstlineno}"
        raise ValueError(
            f"the source of {code.co_name}, {place}, must be in a file or a notebook's cell"
        )
    return _template_of_function(node, _taken(code))


def definition(code: CodeType) -> ast.FunctionDef | ast.Lambda | None:
    """Return the syntax tree of the function with this code.

    Return None if the source is missing, or if several lambdas are on the line and none of them
    fits the code.
    """
    lines = tuple(lines_of(code))
    found = _functions(lines).get((code.co_firstlineno, code.co_name), ())
    if len(found) < 2:
        return found[0] if found else None
    # There are several lambdas on one line. Find the lambda that contains the code's positions.
    places = [p for p in code.co_positions() if None not in p and (p[0], p[2]) < (p[1], p[3])]
    for node in found:
        start, stop = (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)
        if places and all(start <= (a, c) and (b, d) <= stop for a, b, c, d in places):
            return node
    return None


@functools.lru_cache(maxsize=256)
def _functions(lines: tuple[str, ...]) -> dict[tuple[int, str], list[Any]]:
    """Map (first line, name) to the syntax trees of the functions in a file.

    The first line of a decorated function is the line of its first decorator. If several lambdas
    begin on one line, a lambda inside another lambda comes first.
    """
    found: dict[tuple[int, str], list[Any]] = {}
    for node in ast.walk(ast.parse("".join(lines))):
        if isinstance(node, ast.Lambda):
            found.setdefault((node.lineno, "<lambda>"), []).insert(0, node)
        elif isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            found.setdefault((first, node.name), []).append(node)
    return found


def template(node: ast.AST, outside: frozenset[str] = frozenset()) -> Template:
    """Return a syntax tree as text, and its references to the names in ``outside``.

    Docstrings, comments, annotations and the arguments of ``raise`` are left out. Names that are
    not in ``outside`` are numbered in the order in which they occur. The text does not depend on
    the version of Python.
    """
    writer = _Writer(outside)
    writer.node(node)
    return Template("".join(writer.text), tuple(writer.references))


def _template_of_function(node: ast.FunctionDef | ast.Lambda, outside: frozenset[str]) -> Template:
    """Return the syntax tree of a function as a ``Template``.

    The decorators and the default values of the function are left out.
    """
    bare = copy.copy(node)
    bare.args = copy.copy(node.args)
    bare.args.defaults, bare.args.kw_defaults = [], []
    if isinstance(bare, ast.FunctionDef):
        bare.name, bare.decorator_list = "", []
    return template(bare, outside)


class _Writer:
    """Writes a syntax tree as text, without docstrings and without the names of local variables.

    Nodes are written in the order of the tree. Local names are replaced by numbers, in the order in
    which they are written. A method ``_write_<kind>`` writes the nodes of a kind that needs special
    treatment. All other nodes are written with all of their fields.
    """

    def __init__(self, outside: frozenset[str]) -> None:
        self.outside = outside
        self.text: list[str] = []
        self.references: list[Reference] = []
        self._put = self.text.append
        self._numbers: dict[str, int] = {}
        kinds = (name for name in vars(_Writer) if name.startswith("_write_"))
        self._own = {name.removeprefix("_write_"): getattr(self, name) for name in kinds}

    def node(self, node: ast.AST) -> None:
        kind = type(node).__name__
        own = self._own.get(kind)
        if own is not None:
            own(node)
            return
        self._put(f"({kind}")
        for name in node._fields:
            value = getattr(node, name, None)
            if value is None or value == [] or name == "ctx":
                continue
            self._put(f" {name}=")
            self._value(value)
        self._put(")")

    def _value(self, value: Any) -> None:
        """Write the value of a field of a node: a node, a constant, or a list that is not empty."""
        if isinstance(value, ast.AST):
            self.node(value)
        elif not isinstance(value, list):
            self._put(f" {type(value).__name__}:{value!r}")
        elif isinstance(value[0], ast.stmt):
            self._block(value)
        else:
            self._all(value)

    def _all(self, values: list[Any]) -> None:
        self._put("[")
        for each in values:
            self._value(each)
        self._put("]")

    def _block(self, statements: list[ast.stmt]) -> None:
        self._put("[")
        for each in statements:
            if isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant):
                continue  # a docstring, or an ellipsis
            if isinstance(each, ast.Pass) or isinstance(each, ast.AnnAssign) and not each.value:
                continue
            self.node(each)
        self._put("]")

    def _local(self, name: str) -> None:
        self._put(f" v{self._numbers.setdefault(name, len(self._numbers))}")

    def _refer(self, names: tuple[str, ...], keyword: str = "") -> None:
        self.references.append(Reference(names, keyword))
        self._put(" ?")

    def _chain(self, node: ast.AST) -> tuple[str, ...]:
        """Return the names in an expression such as ``a.b.c``, if ``a`` is a name from outside.

        A name from outside is a name that the function takes from its closure or its globals. The
        result is empty for any other expression.
        """
        attributes: list[str] = []
        while isinstance(node, ast.Attribute):
            attributes.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name) or node.id not in self.outside:
            return ()
        return () if node.id in self._numbers else (node.id, *reversed(attributes))

    def _write_Constant(self, node: ast.Constant) -> None:
        self._put(f" {type(node.value).__name__}:{node.value!r}")

    def _write_Name(self, node: ast.Name) -> None:
        if node.id in self.outside:
            self._refer((node.id,))
        if node.id in self._numbers or node.id not in self.outside:
            self._local(node.id)

    def _write_Attribute(self, node: ast.Attribute) -> None:
        names = self._chain(node)
        if names:
            self._refer(names)
            return
        self._put("(Attribute")
        self.node(node.value)
        self._put(f" {node.attr})")

    def _write_Call(self, node: ast.Call) -> None:
        self._put("(Call")
        self.node(node.func)
        self._all(node.args)
        names = self._chain(node.func)
        for each in node.keywords:
            if names and each.arg:
                self._refer(names, each.arg)
            else:
                self._put(f" {each.arg}")
            self._put("=")
            self.node(each.value)
        self._put(")")

    def _write_arguments(self, node: ast.arguments) -> None:
        self._put("(")
        for name in ("posonlyargs", "args", "vararg", "kwonlyargs", "kwarg"):
            given = getattr(node, name)
            for each in given if isinstance(given, list) else [given] if given else ():
                self._put(f" {name}")
                self._local(each.arg)
        self._all([*node.defaults, *node.kw_defaults])
        self._put(")")

    def _write_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._put("(function")
        self._local(node.name)
        self._all(node.decorator_list)
        self.node(node.args)
        self._block(node.body)
        self._put(")")

    def _write_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.node(ast.Assign([node.target], node.value))

    def _write_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        self._put("(except")
        self._value(node.type)
        if node.name:
            self._local(node.name)
        self._block(node.body)
        self._put(")")

    def _write_Raise(self, node: ast.Raise) -> None:
        self._put("(Raise")
        self._value(node.exc.func if isinstance(node.exc, ast.Call) else node.exc)
        self._put(")")

    def _write_Assert(self, node: ast.Assert) -> None:
        self._put("(Assert")
        self.node(node.test)
        self._put(")")

    def _write_Nonlocal(self, node: ast.Nonlocal) -> None:
        self._put("(Nonlocal")
        for name in node.names:
            self._local(name)
        self._put(")")

    def _write_ClassDef(self, node: ast.ClassDef) -> None:
        """Write a class. The names of its attributes are kept, because other code uses them."""
        self._put(f"(class {node.name}")
        self._all([*node.decorator_list, *node.bases, *node.keywords])
        for each in node.body:
            if isinstance(each, ast.AnnAssign | ast.Assign):
                targets = each.targets if isinstance(each, ast.Assign) else [each.target]
                names = [x.id for target in targets for x in ast.walk(target) if hasattr(x, "id")]
                self._put(f" {names}=")
                self._value(each.value)
                continue
            if isinstance(each, ast.FunctionDef):
                self._put(f" {each.name}=")
            self._block([each])
        self._put(")")
