"""Variables of Numba's intermediate representation: which are alive, renamed, used or stored."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from numba.cuda.core import analysis, ir, postproc, ssa, transforms

from fa_numba.device.front_end.replacing import replaced

# Values that are found without running anything, so that nothing is lost where nobody reads them.
_WITHOUT_EFFECT = (ir.Var, ir.Const, ir.Global, ir.FreeVar)
_EXPRESSIONS_WITHOUT_EFFECT = ("getattr", "build_tuple")


def unread_left_out(rename: Callable) -> Callable:
    """Before variables are renamed, those go that nobody reads: names of functions that have been
    inlined, what these give back without a value.
    """

    def run_pass(self: Any, state: Any) -> bool:
        _leave_unread_out(state.func_ir.blocks)
        return rename(self, state)

    return run_pass


def _leave_unread_out(blocks: dict[int, ir.Block]) -> None:
    reads: Counter[str] = Counter()
    assigned = defaultdict(list)
    for block in blocks.values():
        for statement in block.body:
            if isinstance(statement, ir.assign_types):
                assigned[statement.target.name].append(statement)
                reads.update(_read(statement.value))
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
                for name in _read(value):
                    reads[name] -= 1
                    if not reads[name]:
                        unread.add(name)
    for block in blocks.values():
        block.body = [statement for statement in block.body if id(statement) not in gone]


def _read(value: Any) -> list[str]:
    if isinstance(value, ir.Var):
        return [value.name]
    return [variable.name for variable in value.list_vars()] if isinstance(value, ir.Inst) else []


def lifetimes_when_asked_for(run: Callable) -> Callable:
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


def renamed_where_named(run: Callable) -> Callable:
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
                return blocks | changed

            return run_block_rewrite

        with replaced(ssa, "_run_block_rewrite", rewriting):
            return run(blocks)

    return run_ssa


def values_where_assigned_once(_: Callable) -> Callable:
    """A variable that is assigned once is that value wherever the assignment comes before, in all
    ways through the function; the others have a place in memory. Numba makes values only of those
    that one block assigns and uses, and goes through the block for each.
    """

    def find(self: Any) -> None:
        blocks = self.func_ir.blocks
        self._blk_local_varmap = {}
        self._singly_assigned_vars = set()
        if self.func_ir.func_id.is_generator:
            return
        assigned = Counter[str]()
        home = {}
        for label, block in blocks.items():
            for statement in block.find_insts(ir.assign_types):
                name = statement.target.name
                assigned[name] += 1
                home[name] = label
        once = {name for name, times in assigned.items() if times == 1}
        once -= analysis.must_use_alloca(blocks)
        before = analysis.compute_cfg_from_blocks(blocks).dominators()
        turn = {label: n for n, label in enumerate(self.blocks)}  # in which code is made of them
        for label, names in analysis.compute_use_defs(blocks).usemap.items():
            for name in once & names:
                at = home[name]
                if at not in before.get(label, ()) or turn[at] >= turn[label]:
                    once.remove(name)
        self._singly_assigned_vars = once

    return find


def variables_by_type(find: Callable) -> Callable:
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


def of_an_assignment(_: None) -> Callable:
    """Most statements are assignments, of which only the value can have several variables."""

    def list_vars(self: ir.Assign) -> list:
        value = self.value
        if isinstance(value, ir.Var):
            return [value, self.target]
        found = value.list_vars() if isinstance(value, ir.inst_types) else []
        return [*found, self.target]

    return list_vars


def of_a_statement(find: Callable) -> Callable:
    """Numba walks through a statement as if to change it, to find which variables it has."""

    def compat_list_vars_stmt(statement: Any) -> list:
        return statement.list_vars() if type(statement) is ir.Assign else find(statement)

    return compat_list_vars_stmt
