"""How long the emulator takes, on one core: python tests/time_emulator.py [--base REVISION]

Each call in a process of its own, the least CPU time of three after one that is not timed; with a
base, of that revision and of this tree in turn. `--out` keeps a row for each: CONTRIBUTING.md shows
tests/data/emulator_speed.csv.
"""

from __future__ import annotations

import argparse
import csv
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CALLS = (
    "matmul",
    *(f"fwd {a} {dtype} 256" for dtype in ("float32", "float16") for a in ("fa1", "fa2")),
    "fwd+bwd fa1 float32 256",
    "fwd+bwd fa2 float16 256",
    *(f"fwd {a} {dtype} 1024" for dtype in ("float32", "float16") for a in ("fa1", "fa2")),
)
# The older emulator refuses calls that are too large for it; these would take it minutes.
LARGE = 1024

TIMED = r"""
import sys, time
sys.path[:0] = ["tests", "tests/emulator"]
import numpy as np, fa_numba
from fa_numba.host import placement

placement.EMULATOR_SECONDS = 2**40
rng, call = np.random.default_rng(0), sys.argv[1].split()
if call == ["matmul"]:
    from test_emulator import TILE, matmul
    from fa_numba.emulator import launch
    A, B = rng.standard_normal((2, 64, 64)).astype(np.float32)
    run = lambda: launch(matmul, (4, 4), (TILE, TILE), (A, B, np.zeros_like(A)))
else:
    passes, algorithm, dtype, N = call[0], call[1], call[2], int(call[3])
    q, k, v, dout = rng.standard_normal((4, 1, 1, N, 64), dtype=np.float32).astype(dtype)
    options = {}
    if passes == "fwd+bwd":
        bias = rng.standard_normal((1, 1, N, N)).astype(np.float32)
        options = {"causal": True, "softcap": 2.0, "bias": bias, "dropout_p": 0.1, "seed": 1}
        options["alibi_slopes"] = np.array([0.1], np.float32)

    def run():
        with fa_numba.count_accesses():
            out, lse = fa_numba.attention(
                q, k, v, algorithm=algorithm, return_lse=True, **options
            )
            if passes == "fwd+bwd":
                fa_numba.attention_backward(
                    dout, q, k, v, out, lse, algorithm=algorithm, **options
                )

run()
times = []
for _ in range(3):
    start = time.process_time()
    run()
    times.append(time.process_time() - start)
print(min(times))
"""


def seconds(tree: Path, call: str) -> float:
    """The CPU time of a call with the package of `tree`."""
    names = {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", TIMED, call],
        cwd=tree,
        env=os.environ | names,
        capture_output=True,
        text=True,
        check=True,
    )
    return float(done.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", help="a revision to compare with")
    parser.add_argument("--out", help="a CSV file for the rows")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "base"
        if options.base:
            subprocess.run(
                ["git", "-C", str(ROOT), "worktree", "add", "--detach", str(base), options.base],
                check=True,
                capture_output=True,
            )
        try:
            for call in CALLS:
                large = call.split()[-1] == str(LARGE)
                old = seconds(base, call) if options.base and not large else None
                new = seconds(ROOT, call)
                rows.append({"call": call, "before": old, "after": new})
                ratio = f"{old / new:.1f}" if old else ""
                print(f"{call:26} {old or 0:8.3f} {new:8.3f} {ratio}", flush=True)
        finally:
            if options.base:
                remove = ["git", "-C", str(ROOT), "worktree", "remove", "--force", str(base)]
                subprocess.run(remove, check=False, capture_output=True)
    if options.out:
        with open(options.out, "w", newline="") as file:
            writer = csv.DictWriter(file, ["call", "before", "after"], lineterminator="\n")
            writer.writeheader()
            writer.writerows(
                {**row, **{k: f"{row[k]:.3f}" for k in ("before", "after") if row[k]}}
                for row in rows
            )


if __name__ == "__main__":
    main()
