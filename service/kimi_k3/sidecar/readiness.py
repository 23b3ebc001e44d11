# SPDX-License-Identifier: Apache-2.0
"""Whether traffic may come (``/readyz``): every condition, or the list of those that do not hold.

A supervisor that no longer reports watches nobody: vLLM's ``/health`` answers 200 over a core that hangs.
Where the state directory has become full or read-only under an engine that serves, though, an old record is
only a warning, and whether it serves is asked of the engine itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from enum import StrEnum

from pydantic import Field

from kimi_k3.journal.models import SUPERVISOR_FILE
from kimi_k3.journal.reader import Journal
from kimi_k3.sidecar.arithmetic import is_fresh, silent_nodes
from kimi_k3.sidecar.view import EngineHealth, View
from kimi_k3.words.phases import ENDED, Phase

RETRY_AFTER_SECONDS = 5
"""What ``Retry-After`` tells a client that came too early, in seconds."""


class ReasonCode(StrEnum):
    """Why traffic may not come; stable, for machines."""

    SUPERVISOR_MISSING = "supervisor-missing"
    SUPERVISOR_STALE = "supervisor-stale"
    STARTING = "starting"
    DRAINING = "draining"
    ENDED = "ended"
    CANARY_MISSING = "canary-missing"
    NODE_MISSING = "node-missing"
    NODE_SILENT = "node-silent"
    NODE_STOPS = "node-stops"
    NODE_STALLED = "node-stalled"
    FIRST_NODE_SILENT = "first-node-silent"
    ENGINE_UNKNOWN = "engine-unknown"
    ENGINE_UNHEALTHY = "engine-unhealthy"
    ENGINE_STALLED = "engine-stalled"


class Reason(View):
    """One condition that does not hold."""

    code: ReasonCode = Field(description="Stable code.")
    message: str = Field(description="The same in a sentence.")


class Readiness(View):
    """Whether traffic may come."""

    ready: bool = Field(description="Whether every condition holds (status 200).")
    phase: Phase | None = Field(description="Present phase; null without a supervisor's record.")
    reasons: list[Reason] = Field(description="Conditions that do not hold; empty when ready.")
    engine: EngineHealth | None = Field(description="The engine's answer just now; null when not asked.")


def readiness_view(journal: Journal, health: EngineHealth | None, now: datetime) -> Readiness:
    """What ``/readyz`` answers; ``health`` is the engine's answer just now."""
    reasons = journal_reasons(journal, now)
    if journal.supervisor is not None and not journal.supervisor.headless:
        if health is None:
            reasons.append(Reason(code=ReasonCode.ENGINE_UNKNOWN, message="The engine was not asked."))
        elif not health.healthy:
            reasons.append(
                Reason(
                    code=ReasonCode.ENGINE_UNHEALTHY, message=f"The engine is not healthy: {health.detail}."
                )
            )
    return Readiness(
        ready=not reasons,
        phase=journal.supervisor.phase if journal.supervisor else None,
        reasons=reasons,
        engine=health,
    )


def journal_reasons(journal: Journal, now: datetime) -> list[Reason]:
    """The conditions that the journal alone shows not to hold."""
    supervisor = journal.supervisor
    if supervisor is None:
        distrust = [f"{fault.file} {fault.why}" for fault in journal.faults if fault.file == SUPERVISOR_FILE]
        why = distrust[0] if distrust else f"there is no {SUPERVISOR_FILE}"
        return [
            Reason(
                code=ReasonCode.SUPERVISOR_MISSING,
                message=f"The state directory holds no supervisor's record: {why}.",
            )
        ]
    reasons = []
    phase = supervisor.phase
    if supervisor.ending is not None or phase in ENDED:
        why = f": {supervisor.ending.reason}" if supervisor.ending else ""
        reasons.append(Reason(code=ReasonCode.ENDED, message=f"The deployment has ended{why}."))
    elif phase is Phase.DRAINING:
        reasons.append(
            Reason(
                code=ReasonCode.DRAINING, message="The deployment finishes its requests and takes no more."
            )
        )
    elif phase is not Phase.READY:
        reasons.append(
            Reason(code=ReasonCode.STARTING, message=f"The deployment is {phase}: {phase.description}.")
        )
    if supervisor.ending is None and journal.unwritable is None and not is_fresh(supervisor, now):
        reasons.append(
            Reason(
                code=ReasonCode.SUPERVISOR_STALE,
                message="The supervisor no longer reports: it hangs, it was killed, or it may not write the "
                "state directory.",
            )
        )
    if supervisor.stalled_since is not None and phase not in ENDED:
        reasons.append(
            Reason(
                code=ReasonCode.ENGINE_STALLED,
                message="Requests make no progress, or one of the engine's processes is stopped.",
            )
        )
    reasons += _of_nodes(journal, now)
    canary = supervisor.canary
    if supervisor.headless:
        if supervisor.leader_silent_since is not None:
            reasons.append(
                Reason(
                    code=ReasonCode.FIRST_NODE_SILENT,
                    message="The first node no longer tells how it does, and it serves the API.",
                )
            )
        # The first node asked, and its answer is why this one's phase is ready.
        return reasons
    if canary is None or canary.at < supervisor.started_at:
        reasons.append(
            Reason(
                code=ReasonCode.CANARY_MISSING,
                message="No canary completion has succeeded since this start.",
            )
        )
    return reasons


def _of_nodes(journal: Journal, now: datetime) -> Iterator[Reason]:
    """What the other nodes have told the first one, or have not."""
    if absent := journal.absent_nodes:
        listed = ", ".join(map(str, absent))
        yield Reason(code=ReasonCode.NODE_MISSING, message=f"Node {listed} has not joined.")
    for node in silent_nodes(journal, now):
        yield Reason(code=ReasonCode.NODE_SILENT, message=f"Node {node.node} no longer tells how it does.")
    for node in journal.nodes:
        if node.superseded or node.supervisor.phase in (Phase.DRAINING, *ENDED):
            yield Reason(
                code=ReasonCode.NODE_STOPS, message=f"Node {node.node} stops, or has ended or begun anew."
            )
        elif node.supervisor.stalled_since is not None:
            yield Reason(code=ReasonCode.NODE_STALLED, message=f"A process of node {node.node} is stopped.")
