# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import multiprocessing
import shutil
import stat
import time
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from kimi_k3.journal.models import SUPERVISOR_FILE, Notice, Record, rank_file
from kimi_k3.journal.reader import Journal, read_journal
from kimi_k3.journal.writer import PatientWriter, write_record

from .records import rank, supervisor

SIZES = (1, 2000)


def _keep_writing(directory: Path, stop: Event) -> None:
    turn = 0
    while not stop.is_set():
        turn += 1
        notices = (Notice(check="x", what="x" * 50, remedy=""),) * SIZES[turn % 2]
        write_record(directory, SUPERVISOR_FILE, supervisor(notices=notices))
        write_record(directory, rank_file(0), rank(0, pid=turn))


def _has_seen_changes(seen: list[Journal]) -> bool:
    told = {len(journal.supervisor.notices) for journal in seen if journal.supervisor}
    return told >= set(SIZES) and len({journal.ranks for journal in seen}) > 1


def test_reader_never_sees_a_part(tmp_path: Path) -> None:
    """A reader that polls while another process writes records of changing size sees whole ones only.

    A thread would not do: it and its reader take turns, and all two hundred reads may meet the same record.
    """
    write_record(tmp_path, SUPERVISOR_FILE, supervisor())
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    writer = context.Process(target=_keep_writing, args=(tmp_path, stop))
    writer.start()
    seen: list[Journal] = []
    end = time.monotonic() + 60
    try:
        while len(seen) < 200 or (not _has_seen_changes(seen) and time.monotonic() < end):
            seen.append(read_journal(tmp_path))
    finally:
        stop.set()
        writer.join()
    assert [journal.faults for journal in seen if journal.faults] == []
    assert _has_seen_changes(seen)
    assert writer.exitcode == 0


def test_other_users_may_read(tmp_path: Path) -> None:
    """The sidecar may run as another user than the engine."""
    write_record(tmp_path, SUPERVISOR_FILE, supervisor())
    assert stat.S_IMODE((tmp_path / SUPERVISOR_FILE).stat().st_mode) == 0o644


def test_failed_write_leaves_nothing_behind(tmp_path: Path) -> None:
    """A directory that cannot be written must not fill up with temporary files."""
    (tmp_path / SUPERVISOR_FILE).mkdir()
    with pytest.raises(OSError, match="directory"):
        write_record(tmp_path, SUPERVISOR_FILE, supervisor())
    assert [path.name for path in tmp_path.iterdir()] == [SUPERVISOR_FILE]


def test_failed_encoding_keeps_the_old_record(tmp_path: Path) -> None:
    """Text that cannot be written is a defect of the caller; the last good record stays."""
    write_record(tmp_path, SUPERVISOR_FILE, supervisor())
    odd: Record = supervisor().model_copy(update={"profile": "\ud800"})
    with pytest.raises(ValueError, match="surrogate"):
        write_record(tmp_path, SUPERVISOR_FILE, odd)
    assert read_journal(tmp_path).supervisor == supervisor()
    assert len(list(tmp_path.iterdir())) == 1


def test_patience_with_a_directory_that_is_gone(tmp_path: Path) -> None:
    """The engine goes on serving; its log tells once that it broke and once that it healed."""
    directory = tmp_path / "state"
    directory.mkdir()
    reports: list[str] = []
    writer = PatientWriter(directory, SUPERVISOR_FILE, report=reports.append)
    assert writer.write(supervisor())
    shutil.rmtree(directory)
    assert [writer.write(supervisor()) for _ in range(3)] == [False] * 3
    assert len(reports) == 1
    assert "No such file or directory" in reports[0]
    assert "serving goes on" in reports[0]
    directory.mkdir()
    assert writer.write(supervisor())
    assert writer.write(supervisor())
    assert len(reports) == 2
    assert "works again" in reports[1]
    assert read_journal(directory).supervisor == supervisor()


def test_patience_with_a_file_in_place_of_the_directory(tmp_path: Path) -> None:
    """A second breakdown is reported again."""
    directory = tmp_path / "state"
    directory.touch()
    reports: list[str] = []
    writer = PatientWriter(directory, rank_file(0), report=reports.append)
    assert not writer.write(rank(0))
    directory.unlink()
    directory.mkdir()
    assert writer.write(rank(0))
    shutil.rmtree(directory)
    assert not writer.write(rank(0))
    assert ["cannot write" in report for report in reports] == [True, False, True]
