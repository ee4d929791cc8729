# %% [markdown]
# # 5. Edit a kernel, and let the emulator find the race
#
# Threads of a thread block share fast memory. If one thread reads an element before another
# thread has written it, the result is wrong, but only sometimes. Such a fault is called a race.
# This lesson has a complete FlashAttention-2 kernel in about 40 lines. The script removes a
# barrier, and the emulator names the line.

# %%
import math

import matplotlib.pyplot as plt
import numpy as np
from numba import cuda, float32

from fa_numba import emulator

D = 16  # head dimension
B = 64  # rows of a row tile, and of a column tile: one thread per row

# %% [markdown]
# Thread t of a thread block computes row t of a row tile. All threads together load a column tile
# of K and V into shared memory. Then each thread reads all rows of the column tile.
# `cuda.local.array` is private to one thread. `barrier_2` is a constant for the compiler: the
# function makes a kernel with the second barrier, or without it.


# %%
def make_kernel(barrier_2=True):
    @cuda.jit
    def flash_attention_2(Q, K, V, O, scale):
        sK = cuda.shared.array((B, D), float32)
        sV = cuda.shared.array((B, D), float32)
        q = cuda.local.array(D, float32)
        o = cuda.local.array(D, float32)
        t = cuda.threadIdx.x
        row = cuda.blockIdx.x * B + t
        for c in range(D):
            q[c] = Q[row, c] * scale
            o[c] = 0.0
        m, l = float32(-math.inf), float32(0.0)
        for j in range(K.shape[0] // B):  # the loop over column tiles is inside: Q outer
            for c in range(D):
                sK[t, c] = K[j * B + t, c]
                sV[t, c] = V[j * B + t, c]
            cuda.syncthreads()  # barrier 1: the tile is complete
            for n in range(B):
                s = float32(0.0)
                for c in range(D):
                    s += q[c] * sK[n, c]
                m_new = max(m, s)
                factor, p = math.exp(m - m_new), math.exp(s - m_new)
                l = l * factor + p
                for c in range(D):
                    o[c] = o[c] * factor + p * sV[n, c]
                m = m_new
            if barrier_2:
                cuda.syncthreads()  # nobody reads the tile any more
        for c in range(D):
            O[row, c] = o[c] / l

    return flash_attention_2


# %%
N = 128
Q, K, V = (np.random.default_rng(n).random((N, D), np.float32) for n in range(3))
O = np.zeros_like(Q)
scale = np.float32(1 / math.sqrt(D))
counts = emulator.launch(make_kernel(), N // B, B, Q, K, V, O, scale)

S = Q.astype(np.float64) @ K.T / math.sqrt(D)
P = np.exp(S - S.max(1, keepdims=True))
expected = P @ V / P.sum(1, keepdims=True)
print("largest difference from float64:", np.abs(O - expected).max())
print(counts)

# %% [markdown]
# The kernel is right. Now launch a kernel without the second barrier:

# %%
try:
    emulator.launch(make_kernel(barrier_2=False), N // B, B, Q, K, V, O, scale)
except emulator.EmulatorError as error:
    print(f"{type(error).__name__}: {error}")
else:
    raise AssertionError("the race was not found")

# %% [markdown]
# The message names the line that overwrites `sK`, and who read the element before. A thread
# already writes the next tile, while threads of another warp may still read the current tile. A
# warp is 32 threads that run together. On a GPU, the result would be right most of the time.
#
# The picture shows the loads of the right kernel, in the units of a profiler. A sector is a piece
# of 32 bytes of global memory. A wavefront is one pass through shared memory. The threads of a
# warp load from different rows of Q, K and V, so that each element costs a complete sector.
# Lesson 6 repairs such an access.

# %%
global_sectors = counts.total(space="global", kind="load").sectors
shared_passes = counts.total(space="shared", kind="load").wavefronts
figure, ax = plt.subplots(figsize=(8, 3), layout="constrained")
names = "global memory: sectors of 32 bytes", "shared memory: wavefronts"
ax.barh(names, [global_sectors, shared_passes])
ax.set_xlabel("number in one launch")
ax.set_title("Loads of the kernel, in a profiler's units")
plt.show()

# %% [markdown]
# ## Change something
#
# In items 1 and 2, the first launch fails, and the script ends with a traceback. Read its last
# lines.
#
# 1. Delete the line of barrier 1. Which line does the emulator name now? Is it a load or a store?
# 2. Let the loop over column tiles read one tile too many: `range(K.shape[0] // B + 1)`. Which
#    error does the emulator raise?
# 3. Swap the loops as in FlashAttention-1: one thread block, column tiles outside, with O, l and
#    m in global memory. Begin with O = 0, l = 0 and m = -inf. Multiply O by l after loading O,
#    and divide O by l before storing O, as in lesson 3. Compare the counts. (This item takes half
#    an hour.)
#
# Next: [lesson 6](lesson_6_your_own_kernel.py) runs a kernel of your own.
