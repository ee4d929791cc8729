"""Figures that stand as they are: nothing that they could come from has changed since."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterable
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from . import registry
from .kept import EXPERIMENTS, PACKAGE
from .options import FIGURES
from .store import StoreError, write_if_changed

_KINDS = (".svg", ".png", ".gif", ".html")
_SOURCES = ("*.py", "*.csv", "*.html", "*.css", "*.js")
_LIBRARIES = ("matplotlib", "numpy", "pillow", "fonttools")


class Drawn:
    """What each figure in a folder was last drawn from, kept there in ``partial/drawn.json``.

    That is a digest of every source, of the libraries' versions, of the experiment's data and of
    the figure's own files: a figure that was changed or removed by hand is drawn again.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._path = folder, folder / "partial" / "drawn.json"
        self._sources: str | None = None
        self._known: dict[str, str] = {}
        with suppress(OSError, ValueError):
            known = json.loads(self._path.read_text("utf-8"))
            self._known = known if isinstance(known, dict) else {}

    def stands(self, name: str) -> bool:
        """Whether drawing this experiment's figures would give the files that are there."""
        known = self._known.get(name)
        return known is not None and known == self._now(name)

    def keep(self, names: Iterable[str]) -> None:
        """Write down that these were drawn just now; without a place to write nothing is kept."""
        self._known.update({name: self._now(name) for name in names})
        with suppress(OSError, StoreError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_if_changed(self._path, json.dumps(self._known, indent=2, sort_keys=True) + "\n")

    def _now(self, name: str) -> str:
        if self._sources is None:
            parts = [platform.python_version()]
            for library in _LIBRARIES:
                with suppress(metadata.PackageNotFoundError):
                    parts.append(f"{library} {metadata.version(library)}")
            folders = (PACKAGE, EXPERIMENTS)
            files = [p for f in folders for kind in _SOURCES for p in f.rglob(kind)]
            self._sources = "\n".join(parts) + _digest(files)
        files = [path for path in (FIGURES / "data").glob("*") if path.is_file()]
        module = registry.load(name)
        for folder in {FIGURES, self._folder}:
            for read in (name, *registry.reads(module)):
                files += [path for path in (folder / "data" / read).rglob("*") if path.is_file()]
        for figure in (name, *registry.figures(module)):
            files += [self._folder / f"{figure}{kind}" for kind in _KINDS]
        return hashlib.sha256((self._sources + _digest(files)).encode()).hexdigest()


def _digest(files: Iterable[Path]) -> str:
    """Of files' places and contents, and of which of them there are."""
    found = hashlib.sha256()
    for path in sorted(set(files)):
        with suppress(FileNotFoundError):
            found.update(f"{path}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()
