# SPDX-License-Identifier: Apache-2.0
"""``docs/metrics.md`` and ``kimi-k3 metrics list`` say what ``/metrics`` gives."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kimi_k3.cli import run
from kimi_k3.sidecar.metrics import METRICS
from kimi_k3.sidecar.metrics_document import metrics_document

DOCUMENT = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_the_document_is_that_of_the_metrics() -> None:
    """A table kept by hand would drift from what is scraped."""
    made = "run `python -m kimi_k3.sidecar.metrics_document docs/metrics.md`"
    assert DOCUMENT.read_text(encoding="utf-8") == metrics_document(), made


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    """One line for each metric where no terminal wraps them, so that grep finds the whole."""
    assert run(["metrics", "list"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["name", "type", "labels", "what", "it", "is"]
    assert [line.split()[0] for line in lines] == [metric.name for metric in METRICS]
    assert all(metric.help in line for metric, line in zip(METRICS, lines, strict=True))


def test_list_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    """Dashboards and alert rules are checked against it."""
    assert run(["metrics", "list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in listed] == [metric.name for metric in METRICS]
    assert set(listed[0]) == {"name", "kind", "help", "labels"}
