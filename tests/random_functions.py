"""Random functions of a caller: `score_mod` and `mask_mod` with every syntax that is allowed.

`text_of(option, seed)` returns the source of a function, which is the same one for the same seed.
`function_of` returns the function, whose source `linecache` knows. `Executed` executes what
kernels have of the function. Values stay moderate, divisors stay away from 0 and arguments of
logarithms and roots stay positive, because a difference quotient needs a smooth function.
"""

import ast
import linecache
import math
import random
import zlib
from types import FunctionType, SimpleNamespace

import numpy as np
from scipy import special

from fa_numba import mods

ROWS, COLUMNS, BATCH, HEADS = 7, 9, 2, 3  # indices b, h, i, j are below these
SHAPES = {"u": (24,), "m": (HEADS, 24), "c": (BATCH, HEADS, 12)}
INTEGERS = ("i", "j", "h", "b", "i", "j")
FLOATS = (0.5, 1.0, 1.5, 2.0, 0.25, 3.0)
# Functions of math, and an argument x as the function can take it.
OF_MATH = {
    "exp": "math.sin({x})", "expm1": "math.sin({x})", "sinh": "math.sin({x})",
    "cosh": "math.cos({x})", "tan": "0.4 * math.sin({x})", "log": "({x}) ** 2 + 1.5",
    "log2": "({x}) ** 2 + 1.5", "log10": "({x}) ** 2 + 1.5", "log1p": "({x}) ** 2",
    "sqrt": "({x}) ** 2 + 0.5", "sin": "{x}", "cos": "{x}", "atan": "{x}", "tanh": "{x}",
    "erf": "{x}", "fabs": "{x}",
}  # fmt: skip
STEPS = ("floor", "ceil", "trunc")
SHARED = ("w > 0.5", "n > 2", "x0 < w < n", "on")  # conditions that all scores share
COMPARISONS = ("<", "<=", ">", ">=", "==", "!=")


def captured_values(seed=0):
    """Return what a function may take from outside, by name: numbers and arrays."""
    rng = np.random.default_rng(seed)
    arrays = {name: rng.uniform(-1.5, 1.5, shape) for name, shape in SHAPES.items()}
    return {
        "math": math, "w": 0.7, "x0": -1.25, "n": 3, "neg": -4, "on": True, "off": False,
        **{name: values.astype(np.float32) for name, values in arrays.items()},
        "p": rng.integers(0, 12, 24, np.int32), "f": rng.random(24) < 0.5,
        "g": rng.random((HEADS, 24)) < 0.5,
    }  # fmt: skip


class Grammar:
    """Draws expressions of a kind as text. `smooth`: without steps and kinks in the score."""

    def __init__(self, rng, score=True, smooth=False, arrays=True):
        self.rng, self.score, self.smooth, self.arrays = rng, score, smooth, arrays
        self.own = {"int": [], "float": [], "bool": []}  # names that statements have assigned

    def pick(self, *choices):
        return self.rng.choice(choices)

    def expression(self, kind, depth, form=None):
        """Draw an expression, whose outermost operation is that of the number ``form``."""
        return {"int": self.integer, "float": self.real, "bool": self.truth}[kind](depth, form)

    # --- integers ---

    def integer(self, depth, form=None):
        leaves = [*INTEGERS, *INTEGERS, *map(str, range(5)), "n", "neg", *self.own["int"]]
        if depth <= 0 and form is None:
            return self.rng.choice(leaves)
        a, b, c = (lambda: self.integer(depth - self.rng.randint(1, 2)) for _ in range(3))
        forms = [
            lambda: f"({a()} {self.pick('+', '-', '*', '&', '|', '^')} {b()})",
            lambda: "(i - j)",
            lambda: f"({a()} {self.pick('//', '%')} {self.divisor()})",
            lambda: f"({a()} {self.pick('<<', '>>')} {self.pick('1', '2', 'h')})",
            lambda: f"{self.pick('-', '+', '~')}({a()})",
            lambda: f"abs({a()})",
            lambda: f"{self.pick('min', 'max')}({a()}, {b()})",
            lambda: f"{self.pick('min', 'max')}({a()}, {b()}, {c()})",
            lambda: f"({a()} if {self.truth(depth - 1)} else {b()})",
            lambda: f"({a()} + ({self.truth(depth - 1)}))",
            lambda: f"int({self.truth(depth - 1)})",
            lambda: f"({a()} % 5) ** {self.pick('1', '2', '3', '4')}",
            lambda: f"~(({self.truth(depth - 1)}) ** {self.pick('1', '2')})",
            lambda: "(i % (12 - i) + j // (20 - j))",
            lambda: f"(({self.truth(depth - 1)}) {self.pick('+', '<<', '*', '//')} (h + 1))",
            lambda: f"{self.pick('-', '+', 'abs')}({self.truth(depth - 1)})",
        ]
        if self.arrays:
            forms += [
                lambda: f"p[{self.index(depth - 1)}]",
                lambda: self.pick("len(u)", "len(m)", "m.shape[1]", "c.shape[2]", "p.shape[0]"),
            ]
        if not self.smooth or not self.score:
            x = f"{self.pick('math.floor', 'math.ceil', 'math.trunc', 'int')}"
            forms += [lambda: f"{x}({self.real(depth - 1)})"]
        return (self.rng.choice(forms) if form is None else forms[form % len(forms)])()

    def divisor(self):
        shared = "2", "3", "5", "n", "neg", "(h + 2)", "(n + 1)", "-3", "(b - 4)", "n"
        return self.pick(*shared, "(j + 1)", "(i - 9)", "(n - 8)")

    def index(self, depth):
        """An index of an axis of 24."""
        near = ["i", "j", "h", "b", "1", "i + j", "i - j + 9", "min(abs(i - j), 5)", "n"]
        near += ["p[i]", "i % 4", "9 - j", "i // 2", "p[h]", "h + n", "max(i, j)", "i - (j - 9)"]
        if self.rng.random() < 0.7:
            return self.rng.choice(near)
        return f"abs({self.integer(min(depth, 2))}) % 12"

    # --- floats ---

    def number(self):
        return self.pick(*map(str, FLOATS), "w", "x0", "(w * x0)", "(x0 / n)", "math.pi", "math.e")

    def element(self, depth):
        if not self.arrays:
            return self.number()
        head = self.pick("h", "h", "0", "b", "h % 2", "i % 2", "(j + h) % 2")
        return self.pick(
            f"u[{self.index(depth)}]",
            f"m[{head}, {self.index(depth)}]",
            f"m[{head}][{self.index(depth)}]",
            f"c[b, {head}, {self.pick('i', 'j', 'p[i]', '3', 'i // 2 + j // 2')}]",
            f"c[b][{head}][{self.pick('i', 'j', '2')}]",
        )

    def real(self, depth, form=None):
        leaves = ["score"] * 4 * self.score + [self.number(), *(self.element(1) for _ in range(3))]
        leaves += self.own["float"] * 3
        if form is None and (depth <= 0 or self.rng.random() < 0.05):
            return self.rng.choice(leaves)
        a, b, c = (lambda: self.real(depth - self.rng.randint(1, 2)) for _ in range(3))
        forms = [
            lambda: f"({a()} {self.pick('+', '-', '*')} {b()})",
            lambda: f"({a()} {self.pick('+', '-', '*')} {b()})",
            lambda: f"({a()} * {self.number()})",
            lambda: f"({a()} / {self.number()})",
            lambda: f"({a()} / (({b()}) ** 2 + {self.pick('2', '1.5', 'w')}))",
            lambda: f"({self.number()} / (2.5 + math.sin({a()})))",
            lambda: f"({a()} * {self.number()} * {self.number()} / {self.number()})",
            lambda: f"({a()} / {self.within()})",
            lambda: f"({a()} / ({self.weight()} + {self.grown(b)}))",
            lambda: f"({self.grown(a)} / ({self.grown(b)} + {self.weight()}))",
            lambda: f"({self.weight()} / ({self.grown(a)} * {self.weight()}))",
            lambda: f"math.{self.pick('log', 'log2', 'log10')}({self.weight()} + {self.grown(b)})",
            lambda: f"math.log1p({self.grown(a)} * {self.weight()})",
            lambda: f"(({self.weight()} + {self.grown(a)}) ** {self.pick('-1.0', '-2', '0.5')})",
            lambda: f"({a()} / (-{self.grown(b)} - {self.weight()}))",
            lambda: f"({a()} / (4 - {self.grown(b)}))",
            lambda: f"({self.grown(a)} / (4 - {self.grown(b)}))",
            lambda: f"math.log(({a()}) ** 2 + {self.grown(b)})",
            lambda: f"({self.weight()} / ({self.grown(b)} + ({a()}) ** 2))",
            lambda: f"{self.pick('math.log', 'math.sqrt', 'math.log2')}({self.within()})",
            lambda: f"({self.within()} ** {self.pick('0.5', '-1.5', 'w')})",
            lambda: f"({a()} % {self.within()})",
            lambda: f"({a()} {self.pick('+', '-', '*')} {self.integer(depth - 1)})",
            lambda: f"({self.integer(depth - 1)} / {self.pick('7', '3.5', '(j + 1)', 'n')})",
            lambda: f"-{a()}",
            lambda: f"float({self.pick(a(), self.integer(depth - 1))})",
            lambda: f"({a()} if {self.shape(depth - 1)} else {self.integer(depth - 1)})",
            lambda: f"({a()} * {self.pick('(i > 2)', f'({self.shape(depth - 1)})')})",
            lambda: f"{self.pick('math.sin', 'math.tanh', 'math.atan')}({a()})",
            lambda: f"({a()} ** {self.pick('1', '2', '2', '3', '4')})",
            lambda: f"((({a()}) ** 2 + 0.7) ** {self.pick('-1', '0.5', 'x0', 'n', 'i', '-1.5')})",
            lambda: f"({self.pick('2.0', '(w + 1)', 'math.pi')} ** math.sin({a()}))",
            lambda: f"math.pow(({a()}) ** 2 + 0.6, math.cos({b()}))",
            lambda: f"({a()} if {self.shape(depth - 1)} else {b()})",
        ]
        for name, argument in OF_MATH.items():
            if not (self.smooth and name == "fabs"):
                forms.append(lambda f=f"math.{name}({argument})": f.format(x=a()))
        if not self.smooth:
            forms += [
                lambda: f"{self.pick('min', 'max')}({a()}, {b()})",
                lambda: f"{self.pick('min', 'max')}({a()}, {b()}, {c()})",
                lambda: f"{self.pick('min', 'max')}({self.integer(depth - 1)}, {a()})",
                lambda: f"abs({a()})",
                lambda: f"({a()} if {self.truth(depth - 1)} else {b()})",
                lambda: f"({a()} % {self.positive(b)})",
                lambda: f"({a()} % {self.pick('2.5', '-1.75', 'w', 'x0', 'n')})",
                lambda: f"({self.number()} % {self.positive(b)})",
                lambda: f"({a()} // {self.pick('2.5', 'x0', self.positive(b))})",
                lambda: f"math.{self.pick(*STEPS)}({a()})",
                lambda: f"math.fabs({a()})",
            ]
        return (self.rng.choice(forms) if form is None else forms[form % len(forms)])()

    def once(self, depth):
        """An expression that reads the score once, in a product or a function of one."""
        join = self.pick("and", "or", "&")
        both = f"(({self.pick(*SHARED)}) {join} ({self.shape(0)}))"
        factors = [*(self.number() for _ in range(2)), both, f"({self.shape(1)})", self.element(1)]
        factors = self.rng.sample(factors, self.rng.choice([1, 1, 2, 3]))
        product = " * ".join(self.rng.sample(["score", *factors], len(factors) + 1))
        first = self.pick("", "math.tanh", "math.expm1", "math.sin")
        score, self.score, own, self.own = self.score, False, self.own, {k: [] for k in self.own}
        more = self.real(depth - 2)
        self.score, self.own = score, own
        return f"{first}({product}) {self.pick('+', '-', '*')} {more}"

    def grown(self, argument):
        """An exponential, of a moderate argument."""
        text = self.pick("math.exp({})", "math.exp({})", "math.cosh({})", "2.0 ** {}", "w ** {}")
        return text.format(f"math.sin({argument()})")

    def weight(self):
        """A number above 0."""
        return self.pick("1", "w", "1.5", "abs(x0)", f"({self.element(0)} ** 2 + 0.1)", "(i + 1)")

    def within(self):
        """A number that is above 0 for rows and columns of the matrix alone."""
        return self.pick("(20 - j)", "(12 - i)", "(12.5 - max(i, j))", "(i - 13) * -0.5")

    def positive(self, argument):
        sign = self.pick("", "-")
        return f"({sign}(({argument()}) ** 2 + {self.pick('1.5', '2', '0.8')}))"

    # --- truths ---

    def shape(self, depth, form=None):
        """A condition in which the score has no part."""
        score, self.score = self.score, False
        own, self.own = self.own, {"int": [], "float": [], "bool": []}
        text = self.truth(depth, form)
        self.score, self.own = score, own
        return text

    def truth(self, depth, form=None):
        leaves = [
            "on",
            "off",
            *SHARED,
            "i > j",
            "i >= j",
            "j <= i",
            "i == j",
            "i != j",
            "h == 1",
            "b < 1",
        ]
        leaves += ["i > x0", "w <= j", "j > score" if self.score else "n > i"]
        leaves += [f"f[{self.index(1)}]", f"g[h, {self.index(1)}]"] * 2 * self.arrays
        if depth <= 0 and form is None:
            return self.rng.choice(leaves + self.own["bool"] * 2)
        a, b = (lambda: f"({self.truth(depth - self.rng.randint(1, 2))})" for _ in range(2))
        low = depth - 1
        kind = self.pick("int", "int", "float")
        term = self.integer if kind == "int" else self.real
        op = lambda: self.pick(*COMPARISONS)  # noqa: E731
        forms = [
            lambda: f"{term(low)} {self.pick(*COMPARISONS)} {term(low)}",
            lambda: f"{term(low)} {op()} {term(low)} {op()} {term(low)}",
            lambda: f"{term(low)} {op()} {term(low)} {op()} {term(low)} {op()} {term(low)}",
            lambda: "0 <= i - j < 3",
            lambda: f"{a()} and {b()}",
            lambda: f"{self.pick(*SHARED)} {self.pick('and', 'or')} {b()}",
            lambda: f"x0 < {self.pick('w', 'n')} {op()} {self.pick('i', 'j')}",
            lambda: f"{a()} or {b()}",
            lambda: f"{a()} and {b()} and i > 1",
            lambda: f"{a()} or {b()} or {a()}",
            lambda: f"not {a()}",
            lambda: f"not {self.integer(low)}",
            lambda: f"bool({self.integer(low)})",
            lambda: f"{a()} {self.pick('&', '|', '^')} {b()}",
            lambda: f"({self.truth(low)} if {self.truth(low)} else {self.truth(low)})",
            lambda: f"{a()} {self.pick('==', '!=')} {b()}",
        ]
        if self.arrays:
            forms += [
                lambda: f"0 <= i - j < p[i - j] {op()} {self.integer(low)}",
                lambda: f"i >= j and {self.pick('f[i - j]', 'u[i - j] > 0', 'p[i - j] > j')}",
                lambda: f"i < j or {self.pick('f[i - j]', 'u[i - j] > 0', 'p[i - j] > j')}",
            ]
        return (self.rng.choice(forms) if form is None else forms[form % len(forms)])()

    # --- statements ---

    def statements(self, count, depth):
        return [self.statement(f"t{n}", depth) for n in range(count)]

    def statement(self, name, depth):
        kind = self.pick("float", "float", "float", "int", "bool")
        form = self.rng.random()
        if form < 0.35 and self.own[kind] and kind != "bool":
            return self.augmented(self.rng.choice(self.own[kind]), kind, depth)
        if form < 0.5:
            other = f"{name}b"
            kinds = kind, self.pick("float", "int")
            values = [self.expression(each, depth) for each in kinds]
            for each, target in zip(kinds, (name, other), strict=True):
                self.own[each].append(target)
            return f"{name}, {other} = {values[0]}, {values[1]}"
        text = self.expression(kind, depth)
        if form < 0.6 and self.score and kind == "float":
            return f"score = {text}"
        self.own[kind].append(name)
        if form < 0.7:
            return f"{name}: {kind} = {text}"
        return f"{name} = {text}"

    def augmented(self, name, kind, depth):
        if kind == "float":
            op = self.pick("+=", "-=", "*=", "/=", "+=")
            value = self.number() if op == "/=" else self.real(depth - 1)
            if not self.smooth and self.rng.random() < 0.2:
                op, value = self.pick("%=", "//="), self.pick("2.5", "x0", "w")
            return f"{name} {op} {value}"
        op = self.pick("+=", "-=", "*=", "&=", "|=", "^=", "//=", "%=", "<<=", ">>=")
        value = self.divisor() if op in ("//=", "%=") else self.integer(depth - 1)
        return f"{name} {op} {'1' if op in ('<<=', '>>=') else value}"


def text_of(option, seed, depth=3, moderate=False, **how):
    """Return the source of the function of this seed.

    With ``moderate``, a score changes by less than 1, and its slope stays moderate too.
    """
    rng = random.Random(f"{option} {seed}")
    score = option != "mask_mod"
    grammar = Grammar(rng, score=score, **how)
    parameters = ("score, " if score else "") + "b, h, i, j"
    lines = grammar.statements(rng.choice([0, 0, 1, 2, 4]), depth - 1)
    if score and rng.random() < 0.2:
        grammar.own = {"int": [], "float": [], "bool": []}
        result = grammar.once(depth)
        return "\n".join([f"def mod({parameters}):", f"    return {result}", ""])
    kind = "float" if score else rng.choice(["bool", "bool", "bool", "int"])
    form = zlib.crc32(str(seed).encode()) if isinstance(seed, str) else seed
    result = grammar.expression(kind, depth, form)
    if score:  # one form of each kind at least
        result = (
            f"({result})",
            f"({result}) + {grammar.integer(depth - 2, form // 4)} / 7",
            f"({result}) * ({grammar.shape(depth - 2, form // 4)})",
            f"({result} if {grammar.truth(depth - 2, form // 4)} else {grammar.real(1)})",
        )[form % 4]
    for name in grammar.own["float"][-2:] * score:
        if name not in result and rng.random() < 0.8:
            result = f"{result} {rng.choice('+-*')} {name}"
    if score and "score" not in result and rng.random() < 0.7:
        result = f"score {rng.choice('+-*')} {result}"
    if moderate:
        result = f"score + math.sin(math.atan({result}))"
    head = f"def mod({parameters}):"
    return "\n".join([head, *(f"    {line}" for line in [*lines, f"return {result}"]), ""])


def bounded_text_of(seed):
    """Return the source of a function of few rules, of which each may keep a slope finite."""
    rng = random.Random(f"bounded {seed}")
    numbers = "big", "big", "w", "2.0", "-x0"
    leaves = *["score"] * 5, "w", "u[j]", "huge[i]", "huge[0]", "huge[0]", "big"

    def grown(depth):
        if depth == 0:
            return rng.choice(leaves)
        a, b = (grown(max(0, depth - rng.choice([1, 1, 2]))) for _ in range(2))
        number = rng.choice(numbers)
        return rng.choice(
            [
                f"math.{rng.choice(BOUNDED)}({a})",
                f"math.{rng.choice(['sin', 'exp', 'sqrt', 'fabs', 'tan'])}({a})",
                f"({a} + {b})",
                f"({a} - {b})",
                f"({number} * {a} - {rng.choice(numbers)} * {b})",
                f"({a} * {b})",
                f"(big * {a} {rng.choice('+-')} big * {b})",
                "(big * score - big * score)",
                f"({a} * {number} * {rng.choice(numbers)})",
                f"({number} * {a})",
                f"({a} / {number})",
                f"({a} / {b})",
                f"-{a}",
                f"max({a}, {b})",
                f"({a} if i > j else {b})",
            ]
        )

    outer = rng.choice([f"math.{rng.choice(BOUNDED)}", f"math.{rng.choice(BOUNDED)}", ""])
    factor = rng.choice(["", "", "", "w * ", "huge[0] * ", "u[j] * "])
    return f"def mod(score, b, h, i, j):\n    return {factor}{outer}({grown(3)})\n"


BOUNDED = ("tanh", "atan", "erf")


def product_text_of(seed):
    """Return the source of a function of products, some of whose factors all scores share."""
    rng = random.Random(f"product {seed}")
    leaves = (
        "w",
        "x0",
        "2.0",
        "n",
        "i",
        "j",
        "u[0]",
        "u[j]",
        "m[h, 1]",
        "(w > 0.5)",
        "(on and i > 2)",
    )
    leaves += "(x0 < w <= i)", "(w * x0 + 1)", "(w + i)", "(n * j - x0)", "(n + h) / w"

    def factors(score, depth):
        chosen = [rng.choice(leaves) for _ in range(rng.choice([1, 2, 2, 3]))]
        if score:
            chosen.insert(rng.randrange(len(chosen) + 1), score)
        if depth:
            chosen.insert(rng.randrange(len(chosen) + 1), f"({grown('', depth - 1)})")
        text = chosen[0]
        for each in chosen[1:]:
            text += (
                f" * {each}"
                if rng.random() < 0.8
                else f" * {each} / {rng.choice(['w', 'x0', 'n'])}"
            )
        return text

    def grown(score, depth):
        product = factors(score, depth)
        outer = rng.choice(["", "", "", "math.tanh", "math.sin", "-", "abs"])
        more = rng.choice(
            ["", f" + {factors('', 0)}", f" - {factors(score, 0)}", f" * {factors('', 0)}"]
        )
        return f"{outer}({product}){more}"

    return f"def mod(score, b, h, i, j):\n    return {grown('score', rng.choice([0, 1, 1]))}\n"


def function_of(text, values, name="mod"):
    """Return the function of this text, which takes ``values`` from outside."""
    file = f"<random_functions {zlib.crc32(text.encode()):08x}>"
    linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
    known = dict(values)
    exec(compile(text, file, "exec"), known)
    return known[name]


# --- what a kernel has of a function, in float64 -------------------------------------------------


class Plain:
    """An array of Python's numbers. Like a kernel's, its indices are not below 0.

    ``read`` are the indices of the elements that were read, and ``changed`` is added to elements.
    """

    def __init__(self, array, outer=(), whole=None):
        self.array, self.outer, self.whole = array, outer, whole or self
        self.changed, self.read = {}, {}

    @property
    def shape(self):
        return self.array.shape[len(self.outer) :]

    def __len__(self):
        return self.shape[0]

    def __getitem__(self, index):
        place = (*self.outer, *(index if isinstance(index, tuple) else (index,)))
        if len(place) < self.array.ndim:
            return Plain(self.array, place, self.whole)
        if not all(0 <= n < size for n, size in zip(place, self.array.shape, strict=True)):
            raise IndexError(place)
        self.whole.read[place] = None
        value, changed = self.array.item(place), self.whole.changed
        return value + changed.get(place, 0.0) if changed else value


def plain(values):
    """Return the values from outside as Python's own, in float64."""
    return {name: Plain(x) if isinstance(x, np.ndarray) else x for name, x in values.items()}


def exact(function, values):
    """Return the function itself, with ``values`` from outside."""
    return FunctionType(function.__code__, {**function.__globals__, **values})


def _divided(x, d, inverse):
    """Return x // d and x % d, by an inverse that must be that of d."""
    assert (inverse - divisor(d)) % 2**32 == 0, (d, inverse)
    return divmod(x, d)


def divisor(d):
    return (2**32 - 1) // max(1, abs(d))


class Single:
    """math for NumPy's float32, which gives an inf or NaN where Python raises."""

    inf, nan = np.float32(math.inf), np.float32(math.nan)

    def __getattr__(self, name):
        of_numpy = {"atan": np.arctan, "pow": np.power, "erf": special.erf}
        function = of_numpy.get(name) or getattr(np, name)
        return lambda *x: function(*map(np.float32, x))


def wrapped(x):
    """Return an int32. Of a float it is the nearest one, and 0 of NaN, as on a GPU."""
    if isinstance(x, (float, np.floating)):
        return int(np.clip(np.nan_to_num(np.float64(x), nan=0), -(2**31), 2**31 - 1))
    return (int(x) + 2**31) % 2**32 - 2**31


IN_DOUBLE = {"int32": int, "uint32": int, "float32": float, "math": math}
IN_SINGLE = {"int32": wrapped, "uint32": int, "float32": np.float32, "math": Single()}


def check_assigned(text):
    """Check that a function reads only names which each way to them has assigned, as Numba asks."""
    (function,) = ast.parse(text).body
    known = {"int32", "uint32", "float32", "math", "divisor", "floor_divide", "modulo"}
    known |= {"add_global", "min", "max", "abs", *(each.arg for each in function.args.args)}

    def names(node, how):
        found = (x for x in ast.walk(node) if isinstance(x, ast.Name))
        return {x.id for x in found if isinstance(x.ctx, how)}

    def after(statements, known):
        for node in statements:
            of = node.test if isinstance(node, ast.If) else node
            assert names(of, ast.Load) <= known, (text, names(of, ast.Load) - known)
            if isinstance(node, ast.If):
                known = after(node.body, known) & after(node.orelse, known)
            else:
                known = known | names(node, ast.Store)
        return known

    after(function.body, known)


class Executed:
    """The texts that a kernel has of a function, executed by Python in float64 or in float32."""

    def __init__(self, option, function, single=False):
        self.option = option
        self.mod, self.values = mods.captured(option, function)
        self.known = dict(IN_SINGLE if single else IN_DOUBLE)
        self.known |= {"divisor": divisor, "add_global": self.add}
        self.known |= {"floor_divide": lambda *x: _divided(*x)[0]}
        self.known |= {"modulo": lambda *x: _divided(*x)[1]}
        self.options = SimpleNamespace()
        for field, (name, value) in zip(self.mod.fields, self.values, strict=True):
            made = "options." in name  # of numbers, here in float64
            own = eval(name, {**self.known, "options": self.options}) if made else value
            if isinstance(own, np.ndarray):
                own = own if single else Plain(own)
            elif isinstance(own, float) and single:
                own = np.float32(own)
            setattr(self.options, field, own)

    def of_text(self, text):
        if not text:
            return None
        check_assigned(text)
        exec(text, known := dict(self.known))
        return known["mod"]

    def of_score(self, text, scale=1.0, unit=1.0):
        """Return a function of (score, b, h, i, j) by a ``mods.Text``."""
        texts = text.score_factor, text.inner, text.text
        score_factor, inner, own = map(self.of_text, texts)

        def mod(score, b, h, i, j):
            x = score_factor(scale, self.options) * (score / scale)
            pair = inner(x) if inner else x, unit
            return own(pair, b, h, i, j, max(i, j) - 1, self.options)

        return mod

    def mask(self):
        own = self.of_text(self.mod.value.text)
        return lambda b, h, i, j: own(b, h, i, j, j - 1, self.options)

    def add(self, array, row, column, x):
        array[row, column] += x

    def gradients(self, places):
        """Return the gradients of arrays, by name. Places are (score, ds, b, h, i, j) of a tile,
        which is one batch entry and head.
        """
        found = {}
        for field, (name, value) in zip(self.mod.fields, self.values, strict=True):
            if isinstance(value, np.ndarray) and value.dtype == np.float32:
                found[name] = np.zeros(value.shape if value.ndim > 1 else (1, *value.shape))
                setattr(self.options, f"d{field}", found[name])
        gradient = self.mod.gradient
        each, rest, flush = map(self.of_text, (gradient.each, gradient.rest, gradient.flush))
        kept = [0.0] * max(1, gradient.shared + gradient.merged), [0] * max(1, 2 * gradient.merged)
        for score, ds, b, h, i, j in places:
            score = score if gradient.of_score else math.nan
            each((score, ds), b, h, i, j, min(i, j), self.options, kept)
        rest(places[0][2], places[0][3], self.options, kept)
        flush(self.options, kept)
        shapes = {name: value.shape for name, value in self.values if name in found}
        return {name: x.reshape(shapes[name]) for name, x in found.items()}


# --- differences ---------------------------------------------------------------------------------


def differences(function, step=1e-3):
    """Return the derivative of ``function`` at 0 and a bound of its error, by differences of the
    fourth order; None where the function has a kink or a step near 0.
    """
    try:
        by_steps = [_difference(function, h) for h in (step, step / 2, step / 4)]
    except (ArithmeticError, ValueError):
        return None
    first, second, third = by_steps
    error = abs(second - third)
    limit = 1e-6 * (1 + abs(third))
    if not (error <= limit and abs(first - third) <= 20 * error + limit / 10):
        return None
    return third, error + 1e-8 * (1 + abs(third))


def _difference(function, h):
    near = function(h) - function(-h)
    return (8 * near - function(2 * h) + function(-2 * h)) / (12 * h)
