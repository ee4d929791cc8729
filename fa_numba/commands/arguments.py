"""Parsers for the arguments of commands, and the width of their output."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fa_numba import __version__
from fa_numba.checks import did_you_mean, one_of
from fa_numba.commands.ending import shortened
from fa_numba.dtypes import UNSCALED
from fa_numba.tiling import Tiles

WIDTH = 100  # the longest line of an output, in characters
MAX_SEQLEN = 1 << 20
# Short names of dtypes that other libraries use.
SHORT_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
_MULTIPLES = {"k": 1 << 10, "m": 1 << 20}


class Parser(argparse.ArgumentParser):
    """A command-line parser that suggests the nearest name if an argument is misspelled."""

    def add_version(self, command: str) -> None:
        """Add the option ``--version``, which prints the command and the version of fa_numba."""
        self.add_argument("--version", action="version", version=f"{command} {__version__}")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse like ``argparse``, but exit with an error message for an unknown ``--option``."""
        found, unknown = super().parse_known_args(args, namespace)
        for text in unknown:
            option = text.partition("=")[0]
            if option.startswith("--"):
                self.error(f"there is no option {option}{did_you_mean(option, self._options())}")
        return found, unknown

    def _options(self) -> list[str]:
        return [option for action in self._actions for option in action.option_strings]

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Raise ``argparse.ArgumentError`` if ``value`` is not among the choices of an argument."""
        if action.choices is not None and value not in action.choices:
            known = list(map(str, action.choices))
            near = did_you_mean(str(value), known)
            raise argparse.ArgumentError(action, f"must be {one_of(known)}, got {value!r}{near}")


def saying(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a function for the parameter ``type`` of argparse, which calls ``parse``.

    If ``parse`` raises ValueError, argparse shows the message of this error to the user.
    """

    def parsed(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parsed


def whole(least: int, most: int) -> Callable[[str], int]:
    """Return a parser for an integer from ``least`` to ``most``.

    The suffixes k and M multiply by 1024 and 1024 * 1024, as in the figures: "4k" is 4096.
    """

    @saying
    def parse(text: str) -> int:
        multiple = _MULTIPLES.get(text[-1:].lower(), 1)
        try:
            value = int(text if multiple == 1 else text[:-1]) * multiple
        except ValueError:
            such = ", such as 4k (4096)" if most >= 4096 else ""
            raise ValueError(
                f"must be an integer from {least} to {most}{such}, got {text!r}"
            ) from None
        if not least <= value <= most:
            raise ValueError(f"must be an integer from {least} to {most}, got {value}")
        return value

    return parse


@saying
def file_to_write(text: str) -> Path:
    """Return the path of a file that can be written. Raise ValueError if it cannot be written.

    The folder of the file must exist. The path may also name a device such as /dev/stdout.
    """
    path = Path(text)
    try:
        if path.is_dir():
            raise ValueError(f"must be a file, but {path} is a folder")
        if not path.parent.is_dir():
            raise ValueError(f"must be in a folder that exists, but {path.parent} does not exist")
        if path.exists() and not path.is_file():
            return path  # a device such as /dev/stdout
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise ValueError(f"must be a file that you may write, got {text!r}")
    except OSError as error:  # a name that is too long
        raise ValueError(
            f"must be the name of a file, got {shortened(text)!r}: {error.strerror}"
        ) from None
    return path


def name_of(known: Callable[[], Sequence[str]]) -> Callable[[str], str]:
    """Return a parser that accepts the names that the function ``known`` returns."""

    @saying
    def parse(text: str) -> str:
        names = known()
        if text not in names:
            raise ValueError(f"must be {one_of(names)}, got {text!r}{did_you_mean(text, names)}")
        return text

    return parse


@saying
def dtype(text: str) -> str:
    """Return the name of a dtype from its name or its short name: "fp16" gives "float16"."""
    name = SHORT_DTYPES.get(text, text)
    if name not in UNSCALED:
        short = ", ".join(SHORT_DTYPES)
        near = did_you_mean(text, [*UNSCALED, *SHORT_DTYPES])
        raise ValueError(f"must be {one_of(UNSCALED)} (short: {short}), got {text!r}{near}")
    return name


@saying
def tiles(text: str) -> Tiles:
    """Return the tiles that a text such as "64x128" names: rows of Q, and rows of K and V."""
    try:
        Br, Bc = map(int, text.split("x"))
    except ValueError:
        raise ValueError(f"must be two integers such as 64x128, got {text!r}") from None
    return Tiles(Br, Bc)
