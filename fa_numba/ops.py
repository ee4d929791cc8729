"""The public functions on arrays of any library: attention, its gradients, merge, softmax."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, Unpack, overload

from fa_numba.choices.requests import Request, check_algorithm, choices_of
from fa_numba.host import planning
from fa_numba.host.binding import Binding
from fa_numba.host.blocks import create
from fa_numba.host.calls import call_attention
from fa_numba.host.merging import merge_all
from fa_numba.host.merging import merge_backward as merge_backward_all
from fa_numba.host.plans import Plan
from fa_numba.host.prefix import call_with_prefix, plan_with_prefix
from fa_numba.host.softmax import softmax as softmax_of_vectors
from fa_numba.mods.blocks import BlockMask
from fa_numba.options import AttentionOptions, PlanOptions, documents_options
from fa_numba.tiling import Tiles
from fa_numba.typing import (
    A,
    Algorithm,
    Array,
    Function,
    Layout,
    Passes,
    Splits,
    Stream,
    UnitName,
    WarpPartition,
)


@documents_options
def plan(
    q_shape: Sequence[int], k_shape: Sequence[int], v_shape: Sequence[int] | None = None, *,
    algorithm: Algorithm = "fa2", dtype: str = "float32", kv_dtype: str | None = None,
    tiles: Tiles | None = None, return_lse: bool = False, query_splits: int = 1,
    warp_partition: WarpPartition = "rows", ablate: tuple[str, ...] = (), passes: Passes = "fwd",
    deterministic: bool = False,
    return_dbias: bool = False, return_dsinks: bool = False, return_dcaptured: bool = False,
    dlse: bool = False, unit: UnitName = "auto", kv_splits: Splits = "auto",
    group_splits: Splits = "auto", prefix_k: Array | Sequence[int] | None = None,
    **options: Unpack[PlanOptions],
) -> Plan:  # fmt: skip
    """Return the plan of a call of attention, without running the call.

    The plan has the kernels, grids, tiles, workspace, accesses and FLOPs of a call with these
    arguments on the current device. Without a GPU, it is the plan of a call on the emulator, which
    has the limits of an H100. Arrays are not needed: shapes are enough.

    Parameters
    ----------
    q_shape : sequence of int
        Shape of q, (batch, heads_q, seqlen_q, head_dim). With ``layout`` or ``cu_seqlens_q``, the
        order and number of the axes are those of the call.
    k_shape : sequence of int
        Shape of k, (batch, heads_k, seqlen_k, head_dim). With a ``block_table``, it is the shape of
        the pages, (pages, heads_k, page_size, head_dim).
    v_shape : sequence of int, optional
        Shape of v, (batch, heads_k, seqlen_k, head_dim_v). None means the shape of k.
    algorithm : {"fa2", "fa1", "standard"}, default "fa2"
        Algorithm, as for ``attention``.
    dtype : {"float32", "float16", "bfloat16", "float8_e4m3fn"}, default "float32"
        Dtype of q, k and v.
    kv_dtype : {"float8_e4m3fn"}, optional
        Dtype of k and v if they are pages of 8-bit floats and q has ``dtype``. None means
        ``dtype``.
    tiles : Tiles, optional
        Block sizes, threads and pipeline slots, as in the call.
    return_lse : bool, default False
        Whether the call returns the logsumexp. Forward pass only.
    query_splits : int, default 1
        Number of thread blocks that share the rows of q: of one query head in the forward pass, of
        one K/V head in the backward pass. "fa1" only.
    warp_partition : {"rows", "keys"}, default "rows"
        How the warps of a thread block divide the work, as for ``attention``. "keys" is for the
        forward pass of "fa1" on unit "mma".
    ablate : tuple of str, default ()
        Names of optimisations that are switched off. Forward pass of "fa1" and "fa2" only.
    passes : {"fwd", "bwd"}, default "fwd"
        Pass that the plan is for: "fwd" is a forward pass, "bwd" a backward pass.
    deterministic : bool, default False
        Whether dq is summed in a fixed order. Backward pass of "fa2" only.
    return_dbias : bool, default False
        Whether the call returns the gradient of ``bias``. Backward pass only.
    return_dsinks : bool, default False
        Whether the call returns the gradient of ``sinks``. Backward pass only.
    return_dcaptured : bool, default False
        Whether the call returns the gradients of arrays that ``score_mod`` uses. Backward pass of
        "fa1" and "fa2" only.
    dlse : bool, default False
        Whether a gradient of the logsumexp is passed to the call. Backward pass only.
    unit : {"auto", "simt", "mma", "wgmma"}, default "auto"
        Which instructions multiply matrices, as for ``attention``.
    kv_splits : int or "auto", default "auto"
        Number of thread blocks that share the columns of a row tile. Forward pass of "fa2" only.
    group_splits : int or "auto", default "auto"
        Number of thread blocks that share a column tile of a K/V head. Backward pass of "fa2" only.
    prefix_k : array or sequence of int, optional
        Keys that all sequences begin with, or the shape of these keys, (heads_k, seqlen_prefix,
        head_dim). Forward pass of "fa2" only.

    Returns
    -------
    Plan
        The plan. ``print(plan)`` shows it as a table. ``print(plan.why)`` shows the reasons for the
        unit, the tiles and the splits.

    Raises
    ------
    TypeError
        If an argument has a wrong type, or an unknown name.
    ValueError
        If the call would be refused, for instance for shapes that do not match or tiles that do not
        fit the device. There is one exception: a call that would run too long on the emulator has a
        plan.

    See Also
    --------
    attention : The call itself.
    Plan : What a plan contains.

    Notes
    -----
    Among the options, ``bias``, ``attn_mask``, ``alibi_slopes``, ``sinks`` and ``block_table`` may
    be given as shapes. All other options are given as in the call. With a ``block_table`` and no
    ``kv_lens``, the plan is for sequences that fill all their pages. Strides and addresses are not
    known: the plan is for contiguous arrays.

    Examples
    --------
    >>> import fa_numba
    >>> p = fa_numba.plan((1, 2, 1024, 64), (1, 2, 1024, 64), algorithm="fa2")
    >>> p.kernels[0].name, p.kernels[0].grid
    ('fa2_forward', (8, 2, 1))
    >>> p.flops == 4 * 2 * 1024 * 1024 * 64
    True
    >>> fa_numba.plan((1, 2, 1024, 64), (1, 2, 1024, 64), algorithm="standard").workspace_bytes
    8388608
    """
    choices = choices_of(
        algorithm, passes, tiles, unit, return_lse=return_lse, ablate=ablate, kv_splits=kv_splits,
        query_splits=query_splits, warp_partition=warp_partition, deterministic=deterministic,
        return_dbias=return_dbias, return_dsinks=return_dsinks, dlse=dlse,
        return_dcaptured=return_dcaptured, group_splits=group_splits,
    )  # fmt: skip
    arguments = Binding.of(options, shapes=True)
    problem = arguments.problem(q_shape, k_shape, v_shape, dtype=dtype, kv_dtype=kv_dtype)
    if prefix_k is not None:
        return plan_with_prefix(problem, prefix_k, choices, options)
    # How often a block table is read depends on the copies' width.
    aligned = problem.pages is None or problem.whole_chunks
    plan = planning.plan_of_attention(problem, choices, aligned, arguments.block_mask)
    arguments.check_mask(problem, choices.tiles, plan.tiles)
    return replace(plan, block_mask=arguments.visited(problem, plan.tiles))


def plan_again(request: Request) -> Plan:
    """Make a plan again from a stored request, for the device that the request names.

    A recording of an experiment stores the requests of its plans, and their launches. The stored
    launches can then be compared with the launches of the plan that this function returns.

    Parameters
    ----------
    request : Request
        ``Plan.asked`` of an earlier plan.

    Returns
    -------
    Plan
        The plan that the current version of fa_numba makes for the request.

    Raises
    ------
    ValueError
        If the request is not supported any more.
    """
    return planning.again(request)


@overload
def standard_attention(
    q: A, k: Array, v: Array, *,
    tiles: Tiles | None = None, return_lse: Literal[False] = False, out: Array | None = None,
    stream: Stream = None, unit: UnitName = "auto", **options: Unpack[AttentionOptions],
) -> A: ...  # fmt: skip
@overload
def standard_attention(
    q: A, k: Array, v: Array, *,
    tiles: Tiles | None = None, return_lse: Literal[True], out: Array | None = None,
    stream: Stream = None, unit: UnitName = "auto", **options: Unpack[AttentionOptions],
) -> tuple[A, Any]: ...  # fmt: skip
@overload
def standard_attention(
    q: A, k: Array, v: Array, *,
    tiles: Tiles | None = None, return_lse: bool = False, out: Array | None = None,
    stream: Stream = None, unit: UnitName = "auto", **options: Unpack[AttentionOptions],
) -> Any: ...  # fmt: skip
@documents_options
def standard_attention(
    q: A, k: Array, v: Array, *, tiles: Tiles | None = None, return_lse: bool = False,
    out: Array | None = None, stream: Stream = None, unit: UnitName = "auto",
    **options: Unpack[AttentionOptions],
) -> A | tuple[A, Any]:  # fmt: skip
    """Return attention by the standard algorithm, which stores S and P in global memory.

    Three kernels compute ``S = scale * q @ k.T``, ``P = softmax(S)`` and ``O = P @ v``. S and P
    share one workspace of seqlen_q x seqlen_k elements per head, in the dtype of q. For q, k and v
    in float8_e4m3fn, S is in float16, and P has a workspace of its own in float8_e4m3fn.

    Parameters
    ----------
    q : array
        Queries, shape (batch, heads_q, seqlen_q, head_dim), any strides. The dtype is float32,
        float16 or bfloat16, or float8_e4m3fn with scales (see ``q_scale``). head_dim must be from 1
        to 256. NumPy arrays, torch tensors, JAX and CuPy arrays,
        and arrays with ``__cuda_array_interface__`` or DLPack are taken without conversion. Lists
        are refused.
    k : array
        Keys, shape (batch, heads_k, seqlen_k, head_dim), dtype and device of q. heads_k must divide
        heads_q; query head h reads head ``h // (heads_q // heads_k)`` of k and v.
    v : array
        Values, shape (batch, heads_k, seqlen_k, head_dim_v), dtype and device of q. head_dim_v may
        differ from head_dim, and must be from 1 to 256.
    tiles : Tiles, optional
        Block sizes and threads of the kernels that multiply matrices. None chooses them. ``stages``
        must be 1.
    return_lse : bool, default False
        Whether the logsumexp is returned too. The backward pass and ``fa_numba.merge`` need it.
    out : array, optional
        Array that the output is written to. It must have the shape of the output, and the dtype,
        library and device of q. It must not share memory with an input. None makes a new array.
    stream : CUDA stream or int, optional
        Stream of torch, CuPy or Numba, or its address, on which the kernels run. None takes the
        current stream of q's library. On the emulator, only None is allowed.
    unit : {"auto", "simt", "mma"}, default "auto"
        Which instructions multiply matrices. "simt": CUDA cores, for float32, on compute capability
        7.5 or newer. "mma": tensor cores, for float16 and bfloat16 on 8.0 or newer, and for
        float8_e4m3fn on 8.9 or newer. "auto" takes the unit that is for the dtype of q.

    Returns
    -------
    out : array
        Output, shape (batch, heads_q, seqlen_q, head_dim_v), with the dtype, layout, library and
        device of q. For packed sequences it is (total_q, heads_q, head_dim_v). If the library of q
        is not named above, the output is a NumPy array on the host, or a Numba device array on a
        GPU.
    lse : array of float32
        Logsumexp, only returned with ``return_lse=True``, as the tuple ``(out, lse)``. Its shape is
        (batch, heads_q, seqlen_q), for packed sequences (heads_q, total_q). It is the natural
        logarithm of each row's sum of exponentials of the scaled and masked scores.

    Raises
    ------
    TypeError
        If an argument has a wrong type or dtype, or an unknown name.
    ValueError
        If a value, a shape or a combination of arguments is not allowed, if tiles do not fit the
        device, or if the emulator would run for more than about 30 seconds. Also for a torch tensor
        that requires a gradient, unless ``torch.no_grad()`` is active. All errors are raised before
        anything runs.

    See Also
    --------
    attention : Attention by any of the three algorithms.
    standard_attention_backward : Gradients by the same algorithm.

    Notes
    -----
    This is Algorithm 0 of the FlashAttention papers (arXiv 2205.14135). Each head computes:

    1. S = scale Q K^T, written to global memory;
    2. P = softmax(S) by rows, read from and written to global memory;
    3. O = P V, which reads P.

    In float16 and bfloat16, S and P are rounded to that dtype. In float8_e4m3fn, S is in float16,
    and step 2 writes ``P = 256 e^(S - m)`` in float8_e4m3fn, where m is the largest score of the
    row. Step 2 also writes the row sums of e^(S - m) in float32, and step 3 divides by them. Where
    S is in float16, scores must be below 65504. A row that sees no column has output 0 and
    logsumexp -inf, or logsumexp ``sink`` with the option ``sinks``.

    Examples
    --------
    >>> import numpy as np, fa_numba
    >>> q = k = v = np.eye(2, dtype=np.float32).reshape(1, 1, 2, 2)
    >>> fa_numba.standard_attention(q, k, v, scale=0.0)[0, 0].round(3).tolist()
    [[0.5, 0.5], [0.5, 0.5]]
    """
    choices = choices_of("standard", "fwd", tiles, unit, return_lse)
    return call_attention(choices, (q, k, v), options, stream, out)


@overload
def flash_attention_1(
    q: A, k: Array, v: Array, *,
    tiles: Tiles | None = None, return_lse: Literal[False] = False, out: Array | None = None,
    stream: Stream = None, query_splits: int = 1, warp_partition: WarpPartition = "rows",
    ablate: tuple[str, ...] = (), unit: UnitName = "auto", **options: Unpack[AttentionOptions],
) -> A: ...  # fmt: skip
@overload
def flash_attention_1(
    q: A, k: Array, v: Array, *,
    tiles: Tiles | None = None, return_lse: Literal[True], out: Array | None = None,
    stream: Stream = None, query_splits: int = 1, warp_partition: WarpPartition = "rows",
    ablate: tuple[str, ...] = (), unit: UnitName = "auto", **options: Unpack[AttentionOptions],
) -> tuple[A, Any]: ...  # fmt: skip
@overload
def flash_attention_1(
    q: A, k: Array, v: Array, *,
    tiles: Tiles | None = None, return_lse: bool = False, out: Array | None = None,
    stream: Stream = None, query_splits: int = 1, warp_partition: WarpPartition = "rows",
    ablate: tuple[str, ...] = (), unit: UnitName = "auto", **options: Unpack[AttentionOptions],
) -> Any: ...  # fmt: skip
@documents_options
def flash_attention_1(
    q: A, k: Array, v: Array, *, tiles: Tiles | None = None, return_lse: bool = False,
    out: Array | None = None, stream: Stream = None, query_splits: int = 1,
    warp_partition: WarpPartition = "rows", ablate: tuple[str, ...] = (),
    unit: UnitName = "auto", **options: Unpack[AttentionOptions],
) -> A | tuple[A, Any]:  # fmt: skip
    """Return attention in FlashAttention-1's loop order, K/V outer.

    The outer loop goes over column tiles of k and v, the inner loop over row tiles of q. The output
    O, the row sums l and the row maxima m pass through global memory in every pass of the outer
    loop.

    Parameters
    ----------
    q : array
        Queries, shape (batch, heads_q, seqlen_q, head_dim), any strides. The dtype is float32,
        float16 or bfloat16, or float8_e4m3fn with scales (see ``q_scale``). head_dim must be from 1
        to 256. NumPy arrays, torch tensors, JAX and CuPy arrays, and arrays with
        ``__cuda_array_interface__`` or DLPack are taken without conversion. Lists are refused.
    k : array
        Keys, shape (batch, heads_k, seqlen_k, head_dim), dtype and device of q. heads_k must divide
        heads_q; query head h reads head ``h // (heads_q // heads_k)`` of k and v.
    v : array
        Values, shape (batch, heads_k, seqlen_k, head_dim_v), dtype and device of q. head_dim_v may
        differ from head_dim, and must be from 1 to 256.
    tiles : Tiles, optional
        Block sizes and threads of the kernel. None chooses them. ``stages`` must be 1.
    return_lse : bool, default False
        Whether the logsumexp is returned too. The backward pass and ``fa_numba.merge`` need it.
    out : array, optional
        Array that the output is written to. It must have the shape of the output, and the dtype,
        library and device of q. It must not share memory with an input. None makes a new array.
    stream : CUDA stream or int, optional
        Stream of torch, CuPy or Numba, or its address, on which the kernels run. None takes the
        current stream of q's library. On the emulator, only None is allowed.
    query_splits : int, default 1
        Number of thread blocks that share the rows of q of one query head. 1 is the paper's grid:
        one thread block for each batch entry and head. If the number is larger than the number of
        row tiles, there is one thread block per row tile.
    warp_partition : {"rows", "keys"}, default "rows"
        How the warps of a thread block divide the work. "rows": each warp has its own rows of q.
        "keys": each warp has its own rows of k and v, and the warps add their parts of O through
        shared memory. "keys" is for unit "mma" only.
    ablate : tuple of str, default ()
        Names of optimisations of the kernel that are switched off, to measure what each gains. Unit
        "mma" has "swizzle", "padding" (only together with "swizzle"), "prefetch", "q_registers" and
        "folded_scale"; the other units have none. The section Notes of ``flash_attention_2``
        describes them.
    unit : {"auto", "simt", "mma", "wgmma"}, default "auto"
        Which instructions multiply matrices. "simt": CUDA cores, for float32, on compute capability
        7.5 or newer. "mma": tensor cores, for float16 and bfloat16, and for float32 with a
        ``precision`` other than "ieee", on 8.0 or newer. "wgmma": Hopper's tensor cores, for the
        dtypes of "mma" and for float8_e4m3fn, on 9.0 only. "auto" takes "simt" for float32 with
        precision "ieee", and "mma" for float16 and bfloat16. With another ``precision``, "auto"
        takes "wgmma" if it supports the call and is expected to be fast, else "mma". The emulator
        runs all three units, but "auto" does not take "wgmma" there.

    Returns
    -------
    out : array
        Output, shape (batch, heads_q, seqlen_q, head_dim_v), with the dtype, layout, library and
        device of q. For packed sequences it is (total_q, heads_q, head_dim_v). If the library of q
        is not named above, the output is a NumPy array on the host, or a Numba device array on a
        GPU.
    lse : array of float32
        Logsumexp, only returned with ``return_lse=True``, as the tuple ``(out, lse)``. Its shape is
        (batch, heads_q, seqlen_q), for packed sequences (heads_q, total_q). It is the natural
        logarithm of each row's sum of exponentials of the scaled and masked scores.

    Raises
    ------
    TypeError
        If an argument has a wrong type or dtype, or an unknown name.
    ValueError
        If a value, a shape or a combination of arguments is not allowed, if tiles do not fit the
        device, or if the emulator would run for more than about 30 seconds. Also for a torch tensor
        that requires a gradient, unless ``torch.no_grad()`` is active. All errors are raised before
        anything runs.

    See Also
    --------
    attention : Attention by any of the three algorithms.
    flash_attention_2 : The same result in the other loop order.
    flash_attention_1_backward : Gradients in this loop order.

    Notes
    -----
    This is Algorithm 1 of FlashAttention (arXiv 2205.14135), lines 5 to 13.
    ``warp_partition="keys"`` divides the work as the code that was released with the paper does.
    FlashAttention-2 calls this "split-K" (arXiv 2307.08691, section 3.3). There is no
    ``kv_splits``, because O after one column tile is the input of the next column tile.

    The workspace contains l and m, two float32 numbers per row. In float16 and bfloat16 it also
    contains O in float32. With a ``precision`` other than "ieee" it also contains the planes of q,
    k and v. A row that sees no column has output 0 and logsumexp -inf, or logsumexp ``sink`` with
    the option ``sinks``.

    Examples
    --------
    >>> import numpy as np, fa_numba
    >>> q = np.linspace(-1, 1, 64, dtype=np.float32).reshape(1, 1, 16, 4)
    >>> a, b = fa_numba.flash_attention_1(q, q, q), fa_numba.flash_attention_2(q, q, q)
    >>> bool(abs(a - b).max() < 1e-6)
    True
    """
    choices = choices_of(
        "fa1", "fwd", tiles, unit, return_lse, ablate,
        query_splits=query_splits, warp_partition=warp_partition,
    )  # fmt: skip
    return call_attention(choices, (q, k, v), options, stream, out)


@overload
def flash_attention_2(
    q: A, k: Array, v: Array, *,
    tiles: Tiles | None = None, return_lse: Literal[False] = False, out: Array | None = None,
    stream: Stream = None, ablate: tuple[str, ...] = (), unit: UnitName = "auto",
    kv_splits: Splits = "auto", prefix_k: Array | None = None, prefix_v: Array | None = None,
    **options: Unpack[AttentionOptions],
) -> A: ...  # fmt: skip
@overload
def flash_attention_2(
    q: A, k: Array, v: Array, *,
    tiles: Tiles | None = None, return_lse: Literal[True], out: Array | None = None,
    stream: Stream = None, ablate: tuple[str, ...] = (), unit: UnitName = "auto",
    kv_splits: Splits = "auto", prefix_k: Array | None = None, prefix_v: Array | None = None,
    **options: Unpack[AttentionOptions],
) -> tuple[A, Any]: ...  # fmt: skip
@overload
def flash_attention_2(
    q: A, k: Array, v: Array, *,
    tiles: Tiles | None = None, return_lse: bool = False, out: Array | None = None,
    stream: Stream = None, ablate: tuple[str, ...] = (), unit: UnitName = "auto",
    kv_splits: Splits = "auto", prefix_k: Array | None = None, prefix_v: Array | None = None,
    **options: Unpack[AttentionOptions],
) -> Any: ...  # fmt: skip
@documents_options
def flash_attention_2(
    q: A, k: Array, v: Array, *, tiles: Tiles | None = None, return_lse: bool = False,
    out: Array | None = None, stream: Stream = None, ablate: tuple[str, ...] = (),
    unit: UnitName = "auto", kv_splits: Splits = "auto", prefix_k: Array | None = None,
    prefix_v: Array | None = None, **options: Unpack[AttentionOptions],
) -> A | tuple[A, Any]:  # fmt: skip
    """Return attention in FlashAttention-2's loop order, Q outer.

    The outer loop goes over row tiles of q, and each thread block takes row tiles. The inner loop
    goes over column tiles of k and v. Until a row tile is finished, its output O, row sums l and
    row maxima m stay on the chip.

    Parameters
    ----------
    q : array
        Queries, shape (batch, heads_q, seqlen_q, head_dim), any strides. The dtype is float32,
        float16 or bfloat16, or float8_e4m3fn with scales (see ``q_scale``). head_dim must be from 1
        to 256. NumPy arrays, torch tensors, JAX and CuPy arrays, and arrays with
        ``__cuda_array_interface__`` or DLPack are taken without conversion. Lists are refused.
    k : array
        Keys, shape (batch, heads_k, seqlen_k, head_dim), dtype and device of q. heads_k must divide
        heads_q; query head h reads head ``h // (heads_q // heads_k)`` of k and v.
    v : array
        Values, shape (batch, heads_k, seqlen_k, head_dim_v), dtype and device of q. head_dim_v may
        differ from head_dim, and must be from 1 to 256.
    tiles : Tiles, optional
        Block sizes, threads and pipeline slots of the kernel. None chooses them;
        ``fa_numba.plan(...).tiles`` shows the choice.
    return_lse : bool, default False
        Whether the logsumexp is returned too. The backward pass and ``fa_numba.merge`` need it.
    out : array, optional
        Array that the output is written to. It must have the shape of the output, and the dtype,
        library and device of q. It must not share memory with an input. None makes a new array.
    stream : CUDA stream or int, optional
        Stream of torch, CuPy or Numba, or its address, on which the kernels run. None takes the
        current stream of q's library. On the emulator, only None is allowed.
    ablate : tuple of str, default ()
        Names of optimisations of the kernel that are switched off, to measure what each gains. The
        accesses to global memory do not change. The names are in the section Notes. Unit "simt"
        has none.
    unit : {"auto", "simt", "mma", "wgmma"}, default "auto"
        Which instructions multiply matrices. "simt": CUDA cores, for float32, on compute capability
        7.5 or newer. "mma": tensor cores, for float16 and bfloat16, and for float32 with a
        ``precision`` other than "ieee", on 8.0 or newer. "wgmma": Hopper's tensor cores, for the
        dtypes of "mma" and for float8_e4m3fn, on 9.0 only. "auto" takes the last of these units
        that supports the call and is expected to be fast; ``fa_numba.plan(...).why`` says why. The
        emulator runs all three units, but "auto" does not take "wgmma" there.
    kv_splits : int or "auto", default "auto"
        Number of thread blocks, 1 to 256, that share the columns of a row tile (Flash-Decoding). A
        second kernel merges their results in a fixed order. "auto" can be more than 1 if there are
        fewer row tiles than the GPU can run at once, or if a causal mask gives the row tiles
        unequal work. On the emulator, "auto" is 1.
    prefix_k : array, optional
        Keys that all sequences begin with, shape (heads_k, seqlen_prefix, head_dim), or
        (seqlen_prefix, heads_k, head_dim) with ``layout="bnhd"``, dtype and device of q. Every row
        sees all keys of the prefix, in addition to the columns of k that it sees without a prefix.
        The prefix is read once for the queries of all sequences. These options can be combined with
        a prefix: ``scale``, ``causal``, ``softcap``, ``sinks``, ``q_lens``, ``kv_lens``,
        ``block_table``, ``cu_seqlens_q``, ``cu_seqlens_k``, ``layout`` and ``precision``.
    prefix_v : array, optional
        Values of the prefix, shape (heads_k, seqlen_prefix, head_dim_v), or (seqlen_prefix,
        heads_k, head_dim_v) with ``layout="bnhd"``. ``prefix_k`` and ``prefix_v`` must be given
        together.

    Returns
    -------
    out : array
        Output, shape (batch, heads_q, seqlen_q, head_dim_v), with the dtype, layout, library and
        device of q. For packed sequences it is (total_q, heads_q, head_dim_v). If the library of q
        is not named above, the output is a NumPy array on the host, or a Numba device array on a
        GPU.
    lse : array of float32
        Logsumexp, only returned with ``return_lse=True``, as the tuple ``(out, lse)``. Its shape is
        (batch, heads_q, seqlen_q), for packed sequences (heads_q, total_q). It is the natural
        logarithm of each row's sum of exponentials of the scaled and masked scores.

    Raises
    ------
    TypeError
        If an argument has a wrong type or dtype, or an unknown name.
    ValueError
        If a value, a shape or a combination of arguments is not allowed, if tiles do not fit the
        device, or if the emulator would run for more than about 30 seconds. Also for a torch tensor
        that requires a gradient, unless ``torch.no_grad()`` is active. All errors are raised before
        anything runs.

    See Also
    --------
    attention : Attention by any of the three algorithms.
    flash_attention_1 : The same result in the other loop order.
    flash_attention_2_backward : Gradients.
    append_kv : Write new keys and values to the pages of a cache.
    merge : Combine attention over parts of the keys.

    Notes
    -----
    This is Algorithm 1 of FlashAttention-2 (arXiv 2307.08691). A row that sees no column has output
    0 and logsumexp -inf, or logsumexp ``sink`` with the option ``sinks``.

    The workspace contains the logsumexp, one float32 per row, unless ``return_lse`` is True. With a
    ``precision`` other than "ieee" it also contains the planes of q, k and v. Unit "wgmma" also has
    a counter of 4 bytes. With ``kv_splits`` above 1, each thread block writes O, l and m of its
    share of the columns to the workspace. A second kernel merges the shares.

    With a prefix, a first pass computes attention of the queries of all sequences over the prefix.
    A second pass computes attention of each sequence over its own k and v. A third kernel merges
    the two results by their logsumexps. Both results are rounded to the dtype of q before the
    merge. ``tiles``, ``unit``, ``ablate`` and ``kv_splits`` apply to both passes. There is no
    backward pass for a prefix.

    The names for ``ablate`` are:

    ================ ======= ==================================================================
    name             unit    what is switched off
    ================ ======= ==================================================================
    "swizzle"        "mma"   swizzled rows in shared memory; rows are padded instead
    "padding"        "mma"   padding of rows too; only together with "swizzle"
    "prefetch"       "mma"   loads of the next tiles during the products
    "q_registers"    "mma"   keeping the fragments of Q in registers
    "folded_scale"   "mma"   folding the scale of the scores into the exponent
    "wide_stores"    "mma"   16-byte stores of O
    "turns"          "wgmma" alternating the consumer warpgroups: one multiplies while another
                             computes a softmax
    "overlap"        "wgmma" products of a warpgroup during the softmax of the same warpgroup
    "persistent"     "wgmma" persistent thread blocks; only together with "counter"
    "counter"        "wgmma" counter that hands out row tiles to persistent thread blocks
    "ahead"          "wgmma" starting the first product of the next row tile before the current
                             row tile ends
    "late"           "wgmma" requesting the next row tile late, instead of as soon as a slot of
                             Q is empty
    "specialisation" "wgmma" warpgroup that only loads tiles; only together with "persistent"
                             and "counter", and without block_table or block_mask
    ================ ======= ==================================================================

    Examples
    --------
    >>> import numpy as np, fa_numba
    >>> q = np.zeros((1, 1, 3, 4), np.float32)
    >>> v = np.arange(12, dtype=np.float32).reshape(1, 1, 3, 4)
    >>> fa_numba.flash_attention_2(q, q, v, causal=True)[0, 0, :, 0].tolist()
    [0.0, 2.0, 4.0]
    >>> fa_numba.flash_attention_2(q, q, v, window=(0, 0))[0, 0, :, 0].tolist()
    [0.0, 4.0, 8.0]
    >>> out, lse = fa_numba.flash_attention_2(q, q, v, kv_splits=2, return_lse=True)
    >>> out.shape, lse.shape, lse.dtype
    ((1, 1, 3, 4), (1, 1, 3), dtype('float32'))
    """
    choices = choices_of("fa2", "fwd", tiles, unit, return_lse, ablate, kv_splits)
    if prefix_k is not None or prefix_v is not None:
        prefix = prefix_k, prefix_v
        return call_with_prefix(choices, (q, k, v), prefix, options, stream, out)
    return call_attention(choices, (q, k, v), options, stream, out)


@overload
def attention(
    q: A, k: Array, v: Array, *,
    algorithm: Algorithm = "fa2", tiles: Tiles | None = None, return_lse: Literal[False] = False,
    out: Array | None = None, stream: Stream = None, unit: UnitName = "auto",
    query_splits: int = 1, warp_partition: WarpPartition = "rows", kv_splits: Splits = "auto",
    ablate: tuple[str, ...] = (), prefix_k: Array | None = None, prefix_v: Array | None = None,
    **options: Unpack[AttentionOptions],
) -> A: ...  # fmt: skip
@overload
def attention(
    q: A, k: Array, v: Array, *,
    algorithm: Algorithm = "fa2", tiles: Tiles | None = None, return_lse: Literal[True],
    out: Array | None = None, stream: Stream = None, unit: UnitName = "auto",
    query_splits: int = 1, warp_partition: WarpPartition = "rows", kv_splits: Splits = "auto",
    ablate: tuple[str, ...] = (), prefix_k: Array | None = None, prefix_v: Array | None = None,
    **options: Unpack[AttentionOptions],
) -> tuple[A, Any]: ...  # fmt: skip
@overload
def attention(
    q: A, k: Array, v: Array, *,
    algorithm: Algorithm = "fa2", tiles: Tiles | None = None, return_lse: bool = False,
    out: Array | None = None, stream: Stream = None, unit: UnitName = "auto",
    query_splits: int = 1, warp_partition: WarpPartition = "rows", kv_splits: Splits = "auto",
    ablate: tuple[str, ...] = (), prefix_k: Array | None = None, prefix_v: Array | None = None,
    **options: Unpack[AttentionOptions],
) -> Any: ...  # fmt: skip
@documents_options
def attention(
    q: A, k: Array, v: Array, *, algorithm: Algorithm = "fa2", **options: Any
) -> A | tuple[A, Any]:
    """Return attention, ``softmax(scale * q @ k.T) @ v``, by one of three algorithms.

    The three algorithms compute the same output up to rounding. Arrays on a GPU are used in place.
    Arrays in host memory are copied to the GPU, and the result is copied back. Without a GPU, the
    call runs on the emulator. This function computes no gradients. ``attention_backward`` computes
    gradients, and ``fa_numba.torch.attention`` is differentiable.

    Parameters
    ----------
    q : array
        Queries, shape (batch, heads_q, seqlen_q, head_dim), any strides. The dtype is float32,
        float16 or bfloat16, or float8_e4m3fn with scales (see ``q_scale``). head_dim must be from 1
        to 256. NumPy arrays, torch tensors, JAX and CuPy arrays, and arrays with
        ``__cuda_array_interface__`` or DLPack are taken without conversion. Lists are refused.
    k : array
        Keys, shape (batch, heads_k, seqlen_k, head_dim), dtype and device of q. heads_k must divide
        heads_q; query head h reads head ``h // (heads_q // heads_k)`` of k and v.
    v : array
        Values, shape (batch, heads_k, seqlen_k, head_dim_v), dtype and device of q. head_dim_v may
        differ from head_dim, and must be from 1 to 256.
    algorithm : {"fa2", "fa1", "standard"}, default "fa2"
        "fa2" is ``flash_attention_2``: Q outer, with a grid over the row tiles. "fa1" is
        ``flash_attention_1``: K/V outer. "standard" is ``standard_attention``: S and P are in
        global memory.
    tiles : Tiles, optional
        Block sizes, threads and pipeline slots of the kernel. None chooses them;
        ``fa_numba.plan(...).tiles`` shows the choice. ``stages`` above 1 is only for "fa2" on the
        units "mma" and "wgmma".
    return_lse : bool, default False
        Whether the logsumexp is returned too. The backward pass and ``fa_numba.merge`` need it.
    out : array, optional
        Array that the output is written to. It must have the shape of the output, and the dtype,
        library and device of q. It must not share memory with an input. None makes a new array.
    stream : CUDA stream or int, optional
        Stream of torch, CuPy or Numba, or its address, on which the kernels run. None takes the
        current stream of q's library. On the emulator, only None is allowed.
    unit : {"auto", "simt", "mma", "wgmma"}, default "auto"
        Which instructions multiply matrices. "simt": CUDA cores, for float32, on compute capability
        7.5 or newer. "mma": tensor cores, for float16 and bfloat16, and for float32 with a
        ``precision`` other than "ieee", on 8.0 or newer. "wgmma": Hopper's tensor cores, for the
        dtypes of "mma" and for float8_e4m3fn, on 9.0 only. "auto" takes the last of these units
        that supports the call and is expected to be fast; ``fa_numba.plan(...).why`` says why. The
        emulator runs all three units, but "auto" does not take "wgmma" there. "standard" does not
        take "wgmma". For "fa1", "auto" takes "wgmma" only with a ``precision`` other than "ieee".
    query_splits : int, default 1
        "fa1" only. Number of thread blocks that share the rows of q of one query head. 1 is the
        paper's grid: one thread block for each batch entry and head.
    warp_partition : {"rows", "keys"}, default "rows"
        "fa1" only. How the warps of a thread block divide the work. "rows": each warp has its own
        rows of q. "keys", on unit "mma" only: each warp has its own rows of k and v.
    kv_splits : int or "auto", default "auto"
        "fa2" only. Number of thread blocks, 1 to 256, that share the columns of a row tile
        (Flash-Decoding). "auto" can be more than 1 if a part of the GPU would be idle otherwise.
    ablate : tuple of str, default ()
        "fa1" and "fa2" only. Names of optimisations that are switched off, to measure what each
        gains. The names are in the section Notes of ``flash_attention_2``.
    prefix_k : array, optional
        "fa2" only. Keys that all sequences begin with, shape (heads_k, seqlen_prefix, head_dim);
        see ``flash_attention_2``.
    prefix_v : array, optional
        "fa2" only. Values of the prefix, shape (heads_k, seqlen_prefix, head_dim_v).

    Returns
    -------
    out : array
        Output, shape (batch, heads_q, seqlen_q, head_dim_v), with the dtype, layout, library and
        device of q. For packed sequences it is (total_q, heads_q, head_dim_v). If the library of q
        is not named above, the output is a NumPy array on the host, or a Numba device array on a
        GPU.
    lse : array of float32
        Logsumexp, only returned with ``return_lse=True``, as the tuple ``(out, lse)``. Its shape is
        (batch, heads_q, seqlen_q), for packed sequences (heads_q, total_q). It is the natural
        logarithm of each row's sum of exponentials of the scaled and masked scores.

    Raises
    ------
    TypeError
        If an argument has a wrong type or dtype, or an unknown name.
    ValueError
        If a value, a shape or a combination of arguments is not allowed, if tiles do not fit the
        device, or if the emulator would run for more than about 30 seconds. Also for a torch tensor
        that requires a gradient, unless ``torch.no_grad()`` is active. All errors are raised before
        anything runs.

    See Also
    --------
    attention_backward : Gradients of this function.
    plan : What a call would launch, and why.
    fa_numba.torch.attention : Attention of torch tensors, with gradients.
    fa_numba.reference.attention : Attention in float64 with NumPy.

    Notes
    -----
    A row that sees no column has output 0, logsumexp -inf and gradients 0. With the option
    ``sinks``, the logsumexp of such a row is ``sink``. A column that no row sees has gradients 0.
    Sums and the softmax are in float32 for every dtype.

    Unit "wgmma" needs arrays whose rows are contiguous and start at 16-byte addresses. It takes
    ``scale``, ``layout`` and these options:

    ================== ================================================================
    algorithm, pass    options that unit "wgmma" takes
    ================== ================================================================
    "fa2", forward     all options except ``score_mod_grad``
    "fa2", backward    all options except the precision "bf16x6"; some combinations are
                       refused (``fa_numba/options.md`` lists them)
    "fa1", forward     ``causal``, ``window``, ``mask_mod``, ``block_mask``, ``softcap``,
                       ``score_mod``, ``sinks``, ``q_lens``, ``precision``
    "fa1", backward    ``causal``, ``window``, ``mask_mod``, ``block_mask``, ``sinks``,
                       ``score_mod``, ``score_mod_grad``; head dimensions up to 128
    ================== ================================================================

    On unit "wgmma", both backward passes refuse ``return_dbias``. With a ``precision`` other
    than "ieee", the rule is different: unit "wgmma" takes head dimensions up to 128, and only the
    options ``causal``, ``window``, ``q_lens``, ``kv_lens``, ``cu_seqlens_q``, ``cu_seqlens_k``,
    ``scale`` and ``layout``.

    Compiled kernels are kept on disk. On a GPU, the first call with new options takes seconds.

    Examples
    --------
    >>> import numpy as np, fa_numba
    >>> q = np.eye(4, dtype=np.float32).reshape(1, 1, 4, 4)
    >>> fa_numba.attention(q, q, q, algorithm="fa1", causal=True)[0, 0, 0].tolist()
    [1.0, 0.0, 0.0, 0.0]

    Four query heads share two heads of k and v, and the values have a head dimension of their own:

    >>> q = np.ones((1, 4, 5, 8), np.float32)
    >>> k, v = np.ones((1, 2, 7, 8), np.float32), np.ones((1, 2, 7, 16), np.float32)
    >>> out, lse = fa_numba.attention(q, k, v, scale=0.0, return_lse=True)
    >>> out.shape, lse.shape, bool(abs(lse - np.log(7)).max() < 1e-6)
    ((1, 4, 5, 16), (1, 4, 5), True)

    Options change the scores and masks:

    >>> _ = fa_numba.attention(q, k, v, window=(2, 0), softcap=30.0, kv_lens=[6])
    >>> _ = fa_numba.attention(q, k, v, score_mod=lambda score, b, h, i, j: score - abs(i - j))
    >>> packed = fa_numba.attention(q[0].transpose(1, 0, 2), k[0].transpose(1, 0, 2),
    ...                             v[0].transpose(1, 0, 2), cu_seqlens_q=[0, 2, 5],
    ...                             cu_seqlens_k=[0, 3, 7])
    >>> packed.shape
    (5, 4, 16)
    """
    functions: dict[str, Callable[..., Any]] = {
        "standard": standard_attention,
        "fa1": flash_attention_1,
        "fa2": flash_attention_2,
    }
    check_algorithm(algorithm)
    return functions[algorithm](q, k, v, **options)


@documents_options
def standard_attention_backward(
    dout: Array, q: Array, k: Array, v: Array, out: Array, lse: Array, *,
    tiles: Tiles | None = None, stream: Stream = None, dlse: Array | None = None,
    return_dbias: bool = False, return_dsinks: bool = False, return_dcaptured: bool = False,
    unit: UnitName = "auto", **options: Unpack[AttentionOptions],
) -> tuple[Any, ...]:  # fmt: skip
    """Return the gradients of attention by the standard algorithm.

    The kernels compute P and dP again, and store both matrices in global memory.

    Parameters
    ----------
    dout : array
        Gradient of the output, shape (batch, heads_q, seqlen_q, head_dim_v), dtype and device of q.
    q : array
        Queries of the forward pass, shape (batch, heads_q, seqlen_q, head_dim), dtype float32,
        float16 or bfloat16.
    k : array
        Keys of the forward pass, shape (batch, heads_k, seqlen_k, head_dim), dtype and device of q.
    v : array
        Values of the forward pass, shape (batch, heads_k, seqlen_k, head_dim_v), dtype and device
        of q.
    out : array
        Output of the forward pass, with the shape and dtype of ``dout``. The values of ``out`` are
        used only with ``return_dsinks``.
    lse : array of float32
        Logsumexp of the forward pass with ``return_lse=True``, shape (batch, heads_q, seqlen_q),
        for packed sequences (heads_q, total_q). The values of ``lse`` are used only with ``dlse``
        or ``return_dsinks``.
    tiles : Tiles, optional
        Block sizes and threads of the kernels that multiply matrices. None chooses them. ``stages``
        must be 1.
    stream : CUDA stream or int, optional
        Stream of torch, CuPy or Numba, or its address, on which the kernels run. None takes the
        current stream of q's library. On the emulator, only None is allowed.
    dlse : array of float32, optional
        Gradient of ``lse``, with the shape of ``lse``, for a loss that depends on the logsumexp. It
        has no effect in rows with logsumexp -inf. With ``sinks``, the logsumexp of a row that sees
        no column is the sink, and ``dlse`` of that row counts in the gradient of ``sinks``.
    return_dbias : bool, default False
        Whether the gradient of ``bias``, or of ``attn_mask``, is returned too. It can be True only
        with one of the two.
    return_dsinks : bool, default False
        Whether the gradient of ``sinks`` is returned too. It can be True only with ``sinks``.
    return_dcaptured : bool, default False
        Must be False. Standard attention computes no gradients of arrays that ``score_mod`` uses.
    unit : {"auto", "simt", "mma"}, default "auto"
        Which instructions multiply matrices. "simt": CUDA cores, for float32, on compute capability
        7.5 or newer. "mma": tensor cores, for float16 and bfloat16, on 8.0 or newer. "auto" takes
        the unit that is for the dtype of q.

    Returns
    -------
    dq : array
        Gradient of q, with the shape, dtype, library and device of q. The function returns a tuple:
        dq is its first element, and the other gradients follow in the order of this list.
    dk : array
        Gradient of k, with the shape of k, and the dtype, library and device of q.
    dv : array
        Gradient of v, with the shape of v, and the dtype, library and device of q.
    dbias : array of float32
        Only with ``return_dbias=True``. Gradient of ``bias`` or ``attn_mask``, with the shape of
        that array. The gradient is summed over the axes that are broadcast.
    dsinks : array of float32
        Only with ``return_dsinks=True``. Gradient of ``sinks``, shape (heads_q,).

    Raises
    ------
    TypeError
        If an argument has a wrong type or dtype, or an unknown name.
    ValueError
        If a value, a shape or a combination of arguments is not allowed, if tiles do not fit the
        device, or if the emulator would run for more than about 30 seconds. Also for a torch tensor
        that requires a gradient, unless ``torch.no_grad()`` is active. All errors are raised before
        anything runs.

    See Also
    --------
    attention_backward : Gradients by any of the three algorithms.
    standard_attention : The forward pass.

    Notes
    -----
    This is Algorithm 3 of FlashAttention (arXiv 2205.14135). The workspace contains the two
    matrices P and dP, each of seqlen_q x seqlen_k elements per head, in the dtype of q. dS
    overwrites dP. With ``return_dsinks`` the workspace also contains one float32 per row. All sums
    have a fixed order, with one exception: sums of ``dbias`` over axes that are broadcast.

    Examples
    --------
    >>> import numpy as np, fa_numba
    >>> q = np.eye(4, dtype=np.float32).reshape(1, 1, 4, 4)
    >>> o, lse = fa_numba.standard_attention(q, q, q, return_lse=True)
    >>> dq, dk, dv = fa_numba.standard_attention_backward(np.ones_like(o), q, q, q, o, lse)
    >>> dv.sum().round(3).item()
    16.0
    """
    choices = choices_of(
        "standard", "bwd", tiles, unit, return_dbias=return_dbias, return_dsinks=return_dsinks,
        return_dcaptured=return_dcaptured, dlse=dlse is not None,
    )  # fmt: skip
    return call_attention(choices, (q, k, v, out, dout, lse, dlse), options, stream)


@documents_options
def flash_attention_1_backward(
    dout: Array, q: Array, k: Array, v: Array, out: Array, lse: Array, *,
    tiles: Tiles | None = None, stream: Stream = None, dlse: Array | None = None,
    return_dbias: bool = False, return_dsinks: bool = False, return_dcaptured: bool = False,
    unit: UnitName = "auto", query_splits: int = 1, **options: Unpack[AttentionOptions],
) -> tuple[Any, ...]:  # fmt: skip
    """Return the gradients of attention in FlashAttention-1's loop order, K/V outer.

    The outer loop goes over column tiles of k and v, the inner loop over row tiles of q. dq passes
    through global memory in every pass of the outer loop. dq is summed in a fixed order.

    Parameters
    ----------
    dout : array
        Gradient of the output, shape (batch, heads_q, seqlen_q, head_dim_v), dtype and device of q.
    q : array
        Queries of the forward pass, shape (batch, heads_q, seqlen_q, head_dim), dtype float32,
        float16 or bfloat16.
    k : array
        Keys of the forward pass, shape (batch, heads_k, seqlen_k, head_dim), dtype and device of q.
    v : array
        Values of the forward pass, shape (batch, heads_k, seqlen_k, head_dim_v), dtype and device
        of q.
    out : array
        Output of the forward pass, with the shape and dtype of ``dout``.
    lse : array of float32
        Logsumexp of the forward pass with ``return_lse=True``, shape (batch, heads_q, seqlen_q),
        for packed sequences (heads_q, total_q).
    tiles : Tiles, optional
        Block sizes and threads of the kernel. None chooses them. ``stages`` must be 1. Unit "wgmma"
        allows only one pair of Br and Bc, which depends on the head dimension.
    stream : CUDA stream or int, optional
        Stream of torch, CuPy or Numba, or its address, on which the kernels run. None takes the
        current stream of q's library. On the emulator, only None is allowed.
    dlse : array of float32, optional
        Gradient of ``lse``, with the shape of ``lse``, for a loss that depends on the logsumexp. It
        has no effect in rows with logsumexp -inf. With ``sinks``, the logsumexp of a row that sees
        no column is the sink, and ``dlse`` of that row counts in the gradient of ``sinks``.
    return_dbias : bool, default False
        Whether the gradient of ``bias``, or of ``attn_mask``, is returned too. It can be True only
        with one of the two.
    return_dsinks : bool, default False
        Whether the gradient of ``sinks`` is returned too. It can be True only with ``sinks``.
    return_dcaptured : bool, default False
        Whether the gradients of the arrays that ``score_mod`` uses are returned too. It can be True
        only if at least one of these arrays is float32.
    unit : {"auto", "simt", "mma", "wgmma"}, default "auto"
        Which instructions multiply matrices. "simt": CUDA cores, for float32, on compute capability
        7.5 or newer. "mma": tensor cores, for float16 and bfloat16, on 8.0 or newer. "wgmma":
        Hopper's tensor cores, for float16 and bfloat16, on 9.0 only, for head dimensions up to 128.
        "auto" takes "simt" for float32 and "mma" for the other dtypes, and never "wgmma". The
        emulator runs all three units.
    query_splits : int, default 1
        Number of thread blocks that share the rows of q of one K/V head. 1 is the paper's grid.
        With more than 1, the thread blocks add to dk and dv by atomic adds, in no fixed order.

    Returns
    -------
    dq : array
        Gradient of q, with the shape, dtype, library and device of q. The function returns a tuple:
        dq is its first element, and the other gradients follow in the order of this list.
    dk : array
        Gradient of k, with the shape of k, and the dtype, library and device of q.
    dv : array
        Gradient of v, with the shape of v, and the dtype, library and device of q.
    dbias : array of float32
        Only with ``return_dbias=True``. Gradient of ``bias`` or ``attn_mask``, with the shape of
        that array. The gradient is summed over the axes that are broadcast.
    dsinks : array of float32
        Only with ``return_dsinks=True``. Gradient of ``sinks``, shape (heads_q,).
    dcaptured : dict
        Only with ``return_dcaptured=True``. The keys are the names of the arrays that ``score_mod``
        uses. The value is a float32 gradient with the shape of the array, or None for an int32 or
        bool array.

    Raises
    ------
    TypeError
        If an argument has a wrong type or dtype, or an unknown name.
    ValueError
        If a value, a shape or a combination of arguments is not allowed, if tiles do not fit the
        device, or if the emulator would run for more than about 30 seconds. Also for a torch tensor
        that requires a gradient, unless ``torch.no_grad()`` is active. All errors are raised before
        anything runs.

    See Also
    --------
    attention_backward : Gradients by any of the three algorithms.
    flash_attention_1 : The forward pass.

    Notes
    -----
    This is Algorithm 4 of FlashAttention (arXiv 2205.14135). In float32 there is no workspace. In
    float16 and bfloat16 the workspace contains dq in float32, and with ``query_splits`` above 1
    also dk and dv in float32. With ``return_dsinks`` the workspace also contains one float32 per
    row, for every dtype. Two kinds of gradients are summed by atomic adds, in no fixed order:
    gradients of a bias that is broadcast, and gradients of arrays that ``score_mod`` uses.

    Examples
    --------
    >>> import numpy as np, fa_numba
    >>> q = np.eye(4, dtype=np.float32).reshape(1, 1, 4, 4)
    >>> o, lse = fa_numba.flash_attention_1(q, q, q, return_lse=True)
    >>> dq, dk, dv = fa_numba.flash_attention_1_backward(np.ones_like(o), q, q, q, o, lse)
    >>> dv.sum().round(3).item()
    16.0
    """
    choices = choices_of(
        "fa1", "bwd", tiles, unit, return_dbias=return_dbias, return_dsinks=return_dsinks,
        return_dcaptured=return_dcaptured, dlse=dlse is not None, query_splits=query_splits,
    )  # fmt: skip
    return call_attention(choices, (q, k, v, out, dout, lse, dlse), options, stream)


@documents_options
def flash_attention_2_backward(
    dout: Array, q: Array, k: Array, v: Array, out: Array, lse: Array, *,
    tiles: Tiles | None = None, stream: Stream = None, dlse: Array | None = None,
    return_dbias: bool = False, return_dsinks: bool = False, return_dcaptured: bool = False,
    deterministic: bool = False, unit: UnitName = "auto", group_splits: Splits = "auto",
    **options: Unpack[AttentionOptions],
) -> tuple[Any, ...]:  # fmt: skip
    """Return the gradients of attention with FlashAttention-2's grid over column tiles.

    Each thread block has a column tile of k and v, and loops over the row tiles of q. dk and dv of
    the column tile stay on the chip. The thread blocks add to dq by atomic adds.

    Parameters
    ----------
    dout : array
        Gradient of the output, shape (batch, heads_q, seqlen_q, head_dim_v), dtype and device of q.
    q : array
        Queries of the forward pass, shape (batch, heads_q, seqlen_q, head_dim), dtype float32,
        float16 or bfloat16.
    k : array
        Keys of the forward pass, shape (batch, heads_k, seqlen_k, head_dim), dtype and device of q.
    v : array
        Values of the forward pass, shape (batch, heads_k, seqlen_k, head_dim_v), dtype and device
        of q.
    out : array
        Output of the forward pass, with the shape and dtype of ``dout``.
    lse : array of float32
        Logsumexp of the forward pass with ``return_lse=True``, shape (batch, heads_q, seqlen_q),
        for packed sequences (heads_q, total_q).
    tiles : Tiles, optional
        Block sizes and threads of the kernel. None chooses them. ``stages`` must be 1. Unit "wgmma"
        allows only one pair of Br and Bc, which depends on the head dimension.
    stream : CUDA stream or int, optional
        Stream of torch, CuPy or Numba, or its address, on which the kernels run. None takes the
        current stream of q's library. On the emulator, only None is allowed.
    dlse : array of float32, optional
        Gradient of ``lse``, with the shape of ``lse``, for a loss that depends on the logsumexp. It
        has no effect in rows with logsumexp -inf. With ``sinks``, the logsumexp of a row that sees
        no column is the sink, and ``dlse`` of that row counts in the gradient of ``sinks``.
    return_dbias : bool, default False
        Whether the gradient of ``bias``, or of ``attn_mask``, is returned too. It can be True only
        with one of the two.
    return_dsinks : bool, default False
        Whether the gradient of ``sinks`` is returned too. It can be True only with ``sinks``.
    return_dcaptured : bool, default False
        Whether the gradients of the arrays that ``score_mod`` uses are returned too. It can be True
        only if at least one of these arrays is float32.
    deterministic : bool, default False
        Whether dq is summed in a fixed order. True computes dq in a second kernel, which costs
        time. False sums dq by atomic adds, so dq can differ in the last bits between runs. There is
        one exception: on unit "wgmma" with head dimensions above 128, the second kernel computes dq
        in both cases. True cannot be combined with ``return_dcaptured``, with a ``precision`` other
        than "ieee", or with ``return_dbias`` for a bias that is broadcast.
    unit : {"auto", "simt", "mma", "wgmma"}, default "auto"
        Which instructions multiply matrices. "simt": CUDA cores, for float32, on compute capability
        7.5 or newer. "mma": tensor cores, for float16 and bfloat16, and for float32 with a
        ``precision`` other than "ieee", on 8.0 or newer. "wgmma": Hopper's tensor cores, for the
        dtypes of "mma" and for float8_e4m3fn, on 9.0 only. "auto" takes the last of these units
        that supports the call and is expected to be fast; ``fa_numba.plan(...).why`` says why. The
        emulator runs all three units, but "auto" does not take "wgmma" there.
    group_splits : int or "auto", default "auto"
        Number of thread blocks that share a column tile of a K/V head. More than 1 is for unit
        "wgmma" and head dimensions up to 128, with precision "ieee". The number must be a divisor
        of ``heads_q // heads_k``. A multiple of ``heads_q // heads_k`` is also allowed, except with
        ``softcap``, ``score_mod``, ``alibi_slopes``, ``bias`` and ``attn_mask``. "auto" estimates
        the fastest number. On the emulator, "auto" is 1.

    Returns
    -------
    dq : array
        Gradient of q, with the shape, dtype, library and device of q. The function returns a tuple:
        dq is its first element, and the other gradients follow in the order of this list.
    dk : array
        Gradient of k, with the shape of k, and the dtype, library and device of q.
    dv : array
        Gradient of v, with the shape of v, and the dtype, library and device of q.
    dbias : array of float32
        Only with ``return_dbias=True``. Gradient of ``bias`` or ``attn_mask``, with the shape of
        that array. The gradient is summed over the axes that are broadcast.
    dsinks : array of float32
        Only with ``return_dsinks=True``. Gradient of ``sinks``, shape (heads_q,).
    dcaptured : dict
        Only with ``return_dcaptured=True``. The keys are the names of the arrays that ``score_mod``
        uses. The value is a float32 gradient with the shape of the array, or None for an int32 or
        bool array.

    Raises
    ------
    TypeError
        If an argument has a wrong type or dtype, or an unknown name.
    ValueError
        If a value, a shape or a combination of arguments is not allowed, if tiles do not fit the
        device, or if the emulator would run for more than about 30 seconds. Also for a torch tensor
        that requires a gradient, unless ``torch.no_grad()`` is active. All errors are raised before
        anything runs.

    See Also
    --------
    attention_backward : Gradients by any of the three algorithms.
    flash_attention_2 : The forward pass, with the same options.

    Notes
    -----
    This is Algorithm 2 of FlashAttention-2 (arXiv 2307.08691). With D = rowsum(dO o O) it computes
    dS = P o (dP - D + dlse), where o is the elementwise product. Rows that see no column, and
    columns that no row sees, have gradients 0.

    Without a mask, the atomic adds to dq cost Tc * seqlen_q * head_dim loads and the same number of
    stores per head. Tc is the number of column tiles. The second kernel for dq has Q outer,
    computes S and dP again, and needs no atomic adds. Two other kinds of gradients are summed by
    atomic adds: gradients of a bias that is broadcast, and gradients of arrays that ``score_mod``
    uses.

    The workspace contains D, one float32 per row. If dq is summed by atomic adds, it also contains
    dq in float32 for these dtypes: float16, bfloat16, and float32 with a ``precision`` other than
    "ieee". With such a ``precision`` the workspace also contains the planes of q, k, v and dout.
    With ``group_splits`` above 1, each thread block writes its parts of dk and dv to the workspace
    in float32. Another kernel sums the parts in a fixed order.

    Examples
    --------
    >>> import numpy as np, fa_numba
    >>> q = np.linspace(-1, 1, 32, dtype=np.float32).reshape(1, 1, 8, 4)
    >>> o, lse = fa_numba.flash_attention_2(q, q, q, return_lse=True)
    >>> dq, dk, dv = fa_numba.flash_attention_2_backward(np.ones_like(o), q, q, q, o, lse)
    >>> dv.sum().round(3).item()
    32.0
    """
    choices = choices_of(
        "fa2", "bwd", tiles, unit, return_dbias=return_dbias, return_dsinks=return_dsinks,
        return_dcaptured=return_dcaptured, dlse=dlse is not None, deterministic=deterministic,
        group_splits=group_splits,
    )  # fmt: skip
    return call_attention(choices, (q, k, v, out, dout, lse, dlse), options, stream)


class BackwardArguments(AttentionOptions, total=False):
    """Keyword arguments of ``attention_backward``, in addition to ``algorithm``."""

    dlse: Array | None
    return_dbias: bool
    return_dsinks: bool
    return_dcaptured: bool
    deterministic: bool
    group_splits: Splits
    query_splits: int
    tiles: Tiles | None
    unit: UnitName
    stream: Stream


@documents_options
def attention_backward(
    dout: Array, q: Array, k: Array, v: Array, out: Array, lse: Array, *,
    algorithm: Algorithm = "fa2", **options: Unpack[BackwardArguments],
) -> tuple[Any, ...]:  # fmt: skip
    """Return the gradients of ``attention`` by one of three algorithms.

    The three algorithms compute the same gradients up to rounding. The algorithm may differ from
    the algorithm of the forward pass. The options must be those of the forward pass.

    Parameters
    ----------
    dout : array
        Gradient of the output, shape (batch, heads_q, seqlen_q, head_dim_v), dtype and device of q.
    q : array
        Queries of the forward pass, shape (batch, heads_q, seqlen_q, head_dim), dtype float32,
        float16 or bfloat16.
    k : array
        Keys of the forward pass, shape (batch, heads_k, seqlen_k, head_dim), dtype and device of q.
    v : array
        Values of the forward pass, shape (batch, heads_k, seqlen_k, head_dim_v), dtype and device
        of q.
    out : array
        Output of the forward pass, with the shape and dtype of ``dout``.
    lse : array of float32
        Logsumexp of the forward pass with ``return_lse=True``, shape (batch, heads_q, seqlen_q),
        for packed sequences (heads_q, total_q).
    algorithm : {"fa2", "fa1", "standard"}, default "fa2"
        "fa2" is ``flash_attention_2_backward``, with a grid over the column tiles. "fa1" is
        ``flash_attention_1_backward``: K/V outer. "standard" is ``standard_attention_backward``: P
        and dP are in global memory.
    dlse : array of float32, optional
        Gradient of ``lse``, with the shape of ``lse``, for a loss that depends on the logsumexp. It
        has no effect in rows with logsumexp -inf. With ``sinks``, the logsumexp of a row that sees
        no column is the sink, and ``dlse`` of that row counts in the gradient of ``sinks``.
    return_dbias : bool, default False
        Whether the gradient of ``bias``, or of ``attn_mask``, is returned too. It can be True only
        with one of the two.
    return_dsinks : bool, default False
        Whether the gradient of ``sinks`` is returned too. It can be True only with ``sinks``.
    return_dcaptured : bool, default False
        "fa1" and "fa2" only. Whether the gradients of the arrays that ``score_mod`` uses are
        returned too. It can be True only if at least one of these arrays is float32.
    deterministic : bool, default False
        "fa2" only. Whether dq is summed in a fixed order, by a second kernel. False sums dq by
        atomic adds, except on unit "wgmma" with head dimensions above 128. The algorithms "fa1" and
        "standard" always sum dq in a fixed order.
    group_splits : int or "auto", default "auto"
        "fa2" only. Number of thread blocks that share a column tile of a K/V head. More than 1 is
        for unit "wgmma"; see ``flash_attention_2_backward``.
    query_splits : int, default 1
        "fa1" only. Number of thread blocks that share the rows of q of one K/V head.
    tiles : Tiles, optional
        Block sizes and threads of the kernel. None chooses them. ``stages`` must be 1. Unit "wgmma"
        allows only one pair of Br and Bc, which depends on the head dimension.
    unit : {"auto", "simt", "mma", "wgmma"}, default "auto"
        Which instructions multiply matrices. "simt": CUDA cores, for float32, on compute capability
        7.5 or newer. "mma": tensor cores, for float16 and bfloat16, on 8.0 or newer. "wgmma":
        Hopper's tensor cores, for float16 and bfloat16, on 9.0 only. For "fa2", "mma" and "wgmma"
        also take float32 with a ``precision`` other than "ieee". "auto" takes the last of these
        units that supports the call and is expected to be fast; ``fa_numba.plan(...).why`` says
        why. "standard" does not take "wgmma". For "fa1", "auto" never takes "wgmma". The emulator
        runs all three units, but "auto" does not take "wgmma" there.
    stream : CUDA stream or int, optional
        Stream of torch, CuPy or Numba, or its address, on which the kernels run. None takes the
        current stream of q's library. On the emulator, only None is allowed.

    Returns
    -------
    dq : array
        Gradient of q, with the shape, dtype, library and device of q. The function returns a tuple:
        dq is its first element, and the other gradients follow in the order of this list.
    dk : array
        Gradient of k, with the shape of k, and the dtype, library and device of q.
    dv : array
        Gradient of v, with the shape of v, and the dtype, library and device of q.
    dbias : array of float32
        Only with ``return_dbias=True``. Gradient of ``bias`` or ``attn_mask``, with the shape of
        that array. The gradient is summed over the axes that are broadcast.
    dsinks : array of float32
        Only with ``return_dsinks=True``. Gradient of ``sinks``, shape (heads_q,).
    dcaptured : dict
        Only with ``return_dcaptured=True``. The keys are the names of the arrays that ``score_mod``
        uses. The value is a float32 gradient with the shape of the array, or None for an int32 or
        bool array.

    Raises
    ------
    TypeError
        If an argument has a wrong type or dtype, or an unknown name.
    ValueError
        If a value, a shape or a combination of arguments is not allowed, if tiles do not fit the
        device, or if the emulator would run for more than about 30 seconds. Also for a torch tensor
        that requires a gradient, unless ``torch.no_grad()`` is active. All errors are raised before
        anything runs.

    See Also
    --------
    attention : The forward pass.
    fa_numba.torch.attention : Attention for torch's automatic differentiation.
    fa_numba.reference.attention_backward : Gradients in float64 with NumPy.

    Notes
    -----
    A row that sees no column, and a column that no row sees, have gradients 0. Arguments such as
    ``kv_splits`` change only how the forward pass is computed. They are not given to the backward
    pass. There is no backward pass for a ``block_table`` or a prefix.

    Examples
    --------
    >>> import numpy as np, fa_numba
    >>> q = np.eye(4, dtype=np.float32).reshape(1, 1, 4, 4)
    >>> o, lse = fa_numba.attention(q, q, q, return_lse=True)
    >>> dq, dk, dv = fa_numba.attention_backward(q, q, q, q, o, lse)
    >>> dv.shape, dv.sum().round(3).item()
    ((1, 1, 4, 4), 4.0)
    """
    functions: dict[str, Callable[..., Any]] = {
        "standard": standard_attention_backward,
        "fa1": flash_attention_1_backward,
        "fa2": flash_attention_2_backward,
    }
    check_algorithm(algorithm)
    return functions[algorithm](dout, q, k, v, out, lse, **options)


def merge(
    outputs: Sequence[A], lses: Sequence[Array], *, layout: Layout | None = None,
    stream: Stream = None,
) -> tuple[A, Any]:  # fmt: skip
    """Combine attention over parts of the keys into attention over all keys.

    The parts are results of ``attention`` with ``return_lse=True`` for the same queries. The parts
    must not share keys.

    Parameters
    ----------
    outputs : list or tuple of array
        Two or more outputs, each (batch, heads, seqlen, head_dim), for packed sequences (total,
        heads, head_dim). All outputs must have the same shape, library, device and dtype (float32,
        float16 or bfloat16). Any strides are allowed.
    lses : list or tuple of array
        The logsumexp of each output, float32, (batch, heads, seqlen), for packed sequences (heads,
        total).
    layout : {"bhnd", "bnhd"}, optional
        "bnhd" if outputs are (batch, seqlen, heads, head_dim). None means "bhnd" for arrays of four
        axes, and packed sequences for arrays of three axes.
    stream : CUDA stream or int, optional
        Stream of torch, CuPy or Numba, or its address, on which the kernels run. None takes the
        current stream of the library of the first output. On the emulator, only None is allowed.

    Returns
    -------
    out : array
        Output over all keys, with the shape, dtype, library and device of the first output.
    lse : array of float32
        Logsumexp over all keys, with the shape of ``lses[0]``.

    Raises
    ------
    TypeError
        If ``outputs`` or ``lses`` is no list or tuple, or an array has a wrong type or dtype.
    ValueError
        If there are fewer than two outputs, if the numbers of ``outputs`` and ``lses`` differ, or
        if shapes or devices differ. All errors are raised before anything runs.

    See Also
    --------
    merge_backward : Gradients of this function.
    attention : Compute the parts.

    Notes
    -----
    For the parts s, ``lse = log(sum of exp(lse_s))`` and ``out = sum of exp(lse_s - lse) * out_s``.
    The sums are in float32 and are rounded once at the end. A part with logsumexp -inf in a row
    adds nothing to that row, whatever its output contains.

    Examples
    --------
    >>> import numpy as np, fa_numba
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 2, 16, 8), np.float32)
    >>> parts = [fa_numba.attention(q, k[:, :, s], v[:, :, s], return_lse=True)
    ...          for s in (slice(0, 5), slice(5, 16))]
    >>> o, lse = fa_numba.merge(*zip(*parts))
    >>> bool(abs(o - fa_numba.attention(q, k, v)).max() < 1e-6)
    True
    """
    return merge_all(outputs, lses, layout, stream)


def merge_backward(
    dout: Array, outputs: Sequence[A], lses: Sequence[Array], out: Array, lse: Array, *,
    dlse: Array | None = None, layout: Layout | None = None, stream: Stream = None,
) -> tuple[tuple[A, ...], tuple[Any, ...]]:  # fmt: skip
    """Return the gradients of ``merge``.

    Parameters
    ----------
    dout : array
        Gradient of ``out``, with the shape and dtype of ``out``.
    outputs : list or tuple of array
        Outputs that were given to ``merge``.
    lses : list or tuple of array
        Logsumexps that were given to ``merge``, float32.
    out : array
        Output that ``merge`` returned.
    lse : array of float32
        Logsumexp that ``merge`` returned.
    dlse : array of float32, optional
        Gradient of ``lse``, with the shape of ``lse``, for a loss that depends on ``lse``.
    layout : {"bhnd", "bnhd"}, optional
        Layout that was given to ``merge``.
    stream : CUDA stream or int, optional
        Stream of torch, CuPy or Numba, or its address, on which the kernels run. None takes the
        current stream of the library of ``dout``. On the emulator, only None is allowed.

    Returns
    -------
    douts : tuple of array
        Gradient of each array of ``outputs``, with its shape and dtype.
    dlses : tuple of array
        Gradient of each array of ``lses``, float32, with its shape.

    Raises
    ------
    TypeError
        If ``outputs`` or ``lses`` is no list or tuple, or an array has a wrong type or dtype.
    ValueError
        If the numbers of arrays, shapes or devices differ. All errors are raised before anything
        runs.

    See Also
    --------
    merge : Combine attention over parts of the keys.

    Notes
    -----
    With ``P_s = exp(lse_s - lse)`` for a part s, ``dout_s = P_s * dout`` and ``dlse_s = P_s *
    (rowsum(dout * (out_s - out)) + dlse)``. Both gradients are 0 in rows that see no column of the
    part.

    Examples
    --------
    >>> import numpy as np, fa_numba
    >>> outputs = list(np.zeros((2, 1, 1, 3, 4), np.float32))
    >>> lses = list(np.zeros((2, 1, 1, 3), np.float32))
    >>> o, lse = fa_numba.merge(outputs, lses)
    >>> douts, dlses = fa_numba.merge_backward(np.ones_like(o), outputs, lses, o, lse)
    >>> douts[0][0, 0, 0].tolist()
    [0.5, 0.5, 0.5, 0.5]
    """
    return merge_backward_all(dout, outputs, lses, out, lse, dlse, layout, stream)


def create_block_mask(
    mask_mod: Function, batch: int, heads: int, seqlen_q: int, seqlen_k: int, *,
    block_size: int | tuple[int, int] | Literal["auto"] = "auto", tiles: Tiles | None = None,
) -> BlockMask:  # fmt: skip
    """Return the blocks of S that a ``mask_mod`` leaves empty, full or mixed.

    Pass the result to attention as ``block_mask``. In both passes, "fa1" and "fa2" then skip empty
    tiles, and evaluate the function in mixed tiles only. One mask serves the forward and the
    backward pass of every algorithm and unit.

    Parameters
    ----------
    mask_mod : function
        Python function ``mask_mod(b, h, i, j)`` that returns whether row i sees column j. The rules
        of the option ``mask_mod`` of ``attention`` apply.
    batch : int
        Batch size of q, or 1 if the function does not use ``b``.
    heads : int
        Number of query heads, or 1 if the function does not use ``h``.
    seqlen_q : int
        Number of rows of q. For packed sequences, at least the rows of the longest sequence.
    seqlen_k : int
        Number of rows of k. For packed sequences, at least the rows of the longest sequence. For
        pages (``block_table``), at least the rows of all pages of a sequence.
    block_size : int or tuple of int or "auto", default "auto"
        Rows and columns of a block, one number for both or (rows, columns), each from 1 to 1024.
        Calls with the mask choose their tiles as they do without a block mask. "auto" takes 16 for
        sequences up to 2048 rows and columns, 32 up to 4096, and 64 above. It takes twice as many,
        up to 128, until the mask has at most 2**20 blocks.
    tiles : Tiles, optional
        Tiles whose Br and Bc are the block size. Calls with the mask use these tiles. The backward
        pass chooses other tiles if it has no kernel for these. ``block_size`` must be "auto".

    Returns
    -------
    BlockMask
        The function, and the state of each block. The attribute ``blocks`` contains 0 for an empty
        block, 1 for a mixed block and 2 for a full block. The mask uses the numbers and
        arrays with the values that they have during this call. Arrays of up to 1 MiB are copied.

    Raises
    ------
    TypeError
        If ``mask_mod`` is no Python function of four parameters, or if ``tiles`` has no Br and Bc.
    ValueError
        If the source of ``mask_mod`` is not available or contains what a kernel cannot compute, if
        the function uses anything except numbers and arrays of float32, int32 or bool, if
        a size is not positive or too large, if ``block_size`` and ``tiles`` are both given, or if
        the emulator would run for more than about 30 seconds.

    See Also
    --------
    attention : Takes the result as ``block_mask``.
    fa_numba.mods.blocks.BlockMask : What the result contains.

    Notes
    -----
    A kernel evaluates the function for every element of S, on the GPU if there is one. The states
    of the blocks are stored on the device of the arrays that the function uses. If it uses no
    array, they are stored on the host.

    If a call has tiles of another size, the first such call computes the states of the tiles on the
    host, and the mask keeps the states. A tile is empty if all blocks that it overlaps are empty,
    and full if all are full. Every other tile is mixed. If each tile consists of complete blocks,
    the states of the tiles are exact. If tiles are smaller than a block, a tile inside of a mixed
    block is mixed, even if the function hides the complete tile. The call then computes more tiles
    than necessary.

    NumPy arrays and torch tensors of more than 1 MiB are not copied. If such an array is changed in
    place later, attention with the mask raises ValueError, which names the array.

    Examples
    --------
    >>> import fa_numba
    >>> blocks = fa_numba.create_block_mask(lambda b, h, i, j: j <= i, 1, 1, 64, 64)
    >>> blocks.blocks[0, 0].tolist()
    [[1, 0, 0, 0], [2, 1, 0, 0], [2, 2, 1, 0], [2, 2, 2, 1]]
    >>> q = k = (1, 1, 64, 8)
    >>> [fa_numba.plan(q, k, block_mask=blocks, passes=p).tiles.Bc for p in ("fwd", "bwd")]
    [64, 64]
    """
    return create(mask_mod, (batch, heads, seqlen_q, seqlen_k), block_size, tiles)


def softmax(
    x: A, *, algorithm: str = "online", out: Array | None = None,
    stream: Stream = None,
) -> A:  # fmt: skip
    """Return the softmax of each row, by one of three algorithms.

    Parameters
    ----------
    x : array of float32
        Rows of numbers, shape (batch, elements), any strides, of any library that ``attention``
        takes. One thread block computes one row.
    algorithm : {"online", "safe", "naive"}, default "online"
        "naive" makes 3 accesses per element and overflows for x above 88.7. "safe" subtracts the
        maximum first and makes 4 accesses. "online" computes maximum and sum in one pass and makes
        3 accesses, as FlashAttention does.
    out : array of float32, optional
        Array that the result is written to, with the shape, library and device of x. None makes a
        new array.
    stream : CUDA stream or int, optional
        Stream of torch, CuPy or Numba, or its address, on which the kernels run. None takes the
        current stream of the library of x. On the emulator, only None is allowed.

    Returns
    -------
    array of float32
        The softmax, with the shape, library and device of x.

    Raises
    ------
    TypeError
        If ``x`` or ``out`` has a wrong type or dtype.
    ValueError
        If the algorithm is unknown, if a shape is wrong or empty, or if the emulator would run for
        more than about 30 seconds.

    Notes
    -----
    The algorithms are 1 (naive), 2 (safe) and 3 (online) of "Online normalizer calculation for
    softmax" (arXiv 1805.02867). An element of -inf gives 0. A row that has only elements of -inf
    gives 0 everywhere. If a row contains NaN or inf, all results of the row are NaN. There is one
    exception: with "naive", an inf gives NaN for this element and 0 for the rest of the row.

    Examples
    --------
    >>> import numpy as np, fa_numba
    >>> x = np.array([[1, 2, 3, 4]], np.float32)
    >>> fa_numba.softmax(x + 100).round(4)
    array([[0.0321, 0.0871, 0.2369, 0.6439]], dtype=float32)
    >>> fa_numba.softmax(x + 100, algorithm="naive")
    array([[nan, nan, nan, nan]], dtype=float32)
    """
    return softmax_of_vectors(x, algorithm, out, stream)
