"""The caller's own functions: how they are read, written for kernels and differentiated; what is
refused; kernels that they share. What they do to results is `test_calls`' too.
"""

import ast
import builtins
import inspect
import itertools
import linecache
import math
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import random_functions
from backward_helpers import check_gradients, random_gradients
from conftest import examples
from helpers import check, random_inputs, running
from hypothesis import given
from hypothesis import strategies as st
from numba import cuda, float32
from offline import compiled
from scipy import special
from test_compile import plan_of

import fa_numba
from fa_numba import Tiles, mods, reference
from fa_numba import device as devices
from fa_numba.choices.requests import Choices
from fa_numba.emulator import EmulatorError, launch
from fa_numba.host import planning
from fa_numba.host.arrays import HOST
from fa_numba.mods.allowed import STEPS
from fa_numba.mods.evaluating import _modulo, _power
from fa_numba.mods.needed import needed
from fa_numba.mods.slopes import OF_MATH
from fa_numba.options import FEATURES, Bound, Features
from fa_numba.parts import division
from fa_numba.problem import Problem

SMALL = Tiles(8, 16)
table = np.random.default_rng(0).standard_normal((3, 40)).astype(np.float32)
steps = np.arange(40, dtype=np.int32)[::-1].copy()
flags = table[0] > 0
slope, cap, width, on = 0.3, 2.5, 5, True


# --- what is written says what the function says ------------------------------------------------


DIVISION = {
    "divisor": lambda d: None,
    "floor_divide": lambda x, d, inverse: x // d,
    "modulo": lambda x, d, inverse: x % d,
}


def wide(value):
    """An array of float32 in float64, of which numbers are Python's own."""
    return value.astype(float) if getattr(value, "dtype", None) == np.float32 else value


def exact(function, option="score_mod"):
    """The function itself, without roundings to float32."""
    captured = mods.captured(option, function).values
    return mods.holding(function, {name: wide(value) for name, value in captured})


def written(function, option="score_mod", text="value", scale=1.0, unit=1.0):
    """What a kernel has of the function, as a function of Python's own numbers, the score first: it
    is given that by ``scale``, and returns a value by ``unit``.
    """
    mod, values = mods.captured(option, function)
    known = {"int32": int, "uint32": int, "float32": float, "math": math, **DIVISION}
    options, made = SimpleNamespace(), getattr(mod, text)
    for field, (name, value) in zip(mod.fields, values, strict=True):
        of_numbers = name.startswith("float32(")  # in float64 here
        own = eval(name, known | {"options": options}) if of_numbers else wide(value)
        setattr(options, field, own)
    texts = made.score_factor, made.text, made.inner
    score_factor, own, inner = (_executed(each, known) for each in texts)
    if option == "mask_mod":
        return lambda *args: own(*args, 3, options)

    def of_score(s, *args):
        score = score_factor(scale, options) * (s / scale)
        return own((inner(score) if inner else score, unit), *args, 3, options)

    return of_score


def _executed(text, known):
    exec(text, known)
    return known["mod"] if text else None


def several(score, b, h, i, j):
    """Statements, of which one changes a name that is there already."""
    x, away = score * slope, i - j
    away *= 2
    y: float = x + away
    return y if y > 0 else -x


FUNCTIONS = {
    "arithmetic": lambda s, b, h, i, j: (s + 1) * (s - 2.5) / (b + 2) - s * i + +j,
    "integers": lambda s, b, h, i, j: s + (i - 7 * j) // 4 + (j - i) % 5 + (i ^ j | h & 3 | i << 2),
    "floats divided": lambda s, b, h, i, j: (s * s + 9) // 4 + (s * 7) % 2.5 + 3 / (2 + s * s),
    "powers": lambda s, b, h, i, j: s**3 - s**2 + abs(s) ** 1.5 + 2.0**s + (i + 1) ** 2 / 9,
    "bits": lambda s, b, h, i, j: s + (~i >> 1) + int(s * 3) + (not i),
    "chains": lambda s, b, h, i, j: s if 0 <= i - j < width <= h + 5 else -s if i > j > 2 else 2,
    "chains of arrays": lambda s, b, h, i, j: s if 0 < i < steps[i] < j < 30 or i > j else -s,
    "conditions": lambda s, b, h, i, j: s if (i < j and flags[i]) or not on else slope,
    "conditions within": lambda s, b, h, i, j: s if j < 9 and (i < 2 or i > 8 or i < j < 8) else -s,
    "index behind a condition": lambda s, b, h, i, j: s + (table[h, i - j] if i >= j else 0),
    "arrays": lambda s, b, h, i, j: s * table[h % 3, steps[i]] + steps.shape[0] + len(table),
    "an index at a time": lambda s, b, h, i, j: s + table[h][j] * flags[i],
    "min and max": lambda s, b, h, i, j: max(s, slope, -s / 3) + min(i, j, 4) + min(s * s, 2 * s),
    "math": lambda s, b, h, i, j: (
        math.exp(s / 4) + math.log(s * s + 1) + math.sqrt(s * s + 2) + math.sin(s) * math.cos(s)
        + math.tanh(s) + math.erf(s) + math.fabs(s) + math.atan(s) + math.log1p(s * s)
    ),
    "more math": lambda s, b, h, i, j: (
        math.expm1(s / 5) + math.log2(s * s + 1) - math.log10(s * s + 2) + math.tan(s / 9)
        + math.sinh(s / 3) + math.cosh(s / 3) + math.pow(s * s + 1, 0.3) + math.pow(2, s / 4)
    ),
    "steps": lambda s, b, h, i, j: s * math.floor(s) + math.ceil(s) + math.trunc(s) * math.pi,
    "a condition as a factor": lambda s, b, h, i, j: s * (on and i > 2 and j < i),
    "the scores left out": lambda s, b, h, i, j: i * slope,
    "a cap": lambda s, b, h, i, j: cap * math.tanh(s / cap),
    "numbers alone": lambda s, b, h, i, j: s * (cap / width) - j * (slope * -cap) + 1 / slope,
    "statements": several,
}  # fmt: skip
places = [(0, 0, 0, 0), (1, 2, 3, 0), (0, 1, 7, 9), (1, 0, 12, 12), (0, 2, 20, 4)]
every_function = pytest.mark.parametrize("name", FUNCTIONS)
scores = np.random.default_rng(1).uniform(-4, 4, 6).tolist()


@every_function
def test_what_is_written_gives_what_the_function_gives(name):
    function, own = exact(FUNCTIONS[name]), written(FUNCTIONS[name])
    for place in places:
        for score in scores:
            assert own(score, *place) == pytest.approx(
                function(score, *place), rel=1e-12, abs=1e-12
            )


@pytest.mark.parametrize("number, inverse", [(4.0, 0.25), (0.0, math.inf), (1e-45, math.inf)])
def test_what_captured_numbers_alone_decide_is_made_before_the_call(number, inverse):
    mod, values = mods.captured("score_mod", lambda s, b, h, i, j: math.sin(s / number))
    assert dict(values) == {"number": number, "float32(1.0) / options.score_mod_0": inverse}
    assert (
        mod.value.score_factor
        == "def mod(scale, options):\n    return scale * options.score_mod_1\n"
    )


@pytest.mark.parametrize(
    "function, first",
    [
        (lambda s, b, h, i, j: cap * math.tanh(s / cap) + i, "tanh"),
        (lambda s, b, h, i, j: math.exp(s) * slope, "exp"),
        (lambda s, b, h, i, j: math.sin(s), ""),  # whose slope is not one of its value
        (lambda s, b, h, i, j: math.tanh(s) + s, ""),
        (lambda s, b, h, i, j: math.tanh(s + i), ""),
        (lambda s, b, h, i, j: math.tanh(s) if i > j else 0.0, ""),
    ],
)
def test_what_a_function_does_first_with_its_score_is_told(function, first):
    mod = mods.captured("score_mod", function).mod
    text = f"def mod(score):\n    return float32(math.{first}(score))\n" if first else ""
    assert (mod.both.inner, mod.value.inner, mod.slope.inner) == (text, "", "")


@every_function
def test_a_value_and_its_derivative_are_made_at_once_of_a_scaled_score_in_any_unit(name):
    function, slope_ = FUNCTIONS[name], written(FUNCTIONS[name], text="slope", scale=0.5)
    log2_e = math.log2(math.e)
    both = written(function, text="both", scale=0.5, unit=log2_e)
    for place in places:
        for score in scores:
            value = log2_e * exact(function)(score, *place), slope_(score, *place)
            assert both(score, *place) == pytest.approx(value, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize(
    ("function", "steady"),
    [
        (lambda s, b, h, i, j: cap * math.tanh(s / cap), True),
        (lambda s, b, h, i, j: slope * math.atan(math.erf(s * cap) + 1) - s, True),
        (lambda s, b, h, i, j: s * table[h, j], False),
        (lambda s, b, h, i, j: s * table[0, 3], False),
        (lambda s, b, h, i, j: s * table[h, j] + s, False),
        (lambda s, b, h, i, j: s + s * table[h, j], False),
        (lambda s, b, h, i, j: math.tanh(s * cap * slope), False),
        (lambda s, b, h, i, j: math.tanh(s * s), False),
        # Sums in which one term may be infinite, two terms may, or one may be NaN.
        (lambda s, b, h, i, j: math.atan(s + s * cap), True),
        (lambda s, b, h, i, j: math.atan(s * cap - s), True),
        (lambda s, b, h, i, j: math.atan(s * cap - s * cap), False),
        (lambda s, b, h, i, j: math.tanh(s + s * s), False),
        (lambda s, b, h, i, j: math.tanh(s * s - s), False),
        (lambda s, b, h, i, j: math.tanh(s * s - s * cap), False),
        (lambda s, b, h, i, j: math.exp(s), False),
        (lambda s, b, h, i, j: s / (s + 1), False),
    ],
)
def test_whose_slope_is_finite_by_any_finite_score(function, steady):
    mod, largest = mods.captured("score_mod", function).mod, np.finfo(np.float32).max
    assert mod.steady is steady
    if steady:
        with np.errstate(over="ignore"):
            own = written(function, text="slope")
            slopes_ = [own(s, 0, 0, 1, 2) for s in (-largest, 0, largest)]
        assert np.isfinite(slopes_).all()


@every_function
def test_the_derivative_is_the_limit_of_differences(name):
    function = exact(FUNCTIONS[name])
    own = written(FUNCTIONS[name], text="slope")
    for place in places:
        for score in scores:
            step = 1e-6
            above, below = function(score + step, *place), function(score - step, *place)
            assert own(score, *place) == pytest.approx(
                (above - below) / (2 * step), rel=1e-7, abs=1e-7
            )


_leaves = st.sampled_from(
    ["s", "i", "j", "h", "slope", "width", "2", "0.5", "steps[i]", "table[h, j]"]
)


def _grown(parts):
    two = st.sampled_from(["({} + {})", "({} - {})", "({} * {})", "max({}, {})", "min({}, {})"])
    joined = st.builds(lambda text, a, b: text.format(a, b), two, parts, parts)
    one = st.sampled_from(["-{}", "abs({})", "math.sin({})", "math.tanh({})", "float({})"])
    single = st.builds(lambda text, a: text.format(a), one, parts)
    chosen = st.builds("({} if {} < {} else {})".format, parts, parts, parts, parts)
    nested = st.builds("({} if {} > 0 and ({} < 1 or {} < i < 3) else {})".format, *[parts] * 5)
    either = st.builds("({} if i > j and {} > 0 or flags[j] else {})".format, parts, parts, parts)
    return joined | single | chosen | nested | either


def _from_text(text):
    """A function whose source is found under the name of a file that is not there."""
    name = f"<test_mods {abs(hash(text))}>"
    linecache.cache[name] = len(text), None, [f"{text}\n"], name
    return eval(compile(text, name, "eval"), globals())


@examples(150)
@given(st.recursive(_leaves, _grown, max_leaves=9), st.floats(-3, 3), st.sampled_from(places))
def test_any_expression(text, score, place):
    given_ = _from_text(f"lambda s, b, h, i, j: {text}")
    function, own = exact(given_), written(given_)
    value = function(score, *place)
    assert own(score, *place) == pytest.approx(value, rel=1e-12, abs=1e-12)
    step, here = 1e-6, function(score, *place)
    ahead, behind = (function(score + step, *place), function(score - step, *place))
    quotient = [(ahead - here) / step, (here - behind) / step]
    if math.isclose(*quotient, rel_tol=1e-4, abs_tol=1e-4):  # no kink, and no step, just here
        slope_ = written(given_, text="slope")(score, *place)
        assert slope_ == pytest.approx(sum(quotient) / 2, rel=1e-3, abs=1e-3)


def test_a_distance_far_out_is_as_near_the_origin():
    """Where places themselves are no float32 any more, in which nothing else is computed."""
    mod, values = mods.captured("score_mod", lambda s, b, h, i, j: s - 2 * abs(i - (j - width)))
    known = {"int32": int, "float32": np.float32, "math": math}
    exec(mod.value.text, known)
    options = SimpleNamespace(**dict(zip(mod.fields, (value for _, value in values), strict=True)))
    far = 2**25 + 1
    none = np.float32(0), np.float32(1)
    assert known["mod"](none, 0, 0, far + 2, far, far - 4, options) == -2 * (2 + width)


def test_a_place_is_divided_and_no_inverse_is_taken():
    """41 times the float32 next to 1/41 is less than 1, of which the integer is another one."""
    by = 41.0
    mod, _ = mods.captured("score_mod", lambda s, b, h, i, j: s + int(i / by))
    own = _executed(mod.value.text, {"int32": int, "float32": np.float32, "math": math})
    options, none = SimpleNamespace(score_mod_0=np.float32(by)), (np.float32(0), np.float32(1))
    assert [own(none, 0, 0, i, 0, 0, options) for i in (40, 41, 82)] == [0, 1, 2]


DIVISORS = [1, 2, 3, 7, 64, 641, 2**16 + 1, 2**31 - 1, 0, -1, -3, -64, 1 - 2**31]


@pytest.mark.parametrize("by", DIVISORS)
def test_dividing_by_a_shared_number_is_pythons(by):
    """Quotients are rounded down, rests have the divisor's sign, and by 0 both are 0."""
    largest = 2**31 - 1
    near = [n * by + k for n in (-3, -1, 2, largest // max(1, abs(by))) for k in (-1, 0, 1)]
    drawn = np.random.default_rng(0).integers(-largest, largest, 40).tolist()
    values = [n for n in (*near, *drawn, *range(-5, 6), largest, -largest) if abs(n) <= largest]
    x, out = np.int32(values), np.zeros((2, len(values)), np.int32)

    def kernel(out, x, by):
        t = cuda.threadIdx.x
        inverse = division.divisor(by)
        out[0, t] = division.floor_divide(x[t], by, inverse)
        out[1, t] = division.modulo(x[t], by, inverse)

    launch(kernel, 1, len(values), out, x, np.int32(by))
    want = [(n // by, n % by) if by else (0, 0) for n in values]
    assert out.T.tolist() == [list(pair) for pair in want]
    assert mods.divisor(np.int32(by)) == division_of(by)


def division_of(by):
    """By what kernels multiply, as they make it of a number that is no captured one."""
    out = np.zeros(1, np.uint32)

    def kernel(out, by):
        out[0] = division.divisor(by)

    launch(kernel, 1, 1, out, np.int32(by))
    return out[0]


def test_comparing_row_and_column_is_of_what_lies_between():
    mod, _ = mods.captured("mask_mod", lambda b, h, i, j: 0 <= i and j <= i < 2 * j)
    known = {"int32": lambda x: (int(x) + 2**31) % 2**32 - 2**31}
    exec(mod.value.text, known)
    assert "int32(j - origin) <= int32(i - origin)" in mod.value.text
    for i, j in ((5, 3), (3, 5), (4, 4), (5, 2)):
        assert known["mod"](0, 0, i, j, 4, ()) == (j <= i < 2 * j)


@pytest.mark.parametrize(
    ("function", "alone"),
    [
        (lambda s, b, h, i, j: cap * math.tanh(s / cap) - slope * abs(i - j), False),
        (lambda s, b, h, i, j: s + steps[h], False),
        (lambda s, b, h, i, j: s + steps[i % 9], True),
        (lambda s, b, h, i, j: s / (40 - j), True),
        (lambda s, b, h, i, j: s + i % (40 - j), True),
        (lambda s, b, h, i, j: s + math.log(40 - j), True),
        # Whatever the function does later.
        (lambda s, b, h, i, j: math.exp(s / (40 - j)) + steps[h], True),
        (lambda s, b, h, i, j: math.tanh(s + i % (40 - j)) + j // 2, True),
        (lambda s, b, h, i, j: math.sin(math.log(40 - j)) + steps[h], True),
        (lambda s, b, h, i, j: math.cos(steps[i % 9]) + steps[h], True),
        (lambda s, b, h, i, j: math.exp(s ** (40 - j)) + steps[h], True),
    ],
)
def test_which_functions_are_called_inside_of_the_matrix_alone(function, alone):
    assert mods.captured("score_mod", function).mod.inside is alone


@pytest.mark.parametrize(
    ("lines", "left"),
    [
        (["x = a", "y = x", "return a"], ["return a"]),
        (["x = a", "y = x", "return y"], ["x = a", "y = x", "return y"]),
        (["x = a", "x = b", "return x"], ["x = a", "x = b", "return x"]),
        (["x = a", "A[x] += b", "return b"], ["x = a", "A[x] += b", "return b"]),
        (["if a:", "    x = b", "return a"], ["return a"]),
        (["if a:", "    x = b", "else:", "    x = c", "return x"],) * 2,
        (["if a:", "    x = b", "else:", "    y = c", "return y"],
            ["if a:", "    pass", "else:", "    y = c", "return y"]),
        (["y = a", "if y:", "    f(x)", "return b"],) * 2,
    ],
)  # fmt: skip
def test_only_assignments_to_names_that_are_read_later_stay(lines, left):
    text, _ = needed("def mod(a, b):", lines)
    assert [line.removeprefix("    ") for line in text.splitlines()] == ["def mod(a, b):", *left]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_statements_that_add_have_elements_on_their_left(name):
    """`needed` may therefore keep them all: none assigns a name that nothing reads."""
    mod = mods.captured("score_mod", FUNCTIONS[name]).mod
    for text in itertools.chain(mod.value, mod.slope, mod.both, mod.gradient or ()):
        if isinstance(text, str):
            added = (x for x in ast.walk(ast.parse(text)) if isinstance(x, ast.AugAssign))
            assert all(isinstance(x.target, ast.Subscript) for x in added)


def test_branches_that_assign_positions_are_joined():
    """And no others: they decide which value a position has."""
    positions = ["if i > j:", "    p2 = uint32(t1)", "else:", "    p2 = uint32(0)"]
    others = ["if i > 0:", "    t1 = i", "else:", "    t1 = j"]
    head, last = "def mod(i, j):", "add_global(p2)"
    text, _ = needed(head, [*others, *positions, last], flat=True)
    whole, _ = needed(head, [*others, *positions, last])
    flat = [positions[1].strip(), positions[3].strip()]
    written = [head, *(f"    {line}" for line in (*others, *flat, last))]
    assert text.splitlines() == written and whole.count("if ") == 2


# --- where Python raises -------------------------------------------------------------------------

CORNERS = [0.0, -0.0, 1.0, -1.0, 2.5, -2.5, 1e3, 3e9, -3e9, 3e38, math.inf, -math.inf, math.nan]
OF_CORNERS = [f"math.{name}(s)" for name in (*OF_MATH, *STEPS)]
OF_CORNERS += [f"{a} {op} {b}" for op in ("/", "//", "%") for a, b in ("si", "is", "1s", "ss")]
OF_CORNERS += ["s ** -1", "s ** -1.5", "s ** 0.3", "s ** s", "(-2.0) ** s", "0.0 ** s", "s ** i"]
OF_CORNERS += ["min(s, 2.0)", "max(2.0, s)", "int(s)", "i / (j - 1)", "(i > 0) / (j > 0)"]
OF_CORNERS += ["(i + 65536) * (j + 65538) / 7", "s + (i + 60000) ** 3", "s + (i << 30) + (i << 31)"]


class Single:
    """math for NumPy's float32, which has an inf or NaN where Python raises."""

    inf, nan = math.inf, math.nan

    def __getattr__(self, name):
        of_numpy = {"atan": np.arctan, "pow": np.power, "erf": special.erf}
        function = of_numpy.get(name) or getattr(np, name)
        return lambda *x: function(*map(np.float32, x))


def int32(x):
    """Of a float the nearest one, of NaN 0, as a GPU has it."""
    if isinstance(x, np.floating):
        return int(np.clip(np.nan_to_num(np.float64(x), nan=0), -(2**31), 2**31 - 1))
    return (int(x) + 2**31) % 2**32 - 2**31


def of_single(text):
    """A kernel's function in NumPy's float32."""
    known = {"int32": int32, "float32": np.float32, "math": Single()}
    known |= {"min": np.fmin, "max": np.fmax, **DIVISION}
    own, score_factor = (_executed(each, {**known}) for each in text[:2])
    one = np.float32(1)
    return lambda s, i, j: np.float32(
        own((score_factor(one, None) * np.float32(s), one), 0, 0, i, j, 0, ())
    )


def emulated(text, places):
    """A kernel's function of these places (score, i, j), a thread each."""
    mod, score_factor = (
        devices.device_function(mods.function_of(each, **division.DIVISION)) for each in text[:2]
    )
    s = np.float32([x[0] for x in places])
    i, j = np.int32([x[1:] for x in places]).T
    out = np.zeros(len(s), np.float32)

    def kernel(out, s, i, j):
        t = cuda.threadIdx.x
        score = score_factor(float32(1), ()) * s[t]
        out[t] = mod((score, float32(1)), 0, 0, i[t], j[t], 0, ())

    launch(kernel, 1, len(s), out, s, i, j)
    return out


@pytest.mark.parametrize("text", OF_CORNERS)
def test_where_python_raises_a_kernel_and_the_reference_do_not(text):
    function = _from_text(f"lambda s, b, h, i, j: {text}")
    mod = mods.captured("score_mod", function).mod
    exactly = mods.evaluated("score_mod", function, {})
    corners = [(s, n % 4 - 1, n % 3) for n, s in enumerate(CORNERS)]
    with np.errstate(all="ignore"):
        for each in (mod.value, mod.slope):
            want = [of_single(each)(*place) for place in corners]
            np.testing.assert_allclose(emulated(each, corners), want, rtol=1e-6)
            for n in (0, 3, 11, 12):  # as lanes that agree
                np.testing.assert_allclose(emulated(each, corners[n : n + 1]), want[n], rtol=1e-6)
        for s, i, j in corners:
            if not 1e9 < abs(s) < math.inf:  # of which float32 knows no sine
                found, value = exactly(s, 0, 0, i, j), of_single(mod.value)(s, i, j)
                np.testing.assert_allclose(np.float32(found), value, rtol=1e-6)


@pytest.mark.parametrize("b", [0, 3, -4, 0.0, 2.5, -1.5, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("a", [0, 7, -7, 0.0, 3.25, -3.25, 1e300, math.inf, -math.inf, math.nan])
def test_a_remainder_of_the_reference_is_a_gpus(a, b):
    """With finite numbers it is Python's. A GPU computes all others from the rounded quotient."""
    if type(a) is type(b) is int and not b:
        return
    with np.errstate(all="ignore"):
        found = _modulo(a, b)
        if b and math.isfinite(a) and math.isfinite(b):
            assert found == a % b and type(found) is type(a % b)
            return
        whole = np.floor(np.divide(a, b))
        assert np.array_equal(found, a - float(whole) * b, equal_nan=True)


@pytest.mark.parametrize("b", [2, -1.0, 0.5, -1.5, 3.0, math.inf])
@pytest.mark.parametrize("a", [0, 3, -8, 0.0, 2.5, -2.5, math.inf])
def test_a_power_of_the_reference_is_a_gpus(a, b):
    """Powers of integers are Python's. Any other one is a float, which is NaN for a complex one."""
    with np.errstate(all="ignore"):
        found = _power(a, b)
        if type(a) is type(b) is int:
            assert found == a**b and type(found) is int
        else:
            wanted = np.power(np.float64(a), np.float64(b))
            np.testing.assert_allclose(float(found), wanted, rtol=1e-12)
            assert not isinstance(found, (int, complex))


def test_the_text_of_a_written_function_can_be_looked_up():
    """As a debugger and a traceback do."""
    text = "def mod(a):\n    return float32(a)\n"
    function = mods.function_of.__wrapped__(text)
    name = function.__code__.co_filename
    linecache.checkcache(name)
    assert "".join(linecache.getlines(name)) == inspect.getsource(function) == text
    assert function(0.5) == np.float32(0.5) and function.__globals__["math"] is math


# --- what is refused -----------------------------------------------------------------------------


def loop(score, b, h, i, j):
    for n in range(3):
        score += n
    return score


def branches(score, b, h, i, j):
    if i > j:
        return score
    return -score


async def waits(score, b, h, i, j):
    return score


async def waits_and_yields(score, b, h, i, j):
    yield score


def nothing_returned(score, b, h, i, j):
    score + 1


def later(score, b, h, i, j):
    return score * of_later  # noqa: F821


def not_imported(score, b, h, i, j):
    return maths.tanh(score)  # noqa: F821


class Callable_:
    def __call__(self, score, b, h, i, j):
        return score


doubles, text = table.astype(np.float64), "slope"
LINE = loop.__code__.co_firstlineno
CONVERSIONS = ("abs", "int", "float", "bool")
REFUSED = {
    "an attribute of a call": (lambda s, b, h, i, j: abs(s).real, r"abs\(s\)\.real, .* in a lam"),
    "an attribute that is no shape": (
        lambda s, b, h, i, j: s * table.strides[0],
        r"an index of table\.strides, ",
    ),
    "an attribute of an array": (lambda s, b, h, i, j: s * table.T[0], r"an index of table\.T, "),
    "an attribute of an attribute": (lambda s, b, h, i, j: s * math.pi.real, r"math\.pi\.real, "),
    "a loop": (loop, f"a loop in line {LINE + 1}, which .* in loop .*line {LINE}.*A kernel supp"),
    "an if statement": (branches, "an if statement.* in branches"),
    "no result": (nothing_returned, "no return at its end, but `.* in nothing_returned"),
    "a name without a value": (later, r"of_later \(a name that is not defined; import or define"),
    "a module not imported": (not_imported, r"maths \(a name that is not defined"),
    "another function": (lambda s, b, h, i, j: np.exp(s), r"a call of np\.exp, .* in a lambda"),
    "a function of one's own": (lambda s, b, h, i, j: several(s, b, h, i, j), "a call of several"),
    "float64": (lambda s, b, h, i, j: s + doubles[0, i], r"doubles \(an array of float64\)"),
    "a text": (lambda s, b, h, i, j: s + text, r"text \(a str\)"),
    "a long integer": (lambda s, b, h, i, j: s + (s > 4294967296), "constant 4294967296"),
    "an integer of 32 bits": (lambda s, b, h, i, j: s + (i > 2147483648), "constant 2147483648"),
    "an index too few": (lambda s, b, h, i, j: s + table[i], r"\(where table has 2 axes\)"),
    "an index of -1": (lambda s, b, h, i, j: s + table[h, -1], "the negative index -1"),
    "a float as an index": (lambda s, b, h, i, j: s + steps[s], r"the index s \(not an integer\)"),
    "~ of a bool": (lambda s, b, h, i, j: s if ~(i > j) else 0, r"~ of i > j \(not an integer\)"),
    "no index": (lambda s, b, h, i, j: s + steps, "steps without an index"),
    "a slice": (lambda s, b, h, i, j: s + table[1:, i], "a slice"),
    "a comprehension": (lambda s, b, h, i, j: max([s for _ in (1,)]), "the call max"),
    "a set": (lambda s, b, h, i, j: s if i in {1, 2} else 0, "the comparison in i in {1, 2}"),
    "a method": (lambda s, b, h, i, j: table.sum(), r"a call of table\.sum"),
    "a lambda within": (lambda s, b, h, i, j: (lambda x: x)(s), "a call of lambda x: x"),
    "and of numbers": (lambda s, b, h, i, j: s and i, r"s \(not a bool\) in s and i"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_kernel_cannot_say_is_refused(name):
    function, message = REFUSED[name]
    q, k, v = random_inputs(1, 1, 1, 5, 5, 4)
    with pytest.raises(ValueError, match=f"^score_mod contains .*{message}") as refused:
        fa_numba.attention(q, k, v, score_mod=function)
    assert "test_mods.py, line " in str(refused.value) and "supports" in str(refused.value)


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ("return", "no return at its end, but `return`"),
        ("x = s", "no return at its end, but `x = s`"),
        ("x: int; return s", "`x: int`"),
        ("steps[0] += 1; return s", r"`steps\[0\] \+= 1`"),
        ("x = y = s; return x", "`x = y = s`"),
        ("x, y = s; return x", r"an assignment to \(?x, y\)?"),
        ("x, y = s, i, j; return x", r"an assignment to \(?x, y\)?"),
        ("[x, y] = s, i; return x", r"an assignment to \[x, y\]"),
        ("x, steps[0] = s, i; return x", r"an assignment to steps\[0\]"),
        ("x = (s, i); return s", r"`\(s, i\)`"),
        ("return s * math.nan_to_num", r"math\.nan_to_num"),
        ("return s * steps.pi", r"steps\.pi"),
        ("return s * s.pi", r"s\.pi"),
        ("x = i; return s * x[0]", "an index of x"),
        ("return s * abs(i)[0]", r"an index of abs\(i\)"),
        ("return s * width[0]", r"an index of width \(not an array\)"),
        ("return s * table.shape[2]", r"table\.shape\[2\] \(not an axis of table\)"),
        ("return s * table.shape[-1]", r"table\.shape\[-1\] \(not an axis of table\)"),
        ("return s * table.shape[i]", r"table\.shape\[i\] \(not an axis of table\)"),
        ("return s * table.shape[0, 1]", r"table\.shape\[.*\(not an axis of table\)"),
        ("return s * table[h, -2]", "the negative index -2"),
        ("return s * table[h, i, j]", r"\(where table has 2 axes\)"),
        ("return s * steps[i, j]", r"\(where steps has 1 axis\)"),
        ("return s * i ** 5", r"i \*\* 5 \(integers with an exponent not 1 to 4\)"),
        ("return s * i ** 0", r"i \*\* 0 \(integers with an exponent not 1 to 4\)"),
        ("return s * i ** j", r"i \*\* j \(integers with an exponent not 1 to 4\)"),
        ("return s @ i", r"the operator in s @ i"),
        ("return s if s is i else 0", "the comparison in s is i"),
        ("return s if i < j in steps else 0", "the comparison in i < j in steps"),
        ("return unknown.exp(s)", r"unknown \(a name that is not defined"),
        ("return s * unknown(i)", r"unknown \(a name that is not defined"),
        ("return s + steps(i)", "a call of steps"),
        ("return s + steps.sum(i)", r"a call of steps\.sum"),
        ("return s + abs(i)(j)", r"a call of abs\(i\)"),
        ("return s + 'a'", "the constant 'a'"),
        ("return s + 1j", "the constant 1j"),
    ],
)
def test_which_statements_and_expressions_are_refused(lines, says):
    text = "def mod(s, b, h, i, j):\n" + "".join(f"    {x.strip()}\n" for x in lines.split(";"))
    known = {"math": math, "steps": steps, "table": table, "width": width}
    function = random_functions.function_of(text, known)
    with pytest.raises(ValueError, match=f"^score_mod contains .*{says}.*which a kernel does not"):
        mods.captured("score_mod", function)


@pytest.mark.parametrize(
    "expression",
    ["table[h, +1]", "table[h, ~-3]", "table[h, -i + 9]", "table[h, -i]", "i ** 4", "s ** 5",
     "table.shape[1]", "i ** 1", "-2147483647", "2147483647", "table[h][j]", "i ** 0.5"],
)  # fmt: skip
def test_which_expressions_are_not_refused(expression):
    text = f"def mod(s, b, h, i, j):\n    return s + {expression}\n"
    function = random_functions.function_of(text, {"table": table})
    assert mods.captured("score_mod", function).mod.value.text


@pytest.mark.parametrize(
    ("arguments", "allowed"),
    [
        *((x, {*(f"math.{name}" for name in (*OF_MATH, *STEPS)), *CONVERSIONS})
          for x in ("s", "i", "s + i")),
        ("s, i", {"math.pow", "min", "max"}),
        ("s, s, s", {"min", "max"}),
        ("steps", {"len"}),
        *((x, set()) for x in ("*[s]", "s, *[i]", "x=s", "s, x=i", "")),
    ],
)  # fmt: skip
def test_which_functions_are_called_with_which_arguments(arguments, allowed):
    """Any function of math and any builtin, with both names that a function of math has."""
    own = {name: value for name, value in vars(math).items() if callable(value)}
    outside = [name for name, x in vars(builtins).items() if callable(x) and name not in own]
    accepted = set()
    for name in (*outside, *(f"math.{name}" for name in (*own, "min", "max", *CONVERSIONS))):
        calls = {f"{name}({arguments})": {"math": math}}
        if name.removeprefix("math.") in own:
            calls[f"{name.removeprefix('math.')}({arguments})"] = own
        for call, known in calls.items():
            text = f"def mod(s, b, h, i, j):\n    return s + {call}\n"
            function = random_functions.function_of(text, known | {"steps": steps})
            try:
                mods.captured("score_mod", function).mod.slope  # noqa: B018
            except ValueError as error:
                assert call.partition("(")[0] in str(error).partition(", which a kernel")[0] or (
                    "steps" in str(error)
                )
            else:
                accepted.add(name)
    assert accepted == allowed


@pytest.mark.parametrize("operator", ["&", "|", "^", "<<", ">>"])
@pytest.mark.parametrize("form", ["s {} i", "i {} s", "s {} (i > j)", "(i > j) {} s", "s {} s"])
def test_bits_of_a_float_are_refused(operator, form):
    form = form.format(operator)
    function = random_functions.function_of(f"def mod(s, b, h, i, j):\n    return {form}\n", {})
    with pytest.raises(ValueError, match=re.escape(f"{operator} of a float in {form}")):
        mods.captured("score_mod", function)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (3, r"must be a Python function \(def or lambda\) of \(score, b, h, i, j\), got an int"),
        (math.exp, "must be a Python function"),
        (Callable_(), "must be a Python function"),
        (lambda s, b, h, i: s, r"must have the 5 parameters .*, got a .* with \(s, b, h, i\)"),
        (lambda *all_: 0, "must have the 5 parameters"),
        (lambda s, b, h, i, j, *, x=1: s, "must have the 5 parameters"),
        (lambda s, b, h, i, j, *rest: s, "must have the 5 parameters"),
        (lambda s, b, h, i, j, **rest: s, "must have the 5 parameters"),
        (lambda s, b, h, i, j: (yield s), "must not be a generator or a coroutine"),
        (waits, "must not be a generator or a coroutine, got waits"),
        (waits_and_yields, "must not be a generator or a coroutine, got waits_and_yields"),
    ],
)
def test_what_is_no_such_function_is_refused(function, message):
    with pytest.raises(TypeError, match=f"^score_mod .*{message}"):
        fa_numba.plan((1, 1, 5, 4), (1, 1, 5, 4), score_mod=function)


@pytest.mark.parametrize("symbol", ["//", "%"])
def test_a_captured_divisor_whose_size_is_no_int32_is_refused(symbol):
    """Where it divides integers alone, and in a call that was made before with another one too."""
    q, k, v = random_inputs(1, 1, 1, 5, 5, 4)
    by, least = 3, -(2**31)
    divides = (lambda b, h, i, j: i // by < j) if symbol == "//" else lambda b, h, i, j: i % by < j
    fa_numba.attention(q, k, v, mask_mod=divides)
    by = least
    message = (
        f"^mask_mod divides by the captured variable 'by', .* from {least + 1} to .* got {least}"
    )
    for refusing in (fa_numba.attention, reference.attention):
        with pytest.raises(ValueError, match=message):
            refusing(q, k, v, mask_mod=divides)
    mods.captured("score_mod", lambda s, b, h, i, j: s + (i + least) / least)


@pytest.mark.parametrize(
    "form", ["i + j", "i - j", "-2 - i - j", "i * j", "i << 3", "(i + j) * i - j", "i ** 3"]
)
def test_integers_of_the_reference_wrap_as_a_kernels(form):
    """Integers of Python have no limit. A kernel has 32 bits."""
    text = (
        f"def mod(score, b, h, i, j):\n    x = i\n    x += j\n    return score + ({form}) + 0 * x\n"
    )
    plain = random_functions.function_of(text, {})
    function = mods.evaluated("score_mod", plain, {})
    largest = 2**31 - 1
    for i, j in ((5, 7), (largest, 2), (2**16 + 1, 2**16 + 3), (3, largest), (largest, largest)):
        exact = eval(form, {"i": i, "j": j})
        wanted = (exact + 2**31) % 2**32 - 2**31
        for kind in (int, np.int32):
            with np.errstate(over="ignore"):
                assert function(0.0, 0, 0, kind(i), kind(j)) == wanted, (i, j)


def test_a_function_without_a_source_is_refused():
    with pytest.raises(ValueError, match="must be a function whose source can be read"):
        mods.captured("mask_mod", eval("lambda b, h, i, j: i == j"))


def test_a_mask_is_a_truth_value():
    with pytest.raises(
        ValueError, match="mask_mod must return True or False, got a float, in a lambda"
    ):
        mods.captured("mask_mod", lambda b, h, i, j: i * slope)
    with pytest.raises(ValueError, match="score_mod must return a number, got True or False, in a"):
        mods.captured("score_mod", lambda s, b, h, i, j: i == j)
    assert written(lambda b, h, i, j: i & 4, "mask_mod")(0, 0, 5, 0) is True


@pytest.mark.parametrize("operator", ["&", "|", "^", "<<", ">>"])
def test_bits_of_integers_and_truth_values_are_pythons(operator):
    """Two truth values give a truth value, anything else an integer, which ~ and - take."""
    pairs = (("i", "6"), ("i", "(j == 2)"), ("(i > 4)", "j"), ("(i > 4)", "(j == 2)"))
    for left, right in pairs:
        bits = f"({left} {operator} {right})"
        of_truths = isinstance(eval(bits, {"i": 5, "j": 2}), bool)
        forms = (f"{bits} * 2",) if of_truths else (f"~{bits}", f"-{bits} // 3")
        for form in forms:
            function = random_functions.function_of(
                f"def mod(s, b, h, i, j):\n    return s + {form}\n", {}
            )
            executed = random_functions.Executed("score_mod", function)
            for i, j in ((5, 2), (2, 5), (0, 0), (9, 2)):
                found = executed.of_score(executed.mod.value)(0.5, 0, 0, i, j)
                assert found == function(0.5, 0, 0, i, j), (form, i, j)


def test_a_derivative_needs_its_function():
    with pytest.raises(ValueError, match="score_mod_grad must be None without a .*got a lambda"):
        fa_numba.plan((1, 1, 5, 4), (1, 1, 5, 4), score_mod_grad=FUNCTIONS["powers"])


def test_an_index_outside_of_its_array_is_reported():
    q, k, v = random_inputs(1, 1, 1, 5, 5, 4)
    for function in (
        lambda s, b, h, i, j: s + steps[i - 4],
        lambda s, b, h, i, j: s + steps[i + 36],
    ):
        with pytest.raises(EmulatorError, match="score_mod_0"):
            fa_numba.attention(q, k, v, score_mod=function)


# --- which function it is ------------------------------------------------------------------------


def test_lambdas_of_one_line_are_told_apart():
    both = [lambda s, b, h, i, j: s + 1, lambda s, b, h, i, j: s if i else 2]  # fmt: skip
    constants = [lambda b, h, i, j: True, lambda b, h, i, j: False]
    assert [written(f)(5.0, 0, 0, 0, 0) for f in both] == [6, 2]
    assert [written(f, "mask_mod")(0, 0, 0, 0) for f in constants] == [True, False]


def _made(x):
    return lambda s, b, h, i, j: s * x


def test_equal_code_shares_a_kernel_whatever_its_names_and_numbers():
    def launched(function):
        return fa_numba.plan((1, 2, 9, 8), (1, 2, 9, 8), score_mod=function).launched

    first = launched(_made(1.5))
    other = 0.25
    for same in (
        _made(-4.0),
        lambda score, b, h, i, j: score * other,
        lambda t, x, y, z, w: t * slope,
    ):
        assert launched(same) is not None and launched(same)[0] is first[0]
    for different in (_made(3), _made(True), lambda s, b, h, i, j: s + slope):
        assert launched(different)[0] is not first[0]


@pytest.mark.parametrize("algorithm", ["standard", "fa1", "fa2"])
def test_numbers_are_those_of_the_call(device, algorithm):
    q, k, v = random_inputs(2, 4, 2, 11, 21, 8)
    x, y = 0.5, 3

    def scaled(score, b, h, i, j):
        return score * x + (y if (i + j) % y else -1)

    for x, y in ((0.5, 3), (np.float32(-1.25), 2), (2, np.int64(5))):  # noqa: B007
        check(device, algorithm, q, k, v, tiles=SMALL, score_mod=scaled)


def test_what_only_adds_to_the_score_has_no_slope():
    adding = (
        lambda s, b, h, i, j: s - slope * abs(i - j),
        lambda s, b, h, i, j: table[h, i] + (s if i < j else s + 1),
    )
    for function in adding:
        mod = mods.captured("score_mod", function).mod
        assert mod.adds and not Features(score_mod=mod).slopes
    for function in (_made(1.0), lambda s, b, h, i, j: s if i < j else 0, FUNCTIONS["powers"]):
        assert Features(score_mod=mods.captured("score_mod", function).mod).slopes


def test_a_derivative_may_be_given():
    """Of a function whose own derivative is another one, so that it is seen which one is taken."""
    arrays = random_gradients(1, 2, 2, 11, 21, 8)
    given_ = {"score_mod": lambda s, b, h, i, j: max(s, 0), "score_mod_grad": several}
    for way in ("standard", "fa1", "fa2", "fa2-deterministic"):
        check_gradients("emulator", way, *arrays, tiles=SMALL, softcap=2.0, **given_)


# --- gradients of captured arrays ----------------------------------------------------------------

weights = np.random.default_rng(7).standard_normal((2, 3, 2), np.float32)
GRADIENTS = {
    "relative positions": lambda s, b, h, i, j: s + table[h, i - j + 19],
    "of the score": lambda s, b, h, i, j: s * table[h, j] + math.tanh(table[2, i % 9] * s),
    "read twice": lambda s, b, h, i, j: s + table[h, i] * table[h, j] + table[0, 3],
    "one for a head": lambda s, b, h, i, j: s - table[h, 0] * abs(i - j) - table[b, h + 1] * s,
    "behind a condition": lambda s, b, h, i, j: (
        s + (table[h, i - j] if i >= j else table[2, 0] * j)
    ),
    "an index at a time": lambda s, b, h, i, j: s + weights[b][steps[i] % 3][h] * flags[j],
    "min, max and a quotient": lambda s, b, h, i, j: max(s, table[h, i]) / (2 + table[h, j] ** 2),
    "one for a head under a condition": lambda s, b, h, i, j: s if i < 7 else s + i * table[h, 1],
    "buckets of distances": lambda s, b, h, i, j: s + table[h, min(abs(i - j), 5)] * flags[i],
}


def test_which_gradients_need_the_score_and_which_are_summed_first():
    found = {n: mods.captured("score_mod", f).mod.gradient for n, f in GRADIENTS.items()}
    assert {n for n, x in found.items() if x.of_score} == {
        "of the score", "one for a head", "min, max and a quotient",
    }  # fmt: skip
    assert {n: x.shared for n, x in found.items() if x.shared} == {
        "read twice": 1, "one for a head": 2, "behind a condition": 1,
        "one for a head under a condition": 1,
    }  # fmt: skip
    assert {n for n, x in found.items() if x.merged == 0} == {
        "relative positions", "one for a head", "behind a condition", "an index at a time",
        "one for a head under a condition",
    }  # fmt: skip
    unread = mods.captured("score_mod", lambda s, b, h, i, j: s if table[h, i] > 0 else -s).mod
    assert unread.gradient is None and list(unread.differentiated) == ["dscore_mod_0"]


@pytest.mark.in_turn("unit")
@pytest.mark.parametrize("unit", ["simt", "mma", "wgmma"])
@pytest.mark.parametrize("way", ["fa1", "fa2"])
@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_of_captured_arrays(name, way, unit):
    """Of both batch entries and of heads that share K and V, beside masks, a cap and dropout."""
    options = {"score_mod": GRADIENTS[name], "softcap": 3.0, "causal": True}
    arrays = random_gradients(2, 2, 1, 21, 19, 8)
    if unit == "simt":
        options |= {"dropout_p": 0.25, "seed": 5, "tiles": SMALL}
        check_gradients("emulator", way, *arrays, **options)
        return
    halves = [x.astype(np.float16) for x in arrays]
    options |= {"unit": unit} if unit == "wgmma" else {"tiles": Tiles(16, 16), "dropout_p": 0.25}
    if (way, unit) == ("fa1", "wgmma"):
        del options["softcap"]
    check_gradients("emulator", way, *halves, **options)


def test_gradients_of_captured_arrays_by_name():
    dout, q, k, v = random_gradients(1, 2, 2, 11, 20, 8)
    own = table.copy()
    own.setflags(write=False)  # it is read alone
    how = {"score_mod": lambda s, b, h, i, j: s * own[h, i] + steps[i]}
    out, lse = fa_numba.attention(q, k, v, return_lse=True, **how)
    given_ = dout, q, k, v, out, lse
    found = fa_numba.attention_backward(*given_, return_dcaptured=True, **how)
    assert len(found) == 4 and {*found[3]} == {"own", "steps"} and found[3]["steps"] is None
    assert found[3]["own"].shape == own.shape and found[3]["own"].dtype == np.float32
    assert not found[3]["own"][2].any() and found[3]["own"][:2, :11].all()
    never = {"score_mod": lambda s, b, h, i, j: s if own[h, i] > 0 else -s}
    out, lse = fa_numba.attention(q, k, v, return_lse=True, **never)
    given_ = dout, q, k, v, out, lse
    assert not fa_numba.attention_backward(*given_, return_dcaptured=True, **never)[3]["own"].any()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"score_mod": None}, "return_dcaptured must be False without a score_mod, got True"),
        (
            {"score_mod": _made(2.0)},
            "return_dcaptured must be False, because score_mod .*got True with score_mod a lambda",
        ),
        (
            {"score_mod": lambda s, b, h, i, j: s + steps[i]},
            "return_dcaptured must be False, because score_mod .*got True with score_mod a lambda",
        ),
        (
            {"deterministic": True},
            "deterministic must be False with return_dcaptured=True, because .*, got True",
        ),
        (
            {"algorithm": "standard"},
            "return_dcaptured must be False with algorithm 'standard', got True",
        ),
        ({"passes": "fwd"}, "return_dcaptured must be False with passes='fwd', got True"),
    ],
)
def test_where_there_are_no_gradients_of_captured_arrays(how, message):
    options = {"score_mod": FUNCTIONS["arrays"], "passes": "bwd", "return_dcaptured": True, **how}
    with pytest.raises(ValueError, match=message):
        fa_numba.plan((1, 1, 5, 4), (1, 1, 5, 4), **options)
    if "passes" not in how:
        given_ = random_gradients(1, 1, 1, 5, 5, 4)
        others = {n: x for n, x in options.items() if n != "passes"}
        with pytest.raises(ValueError, match=message):
            fa_numba.attention_backward(*given_, given_[1], np.zeros((1, 1, 5), "f4"), **others)


def test_hoppers_unit_says_what_it_lacks():
    """Beside a function what its kernels spill with; dQ's kernel has no P for dropout to mark."""
    how = {"dtype": "float16", "passes": "bwd", "unit": "wgmma", "algorithm": "fa2"}
    adds, other = {"score_mod": GRADIENTS["relative positions"]}, {"score_mod": several}
    slopes_, bias, gradients = {"alibi_slopes": (1,)}, {"bias": (64,)}, {"return_dcaptured": True}
    for d, given_, lacks in (
        (64, other | bias, "score_mod together with bias"),
        (64, adds | gradients | bias, "return_dcaptured together with bias"),
        (64, adds | gradients | slopes_, "return_dcaptured together with alibi_slopes"),
        (64, adds | gradients | {"dropout_p": 0.5}, "return_dcaptured together with dropout_p"),
        (64, adds | slopes_ | bias, "alibi_slopes together with bias"),
        (136, adds | bias, "bias together with score_mod at a head_dim of 136"),
        (
            136,
            other | {"dropout_p": 0.5},
            "dropout_p together with score_mod where dQ is computed by a kernel of its own",
        ),
    ):
        with pytest.raises(ValueError, match=f"unit 'wgmma' does not support the option {lacks}"):
            fa_numba.plan((1, 1, 64, d), (1, 1, 64, d), **how, **given_)
        fa_numba.plan((1, 1, 64, d), (1, 1, 64, d), **{**how, "unit": "auto"}, **given_)


def normal(*shape):
    return np.random.default_rng(len(shape)).standard_normal(shape, np.float32)


DROPS = {"dropout_p": 0.3, "seed": 5}
BESIDE = {
    "slopes": (64, "relative positions", {"alibi_slopes": table[0, :2]}),
    "slopes of each entry, a cap": (136, "of the score", {"softcap": 2.0}),
    "a bias": (64, "relative positions", {"bias": normal(2, 1, 21, 19), "causal": True}),
    "a bias and lengths": (72, "read twice", {"bias": normal(2, 21, 19), "kv_lens": [19, 7]}),
    "dropout": (64, "of the score", {**DROPS, "causal": True}),
    "dropout, two row tiles": (128, "one for a head", DROPS),
    "dropout and slopes": (40, "read twice", {**DROPS, "alibi_slopes": table[0, :2]}),
    "dropout and a bias": (128, "of the score", {**DROPS, "bias": normal(19), "q_lens": [21, 9]}),
}
BESIDE["slopes of each entry, a cap"][2]["alibi_slopes"] = normal(2, 2)


@pytest.mark.parametrize("name", BESIDE)
def test_options_beside_a_function_on_hoppers_unit(name):
    d, function, options = BESIDE[name]
    arrays = [x.astype(np.float16) for x in random_gradients(2, 2, 1, 21, 19, d)]
    how = {"unit": "wgmma", "return_dbias": False, "return_dcaptured": d != 64, **options}
    rows = 100 if "two" in name else 21
    if rows > 21:
        arrays = [x.astype(np.float16) for x in random_gradients(1, 2, 2, rows, 19, d)]
    check_gradients("emulator", "fa2", *arrays, score_mod=GRADIENTS[function], **how)


# --- compiled ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("unit", "passes"), [("simt", "bwd"), ("mma", "fwd")])
def test_nothing_is_computed_in_64_bits(unit, passes):
    """But for sin, cos and tan, whose arguments may be far from 0."""

    def function(s, b, h, i, j):
        x = math.exp(s) + math.log1p(s) / math.sqrt(s) + math.tanh(s) + math.erf(s) ** 0.3
        y = math.floor(s) // 3 + (i - 7 * j) % 5 + steps[i] + int(s) + table[h, j] * flags[i]
        return max(x, y, -s) if s > slope and i < width else s**2 // 2.0

    plan = plan_of("sm_90a", 32, unit=unit, passes=passes, tiles=Tiles(16, 16), score_mod=function)
    for kernel in plan.launched:
        ptx, _ = compiled(kernel, "sm_90a")
        assert not re.search(r"\.f64|\.local|(div|rem)\.[us]64", ptx)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("unit", "passes", "d"),
    [("mma", "fwd", 64), ("wgmma", "fwd", 64), ("mma", "bwd", 64), ("wgmma", "bwd", 128)],
)
def test_alibi_as_a_function_takes_few_more_instructions_than_as_an_option(unit, passes, d):
    how = {"unit": unit, "passes": passes, "heads": (2, 2)}
    by_option = plan_of("sm_90a", d, "alibi", **how).launched
    slopes = np.float32([0.5, 0.25])

    def alibi(score, b, h, i, j):
        return score - slopes[h] * abs(i + 10 - j)

    by_function = plan_of("sm_90a", d, score_mod=alibi, **how).launched
    name = f"fa2_{'forward' if passes == 'fwd' else 'backward'}"
    counts = [
        len(re.findall(r"^\t[a-z@].*;$", compiled(kernel, "sm_90a")[0], re.MULTILINE))
        for kernel in (*by_option, *by_function)
        if kernel.name == name
    ]
    assert len(counts) == 2 and counts[1] <= 1.05 * counts[0], counts


# --- blocks --------------------------------------------------------------------------------------

documents = np.sort(np.random.default_rng(3).integers(0, 4, (2, 96), np.int32))


def near_in_a_document(b, h, i, j):
    return documents[b, i] == documents[b, j] and i - j < width * (h + 3)


def _states(seen, tiles):
    """0, 1 or 2 for each block of ``seen``, by the definition."""
    Tr, Tc = -(-seen.shape[2] // tiles.Br), -(-seen.shape[3] // tiles.Bc)
    found = np.ones((*seen.shape[:2], Tr, Tc), int)
    for b, h, i, j in np.ndindex(*found.shape):
        rows = slice(i * tiles.Br, (i + 1) * tiles.Br)
        part = seen[b, h, rows, j * tiles.Bc : (j + 1) * tiles.Bc]
        found[b, h, i, j] = 2 if part.all() else int(part.any())
    return found


@pytest.mark.parametrize("tiles", [SMALL, Tiles(16, 32)], ids=str)
def test_blocks_are_empty_full_or_mixed(device, tiles):
    shape = (2, 2, 77, 90)
    seen = np.array([near_in_a_document(*place) for place in np.ndindex(*shape)]).reshape(shape)
    with running(device) as counts:
        found = fa_numba.create_block_mask(near_in_a_document, *shape, tiles=tiles)
        everything = fa_numba.create_block_mask(lambda b, h, i, j: i >= 0, *shape, tiles=tiles)
    assert np.array_equal(found.blocks, _states(seen, tiles)) and not (counts and counts.loads)
    assert {0, 1} <= set(found.blocks.flat) and (everything.blocks == 2).all()
    assert (found.visited == (found.blocks > 0)).all() and "empty" in str(found)
    # What kernels follow is what the host lists of an array of blocks.
    bound = Bound(Problem(2, 2, 2, 77, 90, 4, sparse=True), {}, 1.0, found.visited)
    passed = FEATURES["sparse"].passes
    for name, lists in found.lists.at(HOST).items():
        want = found.blocks if name == "block_mask" else passed[name].value(bound)
        assert np.array_equal(lists.host, want) and lists.host.dtype == want.dtype


@pytest.mark.parametrize("way", ["standard", "fa1", "fa2", "fa2-deterministic"])
def test_empty_blocks_are_not_visited_and_full_ones_not_asked(device, way):
    """Held against float64, and on the emulator against the closed form of the accesses."""
    arrays = random_gradients(2, 2, 1, 77, 90, 4)
    with devices.using(device):
        mask = fa_numba.create_block_mask(near_in_a_document, 2, 2, 77, 90, tiles=SMALL)
    options = {"block_mask": mask, "softcap": 2.0}
    if way != "fa2-deterministic":
        check(device, way, *arrays[1:], **options)
    check_gradients(device, way, *arrays, **options)


HOPPERS_TILES = [("fa1", Tiles(128, 64)), ("fa2", Tiles(64, 64, stages=2))]


@pytest.mark.parametrize("algorithm, tiles", HOPPERS_TILES)
def test_blocks_on_hoppers_unit_are_what_the_function_says(algorithm, tiles):
    """Of each the state is read while its scores are on their way."""
    q, k, v = (x.astype(np.float16) for x in random_inputs(1, 2, 1, 150, 260, 16))
    mask = fa_numba.create_block_mask(lambda b, h, i, j: i + 120 >= j, 1, 1, 150, 260, tiles=tiles)
    how = {"algorithm": algorithm, "unit": "wgmma"}
    found = fa_numba.attention(q, k, v, block_mask=mask, **how)
    assert {0, 1, 2} == set(mask.blocks.flat)
    whole = fa_numba.attention(q, k, v, mask_mod=mask.mask_mod, tiles=tiles, **how)
    assert abs(found.astype(float) - whole).max() < 1e-3


def test_a_full_block_is_not_asked():
    """Of blocks that another function made, so that it shows."""
    q, k, v = random_inputs(1, 1, 1, 16, 32, 4)
    full = fa_numba.create_block_mask(lambda b, h, i, j: i < 99, 1, 1, 16, 32, tiles=SMALL)
    mask = replace(full, mask_mod=lambda b, h, i, j: i > 99)
    for algorithm in ("fa1", "fa2"):
        found = fa_numba.attention(q, k, v, algorithm=algorithm, block_mask=mask)
        assert np.array_equal(found, fa_numba.attention(q, k, v, algorithm=algorithm, tiles=SMALL))


@pytest.mark.parametrize("algorithm, tiles", HOPPERS_TILES)
def test_each_block_on_hoppers_unit_has_its_own_state(algorithm, tiles):
    """Full, mixed, full, empty, mixed, made by a function; another hides what is mixed."""
    q, k, v = (x.astype(np.float16) for x in random_inputs(1, 2, 1, 150, 300, 16))
    how = {"algorithm": algorithm, "unit": "wgmma", "tiles": tiles}
    made = fa_numba.create_block_mask(
        lambda b, h, i, j: j < 64 or j % 2 > 0 and j < 192 or 127 < j < 192 or j > 290,
        *(1, 1, 150, 300),
        tiles=tiles,
    )
    hides = replace(made, mask_mod=lambda b, h, i, j: i > 150)
    found = fa_numba.attention(q, k, v, **how, block_mask=hides)
    assert made.blocks[0, 0, 0].tolist() == [2, 1, 2, 0, 1]
    assert np.array_equal(found, fa_numba.attention(q, k, v, **how, block_mask=made.blocks == 2))


def test_what_goes_with_blocks():
    shape = (1, 1, 77, 4)
    mask = fa_numba.create_block_mask(lambda b, h, i, j: i > j, 1, 1, 77, 77, tiles=SMALL)
    two = replace(mask, tiles=Tiles(16, 16, stages=2))
    problem = Problem(1, 1, 1, 77, 77, 16, "float16")
    for passes, stages in (("fwd", 2), ("bwd", 1)):
        tiles = planning.plan_of_attention(problem, Choices("fa2", passes), block_mask=two).tiles
        assert (tiles.Br, tiles.Bc, tiles.stages) == (16, 16, stages)
    with pytest.raises(ValueError, match="mask_mod cannot be given with a block_mask from"):
        fa_numba.plan(shape, shape, block_mask=mask, mask_mod=near_in_a_document)
    for call, says in (
        ((None, SMALL), r"mask_mod must be a function of \(b, h, i, j\), got None"),
        ((mask.mask_mod, 16), "tiles must have the attributes Br and Bc, .*got 16"),
    ):
        with pytest.raises(TypeError, match=says):
            fa_numba.create_block_mask(call[0], 1, 1, 77, 77, tiles=call[1])
    with pytest.raises(
        ValueError, match="the emulator up to about 19,8.. s, which is more than the limit of"
    ):
        fa_numba.create_block_mask(
            lambda b, h, i, j: i > j, 8, 8, 2**14, 2**14, tiles=Tiles(64, 64)
        )
    for sizes, message in (
        ((10**400, 1, 77, 77), "batch must be at most 65535 .* got 1"),
        ((1, 65536, 77, 77), "heads must be at most 65535 .* got 65536"),
        ((1, 1, 10**49, 77), "seqlen of q must be at most .* got 1"),
        ((1, 1, 2**27, 2**27), r"fewer than 2\*\*31 blocks, got .* blocks of 64 x 64"),
    ):
        with pytest.raises(ValueError, match=message):
            fa_numba.create_block_mask(near_in_a_document, *sizes, tiles=Tiles(64, 64))


def test_a_block_mask_has_what_its_function_captured():
    q, k, v = random_inputs(1, 1, 1, 40, 40, 4)
    reach = 5
    mask = fa_numba.create_block_mask(
        lambda b, h, i, j: 0 <= i - j < reach, 1, 1, 40, 40, tiles=SMALL
    )
    before = fa_numba.attention(q, k, v, block_mask=mask)
    reach = 1
    assert np.array_equal(before, fa_numba.attention(q, k, v, block_mask=mask))
    check("emulator", "fa2", q, k, v, block_mask=mask)


@pytest.mark.parametrize("unit", ["simt", "mma"])
@pytest.mark.parametrize("passes", ["fwd", "bwd"])
def test_a_sequence_without_columns_is_not_looked_up_behind_an_array(unit, passes):
    """FlashAttention-1 has a column tile of it, whose first place is asked for."""
    dout, q, k, v = (
        x.astype("f4" if unit == "simt" else "f2") for x in random_gradients(2, 2, 1, 20, 30, 16)
    )
    of_column = np.linspace(-1, 1, 30, dtype=np.float32)
    options = {"kv_lens": [30, 0], "score_mod": lambda s, b, h, i, j: s + of_column[j]}
    out, lse = reference.attention(q, k, v, return_lse=True, **options)
    given, how = {**options, "unit": unit, "algorithm": "fa1"}, {"rtol": 1e-2, "atol": 1e-2}
    if passes == "fwd":
        np.testing.assert_allclose(fa_numba.attention(q, k, v, **given), out, **how)
        return
    saved = out.astype(q.dtype), lse.astype(np.float32)
    found = fa_numba.attention_backward(dout, q, k, v, *saved, **given)
    want = reference.attention_backward(dout, q, k, v, **options)
    for a, b in zip(found, want, strict=True):
        np.testing.assert_allclose(a, b, **how)
