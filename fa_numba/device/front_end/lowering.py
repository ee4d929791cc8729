"""Faster lowering: replacements of Numba's functions that generate LLVM IR."""

from __future__ import annotations

import functools
import importlib.util
from collections import Counter
from collections.abc import Callable
from typing import Any

from numba.cuda import cgutils
from numba.cuda import lowering as numbas_lowering
from numba.cuda.core import analysis, base, config, ir
from numba.cuda.core.imputils import builtin_registry
from numba.cuda.debuginfo import DummyDIBuilder
from numba.cuda.np import linalg


def values_where_assigned_once(_: Callable) -> Callable:
    """Return a replacement of Numba's function that finds the variables that need no stack memory.

    These variables become values of LLVM IR. The replacement finds variables that are assigned
    once, if the assignment comes before every use on each path. Numba's function finds only
    variables that are assigned and used in one block, and it searches the block for each of them.
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
            for statement in block.find_insts(ir.Assign):
                name = statement.target.name
                assigned[name] += 1
                home[name] = label
        once = {name for name, times in assigned.items() if times == 1}
        once -= analysis.must_use_alloca(blocks)
        before = analysis.compute_cfg_from_blocks(blocks).dominators()
        turn = {label: n for n, label in enumerate(self.blocks)}  # the order of lowering
        for label, names in analysis.compute_use_defs(blocks).usemap.items():
            for name in once & names:
                at = home[name]
                if at not in before.get(label, ()) or turn[at] >= turn[label]:
                    once.remove(name)
        self._singly_assigned_vars = once

    return find


def refreshed_after_changes(refresh: Callable) -> Callable:
    """Return a replacement of ``refresh``, Numba's function that reads all registries of functions.

    Numba calls ``refresh`` whenever it does not find an implementation of a function. This happens
    a few hundred times per kernel. The replacement reads the registries only if they have grown.
    """
    known: dict[int, tuple[list[list], int]] = {}

    def refresh_changed(self: Any) -> None:
        table = id(self._registries)  # which contexts of one compiler share
        found, size = known.get(table, ([], -1))
        if sum(map(len, found)) != size:
            refresh(self)
            found = _definitions(self)
            known[table] = found, sum(map(len, found))

    return refresh_changed


def _definitions(context: Any) -> list[list]:
    """Return the lists of definitions in all registries of a context.

    The registries of types that belong to the context are included.
    """
    registries = {*context._registries, *context.typing_context._registries, builtin_registry}
    return [found for each in registries for found in vars(each).values() if type(found) is list]


def without_debug_sizes(alloca: Callable) -> Callable:
    """Return a replacement of Numba's function ``alloca``, which allocates a variable on the stack.

    Numba also computes the size of the variable, for a debugger. The replacement computes the size
    only if debug information is on.
    """

    def alloca_lltype(self: Any, name: str, lltype: Any, datamodel: Any = None) -> Any:
        if isinstance(self.debuginfo, DummyDIBuilder):
            return cgutils.alloca_once(self.builder, lltype, name=name)
        return alloca(self, name, lltype, datamodel)

    return alloca_lltype


def found_without_import(_: Callable) -> Callable:
    """Return a replacement of Numba's function ``ensure_blas``.

    Numba imports ``scipy.linalg`` to learn whether there is a BLAS. Kernels do not call BLAS. The
    replacement only checks that SciPy is installed, without importing it.
    """

    def ensure_blas() -> None:
        if importlib.util.find_spec("scipy") is None:
            raise ImportError("SciPy is not installed")

    return ensure_blas


def text_of(value: object) -> str:
    """Return a value as text, in place of ``str`` in Numba's module ``lowering``.

    The text of a statement is empty unless Numba's debug output is on, because making it takes
    time.
    """
    return "" if isinstance(value, ir.Stmt) and not config.DEBUG_JIT else str(value)


REPLACED = (
    (numbas_lowering.Lower, "_find_singly_assigned_variable", values_where_assigned_once),
    (base.BaseContext, "refresh", refreshed_after_changes),
    (base, "_has_loc", functools.cache),
    (numbas_lowering.Lower, "alloca_lltype", without_debug_sizes),
    (linalg, "ensure_blas", found_without_import),
    (numbas_lowering, "str", lambda _: text_of),
)
