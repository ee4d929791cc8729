"""A caller's function as the text of a kernel's: every operation a statement, every value typed.

Integers are int32, and unsigned as an index, numbers float32, so that nothing is computed in 64
bits. What Python does not evaluate, the other side of a conditional expression, of `and`, `or` and
of a chain of comparisons, stands under an `if` where it reads an array, since an index there may be
outside of it.

The derivative with respect to the score is made by the same walk, in forward mode: each value has
its slope beside it, or none where the score is no part of it. A library of symbolic mathematics
would want the function run on its symbols, which a conditional expression, an index and `and`
refuse, and its result written as Python again; here a rule is a line or two. The gradients of
float32 arrays are made alike, by one element that the function reads, for each of those that it
reads; what a result does not need is left out then.
"""

from __future__ import annotations

import ast
import functools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import CodeType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from numba import int32, uint32

from .source import LEAST, NUMBERS, Source

PARAMETERS = {
    "score_mod": ("score", "b", "h", "i", "j"),
    "mask_mod": ("b", "h", "i", "j"),
    "score_mod_grad": ("score", "b", "h", "i", "j"),
}
ONE = "float32(1.0)"
_READ = re.compile(
    r"(?<![\w.])(?!(?:u?int32|float32|math|options|divisor|floor_divide|modulo)\b)[a-z]\w*"
)
# Functions of math: the slope by the argument x, as a text of it and of the value y, and its parts.
_SLOPES = {
    "exp": "{y}",
    "expm1": "{y} + float32(1.0)",
    "log": "float32(1.0) / {x}",
    "log2": f"float32({1 / math.log(2)!r}) / {{x}}",
    "log10": f"float32({1 / math.log(10)!r}) / {{x}}",
    "log1p": "float32(1.0) / (float32(1.0) + {x})",
    "sqrt": "float32(0.5) / {y}",
    "sin": "float32(math.cos({x}))",
    "cos": "-float32(math.sin({x}))",
    "tan": "float32(1.0) + {y} * {y}",
    "atan": "float32(1.0) / (float32(1.0) + {x} * {x})",
    "sinh": "float32(math.cosh({x}))",
    "cosh": "float32(math.sinh({x}))",
    "tanh": "float32(1.0) - {y} * {y}",
    "erf": f"float32({2 / math.sqrt(math.pi)!r}) * float32(math.exp(-({{x}} * {{x}})))",
    "fabs": "float32(math.copysign(float32(1.0), {x}))",
}
_STEPS = ("floor", "ceil", "trunc")  # which give an integer
_BOUNDED = ("tanh", "atan", "erf")  # with their slopes, by any number and by infinity
_FIRST = ("tanh", "exp", "expm1", "sqrt")  # whose slope is one of the value, which is above -2
_CONSTANTS = ("pi", "e", "tau", "inf", "nan")
_CALLS = ("min", "max", "abs", "int", "float", "bool", "len")
_LARGEST_POWER = 4
_SYMBOLS: dict[type, str] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.FloorDiv: "//", ast.Mod: "%",
    ast.BitAnd: "&", ast.BitOr: "|", ast.BitXor: "^", ast.LShift: "<<", ast.RShift: ">>",
    ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=",
}  # fmt: skip
# By a number that all elements share: functions of parts/division.py.
_BY_A_PRODUCT = {"//": "floor_divide", "%": "modulo"}
# What captured numbers alone decide, which is computed before the call.
_OF_NUMBERS = re.compile(r"(?=.*options\.)(?:options\.\w+|float32\(-?[\w.+-]+\)|[ +*/-])+")
_LOG2E = f"float32({math.log2(math.e)!r})"
_TRUTHS = (ast.BitAnd, ast.BitOr, ast.BitXor)
ALLOWED = (
    "A kernel supports assignments to names, followed by one return; arithmetic, comparisons, and, "
    f"or, not and conditional expressions (x if c else y); the functions {', '.join(_CALLS)}; from "
    f"math {', '.join((*_SLOPES, *_STEPS, 'pow', *_CONSTANTS))}; {NUMBERS}, with one index for "
    "each axis of an array"
)
_NAMED = {
    ast.For: "a loop", ast.While: "a loop", ast.If: "an if statement", ast.With: "a with statement",
    ast.FunctionDef: "a function within", ast.Lambda: "a lambda within", ast.Slice: "a slice",
    ast.ListComp: "a loop", ast.GeneratorExp: "a loop", ast.Raise: "a raise",
}  # fmt: skip


def divisor(d: Any) -> Any:
    """What ``floor_divide`` and ``modulo`` of parts/division.py multiply by; in kernels too."""
    return uint32(uint32(0xFFFFFFFF) // uint32(max(int32(1), int32(abs(d)))))


def inverse_of(field: str) -> str:
    """What ``made_of`` makes of the integer in this field, for ``floor_divide`` and ``modulo``."""
    return f"int32(divisor(int32({field})))"


def made_of(text: str, option: str, values: list[Any]) -> int | float:
    """What ``text``, one of the names of a writer's ``captured``, says of the ``values`` of those
    before it, computed as a GPU would, in float32.
    """
    numbers = (np.float32(x) if isinstance(x, float) else x for x in values)
    options = SimpleNamespace(**{f"{option}_{n}": x for n, x in enumerate(numbers)})
    known = {"float32": np.float32, "int32": np.int32, "math": math, "divisor": divisor}
    with np.errstate(all="ignore"):
        return eval(_compiled(text), known | {"options": options}).item()


@functools.cache
def _compiled(text: str) -> CodeType:
    """Once, since every call of a kernel asks what its function captures."""
    return compile(text, "<made of captured numbers>", "eval")


class Term(NamedTuple):
    """A value: "int", "float" or "bool", the name or literal that stands for it, and that of its
    slope; None where the score is no part of it. Of an integer ``of`` says whether it depends on i,
    on j, on neither or, "?", maybe on both; ``real`` is what gives it as a float, where that is
    less than a conversion; ``apart``: it is another one in the next row, and in the next column.
    """

    kind: str
    text: str
    slope: str | None = None
    of: str = "?"
    real: str = ""
    apart: bool = False


class Text(NamedTuple):
    """A function's; of the function that makes its factor of the score; and what is done ``first``
    with that product, before a value and a slope are made of it. Empty without one.
    """

    text: str = ""
    lead: str = ""
    first: str = ""


class Gradient(NamedTuple):
    """The gradients of the float32 arrays that a function reads, as texts.

    ``each`` takes what the function's text does, but the score and the gradient of the result, a
    pair, first, and sums and positions of elements last, ``kept``. It adds what that is for each
    element that is read to ``d<field>``, the array's gradient. For elements that i and j have no
    part in, of which there are ``shared``, it goes to sums; ``rest``, of b, h, ``options`` and
    ``kept``, adds these. For those that neighbours may share, ``merged`` of them, it goes to the
    sums behind, as long as the element stays the one whose row and column are among the positions;
    ``flush``, of ``options`` and ``kept``, adds what is left. ``of_score``: the score has a part.
    """

    each: str
    rest: str
    flush: str
    shared: int
    merged: int
    of_score: bool

    @property
    def scattered(self) -> bool:
        """Whether there are elements to whose gradients each score adds by itself."""
        return "add_global" in self.each


class _Refused(Exception):
    def __init__(self, what: str, node: ast.AST) -> None:
        super().__init__(what)
        self.line = getattr(node, "lineno", 0)


def _undefined(name: str, node: ast.AST) -> _Refused:
    """Return the refusal of a name that has no value."""
    return _Refused(f"{name} (a name that is not defined; import or define it)", node)


def written(
    option: str,
    source: Source,
    kinds: dict[str, str],
    captured: dict[str, str],
    value: bool = True,
    slope: bool = False,
) -> tuple[Text, bool, bool]:
    """The function given as ``option``, its derivative by the score, or both, a pair; whether it
    may be called inside of the matrix alone, and whether its slope is finite by any finite score.

    ``kinds`` are those of the values from outside, by name (``source.kind_of_capture``).
    ``captured`` are the fields of what it captures by name, and of what is made of numbers among
    these (``made_of``) by how: it is added to. Raises as ``mods.captured``.
    """
    writer = _Writer(option, source, kinds, captured)
    try:
        text = writer.function(value, slope)
    except _Refused as refused:
        line = f" in line {refused.line}" if refused.line != source.code.co_firstlineno else ""
        raise ValueError(
            f"{option} contains {refused}{line}, which a kernel does not support, in "
            f"{source.shown}. {ALLOWED}"
        ) from None
    return text, writer.inside, writer.steady


def gradient_of(
    option: str, source: Source, kinds: dict[str, str], captured: dict[str, str]
) -> Gradient | None:
    """The gradients of the float32 arrays that the result depends on; None without any."""
    return _Writer(option, source, kinds, captured).gradient()


class _Position(NamedTuple):
    """Where a function reads an element: the gradient's matrix, and names of a row and a column;
    ``shared`` where i and j have no part in them, ``apart`` where no neighbours share one.
    """

    matrix: str
    row: str
    column: str
    shared: bool
    apart: bool

    @property
    def starts(self) -> list[str]:
        """Values of the names for where the element is not read."""
        names = re.findall(r"\bp\d+", f"{self.matrix} {self.row} {self.column}")
        return [f"{name} = uint32(0)" for name in names]

    def adding(self, text: str) -> list[str]:
        """Adds what ``text`` says, unless that is 0, as where the element is not read."""
        where = f"{self.matrix}, {self.row}, {self.column}"
        return [f"if {text} != float32(0.0):", f"    add_global({where}, {text})"]

    @property
    def merges(self) -> bool:
        """Whether neighbours may share it; of an array of one axis or two."""
        return not (self.shared or self.apart) and "[" not in self.matrix

    def merging(self, text: str, sums: str, n: int) -> list[str]:
        """Adds what ``text`` says to ``sums``, of number ``n``, or to those of a new position."""
        here = f"at[{2 * n}]", f"at[{2 * n + 1}]"
        moved = f"{self.row} != {here[0]} or {self.column} != {here[1]}"
        ended = self._replace(row=here[0], column=here[1]).adding(sums)
        starts = f"{here[0]} = {self.row}", f"{here[1]} = {self.column}"
        new = (*ended, *starts, f"{sums} = float32(0.0)")
        inner = [f"if {moved}:", *(f"    {line}" for line in new), f"{sums} += {text}"]
        return [f"if {text} != float32(0.0):", *(f"    {line}" for line in inner)]

    def ending(self, sums: str, n: int) -> list[str]:
        """Adds these sums."""
        return self._replace(row=f"at[{2 * n}]", column=f"at[{2 * n + 1}]").adding(sums)


_UNPACKED = "sums, at = kept"


@dataclass
class _Name:
    """What is known of a name in the text.

    ``shared``: all elements of a tile have its value; ``of_score``: the score has a part in it. A
    ``product`` is of a shared factor and another value. By a finite score a value of ``rank`` 0 is
    finite, 1 infinite at most, else maybe no number, and a slope is finite if it is ``steady``.
    """

    shared: bool = False
    of_score: bool = False
    product: tuple[str, str] = ("", "")
    inverse_of: str = ""
    rank: int = 2
    steady: bool = False


class _Writer:
    """Writes one function."""

    def __init__(
        self, option: str, source: Source, kinds: dict[str, str], captured: dict[str, str]
    ) -> None:
        self.option, self.source, self.kinds, self.captured = option, source, kinds, captured
        self.lines: list[str] = []
        self.count = 0
        self.inside = False
        self.known: dict[str, Term] = {}
        # What slopes are by: the score, or the element that is read as the one of this number.
        self.by: str | int = ""
        self.names = defaultdict(_Name, score=_Name(of_score=True, rank=0))
        self.names["scale"].shared = self.names["unit"].shared = True
        self.steady = False
        self.reads = 0  # of elements of float32 arrays
        self.position: _Position | None = None  # the one that slopes are by
        for name, kind in kinds.items():
            if kind.partition("[")[0] in ("int32", "float32", "bool"):
                self.field(name)

    def result(self, by: str | int) -> Term:
        """What the function returns, whose slope is by that."""
        self.by, self.reads, self.position = by, 0, None
        for theirs, ours in zip(self.source.parameters, PARAMETERS[self.option], strict=True):
            kind, of = "float" if ours == "score" else "int", ours if ours in ("i", "j") else ""
            self.known[theirs] = Term(kind, ours, ONE if ours == by else None, of)
        *before, last = self.source.body
        for statement in before:
            self.statement(statement)
        if not isinstance(last, ast.Return) or last.value is None:
            raise _Refused(f"{_what(last)} as its last statement instead of a return", last)
        return self.visit(last.value)

    def function(self, value: bool, slope: bool) -> Text:
        result = self.result("score" if slope else "")
        if self.option == "mask_mod":
            if result.kind == "float":
                raise ValueError(
                    f"mask_mod must return True or False, got a float, in {self.source.shown}; "
                    "return a comparison, such as i >= j"
                )
            found = self.truth(result)
        elif result.kind == "bool":
            raise ValueError(
                f"{self.option} must return a number, got True or False, in {self.source.shown}; "
                "return a conditional expression, such as score if i >= j else 0.0"
            )
        else:
            results = [self.in_unit(self.real(result))] if value else []
            results += [result.slope or "float32(0.0)"] if slope else []
            found, self.steady = ", ".join(results), self.steady_slope(result.slope)
        *_, b, h, i, j = PARAMETERS[self.option]
        of_score = () if self.option == "mask_mod" else ("given",)
        head = f"def mod({', '.join((*of_score, b, h, i, j, 'origin', 'options'))}):"
        factor, lines = self.led([*self.lines, f"return {found}"])
        lead = _needed("def mod(scale, options):", [*self.lines, f"return {factor}"])[0]
        first, lines = self.begun(lines) if value and slope else ("", lines)
        text = _needed(head, ["score, unit = given", *lines] if of_score else lines)[0]
        return Text(text, lead, first)

    def led(self, lines: list[str]) -> tuple[str, list[str]]:
        """The factor by which the score is given, and what is done with that: its scale; times what
        all elements share, where the score has a part as that product alone.
        """
        name, value = _alone("score", lines)
        factor, of_score = self.names[name].product
        if of_score != "score":
            return "scale", lines
        return f"scale * {factor}", _with("score", name, value, lines)

    def begun(self, lines: list[str]) -> tuple[str, list[str]]:
        """What is done first with the score that is given, and what with the value of that: a
        function of math, where the score has a part as its argument alone, nothing more.
        """
        score, (name, value) = "score", _alone("score", lines)
        if value == "score":  # by a factor
            score, (name, value) = name, _alone(name, lines)
        for function in _FIRST:
            if value == f"float32(math.{function}({score}))":
                first = f"def mod(score):\n    return float32(math.{function}(score))\n"
                return first, _with("score", name, value, lines)
        return "", lines

    def in_unit(self, value: str) -> str:
        factor, rest = self.names[value].product
        if not factor:
            return f"unit * {value}"
        whole = f"unit * {factor}"
        if _OF_NUMBERS.fullmatch(factor):
            whole = f"{self.put(f'{_LOG2E} * {factor}')} if unit != {ONE} else {factor}"
        return f"{self.put(whole)} * {rest}"

    def gradient(self) -> Gradient | None:
        self.result("")
        found = []
        for number in range(self.reads):
            self.lines = []
            slope, position = self.result(number).slope, self.position
            if slope is not None and position is not None:
                found.append((slope, position, [*position.starts, *self.lines]))
        if not found:
            return None
        each, rest, flush = ([_UNPACKED] for _ in range(3))
        adds: list[str] = []
        shared, merged, sums = sum(position.shared for _, position, _ in found), 0, 0
        for number, (slope, position, lines) in enumerate(found):
            each += lines
            by = f"g{number}"
            if position.shared:
                adds.append(f"sums[{sums}] += ds * {slope}")
                rest += [*lines, *position.adding(f"sums[{sums}]")]
                sums += 1
                continue
            adds.append(f"{by} = ds * {slope}")
            if position.merges:
                adds += position.merging(by, f"sums[{shared + merged}]", merged)
                flush += position.ending(f"sums[{shared + merged}]", merged)
                merged += 1
            else:
                adds += position.adding(by)
        taken = ", ".join(("given", *PARAMETERS[self.option][1:], "origin", "options", "kept"))
        of_each, read = _needed(f"def mod({taken}):", ["score, ds = given", *each, *adds])
        of_rest, _ = _needed("def mod(b, h, options, kept):", rest, flat=True)
        of_flush, _ = _needed("def mod(options, kept):", flush)
        return Gradient(of_each, of_rest, of_flush, shared, merged, "score" in read)

    # --- statements --------------------------------------------------------------------------

    def statement(self, node: ast.stmt) -> None:
        if isinstance(node, ast.AnnAssign) and node.value is not None:
            self.assign(node.target, node.value)
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            old = ast.copy_location(ast.Name(node.target.id, ast.Load()), node)
            whole = ast.copy_location(ast.BinOp(old, node.op, node.value), node)
            self.assign(node.target, whole)
        elif isinstance(node, ast.Assign) and len(node.targets) == 1:
            self.assign(node.targets[0], node.value)
        else:
            raise _Refused(_what(node), node)

    def assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Name):
            self.known[target.id] = self.visit(value)
            return
        both = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
        if not both or len(target.elts) != len(value.elts):  # type: ignore[attr-defined]
            raise _Refused(f"an assignment to {ast.unparse(target)}", target)
        values = [self.visit(each) for each in value.elts]  # type: ignore[attr-defined]
        for each, term in zip(target.elts, values, strict=True):  # type: ignore[attr-defined]
            if not isinstance(each, ast.Name):
                raise _Refused(f"an assignment to {ast.unparse(each)}", each)
            self.known[each.id] = term

    def field(self, name: str) -> str:
        """The field of what is captured, or made of numbers that are."""
        return self.captured.setdefault(name, f"options.{self.option}_{len(self.captured)}")

    def put(self, text: str, **known: Any) -> str:
        """A new name for what ``text`` says, and what else is ``known`` of it."""
        if _OF_NUMBERS.fullmatch(text):
            name = self.field(text)
        else:
            self.count += 1
            name = f"t{self.count}"
            self.lines.append(f"{name} = {text}")
        known |= {"shared": self.is_shared(text), "of_score": self.depends(text)}
        self.names[name] = replace(self.names[name], **known)  # a field's is maybe known already
        return name

    def divisor(self, text: str) -> str:
        """What divides by an integer that all elements share; of a captured number or a constant it
        is made before the call, since compilers leave it to each element.
        """
        if text.startswith("int32("):
            return f"uint32({divisor(int(text[6:-1]))})"
        if text in self.captured.values():
            return f"uint32({self.field(inverse_of(text))})"
        return self.put(f"divisor({text})")

    def is_shared(self, text: str) -> bool:
        """Whether all elements of a tile have this value: a number's, or made of such."""
        return "[" not in text and all(self.names[name].shared for name in _READ.findall(text))

    def depends(self, text: str) -> bool:
        """Whether the score has a part in this value."""
        return any(self.names[name].of_score for name in _READ.findall(text))

    def rank(self, text: str) -> int:
        return 0 if self.is_shared(text) else self.names[text].rank

    @contextmanager
    def under(self, head: str) -> Iterator[None]:
        """What is written within stands under ``head``."""
        outer, self.lines = self.lines, []
        yield
        # In place: a line that waits for what is written within goes to the same list.
        outer += [head, *(f"    {line}" for line in self.lines or ["pass"])]
        self.lines = outer

    # --- kinds -------------------------------------------------------------------------------

    def real(self, term: Term) -> str:
        if term.kind == "float":
            return term.text
        return self.put(term.real or f"float32({self.integer(term)})")

    def integer(self, term: Term) -> str:
        return self.put(f"int32({term.text})") if term.kind == "bool" else term.text

    def truth(self, term: Term) -> str:
        if term.kind == "bool":
            return term.text
        return self.put(f"{term.text} != {'int32(0)' if term.kind == 'int' else 'float32(0.0)'}")

    def same(self, *terms: Term) -> str:
        """The kind that all of ``terms`` can have."""
        kinds = {term.kind for term in terms}
        if len(kinds) == 1:
            return kinds.pop()
        return "float" if "float" in kinds else "int"

    def of_kind(self, kind: str, term: Term) -> str:
        if kind == "float":
            return self.real(term)
        return self.integer(term) if kind == "int" else term.text

    # --- slopes ------------------------------------------------------------------------------

    def times(self, slope: str | None, factor: str, finite: bool = False) -> str | None:
        """The slope times a factor, which may be ``finite`` though elements do not share it."""
        if slope is None:
            return None
        finite = self.steady_slope(slope) and (finite or self.is_shared(factor))
        made = factor if slope == ONE else self.multiplied(slope, factor, slope)
        self.names[made].steady |= finite
        return made

    def plus(self, a: str | None, b: str | None, sign: str = "+") -> str | None:
        if a is None:
            return b if b is None or sign == "+" else self.put(f"-{b}")
        return a if b is None else self.put(f"{a} {sign} {b}")

    def steady_slope(self, slope: str | None) -> bool:
        return slope is None or self.is_shared(slope) or self.names[slope].steady

    def multiplied(self, a: str, b: str, opened: str = "") -> str:
        """A name for the product; of a shared factor and the product that ``opened`` names factors
        that elements share are made one.
        """
        for factor, rest in ((a, b), (b, a)):
            if self.is_shared(factor) and not self.is_shared(rest):
                rank, (beside, inner) = 2 if self.rank(rest) else 1, self.names[rest].product
                if beside and rest == opened:
                    if factor == self.names[beside].inverse_of:
                        return inner
                    factor, rest = self.put(f"{beside} * {factor}"), inner
                return self.put(f"{factor} * {rest}", product=(factor, rest), rank=rank)
        return self.put(f"{a} * {b}")

    # --- expressions -------------------------------------------------------------------------

    def visit(self, node: ast.expr) -> Term:
        method: Callable[[Any], Term] | None = getattr(self, type(node).__name__, None)
        if method is None:
            raise _Refused(_what(node), node)
        return method(node)

    def Constant(self, node: ast.Constant) -> Term:
        value = node.value
        if isinstance(value, bool):
            return Term("bool", repr(value))
        if isinstance(value, int) and LEAST <= value < -LEAST:
            return Term("int", f"int32({value})", of="")
        if isinstance(value, float):
            return self.constant(value)
        raise _Refused(f"the constant {value!r}", node)

    def constant(self, value: float) -> Term:
        known = {"inf": "math.inf", "nan": "math.nan"}.get(repr(value), repr(value))
        return Term("float", f"float32({known})")

    def Name(self, node: ast.Name) -> Term:
        if node.id in self.known:
            return self.known[node.id]
        kind = self.kind(node)
        if kind in ("int32", "float32"):
            return Term(kind.removesuffix("32"), self.captured[node.id], of="")
        if kind == "bool":
            return Term("bool", self.put(f"{self.captured[node.id]} != int32(0)"))
        raise _Refused(f"{node.id} {'without an index' if '[' in kind else 'as a value'}", node)

    def kind(self, node: ast.Name) -> str:
        """What a name from outside stands for."""
        kind = self.kinds.get(node.id)
        if kind is None:
            raise _undefined(node.id, node)
        if kind.startswith("?"):
            raise _Refused(f"{node.id} ({kind[1:]})", node)
        return kind

    def Attribute(self, node: ast.Attribute) -> Term:
        owner = node.value
        of_math = isinstance(owner, ast.Name) and self.of_outside(owner) == "math"
        if of_math and node.attr in _CONSTANTS:
            return self.constant(getattr(math, node.attr))
        raise _Refused(ast.unparse(node), node)

    def of_outside(self, node: ast.Name) -> str:
        return "" if node.id in self.known else self.kinds.get(node.id, "")

    def Subscript(self, node: ast.Subscript) -> Term:
        indices: list[ast.expr] = []
        array: ast.expr = node
        while isinstance(array, ast.Subscript):
            own = array.slice
            indices = [*(own.elts if isinstance(own, ast.Tuple) else [own]), *indices]
            array = array.value
        shape = isinstance(array, ast.Attribute) and array.attr == "shape"
        owner = array.value if shape else array  # type: ignore[attr-defined]
        if not isinstance(owner, ast.Name) or owner.id in self.known:
            raise _Refused(f"an index of {ast.unparse(array)}", node)
        kind, _, axes = self.kind(owner).rstrip("]").partition("[")
        if not axes:
            raise _Refused(f"an index of {owner.id} (not an array)", node)
        if shape:
            (axis,) = indices if len(indices) == 1 else (None,)
            number = getattr(axis, "value", None)
            if not isinstance(number, int) or not 0 <= number < int(axes):
                raise _Refused(f"{ast.unparse(node)} (not an axis of {owner.id})", node)
            return self.length(owner.id, number)
        if len(indices) != int(axes):
            has = f"{axes} ax{'i' if axes == '1' else 'e'}s"
            raise _Refused(f"{ast.unparse(node)} (where {owner.id} has {has})", node)
        texts, near, apart = [], True, False
        for index in indices:
            term = self.visit(index)
            if term.kind != "int":
                raise _Refused(f"the index {ast.unparse(index)} (not an integer)", node)
            last = index.operand if isinstance(index, ast.UnaryOp) else None
            if isinstance(last, ast.Constant) and ast.unparse(index)[0] == "-":
                raise _Refused(f"the negative index {ast.unparse(index)}", node)
            near, apart = near and term.of == "", apart or term.apart
            texts.append(f"uint32({term.text})")
        self.inside = self.inside or not near
        element = self.put(f"{self.captured[owner.id]}[{', '.join(texts)}]")
        if kind == "bool":
            return Term("bool", self.put(f"{element} != 0"))
        slope = None
        if kind == "float32":
            if self.reads == self.by:
                slope, self.position = ONE, self.position_of(owner.id, texts, near, apart)
            self.reads += 1
        return Term(kind.removesuffix("32"), element, slope)

    def position_of(self, name: str, indices: list[str], near: bool, apart: bool) -> _Position:
        """The position of an element, under names that have a value where it is not read too."""
        names = []
        for text in indices:
            self.count += 1
            names.append(f"p{self.count}")
            self.lines.append(f"{names[-1]} = {text}")
        array = self.captured[name].replace(".", ".d")
        *outer, row, column = ["uint32(0)", *names][-max(2, len(names)) :]
        matrix = array + (f"[{', '.join(outer)}]" if outer else "")
        return _Position(matrix, row, column, near, apart)

    def length(self, name: str, axis: int) -> Term:
        return Term("int", self.put(f"int32({self.captured[name]}.shape[{axis}])"))

    def UnaryOp(self, node: ast.UnaryOp) -> Term:
        term = self.visit(node.operand)
        if isinstance(node.op, ast.Not):
            return Term("bool", self.put(f"not {self.truth(term)}"))
        if isinstance(node.op, ast.Invert):
            if term.kind != "int":
                raise _Refused(f"~ of {ast.unparse(node.operand)} (not an integer)", node)
            return Term("int", self.put(f"int32(~{term.text})"))
        kind = "float" if term.kind == "float" else "int"
        text = self.of_kind(kind, term)
        if isinstance(node.op, ast.UAdd):
            return Term(kind, text, term.slope)
        return Term(kind, self.put(f"{kind}32(-{text})"), self.plus(None, term.slope, "-"))

    def BinOp(self, node: ast.BinOp) -> Term:
        a, b = self.visit(node.left), self.visit(node.right)
        if isinstance(node.op, ast.Div):
            return self.divide(a, b)
        if isinstance(node.op, ast.Pow):
            return self.power(a, b, node)
        symbol = _SYMBOLS.get(type(node.op))
        if symbol is None:
            raise _Refused(f"the operator in {ast.unparse(node)}", node)
        if isinstance(node.op, (*_TRUTHS, ast.LShift, ast.RShift)):
            if "float" in (a.kind, b.kind):
                raise _Refused(f"{symbol} of a float in {ast.unparse(node)}", node)
            if isinstance(node.op, _TRUTHS) and a.kind == b.kind == "bool":
                return Term("bool", self.put(f"{a.text} {symbol} {b.text}"))
        if "float" not in (a.kind, b.kind):
            left, right = self.integer(a), self.integer(b)
            if symbol in _BY_A_PRODUCT and self.is_shared(right):
                inverse = self.divisor(right)
                value = self.put(f"{_BY_A_PRODUCT[symbol]}({left}, {right}, {inverse})")
            else:
                value = self.put(f"int32({left} {symbol} {right})")
            of = a.of if a.of == b.of or not b.of else b.of if not a.of else "?"
            real = ""
            self.inside = self.inside or (symbol in ("//", "%") and b.of != "")
            if symbol == "-" and {a.of, b.of} == {"i", "j"}:
                # Of a thread's rows and columns, counted from the origin, the ones are constants.
                near = (f"float32(int32({side} - origin))" for side in (left, right))
                real = " - ".join(near)
            apart = symbol in "+-" and (
                {a.of, b.of} == {"i", "j"}
                or any(x.apart and y.of == "" for x, y in ((a, b), (b, a)))
            )
            return Term("int", value, None, of, real, apart)
        left, right = self.real(a), self.real(b)
        if symbol in ("//", "%"):
            self.inside = True
            whole = self.put(f"float32(math.floor({left} / {right}))")
            if symbol == "//":
                return Term("float", whole)
            rest = self.put(f"{left} - {whole} * {right}")
            return Term("float", rest, self.plus(a.slope, self.times(b.slope, whole), "-"))
        if symbol == "*":
            return self.product(Term("float", left, a.slope), Term("float", right, b.slope))
        rank = 1 if self.rank(left) + self.rank(right) < 2 else 2
        value = self.put(f"{left} {symbol} {right}", rank=rank)
        slope = self.plus(a.slope, b.slope, symbol)
        if slope is not None and self.steady_slope(a.slope) and self.steady_slope(b.slope):
            self.names[slope].steady = True
        return Term("float", value, slope)

    def divide(self, a: Term, b: Term) -> Term:
        left, right = self.real(a), self.real(b)
        if self.is_shared(right) and self.depends(left):  # a number's inverse is made once
            inverse = Term("float", self.put(f"{ONE} / {right}", inverse_of=right))
            return self.product(Term("float", left, a.slope), inverse)
        self.inside = True
        value = self.put(f"{left} / {right}")
        slope = self.plus(a.slope, self.times(b.slope, value), "-")
        return Term("float", value, None if slope is None else self.put(f"{slope} / {right}"))

    def power(self, a: Term, b: Term, node: ast.expr) -> Term:
        exponent = getattr(node, "right", None)
        times = exponent.value if isinstance(exponent, ast.Constant) else None
        if isinstance(times, int) and 1 <= times <= _LARGEST_POWER:
            found = Term(a.kind, self.integer(a), a.slope) if a.kind != "float" else a
            for _ in range(times - 1):
                found = self.product(found, a)
            return found
        if a.kind != "float" and b.kind != "float":
            raise _Refused(f"{ast.unparse(node)} (integers with an exponent not 1 to 4)", node)
        self.inside = True
        left, right = self.real(a), self.real(b)
        value = self.put(f"float32(math.pow({left}, {right}))")
        slope = None
        if a.slope is not None:
            less = f"float32(math.pow({left}, {right} - float32(1.0)))"
            slope = self.times(a.slope, self.put(f"{right} * {less}"))
        if b.slope is not None:
            more = self.times(b.slope, self.put(f"{value} * float32(math.log({left}))"))
            slope = self.plus(slope, more)
        return Term("float", value, slope)

    def product(self, a: Term, b: Term) -> Term:
        if a.kind != "float":
            return Term("int", self.put(f"int32({a.text} * {self.integer(b)})"))
        slope = self.plus(self.times(a.slope, b.text), self.times(b.slope, a.text))
        return Term("float", self.multiplied(a.text, b.text), slope)

    def Compare(self, node: ast.Compare) -> Term:
        for op in node.ops:
            if type(op) not in _SYMBOLS:
                raise _Refused(f"the comparison in {ast.unparse(node)}", node)
        left, right = self.visit(node.left), self.visit(node.comparators[0])
        result = self.put(self.compared(left, node.ops[0], right))
        self.chain(result, right, list(zip(node.ops, node.comparators, strict=True))[1:])
        return Term("bool", result)

    def chain(self, result: str, left: Term, rest: list[tuple[ast.cmpop, ast.expr]]) -> None:
        """The other comparisons of a chain, each under the one before."""
        if not rest:
            return
        (op, other), *rest = rest
        outer, self.lines = self.lines, []
        right = self.visit(other)
        text = self.compared(left, op, right)
        self.further(result, True, text, outer, lambda: self.chain(result, right, rest))

    def further(
        self, result: str, conjunction: bool, text: str, outer: list[str], then: Callable[[], None]
    ) -> None:
        """``result`` and, or else or, what ``text`` says behind ``self.lines``, and ``then`` what
        may need these: under an `if` where they read an array, and else in ``outer`` as they are.
        """
        inner, self.lines = self.lines, outer
        self.names[result].shared = False
        if not any("[" in line for line in (*inner, text)):
            symbol = "&" if conjunction else "|"
            self.lines += [*inner, f"{result} = {result} {symbol} ({text})"]
            then()
            return
        with self.under(f"if {result}:" if conjunction else f"if not {result}:"):
            self.lines += [*inner, f"{result} = {text}"]
            then()

    def compared(self, a: Term, op: ast.cmpop, b: Term) -> str:
        kind = self.same(a, b)
        kind = "int" if kind == "bool" else kind
        if {a.text, b.text} == {"i", "j"}:  # of which the ones are constants, counted from there
            return f"int32({a.text} - origin) {_SYMBOLS[type(op)]} int32({b.text} - origin)"
        return f"{self.of_kind(kind, a)} {_SYMBOLS[type(op)]} {self.of_kind(kind, b)}"

    def BoolOp(self, node: ast.BoolOp) -> Term:
        conjunction = isinstance(node.op, ast.And)
        first, *rest = node.values
        result = self.put(self.condition(first, node))
        for value in rest:
            outer, self.lines = self.lines, []
            text = self.condition(value, node)
            self.further(result, conjunction, text, outer, lambda: None)
        return Term("bool", result)

    def condition(self, value: ast.expr, node: ast.expr) -> str:
        term = self.visit(value)
        if term.kind != "bool":
            raise _Refused(f"{ast.unparse(value)} (not a bool) in {ast.unparse(node)}", node)
        return term.text

    def IfExp(self, node: ast.IfExp) -> Term:
        test = self.truth(self.visit(node.test))
        outer, sides = self.lines, []
        for side in (node.body, node.orelse):
            self.lines = []
            term = self.visit(side)
            sides.append((self.lines, term))
        kind = self.same(*(term for _, term in sides))
        self.count += 1
        value, slope = f"t{self.count}", f"d{self.count}"
        own = {term.slope for _, term in sides}
        slopes = own not in ({None}, {ONE})
        self.lines = outer
        for head, (lines, term) in zip((f"if {test}:", "else:"), sides, strict=True):
            with self.under(head):
                self.lines += lines
                self.lines.append(f"{value} = {self.of_kind(kind, term)}")
                if slopes:
                    self.lines.append(f"{slope} = {term.slope or 'float32(0.0)'}")
        return Term(kind, value, slope if slopes else own.pop())

    # --- calls -------------------------------------------------------------------------------

    def Call(self, node: ast.Call) -> Term:
        name, of_math = self.called(node.func)
        if node.keywords or any(isinstance(arg, ast.Starred) for arg in node.args):
            raise _Refused(f"{ast.unparse(node)} (keyword arguments or *)", node)
        one = len(node.args) == 1
        if of_math and name == "pow" and len(node.args) == 2:
            left, right = map(self.visit, node.args)
            return self.power(Term("float", self.real(left), left.slope), right, node)
        if of_math and one and name in (*_SLOPES, *_STEPS):
            return self.of_math(name, self.visit(node.args[0]))
        if name == "len" and one and isinstance(node.args[0], ast.Name):
            array = node.args[0]
            if "[" in self.of_outside(array):
                return self.length(array.id, 0)
        if not of_math and name in ("min", "max") and len(node.args) > 1:
            return self.extreme(name, [self.visit(arg) for arg in node.args])
        if not of_math and one and name in ("abs", "int", "float", "bool"):
            return self.converted(name, self.visit(node.args[0]))
        raise _Refused(f"the call {ast.unparse(node)}", node)

    def called(self, function: ast.expr) -> tuple[str, bool]:
        """The name of what is called, and whether it is one of math's."""
        if isinstance(function, ast.Name):
            kind = self.of_outside(function)
            if kind.startswith("call "):
                name = kind.removeprefix("call ")
                return name, name not in _CALLS
        owner = function.value if isinstance(function, ast.Attribute) else None
        if isinstance(owner, ast.Name) and self.of_outside(owner) == "math":
            return function.attr, True  # type: ignore[attr-defined]
        named = owner or function
        if isinstance(named, ast.Name) and not {named.id} & {*self.known, *self.kinds}:
            raise _Refused(
                f"{named.id} (a name that is not defined; import or define it)", function
            )
        raise _Refused(f"a call of {ast.unparse(function)}", function)

    def of_math(self, name: str, term: Term) -> Term:
        x = self.real(term)
        if name in _STEPS:
            return Term("int", self.put(f"int32(math.{name}({x}))"))
        self.inside = self.inside or name.startswith(("log", "sqrt"))
        bounded = name in _BOUNDED and self.rank(x) < 2
        y = self.put(f"float32(math.{name}({x}))", rank=0 if bounded else 2)
        if term.slope is None:
            return Term("float", y)
        own = self.put(_SLOPES[name].format(x=x, y=y))
        return Term("float", y, self.times(term.slope, own, finite=bounded))

    def extreme(self, name: str, terms: list[Term]) -> Term:
        kind = self.same(*terms)
        kind = "int" if kind == "bool" else kind
        first, *rest = (Term(kind, self.of_kind(kind, x), x.slope) for x in terms)
        for other in rest:
            slope = None
            if first.slope is not None or other.slope is not None:
                ours, theirs = (x.slope or "float32(0.0)" for x in (first, other))
                beyond = "<" if name == "min" else ">"
                slope = self.put(f"{theirs} if {other.text} {beyond} {first.text} else {ours}")
            value = self.put(f"{kind}32({name}({first.text}, {other.text}))")
            first = Term(kind, value, slope)
        return first

    def converted(self, name: str, term: Term) -> Term:
        if name == "bool":
            return Term("bool", self.truth(term))
        if name == "float":
            return Term("float", self.real(term), term.slope)
        if name == "int":
            return Term("int", self.put(f"int32({term.text})"))
        kind = "float" if term.kind == "float" else "int"
        text = self.of_kind(kind, term)
        value, slope = self.put(f"{kind}32(abs({text}))"), None
        if term.real:
            return Term(kind, value, None, "?", f"float32(abs({term.real}))")
        if term.slope is not None:
            slope = self.put(f"-{term.slope} if {text} < float32(0.0) else {term.slope}")
        return Term(kind, value, slope)


def _alone(name: str, lines: list[str]) -> tuple[str, str]:
    """The one assignment that reads this name, and what it assigns; nothing where more do."""
    needed = (
        line.strip().partition(" = ") for line in _needed("def mod():", lines)[0].splitlines()
    )
    found = [(own, value) for own, _, value in needed if name in _READ.findall(value or own)]
    own, value = found[0] if len(found) == 1 else ("", "")
    return (own, value) if f"{own} = {value}" in lines else ("", "")


def _with(new: str, name: str, value: str, lines: list[str]) -> list[str]:
    """``lines`` with another value for this name."""
    return [f"{name} = {new}" if line == f"{name} = {value}" else line for line in lines]


def _needed(head: str, lines: list[str], flat: bool = False) -> tuple[str, set[str]]:
    """A function's text without assignments that nothing needs, and the names that it reads."""
    whole = ast.parse("\n".join([head, *(f"    {line}" for line in (*lines, "pass"))]))
    (function,) = whole.body
    assert isinstance(function, ast.FunctionDef)
    read: set[str] = set()
    statements = _without_tests(function.body) if flat else function.body
    function.body = _read_later(list(statements), read) or [ast.Pass()]
    return f"{ast.unparse(whole)}\n", read


def _read_later(statements: list[ast.stmt], read: set[str]) -> list[ast.stmt]:
    """``statements`` but assignments that nothing behind reads; their reads go to ``read``."""
    kept: list[ast.stmt] = []
    for node in reversed(statements):
        found: list[ast.AST] = [node]
        if isinstance(node, ast.If):
            node.orelse = _read_later(node.orelse, read)
            node.body = _read_later(node.body, read)
            if not (node.body or node.orelse):
                continue
            node.body, found = node.body or [ast.Pass()], [node.test]
        elif (
            isinstance(node, ast.Pass)
            or isinstance(node, ast.Assign)
            and (own := _names(node))
            and not own & read
        ):
            continue
        read |= {name for each in found for name in _names(each, ast.Load)}
        kept.append(node)
    return kept[::-1]


def _without_tests(statements: list[ast.stmt]) -> Iterator[ast.stmt]:
    """These; of an `if` around positions what stands under it."""
    for node in statements:
        if isinstance(node, ast.If) and any(name.startswith("p") for name in _names(node)):
            yield from _without_tests([*node.body, *node.orelse])
        else:
            yield node


def _names(node: ast.AST, how: type[ast.expr_context] = ast.Store) -> set[str]:
    """Those that are assigned in ``node``, or with ``Load`` those that are read."""
    names = (x for x in ast.walk(node) if isinstance(x, ast.Name))
    return {x.id for x in names if isinstance(x.ctx, how)}


def _what(node: ast.AST) -> str:
    """A syntax that is not allowed, in words."""
    named = next((words for kind, words in _NAMED.items() if isinstance(node, kind)), "")
    return named or f"`{ast.unparse(node)}`"
