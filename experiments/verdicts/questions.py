"""Questions: is a published figure or a claim reproduced by our numbers?

questions.csv contains the texts, the kind and the trend of each question. Python code gives the
quantities of each question.
"""

import csv
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.lab.record import registry
from experiments.lab.show.tables import Across, Table, markdown, span

from . import rule
from .evidence import Evidence, MissingRows, Quantity
from .rule import (
    NOT_COMPARABLE,
    NOT_MEASURED,
    REFUTED,
    REPRODUCED,
    TREND,
    DifferentGpus,
    Point,
    Published,
)

# (our quantity, what is published). The second entry is a quantity, a number or bounds for all
# places, or a function that takes the parts of a place and returns a number or bounds.
Pair = tuple[Quantity, Quantity | Published | Callable[..., Published]]
Pairs = Mapping[str, Pair]
WORDS = Path(__file__).with_name("questions.csv")


@dataclass(frozen=True)
class Finding:
    """The answer of the stored rows to a question.

    Parameters
    ----------
    number : str
        A text with our numbers and the published numbers.
    verdict : str
        The verdict.
    reason : str, default ""
        The reason of the verdict.
    otherwise : str, default ""
        The verdict that the numbers alone would get, if the verdict is "not comparable" and the
        numbers exist.
    """

    number: str
    verdict: str
    reason: str = ""
    otherwise: str = ""


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question: a published figure or a claim, and the quantities that answer it.

    Parameters
    ----------
    key : str
        Name of the question in the code.
    name : str
        The published figure or the claim, such as "FA-1 Fig. 1 left".
    words : str
        What the figure or claim says.
    source : str
        How the published numbers were read, such as "printed" or "digitised", or the text that
        makes the claim. "-" if neither is stated.
    there, here : str
        The setting of the published numbers (`there`) and the setting of our numbers (`here`), such
        as the GPU.
    kind, trend : str
        Arguments of `rule.judge`, which say how our numbers are compared.
    form : str
        Format of the numbers in the table, such as ".2f".
    before : str
        The verdict before the rule in rule.py was changed; empty for a new question.
    why_changed : str
        The reason why the verdict changed; empty if only our numbers changed.
    why_trend, why_refuted : str
        Reason that the page gives if the verdict is "trend only", or if it is "refuted".
    not_comparable : str
        What differs between our numbers and the published numbers, if they do not measure the same
        thing. The verdict is then "not comparable". Empty if they are comparable.
    not_measured : str
        What was not measured, if our numbers do not decide the question, or if the rows that decide
        it do not exist. The verdict is then "not measured", unless our numbers reproduce the claim.
    same_as : str
        Name of another row that states the same fact. The row is then not counted in the numbers of
        verdicts. Empty for every other row.
    pairs : mapping
        The numbers that are compared. Maps a label to a pair: our quantity, and the published
        quantity.
    beside : mapping
        Further numbers, as pairs like those in `pairs`. They are used only for the trend "order",
        which compares the order of several kernels.
    control : mapping
        A check for ratios of speeds, such as our speed / cuDNN's speed. Such ratios are comparable
        with published ratios only if the divisor (here cuDNN) is equally fast in both measurements.
        Maps a sentence to a pair: the divisor's speed in our measurement, and its published speed.
        Points at which the two speeds differ, or are missing, are left out. If fewer than half of
        the speeds are equal, the verdict is "not comparable", and the page contains the sentence.
        Otherwise, the sentence follows our numbers. {} in the sentence is replaced by our speed /
        the published speed. Empty: no check.
    """

    key: str
    name: str
    words: str
    source: str
    there: str
    here: str
    kind: str
    trend: str
    form: str
    before: str
    why_changed: str
    why_trend: str
    why_refuted: str
    not_comparable: str
    not_measured: str
    same_as: str
    pairs: Pairs
    beside: Pairs
    control: Pairs

    @property
    def experiments(self) -> tuple[str, ...]:
        """Return the experiments whose rows answer the question."""
        of = (self.pairs, self.beside, self.control)
        every = [ours for pairs in of for ours, _ in pairs.values()]
        return tuple(dict.fromkeys(name for each in every for name in each.experiments))

    def finding(self, evidence: Evidence) -> Finding:
        """Return the answer to the question by the stored rows in `evidence`.

        If rows that the question needs are missing, the verdict is "not measured".
        """
        try:
            points, beside = points_of(self.pairs, evidence), points_of(self.beside, evidence)
            divisor, equal = self._divisor(evidence)
            comparable = [p for p in points if not self.control or p.place in equal]
            same = not self.control or bool(equal and comparable)
            differs = self.not_comparable or ("" if same else f"the divisors differ: {divisor}")
        except MissingRows as missing:
            said = self.not_measured or _without_fields(str(missing))
            return Finding("", NOT_MEASURED, said)
        except DifferentGpus as different:
            return Finding("", NOT_COMPARABLE, str(different))
        if differs:
            comparable = points
        judged = rule.judge(self.kind, self.trend, comparable, beside)
        words = [self._words(label, comparable) for label in self.pairs]
        if len(comparable) > len(self.pairs):
            said = "true" if self.trend == "words" else "within the factor"
            words.append(f"{said} at {sum(judged.within)} of {len(comparable)} points")
            if self.trend != "words":
                agreeing = f"{sum(judged.agreeing)} of {len(judged.agreeing)}"
                trend = "at least halfway" if self.trend == "size" else f"same {self.trend}"
                words.append(f"{trend} at {agreeing}")
        if differs:
            return Finding("; ".join(words), NOT_COMPARABLE, differs, judged.verdict)
        words += [divisor] if divisor else []
        if judged.verdict != REPRODUCED and self.not_measured:
            return Finding("; ".join(words), NOT_MEASURED, self.not_measured)
        if judged.verdict == NOT_MEASURED:
            low, high = zip(*(rule.ends(point.ours) for point in comparable), strict=True)
            between = f"{min(low):{self.form}} and {max(high):{self.form}}"
            said = f"by the ranges of the two numbers, the ratio is between {between}"
            return Finding("; ".join(words), NOT_MEASURED, said)
        why = {TREND: self.why_trend, REFUTED: self.why_refuted}.get(judged.verdict, "")
        return Finding("; ".join(words), judged.verdict, why)

    def _divisor(self, evidence: Evidence) -> tuple[str, set[rule.Place]]:
        """Return a text that compares our divisor with the paper's, and the places with equal ones.

        A place says for which sizes a number is. The pairs of speeds are in the field `control`,
        which the docstring of the class describes. If `control` has several pairs, the divisors of
        all pairs must be equal. The set is empty if fewer than half of the speeds of a pair are
        equal. The text is about this pair, or about the last pair. Without pairs, the text is
        empty.
        """
        said, equal = "", set[rule.Place]()
        for n, (sentence, pair) in enumerate(self.control.items()):
            points = points_of({sentence: pair}, evidence)
            within = {p.place for p in points if p.within(rule.FACTORS["speed"])}
            times = span([point.times for point in points if point.times is not None])
            said = (
                f"{sentence.format(times)} (within the factor at {len(within)} of "
                f"{len(points)} points)"
            )
            equal = equal & within if n else within
            if 2 * len(within) < len(points):
                return said, set()
        return said, equal

    def _words(self, label: str, points: Sequence[Point]) -> str:
        mine = [point for point in points if point.label == label]
        bounds = dict.fromkeys(
            str(p.published) for p in mine if isinstance(p.published, rule.Bounds)
        )
        numbers = [p.published for p in mine if not isinstance(p.published, rule.Bounds)]
        said = [span(numbers, self.form)] if numbers else []
        times = [p.times for p in mine if p.times is not None]
        several = len(times) > 1 and len(set(numbers)) > 1
        more = f", ours / published {span(times)}" if several else ""
        ours = span([point.ours for point in mine], self.form)
        found = [*said, *bounds]
        by_point = ", depending on the point" if len(found) > 1 else ""
        return f"{label}: {ours} (published {'; '.join(found)}{by_point}{more})"


def points_of(pairs: Pairs, evidence: Evidence) -> list[Point]:
    """Return the points of pairs. A point is our number and the published number to compare.

    Both numbers of a point have the same place, such as (64, 512) for the head dimension and the
    sequence length. Places for which only one of the numbers exists are left out. Raise MissingRows
    if a pair has no place with both numbers.
    """
    points = []
    for label, (quantity, said) in pairs.items():
        ours = quantity.find(evidence)
        if isinstance(said, Quantity):
            theirs: Mapping[rule.Place, Published] = said.find(evidence)
            theirs = dict.fromkeys(ours, theirs[()]) if set(theirs) == {()} else theirs
        else:
            theirs = {place: said(*place) if callable(said) else said for place in ours}
        both = sorted(place for place in ours if place in theirs)
        if not both:
            raise MissingRows(
                f"no row of {', '.join(quantity.experiments)} belongs to the numbers of {label}"
            )
        points += [Point(label, place, ours[place], theirs[place]) for place in both]
    return points


def declared(
    pairs: Mapping[str, Pairs], beside: Mapping[str, Pairs], control: Mapping[str, Pairs]
) -> tuple[Question, ...]:
    """Return the questions of questions.csv whose keys are in `pairs`, in the order of the file.

    Each argument maps the key of a question to a field of the same name in `Question`. A question
    may be missing in `beside` and `control`; the field is then empty.
    """
    with open(WORDS, newline="", encoding="utf-8") as file:
        lines = [line for line in csv.DictReader(file) if line["key"] in pairs]
    return tuple(
        Question(
            pairs=pairs[line["key"]],
            beside=beside.get(line["key"], {}),
            control=control.get(line["key"], {}),
            **line,
        )
        for line in lines
    )


def table(questions: Sequence[Question], first: str, what: str) -> Across:
    """Return a table with one row for each question.

    `first` is the header of the first column. `what` names the table in the caption.
    """
    header = [first, "what it says", "source", "setting there", "setting here", "kind, trend"]
    header += ["our numbers", "verdict"]

    def make(evidence: Evidence) -> Table:
        lines, verdicts = [], []
        for q in questions:
            found = q.finding(evidence)
            if not q.same_as:
                verdicts.append(found.verdict)
            was = f" (before: {q.before or 'none'})" if q.before != found.verdict else ""
            verdict = f"**{found.verdict}**{was}" + (f": {found.reason}" if found.reason else "")
            if found.otherwise:
                verdict += f" (the numbers alone: {found.otherwise})"
            verdict += f" (the fact of the row {q.same_as}, counted there)" if q.same_as else ""
            data = ", ".join(f"[{name}]" for name in q.experiments)
            cells = [LINK.sub(r"[\1]", words) for words in (q.name, q.words, q.source)]
            cells += [q.there, q.here, f"{q.kind}, {q.trend}"]
            lines.append([*cells, found.number, verdict, data])
        body = markdown([*header, "experiment"], lines).replace("---:", "---")
        repeated = [q.name for q in questions if q.same_as]
        return Table(rule.tally(verdicts, what, repeated), body)

    return _across(questions, make)


def _without_fields(message: str) -> str:
    """Return the message of a `MissingRows` with the series, but without the other columns."""
    text, _, fields = message.partition(" with ")
    series = re.search(r"'series': '([^']*)'", fields)
    return f"{text} of the series {series[1]}" if series else text


LINK = re.compile(r"\[([^]]+)\]\(([^)]+)\)")


def links(questions: Sequence[Question]) -> Across:
    """Return the Markdown link definitions, such as "[name]: path", for the tables of questions.

    The cells of the tables contain links as names in brackets.
    """
    said = dict(pair for q in questions for pair in LINK.findall(f"{q.name} {q.source}"))
    said |= {name: f"figures/tables/{name}.md" for name in registry.names()}
    body = "".join(f"[{words}]: {target}\n" for words, target in said.items())
    return _across(questions, lambda _: Table("", body))


def changed(questions: Sequence[Question]) -> Across:
    """Return the table of the verdicts that changed when the rule in rule.py was changed.

    The table also contains the figures and claims that had no verdict before.
    """
    header = ["figure or claim", "what it says", "verdict before", "verdict now", "why"]
    header += ["our numbers"]

    def make(evidence: Evidence) -> Table:
        found = [(q, q.finding(evidence)) for q in questions]
        lines = []
        for q, after in found:
            if q.before != after.verdict:
                why = q.why_changed or (OTHER_NUMBERS if q.before else NEW_ROW)
                words = [q.name, q.words, q.before or "none", after.verdict, why]
                lines.append([*words, after.number or after.reason])
        earlier = sum(bool(q.before) for q in questions)
        new = len(questions) - earlier
        caption = (
            f"The changed rule for verdicts gives other verdicts to {len(lines) - new} of the "
            f"{earlier} rows on figures and claims that had a verdict before."
        )
        if new:
            caption += f" The number of new rows is {new}."
        return Table(caption, markdown(header, lines).replace("---:", "---"))

    return _across(questions, make)


OTHER_NUMBERS = "our numbers were recorded again"
NEW_ROW = "the row is new in the table"


def _across(questions: Sequence[Question], make: Callable[[Evidence], Table]) -> Across:
    """Return a table of questions, as an object that pages can make.

    `make` takes the stored rows of all experiments that the questions use, as an `Evidence` object,
    and returns the table.
    """
    names = tuple(dict.fromkeys(name for q in questions for name in q.experiments))
    return Across(lambda rows: make(Evidence(rows)) if rows else None, names, cites=False)


RULE = Across(lambda rows: Table(rule.TEXT, "") if rows else None, ("loop_order",), cites=False)
