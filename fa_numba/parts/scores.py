"""The scores of a tile in registers: scale, cap, user function, bias and masks, after the product Q
KT.

Unless a function says otherwise, the scores are multiplied by scale log2(e), so that the softmax
needs only exp2. This is what "in units of log2" means.
"""

import math
from functools import cache

from fa_numba import masks
from fa_numba.device import device_function, float32, int32, uint32
from fa_numba.intrinsics.arithmetic import LOG2E, ONE
from fa_numba.mods.blocks import FULL
from fa_numba.parts.bias import make_add_bias, make_block_state
from fa_numba.parts.bias import make_read_bias_or_state as make_read_bias_or_state
from fa_numba.parts.layout import make_column, make_row, make_warp_tile
from fa_numba.parts.mods import (
    hidden_score,
    make_apply_score_mod,
    make_hide,
    make_inner,
    make_score_factor,
)
from fa_numba.parts.mods import make_slopes as make_slopes
from fa_numba.parts.namespace import part
from fa_numba.problem import UNBOUNDED

_visible_causal = device_function(masks.visible_causal)


_visible_window = device_function(masks.visible_window)


_distance = device_function(masks.distance)


@cache
def make_scale_and_mask(spec):
    """Make ``scale_and_mask(rS, scale, tile)``, which turns the product Q KT in rS into scores.

    The steps are, in this order:

    1. Multiply by ``scale``.
    2. Apply the cap: ``options.softcap`` times tanh. ``options.softcap`` is in units of log2, or in
       natural units if there is a ``score_mod``.
    3. Call the user's ``score_mod``.
    4. Add the ALiBi bias.
    5. Add the bias of the call.
    6. Hide elements by setting them to -inf. These are elements that a mask or a ``mask_mod``
       hides, columns at or past Nk, and with ``q_lens`` rows at or past Nq.

    The scores are in units of log2. Step 1 is different in two kinds of kernels. With
    ``spec.folds_scale``, the softmax multiplies by ``scale`` later, in the exponent. With a
    ``score_mod`` but without a cap, step 3 multiplies by ``scale``.

    Some backward kernels for Hopper compute ``score_mod``, the ALiBi bias and the bias later,
    together with dS (``spec.stays`` is not None). For these kernels, the function multiplies by a
    factor, applies the inner function of the text ``spec.stays``, and hides elements. Hidden
    elements become ``mods.hidden_score``.
    """
    return _without_bias_read(_make_scale_and_mask(spec, LOG2E, hides_blocks=False))


@cache
def make_scale_and_mask_all(spec):
    """Make ``scale_and_mask_all(rS, scale, tile)``, which does the work of ``scale_and_mask`` in
    kernels of standard attention.

    There are two differences. The scores are in natural units. The function also hides elements in
    empty blocks of a block mask, because standard attention visits every tile.
    """
    return _without_bias_read(_make_scale_and_mask(spec, ONE, hides_blocks=True))


@cache
def make_scale_bias_and_mask(spec):
    """Make ``scale_bias_and_mask(rS, rBS, scale, tile)``, which works as ``scale_and_mask`` but
    uses values in the registers ``rBS``.

    The values have been read before the product Q KT was complete, by ``read_bias_or_state`` or by
    a function of ``parts.wgmma.listed``. They are this thread's part of the bias, or the state of
    the tile in the block mask (``parts.bias``).
    """
    return _make_scale_and_mask(spec, LOG2E, hides_blocks=False, ahead=True)


@part
def _without_bias_read(scale_and_mask):
    """Make ``scale_and_mask(rS, scale, tile)``, which calls a device function that has one more
    argument, ``rBS``.

    The called function takes (rS, rBS, scale, tile). It does not use ``rBS``, so that any array can
    be passed. The call passes rS.
    """

    def without(rS, scale, tile):
        scale_and_mask(rS, rS, scale, tile)

    return without


@part
def _make_scale_and_mask(spec, unit, hides_blocks, ahead=False):
    """Make ``scale_and_mask(rS, rBS, scale, tile)``, with the steps that ``make_scale_and_mask``
    lists.

    ``unit`` is log2(e) for scores in units of log2, or 1 for scores in natural units. If
    ``hides_blocks`` is true, elements in empty blocks of a block mask are hidden. If ``ahead`` is
    true, the registers rBS hold the bias, or the state of the tile in the block mask. Otherwise rBS
    is not used.
    """
    TM, TN, (EI, EJ) = spec.TM, spec.TN, spec.element_steps
    Br, Bc, features = spec.head_rows, spec.block_columns, spec.features
    causal, window, q_lens = features.causal, features.window, features.q_lens
    softcap, alibi, bias = features.softcap, features.alibi, features.bias
    row_of, column_of, warp_tile = make_row(spec), make_column(spec), make_warp_tile(spec)
    COLUMNS, HIDDEN = spec.warp_columns or spec.Bc, hidden_score(spec.stays)
    sparse, hides_blocks = features.sparse, hides_blocks and features.sparse
    add_bias = make_add_bias(spec, unit, ahead)
    score_mod, mask_mod = features.score_mod is not None, features.mask_mod is not None
    # Without a cap, ``score_mod`` gets the scale as an argument and applies it.
    scales = not spec.folds_scale and (softcap or not score_mod)
    score_factor, inner = make_score_factor(spec.stays), make_inner(spec.stays)
    has_inner = bool(spec.stays and spec.stays.inner)
    apply_score_mod, hide = make_apply_score_mod(spec, unit), make_hide(spec)
    state_ahead, block_state = ahead and spec.reads_state, make_block_state(spec)

    def scale_and_mask(rS, rBS, scale, tile):
        head, options, thread = tile.head, tile.head.options, tile.thread
        diagonal = int32(int32(head.Nk) - int32(head.Nq))
        own = warp_tile(tile)
        row0, col0 = tile.i0, own.j0
        if scales:
            factor = score_factor(scale, options)
            for e in range(TM * TN):
                rS[e] *= factor
        if has_inner:
            for e in range(TM * TN):
                rS[e] = inner(rS[e])
        if softcap:
            for e in range(TM * TN):
                rS[e] = options.softcap * math.tanh(rS[e])
        if score_mod:
            apply_score_mod(rS, ONE if softcap else scale, own)
        if alibi:
            slope = unit * options.slopes[head.b, head.h]
            # Columns and rows count from this thread's first column. The columns are then
            # constants, and only one number per row is converted to float. Columns past the end
            # are hidden below.
            first = int32(int32(col0 + column_of(thread.tx, 0)) - diagonal)
            for i in range(TM):
                row = uint32(row0 + row_of(thread.ty, i))
                if row < head.Nq:
                    key = float32(int32(int32(row) - first))
                    for j in range(TN):
                        col = float32(int32(column_of(uint32(0), j)))
                        rS[i * EI + j * EJ] -= slope * _distance(key, col, float32(0.0))
        if bias:
            add_bias(rS, rBS, own)
        last = uint32(col0 + (COLUMNS - 1))
        inside = last < head.Nk
        if causal:
            along = int32(int32(last) - int32(row0))  # Numba subtracts in int64
            inside = inside and _visible_causal(int32(0), along, diagonal)
        if window:
            left, right = options.window_left, options.window_right
            lowest = int32(row0 + (Br - 1))
            inside = inside and _visible_window(
                int32(row0), int32(last), diagonal, UNBOUNDED, right
            )
            inside = inside and _visible_window(lowest, int32(col0), diagonal, left, UNBOUNDED)
        if q_lens:
            inside = inside and uint32(row0 + Br) <= head.Nq
        if hides_blocks:
            block = options.block_mask[head.b, head.h, row0 // uint32(Br), col0 // uint32(Bc)]
            inside = inside and block != 0
        if not inside:
            # Columns count from this thread's first column, so that they are constants. Rows count
            # from the row that has this column on its diagonal.
            first = int32(col0 + column_of(thread.tx, 0))
            top = int32(first - diagonal)
            for i in range(TM):
                row = int32(int32(row0 + row_of(thread.ty, i)) - top)
                for j in range(TN):
                    col = int32(column_of(uint32(0), j))
                    if causal:  # hides columns past Nk - 1 too, the last row's last column
                        visible = _visible_causal(row, col, 0)
                    else:
                        visible = col < int32(int32(head.Nk) - first)
                    if window:
                        seen = _visible_window(row, col, 0, left, right)
                        visible = visible and seen
                    if q_lens:
                        visible = visible and uint32(row0 + row_of(thread.ty, i)) < head.Nq
                    if hides_blocks:
                        visible = visible and block != 0
                    if not visible:
                        rS[i * EI + j * EJ] = HIDDEN
        if mask_mod:
            state = uint32(0)
            if state_ahead:
                state = uint32(rBS[0])
            elif sparse:
                state = block_state(own)
            if state != uint32(FULL):
                hide(rS, own)

    return scale_and_mask
