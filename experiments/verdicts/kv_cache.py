"""Verdicts on decoding: few rows of Q on a cache of keys and values, and a cache in pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from experiments import claims as measured
from experiments import decode, paged
from experiments.lab.series import LABELS, unit
from experiments.lab.store import Row

from .evidence import REFUTED, REPRODUCED, TREND, Evidence, Finding, MissingRows, span

# Of the bandwidth of a kernel that only reads: from here on a call is a read.
A_READ = 0.85


def decoding(data: Evidence) -> Finding:
    """By the best of our kernels at each size, where K and V do not stay in L2."""
    read = data.value(decode.NAME, series=decode.READ, metric="bandwidth")
    times = decode.by_place(data.rows(decode.NAME, source="measured", metric="time"), "time")
    shares: list[tuple[int, float]] = []  # MiB, and of the bandwidth
    gains: list[float] = []
    by_rows: dict[int, float] = {}
    for place, found in times.items():
        nbytes = decode.cache_bytes(next(iter(found.values())))
        ours, theirs = (_least(found, series) for series in (decode.OURS, decode.PEERS))
        if ours is None or nbytes < decode.LARGE_BYTES:
            continue
        batch, heads_q, heads_k, rows, keys, d = place
        if (batch, keys, heads_q, d) == (*decode.ROWS_AT, 4 * heads_k, 128):
            by_rows[rows] = ours
        if rows == 1:
            shares.append((nbytes >> 20, nbytes / ours / 1e9 / read))
            gains += [theirs / ours] if theirs else []
    if not shares:
        raise MissingRows(f"{decode.NAME}: no row of Q on {decode.LARGE_BYTES >> 20} MiB or more")
    (small, least), (large, most) = min(shares), max(shares)
    number = (
        "of what a kernel reaches that only reads, the fastest of our FA-2 kernels reads K and V "
        f"at {least:.2f} where they are {small:,} MiB and "
        f"at {most:.2f} where they are {large:,} MiB"
    )
    if gains:
        number += f"; torch's best time over ours {span(gains)}"
    if len(by_rows) > 1:
        few, many = min(by_rows), max(by_rows)
        number += f"; {many} rows of Q take {by_rows[many] / by_rows[few]:.2f} times as long as one"
    if most < A_READ:
        return Finding(number, REFUTED)
    if min(share for _, share in shares) >= A_READ:
        return Finding(number, REPRODUCED)
    return Finding(number, TREND, "a small cache takes longer than its bytes alone")


def _least(found: Mapping[str, Row], series: Sequence[str]) -> float | None:
    return min((found[s].number for s in series if s in found), default=None)


def over_pages(data: Evidence) -> Finding:
    words, holds = [], True
    for series in ("fa1-simt", "fa2-simt", "fa2-mma"):
        errors = {
            row.note: row.number
            for row in data.rows(measured.NAME, series=series, metric="error", dtype=(
                "float16" if "mma" in series else "float32"), seqlen_q=measured.PAGE)
        }  # fmt: skip
        pages = errors[f"{measured.PAGES} pages"]
        holds &= pages <= 1.1 * errors["whole"]
        words.append(
            f"{LABELS[series]}, {series.split('-')[1]}: {pages:.1e} against {errors['whole']:.1e}"
        )
    number = (
        f"error of {measured.PAGES} pages merged by L, in any order, against the whole: "
        f"{'; '.join(words)}"
    )
    differing = data.rows(paged.NAME, source="counted", metric="difference")
    several = sum(row.number for row in differing)
    number += (
        f"; over a block table's pages {several:.0f} elements of O and L differ from one piece"
    )
    holds &= not several
    try:
        timed = paged.ratios(data.rows(paged.NAME, source="measured", metric="time"))
    except MissingRows:
        timed = {}
    for series, by_size in timed.items():
        ratios = [ratio for by in by_size.values() for ratio in by.values()]
        number += f"; a decoding step on {unit(series)} takes {span(ratios)} times one piece's"
    reason = "" if not holds else "page by page, and in kernels that read a block table"
    return Finding(number, REPRODUCED if holds else REFUTED, reason)
