"""Digests of kernels' programs: what changes one, and that equal ones have equal PTX."""

import ast
import functools
import importlib.util
import itertools
import math
import sys
import textwrap
from collections import namedtuple
from fractions import Fraction
from types import FunctionType, SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
from compare_ptx import ptx_of, without_names
from llvmlite import ir
from numba import types
from numba.core import utils

import fa_numba
from fa_numba import device
from fa_numba.device import launching, program_digest
from fa_numba.device.front_end import without_repeats
from fa_numba.device.program_digest import Unknown, program_of, template
from fa_numba.host.planning import planned

PARTS = '''"""Words."""
import numpy as np

from fa_numba.device import cuda, device_function, float32, types, uint32
from fa_numba.device.signature import array_type
from fa_numba.intrinsics._build import emulated_by, of_registers
from fa_numba.intrinsics.arithmetic import exp2, log2
from numba.cuda.extending import intrinsic

STEP = 3


def doubled(text):
    """Words."""
    return text + " "


@emulated_by(lambda x: x * 1.0)
@intrinsic
def same(typingctx, x):
    """Words."""
    if x != types.float32:
        raise TypeError("x is no float32")
    return of_registers(doubled("mov.b32 $0, $1;"), types.float32, x)


def helper(x, y=2, z=1):
    """Words."""
    # words
    total: float = exp2(x) + float32(y * STEP)
    return same(total) - float32(z)


'''
KERNEL = '''
def make(factor=2, threads=32, bounds=1, ndim=1):
    inner = device_function(helper)
    rounds = factor

    @cuda.jit((array_type(ndim), array_type(ndim)), threads, 0, bounds)
    def kernel(X, Y):
        """Words."""
        n = uint32(cuda.threadIdx.x)
        for k in range(rounds):
            Y[n] += inner(X[n], z=float32(k), y=uint32(7))

    return kernel
'''
TEXT = PARTS + KERNEL
# Edits that leave the program as it is.
EQUAL = {
    "docstrings": [('"""Words."""', '"""Other words, on\n    two lines."""')],
    "no docstring": [('    """Words."""\n    # words\n', "")],
    "comments": [("    # words\n", "    # other words\n\n")],
    "lines": [("STEP = 3\n", "\n\n\nSTEP = 3\n")],
    "annotations": [("total: float =", "total ="), ("def helper(x, ", "def helper(x: int, ")],
    "messages": [('"x is no float32"', '"x must be a float32"')],
    "locals": [("total", "whole"), ("for k in", "for turn in"), ("float32(k)", "float32(turn)")],
    "parameters": [("X", "first"), ("typingctx", "context")],
    "keywords": [("x, y=2, z=1", "x, a=2, b=1"), ("y * ", "a * "), ("(z)", "(b)"),
                 ("z=float32", "b=float32"), ("y=uint32", "a=uint32")],
    "names": [("helper", "renamed"), ("kernel", "other"), ("same", "as_is"), ("doubled", "twice")],
    "decorators": [("def helper(", "@device_function\ndef helper("),
                   ("device_function(helper)", "helper")],
    "outer names": [("STEP", "PACE"), ("rounds", "turns"), ("inner", "part")],
}  # fmt: skip
UNLIKE = {
    "constant": [("STEP = 3", "STEP = 4")],
    "operator": [("+ float32(y", "- float32(y")],
    "function": [("exp2(x)", "log2(x)")],
    "instruction": [("mov.b32 $0", "neg.f32 $0")],
    "helper of an intrinsic": [('text + " "', 'text + ";"')],
    "type": [("n = uint32(", "n = int(")],
    "closed-over value": [("rounds = factor", "rounds = factor + 1")],
    "argument": [("inner(X[n]", "inner(Y[n]")],
    "argument by name": [("z=float32(k), y=uint32(7)", "y=float32(k), z=uint32(7)")],
    "default": [("y=2", "y=4"), (", y=uint32(7)", "")],
    "threads": [("threads=32", "threads=64")],
    "launch bounds": [("bounds=1", "bounds=2")],
    "shared memory": [("threads, 0, bounds", "threads, 64, bounds")],
    "axes": [("array_type(ndim), array_type(ndim)", "array_type(1), array_type(2)"),
             ("Y[n] +=", "Y[n, 0] +=")],
    "indentation": [("            Y[n] +=", "            pass\n        Y[n] +=")],
}  # fmt: skip
_numbers = itertools.count()


@pytest.fixture
def made(tmp_path, monkeypatch):
    """Makes the kernel of a module of this text, which may be in two files."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(text, *, parts=""):
        names = [f"digested_{next(_numbers)}" for _ in range(2)]
        if parts:
            (tmp_path / f"{names[0]}.py").write_text(parts)
            text = f"from {names[0]} import *\nfrom {names[0]} import helper\n{text}"
        path = tmp_path / f"{names[1]}.py"
        path.write_text(text)
        spec = importlib.util.spec_from_file_location(names[1], path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, names[1], module)
        spec.loader.exec_module(module)
        return module.make()

    return make


def edited(edits):
    text = TEXT
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    return text


def digests(kernel):
    return [program_of(kernel, emulated=emulated).digest for emulated in (False, True)]


def ptx(kernel):
    with without_repeats():
        return without_names(ptx_of(kernel, (8, 0)))


@pytest.mark.parametrize("name", EQUAL)
def test_words_lines_and_names_change_no_digest(made, name):
    before, after = digests(made(TEXT)), digests(made(edited(EQUAL[name])))
    assert before[0] == after[0]
    # Accesses are counted by the names of a kernel's parameters.
    assert (before[1] == after[1]) == (name != "parameters")


def test_a_part_in_another_module_has_the_same_digest(made):
    apart = made(KERNEL, parts=PARTS + "\n\n\n")
    assert digests(apart) == digests(made(TEXT))
    assert len(program_of(apart).modules) == len(program_of(made(TEXT)).modules) + 1


@pytest.mark.parametrize("name", UNLIKE)
def test_what_is_computed_changes_the_digest(made, name):
    before, after = digests(made(TEXT)), digests(made(edited(UNLIKE[name])))
    assert before[0] != after[0]
    of_instructions = name in ("instruction", "helper of an intrinsic")
    assert (before[1] != after[1]) == (not of_instructions)


def test_emulations_change_the_emulators_digest_alone(made):
    before, after = digests(made(TEXT)), digests(made(edited([("x * 1.0", "x * 2.0")])))
    assert before[0] == after[0] and before[1] != after[1]


def test_equal_digests_are_of_equal_ptx(made):
    """All edits at once, and a part in another module; and edits that make other PTX."""
    text = TEXT
    for name, edits in EQUAL.items():
        for old, new in edits if name not in ("no docstring", "annotations") else ():
            text = text.replace(old, new)
    apart = made(KERNEL, parts=PARTS)
    kernel, other = made(TEXT), made(text)
    assert program_of(kernel).digest == program_of(other).digest == program_of(apart).digest
    wanted = ptx(kernel)
    assert wanted == ptx(other) == ptx(apart)
    for name in ("constant", "instruction", "argument by name", "launch bounds"):
        assert ptx(made(edited(UNLIKE[name]))) != wanted


def test_a_value_that_no_digest_is_made_of(made):
    class Other:
        pass

    kernel = made(TEXT)
    kernel.function.__globals__["uint32"] = Other()
    with pytest.raises(Unknown, match="Other"):
        program_of(kernel)


def test_a_keyword_of_a_function_whose_source_is_not_read_counts_by_its_name(made):
    names = ("float32(y * STEP)", "float32(value=y * STEP)", "float32(other=y * STEP)")
    found = [program_of(made(edited([(names[0], name)]))).digest for name in names]
    assert len(set(found)) == 3


class OneField(NamedTuple):
    a: int = 1


class OtherDefault(NamedTuple):
    a: int = 2


def test_a_digest_is_kept_and_an_error_is_raised_again():
    class Other:
        pass

    other, reader = Other(), program_digest._Reader(False)
    kept, refused = (lambda: OneField), (lambda: other)
    assert reader.function(kept) is reader.function(kept)
    for _ in range(2):
        with pytest.raises(Unknown, match="no digest of .*Other"):
            reader.function(refused)


def test_a_named_tuples_class_counts_by_its_fields_and_defaults(made):
    """A class of another package that only has `_fields` counts by its name."""
    found = []
    for value in (
        OneField,
        OtherDefault,
        namedtuple("OneField", "a"),
        namedtuple("O", "b"),
        ast.Name,
    ):
        kernel = made(TEXT)
        kernel.function.__globals__["uint32"] = value
        found.append(program_of(kernel).digest)
    assert len(set(found)) == 5


def test_what_has_no_source_counts_by_its_name_or_its_text():
    read = program_digest._readers[False]
    record = namedtuple("record", "a b", defaults=[3])
    assert read._named(record)[:2] == ("record class", ("a", "b"))
    assert read._named(math.exp) == ("name", "math.exp")
    # A Python function of an installed package is its name, in closures as in calls.
    assert read.value(textwrap.dedent) == ("name", "textwrap.dedent")
    read_ir = utils.get_nargs_range
    assert read.value(read_ir) == ("name", f"{read_ir.__module__}.get_nargs_range")
    nowhere = FunctionType((lambda: 3).__code__, {"__name__": None})
    assert nowhere.__module__ is None and read.value(nowhere) == read.function(nowhere).digest
    assert read._named(np.float32) == ("name", "numpy.float32")
    assert read._named(np.dtype("float16")) == ("text", "float16")
    kind, dtype, shape, _ = read.value(np.zeros((2, 3), np.float16))
    assert (kind, dtype, shape) == ("array", "float16", (2, 3))
    assert read._named(ir.IntType(8)) == ("text", "i8")
    assert read._named(Fraction(1, 3)) == ("instance", "fractions.Fraction", "1/3")
    with pytest.raises(program_digest.Unknown, match="no digest of Here "):
        read._named(type("Here", (), {"__module__": __name__})())


@pytest.mark.parametrize("nothing", ["x: int", "pass", "...", "'words'"])
def test_a_statement_without_effect_is_written_as_nothing(nothing):
    for head in ("def f():\n    {}return 1", "if f:\n    {}return 1"):
        some, none = (ast.parse(head.format(x)).body[0] for x in (f"{nothing}; ", ""))
        assert template(some) == template(none)
    bare = ast.parse("x: int").body[0]
    assert template(bare).text == ""


def test_lambdas_of_one_line_have_definitions_of_their_own():
    """By the positions of their code. An inner lambda is in the text of the outer one too."""
    f, g, outer = (lambda a: a + 1), (lambda b: b * 2), (lambda c: (c, lambda d: c - d))
    one, two, constant = (lambda: 1), (lambda: 2 + one()), (lambda x: x)  # one has no positions
    wanted = {
        f: "lambda a: a + 1", g: "lambda b: b * 2", outer: "lambda c: (c, lambda d: c - d)",
        outer(1)[1]: "lambda d: c - d", two: "lambda: 2 + one()", constant: "lambda x: x",
    }  # fmt: skip
    for function, text in wanted.items():
        assert ast.unparse(program_digest.definition(function.__code__)) == text


def test_lambdas_that_cannot_be_told_apart_have_no_definition(monkeypatch):
    nodes = [ast.parse(f"f(lambda: {n})").body[0].value.args[0] for n in (1, 2)]
    code = SimpleNamespace(co_firstlineno=1, co_name="<lambda>")
    monkeypatch.setattr(program_digest, "lines_of", lambda code: ())
    monkeypatch.setattr(program_digest, "_functions", lambda lines: {(1, "<lambda>"): nodes})
    node = nodes[0]
    begin, end = (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)
    within = (begin[0], end[0], begin[1], end[1])
    cases = [
        ([within], True),
        ([within, within], True),
        ([], False),
        ([(None, None, None, None)], False),
        ([(1, None, None, None)], False),  # as with python -X no_debug_ranges
        ([(1, 1, 3, 3)], False),  # an instruction without a length
        ([within, (1, 1, begin[1] - 1, end[1])], False),
        ([within, (1, 1, begin[1], end[1] + 1)], False),
    ]
    for places, known in cases:
        code.co_positions = lambda places=places: places
        assert (program_digest.definition(code) is node) == known
        assert known or program_digest.definition(code) is None


def test_kernels_of_one_function_differ_by_all_that_they_are_compiled_for():
    def function(X, n):
        X[n] = n

    def renamed(Y, m):
        Y[m] = m

    usual = device.array_type(1), types.int32

    def kernel(*how, of=function, types_=usual, **more):
        return device.Kernel(of, types_, *how, **more)

    plain = kernel(32, 0)
    others = [
        kernel(32, 0, types_=(device.array_type(2), types.int32)),
        kernel(32, 0, types_=(device.array_type(1), types.int64)),
        kernel(64, 0),
        kernel(32, 64),
        kernel(32, 0, min_blocks=2),
    ]
    for emulated in (False, True):
        digests = [program_of(x, emulated=emulated).digest for x in (plain, *others)]
        assert len(set(digests)) == len(digests)
        same = program_of(kernel(32, 0, of=renamed), emulated=emulated).digest == digests[0]
        assert same == (not emulated)  # accesses are counted by names


def test_a_function_is_written_without_its_name_decorators_and_default_values():
    def written(text):
        node = ast.parse(text).body[0]
        node = node.value if isinstance(node, ast.Expr) else node
        return program_digest._template_of_function(node, frozenset("f"))

    plain = written("def g(a, b, *, c): return f(a)")
    for text in (
        "def h(a, b, *, c): return f(a)",
        "@f\ndef g(a, b, *, c): return f(a)",
        "@f(1)\n@f\ndef g(a, b=f, *, c=f(1)): return f(a)",
    ):
        assert written(text) == plain
    assert [x.names for x in plain.references] == [("f",)]
    assert written("lambda a, b=f, *, c=1: a") == written("lambda a, b, *, c: a")


def test_values_of_every_kind_count_with_their_kind():
    def value(x):
        return program_digest._readers[False].value(x)

    partial = functools.partial(math.pow, 2.0, y=3)
    assert value(partial) == (
        "partial", ("name", "math.pow"), ("tuple", (), ("float", "2.0")),
        ("dict", (("str", "'y'"), ("int", "3"))),
    )  # fmt: skip
    of = types.NamedTuple([types.int32, types.float32], namedtuple("Pair", "a b"))
    assert value(of) == ("record", ("a", "b"), ("type", "int32"), ("type", "float32"))
    assert value(types.float32) == ("type", "float32")
    assert value((1, [2.0])) == ("tuple", (), ("int", "1"), ("list", (), ("float", "2.0")))
    assert value({3, 1}) == ("set", ("int", "1"), ("int", "3"))
    assert value(math) == ("module", "math")
    assert value(np.float32(2)) == ("float32", "2.0")
    known = {"f": 7}
    exec("def outer(a):\n    def inner(): return a, f, len, nowhere\n    return inner", known)
    outside = program_digest._outside(known["outer"](5))
    assert outside == {"a": 5, "f": 7, "len": len}
    # A function takes what its inner functions take, except its own variables.
    assert program_digest._taken(known["outer"].__code__) == {"f", "len", "nowhere"}


def test_nodes_of_a_text_are_closed():
    """So that equal texts are of equal trees."""
    texts = (
        "x[a:b:(yield)]",
        "f(x, *y, n=z)",
        "f({**x, 1: (y + z)})",
        "(a + b) * c",
        "a if b else (c, d)",
        "not a < b <= c",
        "assert f(a), b",
        "raise (a + b) from c",
        "x: int = f(1)",
        "def f(a, *b, c=(1,), **d):\n    def g():\n        nonlocal a\n        a = 1\n    return g",
        "def f():\n    try:\n        g(1)\n    except (A, B) as c:\n        return (c)",
        "def f():\n    try:\n        g(1)\n    except (A):\n        return [lambda x: (x)]",
        "@a(1)\nclass A(B, C):\n    x: int = (1)\n    def f(self): return (self)",
    )
    for text in texts:
        written = template(ast.parse(text).body[0], frozenset("f")).text
        assert written.count("(") == written.count(")") > 1
        assert written.count("[") == written.count("]")


def test_texts_of_two_statements():
    text = template(ast.parse("a[1:] = []").body[0]).text
    index = "(Slice lower= int:1)"
    assert text == f"(Assign targets=[(Subscript value= v0 slice={index})] value=(List))"
    found = template(ast.parse("f(a, b=a.c, **d)").body[0].value, frozenset("f"))
    assert found.text == "(Call ?[ v0] ?=(Attribute v0 c) None= v1)"
    assert [x.keyword for x in found.references] == ["", "b"]


INNER = "def g(a, b):\n  def h():\n    {}\n    a = 1"
# Pairs of statements that differ in one thing. "f" is a name from outside.
UNLIKE_STATEMENTS = [
    ("a + b", "a + a"),
    ("a + b", "a - b"),
    ("a[1:]", "a[:1]"),
    ("a.b", "a.c"),
    ("f.b", "f.c"),
    ("(a.b, a)", "(a.b, c)"),
    ("a(b=1)", "a(c=1)"),
    ("a(b=1)", "a(b=2)"),
    ("f(b=1)", "f(c=1)"),
    ("f(b=1)", "f(b=2)"),
    ("a(**b)", "a(b)"),
    ("def g(f, a): return f", "def g(a, f): return f"),
    ("def g(a, b): return a", "def g(a, b): return b"),
    ("def g(a): return a", "def g(a, /): return a"),
    ("def g(a): return a", "def g(*a): return a"),
    ("def g(a): return a", "def g(*, a): return a"),
    ("def g(a): return a", "def g(**a): return a"),
    ("def g(a, /): return a", "def g(): return a"),
    ("def g(*a): return a", "def g(): return a"),
    ("def g(*, a): return a", "def g(): return a"),
    ("def g(**a): return a", "def g(): return a"),
    ("def g(*, a, b): return a", "def g(*, a, b): return b"),
    ("a(a)", "b(a)"),
    ("import a", "import b"),
    ("if a: b = 1", "if a: b = 2"),
    ("if a: b: f = 1", "if a: b: f = 2"),
    ("if a: b()", "if a: b.c()"),
    ("def g(): return g", "def g(): return a"),
    ("def g(): return 1", "@f\ndef g(): return 1"),
    ("try: a\nexcept f: 1 + 1", "try: a\nexcept f.b: 1 + 1"),
    ("try: a\nexcept f: 1 + 1", "try: a\nexcept: 1 + 1"),
    (INNER.format("nonlocal a"), INNER.format("nonlocal b")),
    (INNER.format("nonlocal a"), INNER.format("a = 2")),
    ("class A: a = 1", "class B: a = 1"),
    ("class A: a = 1", "class A(f): a = 1"),
    ("class A: a = 1", "@f\nclass A: a = 1"),
    ("class A: a = 1", "class A: a = 2"),
    ("class A: a: f = 1", "class A: a: f = 2"),
    ("class A:\n  def a(self): return 1", "class A:\n  def a(self): return 2"),
    ("class A:\n  def a(self): return 1", "class A:\n  def b(self): return 1"),
]


@pytest.mark.parametrize("one, other", UNLIKE_STATEMENTS)
def test_statements_that_differ_have_other_texts(one, other):
    written = [template(ast.parse(text).body[0], frozenset("f")) for text in (one, other)]
    assert written[0] != written[1]


def test_names_of_errors_are_local_names():
    """By which an error is told apart from another variable."""
    handler = "def f(x):\n    try:\n        g()\n    except E{}:\n        return {}"
    given = (" as a", "a"), (" as b", "b"), (" as x", "x"), (" as a", "x"), ("", "x")
    texts = [template(ast.parse(handler.format(*each)).body[0]).text for each in given]
    assert texts[0] == texts[1] and len(set(texts)) == 4


def test_types_of_a_named_tuples_members_count(made):
    found = []
    for members in (
        [types.int32],
        [types.float32],
        [types.int64],
        [types.NamedTuple([types.int32], OneField)],
    ):
        kernel = made(TEXT)
        kernel.function.__globals__["uint32"] = types.NamedTuple(members, OneField)
        found.append(program_of(kernel).digest)
    assert len(set(found)) == 4


def test_names_of_methods_and_attributes_of_a_class_count():
    """Other code uses them, so that they are not numbered as local names are."""
    bodies = (
        "def one(self): return 1",
        "def two(self): return 1",
        "one = 1",
        "two = 1",
        "one: int = 1",
    )
    texts = [template(ast.parse(f"class A:\n    {body}").body[0]).text for body in bodies]
    assert len(set(texts)) == 4 and texts[2] == texts[4]


@pytest.mark.parametrize("arguments", ["x, y={}", "x, *, y={}"])
def test_default_values_of_an_inner_function_count(arguments):
    outer = "def outer():\n    def inner({}):\n        return x + y\n    return inner"
    texts = [outer.format(arguments.format(n)) for n in (1, 2)]
    one, two = (template(ast.parse(text).body[0]).text for text in texts)
    assert one != two and one.replace("int:1", "int:2") == two


def test_every_kernel_has_digests_and_they_tell_kernels_apart():
    """Of both passes, all algorithms and units, and some options."""
    found = {}
    options = [{"causal": True}, {"score_mod": lambda score, b, h, i, j: score + 0.5 * j}]
    for algorithm, unit, passes in itertools.product(
        ("standard", "fa1", "fa2"), ("simt", "mma", "wgmma"), ("fwd", "bwd")
    ):
        for given in options:
            dtype = "float32" if unit == "simt" else "float16"
            how = {"algorithm": algorithm, "unit": unit, "passes": passes, "dtype": dtype}
            try:
                plan = fa_numba.plan((1, 2, 256, 64), (1, 1, 256, 64), **how, **given)
            except ValueError:
                continue
            for kernel in plan.launched:
                for emulated in (False, True):
                    digest = program_of(kernel, emulated=emulated).digest
                    found.setdefault((emulated, digest), set()).add(kernel)
    assert len(found) > 80
    assert all(len(kernels) == 1 for kernels in found.values())


def test_a_gpu_launch_that_no_record_keeps_is_collected(monkeypatch):
    run, kernel = [], object()
    monkeypatch.setattr(launching.select, "on_gpu", lambda: True)
    monkeypatch.setattr(
        launching.LaunchRecord, "run", lambda record, *given: run.append((record.kernels, given))
    )
    with device.launched_kernels() as launched:
        launching._give(7, lambda record: record.kernels.append(kernel))
    assert list(launched.kernels["gpu"]) == [kernel] and run == [([kernel], ((), 7))]


def test_what_was_launched_is_collected():
    q = np.ones((1, 1, 8, 4), np.float32)
    with device.launched_kernels() as outer:
        fa_numba.flash_attention_2(q, q, q)
        with device.launched_kernels() as inner:
            fa_numba.softmax(q[0, 0])
    fa_numba.flash_attention_2(q[:, :, :4], q, q)
    first, last = outer.kernels["emulator"]
    assert first.name == "fa2_forward" and list(inner.kernels["emulator"]) == [last]
    assert not outer.kernels["gpu"] and not outer.origins["gpu"]
    (request,) = outer.origins["emulator"]
    assert not inner.origins["emulator"] and request.problem.q_shape == q.shape
    assert planned(request).launched == (first,)
