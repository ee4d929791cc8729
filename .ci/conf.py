"""Sphinx's configuration; .ci/docs.py runs Sphinx with it."""

import re
import sys
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / ".ci")]

from public_names import load  # noqa: E402

load("fa_numba.torch")  # a stand-in for torch, where it is not installed

project = "fa_numba"
author = copyright = "The fa_numba authors"
release = metadata.version("fa_numba")
extensions = [
    "myst_parser",
    "numpydoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.mathjax",
    "sphinx.ext.viewcode",
]
root_doc = "index"
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
exclude_patterns = ["**/__pycache__", "**/.*", ".ci"]  # .ci has the page of a package index
templates_path: list[str] = []
html_theme = "pydata_sphinx_theme"
html_title = "fa_numba"
html_show_sourcelink = False
html_theme_options = {"show_nav_level": 2, "navigation_with_keys": False, "show_toc_level": 2}
html_theme_options["header_links_before_dropdown"] = 4

autosummary_generate = True
autodoc_typehints = "none"  # the docstrings say them
default_role = "py:obj"  # a name in single backquotes is a link, where there is such a name
numpydoc_show_class_members = False
numpydoc_xref_param_type = False
myst_heading_anchors = 4
myst_enable_extensions = ["dollarmath"]
myst_links_external_new_tab = False
# Code examples of other languages and shells are shown as they are.
suppress_warnings = ["misc.highlighting_failure"]

LINK = re.compile(r"(?<!!)\[([^][]+)\]\(([^)#:]+)\)")


def _without_folders(app, docname, source):
    """Turn links to folders, which are no page here, into their words."""
    page = Path(app.env.doc2path(docname))

    def shown(link):
        return link[1] if (page.parent / link[2]).is_dir() else link[0]

    source[0] = LINK.sub(shown, source[0])


def _literal_blocks(app, what, name, value, options, lines):
    """Show an indented block of a docstring as it is: a table or a formula."""
    shown, last = [], ""
    for line in lines:
        deeper = len(line) - len(line.lstrip()) > len(last) - len(last.lstrip())
        if line.strip() and last.strip() and deeper and shown and not shown[-1].strip():
            indent = " " * (len(last) - len(last.lstrip()))
            shown += [f"{indent}.. code-block:: text", ""]
        shown.append(line)
        last = line if line.strip() else last
    lines[:] = shown


def setup(app):
    """Register what reads each page and each docstring before Sphinx does."""
    app.connect("autodoc-process-docstring", _literal_blocks, priority=100)
    app.connect("source-read", _without_folders)
