"""A sequence over several ranks: who computes what, what is sent, and that the results are those of
one device.

torch and torch.distributed are stand-ins, whose ranks are threads; ``test_ring_gloo`` runs
processes over the real ones, where they are installed.
"""

import itertools
import re
import weakref
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from stand_in_device import aligned, imported_as, no_gpu_but_its_driver
from stand_in_distributed import ranks_of
from stand_in_torch import Tensor, fa_numba_torch, no_torch_but_its_names

import fa_numba
from fa_numba import Tiles, io_model, reference, ring
from fa_numba import device as devices
from fa_numba.host import merging, placement
from fa_numba.problem import Problem
from fa_numba.ring import call as ring_call
from fa_numba.ring import link, visible

# --- who computes what -----------------------------------------------------------------------


def test_rows_are_split_among_ranks():
    for ranks, causal in itertools.product((1, 2, 5), (False, True)):
        held = [ring.rows_of(r, ranks, 20 * ranks, causal) for r in range(ranks)]
        covered = sorted(itertools.chain(*held))
        assert [b for b, _ in covered[1:]] == [e for _, e in covered[:-1]]
        assert (covered[0][0], covered[-1][1]) == (0, 20 * ranks)
    assert ring.rows_of(0, 1, 7, True) == [(0, 7)]
    with pytest.raises(
        ValueError, match="rows of the sequence must be a multiple of 4 for 2 .*got 6"
    ):
        ring.rows_of(0, 2, 6, True)
    with pytest.raises(ValueError, match="must be a multiple of 2 for 2 ranks, got 7$"):
        ring.rows_of(0, 2, 7, False)
    with pytest.raises(ValueError, match="rank must be from 0 to 1, got 2"):
        ring.rows_of(2, 2, 8, False)


WINDOWS = [
    # ranks, rows and columns of a part, causal
    (1, 4, 4, True),
    (2, 2, 4, False),
    (3, 3, 2, False),
    (3, 2, 2, True),
    (4, 2, 2, True),
]


def wrong_steps(module, ranks, Nq, Nk, causal):
    """Masks of the sequence of which the calls of all ranks are not the whole."""
    N, M = ranks * Nq, ranks * Nk
    sides = [-1, 0, 2, N]
    lens = [(N, M), (N - 1, M), (N // 2, M), (N, M // 2 + 1), (N, 0), (1, 1)]
    i, j = np.arange(N)[:, None], np.arange(M)
    places = [
        [np.concatenate([np.arange(*x) for x in ring.rows_of(r, ranks, n, causal)]) for n in (N, M)]
        for r in range(ranks)
    ]
    for left, right, (rows, columns), travels in itertools.product(
        sides, [-1] if causal else sides, lens, ring.TRAVELS
    ):
        hidden = {"window": (left, right), "q_lens": (rows,), "kv_lens": (columns,)}
        problem = Problem(1, 1, 1, N, M, 8, causal=causal, **hidden)
        begin, end = problem.columns_begin(i), problem.columns_end(i)
        want = ((j >= begin) & (j < end)).astype(int)
        mask = module.mask_of(**hidden, causal=causal, batch=1, rows=N, columns=M)
        plain = (left, right, rows, columns) == (-1, -1, N, M)
        if mask is None or plain:
            seen = np.tril(np.ones_like(want)) if causal else np.ones_like(want)
            if not np.array_equal(seen, want) or mask is not None:
                yield left, right, rows, columns, travels
            continue
        course, seen = module.Course(mask, ranks, 1, Nq, Nk, causal, travels), np.zeros_like(want)
        for rank, (n, step) in itertools.product(range(ranks), enumerate(course.stops)):
            owner = course.at(rank, n)
            assert owner == ring.owner_at(rank, step, ranks)
            q_rank, k_rank = (owner, rank) if travels == "q" else (rank, owner)
            for piece in course.pieces(owner, step):
                moving = piece.rows if travels == "q" else piece.columns
                on_the_way = [course.operands(owner, m + 1) for m in range(n)]
                on_the_way += [course.results(owner, m) for m in range(n, len(course.stops)) if n]
                assert all(b <= moving[0] and moving[1] <= e for b, e in on_the_way)
                rows_at = places[q_rank][0][slice(*piece.rows)]
                columns_at = places[k_rank][1][slice(*piece.columns)]
                sizes = len(rows_at), len(columns_at)
                own = Problem(1, 1, 1, *sizes, 8, causal=piece.causal, window=piece.window)
                at, k = np.arange(sizes[0])[:, None], np.arange(sizes[1])
                visible = (k >= own.columns_begin(at)) & (k < own.columns_end(at))
                assert visible.any(0).all() and visible.any(1).all()
                seen[np.ix_(rows_at, columns_at)] += visible
        if not np.array_equal(seen, want):
            yield left, right, rows, columns, travels


@pytest.mark.parametrize("case", WINDOWS, ids=str)
def test_a_window_is_that_of_the_whole_sequence(case):
    """Every visible pair once, by a call of its own window; nothing is computed in vain."""
    assert not list(wrong_steps(visible, *case))


# --- two parts made one ----------------------------------------------------------------------

MERGED = [
    # head dimension, dtype of x, of y, layout, elements a thread
    (16, "float32", "float32", "bhnd", 8),
    (16, "float16", "float16", "bhnd", 8),
    (24, "float32", "float16", "bnhd", 8),
    (20, "float16", "float32", "bhnd", 1),
    (3, "float32", "float32", "bnhd", 1),
]


def merged_inputs(d, x_dtype, y_dtype, layout):
    """x, its L, y, its L; rows that only one part sees, and that none sees."""
    rng, (B, H, N) = np.random.default_rng(d), (2, 3, 45)
    order = (0, 2, 1, 3) if layout == "bnhd" else (0, 1, 2, 3)
    x, y = (rng.standard_normal((B, H, N, d)).astype(t) for t in (x_dtype, y_dtype))
    x_lse, y_lse = (rng.uniform(-30, 30, (B, H, N)).astype(np.float32) for _ in range(2))
    x_lse[0, 1, :2], y_lse[0, 1, 1:3] = -np.inf, -np.inf
    x[0, 1, :2], y[0, 1, 1:3] = 0, 0
    return x.transpose(order), x_lse, y.transpose(order), y_lse


def merged_truth(x, x_lse, y, y_lse, layout):
    """In float64, by the sums themselves."""
    weights = np.exp([x_lse.astype(np.float64), y_lse.astype(np.float64)])
    whole = weights.sum(0)
    with np.errstate(divide="ignore", invalid="ignore"):
        f, g = np.where(whole == 0, 0, weights / whole)
        order = (0, 2, 1) if layout == "bnhd" else (0, 1, 2)
        f, g = (z.transpose(order)[..., None] for z in (f, g))
        return f * x + g * y, np.log(whole)


@pytest.mark.parametrize("case", MERGED, ids=lambda c: "-".join(map(str, c[:-1])))
def test_merged_parts_are_those_of_float64(case):
    d, x_dtype, _, layout, width = case
    x, x_lse, y, y_lse = merged_inputs(*case[:-1])
    want, want_lse = merged_truth(x, x_lse, y, y_lse, layout)
    out, lse = x.copy(), np.full_like(x_lse, np.nan)
    with fa_numba.count_accesses() as counts:
        merging.merge(out, x_lse, y, y_lse, lse, layout)
    rounding = 2.0**-11 if x_dtype == "float16" else 2.0**-22
    # Weights are exponentials of differences, exact to a few roundings of L.
    bound = rounding * np.abs(want) + 2.0**-19 * np.maximum(np.abs(x), np.abs(y))
    assert (np.abs(out - want) <= bound).all()
    np.testing.assert_allclose(lse, want_lse, rtol=2.0**-22, atol=2.0**-22)
    n, rows = x.size, x_lse.size
    loads = {"X": n, "Y": n, "LX": n // width, "LY": n // width}
    assert (dict(counts.loads), dict(counts.stores)) == (loads, {"O": n, "L": rows})


@pytest.mark.parametrize("case", MERGED, ids=lambda c: "-".join(map(str, c[:-1])))
def test_added_parts_are_those_of_float64(case):
    x, _, y, _ = merged_inputs(*case[:-1])
    added, n, out = x.astype(np.float64) + y, x.size, x.copy()
    with fa_numba.count_accesses() as counts:
        merging.add(out, y, case[3])
    rounding = 2.0**-11 if case[1] == "float16" else 2.0**-22
    assert (np.abs(out - added) <= rounding * np.abs(added) + 2.0**-25).all()
    assert (dict(counts.loads), dict(counts.stores)) == ({"X": n, "Y": n}, {"X": n})


def test_a_part_without_columns_changes_nothing():
    """Not one bit of O and L."""
    x, x_lse, y, y_lse = merged_inputs(16, "float16", "float16", "bhnd")
    y_lse[...], y[...] = -np.inf, 0
    out, lse = x.copy(), np.empty_like(x_lse)
    merging.merge(out, x_lse, y, y_lse, lse)
    assert out.tobytes() == x.tobytes() and lse.tobytes() == x_lse.tobytes()


def test_parts_that_do_not_fit_are_refused():
    x, x_lse, y, y_lse = merged_inputs(16, "float32", "float32", "bhnd")
    for change, says in (
        ({2: y[:, :, :9]}, r"^y must have shape \(2, 3, 45, 16\), got \(2, 3, 9, 16\)"),
        ({3: y_lse[:, :, :9]}, "^y_lse must have shape"),
        ({2: x}, "^x must not share memory with y"),
        ({4: x_lse}, "^lse must not share memory with x_lse"),
    ):
        given = [x, x_lse, y, y_lse, np.empty_like(x_lse)]
        for n, value in change.items():
            given[n] = value
        with pytest.raises(ValueError, match=says):
            merging.merge(*given)


# --- the passes, over ranks ------------------------------------------------------------------


@pytest.fixture
def torch():
    with (
        no_gpu_but_its_driver() as gpu,
        no_torch_but_its_names(gpu) as found,
        devices.using("emulator"),
    ):
        yield found


def pieces(x, rank, ranks, causal, axis):
    held = ring.rows_of(rank, ranks, x.shape[axis], causal)
    return np.concatenate([x.take(range(*each), axis) for each in held], axis)


def relative(found, want):
    """Error as a share of the whole, by the root of the squares; L is -inf in the same places."""
    assert np.array_equal(np.isneginf(found), np.isneginf(want))
    if not np.any(want):
        return np.abs(found).max()
    found, want = (np.where(np.isneginf(x), 0, x) for x in (found, want))
    return np.linalg.norm(found.astype(np.float64) - want) / np.linalg.norm(want)


RING = [
    # ranks, what travels, causal, dtype, layout, options
    (2, "kv", False, "float32", None, {}),
    (2, "q", False, "float16", "bnhd", {}),
    (2, "q", True, "float32", "bnhd", {"scale": 0.5, "algorithm": "fa1"}),
    (3, "kv", True, "float16", "bnhd", {"deterministic": True}),
    (3, "q", True, "float16", None, {}),
    (4, "kv", False, "float16", None, {}),
    (1, "kv", True, "float32", None, {}),
    (4, "kv", False, "float16", None, {"window": (7, 0), "dlse": True}),
    (4, "q", False, "float32", "bnhd", {"window": (2, 5), "softcap": 2.0}),
    (4, "kv", False, "float16", None, {"kv_lens": (8, 0)}),
    (2, "q", False, "float16", None, {"q_lens": [1, 12, 12]}),
    # With sinks, and a loss of L too
    (2, "kv", True, "float16", None, {"sinks": True, "dlse": True}),
    (
        *(3, "q", False, "float32", "bnhd"),
        {"sinks": True, "dlse": True, "algorithm": "fa1", "head_dim_v": 12},
    ),
    (1, "kv", False, "float16", "bnhd", {"sinks": True}),
    (2, "q", True, "float16", None, {"dlse": True, "softcap": 2.0}),
    (
        *(2, "kv", True, "float16", "bnhd"),
        {
            "window": (5, -1),
            "q_lens": (12, 7, 1),
            "kv_lens": (9, 11, 0),
            "sinks": True,
            "dlse": True,
        },
    ),
    (2, "kv", True, "float16", None, {"window": (5, -1), "heads_k": 2}),  # computed at once too
    # v of another head dimension
    (2, "kv", True, "float16", "bnhd", {"head_dim_v": 5, "dlse": True}),
    (
        *(4, "q", True, "float16", None),
        {"head_dim_v": 4, "window": (4, -1), "sinks": True, "dlse": True},
    ),
]


@pytest.mark.parametrize("case", RING, ids=lambda c: "-".join(map(str, c[:5])))
def test_both_passes_are_those_of_one_device(torch, case):
    """Outputs and gradients within the error of one device; bytes sent are the model's."""
    ranks, travels, causal, dtype, layout, options = case
    ft, axis = fa_numba_torch(), 1 if layout else 2
    rng, Nq = np.random.default_rng(7), 6
    Nk = Nq if causal else 5
    masked = any(name in options for name in ("window", "q_lens", "kv_lens"))
    batch = max(map(len, (options.get("q_lens", [0]), options.get("kv_lens", [0]))))
    # A single K/V head is computed at once, of more some in the last step.
    options = dict(options)
    Hk = options.pop("heads_k", 2 + (ranks == 2) if dtype == "float16" and not masked else 1)
    d_v = options.pop("head_dim_v", 8)
    sizes = {"q": (2 * Hk, Nq, 8), "k": (Hk, Nk, 8), "v": (Hk, Nk, d_v), "dout": (2 * Hk, Nq, d_v)}
    whole = {
        name: rng.standard_normal((batch, heads, ranks * n, d)).astype(dtype)
        for name, (heads, n, d) in sizes.items()
    }
    if options.pop("dlse", False):
        shape = whole["q"].shape[:3]
        whole["dlse"] = rng.standard_normal(shape).astype(np.float32)
    lens = {name: x for name, x in options.items() if name in ("q_lens", "kv_lens")}
    plain = lens | {x: options[x] for x in ("scale", "softcap", "window") if x in options}
    sinks = np.linspace(-2, 3, 2 * Hk, dtype=np.float32) if options.pop("sinks", False) else None
    plain |= {} if sinks is None else {"sinks": sinks}
    own = {"dlse": whole.get("dlse"), "return_dsinks": sinks is not None}
    true = [x.astype(np.float64) for x in whole.values()]
    O, L = reference.attention(*true[:3], causal=causal, return_lse=True, **plain)
    gradients = reference.attention_backward(true[3], *true[:3], causal=causal, **plain, **own)
    one = fa_numba.attention(*list(whole.values())[:3], causal=causal, return_lse=True, **plain)
    given = (whole["dout"], *list(whole.values())[:3], *one)
    one = (*one, *fa_numba.attention_backward(*given, causal=causal, **plain, **own))

    def part(x, rank):
        x = x.swapaxes(1, 2) if layout and x.ndim == 4 else x
        return pieces(x, rank, ranks, causal, 2 if x.ndim == 3 else axis)

    def work(rank):
        mine = {n: Tensor.of(part(x, rank), requires_grad=n in "qkv") for n, x in whole.items()}
        dout, dlse = mine.pop("dout"), mine.pop("dlse", None)
        learnt = dict(options)
        if sinks is not None:
            learnt["sinks"] = mine["sinks"] = Tensor.of(sinks.copy(), requires_grad=True)
        with ring.count_link() as forward:
            out, lse = ft.ring_attention(
                mine["q"], mine["k"], mine["v"], travels=travels, causal=causal, layout=layout,
                return_lse=True, **learnt,
            )  # fmt: skip
        assert link.counter() is None
        passed = (forward.sent, forward.received)
        out.backward(dout, () if dlse is None else [(lse, dlse)])
        both = (forward.sent - passed[0], forward.received - passed[1])
        return [x.values for x in (out, lse, *(x.grad for x in mine.values()))], passed, both

    with ranks_of(torch, ranks) as distributed:
        found = distributed.run(work)
    window = options.get("window")
    how = {"dtype": dtype, "causal": causal, "window": window, "head_dim_v": d_v}
    problem = Problem(batch, 2 * Hk, Hk, Nq, Nk, 8, **how)
    sent = dict.fromkeys(range(ranks), 0)
    for rank, to, nbytes in distributed.sent:
        assert masked or to == (rank + 1) % ranks
        sent[rank] += nbytes
    rounding = 2.0**-11 if dtype == "float16" else 2.0**-23
    for result in found:
        if isinstance(result, Exception):
            raise result
    if sinks is not None:  # a rank has what its rows are of it
        dsinks = sum(values.pop() for values, *_ in found)
        assert (
            relative(dsinks, gradients[-1]) <= 2 * relative(one[-1], gradients[-1]) + 4 * rounding
        )
    for rank, result in enumerate(found):
        values, *counted = result
        for got, single, want in zip(values, one, (O, L, *gradients[:3]), strict=False):
            mine = part(want, rank)
            assert got.dtype == single.dtype and got.shape == mine.shape
            assert relative(got, mine) <= 2 * relative(single, want) + 2 * rounding
        traffic = [
            io_model.ring(problem, ranks, rank, travels=travels, passes=each, **lens, **beside)
            for each, beside in (("fwd", {}), ("bwd", {"dlse": True}))
        ]
        assert counted == [(each.sent, each.received) for each in traffic]
        assert sent[rank] == sum(each.sent for each in traffic)


@pytest.mark.parametrize("travels", ring.TRAVELS)
def test_losses_of_some_ranks_are_of_O_and_of_others_of_L(torch, travels):
    """What travels is the same for both: a gradient that a rank does not have is 0."""
    ft, size = fa_numba_torch(), (1, 2, 8, 8)
    q, k, v, dout = np.random.default_rng(3).standard_normal((4, *size)).astype(np.float32)
    dlse = dout[..., 0].copy()
    dout[:, :, :4], dlse[:, :, 4:] = 0, 0

    def work(rank):
        mine = slice(4 * rank, 4 * rank + 4)
        given = [Tensor.of(x[:, :, mine].copy(), requires_grad=True) for x in (q, k, v)]
        made = ft.ring_attention(*given, travels=travels, return_lse=True)
        gradient = (dlse, dout)[rank][:, :, mine]
        made[1 - rank].backward(Tensor.of(gradient.copy()))
        return [x.grad.values for x in given]

    with ranks_of(torch, 2) as distributed:
        found = distributed.run(work)
    exact = reference.attention_backward(dout, q, k, v, dlse=dlse)
    for got, want in zip(zip(*found, strict=True), exact, strict=True):
        np.testing.assert_allclose(np.concatenate(got, axis=2), want, atol=2e-6)


def test_a_call_without_gradients_sends_the_forward_pass_alone(torch):
    ft = fa_numba_torch()
    x = np.ones((1, 1, 4, 8), np.float32)

    def work(rank):
        torch.grad = False
        out = ft.ring_attention(*(Tensor.of(x, requires_grad=True) for _ in "qkv"))
        assert out.node is None
        return out.values

    with ranks_of(torch, 2) as distributed:
        found = distributed.run(work)
    assert all(np.array_equal(each, x) for each in found)
    assert [nbytes for _, _, nbytes in distributed.sent] == 4 * [x.nbytes]


@pytest.mark.parametrize("learns", ["q", "k", "v", "sinks"])
def test_one_argument_that_learns_is_enough(learns, torch):
    ft = fa_numba_torch()
    shapes = {name: (1, 1, 4, 8) for name in "qkv"} | {"sinks": (1,)}

    def work(rank):
        given = {
            name: Tensor.of(np.ones(shape, np.float32), requires_grad=name == learns)
            for name, shape in shapes.items()
        }
        return ft.ring_attention(**given).node

    with ranks_of(torch, 2) as distributed:
        assert None not in distributed.run(work)


def test_what_a_call_keeps_and_what_torch_was_told(torch):
    """Nothing is kept where no gradients are wanted; None for ``deterministic`` asks torch."""
    ft, ones = fa_numba_torch(), np.ones((1, 1, 4, 8), np.float32)
    told = []

    def prepared(*args, deterministic, **given):
        told.append(deterministic)
        return ring_call.prepared(*args, deterministic=deterministic, **given)

    def work(rank):
        for torch.grad, learns in ((True, True), (True, False), (False, True)):
            before = torch.applied
            q, k, v = (Tensor.of(ones, requires_grad=learns and n == "q") for n in "qkv")
            out = ft.ring_attention(q, k, v)
            ft.ring_attention(SHORT, SHORT, SHORT, causal=True)  # of a rank alone, three rows
            assert torch.applied - before == out.requires_grad == (torch.grad and learns)
            if out.requires_grad:
                out.backward(None)
                assert q.grad is None
        with mock.patch.object(ft, "ring_call", SimpleNamespace(prepared=prepared)):
            for torch.deterministic, given, algorithm in (
                (True, None, "fa2"),
                (True, None, "fa1"),
                (False, None, "fa2"),
                (True, False, "fa2"),
            ):
                ft.ring_attention(k, k, k, deterministic=given, algorithm=algorithm)
        assert told == [True, False, False, False]
        return True

    with ranks_of(torch, 1) as distributed:
        assert distributed.run(work) == [True]


@pytest.mark.parametrize(("causal", "window"), [(False, (1, 1)), (True, (1, -1))])
def test_parts_have_the_tiles_the_order_and_the_window_of_the_call(
    torch, monkeypatch, causal, window
):
    """In their plans too, which refuse what parts would."""
    ft, ones, seen = fa_numba_torch(), np.ones((1, 1, 4, 8), np.float32), []

    def told(function):
        def called(*args, **given):
            seen.append(tuple(map(given.get, ("tiles", "deterministic", "causal", "window"))))
            return function(*args, **given)

        return called

    for name in ("plan", "attention", "attention_backward"):
        monkeypatch.setattr(fa_numba, name, told(getattr(fa_numba, name)))

    def work(rank):
        given = [Tensor.of(ones, requires_grad=True) for _ in "qkv"]
        own = {"backward_tiles": Tiles(16, 32), "deterministic": True}
        own |= {"causal": causal, "window": window}
        sinks = Tensor.of(ones[0, 0, 0, :1].copy(), requires_grad=True)
        out = ft.ring_attention(*given, sinks=sinks, tiles=Tiles(16, 16), **own)
        out.backward(Tensor.of(ones))
        return seen

    with ranks_of(torch, 1) as distributed:
        ahead, back = (Tiles(16, 16), None), (Tiles(16, 32), True)
        calls = [(*each, causal, window) for each in (ahead, back, ahead, back)]
        assert distributed.run(work) == [[*calls, (*back, None, None)]]


@pytest.mark.parametrize("causal", [False, True])
def test_a_sequence_is_split_and_joined(torch, causal):
    ft, x = fa_numba_torch(), np.arange(24).reshape(12, 2)
    parts = [ft.ring_split(Tensor.of(x), rank, 3, causal=causal, dim=0) for rank in range(3)]
    for rank, part in enumerate(parts):
        held = [x[begin:end] for begin, end in ring.rows_of(rank, 3, 12, causal)]
        assert np.array_equal(part.values, np.concatenate(held))
    assert np.array_equal(ft.ring_join(parts, causal=causal, dim=0).values, x)


def call_of(rank, changes, ft, **common):
    """A call that ``changes[rank]`` has its own arguments of."""
    given = {name: Tensor.of(np.ones((1, 1, 4, 8), np.float32)) for name in "qkv"}
    given |= common | changes.get(rank, {})
    return ft.ring_attention(given.pop("q"), given.pop("k"), given.pop("v"), **given)


SHORT = Tensor.of(np.ones((1, 1, 3, 8), np.float32))
FLAT = Tensor.of(np.ones((4, 8), np.float32))


class Odd(str):
    """Fails as it is looked at."""

    def __eq__(self, other):
        raise KeyError("odd")


DIFFERENT = [
    ({1: {"q": SHORT}}, r"q must .*got '\(1, 1, 4, 8\) .*' on rank 0 and 2, '\(1, 1, 3, 8\)"),
    ({2: {"travels": "q"}}, "travels must be equal .*got 'kv' on rank 0 and 1, 'q' on rank 2"),
    ({0: {"scale": 0.5}}, "scale must be equal .*got 0.5 on rank 0, None on rank 1 and 2"),
    ({0: {"causal": True}}, "causal must be equal .*got True on rank 0, False on rank 1 and 2"),
    ({2: {"window": [2, 0]}}, r"window must .*got \(-1, -1\) on rank 0 and 1, \(2, 0\) on rank 2"),
    ({1: {"kv_lens": [5]}}, r"kv_lens must .*got None on rank 0 and 2, \(5,\) on rank 1"),
    ({1: {"travels": "v"}}, "some ranks: rank 1: ValueError: travels must be 'kv' or 'q', got 'v'"),
    ({1: {"v": SHORT}}, "some ranks: rank 1: ValueError: v must have shape"),
    ({1: {"travels": Odd("kv")}}, "some ranks: rank 1: KeyError: 'odd'"),
    ({1: {"return_lse": 3}}, "some ranks: rank 1: TypeError: return_lse must .*got 3"),
    ({1: {"sinks": Tensor.of(np.ones(1, np.float32))}},
     r"sinks must .*got None on rank 0 and 2, '\(1,\)"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "says"), DIFFERENT, ids=[c[-1] for c in DIFFERENT])
def test_ranks_that_disagree_are_told_before_anything_is_sent(torch, changes, says):
    ft = fa_numba_torch()
    with ranks_of(torch, 3) as distributed:
        found = distributed.run(lambda rank: call_of(rank, changes, ft))
    assert not distributed.sent
    for error in found:
        assert isinstance(error, ValueError) and re.search(says, str(error)), error


def test_known_calls_that_differ_are_told_before_anything_is_sent(torch):
    """Each of the two is known to all ranks, and asked about once more; equal calls are too, and
    have equal bits.
    """
    ft = fa_numba_torch()
    shape = (1, 3, 4, 8)
    x = Tensor.of(np.linspace(-1, 1, np.prod(shape), dtype=np.float32).reshape(shape))

    def work(rank):
        first = [ft.ring_attention(x, x, x, causal=causal).values for causal in (False, True)]
        again = [ft.ring_attention(x, x, x, causal=causal).values for causal in (False, True)]
        assert [y.tobytes() for y in first] == [y.tobytes() for y in again]
        ft.ring_attention(x, x, x, causal=rank == 1)

    with ranks_of(torch, 2) as distributed:
        found = distributed.run(work)
    for error in found:
        assert isinstance(error, ValueError), error
        assert "causal must be equal on all ranks of the group, got False on rank 0, True" in str(
            error
        )
    assert len(distributed.sent) == 2 * 2 * 2 * 2  # ranks, K and V, calls, twice
    assert distributed.asked == 2 * (4 + 2)  # the last time each also says what it means


def test_a_call_that_is_like_a_known_one_is_checked_itself(torch, monkeypatch):
    """All but the shape, the dtype, the device or the tangent of an operand is as before, or the
    emulator's limit.
    """
    ft, ones = fa_numba_torch(), np.ones((1, 1, 4, 8), np.float32)
    changes = {
        r"k must have the dtype of q \(torch\.float32\), got torch\.float16": {
            "k": Tensor.of(ones.astype(np.float16))
        },
        "v must have shape": {"v": SHORT},
        r"k must be on the device of q \(namespace.*\), got namespace": {
            "k": Tensor.of(aligned(ones.shape, values=ones))
        },
        "q must be on cpu with .*got namespace": {
            n: Tensor.of(aligned(ones.shape, values=ones)) for n in "qkv"
        },
        "v has a tangent .forward-mode": {"v": Tensor.of(ones, tangent=ones)},
    }

    def work(rank):
        for own in ({}, {"sinks": Tensor.of(np.ones(1, np.float32))}):
            call_of(rank, {}, ft, **own)
            for says, change in changes.items():
                with pytest.raises((TypeError, ValueError), match=says):
                    call_of(rank, {rank: change}, ft, **own)
        monkeypatch.setattr(placement, "EMULATOR_SECONDS", 0)
        with pytest.raises(ValueError, match="more than the limit of 0 s"):
            call_of(rank, {}, ft)
        return len(torch.distributed.sent)

    with ranks_of(torch, 2) as distributed:
        assert distributed.run(work) == [8, 8]  # K and V of the first calls


def test_kinds_of_calls_are_told_apart(torch, monkeypatch):
    monkeypatch.setattr(ring_call, "_known", {})
    ft, plain = fa_numba_torch(), np.ones((1, 2, 4, 8), np.float32)
    long, wide = Tensor.of(np.ones((1, 2, 8, 8), np.float32)), Tensor.of(plain[..., :4].copy())
    sinks = {"sinks": Tensor.of(np.ones(2, np.float32))}
    changes = (
        *({}, {"return_lse": True}, {"q": long}, {"v": wide}, {"group": object()}),
        *({"group": object()}, {"q": Tensor.of(plain, requires_grad=True)}),
        *(sinks, sinks | {"q": long}, sinks | {"v": wide}),
        {n: Tensor.of(plain.astype(np.float16)) for n in "qkv"},
    )

    def work(rank):
        for calls, change in enumerate(changes, 1):
            for _ in range(2):
                given = {n: Tensor.of(plain) for n in "qkv"} | change
                ft.ring_attention(given.pop("q"), given.pop("k"), given.pop("v"), **given)
                assert len(ring_call._known) == calls
        with pytest.raises(TypeError, match="return_lse must be True or False, got 1"):
            ft.ring_attention(*(Tensor.of(plain) for _ in range(3)), return_lse=1)
        return True

    with ranks_of(torch, 1) as distributed:
        assert distributed.run(work) == [True]


def test_no_more_kinds_of_calls_are_known_than_a_number(torch, monkeypatch):
    monkeypatch.setattr(ring_call, "KEPT", 2)
    ft, known = fa_numba_torch(), []
    monkeypatch.setattr(ring_call, "_known", {})

    def work(rank):
        for scale in (0.1, 0.2, 0.3):
            call_of(rank, {}, ft, scale=scale)
            known.append(len(ring_call._known))

    with ranks_of(torch, 1) as distributed:
        distributed.run(work)
    assert known == [1, 2, 1]


def test_lengths_are_those_of_the_call(torch):
    """Though a call of equal shapes is known, and the array the same."""
    ft, x = fa_numba_torch(), np.arange(32, dtype=np.float32).reshape(1, 1, 4, 8)

    def work(rank):
        lengths, found = np.array([8]), []
        for found_at, window in ((8, None), (1, None), (1, (2, 0)), (8, (0, 0))):
            lengths[0] = found_at
            given = (Tensor.of(x + 1000 * rank) for _ in range(3))
            found.append(ft.ring_attention(*given, scale=0.0, kv_lens=lengths, window=window))
        return [out.values[0, 0, :, 0].tolist() for out in found]

    with ranks_of(torch, 2) as distributed:
        first, second = distributed.run(work)
    assert first[:2] == [[512.0] * 4, [0.0] * 4] == second[:2]
    # Columns end at 1, rows at 8: the last row's diagonal is column 0.
    assert second[2] == [0.0] * 4 and first[2] == [0.0] * 4
    assert first[3] + second[3] == [0.0, 8.0, 16.0, 24.0, 1000.0, 1008.0, 1016.0, 1024.0]


REFUSED = [
    (
        {"q": np.ones((1, 1, 4, 8), np.float32)},
        TypeError,
        "q must be a torch tensor, got an ndarray",
    ),
    ({"travels": "k"}, ValueError, "travels must be 'kv' or 'q', got 'k'"),
    ({"causal": 2}, TypeError, "causal must be True or False, got 2"),
    (
        {"k": SHORT, "v": SHORT, "causal": True},
        ValueError,
        "q and k must have the same number of rows with causal=True, got 4 and 3; split",
    ),
    (
        {"q": SHORT, "k": SHORT, "v": SHORT, "causal": True},
        ValueError,
        "q must have an even number of rows with .*got 3 rows on each of 2 ranks",
    ),
    ({"algorithm": "fa3"}, ValueError, "algorithm must be 'standard', 'fa1' or 'fa2', got 'fa3'"),
    (
        {"deterministic": True, "algorithm": "fa1"},
        ValueError,
        "deterministic must be False with algorithm 'fa1', got True",
    ),
    (
        {"softcap": -1.0},
        ValueError,
        r"softcap must be a number from 1e-30 to 1e30, or None or 0 for no cap, got -1\.0",
    ),
    ({"scale": [1.0]}, TypeError, r"scale must be a finite real number or None, got \[1\.0\]"),
    (
        {"window": (1, -3)},
        ValueError,
        r"window must be \(left, right\), two integers of at least 0.*got \(1, -3\)",
    ),
    (
        {"kv_lens": [9]},
        ValueError,
        r"kv_lens must contain integers from 0 to 8 \(the rows of all ranks\), got 9",
    ),
    (
        {"k": FLAT, "v": FLAT, "window": (1, 0)},
        ValueError,
        r"k must have 4 axes, \(batch, heads, seqlen, .*got 2 axes: shape \(4, 8\)",
    ),
    ({"q_lens": [1.0, 2.0]}, TypeError, "q_lens must contain integers, got dtype float64"),
    (
        {"q_lens": [1, 1]},
        ValueError,
        r"q_lens must have shape \(1,\) \(one value per batch entry\), got \(2,\)",
    ),
    (
        {"tiles": [3]},
        TypeError,
        r"tiles must be a Tiles\(Br=\.\.\., Bc=\.\.\.\) or None, got \[3\]",
    ),
    ({"sinks": [1.0]}, TypeError, "sinks must be a torch tensor, got a list"),
    (
        {"sinks": Tensor.of(np.ones(2, np.float32))},
        ValueError,
        r"sinks must have shape \(1,\) \(one value per query head\), got \(2,\)",
    ),
    (
        {"sinks": Tensor.of(np.ones(1))},
        TypeError,
        r"sinks must be torch\.float32, got torch\.float64",
    ),
    (
        {"backward_tiles": 3},
        TypeError,
        r"backward_tiles must be a Tiles\(Br=\.\.\., Bc=\.\.\.\) or None, got 3",
    ),
    (
        {"k": Tensor.of(np.ones((1, 1, 4, 8), np.float16))},
        TypeError,
        r"k must have the dtype of q \(torch\.float32\), got torch\.float16",
    ),
    (
        {"q": Tensor.of(np.ones((1, 1, 4, 8), np.uint8), "float8_e4m3fn")},
        TypeError,
        "q must be float32, float16 or bfloat16 in ring_attention, got float8_e4m3fn",
    ),
]


@pytest.mark.parametrize(("changes", "error", "says"), REFUSED, ids=[c[-1] for c in REFUSED])
def test_bad_arguments_are_refused_on_every_rank(torch, changes, error, says):
    ft = fa_numba_torch()
    with ranks_of(torch, 2) as distributed:
        found = distributed.run(lambda rank: call_of(rank, {0: changes, 1: changes}, ft))
    assert not distributed.sent
    for each in found:
        with pytest.raises(error, match=says):
            raise each


def test_without_a_process_group_nothing_is_begun(torch):
    with (
        ranks_of(torch, 2),
        pytest.raises(
            ValueError, match=r"group must be a process group of torch\.distributed, which"
        ),
    ):
        call_of(0, {}, fa_numba_torch())


def test_parts_of_unequal_lengths_are_not_joined(torch):
    parts = [Tensor.of(np.ones(n, np.float32)) for n in (2, 4)]
    with pytest.raises(
        ValueError, match=r"parts must contain one or more tensors of one size .*got sizes \[2, 4\]"
    ):
        fa_numba_torch().ring_join(parts, dim=0)
    with pytest.raises(ValueError, match=r"parts must contain .*got sizes \[\]"):
        fa_numba_torch().ring_join([], dim=0)


def test_a_group_without_this_process_is_refused(torch):
    with ranks_of(torch, 2) as distributed:
        distributed.get_rank = lambda group=None: -1  # as torch says it
        found = distributed.run(lambda rank: call_of(rank, {}, fa_numba_torch()))
    assert not distributed.asked
    for error in found:
        assert isinstance(error, ValueError) and "group must contain this process" in str(error)


def test_a_group_of_gpus_takes_no_tensors_of_the_host(torch):
    hosts = mock.patch.dict(fa_numba.ring.agreement._hosts, clear=True)  # ranks agree over gloo
    with ranks_of(torch, 1, backend="nccl") as distributed, hosts:
        (error,) = distributed.run(lambda rank: call_of(rank, {}, fa_numba_torch()))
    assert "q must be on cuda with a process group of backend 'nccl', got" in str(error)


def test_a_rank_that_does_not_come_ends_in_an_error(torch):
    """In the call, and in the backward pass."""
    ft = fa_numba_torch()

    def never(rank):
        return None if rank == 1 else call_of(rank, {}, ft)

    with ranks_of(torch, 2) as distributed:
        error, _ = distributed.run(never)
    assert isinstance(error, RuntimeError)
    assert "rank 0 of 2: not all ranks of the group have called ring_attention" in str(error)

    def no_backward(rank):
        q = Tensor.of(np.ones((1, 1, 4, 8), np.float32), requires_grad=True)
        out = call_of(rank, {rank: {"q": q}}, ft)
        if rank == 0:
            out.backward(Tensor.of(np.ones((1, 1, 4, 8), np.float32)))

    with ranks_of(torch, 2) as distributed:
        error, _ = distributed.run(no_backward)
    assert isinstance(error, RuntimeError)
    assert "rank 0 of 2: the exchange with ranks 1 and 1 of the ring did not" in str(error)


# --- the model -------------------------------------------------------------------------------


def test_the_model_refuses_what_is_no_ring():
    p = Problem(1, 1, 1, 4, 4, 8)
    for change, says in (
        ({"ranks": 0}, "ranks must be an integer of at least 1, got 0"),
        ({"rank": 2}, "rank must be from 0 to 1, got 2"),
        ({"travels": "o"}, "travels must be 'kv' or 'q', got 'o'"),
        ({"passes": "both"}, "passes must be .*got 'both'"),
        ({"passes": "fwd+bwd"}, "passes must be 'fwd' or 'bwd', got 'fwd.bwd'"),
        ({"problem": Problem(1, 1, 1, 3, 3, 8, causal=True)}, "got 3 rows and 3 columns"),
        (
            {"problem": Problem(1, 1, 1, 4, 4, 8, kv_lens=(3,))},
            "got q_lens None and kv_lens",
        ),
        ({"kv_lens": [9]}, r"kv_lens must contain integers from 0 to 8 .*got 9"),
    ):
        given = {"problem": p, "ranks": 2} | change
        with pytest.raises(ValueError, match=says):
            io_model.ring(**given)
    with pytest.raises(ValueError, match="ranks must be at least 2, got 1"):
        io_model.ring_break_even(1)


# --- exchanges on a GPU ----------------------------------------------------------------------


class Stream:
    def __init__(self, name, log):
        self.name, self.log = name, log

    def wait_stream(self, other):
        self.log.append((self.name, "waits for", other.name))


class Remote:
    """A tensor of a GPU, or of the host."""

    def __init__(self, elements=8, is_cuda=True):
        self.elements, self.is_cuda, self.device = elements, is_cuda, "cuda:0"

    def numel(self):
        return self.elements

    def element_size(self):
        return 2


@pytest.fixture
def gpus(monkeypatch):
    """Rank 1 of three of a group of NCCL, global ranks 10 to 12; yields what its streams do."""
    log, works = [], []
    current, side = Stream("current", log), Stream("side", log)
    on = [current]

    @contextmanager
    def on_stream(stream):
        on.append(stream)
        yield
        on.pop()

    def batch(operations):
        log.append((on[-1].name, *operations))
        works.append(mock.Mock())
        return works[-1:]

    distributed = SimpleNamespace(
        get_rank=lambda group: 1, get_world_size=lambda group: 3,
        group=SimpleNamespace(WORLD="all"),
        get_global_rank=lambda group, rank: 10 + rank, isend="send", irecv="receive",
        P2POp=lambda how, x, peer, group: (how, x.elements, peer, group), batch_isend_irecv=batch,
        all_reduce=lambda x, group: log.append(("all meet", group)),
    )  # fmt: skip
    fake = SimpleNamespace(
        distributed=distributed, float32="float32", zeros=lambda shape, dtype, device: device,
        empty=lambda n, device: SimpleNamespace(zero_=lambda: log.append((on[-1].name, "fills"))),
        cuda=SimpleNamespace(
            current_stream=lambda device: on[-1], Stream=lambda device: side, stream=on_stream
        ),
    )  # fmt: skip
    monkeypatch.setattr(link, "_side", {})
    monkeypatch.setattr(link, "_connected", set())
    with imported_as({"torch": fake}):
        yield SimpleNamespace(log=log, works=works, distributed=distributed)


def test_an_exchange_is_after_what_was_begun_and_before_what_comes(gpus):
    counted = link.LinkBytes()
    exchange = link.Link("a group", counted).exchange([Remote(8)], [Remote(5), Remote(6)], hop=2)
    messages = [("send", 8, 10, "a group"), ("receive", 5, 12, "a group")]
    assert gpus.log == [
        ("side", "waits for", "current"),  # the kernels that make what is sent
        ("side", *messages, ("receive", 6, 12, "a group")),
        *[("side", "fills")] * link.FILLS,
        ("current", "waits for", "side"),  # so that the copy begins before the next kernel
    ]
    assert (counted.sent, counted.received) == (16, 22)
    assert not gpus.works[0].wait.called
    assert [x.elements for x in exchange.wait()] == [5, 6]
    gpus.works[0].wait.assert_called_once_with()


def test_memory_of_an_exchange_is_kept_until_it_was_waited_for(gpus):
    sent, received = [Remote(), Remote()], [Remote()]
    seen = [weakref.ref(x) for x in (*sent, *received)]
    exchange = link.Link(None).exchange(sent, received)
    del sent, received

    def all_are_there():
        assert None not in [x() for x in seen]

    gpus.works[0].wait.side_effect = all_are_there
    came = exchange.wait()
    assert [x() for x in seen] == [None, None, *came]


def test_all_ranks_of_nccl_meet_once_a_group(gpus):
    for group in (None, "a group", None, "a group"):
        link.Link(group).connect(Remote())
    assert gpus.log == [("all meet", "all"), ("all meet", "a group")]
    link.Link("of gloo").connect(Remote(is_cuda=False))
    gpus.distributed.get_world_size = lambda group: 1
    link.Link("alone").connect(Remote())
    assert len(gpus.log) == 2


@pytest.mark.parametrize("window", [None, (3, 0)])
def test_ranks_meet_where_some_may_have_no_message_at_first(torch, monkeypatch, window):
    """After all have agreed, before anything is sent, and in the first call of a kind alone."""
    ft, met = fa_numba_torch(), []
    x = np.ones((1, 1, 4, 8), np.float32)
    monkeypatch.setattr(link.Link, "connect", lambda self, like: met.append(len(distributed.sent)))

    def work(rank):
        given = [Tensor.of(x) for _ in "qkv"]
        return [ft.ring_attention(*given, window=window).values for _ in range(2)]

    with ranks_of(torch, 2) as distributed:
        assert all(np.allclose(each, x) for each in distributed.run(work))
    assert met == ([] if window is None else [0, 0])
