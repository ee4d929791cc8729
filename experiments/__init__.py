"""The experiments: modules that measure numbers, draw figures and make tables.

An experiment is one file in this folder. `python -m experiments` finds the file automatically. The
file contains

    a docstring               `list` prints the first sentence, `list NAME` the complete docstring
    measure(options, bench)   measures, and yields rows
    draw(rows)                draws the figure from stored rows
    table(rows)               makes the table from stored rows (optional)

`lab.record.registry.Experiment` describes these functions, and the further parts that an experiment
may have. The table is written to figures/tables/NAME.md, between the markers `<!-- table: NAME -->`
and `<!-- end: NAME -->`, where NAME is the module's name.

`python -m experiments --help` lists the commands. `load` returns recorded numbers as a table. The
folder `lab` contains code that several experiments share. The folder `beside` contains code that
only one experiment or command needs. The folder `verdicts` compares our numbers with the papers'
numbers.
"""

from __future__ import annotations

from typing import Any

__all__ = ["load"]


def load(experiment: str, machine: str | None = None, *, frame: bool | None = None) -> Any:
    """Return the recorded numbers of an experiment as a table.

    Each line of the table is one number. figures/data/README.md describes the columns, the series,
    the metrics and the units.

    Parameters
    ----------
    experiment : str
        Name of the experiment, such as "loop_order".
    machine : str, optional
        Machine whose numbers are returned: a GPU such as "nvidia-h200", "emulator" for counts, or
        "model" for closed forms. Default: all machines.
    frame : bool, optional
        Whether the table is a pandas DataFrame. Default: a DataFrame if pandas is installed, else a
        dictionary.

    Returns
    -------
    pandas.DataFrame or dict of str to numpy.ndarray
        The columns ``machine`` and ``sweep``, followed by the columns of the CSV files. A sweep is
        a part of the experiment in which one quantity varies, such as "heads". If an experiment
        has only one sweep, the column ``sweep`` contains the name of the experiment. A missing
        number is NaN (in integer columns of a DataFrame: NA).

    Raises
    ------
    ValueError
        If there are no recorded numbers of this experiment, or none on this machine.
    ImportError
        If `frame` is true and pandas is not installed.

    See Also
    --------
    experiments.lab.record.Row : One line of the table.

    Examples
    --------
    >>> import experiments
    >>> columns = experiments.load("loop_order", "nvidia-h200", frame=False)
    >>> over_heads = (columns["sweep"] == "heads") & (columns["metric"] == "time")
    >>> sorted(set((columns["batch"] * columns["heads_q"])[over_heads].tolist()))
    [1, 4, 16, 32, 64, 128]
    """
    from .lab.record import frames

    return frames.load(experiment, machine, frame=frame)
