"""Prove by random calls that a planted fault changes no result.

A proof plants a fault of `survivors.csv` and runs random calls of the library with it. Each call
must return the bits that it returns without the fault. Counts of accesses and traces must be equal
too, unless the reason in the file begins with "only": a proof then records what differs.

`Probe` plants the fault so that the changed code reports two facts about each call: whether the
call runs the changed code, and whether the changed value differs there from the right one. Only
calls that run the changed code count. A proof looks for calls in which the value differs, because
other calls say little.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import hashlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import fresh_memory
import helpers
import mutants
import numpy as np
import random_calls
import stand_in_torch
from backward_helpers import (
    ALL_WAYS,
    asks_for_dbias,
    asks_for_dcaptured,
    saved_for,
    with_dlse,
)
from helpers import numpy_dtype
from options_helpers import inputs
from stand_in_device import no_calls_kept, no_gpu_but_its_driver, on_gpu
from stand_in_distributed import ranks_of
from stand_in_torch import Tensor, fa_numba_torch, no_torch_but_its_names
from test_pages import cache_of
from test_prefix import LIES, call_of
from test_ring import pieces

import fa_numba
from fa_numba import Tiles, emulator, ring
from fa_numba import device as devices
from fa_numba.choices import units
from fa_numba.choices.tiles import LARGEST_ATOMIC as LARGEST
from fa_numba.emulator import rebind
from fa_numba.emulator.context import running
from fa_numba.host import placement, planning
from fa_numba.tiling.wgmma_variants import default_wgmma_backward_tiles

# --- random calls ------------------------------------------------------------------------------

UNITS = ("simt", "mma", "wgmma")
KINDS = (*UNITS, "ring")
# Small tiles of each unit, so that few rows and columns have several tiles.
ROWS = {"simt": (4, 8, 16, 24), "mma": (16, 32, 64), "wgmma": (64, 64, 128)}
COLUMNS = {"simt": (8, 16, 32, 64), "mma": (16, 32, 64, 80), "wgmma": (64, 80, 128)}
LENGTHS = {
    "simt": (1, 2, 5, 8, 13, 16, 17, 24, 33, 40),
    "mma": (1, 2, 5, 16, 17, 32, 33, 48, 64, 65, 70),
    "wgmma": (1, 2, 17, 64, 65, 100, 128, 129, 192, 256, 257),
}
HEAD_DIMS = {
    "simt": (4, 5, 8, 24, 32, 40, 64, 136),
    "mma": (8, 24, 33, 40, 64, 72, 136),
    "wgmma": (64, 64, 72, 128, 136, 256),
}
TORCH, COLLECTIVE = "fa_numba.torch", "fa_numba.ring.agreement"
PAGES = (16, 32, 48, 64)
OTHER_CALLS = ("softmax", "append_kv", "merge", "prefix")


@dataclass(eq=False)
class Call:
    """A call with arrays: `run` returns what it computes, or raises its error."""

    number: int
    unit: str
    title: str
    function: Callable[[], Any]
    outcome: Any = None
    record: Any = None
    of_gpu: bool = False
    chunks: bool = False  # column tiles of a head go in chunks of two, as of many heads

    def run(self, traced: bool = False) -> Outcome:
        """Return the results, the counts and, if `traced`, the accesses in their order."""
        fresh_memory.begin(self.title)
        with contextlib.ExitStack() as stack:
            stack.enter_context(np.errstate(all="ignore"))
            if not self.of_gpu:
                stack.enter_context(devices.using("emulator"))
                stack.enter_context(mock.patch.object(np, "empty", helpers._filled))
            if self.chunks:
                stack.enter_context(mock.patch.object(units, "chunk_tiles", _chunks_of_two))
            uncached = getattr(planning.planned, "__wrapped__", planning.planned)
            stack.enter_context(mock.patch.object(planning, "planned", uncached))
            counts, accesses = emulator.Counts(), []
            if not self.of_gpu:  # counts are the emulator's
                accesses = stack.enter_context(emulator.trace()) if traced else ()
                counts = stack.enter_context(fa_numba.count_accesses())
            found = self.function()
        return Outcome.of(found, counts, accesses)

    def before(self, traced: bool) -> Outcome:
        """Return the outcome without a fault, which is computed once."""
        if self.outcome is None:
            self.outcome = {}
        if traced not in self.outcome:
            self.outcome[traced] = self.run(traced)
        return self.outcome[traced]


@dataclass(frozen=True)
class Outcome:
    """What a call returns, and what its launches did to memory."""

    results: tuple
    facts: dict[str, Any] = field(compare=False)

    @classmethod
    def of(cls, results: Any, counts: Any, accesses: Any) -> Outcome:
        moved = [sorted(getattr(counts, n).items()) for n in ("loads", "stores")]
        each = [sorted(getattr(counts, n).items()) for n in ("load_bytes", "store_bytes")]
        traffic: dict[tuple, Any] = {}
        for access, found in counts.traffic.items():
            key = access.kernel, access.array, access.space, access.kind
            traffic[key] = traffic[key] + found if key in traffic else found
        shared = {k: x for k, x in traffic.items() if k[2] == "shared"}
        facts = {
            "accesses": moved,
            "bytes": each,
            "sectors": {k: x for k, x in traffic.items() if k[2] == "global"},
            "shared memory": shared,
            "instructions": sorted(counts.instructions.items()),
        }
        order = [replace(x, line="", place="", step=0) for x in accesses]
        facts["order of accesses"] = hashlib.sha1(repr(order).encode()).hexdigest()
        return cls(tuple(_bits(results)), facts)

    def close_to(self, other: Outcome) -> bool:
        """Whether all results are those of `other` up to a few roundings."""
        if len(self.results) != len(other.results):
            return False
        # Results in float32 may follow from others that are rounded to 16 bits.
        coarse = max((_STEPS.get(x[0], 0.0) for x in self.results if len(x) == 3), default=0.0)
        pairs = zip(self.results, other.results, strict=True)
        return all(_close(a, b, 16 * coarse) for a, b in pairs)

    def differences(self, other: Outcome) -> set[str]:
        """Return the names of the facts that differ."""
        return {name for name, x in self.facts.items() if x != other.facts[name]}


# The distance of 1 from the next number, by the dtypes that `_bits` yields.
_STEPS = {"<f4": 2.0**-23, "<f2": 2.0**-10, "<V2": 2.0**-7, "|V2": 2.0**-7}


def _close(a: tuple, b: tuple, step: float) -> bool:
    """Whether two arrays, as `_bits` yields them, differ by `step` times the largest element."""
    if a == b or a[:2] != b[:2] or len(a) < 3:
        return a == b
    x, y = (np.frombuffer(each[2], each[0]) for each in (a, b))
    if x.dtype == "V2":  # bfloat16
        x, y = ((each.view(np.uint16).astype(np.uint32) << 16).view(np.float32) for each in (x, y))
    elif x.dtype.kind != "f":
        return False
    finite = np.isfinite(x)
    x, y = x.astype(np.float64), y.astype(np.float64)
    same = (x == y) | (np.isnan(x) & np.isnan(y))
    largest = np.abs(x[finite]).max(initial=0.0)
    with np.errstate(invalid="ignore"):
        return bool((same | (np.abs(x - y) <= step * largest)).all())


def _bits(results: Any) -> Iterator[tuple]:
    """Yield dtype, shape and bytes of every array of a result."""
    if isinstance(results, dict):
        results = [results[name] for name in sorted(results)]
    if isinstance(results, (tuple, list)):
        for each in results:
            yield from _bits(each)
    elif results is None or isinstance(results, (str, int, float)):
        yield (results,)
    else:
        values = np.asarray(getattr(results, "values", results))
        yield values.dtype.str, values.shape, np.ascontiguousarray(values).tobytes()


_chunk_tiles = units.chunk_tiles


def _chunks_of_two(request: Any, Bc: int) -> int:
    """Return 2 where `chunk_tiles` may return it for more heads or columns."""
    p = request.problem
    unequal = p.causal or (p.sparse and p.largest_dim <= 64)
    return 2 if unequal and request.choices.algorithm != "fa1" else _chunk_tiles(request, Bc)


class Refused(Exception):
    """The drawn options do not go together."""


@functools.cache
def drawn(number: int, unit: str) -> Call | None:
    """Return random call `number` of a unit; None if the library refuses its options."""
    rng = np.random.default_rng([55, KINDS.index(unit), number])
    other = unit != "wgmma" and rng.random() < 0.2
    of_gpu = not other and rng.random() < 0.2
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(np.errstate(all="ignore"))
            stack.enter_context(devices.using("emulator"))
            draw = _other_call if other else _attention_call
            if unit == "ring":
                title, function = _ring_call(rng)
                return Call(number, unit, f"ring {number}: {title}", function, of_gpu=True)
            title, function = draw(rng, unit)
            if of_gpu and not {"score_mod", "mask_mod", "block_mask"} & function.keywords.keys():
                title, function = f"{title}, kept", _on_stand_in(function)
    except (ValueError, TypeError, Refused):
        return None
    of_gpu &= not isinstance(function, functools.partial)
    chunks = unit == "wgmma" and rng.random() < 0.5
    return Call(number, unit, f"{unit} {number}: {title}", function, of_gpu=of_gpu, chunks=chunks)


def _one(rng: np.random.Generator, values: Any) -> Any:
    return values[rng.integers(len(values))]


def _kind(rng: np.random.Generator, unit: str) -> random_calls.Kind:
    """Return a kind of `random_calls`, with this unit and small tiles."""
    kind = random_calls.kind_of(int(rng.integers(2**31)), int(rng.integers(2**31)))
    chosen = dict(kind.chosen) | {"unit": unit}
    dtype = "float32" if unit == "simt" else _one(rng, random_calls.HALVES)
    if unit == "wgmma" and kind.way == "standard":
        kind = replace(kind, way="fa1")
    planes = kind.way == "fa2" or (kind.way, kind.passes) == ("fa1", "fwd")
    if unit != "simt" and planes and rng.random() < 0.25:
        split = random_calls.SPLIT if kind.passes == "fwd" else ("fp16x3", "bf16x3")
        chosen["precision"], dtype = _one(rng, split), "float32"
        few = {"causal", "window", "lengths", "softcap", "dlse"} & set(kind.options)
        kind = replace(kind, options=tuple(sorted(few)), head_dim_v=None)
    else:
        chosen.pop("precision", None)
    if unit != "wgmma":
        chosen.pop("group_splits", None)
    stages = _one(rng, (1, 2)) if (kind.way, kind.passes) == ("fa2", "fwd") else 1
    if unit != "wgmma" or kind.passes == "fwd":
        chosen["tiles"] = Tiles(_one(rng, ROWS[unit]), _one(rng, COLUMNS[unit]), stages=stages)
        if unit == "simt" and rng.random() < 0.3:
            chosen["tiles"] = replace(chosen["tiles"], threads=_one(rng, (32, 64, 128)))
    if (kind.way, unit, kind.passes) == ("fa1", "mma", "fwd") and rng.random() < 0.3:
        chosen["warp_partition"] = "keys"
    if kind.passes == "fwd" and kind.way == "fa2" and rng.random() < 0.5:
        chosen["kv_splits"] = int(rng.integers(1, 4))
    if rng.random() < 0.15:
        chosen["layout"] = "bnhd"
    dims = HEAD_DIMS[unit]
    d, d_v = _one(rng, dims), _one(rng, dims) if kind.head_dim_v else None
    if (unit, kind.passes, kind.way) == ("wgmma", "bwd", "fa1"):
        d, d_v = min(d, 128), None
    if (unit, kind.passes) == ("wgmma", "bwd"):
        chosen.pop("tiles", None)
        if kind.way != "standard":
            largest, algorithm = max(d, d_v or d), ALL_WAYS[kind.way][0]
            adds = algorithm == "fa1" or not ("deterministic" in kind.way or largest > LARGEST)
            planes = 2 if "precision" in chosen else 1
            chosen["tiles"] = default_wgmma_backward_tiles(largest, adds, planes, algorithm)
    if (unit, kind.passes, kind.way) == ("wgmma", "bwd", "fa2") and rng.random() < 0.4:
        chosen["group_splits"] = int(rng.integers(1, 3)) * kind.group  # and blocks that share rows
    options = set(kind.options)
    if rng.random() < 0.3:
        options = {name for name in options if rng.random() < 0.3}
    if (unit, kind.way) == ("wgmma", "fa1"):
        options -= {"packed", "lengths", "bias", "attn_mask"}  # which the unit refuses
    if rng.random() < 0.35 and "tiles" in chosen:
        options = options - {"created"} | {"block_mask"}
    return replace(
        kind, dtype=dtype, head_dim=d, head_dim_v=d_v, chosen=chosen, prefix="",
        options=tuple(sorted(options)),
    )  # fmt: skip


def _attention_call(rng: np.random.Generator, unit: str) -> tuple[str, Callable]:
    kind = _kind(rng, unit)
    lengths = LENGTHS[unit]
    Nq, Nk = (int(_one(rng, lengths)) for _ in range(2))
    if unit == "wgmma" and rng.random() < 0.7:
        Nq = int(_one(rng, (1, 17, 64, 65)))  # few rows: a launch takes less time
    tiles = kind.chosen.get("tiles")
    if tiles is not None and rng.random() < 0.4:  # whole tiles, behind which nothing may be read
        Nq, Nk = tiles.Br * int(rng.integers(1, 3)), tiles.Bc * int(rng.integers(1, 4))
    heads = int(_one(rng, (1, 1, 2, 3)))
    batch = int(_one(rng, (1, 1, 2)))
    group = kind.group
    shape = (batch, group * heads, heads, Nq, Nk, kind.head_dim)
    given = kind.drawn(rng, shape)
    layout = given.pop("layout", "bhnd")
    if "cu_seqlens_q" in given:
        layout = "bhnd"
    arrays, options = inputs(shape, given, d_v=kind.head_dim_v)
    arrays = [x.astype(numpy_dtype(kind.dtype)) for x in arrays]
    backward = kind.passes == "bwd"
    paged = not backward and kind.way == "fa2" and rng.random() < 0.3
    if paged and "cu_seqlens_q" not in options and "created" not in kind.options:
        lens = options.get("kv_lens")
        lens = [Nk] * batch if lens is None else [int(n) for n in lens]
        k, v = (np.nan_to_num(x) for x in arrays[2:4])
        k, v, table = cache_of(k, v, lens, int(_one(rng, PAGES)), more=int(_one(rng, (0, 0, 1))))
        arrays[2:4], options["block_table"], options["kv_lens"] = [k, v], table, np.int32(lens)
    if backward and kind.dlse:
        options = with_dlse(arrays, options)
    algorithm, own = ALL_WAYS[kind.way] if backward else (kind.way, {})
    options = {**options, "algorithm": algorithm, **own}
    saved: tuple = ()
    if backward:
        asks = asks_for_dcaptured(kind.way, *arrays[1:3], options)
        options["return_dcaptured"] = asks and rng.random() < 0.7
        if "sinks" in options:
            options["return_dsinks"] = bool(rng.random() < 0.7)
        if options.get("bias") is not None and unit != "wgmma":
            options["return_dbias"] = asks_for_dbias(kind.way, *arrays[1:3], options["bias"])
        told = {n: x for n, x in options.items() if n not in ("algorithm", "deterministic")}
        saved = saved_for(kind.way, *arrays[1:], **told)
    else:
        options["return_lse"] = True
    if layout == "bnhd":
        arrays = [x.swapaxes(1, 2).copy() for x in arrays]
        options["layout"] = layout
        saved = tuple(x.swapaxes(1, 2).copy() if x.ndim == 4 else x for x in saved)
    shapes = [x.shape for x in arrays[1:]]
    as_plan = {n: getattr(x, "shape", x) if n == "block_table" else x for n, x in options.items()}
    as_plan |= {"dlse": True} if options.get("dlse") is not None else {}
    plan = fa_numba.plan(*shapes, dtype=kind.dtype, passes=kind.passes, **as_plan)
    placement.check_size(plan)
    threads = sum(int(np.prod(k.grid)) * k.threads for k in plan.kernels)
    if threads > 40_000:
        raise Refused
    function = fa_numba.attention_backward if backward else fa_numba.attention
    given_arrays = (*arrays[not saved :], *saved)
    title = f"{kind.passes} {kind.way} {kind.dtype} {shape} {sorted(options)}"
    return title, functools.partial(function, *given_arrays, **options)


def _other_call(rng: np.random.Generator, unit: str) -> tuple[str, Callable]:
    """Return a call of another function, or one with a prefix."""
    name = _one(rng, OTHER_CALLS)
    if name == "softmax":
        elements = int(_one(rng, (1, 31, 32, 33, 256, 257, 512, int(rng.integers(1, 1500)))))
        x = rng.standard_normal((int(rng.integers(1, 5)), elements), np.float32)
        algorithm = _one(rng, ("naive", "safe", "online"))
        return f"softmax {x.shape}", functools.partial(fa_numba.softmax, x, algorithm=algorithm)
    if name == "merge":
        B, H, N = (int(_one(rng, (1, 2, 5))) for _ in range(3))
        dtype = _one(rng, ("float32", "float16"))
        parts, width = int(_one(rng, (2, 2, 3, 5, 9))), int(_one(rng, (3, 4, 8, 20, 64)))
        outputs = [rng.standard_normal((B, H, N, width)).astype(dtype) for _ in range(parts)]
        lses = [rng.standard_normal((B, H, N), np.float32) for _ in range(parts)]
        for x, L in zip(outputs, lses, strict=True):
            L[rng.random(L.shape) < 0.2] = -np.inf
            x[L == -np.inf] = 0
        if rng.random() < 0.5:
            return f"merge {parts}", functools.partial(fa_numba.merge, outputs, lses)
        out, lse = fa_numba.merge(outputs, lses)
        dout = rng.standard_normal(out.shape).astype(dtype)
        given = dout, outputs, lses, out, lse
        return f"merge_backward {parts}", functools.partial(fa_numba.merge_backward, *given)
    if name == "append_kv":
        return _append_call(rng)
    dtype = "float32" if unit == "simt" else "float16"
    shape = tuple(int(_one(rng, x)) for x in ((1, 2, 3), (2, 4), (1, 2), (1, 3, 5), (1, 20, 33)))
    d = int(_one(rng, HEAD_DIMS[unit][:5]))
    lens = rng.integers(0, np.add(shape[3:5], 1), (shape[0], 2))
    lens[0] = shape[3:5]
    lies, options = _one(rng, LIES), {}
    if lies.startswith("packed") or rng.random() < 0.3:
        options["q_lens"] = lens[:, 0].tolist()
    if lies != "bhnd" or rng.random() < 0.5:
        options["kv_lens"] = lens[:, 1].tolist()
    if dtype == "float32" and rng.random() < 0.4:
        options |= {"precision": _one(rng, random_calls.SPLIT), "unit": "mma"}
    facts = dtype, (*shape, d), int(_one(rng, (1, 16, 20, 37))), lies, options
    arrays, prefix, given, _ = call_of(*facts)
    told = {"return_lse": True, **prefix, **given}
    return f"prefix {facts}", functools.partial(fa_numba.flash_attention_2, *arrays, **told)


def _append_call(rng: np.random.Generator) -> tuple[str, Callable]:
    B, H, d = int(_one(rng, (1, 2, 3))), int(_one(rng, (1, 2))), int(_one(rng, (8, 20, 33, 64)))
    n, size = int(_one(rng, (1, 3, 7))), int(_one(rng, PAGES))
    dtype = _one(rng, ("float32", "float16"))
    lens = rng.integers(0, 2 * size - n + 1, B).astype(np.int32)
    new = rng.standard_normal((2, B, H, n, d)).astype(dtype)
    table = rng.permutation(2 * B + 1)[: 2 * B].reshape(B, 2).astype(np.int32)
    pages = rng.standard_normal((2, 2 * B + 1, H, size, d)).astype(dtype)
    told: dict[str, Any] = {}
    if rng.random() < 0.5:
        told["new_lens"] = rng.integers(0, n + 1, B).astype(np.int32)
    if rng.random() < 0.3:
        told["check_table"] = True

    def appended() -> Any:
        made = pages.copy()
        fa_numba.append_kv(*made, *new, table, lens, **told)
        return made

    return f"append_kv {new.shape} {dtype} {sorted(told)}", appended


def _on_stand_in(inner: functools.partial) -> Callable[[], Any]:
    """Return the call on a GPU whose driver is a stand-in, twice: the second is a kept call."""

    def run() -> Any:
        with no_calls_kept(), no_gpu_but_its_driver() as gpu:
            found = []
            for _ in range(2):
                options = {n: _placed(x) for n, x in inner.keywords.items()}
                if options.get("unit") == "simt":
                    options.pop("tiles", None)
                made = inner.func(*(_placed(x) for x in inner.args), **options)
                found += [made, str([x[:2] for x in gpu.launches])]
            return [_fetched(x) for x in found]

    return run


def _ring_call(rng: np.random.Generator) -> tuple[str, Callable]:
    """Return a sequence over several ranks, which are threads, in both passes."""
    ranks, causal = int(_one(rng, (1, 2, 2, 3))), bool(rng.random() < 0.4)
    dtype, layout = _one(rng, ("float32", "float32", "float16")), _one(rng, (None, "bnhd"))
    travels = _one(rng, ring.TRAVELS)
    Nq, Hk, group, B = 6, int(_one(rng, (1, 2, 3))), int(_one(rng, (1, 2))), int(_one(rng, (1, 2)))
    Nk = Nq if causal else int(_one(rng, (5, 6)))
    d_v = int(_one(rng, (8, 8, 4)))
    options: dict[str, Any] = {}
    if rng.random() < 0.5:
        sides = [int(_one(rng, (-1, 0, 3, 8, 11, 17, 40))) for _ in range(2)]
        options["window"] = (sides[0], -1 if causal else sides[1])
    for name, n in (("q_lens", ranks * Nq), ("kv_lens", ranks * Nk)):
        if rng.random() < 0.3:
            options[name] = [int(x) for x in np.minimum(rng.integers(0, n + 4, B), n)]
    if rng.random() < 0.2:
        options["softcap"] = 2.0
    heads = {"q": (group * Hk, Nq, 8), "k": (Hk, Nk, 8), "v": (Hk, Nk, d_v)}
    heads["dout"] = group * Hk, Nq, d_v
    whole = {
        name: rng.standard_normal((B, h, ranks * n, d)).astype(dtype)
        for name, (h, n, d) in heads.items()
    }
    if rng.random() < 0.4:
        whole["dlse"] = rng.standard_normal(whole["q"].shape[:3]).astype(np.float32)
    sinks = np.linspace(-2, 3, group * Hk, dtype=np.float32) if rng.random() < 0.3 else None
    backward, one = rng.random() < 0.8, ranks == 1

    def run() -> Any:
        with (
            no_gpu_but_its_driver() as gpu,
            no_torch_but_its_names(gpu) as torch,
            devices.using("emulator"),
        ):
            ft = fa_numba_torch()

            def part(x: np.ndarray, rank: int) -> np.ndarray:
                x = x.swapaxes(1, 2) if layout and x.ndim == 4 else x
                return pieces(x, rank, ranks, causal, 1 if layout and x.ndim == 4 else 2)

            def work(rank: int) -> Any:
                mine = {
                    n: Tensor.of(part(x, rank), requires_grad=backward and n in "qkv")
                    for n, x in whole.items()
                }
                dout, dlse = mine.pop("dout"), mine.pop("dlse", None)
                told = dict(options)
                if sinks is not None:
                    told["sinks"] = Tensor.of(sinks.copy(), requires_grad=backward)
                    mine["sinks"] = told["sinks"]
                out, lse = ft.ring_attention(
                    mine["q"], mine["k"], mine["v"], travels=travels, causal=causal,
                    layout=layout, return_lse=True, **told,
                )  # fmt: skip
                if not backward:
                    return [out.values, lse.values]
                out.backward(dout, () if dlse is None else [(lse, dlse)])
                return [x.values for x in (out, lse, *(x.grad for x in mine.values()))]

            with ranks_of(torch, ranks) as distributed:
                found = distributed.run(work)
            for each in found:
                if isinstance(each, Exception):
                    raise each
            return [found, str(sorted(distributed.sent))]

    facts = ranks, causal, dtype, layout, travels, one, backward, sorted(options)
    return f"ring {facts}", run


def _placed(x: Any) -> Any:
    if isinstance(x, np.ndarray) and x.dtype.name in ("float32", "float16", "int32"):
        return on_gpu(np.ascontiguousarray(x))
    return x


def _fetched(made: Any) -> Any:
    if isinstance(made, dict):
        return {n: _fetched(x) for n, x in made.items()}
    if isinstance(made, (tuple, list)):
        return [_fetched(x) for x in made]
    return getattr(made, "values", made)


def calls(names: tuple[str, ...] = UNITS, count: int = 400, gpu: bool = False) -> Iterator[Call]:
    """Yield random calls, the units in turn; with `gpu` those on a stand-in too."""
    for number in range(count):
        for unit in names:
            call = drawn(number, unit)
            if call is not None and (gpu or not call.of_gpu):
                yield call


# --- the changed code ----------------------------------------------------------------------------


class Probe:
    """Plants a fault, and learns in which calls it runs and changes a value."""

    NAME = "fa_numba_probe"

    def __init__(self, site: mutants.Site) -> None:
        self.site = site
        self.runs = self.differs = False

    def __call__(self, right: Any, wrong: Any) -> Any:
        """Note a value and the changed value; return the changed value."""
        self.runs = True
        if not self.differs:
            self.differs = _unequal(right, wrong)
        return wrong

    def text(self) -> str:
        """Return the module's text with the fault, where the changed code calls the probe."""
        site = self.site
        if site.rule == "drop" or site.module.startswith(COLLECTIVE):
            new = f"{self.NAME}(True, {site.new})"
        elif isinstance(ast.parse(site.text).body[0], ast.Expr):
            new = f"{self.NAME}({site.text}, {site.new})"
        else:
            new = f"{site.new}; {self.NAME}(True, False)"
        return mutants.changed(site, new)

    @contextlib.contextmanager
    def planted(self) -> Iterator[Probe]:
        """Plant the fault with the probe."""
        if self.site.module == TORCH:
            planted = mock.patch.object(stand_in_torch, "TEXT", self.text())
        else:
            planted = mutants._of_text(self.site.module, self.text())
        with (
            mock.patch.object(builtins, self.NAME, self, create=True),
            mock.patch.dict(rebind._BUILTINS, {self.NAME: self}),
            planted,
        ):
            yield self


def _unequal(right: Any, wrong: Any) -> bool:
    """Whether values differ in a lane that takes part."""
    try:
        if not isinstance(right, np.ndarray) and not isinstance(wrong, np.ndarray):
            return bool(right != wrong)
        differs = np.asarray(right) != np.asarray(wrong)
        if running.contexts:
            active = running.contexts[-1].active()
            if differs.shape[-1:] == active.shape:
                differs = differs & active
        return bool(np.any(differs))
    except Exception:
        return True


@dataclass
class Proof:
    """What random calls say of a fault.

    `reached` calls ran the changed code, in `differed` of them the changed value was another one.
    `facts` are the counts and traces that differ. `rounded`: some results differ by a rounding.
    `noticed` says how a call notices the fault.
    """

    reached: int = 0
    differed: int = 0
    facts: set[str] = field(default_factory=set)
    rounded: bool = False
    noticed: str = ""

    @property
    def holds(self) -> bool:
        """Whether random calls run the changed code, and none notices it."""
        return self.reached > 0 and not self.noticed

    @property
    def kind(self) -> str:
        if self.noticed:
            return "noticed"
        if not self.reached:
            return "not reached"
        if not self.differed:
            return "same value"
        results = "results up to rounding" if self.rounded else "same results"
        if self.facts:
            return f"{results}; other " + ", ".join(sorted(self.facts))
        return f"{results}, counts and traces"


def prove(
    site: mutants.Site, wanted: int = 4, most: int = 6, pool: int = 150, seconds: float = 60
) -> Proof:
    """Return the proof of a fault: calls in which the value differs, `wanted` or as many as are
    found among `most` calls that run the changed code.
    """
    found, probe = Proof(), Probe(site)
    probe.text()  # raises an error of this file here, before a call could be said to notice it
    words = site.module.split(".")
    names = tuple(u for u in UNITS if u in words) or UNITS
    if site.module == TORCH or "ring" in words:
        names = ("ring",)
    on_host = "host" in words or "choices" in words
    end = time.process_time() + seconds
    for call in calls(names, pool, gpu=on_host or names == ("ring",)):
        if found.differed >= wanted or found.reached >= most or time.process_time() > end:
            break
        if names == ("ring",):
            call.record = {}
        elif call.record is None:
            with devices.using("emulator"):
                call.record = mutants.reached(call.run)
        if names != ("ring",) and not mutants.reaches(site, call.record):
            continue
        traced = found.differed < 1
        try:
            before = call.before(traced)
        except Exception as error:
            call.record = {}
            print(f"  wrong without a fault: {call.title}: {type(error).__name__} {error}"[:300])
            continue
        probe.runs = probe.differs = False
        try:
            with probe.planted(), mutants.at_most(20):
                after = call.run(traced)
        except (Exception, mutants.TookTooLong) as error:
            found.noticed = f"{type(error).__name__} in {call.title}"
            return found
        if not probe.runs:
            continue
        found.reached += 1
        found.differed += probe.differs
        if after.results != before.results:
            found.rounded = found.rounded or after.close_to(before)
            if not after.close_to(before):
                found.noticed = f"results of {call.title}"
                return found
        if probe.differs:
            found.facts |= after.differences(before)
    return found
