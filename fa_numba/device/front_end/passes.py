"""Faster passes: Numba's passes without measurements, and without passes that change nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba.cuda.compiler import DefaultPassBuilder
from numba.cuda.core import (
    compiler_machinery,
    errors,
    ir,
    ir_utils,
    transforms,
    typed_passes,
    untyped_passes,
)

_REGISTRY = compiler_machinery._pass_registry


def run_unmeasured(run: Callable) -> Callable:
    """Return a replacement of Numba's function ``run``, which runs all passes of a pipeline.

    For each pass, Numba measures the time three times, formats the arguments for listeners, and
    searches all statements afterwards. The replacement only runs the passes. A kernel with its
    device functions takes about 2,000 passes.
    """

    def run_passes(self: Any, state: Any) -> None:
        if any(self._debug_init()):  # the user wants to see the code before or after a pass
            run(self, state)
            return
        for cls, text in self.passes:
            step = _REGISTRY.get(cls).pass_inst
            step.analysis = self._analysis
            try:
                with errors.new_error_context(f"Pass {step.name()}"):
                    step.run_initialization(state)
                    step.run_pass(state)
                    step.run_finalizer(state)
            except errors.NumbaError as error:
                place = f"Failed in {self.pipeline_name} mode pipeline (step: {text})"
                raise self._patch_error(place, error) from None

    return run_passes


def pipeline_kept(define: Callable) -> Callable:
    """Return a replacement of Numba's function ``define``, which makes a pipeline (list of passes).

    Numba makes a new pipeline for each device function. The replacement makes one pipeline for each
    set of compiler flags, and caches it.
    """
    known: dict[tuple, Any] = {}

    def define_untyped_pipeline(state: Any, name: str = "untyped") -> Any:
        flags = state.flags
        key = state.func_ir is None, bool(flags.no_rewrites), bool(flags.enable_ssa), name
        if key not in known:
            known[key] = define(state, name)
        return known[key]

    return staticmethod(define_untyped_pipeline)


def finalized_once(finalize: Callable) -> Callable:
    """Return a replacement of Numba's function ``finalize``, which completes a pipeline.

    The replacement does nothing if the pipeline was finalized before.
    """

    def finalize_new(self: Any) -> None:
        if not self._finalized:
            finalize(self)

    return finalize_new


def branches_looked_for(run: Callable) -> Callable:
    """Return a replacement of ``run``, Numba's pass that removes dead branches.

    The replacement calls Numba's pass only for functions that have branches.
    """

    def run_pass(self: Any, state: Any) -> bool:
        blocks = state.func_ir.blocks.values()
        if any(isinstance(block.body[-1], ir.Branch) for block in blocks):
            return run(self, state)
        return True

    return run_pass


def legalized_without_ends(run: Callable) -> Callable:
    """Return a replacement of ``run``, Numba's pass that checks a kernel before lowering.

    Numba's pass also marks where each variable is used last. Only reference counts and a debugger
    need these marks. The replacement calls Numba's pass only if the marks are needed. Otherwise it
    makes the checks without the marks.
    """

    def run_pass(self: Any, state: Any) -> bool:
        flags, code = state.flags, state.func_ir
        if flags.nrt or flags.debuginfo or code.is_generator:
            return run(self, state)
        ir_utils.enforce_no_phis(code)
        ir_utils.enforce_no_dels(code)
        code.blocks = transforms.canonicalize_cfg(code.blocks)
        return True

    return run_pass


REPLACED = (
    (compiler_machinery.PassManager, "run", run_unmeasured),
    (compiler_machinery.PassManager, "finalize", finalized_once),
    (DefaultPassBuilder, "define_untyped_pipeline", pipeline_kept),
    (untyped_passes.DeadBranchPrune, "run_pass", branches_looked_for),
    (typed_passes.IRLegalization, "run_pass", legalized_without_ends),
)
