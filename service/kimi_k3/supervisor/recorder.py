# SPDX-License-Identifier: Apache-2.0
"""Keeps ``supervisor.json``: phases, heartbeat, the canary and the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from kimi_k3.journal.models import (
    HEARTBEAT_SECONDS,
    SUPERVISOR_FILE,
    Canary,
    Ending,
    Explanation,
    Notice,
    PhaseChange,
    Step,
    SupervisorRecord,
)
from kimi_k3.journal.writer import PatientWriter, now
from kimi_k3.words.phases import Phase

STEP_SECONDS = 0.5
"""Progress within a step is written at most so often."""


def _name(step: Step | None) -> str | None:
    return step.name if step else None


class Recorder:
    """The record of one start; every change is written at once, and so is a heartbeat when due."""

    def __init__(self, record: SupervisorRecord, state_dir: Path, *, report: Callable[[str], None]) -> None:
        self.record = record
        self._report = report
        self._writer = PatientWriter(state_dir, SUPERVISOR_FILE, report=report)
        self._begun = time.monotonic()
        self._written = -HEARTBEAT_SECONDS

    @property
    def phase(self) -> Phase:
        """The present phase."""
        return self.record.phase

    def begin(self) -> None:
        """The start begins only now: what came before was waiting."""
        self._begun = time.monotonic()

    def seconds(self) -> float:
        """Seconds since the start began."""
        return time.monotonic() - self._begun

    def seconds_in_phase(self) -> float:
        """Seconds since the present phase began."""
        return (now() - self.record.phases[-1].at).total_seconds() if self.record.phases else self.seconds()

    def enter(self, phase: Phase) -> None:
        """Go on to a later phase; entering the present one or an earlier one changes nothing."""
        if phase.position > self.phase.position:
            what = phase.description
            if phase is Phase.READY:
                what += f" {self.record.served_model_name} "
                what += "with the first node" if self.record.headless else f"at {self.record.engine_url}/v1"
            self._report(f"{phase}: {what}")
            self._change(phases=(*self.record.phases, PhaseChange(phase=phase, at=now())))

    def note_step(self, step: Step | None) -> None:
        """What is done within the present phase, if that is known; written at most twice a second."""
        if step is not None and step.phase is not self.phase:
            step = None
        if step != self.record.step and (
            _name(step) != _name(self.record.step) or time.monotonic() - self._written >= STEP_SECONDS
        ):
            self._change(step=step)

    def note_engine(self, pid: int) -> None:
        """The engine's main process is running."""
        self._change(engine_pid=pid)

    def note_notices(self, notices: Sequence[Notice]) -> None:
        """What the checks found odd."""
        if notices:
            self._change(notices=(*self.record.notices, *notices))

    def note_cache(self, size: int | None) -> None:
        """What vLLM announced of its KV cache, in bytes."""
        if size != self.record.kv_cache_bytes:
            self._change(kv_cache_bytes=size)

    def note_canary(self, canary: Canary) -> None:
        """The first completion worked."""
        self._change(canary=canary)

    def note_stalled(self, seconds: float | None) -> None:
        """The engine makes no progress since ``seconds`` ago; ``None``: it gets on."""
        if (seconds is None) is not (self.record.stalled_since is None):
            self._change(stalled_since=None if seconds is None else now() - timedelta(seconds=seconds))

    def note_leader(self, silent_seconds: float | None) -> None:
        """Nothing new was heard of the first node for so long; ``None``: it tells how it does."""
        if (silent_seconds is None) is not (self.record.leader_silent_since is None):
            since = None if silent_seconds is None else now() - timedelta(seconds=silent_seconds)
            self._change(leader_silent_since=since)

    def end(
        self, phase: Phase, exit_code: int, reason: str, *, explanation: Explanation | None = None
    ) -> None:
        """The start ended; the first ending is the one that stays."""
        if self.record.ending is not None:
            return
        ending = Ending(at=now(), exit_code=exit_code, reason=reason, explanation=explanation)
        self._change(phases=(*self.record.phases, PhaseChange(phase=phase, at=ending.at)), ending=ending)

    def beat(self) -> None:
        """Write the record when it is about to be due."""
        if time.monotonic() - self._written >= HEARTBEAT_SECONDS / 2:
            self._change()

    def _change(self, **changes: Any) -> None:
        self.record = self.record.model_copy(update={**changes, "updated_at": now()})
        self._writer.write(self.record)
        self._written = time.monotonic()
