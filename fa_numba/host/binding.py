"""A call's options: from what the caller gave to a Problem's fields and a kernel's arguments."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fa_numba import device
from fa_numba.host.arrays import Operand, on_host, operand
from fa_numba.options import UNIFORM, AttentionOptions, as_word, drop_threshold
from fa_numba.problem import UNBOUNDED, Problem, check_block_mask
from fa_numba.tiling import Tiles

LOG2E = math.log2(math.e)

_ALLOWED = tuple(AttentionOptions.__annotations__)
_SEEDS = ("seed_low", "seed_high", "offset")
_LENGTHS = ("q_lens", "kv_lens", "cu_seqlens_q", "cu_seqlens_k")
_OPTIONAL = (*_LENGTHS, "scale", "softcap", "bias", "alibi_slopes", "block_mask")


@dataclass(frozen=True)
class Binding:
    """The options of one call.

    ``facts`` are a Problem's fields, ``arrays`` the operands among the options by name,
    ``block_mask`` is on the host.
    """

    facts: dict[str, Any]
    arrays: dict[str, Operand]
    block_mask: np.ndarray | None
    seed: int
    offset: int

    @classmethod
    def of(cls, options: Mapping[str, Any], *, shapes: bool = False) -> Binding:
        """What ``options`` ask for; with ``shapes`` arrays may be given as their shapes.

        Raises TypeError or ValueError for an option that there is not, or a value that is none.
        """
        for name in options:
            if name not in _ALLOWED:
                raise TypeError(f"{name} is no option: allowed are {', '.join(_ALLOWED)}")
        given = {n: x for n, x in options.items() if x is not None or n not in _OPTIONAL}
        arrays: dict[str, Operand] = {}
        facts: dict[str, Any] = {}
        for name, fact in (("bias", "bias"), ("alibi_slopes", "alibi")):
            if name in given:
                array = given.pop(name)
                if shapes:
                    facts[fact] = tuple(getattr(array, "shape", array))
                else:
                    arrays[name] = operand(name, array)
                    facts[fact] = arrays[name].shape
        facts["alibi_shape"] = facts.pop("alibi", None)
        mask = given.pop("block_mask", None)
        if mask is not None:
            mask = on_host("block_mask", mask)
        facts["sparse"] = mask is not None
        seed = as_word("seed", given.pop("seed", 0), 64)
        offset = as_word("offset", given.pop("offset", 0), 32)
        for name in _LENGTHS:
            if name in given:
                facts[name] = on_host(name, given.pop(name))
        facts |= given
        return cls(facts, arrays, mask, seed, offset)

    def problem(self, *shapes: Any, dtype: str) -> Problem:
        """The Problem of q, k and v with these shapes."""
        facts = dict(self.facts)
        slopes = facts.pop("alibi_shape")
        problem = Problem.from_shapes(*shapes, dtype=dtype, alibi=slopes is not None, **facts)
        allowed = ((problem.heads_q,), (problem.batch, problem.heads_q))
        if slopes is not None and slopes not in allowed:
            raise ValueError(
                f"alibi_slopes has shape {slopes}: allowed is {allowed[0]} or {allowed[1]}"
            )
        return problem

    def check_mask(self, problem: Problem, given: Any, tiles: Tiles) -> None:
        """Raise unless the block mask is one for ``tiles``, which must be ``given``."""
        if self.block_mask is None:
            return
        if given is None:
            raise ValueError(
                "block_mask is given without tiles: its blocks are tiles=Tiles(Br, Bc)"
            )
        check_block_mask(self.block_mask, problem, tiles)

    @property
    def seeds(self) -> tuple[int, int, int]:
        """The words that dropout draws from."""
        return seed_words(self.seed, self.offset)

    def named(self, given: Sequence[Any]) -> dict[str, Any]:
        """Launch arguments by name from those of ``arrays`` and ``seeds``, in this order."""
        return dict(zip((*self.arrays, *_SEEDS), given, strict=True))

    def values(self, problem: Problem, given: Mapping[str, Any], unit: float) -> dict[str, Any]:
        """What kernels take by name. ``given`` are launch arguments, ``unit`` that of the scores.

        Lengths and masks are sent to the device.
        """
        left, right = (UNBOUNDED if n is None else n for n in (problem.left, problem.right))
        values: dict[str, Any] = {
            "window_left": left,
            "window_right": right,
            "softcap": (problem.softcap or 0.0) * unit,
            "threshold": _signed(drop_threshold(problem.dropout_p)),
            "inverse_keep": 1.0 / (1.0 - problem.dropout_p),
            **{name: given[name] for name in _SEEDS},
        }
        if problem.packed:
            values["q_starts"] = _sent(_starts(problem.q_lens))
            values["k_starts"] = _sent(_starts(problem.kv_lens))
        else:
            for name in ("q_lens", "kv_lens"):
                lengths = getattr(problem, name)
                if lengths is not None:
                    values[name] = _sent(np.array(lengths, np.int32))
        if self.block_mask is not None:
            mask = _sent(np.ascontiguousarray(self.block_mask, np.uint8))
            blocks = self.block_mask.shape[-2:]
            values["block_mask"] = device.broadcast(mask, (problem.batch, problem.heads_q, *blocks))
        if "bias" in given:
            values["bias"] = device.broadcast(given["bias"], problem.score_shape)
        if "dbias" in given:
            values["dbias"] = device.broadcast(given["dbias"], problem.score_shape)
        if "alibi_slopes" in given:
            shape = (problem.batch, problem.heads_q)
            values["slopes"] = device.broadcast(given["alibi_slopes"], shape)
        return values


def score_scale(problem: Problem, unit: float) -> float:
    """What the scores are multiplied by first: with a cap, for the argument of tanh."""
    if problem.softcap is not None:
        return problem.scale / problem.softcap
    return problem.scale * unit


def pack(kernel: device.Kernel, values: Mapping[str, Any]) -> tuple:
    """The last argument of ``kernel``: of ``values`` those that it was compiled for."""
    ty = kernel.argument_types[-1]
    return ty.instance_class(*(values[name] for name in ty.fields))


def launch(run: Any, n: int, args: tuple, values: Mapping[str, Any], stream: int) -> None:
    """Launch kernel ``n`` of ``run`` over its grid, with the options that it has."""
    kernel = run.kernels[n]
    grid = run.plan.kernels[n].grid
    device.launch(kernel, grid, (*args, pack(kernel, values)), stream, UNIFORM)


def seed_words(seed: int, offset: int) -> tuple[int, int, int]:
    """The halves of ``seed`` and ``offset`` as kernels take them."""
    return _signed(seed & 0xFFFFFFFF), _signed(seed >> 32), _signed(offset)


def _signed(word: int) -> int:
    return word - 2**32 if word >= 2**31 else word


def _starts(lengths: tuple[int, ...] | None) -> np.ndarray:
    return np.cumsum((0, *(lengths or ())), dtype=np.int32)


def _sent(array: np.ndarray) -> Any:
    """A small array as a launch argument; on a GPU the last ones are kept there."""
    if not device.on_gpu():
        return array
    key = (array.tobytes(), array.dtype.str, array.shape)
    return _on_gpu(device.current_ordinal(), *key)


@functools.lru_cache(maxsize=64)
def _on_gpu(ordinal: int, content: bytes, dtype: str, shape: tuple[int, ...]) -> Any:
    return device.argument(device.to_gpu(np.frombuffer(content, dtype).reshape(shape)))
