# SPDX-License-Identifier: Apache-2.0
"""The message that Kubernetes shows for a container that ended."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path

import pytest

from kimi_k3.journal.models import Ending, Explanation
from kimi_k3.supervisor.termination import MAX_BYTES, termination_message, write_termination_message

KNOWN = Explanation(name="a-row", cause="c", remedy="r", line=7, text="LLVM ERROR")


def ending(reason: str = "vLLM failed; mend it") -> Ending:
    return Ending(at=datetime.now(UTC), exit_code=7, reason=reason, explanation=KNOWN)


def test_the_message_has_the_reason_and_the_line(tmp_path: Path) -> None:
    """It replaces what an earlier container left."""
    path = tmp_path / "termination-log"
    path.write_text("x" * 5000)
    write_termination_message(ending(), path)
    assert path.read_text() == "vLLM failed; mend it\nknown failure: a-row\nline 7: LLVM ERROR"


@pytest.mark.parametrize("letter", ["x", "é", "☃", "\udcff"])
def test_the_message_is_bounded(letter: str) -> None:
    """Kubernetes drops what is longer, and half a character is no text."""
    text = termination_message(ending("y" + letter * 9000))
    assert MAX_BYTES - 4 < len(text.encode()) <= MAX_BYTES


def test_it_is_not_made_and_never_fails(tmp_path: Path) -> None:
    """Outside of Kubernetes there is no such file, and a start's end must not hang on it."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "read-only").touch(mode=0o400)
    for path in (tmp_path / "none", tmp_path, tmp_path / "fifo", tmp_path / "read-only", Path("/dev/full")):
        write_termination_message(ending(), path)
    assert not (tmp_path / "none").exists()
