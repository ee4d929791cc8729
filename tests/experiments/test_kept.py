"""Counts that are taken from the store while a run would be by the same kernels and code."""

import ast
import io
import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from rich.console import Console

import fa_numba
from experiments import block_sparse, io_vs_seqlen, profile, timeline
from experiments.lab.measure.series import row_fields
from experiments.lab.measure.workloads import one_head
from experiments.lab.record import code_digest, kept, outdated, ran, registry
from experiments.lab.record.options import FIGURES, Bench, Options
from experiments.lab.record.store import EMULATOR, MODEL, Row, Store
from experiments.lab.run import runner
from fa_numba import device, emulator
from fa_numba.choices.requests import Choices, Request
from fa_numba.device import cuda, float32, program_digest
from fa_numba.host import planning
from fa_numba.kernels.simt import softmax
from fa_numba.problem import Problem
from fa_numba.tiling import Tiles

NAME = "standing_in"


@pytest.fixture
def counting(tmp_path, monkeypatch):
    """Runs a stand-in experiment and gives the lengths that were counted; `code` is its digest,
    `files` are those of fa_numba's files, and `launch` is called for each length.
    """
    counted = []
    monkeypatch.setattr(kept, "sources", lambda: "")
    monkeypatch.setattr(ran, "code_of", lambda name: dict(run.code))
    monkeypatch.setattr(ran, "_of", lambda patterns: run.files[patterns])

    def rows(N, source, machine, value):
        common = row_fields(one_head(N, 16, False)) | {"unit": "elements", "metric": "loads"}
        yield Row(machine=machine, source=source, experiment=NAME, series="s", value=value,
                  **common)  # fmt: skip

    def count(N):
        if N == run.broken:
            raise RuntimeError("broken")
        counted.append(N)
        run.launch(N)
        yield from rows(N, "counted", EMULATOR, run.value and run.value * N)

    def measure(options, bench):
        work = [(N,) for N in options.seqlens or (32, 64)]
        for (N,) in work:
            yield from rows(N, "model", MODEL, N)
        yield from bench.counted(work, "counting", count)

    module = SimpleNamespace(measure=measure, draw=lambda rows: None)
    monkeypatch.setattr(runner, "load", lambda name: module)

    def run(**options):
        counted.clear()
        console = Console(record=True, width=120, file=io.StringIO())
        running = runner.Runner(Options(out=tmp_path, **options), [], console)
        running._origin._common["commit"] = run.commit
        running.measure(NAME)
        if running.reports[NAME].error:
            raise RuntimeError(running.reports[NAME].error)
        run.text = console.export_text()
        run.about = Store(tmp_path).provenance(NAME, EMULATOR)
        run.first, *_ = Store(tmp_path).runs(NAME, EMULATOR)
        return list(counted)

    run.value, run.commit, run.broken = 1, "1" * 40, None
    run.code, run.launch = {"experiments.standing_in": "1"}, lambda N: None
    run.files, run.csv = {ran.CALLS: "1", ran.EMULATION: "1"}, Store(tmp_path).path(NAME, EMULATOR)
    run.json = run.csv.with_suffix(".json")
    return run


def test_what_was_counted_by_the_same_is_taken(counting):
    assert counting() == [32, 64]
    assert "emulator: 2 rows, new" in counting.text
    files = {path: path.read_bytes() for path in (counting.csv, counting.json)}
    assert counting() == []
    assert "2 counts are taken from the recording (same code, kernels)" in counting.text
    assert "model: 2 rows, unchanged" in counting.text
    assert files == {path: path.read_bytes() for path in files}


def of(run, **changed):
    """The entry of the counts with other contents."""
    return run.about[kept.ENTRY] | changed


@pytest.mark.parametrize(
    "damage",
    [
        lambda run: run.json.write_text(json.dumps({k: v for k, v in run.about.items()
                                                    if k != kept.ENTRY})),
        lambda run: run.json.write_text(json.dumps(run.about | {kept.ENTRY: "none"})),
        lambda run: run.json.write_text(json.dumps(run.about | {kept.ENTRY: {"digest": 1}})),
        lambda run: run.json.write_text(json.dumps(run.about | {kept.ENTRY: of(run, rows="1")})),
        lambda run: run.json.write_text(json.dumps(run.about | {kept.ENTRY: of(run, ran=None)})),
        lambda run: run.json.write_text(json.dumps(run.about | {kept.ENTRY: of(run, ran={})})),
        lambda run: run.json.unlink(),
        lambda run: run.csv.unlink(),
        lambda run: run.csv.write_text(run.csv.read_text().replace(",elements,64", ",elements,65")),
        lambda run: run.csv.write_text("".join(run.csv.read_text().splitlines(True)[:-1])),
    ],
    ids=["no entry", "no record", "as before runs named kernels", "other rows", "no kernels",
         "no code", "no JSON", "no rows", "another number", "a row less"],
)  # fmt: skip
def test_what_is_missing_or_damaged_is_counted_anew(counting, damage):
    counting()
    store = Store(counting.csv.parents[2])
    rows = store.read(NAME, EMULATOR)
    damage(counting)
    assert counting() == [32, 64]
    assert store.read(NAME, EMULATOR) == rows
    assert {row.run for row in store.read(NAME, EMULATOR)} == {counting.first["id"]}
    assert counting() == []


@pytest.mark.parametrize("options", [{"seqlens": (32,)}, {"quick": True}, {"recount": True}])
def test_other_runs_count(counting, options):
    """Those of parts, and where it is asked for; a part's rows are no complete run's."""
    lengths = list(options.get("seqlens", (32, 64)))
    counting()
    assert counting(**options) == lengths
    assert counting() == []
    counting.csv.unlink()
    counting.json.unlink()
    assert counting(**options) == lengths
    assert counting() == ([] if "recount" in options else [32, 64])


# --- what makes another count -----------------------------------------------------------------


@pytest.mark.parametrize("change", ["code", "another module", "calls", "emulator", "other rows"])
def test_other_code_counts_again(counting, change):
    counting()
    if change == "code":
        counting.code["experiments.standing_in"] = "2"
    elif change == "another module":
        counting.code["experiments.lab.measure.series"] = "1"
    elif change == "other rows":
        counting.csv.write_text(counting.csv.read_text().replace(",elements,64", ",elements,65"))
    else:
        counting.files[{"calls": ran.CALLS, "emulator": ran.EMULATION}[change]] = "2"
    state = outdated.state(Store(counting.csv.parents[2]), NAME, EMULATOR)
    assert state.state == "outdated" and len(state.why) == 1
    assert counting() == [32, 64] and counting() == []
    assert outdated.state(Store(counting.csv.parents[2]), NAME, EMULATOR).state == "current"


def test_counts_of_unknown_code_are_of_unknown_state(counting):
    counting()
    where = Store(counting.csv.parents[2]), NAME, EMULATOR
    for entry in ({}, {"rows": "1"}, {"rows": "1", "ran": None}, "none"):
        counting.json.write_text(json.dumps(counting.about | {kept.ENTRY: entry}))
        assert outdated.state(*where).state == "unknown"


REQUEST = Request(Choices("fa2", unit="simt", tiles=Tiles(32, 32)), one_head(64, 16), True, 232448,
                  (9, 0), 0)  # fmt: skip


def launched(*plans, kernels=()):
    """Say that the kernels of these plans, and other kernels, were launched on the emulator."""
    every = [kernel for plan in plans for kernel in plan.launched]
    with device.using("emulator"):
        device.launching._note_launched([*every, *kernels], [plan.asked for plan in plans])


def with_other(monkeypatch, kernel, constant):
    """Let all plans of now launch a kernel with another function in the place of one's."""

    @cuda.jit(kernel.argument_types, kernel.threads, kernel.shared_bytes, kernel.min_blocks)
    def other(Q, K, V, O, L, scale, group, options):
        O[0, 0, 0, 0] = float32(constant)

    monkeypatch.setattr("fa_numba.kernels.simt.fa2_forward.make_forward", lambda spec: other)
    planning.planned.cache_clear()


@pytest.fixture
def plans_anew():
    """Plans that a test makes are no later test's."""
    yield
    planning.planned.cache_clear()


def test_another_kernel_counts_again(counting, monkeypatch, plans_anew):
    store, request = Store(counting.csv.parents[2]), ran.encoded(REQUEST)
    counting.launch = lambda N: launched(planning.planned(REQUEST))
    assert counting() == [32, 64] and counting() == []
    plans = counting.about[kept.ENTRY]["ran"]["plans"]
    assert list(plans) == [request] and plans[request].startswith("fa2_forward ")
    kernel = planning.planned(REQUEST).launched[0]
    for constant in (1.0, 2.0):
        with_other(monkeypatch, kernel, constant)
        assert outdated.state(store, NAME, EMULATOR).why == ("other of fa2 fwd",)
        assert counting() == [32, 64] and counting() == []
    with_other(monkeypatch, kernel, 2.0)
    assert counting() == []


def test_a_kernel_that_is_not_launched_does_not_count(counting, monkeypatch, plans_anew):
    other = replace(REQUEST, choices=replace(REQUEST.choices, algorithm="fa1"))
    counting.launch = lambda N: launched(planning.planned(other))
    assert counting() == [32, 64]
    with_other(monkeypatch, planning.planned(REQUEST).launched[0], 1.0)
    assert counting() == []


@pytest.mark.parametrize(
    "change",
    [
        lambda plan: replace(plan, split_rows=1),
        lambda plan: replace(plan, workspace=()),
        lambda plan: replace(plan, launches=plan.launches * 2),
        lambda plan: replace(plan, launches=(replace(plan.launches[0], grid=(1, 1, 1)),)),
        lambda plan: replace(plan, launches=(replace(plan.launches[0], arguments={"Q": "K"}),)),
        lambda plan: replace(plan, uncounted=("Q",)),
    ],
    ids=["rows", "workspace", "launches", "grid", "arguments", "uncounted"],
)
def test_other_launches_of_the_same_kernels_count_again(counting, monkeypatch, change):
    plan = planning.planned(REQUEST)
    counting.launch = lambda N: launched(plan)
    assert counting() == [32, 64]
    monkeypatch.setattr(ran, "plan_again", lambda request: change(plan))
    why = outdated.state(Store(counting.csv.parents[2]), NAME, EMULATOR).why
    assert why == ("launches of fa2 fwd",)
    assert counting() == [32, 64] and counting() == []


def test_a_plan_that_cannot_be_made_any_more_counts_again(counting, monkeypatch):
    plan = planning.planned(REQUEST)
    counting.launch = lambda N: launched(plan)
    counting()

    def refused(request):
        raise ValueError("no such tiles")

    with monkeypatch.context() as patch:
        patch.setattr(ran, "plan_again", refused)
        (why,) = outdated.state(Store(counting.csv.parents[2]), NAME, EMULATOR).why
        assert "no such tiles" in why
    assert counting() == []


def test_kernels_that_no_request_describes_count_again_with_their_modules(counting, monkeypatch):
    kernel = softmax.MAKERS["online"]()
    counting.launch = lambda N: launched(kernels=[kernel])
    assert counting() == [32, 64] and counting() == []
    made = counting.about[kept.ENTRY]["ran"]
    (name,) = made["kernels"]
    assert name.startswith(kernel.name) and "fa_numba.kernels.simt.softmax" in made["modules"]
    assert "fa_numba.kernels.simt.fa2_forward" not in made["modules"]
    of_module = code_digest.of_module
    other = {"fa_numba.kernels.simt.softmax": "1"}
    monkeypatch.setattr(code_digest, "of_module", lambda name: other.get(name) or of_module(name))
    why = outdated.state(Store(counting.csv.parents[2]), NAME, EMULATOR).why
    assert why == ("code of fa_numba.kernels.simt.softmax",)
    assert counting() == [32, 64] and counting() == []


def test_a_run_that_goes_on_keeps_what_the_first_part_launched(counting):
    plans = {N: planning.planned(replace(REQUEST, problem=one_head(N, 16))) for N in (32, 64)}
    counting.launch = lambda N: launched(plans[N])
    counting.broken = 64
    with pytest.raises(RuntimeError, match="broken"):
        counting()
    counting.broken = None
    assert counting() == [64]
    made = counting.about[kept.ENTRY]["ran"]["plans"]
    assert set(made) == {ran.encoded(plan.asked) for plan in plans.values()}


# --- requests as text -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "request_",
    [
        REQUEST,
        replace(REQUEST, aligned=False, multiprocessors=132, capability=(12, 0)),
        replace(REQUEST, choices=Choices("fa2", "bwd", group_splits=2, deterministic=True)),
        replace(REQUEST, choices=Choices("fa2", ablate=("swizzle", "prefetch"), return_lse=True)),
        replace(REQUEST, problem=Problem(2, 4, 2, 64, 32, 16, "float16", 0.3, True, (5, -1),
                                         q_lens=(3, 64), bias=(1, 1, 64, 32), softcap=3.5)),
    ],
    ids=str,
)  # fmt: skip
def test_a_request_is_made_again_of_its_text(request_):
    text = ran.encoded(request_)
    assert text and ran.decoded(text) == request_


def test_a_text_is_short_and_is_no_program():
    assert ran.encoded(REQUEST) == (
        "Request(choices=Choices(algorithm='fa2', tiles=Tiles(Br=32, Bc=32), unit='simt'), "
        "problem=Problem(batch=1, heads_q=1, heads_k=1, seqlen_q=64, seqlen_k=64, head_dim=16, "
        "scale=0.25), aligned=True, shared_limit=232448, capability=(9, 0), multiprocessors=0)"
    )
    for text in ("print()", "Request(", "Tiles(32, 32)", "Choices(algorithm=open('x'))", "x.y"):
        with pytest.raises(ValueError):
            ran.decoded(text)


def test_a_request_with_a_function_of_the_caller_has_no_text():
    problem = replace(REQUEST.problem, score_mod=lambda score, b, h, i, j: score + j)
    assert ran.encoded(replace(REQUEST, problem=problem)) == ran.encoded("text") == ""


def test_other_kernels_have_the_digests_of_their_machine():
    """Those of the emulator are of the functions that emulate intrinsics."""
    plan = fa_numba.plan((1, 1, 64, 16), (1, 1, 64, 16), algorithm="fa1")
    for kernel, further in [
        (plan.launched[0], set()),
        (softmax.make_safe_softmax(), {"fa_numba.host.softmax"}),
    ]:
        found = []
        for machine, emulated in ((EMULATOR, True), ("nvidia-h200", False)):
            program = program_digest.program_of(kernel, emulated=emulated)
            each = ran._launches({kernel: None}, {}, machine)
            assert each["kernels"] == [f"{kernel.name} {program.digest}"]
            assert set(each["modules"]) == program.modules | further
            found.append(program.digest)
        assert found[0] != found[1]
        # A kernel that a stored request launches is in the request's line.
        assert "kernels" not in ran._launches(plan.launched, {plan.asked: None}, EMULATOR)


def test_sources_are_the_bytes_and_places_of_python_files_and_tables(tmp_path, monkeypatch):
    monkeypatch.setattr(ran, "PACKAGE", tmp_path / "fa_numba")
    files = {"fa_numba/a.py": "1", "fa_numba/b/c.csv": "2", "experiments/d.py": "3"}

    def digest(changed):
        for path in tmp_path.rglob("*.*"):
            path.unlink()
        for name, text in (files | changed).items():
            if text:
                (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / name).write_text(text)
        return kept.sources()

    changes = [
        {"fa_numba/a.py": "2"},
        {"fa_numba/b/c.csv": "3"},
        {"experiments/d.py": "4"},
        {"experiments/d.py": ""},
        {"experiments/d.py": "", "experiments/e.py": "3"},
        {"experiments/d.py": "", "experiments/b/d.py": "3"},
        {"fa_numba/a.py": "", "fa_numba/a.csv": "1"},
    ]
    assert len({digest({}), *map(digest, changes)}) == len(changes) + 1
    assert digest({"fa_numba/a.md": "words", "figures/f.csv": "4"}) == digest({})


def test_launches_that_a_plan_no_longer_makes_are_named(plans_anew):
    text = ran.encoded(REQUEST)
    line = ran._line(ran.plan_again(REQUEST), True)
    assert ran._changed_plan(text, line, True) == []
    assert ran._changed_plan(text, f"{line}, another 123", True) == ["what fa2 fwd launches"]
    kernel, launches = line.split(", ")
    renamed = f"old{kernel}, {launches}"
    assert ran._changed_plan(text, renamed, True) == []
    other = f"{kernel}0, {launches}"
    assert ran._changed_plan(text, other, True) == ["fa2_forward of fa2 fwd"]
    (why,) = ran._changed_plan("Request(", line, True)
    assert why.startswith("a plan that cannot be made any more (")


@pytest.mark.parametrize("error", [ValueError, TypeError, KeyError])
def test_a_plan_whose_planning_raises_is_outdated(monkeypatch, error):
    monkeypatch.setattr(ran, "plan_again", mock.Mock(side_effect=error("why")))
    (why,) = ran._changed_plan(ran.encoded(REQUEST), "", True)
    assert why.startswith("a plan that cannot be made any more (") and "why" in why


def test_the_line_of_a_plan_says_all_that_its_launches_depend_on():
    shapes = ((1, 1, N, 16) for N in (64, 96))
    plan, other = (fa_numba.plan(x, x, algorithm="fa1", tiles=Tiles(16, 16)) for x in shapes)
    changes = [{name: 7} for name in ("split_rows", "kv_splits", "score_unit")]
    changes += [{name: getattr(other, name)} for name in ("workspace", "launches")]
    changes += [{"outputs": ()}, {"updated": ("K",)}]
    for emulated, further in ((True, [{"uncounted": ()}]), (False, [])):
        plans = [plan, *(replace(plan, **change) for change in (*changes, *further))]
        assert len({ran._line(each, emulated) for each in plans}) == len(plans)
    assert ran._line(replace(plan, uncounted=()), False) == ran._line(plan, False)


# --- code without words -----------------------------------------------------------------------

MODULE = """
\"\"\"Words.\"\"\"
from functools import cache

SIZES = (1, 2)  # words
NO_BARRIER = "no barrier between"

@cache
def helper(x: int) -> str:
    # words
    \"\"\"Words.

    More.\"\"\"
    text = \"\"\"one
two # no comment\"\"\"
    given: int = x
    fault(KeyError, f"{given} at {place_of(x)}", x)
    if given:
        said = f"x is {given}"
        said += f", {NO_BARRIER}" if x else ""
        raise ValueError(f"{said}: words")
    return inner(
        x, text,  # words
        "three"  # words
    )
"""


@pytest.mark.parametrize(
    ("old", "new", "changes"),
    [
        ("Words.", "Other words.", False),
        ("  # words", "", False),
        ("    # words\n", "", False),
        ("SIZES = (1, 2)", "\n\nSIZES = (1, 2)", False),
        ("SIZES = (1, 2)", "SIZES = (1, 3)", True),
        ("x: int) -> str", "x)", False),
        ("given: int = x", "given = x", False),
        ("given", "taken", False),
        (": words", ": other words", False),
        ("x is {given}", "got {given}", False),
        ('"no barrier between"', '"without a barrier"', False),
        ('NO_BARRIER = "no barrier between"\n', "", False),
        ("{place_of(x)}", "{other(x)}", False),
        (', {NO_BARRIER}"', ', unused"', False),
        ("fault(KeyError", "fault(IndexError", True),
        ("raise ValueError", "raise TypeError", True),
        ("given: int = x", "given: int = 2 * x", True),
        ("@cache\n", "", True),
        ("helper", "other", True),
        ("one\ntwo", "one\nother", True),
        ("# no comment", "", True),
        ('"three"', '"four"', True),
        ("    if given:", "    check_all(x)\n    if given:", False),
        ("    if given:", "    part._check_all(x)\n    if given:", False),
        ("    if given:", "    recheck_all(x)\n    if given:", True),
    ],
)
def test_a_digest_is_of_a_program_without_words(old, new, changes):
    assert old in MODULE
    before, after = map(code_digest.of_text, (MODULE, MODULE.replace(old, new)))
    assert (before != after) == changes


def test_the_normal_form_of_a_program_is_what_it_was():
    """A changed form would change all digests of code. All recordings would count as outdated."""
    data = Path(__file__).parents[1] / "data"
    made = code_digest.of_text((data / "normal_form.py.txt").read_text("utf-8"))
    assert made.splitlines() == (data / "normal_form.txt").read_text("utf-8").splitlines()


def test_files_have_a_digest_by_their_places(tmp_path):
    def digest(**files):
        for name, text in files.items():
            path = tmp_path / f"{name.replace('__', '/')}.py"
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        code_digest._of_file.cache_clear()
        return code_digest.of_files(tmp_path.rglob("*.py"), tmp_path)

    first = digest(a__b="x = 1")
    assert digest(a__b="x = 2") != first == digest(a__b='"""Words."""\nx = 1  # words')
    assert digest(a__c="x = 1") != first
    (tmp_path / "a/c.py").unlink()
    (tmp_path / "a/b.py").rename(tmp_path / "a/d.py")
    assert digest() != first


REPOSITORY = {
    "one": '''"""Words."""
from .lab.measure import calls
from .lab.measure.series import LABELS, plan as planned
from .lab.show import style

SIZES = (1, 2)
UNUSED = 3
for label in (SIZES,):
    label += ("loose",)
SCALES = {}
SCALES["a"] = "loose too"


def measure(options, bench):
    """Words."""
    for N in bench.each(SIZES, "words"):
        bench.say(f"{N} words")
        yield calls.time(planned, N, note="data", scales=SCALES)


def draw(rows):
    return style.new(LABELS["a"])
''',
    "lab/measure/calls": """
def time(run, N, note):
    return _inner(run, N)


def _inner(run, N):
    return run(N)


def unused():
    return 1
""",
    "lab/measure/series": """
from fa_numba import device

LABELS = {"a": "words"}


class Taken:
    size: int = 1

    def of(self, x):
        return x


def plan(N):
    return device.plan(Taken().of(N))
""",
    "lab/show/style": "def new(x):\n    return x\n",
}


@pytest.fixture
def reached(tmp_path, monkeypatch):
    """Gives what `measure` of experiment `one` reaches, with a text replaced in one file."""
    monkeypatch.setattr(code_digest, "REPOSITORY", tmp_path)

    def found(file="one", old="", new=""):
        for name, text in REPOSITORY.items():
            path = tmp_path / "experiments" / f"{name}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            assert name != file or old in text
            path.write_text(text.replace(old, new) if name == file else text)
        code_digest._module.cache_clear()
        return code_digest.reached("experiments.one", "measure")

    yield found
    code_digest._module.cache_clear()


def test_an_experiments_code_is_what_measure_reaches(reached):
    names = ["one", "lab.measure.calls", "lab.measure.series"]
    assert set(reached()) == {f"experiments.{name}" for name in names}


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("one", "Words", "Other words"),
        ("one", '"words")', '"other words")'),
        ("one", "{N} words", "other words"),
        ("one", "UNUSED = 3", "UNUSED = 4"),
        ("one", 'LABELS["a"]', 'LABELS["b"]'),
        ("one", "N in", "number in"),
        ("lab/measure/calls", "return 1", "return 2"),
        ("lab/measure/series", '"words"', '"other words"'),
        ("lab/measure/series", "size: int", "size: LABELS"),
        ("lab/show/style", "return x", "return 2 * x"),
        ("lab/measure/series", "class", "class Other:\n    Taken.x = 1\n\n\nclass"),
        ("lab/measure/series", "class", "def other():\n    Taken.x = 1\n\n\nclass"),
    ],
)
def test_words_and_what_is_not_reached_have_no_part(reached, file, old, new):
    if old == "N in":
        old, new = "N in bench", "number in bench"
        text = REPOSITORY["one"].replace(" N", " number").replace("{N}", "{number}")
        assert reached("one", REPOSITORY["one"], text) == reached()
        return
    assert reached(file, old, new) == reached()


def test_a_module_that_is_imported_by_its_whole_name_is_reached(reached, monkeypatch):
    """Of the module only the names that are used."""
    names = set(reached())
    text = REPOSITORY["one"].replace(
        "from .lab.measure import calls", "import experiments.lab.measure.calls as calls"
    )
    assert text != REPOSITORY["one"]
    monkeypatch.setitem(REPOSITORY, "one", text)
    assert set(reached()) == names
    assert reached("lab/measure/calls", "return 1", "return 2") == reached()
    assert reached("lab/measure/calls", "run(N)", "run(N + 1)") != reached()


def test_all_of_a_module_that_a_function_imports_is_reached(reached, monkeypatch):
    """Whatever the function takes from the module. A module at the top is reached in part."""
    unused = "lab/measure/calls", "return 1", "return 2"
    assert reached(*unused) == reached()
    text = REPOSITORY["one"].replace("    for", "    from .lab.measure import calls\n    for")
    monkeypatch.setitem(REPOSITORY, "one", text)
    assert reached(*unused) != reached()


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("one", "SIZES = (1, 2)", "SIZES = (1, 3)"),
        ("one", '"loose"', '"other"'),
        ("one", '"loose too"', '"other"'),
        ("one", '"data"', '"other"'),
        ("one", "calls.time", "calls._inner"),
        ("one", "plan as planned", "LABELS as planned"),
        ("lab/measure/calls", "return run(N)", "return run(N + 1)"),
        ("lab/measure/series", "size: int = 1", "size: int = 2"),
        ("lab/measure/series", "size: int", "rows: int"),
        ("lab/measure/series", "return x", "return -x"),
        ("lab/measure/series", "device.plan", "device.other"),
        ("lab/measure/series", "import device", "import emulator as device"),
    ],
)
def test_what_is_reached_has_a_part(reached, file, old, new):
    before, after = reached(), reached(file, old, new)
    changed = {name for name in before | after if before.get(name) != after.get(name)}
    assert f"experiments.{file.replace('/', '.')}" in changed


@pytest.mark.parametrize(
    ("value", "left_out"),
    [
        ("'two words'", True),
        ("f'two {words}'", True),
        ("'two ' + words", True),
        ("3 * 'two words'", True),
        ("3 * 'word'", False),
        ("3 * run('two words')", False),
        ("'word'", False),
        ("say('two words')", False),
        ("('two words', 1)", False),
        ("{'two words': 1}", False),
    ],
)
def test_a_module_is_left_without_sentences_that_nothing_uses(value, left_out):
    used = "words = 1\nrun(words)\n"
    with_it = code_digest.of_text(f"{used}NAME = {value}\n")
    assert (with_it == code_digest.of_text(used)) == left_out
    several = code_digest.of_text(f"{used}NAME, OTHER = OTHERS = {value}\n")
    assert (several == code_digest.of_text(used)) == left_out
    assert code_digest.of_text(f"{used}NAME = {value}\nrun(NAME)\n") != code_digest.of_text(used)


@pytest.mark.parametrize(
    ("value", "left_out"),
    [
        ("x + 1", True),
        ("x; other = name + 1", True),
        ("x; run(name)", False),
        ("f'{run(x)}'", True),
        ("sorted(x)", True),
        ("run(x)", False),
        ("[run(x)]", False),
        ("(y := 1)", False),
        ("(yield)", False),
        ("(await x)", False),
        ("(yield from x)", False),
        ("lambda: 1", False),
    ],
)
def test_a_function_is_left_without_values_that_nothing_uses(value, left_out):
    texts = [f"def f(x):\n    {line}\n    return x\n" for line in (f"name = {value}", "pass")]
    bodies = [code_digest.of_text(text.replace("pass", "...")) for text in texts]
    assert (bodies[0] == bodies[1]) == left_out


def test_a_module_is_left_without_imports_that_nothing_uses():
    used = "import a\nrun(a)\n"
    for unused in ("import b\n", "from b import c, d\n", "from b import *\nimport e.f as g\n"):
        assert code_digest.of_text(unused + used) == code_digest.of_text(used)
    both = "from a import b, c\nrun(b)\n"
    assert code_digest.of_text(both) == code_digest.of_text("from a import b\nrun(b)\n")


@pytest.mark.parametrize(
    ("statement", "names"),
    [
        ("a = b.c + d", {"b", "d", "a"}),
        ("def f(a, b=c): d = a; return d + e", {"c", "e"}),
        ("def f(a):\n    global g\n    def h(): return a + i\n    return h() + g", {"i", "g"}),
        ("x = [y for y in z if y > w]", {"x", "z", "w"}),
        ("f = lambda a: a + b", {"f", "b"}),
        ("class A(B):\n    c = 1\n    def d(self): return e", {"B", "e"}),
    ],
)
def test_which_global_names_a_statement_reads(statement, names):
    found = code_digest._global_names(ast.parse(statement).body[0])
    assert names - {"a", "x", "f"} <= found <= names


@pytest.mark.parametrize(
    ("statement", "names"),
    [
        ("x = y + z", set()),
        ("x += y", {"x"}),
        ("x.a = y", {"x"}),
        ("x[y] = z", {"x"}),
        ("del x[y]", {"x"}),
        ("x.a[y].b = z", {"x", "y"}),
        ("x.a(y, z)", {"x", "y", "z"}),
        ("x", {"x"}),
        ("for x in y, z: pass", {"y", "z"}),
        ("for x in y: z = x", {"y"}),
        ("if x: y.append(z)", {"y", "z"}),
        ("while x.a[y]: z += 1", {"z"}),
        ("with x as y: z = x.a", set()),
    ],
)
def test_which_values_a_statement_may_change(statement, names):
    assert set(code_digest._changed(ast.parse(statement).body[0])) == names


def test_a_module_without_a_file_has_no_digest(tmp_path, monkeypatch):
    assert code_digest.of_module("experiments.no_such_module") == ""
    monkeypatch.setattr(code_digest, "REPOSITORY", tmp_path)
    (tmp_path / "a" / "b").mkdir(parents=True)
    for path in ("a/__init__.py", "a/b/__init__.py", "a/c.py"):
        (tmp_path / path).write_text(f"run('{path}')\n")
    digests = {code_digest.of_module(name) for name in ("a", "a.b", "a.c")}
    assert len(digests) == 3 and all(len(digest) == 16 for digest in digests)
    assert code_digest.path_of("a.c") == tmp_path / "a" / "c.py"
    assert code_digest.path_of("a.d") is None and code_digest.of_module("a.d") == ""


@pytest.mark.parametrize("kind", ["def", "async def", "class"])
def test_names_within_a_function_or_class_are_not_the_modules(kind):
    inner = "(x):\n    inner = x\n" if kind != "class" else ":\n    inner = 1\n"
    (statement,) = ast.parse(f"{kind} outer{inner}").body
    assert list(code_digest._bound(statement)) == ["outer"]


def test_words_of_the_host_and_of_parts_change_nothing():
    """What the emulator's counts depend on beside kernels, with other words in it."""
    for name, old, new in (
        ("host/binding.py", r'"""(?=\w)', '"""Other. '),
        ("host/binding.py", "must be", "has to be"),
        ("host/execution.py", r'"""(?=\w)', '"""Other. '),
        ("ops.py", "must be|is given", "has to be"),
        ("ops.py", r'"""(?=\w)', '"""Other. '),
        ("emulator/groups.py", r'"""(?=\w)', '"""Other. '),
    ):
        text = (ran.PACKAGE / name).read_text()
        other, changes = re.subn(old, new, text)
        assert changes and code_digest.of_text(other) == code_digest.of_text(text), name
    assert {name.partition("/")[0] for name in ran.CALLS} >= {"ops.py", "host", "device"}


@pytest.mark.in_turn("name")
@pytest.mark.parametrize("name", (*registry.names(), "tune"))
def test_every_experiments_code_is_found(name):
    found = ran.code_of(name)
    assert f"experiments.{name}" in found or name == "tune"
    assert not any(each.startswith(code_digest.NO_PART) for each in found)


@pytest.mark.parametrize("name", ["io_vs_seqlen", "block_size", "block_sparse", "timeline",
                                  "profile"])  # fmt: skip
def test_with_rows_kept_an_experiment_launches_nothing(name, monkeypatch):
    """Its closed forms are computed again, and are those of a run that counts."""
    monkeypatch.setattr(emulator, "launch", lambda *_, **__: pytest.fail("launched"))
    marker = [SimpleNamespace()]
    found = list(registry.load(name).measure(Options(), Bench(kept=marker, say=lambda text: None)))
    assert found.count(marker) == 1
    rows = [r for part in found if part is not marker
            for r in (part if isinstance(part, list) else [part])]  # fmt: skip
    assert {row.machine for row in rows} <= {MODEL}
    stored = {r.key + (r.note,) for r in Store(FIGURES).read(name, MODEL)}
    if name in ("timeline", "block_sparse"):
        assert {r.key + (r.note,) for r in rows} == stored


def test_each_of_these_counts(monkeypatch):
    """The emulator is what an experiment without kept rows runs on."""
    launched = []

    def launch(*_, **__):
        launched.append(1)
        raise KeyboardInterrupt

    monkeypatch.setattr(emulator, "launch", launch)
    for module in (io_vs_seqlen, block_sparse, timeline, profile):
        with pytest.raises(KeyboardInterrupt):
            list(module.measure(Options(quick=True), Bench(say=lambda text: None)))
    assert len(launched) == 4


@pytest.mark.parametrize("turn", [1, -1])
def test_what_is_kept_is_written_in_alphabetical_order(tmp_path, turn):
    """Whatever the order of its facts."""
    store, facts = Store(tmp_path), [("b", {"d": 1, "c": 2}), ("a", 3)][::turn]
    path = store.path("standing_in", EMULATOR, ".json")
    path.parent.mkdir(parents=True)
    kept.keep(store, "standing_in", {"commit": "1"}, dict(facts))
    text = path.read_text()
    assert text == json.dumps(json.loads(text), indent=2, sort_keys=True) + "\n"
    assert '"c": 2' in text


def test_what_is_kept_says_when_and_at_which_commit_it_was_counted(tmp_path):
    store, about = Store(tmp_path), {"commit": "1", "date": "2026-01-02", "dirty": True}
    store.path("standing_in", EMULATOR).parent.mkdir(parents=True)
    kept.keep(store, "standing_in", about | {"machine": "m"}, {"code": {}})
    found = store.provenance("standing_in", EMULATOR)[kept.ENTRY]
    assert found == about | {"ran": {"code": {}}, "rows": kept.digest([])}
