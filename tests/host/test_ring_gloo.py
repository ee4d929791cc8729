"""A sequence over processes, by torch.distributed as it is: gloo, and the emulator in each."""

import datetime
import itertools
import os
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
if not dist.is_available():
    pytest.skip("torch has no distributed", allow_module_level=True)


def entered(rank, ranks, store, timeout=120.0):
    """This process as a rank of a group; gives ``fa_numba.torch``."""
    import fa_numba.torch

    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=timeout)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=limit
    )
    return fa_numba.torch


def spawned(work, ranks, *arguments):
    """``work(rank, ranks, *arguments)`` in as many processes; one's failure is ours."""
    from torch import multiprocessing

    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).parents[1]), str(Path(__file__).parent), before]
    )
    try:
        multiprocessing.spawn(work, (ranks, *arguments), nprocs=ranks)
    finally:
        os.environ["PYTHONPATH"] = before


def both_passes(rank, ranks, store):
    import fa_numba
    from fa_numba.ring import count_link

    ft = entered(rank, ranks, store)
    dtypes = ("float32", "bfloat16") if ranks == 2 else ("float32",)
    plain = itertools.product(("kv", "q"), (False, True), dtypes, [{}])
    lens = {"kv_lens": torch.tensor([4 * ranks - 1])}
    hidden = [
        ("kv", False, "float32", {"window": (4, 1)}),
        ("q", True, "float32", {"window": (3, -1), **lens}),
    ]
    learnt = [(travels, True, "float32", {"sinks": True}) for travels in ("kv", "q")]
    for travels, causal, dtype, options in (*plain, *hidden, *learnt):
        torch.manual_seed(3)
        Nq, Nk = (4, 4) if causal else (3, 5)
        shapes = [(1, 2, ranks * Nq, 8), *2 * [(1, 1, ranks * Nk, 8)], (1, 2, ranks * Nq, 8)]
        whole = [torch.randn(shape).to(getattr(torch, dtype)) for shape in shapes]

        def mine(x, causal=causal):
            return ft.ring_split(x, rank, ranks, causal=causal)

        q, k, v = (mine(x).requires_grad_() for x in whole[:3])
        options, dlse, here, there = dict(options), None, None, None
        if "sinks" in options:  # and a loss of L
            dlse = torch.randn(shapes[0][:3])
            here, there = (torch.tensor([0.5, -1.0], requires_grad=True) for _ in range(2))
            options["sinks"] = here
        with count_link() as moved:
            out, lse = ft.ring_attention(
                q, k, v, travels=travels, causal=causal, return_lse=True, **options
            )
            of_lse = (
                None if dlse is None else ft.ring_split(dlse, rank, ranks, causal=causal, dim=2)
            )
            torch.autograd.backward(
                (out, lse)[: 1 + (dlse is not None)],
                (mine(whole[3]), of_lse)[: 1 + (dlse is not None)],
            )
        one = [x.clone().requires_grad_() for x in whole[:3]]
        if there is not None:
            options["sinks"] = there
        want, want_lse = ft.attention(*one, causal=causal, return_lse=True, **options)
        torch.autograd.backward(
            (want, want_lse)[: 1 + (dlse is not None)], (whole[3], dlse)[: 1 + (dlse is not None)]
        )
        if there is not None:  # a rank has what its rows are of it
            dist.all_reduce(here.grad)
            assert torch.allclose(here.grad, there.grad, rtol=1e-5, atol=1e-5)
        rounding = 2.0**-7 if dtype == "bfloat16" else 2.0**-20
        pairs = [(out, want), *zip((q.grad, k.grad, v.grad), (x.grad for x in one), strict=True)]
        for got, right in pairs:
            right = mine(right.detach())
            assert (got - right).norm() <= 2 * rounding * right.norm()
        right = ft.ring_split(want_lse, rank, ranks, causal=causal, dim=2)
        assert torch.allclose(lse, right, rtol=0, atol=1e-5)
        given = {"dtype": dtype, "causal": causal, "window": options.get("window")}
        part = fa_numba.problem.Problem(1, 2, 1, Nq, Nk, 8, **given)
        lengths = {name: x.tolist() for name, x in options.items() if name == "kv_lens"}
        model = [
            fa_numba.io_model.ring(
                part, ranks, rank, travels=travels, passes=each, dlse=each == "bwd", **lengths
            )
            for each in ("fwd", "bwd")
        ]
        assert moved.sent == sum(x.sent for x in model)
        assert moved.received == sum(x.received for x in model)
        parts = [torch.empty_like(out) for _ in range(ranks)]
        dist.all_gather(parts, out.detach())
        joined = ft.ring_join(parts, causal=causal)
        assert (joined - want).norm() <= 2 * rounding * want.norm()
    x = torch.ones(1, 1, 4 + 2 * (rank == 1), 8)
    with pytest.raises(
        ValueError, match="q must be equal on all ranks of the group, got .* on rank 0.*on rank 1"
    ):
        ft.ring_attention(x, x, x, causal=True)
    dist.barrier()
    dist.destroy_process_group()


SLOW = [pytest.param(n, marks=pytest.mark.slow) for n in (3, 4)]


@pytest.mark.parametrize("ranks", [2, *SLOW])
def test_both_passes_are_those_of_one_process(ranks, tmp_path):
    spawned(both_passes, ranks, str(tmp_path / "store"))


def one_is_late(rank, ranks, store):
    ft = entered(rank, ranks, store, timeout=3.0)
    if rank == 0:
        x = torch.ones(1, 1, 4, 8)
        with pytest.raises(
            RuntimeError, match="rank 0 of 2: not all ranks of the group have called"
        ):
            ft.ring_attention(x, x, x)
        dist.destroy_process_group()  # else its threads may end this process by an abort


def test_a_rank_that_ends_is_an_error_on_the_others(tmp_path):
    spawned(one_is_late, 2, str(tmp_path / "store"))
