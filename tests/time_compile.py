"""What a first call goes into, in CPU seconds: python tests/time_compile.py [--base REVISION]

The plain forward kernels of FlashAttention-2 compiled for an H100 or H200, without a GPU. Each in a
process of its own, since what Numba loads at a first compile is part of it; of `--repeats`
processes the one that takes least. With a base, its sums stand beside. `--out` keeps a row for each
stage: CONTRIBUTING.md shows tests/data/compile_time.csv.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KERNELS = ("simt float32 64", "mma float16 64", "mma float16 128", "wgmma float16 64")
KERNELS += ("wgmma float16 128",)
# What the stages of TIMED are, in their order.
STAGES = {
    "import": "importing fa_numba, with Numba and SciPy",
    "registries": "Numba loads what it knows of types and functions",
    "inlining": "device functions translated from bytecode and inlined",
    "types": "types of all variables",
    "lowering": "LLVM's representation made",
    "other passes": "Numba's other passes",
    "LTO-IR": "NVVM reads it and writes LTO-IR",
    "optimiser": "NVVM's optimiser and PTX, in nvJitLink",
    "ptxas": "PTX to machine code",
    "compile": "a first call's compiling in all",
    "compile before": "the same at the base",
}
MEASURED = tuple(stage for stage in STAGES if not stage.startswith("compile"))

TIMED = r"""
import json, sys, time
clock, took, inner = time.process_time, {}, []
begin = clock()
import fa_numba
took["import"] = clock() - begin
from cuda.core import Linker, LinkerOptions, ObjectCode
from numba import cuda
from numba.cuda import codegen
from numba.cuda.core import compiler, compiler_machinery
from fa_numba import device
from fa_numba.device.front_end import without_repeats

STAGE = {"InlineInlinables": "inlining", "CUDATranslateBytecode": "inlining"}
STAGE |= {"NopythonTypeInference": "types", "CUDANativeLowering": "lowering"}


def timed(where, name, stage_of):
    function = getattr(where, name)

    def call(*args, **kws):
        stage, start = stage_of(args), clock()
        inner.append(0.0)
        try:
            return function(*args, **kws)
        finally:
            spent = clock() - start
            took[stage] = took.get(stage, 0.0) + spent - inner.pop()
            if inner:
                inner[-1] += spent

    setattr(where, name, call)


def pass_stage(args):  # a device function's passes are part of its inlining
    return "inlining" if inner[1:] else STAGE.get(type(args[2]).__name__, "other passes")


timed(compiler_machinery.PassManager, "_runPass", pass_stage)
timed(compiler.CompilerBase, "__init__", lambda args: "registries")
timed(codegen.CUDACodeLibrary, "get_ltoir", lambda args: "LTO-IR")
timed(cuda, "compile", lambda args: "other passes")
unit, dtype, d = sys.argv[1].split()
shape = (4, 16, 4096, int(d))
with device.planning_for((9, 0), 227 * 1024):
    planned = fa_numba.plan(shape, shape, algorithm="fa2", dtype=dtype, unit=unit)
(kernel,) = planned.launched
with without_repeats():
    ltoir, _ = cuda.compile(
        kernel.function, kernel.signature, cc=(9, 0, "a"), device=False, abi="numba",
        output="ltoir", launch_bounds=(kernel.threads, kernel.min_blocks),
    )


def linked(kind, **options):
    options = LinkerOptions(arch="sm_90a", link_time_optimization=True, **options)
    start = clock()
    Linker(ObjectCode.from_ltoir(ltoir), options=options).link(kind)
    return clock() - start


linked("cubin")  # nvJitLink loads its library
took["optimiser"] = linked("ptx", ptx=True)
took["ptxas"] = linked("cubin") - took["optimiser"]
print(json.dumps(took))
"""


def stages(tree: Path, kernel: str) -> dict[str, float]:
    """CPU seconds by stage, with the package of `tree`, in a new process."""
    done = subprocess.run(
        [sys.executable, "-c", TIMED, kernel],
        cwd=tree,
        env=os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def compiling(took: dict[str, float]) -> float:
    """All but the import."""
    return sum(seconds for stage, seconds in took.items() if stage != "import")


def table(path: Path) -> list[str]:
    """The file's rows as a table: a line for each stage, a column for each kernel."""
    with open(path) as file:
        rows = list(csv.DictReader(file))
    of = {(row["kernel"], row["stage"]): row["seconds"] for row in rows}
    kernels = list(dict.fromkeys(kernel for kernel, _ in of))
    stages = [stage for stage in of_stages() if (kernels[0], stage) in of]
    lines = [f"| CPU seconds | {' | '.join(kernels)} |", f"|---|{'---:|' * len(kernels)}"]
    for stage in stages:
        cells = " | ".join(of[kernel, stage] for kernel in kernels)
        lines.append(f"| {STAGES.get(stage, stage)} | {cells} |")
    return lines


def of_stages() -> list[str]:
    """The stages of a file in the order of its table."""
    first, *others = STAGES
    return [*others, first]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", help="a revision to compare with")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", help="a CSV file for the rows")
    options = parser.parse_args()
    git = ["git", "-C", str(ROOT), "worktree"]
    found: list[tuple[str, dict[str, float], float | None]] = []
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "base"
        if options.base:
            subprocess.run([*git, "add", "--detach", base, options.base], check=True)
        try:
            for kernel in KERNELS:
                runs, before = [], []
                for _ in range(options.repeats):
                    runs.append(stages(ROOT, kernel))
                    if options.base:
                        before.append(compiling(stages(base, kernel)))
                best = min(runs, key=compiling)
                found.append((kernel, best, min(before, default=None)))
                each = ", ".join(f"{stage} {best[stage]:.2f}" for stage in MEASURED)
                was = f", before {min(before):.2f}" if before else ""
                print(f"{kernel}: {compiling(best):.2f}{was} ({each})", flush=True)
        finally:
            if options.base:
                subprocess.run([*git, "remove", "--force", base], check=False)
    if options.out:
        with open(options.out, "w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["kernel", "stage", "seconds"])
            for kernel, took, was in found:
                writer.writerows((kernel, stage, f"{took[stage]:.2f}") for stage in MEASURED)
                writer.writerow((kernel, "compile", f"{compiling(took):.2f}"))
                if was is not None:
                    writer.writerow((kernel, "compile before", f"{was:.2f}"))
        print(*table(Path(options.out)), sep="\n")


if __name__ == "__main__":
    main()
