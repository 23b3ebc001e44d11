# SPDX-License-Identifier: Apache-2.0
"""Base of what the sidecar answers, and the parts that several answers share."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field

from kimi_k3.journal.models import PhaseChange, RankRecord, SupervisorRecord
from kimi_k3.sidecar.arithmetic import seconds_between
from kimi_k3.words.phases import Phase


class View(BaseModel):
    """Base of every answer: no unknown keys, immutable; ``null`` means unknown."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Alive(View):
    """The sidecar's event loop turns."""

    alive: bool = Field(default=True, description="Always true; no answer means no.")


class EngineOutcome(StrEnum):
    """What came of asking the engine for its health."""

    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"
    UNREACHABLE = "unreachable"
    TIMEOUT = "timeout"
    FAILED = "failed"


class EngineHealth(View):
    """The answer to one ``GET /health`` of the engine."""

    outcome: EngineOutcome = Field(
        description="healthy: 200; unhealthy: any other status; unreachable: no connection; "
        "timeout: no answer in time; failed: anything else."
    )
    status_code: int | None = Field(description="HTTP status of the engine's answer; null without one.")
    detail: str = Field(description="One sentence about the answer.")
    checked_at: datetime = Field(description="When the engine was asked.")
    seconds: float = Field(description="How long the answer took, in seconds.")
    since: datetime = Field(description="Since when the engine has been healthy, or has not been.")

    @property
    def healthy(self) -> bool:
        """Whether the engine answered 200."""
        return self.outcome is EngineOutcome.HEALTHY


class PhaseSpan(View):
    """A phase that the deployment is in or has passed through."""

    phase: Phase
    description: str = Field(description="What happens in this phase.")
    started_at: datetime
    seconds: float | None = Field(description="Time spent in it, so far for the present one.")


def rank_phases(record: RankRecord, supervisor: SupervisorRecord | None) -> tuple[PhaseChange, ...]:
    """A rank's way: it reports until its weights are in place, then it is where the deployment is."""
    if supervisor is None or record.phase is not Phase.COMPILING:
        return record.phases
    later = (change for change in supervisor.phases if change.phase.position > Phase.COMPILING.position)
    return (*record.phases, *later)


def present_phase(phases: tuple[PhaseChange, ...]) -> Phase | None:
    """The last phase, if there is one."""
    return phases[-1].phase if phases else None


def phase_spans(phases: tuple[PhaseChange, ...], now: datetime) -> list[PhaseSpan]:
    """The history with durations; the last phase lasts until ``now``."""
    ends = [*[change.at for change in phases], now][1:]
    return [
        PhaseSpan(
            phase=change.phase,
            description=change.phase.description,
            started_at=change.at,
            seconds=seconds_between(change.at, end),
        )
        for change, end in zip(phases, ends, strict=True)
    ]
