"""Faster type inference: replacements of Numba's functions that find types."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

from numba.cuda import target
from numba.cuda.core import errors, ir, rewrites, typed_passes, typeinfer
from numba.types import BaseFunction, StringLiteral

from fa_numba.device.function import DeviceFunction

# Types of values that are equal only if they are the same object. Most names in a kernel stand for
# such a value.
_BY_IDENTITY = (FunctionType, BuiltinFunctionType, ModuleType, DeviceFunction, type)


def call_types_kept(find: Callable) -> Callable:
    """Return a replacement of Numba's function ``find``, which finds the type of a call.

    The replacement caches the types. Numba asks for the type of each call several times during type
    inference, and once more while it generates code.
    """
    known: dict[Any, Any] = {}

    def get_call_type(self: Any, context: Any, args: Any, kws: Any) -> Any:
        key = self, context, tuple(args), tuple(dict(kws).items())
        if known.get(key) is None:
            known[key] = find(self, context, args, kws)
        return known[key]

    return get_call_type


def types_of_values_kept(find: Callable) -> Callable:
    """Return a replacement of Numba's function ``find``, which finds the type of a value.

    The replacement caches the types of functions, modules, classes, integers and bools.
    """
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
            known[key] = find(self, value), value  # the value is kept, so that its id stays unique
        return known[key][0]

    return resolve_value_type


def propagated_where_changed(propagate: Callable) -> Callable:
    """Return a replacement of Numba's function ``propagate``, which resolves all constraints.

    A constraint is a rule of Numba's type inference for one statement. Numba resolves all
    constraints again and again until no type changes. Even if each statement uses only results of
    statements before it, Numba resolves each constraint twice. The replacement resolves a
    constraint again only if a type in the constraint has changed.
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
    """Return the types of the named variables.

    ``variables`` maps names to Numba's type variables. The type of a missing name is None.
    """
    return [variables[name].type if name in variables else None for name in names]


def _names_in(value: Any) -> Iterator[str]:
    """Yield the names of the variables in a constraint and in the parts of the constraint.

    Every other string in the constraint is yielded too.
    """
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
    """Return a replacement of Numba's ``catch_warnings``: a function that returns an empty context.

    Numba enters this context for each statement whose type it infers. Its own context catches
    warnings, and is slow to set up.
    """
    return lambda self, filename=None, lineno=None: contextlib.nullcontext()


def literals_looked_for(run: Callable) -> Callable:
    """Return a replacement of ``run``, a pass of Numba that rewrites lists and subscripts.

    Numba's pass applies three rewrites. They change only functions that contain a list, or a
    subscript that is a string. The replacement calls Numba's pass only for such functions. It calls
    Numba's pass for all functions if further rewrites are registered.
    """
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
                value: Any = getattr(statement, "value", None)
                of_expression = isinstance(value, ir.Expr)
                index = (value._kws if of_expression else vars(statement)).get("index")
                if (of_expression and value.op == "build_list") or isinstance(
                    state.typemap.get(getattr(index, "name", None)), StringLiteral
                ):
                    return run(self, state)
        return True

    return run_pass


REPLACED = (
    (BaseFunction, "get_call_type", call_types_kept),
    (target.CUDATypingContext, "resolve_value_type", types_of_values_kept),
    (typeinfer.ConstraintNetwork, "propagate", propagated_where_changed),
    (errors.WarningsFixer, "catch_warnings", not_caught),
    (typed_passes.NopythonRewrites, "run_pass", literals_looked_for),
)
