"""Where numbers come from: commit, command, machine, versions, date, protocol."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

from . import counters, peers
from .options import REPOSITORY
from .store import EMULATOR, MODEL, Row
from .timing import PROTOCOL
from .workloads import SEED

# The commit, for a copy of the tree that has no .git.
COMMIT_VARIABLE = "FA_NUMBA_COMMIT"
_PACKAGES = ("numba", "numba-cuda", "numpy", "scipy")
# What compiles and launches; None where the wheel is not installed.
_CUDA_PACKAGES = ("cuda-core", "cuda-bindings", "nvidia-nvvm", "nvidia-cuda-nvrtc")


def slug(gpu: str) -> str:
    """A GPU's name as a file name: "NVIDIA H200" is nvidia-h200."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")


def _output(*command: str) -> str | None:
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(
            command, cwd=REPOSITORY, capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def commit() -> tuple[str | None, bool | None]:
    """The commit, and whether the code differed from it: figures and tables do not count as code.

    The environment's COMMIT_VARIABLE comes first, for a copy of the tree that has another history.
    Whether the code differed is None there, and both are None without git.
    """
    named = os.environ.get(COMMIT_VARIABLE)
    head = named or _output("git", "rev-parse", "--verify", "HEAD")
    if named or head is None:
        return head, None
    changed = _output(
        "git", "status", "--porcelain", "--", ".", ":!figures", ":!README.md", ":!paper_repro.md"
    )
    return head, None if changed is None else bool(changed)


def _smi() -> dict[str, str]:
    names = {
        "driver": "driver_version",
        "sm_clock_max": "clocks.max.sm",
        "memory_clock_max": "clocks.max.mem",
        "sm_clock_application": "clocks.applications.graphics",
        "power_limit": "power.limit",
        "memory": "memory.total",
    }
    line = _output("nvidia-smi", f"--query-gpu={','.join(names.values())}", "--format=csv,noheader")
    if not line:
        return {}
    values = [value.strip() for value in line.splitlines()[0].split(",")]
    return dict(zip(names, values, strict=False))


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


class Provenance:
    """Where a run's numbers come from, read once at its start."""

    def __init__(self, arguments: list[str], gpu: dict[str, Any] | None) -> None:
        head, dirty = commit()
        self._common: dict[str, Any] = {
            "command": " ".join(["python -m experiments", *arguments]),
            "commit": head,
            "date": datetime.now(UTC).date().isoformat(),
            "dirty": dirty,
            "python": platform.python_version(),
            **{package: _version(package) for package in _PACKAGES},
        }
        self._gpu = gpu

    def for_machine(self, machine: str, own: Mapping[str, str] | None = None) -> dict[str, Any]:
        """The JSON beside the machine's rows; `own` is what the experiment adds to the protocol."""
        about = dict(self._common, machine=machine)
        if machine == MODEL:
            about["protocol"] = "closed form: fa_numba.io_model"
        elif machine == EMULATOR:
            about["protocol"] = (
                "global loads and stores of the unchanged kernels, counted by fa_numba.emulator"
            )
            about["seed"] = SEED
        else:
            about |= {
                "cuda": {package: _version(package) for package in _CUDA_PACKAGES},
                "device": self._gpu,
                "l2_counter": counters.L2_NAME,
                "nvidia_smi": _smi(),
                "protocol": PROTOCOL | {"counters": counters.PROTOCOL} | dict(own or {}),
                "seed": SEED,
                "torch": peers.version(),
                "system": f"{platform.system()} {platform.machine()}",
            }
        return about


def when(about: dict[str, Any]) -> str:
    """A recording's date and commit; a + stands for changes beyond the commit."""
    head = about.get("commit")
    code = "no commit" if head is None else f"commit {head[:7]}{'+' if about.get('dirty') else ''}"
    return f"{about.get('date', 'undated')}, {code}"


def when_and_where(about: dict[str, Any], name: str) -> str:
    """One recording in a few words, for footnotes and tables."""
    return f"{name}, {when(about)}"


def l2_counter(about: dict[str, Any], rows: Iterable[Row]) -> str:
    """What counted the recording's bytes between L1 and L2; empty where no row has them."""
    if all(row.source != "l2" for row in rows):
        return ""
    return f"L2 is {about.get('l2_counter', counters.EARLIER_L2_NAME)}"
