"""The options of attention: their texts, the flags of kernels, and the arguments of kernels.

An option is on only if a caller gives it. A kernel has arguments only for the options that are on,
so a call without options runs a kernel without options. Three places in this file describe an
option:

1. its entry in ``AttentionOptions``: name, type and the text that ``help`` prints. The types are in
   three base classes, because ``PlanOptions`` replaces one of them;
2. the flag in ``Features`` that a kernel is compiled with;
3. the entry in ``FEATURES``: when the flag is on, and which arguments the kernel takes for it.

The value of an option in a call is a field of ``problem.Problem``, which checks the value.
"""

from __future__ import annotations

import functools
import inspect
import re
import textwrap
from collections import namedtuple
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple, TypedDict, TypeVar, get_overloads

import numpy as np
from numba import types

from fa_numba.checks import nearest
from fa_numba.device import array_type, permuted, with_last_axis
from fa_numba.dtypes import DTYPES, PRECISIONS, SCALED_ROWS
from fa_numba.integers import ceil_div
from fa_numba.mods import Mod, Text, slope_of
from fa_numba.mods.blocks import BlockMask, next_visited
from fa_numba.problem import UNBOUNDED, Problem
from fa_numba.typing import Array, Function, Layout, Lengths, OutDtype, Precision


class _OfScores(TypedDict, total=False):
    scale: float | None
    causal: bool | None
    window: tuple[int | None, int | None] | None
    softcap: float | None
    score_mod: Function | None
    score_mod_grad: Function | None
    mask_mod: Function | None


class _Arrays(TypedDict, total=False):
    bias: Array | None
    attn_mask: Array | None
    alibi_slopes: Array | None
    sinks: Array | None
    block_table: Sequence[Sequence[int]] | Array | None
    q_scale: float | Array | None
    k_scale: float | Array | None
    v_scale: float | Array | None


class _Shapes(TypedDict, total=False):
    bias: Array | Sequence[int] | None
    attn_mask: Array | Sequence[int] | None
    alibi_slopes: Array | Sequence[int] | None
    sinks: Array | Sequence[int] | None
    block_table: Array | Sequence[int] | None
    q_scale: float | Array | Sequence[int] | None
    k_scale: float | Array | Sequence[int] | None
    v_scale: float | Array | Sequence[int] | None


class _Others(TypedDict, total=False):
    q_lens: Lengths | None
    kv_lens: Lengths | None
    check_table: bool | None
    cu_seqlens_q: Lengths | None
    cu_seqlens_k: Lengths | None
    block_mask: Array | BlockMask | None
    dropout_p: float | None
    seed: int | None
    offset: int | None
    layout: Layout | None
    precision: Precision | None
    out_dtype: OutDtype | None


class AttentionOptions(_OfScores, _Arrays, _Others, total=False):
    """The options of attention: keyword arguments that change the result.

    Every attention function takes these keyword arguments, in the forward and in the backward pass.
    A backward pass must be given the options of its forward pass. None means that an option is not
    given.

    All three algorithms take every option in both passes, on the units "simt" and "mma". Exceptions
    are named in the description of the option. Unit "wgmma" does not take every option;
    ``unit="auto"`` then takes another unit.

    In the descriptions, S are the scores and P is the softmax of S. A row is a query, and a column
    is a key. For packed sequences, seqlen_q and seqlen_k are the lengths of the longest sequence.

    Parameters
    ----------
    scale : float, default 1 / sqrt(head_dim)
        Factor of the scores: S is ``scale * q @ k.T``. It must be finite and at most about 2.36e38
        in magnitude. A factor other than 0.0 that rounds to 0 in float32 is refused.
    causal : bool, default False
        Whether row i sees only the columns ``j <= i + seqlen_k - seqlen_q``. The mask is aligned to
        the bottom right: the last row sees every column. The algorithms "fa1" and "fa2" skip tiles
        in which this mask hides everything.
    window : tuple (left, right) of int, optional
        Sliding window. Row i sees the columns from ``i + seqlen_k - seqlen_q - left`` to
        ``i + seqlen_k - seqlen_q + right``, both included. -1 or None removes the bound on that
        side. With ``causal=True``, ``right`` is taken as 0. The algorithms "fa1" and "fa2" skip
        tiles outside of the window. With a window, seqlen_q and seqlen_k must be at most 2**29.
    softcap : float, optional
        Cap c of the scores: a score s becomes ``c * tanh(s / c)``. It is applied after ``scale``
        and before all other options. It must be from 1e-30 to 1e30. 0 and None mean no cap.
    score_mod : function, optional
        Python function ``score_mod(score, b, h, i, j)`` that returns the new score. It is applied
        after ``scale`` and ``softcap``, and before ``alibi_slopes``, ``bias`` and all masks.
        ``score`` is a float32. The other arguments are integers that count from 0: ``b`` is the
        batch entry or the number of the packed sequence, ``h`` the query head, ``i`` the row and
        ``j`` the column within the sequence.
        The function is not called. Its source is read and compiled into the kernel, so it must be
        defined in a file, in a notebook cell or at Python's prompt. It may assign names, and must
        end with one ``return``. Allowed are arithmetic, comparisons, ``and``, ``or``, ``not``,
        conditional expressions, functions of ``math``, ``min``, ``max`` and ``abs``. Loops, ``if``
        statements and calls of other functions are refused.
        The function may use names from outside if these are numbers, or arrays of float32, int32 or
        bool. An array must be on the device of q, and must be indexed with one index for each axis.
        The kernel evaluates the function for all rows and columns of a visited tile that exist
        (``i < seqlen_q`` and ``j < seqlen_k``), also for hidden elements. Every index must
        therefore be within its array for hidden elements too. A negative index does not count from
        the end. If a number from outside has changed since the last call, its new value is used
        without compiling a new kernel.
    score_mod_grad : function, optional
        Python function ``score_mod_grad(score, b, h, i, j)`` that returns the derivative of
        ``score_mod`` with respect to the score. Only the backward pass uses it. By default the
        derivative is computed from the source of ``score_mod``. ``score_mod_grad`` is refused
        without a ``score_mod``.
    mask_mod : function, optional
        Python function ``mask_mod(b, h, i, j)`` that returns whether row i sees column j. The rules
        for the source of ``score_mod`` also apply to ``mask_mod``. The mask takes no memory. No
        tile is skipped. To skip tiles, give ``fa_numba.create_block_mask`` the function, and pass
        the result as ``block_mask``.
    bias : array of float32, optional
        Array that is added to the scores. Its shape must broadcast to (batch, heads_q, seqlen_q,
        seqlen_k), and it must be on the device of q. ``return_dbias=True`` returns its gradient in
        the backward pass.
    attn_mask : array of bool, float32, float16 or bfloat16, optional
        Mask whose shape broadcasts to (batch, heads_q, seqlen_q, seqlen_k). In a bool mask, True
        means that the row sees the column. A mask of numbers is added to the scores. The mask must
        be on the device of q. A copy in float32 with the same shape is made if the mask has another
        dtype. No tile is skipped. ``attn_mask`` cannot be combined with ``bias``.
    alibi_slopes : array of float32, optional
        ALiBi slopes of shape (heads_q,) or (batch, heads_q), on the device of q. The score of row i
        and column j is reduced by ``slope * abs(i + seqlen_k - seqlen_q - j)``.
    sinks : array of float32, optional
        Attention sinks of shape (heads_q,), on the device of q: one logit per query head.
        ``exp(sink)`` is added to the sum of exponentials of each row, and is part of the logsumexp.
        The sink adds no value to the output. With a sink, a row that sees no column has output 0
        and logsumexp ``sink`` instead of -inf. A sink of -inf is no sink. ``return_dsinks=True``
        returns the gradient in the backward pass.
    block_table : sequence or array of int, optional
        Table of the pages of each sequence, shape (batch, pages per sequence). k and v are then the
        pages of a cache: k is (pages, heads_k, page_size, head_dim), and v is (pages, heads_k,
        page_size, head_dim_v). With ``layout="bnhd"``, they are (pages, page_size, heads_k, ...).
        Page ``block_table[b, n]`` contains the rows n * page_size to (n + 1) * page_size - 1 of
        sequence b. page_size must be a multiple of 16, at most 256. ``kv_lens`` is required; keys
        after these lengths are not read. Only the forward pass of "fa2" takes pages.
        If ``block_table`` and ``kv_lens`` are both on the host, their values are checked. If one of
        them is on a GPU, it must be int32 and is used in place. The values are then checked only if
        ``check_table`` is True. A CUDA graph of the call can be replayed after the values on the
        GPU have changed.
    q_scale : float or array of float32, default 1
        Scale of q, for q, k and v in float8_e4m3fn only: q stands for the numbers ``q * q_scale``.
        It is a number, or an array on the device of q with one scale for each head, shape (batch,
        heads_q), or with one scale for each 128 rows, shape (batch, heads_q, ceil(seqlen_q /
        128)). Scales must be positive; the values of an array are not checked.
        ``fa_numba.quantize`` returns arrays and scales. float8_e4m3fn is for the forward pass only.
        "fa1" and "fa2" run on Hopper's tensor cores (unit "wgmma"), and "standard" on unit "mma"
        from compute capability 8.9 on. The emulator runs all three. Of the other options, such
        calls take ``scale``, ``causal``, ``window``, ``softcap``, ``q_lens``, ``layout``, and
        except in "fa1" ``kv_lens``. Head dimensions must be multiples of 16, and rows must start at
        multiples of 16 bytes.
    k_scale : float or array of float32, default 1
        Scale of k, as ``q_scale``. An array has the shape (batch, heads_k), or (batch, heads_k,
        ceil(seqlen_k / 128)). If only k and v are float8_e4m3fn, they must be pages of a cache, and
        an array has the shape (pages, heads_k).
    v_scale : float or array of float32, default 1
        Scale of v, as ``k_scale``. The product with v adds numbers of all rows. With a scale for
        each 128 rows, kernels therefore keep the sums in units of the scale of the current block.
        These scales must not differ by more than a factor of 1e30 within a head.
    q_lens : sequence or array of int, optional
        Number of valid rows of q in each batch entry, shape (batch,), from 0 to seqlen_q. Later
        rows are padding and are not read. Padding rows have output 0, logsumexp -inf and gradients
        0. ``causal``, ``window`` and ``alibi_slopes`` use the valid lengths of each batch entry in
        place of seqlen_q and seqlen_k. Lengths on a GPU are copied to the host to be checked, so
        the call waits for the copy. ``q_lens`` cannot be combined with ``cu_seqlens_q``.
    kv_lens : sequence or array of int, optional
        Number of valid rows of k and v in each batch entry, shape (batch,), from 0 to seqlen_k.
        Later rows are not read, and their gradients are 0. As with ``q_lens``, the options
        ``causal``, ``window`` and ``alibi_slopes`` use the valid lengths, and lengths on a GPU are
        copied to the host to be checked. With a ``block_table``, lengths on a GPU are not copied
        (see ``block_table``). ``kv_lens`` can be combined with ``cu_seqlens_q`` only if there is a
        ``block_table``.
    check_table : bool, default False
        Whether a ``block_table`` and ``kv_lens`` on a GPU are copied to the host and checked. The
        call then waits for the copy. True is allowed only with a ``block_table``.
    cu_seqlens_q : sequence or array of int, optional
        Cumulative lengths of sequences that are packed one after the other, shape (batch + 1,),
        from 0 to total_q. Sequence n has the rows ``cu_seqlens_q[n]`` to ``cu_seqlens_q[n + 1] -
        1``. q is then (total_q, heads_q, head_dim), the output is (total_q, heads_q, head_dim_v),
        and the logsumexp is (heads_q, total_q). ``cu_seqlens_q`` and ``cu_seqlens_k`` must be given
        together. If k and v are pages (``block_table``), give ``kv_lens`` in place of
        ``cu_seqlens_k``.
    cu_seqlens_k : sequence or array of int, optional
        Cumulative lengths of the packed k and v, shape (batch + 1,), from 0 to total_k. k is then
        (total_k, heads_k, head_dim) and v is (total_k, heads_k, head_dim_v).
    block_mask : array of bool or BlockMask, optional
        Blocks of S that are computed. The algorithms "fa1" and "fa2" neither load nor compute the
        other blocks. A ``BlockMask`` from ``fa_numba.create_block_mask`` contains its ``mask_mod``,
        so ``mask_mod`` cannot be given in addition. It serves all tiles, units and passes, but only
        calls with the sizes that it was made for. An array of bool has the shape (ceil(seqlen_q /
        Br), ceil(seqlen_k / Bc)), or this shape with leading axes that broadcast to (batch,
        heads_q). For an array, ``tiles`` must be given: its Br and Bc are the size of a block.
        Blocks that are False are hidden. With a block mask, seqlen_q and seqlen_k must be at most
        2**28 - 1024.
    dropout_p : float, default 0
        Probability that an element of P becomes 0, from 0 to below 1. It is rounded to a multiple
        of 2**-16. The elements that are kept are multiplied by ``1 / (1 - dropout_p)``.
    seed : int, default 0
        Seed of dropout, from 0 to 2**64 - 1. The seed, the offset and the element's batch entry,
        query head, row and column decide whether an element is kept. ``fa_numba.dropout_mask``
        returns which elements are kept. Equal seeds give the same mask in every algorithm and pass.
    offset : int, default 0
        Second part of the seed, from 0 to 2**32 - 1.
    layout : {"bhnd", "bnhd"}, default "bhnd"
        Order of the axes. "bhnd": q is (batch, heads_q, seqlen_q, head_dim), k is (batch, heads_k,
        seqlen_k, head_dim). "bnhd": q is (batch, seqlen_q, heads_q, head_dim), k is (batch,
        seqlen_k, heads_k, head_dim). v, the output and the gradients have the same order of axes.
        The logsumexp is (batch, heads_q, seqlen_q) in both layouts. Packed sequences take the
        default only.
    precision : {"ieee", "fp16x3", "bf16x6", "bf16x3"}, default "ieee"
        How the products of float32 matrices are computed. "ieee" uses float32 on CUDA cores. The
        other values use tensor cores. They split each float32 matrix into 16-bit matrices, its
        planes. The sum of the planes is the float32 matrix, up to rounding. The planes are
        multiplied in pairs, and the products are added in float32. "fp16x3": two float16 planes,
        three products. "bf16x6": three bfloat16 planes, six products. "bf16x3": two bfloat16
        planes, three products, with a relative error of about 2**-16 per element. Values other than
        "ieee" are for float32 inputs in the forward pass of "fa1" and "fa2" and in the backward
        pass of "fa2". They cannot be combined with ``block_table``, ``deterministic=True`` or
        ``group_splits`` above 1. For accurate gradients, the logsumexp must come from a forward
        pass with the same ``precision``.
    out_dtype : {"float16", "bfloat16", "float32"}, optional
        Dtype of the output if q, k and v are float8_e4m3fn. None means "float16". With other
        inputs the output has the dtype of q, and no other dtype can be given.

    See Also
    --------
    fa_numba.attention : Function that takes these options.
    fa_numba.create_block_mask : Find the blocks of S that a ``mask_mod`` hides.
    fa_numba.dropout_mask : Return which elements of P dropout keeps.

    Notes
    -----
    The options change the scores in this order: ``scale``, ``softcap``, ``score_mod``, then
    ``alibi_slopes`` and ``bias`` or ``attn_mask``, then the masks ``causal``, ``window``,
    ``mask_mod`` and ``block_mask``. Dropout applies to P.

    Examples
    --------
    >>> import numpy as np, fa_numba
    >>> options = fa_numba.AttentionOptions(causal=True, scale=0.5)
    >>> q = np.eye(4, dtype=np.float32).reshape(1, 1, 4, 4)
    >>> fa_numba.attention(q, q, q, **options)[0, 0, 0].tolist()
    [1.0, 0.0, 0.0, 0.0]
    """


class PlanOptions(_OfScores, _Shapes, _Others, total=False):
    """The options of ``plan``: the options of attention, with shapes in place of arrays.

    A shape may be given for ``bias``, ``attn_mask``, ``alibi_slopes``, ``sinks``, ``block_table``,
    ``q_scale``, ``k_scale`` and ``v_scale``.
    """


NAMES = tuple(AttentionOptions.__annotations__)
# Names in other libraries -> the option here, if name similarity finds no option or a wrong option.
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
_functions: list[Callable] = []  # public functions that take the options


def documents_options(function: _Function) -> _Function:
    """Add the options to the docstring and the signature of a public function that takes them.

    The texts come from the docstring of ``AttentionOptions``. They follow the function's own
    parameters in the section ``Parameters``. If Python removes docstrings (``python -OO``), no
    docstring is changed. The signature is for ``help`` and for editors. Calls of the function do
    not use the signature, and take no longer.
    """
    _functions.append(function)
    function.__signature__ = _signature(function)  # type: ignore[attr-defined]
    if function.__doc__ and AttentionOptions.__doc__:
        before, others = _sections(function.__doc__)
        about, options = _sections(AttentionOptions.__doc__)
        intro = about.partition("\n\n")[2].strip()
        own = others.pop("Parameters", "")
        listed = f"**options : AttentionOptions\n{textwrap.indent(intro, '    ')}"
        parameters = "\n".join((own, listed, options["Parameters"])).strip()
        others = {"Parameters": parameters, **others}
        text = [before, *(f"{name}\n{'-' * len(name)}\n{x}" for name, x in others.items())]
        function.__doc__ = "\n\n".join(text) + "\n"
    return function


def _signature(function: Callable) -> inspect.Signature:
    """Return the signature of a function with each option as a parameter of its own.

    The function's own parameters come first. If the function has overloads, they are the parameters
    of the last overload, which takes any ``return_lse``. The annotation ``**options: Unpack[...]``
    names a class. Each key of this class becomes a keyword-only parameter. The default is None for
    an option. For any other key, it is the default that other functions have for this key.
    """
    own = inspect.signature((get_overloads(function) or [function])[-1]).parameters
    parameters = [p for p in own.values() if p.kind is not p.VAR_KEYWORD]
    _, _, name = str(getattr(own.get("options"), "annotation", "")).strip("]").partition("[")
    listed = function.__globals__.get(name, AttentionOptions).__annotations__
    passed_on = {k: v for f in _functions for k, v in (f.__kwdefaults__ or {}).items()}
    defaults = {k: passed_on[k] for k in listed if k not in NAMES} | dict.fromkeys(NAMES)
    parameters += [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=default,
            annotation=getattr(listed[name], "__forward_arg__", listed[name]),
        )
        for name, default in defaults.items()
    ]
    returned = inspect.signature(function).return_annotation
    return inspect.Signature(parameters, return_annotation=returned)


def _sections(docstring: str) -> tuple[str, dict[str, str]]:
    """Return a NumPy-style docstring's text before its first section, and its sections by title."""
    before, *rest = re.split(r"^(\w[\w ]*)\n-{3,}\n", inspect.cleandoc(docstring), flags=re.M)
    return before.strip(), dict(zip(rest[::2], map(str.strip, rest[1::2]), strict=True))


def check_names(names: Iterable[str]) -> None:
    """Raise TypeError for a name that is no option.

    The message says which function has an argument of that name, or which option has a similar
    name.
    """
    for name in names:
        if name not in NAMES:
            raise TypeError(
                f"{name} is not an option{_hint(name)}; options: {', '.join(sorted(NAMES))}"
            )


def _hint(name: str) -> str:
    """Return the end of the message of ``check_names``: advice about a name that is no option."""
    owners: dict[str, list[str]] = {}
    for function in _functions:
        own = function.__kwdefaults__ or {}
        # Only functions that launch kernels. The other functions pass their arguments on.
        for argument in own if "stream" in own else ():
            owners.setdefault(argument, []).append(function.__name__)
    if name in owners:
        takes = "take" if owners[name][1:] else "takes"
        return f" of this function ({', '.join(owners[name])} {takes} it)"
    near = _ELSEWHERE.get(name) or nearest(name, [*NAMES, *owners])
    return f" (did you mean {near}?)" if near else ""


# --- what kernels are passed -----------------------------------------------------------------

_int32, _float32 = types.int32, types.float32


class Bound(NamedTuple):
    """A call of attention, from which the arguments of its kernels are computed.

    Attributes
    ----------
    problem : Problem
        Sizes and options of the call.
    given : mapping of str to Any
        Launch arguments by name, only for options that are on. Examples are ``bias``, ``dbias``,
        ``dL``, ``L``, ``alibi_slopes``, ``sinks``, ``seed_low``, ``seed_high``, ``offset``,
        ``kv_splits`` and the workspace of the splits. ``given`` also contains the values that the
        caller's functions use, and the arrays of a ``BlockMask``. It contains ``block_table`` and
        ``kv_lens`` if they are on the GPU.
    score_unit : float
        Factor of the scores: log2(e) if kernels compute exponentials as powers of 2, else 1. With a
        ``score_mod``, the factor is applied after the ``score_mod``.
    block_mask : numpy.ndarray of bool or None
        Block mask on the host.
    block_table : numpy.ndarray of int32 or None
        Block table on the host.
    """

    problem: Problem
    given: Mapping[str, Any]
    score_unit: float
    block_mask: np.ndarray | None = None
    block_table: np.ndarray | None = None


@dataclass(frozen=True)
class KernelField:
    """One field of a kernel's last argument: its Numba type, and its value in a call.

    Attributes
    ----------
    type : Any
        Numba type.
    value : function
        Returns the value for a ``Bound``. A NumPy array is copied to the device.
    shape : function or None
        Returns the shape that the array has in the kernel: axes of length 1 are broadcast to this
        shape. None means that the array keeps its shape.
    """

    type: Any
    value: Callable[[Bound], Any]
    shape: Callable[[Bound], tuple[int, ...]] | None = None


@dataclass(frozen=True)
class Feature:
    """An entry of ``FEATURES``: one option as kernels see it.

    Attributes
    ----------
    on : function
        Returns the value of the flag for a ``Problem``: whether the option is on, or the function
        or number that a kernel is compiled for.
    passes : mapping of str to KernelField, or function
        Arguments that the kernel takes for the option, by name. If the arguments depend on the
        value of the flag, ``passes`` is a function that takes this value and returns the mapping.
    changes_scores : bool
        Whether the option changes scores that are not hidden. Without such options, the scores are
        scale Q K^T.
    argument : str
        Name of the caller's argument, if it differs from the flag's name.
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
    """Return the field for the cumulative lengths of packed sequences.

    Its value contains the first row of each sequence, and the total number of rows at the end.
    ``name`` is "q_lens" or "kv_lens", the field of ``Problem`` that contains the lengths.
    """
    return KernelField(
        array_type(1, _int32),
        lambda call: np.cumsum((0, *getattr(call.problem, name)), dtype=np.int32),
    )


_NUMBERS = {"int32": _int32, "float32": _float32, "bool": _int32}
_ELEMENTS = {"int32": _int32, "float32": _float32, "bool": types.uint8}


def _captured(mod: Mod) -> dict[str, KernelField]:
    """Return the fields of the values that a caller's function uses."""
    found = {}
    for name, kind in zip(mod.fields, mod.captures, strict=True):
        element, _, axes = kind.rstrip("]").partition("[")
        ty = array_type(int(axes), _ELEMENTS[element]) if axes else _NUMBERS[element]
        found[name] = _given(name, ty)
    return found


def _gradients(mod: Mod) -> dict[str, KernelField]:
    """Return the fields for the gradients of the float32 arrays that a ``score_mod`` uses.

    If an array has one axis, its gradient is passed as a matrix with one row.
    """

    def seen(name: str) -> Callable[[Bound], tuple[int, ...]]:
        return lambda call: (1, *call.given[name].shape)[-max(2, len(call.given[name].shape)) :]

    found = {}
    for name, of in mod.differentiated.items():
        axes = _captured(mod)[of].type.ndim
        found[name] = _given(name, array_type(max(2, axes)), seen(name))
    return found


def unit_before_score_mod(problem: Problem, score_unit: float) -> float:
    """Return the factor ``score_unit`` if there is no ``score_mod``, else 1.

    A ``score_mod`` takes scores without the factor ``score_unit``. Kernels then apply the factor
    after the ``score_mod``.
    """
    return score_unit if problem.score_mod is None else 1.0


def _softcap(call: Bound) -> float:
    return (call.problem.softcap or 0.0) * unit_before_score_mod(call.problem, call.score_unit)


def _of_blocks(name: str, ty: Any, made: Callable[[Bound], np.ndarray]) -> KernelField:
    """Return the field for one of the arrays of a block mask: its states, or a list of blocks.

    ``name`` is "block_mask", "next_column" or "next_row", and ``ty`` is the Numba type of an
    element. If the block mask is a ``BlockMask``, the array comes from it. If the block mask is an
    array of bool, ``made`` computes the array from the call.
    """

    def value(call: Bound) -> Any:
        return call.given[name] if name in call.given else made(call)

    def shape(call: Bound) -> tuple[int, ...]:
        return *_heads(call), *value(call).shape[-2:]

    return KernelField(array_type(4, ty), value, shape)


def _next_blocks(axis: int) -> Callable[[Bound], np.ndarray]:
    """Return a function that takes a call with a bool block mask, and lists its visited blocks.

    For each block, the list contains the number of the next visited block along ``axis``
    (``next_visited``).
    """
    return lambda call: next_visited(np.asarray(call.block_mask, bool), axis)


def _states(call: Bound) -> np.ndarray:
    """Return the state of each block as uint8: 1 if the block is visited, and 0 if it is not."""
    return np.array(call.block_mask, np.uint8, order="C")


def _side(name: str) -> KernelField:
    def value(call: Bound) -> int:
        side = getattr(call.problem, name)
        return UNBOUNDED if side is None else side

    return KernelField(_int32, value)


# Factors, powers of two, of the scaled planes of Q, K, V and dO, one for each head.
POWERS = ("q_power", "k_power", "v_power", "dout_power")


def _powers(names: Iterable[str]) -> dict[str, KernelField]:
    return {name: _given(name, array_type(2)) for name in names}


# Names of the scales of e4m3 arrays, and the fields of a ``Problem`` with the numbers of heads and
# rows.
SCALES = {
    "q_scale": ("heads_q", "seqlen_q"),
    "k_scale": ("heads_k", "seqlen_k"),
    "v_scale": ("heads_k", "seqlen_k"),
}


def _kind_of_scales(problem: Problem) -> str:
    """Return the flag ``scales`` of ``Features``."""
    if not DTYPES[problem.dtype].scaled:
        return ""
    if problem.value_block_scales:
        return "value blocks"
    return "blocks" if problem.block_scales else "heads"


def _scales(kind: str) -> dict[str, KernelField]:
    """Return the fields for the scales of e4m3 arrays. A scale that is not given is 1.

    ``kind`` is the flag: "heads" for one scale for each batch entry and head. With "blocks", Q and
    K have a scale for each block of ``SCALED_ROWS`` rows too. With "value blocks", Q, K and V do.
    """

    def field(name: str) -> KernelField:
        heads, rows = SCALES[name]
        axes = 3 if kind == "value blocks" or (kind == "blocks" and name != "v_scale") else 2

        def value(call: Bound) -> Any:
            given = call.given.get(name, 1.0)
            if not hasattr(given, "shape"):
                return np.full((1,) * axes, given, np.float32)
            return given if len(given.shape) == axes else with_last_axis(given)

        def shape(call: Bound) -> tuple[int, ...]:
            sizes = (call.problem.batch, getattr(call.problem, heads))
            return (*sizes, ceil_div(getattr(call.problem, rows), SCALED_ROWS))[:axes]

        return KernelField(array_type(axes), value, shape)

    return {name: field(name) for name in SCALES}


def _page_scale(name: str) -> KernelField:
    """Return the field for the scales of e4m3 pages, one for each K/V head and page.

    ``name`` is the option, whose axes are (pages, heads). A scale that is not given is 1.
    """

    def value(call: Bound) -> Any:
        given = call.given.get(name, 1.0)
        if hasattr(given, "shape"):
            return permuted(given, (1, 0))
        return np.full((1, 1), given, np.float32)

    def shape(call: Bound) -> tuple[int, ...]:
        return call.problem.heads_k, call.problem.pages or 0

    return KernelField(array_type(2), value, shape)


# By the name of a flag in ``Features``. All threads of a block read the same element of an integer
# array at a time.
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
    "page_scales": Feature(
        lambda p: p.kv_dtype is not None,
        {name: _page_scale(name) for name in ("k_scale", "v_scale")},
        argument="k_scale",
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
    "scales": Feature(
        _kind_of_scales,
        _scales,
        argument="q_scale",
    ),
}


def argument_of(flag: str) -> str:
    """Return the name of the caller's argument for a flag of ``Features``."""
    return FEATURES[flag].argument or flag


# Arrays that thread blocks store if they share a row tile: O before the division by l, l and m.
SPLIT_SUMS = ("A", "l", "m")
# Arrays of which all threads of a block read the same element at a time, repeatedly. Their accesses
# are not counted.
UNIFORM = (
    *("slopes", "sinks", "q_lens", "kv_lens", "q_starts", "k_starts"),
    *("block_mask", "next_column", "next_row"),
    *SCALES,
)


@dataclass(frozen=True)
class Features:
    """The options that a kernel is compiled for.

    Normally a flag has the name of its option, and is True if the option is on. These flags are
    different:

    flag             meaning
    causal           a causal mask without a window. With a window, ``causal`` is False, because
                     the right side of the window then contains the causal mask
    score_mod, score_mod_grad, mask_mod
                     the caller's function as a ``Mod``, or None
    splits           FA-2's forward pass has key splits
    dbias            the backward pass computes the gradient of the bias
    dcaptured        the ``score_mod`` whose captured arrays get gradients, or None
    dlse             the loss has a gradient of L
    alibi            ``alibi_slopes`` are given
    page_size        rows of a page if K and V are pages, else 0
    page_scales      the pages of K and V are e4m3, with a scale for each page and head
    packed           sequences are packed (``cu_seqlens_q``)
    sparse           ``block_mask`` is given
    precision        the name of the precision, and "" for "ieee"
    scaled_dout      the planes of dO are scaled by powers of two
    scales           for e4m3 inputs: "heads" if there is a scale for each head, "blocks" if Q and K
                     have a scale for each block of rows, and "value blocks" if Q, K and V have; for
                     other inputs ""
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
    page_scales: bool = False
    packed: bool = False
    sparse: bool = False
    dropout: bool = False
    precision: str = ""
    scaled_dout: bool = False
    scales: str = ""

    @classmethod
    def of(
        cls, problem: Problem, *, splits: bool, dbias: bool, dcaptured: Mod | None, dlse: bool,
        scaled_dout: bool,
    ) -> Features:  # fmt: skip
        """Return the features of a call.

        Most flags follow from the options of ``problem``. The other arguments are flags that a
        ``Problem`` does not contain. ``splits`` says whether FA-2's forward pass has key splits.
        ``dbias`` says whether the backward pass computes the gradient of the bias. ``dlse`` says
        whether the loss has a gradient of L. ``dcaptured`` is the ``score_mod`` whose captured
        arrays get gradients, or None. ``scaled_dout`` says whether the planes of dO are scaled by
        powers of two.
        """
        on: dict[str, Any] = {name: feature.on(problem) for name, feature in FEATURES.items()}
        of_problem = cls(**on)
        return replace(
            of_problem, splits=splits, dbias=dbias, dcaptured=dcaptured, dlse=dlse,
            scaled_dout=scaled_dout,
        )  # fmt: skip

    @property
    def planes(self) -> int:
        """Number of 16-bit planes whose sum is an element of Q, K or V; 1 without planes."""
        return PRECISIONS[self.precision or "ieee"].planes

    @property
    def block_scales(self) -> bool:
        """Whether Q and K in e4m3 have a scale for each block of rows. V may have them too."""
        return self.scales in ("blocks", "value blocks")

    @property
    def value_block_scales(self) -> bool:
        """Whether V in e4m3 has a scale for each block of rows."""
        return self.scales == "value blocks"

    @property
    def scaled(self) -> bool:
        """Whether planes are scaled by a power of two."""
        return PRECISIONS[self.precision or "ieee"].scaled

    @property
    def right(self) -> bool:
        """Whether the last column that a row sees may depend on the row.

        This is the case with a causal mask or a window.
        """
        return self.causal or self.window

    @property
    def lengths(self) -> bool:
        """Whether each batch entry has its own lengths."""
        return self.q_lens or self.kv_lens or self.packed

    @property
    def changes_scores(self) -> bool:
        """Whether an option changes scores that are not hidden. Normally they are scale Q K^T."""
        return any(getattr(self, name) for name, f in FEATURES.items() if f.changes_scores)

    @property
    def calls(self) -> bool:
        """Whether the kernel calls functions of the caller."""
        return self.score_mod is not None or self.mask_mod is not None

    @property
    def slopes(self) -> bool:
        """Whether an option changes the derivative of the scores with respect to Q K^T.

        Without such an option, the derivative is ``scale``.
        """
        return self.softcap or self.slope_of is not None

    @property
    def slope_of(self) -> Mod | None:
        """The function by whose derivative kernels multiply dS, as a ``Mod``.

        This is ``score_mod_grad`` or ``score_mod``, or None if the derivative is 1.
        """
        return slope_of(self.score_mod, self.score_mod_grad)

    @property
    def without_sums(self) -> Features:
        """The features for the kernel that computes only dQ, and no gradients of options."""
        return replace(self, dbias=False, dcaptured=None)

    @property
    def keeps_scores(self) -> bool:
        """Whether gradients of arrays that ``score_mod`` captures depend on the argument ``score``.

        If so, the backward kernel keeps the scores that ``score_mod`` takes, until it computes
        these gradients.
        """
        return bool(self.dcaptured and self.dcaptured.gradient and self.dcaptured.gradient.of_score)

    @property
    def scores_stay(self) -> bool:
        """Whether Hopper's backward kernels keep the scores scale Q K^T until they compute dS.

        The kernels keep the scores if there is a ``score_mod``, and at least one of these is true:

        - ``slopes`` is True.
        - There are ALiBi slopes.
        - There is a bias.
        - The gradients of arrays that ``score_mod`` captures are computed.

        The kernels then compute dS element by element from the kept scores. Of the ways that were
        tried, this way spills the fewest registers.
        """
        beside = self.slopes or self.alibi or self.bias or self.dcaptured is not None
        return self.score_mod is not None and beside

    @property
    def kept_scores_text(self) -> Text:
        """The text that computes ``score_mod`` and its derivative from scores that a kernel has
        kept.

        It is for Hopper's backward kernels, which keep the scores if ``scores_stay`` is True. The
        text is empty if there is no ``score_mod``. It is also empty if the kernel computes more
        from the kept scores: with a softcap, a ``score_mod_grad``, or ``keeps_scores``. With an
        empty text, the kernel multiplies the kept scores by the scale.
        """
        mod, others = self.score_mod, self.softcap or self.keeps_scores
        return Text() if mod is None or self.score_mod_grad or others else mod.both

    @property
    def crowds(self) -> bool:
        """Whether an option takes registers of each thread throughout all loops of the kernel.

        The options that take no such registers are ``causal``, dropout, splits, ``dlse``, sinks,
        ``scaled_dout`` and scales.
        """
        beside: dict[str, Any] = dict.fromkeys(
            ("causal", "dropout", "splits", "dlse", "sinks", "scaled_dout"), False
        )
        return replace(self, scales="", **beside) != PLAIN

    @property
    def initialises(self) -> bool:
        """Whether FA-1 initialises O, l and m (or dQ) in global memory before the first pass.

        This is the case if the first pass may skip a row tile: with a window, ``q_lens`` or a block
        mask. Otherwise, the first pass itself initialises the results of every row tile.
        """
        return self.window or self.q_lens or self.sparse

    @property
    def arguments(self) -> dict[str, Any]:
        """Numba types of the arguments that a kernel takes for these features, by name."""
        return {name: passed.type for name, passed in self.passed.items()}

    @property
    def passed(self) -> dict[str, KernelField]:
        """Fields of the arguments that a kernel takes for these features, by name."""
        found: dict[str, KernelField] = {}
        for flag in (f.name for f in fields(self) if getattr(self, f.name)):
            passes = FEATURES[flag].passes
            found |= passes(getattr(self, flag)) if callable(passes) else passes
        if self.page_size:  # the block table finds the rows
            found.pop("k_starts", None)
        return found

    @property
    def argument_type(self):
        """Numba type of the kernels' last argument, ``options``."""
        return types.NamedTuple(list(self.arguments.values()), _tuple_class(tuple(self.arguments)))


PLAIN = Features()


@functools.cache
def _tuple_class(names: tuple[str, ...]):
    return namedtuple("Options", names)


def as_word(name: str, value: Any, bits: int) -> int:
    """Return ``value`` as an unsigned integer of ``bits`` bits.

    Raise TypeError or ValueError for any other value. ``name`` is the name of the value in the
    message.
    """
    wanted = f"{name} must be an integer from 0 to 2**{bits} - 1, got {value!r}"
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(wanted)
    if not 0 <= value < 2**bits:
        raise ValueError(wanted)
    return int(value)


def signed(word: int) -> int:
    """Return the signed 32-bit integer that has the same bits as the unsigned integer ``word``.

    Kernels take signed integers as arguments.
    """
    return word - 2**32 if word >= 2**31 else word


def drop_threshold(dropout_p: float) -> int:
    """Return the threshold for the 16 random bits of an element.

    Dropout drops the element if these bits, as an unsigned integer, are below the threshold.
    """
    return round(dropout_p * 2**16)
