"""Sphinx's configuration; .ci/docs.py runs Sphinx with it."""

import re
import sys
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / ".ci")]

from public_names import load  # noqa: E402

load("fa_numba.torch")  # uses a stand-in for torch if torch is not installed

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
exclude_patterns = ["**/__pycache__", "**/.*", ".ci"]  # .ci contains the page for package indexes
templates_path: list[str] = []
html_theme = "pydata_sphinx_theme"
html_title = "fa_numba"
html_show_sourcelink = False
html_theme_options = {"show_nav_level": 2, "navigation_with_keys": False, "show_toc_level": 2}
html_theme_options["header_links_before_dropdown"] = 4

autosummary_generate = True
autodoc_typehints = "none"  # the docstrings contain the types
default_role = "py:obj"  # a name in single backquotes becomes a link if the name is documented
numpydoc_show_class_members = False
numpydoc_xref_param_type = False
myst_heading_anchors = 4
myst_enable_extensions = ["dollarmath"]
myst_links_external_new_tab = False
# Code that cannot be highlighted is shown without colours.
suppress_warnings = ["misc.highlighting_failure"]

LINK = re.compile(r"(?<!!)\[([^][]+)\]\(([^)#:]+)\)")


def _without_folders(app, docname, source):
    """Replace links to folders by their text, because folders are no pages of the documentation.

    Sphinx calls this function for each page. `source` is a list with the text of the page.
    """
    page = Path(app.env.doc2path(docname))

    def shown(link):
        """Return the text for a match of `LINK`."""
        return link[1] if (page.parent / link[2]).is_dir() else link[0]

    source[0] = LINK.sub(shown, source[0])


def _literal_blocks(app, what, name, value, options, lines):
    """Make indented blocks of a docstring literal blocks: they are tables or formulas.

    Sphinx calls this function for each docstring. `lines` is changed in place.
    """
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
    """Register the functions that change each page and each docstring before Sphinx parses it."""
    app.connect("autodoc-process-docstring", _literal_blocks, priority=100)
    app.connect("source-read", _without_folders)
