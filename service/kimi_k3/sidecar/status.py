# SPDX-License-Identifier: Apache-2.0
"""Everything at a glance (``/status``)."""

from __future__ import annotations

import platform
from datetime import datetime

from pydantic import Field

from kimi_k3 import __version__
from kimi_k3.journal.models import (
    SCHEMA_VERSION,
    Canary,
    CheckpointSummary,
    EarlierStart,
    Ending,
    SupervisorRecord,
)
from kimi_k3.journal.reader import Journal
from kimi_k3.sidecar.arithmetic import is_fresh, seconds_between, silent_nodes
from kimi_k3.sidecar.conversion import served_lossy
from kimi_k3.sidecar.startup import describe, elapsed_seconds, phase_fraction
from kimi_k3.sidecar.view import EngineHealth, PhaseSpan, View, phase_spans, present_phase, rank_phases
from kimi_k3.words.phases import Phase
from kimi_k3.words.weights import ConsentSource, ScaleRule, Weights


class Deployment(View):
    """What the supervisor says of the present start."""

    start_id: str = Field(description="Names this start; every file of it carries the same.")
    pid: int = Field(description="Process id of the supervisor, in its own namespace.")
    started_at: datetime
    updated_at: datetime = Field(description="Last heartbeat of the supervisor.")
    age_seconds: float | None = Field(description="Seconds since that heartbeat.")
    fresh: bool = Field(description="Whether the supervisor still reports.")
    elapsed_seconds: float | None = Field(description="Since the start, up to now or to its end.")
    profile: str
    checkpoint: CheckpointSummary
    served_model_name: str
    world_size: int = Field(description="Ranks (GPUs) of the deployment.")
    nodes: int = Field(description="Nodes of the deployment.")
    node: int = Field(description="Which of them answers here; the first one, 0, speaks for all.")
    hardware: str | None = Field(description="What this node computes on, in words; null if unknown.")
    versions: dict[str, str] = Field(description="Versions of what computes, by distribution.")
    canary: Canary | None = Field(description="The completion that proved that this start can answer.")
    ending: Ending | None = Field(description="How the start ended; null while it lives.")
    previous: EarlierStart | None = Field(
        description="How the start before went: its last phase, the one it had reached, its ending (null if "
        "its supervisor was killed). Null if there was none."
    )


class ServedWeights(View):
    """What the experts are served as."""

    weights: Weights
    lossy: bool | None = Field(description="Whether they differ from the checkpoint's values.")
    consent: ConsentSource | None = Field(description="Where the consent to that came from.")
    scale_rule: ScaleRule | None = Field(description="How a group's int4 scale is chosen.")


class Engine(View):
    """The vLLM that the supervisor started."""

    url: str | None = Field(description="Of its API; null on a node that has none.")
    pid: int | None = Field(description="Process id, in the supervisor's namespace.")
    health: EngineHealth | None = Field(description="Its answer just now; null when it was not asked.")


class RankStatus(View):
    """One rank (one GPU's worker)."""

    rank: int
    pid: int
    phase: Phase | None
    weights: Weights
    backend: str | None = Field(description="Which kernels compute its experts; null until it has chosen.")
    updated_at: datetime = Field(description="When it last reported; it does so on progress only.")
    history: list[PhaseSpan]


class NodeStatus(View):
    """Another node, as it last told the first one."""

    node: int
    start_id: str = Field(description="Names that node's own start.")
    phase: Phase
    heard_at: datetime = Field(description="When it last told how it does.")
    fresh: bool = Field(description="Whether it still does.")
    ending: Ending | None


class Failure(View):
    """A failure that one of the engine's processes reported before it gave up."""

    pid: int
    at: datetime
    what: str
    remedy: str


class UntrustedFile(View):
    """A file of the state directory that was left out."""

    file: str
    why: str


class Versions(View):
    """Versions of what answers."""

    kimi_k3: str = Field(description="Version of this package, as the sidecar runs it.")
    python: str
    journal: int = Field(description="Version of the records that this sidecar understands.")


class Status(View):
    """Everything at a glance; null is what nobody has reported."""

    phase: Phase | None = Field(description="Present phase; null without a supervisor's record.")
    description: str | None = Field(description="What happens in this phase.")
    fraction: float | None = Field(description="Progress of the present phase, 0 to 1; see /startupz.")
    history: list[PhaseSpan] = Field(description="Phases so far, the present one last.")
    deployment: Deployment | None
    weights: ServedWeights | None
    engine: Engine | None
    ranks: list[RankStatus] = Field(description="Ranks that have reported.")
    nodes: list[NodeStatus] = Field(description="The other nodes that have joined; only the first one knows.")
    failures: list[Failure] = Field(description="Failures that the engine reported, oldest first.")
    faults: list[UntrustedFile] = Field(description="Files of the state directory that were left out.")
    versions: Versions


def status_view(journal: Journal, health: EngineHealth | None, now: datetime) -> Status:
    """What ``/status`` answers; ``health`` is the engine's answer just now, if it was asked."""
    supervisor = journal.supervisor
    return Status(
        phase=supervisor.phase if supervisor else None,
        description=describe(supervisor) if supervisor else None,
        fraction=phase_fraction(supervisor, journal.ranks) if supervisor else None,
        history=phase_spans(supervisor.phases, now) if supervisor else [],
        deployment=_deployment(supervisor, now) if supervisor else None,
        weights=_weights(supervisor, served_lossy(journal)) if supervisor else None,
        engine=_engine(supervisor, health) if supervisor else None,
        ranks=[
            RankStatus(
                rank=record.rank,
                pid=record.pid,
                phase=present_phase(rank_phases(record, supervisor)),
                weights=record.weights,
                backend=record.backend,
                updated_at=record.updated_at,
                history=phase_spans(rank_phases(record, supervisor), now),
            )
            for record in journal.ranks
        ],
        nodes=[
            NodeStatus(
                node=record.node,
                start_id=record.supervisor.start_id,
                phase=record.supervisor.phase,
                heard_at=record.heard_at,
                fresh=record not in silent_nodes(journal, now),
                ending=record.supervisor.ending,
            )
            for record in journal.nodes
        ],
        failures=[
            Failure(pid=failure.pid, at=failure.at, what=failure.what, remedy=failure.remedy)
            for failure in journal.failures
        ],
        faults=[UntrustedFile(file=fault.file, why=fault.why) for fault in journal.faults],
        versions=Versions(kimi_k3=__version__, python=platform.python_version(), journal=SCHEMA_VERSION),
    )


def _deployment(supervisor: SupervisorRecord, now: datetime) -> Deployment:
    return Deployment(
        start_id=supervisor.start_id,
        pid=supervisor.pid,
        started_at=supervisor.started_at,
        updated_at=supervisor.updated_at,
        age_seconds=seconds_between(supervisor.updated_at, now),
        fresh=is_fresh(supervisor, now),
        elapsed_seconds=elapsed_seconds(supervisor, now),
        profile=supervisor.profile,
        checkpoint=supervisor.checkpoint,
        served_model_name=supervisor.served_model_name,
        world_size=supervisor.world_size,
        nodes=supervisor.nodes,
        node=supervisor.node,
        hardware=supervisor.hardware,
        versions=supervisor.versions,
        canary=supervisor.canary,
        ending=supervisor.ending,
        previous=supervisor.previous,
    )


def _weights(supervisor: SupervisorRecord, lossy: bool | None) -> ServedWeights:
    return ServedWeights(
        weights=supervisor.weights,
        lossy=lossy,
        consent=supervisor.consent,
        scale_rule=supervisor.requantisation and supervisor.requantisation.rule,
    )


def _engine(supervisor: SupervisorRecord, health: EngineHealth | None) -> Engine:
    return Engine(url=supervisor.engine_url, pid=supervisor.engine_pid, health=health)
