# SPDX-License-Identifier: Apache-2.0
"""What an operator should know or mend (``/warnings``); empty for a healthy lossless deployment.

Each kind of warning is written once, as data; the metrics and the documentation read it here.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from pydantic import Field

from kimi_k3.journal.models import SupervisorRecord, relative_mse
from kimi_k3.journal.reader import Journal
from kimi_k3.sidecar.acknowledgement import Acknowledgement, Acknowledgements
from kimi_k3.sidecar.arithmetic import is_fresh, seconds_between, silent_nodes
from kimi_k3.sidecar.conversion import missing_conversions
from kimi_k3.sidecar.view import EngineHealth, View
from kimi_k3.words.phases import Phase

RANK_GRACE_SECONDS = 120.0
"""How long after loading began a rank may stay silent: vLLM's workers import for a while first."""

MAX_WORD = 80
"""Characters of an id that come from outside."""

NONE_GIVEN = Acknowledgements()


class Severity(StrEnum):
    """How much a warning matters."""

    WARNING = "warning"
    CRITICAL = "critical"


@dataclass(frozen=True)
class WarningKind:
    """A kind of warning.

    Attributes:
        code: stable.
        severity: how much it matters.
        text: what it is, with ``{fields}``.
        remedy: what to do, with ``{fields}``.
        acknowledgeable: whether somebody can say that they know; what keeps traffic away stays as it is.
    """

    code: str
    severity: Severity
    text: str
    remedy: str
    acknowledgeable: bool = False


class Advice(View):
    """One thing that an operator should know or mend."""

    id: str = Field(description="Names this warning; the same after a restart if it is about the same.")
    code: str = Field(description="Its kind; stable.")
    severity: Severity = Field(description="critical: traffic or truth is at stake.")
    message: str = Field(description="What it is.")
    remedy: str = Field(description="What to do.")
    since: datetime | None = Field(description="Since when; null when that is not known.")
    acknowledgeable: bool = Field(description="Whether somebody can say that they know.")
    acknowledged: Acknowledgement | None = Field(description="Who did; null when nobody has.")


class Warnings(View):
    """Everything that an operator should know or mend."""

    warnings: list[Advice] = Field(description="Empty for a healthy lossless deployment.")


LOSSY_WEIGHTS = WarningKind(
    "lossy-weights",
    Severity.WARNING,
    "The experts are served as int4, requantised from the checkpoint's MXFP4 ({how}): answers differ from "
    "the checkpoint's{figures}.",
    "See /conversion for the loss by layer, and acknowledge it, or start with --weights mxfp4 to go back.",
    acknowledgeable=True,
)
CONSENT_MISSING = WarningKind(
    "consent-missing",
    Severity.CRITICAL,
    "The experts are served as int4, but no consent to that is on record.",
    "Start with --weights mxfp4, or consent with --accept-lossy.",
)
WEIGHTS_MISMATCH = WarningKind(
    "weights-mismatch",
    Severity.CRITICAL,
    "Rank {rank} serves {found}, but the supervisor asked for {asked}.",
    "Restart the deployment.",
)
SIGNS_REFUSED = WarningKind(
    "signs-refused",
    Severity.WARNING,
    "The experts' kernel ({backend}) computes negative scales wrongly, so they were converted without them: "
    "the error is a little larger than it must be.",
    "Use another build of AITER, or --no-negative-scale.",
    acknowledgeable=True,
)
SUPERVISOR_MISSING = WarningKind(
    "supervisor-missing",
    Severity.CRITICAL,
    "No supervisor has reported in the state directory.",
    "Start the deployment, or give the sidecar the same KIMI_K3_STATE_DIR.",
)
SUPERVISOR_STALE = WarningKind(
    "supervisor-stale",
    Severity.CRITICAL,
    "The supervisor has stopped reporting without an ending: it was killed, it hangs, or it may not write "
    "the state directory.",
    "Look at its log and restart it.",
)
STATE_UNWRITABLE = WarningKind(
    "state-unwritable",
    Severity.CRITICAL,
    "The state directory {why}: what is told here is as old as the last record. Whether a deployment that "
    "was ready still is, is asked of the engine alone; one that starts is not taken for ready before it can "
    "be written.",
    "Make room in it, or mount it writable; nothing has to be restarted.",
)
DEPLOYMENT_FAILED = WarningKind(
    "deployment-failed",
    Severity.CRITICAL,
    "The deployment has ended with exit code {exit_code}: {reason}.",
    "Look at the failures in /status and at the engine's log, then start it again.",
)
ENGINE_UNHEALTHY = WarningKind(
    "engine-unhealthy",
    Severity.CRITICAL,
    "The deployment should serve, but its engine is not healthy: {detail}.",
    "Look at the engine's log.",
)
ENGINE_STALLED = WarningKind(
    "engine-stalled",
    Severity.CRITICAL,
    "Requests make no progress, or one of the engine's processes is stopped.",
    "Look at the engine's log; the supervisor ends a start that stays so.",
)
PREFLIGHT_NOTICE = WarningKind(
    "preflight-notice", Severity.WARNING, "{what}.", "{remedy}.", acknowledgeable=True
)
ENGINE_FAILURE = WarningKind(
    "engine-failure", Severity.CRITICAL, "The engine's process {pid} gave up: {what}.", "{remedy}"
)
RANK_MISSING = WarningKind(
    "rank-missing",
    Severity.CRITICAL,
    "Of {world_size} ranks {missing} have not reported although loading began: {ranks}.",
    "Look at the engine's log for workers that died or hang.",
)
NODE_MISSING = WarningKind(
    "node-missing",
    Severity.CRITICAL,
    "Of {nodes} nodes {missing} have not joined although loading began: node {which}.",
    "Look at that node's own log and sidecar; it waits for this one's sidecar, with the same token.",
)
NODE_SILENT = WarningKind(
    "node-silent",
    Severity.CRITICAL,
    "Node {node} no longer tells how it does.",
    "Look at that node; the supervisor ends a start that goes without one of its nodes.",
)
RANK_UNEXPECTED = WarningKind(
    "rank-unexpected",
    Severity.WARNING,
    "Rank {rank} reports, but the deployment has only {world_size}; sums over ranks count it too.",
    "Give this deployment a state directory of its own.",
)
CONVERSION_INCOMPLETE = WarningKind(
    "conversion-incomplete",
    Severity.CRITICAL,
    "The deployment serves although {missing} expected conversions were not reported.",
    "Do not trust its answers; /conversion lists what is missing; restart it.",
)
JOURNAL_FAULT = WarningKind(
    "journal-fault",
    Severity.WARNING,
    "The state directory's {file} {why}; it is left out of everything the sidecar tells.",
    "Remove the file, or give this deployment a state directory of its own.",
)

KINDS = tuple(value for value in list(globals().values()) if isinstance(value, WarningKind))
"""Every kind of warning, in the order above."""


@dataclass(frozen=True)
class Matter:
    """A warning, with a mark of what an acknowledgement of it is about."""

    advice: Advice
    about: str


def warnings_view(
    journal: Journal,
    health: EngineHealth | None,
    now: datetime,
    acknowledgements: Acknowledgements = NONE_GIVEN,
) -> Warnings:
    """What ``/warnings`` answers; ``health`` is the engine's last answer, if it was asked."""
    found = matters(journal, health, now)
    return Warnings(
        warnings=[
            one.advice.model_copy(update={"acknowledged": acknowledgements.of(one.advice.id, one.about)})
            for one in found
        ]
    )


def matters(journal: Journal, health: EngineHealth | None, now: datetime) -> list[Matter]:
    """Every warning that stands, each id once."""
    found: dict[str, Matter] = {}
    for one in _matters(journal, health, now):
        found.setdefault(one.advice.id, one)
    return list(found.values())


def _matters(journal: Journal, health: EngineHealth | None, now: datetime) -> Iterator[Matter]:
    supervisor = journal.supervisor
    if supervisor is None:
        yield _matter(SUPERVISOR_MISSING, None)
    else:
        yield from _of_weights(journal, supervisor)
        yield from _of_life(journal, supervisor, health, now)
        yield from _of_ranks(journal, supervisor, now)
    for failure in journal.failures:
        yield _matter(
            ENGINE_FAILURE,
            failure.at,
            part=failure.pid,
            pid=failure.pid,
            what=failure.what.rstrip("."),
            remedy=failure.remedy,
        )
    if journal.unwritable is not None:
        yield _matter(STATE_UNWRITABLE, None, why=journal.unwritable)
    for fault in journal.faults:
        yield _matter(JOURNAL_FAULT, None, part=_word(fault.file), file=fault.file, why=fault.why)


def _of_weights(journal: Journal, supervisor: SupervisorRecord) -> Iterator[Matter]:
    if supervisor.weights.lossy and supervisor.ending is None:
        way = supervisor.requantisation
        yield _matter(
            LOSSY_WEIGHTS,
            supervisor.started_at,
            about=f"{supervisor.checkpoint.model_dump_json()} {way.model_dump_json() if way else ''}",
            how="unknown how" if way is None else str(way),
            figures=_figures(journal),
        )
        if supervisor.consent is None:
            yield _matter(CONSENT_MISSING, supervisor.started_at)
    refused = [record for record in journal.ranks if record.summary().signs_refused]
    if refused and supervisor.ending is None:
        yield _matter(SIGNS_REFUSED, None, about=str(refused[0].backend), backend=refused[0].backend)
    for record in journal.ranks:
        if record.weights is not supervisor.weights:
            yield _matter(
                WEIGHTS_MISMATCH,
                None,
                part=record.rank,
                rank=record.rank,
                found=record.weights,
                asked=supervisor.weights,
            )


def _figures(journal: Journal) -> str:
    """The loss so far, as the end of a sentence."""
    error = relative_mse(one for record in journal.ranks for one in record.conversions)
    return "" if error is None else f"; relative squared error so far {error:.5f}"


def _of_life(
    journal: Journal, supervisor: SupervisorRecord, health: EngineHealth | None, now: datetime
) -> Iterator[Matter]:
    ending = supervisor.ending
    if ending is None and journal.unwritable is None and not is_fresh(supervisor, now):
        yield _matter(SUPERVISOR_STALE, supervisor.updated_at)
    if ending is None and supervisor.stalled_since is not None:
        yield _matter(ENGINE_STALLED, supervisor.stalled_since)
    for notice in supervisor.notices if ending is None else ():
        yield _matter(
            PREFLIGHT_NOTICE,
            supervisor.started_at,
            part=_word(notice.check),
            about=notice.what,
            what=notice.what.rstrip("."),
            remedy=notice.remedy.rstrip("."),
        )
    if ending is not None and ending.exit_code != 0:
        yield _matter(
            DEPLOYMENT_FAILED,
            ending.at,
            about=supervisor.start_id,
            exit_code=ending.exit_code,
            reason=ending.reason.rstrip("."),
        )
    if ending is None and supervisor.phase is Phase.READY and health is not None and not health.healthy:
        yield _matter(ENGINE_UNHEALTHY, health.since, detail=health.detail)


def _of_ranks(journal: Journal, supervisor: SupervisorRecord, now: datetime) -> Iterator[Matter]:
    began = loading_began(supervisor)
    silence = seconds_between(began, now)
    expected = set(supervisor.ranks_known if supervisor.ranks_report else ())
    missing = sorted(expected - {record.rank for record in journal.ranks})
    if missing and supervisor.ending is None and silence is not None and silence > RANK_GRACE_SECONDS:
        yield _matter(
            RANK_MISSING,
            began,
            world_size=supervisor.world_size,
            missing=len(missing),
            ranks=", ".join(map(str, missing)),
        )
    absent = journal.absent_nodes
    if absent and supervisor.ending is None and silence is not None and silence > RANK_GRACE_SECONDS:
        yield _matter(
            NODE_MISSING,
            began,
            nodes=supervisor.nodes,
            missing=len(absent),
            which=", ".join(map(str, absent)),
        )
    for node in silent_nodes(journal, now) if supervisor.ending is None else ():
        yield _matter(NODE_SILENT, node.heard_at, part=node.node, node=node.node)
    for record in journal.ranks:
        if record.rank >= supervisor.world_size:
            yield _matter(
                RANK_UNEXPECTED, None, part=record.rank, rank=record.rank, world_size=supervisor.world_size
            )
    serving = [change.at for change in supervisor.phases if change.phase is Phase.READY]
    if serving and supervisor.phase in (Phase.READY, Phase.DRAINING):
        incomplete = sum(len(entry.ranks) for entry in missing_conversions(journal))
        if incomplete:
            yield _matter(CONVERSION_INCOMPLETE, serving[0], missing=incomplete)


def loading_began(supervisor: SupervisorRecord) -> datetime | None:
    """When the engine's workers were started; ``None`` before."""
    later = [
        change.at
        for change in supervisor.phases
        if Phase.LOADING.position <= change.phase.position <= Phase.DRAINING.position
    ]
    return later[0] if later else None


def _word(text: str) -> str:
    """``text`` as part of an id."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text)[:MAX_WORD]


def _matter(
    kind: WarningKind, since: datetime | None, *, part: object = None, about: str = "", **fields: object
) -> Matter:
    """A warning of ``kind``; ``part`` tells several of a kind apart."""
    advice = Advice(
        id=kind.code if part is None else f"{kind.code}-{part}",
        code=kind.code,
        severity=kind.severity,
        message=kind.text.format(**fields),
        remedy=kind.remedy.format(**fields),
        since=since,
        acknowledgeable=kind.acknowledgeable,
        acknowledged=None,
    )
    return Matter(advice, hashlib.sha256(about.encode()).hexdigest()[:16])
