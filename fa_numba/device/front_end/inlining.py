"""Faster inlining of device functions.

Each device function is translated from bytecode only once. At each call, its statements are copied
and renamed in one step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from numba.cuda.core import inline_closurecall, ir, ir_utils, untyped_passes

# Nodes of Numba's intermediate representation that a pass may change, so that a copy has its own.
_NODES = (ir.Inst, ir.Arg, ir.Const, ir.Global, ir.FreeVar)
# Attributes of a node that a copy shares with the node: its position in the source, its scope.
_SHARED = ("loc", "scope")
# Maps characters in names that Numba makes to characters that are allowed in a variable's name.
_LEGAL = str.maketrans("$.", "__")
# Expressions that Numba's pass for closures and comprehensions changes begin with one of these.
_CLOSURES = ("make_function", "build_list")


def translated_once(translate: Callable) -> Callable:
    """Return a replacement of Numba's function ``translate``, which translates a device function.

    A device function is translated from bytecode to Numba's intermediate representation and
    checked, and its blocks are joined. The replacement does this once for each device function, and
    stores the result. Numba does it at every call. ``inlined_in_one_walk`` copies the stored result
    for each call.
    """
    known: dict[Any, Any] = {}

    def run_untyped_passes(self: Any, function: Any, enable_ssa: bool = False) -> Any:
        if enable_ssa:
            return translate(self, function, enable_ssa)
        if function not in known:
            code = translate(self, function)
            if self.validator is not None:
                self.validator(code)
            code.blocks = _numbered(ir_utils.simplify_CFG(code.blocks))
            known[function] = code
        again = copy.copy(known[function])
        again.func_id = again.func_id.derive()  # a new number, which is a part of variable names
        return again

    return run_untyped_passes


def inlined_in_one_walk(inline: Callable) -> Callable:
    """Return a replacement of ``inline``, Numba's function that inlines a call.

    The replacement copies and renames the statements of the device function in one loop. Numba
    copies the statements twice, and loops over them five times.

    The replacement also gives variables shorter names, which end in a number. Numba's names contain
    the names of all inlined functions. The assembler cuts such long names, and two of them may then
    be equal.
    """

    def inline_ir(
        self: Any, caller_ir: Any, block: ir.Block, i: int, callee_ir: Any, callee_freevars: Any,
        arg_typs: Any = None,
    ) -> tuple:  # fmt: skip
        if self._permit_update_type_and_call_maps:
            return inline(self, caller_ir, block, i, callee_ir, callee_freevars, arg_typs)
        scope, call = block.scope, block.body[i]
        labels = ir_utils._the_max_label
        first = max(labels.next(), *caller_ir.blocks) + 1
        labels.update(max(callee_ir.blocks) + first)

        (callee_scope,) = {each.scope for each in callee_ir.blocks.values()}
        variables = {
            variable.name: scope.redefine(
                f"{variable.name.translate(_LEGAL)}_{first}", loc=variable.loc
            )
            for variable in callee_scope.localvars._con.values()
            if variable.name not in callee_freevars
        }
        given = inline_closurecall._get_callee_args(
            call.value, callee_ir.func_id.func, call.loc, caller_ir
        )

        after = ir.Block(scope, block.loc)
        after.body = block.body[i + 1 :]
        blocks = {
            label + first: _copy_of_block(callee_ir.blocks[label], scope, variables, given, first)
            for label in ir_utils.find_topo_order(callee_ir.blocks)
        }
        label_after = ir_utils.next_label()
        caller_ir.blocks[label_after] = after
        block.body = [*block.body[:i], ir.Jump(min(blocks), call.loc)]
        inline_closurecall._replace_returns(blocks, call.target, label_after)

        defined = caller_ir._definitions.get(call.target.name, [])
        if call.value in defined:
            defined.remove(call.value)
        for new_block in blocks.values():
            inline_closurecall._add_definitions(caller_ir, new_block)
        caller_ir.blocks.update(blocks)
        return callee_ir, blocks, variables, [(label_after, after), *blocks.items()]

    return inline_ir


def _copy_of_block(
    block: ir.Block, scope: ir.Scope, variables: dict[str, ir.Var], given: list, first: int
) -> ir.Block:
    """Return a copy of a device function's block for the caller.

    ``variables`` maps the names of the device function's variables to variables of the caller.
    ``given`` contains the arguments of the call. ``first`` is added to the labels of jumps.
    """
    new = ir.Block(scope, block.loc)
    new.body = [_copied(statement, variables) for statement in block.body]
    for statement in new.body:
        if isinstance(statement, ir.Assign) and isinstance(statement.value, ir.Arg):
            statement.value = given[statement.value.index]
    _relabel(new, lambda label: label + first)
    return new


def _numbered(blocks: dict[int, ir.Block]) -> dict[int, ir.Block]:
    """Return blocks with the labels 0, 1, ... in the order of their old labels.

    Numba gives the blocks of a device function labels that are larger than all earlier labels.
    Without new labels, the labels would double with each level of device functions that call each
    other.
    """
    numbers = {label: n for n, label in enumerate(sorted(blocks))}
    for block in blocks.values():
        _relabel(block, numbers.__getitem__)
    return {numbers[label]: block for label, block in blocks.items()}


def _relabel(block: ir.Block, label_of: Callable[[int], int]) -> None:
    """Replace the labels to which the block's last statement jumps by ``label_of(label)``."""
    last = block.body[-1]
    if isinstance(last, ir.Jump):
        last.target = label_of(last.target)
    elif isinstance(last, ir.Branch):
        last.truebr, last.falsebr = label_of(last.truebr), label_of(last.falsebr)


def _copied(value: Any, variables: dict[str, ir.Var]) -> Any:
    """Return a copy of a statement or expression with its variables replaced.

    ``variables`` maps the name of a variable to the new variable. The copy contains the same
    objects for constant values.
    """
    kind = type(value)
    if kind is ir.Var:
        return variables.get(value.name, value)
    if kind in (list, tuple):
        return kind([_copied(item, variables) for item in value])
    if not isinstance(value, _NODES):
        return value
    new = object.__new__(kind)
    parts = vars(new)
    for name, part in vars(value).items():
        if name == "_kws":
            parts[name] = {key: _copied(item, variables) for key, item in part.items()}
        else:
            parts[name] = part if name in _SHARED else _copied(part, variables)
    return new


def closures_looked_for(run: Callable) -> Callable:
    """Return a replacement of ``run``, Numba's pass that inlines closures.

    The replacement calls Numba's pass only for functions with closures, lists or calls of
    ``reduce``. Numba's pass computes the lifetimes of all variables before it looks for closures.
    """

    def run_pass(self: Any, state: Any) -> bool:
        code = state.func_ir
        for block in code.blocks.values():
            for statement in block.find_insts(ir.Assign):
                value = vars(statement.value)
                if value.get("op") in _CLOSURES:
                    return run(self, state)
                if getattr(value.get("value"), "__name__", "") == "reduce":
                    return run(self, state)
        return True

    return run_pass


REPLACED = (
    (inline_closurecall.InlineWorker, "run_untyped_passes", translated_once),
    (inline_closurecall.InlineWorker, "inline_ir", inlined_in_one_walk),
    (untyped_passes.InlineClosureLikes, "run_pass", closures_looked_for),
)
