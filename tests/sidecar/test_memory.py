# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

from kimi_k3.host import Places, read_machine_memory
from kimi_k3.journal.models import MemoryReading
from kimi_k3.sidecar.memory import memory_view
from kimi_k3.words.weights import Projection

from .builders import conversion, journal, lossy_rank, lossy_supervisor

BEFORE = MemoryReading(kind="device", used_bytes=30)
AFTER = MemoryReading(kind="device", used_bytes=20)


def test_history_over_the_conversion(tmp_path: Path) -> None:
    """Conversions that were not measured are left out, those measured on one side are kept."""
    conversions = (
        conversion(1, Projection.W13, memory_before=BEFORE, memory_after=AFTER),
        conversion(1, Projection.W2),
        conversion(2, Projection.W13, memory_after=AFTER),
    )
    seen = journal(lossy_supervisor(), lossy_rank(0, conversions=conversions, memory=AFTER))
    view = memory_view(seen, read_machine_memory(Places(tmp_path, tmp_path, tmp_path)))
    [one] = view.ranks
    assert one.reading == AFTER
    assert [(step.layer, step.before, step.after) for step in one.conversions] == [
        (1, BEFORE, AFTER),
        (2, None, AFTER),
    ]


def test_nothing_measured(tmp_path: Path) -> None:
    """Every number is null on a machine that tells nothing."""
    seen = journal(lossy_supervisor(), lossy_rank(0))
    view = memory_view(seen, read_machine_memory(Places(tmp_path, tmp_path, tmp_path)))
    assert (view.ranks[0].reading, view.ranks[0].conversions, view.cgroup) == (None, [], None)
    assert set(view.host.model_dump().values()) == {None}
