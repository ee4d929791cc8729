"""Installs this package and what it needs: python .ci/install.py ENVIRONMENT EXTRA,EXTRA

By uv, which takes a third of pip's time; by pip where uv is not to be had, fails, or does not know
what pip was told in its settings.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# A setting of pip -> what uv calls it. Several values are set apart by white space.
OPTIONS = {
    "index-url": "--default-index",
    "extra-index-url": "--index",
    "find-links": "--find-links",
    "trusted-host": "--allow-insecure-host",
}
VARIABLES = {"cert": "SSL_CERT_FILE", "timeout": "UV_HTTP_TIMEOUT"}
VARIABLES["default-timeout"] = VARIABLES["timeout"]
# These change nothing that is installed.
IGNORED = {
    *("disable-pip-version-check", "no-input", "no-color", "progress-bar", "quiet", "verbose"),
    *("retries", "require-virtualenv", "root-user-action", "no-warn-script-location", "no-compile"),
}
FAILED = """\
Not installed; why, stands above. Packages come from where pip takes them (pip config list):
PIP_INDEX_URL names a mirror; without a network, PIP_NO_INDEX=1 PIP_FIND_LINKS=<folder>."""
PLACES = ("global", "install", ":env:")  # the last one that has a setting decides


def uv_arguments(settings: Iterable[str]) -> tuple[list[str], dict[str, str]] | None:
    """Options and environment variables for uv that say what pip's settings do.

    ``settings`` are lines of ``pip config list``. None where one of them is not known here.
    """
    found: dict[str, tuple[int, str]] = {}
    for line in filter(str.strip, settings):
        name, _, value = line.partition("=")
        place, _, key = name.strip().rpartition(".")
        if place not in PLACES:  # of another command
            continue
        if key not in OPTIONS.keys() | VARIABLES.keys() | IGNORED:
            return None
        rank = PLACES.index(place)
        if rank >= found.get(key, (0, ""))[0]:
            found[key] = rank, str(ast.literal_eval(value.strip()))
    options, variables = [], {}
    for key, (_, value) in found.items():
        options += [word for one in value.split() if key in OPTIONS for word in (OPTIONS[key], one)]
        if key in VARIABLES and value:
            variables[VARIABLES[key]] = value
    # As pip does: the best version of all indexes, not of the first that has any.
    return [*options, "--index-strategy", "unsafe-best-match"], variables


def run(command: list[str | Path], **environment: str) -> bool:
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}).returncode == 0


def by_uv(python: Path, packages: list[str]) -> bool:
    """Whether uv has installed them. It comes by this interpreter's pip, which has its settings."""
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
    # pip too, for whoever installs more.
    install = [uv, "pip", "install", "--quiet", "--python", python, *options, "pip", *packages]
    return run(install, **variables)


def by_pip(python: Path, packages: list[str]) -> bool:
    print("installing by pip", flush=True)
    pip = [python, "-m", "pip"]
    has_pip = subprocess.run([*pip, "--version"], capture_output=True).returncode == 0
    if not has_pip and not run([python, "-m", "ensurepip"]):
        print(f"{sys.executable} has no pip: on Debian, apt install python3-venv", file=sys.stderr)
        return False
    options = ["--disable-pip-version-check", "--quiet", "--no-compile", "--retries", "1"]
    return run([*pip, "install", *options, *packages])


def main() -> int:
    environment, extras = sys.argv[1:]
    python = (ROOT / environment / "bin" / "python").absolute()
    packages = ["-e", f".[{extras}]"]
    if by_uv(python, packages) or by_pip(python, packages):
        return 0
    print(FAILED, file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
