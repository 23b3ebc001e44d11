# SPDX-License-Identifier: Apache-2.0
"""Following AITER's entry: what it prints, and that none of it is lost."""

from __future__ import annotations

import os
import selectors
from pathlib import Path

import pytest

from kimi_k3.kernels import entry
from tests.surroundings import SURROUNDINGS


def test_what_it_prints_last_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between a look at the pipe and one at the process it may say how all ended, and end.

    A run without its last lines is taken for one that failed. Here no look at the pipe comes before the end.
    """
    (tmp_path / "chatter.py").write_text("print(*range(9_000), sep='\\n')")
    monkeypatch.setattr(entry, "ENTRY_MODULE", "chatter")
    monkeypatch.setattr(selectors.DefaultSelector, "select", lambda *_: [])
    lines: list[str] = []
    environment = SURROUNDINGS | {"PYTHONPATH": os.fspath(tmp_path)}
    code = entry.run_entry([], environment, directory=tmp_path, tell=lines.append, pause=lambda _: True)
    assert code == 0
    assert lines[-1] == "8999"
