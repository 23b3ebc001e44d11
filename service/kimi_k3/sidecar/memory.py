# SPDX-License-Identifier: Apache-2.0
"""Where the memory is (``/memory``): rank by rank, over the conversion, and on the machine."""

from __future__ import annotations

from datetime import datetime

from pydantic import Field

from kimi_k3.host import CgroupMemory, HostMemory
from kimi_k3.journal.models import MemoryReading, RankRecord
from kimi_k3.journal.reader import Journal
from kimi_k3.sidecar.view import View
from kimi_k3.words.weights import Projection


class ConversionMemory(View):
    """Memory of a rank before and after one layer projection was converted."""

    layer: int
    projection: Projection
    started_at: datetime
    ended_at: datetime
    before: MemoryReading | None
    after: MemoryReading | None


class RankMemory(View):
    """Memory of one rank (one GPU's worker)."""

    rank: int
    updated_at: datetime
    reading: MemoryReading | None = Field(
        description="Last reading; kind device: the accelerator, host: the process's resident set."
    )
    conversions: list[ConversionMemory] = Field(description="In the order in which they were converted.")


class Memory(View):
    """Where the memory is; null is what nobody measured."""

    ranks: list[RankMemory] = Field(description="Ranks that have reported.")
    host: HostMemory = Field(description="The machine that the sidecar runs on.")
    cgroup: CgroupMemory | None = Field(description="The sidecar's control group; null when not visible.")


def memory_view(journal: Journal, host: HostMemory, cgroup: CgroupMemory | None) -> Memory:
    """What ``/memory`` answers."""
    return Memory(ranks=[_rank(record) for record in journal.ranks], host=host, cgroup=cgroup)


def _rank(record: RankRecord) -> RankMemory:
    return RankMemory(
        rank=record.rank,
        updated_at=record.updated_at,
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
            for one in record.conversions
            if one.memory_before is not None or one.memory_after is not None
        ],
    )
