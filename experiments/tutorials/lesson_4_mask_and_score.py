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
# `score_mod` returns the new score. It gets the score after the multiplication by `scale`. This
# one subtracts a penalty that grows with the distance, as ALiBi does.


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
# No algorithm is named above, so that FlashAttention-2 runs, the default.
#
# With the mask alone, the kernel visits every tile, even tiles in which nothing is visible. A
# block mask lists the tiles that have something to see. Kernels skip all others.
# `create_block_mask` takes the function, the batch size, the number of heads and both sequence
# lengths. In the printout, all scores of a full block are visible, and some scores of a mixed
# block.

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
visible = np.array([[window_and_first(0, 0, i, j) for j in range(N)] for i in range(N)])
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
# 2. Let rows see only rows of their own document: define `document = np.repeat(np.int32([0, 1,
#    2]), 32)` above `window_and_first`, and let `window_and_first` return `document[i] ==
#    document[j]`.
# 3. Let `distance_penalty` return `math.tanh(score)` (import math first), a soft cap at 1. How
#    much does `o` change?
#
# Next: [lesson 5](lesson_5_find_a_race.py) breaks a kernel.
