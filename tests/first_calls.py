"""Times first calls on a GPU: python tests/first_calls.py [--base TREE] [--out FILE]

Each first call runs in a new process whose imports are done and whose CUDA context exists, with an
empty folder for compiled kernels. A forward call comes first, then the backward call. The time of
a call includes a synchronisation at its end. With ``--base``, the package in the folder TREE is
timed too; both take turns. Two processes run at the same time.

``--out`` writes one row per process. CONTRIBUTING.md shows tests/data/first_calls.csv.
"""

from __future__ import annotations

import argparse
import csv
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# {name: (algorithm, dtype, head_dim, options)}
CASES = {
    "fa2 float16 64": ("fa2", "float16", 64, ""),
    "fa2 float16 128 causal": ("fa2", "float16", 128, "causal=True"),
    "fa2 float32 64": ("fa2", "float32", 64, ""),
    "fa2 float16 64 score_mod": ("fa2", "float16", 64, "score_mod=leaky"),
    "fa1 float16 128": ("fa1", "float16", 128, ""),
}
FIELDS = ("gpu", "tree", "case", "round", "import_s", "forward_s", "backward_s")

TIMED = r"""
import time
import torch
torch.zeros(4, device="cuda").sum().item()
clock = time.perf_counter
start = clock()
import fa_numba
imported = clock() - start
from numba import cuda
cuda.current_context()

def leaky(score, b, h, i, j):
    return score if score > 0 else 0.5 * score

q, k, v, dout = (torch.randn(2, 4, 1024, {d}, device="cuda", dtype=torch.{dtype}) for _ in range(4))
torch.cuda.synchronize()
start = clock()
out, lse = fa_numba.attention(q, k, v, algorithm="{algorithm}", return_lse=True, {options})
torch.cuda.synchronize()
middle = clock()
fa_numba.attention_backward(dout, q, k, v, out, lse, algorithm="{algorithm}", {options})
torch.cuda.synchronize()
print(torch.cuda.get_device_name(), imported, middle - start, clock() - middle, sep=",")
"""


def first_calls(tree: Path, case: str) -> list[str]:
    """Return the GPU's name and the seconds of import, forward and backward, in a new process."""
    algorithm, dtype, d, options = CASES[case]
    text = TIMED.format(algorithm=algorithm, dtype=dtype, d=d, options=options)
    with tempfile.TemporaryDirectory() as folder:
        path = os.pathsep.join([str(tree), *filter(None, [os.environ.get("PYTHONPATH")])])
        done = subprocess.run(
            [sys.executable, "-c", text],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": path, "FA_NUMBA_CACHE": folder},
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        raise RuntimeError(f"{tree}, {case}: the call failed:\n{done.stderr}")
    gpu, *seconds = done.stdout.splitlines()[-1].split(",")
    return [gpu, *(f"{float(x):.2f}" for x in seconds)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", type=Path, help="a folder with another version of the package")
    parser.add_argument("--rounds", type=int, default=3, help="processes per case and version")
    parser.add_argument("--out", type=Path, help="a CSV file for the rows")
    options = parser.parse_args()
    trees = {"new": ROOT} | ({"base": options.base.resolve()} if options.base else {})
    runs = [(n, case, name) for n in range(options.rounds) for case in CASES for name in trees]
    rows: list[list[object]] = []
    with ThreadPoolExecutor(2) as pool:
        found = pool.map(lambda run: first_calls(trees[run[2]], run[1]), runs)
        for (n, case, name), (gpu, *seconds) in zip(runs, found, strict=True):
            rows.append([gpu, name, case, n + 1, *seconds])
            print(*rows[-1], sep=", ", flush=True)
            if options.out:
                with open(options.out, "w", newline="") as file:
                    writer = csv.writer(file, lineterminator="\n")
                    writer.writerow(FIELDS)
                    writer.writerows(rows)


if __name__ == "__main__":
    main()
