"""What names of a module reach of it, and what that imports; programs without words."""

import ast
import functools
import importlib.util
import io
import tokenize
from collections.abc import Collection, Iterator
from pathlib import Path


@functools.cache
def plain(path: Path, written: int) -> tuple[dict[int, str], list[ast.stmt]]:
    """(the lines of Python by their numbers, without docstrings, which have lines of their own,
    comments and lines that are empty then; its statements). Three dots stand for a docstring that
    is all there is. Read again only when the file was written again.
    """
    text = path.read_bytes().decode().replace("\r\n", "\n")
    lines = io.StringIO(text).readlines()
    gone: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        n, column = token.start
        if token.type == tokenize.COMMENT:
            lines[n - 1] = lines[n - 1][:column].rstrip(" ") + "\n"
        if token.type == tokenize.NL and not lines[n - 1].strip():
            gone.add(n)
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if ast.get_docstring(node, clean=False) is None:
                continue
            first = node.body[0]
            gone.update(range(first.lineno, (first.end_lineno or 0) + 1))
            if len(node.body) == 1 and not isinstance(node, ast.Module):
                gone.discard(first.lineno)
                lines[first.lineno - 1] = " " * first.col_offset + "...\n"
    return {n: line for n, line in enumerate(lines, 1) if n not in gone}, tree.body


def reached(
    module: str, path: Path, names: Collection[str | None]
) -> tuple[str, list[tuple[str, str | None]]]:
    """(the text of a module's statements that these names reach, or of all for None; what they
    import: a module and a name in it). A name is told by its letters: what a function calls its own
    reaches what the module calls so too. A statement that defines none is always reached.
    """
    lines, left = plain(path, path.stat().st_mtime_ns)
    package = module if path.stem == "__init__" else module.rpartition(".")[0]
    above = dict(bound for node in left for bound in _imported(node, package))
    left = [node for node in left if not isinstance(node, ast.Import | ast.ImportFrom)]
    wanted, taken = set(names), []
    while found := [n for n in left if None in names or not (own := _defined(n)) or own & wanted]:
        left = [node for node in left if node not in found]
        taken += found
        wanted |= {x.id for n in found for x in ast.walk(n) if isinstance(x, ast.Name)}
    taken.sort(key=lambda node: node.lineno)
    numbers = (n for node in taken for n in range(_first(node), (node.end_lineno or 0) + 1))
    bound = {name: place for name, place in sorted(above.items()) if name in wanted}
    within = (x for node in taken for x in ast.walk(node))
    places = [*bound.values(), *(place for x in within for _, place in _imported(x, package))]
    return f"{bound}\n" + "".join(lines.get(n, "") for n in numbers), places


def _imported(node: ast.AST, package: str) -> Iterator[tuple[str, tuple[str, str | None]]]:
    """A name, and what it stands for: a module and a name in it."""
    if isinstance(node, ast.Import):
        yield from ((a.asname or a.name.split(".")[0], (a.name, None)) for a in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
        yield from ((a.asname or a.name, (base, a.name)) for a in node.names)


def _first(node: ast.stmt) -> int:
    return min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", []))])


def _defined(node: ast.stmt) -> set[str]:
    """The names that a statement gives a value; a change of one that has it defines none."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        inner = [x for target in targets for x in ast.walk(target)]
        if not any(isinstance(x, ast.Subscript | ast.Attribute) for x in inner):
            return {x.id for x in inner if isinstance(x, ast.Name)}
    return set()
