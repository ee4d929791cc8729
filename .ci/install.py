"""Installs this package and its dependencies: python .ci/install.py ENVIRONMENT EXTRA,EXTRA

The script uses uv, which takes a third of pip's time. It uses pip in three cases: uv cannot be
installed, uv fails, or pip's settings contain a setting that uv does not have.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Maps a setting of pip to the option of uv. White space separates several values of a setting.
OPTIONS = {
    "index-url": "--default-index",
    "extra-index-url": "--index",
    "find-links": "--find-links",
    "trusted-host": "--allow-insecure-host",
}
# Maps a setting of pip to the environment variable of uv.
VARIABLES = {"cert": "SSL_CERT_FILE", "timeout": "UV_HTTP_TIMEOUT"}
VARIABLES["default-timeout"] = VARIABLES["timeout"]
# Settings that do not change which packages are installed.
IGNORED = {
    *("disable-pip-version-check", "no-input", "no-color", "progress-bar", "quiet", "verbose"),
    *("retries", "require-virtualenv", "root-user-action", "no-warn-script-location", "no-compile"),
}
FAILED = """\
The packages could not be installed; see the error above. They are downloaded from the index in
pip's settings, which "pip config list" shows. To change the index:
PIP_INDEX_URL names a mirror; without a network, PIP_NO_INDEX=1 PIP_FIND_LINKS=<folder>."""
# Sections of pip's settings. If several contain a setting, the last one has priority.
SECTIONS = ("global", "install", ":env:")


def uv_arguments(settings: Iterable[str]) -> tuple[list[str], dict[str, str]] | None:
    """Return options and environment variables for uv that are equivalent to pip's settings.

    ``settings`` are the lines that ``pip config list`` prints. Return None if uv has no equivalent
    of a setting.
    """
    found: dict[str, tuple[int, str]] = {}
    for line in filter(str.strip, settings):
        name, _, value = line.partition("=")
        section, _, key = name.strip().rpartition(".")
        if section not in SECTIONS:  # a setting of another command of pip
            continue
        if key not in OPTIONS.keys() | VARIABLES.keys() | IGNORED:
            return None
        rank = SECTIONS.index(section)
        if rank >= found.get(key, (0, ""))[0]:
            found[key] = rank, str(ast.literal_eval(value.strip()))
    options, variables = [], {}
    for key, (_, value) in found.items():
        options += [word for one in value.split() if key in OPTIONS for word in (OPTIONS[key], one)]
        if key in VARIABLES and value:
            variables[VARIABLES[key]] = value
    # Like pip, choose the best version from all indexes, not from the first index with the package.
    return [*options, "--index-strategy", "unsafe-best-match"], variables


def run(command: list[str | Path], **environment: str) -> bool:
    """Run a command in the project's root; return whether it succeeded."""
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}).returncode == 0


def by_uv(python: Path, packages: list[str]) -> bool:
    """Install packages into an environment by uv; return whether this succeeded.

    `python` is the interpreter of the environment. If uv is missing there, the pip of the running
    interpreter installs it, with pip's settings.
    """
    pip = [sys.executable, "-m", "pip"]
    listed = subprocess.run([*pip, "config", "list"], capture_output=True, text=True)
    arguments = uv_arguments(listed.stdout.splitlines()) if listed.returncode == 0 else None
    if arguments is None:
        return False
    options, variables = arguments
    uv = python.with_name("uv")
    get = [*pip, "--python", python, "install", "-qq", "--no-compile", "uv"]
    if not uv.exists() and not run(get, PIP_DISABLE_PIP_VERSION_CHECK="1"):
        return False
    print("installing by uv", flush=True)
    # Also install pip, for users who install more packages.
    install = [uv, "pip", "install", "--quiet", "--python", python, *options, "pip", *packages]
    return run(install, **variables)


def by_pip(python: Path, packages: list[str]) -> bool:
    """Install packages into an environment by pip; return whether this succeeded.

    `python` is the interpreter of the environment.
    """
    print("installing by pip", flush=True)
    pip = [python, "-m", "pip"]
    has_pip = subprocess.run([*pip, "--version"], capture_output=True).returncode == 0
    if not has_pip and not run([python, "-m", "ensurepip"]):
        print(f"{sys.executable} has no pip: on Debian, apt install python3-venv", file=sys.stderr)
        return False
    options = ["--disable-pip-version-check", "--quiet", "--no-compile", "--retries", "1"]
    return run([*pip, "install", *options, *packages])


def main() -> int:
    """Install the package; return the exit status."""
    environment, extras = sys.argv[1:]
    python = (ROOT / environment / "bin" / "python").absolute()
    packages = ["-e", f".[{extras}]"]
    if by_uv(python, packages) or by_pip(python, packages):
        return 0
    print(FAILED, file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
