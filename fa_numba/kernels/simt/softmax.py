"""Softmax of vectors on CUDA cores: naive, safe and online (arXiv 1805.02867, Algorithms 1 to 3).

One thread block computes the softmax of one vector x of V elements. Each pass reads x from global
memory, and each thread handles every 256th element. The last pass computes y = e^(x - m) / d. Here
m is the maximum of x, or 0 in the naive algorithm, and d is the sum of e^(x - m) over all elements.
The algorithms differ in the passes that compute m and d.

Accesses, elements per vector:
            pass                                              loads    stores    in all
    naive   d, then y (Algorithm 1: lines 3, 6)               2 V      V         3 V
    safe    m, then d, then y (Algorithm 2: lines 3, 7, 10)   3 V      V         4 V
    online  m and d together, then y (Algorithm 3: 4-5, 8)    2 V      V         3 V

Results for special elements:
    x = -inf                       y is 0, also if all elements are -inf
    x = NaN                        all y are NaN
    x = inf, safe and online       all y are NaN
    x > 88.7, naive                e^x is inf: y is NaN for this element and 0 for the others
    all x < -87.3, naive           d is 0 and all y are 0
"""

from functools import cache

from fa_numba.device import Kernel, cuda, device_function, float32, uint32
from fa_numba.device.signature import array_type
from fa_numba.intrinsics.arithmetic import LOG2E, NEG_INF, exp2, maximum
from fa_numba.intrinsics.shared import shared_tile
from fa_numba.parts.lanes import max_of_lanes, sum_of_lanes
from fa_numba.parts.softmax import exp_of_difference

ALGORITHMS = ("naive", "safe", "online")
THREADS = 256
WARPS = THREADS // 32
# Elements that a thread, and the block, load at the same time.
EACH = 4
STEP = EACH * THREADS


@device_function
def exp(x):
    """Return e^x."""
    return exp2(x * LOG2E)


@device_function
def load(rx, x, j, V):
    """Load the elements j, j + 256, j + 512, ... of x into the registers rx.

    A call loads EACH elements, one for each register. V is the number of elements of x. Past the
    end of x, -inf is loaded.
    """
    for e in range(EACH):
        at = uint32(j + e * THREADS)
        rx[e] = NEG_INF
        if at < V:
            rx[e] = x[at]


@device_function
def max_of_block(m, s, thread):
    """Return the largest m of all threads of the block. Every thread gets the result.

    ``s`` is shared memory with one float per warp. The function contains a ``syncthreads``.
    """
    m = max_of_lanes(m, 32, 1)
    if thread % uint32(32) == uint32(0):
        s[thread // uint32(32)] = m
    cuda.syncthreads()
    for w in range(WARPS):
        m = maximum(m, s[w])
    return m


@device_function
def sum_of_block(d, s, thread):
    """Return the sum of d over all threads of the block. Every thread gets the result.

    ``s`` is shared memory with one float per warp. The function contains a ``syncthreads``.
    """
    d = sum_of_lanes(d, 32, 1)
    if thread % uint32(32) == uint32(0):
        s[thread // uint32(32)] = d
    cuda.syncthreads()
    d = float32(0.0)
    for w in range(WARPS):
        d += s[w]
    return d


@cache
def make_naive_softmax():
    """Return the kernel that computes Y = softmax(X) by rows (Algorithm 1).

    The grid has one thread block per row.
    """

    def naive_softmax(X, Y):
        sd = shared_tile(0, WARPS)
        rx = cuda.local.array(EACH, float32)
        x, y = X[cuda.blockIdx.x], Y[cuda.blockIdx.x]
        V, thread = uint32(x.shape[0]), uint32(cuda.threadIdx.x)

        d = float32(0.0)  # Alg. 1 line 1
        j = thread
        while j < V:  # Alg. 1 lines 2 to 4: d = sum of e^x
            load(rx, x, j, V)
            for e in range(EACH):
                d += exp(rx[e])
            j = uint32(j + STEP)
        d = sum_of_block(d, sd, thread)

        write(y, x, float32(0.0), d, thread, V, rx)  # Alg. 1 lines 5 to 7: y = e^x / d

    return _kernel(naive_softmax, WARPS)


@cache
def make_safe_softmax():
    """Return the kernel that computes Y = softmax(X) by rows (Algorithm 2).

    The grid has one thread block per row.
    """

    def safe_softmax(X, Y):
        sm = shared_tile(0, WARPS)
        sd = shared_tile(WARPS, WARPS)
        rx = cuda.local.array(EACH, float32)
        x, y = X[cuda.blockIdx.x], Y[cuda.blockIdx.x]
        V, thread = uint32(x.shape[0]), uint32(cuda.threadIdx.x)

        m = NEG_INF  # Alg. 2 line 1
        j = thread
        while j < V:  # Alg. 2 lines 2 to 4: m = max of x
            load(rx, x, j, V)
            for e in range(EACH):
                m = maximum(m, rx[e])
            j = uint32(j + STEP)
        m = max_of_block(m, sm, thread)

        d = float32(0.0)  # Alg. 2 line 5
        j = thread
        while j < V:  # Alg. 2 lines 6 to 8: d = sum of e^(x - m)
            load(rx, x, j, V)
            for e in range(EACH):
                d += exp_of_difference(rx[e], m)
            j = uint32(j + STEP)
        d = sum_of_block(d, sd, thread)

        write(y, x, m, d, thread, V, rx)  # Alg. 2 lines 9 to 11: y = e^(x - m) / d

    return _kernel(safe_softmax, 2 * WARPS)


@cache
def make_online_softmax():
    """Return the kernel that computes Y = softmax(X) by rows (Algorithm 3).

    The grid has one thread block per row.
    """

    def online_softmax(X, Y):
        sm = shared_tile(0, WARPS)
        sd = shared_tile(WARPS, WARPS)
        rx = cuda.local.array(EACH, float32)
        x, y = X[cuda.blockIdx.x], Y[cuda.blockIdx.x]
        V, thread = uint32(x.shape[0]), uint32(cuda.threadIdx.x)

        m = NEG_INF  # Alg. 3 line 1
        d = float32(0.0)  # Alg. 3 line 2
        j = thread
        while j < V:  # Alg. 3 lines 3 to 6
            load(rx, x, j, V)
            m_old = m
            for e in range(EACH):
                m = maximum(m, rx[e])  # Alg. 3 line 4, for EACH elements at once
            d *= exp_of_difference(m_old, m)  # Alg. 3 line 5: d e^(m_old - m) + e^(x - m)
            for e in range(EACH):
                d += exp_of_difference(rx[e], m)
            j = uint32(j + STEP)
        # Merge the (m, d) of all threads as section 3.1 of the paper merges two
        m_old = m
        m = max_of_block(m, sm, thread)
        d = sum_of_block(d * exp_of_difference(m_old, m), sd, thread)

        write(y, x, m, d, thread, V, rx)  # Alg. 3 lines 7 to 9: y = e^(x - m) / d

    return _kernel(online_softmax, 2 * WARPS)


@device_function
def write(y, x, m, d, thread, V, rx):
    """Write y = e^(x - m) / d, or 0 if d is 0.

    V is the number of elements of x. ``thread`` is the number of this thread. The registers rx are
    overwritten.
    """
    inverse = float32(0.0)
    if d != float32(0.0):
        inverse = float32(1.0) / d
    j = thread
    while j < V:
        load(rx, x, j, V)
        for e in range(EACH):
            at = uint32(j + e * THREADS)
            if at < V:
                y[at] = exp_of_difference(rx[e], m) * inverse
        j = uint32(j + STEP)


def _kernel(function, shared_floats):
    """Return the ``Kernel`` whose Python function is ``function``, with the arguments X and Y.

    The kernel has ``shared_floats`` floats of shared memory.
    """
    arguments = (array_type(2), array_type(2))
    return Kernel(function, arguments, THREADS, 4 * shared_floats, min_blocks=8)


MAKERS = {"naive": make_naive_softmax, "safe": make_safe_softmax, "online": make_online_softmax}
