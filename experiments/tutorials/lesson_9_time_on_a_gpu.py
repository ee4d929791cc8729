# %% [markdown]
# # 9. Time both loop orders on your GPU, next to torch
#
# This lesson needs a CUDA GPU and torch. Without them it prints a message and stops. Fewer bytes
# do not always mean less time, so that the time must be measured.

# %%
import statistics
import sys
from typing import Literal

import matplotlib.pyplot as plt

import fa_numba

try:
    import torch
except ImportError:
    torch = None

if torch is None or not torch.cuda.is_available():
    print("This lesson needs a CUDA GPU and torch. Lessons 1 to 8 run without them.")
    sys.exit()

BATCH, HEADS, HEAD_DIM = 4, 16, 64
LENGTHS = (512, 1024, 2048, 4096)
# Tensor cores from compute capability 8.0 on, CUDA cores before.
DTYPE = torch.float16 if torch.cuda.get_device_capability() >= (8, 0) else torch.float32

# %% [markdown]
# Every call is checked before it is timed. `reference.attention` computes in float64.


# %%
def milliseconds(call, repeats=20):
    """Return the median time of a call in milliseconds, measured by events of the GPU."""
    for _ in range(3):
        call()  # the first call compiles
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def calls(q, k, v):
    """Return the calls that are compared, by name. The first two calls have equal tiles."""
    tiles = fa_numba.Tiles(64, 64)
    splits = q.shape[2] // 64  # FA-1: as many thread blocks as FA-2
    unit: Literal["mma", "simt"] = "mma" if q.dtype == torch.float16 else "simt"
    return {
        "FA-1: K/V outer": lambda: fa_numba.flash_attention_1(
            q, k, v, tiles=tiles, query_splits=splits, unit=unit
        ),
        "FA-2: Q outer": lambda: fa_numba.flash_attention_2(
            q, k, v, tiles=tiles, kv_splits=1, unit=unit
        ),
        'FA-2, unit="auto"': lambda: fa_numba.attention(q, k, v),
        "torch": lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v),
    }


# %%
found: dict[str, dict[int, float]] = {}
for N in LENGTHS:
    q, k, v = (torch.randn(BATCH, HEADS, N, HEAD_DIM, device="cuda", dtype=DTYPE) for _ in range(3))
    one = [x[:1, :1].float().cpu().numpy() for x in (q, k, v)]
    expected = torch.from_numpy(fa_numba.reference.attention(*one))
    for name, call in calls(q, k, v).items():
        error = (call()[:1, :1].double().cpu() - expected).abs().max().item()
        assert error < 1e-2, f"{name} is wrong by {error}"
        found.setdefault(name, {})[N] = milliseconds(call)
    print(N, {name: round(times[N], 3) for name, times in found.items()})

# %%
figure, ax = plt.subplots(figsize=(7, 4), layout="constrained")
for name, times in found.items():
    flops = [4 * BATCH * HEADS * N * N * HEAD_DIM for N in times]
    speeds = [each / ms / 1e9 for each, ms in zip(flops, times.values(), strict=True)]
    ax.plot(list(times), speeds, "o-", label=name)
ax.set_xscale("log", base=2)
ax.set_xlabel("sequence length N")
ax.set_ylabel("speed, TFLOP/s")
ax.set_title(f"Forward pass on {torch.cuda.get_device_name()}")
ax.legend()
plt.show()

# %% [markdown]
# ## Change something
#
# 1. Remove `query_splits`. FA-1 then has one thread block per head, as in its paper.
# 2. Set `HEADS` to 1 and `BATCH` to 1. Which kernels lose most?
# 3. Pass `causal=True` to our calls and `is_causal=True` to torch's call.
