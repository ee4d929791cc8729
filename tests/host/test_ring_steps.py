"""What the ranks of a ring compute in which order, what they sum, keep and say to each other.

No kernel runs: attention and sums are replaced by functions that take down what they are given.
"""

import itertools
import sys
from types import ModuleType, SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from stand_in_device import no_gpu_but_its_driver, on_gpu
from stand_in_distributed import ranks_of
from stand_in_torch import Tensor, fa_numba_torch, no_torch_but_its_names

from fa_numba import device as devices
from fa_numba.ring import agreement, passes, visible
from fa_numba.ring import call as ring_call
from fa_numba.ring.link import Link
from fa_numba.ring.parts import Kind, Part, Sum


@pytest.fixture
def torch():
    with (
        no_gpu_but_its_driver() as gpu,
        no_torch_but_its_names(gpu) as found,
        devices.using("emulator"),
        mock.patch.dict(ring_call._known, clear=True),
        mock.patch.dict(agreement._hosts, clear=True),
    ):
        yield found


# --- windows ---------------------------------------------------------------------------------


def test_a_side_of_a_window_hides_something():
    """A window that hides nothing would choose a slower kernel."""
    chunks = [(0, 1), (0, 3), (2, 4), (3, 6)]
    sides = (None, 0, 1, 2, 4)
    for rows, columns, diagonal in itertools.product(chunks, chunks, (-2, 0, 1)):
        for left, right in itertools.product(sides, sides):
            found = visible.visible(rows, columns, diagonal, left, right)
            if found is None:
                continue
            (a, b), (c, d), causal, (before, after) = found
            i, j = np.arange(a - b + 1, 1)[:, None], np.arange(c - d + 1, 1)
            assert before == -1 or (j < i - before).any()
            assert after == -1 or (j > i + after).any()
            assert not causal or (j > i).any()


def test_rows_that_are_valid_are_some():
    mask = visible.mask_of((-1, -1), (4, 0, 7), None, causal=False, batch=3, rows=12, columns=12)
    course = visible.Course(mask, 3, 3, 4, 4, False, "kv")
    found = [list(course.valid(rank)) for rank in range(3)]
    assert found == [[((0, 1), (0, 4)), ((2, 3), (0, 4))], [((2, 3), (0, 3))], []]


# --- sums ------------------------------------------------------------------------------------


HEADS = 4


class Steps:
    """What rank 0 does in a pass; nothing is computed.

    ``sums`` has (rows or columns, whether in float32, parts) of each sum, where a part is "own" or
    that of a "stop". ``own`` has the number of K/V heads of each call for the rank's own rows and
    columns, and ``early`` how many of these calls came before the ranks agreed. ``empty`` says how
    often memory was taken without being filled.
    """

    def __init__(self, torch, ranks, travels, backward, first=False, mask=None):
        self.torch, self.of_stops, self.sums, self.own, self.early = torch, {}, [], [], 0
        self.given, self.empty, steps, whole = (travels, backward, first, mask), 0, self, Kind.part

        class Summed(Sum):
            def __init__(self, *facts):
                super().__init__(*facts)
                self.parts = []
                if steps.rank == 0 and self.kind.like:
                    name = "rows" if len(self.kind.like) == 1 else "columns"
                    steps.sums.append((name, self.wide, self.parts))

            def take(self, more, rows, entries=None):
                self.parts.append("stop" if id(more) in steps.of_stops else "own")
                self.found = self.whole()

        def part(kind, span, wide, empty=False):
            steps.empty += empty and steps.rank == 0
            return whole(kind, span, wide, empty)

        with (
            mock.patch.object(passes, "Sum", Summed),
            mock.patch.object(Kind, "part", part),
            ranks_of(torch, ranks) as distributed,
        ):
            for each in distributed.run(self.work):
                assert each is None, each

    @property
    def rank(self):
        return self.torch.distributed.get_rank()

    def work(self, rank):
        travels, backward, first, mask = self.given
        q, k, v = (Tensor.of(np.full((1, HEADS, 4, 8), rank, np.float16)) for _ in "qkv")
        kinds = Kind("bhnd", (q,)), Kind("bhnd", (k, v) if backward else ())

        def call(piece, of_heads, of_q, of_kv):
            own = of_kv[0].values.flat[0] == of_q[0].values.flat[0]
            made = Part([of_q[0]]), Part([*of_kv] if backward else [])
            if not own:
                self.of_stops |= {id(x): x for x in made}
            elif rank == 0:
                self.own.append(of_heads.count if of_heads else HEADS)
            return made

        def wait():
            if rank == 0:
                self.early = len(self.own)

        how = passes.Ring(Link(None), travels, bool(mask), "bhnd", {}, {}, {}, mask)
        agreed = None if backward else SimpleNamespace(wait=wait)
        start = kinds[0].part((0, 4), True) if first else None
        passes._around(how, (q,), (k, v), call, kinds, agreed, start)


def test_sums_of_more_than_two_parts_are_in_float32(torch):
    """And in the order in which their memory is free soonest; two parts in one order, own first."""
    own, stop = ["own"], ["stop"]
    for ranks, first, wide, parts in (
        *((1, False, False, own), (2, False, False, own + stop)),
        *((3, False, True, own + 2 * stop), (2, True, True, own + own + stop)),
    ):
        steps = Steps(torch, ranks, "kv", False, first=first)
        assert steps.sums[0] == ("rows", wide, parts), (ranks, first)
    # Results that are sent: the rank's own, and one message that is a sum in its turn.
    for travels, (stay, go) in (("kv", ("rows", "columns")), ("q", ("columns", "rows"))):
        two, three = (Steps(torch, n, travels, True) for n in (2, 3))
        assert two.sums == [
            (stay, False, own + stop), (go, False, own + own), (go, False, stop),
        ]  # fmt: skip
        assert three.sums == [
            (stay, True, 2 * stop + own), (go, False, own + own),
            (go, False, stop), (go, True, stop + own),
        ]  # fmt: skip
        assert (two.empty, three.empty) == (1, 2)  # messages are received into such memory
    (sums,) = [x for x in Steps(torch, 2, "q", False, first=True).sums if "stop" not in x[2]]
    assert sums == ("rows", True, 3 * own)
    mask = visible.mask_of((1, -1), None, None, causal=True, batch=1, rows=8, columns=8)
    sums = Steps(torch, 2, "kv", True, mask=mask).sums
    assert sums[1] == ("columns", True, 3 * own)  # two chunks, and a message


def test_heads_that_are_computed_while_ranks_wait(torch):
    """A forward pass begins before the ranks have agreed; where results are sent, some heads are
    computed meanwhile.
    """
    for travels, backward, own, early in (
        *(("kv", False, [2, 2], 1), ("q", False, [1, 1, 2], 1)),
        *(("kv", True, [2, 2], 0), ("q", True, [2, 2], 0)),
    ):
        steps = Steps(torch, 2, travels, backward)
        assert (steps.own, steps.early) == (own, early), (travels, backward)


def test_shares_of_heads_take_as_long_as_ranks_need_to_agree():
    """``passes.EARLY`` operations, but at most a part of the heads, and none of a long call."""

    def shares(early, last, calls=4, heads=8, causal=False, ranks=2, mask=None):
        q = SimpleNamespace(numel=lambda: int(calls * passes.EARLY) // 8)
        k, link = SimpleNamespace(shape=(1, heads, 2, 8)), SimpleNamespace(ranks=ranks)
        of = SimpleNamespace(axis=2, causal=causal, link=link, mask=mask)
        found = passes._shares(of, q, k, early, last)
        return [[x and (x.first, x.count, x.of) for x in each] for each in found]

    every = [[], [None], []]
    assert shares(True, True) == [[(0, 2, 8)], [(2, 3, 8)], [(5, 3, 8)]]
    assert shares(True, False) == [[(0, 2, 8)], [(2, 6, 8)], []]
    assert shares(False, True) == [[], [(0, 4, 8)], [(4, 4, 8)]]
    assert shares(False, False) == every
    assert shares(True, False, causal=True) == [[(0, 4, 8)], [(4, 4, 8)], []]
    assert shares(True, False, calls=0.5) == [[(0, 4, 8)], [(4, 4, 8)], []]
    assert shares(True, True, calls=0.5) == [[(0, 2, 8)], [(2, 3, 8)], [(5, 3, 8)]]
    assert shares(True, False, calls=3) == [[(0, 3, 8)], [(3, 5, 8)], []]
    assert shares(True, False, calls=15) == [[(0, 1, 8)], [(1, 7, 8)], []]
    for none in ({"calls": passes.LONG}, {"calls": 0}):
        assert shares(True, False, **none) == every
    for none in ({"ranks": 1}, {"heads": 1}, {"mask": "a mask"}):
        assert shares(True, True, **none) == every


# --- calls -----------------------------------------------------------------------------------


def test_what_a_ring_is_told(torch):
    """L has a gradient where it is returned and somebody learns; options that are None are left
    out.
    """
    ft, told = fa_numba_torch(), []

    def forward(ring, q, *_):
        told.append(ring)
        return q, q

    def work(rank):
        q, k, v = (Tensor.of(np.ones((1, 1, 4, 8), np.float32), requires_grad=True) for _ in "qkv")
        for torch.grad, lse in itertools.product((False, True), repeat=2):
            ft.ring_attention(q, k, v, return_lse=lse, scale=0.5)

    with ranks_of(torch, 1) as distributed, mock.patch.object(passes, "forward", forward):
        assert distributed.run(work) == [None]
    assert [x.dlse for x in told] == [False, False, False, True]
    assert told[0].options == {"scale": 0.5, "algorithm": "fa2", "layout": "bhnd"}


def test_a_known_call_on_a_gpu_is_not_planned_again(torch):
    ft, found = fa_numba_torch(), []
    x = np.ones((1, 1, 4, 8), np.float32)

    def work(rank):
        for tensor in (Tensor.of(x), Tensor.of(on_gpu(x).values)):
            torch.distributed.backend = "nccl" if tensor.is_cuda else "gloo"
            with devices.using("gpu" if tensor.is_cuda else "emulator"):
                for _ in range(2):
                    ft.ring_attention(tensor, tensor, tensor)
                    found.append(planned.call_count)
        assert [*torch.distributed.beside] == [torch.distributed.group.WORLD]

    with (
        mock.patch.object(passes, "forward", lambda ring, q, *_: (q, q)),
        mock.patch.object(ring_call, "_check_plans", wraps=ring_call._check_plans) as planned,
        ranks_of(torch, 1) as distributed,
    ):
        assert distributed.run(work) == [None]
    assert found == [1, 2, 3, 3]


def test_facts_of_tensors_are_told_apart(torch):
    x = Tensor.of(np.ones((1, 1, 4, 8), np.float32))
    places = [SimpleNamespace(type=t, index=n) for t in ("cpu", "cuda") for n in (None, 0, 1)]
    found = set()
    for x.device in places:
        found.add(ring_call._facts(x))
    assert len(found) == len(places)


def test_lengths_are_read_as_tuples(torch):
    """What are no lengths is left as it is, for the check that refuses it."""
    for given, wanted in (
        *(([1, 2], tuple), (np.array([1, 2]), tuple), (None, type(None))),
        *(([[1], [2]], np.ndarray), ([1.0, 2.0], np.ndarray), (np.array(1), np.ndarray)),
    ):
        read = ring_call._read({"window": (3, 4), "q_lens": given, "kv_lens": None})
        assert type(read["q_lens"]) is wanted and read["kv_lens"] is None


def test_a_group_of_gpus_agrees_in_a_group_of_hosts(torch):
    """Made once for each group, of the same ranks."""
    with ranks_of(torch, 1, backend="nccl") as dist:
        for group, key in ((None, dist.group.WORLD), ("another", "another")):
            made = agreement._on_host(dist, group)
            assert made == agreement._on_host(dist, group) == dist.beside[key]
        assert len(dist.beside) == 2
        assert agreement._on_host(dist, made) == made

    def work(rank):
        agreement.Agreement(None, agreement.Meant({"causal": rank})).wait()

    with ranks_of(torch, 2, backend="nccl") as dist:
        errors = dist.run(work)
    says = "causal must be equal on all ranks of the group, got 0 on rank 0, 1 on rank 1"
    assert [str(x) for x in errors] == [says, says]


def test_a_torch_without_groups_is_said_to_be(torch):
    torch.distributed = SimpleNamespace(is_available=lambda: False)
    x = Tensor.of(np.ones((1, 1, 4, 8), np.float32))
    with pytest.raises(ValueError, match="process group of torch.distributed, which is not init"):
        fa_numba_torch().ring_attention(x, x, x)
    del torch.distributed


# --- fa_numba.torch --------------------------------------------------------------------------


def test_torchs_compiler_is_asked_once_and_only_where_it_is_imported(torch):
    ft, asked = fa_numba_torch(), []
    torch.compiler.disable = lambda function: asked.append(function) or (lambda *_: "untraced")
    plain = ft._untraced(lambda x: x)
    assert plain(1) == 1 and not asked
    with mock.patch.dict(sys.modules, {"torch._dynamo": ModuleType("torch._dynamo")}):
        assert [plain(1), plain(1)] == ["untraced"] * 2 and len(asked) == 1


def test_zeros_for_a_gradient_of_l_are_made_where_others_may_have_one(torch):
    ft, given = fa_numba_torch(), []

    def backward(ring, dO, q, k, v, O, L, dL, sinks):
        given.append(dL)
        return q, k, v

    x = Tensor.of(np.ones((1, 1, 4, 8), np.float32))
    with mock.patch.object(passes, "backward", backward):
        for dlse, travels in itertools.product((False, True), ("kv", "q")):
            made = SimpleNamespace(dlse=dlse, travels=travels)
            context = SimpleNamespace(ring=made, needs_input_grad=(True,) * 3 + (False,) * 3)
            context.saved_tensors = (x,) * 5 + (None,)
            ft._RingAttention.backward(context, x, None)
    assert [dL is None for dL in given] == [True, True, True, False]
