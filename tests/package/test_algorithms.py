"""The papers' algorithms as text: against the reference, step by step, and as twins."""

import ast
import inspect
import math
import re
import textwrap

import numpy as np
import pytest
from helpers import case

from fa_numba import io_model
from fa_numba.algorithms import (
    fa1_backward,
    fa1_forward,
    fa2_backward,
    fa2_forward,
    logsumexp,
    standard_backward,
    standard_forward,
)
from fa_numba.problem import Problem
from fa_numba.reference import attention, attention_backward, relative_error

TIGHT = 1e-12


def fa1(Q, K, V, **options):
    """(O, L) of `fa1_forward`."""
    O, l, m = fa1_forward(Q, K, V, **options)
    return O, logsumexp(m, l)


def standard(Q, K, V, *, Br=None, Bc=None, **options):
    """(O, L), L of P and S: the same P e^L = e^S in every column that a row sees."""
    O, P = standard_forward(Q, K, V, **options)
    Nq, Nk = P.shape
    scale = 1 / math.sqrt(Q.shape[1]) if options.get("scale") is None else options["scale"]
    best = P.argmax(axis=1)
    with np.errstate(divide="ignore"):
        L = scale * (Q @ K.T)[np.arange(Nq), best] - np.log(P[np.arange(Nq), best])
    return O, np.where(P.any(axis=1), L, -np.inf)


def gradients(backward, Q, K, V, dO, *, Br=2, Bc=3, **options):
    """(dQ, dK, dV) of one of the backward functions, after its own forward one."""
    tiles = dict(Br=Br, Bc=Bc)
    if backward is standard_backward:
        _, P = standard_forward(Q, K, V, **options)
        return backward(Q, K, V, P, dO, scale=options.get("scale"))
    forward = fa1_forward if backward is fa1_backward else fa2_forward
    O, *saved = forward(Q, K, V, **tiles, **options)
    return backward(Q, K, V, O, dO, *saved, **tiles, **options)


FORWARD = [standard, fa1, fa2_forward]
BACKWARD = [standard_backward, fa1_backward, fa2_backward]


def random_inputs(Nq, Nk, d, *, seed=0):
    """Q, K, V and dO."""
    rng = np.random.default_rng(seed)
    shapes = ((Nq, d), (Nk, d), (Nk, d), (Nq, d))
    arrays = [rng.standard_normal(shape) for shape in shapes]
    for a in arrays:
        a.setflags(write=False)
    return arrays


def one_head(function, *arrays, **options):
    """What the reference gives for one head, without its batch and heads axes."""
    return [x[0, 0] for x in function(*(a[None, None] for a in arrays), **options)]


def agree(got, want, bound=TIGHT):
    for out, ref in zip(got, want, strict=True):
        assert out.dtype == np.float64
        assert relative_error(out, ref) <= bound


SHAPES = [(1, 1, 1), (5, 5, 3), (7, 11, 4), (11, 7, 5), (13, 1, 2), (1, 13, 8), (16, 8, 4)]
TILES = [dict(Br=2, Bc=3), dict(Br=4, Bc=4), dict(Br=3, Bc=20), dict(Br=20, Bc=1)]

OPTIONS = [dict(scale=scale, causal=causal) for scale in (None, -0.7) for causal in (False, True)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("compute", FORWARD)
def test_every_forward_is_attention(compute, shape):
    Q, K, V, _ = random_inputs(*shape)
    for options in OPTIONS:
        want = one_head(attention, Q, K, V, return_lse=True, **options)
        for tiles in TILES:
            with case(options, tiles):
                agree(compute(Q, K, V, **tiles, **options), want)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("backward", BACKWARD)
def test_every_backward_is_the_gradient_of_attention(backward, shape):
    Q, K, V, dO = random_inputs(*shape)
    for options in OPTIONS:
        want = one_head(attention_backward, dO, Q, K, V, **options)
        for tiles in TILES:
            found = gradients(backward, Q, K, V, dO, **tiles, **options)
            with case(options, tiles):
                for out, ref in zip(found, want, strict=True):
                    # A gradient may cancel to nothing: of one column dS is 0 but for rounding.
                    np.testing.assert_allclose(out, ref, rtol=TIGHT, atol=TIGHT)


# --- step by step -----------------------------------------------------------------------------


def watched(function, *arrays, **options):
    """(the steps, what the function gives)"""
    steps = []
    return steps, function(*arrays, **options, watch=steps.append)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [(7, 11, 4), (11, 7, 5), (9, 4, 1)])
def test_steps_go_through_the_visited_tiles(shape, causal):
    Nq, Nk, d = shape
    Q, K, V, dO = random_inputs(*shape)
    options = dict(Br=2, Bc=3, causal=causal)
    seen = {
        (i, j)
        for i in range(-(-Nq // 2))
        for j in range(-(-Nk // 3))
        if not causal or min(2 * i + 2, Nq) - 1 + Nk - Nq >= 3 * j
    }
    by_columns = sorted(seen, key=lambda tile: tile[::-1])
    steps, (O, l, m) = watched(fa1_forward, Q, K, V, **options)
    assert [(s.i, s.j) for s in steps] == by_columns
    after = {s.i: s.written for s in steps}  # the last of each row tile
    for s in steps:
        assert (s.rows, s.columns) == (
            slice(2 * s.i, min(2 * s.i + 2, Nq)),
            slice(3 * s.j, min(3 * s.j + 3, Nk)),
        )
        if after[s.i] is s.written:
            for name, whole in (("Oi", O), ("li", l), ("mi", m)):
                np.testing.assert_array_equal(s.written[name], whole[s.rows])
    steps, (O, L) = watched(fa2_forward, Q, K, V, **options)
    assert [(s.i, s.j) for s in steps] == sorted(seen)
    for backward, saved in ((fa1_backward, (l, m)), (fa2_backward, (L,))):
        steps, (dQ, *_) = watched(backward, Q, K, V, O, dO, *saved, **options)
        assert [(s.i, s.j) for s in steps] == by_columns
        for s in {s.i: s for s in steps}.values():
            np.testing.assert_array_equal(s.written["dQi"], dQ[s.rows])


def sizes(steps, which):
    """Elements by name, summed over the steps."""
    found = {}
    for step in steps:
        for name, tile in getattr(step, which).items():
            found[name] = found.get(name, 0) + tile.size
    return found


def test_what_steps_read_and_write_is_what_the_access_model_counts():
    Nq, Nk, d, Br, Bc = 7, 11, 4, 2, 3
    Q, K, V, dO = random_inputs(Nq, Nk, d)
    problem = Problem(1, 1, 1, Nq, Nk, d)
    tiles = type("Tiles", (), dict(Br=Br, Bc=Bc))
    start = {"Oi": Nq * d, "li": Nq, "mi": Nq, "dQi": Nq * d}  # read in vain: the initial values

    steps, (O, l, m) = watched(fa1_forward, Q, K, V, Br=Br, Bc=Bc)
    model = io_model.fa1(problem, tiles)
    read, written = sizes(steps, "read"), sizes(steps, "written")
    assert read["Qi"] == model.loads["Q"]
    for name, array in (("Oi", "O"), ("li", "l"), ("mi", "m")):
        assert read[name] == model.loads[array] + start[name]
        assert written[name] == model.stores[array]

    steps, (O, L) = watched(fa2_forward, Q, K, V, Br=Br, Bc=Bc)
    model = io_model.fa2(problem, tiles)
    read = sizes(steps, "read")
    assert (read["Kj"], read["Vj"]) == (model.loads["K"], model.loads["V"])
    assert sizes(steps, "written") == {}

    steps, _ = watched(fa1_backward, Q, K, V, O, dO, l, m, Br=Br, Bc=Bc)
    model = io_model.fa1_backward(problem, tiles)
    read = sizes(steps, "read")
    for name, array in (("Qi", "Q"), ("Oi", "O"), ("dOi", "dO")):
        assert read[name] == model.loads[array]
    assert read["dQi"] == model.loads["dQ"] + start["dQi"]
    assert sizes(steps, "written") == {"dQi": model.stores["dQ"]}

    steps, _ = watched(fa2_backward, Q, K, V, O, dO, L, Br=Br, Bc=Bc)
    model = io_model.fa2_backward(problem, tiles)
    read = sizes(steps, "read")
    for name, array in (("Qi", "Q"), ("Li", "L"), ("Di", "D"), ("dQi", "dQ")):
        assert read[name] == model.loads[array]
    assert read["dOi"] == model.loads["dO"] - Nq * d  # once more, for D
    assert sizes(steps, "written") == {"dQi": model.stores["dQ"] - Nq * d}  # the zeros


# --- how the text reads ------------------------------------------------------------------------


def statements(function):
    """The statements of a function, loops by their first lines, without docstring and watch."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body

    def flat(body):
        for node in body:
            if isinstance(node, ast.For):
                yield ast.unparse(node).partition("\n")[0]
                yield from flat(node.body)
            elif not isinstance(node, (ast.If, ast.Return)):
                yield ast.unparse(node)

    return list(flat(tree.body[1:]))


@pytest.mark.parametrize(
    "function, algorithm, lines",
    [
        # 14 and 15, 11 and 16, 23 and 25, 17 and 19 end loops
        (standard_forward, 0, set(range(1, 5))),
        (fa1_forward, 1, set(range(1, 17)) - {14, 15}),
        (fa2_forward, 1, set(range(1, 18)) - {11, 16}),
        (standard_backward, 3, set(range(1, 7))),
        (fa1_backward, 4, set(range(1, 27)) - {23, 25}),
        (fa2_backward, 2, set(range(1, 21)) - {17, 19}),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_every_line_of_the_algorithm_is_named_in_order(function, algorithm, lines):
    source = inspect.getsource(function)
    assert set(re.findall(r"# Alg\. (\d)", source)) == {str(algorithm)}
    comments = re.findall(rf"# Alg\. {algorithm} lines? (\d+(?:, \d+)*)", source)
    first = [int(comment.partition(",")[0]) for comment in comments]
    assert first == sorted(first)
    assert {int(n) for comment in comments for n in comment.split(", ")} == lines


@pytest.mark.parametrize(
    "one, other, shared, only_one, only_other",
    [
        (
            fa1_forward,
            fa2_forward,
            8,
            # O, l and m in global memory, initialised, read and written in every pass; a tile's own
            # statistics, merged; O normalised each time
            [
                *("O, l, m", "for j0", "for i0", "Oi, li, mi"),
                *("mij", "Pij", "lij", "m_new", "tile_factor", "l_new"),
                *("O_new", "O_new", "O[rows], l[rows], m[rows]"),
            ],
            # The same on chip, from the first column tile to the last; O normalised once, and L
            [
                *("O, L", "for i0", "Oi, li, mi", "for j0", "m_new", "Pij", "l_new", "O_new"),
                *("Oi, li, mi", "O[rows]", "L[rows]"),
            ],
        ),
        (
            fa1_backward,
            fa2_backward,
            19,
            ["l, m", "Oi, dQi, li, mi", "Pij", "Di"],  # P of l and m, D in every pass
            ["L", "D", "Li, Di", "Pij", "dQi"],  # P of L, D once
        ),
    ],
    ids=["fwd", "bwd"],
)
def test_twins_differ_where_the_papers_do(one, other, shared, only_one, only_other):
    first, second = statements(one), statements(other)
    alike = [[s for s in a if s in b] for a, b in ((first, second), (second, first))]
    assert sorted(alike[0]) == sorted(alike[1]) and len(alike[0]) >= shared
    for mine, theirs, only in ((first, second, only_one), (second, first, only_other)):
        own = [s for s in mine if s not in theirs]
        assert [s.partition(" = ")[0].partition(" in ")[0] for s in own] == only


@pytest.mark.parametrize("forward", [fa1_forward, fa2_forward])
def test_the_kernels_name_the_same_lines(forward):
    from fa_numba.kernels import mma, simt

    paper = "FA-1" if forward.__name__.startswith("fa1") else "FA-2"  # of steps that both take

    def named(source):
        found = re.findall(rf"#.*(?:Alg\. 1|{paper}) lines? (\d+(?:, \d+)*)", source)
        return {int(n) for comment in found for n in comment.split(", ")}

    text = named(inspect.getsource(forward))
    for unit in (simt, mma):
        of_kernel = named(inspect.getsource(getattr(unit, forward.__name__)))
        assert len(of_kernel) >= 9 and of_kernel <= text


# --- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize("forward", [fa1_forward, fa2_forward])
@pytest.mark.parametrize(
    "change, error, says",
    [
        (dict(Br=0), ValueError, "Br must be an integer of at least 1, got 0"),
        (dict(Bc=-1), ValueError, "Bc must be an integer of at least 1, got -1"),
        (dict(Br=2.0), TypeError, r"Br must be an integer of at least 1, got 2\.0"),
        (
            dict(Q=np.ones((1, 1, 2, 4))),
            ValueError,
            r"Q must have shape \(rows, d\), both at least 1, got \(1, 1, 2, 4\)",
        ),
        (
            dict(K=np.ones((0, 4))),
            ValueError,
            r"K must have shape \(rows, d\), both at least 1, got \(0, 4\)",
        ),
        (
            dict(K=np.ones((3, 5))),
            ValueError,
            r"K must have shape \(Nk, 4\) \(the d of Q\), got \(3, 5\)",
        ),
        (
            dict(V=np.ones((7, 4))),
            ValueError,
            r"V must have shape \(3, 4\) \(the shape of K\), got \(7, 4\)",
        ),
        (
            dict(V=np.ones((3, 4), complex)),
            TypeError,
            "V must be an array of real numbers, got dtype complex128",
        ),
        (
            dict(scale=np.nan),
            ValueError,
            r"scale must be a finite number of magnitude at most 2\.36e\+38 .*got nan",
        ),
        (dict(causal=1), TypeError, "causal must be True or False, got 1"),
    ],
    ids=str,
)
def test_bad_arguments_are_named(forward, change, error, says):
    arguments = dict(Q=np.ones((2, 4)), K=np.ones((3, 4)), V=np.ones((3, 4)), Br=1, Bc=1) | change
    with pytest.raises(error, match=says):
        forward(**arguments)


def test_bad_shapes_are_named_backward():
    Q, K, V, dO = random_inputs(2, 3, 4)
    O, l, m = fa1_forward(Q, K, V, Br=1, Bc=1)
    tiles = dict(Br=1, Bc=1)
    with pytest.raises(ValueError, match=r"dO must have shape \(2, 4\), got \(1, 4\)"):
        fa1_backward(Q, K, V, O, dO[:1], l, m, **tiles)
    with pytest.raises(TypeError, match="dO must be an array of real numbers, got dtype complex64"):
        fa2_backward(Q, K, V, O, dO.astype(np.complex64), m, **tiles)
    with pytest.raises(ValueError, match=r"l must have shape \(2,\), got \(3,\)"):
        fa1_backward(Q, K, V, O, dO, np.ones(3), m, **tiles)
    with pytest.raises(ValueError, match=r"O must have shape \(2, 4\), got \(3, 4\)"):
        fa2_backward(Q, K, V, K, dO, m, **tiles)
    with pytest.raises(ValueError, match=r"P must have shape \(2, 3\), got \(2, 2\)"):
        standard_backward(Q, K, V, np.ones((2, 2)), dO)
