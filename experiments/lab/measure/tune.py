"""A sweep over tile sizes, threads and stages of the tensor-core kernels on this GPU.

The file `figures/data/tune/<machine>.csv` contains every time. The file
`fa_numba/choices/tuned.csv`, which the planner reads, contains the fastest tiles for each compute
capability, unit, algorithm, pass and head dimension.
"""

import contextlib
import csv
import io
import itertools
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple
from pathlib import Path

import fa_numba
from fa_numba.choices.tuned import COLUMNS, KEY, TABLE
from fa_numba.tiling.wgmma import GROUP, GROUP_ROWS

from ..record import Row, write_if_changed
from . import variants
from .series import HOPPER, algorithm, plan, unit
from .variants import Variant
from .workloads import fa2_setting

NAME = "tune"
DTYPE = "float16"
# A short sequence with few thread blocks, and a long one with many. For short sequences on Hopper
# the planner has a rule instead.
SEQLENS = {"mma": (512, 4096), "wgmma": (2048, 8192)}
# Multiples of 16, the usual head dimensions first.
HEAD_DIMS = (64, 128, 32, 96, 192, 256, 80, 112, 160, 48)
SERIES = ("fa1-mma", "fa2-mma", HOPPER)
PASSES = ("fwd", "bwd")
# (unit, pass) -> candidates for Br, candidates for Bc. Smaller tiles are slower everywhere. The
# backward kernels for Hopper have one tile size per head dimension.
BLOCKS = {
    ("mma", "fwd"): ((64, 128, 256), (32, 64, 128, 256)),
    ("mma", "bwd"): ((32, 64, 128), (32, 64, 128, 256)),
    ("wgmma", "fwd"): ((128, 192), (48, 64, 80, 96, 112, 128, 144, 160, 192, 256)),
}
THREADS = (64, 128, 256)
# (series, pass) -> candidates for the number of stages of K and V. Other kernels have one stage.
STAGES_OF = {("fa2-mma", "fwd"): (1, 2), (HOPPER, "fwd"): (2,)}
# Seconds of timed runs of each call, if its 20 runs take longer than this.
SECONDS = 0.1


Key = tuple[str, str, int]  # series, pass, head dimension


def candidates(
    head_dims: Sequence[int] = HEAD_DIMS, series: Sequence[str] = SERIES,
    passes: Sequence[str] = PASSES,
) -> variants.Work:  # fmt: skip
    """Return the calls to time: one for each candidate of tiles that has a plan on this GPU.

    Parameters
    ----------
    head_dims : sequence of int
        Head dimensions, which are rounded up to multiples of 16.
    series : sequence of str
        Names of series.
    passes : sequence of str
        Passes: "fwd" or "bwd".

    Returns
    -------
    Work
        Pairs of a problem and its calls.
    """
    found = []
    head_dims = tuple(dict.fromkeys(-(-d // 16) * 16 for d in head_dims))
    for d, name, pass_, causal in itertools.product(head_dims, series, passes, (False, True)):
        for N in SEQLENS[unit(name)]:
            problem, planned = fa2_setting(N, d, causal, DTYPE), []
            for tiles in itertools.starmap(fa_numba.Tiles, _sizes(name, pass_)):
                own = Variant(name, {"tiles": tiles}, note=note(tiles), passes=pass_)
                with contextlib.suppress(ValueError):
                    plan(name, problem, **own.planned)
                    planned.append(own)
            found += [(problem, planned)] if planned else []
    return found


def swept(work: variants.Work) -> set[Key]:
    """Return the set of (series, pass, head dimension) that the calls cover.

    Parameters
    ----------
    work : Work
        Pairs of a problem and its calls.

    Returns
    -------
    set of (str, str, int)
        The keys.
    """
    return {(each.series, each.passes, p.head_dim) for p, calls in work for each in calls}


def _sizes(name: str, pass_: str) -> Iterator[tuple[int, int, int, int]]:
    """Yield the candidates (Br, Bc, threads, stages) of a series in a pass."""
    on = unit(name)
    if (on, pass_) not in BLOCKS:
        return
    stages = STAGES_OF.get((name, pass_), (1,))
    for Br, Bc in itertools.product(*BLOCKS[on, pass_]):
        threads = (GROUP * (1 + Br // GROUP_ROWS),) if on == "wgmma" else THREADS
        yield from itertools.product((Br,), (Bc,), threads, stages)


def note(tiles: fa_numba.Tiles) -> str:
    """Return the note of a row of data: the threads and stages of the tiles.

    Br and Bc are columns of the row.

    Parameters
    ----------
    tiles : Tiles
        The tiles.

    Returns
    -------
    str
        The number of threads, and the number of stages if it is greater than 1.

    Examples
    --------
    >>> note(fa_numba.Tiles(64, 64, 128, 2))
    'threads=128 stages=2'
    """
    staged = f" stages={tiles.stages}" if tiles.stages > 1 else ""
    return f"threads={tiles.threads}{staged}"


def _tiles(row: Row) -> fa_numba.Tiles:
    said = dict(word.split("=") for word in row.place.split())
    threads, stages = int(said["threads"]), int(said.get("stages", 1))
    return fa_numba.Tiles(row.Br or 0, row.Bc or 0, threads, stages)  # Tiles refuses 0


def best(rows: Iterable[Row]) -> dict[Key, tuple[fa_numba.Tiles, float]]:
    """Return the fastest tiles of each series, pass and head dimension.

    Tiles are compared by the geometric mean of their speeds over masks and lengths. Tiles that have
    no speed for some mask or length are left out.

    Parameters
    ----------
    rows : iterable of Row
        Rows of the sweep.

    Returns
    -------
    dict
        Maps (series, pass, head dimension) to the tiles and their mean speed in TFLOP/s.
    """
    speeds: dict[Key, dict[fa_numba.Tiles, dict[tuple[bool, int], float]]] = {}
    for row in rows:
        if row.metric != "speed" or row.value is None:
            continue
        tiles = _tiles(row)
        key = (row.series, row.pass_, row.head_dim)
        speeds.setdefault(key, {}).setdefault(tiles, {})[row.causal, row.seqlen_q] = row.value
    found = {}
    for key, of_tiles in speeds.items():
        settings = {setting for values in of_tiles.values() for setting in values}
        means = {
            tiles: statistics.geometric_mean(values.values())
            for tiles, values in of_tiles.items()
            if {causal for causal, _ in settings} == {False, True} and len(values) == len(settings)
        }
        if means:
            fastest = max(means, key=lambda tiles: means[tiles])
            found[key] = fastest, means[fastest]
    return found


def update(
    found: dict[Key, tuple[fa_numba.Tiles, float]], capability: str, path: Path = TABLE
) -> bool:
    """Write the fastest tiles into the table that the planner reads. Other lines are kept.

    Parameters
    ----------
    found : dict
        The fastest tiles, as `best` returns them.
    capability : str
        Compute capability, such as "9.0".
    path : Path
        The table.

    Returns
    -------
    bool
        Whether the table changed.
    """
    with open(path, newline="", encoding="utf-8") as file:
        lines = {tuple(line[: len(KEY)]): list(line) for line in list(csv.reader(file))[1:]}
    for (name, pass_, head_dim), (tiles, _) in found.items():
        line = [capability, unit(name), algorithm(name), pass_, str(head_dim)]
        lines[tuple(line)] = [*line, *map(str, astuple(tiles))]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    in_order = sorted(lines.values(), key=lambda line: (tuple(line[:4]), int(line[4])))
    writer.writerows(in_order)
    return write_if_changed(path, text.getvalue())
