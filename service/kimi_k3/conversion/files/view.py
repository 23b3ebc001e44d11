# SPDX-License-Identifier: Apache-2.0
"""A report for people, and how far it is: tables and a bar on a terminal, else plain lines."""

from __future__ import annotations

import contextlib
import sys
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from kimi_k3.checkpoint.view import GIB, MIB, size
from kimi_k3.words.text import printable
from kimi_k3.words.weights import ScaleRule

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from kimi_k3.conversion.files.models import ProjectionReport, Report, WorstExpert
    from kimi_k3.words.weights import Requantisation

COLUMNS = {
    "layer": "layer",
    "projection": "proj-\nection",
    "relative MSE": "relative\nMSE",
    "max error": "max\nerror",
    "lossless %": "loss-\nless\n%",
    "zero %": "zero\n%",
    "nonfinite %": "non-\nfinite\n%",
    "clamped %": "clam-\nped\n%",
    "int4 size": "int4\nsize",
    "worst expert": "worst\nexpert",
}
"""What a row says; on a terminal in several lines, so that 80 columns are enough."""


class Watch(Protocol):
    """Is told how far a report is."""

    def advance(self, nbytes: int) -> None:
        """So many bytes more are converted."""

    def layer_done(self, parts: Sequence[ProjectionReport]) -> None:
        """A layer is finished; ``parts`` are its projections."""


@contextlib.contextmanager
def watching(nbytes: int, *, layers: int) -> Iterator[Watch]:
    """Show progress on standard error: a bar, or one line per layer if it is no terminal.

    Args:
        nbytes: to convert.
        layers: to finish.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Lines(nbytes, layers)
        return
    with Progress(
        TextColumn("{task.fields[done]} of {task.fields[layers]} layers"),
        BarColumn(bar_width=None),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
    ) as progress:
        yield _Bar(progress, nbytes, layers)


class _Bar:
    def __init__(self, progress: Progress, nbytes: int, layers: int) -> None:
        self._progress = progress
        self._done = 0
        self._task = progress.add_task("", total=nbytes, done=0, layers=layers)

    def advance(self, nbytes: int) -> None:
        self._progress.advance(self._task, nbytes)

    def layer_done(self, parts: Sequence[ProjectionReport]) -> None:
        self._done += 1
        self._progress.update(self._task, done=self._done)


class _Lines:
    def __init__(self, nbytes: int, layers: int) -> None:
        self._nbytes, self._layers = nbytes, layers
        self._converted = self._done = 0
        self._begun = time.monotonic()

    def advance(self, nbytes: int) -> None:
        self._converted += nbytes

    def layer_done(self, parts: Sequence[ProjectionReport]) -> None:
        self._done += 1
        errors = ", ".join(f"{part.projection} {_figure(part.loss.relative_mse)}" for part in parts)
        print(
            f"kimi-k3: layer {parts[0].layer} ({self._done} of {self._layers}): relative MSE {errors}"
            f"{self._speed()}",
            file=sys.stderr,
            flush=True,
        )

    def _speed(self) -> str:
        """Nothing yet if all that is finished comes from an earlier run."""
        seconds = time.monotonic() - self._begun
        if not self._converted or not seconds:
            return ""
        left = timedelta(seconds=round((self._nbytes - self._converted) * seconds / self._converted))
        return f"; {decimal(int(self._converted / seconds))}/s, {left} left"


def print_report(checkpoint: Path, report: Report) -> None:
    """Print the totals and one row per projection; all of it is written when this returns."""
    console = Console()
    summary, details = list(rows(checkpoint, report)), [cells(part) for part in report.projections]
    if console.is_terminal:
        _print_tables(console, summary, details)
    else:
        for name, value in summary:
            print(f"{name}: {value}")
        print()
        for line in aligned([tuple(COLUMNS), *details]):
            print(line)
    sys.stdout.flush()


def rows(checkpoint: Path, report: Report) -> Iterator[tuple[str, str]]:
    """The totals, as pairs of a name and a value; foreign text in it is printable."""
    loss = report.total
    yield "checkpoint", printable(str(checkpoint))
    yield "rule", _rule(report.requantisation)
    yield "layers", ranges(report.layers)
    yield "groups", f"{loss.groups:,}"
    parts = ", ".join(f"{name} {_figure(part.relative_mse)}" for name, part in report.totals.items())
    yield "relative MSE", f"{_figure(loss.relative_mse)} ({parts})"
    yield "max error", _figure(loss.max_error)
    for name, count in (
        ("lossless", loss.lossless_groups),
        ("zero", loss.zero_groups),
        ("nonfinite", loss.nonfinite_groups),
        ("clamped", loss.clamped_groups),
    ):
        yield f"{name} groups", f"{count:,} ({percent(count, loss.groups)} %)"
    yield "bytes in MXFP4", size(report.bytes_mxfp4)
    yield "bytes in int4", size(report.bytes_int4)
    yield "worst expert", _worst(report.worst_expert)


def cells(part: ProjectionReport) -> tuple[str, ...]:
    """One projection, in the order of :data:`COLUMNS`."""
    loss, worst = part.loss, part.worst_expert
    return (
        str(part.layer),
        part.projection,
        _figure(loss.relative_mse),
        f"{loss.max_error:#.3g}",
        percent(loss.lossless_groups, loss.groups),
        percent(loss.zero_groups, loss.groups),
        percent(loss.nonfinite_groups, loss.groups),
        percent(loss.clamped_groups, loss.groups),
        f"{part.bytes_int4 / GIB:.2f} GiB" if part.bytes_int4 >= GIB else f"{part.bytes_int4 / MIB:.2f} MiB",
        "none" if worst is None else f"{worst.expert} ({_figure(worst.relative_mse)})",
    )


def percent(count: int, whole: int) -> str:
    """Three digits; never 0 for what is there, nor 100 for what is not all."""
    if 0 < count < whole:
        share = 100 * count / whole
        return "<0.001" if share < 0.001 else f"{min(share, 99.9):#.3g}"
    return "100" if count else "0"


def aligned(table: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines whose columns stand below each other, to the right."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        yield "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))


def ranges(layers: Sequence[int]) -> str:
    """``0-3,7`` for 0, 1, 2, 3, 7."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and runs[-1][-1] == layer - 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _print_tables(
    console: Console, summary: Sequence[tuple[str, str]], details: Sequence[Sequence[str]]
) -> None:
    table = Table(show_header=False)
    for name, value in summary:
        # Text: a path may hold what rich would take for markup.
        table.add_row(Text(name), Text(value))
    console.print(table)
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    for header in COLUMNS.values():
        table.add_column(header, justify="right", no_wrap=True)
    for row in details:
        table.add_row(*row)
    console.print(table)


def _rule(asked: Requantisation) -> str:
    if asked.rule is ScaleRule.AMAX:
        return asked.rule
    return f"{asked.rule} ({'scales of both signs' if asked.negative_scale else 'positive scales only'})"


def _worst(worst: WorstExpert | None) -> str:
    if worst is None:
        return "none, every weight is zero"
    return (
        f"layer {worst.layer}, {worst.projection}, expert {worst.expert} "
        f"(relative MSE {_figure(worst.relative_mse)})"
    )


def _figure(value: float | None) -> str:
    return "none" if value is None else f"{value:#.4g}"
