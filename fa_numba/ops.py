"""The public functions: what they take, give and raise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Unpack

from fa_numba.choices.requests import check_algorithm, choices_of
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
    """What a call with these arguments runs on the current device, without running it.

    Shapes are (B, Hq, Nq, d) and (B, Hk, Nk, d); ``v_shape`` is k's unless given. ``passes`` is
    "fwd" or "bwd". ``options`` as ``AttentionOptions`` has them; for a bias, slopes, sinks and an
    ``attn_mask`` their shapes are enough, and of a ``prefix_k``; ``dlse`` is whether there is one.
    ``kv_splits`` and ``group_splits`` of the plan are what "auto" has chosen. Raises as the call
    itself would.

    >>> import fa_numba
    >>> p = fa_numba.plan((1, 2, 1024, 64), (1, 2, 1024, 64), algorithm="fa2")
    >>> p.kernels[0].name, p.kernels[0].grid
    ('fa2_forward', (8, 2, 1))
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


@documents_options
def standard_attention(
    q, k, v, *, tiles=None, return_lse=False, out=None, stream=None, unit="auto",
    **options: Unpack[AttentionOptions],
):  # fmt: skip
    """softmax(scale q kT) v with the N x N matrices in global memory (the papers' Algorithm 0).

    Arguments, result and errors as ``attention``; the workspace is Nq x Nk elements of q's
    dtype a head, in which S and P are rounded.

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
    """Attention in FlashAttention-1's loop order, K/V outer (arXiv 2205.14135, Algorithm 1).

    Arguments, result and errors as ``attention``. ``query_splits`` thread blocks share a head, each
    with its own rows of q; 1 is the paper's grid of one block per (batch, head). ``warp_partition``
    is what the warps of a block share, on tensor cores: "rows" of q, or the "keys" as in the code
    released with the paper, whose warps then add up their parts of O through shared memory (arXiv
    2307.08691, section 3.3, "split-K"). There is no ``kv_splits`` here: O passes from one column
    tile to the next, through global memory.

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
    """Attention in FlashAttention-2's loop order, Q outer (arXiv 2307.08691, Algorithm 1).

    The arrays q, k and v, ``tiles``, ``unit``, ``out`` and ``stream`` are as for ``attention``;
    ``options`` change the result: scale, masks, biases, lengths, dropout. A row that sees no column
    gives output 0 and logsumexp -inf.

    ``kv_splits`` thread blocks share the columns of a row tile (Flash-Decoding: the third loop
    order, columns in parallel too): each leaves O, l and m of its share in a workspace, and a
    second kernel merges them, in one order. It is for calls whose row tiles are fewer than the
    multiprocessors, as when few rows of q meet a long k, or unequal under a causal mask; "auto"
    takes 1 for all others, and on the emulator.

    ``prefix_k``, ``prefix_v``: (Hk, Np, d), or (Np, Hk, d) with ``layout="bnhd"``, keys and values
    that come before those of every sequence: read once, for the queries of all (a fourth loop
    order, of sequences). Each row sees all of them, and of its own sequence what it sees without
    them; own k and v may be pages. The result is merged by logsumexps from both, each rounded to
    q's dtype. Beside them are allowed scale, causal, softcap, sinks, q_lens, kv_lens,
    block_table, cu_seqlens_q, cu_seqlens_k, layout and precision; ``tiles``, ``unit``, ``ablate``
    and ``kv_splits`` are of both passes. There is no backward pass.

    ``ablate`` names measures of the tensor-core kernel to do without, which show what each gains
    and change no access: "swizzle" of rows in shared memory, which then have "padding", that too
    if named with it, "prefetch" of tiles meanwhile others are computed with, "q_registers" for Q's
    fragments, "folded_scale" of the scores into the exponent, "wide_stores" of O. On ``unit``
    "wgmma" these are "turns" of the consumer warpgroups, "overlap" of products with a softmax,
    "persistent" blocks, the "counter" that hands them row tiles, the next one's first product
    begun "ahead", with the last of this, and its being taken "late".

    Returns O, (B, Hq, Nq, d) as q, or with ``return_lse`` (O, L), L float32 (B, Hq, Nq).
    Raises ValueError or TypeError, before anything runs, as ``attention`` does.

    >>> import numpy as np, fa_numba
    >>> q = np.zeros((1, 1, 3, 4), np.float32)
    >>> v = np.arange(12, dtype=np.float32).reshape(1, 1, 3, 4)
    >>> fa_numba.flash_attention_2(q, q, v, causal=True)[0, 0, :, 0].tolist()
    [0.0, 2.0, 4.0]
    >>> fa_numba.flash_attention_2(q, q, v, window=(0, 0))[0, 0, :, 0].tolist()
    [0.0, 4.0, 8.0]
    """
    choices = choices_of("fa2", "fwd", tiles, unit, return_lse, ablate, kv_splits)
    if prefix_k is not None or prefix_v is not None:
        prefix = prefix_k, prefix_v
        return attend_prefix(choices, (q, k, v), prefix, options, stream, out)
    return attend(choices, (q, k, v), options, stream, out)


@documents_options
def attention(q, k, v, *, algorithm="fa2", **options):
    """Attention, softmax(scale q kT) v, by one of three algorithms; the results differ by rounding.

    ``algorithm``: "fa2" for ``flash_attention_2`` (Q outer, a grid over the sequence), "fa1" for
        ``flash_attention_1`` (K/V outer), "standard" for ``standard_attention`` (N x N matrices in
        global memory).
    ``q``: (B, Hq, Nq, d); ``k``, ``v``: (B, Hk, Nk, d), of one dtype (float32, float16, bfloat16),
        on one device, any strides; Hk divides Hq, 1 <= d <= 256. v may have another d, which O
        then has too, where a unit has kernels for it. NumPy arrays, torch tensors,
        JAX arrays, and arrays with ``__cuda_array_interface__`` or DLPack, taken as they are. Host
        arrays are copied to a GPU and back, and run on the emulator where there is none. With
        ``layout="bnhd"`` they are (B, Nq, Hq, d) and (B, Nk, Hk, d).
    ``return_lse``: bool, False: whether L is returned beside O.
    ``out``: an array like q that takes O; None for a new one.
    ``tiles``: a ``fa_numba.Tiles`` with block sizes, threads and stages; None for what suits.
    ``unit``: "auto" for the last of these that can compute the call and suits it, as
        ``fa_numba.plan(...).why`` says, or by name: "simt", CUDA cores, float32; "mma", tensor
        cores, float16, bfloat16 and, by ``precision``, float32; "wgmma", Hopper's tensor cores, the
        same, on compute capability 9.0 alone and not for every option. The emulator runs all.
    ``stream``: a CUDA stream of torch, CuPy or Numba or its address; None for the current one of
        q's library.
    ``query_splits`` and ``warp_partition`` of "fa1", ``kv_splits`` of "fa2", ``ablate`` of both:
        see there.

    Returns O, in q's shape, dtype, library and device; with ``return_lse`` (O, L), L the natural
    logarithm of the rows' sums of exponentials, float32 (B, Hq, Nq).

    Raises ValueError or TypeError, before anything runs, for an argument that is not as above, an
    ``algorithm`` that there is not, and an option that the algorithm does not have: the message
    names it, its value and what is allowed. ValueError also for tiles that do not fit the device's
    shared memory, and for a problem too large for the emulator, which runs where no GPU is.

    >>> import numpy as np, fa_numba
    >>> q = np.eye(4, dtype=np.float32).reshape(1, 1, 4, 4)
    >>> fa_numba.attention(q, q, q, algorithm="fa1", causal=True)[0, 0, 0].tolist()
    [1.0, 0.0, 0.0, 0.0]
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
    """Gradients of ``standard_attention`` with N x N matrices in global memory (arXiv 2205.14135,
    Algorithm 3).

    Arguments, result and errors as ``flash_attention_2_backward``. P is made anew in global memory
    and read back; ``out`` is checked but not needed, ``lse`` with ``dlse`` alone. There are no
    gradients of what a ``score_mod`` captures (``return_dcaptured``). The workspace is two Nq x Nk
    matrices a head, in q's dtype.
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
    """Gradients of attention, K/V outer (arXiv 2205.14135, Algorithm 4).

    Arguments, result and errors as ``flash_attention_2_backward``. dQ passes through global memory
    in every step, in one order; the workspace is nothing in float32, and dQ in float32 in 16 bits.
    With ``query_splits`` that many thread blocks share a head, each with its own rows of q, and add
    to dk and dv in no fixed order: Nk d loads and stores of either a split, and in 16 bits both in
    float32 as workspace.
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
    """Gradients of attention, a grid over K/V blocks (arXiv 2307.08691, Algorithm 2).

    ``dout`` and ``out`` are as q, ``lse`` as the forward pass returned it with ``return_lse``; the
    rest as ``flash_attention_2``, with the same ``options``. ``dlse`` is the gradient of ``lse``
    and like it, where the loss depends on that too: dS = P (dP - D + dlse). Of a row that sees no
    column it counts as 0.

    dQ is summed by atomic adds in no fixed order: Tc Nq d loads and as many stores a head, and
    gradients that can differ in the last bits between runs. ``deterministic`` sums it in a kernel
    of its own, Q outer, that computes S and dP once more and costs 2 Nq d + 2 Tr Nk d loads and Nq
    d stores. The workspace is one float a row; in 16 bits also dQ in float32, d rounded up to a
    multiple of 2, but for ``deterministic``.

    ``group_splits`` thread blocks share a column tile of a K/V head, each with as many of its query
    heads, or with as many rows of one: a divisor of Hq / Hk, or a multiple without a softcap,
    slopes or a bias, on ``unit`` "wgmma" up to d = 128. Each loads K and V, and leaves Nk d
    elements of dk and of dv in a float32 workspace, which are summed in one order. It is for calls
    with few K/V heads or keys, whose column tiles leave multiprocessors idle, or under a causal
    mask end at different times. "auto", the default, estimates which number ends first: 1 for all
    other calls and on the emulator.

    Returns (dq, dk, dv), in the shapes of q, k and v, and in q's dtype, library and device; with
    ``return_dbias`` also dbias, float32 in the shape of the bias, summed by atomic adds over the
    axes that the bias repeats; with ``return_dsinks`` then dsinks, float32 (Hq,); with
    ``return_dcaptured`` at last a dict of the gradients of the arrays that ``score_mod`` captures,
    by its names for them: float32, in their shapes, and None for other dtypes. Elements are summed
    by atomic adds, not the same bits twice, which ``deterministic`` refuses. A query that sees no
    key, and a key that no query sees, get zeros.

    Raises ValueError or TypeError, before anything runs, as ``flash_attention_2`` does.

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
    """Gradients of ``attention`` by one of three algorithms; the results differ by rounding.

    ``algorithm``: "fa2" for ``flash_attention_2_backward`` (a grid over K/V blocks), "fa1" for
        ``flash_attention_1_backward`` (K/V outer), "standard" for ``standard_attention_backward``
        (N x N matrices in global memory). It need not be that of the forward pass.
    ``dout``: the gradient of O; ``q``, ``k``, ``v`` and the options as in the forward pass.
    ``out``, ``lse``: O and L of the forward pass with ``return_lse``; dout and out in q's shape and
        dtype, lse float32 (B, Hq, Nq). All on one device.
    ``dlse``: None, or the gradient of L, as lse, for a loss that depends on it too.
    ``return_dbias``: bool, False: whether the gradient of ``bias``, or of an ``attn_mask`` of
        numbers, is returned too.
    ``return_dsinks``: bool, False: whether that of ``sinks`` is.
    ``return_dcaptured``: bool, False: whether those of the float32 arrays are that ``score_mod``
        captures; not of "standard".
    ``deterministic``: bool, of "fa2" alone: whether dq is summed in one order.
    ``group_splits``: of "fa2" alone; more than 1 on ``unit`` "wgmma".
    ``query_splits``: of "fa1" alone.
    ``tiles``, ``unit``, ``stream``: as for ``attention``.

    Returns (dq, dk, dv), in the shapes of q, k and v, and in q's dtype, library and device; with
    ``return_dbias`` also dbias, float32 in the shape of the bias, then with ``return_dsinks``
    dsinks, float32 (Hq,), and at last with ``return_dcaptured`` a dict of gradients by the
    function's names for its arrays.

    Raises ValueError or TypeError as ``attention`` does.

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
    """Attention over all columns, from that over parts of them, which share none.

    ``outputs``: two or more arrays, O of the same rows over each part: (B, H, N, d) or packed
        (total, H, d), of one dtype, float32, float16 or bfloat16, library and device, any strides.
    ``lses``: as many, L of each part as ``return_lse`` gives it: float32 (B, H, N) or (H, total).
    ``layout``: "bhnd" or "bnhd", outputs (B, N, H, d).
    ``stream``: as for ``attention``.

    Returns (O, L): with L = log(sum of e^(L_s)) over the parts s, O is the sum of e^(L_s - L) O_s.
    It is summed in float32 and rounded once. A row that saw no column of a part has nothing of it,
    whatever that part's output holds.

    Raises ValueError or TypeError, before anything runs, for arguments that are not as above.

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
    """Gradients of ``merge``: ((douts, ...), (dlses, ...)), like ``outputs`` and ``lses``.

    ``dout``: the gradient of O, as it; ``out``, ``lse``: what ``merge`` returned; ``dlse``: None,
    or the gradient of L, as it. The rest as for ``merge``. Those of a part s are P dO and
    P (rowsum(dO o (O_s - O)) + dlse) with P = e^(L_s - L), 0 of rows that saw no column of it.

    Raises ValueError or TypeError as ``merge`` does.
    """
    return merge_backward_all(dout, outputs, lses, out, lse, dlse, layout, stream)


def create_block_mask(mask_mod, batch, heads, seqlen_q, seqlen_k, *, tiles) -> BlockMask:
    """Which blocks of S a ``mask_mod`` leaves empty, full or mixed, for ``block_mask=``.

    ``batch`` and ``heads`` are those of q, or 1 where the function asks for neither b nor h, and
    ``tiles`` the block sizes of the call. Attention by it leaves empty blocks out, in both orders
    and both passes, and asks the function in mixed ones alone; it has the function too, with what
    that captured at this time. Kernels find the blocks and list them, on the GPU or the emulator;
    there the lists stay, beside the arrays that the function captured. ``blocks`` reads them back.

    Raises TypeError or ValueError as ``attention`` does of a ``mask_mod``.

    >>> import fa_numba
    >>> tiles = fa_numba.Tiles(Br=16, Bc=16)
    >>> blocks = fa_numba.create_block_mask(lambda b, h, i, j: j <= i, 1, 1, 64, 64, tiles=tiles)
    >>> blocks.blocks[0, 0].tolist()
    [[1, 0, 0, 0], [2, 1, 0, 0], [2, 2, 1, 0], [2, 2, 2, 1]]
    """
    return create(mask_mod, (batch, heads, seqlen_q, seqlen_k), tiles)


def softmax(x, *, algorithm="online", out=None, stream=None):
    """softmax(x) by rows, by one of the three algorithms of arXiv 1805.02867.

    ``x``: a (batch, elements) float32 array of NumPy, torch, CuPy, JAX or DLPack, any strides; one
        thread block takes a vector.
    ``algorithm``: "naive" (Algorithm 1), 3 accesses an element, overflows for x > 88.7; "safe"
        (Algorithm 2), 4 accesses, subtracts the maximum first; "online" (Algorithm 3), 3 accesses,
        takes maximum and sum in one pass, as FlashAttention does.
    ``out``: an array of x's shape and library that takes the result; a new one without.
    ``stream``: a CUDA stream, or its address; without one the current one of x's library.

    Returns the result, as x in shape, library and device. A -inf gives 0, also in a vector of
    nothing else, as in a masked row of attention; NaN or inf makes its vector NaN, but for an inf
    the other elements 0 by "naive".

    Raises ValueError or TypeError, before anything runs, for another algorithm, shape or dtype, and
    for what the emulator would take minutes for.

    >>> import numpy as np, fa_numba
    >>> x = np.array([[1, 2, 3, 4]], np.float32)
    >>> fa_numba.softmax(x + 100).round(4)
    array([[0.0321, 0.0871, 0.2369, 0.6439]], dtype=float32)
    >>> fa_numba.softmax(x + 100, algorithm="naive")
    array([[nan, nan, nan, nan]], dtype=float32)
    """
    return softmax_of_vectors(x, algorithm, out, stream)
