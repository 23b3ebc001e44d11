# SPDX-License-Identifier: Apache-2.0
"""Reading the state directory: what is whole and belongs to the present start, and what is not."""

from __future__ import annotations

import operator
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from kimi_k3.journal.models import (
    FAILURE_FILE_PATTERN,
    NODE_FILE_PATTERN,
    RANK_FILE_PATTERN,
    SUPERVISOR_FILE,
    FailureRecord,
    NodeRecord,
    RankRecord,
    SupervisorRecord,
    node_file,
    rank_file,
)
from kimi_k3.words.text import printable

MAX_RECORD_BYTES = 2 * 1024 * 1024
"""A rank's record of the real model (92 layers, 2 projections) is about 120 kB; more is foreign."""

ROOM_BYTES = 256 * 1024
"""Below this a directory counts as full: a record has room beside the one that it takes the place of."""

MAX_DESCRIBED = 100
"""Errors of one record that are looked at for the first one's sake."""

MAX_FAULT_CHARACTERS = 500
"""A fault may quote a foreign file's key, which may be as large as the file."""

AnyRecord = TypeVar("AnyRecord", SupervisorRecord, RankRecord, FailureRecord, NodeRecord)


@dataclass(frozen=True)
class Fault:
    """A file that could not be trusted, and why; ``file`` is printable whatever bytes name it."""

    file: str
    why: str


@dataclass(frozen=True)
class Journal:
    """Everything trustworthy in a state directory, at one moment.

    ``ranks``, ``failures`` and ``nodes`` hold only records of the start that ``supervisor`` describes;
    without a supervisor record they are empty. ``unwritable`` is why the directory can take no new record, as
    far as the kernel tells: then an old one does not mean that its writer is gone.
    """

    supervisor: SupervisorRecord | None
    ranks: tuple[RankRecord, ...]
    failures: tuple[FailureRecord, ...]
    faults: tuple[Fault, ...]
    nodes: tuple[NodeRecord, ...] = ()
    unwritable: str | None = None

    @property
    def absent_nodes(self) -> list[int]:
        """Nodes that have not joined the first one's start; another node knows of none."""
        if self.supervisor is None or self.supervisor.headless:
            return []
        present = {record.node for record in self.nodes}
        return [node for node in range(1, self.supervisor.nodes) if node not in present]


def read_journal(directory: Path) -> Journal:
    """Read ``directory`` once; never raises, every problem becomes a :class:`Fault`."""
    return JournalReader(directory).read()


class JournalReader:
    """Reads a state directory again and again; a file that has not changed is not parsed again.

    Records are written by atomic rename, so a changed file is another inode; one that was written in place
    has another time or size. While no file changes, what is read stays the same object, and while no rank's
    file changes, :attr:`Journal.ranks` does.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._parsed: dict[str, _Parsed] = {}
        self._journal = Journal(supervisor=None, ranks=(), failures=(), faults=())

    def read(self) -> Journal:
        """What the directory holds now; never raises, every problem becomes a :class:`Fault`."""
        parsed: dict[str, _Parsed] = {}
        faults: list[Fault] = []
        supervisor = self._record(self._directory / SUPERVISOR_FILE, SupervisorRecord, parsed, faults)
        ranks = self._records(RANK_FILE_PATTERN, RankRecord, supervisor, parsed, faults)
        failures = self._records(FAILURE_FILE_PATTERN, FailureRecord, supervisor, parsed, faults)
        nodes = self._records(NODE_FILE_PATTERN, NodeRecord, supervisor, parsed, faults)
        self._parsed = parsed
        ranks.sort(key=lambda record: record.rank)
        last = self._journal
        self._journal = Journal(
            supervisor=supervisor,
            ranks=_kept(last.ranks, ranks),
            failures=_kept(last.failures, sorted(failures, key=lambda record: record.at)),
            faults=tuple(faults),
            nodes=_kept(last.nodes, nodes),
            unwritable=_unwritable(self._directory),
        )
        if (
            self._journal.supervisor is last.supervisor
            and self._journal.ranks is last.ranks
            and self._journal.failures is last.failures
            and self._journal.nodes is last.nodes
            and self._journal.faults == last.faults
            and self._journal.unwritable == last.unwritable
        ):
            self._journal = last
        return self._journal

    def _records(
        self,
        pattern: str,
        model: type[AnyRecord],
        supervisor: SupervisorRecord | None,
        parsed: dict[str, _Parsed],
        faults: list[Fault],
    ) -> list[AnyRecord]:
        records = []
        try:
            paths = sorted(self._directory.glob(pattern))
        except OSError as error:
            faults.append(Fault(pattern, f"cannot be listed: {error.strerror or error}"))
            return []
        for path in paths:
            record = self._record(path, model, parsed, faults)
            if record is None:
                continue
            if isinstance(record, RankRecord) and path.name != rank_file(record.rank):
                faults.append(_fault(path, f"holds the record of rank {record.rank}, whose file is another"))
            elif isinstance(record, NodeRecord) and path.name != node_file(record.node):
                faults.append(_fault(path, f"holds the record of node {record.node}, whose file is another"))
            elif supervisor is None:
                faults.append(_fault(path, f"there is no {SUPERVISOR_FILE} it could belong to"))
            elif record.start_id != supervisor.start_id:
                faults.append(_fault(path, f"belongs to another start ({record.start_id})"))
            else:
                records.append(record)
        return records

    def _record(
        self, path: Path, model: type[AnyRecord], parsed: dict[str, _Parsed], faults: list[Fault]
    ) -> AnyRecord | None:
        try:
            found = path.stat()
            # Opening a named pipe that nobody writes would wait for ever.
            if not stat.S_ISREG(found.st_mode):
                faults.append(_fault(path, "is not a regular file"))
                return None
            mark = (found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size)
            known = self._parsed.get(path.name)
            if known is None or known.mark != mark:
                with path.open("rb") as stream:
                    known = _Parsed(mark, *_parse(stream.read(MAX_RECORD_BYTES + 1), model))
        except FileNotFoundError:
            return None
        except OSError as error:
            faults.append(_fault(path, f"cannot be read: {error.strerror or error}"))
            return None
        parsed[path.name] = known
        if known.why is not None:
            faults.append(_fault(path, known.why))
        assert known.record is None or isinstance(known.record, model)
        return known.record


@dataclass(frozen=True)
class _Parsed:
    """What a file held when it had ``mark``: a record, or why it is none."""

    mark: tuple[int, int, int, int]
    record: SupervisorRecord | RankRecord | FailureRecord | NodeRecord | None
    why: str | None


def _parse(text: bytes, model: type[AnyRecord]) -> tuple[AnyRecord | None, str | None]:
    if len(text) > MAX_RECORD_BYTES:
        return None, f"is larger than {MAX_RECORD_BYTES} bytes"
    try:
        return model.model_validate_json(text), None
    except ValidationError as error:
        # Pydantic describes all of them or none, each with a copy of what it is about.
        if error.error_count() > MAX_DESCRIBED:
            return None, f"is not a record of this version: {error.error_count()} things are wrong with it"
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        return None, f"is not a record of this version: {where}: {first['msg']}"


def _unwritable(directory: Path) -> str | None:
    try:
        found = os.statvfs(directory)
    except OSError:
        return None
    if found.f_flag & os.ST_RDONLY:
        return "is read-only"
    # A file system without a limit on files (btrfs) gives 0 of 0.
    if found.f_bavail * found.f_frsize < ROOM_BYTES or (found.f_files and not found.f_favail):
        return "has no room"
    return None


def _kept(last: tuple[AnyRecord, ...], records: list[AnyRecord]) -> tuple[AnyRecord, ...]:
    """``records``, as the last tuple if they are the very same."""
    same = len(records) == len(last) and all(map(operator.is_, records, last))
    return last if same else tuple(records)


def _fault(path: Path, why: str) -> Fault:
    name = os.fsencode(path.name).decode("utf-8", "backslashreplace")
    return Fault(printable(name), why[:MAX_FAULT_CHARACTERS])
