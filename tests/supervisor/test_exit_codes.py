# SPDX-License-Identifier: Apache-2.0
"""The documented exit codes are those of the code."""

from __future__ import annotations

import re
import signal
from pathlib import Path

from kimi_k3.errors import ExitCode
from kimi_k3.supervisor.signals import HANDLED

DOCUMENT = Path(__file__).parents[2] / "docs" / "architecture.md"
ROW = re.compile(r"^\| ([0-9, ]+) \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)


def test_the_table_has_every_code_once() -> None:
    """Orchestrators are configured by it: a code without a row, or a row without a code, misleads them."""
    section = DOCUMENT.read_text().split("## Exit codes of `kimi-k3`")[1]
    codes = [int(code) for row in ROW.findall(section) for code in row[0].split(",")]
    signals = {128 + number for number in (*HANDLED, signal.SIGKILL)}
    assert sorted(codes) == sorted({*map(int, ExitCode), *signals})
