# SPDX-License-Identifier: Apache-2.0
"""Small journals to look at: a deployment of two ranks with two layers of experts."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from kimi_k3.journal.models import (
    SUPERVISOR_FILE,
    Canary,
    CheckpointSummary,
    FailureRecord,
    NodeRecord,
    PhaseChange,
    ProjectionConversion,
    RankRecord,
    Record,
    SupervisorRecord,
    failure_file,
    rank_file,
)
from kimi_k3.journal.reader import Fault, Journal
from kimi_k3.journal.writer import write_record
from kimi_k3.sidecar.view import EngineHealth, EngineOutcome
from kimi_k3.words.phases import Phase
from kimi_k3.words.weights import ConsentSource, Projection, Requantisation, ScaleRule, Weights

START = datetime(2026, 5, 1, 12, 0, tzinfo=UTC)
NOW = START + timedelta(minutes=20)
LAYERS = (1, 2)
START_ID = "this-start"
REQUANTISATION = Requantisation(rule=ScaleRule.MSE, negative_scale=True, allow_nonfinite=False)


def at(minutes: float) -> datetime:
    """A moment some minutes after the start."""
    return START + timedelta(minutes=minutes)


def phases(last: Phase) -> tuple[PhaseChange, ...]:
    """The history up to ``last``, one phase a minute."""
    passed = [phase for phase in Phase if Phase.PENDING.position < phase.position <= last.position]
    return tuple(PhaseChange(phase=phase, at=at(minute)) for minute, phase in enumerate(passed))


def supervisor(**changes: Any) -> SupervisorRecord:
    """A ready, lossless, fresh deployment, but for ``changes``."""
    given: dict[str, Any] = {
        "start_id": START_ID,
        "pid": 10,
        "started_at": START,
        "updated_at": NOW,
        "profile": "tp8",
        "checkpoint": CheckpointSummary(
            name="k3",
            total_bytes=1000,
            shards=4,
            decoder_layers=3,
            moe_layers=LAYERS,
            experts=8,
        ),
        "served_model_name": "kimi-k3",
        "weights": Weights.MXFP4,
        "requantisation": None,
        "consent": None,
        "world_size": 2,
        "engine_url": "http://127.0.0.1:1",
        "engine_pid": 11,
        "phases": phases(Phase.READY),
        "canary": Canary(at=at(9), seconds=0.5, completion_tokens=4),
    }
    return SupervisorRecord(**(given | changes))


def node(number: int, *, heard_at: datetime = NOW, superseded: bool = False, **changes: Any) -> NodeRecord:
    """What another node last told the first one."""
    own = supervisor(start_id=f"node{number}", node=number, nodes=3, world_size=3, engine_url=None, **changes)
    return NodeRecord(
        start_id=START_ID, node=number, heard_at=heard_at, superseded=superseded, supervisor=own
    )


def lossy_supervisor(**changes: Any) -> SupervisorRecord:
    """The same with int4 experts and consent."""
    given = {"weights": Weights.INT4, "requantisation": REQUANTISATION, "consent": ConsentSource.FLAG}
    return supervisor(**(given | changes))


def conversion(layer: int, projection: Projection, **changes: Any) -> ProjectionConversion:
    """One conversion of a second, with round numbers."""
    given: dict[str, Any] = {
        "layer": layer,
        "projection": projection,
        "started_at": at(4),
        "ended_at": at(4) + timedelta(seconds=1),
        "experts": 4,
        "bytes_read": 100,
        "bytes_written": 110,
        "groups": 10,
        "lossless_groups": 4,
        "zero_groups": 1,
        "nonfinite_groups": 0,
        "clamped_groups": 0,
        "squared_error": 1.0,
        "energy": 100.0,
        "max_error": 0.5,
        "worst_expert": 3,
        "worst_expert_relative_mse": 0.02,
    }
    return ProjectionConversion(**(given | changes))


def all_conversions() -> tuple[ProjectionConversion, ...]:
    """Everything that a rank of a lossy deployment must convert."""
    return tuple(conversion(layer, projection) for layer in LAYERS for projection in Projection)


def rank(number: int, **changes: Any) -> RankRecord:
    """A rank that is ready and lossless, but for ``changes``."""
    given: dict[str, Any] = {
        "start_id": START_ID,
        "rank": number,
        "pid": 20 + number,
        "updated_at": NOW,
        "weights": Weights.MXFP4,
        "requantisation": None,
        "phases": phases(Phase.READY)[2:],
    }
    return RankRecord(**(given | changes))


def lossy_rank(number: int, **changes: Any) -> RankRecord:
    """The same with int4 experts, all converted."""
    given = {"weights": Weights.INT4, "requantisation": REQUANTISATION, "conversions": all_conversions()}
    return rank(number, **(given | changes))


def journal(
    record: SupervisorRecord | None,
    *ranks: RankRecord,
    failures: tuple[FailureRecord, ...] = (),
    faults: tuple[Fault, ...] = (),
) -> Journal:
    """A journal as the reader gives it."""
    return Journal(supervisor=record, ranks=ranks, failures=failures, faults=faults)


def lossless() -> Journal:
    """A healthy lossless deployment."""
    return journal(supervisor(), rank(0), rank(1))


def lossy() -> Journal:
    """A healthy deployment with int4 experts."""
    return journal(lossy_supervisor(), lossy_rank(0), lossy_rank(1))


def write(directory: Path, seen: Journal) -> None:
    """Write ``seen`` as the supervisor and the workers would."""
    records: list[tuple[str, Record]] = [(rank_file(one.rank), one) for one in seen.ranks]
    records += [(failure_file(one.pid), one) for one in seen.failures]
    if seen.supervisor is not None:
        records.append((SUPERVISOR_FILE, seen.supervisor))
    for name, record in records:
        write_record(directory, name, record)


def health(outcome: EngineOutcome = EngineOutcome.HEALTHY, **changes: Any) -> EngineHealth:
    """An answer of the engine, a second ago."""
    given: dict[str, Any] = {
        "outcome": outcome,
        "status_code": 200 if outcome is EngineOutcome.HEALTHY else None,
        "detail": f"it was {outcome}",
        "checked_at": NOW - timedelta(seconds=1),
        "seconds": 0.01,
        "since": at(8),
    }
    return EngineHealth(**(given | changes))
