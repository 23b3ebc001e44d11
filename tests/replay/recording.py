# SPDX-License-Identifier: Apache-2.0
"""A recorded start: every write to the state directory with its time, in a small file.

Gzipped JSON lines. The first line says what the recording is; each other line is one write
``[seconds, file, changes, appended]``: what of the file's record is replaced, and what is added to the end
of its lists. Moments are seconds since the start. A conversion is a list of values in the order of
``CONVERSION``.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from kimi_k3.journal.models import (
    SUPERVISOR_FILE,
    ProjectionConversion,
    RankRecord,
    SupervisorRecord,
)
from kimi_k3.journal.reader import Journal
from kimi_k3.words.phases import Phase

DEFAULT = Path(__file__).parent / "data" / "start-96x8.jsonl.gz"

CONVERSION = tuple(ProjectionConversion.model_fields)
"""The values of a conversion, in this order."""

_MOMENTS = frozenset({"at", "started_at", "ended_at", "updated_at", "since", "began_at"})

Clock = Callable[[float], datetime]
"""From seconds since the recorded start to the moment that is written for them."""


@dataclass(frozen=True)
class Write:
    """One write: ``file`` gets ``changes``, and ``appended`` to the end of its lists."""

    at: float
    file: str
    changes: dict[str, Any]
    appended: dict[str, list[Any]]


@dataclass(frozen=True)
class Recording:
    """A recorded start; ``about`` says in words what it is, ``writes`` are in the order of time."""

    about: str
    writes: tuple[Write, ...]

    def save(self, path: Path) -> None:
        """Write the recording; the same one gives the same bytes."""
        lines = [json.dumps({"about": self.about, "conversion": CONVERSION})]
        lines += [_line([one.at, one.file, one.changes, one.appended]) for one in self.writes]
        path.write_bytes(gzip.compress(("\n".join(lines) + "\n").encode(), compresslevel=9, mtime=0))

    @classmethod
    def load(cls, path: Path = DEFAULT) -> Recording:
        """Read a recording; one whose conversions have other values than ours is refused."""
        first, *lines = gzip.decompress(path.read_bytes()).decode().splitlines()
        head = json.loads(first)
        if tuple(head["conversion"]) != CONVERSION:
            raise ValueError(f"{path} is of another version; make it anew: python -m tests.replay.make")
        return cls(about=head["about"], writes=tuple(Write(*json.loads(line)) for line in lines))

    @property
    def seconds(self) -> float:
        """From the start to the last write."""
        return self.writes[-1].at

    def phases(self) -> dict[Phase, float]:
        """When the deployment entered each phase, in seconds since the start."""
        changes = [
            change
            for one in self.writes
            if one.file == SUPERVISOR_FILE
            for change in one.appended.get("phases", [])
        ]
        return {Phase(change["phase"]): change["at"] for change in changes}

    def middle_of(self, phase: Phase) -> float:
        """Seconds from the start to the middle of a phase; of the last one, its beginning.

        Raises:
            KeyError: the start never was in that phase.
        """
        begins = self.phases()
        order = list(begins)
        later = order[order.index(phase) + 1 :] if phase in begins else []
        return (begins[phase] + begins[later[0]]) / 2 if later else begins[phase]


class Tape:
    """The files' records as they become, write by write."""

    def __init__(self) -> None:
        self._records: dict[str, dict[str, Any]] = {}

    def apply(self, write: Write) -> None:
        """Let one write happen."""
        record = self._records.setdefault(write.file, {})
        record.update(write.changes)
        record["updated_at"] = write.at
        for name, values in write.appended.items():
            if name == "conversions":
                values = [dict(zip(CONVERSION, one, strict=True)) for one in values]
            record.setdefault(name, []).extend(values)

    def record(self, file: str, clock: Clock, **changes: Any) -> SupervisorRecord | RankRecord:
        """The record of ``file`` as it stands, with its moments on ``clock``, but for ``changes``."""
        model = SupervisorRecord if file == SUPERVISOR_FILE else RankRecord
        return model.model_validate(_placed(self._records[file], clock) | changes)

    def files(self) -> Iterator[str]:
        """The files that have been written."""
        yield from self._records

    def journal(self, clock: Clock, **changes: Any) -> Journal:
        """All of it as the journal's reader would give it; ``changes`` are the supervisor's."""
        supervisor = None
        ranks = []
        for file in sorted(self._records):
            record = self.record(file, clock, **(changes if file == SUPERVISOR_FILE else {}))
            if isinstance(record, SupervisorRecord):
                supervisor = record
            else:
                ranks.append(record)
        return Journal(supervisor=supervisor, ranks=tuple(ranks), failures=(), faults=())


def journal_at(recording: Recording, seconds: float, clock: Clock) -> Journal:
    """What the state directory held so many seconds after the start, with a supervisor that is alive."""
    tape = Tape()
    for write in recording.writes:
        if write.at <= seconds:
            tape.apply(write)
    return tape.journal(clock, updated_at=clock(seconds))


def _placed(value: Any, clock: Clock) -> Any:
    if isinstance(value, dict):
        return {
            key: clock(inner) if key in _MOMENTS and isinstance(inner, int | float) else _placed(inner, clock)
            for key, inner in value.items()
        }
    return [_placed(inner, clock) for inner in value] if isinstance(value, list) else value


def _line(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
