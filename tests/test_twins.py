"""fa1_forward.py and fa2_forward.py differ where the papers differ, and nowhere else."""

import ast
import inspect
import re

import pytest

from fa_numba.kernels.simt import fa1_forward, fa2_forward, standard

TWINS = (fa1_forward, fa2_forward)
KERNELS = (*TWINS, standard)


def text(module):
    return inspect.getsource(module)


def factory(module):
    """(make_forward, the kernel inside) as syntax trees."""
    functions = [n for n in ast.parse(text(module)).body if isinstance(n, ast.FunctionDef)]
    (made,) = [f for f in functions if f.name == "make_forward"]
    (kernel,) = [n for n in made.body if isinstance(n, ast.FunctionDef)]
    return made, kernel


def assigned(body):
    """name -> source of the value, for the plain assignments of `body`, in order."""
    found = {}
    for node in body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = ast.unparse(node.value)
    return found


def in_common(one, other):
    """The entries of `one` that `other` has too, in order."""
    return [x for x in one if x in other]


def test_one_factory_of_one_name_and_parameter():
    for module in TWINS:
        made, kernel = factory(module)
        assert [a.arg for a in made.args.args] == ["spec"]
        assert [ast.unparse(d) for d in made.decorator_list] == ["cache"]
        assert kernel.name == module.__name__.rpartition(".")[2]


def test_the_helpers_have_the_same_names_and_order():
    first, second = (assigned(factory(m)[0].body) for m in TWINS)
    helpers = [
        [n for n, value in made.items() if value.startswith("make_")] for made in (first, second)
    ]
    assert in_common(*helpers) == in_common(*reversed(helpers))
    for name in in_common(*helpers):
        assert first[name] == second[name], f"{name} is made differently"
    # What only one of them has is what the second paper changed.
    only_first, only_second = (set(a) - set(b) for a, b in (helpers, helpers[::-1]))
    assert only_first == {"read_rows", "read_values", "scale_rows"}
    assert only_second == set()
    for name in helpers[0] + helpers[1]:
        assert (first | second)[name].startswith(f"make_{name}(") or name.startswith("load_")


def test_shared_memory_and_registers_are_declared_alike():
    first, second = (assigned(factory(m)[1].body) for m in TWINS)
    for kind in ("shared_tile(", "cuda.local.array("):
        arrays = [
            [(n, v) for n, v in body.items() if v.startswith(kind)] for body in (first, second)
        ]
        assert arrays[0] == arrays[1] and len(arrays[0]) >= 4
        prefix = "s" if kind == "shared_tile(" else "r"
        assert all(n.startswith(prefix) for n, _ in arrays[0])
    common = in_common(first, second)
    assert {"tx", "ty", "h", "b", "Nq", "Nk", "j_end", "j0"} <= set(common)
    for name in ("tx", "ty", "h", "b", "Nq", "Nk", "j_end", "j0"):
        assert first[name] == second[name], f"{name} is computed differently"


def test_parameters_stand_in_one_order():
    first, second = ([a.arg for a in factory(m)[1].args.args] for m in TWINS)
    assert in_common(first, second) == second
    assert [p for p in first if p not in second] == ["l", "m", "split_rows"]


def test_both_docstrings_have_the_same_parts():
    for module in KERNELS:
        doc = module.__doc__
        assert "arXiv" in doc and "Algorithm" in doc and "Accesses, elements per head" in doc
    first, second = (re.search(r"Shared memory, floats: .*", m.__doc__)[0] for m in TWINS)
    assert first == second


def test_every_barrier_says_what_it_is_for():
    for module in TWINS:
        before = ""
        for line in text(module).splitlines():
            if "cuda.syncthreads()" in line:
                assert "  # " in line or before.lstrip().startswith("# "), line
            before = line


def test_one_shared_array_a_line():
    for module in KERNELS:
        for line in text(module).splitlines():
            assert line.count("shared_tile(") <= 1


def lines_named(module):
    """The lines of Algorithm 1 that comments of the kernel name."""
    named = set()
    for comment in re.findall(r"# Alg\. 1 lines? ([\d, ]+)", text(module)):
        named |= {int(n) for n in re.findall(r"\d+", comment)}
    return named


@pytest.mark.parametrize(
    "module, lines",
    [
        (fa1_forward, set(range(5, 14))),
        # 11 and 16 end loops
        (fa2_forward, set(range(3, 16)) - {11}),
    ],
    ids=["fa1", "fa2"],
)
def test_every_line_of_algorithm_1_is_named(module, lines):
    assert lines <= lines_named(module), f"not named: {sorted(lines - lines_named(module))}"


def test_float_literals_are_typed():
    """A bare 0.0 or 1e-3 makes float64 arithmetic."""
    for module in KERNELS:
        tree = ast.parse(text(module))
        wrapped = {
            id(argument)
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "float32"
            for argument in ast.walk(node)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, float):
                assert id(node) in wrapped, f"{module.__name__}:{node.lineno}: {node.value}"
