"""The main result in sentences whose numbers are the rows'."""

from __future__ import annotations

from collections.abc import Sequence

from experiments import loop_order
from experiments.lab import variants
from experiments.lab.store import Row
from experiments.lab.tables import Across, Table

from .evidence import span

WORDS = {"float32": "fp32 on CUDA cores", "float16": "fp16 on tensor cores"}


def sentences(rows: Sequence[Row]) -> Table | None:
    """What the K/V-outer order costs over the Q-outer order at the same tiles."""
    found: dict[str, dict[str, list[float]]] = {}
    for problem, mine in variants.problems_of(rows).items():
        if not loop_order.in_setting(problem):
            continue
        for name, ratio in loop_order.ratios(mine).items():
            found.setdefault(problem.dtype, {}).setdefault(name, []).append(ratio)
    if any(dtype not in found for dtype in WORDS):
        return None

    def each(name: str, form: str = ".2f") -> str:
        return ", ".join(
            f"{span(found[dtype][name], form)} ({words})"
            for dtype, words in WORDS.items()
            if name in found[dtype]
        )

    lines = [
        f"**Accesses.** The kernels ask for {each('model')} times the bytes.",
        f"**L2.** It moves {each('l2')} times the bytes.",
        f"**DRAM.** It moves {each('dram', '.0f')} times the bytes: O, l and m of all rows, "
        "written in every pass, do not stay in L2, while what Q outer reads again does.",
        f"**Time, equal grid.** {each('splits')} times as long.",
        f"**Time, the paper's grid**, one thread block a head: {each('grid', '.1f')} times as "
        "long, the longer the fewer heads there are.",
    ]
    head = (
        "K/V outer (FlashAttention-1's order) over Q outer (FlashAttention-2's) at the same unit, "
        "tiles and work, forward, with and without a causal mask, N=512 to 16k:"
    )
    return Table(head, "".join(f"{n}. {line}\n" for n, line in enumerate(lines, 1)))


TEXT = Across(sentences, (loop_order.NAME,))
