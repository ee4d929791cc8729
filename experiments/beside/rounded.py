"""Attention in float64 with some operands rounded to e4m3, for the experiment `fp8_errors`.

The functions take arrays of NumPy or torch. With torch they run on the GPU. The class `Sums` needs
no GPU: it adds products in the way in which Hopper's tensor cores add products of e4m3 numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from fa_numba import reference
from fa_numba.emulator.products import summed_in_few_bits
from fa_numba.intrinsics.float8 import LARGEST, NUMBERS_E4M3, bits_e4m3

from ..lab.measure import peers
from ..lab.measure.check import to_host

FACTOR = 256.0  # P is multiplied by this number before P is rounded
SCALED_ROWS = 128  # rows that share a scale, with scales for blocks
# Sums of e4m3 products in tensor cores keep 13 fraction bits. One instruction adds 32 products.
FRACTION_BITS, TERMS = 13, 32
# Constants that round float64 numbers by additions: to 4 significant bits, and to multiples of
# 2^-9. Numbers of e4m3 below 2^-6 are multiples of 2^-9.
_FOUR_BITS, _STEPS, _SMALLEST_NORMAL = 2.0**49 + 1, 1.5 * 2.0**43, 2.0**-6


def library(x: Any) -> Any:
    """Return the module of an array's functions: torch for a tensor of torch, else numpy."""
    return peers.torch if hasattr(x, "cpu") else np


def wide(x: np.ndarray) -> Any:
    """Return a NumPy array in float64: a torch tensor on the GPU if torch is available."""
    if peers.available():
        return peers.torch.as_tensor(x, device="cuda").double()
    return np.asarray(x, np.float64)


def narrow(x: Any) -> np.ndarray:
    """Return a float64 array of NumPy or torch as a NumPy array."""
    return x.cpu().numpy() if hasattr(x, "cpu") else x


def dequantized(stored: Any, scales: Any) -> Any:
    """Return the numbers that `fa_numba.quantize` stored, times their scales, in float64.

    The result is a tensor of torch if `stored` is a tensor, else a NumPy array.
    """
    if not hasattr(stored, "cpu"):
        return reference.dequantize(to_host(stored), to_host(scales))
    factors = scales.double()[..., None]
    if scales.ndim == 3:
        factors = factors.repeat_interleave(SCALED_ROWS, dim=2)[:, :, : stored.shape[2]]
    else:
        factors = factors[..., None]
    return stored.float().double() * factors


@lru_cache(maxsize=8)
def _rotation(d: int, seed: int) -> np.ndarray:
    return reference.rotate(np.eye(d), seed)


def turned_back(x: Any, seed: int | None) -> Any:
    """Return rows that `fa_numba.quantize` rotated with a seed, without the rotation."""
    if seed is None:
        return x
    matrix = _rotation(x.shape[-1], seed).T
    return x @ (wide(matrix) if hasattr(x, "cpu") else matrix)


def scores(q: Any, k: Any) -> Any:
    """Return S = q k^T / sqrt(d)."""
    return q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])


def weighted(S: Any, v: Any) -> Any:
    """Return softmax(S) v without rounding."""
    lib = library(S)
    P = lib.exp(S - lib.amax(S, -1)[..., None])
    return P @ v / P.sum(-1)[..., None]


def to_e4m3(x: Any) -> Any:
    """Return float64 numbers from 0 to 448, rounded to the nearest number of e4m3."""
    large = x * _FOUR_BITS
    return library(x).where(
        x < _SMALLEST_NORMAL, (x + _STEPS) - _STEPS, large - (large - x)
    )  # fmt: skip


def tiles_of(columns: int, Bc: int, splits: int = 1) -> Iterator[tuple[slice, bool]]:
    """Yield the columns of each tile, and whether a key split begins with the tile.

    Tiles have `Bc` columns. The first splits have one tile more than the others if the number of
    tiles is not a multiple of `splits`.
    """
    tiles = -(-columns // Bc)
    each, more = divmod(tiles, splits)
    begins = {n * each + min(n, more) for n in range(splits)}
    for tile in range(tiles):
        yield slice(tile * Bc, min(columns, (tile + 1) * Bc)), tile in begins


def weighted_by_tiles(S: Any, v: Any, Bc: int, splits: int = 1) -> Any:
    """Return softmax(S) v where P is rounded to e4m3 tile by tile, as kernels round P.

    P = e4m3(256 e^(S - m)), where m is the largest score of the row in the tiles so far. With key
    splits, m begins again with each split.
    """
    lib = library(S)
    most = lib.amax(S, -1)[..., None]
    total, m = 0.0, most
    for tile, begins in tiles_of(S.shape[-1], Bc, splits):
        part = S[..., tile]
        own = lib.amax(part, -1)[..., None]
        m = own if begins else lib.maximum(m, own)
        total = total + lib.exp(m - most) * (to_e4m3(FACTOR * lib.exp(part - m)) @ v[..., tile, :])
    return total / (FACTOR * lib.exp(S - most).sum(-1)[..., None])


def stored_numbers(x: np.ndarray) -> tuple[np.ndarray, float]:
    """Return the e4m3 numbers (as float32) and the scale of a NumPy array with a single scale."""
    scale = np.float32(np.abs(x).max() / LARGEST)
    return NUMBERS_E4M3[bits_e4m3((x / scale).astype(np.float32))], float(scale)


@dataclass(frozen=True)
class Sums:
    """Errors of the sums in tensor cores, for some rows of one head.

    Parameters
    ----------
    q, k, v : ndarray of float32
        Rows of Q, shape (rows, d), and K and V, shape (keys, d).
    Bc : int
        Number of columns of a tile, a multiple of 32.
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    Bc: int

    def errors(self) -> dict[str, float]:
        """Return the relative errors that sums of 13 fraction bits cause, compared with float64.

        All operands are rounded to e4m3, so that only the sums differ from float64.

        Returns
        -------
        dict
            "scores": S is summed in a tensor core, and P V is exact. "running": S is exact, and P V
            has one running sum over all keys. "by-tile": S is exact, and P V of each tile is summed
            in a tensor core and added in float32.
        """
        (q, q_scale), (k, k_scale) = stored_numbers(self.q), stored_numbers(self.k)
        v, _ = stored_numbers(self.v)
        factor = q_scale * k_scale / math.sqrt(q.shape[1])
        S = q.astype(np.float64) @ k.T.astype(np.float64) * factor
        zeros = np.zeros(S.shape, np.float32)
        rough = summed_in_few_bits(zeros, q, k, q.shape[1] // TERMS, FRACTION_BITS)
        exact = weighted_by_tiles(S, v.astype(np.float64), self.Bc)
        made = weighted_by_tiles(rough.astype(np.float64) * factor, v.astype(np.float64), self.Bc)
        running, by_tile, right = self._summed(S, v)
        return {
            "scores": reference.relative_error(made, exact),
            "running": reference.relative_error(running, right),
            "by-tile": reference.relative_error(by_tile, right),
        }

    def _summed(self, S: np.ndarray, v: np.ndarray) -> Sequence[np.ndarray]:
        """Return the sums P V, not divided by l: as a running sum, tile by tile, and in float64."""
        m = np.full((len(S), 1), -np.inf)
        running, by_tile = (np.zeros((len(S), v.shape[1]), np.float32) for _ in range(2))
        right = np.zeros(running.shape)
        for tile, _ in tiles_of(S.shape[1], self.Bc):
            larger = np.maximum(m, S[:, tile].max(axis=1, keepdims=True))
            P = to_e4m3(FACTOR * np.exp(S[:, tile] - larger)).astype(np.float32)
            before, m = np.exp(m - larger).astype(np.float32), larger
            columns = np.ascontiguousarray(v[tile].T)
            given = P, columns, P.shape[1] // TERMS, FRACTION_BITS
            running = summed_in_few_bits(running * before, *given)
            by_tile = by_tile * before + summed_in_few_bits(np.zeros_like(by_tile), *given)
            right = right * before + P.astype(np.float64) @ v[tile]
        return running, by_tile, right
