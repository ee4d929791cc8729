"""Panels of the page: inputs, a function of them, and all its answers as one small table."""

import itertools
import json
import math
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

NOT_HERE = "This is not on the page: `python -m experiments explore` answers it."
# Of the places in a table: printable ASCII without the space, which is none, braces, which say how
# often one comes, and what JSON or HTML would have to escape.
DIGITS = "".join(sorted({*string.printable} - {*string.whitespace, *"{}\"\\<>&'"}))
Value = int | str
Answer = dict[str, Any]


@dataclass(frozen=True)
class Axis:
    """An input: the `values` that the page has answers for. One with bounds takes any whole number
    between them where the page is served, or with `text` any text; another one its values and
    what there are `words` for. The page begins with `first`, or the first of the values.
    """

    label: str
    values: Sequence[Value]
    least: int | None = None
    most: int | None = None
    words: Mapping[Value, str] = field(default_factory=dict)
    text: bool = False
    first: Value | None = None

    def parse(self, name: str, given: str) -> Value:
        """The value of a text. Raises ValueError, which names the input and what is allowed."""
        if self.text:
            return given
        if self.least is None or self.most is None:
            known = {str(value): value for value in (*self.words, *self.values)}
            if given not in known:
                raise ValueError(f"{name} is {given!r}: allowed is {', '.join(known)}")
            return known[given]
        allowed = f"allowed is a whole number from {self.least} to {self.most}"
        if not (given.isascii() and given.isdigit() and len(given) < 12):
            raise ValueError(f"{name} is {given!r}: {allowed}")
        if not self.least <= int(given) <= self.most:
            raise ValueError(f"{name} is {int(given)}: {allowed}")
        return int(given)


@dataclass(frozen=True)
class Panel:
    """A panel: a `question`, the `sentence` that answers it, inputs, and what `answer` gives of
    them, by key. A table shows `rows`, (key, label), over `columns`, (prefix, label); a key of a
    column is "prefix.key". States that are `left_out` are answered where the page is served alone.
    """

    name: str
    title: str
    question: str
    sentence: str
    axes: Mapping[str, Axis]
    answer: Callable[..., Answer]
    columns: Sequence[tuple[str, str]] = ()
    rows: Sequence[tuple[str, str]] = ()
    note: str = ""
    live: bool = True
    left_out: Callable[..., bool] | None = None

    def parse(self, given: Mapping[str, str]) -> dict[str, Value]:
        """A state of a request. Raises ValueError for a wrong, unknown or missing input."""
        unknown = [name for name in given if name not in self.axes]
        missing = [name for name in self.axes if name not in given]
        for said, names in (("unknown", unknown), ("missing", missing)):
            if names:
                raise ValueError(f"{said}: {', '.join(names)}; inputs are {', '.join(self.axes)}")
        return {name: axis.parse(name, given[name]) for name, axis in self.axes.items()}

    def at(self, **state: Value) -> Answer:
        """The answer in plain JSON; what is refused says why under "refused"."""
        try:
            return {key: plain(value) for key, value in self.answer(**state).items()}
        except ValueError as error:
            return {"refused": str(error)}

    def on_page(self, **state: Value) -> Answer:
        if self.left_out is not None and self.left_out(**state):
            return {"refused": NOT_HERE}
        return self.at(**state)

    def described(self) -> dict[str, Any]:
        axes = {
            name: {
                "label": axis.label,
                "values": list(axis.values),
                "words": {str(value): words for value, words in axis.words.items()},
                "least": axis.least,
                "most": axis.most,
                "text": axis.text,
                "first": axis.values[0] if axis.first is None else axis.first,
            }
            for name, axis in self.axes.items()
        }
        words = {"title": self.title, "question": self.question, "sentence": self.sentence}
        shown = {"columns": self.columns, "rows": self.rows, "note": self.note, "live": self.live}
        return {"axes": axes, **words, **shown}

    def baked(self) -> dict[str, Any]:
        """Every answer: key -> the axes that it depends on, slowest first, its different values,
        and which of them stands where (`packed`), if not one after the other. A key that an answer
        lacks is as in another.
        """
        sizes = [len(axis.values) for axis in self.axes.values()]
        states = itertools.product(*(axis.values for axis in self.axes.values()))
        answers = [self.on_page(**dict(zip(self.axes, state, strict=True))) for state in states]
        texts: dict[str, dict[int, str]] = {}
        for place, answer in enumerate(answers):
            for key, value in answer.items():
                texts.setdefault(key, {})[place] = json.dumps(value)
        found = {}
        for key, said in texts.items():
            if key.endswith("refused"):
                said = {place: said.get(place, '""') for place in range(len(answers))}
            pool = {text: n for n, text in enumerate(dict.fromkeys(said.values()))}
            codes = np.full(len(answers), -1)
            codes[list(said)] = [pool[text] for text in said.values()]
            codes = codes.reshape(sizes)
            over: list[int] = []
            for axis in reversed(range(len(sizes))):
                most = codes.max(axis=axis, keepdims=True)
                if ((codes == most) | (codes < 0)).all():
                    codes = most.squeeze(axis)
                else:
                    over.append(axis)
            values = [json.loads(text) for text in pool]
            at = codes.T.ravel().tolist()
            all_in_order = at == list(range(len(values)))
            found[key] = [over, values, *([] if all_in_order else [packed(at, len(values))])]
        return found


def packed(places: Sequence[int], count: int) -> str:
    """Places below `count`, or -1, in as many digits each as the largest takes; a place that comes
    several times is followed by {how many more}.
    """
    base = len(DIGITS)
    width = 1 if count <= base else 2
    words = []
    for place, run in itertools.groupby(places):
        digits = DIGITS[place // base] * (width - 1) + DIGITS[place % base]
        word, more = " " * width if place < 0 else digits, len(list(run)) - 1
        words.append(min(word * (more + 1), f"{word}{{{more}}}", key=len))
    return "".join(words)


def plain(value: Any) -> Any:
    """What JSON has: a float to six digits, one that is not finite as "inf", "-inf" or "nan"."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (np.floating, float)):
        value = float(value)
        if not math.isfinite(value):
            return str(value)
        rounded = float(f"{value:.6g}")
        return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded
    return value.item() if isinstance(value, np.integer) else value
