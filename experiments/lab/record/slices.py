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
    """One of a module's outermost: what it defines, its text, the names and attributes in it, and
    which of these stand without an attribute.
    """

    defines: frozenset[str]
    text: str
    uses: frozenset[str]
    bare: frozenset[str]
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
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
        every = list(ast.walk(node))
        inner = [x for x in every if isinstance(x, ast.Import | ast.ImportFrom)]
        asked = {id(x.value): x.attr for x in every if isinstance(x, ast.Attribute)}
        names = [x for x in every if isinstance(x, ast.Name)]
        found.statements.append(
            _Statement(
                frozenset(_defined(node)),
                "".join(lines.get(n, "") for n in range(first, (node.end_lineno or first) + 1)),
                frozenset([*asked.values(), *(x.id for x in names)]),
                frozenset(x.id for x in names if id(x) not in asked),
                {k: place for x in inner for k, place in _imported(x, package).items()},
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
        inner = [x for target in targets for x in ast.walk(target)]
        if not any(isinstance(x, ast.Subscript | ast.Attribute) for x in inner):
            yield from (x.id for x in inner if isinstance(x, ast.Name))


class Slice:
    """All that names of modules that `find` has a file of reach, but modules in `without`. A name
    is told by its letters: what a function calls its own reaches what the module calls so too.
    """

    def __init__(self, find: Callable[[str], Path | None], without: Collection[str] = ()) -> None:
        self._find, self._without = find, without
        self._taken: dict[str, dict[int, str]] = {}
        self._bound: dict[str, set[str]] = {}
        self._seen: set[Place] = set()

    def take(self, module: str, name: str | None) -> None:
        """Add a name of a module, or the module with all that it has, and what these reach."""
        todo: list[Place] = [(module, name)]
        while todo:
            place = todo.pop()
            if place not in self._seen and place[0] not in self._without:
                self._seen.add(place)
                todo += self._reached(*place)

    def texts(self) -> dict[str, str]:
        """Module -> what was taken of it and of its imports."""
        return {
            name: "\n".join([*sorted(self._bound[name]), *(mine[n] for n in sorted(mine))])
            for name, mine in self._taken.items()
        }

    def _reached(self, name: str, wanted: str | None) -> Iterator[Place]:
        path = self._find(name)
        if path is None:
            return
        module = read(name, path, path.stat().st_mtime_ns)
        mine = self._taken.setdefault(name, {})
        bound = self._bound.setdefault(name, set())
        own = frozenset[str]().union(*(each.defines for each in module.statements))
        if wanted in module.imports and wanted not in own:  # passed on
            yield from self._followed(module.imports[wanted], [None])
        elif wanted is None or wanted in own:
            for n, each in enumerate(module.statements):
                if n in mine or (wanted and each.defines and wanted not in each.defines):
                    continue
                mine[n] = each.text
                yield from ((name, used) for used in each.uses & own)
                imports = {**module.imports, **each.imports}
                for used in imports.keys() & each.uses - own:
                    bound.add(f"{used} = {imports[used]}")
                    whole = used in each.bare
                    yield from self._followed(imports[used], [None] if whole else each.uses)

    def _followed(self, place: Place, uses: Collection[str | None]) -> Iterator[Place]:
        """What an import stands for: a name, or of a module what is used of it, None for all."""
        base, name = place
        module = base if name is None else f"{base}.{name}"
        if self._find(module) is None:
            yield place
        else:
            yield from ((module, used) for used in uses)
