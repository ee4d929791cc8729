"""One warp, one access, one pattern of addresses: how a GPU counts it, and how the emulator does.

    python tests/access_patterns.py --out patterns.csv      (needs a GPU and Nsight Compute)

writes what the hardware counts of each pattern; `test_access_patterns.py` holds the emulator and
the rules below against it: `wavefronts` and `sectors`, in Python alone, and `uncounted`, what the
emulator leaves out. data/access_patterns.csv is what an H200 said.
"""

from __future__ import annotations

import argparse
import csv
import functools
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numba import types

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from experiments.beside import profiler  # noqa: E402
from experiments.lab.measure import counters  # noqa: E402
from experiments.lab.measure.workloads import one_head  # noqa: E402
from fa_numba import device as devices  # noqa: E402
from fa_numba.device import (  # noqa: E402
    DeviceArray,
    Kernel,
    array_type,
    cuda,
    device_function,
    float32,
    int32,
    uint32,
)
from fa_numba.intrinsics.async_copy import (  # noqa: E402
    commit_async,
    copy1_async,
    copy8_async,
    wait_async,
)
from fa_numba.intrinsics.global_memory import read4, write4  # noqa: E402
from fa_numba.intrinsics.matrix import ldmatrix, ldmatrix_transposed  # noqa: E402
from fa_numba.intrinsics.reduction import add_global, add_pair_vector  # noqa: E402
from fa_numba.intrinsics.shared import (  # noqa: E402
    half_tile,
    load4,
    shared_tile,
    store4,
)

LANES = 32
WORDS, HALVES = 2048, 4096  # of shared memory
PITCH = 128  # elements of a row of X in global memory
ROWS = 64
OUT = 0xFFFFFFFF  # the place of a lane that takes no part
MEASURED = ROOT / "tests" / "data" / "access_patterns.csv"


# --- kernels: lane t accesses element P[t]; a copy reads element S[t] of X ----------------------


@device_function
def fill_floats(s):
    for n in range(WORDS // LANES):
        s[uint32(LANES * n + cuda.threadIdx.x)] = float32(n)
    cuda.syncthreads()


@device_function
def fill_halves(h):
    for n in range(HALVES // LANES):
        h[uint32(LANES * n + cuda.threadIdx.x)] = uint32(n)
    cuda.syncthreads()


@device_function
def one(s, at):
    return float32(s[at])


@device_function
def four(s, at):
    x = load4(s, at)
    return (x[0] + x[1]) + (x[2] + x[3])


@device_function
def matrix(h, at):
    w = ldmatrix(h, at)
    return float32((w[0] ^ w[1]) ^ (w[2] ^ w[3]))


@device_function
def matrix_transposed(h, at):
    w = ldmatrix_transposed(h, at)
    return float32((w[0] ^ w[1]) ^ (w[2] ^ w[3]))


def loads(tile, size, fill, load):
    def kernel(P, S, X, Y):
        t = uint32(cuda.threadIdx.x)
        at = uint32(P[t])
        s = tile(0, size)
        fill(s)
        if at != uint32(OUT):
            Y[t] = load(s, at)

    return kernel


@device_function
def store_float(s, at, t):
    s[at] = float32(t)


@device_function
def store_half(s, at, t):
    s[at] = t


@device_function
def store_four(s, at, t):
    store4(s, at, float32(t), float32(t), float32(t), float32(t))


def stores(tile, size, store):
    def kernel(P, S, X, Y):
        t = uint32(cuda.threadIdx.x)
        at = uint32(P[t])
        s = tile(0, size)
        if at != uint32(OUT):
            store(s, at, t)
        cuda.syncthreads()
        if at != uint32(OUT):
            Y[t] = float32(s[at])

    return kernel


def copies(tile, size, copy, count):
    """Copies of nothing, where S[t] is OUT, fill with zeros."""

    def kernel(P, S, X, Y):
        t = uint32(cuda.threadIdx.x)
        at = uint32(P[t])
        s = tile(0, size)
        of = uint32(S[t])
        read = int32(0)
        if of != uint32(OUT):
            read = int32(count)
        else:
            of = uint32(0)
        if at != uint32(OUT):
            copy(s, at, X, of // uint32(PITCH), of % uint32(PITCH), read)
        commit_async()
        wait_async()
        cuda.syncthreads()
        if at != uint32(OUT):
            Y[t] = float32(s[at])

    return kernel


@device_function
def read_one(X, row, col, Y, t):
    Y[t] = float32(X[row, col])


@device_function
def read_four(X, row, col, Y, t):
    x = read4(X, row, col)
    Y[t] = (x[0] + x[1]) + (x[2] + x[3])


@device_function
def write_one(X, row, col, Y, t):
    X[row, col] = float32(t)


@device_function
def write_four(X, row, col, Y, t):
    x = float32(t)
    write4(X, row, col, x, x, x, x)


@device_function
def add_one(X, row, col, Y, t):
    add_global(X, row, col, float32(1.0))


def of_global(act):
    def kernel(P, S, X, Y):
        t = uint32(cuda.threadIdx.x)
        at = uint32(P[t])
        row, col = at // uint32(PITCH), at % uint32(PITCH)
        if at != uint32(OUT):
            act(X, row, col, Y, t)

    return kernel


def add_8(P, S, X, Y):
    t = uint32(cuda.threadIdx.x)
    at = uint32(P[t])
    row, col = at // uint32(PITCH), at % uint32(PITCH)
    one, adds = float32(1.0), at != uint32(OUT)
    add_pair_vector(X, row, col, one, one, adds)


@dataclass(frozen=True)
class Access:
    """One kind of access: `kernel` makes it once a lane, of `bytes` in elements of `element`."""

    space: str
    kind: str
    bytes: int
    element: int
    kernel: Callable

    @property
    def dtype(self) -> type:
        return np.float32 if self.element == 4 else np.uint16


FLOATS, BITS = (shared_tile, WORDS), (half_tile, HALVES)
ACCESSES = {
    "load_4": Access("shared", "load", 4, 4, loads(*FLOATS, fill_floats, one)),
    "load_2": Access("shared", "load", 2, 2, loads(*BITS, fill_halves, one)),
    "load_16": Access("shared", "load", 16, 4, loads(*FLOATS, fill_floats, four)),
    "load_matrix": Access("shared", "load", 16, 2, loads(*BITS, fill_halves, matrix)),
    "load_matrix_transposed": Access(
        "shared", "load", 16, 2, loads(*BITS, fill_halves, matrix_transposed)
    ),
    "store_4": Access("shared", "store", 4, 4, stores(*FLOATS, store_float)),
    "store_2": Access("shared", "store", 2, 2, stores(*BITS, store_half)),
    "store_16": Access("shared", "store", 16, 4, stores(*FLOATS, store_four)),
    "copy_4": Access("shared", "copy", 4, 4, copies(*FLOATS, copy1_async, 1)),
    "copy_16": Access("shared", "copy", 16, 2, copies(*BITS, copy8_async, 8)),
    "read_4": Access("global", "load", 4, 4, of_global(read_one)),
    "read_2": Access("global", "load", 2, 2, of_global(read_one)),
    "read_16": Access("global", "load", 16, 4, of_global(read_four)),
    "write_4": Access("global", "store", 4, 4, of_global(write_one)),
    "write_16": Access("global", "store", 16, 4, of_global(write_four)),
    "add_4": Access("global", "atomic", 4, 4, of_global(add_one)),
    "add_8": Access("global", "atomic", 8, 4, add_8),
}
# With every pattern; the others with FEW.
THOROUGH = ("load_16", "load_matrix", "copy_16")


# --- patterns: which unit, an access wide, each lane has -----------------------------------------

Units = tuple[int | None, ...]  # None: the lane takes no part


def _every(unit: Callable[[int], int | None]) -> Units:
    return tuple(unit(lane) for lane in range(LANES))


def _rows(pitch: int, width: int = 8) -> Units:
    """Rows of `width` units, `pitch` units apart."""
    return _every(lambda lane: lane // width * pitch + lane % width)


# No two lanes have one unit: for stores and copies too.
APART: dict[str, Units] = {
    "neighbours": _every(lambda lane: lane),
    **{f"stride {n}": _every(lambda lane, n=n: n * lane) for n in (2, 3, 4, 8, 9)},  # type: ignore[misc]
    "stride 15": _every(lambda lane: 15 * lane),
    "shifted by 1": _every(lambda lane: lane + 1),
    "shifted by 2": _every(lambda lane: lane + 2),
    **{f"rows of 8, pitch {n}": _rows(n) for n in (9, 10, 12, 16)},
    "rows of 16, pitch 17": _rows(17, 16),
    "backwards": _every(lambda lane: 31 - lane),
    "shuffled": _every(lambda lane: 13 * lane % 32),
    "columns of rows": _every(lambda lane: lane % 4 * 8 + lane // 4),
    "first half": _every(lambda lane: lane if lane < 16 else None),
    "first half, stride 8": _every(lambda lane: 8 * lane if lane < 16 else None),
    "even lanes": _every(lambda lane: None if lane % 2 else lane),
    "even lanes, stride 8": _every(lambda lane: None if lane % 2 else 8 * lane),
    "one lane": _every(lambda lane: None if lane else 0),
    "every eighth": _every(lambda lane: None if lane % 8 else lane),
}
# Lanes share units: loads alone.
TOGETHER: dict[str, Units] = {
    "one unit": _every(lambda lane: 0),
    **{f"lane // {n}": _every(lambda lane, n=n: lane // n) for n in (2, 4, 8, 16)},  # type: ignore[misc]
    **{f"lane % {n}": _every(lambda lane, n=n: lane % n) for n in (2, 4, 8, 16)},  # type: ignore[misc]
    "lane and lane ^ 2": _every(lambda lane: lane & 1 | lane >> 2 << 1),
    "lane and lane ^ 3": _every(lambda lane: lane >> 2 << 1 | (lane & 1 ^ lane >> 1 & 1)),
    "lane // 2, stride 8": _every(lambda lane: lane // 2 * 8),
    "lane // 2, stride 2": _every(lambda lane: lane // 2 * 2),
    "lane // 4, stride 8": _every(lambda lane: lane // 4 * 8),
    "lane // 8, stride 9": _every(lambda lane: lane // 8 * 9),
    "lane // 16, stride 8": _every(lambda lane: lane // 16 * 8),
    "lane % 8, stride 8": _every(lambda lane: lane % 8 * 8),
    "lane % 8, stride 9": _every(lambda lane: lane % 8 * 9),
    "lane % 16, stride 2": _every(lambda lane: lane % 16 * 2),
    "pairs, first half": _every(lambda lane: lane // 2 if lane < 16 else None),
}


# Where copies read: the units of these lanes, or zeros where a lane has none.
FROM = ("shifted by 1", "shifted by 2", "stride 2", "backwards", "shuffled", "first half")
FEW = {
    *("neighbours", "stride 2", "stride 8", "stride 9", "shifted by 1", "rows of 8, pitch 9"),
    *("shuffled", "first half", "one lane", "one unit", "lane // 2", "lane % 8, stride 8"),
}


@dataclass(frozen=True)
class Pattern:
    """An access with the element of each lane in `at`, and for a copy what it reads in `of`."""

    access: str
    name: str
    at: tuple[int, ...]
    of: tuple[int, ...]

    @property
    def what(self) -> Access:
        return ACCESSES[self.access]


def _elements(units: Units, size: int, element: int) -> tuple[int, ...]:
    return tuple(OUT if unit is None else unit * size // element for unit in units)


def patterns() -> list[Pattern]:
    """Every access with every pattern that it can have, or a few."""
    found = []
    for name, what in ACCESSES.items():
        named = APART | (TOGETHER if what.kind == "load" else {})
        if name not in THOROUGH:
            named = {key: units for key, units in named.items() if key in FEW}
        if "matrix" in name:
            named = {key: units for key, units in named.items() if None not in units}
        sizes = what.bytes, what.element
        for key, units in named.items():
            lanes = tuple(None if unit is None else lane for lane, unit in enumerate(units))
            found.append(Pattern(name, key, _elements(units, *sizes), _elements(lanes, *sizes)))
        if what.kind == "copy":
            at = _elements(APART["neighbours"], *sizes)
            for key in FROM:
                of = _elements(APART[key], *sizes)
                kind = "zeros but" if OUT in of else "from"
                found.append(Pattern(name, f"{kind} {key}", at, of))
    return found


# --- the rules -----------------------------------------------------------------------------------


def _passes(words: Sequence[int]) -> int:
    """Steps that 32 banks of 4 bytes need for these words: the most different ones in a bank."""
    banks: dict[int, set[int]] = {}
    for word in words:
        banks.setdefault(word % 32, set()).add(word)
    return max(map(len, banks.values()), default=0)


def _in_pairs(at: Sequence[int]) -> bool:
    """Whether each lane shares its place with the lane 1 from it, or each with the lane 2 from it,
    lanes that take no part left out.
    """
    pairs = ([(at[n], at[n ^ apart]) for n in range(len(at))] for apart in (1, 2))
    return any(all(a == b or OUT in (a, b) for a, b in each) for each in pairs)


def wavefronts(pattern: Pattern) -> tuple[int, int]:
    """(wavefronts, conflicts) of shared memory: a warp's access of 4 bytes or fewer is one group,
    of 16 bytes each eight lanes are, or sixteen where a load has them in pairs; ldmatrix has not.
    A group takes as many passes as its fullest bank has words.
    """
    what = pattern.what
    size = what.bytes // what.element
    paired = what.kind == "load" and "matrix" not in pattern.access

    def passes(at: Sequence[int]) -> int:
        return _passes([(e + n) * what.element // 4 for e in at if e != OUT for n in range(size)])

    groups = []
    if what.bytes <= 4:
        groups.append(pattern.at)
    else:
        for half in (pattern.at[:16], pattern.at[16:]):
            groups += [half] if paired and _in_pairs(half) else [half[:8], half[8:]]
    taken = [passes(group) for group in groups]
    return sum(taken), sum(max(0, each - 1) for each in taken)


def sectors(pattern: Pattern, line: int = 32) -> int:
    """Sectors, 32 bytes, of global memory that a warp's access touches. A copy of 16 bytes counts
    a sector, or here a `line` of bytes, anew for each 32 bytes of shared memory that it goes to.
    """
    what = pattern.what
    if what.kind != "copy":
        return len({e * what.element // 32 for e in pattern.at if e != OUT})
    pairs = [
        (of * what.element // line, at * what.element // 32 if what.bytes == 16 else 0)
        for at, of in zip(pattern.at, pattern.of, strict=True)
        if OUT not in (at, of)
    ]
    return len(set(pairs))


def uncounted(pattern: Pattern) -> dict[str, int]:
    """By counter, what the hardware has of a pattern's kernel and the emulator has not."""
    found: Counter[str] = Counter()
    what = pattern.what
    shared = found["shared wavefronts"] = 1  # a warp has one
    if what.space == "shared":
        shared += 1  # and a barrier
    if what.kind == "copy":
        shared += 3  # and each load without an active lane that the assembler puts before copies
        taking = [of for at, of in zip(pattern.at, pattern.of, strict=True) if at != OUT]
        # Lanes that take no part do not read where they would copy from.
        unread = LANES // 8 - len({n // 8 for n, at in enumerate(pattern.at) if at != OUT})
        found["global load sectors"] = found["sectors from L2"] = -unread
        zeros = [at for at, of in zip(pattern.at, pattern.of, strict=True) if of == OUT != at]
        if zeros:  # they are stored at once, not copied
            shared += wavefronts(replace(pattern, at=(*zeros, *[OUT] * (LANES - len(zeros)))))[0]
        waves, conflicts = wavefronts(pattern)
        if what.bytes == 16:
            found["copy conflicts"] = -conflicts
            # L1 is looked up by lines of 128 bytes, for every 32 bytes that are filled.
            found["global load sectors"] += sectors(pattern, 128) - sectors(pattern)
        else:  # through L1, whose banks are those of shared memory: reading them may conflict too
            read = _passes([of for of in taking if of != OUT])
            found["copy wavefronts"] = found["copy conflicts"] = max(0, read - waves)
            shared += max(waves, read)
            found["shared conflicts"] = max(waves, read) - 1
    found["shared wavefronts"] = shared
    return found


# --- running them --------------------------------------------------------------------------------


@functools.cache
def _kernel(access: str) -> Kernel:
    what = ACCESSES[access]
    X = array_type(2, types.float32 if what.element == 4 else types.uint16)
    numbers = types.Array(types.uint32, 1, "C")
    floats = types.Array(types.float32, 1, "C")
    return Kernel(what.kernel, (numbers, numbers, X, floats), LANES, 4 * WORDS)


def _arrays(pattern: Pattern) -> list[np.ndarray]:
    """P, S, X and Y."""
    places = [np.array(each, np.uint32) for each in (pattern.at, pattern.of)]
    X = np.ones((ROWS, PITCH), pattern.what.dtype)
    return [*places, X, np.zeros(LANES, np.float32)]


def emulated(pattern: Pattern):
    """The emulator's counts of the pattern's kernel."""
    with devices.count_accesses() as counts:
        devices.launch(_kernel(pattern.access), (1, 1, 1), tuple(_arrays(pattern)))
    return counts


def _launch_all() -> None:
    """Each pattern once on the GPU, in the range that a profiler records."""
    kept = []
    for pattern in patterns():
        host = _arrays(pattern)
        remote = [devices.to_gpu(array) for array in host]
        views = tuple(
            DeviceArray(r.__cuda_array_interface__["data"][0], a.shape, a.strides, r, a.itemsize)
            for r, a in zip(remote, host, strict=True)
        )
        _kernel(pattern.access).compiled()
        kept.append((pattern, views))
    devices.synchronize()
    devices.profile_start()
    for pattern, views in kept:
        devices.launch(_kernel(pattern.access), (1, 1, 1), views)
    devices.synchronize()
    devices.profile_stop()


def profiled(names: dict[str, str], log: Path) -> list[dict[str, float]]:
    """Nsight Compute's numbers of every pattern, by our names; its own table goes to ``log``."""
    metrics = list(dict.fromkeys(names.values()))
    command = (*counters.COMMAND, f"--metrics={','.join(metrics)}", "--log-file", str(log))
    run = subprocess.run(
        (*command, sys.executable, __file__, "--launch"), cwd=ROOT, capture_output=True, text=True
    )
    if run.returncode or not log.exists():
        said = log.read_text() if log.exists() else ""
        raise SystemExit(f"ncu ended with {run.returncode}: {said}{run.stdout}{run.stderr}"[-2000:])
    launches = counters.parse(log.read_text(), metrics)
    return [{name: each[metric] for name, metric in names.items()} for each in launches]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=MEASURED, help="the CSV that is written")
    parser.add_argument("--log", type=Path, help="keep Nsight Compute's own table here")
    parser.add_argument("--launch", action="store_true", help="launch the patterns, for ncu")
    args = parser.parse_args()
    if args.launch:
        _launch_all()
        return
    case = counters.Case("fa2-simt", one_head(64, 64))
    names = profiler.usable(case, print)
    with tempfile.TemporaryDirectory() as folder:
        rows = profiled(names, args.log or Path(folder) / "ncu.csv")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with args.out.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["access", "pattern", *names])
        for pattern, numbers in zip(patterns(), rows, strict=True):
            writer.writerow([pattern.access, pattern.name, *(f"{n:g}" for n in numbers.values())])
    print(f"{len(rows)} patterns: {args.out}")


if __name__ == "__main__":
    main()
