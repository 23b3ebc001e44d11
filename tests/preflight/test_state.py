# SPDX-License-Identifier: Apache-2.0
"""The state directory, looked at and not touched."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kimi_k3.errors import ExitCode
from kimi_k3.preflight.finding import Finding, State
from kimi_k3.preflight.machine import Machine
from kimi_k3.preflight.state import LOCK_FILE, look_at_state_dir
from kimi_k3.supervisor.lock import hold_lock


def look(directory: Path) -> Finding:
    return look_at_state_dir(Machine(), directory)


def test_one_that_is_not_there_yet(tmp_path: Path) -> None:
    """The first start will make it; the look does not."""
    assert look(tmp_path / "a" / "b").state is State.PASS
    assert list(tmp_path.iterdir()) == []


def test_one_that_is_there(tmp_path: Path) -> None:
    """Nothing is written, whether or not a start was there before."""
    assert look(tmp_path).state is State.PASS
    assert list(tmp_path.iterdir()) == []
    with hold_lock(tmp_path):
        pass
    assert look(tmp_path).state is State.PASS
    assert [file.name for file in tmp_path.iterdir()] == [LOCK_FILE]


def test_one_of_a_running_start(tmp_path: Path) -> None:
    """In the words, and with the exit code, of the start that would be refused; its lock stays."""
    with hold_lock(tmp_path):
        for _ in range(2):
            finding = look(tmp_path)
            assert finding.state is State.FAIL
            assert (
                finding.what
                == f"state directory {tmp_path}: in use by another supervisor (pid {os.getpid()})"
            )
            assert finding.exit_code is ExitCode.IN_USE


@pytest.mark.parametrize("below", ["", "state", "a/b"])
def test_a_file_in_its_place(tmp_path: Path, below: str) -> None:
    """At any height; root cannot make a directory there either."""
    (tmp_path / "file").write_text("")
    finding = look(tmp_path / "file" / below)
    assert (finding.state, finding.exit_code) == (State.FAIL, ExitCode.STATE)
    assert f"{tmp_path}/file is not a directory" in finding.what


def test_one_that_this_user_cannot_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked of the kernel, which knows modes, lists and read-only mounts; it lets root do anything."""
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    for directory in (tmp_path, tmp_path / "state"):
        finding = look(directory)
        assert finding.state is State.FAIL
        assert f"user {os.geteuid()} cannot write {tmp_path}" in finding.what
        assert finding.remedy == "give a writable directory with --state-dir or KIMI_K3_STATE_DIR"


def test_a_lock_that_cannot_be_opened(tmp_path: Path) -> None:
    """A start could not take it."""
    (tmp_path / LOCK_FILE).mkdir()
    finding = look(tmp_path)
    assert finding.state is State.FAIL
    assert f"cannot open {LOCK_FILE}: Is a directory" in finding.what
