"""Binding: maps the options of a call to the fields of a ``Problem`` and to kernel arguments."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np

from fa_numba import checks, device, mods
from fa_numba.checks import (
    as_array_scale,
    as_flag,
    as_shape,
    as_table,
    check_table,
    check_unmasked,
    is_number,
)
from fa_numba.dtypes import DTYPES, SCALED_ROWS
from fa_numba.host.arrays import (
    CAPTURED,
    INTEGERS,
    MASKS,
    SUMS,
    Operand,
    lies_on_gpu,
    on_host,
    operand,
)
from fa_numba.integers import ceil_div
from fa_numba.mods.blocks import BlockMask, BlockSize
from fa_numba.options import (
    SCALES,
    Bound,
    Features,
    as_word,
    check_names,
    signed,
    unit_before_score_mod,
)
from fa_numba.problem import OptionFields, Problem, check_block_mask
from fa_numba.tiling import Tiles

LOG2E = math.log2(math.e)

SEEDS = ("seed_low", "seed_high", "offset")
_STARTS = ("cu_seqlens_q", "cu_seqlens_k")
LENGTHS = ("q_lens", "kv_lens", *_STARTS)
# Options that are arrays on the call's device, with the names that kernels use. Kernels read them
# as float32.
ARRAYS = {"bias": "bias", "attn_mask": "bias"}
ARRAYS |= {n: n for n in ("alibi_slopes", "sinks", *SCALES)}
# Integer arrays that kernels read from the caller's array on a GPU, or from a copy of a host array.
PAGING = ("block_table", "kv_lens")


@dataclass(frozen=True)
class Paging:
    """The block table of a call, with the lengths of the sequences (``kv_lens``).

    ``shape`` is the shape of the table, or None without a table. ``table`` is the table if it is on
    the host. ``arrays`` maps names to the arrays that are on a GPU: the table, the lengths or both.
    ``checked`` contains copies of the table and of the lengths on the host, if their values must be
    checked.
    """

    shape: tuple[int, ...] | None = None
    table: np.ndarray | None = None
    arrays: Mapping[str, Operand] = field(default_factory=dict)
    checked: tuple[np.ndarray, np.ndarray] | None = None


@dataclass(frozen=True)
class Binding:
    """The options of one call, after all checks that do not need q.

    field        meaning
    fields       fields that ``Problem.from_shapes`` takes unchanged
    shapes       shape of the array of an option, by the option's name, such as "bias"
    starts       the arrays ``cu_seqlens_q`` and ``cu_seqlens_k`` by name, on the host
    arrays       arrays on the call's device, by the names that kernels use
    block_mask   the option ``block_mask``: an array on the host, a ``BlockMask`` or None
    seed         the option ``seed`` of dropout
    offset       the option ``offset`` of dropout
    paged        the block table and the lengths of the sequences in pages
    numbers      scales of e4m3 arrays, and numbers that functions such as ``score_mod`` capture, by
                 the names that kernels use
    """

    fields: OptionFields
    shapes: Mapping[str, tuple[int, ...]]
    starts: Mapping[str, np.ndarray]
    arrays: Mapping[str, Operand]
    block_mask: np.ndarray | BlockMask | None
    seed: int
    offset: int
    paged: Paging
    numbers: Mapping[str, int | float] = field(default_factory=dict)

    @classmethod
    def of(cls, options: Mapping[str, Any], *, shapes: bool = False) -> Binding:
        """Return the binding of ``options``, a mapping from names of options to values.

        The value None means that the option is not used. With ``shapes``, an array may be replaced
        by its shape, as in ``fa_numba.plan``. Raises TypeError or ValueError for an unknown name
        and for an invalid value.
        """
        check_names(options)
        given = {name: value for name, value in options.items() if value is not None}
        arrays: dict[str, Operand] = {}
        numbers: dict[str, int | float] = {}
        shapes_of: dict[str, tuple[int, ...]] = {}
        for name, known_as in ARRAYS.items():
            if name not in given:
                continue
            array = given.pop(name)
            if name in SCALES and is_number(array):
                numbers[known_as] = as_array_scale(name, array)
            elif shapes:
                check_unmasked(name, array)
                shapes_of[name] = as_shape(name, getattr(array, "shape", array))
            else:
                found = operand(name, array, MASKS if name == "attn_mask" else SUMS)
                shapes_of[name] = found.shape
                # If there is a bias too, ``Problem`` raises an error.
                arrays[known_as] = found
        mask: Any = given.pop("block_mask", None)
        if isinstance(mask, BlockMask):
            if "mask_mod" in given:
                raise ValueError(
                    "mask_mod cannot be given with a block_mask from create_block_mask, which "
                    "contains a mask_mod already; leave one of the two out"
                )
            given["mask_mod"] = mask.mask_mod
        elif mask is not None:
            mask = on_host("block_mask", mask)
        for name in mods.PARAMETERS:
            if name not in given:
                continue
            mod, values = mods.captured(name, given[name])
            given[name] = mod
            for known_as, (own, value) in zip(mod.fields, values, strict=True):
                if not mods.is_array(value):
                    numbers[known_as] = value
                elif not shapes:
                    arrays[known_as] = operand(_used(own, name, mod), value, CAPTURED)
        seed = as_word("seed", given.pop("seed", 0), 64)
        offset = as_word("offset", given.pop("offset", 0), 32)
        table, check = given.pop("block_table", None), given.pop("check_table", False)
        paged = paging(table, given.get("kv_lens"), check, shapes=shapes)
        arrays.update(paged.arrays)
        on_host_alone = [n for n in LENGTHS if n in given and n not in paged.arrays]
        lengths = {name: on_host(name, given[name]) for name in on_host_alone}
        starts = {name: lengths.pop(name) for name in _STARTS if name in lengths}
        others = {name: value for name, value in given.items() if name not in LENGTHS}
        # These names are fields of a Problem, which checks the values.
        named = cast(OptionFields, others | lengths)
        return cls(named, shapes_of, starts, arrays, mask, seed, offset, paged, numbers)

    def problem(self, *shapes: Any, dtype: str, kv_dtype: str | None = None) -> Problem:
        """Return the ``Problem`` of a call. ``shapes`` are the shapes of q, k and v.

        ``dtype`` is the dtype of q. ``kv_dtype`` is the dtype of k and v, or None for ``dtype``.
        Raises ValueError if the options do not match the shapes.
        """
        own = self.shapes
        slopes, sinks = own.get("alibi_slopes"), own.get("sinks")
        problem = Problem.from_shapes(
            *shapes,
            dtype=dtype,
            kv_dtype=kv_dtype,
            cu_seqlens_q=self.starts.get("cu_seqlens_q"),
            cu_seqlens_k=self.starts.get("cu_seqlens_k"),
            attn_mask=own.get("attn_mask"),
            block_table=self.paged.shape,
            bias=own.get("bias"),
            alibi=slopes is not None,
            sinks=sinks is not None,
            sparse=self.block_mask is not None,
            block_scales=any(len(own.get(name, ())) == 3 for name in ("q_scale", "k_scale")),
            value_block_scales=len(own.get("v_scale", ())) == 3,
            **self.fields,
        )
        checks.check_heads(problem.batch, problem.heads_q, slopes, sinks)
        self._check_scales(problem)
        if "kv_lens" in self.arrays:
            shape = self.arrays["kv_lens"].shape
            checks.check_shape("kv_lens", shape, (problem.batch,), of=checks.PER_ENTRY)
        if self.paged.checked is not None:
            table, lens = self.paged.checked
            check_table(table, lens, cast(int, problem.pages), cast(int, problem.page_size))
        if isinstance(self.block_mask, BlockMask):
            self.block_mask.check(problem)
        return problem

    def _check_scales(self, problem: Problem) -> None:
        """Raise ValueError unless scales are given for e4m3 arrays only, and fit their heads."""
        for name, (heads, rows) in SCALES.items():
            if name not in self.shapes and name not in self.numbers:
                continue
            if problem.kv_dtype and name != "q_scale":
                if name in self.shapes:
                    pages = problem.pages or 0, problem.heads_k
                    of = ", one scale for each page and head"
                    checks.check_shape(name, self.shapes[name], pages, of=of)
                continue
            if not DTYPES[problem.dtype].scaled:
                raise ValueError(
                    f"{name} must be None for inputs of {problem.dtype}, got a scale; only arrays "
                    "of float8_e4m3fn have scales"
                )
            if name in self.shapes:
                blocks = ceil_div(getattr(problem, rows), SCALED_ROWS)
                sizes = problem.batch, getattr(problem, heads), blocks
                checks.check_scales(name, self.shapes[name], sizes, SCALED_ROWS)

    def check_mask(self, problem: Problem, given: Any, tiles: Tiles) -> None:
        """Raise an error unless a block mask that is an array has one element for each tile.

        ``tiles`` are the tiles of the plan. ``given`` is the argument ``tiles`` of the caller,
        which is required for such a block mask.
        """
        if self.block_mask is None or isinstance(self.block_mask, BlockMask):
            return
        if given is None:
            raise ValueError(
                "block_mask needs tiles, because tiles.Br and tiles.Bc are the size of the blocks; "
                "pass tiles=Tiles(Br=..., Bc=...)"
            )
        check_block_mask(self.block_mask, problem, tiles)

    def at(self, ordinal: int, tiles: Tiles) -> Binding:
        """Return the binding with the arrays of a ``BlockMask`` that kernels read for ``tiles``.

        The arrays are on the GPU ``ordinal``, or on the host if ``ordinal`` is HOST.
        """
        if not isinstance(self.block_mask, BlockMask):
            return self
        found = self.block_mask.lists.at(ordinal, BlockSize(tiles.Br, tiles.Bc))
        return replace(self, arrays={**self.arrays, **found})

    def visited(self, problem: Problem, tiles: Tiles) -> np.ndarray | None:
        """Return an array of bool on the host that says which tiles of S a call visits.

        Return None if the call has no block mask.
        """
        mask = self.block_mask
        if isinstance(mask, BlockMask):
            return mask.visited_tiles(problem, tiles)
        return None if mask is None else np.array(mask)  # a plan keeps it

    @property
    def seeds(self) -> dict[str, int]:
        """The seed and the offset of dropout as 32-bit words, by the names that kernels use."""
        return dict(zip(SEEDS, seed_words(self.seed, self.offset), strict=True))

    def values(
        self, problem: Problem, given: Mapping[str, Any], score_unit: float
    ) -> dict[str, object]:
        """Return the fields of the kernels' last argument, ``options``, by name.

        The result has fields only for options that the call uses. ``given`` maps names to arrays
        and numbers that launches take, such as "bias", "dL" or "seed_low". Kernels multiply the
        scores by ``score_unit``: log2(e) if they compute exponentials as powers of 2, else 1.
        """
        given = {**given, **self.numbers}
        mask: Any = self.block_mask
        call = Bound(problem, given, score_unit, mask, self.paged.table)
        values: dict[str, object] = {}
        mod = problem.score_mod
        features = Features.of(
            problem,
            splits="kv_splits" in given,
            dbias="dbias" in given,
            dcaptured=mod if mod and any(x in given for x in mod.differentiated) else None,
            dlse="dL" in given,
            scaled_dout="dout_power" in given,
        )
        for name, passed in features.passed.items():
            value = passed.value(call)
            if isinstance(value, np.ndarray):
                value = sent(value)
            values[name] = (
                value if passed.shape is None else device.broadcast(value, passed.shape(call))
            )
        return values


def _used(name: str, option: str, mod: Any) -> str:
    """Return the text by which error messages name a captured array.

    ``name`` is the variable in the caller's function ``mod`` that contains the array. ``option`` is
    the argument that takes the function, such as "score_mod".
    """
    return f"{name} in {option}, {mod},"


def paging(block_table: Any, kv_lens: Any, check_table: Any, *, shapes: bool = False) -> Paging:
    """Return the ``Paging`` of the options ``block_table``, ``kv_lens`` and ``check_table``.

    With ``shapes``, ``block_table`` may be the shape of a table. Raises ValueError for a table
    without lengths, and TypeError or ValueError for an invalid table or ``check_table``.
    """
    reads_back = as_flag("check_table", check_table)
    if block_table is None:
        if reads_back:
            raise ValueError("check_table must be False without a block_table, got True")
        return Paging()
    if shapes:
        check_unmasked("block_table", block_table)
        return Paging(as_shape("block_table", getattr(block_table, "shape", block_table)))
    if kv_lens is None:
        raise ValueError(
            "block_table needs kv_lens, integers of shape (batch,): the number of keys of each "
            "sequence; pass both"
        )
    given = {"block_table": block_table, "kv_lens": kv_lens}
    on_gpu = [name for name, array in given.items() if lies_on_gpu(array)]
    host = None
    if "block_table" not in on_gpu:
        host = as_table(on_host("block_table", block_table))
    arrays = {name: operand(name, given[name], INTEGERS) for name in on_gpu}
    shape = arrays["block_table"].shape if host is None else host.shape
    if on_gpu and not reads_back:
        return Paging(shape, host, arrays)
    read = as_table(on_host("block_table", block_table)) if host is None else host
    return Paging(shape, host, arrays, (read, on_host("kv_lens", kv_lens)))


def score_scale(problem: Problem, score_unit: float) -> float:
    """Return the factor by which kernels multiply the products of Q and K.

    Normally this is ``scale * score_unit``. ``score_unit`` is log2(e) for kernels that compute
    exponentials as powers of 2, and 1 for other kernels. With a ``score_mod`` the factor is
    ``scale``, because kernels apply ``score_unit`` after the function. With ``softcap``, the factor
    is ``scale / softcap``: the product is then the argument of tanh.
    """
    if problem.softcap is not None:
        return problem.scale / problem.softcap
    return problem.scale * unit_before_score_mod(problem, score_unit)


def pack(kernel: device.Kernel, values: Mapping[str, Any]) -> tuple:
    """Return the last argument of a kernel, the named tuple ``options``.

    The tuple contains only the ``values`` for which the kernel was compiled.
    """
    ty = kernel.argument_types[-1]
    return ty.instance_class(*(values[name] for name in ty.fields))


def seed_words(seed: int, offset: int) -> tuple[int, int, int]:
    """Return the low and the high word of ``seed``, and ``offset``, as signed 32-bit integers."""
    return signed(seed & 0xFFFFFFFF), signed(seed >> 32), signed(offset)


def sent(array: np.ndarray) -> Any:
    """Return a small host array as a launch argument.

    If a GPU runs the call, the array is copied to the GPU. The last 64 copies are cached.
    """
    if not device.on_gpu():
        return array
    key = (array.tobytes(), array.dtype.str, array.shape)
    return _on_gpu(device.current_ordinal(), *key)


@functools.lru_cache(maxsize=64)
def _on_gpu(ordinal: int, content: bytes, dtype: str, shape: tuple[int, ...]) -> Any:
    return device.argument(device.to_gpu(np.frombuffer(content, dtype).reshape(shape)))
