"""The caller's functions that kernels call: ``score_mod``, ``mask_mod`` and ``score_mod_grad``.

This package reads the source of such a function and translates it to a ``Mod``. A ``Mod`` contains
Python source text ("text" in this package) of functions that numba compiles for kernels: the
caller's function with a type for every value, and its derivatives. The texts do not contain the
names that the caller chose. Two functions with equal code that capture values of equal types
therefore share a kernel. The captured values are passed to the kernel. The modules of this package
are:

    source      the function's syntax tree, and the values that it captures
    allowed     what a function may contain, and the error for anything else
    reading     the walk over the syntax tree, which writes a statement for each operation
    slopes      the value and the slope (derivative) of each operation
    growth      the rules for values that grow like an exponential function and overflow
    chain       sums and products of slopes
    kinds       the type of each value
    sharing     the list of statements, and which values are equal for all scores of a tile
    needed      removes statements that a result does not need
    writing     the text of the value, of its slope with respect to the score, or of both
    gradients   the texts that add to the gradients of captured arrays
    positions   where a function reads an element of a captured array
    blocks      block masks: the blocks of S that a ``mask_mod`` hides
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
    """A caller's function, translated to texts that kernels are compiled with.

    field      meaning
    option     "score_mod", "mask_mod" or "score_mod_grad"
    value      text that returns the value of the caller's function
    slope      text that returns the derivative with respect to the score; only for a ``score_mod``
    both       text that returns the pair (value, slope); only for a ``score_mod``
    captures   types of the captured values, such as "int32" or "float32[2]"
    inside     whether kernels may call the functions only for a row i and a column j of S, for
               example because the caller's function reads an array at i
    steady     whether the derivative is finite for every finite score
    gradient   texts for the gradients of captured float32 arrays; None if there are none
    shown      name, file and line of the function, for messages

    The functions of the texts take these arguments:

    - ``score_and_factor``: a pair (score, factor), only for ``score_mod`` and ``score_mod_grad``.
      The score is the argument of the caller's function. Usually it is ``scale`` times the product
      of a row of Q and a row of K. The class ``Text`` describes the exceptions. The factor
      multiplies the returned value, but not a returned slope. It is log2(e) if the kernel computes
      the exponential of the value as a power of 2. Otherwise it is 1.
    - ``b``, ``h``, ``i`` and ``j``: batch entry, query head, row and column, as int32.
    - ``origin``: a row or column near i and j. It does not change the result, but the compiler can
      compute differences such as ``i - origin`` when it compiles the kernel.
    - ``options``: the last argument of the kernel. It has a field ``<option>_<n>`` for the captured
      value number n.
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
        """Names of the captured values in the kernel's argument ``options``."""
        return tuple(f"{self.option}_{n}" for n in range(len(self.captures)))

    @property
    def differentiated(self) -> dict[str, str]:
        """Map the name of each gradient in a kernel to the name of the captured float32 array."""
        both = zip(self.fields, self.captures, strict=True)
        return {f"d{name}": name for name, kind in both if kind.startswith("float32[")}

    @property
    def adds(self) -> bool:
        """Whether the slope is 1: the function only adds a term that does not contain the score."""
        return self.slope.text.endswith(f"return {ONE}\n")


def slope_of(score_mod: Mod | None, score_mod_grad: Mod | None) -> Mod | None:
    """Return the ``Mod`` whose slope is the derivative of the scores, or None.

    This is ``score_mod_grad`` if it is given, and otherwise ``score_mod``. The result is None if
    there is no function, or if the slope of ``score_mod`` is 1 everywhere.
    """
    mod = score_mod_grad or score_mod
    return None if mod is None or mod.adds else mod


class Captured(NamedTuple):
    """A ``Mod``, and the pairs (name, value) of the values that its function captures.

    A value is a captured number, a captured array, or a number that is computed from captured
    numbers. The name of a computed number is the text that computes the number. The values are
    those at the time of the call of ``captured``.
    """

    mod: Mod
    values: tuple[tuple[str, Any], ...]


def captured(option: str, function: Any) -> Captured:
    """Translate a caller's function for kernels, and return its captured values with the ``Mod``.

    ``option`` is "score_mod", "mask_mod" or "score_mod_grad". Raises TypeError unless ``function``
    is a Python function with the parameters of the option. Raises ValueError in these cases:

    - The source of the function cannot be read.
    - The function contains syntax that kernels do not support.
    - The function captures a value that is neither a number, nor an array of float32, int32 or
      bool, nor a supported function of ``math`` or Python.
    - The function divides an integer by a captured -2^31, whose absolute value is not an int32.

    The message gives the name, file and line of the function, and what is allowed.
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
    """Return the names of the parameters that a caller's function uses.

    The names are those in ``PARAMETERS``, such as "b" and "i", also if the caller chose other
    names. Raises TypeError if ``function`` is not a Python function with the parameters of the
    option. Raises ValueError if the source of the function cannot be read.
    """
    names = PARAMETERS[option]
    source = source_of(option, function, len(names))
    return tuple(name for n, name in enumerate(names) if source.reads(n))


def as_mod(option: str, value: Any) -> Mod | None:
    """Return the ``Mod`` of a caller's function. A ``Mod`` and None are returned unchanged."""
    if value is None or isinstance(value, Mod):
        return value
    return captured(option, value).mod


def holding(function: FunctionType, values: Mapping[str, Any]) -> FunctionType:
    """Return a copy of a function with other values of its captured variables.

    ``values`` maps the names of variables to the values. Later assignments to these variables do
    not change the copy.
    """
    free = function.__code__.co_freevars
    cells = zip(free, function.__closure__ or (), strict=True)
    closure = tuple(CellType(values[name]) if name in values else cell for name, cell in cells)
    return FunctionType(function.__code__, {**function.__globals__, **values}, closure=closure)


def evaluated(option: str, function: Any, values: Mapping[str, Any]) -> FunctionType:
    """Return a copy of a caller's function that Python evaluates in float64.

    ``values`` maps the names of captured variables to the values that the copy uses. Kernels
    compute in float32. Where a float operation of Python would raise an error, the copy returns inf
    or NaN like a GPU (module ``evaluating``).
    """
    source = source_of(option, function, len(PARAMETERS[option]))
    return evaluating(source, {**source.outside(function), **values})


@functools.lru_cache(maxsize=256)
def _written(
    option: str, source: Source, kinds: tuple[tuple[str, str], ...]
) -> tuple[Mod, tuple[str, ...], tuple[str, ...]]:
    """Translate a caller's function to a ``Mod``.

    ``kinds`` are pairs (name, kind) of the values that the function captures, such as ("bias",
    "float32[2]"). Return three results:

    1. The ``Mod``.
    2. The names of its captured values, in the order of ``Mod.captures``. A number that is computed
       from captured numbers has the text of the computation in place of a name.
    3. The names of the captured integers by which the function divides integers.
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
def function_of(text: str, **called: Any) -> Callable[..., Any]:
    """Compile the text of a ``Mod`` and return its Python function.

    The emulator runs this function, and numba compiles it for a GPU. ``called`` are the functions
    that the text calls, by name, in addition to ``math`` and the types.
    """
    name = f"<fa_numba.mods {hashlib.sha256(text.encode()).hexdigest()[:16]}>"
    linecache.cache[name] = len(text), None, text.splitlines(keepends=True), name
    known: dict[str, Any] = {"__name__": __name__, "math": math}
    known |= {"int32": int32, "uint32": uint32, "float32": float32, **called}
    exec(compile(text, name, "exec"), known)
    return known["mod"]
