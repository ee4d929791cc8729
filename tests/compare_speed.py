"""Compare the speed of two source trees on a GPU, call by call.

    python tests/compare_speed.py OTHER [--rounds N] [--only TEXT] [--csv FILE]

OTHER is the folder of another source tree, for example a git worktree of an earlier revision. Each
tree runs in a separate process. In each round, both trees time the same call, one after the
other. They take turns at being first. In each round, the command computes the ratio *time in the
other tree / time in this tree*. It prints the median ratio of each call, and the 20th and 80th
percentile. Above 1, this tree is faster. If a tree refuses a call, the command prints the reason.

Before the first round, several processes compile the kernels of both trees.

If torch is installed, the arrays are torch tensors. torch's allocator keeps the memory of earlier
results. Without torch, each timed call also allocates memory for its results.
"""

from __future__ import annotations

import argparse
import csv
import gc
import importlib.util
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
ROUNDS, COMPILERS = 5, 8
# In each round, a call is repeated for WARMUP milliseconds, and then timed for TIMED milliseconds.
# The warm-up brings the GPU's clock back to the value that it has under load.
WARMUP, TIMED, FEWEST = 40, 40, 3


@dataclass(frozen=True)
class Call:
    """A call that both trees time.

    Parameters
    ----------
    what : str
        Description of the options, for the table.
    N, d : int
        Sequence length and head dimension.
    passes : str, default "fwd"
        "fwd" or "bwd".
    Nk : int, default 0
        Number of keys. 0 means N.
    batch, heads, heads_k : int
        Batch size, number of query heads and number of K/V heads.
    dtype : str, default "float16"
        Name of the dtype.
    options : dict
        Arguments of `fa_numba.attention` and `fa_numba.attention_backward`.
    """

    what: str
    N: int
    d: int
    passes: str = "fwd"
    Nk: int = 0
    batch: int = 1
    heads: int = 16
    heads_k: int = 16
    dtype: str = "float16"
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        keys = f" x {self.Nk}" if self.Nk else ""
        return f"{self.what}, {self.passes}, N={self.N}{keys}, d={self.d}, {self.dtype}"


def _tokens(what: str, N: int, d: int, passes: str, **more: Any) -> Call:
    """Return a call with 16k tokens and hidden dimension 2048, as in FA-2's paper."""
    heads = 2048 // d
    sizes = {"batch": max(1, 16384 // N), "heads": heads, "heads_k": heads}
    return Call(what, N, d, passes, **{**sizes, **more})


def calls() -> list[Call]:
    """Return all calls that the command compares."""
    found = []
    for passes in ("fwd", "bwd"):
        for d in (64, 128):
            for causal in (False, True):
                mask, options = ("causal" if causal else "no mask"), {"causal": causal}
                for N in (1024, 4096, 16384):
                    found.append(_tokens(f"auto, {mask}", N, d, passes, options=options))
                unit = options | {"unit": "mma"}
                found.append(_tokens(f"mma, {mask}", 4096, d, passes, options=unit))
                one = {"batch": 1, "dtype": "float32"}
                unit = options | {"unit": "simt"}
                found.append(_tokens(f"simt, {mask}", 2048, d, passes, options=unit, **one))
            for name, options in {
                "FA-1, mma": {"algorithm": "fa1", "unit": "mma"},
                "FA-1, auto": {"algorithm": "fa1"},
                "dropout": {"dropout_p": 0.1, "seed": 1},
                "window": {"window": (1024, 0)},
                "softcap": {"softcap": 20.0},
                "deterministic": {"deterministic": True},
            }.items():
                if name != "deterministic" or passes == "bwd":
                    found.append(_tokens(name, 4096, d, passes, options=options))
            found.append(_tokens("4 query heads a K/V head", 4096, d, passes,
                                 heads_k=512 // d, options={"causal": True}))  # fmt: skip
        found.append(_tokens("auto, d=256", 4096, 256, passes))
    for Nk in (4096, 65536):
        for heads_k in (32, 8):
            sizes = {"heads": 32, "heads_k": heads_k}
            found.append(Call(f"decoding, 32 heads on {heads_k}", 1, 128, Nk=Nk, **sizes))
    return found


# --- a tree's process ------------------------------------------------------------------------


@cache
def _numbers() -> np.ndarray:
    """Return normally distributed numbers, which all arrays repeat from different indices on."""
    return np.random.default_rng(0).standard_normal((1 << 22) + 7, np.float32)


def prepared(call: Call) -> Any:
    """Return a function that runs a call once, with arrays on the GPU."""
    import fa_numba

    def array(heads: int, N: int, first: int) -> Any:
        shape = (call.batch, heads, N, call.d)
        made = np.resize(_numbers()[first:], shape).astype(call.dtype)
        if importlib.util.find_spec("torch") is None:
            return fa_numba.device.to_gpu(made)
        import torch

        return torch.from_numpy(made).cuda()

    q = array(call.heads, call.N, 0)
    k, v = (array(call.heads_k, call.Nk or call.N, first) for first in (1, 2))
    if call.passes == "fwd":
        return lambda: fa_numba.attention(q, k, v, **call.options)
    shared = {name: x for name, x in call.options.items() if name != "deterministic"}
    out, lse = fa_numba.attention(q, k, v, return_lse=True, **shared)
    dout = array(call.heads, call.N, 3)
    return lambda: fa_numba.attention_backward(dout, q, k, v, out, lse, **call.options)


def repeated(milliseconds: float, of_one: float) -> int:
    """Return how often a call is repeated that takes ``of_one`` milliseconds."""
    return max(FEWEST, math.ceil(milliseconds / max(of_one, 0.01)))


def serve(tree: str) -> None:
    """Read indices of calls from standard input, and time each call with the package of a tree.

    Each input line contains the index of a call. Each output line is JSON: the median time in
    milliseconds, or a string that says why the call failed. The first time, a call runs three times
    only. This time says how often the call is repeated later.
    """
    sys.path.insert(0, tree)
    import fa_numba

    every, last, run, of_one = calls(), None, None, 0.0
    for line in sys.stdin:
        number = int(line)
        try:
            if number != last:
                last, run = number, None
                gc.collect()  # free the arrays of the previous call
                run = prepared(every[number])
                of_one = float(min(fa_numba.device.time_ms(run, repeats=2, warmup=1)))
                print(json.dumps(of_one), flush=True)
                continue
            warmup, repeats = (repeated(ms, of_one) for ms in (WARMUP, TIMED))
            times = fa_numba.device.time_ms(run, repeats=repeats, warmup=warmup)
            print(json.dumps(float(np.median(times))), flush=True)
        except Exception as error:
            print(json.dumps(f"{type(error).__name__}: {error}"[:200]), flush=True)


class Tree:
    """A process that times calls with one source tree.

    ``tree.time(index)`` returns the time in milliseconds, or says why the call failed.
    """

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, str(Path(__file__).resolve()), "--serve", str(folder)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(
            [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])}  # fmt: skip
        self.process = subprocess.Popen(
            command, cwd=folder, env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def time(self, number: int) -> float | str:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{number}\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        return json.loads(line) if line else "the process of the tree ended"

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


# --- the comparison --------------------------------------------------------------------------


def compile_kernels(folder: Path, numbers: Sequence[int]) -> None:
    """Compile all kernels before the timing: run each call once, in COMPILERS processes.

    The compiled kernels stay on disk.
    """

    def compile_some(mine: Sequence[int]) -> None:
        tree = Tree(folder)
        for number in mine:
            tree.time(number)
        tree.close()

    with ThreadPoolExecutor(COMPILERS) as pool:
        list(pool.map(compile_some, (numbers[n::COMPILERS] for n in range(COMPILERS))))


@dataclass(frozen=True)
class Result:
    """The ratios of a call: *time in the other tree / time in this tree*."""

    call: Call
    median: float
    p20: float
    p80: float
    ms: float
    failure: str = ""


def compare(other: Tree, this: Tree, numbers: Sequence[int], rounds: int) -> Iterator[Result]:
    """Yield the result of each call."""
    for number in numbers:
        ratios, times = [], []
        failure = next(
            (x for x in (other.time(number), this.time(number)) if isinstance(x, str)), ""
        )
        for turn in range(0 if failure else rounds):
            found = {tree: tree.time(number) for tree in ((other, this), (this, other))[turn % 2]}
            failures = [x for x in found.values() if isinstance(x, str)]
            if failures:
                failure = failures[0]
                break
            ratios.append(found[other] / found[this])
            times.append(found[this])
        if failure:
            yield Result(calls()[number], *[math.nan] * 4, failure)
        else:
            p20, median, p80 = np.percentile(ratios, (20, 50, 80))
            yield Result(calls()[number], median, p20, p80, float(np.median(times)))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("other", type=Path, help="the folder of the other tree")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"default {ROUNDS}")
    parser.add_argument("--only", default="", help="only calls whose description has this text")
    parser.add_argument("--csv", type=Path, help="a file for the results")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.serve:
        serve(str(given.other))
        return 0
    numbers = [n for n, call in enumerate(calls()) if given.only in str(call)]
    if not (given.other / "fa_numba").is_dir():
        parser.error(f"OTHER must be a folder that contains fa_numba, got {given.other}")
    if not numbers:
        parser.error(f"no call's description contains {given.only!r}; use another text for --only")
    if given.rounds < 1:
        parser.error(f"the number of rounds must be at least 1, got {given.rounds}")
    for folder in (given.other, ROOT):
        compile_kernels(folder, numbers)
    trees, results = [Tree(given.other), Tree(ROOT)], []
    print("other / this   p20    p80   this, ms   call")
    for each in compare(*trees, numbers, given.rounds):
        results.append(each)
        text = f"{each.median:12.3f} {each.p20:6.3f} {each.p80:6.3f} {each.ms:10.4f}   {each.call}"
        print(f"{each.call}: {each.failure}" if each.failure else text, flush=True)
    for tree in trees:
        tree.close()
    if given.csv:
        with given.csv.open("w", newline="") as file:
            rows = [asdict(x.call) | {"median": x.median, "p20": x.p20, "p80": x.p80, "ms": x.ms,
                                      "failure": x.failure} for x in results]  # fmt: skip
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    slower = [x for x in results if x.p80 < 1]
    print(
        f"{len(slower)} of {len(results)} calls are slower in this tree (80th percentile below 1)"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
