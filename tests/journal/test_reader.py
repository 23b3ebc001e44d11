# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import pytest

from kimi_k3.journal.models import SUPERVISOR_FILE, Record, failure_file, rank_file
from kimi_k3.journal.reader import (
    MAX_FAULT_CHARACTERS,
    MAX_RECORD_BYTES,
    Fault,
    JournalReader,
    read_journal,
)
from kimi_k3.journal.writer import write_record

from .records import failure, rank, supervisor


def write(directory: Path, **records: Record) -> None:
    """Write records; the keyword is the file's name without .json, with _ for -."""
    for name, record in records.items():
        write_record(directory, name.replace("_", "-") + ".json", record)


def only_fault(directory: Path) -> Fault:
    """The one fault of the directory."""
    [fault] = read_journal(directory).faults
    return fault


def test_whole_start(tmp_path: Path) -> None:
    """What was written is what is read, ranks in order."""
    write_record(tmp_path, SUPERVISOR_FILE, supervisor(world_size=11))
    for number in (10, 2):
        write_record(tmp_path, rank_file(number), rank(number))
    write_record(tmp_path, failure_file(7), failure(7))
    journal = read_journal(tmp_path)
    assert journal.supervisor == supervisor(world_size=11)
    assert journal.ranks == (rank(2), rank(10))
    assert journal.failures == (failure(7),)
    assert journal.faults == ()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, None),
        ({"f_bavail": 10}, "has no room"),
        ({"f_files": 100, "f_favail": 0}, "has no room"),
        ({"f_files": 0, "f_favail": 0}, None),
        ({"f_flag": os.ST_RDONLY | os.ST_NOSUID, "f_bavail": 0}, "is read-only"),
    ],
)
def test_a_directory_without_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, int], why: str | None
) -> None:
    """An old record in one is no sign that its writer is gone; and what changes there is no other journal."""
    values = {"f_bavail": 1000, "f_frsize": 4096, "f_files": 100, "f_favail": 50, "f_flag": 0} | changes
    reader = JournalReader(tmp_path)
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(**values))
    first = reader.read()
    assert first.unwritable == why
    values |= {"f_bavail": 1000, "f_files": 100, "f_favail": 50, "f_flag": 0}
    assert reader.read().unwritable is None
    assert (reader.read() is first) is (why is None)


def test_read_again(tmp_path: Path) -> None:
    """What did not change is the same object, by which readers tell that there is nothing to do."""
    write_record(tmp_path, SUPERVISOR_FILE, supervisor(world_size=2))
    write_record(tmp_path, rank_file(0), rank(0))
    write_record(tmp_path, failure_file(1), failure(1))
    (tmp_path / rank_file(1)).write_text("{}")
    reader = JournalReader(tmp_path)
    first = reader.read()
    assert reader.read() is first
    write_record(tmp_path, SUPERVISOR_FILE, supervisor(world_size=2))
    second = reader.read()
    assert second is not first
    assert second.ranks is first.ranks
    (tmp_path / rank_file(1)).unlink()
    assert reader.read().faults == ()


def test_nothing_there(tmp_path: Path) -> None:
    """A directory that does not exist yet is an empty journal."""
    journal = read_journal(tmp_path / "none")
    assert (journal.supervisor, journal.ranks, journal.failures, journal.faults) == (None, (), (), ())


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "the file: Invalid JSON"),
        (b'{"schema_version": 1, "start', "the file: Invalid JSON"),
        (b"\xff\xfe", "the file: Invalid JSON"),
        (b"[]", "the file"),
        (b"[" * 100_000, "the file: Invalid JSON"),
        (b'{"a": "\\ud800"}', "the file: Invalid JSON"),
    ],
)
def test_half_written_or_foreign(tmp_path: Path, content: bytes, why: str) -> None:
    """What is not a whole record is reported with the place, never guessed at."""
    (tmp_path / SUPERVISOR_FILE).write_bytes(content)
    fault = only_fault(tmp_path)
    assert fault.file == SUPERVISOR_FILE
    assert why in fault.why


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"schema_version": 2}, "schema_version"),
        ({"surprise": 1}, "surprise"),
        ({"started_at": "2026-05-01T12:00:00"}, "started_at"),
        ({"world_size": 0}, "world_size"),
        ({"world_size": 10**9}, "world_size"),
        ({"pid": 10**400}, "pid"),
        ({"weights": "fp8"}, "weights"),
        ({"phases": [{"phase": "flying", "at": "2026-05-01T12:00:00Z"}]}, "phases.0.phase"),
    ],
)
def test_other_version(tmp_path: Path, change: dict[str, object], where: str) -> None:
    """A record of another version, or with a number that no reader can hold, is named with its key."""
    document = supervisor().model_dump(mode="json") | change
    (tmp_path / SUPERVISOR_FILE).write_text(json.dumps(document))
    assert f"{where}:" in only_fault(tmp_path).why


def test_too_large(tmp_path: Path) -> None:
    """A huge file must not fill the reader's memory."""
    with (tmp_path / SUPERVISOR_FILE).open("wb") as stream:
        stream.truncate(MAX_RECORD_BYTES + 1)
    assert "larger than" in only_fault(tmp_path).why


def test_as_many_errors_as_bytes(tmp_path: Path) -> None:
    """Nor may what is wrong with a small file fill it, or hold up the probes while it is described."""
    conversions = "[" + ",".join(["{}"] * 20_000) + "]"
    keys = json.dumps({f"k{number}": 0 for number in range(20_000)})
    (tmp_path / SUPERVISOR_FILE).write_text(keys)
    (tmp_path / "rank-0000.json").write_text(f'{{"conversions": {conversions}}}')
    tracemalloc.start()
    faults = read_journal(tmp_path).faults
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "things are wrong" in faults[0].why
    assert faults[1].why == "is not a record of this version: start_id: Field required"
    assert peak < 32 << 20


def test_a_name_that_would_steer_a_terminal(tmp_path: Path) -> None:
    """Names of files come from outside, and end in answers, logs and metrics."""
    (tmp_path / "failure-\n\x1b[31m.json").write_text("{}")
    (tmp_path / os.fsdecode(b"failure-\xff.json")).write_text("{}")
    files = [fault.file for fault in read_journal(tmp_path).faults]
    assert len(files) == 2
    assert all(file.isprintable() for file in files)


def test_huge_key(tmp_path: Path) -> None:
    """A fault quotes a foreign key only so far, or one file could flood every answer and log."""
    (tmp_path / SUPERVISOR_FILE).write_text(
        json.dumps({**supervisor().model_dump(mode="json"), "k" * 9999: 1})
    )
    assert len(only_fault(tmp_path).why) == MAX_FAULT_CHARACTERS


def test_other_start(tmp_path: Path) -> None:
    """What an earlier start left behind must not be mixed into the present one."""
    write(tmp_path, supervisor=supervisor(), rank_0000=rank(0, start_id="that"))
    write_record(tmp_path, failure_file(7), failure(7, start_id="that"))
    journal = read_journal(tmp_path)
    assert (journal.ranks, journal.failures) == ((), ())
    assert ["another start (that)" in fault.why for fault in journal.faults] == [True, True]


def test_without_a_supervisor(tmp_path: Path) -> None:
    """A rank alone cannot be told to be of this start."""
    write(tmp_path, rank_0000=rank(0))
    assert read_journal(tmp_path).ranks == ()
    assert "no supervisor.json" in only_fault(tmp_path).why


def test_rank_under_a_wrong_name(tmp_path: Path) -> None:
    """Two files with one rank's record would count that rank twice."""
    write(tmp_path, supervisor=supervisor(), rank_0000=rank(0), rank_0001=rank(0), rank_0=rank(0))
    journal = read_journal(tmp_path)
    assert journal.ranks == (rank(0),)
    assert [fault.file for fault in journal.faults] == ["rank-0.json", "rank-0001.json"]


def test_pipe(tmp_path: Path) -> None:
    """Opening a pipe that nobody writes would hang the reader for ever."""
    os.mkfifo(tmp_path / SUPERVISOR_FILE)
    assert only_fault(tmp_path) == Fault(SUPERVISOR_FILE, "is not a regular file")


def test_directory_in_place_of_a_file(tmp_path: Path) -> None:
    """Container runtimes make a directory where a file to mount is missing."""
    (tmp_path / SUPERVISOR_FILE).mkdir()
    assert "not a regular file" in only_fault(tmp_path).why


def test_file_in_place_of_the_directory(tmp_path: Path) -> None:
    """A wrong state directory is reported and does not raise."""
    (tmp_path / "file").touch()
    assert "Not a directory" in only_fault(tmp_path / "file").why


def test_symbolic_link_to_itself(tmp_path: Path) -> None:
    """Odd files are faults too."""
    (tmp_path / SUPERVISOR_FILE).symlink_to(SUPERVISOR_FILE)
    assert "cannot be read" in only_fault(tmp_path).why


def test_name_that_is_no_text(tmp_path: Path) -> None:
    """A file's name may be any bytes; the fault must still be fit to print and to send."""
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/rank-\xff.json")).write_bytes(b"{}")
    assert only_fault(tmp_path).file == "rank-\\xff.json"


def test_temporary_files_are_not_records(tmp_path: Path) -> None:
    """What a writer that was killed left behind is neither a record nor a fault."""
    (tmp_path / f".{rank_file(0)}.abc123").write_text("{")
    assert read_journal(tmp_path).faults == ()
