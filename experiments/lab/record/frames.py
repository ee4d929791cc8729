"""Makes a table of recorded numbers: a pandas DataFrame, or a dictionary of columns."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from . import registry
from .options import FIGURES
from .store import COLUMNS, Row, Store, unknown

# Columns of integers in which a cell may be empty.
_OPTIONAL = ("Br", "Bc", "n")
_NUMBERS = ("value", "p20", "p80")


def load(experiment: str, machine: str | None = None, *, frame: bool | None = None) -> Any:
    """Return the recorded numbers of an experiment as a table; see `experiments.load`."""
    has_pandas = importlib.util.find_spec("pandas") is not None
    if frame and not has_pandas:
        raise ImportError(
            "a DataFrame needs pandas; run pip install '.[data]', or pass frame=False for a "
            "dictionary of columns"
        )
    store = Store(FIGURES)
    recorded = sorted(path.name for path in (store.root / "data").iterdir() if path.is_dir())
    if experiment not in recorded:
        raise ValueError(unknown("recorded experiment", experiment, recorded))
    machines = store.machines(experiment)
    if machine is not None and machine not in machines:
        raise ValueError(
            f"machine must have a recording of {experiment}: {' or '.join(machines)}, got "
            f"{machine!r}"
        )
    found = [
        row
        for each in ([machine] if machine is not None else machines)
        for row in store.read(experiment, each)
    ]
    columns = _columns(experiment, found)
    if not (has_pandas if frame is None else frame):
        return columns
    import pandas

    table = pandas.DataFrame(columns)
    return table.astype(dict.fromkeys(_OPTIONAL, "Int64"))


def _columns(experiment: str, rows: Sequence[Row]) -> dict[str, np.ndarray]:
    """Return the columns of the rows, as a dictionary {name: array}.

    In addition to the columns of the CSV files there are the columns "machine" and "sweep".
    """
    known = experiment in registry.names()
    sweep_of = registry.sweeps(registry.load(experiment)) if known else None
    columns: dict[str, np.ndarray] = {
        "machine": np.array([row.machine for row in rows], object),
        "sweep": np.array([sweep_of(row) if sweep_of else experiment for row in rows], object),
    }
    for name in COLUMNS:
        cells = [getattr(row, "pass_" if name == "pass" else name) for row in rows]
        columns[name] = _array(name, cells)
    return columns


def _array(name: str, cells: Iterable[Any]) -> np.ndarray:
    if name in (*_OPTIONAL, *_NUMBERS):
        return np.array([math.nan if cell is None else cell for cell in cells], np.float64)
    cells = list(cells)
    return np.array(cells, object if cells and isinstance(cells[0], str) else None)
