"""The user's functions ``score_mod`` and ``mask_mod``, and the slope of ``score_mod``, applied to a
tile of scores in registers.

The slope is the derivative of ``score_mod`` with respect to the score. ``mods.Text`` contains the
source text of such a function for kernels.

A thread calls the user's function for each of its elements of the tile, without a branch. The
compiler can therefore use one load for two elements that read the same element of a captured array.
Elements beyond the end of the matrix are included. If a function reads an array with the row or
column as index, these elements get the last row or column of the matrix instead of their own.

Names in this module:

- ``place`` is the position of an element, a tuple (row, column, origin). ``origin`` is the thread's
  first row if the thread has more rows than columns, otherwise the thread's first column.
- ``kept`` is normally a tuple of two register arrays: sums of gradients that are added to global
  memory later, and the positions of these sums in captured arrays.
"""

import math
from functools import cache

from fa_numba import masks
from fa_numba.device import cuda, device_function, float32, int32, uint32
from fa_numba.intrinsics.arithmetic import LOG2E, LOWEST, NEG_INF, ONE, exp2
from fa_numba.intrinsics.reduction import add_global
from fa_numba.mods import function_of
from fa_numba.parts.division import DIVISION
from fa_numba.parts.lanes import FULL_WARP, sum_of_lanes
from fa_numba.parts.layout import make_column, make_row
from fa_numba.parts.namespace import part

# The compiler unrolls a loop over registers. The largest number of elements of such a loop, and
# of source lines of all its elements.
AT_A_TIME, LINES = 8, 128

_distance = device_function(masks.distance)


@part
def make_apply_score_mod(spec, unit):
    """Make ``apply_score_mod(rS, scale, tile)``, which replaces each element s of rS by ``unit``
    times score_mod(``scale`` s).

    ``unit`` is log2(e) if the result is to be in units of log2, otherwise 1.
    """
    RS, mod = spec.TM * spec.TN, spec.features.score_mod
    each = _make_each(spec, 0, _make_changed(spec, unit), _chunk_of(mod))
    score_factor = make_score_factor(mod and mod.value)

    def apply_score_mod(rS, scale, tile):
        factor = score_factor(scale, tile.head.options)
        for e in range(RS):
            rS[e] *= factor
        each(rS, rS, scale, tile)

    return apply_score_mod


@part
def make_slopes(spec):
    """Make ``slopes(rG, rS, scale, tile)``, which stores the derivative of each score in the
    registers rG.

    rS holds the product Q KT. The derivative is taken with respect to the scaled score, before the
    cap and ``score_mod``. It is the product of two factors: the derivative of the cap, 1 -
    tanh(``scale`` Q KT)^2, and the derivative of ``score_mod``. With a cap, ``scale`` is the scale
    of the call divided by the cap. If all derivatives are 1, the function stores no derivative.

    Some gradients of captured arrays depend on the scores before ``score_mod``. For these
    gradients, the function also stores these scores in rG, after the derivatives.
    """
    RS, features = spec.TM * spec.TN, spec.features
    softcap, score_mod = features.softcap, features.slope_of is not None or features.keeps_scores
    each = _make_each(spec, 0, _make_slope(spec), _chunk_of(features.slope_of))

    def slopes(rG, rS, scale, tile):
        if score_mod:
            each(rG, rS, scale, tile)
        elif softcap:
            for e in range(RS):
                t = math.tanh(scale * rS[e])
                rG[e] = float32(1.0) - t * t

    return slopes


@cache
def make_p_and_ds(spec, values_of, ds_of):
    """Make ``p_and_ds(rdP, rS, given, tile)``, which replaces the scores in rS by P, and dP in rdP
    by dS.

    Before the call, rS holds the scaled scores before the cap and ``score_mod``. A hidden element
    of rS holds the number that ``hidden_score`` returns. The function computes:

    - P = exp(S - L), where S is the score after the cap, ``score_mod``, ALiBi and the bias. P is
      negative in elements that dropout does not keep.
    - dS = P o (dP - D), multiplied by the derivatives of the cap and of ``score_mod``.

    The caller decides how L, D and dropout are found:

    - ``given`` is a tuple that is passed to ``values_of``. Its first element is the tuple ``kept``:
      sums for the gradients of captured arrays.
    - ``values_of(given, e)`` returns three values for element e: L of its row in units of log2, D
      of its row, and whether dropout keeps the element.
    - ``ds_of(p, dp, d, options)`` returns P o (dP - D) of one element.
    """
    of_one = _make_p_and_ds(spec, values_of, ds_of)
    return _make_each(spec, 0, of_one, _chunk_of(spec.features.score_mod))


@cache
def make_pairs(spec, of_pair):
    """Make ``pairs(rG, rS, given, tile)``, which calls ``of_pair`` for all pairs of elements of the
    thread.

    A pair consists of the registers e and e + 1, whose elements are in neighbouring rows. The call
    is ``of_pair(rG, rS, e, given, place, head)``, where ``place`` is the position of element e.
    ``given`` is passed to ``of_pair`` unchanged.
    """
    return _make_each(spec, 0, of_pair, max(1, _chunk_of(spec.features.score_mod) // 2), rows=2)


@part
def make_hide(spec):
    """Make ``hide(rS, tile)``, which hides the scores for which the user's ``mask_mod`` returns
    false.

    A hidden score is set to the number that ``hidden_score`` returns, which normally is -inf.
    """
    each = _make_each(spec, 0, _make_hidden(spec), _chunk_of(spec.features.mask_mod))

    def hide(rS, tile):
        each(rS, rS, float32(1.0), tile)

    return hide


@part
def _make_each(spec, first, of_one, chunk, rows=1):
    """Make ``each(rG, rS, scale, tile)``, which calls ``of_one`` for the thread's elements of a
    tile, from element number ``first`` to the last one.

    The call is ``of_one(rG, rS, e, scale, place, head)``, where e is the register of the element in
    rS, and ``place`` is the position of the element. With ``rows`` above 1, ``of_one`` is called
    only for the first of every ``rows`` rows of the thread.

    The compiler unrolls the loop over elements completely. The function therefore handles at most
    ``chunk`` elements. A second function of the same kind handles the elements after them. This
    factory makes the second function by calling itself with a larger ``first``.
    """
    TN, (EI, EJ), COUNT = spec.TN, spec.element_steps, spec.TM * spec.TN // rows
    row_of, column_of, by_rows = make_row(spec), make_column(spec), spec.TM > TN
    LAST = min(first + chunk, COUNT)
    rest = _make_each(spec, LAST, of_one, chunk, rows) if LAST < COUNT else _nothing

    def each(rG, rS, scale, tile):
        head, thread = tile.head, tile.thread
        origin = int32(tile.j0 + column_of(thread.tx, 0))
        if by_rows:
            origin = int32(tile.i0 + row_of(thread.ty, 0))
        for n in range(first, LAST):
            i = n // TN * rows
            row = uint32(tile.i0 + row_of(thread.ty, i))
            col = uint32(tile.j0 + column_of(thread.tx, n % TN))
            place = int32(row), int32(col), origin
            of_one(rG, rS, i * EI + n % TN * EJ, scale, place, head)
        rest(rG, rS, scale, tile)

    return each


@device_function
def _nothing(rG, rS, scale, tile):
    pass


@part
def _make_inside(features, alone):
    """Make ``inside(row, col, head)``, which returns the row and the column that are passed to the
    user's function.

    Normally the result is ``row`` and ``col``. If ``alone`` is true, the user's function reads an
    array at this position. Positions beyond the matrix must then be replaced, because such a read
    would be out of bounds. The row becomes at most the last row, and the column at most the last
    column. For a sequence without columns, the column is 0.
    """
    may_be_empty = features.kv_lens or features.packed

    def inside(row, col, head):
        i, j = row, col
        if alone:
            i = int32(min(uint32(row), uint32(head.Nq - uint32(1))))
            last = uint32(head.Nk - uint32(1))
            if may_be_empty:
                last = uint32(head.Nk - uint32(min(head.Nk, uint32(1))))
            j = int32(min(uint32(col), last))
        return i, j

    return inside


@part
def _make_changed(spec, unit):
    """Make ``changed(rG, rS, e, scale, place, head)``, which replaces the element in register e of
    rS by ``unit`` times the result of ``score_mod``.

    Before the call, the element must be the product Q KT times the factor that
    ``make_score_factor`` finds for ``score_mod``. Some kernels sum over the rows of S. In these
    kernels, elements in rows beyond the matrix are not changed, because they must remain 0. ``rG``
    and ``scale`` are not used.
    """
    mod, keeps = spec.features.score_mod, spec.sums_rows
    score_mod = called(mod and mod.value)
    inside = _make_inside(spec.features, mod is not None and mod.inside)

    def changed(rG, rS, e, scale, place, head):
        row, col, origin = place
        i, j = inside(row, col, head)
        score_and_factor = rS[e], unit
        s = score_mod(score_and_factor, int32(head.b), int32(head.h), i, j, origin, head.options)
        # If the kernel adds up rows, rows beyond the matrix must keep their zeros.
        if not keeps or uint32(row) < head.Nq:
            rS[e] = s

    return changed


@part
def _make_slope(spec):
    """Make ``slope(rG, rS, e, scale, place, head)``, which stores the derivative of the score in
    register e of rS in register e of rG.

    ``make_slopes`` explains ``scale``. If the gradients of captured arrays need it, the function
    also stores the score before ``score_mod`` in rG, after the derivatives of all scores.
    """
    features = spec.features
    softcap, of_slope = features.softcap, _slope_text(features)
    slope_of = called(of_slope)
    score_factor = make_score_factor(of_slope)
    inside = _make_inside(features, features.slope_of is not None and features.slope_of.inside)
    modified, keeps = features.slope_of is not None, features.keeps_scores
    slopes, AT = features.slopes, spec.TM * spec.TN if features.slopes else 0

    def slope(rG, rS, e, scale, place, head):
        row, col, origin = place
        s, by, g = rS[e], scale, float32(1.0)
        if softcap:
            t = math.tanh(scale * s)
            s, by, g = head.options.softcap * t, ONE, float32(1.0) - t * t
        i, j = inside(row, col, head)
        if modified:
            score_and_factor = score_factor(by, head.options) * s, ONE
            g *= slope_of(
                score_and_factor, int32(head.b), int32(head.h), i, j, origin, head.options
            )
        if slopes:
            rG[e] = g
        if keeps:
            rG[AT + e] = by * s

    return slope


@part
def make_add_captured(spec):
    """Make ``add_captured(rdS, rG, tile)``, which adds a tile's contribution to the gradients of
    the arrays that ``score_mod`` captures.

    Each element of S contributes to the gradient of every array element that its ``score_mod``
    reads. The contribution is dS times the derivative of ``score_mod`` with respect to the array
    element. It is added atomically. Only float32 arrays get gradients, and only if the call wants
    them. ``slopes`` has stored the contents of ``rG``.
    """
    gradient, (SUMS, PLACES) = _gradient(spec.features), kept_sums(spec)
    captured = gradient is not None
    each = _make_each(spec, 0, _make_captured(spec), _chunk(gradient and gradient.each))
    start_sums, add_sums = make_start_sums(spec), make_add_sums(spec)

    def add_captured(rdS, rG, tile):
        if captured:
            kept = cuda.local.array(SUMS, float32), cuda.local.array(PLACES, uint32)
            start_sums(kept)
            each(rG, rdS, kept, tile)
            add_sums(kept, tile.head)

    return add_captured


@part
def _make_captured(spec):
    """Make ``captured(rG, rdS, e, kept, place, head)``, which adds the contribution of one element
    of S to the gradients of captured arrays.

    dS of the element is in register e of rdS. ``rG`` holds what ``slopes`` has stored. ``place`` is
    the position of the element.
    """
    keeps, AT = spec.features.keeps_scores, spec.TM * spec.TN if spec.features.slopes else 0
    add = _make_add_of_one(spec)

    def captured(rG, rdS, e, kept, place, head):
        s = rG[AT + e] if keeps else float32(0.0)
        add(kept, s, rdS[e], place, head)

    return captured


@part
def _make_add_of_one(spec):
    """Make ``add_of_one(kept, s, ds, place, head)``, which adds the contribution of one element of
    S to the gradients of captured arrays.

    ``s`` is the score before ``score_mod``, and ``ds`` is dS of this element. Some contributions
    are added to the gradient in global memory at once. The other contributions are added to the
    sums in ``kept``, which ``add_sums`` adds to global memory later.
    """
    gradient = _gradient(spec.features)
    each = _texted(gradient and gradient.each)

    def add_of_one(kept, s, ds, place, head):
        row, col, origin = place
        inside = uint32(row) < head.Nq and uint32(col) < head.Nk
        if inside and ds != float32(0.0):
            b, h = int32(head.b), int32(head.h)
            each((s, ds), b, h, row, col, origin, head.options, kept)

    return add_of_one


def kept_sums(spec):
    """Return the sizes of two register arrays in which a thread adds up gradients of captured
    arrays.

    The first array has one register for each sum. The second array says to which element of a
    captured array a sum belongs: it has two registers, row and column, for each sum whose element
    differs between scores. Both sizes are at least 1, because a register array cannot be empty.
    """
    gradient = _gradient(spec.features)
    shared, merged = (gradient.shared, gradient.merged) if gradient is not None else (0, 0)
    return max(1, shared + merged), max(1, 2 * merged)


@part
def make_start_sums(spec):
    """Make ``start_sums(kept)``, which sets all sums in ``kept`` to 0.

    Each position in ``kept`` is set to row 0 and column 0 of the captured array.
    """
    SUMS, PLACES = kept_sums(spec)

    def start_sums(kept):
        sums, places = kept
        for n in range(SUMS):
            sums[n] = float32(0.0)
        for n in range(PLACES):
            places[n] = uint32(0)

    return start_sums


@part
def make_add_sums(spec):
    """Make ``add_sums(kept, head)``, which adds the sums in ``kept`` to the gradients of captured
    arrays in global memory.

    Each thread holds its own sums. There are two kinds of sums:

    - The first kind is for an array element that is the same for all scores of the head, such as
      ``array[h]``. These sums are added over the lanes of the warp. Then one lane adds the total to
      global memory.
    - The second kind is for an array element that can differ between scores, such as ``array[i]``.
      If the array element is the same in all lanes of the warp, the sums are added over the lanes
      first. Then the sums are added to global memory.
    """
    gradient = _gradient(spec.features)
    SHARED, MERGED = (gradient.shared, gradient.merged) if gradient is not None else (0, 0)
    rest, flush = (_texted(text) for text in _later(gradient))
    shares, merges, join = SHARED > 0, MERGED > 0, _make_join_lanes(spec)

    def add_sums(kept, head):
        sums, _ = kept
        if shares:
            for n in range(SHARED):
                sums[n] = sum_of_lanes(sums[n], 32, 1)
            if uint32(cuda.threadIdx.x) % uint32(32) == uint32(0):
                rest(int32(head.b), int32(head.h), head.options, kept)
        if merges:
            for n in range(MERGED):
                join(kept, n)
            flush(head.options, kept)

    return add_sums


@part
def _make_join_lanes(spec):
    """Make ``join_lanes(kept, n)``, which adds one sum over the 32 lanes of a warp, if the sums of
    all lanes belong to the same array element.

    Each lane holds a sum in registers, together with the row and the column of the array element to
    whose gradient the sum will be added. Both are in ``kept``. If the rows and columns of all lanes
    are equal, lane 0 gets the total, and the other lanes get 0. Otherwise the sums stay unchanged.
    A lane can hold several such sums, one for each read of a captured array. n is the number of the
    sum, from 0 on.
    """
    gradient = _gradient(spec.features)
    SHARED = gradient.shared if gradient is not None else 0

    def join_lanes(kept, n):
        sums, places = kept
        row, col = int32(places[2 * n]), int32(places[2 * n + 1])
        total, differs = sums[SHARED + n], int32(0)
        lane = 16
        while lane > 0:
            other_row = cuda.shfl_xor_sync(FULL_WARP, row, lane)
            other_col = cuda.shfl_xor_sync(FULL_WARP, col, lane)
            if row != other_row or col != other_col:
                differs = int32(1)
            differs = int32(differs | cuda.shfl_xor_sync(FULL_WARP, differs, lane))
            total += cuda.shfl_xor_sync(FULL_WARP, total, lane)
            lane //= 2
        if differs == int32(0):
            first = uint32(cuda.threadIdx.x) % uint32(32) == uint32(0)
            sums[SHARED + n] = total if first else float32(0.0)

    return join_lanes


def _later(gradient):
    """Return the source texts of the two functions that add sums to gradients in global memory
    after the last score.

    The functions are ``Gradient.rest`` and ``Gradient.flush``. If ``gradient`` is None, both texts
    are None.
    """
    return (None, None) if gradient is None else (gradient.rest, gradient.flush)


def _gradient(features):
    """Return the ``mods.Gradient`` of the captured arrays, or None if the call wants no gradient of
    an array.
    """
    return features.dcaptured and features.dcaptured.gradient


def _texted(text):
    """Return the device function of a source text, or None if the text is None."""
    return text and device_function(function_of(text, add_global=add_global, **DIVISION))


@part
def _make_p_and_ds(spec, values_of, ds_of):
    """Make ``p_and_ds(rdP, rS, e, given, place, head)``, which replaces the score in register e of
    rS by P, and dP in register e of rdP by dS.

    ``place`` is the position of the element. ``make_p_and_ds`` explains the other arguments.
    """
    p_and_slope, times_slope = make_p_and_slope(spec), make_times_slope(spec.features)
    captured, add = _gradient(spec.features) is not None, _make_add_of_one(spec)

    def p_and_ds(rdP, rS, e, given, place, head):
        shift, d, kept = values_of(given, e)
        p, g, s = p_and_slope(rS[e], shift, kept, place, head)
        ds = ds_of(p, rdP[e], d, head.options)
        if captured:
            add(given[0], s, ds, place, head)
        rS[e], rdP[e] = p, times_slope(ds, g)

    return p_and_ds


@part
def make_times_slope(features):
    """Make ``times_slope(x, g)``, which returns x g, where g is a derivative of the score.

    A derivative can be NaN or infinite. If x is 0, the result is then x, not NaN.
    """
    anywhere = features.slope_of is not None and not features.slope_of.steady

    def times_slope(x, g):
        if anywhere:
            return x * g if x != float32(0.0) else x
        return x * g

    return times_slope


@part
def make_p_and_slope(spec):
    """Make ``p_and_slope(score, shift, kept, place, head)``, which returns three values for one
    element of S.

    - P = exp(S - L), where S is the score after the cap, ``score_mod``, ALiBi and the bias. P is 0
      if the element is hidden. P is negative if dropout does not keep the element (``kept`` is
      false).
    - The slope: the product of the derivatives of the cap and of ``score_mod``.
    - The score that ``score_mod`` was called with.

    ``score`` is the number that ``scale_and_mask`` has stored in the element's register: the scaled
    score before the cap and ``score_mod``. ``shift`` is the row's logsumexp L, in units of log2.
    """
    features = spec.features
    softcap, own = features.softcap, _make_value_and_slope(features)
    alibi, bias, dropout = features.alibi, features.bias, features.dropout
    mods = [mod for mod in (features.score_mod, features.slope_of) if mod is not None]
    inside = _make_inside(spec.features, any(mod.inside for mod in mods))
    HIDDEN = hidden_score(features.kept_scores_text)

    def p_and_slope(score, shift, kept, place, head):
        row, col, origin = place
        i, j = inside(row, col, head)
        hidden = score == HIDDEN
        s, g = score, float32(1.0)
        if softcap:
            t = math.tanh(s)
            s, g = head.options.softcap * t, float32(1.0) - t * t
        x, slope = own(s, i, j, origin, head)
        if alibi:
            away = _distance(row, col, int32(int32(head.Nk) - int32(head.Nq)))
            x -= LOG2E * head.options.slopes[head.b, head.h] * float32(int32(away))
        if bias and uint32(row) < head.Nq and uint32(col) < head.Nk:
            x += LOG2E * head.options.bias[head.b, head.h, uint32(row), uint32(col)]
        p = exp2(x - shift)
        p = float32(0.0) if hidden else p
        if dropout:
            p = p if kept else -p  # as ``drop`` marks it
        return p, g * slope, s

    return p_and_slope


@part
def _make_value_and_slope(features):
    """Make ``value_and_slope(s, i, j, origin, head)``, which returns the value of ``score_mod`` for
    the score ``s``, and the derivative of ``score_mod`` at this score.

    The value is in units of log2. Normally one device function computes the value and the
    derivative. If the user has passed a ``score_mod_grad``, this function computes the derivative.
    """
    mod, at_once = features.score_mod, features.score_mod_grad is None
    of_slope = _slope_text(features)
    text = mod and (mod.both if at_once else mod.value)
    done = None if features.kept_scores_text.score_factor else text
    score_factor, inner = make_score_factor(done), make_inner(done)
    score_mod, slope_of = called(text), called(of_slope)
    slope_factor = make_score_factor(of_slope)

    def value_and_slope(s, i, j, origin, head):
        b, h, options = int32(head.b), int32(head.h), head.options
        score_and_factor = inner(score_factor(ONE, options) * s), LOG2E
        if at_once:
            return score_mod(score_and_factor, b, h, i, j, origin, options)
        for_slope = slope_factor(ONE, options) * s, ONE
        slope = slope_of(for_slope, b, h, i, j, origin, options)
        return score_mod(score_and_factor, b, h, i, j, origin, options), slope

    return value_and_slope


@part
def _make_hidden(spec):
    """Make ``hidden(rG, rS, e, scale, place, head)``, which hides the score in register e of rS, if
    ``mask_mod`` returns false at the position ``place``.

    A hidden score is set to the number that ``hidden_score`` returns. ``rG`` and ``scale`` are not
    used.
    """
    mod, HIDDEN = spec.features.mask_mod, hidden_score(spec.stays)
    mask_mod = called(mod and mod.value)
    inside = _make_inside(spec.features, mod is not None and mod.inside)

    def hidden(rG, rS, e, scale, place, head):
        row, col, origin = place
        i, j = inside(row, col, head)
        if not mask_mod(int32(head.b), int32(head.h), i, j, origin, head.options):
            rS[e] = HIDDEN

    return hidden


def hidden_score(stays):
    """Return the number that is stored in place of a hidden score.

    Normally, ``stays`` is None, and the number is -inf.

    Some backward kernels for Hopper hide scores before they compute ``score_mod`` and its
    derivative. ``stays`` is then the ``mods.Text`` of this later computation. The later computation
    recognises hidden scores by the number, which is therefore finite:

    - If the kernel applies an inner function such as tanh before it hides scores, the number is -2.
      The inner function never returns -2.
    - Otherwise the number is the lowest finite float32.
    """
    if stays is None:
        return NEG_INF
    return float32(-2.0) if stays.inner else LOWEST


def called(text):
    """Return the device function of a ``mods.Text``, or None if ``text`` is None."""
    return _texted(text and text.text)


@part
def make_score_factor(text):
    """Make ``score_factor(scale, options)``, which returns the factor that turns Q KT into the
    argument of a user's function.

    ``text`` is the ``mods.Text`` of the user's function, or None. Normally the factor is ``scale``.
    A text can also contain a function that computes the factor. For example, if the user's function
    is ``2 * tanh(score / 50)``, the factor can be ``scale`` / 50.
    """

    def score_factor(scale, options):
        return scale

    return _texted(text and text.score_factor) or score_factor


@part
def make_inner(text):
    """Make ``inner(score)``, which applies the inner function of a ``mods.Text`` to a score.

    For example, if the user's function is ``2 * tanh(score / 50)``, the inner function can be tanh.
    If ``text`` is None or has no inner function, the score is returned unchanged.
    """

    def inner(score):
        return score

    return _texted(text and text.inner) or inner


def _slope_text(features):
    """Return the source text of a function that computes the slope of a score.

    The slope is the derivative of a modified score with respect to the score before the user's
    ``score_mod``. The result is a ``mods.Text``, or None if the slope is 1.
    """
    mod = features.slope_of
    return mod and (mod.slope if mod.slope.text else mod.value)


def _chunk(*texts):
    """Return how many elements of a tile one device function handles.

    The compiler unrolls the loop over the elements completely. ``texts`` are source texts that are
    compiled once for each element. The number is therefore smaller if one of the texts is long.
    """
    lines = max((len(text.splitlines()) for text in texts if text), default=1)
    return max(1, min(AT_A_TIME, LINES // lines))


def _chunk_of(mod):
    """Return how many elements of a tile one device function handles, if it calls the user's
    function ``mod`` for each element.

    A thread's elements are divided among several device functions (``_make_each``), because the
    compiler unrolls a loop over elements completely. ``mod`` is a ``Mod``, or None. The number is
    smaller if ``mod`` or its derivative has a long source text (``_chunk``).
    """
    return _chunk(mod and mod.value.text, mod and mod.slope.text)
