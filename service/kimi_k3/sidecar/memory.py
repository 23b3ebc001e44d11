# SPDX-License-Identifier: Apache-2.0
"""Where the memory is (``/memory``): rank by rank, over the conversion, and on the machine."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from pydantic import Field

from kimi_k3.host import CgroupMemory, CgroupUse, DeviceMemory, HostMemory, MachineMemory
from kimi_k3.journal.models import (
    MemoryReading,
    PlannedMemory,
    ProjectionConversion,
    RankRecord,
    SupervisorRecord,
)
from kimi_k3.journal.reader import Journal
from kimi_k3.sidecar.view import View
from kimi_k3.words.phases import Phase
from kimi_k3.words.weights import Projection


class ConversionMemory(View):
    """Memory of a rank before and after one layer projection was converted."""

    layer: int
    projection: Projection
    started_at: datetime
    ended_at: datetime
    before: MemoryReading | None
    after: MemoryReading | None


class ActualMemory(View):
    """What a rank has of what was planned, in bytes; null is what nobody measured."""

    weights_bytes: int | None = Field(
        description="Allocated on the device once the weights were in place; null before, and on a CPU."
    )
    kv_cache_bytes: int | None = Field(description="What vLLM announced; of the smallest rank.")
    peak_bytes: int | None = Field(description="The most that was allocated so far.")
    used_bytes: int | None = Field(description="Allocated at the last reading.")
    free_bytes: int | None = Field(description="Of the device's memory, what was not.")


class RankMemory(View):
    """Memory of one rank (one GPU's worker)."""

    rank: int
    updated_at: datetime
    planned: PlannedMemory | None = Field(description="By the plan; null where nothing was planned.")
    actual: ActualMemory
    reading: MemoryReading | None = Field(
        description="Last reading; kind device: the accelerator, host: the process's resident set."
    )
    conversions: list[ConversionMemory] = Field(description="In the order in which they were converted.")


class Group(CgroupMemory):
    """The control group, and what its memory is used for."""

    use: CgroupUse


class Memory(View):
    """Where the memory is; null is what nobody measured."""

    ranks: list[RankMemory] = Field(description="Ranks that have reported.")
    devices: list[DeviceMemory] = Field(
        description="The GPUs by their driver, whoever uses them; empty where the sidecar sees none."
    )
    host: HostMemory = Field(description="The machine that the sidecar runs on.")
    cgroup: Group | None = Field(description="The sidecar's control group; null when not visible.")


def memory_view(journal: Journal, machine: MachineMemory, *, conversions: bool = True) -> Memory:
    """What ``/memory`` answers; without ``conversions`` only what stands now."""
    group = machine.cgroup
    nothing = CgroupUse(anon=None, file=None, shmem=None)
    return Memory(
        ranks=[
            _rank(record, journal.supervisor, record.conversions if conversions else ())
            for record in journal.ranks
        ],
        devices=list(machine.devices),
        host=machine.host,
        cgroup=None if group is None else Group(**group.model_dump(), use=machine.cgroup_use or nothing),
    )


def _rank(
    record: RankRecord, supervisor: SupervisorRecord | None, conversions: Sequence[ProjectionConversion]
) -> RankMemory:
    return RankMemory(
        rank=record.rank,
        updated_at=record.updated_at,
        planned=supervisor.planned if supervisor else None,
        actual=_actual(record, supervisor),
        reading=record.memory,
        conversions=[
            ConversionMemory(
                layer=one.layer,
                projection=one.projection,
                started_at=one.started_at,
                ended_at=one.ended_at,
                before=one.memory_before,
                after=one.memory_after,
            )
            for one in conversions
            if one.memory_before is not None or one.memory_after is not None
        ],
    )


def _actual(record: RankRecord, supervisor: SupervisorRecord | None) -> ActualMemory:
    reading = record.memory
    in_place = record.phase is not None and record.phase.position >= Phase.COMPILING.position
    on_device = reading is not None and reading.kind == "device"
    used = reading.used_bytes if reading else None
    total = reading.total_bytes if reading else None
    kv_cache = supervisor.kv_cache_bytes if supervisor else None
    weights = _weights(record, used, nothing_else=kv_cache is None) if in_place and on_device else None
    return ActualMemory(
        weights_bytes=weights,
        kv_cache_bytes=kv_cache,
        peak_bytes=reading.peak_bytes if reading else None,
        used_bytes=used,
        free_bytes=None if used is None or total is None else max(0, total - used),
    )


def _weights(record: RankRecord, used: int | None, *, nothing_else: bool) -> int | None:
    """What was allocated once all weights were in place: after the last conversion, or before all else."""
    measured = [one for one in record.conversions if one.memory_after is not None]
    if measured:
        last = max(measured, key=lambda one: one.ended_at).memory_after
        return None if last is None else last.used_bytes
    return used if nothing_else else None
