"""Which run noticed a planted fault last: this run is tried first the next time.

To find the runs that execute a fault takes longer than most of these runs. A process therefore
writes down which run noticed a fault, in the folder of the compiled kernels. What is written there
is a hint and no result: the fault is planted again, and the run must notice it again. Otherwise all
runs that execute the fault are tried.

The file `data/noticed.csv` contains hints for the sample of faults that is tried by default. A
machine that has no hints of its own, such as a new checkout's, uses these hints.
"""

import contextlib
import csv
import functools
import os
import sqlite3
from pathlib import Path

import remembered

FILE = "noticed.sqlite"
HINTS = Path(__file__).parent / "data" / "noticed.csv"


@functools.cache
def _connection(_process):
    """The database of hints for this process; None if there is no folder."""
    if remembered.FOLDER is None:
        return None
    with contextlib.suppress(OSError, sqlite3.Error):
        remembered.FOLDER.mkdir(parents=True, exist_ok=True)
        found = sqlite3.connect(remembered.FOLDER / FILE, timeout=5, isolation_level=None)
        found.execute("PRAGMA synchronous = OFF")
        found.execute("CREATE TABLE IF NOT EXISTS noticed (fault PRIMARY KEY, unit, title)")
        return found
    return None


def hint(fault):
    """Return the unit and the title of the run that noticed a fault last; None if none is known."""
    connection = _connection(os.getpid())
    if connection is not None:
        with contextlib.suppress(sqlite3.Error):
            asked = "SELECT unit, title FROM noticed WHERE fault = ?"
            found = connection.execute(asked, (fault,)).fetchone()
            if found is not None:
                return found
    return in_file().get(fault)


@functools.cache
def in_file():
    """Return the hints of the file `HINTS`: a dict from a fault to a run's unit and title."""
    with HINTS.open(newline="") as file:
        return {row["fault"]: (row["unit"], row["title"]) for row in csv.DictReader(file)}


def write(faults):
    """Write the hints for these faults to the file `HINTS`, as far as they are known."""
    known = {fault: hint(fault) for fault in sorted(set(faults))}
    with HINTS.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("fault", "unit", "title"))
        writer.writerows((fault, *found) for fault, found in known.items() if found)


def note(fault, unit, title):
    """Write down that a run noticed a fault; nothing happens if that is not possible."""
    connection = _connection(os.getpid())
    if connection is not None:
        with contextlib.suppress(sqlite3.Error):
            given = fault, unit, title
            connection.execute("INSERT OR REPLACE INTO noticed VALUES (?, ?, ?)", given)
