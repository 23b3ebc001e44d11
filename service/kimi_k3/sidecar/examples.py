# SPDX-License-Identifier: Apache-2.0
"""Examples for the API's description, computed from a small made-up journal so that they stay true."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from kimi_k3.host import CgroupMemory, HostMemory, MachineMemory
from kimi_k3.journal.models import (
    Canary,
    CheckpointSummary,
    Loading,
    MemoryReading,
    PhaseChange,
    ProjectionConversion,
    RankRecord,
    SupervisorRecord,
)
from kimi_k3.journal.reader import Journal
from kimi_k3.sidecar.view import EngineHealth, EngineOutcome
from kimi_k3.words.phases import Phase
from kimi_k3.words.weights import ConsentSource, Projection, Requantisation, ScaleRule, Weights

START = datetime(2026, 1, 1, 8, 0, tzinfo=UTC)
NOW = START + timedelta(minutes=30)
GIB = 2**30
REQUANTISATION = Requantisation(rule=ScaleRule.MSE, negative_scale=True, allow_nonfinite=False)

MACHINE = MachineMemory(
    host=HostMemory(total_bytes=2048 * GIB, available_bytes=1700 * GIB, shmem_bytes=12 * GIB),
    cgroup=CgroupMemory(
        version=2,
        path="/",
        limited=True,
        limit_bytes=1024 * GIB,
        used_bytes=310 * GIB,
        peak_bytes=420 * GIB,
        shmem_bytes=12 * GIB,
        oom_kills=0,
    ),
    cgroup_use=None,
    devices=(),
)
HEALTHY = EngineHealth(
    outcome=EngineOutcome.HEALTHY,
    status_code=200,
    detail="http://127.0.0.1:8000/health answered 200",
    checked_at=NOW,
    seconds=0.004,
    since=START + timedelta(minutes=12),
)
REFUSED = EngineHealth(
    outcome=EngineOutcome.UNREACHABLE,
    status_code=None,
    detail="http://127.0.0.1:8000/health cannot be reached: connection refused",
    checked_at=NOW,
    seconds=0.001,
    since=START,
)

_MINUTES = {
    Phase.PREFLIGHT: 0.0,
    Phase.LOADING: 0.5,
    Phase.CONVERTING: 9.0,
    Phase.COMPILING: 10.0,
    Phase.WARMING: 11.0,
    Phase.READY: 12.0,
}


def example_journal(phase: Phase = Phase.READY) -> Journal:
    """A deployment of two ranks and one layer with experts, in ``phase``; int4, with consent."""
    changes = tuple(
        PhaseChange(phase=one, at=START + timedelta(minutes=minutes))
        for one, minutes in _MINUTES.items()
        if one.position <= phase.position
    )
    supervisor = SupervisorRecord(
        start_id="20260101T080000Z-7",
        pid=7,
        started_at=START,
        updated_at=NOW,
        profile="tp8",
        checkpoint=CheckpointSummary(
            name="kimi-k3",
            total_bytes=1453 * GIB,
            shards=96,
            decoder_layers=2,
            moe_layers=(1,),
            experts=896,
        ),
        served_model_name="kimi-k3",
        weights=Weights.INT4,
        requantisation=REQUANTISATION,
        consent=ConsentSource.FLAG,
        world_size=2,
        engine_url="http://127.0.0.1:8000",
        engine_pid=19,
        phases=changes,
        canary=Canary(at=START + timedelta(minutes=12), seconds=0.8, completion_tokens=8)
        if phase is Phase.READY
        else None,
    )
    return Journal(
        supervisor=supervisor,
        ranks=tuple(_rank(rank, changes, done=phase.position > Phase.CONVERTING.position) for rank in (0, 1)),
        failures=(),
        faults=(),
    )


def _rank(rank: int, changes: tuple[PhaseChange, ...], *, done: bool) -> RankRecord:
    return RankRecord(
        start_id="20260101T080000Z-7",
        rank=rank,
        pid=23 + rank,
        updated_at=START + timedelta(minutes=10),
        weights=Weights.INT4,
        requantisation=REQUANTISATION,
        phases=changes[1:],
        loading=Loading(
            bytes_done=1453 * GIB if done else 700 * GIB,
            bytes_total=1453 * GIB,
            shards_done=96 if done else 46,
            shards_total=96,
        ),
        conversions=tuple(_conversion(projection) for projection in Projection) if done else (),
        memory=MemoryReading(
            kind="device", used_bytes=201 * GIB, peak_bytes=214 * GIB, total_bytes=256 * GIB
        ),
    )


def _conversion(projection: Projection) -> ProjectionConversion:
    begin = START + timedelta(minutes=9, seconds=0 if projection is Projection.W13 else 4)
    return ProjectionConversion(
        layer=1,
        projection=projection,
        started_at=begin,
        ended_at=begin + timedelta(seconds=4),
        experts=448,
        bytes_read=2 * GIB,
        bytes_written=2 * GIB,
        groups=120_000_000,
        lossless_groups=31_000_000,
        zero_groups=0,
        nonfinite_groups=0,
        clamped_groups=0,
        squared_error=41.5,
        energy=9100.0,
        max_error=0.031,
        worst_expert=0,
        worst_expert_relative_mse=0.005,
        memory_before=MemoryReading(kind="device", used_bytes=203 * GIB),
        memory_after=MemoryReading(kind="device", used_bytes=201 * GIB),
    )
