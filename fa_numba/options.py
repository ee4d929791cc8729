"""The options of attention: what a caller names, what a kernel is compiled for, what it is passed.

An option is on only where a caller gives it, and a kernel has an argument only for those that are
on: a plain call compiles to the plain kernel. Three places here say all about one: its entry in
``AttentionOptions`` (name, type and what ``help`` prints), the flag in ``Features`` that a kernel
is compiled with, and the entry in ``FEATURES`` (when the flag is on, what the kernel is passed).
The value itself is checked in ``problem``, whose field it is.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections import namedtuple
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple, TypedDict, TypeVar

import numpy as np
from numba import types

from fa_numba.device import array_type
from fa_numba.dtypes import PRECISIONS
from fa_numba.mods import Mod, Text, slope_of
from fa_numba.problem import UNBOUNDED, Problem


class AttentionOptions(TypedDict, total=False):
    """What changes the result; the same for every function, forward and backward.

    None stands for an option that is not given.

    ``scale``: float, multiplies the scores; 1/sqrt(d) unless given.
    ``causal``: bool, row i sees the columns j <= i + Nk - Nq.
    ``window``: (left, right), row i sees i + Nk - Nq - left <= j <= i + Nk - Nq + right; -1 or None
        leaves a side open. Tiles wholly outside are not visited.
    ``softcap``: float c, scores become c tanh(s / c), before biases and masks; 0 is no cap.
    ``score_mod``: a Python function, scores become score_mod(score, b, h, i, j): after scale and
        softcap, before biases and masks, float32, in natural units. b is the batch entry or the
        number of the sequence, h the query head, i and j the row and the column within it, ints
        from 0: with lengths those of valid rows and columns, so that row i is aligned to column
        i + Nk - Nq of them, as ``causal`` is. It may assign names, and returns one expression of
        arithmetic, comparisons, conditional expressions, ``math``, min, max and abs; and may take
        numbers, and float32, int32 and bool arrays by an index for each axis, from outside. Numbers
        are arguments of the kernel: another value compiles nothing. Arrays lie where q does, and
        are read there. It is evaluated for every row and column of a visited tile, hidden ones too,
        and an index has to be within its array: from 0, none counts from the end.
    ``score_mod_grad``: a function like it that gives its derivative with respect to the score, for
        the backward pass; made from ``score_mod`` unless given.
    ``mask_mod``: such a function of (b, h, i, j), whether row i sees column j. It costs no memory;
        every tile is visited that other options do not leave out; ``create_block_mask`` finds those
        of which it hides everything, or nothing.
    ``bias``: float32 array that broadcasts to (B, Hq, Nq, Nk), added to the scores.
    ``attn_mask``: bool array that broadcasts to (B, Hq, Nq, Nk), True where a column takes part; or
        numbers in float32, float16 or bfloat16 that are added to the scores. It becomes a float32
        bias of the mask's shape, 4 bytes an element, and excludes ``bias``. A causal mask, a window
        or a block mask costs no memory and leaves tiles out.
    ``alibi_slopes``: float32 (Hq,) or (B, Hq), adds -slope |i + Nk - Nq - j| to the scores.
    ``sinks``: float32 (Hq,), a logit s that each row of a head has beside its scores, with no value
        of its own: l and lse have e^s in their sums (attention sinks; s = 0 is "softmax off by
        one"). A row that sees no column has O = 0 and lse = s. -inf is none.
    ``q_lens``, ``kv_lens``: integers (B,), the valid rows of each batch entry. What comes after is
        neither read nor seen; its output and gradients are 0. Nq and Nk above are then the valid
        ones. On a GPU they are read back to be checked: the call waits for them.
    ``block_table``: integers (B, pages of a sequence): k and v are pages of a cache that sequences
        share, (pages, Hk, page_size, d), or (pages, page_size, Hk, d) with ``layout="bnhd"``, and
        rows n page_size to (n + 1) page_size - 1 of sequence b lie in page ``block_table[b, n]``.
        Pages have 16 to 256 rows, a multiple of 16. ``kv_lens`` says how many keys a sequence has;
        what the table and the pages hold after them is not read. FlashAttention-2 forward alone.
        Table and lengths on the host are checked. Int32 arrays on a GPU are used where they lie
        and not read back: the caller answers for them, and may change them before a graph that
        captured the call is replayed.
    ``check_table``: bool, True reads a table and lengths on a GPU back to check them too; the call
        waits for that.
    ``cu_seqlens_q``, ``cu_seqlens_k``: integers (B + 1,), cumulative lengths of sequences that lie
        one after the other: q is (total, Hq, d), k and v (total, Hk, d), lse (Hq, total). With a
        ``block_table`` k and v are pages and ``cu_seqlens_q`` stands alone, beside ``kv_lens``.
    ``block_mask``: bool (ceil(Nq / Br), ceil(Nk / Bc)), or that with leading axes that broadcast to
        (B, Hq), for the block sizes of ``tiles``, which must be given: False blocks are neither
        loaded nor computed (block-sparse FlashAttention; standard attention computes and hides). Or
        what ``create_block_mask`` gives, which has tiles and a ``mask_mod`` of its own.
    ``dropout_p``: float from 0 to below 1, the probability that an element of P becomes 0,
        rounded to a multiple of 2^-16; the rest are multiplied by 1 / (1 - dropout_p). 0 unless
        given.
    ``seed``, ``offset``: ints from 0 to below 2**64 and 2**32: with them the element's (batch,
        head, row, column) decides alone, see ``dropout_mask``. 0 unless given.
    ``layout``: "bhnd" for q (B, Hq, Nq, d), k and v (B, Hk, Nk, d), unless given; "bnhd" for q
        (B, Nq, Hq, d), k and v (B, Nk, Hk, d). Outputs and gradients have it too; lse does not.
    ``precision``: how products of float32 matrices are computed. "ieee", unless given, in float32
        on CUDA cores. On tensor cores, an element as a sum of 16-bit ones: "fp16x3" of two
        float16, three products, forward; "bf16x6" of three bfloat16, six products; "bf16x3" of two
        bfloat16, three products, 2^-16 of each element is lost. Sums are in float32 in all. Forward
        in both orders, backward FlashAttention-2, without ``deterministic``.
    """

    scale: float | None
    causal: bool | None
    window: tuple[int | None, int | None] | None
    softcap: float | None
    score_mod: Any
    score_mod_grad: Any
    mask_mod: Any
    bias: Any
    attn_mask: Any
    alibi_slopes: Any
    sinks: Any
    q_lens: Any
    kv_lens: Any
    block_table: Any
    check_table: bool | None
    cu_seqlens_q: Any
    cu_seqlens_k: Any
    block_mask: Any
    dropout_p: float | None
    seed: int | None
    offset: int | None
    layout: str | None
    precision: str | None


NAMES = tuple(AttentionOptions.__annotations__)
# What other libraries call an option, where no name here is near it or another one is nearer.
_ELSEWHERE = {
    "softmax_scale": "scale",
    "is_causal": "causal",
    "window_size": "window",
    "local_window_size": "window",
    "mask": "attn_mask",
    "logits_soft_cap": "softcap",
    "cache_seqlens": "kv_lens",
    "seqused_k": "kv_lens",
    "page_table": "block_table",
    "query_seq_lengths": "q_lens",
    "key_value_seq_lengths": "kv_lens",
    "return_attn_probs": "return_lse",
    "return_residual": "return_lse",
}

# --- what the public functions say of them ---------------------------------------------------

_Function = TypeVar("_Function", bound=Callable)
_functions: list[Callable] = []  # those that take the options


def documents_options(function: _Function) -> _Function:
    """Append the options' documentation to that of a public function that takes them."""
    _functions.append(function)
    about = inspect.cleandoc(AttentionOptions.__doc__ or "").partition("\n\n")[2]
    text = inspect.cleandoc(function.__doc__ or "")
    function.__doc__ = f"{text}\n\nOptions, as in ``fa_numba.AttentionOptions``. {about}\n"
    return function


def check_names(names: Iterable[str]) -> None:
    """Raise TypeError for a name that is no option, which says who has it or what is near it."""
    for name in names:
        if name not in NAMES:
            raise TypeError(f"{name} is no option{_hint(name)}: allowed are {', '.join(NAMES)}")


def _hint(name: str) -> str:
    owners: dict[str, list[str]] = {}
    for function in _functions:
        parameters = inspect.signature(function).parameters
        # Those that launch: the others hand on what they are given.
        for parameter in parameters.values() if "stream" in parameters else ():
            if parameter.kind is parameter.KEYWORD_ONLY:
                owners.setdefault(parameter.name, []).append(function.__name__)
    if name in owners:
        return f" here ({', '.join(owners[name])} {'have' if owners[name][1:] else 'has'} it)"
    elsewhere = [_ELSEWHERE[name]] if name in _ELSEWHERE else []
    near = elsewhere or difflib.get_close_matches(name, [*NAMES, *owners], n=1)
    return f" (did you mean {near[0]}?)" if near else ""


# --- what kernels are passed -----------------------------------------------------------------

_int32, _float32 = types.int32, types.float32


class Bound(NamedTuple):
    """A call whose kernels' arguments are wanted.

    ``given`` are launch arguments by name: of ``bias``, ``dbias``, ``dL``, ``alibi_slopes``,
    ``sinks``, ``seed_low``, ``seed_high``, ``offset``, ``kv_splits`` and what splits leave those
    that there are, ``L``, ``block_table`` and ``kv_lens`` where they lie on the GPU, what the
    caller's functions capture, and the lists of a ``BlockMask``. The scores are computed times
    ``unit``, which is log2(e) where exponentials are powers of two; up to a ``score_mod`` in
    natural units.
    """

    problem: Problem
    given: Mapping[str, Any]
    unit: float
    block_mask: np.ndarray | None = None
    block_table: np.ndarray | None = None


@dataclass(frozen=True)
class KernelField:
    """One field of a kernel's last argument: its Numba type and its value in a call.

    A NumPy array as value is sent to the device. With ``shape`` an array is seen with that shape,
    axes of length 1 repeated.
    """

    type: Any
    value: Callable[[Bound], Any]
    shape: Callable[[Bound], tuple[int, ...]] | None = None


@dataclass(frozen=True)
class Feature:
    """When a feature is on (or which one a kernel is compiled for), what it passes to a kernel by
    name, or a function of which one it is that says so, whether visible scores are then more than
    scale Q KT, and the name that it has as an argument, where that is another one than the flag's.
    """

    on: Callable[[Problem], bool | int | str | Mod | None]
    passes: Mapping[str, KernelField] | Callable[[Any], Mapping[str, KernelField]] = field(
        default_factory=dict
    )
    changes_scores: bool = False
    argument: str = ""


def _given(name: str, ty: Any, shape: Callable[[Bound], tuple[int, ...]] | None = None):
    return KernelField(ty, lambda call: call.given[name], shape)


def _scores(call: Bound) -> tuple[int, ...]:
    return call.problem.score_shape


def _heads(call: Bound) -> tuple[int, ...]:
    return call.problem.score_shape[:2]


def _lengths(name: str) -> KernelField:
    def value(call: Bound) -> Any:
        if name in call.given:
            return call.given[name]
        return np.array(getattr(call.problem, name), np.int32)

    return KernelField(array_type(1, _int32), value)


def _block_table(call: Bound) -> Any:
    return call.given.get("block_table", call.block_table)


def _starts(name: str) -> KernelField:
    """Where the sequences of these lengths begin, and where the last one ends."""
    return KernelField(
        array_type(1, _int32),
        lambda call: np.cumsum((0, *getattr(call.problem, name)), dtype=np.int32),
    )


_NUMBERS = {"int32": _int32, "float32": _float32, "bool": _int32}
_ELEMENTS = {"int32": _int32, "float32": _float32, "bool": types.uint8}


def _captured(mod: Mod) -> dict[str, KernelField]:
    """What a function of the caller's captures."""
    found = {}
    for name, kind in zip(mod.fields, mod.captures, strict=True):
        element, _, axes = kind.rstrip("]").partition("[")
        ty = array_type(int(axes), _ELEMENTS[element]) if axes else _NUMBERS[element]
        found[name] = _given(name, ty)
    return found


def _gradients(mod: Mod) -> dict[str, KernelField]:
    """The gradients of the float32 arrays that a function captures, those of one axis as a row."""

    def seen(name: str) -> Callable[[Bound], tuple[int, ...]]:
        return lambda call: (1, *call.given[name].shape)[-max(2, len(call.given[name].shape)) :]

    found = {}
    for name, of in mod.differentiated.items():
        axes = _captured(mod)[of].type.ndim
        found[name] = _given(name, array_type(max(2, axes)), seen(name))
    return found


def score_unit(problem: Problem, unit: float) -> float:
    """The unit of the scores up to a ``score_mod``: a function of the caller's has natural ones."""
    return unit if problem.score_mod is None else 1.0


def _softcap(call: Bound) -> float:
    return (call.problem.softcap or 0.0) * score_unit(call.problem, call.unit)


def _of_blocks(name: str, ty: Any, made: Callable[[Bound], np.ndarray]) -> KernelField:
    """What a ``BlockMask`` has, or what is ``made`` of an array of blocks."""

    def value(call: Bound) -> Any:
        return call.given[name] if name in call.given else made(call)

    def shape(call: Bound) -> tuple[int, ...]:
        return *_heads(call), *value(call).shape[-2:]

    return KernelField(array_type(4, ty), value, shape)


def _next_blocks(axis: int) -> Callable[[Bound], np.ndarray]:
    """Along a block row's columns, or a block column's rows, the number of the first block from
    each on that is visited; and of the end how many there are.
    """

    def made(call: Bound) -> np.ndarray:
        visited = np.moveaxis(np.asarray(call.block_mask, bool), axis, -1)
        count = visited.shape[-1]
        numbers = np.where(visited, np.arange(count, dtype=np.int32), np.int32(count))
        ends = np.full((*visited.shape[:-1], 1), count, np.int32)
        along = np.concatenate((numbers, ends), -1)[..., ::-1]
        return np.ascontiguousarray(np.minimum.accumulate(along, -1)[..., ::-1])

    return made


def _states(call: Bound) -> np.ndarray:
    """A number for each block: 0 is not visited."""
    return np.array(call.block_mask, np.uint8, order="C")


def _side(name: str) -> KernelField:
    def value(call: Bound) -> int:
        side = getattr(call.problem, name)
        return UNBOUNDED if side is None else side

    return KernelField(_int32, value)


# What planes of Q, K, V and dO of a head are to be multiplied by, where they are scaled.
POWERS = ("q_power", "k_power", "v_power", "dout_power")


def _powers(names: Iterable[str]) -> dict[str, KernelField]:
    return {name: _given(name, array_type(2)) for name in names}


# By the name of a flag in ``Features``. All threads of a block read an integer array at one place.
FEATURES: dict[str, Feature] = {
    "causal": Feature(lambda p: p.causal and p.window == (-1, -1)),
    "window": Feature(
        lambda p: p.window != (-1, -1),
        {"window_left": _side("left"), "window_right": _side("right")},
    ),
    "softcap": Feature(
        lambda p: p.softcap is not None,
        {"softcap": KernelField(_float32, _softcap)},
        changes_scores=True,
    ),
    "score_mod": Feature(lambda p: p.score_mod, _captured, changes_scores=True),
    "score_mod_grad": Feature(lambda p: p.score_mod_grad, _captured),
    "mask_mod": Feature(lambda p: p.mask_mod, _captured),
    "bias": Feature(
        lambda p: p.bias is not None,
        {"bias": _given("bias", array_type(4), _scores)},
        changes_scores=True,
    ),
    "splits": Feature(
        lambda p: False,
        {
            "kv_splits": _given("kv_splits", _int32),
            "A": _given("A", array_type(5)),
            "l": _given("l", array_type(4)),
            "m": _given("m", array_type(4)),
        },
        argument="kv_splits",
    ),
    "dbias": Feature(
        lambda p: False,
        {"dbias": _given("dbias", array_type(4), _scores)},
        argument="return_dbias",
    ),
    "dcaptured": Feature(lambda p: None, _gradients, argument="return_dcaptured"),
    "dlse": Feature(
        lambda p: False,
        {"dL": _given("dL", array_type(3)), "L": _given("L", array_type(3))},
    ),
    "alibi": Feature(
        lambda p: p.alibi,
        {"slopes": _given("alibi_slopes", array_type(2), _heads)},
        changes_scores=True,
        argument="alibi_slopes",
    ),
    "sinks": Feature(lambda p: p.sinks, {"sinks": _given("sinks", array_type(1))}),
    "q_lens": Feature(
        lambda p: p.q_lens is not None and not p.packed, {"q_lens": _lengths("q_lens")}
    ),
    "kv_lens": Feature(
        lambda p: p.pages is not None or (p.kv_lens is not None and not p.packed),
        {"kv_lens": _lengths("kv_lens")},
    ),
    "page_size": Feature(
        lambda p: p.page_size or 0,
        {"block_table": KernelField(array_type(2, _int32), _block_table)},
        argument="block_table",
    ),
    "packed": Feature(
        lambda p: p.packed,
        {"q_starts": _starts("q_lens"), "k_starts": _starts("kv_lens")},
        argument="cu_seqlens_q",
    ),
    "sparse": Feature(
        lambda p: p.sparse,
        {
            "block_mask": _of_blocks("block_mask", types.uint8, _states),
            "next_column": _of_blocks("next_column", _int32, _next_blocks(-1)),
            "next_row": _of_blocks("next_row", _int32, _next_blocks(-2)),
        },
        argument="block_mask",
    ),
    "dropout": Feature(
        lambda p: p.dropout_p > 0.0,
        {
            "threshold": KernelField(
                _int32, lambda call: signed(drop_threshold(call.problem.dropout_p) << 16)
            ),
            "inverse_keep": KernelField(
                _float32, lambda call: 1.0 / (1.0 - call.problem.dropout_p)
            ),
            "seed_low": _given("seed_low", _int32),
            "seed_high": _given("seed_high", _int32),
            "offset": _given("offset", _int32),
        },
        argument="dropout_p",
    ),
    "precision": Feature(
        lambda p: "" if p.precision == "ieee" else p.precision,
        lambda precision: _powers(POWERS[:3]) if PRECISIONS[precision].scaled else {},
    ),
    "scaled_dout": Feature(lambda p: False, _powers(POWERS[3:]), argument="precision"),
}


def argument_of(flag: str) -> str:
    """What callers call a flag of ``Features``."""
    return FEATURES[flag].argument or flag


# What blocks that share a row tile leave of their columns: O not yet divided by l, l and m.
SPLIT_SUMS = ("A", "l", "m")
# Arrays whose elements all threads of a block read together, over and over: not part of the counts
# of accesses.
UNIFORM = (
    *("slopes", "sinks", "q_lens", "kv_lens", "q_starts", "k_starts"),
    *("block_mask", "next_column", "next_row"),
)


@dataclass(frozen=True)
class Features:
    """Which options a kernel is compiled for. ``causal`` where no ``window`` has the bound;
    ``page_size`` is 0 where K and V are no pages, ``precision`` empty for "ieee"; of a caller's
    function its ``Mod`` is here, and in ``dcaptured`` that of which gradients are asked for.
    """

    causal: bool = False
    window: bool = False
    softcap: bool = False
    score_mod: Mod | None = None
    score_mod_grad: Mod | None = None
    mask_mod: Mod | None = None
    bias: bool = False
    splits: bool = False
    dbias: bool = False
    dcaptured: Mod | None = None
    dlse: bool = False
    alibi: bool = False
    sinks: bool = False
    q_lens: bool = False
    kv_lens: bool = False
    page_size: int = 0
    packed: bool = False
    sparse: bool = False
    dropout: bool = False
    precision: str = ""
    scaled_dout: bool = False

    @classmethod
    def of(cls, problem: Problem, **of_call: Any) -> Features:
        """The features of ``problem``, and those of the call, by name."""
        on: dict[str, Any] = {name: feature.on(problem) for name, feature in FEATURES.items()}
        return cls(**on | of_call)

    @property
    def planes(self) -> int:
        """16-bit matrices whose sum Q, K and V are each."""
        return PRECISIONS[self.precision or "ieee"].planes

    @property
    def scaled(self) -> bool:
        """Whether these are scaled."""
        return PRECISIONS[self.precision or "ieee"].scaled

    @property
    def right(self) -> bool:
        """Whether a row's columns have an end of their own."""
        return self.causal or self.window

    @property
    def lengths(self) -> bool:
        """Whether the batch entries have lengths of their own."""
        return self.q_lens or self.kv_lens or self.packed

    @property
    def changes_scores(self) -> bool:
        """Whether some option makes visible scores another function than scale Q KT."""
        return any(getattr(self, name) for name, f in FEATURES.items() if f.changes_scores)

    @property
    def calls(self) -> bool:
        """Whether there are functions of the caller's."""
        return self.score_mod is not None or self.mask_mod is not None

    @property
    def slopes(self) -> bool:
        """Whether some option makes the scores' derivative another one than scale."""
        return self.softcap or self.slope_of is not None

    @property
    def slope_of(self) -> Mod | None:
        """The function whose slope the scores have, if it is another one than 1."""
        return slope_of(self.score_mod, self.score_mod_grad)

    @property
    def without_sums(self) -> Features:
        """Those of the kernel that makes dQ alone, which adds to no gradient of an option."""
        return replace(self, dbias=False, dcaptured=None)

    @property
    def keeps_scores(self) -> bool:
        """Whether gradients of what a function captures depend on the scores that it is given."""
        return bool(self.dcaptured and self.dcaptured.gradient and self.dcaptured.gradient.of_score)

    @property
    def scores_stay(self) -> bool:
        """Whether scale Q KT itself is kept until dS, by Hopper's backward kernels: a function of
        the caller's changes it, and slopes, gradients of what that captures, or what is added to
        the scores behind it are made with dS, element by element, which spills least.
        """
        beside = self.slopes or self.alibi or self.bias or self.dcaptured is not None
        return self.score_mod is not None and beside

    @property
    def given(self) -> Text:
        """The function whose score those that stay are at once, by its factor and what is done
        first with that, if it and its slope alone are made of them; else none, and they stay by
        their scale.
        """
        mod, others = self.score_mod, self.softcap or self.keeps_scores
        return Text() if mod is None or self.score_mod_grad or others else mod.both

    @property
    def crowds(self) -> bool:
        """Whether some option holds registers of its own throughout the loops."""
        beside: dict[str, Any] = dict.fromkeys(
            ("causal", "dropout", "splits", "dlse", "sinks", "scaled_dout"), False
        )
        return replace(self, **beside) != PLAIN

    @property
    def initialises(self) -> bool:
        """Whether some row tile may have no first pass over K/V that could start it."""
        return self.window or self.q_lens or self.sparse

    @property
    def arguments(self) -> dict[str, Any]:
        """Names and Numba types of what these features pass to a kernel."""
        return {name: passed.type for name, passed in self.passed.items()}

    @property
    def passed(self) -> dict[str, KernelField]:
        """What these features pass to a kernel, by name."""
        found: dict[str, KernelField] = {}
        for flag in (f.name for f in fields(self) if getattr(self, f.name)):
            passes = FEATURES[flag].passes
            found |= passes(getattr(self, flag)) if callable(passes) else passes
        if self.page_size:  # whose rows the block table finds
            found.pop("k_starts", None)
        return found

    @property
    def argument_type(self):
        """Numba's type of the kernels' last argument, ``options``."""
        return types.NamedTuple(list(self.arguments.values()), _tuple_class(tuple(self.arguments)))


PLAIN = Features()


@functools.cache
def _tuple_class(names: tuple[str, ...]):
    return namedtuple("Options", names)


def as_word(name: str, value: Any, bits: int) -> int:
    """``value`` as an unsigned integer of ``bits`` bits, or an error that calls it ``name``."""
    allowed = f"allowed is an integer from 0 to below 2**{bits}"
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} is {value!r}: {allowed}")
    if not 0 <= value < 2**bits:
        raise ValueError(f"{name} is {value!r}: {allowed}")
    return int(value)


def signed(word: int) -> int:
    """The 32-bit integer that has the bits of ``word``, as kernels take it."""
    return word - 2**32 if word >= 2**31 else word


def drop_threshold(dropout_p: float) -> int:
    """16 random bits below it drop their element: ``dropout_p`` of 2**16."""
    return round(dropout_p * 2**16)
