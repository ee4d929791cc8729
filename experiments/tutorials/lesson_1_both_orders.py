# %% [markdown]
# # 1. Both loop orders at your size
#
# FlashAttention computes attention tile by tile. A row tile is B_r rows of Q. A column tile is
# B_c rows of K and V. FlashAttention-1 (FA-1) has the loop over column tiles outside.
# FlashAttention-2 (FA-2) has the loop over row tiles outside.
#
# Take 15 minutes for a lesson with its exercises. Without a display, use the notebooks that `make
# tutorials` makes, or replace `plt.show()` by `plt.savefig("picture.png")`.
#
# This lesson asks one question: how many bytes does each loop order move between global memory
# and the chip? No GPU is needed, because `fa_numba.plan` computes the bytes from formulas.

# %%
import matplotlib.pyplot as plt

import fa_numba
from fa_numba import bounds

N = 4096  # sequence length
HEADS = 16
HEAD_DIM = 64
GPU = "A100"

# %% [markdown]
# A plan says what a call of attention launches. The plan needs the shapes of q and k, no arrays.
# Inside `bounds.named(GPU).planning()`, plans are made for that GPU instead of this machine's
# GPU.

# %%
shape = (1, HEADS, N, HEAD_DIM)  # batch, heads, sequence length, head dimension
plans = {}
with bounds.named(GPU).planning():
    for algorithm in ("fa1", "fa2", "standard"):
        plans[algorithm] = fa_numba.plan(shape, shape, algorithm=algorithm)
for plan in plans.values():
    print(plan, end="\n\n")

# %% [markdown]
# In the printout, "unit simt" means CUDA cores, and the workspace is temporary memory of the
# call. l and m are two numbers per row, which lesson 3 explains. L = m + log l is what FA-2
# stores of them.
#
# `accesses` contains the elements that the kernels load and store, by array. For every column
# tile, FA-1 loads and stores the output O. FA-2 stores O once, but loads K and V once for every
# row tile.

# %%
for name, plan in plans.items():
    loads, stores = plan.accesses.loads, plan.accesses.stores
    print(f"{name:9} loads of K: {loads['K']:>13,}   stores of O: {stores['O']:>13,} elements")

# %% [markdown]
# The picture shows the bytes by array. S and P are the N x N matrices of standard attention.

# %%
GROUPS = {
    "Q": ("Q",),
    "K, V": ("K", "V"),
    "O": ("O",),
    "l, m, L": ("l", "m", "L"),
    "S, P": ("S", "P"),
}


def gigabytes(plan, arrays):
    """Return the gigabytes of loads and stores of the named arrays in a plan."""
    moved = 0
    for name in arrays:
        moved += plan.accesses.loads.get(name, 0) + plan.accesses.stores.get(name, 0)
    return 4 * moved / 1e9  # an element of float32 has 4 bytes


figure, ax = plt.subplots(figsize=(8, 4), layout="constrained")
titles = {"fa1": "FA-1: K/V outer", "fa2": "FA-2: Q outer", "standard": "standard attention"}
bottom = [0.0] * len(plans)
for group, arrays in GROUPS.items():
    values = [gigabytes(plan, arrays) for plan in plans.values()]
    ax.bar([titles[name] for name in plans], values, bottom=bottom, label=group)
    bottom = [low + value for low, value in zip(bottom, values, strict=True)]
ax.set_ylabel("bytes loaded and stored, GB")
ax.set_title(f"Bytes of one forward pass, N = {N:,}, {HEADS} heads of dimension {HEAD_DIM}")
ax.legend()
plt.show()

# %% [markdown]
# Both loop orders avoid the N x N matrices. FA-1 pays by reading and writing O, and by reading Q,
# again for each column tile. FA-2 pays by reading K and V again for each row tile. These are
# bytes that the kernels access. On a GPU, the L2 cache serves most of FA-2's reads of K and V, so
# that the loop orders differ much more in bytes from DRAM (see the main result in README.md).
#
# ## Change something
#
# 1. Set `N` to 1024 and to 16384. All three bars grow with N squared. Which colours grow with N
#    only?
# 2. Set `GPU` to "T4", which has less shared memory. Which tiles do the three plans have now? Set
#    `GPU` back to "A100" afterwards.
# 3. Pass `dtype="float16"` and `tiles=fa_numba.Tiles(64, 64)` to `plan`. FA-1 then keeps its sums
#    in a float32 array A, because sums in float16 are not exact enough. Add "A" to the group of
#    O. In `gigabytes`, count 2 bytes for elements of Q, K, V, O, S and P, and 4 bytes for A, l, m
#    and L.
#
# Next: [lesson 2](lesson_2_count_accesses.py) counts these accesses instead of computing them.
