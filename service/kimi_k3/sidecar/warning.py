# SPDX-License-Identifier: Apache-2.0
"""What an operator should know or mend (``/warnings``); empty for a healthy lossless deployment.

Each kind of warning is written once, as data; the metrics and the documentation read it here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from pydantic import Field

from kimi_k3.journal.models import SupervisorRecord
from kimi_k3.journal.reader import Journal
from kimi_k3.sidecar.arithmetic import is_fresh, seconds_between
from kimi_k3.sidecar.conversion import missing_conversions
from kimi_k3.sidecar.view import EngineHealth, View
from kimi_k3.words.phases import Phase

RANK_GRACE_SECONDS = 120.0
"""How long after loading began a rank may stay silent: vLLM's workers import for a while first."""


class Severity(StrEnum):
    """How much a warning matters."""

    WARNING = "warning"
    CRITICAL = "critical"


@dataclass(frozen=True)
class WarningKind:
    """A kind of warning: stable code, severity, and its text with ``{fields}``."""

    code: str
    severity: Severity
    text: str


class Advice(View):
    """One thing that an operator should know or mend."""

    code: str = Field(description="Stable code.")
    severity: Severity = Field(description="critical: traffic or truth is at stake.")
    message: str = Field(description="What it is, and what to do.")
    since: datetime | None = Field(description="Since when; null when that is not known.")


class Warnings(View):
    """Everything that an operator should know or mend."""

    warnings: list[Advice] = Field(description="Empty for a healthy lossless deployment.")


LOSSY_WEIGHTS = WarningKind(
    "lossy-weights",
    Severity.WARNING,
    "The experts are served as int4, requantised from the checkpoint's MXFP4: answers differ from the "
    "checkpoint's. /conversion tells by how much; start with --weights mxfp4 to go back.",
)
CONSENT_MISSING = WarningKind(
    "consent-missing",
    Severity.CRITICAL,
    "The experts are served as int4, but no consent to that is on record; start with --weights mxfp4, or "
    "consent with --accept-lossy.",
)
WEIGHTS_MISMATCH = WarningKind(
    "weights-mismatch",
    Severity.CRITICAL,
    "Rank {rank} serves {found}, but the supervisor asked for {asked}; restart the deployment.",
)
SIGNS_REFUSED = WarningKind(
    "signs-refused",
    Severity.WARNING,
    "The experts' kernel ({backend}) computes negative scales wrongly, so they were converted without them: "
    "the error is a little larger than it must be. Use another build of AITER, or --no-negative-scale.",
)
SUPERVISOR_MISSING = WarningKind(
    "supervisor-missing",
    Severity.CRITICAL,
    "No supervisor has reported in the state directory; start the deployment, or give the sidecar the "
    "same KIMI_K3_STATE_DIR.",
)
SUPERVISOR_STALE = WarningKind(
    "supervisor-stale",
    Severity.CRITICAL,
    "The supervisor has stopped reporting without an ending: it was killed, it hangs, or the state "
    "directory cannot be written. Look at its log and restart it.",
)
DEPLOYMENT_FAILED = WarningKind(
    "deployment-failed",
    Severity.CRITICAL,
    "The deployment has ended with exit code {exit_code}: {reason}. Look at the failures in /status and at "
    "the engine's log, then start it again.",
)
ENGINE_UNHEALTHY = WarningKind(
    "engine-unhealthy",
    Severity.CRITICAL,
    "The deployment should serve, but its engine is not healthy: {detail}. Look at the engine's log.",
)
ENGINE_FAILURE = WarningKind(
    "engine-failure", Severity.CRITICAL, "The engine's process {pid} gave up: {what}; {remedy}"
)
RANK_MISSING = WarningKind(
    "rank-missing",
    Severity.CRITICAL,
    "Of {world_size} ranks {missing} have not reported although loading began: {ranks}. Look at the "
    "engine's log for workers that died or hang.",
)
RANK_UNEXPECTED = WarningKind(
    "rank-unexpected",
    Severity.WARNING,
    "Rank {rank} reports, but the deployment has only {world_size}; sums over ranks count it too.",
)
CONVERSION_INCOMPLETE = WarningKind(
    "conversion-incomplete",
    Severity.CRITICAL,
    "The deployment serves although {missing} expected conversions were not reported; /conversion lists "
    "them. Do not trust its answers; restart it.",
)
JOURNAL_FAULT = WarningKind(
    "journal-fault",
    Severity.WARNING,
    "The state directory's {file} {why}; it is left out of everything the sidecar tells.",
)

KINDS = tuple(value for value in list(globals().values()) if isinstance(value, WarningKind))
"""Every kind of warning, in the order above."""


def warnings_view(journal: Journal, health: EngineHealth | None, now: datetime) -> Warnings:
    """What ``/warnings`` answers; ``health`` is the engine's last answer, if it was asked."""
    return Warnings(warnings=list(_warnings(journal, health, now)))


def _warnings(journal: Journal, health: EngineHealth | None, now: datetime) -> Iterator[Advice]:
    supervisor = journal.supervisor
    if supervisor is None:
        yield _advice(SUPERVISOR_MISSING, None)
    else:
        yield from _of_weights(journal, supervisor)
        yield from _of_life(supervisor, health, now)
        yield from _of_ranks(journal, supervisor, now)
    for failure in journal.failures:
        yield _advice(ENGINE_FAILURE, failure.at, pid=failure.pid, what=failure.what, remedy=failure.remedy)
    for fault in journal.faults:
        yield _advice(JOURNAL_FAULT, None, file=fault.file, why=fault.why)


def _of_weights(journal: Journal, supervisor: SupervisorRecord) -> Iterator[Advice]:
    if supervisor.weights.lossy and supervisor.ending is None:
        yield _advice(LOSSY_WEIGHTS, supervisor.started_at)
        if supervisor.consent is None:
            yield _advice(CONSENT_MISSING, supervisor.started_at)
    refused = [record for record in journal.ranks if record.summary().signs_refused]
    if refused and supervisor.ending is None:
        yield _advice(SIGNS_REFUSED, None, backend=refused[0].backend)
    for record in journal.ranks:
        if record.weights is not supervisor.weights:
            yield _advice(
                WEIGHTS_MISMATCH, None, rank=record.rank, found=record.weights, asked=supervisor.weights
            )


def _of_life(supervisor: SupervisorRecord, health: EngineHealth | None, now: datetime) -> Iterator[Advice]:
    ending = supervisor.ending
    if ending is None and not is_fresh(supervisor, now):
        yield _advice(SUPERVISOR_STALE, supervisor.updated_at)
    if ending is not None and ending.exit_code != 0:
        yield _advice(
            DEPLOYMENT_FAILED, ending.at, exit_code=ending.exit_code, reason=ending.reason.rstrip(".")
        )
    if ending is None and supervisor.phase is Phase.READY and health is not None and not health.healthy:
        yield _advice(ENGINE_UNHEALTHY, health.since, detail=health.detail)


def _of_ranks(journal: Journal, supervisor: SupervisorRecord, now: datetime) -> Iterator[Advice]:
    began = loading_began(supervisor)
    silence = seconds_between(began, now)
    expected = set(range(supervisor.world_size if supervisor.ranks_report else 0))
    missing = sorted(expected - {record.rank for record in journal.ranks})
    if missing and supervisor.ending is None and silence is not None and silence > RANK_GRACE_SECONDS:
        yield _advice(
            RANK_MISSING,
            began,
            world_size=supervisor.world_size,
            missing=len(missing),
            ranks=", ".join(map(str, missing)),
        )
    for record in journal.ranks:
        if record.rank >= supervisor.world_size:
            yield _advice(RANK_UNEXPECTED, None, rank=record.rank, world_size=supervisor.world_size)
    serving = [change.at for change in supervisor.phases if change.phase is Phase.READY]
    if serving and supervisor.phase in (Phase.READY, Phase.DRAINING):
        incomplete = sum(len(entry.ranks) for entry in missing_conversions(journal))
        if incomplete:
            yield _advice(CONVERSION_INCOMPLETE, serving[0], missing=incomplete)


def loading_began(supervisor: SupervisorRecord) -> datetime | None:
    """When the engine's workers were started; ``None`` before."""
    later = [
        change.at
        for change in supervisor.phases
        if Phase.LOADING.position <= change.phase.position <= Phase.DRAINING.position
    ]
    return later[0] if later else None


def _advice(kind: WarningKind, since: datetime | None, **fields: object) -> Advice:
    return Advice(code=kind.code, severity=kind.severity, message=kind.text.format(**fields), since=since)
