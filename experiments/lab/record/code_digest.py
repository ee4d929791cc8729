"""Digests of Python code that do not change when only words change.

Words are the parts of a program that do not affect the numbers which the program computes. They are
docstrings, comments, annotations, the arguments of ``raise``, the texts that a progress bar or
``say`` shows, and local variables that only words use. Calls of functions named ``check_...`` whose
result is not used count as words too, and so do unused imports.

The normal form of a program or statement is text that does not depend on words, line breaks and the
names of local variables. A digest is computed from the normal form.
"""

from __future__ import annotations

import ast
import builtins
import functools
import hashlib
import importlib
import importlib.util
import symtable
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from fa_numba.device.program_digest import digest_of, template

from .options import REPOSITORY

PACKAGE = "experiments"
# Modules that do not affect any number: they only store rows and show them.
NO_PART = tuple(f"{PACKAGE}.{x}" for x in ("lab.record", "lab.show", "lab.run", "verdicts"))
_BUILTINS = frozenset(dir(builtins))
# Methods of `options.Bench` whose text arguments are shown next to a progress bar.
_SHOWN = ("track", "each", "counted")
# Fields of statements that contain statements, and what replaces an empty list of statements.
_BLOCKS: dict[str, list[ast.stmt]] = {"body": [ast.Pass()], "orelse": [], "finalbody": []}
# Fields of nodes that contain no nodes, or only operators and contexts.
_WITHOUT_NODES = frozenset(
    ("arg", "asname", "attr", "ctx", "id", "name", "op", "ops", "type_comment")
)
# For each kind of node, the fields that may contain further nodes.
_PARTS: dict[type, tuple[str, ...]] = {
    kind: tuple(name for name in kind._fields if name not in _WITHOUT_NODES)
    for kind in vars(ast).values()
    if isinstance(kind, type) and issubclass(kind, ast.AST)
}
# Methods of the emulator that raise errors: all arguments except the first are words.
_FAULTS = ("fault", "fault_at")
# Functions and methods without side effects. If nothing uses their result, they may be left out.
_PURE = frozenset(
    (
        *("str", "repr", "len", "map", "sorted", "set", "list", "tuple", "dict", "min", "max"),
        *("zip", "enumerate", "getattr", "fromkeys", "join", "format", "items", "keys", "values"),
        *("get", "removesuffix", "removeprefix", "replace", "strip", "lower"),
    )
)


def of_files(paths: Iterable[Path], root: Path) -> str:
    """Return one digest of the code in several Python files, and of their paths below `root`.

    The digest does not depend on words, such as docstrings (see the docstring of the module).
    """
    found = hashlib.sha256()
    for path in sorted(paths):
        stat = path.stat()
        own = _of_file(path, stat.st_mtime_ns, stat.st_size)
        found.update(f"{path.relative_to(root).as_posix()}\0{own}\0".encode())
    return found.hexdigest()[:16]


def of_module(name: str) -> str:
    """Return the digest of the file of a module. It is an empty text if the module has no file."""
    path = path_of(name)
    return "" if path is None else of_files([path], path.parent)


def path_of(module: str) -> Path | None:
    """Return the path of a module's file; None if no file is found.

    The file is searched in this repository. Modules of `experiments` are also searched in the
    folder from which that package is imported. The module itself is not imported.
    """
    top, *rest = module.split(".")
    roots = [REPOSITORY / top]
    if top == PACKAGE:
        roots += map(Path, importlib.import_module(top).__path__)
    for path in (root.joinpath(*rest) for root in roots):
        for found in (path / "__init__.py", path.with_suffix(".py")):
            if found.exists():
                return found
    return None


@functools.lru_cache(maxsize=1024)
def _of_file(path: Path, changed: int, size: int) -> str:
    return digest_of(of_text(path.read_text("utf-8")))


def of_text(text: str) -> str:
    """Return the normal form of a Python program, from which a digest can be computed.

    `text` is the source text of the program. The normal form is text that does not depend on
    docstrings, comments and other words (see the docstring of the module).
    """
    statements = _wordless(text)
    outside = _BUILTINS | {name for each in statements for name in _bound(each)}
    return "\n".join(_written(each, frozenset(outside)) for each in statements)


def _wordless(text: str) -> list[ast.stmt]:
    """Return the syntax trees of a program's statements, with the words removed.

    `text` is the source text of the program. Words are docstrings, comments and other parts that
    the docstring of the module lists.
    """
    tree, functions = ast.parse(text), []
    for node in _nodes(tree):
        if isinstance(node, ast.Raise):
            node.exc = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            node.cause = None
        elif isinstance(node, ast.Call):
            called = _called(node)
            if called in _SHOWN:
                node.args = [x for x in node.args if not _is_text(x)]
            elif called in _FAULTS:
                node.args, node.keywords = node.args[:1], []
        elif isinstance(node, ast.FunctionDef):
            functions.append(node)
            node.returns = None
        elif isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.AnnAssign):
            node.annotation = ast.Constant(None)
        _leave_out(node, _is_words)
    for function in reversed(functions):  # inner ones first
        _leave_out_unused(function)
    _leave_out_unused(tree)
    return tree.body


def _leave_out(node: ast.AST, unwanted: Callable[[ast.stmt], bool]) -> None:
    """Remove the statements for which `unwanted` is true from the blocks of a node."""
    if "body" not in node._fields:
        return
    for name, empty in _BLOCKS.items():
        block = getattr(node, name, None)
        if isinstance(block, list):
            setattr(node, name, [each for each in block if not unwanted(each)] or empty)


def _is_words(statement: ast.stmt) -> bool:
    """Return whether a statement is a docstring, or calls `say` or a function `check_...`.

    Such statements do not change numbers.
    """
    if not isinstance(statement, ast.Expr):
        return False
    value = statement.value
    if isinstance(value, ast.Call):
        return _called(value) == "say" or _called(value).startswith(("check_", "_check_"))
    return isinstance(value, ast.Constant)


def _is_text(node: ast.AST) -> bool:
    if isinstance(node, ast.BinOp):
        return _is_text(node.left) or _is_text(node.right)
    constant = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return constant or isinstance(node, ast.JoinedStr)


def _called(node: ast.Call) -> str:
    """Return the name of the called function or method, without the object before the dot."""
    return str(getattr(node.func, "attr", getattr(node.func, "id", "")))


def _leave_out_unused(tree: ast.FunctionDef | ast.Module) -> None:
    """Remove assignments to variables that nothing else uses.

    An example is a variable with a message that was only used by ``raise``. In a function, all such
    assignments are removed if their values have no side effects. In a module, only assignments of
    sentences and unused imports are removed.
    """
    in_module = isinstance(tree, ast.Module)
    nodes = list(_nodes(tree))
    candidates = {
        id(x): targets
        for x in (tree.body if in_module else nodes)
        if isinstance(x, (ast.Assign, ast.AugAssign))
        and (_is_sentence(x.value) if in_module else _is_pure(x.value))
        and (targets := _names_of(x))
    }
    if not candidates and not in_module:
        return
    # No candidate contains another one: assignments have no blocks.
    left = {id(x): Counter(_loaded(_nodes(x))) for x in nodes if id(x) in candidates}
    used = set(Counter(_loaded(nodes)) - sum(left.values(), Counter()))
    while found := [n for n in left if candidates[n] & used]:
        used.update(*(left.pop(n) for n in found))
    if not left and not in_module:
        return
    for node in nodes:
        _leave_out(node, lambda each: id(each) in left)
        if in_module:
            _leave_out(node, lambda each: _is_import_of_none(each, used))


def _names_of(node: ast.Assign | ast.AugAssign) -> set[str]:
    """Return the names of the variables that an assignment assigns.

    The result is empty if the assignment also changes an element or an attribute of an object, as
    in ``x[0], y = 1, 2``.
    """
    given = node.targets if isinstance(node, ast.Assign) else [node.target]
    targets = [x for each in given for x in ast.walk(each)]
    if not all(isinstance(x, (ast.Name, ast.Tuple, ast.expr_context)) for x in targets):
        return set()
    return {x.id for x in targets if isinstance(x, ast.Name)}


def _loaded(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield the names of the variables that the code in the given syntax trees reads."""
    return (x.id for x in nodes if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Load))


def _nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes of a tree, except operators and contexts such as `ast.Load`.

    A node comes before the nodes that it contains. This is several times as fast as `ast.walk`.
    """
    left = [tree]
    while left:
        node = left.pop()
        for name in _PARTS[type(node)]:
            value = getattr(node, name, None)
            if isinstance(value, list):
                left += [x for x in value if isinstance(x, ast.AST)]
            elif isinstance(value, ast.AST):
                left.append(value)
        yield node


def _is_import_of_none(node: ast.stmt, used: set[str]) -> bool:
    """Remove unused names from an import statement. Return whether no name is left."""
    if not isinstance(node, (ast.Import, ast.ImportFrom)):
        return False
    node.names = [x for x in node.names if _imported_as(x) in used]
    return not node.names


def _is_sentence(value: ast.expr) -> bool:
    texts = [x.value for x in ast.walk(value) if isinstance(x, ast.Constant)]
    return _is_text(value) and any(isinstance(x, str) and " " in x for x in texts)


def _is_pure(value: ast.AST) -> bool:
    """Return whether the evaluation of an expression has no side effect.

    An assignment of such an expression to an unused variable may be removed. An f-string is assumed
    to have no side effect, whatever expressions it contains.
    """
    if isinstance(value, ast.JoinedStr):
        return True
    if isinstance(value, ast.Call) and _called(value) not in _PURE:
        return False
    if isinstance(value, (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom, ast.Lambda)):
        return False
    return all(map(_is_pure, ast.iter_child_nodes(value)))


def reached(module: str, name: str) -> dict[str, str]:
    """Return the digests of all code in `experiments` that a function uses, directly or indirectly.

    The result maps the name of a module to a digest of the functions, classes and constants that
    are used. Modules in `NO_PART` are left out.
    """
    texts: dict[str, dict[int, str]] = {}
    left = [(module, name)]
    while left:
        of, name = left.pop()
        if of.startswith(NO_PART):
            continue
        found = _module(of)
        if name == "*":
            left += [(of, each) for each in found.names]
            continue
        texts.setdefault(of, {})
        for n in found.about(name):
            if n not in texts[of]:
                texts[of][n] = found.text(n)
                left += found.references(n)
    return {
        of: digest_of("\n".join(text for _, text in sorted(own.items())))
        for of, own in sorted(texts.items())
        if own
    }


@functools.cache
def _module(name: str) -> _Module:
    path = path_of(name)
    if path is None:
        raise ModuleNotFoundError(f"{name} has no file in {REPOSITORY}", name=name)
    return _Module(name, path)


def _global_names(bare: ast.stmt) -> set[str]:
    """Return the global names that a statement of a module reads. Local names are left out."""
    top = symtable.symtable(ast.unparse(bare), "statement", "exec")
    found = {symbol.get_name() for symbol in top.get_symbols() if symbol.is_referenced()}
    # From Python 3.12 on, the table of the module lists the variables of its comprehensions too.
    parts = (node.target for node in ast.walk(bare) if isinstance(node, ast.comprehension))
    found -= {node.id for each in parts for node in ast.walk(each) if isinstance(node, ast.Name)}
    tables = top.get_children()
    while tables:
        table = tables.pop()
        tables += table.get_children()
        found |= {x.get_name() for x in table.get_symbols() if x.is_global() and x.is_referenced()}
    return found


class _Module:
    """The statements of a module of `experiments`, and which names each statement defines or uses.

    Docstrings, comments and other words are removed (see the docstring of this file).
    """

    def __init__(self, name: str, path: Path) -> None:
        self.package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        self.name, self.statements = name, _wordless(path.read_text("utf-8"))
        self.names: dict[str, list[int]] = {}
        self.imports: dict[str, tuple[str, str]] = {}  # name -> (module, its name there or "")
        # Statements that may change the values of names, such as ``TABLE["b"] = 2``.
        self._loose: list[tuple[int, set[str]]] = []
        for n, each in enumerate(self.statements):
            if isinstance(each, (ast.Import, ast.ImportFrom)):
                self.imports |= self._imported(each)
                continue
            bound = set(_bound(each))
            for one in bound:
                self.names.setdefault(one, []).append(n)
            if not isinstance(each, (ast.FunctionDef, ast.ClassDef)):
                self._loose.append((n, set(_changed(each))))
        self._outside = frozenset({*_BUILTINS, *self.names, *self.imports})
        self._texts: dict[int, str] = {}
        self._references: dict[int, list[tuple[str, str]]] = {}

    def _imported(self, node: ast.Import | ast.ImportFrom) -> dict[str, tuple[str, str]]:
        if isinstance(node, ast.Import):
            return {
                _imported_as(alias):
                (alias.name if alias.asname else alias.name.partition(".")[0], "")
                for alias in node.names
            }  # fmt: skip
        source = "." * node.level + (node.module or "")
        source = importlib.util.resolve_name(source, self.package) if node.level else source
        return {alias.asname or alias.name: (source, alias.name) for alias in node.names}

    def about(self, name: str) -> set[int]:
        """Return the numbers of the statements that bind a name or that may change its value."""
        return {*self.names.get(name, ()), *(n for n, names in self._loose if name in names)}

    def text(self, n: int) -> str:
        """Return text that identifies the code of statement number n; see `_written`."""
        if n not in self._texts:
            self._texts[n] = _written(self.statements[n], self._outside, self.imports)
        return self._texts[n]

    def references(self, n: int) -> list[tuple[str, str]]:
        """Return (module, name) of everything in `experiments` that statement number n uses."""
        if n not in self._references:
            self._references[n] = self._taken(self.statements[n])
        return self._references[n]

    def _taken(self, bare: ast.stmt) -> list[tuple[str, str]]:
        imports, found = dict(self.imports), []
        for node in ast.walk(bare):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                mine = self._imported(node)
                imports |= mine
                found += [self._inside(*each) for each in mine.values()]
        attributes = {
            (node.value.id, node.attr)
            for node in ast.walk(bare)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        }
        for name in _global_names(bare):
            if name in self.names:
                found.append((self.name, name))
            elif name in imports:
                module, inner = self._inside(*imports[name])
                if inner == "*":  # a module, whose attributes are used
                    found += [(module, attr) for of, attr in attributes if of == name]
                else:
                    found.append((module, inner))
        return [each for each in found if each[0].partition(".")[0] == PACKAGE]

    def _inside(self, module: str, name: str) -> tuple[str, str]:
        """Return where an imported object is defined, as (module, name of the object).

        The object was imported by ``from module import name``.

        | imported object | result |
        |---|---|
        | defined in `module` | (`module`, `name`) |
        | itself a module | (this module, "*") |
        | `module` has imported it from another module of `experiments` | where it is defined |
        """
        if module.partition(".")[0] != PACKAGE or not name:
            return module, name or "*"
        if path_of(f"{module}.{name}") is not None:
            return f"{module}.{name}", "*"
        if not module.startswith(NO_PART):
            again = _module(module).imports.get(name)
            if again is not None:
                return self._inside(*again)
        return module, name


def _written(
    statement: ast.stmt,
    outside: frozenset[str],
    imports: Mapping[str, tuple[str, str]] | None = None,
) -> str:
    """Return text that identifies the code of a statement, for making a digest.

    The text has three parts:

    - the names that the statement binds (assigns, defines or imports),
    - the code of the statement, without the names of local variables,
    - the global names that the statement uses.

    `outside` contains all global names. `imports` maps an imported name to a pair: the module from
    which it was imported, and the name of the object in that module. In the text, this pair
    replaces the imported name.
    """
    made = template(statement, outside)
    names = []
    for first, *rest in (each.names for each in made.references):
        own = (imports or {}).get(first)
        names.append(".".join([*(x for x in own if x), *rest] if own else [first, *rest]))
    keywords = [each.keyword for each in made.references]
    return f"{','.join(sorted(_bound(statement)))} {made.text} {names} {keywords}"


def _changed(statement: ast.stmt) -> Iterator[str]:
    """Yield the names of the variables whose values a statement may change.

    A statement may change: an object over which it iterates; a variable that it updates, as in
    ``x += 1``; an object whose element or attribute it assigns; an object whose method it calls; an
    argument that it passes to a function.
    """
    for node in ast.walk(statement):
        changed: list[ast.AST] = []
        if isinstance(node, ast.For):
            changed = list(ast.walk(node.iter))
        elif isinstance(node, ast.AugAssign):
            changed = [node.target]
        elif isinstance(node, (ast.Subscript, ast.Attribute)):
            changed = [] if isinstance(node.ctx, ast.Load) else list(ast.walk(node.value))
        elif isinstance(node, ast.Expr):
            changed = list(ast.walk(node))
        yield from (x.id for x in changed if isinstance(x, ast.Name))


def _imported_as(alias: ast.alias) -> str:
    return alias.asname or alias.name.partition(".")[0]


def _bound(statement: ast.stmt) -> Iterator[str]:
    """Yield the names that a statement at the top of a module binds."""
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield statement.name
        return
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        yield from map(_imported_as, statement.names)
        return
    for node in ast.walk(statement):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from _bound(node)
