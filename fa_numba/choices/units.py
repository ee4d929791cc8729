"""What computes: one entry for each unit, with all that a plan asks of it."""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
from types import ModuleType
from typing import Any

from fa_numba import device
from fa_numba.dtypes import DTYPES
from fa_numba.choices.few_rows import heads_in_tiles, heads_share_tiles, suits_few_rows
from fa_numba.choices.requests import Request
from fa_numba.kernels import mma, simt, wgmma
from fa_numba.options import PLAIN, Features
from fa_numba.problem import MAX_HEAD_DIM
from fa_numba.choices.tiles import (
    SHORT,
    chunk_tiles,
    default_backward_tiles,
    default_mma_backward_tiles,
    default_mma_standard_tiles,
    default_mma_tiles,
    default_tiles,
    default_wgmma_fa1_tiles,
    default_wgmma_tiles,
    lacks_together,
    sweep_tiles,
    takes_places,
)
from fa_numba.choices.tuned import tuned_tiles
from fa_numba.tiling import (
    MEASURES,
    MOST_STAGES,
    WGMMA_MEASURES,
    MmaSpec,
    MmaSweepSpec,
    SimtBackwardSpec,
    Spec,
    StandardSpec,
    Tiles,
    default_wgmma_backward_tiles,
    select_mma_backward_spec,
    select_mma_spec,
    select_spec,
    select_wgmma_backward_spec,
    select_wgmma_fa1_spec,
    select_wgmma_spec,
    select_wgmma_sweep_spec,
    wgmma_sweep_tiles,
)
from fa_numba.tiling.wgmma import GROUP_ROWS, PANEL
from fa_numba.tiling.wgmma_backward import LARGEST_ATOMIC


class Unit(ABC):
    """A unit of the GPU that computes the products, and its kernels.

    ``capability`` is the least of compute capability, ``newest`` the last that has the unit, if it
    was given up. ``copies_boxes``: its kernels take the matrices by boxes, and a forward block
    several row tiles. ``kernels`` has the modules standard, fa1_forward, fa2_forward,
    standard_backward, fa1_backward and fa2_backward, or some of them, whose factories have one set
    of names. What an algorithm has a choice of, by (algorithm, pass): ``staged`` how many tiles of
    K and V are in memory, ``splits_queries`` how many blocks share a head, ``splits_columns`` how
    many share a row tile, ``splits_keys`` what the warps share; ``measures`` names what its kernels
    can do without, and the algorithms.

    The methods give the tiles of a request, with their threads, and the specialisation of its main
    kernel; they raise ValueError for tiles that cannot be.
    """

    name: str
    title: str
    dtypes: tuple[str, ...]
    capability: tuple[int, int]
    newest: tuple[int, int] | None = None
    kernels: ModuleType
    tuned = False
    copies_boxes = False
    staged: Mapping[tuple[str, str], int] = {}
    splits_queries: frozenset[tuple[str, str]] = frozenset()
    splits_keys: frozenset[tuple[str, str]] = frozenset()
    splits_columns: frozenset[tuple[str, str]] = frozenset()
    measures: Mapping[str, tuple[str, ...]] = {}

    def lacks(self, request: Request) -> str:
        """What this unit cannot do of a request, in words; an empty string if it can do all."""
        return ""

    def suits(self, request: Request) -> bool:
        """Whether "auto" takes it for a request that it can compute."""
        return True

    @abstractmethod
    def forward(self, request: Request) -> tuple[Tiles, Spec]:
        """FlashAttention's forward kernel."""

    @abstractmethod
    def backward(self, request: Request) -> tuple[Tiles, Spec]:
        """FlashAttention's backward kernel."""

    def adds_dq(self, request: Request) -> bool:
        """Whether the blocks of FlashAttention-2's backward pass add to one dQ, in no fixed order;
        else a second sweep makes it.
        """
        return not request.deterministic

    @abstractmethod
    def sweep(self, request: Request, tiles: Tiles, spec: Any) -> tuple[Tiles, Spec]:
        """The second sweep of a deterministic backward pass, whose first has ``tiles``."""

    @abstractmethod
    def standard(self, request: Request) -> tuple[Tiles, Spec]:
        """Standard attention's forward kernels."""

    @abstractmethod
    def standard_backward(self, request: Request) -> tuple[Tiles, Spec, Spec]:
        """Standard attention's backward pass: tiles and specialisation of the kernels that the
        forward pass has too, and the specialisation of the one for PT dO and dST Q.
        """

    @abstractmethod
    def row_facts(self, request: Request) -> tuple:
        """What the factories of kernels that take whole rows (D = rowsum(dO o O), roundings,
        softmax) are given of the unit: nothing, or the dtype and whether rows are aligned.
        """

    def chosen_tiles(
        self, request: Request, select: Callable, default: Callable[[], Tiles], plain: bool = True
    ) -> Tiles:
        """The caller's tiles, those that measured fastest, or ``default()``.

        Measurements are of ``plain`` calls without options: others need more registers.
        """
        if request.tiles is not None:
            return request.tiles
        others = replace(request.features, causal=False, splits=False)
        plain = plain and request.aligned and others == PLAIN
        if not self.tuned or not plain:
            return default()
        p, key = request.problem, (self.name, request.algorithm, request.passes)
        sizes = (p.seqlen_q, p.seqlen_k, p.head_dim)
        return tuned_tiles(request.capability, *key, *sizes, select) or default()


class Simt(Unit):
    """CUDA cores, in float32; every GPU has them."""

    name, title = "simt", "CUDA cores"
    dtypes = tuple(name for name, dtype in DTYPES.items() if dtype.matrix is None)
    capability = (8, 0)
    kernels = simt
    splits_columns = frozenset({("fa2", "fwd")})
    splits_queries = frozenset({("fa1", "fwd"), ("fa1", "bwd")})

    def forward(self, request: Request) -> tuple[Tiles, Spec]:
        return_lse = request.return_lse and request.algorithm == "fa1"
        return self._selected(request, default_tiles, request.algorithm, return_lse=return_lse)

    standard = forward

    def backward(self, request: Request) -> tuple[Tiles, Spec]:
        facts = {"kind": SimtBackwardSpec, "splits_queries": request.query_splits > 1}
        return self._selected(request, default_backward_tiles, **facts)

    def sweep(self, request: Request, tiles: Tiles, spec: Any) -> tuple[Tiles, Spec]:
        return tiles, replace(spec, features=replace(spec.features, dbias=False))

    def standard_backward(self, request: Request) -> tuple[Tiles, Spec, Spec]:
        tiles, across = self.backward(request)
        size = Tiles(tiles.Br, tiles.Bc)  # the forward kernels have a thread count of their own
        facts: dict[str, Any] = {"features": request.features, "aligned": request.aligned}
        spec = select_spec(size, request.problem.head_dim, request.shared_limit, **facts)
        return tiles, spec, across

    def row_facts(self, request: Request) -> tuple:
        return ()

    def _selected(self, request: Request, rule: Callable, *of: str, **facts: Any) -> Any:
        p, limit = request.problem, request.shared_limit
        tiles = request.tiles or rule(*of, p.seqlen_q, p.seqlen_k, p.head_dim, limit)
        facts |= {"features": request.features, "aligned": request.aligned}
        spec = select_spec(tiles, p.head_dim, limit, grouped=p.group > 1, **facts)
        return replace(tiles, threads=spec.threads), spec


class Mma(Unit):
    """Tensor cores by ``mma.sync``, in 16 bits, from compute capability 8.0 on."""

    name, title = "mma", "tensor cores"
    dtypes = tuple(name for name, dtype in DTYPES.items() if dtype.matrix is not None)
    capability = (8, 0)
    kernels = mma
    tuned = True
    staged: Mapping[tuple[str, str], int] = {("fa2", "fwd"): 2}
    splits_columns = frozenset({("fa2", "fwd")})
    splits_queries = frozenset({("fa1", "fwd"), ("fa1", "bwd")})
    splits_keys = frozenset({("fa1", "fwd")})
    measures = MEASURES

    def forward(self, request: Request) -> tuple[Tiles, Spec]:
        p, features = request.problem, request.features
        splits_keys = request.warp_partition == "keys"
        select = _select(request, MmaSpec)
        heads = heads_in_tiles(request)
        sizes = (p.seqlen_q * heads, p.seqlen_k, p.head_dim, request.shared_limit)
        rule = functools.partial(
            default_mma_tiles, request.algorithm, *sizes, features, splits_keys
        )
        tiles = self.chosen_tiles(request, select, rule, plain=not splits_keys and heads == 1)
        if heads > 1 and request.tiles is None:  # registers for two indices a row
            tiles = replace(tiles, threads=2 * tiles.Br)
        heads = math.gcd(heads, tiles.Br)
        facts = {"splits_keys": splits_keys, "ablated": request.ablated, **_flash_facts(request)}
        facts["return_lse"] = request.return_lse and request.algorithm == "fa1"
        facts |= {"tile_heads": heads, "grouped": p.group > heads}
        spec = select(tiles, **facts)
        return replace(tiles, threads=spec.threads), spec

    def backward(self, request: Request) -> tuple[Tiles, Spec]:
        p = request.problem
        row_tiles = 3 if request.algorithm == "fa1" else 2
        sizes: dict[str, Any] = {"head_dim": p.head_dim, "shared_limit": request.shared_limit}
        select: Callable = functools.partial(select_mma_backward_spec, **sizes, row_tiles=row_tiles)
        rule = functools.partial(
            default_mma_backward_tiles, p.seqlen_q, p.seqlen_k, **sizes, row_tiles=row_tiles
        )
        tiles = self.chosen_tiles(request, select, rule)
        facts = {"splits_queries": request.query_splits > 1}
        facts |= {"vector_adds": request.capability >= (9, 0)}
        spec = select(tiles, **facts, **_flash_facts(request))
        return replace(tiles, threads=spec.threads), spec

    def sweep(self, request: Request, tiles: Tiles, spec: Any) -> tuple[Tiles, Spec]:
        p, limit = request.problem, request.shared_limit
        # The blocks of a mask are those of the tiles.
        tiles = replace(tiles, threads=None) if p.sparse else sweep_tiles(p.head_dim, limit)
        facts = _flash_facts(request) | {"features": replace(request.features, dbias=False)}
        return tiles, _select(request, MmaSweepSpec)(tiles, **facts)

    def standard(self, request: Request) -> tuple[Tiles, Spec]:
        p = request.problem
        sizes = (p.seqlen_q, p.seqlen_k, p.head_dim, request.shared_limit)
        select = _select(request, StandardSpec)
        rule = functools.partial(default_mma_standard_tiles, *sizes, request.passes)
        tiles = self.chosen_tiles(request, select, rule)
        spec = select(tiles, **_facts(request))
        return replace(tiles, threads=spec.threads), spec

    def standard_backward(self, request: Request) -> tuple[Tiles, Spec, Spec]:
        tiles, spec = self.standard(request)
        across = Tiles(tiles.Bc, tiles.Br)  # the rows of PT are the columns of P
        return tiles, spec, _select(request, StandardSpec)(across, **_facts(request))

    def row_facts(self, request: Request) -> tuple:
        return request.problem.dtype, request.aligned


_ADDED, _LENGTHS = ("softcap", "bias", "alibi"), ("q_lens", "kv_lens", "packed")


class Wgmma(Unit):
    """Hopper's tensor cores by ``wgmma`` and bulk copies, in 16 bits: compute capability 9.0 alone.

    It has both algorithms.
    """

    name, title = "wgmma", "Hopper's tensor cores"
    dtypes = Mma.dtypes
    capability = newest = (9, 0)
    kernels = wgmma
    tuned = True
    copies_boxes = True
    measures = WGMMA_MEASURES
    staged: Mapping[tuple[str, str], int] = {("fa2", "fwd"): MOST_STAGES}
    splits_columns = frozenset({("fa2", "fwd")})
    splits_queries = frozenset({("fa1", "fwd"), ("fa1", "bwd")})
    # What kernels are compiled for beside plain attention, and where some end at a head dimension.
    features: Mapping[tuple[str, str], tuple[str, ...]] = {
        ("fa1", "fwd"): ("causal", "window", "softcap", "q_lens"),
        ("fa2", "fwd"): ("causal", "window", *_ADDED, *_LENGTHS, "page_size", "splits"),
        ("fa1", "bwd"): ("causal", "window"),
        ("fa2", "bwd"): ("causal", "window", *_ADDED, *_LENGTHS),
    }
    largest: Mapping[tuple[str, str], int] = {("fa1", "bwd"): 128}

    def lacks(self, request: Request) -> str:
        pair = (request.algorithm, request.passes)
        if pair not in self.features:
            direction = "forward" if request.passes == "fwd" else "backward"
            return f"the {direction} pass of {request.algorithm}"
        on = (f.name for f in fields(Features) if getattr(request.features, f.name))
        lacking = [name for name in on if name not in self.features[pair]]
        if lacking:
            return f"the option {lacking[0]}"
        d, largest = request.problem.head_dim, self.largest.get(pair, MAX_HEAD_DIM)
        if d > largest:
            return f"a head dimension of {d}, which is above {largest}"
        if not request.aligned:
            return "arrays whose rows do not start at 16-byte addresses"
        return lacks_together(d, request.features) if request.passes == "bwd" else ""

    def suits(self, request: Request) -> bool:
        """On a GPU, for calls that choose nothing of another unit's, and rows that fill a tile, or
        few that long K and V are brought for: the emulator runs the smaller blocks of ``mma``
        faster. Small heads of one tile are left out, but for forward calls of which the next tiles
        are on their way (``takes_places``); so are, forward, a bias whose rows cannot be read in
        pairs, and one with wide heads, pages or few rows, which was not measured.
        FlashAttention-1 is taken by name alone.
        """
        p, forward = request.problem, request.passes == "fwd"
        one_tile = max(p.seqlen_q, p.seqlen_k) <= 2 * GROUP_ROWS and p.head_dim <= PANEL
        left_out = one_tile and not (forward and takes_places(request.features))
        fills = p.seqlen_q > GROUP_ROWS and not left_out
        if forward and p.bias is not None:
            measured = p.head_dim <= 2 * PANEL and p.page_size is None
            fills = fills and measured and p.bias[-1] % 2 == 0
        elif forward:
            fills = fills or suits_few_rows(request)
        plain = request.tiles is None and not request.ablated and request.query_splits == 1
        plain = plain and request.warp_partition == "rows" and request.algorithm == "fa2"
        return fills and plain and device.planned_for_gpu()

    def forward(self, request: Request) -> tuple[Tiles, Spec]:
        p, facts = request.problem, self._facts(request)
        select: Callable[..., Spec] = select_wgmma_spec
        if request.algorithm == "fa1":
            tiles = request.tiles or default_wgmma_fa1_tiles(p.head_dim, request.features)
            select, facts = select_wgmma_fa1_spec, facts | {"return_lse": request.return_lse}
        else:
            heads = p.group if heads_share_tiles(request) else 1
            facts |= {"tile_heads": heads, "ablated": request.ablated}
            sizes = (p.seqlen_q * heads, p.head_dim)
            rule = functools.partial(
                default_wgmma_tiles,
                *sizes,
                p.causal,
                request.features,
                seqlen_k=p.seqlen_k,
                heads=p.heads_q // heads * p.batch,
                places=request.multiprocessors,
                lens=p.q_lens if p.packed else None,
                window=0 if p.left is None or p.right is None else p.left + p.right + 1,
            )
            facts["shares"] = p.seqlen_q > GROUP_ROWS and takes_places(request.features)
            fits = {"head_dim": p.head_dim, "shared_limit": request.shared_limit}
            chosen = functools.partial(select, **fits)
            tiles = self.chosen_tiles(request, chosen, rule, plain=p.seqlen_q > SHORT)
        spec = select(tiles, p.head_dim, request.shared_limit, **facts)
        return replace(tiles, threads=spec.threads), spec

    @staticmethod
    def _facts(request: Request) -> dict[str, Any]:
        p = request.problem
        facts: dict[str, Any] = {"features": request.features, "dtype": p.dtype}
        return facts | {"positive_scale": p.scale > 0.0, "grouped": p.group > 1}

    def backward(self, request: Request) -> tuple[Tiles, Spec]:
        p, facts = request.problem, self._facts(request)
        facts["atomic"] = self.adds_dq(request) or request.algorithm == "fa1"
        tiles = request.tiles or default_wgmma_backward_tiles(p.head_dim, facts["atomic"])
        facts["row_tiles"] = 3 if request.algorithm == "fa1" else 2
        facts["splits_queries"] = request.query_splits > 1
        if p.causal and request.algorithm == "fa2":
            columns, entries = (p.k_shape[0], 1) if p.packed else (p.seqlen_k, p.batch)
            sizes = (columns, entries * p.heads_k, tiles.Bc, p.head_dim)
            facts["chunk_tiles"] = chunk_tiles(*sizes, slopes=p.alibi)
        spec = select_wgmma_backward_spec(tiles, p.head_dim, request.shared_limit, **facts)
        return replace(tiles, threads=spec.threads), spec

    def adds_dq(self, request: Request) -> bool:
        return super().adds_dq(request) and request.problem.head_dim <= LARGEST_ATOMIC

    def sweep(self, request: Request, tiles: Tiles, spec: Any) -> tuple[Tiles, Spec]:
        d = request.problem.head_dim
        spec = select_wgmma_sweep_spec(d, stages=2, **self._facts(request))
        return replace(wgmma_sweep_tiles(d), threads=spec.threads), spec

    def standard(self, request: Request) -> tuple[Tiles, Spec]:
        raise NotImplementedError(self.lacks(request))

    def standard_backward(self, request: Request) -> tuple[Tiles, Spec, Spec]:
        raise NotImplementedError(self.lacks(request))

    def row_facts(self, request: Request) -> tuple:
        return request.problem.dtype, request.aligned


def _select(request: Request, kind: type[MmaSpec]) -> Callable[..., Any]:
    sizes: dict[str, Any] = {
        "head_dim": request.problem.head_dim,
        "shared_limit": request.shared_limit,
    }
    return functools.partial(select_mma_spec, kind=kind, **sizes)


def _facts(request: Request) -> dict[str, Any]:
    """Fields of every specialisation on tensor cores."""
    facts: dict[str, Any] = {"features": request.features, "aligned": request.aligned}
    return facts | {"dtype": request.problem.dtype}


def _flash_facts(request: Request) -> dict[str, Any]:
    p = request.problem
    return _facts(request) | {"positive_scale": p.scale > 0.0, "grouped": p.group > 1}


# The last one that can compute a request, and suits it, is what "auto" takes.
UNITS: dict[str, Unit] = {unit.name: unit for unit in (Simt(), Mma(), Wgmma())}


def unit_of(name: Any, request: Request) -> Unit:
    """The unit called ``name``, or for "auto" the last that can compute the request, and suits it.

    Raises ValueError for another name, a dtype that the unit does not take, a device without it, or
    a request that it lacks something of.
    """
    allowed = ("auto", *UNITS)
    if not isinstance(name, str) or name not in allowed:
        raise ValueError(f"unit is {name!r}: allowed is one of {', '.join(allowed)}")
    dtype, capability = request.problem.dtype, request.capability
    found = [unit for unit in UNITS.values() if name in ("auto", unit.name)]
    taking = [unit for unit in found if dtype in unit.dtypes]
    if not taking:
        takes = "; ".join(f"{unit.name} takes {' or '.join(unit.dtypes)}" for unit in found)
        raise ValueError(f"unit is {name!r} with dtype {dtype}: {takes}")
    for unit in reversed(taking):
        if unit.capability <= capability <= (unit.newest or capability):
            lacking = unit.lacks(request)
            if name == "auto" and (lacking or not unit.suits(request)):
                continue
            if lacking:
                raise ValueError(f"unit is {name!r}: its kernels lack {lacking}")
            return unit
    unit = taking[0]
    least, here = (".".join(map(str, x)) for x in (unit.capability, capability))
    exactly = " and no other" if unit.newest else ""
    raise ValueError(
        f"unit is {name!r} on a GPU of compute capability {here}: {unit.name} needs {least}"
        f"{exactly}"
    )


def having(choices: Callable[[Unit], Iterable[tuple[str, str]]], passes: bool = False) -> str:
    """Who has a choice, in words: "fa1 on tensor cores ('mma')", with ``passes`` also in which."""
    said = {"fwd": "the forward pass of ", "bwd": "the backward pass of "}
    pairs = (
        (f"{said[pass_] if passes else ''}{algorithm}", f"{unit.title} ({unit.name!r})")
        for unit in UNITS.values()
        for algorithm, pass_ in sorted(choices(unit))
    )
    return " or ".join(dict.fromkeys(f"{who} on {where}" for who, where in pairs))
