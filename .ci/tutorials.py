"""Make a notebook of each tutorial, with its outputs: python .ci/tutorials.py

Writes build/tutorials/*.ipynb from experiments/tutorials. A tutorial that needs a GPU gets no
outputs on a machine without a GPU. An error in a cell ends the command.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "experiments" / "tutorials"
OUT = ROOT / "build" / "tutorials"
NEEDS_GPU = "needs a CUDA GPU"  # in the text of a tutorial's first cell


def main() -> int:
    """Write the notebooks; return 0."""
    sys.path.insert(0, str(ROOT))
    from fa_numba import device

    os.environ["PYTHONPATH"] = str(ROOT)  # for the Jupyter kernels that run the cells
    OUT.mkdir(parents=True, exist_ok=True)
    for path in sorted(SOURCE.glob("lesson_*.py")):
        notebook = jupytext.read(path)
        if NEEDS_GPU in notebook.cells[0].source and not device.on_gpu():
            print(f"{path.name}: not run, because it needs a GPU")
        else:
            quiet = ["--log-level=ERROR"]
            client = NotebookClient(notebook, timeout=300, extra_arguments=quiet)
            client.execute(cwd=str(SOURCE))
        written = OUT / f"{path.stem}.ipynb"
        nbformat.write(notebook, written)
        print(f"open {written.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
