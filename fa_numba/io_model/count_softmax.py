"""Accesses of the softmax of vectors (arXiv 1805.02867)."""

from __future__ import annotations

from fa_numba.checks import as_size, check_name
from fa_numba.io_model.accesses import Accesses

# Number of passes that load the vector. Each algorithm stores the result once.
_LOADS = {"naive": 2, "safe": 3, "online": 2}


def check_softmax(algorithm: str) -> None:
    """Raise ValueError unless the name of an algorithm is one of the three allowed names.

    Parameters
    ----------
    algorithm : str
        "naive", "safe" or "online".
    """
    check_name("algorithm", algorithm, tuple(_LOADS))


def softmax(batch: int, elements: int, algorithm: str) -> Accesses:
    """Return the accesses of the softmax of vectors, in float32.

    Parameters
    ----------
    batch : int
        Number of vectors X.
    elements : int
        Elements of each vector.
    algorithm : str
        "naive", "safe" or "online".

    Returns
    -------
    Accesses
        Loads of X and stores of the result Y.

    Raises
    ------
    TypeError
        If a size is not an integer.
    ValueError
        If a size is below 1, or the algorithm has another name.

    Notes
    -----
    Accesses per element, as the paper counts them (Milakov and Gimelshein, arXiv 1805.02867,
    sections 2 and 3):

        algorithm  loads of X                           stores of Y   all
        naive      2 (the sum; the result)              1             3
        safe       3 (the maximum; the sum; the result) 1             4
        online     2 (maximum and sum; the result)      1             3

    Examples
    --------
    >>> softmax(2, 100, "safe").loads, softmax(2, 100, "safe").stores
    ({'X': 600}, {'Y': 200})
    """
    check_softmax(algorithm)
    count = as_size("batch", batch) * as_size("elements", elements)
    return Accesses({"X": _LOADS[algorithm] * count}, {"Y": count})
