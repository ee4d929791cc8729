"""Each constant that bounds something has a row in limits.csv: a call beyond it, or a reason.

Small calls never reach such constants: widths of bit fields, masks, shifts, limits of grids, sizes
of reductions, sums of 64 bits. The scan finds them in the syntax trees of the package. Columns of
the table:

    file, constant     where the constant is, and its name or its text
    test               a call beyond the constant, which fails if the constant is too small, or if
                       what depends on it is, such as a mask or a loop; or the message of a refusal
    reason             why the constant bounds nothing, where there is no such test
"""

import ast
import csv
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "fa_numba"
TABLE = ROOT / "tests/data/limits.csv"

WORDS = {"BITS", "MAX", "MOST", "LIMIT", "LARGEST", "FLAG", "FLAGS", "LEAST", "MASK", "WRAPS"}
LEAST_NUMBER = 255
WIDE = {"int64", "uint64"}
SHIFTS = (ast.LShift, ast.RShift)
KERNELS = ("kernels", "parts")  # where every number with a name is the size of something


def literal(node):
    """Return the integers that an expression of literals has, or None for any other expression."""
    allowed = (ast.Constant, ast.BinOp, ast.UnaryOp, ast.Tuple, ast.operator, ast.unaryop, ast.Load)
    if not all(isinstance(x, allowed) for x in ast.walk(node)):
        return None
    try:
        value = eval(compile(ast.Expression(node), "", "eval"))
    except (TypeError, ZeroDivisionError):
        return None
    values = value if isinstance(value, tuple) else (value,)
    return values if all(type(x) is int for x in values) else None


def bare(node):
    """Return what a cast such as ``uint32(16)`` is of."""
    while isinstance(node, ast.Call) and len(node.args) == 1 and not node.keywords:
        node = node.args[0]
    return node


def fixed(node):
    """Whether an operand is a constant: a number, a name in capitals, or made of these alone."""
    node = bare(node)
    if isinstance(node, ast.BinOp):
        return fixed(node.left) and fixed(node.right)
    if isinstance(node, ast.Constant):
        return type(node.value) is int
    return isinstance(node, ast.Name) and node.id.isupper()


def names_of(node):
    """Return the names in capitals that a statement assigns, with their values."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    for target in targets:
        pairs = [(target, node.value)]
        if isinstance(target, ast.Tuple):
            values = node.value.elts if isinstance(node.value, ast.Tuple) else None
            pairs = list(zip(target.elts, values, strict=True)) if values else []
        for name, value in pairs:
            if isinstance(name, ast.Name) and name.id.isupper() and value is not None:
                yield name.id, value


def found_in(tree, kernels=False):
    """Yield the constants of a module, by name or as text; of ``kernels`` every named number."""
    nodes = [tree]
    while nodes:
        node = nodes.pop()
        kind = node.__class__
        if kind is ast.Constant:
            if node.value.__class__ is int and node.value >= LEAST_NUMBER:
                yield str(node.value)
            continue
        if kind is ast.Name:
            continue
        if kind is ast.Assign or kind is ast.AnnAssign:
            named = list(names_of(node))
            if node.value.__class__ is ast.Constant and _name_of_target(node) == "lane":
                yield ast.unparse(node)  # the size of a reduction
            for name, value in named:
                values = literal(value)
                large = values and (max(map(abs, values)) >= LEAST_NUMBER or _is_shifted(value))
                if large or (values and (kernels or WORDS & set(name.strip("_").split("_")))):
                    yield name
                else:
                    nodes.append(value)
            if named:
                continue
        elif kind is ast.BinOp or kind is ast.AugAssign:
            yield from _of_operation(node, kind)
        elif kind is ast.Call:
            if _name(node.func) in WIDE:
                yield f"{_name(node.func)}()"
        elif kind is ast.Attribute and node.attr in WIDE:
            yield node.attr
        for field in node._fields:
            value = getattr(node, field)
            if value.__class__ is list:
                nodes += [x for x in value if isinstance(x, ast.AST)]
            elif isinstance(value, ast.AST):
                nodes.append(value)


def _of_operation(node, kind):
    """Yield the text of a shift, of a mask, and of a power of two."""
    right = node.right if kind is ast.BinOp else node.value
    sides = [right, node.left] if kind is ast.BinOp else [right]
    masks = isinstance(node.op, ast.BitAnd) and any(map(fixed, sides))
    power = isinstance(node.op, ast.Pow) and kind is ast.BinOp and _is_two(node.left)
    if masks or power or isinstance(node.op, SHIFTS):
        yield ast.unparse(node)


def _name_of_target(node):
    return _name(node.targets[0] if isinstance(node, ast.Assign) else node.target)


def _is_shifted(node):
    return any(isinstance(x, (ast.LShift, ast.Pow)) for x in ast.walk(node))


def _is_two(node):
    return isinstance(node, ast.Constant) and node.value == 2 and type(node.value) is int


def _name(node):
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _room(path):
    return path.relative_to(PACKAGE).parts[0]


@functools.cache
def constants():
    """Return all (file, constant) of the package."""
    return {
        (str(path.relative_to(PACKAGE)), text)
        for path in sorted(PACKAGE.rglob("*.py"))
        for text in found_in(ast.parse(path.read_text()), _room(path) in KERNELS)
    }


@functools.cache
def rows():
    """Return the rows of the table: (file, constant) -> (test, reason)."""
    with TABLE.open(newline="") as file:
        _, *found = csv.reader(file)
    pairs = [(name, constant) for name, constant, *_ in found]
    assert pairs == sorted(set(pairs)), "sort limits.csv by file and constant, each of them once"
    return {(name, constant): tuple(rest) for name, constant, *rest in found}


@functools.cache
def functions_of(file):
    """Return the names of the tests in a file of tests."""
    return set(re.findall(r"^def (test_\w+)", (ROOT / "tests" / file).read_text(), re.MULTILINE))


def test_each_constant_has_a_row():
    """Add the row: the test that a wrong constant makes fail, or why the constant is no bound."""
    missing = sorted(constants() - rows().keys())
    assert not missing, f"limits.csv has no row for {missing}"


def test_each_row_has_a_constant():
    gone = sorted(rows().keys() - constants())
    assert not gone, f"no file has these constants of limits.csv any more: {gone}"


def test_each_row_has_a_test_or_a_reason():
    for place, (test, reason) in rows().items():
        assert bool(test) != bool(reason), f"give a test or a reason, not both: {place}"
        if reason:
            assert re.fullmatch(r"[A-Z].{8,170}\.", reason), (place, reason)
            continue
        file, _, name = test.partition("::")
        assert name in functions_of(file), f"there is no test {test}, which limits.csv names"


NEW = {
    "FEW_BITS = 8": {"FEW_BITS"},
    "AT, MORE = 3, 1 << 20": {"MORE"},
    "ROWS = 64": set(),
    "x = word >> uint32(16)": {"word >> uint32(16)"},
    "x &= 1023": {"x &= 1023", "1023"},
    "x = given & other": set(),
    "x = given & LAST - 1": {"given & LAST - 1"},
    "if size > 65535: pass": {"65535"},
    "n = 2**bits": {"2 ** bits"},
    "total = np.zeros(3, np.int64)": {"int64"},
    "total = uint64(n) * m": {"uint64()"},
    "lane = 16": {"lane = 16"},
}


@pytest.mark.parametrize("text", NEW)
def test_the_scan_finds_a_constant(text):
    assert set(found_in(ast.parse(text))) == NEW[text]


def test_the_scan_finds_every_size_of_a_kernel():
    assert set(found_in(ast.parse("WARPS, ROWS = 8, 4"), kernels=True)) == {"WARPS", "ROWS"}
