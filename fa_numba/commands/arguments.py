"""What the commands' arguments and outputs have in common."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from fa_numba.tiling import Tiles

WIDTH = 100  # columns of a terminal that every output fits into
MAX_SEQLEN = 1 << 20


def saying(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """``parse``, as argparse says what its ValueError says."""

    def parsed(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parsed


def whole(least: int, most: int) -> Callable[[str], int]:
    """A parser of an integer from `least` to `most`."""

    @saying
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ValueError(f"must be an integer from {least} to {most}, got {text!r}") from None
        if not least <= value <= most:
            raise ValueError(f"must be an integer from {least} to {most}, got {value}")
        return value

    return parse


@saying
def tiles(text: str) -> Tiles:
    """Block sizes such as 64x128: rows of Q times rows of K and V."""
    try:
        Br, Bc = map(int, text.split("x"))
    except ValueError:
        raise ValueError(f"must be two integers such as 64x128, got {text!r}") from None
    return Tiles(Br, Bc)
