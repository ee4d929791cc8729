# %% [markdown]
# # 8. A new experiment
#
# An experiment is one Python file. It has a function `measure` that yields rows, and a function
# `draw` that draws a figure of stored rows. The command line does the rest: it stores rows with
# their origin, continues after an interrupt, and draws figures from stored rows on any machine.
#
# The question of this lesson: how do the accesses of both loop orders change with the head
# dimension?

# %%
import matplotlib.pyplot as plt

from experiments.lab.measure.series import LABELS, columns, plan
from experiments.lab.measure.workloads import one_head
from experiments.lab.record import MODEL, Bench, Options, Row, values
from experiments.lab.show import style

NAME = "my_head_dim"
SERIES = ("fa1-simt", "fa2-simt")
SEQLEN = 4096

# %% [markdown]
# `measure` yields one `Row` per number. `columns` fills the columns that name the series and the
# problem. The source `MODEL` says that the number is computed from a formula.


# %%
def measure(options: Options, bench: Bench):
    """Yield the elements loaded and stored by each loop order, over the head dimension."""
    for head_dim in options.head_dims or (16, 32, 64, 128, 256):
        problem = one_head(SEQLEN, head_dim)
        for series in SERIES:
            accesses = plan(series, problem).accesses
            common = columns(NAME, series, problem, MODEL)
            yield Row(metric="loads", unit="elements", value=accesses.total_loads, **common)
            yield Row(metric="stores", unit="elements", value=accesses.total_stores, **common)


rows = list(measure(Options(), Bench()))
print(len(rows), "rows; the first one:")
print(rows[0])

# %% [markdown]
# `draw` takes rows and returns a matplotlib figure. `values` selects rows and maps their columns
# to the number. `style` gives each series its colour and its label.


# %%
def draw(rows):
    """Draw loads and stores over the head dimension, each in a panel of its own."""
    figure, axes = style.new(1, 2, height=3.5)
    for ax, metric in zip(axes.flat, ("loads", "stores"), strict=True):
        found = values(rows, "series", "head_dim", metric=metric)
        for series in SERIES:
            points = {d: value for (name, d), value in found.items() if name == series}
            style.line(ax, points, like=series, label=LABELS[series])
        ax.set_xlabel("head dimension d")
        ax.set_ylabel(f"elements, {metric}")
        style.log(ax.xaxis, 2)
    axes[0, 0].legend()
    figure.suptitle(f"Accesses of one head over the head dimension, N = {SEQLEN:,}")
    return figure


plt.figure(draw(rows))
plt.show()

# %% [markdown]
# ## Make it permanent
#
# Copy `NAME`, `SERIES`, `SEQLEN`, `measure` and `draw` into a new file
# `experiments/my_head_dim.py`, with a docstring whose first sentence is the title. Replace
# `experiments.lab` by `.lab` in the imports. Then run
#
#     python -m experiments run my_head_dim
#
# The command writes figures/my_head_dim.png, and the rows to figures/data/my_head_dim/model.csv.
# [CONTRIBUTING](../../CONTRIBUTING.md) explains pages, tables and tests of experiments.
#
# ## Change something
#
# 1. Add standard attention: append "standard-simt" to `SERIES`.
# 2. Plan for another GPU: import `named` from `fa_numba.bounds`, and wrap the call of `plan` in
#    `with named("T4").planning():`.
# 3. Yield the number of tiles B_r x B_c of each plan as a new metric.
#
# Next: [lesson 9](lesson_9_time_on_a_gpu.py) measures times on a GPU.
