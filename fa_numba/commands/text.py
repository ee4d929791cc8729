"""Functions that format numbers for the output of commands."""

from __future__ import annotations

from fa_numba.emulator.counts import columns as columns

_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def count(x: float, suffix: str = "") -> str:
    """Return a number with three digits and a prefix for a power of 1000, such as "21.9 G".

    ``suffix`` follows the prefix: "B" gives "21.9 GB".

    >>> count(21_900_000_000), count(999, "B")
    ('21.9 G', '999 B')
    """
    for size, prefix in _PREFIXES:
        if x >= size:
            return f"{x / size:.3g} {prefix}{suffix}"
    return f"{x:.3g} {suffix}".rstrip()


def in_bytes(x: float) -> str:
    return count(x, "B")


def seconds(x: float | None) -> str:
    """Return a time in ms, or in us below 1 ms. ``x`` is in seconds. Return "-" for None."""
    if x is None:
        return "-"
    return f"{x * 1e3:.3g} ms" if x >= 1e-3 else f"{x * 1e6:.3g} us"


def mebibytes(x: float) -> str:
    """Return a number of bytes in MiB, or in KiB below 1 MiB."""
    if x < 1 << 20:
        return f"{x / 2**10:.3g} KiB"
    return f"{x / 2**20:.3g} MiB" if x < 1000 << 20 else f"{x / 2**20:,.0f} MiB"
