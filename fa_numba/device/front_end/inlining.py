"""Device functions put in the place of their calls: Numba's inliner, a step for a function.

``front_end`` puts these ways in the place of Numba's. A device function is translated, checked and
its blocks joined once; at a call its statements are copied, renamed and numbered in one walk, where
Numba copies them twice and walks them five times.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from numba.cuda.core import inline_closurecall, ir, ir_utils

# Nodes of Numba's intermediate representation that a pass may change, so that a copy has its own.
_NODES = (ir.Inst, ir.Arg, ir.Const, ir.Global, ir.FreeVar)
# Of a node: where it stands, which is no node.
_PLACES = ("loc", "scope")
# Characters of names that Numba makes, and what stands for them in a variable of the caller.
_LEGAL = str.maketrans("$.", "__")
# What the pass for closures and comprehensions looks for, all of which begins with one of these.
_CLOSURES = ("make_function", "build_list")


def translated_once(translate: Callable) -> Callable:
    """The inliner copies what it is given, so that all calls are given the same."""
    kept: dict[Any, Any] = {}

    def run_untyped_passes(self: Any, function: Any, enable_ssa: bool = False) -> Any:
        if enable_ssa:
            return translate(self, function, enable_ssa)
        if function not in kept:
            code = translate(self, function)
            if self.validator is not None:
                self.validator(code)
            code.blocks = _numbered(ir_utils.simplify_CFG(code.blocks))
            kept[function] = code
        again = copy.copy(kept[function])
        again.func_id = again.func_id.derive()  # a number of its own, which names its variables
        return again

    return run_untyped_passes


def inlined_in_one_walk(inline: Callable) -> Callable:
    """For what ``translated_once`` gives, which is not changed."""

    def inline_ir(
        self: Any,
        caller_ir: Any,
        block: ir.Block,
        i: int,
        callee_ir: Any,
        callee_freevars: Any,
        arg_typs: Any = None,
    ) -> tuple:
        if arg_typs is not None or self._permit_update_type_and_call_maps:
            return inline(self, caller_ir, block, i, callee_ir, callee_freevars, arg_typs)
        scope, call = block.scope, block.body[i]
        labels = ir_utils._the_max_label
        first = max(labels.next(), *caller_ir.blocks) + 1
        labels.update(max(callee_ir.blocks) + first)

        variables = {}
        for variable in _scope_of(callee_ir.blocks).localvars._con.values():
            if variable.name not in callee_freevars:
                # Numba's names have all functions in them through which a variable came.
                new = f"{variable.name.translate(_LEGAL)}_{first}"
                variables[variable.name] = scope.redefine(new, loc=variable.loc)
        given = inline_closurecall._get_callee_args(
            call.value, callee_ir.func_id.func, call.loc, caller_ir
        )

        after = ir.Block(scope, block.loc)
        after.body = block.body[i + 1 :]
        order = ir_utils.find_topo_order(callee_ir.blocks)
        blocks = {
            label + first: _renamed(callee_ir.blocks[label], scope, variables, given, first)
            for label in order
        }
        label_after = ir_utils.next_label()
        caller_ir.blocks[label_after] = after
        block.body = [*block.body[:i], ir.Jump(min(blocks), call.loc)]
        inline_closurecall._replace_returns(blocks, call.target, label_after)

        defined = caller_ir._definitions
        if call.value in defined.get(call.target.name, ()):
            defined[call.target.name].remove(call.value)
        for label, new_block in blocks.items():
            inline_closurecall._add_definitions(caller_ir, new_block)
            caller_ir.blocks[label] = new_block
        return callee_ir, blocks, variables, [(label_after, after), *blocks.items()]

    return inline_ir


def _scope_of(blocks: dict[int, ir.Block]) -> ir.Scope:
    (scope,) = {block.scope for block in blocks.values()}
    return scope


def _renamed(
    block: ir.Block, scope: ir.Scope, variables: dict[str, ir.Var], given: list, first: int
) -> ir.Block:
    """A copy in the caller: with its variables, what the call gives for arguments, its labels."""
    new = ir.Block(scope, block.loc)
    new.body = [_node_copied(statement, variables) for statement in block.body]
    for statement in new.body:
        if isinstance(statement, ir.assign_types) and isinstance(statement.value, ir.arg_types):
            statement.value = given[statement.value.index]
    _led(new, lambda label: label + first)
    return new


def _numbered(blocks: dict[int, ir.Block]) -> dict[int, ir.Block]:
    """Labels from 0 on, in their order: those of a callee are above all that were given before, so
    that they would double with each call that is kept.
    """
    numbers = {label: n for n, label in enumerate(sorted(blocks))}
    for block in blocks.values():
        _led(block, numbers.__getitem__)
    return {numbers[label]: block for label, block in blocks.items()}


def _led(block: ir.Block, label_of: Callable[[int], int]) -> None:
    """Give the block's last statement other labels to go on at."""
    last = block.body[-1]
    if isinstance(last, ir.jump_types):
        last.target = label_of(last.target)
    elif isinstance(last, ir.branch_types):
        last.truebr, last.falsebr = label_of(last.truebr), label_of(last.falsebr)


def _node_copied(value: Any, variables: dict[str, ir.Var]) -> Any:
    """A statement or expression with its own parts, and the variables that stand in the place of
    its own; constant values are shared.
    """
    kind = type(value)
    if kind is ir.Var:
        return variables.get(value.name, value)
    if kind in (list, tuple):
        return kind([_node_copied(item, variables) for item in value])
    if not isinstance(value, _NODES):
        return value
    new = object.__new__(kind)
    parts = vars(new)
    for name, part in vars(value).items():
        if name == "_kws":
            parts[name] = {key: _node_copied(item, variables) for key, item in part.items()}
        elif name in _PLACES:
            parts[name] = part
        else:
            parts[name] = _node_copied(part, variables)
    return new


def closures_looked_for(run: Callable) -> Callable:
    """A function without closures and lists is left as it is, reductions by ``reduce`` apart."""

    def run_pass(self: Any, state: Any) -> bool:
        code = state.func_ir
        for block in code.blocks.values():
            for statement in block.find_insts(ir.assign_types):
                value = vars(statement.value)
                if value.get("op") in _CLOSURES:
                    return run(self, state)
                if getattr(value.get("value"), "__name__", "") == "reduce":
                    return run(self, state)
        ir_utils.fixup_var_define_in_scope(code.blocks)
        return True

    return run_pass
