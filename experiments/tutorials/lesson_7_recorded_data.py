# %% [markdown]
# # 7. Load recorded data and draw your own curve
#
# The repository contains all numbers that were measured on H100 and H200 GPUs. You do not need a
# GPU to draw them. This lesson draws how much longer FA-1's loop order takes than FA-2's.

# %%
import matplotlib.pyplot as plt
import numpy as np

import experiments

# %% [markdown]
# `experiments.load` returns the recorded numbers as columns. With pandas installed, leave out
# `frame=False` to get a DataFrame.

# %%
data = experiments.load("loop_order", "nvidia-h200", frame=False)
print({name: len(set(column.tolist())) for name, column in data.items()})

# %% [markdown]
# Each line of the table is one number. `metric` says which quantity, `series` says which kernel.
# `sweep` says which part of the experiment a row belongs to: here, "seqlen" or "heads" varies.


# %%
def times(series, head_dim):
    """Return {sequence length: milliseconds} for a series in float16, without a mask."""
    wanted = (
        (data["series"] == series)
        & (data["metric"] == "time")
        & (data["sweep"] == "seqlen")
        & (data["head_dim"] == head_dim)
        & ~data["causal"]
    )
    return dict(zip(data["seqlen_q"][wanted].tolist(), data["value"][wanted].tolist(), strict=True))


fa1, fa2 = times("fa1-mma-splits", 64), times("fa2-mma-fa1-tiles", 64)
print(fa1)

# %% [markdown]
# Both series have the same tiles. "splits" means that several FA-1 thread blocks share a head, so
# that both loop orders keep the GPU busy.

# %%
figure, ax = plt.subplots(figsize=(7, 4), layout="constrained")
for head_dim in (64, 128):
    fa1, fa2 = times("fa1-mma-splits", head_dim), times("fa2-mma-fa1-tiles", head_dim)
    lengths = sorted(fa1.keys() & fa2.keys())
    ratios = np.array([fa1[N] / fa2[N] for N in lengths])
    ax.plot(lengths, ratios, "o-", label=f"head dimension {head_dim}")
ax.axhline(1.0, color="grey", linewidth=1)
ax.set_xscale("log", base=2)
ax.set_xlabel("sequence length N")
ax.set_ylabel("time of K/V outer / time of Q outer")
ax.set_title("K/V outer takes longer than Q outer on an H200, float16")
ax.legend()
plt.show()

# %% [markdown]
# ## Change something
#
# 1. Draw DRAM bytes instead of times: `metric` is "traffic" and `source` is "dram". Measured DRAM
#    bytes exist for three sequence lengths.
# 2. Draw the sweep over heads: `sweep` is "heads", and the x axis is `heads_q`.
# 3. Compare with the H100: the machine is "nvidia-h100-80gb-hbm3".
#
# Next: [lesson 8](lesson_8_a_new_experiment.py) makes new data.
