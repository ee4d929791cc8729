"""Panels of the page explore.html: inputs, and a function that computes answers from the inputs.

All answers of a panel can be stored in the page as small tables.
"""

import itertools
import json
import math
from argparse import ArgumentTypeError
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from fa_numba.commands.arguments import whole

Value = int | str
Answer = dict[str, Any]


@dataclass(frozen=True)
class Axis:
    """An input of a panel.

    Parameters
    ----------
    label : str
        Text that the page shows for the input.
    values : sequence of int or str
        Entries of a list, or positions of a slider. If the answers of a panel are stored in the
        page, there are answers for these values only.
    least, most : int, optional
        Smallest and largest allowed integer, for a panel whose answers are computed on request.
        None: only `values` and the keys of `words` are allowed.
    words : mapping, default {}
        Maps a value to the text that the page shows for the value.
    text : bool, default False
        Whether any text is allowed.
    first : int or str, optional
        Value when the page opens. Default: the first of `values`.
    """

    label: str
    values: Sequence[Value]
    least: int | None = None
    most: int | None = None
    words: Mapping[Value, str] = field(default_factory=dict)
    text: bool = False
    first: Value | None = None

    def parse(self, name: str, given: str) -> Value:
        """Convert the text of a request (`given`) to a value of the input called `name`.

        Raise ValueError if the value is not allowed.
        """
        if self.text:
            return given
        if self.least is None or self.most is None:
            known = {str(value): value for value in (*self.words, *self.values)}
            if given not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {given!r}")
            return known[given]
        try:
            return whole(self.least, self.most)(given)
        except ArgumentTypeError as error:
            raise ValueError(f"{name}: {error}") from None


@dataclass(frozen=True)
class Panel:
    """A panel of the page: a question, a sentence that answers it, inputs and a table of numbers.

    Parameters
    ----------
    name : str
        Name in requests.
    title, question, sentence, note : str
        Texts.
    axes : mapping of str to Axis
        Inputs.
    answer : callable
        Takes the inputs and returns the answer: the numbers by key.
    columns : sequence of (str, str)
        Prefix and label of each column of the table, such as ("fa1", "FA-1 (K/V outer)").
    rows : sequence of (str, str, str)
        Key, label and format of each row of the table, such as ("total", "bytes moved", "bytes").
        The cell in the column "fa1" and the row "total" shows the value of the answer with the key
        "fa1.total". The formats are:

        | format | how a value is written |
        |---|---|
        | "bytes" | three digits with a unit, such as MB |
        | "count" | all digits below 10^6, else three digits with a prefix, such as M |
        | "number" | three digits |
        | "words" | the value is text |
    """

    name: str
    title: str
    question: str
    sentence: str
    axes: Mapping[str, Axis]
    answer: Callable[..., Answer]
    columns: Sequence[tuple[str, str]] = ()
    rows: Sequence[tuple[str, str, str]] = ()
    note: str = ""

    def parse(self, given: Mapping[str, str]) -> dict[str, Value]:
        """Convert the texts of a request to values of the panel's inputs.

        `given` maps the name of an input to its text. Raise ValueError for a wrong, unknown or
        missing input.
        """
        unknown = [name for name in given if name not in self.axes]
        missing = [name for name in self.axes if name not in given]
        for said, names in (("unknown", unknown), ("missing", missing)):
            if names:
                raise ValueError(f"{said}: {', '.join(names)}; inputs are {', '.join(self.axes)}")
        return {name: axis.parse(name, given[name]) for name, axis in self.axes.items()}

    def at(self, **state: Value) -> Answer:
        """Return the panel's answer for given values of its inputs, as plain JSON values.

        The inputs are passed by name. If the function `answer` raises ValueError, the result is
        {"refused": reason}.
        """
        try:
            return {key: plain(value) for key, value in self.answer(**state).items()}
        except ValueError as error:
            return {"refused": str(error)}

    def described(self) -> dict[str, Any]:
        """Return the texts and inputs of the panel, without answers, as plain JSON values."""
        axes = {
            name: {**asdict(axis), "first": axis.values[0] if axis.first is None else axis.first}
            for name, axis in self.axes.items()
        }
        words = ("title", "question", "sentence", "columns", "rows", "note")
        return {"axes": axes, **{name: getattr(self, name) for name in words}}

    def baked(self) -> dict[str, Any]:
        """Return all answers of the panel in a compact form, as {key: [inputs, values, codes]}.

        An answer is a dictionary of numbers and texts. A key is one of its keys, such as
        "fa1.total".

        | entry | meaning |
        |---|---|
        | inputs | positions in `axes`, from 0, of the inputs on which the key's value depends |
        | values | list of the different values of the key |
        | codes | for each combination of these inputs, an index into `values` |

        In `codes`, the first of `inputs` varies slowest. An answer may not contain the key. Its
        code is then -1, or any code that makes `codes` smaller, and must not be used.
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
    """Return a value as JSON allows it.

    Finite floats are rounded to six digits. Floats that are not finite become the texts "inf",
    "-inf" and "nan".
    """
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
