"""Faster handling of variables: replacements of Numba's functions that list or rename variables."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

from numba.cuda.core import ir, ir_utils, postproc, ssa, transforms, untyped_passes

from fa_numba.device.front_end.replacing import replaced

# Values without an effect: their assignment may go if no statement reads the variable.
_WITHOUT_EFFECT = (ir.Var, ir.Const, ir.Global, ir.FreeVar)
_EXPRESSIONS_WITHOUT_EFFECT = ("getattr", "build_tuple")


def unread_left_out(rename: Callable) -> Callable:
    """Return a replacement of ``rename``, Numba's pass that renames variables (SSA).

    The replacement first removes assignments to variables that no statement reads. Such variables
    are the names of inlined functions, and the results of inlined functions that return nothing.
    """

    def run_pass(self: Any, state: Any) -> bool:
        _remove_unread(state.func_ir.blocks)
        return rename(self, state)

    return run_pass


def _remove_unread(blocks: dict[int, ir.Block]) -> None:
    """Remove assignments to variables that no statement reads.

    An assignment stays if computing its value has an effect, such as a call.
    """
    reads: Counter[str] = Counter()
    assigned = defaultdict(list)
    for block in blocks.values():
        for statement in block.body:
            if isinstance(statement, ir.Assign):
                assigned[statement.target.name].append(statement)
                reads.update(_names_read(statement.value))
            else:
                reads.update(variable.name for variable in statement.list_vars())
    unread = {name for name in assigned if not reads[name]}
    gone = set()
    while unread:
        for statement in assigned[unread.pop()]:
            value = statement.value
            if type(value) in _WITHOUT_EFFECT or (
                type(value) is ir.Expr and value.op in _EXPRESSIONS_WITHOUT_EFFECT
            ):
                gone.add(id(statement))
                for name in _names_read(value):
                    reads[name] -= 1
                    if not reads[name]:
                        unread.add(name)
    for block in blocks.values():
        block.body = [statement for statement in block.body if id(statement) not in gone]


def _names_read(value: Any) -> list[str]:
    """Return the names of the variables that the value of an assignment reads."""
    if isinstance(value, ir.Var):
        return [value.name]
    return [variable.name for variable in value.list_vars()] if isinstance(value, ir.Inst) else []


def lifetimes_when_asked_for(run: Callable) -> Callable:
    """Return a replacement of ``run``, which computes the lifetimes of variables after each pass.

    The replacement computes the lifetimes only when a pass reads them. Only one pass reads them:
    the pass that marks where each variable is used last.
    """

    def without_lifetimes(
        self: Any, emit_dels: bool = False, extend_lifetimes: bool = False
    ) -> None:
        code = self.func_ir
        if emit_dels or code.is_generator:
            run(self, emit_dels, extend_lifetimes)
            return
        code.blocks = transforms.canonicalize_cfg(code.blocks)
        code.variable_lifetime = postproc.VariableLifetime(code.blocks)  # computes when read
        code.generator_info = None

    return without_lifetimes


def renamed_where_named(run: Callable) -> Callable:
    """Return a replacement of ``run``, which renames variables that are assigned several times.

    Numba searches all statements for each of these variables. The replacement searches only the
    blocks that contain the name of the variable.
    """

    def run_ssa(blocks: dict) -> dict:
        naming = defaultdict(set)
        for label, block in blocks.items():
            for statement in block.body:
                for variable in statement.list_vars():
                    naming[variable.name].add(label)

        def rewriting(rewrite: Callable) -> Callable:
            def run_block_rewrite(blocks: dict, states: dict, handler: Any) -> dict:
                here = naming[states["varname"]]
                some = {label: block for label, block in blocks.items() if label in here}
                return blocks | rewrite(some, states, handler)

            return run_block_rewrite

        with replaced([(ssa, "_run_block_rewrite", rewriting)]):
            return run(blocks)

    return run_ssa


def variables_by_type(_: Callable) -> Callable:
    """Return a replacement of Numba's method that lists the variables in a part of a statement.

    Numba compares the type of each part with all kinds of nodes. The replacement does this once for
    each type, and remembers the result.
    """
    finders: dict[type, Callable[[Any], list]] = {}

    def finder_of(cls: type) -> Callable[[Any], list]:
        if issubclass(cls, ir.Var):
            return lambda value: [value]
        if issubclass(cls, ir.Inst):
            return lambda value: value.list_vars()
        if issubclass(cls, (list, tuple)):
            return lambda value: [found for part in value for found in variables(part)]
        if issubclass(cls, dict):
            return lambda value: [found for part in value.values() for found in variables(part)]
        return lambda value: []

    def variables(value: Any) -> list:
        finder = finders.get(type(value))
        if finder is None:
            finder = finders[type(value)] = finder_of(type(value))
        return finder(value)

    return lambda self, value: variables(value)


def of_an_assignment(_: None) -> Callable:
    """Return a method that lists the variables of an assignment.

    The method is faster than Numba's method, because it visits only the target and the value. Most
    statements are assignments.
    """

    def list_vars(self: ir.Assign) -> list:
        value = self.value
        if isinstance(value, ir.Var):
            return [value, self.target]
        found = value.list_vars() if isinstance(value, ir.Inst) else []
        return [*found, self.target]

    return list_vars


def of_a_statement(find: Callable) -> Callable:
    """Return a replacement of Numba's function ``find``, which lists the variables of a statement.

    For an assignment, the replacement calls the faster method of the assignment. For any other
    statement, it calls ``find``, which visits each part of the statement.
    """

    def compat_list_vars_stmt(statement: Any) -> list:
        return statement.list_vars() if type(statement) is ir.Assign else find(statement)

    return compat_list_vars_stmt


REPLACED = (
    (postproc.PostProcessor, "run", lifetimes_when_asked_for),
    (untyped_passes.ReconstructSSA, "run_pass", unread_left_out),
    (ssa, "_run_ssa", renamed_where_named),
    (ir.Inst, "_rec_list_vars", variables_by_type),
    (ir.Assign, "list_vars", of_an_assignment),
    (ir_utils, "compat_list_vars_stmt", of_a_statement),
)
