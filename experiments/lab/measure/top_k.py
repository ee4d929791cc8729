"""Kernels on CUDA cores that find the K largest elements of vectors, with and without softmax.

`make_softmax_top_k` is Algorithm 4 of arXiv 1805.02867: one pass over a vector x finds its maximum
m, the sum d of e^(x - m), and its K largest elements. The result is K probabilities e^(x - m) / d
with their indices. `make_top_k` finds the K largest elements only, and is used behind a softmax.

One thread block handles one vector. Each warp keeps the K largest of its elements in registers, in
falling order: lane n has the n-th largest element. Most elements are not larger than the K-th
largest element so far, and cost one comparison. The others are inserted one after the other. At
last one warp merges the lists of all warps. Of equal elements, the element with the smaller index
comes first. If a vector has fewer than K elements, the results past its end are 0 with index -1.
Elements of -inf have probability 0 and are never in the result. NaN is not supported.

Accesses, elements per vector of V elements:
            loads    stores
top-k       V        2 K
fused       V        2 K
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from fa_numba import device
from fa_numba.device import Kernel, array_type, cuda, device_function, float32, int32, uint32
from fa_numba.intrinsics.arithmetic import LOG2E, NEG_INF, exp2, maximum
from fa_numba.intrinsics.shared import index_tile, shared_tile

from .check import WrongResult, to_host

THREADS = 256
WARPS = THREADS // 32
FLOATS, INDICES = 2 * WARPS + THREADS, THREADS  # elements of shared memory
# Elements that a thread, and the block, load at the same time.
EACH = 4
STEP = EACH * THREADS
MOST = 32  # largest K: one element for each lane
FULL_WARP = 0xFFFFFFFF
NONE = 2**31 - 1  # index of an element that does not exist
# Relative error that is allowed in a probability.
BOUND = 1e-5


@device_function
def power(x, m):
    """Return e^(x - m), or 0 if x is -inf."""
    if x == NEG_INF:
        return float32(0.0)
    return exp2((x - m) * LOG2E)


def make_softmax_top_k(k: int) -> Kernel:
    """Return the kernel that computes the K largest elements of softmax(x) in one pass over x.

    Parameters
    ----------
    k : int
        K, from 1 to MOST.

    Returns
    -------
    Kernel
        The kernel, with the arguments X: (batch, V), Y: (batch, K) and I: (batch, K). Y gets the
        probabilities, in falling order. I gets their indices in int32. The grid has one thread
        block per vector.

    Raises
    ------
    ValueError
        If K is too small or too large.
    """
    return _make(k, True)


def make_top_k(k: int) -> Kernel:
    """Return the kernel that finds the K largest elements of x.

    Parameters
    ----------
    k : int
        K, from 1 to MOST.

    Returns
    -------
    Kernel
        The kernel, with the arguments of the kernel that `make_softmax_top_k` returns. Y gets the
        elements.

    Raises
    ------
    ValueError
        If K is too small or too large.
    """
    return _make(k, False)


@cache
def _make(K: int, fused: bool) -> Kernel:
    if not 1 <= K <= MOST:
        raise ValueError(f"k must be from 1 to {MOST}, got {K}")

    def top_k(X, Y, I):
        s = shared_tile(0, FLOATS)  # m and d of the warps, and then their lists
        si = index_tile(FLOATS, INDICES)
        rx = cuda.local.array(EACH, float32)
        x = X[cuda.blockIdx.x]
        V, thread = uint32(x.shape[0]), uint32(cuda.threadIdx.x)
        warp, lane = thread // uint32(32), thread % uint32(32)

        m = NEG_INF  # Alg. 4 lines 1 to 4
        d = float32(0.0)
        top, place = NEG_INF, int32(NONE)  # lane n has the n-th largest element of the warp
        least = NEG_INF  # the K-th largest element
        j = uint32(warp * 32)
        while j < V:  # Alg. 4 lines 5 to 17
            for e in range(EACH):
                at = uint32(j + lane + e * THREADS)
                rx[e] = NEG_INF
                if at < V:
                    rx[e] = x[at]
            if fused:
                m_old = m
                for e in range(EACH):
                    m = maximum(m, rx[e])  # line 6, for EACH elements at once
                d *= power(m_old, m)  # line 7
                for e in range(EACH):
                    d += power(rx[e], m)
            for e in range(EACH):
                found = uint32(cuda.ballot_sync(FULL_WARP, rx[e] > least))
                while found != uint32(0):  # lines 8 to 16: insert the elements, one after the other
                    source = int32(cuda.ffs(found)) - int32(1)
                    found = uint32(found & uint32(found - uint32(1)))
                    value = cuda.shfl_sync(FULL_WARP, rx[e], source)
                    above = cuda.shfl_up_sync(FULL_WARP, top, 1)
                    its = cuda.shfl_up_sync(FULL_WARP, place, 1)
                    if value > top:  # this lane and all lanes behind it move by one
                        if lane > uint32(0) and value > above:
                            top, place = above, its
                        else:
                            top, place = value, int32(j + uint32(source) + uint32(e * THREADS))
                    least = cuda.shfl_sync(FULL_WARP, top, K - 1)
            j = uint32(j + STEP)

        if fused:  # merge m and d of all threads
            m_old = m
            for n in range(5):
                m = maximum(m, cuda.shfl_xor_sync(FULL_WARP, m, 16 >> n))
            if lane == uint32(0):
                s[warp] = m
            cuda.syncthreads()
            for w in range(WARPS):
                m = maximum(m, s[w])
            d *= power(m_old, m)
            for n in range(5):
                d += cuda.shfl_xor_sync(FULL_WARP, d, 16 >> n)
            if lane == uint32(0):
                s[WARPS + warp] = d
            cuda.syncthreads()
            d = float32(0.0)
            for w in range(WARPS):
                d += s[WARPS + w]

        s[uint32(2 * WARPS) + thread] = top
        si[thread] = uint32(place)
        cuda.syncthreads()
        if warp == uint32(0):  # Alg. 4 lines 18 to 21: lane w merges the list of warp w
            head = uint32(lane * 32)
            for r in range(K):
                value, index = NEG_INF, int32(NONE)
                if lane < uint32(WARPS):
                    value, index = s[uint32(2 * WARPS) + head], int32(si[head])
                mine = index
                for n in range(3):
                    other = cuda.shfl_xor_sync(FULL_WARP, value, 4 >> n)
                    its = cuda.shfl_xor_sync(FULL_WARP, index, 4 >> n)
                    if other > value or (other == value and its < index):
                        value, index = other, its
                if mine == index and mine != int32(NONE):
                    head = uint32(head + uint32(1))
                if lane == uint32(0):
                    largest = float32(0.0)
                    if index == int32(NONE):
                        index = int32(-1)
                    else:
                        largest = value
                        if fused:
                            largest = power(value, m) / d
                    Y[cuda.blockIdx.x, r] = largest
                    I[cuda.blockIdx.x, r] = index

    arguments = array_type(2), array_type(2), array_type(2, int32)
    return Kernel(top_k, arguments, THREADS, 4 * (FLOATS + INDICES), min_blocks=4)


def accesses(batch: int, elements: int, k: int, softmax: int = 0) -> dict[str, int]:
    """Return the loads and stores of a softmax with top-k, in elements.

    Parameters
    ----------
    batch : int
        Number of vectors.
    elements : int
        Elements of a vector.
    k : int
        K.
    softmax : int, default 0
        Accesses per element of a softmax that runs before the top-k: 4 for the safe softmax, 3 for
        the online softmax. 0: the kernel that does both.

    Returns
    -------
    dict
        The keys are "loads" and "stores".

    Examples
    --------
    >>> accesses(1, 1000, 5), accesses(1, 1000, 5, softmax=4)
    ({'loads': 1000, 'stores': 10}, {'loads': 4000, 'stores': 1010})
    """
    size = batch * elements
    stores = size if softmax else 0
    return {"loads": size + softmax * size - stores, "stores": stores + 2 * batch * k}


def launch(kernel: Kernel, x: Any, y: Any, indices: Any) -> None:
    """Launch one of the kernels over the rows of x.

    Parameters
    ----------
    kernel : Kernel
        A kernel of `make_softmax_top_k` or `make_top_k`.
    x, y, indices : array
        The arguments of the kernel: arrays of `device` on a GPU, NumPy arrays on the emulator.
    """
    arrays = map(device.argument, (x, y, indices)) if device.on_gpu() else (x, y, indices)
    device.launch(kernel, (x.shape[0], 1, 1), tuple(arrays))


def check(x: Any, k: int, result: Sequence[Any]) -> float:
    """Return the largest relative error of the probabilities in the first and the last row.

    Parameters
    ----------
    x : array, shape (batch, V)
        The vectors. V must be at least K.
    k : int
        K.
    result : sequence of array
        Probabilities and indices, both of shape (batch, K).

    Returns
    -------
    float
        The largest relative error of the K largest probabilities, and of the probabilities of the
        elements that the indices name. The exact probabilities are in float64.

    Raises
    ------
    WrongResult
        If the error is larger than BOUND, or if an index occurs twice.
    """
    worst = 0.0
    for row in (0, x.shape[0] - 1):
        y, indices = (to_host(array[row]) for array in result)
        indices = indices.astype(np.int64)
        exact = np.exp(to_host(x[row]).astype(np.float64) - float(to_host(x[row]).max()))
        exact /= exact.sum()
        if len({*indices.tolist()}) != k or not (0 <= indices).all():
            raise WrongResult(f"the {k} indices of row {row} must differ, got {indices.tolist()}")
        largest = -np.sort(-exact)[:k]
        for found in (y, exact[indices]):
            worst = float(np.maximum(worst, np.max(np.abs(found - largest) / largest)))
    if not worst <= BOUND:
        raise WrongResult(f"the error against float64 must be at most {BOUND:g}, got {worst:.3g}")
    return worst
