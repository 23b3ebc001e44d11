# SPDX-License-Identifier: Apache-2.0
"""Reading the state directory: what is whole and belongs to the present start, and what is not."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from kimi_k3.journal.models import (
    FAILURE_FILE_PATTERN,
    RANK_FILE_PATTERN,
    SUPERVISOR_FILE,
    FailureRecord,
    RankRecord,
    SupervisorRecord,
    rank_file,
)

MAX_RECORD_BYTES = 8 * 1024 * 1024
"""A rank's record of the real model (92 layers, 2 projections) is about 120 kB; more is foreign."""

MAX_FAULT_CHARACTERS = 500
"""A fault may quote a foreign file's key, which may be as large as the file."""

AnyRecord = TypeVar("AnyRecord", SupervisorRecord, RankRecord, FailureRecord)


@dataclass(frozen=True)
class Fault:
    """A file that could not be trusted, and why; ``file`` is printable whatever bytes name it."""

    file: str
    why: str


@dataclass(frozen=True)
class Journal:
    """Everything trustworthy in a state directory, at one moment.

    ``ranks`` and ``failures`` hold only records of the start that ``supervisor`` describes; without
    a supervisor record they are empty.
    """

    supervisor: SupervisorRecord | None
    ranks: tuple[RankRecord, ...]
    failures: tuple[FailureRecord, ...]
    faults: tuple[Fault, ...]


def read_journal(directory: Path) -> Journal:
    """Read ``directory``; never raises, every problem becomes a :class:`Fault`."""
    faults: list[Fault] = []
    supervisor = _read(directory / SUPERVISOR_FILE, SupervisorRecord, faults)
    ranks = _read_all(directory, RANK_FILE_PATTERN, RankRecord, supervisor, faults)
    failures = _read_all(directory, FAILURE_FILE_PATTERN, FailureRecord, supervisor, faults)
    return Journal(
        supervisor=supervisor,
        ranks=tuple(sorted(ranks, key=lambda record: record.rank)),
        failures=tuple(sorted(failures, key=lambda record: record.at)),
        faults=tuple(faults),
    )


def _read_all(
    directory: Path,
    pattern: str,
    model: type[AnyRecord],
    supervisor: SupervisorRecord | None,
    faults: list[Fault],
) -> list[AnyRecord]:
    records = []
    try:
        paths = sorted(directory.glob(pattern))
    except OSError as error:
        faults.append(Fault(pattern, f"cannot be listed: {error.strerror or error}"))
        return []
    for path in paths:
        record = _read(path, model, faults)
        if record is None:
            continue
        if isinstance(record, RankRecord) and path.name != rank_file(record.rank):
            faults.append(_fault(path, f"holds the record of rank {record.rank}, whose file is another"))
        elif supervisor is None:
            faults.append(_fault(path, f"there is no {SUPERVISOR_FILE} it could belong to"))
        elif record.start_id != supervisor.start_id:
            faults.append(_fault(path, f"belongs to another start ({record.start_id})"))
        else:
            records.append(record)
    return records


def _read(path: Path, model: type[AnyRecord], faults: list[Fault]) -> AnyRecord | None:
    try:
        # Opening a named pipe that nobody writes would wait for ever.
        if not stat.S_ISREG(path.stat().st_mode):
            faults.append(_fault(path, "is not a regular file"))
            return None
        with path.open("rb") as stream:
            text = stream.read(MAX_RECORD_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        faults.append(_fault(path, f"cannot be read: {error.strerror or error}"))
        return None
    if len(text) > MAX_RECORD_BYTES:
        faults.append(_fault(path, f"is larger than {MAX_RECORD_BYTES} bytes"))
        return None
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        faults.append(_fault(path, f"is not a record of this version: {where}: {first['msg']}"))
        return None


def _fault(path: Path, why: str) -> Fault:
    return Fault(os.fsencode(path.name).decode("utf-8", "backslashreplace"), why[:MAX_FAULT_CHARACTERS])
