# %% [markdown]
# # 3. Online softmax by hand
#
# Softmax needs the sum over a complete row of scores. FlashAttention sees only one block of a row
# at a time. The online softmax keeps two numbers per row: the largest score so far, m, and the
# sum of exponentials so far, l. When a block brings a larger score, earlier results are
# multiplied by a factor.

# %%
import matplotlib.pyplot as plt
import numpy as np

BLOCK = 4  # keys in a block
scores = np.array([1.0, 2.0, 4.0, 2.0, 5.0, 1.0, 3.0, 1.0, 0.5, 6.0, 2.0, 1.0])
values = np.random.default_rng(1).random((len(scores), 3))

# %% [markdown]
# The complete softmax at once is the result that we want:

# %%
weights = np.exp(scores - scores.max())
exact = weights @ values / weights.sum()
print("exact:", exact)

# %% [markdown]
# Now block by block. `m`, `l` and `o` are all that is kept between blocks. `o` is not yet divided
# by `l`: FlashAttention-2 divides once, at the end.

# %%
m, l, o = -np.inf, 0.0, np.zeros(3)
history = []
for start in range(0, len(scores), BLOCK):
    s, block_values = scores[start : start + BLOCK], values[start : start + BLOCK]
    m_new = max(m, s.max())
    factor = np.exp(m - m_new)  # 0 for the first block, because m is -inf
    p = np.exp(s - m_new)
    l = factor * l + p.sum()
    o = factor * o + p @ block_values
    m = m_new
    history.append((m, l, factor, np.abs(o / l - exact).max()))
    print(f"keys {start}-{start + len(s) - 1}: m = {m:.1f}, l = {l:.3f}, factor = {factor:.3f}")
print("online:", o / l)
assert np.allclose(o / l, exact)

# %% [markdown]
# FlashAttention-1 divides by l in every pass, because it writes O to memory after each pass. The
# next pass multiplies by the old l again. The result is the same, with more operations and with
# memory traffic for O, l and m.

# %%
m, l, o = -np.inf, 0.0, np.zeros(3)
for start in range(0, len(scores), BLOCK):
    s, block_values = scores[start : start + BLOCK], values[start : start + BLOCK]
    m_new = max(m, s.max())
    factor, p = np.exp(m - m_new), np.exp(s - m_new)
    l_new = factor * l + p.sum()
    # Algorithm 1, line 12; p already contains the line's factor e^(mij - m_new)
    o = (l * factor * o + p @ block_values) / l_new
    m, l = m_new, l_new
assert np.allclose(o, exact)

# %% [markdown]
# Left: the largest score m only rises. Right: o / l is wrong until the last block has been seen.

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
blocks = range(1, len(history) + 1)
left.step(blocks, [m for m, *_ in history], where="mid", marker="s", label="largest score m")
left.plot(blocks, [l for _, l, *_ in history], "o-", label="sum of exponentials l")
left.set_xlabel("blocks seen")
left.set_xticks(blocks)
left.set_ylabel("value")
left.set_title("What is kept for a row")
left.legend()
right.bar(blocks, [error for *_, error in history])
right.set_xlabel("blocks seen")
right.set_xticks(blocks)
right.set_ylabel("largest error of o / l")
right.set_ylim(bottom=0)
right.set_title("The result is exact after the last block")
plt.show()

# %% [markdown]
# ## Change something
#
# 1. Set `BLOCK` to 1, to 5 and to 12. The result does not change.
# 2. Sort `scores` in descending order. How often is `factor` below 1 after the first block?
# 3. Add 1000 to all scores. Does the result change? What would happen without subtracting m?
#
# The command `python -m fa_numba trace` prints the same steps for the first 8 scores, with other
# values. The papers' algorithms in NumPy, line by line, are in `fa_numba/algorithms.py`.
#
# Next: [lesson 4](lesson_4_mask_and_score.py) changes what a row may see.
