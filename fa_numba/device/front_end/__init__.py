"""Numba's front end without the work that it does again and again.

A kernel here is one function with some hundred calls of device functions, all of them inlined.
Numba's passes are made for a few: most of the time that a large kernel took to compile went into
what was known already or never looked at. ``without_repeats`` puts shorter ways in the place of
some functions of ``numba.cuda`` while a kernel is compiled. The code that comes out is the same:
``tests/test_front_end.py`` compares it, and ``make ptx`` that of every kernel.

``inlining``: a device function is translated and its blocks joined once, and copied, renamed and
numbered in one walk at each of its calls; its variables get short names.
``variables``: which are alive is computed with a bit for a variable, and where somebody asks; one
that is assigned several times is renamed in the blocks that name it; those that nobody reads go
before types are looked for; one that is assigned once is a value, with no place in memory.
``inference``: the type of a call or of a value is looked up once; a constraint is looked at again
where the type of a variable that it names has changed.
``lowering``: registries are read where they have grown; no code is asked for where a value ends,
no size and no text that a debugger would be shown.

Nor is garbage looked for meanwhile: nearly all that is made lives until the kernel is compiled.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Iterator

from numba.cuda import lowering as numbas_lowering
from numba.cuda import target
from numba.cuda.core import (
    analysis,
    base,
    errors,
    inline_closurecall,
    ir,
    ir_utils,
    postproc,
    ssa,
    typed_passes,
    typeinfer,
    untyped_passes,
)
from numba.cuda.core.compiler_lock import global_compiler_lock
from numba.types import BaseFunction

from fa_numba.device.front_end import inference, inlining, lowering, variables
from fa_numba.device.front_end.replacing import replaced

__all__ = ["WAYS", "without_repeats"]

# (whose, name, what is there meanwhile of what was there before)
WAYS = (
    (inline_closurecall.InlineWorker, "run_untyped_passes", inlining.translated_once),
    (inline_closurecall.InlineWorker, "inline_ir", inlining.inlined_in_one_walk),
    (untyped_passes.InlineClosureLikes, "run_pass", inlining.closures_looked_for),
    (postproc.PostProcessor, "run", variables.lifetimes_when_asked_for),
    (analysis, "compute_live_map", lambda _: variables.live_variables),
    (untyped_passes.ReconstructSSA, "run_pass", variables.unread_left_out),
    (ssa, "_run_ssa", variables.renamed_where_named),
    (ir.Inst, "_rec_list_vars", variables.variables_by_type),
    (ir.Assign, "list_vars", variables.of_an_assignment),
    (ir_utils, "compat_list_vars_stmt", variables.of_a_statement),
    (numbas_lowering.Lower, "_find_singly_assigned_variable", variables.values_where_assigned_once),
    (BaseFunction, "get_call_type", inference.call_types_kept),
    (target.CUDATypingContext, "resolve_value_type", inference.types_of_values_kept),
    (typeinfer.ConstraintNetwork, "propagate", inference.propagated_where_changed),
    (errors.WarningsFixer, "catch_warnings", inference.not_caught),
    (typed_passes.NopythonRewrites, "run_pass", inference.literals_looked_for),
    (base.BaseContext, "refresh", lowering.refreshed_after_changes),
    (base, "_has_loc", functools.cache),
    (numbas_lowering.Lower, "alloca_lltype", lowering.without_debug_sizes),
    (numbas_lowering.CUDALower, "lower_inst", lowering.without_ends_of_values),
    (numbas_lowering, "str", lambda _: lowering.text_of),
)


@contextlib.contextmanager
def without_repeats() -> Iterator[None]:
    """Compile inside with the shorter ways; other threads wait with their compiling."""
    with global_compiler_lock, contextlib.ExitStack() as stack:
        for where, name, way in WAYS:
            stack.enter_context(replaced(where, name, way))
        if gc.isenabled():
            gc.disable()
            stack.callback(gc.enable)
        yield
