# SPDX-License-Identifier: Apache-2.0
"""Curves as SVG, drawn by matplotlib without a screen."""

from __future__ import annotations

import io
from collections.abc import Sequence

from matplotlib import rc_context
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from kimi_k3.verify.results import Curve


def plots(curves: Sequence[Curve]) -> list[tuple[str, str]]:
    """A title and an ``<svg>`` for each plot, in the order in which the curves name them."""
    titles = list(dict.fromkeys(curve.plot for curve in curves))
    return [(title, _drawn([curve for curve in curves if curve.plot == title])) for title in titles]


def _drawn(curves: Sequence[Curve]) -> str:
    # Text stays text, and the same curves give the same bytes.
    with rc_context(
        {"svg.fonttype": "none", "svg.hashsalt": "kimi-k3", "axes.grid": True, "grid.alpha": 0.3}
    ):
        figure = Figure(figsize=(8, 4), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        for curve in curves:
            style = "-" if len(curve.x) > 20 else "o-"
            axes.errorbar(curve.x, curve.y, yerr=curve.error, fmt=style, capsize=3, label=curve.name)
        axes.set_xlabel(curves[0].x_label)
        axes.set_ylabel(curves[0].y_label)
        if any(curve.logarithmic for curve in curves):
            axes.set_yscale("log")
        axes.legend()
        stream = io.StringIO()
        figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
    text = stream.getvalue()
    return text[text.index("<svg") :]
