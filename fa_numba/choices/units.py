"""The units ("simt", "mma", "wgmma"): one class per unit, with all facts and rules for plans."""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
from types import ModuleType
from typing import Any, NamedTuple

from fa_numba import tiling
from fa_numba.checks import one_of
from fa_numba.choices.copies import BoxCopies, Copies
from fa_numba.choices.facts import measured
from fa_numba.choices.requests import REGISTERED, Request
from fa_numba.choices.tiles import (
    Chosen,
    chunk_tiles,
    hopper_adds_dq,
    hopper_backward_tiles,
    hopper_fa1_tiles,
    hopper_tiles,
    lacks_together,
    mma_tiles,
    simt_tiles,
    takes_slots,
    unspilled,
)
from fa_numba.choices.tuned import tuned_tiles
from fa_numba.dtypes import DTYPES, E4M3, E4M3_CAPABILITY, SCALED_ROWS, UNSCALED
from fa_numba.kernels import mma, simt, wgmma
from fa_numba.options import PLAIN, Features, argument_of
from fa_numba.problem import MAX_HEAD_DIM, MAX_SEQLEN
from fa_numba.tiling import Spec, Tiles
from fa_numba.tiling.wgmma import GROUP_ROWS, PANEL
from fa_numba.tiling.wgmma_variants import LARGEST_ATOMIC

# Number of rows of the lowest tile of unit "mma".
LOW = 16


class Shape(NamedTuple):
    """The tiles and the spec of a kernel, and the reason for the tiles.

    The tiles contain the number of threads.
    """

    tiles: Tiles
    spec: Any
    why: str


class Unit(ABC):
    """A unit of the GPU that multiplies matrices, and its kernels.

    The table lists the attributes. "By kernel" means a mapping with keys (algorithm, pass), or a
    set of such keys.

    attribute         meaning
    name              name of the unit, such as "mma"
    title             name of the unit in plans
    label             name of the unit in figures and tables
    mark              text that follows the name of an algorithm in figures
    looks             colours and markers in figures, by the name of a series without the unit
    on_tensor_cores   whether the unit is compared with the peak speed of tensor cores
    instruction       name of the instruction that multiplies matrices on tensor cores
    emulated_steps    multiply-adds per second that the emulator computes in the slowest case
    dtypes            dtypes of inputs
    capability        lowest compute capability that has the unit
    newest            last compute capability that has the unit; None: all later ones have it
    kernels           package of kernels with the modules standard, fa1_forward, fa2_forward,
                      standard_backward, fa1_backward and fa2_backward, or some of them. Their
                      factories have the same names in every unit
    copies            object that returns grids of launches, and arguments with tensor maps
    staged            by kernel: greatest number of stages of K and V
    splits_queries    by kernel: whether the caller can choose ``query_splits``
    splits_keys       by kernel: whether the caller can choose ``warp_partition``
    precisions        by kernel: values of ``precision`` that split float32 inputs in planes
    splits_columns    by kernel: whether the caller can choose ``kv_splits``
    splits_group      by kernel: largest head dimension for which ``group_splits`` may be above 1
    measures          maps each measure that ``ablate`` can switch off to the names of algorithms

    The methods that return a ``Shape`` raise ValueError for tiles that the kernel cannot have.
    """

    name: str
    title: str
    label: str
    mark = ""
    looks: Mapping[str, tuple[str, str]] = {}
    on_tensor_cores = True
    instruction = ""
    emulated_steps = 4e7
    dtypes: tuple[str, ...]
    capability: tuple[int, int]
    newest: tuple[int, int] | None = None
    kernels: ModuleType
    copies = Copies()
    staged: Mapping[tuple[str, str], int] = {}
    splits_queries = frozenset({("fa1", "fwd"), ("fa1", "bwd")})
    splits_keys: frozenset[tuple[str, str]] = frozenset()
    precisions: Mapping[tuple[str, str], tuple[str, ...]] = {}
    splits_columns = frozenset({("fa2", "fwd")})
    splits_group: Mapping[tuple[str, str], int] = {}
    measures: Mapping[str, tuple[str, ...]] = {}

    def runs_on(self, capability: tuple[int, int]) -> bool:
        """Return whether GPUs of a compute capability have the unit."""
        return self.capability <= capability <= (self.newest or capability)

    def lacks(self, request: Request) -> str:
        """Return text that names what the unit does not support in a request.

        The text is empty if the unit supports the request.
        """
        return ""

    def unsuited(self, request: Request) -> str:
        """Return text with the reason why "auto" does not choose this unit for a request.

        The unit can compute the request. But another unit is faster, or the request was not timed
        on this unit. The text is empty if this unit suits the request.
        """
        return ""

    @abstractmethod
    def forward(self, request: Request) -> Shape:
        """Return the ``Shape`` (tiles, spec and reason) of the forward kernel of FA-1 or FA-2."""

    @abstractmethod
    def backward(self, request: Request) -> Shape:
        """Return the ``Shape`` (tiles, spec and reason) of the backward kernel of FA-1 or FA-2."""

    def column_tiles(self, request: Request) -> tuple[Tiles, int]:
        """Return the tiles of FA-2's backward pass, and the number of column tiles in a chunk.

        The number of group splits is chosen from these two results. The kernel is chosen
        afterwards. Only units with ``splits_group`` implement this method.
        """
        raise NotImplementedError

    def adds_dq(self, request: Request) -> bool:
        """Return whether FA-2's backward kernel adds its parts of dQ to dQ.

        If the result is False, the kernel of ``dq_kernel`` computes dQ.
        """
        return not request.choices.deterministic

    @abstractmethod
    def dq_kernel(self, request: Request, tiles: Tiles, spec: Any) -> tuple[Tiles, Spec]:
        """Return the tiles and the spec of the kernel that computes dQ alone.

        The loop order of this kernel is Q outer. ``tiles`` and ``spec`` are the tiles and the spec
        of the backward kernel, which in such calls computes only dK and dV.
        """

    def standard(self, request: Request) -> Shape:
        """Return the ``Shape`` (tiles, spec and reason) of standard attention's forward kernels."""
        raise NotImplementedError(f"unit {self.name!r} does not support {self.lacks(request)}")

    def standard_backward(self, request: Request) -> tuple[Shape, Spec]:
        """Return what was chosen for the kernels of standard attention's backward pass.

        The first result is the ``Shape`` (tiles, spec and reason) of the kernels that compute S, dP
        and dQ. The forward pass uses these kernels too. The second result is the spec of the kernel
        that computes dV = PT dO and dK = dST Q. The problem of ``request`` has one head dimension
        for Q, K and V.
        """
        raise NotImplementedError(f"unit {self.name!r} does not support {self.lacks(request)}")

    def row_facts(self, request: Request) -> tuple:
        """Return the arguments (dtype, aligned) for the factories of row kernels.

        A row kernel computes row by row: D = rowsum(dO o O), a softmax, or rounding to 16 bits.
        ``aligned`` says whether rows start at 16-byte addresses. The tuple is empty for unit
        "simt", whose factories do not take these arguments.
        """
        return request.problem.dtype, request.aligned

    @property
    def products_per_us(self) -> float:
        """Speed of one multiprocessor: (elements of S) x (head dimension) per microsecond.

        A tile of S counts as Br * Bc * d. Its time includes both matrix products, Q KT and P V. d
        is the head dimension, or the mean of both head dimensions if V has another one. The number
        was measured on a GPU.
        """
        what = "products of an element of S with a head dimension a microsecond"
        return measured(what, self.name)

    def chosen_tiles(
        self, request: Request, select: Callable, rule: Callable[[], Chosen], plain: bool = True
    ) -> Chosen:
        """Return the tiles of a request, and the reason.

        The first case that applies decides:

        case                                     tiles
        the caller chose tiles                   the tiles that the caller chose
        tuned.csv has tiles for the call         the tiles in tuned.csv, the fastest measured ones
        all other cases                          the tiles that ``rule()`` returns

        The second case applies only if ``plain`` is True, rows are aligned, V has the head
        dimension of Q, and the call has no options except a causal mask and key splits. ``select``
        makes a spec from tiles, and raises ValueError for tiles that the kernel does not support.
        """
        if request.choices.tiles is not None:
            return Chosen(request.choices.tiles, "chosen by the caller")
        others = replace(request.features, causal=False, splits=False)
        one = request.problem.head_dim_v is None
        if plain and request.aligned and others == PLAIN and one:
            p, key = request.problem, (self.name, *request.kernel)
            sizes = (p.seqlen_q, p.seqlen_k, p.head_dim)
            found = tuned_tiles(request.capability, *key, *sizes, select)
            if found is not None:
                at = ".".join(map(str, request.capability))
                why = f"the fastest tiles measured on a GPU of compute capability {at} (tuned.csv)"
                return Chosen(found, why)
        return rule()


def _shape(chosen: Chosen[Tiles], select: Callable[[Tiles], Any]) -> Shape:
    """Return the ``Shape`` of a kernel for tiles that were chosen.

    ``select`` makes the spec of the kernel from the tiles.
    """
    spec = select(chosen.value)
    return Shape(replace(chosen.value, threads=spec.threads), spec, chosen.why)


def _by_table(rule: Callable, request: Request, heads: int = 1, *more: Any) -> Callable:
    """Return a function without arguments that calls ``rule`` with the facts of a request.

    ``rule`` is ``simt_tiles`` or ``mma_tiles``, which return the tiles of a kernel. The arguments
    of the call are the algorithm, the pass and the sizes of the request, followed by ``more``.
    ``heads`` is the number of query heads whose rows share a row tile.
    """
    p = request.problem
    sizes = (p.seqlen_q * heads, p.seqlen_k, p.largest_dim, request.shared_limit)
    return functools.partial(rule, *request.kernel, *sizes, *more)


def _selecting(select: Callable, request: Request, **facts: Any) -> Callable:
    """Return a function of tiles that calls ``select`` with the sizes of a request.

    The function passes on the tiles, and adds keyword arguments: the head dimensions of the
    request, the shared memory per thread block of the device, and ``facts``.
    """
    sizes = {"head_dim": request.problem.head_dim, "shared_limit": request.shared_limit}
    if request.problem.head_dim_v is not None:
        sizes["head_dim_v"] = request.problem.head_dim_v
    return functools.partial(select, **sizes, **facts)


class Simt(Unit):
    """CUDA cores, for float32, on every GPU from compute capability 7.5 on.

    Below compute capability 8.0, tiles are copied to shared memory through registers.
    """

    name, title, label = "simt", "CUDA cores", "CUDA cores"
    on_tensor_cores = False
    dtypes = tuple(name for name in UNSCALED if DTYPES[name].matrix is None)
    capability = (7, 5)
    kernels = simt

    def forward(self, request: Request) -> Shape:
        choices = request.choices
        return_lse = choices.return_lse and choices.algorithm == "fa1"
        positive = request.problem.scale > 0.0
        select = functools.partial(
            tiling.select_spec, return_lse=return_lse, positive_scale=positive
        )
        return self._shaped(request, select)

    def standard(self, request: Request) -> Shape:
        return self._shaped(request, tiling.select_spec)

    def backward(self, request: Request) -> Shape:
        splits = request.choices.query_splits > 1
        kind = tiling.SimtBackwardSpec
        select = functools.partial(tiling.select_spec, kind=kind, splits_queries=splits)
        return self._shaped(request, select)

    def dq_kernel(self, request: Request, tiles: Tiles, spec: Any) -> tuple[Tiles, Spec]:
        return tiles, replace(spec, features=spec.features.without_sums)

    def standard_backward(self, request: Request) -> tuple[Shape, Spec]:
        tiles, across, why = self.backward(request)
        size = Tiles(tiles.Br, tiles.Bc)  # the forward kernels have a thread count of their own
        select = _selecting(tiling.select_spec, request)
        spec = select(size, features=request.features, aligned=request.aligned)
        return Shape(tiles, spec, why), across

    def row_facts(self, request: Request) -> tuple:
        return ()

    def _shaped(self, request: Request, select: Callable[..., Any]) -> Shape:
        sized, rule = _selecting(tiling.select_spec, request), _by_table(simt_tiles, request)
        # With fewer keys, columns beyond the last key cost what a wider tile gains.
        least = measured("keys from which the tuned tiles are the fastest")
        long = request.problem.seqlen_k >= least
        complete = functools.partial(
            _selecting(select, request),
            features=request.features,
            aligned=request.aligned,
            grouped=request.problem.group > 1,
        )
        return _shape(self.chosen_tiles(request, sized, rule, plain=long), complete)


class Mma(Unit):
    """Tensor cores by ``mma.sync``, for 16-bit matrices, from compute capability 8.0 on."""

    name, title, label = "mma", "tensor cores", "tensor cores (mma)"
    instruction, emulated_steps = "mma.sync", 1e8
    looks: Mapping[str, tuple[str, str]] = {"fa2-splits": ("#8BC34A", "<")}
    dtypes = tuple(name for name, dtype in DTYPES.items() if dtype.matrix is not None)
    capability = (8, 0)
    kernels = mma
    staged: Mapping[tuple[str, str], int] = {("fa2", "fwd"): 2}
    splits_keys = frozenset({("fa1", "fwd")})
    precisions: Mapping[tuple[str, str], tuple[str, ...]] = dict.fromkeys(
        (("fa1", "fwd"), ("fa2", "fwd"), ("fa2", "bwd")), ("fp16x3", "bf16x6", "bf16x3")
    )
    measures = tiling.MEASURES

    def lacks(self, request: Request) -> str:
        if request.features.page_scales:
            if request.capability < E4M3_CAPABILITY:
                return f"pages of {E4M3.name} on a GPU of compute capability below 8.9"
            if "q_registers" in request.choices.ablate:
                return f"ablate='q_registers' with pages of {E4M3.name}"
        if request.features.scales:
            if request.choices.algorithm != "standard":
                return f"{E4M3.name} arrays in algorithm {request.choices.algorithm!r}"
            if request.capability < E4M3_CAPABILITY:
                return f"{E4M3.name} arrays on a GPU of compute capability below 8.9"
        return ""

    def forward(self, request: Request) -> Shape:
        choices, group = request.choices, request.problem.group
        keys, select = choices.warp_partition == "keys", _select(request, tiling.MmaSpec)
        heads = heads_in_tiles(request)
        rule = _by_table(mma_tiles, request, heads, request.features, keys)
        tiles, why = self.chosen_tiles(request, select, rule, plain=not keys and heads == 1)
        if heads > 1 and choices.tiles is None:  # each row needs registers for two indices
            tiles = replace(tiles, threads=2 * tiles.Br)
        if "prefetch" in choices.ablate:
            tiles = replace(tiles, stages=1)
        heads = math.gcd(heads, tiles.Br)
        complete = functools.partial(
            _of_flash(select, request),
            splits_keys=keys,
            ablated=choices.ablate,
            return_lse=choices.return_lse and choices.algorithm == "fa1",
            tile_heads=heads,
            grouped=group > heads,
        )
        return _shape(Chosen(tiles, why), complete)

    def backward(self, request: Request) -> Shape:
        algorithm = request.choices.algorithm
        select = _selecting(tiling.select_mma_backward_spec, request, algorithm=algorithm)
        complete = functools.partial(
            _of_flash(select, request),
            splits_queries=request.choices.query_splits > 1,
            vector_adds=request.capability >= (9, 0),
        )
        precision = replace(PLAIN, precision=request.features.precision)
        rule = _by_table(mma_tiles, request, 1, precision)
        if algorithm == "fa2":
            rule = functools.partial(unspilled, request, rule)
        return _shape(self.chosen_tiles(request, select, rule), complete)

    def dq_kernel(self, request: Request, tiles: Tiles, spec: Any) -> tuple[Tiles, Spec]:
        if request.problem.sparse:  # the tiles must be the blocks of the mask
            tiles = replace(tiles, threads=None)
        else:
            sizes = (MAX_SEQLEN, MAX_SEQLEN, request.problem.largest_dim, request.shared_limit)
            tiles = mma_tiles("fa2", "dQ", *sizes).value
        select = _of_flash(_select(request, tiling.MmaDqSpec), request)
        return tiles, select(tiles, features=request.features.without_sums)

    def standard(self, request: Request) -> Shape:
        select = _select(request, tiling.StandardSpec)
        chosen = self.chosen_tiles(request, select, _by_table(mma_tiles, request))
        if not request.features.scales:
            return _shape(chosen, _of_products(select, request))
        for name, size in (("Br", chosen.value.Br), ("Bc", chosen.value.Bc)):
            if request.features.block_scales and SCALED_ROWS % size:
                raise ValueError(
                    f"tiles.{name} must divide {SCALED_ROWS} with scales of blocks of "
                    f"{SCALED_ROWS} rows, got {size}; choose such tiles, or tiles=None"
                )
        # Tiles of e4m3 are converted to float16 when they are loaded. This is the spec's dtype.
        widened = functools.partial(select, features=request.features)
        return _shape(chosen, widened)

    def standard_backward(self, request: Request) -> tuple[Shape, Spec]:
        shape = self.standard(request)
        across = Tiles(shape.tiles.Bc, shape.tiles.Br)  # the rows of PT are the columns of P
        return shape, _of_products(_select(request, tiling.StandardSpec), request)(across)


# Reasons why "auto" chooses another unit for short calls.
_FEW_ROWS = f"{GROUP_ROWS} rows or fewer do not fill a tile"
_ONE_TILE = f"for head_dim <= {PANEL}, {2 * GROUP_ROWS} rows and columns or fewer are a single tile"
_ADDED, _LENGTHS = ("softcap", "bias", "alibi", "sinks"), ("q_lens", "kv_lens", "packed")
# Features with which kernels of planes were compiled and tried.
_BESIDE_PLANES = ("causal", "window", *_LENGTHS, "splits", "precision", "scaled_dout")
_MASKS = ("causal", "window", "mask_mod", "sparse")
_SCORES = ("score_mod", "score_mod_grad", "dcaptured")


class Wgmma(Unit):
    """Hopper's tensor cores by ``wgmma`` and bulk copies, for 16-bit matrices.

    Only compute capability 9.0 has this unit.
    """

    name, title, label = "wgmma", "Hopper's tensor cores", "Hopper's tensor cores (wgmma)"
    mark, instruction, emulated_steps = " (wgmma)", "wgmma", 1e8
    looks: Mapping[str, tuple[str, str]] = {
        "fa2": ("#6000E6", "h"),
        "fa2-splits": ("#CE93D8", "p"),
        "fa1": ("#330080", "H"),
        "fa1-splits": ("#A48CFF", "8"),
        "fa1-own": ("#0D1140", ""),
        "fa2-one-block": ("#E1BEE7", ""),
        "fa2-fa1-tiles": ("#AB6BC4", ""),
    }
    dtypes = Mma.dtypes
    capability = newest = (9, 0)
    kernels = wgmma
    copies = BoxCopies()
    measures = tiling.WGMMA_MEASURES
    staged: Mapping[tuple[str, str], int] = {("fa2", "fwd"): tiling.MOST_STAGES}
    # (algorithm, pass) -> features that kernels have. ``largest``: largest head dimension, if it is
    # below MAX_HEAD_DIM.
    features: Mapping[tuple[str, str], tuple[str, ...]] = {
        ("fa1", "fwd"): (
            *(*_MASKS, "softcap", "score_mod", "sinks", "q_lens"),
            *("precision", "scales"),
        ),
        ("fa2", "fwd"): (
            *(*_MASKS, *_ADDED, "score_mod", *_LENGTHS),
            *("page_size", "splits", "dropout", "precision", "scales"),
        ),
        ("fa1", "bwd"): (*_MASKS, *_SCORES, "sinks", "dlse"),
        ("fa2", "bwd"): (
            *(*_MASKS, *_SCORES, *_ADDED, *_LENGTHS),
            *("dropout", "precision", "scaled_dout"),
        ),
    }
    largest: Mapping[tuple[str, str], int] = {("fa1", "bwd"): 128}
    splits_group: Mapping[tuple[str, str], int] = {("fa2", "bwd"): LARGEST_ATOMIC}
    precisions = {**Mma.precisions, ("fa2", "bwd"): ("fp16x3", "bf16x3")}

    def lacks(self, request: Request) -> str:
        pair = algorithm, passes = request.kernel
        if pair not in self.features:
            return f"{pass_of(passes)} of algorithm {algorithm!r}"
        on = [f.name for f in fields(Features) if getattr(request.features, f.name)]
        has = (*self.features[pair], *(_LENGTHS if request.features.precision else ()))
        lacking = [name for name in on if name not in has]
        if lacking:
            return f"the option {argument_of(lacking[0])}"
        d, largest = request.problem.largest_dim, self.largest.get(pair, MAX_HEAD_DIM)
        with_precision = f"with precision {request.problem.precision!r}"
        if request.features.precision:  # P V of one tile takes registers in addition to O
            largest = 2 * PANEL
            if passes == "bwd" and request.problem.head_dim_v:
                return f"v with another head_dim than q in the backward pass {with_precision}"
            if request.problem.precision not in self.precisions[pair]:
                return f"precision {request.problem.precision!r} in the backward pass"
            beside = [name for name in on if name not in _BESIDE_PLANES]
            if beside:
                return f"the option {argument_of(beside[0])} {with_precision}"
        if d > largest:
            return f"a head_dim above {largest} (here {d}) in {pass_of(passes)} of {algorithm!r}"
        if not (request.aligned or (request.features.precision and algorithm == "fa2")):
            return (
                "arrays with negative strides, or with rows that do not start at multiples of 16 "
                "bytes (pass contiguous copies of q, k and v)"
            )
        if passes == "fwd":
            return ""
        dq_alone = not self.adds_dq(request)
        if request.features.sparse and dq_alone:
            return (
                "the option block_mask where dQ is computed by a kernel of its own "
                f"(deterministic=True, or head_dim above {LARGEST_ATOMIC})"
            )
        return lacks_together(d, request.features, dq_alone, request.spilling)

    def unsuited(self, request: Request) -> str:
        p, choices = request.problem, request.choices
        if request.features.scales:  # no other unit takes the dtype
            return ""
        chosen = choices.tiles is not None and not p.sparse  # a block mask decides its tiles
        if chosen or choices.ablate or choices.query_splits != 1:
            return "with tiles, ablate or query_splits it is used only if the call names the unit"
        others = choices.algorithm != "fa2" and not request.features.precision
        if choices.warp_partition != "rows" or others:
            return "'auto' uses it only for fa2 or float32 in planes, with warp_partition='rows'"
        if request.features.precision and p.seqlen_q <= GROUP_ROWS:
            return f"float32 in planes was not timed with {GROUP_ROWS} rows or fewer"
        narrow = request.features.precision and p.largest_dim <= PANEL // 2
        if narrow and choices.passes == "bwd":
            return f"gradients of float32 in planes were not timed for head_dim <= {PANEL // 2}"
        if not request.multiprocessors:
            return "the emulator runs the smaller thread blocks of mma faster"
        if choices.tiles is not None and (why := self._leaves(choices.tiles, request)):
            return why
        least = measured("rows from which dropout is faster than on mma", choices.passes)
        if request.features.dropout and p.seqlen_q < least:
            return f"it is slower with dropout below {least:g} rows"
        one_tile = max(p.seqlen_q, p.seqlen_k) <= 2 * GROUP_ROWS and p.largest_dim <= PANEL
        if choices.passes == "bwd":
            if request.features.scores_stay and p.bias is not None:
                return "it would read the bias element by element, because of score_mod"
            if adds_elements(request.features) and p.largest_dim <= PANEL:
                return (
                    "it would add gradients of captured arrays element by element, for "
                    f"head_dim <= {PANEL}"
                )
            few = _ONE_TILE if one_tile else ""
            return _FEW_ROWS if p.seqlen_q <= GROUP_ROWS else few
        few = _FEW_ROWS if p.seqlen_q <= GROUP_ROWS else ""
        # For small head dimensions the next row tiles are loaded ahead, with measured options only.
        if not few and one_tile and not takes_slots(request.features):
            few = f"{_ONE_TILE}, with options"
        if p.bias is None:
            return "" if suits_few_rows(request) else few
        if p.largest_dim > 2 * PANEL or p.page_size is not None:
            return f"a bias was not timed with pages or with head_dim > {2 * PANEL}"
        odd = "it reads a bias in pairs, and the rows of this bias have an odd length"
        return few or (odd if p.bias[-1] % 2 else "")

    def _leaves(self, tiles: Tiles, request: Request) -> str:
        """Return text with the reason why this unit does not suit the tiles of a block mask.

        The text is empty if the unit supports the tiles, and is not slower with them than "mma".
        """
        forward = request.choices.passes == "fwd"
        if forward and tiles.Br <= GROUP_ROWS:
            return f"a block mask with tiles of {GROUP_ROWS} rows or fewer is faster on mma (H100)"
        try:
            (self.forward if forward else self.backward)(request)
        except ValueError:
            return "its kernels do not support the tiles of the block mask"
        return ""

    def forward(self, request: Request) -> Shape:
        p, choices = request.problem, request.choices
        out_dtype = p.o_dtype if request.features.scales else ""
        if choices.algorithm == "fa1":
            select = _selecting(tiling.select_wgmma_fa1_spec, request)
            rule = functools.partial(hopper_fa1_tiles, p, request.features)
            complete = functools.partial(
                _of_flash(select, request), return_lse=choices.return_lse, out_dtype=out_dtype
            )
            return _shape(self.chosen_tiles(request, select, rule, False), complete)
        heads = p.group if heads_share_tiles(request) else 1
        select = _selecting(tiling.select_wgmma_spec, request)
        complete = functools.partial(
            _of_flash(select, request),
            tile_heads=heads,
            ablated=choices.ablate,
            out_dtype=out_dtype,
            shares=p.seqlen_q > GROUP_ROWS and takes_slots(request.features),
        )
        rule = functools.partial(hopper_tiles, request, heads, complete)
        long = p.seqlen_q > measured("rows from which the tuned tiles are the fastest")
        return _shape(self.chosen_tiles(request, select, rule, plain=long), complete)

    def backward(self, request: Request) -> Shape:
        p, choices = request.problem, request.choices
        splits = 1 if choices.group_splits == "auto" else int(choices.group_splits)
        call = tiling.BackwardCall(
            head_dim=p.head_dim,
            head_dim_v=p.head_dim_v or 0,
            features=request.features,
            algorithm=choices.algorithm,
            grouped=p.group > splits,
            splits_group=splits > 1,
            adds_dq=hopper_adds_dq(request),
        )
        tiles, chunk = self.column_tiles(request)
        spec = tiling.select_wgmma_backward_spec(
            tiles,
            call,
            request.shared_limit,
            aligned=request.aligned,
            dtype=request.matrix_dtype,
            positive_scale=p.scale > 0.0,
            splits_rows=p.group < splits,
            splits_queries=choices.query_splits > 1,
            chunk_tiles=chunk,
        )
        why = "the only tiles that Hopper's backward kernels support at this head dimension"
        return Shape(replace(tiles, threads=spec.threads), spec, why)

    def column_tiles(self, request: Request) -> tuple[Tiles, int]:
        tiles = request.choices.tiles or hopper_backward_tiles(request)
        return tiles, chunk_tiles(request, tiles.Bc)

    def adds_dq(self, request: Request) -> bool:
        return hopper_adds_dq(request)

    def dq_kernel(self, request: Request, tiles: Tiles, spec: Any) -> tuple[Tiles, Spec]:
        p, select = request.problem, _of_flash(tiling.select_wgmma_dq_spec, request)
        features = request.features.without_sums
        spec = select(p.head_dim, head_dim_v=p.head_dim_v or 0, features=features)
        return tiling.wgmma_dq_tiles(p.largest_dim), spec


def adds_elements(features: Features) -> bool:
    """Return whether gradients of captured arrays are added one element of S at a time.

    Captured arrays are arrays outside of a ``score_mod`` that the ``score_mod`` reads.
    """
    gradient = None if features.dcaptured is None else features.dcaptured.gradient
    return gradient is not None and gradient.scattered


def heads_share_tiles(request: Request) -> bool:
    """Return whether the query heads of a K/V head share a row tile on Hopper's tensor cores.

    They do if all of these conditions hold:

    - Several query heads share a K/V head.
    - A head has at most 64 rows, and 64 is a multiple of this number of query heads.
    - There are no ``q_lens``, because the tensor map of Q has no axis left for them.
    - No option forbids it (``_differs_by_head``).
    """
    p, features = request.problem, request.features
    few = p.seqlen_q <= GROUP_ROWS and GROUP_ROWS % p.group == 0
    return p.group > 1 and few and not (features.q_lens or _differs_by_head(features))


def _differs_by_head(features: Features) -> bool:
    """Return whether a call has an option with which query heads cannot share a row tile.

    These options are ALiBi slopes, a bias, dropout, ``score_mod``, ``mask_mod``, a block mask,
    float32 in planes, and scales of e4m3 arrays.
    """
    own = features.alibi or features.bias or features.dropout or features.calls
    return own or features.sparse or features.precision != "" or features.scales != ""


def suits_few_rows(request: Request) -> bool:
    """Return whether Hopper's unit is faster than "mma" for rows that do not fill a tile.

    The time of such calls is the time to load K and V. The first case that applies decides:

    case                                                     result
    pages (``block_table``)                                  True: the copy engine is faster
    few keys, or more than ``LOW`` rows of all query heads   True if query heads share row tiles
    of a K/V head
    few row tiles per multiprocessor                         False
    many row tiles per multiprocessor, head_dim above 64     False
    all other cases                                          True
    """
    p, shared = request.problem, heads_share_tiles(request)
    if p.page_size is not None:
        return True
    long = p.seqlen_k > measured("keys that a multiprocessor is busy with for a while")
    if p.seqlen_q * p.group > LOW or not long:
        return shared
    each = p.batch * (p.heads_k if shared else p.heads_q) / request.multiprocessors
    least = measured("row tiles a multiprocessor from which few rows keep the copy engine busy")
    most = measured("row tiles a multiprocessor up to which they do, of wide heads")
    return each >= least and (p.head_dim <= PANEL or each <= most)


def heads_in_tiles(request: Request) -> int:
    """Return the number of query heads of a K/V head that share a row tile of FA-2 on unit "mma".

    The number is a power of two. It is 1 if a head has more than 64 rows, or if the call has an
    option with which heads cannot share a tile (``_differs_by_head``).
    """
    p, by_head = request.problem, _differs_by_head(request.features)
    if request.choices.algorithm != "fa2" or p.seqlen_q > GROUP_ROWS or by_head:
        return 1
    return min(p.group & -p.group, GROUP_ROWS)


def _select(request: Request, kind: type[tiling.MmaSpec]) -> Callable[..., Any]:
    """Return a function of tiles that calls ``select_mma_spec`` with the sizes of a request.

    The returned function makes a spec of the class ``kind``.
    """
    return _selecting(tiling.select_mma_spec, request, kind=kind)


def _of_products(select: Callable[..., Any], request: Request) -> Callable[..., Any]:
    """Return a function that calls ``select``, and adds three facts about a request to the call.

    The facts are keyword arguments of ``select``: the features, whether rows are aligned, and the
    dtype in which products are computed. Every spec on tensor cores needs these facts.
    """
    return functools.partial(
        select, features=request.features, aligned=request.aligned, dtype=request.matrix_dtype
    )


def _of_flash(select: Callable[..., Any], request: Request) -> Callable[..., Any]:
    """Return a function that calls ``select``, and adds five facts about a request to the call.

    The facts are keyword arguments of ``select``. Three of them are described in
    ``_of_products``. The other two facts are whether the scale is positive, and whether several
    query heads share a K/V head. Specs of FA-1 and FA-2 on tensor cores need all five facts.
    """
    p = request.problem
    positive, grouped = p.scale > 0.0, p.group > 1
    return functools.partial(
        _of_products(select, request), positive_scale=positive, grouped=grouped
    )


# The units, the oldest first. "auto" takes the last unit that can compute a request and suits it.
UNITS: dict[str, Unit] = REGISTERED
UNITS |= {unit.name: unit for unit in (Simt(), Mma(), Wgmma())}


class NoUnit(ValueError):
    """Raised if the device has no unit that computes a request."""


def unit_of(request: Request) -> Chosen[Unit]:
    """Return the unit of a request, and the reason.

    If the caller named a unit, it is that unit. For "auto" it is the last unit in ``UNITS`` that
    can compute the request and suits it.

    Raise ValueError in these cases:

    - No unit has the name.
    - The unit does not take the dtype of the request.
    - The unit, or for "auto" every unit of the device, does not support the request
      (``Unit.lacks``).

    Raise ``NoUnit`` if the device does not have the unit.
    """
    name, allowed = request.choices.unit, ("auto", *UNITS)
    if name not in allowed:
        raise ValueError(f"unit must be {one_of(map(repr, allowed))}, got {name!r}")
    dtype, capability = request.problem.dtype, request.capability
    if request.features.precision:
        dtype += f" with precision {request.problem.precision!r}"
    found = [unit for unit in UNITS.values() if name in ("auto", unit.name)]
    taking = [unit for unit in found if request.matrix_dtype in unit.dtypes]
    if not taking:
        takes = one_of(dict.fromkeys(x for unit in found for x in unit.dtypes))
        able = ["auto", *(u.name for u in UNITS.values() if request.matrix_dtype in u.dtypes)]
        raise ValueError(
            f"unit must be {one_of(map(repr, able))} for {dtype}, got {name!r}, which multiplies "
            f"{takes} matrices"
        )
    least, here = (".".join(map(str, x)) for x in (taking[0].capability, capability))
    left: list[str] = []
    lacked = ""
    for unit in reversed(taking):
        if not unit.runs_on(capability):
            left.append(f"not {unit.name}: GPUs of compute capability {here} do not have it")
            continue
        lacking = unit.lacks(request)
        if lacking and name != "auto":
            others = [u for u in UNITS.values() if request.matrix_dtype in u.dtypes]
            able = ["auto", *(u.name for u in others if not u.lacks(request))]
            raise ValueError(
                f"unit {name!r} does not support {lacking}; pass unit={one_of(map(repr, able))}"
            )
        if lacking:
            lacked = f"unit {unit.name!r} does not support {lacking}"
        lacking = f"its kernels do not support {lacking}" if lacking else ""
        unsuited = lacking or (unit.unsuited(request) if name == "auto" else "")
        if not unsuited:
            last = f"the newest unit that takes {dtype} and suits the call"
            why = "chosen by the caller" if name != "auto" else last
            return Chosen(unit, "; ".join((why, *left)))
        left.append(f"not {unit.name}: {unsuited}")
    if lacked:
        raise ValueError(f"no unit supports the call: {lacked}")
    newer = "" if taking[0].newest else " or newer"
    present = [unit for unit in UNITS.values() if unit.runs_on(capability)]
    there = ""
    if len(present) == 1:
        there = f"; this GPU has unit {present[0].name!r}, which takes {one_of(present[0].dtypes)}"
    needs = f"unit {taking[0].name!r} needs"
    if name == "auto":
        needs = f"{dtype} needs unit {taking[0].name!r}, which needs"
    raise NoUnit(f"{needs} a GPU of compute capability {least}{newer}, got {here}{there}")


def having(choices: Callable[[Unit], Iterable[tuple[str, str]]], passes: bool = False) -> str:
    """Return text that names the algorithms and units that support a choice of the caller.

    An example is "algorithm 'fa1' (unit 'simt' or 'mma')". ``choices`` takes a unit and returns the
    pairs (algorithm, pass) for which the unit supports the choice. With ``passes`` the text names
    the pass too: "the forward pass of algorithm 'fa1' ...".
    """
    units: dict[str, dict[str, None]] = {}
    for unit in UNITS.values():
        for algorithm, pass_ in sorted(choices(unit)):
            who = f"{pass_of(pass_)} of " if passes else ""
            units.setdefault(f"{who}algorithm {algorithm!r}", {})[repr(unit.name)] = None
    return one_of(f"{who} (unit {one_of(where)})" for who, where in units.items())


def pass_of(name: str) -> str:
    """Return the name of a pass in messages, such as "the forward pass" for "fwd"."""
    return {"fwd": "the forward pass", "bwd": "the backward pass"}[name]
