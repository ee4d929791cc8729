"""Rounding of whole numbers, for the host: blocks that cover a length, sizes that hold one."""

from __future__ import annotations


def ceil_div(n: int, size: int) -> int:
    """How many pieces of ``size`` cover ``n``."""
    return -(-n // size)


def round_up(n: int, step: int) -> int:
    """The smallest multiple of ``step`` that is at least ``n``."""
    return ceil_div(n, step) * step


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least ``n``, for n >= 1."""
    return 1 << (n - 1).bit_length()
