# SPDX-License-Identifier: Apache-2.0
"""Writing records: whole or not at all, and never at the engine's expense."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from pydantic import BaseModel

from kimi_k3.files import write_whole
from kimi_k3.journal.models import Record


def now() -> datetime:
    """The present moment, UTC."""
    return datetime.now(tz=UTC)


def write_record(directory: Path, name: str, record: BaseModel) -> None:
    """Write ``record`` to ``directory/name`` by atomic rename.

    A reader sees the old file or the new one, never a part. No fsync: the journal describes
    processes, which do not outlive a power cut.

    Raises:
        OSError: the directory is full, read-only or gone; nothing is left behind.
    """
    write_whole(directory / name, record.model_dump_json(indent=1).encode())


class PatientWriter:
    """Writes one record file again and again; a failing directory is reported once, not raised.

    The engine must go on serving when its state directory is full or read-only. The first failure
    is handed to ``report``; the next success is too, so that the log tells when it healed.
    """

    def __init__(self, directory: Path, name: str, *, report: Callable[[str], None]) -> None:
        self._directory = directory
        self._name = name
        self._report = report
        self._failing = False

    def write(self, record: Record) -> bool:
        """Write the record; returns whether that worked."""
        try:
            write_record(self._directory, self._name, record)
        except OSError as error:
            if not self._failing:
                self._report(
                    f"state directory {self._directory}: cannot write {self._name}: "
                    f"{error.strerror or error}; serving goes on, but progress is not visible until it heals"
                )
            self._failing = True
            return False
        if self._failing:
            self._report(f"state directory {self._directory}: writing {self._name} works again")
        self._failing = False
        return True
