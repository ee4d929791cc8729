"""Rows by what is asked of them, and how a question, its finding and its verdict are written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.lab.store import Row
from experiments.lab.tables import Across, Table, markdown

REPRODUCED, TREND, REFUTED = "reproduced", "trend only", "refuted"
NOT_MEASURED = "not measured"


class MissingRows(LookupError):
    """The rows that would decide a question are not there: which ones."""


class Evidence:
    """Stored rows of several experiments."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._rows: dict[str, list[Row]] = {}
        for row in rows:
            self._rows.setdefault(row.experiment, []).append(row)

    def rows(self, experiment: str, **fields: Any) -> list[Row]:
        """The rows with these fields that have a value. Raises MissingRows if there are none.

        A field's value may be a tuple of those allowed.
        """
        found = [
            row
            for row in self._rows.get(experiment, ())
            if not row.failed
            and all(_fits(getattr(row, name), want) for name, want in fields.items())
        ]
        if not found:
            raise MissingRows(f"{experiment}: no rows with {fields}")
        return found

    def value(self, experiment: str, **fields: Any) -> float:
        """The value of the one row with these fields.

        Raises MissingRows without one, LookupError for several values.
        """
        found = self.rows(experiment, **fields)
        if len({row.value for row in found}) > 1:
            raise LookupError(f"{experiment}: {len(found)} rows with {fields}")
        return found[0].number

    def ratios(self, experiment: str, over: str, under: str, **fields: Any) -> dict[Row, float]:
        """Of two series' rows that differ in nothing else: row of `over` -> over / under."""

        def place(row: Row) -> tuple[Any, ...]:
            sizes = (row.batch, row.heads_q, row.heads_k, row.seqlen_q, row.seqlen_k, row.head_dim)
            return (row.source, row.pass_, row.dtype, row.causal, *sizes, row.metric)

        below = {place(row): row.number for row in self.rows(experiment, series=under, **fields)}
        found = {
            row: row.number / below[place(row)]
            for row in self.rows(experiment, series=over, **fields)
            if place(row) in below
        }
        if not found:
            raise MissingRows(f"{experiment}: no pairs of {over} and {under} with {fields}")
        return found


def doubling(found: Mapping[int, float]) -> list[float]:
    """From each length to the next: by what the value grows, over what the length grows."""
    lengths = sorted(found)
    return [found[b] / found[a] / (b / a) for a, b in zip(lengths, lengths[1:], strict=False)]


def _fits(value: Any, wanted: Any) -> bool:
    return value in wanted if isinstance(wanted, tuple) else bool(value == wanted)


def span(values: Iterable[float], form: str = ".2f") -> str:
    """The least and the largest: "1.09 to 1.38", or one number where they look the same."""
    found = list(values)
    return " to ".join(dict.fromkeys(format(value, form) for value in (min(found), max(found))))


@dataclass(frozen=True)
class Finding:
    """What the rows say: our number in words, the verdict, and why it differs where it does."""

    number: str
    verdict: str
    reason: str = ""


@dataclass(frozen=True)
class Question:
    """A published figure or a claim. `decide` gives the finding, or raises MissingRows.

    `there` is the setting that it is published for, `here` ours; `experiments` are those whose rows
    decide it.
    """

    name: str
    claim: str
    there: str
    here: str
    experiments: tuple[str, ...]
    decide: Callable[[Evidence], Finding]

    def finding(self, evidence: Evidence) -> Finding:
        try:
            return self.decide(evidence)
        except MissingRows:
            return Finding("", NOT_MEASURED)

    @property
    def command(self) -> str:
        return f"`python -m experiments run {' '.join(self.experiments)}`"

    @property
    def data(self) -> str:
        return ", ".join(f"[{name}](figures/data/{name})" for name in self.experiments)


def question_table(questions: Sequence[Question], first: str) -> Across:
    """The table of these questions, a row each; `first` is the heading of the first column."""
    header = [first, "published or claimed", "setting there", "setting here", "ours"]
    header += ["verdict", "command", "data"]

    def make(rows: Sequence[Row]) -> Table | None:
        if not rows:
            return None
        evidence = Evidence(rows)
        findings = [q.finding(evidence) for q in questions]
        lines = []
        for q, found in zip(questions, findings, strict=True):
            verdict = f"**{found.verdict}**" + (f": {found.reason}" if found.reason else "")
            lines.append(
                [q.name, q.claim, q.there, q.here, found.number, verdict, q.command, q.data]
            )
        body = markdown(header, lines).replace("---:", "---")
        return Table(tally(findings), body)

    names = dict.fromkeys(name for q in questions for name in q.experiments)
    return Across(make, tuple(names), cites=False)


def tally(findings: Iterable[Finding]) -> str:
    """How many there are of each verdict."""
    verdicts = [found.verdict for found in findings]
    known = (REPRODUCED, TREND, REFUTED, NOT_MEASURED)
    shown = [f"{verdicts.count(name)} {name}" for name in known if name in verdicts]
    return f"{', '.join(shown)}, of {len(verdicts)}."
