"""The bytes that Hopper's backward kernels spill, found by compiling the kernels without a GPU.

Plans use the table `fa_numba/choices/spills.csv`. A row of the table says how many bytes a kernel
spills if a call has an option (column `option`). The row is valid for head dimensions from `first`
to `last`. The column `beside` can contain a second option or property, such as "lengths" or "no
mask". The row is then valid only for calls that have both.

To fill a row, the kernels of several calls are compiled (see `calls`). The row contains the largest
number of bytes that one of these kernels spills.
"""

import csv
import io
import itertools
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import fa_numba
from fa_numba import bounds, device
from fa_numba.choices.facts import SPILLS, spills_allowed

from ..lab.record import write_if_changed

N, HEADS = 512, 16  # enough heads that the kernel takes all column tiles in one chunk
DIMENSIONS = (48, 64, 192)  # up to each of these, registers are divided in a different way
LENGTHS = ("q_lens", "kv_lens", "packed")
_ENDS = [0, N]
_CAP, _TABLE = 5.0, np.zeros((HEADS, 2 * N), np.float32)
GIVEN: dict[str, dict[str, Any]] = {
    "window": {"window": (64, 64)},
    "softcap": {"softcap": 5.0},
    "alibi": {"alibi_slopes": (HEADS,)},
    "bias": {"bias": (1, 1, N, N)},
    "causal": {"causal": True},
    "dropout": {"dropout_p": 0.1},
    "q_lens": {"q_lens": [N]},
    "kv_lens": {"kv_lens": [N]},
    "packed": {"cu_seqlens_q": _ENDS, "cu_seqlens_k": _ENDS},
    # A score_mod whose slope is not 1, and a score_mod with a captured array.
    "slope_of": {"score_mod": lambda s, b, h, i, j: _CAP * math.tanh(s / _CAP)},
    "dcaptured": {
        "score_mod": lambda s, b, h, i, j: s + _TABLE[h, i - j + N],
        "return_dcaptured": True,
    },
}


def calls(row: dict[str, str]) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yield the calls for a row of the table, as (head dimension, names of options in GIVEN).

    The columns of the row decide which head dimensions the calls have:

    | column `last` | head dimensions of the calls |
    |---|---|
    | a number in DIMENSIONS | all numbers in DIMENSIONS from `first` to `last` |
    | another number | 64 |

    They also decide which masks the calls have:

    | row | masks of the calls |
    |---|---|
    | option "window", or "no mask" in the column `beside` | none |
    | "one chunk" in the column `beside` | causal |
    | any other row | none, and causal |
    """
    option, beside = row["option"], row["beside"]
    last = int(row["last"])
    dims = [d for d in DIMENSIONS if int(row["first"]) <= d <= last] if last in DIMENSIONS else [64]
    masks: tuple[tuple[str, ...], ...] = ((), ("causal",))
    if option == "window" or beside == "no mask":
        masks = ((),)
    elif beside == "one chunk":
        masks = (("causal",),)
    others = LENGTHS if beside == "lengths" else (beside,) if beside in GIVEN else ()
    for d, mask, other in itertools.product(dims, masks, others or (None,)):
        yield d, (*mask, option, *([other] if other else []))


def spilled(d: int, options: tuple[str, ...]) -> int:
    """Return the largest number of bytes that one kernel of a backward call spills.

    The bytes of a kernel are the bytes of spill stores plus the bytes of spill loads, as ptxas
    prints them. `d` is the head dimension, and `options` are names in GIVEN.
    """
    given: dict[str, Any] = {}
    for name in options:
        given |= GIVEN[name]
    shape = (N, HEADS, d) if "packed" in options else (1, HEADS, N, d)
    with bounds.DEVICES["H200"].planning(), spills_allowed():
        how: dict[str, Any] = {"dtype": "float16", "passes": "bwd", "unit": "wgmma"}
        planned = fa_numba.plan(shape, shape, **how, **given)
    logs = (device.assembled(kernel, (9, 0))[1] for kernel in planned.launched)
    return max(sum(map(int, re.findall(r"(\d+) bytes spill", log))) for log in logs)


def write(say: Callable[[str], None], path: Path = SPILLS) -> bool:
    """Compile the calls of all rows, and write the spilled bytes into the table.

    Return whether the table changed. `say` prints a line.
    """
    with open(path, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        row["bytes"] = str(max(spilled(*call) for call in calls(row)))
        beside = f" with {row['beside']}" if row["beside"] else ""
        dims = f"head_dim {row['first']} to {row['last']}"
        say(f"{row['option']}{beside}, {dims}: {row['bytes']} bytes spilled")
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return write_if_changed(path, text.getvalue())
