"""What a caller chose, and what a plan is asked for: all that it depends on, in one value."""

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
# What one pass alone has a choice of.
_GRADIENTS = ("return_dbias", "return_dsinks", "return_dcaptured")
_OF_PASS = {
    "fwd": ("return_lse", "warp_partition", "ablate", "kv_splits"),
    "bwd": ("deterministic", *_GRADIENTS, "dlse", "group_splits"),
}


def check_algorithm(algorithm: Any) -> None:
    """Raise ValueError for what is no algorithm."""
    check_name("algorithm", algorithm, ALGORITHMS)


@dataclass(frozen=True)
class Choices:
    """How a call is to be computed: its arguments beside arrays, options, ``out`` and ``stream``,
    as the public functions document them. A call's launches are kept by it, plans are asked for
    with it.

    Raises TypeError or ValueError for a value that no call has, and for one that ``passes`` ("fwd"
    or "bwd") has no choice of; what a unit has no choice of is found when a plan is made.
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
        own = vars(self)  # what a frozen class sets its fields by
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
    """Return a function with the parameters of ``Choices``, which checks equal arguments once."""
    checked: Any = functools.lru_cache(maxsize=4096, typed=True)(make)

    def choices_of(*given: _P.args, **named: _P.kwargs) -> Choices:
        """Return the ``Choices`` of these arguments, one object for equal arguments."""
        try:
            return checked(*given, **named)
        except TypeError:  # wrong, or without a hash
            return make(*given, **named)

    return choices_of


choices_of = _once(Choices)


@dataclass(frozen=True)
class Request:
    """A pass of an algorithm over a problem, as a caller chose it, on a device.

    ``aligned``: every row of the inputs and outputs starts at a 16-byte address and is contiguous,
    and no axis goes backwards.
    ``shared_limit`` (bytes of shared memory a block) and ``capability`` are the device's,
    ``multiprocessors`` is how many there are to keep busy, 0 on the emulator. ``unit`` is the name
    of what computes, empty as long as it is not decided; measures to do without are in its order
    then. ``spilling``: kernels that spill registers may be planned too (``facts.spills_allowed``).
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
        """The request to the current device, or the one that plans are made for."""
        count = device.multiprocessors() if device.planned_for_gpu() else 0
        limits = device.shared_bytes_limit(), device.compute_capability(), count
        return cls(choices, problem, aligned, *limits, spilling=are_spills_allowed())

    def chosen(self, **changed: Any) -> Request:
        """The request with other choices, of these names."""
        return replace(self, choices=replace(self.choices, **changed))

    @property
    def kernel(self) -> tuple[str, str]:
        """(algorithm, pass)."""
        return self.choices.algorithm, self.choices.passes

    @functools.cached_property
    def features(self) -> Features:
        """The options that its main kernel is compiled for."""
        choices = self.choices
        splits = choices.kv_splits not in ("auto", 1)
        # What else takes D from memory takes it with dL.
        scaled = PRECISIONS[self.problem.precision].scaled
        found = Features.of(
            self.problem,
            splits=splits,
            dbias=choices.return_dbias,
            dcaptured=self.problem.score_mod if choices.return_dcaptured else None,
            dlse=choices.dlse and choices.algorithm == "fa1",
            scaled_dout=scaled and choices.passes == "bwd",
        )
        # Backward L has them.
        return replace(found, sinks=found.sinks and choices.passes == "fwd")

    @property
    def lengths(self) -> Features:
        """Options of a kernel that copies and multiplies: which rows and columns there are."""
        own = self.features
        return replace(PLAIN, q_lens=own.q_lens, kv_lens=own.kv_lens, packed=own.packed)

    @property
    def lengths_of_rows(self) -> Features:
        """Options of the kernel that makes D row by row, packed sequences as one long one."""
        return replace(self.lengths, packed=False, dlse=self.choices.dlse)

    @property
    def dtype(self) -> DType:
        return DTYPES[self.problem.dtype]

    @property
    def matrix_dtype(self) -> str:
        """The dtype that products are computed in: the problem's, or that of its planes."""
        p = self.problem
        return p.dtype if p.precision == "ieee" else PRECISIONS[p.precision].dtype

    @property
    def row_shape(self) -> tuple[int, int, int]:
        """Shape of one value for each row of Q, as kernels take it: (batch, heads, rows)."""
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
