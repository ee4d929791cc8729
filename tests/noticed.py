"""Which run noticed a planted fault last: this run is tried first the next time.

To find the runs that execute a fault takes longer than most of these runs. A process therefore
writes down which run noticed a fault, in the folder of the compiled kernels. What is written there
is a hint and no result: the fault is planted again, and the run must notice it again. Otherwise all
runs that execute the fault are tried.
"""

import contextlib
import functools
import os
import sqlite3

import remembered

FILE = "noticed.sqlite"


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
            return connection.execute(asked, (fault,)).fetchone()
    return None


def note(fault, unit, title):
    """Write down that a run noticed a fault; nothing happens if that is not possible."""
    connection = _connection(os.getpid())
    if connection is not None:
        with contextlib.suppress(sqlite3.Error):
            given = fault, unit, title
            connection.execute("INSERT OR REPLACE INTO noticed VALUES (?, ?, ?)", given)
