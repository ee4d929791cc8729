"""The choices of a caller, and the request: everything on which a plan depends, in one value."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, ParamSpec

from fa_numba import device
from fa_numba.checks import as_flag, as_size, as_splits, check_name, one_of
from fa_numba.choices.facts import are_spills_allowed
from fa_numba.dtypes import DTYPES, PRECISIONS, DType
from fa_numba.io_model import ALGORITHMS
from fa_numba.options import PLAIN, Features
from fa_numba.problem import Problem
from fa_numba.tiling import Tiles
from fa_numba.typing import Algorithm, Passes, Splits, UnitName, WarpPartition

# The units by name, which ``fa_numba.choices.units`` fills.
REGISTERED: dict[str, Any] = {}
PASSES = ("fwd", "bwd")
PARTITIONS = ("rows", "keys")
# Choices that exist in one pass only.
_GRADIENTS = ("return_dbias", "return_dsinks", "return_dcaptured")
_OF_PASS = {
    "fwd": ("return_lse", "warp_partition", "ablate", "kv_splits"),
    "bwd": ("deterministic", *_GRADIENTS, "dlse", "group_splits"),
}


def check_algorithm(algorithm: Any) -> None:
    """Raise ValueError if the argument is not the name of an algorithm."""
    check_name("algorithm", algorithm, ALGORITHMS)


@dataclass(frozen=True)
class Choices:
    """The caller's choices of how to compute a call.

    These are the arguments of the public functions except arrays, options, ``out`` and ``stream``.
    The public functions document them. The choices are part of the key of the launch cache, and of
    a request for a plan.

    The constructor raises TypeError or ValueError for a value that no call allows. It also raises
    ValueError for a choice that does not exist in this pass (``passes``), such as ``kv_splits`` in
    a backward pass. Choices that the unit does not support raise ValueError later, when a plan is
    made.
    """

    algorithm: Algorithm
    passes: Passes = "fwd"
    tiles: Tiles | None = None
    unit: UnitName = "auto"
    return_lse: bool = False
    ablate: tuple[str, ...] = ()
    kv_splits: Splits = "auto"
    query_splits: int = 1
    warp_partition: WarpPartition = "rows"
    deterministic: bool = False
    return_dbias: bool = False
    return_dsinks: bool = False
    return_dcaptured: bool = False
    dlse: bool = False
    group_splits: Splits = "auto"
    _hash: int = field(init=False, repr=False, compare=False, default=0)

    def __post_init__(self) -> None:
        own = vars(self)  # sets the fields of a frozen class
        for name in ("return_lse", "deterministic", *_GRADIENTS, "dlse"):
            own[name] = as_flag(name, own[name])
        check_name("passes", self.passes, PASSES)
        check_algorithm(self.algorithm)
        if self.tiles is not None and not isinstance(self.tiles, Tiles):
            raise TypeError(f"tiles must be a Tiles(Br=..., Bc=...) or None, got {self.tiles!r}")
        own["query_splits"] = as_size("query_splits", self.query_splits, axis=False)
        for name in ("kv_splits", "group_splits"):
            own[name] = as_splits(name, own[name])
        check_name("warp_partition", self.warp_partition, PARTITIONS)
        if not isinstance(self.unit, str):
            allowed = one_of(map(repr, ("auto", *REGISTERED)))
            raise ValueError(f"unit must be {allowed}, got {self.unit!r}")
        names = self.ablate if isinstance(self.ablate, (tuple, list)) else (self.ablate,)
        if not all(isinstance(name, str) for name in names):
            raise ValueError(
                "ablate must be a tuple of names of optimisations, such as ('swizzle',), or () to "
                f"leave none out, got {self.ablate!r}"
            )
        (other,) = (name for name in PASSES if name != self.passes)
        for field_ in (f for f in fields(self) if f.name in _OF_PASS[other]):
            name, value = field_.name, own[field_.name]
            if value != field_.default:
                raise ValueError(
                    f"{name} must be {field_.default!r} with passes={self.passes!r}, got "
                    f"{value!r}; {name} is only for passes={other!r}"
                )
        compared = tuple(own[x.name] for x in fields(self) if x.compare)
        with contextlib.suppress(TypeError):  # measures in a list
            object.__setattr__(self, "_hash", hash(compared))

    def __hash__(self) -> int:
        return self._hash


_P = ParamSpec("_P")


def _once(make: Callable[_P, Choices]) -> Callable[_P, Choices]:
    """Return a function that calls ``make`` and caches the results.

    If the function is called again with equal arguments, it returns the cached result, without
    checking the arguments again.
    """
    checked: Any = functools.lru_cache(maxsize=4096, typed=True)(make)

    def choices_of(*given: _P.args, **named: _P.kwargs) -> Choices:
        """Return the ``Choices`` of these arguments. Equal arguments give the same object."""
        try:
            return checked(*given, **named)
        except TypeError:  # wrong, or without a hash
            return make(*given, **named)

    return choices_of


choices_of = _once(Choices)


@dataclass(frozen=True)
class Request:
    """The value from which a plan is made: a pass over a problem, choices, and a device.

    field             meaning
    choices           the caller's choices: algorithm, pass, unit, tiles and so on
    problem           sizes and options
    aligned           whether every row of inputs and outputs is contiguous and starts at a 16-byte
                      address, and no stride is negative
    shared_limit      shared memory per thread block in bytes, of the device
    capability        compute capability of the device, such as (9, 0)
    multiprocessors   number of multiprocessors to keep busy; 0 on the emulator
    unit              name of the unit; empty until the unit is chosen. When the unit is chosen, the
                      names in ``choices.ablate`` are put in the order of ``Unit.measures``
    spilling          whether kernels that spill registers may be planned (``facts.spills_allowed``)
    """

    choices: Choices
    problem: Problem
    aligned: bool
    shared_limit: int
    capability: tuple[int, int]
    multiprocessors: int
    unit: str = ""
    spilling: bool = False

    @classmethod
    def here(cls, choices: Choices, problem: Problem, aligned: bool) -> Request:
        """Return the request for the current device.

        Inside of ``device.planning_for``, the request is for the GPU that was given there.
        """
        count = device.multiprocessors() if device.planned_for_gpu() else 0
        limits = device.shared_bytes_limit(), device.compute_capability(), count
        return cls(choices, problem, aligned, *limits, spilling=are_spills_allowed())

    def chosen(self, **changed: Any) -> Request:
        """Return the request with some of its choices replaced.

        ``changed`` maps the names of these choices to their new values.
        """
        return replace(self, choices=replace(self.choices, **changed))

    @property
    def kernel(self) -> tuple[str, str]:
        """The name of the algorithm and the pass, such as ("fa2", "fwd")."""
        return self.choices.algorithm, self.choices.passes

    @functools.cached_property
    def features(self) -> Features:
        """The features for which the main kernel is compiled."""
        choices = self.choices
        splits = choices.kv_splits not in ("auto", 1)
        # Only FA-1 computes D in its main kernel. In other kernels, D contains dL already.
        scaled = PRECISIONS[self.problem.precision].scaled
        found = Features.of(
            self.problem,
            splits=splits,
            dbias=choices.return_dbias,
            dcaptured=self.problem.score_mod if choices.return_dcaptured else None,
            dlse=choices.dlse and choices.algorithm == "fa1",
            scaled_dout=scaled and choices.passes == "bwd",
        )
        # In the backward pass, L contains the sinks already.
        return replace(found, sinks=found.sinks and choices.passes == "fwd")

    @property
    def lengths(self) -> Features:
        """The features of helper kernels, which need the lengths of sequences but no other options.

        Helper kernels copy or multiply rows.
        """
        own = self.features
        return replace(PLAIN, q_lens=own.q_lens, kv_lens=own.kv_lens, packed=own.packed)

    @property
    def lengths_of_rows(self) -> Features:
        """The features of the kernel that computes D row by row.

        It treats packed sequences as one long sequence.
        """
        return replace(self.lengths, packed=False, dlse=self.choices.dlse)

    @property
    def dtype(self) -> DType:
        return DTYPES[self.problem.dtype]

    @property
    def matrix_dtype(self) -> str:
        """The dtype in which products are computed: the problem's dtype, or the dtype of planes."""
        p = self.problem
        return p.dtype if p.precision == "ieee" else PRECISIONS[p.precision].dtype

    @property
    def row_shape(self) -> tuple[int, int, int]:
        """Shape of an array with one number per row of Q in kernels: (batch, heads, rows)."""
        shape = self.problem.lse_shape
        return (1, *shape) if self.problem.packed else shape  # type: ignore[return-value]

    @property
    def q_shape(self) -> tuple[int, int, int, int]:
        """Shape of Q as kernels take it: (batch, heads, rows, d)."""
        return (*self.row_shape, self.problem.head_dim)

    @property
    def o_shape(self) -> tuple[int, int, int, int]:
        """Shape of O as kernels take it: (batch, heads, rows, d of V)."""
        return (*self.row_shape, self.problem.d_v)

    @property
    def k_shape(self) -> tuple[int, int, int, int]:
        """Shape of K as kernels take it: (batch, heads, rows, d)."""
        p = self.problem
        rows = (1, p.heads_k, p.k_shape[0]) if p.packed else (p.batch, p.heads_k, p.seqlen_k)
        return (*rows, p.head_dim)
