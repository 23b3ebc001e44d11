# SPDX-License-Identifier: Apache-2.0
"""A report for people: one line per finding, the worst last, where a terminal stands when it is done."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from kimi_k3.preflight.finding import Finding, Report, State

ORDER = (State.PASS, State.UNKNOWN, State.WARN, State.FAIL)
COLOURS = {State.PASS: "green", State.UNKNOWN: "yellow", State.WARN: "yellow", State.FAIL: "bold red"}


def print_report(report: Report) -> None:
    """Write a report to the terminal, or as plain lines into a pipe."""
    console = Console()
    for finding in sorted(report.findings, key=lambda one: ORDER.index(one.state)):
        console.print(line(finding), soft_wrap=True)
    console.print(Text(summary(report)), style=COLOURS[report.state], soft_wrap=True)


def line(finding: Finding) -> Text:
    """One finding."""
    text = Text()
    text.append(f"{finding.state:<8}", style=COLOURS[finding.state])
    text.append(f"{finding.check}: ", style="bold")
    text.append(finding.what)
    if finding.remedy is not None:
        text.append(f"; {finding.remedy}")
    return text


def summary(report: Report) -> str:
    """How many came out how."""
    counts = [(sum(one.state is state for one in report.findings), state) for state in reversed(ORDER)]
    told = ", ".join(f"{count} {state}" for count, state in counts if count)
    return f"preflight of profile {report.profile}: {told}, in {report.seconds:.1f} s"
