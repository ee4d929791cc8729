"""States of Numba's random number generators, computed on the CPU.

A generator is xoroshiro128+ by Blackman and Vigna. Generator i begins 2**64 numbers after generator
i - 1. Such a jump is a linear map of the 128 bits of the state over the integers modulo 2.
"""

from __future__ import annotations

import numpy as np

WORD = 64
ONES = (1 << WORD) - 1
JUMP = 0xBEAC0467EBA5FACB, 0xD86B048B86AA9922  # coefficients of the jump's polynomial
State = tuple[np.ndarray, np.ndarray]  # the two 64-bit words of each generator, shape (n,) each


def _first(seed: int) -> int:
    """Return the 64-bit word that fills both words of the first generator's state (splitmix64)."""
    z = (seed + 0x9E3779B97F4A7C15) & ONES
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & ONES
    z = (z ^ z >> 27) * 0x94D049BB133111EB & ONES
    return z ^ z >> 31


def _turned(x: np.ndarray, by: int) -> np.ndarray:
    """Return 64-bit words whose bits are rotated to the left by `by` positions."""
    return x << np.uint64(by) | x >> np.uint64(WORD - by)


def _next(state: State) -> State:
    """Return the states of generators after each generator has produced one number."""
    a, b = state
    b = a ^ b
    return _turned(a, 55) ^ b ^ b << np.uint64(14), _turned(b, 36)


def _jump() -> np.ndarray:
    """Return the matrix of a jump from one generator to the next, shape (128, 128).

    If `bits` are the bits of a generator's state, ``bits @ matrix % 2`` are the bits of the state
    of the next generator.
    """
    state = _words(np.eye(2 * WORD))
    sums = np.zeros_like(state[0]), np.zeros_like(state[1])
    for coefficients in JUMP:
        for bit in range(WORD):
            if coefficients >> bit & 1:
                sums = sums[0] ^ state[0], sums[1] ^ state[1]
            state = _next(state)
    return _bits(sums)


def _bits(state: State) -> np.ndarray:
    """Return the bits of the states of n generators as zeros and ones, shape (n, 128)."""
    words = np.stack(state, axis=1)[:, :, None]
    return (words >> np.arange(WORD, dtype=np.uint64) & np.uint64(1)).reshape(-1, 2 * WORD) * 1.0


def _words(bits: np.ndarray) -> State:
    """Return the states of n generators from their bits, zeros and ones of shape (n, 128)."""
    words = bits.reshape(-1, 2, WORD).astype(np.uint64) << np.arange(WORD, dtype=np.uint64)
    a, b = np.bitwise_or.reduce(words, axis=2).T
    return a, b


def create_xoroshiro128p_states(n: int, seed: int, subsequence_start: int = 0) -> np.ndarray:
    """Return the states of n random number generators, as a NumPy array.

    The function of this name in ``numba.cuda.random`` needs a GPU, since it returns an array in GPU
    memory. The states are equal. Kernels on the emulator then draw the same numbers as on a GPU,
    with ``xoroshiro128p_uniform_float32`` and the other functions of ``numba.cuda.random``.

    Parameters
    ----------
    n : int
        Number of generators, usually one for each thread.
    seed : int
        Seed of the first generator.
    subsequence_start : int, default 0
        Number of subsequences of 2**64 numbers to skip.

    Returns
    -------
    ndarray, shape (n,)
        The states, with the fields ``s0`` and ``s1`` of dtype uint64.

    Raises
    ------
    ValueError
        If `n` is not a positive integer, `seed` is not an integer, or `subsequence_start` is not an
        integer of at least 0.

    Examples
    --------
    >>> states = create_xoroshiro128p_states(2, seed=1)
    >>> print(states["s0"])
    [10451216379200822465  8341117667364343960]
    """
    skipped = subsequence_start
    for name, value, least in (
        ("n", n, 1),
        ("seed", seed, None),
        ("subsequence_start", skipped, 0),
    ):
        whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
        if not whole or (least is not None and value < least):
            limit = "" if least is None else f" of at least {least}"
            raise ValueError(f"{name} must be an integer{limit}, got {value!r}")
    first = np.full(1, _first(int(seed)), np.uint64)
    bits, jump = _bits((first, first)), _jump()
    power, skipped = jump, int(skipped)
    while skipped:
        if skipped & 1:
            bits = bits @ power % 2
        power, skipped = power @ power % 2, skipped >> 1
    power = jump  # the map by as many jumps as there are generators
    while len(bits) < n:
        bits = np.concatenate([bits, bits @ power % 2])
        power = power @ power % 2
    states = np.zeros(n, np.dtype([("s0", np.uint64), ("s1", np.uint64)], align=True))
    states["s0"], states["s1"] = _words(bits[:n])
    return states
