"""Kernels like the examples of Numba's CUDA documentation and like STUMPY's, for the emulator.

Each kernel is written from the description of its example. `EXAMPLES` maps a name to a function
that launches the kernel and returns (found, expected). `fa_numba/emulator/README.md` lists them.
"""

import math

import numba
import numpy as np
from numba import cuda, float32, float64, int32, int64
from numba.cuda.random import xoroshiro128p_uniform_float32

from fa_numba.emulator import create_xoroshiro128p_states, launch

TILE = 8
BINS = 16
PRICES = np.array([2.0, 2.0, 4.0, 4.0, 2.0])
EXAMPLES = {}


def example(name):
    """Add a function to the examples."""

    def add(run):
        EXAMPLES[name] = run
        return run

    return add


def draws(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


# ---- one thread per element


@cuda.jit
def add_vectors(x, y, total):
    i = cuda.grid(1)
    if i < total.size:
        total[i] = x[i] + y[i]


@example("vector addition")
def vector_addition():
    x, y = draws(2, 100, dtype=np.float64)
    total = np.zeros_like(x)
    launch(add_vectors, 4, 32, x, y, total)
    return total, x + y


@cuda.jit
def add_with_strides(x, y, total):
    for i in range(cuda.grid(1), total.size, cuda.gridsize(1)):
        total[i] = x[i] + y[i]


@example("grid-stride loop")
def grid_stride_loop():
    x, y = draws(2, 100)
    total = np.zeros_like(x)
    launch(add_with_strides, 2, 16, x, y, total)
    return total, x + y


@numba.njit
def price_after_tax(net, rate):
    tax = net * rate
    if tax > 1:
        return net + tax
    return net + 1


@cuda.jit
def tax_all(net, rates, gross):
    i = cuda.grid(1)
    if i < net.size:
        gross[i] = price_after_tax(net[i], rates[i])


@example("one function for CPU and GPU")
def one_function_for_both():
    net, rates = np.arange(1.0, 11.0), np.full(10, 0.25)
    gross = np.zeros(10)
    launch(tax_all, 1, 32, net, rates, gross)
    return gross, [price_after_tax.py_func(n, r) for n, r in zip(net, rates, strict=True)]


@cuda.jit
def revenue(sold, total):
    product = cuda.grid(1)
    total[product] = PRICES[product] * sold[product]


@example("global array as a constant")
def global_constant():
    sold, total = np.arange(10.0, 15.0), np.zeros(5)
    launch(revenue, 1, 5, sold, total)
    return total, PRICES * sold


@cuda.jit
def smooth(x, out):
    weights = cuda.const.array_like(PRICES)
    i = cuda.grid(1)
    if i < out.size:
        total = 0.0
        for k in range(weights.size):
            total += weights[k] * x[i + k]
        out[i] = total


@example("constant memory")
def constant_memory():
    x, out = draws(44, dtype=np.float64), np.zeros(40)
    launch(smooth, 2, 32, x, out)
    return out, np.correlate(x, PRICES)


@cuda.jit(device=True)
def turns_until_escape(c, most):
    z = 0j
    for turn in range(most):
        z = z * z + c
        if z.real * z.real + z.imag * z.imag > 4:
            return turn
    return most


@cuda.jit
def mandelbrot(turns, most):
    column, row = cuda.grid(2)
    rows, columns = turns.shape
    if row >= rows or column >= columns:
        return
    point = complex(3 * column / columns - 2, 2 * row / rows - 1)
    turns[row, column] = turns_until_escape(point, most)


@example("Mandelbrot set")
def mandelbrot_set():
    turns = np.zeros((12, 20), np.int32)
    launch(mandelbrot, (3, 2), (8, 8), turns, 20)
    rows, columns = np.indices(turns.shape)
    points = 3 * columns / 20 - 2 + 1j * (2 * rows / 12 - 1)
    expected = np.vectorize(lambda c: turns_until_escape.py_func(c, 20))(points)
    return turns, expected


@cuda.jit
def live_or_die(now, then):
    row, column = cuda.grid(2)
    rows, columns = now.shape
    if row < rows and column < columns:
        neighbours = -now[row, column]
        for i in range(-1, 2):
            for j in range(-1, 2):
                neighbours += now[(row + i) % rows, (column + j) % columns]
        if neighbours == 3 or (neighbours == 2 and now[row, column] == 1):
            then[row, column] = 1
        else:
            then[row, column] = 0


@example("Conway's Game of Life")
def game_of_life():
    now = np.random.default_rng(1).integers(0, 2, (13, 11), dtype=np.int32)
    then = np.zeros_like(now)
    launch(live_or_die, (2, 2), (8, 8), now, then)
    steps = [(i, j) for i in (-1, 0, 1) for j in (-1, 0, 1) if i or j]
    count = sum(np.roll(now, step, (0, 1)) for step in steps)
    return then, (count == 3) | ((count == 2) & (now == 1))


# ---- shared memory


@cuda.jit
def multiply(A, B, C):
    row, column = cuda.grid(2)
    if row < C.shape[0] and column < C.shape[1]:
        total = float32(0.0)
        for k in range(A.shape[1]):
            total += A[row, k] * B[k, column]
        C[row, column] = total


def product(kernel, *options):
    A, B = draws(10, 20), draws(20, 13, seed=1)
    C = np.zeros((10, 13), np.float32)
    launch(kernel, (2, 2), (TILE, TILE), A, B, C, *options)
    return C, A @ B


@example("matrix product")
def matrix_product():
    return product(multiply)


@cuda.jit
def multiply_by_tiles(A, B, C, first_barrier, last_barrier):
    tile_of_A = cuda.shared.array(shape=(TILE, TILE), dtype=float32)
    tile_of_B = cuda.shared.array(shape=(TILE, TILE), dtype=float32)
    column, row = cuda.grid(2)
    i, j = cuda.threadIdx.y, cuda.threadIdx.x
    total = float32(0.0)
    for start in range(0, A.shape[1], TILE):
        tile_of_A[i, j] = 0
        tile_of_B[i, j] = 0
        if row < A.shape[0] and start + j < A.shape[1]:
            tile_of_A[i, j] = A[row, start + j]
        if column < B.shape[1] and start + i < B.shape[0]:
            tile_of_B[i, j] = B[start + i, column]
        if first_barrier:
            cuda.syncthreads()
        for k in range(TILE):
            total += tile_of_A[i, k] * tile_of_B[k, j]
        if last_barrier:
            cuda.syncthreads()
    if row < C.shape[0] and column < C.shape[1]:
        C[row, column] = total


@example("matrix product in shared memory")
def matrix_product_in_shared_memory():
    return product(multiply_by_tiles, True, True)


@cuda.jit
def add_up(x, total, barrier):
    values = cuda.shared.array(0, int64)
    t = cuda.threadIdx.x
    values[t] = x[t]
    cuda.syncthreads()
    distance = cuda.blockDim.x // 2
    while distance > 0:
        if t < distance:
            values[t] += values[t + distance]
        if barrier:
            cuda.syncthreads()
        distance //= 2
    if t == 0:
        total[0] = values[0]


@example("sum by reduction in shared memory")
def sum_by_reduction():
    x, total = np.arange(128), np.zeros(1, np.int64)
    launch(add_up, 1, 128, x, total, True, shared_bytes=8 * 128)
    return total, [x.sum()]


@cuda.jit
def copy_halves(x, out):
    both = cuda.shared.array(0, float32)
    half = cuda.blockDim.x // 2
    left, right = both[:half], both[half : 2 * half]
    t = cuda.threadIdx.x
    if t < half:
        left[t] = x[t]
    else:
        right[t - half] = -x[t]
    cuda.syncthreads()
    if t < half:
        out[t] = right[t] + left[half - 1 - t]


@example("dynamic shared memory in two parts")
def dynamic_shared_memory():
    x, out = draws(64), np.zeros(32, np.float32)
    launch(copy_halves, 1, 64, x, out, shared_bytes=4 * 64)
    return out, x[:32][::-1] - x[32:]


@cuda.jit
def histogram(x, counts):
    local = cuda.shared.array(BINS, int32)
    t = cuda.threadIdx.x
    if t < BINS:
        local[t] = 0
    cuda.syncthreads()
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        cuda.atomic.add(local, x[i], 1)
    cuda.syncthreads()
    if t < BINS:
        cuda.atomic.add(counts, t, local[t])


@example("histogram by atomics")
def histogram_by_atomics():
    x = np.random.default_rng(2).integers(0, BINS, 500, dtype=np.int32)
    counts = np.zeros(BINS, np.int32)
    launch(histogram, 2, 64, x, counts)
    return counts, np.bincount(x, minlength=BINS)


@cuda.jit
def greatest(x, result):
    i = cuda.grid(1)
    if i < x.size:
        cuda.atomic.max(result, 0, x[i])


@example("maximum by atomics")
def maximum_by_atomics():
    x, result = draws(100, dtype=np.float64), np.full(1, -np.inf)
    launch(greatest, 4, 32, x, result)
    return result, [x.max()]


@cuda.jit
def sum_of_warps(x, sums):
    value = x[cuda.grid(1)]
    distance = 16
    while distance > 0:
        value += cuda.shfl_down_sync(0xFFFFFFFF, value, distance)
        distance //= 2
    if cuda.laneid == 0:
        sums[cuda.grid(1) // cuda.warpsize] = value


@example("sum of a warp by shuffles")
def sum_by_shuffles():
    x, sums = np.arange(128, dtype=np.float64), np.zeros(4)
    launch(sum_of_warps, 2, 64, x, sums)
    return sums, x.reshape(4, 32).sum(axis=1)


# ---- threads of the complete grid wait for each other


@cuda.jit
def diffuse(even, odd, steps, rate):
    i = cuda.grid(1)
    if i >= even.size:
        return
    grid = cuda.cg.this_grid()
    for step in range(steps):
        if step % 2 == 0:
            now, then = even, odd
        else:
            now, then = odd, even
        change = -2 * now[i]
        if i > 0:
            change += now[i - 1]
        if i + 1 < now.size:
            change += now[i + 1]
        then[i] = now[i] + rate * change
        grid.sync()


@example("1D heat equation with a barrier of the grid")
def heat_equation():
    even = np.zeros(50)
    even[20] = 100.0
    expected, odd = even.copy(), np.zeros(50)
    launch(diffuse, 2, 32, even, odd, 7, 0.25)
    for _ in range(7):
        padded = np.pad(expected, 1)
        expected = expected + 0.25 * (padded[:-2] - 2 * expected + padded[2:])
    return odd, expected


@cuda.jit
def relax(now, then):
    row, column = cuda.grid(2)
    if 0 < row < now.shape[0] - 1 and 0 < column < now.shape[1] - 1:
        across = now[row, column - 1] + now[row, column + 1]
        down = now[row - 1, column] + now[row + 1, column]
        then[row, column] = 0.25 * (across + down)


@example("Laplace's equation, one step of Jacobi's method")
def laplace():
    now = draws(12, 14, dtype=np.float64)
    then = now.copy()
    launch(relax, (2, 2), (8, 8), now, then)
    expected = now.copy()
    across, down = now[1:-1, :-2] + now[1:-1, 2:], now[:-2, 1:-1] + now[2:, 1:-1]
    expected[1:-1, 1:-1] = 0.25 * (across + down)
    return then, expected


@cuda.jit
def row_after_row(M):
    column, columns = cuda.grid(1), M.shape[1]
    grid = cuda.cg.this_grid()
    for row in range(1, M.shape[0]):
        M[row, column] = M[row - 1, columns - 1 - column] + 1
        grid.sync()


@example("rows that depend on each other, with a barrier of the grid")
def sequential_rows():
    M = np.zeros((9, 64), np.int32)
    launch(row_after_row, 2, 32, M)
    return M, np.broadcast_to(np.arange(9)[:, None], M.shape)


@cuda.jit
def label_sessions(user, seconds, pause, session):
    i = cuda.grid(1)
    inside = i < user.size
    begins = inside and (i == 0 or user[i] != user[i - 1] or seconds[i] - seconds[i - 1] > pause)
    if begins:
        session[i] = i
    cuda.cg.this_grid().sync()
    if begins:
        click = i + 1
        while click < user.size and session[click] < 0:
            session[click] = i
            click += 1


@example("clicks divided into sessions, with a barrier of the grid")
def sessions():
    user = np.array([1, 1, 1, 1, 2, 2, 3, 3, 3, 3, 3, 4])
    seconds = np.array([1, 2, 5000, 5001, 5001, 5002, 1, 2, 9000, 20000, 20001, 20002])
    session = np.full(12, -1)
    launch(label_sessions, 2, 8, user, seconds, 3600, session)
    return session, [0, 0, 2, 2, 4, 4, 6, 6, 8, 9, 9, 11]


# ---- random numbers


@cuda.jit
def integrate(states, low, high, samples, means):
    i = cuda.grid(1)
    if i < means.size:
        total = float32(0.0)
        for _ in range(samples):
            u = xoroshiro128p_uniform_float32(states, i)
            total += math.exp(-(low + u * (high - low)))
        means[i] = (high - low) * total / samples


@example("Monte Carlo integration")
def monte_carlo():
    states = create_xoroshiro128p_states(64, seed=3)
    means = np.zeros(64, np.float32)
    launch(integrate, 2, 32, states, float32(0.0), float32(1.0), 20, means)
    return [abs(means.mean() - (1 - math.exp(-1))) < 0.02], [True]


@cuda.jit
def fill(cube, states):
    x, y, z = cuda.grid(3)
    columns, rows, layers = cuda.gridsize(3)
    generator = (z * rows + y) * columns + x
    for i in range(z, cube.shape[0], layers):
        for j in range(y, cube.shape[1], rows):
            for k in range(x, cube.shape[2], columns):
                cube[i, j, k] = xoroshiro128p_uniform_float32(states, generator)


@example("random numbers in a 3D grid")
def random_cube():
    states = create_xoroshiro128p_states(64, seed=4)
    cube = np.full((5, 6, 7), -1, np.float32)
    launch(fill, (1, 2, 1), (4, 2, 4), cube, states)
    return [cube.min() >= 0, cube.max() < 1, np.unique(cube).size > 200], [True] * 3


# ---- like STUMPY's matrix profile on a GPU


@cuda.jit(device=True)
def place_of(values, value):
    low = 0
    high = values.shape[0]
    while low < high:
        middle = (low + high) // 2
        if values[middle] > value:
            high = middle
        else:
            low = middle + 1
    return low


@cuda.jit
def update_profile(i, T, m, zone, dots, previous, first, mean, sigma, best, index, left, right):
    """Compare window i with all windows; keep each window's nearest, its left and its right one."""
    for j in range(cuda.grid(1), mean.shape[0], cuda.gridsize(1)):
        if i == 0 or j == 0:
            dot = first[i + j]
        else:
            dot = previous[j - 1] - T[i - 1] * T[j - 1] + T[i + m - 1] * T[j + m - 1]
        dots[j] = dot
        if abs(i - j) <= zone:
            continue
        if sigma[i] == 0 or sigma[j] == 0:
            distance = float64(0.0) if sigma[i] == sigma[j] else float64(m)
        else:
            correlation = (dot - m * mean[i] * mean[j]) / (m * sigma[i] * sigma[j])
            distance = max(2 * m * (1 - correlation), 0.0)
        if distance < best[j, -1]:
            at = place_of(best[j], distance)
            for k in range(best.shape[1] - 1, at, -1):
                best[j, k] = best[j, k - 1]
                index[j, k] = index[j, k - 1]
            best[j, at] = distance
            index[j, at] = i
        if i < j and distance < left[j]:
            left[j] = distance
        if i > j and distance < right[j]:
            right[j] = distance


@example("matrix profile, like STUMPY's gpu_stump")
def matrix_profile(n=40, m=5, k=3):
    T = draws(n, dtype=np.float64)
    T[20:27] = 0.5  # windows without variance
    windows = np.lib.stride_tricks.sliding_window_view(T, m)
    count, zone = len(windows), 2
    mean, sigma = windows.mean(axis=1), windows.std(axis=1)
    sigma[np.ptp(windows, axis=1) == 0] = 0
    first, dots = windows @ windows[0], np.zeros((2, count))
    best, index = np.full((count, k), np.inf), np.full((count, k), -1)
    left, right = np.full((2, count), np.inf)
    for i in range(count):
        launch(
            update_profile, 2, 16, i, T, m, zone, dots[i % 2], dots[1 - i % 2], first, mean, sigma,
            best, index, left, right,
        )  # fmt: skip
    D = np.full((count, count), np.inf)
    for i in range(count):
        for j in range(count):
            if abs(i - j) > zone:
                if sigma[i] and sigma[j]:
                    one, two = ((windows[x] - mean[x]) / sigma[x] for x in (i, j))
                    D[i, j] = ((one - two) ** 2).sum()
                else:
                    D[i, j] = 0 if sigma[i] == sigma[j] else m
    found = np.column_stack([best, left, right])
    before = np.where(np.tri(count, k=-1, dtype=bool).T, D, np.inf).min(axis=0)
    after = np.where(np.tri(count, k=-1, dtype=bool), D, np.inf).min(axis=0)
    return found, np.column_stack([np.sort(D, axis=0)[:k].T, before, after])


@cuda.jit
def update_distances(i, T, m, p, sums, previous, first, nearest, index):
    """Compare window i with all windows by the p-norm of their difference."""
    j = cuda.grid(1)
    if j >= nearest.size:
        return
    if i == 0 or j == 0:
        total = first[i + j]
    else:
        total = previous[j - 1]
        total -= abs(T[i - 1] - T[j - 1]) ** p
        total += abs(T[i + m - 1] - T[j + m - 1]) ** p
    if total < 1e-12:
        total = 0.0
    sums[j] = total
    if i != j and total < nearest[j]:
        nearest[j] = total
        index[j] = i


@example("matrix profile without normalisation, like STUMPY's gpu_aamp")
def matrix_profile_of_differences(n=30, m=4, p=2.0):
    T = draws(n, dtype=np.float64)
    windows = np.lib.stride_tricks.sliding_window_view(T, m)
    count = len(windows)
    D = (abs(windows[:, None] - windows) ** p).sum(axis=2)
    sums, nearest, index = np.zeros((2, count)), np.full(count, np.inf), np.full(count, -1)
    for i in range(count):
        launch(
            update_distances, 1, 32, i, T, m, p, sums[i % 2], sums[1 - i % 2], D[0].copy(),
            nearest, index,
        )  # fmt: skip
    np.fill_diagonal(D, np.inf)
    return [*nearest, *index], [*D.min(axis=0), *D.argmin(axis=0)]
