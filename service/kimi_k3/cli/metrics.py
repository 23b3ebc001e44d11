# SPDX-License-Identifier: Apache-2.0
"""``kimi-k3 metrics``."""

from __future__ import annotations

from kimi_k3.cli.groups import group
from kimi_k3.cli.options import AsJson

app = group("What the sidecar tells Prometheus.")

_UNWRAPPED = 1000
"""Columns where no terminal wraps the lines, so that they can be searched."""


@app.callback()
def metrics() -> None:
    """What the sidecar tells Prometheus."""


@app.command("list")
def list_metrics(as_json: AsJson = False) -> None:
    """Print the name, type, labels and meaning of each metric at /metrics."""
    from kimi_k3.sidecar.metrics_document import metrics_json, metrics_table

    if as_json:
        print(metrics_json())
        return
    from rich.console import Console
    from rich.table import Column, Table

    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, width=_UNWRAPPED)
    table = Table(Column("name", no_wrap=True), "type", "labels", "what it is", box=None, pad_edge=False)
    for row in metrics_table():
        table.add_row(*row)
    console.print(table)
