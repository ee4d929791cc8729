"""How numbers and tables are written in a terminal."""

from __future__ import annotations

from fa_numba.emulator.counts import columns as columns

_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def count(x: float, unit: str = "") -> str:
    """Three digits and a power of a thousand: "21.9 G", or with a unit "21.9 GB".

    >>> count(21_900_000_000), count(999, "B")
    ('21.9 G', '999 B')
    """
    for size, prefix in _PREFIXES:
        if x >= size:
            return f"{x / size:.3g} {prefix}{unit}"
    return f"{x:.3g} {unit}".rstrip()


def in_bytes(x: float) -> str:
    return count(x, "B")


def seconds(x: float | None) -> str:
    """Milliseconds, or below one microseconds; a dash for None."""
    if x is None:
        return "-"
    return f"{x * 1e3:.3g} ms" if x >= 1e-3 else f"{x * 1e6:.3g} us"


def mebibytes(x: float) -> str:
    """Bytes in MiB, or below one in KiB."""
    if x < 1 << 20:
        return f"{x / 2**10:.3g} KiB"
    return f"{x / 2**20:.3g} MiB" if x < 1000 << 20 else f"{x / 2**20:,.0f} MiB"
