# %% [markdown]
# # 4. Your own mask and score
#
# A Python function decides which scores are visible. Another Python function changes scores. Both
# run inside the kernels, and nobody writes an N x N matrix to memory.

# %%
import matplotlib.pyplot as plt
import numpy as np

import fa_numba

N, HEAD_DIM = 96, 16
WINDOW, GLOBAL = 16, 4
TILES = fa_numba.Tiles(Br=16, Bc=16)

# %% [markdown]
# `mask_mod` returns whether row i of q may see row j of k, for batch entry b and head h. This
# mask is a causal window of 16 columns, and the first 4 columns are visible to all later rows.


# %%
def window_and_first(b, h, i, j):
    return i >= j and (i - j < WINDOW or j < GLOBAL)


# %% [markdown]
# `score_mod` returns the new score. This one subtracts a penalty that grows with the distance, as
# ALiBi does.


# %%
def distance_penalty(score, b, h, i, j):
    return score - 0.05 * (i - j)


# %%
q, k, v = (np.random.default_rng(n).random((1, 1, N, HEAD_DIM), np.float32) for n in range(3))
o = fa_numba.attention(q, k, v, mask_mod=window_and_first, score_mod=distance_penalty, tiles=TILES)

# %% [markdown]
# The reference in float64 takes the same functions, so that you can check any mask:

# %%
expected = fa_numba.reference.attention(
    q, k, v, mask_mod=window_and_first, score_mod=distance_penalty
)
print("largest difference from float64:", np.abs(o - expected).max())
assert np.allclose(o, expected, atol=1e-5)

# %% [markdown]
# With the mask alone, the kernel visits every tile, even tiles in which nothing is visible. A
# block mask lists the tiles that have something to see. Kernels skip all others.

# %%
blocks = fa_numba.create_block_mask(window_and_first, 1, 1, N, N, tiles=TILES)
print(blocks)
loaded = {}
for name, option in (
    ("mask_mod", {"mask_mod": window_and_first}),
    ("block_mask", {"block_mask": blocks}),
):
    with fa_numba.count_accesses() as counts:
        fa_numba.attention(q, k, v, tiles=TILES, **option)
    loaded[name] = counts.loads["K"]
print("elements of K loaded:", loaded)

# %%
i, j = np.indices((N, N))
visible = (i >= j) & ((i - j < WINDOW) | (j < GLOBAL))
tiles = visible.reshape(N // TILES.Br, TILES.Br, N // TILES.Bc, TILES.Bc).any(axis=(1, 3))

figure, ax = plt.subplots(figsize=(5, 5), layout="constrained")
ax.imshow(visible, cmap="Blues", extent=(0, N, N, 0))
for row, column in np.argwhere(tiles):
    at = column * TILES.Bc, row * TILES.Br
    ax.add_patch(plt.Rectangle(at, TILES.Bc, TILES.Br, fill=False, edgecolor="tab:red"))
ax.set_xlabel("column j of S (row of k)")
ax.set_ylabel("row i of S (row of q)")
ax.set_title(f"{tiles.sum()} of {tiles.size} tiles have a visible score")
plt.show()

# %% [markdown]
# ## Change something
#
# 1. Set `GLOBAL` to 0. How many tiles are left, and how many elements of K are loaded?
# 2. Write a mask in which rows see only rows of their own document: capture an array `document =
#    np.repeat([0, 1, 2], 32)` and return `document[i] == document[j]`.
# 3. Return `30.0 * math.tanh(score / 30.0)` from `score_mod` (import math first). This is soft
#    capping.
#
# Next: [lesson 5](lesson_5_find_a_race.py) breaks a kernel.
