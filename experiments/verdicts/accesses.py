"""Claims that counted accesses decide."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from experiments import claims as measured
from experiments import io_vs_head_dim, io_vs_sram
from experiments.lab import scaling
from experiments.lab.store import Row

from .evidence import (
    REFUTED,
    REPRODUCED,
    TREND,
    Evidence,
    Finding,
    MissingRows,
    span,
)

N, D, TILE = measured.COUNTED_SEQLEN, 64, measured.COUNTED_TILE
TILES = N // TILE


def elements(
    data: Evidence, series: str, metric: str, *, causal: bool = False, dropout: bool = False
) -> dict[str, int]:
    """Array -> elements loaded or stored, counted."""
    rows = data.rows(
        measured.NAME, series=series, source="counted", metric=metric, causal=causal, head_dim=D
    )
    mark = ", dropout"
    mine = [row for row in rows if row.note.endswith(mark) == dropout]
    return {row.note.removesuffix(mark): int(row.number) for row in mine}


def round_trips(data: Evidence) -> Finding:
    loads, stores = (elements(data, "standard-simt", kind) for kind in ("loads", "stores"))
    scores = sum(kind.get(name, 0) for kind in (loads, stores) for name in "SP") / N**2
    flash = [
        {**elements(data, series, "loads"), **elements(data, series, "stores")}
        for series in ("fa1-simt", "fa2-simt")
    ]
    never = not any(name in arrays for arrays in flash for name in "SP")
    trips = elements(data, "fa1-simt", "stores")["O"] / (N * D)
    number = (
        f"S and P of standard: {scores:g} N² accesses; of FA-1 and FA-2: "
        f"{'none' if never else 'some'}; O is written {trips:g} times by FA-1, once by FA-2"
    )
    if not never or scores != 4:
        return Finding(number, REFUTED)
    return Finding(
        number, TREND, "one round trip is FA-2's; FA-1's O makes one for each block of K and V"
    )


def matrices(data: Evidence) -> Finding:
    loads, stores = (elements(data, "standard-simt", kind) for kind in ("loads", "stores"))
    number = (
        f"{len(loads) + len(stores)} reads or writes of a matrix, S and P among them 4 times; K is "
        f"read {loads['K'] // (N * D)} times, once for each row tile"
    )
    return Finding(number, REPRODUCED if len(loads) + len(stores) == 8 else REFUTED)


def growth(data: Evidence) -> Finding:
    exponents = [exponent(data, series) for series in ("fa1-simt", "fa2-simt")]
    number = f"accesses grow with N to the power {span(exponents)}, from N=32k to 64k at d=64"
    near_one = all(abs(e - 1) < 0.1 for e in exponents)
    return Finding(
        number, REPRODUCED if near_one else REFUTED, "" if near_one else "linear in N it is not"
    )


def exponent(data: Evidence, series: str) -> float:
    """Of N, between the two longest lengths of the closed form; d=64, not causal."""
    totals: dict[int, float] = {}
    for row in data.rows(
        "io_vs_seqlen", series=series, source="model", unit="elements", head_dim=64, causal=False
    ):
        totals[row.seqlen_q] = totals.get(row.seqlen_q, 0) + row.number / (row.batch * row.heads_q)
    short, long = sorted(totals)[-2:]
    return math.log(totals[long] / totals[short]) / math.log(long / short)


def powers(data: Evidence) -> dict[str, dict[str, float]]:
    """Tiles by line 1 and by the planner -> exponent of N, d and M in K/V outer's accesses."""

    def fitted(of: Any, series: str, x: Callable[[Row], int], low: float) -> float:
        rows = data.rows(
            of.NAME,
            series=series,
            source="model",
            unit="elements",
            causal=False,
            seqlen_q=of.SEQLEN,
        )
        found = scaling.fit(scaling.per_score(rows, x)[series, "model"], low)
        if found is None:
            raise MissingRows(f"{of.NAME}: too few rows of {series}")
        return found.exponent

    return {
        words: {
            "N": exponent(data, "fa1-simt"),
            "d": fitted(io_vs_head_dim, series, lambda row: row.head_dim, 0),
            "M": fitted(io_vs_sram, series, io_vs_sram.memory, io_vs_sram.HEAD_DIM**2),
        }
        for words, series in (("line 1", "fa1-simt-rule"), ("the planner", "fa1-simt"))
    }


THEOREM = {"N": 2.0, "d": 2.0, "M": -1.0}


def theorem(data: Evidence) -> Finding:
    found = powers(data)
    number = "; ".join(
        f"tiles of {words}: " + ", ".join(f"{name}^{value:.2f}" for name, value in each.items())
        for words, each in found.items()
    )
    holds = {
        words: all(abs(each[name] - value) < 0.1 for name, value in THEOREM.items())
        for words, each in found.items()
    }
    if not holds["line 1"]:
        return Finding(number, REFUTED)
    reason = "" if holds["the planner"] else "with line 1's tiles; ours are bounded by registers"
    return Finding(number, REPRODUCED, reason)


def softmax_accesses(data: Evidence) -> Finding:
    found = {name: per_element(data, f"softmax-{name}") for name in ("naive", "safe", "online")}
    number = ", ".join(f"{name} {value:g}" for name, value in found.items()) + " an element"
    holds = list(found.values()) == [3, 4, 3]
    return Finding(number, REPRODUCED if holds else REFUTED)


def per_element(data: Evidence, series: str) -> float:
    """Counted loads and stores for each element; not a number where two lengths disagree."""
    rows = data.rows("online_softmax", series=series, source="counted", metric=("loads", "stores"))
    totals: dict[int, float] = {}
    for row in rows:
        share = row.number / (row.batch * row.seqlen_q)
        totals[row.seqlen_q] = totals.get(row.seqlen_q, 0) + share
    values = set(totals.values())
    return values.pop() if len(values) == 1 else math.nan


def passes_over_scores(data: Evidence) -> Finding:
    def loads(series: str) -> float:
        rows = data.rows(
            "online_softmax", series=series, source="counted", metric="loads of scores"
        )
        return max(row.number / (row.batch * row.seqlen_q * row.seqlen_k) for row in rows)

    standard, one, two = (loads(series) for series in measured.SIMT)
    number = f"loads of a score: standard {standard:g}, FA-1 {one:g}, FA-2 {two:g}"
    holds = standard == 2 and one == two == 0
    reason = "a flash row is never in memory: its blocks pass once, on the chip" if holds else ""
    return Finding(number, REPRODUCED if holds else REFUTED, reason)


def o_in_every_pass(data: Evidence) -> Finding:
    one = [elements(data, "fa1-simt", kind).get("O", 0) // (N * D) for kind in ("loads", "stores")]
    two = [elements(data, "fa2-simt", kind).get("O", 0) // (N * D) for kind in ("loads", "stores")]
    number = (
        f"with {TILES} blocks of K and V: K/V outer reads O {one[0]} times and writes it {one[1]} "
        f"times, Q outer {two[0]} and {two[1]}"
    )
    holds = one == [TILES - 1, TILES] and two == [0, 1]
    return Finding(number, REPRODUCED if holds else REFUTED)


def visited(data: Evidence, causal: bool) -> float:
    return elements(data, "fa2-simt", "loads", causal=causal)["K"] / (TILE * D)


def tiles_processed(data: Evidence) -> Finding:
    tiles = visited(data, False)
    number = f"{tiles:g} tiles, {TILES} x {TILES}"
    return Finding(number, REPRODUCED if tiles == TILES**2 else REFUTED)


def dropout(data: Evidence) -> Finding:
    more = 0
    for series in ("fa1-simt", "fa2-simt"):
        for kind in ("loads", "stores"):
            plain = elements(data, series, kind)
            dropped = elements(data, series, kind, dropout=True)
            more += sum(dropped.values()) - sum(plain.values())
            more += 10**9 * (set(dropped) != set(plain))
    number = f"{more} accesses more with dropout, and no array of the mask, in either order"
    return Finding(number, REPRODUCED if more == 0 else REFUTED)
