# SPDX-License-Identifier: Apache-2.0
"""One report, as HTML and as Markdown, made from every result in a directory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from kimi_k3 import __version__
from kimi_k3.errors import OperatorError
from kimi_k3.files import write_whole
from kimi_k3.verify.keeping import read_results
from kimi_k3.verify.results import Curve, Figure, Kind, Result, Setting
from kimi_k3.verify.validation import validation

FILES = ("report.html", "report.md")
MOST_DIGITS = 12
"""After the point: there a double of about one ends."""


def write_report(directory: Path, moment: datetime) -> Path:
    """Write both files anew; returns the HTML one.

    Raises:
        OperatorError: a result cannot be read, there is none, or the directory takes no file.
    """
    results = read_results(directory)
    if not results:
        raise OperatorError(
            f"{directory}: holds no result",
            remedy="run kimi-k3 verify accuracy, bench, long, gsm8k or kernel with this --out first",
        )
    for name in FILES:
        _write(directory / name, rendered(results, name, moment))
    return directory / FILES[0]


def rendered(results: Sequence[Result], name: str, moment: datetime) -> str:
    """The text of one file; pure.

    Args:
        results: at least one.
        name: of :data:`FILES`.
        moment: when the report is made.
    """
    markdown = name.endswith(".md")
    environment = Environment(
        loader=PackageLoader("kimi_k3.verify", "templates"),
        autoescape=not markdown,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=not markdown,
    )
    environment.filters |= {
        "cell": _cell,
        "interval": _interval,
        "moment": lambda value: f"{value:%Y-%m-%d %H:%M} UTC",
        "number": _number,
        "published": _published,
        "settings": _settings,
        "took": _took,
        "versions": lambda found: ", ".join(f"{key} {value}" for key, value in found.items()) or "unknown",
    }
    return environment.get_template(f"{name}.j2").render(
        results={result.kind.value: result for result in results},
        kinds=[kind.value for kind in Kind],
        validated=validation(results),
        subject=next((one.subject for one in results if one.subject.model), results[0].subject),
        plots={
            result.kind.value: [(title, Markup(svg)) for title, svg in _plots(result.curves)]
            for result in ([] if markdown else results)
        },
        made=f"{moment:%Y-%m-%d %H:%M} UTC",
        version=__version__,
    )


def _plots(curves: Sequence[Curve]) -> list[tuple[str, str]]:
    """None where matplotlib is not installed, as in an image that serves: the tables say the same."""
    try:
        from kimi_k3.verify.plots import plots
    except ImportError:
        return []
    return plots(curves)


def _number(value: float | None, error: float | None = None) -> str:
    """Four digits that count, a whole number whole; nothing for what is unknown.

    Args:
        error: standard error: two digits of it count, too, so that 1.0000034 and 1.0000051 differ.
    """
    if value is None:
        return ""
    if value and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.3e}"
    if value == round(value):
        return f"{value:.0f}"
    digits = max(0, 3 - math.floor(math.log10(abs(value))))
    if error:
        digits = max(digits, 1 - math.floor(math.log10(error)))
    return f"{value:.{min(digits, MOST_DIGITS)}f}"


def _interval(figure: Figure) -> str:
    if figure.low is None or figure.high is None:
        return ""
    low, high = (_number(end, figure.standard_error) for end in (figure.low, figure.high))
    return f"{low} to {high}"


def _published(figure: Figure) -> str:
    if figure.published is None:
        return ""
    return f"{_number(figure.published)} ({figure.source})" if figure.source else _number(figure.published)


def _settings(settings: Mapping[str, Setting]) -> str:
    told = (f"{name} {value}" for name, value in settings.items() if value is not None)
    return ", ".join(told) or "no settings"


def _took(result: Result) -> str:
    return "" if result.ended is None else f"{(result.ended - result.began).total_seconds():.0f} s"


def _cell(text: str) -> str:
    """For a cell of a Markdown table."""
    return " ".join(text.split()).replace("|", "\\|")


def _write(path: Path, text: str) -> None:
    try:
        write_whole(path, text.encode())
    except OSError as error:
        raise OperatorError(
            f"--out {path.parent}: cannot write {path.name}: {error.strerror or error}",
            remedy="give a writable directory with --out",
        ) from None
