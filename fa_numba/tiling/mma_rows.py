"""Where the rows of a tile of 16-bit elements lie in shared memory."""

from __future__ import annotations

from dataclasses import dataclass

CHUNK = 8  # elements in 16 bytes
BANKS = 8  # chunks in the 128 bytes that shared memory gives at once


@dataclass(frozen=True)
class TileRows:
    """Rows of ``columns`` 16-bit elements, a multiple of 16, one after the other.

    ``ldmatrix`` reads a chunk, 16 bytes, of 8 neighbouring rows at once: these should lie in 8
    different places of 128 bytes, as their banks do. Where ``swizzled`` chunk c of row r lies at
    chunk c ^ (r // (8 / g)) % g of the row, with g the largest power of two that divides the chunks
    of a row, at most 8. The two chunks of 32 bytes stay neighbours, so that a copy fetches these 32
    bytes once. ``padded`` rows lie 16 bytes further apart, which spreads them too, but tears the 32
    bytes of every other row apart: a copy fetches them twice.
    """

    columns: int
    swizzled: bool = True
    padded: bool = False

    @property
    def pitch(self) -> int:
        """Elements from a row to the next."""
        return self.columns + (CHUNK if self.padded else 0)

    @property
    def group(self) -> int:
        """Neighbouring chunks that change places with each other, g; 1 without a swizzle."""
        chunks = self.columns // CHUNK
        return min(BANKS, chunks & -chunks) if self.swizzled else 1

    @property
    def turn_rows(self) -> int:
        """Neighbouring rows whose chunks change places alike."""
        return BANKS // self.group

    @property
    def exchanged(self) -> int:
        """The bits of an element's place that the swizzle can change."""
        return CHUNK * (self.group - 1)
