# SPDX-License-Identifier: Apache-2.0
"""Lets a recorded start happen again in a state directory, by the journal's own writer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from enum import StrEnum
from pathlib import Path

from kimi_k3.errors import ExitCode, OperatorError
from kimi_k3.journal.models import (
    HEARTBEAT_SECONDS,
    SUPERVISOR_FILE,
    Ending,
    Explanation,
    FailureRecord,
    PhaseChange,
    SupervisorRecord,
    failure_file,
)
from kimi_k3.journal.reader import read_journal
from kimi_k3.journal.writer import now, write_record
from kimi_k3.words.phases import Phase

from .recording import Clock, Recording, Tape

BEAT_SECONDS = HEARTBEAT_SECONDS / 2
RANK_BEAT_SECONDS = 10.0


class Then(StrEnum):
    """What becomes of the start when the replay has come to its end."""

    KEEP = "keep"
    FAIL = "fail"
    STOP = "stop"
    STALE = "stale"


def shifted(start: datetime, at: float, speed: float) -> Clock:
    """Seconds of the recording as moments: ``at`` is ``start``, what was before it keeps its distance.

    Raises:
        ValueError: ``speed`` is not above 0.
    """
    if not speed > 0:
        raise ValueError("speed must be above 0")

    def clock(seconds: float) -> datetime:
        passed = seconds - at
        return start + timedelta(seconds=passed / speed if passed > 0 else passed)

    return clock


def require_ours(directory: Path, recording: Recording) -> None:
    """A replay must never write over the journal of a real deployment.

    Raises:
        OperatorError: the directory holds another start, or something that is no record.
    """
    seen = read_journal(directory)
    own = recording.writes[0].changes["start_id"]
    foreign = seen.supervisor is not None and seen.supervisor.start_id != own
    if foreign or (seen.supervisor is None and (directory / SUPERVISOR_FILE).exists()):
        raise OperatorError(
            f"state directory {directory}: holds a journal that is not this replay's",
            remedy="give an empty directory",
            exit_code=ExitCode.IN_USE,
        )


def play(
    recording: Recording,
    directory: Path,
    stop: threading.Event,
    *,
    begin: float = 0.0,
    end: float | None = None,
    speed: float = 1.0,
    then: Then = Then.KEEP,
    engine_url: str | None = None,
    entered: Callable[[Phase], None] = lambda _: None,
) -> None:
    """Write the recording to ``directory`` until ``stop`` is set.

    Args:
        begin: seconds of the recording that are there at once, as if they had just passed.
        end: where the replay holds; the end of the recording unless told.
        speed: seconds of the recording in a second; durations after ``begin`` shrink as much.
        then: what happens at ``end``.
        engine_url: of an engine that answers, instead of the recorded one.
        entered: told of each phase as it begins.
    """
    end = recording.seconds if end is None else end
    started = time.monotonic()
    clock = shifted(now(), begin, speed)
    url = {} if engine_url is None else {"engine_url": engine_url}
    tape = Tape()
    next_beat = now()
    waiting = list(reversed(recording.writes))
    while not stop.is_set():
        position = min(end, begin + (time.monotonic() - started) * speed)
        moment = now()
        changed = {SUPERVISOR_FILE}
        if moment >= next_beat:
            # An engine's workers report their memory all the time, also when they have no news.
            changed.update(tape.files())
            next_beat = moment + timedelta(seconds=RANK_BEAT_SECONDS)
        while waiting and waiting[-1].at <= position:
            write = waiting.pop()
            tape.apply(write)
            changed.add(write.file)
            for change in write.appended.get("phases", []) if write.file == SUPERVISOR_FILE else []:
                entered(Phase(change["phase"]))
        # The ranks first: the supervisor's phase follows what they have reported.
        for file in sorted(changed - {SUPERVISOR_FILE}):
            write_record(directory, file, tape.record(file, clock, updated_at=moment))
        record = tape.record(SUPERVISOR_FILE, clock, updated_at=moment, **url)
        assert isinstance(record, SupervisorRecord)
        if position >= end and then is not Then.KEEP:
            _finish(directory, record, then)
            if then is not Then.STALE:
                entered(Phase.STOPPED if then is Then.STOP else Phase.FAILED)
            stop.wait()
            return
        write_record(directory, SUPERVISOR_FILE, record)
        due = (waiting[-1].at - position) / speed if waiting and position < end else BEAT_SECONDS
        stop.wait(min(max(due, 0.02), BEAT_SECONDS))


def _finish(directory: Path, record: SupervisorRecord, then: Then) -> None:
    if then is Then.STALE:
        long_ago = {"updated_at": record.updated_at - timedelta(minutes=1)}
        write_record(directory, SUPERVISOR_FILE, record.model_copy(update=long_ago))
        return
    moment = record.updated_at
    if then is Then.STOP:
        changes: tuple[PhaseChange, ...] = (
            PhaseChange(phase=Phase.DRAINING, at=moment),
            PhaseChange(phase=Phase.STOPPED, at=moment),
        )
        ending = Ending(at=moment, exit_code=0, reason="ended on request")
    else:
        changes = (PhaseChange(phase=Phase.FAILED, at=moment),)
        ending = Ending(
            at=moment,
            exit_code=ExitCode.ENGINE,
            reason="vLLM ended with exit code 1: a GPU had no memory left",
            explanation=Explanation(
                name="hip-out-of-memory",
                cause="a GPU had no memory left",
                remedy="lower --set gpu-memory-utilization, or serve shorter contexts",
                line=4711,
                text="torch.OutOfMemoryError: HIP out of memory.",
            ),
        )
        failure = FailureRecord(
            start_id=record.start_id,
            pid=204,
            at=moment,
            what="rank 3: no memory left for the KV cache",
            remedy="lower --set gpu-memory-utilization",
        )
        write_record(directory, failure_file(failure.pid), failure)
    last = record.model_copy(update={"phases": (*record.phases, *changes), "ending": ending})
    write_record(directory, SUPERVISOR_FILE, last)
