"""Results in float64 that tests compute once: in a process, and on disk until their code changes.

Several tests hold their results against the same float64 arrays. The processes that run tests, and
later runs, find these arrays in a database in the folder of the compiled kernels. A database is of
one state of the code: of the reference, of every module that the reference imports, and of the
modules of `tests` that compute the results.
"""

import contextlib
import functools
import hashlib
import inspect
import os
import pickle
import platform
import sqlite3
import threading
import time
from pathlib import Path
from types import CodeType, FunctionType, ModuleType, SimpleNamespace

import numpy as np

from fa_numba import Tiles
from fa_numba.device import kernel_cache

HERE = Path(__file__).parent
MOST_REMEMBERED, LARGEST = 256, 1 << 18  # results of a function, and bytes of a call's arrays
MOST_DATABASES = 4  # the others are deleted, those first that were not used for longest
SHORT = 5e-4  # seconds: what takes less time is not worth a place on disk
# The modules whose functions compute the results, the folders of the package that contain them and
# all that they import (beside the package's own files), and the files of `tests` that do.
COMPUTING = ("fa_numba.reference", "fa_numba.scores", "fa_numba.choices.tiles", "fa_numba.device")
FOLDERS = ("choices", "device", "emulator", "io_model", "mods", "tiling")
FILES = ("remembered.py", "helpers.py", "backward_helpers.py", "package/test_reference.py")
FOLDER = kernel_cache.directory()  # before a test chooses another folder


def remembered(function):
    """The function, which computes once what it returns of equal arguments.

    Functions among the arguments are equal if their code and the values that they capture are.
    """
    known: dict = {}

    @functools.wraps(function)
    def of(*arguments, **options):
        key = _as_key((arguments, sorted(options.items())))
        if key is None:
            return function(*arguments, **options)
        if key not in known:
            place = f"{function.__module__}.{function.__qualname__}", _digest_of(key)
            found = _stored(place)
            if found is None:
                begin = time.perf_counter()
                found = function(*arguments, **options)
                if time.perf_counter() - begin > SHORT:
                    _store(place, found)
            known[key] = _frozen(found)
            if len(known) > MOST_REMEMBERED:
                del known[next(iter(known))]
        return known[key]

    return of


def _frozen(value):
    """A result whose arrays cannot be changed."""
    if isinstance(value, np.ndarray):
        value.flags.writeable = False
    parts = vars(value) if isinstance(value, SimpleNamespace) else value
    if isinstance(parts, (tuple, list, dict)):
        for part in parts.values() if isinstance(parts, dict) else parts:
            _frozen(part)
    return value


def _as_key(value):
    """A value that is equal for equal arguments, of any depth; None where there is none."""
    if isinstance(value, np.ndarray):
        if value.nbytes > LARGEST or value.dtype.hasobject:
            return None
        return value.dtype.name, value.shape, hashlib.blake2b(value.tobytes()).digest()
    if isinstance(value, (tuple, list, dict)):
        parts = value.items() if isinstance(value, dict) else value
        keys = [_as_key(part) for part in parts]
        return None if None in keys else (type(value), *keys)
    if isinstance(value, FunctionType):
        outside = inspect.getclosurevars(value)
        keys = _as_key([outside.nonlocals, outside.globals, value.__defaults__])
        return None if keys is None else (FunctionType, value.__code__, keys)
    if isinstance(value, ModuleType):
        return ModuleType, value.__name__
    plain = (bool, int, float, str, np.generic, Tiles, type(None))
    return (type(value), repr(value)) if isinstance(value, plain) else None


# --- on disk -----------------------------------------------------------------------------------


def _digest_of(key):
    """The digest of a key, the same in every process."""
    return hashlib.blake2b(repr(_plain(key)).encode()).digest()


def _plain(key):
    if isinstance(key, tuple):
        return tuple(map(_plain, key))
    if isinstance(key, type):
        return f"{key.__module__}.{key.__qualname__}"
    if isinstance(key, CodeType):
        return key.co_code, key.co_names, key.co_varnames, key.co_freevars, _plain(key.co_consts)
    return key


@functools.cache
def state():
    """The digest of the code that computes the results."""
    package = HERE.parent / "fa_numba"
    files = [*package.iterdir(), *(x for name in FOLDERS for x in (package / name).rglob("*"))]
    files = sorted(file for file in files if file.suffix in (".py", ".csv"))
    files += [HERE / name for name in FILES]
    digest = hashlib.sha256()
    for file in files:
        text = file.read_bytes()
        digest.update(f"{file.name} {len(text)} ".encode() + text)
    versions = np.__version__, platform.python_version(), platform.machine()
    return hashlib.sha256(f"{digest.hexdigest()} {versions}".encode()).hexdigest()[:16]


@functools.cache
def _database():
    """The path of the database, None where there is no folder; the oldest ones are deleted."""
    if FOLDER is None:
        return None
    with contextlib.suppress(OSError):
        folder = FOLDER / "float64"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{state()}.sqlite"
        path.touch()
        others = [each for each in folder.glob("*.sqlite") if each != path]
        others.sort(key=lambda each: -each.stat().st_mtime)
        for each in others[MOST_DATABASES - 1 :]:
            each.unlink(missing_ok=True)
        return path
    return None


@functools.cache
def _connection(_process, _thread):
    """A connection of this thread alone, and not of the process that this one was forked from."""
    path = _database()
    if path is None:
        return None
    with contextlib.suppress(sqlite3.Error):
        connection = sqlite3.connect(path, timeout=5, isolation_level=None)
        connection.execute("PRAGMA synchronous = OFF")
        connection.execute(
            "CREATE TABLE IF NOT EXISTS results (function, arguments, result, "
            "PRIMARY KEY (function, arguments))"
        )
        return connection
    return None


def _stored(place):
    """What is stored of a call; None if there is nothing."""
    connection = _connection(os.getpid(), threading.get_ident())
    if connection is not None:
        with contextlib.suppress(sqlite3.Error, pickle.PickleError, EOFError):
            asked = "SELECT result FROM results WHERE function = ? AND arguments = ?"
            found = connection.execute(asked, place).fetchone()
            return found and pickle.loads(found[0])
    return None


def _store(place, result):
    connection = _connection(os.getpid(), threading.get_ident())
    if connection is not None:
        with contextlib.suppress(sqlite3.Error):
            given = *place, pickle.dumps(result, pickle.HIGHEST_PROTOCOL)
            connection.execute("INSERT OR REPLACE INTO results VALUES (?, ?, ?)", given)
