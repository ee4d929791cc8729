"""What stands in for functions of Numba's front end gives what they give, and goes away again."""

import contextlib
import gc
import itertools
import threading
from types import SimpleNamespace
from unittest import mock

import pytest
from compare_ptx import ptx_of, without_names
from numba import cuda, types
from numba.cuda.compiler import run_frontend
from numba.cuda.core import (
    compiler_machinery,
    errors,
    ir,
    ir_utils,
    rewrites,
    untyped_passes,
)
from numba.cuda.np import arraymath, linalg
from offline import CAPABILITY

import fa_numba
from fa_numba import device
from fa_numba.device import (
    EMULATED_SHARED_BYTES,
    array_type,
    device_function,
    kernel_cache,
    planning_for,
)
from fa_numba.device.front_end import REPLACED, lowering, passes, without_repeats
from fa_numba.device.front_end.inference import (
    call_types_kept,
    literals_looked_for,
    types_of_values_kept,
)
from fa_numba.device.front_end.inlining import inlined_in_one_walk, translated_once
from fa_numba.device.front_end.lowering import values_where_assigned_once
from fa_numba.device.front_end.passes import legalized_without_ends
from fa_numba.device.front_end.variables import lifetimes_when_asked_for, unread_left_out
from fa_numba.device.kernel import built_together
from fa_numba.device.linking import entry_of


def ptx(kernel):
    return without_names(ptx_of(kernel, CAPABILITY["sm_90a"]))


def kernels(algorithm, unit, passes="fwd", d=64):
    """By their names, those that a call without options launches on an H100."""
    shape, dtype = (2, 4, 1024, d), "float32" if unit == "simt" else "float16"
    how = {"algorithm": algorithm, "dtype": dtype, "unit": unit, "passes": passes}
    with planning_for((9, 0), EMULATED_SHARED_BYTES):
        return {each.name: each for each in fa_numba.plan(shape, shape, **how).launched}


def row_sums():
    return kernels("fa2", "simt", "bwd")["row_sums"]


@pytest.mark.parametrize(
    "call, name",
    [
        (("fa2", "simt", "bwd"), "row_sums"),
        (("standard", "mma"), "standard_softmax"),
        pytest.param(("fa2", "simt"), "fa2_forward", marks=pytest.mark.slow),
        pytest.param(("fa1", "mma", "bwd"), "fa1_backward", marks=pytest.mark.slow),
        pytest.param(("fa2", "wgmma"), "fa2_forward", marks=pytest.mark.slow),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_the_same_code_comes_out(call, name):
    kernel = kernels(*call)[name]
    with without_repeats():
        shorter = ptx(kernel)
    assert shorter == ptx(kernel)


def test_each_function_is_numbas_again_afterwards():
    before = [vars(owner).get(name) for owner, name, _ in REPLACED]
    with pytest.raises(KeyError, match="inside"), without_repeats():
        meanwhile = [vars(owner)[name] for owner, name, _ in REPLACED]
        assert all(new is not old for new, old in zip(meanwhile, before, strict=True))
        assert not gc.isenabled()
        raise KeyError("inside")
    assert [vars(owner).get(name) for owner, name, _ in REPLACED] == before
    assert gc.isenabled()


@pytest.fixture(scope="module")
def called():
    """The names of the replaced functions that Numba calls while it compiles one kernel."""
    found = set()

    def noting(name, shorter):
        def call(*args, **kws):
            found.add(name)
            return shorter(*args, **kws)

        return call

    with without_repeats():
        for owner, name, _ in REPLACED:
            setattr(owner, name, noting(name, vars(owner)[name]))
        ptx(row_sums())
    return found


@pytest.mark.parametrize("name", sorted({name for _, name, _ in REPLACED} - {"ensure_blas"}))
def test_each_function_is_used(name, called):
    """One that Numba no longer calls would be replaced for nothing."""
    assert name in called


def test_numba_asks_for_blas_when_it_loads_its_tables():
    """A process loads them once, so that the fixture ``called`` cannot see the call."""
    assert "ensure_blas" in arraymath._check_blas.__code__.co_names
    with without_repeats():
        linalg.ensure_blas()


def test_labels_grow_alike_with_each_kernel():
    """Names of variables have them, and the assembler cuts names: labels may not double with each
    device function that is inlined in another.
    """
    kernel, labels = kernels("standard", "mma")["standard_output"], []
    with without_repeats():
        for _ in range(3):
            ptx(kernel)
            labels.append(ir_utils.next_label())
    first, second = (after - before for before, after in itertools.pairwise(labels))
    assert first == second < 1000


def test_other_threads_wait_with_their_compiling():
    def small():
        cuda.compile(lambda X: None, (array_type(1),), cc=(9, 0), device=False, abi="numba")
        done.append(True)

    done = []
    small()
    thread = threading.Thread(target=small)
    with without_repeats():
        thread.start()
        thread.join(0.3)  # ten times what it takes
        assert len(done) == 1
    thread.join()
    assert len(done) == 2


def test_unread_variables_go_before_types_are_inferred():
    """Statements with an effect stay, and so do the variables that they read."""

    def kernel(X, n, spare):
        unread = n
        _ = unread, cuda.grid
        cuda.grid(2)
        i = cuda.grid(1)
        end = n
        if i < end:
            two = 2
            X[i] = two

    code = run_frontend(kernel)

    def statements():
        return [str(each) for block in code.blocks.values() for each in block.body]

    before = statements()
    unread_left_out(lambda self, state: True)(None, SimpleNamespace(func_ir=code))
    gone = [each for each in before if each not in statements()]
    names = sorted(line.split(" = ")[0].split(".")[0] for line in gone if line[0] != "$")
    assert names == ["_", "unread"]
    assert any("build_tuple" in line for line in gone)
    assert not any("call" in line or "setitem" in line for line in gone)
    left = [each for block in code.blocks.values() for each in block.body]
    assigned = {each.target.name for each in left if isinstance(each, ir.Assign)}
    assert {"X", "end", "i", "n", "spare", "two"} <= assigned
    assert {variable.name for each in left for variable in each.list_vars()} == assigned


def test_types_of_calls_are_kept_by_all_that_they_depend_on():
    """The function, the context of the types, and the arguments by position and by name."""
    calls = itertools.product("fg", "cd", [(1,), (2,)], [{}, {"x": 1}, {"x": 2}, {"y": 1}])
    calls = [(f, c, args, tuple(named.items())) for f, c, args, named in calls]
    asked = []
    find = call_types_kept(lambda *call: asked.append(call) or len(asked))
    first = [find(*call) for call in calls]
    assert first == [find(*call) for call in calls] == [*range(1, len(calls) + 1)]
    assert asked == calls
    unknown = call_types_kept(lambda *call: asked.append(call))
    assert [unknown(*calls[0]) for _ in range(2)] == [None, None] and asked[len(calls) :] == [
        calls[0],
        calls[0],
    ]


def test_types_of_values_are_kept_by_all_that_they_depend_on():
    """The context, and of a value its type and the value itself. Floats and texts are not kept."""
    asked = []
    find = types_of_values_kept(lambda *call: asked.append(call) or len(asked))
    kept = (0, 1, 2, -1, False, True, int, bool, len, max, cuda, types, gets, lists)
    calls = [(context, value) for context in "cd" for value in kept]
    first = [find(*call) for call in calls]
    assert first == [find(*call) for call in calls] == [*range(1, len(calls) + 1)]
    others = [("c", value) for value in (1.0, "x", "x", 1.0)]
    assert [find(*call) for call in others] == [*range(len(calls) + 1, len(calls) + 5)]


@pytest.mark.parametrize("fails", [None, "run_pass"])
def test_each_pass_of_a_pipeline_begins_runs_and_ends(monkeypatch, fails):
    """In its order. An error names the pass; with debugging, Numba runs all passes."""
    done = []

    class Pass:
        def __init__(self, name):
            self.own = name

        def name(self):
            return self.own

        def __getattr__(self, step):
            def run(state):
                done.append((self.own, step, self.analysis, state))
                if step == fails:
                    raise errors.NumbaError("wrong")

            return run

    registry = {name: SimpleNamespace(pass_inst=Pass(name)) for name in "ab"}
    monkeypatch.setattr(passes, "_REGISTRY", registry)
    manager = SimpleNamespace(
        passes=[("a", "first"), ("b", "second")], _analysis="facts", pipeline_name="p",
        _debug_init=lambda: (False, False), _patch_error=lambda place, error: KeyError(place),
    )  # fmt: skip
    run = passes.run_unmeasured(lambda self, state: done.append("Numba's"))
    steps = ("run_initialization", "run_pass", "run_finalizer")
    if fails:
        with pytest.raises(KeyError, match=r"Failed in p mode pipeline \(step: first\)"):
            run(manager, 7)
        assert done == [("a", step, "facts", 7) for step in steps[:2]]
        return
    run(manager, 7)
    assert done == [(name, step, "facts", 7) for name in "ab" for step in steps]
    done.clear()
    manager._debug_init = lambda: (False, True)
    run(manager, 7)
    assert done == ["Numba's"]


@pytest.mark.parametrize("emits", [True, False])
@pytest.mark.parametrize("generator", [True, False])
def test_lifetimes_are_computed_by_numba_for_the_pass_that_marks_last_uses(emits, generator):
    def kernel(X, n):
        for i in range(n):
            X[i] = n

    asked = []
    run = lifetimes_when_asked_for(lambda *given: asked.append(given))
    code = run_frontend(kernel)
    code.is_generator, code.generator_info = generator, "old"
    processor = SimpleNamespace(func_ir=code)
    run(processor, emits, True)
    if emits or generator:
        assert asked == [(processor, emits, True)] and code.generator_info == "old"
    else:
        assert not asked and code.generator_info is None
        assert code.variable_lifetime.usedefs.defmap.keys() == code.blocks.keys()


def test_a_statement_has_a_text_for_numbas_debug_output_alone(monkeypatch):
    """Anything else always has one."""
    loc = ir.Loc("file", 1)
    for debug in (0, 1):
        monkeypatch.setattr(lowering.config, "DEBUG_JIT", debug)
        assert lowering.text_of(ir.Jump(7, loc)) == ("jump 7" if debug else "")
        assert lowering.text_of(12) == "12"


def test_a_pipeline_is_made_once_for_each_set_of_flags():
    made = []
    define = passes.pipeline_kept(lambda *given: made.append(given) or len(made)).__func__
    kinds = itertools.product((None, "code"), (0, 1), (0, 1), ("untyped", "other"))
    states = [
        (SimpleNamespace(func_ir=code, flags=SimpleNamespace(no_rewrites=a, enable_ssa=b)), name)
        for code, a, b, name in kinds
    ]
    first = [define(*each) for each in states]
    assert first == [define(*each) for each in states] == [*range(1, 17)]
    assert made == states and define(states[0][0]) == 1


@pytest.mark.parametrize("checks", [True, False])
def test_a_device_function_is_translated_and_checked_once(checks):
    done = []

    def translate(self, function, *ssa):
        done.append((function, *ssa))
        return run_frontend(function)

    inliner = SimpleNamespace(validator=(lambda code: done.append("checked")) if checks else None)
    run = translated_once(translate)
    first, second = run(inliner, gets), run(inliner, gets)
    assert done == [(gets,), *["checked"] * checks]
    assert first.blocks is second.blocks and first.func_id.unique_id != second.func_id.unique_id
    run(inliner, lists)
    assert done[1 + checks :] == [(lists,), *["checked"] * checks]
    run(inliner, gets, True)  # numba's own, which is not kept
    assert done[-1] == (gets, True)


def test_calls_whose_types_are_known_are_inlined_by_numba():
    inline = inlined_in_one_walk(lambda self, *given: given)
    known = SimpleNamespace(_permit_update_type_and_call_maps=True)
    assert inline(known, 1, 2, 3, 4, 5) == (1, 2, 3, 4, 5, None)
    assert inline(known, 1, 2, 3, 4, 5, 6) == (1, 2, 3, 4, 5, 6)


@device_function
def twice(x):
    return x + x


@device_function
def fourfold(x):
    return twice(twice(x))


def test_calls_in_an_inlined_function_are_inlined_too(monkeypatch):
    """Numba looks for the called functions in a table of definitions."""

    def run_pass(self, state, run=untyped_passes.InlineInlinables.run_pass):
        run(self, state)
        left = [str(each) for block in state.func_ir.blocks.values() for each in block.body]
        defined = [str(each) for values in state.func_ir._definitions.values() for each in values]
        found.append((left, defined))
        return True

    def kernel(X):
        X[0] = fourfold(X[1])

    found = []
    with without_repeats():
        monkeypatch.setattr(untyped_passes.InlineInlinables, "run_pass", run_pass)
        cuda.compile(kernel, (array_type(1),), cc=(9, 0), device=False, abi="numba")
    left, defined = found[-1]
    assert sum(" + " in each for each in left) == sum(" + " in each for each in defined) == 2
    assert not any("call " in each for each in (*left, *defined))


def gets(X, i):
    X[i] = X[i + 1][0]


def gets_by_name(X, i, name):
    X[i] = X[name]


def sets_by_name(X, i, name):
    X[name] = i


def lists(X, i):
    X[i] = len([i, i])


KNOWN_REWRITES = rewrites.rewrite_registry.rewrites["after-inference"]


@pytest.mark.parametrize(
    "function, rewritten",
    [(gets, False), (gets_by_name, True), (sets_by_name, True), (lists, True)],
)
def test_lists_and_subscripts_that_are_strings_are_rewritten_by_numba(function, rewritten):
    typemap = {"X": array_type(1), "i": types.int64, "name": types.StringLiteral("x")}
    state = SimpleNamespace(func_ir=run_frontend(function), typemap=typemap)
    found = literals_looked_for(lambda self, state: "Numba's")(None, state)
    assert found == ("Numba's" if rewritten else True)
    further = {"after-inference": [*KNOWN_REWRITES, type("Further", (rewrites.Rewrite,), {})]}
    with mock.patch.object(rewrites.rewrite_registry, "rewrites", further):
        assert literals_looked_for(lambda self, state: "Numba's")(None, state) == "Numba's"


def test_a_variable_is_a_value_if_its_one_assignment_comes_first():
    """On each path through the function, and in the order of lowering."""

    def kernel(X, n):
        i = cuda.grid(1)
        k = 0
        while k < n:
            if k == i:
                late = X[k]
            k += 1
        X[i] = late + i

    code = run_frontend(kernel)
    lower = SimpleNamespace(func_ir=code, blocks=code.blocks)
    values_where_assigned_once(None)(lower)
    # ``late`` may be unassigned where it is read, and ``k`` is assigned twice.
    assert {"i", "k", "late", "n"} & lower._singly_assigned_vars == {"i", "n"}
    # Code is made of blocks in this order: a value must be there before it is used.
    lower.blocks = dict(reversed(code.blocks.items()))
    values_where_assigned_once(None)(lower)
    assert not {"i", "k", "late", "n"} & lower._singly_assigned_vars


@pytest.mark.parametrize("reason", ["nrt", "debuginfo", "is_generator"])
def test_numbas_own_pass_runs_where_the_ends_of_variables_are_needed(reason):
    facts = dict.fromkeys(("nrt", "debuginfo", "is_generator"), False) | {reason: True}
    state = SimpleNamespace(flags=SimpleNamespace(**facts), func_ir=SimpleNamespace(**facts))
    assert legalized_without_ends(lambda self, state: "Numba's")(None, state) == "Numba's"


def test_a_kernel_with_ends_of_variables_is_refused():
    """Numba's pass refuses them, too."""
    code = run_frontend(lambda: None)
    (block,) = code.blocks.values()
    block.body.insert(0, ir.Del("x", block.loc))
    flags = SimpleNamespace(nrt=False, debuginfo=False)
    state = SimpleNamespace(flags=flags, func_ir=code)
    with pytest.raises(errors.CompilerError, match="del found"):
        legalized_without_ends(None)(None, state)


def test_an_error_names_the_pass_and_the_cause():
    def wrong(X):
        X.nothing()

    with pytest.raises(errors.TypingError) as stock:
        cuda.compile(wrong, (array_type(1),), cc=(9, 0), device=False, abi="numba")
    with without_repeats(), pytest.raises(errors.TypingError) as shorter:
        cuda.compile(wrong, (array_type(1),), cc=(9, 0), device=False, abi="numba")
    for error in (stock, shorter):
        assert "Failed in cuda mode pipeline (step: nopython frontend)" in str(error.value)
        assert "Unknown attribute 'nothing'" in str(error.value)
        assert "During: Pass nopython_type_inference" in str(error.value)


def test_passes_are_measured_if_code_is_printed(monkeypatch, capsys):
    """Numba's setting DEBUG_PRINT_AFTER prints the code after a pass."""
    monkeypatch.setattr(compiler_machinery.config, "DEBUG_PRINT_AFTER", "reconstruct_ssa")
    with without_repeats():
        cuda.compile(lambda X: None, (array_type(1),), cc=(9, 0), device=False, abi="numba")
    assert "AFTER reconstruct_ssa" in capsys.readouterr().out


def test_fa_numbas_cuda_equals_numbas_cuda_and_itself():
    """Numba compares the modules that a kernel uses."""
    assert [device.cuda == each for each in (cuda, device.cuda, types)] == [True, True, False]


@pytest.mark.parametrize("n", [1, 2])
def test_closures_and_branches_are_found(n):
    """Functions with a closure or with a branch go through Numba's own passes."""
    done = []
    passes = {
        untyped_passes.InlineClosureLikes: lambda f: lambda X: [f(x) for x in (1, 2)],
        untyped_passes.DeadBranchPrune: lambda f: lambda X: 1 if X else 2,
    }
    for cls, make in passes.items():
        state = SimpleNamespace(func_ir=run_frontend(make(abs) if n == 1 else lambda X: X))
        (shorter,) = [each for owner, _, each in REPLACED if owner is cls]
        with contextlib.suppress(AttributeError):
            shorter(lambda self, state, cls=cls: done.append(cls) or True)(None, state)
    assert done == (list(passes) if n == 1 else [])


def test_kernels_built_together_are_those_built_alone(monkeypatch, tmp_path):
    """One kernel comes from the disk; the second is found twice there afterwards."""
    monkeypatch.setenv("FA_NUMBA_CACHE", str(tmp_path))
    first, second = kernels("fa2", "simt", "bwd")["row_sums"], kernels("standard", "mma", d=32)
    second = second["standard_softmax"]
    alone = first.built((9, 0))
    together = built_together([second, first], (9, 0))
    assert together[1] == alone
    assert kernel_cache.read(second, (9, 0)) == together[0]
    assert entry_of(together[0][0]) == together[0][1]
    assert "standard_softmax" in together[0][1] and "row_sums" in alone[1]


def test_machine_code_without_a_kernel_has_no_entry():
    with pytest.raises(RuntimeError, match=r"must contain one kernel, got \[\]"):
        entry_of(b"\x7fELF")
