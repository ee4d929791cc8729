"""A call's options: from what the caller gave to a Problem's fields and a kernel's arguments."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fa_numba import checks, device, mods
from fa_numba.checks import as_flag, as_shape, as_table, check_table, check_unmasked
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
from fa_numba.mods.blocks import BlockMask, BlockSize
from fa_numba.options import Bound, Features, as_word, check_names, score_unit, signed
from fa_numba.problem import Problem, check_block_mask
from fa_numba.tiling import Tiles

LOG2E = math.log2(math.e)

_SEEDS = ("seed_low", "seed_high", "offset")
LENGTHS = ("q_lens", "kv_lens", "cu_seqlens_q", "cu_seqlens_k")
# Options that are arrays on the call's device, always in float32, and what kernels know them by.
ARRAYS = {"bias": "bias", "attn_mask": "bias"} | {n: n for n in ("alibi_slopes", "sinks")}
_SHAPES = {"alibi_slopes": "alibi_shape", "sinks": "sinks_shape"}  # facts that are checked with q's
# Integer arrays that are used where they lie on a GPU, and else go there by value.
PAGING = ("block_table", "kv_lens")


@dataclass(frozen=True)
class Binding:
    """The options of one call, checked as far as they can be without q.

    ``facts`` are what ``Problem.from_shapes`` takes of them, ``arrays`` the operands among the
    options, and ``numbers`` what functions of the caller's capture beside, by the kernels' names.
    ``block_mask`` is on the host, or a ``BlockMask``. ``block_table`` is on the host too, unless it
    is among the arrays; ``checked`` are a table and lengths whose values have to be looked at.
    """

    facts: dict[str, Any]
    arrays: dict[str, Operand]
    block_mask: np.ndarray | BlockMask | None
    seed: int
    offset: int
    block_table: np.ndarray | None = None
    checked: tuple[np.ndarray, Any] | None = None
    numbers: Mapping[str, int | float] = field(default_factory=dict)

    @classmethod
    def of(cls, options: Mapping[str, Any], *, shapes: bool = False) -> Binding:
        """What ``options`` ask for; with ``shapes`` arrays may be given as their shapes.

        None stands for an option that is not given. Raises TypeError or ValueError for a name that
        is no option, and for a value that an option cannot have.
        """
        check_names(options)
        given = {name: value for name, value in options.items() if value is not None}
        arrays: dict[str, Operand] = {}
        facts: dict[str, Any] = {}
        for name, known_as in ARRAYS.items():
            if name not in given:
                continue
            array = given.pop(name)
            if shapes:
                check_unmasked(name, array)
                facts[name] = as_shape(name, getattr(array, "shape", array))
            else:
                found = operand(name, array, MASKS if name == "attn_mask" else SUMS)
                facts[name] = found.shape
                # Given both, bias and mask are refused by what follows.
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
        numbers: dict[str, int | float] = {}
        for name in mods.PARAMETERS:
            if name not in given:
                continue
            mod, values = mods.captured(name, given.pop(name))
            facts[name] = mod
            for known_as, (own, value) in zip(mod.fields, values, strict=True):
                if not mods.is_array(value) or isinstance(value, np.generic):
                    numbers[known_as] = value
                elif not shapes:
                    arrays[known_as] = operand(_used(own, name, mod), value, CAPTURED)
        for name, shape in _SHAPES.items():
            facts[shape] = facts.pop(name, None)
        facts["sparse"] = mask is not None
        seed = as_word("seed", given.pop("seed", 0), 64)
        offset = as_word("offset", given.pop("offset", 0), 32)
        table, checked = paging(given, facts, arrays, shapes)
        for name in LENGTHS:
            if name in given:
                facts[name] = on_host(name, given.pop(name))
        facts |= given
        return cls(facts, arrays, mask, seed, offset, table, checked, numbers)

    def problem(self, *shapes: Any, dtype: str) -> Problem:
        """The Problem of q, k and v with these shapes."""
        facts = dict(self.facts)
        slopes, sinks = (facts.pop(name) for name in _SHAPES.values())
        facts |= {"alibi": slopes is not None, "sinks": sinks is not None}
        problem = Problem.from_shapes(*shapes, dtype=dtype, **facts)
        checks.check_heads(problem.batch, problem.heads_q, slopes, sinks)
        if "kv_lens" in self.arrays:
            shape = self.arrays["kv_lens"].shape
            checks.check_shape("kv_lens", shape, (problem.batch,), of=checks.PER_ENTRY)
        if self.checked is not None:
            table, lens = self.checked
            check_table(table, lens, problem.pages or 0, problem.page_size or 0)
        if isinstance(self.block_mask, BlockMask):
            self.block_mask.check(problem)
        return problem

    def check_mask(self, problem: Problem, given: Any, tiles: Tiles) -> None:
        """Raise unless an array of blocks is one for ``tiles``, which must be ``given``."""
        if self.block_mask is None or isinstance(self.block_mask, BlockMask):
            return
        if given is None:
            raise ValueError(
                "block_mask needs tiles, because tiles.Br and tiles.Bc are the size of the blocks; "
                "pass tiles=Tiles(Br=..., Bc=...)"
            )
        check_block_mask(self.block_mask, problem, tiles)

    def at(self, ordinal: int, tiles: Tiles) -> Binding:
        """Return the options with the arrays of a ``BlockMask`` for ``tiles``, on a device."""
        if not isinstance(self.block_mask, BlockMask):
            return self
        found = self.block_mask.lists.at(ordinal, BlockSize(tiles.Br, tiles.Bc))
        return replace(self, arrays={**self.arrays, **found})

    def visited(self, problem: Problem, tiles: Tiles) -> np.ndarray | None:
        """Return which ``tiles`` a call visits, on the host, or None without a block mask."""
        mask = self.block_mask
        if isinstance(mask, BlockMask):
            return mask.visited_tiles(problem, tiles)
        return None if mask is None else np.array(mask)  # a plan keeps it

    @property
    def seeds(self) -> dict[str, int]:
        """The words that dropout draws from, by the kernels' names."""
        return dict(zip(_SEEDS, seed_words(self.seed, self.offset), strict=True))

    def values(self, problem: Problem, given: Mapping[str, Any], unit: float) -> dict[str, Any]:
        """What kernels are passed for options that are on, by name (``options.Bound``)."""
        given = {**given, **self.numbers}
        call = Bound(problem, given, unit, self.block_mask, self.block_table)  # type: ignore[arg-type]
        values: dict[str, Any] = {}
        of_call = {"dbias": "dbias", "dlse": "dL", "splits": "kv_splits"}
        of_call["scaled_dout"] = "dout_power"
        on: dict[str, Any] = {flag: name in given for flag, name in of_call.items()}
        mod = problem.score_mod
        on["dcaptured"] = mod if mod and any(x in given for x in mod.differentiated) else None
        features = Features.of(problem, **on)
        for name, passed in features.passed.items():
            value = passed.value(call)
            if isinstance(value, np.ndarray):
                value = sent(value)
            values[name] = (
                value if passed.shape is None else device.broadcast(value, passed.shape(call))
            )
        return values


def _used(name: str, option: str, mod: Any) -> str:
    """What messages call an array that a caller's function captures as ``name``."""
    return f"{name} in {option}, {mod},"


def paging(
    given: dict[str, Any], facts: dict[str, Any], arrays: dict[str, Operand], shapes: bool
) -> tuple[np.ndarray | None, tuple[np.ndarray, Any] | None]:
    """Take the block table out of ``given``, and lengths on a GPU beside one.

    Gives the table if it is on the host, and table and lengths as far as they are to be checked.
    """
    reads_back = as_flag("check_table", given.pop("check_table", False))
    if "block_table" not in given:
        if reads_back:
            raise ValueError("check_table must be False without a block_table, got True")
        return None, None
    table, lens = given.pop("block_table"), given.get("kv_lens")
    if shapes:
        check_unmasked("block_table", table)
        facts["block_table"] = as_shape("block_table", getattr(table, "shape", table))
        return None, None
    if lens is None:
        raise ValueError(
            "block_table needs kv_lens, integers of shape (batch,): the number of keys of each "
            "sequence; pass both"
        )
    host, on_gpu = None, {"block_table": lies_on_gpu(table), "kv_lens": lies_on_gpu(lens)}
    if on_gpu["block_table"]:
        arrays["block_table"] = operand("block_table", table, INTEGERS)
        facts["block_table"] = arrays["block_table"].shape
    else:
        host = as_table(on_host("block_table", table))
        facts["block_table"] = host.shape
    if on_gpu["kv_lens"]:
        arrays["kv_lens"] = operand("kv_lens", given.pop("kv_lens"), INTEGERS)
    if any(on_gpu.values()) and not reads_back:
        return host, None
    read = as_table(on_host("block_table", table)) if host is None else host
    return host, (read, on_host("kv_lens", lens))


def score_scale(problem: Problem, unit: float) -> float:
    """What the scores are multiplied by first: with a cap, for the argument of tanh."""
    if problem.softcap is not None:
        return problem.scale / problem.softcap
    return problem.scale * score_unit(problem, unit)


def pack(kernel: device.Kernel, values: Mapping[str, Any]) -> tuple:
    """The last argument of ``kernel``: of ``values`` those that it was compiled for."""
    ty = kernel.argument_types[-1]
    return ty.instance_class(*(values[name] for name in ty.fields))


def seed_words(seed: int, offset: int) -> tuple[int, int, int]:
    """The halves of ``seed`` and ``offset`` as kernels take them."""
    return signed(seed & 0xFFFFFFFF), signed(seed >> 32), signed(offset)


def sent(array: np.ndarray) -> Any:
    """A small array as a launch argument; on a GPU the last ones are kept there."""
    if not device.on_gpu():
        return array
    key = (array.tobytes(), array.dtype.str, array.shape)
    return _on_gpu(device.current_ordinal(), *key)


@functools.lru_cache(maxsize=64)
def _on_gpu(ordinal: int, content: bytes, dtype: str, shape: tuple[int, ...]) -> Any:
    return device.argument(device.to_gpu(np.frombuffer(content, dtype).reshape(shape)))
