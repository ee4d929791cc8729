"""Numba's front end without the work that it does again and again.

A kernel here is one function with some hundred calls of device functions, all of them inlined.
Numba's passes are made for a few: most of the time that a large kernel took to compile went into
what was known already or never looked at. ``without_repeats`` puts shorter ways in the place of
some functions of ``numba.cuda`` while a kernel is compiled. The code that comes out is the same:
``tests/test_front_end.py`` compares it, and ``make ptx`` that of every kernel.

1. A device function is translated from its bytecode once, and not at each of its calls.
2. A block of code is copied statement by statement; its variables, which nobody changes, are not.
3. After most passes nobody asks which variables are alive, so that it is found when asked for.
4. Which variables are alive at a block is computed with a bit for a variable.
5. A variable that is assigned several times is renamed in the blocks that name it, not in all.
6. The type of a call is looked up once for a function and types of arguments.
7. Whether a part of a statement is a variable, or may have some, is asked once for a type.

Nor is garbage looked for meanwhile: nearly all that is made lives until the kernel is compiled.
"""

from __future__ import annotations

import contextlib
import copy
import gc
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from numba.cuda import lowering
from numba.cuda.core import analysis, inline_closurecall, ir, postproc, ssa, transforms
from numba.cuda.core.compiler_lock import global_compiler_lock
from numba.types import BaseFunction

# Nodes of Numba's intermediate representation that a pass may change, so that a copy has its own.
_NODES = (ir.Inst, ir.Arg, ir.Const, ir.Global, ir.FreeVar)
# Of a node: where it stands, which is no node.
_PLACES = ("loc", "scope")
# Types of calls, of all kernels of a process: (function, context, types of arguments) -> signature.
_call_types: dict[Any, Any] = {}


@contextlib.contextmanager
def without_repeats() -> Iterator[None]:
    """Compile inside with the shorter ways; other threads wait with their compiling."""
    ways = (
        (inline_closurecall.InlineWorker, "run_untyped_passes", _translated_once),
        (ir.Block, "__deepcopy__", _block_copied),
        (postproc.PostProcessor, "run", _lifetimes_when_asked_for),
        (analysis, "compute_live_map", lambda _: live_variables),
        (ssa, "_run_ssa", _renamed_where_named),
        (BaseFunction, "get_call_type", _call_types_kept),
        (lowering.Lower, "_find_singly_assigned_variable", _singly_assigned),
        (ir.Inst, "_rec_list_vars", _variables_by_type),
    )
    with global_compiler_lock, contextlib.ExitStack() as stack:
        for where, name, way in ways:
            stack.enter_context(_replaced(where, name, way))
        if gc.isenabled():
            gc.disable()
            stack.callback(gc.enable)
        yield


@contextlib.contextmanager
def _replaced(where: Any, name: str, way: Callable) -> Iterator[None]:
    """``way`` of what ``where`` has under ``name``, or of None, stands there inside."""
    had = name in vars(where)
    before = getattr(where, name, None)
    setattr(where, name, way(before))
    try:
        yield
    finally:
        if had:
            setattr(where, name, before)
        else:
            delattr(where, name)


def _translated_once(translate: Callable) -> Callable:
    """The inliner copies what it is given, so that all calls are given the same."""
    kept: dict[Any, Any] = {}

    def run_untyped_passes(self: Any, function: Any, enable_ssa: bool = False) -> Any:
        if enable_ssa:
            return translate(self, function, enable_ssa)
        if function not in kept:
            kept[function] = translate(self, function)
            return kept[function]
        again = copy.copy(kept[function])
        again.func_id = again.func_id.derive()  # a number of its own, which names its variables
        return again

    return run_untyped_passes


def _block_copied(_: None) -> Callable:
    def __deepcopy__(self: ir.Block, memo: dict) -> ir.Block:
        block = ir.Block(_scope_copied(self.scope), self.loc)
        block.body = [_node_copied(statement) for statement in self.body]
        return block

    return __deepcopy__


def _scope_copied(scope: ir.Scope) -> ir.Scope:
    new = ir.Scope(scope.parent, scope.loc)
    new.localvars._con.update(scope.localvars._con)
    new.redefined.update(scope.redefined)
    new.var_redefinitions.update(
        (name, set(found)) for name, found in scope.var_redefinitions.items()
    )
    return new


def _node_copied(value: Any) -> Any:
    """A statement or expression with its own parts; variables and constant values are shared."""
    if type(value) in (list, tuple):
        return type(value)([_node_copied(item) for item in value])
    if not isinstance(value, _NODES):
        return value
    new = object.__new__(type(value))
    for name, part in vars(value).items():
        if name == "_kws":
            part = {key: _node_copied(item) for key, item in part.items()}
        elif name not in _PLACES:
            part = _node_copied(part)
        vars(new)[name] = part
    return new


def _lifetimes_when_asked_for(run: Callable) -> Callable:
    """Two things ask: the end of variables before code is made, and generators."""

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


def live_variables(cfg: Any, blocks: dict, uses: dict, defines: dict) -> dict[Any, set[str]]:
    """Names of the variables that are alive at the entry of each block.

    Takes what Numba's ``compute_live_map`` takes, and gives the same: a variable is alive where a
    block uses it, and before each block that it can reach alive and that does not define it.
    ``uses`` and ``defines`` have the names by block, ``cfg`` the edges.
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
        """A name is known behind every block that uses or defines it."""
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
    """Numba visits all statements twice for each variable that is assigned several times."""

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
                changed = rewrite(some, states, handler)
                return {
                    label: changed[label] if label in here else block.copy()
                    for label, block in blocks.items()
                }

            return run_block_rewrite

        with _replaced(ssa, "_run_block_rewrite", rewriting):
            return run(blocks)

    return run_ssa


def _call_types_kept(find: Callable) -> Callable:
    """Inference asks for the type of a call in each of its rounds, and lowering once more."""

    def get_call_type(self: Any, context: Any, args: Any, kws: Any) -> Any:
        key = self, context, tuple(args), tuple(dict(kws).items())
        known = _call_types.get(key)
        if known is None:
            known = _call_types[key] = find(self, context, args, kws)
        return known

    return get_call_type


def _singly_assigned(_: Callable) -> Callable:
    """Numba goes through a variable's block for each variable."""

    def find(self: Any) -> None:
        blocks = self.func_ir.blocks
        self._blk_local_varmap = {}
        self._singly_assigned_vars = set()
        if self.func_ir.func_id.is_generator:
            return
        assigned = Counter(
            statement.target.name
            for block in blocks.values()
            for statement in block.find_insts(ir.assign_types)
        )
        once = {name for name, times in assigned.items() if times == 1}
        used = analysis.compute_use_defs(blocks).usemap.values()
        self._singly_assigned_vars = once.difference(analysis.must_use_alloca(blocks), *used)

    return find


def _variables_by_type(find: Callable) -> Callable:
    """Numba asks of each part for each kind of node, and most parts have no variable."""
    ways: dict[type, Callable[[Any], list]] = {}

    def way_of(cls: type) -> Callable[[Any], list]:
        if issubclass(cls, ir.var_types):
            return lambda value: [value]
        if issubclass(cls, ir.inst_types):
            return lambda value: value.list_vars()
        if issubclass(cls, (list, tuple)):
            return lambda value: [found for part in value for found in variables(part)]
        if issubclass(cls, dict):
            return lambda value: [found for part in value.values() for found in variables(part)]
        return lambda value: []

    def variables(value: Any) -> list:
        way = ways.get(type(value))
        if way is None:
            way = ways[type(value)] = way_of(type(value))
        return way(value)

    return lambda self, value: variables(value)
