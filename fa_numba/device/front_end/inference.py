"""Types: what Numba's inference asks again and again is asked once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

from numba.cuda.core import ir, rewrites
from numba.types import StringLiteral

from fa_numba.device.function import DeviceFunction

# Types of calls, of all kernels of a process: (function, context, types of arguments) -> signature.
_call_types: dict[Any, Any] = {}
# Values that are the same by identity, which most names in a kernel stand for.
_BY_IDENTITY = (FunctionType, BuiltinFunctionType, ModuleType, DeviceFunction, type)


def call_types_kept(find: Callable) -> Callable:
    """Inference asks for the type of a call in each of its rounds, and lowering once more."""

    def get_call_type(self: Any, context: Any, args: Any, kws: Any) -> Any:
        key = self, context, tuple(args), tuple(dict(kws).items())
        known = _call_types.get(key)
        if known is None:
            known = _call_types[key] = find(self, context, args, kws)
        return known

    return get_call_type


def types_of_values_kept(find: Callable) -> Callable:
    """Of functions, modules and types, and of whole numbers and truth values."""
    known: dict[Any, Any] = {}

    def resolve_value_type(self: Any, value: Any) -> Any:
        kind = type(value)
        if kind is int or kind is bool:
            key = self, kind, value
        elif isinstance(value, _BY_IDENTITY):
            key = self, kind, id(value)
        else:
            return find(self, value)
        if key not in known:
            known[key] = find(self, value), value  # which keeps its identity
        return known[key][0]

    return resolve_value_type


def propagated_where_changed(propagate: Callable) -> Callable:
    """After the first round, constraints are looked at that name a variable of another type.

    Numba goes through all of them until nothing changes, which is twice where statements stand in
    the order of their values.
    """

    def propagate_changed(self: Any, inference: Any) -> list:
        constraints, failed, settled = self.constraints, [], vars(self).setdefault("settled", {})
        for constraint in constraints:
            if constraint not in settled:
                settled[constraint] = tuple(set(_names_in(constraint))), None
            names, types = settled[constraint]
            if types == _types_of(names, inference.typevars):
                continue
            self.constraints = [constraint]
            errors = propagate(self, inference)
            failed += errors
            types = None if errors else _types_of(names, inference.typevars)
            settled[constraint] = names, types
        self.constraints = constraints
        return failed

    return propagate_changed


def _types_of(names: tuple[str, ...], variables: Any) -> list:
    """None of a variable that inference has not met yet, and of what is the name of none."""
    return [variables[name].type if name in variables else None for name in names]


def _names_in(value: Any) -> Iterator[str]:
    """Names of the variables of a constraint, and of those that it holds; other texts, too."""
    if isinstance(value, ir.Var):
        yield value.name
    elif isinstance(value, str):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _names_in(item)
    elif isinstance(value, dict):
        yield from _names_in(list(value.values()))
    elif hasattr(value, "loc") and not isinstance(value, ir.Inst):
        yield from _names_in(vars(value))


def not_caught(_: Callable) -> Callable:
    """Numba sets up the filters of warnings for each statement whose type it finds."""
    return lambda self, filename=None, lineno=None: contextlib.nullcontext()


def literals_looked_for(run: Callable) -> Callable:
    """After inference Numba rewrites arrays made of lists and subscripts that are text."""
    known = {
        *("RewriteStringLiteralGetitems", "RewriteStringLiteralSetitems"),
        "RewriteArrayOfConsts",
    }

    def run_pass(self: Any, state: Any) -> bool:
        found = rewrites.rewrite_registry.rewrites["after-inference"]
        if {rewrite.__name__ for rewrite in found} != known:
            return run(self, state)
        for block in state.func_ir.blocks.values():
            for statement in block.body:
                asked = vars(getattr(statement, "value", statement))
                index = asked.get("index") or asked.get("_kws", {}).get("index")
                if asked.get("op") == "build_list" or isinstance(
                    state.typemap.get(getattr(index, "name", None)), StringLiteral
                ):
                    return run(self, state)
        return True

    return run_pass
