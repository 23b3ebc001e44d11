# SPDX-License-Identifier: Apache-2.0
"""The runbook: a section for each alert, and commands that exist."""

from __future__ import annotations

import re
import shlex

import pytest

from kimi_k3.cli import run
from tests.observability.alerting import FILE, GPU_FILE, alerts
from tests.observability.expressions import ROOT

RUNBOOK = (ROOT / "docs" / "runbook.md").read_text()
SECTIONS = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", RUNBOOK, re.MULTILINE | re.DOTALL))
BLOCKS = "".join(re.findall(r"```sh\n(.*?)```", RUNBOOK, re.DOTALL))
COMMANDS = sorted(set(re.findall(r"\bkimi-k3 (.+)", BLOCKS)))


def test_each_alert_has_its_section() -> None:
    """An alert's link leads to it, and a section without an alert is read by nobody."""
    assert sorted(re.findall(r"^## (.*)$", RUNBOOK, re.MULTILINE)) == sorted(alerts(FILE, GPU_FILE))


@pytest.mark.parametrize("alert", SECTIONS)
def test_what_a_section_holds(alert: str) -> None:
    """What it means, three commands, and causes or what to do."""
    before, commands, after = re.split(r"```sh\n|```\n", SECTIONS[alert])
    assert len(before.split()) > 8
    assert len(commands.strip().splitlines()) == 3
    assert len(after.split()) > 12


@pytest.mark.parametrize("line", COMMANDS)
def test_commands(line: str) -> None:
    """A command of ours that is not there any more costs minutes that nobody has then."""
    # Options are parsed before help is printed.
    assert run([*shlex.split(line), "--help"]) == 0


def test_that_there_are_commands() -> None:
    """The pattern above meets those of the text."""
    assert "watch --once" in COMMANDS
    assert len(COMMANDS) >= 5
