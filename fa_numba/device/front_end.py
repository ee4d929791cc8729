"""Replacements for six functions of Numba, with which kernels compile faster.

A kernel of this package calls some hundred device functions, all of them inlined. It then has some
thousand statements. A few functions of Numba take time proportional to the square of the number of
statements, or repeat work at each call. They took most of the time in which a large kernel was
compiled. ``without_repeats`` replaces six of these functions while a kernel is compiled. The
machine code does not change: ``tests/device/test_front_end.py`` compares PTX, and ``make ptx``
compares the PTX of every kernel.

Python's garbage collector is off while a kernel is compiled, because nearly all objects live until
the end.
"""

from __future__ import annotations

import contextlib
import copy
import gc
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from numba.cuda.core import analysis, inline_closurecall, ir, ir_utils, postproc, ssa, transforms
from numba.cuda.core.compiler_lock import global_compiler_lock
from numba.types import BaseFunction

# Nodes of Numba's intermediate representation that a pass may change, so that a copy has its own.
_NODES = (ir.Inst, ir.Arg, ir.Const, ir.Global, ir.FreeVar)
# Attributes of a node that a copy shares with the node: its position in the source, its scope.
_SHARED = ("loc", "scope")
# Maps characters in names that Numba makes to characters that are allowed in a variable's name.
_LEGAL = str.maketrans("$.", "__")


@contextlib.contextmanager
def without_repeats() -> Iterator[None]:
    """Replace the six functions of Numba inside the context.

    Other threads that compile wait until the context ends. Garbage collection is off in it.
    """
    with global_compiler_lock, contextlib.ExitStack() as stack:
        for owner, name, shorter in REPLACED:
            stack.enter_context(_replaced(owner, name, shorter))
        if gc.isenabled():
            gc.disable()
            stack.callback(gc.enable)
        yield


@contextlib.contextmanager
def _replaced(owner: Any, name: str, shorter: Callable[[Callable], Callable]) -> Iterator[None]:
    """Replace ``owner.name`` inside the context by ``shorter(owner.name)``."""
    before = getattr(owner, name)
    setattr(owner, name, shorter(before))
    try:
        yield
    finally:
        setattr(owner, name, before)


def _translated_once(translate: Callable) -> Callable:
    """Return a function that translates each device function only once.

    The first time, the device function is translated from bytecode to Numba's intermediate
    representation and checked, and its blocks are joined. Later, the stored result is returned, of
    which ``_inlined_in_one_walk`` makes a copy for each call in a kernel.
    """
    known: dict[Any, Any] = {}

    def run_untyped_passes(self: Any, function: Any, enable_ssa: bool = False) -> Any:
        if enable_ssa:
            return translate(self, function, enable_ssa)
        if function not in known:
            code = translate(self, function)
            if self.validator is not None:
                self.validator(code)
            # Labels must begin at 0 again here. Otherwise, each copy would get labels above the
            # largest label so far, and labels would double with each function.
            code.blocks = ir_utils.flatten_labels(ir_utils.simplify_CFG(code.blocks))
            known[function] = code
        again = copy.copy(known[function])
        again.func_id = again.func_id.derive()  # a new number, which is a part of variable names
        return again

    return run_untyped_passes


def _inlined_in_one_walk(inline: Callable) -> Callable:
    """Return a function that inlines a call by copying and renaming statements in one walk.

    Numba copies the statements twice and walks over them five times. Here, the new name of a
    variable ends in a number. Numba's names would contain the names of all inlined functions. The
    assembler cuts such long names, and two of them may become equal.
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
        copies = {}
        for label in ir_utils.find_topo_order(callee_ir.blocks):
            copies[label] = ir.Block(scope, callee_ir.blocks[label].loc)
            copies[label].body = _copied(callee_ir.blocks[label].body, variables)
        blocks = ir_utils.add_offset_to_labels(copies, first)
        given = inline_closurecall._get_callee_args(
            call.value, callee_ir.func_id.func, call.loc, caller_ir
        )
        inline_closurecall._replace_args_with(blocks, given)

        after = ir.Block(scope, block.loc)
        after.body = block.body[i + 1 :]
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


def _copied(value: Any, variables: dict[str, ir.Var]) -> Any:
    """Return a copy of statements or expressions with their variables replaced.

    ``variables`` maps the name of a variable to the new variable.
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


def _lifetimes_when_asked_for(run: Callable) -> Callable:
    """Return a function that postpones the computation of variables' lifetimes until they are read.

    Numba computes the lifetimes after each pass of the compiler. Only the pass that marks the last
    use of each variable needs them.
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


def _live_variables(cfg: Any, blocks: dict, uses: dict, defines: dict) -> dict[Any, set[str]]:
    """Return the names of the variables that are alive at the entry of each block.

    A variable is alive if the block uses it, or if it is alive after the block and the block does
    not define it. Inside this function, a set of names is an integer with one bit per name.

    The arguments and the result are those of Numba's ``compute_live_map``. ``uses`` and ``defines``
    map the label of each block to names. ``cfg`` contains the edges between blocks.
    """
    bits: dict[str, int] = {}

    def word(names: Iterable[str]) -> int:
        return sum(1 << bits.setdefault(name, len(bits)) for name in names)

    alive = {label: word(uses[label]) for label in defines}
    defined = {label: word(defines[label]) for label in defines}
    known = {label: alive[label] | defined[label] for label in defines}
    before = {label: [other for other, _ in cfg.predecessors(label)] for label in defines}

    def settle(step: Callable[[Any], bool], labels: list) -> None:
        while any([step(label) for label in labels]):
            pass

    def meet(label: Any) -> bool:
        """Add the names that are known before a block, and return whether there are new names.

        A name is known in and after each block that uses or defines it.
        """
        was = known[label]
        for other in before[label]:
            known[label] |= known[other]
        return known[label] != was

    def live(label: Any) -> bool:
        changed = False
        for other in before[label]:
            more = alive[other] | alive[label] & known[other] & ~defined[other]
            changed |= more != alive[other]
            alive[other] = more
        return changed

    settle(meet, sorted(defines))
    settle(live, sorted(defines, reverse=True))
    names = list(bits)
    return {
        label: {names[n] for n, bit in enumerate(bin(alive[label])[:1:-1]) if bit == "1"}
        for label in blocks
    }


def _renamed_where_named(run: Callable) -> Callable:
    """Return a function that renames a variable only in the blocks that contain its name.

    Numba searches all statements for each variable that is assigned several times.
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

        with _replaced(ssa, "_run_block_rewrite", rewriting):
            return run(blocks)

    return run_ssa


def _call_types_kept(find: Callable) -> Callable:
    """Return a function that keeps the type of each call.

    Type inference asks for the type of a call in each of its rounds. Lowering asks once more.
    """
    known: dict[Any, Any] = {}

    def get_call_type(self: Any, context: Any, args: Any, kws: Any) -> Any:
        key = self, context, tuple(args), tuple(dict(kws).items())
        if known.get(key) is None:
            known[key] = find(self, context, args, kws)
        return known[key]

    return get_call_type


# (owner, name, function that makes the replacement from the replaced function)
REPLACED = (
    (inline_closurecall.InlineWorker, "run_untyped_passes", _translated_once),
    (inline_closurecall.InlineWorker, "inline_ir", _inlined_in_one_walk),
    (postproc.PostProcessor, "run", _lifetimes_when_asked_for),
    (analysis, "compute_live_map", lambda _: _live_variables),
    (ssa, "_run_ssa", _renamed_where_named),
    (BaseFunction, "get_call_type", _call_types_kept),
)
