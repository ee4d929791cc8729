"""Functions of a caller whose exponentials overflow: values and slopes stay finite and right."""

import math

import numpy as np
import pytest
import random_functions
from backward_helpers import check_gradients, random_gradients
from random_functions import Executed

from fa_numba import Tiles
from fa_numba.mods import slopes

W = 0.7
SCORES = [0.0, 0.5, -2.0, 20.0, -20.0, 43.5, 60.0, -60.0, 88.2, -88.2, 88.5, -88.5, 88.7, -88.7]
SCORES += [89.0, -89.0, 126.4, -126.7, 127.5, -127.5, 300.0, -300.0, 1e4, -1e4, 1e10, -1e10]
SCORES += [1e20, -1e20, 22.17, -22.17, 21.9, -21.9]  # and where 4 times the score is near 88.7


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def bell(x):
    """The slope of the sigmoid."""
    return sigmoid(x) * sigmoid(-x)


def tail(x):
    """1 + tanh(y) of gelu's y, and the slope of tanh(y) by x."""
    y, slope = C * (x + 0.044715 * x**3), C * (1 + 3 * 0.044715 * x**2)
    return 2 * sigmoid(2 * y), 4 * slope * bell(2 * min(abs(y), 300))


C = math.sqrt(2 / math.pi)
GELU = "0.5 * score * (1 + math.tanh(0.7978845608028654 * (score + 0.044715 * score {})))"
# The text, the value and the slope, both written so that float64 does not overflow.
FORMS = {
    "sigmoid": ("1 / (1 + math.exp(-score))", sigmoid, bell),
    "sigmoid of a power of 2": (
        "1 / (1 + 2.0 ** -score)",
        lambda x: sigmoid(x * math.log(2)),
        lambda x: math.log(2) * bell(x * math.log(2)),
    ),
    "sigmoid, both infinite": ("math.exp(score) / (1 + math.exp(score))", sigmoid, bell),
    "sigmoid as a power": ("(1 + math.exp(-score)) ** -1.0", sigmoid, bell),
    "sigmoid, steep": (
        "1 / (1 + 3.0 * math.exp(-4 * score))",
        lambda x: sigmoid(4 * x - math.log(3)),
        lambda x: 4 * bell(4 * x - math.log(3)),
    ),
    "silu": (
        "score / (1 + math.exp(-score * w))",
        lambda x: x * sigmoid(W * x),
        lambda x: sigmoid(W * x) + W * x * bell(W * x),
    ),
    "silu as a product": (
        "score * (1 / (1 + math.exp(-score)))",
        lambda x: x * sigmoid(x),
        lambda x: sigmoid(x) + x * bell(x),
    ),
    "softplus": ("math.log(1 + math.exp(score))", lambda x: np.logaddexp(0, x), sigmoid),
    "softplus of a multiple": (
        "math.log(1 + math.exp(score) * 3.0)",
        lambda x: np.logaddexp(0, x + math.log(3)),
        lambda x: sigmoid(x + math.log(3)),
    ),
    "softplus of log1p": (
        "math.log1p(math.exp(score * w)) / w",
        lambda x: np.logaddexp(0, W * x) / W,
        lambda x: sigmoid(W * x),
    ),
    "softplus of log2": (
        "math.log2(1 + math.exp(score))",
        lambda x: np.logaddexp(0, x) / math.log(2),
        lambda x: sigmoid(x) / math.log(2),
    ),
    "tanh": ("math.tanh(score)", np.tanh, lambda x: 4 * bell(2 * x)),
    "tanh by one exp": (
        "1 - 2 / (1 + math.exp(2 * score))",
        np.tanh,
        lambda x: 4 * bell(2 * x),
    ),
    "tanh, both infinite": (
        "(math.exp(2 * score) - 1) / (math.exp(2 * score) + 1)",
        np.tanh,
        lambda x: 4 * bell(2 * x),
    ),
    "tanh of a square": (
        "math.tanh(score * score)",
        lambda x: np.tanh(x * x),
        lambda x: 8 * x * bell(2 * min(x * x, 1e4)),
    ),
    "gelu": (
        GELU.format("** 3"),
        lambda x: 0.5 * x * tail(x)[0],
        lambda x: 0.5 * tail(x)[0] + 0.5 * x * tail(x)[1],
    ),
    "gelu of products": (
        GELU.format("* score * score"),
        lambda x: 0.5 * x * tail(x)[0],
        lambda x: 0.5 * tail(x)[0] + 0.5 * x * tail(x)[1],
    ),
    "gelu by exp": (
        "score / (1 + math.exp(-1.5957691216057308 * (score + 0.044715 * score ** 3)))",
        lambda x: 0.5 * x * tail(x)[0],
        lambda x: 0.5 * tail(x)[0] + 0.5 * x * tail(x)[1],
    ),
    "bell curve": (
        "math.exp(-score * score)",
        lambda x: np.exp(-x * x),
        lambda x: -2 * x * np.exp(-x * x),
    ),
    "flat bell curve": (
        "math.exp(-score ** 4)",
        lambda x: np.exp(-(x**4)),
        lambda x: -4 * x**3 * np.exp(-(x**4)),
    ),
    "log cosh": (
        "math.log(math.cosh(score))",
        lambda x: np.logaddexp(x, -x) - math.log(2),
        np.tanh,
    ),
    "a fraction of powers": (
        "1 / (1 + score ** 4)",
        lambda x: 1 / (1 + x**4),
        lambda x: -4 * x**3 / (1 + x**4) ** 2,
    ),
    "mish": (
        "score * math.tanh(math.log1p(math.exp(score)))",
        lambda x: x * np.tanh(np.logaddexp(0, x)),
        lambda x: (
            np.tanh(np.logaddexp(0, x))
            + x * 4 * bell(2 * min(np.logaddexp(0, x), 300)) * sigmoid(x)
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_values_and_slopes_where_float32_overflows(name):
    """At scores on both sides of the overflow of exp, of its slope, and of powers."""
    form, value, slope = FORMS[name]
    text = f"def mod(score, b, h, i, j):\n    return {form}\n"
    function = random_functions.function_of(text, {"math": math, "w": W})
    executed = Executed("score_mod", function, single=True)
    one = np.float32(1)
    both, alone = (executed.of_score(x, one, one) for x in (executed.mod.both, executed.mod.value))
    with np.errstate(all="ignore"):
        for score in np.float32(SCORES):
            x = float(score)
            wanted = value(x), slope(x)
            assert np.isfinite(wanted).all(), (x, wanted)
            found = both(score, 0, 0, 0, 0)
            size = 1 + abs(np.array(wanted))
            assert (abs(np.subtract(found, wanted)) < 1e-5 * size).all(), (x, found, wanted)
            assert alone(score, 0, 0, 0, 0) == found[0], x  # as the forward pass has it


def test_a_power_of_an_exponential_has_a_finite_slope_while_it_is_finite():
    """The slope of the exponential overflows before the exponential does."""
    text = "def mod(score, b, h, i, j):\n    return (1 + math.exp(4 * score)) ** 0.25\n"
    executed = Executed("score_mod", random_functions.function_of(text, {"math": math}), True)
    slope = executed.of_score(executed.mod.slope, np.float32(1), np.float32(1))
    with np.errstate(all="ignore"):
        found = slope(np.float32(22.17), 0, 0, 0, 0)
    assert abs(found / math.exp(22.17) - 1) < 1e-4


def test_slopes_by_elements_where_exp_overflows():
    values = {"math": math, "rates": np.float32([0.5, 4.0])}
    text = "def mod(score, b, h, i, j):\n    return score / (1 + math.exp(rates[h] * j))\n"
    executed = Executed("score_mod", random_functions.function_of(text, values), single=True)
    with np.errstate(all="ignore"):
        one = np.float32(1)
        found = executed.gradients([(one, one, 0, 1, 0, j) for j in (22, 400)])["rates"]
    assert found[0] == 0 and abs(found[1]) < 1e-30
    text = "def mod(score, b, h, i, j):\n    return score / (1 + math.exp(-score * rates[h]))\n"
    function = random_functions.function_of(text, values)
    executed = Executed("score_mod", function, single=True)
    places = [(np.float32(s), np.float32(1), 0, 1, 0, n) for n, s in enumerate([-88.5, -21.9, -22])]
    with np.errstate(all="ignore"):
        found = executed.gradients(places)["rates"]
        wanted = sum(s * s * bell(4 * float(s)) for s, *_ in places)
    assert found[0] == 0 and abs(found[1] - wanted) < 1e-30 + 1e-5 * wanted, (found, wanted)


@pytest.mark.parametrize("way", ["fa1", "fa2"])
def test_gradients_of_a_call_where_exp_overflows(way):
    """The least score is below -100. O was finite before, and dQ and dK were NaN."""
    w = 1.0
    dout, q, k, v = random_gradients(1, 2, 1, 9, 17, 8)
    q = np.float32(60) * q
    assert (q @ k.transpose(0, 1, 3, 2)).min() < -100 * math.sqrt(8)
    check_gradients(
        *("emulator", way, dout, q, k, v),
        tiles=Tiles(8, 16),
        score_mod=lambda score, b, h, i, j: score / (1 + math.exp(-score * w)),
    )


def test_a_logarithm_that_is_not_known_stays_as_it_is():
    """Of two exponentials of the score, and of a difference, whose infinity is negative."""
    one = np.float32(1)
    for form, score, wanted in (
        ("math.log(math.exp(score) + math.exp(2 * score))", 60.0, math.inf),
        ("math.log(4 - math.exp(score))", 1.0, math.log(4 - math.e)),
    ):
        text = f"def mod(score, b, h, i, j):\n    return {form}\n"
        executed = Executed("score_mod", random_functions.function_of(text, {"math": math}), True)
        mod = executed.mod
        values = executed.of_score(mod.value, one, one), executed.of_score(mod.both, one, one)
        with np.errstate(all="ignore"):
            found = [
                values[0](np.float32(score), 0, 0, 0, 0),
                values[1](one * score, 0, 0, 0, 0)[0],
            ]
        assert found == pytest.approx([wanted, wanted], rel=1e-6)


# --- rules of derivatives, at scores where nothing overflows -----------------------------------

GROWING = ("math.exp(score)", "math.expm1(score)", "math.cosh(score)", "2.0 ** score", "score ** 3")
# Of positive elements w; log and quotients have rules of their own where exponentials take part.
BY_ELEMENTS = (
    "math.log(math.exp(score) + w[h])",
    "math.log1p(w[h] * math.exp(score))",
    "math.log2(math.exp(score) - w[h] / 8)",
    "math.exp(score) / (w[h] + math.exp(score))",
    "math.log(w[h] ** score)",
    "(w[h] - math.exp(score)) / (1 + math.exp(w[h] * score))",
    "math.log(2.0 ** (score * w[h]) + 1)",
)


def by_score(function, x):
    return lambda step: function(x + step, 0, 0, 0, 0)


@pytest.mark.parametrize("name", slopes.OF_MATH)
def test_each_function_of_each_value_that_grows_has_its_slope(name):
    for inner in GROWING:
        text = f"def mod(score, b, h, i, j):\n    return math.{name}({inner})\n"
        function = random_functions.function_of(text, {"math": math})
        executed = Executed("score_mod", function, single=True)
        one = np.float32(1)
        for x in (0.3, 0.9):
            value, slope = executed.of_score(executed.mod.both, one, one)(np.float32(x), 0, 0, 0, 0)
            wanted, error = random_functions.differences(by_score(function, x))
            assert value == pytest.approx(function(x, 0, 0, 0, 0), rel=1e-5, abs=1e-6), inner
            assert slope == pytest.approx(wanted, rel=1e-4, abs=1e-5 + error), (inner, x)


@pytest.mark.parametrize("form", BY_ELEMENTS)
def test_slopes_by_elements_beside_exponentials(form):
    w, one = np.float32([0.0, 1.75]), np.float32(1)
    text = f"def mod(score, b, h, i, j):\n    return {form}\n"
    executed = Executed(
        "score_mod", random_functions.function_of(text, {"math": math, "w": w}), True
    )
    for x in (-0.75, 1.5):
        found = executed.gradients([(np.float32(x), one, 0, 1, 0, 0)])["w"]

        def shifted(step, x=x):
            moved = {"math": math, "w": np.array([0.0, 1.75 + step])}
            return random_functions.function_of(text, moved)(x, 0, 1, 0, 0)

        wanted, error = random_functions.differences(shifted)
        assert found[0] == 0 and found[1] == pytest.approx(wanted, rel=1e-4, abs=1e-5 + error)
