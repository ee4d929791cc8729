# %% [markdown]
# # 1. Both loop orders at your size
#
# FlashAttention computes attention tile by tile. A row tile is B_r rows of Q. A column tile is
# B_c rows of K and V. FlashAttention-1 (FA-1) has the loop over column tiles outside.
# FlashAttention-2 (FA-2) has the loop over row tiles outside.
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

# %%
shape = (1, HEADS, N, HEAD_DIM)  # batch, heads, sequence length, head dimension
plans = {}
with bounds.named(GPU).planning():
    for algorithm in ("fa1", "fa2", "standard"):
        plans[algorithm] = fa_numba.plan(shape, shape, algorithm=algorithm)
print(plans["fa1"])

# %% [markdown]
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
    """Return the gigabytes that a plan loads and stores of some arrays."""
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
# ## Change something
#
# 1. Set `N` to 1024 and to 16384. Which bars grow with N, and which grow with N squared?
# 2. Set `GPU` to "T4", which has less shared memory. Which tiles do the plans have now?
# 3. Pass `dtype="float16"` to `plan`. FA-1 then keeps its sums in a float32 array A, because
#    float16 is not exact enough for sums. Add "A" to the group of O, and mind the bytes of each
#    array.
#
# Next: [lesson 2](lesson_2_count_accesses.py) counts these accesses instead of computing them.
