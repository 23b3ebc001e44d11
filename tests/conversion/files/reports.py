# SPDX-License-Identifier: Apache-2.0
"""A report as the command writes it."""

from __future__ import annotations

from pathlib import Path

from kimi_k3.cli import run
from kimi_k3.conversion.files.models import Report

LAYERS = 7
"""Of the tiny checkpoint those with experts, 1 to 7, each with two projections."""


def reported(checkpoint: Path, json_file: Path, *flags: str) -> Report:
    """The report that the command writes."""
    assert run(["convert-report", str(checkpoint), "--json", str(json_file), *flags]) == 0
    return Report.model_validate_json(json_file.read_text())
