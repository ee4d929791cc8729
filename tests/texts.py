"""Where the texts of a figure are, which overlap, and which the figure's edge cuts."""

from itertools import combinations

from matplotlib.text import Text

from experiments.lab.show import style

SLACK = 2.0  # pixels by which boxes may overlap: a box is larger than its letters


def overlapping(figure):
    """Describe each text that is cut, and each pair of texts that overlap, of a laid-out figure."""
    boxes = list(drawn(figure))
    edge = figure.bbox
    found = []
    for text, box in boxes:
        outside = max(edge.x0 - box.x0, edge.y0 - box.y0, box.x1 - edge.x1, box.y1 - edge.y1)
        if outside > 0:
            found.append(f"{text!r} is cut")
    for (one, a), (other, b) in combinations(boxes, 2):
        width, height = min(a.x1, b.x1) - max(a.x0, b.x0), min(a.y1, b.y1) - max(a.y0, b.y0)
        if min(width, height) > SLACK:
            found.append(f"{one!r} overlaps {other!r}")
    return found


def drawn(figure):
    """Yield the words and the box, in pixels, of each text and each legend that is drawn.

    A legend counts as one text, with its marks.
    """
    renderer = figure._get_renderer()  # of an Agg canvas the one that has laid it out
    seen = set()
    for legend in (*figure.legends, *(ax.get_legend() for ax in figure.axes)):
        if legend is not None and legend.get_visible():
            seen |= set(style.texts(legend))
            words = [*legend.get_texts(), legend.get_title()][0].get_text()
            yield f"legend: {words}", legend.get_tightbbox(renderer)
    for ax in figure.axes:
        for axis in (ax.xaxis, ax.yaxis):
            seen |= set(style.texts(axis))
            if ax.axison and ax.get_visible() and axis.get_visible():
                ticks = [x for tick in axis._update_ticks() for x in (tick.label1, tick.label2)]
                found = list(_boxes([axis.offsetText, *ticks], renderer))
                _place_label(axis, [box for _, box in found])
                yield from (*found, *_boxes([axis.label], renderer))
    yield from _boxes([text for text in style.texts(figure) if text not in seen], renderer)


def _place_label(axis, ticks):
    """Move the axis' label to where it is drawn: the layout has moved the axes since."""
    ax, pad = axis.axes, axis.labelpad * axis.axes.figure.dpi / 72
    if axis.get_label_position() == "bottom":
        axis.label.set_y(min([ax.bbox.y0, *(box.y0 for box in ticks)]) - pad)
    elif axis.get_label_position() == "left":
        axis.label.set_x(min([ax.bbox.x0, *(box.x0 for box in ticks)]) - pad)


def _boxes(found, renderer):
    for text in found:
        if text.get_visible() and text.get_text().strip():
            box = Text.get_window_extent(text, renderer)  # an annotation's without the arrow
            yield text.get_text(), box
