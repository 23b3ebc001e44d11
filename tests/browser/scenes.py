# SPDX-License-Identifier: Apache-2.0
"""Journals of a deployment at its real size, at the moments that an operator looks at its page."""

from __future__ import annotations

import math
from datetime import datetime, timedelta
from typing import Any

from kimi_k3.journal.models import (
    Canary,
    Ending,
    Explanation,
    FailureRecord,
    Loading,
    MemoryReading,
    PhaseChange,
    ProjectionConversion,
    RankRecord,
)
from kimi_k3.journal.reader import Journal
from kimi_k3.words.phases import Phase
from kimi_k3.words.weights import Projection, Weights
from tests.sidecar.builders import (
    NOW,
    START,
    START_ID,
    at,
    conversion,
    journal,
    lossy_rank,
    lossy_supervisor,
    supervisor,
)

GIB = 2**30
LAYERS = 96
MOE_LAYERS = tuple(range(1, LAYERS))
MINUTES = {
    Phase.PREFLIGHT: 0.0,
    Phase.LOADING: 0.6,
    Phase.CONVERTING: 13.0,
    Phase.COMPILING: 15.5,
    Phase.CAPTURING: 17.0,
    Phase.WARMING: 18.0,
    Phase.READY: 18.5,
}
CHECKPOINT = supervisor().checkpoint.model_copy(
    update={
        "total_bytes": 1453 * GIB,
        "shards": 96,
        "decoder_layers": LAYERS,
        "moe_layers": MOE_LAYERS,
        "experts": 896,
    }
)


def loading(world_size: int = 8) -> Journal:
    """43 % of the checkpoint is read, one rank lags."""
    return _deployment(Phase.LOADING, now=at(9.6), world_size=world_size, read=0.443)


def converting(world_size: int = 8) -> Journal:
    """Half of the layers are converted; the last of them on some ranks only."""
    return _deployment(Phase.CONVERTING, now=at(14.2), world_size=world_size, layers=48)


def ready(world_size: int = 8) -> Journal:
    """Serving, with int4 experts."""
    canary = Canary(at=at(18.4), seconds=0.8, completion_tokens=8)
    return _deployment(Phase.READY, now=NOW, world_size=world_size, layers=LAYERS, canary=canary)


def failed(world_size: int = 8) -> Journal:
    """Ended by an error that the diagnosis knows, while compiling."""
    changes = (*_changes(Phase.COMPILING), PhaseChange(phase=Phase.FAILED, at=at(16)))
    ending = Ending(
        at=at(16),
        exit_code=71,
        reason="out of device memory while profiling",
        explanation=Explanation(
            name="device-out-of-memory",
            cause="The weights and the profiling run need more memory than the device has.",
            remedy="lower --gpu-memory-utilization or --max-model-len",
            line=1234,
            text="torch.OutOfMemoryError: HIP out of memory. Tried to allocate 3.50 GiB",
        ),
    )
    seen = _deployment(
        Phase.COMPILING, now=at(16), world_size=world_size, layers=LAYERS, phases=changes, ending=ending
    )
    failure = FailureRecord(
        start_id=START_ID,
        pid=4711,
        at=at(15.9),
        what="rank 3 ran out of device memory",
        remedy="look whether another process holds memory on device 3",
    )
    return journal(seen.supervisor, *seen.ranks, failures=(failure,))


def again(world_size: int = 8) -> Journal:
    """Loading once more, after a start that failed."""
    seen, before = loading(world_size), failed(world_size)
    assert seen.supervisor is not None
    assert before.supervisor is not None
    record = seen.supervisor.model_copy(update={"previous": before.supervisor.as_earlier()})
    return journal(record, *seen.ranks)


def stale(world_size: int = 8) -> Journal:
    """As while loading, but the supervisor fell silent 40 s ago."""
    seen = loading(world_size)
    assert seen.supervisor is not None
    silent = seen.supervisor.model_copy(update={"updated_at": NOW - timedelta(seconds=40)})
    return journal(silent, *seen.ranks)


def lossless() -> Journal:
    """Serving the checkpoint's own values."""
    canary = Canary(at=at(18.4), seconds=0.8, completion_tokens=8)
    seen = _deployment(
        Phase.READY, now=NOW, world_size=8, canary=canary, weights=Weights.MXFP4, requantisation=None
    )
    assert seen.supervisor is not None
    ranks = [
        one.model_copy(update={"weights": Weights.MXFP4, "requantisation": None, "conversions": ()})
        for one in seen.ranks
    ]
    return journal(seen.supervisor.model_copy(update={"consent": None}), *ranks)


def _changes(last: Phase) -> tuple[PhaseChange, ...]:
    return tuple(
        PhaseChange(phase=phase, at=at(minute))
        for phase, minute in MINUTES.items()
        if phase.position <= last.position
    )


def _deployment(
    phase: Phase, *, now: datetime, world_size: int, read: float = 1.0, layers: int = 0, **changes: Any
) -> Journal:
    """The clock of the tests stands still at ``NOW``: the story is moved so that it is ``now`` then."""
    given: dict[str, Any] = {
        "checkpoint": CHECKPOINT,
        "world_size": world_size,
        "phases": _changes(phase),
        "canary": None,
    }
    record = lossy_supervisor(**(given | changes))
    ranks = [
        lossy_rank(
            number,
            phases=tuple(
                change for change in _changes(phase) if change.phase.position >= Phase.LOADING.position
            ),
            loading=_loading(read * (0.72 if number == 5 and read < 1 else 1.0)),
            conversions=_conversions(number, layers),
            memory=MemoryReading(
                kind="device",
                used_bytes=int((40 + 160 * read + number % 3) * GIB),
                peak_bytes=int((50 + 165 * read) * GIB),
                total_bytes=256 * GIB,
            ),
        )
        for number in range(world_size)
    ]
    return _moved(journal(record, *ranks), NOW - now)


def _loading(read: float) -> Loading:
    return Loading(
        bytes_done=int(CHECKPOINT.total_bytes * read),
        bytes_total=CHECKPOINT.total_bytes,
        shards_done=int(CHECKPOINT.shards * read),
        shards_total=CHECKPOINT.shards,
        began_at=at(1.5),
    )


def _conversions(rank: int, layers: int) -> tuple[ProjectionConversion, ...]:
    done = [
        (layer, projection) for layer in MOE_LAYERS if layer <= layers - rank % 3 for projection in Projection
    ]
    if layers == LAYERS:
        done = [(layer, projection) for layer in MOE_LAYERS for projection in Projection]
    return tuple(
        conversion(layer, projection, squared_error=_error(layer, projection), max_error=0.031)
        for layer, projection in done
    )


def _error(layer: int, projection: Projection) -> float:
    """In hundredths of the energy: nearly even, with one layer that stands out."""
    if (layer, projection) == (61, Projection.W2):
        return 2.1
    return 0.46 + 0.05 * math.sin(layer / 5) + (0.07 if projection is Projection.W2 else 0.0) + layer / 900


def _moved(seen: Journal, by: timedelta) -> Journal:
    """The whole story, later by ``by``."""

    def later(changes: tuple[PhaseChange, ...]) -> tuple[PhaseChange, ...]:
        return tuple(change.model_copy(update={"at": change.at + by}) for change in changes)

    record = seen.supervisor
    assert record is not None
    update: dict[str, Any] = {"started_at": START + by, "phases": later(record.phases)}
    if record.canary is not None:
        update["canary"] = record.canary.model_copy(update={"at": record.canary.at + by})
    if record.ending is not None:
        update["ending"] = record.ending.model_copy(update={"at": record.ending.at + by})
    ranks: list[RankRecord] = []
    for one in seen.ranks:
        assert one.loading is not None
        assert one.loading.began_at is not None
        moved_loading = one.loading.model_copy(update={"began_at": one.loading.began_at + by})
        ranks.append(one.model_copy(update={"phases": later(one.phases), "loading": moved_loading}))
    return journal(record.model_copy(update=update), *ranks)
