"""Describes the origin of a run's numbers: commit, command, machine, versions and protocol."""

import functools
import os
import platform
import re
import secrets
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

from ..measure import counters, peers
from ..measure.timing import PROTOCOL
from ..measure.workloads import SEED
from ..record import EMULATOR, MODEL, REPOSITORY

# Environment variable with the commit, for a copy of the working tree without .git.
COMMIT_VARIABLE = "FA_NUMBA_COMMIT"
_PACKAGES = ("numba", "numba-cuda", "numpy", "scipy")
_SMI = ("driver_version", "clocks.max.sm", "clocks.max.mem", "clocks.applications.graphics",
        "power.limit", "memory.total")  # fmt: skip
# Packages that compile and launch kernels. The version is None if a package is not installed.
_CUDA_PACKAGES = ("cuda-core", "cuda-bindings", "nvidia-nvvm", "nvidia-cuda-nvrtc")


def slug(gpu: str) -> str:
    """Return a GPU's name as a file name: "NVIDIA H200" becomes "nvidia-h200"."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")


def _output(*command: str) -> str | None:
    """Return the text that a command prints; None if the command fails or is missing."""
    try:
        done = subprocess.run(
            command, cwd=REPOSITORY, capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def commit() -> tuple[str | None, bool | None]:
    """Return the hash of the current commit, and whether there are uncommitted changes of code.

    Changes of figures and pages do not count. If the environment variable FA_NUMBA_COMMIT contains
    the hash, the second result is None. Without git and the variable, both results are None.
    """
    named = os.environ.get(COMMIT_VARIABLE)
    head = named or _output("git", "rev-parse", "--verify", "HEAD")
    if named or head is None:
        return head, None
    changed = _output("git", "status", "--porcelain", "--", ".", ":!figures", ":!*.md")
    return head, None if changed is None else bool(changed)


@functools.cache
def _smi() -> dict[str, str]:
    line = _output("nvidia-smi", f"--query-gpu={','.join(_SMI)}", "--format=csv,noheader")
    values = line.splitlines()[0].split(",") if line else []
    return dict(zip(_SMI, map(str.strip, values), strict=False))


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@functools.cache
def _ncu() -> str | None:
    found = re.search(r"^Version (\S+)", _output("ncu", "--version") or "", re.MULTILINE)
    return found[1] if found else None


@functools.cache
def _host() -> dict[str, Any]:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            name = re.search(r"^model name\s*: (.*)$", file.read(), re.MULTILINE)
    except OSError:
        name = None
    return {"cpu": name[1] if name else platform.processor() or None, "cores": os.cpu_count()}


class Origin:
    """The origin of a run's numbers. It is read once, when the command starts.

    Parameters
    ----------
    arguments : list of str
        Arguments of the command line.
    gpu : dict or None
        The result of `fa_numba.device.describe`. None without a GPU.
    """

    def __init__(self, arguments: list[str], gpu: dict[str, Any] | None) -> None:
        head, dirty = commit()
        self._common: dict[str, Any] = {
            "id": f"r{secrets.token_hex(3)}",
            "command": " ".join(["python -m experiments", *arguments]),
            "commit": head,
            "date": datetime.now(UTC).date().isoformat(),
            "dirty": dirty,
            "python": platform.python_version(),
            **{package: _version(package) for package in _PACKAGES},
        }
        self._gpu = gpu

    def for_machine(self, machine: str, own: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Return the description of the run for the JSON file of a machine.

        `machine` is "model", "emulator" or a GPU. `own` maps the name of an experiment to the
        sentences with which the experiment describes its measurement. If the machine is a GPU,
        these sentences become a part of the entry "protocol".
        """
        about = dict(self._common)
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
                "host": _host(),
                "l2_counter": counters.L2_NAME,
                "ncu": _ncu(),
                "nvidia_smi": _smi(),
                "protocol": PROTOCOL | {"counters": counters.PROTOCOL} | dict(own or {}),
                "seed": SEED,
                "torch": peers.version(),
                "peers": peers.versions(),
                "system": f"{platform.system()} {platform.machine()}",
            }
        return about
