"""From Numba's representation to LLVM's: what has no part in the code is not made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba.cuda import cgutils
from numba.cuda.core import config, ir
from numba.cuda.core.imputils import builtin_registry
from numba.cuda.debuginfo import DummyDIBuilder


def refreshed_after_changes(refresh: Callable) -> Callable:
    """Numba reads all registries whenever a function has no code yet, a few hundred times."""
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
    """What the registries of a context and of its types hold, and go on to hold."""
    registries = {*context._registries, *context.typing_context._registries, builtin_registry}
    return [found for each in registries for found in vars(each).values() if type(found) is list]


def without_debug_sizes(alloca: Callable) -> Callable:
    """The size of a variable is for a debugger's eyes."""

    def alloca_lltype(self: Any, name: str, lltype: Any, datamodel: Any = None) -> Any:
        if isinstance(self.debuginfo, DummyDIBuilder):
            return cgutils.alloca_once(self.builder, lltype, name=name, zfill=False)
        return alloca(self, name, lltype, datamodel)

    return alloca_lltype


def without_ends_of_values(lower: Callable) -> Callable:
    """The end of a variable whose references nobody counts is no code."""

    def lower_inst(self: Any, inst: Any) -> Any:
        counted = self.context.enable_nrt or self._disable_sroa_like_opt
        if type(inst) is ir.Del and not counted:
            return None
        return lower(self, inst)

    return lower_inst


def text_of(value: object) -> str:
    """A statement as text is for those who look for faults in Numba: NUMBA_DEBUG_JIT."""
    return "" if isinstance(value, ir.Stmt) and not config.DEBUG_JIT else str(value)
