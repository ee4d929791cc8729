"""The kernels of one pass differ where the papers differ, and nowhere else."""

import ast
import difflib
import inspect
import re
from pathlib import Path

import pytest

from fa_numba import kernels, parts
from fa_numba.kernels import mma, wgmma
from fa_numba.kernels.simt import (
    fa1_backward,
    fa1_forward,
    fa2_backward,
    fa2_forward,
    standard,
    standard_backward,
)

TWINS = (fa1_forward, fa2_forward)
BACKWARD_TWINS = (fa1_backward, fa2_backward)
MMA_TWINS = (mma.fa1_forward, mma.fa2_forward)
MMA_BACKWARD_TWINS = (mma.fa1_backward, mma.fa2_backward)
# Their kernels are a producer and a consumer each.
WGMMA_TWINS = (wgmma.fa1_forward, wgmma.fa2_forward)
WGMMA_BACKWARD_TWINS = (wgmma.fa1_backward, wgmma.fa2_backward)
KERNELS = (*TWINS, standard, *BACKWARD_TWINS, standard_backward)
FLASH = (*TWINS, *BACKWARD_TWINS, *MMA_TWINS, *MMA_BACKWARD_TWINS)

each_twins = pytest.mark.parametrize(
    "twins",
    [TWINS, BACKWARD_TWINS, MMA_TWINS, MMA_BACKWARD_TWINS],
    ids=["fwd", "bwd", "fwd-mma", "bwd-mma"],
)
each_flash_of_all = pytest.mark.parametrize(
    "module", (*FLASH, *WGMMA_TWINS, *WGMMA_BACKWARD_TWINS), ids=lambda m: m.__name__[-17:]
)
each_flash = pytest.mark.parametrize("module", FLASH, ids=lambda m: m.__name__[-16:])


def text(module):
    return inspect.getsource(module)


def factory(module):
    """(make_forward or make_backward, the kernel inside) as syntax trees."""
    functions = [n for n in ast.parse(text(module)).body if isinstance(n, ast.FunctionDef)]
    (made,) = [f for f in functions if f.name in ("make_forward", "make_backward")]
    nested = [n for n in made.body if isinstance(n, ast.FunctionDef)]
    (kernel,) = [f for f in nested if ast.unparse(f.decorator_list[0]).startswith("cuda.jit(")]
    return made, kernel


def factory_of(module, function):
    """The first factory with `function` inside, as a syntax tree."""
    functions = [n for n in ast.parse(text(module)).body if isinstance(n, ast.FunctionDef)]
    return next(f for f in functions if function in [getattr(n, "name", "") for n in f.body])


def assigned(body):
    """name (or "name, name") -> source of the value, for the assignments of `body`, in order."""
    assignments = [node for node in body if isinstance(node, ast.Assign)]
    return {ast.unparse(n.targets[0]).strip("()"): ast.unparse(n.value) for n in assignments}


def in_common(one, other):
    """The entries of `one` that `other` has too, in order."""
    return [x for x in one if x in other]


def ideas_of(made):
    """The names that a factory binds to parts: ``load, scores = bind(spec, ...)``."""
    return {
        name.id
        for n in made.body
        if isinstance(n, ast.Assign)
        and re.match(r"bind\(|wgmma\.pipelines\(", ast.unparse(n.value))
        for name in ast.walk(n.targets[0])
        if isinstance(name, ast.Name)
    }


def parts_used(module, function=None):
    """The parts, as "load.q", that the kernel, or a function beside it, calls, in the order in
    which they first stand there; of a function, those of the functions that it calls, too.
    """
    made, kernel = factory(module)
    if function is not None:
        made = factory_of(module, function)
    beside = {n.name: n for n in made.body if isinstance(n, ast.FunctionDef)}
    ideas = ideas_of(made)

    def of(body):
        calls = [n.func for n in ast.walk(body) if isinstance(n, ast.Call)]
        for call in sorted(calls, key=lambda n: (n.lineno, n.col_offset)):
            if isinstance(call, ast.Attribute) and ast.unparse(call.value) in ideas:
                yield ast.unparse(call)
            elif function is not None and isinstance(call, ast.Name) and call.id in beside:
                yield from of(beside[call.id])

    return list(dict.fromkeys(of(kernel if function is None else beside[function])))


@each_twins
def test_one_factory_of_one_name_and_parameter(twins):
    assert len({factory(m)[0].name for m in twins}) == 1
    for module in twins:
        made, kernel = factory(module)
        parameters = [a.arg for a in made.args.args]
        atomic = kernel.name == "fa2_backward"
        assert parameters == ["spec", *(["atomic"] if atomic else [])]
        assert [ast.unparse(d) for d in made.decorator_list] == ["cache"]
        assert kernel.name == module.__name__.rpartition(".")[2]


# FA-1 goes over row tiles within column tiles, O, l and m through memory; FA-2 the other way.
LOOPS = (
    {f"fa1_state.{n}" for n in ("initialise", "read_state", "write_state", "write_logsumexp")}
    | {"visits.own_rows", "visits.column_passes", "visits.rows_seen"}
    | {"load.next_q", "softmax.scale_rows"},
    {"grid.row_tile", "visits.columns_seen", "visits.share_of_columns", "load.next_k"}
    | {"softmax.start", "softmax.logsumexp", "epilogue.write_split"},
)
# D in every pass, dQ started, read and written; or D before, dQ by atomic adds.
PASSES = (
    {"gradients.initialise_dq", "gradients.row_dots"}
    | {"visits.backward_passes", "visits.rows_of_pass"},
    {"visits.row_range"},
)


@pytest.mark.parametrize(
    "twins, only_first, only_second",
    [
        (
            TWINS,
            LOOPS[0] | {"visits.row_ahead"},
            LOOPS[1] | {"epilogue.write_rows", "values.write"},
        ),
        (
            BACKWARD_TWINS,
            PASSES[0] | {"gradients.update_rows"},
            PASSES[1] | {"gradients.add_rows"},
        ),
        # Where warps split the keys, or leave sums to the end; loads of one stage or of two.
        (
            MMA_TWINS,
            LOOPS[0]
            | {"load.shared_memory", "load.k", "load.v"}
            | {"softmax.online", "softmax.combine", "visits.row_ahead"},
            LOOPS[1] - {"softmax.start"}
            | {"load.first_columns", "load.columns_early", "softmax.online_of_lanes"}
            | {"softmax.start_of_lanes", "softmax.rescale_rows", "softmax.sum_lanes"}
            | {"epilogue.write_tile", "epilogue.write_values"}
            | {"products.finish_output"},  # of e4m3 pages, which only FA-2 reads
        ),
        # With row tiles O for D, or D itself.
        (
            MMA_BACKWARD_TWINS,
            PASSES[0]
            | {f"row_tiles.{n}" for n in ("load_with_o", "at_with_o")}
            | {"gradients.read_dq", "gradients.write_dq"},
            PASSES[1]
            | {f"row_tiles.{n}" for n in ("load", "at")}
            | {"gradients.start_dq", "gradients.add_dq"},
        ),
    ],
    ids=["fwd", "bwd", "fwd-mma", "bwd-mma"],
)
def test_the_parts_have_the_same_names_and_order(twins, only_first, only_second):
    used = [parts_used(m) for m in twins]
    # The tile that stays, Kj or Qi, is loaded first; FA-1's splits of the queries ask for rows.
    moved = "load.[qkv]|load.columns|grid.query_rows"
    first, second = ([n for n in names if not re.fullmatch(moved, n)] for names in used)
    assert in_common(first, second) == in_common(second, first)
    assert len(in_common(first, second)) >= (10 if twins is MMA_TWINS else 12)
    # What only one of them has is what the second paper changed.
    assert set(used[0]) - set(used[1]) == only_first
    assert set(used[1]) - set(used[0]) == only_second


@each_twins
def test_shared_memory_and_registers_are_declared_alike(twins):
    first, second = (assigned(factory(m)[1].body) for m in twins)
    for kind, prefix in (("shared_memory()", "s"), ("cuda.local.array(", "r")):
        arrays = [
            [(n, v) for n, v in body.items() if kind in v and "shape" not in v]
            for body in (first, second)
        ]
        if twins is MMA_TWINS and kind == "shared_memory()":  # FA-2's K and V are in stages
            assert len(arrays[0]) == 1 and second["sQ"] == "half_tile(0, NQ)"
            continue
        if twins is MMA_BACKWARD_TWINS and kind == "shared_memory()":  # FA-2 has D with row tiles
            arrays = [[(n.replace("sD", "_"), v) for n, v in found] for found in arrays]
        assert arrays[0] == arrays[1] and arrays[0]
        names = [name for n, _ in arrays[0] for name in n.split(", ") if name != "_"]
        assert len(names) >= 4 and all(n.startswith(prefix) for n in names)
    names = in_common(first, second)
    assert sum(name.count(",") + 1 for name in names) >= 12
    for name in names:  # FA-1 has passes over columns, FA-2 visits
        alike = first[name] == second[name]
        assert alike != (name == "j0, j_end"), f"{name} is computed differently"


@pytest.mark.parametrize(
    "twins, only_first, only_second",
    [
        (TWINS, ["l", "m", "split_rows"], []),
        (BACKWARD_TWINS, ["O", "split_rows"], ["D"]),
        (MMA_TWINS, ["A", "l", "m", "split_rows"], []),
        (MMA_BACKWARD_TWINS, ["O", "dQ", "split_rows"], ["D"]),
    ],
    ids=["fwd", "bwd", "fwd-mma", "bwd-mma"],
)
def test_parameters_stand_in_one_order(twins, only_first, only_second):
    first, second = ([a.arg for a in factory(m)[1].args.args] for m in twins)
    assert in_common(first, second) == in_common(second, first)
    assert [p for p in first if p not in second] == only_first
    assert [p for p in second if p not in first] == only_second


def test_twins_on_hoppers_unit():
    """Consumers of both orders take one tile in one order, and say its lines alike."""
    first, second = (factory(m) for m in WGMMA_TWINS)
    assert first[0].name == second[0].name
    parameters = [[a.arg for a in kernel.args.args] for _, kernel in (first, second)]
    assert [p for p in parameters[0] if p not in parameters[1]] == ["A", "l", "m", "split_rows"]
    assert [p for p in parameters[1] if p not in parameters[0]] == ["taken"]
    assert in_common(*parameters) == in_common(*parameters[::-1])
    # FA-2 begins the next tile before this one's end.
    later = {
        "products.begin_output",
        *(f"{x}_pipeline.{n}" for x in "qkv" for n in ("wait", "next")),
    }
    used = [[n for n in parts_used(m, "consume") if n not in later] for m in WGMMA_TWINS]
    assert in_common(*used) == in_common(*used[::-1]) and len(in_common(*used)) >= 8
    # One carries O, l and m through memory, and S leaves registers for P; the other takes work
    # tiles of a scheduler in ping-pong, and sums l and scales O at last. It also runs without a
    # producer warpgroup, for FA-3's Table 2: the consumers then load columns.
    only = [{n.partition(".")[0] for n in set(a) - set(b)} for a, b in (used, used[::-1])]
    assert only[0] == {"fa1_state", "visits", "q_pipeline", "softmax"}
    assert only[1] == {"scheduler", "pingpong", "softmax", "products", "epilogue", "load"}
    # Each says the lines of its own algorithm, FA-1 those of the other beside them.
    named = [re.findall(rf"# .*?FA-2 lines? ({NUMBERS})", text(m)) for m in WGMMA_TWINS]
    assert {*named[0]} == {*named[1]} and len(named[0]) >= 7
    own = re.findall(rf"# (?:Alg\. 1|FA-1) lines? ({NUMBERS})", text(wgmma.fa1_forward))
    assert {int(n) for numbers in own for n in numbers.split(", ")} == {2, *range(5, 14)}


def test_backward_twins_on_hoppers_unit():
    """Consumers of both orders take a row tile by the same steps, and say their own lines."""
    first, second = (factory(m) for m in WGMMA_BACKWARD_TWINS)
    assert first[0].name == second[0].name
    parameters = [[a.arg for a in kernel.args.args] for _, kernel in (first, second)]
    assert [p for p in parameters[0] if p not in parameters[1]] == ["O", "dQ", "split_rows"]
    assert [p for p in parameters[1] if p not in parameters[0]] == ["D"]
    assert in_common(*parameters) == in_common(*parameters[::-1])
    used = [parts_used(m, "consume") for m in WGMMA_BACKWARD_TWINS]
    assert in_common(*used) == in_common(*used[::-1]) and len(in_common(*used)) >= 20
    # One goes over the columns, has a word of what comes next, and carries dQ through memory; the
    # other adds to it, and drops.
    only = [set(a) - set(b) for a, b in (used, used[::-1])]
    own = [{n for n in names if n.startswith(("gradients", "visits"))} for names in only]
    assert own == [
        {"visits.rows_of_pass", "visits.row_sees_more"},
        {
            *("gradients.scale_and_bias", "gradients.add_dq", "gradients.write_columns"),
            *("gradients.scale_dv", "gradients.write_dv", "visits.next_visit"),
        },
    ]
    assert {n.partition(".")[0] for n in only[0]} == {
        *("fa1_gradients", "visits", "grid", "d_pipeline", "kv_pipeline", "scores"),
    }
    names = {n.partition(".")[0] for n in only[1]}
    assert names == {"gradients", "key_tiles", "drawing", "scores", "visits"}
    taken = [steps(m, "consume", "more") for m in WGMMA_BACKWARD_TWINS]
    assert in_common(*taken) == in_common(*taken[::-1]) and len(in_common(*taken)) >= 17
    # Every line of each algorithm's inner loop, and what stands around it.
    for module, algorithm, lines in (
        (wgmma.fa1_backward, 4, set(range(5, 25)) - {14, 15, 18, 23}),
        (wgmma.fa2_backward, 2, set(range(6, 19)) - {17}),
    ):
        named = re.findall(rf"# Alg\. {algorithm} lines? ({NUMBERS})", text(module))
        paper = module.__name__.rpartition(".")[2][:3].upper().replace("FA", "FA-")
        named += re.findall(rf"# .*?{paper} lines? ({NUMBERS})", text(module))
        assert lines == {int(n) for numbers in named for n in numbers.split(", ")}
    both = [re.findall(r"# (FA-1 .*)", text(m)) for m in WGMMA_BACKWARD_TWINS]
    assert both[0] == both[1] and len(both[0]) >= 11


def steps(module, function=None, condition="i0 < i_end"):
    """The statements of the innermost loop, over row tiles, with `atomic` True."""
    _, kernel = factory(module)
    if function is not None:
        made = factory_of(module, function)
        (kernel,) = (n for n in made.body if getattr(n, "name", "") == function)
    loops = [n for n in ast.walk(kernel) if isinstance(n, ast.While)]
    (inner,) = [n for n in loops if ast.unparse(n.test) == condition]
    found = []
    for node in inner.body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "atomic":
            found += map(ast.unparse, node.body)
        else:
            found.append(ast.unparse(node))
    return [re.sub(r"\batomic\b", "True", step) for step in found]


def test_a_row_tile_is_taken_alike_backward():
    first, second = (steps(m) for m in BACKWARD_TWINS)
    assert in_common(first, second) == in_common(second, first)
    own = [
        [s.partition("(")[0] for s in a if s not in b]
        for a, b in ((first, second), (second, first))
    ]
    assert own == [
        ["gradients.row_dots", "gradients.update_rows"],
        ["values.read", "gradients.add_rows"],
    ]
    assert len(first) == len(second) >= 18


def test_a_row_tile_is_taken_alike_backward_on_tensor_cores():
    # FA-1 loads the next row tile early or late.
    source = text(mma.fa1_backward)
    loads = re.findall(r"if (.*):(?:  # .*)?\n +i_next = visits\.row_after\(", source)
    assert loads == ["EARLY", "not EARLY"] and source.count("load_with_o(") == 3
    left_out = ("cuda.syncthreads()", "commit_async()")
    first, second = ([s for s in steps(m) if s not in left_out] for m in MMA_BACKWARD_TWINS)
    assert in_common(first, second) == in_common(second, first)
    # O is loaded, D made, dQ read and written; or D is loaded, dQ starts from 0 and is added.
    own = [[s.partition("(")[0] for s in a if s not in b and "(" in s.split()[0]]
           for a, b in ((first, second), (second, first))]  # fmt: skip
    assert own[0] == [f"gradients.{n}" for n in ("row_dots", "read_dq", "write_dq")]
    assert own[1] == ["gradients.start_dq", "gradients.add_dq"]
    assert len(in_common(first, second)) >= 17


# Lines of two bodies that only one of them has, a comment being a line. Four are of FA-2's splits,
# and one is of its pages in e4m3.
DIFFER = {TWINS: 53, BACKWARD_TWINS: 25, MMA_TWINS: 74, MMA_BACKWARD_TWINS: 52}


def differing(*bodies):
    """(Lines that only one of the two bodies has, lines of both), without indentation."""
    bodies = [[line.strip() for line in body if line.strip()] for body in bodies]
    matcher = difflib.SequenceMatcher(None, *bodies, autojunk=False)
    same = sum(block.size for block in matcher.get_matching_blocks())
    lines = sum(map(len, bodies))
    return lines - 2 * same, lines


def lines_of(module, which):
    node = factory(module)[which]
    return text(module).splitlines()[node.lineno - 1 : node.end_lineno]


def factory_lines(module):
    """The lines of the factories of the consumer and of the kernel, without their docstrings."""
    made, consumer = factory(module)[0], factory_of(module, "consume")
    found = text(module).splitlines()
    nodes = [consumer] if made.name == consumer.name else [consumer, made]
    return [line for n in nodes for line in found[n.body[0].end_lineno : n.end_lineno]]


@each_twins
def test_bodies_differ_in_few_lines(twins):
    differ, lines = differing(*(lines_of(module, 1) for module in twins))
    assert differ <= DIFFER[twins], f"{differ} of {lines} lines differ"


@pytest.mark.parametrize(
    "twins, shared",
    [(WGMMA_TWINS, 0.39), (WGMMA_BACKWARD_TWINS, 0.405)],
    ids=["fwd-wgmma", "bwd-wgmma"],
)
def test_producers_and_consumers_share_lines(twins, shared):
    """Forward FA-2 alone has work tiles, products on their way during the softmax, pages, splits,
    planes and a form without a producer warpgroup: half of what differs.
    """
    differ, lines = differing(*map(factory_lines, twins))
    assert lines - differ >= shared * lines, f"{differ} of {lines} lines differ"


@each_flash_of_all
def test_the_algorithm_begins_near_the_top(module):
    lines = text(module).splitlines()
    named = (
        n for n, line in enumerate(lines, 1) if re.search(r"# (Alg\. \d|FA-\d) lines? \d", line)
    )
    assert next(named) <= 45


@each_flash
def test_a_factory_is_mostly_its_kernel(module):
    """Imports, bindings, constants and the kernel's arguments are a third of the lines at most."""
    made, kernel = factory(module)
    lines = text(module).splitlines()
    docstring = ast.parse(text(module)).body[0]
    whole = [line for line in lines[docstring.end_lineno : made.end_lineno] if line.strip()]
    body = [line for line in lines[kernel.lineno - 1 : kernel.end_lineno] if line.strip()]
    assert 3 * (len(whole) - len(body)) <= len(whole)


def test_both_docstrings_have_the_same_parts():
    for module in KERNELS:
        doc = module.__doc__
        assert "arXiv" in doc and "Algorithm" in doc and "Accesses, elements per head" in doc
    for twins in (TWINS, BACKWARD_TWINS):
        first, second = (re.search(r"Shared memory, floats: .*", m.__doc__)[0] for m in twins)
        assert first == second


def test_every_barrier_says_what_it_is_for():
    for module in FLASH:
        before = ""
        for line in text(module).splitlines():
            if "cuda.syncthreads()" in line:
                assert "  # " in line or before.lstrip().startswith("# "), line
            before = line


def test_one_shared_array_a_line():
    for module in KERNELS:
        for line in text(module).splitlines():
            assert line.count("shared_tile(") <= 1


NUMBERS = r"\d+(?:, \d+)*"


def lines_named(module, algorithm):
    """The lines of the module's algorithm that comments of the kernel name.

    "Alg. 1 lines 6, 8: ..." is of this kernel; "FA-1 lines 10, 11, FA-2 line 9: ..." is a step of
    both papers' algorithms of one pass, each with its own numbers.
    """
    paper = module.__name__.rpartition(".")[2][:3].upper().replace("FA", "FA-")
    kernel = factory(module)[1]
    body = "\n".join(text(module).splitlines()[kernel.lineno - 1 : kernel.end_lineno])
    named = re.findall(rf"# Alg\. {algorithm} lines? ({NUMBERS})", body)
    for comment in re.findall(rf"# (FA-\d lines? {NUMBERS}.*?)(?::| of the next)", body):
        named += re.findall(rf"{paper} lines? ({NUMBERS})", comment)
    return {int(n) for numbers in named for n in numbers.split(", ")}


@pytest.mark.parametrize(
    "module, algorithm, lines",
    [
        (fa1_forward, 1, set(range(5, 14)) | {2}),
        # 11 and 16 end loops
        (fa2_forward, 1, set(range(3, 16)) - {11}),
        (mma.fa1_forward, 1, set(range(5, 14)) | {2}),
        (mma.fa2_forward, 1, set(range(3, 16)) - {11}),
        # 23 ends a loop
        (fa1_backward, 4, set(range(5, 25)) - {23}),
        # 17 ends a loop; 3 and 4 stand before it, in a kernel of their own
        (fa2_backward, 2, set(range(5, 19)) - {17}),
        (mma.fa1_backward, 4, set(range(5, 25)) - {23}),
        (mma.fa2_backward, 2, set(range(5, 19)) - {17}),
    ],
    ids=lambda value: getattr(value, "__name__", "")[-16:] or None,
)
def test_every_line_of_each_algorithm_is_named(module, algorithm, lines):
    named = lines_named(module, algorithm)
    assert lines <= named, f"not named: {sorted(lines - named)}"
    assert named <= lines | {1, 3, 4}, f"no line of it: {sorted(named - lines)}"


@each_twins
def test_steps_of_both_orders_are_named_alike(twins):
    first, second = (re.findall(r"# (FA-1 .*)", text(m)) for m in twins)
    assert first == second and len(first) >= 5


def test_float_literals_are_typed():
    """A bare 0.0 or 1e-3 makes float64 arithmetic."""
    files = [f for p in (kernels, parts) for f in Path(p.__path__[0]).rglob("*.py")]
    assert len(files) >= 30
    for file in files:
        tree = ast.parse(file.read_text(encoding="utf-8"))
        wrapped = {
            id(argument)
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "float32"
            for argument in ast.walk(node)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, float):
                assert id(node) in wrapped, f"{file}:{node.lineno}: {node.value}"
