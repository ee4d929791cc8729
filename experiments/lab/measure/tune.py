"""Block sizes, warps and stages of the tensor-core kernels, forward and backward: a sweep on this
GPU, and the table that plans read.

`figures/data/tune/<machine>.csv` has every time, `fa_numba/choices/tuned.csv` the fastest tiles of
each compute capability, unit, algorithm, pass and head dimension.
"""

import contextlib
import csv
import io
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

import fa_numba
from fa_numba import reference
from fa_numba.choices.tuned import COLUMNS, KEY, TABLE
from fa_numba.problem import Problem
from fa_numba.tiling.wgmma import GROUP, GROUP_ROWS

from ..record import Bench, Row, write_if_changed
from . import check, peers
from .precompile import Call, compile_ahead
from .series import HOPPER, algorithm, columns, plan, unit
from .timing import Timing, attempt, time_call, timing_rows
from .workloads import Inputs, fa2_setting, one_head

NAME = "tune"
DTYPE, CHECKED_SEQLEN = "float16", 512
# Few blocks of a short sequence, and many of a long one; of short ones Hopper's have a rule.
SEQLENS = {"mma": (512, 4096), "wgmma": (2048, 8192)}
# As many fragments of 16 columns as a head dimension can have, the usual ones first.
HEAD_DIMS = (64, 128, 32, 96, 192, 256, 80, 112, 160, 48)
SERIES = ("fa1-mma", "fa2-mma", HOPPER)
PASSES = ("fwd", "bwd")
# By unit and pass: rows of Q, rows of K and V. Smaller ones lose everywhere. Of Hopper's backward
# kernels a head dimension has one size.
BLOCKS = {
    ("mma", "fwd"): ((64, 128, 256), (32, 64, 128, 256)),
    ("mma", "bwd"): ((32, 64, 128), (32, 64, 128, 256)),
    ("wgmma", "fwd"): ((128, 192), (48, 64, 80, 96, 112, 128, 144, 160, 192, 256)),
}
THREADS = (64, 128, 256)
# Of K and V, where a kernel has a choice.
STAGES_OF = {("fa2-mma", "fwd"): (1, 2), (HOPPER, "fwd"): (2,)}
# Of timing for each candidate and length: 20 calls where they take less.
SECONDS = 0.1


Key = tuple[str, str, int]  # series, pass, head dimension


@dataclass(frozen=True)
class Candidate:
    """One call to be timed, at each of its unit's SEQLENS."""

    series: str
    pass_: str
    head_dim: int
    causal: bool
    tiles: fa_numba.Tiles

    @property
    def problems(self) -> list[Problem]:
        lengths = SEQLENS[unit(self.series)]
        return [fa2_setting(N, self.head_dim, self.causal, DTYPE) for N in lengths]

    @property
    def swept(self) -> Key:
        return self.series, self.pass_, self.head_dim

    @property
    def calls(self) -> list[Call]:
        how = {"passes": self.pass_, "tiles": self.tiles}
        return [Call(self.series, problem, how) for problem in self.problems]


def candidates(
    head_dims: Sequence[int] = HEAD_DIMS, series: Sequence[str] = SERIES,
    passes: Sequence[str] = PASSES,
) -> list[Candidate]:  # fmt: skip
    """The calls to time: all tiles with a plan here; head dimensions in whole fragments."""
    found = []
    head_dims = tuple(dict.fromkeys(-(-d // 16) * 16 for d in head_dims))
    for d, name, pass_ in itertools.product(head_dims, series, passes):
        for sizes, causal in itertools.product(_sizes(name, pass_), (False, True)):
            candidate = Candidate(name, pass_, d, causal, fa_numba.Tiles(*sizes))
            with contextlib.suppress(ValueError):
                for call in candidate.calls:
                    plan(call.series, call.problem, **call.options)
                found.append(candidate)
    return found


def _sizes(name: str, pass_: str) -> Iterator[tuple[int, int, int, int]]:
    """Br, Bc, threads and stages to try."""
    on = unit(name)
    if (on, pass_) not in BLOCKS:
        return
    stages = STAGES_OF.get((name, pass_), (1,))
    for Br, Bc in itertools.product(*BLOCKS[on, pass_]):
        threads = (GROUP * (1 + Br // GROUP_ROWS),) if on == "wgmma" else THREADS
        yield from itertools.product((Br,), (Bc,), threads, stages)


def note(tiles: fa_numba.Tiles) -> str:
    """What a row of the sweep says of its tiles beside Br and Bc."""
    staged = f" stages={tiles.stages}" if tiles.stages > 1 else ""
    return f"threads={tiles.threads}{staged}"


def _tiles(row: Row) -> fa_numba.Tiles:
    if row.Br is None or row.Bc is None:
        raise ValueError(
            f"Br is {row.Br} and Bc is {row.Bc} in a row of the sweep: allowed are both"
        )
    said = dict(word.split("=") for word in row.place.split())
    return fa_numba.Tiles(row.Br, row.Bc, int(said["threads"]), int(said.get("stages", 1)))


def _time(candidate: Candidate) -> tuple[list[Timing] | None, str]:
    """The candidate's times, its result checked at a smaller size; or why there are none."""

    def work() -> list[Timing]:
        small = one_head(CHECKED_SEQLEN, candidate.head_dim, candidate.causal, DTYPE)
        host, out, lse = _small(small)
        run = _call(candidate, (*_on_device(*host, out), *peers.on_device((lse,))))
        error = _gate(small, candidate.pass_)(run())
        found = []
        for problem in candidate.problems:
            run = _call(candidate, _shaped(problem, _large(candidate.head_dim)))
            found.append(time_call(run, lambda result: error, seconds=SECONDS))
        return found

    return attempt(work)


def _on_device(*arrays: np.ndarray) -> tuple[Any, ...]:
    return peers.on_device(arrays, DTYPE)


def _call(candidate: Candidate, arrays: Sequence[Any]) -> Callable[..., Any]:
    q, k, v, dout, O, lse = arrays
    options: dict[str, Any] = {
        "algorithm": algorithm(candidate.series),
        "unit": unit(candidate.series),
        "causal": candidate.causal,
        "tiles": candidate.tiles,
    }

    def forward(out: Any = None) -> Any:
        return fa_numba.attention(q, k, v, out=out, **options)

    def backward(out: Any = None) -> Any:
        return fa_numba.attention_backward(dout, q, k, v, O, lse, **options)

    return forward if candidate.pass_ == "fwd" else backward


@cache
def _inputs() -> Inputs:
    return Inputs(gradient=True)


@lru_cache(maxsize=4)
def _small(problem: Problem) -> tuple[tuple[np.ndarray, ...], np.ndarray, np.ndarray]:
    """(q, k, v, dout), O and L of the problem, computed on the host."""
    host = _inputs()(problem)
    out, lse = reference.attention(*host[:3], causal=problem.causal, return_lse=True)
    return host, out.astype(np.float32), lse.astype(np.float32)


@lru_cache(maxsize=4)
def _gate(problem: Problem, pass_: str) -> check.Gate:
    return check.gate(problem, pass_, *_inputs()(problem))


@lru_cache(maxsize=1)
def _large(head_dim: int) -> tuple[Any, ...]:
    """q, k, v, dout, O and L at the largest size; O and L are made up, no time depends on them."""
    longest = max(N for lengths in SEQLENS.values() for N in lengths)
    problem = fa2_setting(longest, head_dim, False, DTYPE)
    host = _inputs()(problem)
    lse = np.full(problem.lse_shape, math.log(longest), np.float32)
    return (*_on_device(*host), *_on_device(host[0]), *peers.on_device((lse,)))


def _shaped(problem: Problem, arrays: Sequence[Any]) -> tuple[Any, ...]:
    """The same numbers as the problem's q, k, v, dout, O and L: every length has as many."""
    *rows, lse = arrays
    return (*(x.reshape(problem.q_shape) for x in rows), lse.reshape(problem.lse_shape))


def measure(wanted: Sequence[Candidate], bench: Bench) -> Iterator[Row]:
    """Rows of every candidate, all compiled first."""
    compile_ahead((call for candidate in wanted for call in candidate.calls), bench)
    for candidate in bench.each(wanted, "timing"):
        timings, failure = _time(candidate)
        said = f"{note(candidate.tiles)}; {failure}" if failure else note(candidate.tiles)
        own: dict[str, Any] = {"pass_": candidate.pass_, "note": said}
        for n, problem in enumerate(candidate.problems):
            of = NAME, candidate.series, problem, bench.machine, candidate.tiles
            if timings is None:
                yield Row(metric="speed", unit="TFLOP/s", value=None, **columns(*of, **own))
            else:
                yield from timing_rows(timings[n], problem, **columns(*of, **own))


def best(rows: Iterable[Row]) -> dict[Key, tuple[fa_numba.Tiles, float]]:
    """The fastest tiles over masks and lengths, their geometric mean; those that failed are out."""
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
    """Put the tiles that were found into the table; True if it changed. Its other lines stay."""
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
