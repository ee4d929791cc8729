"""Build the documentation with Sphinx: python .ci/docs.py

Writes build/docs from the project's pages and the public docstrings. A warning is an error.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from public_names import MODULES, load, members, names

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "build" / "docs"
SOURCE = ROOT / "build" / "docs-source"
# Folders that contain pages, or files to which pages link.
FOLDERS = ("fa_numba", "experiments", "tests", "figures", ".ci")
PAGES = {
    "Use": ("README", "fa_numba/guide", "fa_numba/options", "api/index", "fa_numba/README"),
    "Inside": ("fa_numba/architecture", "fa_numba/kernels/README", "fa_numba/emulator/README"),
    "Results": ("paper_repro", "figures/README", "figures/data/README", "experiments/README"),
    "Project": ("CONTRIBUTING", "tests/README", "CHANGELOG"),
}


def write_source() -> None:
    """Write the folder that Sphinx reads: a copy of the project, an index and the API pages."""
    shutil.rmtree(SOURCE, ignore_errors=True)
    (SOURCE / "api").mkdir(parents=True)
    for folder in FOLDERS:
        unwanted = shutil.ignore_patterns("__pycache__", "quick", "filtered", "partial")
        shutil.copytree(ROOT / folder, SOURCE / folder, ignore=unwanted)
    for path in ROOT.iterdir():
        if path.is_file() and not path.name.startswith("."):
            shutil.copy(path, SOURCE)
    lines = ["# fa_numba", "", "FlashAttention in Python, in both loop orders.", ""]
    for caption, pages in PAGES.items():
        lines += ["```{toctree}", ":maxdepth: 2", f":caption: {caption}", "", *pages, "```", ""]
    lines += ["```{toctree}", ":hidden:", ":glob:", "", "figures/tables/*", "```", ""]
    (SOURCE / "index.md").write_text("\n".join(lines), "utf-8")
    modules = ["API reference", "=" * 13, "", ".. toctree::", "   :maxdepth: 1", ""]
    modules += [f"   {name}" for name in MODULES]
    (SOURCE / "api" / "index.rst").write_text("\n".join([*modules, ""]), "utf-8")
    for name, title in MODULES.items():
        (SOURCE / "api" / f"{name}.rst").write_text(_page(name, title), "utf-8")


def _page(name: str, title: str) -> str:
    """Return the API page of a module: its docstring and a table of its names."""
    module = load(name)
    heading = f"{title}: ``{name}``"
    lines = [heading, "=" * len(heading), "", f".. automodule:: {name}", "   :no-members:", ""]
    lines += [f".. currentmodule:: {name}", "", ".. autosummary::", "   :toctree: generated", ""]
    for public in names(module):
        lines.append(f"   {public}")
        value = getattr(module, public)
        if isinstance(value, type):
            lines += [f"   {public}.{member}" for member in members(value)]
    return "\n".join([*lines, ""])


def main() -> int:
    """Build the pages; return Sphinx's exit status."""
    shutil.rmtree(OUT, ignore_errors=True)  # Sphinx would reuse its old list of pages
    write_source()
    options = ["-b", "html", "-W", "--keep-going", "-q", "-j", "auto", "-c", str(ROOT / ".ci")]
    status = subprocess.run([sys.executable, "-m", "sphinx", *options, SOURCE, OUT]).returncode
    if status == 0:
        print(f"open {OUT.relative_to(ROOT)}/index.html")
    return status


if __name__ == "__main__":
    sys.exit(main())
