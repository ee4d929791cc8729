"""Functions of the caller's that run in kernels: ``score_mod``, ``mask_mod``, ``score_mod_grad``.

A function is read, not run. A ``Mod`` is what kernels have of it: the text of a function for
kernels, with a type for every value, and the texts of its derivatives. The caller's names do not
occur in these texts. Two functions of equal code, which capture values of equal types, therefore
share a kernel. The captured values are passed to the kernel. The modules between a function and its
texts are:

    source      the function's syntax tree, and the values that it captures
    allowed     what a function may contain, and the error for anything else
    reading     the walk over the syntax tree, which writes a statement for each operation
    slopes      the rules of derivatives: of each operation, the value and its slope
    growth      the rules for values that grow like an exponential function and overflow
    chain       sums and products of slopes
    kinds       the type of each value
    sharing     the statements, and which values all scores of a tile share
    needed      which statements a result needs
    writing     the text of the value, of its slope by the score, or of both
    gradients   the text that adds to the gradients of captured arrays
    positions   where a function reads an element of a captured array
    captures    numbers that are computed from captured numbers, before a call
    evaluating  the same function evaluated in float64, for the reference
"""

from __future__ import annotations

import functools
import hashlib
import linecache
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import CellType, FunctionType
from typing import Any, NamedTuple

from numba import float32, int32, uint32

from .allowed import PARAMETERS as PARAMETERS
from .captures import divisor as divisor
from .captures import inverse_of, made_of
from .chain import ONE
from .evaluating import evaluating
from .gradients import Gradient, gradient_of
from .source import LEAST, Source, kind_of_capture, source_of
from .source import is_array as is_array
from .writing import Text as Text
from .writing import written


@dataclass(frozen=True)
class Mod:
    """A function of the caller's as a kernel has it.

    ``option`` is what it was given as. ``value`` is the text of its function, ``slope`` that of its
    derivative with respect to the score, empty where it has none, and ``both`` gives the two. They
    take the option's parameters, but for the score a pair: a product of it, whose factor the
    ``lead`` of the text gives of a scale and ``options``, and the unit in which the value is
    returned. And ``origin``, a row or column near to i and j, which changes nothing; and
    ``options``, a kernel's last argument, with a field
    ``<option>_<n>`` for each of ``captures`` in their order: "int32", "float32" or "bool" for a
    number, with axes, "float32[2]", for an array. ``inside``: it may be called inside of the matrix
    alone, as one that reads an array at a row or column. ``steady``: the derivative is finite by
    any finite score. ``gradient`` is about the float32 arrays that a ``score_mod``'s result depends
    on, None where there are none. ``shown`` is its name and where it stands.
    """

    option: str
    value: Text
    slope: Text
    both: Text
    captures: tuple[str, ...]
    inside: bool
    steady: bool
    gradient: Gradient | None
    shown: str = field(compare=False)

    def __repr__(self) -> str:
        return self.shown

    @property
    def fields(self) -> tuple[str, ...]:
        """What ``captures`` are called in a kernel."""
        return tuple(f"{self.option}_{n}" for n in range(len(self.captures)))

    @property
    def differentiated(self) -> dict[str, str]:
        """Of the fields that are float32 arrays, by what their gradients are called in a kernel."""
        both = zip(self.fields, self.captures, strict=True)
        return {f"d{name}": name for name, kind in both if kind.startswith("float32[")}

    @property
    def adds(self) -> bool:
        """Whether it adds to the score what the score has no part in, so that its slope is 1."""
        return self.slope.text.endswith(f"return {ONE}\n")


def slope_of(score_mod: Mod | None, score_mod_grad: Mod | None) -> Mod | None:
    """The function whose slope scores have, or that as which it is given; None where it is 1."""
    mod = score_mod_grad or score_mod
    return None if mod is None or mod.adds else mod


class Captured(NamedTuple):
    """A ``Mod``, and what its function captures now by name: numbers, what is made of these, and
    arrays.
    """

    mod: Mod
    values: tuple[tuple[str, Any], ...]


def captured(option: str, function: Any) -> Captured:
    """What kernels have of a caller's function, given as ``option``.

    Raises TypeError for what is no function of the option's parameters, or captures what is neither
    number nor array of float32, int32 or bool; ValueError for one whose source is not at hand, that
    says what a kernel cannot or divides an integer by a captured -2^31, whose size is no int32. The
    message names it, where it stands and what is allowed.
    """
    source = source_of(option, function, len(PARAMETERS[option]))
    values = source.outside(function)
    kinds = tuple((name, kind_of_capture(value)) for name, value in values.items())
    mod, names, divisors = _written(option, source, kinds)
    for name in divisors:
        if values[name] == LEAST:
            raise ValueError(
                f"{option} divides by the captured variable {name!r}, whose value must be from "
                f"{LEAST + 1} to {-LEAST - 1}, got {values[name]} in {mod}"
            )
    taken: dict[str, Any] = {}
    for name in names:
        taken[name] = values[name] if name in values else made_of(name, option, [*taken.values()])
    return Captured(mod, tuple(taken.items()))


def parameters_read(option: str, function: Any) -> tuple[str, ...]:
    """Return the parameters that a caller's function uses, by their names in ``PARAMETERS``.

    Raises as ``captured`` does for a function whose source cannot be read.
    """
    names = PARAMETERS[option]
    source = source_of(option, function, len(names))
    return tuple(name for n, name in enumerate(names) if source.reads(n))


def as_mod(option: str, value: Any) -> Mod | None:
    """``value`` if it is a ``Mod``, that of a function, and None for None."""
    if value is None or isinstance(value, Mod):
        return value
    return captured(option, value).mod


def holding(function: FunctionType, values: Mapping[str, Any]) -> FunctionType:
    """The function with these values of what it captures by name, whatever becomes of them."""
    free = function.__code__.co_freevars
    cells = zip(free, function.__closure__ or (), strict=True)
    closure = tuple(CellType(values[name]) if name in values else cell for name, cell in cells)
    return FunctionType(function.__code__, {**function.__globals__, **values}, closure=closure)


def evaluated(option: str, function: Any, values: Mapping[str, Any]) -> FunctionType:
    """``holding`` for Python, where it computes in float64 what a kernel does in float32."""
    source = source_of(option, function, len(PARAMETERS[option]))
    return evaluating(source, {**source.outside(function), **values})


@functools.lru_cache(maxsize=256)
def _written(
    option: str, source: Source, kinds: tuple[tuple[str, str], ...]
) -> tuple[Mod, tuple[str, ...], tuple[str, ...]]:
    """The function as kernels have it, the names of what it captures, and of those by which it
    divides integers.
    """
    known, fields = dict(kinds), dict[str, str]()
    value, inside, _ = written(option, source, known, fields)
    slope, both, steady, gradient = Text(), Text(), False, None
    if option == "score_mod":
        slope, *_ = written(option, source, known, fields, value=False, slope=True)
        both, _, steady = written(option, source, known, fields, slope=True)
        gradient = gradient_of(option, source, known, fields)
    made = {name: "int32" if name.startswith("int32(") else "float32" for name in fields}
    captures = tuple(known.get(name, kind) for name, kind in made.items())
    mod = Mod(option, value, slope, both, captures, inside, steady, gradient, source.shown)
    divisors = tuple(name for name, own in fields.items() if inverse_of(own) in fields)
    return mod, tuple(fields), divisors


@functools.cache
def function_of(text: str, **beside: Any) -> Callable[..., Any]:
    """The function of a ``Mod``'s text, for the emulator too; ``beside`` is what it calls."""
    name = f"<fa_numba.mods {hashlib.sha256(text.encode()).hexdigest()[:16]}>"
    linecache.cache[name] = len(text), None, text.splitlines(keepends=True), name
    known: dict[str, Any] = {"__name__": __name__, "math": math}
    known |= {"int32": int32, "uint32": uint32, "float32": float32, **beside}
    exec(compile(text, name, "exec"), known)
    return known["mod"]
