"""Of a function's results the statements that it reaches, without docstrings and comments."""

import ast
import functools
import importlib.util
import io
import tokenize
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

# A name of a module: (module, name), or (module, None) for the module itself.
Place = tuple[str, str | None]
WHOLE = "*"


def plain(text: str) -> str:
    """Python's text without docstrings, which have lines of their own, comments and lines that are
    empty then; three dots stand for a docstring that is all there is.
    """
    return "".join(_plain_lines(text).values())


def _plain_lines(text: str) -> dict[int, str]:
    lines = io.StringIO(text).readlines()
    gone: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        n, column = token.start
        if token.type == tokenize.COMMENT:
            lines[n - 1] = lines[n - 1][:column].rstrip(" ") + "\n"
        if token.type == tokenize.NL and not lines[n - 1].strip():
            gone.add(n)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if ast.get_docstring(node, clean=False) is None:
                continue
            first = node.body[0]
            gone.update(range(first.lineno, (first.end_lineno or 0) + 1))
            if len(node.body) == 1 and not isinstance(node, ast.Module):
                gone.discard(first.lineno)
                lines[first.lineno - 1] = " " * first.col_offset + "...\n"
    return {n: line for n, line in enumerate(lines, 1) if n not in gone}


@dataclass(frozen=True)
class _Statement:
    """One of a module's outermost: what it defines, its text, what it may ask for."""

    defines: frozenset[str]
    text: str
    uses: frozenset[tuple[str, str | None]]  # a name and, where one is asked for, its attribute
    imports: Mapping[str, Place]  # within functions


@dataclass
class Module:
    name: str
    imports: dict[str, Place] = field(default_factory=dict)
    statements: list[_Statement] = field(default_factory=list)


@functools.cache
def read(name: str, path: Path, written: int) -> Module:
    """A module's statements; read again only when the file was written again."""
    text = path.read_bytes().decode().replace("\r\n", "\n")
    package = name if path.stem == "__init__" else name.rpartition(".")[0]
    found, lines = Module(name), _plain_lines(text)
    for node in ast.parse(text).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            found.imports |= _imported(node, package)
            continue
        decorators = getattr(node, "decorator_list", [])
        first = min([node.lineno, *(d.lineno for d in decorators)])
        inner = [x for x in ast.walk(node) if isinstance(x, ast.Import | ast.ImportFrom)]
        within = {k: place for x in inner for k, place in _imported(x, package).items()}
        gone = {n for x in inner for n in range(x.lineno, (x.end_lineno or x.lineno) + 1)}
        found.statements.append(
            _Statement(
                frozenset(_defined(node)),
                "".join(
                    lines.get(n, "")
                    for n in range(first, (node.end_lineno or first) + 1)
                    if n not in gone  # a name that is imported is bound, see `Slice.texts`
                ),
                frozenset(_used(ast.Module([node], []))),
                within,
            )
        )
    return found


def _imported(node: ast.Import | ast.ImportFrom, package: str) -> dict[str, Place]:
    if isinstance(node, ast.Import):
        return {(a.asname or a.name).split(".")[0]: (a.name, None) for a in node.names}
    base = "." * node.level + (node.module or "")
    base = importlib.util.resolve_name(base, package)
    return {alias.asname or alias.name: (base, alias.name) for alias in node.names}


def _defined(node: ast.stmt) -> Iterator[str]:
    """The names that a statement gives a value; a change of one that has it defines none."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        names = [
            each.elts if isinstance(each, ast.Tuple | ast.List) else [each] for each in targets
        ]
        flat = [name for some in names for name in some]
        if all(isinstance(name, ast.Name) for name in flat):
            yield from (name.id for name in flat if isinstance(name, ast.Name))


# What has names of its own.
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, *_COMPREHENSIONS)


def _local(scope: ast.AST) -> set[str]:
    """The names of a scope's own, without those of scopes within and of its imports."""
    found, todo = set(), list(ast.iter_child_nodes(scope))
    while todo:
        each = todo.pop()
        if isinstance(each, ast.arg):
            found.add(each.arg)
        elif isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
            found.add(each.id)
        elif isinstance(each, ast.FunctionDef | ast.ExceptHandler):
            found.add(each.name or "")
        todo += [] if isinstance(each, (*_SCOPES, ast.ClassDef)) else ast.iter_child_nodes(each)
    return found


def _used(node: ast.AST, local: frozenset[str] = frozenset()) -> Iterator[tuple[str, str | None]]:
    """A module's names, with the attribute that is asked of them, or alone."""
    for each in ast.iter_child_nodes(node):
        if isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name):
            found: tuple[str, str | None] = each.value.id, each.attr
        elif isinstance(each, ast.Name):
            found = each.id, None
        elif isinstance(each, _SCOPES):
            if isinstance(each, _COMPREHENSIONS):
                outside = [each.generators[0].iter]
            else:  # a function's decorators and defaults
                outside = [*getattr(each, "decorator_list", ()), *each.args.defaults]
                outside += filter(None, each.args.kw_defaults)
            yield from _used(ast.Tuple(outside), local)
            yield from _used(each, local | _local(each))
            continue
        else:
            yield from _used(each, local)
            continue
        if found[0] not in local:
            yield found


def short(module: str) -> str:
    """A module's name wherever it stands: a file that is moved is the same."""
    return module.rpartition(".")[2].lstrip("_")


class Slice:
    """All that names of modules that `find` has a file of reach, but modules in `without`."""

    def __init__(self, find: Callable[[str], Path | None], without: Collection[str] = ()) -> None:
        self._find, self._without = find, without
        self._taken: dict[str, dict[int, str]] = {}
        self._bound: dict[str, set[str]] = {}
        self._seen: set[Place] = set()

    def take(self, module: str, name: str | None) -> None:
        """Add a name of a module, or the module with all that it has, and what these reach."""
        todo: list[tuple[str, str]] = [(module, name or WHOLE)]
        while todo:
            place = todo.pop()
            if place in self._seen or place[0] in self._without:
                continue
            self._seen.add(place)
            todo += list(self._reached(*place))

    def texts(self) -> dict[str, str]:
        """Module -> what was taken of it and its imports; a moved module's text stays the same."""
        return {
            name: "\n".join([*sorted(self._bound[name]), *(mine[n] for n in sorted(mine))])
            for name, mine in self._taken.items()
        }

    def _reached(self, name: str, wanted: str) -> Iterator[tuple[str, str]]:
        path = self._find(name)
        if path is None:
            return
        inner = self._find(f"{name}.{wanted}")
        if inner is not None:
            yield f"{name}.{wanted}", WHOLE
            return
        module = read(name, path, path.stat().st_mtime_ns)
        if wanted in module.imports:  # passed on
            yield from self._followed(module, module.imports, wanted, None)
            return
        mine = self._taken.setdefault(name, {})
        self._bound.setdefault(name, set())
        own = frozenset[str]().union(*(each.defines for each in module.statements))
        known = wanted in own
        for n, each in enumerate(module.statements):
            if n in mine or (known and each.defines and wanted not in each.defines):
                continue
            mine[n] = each.text
            for used, attribute in each.uses:
                if used in own:
                    yield name, used
                else:
                    yield from self._followed(
                        module, {**module.imports, **each.imports}, used, attribute
                    )

    def _followed(
        self, module: Module, imports: Mapping[str, Place], used: str, attribute: str | None
    ) -> Iterator[tuple[str, str]]:
        """What a name that is imported stands for."""
        if used not in imports:
            return
        base, name = imports[used]
        self._taken.setdefault(module.name, {})
        bound = self._bound.setdefault(module.name, set())
        inner = base if name is None else f"{base}.{name}"
        if self._find(inner) is not None:
            bound.add(f"{used} = {short(inner)}")
            yield inner, attribute or WHOLE
            return
        bound.add(f"{used} = {base if self._find(base) is None else short(base)} {name or ''}")
        if name is not None:
            yield base, name
