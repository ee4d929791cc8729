"""Records the code and the kernels with which a run was made, as digests.

A run stores these digests with its rows. Later, `changed` compares them with the digests of today's
code. In this way it finds out, without a run, whether a run would give the same rows. The digests
ignore words, such as docstrings (see `code_digest`).

The digests of a run are a dictionary. Its entries are:

`experiment`  maps each module of `experiments` that `measure` uses to a digest of the used code
`plans`       maps each request, written as text, to a line about the plan's launches: digests of
              every kernel, and of grids, arguments and workspace. `changed` makes the plan again
              from the text, and compares the line.
`kernels`     names and digests of all other kernels, which no plan in `plans` launches
`modules`     maps each module with code of the kernels in `kernels` to a digest
`calls`       digest of fa_numba's files that turn a call into launches. Counts of the emulator
              always have this entry. Runs on a GPU have this entry only if they have `kernels`.
`emulator`    digest of the emulator's files; only for counts of the emulator
"""

from __future__ import annotations

import ast
import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from fa_numba import Plan, device
from fa_numba.choices.requests import Choices, Request
from fa_numba.device.program_digest import digest_of, program_of
from fa_numba.ops import plan_again
from fa_numba.problem import Problem
from fa_numba.tiling import Tiles

from . import code_digest
from .options import REPOSITORY
from .store import EMULATOR

PACKAGE = REPOSITORY / "fa_numba"
# Files that turn a call into launches. Files that make plans are missing: plans are compared.
CALLS = ("ops.py", "host/calls.py", "host/execution.py", "device/launching.py")
# Modules that write the code of a caller's function.
_WRITERS = (
    "allowed", "captures", "chain", "gradients", "growth", "kinds", "needed", "positions",
    "reading", "sharing", "slopes", "source", "writing",
)  # fmt: skip
# Module of kernels -> modules that launch them without a request. For `fa_numba.mods`: the modules
# that write the code of a caller's function.
_MAKERS = {
    "fa_numba.kernels.simt.append": ("fa_numba.host.append", "fa_numba.host.prefix"),
    "fa_numba.kernels.merge_parts": ("fa_numba.host.merging", "fa_numba.host.prefix"),
    "fa_numba.kernels.simt.softmax": ("fa_numba.host.softmax",),
    "fa_numba.mods": tuple(f"fa_numba.mods.{name}" for name in _WRITERS),
}
EMULATION = ("emulator/*.py",)
# Files that contain only error messages. They are left out of digests.
_WORDS = ("emulator/errors.py",)
# Recordings that do not belong to a module of `experiments` -> (module, function) that measures.
_OTHERS = {"tune": ("experiments.lab.measure.variants", "times")}
_CLASSES = {each.__name__: each for each in (Request, Choices, Problem, Tiles)}

Ran = dict[str, Any]


@dataclass
class Collected:
    """The launches of a run so far, in this process and in other processes.

    Parameters
    ----------
    launched : Launched
        The kernels that this process has launched, and the requests of their plans.
    files : dict
        The digests `calls` and `emulator` as they were before the run; see the module's docstring.
    told : dict
        Maps "gpu" to a list with the digests that other processes have passed to `tell`.
    """

    launched: device.Launched
    files: Ran
    told: dict[str, list[Ran]] = field(default_factory=dict)

    def of(self, machine: str) -> Ran:
        """Return the digests of the launches on a machine.

        `machine` is "emulator" for the launches on the emulator, or the name of the GPU.
        """
        where = "emulator" if machine == EMULATOR else "gpu"
        mine = _launches(self.launched.kernels[where], self.launched.origins[where], machine)
        if machine == EMULATOR:
            mine |= self.files
        elif "kernels" in mine:
            mine["calls"] = self.files["calls"]
        return merged([mine, *self.told.get(where, ())])


_open: list[Collected] = []


@contextlib.contextmanager
def collecting() -> Iterator[Collected]:
    """Collect the launches that are made inside the context, and the launches passed to `tell`."""
    with device.launched_kernels() as launched:
        collected = Collected(launched, {"calls": _of(CALLS), "emulator": _of(EMULATION)})
        _open.append(collected)
        try:
            yield collected
        finally:
            _open.remove(collected)


def tell(launches: Ran) -> None:
    """Add the launches of another process to every `Collected` object that is collecting now.

    The other process has launched kernels on the GPU. `launches` is the result of `Collected.of` in
    that process.
    """
    for each in _open:
        each.told.setdefault("gpu", []).append(launches)


def merged(found: Sequence[Ran]) -> Ran:
    """Merge several dictionaries with digests of launches, one per process, into one dictionary."""
    whole: Ran = {}
    for each in found:
        for name, value in each.items():
            if isinstance(value, dict):
                whole[name] = dict(sorted((whole.get(name, {}) | value).items()))
            elif isinstance(value, list):
                whole[name] = sorted({*whole.get(name, ()), *value})
            else:
                whole[name] = value
    return whole


def _launches(kernels: Mapping[Any, None], origins: Mapping[Any, None], machine: str) -> Ran:
    found: Ran = {}
    covered: set[Any] = set()
    for origin in origins:
        text = encoded(origin)
        if text:
            plan = plan_again(origin)
            found.setdefault("plans", {})[text] = _line(plan, machine == EMULATOR)
            covered.update(plan.launched)
    others = [kernel for kernel in kernels if kernel not in covered]
    if others:
        programs = [(x.name, program_of(x, emulated=machine == EMULATOR)) for x in others]
        found["kernels"] = sorted({f"{name} {of.digest}" for name, of in programs})
        modules = set().union(*(of.modules for _, of in programs))
        modules.update(*(_MAKERS.get(name, ()) for name in modules))
        found["modules"] = {name: code_digest.of_module(name) for name in sorted(modules)}
    return found


def code_of(experiment: str) -> dict[str, str]:
    """Return digests of the code that measures an experiment, as a dictionary {module: digest}."""
    module, name = _OTHERS.get(experiment, (f"experiments.{experiment}", "measure"))
    return code_digest.reached(module, name)


def _of(patterns: Sequence[str]) -> str:
    paths = {path for each in patterns for path in PACKAGE.glob(each)}
    return code_digest.of_files(paths - {PACKAGE / each for each in _WORDS}, PACKAGE)


# --- requests as text --------------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def encoded(request: Any) -> str:
    """Return a request as text, such as "Request(unit='mma')", without fields of default value.

    The text is empty if `decoded` cannot make the request from the text again, for example because
    the request contains a caller's functions.
    """
    try:
        text = _text(request)
        return text if isinstance(request, Request) and decoded(text) == request else ""
    except (ValueError, TypeError):
        return ""


def _text(value: Any) -> str:
    if is_dataclass(value):
        own = [(f.name, getattr(value, f.name)) for f in fields(value) if f.init]
        usual = {f.name: f.default for f in fields(value)}
        given = [f"{name}={_text(x)}" for name, x in own if x != usual[name]]
        return f"{type(value).__name__}({', '.join(given)})"
    if isinstance(value, tuple):
        return f"({', '.join(map(_text, value))}{',' * (len(value) == 1)})"
    return repr(value)


def decoded(text: str) -> Any:
    """Return the request from which `encoded` has made a text.

    Raise ValueError if the text has another form. Wrong values raise the errors of the request's
    classes.
    """
    try:
        return _value(ast.parse(text, mode="eval").body)
    except SyntaxError as error:
        raise ValueError(
            "a stored request must be text such as \"Request(unit='mma')\", got "
            f"{text!r}: {error.msg}"
        ) from error


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Call):
        made = _CLASSES.get(getattr(node.func, "id", ""))
        if made is None or node.args:
            raise ValueError(
                f"a stored request may contain only {', '.join(_CLASSES)} with named arguments, "
                f"numbers, strings, True, False, None and tuples, got {ast.unparse(node)}"
            )
        return made(**{str(each.arg): _value(each.value) for each in node.keywords})
    if isinstance(node, ast.Tuple):
        return tuple(map(_value, node.elts))
    return ast.literal_eval(node)


# --- plans -------------------------------------------------------------------------------------


def _line(plan: Plan, emulated: bool) -> str:
    """Return one line that identifies the launches of a plan.

    It contains the name and the digest of each kernel, and one digest of grids, arguments, arrays
    and numbers of splits. `emulated` says whether the plan runs on the emulator, whose kernels have
    other digests.
    """
    programs = [(each.name, program_of(each, emulated=emulated)) for each in plan.launched]
    kernels = dict.fromkeys(f"{name} {of.digest}" for name, of in programs)
    given = [x.arguments.items() if emulated else x.arguments.values() for x in plan.launches]
    how = [(x.grid, list(y)) for x, y in zip(plan.launches, given, strict=True)]
    arrays = plan.workspace, plan.outputs, plan.updated, plan.uncounted if emulated else ()
    numbers = plan.split_rows, plan.kv_splits, plan.score_unit
    return ", ".join([*kernels, f"launches {digest_of(repr((how, arrays, numbers)))}"])


# --- then and now ------------------------------------------------------------------------------


def changed(ran: Any, experiment: str, machine: str) -> list[str] | None:
    """Return the names of the code and kernels that have changed since a run.

    `ran` contains the digests that the run stored. The list is empty if a run today would use the
    same code and kernels. The result is None if the run stored no digests.
    """
    if not isinstance(ran, dict) or not isinstance(ran.get("experiment"), dict):
        return None
    found = [f"code of {name}" for name in _differing(ran["experiment"], code_of(experiment))]
    for text, line in ran.get("plans", {}).items():
        found += _changed_plan(text, line, machine == EMULATOR)
    modules = ran.get("modules", {})
    now = {name: code_digest.of_module(name) for name in modules}
    found += [f"code of {name}" for name in _differing(modules, now)]
    for name, patterns, what in (
        ("calls", CALLS, "fa_numba's way from a call to its launches"),
        ("emulator", EMULATION, "the emulator"),
    ):
        if name in ran and ran[name] != _of(patterns):
            found.append(f"code of {what}")
    return list(dict.fromkeys(found))


def _differing(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    return sorted(name for name in {*then, *now} if then.get(name) != now.get(name))


def _changed_plan(text: str, line: str, emulated: bool) -> list[str]:
    try:
        request = decoded(text)
        today = _line(plan_again(request), emulated)
    except (ValueError, TypeError, KeyError) as error:
        return [f"a plan that cannot be made any more ({error})"]
    if today == line:
        return []
    of = f"{request.choices.algorithm} {request.choices.passes}"
    before, after = ({part.rpartition(" ")[2] for part in x.split(", ")} for x in (line, today))
    if before == after:
        return []
    named = dict.fromkeys(
        part.rpartition(" ")[0] for part in today.split(", ")
        if part.rpartition(" ")[2] not in before
    )  # fmt: skip
    return [f"{each} of {of}" for each in named] or [f"what {of} launches"]
