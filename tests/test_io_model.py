"""The access model against a walk over tiles that counts one element at a time, and the papers."""

import math
from collections import Counter
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa_numba import io_model as io
from fa_numba.problem import Problem


class Tiles(NamedTuple):
    Br: int
    Bc: int


class Walk:
    """Goes through an algorithm's tiles and counts each element it would touch."""

    def __init__(self, problem, tiles):
        self.p = problem
        self.rows = self.cut(problem.seqlen_q, tiles.Br)
        self.cols = self.cut(problem.seqlen_k, tiles.Bc)
        self.heads = list(product(range(problem.batch), range(problem.heads_q)))
        self.shared_heads = list(product(range(problem.batch), range(problem.heads_k)))
        self.loads, self.stores, self.tiles = Counter(), Counter(), 0

    @staticmethod
    def cut(n, size):
        return [range(n)[a : a + size] for a in range(0, n, size)]

    def sees(self, rows, cols):
        if not self.p.causal:
            return True
        shift = self.p.seqlen_k - self.p.seqlen_q
        return any(col <= row + shift for row in rows for col in cols)

    def load(self, name, *axes):
        for _ in product(*axes):
            self.loads[name] += 1

    def store(self, name, *axes):
        for _ in product(*axes):
            self.stores[name] += 1

    def standard(self, *, return_lse, row_resident):
        d, Nk = range(self.p.head_dim), range(self.p.seqlen_k)
        for _ in self.heads:
            for rows in self.rows:
                self.load("Q", rows, d)
                for cols in self.cols:
                    self.load("K", cols, d)
                    self.store("S", rows, cols)
                    self.tiles += 1
        for _ in self.heads:
            for row in range(self.p.seqlen_q):
                self.load("S", [row], Nk)  # the maximum
                if not row_resident:
                    self.load("S", [row], Nk)  # the exponentials
                self.store("P", [row], Nk)
                if return_lse:
                    self.store("L", [row])
        for _ in self.heads:
            for rows in self.rows:
                for cols in self.cols:
                    self.load("P", rows, cols)
                    self.load("V", cols, d)
                self.store("O", rows, d)
        return self

    def fa1(self, *, query_splits, return_lse):
        d = range(self.p.head_dim)
        size = math.ceil(len(self.rows) / query_splits)
        for _ in self.heads:
            for split in range(query_splits):
                mine = self.rows[split * size : (split + 1) * size]
                for j, cols in enumerate(self.cols):
                    todo = [rows for rows in mine if j == 0 or self.sees(rows, cols)]
                    if not todo:
                        continue
                    self.load("K", cols, d)
                    self.load("V", cols, d)
                    for rows in todo:
                        self.tiles += 1
                        self.load("Q", rows, d)
                        if j > 0:
                            self.load("O", rows, d)
                            self.load("l", rows)
                            self.load("m", rows)
                        self.store("O", rows, d)
                        self.store("l", rows)
                        self.store("m", rows)
            if return_lse:
                for row in range(self.p.seqlen_q):
                    self.load("l", [row])
                    self.load("m", [row])
                    self.store("L", [row])
        return self

    def fa2(self):
        d = range(self.p.head_dim)
        for _ in self.heads:
            for rows in self.rows:
                self.load("Q", rows, d)
                for cols in self.cols:
                    if self.sees(rows, cols):
                        self.tiles += 1
                        self.load("K", cols, d)
                        self.load("V", cols, d)
                self.store("O", rows, d)
                self.store("L", rows)
        return self

    def heads_of(self, shared):
        """The query heads of a K/V head."""
        group = self.p.heads_q // self.p.heads_k
        return [h for h in range(self.p.heads_q) if h // group == shared]

    def scores(self, A, B, C):
        """C = A B^T as the scores kernel counts it: every tile, none skipped."""
        d = range(self.p.head_dim)
        for _ in self.heads:
            for rows in self.rows:
                self.load(A, rows, d)
                for cols in self.cols:
                    self.load(B, cols, d)
                    self.store(C, rows, cols)

    def output(self, A, B, C):
        """C = A B, A a matrix as large as S."""
        d = range(self.p.head_dim)
        for _ in self.heads:
            for rows in self.rows:
                for cols in self.cols:
                    self.load(A, rows, cols)
                    self.load(B, cols, d)
                self.store(C, rows, d)

    def transposed_output(self, A, B, C):
        """C = A^T B summed over a group of heads, A a matrix as large as S."""
        d = range(self.p.head_dim)
        for _, shared in self.shared_heads:
            for cols in self.cols:
                for _ in self.heads_of(shared):
                    for rows in self.rows:
                        self.load(A, rows, cols)
                        self.load(B, rows, d)
                self.store(C, cols, d)

    def elementwise(self, sources, target, times):
        for _ in self.heads:
            for row in range(self.p.seqlen_q):
                for col in range(self.p.seqlen_k):
                    for name in sources * times:
                        self.load(name, [row], [col])
                    self.store(target, [row], [col])

    def standard_backward(self, *, row_resident, forward_resident):
        """Names are those of the kernels' parameters: dP is the scores kernel's S, and so on."""
        self.scores("Q", "K", "S")
        self.elementwise(["S"], "P", 1 if forward_resident else 2)
        self.transposed_output("P", "dO", "dV")
        self.scores("Q", "K", "S")  # dO, V, dP
        self.elementwise(["P", "dP"], "dS", 1 if row_resident else 2)
        self.output("P", "V", "O")  # dS, K, dQ
        self.transposed_output("P", "dO", "dV")  # dS, Q, dK
        return self

    def columns_of_gradients(self, *, visits, each, add_dQ):
        """dK and dV by column tiles, with `each(j, rows)` for a tile that `visits` takes."""
        d = range(self.p.head_dim)
        for _, shared in self.shared_heads:
            for j, cols in enumerate(self.cols):
                self.load("K", cols, d)
                self.load("V", cols, d)
                for _ in self.heads_of(shared):
                    for rows in self.rows:
                        if not visits(j, rows, cols):
                            continue
                        self.tiles += 1
                        self.load("Q", rows, d)
                        self.load("dO", rows, d)
                        self.load("L", rows)
                        each(j, rows)
                        if add_dQ:
                            self.store("dQ", rows, d)
                self.store("dK", cols, d)
                self.store("dV", cols, d)

    def fa1_backward(self):
        d = range(self.p.head_dim)

        def each(j, rows):
            self.load("O", rows, d)
            if j > 0:
                self.load("dQ", rows, d)

        def visits(j, rows, cols):
            return j == 0 or self.sees(rows, cols)

        self.columns_of_gradients(visits=visits, each=each, add_dQ=True)
        return self

    def fa2_backward(self, *, deterministic):
        d = range(self.p.head_dim)
        for _ in self.heads:
            for row in range(self.p.seqlen_q):
                self.load("O", [row], d)
                self.load("dO", [row], d)
                self.store("D", [row])
                if not deterministic:
                    self.store("dQ", [row], d)

        def each(j, rows):
            self.load("D", rows)
            if not deterministic:
                self.load("dQ", rows, d)

        def visits(j, rows, cols):
            return self.sees(rows, cols)

        self.columns_of_gradients(visits=visits, each=each, add_dQ=not deterministic)
        if deterministic:
            for _ in self.heads:
                for rows in self.rows:
                    self.load("Q", rows, d)
                    self.load("dO", rows, d)
                    self.load("L", rows)
                    self.load("D", rows)
                    for cols in self.cols:
                        if self.sees(rows, cols):
                            self.load("K", cols, d)
                            self.load("V", cols, d)
                    self.store("dQ", rows, d)
        return self

    def agrees_with(self, accesses):
        assert accesses.loads == dict(self.loads)
        assert accesses.stores == dict(self.stores)
        assert accesses.total_loads == self.loads.total()
        assert accesses.total_stores == self.stores.total()
        assert accesses.total == self.loads.total() + self.stores.total()
        assert accesses.bytes == 4 * accesses.total
        assert all(type(n) is int for n in (*accesses.loads.values(), *accesses.stores.values()))


PROBLEMS = st.builds(
    lambda B, Hk, group, Nq, Nk, d, causal: Problem(B, Hk * group, Hk, Nq, Nk, d, causal=causal),
    B=st.integers(1, 2),
    Hk=st.integers(1, 2),
    group=st.integers(1, 2),
    Nq=st.integers(1, 14),
    Nk=st.integers(1, 14),
    d=st.integers(1, 3),
    causal=st.booleans(),
)
TILES = st.builds(Tiles, Br=st.integers(1, 16), Bc=st.integers(1, 16))
often = settings(max_examples=300, deadline=None)


@often
@given(PROBLEMS, TILES, st.booleans(), st.booleans())
def test_standard_is_the_walk(problem, tiles, return_lse, row_resident):
    walk = Walk(problem, tiles).standard(return_lse=return_lse, row_resident=row_resident)
    walk.agrees_with(io.standard(problem, tiles, return_lse=return_lse, row_resident=row_resident))
    assert io.tiles_visited("standard", problem, tiles) == walk.tiles


@often
@given(PROBLEMS, TILES, st.integers(1, 16), st.booleans())
def test_fa1_is_the_walk(problem, tiles, query_splits, return_lse):
    walk = Walk(problem, tiles).fa1(query_splits=query_splits, return_lse=return_lse)
    walk.agrees_with(io.fa1(problem, tiles, query_splits=query_splits, return_lse=return_lse))
    assert io.tiles_visited("fa1", problem, tiles) == walk.tiles


@often
@given(PROBLEMS, TILES)
def test_fa2_is_the_walk(problem, tiles):
    walk = Walk(problem, tiles).fa2()
    walk.agrees_with(io.fa2(problem, tiles))
    assert io.tiles_visited("fa2", problem, tiles) == walk.tiles


@often
@given(PROBLEMS, TILES, st.booleans(), st.booleans())
def test_standard_backward_is_the_walk(problem, tiles, row_resident, forward_resident):
    resident = {"row_resident": row_resident, "forward_resident": forward_resident}
    walk = Walk(problem, tiles).standard_backward(**resident)
    walk.agrees_with(io.standard_backward(problem, tiles, **resident))


@often
@given(PROBLEMS, TILES)
def test_fa1_backward_is_the_walk(problem, tiles):
    walk = Walk(problem, tiles).fa1_backward()
    walk.agrees_with(io.fa1_backward(problem, tiles))
    assert io.tiles_visited("fa1", problem, tiles, passes="bwd") == walk.tiles


@often
@given(PROBLEMS, TILES, st.booleans())
def test_fa2_backward_is_the_walk(problem, tiles, deterministic):
    walk = Walk(problem, tiles).fa2_backward(deterministic=deterministic)
    walk.agrees_with(io.fa2_backward(problem, tiles, deterministic=deterministic))
    assert io.tiles_visited("fa2", problem, tiles, passes="bwd") == walk.tiles


@pytest.mark.parametrize("Nq, Nk", list(product(range(1, 9), repeat=2)))
def test_every_small_causal_shape_is_the_walk(Nq, Nk):
    p = Problem(1, 1, 1, Nq, Nk, 1, causal=True)
    for Br, Bc in product(range(1, 10), repeat=2):
        t = Tiles(Br, Bc)
        Walk(p, t).fa2().agrees_with(io.fa2(p, t))
        for splits in (1, 2, 3, 5):
            walk = Walk(p, t).fa1(query_splits=splits, return_lse=False)
            walk.agrees_with(io.fa1(p, t, query_splits=splits))
        Walk(p, t).fa1_backward().agrees_with(io.fa1_backward(p, t))
        for deterministic in (False, True):
            walk = Walk(p, t).fa2_backward(deterministic=deterministic)
            walk.agrees_with(io.fa2_backward(p, t, deterministic=deterministic))


def square(N, d, *, batch=1, heads=1, causal=False):
    return Problem(batch, heads, heads, N, N, d, causal=causal)


def test_counts_of_one_small_problem():
    p, t = square(64, 8), Tiles(16, 16)
    outer_q = io.fa2(p, t)
    assert (outer_q.total_loads, outer_q.total_stores) == (4608, 576)
    outer_kv = io.fa1(p, t)
    matrices = sum(outer_kv.loads.get(a, 0) + outer_kv.stores.get(a, 0) for a in "QKVO")
    assert matrices == (3 * 4 + 1) * 64 * 8
    assert outer_kv.loads["l"] == outer_kv.loads["m"] == 3 * 64
    assert outer_kv.stores["l"] == outer_kv.stores["m"] == 4 * 64


@pytest.mark.parametrize("N, d, Br, Bc", [(64, 8, 16, 16), (60, 5, 7, 9), (128, 64, 1, 128)])
def test_unmasked_totals_in_units_of_Nd(N, d, Br, Bc):
    p, t = square(N, d), Tiles(Br, Bc)
    Tr, Tc = math.ceil(N / Br), math.ceil(N / Bc)

    def matrices(accesses):
        return sum(accesses.loads.get(a, 0) + accesses.stores.get(a, 0) for a in "QKVO")

    assert matrices(io.fa1(p, t)) == (3 * Tc + 1) * N * d
    assert matrices(io.fa1(p, t)) == io.fa1_paper(p, Bc)
    assert matrices(io.fa2(p, t)) == (2 * Tr + 2) * N * d
    # One row tile reads each matrix once, which is how the paper counts the standard algorithm.
    assert io.standard(p, Tiles(N, Bc)).total == io.standard_paper(p) == 4 * N * d + 4 * N * N


def test_one_column_tile_needs_no_second_pass():
    a = io.fa1(square(16, 4), Tiles(4, 16))
    assert set(a.loads) == {"Q", "K", "V"}
    assert set(a.stores) == {"O", "l", "m"}


def test_every_split_reads_all_of_kv():
    p, t = square(64, 8), Tiles(16, 16)
    one = io.fa1(p, t)
    for splits, runs in [(2, 2), (3, 2), (4, 4), (9, 4)]:
        split = io.fa1(p, t, query_splits=splits)
        assert split.stores == one.stores
        assert split.loads == {**one.loads, "K": runs * 512, "V": runs * 512}


def test_a_shared_kv_head_is_loaded_by_each_query_head():
    p = Problem(2, 6, 6, 33, 17, 8)
    t = Tiles(16, 8)
    for count in (io.standard, io.fa1, io.fa2):
        assert count(p, t) == count(replace(p, heads_k=2), t)


def test_gradients_of_one_small_problem():
    p, t = square(64, 8), Tiles(16, 16)
    pass_over_rows, columns = 64 * 8, 2 * 64 * 8
    # K, V, dK and dV once; four passes over Q, dO, O, L and dQ, whose first read is left out.
    outer_kv = io.fa1_backward(p, t)
    assert outer_kv.total_loads == columns + 4 * (3 * pass_over_rows + 64) + 3 * pass_over_rows
    assert outer_kv.total_stores == columns + 4 * pass_over_rows
    # D takes O and dO once; then four passes over Q, dO, L and D, and adds to dQ.
    atomic = io.fa2_backward(p, t)
    sums = 2 * pass_over_rows
    assert atomic.total_loads == sums + columns + 4 * (3 * pass_over_rows + 2 * 64)
    assert atomic.total_stores == 64 + pass_over_rows + columns + 4 * pass_over_rows
    # The second sweep reads Q and dO once and K and V four times.
    swept = io.fa2_backward(p, t, deterministic=True)
    sweep = 2 * pass_over_rows + 2 * 64 + 4 * columns
    assert swept.total_loads == sums + columns + 4 * (2 * pass_over_rows + 2 * 64) + sweep
    assert swept.total_stores == 64 + columns + pass_over_rows


def test_one_column_tile_never_reads_dQ():
    assert "dQ" not in io.fa1_backward(square(16, 4), Tiles(4, 16)).loads


def test_a_shared_kv_head_is_loaded_once_backward():
    p = Problem(2, 6, 6, 33, 17, 8)
    shared, t = replace(p, heads_k=2), Tiles(16, 8)
    for count in (io.fa1_backward, io.fa2_backward):
        own, group = count(p, t), count(shared, t)
        for name in own.loads:
            assert own.loads[name] == group.loads[name] * (3 if name in "KV" else 1)
        for name in own.stores:
            assert own.stores[name] == group.stores[name] * (3 if name in ("dK", "dV") else 1)


def test_rows_that_see_nothing_backward():
    p = Problem(1, 1, 1, 20, 4, 2, causal=True)  # rows 0..15 see no column
    t = Tiles(4, 2)
    # fa1 writes dQ = 0 in its first pass, fa2 with the row sums.
    assert io.tiles_visited("fa1", p, t, passes="bwd") == 5 + 1
    assert io.tiles_visited("fa2", p, t, passes="bwd") == 2
    assert io.fa2_backward(p, t).loads["Q"] == 2 * 4 * 2
    assert io.fa2_backward(p, t).stores["dQ"] == 20 * 2 + 2 * 4 * 2
    assert io.fa2_backward(p, t, deterministic=True).stores["dQ"] == 20 * 2


@pytest.mark.parametrize("causal", [False, True])
def test_larger_tiles_of_the_outer_loop_never_cost_more(causal):
    p = square(1000, 64, causal=causal)
    outer_kv = [io.fa1(p, Tiles(16, Bc)).total for Bc in (8, 16, 32, 64, 128, 256, 512, 1024)]
    outer_q = [io.fa2(p, Tiles(Br, 16)).total for Br in (8, 16, 32, 64, 128, 256, 512, 1024)]
    for totals in (outer_kv, outer_q):
        assert totals == sorted(totals, reverse=True) and len(set(totals)) == len(totals)
    # The smallest possible: K and V once, each O, Q once.
    assert outer_q[-1] == 4 * 1000 * 64 + 1000


def test_causal_skipping_halves_in_the_limit():
    t = Tiles(16, 16)
    full, half = square(8192, 64), square(8192, 64, causal=True)
    T = 8192 // 16
    assert io.tiles_visited("fa2", full, t) == T * T
    assert io.tiles_visited("fa2", half, t) == T * (T + 1) // 2
    # On the square diagonal fa1 skips the same tiles: column tile 0 is seen by all rows anyway.
    assert io.tiles_visited("fa1", half, t) == T * (T + 1) // 2
    assert io.tiles_visited("standard", half, t) == T * T
    assert io.fa2(half, t).total / io.fa2(full, t).total == pytest.approx(0.5, rel=5e-3)
    assert io.standard(half, t) == io.standard(full, t)


def test_rows_that_see_nothing():
    p = Problem(1, 1, 1, 20, 4, 2, causal=True)  # rows 0..15 see no column
    t = Tiles(4, 2)
    assert io.fa2(p, t).loads == {"Q": 40, "K": 8, "V": 8}
    assert io.tiles_visited("fa2", p, t) == 2
    assert io.tiles_visited("fa1", p, t) == 5 + 1  # column tile 0 initialises all five row tiles


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


# FA-1 (arXiv 2205.14135v2) Fig. 2 middle: A100, N = 1024, d = 64, 16 heads, batch 64, forward.
# HBM accesses in GB over B_c, read off the figure.
@pytest.mark.parametrize("Bc, published", [(64, 6.58), (128, 3.36), (256, 1.74), (512, 0.94)])
def test_figure_2_middle_is_a_count_of_algorithm_1(Bc, published):
    p = square(1024, 64, batch=64, heads=16)
    assert io.fa1_paper_gb(p, Bc) == pytest.approx(published, rel=5e-3)
    X = 64 * 16 * 1024 * 64
    assert io.fa1_paper(p, Bc) == X * (3 * 1024 // Bc + 1)


def test_paper_counts_of_unequal_lengths_and_ragged_blocks():
    p = Problem(2, 3, 3, 10, 7, 4)
    # Three passes (7 keys in blocks of 3) over Q and O, the first without reading O.
    assert io.fa1_paper(p, 3) == 2 * 3 * 4 * (7 + 7 + 3 * 10 + 2 * 10 + 3 * 10)
    assert io.standard_paper(p) == 2 * 3 * (4 * (10 + 7 + 7 + 10) + 4 * 10 * 7)


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


def test_exact_counts_follow_the_bounds():
    """With the papers' B_c = M / 4d the counts are within known constants of the Thetas."""
    for N, d, M in product([1024, 4096, 16384], [32, 64, 128], [12288, 24576, 57344]):
        p = square(N, d)
        Bc = M // (4 * d)
        T = N / Bc  # = 4 N d / M, and T <= T_c < T + 1
        ratio = io.fa1(p, Tiles(min(Bc, d), Bc)).total / io.theta_flash(p, M)
        # (3 T_c + 1) N d of Q, K, V, O and (4 T_c - 2) N of l and m, over T N d / 4
        assert 12 <= ratio <= 12 + 16 / T + 16 / d * (1 + 1 / T)
        assert 1 <= io.standard_paper(p) / io.theta_standard(p) <= 4


@pytest.mark.parametrize("passes, factor", [("fwd", 1), ("bwd", 2.5), ("fwd+bwd", 3.5)])
def test_flops_are_the_published_convention(passes, factor):
    # FA-2 section 4.1: batch 8, N = 2048, 16 heads of d = 128: 16k tokens, hidden dimension 2048.
    p = square(2048, 128, batch=8, heads=16)
    assert io.flops(p, passes) == factor * 4 * 8 * 16 * 2048**2 * 128
    assert io.flops(replace(p, causal=True), passes) * 2 == io.flops(p, passes)
    assert io.flops(Problem(1, 2, 1, 3, 5, 7), passes) == factor * 4 * 2 * 3 * 5 * 7
    assert io.flops(p) == io.flops(p, "fwd")


def test_workspace():
    p = Problem(2, 4, 2, 10, 7, 8)
    padded = 8  # rows of S start at 16-byte addresses
    assert io.workspace("standard", p) == 4 * 2 * 4 * 10 * padded
    assert io.workspace("standard", p, return_lse=True) == 4 * 2 * 4 * 10 * padded
    assert io.workspace("fa1", p) == io.workspace("fa1", p, return_lse=True) == 8 * 2 * 4 * 10
    assert io.workspace("fa2", p) == 4 * 2 * 4 * 10
    assert io.workspace("fa2", p, return_lse=True) == 0
    assert io.workspace("standard", p, passes="bwd") == 2 * 4 * 2 * 4 * 10 * padded
    assert io.workspace("fa1", p, passes="bwd") == 0
    assert io.workspace("fa2", p, passes="bwd") == 4 * 2 * 4 * 10


@pytest.mark.parametrize(
    "call, says",
    [
        (lambda p: io.workspace("fa3", p), ["algorithm", "'fa3'", "'standard', 'fa1', 'fa2'"]),
        (lambda p: io.tiles_visited("", p, Tiles(1, 1)), ["algorithm", "''", "'fa1'"]),
        (lambda p: io.flops(p, "both"), ["passes", "'both'", "'fwd', 'bwd', 'fwd+bwd'"]),
        (
            lambda p: io.workspace("fa1", p, passes="fwd+bwd"),
            ["passes", "'fwd+bwd'", "'fwd', 'bwd'"],
        ),
        (
            lambda p: io.tiles_visited("fa1", p, Tiles(1, 1), passes="back"),
            ["passes", "'back'", "'fwd', 'bwd'"],
        ),
        (lambda p: io.fa1(p, Tiles(1, 1), query_splits=0), ["query_splits", "0", ">= 1"]),
        (lambda p: io.fa1_paper(p, 0), ["Bc", "0", ">= 1"]),
        (lambda p: io.theta_flash(p, 0), ["M", "0", "> 0"]),
        (lambda p: io.saha_ye(p, math.inf), ["M", "inf", "finite"]),
        (lambda p: io.saha_ye(p, math.nan), ["M", "nan", "finite"]),
    ],
)
def test_bad_arguments_are_named(call, says):
    with pytest.raises(ValueError) as e:
        call(square(4, 4))
    assert str(e.value).startswith(says[0])
    assert all(part in str(e.value) for part in says)
