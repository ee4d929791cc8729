"""The access model against a walk over tiles that counts what each touches, and the papers."""

import math
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from functools import partial
from itertools import product
from typing import NamedTuple

import numpy as np
import pytest
from conftest import examples
from hypothesis import given
from hypothesis import strategies as st

from fa_numba import io_model as io
from fa_numba import masks
from fa_numba.problem import Problem


class Tiles(NamedTuple):
    Br: int
    Bc: int


# The others are float32.
OF_ONE_DTYPE = ("Q", "K", "V", "O", "S", "P", "dO", "dQ", "dK", "dV", "dP", "dS")


class Walk:
    """Goes through an algorithm's tiles and counts the elements that it would touch in each."""

    def __init__(self, problem, tiles, block_mask=None):
        p = self.p = problem
        entries = range(p.batch)
        Nq = [p.seqlen_q] * p.batch if p.q_lens is None else p.q_lens
        Nk = [p.seqlen_k] * p.batch if p.kv_lens is None else p.kv_lens
        self.lengths = list(zip(Nq, Nk, strict=True))
        self.rows = [self.cut(n, tiles.Br) for n in Nq]
        self.cols = [self.cut(n, tiles.Bc) for n in Nk]
        # With those that are not valid but have a place in the arrays.
        self.all_rows = [range(n if p.packed else p.seqlen_q) for n in Nq]
        self.all_cols = [range(n if p.packed else p.seqlen_k) for n in Nk]
        self.heads = list(product(entries, range(p.heads_q)))
        self.shared_heads = list(product(entries, range(p.heads_k)))
        self.d = range(p.head_dim)
        # A row tile may be without column tile 0, which then can start nothing.
        lengths_of_q = p.q_lens is not None and not p.packed
        self.initialises = p.window != (-1, -1) or lengths_of_q or p.sparse
        self.lengths_of_q, self.Br = lengths_of_q, tiles.Br
        self.longest = self.cut(p.seqlen_q, tiles.Br), self.cut(p.seqlen_k, tiles.Bc)
        seen = {
            (b, i, j)
            for b in entries
            for i, rows in enumerate(self.rows[b])
            for j, cols in enumerate(self.cols[b])
            if any(self.sees(b, row, col) for row in rows for col in cols)
        }
        blocks = np.ones((1, 1), bool) if block_mask is None else block_mask
        grid = tuple(map(len, self.longest))
        blocks = np.broadcast_to(blocks, (p.batch, p.heads_q, *grid)).tolist()
        self.visits = {
            (b, h, i, j) for b, i, j in seen for h in range(p.heads_q) if blocks[b][h][i][j]
        }
        self.loads, self.stores, self.tiles = Counter(), Counter(), 0

    @staticmethod
    def cut(n, size):
        return [range(n)[a : a + size] for a in range(0, n, size)]

    def sees(self, b, row, col):
        Nq, Nk = self.lengths[b]
        left, right = (10**6 if side == -1 else side for side in self.p.window)
        if self.p.causal and not masks.visible_causal(row, col, Nk - Nq):
            return False
        return masks.visible_window(row, col, Nk - Nq, left, right)

    def passes(self, b):
        """FA-1's column tiles; the first goes over all rows to start them, also if it is empty."""
        return list(enumerate(self.cols[b])) or ([] if self.initialises else [(0, range(0))])

    def takes(self, b, h, i, j):
        """Whether FA-1's column tile j goes over row tile i."""
        return (b, h, i, j) in self.visits or (j == 0 and not self.initialises)

    def starts(self, b, h, i, j):
        """Whether FA-1's visit of a tile is what starts the row tile's O, l and m, or dQ."""
        if self.p.sparse:
            return not any(self.takes(b, h, i, before) for before in range(j))
        return j == 0 and not self.initialises

    def started_before(self, b, h):
        """The rows of which FA-1's line 2 (line 5) is carried out before the first pass."""
        if not (self.initialises and self.p.sparse):
            return self.all_rows[b] if self.initialises else []
        found = []
        for i, rows in enumerate(self.longest[0]):
            visited = any(self.takes(b, h, i, j) for j, _ in self.passes(b))
            cut_off = self.lengths_of_q and (i + 1) * self.Br > self.lengths[b][0]
            found += [] if visited and not cut_off else rows
        return found

    def load(self, name, *axes):
        elements = math.prod(map(len, axes))
        if elements:
            self.loads[name] += elements

    def store(self, name, *axes):
        elements = math.prod(map(len, axes))
        if elements:
            self.stores[name] += elements

    def load_bias(self, *axes):
        if self.p.bias is not None:
            self.load("bias", *axes)

    def add(self, name, *axes):
        self.load(name, *axes)
        self.store(name, *axes)

    def standard(self, *, return_lse, row_resident):
        self.scores("Q", "K", "S", bias=True)
        for b, _ in self.heads:
            for row in range(self.lengths[b][0]):
                cols = range(self.lengths[b][1])
                self.load("S", [row], cols)  # the maximum
                if not row_resident:
                    self.load("S", [row], cols)  # the exponentials
                self.store("P", [row], cols)
            if return_lse:
                self.store("L", self.all_rows[b])
        self.output("P", "V", "O")
        return self

    def fa1(self, *, query_splits, return_lse):
        size = math.ceil(len(self.longest[0]) / query_splits)
        halves = self.p.dtype != "float32"
        for b, h in self.heads:
            before = self.started_before(b, h)
            for name in ("O", "A") if halves and not self.p.sparse else ("O",):
                self.store(name, before, self.d)
            for name in ("l", "m"):
                self.store(name, before)
            for split in range(query_splits):
                mine = list(enumerate(self.rows[b]))[split * size : (split + 1) * size]
                for j, cols in self.passes(b):
                    todo = [(i, rows) for i, rows in mine if self.takes(b, h, i, j)]
                    if not todo:
                        continue
                    self.load("K", cols, self.d)
                    self.load("V", cols, self.d)
                    for i, rows in todo:
                        self.tiles += 1
                        self.load("Q", rows, self.d)
                        self.load_bias(rows, cols)
                        if not self.starts(b, h, i, j):
                            self.load("A" if halves else "O", rows, self.d)
                            self.load("l", rows)
                            self.load("m", rows)
                        after = any(self.takes(b, h, i, n) for n, _ in self.passes(b)[j + 1 :])
                        self.store("A" if halves and after else "O", rows, self.d)
                        self.store("l", rows)
                        self.store("m", rows)
            if return_lse:
                self.load("l", self.all_rows[b])
                self.load("m", self.all_rows[b])
                self.store("L", self.all_rows[b])
        return self

    def fa2(self):
        for b, h in self.heads:
            for i, rows in enumerate(self.rows[b]):
                self.load("Q", rows, self.d)
                for j, cols in enumerate(self.cols[b]):
                    if (b, h, i, j) in self.visits:
                        self.tiles += 1
                        self.load("K", cols, self.d)
                        self.load("V", cols, self.d)
                        self.load_bias(rows, cols)
            self.store("O", self.all_rows[b], self.d)
            self.store("L", self.all_rows[b])
        return self

    def heads_of(self, shared):
        """The query heads of a K/V head."""
        group = self.p.heads_q // self.p.heads_k
        return [h for h in range(self.p.heads_q) if h // group == shared]

    def scores(self, A, B, C, *, bias=False, in_place=False):
        """C = A B^T as the scores kernel counts it: every tile, none skipped."""
        for b, _ in self.heads:
            for rows in self.rows[b]:
                self.load(A, rows, self.d)
                for cols in self.cols[b]:
                    self.tiles += 1
                    self.load(B, cols, self.d)
                    if bias:
                        self.load_bias(rows, cols)
                    if in_place:
                        self.load(C, rows, cols)
                    self.store(C, rows, cols)

    def output(self, A, B, C):
        """C = A B, A a matrix as large as S."""
        for b, _ in self.heads:
            for rows in self.rows[b]:
                for cols in self.cols[b]:
                    self.load(A, rows, cols)
                    self.load(B, cols, self.d)
            self.store(C, self.all_rows[b], self.d)

    def transposed_output(self, A, B, C):
        """C = A^T B summed over a group of heads, A a matrix as large as S."""
        for b, shared in self.shared_heads:
            for cols in self.cols[b]:
                for _ in self.heads_of(shared):
                    for rows in self.rows[b]:
                        self.load(A, rows, cols)
                        self.load(B, rows, self.d)
            self.store(C, self.all_cols[b], self.d)

    def elementwise(self, sources, targets, times, *, add=()):
        for b, _ in self.heads:
            for row, col in product(*map(range, self.lengths[b])):
                for name in sources * times:
                    self.load(name, [row], [col])
                for name in targets:
                    self.store(name, [row], [col])
                for name in add:
                    self.add(name, [row], [col])

    def standard_backward(self, *, row_resident, forward_resident, dbias):
        """Names are those of the kernels' parameters: dP is the scores kernel's S, and so on."""
        dropped = ["P"] if self.p.dropout_p else []
        self.scores("Q", "K", "S", bias=True)
        self.elementwise(["S"], ["P"], 1 if forward_resident else 2)
        self.scores("Q", "K", "S")  # dO, V, dP
        times = 1 if row_resident else 2
        self.elementwise(["P", "dP"], ["dS", *dropped], times, add=["dbias"] if dbias else [])
        if self.p.softcap is not None:
            self.scores("Q", "K", "S", in_place=True)  # Q, K, dS
        self.transposed_output("P", "dO", "dV")
        self.output("P", "V", "O")  # dS, K, dQ
        self.transposed_output("P", "dO", "dV")  # dS, Q, dK
        return self

    def columns_of_gradients(self, *, passes, takes, each, add_dQ, dbias):
        """dK and dV by column tiles, with `each(b, h, i, j, rows)` for a row tile that is taken."""
        for b, shared in self.shared_heads:
            for j, cols in passes(b):
                self.load("K", cols, self.d)
                self.load("V", cols, self.d)
                for h in self.heads_of(shared):
                    for i, rows in enumerate(self.rows[b]):
                        if not takes(b, h, i, j):
                            continue
                        self.tiles += 1
                        self.load("Q", rows, self.d)
                        self.load("dO", rows, self.d)
                        self.load("L", rows)
                        self.load_bias(rows, cols)
                        if dbias:
                            self.add("dbias", rows, cols)
                        each(b, h, i, j, rows)
                        if add_dQ:
                            self.store("dQ", rows, self.d)
            self.store("dK", self.all_cols[b], self.d)
            self.store("dV", self.all_cols[b], self.d)

    def fa1_backward(self, *, dbias=False):
        for b, h in self.heads:
            self.store("dQ", self.started_before(b, h), self.d)

        def each(b, h, i, j, rows):
            self.load("O", rows, self.d)
            if not self.starts(b, h, i, j):
                self.load("dQ", rows, self.d)

        self.columns_of_gradients(
            passes=self.passes, takes=self.takes, each=each, add_dQ=True, dbias=dbias
        )
        return self

    def fa2_backward(self, *, deterministic, dbias=False):
        for b, _ in self.heads:
            for row in range(self.lengths[b][0]):
                self.load("O", [row], self.d)
                self.load("dO", [row], self.d)
                self.store("D", [row])
            if not deterministic:
                self.store("dQ", self.all_rows[b], self.d)

        def each(b, h, i, j, rows):
            self.load("D", rows)
            if not deterministic:
                self.load("dQ", rows, self.d)

        self.columns_of_gradients(
            passes=lambda b: enumerate(self.cols[b]),
            takes=lambda *place: place in self.visits,
            each=each,
            add_dQ=not deterministic,
            dbias=dbias,
        )
        if deterministic:
            for b, h in self.heads:
                for i, rows in enumerate(self.rows[b]):
                    self.load("Q", rows, self.d)
                    self.load("dO", rows, self.d)
                    self.load("L", rows)
                    self.load("D", rows)
                    for j, cols in enumerate(self.cols[b]):
                        if (b, h, i, j) in self.visits:
                            self.load("K", cols, self.d)
                            self.load("V", cols, self.d)
                            self.load_bias(rows, cols)
                self.store("dQ", self.all_rows[b], self.d)
        return self

    def agrees_with(self, accesses):
        assert accesses.loads == dict(self.loads)
        assert accesses.stores == dict(self.stores)
        assert accesses.total_loads == self.loads.total()
        assert accesses.total_stores == self.stores.total()
        assert accesses.total == self.loads.total() + self.stores.total()
        size = dict.fromkeys(OF_ONE_DTYPE, 4 if self.p.dtype == "float32" else 2)
        moved = sum(size.get(name, 4) * n for name, n in (self.loads + self.stores).items())
        assert accesses.bytes == moved and accesses.dtype == self.p.dtype
        assert all(type(n) is int for n in (*accesses.loads.values(), *accesses.stores.values()))


class Case(NamedTuple):
    problem: Problem
    tiles: Tiles
    block_mask: np.ndarray | None = None
    dbias: bool = False


DTYPE = st.sampled_from(["float32", "float16", "bfloat16"])
PROBLEMS = st.builds(
    lambda B, Hk, group, Nq, Nk, d, **facts: Problem(B, Hk * group, Hk, Nq, Nk, d, **facts),
    B=st.integers(1, 2),
    Hk=st.integers(1, 2),
    group=st.integers(1, 2),
    Nq=st.integers(1, 14),
    Nk=st.integers(1, 14),
    d=st.integers(1, 3),
    causal=st.booleans(),
    dtype=DTYPE,
)
TILES = st.builds(Tiles, Br=st.integers(1, 16), Bc=st.integers(1, 16))


@st.composite
def with_options(draw):
    """A small problem with any of the options."""
    batch = draw(st.integers(1, 3))
    kind = draw(st.sampled_from(["none", "q", "kv", "both", "packed"]))

    def lengths(own):
        longest = draw(st.integers(1, 11))
        if not own:
            return longest, None
        lens = draw(st.lists(st.integers(0, longest), min_size=batch, max_size=batch))
        if kind == "packed":
            lens[draw(st.integers(0, batch - 1))] = longest
        return longest, tuple(lens)

    Nq, q_lens = lengths(kind in ("q", "both", "packed"))
    Nk, kv_lens = lengths(kind in ("kv", "both", "packed"))
    heads_k, group = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    side = st.integers(-1, 12)
    one_of = [(1, n) for n in (batch, heads_k * group, Nq, Nk)]
    bias = st.none() | st.tuples(*map(st.sampled_from, one_of))
    tiles = Tiles(draw(st.integers(1, 6)), draw(st.integers(1, 6)))
    problem = Problem(
        batch,
        heads_k * group,
        heads_k,
        Nq,
        Nk,
        draw(st.integers(1, 2)),
        dtype=draw(DTYPE),
        causal=draw(st.booleans()),
        window=draw(st.just((-1, -1)) | st.tuples(side, side)),
        softcap=draw(st.sampled_from([None, 30.0])),
        bias=draw(bias),
        alibi=draw(st.booleans()),
        q_lens=q_lens,
        kv_lens=kv_lens,
        packed=kind == "packed",
        sparse=draw(st.booleans()),
        dropout_p=draw(st.sampled_from([0.0, 0.5])),
    )
    block_mask = None
    if problem.sparse:
        leading = [(1, batch), (1, heads_k * group)]
        leading = [draw(st.sampled_from(n)) for n in leading][draw(st.integers(0, 2)) :]
        shape = *leading, math.ceil(Nq / tiles.Br), math.ceil(Nk / tiles.Bc)
        random = np.random.default_rng(draw(st.integers(0, 2**32)))
        block_mask = random.random(shape) < draw(st.sampled_from([0.0, 0.2, 0.5, 0.8, 1.0]))
    return Case(problem, tiles, block_mask, problem.bias is not None and draw(st.booleans()))


CASES = st.tuples(PROBLEMS, TILES).map(lambda plain: Case(*plain)) | with_options()
often = examples(250)


def held(name, case, **options):
    """An algorithm's accesses and visited tiles as the model has them, against the walk's."""
    problem, tiles, mask, _ = case
    walk = getattr(Walk(problem, tiles, mask), name)(**options)
    walk.agrees_with(getattr(io, name)(problem, tiles, **options, block_mask=mask))
    if name != "standard_backward":
        passes = {"passes": "bwd"} if name.endswith("_backward") else {}
        algorithm = name.removesuffix("_backward")
        visited = io.tiles_visited(algorithm, problem, tiles, **passes, block_mask=mask)
        assert visited == walk.tiles


@often
@given(CASES, st.booleans(), st.booleans())
def test_standard_is_the_walk(case, return_lse, row_resident):
    held("standard", case, return_lse=return_lse, row_resident=row_resident)


@often
@given(CASES, st.integers(1, 16), st.booleans())
def test_fa1_is_the_walk(case, query_splits, return_lse):
    held("fa1", case, query_splits=query_splits, return_lse=return_lse)


@often
@given(CASES)
def test_fa2_is_the_walk(case):
    held("fa2", case)


@often
@given(CASES, st.booleans(), st.booleans())
def test_standard_backward_is_the_walk(case, row_resident, forward_resident):
    options = {"row_resident": row_resident, "forward_resident": forward_resident}
    held("standard_backward", case, **options, dbias=case.dbias)


def single(case):
    """In 16 bits test_calls.py counts."""
    return case._replace(problem=replace(case.problem, dtype="float32"))


@often
@given(CASES)
def test_fa1_backward_is_the_walk(case):
    held("fa1_backward", single(case), dbias=case.dbias)


@often
@given(CASES, st.booleans())
def test_fa2_backward_is_the_walk(case, deterministic):
    held("fa2_backward", single(case), deterministic=deterministic, dbias=case.dbias)


@often
@given(CASES)
def test_flops_are_of_the_pairs_that_a_window_leaves(case):
    problem, tiles, mask, _ = case
    walk, flops = Walk(problem, tiles, mask), 0
    for b, h in walk.heads:
        pairs = list(product(*map(range, walk.lengths[b])))
        count = 4 * len(pairs)
        if problem.window != (-1, -1):
            count = 4 * sum(walk.sees(b, *pair) for pair in pairs)
        elif problem.causal:
            count = 2 * len(pairs)
        share = 1
        if mask is not None:
            grid = mask.shape[-2:]
            of_head = np.broadcast_to(mask, (problem.batch, problem.heads_q, *grid))[b, h]
            share = Fraction(int(of_head.sum()), of_head.size)
        flops += count * share * problem.head_dim
    assert io.flops(problem, block_mask=mask) == math.floor(flops)
    assert io.flops(problem, "bwd", block_mask=mask) == math.floor(flops * Fraction(5, 2))


def square(N, d, *, batch=1, heads=1, causal=False):
    return Problem(batch, heads, heads, N, N, d, causal=causal)


def test_counts_are_printed_as_a_table():
    counts = io.Accesses({"Q": 1234567, "A": 8}, {"O": 1000, "A": 8}, "float16")
    assert str(counts).split("\n") == [
        "array         loads     stores",
        "Q         1,234,567          0",
        "A                 8          8",
        "O                 0      1,000",
        "elements  1,234,575      1,008",
        "bytes     2,469,166      2,032",
    ]
    wide = str(io.Accesses({"Q": 10**12}, {})).split("\n")
    assert len({len(line) for line in wide}) == 1 and "1,000,000,000,000" in wide[1]


def test_every_split_of_a_backward_pass_adds_to_dk_and_dv():
    p, t = square(64, 8), Tiles(16, 16)
    one = io.fa1_backward(p, t)
    for splits, runs in [(2, 2), (3, 2), (4, 4), (9, 4)]:
        split = io.fa1_backward(p, t, query_splits=splits)
        gradients = {"dK": runs * 512, "dV": runs * 512}
        assert split.stores == one.stores | gradients
        assert split.loads == one.loads | gradients | {"K": runs * 512, "V": runs * 512}
        # In 16 bits the sums lie beside dK and dV, which they are rounded to.
        halves = io.fa1_backward(replace(p, dtype="float16"), t, query_splits=splits)
        assert halves.loads["A"] - split.loads["dQ"] == 2 * 512 and halves.sums == ("dK", "dV")
        assert split.sums == () and io.workspace("fa1", p, passes="bwd", query_splits=splits) == 0


def test_long_sequences_are_quick_and_counts_do_not_overflow():
    p = Problem(10**6, 64, 8, 65536, 65536, 128, causal=True)
    T, N, d, heads = 65536, 65536, 128, 64 * 10**6
    a = io.fa2(p, Tiles(1, 1))  # row i loads columns 0..i
    assert a.loads["K"] == heads * d * N * (N + 1) // 2 > 2**63
    b = io.fa1(p, Tiles(1, 1), query_splits=T)  # column j loads rows j.., all of them for j = 0
    assert b.loads["K"] == a.loads["K"]
    assert b.stores["O"] == heads * d * N * (N + 1) // 2
    assert io.standard(p, Tiles(64, 64)).loads["S"] == heads * N * N
    for back in (io.fa1_backward(p, Tiles(1, 1)), io.fa2_backward(p, Tiles(1, 1))):
        assert back.loads["Q"] == a.loads["K"] and back.loads["K"] == heads // 8 * d * N
    p = square(2**20, 64, causal=True)
    for algorithm, T in product(("fa1", "fa2"), (2**13, 2**20)):
        assert io.tiles_visited(algorithm, p, Tiles(2**20 // T, 2**20 // T)) == T * (T + 1) // 2
    # Rows 0 .. 999 see one column less than the rows after.
    p = square(2**28, 1, batch=2, causal=True)
    assert io.flops(replace(p, window=(1000, 0))) == 8 * (2**28 * 1001 - 1000 * 1001 // 2)


# FA-1 (arXiv 2205.14135v2) Fig. 2 middle: A100, N = 1024, d = 64, 16 heads, batch 64, forward.
# HBM accesses in GB over B_c, read off the figure.
@pytest.mark.parametrize("Bc, published", [(64, 6.58), (128, 3.36), (256, 1.74), (512, 0.94)])
def test_figure_2_middle_is_a_count_of_algorithm_1(Bc, published):
    p = square(1024, 64, batch=64, heads=16)
    assert 2 * io.fa1_paper(p, Bc) / 1e9 == pytest.approx(published, rel=5e-3)  # GB of float16
    X = 64 * 16 * 1024 * 64
    assert io.fa1_paper(p, Bc) == X * (3 * 1024 // Bc + 1)


def test_paper_counts_of_unequal_lengths_and_ragged_blocks():
    p = Problem(2, 3, 3, 10, 7, 4)
    # Three passes (7 keys in blocks of 3) over Q and O, the first without reading O.
    assert io.fa1_paper(p, 3) == 2 * 3 * 4 * (7 + 7 + 3 * 10 + 2 * 10 + 3 * 10)


def test_bounds_at_equal_lengths():
    p = square(1024, 64, batch=2, heads=3)
    assert io.theta_standard(p) == 6 * (1024 * 64 + 1024**2)
    assert io.theta_flash(p, 4096) == 6 * 1024**2 * 64**2 / 4096
    assert io.theta_flash(p, 8192) == io.theta_flash(p, 4096) / 2
    assert io.theta_flash(square(2048, 64, batch=2, heads=3), 4096) == 4 * io.theta_flash(p, 4096)


@pytest.mark.parametrize("d", [32, 64, 128])
def test_saha_and_ye_change_regime_at_d_squared(d):
    p = square(4096, d)
    M = d * d
    assert io.saha_ye(p, M) == io.theta_flash(p, M) == 4096**2
    for above in (M + 1, 2 * M, 16 * M):
        assert io.saha_ye(p, above) == io.theta_flash(p, above)
    for below in (d, M // 2, M - 1):
        assert io.saha_ye(p, below) < io.theta_flash(p, below)
        assert io.saha_ye(p, below) == pytest.approx(4096**2 * d / math.sqrt(below))
    falling = [io.saha_ye(p, m) for m in range(d, 4 * M, d)]
    assert falling == sorted(falling, reverse=True)


@pytest.mark.parametrize("d", [32, 64, 128])
def test_the_bound_of_the_backward_pass(d):
    p, N = square(4096, d, batch=2), 4096
    assert io.li_liang(p, d * d) == 2 * (N * N + N * d)
    for M in (d * d // 4, d, 1):
        assert io.li_liang(p, M) == pytest.approx(2 * (N * N * d + N * d * d) / math.sqrt(M))
    for M in (2 * d * d, 16 * d * d):
        assert io.li_liang(p, M) == pytest.approx(2 * (N * N * d * d + N * d**3) / M)


PLAIN, SPARSE = square(4, 4), replace(square(4, 4), sparse=True)
ONE, TWO = Tiles(1, 1), Tiles(2, 2)


def blocks(*shape, dtype=bool):
    return {"block_mask": np.ones(shape, dtype)}


@pytest.mark.parametrize(
    "call, says",
    [
        (
            lambda: io.fa2(SPARSE, ONE),
            "block_mask must be a bool array .* sparse=True, got None",
        ),
        (lambda: io.fa1(PLAIN, TWO, **blocks(2, 2)), "block_mask must be None for .* sparse=False"),
        (lambda: io.flops(PLAIN, **blocks(2, 2)), "block_mask must be None for .* sparse=False"),
        (
            lambda: io.standard(SPARSE, TWO, **blocks(2, 3)),
            r"block_mask must have shape \(2, 2\) .* got \(2, 3\)",
        ),
        (
            lambda: io.flops(SPARSE, **blocks(2, 2, 2)),
            r"block_mask must .*\(row tiles, column tiles\),.* got \(2, 2, 2\)",
        ),
        (
            lambda: io.tiles_visited("standard", SPARSE, TWO, **blocks(2)),
            r"block_mask must .*got \(2,\)",
        ),
        (
            lambda: io.fa2(SPARSE, TWO, **blocks(2, 2, dtype="u1")),
            "block_mask must be bool, got dtype uint8",
        ),
        (
            lambda: io.fa1_backward(PLAIN, ONE, dbias=True),
            "dbias must be False, .* no bias, got True",
        ),
        (
            lambda: io.fa2_backward(PLAIN, ONE, dbias=True),
            "dbias must be False, .* no bias, got True",
        ),
        (
            lambda: io.standard_backward(PLAIN, ONE, dbias=True),
            "dbias must be False, .* no bias, got True",
        ),
        (
            lambda: io.workspace("fa3", PLAIN),
            "algorithm must be 'standard', 'fa1' or 'fa2', got 'fa3'",
        ),
        (lambda: io.tiles_visited("", PLAIN, ONE), "algorithm must be .*'fa1' .*, got ''"),
        (lambda: io.flops(PLAIN, "both"), "passes must be 'fwd', 'bwd' or 'fwd.bwd', got 'both'"),
        (
            lambda: io.workspace("fa1", PLAIN, passes="fwd+bwd"),
            "passes must be 'fwd' or 'bwd', got ",
        ),
        (lambda: io.tiles_visited("fa1", PLAIN, ONE, passes="back"), "passes must be .*got 'back'"),
        (lambda: io.fa1_paper(PLAIN, 0), "Bc must be an integer of at least 1, got 0"),
        (lambda: io.theta_flash(PLAIN, 0), "M, the size .*, must be .* greater than 0, got 0"),
        (lambda: io.saha_ye(PLAIN, math.inf), "M, the size .*, must be a finite .*, got inf"),
    ],
)
def test_bad_arguments_are_named(call, says):
    with pytest.raises((ValueError, TypeError), match=f"^{says}"):
        call()


NUMBERS = {
    "kv_splits": [io.fa2, partial(io.workspace, "fa2")],
    "group_splits": [io.fa2_backward, partial(io.workspace, "fa2", passes="bwd")],
    "query_splits": [io.fa1, io.fa1_backward, partial(io.workspace, "fa1", passes="bwd")],
    "tile_heads": [io.fa2],
}


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_of_parts_is_an_integer_of_at_least_one(name):
    for count in NUMBERS[name]:
        tiles = () if isinstance(count, partial) else (Tiles(2, 2),)
        for value in (-3, 0, 1.5, True, "auto"):
            with pytest.raises((ValueError, TypeError), match=f"^{name} must be .*, got {value!r}"):
                count(square(4, 4), *tiles, **{name: value})


@pytest.mark.parametrize("value", [10**400, "3", None, math.nan])
def test_what_is_no_number_of_elements_or_rank_is_refused(value):
    for formula in (io.theta_flash, io.saha_ye, io.li_liang):
        with pytest.raises(
            ValueError, match="^M, the size .* in elements, must be a finite number .* 0, got "
        ):
            formula(square(4, 4), value)
    with pytest.raises(ValueError, match="^rank must be from 0 to 1, got "):
        io.ring(square(4, 4), 2, value)
    if value != 10**400:
        with pytest.raises(TypeError, match="^ranks must be an integer of at least 1, got "):
            io.ring_break_even(value)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize(
    "tiles, says",
    [
        (
            (2, 2),
            r"tiles must have the attributes Br and Bc, like Tiles\(Br=64, Bc=64\), got \(2, 2\)",
        ),
        (None, r"tiles must have the attributes Br and Bc, like Tiles\(Br=64, Bc=64\), got None"),
        (Tiles(0, 2), r"tiles\.Br must be an integer of at least 1, got 0"),
        (Tiles(2, -2), r"tiles\.Bc must be an integer of at least 1, got -2"),
        (Tiles(1.5, 2), r"tiles\.Br must be an integer of at least 1, got 1\.5"),
    ],
    ids=str,
)
def test_block_sizes_are_integers_of_at_least_one(tiles, says, sparse):
    problem = replace(square(4, 4), sparse=sparse)
    counts = [io.standard, io.standard_backward, io.fa1, io.fa1_backward, io.fa2, io.fa2_backward]
    for count in (*counts, *(partial(io.tiles_visited, name) for name in io.ALGORITHMS)):
        given = {"block_mask": np.ones((2, 2), bool)} if sparse else {}
        with pytest.raises((ValueError, TypeError), match=says):
            count(problem, tiles, **given)
