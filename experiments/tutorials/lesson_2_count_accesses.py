# %% [markdown]
# # 2. Count what a kernel moves
#
# Lesson 1 computed accesses from formulas. Why should you believe a formula? This lesson runs the
# kernels on the CPU, in an emulator that counts every load and store. Then it compares the counts
# with the formulas.

# %%
import math

import matplotlib.pyplot as plt
import numpy as np

import fa_numba
from fa_numba.typing import Algorithm

HEAD_DIM = 16
TILES = fa_numba.Tiles(Br=16, Bc=16)
LENGTHS = (16, 32, 48, 64)

# %% [markdown]
# The first run takes some seconds longer, because Numba compiles parts of the emulator. Calls
# inside `count_accesses` run on the emulator. The counts are per array, in elements.

# %%
q, k, v = (np.random.default_rng(n).random((1, 1, 64, HEAD_DIM), np.float32) for n in range(3))
with fa_numba.count_accesses() as counts:
    fa_numba.attention(q, k, v, algorithm="fa1", tiles=TILES)
print(counts)

# %% [markdown]
# The counts follow from the loops. With N = 64 and B_c = 16 there are 4 column tiles. FA-1 loads
# Q once for each column tile, so it loads 4 * 64 * 16 = 4,096 elements of Q. FA-1 stores O in
# each of the 4 passes, and loads O in all passes but the first.

# %%
N = q.shape[2]
column_tiles = math.ceil(N / TILES.Bc)
assert counts.loads["Q"] == column_tiles * N * HEAD_DIM
assert counts.stores["O"] == column_tiles * N * HEAD_DIM
assert counts.loads["O"] == (column_tiles - 1) * N * HEAD_DIM

# %% [markdown]
# Now both loop orders over N. The lines are the formulas, the markers are the counts.

# %%
figure, ax = plt.subplots(figsize=(8, 4), layout="constrained")
curves: list[tuple[Algorithm, str, str]] = [
    ("fa1", "tab:red", "FA-1: K/V outer"),
    ("fa2", "tab:blue", "FA-2: Q outer"),
]
for algorithm, colour, title in curves:
    formula, counted = [], []
    for N in LENGTHS:
        shape = (1, 1, N, HEAD_DIM)
        plan = fa_numba.plan(shape, shape, algorithm=algorithm, tiles=TILES)
        formula.append(plan.accesses.total)
        q, k, v = (np.random.default_rng(n).random(shape, np.float32) for n in range(3))
        with fa_numba.count_accesses() as counts:
            fa_numba.attention(q, k, v, algorithm=algorithm, tiles=TILES)
        counted.append(counts.loads.total() + counts.stores.total())
    assert formula == counted  # equal to the last element
    ax.plot(LENGTHS, formula, color=colour, label=f"{title}, formula")
    ax.plot(LENGTHS, counted, "o", color=colour, label=f"{title}, counted")
ax.set_xlabel("sequence length N")
ax.set_ylabel("elements loaded and stored")
ax.set_title("The formulas give exactly what the kernels load and store")
ax.legend()
plt.show()

# %% [markdown]
# The counter also knows each source line, and what a GPU's profiler would report for it. A sector
# is a piece of 32 bytes of global memory. "copy" means an asynchronous copy from global to shared
# memory. These are the three lines with most sectors in the last call above, FA-2 with N = 64:

# %%
most = sorted(counts.traffic.items(), key=lambda entry: -entry[1].sectors)[:3]
for access, traffic in most:
    print(f"{access.kernel} {access.kind} of {access.array}: {traffic.sectors} sectors of 32 bytes")
    print(f"    {access.line}")

# %% [markdown]
# ## Change something
#
# 1. Set `TILES` to `fa_numba.Tiles(Br=32, Bc=16)`. Which of the two curves falls?
# 2. Pass `causal=True` to `plan` and `attention` in the loop of the picture. Both kernels skip
#    tiles above the diagonal. Which kernel gains more?
# 3. Add 50 to `LENGTHS`, which is not a multiple of the tile size. Do formula and count still
#    agree?
#
# Next: [lesson 3](lesson_3_online_softmax.py) follows the arithmetic.
