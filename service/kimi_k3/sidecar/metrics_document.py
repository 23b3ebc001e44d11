# SPDX-License-Identifier: Apache-2.0
"""The metrics as a table: for the terminal, for programs, and as ``docs/metrics.md``.

``python -m kimi_k3.sidecar.metrics_document docs/metrics.md`` makes the document.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from kimi_k3.sidecar.metrics import METRICS, Metric

_ABOUT = """\
<!-- Made by `python -m kimi_k3.sidecar.metrics_document docs/metrics.md` from sidecar/metrics.py. -->
# Metrics

What the sidecar answers at `/metrics`; `kimi-k3 metrics list [--json]` prints the same table. They are the
sidecar's own: vLLM's stand at the engine's port.

* A series whose value nobody measured is absent, never 0. Where 0 is known it stands from the beginning:
  every code of a warning, every phase, every rank and layer that is to be converted.
* Sizes are bytes, times seconds, moments seconds since 1970, ratios parts of a whole.
* `kimi_k3_phase` is a state set: one series for each phase, of which one is 1. Scrapers that ask for
  OpenMetrics get state sets and infos as such, others as gauges.
* No label grows with time. Which start it is, `kimi_k3_start_timestamp_seconds` tells.
* At Kimi-K3's scale (8 ranks, 96 layers with experts) they are about 1,500 series, of which 1,344 are the
  conversion's, by layer and projection over all ranks. Rank by rank, `/conversion` tells.
* Beside them stand `process_*` of the sidecar itself: processor, memory, open files.

| name | type | labels | what it is |
|---|---|---|---|
"""


def metrics_json() -> str:
    """All metrics as JSON: a list of name, kind, help and labels."""
    return json.dumps([asdict(metric) for metric in METRICS], indent=1)


def metrics_table(metrics: Sequence[Metric] = METRICS) -> list[tuple[str, str, str, str]]:
    """Name, type, labels and help of each, in the order of the table."""
    return [(metric.name, metric.kind, ", ".join(metric.labels), metric.help) for metric in metrics]


def metrics_document() -> str:
    """The whole document, as it must stand in ``docs/metrics.md``."""
    rows = []
    for name, kind, labels, text in metrics_table():
        named = ", ".join(f"`{label}`" for label in labels.split(", ") if label)
        rows.append(f"| `{name}` | {kind} | {named} | {_escaped(text)} |")
    return _ABOUT + "\n".join(rows) + "\n"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(metrics_document(), encoding="utf-8")
