"""Write the type stubs of the packages of parts, for editors and mypy: python .ci/part_names.py

A kernel calls ``load.q``. The function ``bind`` in fa_numba/parts/namespace.py makes ``load.q`` by
calling ``make_q`` of a module. Editors and mypy do not know this. They read the ``__init__.pyi``
files of the packages of parts. Such a file contains a class for each module, in which ``q`` is an
import of ``make_q``. "Go to definition" on ``load.q`` then opens ``make_q``, and mypy reports the
unknown name ``load.nothing``. Python does not read these files.

With --check, the script writes nothing, and its exit status is 1 if a file is not up to date.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
# Maps a package to the modules that kernels bind, in addition to the modules in its ``__all__``.
PACKAGES = {
    "fa_numba.parts": ("bind", "gradients", "grid"),
    "fa_numba.parts.fragments": ("pairs",),
    "fa_numba.parts.simt": (),
    "fa_numba.parts.mma": (),
    "fa_numba.parts.wgmma": (),
}
HEAD = """\
# Written by .ci/part_names.py; run it again after a part is added, renamed or removed.
# mypy: disable-error-code="misc"
"""
# Lines of a stub for functions of a package, which are not modules.
FUNCTIONS = {
    "bind": "from fa_numba.parts.namespace import bind as bind",
    "pipelines": "def pipelines(spec: object) -> tuple[type[pipeline], ...]: ...",
}


def origins(module: ModuleType) -> Iterator[tuple[str, str, str]]:
    """Yield the names that a module defines or imports for others, each with its origin.

    An item is (name, module of the definition, name in that module).
    """
    own = module.__name__
    for node in ast.parse(Path(str(module.__file__)).read_text("utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, own, node.name
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((x.name, node.module, x.name) for x in node.names if x.asname == x.name)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Name):
            for target in node.targets:  # a second name of a function
                yield ast.unparse(target), own, node.value.id


def names(module: ModuleType) -> dict[str, tuple[str, str]]:
    """Return the names that ``bind`` finds in a module.

    The result maps the name in kernels to the pair (module of the definition, name in that module).
    """
    from fa_numba.device.function import DeviceFunction
    from fa_numba.parts.namespace import takes_a_spec_alone

    found: dict[str, tuple[str, str]] = {}
    for name, where, there in origins(module):
        value = getattr(module, name)
        if name.startswith("make_") and takes_a_spec_alone(value):
            found[name.removeprefix("make_")] = where, there
        elif not name.startswith("_") and isinstance(value, DeviceFunction):
            found.setdefault(name, (where, there))
    return found


def stub(package: str) -> str:
    """Return the text of a package's ``__init__.pyi``."""
    found, lines = importlib.import_module(package), [HEAD]
    for name in PACKAGES[package]:
        if name not in FUNCTIONS:
            importlib.import_module(f"{package}.{name}")
    for name in sorted((*PACKAGES[package], *getattr(found, "__all__", ()))):
        if name in FUNCTIONS:
            lines.append(FUNCTIONS[name])
            continue
        module = importlib.import_module(getattr(found, name).__name__)
        inside = [
            f"    from {where} import {known_as} as {own}"
            for own, (where, known_as) in sorted(names(module).items())
        ]
        lines.append("\n".join([f"class {name}:", *(inside or ["    ..."])]))
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> int:
    """Write the files, or with --check print the names of files that are not up to date.

    Return the exit status.
    """
    sys.path.insert(0, str(ROOT))
    old = []
    for package in PACKAGES:
        path, text = ROOT.joinpath(*package.split("."), "__init__.pyi"), stub(package)
        if path.exists() and path.read_text("utf-8") == text:
            continue
        old.append(path.relative_to(ROOT).as_posix())
        if "--check" not in arguments:
            path.write_text(text, "utf-8")
    if "--check" not in arguments or not old:
        return 0
    print(f"run python .ci/part_names.py, because parts changed: {', '.join(old)}")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
