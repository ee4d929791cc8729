"""Panels of the page: inputs, a function of them, and all its answers as one small table."""

import itertools
import json
import math
from argparse import ArgumentTypeError
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from fa_numba.commands.arguments import whole

NOT_HERE = "This is not on the page: `python -m experiments explore` answers it."
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
        try:
            return whole(self.least, self.most)(given)
        except ArgumentTypeError as error:
            raise ValueError(f"{name}: {error}") from None


@dataclass(frozen=True)
class Panel:
    """A panel: a `question`, the `sentence` that answers it, inputs, and what `answer` gives of
    them, by key. A table shows `rows`, (key, label), over `columns`, (prefix, label); a key of a
    column is "prefix.key".
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

    def described(self) -> dict[str, Any]:
        axes = {
            name: {**asdict(axis), "first": axis.values[0] if axis.first is None else axis.first}
            for name, axis in self.axes.items()
        }
        words = ("title", "question", "sentence", "columns", "rows", "note")
        return {"axes": axes, **{name: getattr(self, name) for name in words}}

    def baked(self) -> dict[str, Any]:
        """Every answer: key -> the axes that it depends on, slowest first, its different values,
        and which of them stands where, -1 for none. A key that an answer lacks is as in another.
        """
        sizes = [len(axis.values) for axis in self.axes.values()]
        states = itertools.product(*(axis.values for axis in self.axes.values()))
        answers = [self.at(**dict(zip(self.axes, state, strict=True))) for state in states]
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
            found[key] = [over, [json.loads(text) for text in pool], codes.T.ravel().tolist()]
        return found


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
