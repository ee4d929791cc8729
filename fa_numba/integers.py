"""Integer division and rounding, for code on the host."""

from __future__ import annotations


def ceil_div(n: int, size: int) -> int:
    """Return n / size, rounded up: the number of pieces of ``size`` that cover ``n``."""
    return -(-n // size)


def round_up(n: int, step: int) -> int:
    """Return the smallest multiple of ``step`` that is at least ``n``."""
    return ceil_div(n, step) * step


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least ``n``, for n >= 1."""
    return 1 << (n - 1).bit_length()
