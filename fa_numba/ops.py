"""The public functions on arrays of any library: attention, its gradients, merge, softmax."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Unpack

from fa_numba import device
from fa_numba.choices.requests import Request, check_algorithm, choices_of
from fa_numba.host import planning
from fa_numba.host.binding import Binding
from fa_numba.host.blocks import create
from fa_numba.host.calls import attend, of_blocks
from fa_numba.host.merging import merge_all
from fa_numba.host.merging import merge_backward as merge_backward_all
from fa_numba.host.plans import Plan
from fa_numba.host.prefix import attend as attend_prefix
from fa_numba.host.prefix import plan_of as plan_of_prefix
from fa_numba.host.softmax import softmax as softmax_of_vectors
from fa_numba.mods.blocks import BlockMask
from fa_numba.options import AttentionOptions, documents_options
from fa_numba.tiling import Tiles


@documents_options
def plan(
    q_shape: Sequence[int], k_shape: Sequence[int], v_shape: Sequence[int] | None = None, *,
    algorithm: str = "fa2", dtype: str = "float32", tiles: Tiles | None = None,
    return_lse: bool = False, query_splits: int = 1, warp_partition: str = "rows",
    ablate: tuple[str, ...] = (), passes: str = "fwd", deterministic: bool = False,
    return_dbias: bool = False, return_dsinks: bool = False, return_dcaptured: bool = False,
    dlse: bool = False, unit: str = "auto", kv_splits: int | str = "auto",
    group_splits: int | str = "auto", prefix_k: Sequence[int] | None = None,
    **options: Unpack[AttentionOptions],
) -> Plan:  # fmt: skip
    """Return the plan of a call of attention, without running the call.

    The plan has the kernels, grids, tiles, workspace, accesses and FLOPs of a call with these
    arguments, as it would run on the current device. Without a GPU the plan is that of the
    emulator, which has the limits of an H100. Arrays are not needed: shapes are enough.

    Parameters
    ----------
    q_shape : sequence of int
        Shape of q, (batch, heads_q, seqlen_q, head_dim). ``layout`` and ``cu_seqlens_q`` change the
        axes as they do in the call.
    k_shape : sequence of int
        Shape of k, (batch, heads_k, seqlen_k, head_dim), or the shape of its pages.
    v_shape : sequence of int, optional
        Shape of v, (batch, heads_k, seqlen_k, head_dim_v). None stands for the shape of k.
    algorithm : {"fa2", "fa1", "standard"}, default "fa2"
        Algorithm, as for ``attention``.
    dtype : {"float32", "float16", "bfloat16"}, default "float32"
        Dtype of q, k and v.
    tiles : Tiles, optional
        Block sizes, threads and pipeline stages, as in the call.
    return_lse : bool, default False
        Whether the call returns the logsumexp. Forward pass only.
    query_splits : int, default 1
        Thread blocks that share the rows of q of one head. "fa1" only.
    warp_partition : {"rows", "keys"}, default "rows"
        What the warps of a thread block share. "keys" is for the forward pass of "fa1" on unit
        "mma".
    ablate : tuple of str, default ()
        Optimisations that are switched off. Forward pass of "fa1" and "fa2" only.
    passes : {"fwd", "bwd"}, default "fwd"
        Forward or backward pass. The next arguments up to ``dlse`` are for the backward pass.
    deterministic : bool, default False
        Whether dq is summed in a fixed order. "fa2" only.
    return_dbias : bool, default False
        Whether the call returns the gradient of ``bias``.
    return_dsinks : bool, default False
        Whether the call returns the gradient of ``sinks``.
    return_dcaptured : bool, default False
        Whether the call returns the gradients of arrays that ``score_mod`` uses.
    dlse : bool, default False
        Whether the call is given a gradient of the logsumexp.
    unit : {"auto", "simt", "mma", "wgmma"}, default "auto"
        Which instructions multiply matrices, as for ``attention``.
    kv_splits : int or "auto", default "auto"
        Thread blocks that share the columns of a row tile. Forward pass of "fa2" only.
    group_splits : int or "auto", default "auto"
        Thread blocks that share a column tile of a K/V head. Backward pass of "fa2" only.
    prefix_k : array or sequence of int, optional
        Shared prefix of the keys, or its shape, (heads_k, seqlen_prefix, head_dim). Forward pass of
        "fa2" only.

    Returns
    -------
    Plan
        The plan. ``print(plan)`` shows it as a table, and ``print(plan.why)`` shows the reasons for
        its unit, tiles and splits.

    Raises
    ------
    TypeError
        If an argument has a wrong type, or an unknown name.
    ValueError
        If the call would be refused, for instance for shapes that do not match or tiles that do not
        fit the device. The emulator's limit on the running time does not apply.

    See Also
    --------
    attention : The call itself.
    Plan : What a plan contains.

    Notes
    -----
    Among the options, ``bias``, ``attn_mask``, ``alibi_slopes``, ``sinks`` and ``block_table`` may
    be given as shapes. All other options are given as in the call. Strides and addresses are not
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
    how: dict[str, Any] = {"return_lse": return_lse, "ablate": ablate, "kv_splits": kv_splits}
    how |= {"query_splits": query_splits, "warp_partition": warp_partition}
    how |= {"deterministic": deterministic, "return_dbias": return_dbias, "dlse": dlse}
    how |= {"return_dsinks": return_dsinks, "return_dcaptured": return_dcaptured}
    choices = choices_of(algorithm, passes, tiles, unit, group_splits=group_splits, **how)
    choices = of_blocks(choices, options)
    arguments = Binding.of(options, shapes=True)
    problem = arguments.problem(q_shape, k_shape, v_shape, dtype=dtype)
    if prefix_k is not None:
        return plan_of_prefix(problem, prefix_k, choices, options)
    # How often a block table is read depends on the copies' width.
    aligned = problem.pages is None or problem.whole_chunks
    plan = planning.plan_of(problem, choices, aligned)
    arguments.check_mask(problem, choices.tiles, plan.tiles)
    return replace(plan, block_mask=arguments.visited)


def plan_again(request: Request) -> Plan:
    """Return the plan that a request gets today, on the device that the request names.

    A recording stores the requests of its plans, and compares what they launch later.

    Parameters
    ----------
    request : Request
        ``Plan.asked`` of an earlier plan.

    Returns
    -------
    Plan
        The plan, with the kernels of today.

    Raises
    ------
    ValueError
        If the request is not supported any more.
    """
    limits = request.capability, request.shared_limit, request.multiprocessors
    gpu = request.multiprocessors > 0
    with device.planning_for(*limits) if gpu else device.using("emulator"):
        return planning.planned(request)


@documents_options
def standard_attention(
    q, k, v, *, tiles=None, return_lse=False, out=None, stream=None, unit="auto",
    **options: Unpack[AttentionOptions],
):  # fmt: skip
    """Return attention by the standard algorithm, which stores S and P in global memory.

    Three kernels compute ``S = scale * q @ k.T``, ``P = softmax(S)`` and ``O = P @ v``. S and P
    share one workspace of seqlen_q x seqlen_k elements per head, in the dtype of q.

    Parameters
    ----------
    q : array
        Queries, shape (batch, heads_q, seqlen_q, head_dim), dtype float32, float16 or bfloat16, any
        strides. head_dim must be from 1 to 256. NumPy arrays, torch tensors, JAX and CuPy arrays,
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
        Array that the output is written to, with the output's shape, and dtype, library and device
        of q. It must not share memory with an input. None makes a new array.
    stream : CUDA stream or int, optional
        Stream of torch, CuPy or Numba, or its address, on which the kernels run. None takes the
        current stream of q's library. The emulator takes None only.
    unit : {"auto", "simt", "mma"}, default "auto"
        Which instructions multiply matrices. "simt": CUDA cores, for float32, on compute capability
        7.5 or newer. "mma": tensor cores, for float16 and bfloat16, on 8.0 or newer. "auto" takes
        the one for the dtype.

    Returns
    -------
    out : array
        Output, shape (batch, heads_q, seqlen_q, head_dim_v), with the dtype, layout, library and
        device of q. For packed sequences it is (total_q, heads_q, head_dim_v). An array of a
        library that is not named above gives a NumPy array on the host and a Numba device array on
        a GPU.
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

    In float16 and bfloat16, S and P are rounded to that dtype, so scores must be below 65504 in
    float16. A row that sees no column gives output 0 and logsumexp -inf.

    Examples
    --------
    >>> import numpy as np, fa_numba
    >>> q = k = v = np.eye(2, dtype=np.float32).reshape(1, 1, 2, 2)
    >>> fa_numba.standard_attention(q, k, v, scale=0.0)[0, 0].round(3).tolist()
    [[0.5, 0.5], [0.5, 0.5]]
    """
    choices = choices_of("standard", "fwd", tiles, unit, return_lse)
    return attend(choices, (q, k, v), options, stream, out)


@documents_options
def flash_attention_1(
    q, k, v, *, tiles=None, return_lse=False, out=None, stream=None, query_splits=1,
    warp_partition="rows", ablate=(), unit="auto", **options: Unpack[AttentionOptions],
):  # fmt: skip
    """Return attention in FlashAttention-1's loop order, K/V outer.

    The outer loop goes over column tiles of k and v, the inner loop over row tiles of q. O, l and m
    of all rows pass through global memory in every pass of the outer loop.

    Parameters
    ----------
    q : array
        Queries, shape (batch, heads_q, seqlen_q, head_dim), dtype float32, float16 or bfloat16, any
        strides. head_dim must be from 1 to 256. NumPy arrays, torch tensors, JAX and CuPy arrays,
        and arrays with ``__cuda_array_interface__`` or DLPack are taken without conversion. Lists
        are refused.
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
        Array that the output is written to, with the output's shape, and dtype, library and device
        of q. It must not share memory with an input. None makes a new array.
    stream : CUDA stream or int, optional
        Stream of torch, CuPy or Numba, or its address, on which the kernels run. None takes the
        current stream of q's library. The emulator takes None only.
    query_splits : int, default 1
        Number of thread blocks that share the rows of q of one head. 1 is the paper's grid: one
        thread block for each batch entry and head. At most one thread block per row tile is used.
    warp_partition : {"rows", "keys"}, default "rows"
        What the warps of a thread block share. "rows": each warp has its own rows of q. "keys":
        each warp has its own rows of k and v, and the warps add their parts of O through shared
        memory. "keys" is for unit "mma" only.
    ablate : tuple of str, default ()
        Optimisations of the kernel that are switched off, to measure what each gains. Unit "mma"
        has "swizzle", "padding" (only together with "swizzle"), "prefetch", "q_registers" and
        "folded_scale"; the other units have none. The section Notes of ``flash_attention_2``
        describes them.
    unit : {"auto", "simt", "mma", "wgmma"}, default "auto"
        Which instructions multiply matrices. "simt": CUDA cores, for float32, on compute capability
        7.5 or newer. "mma": tensor cores, for float16 and bfloat16, and for float32 with a
        ``precision`` other than "ieee", on 8.0 or newer. "wgmma": Hopper's tensor cores, for the
        dtypes of "mma", on 9.0 only. "auto" takes "simt" or "mma" by the dtype, and "wgmma" only
        with such a ``precision``. The emulator runs all three.

    Returns
    -------
    out : array
        Output, shape (batch, heads_q, seqlen_q, head_dim_v), with the dtype, layout, library and
        device of q. For packed sequences it is (total_q, heads_q, head_dim_v). An array of a
        library that is not named above gives a NumPy array on the host and a Numba device array on
        a GPU.
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
    ``warp_partition="keys"`` is the partition in the code released with that paper, which
    FlashAttention-2 calls "split-K" (arXiv 2307.08691, section 3.3). There is no ``kv_splits``: O
    of one column tile is the input of the next one.

    The workspace is l and m, two float32 numbers per row. In float16 and bfloat16 the workspace
    also contains O in float32. With a ``precision`` other than "ieee" it also contains the planes.
    A row that sees no column gives output 0 and logsumexp -inf.

    Examples
    --------
    >>> import numpy as np, fa_numba
    >>> q = np.linspace(-1, 1, 64, dtype=np.float32).reshape(1, 1, 16, 4)
    >>> a, b = fa_numba.flash_attention_1(q, q, q), fa_numba.flash_attention_2(q, q, q)
    >>> bool(abs(a - b).max() < 1e-6)
    True
    """
    how = {"query_splits": query_splits, "warp_partition": warp_partition}
    choices = choices_of("fa1", "fwd", tiles, unit, return_lse, ablate, **how)
    return attend(choices, (q, k, v), options, stream, out)


@documents_options
def flash_attention_2(
    q, k, v, *, tiles=None, return_lse=False, out=None, stream=None, ablate=(), unit="auto",
    kv_splits="auto", prefix_k=None, prefix_v=None, **options: Unpack[AttentionOptions],
):  # fmt: skip
    """Return attention in FlashAttention-2's loop order, Q outer.

    The outer loop goes over row tiles of q and is the grid, the inner loop over column tiles of k
    and v. O, l and m of a row tile stay on the chip until the row tile is finished.

    Parameters
    ----------
    q : array
        Queries, shape (batch, heads_q, seqlen_q, head_dim), dtype float32, float16 or bfloat16, any
        strides. head_dim must be from 1 to 256. NumPy arrays, torch tensors, JAX and CuPy arrays,
        and arrays with ``__cuda_array_interface__`` or DLPack are taken without conversion. Lists
        are refused.
    k : array
        Keys, shape (batch, heads_k, seqlen_k, head_dim), dtype and device of q. heads_k must divide
        heads_q; query head h reads head ``h // (heads_q // heads_k)`` of k and v.
    v : array
        Values, shape (batch, heads_k, seqlen_k, head_dim_v), dtype and device of q. head_dim_v may
        differ from head_dim, and must be from 1 to 256.
    tiles : Tiles, optional
        Block sizes, threads and pipeline stages of the kernel. None chooses them;
        ``fa_numba.plan(...).tiles`` shows the choice.
    return_lse : bool, default False
        Whether the logsumexp is returned too. The backward pass and ``fa_numba.merge`` need it.
    out : array, optional
        Array that the output is written to, with the output's shape, and dtype, library and device
        of q. It must not share memory with an input. None makes a new array.
    stream : CUDA stream or int, optional
        Stream of torch, CuPy or Numba, or its address, on which the kernels run. None takes the
        current stream of q's library. The emulator takes None only.
    ablate : tuple of str, default ()
        Optimisations of the kernel that are switched off, to measure what each gains. They change
        no access to global memory. Unit "simt" has none. The names are in the section Notes.
    unit : {"auto", "simt", "mma", "wgmma"}, default "auto"
        Which instructions multiply matrices. "simt": CUDA cores, for float32, on compute capability
        7.5 or newer. "mma": tensor cores, for float16 and bfloat16, and for float32 with a
        ``precision`` other than "ieee", on 8.0 or newer. "wgmma": Hopper's tensor cores, for the
        dtypes of "mma", on 9.0 only. "auto" takes the last of these that has all options of the
        call and is expected to be fast; ``fa_numba.plan(...).why`` has the reason. The emulator
        runs all three.
    kv_splits : int or "auto", default "auto"
        Number of thread blocks, 1 to 256, that share the columns of a row tile (Flash-Decoding). A
        second kernel merges their results in a fixed order. "auto" splits where there are fewer row
        tiles than a GPU can run at once, or unequal ones under a causal mask. "auto" is 1 on the
        emulator.
    prefix_k : array, optional
        Keys that all sequences begin with, shape (heads_k, seqlen_prefix, head_dim), or
        (seqlen_prefix, heads_k, head_dim) with ``layout="bnhd"``, dtype and device of q. Every row
        sees all of them, in addition to the columns of k that it sees without a prefix. The prefix
        is read once for the queries of all sequences. Allowed together with a prefix are ``scale``,
        ``causal``, ``softcap``, ``sinks``, ``q_lens``, ``kv_lens``, ``block_table``,
        ``cu_seqlens_q``, ``cu_seqlens_k``, ``layout`` and ``precision``.
    prefix_v : array, optional
        Values of the prefix, shape (heads_k, seqlen_prefix, head_dim_v), in the axes of
        ``prefix_k``. ``prefix_k`` and ``prefix_v`` must be given together.

    Returns
    -------
    out : array
        Output, shape (batch, heads_q, seqlen_q, head_dim_v), with the dtype, layout, library and
        device of q. For packed sequences it is (total_q, heads_q, head_dim_v). An array of a
        library that is not named above gives a NumPy array on the host and a Numba device array on
        a GPU.
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
    This is Algorithm 1 of FlashAttention-2 (arXiv 2307.08691). A row that sees no column gives
    output 0 and logsumexp -inf. The workspace is the logsumexp, one float32 per row, unless
    ``return_lse`` is True. With a ``precision`` other than "ieee" it also contains the planes.

    With ``kv_splits`` above 1, each thread block writes O, l and m of its share of the columns to a
    workspace, and a second kernel merges the shares.

    With a prefix, one pass computes the queries of all sequences over the prefix, a second pass
    computes each sequence over its own k and v, and a third kernel merges both by their logsumexps.
    Both results are rounded to the dtype of q before the merge. ``tiles``, ``unit``, ``ablate`` and
    ``kv_splits`` hold for both passes. A prefix has no backward pass.

    The names for ``ablate`` are:

    =============== ======= ==================================================================
    name            unit    what is switched off
    =============== ======= ==================================================================
    "swizzle"       "mma"   swizzled rows in shared memory; rows are padded instead
    "padding"       "mma"   padding of rows too; only together with "swizzle"
    "prefetch"      "mma"   loads of the next tiles during the products
    "q_registers"   "mma"   keeping the fragments of Q in registers
    "folded_scale"  "mma"   folding the scale of the scores into the exponent
    "wide_stores"   "mma"   16-byte stores of O
    "turns"         "wgmma" turns of the consumer warpgroups at the tensor cores
    "overlap"       "wgmma" overlap of products with the softmax
    "persistent"    "wgmma" persistent thread blocks; only together with "counter"
    "counter"       "wgmma" counter that hands out row tiles to persistent thread blocks
    "ahead"         "wgmma" starting the next row tile's first product early
    "late"          "wgmma" taking the next row tile late
    =============== ======= ==================================================================

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
        return attend_prefix(choices, (q, k, v), prefix, options, stream, out)
    return attend(choices, (q, k, v), options, stream, out)


@documents_options
def attention(q, k, v, *, algorithm="fa2", **options):
    """Return attention, ``softmax(scale * q @ k.T) @ v``, by one of three algorithms.

    The three algorithms compute the same output up to rounding. Arrays on a GPU are used in place.
    Arrays in host memory are copied to the GPU and back, or run on the emulator if there is no GPU.
    This function computes no gradients by itself: ``attention_backward`` does, and
    ``fa_numba.torch.attention`` is differentiable.

    Parameters
    ----------
    q : array
        Queries, shape (batch, heads_q, seqlen_q, head_dim), dtype float32, float16 or bfloat16, any
        strides. head_dim must be from 1 to 256. NumPy arrays, torch tensors, JAX and CuPy arrays,
        and arrays with ``__cuda_array_interface__`` or DLPack are taken without conversion. Lists
        are refused.
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
        Block sizes, threads and pipeline stages of the kernel. None chooses them;
        ``fa_numba.plan(...).tiles`` shows the choice. Only "fa2" on the units "mma" and "wgmma"
        takes more than one stage.
    return_lse : bool, default False
        Whether the logsumexp is returned too. The backward pass and ``fa_numba.merge`` need it.
    out : array, optional
        Array that the output is written to, with the output's shape, and dtype, library and device
        of q. It must not share memory with an input. None makes a new array.
    stream : CUDA stream or int, optional
        Stream of torch, CuPy or Numba, or its address, on which the kernels run. None takes the
        current stream of q's library. The emulator takes None only.
    unit : {"auto", "simt", "mma", "wgmma"}, default "auto"
        Which instructions multiply matrices. "simt": CUDA cores, for float32, on compute capability
        7.5 or newer. "mma": tensor cores, for float16 and bfloat16, and for float32 with a
        ``precision`` other than "ieee", on 8.0 or newer. "wgmma": Hopper's tensor cores, for the
        dtypes of "mma", on 9.0 only. "auto" takes the last of these that has all options of the
        call and is expected to be fast; ``fa_numba.plan(...).why`` has the reason. The emulator
        runs all three. "standard" does not take "wgmma", and "auto" takes "wgmma" for "fa1" only
        with a ``precision`` other than "ieee".
    query_splits : int, default 1
        "fa1" only. Number of thread blocks that share the rows of q of one head. 1 is the paper's
        grid: one thread block for each batch entry and head.
    warp_partition : {"rows", "keys"}, default "rows"
        "fa1" only. What the warps of a thread block share: rows of q, or, on unit "mma", rows of k
        and v.
    kv_splits : int or "auto", default "auto"
        "fa2" only. Number of thread blocks, 1 to 256, that share the columns of a row tile
        (Flash-Decoding). "auto" splits where a GPU would be idle otherwise.
    ablate : tuple of str, default ()
        "fa1" and "fa2" only. Optimisations that are switched off, to measure what each gains. The
        names are in the Notes of ``flash_attention_2``.
    prefix_k : array, optional
        "fa2" only. Keys that all sequences begin with, shape (heads_k, seqlen_prefix, head_dim);
        see ``flash_attention_2``.
    prefix_v : array, optional
        "fa2" only. Values of the prefix, shape (heads_k, seqlen_prefix, head_dim_v).

    Returns
    -------
    out : array
        Output, shape (batch, heads_q, seqlen_q, head_dim_v), with the dtype, layout, library and
        device of q. For packed sequences it is (total_q, heads_q, head_dim_v). An array of a
        library that is not named above gives a NumPy array on the host and a Numba device array on
        a GPU.
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
    fa_numba.torch.attention : The same for torch tensors, with gradients.
    fa_numba.reference.attention : The same in float64 with NumPy.

    Notes
    -----
    A row that sees no column, as under a mask that hides everything, gives output 0, logsumexp -inf
    and gradients 0. A column that no row sees has gradients 0. Sums and the softmax are in float32
    for every dtype.

    Unit "wgmma" needs rows that start at 16-byte addresses. It takes these options:

    ================== ================================================================
    algorithm, pass    options of unit "wgmma"
    ================== ================================================================
    "fa2", forward     all but ``score_mod_grad``
    "fa2", backward    all but ``return_dbias`` and the precision "bf16x6"; some
                       combinations are missing
    "fa1", forward     ``causal``, ``window``, ``mask_mod``, ``block_mask``, ``softcap``,
                       ``score_mod``, ``sinks``, ``q_lens``, ``precision``
    "fa1", backward    ``causal``, ``window``, ``mask_mod``, ``block_mask``, ``sinks``,
                       ``score_mod``, ``score_mod_grad``; head dimensions up to 128
    ================== ================================================================

    ``scale``, ``layout`` and the seeds are taken everywhere. A ``precision`` other than "ieee" on
    unit "wgmma" is for head dimensions up to 128, and only together with ``causal``, ``window`` and
    lengths.

    Compiled kernels are kept on disk: the first call with new options takes seconds on a GPU.

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
    functions: dict[str, Callable] = {
        "standard": standard_attention,
        "fa1": flash_attention_1,
        "fa2": flash_attention_2,
    }
    check_algorithm(algorithm)
    return functions[algorithm](q, k, v, **options)


@documents_options
def standard_attention_backward(
    dout, q, k, v, out, lse, *, tiles=None, stream=None, dlse=None, return_dbias=False,
    return_dsinks=False, return_dcaptured=False, unit="auto", **options: Unpack[AttentionOptions],
):  # fmt: skip
    """Return the gradients of attention by the standard algorithm.

    Kernels compute P and dP again and store them in global memory.

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
        Output of the forward pass, with shape and dtype of ``dout``. Its shape and dtype are
        checked; its values are used only for ``return_dsinks``.
    lse : array of float32
        Logsumexp of the forward pass with ``return_lse=True``, shape (batch, heads_q, seqlen_q),
        for packed sequences (heads_q, total_q). Its values are used only with ``dlse`` or
        ``return_dsinks``.
    tiles : Tiles, optional
        Block sizes and threads of the kernels that multiply matrices. None chooses them. ``stages``
        must be 1.
    stream : CUDA stream or int, optional
        Stream of torch, CuPy or Numba, or its address, on which the kernels run. None takes the
        current stream of q's library. The emulator takes None only.
    dlse : array of float32, optional
        Gradient of ``lse``, with the shape of ``lse``, for a loss that depends on the logsumexp. A
        row that sees no column does not use it.
    return_dbias : bool, default False
        Whether the gradient of ``bias``, or of ``attn_mask``, is returned too.
    return_dsinks : bool, default False
        Whether the gradient of ``sinks`` is returned too.
    return_dcaptured : bool, default False
        Must be False: standard attention has no gradients of arrays that ``score_mod`` uses.
    unit : {"auto", "simt", "mma"}, default "auto"
        Which instructions multiply matrices. "simt": CUDA cores, for float32, on compute capability
        7.5 or newer. "mma": tensor cores, for float16 and bfloat16, on 8.0 or newer. "auto" takes
        the one for the dtype.

    Returns
    -------
    dq : array
        Gradient of q, with the shape, dtype, library and device of q. It is the first element of a
        tuple; the others follow in the order of this list.
    dk : array
        Gradient of k, with the shape of k, and the dtype, library and device of q.
    dv : array
        Gradient of v, with the shape of v, and the dtype, library and device of q.
    dbias : array of float32
        Only with ``return_dbias=True``. Gradient of ``bias`` or ``attn_mask``, in the shape of that
        array. It is summed over the axes that are broadcast.
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
    This is Algorithm 3 of FlashAttention (arXiv 2205.14135). The workspace is two matrices of
    seqlen_q x seqlen_k elements per head, in the dtype of q: P, and dP, which dS overwrites.
    ``return_dsinks`` takes one more float32 per row. The order of all sums is fixed, except those
    of ``dbias`` over axes that are broadcast.

    Examples
    --------
    >>> import numpy as np, fa_numba
    >>> q = np.eye(4, dtype=np.float32).reshape(1, 1, 4, 4)
    >>> o, lse = fa_numba.standard_attention(q, q, q, return_lse=True)
    >>> dq, dk, dv = fa_numba.standard_attention_backward(np.ones_like(o), q, q, q, o, lse)
    >>> dv.sum().round(3).item()
    16.0
    """
    how = {"return_dbias": return_dbias, "dlse": dlse is not None, "return_dsinks": return_dsinks}
    how["return_dcaptured"] = return_dcaptured
    choices = choices_of("standard", "bwd", tiles, unit, **how)
    return attend(choices, (q, k, v, out, dout, lse, dlse), options, stream)


@documents_options
def flash_attention_1_backward(
    dout, q, k, v, out, lse, *, tiles=None, stream=None, dlse=None, return_dbias=False,
    return_dsinks=False, return_dcaptured=False, unit="auto", query_splits=1,
    **options: Unpack[AttentionOptions],
):  # fmt: skip
    """Return the gradients of attention in FlashAttention-1's loop order, K/V outer.

    The outer loop goes over column tiles of k and v, the inner loop over row tiles of q. dq passes
    through global memory in every pass of the outer loop, and is summed in a fixed order.

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
        Output of the forward pass, with shape and dtype of ``dout``.
    lse : array of float32
        Logsumexp of the forward pass with ``return_lse=True``, shape (batch, heads_q, seqlen_q),
        for packed sequences (heads_q, total_q).
    tiles : Tiles, optional
        Block sizes and threads of the kernel. None chooses them. ``stages`` must be 1, and unit
        "wgmma" takes one size for each head dimension.
    stream : CUDA stream or int, optional
        Stream of torch, CuPy or Numba, or its address, on which the kernels run. None takes the
        current stream of q's library. The emulator takes None only.
    dlse : array of float32, optional
        Gradient of ``lse``, with the shape of ``lse``, for a loss that depends on the logsumexp. A
        row that sees no column does not use it.
    return_dbias : bool, default False
        Whether the gradient of ``bias``, or of ``attn_mask``, is returned too.
    return_dsinks : bool, default False
        Whether the gradient of ``sinks`` is returned too.
    return_dcaptured : bool, default False
        Whether the gradients of the float32 arrays that ``score_mod`` uses are returned too.
    unit : {"auto", "simt", "mma", "wgmma"}, default "auto"
        Which instructions multiply matrices. "simt": CUDA cores, for float32, on compute capability
        7.5 or newer. "mma": tensor cores, for float16 and bfloat16, on 8.0 or newer. "wgmma":
        Hopper's tensor cores, for float16 and bfloat16, on 9.0 only, for head dimensions up to 128.
        "auto" takes "simt" or "mma" by the dtype. The emulator runs all three.
    query_splits : int, default 1
        Number of thread blocks that share the rows of q of one K/V head. 1 is the paper's grid.
        With more, thread blocks add to dk and dv by atomic adds, in no fixed order.

    Returns
    -------
    dq : array
        Gradient of q, with the shape, dtype, library and device of q. It is the first element of a
        tuple; the others follow in the order of this list.
    dk : array
        Gradient of k, with the shape of k, and the dtype, library and device of q.
    dv : array
        Gradient of v, with the shape of v, and the dtype, library and device of q.
    dbias : array of float32
        Only with ``return_dbias=True``. Gradient of ``bias`` or ``attn_mask``, in the shape of that
        array. It is summed over the axes that are broadcast.
    dsinks : array of float32
        Only with ``return_dsinks=True``. Gradient of ``sinks``, shape (heads_q,).
    dcaptured : dict
        Only with ``return_dcaptured=True``. Maps the name of each array that ``score_mod`` uses to
        a float32 gradient of the array's shape, or to None for an int32 or bool array.

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
    float16 and bfloat16 the workspace is dq in float32, and with ``query_splits`` above 1 also dk
    and dv in float32. ``return_dsinks`` takes one more float32 per row. Gradients of broadcast
    biases and of arrays that ``score_mod`` uses are summed by atomic adds, in no fixed order.

    Examples
    --------
    >>> import numpy as np, fa_numba
    >>> q = np.eye(4, dtype=np.float32).reshape(1, 1, 4, 4)
    >>> o, lse = fa_numba.flash_attention_1(q, q, q, return_lse=True)
    >>> dq, dk, dv = fa_numba.flash_attention_1_backward(np.ones_like(o), q, q, q, o, lse)
    >>> dv.sum().round(3).item()
    16.0
    """
    how = {"query_splits": query_splits, "return_dbias": return_dbias, "dlse": dlse is not None}
    how |= {"return_dsinks": return_dsinks, "return_dcaptured": return_dcaptured}
    choices = choices_of("fa1", "bwd", tiles, unit, **how)
    return attend(choices, (q, k, v, out, dout, lse, dlse), options, stream)


@documents_options
def flash_attention_2_backward(
    dout, q, k, v, out, lse, *, tiles=None, stream=None, dlse=None, return_dbias=False,
    return_dsinks=False, return_dcaptured=False, deterministic=False, unit="auto",
    group_splits="auto", **options: Unpack[AttentionOptions],
):  # fmt: skip
    """Return the gradients of attention with FlashAttention-2's grid over column tiles.

    Each thread block owns a column tile of k and v and loops over the row tiles of q. dk and dv of
    the tile stay on the chip. dq is summed over the thread blocks by atomic adds.

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
        Output of the forward pass, with shape and dtype of ``dout``.
    lse : array of float32
        Logsumexp of the forward pass with ``return_lse=True``, shape (batch, heads_q, seqlen_q),
        for packed sequences (heads_q, total_q).
    tiles : Tiles, optional
        Block sizes and threads of the kernel. None chooses them. ``stages`` must be 1, and unit
        "wgmma" takes one size for each head dimension.
    stream : CUDA stream or int, optional
        Stream of torch, CuPy or Numba, or its address, on which the kernels run. None takes the
        current stream of q's library. The emulator takes None only.
    dlse : array of float32, optional
        Gradient of ``lse``, with the shape of ``lse``, for a loss that depends on the logsumexp. A
        row that sees no column does not use it.
    return_dbias : bool, default False
        Whether the gradient of ``bias``, or of ``attn_mask``, is returned too.
    return_dsinks : bool, default False
        Whether the gradient of ``sinks`` is returned too.
    return_dcaptured : bool, default False
        Whether the gradients of the float32 arrays that ``score_mod`` uses are returned too.
    deterministic : bool, default False
        Whether dq is summed in a fixed order. False sums dq by atomic adds, so gradients can differ
        in the last bits between runs. True computes dq in a second kernel, which costs time. It
        cannot be combined with ``return_dcaptured``, with a ``precision`` other than "ieee", or
        with ``return_dbias`` for a bias that is broadcast.
    unit : {"auto", "simt", "mma", "wgmma"}, default "auto"
        Which instructions multiply matrices. "simt": CUDA cores, for float32, on compute capability
        7.5 or newer. "mma": tensor cores, for float16 and bfloat16, and for float32 with a
        ``precision`` other than "ieee", on 8.0 or newer. "wgmma": Hopper's tensor cores, for the
        dtypes of "mma", on 9.0 only. "auto" takes the last of these that has all options of the
        call and is expected to be fast; ``fa_numba.plan(...).why`` has the reason. The emulator
        runs all three.
    group_splits : int or "auto", default "auto"
        Number of thread blocks that share a column tile of a K/V head. More than 1 is for unit
        "wgmma" and head dimensions up to 128. It must be a divisor of ``heads_q // heads_k``, or a
        multiple of it if no option changes the scores. "auto" estimates the fastest number; it is 1
        on the emulator.

    Returns
    -------
    dq : array
        Gradient of q, with the shape, dtype, library and device of q. It is the first element of a
        tuple; the others follow in the order of this list.
    dk : array
        Gradient of k, with the shape of k, and the dtype, library and device of q.
    dv : array
        Gradient of v, with the shape of v, and the dtype, library and device of q.
    dbias : array of float32
        Only with ``return_dbias=True``. Gradient of ``bias`` or ``attn_mask``, in the shape of that
        array. It is summed over the axes that are broadcast.
    dsinks : array of float32
        Only with ``return_dsinks=True``. Gradient of ``sinks``, shape (heads_q,).
    dcaptured : dict
        Only with ``return_dcaptured=True``. Maps the name of each array that ``score_mod`` uses to
        a float32 gradient of the array's shape, or to None for an int32 or bool array.

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
    dS = P o (dP - D + dlse). Query rows that see no column, and columns that no row sees, get
    gradients 0.

    The atomic adds to dq cost Tc seqlen_q head_dim loads and as many stores per head, where Tc is
    the number of column tiles. With ``deterministic`` a second kernel, Q outer, computes S and dP
    again instead. On unit "wgmma" and for head dimensions above 128, dq always comes from a second
    kernel. Gradients of broadcast biases and of arrays that ``score_mod`` uses are summed by atomic
    adds too.

    The workspace is one float32 per row. In float16 and bfloat16 it also has dq in float32, unless
    ``deterministic`` is True. With ``group_splits`` above 1 each thread block writes its parts of
    dk and dv to a float32 workspace, and another kernel sums them in a fixed order.

    Examples
    --------
    >>> import numpy as np, fa_numba
    >>> q = np.linspace(-1, 1, 32, dtype=np.float32).reshape(1, 1, 8, 4)
    >>> o, lse = fa_numba.flash_attention_2(q, q, q, return_lse=True)
    >>> dq, dk, dv = fa_numba.flash_attention_2_backward(np.ones_like(o), q, q, q, o, lse)
    >>> dv.sum().round(3).item()
    32.0
    """
    how = {"return_dbias": return_dbias, "dlse": dlse is not None, "return_dsinks": return_dsinks}
    how |= {"return_dcaptured": return_dcaptured, "deterministic": deterministic}
    choices = choices_of("fa2", "bwd", tiles, unit, group_splits=group_splits, **how)
    return attend(choices, (q, k, v, out, dout, lse, dlse), options, stream)


@documents_options
def attention_backward(dout, q, k, v, out, lse, *, algorithm="fa2", **options):
    """Return the gradients of ``attention`` by one of three algorithms.

    The three algorithms compute the same gradients up to rounding. The algorithm need not be that
    of the forward pass. The options must be those of the forward pass.

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
        Output of the forward pass, with shape and dtype of ``dout``.
    lse : array of float32
        Logsumexp of the forward pass with ``return_lse=True``, shape (batch, heads_q, seqlen_q),
        for packed sequences (heads_q, total_q).
    algorithm : {"fa2", "fa1", "standard"}, default "fa2"
        "fa2" is ``flash_attention_2_backward``, with a grid over the column tiles. "fa1" is
        ``flash_attention_1_backward``: K/V outer. "standard" is ``standard_attention_backward``: P
        and dP are in global memory.
    dlse : array of float32, optional
        Gradient of ``lse``, with the shape of ``lse``, for a loss that depends on the logsumexp. A
        row that sees no column does not use it.
    return_dbias : bool, default False
        Whether the gradient of ``bias``, or of ``attn_mask``, is returned too.
    return_dsinks : bool, default False
        Whether the gradient of ``sinks`` is returned too.
    return_dcaptured : bool, default False
        "fa1" and "fa2" only. Whether the gradients of the float32 arrays that ``score_mod`` uses
        are returned too.
    deterministic : bool, default False
        "fa2" only. Whether dq is summed in a fixed order. False sums dq by atomic adds, so
        gradients can differ in the last bits between runs. True computes dq in a second kernel.
    group_splits : int or "auto", default "auto"
        "fa2" only. Number of thread blocks that share a column tile of a K/V head. More than 1 is
        for unit "wgmma".
    query_splits : int, default 1
        "fa1" only. Number of thread blocks that share the rows of q of one K/V head.
    tiles : Tiles, optional
        Block sizes and threads of the kernel. None chooses them. ``stages`` must be 1, and unit
        "wgmma" takes one size for each head dimension.
    unit : {"auto", "simt", "mma", "wgmma"}, default "auto"
        Which instructions multiply matrices. "simt": CUDA cores, for float32, on compute capability
        7.5 or newer. "mma": tensor cores, for float16 and bfloat16, and for float32 with a
        ``precision`` other than "ieee", on 8.0 or newer. "wgmma": Hopper's tensor cores, for the
        dtypes of "mma", on 9.0 only. "auto" takes the last of these that has all options of the
        call and is expected to be fast; ``fa_numba.plan(...).why`` has the reason. The emulator
        runs all three. "standard" does not take "wgmma".
    stream : CUDA stream or int, optional
        Stream of torch, CuPy or Numba, or its address, on which the kernels run. None takes the
        current stream of q's library. The emulator takes None only.

    Returns
    -------
    dq : array
        Gradient of q, with the shape, dtype, library and device of q. It is the first element of a
        tuple; the others follow in the order of this list.
    dk : array
        Gradient of k, with the shape of k, and the dtype, library and device of q.
    dv : array
        Gradient of v, with the shape of v, and the dtype, library and device of q.
    dbias : array of float32
        Only with ``return_dbias=True``. Gradient of ``bias`` or ``attn_mask``, in the shape of that
        array. It is summed over the axes that are broadcast.
    dsinks : array of float32
        Only with ``return_dsinks=True``. Gradient of ``sinks``, shape (heads_q,).
    dcaptured : dict
        Only with ``return_dcaptured=True``. Maps the name of each array that ``score_mod`` uses to
        a float32 gradient of the array's shape, or to None for an int32 or bool array.

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
    fa_numba.reference.attention_backward : The same in float64 with NumPy.

    Notes
    -----
    A row that sees no column and a column that no row sees get gradients 0. Options that only
    change how the forward pass is computed, such as ``kv_splits``, are not given here. There is no
    backward pass for ``block_table`` or a prefix.

    Examples
    --------
    >>> import numpy as np, fa_numba
    >>> q = np.eye(4, dtype=np.float32).reshape(1, 1, 4, 4)
    >>> o, lse = fa_numba.attention(q, q, q, return_lse=True)
    >>> dq, dk, dv = fa_numba.attention_backward(q, q, q, q, o, lse)
    >>> dv.shape, dv.sum().round(3).item()
    ((1, 1, 4, 4), 4.0)
    """
    functions: dict[str, Callable] = {
        "standard": standard_attention_backward,
        "fa1": flash_attention_1_backward,
        "fa2": flash_attention_2_backward,
    }
    check_algorithm(algorithm)
    return functions[algorithm](dout, q, k, v, out, lse, **options)


def merge(outputs, lses, *, layout=None, stream=None):
    """Combine attention over parts of the keys into attention over all keys.

    The parts are results of ``attention`` with ``return_lse=True`` for the same queries. The parts
    must not share keys.

    Parameters
    ----------
    outputs : list or tuple of array
        Two or more outputs, each (batch, heads, seqlen, head_dim), for packed sequences (total,
        heads, head_dim). They have one shape, dtype (float32, float16 or bfloat16), library and
        device, and any strides.
    lses : list or tuple of array
        The logsumexp of each output, float32, (batch, heads, seqlen), for packed sequences (heads,
        total).
    layout : {"bhnd", "bnhd"}, optional
        "bnhd" if outputs are (batch, seqlen, heads, head_dim). None takes "bhnd" for arrays of four
        axes, and packed sequences for arrays of three axes.
    stream : CUDA stream or int, optional
        Stream of torch, CuPy or Numba, or its address, on which the kernels run. None takes the
        current stream of the library of the first output. The emulator takes None only.

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
        If there are fewer than two outputs, if there are not as many ``lses`` as outputs, or if
        shapes or devices differ. All errors are raised before anything runs.

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


def merge_backward(dout, outputs, lses, out, lse, *, dlse=None, layout=None, stream=None):
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
        current stream of the library of ``dout``. The emulator takes None only.

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
    (rowsum(dout * (out_s - out)) + dlse)``. Both are 0 in rows that see no column of the part.

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


def create_block_mask(mask_mod, batch, heads, seqlen_q, seqlen_k, *, tiles) -> BlockMask:
    """Return the blocks of S that a ``mask_mod`` leaves empty, full or mixed.

    The result is given to attention as ``block_mask``. Attention then skips empty blocks, and
    evaluates the function in mixed blocks only. This holds for both loop orders and both passes.

    Parameters
    ----------
    mask_mod : function
        Python function ``mask_mod(b, h, i, j)`` that returns whether row i sees column j, as the
        option of ``attention``.
    batch : int
        Batch size of q, or 1 if the function does not depend on ``b``.
    heads : int
        Number of query heads, or 1 if the function does not depend on ``h``.
    seqlen_q : int
        Number of rows of q.
    seqlen_k : int
        Number of rows of k.
    tiles : Tiles
        Block sizes Br and Bc of the blocks. Attention with this mask uses these tiles.

    Returns
    -------
    BlockMask
        The function, and the state of each block. Values and arrays that the function uses are
        taken as they are now.

    Raises
    ------
    TypeError
        If ``mask_mod`` is no Python function of four parameters, if it uses a value of another type
        than numbers and arrays of float32, int32 or bool, or if ``tiles`` has no Br and Bc.
    ValueError
        If the source of ``mask_mod`` is not available or contains what a kernel cannot compute, if
        a size is not positive, or if the emulator would run for more than about 30 seconds.

    See Also
    --------
    attention : Takes the result as ``block_mask``.
    fa_numba.mods.blocks.BlockMask : What the result contains.

    Notes
    -----
    Kernels evaluate the function for every element, on the GPU if there is one. The lists of blocks
    stay on the device of the arrays that the function uses, or on the host if there are none.

    Examples
    --------
    >>> import fa_numba
    >>> tiles = fa_numba.Tiles(Br=16, Bc=16)
    >>> blocks = fa_numba.create_block_mask(lambda b, h, i, j: j <= i, 1, 1, 64, 64, tiles=tiles)
    >>> blocks.blocks[0, 0].tolist()
    [[1, 0, 0, 0], [2, 1, 0, 0], [2, 2, 1, 0], [2, 2, 2, 1]]
    """
    return create(mask_mod, (batch, heads, seqlen_q, seqlen_k), tiles)


def softmax(x, *, algorithm="online", out=None, stream=None):
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
        Array of the shape, library and device of x that takes the result. None makes a new array.
    stream : CUDA stream or int, optional
        Stream of torch, CuPy or Numba, or its address, on which the kernels run. None takes the
        current stream of the library of x. The emulator takes None only.

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
    softmax" (arXiv 1805.02867). An element of -inf gives 0, even in a row that has only -inf. NaN
    or inf in a row makes the row NaN, but with "naive" an inf leaves the other elements 0.

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
