"""The main result, and what a figure shows, in sentences whose numbers are the rows'."""

from __future__ import annotations

from collections.abc import Sequence

from experiments import loop_order
from experiments.lab import variants
from experiments.lab.store import Row
from experiments.lab.tables import Across, Table

from .evidence import Evidence, MissingRows
from .rule import span

WORDS = {
    "simt": "fp32 on CUDA cores",
    "mma": "fp16 on tensor cores",
    "wgmma": "fp16 on Hopper's tensor cores (wgmma)",
}


def sentences(rows: Sequence[Row]) -> Table | None:
    """What the K/V-outer order costs over the Q-outer order at the same tiles."""
    found: dict[str, dict[str, list[float]]] = {}
    moved: list[float] = []
    for problem, mine in variants.problems_of(rows).items():
        if not loop_order.in_setting(problem):
            continue
        of = variants.values(mine)
        for series in {row.series for row in mine}:
            pair = [of.get((series, source, "traffic")) for source in ("l2", "model")]
            moved += [pair[0] / pair[1]] if pair[0] and pair[1] else []
        for unit in loop_order.units_of(problem.dtype):
            for name, ratio in loop_order.ratios(mine, unit).items():
                found.setdefault(unit, {}).setdefault(name, []).append(ratio)
    if not moved or not {"simt", "mma"} <= set(found):  # wgmma is not everywhere
        return None

    def each(name: str, form: str = ".2f") -> str:
        return ", ".join(
            f"{span(found[unit][name], form)} in {words}"
            for unit, words in WORDS.items()
            if name in found.get(unit, {})
        )

    lines = [
        f"**Accesses**, times the bytes: {each('model')}.",
        f"**L2**, times the bytes: {each('l2')}. It moves {span(moved, '.3f')} of what the kernels "
        "access.",
        f"**DRAM**, times the bytes: {each('dram', '.0f')}. O, l and m of all rows, written in "
        "every pass, do not stay in L2; what Q outer reads again does.",
        f"**Time at an equal grid**, times as long: {each('splits')}.",
        f"**Time on the paper's grid**, one thread block a head: {each('grid', '.1f')}; the fewer "
        "heads, the longer.",
    ]
    head = (
        "K/V outer (FlashAttention-1's order) over Q outer (FlashAttention-2's) at the same unit, "
        "tiles and work, forward, with and without a causal mask, N=512 to 16k:"
    )
    return Table(head, "".join(f"{n}. {line}\n" for n, line in enumerate(lines, 1)))


def traffic(rows: Sequence[Row]) -> Table | None:
    """What DRAM moves of the accesses of both orders, over the sequence length."""
    data, name = Evidence(rows), "io_vs_seqlen"
    dram = {"source": "dram", "metric": "traffic"}
    try:
        model = {"source": "model", "metric": "traffic", "unit": "bytes"}

        def share(series: str) -> list[float]:
            accessed = {
                (r.seqlen_q, r.head_dim): r.number for r in data.rows(name, series=series, **model)
            }
            moved = data.rows(name, series=series, **dram)
            return [r.number / accessed[r.seqlen_q, r.head_dim] for r in moved]

        once = [
            r.number / (4 * r.batch * r.heads_q * r.seqlen_q * r.head_dim * 4)
            for r in data.rows(name, series="fa2-simt", **dram)
        ]
        longest = max(r.seqlen_q for r in data.rows(name, series="fa1-simt", **dram))
        at = {"head_dim": 128, "seqlen_q": longest}
        wide = [
            data.value(name, series="fa1-simt", **of, **at)
            / data.value(name, series="standard-simt", **of, **at)
            for of in (model, dram)
        ]
    except MissingRows:
        return None
    lines = [
        f"K/V outer: DRAM moves {span(share('fa1-simt'))} of what the kernel accesses: O, l and m "
        "of all rows do not fit into L2 together, but for the shortest.",
        f"Q outer: DRAM moves {span(once)} times Q, K, V and O once, whatever N: K and V of a "
        "head, which every row tile reads again, stay in L2.",
        f"At d=128 and N={longest} K/V outer accesses {wide[0]:.2f} times the bytes of standard "
        f"attention, and DRAM moves {wide[1]:.2f} times: registers hold few columns of it in fp32.",
    ]
    return Table(
        "What the figure shows, in fp32 without a mask.", "".join(f"- {x}\n" for x in lines)
    )


TEXT = Across(sentences, (loop_order.NAME,))
TRAFFIC = Across(traffic, ("io_vs_seqlen",))
