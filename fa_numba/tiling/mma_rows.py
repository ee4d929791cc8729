"""The layout of rows of 16-bit elements in shared memory."""

from __future__ import annotations

from dataclasses import dataclass

CHUNK = 8  # elements in 16 bytes
BANKS = 8  # chunks in 128 bytes, which shared memory reads in one step


@dataclass(frozen=True)
class TileRows:
    """The layout of a tile in shared memory: rows of ``columns`` 16-bit elements.

    The rows lie one after the other. ``columns`` must be a multiple of 16. A chunk is 8
    neighbouring elements of a row, which are 16 bytes. ``ldmatrix`` reads one chunk from each of 8
    neighbouring rows at once. There are no bank conflicts if the addresses of these 8 chunks differ
    modulo 128 bytes. There are three layouts:

    - Swizzled: the chunks of a row are permuted. Chunk c of row r is stored at the position of
      chunk ``c ^ (r // (8 / g)) % g``. Here g is the largest power of two that divides the number
      of chunks of a row, and at most 8.
    - Padded: the chunks have their normal order. Each row begins 16 bytes further away from the row
      before.
    - Neither: the chunks have their normal order, and reads can have bank conflicts.

    The swizzle keeps two chunks together that fill a 32-byte sector of global memory. A copy from
    global memory therefore fetches each sector once. In the padded layout, every other row begins
    in the middle of 32 aligned bytes. A copy fetches each sector of these rows twice.
    """

    columns: int
    swizzled: bool = True
    padded: bool = False

    @property
    def pitch(self) -> int:
        """Distance in elements from the start of a row to the start of the next row."""
        return self.columns + (CHUNK if self.padded else 0)

    @property
    def group(self) -> int:
        """Number g of neighbouring chunks within which the swizzle permutes chunks.

        It is 1 without a swizzle.
        """
        chunks = self.columns // CHUNK
        return min(BANKS, chunks & -chunks) if self.swizzled else 1

    @property
    def turn_rows(self) -> int:
        """Number of neighbouring rows for which the swizzle permutes the chunks in the same way."""
        return BANKS // self.group

    @property
    def exchanged(self) -> int:
        """Mask of the bits of an element's column that the swizzle can change."""
        return CHUNK * (self.group - 1)
