# SPDX-License-Identifier: Apache-2.0
"""Progress and reports for people: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from kimi_k3.kernels.entry import CACHE
from kimi_k3.kernels.report import BuildReport, CheckReport, KernelReport, Presence
from kimi_k3.kernels.transcript import Failure, Transcript
from kimi_k3.words.text import printable

ORDER = (Presence.PRESENT, Presence.UNKNOWN, Presence.MISSING)
COLOURS = {Presence.PRESENT: "green", Presence.UNKNOWN: "yellow", Presence.MISSING: "bold red"}


@contextlib.contextmanager
def progress(what: str) -> Iterator[Callable[[Transcript], None]]:
    """Shows how far AITER is, on standard error."""
    if not sys.stderr.isatty():
        yield lambda transcript: print(
            f"{what}: {transcript.done} of {transcript.total} done", file=sys.stderr, flush=True
        )
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda transcript: bar.update(task, completed=transcript.done, total=transcript.total)


def print_build(report: BuildReport, failures: Sequence[Failure]) -> None:
    """One line per failure, then what is there and how a start finds it."""
    console = _notes(report.notes)
    for failure in failures:
        console.print(Text.assemble(("failed  ", "bold red"), printable(str(failure))))
    if failures:
        count = "1 failure" if len(failures) == 1 else f"{len(failures)} failures"
        console.print(Text(f"{count}; AITER's whole output: {printable(report.log)}", style="bold red"))
    else:
        kernels = f"{report.kernels} kernels for {report.rows} shapes, in {report.seconds:.0f} s"
        console.print(Text(f"built {kernels}", style="green"))
    console.print(Text(f"for a start: {CACHE}={printable(report.directory)}"))


def print_check(report: CheckReport) -> None:
    """One line per kernel, the worst last."""
    console = _notes(report.notes)
    for kernel in sorted(report.kernels, key=lambda one: ORDER.index(one.state)):
        console.print(_line(kernel))
    counts = [(sum(one.state is state for one in report.kernels), state) for state in reversed(ORDER)]
    told = ", ".join(f"{count} {state}" for count, state in counts if count)
    console.print(
        Text(
            f"kernels of profile {report.profile} for AITER {report.aiter}: {told}, in "
            f"{printable(report.directory)}",
            style=COLOURS[report.state],
        )
    )


def _line(kernel: KernelReport) -> Text:
    shape = kernel.shape
    tokens = ",".join(map(str, kernel.tokens))
    where = f"model_dim={shape.model_dim} inter_dim={shape.inter_dim} E={shape.experts} topk={shape.topk}"
    text = Text.assemble(
        (f"{kernel.state:<8}", COLOURS[kernel.state]), (kernel.kernel, "bold"), f" {where} tokens={tokens}"
    )
    return text if kernel.why is None else text.append(f": {printable(kernel.why)}")


def _notes(notes: Sequence[str]) -> Console:
    console = Console(soft_wrap=True)
    for note in notes:
        console.print(Text(f"note    {printable(note)}"))
    return console
