# %% [markdown]
# # 6. Your own Numba kernel on the emulator
#
# The emulator runs any kernel of `numba.cuda`, not only attention. It counts memory accesses and
# finds races, accesses outside of arrays and bank conflicts. A warp is 32 threads that run
# together. Shared memory has 32 banks: an access in which threads of a warp need different words
# of one bank takes several passes. This lesson transposes a matrix twice: once without and once
# with shared memory.

# %%
import matplotlib.pyplot as plt
import numpy as np
from numba import cuda, float32

from fa_numba import emulator

N, TILE = 64, 32

# %% [markdown]
# The first kernel reads rows and writes columns. The 32 threads of a warp write to 32 different
# rows, so that every store touches 32 sectors of memory.


# %%
@cuda.jit
def transpose_simple(source, result):
    column, row = cuda.grid(2)
    result[column, row] = source[row, column]


# %% [markdown]
# The second kernel goes through a tile in shared memory, so that it reads and writes rows.


# %%
@cuda.jit
def transpose_tiled(source, result):
    tile = cuda.shared.array((TILE, TILE), float32)
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    tile[y, x] = source[cuda.blockIdx.y * TILE + y, cuda.blockIdx.x * TILE + x]
    cuda.syncthreads()
    result[cuda.blockIdx.x * TILE + y, cuda.blockIdx.y * TILE + x] = tile[x, y]


# %% [markdown]
# `emulator.launch(kernel, grid, block, ...)` does on the CPU what `kernel[grid, block](...)` does
# on a GPU.

# %%
source = np.random.default_rng(0).random((N, N), np.float32)
grid, block = (N // TILE, N // TILE), (TILE, TILE)
found = {}
for kernel in (transpose_simple, transpose_tiled):
    result = np.zeros_like(source)
    found[kernel.__name__] = emulator.launch(kernel, grid, block, source, result)
    assert (result == source.T).all()
    stores = found[kernel.__name__].total(space="global", kind="store")
    conflicts = found[kernel.__name__].total(space="shared").conflicts
    print(f"{kernel.__name__}: {stores.sectors} sectors stored, {conflicts} bank conflicts")

# %% [markdown]
# The tiled kernel stores to fewer sectors, but its column reads of shared memory conflict: all 32
# threads of a warp read from one bank. A row of 33 elements removes the conflicts, because the
# elements of a column then lie in different banks.


# %%
@cuda.jit
def transpose_padded(source, result):
    tile = cuda.shared.array((TILE, TILE + 1), float32)
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    tile[y, x] = source[cuda.blockIdx.y * TILE + y, cuda.blockIdx.x * TILE + x]
    cuda.syncthreads()
    result[cuda.blockIdx.x * TILE + y, cuda.blockIdx.y * TILE + x] = tile[x, y]


# %%
result = np.zeros_like(source)
found["transpose_padded"] = emulator.launch(transpose_padded, grid, block, source, result)
assert (result == source.T).all()
for name, counts in found.items():
    print(f"{name}: {counts.total(space='shared').conflicts} bank conflicts")

figure, axes = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
names = [name.removeprefix("transpose_") for name in found]
all_sectors = [each.total(space="global", kind="store").sectors for each in found.values()]
all_conflicts = [each.total(space="shared").conflicts for each in found.values()]
axes[0].bar(names, all_sectors)
axes[0].set_ylabel("sectors of 32 bytes")
axes[0].set_title("Stores to global memory")
axes[1].bar(names, all_conflicts)
axes[1].set_ylabel("bank conflicts")
axes[1].set_title("Shared memory")
plt.show()

# %% [markdown]
# ## Change something
#
# 1. Remove `cuda.syncthreads()` from `transpose_tiled`. What does the emulator say?
# 2. Set `N` to 50, and round the grid up: `grid = (2, 2)`. Which access does the emulator report?
#    Add `if row < N and column < N:` to `transpose_simple`. In the other kernels, add an `if`
#    before the load and an `if` before the store, but none around `syncthreads`.
# 3. Use your own kernel. [The emulator's page](../../fa_numba/emulator/README.md) lists the
#    functions of `numba.cuda` that are supported.
#
# Next: [lesson 7](lesson_7_recorded_data.py) draws recorded measurements.
