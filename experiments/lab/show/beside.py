"""One experiment's figure of a GPU beside that of the pages' GPU."""

import io
from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from . import style

DPI = 110


def png(figures: Mapping[str, Figure]) -> bytes:
    """The figures side by side under their names, as they are saved. Logarithmic axes that
    correspond show the same range; others, as of speeds, have their own.
    """
    for panels in zip(*(figure.axes for figure in figures.values()), strict=False):
        for axis in "xy":
            _share(axis, panels)
    with rc_context(style.RC):
        images = {name: _image(figure) for name, figure in figures.items()}
        height = max(image.shape[0] for image in images.values())
        width = sum(image.shape[1] for image in images.values())
        whole = Figure(figsize=(width / DPI, height / DPI + 0.4))
        left = 0.0
        for name, image in images.items():
            share = image.shape[1] / width
            ax = whole.add_axes((left, 0.0, share, height / (height + 0.4 * DPI)), label=name)
            ax.imshow(image, interpolation="none")
            ax.set_title(name)
            ax.set_axis_off()
            left += share
        data = io.BytesIO()
        whole.savefig(data, format="png", dpi=DPI, metadata={"Software": None})
    return data.getvalue()


def _share(axis: str, panels: tuple[Any, ...]) -> None:
    if all(getattr(ax, f"get_{axis}scale")() == "log" for ax in panels):
        limits = [getattr(ax, f"get_{axis}lim")() for ax in panels]
        least, most = min(map(min, limits)), max(map(max, limits))
        for ax in panels:
            getattr(ax, f"set_{axis}lim")(least, most)


def _image(figure: Figure) -> np.ndarray:
    figure.set_dpi(DPI)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba()).copy()
